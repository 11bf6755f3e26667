/* Every number Driftline takes of a tensor or of a pair of tensors, in one pass over memory.
 *
 * A plain shared library for ctypes: no Python, no threads, no OpenMP, no state between calls. What each number
 * means is written in definition.py and sketch.py, slowly and obviously; this file is only fast, and is tested
 * against them. It knows element types, not tensors: shapes, strides and files are other people's business.
 *
 * How it is fast and still right:
 *  - The careful path decodes 1024 elements at a time into float64 in L1 and masks what is not finite. It is the
 *    whole story on the generic path and the refuge of the others.
 *  - The fast path (AVX2, AVX-512) runs float32 lanes over the same 1024 elements, around a shift close to their
 *    mean, and folds the block into float64. It keeps sums of x, e, x*x, x*e, e*e (x = r - shift, e = c - r): the
 *    candidate's own moments follow from them, so the errors of sum_rc and sum_rr cancel where they are subtracted.
 *    A block that float32 cannot carry (not finite, sentinels, overflow, underflow, cancellation) is noticed from
 *    its own sums and taken again by the careful path.
 *  - The greatest ULP distance, the candidate's extremes and every position are looked up only in blocks whose
 *    bounds say that they could matter.
 *
 * The file includes itself once per vector instruction set; see "THE FAST PATHS".
 */
#ifndef DRIFTLINE_BODY

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
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

enum { BLOCK = 1024, BUCKETS = 64 };

/* Bumped whenever a struct or a signature changes: the binding refuses a library it does not know. */
enum { ABI_VERSION = 1 };

enum { PATH_GENERIC = 0, PATH_AVX2 = 1, PATH_AVX512 = 2 };

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

/* ---- formats ---- */

typedef struct {
  int is_float;    /* else an integer format: one ULP is one */
  int mantissa;    /* stored bits */
  int emin;        /* exponent of the smallest normal number */
  uint64_t top;    /* ordinal just past the greatest finite number */
  double sentinel; /* the value that means -inf; NaN when the format has none */
} Format;

static Format format_of(int dtype) {
  switch (dtype) {
    case F64: return (Format){1, 52, -1022, 0x7FF0000000000000ull, -DBL_MAX};
    case F32: return (Format){1, 23, -126, 0x7F800000u, -(double)FLT_MAX};
    case F16: return (Format){1, 10, -14, 0x7C00u, -65504.0};
    case BF16: return (Format){1, 7, -126, 0x7F80u, -0x1.FEp127};
    case E4M3FN: return (Format){1, 3, -6, 0x7Fu, NAN};
    case E4M3FNUZ: return (Format){1, 3, -7, 0x80u, NAN};
    case E5M2: return (Format){1, 2, -14, 0x7Cu, NAN};
    case E5M2FNUZ: return (Format){1, 2, -15, 0x80u, NAN};
    case E8M0: return (Format){1, 0, -127, 0x100u, NAN};
    case FP4: return (Format){1, 1, 0, 0x8u, NAN};
    default: return (Format){0, 0, 0, 0, NAN};
  }
}

static float small_values[5][256]; /* E4M3FN .. E8M0 by bit pattern */
static float fp4_values[16];

static float minifloat(unsigned code, int ebits, int mbits, int bias) {
  int exponent = (int)(code >> mbits) & ((1 << ebits) - 1);
  float mantissa = (float)(code & ((1u << mbits) - 1)) / (float)(1 << mbits);
  float value = exponent ? ldexpf(1.0f + mantissa, exponent - bias) : ldexpf(mantissa, 1 - bias);
  return (code >> (ebits + mbits)) & 1 ? -value : value;
}

__attribute__((constructor)) static void fill_tables(void) {
  for (unsigned code = 0; code < 256; code++) {
    unsigned low = code & 0x7F;
    small_values[0][code] = low == 0x7F ? NAN : minifloat(code, 4, 3, 7);
    small_values[1][code] = code == 0x80 ? NAN : minifloat(code, 4, 3, 8);
    small_values[2][code] = low > 0x7C ? NAN : low == 0x7C ? (code & 0x80 ? -INFINITY : INFINITY)
                                                           : minifloat(code, 5, 2, 15);
    small_values[3][code] = code == 0x80 ? NAN : minifloat(code, 5, 2, 16);
    small_values[4][code] = code == 255 ? NAN : ldexpf(1.0f, (int)code - 127);
  }
  for (unsigned code = 0; code < 16; code++) fp4_values[code] = minifloat(code, 2, 1, 1);
}

/* ---- decoding: any format, any alignment; `first` counts elements ---- */

INLINE uint64_t read64(const void *p) { uint64_t v; memcpy(&v, p, 8); return v; }
INLINE uint32_t read32(const void *p) { uint32_t v; memcpy(&v, p, 4); return v; }
INLINE uint16_t read16(const void *p) { uint16_t v; memcpy(&v, p, 2); return v; }
INLINE float float_of(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
INLINE double double_of(uint64_t bits) { double v; memcpy(&v, &bits, 8); return v; }
INLINE uint64_t bits_of(double v) { uint64_t b; memcpy(&b, &v, 8); return b; }

INLINE float half_value(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
  /* The half's exponent lands in float32's field 112 too low; the product mends it, subnormals included. */
  float scaled = float_of(magnitude) * 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &scaled, 4);
  bits = magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : bits;
  return float_of(bits | sign);
}

INLINE unsigned nibble(const uint8_t *p, int64_t i) { return (p[i >> 1] >> ((i & 1) * 4)) & 15; }

#define DECODE_LOOP(expression) \
  for (int64_t i = 0; i < n; i++) out[i] = (expression)

#define DECODE_BODY(TYPE)                                                                                     \
  const uint8_t *p = base + (BITS[dtype] == 4 ? 0 : first * (BITS[dtype] / 8));                               \
  switch (dtype) {                                                                                            \
    case F64: DECODE_LOOP((TYPE)double_of(read64(p + 8 * i))); break;                                         \
    case F32: DECODE_LOOP((TYPE)float_of(read32(p + 4 * i))); break;                                          \
    case F16: DECODE_LOOP((TYPE)half_value(read16(p + 2 * i))); break;                                        \
    case BF16: DECODE_LOOP((TYPE)float_of((uint32_t)read16(p + 2 * i) << 16)); break;                         \
    case E4M3FN: case E4M3FNUZ: case E5M2: case E5M2FNUZ: case E8M0:                                          \
      DECODE_LOOP((TYPE)small_values[dtype - E4M3FN][p[i]]); break;                                           \
    case FP4: DECODE_LOOP((TYPE)fp4_values[nibble(p, first + i)]); break;                                     \
    case I64: DECODE_LOOP((TYPE)(int64_t)read64(p + 8 * i)); break;                                           \
    case I32: DECODE_LOOP((TYPE)(int32_t)read32(p + 4 * i)); break;                                           \
    case I16: DECODE_LOOP((TYPE)(int16_t)read16(p + 2 * i)); break;                                           \
    case I8: DECODE_LOOP((TYPE)(int8_t)p[i]); break;                                                          \
    case U64: DECODE_LOOP((TYPE)read64(p + 8 * i)); break;                                                    \
    case U32: DECODE_LOOP((TYPE)read32(p + 4 * i)); break;                                                    \
    case U16: DECODE_LOOP((TYPE)read16(p + 2 * i)); break;                                                    \
    case U8: DECODE_LOOP((TYPE)p[i]); break;                                                                  \
    case BOOL: DECODE_LOOP((TYPE)(p[i] != 0)); break;                                                         \
    case I4: DECODE_LOOP((TYPE)(int)((nibble(p, first + i) ^ 8) - 8u)); break;                                \
    case U4: DECODE_LOOP((TYPE)nibble(p, first + i)); break;                                                  \
    default: DECODE_LOOP((TYPE)NAN); break;                                                                   \
  }

INLINE void decode_double(const uint8_t *base, int dtype, int64_t first, int64_t n, double *out) {
  DECODE_BODY(double)
}

INLINE void decode_float(const uint8_t *base, int dtype, int64_t first, int64_t n, float *out) {
  DECODE_BODY(float)
}

/* A real tensor against a complex one: its imaginary parts are zero. `first` and `n` count reals. */
INLINE void decode_side(const uint8_t *base, int dtype, int widen, int64_t first, int64_t n, double *out) {
  if (!widen) {
    decode_double(base, dtype, first, n, out);
    return;
  }
  double half[BLOCK / 2];
  decode_double(base, dtype, first / 2, (n + 1) / 2, half); /* blocks begin at even places */
  for (int64_t i = 0; i < n; i++) out[i] = i & 1 ? 0.0 : half[i / 2];
}

/* ---- moments, gathered ---- */

typedef struct {
  double n, mean, m2;
} Spread;

/* Chan, Golub and LeVeque: two groups' mean and sum of squares about it, joined. */
INLINE void join_spread(Spread *s, double n, double mean, double m2) {
  if (n == 0) return;
  if (s->n == 0) {
    *s = (Spread){n, mean, m2};
    return;
  }
  double whole = s->n + n, share = n / whole, delta = mean - s->mean;
  s->mean += delta * share;
  s->m2 += m2 + delta * delta * (s->n * share);
  s->n = whole;
}

typedef struct {
  Moments m;
  Spread spread[2];
  uint64_t ulp;    /* greatest distance so far, float formats */
  double ulp_real; /* the same for integer formats */
  double shift;    /* mean of r in the last careful block */
  const uint8_t *data[2];
  int dtype[2], widen[2];
  Format format[2];
  double atol, rtol;
} Pair;

INLINE void note_first(int64_t *place, int64_t at) {
  if (*place < 0 || at < *place) *place = at;
}

/* Positions are rare wants: looked up one by one, in a block that is known to hold them. */
COLD static void find_positions(Pair *s, const double *r, const double *c, int64_t base, int64_t n) {
  Moments *m = &s->m;
  for (int64_t i = 0; i < n; i++) {
    double a = r[i] == s->format[0].sentinel ? -INFINITY : r[i], b = c[i] == s->format[1].sentinel ? -INFINITY : c[i];
    int fa = fabs(a) <= DBL_MAX, fb = fabs(b) <= DBL_MAX;
    int differ = a != b && !(a != a && b != b);
    if (!fa) note_first(&m->nonfinite_at[0], base + i);
    if (!fb) note_first(&m->nonfinite_at[1], base + i);
    if (differ) note_first(&m->first_different_at, base + i);
    if (differ && !(fa && fb)) note_first(&m->one_sided_at, base + i);
  }
}

