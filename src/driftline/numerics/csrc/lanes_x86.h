/* Lanes of AVX2 and AVX-512: float64 lanes for pairs and summaries, float32 lanes for rows of logits. */

#if defined(__AVX512F__)
enum { LANES = 8, WIDTH = 16, LANE_BITS = 0xFF };
#define WIDE 1
#define VD __m512d
#define VF __m512
#define VI __m512i
#define OP(name) _mm512_##name
#define AS_FLOAT(v) _mm512_castsi512_ps(v)
#define AS_BITS(v) _mm512_castps_si512(v)
#define ABS(v) _mm512_abs_ps(v)
#else
enum { LANES = 4, WIDTH = 8, LANE_BITS = 0xF };
#define WIDE 0
#define VD __m256d
#define VF __m256
#define VI __m256i
#define OP(name) _mm256_##name
#define AS_FLOAT(v) _mm256_castsi256_ps(v)
#define AS_BITS(v) _mm256_castps_si256(v)
#define ABS(v) _mm256_and_ps(v, AS_FLOAT(_mm256_set1_epi32(0x7FFFFFFF)))
#endif

/* ---- float64 ---- */

typedef VD D;

LANE D d_set(double v) { return OP(set1_pd)(v); }
LANE D d_load(const double *p) { return OP(loadu_pd)(p); }
LANE void d_store(double *p, D v) { OP(storeu_pd)(p, v); }
LANE D d_fma(D a, D b, D c) { return OP(fmadd_pd)(a, b, c); }
LANE D d_max(D a, D b) { return OP(max_pd)(a, b); }
LANE D d_min(D a, D b) { return OP(min_pd)(a, b); }

#if WIDE
typedef __mmask8 M;
/* In lanes: GCC 12 may keep a mask as one byte on the stack, and count the bits of four. */
typedef __m512i Tally;
LANE Tally tally_none(void) { return _mm512_setzero_si512(); }
LANE Tally tally_add(Tally t, M m) { return _mm512_mask_add_epi64(t, m, t, _mm512_set1_epi64(1)); }
LANE int64_t tally_total(Tally t) { return _mm512_reduce_add_epi64(t); }
LANE D d_abs(D v) { return _mm512_abs_pd(v); }
LANE D d_keep(M m, D v) { return _mm512_maskz_mov_pd(m, v); }
LANE D d_pick(M m, D yes, D no) { return _mm512_mask_mov_pd(no, m, yes); }
LANE M m_eq(D a, D b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
LANE M m_le(D a, D b) { return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ); }
LANE M m_lt(D a, D b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
LANE M m_ordered(D a, D b) { return _mm512_cmp_pd_mask(a, b, _CMP_ORD_Q); }
LANE M m_and(M a, M b) { return (M)(a & b); }
LANE M m_or(M a, M b) { return (M)(a | b); }
LANE M m_not(M a) { return (M)~a; }
LANE M m_none(void) { return 0; }
LANE unsigned m_bits(M m) { return m; }
LANE double d_total(D v) { return _mm512_reduce_add_pd(v); }
LANE double d_greatest(D v) { return _mm512_reduce_max_pd(v); }
LANE double d_least(D v) { return _mm512_reduce_min_pd(v); }
#else
typedef __m256d M;
typedef int64_t Tally; /* counted on the scalar side, which has time and registers */
LANE Tally tally_none(void) { return 0; }
LANE int64_t tally_total(Tally t) { return t; }
LANE D d_abs(D v) { return _mm256_and_pd(v, _mm256_castsi256_pd(_mm256_set1_epi64x(INT64_MAX))); }
LANE D d_keep(M m, D v) { return _mm256_and_pd(m, v); }
LANE D d_pick(M m, D yes, D no) { return _mm256_blendv_pd(no, yes, m); }
LANE M m_eq(D a, D b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
LANE M m_le(D a, D b) { return _mm256_cmp_pd(a, b, _CMP_LE_OQ); }
LANE M m_lt(D a, D b) { return _mm256_cmp_pd(a, b, _CMP_LT_OQ); }
LANE M m_ordered(D a, D b) { return _mm256_cmp_pd(a, b, _CMP_ORD_Q); }
LANE M m_and(M a, M b) { return _mm256_and_pd(a, b); }
LANE M m_or(M a, M b) { return _mm256_or_pd(a, b); }
LANE M m_not(M a) { return _mm256_xor_pd(a, _mm256_castsi256_pd(_mm256_set1_epi64x(-1))); }
LANE M m_none(void) { return _mm256_setzero_pd(); }
LANE unsigned m_bits(M m) { return (unsigned)_mm256_movemask_pd(m); }
LANE double d_total(D v) {
  __m128d h = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(h, _mm_unpackhi_pd(h, h)));
}
LANE double d_greatest(D v) {
  __m128d h = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_max_sd(h, _mm_unpackhi_pd(h, h)));
}
LANE double d_least(D v) {
  __m128d h = _mm_min_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_min_sd(h, _mm_unpackhi_pd(h, h)));
}
LANE Tally tally_add(Tally t, M m) { return t + __builtin_popcount(m_bits(m)); }
#endif

