/* Compares rows of logits: top elements, divergences, choices. ../token_scores.py says what each number means.
 *
 * One pass over memory, strip by strip, computes the greatest elements and the sums. The total variation needs these
 * results, so the pass over the next row sums it from the values that this pass leaves in the cache. With
 * e = exp(r - max r), u = (c - r) - (max c - max r) and m = exp(u) - 1, the sums are of e, e*u, e*u*m and e*(m - u).
 * Each is accurate relative to its own size even if the two rows are nearly equal: then u is small, and m - u a short
 * series.
 *
 * Terms are float32 (polynomials with errors of 1e-7), totals of a strip float64. A test checks that log-sums and
 * divergences are within 2e-5 of the float64 definition.
 */

enum { STRIP = 1024 };
UNUSED static const float FILLING = -FLT_MAX;  /* pads the last strip: adds nothing, and no logit is less */
UNUSED static const float NEAR_EQUAL = 0.25f;  /* smaller differences of log-probability use the series */
UNUSED static const float FARTHEST = 1e6f;     /* larger differences count as this one */

/* Near-minimax polynomials: 2^f for f in [0, 1] and in [-1/2, 1/2] (1e-7), (exp(u) - 1 - u) / u^2 for |u| <= NEAR_EQUAL
 * (1.5e-6). */
#define LOG2_E 0x1.715476p+0f
#define UP_0 0.9999998958f
#define UP_1 0.69315462f
#define UP_2 0.2401407701f
#define UP_3 0.05586328266f
#define UP_4 0.008946214666f
#define UP_5 0.001895107291f
#define NEAR_0 1.000000075f
#define NEAR_1 0.6931472067f
#define NEAR_2 0.2402210736f
#define NEAR_3 0.05550327214f
#define NEAR_4 0.009676037098f
#define NEAR_5 0.001340043217f
#define REST_0 0.4999993209f
#define REST_1 0.1666664242f
#define REST_2 0.04175356311f
#define REST_3 0.008348848462f

/* Fields in the order of token_scores.py. */
typedef struct {
  double lse[2], kl_rc, kl_cr, variation;
  int64_t choice, rank, nan[2], inf[2];
} RowScore;

struct ScoreJob {
  const uint8_t *data[2];
  int dtype[2];
  int64_t rows, vocabulary, k;
  const int64_t *tokens;
  RowScore *out;
  int64_t *top_at;
  float *top[2], *scratch;
  int threads;
  int64_t next; /* the first row that no thread has taken */
};

enum { MOST_SCORE_THREADS = 256 };

#if defined(VECTOR_CODE)