/* Where the greatest error of a block stands; `most` was found by the lanes over the same float64 values. */
INLINE void find_greatest_error(Pair *s, const double *r, const double *c, int64_t base, int64_t n, double most) {
  if (!(most > s->m.max_abs_e)) return;
  for (int64_t i = 0; i < n; i++) {
    if (fabs(c[i] - r[i]) != most || !(fabs(r[i]) <= DBL_MAX) || !(fabs(c[i]) <= DBL_MAX) ||
        r[i] == s->format[0].sentinel || c[i] == s->format[1].sentinel)
      continue;
    s->m.max_abs_e = most;
    s->m.max_abs_e_at = base + i;
    return;
  }
}

/* 64-bit integers beyond 2^53: differences exactly, in 128 bits, one by one. */
INLINE __int128 integer_at(const uint8_t *base, int dtype, int64_t i) {
  switch (dtype) {
    case I64: return (int64_t)read64(base + 8 * i);
    case U64: return (__int128)read64(base + 8 * i);
    default: {
      double v;
      decode_double(base, dtype, i, 1, &v);
      return (__int128)v;
    }
  }
}

COLD static void exact_integers(Pair *s, int64_t base, int64_t n) {
  Moments *m = &s->m;
  for (int64_t i = base; i < base + n; i++) {
    __int128 ri = integer_at(s->data[0], s->dtype[0], i), ci = integer_at(s->data[1], s->dtype[1], i);
    double r = (double)ri, c = (double)ci, e = (double)(ci - ri), ae = fabs(e), ar = fabs(r);
    double rel = ae == 0 ? 0.0 : ae / ar;
    m->finite++;
    m->sum_r += r;
    m->sum_c += c;
    m->sum_rr += r * r;
    m->sum_cc += c * c;
    m->sum_rc += r * c;
    m->sum_ee += e * e;
    m->sum_abs_e += ae;
    m->sum_rel_e += rel;
    m->max_rel_e = fmax(m->max_rel_e, rel);
    if (ae > m->max_abs_e) {
      m->max_abs_e = ae;
      m->max_abs_e_at = i;
    }
    s->ulp_real = fmax(s->ulp_real, ae);
    if (!(ae <= s->atol + s->rtol * ar)) m->outside++;
    if (ri != ci) {
      m->different++;
      note_first(&m->first_different_at, i);
    }
    double v[2] = {r, c};
    for (int side = 0; side < 2; side++) {
      m->finite_one[side]++;
      m->sum[side] += v[side];
      m->sumsq[side] += v[side] * v[side];
      m->ends[side].min = fmin(m->ends[side].min, v[side]);
      m->ends[side].max = fmax(m->ends[side].max, v[side]);
      join_spread(&s->spread[side], 1, v[side], 0);
    }
  }
}

INLINE int is_wide(int dtype) { return dtype == I64 || dtype == U64; }
INLINE int is_integer(int dtype) { return dtype >= I64; }

INLINE void begin_pair(Pair *s) {
  Moments *m = &s->m;
  m->max_abs_e_at = m->first_different_at = m->one_sided_at = m->nonfinite_at[0] = m->nonfinite_at[1] = -1;
  for (int side = 0; side < 2; side++) {
    m->ends[side].min = INFINITY;
    m->ends[side].max = -INFINITY;
  }
}

INLINE void finish_pair(Pair *s, Moments *out) {
  Moments *m = &s->m;
  for (int side = 0; side < 2; side++) {
    int some = m->finite_one[side] > 0;
    if (!some) m->ends[side].min = m->ends[side].max = NAN;
    m->std[side] = some ? sqrt(fmax(s->spread[side].m2, 0.0) / s->spread[side].n) : NAN;
    if (s->spread[side].m2 != s->spread[side].m2) m->std[side] = NAN; /* fmax drops a NaN */
  }
  m->max_ulp = s->format[1].is_float ? (double)s->ulp : s->ulp_real;
  *out = *m;
}

/* ---- summaries of one tensor ---- */

typedef struct {
  Summary s;
  Spread spread;
  double sumsq, shift, sentinel;
  const uint8_t *data;
  int dtype;
} One;

