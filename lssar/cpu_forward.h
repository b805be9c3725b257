// Forward: the scores of a block of rows against a tile of keys, their weights, the values. Rows
// that are normalised twice keep the scores of all tiles, sharpened ones (cpu_sharpen.h) a list.
#pragma once
#include "cpu_call.h"

namespace {

struct ForwardScratch {
  float *inverse, *longest, *panels, *packed_v;  // of the task's keys
  double* prefix;                                // sums of the values before each
  const float* v;                                // packed_v, or the values where they lie
  int64_t ldv, ld, list_ld;                      // of strip and lists: not powers of two
  float *q, *out, *guide;                        // a block's rows
  float *strip, *spread;                         // scores, then weights; r of a dense tile
  float *val, *sharp;                            // lists: scores that count, then weights; r
  int32_t* at;                                   // their keys, from task.from
  static bool whole(const Task& t) { return t.call.has(RECENTRE_L1); }
  static int64_t packed(const Task& t) { return t.dv % W ? t.vcols : 0; }  // else read in place
  static int64_t leading(const Task& t, bool whole) {
    int64_t keys = whole ? t.widest : std::min<int64_t>(t.widest, TILE + 2 * PANEL);
    return round_up(keys, PANEL) + W;
  }
  static size_t size(const Task& t) {
    size_t keys = round_up(t.keys(), PANEL), strip = ROWS * leading(t, whole(t)) + 2 * W;
    size_t prefix = t.call.has(RECENTRE) ? 2 * (keys + 1) * t.dv : 0;
    size_t lists = 3 * (ROWS * leading(t, true) + 2 * W) + strip;
    return keys * (2 + t.d + packed(t)) + prefix + ROWS * (t.cols + 2 * t.vcols) + strip +
           (t.sharp() ? lists : 0) + ROWS * 2 + 512;
  }
  ForwardScratch(Arena& arena, const Task& t)
      : ld(leading(t, whole(t))), list_ld(leading(t, true)) {
    size_t keys = round_up(t.keys(), PANEL), room = ROWS * ld + 2 * W;
    size_t list = ROWS * list_ld + 2 * W;
    arena.used = 0;
    prefix = (double*)arena.take(t.call.has(RECENTRE) ? 2 * (keys + 1) * t.dv : 0);
    inverse = arena.take(keys), longest = arena.take(keys), panels = arena.take(keys * t.d);
    packed_v = arena.take(keys * packed(t));
    q = arena.take(ROWS * t.cols), out = arena.take(ROWS * t.vcols);
    guide = arena.take(ROWS * t.vcols), strip = arena.take(room);
    if (!t.sharp()) return;
    spread = arena.take(room);
    val = arena.take(list), sharp = arena.take(list), at = (int32_t*)arena.take(list);
  }
};

void place_keys(const Task& task, ForwardScratch& at) {
  const Call& c = task.call;
  int64_t keys = task.keys();
  at.v = at.packed_v, at.ldv = task.vcols;
  if (!at.packed(task))
    at.v = task.value(task.from), at.ldv = c.v.row_stride;
  else
    pack_rows(task.value(task.from), c.v.row_stride, keys, task.dv, task.vcols, nullptr, at.packed_v);
  if (!task.direct) {
    for (int64_t j = 0; j < keys; j++) at.inverse[j] = key_factor(task, task.from + j);
    pack_panels(task.key(task.from), c.k.row_stride, keys, task.d, at.inverse, at.panels);
    for (int64_t key : task.bad_keys) {
      int64_t j = key - task.from;
      float* column = at.panels + j / PANEL * PANEL * task.d + j % PANEL;
      for (int64_t i = 0; i < task.d; i++) column[i * PANEL] = 0.f;
    }
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
    for (int64_t j = 0; j < task.to; j++) {
      const float* key = task.key(j);
      if (finite(key, task.d)) longest = std::max(longest, norm(key, task.d));
      if (j >= task.from) at.longest[j - task.from] = longest;
    }
  }
}

// Scores of a block against the keys [from, to): [row][key - start], `start` a multiple of PANEL
struct Strip {
  Block& block;
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

// f(tile) for the tiles of a block, from the first key on
template <class F>
void by_tiles(Block& block, const ForwardScratch& at, F&& f) {
  int64_t start = block.lo_all / PANEL * PANEL;
  int64_t step = ForwardScratch::whole(block.task) ? block.hi_all - start : TILE;
  for (int64_t key = start; key < block.hi_all; key += step)
    f(Strip{block, at, key, std::max(key, block.lo_all), std::min(key + step, block.hi_all)});
}

void score(const Strip& strip) {
  Block& block = strip.block;
  const Task& task = block.task;
  const ForwardScratch& at = strip.at;
  if (task.direct) {
    int64_t n = strip.to - strip.from, shift = strip.from - strip.start;
    score_direct(block, strip.from, n, at.q, at.strip + shift, at.ld, 1);
    for (int r = 0; r < block.rows; r++) {  // keys are not looked at twice: their scores show it
      float* s = strip.row(r);
      if (finite(s + shift, n)) continue;
      for (int64_t x = shift; x < shift + n; x++) {
        if (std::isfinite(s[x])) continue;
        s[x] = 0.f;
        block.bad[r] |= x >= strip.lo(r) && x < strip.hi(r);
      }
    }
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

// Sums are taken of w UNIT where w v would overflow, and of w / UNIT where a row's weights total
// less than FAINT and w v would vanish. Weights total less than 2^31, so both are finite.
constexpr float UNIT = 0x1p-32f, FAINT = 0x1p-90f;

// to[x] = value(x) / unit; whether all is finite. In UNIT only what was not finite before is
// replaced.
template <class F>
inline bool write_row(float* to, int64_t d, float unit, F&& value) {
  if (unit != UNIT)
    for (int64_t x = 0; x < d; x++) to[x] = value(x) / unit;
  else
    for (int64_t x = 0; x < d; x++)
      if (!std::isfinite(to[x])) to[x] = value(x) / unit;
  return finite(to, d);
}

// sums of the values before a key
inline const double* sums_before(const Block& block, const ForwardScratch& at, int64_t key) {
  return at.prefix + (key - block.task.from) * block.task.dv;
}

struct Unfit {  // rows of a block whose sums have to be taken in another unit
  bool large = false, faint = false;
};

// With RECENTRE the guide is the output without the mean.
Unfit write_plain(const Block& block, const ForwardScratch& at, const PlainRows& rows, float unit) {
  const Task& task = block.task;
  const Call& c = task.call;
  Unfit unfit;
  for (int r = 0; r < block.rows; r++) {
    bool faint = c.has(L1) && rows.total[r] > 0 && rows.total[r] < FAINT;
    unfit.faint |= faint;
    if (unit > 1.f && !faint) continue;
    bool recentre = c.has(RECENTRE) && block.lo[r] < block.hi[r];
    float *to = block.of(c.out, r), *sum = at.out + r * task.vcols;
    if (recentre && c.guide.data) to = block.of(c.guide, r);
    unfit.large |=
        !write_row(to, task.dv, unit, [&](int64_t x) { return sum[x] * rows.inverse[r]; });
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
    stat[PlainStat::TOP] = std::isfinite(rows.top[r]) ? rows.top[r] : 0.f;
    stat[PlainStat::INVERSE] = rows.inverse[r];
    stat[PlainStat::AGAIN] = rows.again[r];
    stat[PlainStat::PULL] = rows.pull[r];
  }
  return unfit;
}

template <class Phi>
Unfit plain_block(Block& block, const ForwardScratch& at, float unit) {
  const Task& task = block.task;
  PlainRows rows;
  int64_t start = block.lo_all / PANEL * PANEL;
  std::fill(at.out, at.out + block.rows * task.vcols, 0.f);
  by_tiles(block, at, [&](const Strip& tile) {
    score(tile);
    weigh_plain<Phi>(tile, rows);
    if (unit != 1.f)
      for (int r = 0; r < block.rows; r++)
        for (int64_t x = tile.lo(r) / W * W; x < round_up(tile.hi(r), W); x++)
          tile.row(r)[x] *= unit;
    times_values(tile, at.strip, at.out);
  });
  norms({block, at, start, block.lo_all, block.hi_all}, rows);
  return write_plain(block, at, rows, unit);
}

}  // namespace
