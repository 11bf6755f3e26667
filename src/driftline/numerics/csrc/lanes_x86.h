/* Float32 lanes of AVX2 and AVX-512: what the loops over pairs and summaries are made of. */

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

#undef DOTS
#if WIDTH == 16 && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#define DOTS 1
/* Two products of bfloat16 numbers to each lane; what is below float32's normal numbers counts as zero. Not by its
 * intrinsic: the rest of the path must run on processors without it. */
LANE_FN VF added_dots(VF sum, VI a, VI b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#else
#define DOTS 0
LANE_FN VF added_dots(VF sum, VI a, VI b) { (void)a, (void)b; return sum; } /* never asked */
#endif

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

#undef WORD_ENDS
#define WORD_ENDS 1 /* sixteen-bit words have minima and maxima of their own */
LANE_FN __m128i half_of_words(VI v, int least) {
#if WIDTH == 16
  __m256i a = _mm512_castsi512_si256(v), b = _mm512_extracti64x4_epi64(v, 1);
  __m256i h = least ? _mm256_min_epu16(a, b) : _mm256_max_epi16(a, b);
#else
  __m256i h = v;
#endif
  __m128i c = _mm256_castsi256_si128(h), d = _mm256_extracti128_si256(h, 1);
  return least ? _mm_min_epu16(c, d) : _mm_max_epi16(c, d);
}
LANE_FN unsigned least_code(VI v) { return (unsigned)_mm_cvtsi128_si32(_mm_minpos_epu16(half_of_words(v, 1))) & 0xFFFF; }
LANE_FN unsigned greatest_word(VI v) { /* signed; turned about, it is the least of codes */
  __m128i turned = _mm_xor_si128(half_of_words(v, 0), _mm_set1_epi16(0x7FFF));
  return ((unsigned)_mm_cvtsi128_si32(_mm_minpos_epu16(turned)) & 0xFFFF) ^ 0x7FFF;
}
LANE_FN unsigned greatest_code(VI v) { return 0xFFFF ^ least_code(v ^ OP(set1_epi32)(-1)); }
/* How many steps two sixteen-bit floats of one sign are apart; for others, no less than the codes that are no finite
 * numbers' leave: 129 (bfloat16) or 1025 (float16). */
LANE_FN VI word_steps(VI r, VI c) { return OP(abs_epi16)(OP(sub_epi16)(r, c)); }
/* Which lanes of two vectors are equal, as bits. */
LANE_FN unsigned equal_lanes(VF a, VF b) {
#if WIDTH == 16
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
#else
  return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
#endif
}

/* How many steps any two are apart: words made integers that grow with the value, both zeros alike. */
LANE_FN VI word_ordinal(VI v) {
  VI sign = OP(srai_epi16)(v, 15);
  return OP(sub_epi16)(AND_BITS(v, OP(set1_epi16)(0x7FFF)) ^ sign, sign);
}
LANE_FN VI word_distance(VI r, VI c) {
  VI a = word_ordinal(r), b = word_ordinal(c);
  return OP(sub_epi16)(OP(max_epi16)(a, b), OP(min_epi16)(a, b));
}
TARGET static unsigned least_code_of(const uint8_t *p, int64_t n) {
  VI least = OP(set1_epi32)(-1);
  for (int64_t i = 0; i < n; i += 2 * WIDTH) least = OP(min_epu16)(least, load_bits(p + 2 * i));
  return least_code(least);
}

/* Which lanes hold an error (AVX-512), or hold none (AVX2): each what its instructions like better. */
#undef SPLIT
#undef MASK
#undef TALLY
#undef NO_TALLY
#undef HIT
#undef NO_HIT
#define TALLY int64_t /* counted on the scalar side, which has time and registers */
#define NO_TALLY 0
#define HIT unsigned
#define NO_HIT 0
#if WIDTH == 16
#define SPLIT __mmask16
#define MASK __mmask16
#else
#define SPLIT VF
#define MASK VF
#endif

LANE_FN SPLIT split(VF e) {
#if WIDTH == 16
  return _mm512_cmp_ps_mask(e, _mm512_setzero_ps(), _CMP_NEQ_UQ);
#else
  return _mm256_cmp_ps(e, _mm256_setzero_ps(), _CMP_EQ_OQ);
#endif
}

LANE_FN VF relative(SPLIT s, VF ae, VF ar) {
#if WIDTH == 16
  return _mm512_maskz_div_ps(s, ae, ar);
#else
  return _mm256_andnot_ps(s, _mm256_div_ps(ae, ar));
#endif
}

/* What SPLIT says is what is counted; and how many of `n` had an error. */
LANE_FN TALLY tally_errors(TALLY tally, SPLIT s) {
#if WIDTH == 16
  return tally + __builtin_popcount(s);
#else
  return tally + __builtin_popcount((unsigned)_mm256_movemask_ps(s));
#endif
}
LANE_FN int64_t tallied_errors(TALLY tally, int64_t n) { return WIDTH == 16 ? tally : n - tally; }

LANE_FN TALLY tally_zeros(TALLY tally, VF v) {
  return WIDTH == 16 ? tally + WIDTH - tally_errors(0, split(v)) : tally_errors(tally, split(v));
}
LANE_FN int64_t tallied(TALLY tally) { return tally; }
LANE_FN int any_hit(HIT hit) { return hit != 0; }

/* One mark per two vectors, as many bytes as a mask has. */
enum { NAME(MARK) = WIDTH / 8 };
LANE_FN HIT mark(HIT any, uint8_t *marks, int64_t i, VF rel, VF limit, VF ae, VF least) {
#if WIDTH == 16
  unsigned here = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(rel, limit, _CMP_GT_OQ), ae, least, _CMP_GT_OQ);
  uint16_t two = (uint16_t)here;
  memcpy(marks + 2 * i, &two, 2);
  return any | here;
#else
  unsigned here = (unsigned)_mm256_movemask_ps(
    _mm256_and_ps(_mm256_cmp_ps(rel, limit, _CMP_GT_OQ), _mm256_cmp_ps(ae, least, _CMP_GT_OQ)));
  marks[i] = (uint8_t)here;
  return any | here;
#endif
}

