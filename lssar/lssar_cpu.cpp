// Exact fused LSSA and LSSAR attention on the CPU, forward and backward, in linear memory.
//
// Row i sees N_i = Lk - Lq + i + 1 keys. Everything is in base 2, because the weights do not change
// when a row of activations is scaled: with s = log2(e) log(d) log(N_i) cos(q_i, k_j),
//
//   f = log2(1 + 2^s)                     softplus, over ln 2
//   z = relu(f - mu) / M                  mu = mean_j f (0 in rows 1..3), M = max_j f - mu
//   r = z^(p-1), w = z r / l              l = sum_j z r, out = w V
//   G = sum_j r V_j / (l M) - H out       H = sum_j r / (l M)
//   E = p/N_i dOut . G                    (0 in rows 1..3)
//   ds = (p r / (l M) (dW - D) - E) sigma(s),  dW = dOut V^T,  D = dOut . out
//
// LSSA, and a row whose keys are all alike (M below the rounding of f: LSSAR_FLAT, which the build
// takes from reference.py), are the case p = 1, mu = 0.
//
// Sparsity: an entry is left out where r < 2^-24 / n, n the number of the row's entries not left
// out before: N_i at first, when a bound on mu and M is known, then the few left when they are. As
// the largest z is 1, what is dropped each time is below 2^-24 of the row's sum of r, and of z r.
// ds stays dense through E. A tile where most entries count is multiplied densely instead.
//
// Both directions take a block of ROWS queries over tiles of keys, and nothing larger than a tile
// has to stay near: the forward keeps of each tile the entries that can still count when mu and M
// are known, the backward knows E beforehand. Tiles are [row][key] forward, so that a row's sums
// run along it, and [key][row] backward, so that a key's v and dv are touched once. Blocks never
// depend on the number of threads: out and dq have the same bits for any number, dk and dv for the
// same number of chunks per head.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
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

constexpr int MR = 6;      // microkernel: MR x 16 outputs in 12 registers
constexpr int PANEL = 16;  // columns side by side in a transposed panel
constexpr int ROWS = 96;   // queries a block: a multiple of PANEL and MR, at most 256
constexpr int TILE = 240;  // keys a tile, forward: a multiple of PANEL, at most 256
constexpr int SPAN = 96;   // keys a tile, backward
constexpr int MAX_COLS = 256;  // the largest head dimension
constexpr int DIRECT = 4;  // up to this many queries (decoding), keys are read where they lie
constexpr float MASKED = -126.f;  // |s| <= log(d) log2(N) < 126, as cpu.py limits N
constexpr float EPS = 1e-12f;     // as F.normalize

inline v8 load(const float* p) { return *(const v8u*)p; }
inline void store(float* p, v8 x) { *(v8u*)p = x; }
inline v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }
inline v8 bits(i8 x) { return (v8)x; }
inline i8 bits(v8 x) { return (i8)x; }
inline v8 where(i8 c, v8 a, v8 b) { return bits((bits(a) & c) | (bits(b) & ~c)); }
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

