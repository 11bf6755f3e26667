/* The C that touches files, for AddressSanitizer and UndefinedBehaviorSanitizer: many small files read in one call, cut,
 * missing and empty ones among them; regions that are guarded, cut while they are read, and given back, by several
 * threads. The argument is an empty folder. */
#include <stdio.h>
#include "read_ahead.c"
#undef EXPORT
#include "mapped_file.c"

enum { FILES = 200, ROOM = 64 };

static uint64_t state = 88172645463325252ull;
static uint64_t draw(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

static int read_many(const char *place) {
  const int folder = open(place, O_RDONLY | O_DIRECTORY);
  char names[FILES * 16], *name = names;
  int64_t starts[FILES], lengths[FILES], sizes[FILES], got[FILES], room = 0;
  for (int i = 0; i < FILES; i++) {
    const int64_t size = (int64_t)(draw() % 100);
    name += sprintf(name, i % 7 ? "f%d" : "missing%d", i) + 1;
    if (i % 7) {
      char text[16];
      sprintf(text, "f%d", i);
      const int file = openat(folder, text, O_CREAT | O_WRONLY, 0600);
      char bytes[100] = {0};
      if (write(file, bytes, (size_t)size) != size) return 1;
      close(file);
    }
    starts[i] = (int64_t)(draw() % 50);
    lengths[i] = (int64_t)(draw() % ROOM);
    room += lengths[i];
  }
  char *out = malloc((size_t)room + !room); /* exactly as much as was promised */
  void *task = driftline_begin_files(folder, names, FILES, O_RDONLY, starts, lengths, out, sizes, got);
  if (!task) return 2;
  driftline_finish_files(task);
  for (int i = 0; i < FILES; i++) {
    if (i % 7 == 0 && sizes[i] != -1) return 3;
    if (got[i] > lengths[i]) return 4;
  }
  free(out);
  close(folder);
  return 0;
}

static const char *place_of_maps;

static void *cut_and_read(void *given) {
  const long number = (long)given, page = sysconf(_SC_PAGESIZE);
  char path[4096];
  snprintf(path, sizeof path, "%s/map%ld", place_of_maps, number);
  for (int round = 0; round < 200; round++) {
    const int64_t size = page * (2 + (round + number) % 9), left = page * ((round * 7 + number) % 3);
    const int file = open(path, O_CREAT | O_RDWR | O_TRUNC, 0600);
    if (ftruncate(file, size)) return (void *)1;
    volatile const char *bytes = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (driftline_map_over((uintptr_t)bytes, (uint64_t)size, file, 0)) return (void *)4;
    const int region = driftline_guard((uintptr_t)bytes, (uint64_t)size);
    if (region < 0 || ftruncate(file, left)) return (void *)2;
    int sum = 0;
    for (int64_t i = 0; i < size; i += 64) sum += bytes[i];
    if (sum || driftline_was_cut(region) != (left < size)) return (void *)3;
    driftline_unguard(region);
    munmap((void *)bytes, (size_t)size);
    close(file);
  }
  return NULL;
}

int main(int count, char **words) {
  if (count != 2) return 9;
  const int failed = read_many(words[1]);
  if (failed) return failed;
  place_of_maps = words[1];
  pthread_t threads[4];
  for (long i = 0; i < 4; i++) pthread_create(&threads[i], NULL, cut_and_read, (void *)i);
  for (int i = 0; i < 4; i++) {
    void *trouble;
    pthread_join(threads[i], &trouble);
    if (trouble) return 20 + (int)(long)trouble;
  }
  if (driftline_faults < 4 * 200 || driftline_mapped_abi() != 2 || driftline_reading_abi() != 1) return 30;
  puts("clean");
  return 0;
}
