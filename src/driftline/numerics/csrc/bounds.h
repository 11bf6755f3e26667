/* The fast path's scalar half: when float32 lanes are good enough, and what their sums rule out. */

/* Not zero where a chain may hold what it is named for. */
typedef struct { uint32_t near, far, rel; } Chain;

/* What one block of float32 lanes leaves behind. */
typedef struct {
  double x, e, xx, xe, ee, ae, rel; /* sums */
  float max_ae, max_rel, min_r, max_r;
  int64_t differ, outside;
  int marked, counted; /* `counted`: elements that seem to be outside are, in chains that came close as well */
  unsigned both; /* greatest sum of two words, of bfloat16 BY_CHAINS */
  unsigned far; /* greatest distance of words; proves that there is no news as long as it is below WORD_STEPS */
  /* Bits of chains: where an element came too close to the tolerance to say; which can hold a new greatest ULP
   * distance; or relative error. */
  uint64_t near_chains, far_chains, rel_chains;
  Chain chain[64];
  uint8_t marks[LONG_BLOCK / 8] __attribute__((aligned(8))); /* not zero where a ULP distance could exceed what was seen */
} Sums;

typedef struct {
  float shift, limit, atol, rtol, least_ae, known_rel;
  float calm_ae, calm_rel; /* an error up to the one, or relative error up to the other, is inside the tolerance */
  int rough, rough_for; /* blocks in which every element's tolerance is tested; for how many next time */
  uint32_t bit_steps; /* float32 steps from a bfloat16 number that are no more ULPs than were seen */
  float reach; /* numbers below it are no more steps from zero than two numbers were from each other */
  int by_words; /* few ULPs so far: words are subtracted instead of marks being set */
  int wary; /* blocks in which what is not finite is looked for first */
  int zeros; /* blocks for which zeros on both sides are minded */
  int zeros_for; /* for how many after the next such pair: more where they come often */
  int dots;  /* the processor has vdpbf16ps */
  int ahead; /* bytes that are fetched ahead */
  int far_ahead; /* whether FAR_AHEAD is fetched as well */
  int news; /* how they are noticed in this block */
  int wait, patience, blame; /* blocks until chains are tried, and after that; what chains cost beyond their use */
} Knobs;

enum { BY_MARKS, BY_WORDS, BY_CHAINS };

enum { LANES_F32, LANES_BF16, LANES_F16, LANES_DECODED, LANES_NONE };

/* Sixteen bits on both sides. */
INLINE int two_bytes(int r_kind, int c_kind) {
  return (r_kind == LANES_BF16 || r_kind == LANES_F16) && (c_kind == LANES_BF16 || c_kind == LANES_F16);
}

/* Formats whose every value is a float32. */
INLINE int lane_kind(int dtype) {
  switch (dtype) {
    case F32: return LANES_F32;
    case BF16: return LANES_BF16;
    case F16: return LANES_F16;
    case F64: case I64: case U64: case I32: case U32: return LANES_NONE;
    default: return LANES_DECODED;
  }
}

/* Float32 tests the tolerance a little early: 5 parts in 2^24, more than its own 3 roundings of half a step each can
 * cost. So what is outside is never missed, and what is inside reaches at most 9 steps past it; what falls within 10
 * steps is counted again. */
enum { MARGIN_STEPS = 10 };
/* After something that is not finite, as many blocks are looked through before they are measured. */
enum { WARY_BLOCKS = 64 };
/* Words of opposite signs lie at least that far apart, whatever their distance is: below it, words tell everything. */
enum { WORD_STEPS = 128 };
/* Bytes that are fetched ahead. Of 0 to 4096, a Xeon (Sapphire Rapids) likes 2048 and more: float32 0.85 of the read,
 * 0.75 with 512. Zen 4 takes 3 % longer with that, but for bfloat16 in wide vectors, which it speeds up by as much. */
enum { AHEAD = 2048, AHEAD_IN_HALVES = 512 };
/* And into the second cache only, for what lives on it: float32 on that Xeon rises from 0.84 to 0.91 of the read (other
 * formats, which compute more, lose 3 to 6 %), bfloat16 in wide vectors on Zen 4 gains 3 % (float32 there loses 10). */
enum { FAR_AHEAD = 4096 };
#define TOLERANCE_SHADE (1.0 - 5 * 0x1p-24)

INLINE int tolerance_fits(double t) { return t == 0.0 || (t >= 1e-30 && t <= 1e30); }

/* A relative error up to this cannot mean more ULPs than were already seen.
 * Between r and c (same sign, as rel < 1) numbers stand at least min(|r|,|c|) * 2^-(mantissa+1) apart, so there are
 * at most rel/(1-rel) * 2^(mantissa+1) steps; rounding r to the candidate's format first may add one. */
