/* A pair of tensors, block by block: both sides are decoded to float64, and every sum is float64.
 *
 * A block is first measured without masks; its sums show whether everything in it is finite. A block that holds a
 * non-finite value or a sentinel is measured by the same loop with masks: each pair that is not finite on both sides
 * is replaced by zero and zero, which adds nothing to any figure of the pair. The last vector of a tensor is padded
 * with -inf on both sides, so that the padding is masked as well.
 *
 * Three figures are looked up only where they can change, because they cost more than all others together:
 *  - the greatest ULP distance, in blocks with an element that can exceed the greatest so far (see UlpLimits);
 *  - positions, in blocks that hold a new first or greatest one;
 *  - the sum of squares about the mean, by a second pass over a block where the sums of the first would lose digits.
 *
 * Chains of float32 were 2.4 to 3.3 times as fast on normal data and 4 to 5 times as slow on masked tensors, and a
 * cosine in bfloat16 could be off by 2e-2. Two tensors of 1 GiB take 0.2 s of processor time more (0.34 to 0.55 s). One
 * translation unit per instruction set takes 8 s of compiler time; one per dtype pair took 43. */

typedef uint64_t U __attribute__((vector_size(8 * LANES)));
typedef int64_t L __attribute__((vector_size(8 * LANES)));

LANE U u_set(uint64_t v) { U o = {0}; for (int i = 0; i < LANES; i++) o[i] = v; return o; }
LANE U u_pick(L mask, U yes, U no) { return (U)(((L)yes & mask) | ((L)no & ~mask)); }

/* `n` rounded up to whole vectors. */
INLINE int64_t padded(int64_t n) { return (n + LANES - 1) & -(int64_t)LANES; }

/* Decodes elements of 16 or 32 bits with vectors: the compiler leaves most such loops scalar. */
LANE void decode_lanes(const uint8_t *p, int dtype, int kind, int64_t n, double *out) {
  const int size = kind == LANES_F32 ? 4 : 2;
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) widen_lanes(load_lanes(p + size * i, kind), out + i);
  if (i < n) decode_double(p, dtype, i, n - i, out + i);
}

/* A block of one side as float64. Float64 data are returned in place. `first` and `n` count reals. */
static const double *decoded(const uint8_t *data, int dtype, int widen, int64_t first, int64_t n, double *room) {
  const int aligned = (uintptr_t)data % sizeof(double) == 0;
  if (dtype == DTYPE_FLOAT64 && aligned && !widen && n % LANES == 0) return (const double *)(const void *)(data + 8 * first);
  if (widen) {
    double half[BLOCK / 2];
    decode_double(data, dtype, first / 2, (n + 1) / 2, half); /* blocks begin at even indices */
    for (int64_t i = 0; i < n; i++) room[i] = i & 1 ? 0.0 : half[i / 2];
  } else {
    switch (dtype) {
      case DTYPE_FLOAT32: decode_lanes(data + 4 * first, dtype, LANES_F32, n, room); break;
      case DTYPE_FLOAT16: decode_lanes(data + 2 * first, dtype, LANES_F16, n, room); break;
      case DTYPE_BFLOAT16: decode_lanes(data + 2 * first, dtype, LANES_BF16, n, room); break;
      default: decode_double(data, dtype, first, n, room); break;
    }
  }
  for (int64_t i = n; i < padded(n); i++) room[i] = -INFINITY;
  return room;
}

/* ---- one side ---- */

/* Which lanes hold a finite number that is not a sentinel. `floor` is the sentinel, below which a format has only -inf,
 * or it is -inf itself. */
LANE M finite_lanes(D v, D floor) { return m_and(m_lt(floor, v), m_le(v, d_set(DBL_MAX))); }
INLINE int is_finite(double v, double floor) { return floor < v && v <= DBL_MAX; }

/* Adds a block's sums to a side. The sum of squares about the mean is a difference of two sums; if more than four of
 * its sixteen digits would be lost, a second pass over the block computes it. */