/* Some of the 64 values of a group. Values whose bit in `signs` is set are negated; then lane i moves to lane i XOR
 * `flip`. */
LANE D d_sketch(D v, uint64_t signs, unsigned flip) {
#if WIDE
  const VI order = _mm512_xor_si512(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(flip % 8));
  const D turned = _mm512_mask_xor_pd(v, (__mmask8)signs, v, _mm512_set1_pd(-0.0));
  return _mm512_permutexvar_pd(order, turned);
#else
  const VI bits = _mm256_sllv_epi64(_mm256_set1_epi64x((int64_t)signs), _mm256_setr_epi64x(63, 62, 61, 60));
  const D turned = _mm256_xor_pd(v, _mm256_and_pd(_mm256_castsi256_pd(bits), _mm256_set1_pd(-0.0)));
  const VI words = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), by = _mm256_set1_epi32((int)(flip % 4 * 2));
  return _mm256_castsi256_pd(
    _mm256_permutevar8x32_epi32(_mm256_castpd_si256(turned), _mm256_xor_si256(words, by)));
#endif
}

/* ---- float32 ---- */

#if WIDE
typedef __mmask16 MASK;
LANE MASK not_above(VF v, VF limit) { return _mm512_cmp_ps_mask(v, limit, _CMP_LE_OQ); }
LANE MASK equal_lanes(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
LANE MASK not_mask(MASK m) { return (MASK)~m; }
LANE VF chosen(MASK mask, VF yes, VF no) { return _mm512_mask_mov_ps(no, mask, yes); }
LANE unsigned mask_word(MASK mask) { return mask; }
LANE VI load_bits(const uint8_t *p) { return _mm512_loadu_si512(p); }
#else
typedef VF MASK;
LANE MASK not_above(VF v, VF limit) { return _mm256_cmp_ps(v, limit, _CMP_LE_OQ); }
LANE MASK equal_lanes(VF a, VF b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
LANE MASK not_mask(MASK m) { return _mm256_xor_ps(m, AS_FLOAT(_mm256_set1_epi32(-1))); }
LANE VF chosen(MASK mask, VF yes, VF no) { return _mm256_blendv_ps(no, yes, mask); }
LANE unsigned mask_word(MASK mask) { return (unsigned)_mm256_movemask_ps(mask); }
LANE VI load_bits(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
#endif

/* WIDTH elements in order. */
LANE VF load_lanes(const uint8_t *p, int kind) {
  if (kind == LANES_F32) return AS_FLOAT(load_bits(p));
#if WIDE
  __m256i half = _mm256_loadu_si256((const __m256i *)p);
#else
  __m128i half = _mm_loadu_si128((const __m128i *)p);
#endif
  if (kind == LANES_F16) return OP(cvtph_ps)(half);
  return AS_FLOAT(OP(slli_epi32)(OP(cvtepu16_epi32)(half), 16));
}

/* WIDTH elements as float64, in order. */
LANE void widen_lanes(VF v, D out[2]) {
#if WIDE
  out[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
  out[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#else
  out[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
  out[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#endif
}

/* The sum of all lanes, in float64, so that no digits are lost. */
LANE double sum_lanes(VF v) {
#if WIDE
  __m512d wide = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
  __m256d d = _mm256_add_pd(_mm512_castpd512_pd256(wide), _mm512_extractf64x4_pd(wide, 1));
#else
  __m256d d = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
#endif
  __m128d q = _mm_add_pd(_mm256_castpd256_pd128(d), _mm256_extractf128_pd(d, 1));
  return _mm_cvtsd_f64(_mm_add_sd(q, _mm_unpackhi_pd(q, q)));
}

LANE float max_lane(VF v) {
#if WIDE
  __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  __m256 h = v;
#endif
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