/* Sixty-four elements share two hashes: one gives each its sign, six bits of the other the XOR of its bucket. */
INLINE uint64_t sketch_signs(uint64_t group) {
  uint64_t z = (group + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
INLINE unsigned sketch_xor(uint64_t signs) { return (unsigned)((signs * 0xD6E8FEB86659FD93ull) >> 58); }

INLINE void finish_summary(One *s, int64_t count, Summary *out) {
  Summary *o = &s->s;
  o->count = count;
  int some = s->spread.n > 0;
  if (!some) o->min = o->max = NAN;
  o->mean = some ? s->spread.mean : NAN;
  o->std = some ? (s->spread.m2 >= 0 ? sqrt(s->spread.m2 / s->spread.n) : s->spread.m2 < 0 ? 0.0 : NAN) : NAN;
  o->l2 = sqrt(s->sumsq);
  *out = *o;
}

/* ---- XXH3, 128 bits, seed 0, written from the published description of the algorithm ---- */

typedef struct { uint64_t low, high; } Hash;

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
  0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
  0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
  0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
  0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
  0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71,
  0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8,
  0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a,
  0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea,
  0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17,
  0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b,
  0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45,
  0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define P64_5 0x27D4EB2F165667C5ull

INLINE Hash wide_product(uint64_t a, uint64_t b) {
  unsigned __int128 p = (unsigned __int128)a * b;
  return (Hash){(uint64_t)p, (uint64_t)(p >> 64)};
}
INLINE uint64_t folded_product(uint64_t a, uint64_t b) {
  Hash p = wide_product(a, b);
  return p.low ^ p.high;
}
INLINE uint64_t avalanche(uint64_t h) {
  h = (h ^ (h >> 37)) * 0x165667919E3779F9ull;
  return h ^ (h >> 32);
}
INLINE uint64_t avalanche_64(uint64_t h) {
  h = (h ^ (h >> 33)) * P64_2;
  h = (h ^ (h >> 29)) * P64_3;
  return h ^ (h >> 32);
}
INLINE uint64_t mix16(const uint8_t *p, const uint8_t *k) {
  return folded_product(read64(p) ^ read64(k), read64(p + 8) ^ read64(k + 8));
}
INLINE void mix32(Hash *a, const uint8_t *p, const uint8_t *q, const uint8_t *k) {
  a->low = (a->low + mix16(p, k)) ^ (read64(q) + read64(q + 8));
  a->high = (a->high + mix16(q, k + 16)) ^ (read64(p) + read64(p + 8));
}

static Hash hash_to_16(const uint8_t *p, size_t n) {
  const uint8_t *k = SECRET;
  if (n > 8) {
    uint64_t flip_low = read64(k + 32) ^ read64(k + 40), flip_high = read64(k + 48) ^ read64(k + 56);
    uint64_t a = read64(p), b = read64(p + n - 8);
    Hash m = wide_product(a ^ b ^ flip_low, P64_1);
    m.low += (uint64_t)(n - 1) << 54;
    b ^= flip_high;
    m.high += b + (uint64_t)(uint32_t)b * (P32_2 - 1);
    m.low ^= __builtin_bswap64(m.high);
    Hash h = wide_product(m.low, P64_2);
    h.high += m.high * P64_2;
    return (Hash){avalanche(h.low), avalanche(h.high)};
  }
  if (n >= 4) {
    uint64_t a = read32(p), b = read32(p + n - 4);
    uint64_t keyed = (a + (b << 32)) ^ (read64(k + 16) ^ read64(k + 24));
    Hash m = wide_product(keyed, P64_1 + ((uint64_t)n << 2));
    m.high += m.low << 1;
    m.low ^= m.high >> 3;
    m.low = (m.low ^ (m.low >> 35)) * 0x9FB21C651E98DF25ull;
    m.low ^= m.low >> 28;
    m.high = avalanche(m.high);
    return m;
  }
  if (n > 0) {
    uint32_t low = ((uint32_t)p[0] << 16) | ((uint32_t)p[n >> 1] << 24) | p[n - 1] | ((uint32_t)n << 8);
    uint32_t swapped = __builtin_bswap32(low), high = (swapped << 13) | (swapped >> 19);
    return (Hash){avalanche_64(low ^ (uint64_t)(read32(k) ^ read32(k + 4))),
                  avalanche_64(high ^ (uint64_t)(read32(k + 8) ^ read32(k + 12)))};
  }
  return (Hash){avalanche_64(read64(k + 64) ^ read64(k + 72)), avalanche_64(read64(k + 80) ^ read64(k + 88))};
}

static Hash finish_mid(Hash a, size_t n) {
  Hash h = {a.low + a.high, a.low * P64_1 + a.high * P64_4 + (uint64_t)n * P64_2};
  return (Hash){avalanche(h.low), 0 - avalanche(h.high)};
}

static Hash hash_to_240(const uint8_t *p, size_t n) {
  const uint8_t *k = SECRET;
  Hash a = {(uint64_t)n * P64_1, 0};
  if (n <= 128) {
    for (size_t i = (n - 1) / 32 + 1; i-- > 0;) mix32(&a, p + 16 * i, p + n - 16 * (i + 1), k + 32 * i);
    return finish_mid(a, n);
  }
  for (size_t i = 0; i < 128; i += 32) mix32(&a, p + i, p + i + 16, k + i);
  a.low = avalanche(a.low);
  a.high = avalanche(a.high);
  for (size_t i = 128; i + 32 <= n; i += 32) mix32(&a, p + i, p + i + 16, k + 3 + i - 128);
  mix32(&a, p + n - 16, p + n - 32, k + 136 - 17 - 16);
  return finish_mid(a, n);
}

static const uint64_t HASH_START[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

INLINE uint64_t merge_sums(const uint64_t *sums, const uint8_t *k, uint64_t start) {
  uint64_t h = start;
  for (int i = 0; i < 4; i++)
    h += folded_product(sums[2 * i] ^ read64(k + 16 * i), sums[2 * i + 1] ^ read64(k + 16 * i + 8));
  return avalanche(h);
}

static Hash finish_long(const uint64_t *sums, size_t n) {
  return (Hash){merge_sums(sums, SECRET + 11, (uint64_t)n * P64_1),
                merge_sums(sums, SECRET + 192 - 64 - 11, ~((uint64_t)n * P64_2))};
}

/* ---- THE FAST PATHS: the end of this file, included once for each instruction set ---- */

#if X86_PATHS

/* What one block of float32 lanes leaves behind. */
typedef struct {
  double x, e, xx, xe, ee, ae, rel; /* sums */
  float max_ae, min_r, max_r;
  int64_t differ, outside;
  uint32_t margin; /* how close an element came to the tolerance, in float32 steps */
  int hits;
  uint16_t hit[BLOCK / 16]; /* where a ULP distance or a relative error could exceed what was seen */
} Sums;

typedef struct {
  float shift, limit, atol, rtol;
} Knobs;

enum { LANES_F32, LANES_BF16, LANES_F16, LANES_DECODED, LANES_NONE };

/* Formats whose every value is a float32. */
INLINE int lane_kind(int dtype) {
  switch (dtype) {
    case F32: return LANES_F32;
    case BF16: return LANES_BF16;
    case F16: return LANES_F16;
    case F64: case I64: case U64: case I32: case U32: return LANES_NONE;
    default: return LANES_DECODED;
  }
}

/* Float32 tests the tolerance a little early (about 4 to 8 steps); what falls within 16 steps is counted again. */
enum { MARGIN_STEPS = 16 };
enum { AHEAD = 512 }; /* bytes; of 0, 512, 1024, 2048 and 3072 the best on Zen 4 for all types together */
#define TOLERANCE_SHADE (1.0 - 0x1p-21)

INLINE int tolerance_fits(double t) { return t == 0.0 || (t >= 1e-30 && t <= 1e30); }

/* A relative error up to this cannot mean more ULPs than were already seen.
 * Between r and c (same sign, as rel < 1) numbers stand at least min(|r|,|c|) * 2^-(mantissa+1) apart, so there are
 * at most rel/(1-rel) * 2^(mantissa+1) steps; rounding r to the candidate's format first may add one. */
COLD static double ulp_limit(const Pair *s) {
  if (!s->format[1].is_float) return INFINITY; /* integers' ULPs are their errors */
  int same = s->dtype[0] == s->dtype[1];
  double steps = (double)s->ulp + (same ? 0.99 : -0.01);
  if (steps <= 0) return 0.0;
  double q = ldexp(steps, -(s->format[1].mantissa + 1)), limit = q / (1.0 + q) * (1.0 - 0x1p-20);
  return limit < 0.98 ? limit : 0.98;
}

COLD static void set_limit(const Pair *s, Knobs *k) {
  double limit = ulp_limit(s);
  k->limit = (float)(limit < s->m.max_rel_e ? limit : s->m.max_rel_e);
}

INLINE double scalar_ordinal(double a, const Format *f) {
  if (a < double_of((uint64_t)(f->emin + 1023) << 52)) return a * double_of((uint64_t)(f->mantissa - f->emin + 1023) << 52);
  return (double)(int64_t)((bits_of(a) >> (52 - f->mantissa)) - ((uint64_t)(f->emin + 1022) << f->mantissa));
}

/* Whether marked elements can hold no news, by the sums of their block alone: the sum of relative errors bounds
 * each; of opposite signs, |r| + |c| = |e| gives the most steps when halved; of equal signs, all the steps lie
 * below the larger, which is at most |e| + |e| / rel. Two steps are added for roundings. */
INLINE int nothing_new(const Pair *s, const Sums *b, const Knobs *k) {
  if (!(b->rel <= s->m.max_rel_e)) return 0;
  if (!s->format[1].is_float) return 1;
  const Format *f = &s->format[1];
  double e = b->max_ae * (1 + 0x1p-22);
  double across = 2 * scalar_ordinal(e / 2, f), along = scalar_ordinal(e + e / k->limit, f);
  return (across > along ? across : along) + 2 <= (double)s->ulp;
}

/* Whether float32 lanes were good enough for this block; see the head of the file. */
INLINE int sums_hold(const Pair *s, const Sums *b, double n, double *spread_r, double *spread_c) {
  if (!(b->ae <= DBL_MAX) || !(b->xx <= DBL_MAX) || !(b->ee <= DBL_MAX)) return 0;
  if (b->min_r <= s->format[0].sentinel) return 0;
  if (!(b->rel <= DBL_MAX) && !(s->m.max_rel_e > DBL_MAX)) return 0;
  if (b->xx < 0x1p-115 && b->min_r != b->max_r) return 0; /* squares may have fallen below float32 */
  if (b->ee < 0x1p-115 && b->max_ae != 0.0f) return 0;
  double yy = b->xx + 2 * b->xe + b->ee, y = b->x + b->e;
  double part = n == BLOCK ? 1.0 / BLOCK : 1.0 / n;
  *spread_r = b->xx - b->x * b->x * part;
  *spread_c = yy - y * y * part;
  if (!(*spread_r >= 0.1 * b->xx)) return 0;
  return *spread_c >= 0.05 * (b->xx + b->ee);
}

INLINE void fold_sums(Pair *s, const Sums *b, Knobs *k, double n, double spread_r, double spread_c) {
  Moments *m = &s->m;
  double shift = k->shift, r = b->x + n * shift, c = r + b->e;
  double rr = b->xx + shift * (2 * b->x + n * shift), re = b->xe + shift * b->e;
  int64_t count = (int64_t)n;
  m->finite += count;
  m->finite_one[0] += count;
  m->finite_one[1] += count;
  m->sum_r += r;
  m->sum_c += c;
  m->sum[0] += r;
  m->sum[1] += c;
  m->sum_rr += rr;
  m->sumsq[0] += rr;
  m->sum_rc += rr + re;
  double cc = rr + 2 * re + b->ee;
  m->sum_cc += cc;
  m->sumsq[1] += cc;
  m->sum_ee += b->ee;
  m->sum_abs_e += b->ae;
  m->sum_rel_e += b->rel;
  if (b->min_r < m->ends[0].min) m->ends[0].min = b->min_r;
  if (b->max_r > m->ends[0].max) m->ends[0].max = b->max_r;
  m->different += b->differ;
  double part = n == BLOCK ? 1.0 / BLOCK : 1.0 / n;
  join_spread(&s->spread[0], n, shift + b->x * part, spread_r);
  join_spread(&s->spread[1], n, shift + (b->x + b->e) * part, spread_c);
  /* A shift that serves is kept: the next block need not wait for this one's sums. */
  if (spread_r < 0.2 * b->xx) k->shift = (float)(shift + b->x * part);
}

/* A pair that is not finite on both sides, alone. */
COLD static void measure_odd(Pair *s, double r, double c, int64_t at) {
  Moments *m = &s->m;
  double v[2] = {r, c};
  int finite[2];
  for (int side = 0; side < 2; side++) {
    if (v[side] == s->format[side].sentinel) v[side] = -INFINITY;
    finite[side] = fabs(v[side]) <= DBL_MAX;
    if (finite[side]) {
      m->finite_one[side]++;
      m->sum[side] += v[side];
      m->sumsq[side] += v[side] * v[side];
      m->ends[side].min = fmin(m->ends[side].min, v[side]);
      m->ends[side].max = fmax(m->ends[side].max, v[side]);
      join_spread(&s->spread[side], 1, v[side], 0);
      continue;
    }
    note_first(&m->nonfinite_at[side], at);
    if (v[side] != v[side]) m->nan[side]++;
    else if (v[side] > 0) m->pos_inf[side]++;
    else m->neg_inf[side]++;
  }
  if (v[0] != v[1] && !(v[0] != v[0] && v[1] != v[1])) {
    m->different++;
    m->one_sided++;
    m->outside++;
    note_first(&m->first_different_at, at);
    note_first(&m->one_sided_at, at);
  }
}

#endif /* X86_PATHS */

/* Vector code must be compiled as a whole for its instruction set (gcc lowers vectors before it inlines), so each
 * function below exists once per set, told apart by a suffix. */
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(name) PASTE(name, SUFFIX)
#define vd NAME(vd)
#define vl NAME(vl)
#define vu NAME(vu)
#define lanes NAME(lanes)
#define lanes_l NAME(lanes_l)
#define lanes_u NAME(lanes_u)
#define iota NAME(iota)
#define pick NAME(pick)
#define keep NAME(keep)
#define magnitude NAME(magnitude)
#define load_lanes_d NAME(load_lanes_d)
#define total NAME(total)
#define total_l NAME(total_l)
#define greatest NAME(greatest)
#define least NAME(least)
#define greatest_u NAME(greatest_u)
#define ordinal NAME(ordinal)
#define ulp_lanes NAME(ulp_lanes)
#define careful_pair NAME(careful_pair)
#define careful_block NAME(careful_block)
#define careful_summary NAME(careful_summary)
#define careful_summary_block NAME(careful_summary_block)
#define load_bits NAME(load_bits)
#define load_lanes NAME(load_lanes)
#define sum_lanes NAME(sum_lanes)
#define max_lane NAME(max_lane)
#define min_lane NAME(min_lane)
#define fold_bits NAME(fold_bits)
#define count_lanes NAME(count_lanes)
#define least_lane NAME(least_lane)
#define sum_block NAME(sum_block)
#define sum_kinds NAME(sum_kinds)
#define extremes NAME(extremes)
#define ulp_distance NAME(ulp_distance)
#define visit_hits NAME(visit_hits)
#define patch_block NAME(patch_block)
#define finish_block NAME(finish_block)
#define ask_again NAME(ask_again)
#define fast_block NAME(fast_block)
#define pair NAME(pair)
#define summary NAME(summary)
#define summary_block NAME(summary_block)
#define summary_kinds NAME(summary_kinds)
#define stripe NAME(stripe)
#define scramble NAME(scramble)
#define hash_long NAME(hash_long)
#define read_two NAME(read_two)

#define DRIFTLINE_BODY 1
#define SUFFIX _generic
#define TARGET
#define WIDTH 0
#define LANES 2
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("no-tree-slp-vectorize") /* gcc 12 breaks down over two-lane code otherwise */
#endif
#include "kernel.c"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
#if X86_PATHS
#undef SUFFIX
#undef TARGET
#undef WIDTH
#undef LANES
#define SUFFIX _avx2
#define TARGET __attribute__((target("avx2,fma,f16c,popcnt")))
#define WIDTH 8
#define LANES 4
#include "kernel.c"
#undef SUFFIX
#undef TARGET
#undef WIDTH
#undef LANES
#define SUFFIX _avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")))
#define WIDTH 16
#define LANES 8
#include "kernel.c"
#endif
#undef DRIFTLINE_BODY
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
  switch (path) {
#if X86_PATHS
    case PATH_AVX512: pair_avx512(&s, count); break;
    case PATH_AVX2: pair_avx2(&s, count); break;
#endif
    default: pair_generic(&s, count); break;
  }
  finish_pair(&s, out);
  restore_floats(mode);
}

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

/* Benchmark only: the floor that the kernels are measured against. */
EXPORT uint64_t driftline_read_two(const void *a, const void *b, int64_t bytes, int path) {
#if X86_PATHS
  if (path == PATH_AVX512) return read_two_avx512(a, b, bytes);
  if (path == PATH_AVX2) return read_two_avx2(a, b, bytes);
#endif
  (void)path;
  return read_two_generic(a, b, bytes);
}

/* Sixteen bytes, most significant first, as the xxhash package's `digest()` gives them. */
EXPORT void driftline_digest(const void *data, int64_t bytes, int path, uint8_t *out) {
  Hash h = digest(data, (size_t)bytes, path);
  for (int i = 0; i < 8; i++) {
    out[i] = (uint8_t)(h.high >> (56 - 8 * i));
    out[8 + i] = (uint8_t)(h.low >> (56 - 8 * i));
  }
}

#else /* DRIFTLINE_BODY: everything below exists once per instruction set */

#undef LANE_FN
#define LANE_FN static inline __attribute__((always_inline)) TARGET

/* ---- lanes ---- */

typedef double vd __attribute__((vector_size(8 * LANES)));
typedef int64_t vl __attribute__((vector_size(8 * LANES)));
typedef uint64_t vu __attribute__((vector_size(8 * LANES)));

LANE_FN vd lanes(double v) { vd o = {0}; for (int i = 0; i < LANES; i++) o[i] = v; return o; }
LANE_FN vl lanes_l(int64_t v) { vl o = {0}; for (int i = 0; i < LANES; i++) o[i] = v; return o; }
LANE_FN vu lanes_u(uint64_t v) { vu o = {0}; for (int i = 0; i < LANES; i++) o[i] = v; return o; }
LANE_FN vl iota(void) { vl o = {0}; for (int i = 0; i < LANES; i++) o[i] = i; return o; }
LANE_FN vd pick(vl mask, vd yes, vd no) { return (vd)(((vl)yes & mask) | ((vl)no & ~mask)); }
LANE_FN vd keep(vl mask, vd v) { return (vd)((vl)v & mask); }
LANE_FN vd magnitude(vd v) { return (vd)((vl)v & lanes_l(INT64_MAX)); }
LANE_FN vd load_lanes_d(const double *p) { vd v; memcpy(&v, p, sizeof v); return v; }

LANE_FN double total(vd v) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
LANE_FN int64_t total_l(vl v) {
  int64_t sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
LANE_FN double greatest(vd v) {
  double best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}
LANE_FN double least(vd v) {
  double best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] < best ? v[i] : best;
  return best;
}
LANE_FN uint64_t greatest_u(vu v) {
  uint64_t best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}
#undef MAXV
#undef MINV
#if WIDTH == 16
#define MAXV(a, b) ((vd)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
#define MINV(a, b) ((vd)_mm512_min_pd((__m512d)(a), (__m512d)(b)))
#elif WIDTH == 8
#define MAXV(a, b) ((vd)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#define MINV(a, b) ((vd)_mm256_min_pd((__m256d)(a), (__m256d)(b)))
#else
#define MAXV(a, b) pick((a) < (b), (b), (a))
#define MINV(a, b) pick((b) < (a), (b), (a))
#endif

/* Where a magnitude stands in a format's list of numbers, after rounding to nearest even. */
LANE_FN vu ordinal(vd a, const Format *f) {
  if (f->mantissa == 52) return (vu)a;
  int shift = 52 - f->mantissa;
  vu bits = (vu)a;
  /* Without mantissa bits the significand is 1 or 2, and a tie goes to the even one: up. */
  vu odd = f->mantissa ? (bits >> shift) & 1 : lanes_u(1);
  vu rounded = bits + lanes_u((1ull << (shift - 1)) - 1) + odd;
  vu normal = (rounded >> shift) - lanes_u((uint64_t)(f->emin + 1022) << f->mantissa);
  vd scaled = a * lanes(double_of((uint64_t)(f->mantissa - f->emin + 1023) << 52)) + lanes(0x1p52);
  vu small = (vu)scaled - lanes_u(0x4330000000000000ull);
  vl below = a < lanes(double_of((uint64_t)(f->emin + 1023) << 52));
  vu place = (vu)(((vl)small & below) | ((vl)normal & ~below));
  vl past = (vl)(place > lanes_u(f->top));
  return (vu)(((vl)lanes_u(f->top) & past) | ((vl)place & ~past));
}

LANE_FN vu ulp_lanes(vd r, vd c, const Format *f) {
  vu a = ordinal(magnitude(r), f), b = ordinal(magnitude(c), f);
  vl opposite = ((vl)r ^ (vl)c) < 0;
  vl less = (vl)(a < b);
  vu apart = (vu)(((vl)(b - a) & less) | ((vl)(a - b) & ~less));
  return (vu)(((vl)(a + b) & opposite) | ((vl)apart & ~opposite));
}

/* One block of both sides in float64. Arrays hold a multiple of eight; what is past n is masked. */
LANE_FN void careful_pair(Pair *s, const double *r_in, const double *c_in, int64_t base, int64_t n) {
  const vd zero = lanes(0.0), inf = lanes(INFINITY), top = lanes(DBL_MAX);
  const vd sr = lanes(s->format[0].sentinel), sc = lanes(s->format[1].sentinel);
  const vd atol = lanes(s->atol), rtol = lanes(s->rtol);
  vd own_r = zero, own_c = zero, own_rr = zero, own_cc = zero;
  vd jr = zero, jc = zero, jrr = zero, jcc = zero, jrc = zero, jee = zero, jae = zero, jrel = zero;
  vd max_e = zero, max_rel = zero, rmin = inf, rmax = -inf, cmin = inf, cmax = -inf, far = zero;
  vl nr = {0}, nc = {0}, nj = {0}, nan_r = {0}, nan_c = {0}, pos_r = {0}, pos_c = {0}, neg_r = {0}, neg_c = {0};
  vl differ_n = {0}, sided_n = {0}, outside_n = {0};
  vu ulp = {0};
  Format f = s->format[1];

  for (int64_t i = 0; i < n; i += LANES) {
    vl valid = iota() < lanes_l(n - i);
    vd r = load_lanes_d(r_in + i), c = load_lanes_d(c_in + i);
    r = pick(r == sr, -inf, r);
    c = pick(c == sc, -inf, c);
    vl fr = (magnitude(r) <= top) & valid, fc = (magnitude(c) <= top) & valid, both = fr & fc;
    vl isnan_r = r != r, isnan_c = c != c;
    nan_r -= isnan_r & valid;
    nan_c -= isnan_c & valid;
    pos_r -= (r == inf) & valid;
    pos_c -= (c == inf) & valid;
    neg_r -= (r == -inf) & valid;
    neg_c -= (c == -inf) & valid;
    nr -= fr;
    nc -= fc;
    nj -= both;
    vd r1 = keep(fr, r), c1 = keep(fc, c);
    own_r += r1;
    own_c += c1;
    own_rr += r1 * r1;
    own_cc += c1 * c1;
    rmin = MINV(rmin, pick(fr, r, inf));
    rmax = MAXV(rmax, pick(fr, r, -inf));
    cmin = MINV(cmin, pick(fc, c, inf));
    cmax = MAXV(cmax, pick(fc, c, -inf));
    vd rj = keep(both, r), cj = keep(both, c), e = cj - rj, ae = magnitude(e), ar = magnitude(rj);
    jr += rj;
    jc += cj;
    jrr += rj * rj;
    jcc += cj * cj;
    jrc += rj * cj;
    jee += e * e;
    jae += ae;
    vd rel = keep(ae != zero, ae / ar);
    jrel += rel;
    max_e = MAXV(max_e, ae);
    max_rel = MAXV(max_rel, rel);
    vl differ = (r != c) & ~(isnan_r & isnan_c) & valid, sided = differ & ~both;
    differ_n -= differ;
    sided_n -= sided;
    outside_n -= (both & ~(ae <= atol + rtol * ar)) | sided;
    if (f.is_float) {
      vu d = ulp_lanes(rj, cj, &f);
      vl more = (vl)(ulp < d);
      ulp = (vu)(((vl)d & more) | ((vl)ulp & ~more));
    } else {
      /* To the nearest integer, ties to even; what has no fraction bits left is one already. */
      vd bump = lanes(0x1p52), whole = (ar + bump) - bump;
      whole = pick(ar >= bump, ar, whole);
      whole = (vd)((vl)whole | ((vl)rj & lanes_l(INT64_MIN)));
      far = MAXV(far, magnitude(cj - whole));
    }
  }

  Moments *m = &s->m;
  double count[2] = {(double)total_l(nr), (double)total_l(nc)}, sums[2] = {total(own_r), total(own_c)};
  for (int side = 0; side < 2; side++) {
    if (count[side] == 0) continue;
    const double *x = side ? c_in : r_in;
    vd mean = lanes(sums[side] / count[side]), m2 = zero, drift = zero, sentinel = side ? sc : sr;
    for (int64_t i = 0; i < n; i += LANES) {
      vd v = load_lanes_d(x + i);
      vl ok = (iota() < lanes_l(n - i)) & (magnitude(v) <= top) & (v != sentinel);
      vd d = keep(ok, v - mean);
      m2 += d * d;
      drift += d;
    }
    double slip = total(drift); /* what rounding left in the mean: part of the sum of squares about it */
    join_spread(&s->spread[side], count[side], mean[0] + slip / count[side], total(m2) - slip * slip / count[side]);
  }
  if (count[0] > 0) s->shift = sums[0] / count[0];
  int64_t new_differ = total_l(differ_n), joint = total_l(nj);
  m->finite += joint;
  m->finite_one[0] += (int64_t)count[0];
  m->finite_one[1] += (int64_t)count[1];
  m->nan[0] += total_l(nan_r);
  m->nan[1] += total_l(nan_c);
  m->pos_inf[0] += total_l(pos_r);
  m->pos_inf[1] += total_l(pos_c);
  m->neg_inf[0] += total_l(neg_r);
  m->neg_inf[1] += total_l(neg_c);
  m->different += new_differ;
  m->one_sided += total_l(sided_n);
  m->outside += total_l(outside_n);
  m->sum_r += total(jr);
  m->sum_c += total(jc);
  m->sum_rr += total(jrr);
  m->sum_cc += total(jcc);
  m->sum_rc += total(jrc);
  m->sum_ee += total(jee);
  m->sum_abs_e += total(jae);
  m->sum_rel_e += total(jrel);
  m->sum[0] += sums[0];
  m->sum[1] += sums[1];
  m->sumsq[0] += total(own_rr);
  m->sumsq[1] += total(own_cc);
  m->ends[0].min = fmin(m->ends[0].min, least(rmin));
  m->ends[0].max = fmax(m->ends[0].max, greatest(rmax));
  m->ends[1].min = fmin(m->ends[1].min, least(cmin));
  m->ends[1].max = fmax(m->ends[1].max, greatest(cmax));
  m->max_rel_e = fmax(m->max_rel_e, greatest(max_rel));
  uint64_t u = greatest_u(ulp);
  if (u > s->ulp) s->ulp = u;
  s->ulp_real = fmax(s->ulp_real, greatest(far));
  find_greatest_error(s, r_in, c_in, base, n, greatest(max_e));
  int odd_r = count[0] != (double)n, odd_c = count[1] != (double)n;
  if ((new_differ && m->first_different_at < 0) || (odd_r && m->nonfinite_at[0] < 0) ||
      (odd_c && m->nonfinite_at[1] < 0) || (m->one_sided && m->one_sided_at < 0))
    find_positions(s, r_in, c_in, base, n);
}

TARGET static void careful_block(Pair *s, int64_t base, int64_t n) {
  double r[BLOCK] __attribute__((aligned(64))), c[BLOCK] __attribute__((aligned(64)));
  int64_t whole = (n + 7) & ~(int64_t)7;
  for (int64_t i = n; i < whole; i++) r[i] = c[i] = 0.0;
  decode_side(s->data[0], s->dtype[0], s->widen[0], base, n, r);
  decode_side(s->data[1], s->dtype[1], s->widen[1], base, n, c);
  if ((is_wide(s->dtype[0]) || is_wide(s->dtype[1])) && is_integer(s->dtype[0]) && is_integer(s->dtype[1]) &&
      !s->widen[0] && !s->widen[1]) {
    double widest = 0;
    for (int64_t i = 0; i < n; i++) widest = fmax(widest, fmax(fabs(r[i]), fabs(c[i])));
    if (widest >= 0x1p52) {
      exact_integers(s, base, n);
      return;
    }
  }
  careful_pair(s, r, c, base, n);
}

/* One block in float64; the array holds a multiple of 64, zeros past n. `base` is a multiple of 64. */
LANE_FN void careful_summary(One *s, double *x, int64_t base, int64_t n) {
  const vd zero = lanes(0.0), inf = lanes(INFINITY), top = lanes(DBL_MAX), sentinel = lanes(s->sentinel);
  vd sum = zero, squares = zero, low = inf, high = -inf, m2 = zero, drift = zero;
  vl finite = {0}, zeros = {0}, nans = {0}, pos = {0}, neg = {0};
  for (int64_t i = 0; i < n; i += LANES) {
    vl valid = iota() < lanes_l(n - i);
    vd v = load_lanes_d(x + i);
    v = pick(v == sentinel, -inf, v);
    vl ok = (magnitude(v) <= top) & valid;
    nans -= (v != v) & valid;
    pos -= (v == inf) & valid;
    neg -= (v == -inf) & valid;
    zeros -= (v == zero) & valid;
    finite -= ok;
    low = MINV(low, pick(ok, v, inf));
    high = MAXV(high, pick(ok, v, -inf));
    v = keep(ok, v);
    sum += v;
    squares += v * v;
    memcpy(x + i, &v, sizeof v);
  }
  int64_t ok_n = total_l(finite), odd = n - ok_n;
  Summary *o = &s->s;
  if (ok_n) {
    vd mean = lanes(total(sum) / (double)ok_n);
    for (int64_t i = 0; i < n; i += LANES) {
      vd d = keep(iota() < lanes_l(n - i), load_lanes_d(x + i) - mean);
      m2 += d * d;
      drift += d;
    }
    double slip = total(drift), about = total(m2);
    if (odd) { /* masked elements were counted as zeros; take them out again */
      about -= (double)odd * mean[0] * mean[0];
      slip += (double)odd * mean[0];
      if (about < 1e-6 * (double)odd * mean[0] * mean[0] || !(about >= 0)) { /* too much was taken out to trust */
        about = slip = 0;
        double raw[BLOCK];
        decode_double(s->data, s->dtype, base, n, raw);
        for (int64_t i = 0; i < n; i++)
          if (fabs(raw[i]) <= DBL_MAX && raw[i] != s->sentinel) {
            about += (raw[i] - mean[0]) * (raw[i] - mean[0]);
            slip += raw[i] - mean[0];
          }
      }
    }
    join_spread(&s->spread, (double)ok_n, mean[0] + slip / (double)ok_n, about - slip * slip / (double)ok_n);
    s->shift = mean[0];
  }
  o->nan += total_l(nans);
  o->pos_inf += total_l(pos);
  o->neg_inf += total_l(neg);
  o->zeros += total_l(zeros);
  o->min = fmin(o->min, least(low));
  o->max = fmax(o->max, greatest(high));
  s->sumsq += total(squares);
  for (int64_t i = 0; i < n; i += BUCKETS) {
    uint64_t signs = sketch_signs((uint64_t)(base + i) / BUCKETS);
    unsigned flip = sketch_xor(signs);
    for (int j = 0; j < BUCKETS; j += LANES) {
      vu turn = ((lanes_u(signs >> j) >> (vu)iota()) & 1) << 63;
      vu v = (vu)load_lanes_d(x + i + j) ^ turn;
      memcpy(x + i + j, &v, sizeof v);
    }
    for (unsigned j = 0; j < BUCKETS; j += 2) { /* pairs: they move together, perhaps changing places */
      double *to = o->sketch + (j ^ (flip & 62));
      const double *from = x + i + j;
      to[0] += from[flip & 1];
      to[1] += from[~flip & 1];
    }
  }
}

TARGET static void careful_summary_block(One *s, int64_t base, int64_t n) {
  double x[BLOCK] __attribute__((aligned(64)));
  decode_double(s->data, s->dtype, base, n, x);
  int64_t whole = (n + BUCKETS - 1) / BUCKETS * BUCKETS;
  for (int64_t i = n; i < whole; i++) x[i] = 0.0;
  careful_summary(s, x, base, n);
}

#if WIDTH == 0
static void pair(Pair *s, int64_t count) {
  for (int64_t i = 0; i < count; i += BLOCK) careful_block(s, i, count - i < BLOCK ? count - i : BLOCK);
}

static void summary(One *s, int64_t count) {
  for (int64_t i = 0; i < count; i += BLOCK) careful_summary_block(s, i, count - i < BLOCK ? count - i : BLOCK);
}

LANE_FN void stripe(uint64_t *sums, const uint8_t *p, const uint8_t *key) {
  uint64_t data[8], keyed[8];
  for (int i = 0; i < 8; i++) {
    data[i] = read64(p + 8 * i);
    keyed[i] = data[i] ^ read64(key + 8 * i);
  }
  for (int i = 0; i < 8; i++) sums[i] += data[i ^ 1] + (uint64_t)(uint32_t)keyed[i] * (keyed[i] >> 32);
}

LANE_FN void scramble(uint64_t *sums, const uint8_t *key) {
  for (int i = 0; i < 8; i++) sums[i] = (sums[i] ^ (sums[i] >> 47) ^ read64(key + 8 * i)) * P32_1;
}

static void hash_long(const uint8_t *p, size_t n, uint64_t *sums) {
  memcpy(sums, HASH_START, sizeof HASH_START);
  size_t blocks = (n - 1) / 1024;
  for (size_t b = 0; b < blocks; b++, p += 1024) {
    for (size_t i = 0; i < 16; i++) stripe(sums, p + 64 * i, SECRET + 8 * i);
    scramble(sums, SECRET + 128);
  }
  size_t rest = n - blocks * 1024, stripes = (rest - 1) / 64;
  for (size_t i = 0; i < stripes; i++) stripe(sums, p + 64 * i, SECRET + 8 * i);
  stripe(sums, p + rest - 64, SECRET + 192 - 64 - 7);
}

static uint64_t read_two(const uint8_t *a, const uint8_t *b, int64_t bytes) {
  uint64_t sums[4] = {0};
  for (int64_t i = 0; i + 32 <= bytes; i += 32)
    for (int j = 0; j < 4; j++) sums[j] += read64(a + i + 8 * j) + read64(b + i + 8 * j);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

#else /* vectors of float32 */

#undef VF
#undef VI
#undef OP
#undef OPI
#if WIDTH == 16
#define VF __m512
#define VI __m512i
#define OP(name) _mm512_##name
#else
#define VF __m256
#define VI __m256i
#define OP(name) _mm256_##name
#endif

#undef AS_FLOAT
#undef AS_BITS
#undef AND_BITS
#undef ABS
#if WIDTH == 16
#define AS_FLOAT(v) _mm512_castsi512_ps(v)
#define AS_BITS(v) _mm512_castps_si512(v)
#define AND_BITS(a, b) _mm512_and_si512(a, b)
#define ABS(v) _mm512_abs_ps(v)
#else
#define AS_FLOAT(v) _mm256_castsi256_ps(v)
#define AS_BITS(v) _mm256_castps_si256(v)
#define AND_BITS(a, b) _mm256_and_si256(a, b)
#define ABS(v) _mm256_and_ps(v, AS_FLOAT(_mm256_set1_epi32(0x7FFFFFFF)))
#endif

LANE_FN VI load_bits(const uint8_t *p) {
#if WIDTH == 16
  return _mm512_loadu_si512(p);
#else
  return _mm256_loadu_si256((const __m256i *)p);
#endif
}

/* WIDTH elements in their own order. */
LANE_FN VF load_lanes(const uint8_t *p, int kind) {
  if (kind == LANES_F32) return AS_FLOAT(load_bits(p));
#if WIDTH == 16
  __m256i half = _mm256_loadu_si256((const __m256i *)p);
#else
  __m128i half = _mm_loadu_si128((const __m128i *)p);
#endif
  if (kind == LANES_F16) return OP(cvtph_ps)(half);
  return AS_FLOAT(OP(slli_epi32)(OP(cvtepu16_epi32)(half), 16));
}

/* Sums of lanes in float64, so that a fold costs no digits. */
LANE_FN double sum_lanes(VF v) {
#if WIDTH == 16
  __m512d wide = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
  __m256d d = _mm256_add_pd(_mm512_castpd512_pd256(wide), _mm512_extractf64x4_pd(wide, 1));
#else
  __m256d d = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
#endif
  __m128d q = _mm_add_pd(_mm256_castpd256_pd128(d), _mm256_extractf128_pd(d, 1));
  return _mm_cvtsd_f64(_mm_add_sd(q, _mm_unpackhi_pd(q, q)));
}

LANE_FN float max_lane(VF v) {
#if WIDTH == 16
  __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  __m256 h = v;
#endif
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

LANE_FN float min_lane(VF v) {
#if WIDTH == 16
  __m256 h = _mm256_min_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  __m256 h = v;
#endif
  __m128 q = _mm_min_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_min_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_min_ss(q, _mm_movehdup_ps(q)));
}

LANE_FN __m128i fold_bits(VI v, int least) {
#if WIDTH == 16
  __m256i a = _mm512_castsi512_si256(v), b = _mm512_extracti64x4_epi64(v, 1);
  __m256i h = least ? _mm256_min_epu32(a, b) : _mm256_add_epi32(a, b);
#else
  __m256i h = v;
#endif
  __m128i c = _mm256_castsi256_si128(h), d = _mm256_extracti128_si256(h, 1);
  __m128i q = least ? _mm_min_epu32(c, d) : _mm_add_epi32(c, d);
  __m128i turned = _mm_shuffle_epi32(q, 0x4E);
  q = least ? _mm_min_epu32(q, turned) : _mm_add_epi32(q, turned);
  turned = _mm_shuffle_epi32(q, 0xB1);
  return least ? _mm_min_epu32(q, turned) : _mm_add_epi32(q, turned);
}

LANE_FN int64_t count_lanes(VI v) { return _mm_cvtsi128_si32(fold_bits(v, 0)); }
LANE_FN uint32_t least_lane(VI v) { return (uint32_t)_mm_cvtsi128_si32(fold_bits(v, 1)); }

/* The inner loop. n is a multiple of 2 * WIDTH; kinds and `tolerant` are constants where it is inlined. */
LANE_FN void sum_block(const uint8_t *r_at, const uint8_t *c_at, int64_t n, int r_kind, int c_kind, int tolerant,
                       int shifted, const Knobs *k, Sums *out) {
  const VF zero = OP(setzero_ps)(), shift = OP(set1_ps)(k->shift), limit = OP(set1_ps)(k->limit);
  const VF atol = OP(set1_ps)(k->atol), rtol = OP(set1_ps)(k->rtol);
  VF sx = zero, se = zero, sxx = zero, sxe = zero, see = zero, sae = zero, srel = zero;
  VF max_ae = zero, min_r = OP(set1_ps)(INFINITY), max_r = OP(set1_ps)(-INFINITY);
  VI margin = OP(set1_epi32)(-1);
  int64_t equal = 0, outside = 0; /* counted on the scalar side, which has time and registers */
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  int hits = 0;
  for (int64_t i = 0; i < n; i += 2 * WIDTH) {
    VF rs[2], cs[2];
    if (r_kind == LANES_BF16 && c_kind == LANES_BF16) {
      /* The odd elements of a word first, then the even ones: no lane has to move, and sums do not mind. */
      const VI upper = OP(set1_epi32)((int)0xFFFF0000u);
      VI r = load_bits(r_at + 2 * i), c = load_bits(c_at + 2 * i);
      rs[0] = AS_FLOAT(OP(slli_epi32)(r, 16));
      cs[0] = AS_FLOAT(OP(slli_epi32)(c, 16));
      rs[1] = AS_FLOAT(AND_BITS(r, upper));
      cs[1] = AS_FLOAT(AND_BITS(c, upper));
    } else {
      rs[0] = load_lanes(r_at + r_size * i, r_kind);
      rs[1] = load_lanes(r_at + r_size * (i + WIDTH), r_kind);
      cs[0] = load_lanes(c_at + c_size * i, c_kind);
      cs[1] = load_lanes(c_at + c_size * (i + WIDTH), c_kind);
    }
    for (int line = 0; line < 2 * WIDTH * r_size; line += 64)
      _mm_prefetch((const char *)(r_at + r_size * i + line + AHEAD), _MM_HINT_T0);
    for (int line = 0; line < 2 * WIDTH * c_size; line += 64)
      _mm_prefetch((const char *)(c_at + c_size * i + line + AHEAD), _MM_HINT_T0);
    unsigned hit = 0;
    for (int half = 0; half < 2; half++) {
      VF r = rs[half], c = cs[half];
      VF e = OP(sub_ps)(c, r), x = shifted ? OP(sub_ps)(r, shift) : r, ae = ABS(e), ar = ABS(r);
      sx = OP(add_ps)(sx, x);
      se = OP(add_ps)(se, e);
      sae = OP(add_ps)(sae, ae);
      sxx = OP(fmadd_ps)(x, x, sxx);
      sxe = OP(fmadd_ps)(x, e, sxe);
      see = OP(fmadd_ps)(e, e, see);
      min_r = OP(min_ps)(min_r, r);
      max_r = OP(max_ps)(max_r, r);
      max_ae = OP(max_ps)(max_ae, ae);
#if WIDTH == 16
      __mmask16 apart = _mm512_cmp_ps_mask(e, zero, _CMP_NEQ_UQ);
      VF rel = _mm512_maskz_div_ps(apart, ae, ar);
      equal += __builtin_popcount(0xFFFF & ~(unsigned)apart);
#else
      VF same = _mm256_cmp_ps(e, zero, _CMP_EQ_OQ);
      VF rel = _mm256_andnot_ps(same, _mm256_div_ps(ae, ar));
      equal += __builtin_popcount((unsigned)_mm256_movemask_ps(same));
#endif
      srel = OP(add_ps)(srel, rel);
      if (tolerant) {
        VF allowed = OP(fmadd_ps)(rtol, ar, atol);
        VI past = OP(sub_epi32)(AS_BITS(ae), AS_BITS(allowed));
        /* Where the two sides are equal there is no margin to speak of. */
#if WIDTH == 16
        outside += __builtin_popcount(_mm512_cmp_ps_mask(ae, allowed, _CMP_GT_OQ));
        margin = _mm512_mask_min_epu32(margin, apart, margin, past);
#else
        outside += __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(ae, allowed, _CMP_GT_OQ)));
        margin = _mm256_min_epu32(margin, _mm256_or_si256(past, AS_BITS(same)));
#endif
      }
#if WIDTH == 16
      hit |= _mm512_cmp_ps_mask(rel, limit, _CMP_GT_OQ);
#else
      hit |= (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(rel, limit, _CMP_GT_OQ));
#endif
    }
    /* Written always, kept sometimes: no branch to mispredict. */
    out->hit[hits] = (uint16_t)i;
    hits += hit != 0;
  }
  out->x = sum_lanes(sx);
  out->e = sum_lanes(se);
  out->xx = sum_lanes(sxx);
  out->xe = sum_lanes(sxe);
  out->ee = sum_lanes(see);
  out->ae = sum_lanes(sae);
  out->rel = sum_lanes(srel);
  out->max_ae = max_lane(max_ae);
  out->min_r = min_lane(min_r);
  out->max_r = max_lane(max_r);
  out->differ = n - equal;
  out->outside = outside;
  out->margin = tolerant ? least_lane(margin) : UINT32_MAX;
  out->hits = hits;
}

#undef CASE
#define CASE(r_kind, c_kind)                                                        \
  case r_kind * 3 + c_kind:                                                         \
    if (tolerant) {                                                                 \
      if (k->shift != 0.0f) sum_block(r, c, n, r_kind, c_kind, 1, 1, k, out);       \
      else sum_block(r, c, n, r_kind, c_kind, 1, 0, k, out);                        \
    } else {                                                                        \
      if (k->shift != 0.0f) sum_block(r, c, n, r_kind, c_kind, 0, 1, k, out);       \
      else sum_block(r, c, n, r_kind, c_kind, 0, 0, k, out);                        \
    }                                                                               \
    break
#undef RARE_CASE
#define RARE_CASE(r_kind, c_kind)                                                   \
  case r_kind * 3 + c_kind:                                                         \
    if (tolerant) sum_block(r, c, n, r_kind, c_kind, 1, 1, k, out);                 \
    else sum_block(r, c, n, r_kind, c_kind, 0, 1, k, out);                          \
    break

TARGET static void sum_kinds(const uint8_t *r, const uint8_t *c, int64_t n, int r_kind, int c_kind, int tolerant,
                             const Knobs *k, Sums *out) {
  switch (r_kind * 3 + c_kind) {
    CASE(LANES_F32, LANES_F32);
    CASE(LANES_F32, LANES_BF16);
    CASE(LANES_F32, LANES_F16);
    CASE(LANES_BF16, LANES_BF16);
    CASE(LANES_F16, LANES_F16);
    RARE_CASE(LANES_BF16, LANES_F32);
    RARE_CASE(LANES_BF16, LANES_F16);
    RARE_CASE(LANES_F16, LANES_F32);
    RARE_CASE(LANES_F16, LANES_BF16);
  }
}

/* The candidate's extremes; wanted only when the reference's and the greatest error cannot rule out new ones. */
LANE_FN void extremes(const uint8_t *p, int64_t n, int kind, double *low, double *high) {
  VF lo = OP(set1_ps)(INFINITY), hi = OP(set1_ps)(-INFINITY);
  const int size = kind == LANES_F32 ? 4 : 2;
  for (int64_t i = 0; i < n; i += WIDTH) {
    VF v = load_lanes(p + size * i, kind);
    lo = OP(min_ps)(lo, v);
    hi = OP(max_ps)(hi, v);
  }
  *low = min_lane(lo);
  *high = max_lane(hi);
}

LANE_FN VI ulp_distance(VF r, VF c, int dtype) {
  const VI magnitude_bits = OP(set1_epi32)(0x7FFFFFFF);
  VI a = AND_BITS(AS_BITS(r), magnitude_bits), b = AND_BITS(AS_BITS(c), magnitude_bits);
  if (dtype == BF16) {
    VI odd = AND_BITS(OP(srli_epi32)(a, 16), OP(set1_epi32)(1));
    a = OP(srli_epi32)(OP(add_epi32)(a, OP(add_epi32)(odd, OP(set1_epi32)(0x7FFF))), 16);
    b = OP(srli_epi32)(b, 16);
  } else if (dtype == F16) {
    a = OP(cvtepu16_epi32)(OP(cvtps_ph)(AS_FLOAT(a), _MM_FROUND_TO_NEAREST_INT));
    b = OP(cvtepu16_epi32)(OP(cvtps_ph)(AS_FLOAT(b), _MM_FROUND_TO_NEAREST_INT));
  }
  VI apart = OP(sub_epi32)(OP(max_epu32)(a, b), OP(min_epu32)(a, b)), across = OP(add_epi32)(a, b);
#if WIDTH == 16
  __mmask16 opposite = _mm512_movepi32_mask(_mm512_xor_si512(AS_BITS(r), AS_BITS(c)));
  return _mm512_mask_mov_epi32(apart, opposite, across);
#else
  return AS_BITS(_mm256_blendv_ps(AS_FLOAT(apart), AS_FLOAT(across), _mm256_xor_ps(r, c)));
#endif
}

/* The ULP distances and relative errors in the places that were marked. */
TARGET static void visit_hits(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, const Sums *b) {
  int dtype = s->dtype[1], direct = dtype == F32 || dtype == BF16 || dtype == F16;
  const VF zero = OP(setzero_ps)();
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  VI far = OP(set1_epi32)(0);
  VF most = zero;
  for (int h = 0; h < b->hits; h++)
    for (int half = 0; half < 2; half++) {
      int64_t i = b->hit[h] + half * WIDTH;
      VF r = load_lanes(r_at + r_size * i, r_kind), c = load_lanes(c_at + c_size * i, c_kind);
      VF e = OP(sub_ps)(c, r);
#if WIDTH == 16
      VF rel = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(e, zero, _CMP_NEQ_UQ), ABS(e), ABS(r));
#else
      VF rel = _mm256_and_ps(_mm256_cmp_ps(e, zero, _CMP_NEQ_UQ), _mm256_div_ps(ABS(e), ABS(r)));
#endif
      most = OP(max_ps)(most, rel);
      if (direct) {
        far = OP(max_epu32)(far, ulp_distance(r, c, dtype));
      } else if (s->format[1].is_float) {
        float rf[WIDTH], cf[WIDTH];
        OP(storeu_ps)(rf, r);
        OP(storeu_ps)(cf, c);
        for (int j = 0; j < WIDTH; j += LANES) {
          vd rd, cd;
          for (int lane = 0; lane < LANES; lane++) {
            rd[lane] = rf[j + lane];
            cd[lane] = cf[j + lane];
          }
          uint64_t u = greatest_u(ulp_lanes(rd, cd, &s->format[1]));
          if (u > s->ulp) s->ulp = u;
        }
      }
    }
  double greatest_rel = max_lane(most);
  if (greatest_rel > s->m.max_rel_e) s->m.max_rel_e = greatest_rel;
  if (direct) {
    /* The greatest of unsigned lanes is the complement of the least complement. */
    uint32_t u = ~least_lane(OP(sub_epi32)(OP(set1_epi32)(-1), far));
    if (u > s->ulp) s->ulp = u;
  }
}

