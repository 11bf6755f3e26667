/* A pair through the float32 lanes, and what a block's sums cannot tell. */

/* ULP distances are gathered in `far` where lanes can tell them, and otherwise in `s` at once. */
LANE_FN int lanes_tell_ulps(int dtype) { return dtype == F32 || dtype == BF16 || (dtype == F16 && HALF_ORDINALS); }

LANE_FN VI farther_ulps(Pair *s, VI far, VF r, VF c) {
  int dtype = s->dtype[1];
  if (lanes_tell_ulps(dtype)) return OP(max_epu32)(far, ulp_distance(r, c, dtype));
  for (int part = 0; part < 2 && s->format[1].is_float; part++) {
    uint64_t u = greatest_u(ulp_lanes(widened(r, part), widened(c, part), &s->format[1]));
    if (u > s->ulp) s->ulp = u;
  }
  return far;
}

/* Whether there was one greater than `before`. */
LANE_FN int ulp_news(Pair *s, VI far, uint64_t before) {
  /* The greatest of unsigned lanes is the complement of the least complement. */
  uint32_t u = ~least_lane(OP(sub_epi32)(OP(set1_epi32)(-1), far));
  if (u > s->ulp) s->ulp = u;
  return s->ulp > before;
}

/* The ULP distances in the places that were marked. */
TARGET static int visit_hits(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t n,
                             const Sums *b) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  VI far = OP(set1_epi32)(0);
  uint64_t before = s->ulp;
  const int64_t marks = n / (2 * WIDTH) * NAME(MARK);
  for (int64_t at = 0; at < marks; at += NAME(MARK)) {
    if (at % 8 == 0 && at + 8 <= marks && read64(b->marks + at) == 0) {
      at += 8 - NAME(MARK);
      continue;
    }
    if (b->marks[at] == 0 && b->marks[at + NAME(MARK) - 1] == 0) continue;
    for (int half = 0; half < 2; half++) {
      int64_t i = at / NAME(MARK) * (2 * WIDTH) + half * WIDTH;
      far = farther_ulps(s, far, load_lanes(r_at + r_size * i, r_kind), load_lanes(c_at + c_size * i, c_kind));
    }
  }
  return ulp_news(s, far, before);
}

/* The ULP distances of some elements. */
TARGET static int visit_all(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t n) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  VI far = OP(set1_epi32)(0);
  uint64_t before = s->ulp;
  if (WORD_ENDS && r_kind == c_kind && r_kind != LANES_F32) {
    for (int64_t i = 0; i < n; i += 2 * WIDTH)
      far = OP(max_epu16)(far, word_distance(load_bits(r_at + 2 * i), load_bits(c_at + 2 * i)));
    unsigned u = greatest_code(far);
    if (u > s->ulp) s->ulp = u;
    return s->ulp > before;
  }
  for (int64_t i = 0; i < n; i += WIDTH)
    far = farther_ulps(s, far, load_lanes(r_at + r_size * i, r_kind), load_lanes(c_at + c_size * i, c_kind));
  return ulp_news(s, far, before);
}

/* The greatest relative error of a chain, which may be new. */
TARGET static void visit_relative(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t n) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  VI most = OP(set1_epi32)(0);
  for (int64_t i = 0; i < n; i += WIDTH) {
    VF r = load_lanes(r_at + r_size * i, r_kind), e = OP(sub_ps)(load_lanes(c_at + c_size * i, c_kind), r);
    most = OP(max_epi32)(most, AS_BITS(relative(split(e), ABS(e), ABS(r))));
  }
  float rel = max_lane(AS_FLOAT(most));
  if (rel > s->m.max_rel_e) s->m.max_rel_e = rel;
}

/* How many float32 steps are left to what is allowed, for two vectors; negative where outside. */
LANE_FN void find_lefts(VI *lefts, const VF *rs, const VF *cs, const Knobs *k) {
  const VF atol = OP(set1_ps)(k->atol), rtol = OP(set1_ps)(k->rtol);
  for (int half = 0; half < 2; half++)
    lefts[half] = OP(sub_epi32)(AS_BITS(OP(fmadd_ps)(rtol, ABS(rs[half]), atol)),
                                AS_BITS(ABS(OP(sub_ps)(cs[half], rs[half]))));
}