LANE void join_block(Side *s, const double *x, int64_t n, double floor, double scale, int64_t finite, double sum,
                     double squares) {
  if (finite == 0) return;
  double count = (double)finite, mean = sum / count, m2 = squares - sum * mean;
  if (!(m2 > 1e-4 * squares)) {
    const D about = d_set(mean), by = d_set(scale), low = d_set(floor);
    D drift = d_set(0), spread = d_set(0);
    for (int64_t i = 0; i < n; i += LANES) {
      D v = d_load(x + i), d = d_keep(finite_lanes(v, low), v * by - about);
      drift += d;
      spread = d_fma(d, d, spread);
    }
    double slip = d_total(drift); /* the rounding error of the mean */
    m2 = d_total(spread) - slip * slip / count;
    mean += slip / count;
  }
  join_spread(s, count, mean, m2);
  add_block(&s->sum, sum);
  add_block(&s->squares, squares);
}

/* Counts the non-finite values of a block that holds some. `only_low`: all of them are -inf or a sentinel. */
static void count_nonfinite(Side *s, const double *x, int64_t base, int64_t n, double floor, int64_t finite,
                            int only_low) {
  int64_t nan = 0, pos_inf = 0;
  if (!only_low) {
    Tally numbers = tally_none(), high = numbers;
    for (int64_t i = 0; i < n; i += LANES) {
      D v = d_load(x + i);
      numbers = tally_add(numbers, m_eq(v, v));
      high = tally_add(high, m_lt(d_set(DBL_MAX), v));
    }
    nan = padded(n) - tally_total(numbers);
    pos_inf = tally_total(high);
  }
  s->nan += nan;
  s->pos_inf += pos_inf;
  s->neg_inf += n - finite - nan - pos_inf;
  if (s->nonfinite_at >= 0) return;
  int64_t i = 0;
  while (i < n - 1 && is_finite(x[i], floor)) i++;
  s->nonfinite_at = base + i;
}

/* Measures one side of a block with masks. Sums are of values multiplied by `scale`; extremes are not. */
static int64_t side_block(Side *s, const double *x, int64_t base, int64_t n, double floor, double scale) {
  const D inf = d_set(INFINITY), by = d_set(scale), low = d_set(floor);
  D sum = d_set(0), squares = sum, least = inf, most = -inf;
  Tally finite = tally_none();
  for (int64_t i = 0; i < n; i += LANES) {
    D v = d_load(x + i);
    M ok = finite_lanes(v, low);
    finite = tally_add(finite, ok);
    least = d_min(least, d_pick(ok, v, inf));
    most = d_max(most, d_pick(ok, v, -inf));
    v = d_keep(ok, v) * by;
    sum += v;
    squares = d_fma(v, v, squares);
  }
  const int64_t finite_n = tally_total(finite);
  s->min = fmin(s->min, d_least(least));
  s->max = fmax(s->max, d_greatest(most));
  if (finite_n < n) count_nonfinite(s, x, base, n, floor, finite_n, 0);
  join_block(s, x, n, floor, scale, finite_n, d_total(sum), d_total(squares));
  return finite_n;
}

static Side scaled_side(const Pair *p, int which, int64_t count, int exponent) {
  double room[BLOCK] __attribute__((aligned(64)));
  Side s = empty_side();
  for (int64_t i = 0; i < count; i += BLOCK) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK;
    const double *x = decoded(p->data[which], p->dtype[which], p->widen[which], i, n, room);
    side_block(&s, x, i, n, p->floor[which], ldexp(1.0, -exponent));
  }
  return s;
}

/* ---- units in the last place ---- */

/* The index of a magnitude, rounded to nearest even, in a format's list of numbers. */
LANE U ordinal(D a, const Format *f) {
  if (f->mantissa == 52) return (U)a;
  int shift = 52 - f->mantissa;
  U bits = (U)a;
  /* A format without mantissa bits has only powers of two. A tie rounds up, as to an even number. */
  U odd = f->mantissa ? (bits >> shift) & 1 : u_set(1);
  U rounded = bits + u_set((1ull << (shift - 1)) - 1) + odd;
  U normal = (rounded >> shift) - u_set((uint64_t)(f->emin + 1022) << f->mantissa);
  /* Below the normal numbers all steps are equal: the integer above 2^52 counts them. */
  D scaled = a * d_set(double_of((uint64_t)(f->mantissa - f->emin + 1023) << 52)) + d_set(0x1p52);
  U small = (U)scaled - u_set(0x4330000000000000ull);
  /* Magnitudes are compared as integers, which have the same order. */
  L below = (L)(bits < u_set((uint64_t)(f->emin + 1023) << 52));
  U place = u_pick(below, small, normal);
  return u_pick((L)(place > u_set(f->top)), u_set(f->top), place);
}