// Packing: the chosen lanes of a vector first, in order; what follows them is arbitrary.
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
inline float largest(v8 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline double wide_sum(v8 x) {
  __m256d y = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)),
                            _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  __m128d z = _mm_add_pd(_mm256_castpd256_pd128(y), _mm256_extractf128_pd(y, 1));
  return _mm_cvtsd_f64(_mm_add_sd(z, _mm_unpackhi_pd(z, z)));
}
inline unsigned lanes(i8 chosen) { return _mm256_movemask_ps((__m256)chosen); }
struct Orders {  // for every mask, the numbers of the set lanes
  uint8_t lane[256][8];
  constexpr Orders() : lane() {
    for (int m = 0; m < 256; m++)
      for (int b = 0, n = 0; b < 8; b++)
        if (m >> b & 1) lane[m][n++] = (uint8_t)b;
  }
};
constexpr Orders ORDERS;
inline __m128i order(unsigned mask) { return _mm_loadl_epi64((const __m128i*)ORDERS.lane[mask]); }
inline void pack(float* to, v8 x, unsigned mask) {
  store(to, _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(order(mask))));
}
inline void pack_numbers(uint8_t* to, int first, unsigned mask) {
  _mm_storel_epi64((__m128i*)to, _mm_add_epi8(order(mask), _mm_set1_epi8((char)first)));
}
inline void pack_bytes(uint8_t* to, const uint8_t* from, unsigned mask) {
  __m128i x = _mm_loadl_epi64((const __m128i*)from);
  _mm_storel_epi64((__m128i*)to, _mm_shuffle_epi8(x, order(mask)));
}
inline v8 lookup(const float* table, const uint8_t* at) {
  __m256i where = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
  return _mm256_i32gather_ps(table, where, 4);
}
#else
inline v8 maximum(v8 a, v8 b) { return where(a > b, a, b); }
inline float sum(v8 x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
inline void sum4(const v8* x, float* to) {
  for (int i = 0; i < 4; i++) to[i] = sum(x[i]);
}
inline float largest(v8 x) {
  float m = x[0];
  for (int b = 1; b < 8; b++) m = std::max(m, x[b]);
  return m;
}
inline double wide_sum(v8 x) {
  double y[4];
  for (int b = 0; b < 4; b++) y[b] = (double)x[b] + x[b + 4];
  return (y[0] + y[2]) + (y[1] + y[3]);
}
inline unsigned lanes(i8 chosen) {
  unsigned mask = 0;
  for (int b = 0; b < 8; b++) mask |= (unsigned)(chosen[b] != 0) << b;
  return mask;
}
template <class T, class F>
inline void pack_each(T* to, unsigned mask, F&& from) {
  for (int b = 0; b < 8; b++)
    if (mask >> b & 1) *to++ = (T)from(b);
}
inline void pack(float* to, v8 x, unsigned mask) {
  pack_each(to, mask, [&](int b) { return x[b]; });
}
inline void pack_numbers(uint8_t* to, int first, unsigned mask) {
  pack_each(to, mask, [&](int b) { return first + b; });
}
inline void pack_bytes(uint8_t* to, const uint8_t* from, unsigned mask) {
  pack_each(to, mask, [&](int b) { return from[b]; });
}
inline v8 lookup(const float* table, const uint8_t* at) {
  v8 y;
  for (int b = 0; b < 8; b++) y[b] = table[at[b]];
  return y;
}
#endif

// 2^x for -126 <= x <= 64: FINE to 1 ulp, else to 1.1e-7 relative, with errors of either sign that
// a mean evens out
template <bool FINE = true>
inline v8 exp2v(v8 x) {
  const v8 magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  v8 t = x + magic, r = x - (t - magic), square = r * r, y;
  if (FINE) {
    v8 high = (all(1.535275e-4f) * r + all(1.3398874e-3f)) * r + all(9.6184373e-3f);
    v8 low = (all(5.5503324e-2f) * r + all(2.4022648e-1f)) * r + all(6.9314720e-1f);
    y = (high * square * r + low) * r + all(1.f);
  } else {
    v8 high = all(1.3264727e-3f) * r + all(9.671513e-3f);
    v8 low = all(5.5507336e-2f) * r + all(2.4022242e-1f);
    y = (high * square + low) * square + (all(6.93147e-1f) * r + all(1.f));
  }
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

struct Activation {  // f and sigma of scores, from one exponential
  v8 s, e;
  explicit Activation(v8 s) : s(s), e(exp2v(minus_abs(s))) {}
  v8 softplus() const {
    // Estrin's scheme: a chain of ten multiplications would outlast what a processor looks ahead
    v8 e2 = e * e, e4 = e2 * e2;
    v8 a = all(7.5491729e-3f) * e + all(-4.2567025e-2f);
    v8 b = all(1.1285613e-1f) * e + all(-1.9711892e-1f);
    v8 c = all(2.7564139e-1f) * e + all(-3.5840847e-1f);
    v8 d = all(4.8069296e-1f) * e + all(-7.2134021e-1f);
    v8 y = (a * e2 + b) * e4 + (c * e2 + d);
    return (y * e + all(1.4426950f)) * e + maximum(s, all(0.f));
  }
  v8 sigmoid() const { return where(s < all(0.f), e, all(1.f)) / (all(1.f) + e); }
};
inline v8 softplus(v8 s) { return Activation(s).softplus(); }

// z^p for 0 <= z <= 1; 0 at z = 0 also for p = 0, as relu'(0) = 0. The whole part of p by squaring:
// exp2(p log2 z) alone would lose p log2(z) ulps. An int cannot hold any p, and beyond 1e9 the
// row's largest z, a few ulps below 1 by rounding, would vanish too and leave 0/0.
constexpr float LARGEST_P = 1e7f;
inline v8 power(v8 z, float p) {
  p = std::min(p, LARGEST_P);
  int whole = (int)p;
  float rest = p - (float)whole;
  v8 y = all(1.f), square = z;
  if (p == 14.f) {  // the paper's 15, without a loop
    v8 z2 = z * z, z4 = z2 * z2;
    return where(z > all(0.f), z2 * z4 * (z4 * z4), all(0.f));
  }
  for (int n = whole; n; n >>= 1) {
    if (n & 1) y = y * square;
    square = square * square;
  }
  if (rest != 0.f) y = y * exp2v(all(rest) * log2v(z));
  return where(z > all(0.f), y, all(0.f));
}

// the same with an exponent for each lane
inline v8 power(v8 z, v8 p) {
  p = where(p < all(LARGEST_P), p, all(LARGEST_P));
  i8 whole = __builtin_convertvector(p, i8);
  v8 rest = p - __builtin_convertvector(whole, v8), y = all(1.f), square = z;
  for (i8 n = whole; lanes(n != 0); n >>= 1) {
    y = where((n & 1) != 0, y * square, y);
    square = square * square;
  }
  v8 root = where(rest > all(0.f), exp2v(rest * log2v(z)), all(1.f));
  return where(z > all(0.f), y * root, all(0.f));
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

// The sparse products, columns in slices of up to N registers. Loops over R ask to be unrolled:
// otherwise filling an array of registers becomes a call to memcpy.
template <int N, class F>
inline void by_columns(int cols, F&& f) {
  for (int x = 0; x < cols; x += 8 * N)
    static_switch<N>(std::min(N, (cols - x) / 8), [&](auto regs) { f(regs, x); });
}

// out += sum_e w[e] rows[at[e]]
inline void sparse_sum(int n, const uint8_t* at, const float* w, const float* rows, int64_t ld,
                       float* out, int cols) {
  by_columns<8>(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    v8 acc[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) acc[i] = load(out + x + 8 * i);
    for (int e = 0; e < n; e++) {
      const float* row = rows + at[e] * ld + x;
      v8 y = all(w[e]);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) acc[i] += y * load(row + 8 * i);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) store(out + x + 8 * i, acc[i]);
  });
}

// two such sums with different weights, each row loaded once
inline void sparse_sums(int n, const uint8_t* at, const float* w0, const float* w1,
                        const float* rows, int64_t ld, float* out0, float* out1, int cols) {
  by_columns<4>(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    v8 a[R], b[R];
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) a[i] = load(out0 + x + 8 * i), b[i] = load(out1 + x + 8 * i);
    for (int e = 0; e < n; e++) {
      const float* row = rows + at[e] * ld + x;
      v8 y0 = all(w0[e]), y1 = all(w1[e]);
#pragma GCC unroll 4
      for (int i = 0; i < R; i++) {
        v8 z = load(row + 8 * i);
        a[i] += y0 * z, b[i] += y1 * z;
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) store(out0 + x + 8 * i, a[i]), store(out1 + x + 8 * i, b[i]);
  });
}

// to[e] = a . rows[at[e]], n a multiple of 4
inline void sparse_dot(int n, const uint8_t* at, const float* a, const float* rows, int64_t ld,
                       float* to, int cols) {
  by_columns<8>(cols, [&](auto regs, int x) {
    constexpr int R = decltype(regs)::value;
    v8 y[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) y[i] = load(a + x + 8 * i);
    auto products = [&](int e) {
      const float* row = rows + at[e] * ld + x;
      v8 even = y[0] * load(row), odd = all(0.f);
#pragma GCC unroll 8
      for (int i = 1; i < R; i++) (i & 1 ? odd : even) += y[i] * load(row + 8 * i);
      return even + odd;
    };
    for (int e = 0; e < n; e += 4) {
      v8 four[4] = {products(e), products(e + 1), products(e + 2), products(e + 3)};
      float part[4];
      sum4(four, part);
      for (int i = 0; i < 4; i++) to[e + i] = x ? to[e + i] + part[i] : part[i];
    }
  });
}

struct View {  // (B, H, L, d) float32, unit stride along d
  float* data;
  int64_t b, h, l;
};