/* Steps from one magnitude to another; where there is no error, all ones. */
LANE_FN VI steps_past(SPLIT s, VF ae, VF allowed) {
#if WIDTH == 16
  return _mm512_mask_sub_epi32(_mm512_set1_epi32(-1), s, AS_BITS(ae), AS_BITS(allowed));
#else
  return _mm256_or_si256(_mm256_sub_epi32(AS_BITS(ae), AS_BITS(allowed)), AS_BITS(s));
#endif
}

/* Steps of zero are counted or not: such a block is counted again. */
LANE_FN TALLY tally_past(TALLY tally, VI past) {
#if WIDTH == 16
  return tally + 16 - __builtin_popcount(_mm512_movepi32_mask(past));
#else
  return tally + 8 - __builtin_popcount((unsigned)_mm256_movemask_ps(AS_FLOAT(past)));
#endif
}

LANE_FN VI nearer(VI margin, VI past) { return OP(min_epu32)(margin, past); }
LANE_FN int too_near_zero(VI margin) { return least_lane(margin) <= MARGIN_STEPS; }
LANE_FN int all_finite(VF v) {
  const VF top = OP(set1_ps)(FLT_MAX);
#if WIDTH == 16
  return _mm512_cmp_ps_mask(v, top, _CMP_NLE_UQ) == 0;
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(v, top, _CMP_NLE_UQ)) == 0;
#endif
}

/* The greater of two magnitudes, where a third is beyond its limit. */
LANE_FN VI greatest_beyond(VI most, VI v, VF third, VF limit) {
#if WIDTH == 16
  return _mm512_mask_max_epi32(most, _mm512_cmp_ps_mask(third, limit, _CMP_GT_OQ), most, v);
#else
  return _mm256_max_epi32(most, AND_BITS(v, AS_BITS(_mm256_cmp_ps(third, limit, _CMP_GT_OQ))));
#endif
}

/* Not zero if some lane is greater than two limits. */
LANE_FN uint32_t any_beyond(VF a, VF a_limit, VF b, VF b_limit) {
#if WIDTH == 16
  return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(a, a_limit, _CMP_GT_OQ), b, b_limit, _CMP_GT_OQ);
#else
  return (uint32_t)_mm256_movemask_ps(
    _mm256_and_ps(_mm256_cmp_ps(a, a_limit, _CMP_GT_OQ), _mm256_cmp_ps(b, b_limit, _CMP_GT_OQ)));
#endif
}

LANE_FN TALLY tally_words(TALLY tally, VI a, VI b) {
#if WIDTH == 16
  return tally + __builtin_popcount(_mm512_cmpneq_epi16_mask(a, b));
#else
  return tally + __builtin_popcount((unsigned)_mm256_movemask_epi8(_mm256_cmpeq_epi16(a, b))); /* two where equal */
#endif
}
LANE_FN int64_t tallied_words(TALLY tally, int64_t n) { return WIDTH == 16 ? tally : n - tally / 2; }

/* How many of two vectors are negative; clipped to sixteen bits, signs and small numbers stay. */
LANE_FN TALLY tally_negative(TALLY tally, VI a, VI b) {
  VI v = OP(packs_epi32)(a, b);
#if WIDTH == 16
  return tally + __builtin_popcount(_mm512_movepi16_mask(v));
#else
  return tally + __builtin_popcount((unsigned)_mm256_movemask_epi8(v) & 0xAAAAAAAAu);
#endif
}
LANE_FN VI least_past(VI margin, VI a, VI b) { return OP(max_epu16)(margin, OP(packs_epi32)(a, b)); }
LANE_FN uint32_t too_near(VI margin) {
  const VI steps = OP(set1_epi16)(-MARGIN_STEPS);
#if WIDTH == 16
  return _mm512_cmp_epu16_mask(margin, steps, _MM_CMPINT_NLT);
#else
  return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_max_epu16(margin, steps), margin));
