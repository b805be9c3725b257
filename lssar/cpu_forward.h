// Forward: the scores of a block of rows against a tile of keys, their weights, the values. Rows
// that take several passes (sharpened, or normalised twice) keep the scores of all tiles.
#pragma once
#include "cpu_call.h"

namespace {

struct ForwardScratch {
  float *inverse, *longest, *panels, *packed_v;  // of the task's keys
  double* prefix;                                // sums of the values before each
  const float* v;                                // packed_v, or the values where they lie
  int64_t ldv, ld;                               // ld of the strip: not a power of two
  float *q, *out, *guide;                        // a block's rows
  float *strip, *sharp, *val;                    // scores, then weights; r; those that count
  int32_t* at;                                   // and their keys
  static bool whole(const Task& t) { return t.sharp() || t.call.has(RECENTRE_L1); }
  static int64_t leading(const Task& t) {
    int64_t keys = whole(t) ? t.widest : std::min<int64_t>(t.widest, TILE + 2 * PANEL);
    return round_up(keys, PANEL) + W;
  }
  static size_t size(const Task& t) {
    size_t keys = round_up(t.keys(), PANEL), strip = ROWS * leading(t);
    size_t prefix = t.call.has(RECENTRE) ? 2 * (keys + 1) * t.dv : 0;
    return keys * (2 + t.d + t.vcols) + prefix + ROWS * (t.cols + 2 * t.vcols) +
           (t.sharp() ? 4 : 1) * (strip + 2 * W) + ROWS * 2 + 512;
  }
  ForwardScratch(Arena& arena, const Task& t) : ld(leading(t)) {
    size_t keys = round_up(t.keys(), PANEL), room = ROWS * ld + 2 * W;
    arena.used = 0;
    prefix = (double*)arena.take(t.call.has(RECENTRE) ? 2 * (keys + 1) * t.dv : 0);
    inverse = arena.take(keys), longest = arena.take(keys), panels = arena.take(keys * t.d);
    packed_v = arena.take(keys * t.vcols);
    q = arena.take(ROWS * t.cols), out = arena.take(ROWS * t.vcols);
    guide = arena.take(ROWS * t.vcols), strip = arena.take(room);
    if (!t.sharp()) return;
    sharp = arena.take(room), val = arena.take(room), at = (int32_t*)arena.take(room);
  }
};

void place_keys(const Task& task, ForwardScratch& at) {
  const Call& c = task.call;
  int64_t keys = task.keys();
  at.v = at.packed_v, at.ldv = task.vcols;
  if (task.dv % W == 0)
    at.v = task.value(task.from), at.ldv = c.v.l;
  else
    pack_rows(task.value(task.from), c.v.l, keys, task.dv, task.vcols, nullptr, at.packed_v);
  if (!task.direct) {
    for (int64_t j = 0; j < keys; j++) at.inverse[j] = key_factor(task, task.from + j);
    pack_panels(task.key(task.from), c.k.l, keys, task.d, at.inverse, at.panels);
  }
  if (c.has(RECENTRE)) {
    std::fill(at.prefix, at.prefix + (task.low - task.from + 1) * task.dv, 0.);
    for (int64_t j = task.low - task.from; j < keys; j++)
      for (int64_t x = 0; x < task.dv; x++)
        at.prefix[(j + 1) * task.dv + x] =
            at.prefix[j * task.dv + x] + task.value(task.from + j)[x];
  }
  if (task.sharp() && !c.has(COSINE)) {  // the longest key so far bounds the scores
    float longest = 0.f;
    for (int64_t j = 0; j < task.from; j++) longest = std::max(longest, norm(task.key(j), task.d));
    for (int64_t j = 0; j < keys; j++)
      at.longest[j] = longest = std::max(longest, norm(task.key(task.from + j), task.d));
  }
}

// Scores of a block against the keys [from, to): [row][key - start], `start` a multiple of PANEL
struct Strip {
  const Block& block;
  const ForwardScratch& at;
  int64_t start, from, to;
  float* row(int r) const { return at.strip + r * at.ld; }
  int64_t lo(int r) const { return std::clamp<int64_t>(block.lo[r], from, to) - start; }
  int64_t hi(int r) const { return std::clamp<int64_t>(block.hi[r], from, to) - start; }
  const float* values(int64_t x) const {
    return at.v + (start - block.task.from + x) * at.ldv;
  }
  // the keys that some of the rows [r, r + m) see
  Seen group(int r, int m) const {
    Seen g{INT32_MAX, 0};
    for (int i = r; i < r + m; i++)
      if (lo(i) < hi(i)) g = {std::min(g.lo, lo(i)), std::max(g.hi, hi(i))};
    return {std::min(g.lo, g.hi), g.hi};
  }
};

void score(const Strip& strip) {
  const Block& block = strip.block;
  const Task& task = block.task;
  const ForwardScratch& at = strip.at;
  if (task.direct) {
    score_direct(block, strip.from, strip.to - strip.from, at.q,
                 at.strip + (strip.from - strip.start), at.ld, 1);
    return;
  }
  Seen group[ROWS / MR];
  for (int r = 0; r < block.rows; r += MR)
    group[r / MR] = strip.group(r, std::min(MR, block.rows - r));
  for (int64_t x = (strip.from - strip.start) / PANEL * PANEL; x < strip.to - strip.start;
       x += PANEL) {
    const float* panel = at.panels + (strip.start - task.from + x) * task.d;
    for (int r = 0; r < block.rows; r += MR) {
      if (x >= group[r / MR].hi || x + PANEL <= group[r / MR].lo) continue;
      int m = std::min(MR, block.rows - r);
      gemm_rows<false>(m, task.d, at.q + r * task.cols, task.cols, panel, PANEL,
                       strip.row(r) + x, at.ld, PANEL, false);
    }
  }
}

// out (+)= weights [row][ld] times values, by CHUNK keys
void times_values(const Strip& strip, float* weights, float* out) {
  const ForwardScratch& at = strip.at;
  int cols = (int)strip.block.task.vcols;
  for (int r = 0; r < strip.block.rows; r += MR) {
    int m = std::min(MR, strip.block.rows - r);
    Seen seen = strip.group(r, m);
    for (int i = r; i < r + m; i++) {  // what a row does not see has no weight
      float* row = weights + i * at.ld;
      int64_t lo = strip.lo(i), hi = strip.hi(i);
      if (lo >= hi) lo = seen.hi + W;
      std::fill(row + seen.lo, row + std::clamp(lo / W * W, seen.lo, seen.hi), 0.f);
      std::fill(row + std::clamp(round_up(hi, W), seen.lo, seen.hi), row + seen.hi, 0.f);
    }
    by_chunks(seen.lo, seen.hi, [&](int64_t x, int64_t end) {
      gemm_rows<false>(m, end - x, weights + r * at.ld + x, at.ld, strip.values(x), at.ldv,
                       out + r * cols, cols, cols, true);
    });
  }
}

// --- rows that are not sharpened ----------------------------------------------------------------

struct PlainRows {
  float top[ROWS];       // the largest score so far, of exp with L1
  double total[ROWS];    // sum |f| so far
  float inverse[ROWS];   // of it; 1 where there is no norm
  float again[ROWS], pull[ROWS];  // RECENTRE_L1: sum |a - 1/N|, and sum sgn(a - 1/N) a
  PlainRows() {
    std::fill(top, top + ROWS, -INFINITY);
    std::fill(total, total + ROWS, 0.);
    std::fill(again, again + ROWS, 1.f);
    std::fill(pull, pull + ROWS, 0.f);
  }
};

inline float row_maximum(const float* s, int64_t lo, int64_t hi) {
  vf top = all(-INFINITY);
  over(lo, hi, [&](int64_t x, auto inside) {
    top = maximum(top, keep_or(inside, load(s + x), -INFINITY));
  });
  return largest(top);
}

// f in place of the scores of a tile, added to the sums so far
template <class Phi>
void weigh_plain(const Strip& strip, PlainRows& rows) {
  const Block& block = strip.block;
  const Task& task = block.task;
  constexpr bool EXP = std::is_same<Phi, Exp>::value;
  bool shift_to_top = EXP && task.call.has(L1);
  for (int r = 0; r < block.rows; r++) {
    float* s = strip.row(r);
    int64_t lo = strip.lo(r), hi = strip.hi(r);
    if (lo >= hi) continue;
    float shift = block.shift[r];
    if (shift_to_top) {
      float before = rows.top[r];
      rows.top[r] = std::max(before, row_maximum(s, lo, hi));
      shift = -rows.top[r];
      if (rows.top[r] > before && rows.total[r] > 0) {  // what was added before shrinks
        float factor = std::exp2(before - rows.top[r]), *out = strip.at.out + r * task.vcols;
        rows.total[r] *= factor;
        for (int64_t x = 0; x < task.vcols; x++) out[x] *= factor;
      }
    }
    by_chunks(lo, hi, [&](int64_t from, int64_t to) {
      vf part = all(0.f);
      over(from, to, [&](int64_t x, auto inside) {
        vf t = load(s + x) + all(shift), f;
        if constexpr (EXP)
          f = shift_to_top ? Exp::below_one(t) : Exp::value(t);
        else
          f = Phi::value(t);
        f = keep(inside, f);
        // A vector that two chunks share does not exist: chunks begin at multiples of W.
        store(s + x, f);
        part += Phi::SIGNED ? absolute(f) : f;
      });
      rows.total[r] += wide_sum(part);
    });
  }
}

void norms(const Strip& strip, PlainRows& rows) {
  const Block& block = strip.block;
  const Call& c = block.task.call;
  for (int r = 0; r < block.rows; r++) {
    rows.inverse[r] = !c.has(L1) || rows.total[r] == 0 ? 1.f : (float)(1 / rows.total[r]);
    if (!c.has(RECENTRE_L1)) continue;
    const float* s = strip.row(r);
    int64_t lo = strip.lo(r), hi = strip.hi(r);
    vf inverse = all(rows.inverse[r]), mean = all(block.shifted(r) ? 1.f / block.count[r] : 0.f);
    double again = 0, pull = 0;
    by_chunks(lo, hi, [&](int64_t from, int64_t to) {
      vf size = all(0.f), along = all(0.f);
      over(from, to, [&](int64_t x, auto inside) {
        vf a = load(s + x) * inverse, b = a - mean;
        size += keep(inside, absolute(b));
        along += keep(inside, where(b < all(0.f), -a, zero_below(b, a)));
      });
      again += wide_sum(size), pull += wide_sum(along);
    });
    rows.again[r] = again == 0 ? 1.f : (float)again, rows.pull[r] = (float)pull;
  }
}

// Sums of weights times values are of weights times UNIT where they would overflow: weights add up
// to less than 2^31, so these are finite, and their mean is if v is.
constexpr float UNIT = 0x1p-32f;

inline bool finite(const float* row, int64_t d) {
  uint32_t largest = 0;  // of the bits without the sign: a maximum of integers is vectorised
  for (int64_t x = 0; x < d; x++) {
    uint32_t y;
    std::memcpy(&y, row + x, sizeof y);
    largest = std::max(largest, y & 0x7fffffffu);
  }
  return largest < 0x7f800000u;
}

// to[x] = value(x) / unit; whether all is finite. In another unit than 1 only what was not finite
// before is replaced.
template <class F>
inline bool write_row(float* to, int64_t d, float unit, F&& value) {
  if (unit == 1.f)
    for (int64_t x = 0; x < d; x++) to[x] = value(x);
  else
    for (int64_t x = 0; x < d; x++)
      if (!std::isfinite(to[x])) to[x] = value(x) / unit;
  return finite(to, d);
}

// sums of the values before a key
inline const double* sums_before(const Block& block, const ForwardScratch& at, int64_t key) {
  return at.prefix + (key - block.task.from) * block.task.dv;
}

// With RECENTRE the guide is the output without the mean.
bool write_plain(const Block& block, const ForwardScratch& at, const PlainRows& rows, float unit) {
  const Task& task = block.task;
  const Call& c = task.call;
  bool all_finite = true;
  for (int r = 0; r < block.rows; r++) {
    bool recentre = c.has(RECENTRE) && block.lo[r] < block.hi[r];
    float *to = block.of(c.out, r), *sum = at.out + r * task.vcols;
    if (recentre && c.guide.data) to = block.of(c.guide, r);
    all_finite &= write_row(to, task.dv, unit, [&](int64_t x) { return sum[x] * rows.inverse[r]; });
    if (recentre) {
      const float* base = to;
      to = block.of(c.out, r);
      const double* before = sums_before(block, at, block.lo[r]);
      const double* after = sums_before(block, at, block.hi[r]);
      double share = block.shifted(r) ? 1. / block.count[r] : 0.;
      for (int64_t x = 0; x < task.dv; x++)
        to[x] = (float)((base[x] - share * (after[x] - before[x])) / rows.again[r]);
    }
    if (!c.stats.data) continue;
    float* stat = block.of(c.stats, r);
    std::fill_n(stat, STATS, 0.f);
    stat[0] = std::isfinite(rows.top[r]) ? rows.top[r] : 0.f;
    stat[3] = rows.inverse[r], stat[6] = rows.again[r], stat[7] = rows.pull[r];
  }
  return all_finite;
}

template <class Phi>
bool plain_block(const Block& block, const ForwardScratch& at, float unit) {
  const Task& task = block.task;
  PlainRows rows;
  int64_t start = block.lo_all / PANEL * PANEL;
  int64_t step = ForwardScratch::whole(task) ? block.hi_all - start : TILE;
  std::fill(at.out, at.out + block.rows * task.vcols, 0.f);
  for (int64_t key = start; key < block.hi_all; key += step) {
    int64_t from = std::max(key, block.lo_all), to = std::min(key + step, block.hi_all);
    Strip tile{block, at, key, from, to};
    score(tile);
    weigh_plain<Phi>(tile, rows);
    if (unit != 1.f)
      for (int r = 0; r < block.rows; r++)
        for (int64_t x = tile.lo(r) / W * W; x < round_up(tile.hi(r), W); x++)
          tile.row(r)[x] *= unit;
    times_values(tile, at.strip, at.out);
  }
  norms({block, at, start, block.lo_all, block.hi_all}, rows);
  return write_plain(block, at, rows, unit);
}

// --- sharpened rows -----------------------------------------------------------------------------

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
  alignas(64) float top[ROWS];  // the largest score, shifted (of exp: not shifted, so far)
  alignas(64) float cut[ROWS];  // the shifted score above which an entry counts
  double total[ROWS] = {};      // sum f
  double l[ROWS], h[ROWS];      // sums of z r and of r
  int n[ROWS];                  // entries that count
  SharpRows() { std::fill(top, top + ROWS, -INFINITY); }
};