struct Call {  // the layout of the int64 array that Python passes
  int64_t batch, heads, lq, lk, d, threads, train_length;
  View q, k, v, out, stats, guide, dout, dq, dk, dv;
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
};

struct Arena {  // one allocation, handed out in aligned pieces
  float* base = nullptr;
  size_t bytes = 0, used = 0;
  Arena() = default;
  Arena(const Arena&) = delete;
  ~Arena() { release(); }
  bool reserve(size_t floats) {
    constexpr size_t HUGE_PAGE = (size_t)1 << 21;
    size_t wanted = round_up(floats * sizeof(float), HUGE_PAGE);
    if (wanted <= bytes) return true;
    release();
#ifdef __linux__
    // Not from the heap, whose end it would hold. A row block sweeps over several MB: with 4 KB
    // pages it would miss the TLB all the way.
    void* got = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base = got == MAP_FAILED ? nullptr : (float*)got;
    if (base && wanted > 2 * HUGE_PAGE) madvise(base, wanted, MADV_HUGEPAGE);
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
    used += (floats + 15) / 16 * 16;
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
  bool mixed = head.power.alpha != 0;  // rows differ in p
  alignas(32) float count[ROWS], scale[ROWS], p[ROWS], m[ROWS], inverse_m[ROWS];
  alignas(32) float mu[ROWS], mu_rest[ROWS];  // the mean in two parts: f - mu is exact near it
  alignas(32) float least[ROWS];  // the z above which an entry counts

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
      shape(r, 0.f, 0.f, 1.f);
      if (lssa()) p[r] = 1.f;
    }
    leave_out_of(count);
  }
  // An entry counts unless r < 2^-24 / entries, `entries` the number of them that may count
  void leave_out_of(const float* entries) {
    for (int r = 0; r < ROWS; r += 8) {
      v8 exponent = (log2v(load(entries + r)) + all(24.f)) / (load(p + r) - all(1.f));
      store(least + r, exp2v(maximum(-exponent, all(-120.f))));
    }
  }
  int64_t seen(int r) const { return head.call.lk - head.call.lq + first + r + 1; }
  int64_t keys() const { return seen(rows - 1); }
  // keys of this tile that row r sees
  int width(int r, int64_t tile) const {
    return (int)std::max<int64_t>(0, std::min<int64_t>(TILE, seen(r) - tile * TILE));
  }
  // rows that do not see this key
  int hidden(int64_t key) const {
    return (int)std::max<int64_t>(0, std::min<int64_t>(rows, key + 1 - seen(0)));
  }
  bool lssa() const { return head.power.p == 0; }
  void shape(int r, float mean, float mean_rest, float range) {
    mu[r] = mean, mu_rest[r] = mean_rest, m[r] = range, inverse_m[r] = 1.f / range;
  }
  void stage_one(int r) {
    shape(r, 0.f, 0.f, 1.f);
    p[r] = 1.f, least[r] = 0x1p-120f, mixed = true;
  }
  v8 z(v8 f, int r) const { return (f - all(mu[r]) - all(mu_rest[r])) * all(inverse_m[r]); }
};

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

// Scores of the rows that see a key, without packing the keys: to[r * stride]
void score_direct(const Block& block, int64_t key, const float* q, float* to, int stride) {
  const Head& head = block.head;
  const float* k = head.row(head.call.k, key);
  float inverse = 1.f / std::max(norm(k, head.d), EPS);
  for (int r = block.hidden(key); r < block.rows; r++)
    to[r * stride] = inverse * dot(q + r * head.cols, k, head.d);
}

// --- forward ------------------------------------------------------------------------------------

struct ForwardScratch {
  float *inverse, *panels, *packed_v;          // a head's keys
  const float* v;                              // packed_v, or the values where they lie
  int64_t ldv;
  float *q, *out, *guide, *before;             // a block's rows; the sum of the keys before them
  float *s, *r;                                // a tile
  float* val;                                  // the kept entries of all tiles: scores,
  uint8_t* idx;                                // keys
  int32_t* n;                                  // and number in each row; -1: the whole tile
  static constexpr size_t LIST = TILE + 8;
  static size_t size(const Head& h) {
    size_t keys = h.tiles * TILE;
    return keys * (1 + h.d + h.cols) + 3 * ROWS * h.cols + h.cols + 2 * ROWS * LIST +
           h.tiles * ROWS * (LIST + LIST / 4 + 1) + 256;
  }
  ForwardScratch(Arena& arena, const Head& h) {
    size_t keys = h.tiles * TILE, rows = ROWS * h.cols, kept = h.tiles * ROWS * LIST;
    arena.used = 0;
    inverse = arena.take(keys), panels = arena.take(keys * h.d);
    packed_v = arena.take(keys * h.cols);
    q = arena.take(rows), out = arena.take(rows), guide = arena.take(rows);
    before = arena.take(h.cols);
    s = arena.take(ROWS * LIST), r = arena.take(ROWS * LIST);
    val = arena.take(kept), idx = (uint8_t*)arena.take(kept / 4);
    n = (int32_t*)arena.take(h.tiles * ROWS);
  }
};

// Sums of weights times values are of v UNIT where those of v overflow. A row's weights add up to
// less than 2^31, so they are finite, and their mean is if v is. Where nothing overflows UNIT is
// not used: it would lose values below 2^-94.
constexpr float UNIT = 0x1p-32f;

void place_values(const Head& head, ForwardScratch& at, float unit) {
  const View& v = head.call.v;
  at.v = at.packed_v, at.ldv = head.cols;
  if (unit == 1.f && head.direct && head.d % 8 == 0)
    at.v = head.row(v, 0), at.ldv = v.l;
  else
    pack_rows(head.row(v, 0), v.l, head.keys, head.d, head.cols, nullptr, at.packed_v);
  if (unit != 1.f)
    for (int64_t x = 0; x < head.keys * head.cols; x++) at.packed_v[x] *= unit;
}