static uint64_t greatest_ulp(const double *r_in, const double *c_in, int64_t n, const Format *f) {
  U most = u_set(0);
  for (int64_t i = 0; i < n; i += LANES) {
    D r = d_load(r_in + i), c = d_load(c_in + i);
    U a = ordinal(d_abs(r), f), b = ordinal(d_abs(c), f);
    U apart = u_pick((L)(a < b), b - a, a - b);
    U steps = u_pick(((L)r ^ (L)c) < 0, a + b, apart);
    most = u_pick((L)(steps > most), steps, most);
  }
  uint64_t best = 0;
  for (int i = 0; i < LANES; i++) best = most[i] > best ? most[i] : best;
  return best;
}

/* An element can have a new greatest ULP distance only if its relative error and its error exceed these limits. */
typedef struct { double rel, ae; } UlpLimits;

/* The number with ordinal `n`; for a fraction, a value between the two neighbouring numbers. */
INLINE double value_of_ordinal(double n, const Format *f) {
  double binade = ldexp(1.0, f->mantissa), e = floor(n / binade);
  if (e < 1) return ldexp(n, f->emin - f->mantissa);
  return ldexp(binade + (n - e * binade), (int)(e < 4096 ? e : 4096) - 1 + f->emin - f->mantissa);
}

/* `rel`: between r and c (of one sign, as rel < 1), neighbouring numbers are at least min(|r|, |c|) * 2^-(mantissa + 1)
 * apart, so that there are at most rel / (1 - rel) * 2^(mantissa + 1) steps; rounding r to the candidate's format first
 * may add one. `ae`: for opposite signs, |r| = |c| = |e| / 2 gives the most steps; for equal signs, all steps are below
 * the larger of the two, which is at most |e| + |e| / rel. Two steps are kept in reserve for rounding. */
COLD static UlpLimits ulp_limits(const Pair *s) {
  const Format *f = &FORMATS[s->dtype[1]];
  if (!f->is_float) return (UlpLimits){INFINITY, INFINITY};
  double steps = (double)s->ulp + (s->dtype[0] == s->dtype[1] ? 0.99 : -0.01);
  if (steps <= 0) return (UlpLimits){0, 0};
  double q = ldexp(steps, -(f->mantissa + 1)), rel = q / (1.0 + q) * (1.0 - 0x1p-20);
  UlpLimits limits = {rel < 0.98 ? rel : 0.98, 0};
  if (s->ulp < 4) return limits;
  double fewer = (double)s->ulp - 2, across = 2 * value_of_ordinal(fewer / 2, f);
  double along = value_of_ordinal(fewer, f) / (1 + 1 / limits.rel);
  limits.ae = (across < along ? across : along) * (1 - 0x1p-20);
  if (!(limits.ae >= DBL_MIN)) limits.ae = 0;
  return limits;
}

/* Whether every candidate is the reference rounded to its format, as after a mere conversion. This takes a quarter of
 * the time of computing distances. An error below half the distance of neighbouring numbers at r proves it; a tie does
 * not. */
static int is_rounded(const double *r_in, const double *c_in, int64_t n, const Format *f) {
  const D half = d_set(ldexp(1.0, -(f->mantissa + 1))), zero = d_set(0);
  M other = m_none();
  for (int64_t i = 0; i < n; i += LANES) {
    D r = d_load(r_in + i), ae = d_abs(d_load(c_in + i) - r);
    D binade = (D)((U)r & u_set(0x7FF0000000000000ull));
    other = m_or(other, m_not(m_or(m_lt(ae, binade * half), m_eq(ae, zero))));
  }
  return (m_bits(other) & LANE_BITS) == 0;
}

/* For candidates of an integer format: the greatest distance from the integer nearest to the reference. */
static double greatest_step(const double *r, const double *c, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(c[i] - rint(r[i])));
  return most;
}

/* ---- both sides ---- */

/* Sums and counts over a block's elements that are finite on one side only, for each side. */
typedef struct { double sum[2], squares[2]; int64_t finite[2]; } Alone;

