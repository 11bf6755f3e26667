/* The loop over a pair in float32 lanes, once per instruction set; the lanes are lanes_x86.h or lanes_plain.h. */

/* The extremes of 16-bit floats by their words: as signed integers the greatest is the greatest of the positive, as
 * unsigned ones the farthest of the negative. Where all have one sign, the other end is the least unsigned word. */
LANE_FN void word_ends(const uint8_t *p, int64_t n, int kind, VI top_word, VI top_code, Sums *out) {
#if WORD_ENDS
  uint16_t high = (uint16_t)greatest_word(top_word), low = (uint16_t)~least_code(~top_code);
  if ((high & 0x8000) || !(low & 0x8000)) {
    uint16_t other = least_code_of(p, n);
    if (high & 0x8000) high = other;
    else low = other;
  }
  out->max_r = kind == LANES_BF16 ? float_of((uint32_t)high << 16) : half_value(high);
  out->min_r = kind == LANES_BF16 ? float_of((uint32_t)low << 16) : half_value(low);
#else
  (void)p, (void)n, (void)kind, (void)top_word, (void)top_code, (void)out;
#endif
}

LANE_FN void fetch(const uint8_t *p, int bytes, int64_t ahead, int far_ahead) {
  for (int line = 0; line < bytes; line += 64) {
    __builtin_prefetch(p + line + ahead);
    if (far_ahead) __builtin_prefetch(p + line + FAR_AHEAD, 0, 2);
  }
}

/* Elements whose sums stay in float32. */
LANE_FN int64_t chain_of(int r_kind, int c_kind) {
  return (two_bytes(r_kind, c_kind) ? LONG_CHAIN : SHORT_CHAIN) * WIDTH;
}

/* The inner loop. n is a multiple of 2 * WIDTH; the numbers from `r_kind` to `news` are constants where it is inlined.
 * `plain`: nothing is subtracted from r, and 0 / 0 is let be: the sum of relative errors tells by being NaN.
 * `news`: how a new greatest relative error or ULP distance is noticed. BY_CHAINS finds neither, but names the chains
 * that can hold one: no relative error is greater than its lane's sum of them, and small errors are few ULPs.
 * `tolerant`: 0 where nothing is counted as outside but chains that may hold such an element, which are counted later.
 * `dots`: the processor multiplies and adds pairs of bfloat16.
 * `far_ahead`: bytes that far ahead are fetched as well, into the second cache. */
