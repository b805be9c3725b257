// Exact fused LSSA and LSSAR attention on the CPU, forward and backward, in linear memory.
//
// Row i sees N_i = Lk - Lq + i + 1 keys. Everything is in base 2, because the weights do not change
// when a row of activations is scaled: with s = log2(e) log(d) log(N_i) cos(q_i, k_j),
//
//   f = log2(1 + 2^s)                     softplus, over ln 2
//   z = relu(f - mu) / M                  mu = mean_j f (0 in rows 1..3), M = max_j f - mu
//   w = z^p / l,  l = sum_j z^p           out = w V
//   ds = (p z^(p-1) / (l M) (dW - D) - E) sigma(s),  dW = dOut V^T,  D = dOut . out
//   E  = (1/N_i) sum_j p z^(p-1) / (l M) (dW - D)   (0 in rows 1..3)
//
// LSSA, and a row whose keys are all alike (M below fp32 resolution), are the case p = 1, mu = 0.
//
// Sparsity: the forward leaves out entries with z^p < 2^-24 / N_i, the backward those with
// z^(p-1) < 2^-24 / N_i. As the largest z is 1, what is dropped is below 2^-24 of the row's sum of
// z^p, and of z^(p-1). ds stays dense through E. A tile where most entries count is multiplied
// densely instead.
//
// A block of ROWS queries keeps its scores for all keys ("strip": [tile][row][key], ROWS x Lk), so
// q k^T is computed once in each direction. Blocks never depend on the number of threads: out and
// dq have the same bits for any number, dk and dv for the same number of chunks per head.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <type_traits>
#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__AVX2__) && defined(__FMA__) && !defined(LSSAR_PORTABLE)
#include <immintrin.h>
#define LSSAR_AVX2 1
#endif

namespace {

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8u __attribute__((vector_size(32), aligned(4), may_alias));

constexpr int MR = 6;      // microkernel: MR x 16 outputs in 12 registers
constexpr int PANEL = 16;  // keys side by side in a transposed panel
constexpr int TILE = 192;  // keys a tile: a multiple of PANEL and MR; one log per TILE / 8 factors
constexpr int ROWS = 72;   // queries a block: a multiple of 8 and MR
constexpr int LIST = 208;  // entries a row's list can hold: at least TILE + 8
constexpr int DIRECT = 4;  // up to this many queries (decoding), keys are read where they lie
constexpr float MASKED = -126.f;  // |s| <= log2(e) log(256) log(2^23) < 126: nothing real is lower
constexpr float EPS = 1e-12f;     // as F.normalize

inline v8 load(const float* p) { return *(const v8u*)p; }
inline void store(float* p, v8 x) { *(v8u*)p = x; }
inline v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }
inline v8 bits(i8 x) { return (v8)x; }
inline i8 bits(v8 x) { return (i8)x; }
inline v8 where(i8 c, v8 a, v8 b) { return bits((bits(a) & c) | (bits(b) & ~c)); }

