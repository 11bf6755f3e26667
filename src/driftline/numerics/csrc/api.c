/* The functions that ctypes calls: every number that Driftline computes for a tensor or a pair of tensors.
 *
 * A plain shared library: no Python, no OpenMP, no state, and threads only if the caller asks for them. definitions.py
 * defines each number in slow, plain numpy; this library computes the same numbers fast and is tested against it. It
 * knows element types, but no shapes, strides or files. */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tables.h"
#include "formats.h"
#include "moments.h"
#include "hash.h"
#include "peaks.h"
#include "token_scores.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define EXPORT __attribute__((visibility("default")))

/* ---- instruction sets ---- */

enum { PATH_GENERIC, PATH_AVX2, PATH_AVX512 };

/* The best path that both the processor and the operating system support: the system must save the registers when it
 * switches processes. The processor is asked directly, because __builtin_cpu_supports needs libgcc, which zig does not
 * link. */
EXPORT int driftline_best_path(void) {
#if defined(__x86_64__) && !defined(DRIFTLINE_GENERIC_ONLY)
  enum { FMA = 1 << 12, OSXSAVE = 1 << 27, AVX = 1 << 28, AVX2 = 1 << 5, AVX512F = 1 << 16, AVX512DQ = 1 << 17 };
  const unsigned avx512bw = 1u << 30, avx512vl = 1u << 31;
  const unsigned ymm_saved = 0x6, zmm_saved = 0xe6; /* bits of XCR0 */
  unsigned a, b, c, d, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE) || !(c & AVX) || !(c & FMA)) return PATH_GENERIC;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & ymm_saved) != ymm_saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return PATH_GENERIC;
  const unsigned wide = AVX512F | AVX512DQ | avx512bw | avx512vl;
  if ((saved & zmm_saved) == zmm_saved && (b & wide) == wide) return PATH_AVX512;
  if (b & AVX2) return PATH_AVX2;
#endif
  return PATH_GENERIC;
}

static const Isa *isa_of(int path) {
#if defined(__x86_64__) && !defined(DRIFTLINE_GENERIC_ONLY)
  if (path == PATH_AVX512) return &driftline_isa_avx512;
  if (path == PATH_AVX2) return &driftline_isa_avx2;
#endif
  (void)path;
  return &driftline_isa_generic;
}

/* A number for the tables that this library was built from; the binding refuses a library with another number. */
EXPORT int driftline_abi(void) { return ABI_NUMBER; }

/* ---- denormals: the program may have switched them off (torch.set_flush_denormal) ---- */

typedef struct { uint64_t word; } FloatMode;

INLINE FloatMode exact_floats(void) {
  FloatMode old = {0};
#if defined(__x86_64__)
  old.word = _mm_getcsr();
  _mm_setcsr(0x1F80);
#elif defined(__aarch64__)
  uint64_t word;
  __asm__ volatile("mrs %0, fpcr" : "=r"(word));
  old.word = word;
  word = 0;
  __asm__ volatile("msr fpcr, %0" : : "r"(word));
#endif
  return old;
}

INLINE void restore_floats(FloatMode old) {
#if defined(__x86_64__)
  _mm_setcsr((unsigned)old.word);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(old.word));
#else
  (void)old;
#endif
}

/* ---- pairs and summaries ---- */

/* `widen`: bit 0: the reference is real and the candidate complex; bit 1: the reverse. `count` counts reals. */
EXPORT void driftline_pair(const void *r, int r_dtype, const void *c, int c_dtype, int64_t count, int widen,
                           double atol, double rtol, int r_mask, int c_mask, int path, Moments *out) {
  const Isa *isa = isa_of(path);
  Pair s = {
    .data = {r, c},
    .dtype = {r_dtype, c_dtype},
    .widen = {widen & 1, widen >> 1},
    .floor = {r_mask ? FORMATS[r_dtype].floor : -INFINITY, c_mask ? FORMATS[c_dtype].floor : -INFINITY},
    .atol = atol,
    .rtol = rtol,
    .side = {empty_side(), empty_side()},
    .m = {.count = count, .max_abs_e_at = -1, .first_different_at = -1, .one_sided_at = -1},
  };
  Moments *m = &s.m;
  const Side *own = s.side;
  FloatMode mode = exact_floats();
  isa->pair(&s, count);
  m->sum_rr = total_of(&s.rr);
  m->sum_cc = total_of(&s.cc);
  m->sum_rc = total_of(&s.rc);
  m->sum_ee = total_of(&s.ee);
  m->sum_abs_e = total_of(&s.abs_e);
  m->sum_rel_e = total_of(&s.rel_e);
  m->max_ulp = FORMATS[c_dtype].is_float ? (double)s.ulp : s.ulp_real;
  Spread spread[2];
  for (int side = 0; side < 2; side++) {
    const int exponent = scale_exponent(&own[side], s.dtype[side]);
    const Side scaled =
      exponent ? isa->scaled(s.data[side], s.dtype[side], s.widen[side], s.floor[side], count, exponent) : own[side];
    spread[side] = spread_of(&scaled, exponent);
  }
#define OWN(prefix, i)                                        \
  m->prefix##_finite = (int64_t)own[i].n;                     \
  m->prefix##_min = own[i].n > 0 ? own[i].min : NAN;          \
  m->prefix##_max = own[i].n > 0 ? own[i].max : NAN;          \
  m->prefix##_mean = spread[i].mean;                          \
  m->prefix##_std = spread[i].std;                            \
  m->prefix##_l2 = spread[i].l2;                              \
  m->prefix##_nan = own[i].nan;                               \
  m->prefix##_pos_inf = own[i].pos_inf;                       \
  m->prefix##_neg_inf = own[i].neg_inf;                       \
  m->prefix##_nonfinite_at = own[i].nonfinite_at
  OWN(r, 0);
  OWN(c, 1);
  *out = *m;
  restore_floats(mode);
}

