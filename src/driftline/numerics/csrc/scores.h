/* One row of logits against another, once per instruction set. What each number means: ../scores.py.
 *
 * One pass over memory, strip by strip: greatest elements and sums. The total variation needs their result, so the
 * pass over the next row sums it, of what this one leaves in the cache. With e = exp(r - max r), u = (c - r) - (max c - max r)
 * and m = exp(u) - 1 the sums are of e, e*u, e*u*m and e*(m - u), each accurate to its own size even where the two
 * rows are nearly equal: u is small then, and m - u a short series.
 */

/* Vectors that go step by step beside each other: one chain of multiply-adds leaves the processor waiting. Four spill. */
#undef EACH
#undef TOGETHER
#define TOGETHER 2
#define EACH for (int j = 0; j < TOGETHER; j++)

/* exp(x) in units of 2^minus_base, all in powers of two: the product is exact within the multiply-add. What comes out
 * below 2^-126 is of no weight beside the row's 1 and may come out as anything smaller than that. */
LANE_FN void exp_group(const VF *x, VF minus_base, VF *out) {
  VF t[TOGETHER], f[TOGETHER], q[TOGETHER];
  EACH t[j] = OP(fmadd_ps)(x[j], OP(set1_ps)(LOG2_E), minus_base);
#if WIDTH == 16
  EACH f[j] = _mm512_reduce_ps(t[j], 1); /* what is left beside the integer below */
  EACH q[j] = OP(fmadd_ps)(OP(set1_ps)(UP_5), f[j], OP(set1_ps)(UP_4));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(UP_3));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(UP_2));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(UP_1));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(UP_0));
  EACH out[j] = _mm512_scalef_ps(q[j], t[j]);
#else
  const VF magic = OP(set1_ps)(12582912.0f); /* 1.5 * 2^23: an integer added to it lies in the lowest bits */
  VF shifted[TOGETHER];
  EACH t[j] = OP(max_ps)(t[j], OP(set1_ps)(-125.0f));
  EACH shifted[j] = OP(add_ps)(t[j], magic);
  EACH f[j] = OP(sub_ps)(t[j], OP(sub_ps)(shifted[j], magic));
  EACH q[j] = OP(fmadd_ps)(OP(set1_ps)(NEAR_5), f[j], OP(set1_ps)(NEAR_4));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(NEAR_3));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(NEAR_2));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(NEAR_1));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(NEAR_0));
  EACH out[j] = AS_FLOAT(OP(add_epi32)(AS_BITS(q[j]), OP(slli_epi32)(AS_BITS(shifted[j]), 23)));
#endif
}

/* (exp(u) - 1 - u) / u where |u| <= NEAR_EQUAL. */
LANE_FN void rest_group(const VF *u, VF *out) {
  VF w[TOGETHER];
  EACH w[j] = OP(fmadd_ps)(OP(set1_ps)(REST_3), u[j], OP(set1_ps)(REST_2));
  EACH w[j] = OP(fmadd_ps)(w[j], u[j], OP(set1_ps)(REST_1));
  EACH w[j] = OP(fmadd_ps)(w[j], u[j], OP(set1_ps)(REST_0));
  EACH out[j] = OP(mul_ps)(u[j], w[j]);
}

/* The greater magnitude of each lane; of not-a-number the sums will tell. */
LANE_FN VF farther(VF most, VF u) {
#if WIDTH == 16
  return _mm512_range_ps(most, u, 0xB);
#else
  return OP(max_ps)(most, ABS(u));
#endif
}

LANE_FN VF floats_at(const float *p) { return load_lanes((const uint8_t *)p, LANES_F32); }

/* Which lanes are greater than `limit`; not-a-number is. */
LANE_FN MASK beyond(VF v, VF limit) {
#if WIDTH == 16
  return _mm512_cmp_ps_mask(v, limit, _CMP_NLE_UQ);
#elif WIDTH == 8
  return _mm256_cmp_ps(v, limit, _CMP_NLE_UQ);
#else
  return ~(VI)(v <= limit);
#endif
}

LANE_FN int any_lane(MASK mask) {
#if WIDTH == 4
  return any_hit(mask);
#else
  return mask_word(mask) != 0;
#endif
}

