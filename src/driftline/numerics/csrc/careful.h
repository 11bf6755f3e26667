/* Float64 lanes, masked: right for every format and value. Compiled once per instruction set. */

#undef LANE_FN
#define LANE_FN static inline __attribute__((always_inline)) TARGET

/* ---- lanes ---- */

typedef double vd __attribute__((vector_size(8 * LANES)));
typedef int64_t vl __attribute__((vector_size(8 * LANES)));
typedef uint64_t vu __attribute__((vector_size(8 * LANES)));

LANE_FN vd lanes(double v) { vd o = {0}; for (int i = 0; i < LANES; i++) o[i] = v; return o; }
LANE_FN vl lanes_l(int64_t v) { vl o = {0}; for (int i = 0; i < LANES; i++) o[i] = v; return o; }
LANE_FN vu lanes_u(uint64_t v) { vu o = {0}; for (int i = 0; i < LANES; i++) o[i] = v; return o; }
LANE_FN vl iota(void) { vl o = {0}; for (int i = 0; i < LANES; i++) o[i] = i; return o; }
/* Which lanes are among the `left` elements that remain: all, but at the very end. */
LANE_FN vl within(int64_t left) { return left >= LANES ? lanes_l(-1) : iota() < lanes_l(left); }
LANE_FN vd pick(vl mask, vd yes, vd no) { return (vd)(((vl)yes & mask) | ((vl)no & ~mask)); }
LANE_FN vd keep(vl mask, vd v) { return (vd)((vl)v & mask); }
LANE_FN vd magnitude(vd v) { return (vd)((vl)v & lanes_l(INT64_MAX)); }
LANE_FN vd load_lanes_d(const double *p) { vd v; memcpy(&v, p, sizeof v); return v; }

LANE_FN double total(vd v) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
LANE_FN int64_t total_l(vl v) {
  int64_t sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
LANE_FN double greatest(vd v) {
  double best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}
LANE_FN double least(vd v) {
  double best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] < best ? v[i] : best;
  return best;
}
LANE_FN uint64_t greatest_u(vu v) {
  uint64_t best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}
#undef MAXV
#undef MINV
#if WIDTH == 16
#define MAXV(a, b) ((vd)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
#define MINV(a, b) ((vd)_mm512_min_pd((__m512d)(a), (__m512d)(b)))
#elif WIDTH == 8
#define MAXV(a, b) ((vd)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#define MINV(a, b) ((vd)_mm256_min_pd((__m256d)(a), (__m256d)(b)))
#elif defined(__SSE2__)
#define MAXV(a, b) ((vd)_mm_max_pd((__m128d)(a), (__m128d)(b)))
#define MINV(a, b) ((vd)_mm_min_pd((__m128d)(a), (__m128d)(b)))
#else
#define MAXV(a, b) pick((a) < (b), (b), (a))
#define MINV(a, b) pick((b) < (a), (b), (a))
#endif

/* Where a magnitude stands in a format's list of numbers, after rounding to nearest even. */
LANE_FN vu ordinal(vd a, const Format *f) {
  if (f->mantissa == 52) return (vu)a;
  int shift = 52 - f->mantissa;
  vu bits = (vu)a;
  /* Without mantissa bits the significand is 1 or 2, and a tie goes to the even one: up. */
  vu odd = f->mantissa ? (bits >> shift) & 1 : lanes_u(1);
  vu rounded = bits + lanes_u((1ull << (shift - 1)) - 1) + odd;
  vu normal = (rounded >> shift) - lanes_u((uint64_t)(f->emin + 1022) << f->mantissa);
  vd scaled = a * lanes(double_of((uint64_t)(f->mantissa - f->emin + 1023) << 52)) + lanes(0x1p52);
  vu small = (vu)scaled - lanes_u(0x4330000000000000ull);
  vl below = a < lanes(double_of((uint64_t)(f->emin + 1023) << 52));
  vu place = (vu)(((vl)small & below) | ((vl)normal & ~below));
  vl past = (vl)(place > lanes_u(f->top));
  return (vu)(((vl)lanes_u(f->top) & past) | ((vl)place & ~past));
}

