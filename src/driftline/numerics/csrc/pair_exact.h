/* A pair of tensors, block by block: both sides are decoded to float64, and every sum is float64.
 *
 * Each side of a block is gathered by itself (see block.h). A second loop takes both sides. If something was left out
 * of one of them, this loop takes masks: each pair that is not finite on both sides is replaced by zero and zero, which
 * adds nothing to any figure of the pair. Two loops, because one would need more than the sixteen registers of AVX2 and
 * SSE2: a sum that is kept in memory waits seven cycles for itself at each step.
 *
 * Three figures are looked up only where they can change, because they cost more than all others together:
 *  - the greatest ULP distance, in blocks with an element that can exceed the greatest so far (see UlpLimits);
 *  - positions, in blocks that hold a new first or greatest one;
 *  - the sum of squares about the mean, by a second pass over a block where the sums of the first would lose digits.
 *
 * Chains of float32 were 1.4 to 3.3 times as fast on normal data and 5 to 14 times as slow on masked tensors, and a
 * cosine in bfloat16 could be off by 2e-2 (see Accuracy in docs/metrics.md). */

typedef uint64_t U __attribute__((vector_size(8 * LANES)));
typedef int64_t L __attribute__((vector_size(8 * LANES)));

LANE U u_set(uint64_t v) { U o = {0}; for (int i = 0; i < LANES; i++) o[i] = v; return o; }
LANE U u_pick(L mask, U yes, U no) { return (U)(((L)yes & mask) | ((L)no & ~mask)); }

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