/* 1 and how many elements are greater. */
TARGET static int64_t rank_of(const uint8_t *row, int dtype, int64_t n, float said) {
  const VF limit = OP(set1_ps)(said);
  const int kind = dtype == F32 ? LANES_F32 : dtype == F16 ? LANES_F16 : LANES_BF16, size = dtype == F32 ? 4 : 2;
  int64_t i = 0, rank = 1;
  for (; i + WIDTH <= n; i += WIDTH) {
    VF v = load_lanes(row + size * i, kind);
#if WIDTH == 16
    rank += __builtin_popcount(_mm512_cmp_ps_mask(limit, v, _CMP_LT_OQ));
#elif WIDTH == 8
    rank += __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(limit, v, _CMP_LT_OQ)));
#else
    rank += tallied((VI)(limit < v) & plain_set1_epi32(1));
#endif
  }
  for (; i < n; i++) rank += value_at(row, dtype, i) > said;
  return rank;
}

/* The reference's strip as float32, where it lies or decoded into `room`. */
LANE_FN const float *strip_of(const uint8_t *row, int dtype, int64_t from, int64_t n, float *room) {
  const uint8_t *p = row + from * (BITS[dtype] / 8);
  if (n < STRIP) {
    decode_float(row, dtype, from, n, room);
    for (int64_t i = n; i < STRIP; i++) room[i] = FILLING;
    return room;
  }
  if (dtype == F32) return (const float *)p;
  if (dtype == F16)
    for (int i = 0; i < STRIP; i += WIDTH) OP(storeu_ps)(room + i, load_lanes(p + 2 * i, LANES_F16));
  else
    for (int i = 0; i < STRIP; i += WIDTH) OP(storeu_ps)(room + i, load_lanes(p + 2 * i, LANES_BF16));
  return room;
}

/* The greatest of a strip; what is no number is passed over. */
LANE_FN float greatest_kind(const uint8_t *p, int kind) {
  const int size = kind == LANES_F32 ? 4 : 2;
  VF a = OP(set1_ps)(-INFINITY), b = a;
  for (int i = 0; i < STRIP; i += 2 * WIDTH) {
    a = OP(max_ps)(load_lanes(p + size * i, kind), a);
    b = OP(max_ps)(load_lanes(p + size * (i + WIDTH), kind), b);
  }
  return max_lane(OP(max_ps)(a, b));
}

TARGET static float greatest_of(const uint8_t *p, int dtype) {
  if (dtype == F32) return greatest_kind(p, LANES_F32);
  return dtype == F16 ? greatest_kind(p, LANES_F16) : greatest_kind(p, LANES_BF16);
}

/* The first place from `from` on that holds `value`, which is there unless all is no number. */
TARGET static int64_t place_of(const uint8_t *row, int dtype, int64_t from, int64_t n, float value) {
  const VF wanted = OP(set1_ps)(value);
  const int kind = dtype == F32 ? LANES_F32 : dtype == F16 ? LANES_F16 : LANES_BF16, size = dtype == F32 ? 4 : 2;
  for (; from + WIDTH <= n; from += WIDTH) {
    VF v = load_lanes(row + size * from, kind);
#if WIDTH == 16
    if (_mm512_cmp_ps_mask(v, wanted, _CMP_EQ_OQ)) break;
#elif WIDTH == 8
    if (_mm256_movemask_ps(_mm256_cmp_ps(v, wanted, _CMP_EQ_OQ))) break;
#else
    if (any_hit((VI)(v == wanted))) break;
#endif
  }
  while (from < n && value_at(row, dtype, from) != value) from++;
  return from < n ? from : 0;
}

/* Elements that belong to the k greatest so far; none that is not greater than `floor` is one of the row's. */
TARGET static void offer_strip(TopList *top, const float *p, int64_t from, int64_t n, float floor) {
  for (int64_t i = 0; i < n; i += WIDTH) {
    const float limit = top->lowest > floor ? top->lowest : floor;
    unsigned lanes = ~0u;
    if (top->size == top->k || floor > -INFINITY) lanes = mask_word(beyond(floats_at(p + i), OP(set1_ps)(limit)));
    lanes &= n - i < WIDTH ? (1u << (n - i)) - 1 : (1u << WIDTH) - 1;
    for (; lanes; lanes &= lanes - 1) offer(top, p[i + __builtin_ctz(lanes)], from + i + __builtin_ctz(lanes));
  }
}

