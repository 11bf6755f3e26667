/* The largest magnitude of a tensor as a bit pattern, and counts of its special values.
 *
 * Without the sign bit, the patterns of a float format sort like its values: infinity is above every finite value and
 * NaN above infinity. One unsigned maximum therefore shows whether anything is not finite, and how near to the format's
 * limit the tensor came. The compiler vectorises these loops; the counts of the tally are rarely needed.
 */

/* The layout of a format: mask of the magnitude, sign bit, and the patterns of the smallest normal number, the largest
 * finite number and infinity (0 if there is none). `odd_nan`: the pattern of minus zero is the only NaN. Shared with
 * peaks.py. */
typedef struct { uint64_t mask, sign, normal, top, infinity, odd_nan; } Pattern;

/* Numbers of zeros, of other numbers below the normal ones, at the top, at the bottom, of infinities, and of NaN. */
typedef struct { int64_t zero, subnormal, top, bottom, pos_inf, neg_inf, nan; } SpecialCounts;

typedef uint8_t __attribute__((may_alias)) any8;
typedef uint16_t __attribute__((aligned(1), may_alias)) any16;
typedef uint32_t __attribute__((aligned(1), may_alias)) any32;
typedef uint64_t __attribute__((aligned(1), may_alias)) any64;

#if defined(VECTOR_CODE)
#define PEAK_OF(NAME, TYPE)                                                      \
  static uint64_t NAME(const void *data, int64_t count, uint64_t mask) {         \
    const TYPE *x = data;                                                        \
    TYPE most = 0;                                                               \
    for (int64_t i = 0; i < count; i++) {                                        \
      TYPE m = (TYPE)(x[i] & (TYPE)mask);                                        \
      most = m > most ? m : most;                                                \
    }                                                                            \
    return most;                                                                 \
  }
PEAK_OF(peak8, any8)
PEAK_OF(peak16, any16)
PEAK_OF(peak32, any32)
PEAK_OF(peak64, any64)

/* The largest magnitude pattern of `count` numbers of 8, 16, 32 or 64 bits. */
static uint64_t peak(const void *data, int bits, int64_t count, uint64_t mask) {
  switch (bits) {
    case 8: return peak8(data, count, mask);
    case 16: return peak16(data, count, mask);
    case 32: return peak32(data, count, mask);
    default: return peak64(data, count, mask);
  }
}
#else
/* The only NaN of these formats is the pattern of minus zero, which the mask would hide. */
static uint64_t peak_odd(const uint8_t *x, int64_t count) {
  uint8_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    uint8_t m = x[i] == 0x80 ? 0xFF : (x[i] & 0x7F);
    most = m > most ? m : most;
  }
  return most;
}

#define TALLY_OF(NAME, TYPE)                                                     \
  static void NAME(const void *data, int64_t count, Pattern p, SpecialCounts *t) {       \
    const TYPE *x = data;                                                        \
    for (int64_t i = 0; i < count; i++) {                                        \
      uint64_t v = x[i], m = v & p.mask, negative = v & p.sign;                  \
      if (p.odd_nan && v == p.sign) { t->nan++; continue; }                      \
      if (m < p.normal) {                                                        \
        if (m) t->subnormal++; else t->zero++;                                   \
      } else if (m >= p.top) {                                                   \
        if (m == p.top) { if (negative) t->bottom++; else t->top++; }            \
        else if (m == p.infinity) { if (negative) t->neg_inf++; else t->pos_inf++; } \
        else t->nan++;                                                           \
      }                                                                          \
    }                                                                            \
  }
TALLY_OF(tally8, any8)
TALLY_OF(tally16, any16)
TALLY_OF(tally32, any32)
TALLY_OF(tally64, any64)

/* Counts each kind of special value; exact, and slower than the peak. */
static void tally(const void *data, int bits, int64_t count, const Pattern *pattern, SpecialCounts *out) {
  memset(out, 0, sizeof *out);
  switch (bits) {
    case 8: tally8(data, count, *pattern, out); break;
    case 16: tally16(data, count, *pattern, out); break;
    case 32: tally32(data, count, *pattern, out); break;
    default: tally64(data, count, *pattern, out); break;
  }
}
#endif
