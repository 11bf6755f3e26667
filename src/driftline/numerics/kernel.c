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

typedef double vd __attribute__((vector_size(64)));
typedef int64_t vl __attribute__((vector_size(64)));
typedef uint64_t vu __attribute__((vector_size(64)));

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

/* ---- lanes ---- */

INLINE vd lanes(double v) { return (vd){v, v, v, v, v, v, v, v}; }
INLINE vl lanes_l(int64_t v) { return (vl){v, v, v, v, v, v, v, v}; }
INLINE vu lanes_u(uint64_t v) { return (vu){v, v, v, v, v, v, v, v}; }
INLINE vd pick(vl mask, vd yes, vd no) { return (vd)(((vl)yes & mask) | ((vl)no & ~mask)); }
INLINE vd keep(vl mask, vd v) { return (vd)((vl)v & mask); }
INLINE vd magnitude(vd v) { return (vd)((vl)v & lanes_l(INT64_MAX)); }
INLINE vd load8(const double *p) { vd v; memcpy(&v, p, sizeof v); return v; }

INLINE double total(vd v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
INLINE int64_t total_l(vl v) { return v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7]; }
INLINE double greatest(vd v) {
  double best = v[0];
  for (int i = 1; i < 8; i++) best = v[i] > best ? v[i] : best;
  return best;
}
INLINE double least(vd v) {
  double best = v[0];
  for (int i = 1; i < 8; i++) best = v[i] < best ? v[i] : best;
  return best;
}
INLINE uint64_t greatest_u(vu v) {
  uint64_t best = v[0];
  for (int i = 1; i < 8; i++) best = v[i] > best ? v[i] : best;
  return best;
}
#define MAXV(a, b) pick((a) < (b), (b), (a))
#define MINV(a, b) pick((b) < (a), (b), (a))

/* Where a magnitude stands in a format's list of numbers, after rounding to nearest even. */
INLINE vu ordinal(vd a, const Format *f) {
  if (f->mantissa == 52) return (vu)a;
  int shift = 52 - f->mantissa;
  vu bits = (vu)a;
  vu rounded = bits + lanes_u((1ull << (shift - 1)) - 1) + ((bits >> shift) & 1);
  vu normal = (rounded >> shift) - lanes_u((uint64_t)(f->emin + 1022) << f->mantissa);
  vd scaled = a * lanes(double_of((uint64_t)(f->mantissa - f->emin + 1023) << 52)) + lanes(0x1p52);
  vu small = (vu)scaled - lanes_u(0x4330000000000000ull);
  vl below = a < lanes(double_of((uint64_t)(f->emin + 1023) << 52));
  vu place = (vu)(((vl)small & below) | ((vl)normal & ~below));
  vl past = (vl)(place > lanes_u(f->top));
  return (vu)(((vl)lanes_u(f->top) & past) | ((vl)place & ~past));
}

INLINE vu ulp_lanes(vd r, vd c, const Format *f) {
  vu a = ordinal(magnitude(r), f), b = ordinal(magnitude(c), f);
  vl opposite = ((vl)r ^ (vl)c) < 0;
  vl less = (vl)(a < b);
  vu apart = (vu)(((vl)(b - a) & less) | ((vl)(a - b) & ~less));
  return (vu)(((vl)(a + b) & opposite) | ((vl)apart & ~opposite));
}

/* ---- moments, gathered ---- */

typedef struct {
  double n, mean, m2;
} Spread;

/* Chan, Golub and LeVeque: two groups' mean and sum of squares about it, joined. */
INLINE void join_spread(Spread *s, double n, double mean, double m2) {
  if (n == 0) return;
  double whole = s->n + n, delta = mean - s->mean;
  s->mean = s->n == 0 ? mean : s->mean + delta * (n / whole);
  s->m2 += m2 + (s->n == 0 ? 0.0 : delta * delta * (s->n * (n / whole)));
  s->n = whole;
}

typedef struct {
  Moments m;
  Spread spread[2];
  uint64_t ulp;    /* greatest distance so far, float formats */
  double ulp_real; /* the same for integer formats */
  double shift;    /* about the mean of r, for the fast path */
  const uint8_t *data[2];
  int dtype[2], widen[2];
  Format format[2];
  double atol, rtol;
} Pair;

INLINE void note_first(int64_t *place, int64_t at) {
  if (*place < 0) *place = at;
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

INLINE void find_greatest_error(Pair *s, const double *r, const double *c, int64_t base, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    double a = r[i], b = c[i];
    if (!(fabs(a) <= DBL_MAX) || !(fabs(b) <= DBL_MAX) || a == s->format[0].sentinel || b == s->format[1].sentinel)
      continue;
    double apart = fabs(b - a);
    if (apart > s->m.max_abs_e) {
      s->m.max_abs_e = apart;
      s->m.max_abs_e_at = base + i;
    }
  }
}