/* The k greatest of a row whose strips' greatest are known: k strips have one that is not less than the k-th of those,
 * so nothing less is looked for, and only where it can be. */
TARGET static void find_top(const ScoreAsk *ask, int64_t row, ScoreRoom *room, TopList *top) {
  const int64_t n = ask->vocabulary, strips = (n + STRIP - 1) / STRIP;
  const float least = kth_greatest(room->bests, strips, top->k, room->bests + strips);
  const float floor = least > -INFINITY ? nextafterf(least, -INFINITY) : -INFINITY;
  const uint8_t *p = row_of(ask, 0, row);
  const int64_t bytes = STRIP * (BITS[ask->dtype[0]] / 8);
  int64_t next = next_strip(room->bests, 0, strips, least);
  for (int64_t at = next; at < strips; at = next) {
    const int64_t from = at * STRIP, size = n - from < STRIP ? n - from : STRIP;
    next = next_strip(room->bests, at + 1, strips, least);
    if (next < strips)
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + next * bytes + i);
    if (top->size == top->k && !(room->bests[at] > top->lowest)) continue;
    offer_strip(top, strip_of(p, ask->dtype[0], from, size, room->strip[0]), from, size, floor);
  }
}

/* The sums of one strip, joined to the row's. e and e*m are left for the total variation, and what the row before left
 * at the same place is summed for its own: it has to pass through the cache anyway. `wide`: u may be large; if it is
 * where that was not expected, nothing is joined and the strip must be asked again. Not-a-number is large. */
LANE_FN int sum_kind(const float *r, const uint8_t *c, int kind, int wide, const Strip *units, float *es,
                     RowSums *sums, Seen *seen) {
  const VF zero = OP(setzero_ps)(), minus_base = OP(set1_ps)(-units->base), between = OP(set1_ps)(units->between);
  const VF near_equal = OP(set1_ps)(NEAR_EQUAL), minus_x = OP(set1_ps)(-seen->x);
  const int size = kind == LANES_F32 ? 4 : 2;
  VF s_e = zero, s_u = zero, s_w = zero, s_v = zero, bad = zero, best = OP(set1_ps)(-INFINITY), most = zero;
  VF parted = zero;
  for (int i = 0; i < STRIP; i += TOGETHER * WIDTH) {
    VF a[TOGETHER], b[TOGETHER], d[TOGETHER], u[TOGETHER], e[TOGETHER], g[TOGETHER], ew[TOGETHER], em[TOGETHER];
    float *left = es + 2 * i;
    EACH a[j] = floats_at(r + i + j * WIDTH);
    EACH b[j] = load_lanes(c + size * (i + j * WIDTH), kind);
    /* The next strip; one further on was slower. */
    EACH __builtin_prefetch(r + i + j * WIDTH + STRIP);
    EACH if ((i + j * WIDTH) % (64 / size) == 0) __builtin_prefetch(c + size * (i + j * WIDTH + STRIP));
    EACH parted = OP(add_ps)(parted, ABS(OP(fmadd_ps)(floats_at(left + 2 * j * WIDTH), minus_x,
                                                      floats_at(left + (2 * j + 1) * WIDTH))));
    EACH d[j] = OP(sub_ps)(b[j], a[j]); /* exact where they are near, and that is where u is small */
    EACH u[j] = OP(sub_ps)(d[j], between);
    exp_group(a, minus_base, e);
    EACH best = OP(max_ps)(a[j], best);
    EACH most = farther(most, u[j]);
    if (wide) {
      MASK far[TOGETHER];
      EACH bad = OP(fmadd_ps)(d[j], zero, bad);
      EACH far[j] = beyond(ABS(u[j]), near_equal);
      EACH u[j] = OP(max_ps)(OP(min_ps)(u[j], OP(set1_ps)(FARTHEST)), OP(set1_ps)(-FARTHEST));
      EACH g[j] = OP(mul_ps)(e[j], u[j]);
      rest_group(u, ew);
      EACH ew[j] = OP(mul_ps)(g[j], ew[j]);
      EACH em[j] = OP(add_ps)(g[j], ew[j]);
      int some = 0;
      EACH some |= any_lane(far[j]);
      if (some) {
        /* exp(u) may be too large for a float; e * exp(u) is not. */
        VF other[TOGETHER], apart[TOGETHER];
        EACH other[j] = OP(min_ps)(OP(sub_ps)(b[j], between), OP(set1_ps)(units->most));
        exp_group(other, minus_base, apart);
        EACH apart[j] = OP(sub_ps)(apart[j], e[j]);
        EACH ew[j] = chosen(far[j], OP(sub_ps)(apart[j], g[j]), ew[j]);
        EACH em[j] = chosen(far[j], apart[j], em[j]);
      }
    } else {
      rest_group(u, ew);
      EACH g[j] = OP(mul_ps)(e[j], u[j]);
      EACH ew[j] = OP(mul_ps)(g[j], ew[j]);
      EACH em[j] = OP(add_ps)(g[j], ew[j]);
    }
    EACH s_e = OP(add_ps)(s_e, e[j]);
    EACH s_u = OP(add_ps)(s_u, g[j]);
    EACH s_w = OP(add_ps)(s_w, ew[j]);
    EACH s_v = OP(fmadd_ps)(u[j], em[j], s_v);
    EACH {
      OP(storeu_ps)(left + 2 * j * WIDTH, e[j]);
      OP(storeu_ps)(left + (2 * j + 1) * WIDTH, em[j]);
    }
  }
  double v = sum_lanes(s_v);
  int far = any_lane(beyond(ABS(most), near_equal)) || !(fabs(v) <= DBL_MAX);
  if (!seen->again) seen->parted = sum_lanes(parted);
  seen->again = 1; /* what the row before left is overwritten now */
  seen->best = max_lane(best);
  seen->odd |= wide && !(sum_lanes(bad) == 0);
  seen->wide = far;
  seen->apart = far ? INFINITY : max_lane(ABS(most));
  if ((far && !wide) || !(seen->best <= units->most - 40)) return 0;
  sums->e += sum_lanes(s_e);
  sums->eu += sum_lanes(s_u);
  sums->ew += sum_lanes(s_w);
  sums->euv += v;
  return 1;
}

