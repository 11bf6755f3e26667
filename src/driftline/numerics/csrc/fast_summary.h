/* A summary: float32 values in, float64 sums. */

/* One block of one tensor, n a multiple of 64. Values are float32, every sum is float64: a sketch is subtracted from
 * another one, and must not bring rounding of its own. Returns 0, with nothing changed, for a block with anything
 * in it that is not finite, or whose mean is too far from the shift. */
LANE_FN int summary_block(One *s, const uint8_t *p, int64_t base, int64_t n, int kind) {
  enum { PARTS = BUCKETS / WIDTH };
  const double by = (float)s->shift;
  const vd shift = lanes(by);
  const int size = kind == LANES_F32 ? 4 : 2;
  vd sx[2] = {lanes(0), lanes(0)}, sxx[2] = {lanes(0), lanes(0)}, buckets[2 * PARTS];
  VF low = OP(set1_ps)(INFINITY), high = OP(set1_ps)(-INFINITY);
  TALLY zeros = NO_TALLY;
  for (int v = 0; v < 2 * PARTS; v++) buckets[v] = lanes(0);
  for (int64_t i = 0; i < n; i += BUCKETS) {
    uint64_t signs = sketch_signs((uint64_t)(base + i) / BUCKETS);
    unsigned flip = sketch_xor(signs), part = flip / WIDTH;
    for (unsigned v = 0; v < PARTS; v++) {
      VF value = load_lanes(p + size * (i + WIDTH * v), kind);
      low = OP(min_ps)(low, value);
      high = OP(max_ps)(high, value);
      VF turned = sketched(value, signs, flip, v);
      zeros = tally_zeros(zeros, value);
      for (int half = 0; half < 2; half++) {
        vd x = widened(value, half) - shift;
        sx[half] += x;
        sxx[half] += x * x;
        buckets[2 * (v ^ part) + half] += widened(turned, half);
      }
    }
  }
  double count = (double)n, x = total(sx[0] + sx[1]), xx = total(sxx[0] + sxx[1]), about = xx - x * x / count;
  float least_value = min_lane(low), greatest_value = max_lane(high);
  if (!(xx <= DBL_MAX) || least_value <= s->sentinel) return 0;
  if (!(about >= 0.1 * xx)) return 0;
  Summary *o = &s->s;
  if (least_value < o->min) o->min = least_value;
  if (greatest_value > o->max) o->max = greatest_value;
  o->zeros += tallied(zeros);
  s->sumsq += xx + by * (2 * x + count * by);
  join_spread(&s->spread, count, by + x / count, about);
  s->shift = by + x / count;
  for (int v = 0; v < 2 * PARTS; v++)
    for (int lane = 0; lane < LANES; lane++) o->sketch[v * LANES + lane] += buckets[v][lane];
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
  int64_t pieces_until = 0;
  for (int64_t i = 0; i < count;) {
    int64_t most = i < pieces_until ? PIECE : BLOCK;
    int64_t n = count - i < most ? count - i : most, whole = n & -(int64_t)BUCKETS;
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
      if (whole > PIECE) {
        pieces_until = i + whole;
        continue;
      }
    }
    n = n < PIECE ? n : PIECE;
    careful_summary_block(s, i, n);
    i += n;
  }
}
