// A call, the rows of a block and what both directions know of them.
#pragma once
#include "cpu_activations.h"

namespace {

constexpr int ROWS = 96;   // queries of the largest block: a multiple of MR, W and the smaller ones
constexpr int SPAN = 96;   // keys of a tile, backward
constexpr int TILE = 1024;  // forward: scores of ROWS x TILE stay in the second cache
constexpr int NEAR = 1536;  // forward: rows of a task whose keys are few enough for that cache
constexpr int DIRECT = 4;  // up to this many queries (decoding), keys are read where they lie
constexpr int STATS = 8;   // numbers saved of each row: PlainStat or SharpStat
constexpr float EPS = 1e-12f;  // as F.normalize

struct PlainStat {  // numbers of a row that is not sharpened
  enum { TOP, INVERSE, AGAIN, PULL };
};
struct SharpStat {  // numbers of a sharpened row
  enum { MEAN, MEAN_REST, RANGE, TOTAL, P, CUT, SHIFT, LIFT };
};

struct View {  // (B, H, L, d) float32, unit stride along d; data is null where there is none
  float* data;
  int64_t batch_stride, head_stride, row_stride;
  float* row(int64_t b, int64_t h, int64_t l) const {
    return data + b * batch_stride + h * head_stride + l * row_stride;
  }
};

enum Flags : int64_t {  // what is not the plain case; named in fused.py
  COSINE = 1,           // scores are log d log N cos(q, k), unless LOG_L or ROOT_D
  L1 = 2,               // rows are divided by the sum of their absolute values
  LOG_N = 4,            // the bias is -log N
  RECENTRE = 8,         // 1/N is subtracted from the weights of rows beyond the third
  RECENTRE_L1 = 16,     // and they are normalised again
  LOG_L = 32,           // scores are log d log L cos(q, k), L = train_length
  ROOT_D = 64,          // scores are sqrt(d) cos(q, k)
  UNIT_KEYS = 128,      // keys are divided by their length, queries are given
};

// `KernelCall` in cpu.py, field by field; names and offsets are compared when this is loaded
struct Call {
  int64_t batch, heads, groups, queries, keys, head_dim, value_dim, threads;
  int64_t window, phi, flags;  // from here to train_length: `Settings` in fused.py
  double p, alpha, bias;       // p = 0: not sharpened
  int64_t train_length;
  const int64_t* first;   // (B, Lq) or (Lq,): the first key that each row sees; null: the first
  int64_t first_stride;   // over the batch
  View q, k, v, out, stats, guide, grad_out, grad_q, grad_k, grad_v;
  bool has(Flags flag) const { return flags & flag; }
  bool unit_keys() const { return has(COSINE) || has(UNIT_KEYS); }
  bool spans() const { return first || window; }
  void expect(const View& x, int64_t some_heads, int64_t rows, int64_t width) const {
    use_huge_pages(x.data, batch * some_heads * rows * width * sizeof(float));
  }
};

// Row i sees the keys [lo, hi); none where lo >= hi.
struct Seen {
  int64_t lo, hi;
};
inline Seen seen_by(const Call& c, int64_t b, int64_t i) {
  int64_t hi = c.keys - c.queries + i + 1, lo = c.first ? c.first[b * c.first_stride + i] : 0;
  if (c.window) lo = std::max(lo, hi - c.window);
  return {std::min(lo, hi), hi};
}

struct Task {  // rows [begin, end) of every query head of one head of keys
  const Call& call;
  int64_t b, group, begin, end;
  int64_t d = call.head_dim, cols = round_up(d, W);
  int64_t dv = call.value_dim, vcols = round_up(dv, W);
  int64_t low = 0, to = 0;  // the keys that some of its rows see
  int64_t from = 0;         // low, down to a multiple of PANEL
  int64_t widest = 0;        // keys of a block, with room for alignment
  int rows;                  // of a block
  bool direct = end - begin <= DIRECT;
  std::vector<int64_t> bad_keys;  // with NaN or inf, ascending; `find_bad_keys` looks for them
  Task(const Call& c, int64_t b, int64_t group, int64_t begin, int64_t end)
      : call(c), b(b), group(group), begin(begin), end(end) {
    // Fewer rows that differ waste fewer scores: four microkernels, or one panel backward.
    rows = !c.spans() ? ROWS : c.grad_q.data ? ROWS / 3 : ROWS / 2;
    low = c.keys;
    for (int64_t i = begin; i < end; i += rows) {
      int64_t lo = c.keys, hi = 0;
      for (int64_t j = i; j < std::min(end, i + rows); j++) {
        Seen s = seen_by(c, b, j);
        if (s.lo < s.hi) lo = std::min(lo, s.lo), hi = s.hi;
      }
      low = std::min(low, lo), to = std::max(to, hi);
      widest = std::max(widest, hi - lo);
    }
    low = std::min(low, to), from = low / PANEL * PANEL;
    widest = std::min(widest, to - from) + 2 * PANEL;
  }
  int64_t keys() const { return to - from; }
  int64_t heads() const { return call.heads / call.groups; }
  bool sharp() const { return call.p != 0; }
  // A row that sees a NaN or an inf, in its query or in a key, is NaN, and so are the gradients of
  // all that it sees. Such queries and keys are computed as zeros, since 0 NaN is NaN also where a
  // row does not look, and what they reach is made NaN in the end.
  void find_bad_keys() {
    for (int64_t j = from; j < to; j++)
      if (!finite(key(j), d)) bad_keys.push_back(j);
  }
  bool sees_bad_key(int64_t lo, int64_t hi) const {
    auto found = std::lower_bound(bad_keys.begin(), bad_keys.end(), lo);
    return found != bad_keys.end() && *found < hi;
  }
  const float* key(int64_t j) const { return call.k.row(b, group, j); }
  const float* value(int64_t j) const { return call.v.row(b, group, j); }
};

struct Block {  // up to `rows` consecutive queries of a head
  const Task& task;
  int64_t head, first;
  int rows;
  int64_t lo_all, hi_all;  // the keys that some of them see
  alignas(64) int32_t lo[ROWS], hi[ROWS];
  alignas(64) float count[ROWS], scale[ROWS], shift[ROWS], p[ROWS];
  alignas(64) float mu[ROWS] = {}, mu_rest[ROWS] = {};  // the mean in two parts
  alignas(64) float m[ROWS], inverse_m[ROWS];           // largest excess over it
  alignas(64) float lift[ROWS];                         // what f, mu and m are multiplied by
  bool mixed;                                           // rows differ in p
  bool bad[ROWS] = {};                                  // sees a NaN or an inf