/* One block of both sides in float64. Arrays hold a multiple of eight; what is past n is masked. */
INLINE void careful_pair(Pair *s, const double *r_in, const double *c_in, int64_t base, int64_t n) {
  const vd zero = lanes(0.0), inf = lanes(INFINITY), top = lanes(DBL_MAX);
  const vd sr = lanes(s->format[0].sentinel), sc = lanes(s->format[1].sentinel);
  const vd atol = lanes(s->atol), rtol = lanes(s->rtol);
  const vl iota = {0, 1, 2, 3, 4, 5, 6, 7};
  vd own_r = zero, own_c = zero, own_rr = zero, own_cc = zero;
  vd jr = zero, jc = zero, jrr = zero, jcc = zero, jrc = zero, jee = zero, jae = zero, jrel = zero;
  vd max_e = zero, max_rel = zero, rmin = inf, rmax = -inf, cmin = inf, cmax = -inf, far = zero;
  vl nr = {0}, nc = {0}, nj = {0}, nan_r = {0}, nan_c = {0}, pos_r = {0}, pos_c = {0}, neg_r = {0}, neg_c = {0};
  vl differ_n = {0}, sided_n = {0}, outside_n = {0};
  vu ulp = {0};
  Format f = s->format[1];

  for (int64_t i = 0; i < n; i += 8) {
    vl valid = iota < lanes_l(n - i);
    vd r = load8(r_in + i), c = load8(c_in + i);
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
    for (int64_t i = 0; i < n; i += 8) {
      vd v = load8(x + i);
      vl ok = (iota < lanes_l(n - i)) & (magnitude(v) <= top) & (v != sentinel);
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
  if (greatest(max_e) > m->max_abs_e) find_greatest_error(s, r_in, c_in, base, n);
  int all_finite = count[0] == (double)n && count[1] == (double)n;
  if ((new_differ && m->first_different_at < 0) || (!all_finite && (m->nonfinite_at[0] < 0 || m->nonfinite_at[1] < 0)) ||
      (!all_finite && m->one_sided_at < 0))
    find_positions(s, r_in, c_in, base, n);
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

INLINE void careful_block(Pair *s, int64_t base, int64_t n) {
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

static void pair_generic(Pair *s, int64_t count) {
  for (int64_t i = 0; i < count; i += BLOCK) careful_block(s, i, count - i < BLOCK ? count - i : BLOCK);
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

/* One block in float64; the array holds a multiple of 64, zeros past n. `base` is a multiple of 64. */
INLINE void careful_summary(One *s, double *x, int64_t base, int64_t n) {
  const vd zero = lanes(0.0), inf = lanes(INFINITY), top = lanes(DBL_MAX), sentinel = lanes(s->sentinel);
  const vl iota = {0, 1, 2, 3, 4, 5, 6, 7};
  vd sum = zero, squares = zero, low = inf, high = -inf, m2 = zero, drift = zero;
  vl finite = {0}, zeros = {0}, nans = {0}, pos = {0}, neg = {0};
  for (int64_t i = 0; i < n; i += 8) {
    vl valid = iota < lanes_l(n - i);
    vd v = load8(x + i);
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
    for (int64_t i = 0; i < n; i += 8) {
      vd d = keep(iota < lanes_l(n - i), load8(x + i) - mean);
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
    for (unsigned high8 = 0; high8 < 8; high8++) {
      vd v = load8(x + i + 8 * high8);
      vu turn = ((lanes_u(signs >> (8 * high8)) >> (vu)iota) & 1) << 63;
      v = (vd)((vu)v ^ turn);
      double *to = o->sketch + ((high8 ^ (flip >> 3)) * 8);
      for (unsigned lane = 0; lane < 8; lane++) to[lane ^ (flip & 7)] += v[lane];
    }
  }
}

INLINE void careful_summary_block(One *s, int64_t base, int64_t n) {
  double x[BLOCK] __attribute__((aligned(64)));
  decode_double(s->data, s->dtype, base, n, x);
  int64_t whole = (n + BUCKETS - 1) / BUCKETS * BUCKETS;
  for (int64_t i = n; i < whole; i++) x[i] = 0.0;
  careful_summary(s, x, base, n);
}

static void summary_generic(One *s, int64_t count) {
  for (int64_t i = 0; i < count; i += BLOCK) careful_summary_block(s, i, count - i < BLOCK ? count - i : BLOCK);
}

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

/* Eight running sums; a stripe is 64 bytes, sixteen stripes make a block, then the sums are scrambled. */
INLINE vu load_u(const uint8_t *p) { vu v; memcpy(&v, p, sizeof v); return v; }

INLINE vu swapped_pairs(vu v) { return (vu){v[1], v[0], v[3], v[2], v[5], v[4], v[7], v[6]}; }

INLINE vu stripe(vu sums, vu data, vu key) {
  vu keyed = data ^ key;
  return sums + swapped_pairs(data) + (keyed & 0xFFFFFFFFu) * (keyed >> 32);
}
INLINE vu scramble(vu sums, vu key) { return ((sums ^ (sums >> 47)) ^ key) * (uint64_t)P32_1; }

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

static void hash_long_generic(const uint8_t *p, size_t n, uint64_t *out) {
  vu sums;
  memcpy(&sums, HASH_START, sizeof sums);
  size_t blocks = (n - 1) / 1024;
  for (size_t b = 0; b < blocks; b++, p += 1024) {
    for (size_t i = 0; i < 16; i++) sums = stripe(sums, load_u(p + 64 * i), load_u(SECRET + 8 * i));
    sums = scramble(sums, load_u(SECRET + 128));
  }
  size_t rest = n - blocks * 1024, stripes = (rest - 1) / 64;
  for (size_t i = 0; i < stripes; i++) sums = stripe(sums, load_u(p + 64 * i), load_u(SECRET + 8 * i));
  sums = stripe(sums, load_u(p + rest - 64), load_u(SECRET + 192 - 64 - 7));
  memcpy(out, &sums, sizeof sums);
}

/*FAST*/

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

/* Sixteen bytes, most significant first, as the xxhash package's `digest()` gives them. */
EXPORT void driftline_digest(const void *data, int64_t bytes, int path, uint8_t *out) {
  Hash h = digest(data, (size_t)bytes, path);
  for (int i = 0; i < 8; i++) {
    out[i] = (uint8_t)(h.high >> (56 - 8 * i));
    out[8 + i] = (uint8_t)(h.low >> (56 - 8 * i));
  }
}
#endif