#ifdef LSSAR_AVX2
inline v8 maximum(v8 a, v8 b) { return _mm256_max_ps(a, b); }
// the sums of four vectors, each ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
inline void sum4(const v8* x, float* to) {
  __m256 y = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
inline float sum(v8 x) {
  __m256 y = _mm256_hadd_ps(x, x);
  y = _mm256_hadd_ps(y, y);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
struct Lanes {  // for every 8-bit mask, the set lanes first
  alignas(32) int32_t lane[256][8];
  constexpr Lanes() : lane() {
    for (int m = 0; m < 256; m++)
      for (int b = 0, n = 0; b < 8; b++)
        if (m >> b & 1) lane[m][n++] = b;
  }
};
constexpr Lanes LANES;
inline int compress(float* val, int32_t* idx, v8 x, v8 cut, int base) {
  int mask = _mm256_movemask_ps(_mm256_cmp_ps(x, cut, _CMP_GT_OQ));
  __m256i lanes = _mm256_load_si256((const __m256i*)LANES.lane[mask]);
  store(val, _mm256_permutevar8x32_ps(x, lanes));
  *(i8u*)idx = (i8)_mm256_add_epi32(lanes, _mm256_set1_epi32(base));
  return __builtin_popcount(mask);
}
#else
inline v8 maximum(v8 a, v8 b) { return where(a > b, a, b); }
inline float sum(v8 x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
inline void sum4(const v8* x, float* to) {
  for (int i = 0; i < 4; i++) to[i] = sum(x[i]);
}
inline int compress(float* val, int32_t* idx, v8 x, v8 cut, int base) {
  int n = 0;
  for (int b = 0; b < 8; b++) {
    val[n] = x[b];
    idx[n] = base + b;
    n += x[b] > cut[0];
  }
  return n;
}
#endif

inline float largest(v8 x) {
  float m = x[0];
  for (int b = 1; b < 8; b++) m = std::max(m, x[b]);
  return m;
}

// 2^x for -126 <= x <= 64, to 1 ulp
inline v8 exp2v(v8 x) {
  const v8 magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  v8 t = x + magic, r = x - (t - magic);
  v8 y = all(1.535275e-4f);
  y = y * r + all(1.3398874e-3f);
  y = y * r + all(9.6184373e-3f);
  y = y * r + all(5.5503324e-2f);
  y = y * r + all(2.4022648e-1f);
  y = y * r + all(6.9314720e-1f);
  y = y * r + all(1.f);
  return bits(bits(y) + (bits(t) << 23));
}

// log2(x) for normal x > 0, to 1e-7 relative also near 1
inline v8 log2v(v8 x) {
  i8 e = (bits(x) - 0x3f3504f3) >> 23;
  v8 t = bits(bits(x) - (e << 23)) - all(1.f);
  v8 y = all(-0.10994941f);
  y = y * t + all(0.18617489f);
  y = y * t + all(-0.19106278f);
  y = y * t + all(0.20460063f);
  y = y * t + all(-0.23961740f);
  y = y * t + all(0.28856741f);
  y = y * t + all(-0.36069665f);
  y = y * t + all(0.48089824f);
  y = y * t + all(-0.72134735f);
  y = y * t + all(1.44269504f);
  return y * t + __builtin_convertvector(e, v8);
}

inline v8 minus_abs(v8 x) { return bits(bits(x) | INT32_MIN); }

inline v8 softplus(v8 s) {
  v8 e = exp2v(minus_abs(s));
  v8 y = all(7.5491729e-3f);
  y = y * e + all(-4.2567025e-2f);
  y = y * e + all(1.1285613e-1f);
  y = y * e + all(-1.9711892e-1f);
  y = y * e + all(2.7564139e-1f);
  y = y * e + all(-3.5840847e-1f);
  y = y * e + all(4.8069296e-1f);
  y = y * e + all(-7.2134021e-1f);
  y = y * e + all(1.4426950f);
  return y * e + maximum(s, all(0.f));
}

inline v8 sigmoid(v8 s) {
  v8 e = exp2v(minus_abs(s));
  return where(s < all(0.f), e, all(1.f)) / (all(1.f) + e);
}

// z^p for 0 <= z <= 1; 0 at z = 0 also for p = 0, as relu'(0) = 0. The whole part of p by squaring:
// exp2(p log2 z) alone would lose p log2(z) ulps.
inline v8 power(v8 z, float p) {
  p = std::min(p, 1e9f);  // beyond, any z < 1 gives 0 as well, and an int could not hold p
  int whole = (int)p;
  float rest = p - (float)whole;
  v8 y = all(1.f), square = z;
  for (int n = whole; n; n >>= 1) {
    if (n & 1) y = y * square;
    square = square * square;
  }
  if (rest != 0.f) y = y * exp2v(all(rest) * log2v(z));
  return where(z > all(0.f), y, all(0.f));
}

inline float dot(const float* a, const float* b, int64_t d) {
  v8 acc0 = all(0.f), acc1 = all(0.f);
  int64_t x = 0;
  for (; x + 16 <= d; x += 16) {
    acc0 += load(a + x) * load(b + x);
    acc1 += load(a + x + 8) * load(b + x + 8);
  }
  if (x + 8 <= d) acc0 += load(a + x) * load(b + x), x += 8;
  float tail = 0.f;
  for (; x < d; x++) tail += a[x] * b[x];
  return sum(acc0 + acc1) + tail;
}

// ||x||, in double where fp32 squares would overflow or vanish
inline float norm(const float* x, int64_t d) {
  float square = dot(x, x, d);
  if (square > 1e-30f && square < 1e30f) return std::sqrt(square);
  double wide = 0;
  for (int64_t i = 0; i < d; i++) wide += (double)x[i] * x[i];
  return (float)std::sqrt(wide);
}

// C[m][0..8V) += sum_k A(m, k) B[k][0..8V), A(m, k) = A[k][m] when T, else A[m][k]
template <int M, int V, bool T>
__attribute__((noinline)) void micro(int64_t depth, const float* a, int64_t lda, const float* b,
                                     int64_t ldb, float* c, int64_t ldc, bool add) {
  v8 acc[M][V] = {};
  for (int64_t k = 0; k < depth; k++, a += T ? lda : 1, b += ldb) {
    v8 y[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) y[v] = load(b + 8 * v);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      v8 x = all(T ? a[m] : a[m * lda]);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) acc[m][v] += x * y[v];
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
      float* to = c + m * ldc + 8 * v;
      store(to, add ? load(to) + acc[m][v] : acc[m][v]);
    }
}

template <int N, class F>
inline void static_switch(int n, F&& f) {  // calls f(integral_constant n), 1 <= n <= N
  if constexpr (N > 0) {
    if (n == N)
      f(std::integral_constant<int, N>());
    else
      static_switch<N - 1>(n, f);
  }
}

// micro over `cols` (a multiple of 8) columns of B and C, m <= MR rows
template <bool T>
inline void gemm_rows(int m, int64_t depth, const float* a, int64_t lda, const float* b,
                      int64_t ldb, float* c, int64_t ldc, int cols, bool add) {
  static_switch<MR>(m, [&](auto mr) {
    int x = 0;
    for (; x + 16 <= cols; x += 16)
      micro<mr.value, 2, T>(depth, a, lda, b + x, ldb, c + x, ldc, add);
    if (x < cols) micro<mr.value, 1, T>(depth, a, lda, b + x, ldb, c + x, ldc, add);
  });
}

// The sparse products, columns in slices of up to 8 registers. Loops over R ask to be unrolled:
// otherwise filling an array of registers becomes a call to memcpy.
template <class F>
inline void by_columns(int cols, F&& f) {
  for (int x = 0; x < cols; x += 64)
    static_switch<8>(std::min(8, (cols - x) / 8), [&](auto regs) { f(regs, x); });
}

// out += sum_e w[e] V[idx[e]]
inline void sparse_sum(int n, const int32_t* idx, const float* w, const float* v, int64_t ldv,
                       float* out, int cols) {
  by_columns(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    v8 acc[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) acc[i] = load(out + x + 8 * i);
    for (int e = 0; e < n; e++) {
      const float* row = v + idx[e] * ldv + x;
      v8 y = all(w[e]);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) acc[i] += y * load(row + 8 * i);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) store(out + x + 8 * i, acc[i]);
  });
}

