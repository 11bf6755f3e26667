/* Every number Driftline takes of a tensor or of a pair of tensors, in one pass over memory.
 *
 * A plain shared library for ctypes: no Python, no OpenMP, no state of its own, threads only where the caller asks for
 * them. What each number means is written in definition.py and sketch.py, slowly and obviously; this file is only fast,
 * and is tested against them. It knows element types, not tensors: shapes, strides and files are other people's
 * business.
 *
 * How it is fast and still right:
 *  - The careful path decodes 512 elements at a time into float64 in L1 and masks what is not finite. It is
 *    the refuge of the fast one.
 *  - Summaries and sketches are summed in float64 everywhere: they are subtracted from each other later.
 *  - The fast path of a pair runs float32 lanes over 4096 or 8192 elements, around a shift close to their
 *    mean where that is far from zero, and folds the block into float64: no lane adds more than 32 float32 numbers
 *    in a row, and no total more than 32 of such sums, so it carries 4e-6 at
 *    the very worst and 1e-7 as a rule. It keeps sums of x, e, x*x, x*e and e*e
 *    (x = r - shift, e = c - r): the candidate's own moments follow from them, so the errors of sum_rc and sum_rr
 *    cancel where they are subtracted.
 *    A block that float32 cannot carry (not finite, sentinels, overflow, underflow, cancellation) is noticed from
 *    its own sums and taken again by the careful path.
 *  - The greatest relative error, the greatest ULP distance, the candidate's extremes and every position are looked up
 *    only in chains or blocks whose bounds say that they could matter. So are elements outside the tolerance, as long as
 *    hardly any is.
 *
 * One translation unit: csrc/ holds its chapters, and those that are vector code are included once per instruction
 * set.
 */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && !defined(DRIFTLINE_GENERIC_ONLY)
#define X86_PATHS 1
#else
#define X86_PATHS 0
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* 64-byte vectors are never passed across the library's border */
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define COLD __attribute__((noinline, cold))

/* Elements the fast paths take at a time, of 16 bits on both sides and of others, and the careful one; a block the former
 * cannot carry is cut into pieces. On Zen 4, 16 bits gain 1 % by longer ones, up to what the first cache holds beside
 * them for a second look; float32 loses 3 %. Both are whole chains. */
enum { LONG_BLOCK = 6144, BLOCK = 4096, PIECE = 512, BUCKETS = 64 };
/* Numbers that a lane of them adds in float32 before it joins its total. */
enum { LONG_CHAIN = 48, SHORT_CHAIN = 32 };

/* Bumped whenever a struct or a signature changes: the binding refuses a library it does not know. */
enum { ABI_VERSION = 5 };

/* How the tolerance is tested; the second where it can fall below float32's normal numbers: no absolute part. */
enum { TOLERANT = 1, EXACT_NEAR_ZERO = 2 };

enum { PATH_GENERIC = 0, PATH_AVX2 = 1, PATH_AVX512 = 2 };
/* Added to a path: nothing that only some of its processors have or like. For tests. */
enum { COMMON_WAYS = 16 };

/* Order shared with kernel.py. Complex types arrive as twice as many reals. */
enum {
  F64, F32, F16, BF16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP4,
  I64, I32, I16, I8, U64, U32, U16, U8, BOOL, I4, U4, DTYPES
};

static const uint8_t BITS[DTYPES] = {64, 32, 16, 16, 8, 8, 8, 8, 8, 4, 64, 32, 16, 8, 64, 32, 16, 8, 8, 4, 4};

/* The fields of PairMoments in their order, eight bytes each; arrays are {reference, candidate}. */
typedef struct {
  int64_t count, finite;
  double sum_r, sum_c, sum_rr, sum_cc, sum_rc, sum_ee, sum_abs_e, max_abs_e;
  int64_t max_abs_e_at;
  double sum_rel_e, max_rel_e, max_ulp;
  int64_t outside, different, first_different_at, finite_one[2];
  struct { double min, max; } ends[2];
  double sum[2], sumsq[2], std[2];
  int64_t nan[2], pos_inf[2], neg_inf[2], one_sided, one_sided_at, nonfinite_at[2];
} Moments;