/* What the sums of a block cannot tell and its elements must be asked for again, in float64. */
TARGET static void ask_again(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t base,
                             int64_t n, int count_outside) {
  static const int dtype_of_kind[] = {F32, BF16, F16};
  double r[BLOCK] __attribute__((aligned(64))), c[BLOCK] __attribute__((aligned(64)));
  decode_double(r_at, dtype_of_kind[r_kind], 0, n, r);
  decode_double(c_at, dtype_of_kind[c_kind], 0, n, c);
  if (s->m.first_different_at < 0 || s->m.first_different_at >= base)
    for (int64_t i = 0; i < n; i++)
      if (r[i] != c[i]) {
        note_first(&s->m.first_different_at, base + i);
        break;
      }
  vd most = lanes(0.0), atol = lanes(s->atol), rtol = lanes(s->rtol);
  vl outside = lanes_l(0);
  for (int64_t i = 0; i < n; i += LANES) { /* n is a multiple of 2 * WIDTH */
    vd a = load_lanes_d(r + i), ae = magnitude(load_lanes_d(c + i) - a);
    most = MAXV(most, ae);
    outside -= ~(ae <= atol + rtol * magnitude(a));
  }
  if (count_outside) s->m.outside += total_l(outside);
  find_greatest_error(s, r, c, base, n, greatest(most));
}