// to[at[e]] = a . rows[at[e] / LIST]: the products of one key with the rows that count it
inline void sparse_dot(int n, const uint16_t* at, const float* a, const float* rows, float* to,
                       int cols) {
  by_columns(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    v8 y[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) y[i] = load(a + x + 8 * i);
    auto lanes = [&](int e) {
      const float* row = rows + at[e] / LIST * cols + x;
      v8 even = y[0] * load(row), odd = all(0.f);
#pragma GCC unroll 8
      for (int i = 1; i < R; i++) (i & 1 ? odd : even) += y[i] * load(row + 8 * i);
      return even + odd;
    };
    auto put = [&](int e, float part) { to[at[e]] = x ? to[at[e]] + part : part; };
    int e = 0;
    for (; e + 4 <= n; e += 4) {
      v8 four[4] = {lanes(e), lanes(e + 1), lanes(e + 2), lanes(e + 3)};
      float part[4];
      sum4(four, part);
      for (int i = 0; i < 4; i++) put(e + i, part[i]);
    }
    for (; e < n; e++) put(e, sum(lanes(e)));
  });
}

// out += sum_e w[at[e]] rows[at[e] / LIST]
inline void sparse_gather(int n, const uint16_t* at, const float* w, const float* rows, float* out,
                          int cols) {
  by_columns(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    v8 acc[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) acc[i] = load(out + x + 8 * i);
    for (int e = 0; e < n; e++) {
      const float* row = rows + at[e] / LIST * cols + x;
      v8 y = all(w[at[e]]);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) acc[i] += y * load(row + 8 * i);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) store(out + x + 8 * i, acc[i]);
  });
}

struct View {  // (B, H, L, d) float32, unit stride along d
  float* data;
  int64_t b, h, l;
};

struct Call {  // the layout of the int64 array that Python passes
  int64_t batch, heads, lq, lk, d, threads, train_length;
  View q, k, v, out, stats, dout, dq, dk, dv;
};

struct Power {
  double p, alpha;  // p = 0: LSSA
};

struct Head {  // one head's tensors, and the rows [begin, end) of one task
  const Call& call;
  Power power;
  int64_t b, h, begin, end;
  int64_t d = call.d, cols = (call.d + 7) / 8 * 8;
  int64_t keys = call.lk - call.lq + end;  // keys the last row sees
  int64_t tiles = (keys + TILE - 1) / TILE;
  bool direct = end - begin <= DIRECT;
  float* row(const View& t, int64_t i) const { return t.data + b * t.b + h * t.h + i * t.l; }
  float* stat(int64_t i) const { return row(call.stats, i); }
};

struct Arena {  // one allocation, handed out in aligned pieces
  float* base = nullptr;
  size_t used = 0;
  ~Arena() { std::free(base); }
  bool reserve(size_t floats) {
    size_t bytes = (floats * 4 + 63) / 64 * 64, huge = (size_t)1 << 21;
    bool large = bytes > 2 * huge;
    if (large) bytes = (bytes + huge - 1) / huge * huge;
    base = (float*)std::aligned_alloc(large ? huge : 64, bytes);
#ifdef MADV_HUGEPAGE
    // a row block sweeps over several MB; 4 KB pages would miss the TLB all the way
    if (base && large) madvise(base, bytes, MADV_HUGEPAGE);
#endif
    return base != nullptr;
  }
  float* take(size_t floats) {
    float* p = base + used;
    used += (floats + 15) / 16 * 16;
    return p;
  }
};

// k^T in panels [panel][d][PANEL], keys scaled by `scale` where given, zeros past the last key
void pack_panels(const float* x, int64_t ld, int64_t n, int64_t d, const float* scale, float* to) {
  for (int64_t j = 0; j < (n + PANEL - 1) / PANEL * PANEL; j++) {
    float* column = to + j / PANEL * PANEL * d + j % PANEL;
    float c = j >= n ? 0.f : scale ? scale[j] : 1.f;
    const float* from = x + std::min(j, n - 1) * ld;
    for (int64_t i = 0; i < d; i++) column[i * PANEL] = j < n ? c * from[i] : 0.f;
  }
}

// rows [n][cols], zeros past d
void pack_rows(const float* x, int64_t ld, int64_t n, int64_t d, int64_t cols, const float* scale,
               float* to) {
  for (int64_t j = 0; j < n; j++) {
    float c = scale ? scale[j] : 1.f;
    for (int64_t i = 0; i < d; i++) to[j * cols + i] = c * x[j * ld + i];
    for (int64_t i = d; i < cols; i++) to[j * cols + i] = 0.f;
  }
}

struct Block {  // up to ROWS consecutive queries of a head and what they know
  const Head& head;
  int64_t first;
  int rows;
  alignas(32) float count[ROWS], scale[ROWS], p[ROWS], mu[ROWS], m[ROWS], cut[ROWS], l[ROWS];

  Block(const Head& head, int64_t first)
      : head(head), first(first), rows((int)std::min<int64_t>(ROWS, head.end - first)) {
    const Call& c = head.call;
    float log_d = std::log((float)c.d);
    for (int r = 0; r < ROWS; r++) count[r] = (float)seen(std::min(r, rows - 1));
    for (int r = 0; r < ROWS; r += 8) store(scale + r, all(log_d) * log2v(load(count + r)));
    for (int r = 0; r < ROWS; r++) {
      p[r] = (float)head.power.p;
      if (count[r] > c.train_length && head.power.alpha != 0)
        p[r] = (float)(head.power.p *
                       (1 + head.power.alpha * (std::sqrt(count[r] / (double)c.train_length) - 1)));
      mu[r] = 0.f, m[r] = 1.f, l[r] = 0.f, cut[r] = MASKED;
    }
  }
  int64_t seen(int r) const { return head.call.lk - head.call.lq + first + r + 1; }
  int64_t tiles() const { return (seen(rows - 1) + TILE - 1) / TILE; }
  // keys of this tile that row r sees
  int width(int r, int64_t tile) const {
    return (int)std::max<int64_t>(0, std::min<int64_t>(TILE, seen(r) - tile * TILE));
  }
  bool lssa() const { return head.power.p == 0; }
  void stage_one(int r) { mu[r] = 0.f, m[r] = 1.f, p[r] = 1.f; }