/* The fields of Summary in their order. */
typedef struct {
  int64_t count;
  double min, max, mean, std, l2;
  int64_t zeros, nan, pos_inf, neg_inf;
  double sketch[BUCKETS];
} Summary;

/* ---- denormals: a program may have switched them off for itself (torch.set_flush_denormal) ---- */

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

#include "csrc/formats.h"
#include "csrc/pairs.h"
#include "csrc/summaries.h"
#include "csrc/token_rows.h"
#include "csrc/xxh3.h"
#include "csrc/peaks.h"
#include "csrc/bounds.h"

#include "csrc/names.h"

#define SUFFIX _generic
#define TARGET
#define WIDTH 4
#define LANES 2
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("no-tree-slp-vectorize") /* gcc 12 breaks down over two-lane code otherwise */
#endif
#include "csrc/path.h"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
#if X86_PATHS
#define SUFFIX _avx2
#define TARGET __attribute__((target("avx2,fma,f16c,popcnt")))
#define WIDTH 8
#define LANES 4
#include "csrc/path.h"
#define SUFFIX _avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")))
#define WIDTH 16
#define LANES 8
#include "csrc/path.h"
/* Half as wide, with the other set's registers: float16 on processors that take wide vectors in two halves, for which
 * converting to wide ones is four steps instead of two. */
#define SUFFIX _narrow
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt"), unused))
#define WIDTH 8
#define LANES 4
#define NARROW 1
#include "csrc/path.h"
#undef NARROW
#endif
#undef pair
#undef summary

/* ---- doors ---- */

EXPORT int driftline_abi(void) { return ABI_VERSION; }

/* The best path this processor can take. */
EXPORT int driftline_best_path(void) {
#if X86_PATHS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return PATH_AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return PATH_AVX2;
#endif
  return PATH_GENERIC;
}

#if X86_PATHS
static int bfloat16_dots(void) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
  return __builtin_cpu_supports("avx512bf16");
#else
  return 0;
#endif
}

/* Zen 4: of its family, the one with these instructions. */
static int wide_in_halves(void) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
  return __builtin_cpu_is("amdfam19h");
#else
  return 0;
#endif
}
#endif

/* `widen`: 1 when the reference, 2 when the candidate is real and the other side complex. `count` counts reals. */
EXPORT void driftline_pair(const void *r, int r_dtype, const void *c, int c_dtype, int64_t count, int widen,
                           double atol, double rtol, int r_mask, int c_mask, int path, Moments *out) {
  Pair s;
  memset(&s, 0, sizeof s);
  s.data[0] = r;
  s.data[1] = c;
  s.dtype[0] = r_dtype;
  s.dtype[1] = c_dtype;
  s.widen[0] = widen & 1;
  s.widen[1] = widen >> 1;
  s.format[0] = format_of(r_dtype);
  s.format[1] = format_of(c_dtype);
  if (!r_mask) s.format[0].sentinel = NAN;
  if (!c_mask) s.format[1].sentinel = NAN;
  s.atol = atol;
  s.rtol = rtol;
  s.m.count = count;
  FloatMode mode = exact_floats();
  begin_pair(&s);
  switch (path & ~COMMON_WAYS) {
#if X86_PATHS
    case PATH_AVX512:
      if (path & COMMON_WAYS) {
        pair_avx512(&s, count);
        break;
      }
      s.dots = bfloat16_dots();
      s.halves = wide_in_halves();
      if (r_dtype == F16 && c_dtype == F16 && s.halves) pair_narrow(&s, count);
      else pair_avx512(&s, count);
      break;
    case PATH_AVX2:
      s.halves = wide_in_halves();
      pair_avx2(&s, count);
      break;
#endif
    default: pair_generic(&s, count); break;
  }
  finish_pair(&s, out);
  restore_floats(mode);
}

/* A thread of our own; whether one could be had. */
static int begin_hand(pthread_t *hand, void *(*work)(void *), void *given) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads that were there */
  const int begun = !pthread_create(hand, NULL, work, given);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return begun;
}

#include "csrc/many_pairs.h"