// Scores of a block against one tile, [row][TILE]; columns past a row's last key become MASKED
// up to the next multiple of 8.
void score_tile(const Block& block, int64_t tile, const ForwardScratch& at) {
  const Head& head = block.head;
  int64_t d = head.d, cols = head.cols;
  int widest = block.width(block.rows - 1, tile);
  if (head.direct)
    for (int x = 0; x < widest; x++) score_direct(block, tile * TILE + x, at.q, at.s + x, TILE);
  else
    for (int x = 0; x < widest; x += PANEL) {
      const float* panel = at.panels + (tile * TILE + x) * d;
      int r = block.hidden(tile * TILE + x) / MR * MR;
      for (; r + MR <= block.rows; r += MR)
        micro<MR, 2, false>(d, at.q + r * cols, cols, panel, PANEL, at.s + r * TILE + x, TILE,
                            false);
      if (r < block.rows)
        gemm_rows<false>(block.rows - r, d, at.q + r * cols, cols, panel, PANEL,
                         at.s + r * TILE + x, TILE, PANEL, false);
    }
  for (int r = 0; r < block.rows; r++)
    for (int x = block.width(r, tile); x % 8; x++) at.s[r * TILE + x] = MASKED;
}

struct Sums {  // of each row over the tiles so far
  double f[ROWS] = {};
  alignas(32) float s[ROWS] = {}, top[ROWS];
  alignas(32) float s_all[ROWS];  // the sum of all scores of the row, known beforehand
  alignas(32) float kept[ROWS];   // entries that may count
  bool dense = false;             // most entries of the tile before counted
  Sums() {
    std::fill(top, top + ROWS, MASKED);
    std::fill(s_all, s_all + ROWS, -1e30f);
    std::fill(kept, kept + ROWS, 0.f);
  }
  // of `width` entries of a row: their f, and vectors of their scores padded with MASKED
  void add(int r, int width, double sum_f, v8 plain, v8 high) {
    f[r] += sum_f;
    s[r] += sum(plain) - MASKED * (float)(round_up(width, 8) - width);
    top[r] = std::max(top[r], largest(high));
  }
};

// sum_j s = q . sum_j k_hat
void sum_all_scores(const Block& block, const ForwardScratch& at, Sums& sums) {
  const Head& head = block.head;
  for (int r = 0; r < block.rows; r++) {
    int64_t key = block.seen(r) - 1;
    const float* k = head.row(head.call.k, key);
    for (int64_t x = 0; x < head.d; x++) at.before[x] += at.inverse[key] * k[x];
    sums.s_all[r] = dot(at.q + r * head.cols, at.before, head.d);
  }
}

// One row of a tile. ADD: to the sums; sum f = sum max(s, 0) + log2 prod(1 + 2^-|s|), one exp an
// entry and one log a tile, in two chains, as a product waits for the one before. KEEP: scores
// above the cut and their keys are copied; returns their number.
template <bool ADD, bool KEEP>
inline int sweep(const float* s, int width, int r, float cut, Sums& sums, float* val,
                 uint8_t* idx) {
  v8 linear[2] = {}, product[2] = {all(1.f), all(1.f)}, high = all(MASKED), plain = all(0.f);
  int kept = 0;
  auto take = [&](int x, int chain) {
    v8 y = load(s + x);
    if (KEEP) {
      unsigned mask = lanes(y > all(cut));
      pack(val + kept, y, mask);
      pack_numbers(idx + kept, x, mask);
      kept += __builtin_popcount(mask);
    }
    if (!ADD) return;
    linear[chain] += maximum(y, all(0.f));
    product[chain] += product[chain] * exp2v<false>(minus_abs(y));
    high = maximum(high, y);
    plain += y;
  };
  int x = 0;
  for (; x + 8 < width; x += 16) take(x, 0), take(x + 8, 1);
  if (x < width) take(x, 0);
  if (!ADD) return kept;
  double f = wide_sum(linear[0] + linear[1]) + sum(log2v(product[0] * product[1]));
  // 1 + e loses up to 2^-25 an entry, which only matters where the mean is small
  if (f < 0.25 * width) {
    v8 part = all(0.f);
    for (x = 0; x < width; x += 8) part += softplus(load(s + x));
    f = wide_sum(part);
  }
  sums.add(r, width, f, plain, high);
  return kept;
}

// A row of a tile where most entries count: f of all of them is kept. Returns how many count.
template <bool ADD>
inline int keep_all(const float* s, int width, int r, float cut, Sums& sums, float* to) {
  v8 total = all(0.f), plain = all(0.f), high = all(MASKED);
  int kept = 0;
  for (int x = 0; x < width; x += 8) {
    v8 y = load(s + x), f = softplus(y);
    store(to + x, f);
    kept += __builtin_popcount(lanes(y > all(cut)));
    if (ADD) total += f, plain += y, high = maximum(high, y);
  }
  if (ADD) sums.add(r, width, wide_sum(total), plain, high);
  return kept;
}

// The score s = log2(2^f - 1) with softplus f, rounded down.
inline v8 score_of(v8 f) {
  v8 tiny = log2v(maximum(f, all(1e-37f))) - all(0.53f);  // 2^f - 1 = f ln 2
  v8 medium = log2v(maximum(exp2v(where(f < all(20.f), f, all(20.f))) - all(1.f), all(1e-6f)));
  v8 s = where(f < all(1e-3f), tiny, where(f < all(20.f), medium, f)) - all(2e-3f);
  return maximum(s, all(MASKED));
}

void exact_cut(const Block& block, float* cut) {
  for (int r = 0; r < ROWS; r += 8)
    store(cut + r, score_of(load(block.mu + r) + load(block.least + r) * load(block.m + r)));
}

// No score of these rows below the cut will count, whatever the keys after `seen` are: the mean is
// at least softplus of the mean score (Jensen) over those, and the maximum can only grow.
void cut_so_far(const Block& block, const Sums& sums, int64_t seen, float* cut) {
  alignas(32) float f[ROWS];
  for (int r = 0; r < ROWS; r++) f[r] = (float)sums.f[r];
  for (int r = 0; r < ROWS; r += 8) {
    v8 count = load(block.count + r), rest = maximum(count - all((float)seen), all(0.f));
    v8 mean = (load(sums.s_all + r) - load(sums.s + r)) / maximum(rest, all(1.f));
    mean = -maximum(-maximum(mean, all(MASKED)), all(MASKED));
    v8 mu = (load(f + r) + rest * softplus(mean)) / count;
    mu = where(count > all(3.f), mu, all(0.f));
    v8 range = maximum(softplus(load(sums.top + r)) - mu, all(0.f));
    store(cut + r, score_of(mu + load(block.least + r) * range));
  }
}