  // The score below which z^(p-less) < 2^-24 / N, rounded down: s = log2(2^f - 1), f = mu + M z.
  void cuts(float less) {
    for (int r = 0; r < ROWS; r += 8) {
      v8 exponent = (log2v(load(count + r)) + all(24.f)) / (load(p + r) - all(less));
      v8 z = exp2v(maximum(-exponent, all(-126.f)));
      v8 f = load(mu + r) + z * load(m + r);
      v8 tiny = log2v(maximum(f, all(1e-37f))) - all(0.53f);  // 2^f - 1 = f ln 2
      v8 medium = log2v(maximum(exp2v(where(f < all(20.f), f, all(20.f))) - all(1.f), all(1e-6f)));
      v8 s = where(f < all(1e-3f), tiny, where(f < all(20.f), medium, f)) - all(2e-3f);
      store(cut + r, maximum(s, all(MASKED)));
    }
    for (int r = 0; r < ROWS; r++)
      if (p[r] == 1.f && mu[r] == 0.f) cut[r] = MASKED;  // every key counts
  }
};

// Scores of a block against one tile, [row][TILE]; columns past a row's last key become MASKED
// up to the next multiple of 8.
void score_tile(const Block& block, int64_t tile, const float* q, const float* panels, float* to) {
  int64_t d = block.head.d, cols = block.head.cols;
  const float* panel = panels + tile * TILE * d;
  for (int x = 0; x < block.width(block.rows - 1, tile); x += PANEL, panel += PANEL * d)
    for (int r = 0; r < block.rows; r += MR) {
      int m = std::min(MR, block.rows - r);
      if (x < block.width(r + m - 1, tile))
        gemm_rows<false>(m, d, q + r * cols, cols, panel, PANEL, to + r * TILE + x, TILE, PANEL,
                         false);
    }
  for (int r = 0; r < block.rows; r++)
    for (int x = block.width(r, tile); x % 8; x++) to[r * TILE + x] = MASKED;
}

// Scores of a few queries without packing the keys.
void score_direct(const Block& block, const float* q, float* strip) {
  const Head& head = block.head;
  for (int64_t j = 0; j < block.seen(block.rows - 1); j++) {
    const float* key = head.row(head.call.k, j);
    float inverse = 1.f / std::max(norm(key, head.d), EPS);
    float* to = strip + j / TILE * ROWS * TILE + j % TILE;
    for (int r = 0; r < block.rows; r++)
      if (j < block.seen(r)) to[r * TILE] = inverse * dot(q + r * head.cols, key, head.d);
  }
  for (int r = 0; r < block.rows; r++)
    for (int64_t j = block.seen(r); j % 8; j++)
      strip[j / TILE * ROWS * TILE + r * TILE + j % TILE] = MASKED;
}

// sum f = sum max(s, 0) + log2 prod(1 + 2^-|s|): one exp an entry and one log a tile. Two chains,
// as a product waits for the one before.
inline void tile_stats(const float* s, int width, double& total, float* top) {
  v8 linear[2] = {}, product[2] = {all(1.f), all(1.f)}, high = load(top);
  auto take = [&](int x, int chain) {
    v8 y = load(s + x);
    linear[chain] += maximum(y, all(0.f));
    product[chain] += product[chain] * exp2v(minus_abs(y));
    high = maximum(high, y);
  };
  int x = 0;
  for (; x + 8 < width; x += 16) take(x, 0), take(x + 8, 1);
  if (x < width) take(x, 0);
  total += sum(linear[0] + linear[1] + log2v(product[0] * product[1]));
  store(top, high);
}

double accurate_total(const Block& block, int r, const float* strip) {
  double total = 0;
  for (int64_t tile = 0; tile < block.tiles(); tile++) {
    v8 part = all(0.f);
    for (int x = 0; x < block.width(r, tile); x += 8)
      part += softplus(load(strip + (tile * ROWS + r) * TILE + x));
    total += sum(part);
  }
  return total;
}

// mu and M of every row; a row without contrast falls back to stage one.
void row_statistics(Block& block, const float* strip, double* total, const float* top) {
  alignas(32) float f_max[ROWS] = {};
  for (int r = 0; r < block.rows; r++) f_max[r] = largest(load(top + 8 * r));
  for (int r = 0; r < ROWS; r += 8) store(f_max + r, softplus(load(f_max + r)));
  for (int r = 0; r < block.rows; r++) {
    // 1 + e loses up to 2^-25 an entry, which only matters where the mean is small
    if (total[r] < 0.25 * block.count[r]) total[r] = accurate_total(block, r, strip);
    block.mu[r] = block.count[r] > 3 ? (float)(total[r] / block.count[r]) : 0.f;
    block.m[r] = f_max[r] - block.mu[r];
    if (block.m[r] <= 0x1p-20f * f_max[r]) block.stage_one(r);
  }
}

// z^p of `n` scores in place (padded to 8), returns their sum
inline float weigh(float* s, int n, const Block& block, int r) {
  v8 total = all(0.f), mu = all(block.mu[r]), m = all(block.m[r]);
  for (int e = 0; e < n; e += 8) {
    v8 z = maximum((softplus(load(s + e)) - mu) / m, all(0.f));
    v8 w = block.p[r] == 1.f ? z : z * power(z, block.p[r] - 1.f);
    store(s + e, w);
    total += w;
  }
  return sum(total);
}

