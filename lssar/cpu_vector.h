// Vectors of W floats, products of matrices and sparse sums: what both directions are made of.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__AVX2__) && defined(__FMA__) && !defined(LSSAR_PORTABLE)
#include <immintrin.h>
#define LSSAR_AVX2 1
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && !defined(LSSAR_W8)
#define LSSAR_AVX512 1
#endif
#endif

// Code that is large and not called per entry: once for all activations, not once for each.
#define NOINLINE __attribute__((noinline))

// the chosen of the eight floats of two vectors of four
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i4{__VA_ARGS__})
#endif

namespace {

#ifdef LSSAR_AVX512
constexpr int W = 16;   // floats per vector
constexpr int MR = 12;  // microkernel: MR x 2 vectors of sums stay in registers
#else
constexpr int W = 8;
constexpr int MR = 6;
#endif
constexpr int PANEL = 2 * W;  // columns side by side in a transposed panel

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float vfu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef int32_t viu __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline vf load(const float* p) { return *(const vfu*)p; }
inline vi load(const int32_t* p) { return *(const viu*)p; }
inline void store(float* p, vf x) { *(vfu*)p = x; }
inline void store(int32_t* p, vi x) { *(viu*)p = x; }
inline vf all(float x) { return x - vf{}; }
inline vi all(int32_t x) { return x - vi{}; }
inline vf bits(vi x) { return (vf)x; }
inline vi bits(vf x) { return (vi)x; }
inline vf where(vi c, vf a, vf b) { return bits((bits(a) & c) | (bits(b) & ~c)); }
inline vi iota() {
  vi x;
  for (int i = 0; i < W; i++) x[i] = i;
  return x;
}
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// While it lives, results below 2^-126 are zero in this thread: powers of small numbers are full of
// them, and processors take a hundred cycles to represent one.
struct FlushTiny {
#ifdef LSSAR_AVX2
  unsigned before = _mm_getcsr();
  FlushTiny() { _mm_setcsr(before | _MM_FLUSH_ZERO_ON); }
  ~FlushTiny() { _mm_setcsr(before); }
#endif
};

// --- what the vector extension does not have ----------------------------------------------------
// pack: the chosen lanes of a vector first, in order; what follows them is arbitrary.

#ifdef LSSAR_AVX2
inline float sum8(__m256 x) {
  __m256 y = _mm256_hadd_ps(x, x);
  y = _mm256_hadd_ps(y, y);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
inline float largest8(__m256 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
// the sums of four vectors
inline void sum8_of4(__m256 a, __m256 b, __m256 c, __m256 d, float* to) {
  __m256 y = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
inline double wide_sum8(__m256 x) {
  __m256d y = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)),
                            _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  __m128d z = _mm_add_pd(_mm256_castpd256_pd128(y), _mm256_extractf128_pd(y, 1));
  return _mm_cvtsd_f64(_mm_add_sd(z, _mm_unpackhi_pd(z, z)));
}
#endif

#ifdef LSSAR_AVX512
inline __m256 low(vf x) { return _mm512_castps512_ps256(x); }
inline __m256 high(vf x) { return _mm512_extractf32x8_ps(x, 1); }
inline vf maximum(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf minimum(vf a, vf b) { return _mm512_min_ps(a, b); }
inline float sum(vf x) { return sum8(_mm256_add_ps(low(x), high(x))); }
inline void sum4(const vf* x, float* to) {
  auto half = [&](int i) { return _mm256_add_ps(low(x[i]), high(x[i])); };
  sum8_of4(half(0), half(1), half(2), half(3), to);
}
inline float largest(vf x) { return largest8(_mm256_max_ps(low(x), high(x))); }
inline double wide_sum(vf x) { return wide_sum8(low(x)) + wide_sum8(high(x)); }
inline unsigned lanes(vi chosen) { return _mm512_movepi32_mask((__m512i)chosen); }
inline void pack(float* to, vf x, unsigned mask) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps((__mmask16)mask, x));
}
inline void pack(int32_t* to, vi x, unsigned mask) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32((__mmask16)mask, (__m512i)x));
}
inline vf lookup(const float* table, const int32_t* at) {
  return _mm512_i32gather_ps(_mm512_loadu_si512(at), table, 4);
}
inline vf rough_inverse(vf x) { return _mm512_rcp14_ps(x); }
#elif defined(LSSAR_AVX2)
inline vf maximum(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf minimum(vf a, vf b) { return _mm256_min_ps(a, b); }
inline float sum(vf x) { return sum8(x); }
inline void sum4(const vf* x, float* to) { sum8_of4(x[0], x[1], x[2], x[3], to); }
inline float largest(vf x) { return largest8(x); }
inline double wide_sum(vf x) { return wide_sum8(x); }
inline unsigned lanes(vi chosen) { return _mm256_movemask_ps((__m256)chosen); }
struct Orders {  // for every mask, the numbers of the set lanes
  uint8_t lane[256][8];
  constexpr Orders() : lane() {
    for (int m = 0; m < 256; m++)
      for (int b = 0, n = 0; b < 8; b++)
        if (m >> b & 1) lane[m][n++] = (uint8_t)b;
  }
};
constexpr Orders ORDERS;
inline __m256i order(unsigned mask) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)ORDERS.lane[mask]));
}
inline void pack(float* to, vf x, unsigned mask) {
  store(to, _mm256_permutevar8x32_ps(x, order(mask)));
}
inline void pack(int32_t* to, vi x, unsigned mask) {
  store(to, (vi)_mm256_permutevar8x32_epi32((__m256i)x, order(mask)));
}
inline vf lookup(const float* table, const int32_t* at) {
  return _mm256_i32gather_ps(table, _mm256_loadu_si256((const __m256i*)at), 4);
}
inline vf rough_inverse(vf x) { return _mm256_rcp_ps(x); }
#else
inline vf maximum(vf a, vf b) { return where(a > b, a, b); }
inline vf minimum(vf a, vf b) { return where(a < b, a, b); }
inline float sum(vf x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
inline void sum4(const vf* x, float* to) {
  for (int i = 0; i < 4; i++) to[i] = sum(x[i]);
}
inline float largest(vf x) {
  float m = x[0];
  for (int b = 1; b < W; b++) m = std::max(m, x[b]);
  return m;
}
inline double wide_sum(vf x) {
  double y[4];
  for (int b = 0; b < 4; b++) y[b] = (double)x[b] + x[b + 4];
  return (y[0] + y[2]) + (y[1] + y[3]);
}
inline unsigned lanes(vi chosen) {
  unsigned mask = 0;
  for (int b = 0; b < W; b++) mask |= (unsigned)(chosen[b] != 0) << b;
  return mask;
}
template <class T, class V>
inline void pack(T* to, V x, unsigned mask) {
  for (int b = 0; b < W; b++)
    if (mask >> b & 1) *to++ = x[b];
}
inline vf lookup(const float* table, const int32_t* at) {
  vf y;
  for (int b = 0; b < W; b++) y[b] = table[at[b]];
  return y;
}
inline vf rough_inverse(vf x) { return all(1.f) / x; }
#endif

// 1 / x to 1e-7 for x in [1, 8]: a division takes as long as ten products
inline vf inverse(vf x) {
  vf y = rough_inverse(x);
  return y + y * (all(1.f) - x * y);
}

// --- a row of entries ---------------------------------------------------------------------------

struct Whole {};            // all lanes of a vector belong to the row
struct Part { vi inside; };  // some do
inline vf keep(Whole, vf x) { return x; }
inline vf keep(Part p, vf x) { return bits(bits(x) & p.inside); }
inline vf keep_or(Whole, vf x, float) { return x; }
inline vf keep_or(Part p, vf x, float other) { return where(p.inside, x, all(other)); }
inline unsigned keep(Whole, unsigned mask) { return mask; }
inline unsigned keep(Part p, unsigned mask) { return mask & lanes(p.inside); }

// f(x, Whole or Part) for the vectors that hold the entries [lo, hi) of a row, x a multiple of W
template <class F>
inline void over(int64_t lo, int64_t hi, F&& f) {
  int64_t x = lo / W * W;
  if (x >= hi) return;
  auto part = [&](int64_t x) {
    vi lane = iota() + (int32_t)x;
    return Part{(lane >= (int32_t)lo) & (lane < (int32_t)hi)};
  };
  if (x < lo || hi < x + W) f(x, part(x)), x += W;
  for (; x + W <= hi; x += W) f(x, Whole());
  if (x < hi) f(x, part(x));
}

// [from, to) of CHUNK entries of a row at a time: long sums of floats are made of short ones
constexpr int64_t CHUNK = 256;
template <class F>
inline void by_chunks(int64_t lo, int64_t hi, F&& f) {
  for (int64_t x = lo; x < hi;) {
    int64_t end = std::min(hi, (x / CHUNK + 1) * CHUNK);
    f(x, end);
    x = end;
  }
}

// --- products -----------------------------------------------------------------------------------

inline float dot(const float* a, const float* b, int64_t d) {
  vf acc0 = all(0.f), acc1 = all(0.f);
  int64_t x = 0;
  for (; x + 2 * W <= d; x += 2 * W) {
    acc0 += load(a + x) * load(b + x);
    acc1 += load(a + x + W) * load(b + x + W);
  }
  if (x + W <= d) acc0 += load(a + x) * load(b + x), x += W;
  float tail = 0.f;
  for (; x < d; x++) tail += a[x] * b[x];
  return sum(acc0 + acc1) + tail;
}

// to[i] = a . b[i] of four rows that lie `ld` apart, each summed as `dot` does
inline void dot4(const float* a, const float* b, int64_t ld, int64_t d, float* to) {
  vf acc0[4] = {}, acc1[4] = {};
  int64_t x = 0;
  for (; x + 2 * W <= d; x += 2 * W)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      acc0[i] += load(a + x) * load(b + i * ld + x);
      acc1[i] += load(a + x + W) * load(b + i * ld + x + W);
    }
  if (x + W <= d) {
    for (int i = 0; i < 4; i++) acc0[i] += load(a + x) * load(b + i * ld + x);
    x += W;
  }
  for (int i = 0; i < 4; i++) acc0[i] += acc1[i];
  sum4(acc0, to);
  for (int i = 0; i < 4; i++) {
    float tail = 0.f;
    for (int64_t y = x; y < d; y++) tail += a[y] * b[i * ld + y];
    to[i] += tail;
  }
}

