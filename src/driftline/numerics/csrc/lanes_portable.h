/* Lanes for processors without AVX: the compiler's own vectors, 16 bytes wide (SSE2, NEON). Float64 lanes are for pairs
 * and summaries, float32 lanes for rows of logits. */

/* ---- float64 ---- */

enum { LANES = 2, LANE_BITS = 3 };
typedef double D __attribute__((vector_size(16)));
typedef int64_t M __attribute__((vector_size(16))); /* a mask: all ones or zero per lane */
typedef M Tally;

LANE D d_set(double v) { return (D){v, v}; }
LANE D d_load(const double *p) { D v; memcpy(&v, p, sizeof v); return v; }
LANE void d_store(double *p, D v) { memcpy(p, &v, sizeof v); }
LANE D d_fma(D a, D b, D c) { return a * b + c; } /* rounds twice; the other instruction sets round once */
LANE D d_abs(D v) { return (D)((M)v & (M){INT64_MAX, INT64_MAX}); }
LANE D d_keep(M m, D v) { return (D)((M)v & m); }
LANE D d_pick(M m, D yes, D no) { return (D)(((M)yes & m) | ((M)no & ~m)); }
#if defined(__SSE2__)
/* The processor's own comparisons: where a mask of the compiler's vectors meets a value or another mask, GCC 12 moves
 * every lane to a general register and selects it there. Loops with masks took two to five times as long. */
LANE D d_max(D a, D b) { return (D)_mm_max_pd((__m128d)a, (__m128d)b); }
LANE D d_min(D a, D b) { return (D)_mm_min_pd((__m128d)a, (__m128d)b); }
LANE M m_eq(D a, D b) { return (M)_mm_cmpeq_pd((__m128d)a, (__m128d)b); }
LANE M m_le(D a, D b) { return (M)_mm_cmple_pd((__m128d)a, (__m128d)b); }
LANE M m_lt(D a, D b) { return (M)_mm_cmplt_pd((__m128d)a, (__m128d)b); }
LANE M m_ordered(D a, D b) { return (M)_mm_cmpord_pd((__m128d)a, (__m128d)b); }
LANE unsigned m_bits(M m) { return (unsigned)_mm_movemask_pd((__m128d)m); }
#else
LANE D d_max(D a, D b) { return d_pick(a > b, a, b); }
LANE D d_min(D a, D b) { return d_pick(a < b, a, b); }
LANE M m_eq(D a, D b) { return a == b; }
LANE M m_le(D a, D b) { return a <= b; }
LANE M m_lt(D a, D b) { return a < b; }
LANE M m_ordered(D a, D b) { return (a == a) & (b == b); }
LANE unsigned m_bits(M m) { return (m[0] & 1u) | (m[1] & 2u); }
#endif
LANE M m_and(M a, M b) { return a & b; }
LANE M m_or(M a, M b) { return a | b; }
LANE M m_not(M a) { return ~a; }
LANE M m_none(void) { return (M){0, 0}; }
LANE double d_total(D v) { return v[0] + v[1]; }
LANE double d_greatest(D v) { return v[0] > v[1] ? v[0] : v[1]; }
LANE double d_least(D v) { return v[0] < v[1] ? v[0] : v[1]; }
LANE Tally tally_none(void) { return m_none(); }
LANE Tally tally_add(Tally t, M m) { return t - m; }
LANE int64_t tally_total(Tally t) { return t[0] + t[1]; }

/* Two of the 64 values of a group. Values whose bit in `signs` is set are negated; then lane i moves to lane i XOR
 * `flip`. */
LANE D d_sketch(D v, uint64_t signs, unsigned flip) {
  M minus = {(int64_t)((signs & 1) << 63), (int64_t)((signs >> 1 & 1) << 63)};
  D turned = (D)((M)v ^ minus), swapped = {turned[1], turned[0]};
  const int64_t swap = -(int64_t)(flip & 1); /* without a branch: it would be unpredictable */
  return d_pick((M){swap, swap}, swapped, turned);
}