struct Lists {  // per row of a tile: the entries that count, then their values
  float* val;
  int32_t* idx;
  int* n;
};

// Lists of the entries above each row's cut; returns whether the tile is better taken densely.
bool select(const Block& block, int64_t tile, const float* s, const Lists& to) {
  int kept = 0, present = 0;
  if (block.lssa() && block.rows > 1) return true;  // every entry counts
  for (int r = 0; r < block.rows; r++) {
    int n = 0, width = block.width(r, tile);
    v8 cut = all(block.cut[r]);
    float* val = to.val + r * LIST;
    int32_t* idx = to.idx + r * LIST;
    for (int x = 0; x < width; x += 8)
      n += compress(val + n, idx + n, load(s + r * TILE + x), cut, x);
    store(val + n, all(MASKED));
    to.n[r] = n;
    kept += n;
    present += width;
  }
  // About where the two cost the same; a small tile has nothing to gain, and its short rows keep
  // the exactly zero gradient of a single entry.
  return present >= 2048 && kept > 0.55 * present;
}

inline void clear_after(float* row, int width) {  // zeros in columns [width, TILE)
  for (int x = width; x < TILE; x++) row[x] = 0.f;
}

void forward_tile(Block& block, int64_t tile, float* s, const Lists& lists, const float* v,
                  int64_t ldv, float* out, double* l) {
  int cols = (int)block.head.cols;
  v += tile * TILE * ldv;
  if (select(block, tile, s, lists)) {
    for (int r = 0; r < block.rows; r++) {
      int width = block.width(r, tile);
      l[r] += weigh(s + r * TILE, width, block, r);
      clear_after(s + r * TILE, width);
    }
    for (int r = 0; r < block.rows; r += MR) {
      int m = std::min(MR, block.rows - r);
      gemm_rows<false>(m, block.width(r + m - 1, tile), s + r * TILE, TILE, v, ldv, out + r * cols,
                       cols, cols, true);
    }
    return;
  }
  for (int r = 0; r < block.rows; r++) l[r] += weigh(lists.val + r * LIST, lists.n[r], block, r);
  for (int r = 0; r < block.rows; r++)
    sparse_sum(lists.n[r], lists.idx + r * LIST, lists.val + r * LIST, v, ldv, out + r * cols,
               cols);
}

// q scaled to s = q . k_hat, rows [ROWS][cols]
void pack_queries(const Block& block, float* q) {
  const Head& head = block.head;
  for (int r = 0; r < block.rows; r++) {
    const float* from = head.row(head.call.q, block.first + r);
    float c = block.scale[r] / std::max(norm(from, head.d), EPS);
    pack_rows(from, 0, 1, head.d, head.cols, &c, q + r * head.cols);
  }
}

void key_norms(const Head& head, float* inverse) {
  for (int64_t j = 0; j < head.keys; j++)
    inverse[j] = 1.f / std::max(norm(head.row(head.call.k, j), head.d), EPS);
}

struct ForwardScratch {
  float *inverse = nullptr, *panels = nullptr, *v = nullptr, *strip, *q, *out, *val;
  int32_t* idx;
  static size_t size(const Head& h) {
    size_t keys = h.tiles * TILE;
    return keys * (1 + h.d + h.cols + ROWS) + ROWS * (2 * h.cols + 2 * LIST) + 256;
  }
  ForwardScratch(Arena& arena, const Head& h) {
    size_t keys = h.tiles * TILE;
    arena.used = 0;
    inverse = arena.take(keys), panels = arena.take(keys * h.d), v = arena.take(keys * h.cols);
    strip = arena.take(keys * ROWS), q = arena.take(ROWS * h.cols), out = arena.take(ROWS * h.cols);
    val = arena.take(ROWS * LIST), idx = (int32_t*)arena.take(ROWS * LIST);
  }
};

void forward_block(Block& block, const ForwardScratch& at, const float* v, int64_t ldv) {
  const Head& head = block.head;
  alignas(32) float top[8 * ROWS];  // per row, the maximum in each lane
  double total[ROWS] = {}, l[ROWS] = {};
  int n[ROWS];
  for (float& x : top) x = MASKED;
  pack_queries(block, at.q);
  if (head.direct) score_direct(block, at.q, at.strip);
  for (int64_t tile = 0; tile < block.tiles(); tile++) {
    float* s = at.strip + tile * ROWS * TILE;
    if (!head.direct) score_tile(block, tile, at.q, at.panels, s);
    if (!block.lssa())
      for (int r = 0; r < block.rows; r++)
        tile_stats(s + r * TILE, block.width(r, tile), total[r], top + 8 * r);
  }
  if (block.lssa())
    for (int r = 0; r < block.rows; r++) block.stage_one(r);
  else
    row_statistics(block, at.strip, total, top);
  block.cuts(0.f);
  for (int64_t i = 0; i < block.rows * head.cols; i++) at.out[i] = 0.f;
  for (int64_t tile = 0; tile < block.tiles(); tile++)
    forward_tile(block, tile, at.strip + tile * ROWS * TILE, {at.val, at.idx, n}, v, ldv, at.out,
                 l);
  for (int r = 0; r < block.rows; r++) {
    float* to = head.row(head.call.out, block.first + r);
    float inverse = (float)(1 / l[r]);
    for (int64_t x = 0; x < head.d; x++) to[x] = at.out[r * head.cols + x] * inverse;
    float* stat = head.stat(block.first + r);
    stat[0] = block.mu[r], stat[1] = block.m[r], stat[2] = (float)l[r], stat[3] = block.p[r];
  }
}