LANE_FN vu ulp_lanes(vd r, vd c, const Format *f) {
  vu a = ordinal(magnitude(r), f), b = ordinal(magnitude(c), f);
  vl opposite = ((vl)r ^ (vl)c) < 0;
  vl less = (vl)(a < b);
  vu apart = (vu)(((vl)(b - a) & less) | ((vl)(a - b) & ~less));
  return (vu)(((vl)(a + b) & opposite) | ((vl)apart & ~opposite));
}

/* One block of both sides in float64. Arrays hold a multiple of eight; what is past n is masked. */
LANE_FN void careful_pair(Pair *s, const double *r_in, const double *c_in, int64_t base, int64_t n) {
  const vd zero = lanes(0.0), inf = lanes(INFINITY), top = lanes(DBL_MAX);
  const vd sr = lanes(s->format[0].sentinel), sc = lanes(s->format[1].sentinel);
  const vd atol = lanes(s->atol), rtol = lanes(s->rtol);
  vd own_r = zero, own_c = zero, own_rr = zero, own_cc = zero;
  vd jr = zero, jc = zero, jrr = zero, jcc = zero, jrc = zero, jee = zero, jae = zero, jrel = zero;
  vd max_e = zero, max_rel = zero, rmin = inf, rmax = -inf, cmin = inf, cmax = -inf, far = zero;
  vl nr = {0}, nc = {0}, nj = {0}, nan_r = {0}, nan_c = {0}, pos_r = {0}, pos_c = {0}, neg_r = {0}, neg_c = {0};
  vl differ_n = {0}, sided_n = {0}, outside_n = {0};
  vu ulp = {0};
  Format f = s->format[1];

  for (int64_t i = 0; i < n; i += LANES) {
    vl valid = within(n - i);
    vd r = load_lanes_d(r_in + i), c = load_lanes_d(c_in + i);
    r = pick(r == sr, -inf, r);
    c = pick(c == sc, -inf, c);
    vl fr = (magnitude(r) <= top) & valid, fc = (magnitude(c) <= top) & valid, both = fr & fc;
    vl isnan_r = r != r, isnan_c = c != c;
    nan_r -= isnan_r & valid;
    nan_c -= isnan_c & valid;
    pos_r -= (r == inf) & valid;
    pos_c -= (c == inf) & valid;
    neg_r -= (r == -inf) & valid;
    neg_c -= (c == -inf) & valid;
    nr -= fr;
    nc -= fc;
    nj -= both;
    vd r1 = keep(fr, r), c1 = keep(fc, c);
    own_r += r1;
    own_c += c1;
    own_rr += r1 * r1;
    own_cc += c1 * c1;
    rmin = MINV(rmin, pick(fr, r, inf));
    rmax = MAXV(rmax, pick(fr, r, -inf));
    cmin = MINV(cmin, pick(fc, c, inf));
    cmax = MAXV(cmax, pick(fc, c, -inf));
    vd rj = keep(both, r), cj = keep(both, c), e = cj - rj, ae = magnitude(e), ar = magnitude(rj);
    jr += rj;
    jc += cj;
    jrr += rj * rj;
    jcc += cj * cj;
    jrc += rj * cj;
    jee += e * e;
    jae += ae;
    vd rel = keep(ae != zero, ae / ar);
    jrel += rel;
    max_e = MAXV(max_e, ae);
    max_rel = MAXV(max_rel, rel);
    vl differ = (r != c) & ~(isnan_r & isnan_c) & valid, sided = differ & ~both;
    differ_n -= differ;
    sided_n -= sided;
    outside_n -= (both & ~(ae <= atol + rtol * ar)) | sided;
    if (f.is_float) {
      vu d = ulp_lanes(rj, cj, &f);
      vl more = (vl)(ulp < d);
      ulp = (vu)(((vl)d & more) | ((vl)ulp & ~more));
    } else {
      /* To the nearest integer, ties to even; what has no fraction bits left is one already. */
      vd bump = lanes(0x1p52), whole = (ar + bump) - bump;
      whole = pick(ar >= bump, ar, whole);
      whole = (vd)((vl)whole | ((vl)rj & lanes_l(INT64_MIN)));
      far = MAXV(far, magnitude(cj - whole));
    }
  }

  Moments *m = &s->m;
  double count[2] = {(double)total_l(nr), (double)total_l(nc)}, sums[2] = {total(own_r), total(own_c)};
  for (int side = 0; side < 2; side++) {
    if (count[side] == 0) continue;
    const double *x = side ? c_in : r_in;
    vd mean = lanes(sums[side] / count[side]), m2 = zero, drift = zero, sentinel = side ? sc : sr;
    for (int64_t i = 0; i < n; i += LANES) {
      vd v = load_lanes_d(x + i);
      vl ok = within(n - i) & (magnitude(v) <= top) & (v != sentinel);
      vd d = keep(ok, v - mean);
      m2 += d * d;
      drift += d;
    }
    double slip = total(drift); /* what rounding left in the mean: part of the sum of squares about it */
    join_spread(&s->spread[side], count[side], mean[0] + slip / count[side], total(m2) - slip * slip / count[side]);
  }
  if (count[0] > 0) s->shift = worth_a_shift(sums[0], total(own_rr), count[0]) ? sums[0] / count[0] : 0.0;
  int64_t new_differ = total_l(differ_n), joint = total_l(nj);
  m->finite += joint;
  m->finite_one[0] += (int64_t)count[0];
  m->finite_one[1] += (int64_t)count[1];
  m->nan[0] += total_l(nan_r);
  m->nan[1] += total_l(nan_c);
  m->pos_inf[0] += total_l(pos_r);
  m->pos_inf[1] += total_l(pos_c);
  m->neg_inf[0] += total_l(neg_r);
  m->neg_inf[1] += total_l(neg_c);
  m->different += new_differ;
  m->one_sided += total_l(sided_n);
  m->outside += total_l(outside_n);
  m->sum_r += total(jr);
  m->sum_c += total(jc);
  m->sum_rr += total(jrr);
  m->sum_cc += total(jcc);
  m->sum_rc += total(jrc);
  m->sum_ee += total(jee);
  m->sum_abs_e += total(jae);
  m->sum_rel_e += total(jrel);
  m->sum[0] += sums[0];
  m->sum[1] += sums[1];
  m->sumsq[0] += total(own_rr);
  m->sumsq[1] += total(own_cc);
  m->ends[0].min = fmin(m->ends[0].min, least(rmin));
  m->ends[0].max = fmax(m->ends[0].max, greatest(rmax));
  m->ends[1].min = fmin(m->ends[1].min, least(cmin));
  m->ends[1].max = fmax(m->ends[1].max, greatest(cmax));
  m->max_rel_e = fmax(m->max_rel_e, greatest(max_rel));
  uint64_t u = greatest_u(ulp);
  if (u > s->ulp) s->ulp = u;
  s->ulp_real = fmax(s->ulp_real, greatest(far));
  find_greatest_error(s, r_in, c_in, base, n, greatest(max_e));
  int odd_r = count[0] != (double)n, odd_c = count[1] != (double)n;
  if ((new_differ && m->first_different_at < 0) || (odd_r && m->nonfinite_at[0] < 0) ||
      (odd_c && m->nonfinite_at[1] < 0) || (m->one_sided && m->one_sided_at < 0))
    find_positions(s, r_in, c_in, base, n);
}

