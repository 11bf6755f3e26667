/* Many small files in one call, by a thread that Python does not know: open, look, read, close.
 *
 * A plain shared library for ctypes, without state. It says of each file how long it is and how much of it was
 * read, and nothing of errors: whoever asked opens the file once more in Python, which has words for what is wrong.
 */
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

/* Bumped whenever a signature changes: the binding refuses a library it does not know. */
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

/* Begin to read: a thread of our own, which signals do not reach. The caller keeps all memory until `finish`.
 * `names`: relative paths, a zero byte after each. `out` has room for all `lengths`, one after the other. `sizes`
 * and `got` become -1 for what is no regular file or cannot be opened. NULL when no thread could be had. */
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

/* Wait until all is read. */
EXPORT void driftline_finish_files(void *given) {
  Task *task = given;
  pthread_join(task->thread, NULL);
  free(task);
}
