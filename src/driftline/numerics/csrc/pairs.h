/* What is gathered over a pair, and the parts of it that are taken one element at a time. */

/* ---- moments, gathered ---- */

typedef struct {
  double n, mean, m2;
} Spread;

/* Chan, Golub and LeVeque: two groups' mean and sum of squares about it, joined. */
INLINE void join_spread(Spread *s, double n, double mean, double m2) {
  if (n == 0) return;
  if (s->n == 0) {
    *s = (Spread){n, mean, m2};
    return;
  }
  double whole = s->n + n, share = n / whole, delta = mean - s->mean;
  s->mean += delta * share;
  s->m2 += m2 + delta * delta * (s->n * share);
  s->n = whole;
}

typedef struct {
  Moments m;
  Spread spread[2];
  uint64_t ulp;    /* greatest distance so far, float formats */
  double ulp_real; /* the same for integer formats */
  double shift;    /* mean of r in the last careful block, or zero where that serves */
  const uint8_t *data[2];
  int dtype[2], widen[2];
  Format format[2];
  double atol, rtol;
  int dots; /* the processor has vdpbf16ps */
  int halves; /* it takes wide vectors in two halves */
} Pair;

/* Whether sums would lose digits to the mean: zero serves, and costs nothing, where that is not large against the spread. */
INLINE int worth_a_shift(double sum, double squares, double n) { return sum * sum >= 0.5 * n * squares; }

INLINE void note_first(int64_t *place, int64_t at) {
  if (*place < 0 || at < *place) *place = at;
}

/* Positions are rare wants: looked up one by one, in a block that is known to hold them. */
COLD static void find_positions(Pair *s, const double *r, const double *c, int64_t base, int64_t n) {
  Moments *m = &s->m;
  for (int64_t i = 0; i < n; i++) {
    double a = r[i] == s->format[0].sentinel ? -INFINITY : r[i], b = c[i] == s->format[1].sentinel ? -INFINITY : c[i];
    int fa = fabs(a) <= DBL_MAX, fb = fabs(b) <= DBL_MAX;
    int differ = a != b && !(a != a && b != b);
    if (!fa) note_first(&m->nonfinite_at[0], base + i);
    if (!fb) note_first(&m->nonfinite_at[1], base + i);
    if (differ) note_first(&m->first_different_at, base + i);
    if (differ && !(fa && fb)) note_first(&m->one_sided_at, base + i);
  }
}

/* Where the greatest error of a block stands; `most` was found by the lanes over the same float64 values. */
INLINE void find_greatest_error(Pair *s, const double *r, const double *c, int64_t base, int64_t n, double most) {
  if (!(most > s->m.max_abs_e)) return;
  for (int64_t i = 0; i < n; i++) {
    if (fabs(c[i] - r[i]) != most || !(fabs(r[i]) <= DBL_MAX) || !(fabs(c[i]) <= DBL_MAX) ||
        r[i] == s->format[0].sentinel || c[i] == s->format[1].sentinel)
      continue;
    s->m.max_abs_e = most;
    s->m.max_abs_e_at = base + i;
    return;
  }
}

/* 64-bit integers beyond 2^53: differences exactly, in 128 bits, one by one. */
INLINE __int128 integer_at(const uint8_t *base, int dtype, int64_t i) {
  switch (dtype) {
    case I64: return (int64_t)read64(base + 8 * i);
    case U64: return (__int128)read64(base + 8 * i);
    default: {
      double v;
      decode_double(base, dtype, i, 1, &v);
      return (__int128)v;
    }
  }
}

COLD static void exact_integers(Pair *s, int64_t base, int64_t n) {
  Moments *m = &s->m;
  for (int64_t i = base; i < base + n; i++) {
    __int128 ri = integer_at(s->data[0], s->dtype[0], i), ci = integer_at(s->data[1], s->dtype[1], i);
    double r = (double)ri, c = (double)ci, e = (double)(ci - ri), ae = fabs(e), ar = fabs(r);
    double rel = ae == 0 ? 0.0 : ae / ar;
    m->finite++;
    m->sum_r += r;
    m->sum_c += c;
    m->sum_rr += r * r;
    m->sum_cc += c * c;
    m->sum_rc += r * c;
    m->sum_ee += e * e;
    m->sum_abs_e += ae;
    m->sum_rel_e += rel;
    m->max_rel_e = fmax(m->max_rel_e, rel);
    if (ae > m->max_abs_e) {
      m->max_abs_e = ae;
      m->max_abs_e_at = i;
    }
    s->ulp_real = fmax(s->ulp_real, ae);
    if (!(ae <= s->atol + s->rtol * ar)) m->outside++;
    if (ri != ci) {
      m->different++;
      note_first(&m->first_different_at, i);
    }
    double v[2] = {r, c};
    for (int side = 0; side < 2; side++) {
      m->finite_one[side]++;
      m->sum[side] += v[side];
      m->sumsq[side] += v[side] * v[side];
      m->ends[side].min = fmin(m->ends[side].min, v[side]);
      m->ends[side].max = fmax(m->ends[side].max, v[side]);
      join_spread(&s->spread[side], 1, v[side], 0);
    }
  }
}

INLINE int is_wide(int dtype) { return dtype == I64 || dtype == U64; }
INLINE int is_integer(int dtype) { return dtype >= I64; }

INLINE void begin_pair(Pair *s) {
  Moments *m = &s->m;
  m->max_abs_e_at = m->first_different_at = m->one_sided_at = m->nonfinite_at[0] = m->nonfinite_at[1] = -1;
  for (int side = 0; side < 2; side++) {
    m->ends[side].min = INFINITY;
    m->ends[side].max = -INFINITY;
  }
}

INLINE void finish_pair(Pair *s, Moments *out) {
  Moments *m = &s->m;
  for (int side = 0; side < 2; side++) {
    int some = m->finite_one[side] > 0;
    if (!some) m->ends[side].min = m->ends[side].max = NAN;
    m->std[side] = some ? sqrt(fmax(s->spread[side].m2, 0.0) / s->spread[side].n) : NAN;
    if (s->spread[side].m2 != s->spread[side].m2) m->std[side] = NAN; /* fmax drops a NaN */
  }
  m->max_ulp = s->format[1].is_float ? (double)s->ulp : s->ulp_real;
  *out = *m;
}