TARGET static void careful_block(Pair *s, int64_t base, int64_t n) {
  double r[PIECE] __attribute__((aligned(64))), c[PIECE] __attribute__((aligned(64)));
  int64_t whole = (n + 7) & ~(int64_t)7;
  for (int64_t i = n; i < whole; i++) r[i] = c[i] = 0.0;
  decode_side(s->data[0], s->dtype[0], s->widen[0], base, n, r);
  decode_side(s->data[1], s->dtype[1], s->widen[1], base, n, c);
  if ((is_wide(s->dtype[0]) || is_wide(s->dtype[1])) && is_integer(s->dtype[0]) && is_integer(s->dtype[1]) &&
      !s->widen[0] && !s->widen[1]) {
    double widest = 0;
    for (int64_t i = 0; i < n; i++) widest = fmax(widest, fmax(fabs(r[i]), fabs(c[i])));
    if (widest >= 0x1p52) {
      exact_integers(s, base, n);
      return;
    }
  }
  careful_pair(s, r, c, base, n);
}

/* One block in float64; the array holds a multiple of 64, zeros past n. `base` is a multiple of 64. */
LANE_FN void careful_summary(One *s, double *x, int64_t base, int64_t n) {
  const vd zero = lanes(0.0), inf = lanes(INFINITY), top = lanes(DBL_MAX), sentinel = lanes(s->sentinel);
  vd sum = zero, squares = zero, low = inf, high = -inf, m2 = zero, drift = zero;
  vl finite = {0}, zeros = {0}, nans = {0}, pos = {0}, neg = {0};
  for (int64_t i = 0; i < n; i += LANES) {
    vl valid = within(n - i);
    vd v = load_lanes_d(x + i);
    v = pick(v == sentinel, -inf, v);
    vl ok = (magnitude(v) <= top) & valid;
    nans -= (v != v) & valid;
    pos -= (v == inf) & valid;
    neg -= (v == -inf) & valid;
    zeros -= (v == zero) & valid;
    finite -= ok;
    low = MINV(low, pick(ok, v, inf));
    high = MAXV(high, pick(ok, v, -inf));
    v = keep(ok, v);
    sum += v;
    squares += v * v;
    memcpy(x + i, &v, sizeof v);
  }
  int64_t ok_n = total_l(finite), odd = n - ok_n;
  Summary *o = &s->s;
  if (ok_n) {
    vd mean = lanes(total(sum) / (double)ok_n);
    for (int64_t i = 0; i < n; i += LANES) {
      vd d = keep(within(n - i), load_lanes_d(x + i) - mean);
      m2 += d * d;
      drift += d;
    }
    double slip = total(drift), about = total(m2);
    if (odd) { /* masked elements were counted as zeros; take them out again */
      about -= (double)odd * mean[0] * mean[0];
      slip += (double)odd * mean[0];
      if (about < 1e-6 * (double)odd * mean[0] * mean[0] || !(about >= 0)) { /* too much was taken out to trust */
        about = slip = 0;
        double raw[PIECE];
        decode_double(s->data, s->dtype, base, n, raw);
        for (int64_t i = 0; i < n; i++)
          if (fabs(raw[i]) <= DBL_MAX && raw[i] != s->sentinel) {
            about += (raw[i] - mean[0]) * (raw[i] - mean[0]);
            slip += raw[i] - mean[0];
          }
      }
    }
    join_spread(&s->spread, (double)ok_n, mean[0] + slip / (double)ok_n, about - slip * slip / (double)ok_n);
    s->shift = mean[0];
  }
  o->nan += total_l(nans);
  o->pos_inf += total_l(pos);
  o->neg_inf += total_l(neg);
  o->zeros += total_l(zeros);
  o->min = fmin(o->min, least(low));
  o->max = fmax(o->max, greatest(high));
  s->sumsq += total(squares);
  for (int64_t i = 0; i < n; i += BUCKETS) {
    uint64_t signs = sketch_signs((uint64_t)(base + i) / BUCKETS);
    unsigned flip = sketch_xor(signs);
    for (int j = 0; j < BUCKETS; j += LANES) {
      vu turn = ((lanes_u(signs >> j) >> (vu)iota()) & 1) << 63;
      vu v = (vu)load_lanes_d(x + i + j) ^ turn;
      memcpy(x + i + j, &v, sizeof v);
    }
    for (unsigned j = 0; j < BUCKETS; j += 2) { /* pairs: they move together, perhaps changing places */
      double *to = o->sketch + (j ^ (flip & 62));
      const double *from = x + i + j;
      to[0] += from[flip & 1];
      to[1] += from[~flip & 1];
    }
  }
}

TARGET static void careful_summary_block(One *s, int64_t base, int64_t n) {
  double x[PIECE] __attribute__((aligned(64)));
  decode_double(s->data, s->dtype, base, n, x);
  int64_t whole = (n + BUCKETS - 1) / BUCKETS * BUCKETS;
  for (int64_t i = n; i < whole; i++) x[i] = 0.0;
  careful_summary(s, x, base, n);
}