// Adds a tile to the sums and keeps what may count of it, row by row: scores in val and keys in
// idx, each row padded to 8 with MASKED; or f of all entries, where most count. Returns the room
// taken.
size_t take_tile(const Block& block, int64_t tile, const ForwardScratch& at, float* cuts,
                 Sums& sums, float* val, uint8_t* idx) {
  size_t used = 0;
  int kept = 0, present = 0, count;
  int32_t* n = at.n + tile * ROWS;
  bool first = tile == 0;  // of which nothing is known that would make a cut
  if (first)
    for (int r = 0; r < block.rows; r++)
      sweep<true, false>(at.s + r * TILE, block.width(r, tile), r, 0.f, sums, nullptr, nullptr);
  cut_so_far(block, sums, std::max<int64_t>(tile, 1) * TILE, cuts);
  bool whole = sums.dense;  // neighbouring tiles are alike
  for (int r = 0; r < block.rows; r++) {
    const float* s = at.s + r * TILE;
    int width = block.width(r, tile);
    if (whole) {
      count = keep_all<true>(s, width, r, cuts[r], sums, val + r * TILE);
    } else {
      auto keep = first ? sweep<false, true> : sweep<true, true>;
      n[r] = count = keep(s, width, r, cuts[r], sums, val + used, idx + used);
      store(val + used + count, all(MASKED));
      used += round_up(count, 8);
    }
    kept += count;
    present += width;
  }
  // About where the two cost the same; a small tile has nothing to gain, and its short rows keep
  // the exactly zero gradient of a single entry.
  sums.dense = present >= 2048 && kept >= 0.55 * present;
  if (sums.dense && !whole) {
    whole = true;
    for (int r = 0; r < block.rows; r++)
      keep_all<false>(at.s + r * TILE, block.width(r, tile), r, cuts[r], sums, val + r * TILE);
  }
  for (int r = 0; r < block.rows; r++)
    sums.kept[r] += (float)(whole ? block.width(r, tile) : n[r]);
  if (!whole) return used;
  n[0] = -1;
  return ROWS * TILE;
}

// mu and M of every row; whether some row has no contrast, and falls back to stage one
bool row_statistics(Block& block, const Sums& sums) {
  alignas(32) float f_max[ROWS];
  bool flat = false;
  for (int r = 0; r < ROWS; r += 8) store(f_max + r, softplus(load(sums.top + r)));
  for (int r = 0; r < block.rows; r++) {
    double mu = block.count[r] > 3 ? sums.f[r] / block.count[r] : 0.;
    float m = (float)(f_max[r] - mu);
    float largest_score = (float)M_LN2 * block.scale[r];
    bool alike = m <= LSSAR_FLAT * (4.f + largest_score) * FLT_EPSILON * f_max[r];
    if (alike)
      block.stage_one(r), flat = true;
    else
      block.shape(r, (float)mu, (float)(mu - (float)mu), m);
  }
  return flat;
}

struct Totals {  // of each row: sums of z r and of r, over the tiles before and over this one
  double l[ROWS] = {}, h[ROWS] = {};
  v8 l_tile[ROWS] = {}, h_tile[ROWS] = {};
  void end_tile() {
    for (int r = 0; r < ROWS; r += 4) end(l + r, l_tile + r), end(h + r, h_tile + r);
  }
  static void end(double* total, v8* tile) {
    float part[4];
    sum4(tile, part);
    for (int i = 0; i < 4; i++) total[i] += part[i], tile[i] = all(0.f);
  }
};

// z r in place of `n` scores of a row, or of their f where it is KNOWN; r beside them for the GUIDE
template <bool KNOWN, bool GUIDE>
inline void weigh(float* s, float* to, int n, const Block& block, int row, Totals& totals) {
  v8 l = all(0.f), h = all(0.f);
  for (int e = 0; e < n; e += 8) {
    v8 f = KNOWN ? load(s + e) : softplus(load(s + e));
    v8 z = maximum(block.z(f, row), all(0.f)), r = power(z, block.p[row] - 1.f), w = z * r;
    store(s + e, w);
    l += w;
    if (GUIDE) store(to + e, r), h += r;
  }
  totals.l_tile[row] += l;
  if (GUIDE) totals.h_tile[row] += h;
}

inline void clear_after(float* row, int width) {  // zeros in columns [width, TILE)
  for (int x = width; x < TILE; x++) row[x] = 0.f;
}

template <bool KNOWN, bool GUIDE>
void add_dense(const Block& block, int64_t tile, const ForwardScratch& at, float* s,
               Totals& totals) {
  int64_t cols = block.head.cols;
  for (int r = 0; r < block.rows; r++) {
    int width = block.width(r, tile);
    float *weights = s + r * TILE, *sharp = at.r + r * TILE;
    weigh<KNOWN, GUIDE>(weights, sharp, width, block, r, totals);
    clear_after(weights, width);
    if (GUIDE) clear_after(sharp, width);
  }
  const float* v = at.v + tile * TILE * at.ldv;
  for (int r = 0; r < block.rows; r += MR) {
    int m = std::min(MR, block.rows - r), depth = block.width(r + m - 1, tile);
    auto product = [&](const float* weights, float* to) {
      gemm_rows<false>(m, depth, weights + r * TILE, TILE, v, at.ldv, to + r * cols, cols,
                       (int)cols, true);
    };
    product(s, at.out);
    if (GUIDE) product(at.r, at.guide);
  }
}

// The kept entries that do count; returns the entries passed. All rows go through each step
// together: the list of a single row is short.
template <bool GUIDE>
size_t add_sparse(const Block& block, int64_t tile, const ForwardScratch& at, const float* cuts,
                  float* s, uint8_t* idx, Totals& totals) {
  int64_t cols = block.head.cols;
  size_t used = 0;
  int filled = 0, start[ROWS], n[ROWS];
  uint8_t row[ROWS * TILE / 8];  // of every eight entries
  for (int r = 0; r < block.rows; r++) {
    int kept = at.n[tile * ROWS + r], end = filled;
    for (int e = 0; e < kept; e += 8) {
      v8 y = load(s + used + e);
      unsigned mask = lanes(y > all(cuts[r]));
      pack(s + end, y, mask);
      pack_bytes(idx + end, idx + used + e, mask);
      end += __builtin_popcount(mask);
    }
    used += round_up(kept, 8);
    start[r] = filled, n[r] = end - filled;
    for (; end % 8; end++) s[end] = MASKED;
    for (; filled < end; filled += 8) row[filled / 8] = (uint8_t)r;
  }
  for (int e = 0; e < filled; e += 8)
    weigh<false, GUIDE>(s + e, at.r + e, 8, block, row[e / 8], totals);
  const float* v = at.v + tile * TILE * at.ldv;
  for (int r = 0; r < block.rows; r++) {
    float *out = at.out + r * cols, *guide = at.guide + r * cols;
    const uint8_t* keys = idx + start[r];
    const float *w = s + start[r], *sharp = at.r + start[r];
    if (GUIDE)
      sparse_sums(n[r], keys, w, sharp, v, at.ldv, out, guide, (int)cols);
    else
      sparse_sum(n[r], keys, w, v, at.ldv, out, (int)cols);
  }
  return used;
}