// of a tile whose scores are still near
template <class Phi>
void tile_sums(Block& block, const Strip& strip, SharpRows& rows) {
  for (int r = 0; r < block.rows; r++) {
    const float* s = strip.row(r);
    int64_t lo = strip.lo(r), hi = strip.hi(r);
    if (lo >= hi) continue;
    if (std::is_same<Phi, Exp>::value) {
      float before = rows.top[r], top = std::max(before, row_maximum(s, lo, hi)), unused = 0.f;
      if (top > before && rows.total[r] > 0) rows.total[r] *= std::exp2(before - top);
      rows.top[r] = top, block.shift[r] = -top;
      row_sums<Phi>(s, lo, hi, -top, rows.total[r], unused);
    } else {
      row_sums<Phi>(s, lo, hi, block.shift[r], rows.total[r], rows.top[r]);
    }
  }
}

template <class Phi>
vf activation(vf t) {
  if constexpr (std::is_same<Phi, Exp>::value)
    return Exp::below_one(t);
  else
    return Phi::value(t);
}

// mu and M of every row and its cut; a row without contrast falls back to stage one
template <class Phi>
void row_statistics(Block& block, const Strip& strip, SharpRows& rows) {
  const Task& task = block.task;
  alignas(64) float f_top[ROWS], least[ROWS];
  for (int r = 0; r < ROWS; r++)  // exp is shifted to its top; a row without keys has none
    if (std::is_same<Phi, Exp>::value || rows.top[r] == -INFINITY) rows.top[r] = 0.f;
  for (int r = 0; r < ROWS; r += W) {
    store(f_top + r, activation<Phi>(load(rows.top + r)));
    // An entry is left out where r = z^(p-1) < 2^-24 / N: as the largest z is 1, what is dropped is
    // below 2^-24 of the row's sum of r, and of z r.
    vf exponent = (log2v(load(block.count + r)) + all(24.f)) / (load(block.p + r) - all(1.f));
    store(least + r, exp2v(maximum(-exponent, all(-120.f))));
  }
  for (int r = 0; r < block.rows; r++) {
    double mu = block.shifted(r) ? rows.total[r] / block.count[r] : 0.;
    float m = (float)(f_top[r] - mu), bound = block.scale[r] / (Phi::UNIT == 1.f ? 1.f : LOG2_E);
    if (!task.call.has(COSINE)) {
      int64_t last = block.hi[r] - 1 - task.from;
      bound *= norm(block.query(r), task.d) * (last >= 0 ? strip.at.longest[last] : 0.f);
    }
    if (m <= LSSAR_FLAT * (4.f + bound) * FLT_EPSILON * f_top[r])
      block.stage_one(r);
    else
      block.shape(r, (float)mu, (float)(mu - (float)mu), m);
  }
  for (int r = 0; r < ROWS; r += W)
    store(rows.cut + r,
          Phi::score(load(block.mu + r) + load(least + r) * load(block.m + r)));
  for (int r = 0; r < block.rows; r++)
    if (block.p[r] == 1.f && block.mu[r] == 0.f) rows.cut[r] = -INFINITY;
}

