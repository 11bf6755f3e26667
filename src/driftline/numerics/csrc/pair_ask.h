/* One pair to be measured, in the words of driftline_pair. Shared with what makes many of them (comparison/foreseen.c)
 * and with numerics/many_pairs.py. `mapped`: it lies in files that are mapped, and is not looked at again soon. */
#include <stdint.h>

typedef struct {
  const void *data[2];
  int64_t count;
  double atol, rtol;
  int32_t dtype[2], widen, mask[2], mapped;
} PairAsk;