/* A block with something infinite, not a number or a sentinel in it, made fit for the lanes: such pairs are measured
 * one by one and become shift against shift, which adds nothing to any sum. Returns how many, -1 for too many. */
TARGET static int64_t patch_block(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t base,
                                  int64_t n, const Knobs *k, float *r_out, float *c_out, Sums *ends, double *c_ends) {
  const VF shift = OP(set1_ps)(k->shift), top = OP(set1_ps)(FLT_MAX);
  const VF r_mask = OP(set1_ps)((float)s->format[0].sentinel), c_mask = OP(set1_ps)((float)s->format[1].sentinel);
  VF lo = OP(set1_ps)(INFINITY), hi = OP(set1_ps)(-INFINITY), c_lo = lo, c_hi = hi;
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  uint16_t odd[BLOCK / 4];
  int64_t odds = 0;
  for (int64_t i = 0; i < n; i += WIDTH) {
    VF r = load_lanes(r_at + r_size * i, r_kind), c = load_lanes(c_at + c_size * i, c_kind);
#if WIDTH == 16
    unsigned good = _mm512_cmp_ps_mask(ABS(r), top, _CMP_LE_OQ) & _mm512_cmp_ps_mask(ABS(c), top, _CMP_LE_OQ) &
                    _mm512_cmp_ps_mask(r, r_mask, _CMP_NEQ_UQ) & _mm512_cmp_ps_mask(c, c_mask, _CMP_NEQ_UQ);
    __mmask16 ok = (__mmask16)good;
    lo = _mm512_mask_min_ps(lo, ok, lo, r);
    hi = _mm512_mask_max_ps(hi, ok, hi, r);
    c_lo = _mm512_mask_min_ps(c_lo, ok, c_lo, c);
    c_hi = _mm512_mask_max_ps(c_hi, ok, c_hi, c);
    _mm512_storeu_ps(r_out + i, _mm512_mask_mov_ps(shift, ok, r));
    _mm512_storeu_ps(c_out + i, _mm512_mask_mov_ps(shift, ok, c));
#else
    VF ok = _mm256_and_ps(_mm256_and_ps(_mm256_cmp_ps(ABS(r), top, _CMP_LE_OQ), _mm256_cmp_ps(ABS(c), top, _CMP_LE_OQ)),
                          _mm256_and_ps(_mm256_cmp_ps(r, r_mask, _CMP_NEQ_UQ), _mm256_cmp_ps(c, c_mask, _CMP_NEQ_UQ)));
    unsigned good = (unsigned)_mm256_movemask_ps(ok);
    lo = _mm256_min_ps(lo, _mm256_blendv_ps(lo, r, ok));
    hi = _mm256_max_ps(hi, _mm256_blendv_ps(hi, r, ok));
    c_lo = _mm256_min_ps(c_lo, _mm256_blendv_ps(c_lo, c, ok));
    c_hi = _mm256_max_ps(c_hi, _mm256_blendv_ps(c_hi, c, ok));
    _mm256_storeu_ps(r_out + i, _mm256_blendv_ps(shift, r, ok));
    _mm256_storeu_ps(c_out + i, _mm256_blendv_ps(shift, c, ok));
#endif
    for (unsigned bad = ~good & ((1u << WIDTH) - 1); bad; bad &= bad - 1) {
      if (odds == BLOCK / 4) return -1;
      odd[odds++] = (uint16_t)(i + __builtin_ctz(bad));
    }
  }
  if (odds == n) return -1;
  for (int64_t i = 0; i < odds; i++) {
    static const int dtype_of_kind[] = {F32, BF16, F16};
    double r, c;
    decode_double(r_at, dtype_of_kind[r_kind], odd[i], 1, &r);
    decode_double(c_at, dtype_of_kind[c_kind], odd[i], 1, &c);
    measure_odd(s, r, c, base + odd[i]);
  }
  ends->min_r = min_lane(lo);
  ends->max_r = max_lane(hi);
  c_ends[0] = min_lane(c_lo);
  c_ends[1] = max_lane(c_hi);
  return odds;
}

