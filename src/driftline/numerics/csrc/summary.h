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

/* Adds a block of whole groups to the sketch and to the number of zeros. `masked`, a constant where this is inlined:
 * something was left out of the block. */
LANE void sketch_block(Single *s, const double *x, int64_t base, int64_t n, int masked) {
  enum { PARTS = BUCKETS / LANES };
  const D zero = d_set(0);
  D buckets[PARTS];
  Tally zeros = tally_none();
  for (int v = 0; v < PARTS; v++) buckets[v] = zero;
  for (int64_t i = 0; i < n; i += BUCKETS) {
    const uint64_t signs = sketch_signs((uint64_t)(base + i) / BUCKETS);
    const unsigned flip = sketch_xor(signs), part = flip / LANES;
    for (unsigned v = 0; v < PARTS; v++) {
      D value = d_load(x + i + LANES * v);
      zeros = tally_add(zeros, m_eq(value, zero));
      if (masked) value = d_keep(m_eq(value, value), value);
      buckets[v ^ part] += d_sketch(value, signs >> (LANES * v), flip);
    }
  }
  s->zeros += tally_total(zeros);
  for (int v = 0; v < PARTS; v++) {
    D sums = d_load(s->sketch + v * LANES) + buckets[v];
    d_store(s->sketch + v * LANES, sums);
  }
}

static void summary(Single *s, int64_t count) {
  double room[BLOCK] __attribute__((aligned(64))), raw[BLOCK] __attribute__((aligned(64)));
  Block b = {.left_out = NOTHING};
  for (int64_t i = 0; i < count;) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK;
    if (n > BUCKETS) n -= n % BUCKETS; /* the rest of a group becomes a block of its own */
    b = side_block(s->data, s->dtype, 0, i, n, s->floor, b.left_out, room);
    join_block(&s->side, &b, n);
    if (b.left_out == ANYTHING) decode(s->data, s->dtype, 0, i, n, raw);
    if (b.left_out) count_nonfinite(&s->side, &b, raw, i, n);
    if (n % BUCKETS) { /* finite float64 may have been read where it lies, and there is nothing behind it */
      if (b.x != room) memcpy(room, b.x, (size_t)n * sizeof *room);
      for (int64_t j = n; j < BUCKETS; j++) room[j] = NAN;
      b.x = room;
    }
    if (b.left_out || n % BUCKETS) sketch_block(s, b.x, i, n, 1);
    else sketch_block(s, b.x, i, n, 0);
    i += n;
  }
}