COLD static double ulp_limit(const Pair *s) {
  if (!s->format[1].is_float) return INFINITY; /* integers' ULPs are their errors */
  int same = s->dtype[0] == s->dtype[1];
  double steps = (double)s->ulp + (same ? 0.99 : -0.01);
  if (steps <= 0) return 0.0;
  double q = ldexp(steps, -(s->format[1].mantissa + 1)), limit = q / (1.0 + q) * (1.0 - 0x1p-20);
  return limit < 0.98 ? limit : 0.98;
}

/* The number that many steps from zero; between two steps, between their numbers. */
INLINE double value_of_ordinal(double n, const Format *f) {
  double binade = ldexp(1.0, f->mantissa), e = floor(n / binade);
  if (e < 1) return ldexp(n, f->emin - f->mantissa);
  return ldexp(binade + (n - e * binade), (int)(e < 4096 ? e : 4096) - 1 + f->emin - f->mantissa);
}

/* What an element must exceed, in relative error and in error, to be worth a look. An error up to `least_ae` cannot mean
 * more ULPs than were seen: of opposite signs, |r| + |c| = |e| gives the most steps when halved; of equal signs, all the
 * steps lie below the larger, which is at most |e| + |e| / rel. Two steps are kept for roundings. */
COLD static void set_limit(const Pair *s, Knobs *k) {
  k->limit = (float)ulp_limit(s);
  k->least_ae = 0;
  k->reach = 0;
  k->by_words = s->ulp < WORD_STEPS &&
                (s->dtype[0] == s->dtype[1] || (s->dtype[0] == F32 && (s->dtype[1] == BF16 || s->dtype[1] == F16)));
  k->bit_steps = ((uint32_t)s->ulp << 16) + 0x7FFF; /* one more is halfway to the next, to which it may be rounded */
  if (!s->format[1].is_float || s->ulp < 4) return;
  double steps = (double)s->ulp - 2, across = 2 * value_of_ordinal(steps / 2, &s->format[1]);
  double along = value_of_ordinal(steps, &s->format[1]) / (1 + 1 / k->limit);
  double e = (across < along ? across : along) * (1 - 0x1p-20);
  double reach = value_of_ordinal((double)s->ulp, &s->format[1]) * (1 - 0x1p-20);
  k->reach = reach < FLT_MAX ? (float)reach : FLT_MAX;
  k->least_ae = e < 0x1p-126 ? 0 : e < FLT_MAX ? (float)e : FLT_MAX;
}

/* How the next block is watched. The chains' sums are the cheapest, where the greatest of what was seen is far beyond the
 * usual: relative errors of values near zero, and errors that are many ULPs there. */
INLINE void choose_news(const Pair *s, Knobs *k) {
  k->known_rel = (float)s->m.max_rel_e;
  k->news = k->by_words ? BY_WORDS : k->wait == 0 && k->least_ae > 0 ? BY_CHAINS : BY_MARKS;
}

/* Whether sums of words prove that there is no new ULP distance among bfloat16 numbers. Of one sign, they are no farther
 * apart than the greatest is from zero. Of opposite signs, their steps from zero add up, below the sign's own bit as long
 * as their distance is below 2: more steps than twice that of its half it cannot be, because steps grow with numbers. */
INLINE int codes_rule_out(const Pair *s, const Knobs *k, const Sums *b) {
  float most = fmaxf(fabsf(b->min_r), fabsf(b->max_r)) + b->max_ae * 1.0001f;
  return b->max_ae < 1.9f && most * 1.0001f < k->reach && b->both <= 0x8000 + s->ulp;
}

/* After a block: of `n` elements, `looked` had to be looked at again. A quarter is what chains may cost. */
INLINE void weigh_news(Knobs *k, int64_t looked, int64_t n) {
  if (k->news != BY_CHAINS) {
    if (k->wait > 0) k->wait--;
    return;
  }
  int64_t blame = k->blame + 4 * looked - n;
  k->blame = blame > 0 ? (int)blame : 0;
  if (blame <= 4 * BLOCK) return;
  k->blame = 0;
  k->wait = k->patience;
  if (k->patience < 1024) k->patience *= 2;
}

/* Where hardly an error exceeds both parts of the tolerance, the few chains in which one may are counted again. */
INLINE void weigh_calm(Knobs *k, int64_t looked, int64_t n) {
  if (k->rough > 0) {
    k->rough--;
  } else if (8 * looked > n) {
    k->rough_for = k->rough_for < 255 ? 4 * k->rough_for + 3 : 1023;
    k->rough = k->rough_for;
  } else if (k->rough_for > 0) {
    k->rough_for--;
  }
}

