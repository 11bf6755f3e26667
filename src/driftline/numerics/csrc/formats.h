/* Element formats: convert bytes of any format, at any alignment, to float64. The table of formats is generated from
 * dtypes.py. */

#define INLINE static inline __attribute__((always_inline))
#define COLD __attribute__((noinline, cold, unused))

INLINE uint64_t read64(const void *p) { uint64_t v; memcpy(&v, p, 8); return v; }
INLINE uint32_t read32(const void *p) { uint32_t v; memcpy(&v, p, 4); return v; }
INLINE uint16_t read16(const void *p) { uint16_t v; memcpy(&v, p, 2); return v; }
INLINE float float_of(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
INLINE double double_of(uint64_t bits) { double v; memcpy(&v, &bits, 8); return v; }

INLINE float half_value(uint16_t half) {
  uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
  /* The half's exponent is 112 too low in float32's field; the product corrects it, also for subnormal numbers. */
  float scaled = float_of(magnitude) * 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &scaled, 4);
  bits = magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : bits;
  return float_of(bits | sign);
}

INLINE unsigned nibble(const uint8_t *p, int64_t i) { return (p[i >> 1] >> ((i & 1) * 4)) & 15; }

#define DECODE_LOOP(expression) \
  for (int64_t i = 0; i < n; i++) out[i] = (expression)

/* `first` counts elements. The switch is in a macro because the loops are needed both for float and for double. */
#define DECODE_BODY(TYPE)                                                                                  \
  const uint8_t *p = base + (FORMATS[dtype].bits == 4 ? 0 : first * (FORMATS[dtype].bits / 8));            \
  switch (dtype) {                                                                                         \
    case DTYPE_FLOAT64: DECODE_LOOP((TYPE)double_of(read64(p + 8 * i))); break;                            \
    case DTYPE_FLOAT32: DECODE_LOOP((TYPE)float_of(read32(p + 4 * i))); break;                             \
    case DTYPE_FLOAT16: DECODE_LOOP((TYPE)half_value(read16(p + 2 * i))); break;                           \
    case DTYPE_BFLOAT16: DECODE_LOOP((TYPE)float_of((uint32_t)read16(p + 2 * i) << 16)); break;            \
    case DTYPE_FLOAT8_E4M3FN: DECODE_LOOP((TYPE)FLOAT8_E4M3FN_VALUES[p[i]]); break;                        \
    case DTYPE_FLOAT8_E4M3FNUZ: DECODE_LOOP((TYPE)FLOAT8_E4M3FNUZ_VALUES[p[i]]); break;                    \
    case DTYPE_FLOAT8_E5M2: DECODE_LOOP((TYPE)FLOAT8_E5M2_VALUES[p[i]]); break;                            \
    case DTYPE_FLOAT8_E5M2FNUZ: DECODE_LOOP((TYPE)FLOAT8_E5M2FNUZ_VALUES[p[i]]); break;                    \
    case DTYPE_FLOAT8_E8M0FNU: DECODE_LOOP((TYPE)FLOAT8_E8M0FNU_VALUES[p[i]]); break;                      \
    case DTYPE_FLOAT4_E2M1FN_X2: DECODE_LOOP((TYPE)FLOAT4_E2M1FN_X2_VALUES[nibble(p, first + i)]); break;  \
    case DTYPE_INT64: DECODE_LOOP((TYPE)(int64_t)read64(p + 8 * i)); break;                                \
    case DTYPE_INT32: DECODE_LOOP((TYPE)(int32_t)read32(p + 4 * i)); break;                                \
    case DTYPE_INT16: DECODE_LOOP((TYPE)(int16_t)read16(p + 2 * i)); break;                                \
    case DTYPE_INT8: DECODE_LOOP((TYPE)(int8_t)p[i]); break;                                               \
    case DTYPE_UINT64: DECODE_LOOP((TYPE)read64(p + 8 * i)); break;                                        \
    case DTYPE_UINT32: DECODE_LOOP((TYPE)read32(p + 4 * i)); break;                                        \
    case DTYPE_UINT16: DECODE_LOOP((TYPE)read16(p + 2 * i)); break;                                        \
    case DTYPE_UINT8: DECODE_LOOP((TYPE)p[i]); break;                                                      \
    case DTYPE_BOOL: DECODE_LOOP((TYPE)(p[i] != 0)); break;                                                \
    case DTYPE_INT4: DECODE_LOOP((TYPE)(int)((nibble(p, first + i) ^ 8) - 8u)); break;                     \
    case DTYPE_UINT4: DECODE_LOOP((TYPE)nibble(p, first + i)); break;                                      \
    default: DECODE_LOOP((TYPE)NAN); break;                                                                \
  }

UNUSED static void decode_double(const uint8_t *base, int dtype, int64_t first, int64_t n, double *out) {
  DECODE_BODY(double)
}

UNUSED static void decode_float(const uint8_t *base, int dtype, int64_t first, int64_t n, float *out) {
  DECODE_BODY(float)
}
