/* One side of a block: its elements as float64, and the figures that need no other tensor. Both pairs and summaries
 * begin with it.
 *
 * Elements that are not finite and sentinels are left out: they become NaN, so that loops that follow need one
 * comparison to find them. A block is first gathered as if there were none, then as if there were only low ones (an
 * attention mask), then with all comparisons. Its sum of squares and its least element show whether that was right. */

/* What is left out of a block. LOW: -inf and sentinels. */
enum { NOTHING, LOW, ANYTHING };

/* Elements of one step: four vectors, so that their sums need not wait for each other. */
enum { VECTORS = 4, STEP = VECTORS * LANES };

/* `n` rounded up to whole steps. */
INLINE int64_t padded(int64_t n) { return (n + STEP - 1) & -(int64_t)STEP; }

/* The figures of a block's finite elements that are not sentinels. */
typedef struct {
  const double *x; /* whole steps; NaN where an element is left out */
  double sum, squares, min, max;
  int64_t finite;
  int left_out; /* the least of the cases above that holds */
} Block;

/* Decodes elements of 16 or 32 bits with vectors: the compiler leaves most such loops scalar. */
LANE void decode_lanes(const uint8_t *p, int dtype, int kind, int64_t n, double *out) {
  const int size = kind == LANES_F32 ? 4 : 2;
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    D v[2];
    widen_lanes(load_lanes(p + size * i, kind), v);
    d_store(out + i, v[0]);
    d_store(out + i + LANES, v[1]);
  }
  if (i < n) decode_double(p, dtype, i, n - i, out + i);
}

/* Decodes elements as they are. They are followed by -inf, to whole steps. `first` and `n` count reals. */
static void decode(const uint8_t *data, int dtype, int widen, int64_t first, int64_t n, double *room) {
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
}

/* Gathers whole steps. `kind` and `left_out` are constants where this is inlined. It returns 0 if more must be left
 * out. `floor` is the sentinel, below which a format has only -inf, or it is -inf itself. Float64 elements stay where
 * they are if nothing is left out. */
LANE int gather(Block *b, const uint8_t *p, int kind, int64_t n, double floor, int left_out, double *room) {
  const int64_t size = kind == LANES_F64 ? 8 : kind == LANES_F32 ? 4 : 2;
  const int narrow = kind != LANES_F64 && !left_out, stored = kind != LANES_F64 || left_out;
  const D zero = d_set(0), nan = d_set(NAN), low = d_set(floor), top = d_set(DBL_MAX);
  VF narrow_least = OP(set1_ps)(INFINITY), narrow_most = OP(set1_ps)(-INFINITY);
  D sum[VECTORS], squares[VECTORS], least[2], most[2];
  Tally out = tally_none();
  for (int k = 0; k < VECTORS; k++) sum[k] = squares[k] = zero;
  for (int k = 0; k < 2; k++) least[k] = d_set(INFINITY), most[k] = d_set(-INFINITY);
  for (int64_t i = 0; i < n; i += STEP) {
    D v[VECTORS];
    for (int k = 0; k < VECTORS; k += 2) {
      const uint8_t *at = p + size * (i + k * LANES);
      __builtin_prefetch(at + BLOCK * size); /* the next block, while the other loops work on this one */
      if (kind == LANES_F64) {
        v[k] = d_load((const double *)(const void *)at);
        v[k + 1] = d_load((const double *)(const void *)at + LANES);
        continue;
      }
      VF lanes = load_lanes(at, kind);
      if (narrow) { /* extremes need no float64, and half the vectors */
        narrow_least = OP(min_ps)(lanes, narrow_least);
        narrow_most = OP(max_ps)(lanes, narrow_most);
      }
      widen_lanes(lanes, v + k);
    }
    for (int k = 0; k < VECTORS; k++) {
      D x = v[k];
      if (left_out) {
        /* NaN and +inf are not low: if they are not expected, they show in the sum of squares. */
        const M bad = left_out == LOW ? m_le(x, low) : m_not(m_and(m_lt(low, x), m_le(x, top)));
        out = tally_add(out, bad);
        v[k] = d_pick(bad, nan, x);
        x = d_pick(bad, zero, x);
      }
      if (!narrow) { /* if one is NaN, these return the second */
        least[k & 1] = d_min(v[k], least[k & 1]);
        most[k & 1] = d_max(v[k], most[k & 1]);
      }
      sum[k] += x;
      squares[k] = d_fma(x, x, squares[k]);
      if (stored) d_store(room + i + k * LANES, v[k]);
    }
  }
  if (narrow) {
    widen_lanes(narrow_least, least);
    widen_lanes(narrow_most, most);
  }
  *b = (Block){
    .x = stored ? room : (const double *)(const void *)p,
    .sum = d_total((sum[0] + sum[1]) + (sum[2] + sum[3])),
    .squares = d_total((squares[0] + squares[1]) + (squares[2] + squares[3])),
    .min = d_least(d_min(least[0], least[1])),
    .max = d_greatest(d_max(most[0], most[1])),
    .finite = n - tally_total(out),
    .left_out = left_out,
  };
  return left_out == ANYTHING || (b->squares <= DBL_MAX && (left_out == LOW || b->min > floor));
}