/* A pair of zeros costs a block; they are minded for a while, which makes blocks slower. */
INLINE void mind_zeros(Knobs *k) {
  k->zeros_for = k->zeros_for < 32 ? 2 * k->zeros_for + 1 : 63;
  k->zeros = k->zeros_for;
}

/* A division that whole blocks need not wait for. */
INLINE double part_of(double n) {
  return n == LONG_BLOCK ? 1.0 / LONG_BLOCK : n == BLOCK ? 1.0 / BLOCK : 1.0 / n;
}

/* Whether float32 lanes were good enough for this block; see the head of the file. */
INLINE int sums_hold(const Pair *s, const Sums *b, double n, double *spread_r, double *spread_c) {
  if (!(b->ae <= DBL_MAX) || !(b->xx <= DBL_MAX) || !(b->ee <= DBL_MAX)) return 0;
  if (b->min_r <= s->format[0].sentinel) return 0;
  if (!(b->rel <= DBL_MAX) && !(s->m.max_rel_e > DBL_MAX)) return 0;
  if (b->xx < 0x1p-115 && b->min_r != b->max_r) return 0; /* squares may have fallen below float32 */
  if (b->ee < 0x1p-115 && b->max_ae != 0.0f) return 0;
  double yy = b->xx + 2 * b->xe + b->ee, y = b->x + b->e;
  double part = part_of(n);
  *spread_r = b->xx - b->x * b->x * part;
  *spread_c = yy - y * y * part;
  if (!(*spread_r >= 0.1 * b->xx)) return 0;
  return *spread_c >= 0.05 * (b->xx + b->ee);
}

INLINE void fold_sums(Pair *s, const Sums *b, Knobs *k, double n, double spread_r, double spread_c) {
  Moments *m = &s->m;
  double shift = k->shift, r = b->x + n * shift, c = r + b->e;
  double rr = b->xx + shift * (2 * b->x + n * shift), re = b->xe + shift * b->e;
  int64_t count = (int64_t)n;
  m->finite += count;
  m->finite_one[0] += count;
  m->finite_one[1] += count;
  m->sum_r += r;
  m->sum_c += c;
  m->sum[0] += r;
  m->sum[1] += c;
  m->sum_rr += rr;
  m->sumsq[0] += rr;
  m->sum_rc += rr + re;
  double cc = rr + 2 * re + b->ee;
  m->sum_cc += cc;
  m->sumsq[1] += cc;
  m->sum_ee += b->ee;
  m->sum_abs_e += b->ae;
  m->sum_rel_e += b->rel;
  if (b->max_rel > m->max_rel_e) m->max_rel_e = b->max_rel;
  if (b->min_r < m->ends[0].min) m->ends[0].min = b->min_r;
  if (b->max_r > m->ends[0].max) m->ends[0].max = b->max_r;
  m->different += b->differ;
  double part = part_of(n);
  join_spread(&s->spread[0], n, shift + b->x * part, spread_r);
  join_spread(&s->spread[1], n, shift + (b->x + b->e) * part, spread_c);
  /* A shift that serves is kept: the next block need not wait for this one's sums. */
  if (spread_r < 0.2 * b->xx) k->shift = (float)(shift + b->x * part);
  else if (shift != 0 && !worth_a_shift(r, rr, n)) k->shift = 0;
}

/* A pair that is not finite on both sides, alone. */
COLD static void measure_odd(Pair *s, double r, double c, int64_t at) {
  Moments *m = &s->m;
  double v[2] = {r, c};
  int finite[2];
  for (int side = 0; side < 2; side++) {
    if (v[side] == s->format[side].sentinel) v[side] = -INFINITY;
    finite[side] = fabs(v[side]) <= DBL_MAX;
    if (finite[side]) {
      m->finite_one[side]++;
      m->sum[side] += v[side];
      m->sumsq[side] += v[side] * v[side];
      m->ends[side].min = fmin(m->ends[side].min, v[side]);
      m->ends[side].max = fmax(m->ends[side].max, v[side]);
      join_spread(&s->spread[side], 1, v[side], 0);
      continue;
    }
    note_first(&m->nonfinite_at[side], at);
    if (v[side] != v[side]) m->nan[side]++;
    else if (v[side] > 0) m->pos_inf[side]++;
    else m->neg_inf[side]++;
  }
  if (v[0] != v[1] && !(v[0] != v[0] && v[1] != v[1])) {
    m->different++;
    m->one_sided++;
    m->outside++;
    note_first(&m->first_different_at, at);
    note_first(&m->one_sided_at, at);
  }
}

