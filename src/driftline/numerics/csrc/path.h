/* One instruction set: SUFFIX, TARGET, WIDTH (float32 lanes) and LANES (float64) are set by kernel.c. */

#include "careful.h"
#if WIDTH == 4
#include "lanes_plain.h"
#else
#include "lanes_x86.h"
#endif
#include "lanes.h"
#include "fast_pair.h"
#if !defined(NARROW)
#include "fast_summary.h"
#include "scores.h"
#if WIDTH == 4
#include "plain_hash.h"
#else
#include "fast_hash.h"
#endif
#endif
#undef SUFFIX
#undef TARGET
#undef WIDTH
#undef LANES
