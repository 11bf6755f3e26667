/* A summary of one tensor: its own figures, the number of zeros and the sketch. All are in float64, because sketches
 * are subtracted from each other and must not add rounding errors of their own.
 *
 * A group of 64 elements shares a hash. The bits of the hash are the elements' signs; six bits of its product with a
 * constant are XORed to the elements' buckets. So a group fills every bucket once, as a permutation of lanes. */

INLINE uint64_t sketch_signs(uint64_t group) {
  uint64_t z = (group + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
INLINE unsigned sketch_xor(uint64_t signs) { return (unsigned)((signs * 0xD6E8FEB86659FD93ull) >> 58); }

/* One block, filled with -inf to whole groups. `masks`, a constant where this is inlined: what is not finite, or a
 * sentinel, is zero in the sums and in the sketch; without masks nothing is changed if there is any. Returns whether
 * everything in it is finite. */
LANE int summary_block(Single *s, const double *x, int64_t base, int64_t n, int masks) {
  enum { PARTS = BUCKETS / LANES };
  const D zero = d_set(0), inf = d_set(INFINITY), floor = d_set(s->floor);
  D buckets[PARTS], sum = zero, squares = zero, low = inf, high = -inf;
  Tally zeros = tally_none(), numbers = zeros;
  M tame = m_not(m_none()); /* neither NaN nor +inf so far */
  for (int v = 0; v < PARTS; v++) buckets[v] = zero;
  for (int64_t i = 0; i < n; i += BUCKETS) {
    const uint64_t signs = sketch_signs((uint64_t)(base + i) / BUCKETS);
    const unsigned flip = sketch_xor(signs), part = flip / LANES;
    for (unsigned v = 0; v < PARTS; v++) {
      D value = d_load(x + i + LANES * v), least = value, most = value;
      zeros = tally_add(zeros, m_eq(value, zero));
      if (masks) {
        const M ok = finite_lanes(value, floor);
        numbers = tally_add(numbers, ok);
        tame = m_and(tame, m_le(value, d_set(DBL_MAX)));
        least = d_pick(ok, value, inf);
        most = d_pick(ok, value, -inf);
        value = d_keep(ok, value);
      }
      buckets[v ^ part] += d_sketch(value, signs >> (LANES * v), flip);
      sum += value;
      squares = d_fma(value, value, squares);
      low = d_min(low, least);
      high = d_max(high, most);
    }
  }
  const double least = d_least(low), total = d_total(squares);
  if (!masks && (!(total <= DBL_MAX) || least <= s->floor)) return 0;
  const int64_t finite = masks ? tally_total(numbers) : n;
  s->side.min = fmin(s->side.min, least);
  s->side.max = fmax(s->side.max, d_greatest(high));
  s->zeros += tally_total(zeros);
  if (finite < n) count_nonfinite(&s->side, x, base, n, s->floor, finite, !(m_bits(m_not(tame)) & LANE_BITS));
  join_block(&s->side, x, n, s->floor, 1.0, finite, d_total(sum), total);
  for (int v = 0; v < PARTS; v++) {
    D sums = d_load(s->sketch + v * LANES) + buckets[v];
    d_store(s->sketch + v * LANES, sums);
  }
  return finite == n;
}

static void summary(Single *s, int64_t count) {
  double room[BLOCK] __attribute__((aligned(64)));
  int finite = 1;
  for (int64_t i = 0; i < count;) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK;
    if (n > BUCKETS) n -= n % BUCKETS; /* the rest of a group becomes a block of its own, with masks */
    const double *x = decoded(s->data, s->dtype, 0, i, n, room);
    if (n % BUCKETS) { /* float64 may have been read where it lies, and there is nothing behind it */
      if (x != room) memcpy(room, x, (size_t)n * sizeof *x);
      for (int64_t j = n; j < BUCKETS; j++) room[j] = -INFINITY;
      x = room;
    }
    if (!finite || n % BUCKETS || !summary_block(s, x, i, n, 0)) finite = summary_block(s, x, i, n, 1);
    i += n;
  }
}

static Side scaled_summary(const Single *s, int64_t count, int exponent) {
  Pair p = {.data = {s->data}, .dtype = {s->dtype}, .floor = {s->floor}};
  return scaled_side(&p, 0, count, exponent);
}