LANE_FN void finish_block(Pair *s, const uint8_t *r, const uint8_t *c, int64_t base, int64_t n, int r_kind, int c_kind,
                          int tolerant, const Sums *b, Knobs *k) {
  Moments *m = &s->m;
  int unsure = b->margin <= MARGIN_STEPS;
  if (!unsure) m->outside += tolerant ? b->outside : b->differ;
  if (b->hits && !nothing_new(s, b, k)) {
    visit_hits(s, r, c, r_kind, c_kind, b);
    set_limit(s, k);
  }
  if (unsure || (b->differ && (m->first_different_at < 0 || m->first_different_at >= base)) ||
      b->max_ae > (float)m->max_abs_e) /* errors alike to float32 are alike: the first keeps the place */
    ask_again(s, r, c, r_kind, c_kind, base, n, unsure);
}

TARGET static int fast_block(Pair *s, int64_t base, int64_t n, int r_kind, int c_kind, int tolerant, Knobs *k) {
  float decoded[2][BLOCK] __attribute__((aligned(64)));
  const uint8_t *r, *c;
  if (r_kind == LANES_DECODED) {
    decode_float(s->data[0], s->dtype[0], base, n, decoded[0]);
    r = (const uint8_t *)decoded[0];
    r_kind = LANES_F32;
  } else {
    r = s->data[0] + base * (r_kind == LANES_F32 ? 4 : 2);
  }
  if (c_kind == LANES_DECODED) {
    decode_float(s->data[1], s->dtype[1], base, n, decoded[1]);
    c = (const uint8_t *)decoded[1];
    c_kind = LANES_F32;
  } else {
    c = s->data[1] + base * (c_kind == LANES_F32 ? 4 : 2);
  }
  Moments *m = &s->m;
  Sums b;
  double spread_r, spread_c, count = (double)n;
  sum_kinds(r, c, n, r_kind, c_kind, tolerant, k, &b);
  double low = (double)b.min_r - b.max_ae * (1 + 0x1p-22), high = (double)b.max_r + b.max_ae * (1 + 0x1p-22);
  if (!(b.ae <= DBL_MAX) || b.min_r <= s->format[0].sentinel) {
    Moments saved = *m;
    Spread spreads[2] = {s->spread[0], s->spread[1]};
    float clean[2][BLOCK] __attribute__((aligned(64)));
    double c_ends[2];
    Sums ends;
    if (!(fabsf(k->shift) <= FLT_MAX)) return 0;
    int64_t odds = patch_block(s, r, c, r_kind, c_kind, base, n, k, clean[0], clean[1], &ends, c_ends);
    if (odds < 0) return 0;
    r = (const uint8_t *)clean[0];
    c = (const uint8_t *)clean[1];
    r_kind = c_kind = LANES_F32;
    count -= (double)odds;
    sum_kinds(r, c, n, r_kind, c_kind, tolerant, k, &b);
    b.min_r = ends.min_r;
    b.max_r = ends.max_r;
    if (!sums_hold(s, &b, count, &spread_r, &spread_c)) {
      *m = saved;
      s->spread[0] = spreads[0];
      s->spread[1] = spreads[1];
      return 0;
    }
    if (c_ends[0] < m->ends[1].min) m->ends[1].min = c_ends[0];
    if (c_ends[1] > m->ends[1].max) m->ends[1].max = c_ends[1];
    fold_sums(s, &b, k, count, spread_r, spread_c);
    finish_block(s, r, c, base, n, r_kind, c_kind, tolerant, &b, k);
    return 1;
  }
  if (!sums_hold(s, &b, count, &spread_r, &spread_c)) return 0;
  if (low < m->ends[1].min || high > m->ends[1].max || low <= s->format[1].sentinel) {
    switch (c_kind) {
      case LANES_F32: extremes(c, n, LANES_F32, &low, &high); break;
      case LANES_BF16: extremes(c, n, LANES_BF16, &low, &high); break;
      default: extremes(c, n, LANES_F16, &low, &high); break;
    }
    if (low <= s->format[1].sentinel) return 0;
    if (low < m->ends[1].min) m->ends[1].min = low;
    if (high > m->ends[1].max) m->ends[1].max = high;
  }
  fold_sums(s, &b, k, count, spread_r, spread_c);
  finish_block(s, r, c, base, n, r_kind, c_kind, tolerant, &b, k);
  return 1;
}

