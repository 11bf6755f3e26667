/* One instruction set: SUFFIX, TARGET, WIDTH (float32 lanes, 0 for none) and LANES (float64) are set by kernel.c. */

#include "careful.h"
#if WIDTH == 0
#include "generic.h"
#else
#include "lanes.h"
#include "fast_pair.h"
#include "fast_summary.h"
#include "fast_hash.h"
#endif
#undef SUFFIX
#undef TARGET
#undef WIDTH
#undef LANES