  Block(const Task& task, int64_t head, int64_t first, float unit)
      : task(task), head(head), first(first),
        rows((int)std::min<int64_t>(task.rows, task.end - first)) {
    const Call& c = task.call;
    lo_all = task.to, hi_all = task.from;
    for (int r = 0; r < task.rows; r++) {  // those past the end are as the last one
      Seen s = seen_by(c, task.b, first + std::min(r, rows - 1));
      lo[r] = (int32_t)s.lo, hi[r] = (int32_t)s.hi;
      count[r] = (float)std::max<int64_t>(s.hi - s.lo, 1);
      if (s.lo < s.hi) lo_all = std::min(lo_all, s.lo), hi_all = std::max(hi_all, s.hi);
      m[r] = inverse_m[r] = lift[r] = 1.f;
    }
    lo_all = std::min(lo_all, hi_all);
    float log_d = std::log((float)c.head_dim), constant = 1.f / std::sqrt((float)c.head_dim);
    if (c.has(LOG_L)) constant = log_d * std::log((float)c.train_length);
    if (c.has(ROOT_D)) constant = std::sqrt((float)c.head_dim);
    bool log_n = c.has(COSINE) && !c.has(LOG_L) && !c.has(ROOT_D);
    for (int r = 0; r < task.rows; r += W) {
      vf log2_n = log2v(load(count + r)), to_unit = all(unit == 1.f ? LN_2 : 1.f);
      store(scale + r, log_n ? all(log_d) * log2_n * to_unit : all(constant * unit));
      store(shift + r, c.has(LOG_N) ? -log2_n * to_unit : all((float)c.bias * unit));
    }
    mixed = c.alpha != 0;
    for (int r = 0; r < task.rows; r++) {
      p[r] = (float)c.p;
      if (count[r] > c.train_length && mixed)
        p[r] = (float)(c.p * (1 + c.alpha * (std::sqrt(count[r] / (double)c.train_length) - 1)));
    }
  }
  bool shifted(int r) const { return count[r] > 3.f; }  // the mean of the first three rows is 0
  bool empty() const { return lo_all >= hi_all; }
  void shape(int r, float mean, float mean_rest, float range) {
    mu[r] = mean, mu_rest[r] = mean_rest, m[r] = range, inverse_m[r] = 1.f / range;
  }
  void stage_one(int r) {
    shape(r, 0.f, 0.f, 1.f);
    p[r] = 1.f, mixed = true;
  }
  const float* query(int r) const { return task.call.q.row(task.b, head, first + r); }
  float* of(const View& view, int r) const { return view.row(task.b, head, first + r); }
};

// q scaled so that a score is q . k, or q . k_hat: rows [ROWS][cols]
inline void pack_queries(Block& block, float* q) {
  const Task& task = block.task;
  for (int r = 0; r < block.rows; r++) {
    bool good = finite(block.query(r), task.d);
    block.bad[r] = task.sees_bad_key(block.lo[r], block.hi[r]) || (!good && block.lo[r] < block.hi[r]);
    if (!good) {
      std::fill_n(q + r * task.cols, task.cols, 0.f);
      continue;
    }
    float c = block.scale[r];
    if (task.call.has(COSINE)) c /= std::max(norm(block.query(r), task.d), EPS);
    pack_rows(block.query(r), 0, 1, task.d, task.cols, &c, q + r * task.cols);
  }
}

inline float key_factor(const Task& task, int64_t j) {
  return task.call.unit_keys() ? 1.f / std::max(norm(task.key(j), task.d), EPS) : 1.f;
}

// Scores of n keys, which are read where they lie: to[r * row + j * key]. Both directions take the
// same steps to a score, here as in their products: sharpening would enlarge a difference.
inline void score_direct(const Block& block, int64_t first, int64_t n, const float* q, float* to,
                         int64_t row, int64_t key) {
  const Task& task = block.task;
  int64_t d = task.d, ld = task.call.k.row_stride;
  for (int64_t j = 0; j < n; j++) {
    const float* k = task.key(first + j);
    float factor[4], s[4];
    int together = j + 4 <= n ? 4 : 1;
    for (int i = 0; i < together; i++) factor[i] = key_factor(task, first + j + i);
    for (int r = 0; r < block.rows; r++) {
      if (together == 4)
        dot4(q + r * task.cols, k, ld, d, s);
      else
        s[0] = dot(q + r * task.cols, k, d);
      for (int i = 0; i < together; i++) to[r * row + (j + i) * key] = factor[i] * s[i];
    }
    j += together - 1;
  }
}

constexpr int64_t ACTIVATIONS = 9;  // cases of with_activation

// Calls f(Phi()) for the activation of the call, which is below ACTIVATIONS
template <class F>
inline void with_activation(int64_t phi, F&& f) {
  switch (phi) {  // in the order of PHI in fused.py
    case 0: return f(Exp());
    case 1: return f(Sigmoid());
    case 2: return f(Softplus());
    case 3: return f(Identity());
    case 4: return f(Relu());
    case 5: return f(Relu2());
    case 6: return f(Relu6());
    case 7: return f(Gelu());
    case 8: return f(Mish());
  }
}
template <class Phi>
constexpr bool CAN_SHARPEN = std::is_same<Phi, Exp>::value || std::is_same<Phi, Sigmoid>::value ||
                             std::is_same<Phi, Softplus>::value;

// Chunks of rows that a head of keys is cut into, so that the tasks divide evenly.
inline int chunks_per_head(const Call& c) {
  int64_t heads = c.batch * c.groups, blocks = (c.queries + ROWS - 1) / ROWS;
  if (heads >= 8 * c.threads) return 1;
  int64_t chunks = c.threads / std::gcd(heads, c.threads);
  return (int)std::max<int64_t>(1, std::min({chunks, blocks / 2, (int64_t)8}));
}

// First row of chunk i of n: equal shares of the keys seen, at whole blocks
inline int64_t chunk_begin(const Call& c, int i, int n) {
  if (i == n) return c.queries;
  if (c.spans()) return c.queries * i / n / ROWS * ROWS;
  double before = (double)(c.keys - c.queries), rows = (double)c.queries;
  double work = (before * rows + rows * rows / 2) * i / n;
  return (int64_t)(std::sqrt(before * before + 2 * work) - before) / ROWS * ROWS;
}

inline Task task_of(const Call& c, int64_t i, int chunks) {
  int chunk = (int)(i % chunks);
  int64_t head = i / chunks;
  return Task(c, head / c.groups, head % c.groups, chunk_begin(c, chunk, chunks),
              chunk_begin(c, chunk + 1, chunks));
}

}  // namespace
