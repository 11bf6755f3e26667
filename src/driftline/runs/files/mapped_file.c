/* Reads of mapped files that survive if the file becomes shorter.
 *
 * Reading a page of a mapped file that is no longer in the file raises SIGBUS, which ends the
 * process without a message. The handler in this file checks whether the address is in a registered
 * region. If so, the rest of the region becomes zeros, the fault is counted, and the read goes on;
 * the reader compares the count afterwards and discards the zeros. Any other SIGBUS goes to the
 * previous handler.
 *
 * A plain shared library for ctypes. Its only state is the table of regions and the old handler. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_REGIONS 4096 /* the handler searches all; a process rarely has 1000 files open */

typedef struct { _Atomic uintptr_t start, end, cut; } Region; /* `end` 0: free; `cut`: first lost address, or 0 */

static Region regions[MOST_REGIONS];
static _Atomic int highest;
static pthread_mutex_t change = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;
static _Thread_local int handing_on;

EXPORT _Atomic int64_t driftline_faults;

/* Increased when a signature changes: the binding refuses a library with another number. */
EXPORT int driftline_mapped_abi(void) { return 2; }

/* Map a file over memory that the caller has mapped; returns 0 or a value of errno.h. */
EXPORT int driftline_map_over(uintptr_t address, uint64_t length, int file, int64_t offset) {
  const int flags = MAP_SHARED | MAP_FIXED;
  return mmap((void *)address, length, PROT_READ, flags, file, (off_t)offset) == MAP_FAILED ? errno : 0;
}

static void hand_on(int number, siginfo_t *info, void *context) {
  const int has_handler = (before.sa_flags & SA_SIGINFO) || (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN);
  /* The previous handler may call ours again; the second time nobody wants the signal. */
  if (!has_handler || handing_on) {
    /* The instruction is executed again, and the process ends as it would have ended without us. */
    struct sigaction usual = {.sa_handler = SIG_DFL};
    sigaction(number, &usual, NULL);
    return;
  }
  handing_on = 1;
  if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
  else before.sa_handler(number);
  handing_on = 0;
}

static void handle(int number, siginfo_t *info, void *context) {
  const uintptr_t address = (uintptr_t)info->si_addr;
  const int count = atomic_load(&highest);
  for (int i = 0; info->si_code > 0 && i < count; i++) { /* code <= 0: sent by a process */
    Region *region = &regions[i];
    const uintptr_t start = atomic_load(&region->start), end = atomic_load(&region->end);
    if (address < start || address >= end) continue;
    const uintptr_t page = address & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap((void *)page, end - page, PROT_READ, flags, -1, 0) == MAP_FAILED) break;
    uintptr_t cut = atomic_load(&region->cut);
    while ((!cut || page < cut) && !atomic_compare_exchange_weak(&region->cut, &cut, page)) {
    }
    atomic_fetch_add(&driftline_faults, 1);
    return;
  }
  hand_on(number, info, context);
}

/* Make `handle` the handler of SIGBUS. Libraries that are loaded later replace it with theirs (Paddle does so when it
 * is imported), so this is called for every region; it takes 0.2 us. */
static int install(void) {
  struct sigaction current;
  if (sigaction(SIGBUS, NULL, &current) != 0) return 0;
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == handle) return 1;
  struct sigaction wanted = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
  sigemptyset(&wanted.sa_mask);
  before = current; /* first, because the handler may need it after the next line */
  return sigaction(SIGBUS, &wanted, NULL) == 0;
}

/* A child that is forked while another thread changes the table would wait for that thread for ever. */
static void lock_table(void) { pthread_mutex_lock(&change); }
static void unlock_table(void) { pthread_mutex_unlock(&change); }
static void prepare_for_forks(void) { pthread_atfork(lock_table, unlock_table, unlock_table); }

/* Register a region; returns its number, or -1 if the table is full. */
EXPORT int driftline_guard(uintptr_t start, uint64_t length) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  int number = -1;
  pthread_once(&once, prepare_for_forks);
  pthread_mutex_lock(&change);
  const int installed = install();
  for (int i = 0; installed && i < MOST_REGIONS && number < 0; i++)
    if (!atomic_load(&regions[i].end)) number = i;
  if (number >= 0) {
    Region *region = &regions[number];
    atomic_store(&region->cut, 0);
    atomic_store(&region->start, start);
    atomic_store(&region->end, start + length); /* last: from now on the handler uses the region */
    if (number >= atomic_load(&highest)) atomic_store(&highest, number + 1);
  }
  pthread_mutex_unlock(&change);
  return number;
}

/* Whether a page of a region was lost. */
EXPORT int driftline_was_cut(int number) { return atomic_load(&regions[number].cut) != 0; }

/* Remove a region before it is unmapped. */
EXPORT void driftline_unguard(int number) {
  atomic_store(&regions[number].end, 0);
  atomic_store(&regions[number].start, 0);
}