/* The rows that a thread takes next: many at first, and one at a time at the end. Returns their number. */
static int64_t take_rows(ScoreJob *job, int64_t *first) {
  int64_t from = __atomic_load_n(&job->next, __ATOMIC_RELAXED), count;
  do {
    const int64_t left = job->rows - from;
    if (left <= 0) return 0;
    count = (left + 4 * job->threads - 1) / (4 * job->threads);
  } while (!__atomic_compare_exchange_n(&job->next, &from, from + count, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  *first = from;
  return count;
}

typedef struct { double e, eu, ew, euv; } RowSums;

/* The units of a strip's sums: the reference's unit as a power of two, the distance of the candidate's unit from it,
 * and the greatest logit whose exponential is still finite. */
typedef struct { float base, between, most; } Strip;

INLINE Strip units_of(float top, float between) { return (Strip){top * LOG2_E, between, top + 80}; }

/* Results of the last strip: the reference's greatest element, the largest |u| (`apart`; infinite if `wide`, that is,
 * beyond the series), and the sum over the previous row's values at this place, with that row's x. `again`: that sum is
 * already taken. `odd` is kept for the whole row: a difference was not a number. */
typedef struct { float best, apart, x; int odd, wide, again; double parted; } Seen;

/* A row whose total variation is still being summed, in units of its last strip. */
typedef struct { RowScore *out; float x, base; double sum, whole; } Left;

/* The memory of a thread: e and e*m of a row, interleaved; the unit and the reference's greatest element of each strip;
 * and one strip of either side as float32. */
typedef struct {
  float *es, *bases, *bests, strip[2][STRIP];
  Left left;
} ScoreRoom;

INLINE void join_left(Left *left, double strip, float base) {
  if (left->out) left->sum += base == left->base ? strip : strip * exp2((double)base - left->base);
}

INLINE void settle(Left *left) {
  if (left->out) left->out->variation = 0.5 * left->sum / left->whole;
  left->out = 0;
  left->x = 0;
}

INLINE const uint8_t *row_of(const ScoreJob *job, int side, int64_t row) {
  return job->data[side] + row * job->vocabulary * (FORMATS[job->dtype[side]].bits / 8);
}

/* The k greatest elements so far, in descending order; of equal elements the first comes first. */
typedef struct {
  float *value;
  int64_t *at, size, k;
  float lowest;
} TopList;

/* The k-th greatest of n numbers; -inf if there are fewer. `room` holds k numbers. */
static float kth_greatest(const float *v, int64_t n, int64_t k, float *room) {
  if (n < k) return -INFINITY;
  for (int64_t i = 0; i < n; i++) {
    int64_t at = i < k ? i : k;
    if (at == k && !(v[i] > room[k - 1])) continue;
    for (at = at < k ? at : k - 1; at > 0 && room[at - 1] < v[i]; at--) room[at] = room[at - 1];
    room[at] = v[i];
  }
  return room[k - 1];
}

/* The first strip, from `at` on, whose greatest element is not less than `least`. */
INLINE int64_t next_strip(const float *bests, int64_t at, int64_t strips, float least) {
  while (at < strips && bests[at] < least) at++;
  return at;
}

static void offer(TopList *top, float v, int64_t at) {
  if (!(v > top->lowest) && (top->size == top->k || v != v)) return;
  int64_t place = top->size < top->k ? top->size++ : top->k - 1;
  while (place > 0 && top->value[place - 1] < v) {
    top->value[place] = top->value[place - 1];
    top->at[place] = top->at[place - 1];
    place--;
  }
  top->value[place] = v;
  top->at[place] = at;
  if (top->size == top->k) top->lowest = top->value[top->k - 1];
}

static float value_at(const uint8_t *row, int dtype, int64_t at) {
  float v;
  decode_float(row, dtype, at, 1, &v);
  return v;
}

/* Changes to the units of a greater reference, in which the sums are smaller. */
static void rebase(RowSums *s, Strip *units, float top) {
  const double before = units->base;
  *units = units_of(top, units->between);
  const double by = exp2(before - units->base);
  s->e *= by;
  s->eu *= by;
  s->ew *= by;
  s->euv *= by;
}

/* Counts the non-numbers of a row, which is then not measured further. Returns how many there are. */
COLD static int64_t count_odd(const ScoreJob *job, int64_t row, RowScore *out) {
  for (int side = 0; side < 2; side++) {
    const uint8_t *p = row_of(job, side, row);
    for (int64_t i = 0; i < job->vocabulary; i++) {
      float v = value_at(p, job->dtype[side], i);
      out->nan[side] += v != v;
      out->inf[side] += v == INFINITY || v == -INFINITY;
    }
    out->lse[side] = NAN;
  }
  out->kl_rc = out->kl_cr = out->variation = NAN;
  return out->nan[0] + out->nan[1] + out->inf[0] + out->inf[1];
}

/* log(1 + x) - x: a difference of nearly equal numbers unless x is large. */
static double log_rest(double x) {
  if (fabs(x) > 0.02) return log1p(x) - x;
  double sum = 0, power = x;
  for (int i = 2; i < 10; i++) {
    power *= -x;
    sum += power / i;
  }
  return sum;
}

/* With p = e / sum e and x = sum p*m, 1 + x is the sum of the other side's exponentials, in this side's units. The
 * function returns x. */
static double finish_row(const RowSums *s, int turned, const Strip *units, RowScore *out) {
  double u = s->eu / s->e, w = s->ew / s->e, v = s->euv / s->e, x = u + w;
  double rest = log_rest(x), grown = log1p(x);
  double there = x > 0.5 ? grown - u : w + rest, back = (v - w - (x * grown + rest)) / (1 + x);
  out->lse[turned] = (double)units->base / LOG2_E + log(s->e);
  out->lse[!turned] = out->lse[turned] + units->between + grown;
  there = there > 0 ? there : 0; /* never negative but for rounding */
  back = back > 0 ? back : 0;
  out->kl_rc = turned ? back : there;
  out->kl_cr = turned ? there : back;
  return x;
}

/* Whether the candidate is so far from the first strip's estimate that digits are lost, or a number is too large. */
static int poor_units(const RowSums *s, float off) {
  double x = (s->eu + s->ew) / s->e, kl = s->ew / s->e + log_rest(x);
  return !(fabsf(off) < 10) || x < -0.3 || x * x > 100 * kl;
}

/* Independent vectors processed together: one chain of multiply-adds keeps the processor waiting. Four vectors spill
 * registers. */
#define TOGETHER 2
#define EACH for (int j = 0; j < TOGETHER; j++)

/* exp(x) in units of 2^minus_base, computed in powers of two; the multiply-add is exact. Results below 2^-126 are
 * negligible beside the row's 1, and any smaller number may be returned for them. */
LANE void exp_group(const VF *x, VF minus_base, VF *out) {
  VF t[TOGETHER], f[TOGETHER], q[TOGETHER];
  EACH t[j] = OP(fmadd_ps)(x[j], OP(set1_ps)(LOG2_E), minus_base);
#if WIDE
  EACH f[j] = _mm512_reduce_ps(t[j], 1); /* the remainder above the integer below */
  EACH q[j] = OP(fmadd_ps)(OP(set1_ps)(UP_5), f[j], OP(set1_ps)(UP_4));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(UP_3));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(UP_2));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(UP_1));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(UP_0));
  EACH out[j] = _mm512_scalef_ps(q[j], t[j]);
