// Backward: tiles of keys [key][row], so that a key's values and gradients are touched once.
#pragma once
#include "cpu_call.h"

namespace {

struct BackwardScratch {
  float *inverse, *k, *v, *dk, *dv;                     // the task's keys, [key][cols]
  float *q, *q_panels, *dout, *dout_panels, *out, *dq;  // a block's rows; dout is dout / l
  float *s, *dw;                                        // a tile, [key][ROWS]
  float *w, *r, *slope, *part;                          // the entries that count, key by key
  int32_t* row;
  static constexpr size_t LIST = SPAN * ROWS + 2 * W;
  static size_t size(const Task& t) {
    return t.keys() * (1 + 2 * (t.cols + t.vcols)) + ROWS * (3 * t.cols + 3 * t.vcols) +
           2 * SPAN * ROWS + 5 * LIST + 1024;
  }
  BackwardScratch(Arena& arena, const Task& t) {
    size_t keys = t.keys();
    arena.used = 0;
    inverse = arena.take(keys), k = arena.take(keys * t.cols), v = arena.take(keys * t.vcols);
    dk = arena.take(keys * t.cols), dv = arena.take(keys * t.vcols);
    q = arena.take(ROWS * t.cols), q_panels = arena.take(ROWS * t.cols);
    dq = arena.take(ROWS * t.cols), dout = arena.take(ROWS * t.vcols);
    dout_panels = arena.take(ROWS * t.vcols), out = arena.take(ROWS * t.vcols);
    s = arena.take(SPAN * ROWS), dw = arena.take(SPAN * ROWS);
    w = arena.take(LIST), r = arena.take(LIST), slope = arena.take(LIST), part = arena.take(LIST);
    row = (int32_t*)arena.take(LIST);
  }
};

struct Gradients {  // of each row
  alignas(64) float d[ROWS] = {};     // dOut . out, over l
  alignas(64) float pull[ROWS] = {};  // what is added to every entry's part of ds
  alignas(64) float mean[ROWS] = {};  // RECENTRE: l / N, of the activations
  alignas(64) float slope[ROWS] = {}, cut[ROWS];  // sharpened: p / M, and what counts
};

struct Tile {  // keys [first, first + n) and the rows [from, to), multiples of PANEL, that see some
  int64_t first;
  int n, from, to;
  bool clean;  // they all see all of them
  Tile(const Block& block, int64_t first)
      : first(first), n((int)std::min<int64_t>(SPAN, block.hi_all - first)) {
    int low = block.rows, high = 0;
    clean = true;
    for (int r = 0; r < block.rows; r++) {
      if (block.lo[r] >= block.hi[r] || block.lo[r] >= first + n || block.hi[r] <= first) continue;
      low = std::min(low, r), high = r + 1;
    }
    from = low / PANEL * PANEL, to = (int)round_up(high, PANEL);
    for (int r = from; r < std::min(to, block.rows); r++)
      clean &= block.lo[r] <= first && block.hi[r] >= first + n;
  }
};

// what is not seen: a mask for the rows r .. r + W of one key
inline vi unseen(const Block& block, int r, int64_t key) {
  int32_t j = (int32_t)key;
  return (load(block.lo + r) > j) | (load(block.hi + r) <= j);
}

// [key][row] products of the keys' rows with the panels of the block's
inline void tile_product(const Tile& tile, const float* rows, int64_t ld, const float* panels,
                         int64_t d, float* to) {
  for (int x = 0; x < tile.n; x += MR)
    for (int r = tile.from; r < tile.to; r += PANEL)
      gemm_rows<false>(std::min(MR, tile.n - x), d, rows + x * ld, ld, panels + r * d, PANEL,
                       to + x * ROWS + r, ROWS, PANEL, false);
}

// to[key] += sum over rows of part[key][row] rows[row]
inline void add_to_keys(const Tile& tile, const float* part, const float* rows, int64_t ld,
                        float* to) {
  for (int x = 0; x < tile.n; x += MR)
    gemm_rows<false>(std::min(MR, tile.n - x), tile.to - tile.from, part + x * ROWS + tile.from,
                     ROWS, rows + tile.from * ld, ld, to + x * ld, ld, (int)ld, true);
}

// dq += ds k and dk += ds^T q
void score_gradients(const Block& block, const Tile& tile, const BackwardScratch& at) {
  const Task& task = block.task;
  int64_t key = (tile.first - task.from) * task.cols;
  int rows = std::min(tile.to, block.rows);
  for (int r = tile.from; r < rows; r += MR)
    gemm_rows<true>(std::min(MR, rows - r), tile.n, at.s + r, ROWS, at.k + key, task.cols,
                    at.dq + r * task.cols, task.cols, (int)task.cols, true);
  add_to_keys(tile, at.s, at.q, task.cols, at.dk + key);
}

// --- rows that are not sharpened ----------------------------------------------------------------

template <class Phi>
inline Both plain_activation(vf t, bool l1) {
  if constexpr (std::is_same<Phi, Exp>::value) {
    vf y = l1 ? Exp::below_one(t) : Exp::value(t);
    return {y, y * all(LN_2)};
  } else {
    return Phi::both(t);
  }
}

// D of rows whose keys are all in this tile by its definition, sum_j f dW / sum_j |f|. From `out`,
// which is rounded, it would be too coarse for a row of few keys, where dW - D is close to 0.
template <class Phi>
void sum_whole_plain(const Block& block, const Tile& tile, const BackwardScratch& at,
                     Gradients& g) {
  for (int r = tile.from; r < std::min(tile.to, block.rows); r += W) {
    unsigned whole = lanes((load(block.lo + r) >= (int32_t)tile.first) &
                           (load(block.hi + r) <= (int32_t)(tile.first + tile.n)));
    if (!whole) continue;
    double along[W] = {}, size[W] = {};
    for (int x = 0; x < tile.n; x++) {
      vf f = plain_activation<Phi>(load(at.s + x * ROWS + r) + load(block.shift + r), true).value;
      f = bits(bits(f) & ~unseen(block, r, tile.first + x));
      for (int i = 0; i < W; i++) {
        along[i] += (double)f[i] * at.dw[x * ROWS + r + i];
        size[i] += std::fabs((double)f[i]);
      }
    }
    for (int i = 0; i < W; i++)
      if (whole >> i & 1 && size[i] > 0) g.d[r + i] = (float)(along[i] / size[i]);
  }
}

// With dOut over l, w = f - l / N (the mean only of re-centred rows) and D over l too:
//   ds = slope (dOut . v - sgn(f) D), or with RECENTRE_L1 slope (dOut . v - sgn(w) D - pull)
template <class Phi>
void plain_tile(const Block& block, const Tile& tile, const BackwardScratch& at, Gradients& g) {
  const Task& task = block.task;
  bool again = task.call.has(RECENTRE_L1), l1 = task.call.has(L1);
  int64_t key = (tile.first - task.from) * task.vcols;
  tile_product(tile, at.v + key, task.vcols, at.dout_panels, task.dv, at.dw);
  if (l1 && !again && !tile.clean) sum_whole_plain<Phi>(block, tile, at, g);
  for (int x = 0; x < tile.n; x++)
    for (int r = tile.from; r < tile.to; r += W) {
      float *s = at.s + x * ROWS + r, *dw = at.dw + x * ROWS + r;
      vf t = load(s) + load(block.shift + r), d = load(g.d + r);
      Both y = plain_activation<Phi>(t, l1);
      vf w = y.value - load(g.mean + r), along = load(dw);
      if (again)
        along -= where(w < all(0.f), -d, zero_below(w, d)) + load(g.pull + r);
      else
        along -= Phi::SIGNED ? where(y.value < all(0.f), -d, zero_below(y.value, d)) : d;
      vf ds = y.slope * along;
      if (!tile.clean) {
        vi hidden = unseen(block, r, tile.first + x);
        ds = bits(bits(ds) & ~hidden), w = bits(bits(w) & ~hidden);
      }
      store(s, ds);
      store(dw, w);
    }
  add_to_keys(tile, at.dw, at.dout, task.vcols, at.dv + key);
}

// --- sharpened rows -----------------------------------------------------------------------------

template <class Phi>
inline Both activation_and_slope(vf t) {
  if constexpr (std::is_same<Phi, Exp>::value) {
    vf y = Exp::below_one(t);
    return {y, y * all(LN_2)};
  } else {
    return Phi::both(t);
  }
}
template <class Phi>
inline vf only_slope(vf t) {
  if constexpr (std::is_same<Phi, Softplus>::value)
    return Softplus::slope(t);
  else
    return activation_and_slope<Phi>(t).slope;
}

// D and E of rows whose keys are all in one tile, by their definition, D = sum_j w dW and
// E = sum_j p r / (l M) (dW - D) / N_i. From `out` and G, which are rounded, they would be too
// coarse for a row of few keys, where one w is close to 1 and dW - D close to 0.
void sum_whole_rows(const Block& block, int n, const BackwardScratch& at, Gradients& g) {
  double weighted[ROWS] = {}, weights[ROWS] = {}, e_sum[ROWS] = {};
  for (int e = 0; e < n; e++) {
    weighted[at.row[e]] += (double)at.w[e] * at.part[e];
    weights[at.row[e]] += at.w[e];
  }
  for (int r = 0; r < block.rows; r++)
    g.d[r] = weights[r] ? (float)(weighted[r] / weights[r]) : 0.f;
  for (int e = 0; e < n; e++) {
    int r = at.row[e];
    e_sum[r] += (double)at.r[e] * (at.part[e] - g.d[r]);
  }
  for (int r = 0; r < block.rows; r++)
    if (block.mu[r] != 0.f) g.pull[r] = (float)(-g.slope[r] * e_sum[r] / block.count[r]);
}

// ds in place of the scores, dv gains its share; returns the number of entries that count. Of the
// long way from a score to its weight only the entries that count take more than the slope.
template <class Phi>
int sharp_tile_sparse(const Block& block, const Tile& tile, const BackwardScratch& at,
                      Gradients& g, bool whole) {
  const Task& task = block.task;
  int cols = (int)task.vcols, n = 0, start[SPAN + 1];
  for (int x = 0; x < tile.n; x++) {
    float* s = at.s + x * ROWS;
    start[x] = n;
    for (int r = tile.from; r < tile.to; r += W) {
      vf t = load(s + r) + load(block.shift + r);
      vi counts = t > load(g.cut + r);
      vf slope = only_slope<Phi>(t) * load(block.lift + r);
      vf ds = whole ? slope : load(g.pull + r) * slope;
      if (!tile.clean) {
        vi hidden = unseen(block, r, tile.first + x);
        counts &= ~hidden, ds = bits(bits(ds) & ~hidden);
      }
      unsigned mask = lanes(counts);
      pack(at.w + n, t, mask);
      pack(at.row + n, iota() + r, mask);
      n += __builtin_popcount(mask);
      store(s + r, ds);
    }
  }
  start[tile.n] = n;
  for (int e = n; e < n + W; e++) at.w[e] = LOWEST, at.row[e] = 0;
  for (int e = 0; e < n; e += W) {
    const int32_t* row = at.row + e;
    Both y = activation_and_slope<Phi>(load(at.w + e));
    vf lift = lookup(block.lift, row);
    vf z = (y.value * lift - lookup(block.mu, row) - lookup(block.mu_rest, row)) *
           lookup(block.inverse_m, row);
    z = maximum(z, all(0.f));
    vf r = block.mixed ? power(z, lookup(block.p, row) - all(1.f)) : power(z, block.p[0] - 1.f);
    store(at.slope + e, y.slope * lift);
    store(at.r + e, r);
    store(at.w + e, z * r);
  }
  for (int x = 0; x < tile.n; x++) {
    int64_t key = (tile.first - task.from + x) * cols;
    int e = start[x], of_key = start[x + 1] - e;
    sparse_dot(of_key, at.row + e, at.v + key, at.dout, cols, at.part + e, cols);
    sparse_sum(of_key, at.row + e, at.w + e, at.dout, cols, at.dv + key, cols);
  }
  if (whole) {
    sum_whole_rows(block, n, at, g);
    for (int x = 0; x < tile.n; x++)
      for (int r = tile.from; r < tile.to; r += W) {
        float* s = at.s + x * ROWS + r;
        store(s, load(s) * load(g.pull + r));
      }
  }
  for (int e = 0; e < n; e += W) {
    const int32_t* row = at.row + e;
    vf a = load(at.r + e) * lookup(g.slope, row) * (load(at.part + e) - lookup(g.d, row));
    store(at.part + e, a * load(at.slope + e));
  }
  for (int x = 0; x < tile.n; x++) {
    float* s = at.s + x * ROWS;
    for (int e = start[x]; e < start[x + 1]; e++) s[at.row[e]] += at.part[e];
  }
  return n;
}

template <class Phi>
int sharp_tile_dense(const Block& block, const Tile& tile, const BackwardScratch& at,
                     const Gradients& g) {
  const Task& task = block.task;
  int64_t key = (tile.first - task.from) * task.vcols;
  int counted = 0;
  tile_product(tile, at.v + key, task.vcols, at.dout_panels, task.dv, at.dw);
  for (int x = 0; x < tile.n; x++)
    for (int r = tile.from; r < tile.to; r += W) {
      float *s = at.s + x * ROWS + r, *dw = at.dw + x * ROWS + r;
      vf t = load(s) + load(block.shift + r);
      Both y = activation_and_slope<Phi>(t);
      vf lift = load(block.lift + r);
      vf excess = y.value * lift - load(block.mu + r) - load(block.mu_rest + r);
      vf z = excess * load(block.inverse_m + r);
      vi hidden = tile.clean ? all(0) : unseen(block, r, tile.first + x);
      z = bits(bits(maximum(z, all(0.f))) & ~hidden);
      counted += __builtin_popcount(lanes((t > load(g.cut + r)) & ~hidden));
      vf sharp = block.mixed ? power(z, load(block.p + r) - all(1.f)) : power(z, block.p[0] - 1.f);
      vf a = sharp * load(g.slope + r) * (load(dw) - load(g.d + r)) + load(g.pull + r);
      store(s, bits(bits(a * (y.slope * lift)) & ~hidden));
      store(dw, z * sharp);
    }
  add_to_keys(tile, at.dw, at.dout, task.vcols, at.dv + key);
  return counted;
}

// ------------------------------------------------------------------------------------------------

// dOut . out by the same steps as dOut . v in a tile: a row with one key has no gradient then
inline float tile_dot(const float* a, const float* b, int64_t d) {
  float total = 0.f;
  for (int64_t x = 0; x < d; x++) total = std::fma(a[x], b[x], total);
  return total;
}

// What the forward saved of the rows, their share of dout, and what all of their ds have in common
template <class Phi>
void prepare_rows(Block& block, const BackwardScratch& at, Gradients& g) {
  const Task& task = block.task;
  const Call& c = task.call;
  int64_t dv = task.dv, cols = task.vcols;
  bool exp_l1 = std::is_same<Phi, Exp>::value && c.has(L1);
  std::fill(g.cut, g.cut + ROWS, INFINITY);
  for (int r = 0; r < block.rows; r++) {
    const float *dout = block.of(c.grad_out, r), *out = block.of(c.out, r);
    const float* stat = block.of(c.stats, r);
    float scale, *scaled = at.dout + r * cols;
    if (task.sharp()) {
      float l = stat[SharpStat::TOTAL];
      scale = l > 0.f ? 1.f / l : 0.f;
      if (stat[SharpStat::P] != block.p[r]) block.stage_one(r);
      if (l > 0.f)
        block.shape(r, stat[SharpStat::MEAN], stat[SharpStat::MEAN_REST], stat[SharpStat::RANGE]);
      block.shift[r] = stat[SharpStat::SHIFT];
      block.lift[r] = stat[SharpStat::LIFT];
    } else {
      scale = stat[PlainStat::INVERSE] / stat[PlainStat::AGAIN];
      if (stat[PlainStat::AGAIN] == 0.f) scale = 0.f;
      if (exp_l1) block.shift[r] = -stat[PlainStat::TOP];
    }
    pack_rows(dout, 0, 1, dv, cols, &scale, scaled);
    pack_rows(out, 0, 1, dv, cols, nullptr, at.out + r * cols);
    if (block.bad[r]) {  // it has no share in what other rows give
      std::fill_n(scaled, cols, 0.f);
      continue;
    }
    if (!task.sharp()) {
      float inverse = stat[PlainStat::INVERSE], l = inverse > 0.f ? 1.f / inverse : 0.f;
      if (c.has(RECENTRE) && block.shifted(r)) g.mean[r] = l / block.count[r];
      const float* base = c.has(RECENTRE) ? block.of(c.guide, r) : out;
      if (c.has(RECENTRE_L1)) {
        g.d[r] = tile_dot(out, scaled, dv);
        g.pull[r] = (float)(precise_dot(base, scaled, dv) - (double)g.d[r] * stat[PlainStat::PULL]);
      } else if (c.has(L1)) {
        g.d[r] = tile_dot(base, scaled, dv);
      }
      continue;
    }
    int32_t same = r;
    sparse_dot(1, &same, at.out + r * cols, at.dout, cols, g.d + r, (int)cols);
    g.slope[r] = block.p[r] * block.inverse_m[r];
    g.cut[r] = stat[SharpStat::CUT];
    if (block.mu[r] == 0.f) continue;
    g.pull[r] =
        (float)(-block.p[r] / block.count[r] * precise_dot(dout, block.of(c.guide, r), dv));
  }
  int padded = (int)round_up(block.rows, PANEL);
  std::fill(at.q + block.rows * task.cols, at.q + padded * task.cols, 0.f);
  std::fill(at.dout + block.rows * cols, at.dout + padded * cols, 0.f);
  pack_panels(at.q, task.cols, padded, task.d, nullptr, at.q_panels);
  pack_panels(at.dout, cols, padded, dv, nullptr, at.dout_panels);
}

// dx of x_hat = x / max(||x||, eps), given g = d x_hat / scale
void through_normalise(const float* x, const float* g, float scale, int64_t d, float* to) {
  float length = norm(x, d), inverse = 1.f / std::max(length, EPS);
  if (!std::isfinite(length)) {  // g is NaN where some row sees x, else zero
    for (int64_t i = 0; i < d; i++) to[i] = g[i] * 0.f;
    return;
  }
  float along = length < EPS ? 0.f : dot(g, x, d) * inverse * inverse;
  for (int64_t i = 0; i < d; i++) to[i] = scale * inverse * (g[i] - along * x[i]);
}

template <class Phi>
void backward_block(const Task& task, const BackwardScratch& at, int64_t head, int64_t first) {
  Block block(task, head, first, Phi::UNIT);
  const Call& c = task.call;
  std::fill(at.dq, at.dq + block.rows * task.cols, 0.f);
  if (!block.empty()) {
    Gradients g;
    pack_queries(block, at.q);
    prepare_rows<Phi>(block, at, g);
    bool whole = block.hi_all - block.lo_all <= SPAN, dense = false;
    for (int64_t key = block.lo_all; key < block.hi_all; key += SPAN) {
      Tile tile(block, key);
      if (tile.from >= tile.to) continue;
      if (task.direct) {
        std::fill(at.s, at.s + tile.n * ROWS, 0.f);
        score_direct(block, key, tile.n, at.q, at.s, 1, ROWS);
        for (int64_t x = 0; x < tile.n * ROWS; x++)
          if (!std::isfinite(at.s[x])) at.s[x] = 0.f;
      } else {
        tile_product(tile, at.k + (key - task.from) * task.cols, task.cols, at.q_panels, task.d,
                     at.s);
      }
      if (!task.sharp()) {
        plain_tile<Phi>(block, tile, at, g);
      } else if constexpr (CAN_SHARPEN<Phi>) {
        int counted = dense ? sharp_tile_dense<Phi>(block, tile, at, g)
                            : sharp_tile_sparse<Phi>(block, tile, at, g, whole);
        // Neighbouring tiles are alike. A small one has nothing to gain.
        dense = counted > std::max(1024., 0.55 * tile.n * block.rows);
      }
      score_gradients(block, tile, at);
    }
  }
  for (int r = 0; r < block.rows; r++) {
    float *to = block.of(c.grad_q, r), *dq = at.dq + r * task.cols;
    if (c.has(COSINE))
      through_normalise(block.query(r), dq, block.scale[r], task.d, to);
    else
      for (int64_t x = 0; x < task.d; x++) to[x] = dq[x] * block.scale[r];
    if (!block.bad[r]) continue;
    std::fill_n(to, task.d, NAN);
    int64_t low = block.lo[r] - task.from, seen = block.hi[r] - block.lo[r];
    std::fill_n(at.dk + low * task.cols, seen * task.cols, NAN);
    std::fill_n(at.dv + low * task.vcols, seen * task.vcols, NAN);
  }
}

struct KeySums {  // of one chunk: dk and dv, [key - from][cols]
  const float *dk, *dv;
  int64_t from, to;
};

// dk and dv of one head of keys from the sums of its chunks
void finish_keys(const Task& task, const KeySums* sums, int chunks, float* scratch) {
  const Call& c = task.call;
  int64_t cols = task.cols, vcols = task.vcols;
  for (int64_t j = 0; j < c.keys; j++) {
    float *dk = scratch, *dv = scratch + cols;
    std::fill(scratch, scratch + cols + vcols, 0.f);
    for (int i = 0; i < chunks; i++) {
      if (j < sums[i].from || j >= sums[i].to) continue;
      const float* from = sums[i].dk + (j - sums[i].from) * cols;
      for (int64_t x = 0; x < cols; x++) dk[x] += from[x];
      from = sums[i].dv + (j - sums[i].from) * vcols;
      for (int64_t x = 0; x < vcols; x++) dv[x] += from[x];
    }
    float* to = c.grad_k.row(task.b, task.group, j);
    if (c.unit_keys())
      through_normalise(task.key(j), dk, 1.f, task.d, to);
    else
      std::copy(dk, dk + task.d, to);
    std::copy(dv, dv + task.dv, c.grad_v.row(task.b, task.group, j));
  }
}

// `dk` and `dv`: where the sums of a chunk are left for later; null: the only chunk finishes itself
template <class Phi>
bool backward_task(Task& task, Arena& arena, float* dk, float* dv) {
  if (!arena.reserve(BackwardScratch::size(task))) return false;
  BackwardScratch at(arena, task);
  const Call& c = task.call;
  task.find_bad_keys();
  int64_t keys = task.keys();
  if (dk) at.dk = dk, at.dv = dv;
  for (int64_t j = 0; j < keys; j++) at.inverse[j] = key_factor(task, task.from + j);
  pack_rows(task.key(task.from), c.k.row_stride, keys, task.d, task.cols, at.inverse, at.k);
  for (int64_t j : task.bad_keys) std::fill_n(at.k + (j - task.from) * task.cols, task.cols, 0.f);
  pack_rows(task.value(task.from), c.v.row_stride, keys, task.dv, task.vcols, nullptr, at.v);
  std::fill(at.dk, at.dk + keys * task.cols, 0.f);
  std::fill(at.dv, at.dv + keys * task.vcols, 0.f);
  for (int64_t h = 0; h < task.heads(); h++)
    for (int64_t i = task.begin; i < task.end; i += task.rows)
      backward_block<Phi>(task, at, task.group * task.heads() + h, i);
  if (!dk) {
    KeySums sums{at.dk, at.dv, task.from, task.to};
    finish_keys(task, &sums, 1, at.dw);
  }
  return true;
}

}  // namespace