EXPORT void driftline_summary(const void *data, int dtype, int64_t count, int mask, int path, Summary *out) {
  const Isa *isa = isa_of(path);
  Single s = {
    .data = data, .dtype = dtype, .floor = mask ? FORMATS[dtype].floor : -INFINITY, .side = empty_side()};
  FloatMode mode = exact_floats();
  isa->summary(&s, count);
  const int exponent = scale_exponent(&s.side, dtype), some = s.side.n > 0;
  const Side scaled = exponent ? isa->scaled(data, dtype, 0, s.floor, count, exponent) : s.side;
  const Spread spread = spread_of(&scaled, exponent);
  *out = (Summary){
    .count = count,
    .min = some ? s.side.min : NAN,
    .max = some ? s.side.max : NAN,
    .mean = spread.mean,
    .std = spread.std,
    .l2 = spread.l2,
    .zeros = s.zeros,
    .nan = s.side.nan,
    .pos_inf = s.side.pos_inf,
    .neg_inf = s.side.neg_inf,
  };
  memcpy(out->sketch, s.sketch, sizeof out->sketch);
  restore_floats(mode);
}

/* ---- rows of logits ---- */

typedef struct { ScoreJob *job; const Isa *isa; int thread; pthread_t handle; } ScoreThread;

static void *score_thread(void *given) {
  ScoreThread *t = given;
  FloatMode mode = exact_floats();
  t->isa->score(t->job, t->thread);
  restore_floats(mode);
  return 0;
}

/* `scratch` has room for three rows per thread, each rounded up to whole strips of 1024. Extra threads live only during
 * the call: a thread pool would have to survive forks and the interpreter's end. */
EXPORT void driftline_score(const void *r, int r_dtype, const void *c, int c_dtype, int64_t rows, int64_t vocabulary,
                            const int64_t *tokens, int64_t k, int path, int threads, float *scratch, RowScore *out,
                            int64_t *top_at, float *r_top, float *c_top) {
  ScoreJob job = {.data = {r, c}, .dtype = {r_dtype, c_dtype}, .rows = rows, .vocabulary = vocabulary, .k = k,
                  .tokens = tokens, .out = out, .top_at = top_at, .top = {r_top, c_top}, .scratch = scratch,
                  .threads = threads};
  ScoreThread thread[MOST_SCORE_THREADS];
  int started = 1;
  for (; started < threads && started < MOST_SCORE_THREADS; started++) {
    thread[started] = (ScoreThread){&job, isa_of(path), started, 0};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals go to the threads that existed before */
    const int failed = pthread_create(&thread[started].handle, NULL, score_thread, &thread[started]);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) break; /* the threads that did start take all rows */
  }
  thread[0] = (ScoreThread){&job, isa_of(path), 0, 0};
  score_thread(&thread[0]);
  for (int i = 1; i < started; i++) pthread_join(thread[i].handle, 0);
}

/* ---- peaks and digests ---- */

/* The largest magnitude pattern of `count` numbers of 8, 16, 32 or 64 bits. */
EXPORT uint64_t driftline_peak(const void *data, int bits, int64_t count, uint64_t mask, int odd_nan, int path) {
  return odd_nan ? peak_odd(data, count) : isa_of(path)->peak(data, bits, count, mask);
}

EXPORT void driftline_tally(const void *data, int bits, int64_t count, const Pattern *pattern, SpecialCounts *out) {
  tally(data, bits, count, pattern, out);
}

/* Sixteen bytes, most significant first, equal to `digest()` of the xxhash package. */
EXPORT void driftline_digest(const void *data, int64_t bytes, int path, uint8_t *out) {
  const size_t n = (size_t)bytes;
  Hash h;
  if (n <= 240) {
    h = n <= 16 ? hash_to_16(data, n) : hash_to_240(data, n);
  } else {
    uint64_t sums[8];
    isa_of(path)->hash_long(data, n, sums);
    h = finish_long(sums, n);
  }
  for (int i = 0; i < 8; i++) {
    out[i] = (uint8_t)(h.high >> (56 - 8 * i));
    out[8 + i] = (uint8_t)(h.low >> (56 - 8 * i));
  }
}