inline double precise_dot(const float* a, const float* b, int64_t d) {
  double total = 0;
  for (int64_t x = 0; x < d; x++) total += (double)a[x] * b[x];
  return total;
}

// ||x||, in double where fp32 squares would overflow or vanish
inline float norm(const float* x, int64_t d) {
  float square = dot(x, x, d);
  if (square > 1e-30f && square < 1e30f) return std::sqrt(square);
  return (float)std::sqrt(precise_dot(x, x, d));
}

// Whether there is no NaN and no inf
inline bool finite(const float* row, int64_t d) {
  uint32_t largest = 0;  // of the bits without the sign: a maximum of integers is vectorised
  for (int64_t x = 0; x < d; x++) {
    uint32_t y;
    std::memcpy(&y, row + x, sizeof y);
    largest = std::max(largest, y & 0x7fffffffu);
  }
  return largest < 0x7f800000u;
}

// C[m][0..W V) (+)= sum_k A(m, k) B[k][0..W V), A(m, k) = A[k][m] when T, else A[m][k]
template <int M, int V, bool T>
NOINLINE void micro(int64_t depth, const float* a, int64_t lda, const float* b,
                                     int64_t ldb, float* c, int64_t ldc, bool add) {
  vf acc[M][V] = {};
  for (int64_t k = 0; k < depth; k++, a += T ? lda : 1, b += ldb) {
    vf y[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) y[v] = load(b + W * v);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      vf x = all(T ? a[m] : a[m * lda]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[m][v] += x * y[v];
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      float* to = c + m * ldc + W * v;
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

// micro over `cols` (a multiple of W) columns of B and C, M rows
template <int M, bool T>
void gemm_columns(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                  float* c, int64_t ldc, int cols, bool add) {
  int x = 0;
  if constexpr (M == 1)  // decoding: more sums at a time, or each waits for the one before
    for (; x + 4 * W <= cols; x += 4 * W)
      micro<1, 4, T>(depth, a, lda, b + x, ldb, c + x, ldc, add);
  for (; x + 2 * W <= cols; x += 2 * W)
    micro<M, 2, T>(depth, a, lda, b + x, ldb, c + x, ldc, add);
  if (x < cols) micro<M, 1, T>(depth, a, lda, b + x, ldb, c + x, ldc, add);
}

// The same for any number of rows up to MR. A few sizes serve all: each takes a second to compile.
template <bool T>
NOINLINE void gemm_rows(int m, int64_t depth, const float* a, int64_t lda, const float* b,
                      int64_t ldb, float* c, int64_t ldc, int cols, bool add) {
  auto rows = [&](auto count) {
    constexpr int M = decltype(count)::value;
    for (; m >= M; m -= M, a += T ? M : M * lda, c += M * ldc)
      gemm_columns<M, T>(depth, a, lda, b, ldb, c, ldc, cols, add);
  };
  rows(std::integral_constant<int, MR>());
  rows(std::integral_constant<int, 4>());
  rows(std::integral_constant<int, 1>());
}

// The sparse products, columns in slices of up to N registers. Loops over R ask to be unrolled:
// otherwise filling an array of registers becomes a call to memcpy.
template <int N, class F>
inline void by_columns(int cols, F&& f) {
  for (int x = 0; x < cols; x += W * N)
    static_switch<N>(std::min(N, (cols - x) / W), [&](auto regs) { f(regs, x); });
}

// out += sum_e w[e] rows[at[e]]
NOINLINE void sparse_sum(int n, const int32_t* at, const float* w, const float* rows, int64_t ld,
                       float* out, int cols) {
  by_columns<8>(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    vf acc[R], other[R] = {};
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) acc[i] = load(out + x + W * i);
    auto take = [&](int e, vf* to) {
      const float* row = rows + at[e] * ld + x;
      vf y = all(w[e]);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) to[i] += y * load(row + W * i);
    };
    int e = 0;
    if (W == 16)  // with few long vectors, each sum would wait for the one before
      for (; e + 2 <= n; e += 2) take(e, acc), take(e + 1, other);
    for (; e < n; e++) take(e, acc);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) store(out + x + W * i, acc[i] + other[i]);
  });
}