TARGET static void pair(Pair *s, int64_t count) {
  int r_kind = lane_kind(s->dtype[0]), c_kind = lane_kind(s->dtype[1]);
  int tolerant = s->atol != 0.0 || s->rtol != 0.0;
  int fast = r_kind != LANES_NONE && c_kind != LANES_NONE && !s->widen[0] && !s->widen[1] &&
             tolerance_fits(s->atol) && tolerance_fits(s->rtol) &&
             (s->format[1].is_float || !s->format[0].is_float); /* integers' ULPs are their errors */
  Knobs k = {0, 0, (float)(s->atol * TOLERANCE_SHADE), (float)(s->rtol * TOLERANCE_SHADE)};
  if (fast && count >= 2 * WIDTH) {
    double sample[16], sum = 0, squares = 0;
    decode_double(s->data[0], s->dtype[0], 0, 16, sample);
    for (int i = 0; i < 16; i++) {
      sum += sample[i] / 16;
      squares += sample[i] * sample[i] / 16;
    }
    /* Zero serves, and costs nothing, where the mean is not large against the spread. */
    k.shift = sum * sum < 0.5 * squares ? 0.0f : (float)sum;
  }
  for (int64_t i = 0; i < count;) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK, whole = n & -(int64_t)(2 * WIDTH);
    if (fast && whole && fast_block(s, i, whole, r_kind, c_kind, tolerant, &k)) {
      i += whole;
      continue;
    }
    careful_block(s, i, n);
    k.shift = (float)s->shift;
    if (fast) set_limit(s, &k);
    i += n;
  }
  if (fast && !s->format[1].is_float) s->ulp_real = s->m.max_abs_e;
}

