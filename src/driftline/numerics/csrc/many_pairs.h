/* Many pairs, one after the other, by threads of our own beside whatever the caller does meanwhile. */

/* One pair, in the words of driftline_pair. */
typedef struct {
  const void *data[2];
  int64_t count;
  double atol, rtol;
  int32_t dtype[2], widen, mask[2], unused;
} PairAsk;

enum { MOST_PAIR_HANDS = 64 };

typedef struct {
  const PairAsk *asks;
  Moments *out;
  int64_t count, next; /* `next` is taken by whoever is free */
  int path, hands;
  pthread_t hand[MOST_PAIR_HANDS];
} PairWork;

static void *measure_pairs(void *given) {
  PairWork *work = given;
  for (;;) {
    const int64_t at = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
    if (at >= work->count) return NULL;
    const PairAsk *ask = &work->asks[at];
    driftline_pair(ask->data[0], ask->dtype[0], ask->data[1], ask->dtype[1], ask->count, ask->widen, ask->atol,
                   ask->rtol, ask->mask[0], ask->mask[1], work->path, &work->out[at]);
  }
}

/* Begin to measure, in the order of `asks`, on so many threads. The caller keeps `asks`, `out` and all data until
 * `end`. What of `out` still counts no elements then was not measured; so it is zero at first, and no ask is empty.
 * NULL when no thread could be had. */
EXPORT void *driftline_begin_pairs(const PairAsk *asks, int64_t count, int path, int threads, Moments *out) {
  PairWork *work = calloc(1, sizeof *work);
  if (!work) return NULL;
  work->asks = asks;
  work->out = out;
  work->count = count;
  work->path = path;
  if (threads > MOST_PAIR_HANDS) threads = MOST_PAIR_HANDS;
  while (work->hands < threads && begin_hand(&work->hand[work->hands], measure_pairs, work)) work->hands++;
  if (work->hands) return work;
  free(work);
  return NULL;
}

/* All that is left, by the caller's thread too; or, where the rest is not wanted, only what is under way. */
EXPORT void driftline_end_pairs(void *given, int wanted) {
  PairWork *work = given;
  if (wanted) measure_pairs(work);
  else __atomic_store_n(&work->next, work->count, __ATOMIC_RELAXED);
  for (int i = 0; i < work->hands; i++) pthread_join(work->hand[i], NULL);
  free(work);
}
