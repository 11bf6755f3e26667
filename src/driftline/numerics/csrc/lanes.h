/* Float32 lanes and the loop over a pair. Compiled for AVX2 and for AVX-512. */

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
  VF sums[7] = {zero, zero, zero, zero, zero, zero, zero};
  VF max_ae = zero, min_r = OP(set1_ps)(INFINITY), max_r = OP(set1_ps)(-INFINITY);
  VI margin = OP(set1_epi32)(-1);
  int64_t equal = 0, outside = 0; /* counted on the scalar side, which has time and registers */
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  int hits = 0;
  for (int64_t from = 0, to; from < n; from = to) {
    /* A lane adds 32 numbers, then the lane joins its total: short chains keep float32's digits. */
    VF sx = zero, se = zero, sxx = zero, sxe = zero, see = zero, sae = zero, srel = zero;
    to = from + 32 * WIDTH < n ? from + 32 * WIDTH : n;
    for (int64_t i = from; i < to; i += 2 * WIDTH) {
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
    sums[0] = OP(add_ps)(sums[0], sx);
    sums[1] = OP(add_ps)(sums[1], se);
    sums[2] = OP(add_ps)(sums[2], sxx);
    sums[3] = OP(add_ps)(sums[3], sxe);
    sums[4] = OP(add_ps)(sums[4], see);
    sums[5] = OP(add_ps)(sums[5], sae);
    sums[6] = OP(add_ps)(sums[6], srel);
  }
  out->x = sum_lanes(sums[0]);
  out->e = sum_lanes(sums[1]);
  out->xx = sum_lanes(sums[2]);
  out->xe = sum_lanes(sums[3]);
  out->ee = sum_lanes(sums[4]);
  out->ae = sum_lanes(sums[5]);
  out->rel = sum_lanes(sums[6]);
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
