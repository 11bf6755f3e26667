/* All vector code, compiled once per instruction set: CMake sets the compiler flags, and the macro ISA to the set's
 * name. All functions are static; the table at the end is the only symbol. */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tables.h"

#define VECTOR_CODE 1 /* compiles the loops of headers that api.c includes too */

#if defined(__AVX2__)
#define PORTABLE 0
#else
#define PORTABLE 1
#define WIDE 0
#endif
#define LANE static inline __attribute__((always_inline, unused))
/* How lanes are loaded. */
enum { LANES_F32, LANES_BF16, LANES_F16, LANES_F64 };

#include "formats.h"
#include "moments.h"
#if PORTABLE
#include "lanes_portable.h"
#else
#include "lanes_x86.h"
#endif
#include "block.h"
#include "pair_exact.h"
#include "summary.h"
#include "hash.h"
#include "peaks.h"
#include "token_scores.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
__attribute__((visibility("hidden"))) const Isa JOIN(driftline_isa_, ISA) = {
  pair, summary, scaled, hash_long, peak, score};