/* Elements outside the tolerance, of a chain where one came too close to it for float32 to tell: two vectors with such
 * a one in float64. `counted`: float32's own count is known, and only what it is wrong by is asked. */
LANE_FN int64_t recount(const Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t n,
                        int tolerant, int counted, const Knobs *k) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  const vd atol = lanes(s->atol), rtol = lanes(s->rtol);
  uint32_t near = (uint32_t)((1ull << n / (2 * WIDTH)) - 1);
  int64_t outside = 0;
  VF rs[2], cs[2];
  VI lefts[2];
  if (tolerant == TOLERANT) {
    near = 0;
    for (int64_t i = 0, bit = 0; i < n; i += 2 * WIDTH, bit++) {
      for (int half = 0; half < 2; half++) {
        rs[half] = load_lanes(r_at + r_size * (i + half * WIDTH), r_kind);
        cs[half] = load_lanes(c_at + c_size * (i + half * WIDTH), c_kind);
      }
      find_lefts(lefts, rs, cs, k);
      near |= (uint32_t)(too_near(least_past(OP(set1_epi32)(0), lefts[0], lefts[1])) != 0) << bit;
      if (!counted) outside += tallied(tally_negative(NO_TALLY, lefts[0], lefts[1]));
    }
  }
  for (; near; near &= near - 1) {
    const int64_t i = (int64_t)__builtin_ctz(near) * 2 * WIDTH;
    vl exact = lanes_l(0);
    for (int half = 0; half < 2; half++) {
      rs[half] = load_lanes(r_at + r_size * (i + half * WIDTH), r_kind);
      cs[half] = load_lanes(c_at + c_size * (i + half * WIDTH), c_kind);
    }
    find_lefts(lefts, rs, cs, k);
    if (tolerant == TOLERANT) outside -= tallied(tally_negative(NO_TALLY, lefts[0], lefts[1]));
    for (int part = 0; part < 4; part++) {
      vd a = widened(rs[part / 2], part % 2), ae = magnitude(widened(cs[part / 2], part % 2) - a);
      exact -= ~(ae <= atol + rtol * magnitude(a));
    }
    outside += total_l(exact);
  }
  return outside;
}

/* Float16's numbers are few, and meet the tolerance often. */
TARGET static int64_t recount_kinds(const Pair *s, const uint8_t *r, const uint8_t *c, int r_kind, int c_kind, int64_t n,
                                    int tolerant, int counted, const Knobs *k) {
  if (r_kind == LANES_F16 && c_kind == LANES_F16) return recount(s, r, c, LANES_F16, LANES_F16, n, tolerant, counted, k);
  if (r_kind == LANES_F32 && c_kind == LANES_F16) return recount(s, r, c, LANES_F32, LANES_F16, n, tolerant, counted, k);
  return recount(s, r, c, r_kind, c_kind, n, tolerant, counted, k);
}

/* Where the first difference stands. */
TARGET static int64_t first_error(const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t n) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  for (int64_t i = 0; i < n; i += WIDTH) {
    unsigned same = equal_lanes(load_lanes(r_at + r_size * i, r_kind), load_lanes(c_at + c_size * i, c_kind));
    unsigned differ = ~same & ((1u << WIDTH) - 1);
    if (differ) return i + __builtin_ctz(differ);
  }
  return -1;
}

/* Where the greatest error stands, and which it is: in float64, among those that are the greatest to float32. */
LANE_FN void greatest_error(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t base,
                            int64_t n, float most) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  const VF top = OP(set1_ps)(most);
  for (int64_t i = 0; i < n; i += WIDTH) {
    VF r = load_lanes(r_at + r_size * i, r_kind), c = load_lanes(c_at + c_size * i, c_kind);
    unsigned those = equal_lanes(ABS(OP(sub_ps)(c, r)), top);
    if (!those) continue;
    float rs[WIDTH], cs[WIDTH];
    OP(storeu_ps)(rs, r);
    OP(storeu_ps)(cs, c);
    for (; those; those &= those - 1) {
      int lane = __builtin_ctz(those);
      double ae = fabs((double)cs[lane] - (double)rs[lane]);
      if (!(ae > s->m.max_abs_e)) continue;
      s->m.max_abs_e = ae;
      s->m.max_abs_e_at = base + i + lane;
    }
  }
}