#else
  const VF magic = OP(set1_ps)(12582912.0f); /* 1.5 * 2^23: the sum holds an added integer in its lowest bits */
  VF shifted[TOGETHER];
  EACH t[j] = OP(max_ps)(t[j], OP(set1_ps)(-125.0f));
  EACH shifted[j] = OP(add_ps)(t[j], magic);
  EACH f[j] = OP(sub_ps)(t[j], OP(sub_ps)(shifted[j], magic));
  EACH q[j] = OP(fmadd_ps)(OP(set1_ps)(NEAR_5), f[j], OP(set1_ps)(NEAR_4));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(NEAR_3));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(NEAR_2));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(NEAR_1));
  EACH q[j] = OP(fmadd_ps)(q[j], f[j], OP(set1_ps)(NEAR_0));
  EACH out[j] = AS_FLOAT(OP(add_epi32)(AS_BITS(q[j]), OP(slli_epi32)(AS_BITS(shifted[j]), 23)));
#endif
}

/* (exp(u) - 1 - u) / u, where |u| <= NEAR_EQUAL. */
LANE void rest_group(const VF *u, VF *out) {
  VF w[TOGETHER];
  EACH w[j] = OP(fmadd_ps)(OP(set1_ps)(REST_3), u[j], OP(set1_ps)(REST_2));
  EACH w[j] = OP(fmadd_ps)(w[j], u[j], OP(set1_ps)(REST_1));
  EACH w[j] = OP(fmadd_ps)(w[j], u[j], OP(set1_ps)(REST_0));
  EACH out[j] = OP(mul_ps)(u[j], w[j]);
}

/* The greater magnitude of each lane. The sums detect NaN. */
LANE VF farther(VF most, VF u) {
#if WIDE
  return _mm512_range_ps(most, u, 0xB);
#else
  return OP(max_ps)(most, ABS(u));
#endif
}

LANE VF floats_at(const float *p) { return load_lanes((const uint8_t *)p, LANES_F32); }

/* Which lanes are greater than `limit`; NaN counts as greater. */
LANE MASK beyond(VF v, VF limit) { return not_mask(not_above(v, limit)); }

LANE int any_lane(MASK mask) { return (mask_word(mask) & ((1u << WIDTH) - 1)) != 0; }

/* One more than the number of elements that are greater than `said`. */
static int64_t rank_of(const uint8_t *row, int dtype, int64_t n, float said) {
  const VF limit = OP(set1_ps)(said);
  const int kind = dtype == DTYPE_FLOAT32 ? LANES_F32 : dtype == DTYPE_FLOAT16 ? LANES_F16 : LANES_BF16, size = dtype == DTYPE_FLOAT32 ? 4 : 2;
  int64_t i = 0, rank = 1;
  for (; i + WIDTH <= n; i += WIDTH) {
    VF v = load_lanes(row + size * i, kind);
    /* Lanes above the limit that are not NaN. */
    rank += __builtin_popcount(mask_word(beyond(v, limit)) & mask_word(equal_lanes(v, v)));
  }
  for (; i < n; i++) rank += value_at(row, dtype, i) > said;
  return rank;
}

