/* What is gathered over one tensor, and the hashes behind its sketch. */

/* ---- summaries of one tensor ---- */

typedef struct {
  Summary s;
  Spread spread;
  double sumsq, shift, sentinel;
  const uint8_t *data;
  int dtype;
} One;

/* Sixty-four elements share two hashes: one gives each its sign, six bits of the other the XOR of its bucket. */
INLINE uint64_t sketch_signs(uint64_t group) {
  uint64_t z = (group + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
INLINE unsigned sketch_xor(uint64_t signs) { return (unsigned)((signs * 0xD6E8FEB86659FD93ull) >> 58); }

INLINE void finish_summary(One *s, int64_t count, Summary *out) {
  Summary *o = &s->s;
  o->count = count;
  int some = s->spread.n > 0;
  if (!some) o->min = o->max = NAN;
  o->mean = some ? s->spread.mean : NAN;
  o->std = some ? (s->spread.m2 >= 0 ? sqrt(s->spread.m2 / s->spread.n) : s->spread.m2 < 0 ? 0.0 : NAN) : NAN;
  o->l2 = sqrt(s->sumsq);
  *out = *o;
}
