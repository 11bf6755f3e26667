/* Many pairs, one after the other, by threads of our own beside whatever the caller does meanwhile. */
#include <sys/mman.h>

#include "pair_ask.h"

enum { MOST_PAIR_HANDS = 64 };

typedef struct {
  const PairAsk *asks;
  Moments *out;
  uint8_t *done;
  int64_t count, next; /* `next` is taken by whoever is free */
  int path, hands;
  pthread_t hand[MOST_PAIR_HANDS];
} PairWork;

/* Pages of a mapped file, which come back when they are looked at. To let go of all of them at once takes 24 ms per
 * gigabyte of one core while the others wait for memory. Only whole huge pages: to cut one in two would cost more. */
static void let_go(const void *data, int64_t bytes) {
  const uintptr_t huge = 2 << 20;
  const uintptr_t begin = ((uintptr_t)data + huge - 1) & -huge, end = ((uintptr_t)data + (uintptr_t)bytes) & -huge;
#ifdef MADV_DONTNEED
  if (begin < end) madvise((void *)begin, end - begin, MADV_DONTNEED);
#else
  (void)begin, (void)end;
#endif
}

/* Whether there was one left. */
static int measure_next(PairWork *work) {
  const int64_t at = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
  if (at >= work->count) return 0;
  const PairAsk *ask = &work->asks[at];
  driftline_pair(ask->data[0], ask->dtype[0], ask->data[1], ask->dtype[1], ask->count, ask->widen, ask->atol, ask->rtol,
                 ask->mask[0], ask->mask[1], work->path, &work->out[at]);
  __atomic_store_n(&work->done[at], 1, __ATOMIC_RELEASE);
  for (int side = 0; side < 2 && ask->mapped && !ask->widen; side++)
    let_go(ask->data[side], ask->count * BITS[ask->dtype[side]] / 8);
  return 1;
}

static void *measure_pairs(void *work) {
  while (measure_next(work)) continue;
  return NULL;
}

static void join_hands(PairWork *work) {
  while (work->hands) pthread_join(work->hand[--work->hands], NULL);
}

/* Begin to measure, in the order of `asks`, on so many threads. The caller keeps `asks`, `out`, `done` (zero at first)
 * and all data until `end`. NULL when no thread could be had. */
EXPORT void *driftline_begin_pairs(const PairAsk *asks, int64_t count, int path, int threads, Moments *out,
                                   uint8_t *done) {
  PairWork *work = calloc(1, sizeof *work);
  if (!work) return NULL;
  work->asks = asks;
  work->out = out;
  work->done = done;
  work->count = count;
  work->path = path;
  if (threads > MOST_PAIR_HANDS) threads = MOST_PAIR_HANDS;
  while (work->hands < threads && begin_hand(&work->hand[work->hands], measure_pairs, work)) work->hands++;
  if (work->hands) return work;
  free(work);
  return NULL;
}

/* Until one of them is measured; the caller's thread measures others meanwhile. From one thread at a time. */
EXPORT void driftline_await_pair(void *given, int64_t at) {
  PairWork *work = given;
  while (!__atomic_load_n(&work->done[at], __ATOMIC_ACQUIRE))
    if (!measure_next(work)) join_hands(work);
}

/* The end of it: what is under way is waited for, and nothing else is begun. */
EXPORT void driftline_end_pairs(void *given) {
  PairWork *work = given;
  __atomic_store_n(&work->next, work->count, __ATOMIC_RELAXED);
  join_hands(work);
  free(work);
}