LANE_FN void sum_block(const uint8_t *r_at, const uint8_t *c_at, int64_t n, int r_kind, int c_kind, int tolerant,
                       int plain, int news, int dots, int far_ahead, const Knobs *k, Sums *out) {
  const int64_t length = chain_of(r_kind, c_kind);
  const int by_words = news == BY_WORDS, by_chains = news == BY_CHAINS;
  /* Where roundings alone are great errors, the chains' own greatest tells nothing about relative errors. */
  const int sharp = by_chains && c_kind == LANES_BF16, by_codes = sharp && WORD_ENDS && r_kind == LANES_BF16;
  const VF zero = OP(setzero_ps)(), shift = OP(set1_ps)(k->shift), limit = OP(set1_ps)(k->limit);
  const VF near_limit = OP(set1_ps)(k->least_ae), known_rel = OP(set1_ps)(k->known_rel);
  const VF atol = OP(set1_ps)(k->atol), rtol = OP(set1_ps)(k->rtol);
  VF sums[7] = {zero, zero, zero, zero, zero, zero, zero};
  VF min_r = OP(set1_ps)(INFINITY), max_r = OP(set1_ps)(-INFINITY);
  VI max_ae = AS_BITS(zero), max_rel = AS_BITS(zero); /* of what has no sign, as integers: those units are idle */
  VI word = OP(set1_epi32)((int)0x80008000u), code = AS_BITS(zero);
  const int words = WORD_ENDS && r_kind != LANES_F32, alike = words && plain && r_kind == c_kind;
  /* A float32 reference against 16 bits that are hardly more than its rounding. */
  const int by_bits = by_words && r_kind == LANES_F32 && c_kind == LANES_BF16;
  const int by_halves = by_words && r_kind == LANES_F32 && c_kind == LANES_F16;
  const VI bit_steps = OP(set1_epi32)((int)k->bit_steps);
  const VF calm_ae = OP(set1_ps)(k->calm_ae), calm_rel = OP(set1_ps)(k->calm_rel);
  const int counts = k->calm_ae <= FLT_MAX;
  VI steps = AS_BITS(zero), sum = AS_BITS(zero);
  TALLY differ = NO_TALLY, outside = NO_TALLY;
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  const int64_t ahead = k->ahead;
  uint32_t far_any = 0, rel_any = 0, near_any = 0;
  HIT any = NO_HIT;
  Chain *chain = out->chain;
  for (int64_t from = 0, to; from < n; from = to, chain++) {
    /* A lane adds 32 or 48 numbers, then the lane joins its total: short chains keep float32's digits. */
    VF sx = zero, se = zero, sxx = zero, sxe = zero, see = zero, sae = zero, srel = zero;
    VI margin = AS_BITS(zero), nearest = OP(set1_epi32)(-1), peak = AS_BITS(zero), chain_ae = AS_BITS(zero);
    VI off = AS_BITS(zero), peak_rel = AS_BITS(zero);
    const TALLY before = outside;
    to = from + length < n ? from + length : n;
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
      fetch(r_at + r_size * i, 2 * WIDTH * r_size, ahead, far_ahead);
      fetch(c_at + c_size * i, 2 * WIDTH * c_size, ahead, far_ahead);
      if (words) {
        VI r = load_bits(r_at + 2 * i);
        word = OP(max_epi16)(word, r);
        code = OP(max_epu16)(code, r);
        /* Zeros of opposite signs differ here only; with them there is a 0 / 0, and the block is not used. */
        if (alike) {
          VI c = load_bits(c_at + 2 * i);
          differ = tally_words(differ, r, c);
          if (by_words) steps = OP(max_epu16)(steps, word_steps(r, c));
          if (by_codes) sum = OP(max_epu16)(sum, OP(add_epi16)(r, c));
        }
      }
      if (by_bits) off = OP(max_epu32)(OP(max_epu32)(off, steps_of_bits(rs[0], cs[0])), steps_of_bits(rs[1], cs[1]));
      if (by_halves) steps = OP(max_epu16)(steps, word_steps(half_words(rs[0], rs[1]), load_bits(c_at + 2 * i)));
      /* Step by step for both: few numbers live at a time, so that sums stay in registers where those are few. The two of
       * a lane are added first: a total that waits in memory is met once only. */
      VF xs[2], es[2], aes[2], ars[2], rels[2];
      VI lefts[2];
      for (int half = 0; half < 2; half++) {
        xs[half] = plain ? rs[half] : OP(sub_ps)(rs[half], shift);
        es[half] = OP(sub_ps)(cs[half], rs[half]);
        if (words) continue;
        min_r = OP(min_ps)(min_r, rs[half]);
        max_r = OP(max_ps)(max_r, rs[half]);
      }
      if (dots) sx = added_dots(sx, load_bits(r_at + 2 * i), OP(set1_epi32)(0x3F803F80));
      else sx = OP(add_ps)(sx, OP(add_ps)(xs[0], xs[1]));
      if (dots) se = added_dots(se, load_bits(c_at + 2 * i), OP(set1_epi32)(0x3F803F80)); /* of c, for now */
      else se = OP(add_ps)(se, OP(add_ps)(es[0], es[1]));
      if (dots) sxx = added_dots(sxx, load_bits(r_at + 2 * i), load_bits(r_at + 2 * i));
      for (int half = 0; half < 2; half++) {
        if (!dots) sxx = OP(fmadd_ps)(xs[half], xs[half], sxx);
        sxe = OP(fmadd_ps)(xs[half], es[half], sxe);
        see = OP(fmadd_ps)(es[half], es[half], see);
      }
      for (int half = 0; half < 2; half++) {
        VF ae = ABS(es[half]), ar = ABS(rs[half]);
        SPLIT errors = split(es[half]);
        rels[half] = plain ? OP(div_ps)(ae, ar) : relative(errors, ae, ar);
        if (!alike) differ = tally_errors(differ, errors);
        aes[half] = ae;
        ars[half] = ar;
        if (tolerant != EXACT_NEAR_ZERO) continue;
        VI past = steps_past(errors, ae, OP(mul_ps)(rtol, ar));
        outside = tally_past(outside, past);
        nearest = nearer(nearest, past);
      }
      sae = OP(add_ps)(sae, OP(add_ps)(aes[0], aes[1]));
      if (tolerant == TOLERANT) {
        for (int half = 0; half < 2; half++) {
          VF allowed = OP(fmadd_ps)(rtol, ars[half], atol);
          /* How many float32 steps are left to what is allowed; negative, so unsigned large, where outside. */
          lefts[half] = OP(sub_epi32)(AS_BITS(allowed), AS_BITS(aes[half]));
        }
        outside = tally_negative(outside, lefts[0], lefts[1]);
        margin = least_past(margin, lefts[0], lefts[1]);
      }
      srel = OP(add_ps)(srel, OP(add_ps)(rels[0], rels[1]));
      VI ae = OP(max_epi32)(AS_BITS(aes[0]), AS_BITS(aes[1]));
      peak = OP(max_epi32)(peak, ae);
      if (by_codes || (by_chains && !sharp)) continue;
      VI rel = OP(max_epi32)(AS_BITS(rels[0]), AS_BITS(rels[1]));
      if (sharp) chain_ae = greatest_beyond(chain_ae, ae, AS_FLOAT(rel), limit);
      else peak_rel = OP(max_epi32)(peak_rel, rel);
      if (news == BY_MARKS) any = mark(any, out->marks, i / (2 * WIDTH), AS_FLOAT(rel), limit, AS_FLOAT(ae), near_limit);
    }
    /* What a chain may hold is only noted, and looked at after the block: of two blocks, one has nothing of it. */
    if (by_chains) {
      far_any |= chain->far = by_codes ? 0 : any_beyond(srel, limit, AS_FLOAT(sharp ? chain_ae : peak), near_limit);
      rel_any |= chain->rel = any_beyond(srel, known_rel, srel, known_rel);
    }
    if (by_bits) far_any |= chain->far = any_more(off, bit_steps);
    if (tolerant == TOLERANT) near_any |= chain->near = too_near(margin);
    if (!tolerant && counts)
      near_any |= chain->near = any_beyond(AS_FLOAT(peak), calm_ae, by_chains ? srel : AS_FLOAT(peak_rel), calm_rel);
    if (tolerant == EXACT_NEAR_ZERO) {
      near_any |= chain->near = (uint32_t)too_near_zero(nearest);
      if (chain->near) outside = before;
    }
    max_ae = OP(max_epi32)(max_ae, peak), max_rel = OP(max_epi32)(max_rel, peak_rel);
    sums[0] = OP(add_ps)(sums[0], sx);
    sums[1] = OP(add_ps)(sums[1], se);
    sums[2] = OP(add_ps)(sums[2], sxx);
    sums[3] = OP(add_ps)(sums[3], sxe);
    sums[4] = OP(add_ps)(sums[4], see);
    sums[5] = OP(add_ps)(sums[5], sae);
    sums[6] = OP(add_ps)(sums[6], srel);
  }
  out->far_chains = out->rel_chains = out->near_chains = 0;
  if (far_any | rel_any | near_any) {
    const int chains = (int)(chain - out->chain);
    for (int i = 0; i < chains; i++) {
      if (far_any) out->far_chains |= (uint64_t)(out->chain[i].far != 0) << i;
      if (rel_any) out->rel_chains |= (uint64_t)(out->chain[i].rel != 0) << i;
      if (near_any) out->near_chains |= (uint64_t)(out->chain[i].near != 0) << i;
    }
  }
  out->x = sum_lanes(sums[0]);
  out->e = dots ? sum_lanes(sums[1]) - out->x : sum_lanes(sums[1]);
  out->xx = sum_lanes(sums[2]);
  out->xe = sum_lanes(sums[3]);
  out->ee = sum_lanes(sums[4]);
  out->ae = sum_lanes(sums[5]);
  out->rel = sum_lanes(sums[6]);
  out->max_ae = max_lane(AS_FLOAT(max_ae));
  out->max_rel = max_lane(AS_FLOAT(max_rel));
  if (words) {
    word_ends(r_at, n, r_kind, word, code, out);
  } else {
    out->min_r = min_lane(min_r);
    out->max_r = max_lane(max_r);
  }
  out->differ = alike ? tallied_words(differ, n) : tallied_errors(differ, n);
  out->outside = tallied(outside);
  out->counted = tolerant == TOLERANT;
  out->marked = any_hit(any);
  if (by_words && (alike || by_halves)) out->far = greatest_code(steps);
  out->both = by_codes ? greatest_code(sum) : 0;
}

