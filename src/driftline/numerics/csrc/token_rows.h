/* Logits of a token, reference against candidate: what needs no vectors. What the numbers mean: ../scores.py. */

enum { STRIP = 1024 };
static const float FILLING = -FLT_MAX;  /* behind a row's end: impossible on both sides, and no logit is less */
static const float NEAR_EQUAL = 0.25f;  /* differences of log-probability up to here go by the series */
static const float FARTHEST = 1e6f;     /* and none counts as more than this */

/* Polynomials of near-equal ripple: 2^f for f in [0, 1] and in [-1/2, 1/2] (1e-7), (exp(u) - 1 - u) / u^2 for
 * |u| <= NEAR_EQUAL (1.5e-6). */
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

/* Fields in the order of scores.py. */
typedef struct {
  double lse[2], kl_rc, kl_cr, variation;
  int64_t choice, rank, nan[2], inf[2];
} RowScore;

typedef struct {
  const uint8_t *data[2];
  int dtype[2];
  int64_t rows, vocabulary, k;
  const int64_t *tokens;
  RowScore *out;
  int64_t *top_at;
  float *top[2], *scratch;
  int path, threads;
  int64_t next; /* the first row that nobody has taken */
} ScoreAsk;

enum { MOST_HANDS = 256 };

/* The rows a thread takes next, many at first and one by one at the end; how many. */
static int64_t take_rows(ScoreAsk *ask, int64_t *first) {
  int64_t from = __atomic_load_n(&ask->next, __ATOMIC_RELAXED), count;
  do {
    const int64_t left = ask->rows - from;
    if (left <= 0) return 0;
    count = (left + 4 * ask->threads - 1) / (4 * ask->threads);
  } while (!__atomic_compare_exchange_n(&ask->next, &from, from + count, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  *first = from;
  return count;
}

typedef struct { double e, eu, ew, euv; } RowSums;

/* What a strip is summed in: the reference's unit as a power of two, how far the candidate's lies from it, and the
 * greatest logit whose exponential is still a number. */
typedef struct { float base, between, most; } Strip;

INLINE Strip units_of(float top, float between) { return (Strip){top * LOG2_E, between, top + 80}; }

/* What is seen on the way. Of the last strip: the reference's greatest, how far u goes from zero (infinite if `wide`:
 * far), what the row before left there, with its x. `again`: that is summed already. `odd` stays: a difference was no
 * number. */
typedef struct { float best, apart, x; int odd, wide, again; double parted; } Seen;

/* A row whose total variation is still being summed, in units of its last strip's. */
typedef struct { RowScore *out; float x, base; double sum, whole; } Left;

/* What a thread works in: e and e*m of a row in turns, of each strip the unit and the reference's greatest, a strip of
 * either side as float32. */
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

INLINE const uint8_t *row_of(const ScoreAsk *ask, int side, int64_t row) {
  return ask->data[side] + row * ask->vocabulary * (BITS[ask->dtype[side]] / 8);
}

/* The k greatest so far, greatest first; of equal ones the first stays in front. */
typedef struct {
  float *value;
  int64_t *at, size, k;
  float lowest;
} TopList;

/* The k-th greatest of n numbers, -inf if there are fewer; `room` takes k. */
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

/* The first strip from `at` on whose greatest is not less than that. */
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

/* Units of a greater reference: the sums become smaller in them. */
static void rebase(RowSums *s, Strip *units, float top) {
  const double before = units->base;
  *units = units_of(top, units->between);
  const double by = exp2(before - units->base);
  s->e *= by;
  s->eu *= by;
  s->ew *= by;
  s->euv *= by;
}

/* A row with something in it that is no number: counted, and not measured. Whether there is any. */
COLD static int64_t count_odd(const ScoreAsk *ask, int64_t row, RowScore *out) {
  for (int side = 0; side < 2; side++) {
    const uint8_t *p = row_of(ask, side, row);
    for (int64_t i = 0; i < ask->vocabulary; i++) {
      float v = value_at(p, ask->dtype[side], i);
      out->nan[side] += v != v;
      out->inf[side] += v == INFINITY || v == -INFINITY;
    }
    out->lse[side] = NAN;
  }
  out->kl_rc = out->kl_cr = out->variation = NAN;
  return out->nan[0] + out->nan[1] + out->inf[0] + out->inf[1];
}

/* log(1 + x) - x and (1 + x) log(1 + x) - x: differences of nearly equal numbers unless x is large. */
static double log_rest(double x) {
  if (fabs(x) > 0.02) return log1p(x) - x;
  double sum = 0, power = x;
  for (int i = 2; i < 10; i++) {
    power *= -x;
    sum += power / i;
  }
  return sum;
}

/* With p = e / sum e, x = sum p*m: 1 + x is what the other side's exponentials sum to, in the first one's. Returned. */
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

/* Whether the candidate lies so far from where the first strip said that digits are lost, or a number is too large. */
static int poor_units(const RowSums *s, float off) {
  double x = (s->eu + s->ew) / s->e, kl = s->ew / s->e + log_rest(x);
  return !(fabsf(off) < 10) || x < -0.3 || x * x > 100 * kl;
}