/* Whether any element exceeds both limits. */
static int exceeds(const double *r_in, const double *c_in, int64_t n, const UlpLimits *limits) {
  const D rel = d_set(limits->rel), least = d_set(limits->ae);
  M some = m_none();
  for (int64_t i = 0; i < n; i += LANES) {
    D r = d_load(r_in + i), ae = d_abs(d_load(c_in + i) - r);
    some = m_or(some, m_and(m_lt(rel * d_abs(r), ae), m_lt(least, ae)));
  }
  return (m_bits(some) & LANE_BITS) != 0;
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

/* Sums of squares of the pairs of a block that are finite on both sides. */
typedef struct { double rr, cc; } Squares;

/* Measures a block that holds pairs which are neither finite nor masked on both sides; rare, even in masked tensors.
 * `raw`: its elements as they are. */
__attribute__((noinline)) static Squares one_sided_block(Pair *s, const Block *own, double raw[2][BLOCK], int64_t base,
                                                         int64_t n) {
  const D floors[2] = {d_set(s->floor[0]), d_set(s->floor[1])};
  D squares[2] = {d_set(0), d_set(0)};
  Tally one_sided = tally_none();
  Moments *m = &s->m;
  for (int64_t i = 0; i < padded(n); i += LANES) {
    const D v[2] = {d_load(raw[0] + i), d_load(raw[1] + i)};
    const D x[2] = {d_load(own[0].x + i), d_load(own[1].x + i)};
    const M ok[2] = {m_eq(x[0], x[0]), m_eq(x[1], x[1])}, both = m_and(ok[0], ok[1]);
    for (int side = 0; side < 2; side++) {
      D joint = d_keep(both, x[side]);
      squares[side] = d_fma(joint, joint, squares[side]);
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
  return (Squares){d_total(squares[0]), d_total(squares[1])};
}

/* Looks up a block's figures that can change: the first difference, the position of the greatest error (`greatest` is 0
 * if it is not in this block) and the distance in the candidate's format. */
__attribute__((noinline)) static void look_up(Pair *s, const double *r, const double *c, int64_t base, int64_t n,
                                              int masked, int first, double greatest, UlpLimits *limits) {
  double clean[2][BLOCK] __attribute__((aligned(64)));
  Moments *m = &s->m;
  if (masked) {
    for (int64_t i = 0; i < n; i += LANES) {
      D a = d_load(r + i), b = d_load(c + i);
      M both = m_ordered(a, b);
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
    if (s->ulp == 0 ? is_rounded(r, c, n, f) : !exceeds(r, c, n, limits)) return;
    uint64_t ulp = greatest_ulp(r, c, n, f);
    if (ulp <= s->ulp) return;
    s->ulp = ulp;
    *limits = ulp_limits(s);
  } else {
    s->ulp_real = fmax(s->ulp_real, greatest_step(r, c, n));
  }
}

/* Figures of a block's pairs that are finite on both sides; the others are counted as zeros that are inside. */
typedef struct {
  double rc, ee, abs_e, rel_e, max_abs_e, max_rel_e;
  int64_t finite, different, inside;
} Joint;

/* `n` counts whole steps. `masked` is a constant where this is inlined: something was left out of a side. */
LANE Joint joint_figures(const double *r_in, const double *c_in, int64_t n, double atol, double rtol, int masked) {
  const D zero = d_set(0), absolute = d_set(atol), relative = d_set(rtol);
  D rc = zero, ee = zero, sum_ae = zero, sum_rel = zero, max_ae = zero, max_rel = zero;
  Tally finite = tally_none(), different = finite, inside = finite;
  for (int64_t i = 0; i < n; i += LANES) {
    D r = d_load(r_in + i), c = d_load(c_in + i);
    if (masked) {
      const M both = m_ordered(r, c);
      finite = tally_add(finite, both);
      r = d_keep(both, r);
      c = d_keep(both, c);
    }
    D e = c - r, ae = d_abs(e), ar = d_abs(r);
    M differ = m_lt(zero, ae);
    D rel = d_keep(differ, ae / ar);
    rc = d_fma(r, c, rc);
    ee = d_fma(e, e, ee);
    sum_ae += ae;
    sum_rel += rel;
    max_ae = d_max(max_ae, ae);
    max_rel = d_max(max_rel, rel);
    different = tally_add(different, differ);
    inside = tally_add(inside, m_le(ae, absolute + relative * ar)); /* two roundings, as in numpy */
  }
  return (Joint){d_total(rc), d_total(ee), d_total(sum_ae), d_total(sum_rel), d_greatest(max_ae), d_greatest(max_rel),
                 masked ? tally_total(finite) : n, tally_total(different), tally_total(inside)};
}

/* Functions of their own, so that the loops share registers neither with each other nor with what calls them. */
__attribute__((noinline)) static Joint joint_finite(const double *r, const double *c, int64_t n, double atol,
                                                    double rtol) {
  return joint_figures(r, c, n, atol, rtol, 0);
}
__attribute__((noinline)) static Joint joint_masked(const double *r, const double *c, int64_t n, double atol,
                                                    double rtol) {
  return joint_figures(r, c, n, atol, rtol, 1);
}

/* Computes the figures of a pair for one block. `n` counts elements without the padding of the last step. */
static void measure(Pair *s, const Block *own, int64_t base, int64_t n, UlpLimits *limits) {
  const int64_t whole = padded(n);
  const int masked = own[0].left_out || own[1].left_out || whole > n;
  const Joint j = (masked ? joint_masked : joint_finite)(own[0].x, own[1].x, whole, s->atol, s->rtol);
  Squares squares = {own[0].squares, own[1].squares};
  Moments *m = &s->m;
  if (masked) {
    /* The same elements are left out of both sides if each has as many as there are pairs. */
    const int alike = own[0].finite == j.finite && own[1].finite == j.finite && own[0].left_out < ANYTHING &&
                      own[1].left_out < ANYTHING;
    double raw[2][BLOCK] __attribute__((aligned(64)));
    if (!alike) {
      for (int side = 0; side < 2; side++) decode(s->data[side], s->dtype[side], s->widen[side], base, n, raw[side]);
      squares = one_sided_block(s, own, raw, base, n);
    }
    for (int side = 0; side < 2; side++)
      if (own[side].left_out) count_nonfinite(&s->side[side], &own[side], raw[side], base, n);
    /* A negative or NaN tolerance would count zero against zero as outside. */
    if (!(0 <= s->atol + s->rtol * 0)) m->outside -= whole - j.finite;
  }
  m->finite += j.finite;
  add_block(&s->rr, squares.rr);
  add_block(&s->cc, squares.cc);
  add_block(&s->rc, j.rc);
  add_block(&s->ee, j.ee);
  add_block(&s->abs_e, j.abs_e);
  add_block(&s->rel_e, j.rel_e);
  m->max_rel_e = fmax(m->max_rel_e, j.max_rel_e);
  m->outside += whole - j.inside;
  m->different += j.different;
  const int new_first = j.different && (m->first_different_at < 0 || m->first_different_at >= base);
  const int new_greatest = j.max_abs_e > m->max_abs_e, to_integer = !FORMATS[s->dtype[1]].is_float;
  const int new_ulp = j.max_rel_e > limits->rel && j.max_abs_e > limits->ae; /* perhaps of different elements */
  if (new_first | new_greatest | to_integer | new_ulp)
    look_up(s, own[0].x, own[1].x, base, whole, masked, new_first, new_greatest ? j.max_abs_e : 0, limits);
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
static int exceeds_float64(const Pair *s, const Block *own) {
  if (!is_wide(s->dtype[0]) && !is_wide(s->dtype[1])) return 0;
  if (FORMATS[s->dtype[0]].is_float || FORMATS[s->dtype[1]].is_float || s->widen[0] || s->widen[1]) return 0;
  return fmax(own[0].max, own[1].max) >= 0x1p52 || fmin(own[0].min, own[1].min) <= -0x1p52;
}

COLD static void integer_block(Pair *s, int64_t base, int64_t n) {
  Moments *m = &s->m;
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
  Block own[2] = {{.left_out = NOTHING}, {.left_out = NOTHING}};
  for (int64_t i = 0; i < count;) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK;
    if (n > STEP) n -= n % STEP; /* the rest of a step becomes a block of its own, with masks */
    for (int side = 0; side < 2; side++) {
      own[side] = side_block(s->data[side], s->dtype[side], s->widen[side], i, n, s->floor[side], own[side].left_out,
                             room[side]);
      join_block(&s->side[side], &own[side], n);
    }
    if (exceeds_float64(s, own)) integer_block(s, i, n);
    else measure(s, own, i, n, &limits);
    i += n;
  }
}