#undef RARE_CASE_BODY
#define RARE_CASE_BODY(r_kind, c_kind)                                                        \
    if (tolerant == TOLERANT) sum_block(r, c, n, r_kind, c_kind, TOLERANT, 0, BY_MARKS, 0, 0, k, out); \
    else if (tolerant) sum_block(r, c, n, r_kind, c_kind, EXACT_NEAR_ZERO, 0, BY_MARKS, 0, 0, k, out); \
    else sum_block(r, c, n, r_kind, c_kind, 0, 0, BY_MARKS, 0, 0, k, out);                           \
    break
#undef PLAIN_SUMS
#define PLAIN_SUMS(r_kind, c_kind, by, dots, far_ahead)                                       \
    if (tolerant && k->rough) sum_block(r, c, n, r_kind, c_kind, TOLERANT, 1, by, dots, far_ahead, k, out); \
    else sum_block(r, c, n, r_kind, c_kind, 0, 1, by, dots, far_ahead, k, out);                \
    break
/* Formats that some processor wants from far ahead have a loop of their own for it. */
#undef PLAIN_BODY
#define PLAIN_BODY(r_kind, c_kind, by, dots)                                                  \
    if (WIDTH == 16 && (c_kind == LANES_F32 || dots) && k->far_ahead) { PLAIN_SUMS(r_kind, c_kind, by, dots, 1); } \
    PLAIN_SUMS(r_kind, c_kind, by, dots, 0)
