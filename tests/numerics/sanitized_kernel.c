/* Every function of the kernel over random bytes in buffers of exactly their size, for AddressSanitizer and
 * UndefinedBehaviorSanitizer: every pair of element types, small and block sizes, any alignment, every path. */
#include <stdio.h>
#include <stdlib.h>
#include "api.c"

static uint64_t state = 88172645463325252ull;
static uint64_t draw(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

/* `bytes` random bytes, `offset` past an aligned address, with nothing readable behind them. */
static uint8_t *buffer(size_t bytes, size_t offset, void **owner) {
  uint8_t *room = malloc(bytes + offset + (bytes + offset == 0));
  *owner = room;
  for (size_t i = 0; i < bytes; i++) room[offset + i] = (uint8_t)draw();
  return room + offset;
}

/* Rows of logits: every pair of the types that the kernel scores, by one to three threads. */
static void score_rows(int path) {
  static const int types[] = {DTYPE_FLOAT32, DTYPE_FLOAT16, DTYPE_BFLOAT16};
  static const int64_t widths[] = {1, 7, 1023, 1024, 1025, 3000};
  for (int pair = 0; pair < 9; pair++)
    for (size_t which = 0; which < sizeof widths / sizeof *widths; which++) {
      const int r = types[pair / 3], c = types[pair % 3], threads = 1 + (int)(draw() % 3);
      const int64_t width = widths[which], rows = 1 + (int64_t)(draw() % 4), k = width < 5 ? width : 5;
      void *owners[2];
      const uint8_t *a = buffer((size_t)(rows * width * FORMATS[r].bits / 8), 0, &owners[0]);
      const uint8_t *b = buffer((size_t)(rows * width * FORMATS[c].bits / 8), 0, &owners[1]);
      int64_t tokens[4], *top_at = malloc((size_t)(rows * k) * sizeof *top_at);
      for (int i = 0; i < 4; i++) tokens[i] = (int64_t)(draw() % (uint64_t)width);
      float *scratch = aligned_alloc(64, (size_t)threads * 3 * (size_t)((width + 1023) / 1024 * 1024) * sizeof *scratch);
      float *tops = malloc((size_t)(2 * rows * k) * sizeof *tops);
      RowScore *out = malloc((size_t)rows * sizeof *out);
      driftline_score(a, r, b, c, rows, width, tokens, k, path, threads, scratch, out, top_at, tops, tops + rows * k);
      free(out), free(tops), free(scratch), free(top_at), free(owners[0]), free(owners[1]);
    }
}

int main(void) {
  static const int64_t counts[] = {0, 1, 2, 7, 8, 63, 64, 65, 511, 512, 513, 1100};
  const int best = driftline_best_path();
  for (int path = 0; path <= best; path++) score_rows(path);
  for (int path = 0; path <= best; path++)
    for (int r = 0; r < DTYPES; r++)
      for (size_t which = 0; which < sizeof counts / sizeof *counts; which++) {
        const int64_t n = counts[which];
        void *owners[2];
        const uint8_t *a = buffer((size_t)((n * FORMATS[r].bits + 7) / 8), draw() % 9, &owners[0]);
        Summary summary;
        uint8_t digest[16];
        driftline_summary(a, r, n, (int)(draw() & 1), path, &summary);
        driftline_digest(a, (n * FORMATS[r].bits + 7) / 8, path, digest);
        for (int c = 0; c < DTYPES; c++) {
          const int widen = n % 2 == 0 && c % 3 == 0; /* a real reference against a complex candidate */
          const uint8_t *b = buffer((size_t)((n * FORMATS[c].bits + 7) / 8), draw() % 9, &owners[1]);
          Moments m;
          driftline_pair(a, r, b, c, n, widen, 1e-3, 1e-3, (int)(draw() & 1), (int)(draw() & 1), path, &m);
          if (m.count != n || m.finite > n) return 1;
          free(owners[1]);
        }
        if (FORMATS[r].bits >= 8) {
          const Pattern pattern = {127, 128, 8, 126, 127, (uint64_t)(n & 1)};
          SpecialCounts tally;
          driftline_peak(a, FORMATS[r].bits, n, ~0ull, 0, path);
          driftline_tally(a, FORMATS[r].bits, n, &pattern, &tally);
        }
        free(owners[0]);
      }
  puts("clean");
  return 0;
}