// to[x] = value(x) / unit; whether all is finite. In another unit than 1 only what was not finite
// before is replaced.
template <class F>
inline bool write_row(float* to, int64_t d, float unit, F&& value) {
  if (unit != 1.f)
    for (int64_t x = 0; x < d; x++)
      if (!std::isfinite(to[x])) to[x] = value(x) / unit;
  if (unit == 1.f)
    for (int64_t x = 0; x < d; x++) to[x] = value(x);
  uint32_t largest = 0;  // of the bits without the sign: a maximum of integers is vectorised
  for (int64_t x = 0; x < d; x++) {
    uint32_t y;
    std::memcpy(&y, to + x, sizeof y);
    largest = std::max(largest, y & 0x7fffffffu);
  }
  return largest < 0x7f800000u;
}

bool write_rows(const Block& block, const ForwardScratch& at, const Totals& totals,
                const float* cuts, float unit) {
  const Head& head = block.head;
  bool finite = true;
  for (int r = 0; r < block.rows; r++) {
    float l = (float)totals.l[r], inverse = 1.f / l, h = (float)totals.h[r];
    float *to = head.row(head.call.out, block.first + r), *from = at.out + r * head.cols;
    finite &= write_row(to, head.d, unit, [&](int64_t x) { return from[x] * inverse; });
    float scale = block.inverse_m[r] * inverse;
    float* stat = head.row(head.call.stats, block.first + r);
    stat[0] = block.mu[r], stat[1] = block.mu_rest[r], stat[2] = block.m[r];
    stat[3] = l, stat[4] = block.p[r], stat[5] = cuts[r];
    if (!head.call.guide.data) continue;
    float *guide = head.row(head.call.guide, block.first + r), *g = at.guide + r * head.cols;
    finite &= write_row(guide, head.d, unit,
                        [&](int64_t x) { return (g[x] - h * (to[x] * unit)) * scale; });
  }
  return finite;
}

template <bool GUIDE>
bool forward_block(Block& block, const ForwardScratch& at, float unit) {
  const Head& head = block.head;
  int64_t tiles = (block.keys() + TILE - 1) / TILE;
  alignas(32) float cuts[ROWS];
  bool again = block.lssa();  // every entry counts, and no statistics are needed beforehand
  pack_queries(block, at.q);
  if (!again) {
    Sums sums;
    if (!head.direct) sum_all_scores(block, at, sums);
    size_t used = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
      score_tile(block, tile, at);
      used += take_tile(block, tile, at, cuts, sums, at.val + used, at.idx + used);
    }
    block.leave_out_of(sums.kept);
    again = row_statistics(block, sums);  // such a row needs every key: all scores again
  }
  exact_cut(block, cuts);
  std::fill(at.out, at.out + block.rows * head.cols, 0.f);
  if (GUIDE) std::fill(at.guide, at.guide + block.rows * head.cols, 0.f);
  Totals totals;
  size_t used = 0;
  for (int64_t tile = 0; tile < tiles; tile++) {
    if (again) {
      score_tile(block, tile, at);
      add_dense<false, GUIDE>(block, tile, at, at.s, totals);
    } else if (at.n[tile * ROWS] < 0) {
      add_dense<true, GUIDE>(block, tile, at, at.val + used, totals);
      used += ROWS * TILE;
    } else {
      used += add_sparse<GUIDE>(block, tile, at, cuts, at.val + used, at.idx + used, totals);
    }
    totals.end_tile();
  }
  return write_rows(block, at, totals, cuts, unit);
}

void forward_head(const Head& head, Arena& arena) {
  ForwardScratch at(arena, head);
  const Call& c = head.call;
  if (!head.direct) {
    key_norms(head, at.inverse);
    pack_panels(head.row(c.k, 0), c.k.l, head.keys, head.d, at.inverse, at.panels);
    std::fill(at.before, at.before + head.cols, 0.f);
    for (int64_t j = 0; j < c.lk - c.lq + head.begin; j++)
      for (int64_t x = 0; x < head.d; x++) at.before[x] += at.inverse[j] * head.row(c.k, j)[x];
  }
  place_values(head, at, 1.f);
  auto forward = [&](int64_t first, float unit) {
    Block block(head, first);
    return c.guide.data ? forward_block<true>(block, at, unit)
                        : forward_block<false>(block, at, unit);
  };
  float before[MAX_COLS];
  for (int64_t i = head.begin; i < head.end; i += ROWS) {
    std::copy(at.before, at.before + head.cols, before);
    if (forward(i, 1.f)) continue;
    // Each block anew, so that the bits of a row do not depend on the rows of its task.
    std::copy(before, before + head.cols, at.before);
    place_values(head, at, UNIT);
    forward(i, UNIT);
    place_values(head, at, 1.f);
  }
}

// --- backward -----------------------------------------------------------------------------------

struct BackwardScratch {
  float *inverse, *k, *v, *dk, *dv;                    // a head's keys, [key][cols]
  float *q, *q_panels, *dout, *dout_panels, *out, *dq;  // a block's rows; dout is dout / l
  float *s, *dw;                                       // a tile, [key][row]
  float *z, *r, *sigma, *part;                         // the entries that count, key by key
  uint8_t* row;
  static constexpr size_t LIST = SPAN * (ROWS + 4) + 8;
  static size_t size(const Head& h) {
    return h.keys * (1 + 4 * h.cols) + 6 * ROWS * h.cols + 2 * SPAN * ROWS + 5 * LIST + 512;
  }
  BackwardScratch(Arena& arena, const Head& h) {
    size_t wide = h.keys * h.cols, rows = ROWS * h.cols;
    arena.used = 0;
    inverse = arena.take(h.keys), k = arena.take(wide), v = arena.take(wide);
    dk = arena.take(wide), dv = arena.take(wide);
    q = arena.take(rows), q_panels = arena.take(rows), dout = arena.take(rows);
    dout_panels = arena.take(rows), out = arena.take(rows), dq = arena.take(rows);
    s = arena.take(SPAN * ROWS), dw = arena.take(SPAN * ROWS);
    z = arena.take(LIST), r = arena.take(LIST), sigma = arena.take(LIST), part = arena.take(LIST);
    row = (uint8_t*)arena.take(LIST / 4 + 8);
  }
};