#undef CASE
#define CASE(r_kind, c_kind)                                                                  \
  case r_kind * 3 + c_kind:                                                                   \
    if (plain && k->news == BY_CHAINS) { PLAIN_BODY(r_kind, c_kind, BY_CHAINS, 0); }          \
    if (plain) { PLAIN_BODY(r_kind, c_kind, BY_MARKS, 0); }                                   \
    RARE_CASE_BODY(r_kind, c_kind)
#undef MIXED_CASE
#define MIXED_CASE(r_kind, c_kind)                                                            \
  case r_kind * 3 + c_kind:                                                                   \
    if (plain && k->news == BY_CHAINS) { PLAIN_BODY(r_kind, c_kind, BY_CHAINS, 0); }          \
    if (plain && (c_kind == LANES_BF16 || HALF_ORDINALS) && k->news == BY_WORDS) {            \
      PLAIN_BODY(r_kind, c_kind, BY_WORDS, 0);                                                \
    }                                                                                         \
    if (plain) { PLAIN_BODY(r_kind, c_kind, BY_MARKS, 0); }                                   \
    RARE_CASE_BODY(r_kind, c_kind)
#undef WORD_CASE
#define WORD_CASE(kind)                                                                       \
  case kind * 3 + kind:                                                                       \
    if (plain && DOTS && kind == LANES_BF16 && k->dots) {                                     \
      if (k->news == BY_CHAINS) { PLAIN_BODY(kind, kind, BY_CHAINS, DOTS); }                  \
      if (k->news == BY_WORDS) { PLAIN_BODY(kind, kind, BY_WORDS, DOTS); }                    \
    }                                                                                         \
    if (plain && k->news == BY_CHAINS) { PLAIN_BODY(kind, kind, BY_CHAINS, 0); }              \
    if (plain && WORD_ENDS && k->news == BY_WORDS) { PLAIN_BODY(kind, kind, BY_WORDS, 0); }   \
    if (plain) { PLAIN_BODY(kind, kind, BY_MARKS, 0); }                                       \
    RARE_CASE_BODY(kind, kind)
#undef RARE_CASE
#define RARE_CASE(r_kind, c_kind)                                                             \
  case r_kind * 3 + c_kind:                                                                   \
    RARE_CASE_BODY(r_kind, c_kind)

TARGET static void sum_kinds(const uint8_t *r, const uint8_t *c, int64_t n, int r_kind, int c_kind, int tolerant,
                             const Knobs *k, Sums *out) {
  const int plain = k->shift == 0.0f && !k->zeros && tolerant != EXACT_NEAR_ZERO;
  out->far = 0;
  switch (r_kind * 3 + c_kind) {
#if defined(NARROW) /* float16, and what was patched of it */
    WORD_CASE(LANES_F16);
    RARE_CASE(LANES_F32, LANES_F32);
#else
    CASE(LANES_F32, LANES_F32);
    MIXED_CASE(LANES_F32, LANES_BF16);
    MIXED_CASE(LANES_F32, LANES_F16);
    WORD_CASE(LANES_BF16);
    WORD_CASE(LANES_F16);
    RARE_CASE(LANES_BF16, LANES_F32);
    RARE_CASE(LANES_BF16, LANES_F16);
    RARE_CASE(LANES_F16, LANES_F32);
    RARE_CASE(LANES_F16, LANES_BF16);
#endif
  }
}

/* The candidate's extremes; wanted only when the reference's and the greatest error cannot rule out new ones. */
LANE_FN void extremes(const uint8_t *p, int64_t n, int kind, double *low, double *high) {
  if (WORD_ENDS && kind != LANES_F32) {
    VI word = OP(set1_epi32)((int)0x80008000u), code = OP(set1_epi32)(0);
    for (int64_t i = 0; i < n; i += 2 * WIDTH) {
      VI v = load_bits(p + 2 * i);
      word = OP(max_epi16)(word, v);
      code = OP(max_epu16)(code, v);
    }
    Sums ends;
    word_ends(p, n, kind, word, code, &ends);
    *low = ends.min_r;
    *high = ends.max_r;
    return;
  }
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
    a = half_ordinals(a);
    b = half_ordinals(b);
  }
  VI apart = OP(sub_epi32)(OP(max_epu32)(a, b), OP(min_epu32)(a, b));
  return opposite_signs(r, c, OP(add_epi32)(a, b), apart);
}