TARGET static void greatest_kinds(Pair *s, const uint8_t *r, const uint8_t *c, int r_kind, int c_kind, int64_t base,
                                  int64_t n, float most) {
  if (r_kind == LANES_F32 && c_kind == LANES_F32) greatest_error(s, r, c, LANES_F32, LANES_F32, base, n, most);
  else if (r_kind == LANES_BF16 && c_kind == LANES_BF16) greatest_error(s, r, c, LANES_BF16, LANES_BF16, base, n, most);
  else if (r_kind == LANES_F16 && c_kind == LANES_F16) greatest_error(s, r, c, LANES_F16, LANES_F16, base, n, most);
  else greatest_error(s, r, c, r_kind, c_kind, base, n, most);
}

/* A piece with something infinite, not a number or a sentinel in it, made fit for the lanes: such pairs are measured
 * one by one and become shift against shift, which adds nothing to any sum. Returns how many, -1 for too many. */
TARGET static int64_t patch_block(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t base,
                                  int64_t n, const Knobs *k, float *r_out, float *c_out, Sums *ends, double *c_ends) {
  const VF shift = OP(set1_ps)(k->shift);
  const VF r_mask = OP(set1_ps)((float)s->format[0].sentinel), c_mask = OP(set1_ps)((float)s->format[1].sentinel);
  VF lo = OP(set1_ps)(INFINITY), hi = OP(set1_ps)(-INFINITY), c_lo = lo, c_hi = hi;
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  uint16_t odd[PIECE / 4];
  int64_t odds = 0;
  for (int64_t i = 0; i < n; i += WIDTH) {
    VF r = load_lanes(r_at + r_size * i, r_kind), c = load_lanes(c_at + c_size * i, c_kind);
    MASK ok = ordinary(r, c, r_mask, c_mask);
    lo = OP(min_ps)(lo, chosen(ok, r, lo));
    hi = OP(max_ps)(hi, chosen(ok, r, hi));
    c_lo = OP(min_ps)(c_lo, chosen(ok, c, c_lo));
    c_hi = OP(max_ps)(c_hi, chosen(ok, c, c_hi));
    OP(storeu_ps)(r_out + i, chosen(ok, r, shift));
    OP(storeu_ps)(c_out + i, chosen(ok, c, shift));
    for (unsigned bad = ~mask_word(ok) & ((1u << WIDTH) - 1); bad; bad &= bad - 1) {
      if (odds == PIECE / 4) return -1;
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
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  m->outside += tolerant ? b->outside : b->differ;
  const int64_t length = chain_of(r_kind, c_kind);
  for (uint64_t left = b->near_chains; left; left &= left - 1) {
    int64_t at = (int64_t)__builtin_ctzll(left) * length, many = n - at < length ? n - at : length;
    m->outside += recount_kinds(s, r + at * r_size, c + at * c_size, r_kind, c_kind, many, tolerant, b->counted, k);
  }
  for (uint64_t left = b->rel_chains; left; left &= left - 1) {
    int64_t at = (int64_t)__builtin_ctzll(left) * length, many = n - at < length ? n - at : length;
    visit_relative(s, r + at * r_size, c + at * c_size, r_kind, c_kind, many);
  }
  for (uint64_t left = b->far_chains; left; left &= left - 1) {
    int64_t at = (int64_t)__builtin_ctzll(left) * length, many = n - at < length ? n - at : length;
    if (visit_all(s, r + at * r_size, c + at * c_size, r_kind, c_kind, many)) set_limit(s, k);
  }
  int64_t looked = (__builtin_popcountll(b->far_chains) + __builtin_popcountll(b->rel_chains)) * length;
  if (b->both && !codes_rule_out(s, k, b)) {
    looked += n;
    if (visit_all(s, r, c, r_kind, c_kind, n)) set_limit(s, k);
  }
  weigh_news(k, looked, n);
  weigh_calm(k, __builtin_popcountll(b->near_chains) * length, n);
  if (b->far > s->ulp) {
    if (visit_all(s, r, c, r_kind, c_kind, n)) set_limit(s, k);
  }
  if (b->marked) {
    if (visit_hits(s, r, c, r_kind, c_kind, n, b)) set_limit(s, k);
  }
  /* Rarely news, so looked up again. Errors alike to float32 are alike: the first keeps the place. */
  if (b->differ && (m->first_different_at < 0 || m->first_different_at >= base))
    note_first(&m->first_different_at, base + first_error(r, c, r_kind, c_kind, n));
  if (b->max_ae > (float)m->max_abs_e) greatest_kinds(s, r, c, r_kind, c_kind, base, n, b->max_ae);
}

/* How many elements stand before the first chain that holds something not finite. */
TARGET static int64_t sound_before(const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t n) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  const int64_t length = chain_of(r_kind, c_kind);
  const int by_words = WORD_ENDS && r_kind == c_kind && r_kind != LANES_F32;
  const unsigned infinite = r_kind == LANES_F16 ? 0xF800 : 0xFF00; /* without its sign, a bit higher up */
  for (int64_t from = 0; from < n; from += length) {
    const int64_t to = from + length < n ? from + length : n;
    VI most = OP(set1_epi32)(0);
    for (int64_t i = from; by_words && i < to; i += 2 * WIDTH) {
      VI r = load_bits(r_at + 2 * i), c = load_bits(c_at + 2 * i);
      most = OP(max_epu16)(most, OP(max_epu16)(OP(add_epi16)(r, r), OP(add_epi16)(c, c)));
    }
    for (int64_t i = from; !by_words && i < to; i += WIDTH) {
      VF e = OP(sub_ps)(load_lanes(c_at + c_size * i, c_kind), load_lanes(r_at + r_size * i, r_kind));
      most = OP(max_epi32)(most, AS_BITS(ABS(e)));
    }
    if (by_words ? greatest_code(most) >= infinite : !all_finite(AS_FLOAT(most))) return from;
  }
  return n;
}

/* The sums of what is sound; returns how much that is. Where something was not finite of late, that is asked first. */
LANE_FN int64_t sum_sound(const uint8_t *r, const uint8_t *c, int64_t n, int r_kind, int c_kind, int tolerant, Knobs *k,
                          Sums *b) {
  const int at_once = k->wary == 0;
  if (at_once) {
    sum_kinds(r, c, n, r_kind, c_kind, tolerant, k, b);
    if (b->ae <= DBL_MAX) return n;
  }
  int64_t sound = sound_before(r, c, r_kind, c_kind, n);
  if (sound < n) k->wary = WARY_BLOCKS;
  else if (at_once) return n; /* finite, and yet their sum is not: it need not be taken again */
  else k->wary--;
  if (sound > 0) sum_kinds(r, c, sound, r_kind, c_kind, tolerant, k, b);
  return sound;
}

/* Returns how many elements were taken; if none, `odd` says that something is not finite among the first ones. */
TARGET static int64_t fast_block(Pair *s, int64_t base, int64_t n, int r_kind, int c_kind, int tolerant, Knobs *k,
                                 int *odd) {
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
  double spread_r, spread_c;
  choose_news(s, k);
  k->calm_ae = tolerant == TOLERANT ? k->atol : INFINITY;
  k->calm_rel = k->rtol;
  int64_t sound = sum_sound(r, c, n, r_kind, c_kind, tolerant, k, &b);
  if (sound > 0 && b.rel != b.rel) { /* 0 / 0 */
    mind_zeros(k);
    sum_kinds(r, c, sound, r_kind, c_kind, tolerant, k, &b);
  } else if (k->zeros > 0) {
    k->zeros--;
  } else if (k->zeros_for > 0) {
    k->zeros_for--;
  }
  *odd = sound == 0;
  if (sound == 0 || b.min_r <= s->format[0].sentinel) {
    Moments saved = *m;
    Spread spreads[2] = {s->spread[0], s->spread[1]};
    int zeros = k->zeros;
    float clean[2][PIECE] __attribute__((aligned(64)));
    double c_ends[2];
    Sums ends;
    if (n > PIECE || !(fabsf(k->shift) <= FLT_MAX)) return 0;
    int64_t odds = patch_block(s, r, c, r_kind, c_kind, base, n, k, clean[0], clean[1], &ends, c_ends);
    if (odds < 0) return 0;
    r = (const uint8_t *)clean[0];
    c = (const uint8_t *)clean[1];
    r_kind = c_kind = LANES_F32;
    double count = (double)(n - odds);
    k->zeros = 1; /* shift against shift may be that, too */
    k->news = BY_MARKS;
    sum_kinds(r, c, n, r_kind, c_kind, tolerant, k, &b);
    k->zeros = zeros;
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
    return n;
  }
  n = sound;
  double low = (double)b.min_r - b.max_ae * (1 + 0x1p-22), high = (double)b.max_r + b.max_ae * (1 + 0x1p-22);
  double count = (double)n;
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
  return n;
}

TARGET static void pair(Pair *s, int64_t count) {
  int r_kind = lane_kind(s->dtype[0]), c_kind = lane_kind(s->dtype[1]);
  int tolerant = s->atol != 0.0 ? TOLERANT : s->rtol != 0.0 ? EXACT_NEAR_ZERO : 0;
  int fast = r_kind != LANES_NONE && c_kind != LANES_NONE && !s->widen[0] && !s->widen[1] &&
             tolerance_fits(s->atol) && tolerance_fits(s->rtol) &&
             (s->format[1].is_float || !s->format[0].is_float); /* integers' ULPs are their errors */
  Knobs k = {.atol = (float)(s->atol * TOLERANCE_SHADE), .rtol = (float)(s->rtol * TOLERANCE_SHADE)};
  k.dots = s->dots;
  int wide_bf16 = WIDTH == 16 && r_kind == LANES_BF16 && c_kind == LANES_BF16;
  k.ahead = s->halves && !wide_bf16 ? AHEAD_IN_HALVES : AHEAD;
  k.far_ahead = s->halves ? wide_bf16 : WIDTH == 16 && r_kind == LANES_F32 && c_kind == LANES_F32;
  k.wait = 2;
  k.patience = 8;
  if (fast && count >= 16) {
    double sample[16], sum = 0, squares = 0;
    decode_double(s->data[0], s->dtype[0], 0, 16, sample);
    for (int i = 0; i < 16; i++) {
      sum += sample[i];
      squares += sample[i] * sample[i];
    }
    if (worth_a_shift(sum, squares, 16)) k.shift = (float)(sum / 16);
  }
  /* From the first element on, wherever it lies: blocks that began at a cache line would make last digits depend on it. */
  if (fast) set_limit(s, &k);
  const int64_t block = two_bytes(r_kind, c_kind) ? LONG_BLOCK : BLOCK;
  int64_t pieces_until = 0; /* after a block that failed: in pieces up to there */
  for (int64_t i = 0; i < count;) {
    int64_t most = i < pieces_until ? PIECE : block;
    int64_t n = count - i < most ? count - i : most, whole = n & -(int64_t)(2 * WIDTH);
    if (fast && whole) {
      int odd = 0;
      int64_t done = fast_block(s, i, whole, r_kind, c_kind, tolerant, &k, &odd);
      i += done;
      if (done && done < whole) pieces_until = i + PIECE;
      if (done) continue;
      if (whole > PIECE) {
        pieces_until = i + (odd ? PIECE : whole);
        continue;
      }
    }
    n = n < PIECE ? n : PIECE;
    careful_block(s, i, n);
    k.shift = (float)s->shift;
    if (fast) set_limit(s, &k);
    i += n;
  }
  if (fast && !s->format[1].is_float) s->ulp_real = s->m.max_abs_e;
}