void forward_head(const Head& head, Arena& arena) {
  ForwardScratch at(arena, head);
  const Call& c = head.call;
  const float* v = head.row(c.v, 0);
  int64_t ldv = c.v.l;
  if (!head.direct) {
    key_norms(head, at.inverse);
    pack_panels(head.row(c.k, 0), c.k.l, head.keys, head.d, at.inverse, at.panels);
  }
  if (!head.direct || head.d % 8) {
    pack_rows(v, ldv, head.keys, head.d, head.cols, nullptr, at.v);
    v = at.v, ldv = head.cols;
  }
  for (int64_t i = head.begin; i < head.end; i += ROWS) {
    Block block(head, i);
    forward_block(block, at, v, ldv);
  }
}

struct BackwardScratch {
  float *inverse, *panels, *k, *v, *v_panels, *strip, *q, *dout, *dq, *dw, *w, *dk, *dv, *val;
  int32_t *idx, *n;
  bool* v_packed;
  bool* dense;
  static size_t size(const Head& h) {
    size_t keys = h.tiles * TILE;
    return keys * (1 + 2 * h.d + 4 * h.cols + ROWS) + 2 * h.tiles * ROWS * LIST +
           3 * ROWS * h.cols + 2 * ROWS * LIST + h.tiles * (ROWS + 2) + 512;
  }
  BackwardScratch(Arena& arena, const Head& h) {
    size_t keys = h.tiles * TILE, wide = keys * h.cols;
    arena.used = 0;
    inverse = arena.take(keys), panels = arena.take(keys * h.d), k = arena.take(wide);
    v = arena.take(wide), v_panels = arena.take(keys * h.d), strip = arena.take(keys * ROWS);
    q = arena.take(ROWS * h.cols), dout = arena.take(ROWS * h.cols), dq = arena.take(ROWS * h.cols);
    dw = arena.take(ROWS * LIST), w = arena.take(ROWS * LIST);
    dk = arena.take(wide), dv = arena.take(wide);
    val = arena.take(h.tiles * ROWS * LIST), idx = (int32_t*)arena.take(h.tiles * ROWS * LIST);
    n = (int32_t*)arena.take(h.tiles * ROWS);
    v_packed = (bool*)arena.take(h.tiles), dense = (bool*)arena.take(h.tiles);
  }
};

struct Gradients {  // per row: p / (l M), D, sum_j p z^(p-1) / (l M) (dW - D)
  float slope[ROWS], d[ROWS];
  double pull[ROWS] = {};
};

// `val` becomes (p z^(p-1) / (l M)) (dW - D) sigma, dv gains its share. The products run key by
// key over the rows that count it, so that a key's v and dv are touched once and only the block's
// dout has to stay in the first-level cache.
void backward_sparse(const Block& block, int64_t tile, const float* sigma, const Lists& lists,
                     const BackwardScratch& at, Gradients& g) {
  int cols = (int)block.head.cols, widest = block.width(block.rows - 1, tile);
  uint16_t where_key[TILE][ROWS];
  int n_key[TILE] = {};
  for (int r = 0; r < block.rows; r++) {
    float *val = lists.val + r * LIST, *w = at.w + r * LIST;
    v8 mu = all(block.mu[r]), m = all(block.m[r]);
    v8 inv_l = all(1.f / block.l[r]), slope = all(g.slope[r]);
    for (int e = 0; e < lists.n[r]; e += 8) {
      v8 s = load(val + e), z = maximum((softplus(s) - mu) / m, all(0.f));
      v8 y = where(s > all(MASKED), power(z, block.p[r] - 1.f), all(0.f));
      store(w + e, z * y * inv_l);
      store(val + e, y * slope);
    }
    const int32_t* idx = lists.idx + r * LIST;
    for (int e = 0; e < lists.n[r]; e++)
      where_key[idx[e]][n_key[idx[e]]++] = (uint16_t)(r * LIST + e);
  }
  for (int j = 0; j < widest; j++) {
    int64_t key = (tile * TILE + j) * cols;
    sparse_dot(n_key[j], where_key[j], at.v + key, at.dout, at.dw, cols);
    sparse_gather(n_key[j], where_key[j], at.w, at.dout, at.dv + key, cols);
  }
  for (int r = 0; r < block.rows; r++) {
    float *val = lists.val + r * LIST, *dw = at.dw + r * LIST;
    const int32_t* idx = lists.idx + r * LIST;
    v8 pull = all(0.f), d = all(g.d[r]);
    for (int e = 0; e < lists.n[r]; e += 8) {
      v8 a = load(val + e) * (load(dw + e) - d);
      store(val + e, a);
      pull += a;
    }
    g.pull[r] += sum(pull);
    for (int e = 0; e < lists.n[r]; e++) val[e] *= sigma[r * TILE + idx[e]];
  }
}