/* The reference's strip as float32: in place, or decoded into `room`. */
LANE const float *strip_of(const uint8_t *row, int dtype, int64_t from, int64_t n, float *room) {
  const uint8_t *p = row + from * (FORMATS[dtype].bits / 8);
  if (n < STRIP) {
    decode_float(row, dtype, from, n, room);
    for (int64_t i = n; i < STRIP; i++) room[i] = FILLING;
    return room;
  }
  if (dtype == DTYPE_FLOAT32) return (const float *)p;
  if (dtype == DTYPE_FLOAT16)
    for (int i = 0; i < STRIP; i += WIDTH) OP(storeu_ps)(room + i, load_lanes(p + 2 * i, LANES_F16));
  else
    for (int i = 0; i < STRIP; i += WIDTH) OP(storeu_ps)(room + i, load_lanes(p + 2 * i, LANES_BF16));
  return room;
}

/* The greatest element of a strip; NaN is ignored. */
LANE float greatest_kind(const uint8_t *p, int kind) {
  const int size = kind == LANES_F32 ? 4 : 2;
  VF a = OP(set1_ps)(-INFINITY), b = a;
  for (int i = 0; i < STRIP; i += 2 * WIDTH) {
    a = OP(max_ps)(load_lanes(p + size * i, kind), a);
    b = OP(max_ps)(load_lanes(p + size * (i + WIDTH), kind), b);
  }
  return max_lane(OP(max_ps)(a, b));
}

static float greatest_of(const uint8_t *p, int dtype) {
  if (dtype == DTYPE_FLOAT32) return greatest_kind(p, LANES_F32);
  return dtype == DTYPE_FLOAT16 ? greatest_kind(p, LANES_F16) : greatest_kind(p, LANES_BF16);
}

/* The first position, from `from` on, that holds `value`. It is found unless all elements are NaN. */
static int64_t place_of(const uint8_t *row, int dtype, int64_t from, int64_t n, float value) {
  const VF wanted = OP(set1_ps)(value);
  const int kind = dtype == DTYPE_FLOAT32 ? LANES_F32 : dtype == DTYPE_FLOAT16 ? LANES_F16 : LANES_BF16, size = dtype == DTYPE_FLOAT32 ? 4 : 2;
  for (; from + WIDTH <= n; from += WIDTH) {
    VF v = load_lanes(row + size * from, kind);
    if (any_lane(equal_lanes(v, wanted))) break;
  }
  while (from < n && value_at(row, dtype, from) != value) from++;
  return from < n ? from : 0;
}

/* Offers the elements of a strip to the top list; elements up to `floor` cannot belong to it. */
static void offer_strip(TopList *top, const float *p, int64_t from, int64_t n, float floor) {
  for (int64_t i = 0; i < n; i += WIDTH) {
    const float limit = top->lowest > floor ? top->lowest : floor;
    unsigned lanes = ~0u;
    if (top->size == top->k || floor > -INFINITY) lanes = mask_word(beyond(floats_at(p + i), OP(set1_ps)(limit)));
    lanes &= n - i < WIDTH ? (1u << (n - i)) - 1 : (1u << WIDTH) - 1;
    for (; lanes; lanes &= lanes - 1) offer(top, p[i + __builtin_ctz(lanes)], from + i + __builtin_ctz(lanes));
  }
}

/* The k greatest of a row, given the greatest element of each strip. At least k strips have an element that is not less
 * than the k-th of those, so smaller elements, and strips without larger ones, are skipped. */