static int gather_kind(Block *b, const uint8_t *p, int kind, int64_t n, double floor, int left_out, double *room) {
#define GATHER(KIND)                                                          \
  case KIND:                                                                  \
    return left_out == NOTHING ? gather(b, p, KIND, n, floor, NOTHING, room)  \
           : left_out == LOW   ? gather(b, p, KIND, n, floor, LOW, room)      \
                               : gather(b, p, KIND, n, floor, ANYTHING, room)
  switch (kind) {
    GATHER(LANES_F32);
    GATHER(LANES_BF16);
    GATHER(LANES_F16);
    default: GATHER(LANES_F64);
  }
}

/* `n` elements from `first`. `expected`: what was left out of the block before this one. */
static Block side_block(const uint8_t *data, int dtype, int widen, int64_t first, int64_t n, double floor, int expected,
                        double *room) {
  Block b;
  const uint8_t *p = data;
  int kind = LANES_F64, left_out = n % STEP ? LOW : expected;
  const int whole = n % STEP == 0 && !widen;
  if (whole && dtype == DTYPE_FLOAT32) p += 4 * first, kind = LANES_F32;
  else if (whole && dtype == DTYPE_FLOAT16) p += 2 * first, kind = LANES_F16;
  else if (whole && dtype == DTYPE_BFLOAT16) p += 2 * first, kind = LANES_BF16;
  else if (whole && dtype == DTYPE_FLOAT64 && (uintptr_t)data % sizeof(double) == 0) p += 8 * first;
  else {
    decode(data, dtype, widen, first, n, room);
    p = (const uint8_t *)room;
  }
  while (!gather_kind(&b, p, kind, padded(n), floor, left_out, room)) left_out++;
  if (b.finite == n) b.left_out = NOTHING;
  return b;
}

/* Adds a block to a side, without what is not finite. The sum of squares about the mean is a difference of two sums; if
 * more than four of its sixteen digits would be lost, a second pass over the block computes it. */
LANE void join_block(Side *s, const Block *b, int64_t n) {
  s->min = fmin(s->min, b->min);
  s->max = fmax(s->max, b->max);
  if (b->finite == 0) return;
  double count = (double)b->finite, mean = b->sum / count, m2 = b->squares - b->sum * mean;
  if (!(m2 > 1e-4 * b->squares)) {
    const D about = d_set(mean);
    D drift[2] = {d_set(0), d_set(0)}, spread[2] = {d_set(0), d_set(0)};
    for (int64_t i = 0; i < padded(n); i += 2 * LANES) {
      for (int k = 0; k < 2; k++) {
        D v = d_load(b->x + i + k * LANES), d = d_keep(m_eq(v, v), v - about);
        drift[k] += d;
        spread[k] = d_fma(d, d, spread[k]);
      }
    }
    double slip = d_total(drift[0] + drift[1]); /* the rounding error of the mean */
    m2 = d_total(spread[0] + spread[1]) - slip * slip / count;
    mean += slip / count;
  }
  join_spread(s, count, mean, m2);
  add_block(&s->sum, b->sum);
  add_block(&s->squares, b->squares);
}

/* Counts what is left out of a block. `raw`: the elements as they are; read only if ANYTHING is left out. */
static void count_nonfinite(Side *s, const Block *b, const double *raw, int64_t base, int64_t n) {
  int64_t nan = 0, pos_inf = 0;
  if (b->left_out == ANYTHING) {
    Tally numbers = tally_none(), high = numbers;
    for (int64_t i = 0; i < padded(n); i += LANES) {
      D v = d_load(raw + i);
      numbers = tally_add(numbers, m_eq(v, v));
      high = tally_add(high, m_lt(d_set(DBL_MAX), v));
    }
    nan = padded(n) - tally_total(numbers);
    pos_inf = tally_total(high);
  }
  s->nan += nan;
  s->pos_inf += pos_inf;
  s->neg_inf += n - b->finite - nan - pos_inf;
  if (s->nonfinite_at >= 0) return;
  int64_t i = 0;
  while (i < n - 1 && b->x[i] == b->x[i]) i++;
  s->nonfinite_at = base + i;
}

/* A side with values multiplied by 2^-exponent; only its sums are of use. */
static Side scaled(const uint8_t *data, int dtype, int widen, double floor, int64_t count, int exponent) {
  double room[BLOCK] __attribute__((aligned(64)));
  const double scale = ldexp(1.0, -exponent);
  Side s = empty_side();
  for (int64_t i = 0; i < count; i += BLOCK) {
    int64_t n = count - i < BLOCK ? count - i : BLOCK;
    decode(data, dtype, widen, i, n, room);
    for (int64_t j = 0; j < padded(n); j++) room[j] *= scale;
    Block b;
    gather(&b, (const uint8_t *)room, LANES_F64, padded(n), floor * scale, ANYTHING, room);
    join_block(&s, &b, n);
  }
  return s;
}