#undef SUM_KIND
#define SUM_KIND(kind)                                                              \
  do {                                                                              \
    if (!seen->wide && sum_kind(r, c, kind, 0, units, es, sums, seen)) return 1;    \
    return sum_kind(r, c, kind, 1, units, es, sums, seen);                          \
  } while (0)

/* 0: the reference is too great for these units, and nothing was joined. */
TARGET static int sum_strip(const float *r, const uint8_t *c, int dtype, const Strip *units, float *es,
                            RowSums *sums, Seen *seen) {
  if (dtype == F32) SUM_KIND(LANES_F32);
  else if (dtype == F16) SUM_KIND(LANES_F16);
  else SUM_KIND(LANES_BF16);
}

/* What is left of the last row: the sum of |e*m - x*e| over its strips, as the next row would have summed it. */
TARGET static void sum_left(ScoreRoom *room, int64_t n) {
  const VF minus_x = OP(set1_ps)(-room->left.x);
  for (int64_t from = 0; from < n; from += STRIP) {
    VF sum = OP(setzero_ps)();
    for (int64_t i = 0; i < STRIP; i += WIDTH) {
      const float *p = room->es + 2 * (from + i);
      sum = OP(add_ps)(sum, ABS(OP(fmadd_ps)(floats_at(p), minus_x, floats_at(p + WIDTH))));
    }
    join_left(&room->left, sum_lanes(sum), room->bases[from / STRIP]);
  }
  settle(&room->left);
}

/* The sums again with both maxima known, `of` being the side that counts as the reference. */
TARGET COLD static RowSums sum_again(const ScoreAsk *ask, int of, int64_t row, float of_top, float other_top,
                                     ScoreRoom *room) {
  RowSums sums = {0, 0, 0, 0};
  Seen seen = {.wide = 1, .again = 1};
  const Strip units = units_of(of_top, other_top - of_top);
  for (int64_t from = 0; from < ask->vocabulary; from += STRIP) {
    int64_t size = ask->vocabulary - from < STRIP ? ask->vocabulary - from : STRIP;
    const float *p[2];
    for (int side = 0; side < 2; side++)
      p[side] = strip_of(row_of(ask, side, row), ask->dtype[side], from, size, room->strip[side]);
    sum_strip(p[of], (const uint8_t *)p[!of], F32, &units, room->es + 2 * from, &sums, &seen);
    room->bases[from / STRIP] = units.base;
  }
  return sums;
}

