/* Element formats: how bytes become numbers, and how finely each format counts. */

/* ---- formats ---- */

typedef struct {
  int is_float;    /* else an integer format: one ULP is one */
  int mantissa;    /* stored bits */
  int emin;        /* exponent of the smallest normal number */
  uint64_t top;    /* ordinal just past the greatest finite number */
  double sentinel; /* the value that means -inf; NaN when the format has none */
} Format;

static Format format_of(int dtype) {
  switch (dtype) {
    case F64: return (Format){1, 52, -1022, 0x7FF0000000000000ull, -DBL_MAX};
    case F32: return (Format){1, 23, -126, 0x7F800000u, -(double)FLT_MAX};
    case F16: return (Format){1, 10, -14, 0x7C00u, -65504.0};
    case BF16: return (Format){1, 7, -126, 0x7F80u, -0x1.FEp127};
    case E4M3FN: return (Format){1, 3, -6, 0x7Fu, NAN};
    case E4M3FNUZ: return (Format){1, 3, -7, 0x80u, NAN};
    case E5M2: return (Format){1, 2, -14, 0x7Cu, NAN};
    case E5M2FNUZ: return (Format){1, 2, -15, 0x80u, NAN};
    case E8M0: return (Format){1, 0, -127, 0x100u, NAN};
    case FP4: return (Format){1, 1, 0, 0x8u, NAN};
    default: return (Format){0, 0, 0, 0, NAN};
  }
}

static float small_values[5][256]; /* E4M3FN .. E8M0 by bit pattern */
static float fp4_values[16];

static float minifloat(unsigned code, int ebits, int mbits, int bias) {
  int exponent = (int)(code >> mbits) & ((1 << ebits) - 1);
  float mantissa = (float)(code & ((1u << mbits) - 1)) / (float)(1 << mbits);
  float value = exponent ? ldexpf(1.0f + mantissa, exponent - bias) : ldexpf(mantissa, 1 - bias);
  return (code >> (ebits + mbits)) & 1 ? -value : value;
}

__attribute__((constructor)) static void fill_tables(void) {
  for (unsigned code = 0; code < 256; code++) {
    unsigned low = code & 0x7F;
    small_values[0][code] = low == 0x7F ? NAN : minifloat(code, 4, 3, 7);
    small_values[1][code] = code == 0x80 ? NAN : minifloat(code, 4, 3, 8);
    small_values[2][code] = low > 0x7C ? NAN : low == 0x7C ? (code & 0x80 ? -INFINITY : INFINITY)
                                                           : minifloat(code, 5, 2, 15);
    small_values[3][code] = code == 0x80 ? NAN : minifloat(code, 5, 2, 16);
    small_values[4][code] = code == 255 ? NAN : ldexpf(1.0f, (int)code - 127);
  }
  for (unsigned code = 0; code < 16; code++) fp4_values[code] = minifloat(code, 2, 1, 1);
}

/* ---- decoding: any format, any alignment; `first` counts elements ---- */

INLINE uint64_t read64(const void *p) { uint64_t v; memcpy(&v, p, 8); return v; }
INLINE uint32_t read32(const void *p) { uint32_t v; memcpy(&v, p, 4); return v; }
INLINE uint16_t read16(const void *p) { uint16_t v; memcpy(&v, p, 2); return v; }
INLINE float float_of(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
INLINE double double_of(uint64_t bits) { double v; memcpy(&v, &bits, 8); return v; }
INLINE uint64_t bits_of(double v) { uint64_t b; memcpy(&b, &v, 8); return b; }

INLINE float half_value(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
  /* The half's exponent lands in float32's field 112 too low; the product mends it, subnormals included. */
  float scaled = float_of(magnitude) * 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &scaled, 4);
  bits = magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : bits;
  return float_of(bits | sign);
}

INLINE unsigned nibble(const uint8_t *p, int64_t i) { return (p[i >> 1] >> ((i & 1) * 4)) & 15; }

#define DECODE_LOOP(expression) \
  for (int64_t i = 0; i < n; i++) out[i] = (expression)

#define DECODE_BODY(TYPE)                                                                                     \
  const uint8_t *p = base + (BITS[dtype] == 4 ? 0 : first * (BITS[dtype] / 8));                               \
  switch (dtype) {                                                                                            \
    case F64: DECODE_LOOP((TYPE)double_of(read64(p + 8 * i))); break;                                         \
    case F32: DECODE_LOOP((TYPE)float_of(read32(p + 4 * i))); break;                                          \
    case F16: DECODE_LOOP((TYPE)half_value(read16(p + 2 * i))); break;                                        \
    case BF16: DECODE_LOOP((TYPE)float_of((uint32_t)read16(p + 2 * i) << 16)); break;                         \
    case E4M3FN: case E4M3FNUZ: case E5M2: case E5M2FNUZ: case E8M0:                                          \
      DECODE_LOOP((TYPE)small_values[dtype - E4M3FN][p[i]]); break;                                           \
    case FP4: DECODE_LOOP((TYPE)fp4_values[nibble(p, first + i)]); break;                                     \
    case I64: DECODE_LOOP((TYPE)(int64_t)read64(p + 8 * i)); break;                                           \
    case I32: DECODE_LOOP((TYPE)(int32_t)read32(p + 4 * i)); break;                                           \
    case I16: DECODE_LOOP((TYPE)(int16_t)read16(p + 2 * i)); break;                                           \
    case I8: DECODE_LOOP((TYPE)(int8_t)p[i]); break;                                                          \
    case U64: DECODE_LOOP((TYPE)read64(p + 8 * i)); break;                                                    \
    case U32: DECODE_LOOP((TYPE)read32(p + 4 * i)); break;                                                    \
    case U16: DECODE_LOOP((TYPE)read16(p + 2 * i)); break;                                                    \
    case U8: DECODE_LOOP((TYPE)p[i]); break;                                                                  \
    case BOOL: DECODE_LOOP((TYPE)(p[i] != 0)); break;                                                         \
    case I4: DECODE_LOOP((TYPE)(int)((nibble(p, first + i) ^ 8) - 8u)); break;                                \
    case U4: DECODE_LOOP((TYPE)nibble(p, first + i)); break;                                                  \
    default: DECODE_LOOP((TYPE)NAN); break;                                                                   \
  }

INLINE void decode_double(const uint8_t *base, int dtype, int64_t first, int64_t n, double *out) {
  DECODE_BODY(double)
}

INLINE void decode_float(const uint8_t *base, int dtype, int64_t first, int64_t n, float *out) {
  DECODE_BODY(float)
}

/* A real tensor against a complex one: its imaginary parts are zero. `first` and `n` count reals. */
INLINE void decode_side(const uint8_t *base, int dtype, int widen, int64_t first, int64_t n, double *out) {
  if (!widen) {
    decode_double(base, dtype, first, n, out);
    return;
  }
  double half[PIECE / 2];
  decode_double(base, dtype, first / 2, (n + 1) / 2, half); /* blocks begin at even places */
  for (int64_t i = 0; i < n; i++) out[i] = i & 1 ? 0.0 : half[i / 2];
}
