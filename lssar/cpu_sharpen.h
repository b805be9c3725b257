// Forward of sharpened rows, and of any call. A pass over the tiles gives a row's mean and largest f
// and lists what may count; what does is weighed, then multiplied by the values tile by tile.
#pragma once
#include "cpu_forward.h"

namespace {

// Adds the f of a row of a tile to their sum, and its largest shifted score to the others
template <class Phi>
void row_sums(const float* s, int64_t lo, int64_t hi, float shift, double& total, float& top) {
  vf high = all(-INFINITY);
  by_chunks(lo, hi, [&](int64_t from, int64_t to) {
    double f;
    if constexpr (std::is_same<Phi, Softplus>::value) {
      // sum f = sum max(t, 0) + log2 prod(1 + 2^-|t|): one exp per entry and one log per chunk, in
      // two chains, as a product waits for the one before
      vf linear = all(0.f), product = all(1.f), other = all(1.f);
      over(from, to, [&](int64_t x, auto inside) {
        vf t = load(s + x) + all(shift);
        high = maximum(high, keep_or(inside, t, -INFINITY));
        linear += keep(inside, maximum(t, all(0.f)));
        vf e = keep(inside, exp2v<false>(maximum(minus_abs(t), all(LOWEST))));
        vf grown = product + product * e;
        product = other, other = grown;
      });
      f = wide_sum(linear) + sum(log2v(product * other));
      // 1 + e loses up to 2^-25 per entry, which only matters where the mean is small
      if (f < 0.25 * (double)(to - from)) {
        vf part = all(0.f);
        over(from, to, [&](int64_t x, auto inside) {
          part += keep(inside, Softplus::value(load(s + x) + all(shift)));
        });
        f = wide_sum(part);
      }
    } else {
      vf part = all(0.f);
      over(from, to, [&](int64_t x, auto inside) {
        vf t = load(s + x) + all(shift);
        high = maximum(high, keep_or(inside, t, -INFINITY));
        part += keep(inside, std::is_same<Phi, Exp>::value ? Exp::below_one(t) : Phi::value(t));
      });
      f = wide_sum(part);
    }
    total += f;
  });
  top = std::max(top, largest(high));
}

struct SharpRows {
  alignas(64) float top[ROWS];    // the largest score, shifted (of exp: not shifted), so far
  alignas(64) float cut[ROWS];    // the shifted score above which an entry counts
  alignas(64) float least[ROWS];  // the z above which it does
  double total[ROWS] = {};        // sum f so far
  double l[ROWS], h[ROWS];        // sums of z r and of r
  int n[ROWS] = {};               // entries in the list
  int room;                       // rows of the largest block here
  // An entry is left out where r = z^(p-1) < 2^-20 / N: as the largest z is 1, what is dropped is
  // below 2^-20 of the row's sum of r, and as z < 1/4 there (p = 15), below 2^-22 of that of z r.
  explicit SharpRows(const Block& block) : room(block.task.rows) {
    std::fill(top, top + room, -INFINITY);
    for (int r = 0; r < room; r += W) {
      vf exponent = (log2v(load(block.count + r)) + all(20.f)) / (load(block.p + r) - all(1.f));
      store(least + r, exp2v(maximum(-exponent, all(-120.f))));
    }
  }
};

template <class Phi>
constexpr bool SHIFTED_TO_TOP = std::is_same<Phi, Exp>::value;

template <class Phi>
vf activation(vf t) {
  if constexpr (SHIFTED_TO_TOP<Phi>)
    return Exp::below_one(t);
  else
    return Phi::value(t);
}

// of a tile whose scores are still near
template <class Phi>
void tile_sums(Block& block, const Strip& strip, SharpRows& rows) {
  for (int r = 0; r < block.rows; r++) {
    const float* s = strip.row(r);
    int64_t lo = strip.lo(r), hi = strip.hi(r);
    if (lo >= hi) continue;
    if (SHIFTED_TO_TOP<Phi>) {
      float before = rows.top[r], top = std::max(before, row_maximum(s, lo, hi)), unused = 0.f;
      if (top > before && rows.total[r] > 0) rows.total[r] *= std::exp2(before - top);
      rows.top[r] = top, block.shift[r] = -top;
      row_sums<Phi>(s, lo, hi, -top, rows.total[r], unused);
    } else {
      row_sums<Phi>(s, lo, hi, block.shift[r], rows.total[r], rows.top[r]);
    }
  }
}

// The largest f so far; exp is shifted to its top, and a row without keys has none.
template <class Phi>
void largest_values(const SharpRows& rows, float* f_top) {
  for (int r = 0; r < rows.room; r += W) {
    vf top = load(rows.top + r), none = all(-INFINITY);
    store(f_top + r, activation<Phi>(where((top == none) | (vi{} - SHIFTED_TO_TOP<Phi>),
                                           all(0.f), top)));
  }
}

// The score below which no entry counts, of rows with this mean and this range
template <class Phi>
void set_cuts(const Block& block, const float* mu, const float* m, SharpRows& rows) {
  for (int r = 0; r < rows.room; r += W) {
    vf f = load(mu + r) + load(rows.least + r) * load(m + r);
    store(rows.cut + r, Phi::score(f / load(block.lift + r)));
  }
  for (int r = 0; r < block.rows; r++)
    if (block.p[r] == 1.f && mu[r] == 0.f) rows.cut[r] = -INFINITY;
}

// From the tiles so far, a cut that only rises with those to come: f >= 0, so neither the sum nor
// the largest f shrinks, and mu + least (top - mu) grows with both.
template <class Phi>
void lower_cuts(const Block& block, SharpRows& rows) {
  alignas(64) float f_top[ROWS], mu[ROWS], m[ROWS];
  largest_values<Phi>(rows, f_top);
  for (int r = 0; r < rows.room; r++) {
    mu[r] = block.shifted(r) ? (float)(rows.total[r] / block.count[r]) : 0.f;
    m[r] = f_top[r] - mu[r];
  }
  set_cuts<Phi>(block, mu, m, rows);
}

// mu and M of every row and its cut; a row without contrast falls back to stage one. Returns
// whether there is one.
template <class Phi>
bool row_statistics(Block& block, const ForwardScratch& at, SharpRows& rows) {
  const Task& task = block.task;
  alignas(64) float f_top[ROWS];
  bool flat = false;
  largest_values<Phi>(rows, f_top);
  for (int r = 0; r < block.rows; r++) {
    // Differences of so small f would be flushed to zero.
    float lift = f_top[r] < 0x1p-64f ? 0x1p64f : 1.f, top = f_top[r] * lift;
    block.lift[r] = lift;
    double mu = block.shifted(r) ? rows.total[r] / block.count[r] * lift : 0.;
    float m = (float)(top - mu), bound = block.scale[r] / (Phi::UNIT == 1.f ? 1.f : LOG2_E);
    if (!task.call.has(COSINE)) {
      int64_t last = block.hi[r] - 1 - task.from;
      bound *= norm(block.query(r), task.d) * (last >= 0 ? at.longest[last] : 0.f);
    }
    if (m <= LSSAR_FLAT * (4.f + bound) * FLT_EPSILON * top)
      block.stage_one(r), flat |= block.lo[r] < block.hi[r];
    else
      block.shape(r, (float)mu, (float)(mu - (float)mu), m);
  }
  set_cuts<Phi>(block, block.mu, block.m, rows);
  return flat;
}

// Appends the entries of x in [lo, hi) above the row's cut to its list: scores, and key(x)
template <class Key>
inline void append(const float* s, int64_t lo, int64_t hi, const Block& block, int r,
                   SharpRows& rows, float* val, int32_t* keys, Key&& key) {
  vf shift = all(block.shift[r]), cut = all(rows.cut[r]);
  int n = rows.n[r];
  over(lo, hi, [&](int64_t x, auto inside) {
    vf y = load(s + x);
    vi from = key(x);
    unsigned mask = keep(inside, lanes(y + shift > cut));
    pack(val + n, y, mask);
    pack(keys + n, from, mask);
    n += __builtin_popcount(mask);
  });
  rows.n[r] = n;
}

// z r in place of the scores of a list; r beside them for the GUIDE
template <class Phi, bool GUIDE>
inline void weigh_sharp(float* s, float* sharp, const Block& block, int row, SharpRows& rows) {
  vf mu = all(block.mu[row]), rest = all(block.mu_rest[row]), scale = all(block.inverse_m[row]);
  vf shift = all(block.shift[row]), lift = all(block.lift[row]);
  float p = block.p[row] - 1.f;
  rows.l[row] = rows.h[row] = 0;
  by_chunks(0, rows.n[row], [&](int64_t from, int64_t to) {
    vf l = all(0.f), h = all(0.f);
    over(from, to, [&](int64_t x, auto inside) {
      vf f = activation<Phi>(load(s + x) + shift) * lift;
      vf z = keep(inside, maximum((f - mu - rest) * scale, all(0.f)));
      vf r = power(z, p), w = z * r;
      store(s + x, w);
      l += w;
      if (GUIDE) store(sharp + x, r), h += r;
    });
    rows.l[row] += wide_sum(l);
    if (GUIDE) rows.h[row] += wide_sum(h);
  });
}

// A row's sum of weights times values in UNIT, for the columns that are not finite
template <class F>
void rescue(const Task& task, const ForwardScratch& at, int r, int n, float* lists, float* to,
            F&& value) {
  alignas(64) float total[256 + W] = {};
  float* weights = lists + r * at.list_ld;
  for (int e = 0; e < n; e++) weights[e] *= UNIT;
  sparse_sum(n, at.at + r * at.list_ld, weights, at.v, at.ldv, total, (int)task.vcols);
  for (int e = 0; e < n; e++) weights[e] /= UNIT;
  write_row(to, task.dv, UNIT, [&](int64_t x) { return value(total[x], x); });
}

// The lists of a block: scores above the cut and their keys, in order
template <class Phi>
void list_entries(Block& block, const ForwardScratch& at, SharpRows& rows) {
  const Task& task = block.task;
  int tiles = 0;
  auto list = [&](const Strip& tile, int r) {
    vi first = iota() + (int32_t)(tile.start - task.from);
    append(tile.row(r), tile.lo(r), tile.hi(r), block, r, rows, at.val + r * at.list_ld,
           at.at + r * at.list_ld, [&](int64_t x) { return first + (int32_t)x; });
  };
  by_tiles(block, at, [&](const Strip& tile) {
    score(tile);
    tile_sums<Phi>(block, tile, rows);
    lower_cuts<Phi>(block, rows);
    for (int r = 0; r < block.rows; r++) list(tile, r);
    tiles++;
  });
  bool flat = row_statistics<Phi>(block, at, rows);
  if (tiles > 1)
    for (int r = 0; r < block.rows; r++) {
      float* val = at.val + r * at.list_ld;
      int32_t* keys = at.at + r * at.list_ld;
      int n = rows.n[r];
      rows.n[r] = 0;
      append(val, 0, n, block, r, rows, val, keys, [&](int64_t x) { return load(keys + x); });
    }
  if (!flat) return;
  auto is_flat = [&](int r) { return rows.cut[r] == -INFINITY; };
  for (int r = 0; r < block.rows; r++)  // all of a flat row counts, and the cuts left some out
    if (is_flat(r)) rows.n[r] = 0;
  by_tiles(block, at, [&](const Strip& tile) {
    score(tile);
    for (int r = 0; r < block.rows; r++)
      if (is_flat(r)) list(tile, r);
  });
}

// Adds the entries [e, end) of a list times the values: short sums of floats, as everywhere
template <bool GUIDE>
void add_listed(const ForwardScratch& at, int r, int e, int end, int cols) {
  const int32_t* keys = at.at + r * at.list_ld;
  const float *w = at.val + r * at.list_ld, *sharp = at.sharp + r * at.list_ld;
  for (; e < end; e += CHUNK) {
    int n = std::min<int>(end - e, CHUNK);
    alignas(64) float out[256 + W] = {}, guide[256 + W] = {};
    if (GUIDE)
      sparse_sums(n, keys + e, w + e, sharp + e, at.v, at.ldv, out, guide, cols);
    else
      sparse_sum(n, keys + e, w + e, at.v, at.ldv, out, cols);
    for (int x = 0; x < cols; x += W) {
      float *to = at.out + r * cols + x, *g = at.guide + r * cols + x;
      store(to, load(to) + load(out + x));
      if (GUIDE) store(g, load(g) + load(guide + x));
    }
  }
}

// Weights times values, tile by tile, so that the values of a tile are near for all rows
template <bool GUIDE>
void sum_listed(Block& block, const ForwardScratch& at, const SharpRows& rows) {
  int cols = (int)block.task.vcols, done[ROWS] = {};
  int64_t kept = 0, present = 0;
  for (int r = 0; r < block.rows; r++)
    kept += rows.n[r], present += std::max(0, block.hi[r] - block.lo[r]);
  // About where the two cost the same; few entries have nothing to gain, and keep the exactly zero
  // gradient of a single one.
  bool dense = present >= 2048 && kept >= 0.55 * (double)present;
  by_tiles(block, at, [&](const Strip& tile) {
    int32_t first = (int32_t)(tile.start - block.task.from);
    int32_t next = (int32_t)(tile.to - block.task.from);
    for (int r = 0; r < block.rows; r++) {
      const int32_t* keys = at.at + r * at.list_ld;
      int e = done[r];
      done[r] = (int)(std::lower_bound(keys + e, keys + rows.n[r], next) - keys);
      if (!dense) {
        add_listed<GUIDE>(at, r, e, done[r], cols);
        continue;
      }
      float *w = tile.row(r), *sharp = at.spread + r * at.ld;
      std::fill(w, w + at.ld, 0.f);
      if (GUIDE) std::fill(sharp, sharp + at.ld, 0.f);
      for (; e < done[r]; e++) {
        w[keys[e] - first] = at.val[r * at.list_ld + e];
        if (GUIDE) sharp[keys[e] - first] = at.sharp[r * at.list_ld + e];
      }
    }
    if (!dense) return;
    times_values(tile, at.strip, at.out);
    if (GUIDE) times_values(tile, at.spread, at.guide);
  });
}

template <class Phi, bool GUIDE>
void sharp_block(Block& block, const ForwardScratch& at) {
  const Task& task = block.task;
  const Call& c = task.call;
  int cols = (int)task.vcols;
  SharpRows rows(block);
  list_entries<Phi>(block, at, rows);
  for (int r = 0; r < block.rows; r++)
    weigh_sharp<Phi, GUIDE>(at.val + r * at.list_ld, at.sharp + r * at.list_ld, block, r, rows);
  std::fill(at.out, at.out + block.rows * cols, 0.f);
  if (GUIDE) std::fill(at.guide, at.guide + block.rows * cols, 0.f);
  sum_listed<GUIDE>(block, at, rows);
  for (int r = 0; r < block.rows; r++) {
    float l = (float)rows.l[r], inverse = l > 0.f ? 1.f / l : 0.f, h = (float)rows.h[r];
    float *to = block.of(c.out, r), *sum = at.out + r * cols;
    float scale = block.inverse_m[r] * inverse;
    for (int64_t x = 0; x < task.dv; x++) to[x] = sum[x] * inverse;
    if (!finite(to, task.dv))
      rescue(task, at, r, rows.n[r], at.val, to, [&](float y, int64_t) { return y * inverse; });
    if (c.stats.data) {
      float* stat = block.of(c.stats, r);
      std::fill_n(stat, STATS, 0.f);
      stat[SharpStat::MEAN] = block.mu[r];
      stat[SharpStat::MEAN_REST] = block.mu_rest[r];
      stat[SharpStat::RANGE] = block.m[r];
      stat[SharpStat::TOTAL] = l;
      stat[SharpStat::P] = block.p[r];
      stat[SharpStat::CUT] = rows.cut[r];
      stat[SharpStat::SHIFT] = block.shift[r];
      stat[SharpStat::LIFT] = block.lift[r];
    }
    if (!GUIDE) continue;
    float *guide = block.of(c.guide, r), *g = at.guide + r * cols;
    for (int64_t x = 0; x < task.dv; x++) guide[x] = (g[x] - h * to[x]) * scale;
    if (!finite(guide, task.dv))
      rescue(task, at, r, rows.n[r], at.sharp, guide,
             [&](float y, int64_t x) { return (y - h * (to[x] * UNIT)) * scale; });
  }
}

template <class Phi>
void forward_block(const Task& task, const ForwardScratch& at, int64_t head, int64_t first) {
  Block block(task, head, first, Phi::UNIT);
  const Call& c = task.call;
  if (block.empty()) {
    for (int r = 0; r < block.rows; r++) {
      std::fill_n(block.of(c.out, r), task.dv, 0.f);
      if (c.guide.data) std::fill_n(block.of(c.guide, r), task.dv, 0.f);
      if (c.stats.data) std::fill_n(block.of(c.stats, r), STATS, 0.f);
    }
    return;
  }
  pack_queries(block, at.q);
  if (task.sharp()) {
    if constexpr (CAN_SHARPEN<Phi>)
      c.guide.data ? sharp_block<Phi, true>(block, at) : sharp_block<Phi, false>(block, at);
  } else {
    Unfit unfit = plain_block<Phi>(block, at, 1.f);
    if (unfit.large && c.has(L1)) plain_block<Phi>(block, at, UNIT);
    if (unfit.faint) plain_block<Phi>(block, at, 1.f / UNIT);
  }
  for (int r = 0; r < block.rows; r++) {
    if (!block.bad[r]) continue;
    std::fill_n(block.of(c.out, r), task.dv, NAN);
    if (c.guide.data) std::fill_n(block.of(c.guide, r), task.dv, NAN);
  }
}

template <class Phi>
bool forward_task(Task& task, Arena& arena) {
  if (!arena.reserve(ForwardScratch::size(task))) return false;
  if (!task.direct) task.find_bad_keys();
  ForwardScratch at(arena, task);
  place_keys(task, at);
  for (int64_t h = 0; h < task.heads(); h++)
    for (int64_t i = task.begin; i < task.end; i += task.rows)
      forward_block<Phi>(task, at, task.group * task.heads() + h, i);
  return true;
}

}  // namespace