/* Measures a block that holds pairs which are neither finite nor masked on both sides; rare, even in masked tensors. */
__attribute__((noinline)) static Alone one_sided_block(Pair *s, const double *r_in, const double *c_in, int64_t base,
                                                       int64_t n) {
  const D zero = d_set(0), floors[2] = {d_set(s->floor[0]), d_set(s->floor[1])};
  D sum[2] = {zero, zero}, squares[2] = {zero, zero};
  Tally finite[2] = {tally_none(), tally_none()}, one_sided = tally_none();
  Moments *m = &s->m;
  for (int64_t i = 0; i < n; i += LANES) {
    const D v[2] = {d_load(r_in + i), d_load(c_in + i)};
    const M ok[2] = {finite_lanes(v[0], floors[0]), finite_lanes(v[1], floors[1])}, both = m_and(ok[0], ok[1]);
    for (int side = 0; side < 2; side++) {
      M alone = m_and(ok[side], m_not(both));
      D own = d_keep(alone, v[side]);
      sum[side] += own;
      squares[side] = d_fma(own, own, squares[side]);
      finite[side] = tally_add(finite[side], alone);
    }
    M nan = m_not(m_or(m_eq(v[0], v[0]), m_eq(v[1], v[1])));
    M low = m_and(m_le(v[0], floors[0]), m_le(v[1], floors[1])); /* -inf or a sentinel */
    M infinite = m_and(m_eq(v[0], v[1]), m_not(m_or(ok[0], ok[1])));
    M apart = m_not(m_or(m_or(nan, low), m_or(infinite, both)));
    one_sided = tally_add(one_sided, apart);
    unsigned lanes = m_bits(apart) & LANE_BITS;
    if (lanes && m->one_sided_at < 0) {
      m->one_sided_at = base + i + __builtin_ctz(lanes);
      note_first(&m->first_different_at, m->one_sided_at);
    }
  }
  const int64_t count = tally_total(one_sided);
  m->one_sided += count;
  m->outside += count;
  m->different += count;
  return (Alone){{d_total(sum[0]), d_total(sum[1])},
                 {d_total(squares[0]), d_total(squares[1])},
                 {tally_total(finite[0]), tally_total(finite[1])}};
}

/* Looks up a block's figures that can change: the first difference, the position of the greatest error (`greatest` is 0
 * if it is not in this block) and the distance in the candidate's format. */
__attribute__((noinline)) static void look_up(Pair *s, const double *r, const double *c, int64_t base, int64_t n,
                                              int masked, int first, double greatest, UlpLimits *limits) {
  double clean[2][BLOCK] __attribute__((aligned(64)));
  Moments *m = &s->m;
  if (masked) {
    const D r_floor = d_set(s->floor[0]), c_floor = d_set(s->floor[1]);
    for (int64_t i = 0; i < n; i += LANES) {
      D a = d_load(r + i), b = d_load(c + i);
      M both = m_and(finite_lanes(a, r_floor), finite_lanes(b, c_floor));
      d_store(clean[0] + i, d_keep(both, a));
      d_store(clean[1] + i, d_keep(both, b));
    }
    r = clean[0];
    c = clean[1];
  }
  if (first) {
    int64_t i = 0;
    while (i < n - 1 && r[i] == c[i]) i++;
    note_first(&m->first_different_at, base + i);
  }
  if (greatest > 0) {
    int64_t i = 0;
    while (i < n - 1 && fabs(c[i] - r[i]) != greatest) i++;
    m->max_abs_e = greatest;
    m->max_abs_e_at = base + i;
  }
  const Format *f = &FORMATS[s->dtype[1]];
  if (f->is_float) {
    if (s->ulp == 0 && is_rounded(r, c, n, f)) return;
    uint64_t ulp = greatest_ulp(r, c, n, f);
    if (ulp <= s->ulp) return;
    s->ulp = ulp;
    *limits = ulp_limits(s);
  } else {
    s->ulp_real = fmax(s->ulp_real, greatest_step(r, c, n));
  }
}

/* Computes every figure of a pair for one block of whole vectors. `masked` is a constant where this is inlined; it says
 * that something is not finite. Without it, a block that turns out to need masks returns 0 and changes nothing. `n`
 * counts elements without the padding of the last vector. */