/* ---- float32 ---- */

enum { WIDTH = 4 };
typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
typedef VI MASK;
#define OP(name) plain_##name
#define AS_FLOAT(v) ((VF)(v))
#define AS_BITS(v) ((VI)(v))
#define ABS(v) ((VF)((VI)(v) & (VI){INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX}))

LANE VF plain_set1_ps(float v) { return (VF){v, v, v, v}; }
LANE VF plain_setzero_ps(void) { return (VF){0, 0, 0, 0}; }
LANE VF plain_add_ps(VF a, VF b) { return a + b; }
LANE VF plain_sub_ps(VF a, VF b) { return a - b; }
LANE VF plain_mul_ps(VF a, VF b) { return a * b; }
LANE VF plain_fmadd_ps(VF a, VF b, VF c) { return a * b + c; } /* rounds twice; the error bounds allow for that */
LANE void plain_storeu_ps(float *p, VF v) { memcpy(p, &v, sizeof v); }
/* Unsigned, because an int32 sum may wrap here on purpose. */
LANE VI plain_add_epi32(VI a, VI b) { return (VI)((VU)a + (VU)b); }
LANE VI plain_slli_epi32(VI a, int by) { return (VI)((VU)a << by); }
LANE VF chosen(MASK mask, VF yes, VF no) { return (VF)(((VI)yes & mask) | ((VI)no & ~mask)); }
LANE unsigned mask_word(MASK m) { return (m[0] & 1u) | (m[1] & 2u) | (m[2] & 4u) | (m[3] & 8u); }
LANE MASK not_above(VF v, VF limit) { return v <= limit; }
LANE MASK equal_lanes(VF a, VF b) { return a == b; }
LANE MASK not_mask(MASK m) { return ~m; }

#if defined(__SSE2__)
LANE VF plain_min_ps(VF a, VF b) { return (VF)_mm_min_ps((__m128)a, (__m128)b); }
LANE VF plain_max_ps(VF a, VF b) { return (VF)_mm_max_ps((__m128)a, (__m128)b); }
LANE VI load_words(const uint8_t *p) {
  return (VI)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)p), _mm_setzero_si128());
}
#else
LANE VF plain_min_ps(VF a, VF b) { return chosen((VI)(a < b), a, b); }
LANE VF plain_max_ps(VF a, VF b) { return chosen((VI)(a > b), a, b); }
LANE VI load_words(const uint8_t *p) { return (VI){read16(p), read16(p + 2), read16(p + 4), read16(p + 6)}; }
#endif

/* Four elements in order. */
LANE VF load_lanes(const uint8_t *p, int kind) {
  VF v;
  if (kind == LANES_F32) {
    memcpy(&v, p, sizeof v);
    return v;
  }
  VI words = load_words(p);
  if (kind == LANES_BF16) return (VF)plain_slli_epi32(words, 16);
  /* As in half_value(). */
  VI size = plain_slli_epi32(words & (VI){0x7FFF, 0x7FFF, 0x7FFF, 0x7FFF}, 13);
  VI sign = plain_slli_epi32(words & (VI){0x8000, 0x8000, 0x8000, 0x8000}, 16);
  VI past = (VI)(size >= (VI){0x0F800000, 0x0F800000, 0x0F800000, 0x0F800000}) & 0x7F800000;
  return (VF)((VI)((VF)size * plain_set1_ps(0x1p112f)) | past | sign);
}

/* Four elements as float64, in order. */
LANE void widen_lanes(VF v, D out[2]) {
#if defined(__SSE2__)
  out[0] = (D)_mm_cvtps_pd((__m128)v);
  out[1] = (D)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v));
#else
  out[0] = (D){v[0], v[1]};
  out[1] = (D){v[2], v[3]};
#endif
}

LANE double sum_lanes(VF v) { return ((double)v[0] + v[2]) + ((double)v[1] + v[3]); }
LANE float max_lane(VF v) {
  float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
