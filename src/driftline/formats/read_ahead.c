/* Reads many small files in one call, in a thread that Python does not know. A plain shared library for ctypes, without
 * state. It returns the length of each file and the number of bytes read, but no errors: the caller opens such a file
 * again in Python, which reports the reason. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* Increased when a signature changes: the binding refuses a library with another number. */
EXPORT int driftline_reading_abi(void) { return 1; }

static int64_t read_range(int file, char *out, int64_t start, int64_t length) {
  int64_t done = 0;
  while (done < length) {
    ssize_t more = pread(file, out + done, (size_t)(length - done), start + done);
    if (more < 0 && errno == EINTR) continue;
    if (more <= 0) break;
    done += more;
  }
  return done;
}

typedef struct {
  pthread_t thread;
  int folder, flags;
  const char *names;
  int64_t count;
  const int64_t *starts, *lengths;
  char *out;
  int64_t *sizes, *got;
} Task;

static void *read_all(void *given) {
  const Task *task = given;
  const char *name = task->names;
  char *out = task->out;
  for (int64_t i = 0; i < task->count; i++) {
    struct stat about;
    int64_t length = task->lengths[i];
    int file = openat(task->folder, name, task->flags);
    task->sizes[i] = task->got[i] = -1;
    if (file >= 0) {
      if (fstat(file, &about) == 0 && S_ISREG(about.st_mode)) {
        int64_t rest = (int64_t)about.st_size - task->starts[i];
        task->sizes[i] = about.st_size;
        task->got[i] = read_range(file, out, task->starts[i], rest < length ? rest : length);
      }
      close(file);
    }
    name += strlen(name) + 1;
    out += length;
  }
  return NULL;
}

/* Begin to read in a separate thread, which receives no signals. The caller keeps all memory until `finish`. `names`:
 * relative paths, each with a zero byte after it. `out` has room for all `lengths`, one after the other. `sizes` and
 * `got` become -1 for files that are not regular or cannot be opened. Returns NULL if no thread can be started. */
EXPORT void *driftline_begin_files(int folder, const char *names, int64_t count, int flags, const int64_t *starts,
                                   const int64_t *lengths, char *out, int64_t *sizes, int64_t *got) {
  Task *task = malloc(sizeof *task);
  if (!task) return NULL;
  *task = (Task){0, folder, flags, names, count, starts, lengths, out, sizes, got};
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&task->thread, NULL, read_all, task);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed) {
    free(task);
    return NULL;
  }
  return task;
}

/* Wait until all files are read. */
EXPORT void driftline_finish_files(void *given) {
  Task *task = given;
  pthread_join(task->thread, NULL);
  free(task);
}
