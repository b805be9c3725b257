// Exact fused attention on the CPU, forward and backward, in linear memory: every mechanism.
//
// Row i sees the keys first_i .. i, N_i of them. With f = phi(scale q.k + bias) on those keys,
//
//   w = f / sum |f|, or f              out = w V
//   ds = phi' (dW - sgn(f) D) / sum |f|,  dW = dOut V^T,  D = dOut . out (0 without the norm)
//
// and sharpened rows (f >= 0), which do not change when a row of f is scaled:
//
//   z = relu(f - mu) / M               mu = mean_j f (0 where N_i <= 3), M = max_j f - mu
//   r = z^(p-1), w = z r / l           l = sum_j z r, out = w V
//   G = sum_j r V_j / (l M) - H out    H = sum_j r / (l M)
//   E = p/N_i dOut . G                 (0 where mu is)
//   ds = (p r / (l M) (dW - D) - E) phi'
//
// A row whose keys are all alike (M below the rounding of f: LSSAR_FLAT, which the build takes from
// reference.py) is the case p = 1, mu = 0.
//
// Both directions process a block of rows against tiles of keys. In sharpened rows, entries with
// r < 2^-20 / N are skipped where most are that small; ds stays dense because E is added to every
// seen key.
// Keys that no row of a block sees are not looked at. Blocks never depend on the number of threads:
// out and dq have the same bits for any number, dk and dv for the same number of chunks per head.
#include <cstddef>
#include <string>

#include "cpu_backward.h"
#include "cpu_sharpen.h"

// What the two functions return
enum Status { DONE = 0, NO_MEMORY = 1, UNKNOWN_ACTIVATION = 2 };

// The fields of a call and where they are, for cpu.py to compare with its own
extern "C" const char* lssar_call_layout() {
#define FIELD(name) #name "=" + std::to_string(offsetof(Call, name)) + " "
#define VIEW(name) \
  FIELD(name.data) + FIELD(name.batch_stride) + FIELD(name.head_stride) + FIELD(name.row_stride)
  static const std::string layout = std::string() +
      FIELD(batch) + FIELD(heads) + FIELD(groups) + FIELD(queries) + FIELD(keys) +
      FIELD(head_dim) + FIELD(value_dim) + FIELD(threads) + FIELD(window) + FIELD(phi) +
      FIELD(flags) + FIELD(p) + FIELD(alpha) + FIELD(bias) + FIELD(train_length) + FIELD(first) +
      FIELD(first_stride) + VIEW(q) + VIEW(k) + VIEW(v) + VIEW(out) + VIEW(stats) + VIEW(guide) +
      VIEW(grad_out) + VIEW(grad_q) + VIEW(grad_k) + VIEW(grad_v) +
      "bytes=" + std::to_string(sizeof(Call));
#undef VIEW
#undef FIELD
  return layout.c_str();
}

extern "C" int lssar_forward(const Call* call) {
  const Call& c = *call;
  if (c.phi < 0 || c.phi >= ACTIVATIONS) return UNKNOWN_ACTIVATION;
  int chunks = chunks_per_head(c);
  if (c.spans()) chunks = std::max<int>(chunks, c.queries / NEAR);
  int64_t tasks = c.batch * c.groups * chunks;
  c.expect(c.out, c.heads, c.queries, c.value_dim);
  c.expect(c.guide, c.heads, c.queries, c.value_dim);
  int failed = 0;
#pragma omp parallel num_threads((int)std::min(c.threads, tasks)) reduction(| : failed)
  {
    FlushTiny mode;
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; i++)
      with_activation(c.phi, [&](auto phi) {  // the longest rows first
        Task task = task_of(c, tasks - 1 - i, chunks);
        failed |= !forward_task<decltype(phi)>(task, scratch.arena);
      });
  }
  return failed ? NO_MEMORY : DONE;
}

extern "C" int lssar_backward(const Call* call) {
  const Call& c = *call;
  if (c.phi < 0 || c.phi >= ACTIVATIONS) return UNKNOWN_ACTIVATION;
  int chunks = chunks_per_head(c);
  int64_t heads = c.batch * c.groups, tasks = heads * chunks;
  Arena shared;  // dk and dv of every chunk, when a head has several
  int64_t wide = c.keys * round_up(c.head_dim, W), values = c.keys * round_up(c.value_dim, W);
  if (chunks > 1 && !shared.reserve((wide + values) * tasks)) return NO_MEMORY;
  c.expect(c.grad_q, c.heads, c.queries, c.head_dim);
  c.expect(c.grad_k, c.groups, c.keys, c.head_dim);
  c.expect(c.grad_v, c.groups, c.keys, c.value_dim);
  int failed = 0;
#pragma omp parallel num_threads((int)std::min(c.threads, tasks)) reduction(| : failed)
  {
    FlushTiny mode;
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; i++) {
      int64_t t = tasks - 1 - i;
      float* dk = chunks > 1 ? shared.base + (wide + values) * t : nullptr;
      with_activation(c.phi, [&](auto phi) {
        Task task = task_of(c, t, chunks);
        failed |= !backward_task<decltype(phi)>(task, scratch.arena, dk, dk ? dk + wide : nullptr);
      });
    }
    if (chunks > 1) {
#pragma omp for
      for (int64_t h = 0; h < heads; h++) {
        KeySums sums[8];
        for (int i = 0; i < chunks; i++) {
          const float* base = shared.base + (wide + values) * (h * chunks + i);
          Task task = task_of(c, h * chunks + i, chunks);
          sums[i] = {base, base + wide, task.from, task.to};
        }
        float room[512 + 2 * W];
        finish_keys(task_of(c, h * chunks, chunks), sums, chunks, room);
      }
    }
  }
  return failed ? NO_MEMORY : DONE;
}