/* One block of one tensor, n a multiple of 64. Returns 0, with nothing changed, when float32 cannot carry it. */
LANE_FN int summary_block(One *s, const uint8_t *p, int64_t base, int64_t n, int kind) {
  enum { PARTS = BUCKETS / WIDTH };
  const VF zero = OP(setzero_ps)(), shift = OP(set1_ps)((float)s->shift);
  const int size = kind == LANES_F32 ? 4 : 2;
  VF sx[2] = {zero, zero}, sxx[2] = {zero, zero}, low = OP(set1_ps)(INFINITY), high = OP(set1_ps)(-INFINITY);
  VF buckets[PARTS];
  int64_t zeros = 0;
#if WIDTH == 16
  const VI iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const VI iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const VI to_top = _mm256_sub_epi32(_mm256_set1_epi32(31), iota), minus = _mm256_set1_epi32(INT32_MIN);
#endif
  for (int v = 0; v < PARTS; v++) buckets[v] = zero;
  for (int64_t i = 0; i < n; i += BUCKETS) {
    uint64_t signs = sketch_signs((uint64_t)(base + i) / BUCKETS);
    unsigned flip = sketch_xor(signs), part = flip / WIDTH;
    VI lanes_to = OP(set1_epi32)((int)(flip % WIDTH));
#if WIDTH == 16
    lanes_to = _mm512_xor_si512(lanes_to, iota);
#else
    lanes_to = _mm256_xor_si256(lanes_to, iota);
#endif
    for (unsigned v = 0; v < PARTS; v++) {
      VF value = load_lanes(p + size * (i + WIDTH * v), kind), x = OP(sub_ps)(value, shift);
      sx[v & 1] = OP(add_ps)(sx[v & 1], x);
      sxx[v & 1] = OP(fmadd_ps)(x, x, sxx[v & 1]);
      low = OP(min_ps)(low, value);
      high = OP(max_ps)(high, value);
#if WIDTH == 16
      zeros += __builtin_popcount(_mm512_cmp_ps_mask(value, zero, _CMP_EQ_OQ));
      VF turned = AS_FLOAT(_mm512_mask_xor_epi32(AS_BITS(value), (__mmask16)(signs >> (16 * v)), AS_BITS(value),
                                                 _mm512_set1_epi32(INT32_MIN)));
      turned = _mm512_permutexvar_ps(lanes_to, turned);
#else
      zeros += __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(value, zero, _CMP_EQ_OQ)));
      VI sign = AND_BITS(_mm256_sllv_epi32(_mm256_set1_epi32((int)(signs >> (8 * v))), to_top), minus);
      VF turned = _mm256_permutevar8x32_ps(_mm256_xor_ps(value, AS_FLOAT(sign)), lanes_to);
#endif
      buckets[v ^ part] = OP(add_ps)(buckets[v ^ part], turned);
    }
  }
  double count = (double)n, x = sum_lanes(OP(add_ps)(sx[0], sx[1])), xx = sum_lanes(OP(add_ps)(sxx[0], sxx[1]));
  float least_value = min_lane(low), greatest_value = max_lane(high);
  double about = xx - x * x / count, by = (float)s->shift;
  if (!(xx <= DBL_MAX) || least_value <= s->sentinel) return 0;
  if (xx < 0x1p-115 && least_value != greatest_value) return 0;
  if (!(about >= 0.1 * xx)) return 0;
  Summary *o = &s->s;
  if (least_value < o->min) o->min = least_value;
  if (greatest_value > o->max) o->max = greatest_value;
  o->zeros += zeros;
  s->sumsq += xx + by * (2 * x + count * by);
  join_spread(&s->spread, count, by + x / count, about);
  s->shift = by + x / count;
  for (int v = 0; v < PARTS; v++) {
    float part[WIDTH];
    OP(storeu_ps)(part, buckets[v]);
    for (int lane = 0; lane < WIDTH; lane++) o->sketch[v * WIDTH + lane] += part[lane];
  }
  return 1;
}

TARGET static int summary_kinds(One *s, const uint8_t *p, int64_t base, int64_t n, int kind) {
  switch (kind) {
    case LANES_F32: return summary_block(s, p, base, n, LANES_F32);
    case LANES_BF16: return summary_block(s, p, base, n, LANES_BF16);
    default: return summary_block(s, p, base, n, LANES_F16);
  }
}

TARGET static void summary(One *s, int64_t count) {
  int kind = lane_kind(s->dtype);
  float decoded[BLOCK] __attribute__((aligned(64)));
  for (int64_t i = 0; i < count;) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK, whole = n & -(int64_t)BUCKETS;
    if (kind != LANES_NONE && whole) {
      const uint8_t *p = s->data + i * (kind == LANES_F32 ? 4 : 2);
      if (kind == LANES_DECODED) {
        decode_float(s->data, s->dtype, i, whole, decoded);
        p = (const uint8_t *)decoded;
      }
      if (summary_kinds(s, p, i, whole, kind == LANES_DECODED ? LANES_F32 : kind)) {
        i += whole;
        continue;
      }
    }
    careful_summary_block(s, i, n);
    i += n;
  }
}

LANE_FN VI stripe(VI sums, VI data, VI key) {
#if WIDTH == 16
  VI keyed = _mm512_xor_si512(data, key);
#else
  VI keyed = _mm256_xor_si256(data, key);
#endif
  VI product = OP(mul_epu32)(keyed, OP(srli_epi64)(keyed, 32));
  return OP(add_epi64)(OP(add_epi64)(sums, OP(shuffle_epi32)(data, 0x4E)), product);
}

LANE_FN VI scramble(VI sums, VI key) {
  const VI prime = OP(set1_epi32)((int)P32_1);
#if WIDTH == 16
  VI v = _mm512_ternarylogic_epi64(sums, _mm512_srli_epi64(sums, 47), key, 0x96);
#else
  VI v = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), key);
#endif
  VI low = OP(mul_epu32)(v, prime), high = OP(mul_epu32)(OP(srli_epi64)(v, 32), prime);
  return OP(add_epi64)(low, OP(slli_epi64)(high, 32));
}

TARGET static void hash_long(const uint8_t *p, size_t n, uint64_t *out) {
  enum { PARTS = 16 / WIDTH, PART = 4 * WIDTH };
  VI sums[PARTS];
  for (int v = 0; v < PARTS; v++) sums[v] = load_bits((const uint8_t *)HASH_START + PART * v);
  size_t blocks = (n - 1) / 1024;
  for (size_t b = 0; b < blocks; b++, p += 1024) {
    for (size_t i = 0; i < 16; i++)
      for (int v = 0; v < PARTS; v++)
        sums[v] = stripe(sums[v], load_bits(p + 64 * i + PART * v), load_bits(SECRET + 8 * i + PART * v));
    for (int v = 0; v < PARTS; v++) sums[v] = scramble(sums[v], load_bits(SECRET + 128 + PART * v));
  }
  size_t rest = n - blocks * 1024, stripes = (rest - 1) / 64;
  for (size_t i = 0; i < stripes; i++)
    for (int v = 0; v < PARTS; v++)
      sums[v] = stripe(sums[v], load_bits(p + 64 * i + PART * v), load_bits(SECRET + 8 * i + PART * v));
  for (int v = 0; v < PARTS; v++) {
    sums[v] = stripe(sums[v], load_bits(p + rest - 64 + PART * v), load_bits(SECRET + 121 + PART * v));
    memcpy(out + PART / 8 * v, &sums[v], PART);
  }
}

/* For the benchmark: two streams read as fast as this processor can, with nothing done to them. */
TARGET static uint64_t read_two(const uint8_t *a, const uint8_t *b, int64_t bytes) {
  enum { PART = 4 * WIDTH };
  VI x[4];
  for (int v = 0; v < 4; v++) x[v] = OP(set1_epi32)(0);
  for (int64_t i = 0; i + 4 * PART <= bytes; i += 4 * PART) {
    for (int line = 0; line < 4 * PART; line += 64) {
      _mm_prefetch((const char *)(a + i + line + 1024), _MM_HINT_T0);
      _mm_prefetch((const char *)(b + i + line + 1024), _MM_HINT_T0);
    }
    for (int v = 0; v < 4; v++)
      x[v] = OP(add_epi32)(x[v], OP(add_epi32)(load_bits(a + i + PART * v), load_bits(b + i + PART * v)));
  }
  return (uint64_t)count_lanes(OP(add_epi32)(OP(add_epi32)(x[0], x[1]), OP(add_epi32)(x[2], x[3])));
}

#endif /* WIDTH */

#endif /* DRIFTLINE_BODY */