static void find_top(const ScoreJob *job, int64_t row, ScoreRoom *room, TopList *top) {
  const int64_t n = job->vocabulary, strips = (n + STRIP - 1) / STRIP;
  const float least = kth_greatest(room->bests, strips, top->k, room->bests + strips);
  const float floor = least > -INFINITY ? nextafterf(least, -INFINITY) : -INFINITY;
  const uint8_t *p = row_of(job, 0, row);
  const int64_t bytes = STRIP * (FORMATS[job->dtype[0]].bits / 8);
  int64_t next = next_strip(room->bests, 0, strips, least);
  for (int64_t at = next; at < strips; at = next) {
    const int64_t from = at * STRIP, size = n - from < STRIP ? n - from : STRIP;
    next = next_strip(room->bests, at + 1, strips, least);
    if (next < strips)
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + next * bytes + i);
    if (top->size == top->k && !(room->bests[at] > top->lowest)) continue;
    offer_strip(top, strip_of(p, job->dtype[0], from, size, room->strip[0]), from, size, floor);
  }
}

/* Adds the sums of one strip to the row's. e and e*m are stored for the total variation; the values that the previous
 * row stored at the same place pass through the cache anyway and are summed for that row. `wide`: u may be large. If u
 * is large without `wide`, nothing is added, and the strip must be summed again. NaN counts as large. */
LANE int sum_kind(const float *r, const uint8_t *c, int kind, int wide, const Strip *units, float *es,
                     RowSums *sums, Seen *seen) {
  const VF zero = OP(setzero_ps)(), minus_base = OP(set1_ps)(-units->base), between = OP(set1_ps)(units->between);
  const VF near_equal = OP(set1_ps)(NEAR_EQUAL), minus_x = OP(set1_ps)(-seen->x);
  const int size = kind == LANES_F32 ? 4 : 2;
  VF s_e = zero, s_u = zero, s_w = zero, s_v = zero, bad = zero, best = OP(set1_ps)(-INFINITY), most = zero;
  VF parted = zero;
  for (int i = 0; i < STRIP; i += TOGETHER * WIDTH) {
    VF a[TOGETHER], b[TOGETHER], d[TOGETHER], u[TOGETHER], e[TOGETHER], g[TOGETHER], ew[TOGETHER], em[TOGETHER];
    float *left = es + 2 * i;
    EACH a[j] = floats_at(r + i + j * WIDTH);
    EACH b[j] = load_lanes(c + size * (i + j * WIDTH), kind);
    /* Prefetches the next strip; one further ahead was slower. */
    EACH __builtin_prefetch(r + i + j * WIDTH + STRIP);
    EACH if ((i + j * WIDTH) % (64 / size) == 0) __builtin_prefetch(c + size * (i + j * WIDTH + STRIP));
    EACH parted = OP(add_ps)(parted, ABS(OP(fmadd_ps)(floats_at(left + 2 * j * WIDTH), minus_x,
                                                      floats_at(left + (2 * j + 1) * WIDTH))));
    EACH d[j] = OP(sub_ps)(b[j], a[j]); /* exact if the two are near, which is where u is small */
    EACH u[j] = OP(sub_ps)(d[j], between);
    exp_group(a, minus_base, e);
    EACH best = OP(max_ps)(a[j], best);
    EACH most = farther(most, u[j]);
    if (wide) {
      MASK far[TOGETHER];
      EACH bad = OP(fmadd_ps)(d[j], zero, bad);
      EACH far[j] = beyond(ABS(u[j]), near_equal);
      EACH u[j] = OP(max_ps)(OP(min_ps)(u[j], OP(set1_ps)(FARTHEST)), OP(set1_ps)(-FARTHEST));
      EACH g[j] = OP(mul_ps)(e[j], u[j]);
      rest_group(u, ew);
      EACH ew[j] = OP(mul_ps)(g[j], ew[j]);
      EACH em[j] = OP(add_ps)(g[j], ew[j]);
      int some = 0;
      EACH some |= any_lane(far[j]);
      if (some) {
        /* exp(u) may be too large for a float; e * exp(u) is not. */
        VF other[TOGETHER], apart[TOGETHER];
        EACH other[j] = OP(min_ps)(OP(sub_ps)(b[j], between), OP(set1_ps)(units->most));
        exp_group(other, minus_base, apart);
        EACH apart[j] = OP(sub_ps)(apart[j], e[j]);
        EACH ew[j] = chosen(far[j], OP(sub_ps)(apart[j], g[j]), ew[j]);
        EACH em[j] = chosen(far[j], apart[j], em[j]);
      }
    } else {
      rest_group(u, ew);
      EACH g[j] = OP(mul_ps)(e[j], u[j]);
      EACH ew[j] = OP(mul_ps)(g[j], ew[j]);
      EACH em[j] = OP(add_ps)(g[j], ew[j]);
    }
    EACH s_e = OP(add_ps)(s_e, e[j]);
    EACH s_u = OP(add_ps)(s_u, g[j]);
    EACH s_w = OP(add_ps)(s_w, ew[j]);
    EACH s_v = OP(fmadd_ps)(u[j], em[j], s_v);
    EACH {
      OP(storeu_ps)(left + 2 * j * WIDTH, e[j]);
      OP(storeu_ps)(left + (2 * j + 1) * WIDTH, em[j]);
    }
  }
  double v = sum_lanes(s_v);
  int far = any_lane(beyond(ABS(most), near_equal)) || !(fabs(v) <= DBL_MAX);
  if (!seen->again) seen->parted = sum_lanes(parted);
  seen->again = 1; /* the previous row's values are overwritten now */
  seen->best = max_lane(best);
  seen->odd |= wide && !(sum_lanes(bad) == 0);
  seen->wide = far;
  seen->apart = far ? INFINITY : max_lane(ABS(most));
  if ((far && !wide) || !(seen->best <= units->most - 40)) return 0;
  sums->e += sum_lanes(s_e);
  sums->eu += sum_lanes(s_u);
  sums->ew += sum_lanes(s_w);
  sums->euv += v;
  return 1;
}