LANE int measure(Pair *s, const double *r_in, const double *c_in, int64_t base, int64_t n, int masked,
                 UlpLimits *limits) {
  const int64_t whole = padded(n);
  const D zero = d_set(0), inf = d_set(INFINITY), top = d_set(DBL_MAX), atol = d_set(s->atol), rtol = d_set(s->rtol);
  const D r_floor = d_set(s->floor[0]), c_floor = d_set(s->floor[1]);
  const D rel_limit = d_set(limits->rel), ae_limit = d_set(limits->ae);
  D sum_r = zero, sum_c = zero, rr = zero, cc = zero, rc = zero, ee = zero, sum_ae = zero, sum_rel = zero;
  D max_ae = zero, max_rel = zero, r_min = inf, r_max = -inf, c_min = inf, c_max = -inf;
  Tally same = tally_none(), inside = same, joint = same;
  M far = m_none(), apart = m_none();
  Moments *m = &s->m;
  for (int64_t i = 0; i < whole; i += LANES) {
    D r = d_load(r_in + i), c = d_load(c_in + i);
    if (masked) {
      const M r_low = m_le(r, r_floor), c_low = m_le(c, c_floor);
      const M r_ok = m_and(m_le(r, top), m_not(r_low)), c_ok = m_and(m_le(c, top), m_not(c_low));
      const M both = m_and(r_ok, c_ok);
      r_min = d_min(r_min, d_pick(r_ok, r, inf));
      r_max = d_max(r_max, d_pick(r_ok, r, -inf));
      c_min = d_min(c_min, d_pick(c_ok, c, inf));
      c_max = d_max(c_max, d_pick(c_ok, c, -inf));
      joint = tally_add(joint, both);
      apart = m_or(apart, m_not(m_or(both, m_and(r_low, c_low))));
      r = d_keep(both, r);
      c = d_keep(both, c);
    } else {
      r_min = d_min(r_min, r);
      r_max = d_max(r_max, r);
      c_min = d_min(c_min, c);
      c_max = d_max(c_max, c);
    }
    D e = c - r, ae = d_abs(e), ar = d_abs(r);
    M equal = m_eq(e, zero);
    D rel = d_keep(m_not(equal), ae / ar);
    sum_r += r;
    sum_c += c;
    rr = d_fma(r, r, rr);
    cc = d_fma(c, c, cc);
    rc = d_fma(r, c, rc);
    ee = d_fma(e, e, ee);
    sum_ae += ae;
    sum_rel += rel;
    max_ae = d_max(max_ae, ae);
    max_rel = d_max(max_rel, rel);
    same = tally_add(same, equal);
    inside = tally_add(inside, m_le(ae, atol + rtol * ar)); /* two roundings, as in numpy */
    far = m_or(far, m_and(m_lt(rel_limit, rel), m_lt(ae_limit, ae)));
  }
  double least[2] = {d_least(r_min), d_least(c_min)}, most[2] = {d_greatest(r_max), d_greatest(c_max)};
  double squares[2] = {d_total(rr), d_total(cc)}, sums[2] = {d_total(sum_r), d_total(sum_c)};
  if (!masked && (!(squares[0] + squares[1] <= DBL_MAX) || least[0] <= s->floor[0] || least[1] <= s->floor[1])) return 0;
  const int64_t finite = masked ? tally_total(joint) : n;
  Alone alone = {{0, 0}, {0, 0}, {0, 0}};
  const int unlike = (m_bits(apart) & LANE_BITS) != 0; /* more than -inf or sentinels on both sides */
  if (unlike) alone = one_sided_block(s, r_in, c_in, base, n);
  for (int side = 0; side < 2; side++) {
    Side *own = &s->side[side];
    const double *x = side ? c_in : r_in;
    const int64_t count = finite + alone.finite[side];
    own->min = fmin(own->min, least[side]);
    own->max = fmax(own->max, most[side]);
    if (masked && count < n) count_nonfinite(own, x, base, n, s->floor[side], count, !unlike);
    join_block(own, x, n, s->floor[side], 1.0, count, sums[side] + alone.sum[side], squares[side] + alone.squares[side]);
  }
  if (masked) {
    /* A negative or NaN tolerance would count zero against zero as outside. */
    if (!(0 <= s->atol + s->rtol * 0)) m->outside -= whole - finite;
  }
  const int64_t differ = whole - tally_total(same);
  const double greatest = d_greatest(max_ae);
  m->finite += finite;
  add_block(&s->rr, squares[0]);
  add_block(&s->cc, squares[1]);
  add_block(&s->rc, d_total(rc));
  add_block(&s->ee, d_total(ee));
  add_block(&s->abs_e, d_total(sum_ae));
  add_block(&s->rel_e, d_total(sum_rel));
  m->max_rel_e = fmax(m->max_rel_e, d_greatest(max_rel));
  m->outside += whole - tally_total(inside);
  m->different += differ;
  const int new_first = differ && (m->first_different_at < 0 || m->first_different_at >= base);
  const int new_greatest = greatest > m->max_abs_e, to_integer = !FORMATS[s->dtype[1]].is_float;
  if (new_first | new_greatest | to_integer | ((m_bits(far) & LANE_BITS) != 0))
    look_up(s, r_in, c_in, base, whole, masked, new_first, new_greatest ? greatest : 0, limits);
  s->masked = finite < n;
  return 1;
}