// two such sums with different weights, each row loaded once
NOINLINE void sparse_sums(int n, const int32_t* at, const float* w0, const float* w1,
                        const float* rows, int64_t ld, float* out0, float* out1, int cols) {
  by_columns<4>(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    vf a[R], b[R], a_other[R] = {}, b_other[R] = {};
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) a[i] = load(out0 + x + W * i), b[i] = load(out1 + x + W * i);
    auto take = [&](int e, vf* to0, vf* to1) {
      const float* row = rows + at[e] * ld + x;
      vf y0 = all(w0[e]), y1 = all(w1[e]);
#pragma GCC unroll 4
      for (int i = 0; i < R; i++) {
        vf z = load(row + W * i);
        to0[i] += y0 * z, to1[i] += y1 * z;
      }
    };
    int e = 0;
    if (W == 16)  // in the order of sparse_sum, so that out does not depend on the guide
      for (; e + 2 <= n; e += 2) take(e, a, b), take(e + 1, a_other, b_other);
    for (; e < n; e++) take(e, a, b);
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) {
      store(out0 + x + W * i, a[i] + a_other[i]);
      store(out1 + x + W * i, b[i] + b_other[i]);
    }
  });
}

// to[e] = a . rows[at[e]]
NOINLINE void sparse_dot(int n, const int32_t* at, const float* a, const float* rows, int64_t ld,
                       float* to, int cols) {
  by_columns<8>(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    vf y[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) y[i] = load(a + x + W * i);
    auto products = [&](int e) {
      const float* row = rows + at[e] * ld + x;
      vf even = y[0] * load(row), odd = all(0.f);
#pragma GCC unroll 8
      for (int i = 1; i < R; i++) (i & 1 ? odd : even) += y[i] * load(row + W * i);
      return even + odd;
    };
    int e = 0;
    for (; e + 4 <= n; e += 4) {  // the sums of four vectors cost little more than that of one
      vf four[4] = {products(e), products(e + 1), products(e + 2), products(e + 3)};
      float part[4];
      sum4(four, part);
      for (int i = 0; i < 4; i++) to[e + i] = x ? to[e + i] + part[i] : part[i];
    }
    for (; e < n; e++) {
      float part = sum(products(e));
      to[e] = x ? to[e] + part : part;
    }
  });
}