// z r in place of n scores; r beside them for the GUIDE
template <class Phi, bool GUIDE>
inline void weigh_sharp(float* s, float* sharp, int64_t lo, int64_t hi, const Block& block, int row,
                        SharpRows& rows) {
  vf mu = all(block.mu[row]), rest = all(block.mu_rest[row]), scale = all(block.inverse_m[row]);
  vf shift = all(block.shift[row]);
  float p = block.p[row] - 1.f;
  rows.l[row] = rows.h[row] = 0;
  by_chunks(lo, hi, [&](int64_t from, int64_t to) {
    vf l = all(0.f), h = all(0.f);
    over(from, to, [&](int64_t x, auto inside) {
      vf f = activation<Phi>(load(s + x) + shift);
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
void rescue(const Strip& strip, int n, const int32_t* at, float* weights, float* to, F&& value) {
  const Task& task = strip.block.task;
  alignas(64) float total[256 + W] = {};
  for (int e = 0; e < n; e++) weights[e] *= UNIT;
  sparse_sum(n, at, weights, strip.values(0), strip.at.ldv, total, (int)task.vcols);
  for (int e = 0; e < n; e++) weights[e] /= UNIT;
  write_row(to, task.dv, UNIT, [&](int64_t x) { return value(total[x], x); });
}

template <class Phi, bool GUIDE>
void sharp_block(Block& block, const ForwardScratch& at) {
  const Task& task = block.task;
  const Call& c = task.call;
  int cols = (int)task.vcols;
  int64_t start = block.lo_all / PANEL * PANEL;
  SharpRows rows;
  for (int64_t key = start; key < block.hi_all; key += TILE) {
    int64_t from = std::max(key, block.lo_all), to = std::min(key + TILE, block.hi_all);
    Strip tile{block, at, start, from, to};
    score(tile);
    tile_sums<Phi>(block, tile, rows);
  }
  Strip strip{block, at, start, block.lo_all, block.hi_all};
  row_statistics<Phi>(block, strip, rows);
  int64_t kept = 0, present = 0;
  for (int r = 0; r < block.rows; r++) {
    const float* s = strip.row(r);
    float *val = at.val + r * at.ld, shift = block.shift[r], cut = rows.cut[r];
    int32_t* keys = at.at + r * at.ld;
    int n = 0;
    over(strip.lo(r), strip.hi(r), [&](int64_t x, auto inside) {
      vf y = load(s + x);
      unsigned mask = keep(inside, lanes(y + all(shift) > all(cut)));
      pack(val + n, y, mask);
      pack(keys + n, iota() + (int32_t)x, mask);
      n += __builtin_popcount(mask);
    });
    rows.n[r] = n, kept += n, present += std::max<int64_t>(0, strip.hi(r) - strip.lo(r));
  }
  // About where the two cost the same; few entries have nothing to gain, and keep the exactly zero
  // gradient of a single one.
  bool dense = present >= 2048 && kept >= 0.55 * (double)present;
  std::fill(at.out, at.out + block.rows * cols, 0.f);
  if (GUIDE) std::fill(at.guide, at.guide + block.rows * cols, 0.f);
  for (int r = 0; r < block.rows; r++) {
    float *val = at.val + r * at.ld, *sharp = at.sharp + r * at.ld;
    const int32_t* keys = at.at + r * at.ld;
    if (dense) {
      weigh_sharp<Phi, GUIDE>(strip.row(r), sharp, strip.lo(r), strip.hi(r), block, r, rows);
      continue;
    }
    weigh_sharp<Phi, GUIDE>(val, sharp, 0, rows.n[r], block, r, rows);
    for (int e = 0; e < rows.n[r];) {  // short sums of floats, as everywhere
      int m = std::min<int>(rows.n[r] - e, CHUNK);
      alignas(64) float out[256 + W] = {}, guide[256 + W] = {};
      if (GUIDE)
        sparse_sums(m, keys + e, val + e, sharp + e, strip.values(0), at.ldv, out, guide, cols);
      else
        sparse_sum(m, keys + e, val + e, strip.values(0), at.ldv, out, cols);
      for (int x = 0; x < cols; x += W) {
        float *to = at.out + r * cols + x, *g = at.guide + r * cols + x;
        store(to, load(to) + load(out + x));
        if (GUIDE) store(g, load(g) + load(guide + x));
      }
      e += m;
    }
  }
  if (dense) {
    times_values(strip, at.strip, at.out);
    if (GUIDE) times_values(strip, at.sharp, at.guide);
  }
  for (int r = 0; r < block.rows; r++) {
    float l = (float)rows.l[r], inverse = l > 0.f ? 1.f / l : 0.f, h = (float)rows.h[r];
    float *to = block.of(c.out, r), *sum = at.out + r * cols;
    float scale = block.inverse_m[r] * inverse;
    for (int64_t x = 0; x < task.dv; x++) to[x] = sum[x] * inverse;
    int32_t* keys = at.at + r * at.ld;
    float *w = at.val + r * at.ld, *sharp = at.sharp + r * at.ld;
    if (dense) {
      w = strip.row(r) + strip.lo(r), sharp += strip.lo(r);
      rows.n[r] = (int)std::max<int64_t>(0, strip.hi(r) - strip.lo(r));
    }
    auto all_keys = [&] {
      if (dense) std::iota(keys, keys + rows.n[r], (int32_t)strip.lo(r));
    };
    if (!finite(to, task.dv)) {
      all_keys();
      rescue(strip, rows.n[r], keys, w, to, [&](float y, int64_t) { return y * inverse; });
    }
    if (c.stats.data) {
      float* stat = block.of(c.stats, r);
      stat[0] = block.mu[r], stat[1] = block.mu_rest[r], stat[2] = block.m[r], stat[3] = l;
      stat[4] = block.p[r], stat[5] = rows.cut[r], stat[6] = block.shift[r], stat[7] = 0.f;
    }
    if (!GUIDE) continue;
    float *guide = block.of(c.guide, r), *g = at.guide + r * cols;
    for (int64_t x = 0; x < task.dv; x++) guide[x] = (g[x] - h * to[x]) * scale;
    if (finite(guide, task.dv)) continue;
    all_keys();
    rescue(strip, rows.n[r], keys, sharp, guide,
           [&](float y, int64_t x) { return (y - h * (to[x] * UNIT)) * scale; });
  }
}

// ------------------------------------------------------------------------------------------------

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
  } else if (!plain_block<Phi>(block, at, 1.f) && c.has(L1)) {
    plain_block<Phi>(block, at, UNIT);
  }
}

template <class Phi>
bool forward_task(const Task& task, Arena& arena) {
  if (!arena.reserve(ForwardScratch::size(task))) return false;
  ForwardScratch at(arena, task);
  place_keys(task, at);
  for (int64_t h = 0; h < task.heads(); h++)
    for (int64_t i = task.begin; i < task.end; i += task.rows)
      forward_block<Phi>(task, at, task.group * task.heads() + h, i);
  return true;
}

}  // namespace