#endif
}

/* Which lanes are finite on both sides and no sentinels. */
LANE_FN MASK ordinary(VF r, VF c, VF r_mask, VF c_mask) {
  const VF top = OP(set1_ps)(FLT_MAX);
#if WIDTH == 16
  return _mm512_cmp_ps_mask(ABS(r), top, _CMP_LE_OQ) & _mm512_cmp_ps_mask(ABS(c), top, _CMP_LE_OQ) &
         _mm512_cmp_ps_mask(r, r_mask, _CMP_NEQ_UQ) & _mm512_cmp_ps_mask(c, c_mask, _CMP_NEQ_UQ);
#else
  return _mm256_and_ps(_mm256_and_ps(_mm256_cmp_ps(ABS(r), top, _CMP_LE_OQ), _mm256_cmp_ps(ABS(c), top, _CMP_LE_OQ)),
                       _mm256_and_ps(_mm256_cmp_ps(r, r_mask, _CMP_NEQ_UQ), _mm256_cmp_ps(c, c_mask, _CMP_NEQ_UQ)));
#endif
}

LANE_FN VF chosen(MASK mask, VF yes, VF no) {
#if WIDTH == 16
  return _mm512_mask_mov_ps(no, mask, yes);
#else
  return _mm256_blendv_ps(no, yes, mask);
#endif
}

LANE_FN unsigned mask_word(MASK mask) {
#if WIDTH == 16
  return mask;
#else
  return (unsigned)_mm256_movemask_ps(mask);
#endif
}

LANE_FN VI opposite_signs(VF r, VF c, VI yes, VI no) {
#if WIDTH == 16
  return _mm512_mask_mov_epi32(no, _mm512_movepi32_mask(_mm512_xor_si512(AS_BITS(r), AS_BITS(c))), yes);
#else
  return AS_BITS(_mm256_blendv_ps(AS_FLOAT(no), AS_FLOAT(yes), _mm256_xor_ps(r, c)));
#endif
}

#undef HALF_ORDINALS
#define HALF_ORDINALS 1 /* float16 can be rounded to in the lanes */
LANE_FN VI half_ordinals(VI magnitudes) {
  return OP(cvtepu16_epi32)(OP(cvtps_ph)(AS_FLOAT(magnitudes), _MM_FROUND_TO_NEAREST_INT));
}

/* Two vectors rounded to float16, as words. */
LANE_FN VI half_words(VF a, VF b) {
#if WIDTH == 16
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)),
                            _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT), 1);
#else
  return _mm256_set_m128i(_mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
#endif
}

/* How many float32 steps two numbers of one sign are apart; for others, very many. */
LANE_FN VI steps_of_bits(VF r, VF c) { return OP(abs_epi32)(OP(sub_epi32)(AS_BITS(r), AS_BITS(c))); }

/* Whether some lane, unsigned, is more than its limit. */
LANE_FN uint32_t any_more(VI v, VI limit) {
#if WIDTH == 16
  return _mm512_cmpgt_epu32_mask(v, limit) != 0;
#else
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(v, limit), limit)) != -1;
#endif
}

/* One half of a vector, in float64. */
LANE_FN vd widened(VF v, int half) {
#if WIDTH == 16
  return (vd)_mm512_cvtps_pd(half ? _mm512_extractf32x8_ps(v, 1) : _mm512_castps512_ps256(v));
#else
  return (vd)_mm256_cvtps_pd(half ? _mm256_extractf128_ps(v, 1) : _mm256_castps256_ps128(v));
#endif
}

/* Sixteen or eight of a group's values, signs turned, moved to their buckets' lanes. */
LANE_FN VF sketched(VF value, uint64_t signs, unsigned flip, unsigned v) {
  VI lanes_to = OP(set1_epi32)((int)(flip % WIDTH));
#if WIDTH == 16
  const VI iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  VI turned = _mm512_mask_xor_epi32(AS_BITS(value), (__mmask16)(signs >> (16 * v)), AS_BITS(value),
                                    _mm512_set1_epi32(INT32_MIN));
  return _mm512_permutexvar_ps(_mm512_xor_si512(lanes_to, iota), AS_FLOAT(turned));
#else
  const VI iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const VI to_top = _mm256_sub_epi32(_mm256_set1_epi32(31), iota), minus = _mm256_set1_epi32(INT32_MIN);
  VI sign = AND_BITS(_mm256_sllv_epi32(_mm256_set1_epi32((int)(signs >> (8 * v))), to_top), minus);
  return _mm256_permutevar8x32_ps(_mm256_xor_ps(value, AS_FLOAT(sign)), _mm256_xor_si256(lanes_to, iota));
#endif
}
