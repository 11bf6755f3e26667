/* A pair through the float32 lanes, and what a block's sums cannot tell. */

/* The ULP distances in the places that were marked. Returns whether they were news. */
TARGET static int visit_hits(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t n,
                             const Sums *b) {
  int dtype = s->dtype[1], direct = dtype == F32 || dtype == BF16 || (dtype == F16 && HALF_ORDINALS);
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
      VF r = load_lanes(r_at + r_size * i, r_kind), c = load_lanes(c_at + c_size * i, c_kind);
      if (direct) {
        far = OP(max_epu32)(far, ulp_distance(r, c, dtype));
      } else if (s->format[1].is_float) {
        for (int part = 0; part < 2; part++) {
          uint64_t u = greatest_u(ulp_lanes(widened(r, part), widened(c, part), &s->format[1]));
          if (u > s->ulp) s->ulp = u;
        }
      }
    }
  }
  int news = s->ulp > before;
  if (direct) {
    /* The greatest of unsigned lanes is the complement of the least complement. */
    uint32_t u = ~least_lane(OP(sub_epi32)(OP(set1_epi32)(-1), far));
    news |= u > s->ulp;
    if (u > s->ulp) s->ulp = u;
  }
  return news;
}

/* The ULP distances of a block of sixteen-bit floats of one type. */
TARGET static int visit_words(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int kind, int64_t n) {
  VI far = OP(set1_epi32)(0);
  for (int64_t i = 0; i < n; i += WIDTH)
    far = OP(max_epu32)(far, ulp_distance(load_lanes(r_at + 2 * i, kind), load_lanes(c_at + 2 * i, kind), s->dtype[1]));
  uint32_t u = ~least_lane(OP(sub_epi32)(OP(set1_epi32)(-1), far));
  int news = u > s->ulp;
  if (news) s->ulp = u;
  return news;
}

/* Elements outside the tolerance, in float64: for chains where one came too close to it for float32 to tell. */
LANE_FN int64_t recount(const Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t n) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  const vd atol = lanes(s->atol), rtol = lanes(s->rtol);
  vl outside = lanes_l(0);
  for (int64_t i = 0; i < n; i += WIDTH) {
    VF r = load_lanes(r_at + r_size * i, r_kind), c = load_lanes(c_at + c_size * i, c_kind);
    for (int part = 0; part < 2; part++) {
      vd a = widened(r, part), ae = magnitude(widened(c, part) - a);
      outside -= ~(ae <= atol + rtol * magnitude(a));
    }
  }
  return total_l(outside);
}

/* Float16's numbers are few, and meet the tolerance often. */
TARGET static int64_t recount_kinds(const Pair *s, const uint8_t *r, const uint8_t *c, int r_kind, int c_kind, int64_t n) {
  if (r_kind == LANES_F16 && c_kind == LANES_F16) return recount(s, r, c, LANES_F16, LANES_F16, n);
  if (r_kind == LANES_F32 && c_kind == LANES_F16) return recount(s, r, c, LANES_F32, LANES_F16, n);
  return recount(s, r, c, r_kind, c_kind, n);
}

/* Where the first difference and the greatest error stand: rarely news, so looked up again, in float64. */
TARGET static void ask_again(Pair *s, const uint8_t *r_at, const uint8_t *c_at, int r_kind, int c_kind, int64_t base,
                             int64_t n) {
  const int r_size = r_kind == LANES_F32 ? 4 : 2, c_size = c_kind == LANES_F32 ? 4 : 2;
  double errors[BLOCK] __attribute__((aligned(64)));
  vd most = lanes(0.0);
  for (int64_t i = 0; i < n; i += WIDTH) {
    VF r = load_lanes(r_at + r_size * i, r_kind), c = load_lanes(c_at + c_size * i, c_kind);
    for (int part = 0; part < 2; part++) {
      vd ae = magnitude(widened(c, part) - widened(r, part));
      most = MAXV(most, ae);
      memcpy(errors + i + part * LANES, &ae, sizeof ae);
    }
  }
  double worst = greatest(most);
  if (worst == 0) return;
  int64_t at = 0;
  if (s->m.first_different_at < 0 || s->m.first_different_at >= base) {
    while (errors[at] == 0) at++;
    note_first(&s->m.first_different_at, base + at);
  }
  if (!(worst > s->m.max_abs_e)) return;
  while (errors[at] != worst) at++;
  s->m.max_abs_e = worst;
  s->m.max_abs_e_at = base + at;
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
  m->outside += tolerant ? b->outside : b->differ;
  for (int i = 0; i < b->nears; i++) {
    int64_t at = b->near[i], left = n - at;
    m->outside += recount_kinds(s, r + at * (r_kind == LANES_F32 ? 4 : 2), c + at * (c_kind == LANES_F32 ? 4 : 2), r_kind,
                                c_kind, left < CHAIN ? left : CHAIN);
  }
  if (b->far > s->ulp) {
    if (visit_words(s, r, c, r_kind, n)) set_limit(s, k);
  }
  if (b->marked) {
    if (visit_hits(s, r, c, r_kind, c_kind, n, b)) set_limit(s, k);
  }
  if ((b->differ && (m->first_different_at < 0 || m->first_different_at >= base)) ||
      b->max_ae > (float)m->max_abs_e) /* errors alike to float32 are alike: the first keeps the place */
    ask_again(s, r, c, r_kind, c_kind, base, n);
}