/* Separate functions, so that the two loops do not share registers. */
__attribute__((noinline)) static int measure_finite(Pair *s, const double *r, const double *c, int64_t base, int64_t n,
                                                    UlpLimits *limits) {
  return measure(s, r, c, base, n, 0, limits);
}
__attribute__((noinline)) static int measure_masked(Pair *s, const double *r, const double *c, int64_t base, int64_t n,
                                                    UlpLimits *limits) {
  return measure(s, r, c, base, n, 1, limits);
}

/* 64-bit integers beyond 2^53: differences are computed exactly, in 128 bits, one by one. */
INLINE __int128 integer_at(const uint8_t *base, int dtype, int64_t i) {
  switch (dtype) {
    case DTYPE_INT64: return (int64_t)read64(base + 8 * i);
    case DTYPE_UINT64: return (__int128)read64(base + 8 * i);
    default: {
      double v;
      decode_double(base, dtype, i, 1, &v);
      return (__int128)v;
    }
  }
}

INLINE int is_wide(int dtype) { return dtype == DTYPE_INT64 || dtype == DTYPE_UINT64; }

/* Whether a block must be measured as integers. */
static int exceeds_float64(const Pair *s, const double *r, const double *c, int64_t n) {
  if (!is_wide(s->dtype[0]) && !is_wide(s->dtype[1])) return 0;
  if (FORMATS[s->dtype[0]].is_float || FORMATS[s->dtype[1]].is_float || s->widen[0] || s->widen[1]) return 0;
  double most = 0;
  for (int64_t i = 0; i < n; i++) most = fmax(most, fmax(fabs(r[i]), fabs(c[i])));
  return most >= 0x1p52;
}

COLD static void integer_block(Pair *s, const double *r_in, const double *c_in, int64_t base, int64_t n) {
  Moments *m = &s->m;
  side_block(&s->side[0], r_in, base, n, -INFINITY, 1.0);
  side_block(&s->side[1], c_in, base, n, -INFINITY, 1.0);
  for (int64_t i = base; i < base + n; i++) {
    __int128 ri = integer_at(s->data[0], s->dtype[0], i), ci = integer_at(s->data[1], s->dtype[1], i);
    double r = (double)ri, c = (double)ci, e = (double)(ci - ri), ae = fabs(e), ar = fabs(r);
    double rel = ae == 0 ? 0.0 : ae / ar;
    m->finite++;
    add_block(&s->rr, r * r);
    add_block(&s->cc, c * c);
    add_block(&s->rc, r * c);
    add_block(&s->ee, e * e);
    add_block(&s->abs_e, ae);
    add_block(&s->rel_e, rel);
    m->max_rel_e = fmax(m->max_rel_e, rel);
    if (ae > m->max_abs_e) {
      m->max_abs_e = ae;
      m->max_abs_e_at = i;
    }
    s->ulp_real = fmax(s->ulp_real, ae);
    if (!(ae <= s->atol + s->rtol * ar)) m->outside++;
    if (ri == ci) continue;
    m->different++;
    note_first(&m->first_different_at, i);
  }
}

/* Blocks are counted from the first element, not from an aligned address, so figures do not depend on alignment. */
static void pair(Pair *s, int64_t count) {
  double room[2][BLOCK] __attribute__((aligned(64)));
  UlpLimits limits = ulp_limits(s);
  for (int64_t i = 0; i < count;) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK;
    if (n > LANES) n -= n % LANES; /* the rest of a vector becomes a block of its own, with masks */
    const double *r = decoded(s->data[0], s->dtype[0], s->widen[0], i, n, room[0]);
    const double *c = decoded(s->data[1], s->dtype[1], s->widen[1], i, n, room[1]);
    if (exceeds_float64(s, r, c, n)) integer_block(s, r, c, i, n);
    else if (s->masked || n < LANES || !measure_finite(s, r, c, i, n, &limits)) measure_masked(s, r, c, i, n, &limits);
    i += n;
  }
}