void backward_dense(const Block& block, int64_t tile, const float* s, float* val,
                    const BackwardScratch& at, Gradients& g) {
  const Head& head = block.head;
  int cols = (int)head.cols, widest = block.width(block.rows - 1, tile);
  float* panels = at.v_panels + tile * TILE * head.d;
  if (!at.v_packed[tile]) {
    pack_panels(at.v + tile * TILE * cols, cols, std::min<int64_t>(TILE, head.keys - tile * TILE),
                head.d, nullptr, panels);
    at.v_packed[tile] = true;
  }
  for (int x = 0; x < widest; x += PANEL)
    for (int r = 0; r < block.rows; r += MR)
      gemm_rows<false>(std::min(MR, block.rows - r), head.d, at.dout + r * cols, cols,
                       panels + x * head.d, PANEL, at.dw + r * TILE + x, TILE, PANEL, false);
  for (int r = 0; r < block.rows; r++) {
    v8 mu = all(block.mu[r]), m = all(block.m[r]), pull = all(0.f), d = all(g.d[r]);
    v8 inv_l = all(1.f / block.l[r]), slope = all(g.slope[r]);
    float* w = at.dw + r * TILE;
    int width = block.width(r, tile);
    for (int x = 0; x < width; x += 8) {
      v8 score = load(s + r * TILE + x);
      v8 z = maximum((softplus(score) - mu) / m, all(0.f));
      v8 y = power(z, block.p[r] - 1.f);
      y = where(score > all(MASKED), y, all(0.f));
      v8 a = y * slope * (load(w + x) - d);
      store(val + r * LIST + x, a * sigmoid(score));
      store(w + x, z * y * inv_l);
      pull += a;
    }
    clear_after(w, width);
    g.pull[r] += sum(pull);
  }
  for (int x = 0; x < widest; x += MR)
    gemm_rows<true>(std::min(MR, widest - x), block.rows, at.dw + x, TILE, at.dout, cols,
                    at.dv + (tile * TILE + x) * cols, cols, cols, true);
}

// ds in place of sigma, then dq += ds k and dk += ds^T q
void score_gradients(const Block& block, int64_t tile, float* ds, const Lists& lists, bool dense,
                     const BackwardScratch& at, const float* e) {
  int cols = (int)block.head.cols, widest = block.width(block.rows - 1, tile);
  for (int r = 0; r < block.rows; r++) {
    float *row = ds + r * TILE, *val = lists.val + r * LIST;
    int width = block.width(r, tile);
    v8 c = all(-e[r]);
    if (dense)
      for (int x = 0; x < width; x += 8) store(row + x, load(row + x) * c + load(val + x));
    else {
      for (int x = 0; x < width; x += 8) store(row + x, load(row + x) * c);
      for (int i = 0; i < lists.n[r]; i++) row[lists.idx[r * LIST + i]] += val[i];
    }
    clear_after(row, width);
  }
  const float* k = at.k + tile * TILE * cols;
  for (int r = 0; r < block.rows; r += MR) {
    int m = std::min(MR, block.rows - r);
    gemm_rows<false>(m, block.width(r + m - 1, tile), ds + r * TILE, TILE, k, cols,
                     at.dq + r * cols, cols, cols, true);
  }
  for (int x = 0, r = 0; x < widest; x += MR) {
    while (block.width(r, tile) <= x) r++;  // rows that do not reach these keys
    gemm_rows<true>(std::min(MR, widest - x), block.rows - r, ds + r * TILE + x, TILE,
                    at.q + r * cols, cols, at.dk + (tile * TILE + x) * cols, cols, cols, true);
  }
}

// dx of x_hat = x / max(||x||, eps), given g = d x_hat / scale
void through_normalise(const float* x, const float* g, float scale, int64_t d, float* to) {
  float length = norm(x, d), inverse = 1.f / std::max(length, EPS);
  float along = length < EPS ? 0.f : dot(g, x, d) * inverse * inverse;
  for (int64_t i = 0; i < d; i++) to[i] = scale * inverse * (g[i] - along * x[i]);
}

void backward_block(Block& block, const BackwardScratch& at) {
  const Head& head = block.head;
  const Call& c = head.call;
  Gradients g;
  pack_queries(block, at.q);
  for (int r = 0; r < block.rows; r++) {
    const float *dout = head.row(c.dout, block.first + r), *stat = head.stat(block.first + r);
    pack_rows(dout, 0, 1, head.d, head.cols, nullptr, at.dout + r * head.cols);
    block.mu[r] = stat[0], block.m[r] = stat[1], block.l[r] = stat[2], block.p[r] = stat[3];
    g.slope[r] = block.p[r] / (block.m[r] * block.l[r]);
    // by the same steps as dW, so that a row with a single entry has a gradient of exactly zero
    uint16_t place = (uint16_t)(r * LIST);
    pack_rows(head.row(c.out, block.first + r), 0, 1, head.d, head.cols, nullptr, at.dq);
    sparse_dot(1, &place, at.dq, at.dout, at.dw, (int)head.cols);
    g.d[r] = at.dw[place];
  }
  block.cuts(1.f);
  for (int64_t i = 0; i < block.rows * head.cols; i++) at.dq[i] = 0.f;
  auto lists = [&](int64_t tile) {
    return Lists{at.val + tile * ROWS * LIST, at.idx + tile * ROWS * LIST, at.n + tile * ROWS};
  };
  if (head.direct) score_direct(block, at.q, at.strip);  // l was summed over these very scores
  for (int64_t tile = 0; tile < block.tiles(); tile++) {
    float* s = at.strip + tile * ROWS * TILE;
    if (!head.direct) score_tile(block, tile, at.q, at.panels, s);
    at.dense[tile] = select(block, tile, s, lists(tile));
    if (at.dense[tile]) backward_dense(block, tile, s, lists(tile).val, at, g);
    for (int r = 0; r < block.rows; r++)
      for (int x = 0; x < block.width(r, tile); x += 8)
        store(s + r * TILE + x, sigmoid(load(s + r * TILE + x)));
    if (!at.dense[tile])
      backward_sparse(block, tile, s, lists(tile), at, g);
  }
  float e[ROWS];
  for (int r = 0; r < block.rows; r++)
    e[r] = block.mu[r] == 0.f ? 0.f : (float)(g.pull[r] / block.count[r]);
  for (int64_t tile = 0; tile < block.tiles(); tile++)
    score_gradients(block, tile, at.strip + tile * ROWS * TILE, lists(tile), at.dense[tile], at, e);
  for (int r = 0; r < block.rows; r++)
    through_normalise(head.row(c.q, block.first + r), at.dq + r * head.cols, block.scale[r], head.d,
                      head.row(c.dq, block.first + r));
}

