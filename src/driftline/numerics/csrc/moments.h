/* What is gathered for one tensor and for a pair, and the steps that handle one number at a time. Included by api.c and
 * by every instruction set. */

/* Elements that are measured at a time. Both sides in float64, the bytes that they come from and the bytes of the next
 * block take 24 KB of the first-level cache. */
enum { BLOCK = 768 };

/* A sum over blocks, and the rounding error it has left out. Equal blocks all round the same way: without `rest`, a
 * tensor of 10^8 equal elements would lose five of sixteen digits, and the difference of two such sums would lose all.
 * */
typedef struct { double value, rest; } Sum;

INLINE void add_block(Sum *s, double v) {
  double total = s->value + v;
  s->rest += fabs(s->value) >= fabs(v) ? (s->value - total) + v : (v - total) + s->value;
  s->value = total;
}

/* If the sum overflowed float64, `rest` means nothing. */
INLINE double total_of(const Sum *s) { return fabs(s->value) <= DBL_MAX ? s->value + s->rest : s->value; }

/* One side's own figures. `n`, `mean` and `m2` (sum of squares about the mean) are joined block by block. */
typedef struct {
  double n, mean, m2, min, max;
  Sum sum, squares;
  int64_t nan, pos_inf, neg_inf, nonfinite_at;
} Side;

typedef struct {
  const uint8_t *data[2];
  int dtype[2], widen[2]; /* `widen`: this side is real and the other complex; its imaginary parts are zero */
  double floor[2];        /* every finite value is above it: the sentinel for -inf, or -inf itself */
  double atol, rtol;
  Side side[2];
  Moments m; /* its sums are filled in at the end */
  Sum rr, cc, rc, ee, abs_e, rel_e;
  uint64_t ulp;    /* greatest distance so far, for float formats */
  double ulp_real; /* the same for integer formats */
} Pair;

typedef struct {
  const uint8_t *data;
  int dtype;
  double floor; /* as in Pair */
  Side side;
  int64_t zeros;
  double sketch[BUCKETS];
} Single;

INLINE Side empty_side(void) { return (Side){.min = INFINITY, .max = -INFINITY, .nonfinite_at = -1}; }

/* Joins the means and the sums of squares of two groups (Chan, Golub and LeVeque). */
INLINE void join_spread(Side *s, double n, double mean, double m2) {
  if (n == 0) return;
  double whole = s->n + n, share = n / whole, delta = mean - s->mean;
  s->m2 = s->n == 0 ? m2 : s->m2 + m2 + delta * delta * (s->n * share);
  s->mean = s->n == 0 ? mean : s->mean + delta * share;
  s->n = whole;
}

/* Figures of a side whose values were multiplied by 2^-exponent, scaled back. */
typedef struct { double mean, std, l2; } Spread;

INLINE Spread spread_of(const Side *s, int exponent) {
  if (s->n == 0) return (Spread){NAN, NAN, 0};
  /* Rounding can make m2 slightly negative; a NaN stays NaN. */
  double variance = s->m2 / s->n;
  double std = variance < 0 ? 0.0 : sqrt(variance);
  const double mean = total_of(&s->sum) / s->n, l2 = sqrt(total_of(&s->squares));
  return (Spread){ldexp(mean, exponent), ldexp(std, exponent), ldexp(l2, exponent)};
}

/* The exponent by which float64 values are scaled so that their squares neither overflow nor lose digits; 0 if no
 * scaling is needed. Only float64 can need it: (2^480)^2 leaves room for 2^63 terms. */
INLINE int scale_exponent(const Side *s, int dtype) {
  if (dtype != DTYPE_FLOAT64 || s->n == 0) return 0;
  double largest = fmax(fabs(s->min), fabs(s->max));
  if (largest == 0 || (largest > 0x1p-480 && largest < 0x1p480)) return 0;
  int exponent = ilogb(largest);
  return exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
}

INLINE void note_first(int64_t *place, int64_t index) {
  if (*place < 0 || index < *place) *place = index;
}

/* The functions that each instruction set provides; api.c chooses one set. */
typedef struct ScoreJob ScoreJob;
typedef struct {
  void (*pair)(Pair *, int64_t count);
  void (*summary)(Single *, int64_t count);
  /* Sums of one tensor with values multiplied by 2^-exponent. */
  Side (*scaled)(const uint8_t *data, int dtype, int widen, double floor, int64_t count, int exponent);
  void (*hash_long)(const uint8_t *, size_t, uint64_t *sums);
  uint64_t (*peak)(const void *, int bits, int64_t count, uint64_t mask);
  void (*score)(ScoreJob *, int thread);
} Isa;

extern const Isa driftline_isa_generic, driftline_isa_avx2, driftline_isa_avx512;