#define SUM_KIND(kind)                                                              \
  do {                                                                              \
    if (!seen->wide && sum_kind(r, c, kind, 0, units, es, sums, seen)) return 1;    \
    return sum_kind(r, c, kind, 1, units, es, sums, seen);                          \
  } while (0)

/* Returns 0 if the reference is too great for these units; then nothing was added. */
static int sum_strip(const float *r, const uint8_t *c, int dtype, const Strip *units, float *es,
                            RowSums *sums, Seen *seen) {
  if (dtype == DTYPE_FLOAT32) SUM_KIND(LANES_F32);
  else if (dtype == DTYPE_FLOAT16) SUM_KIND(LANES_F16);
  else SUM_KIND(LANES_BF16);
}

/* Total variation of the last row: the sum of |e*m - x*e| over its strips, as a next row would have summed it. */
static void sum_left(ScoreRoom *room, int64_t n) {
  const VF minus_x = OP(set1_ps)(-room->left.x);
  for (int64_t from = 0; from < n; from += STRIP) {
    VF sum = OP(setzero_ps)();
    for (int64_t i = 0; i < STRIP; i += WIDTH) {
      const float *p = room->es + 2 * (from + i);
      sum = OP(add_ps)(sum, ABS(OP(fmadd_ps)(floats_at(p), minus_x, floats_at(p + WIDTH))));
    }
    join_left(&room->left, sum_lanes(sum), room->bases[from / STRIP]);
  }
  settle(&room->left);
}

/* The sums again, with both maxima known; side `of` counts as the reference. */
COLD static RowSums sum_again(const ScoreJob *job, int of, int64_t row, float of_top, float other_top,
                                     ScoreRoom *room) {
  RowSums sums = {0, 0, 0, 0};
  Seen seen = {.wide = 1, .again = 1};
  const Strip units = units_of(of_top, other_top - of_top);
  for (int64_t from = 0; from < job->vocabulary; from += STRIP) {
    int64_t size = job->vocabulary - from < STRIP ? job->vocabulary - from : STRIP;
    const float *p[2];
    for (int side = 0; side < 2; side++)
      p[side] = strip_of(row_of(job, side, row), job->dtype[side], from, size, room->strip[side]);
    sum_strip(p[of], (const uint8_t *)p[!of], DTYPE_FLOAT32, &units, room->es + 2 * from, &sums, &seen);
    room->bases[from / STRIP] = units.base;
  }
  return sums;
}