// x^T in panels [panel][d][PANEL], rows scaled by `scale` where given, zeros past the last one
inline void pack_panels(const float* x, int64_t ld, int64_t n, int64_t d, const float* scale,
                        float* to) {
  auto load4 = [](const float* p) { return *(const v4*)p; };
  for (int64_t j = 0; j < round_up(n, PANEL); j += 4) {  // four rows at a time, by 4 x 4 squares
    float* columns = to + j / PANEL * PANEL * d + j % PANEL;
    float c[4];
    const float* row[4];
    for (int r = 0; r < 4; r++) {
      c[r] = j + r >= n ? 0.f : scale ? scale[j + r] : 1.f;
      row[r] = x + std::min(j + r, n - 1) * ld;
    }
    int64_t i = 0;
    for (; i + 4 <= d && j + 4 <= n; i += 4) {
      v4 a = c[0] * load4(row[0] + i), b = c[1] * load4(row[1] + i);
      v4 e = c[2] * load4(row[2] + i), f = c[3] * load4(row[3] + i);
      v4 ab = SHUFFLE(a, b, 0, 4, 1, 5);
      v4 ef = SHUFFLE(e, f, 0, 4, 1, 5);
      v4 AB = SHUFFLE(a, b, 2, 6, 3, 7);
      v4 EF = SHUFFLE(e, f, 2, 6, 3, 7);
      *(v4*)(columns + i * PANEL) = SHUFFLE(ab, ef, 0, 1, 4, 5);
      *(v4*)(columns + (i + 1) * PANEL) = SHUFFLE(ab, ef, 2, 3, 6, 7);
      *(v4*)(columns + (i + 2) * PANEL) = SHUFFLE(AB, EF, 0, 1, 4, 5);
      *(v4*)(columns + (i + 3) * PANEL) = SHUFFLE(AB, EF, 2, 3, 6, 7);
    }
    for (; i < d; i++)
      for (int r = 0; r < 4; r++) columns[i * PANEL + r] = j + r < n ? c[r] * row[r][i] : 0.f;
  }
}

