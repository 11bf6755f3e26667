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

/* Measures one block of whole groups, everything in it finite. `own` is a constant where this is inlined: the side's
 * figures are computed in the same pass. Returns 0, with nothing changed, if something is a sentinel or not finite. */
LANE int sketch_block(Single *s, const double *x, int64_t base, int64_t n, int own) {
  enum { PARTS = BUCKETS / LANES };
  const D zero = d_set(0);
  D buckets[PARTS], sum = zero, squares = zero, low = d_set(INFINITY), high = d_set(-INFINITY);
  Tally zeros = tally_none();
  for (int v = 0; v < PARTS; v++) buckets[v] = zero;
  for (int64_t i = 0; i < n; i += BUCKETS) {
    const uint64_t signs = sketch_signs((uint64_t)(base + i) / BUCKETS);
    const unsigned flip = sketch_xor(signs), part = flip / LANES;
    for (unsigned v = 0; v < PARTS; v++) {
      D value = d_load(x + i + LANES * v);
      buckets[v ^ part] += d_sketch(value, signs >> (LANES * v), flip);
      if (!own) continue;
      sum += value;
      squares = d_fma(value, value, squares);
      low = d_min(low, value);
      high = d_max(high, value);
      zeros = tally_add(zeros, m_eq(value, zero));
    }
  }
  if (own) {
    double least = d_least(low), most = d_greatest(high), total = d_total(squares);
    if (!(total <= DBL_MAX) || least <= s->floor) return 0;
    if (least < s->side.min) s->side.min = least;
    if (most > s->side.max) s->side.max = most;
    s->zeros += tally_total(zeros);
    join_block(&s->side, x, n, s->floor, 1.0, n, d_total(sum), total);
  }
  for (int v = 0; v < PARTS; v++) {
    D sums = d_load(s->sketch + v * LANES) + buckets[v];
    d_store(s->sketch + v * LANES, sums);
  }
  return 1;
}

/* Measures a block with masks: non-finite values and the padding of the last group are zero in the sketch. Returns
 * whether something is not finite. */
static int masked_summary(Single *s, const double *x, int64_t base, int64_t n) {
  double clean[BLOCK] __attribute__((aligned(64)));
  const D floor = d_set(s->floor), zero = d_set(0);
  Tally zeros = tally_none();
  const int64_t finite = side_block(&s->side, x, base, n, s->floor, 1.0);
  for (int64_t i = 0; i < n; i += LANES) {
    D v = d_load(x + i);
    zeros = tally_add(zeros, m_eq(v, zero));
    d_store(clean + i, d_keep(finite_lanes(v, floor), v));
  }
  const int64_t groups = (n + BUCKETS - 1) / BUCKETS * BUCKETS;
  for (int64_t i = padded(n); i < groups; i++) clean[i] = 0.0;
  s->zeros += tally_total(zeros);
  sketch_block(s, clean, base, groups, 0);
  return finite < n;
}

static void summary(Single *s, int64_t count) {
  double room[BLOCK] __attribute__((aligned(64)));
  int masked = 0;
  for (int64_t i = 0; i < count;) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK;
    if (n > BUCKETS) n -= n % BUCKETS; /* the rest of a group becomes a block of its own, with masks */
    const double *x = decoded(s->data, s->dtype, 0, i, n, room);
    if (masked || n % BUCKETS || !sketch_block(s, x, i, n, 1)) masked = masked_summary(s, x, i, n);
    i += n;
  }
}

static Side scaled_summary(const Single *s, int64_t count, int exponent) {
  Pair p = {.data = {s->data}, .dtype = {s->dtype}, .floor = {s->floor}};
  return scaled_side(&p, 0, count, exponent);
}