/* Returns whether that could be done; if not, up to `stopped` there was nothing amiss. */
TARGET static int fast_block(Pair *s, int64_t base, int64_t n, int r_kind, int c_kind, int tolerant, Knobs *k,
                             int64_t *stopped) {
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
  if (b.rel != b.rel && b.ae <= DBL_MAX) { /* 0 / 0 */
    k->zeros = 1;
    sum_kinds(r, c, n, r_kind, c_kind, tolerant, k, &b);
  }
  double low = (double)b.min_r - b.max_ae * (1 + 0x1p-22), high = (double)b.max_r + b.max_ae * (1 + 0x1p-22);
  if (!(b.ae <= DBL_MAX) || b.min_r <= s->format[0].sentinel) {
    Moments saved = *m;
    Spread spreads[2] = {s->spread[0], s->spread[1]};
    int zeros = k->zeros;
    float clean[2][PIECE] __attribute__((aligned(64)));
    double c_ends[2];
    Sums ends;
    *stopped = b.stopped;
    if (n > PIECE || !(fabsf(k->shift) <= FLT_MAX)) return 0;
    int64_t odds = patch_block(s, r, c, r_kind, c_kind, base, n, k, clean[0], clean[1], &ends, c_ends);
    if (odds < 0) return 0;
    r = (const uint8_t *)clean[0];
    c = (const uint8_t *)clean[1];
    r_kind = c_kind = LANES_F32;
    count -= (double)odds;
    k->zeros = 1; /* shift against shift may be that, too */
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
  int tolerant = s->atol != 0.0 ? TOLERANT : s->rtol != 0.0 ? EXACT_NEAR_ZERO : 0;
  int fast = r_kind != LANES_NONE && c_kind != LANES_NONE && !s->widen[0] && !s->widen[1] &&
             tolerance_fits(s->atol) && tolerance_fits(s->rtol) &&
             (s->format[1].is_float || !s->format[0].is_float); /* integers' ULPs are their errors */
  Knobs k = {0, 0, (float)(s->atol * TOLERANCE_SHADE), (float)(s->rtol * TOLERANCE_SHADE), 0, 0, 0};
  if (fast && count >= 16) {
    double sample[16], sum = 0, squares = 0;
    decode_double(s->data[0], s->dtype[0], 0, 16, sample);
    for (int i = 0; i < 16; i++) {
      sum += sample[i] / 16;
      squares += sample[i] * sample[i] / 16;
    }
    /* Zero serves, and costs nothing, where the mean is not large against the spread. */
    k.shift = sum * sum < 0.5 * squares ? 0.0f : (float)sum;
  }
  if (fast) set_limit(s, &k);
  int64_t pieces_until = 0; /* after a block that failed: in pieces up to there */
  int64_t sound_until = 0;  /* but before this in one */
  for (int64_t i = 0; i < count;) {
    int64_t most = i < sound_until ? sound_until - i : i < pieces_until ? PIECE : BLOCK, stopped = -1;
    int64_t n = count - i < most ? count - i : most, whole = n & -(int64_t)(2 * WIDTH);
    if (fast && whole) {
      if (fast_block(s, i, whole, r_kind, c_kind, tolerant, &k, &stopped)) {
        i += whole;
        continue;
      }
      if (whole > PIECE) {
        int known = stopped >= 0 && stopped < whole && i >= sound_until;
        sound_until = known ? i + stopped : 0;
        pieces_until = known && stopped + PIECE < whole ? i + stopped + PIECE : i + whole;
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