// rows [n][cols], zeros past d
inline void pack_rows(const float* x, int64_t ld, int64_t n, int64_t d, int64_t cols,
                      const float* scale, float* to) {
  for (int64_t j = 0; j < n; j++) {
    float c = scale ? scale[j] : 1.f;
    for (int64_t i = 0; i < d; i++) to[j * cols + i] = c * x[j * ld + i];
    for (int64_t i = d; i < cols; i++) to[j * cols + i] = 0.f;
  }
}

// --- memory -------------------------------------------------------------------------------------

constexpr size_t HUGE_PAGE = (size_t)1 << 21;

// For memory that is about to be written for the first time: a fault per 2 MB, not per 4 KB.
inline void use_huge_pages(void* memory, size_t bytes) {
#ifdef __linux__
  uintptr_t from = round_up((uintptr_t)memory, HUGE_PAGE);
  uintptr_t to = ((uintptr_t)memory + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (memory && to > from) madvise((void*)from, to - from, MADV_HUGEPAGE);
#endif
}

struct Arena {  // one allocation, handed out in aligned pieces
  float* base = nullptr;
  size_t bytes = 0, used = 0;
  Arena() = default;
  Arena(const Arena&) = delete;
  ~Arena() { release(); }
  bool reserve(size_t floats) {
    size_t wanted = round_up(floats * sizeof(float), HUGE_PAGE);
    if (wanted <= bytes) return true;
    release();
#ifdef __linux__
    // Not from the heap, whose end it would hold. A row block sweeps over several MB: with 4 KB
    // pages it would miss the TLB all the way.
    void* got = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base = got == MAP_FAILED ? nullptr : (float*)got;
    if (2 * floats * sizeof(float) > 3 * HUGE_PAGE) use_huge_pages(base, wanted);
#else
    base = (float*)std::aligned_alloc(64, wanted);
#endif
    bytes = base ? wanted : 0;
    return base != nullptr;
  }
  void release() {
#ifdef __linux__
    if (base) munmap(base, bytes);
#else
    std::free(base);
#endif
    base = nullptr, bytes = 0;
  }
  float* take(size_t floats) {
    float* p = base + used;
    used += round_up(floats, 16);
    return p;
  }
};

// A thread's own, kept between calls unless it is large: pages of a fresh one would have to be
// cleared first, a tenth of the time of a short call.
struct Scratch {
  static constexpr size_t LARGE = (size_t)64 << 20;
  Arena& arena;
  Scratch() : arena(of_thread()) {}
  ~Scratch() {
    if (arena.bytes > LARGE) arena.release();
  }
  static Arena& of_thread() {
    static thread_local Arena arena;
    return arena;
  }
};

}  // namespace