TARGET static void score_row(const ScoreAsk *ask, int64_t row, ScoreRoom *room, RowScore *out, TopList *top) {
  const int64_t n = ask->vocabulary;
  const uint8_t *r_row = row_of(ask, 0, row), *c_row = row_of(ask, 1, row);
  const int c_size = BITS[ask->dtype[1]] / 8;
  RowSums sums = {0, 0, 0, 0};
  Seen seen = {.x = room->left.x};
  Strip units = {0, 0, 0};
  float r_top = 0, c_top = -INFINITY;
  int64_t c_at = 0;
  for (int64_t from = 0; from < n; from += STRIP) {
    const int64_t size = n - from < STRIP ? n - from : STRIP;
    const float *r = strip_of(r_row, ask->dtype[0], from, size, room->strip[0]);
    const uint8_t *c = c_row + from * c_size;
    int c_dtype = ask->dtype[1];
    if (size < STRIP) {
      c = (const uint8_t *)strip_of(c_row, c_dtype, from, size, room->strip[1]);
      c_dtype = F32;
    }
    if (from == 0) {
      r_top = greatest_of((const uint8_t *)r, F32);
      const int64_t there = place_of((const uint8_t *)r, F32, 0, size, r_top);
      units = units_of(r_top, value_at(c_row, ask->dtype[1], there) - r_top);
    }
    seen.again = 0;
    while (!sum_strip(r, c, c_dtype, &units, room->es + 2 * from, &sums, &seen)) {
      rebase(&sums, &units, seen.best);
      if (!(seen.best <= FLT_MAX)) break;
    }
    join_left(&room->left, seen.parted, room->bases[from / STRIP]);
    room->bases[from / STRIP] = units.base;
    room->bests[from / STRIP] = seen.best;
    /* No candidate of this strip is greater than the reference's greatest and what lies between them. */
    if (!(seen.best + units.between + seen.apart + 1e-6f * (fabsf(seen.best) + fabsf(units.between) + 1) <= c_top)) {
      const float best = greatest_of(c, c_dtype);
      if (best > c_top) {
        c_top = best;
        c_at = from;
      }
    }
    /* The unit is the greatest reference so far: when it grows, the sums shrink. */
    if (seen.best > r_top) {
      r_top = seen.best;
      rebase(&sums, &units, r_top);
    }
  }
  settle(&room->left);
  find_top(ask, row, room, top);
  const float said = value_at(c_row, ask->dtype[1], ask->tokens[row]);
  out->choice = place_of(c_row, ask->dtype[1], c_at, n, c_top);
  out->rank = said == c_top && !seen.odd ? 1 : rank_of(c_row, ask->dtype[1], n, said);
  if (seen.odd && count_odd(ask, row, out)) return;
  int turned = 0;
  if (seen.odd || poor_units(&sums, c_top - r_top - units.between)) {
    units = units_of(r_top, c_top - r_top);
    sums = sum_again(ask, 0, row, r_top, c_top, room);
    /* From the flatter row's side a peaked one is a difference of large sums; from the peaked one's it is not. */
    turned = sums.eu + sums.ew < -0.3 * sums.e;
    if (turned) {
      units = units_of(c_top, r_top - c_top);
      sums = sum_again(ask, 1, row, c_top, r_top, room);
    }
  }
  const double x = finish_row(&sums, turned, &units, out);
  room->left = (Left){out, (float)x, units.base, 0, sums.e * (1 + x)};
}

TARGET static void score_rows(ScoreAsk *ask, ScoreRoom *room) {
  int64_t first, count;
  room->left = (Left){0};
  while ((count = take_rows(ask, &first)))
    for (int64_t row = first; row < first + count; row++) {
      const int64_t k = ask->k;
      TopList top = {ask->top[0] + row * k, ask->top_at + row * k, 0, k, -INFINITY};
      memset(ask->out + row, 0, sizeof *ask->out);
      for (int64_t i = 0; i < k; i++) {
        top.value[i] = NAN;
        top.at[i] = -1;
      }
      score_row(ask, row, room, ask->out + row, &top);
      for (int64_t i = 0; i < k; i++)
        ask->top[1][row * k + i] = top.at[i] < 0 ? NAN : value_at(row_of(ask, 1, row), ask->dtype[1], top.at[i]);
    }
  if (room->left.out) sum_left(room, (ask->vocabulary + STRIP - 1) / STRIP * STRIP);
}