EXPORT void driftline_summary(const void *data, int dtype, int64_t count, int mask, int path, Summary *out) {
  One s;
  memset(&s, 0, sizeof s);
  s.data = data;
  s.dtype = dtype;
  s.sentinel = mask ? format_of(dtype).sentinel : NAN;
  s.s.min = INFINITY;
  s.s.max = -INFINITY;
  FloatMode mode = exact_floats();
  switch (path) {
#if X86_PATHS
    case PATH_AVX512: summary_avx512(&s, count); break;
    case PATH_AVX2: summary_avx2(&s, count); break;
#endif
    default: summary_generic(&s, count); break;
  }
  finish_summary(&s, count, out);
  restore_floats(mode);
}

static Hash digest(const uint8_t *p, size_t n, int path) {
  if (n <= 16) return hash_to_16(p, n);
  if (n <= 240) return hash_to_240(p, n);
  uint64_t sums[8];
  switch (path) {
#if X86_PATHS
    case PATH_AVX512: hash_long_avx512(p, n, sums); break;
    case PATH_AVX2: hash_long_avx2(p, n, sums); break;
#endif
    default: hash_long_generic(p, n, sums); break;
  }
  return finish_long(sums, n);
}

static void score_share(ScoreAsk *ask, int which) {
  ScoreRoom room;
  const int64_t padded = (ask->vocabulary + STRIP - 1) / STRIP * STRIP;
  room.es = ask->scratch + 3 * padded * which;
  room.bases = room.es + 2 * padded;
  room.bests = room.bases + padded / STRIP;
  FloatMode mode = exact_floats();
  switch (ask->path) {
#if X86_PATHS
    case PATH_AVX512: score_rows_avx512(ask, &room); break;
    case PATH_AVX2: score_rows_avx2(ask, &room); break;
#endif
    default: score_rows_generic(ask, &room); break;
  }
  restore_floats(mode);
}

typedef struct { ScoreAsk *ask; int which; pthread_t thread; } ScoreHand;

static void *score_beside(void *hand) {
  score_share(((ScoreHand *)hand)->ask, ((ScoreHand *)hand)->which);
  return 0;
}

/* Rows of logits. `scratch` has room for three rows per thread, each rounded up to whole strips of 1024. Threads other
 * than the caller's live as long as the call: a pool would have to survive forks and the interpreter's end. */
EXPORT void driftline_score(const void *r, int r_dtype, const void *c, int c_dtype, int64_t rows, int64_t vocabulary,
                            const int64_t *tokens, int64_t k, int path, int threads, float *scratch, RowScore *out,
                            int64_t *top_at, float *r_top, float *c_top) {
  ScoreAsk ask = {{r, c}, {r_dtype, c_dtype}, rows, vocabulary, k, tokens, out, top_at, {r_top, c_top}, scratch, path,
                  threads, 0};
  ScoreHand hands[MOST_HANDS];
  int begun = 0;
  for (int i = 1; i < threads && i < MOST_HANDS; i++) {
    hands[begun] = (ScoreHand){&ask, i, 0};
    if (!begin_hand(&hands[begun].thread, score_beside, &hands[begun])) break; /* those there are do it */
    begun++;
  }
  score_share(&ask, 0);
  for (int i = 0; i < begun; i++) pthread_join(hands[i].thread, 0);
}

#include "csrc/digits.h"

/* Benchmark only: the floor that the kernels are measured against, prefetching `ahead` bytes, and `far` into the
 * second cache, unless that is zero. */
EXPORT uint64_t driftline_read_two(const void *a, const void *b, int64_t bytes, int64_t ahead, int64_t far, int path) {
#if X86_PATHS
  if (path == PATH_AVX512) return read_two_avx512(a, b, bytes, ahead, far);
  if (path == PATH_AVX2) return read_two_avx2(a, b, bytes, ahead, far);
#endif
  (void)path;
  return read_two_generic(a, b, bytes, ahead, far);
}

/* Sixteen bytes, most significant first, as the xxhash package's `digest()` gives them. */
EXPORT void driftline_digest(const void *data, int64_t bytes, int path, uint8_t *out) {
  Hash h = digest(data, (size_t)bytes, path);
  for (int i = 0; i < 8; i++) {
    out[i] = (uint8_t)(h.high >> (56 - 8 * i));
    out[8 + i] = (uint8_t)(h.low >> (56 - 8 * i));
  }
}