struct Gradients {  // per row: p / M, D / l, -E, the score above which an entry counts
  alignas(32) float slope[ROWS] = {}, d[ROWS] = {}, pull[ROWS] = {}, cut[ROWS];
};

struct Span {  // keys [first, first + n) of a tile
  int64_t first;
  int n;
};

// Scores [key][ROWS], MASKED where the row does not see the key
void score_span(const Block& block, Span span, const BackwardScratch& at) {
  const Head& head = block.head;
  int64_t d = head.d, cols = head.cols;
  if (head.direct) {
    std::fill(at.s, at.s + span.n * ROWS, 0.f);
    for (int x = 0; x < span.n; x++)
      score_direct(block, span.first + x, at.q, at.s + x * ROWS, 1);
  } else {
    for (int x = 0; x < span.n; x += MR)
      for (int r = block.hidden(span.first + x) / PANEL * PANEL; r < block.rows; r += PANEL)
        gemm_rows<false>(std::min(MR, span.n - x), d, at.k + (span.first + x) * cols, cols,
                         at.q_panels + r * d, PANEL, at.s + x * ROWS + r, ROWS, PANEL, false);
  }
  for (int x = 0; x < span.n; x++)
    std::fill(at.s + x * ROWS, at.s + x * ROWS + block.hidden(span.first + x), MASKED);
}

// D and E of rows whose keys are all in one tile, by their definition, D = sum_j w dW and
// E = sum_j p r / (l M) (dW - D) / N_i. From `out` and G, which are rounded, they would be too
// coarse for a row of few keys, where one w is close to 1 and dW - D close to 0.
void sum_whole_rows(const Block& block, int n, const BackwardScratch& at, Gradients& g) {
  double weighted[ROWS] = {}, weights[ROWS] = {}, e_sum[ROWS] = {};
  for (int e = 0; e < n; e++) {
    weighted[at.row[e]] += (double)at.z[e] * at.part[e];
    weights[at.row[e]] += at.z[e];
  }
  for (int r = 0; r < block.rows; r++) g.d[r] = (float)(weighted[r] / weights[r]);
  for (int e = 0; e < n; e++) {
    int r = at.row[e];
    e_sum[r] += (double)at.r[e] * (at.part[e] - g.d[r]);
  }
  for (int r = 0; r < block.rows; r++)
    if (block.mu[r] != 0.f) g.pull[r] = (float)(-g.slope[r] * e_sum[r] / block.count[r]);
}

// ds in place of the scores, dv gains its share; returns the number of entries that count. Of the
// long way from a score to its weight only the entries that count take more than sigma.
int backward_sparse(const Block& block, Span span, const BackwardScratch& at, Gradients& g) {
  int cols = (int)block.head.cols, rows = block.rows, n = 0, counted = 0, start[SPAN + 1];
  bool whole = block.keys() <= SPAN;
  float *kept = at.z, *sigmas = at.sigma, *parts = at.part, *sharp = at.r;
  uint8_t* row = at.row;
  for (int x = 0; x < span.n; x++) {
    float* s = at.s + x * ROWS;
    int from = block.hidden(span.first + x) / 8 * 8;
    start[x] = n;
    std::fill(s, s + from, 0.f);
    for (int r = from; r < rows; r += 8) {
      v8 y = load(s + r);
      unsigned mask = lanes(y > load(g.cut + r));
      pack(kept + n, y, mask);
      pack_numbers(row + n, r, mask);
      n += __builtin_popcount(mask);
      v8 sigma = Activation(y).sigmoid();
      store(s + r, whole ? sigma : load(g.pull + r) * sigma);
    }
    counted += n - start[x];
    for (; n % 4; n++) kept[n] = MASKED, row[n] = 0;
  }
  start[span.n] = n;
  for (int e = n; e % 8; e++) kept[e] = MASKED, row[e] = 0;
  for (int e = 0; e < n; e += 8) {
    v8 s = load(kept + e);
    Activation y(s);
    v8 z = y.softplus() - lookup(block.mu, row + e) - lookup(block.mu_rest, row + e);
    z = z * lookup(block.inverse_m, row + e);
    z = where(s > all(MASKED), maximum(z, all(0.f)), all(0.f));
    v8 r = block.mixed ? power(z, lookup(block.p, row + e) - all(1.f))
                       : power(z, block.p[0] - 1.f);
    store(sigmas + e, y.sigmoid());
    store(sharp + e, r);
    store(kept + e, z * r);
  }
  for (int x = 0; x < span.n; x++) {
    int64_t key = (span.first + x) * cols;
    int e = start[x], of_key = start[x + 1] - e;
    sparse_dot(of_key, row + e, at.v + key, at.dout, cols, parts + e, cols);
    sparse_sum(of_key, row + e, kept + e, at.dout, cols, at.dv + key, cols);
  }
  if (whole) {
    sum_whole_rows(block, n, at, g);
    for (int x = 0; x < span.n; x++)
      for (int r = 0; r < rows; r += 8) {
        float* s = at.s + x * ROWS + r;
        store(s, load(s) * load(g.pull + r));
      }
  }
  for (int e = 0; e < n; e += 8) {
    v8 a = load(sharp + e) * lookup(g.slope, row + e) * (load(parts + e) - lookup(g.d, row + e));
    store(parts + e, a * load(sigmas + e));
  }
  for (int x = 0; x < span.n; x++) {
    float* s = at.s + x * ROWS;
    for (int e = start[x]; e < start[x + 1]; e++) s[row[e]] += parts[e];
  }
  return counted;
}