static void score_row(const ScoreJob *job, int64_t row, ScoreRoom *room, RowScore *out, TopList *top) {
  const int64_t n = job->vocabulary;
  const uint8_t *r_row = row_of(job, 0, row), *c_row = row_of(job, 1, row);
  const int c_size = FORMATS[job->dtype[1]].bits / 8;
  RowSums sums = {0, 0, 0, 0};
  Seen seen = {.x = room->left.x};
  Strip units = {0, 0, 0};
  float r_top = 0, c_top = -INFINITY;
  int64_t c_at = 0;
  for (int64_t from = 0; from < n; from += STRIP) {
    const int64_t size = n - from < STRIP ? n - from : STRIP;
    const float *r = strip_of(r_row, job->dtype[0], from, size, room->strip[0]);
    const uint8_t *c = c_row + from * c_size;
    int c_dtype = job->dtype[1];
    if (size < STRIP) {
      c = (const uint8_t *)strip_of(c_row, c_dtype, from, size, room->strip[1]);
      c_dtype = DTYPE_FLOAT32;
    }
    if (from == 0) {
      r_top = greatest_of((const uint8_t *)r, DTYPE_FLOAT32);
      const int64_t there = place_of((const uint8_t *)r, DTYPE_FLOAT32, 0, size, r_top);
      units = units_of(r_top, value_at(c_row, job->dtype[1], there) - r_top);
    }
    seen.again = 0;
    while (!sum_strip(r, c, c_dtype, &units, room->es + 2 * from, &sums, &seen)) {
      rebase(&sums, &units, seen.best);
      if (!(seen.best <= FLT_MAX)) break;
    }
    join_left(&room->left, seen.parted, room->bases[from / STRIP]);
    room->bases[from / STRIP] = units.base;
    room->bests[from / STRIP] = seen.best;
    /* No candidate of this strip exceeds the reference's greatest element plus the largest difference. */
    if (!(seen.best + units.between + seen.apart + 1e-6f * (fabsf(seen.best) + fabsf(units.between) + 1) <= c_top)) {
      const float best = greatest_of(c, c_dtype);
      if (best > c_top) {
        c_top = best;
        c_at = from;
      }
    }
    /* The unit is the greatest reference so far: if that grows, the sums shrink. */
    if (seen.best > r_top) {
      r_top = seen.best;
      rebase(&sums, &units, r_top);
    }
  }
  settle(&room->left);
  find_top(job, row, room, top);
  const float said = value_at(c_row, job->dtype[1], job->tokens[row]);
  out->choice = place_of(c_row, job->dtype[1], c_at, n, c_top);
  out->rank = said == c_top && !seen.odd ? 1 : rank_of(c_row, job->dtype[1], n, said);
  if (seen.odd && count_odd(job, row, out)) return;
  int turned = 0;
  if (seen.odd || poor_units(&sums, c_top - r_top - units.between)) {
    units = units_of(r_top, c_top - r_top);
    sums = sum_again(job, 0, row, r_top, c_top, room);
    /* From the flatter row's side, a peaked row is a difference of large sums; from the peaked row's side it is not. */
    turned = sums.eu + sums.ew < -0.3 * sums.e;
    if (turned) {
      units = units_of(c_top, r_top - c_top);
      sums = sum_again(job, 1, row, c_top, r_top, room);
    }
  }
  const double x = finish_row(&sums, turned, &units, out);
  room->left = (Left){out, (float)x, units.base, 0, sums.e * (1 + x)};
}

static void score_rows(ScoreJob *job, ScoreRoom *room) {
  int64_t first, count;
  room->left = (Left){0};
  while ((count = take_rows(job, &first)))
    for (int64_t row = first; row < first + count; row++) {
      const int64_t k = job->k;
      TopList top = {job->top[0] + row * k, job->top_at + row * k, 0, k, -INFINITY};
      memset(job->out + row, 0, sizeof *job->out);
      for (int64_t i = 0; i < k; i++) {
        top.value[i] = NAN;
        top.at[i] = -1;
      }
      score_row(job, row, room, job->out + row, &top);
      for (int64_t i = 0; i < k; i++)
        job->top[1][row * k + i] = top.at[i] < 0 ? NAN : value_at(row_of(job, 1, row), job->dtype[1], top.at[i]);
    }
  if (room->left.out) sum_left(room, (job->vocabulary + STRIP - 1) / STRIP * STRIP);
}

/* Scores the rows that one thread takes; `thread` selects its part of the scratch memory. */
static void score(ScoreJob *job, int thread) {
  ScoreRoom room;
  const int64_t padded_row = (job->vocabulary + STRIP - 1) / STRIP * STRIP;
  room.es = job->scratch + 3 * padded_row * thread;
  room.bases = room.es + 2 * padded_row;
  room.bests = room.bases + padded_row / STRIP;
  score_rows(job, &room);
}

#endif