// dk and dv of one head from the sums of its chunks, each [tiles * TILE][cols]
struct KeySums {
  const float *dk, *dv;
  int64_t keys;
};

void finish_keys(const Head& head, KeySums* sums, int chunks, float* scratch) {
  const Call& c = head.call;
  for (int64_t j = 0; j < c.lk; j++) {
    float *dk = scratch, *dv = scratch + head.cols;
    for (int64_t x = 0; x < 2 * head.cols; x++) scratch[x] = 0.f;
    for (int i = 0; i < chunks; i++) {
      if (j >= sums[i].keys) continue;
      for (int64_t x = 0; x < head.cols; x++) {
        dk[x] += sums[i].dk[j * head.cols + x];
        dv[x] += sums[i].dv[j * head.cols + x];
      }
    }
    through_normalise(head.row(c.k, j), dk, 1.f, head.d, head.row(c.dk, j));
    std::copy(dv, dv + head.d, head.row(c.dv, j));
  }
}

void backward_head(const Head& head, Arena& arena, float* dk, float* dv) {
  BackwardScratch at(arena, head);
  const Call& c = head.call;
  if (dk) at.dk = dk, at.dv = dv;
  key_norms(head, at.inverse);
  pack_panels(head.row(c.k, 0), c.k.l, head.keys, head.d, at.inverse, at.panels);
  pack_rows(head.row(c.k, 0), c.k.l, head.keys, head.d, head.cols, at.inverse, at.k);
  pack_rows(head.row(c.v, 0), c.v.l, head.keys, head.d, head.cols, nullptr, at.v);
  std::fill(at.dw, at.dw + ROWS * LIST, 0.f);  // the padding of lists must be finite
  std::fill(at.v_packed, at.v_packed + head.tiles, false);
  std::fill(at.dk, at.dk + head.keys * head.cols, 0.f);
  std::fill(at.dv, at.dv + head.keys * head.cols, 0.f);
  for (int64_t i = head.begin; i < head.end; i += ROWS) {
    Block block(head, i);
    backward_block(block, at);
  }
  if (!dk) {
    KeySums sums{at.dk, at.dv, head.keys};
    finish_keys(head, &sums, 1, at.dw);
  }
}

// Chunks of rows a head is cut into, so that the tasks divide evenly among the threads.
int chunks_per_head(const Call& c) {
  int64_t heads = c.batch * c.heads, blocks = (c.lq + ROWS - 1) / ROWS;
  if (heads >= 8 * c.threads) return 1;
  int64_t chunks = c.threads / std::gcd(heads, c.threads);
  return (int)std::max<int64_t>(1, std::min({chunks, blocks / 2, (int64_t)8}));
}

// First row of chunk i of n: equal shares of the keys seen, at whole blocks
int64_t chunk_begin(const Call& c, int i, int n) {
  if (i == n) return c.lq;
  double before = (double)(c.lk - c.lq), rows = (double)c.lq;
  double work = (before * rows + rows * rows / 2) * i / n;
  return (int64_t)(std::sqrt(before * before + 2 * work) - before) / ROWS * ROWS;
}

Head task(const Call& c, Power power, int64_t i, int chunks) {
  int64_t chunk = i % chunks, bh = i / chunks;
  return Head{c,       power, bh / c.heads, bh % c.heads, chunk_begin(c, (int)chunk, chunks),
              chunk_begin(c, (int)chunk + 1, chunks)};
}

}  // namespace

extern "C" int lssar_forward(const Call* call, double p, double alpha) {
  const Call& c = *call;
  int chunks = chunks_per_head(c);
  int64_t tasks = c.batch * c.heads * chunks;
  int failed = 0;
#pragma omp parallel num_threads((int)std::min(c.threads, tasks)) reduction(| : failed)
  {
    Arena arena;
    failed = !arena.reserve(ForwardScratch::size(task(c, {p, alpha}, tasks - 1, chunks)));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; i++)
      // the longest rows first
      if (!failed) forward_head(task(c, {p, alpha}, tasks - 1 - i, chunks), arena);
  }
  return failed;
}

extern "C" int lssar_backward(const Call* call, double p, double alpha) {
  const Call& c = *call;
  int chunks = chunks_per_head(c);
  int64_t heads = c.batch * c.heads, tasks = heads * chunks;
  Head last = task(c, {p, alpha}, tasks - 1, chunks);
  size_t wide = last.tiles * TILE * last.cols;
  Arena shared;  // dk and dv of every chunk, when a head has several
  if (chunks > 1 && !shared.reserve(2 * wide * tasks)) return 1;
  int failed = 0;
#pragma omp parallel num_threads((int)std::min(c.threads, tasks)) reduction(| : failed)
  {
    Arena arena;
    failed = !arena.reserve(BackwardScratch::size(last));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; i++) {
      int64_t t = tasks - 1 - i;
      float *dk = nullptr, *dv = nullptr;
      if (chunks > 1) dk = shared.base + 2 * wide * t, dv = dk + wide;
      if (!failed) backward_head(task(c, {p, alpha}, t, chunks), arena, dk, dv);
    }
    if (chunks > 1) {
#pragma omp for
      for (int64_t h = 0; h < heads; h++) {
        KeySums sums[8];
        for (int i = 0; i < chunks; i++) {
          const float* base = shared.base + 2 * wide * (h * chunks + i);
          sums[i] = {base, base + wide, task(c, {p, alpha}, h * chunks + i, chunks).keys};
        }
        if (!failed) finish_keys(task(c, {p, alpha}, h * chunks, chunks), sums, chunks, arena.base);
      }
    }
  }
  return failed;
}