int backward_dense(const Block& block, Span span, const BackwardScratch& at, const Gradients& g) {
  const Head& head = block.head;
  int cols = (int)head.cols, counted = 0;
  for (int x = 0; x < span.n; x += MR)
    for (int r = block.hidden(span.first + x) / PANEL * PANEL; r < block.rows; r += PANEL)
      gemm_rows<false>(std::min(MR, span.n - x), head.d, at.v + (span.first + x) * cols, cols,
                       at.dout_panels + r * head.d, PANEL, at.dw + x * ROWS + r, ROWS, PANEL,
                       false);
  for (int x = 0; x < span.n; x++) {
    float *s = at.s + x * ROWS, *w = at.dw + x * ROWS;
    int from = block.hidden(span.first + x) / 8 * 8;
    std::fill(s, s + from, 0.f);
    std::fill(w, w + from, 0.f);
    for (int r = from; r < block.rows; r += 8) {
      Activation y(load(s + r));
      v8 z = y.softplus() - load(block.mu + r) - load(block.mu_rest + r);
      z = z * load(block.inverse_m + r);
      counted += __builtin_popcount(lanes(y.s > load(g.cut + r)));
      z = maximum(z, all(0.f));
      v8 sharp = block.mixed ? power(z, load(block.p + r) - all(1.f)) : power(z, block.p[0] - 1.f);
      v8 a = sharp * load(g.slope + r) * (load(w + r) - load(g.d + r));
      store(s + r, (a + load(g.pull + r)) * y.sigmoid());
      store(w + r, z * sharp);
    }
  }
  for (int x = 0; x < span.n; x += MR) {
    int from = block.hidden(span.first + x);
    gemm_rows<false>(std::min(MR, span.n - x), block.rows - from, at.dw + x * ROWS + from, ROWS,
                     at.dout + from * cols, cols, at.dv + (span.first + x) * cols, cols, cols,
                     true);
  }
  return counted;
}

// dq += ds k and dk += ds^T q
void score_gradients(const Block& block, Span span, const BackwardScratch& at) {
  int cols = (int)block.head.cols;
  for (int r = 0; r < block.rows; r += MR) {
    int m = std::min(MR, block.rows - r);
    int64_t depth = std::min<int64_t>(span.n, block.seen(r + m - 1) - span.first);
    if (depth > 0)
      gemm_rows<true>(m, depth, at.s + r, ROWS, at.k + span.first * cols, cols, at.dq + r * cols,
                      cols, cols, true);
  }
  for (int x = 0; x < span.n; x += MR) {
    int from = block.hidden(span.first + x);
    gemm_rows<false>(std::min(MR, span.n - x), block.rows - from, at.s + x * ROWS + from, ROWS,
                     at.q + from * cols, cols, at.dk + (span.first + x) * cols, cols, cols, true);
  }
}

// dx of x_hat = x / max(||x||, eps), given g = d x_hat / scale
void through_normalise(const float* x, const float* g, float scale, int64_t d, float* to) {
  float length = norm(x, d), inverse = 1.f / std::max(length, EPS);
  float along = length < EPS ? 0.f : dot(g, x, d) * inverse * inverse;
  for (int64_t i = 0; i < d; i++) to[i] = scale * inverse * (g[i] - along * x[i]);
}

double precise_dot(const float* a, const float* b, int64_t d) {
  double total = 0;
  for (int64_t x = 0; x < d; x++) total += (double)a[x] * b[x];
  return total;
}

// What the forward saved of the rows, their share of dout, and what all of their ds have in common
void prepare_rows(Block& block, const BackwardScratch& at, Gradients& g) {
  const Head& head = block.head;
  const Call& c = head.call;
  int64_t d = head.d, cols = head.cols;
  for (int r = 0; r < block.rows; r++) {
    int64_t i = block.first + r;
    const float *dout = head.row(c.dout, i), *out = head.row(c.out, i);
    const float* stat = head.row(c.stats, i);
    float inverse_l = 1.f / stat[3];
    if (stat[4] != block.p[r]) block.stage_one(r);
    block.shape(r, stat[0], stat[1], stat[2]);
    pack_rows(dout, 0, 1, d, cols, &inverse_l, at.dout + r * cols);
    pack_rows(out, 0, 1, d, cols, nullptr, at.out + r * cols);
    // by the same steps as dW, so that a row with a single entry has a gradient of exactly zero
    uint8_t same[4] = {(uint8_t)r, (uint8_t)r, (uint8_t)r, (uint8_t)r};
    float four[4];
    sparse_dot(4, same, at.out + r * cols, at.dout, cols, four, (int)cols);
    g.d[r] = four[0];
    g.slope[r] = block.p[r] * block.inverse_m[r];
    g.cut[r] = stat[5];
    if (block.mu[r] == 0.f) continue;
    g.pull[r] = (float)(-block.p[r] / block.count[r] * precise_dot(dout, head.row(c.guide, i), d));
  }
  for (int r = block.rows; r < ROWS; r++) g.cut[r] = INFINITY;
  std::fill(at.q + block.rows * cols, at.q + ROWS * cols, 0.f);
  std::fill(at.dout + block.rows * cols, at.dout + ROWS * cols, 0.f);
  pack_panels(at.q, cols, ROWS, d, nullptr, at.q_panels);
  pack_panels(at.dout, cols, ROWS, d, nullptr, at.dout_panels);
}

void backward_block(Block& block, const BackwardScratch& at) {
  const Head& head = block.head;
  Gradients g;
  pack_queries(block, at.q);
  prepare_rows(block, at, g);
  std::fill(at.dq, at.dq + block.rows * head.cols, 0.f);
  bool dense = block.lssa();
  for (int64_t first = 0; first < block.keys(); first += SPAN) {
    Span span{first, (int)std::min<int64_t>(SPAN, block.keys() - first)};
    score_span(block, span, at);
    int counted = dense ? backward_dense(block, span, at, g) : backward_sparse(block, span, at, g);
    score_gradients(block, span, at);
    // Neighbouring tiles are alike. A small one has nothing to gain.
    dense = block.lssa() || counted > std::max(1024., 0.55 * span.n * block.rows);
  }
  for (int r = 0; r < block.rows; r++)
    through_normalise(head.row(head.call.q, block.first + r), at.dq + r * head.cols, block.scale[r],
                      head.d, head.row(head.call.dq, block.first + r));
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
  pack_rows(head.row(c.k, 0), c.k.l, head.keys, head.d, head.cols, at.inverse, at.k);
  pack_rows(head.row(c.v, 0), c.v.l, head.keys, head.d, head.cols, nullptr, at.v);
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
    FlushTiny mode;
    Scratch scratch;
    Arena& arena = scratch.arena;
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
  size_t wide = last.keys * last.cols;
  Arena shared;  // dk and dv of every chunk, when a head has several
  if (chunks > 1 && !shared.reserve(2 * wide * tasks)) return 1;
  int failed = 0;
#pragma omp parallel num_threads((int)std::min(c.threads, tasks)) reduction(| : failed)
  {
    FlushTiny mode;
    Scratch scratch;
    Arena& arena = scratch.arena;
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
