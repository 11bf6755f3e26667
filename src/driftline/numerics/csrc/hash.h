/* The digest: XXH3 with 128 bits and seed 0, written from the published description of the algorithm. The inner loop
 * for long inputs is compiled separately for every instruction set. */

typedef struct { uint64_t low, high; } Hash;

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
  0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
  0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
  0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
  0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
  0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71,
  0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8,
  0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a,
  0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea,
  0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17,
  0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b,
  0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45,
  0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define P64_5 0x27D4EB2F165667C5ull

INLINE Hash wide_product(uint64_t a, uint64_t b) {
  unsigned __int128 p = (unsigned __int128)a * b;
  return (Hash){(uint64_t)p, (uint64_t)(p >> 64)};
}
INLINE uint64_t folded_product(uint64_t a, uint64_t b) {
  Hash p = wide_product(a, b);
  return p.low ^ p.high;
}
INLINE uint64_t avalanche(uint64_t h) {
  h = (h ^ (h >> 37)) * 0x165667919E3779F9ull;
  return h ^ (h >> 32);
}
INLINE uint64_t avalanche_64(uint64_t h) {
  h = (h ^ (h >> 33)) * P64_2;
  h = (h ^ (h >> 29)) * P64_3;
  return h ^ (h >> 32);
}
INLINE uint64_t mix16(const uint8_t *p, const uint8_t *k) {
  return folded_product(read64(p) ^ read64(k), read64(p + 8) ^ read64(k + 8));
}
INLINE void mix32(Hash *a, const uint8_t *p, const uint8_t *q, const uint8_t *k) {
  a->low = (a->low + mix16(p, k)) ^ (read64(q) + read64(q + 8));
  a->high = (a->high + mix16(q, k + 16)) ^ (read64(p) + read64(p + 8));
}

UNUSED static Hash hash_to_16(const uint8_t *p, size_t n) {
  const uint8_t *k = SECRET;
  if (n > 8) {
    uint64_t flip_low = read64(k + 32) ^ read64(k + 40), flip_high = read64(k + 48) ^ read64(k + 56);
    uint64_t a = read64(p), b = read64(p + n - 8);
    Hash m = wide_product(a ^ b ^ flip_low, P64_1);
    m.low += (uint64_t)(n - 1) << 54;
    b ^= flip_high;
    m.high += b + (uint64_t)(uint32_t)b * (P32_2 - 1);
    m.low ^= __builtin_bswap64(m.high);
    Hash h = wide_product(m.low, P64_2);
    h.high += m.high * P64_2;
    return (Hash){avalanche(h.low), avalanche(h.high)};
  }
  if (n >= 4) {
    uint64_t a = read32(p), b = read32(p + n - 4);
    uint64_t keyed = (a + (b << 32)) ^ (read64(k + 16) ^ read64(k + 24));
    Hash m = wide_product(keyed, P64_1 + ((uint64_t)n << 2));
    m.high += m.low << 1;
    m.low ^= m.high >> 3;
    m.low = (m.low ^ (m.low >> 35)) * 0x9FB21C651E98DF25ull;
    m.low ^= m.low >> 28;
    m.high = avalanche(m.high);
    return m;
  }
  if (n > 0) {
    uint32_t low = ((uint32_t)p[0] << 16) | ((uint32_t)p[n >> 1] << 24) | p[n - 1] | ((uint32_t)n << 8);
    uint32_t swapped = __builtin_bswap32(low), high = (swapped << 13) | (swapped >> 19);
    return (Hash){avalanche_64(low ^ (uint64_t)(read32(k) ^ read32(k + 4))),
                  avalanche_64(high ^ (uint64_t)(read32(k + 8) ^ read32(k + 12)))};
  }
  return (Hash){avalanche_64(read64(k + 64) ^ read64(k + 72)), avalanche_64(read64(k + 80) ^ read64(k + 88))};
}

static Hash finish_mid(Hash a, size_t n) {
  Hash h = {a.low + a.high, a.low * P64_1 + a.high * P64_4 + (uint64_t)n * P64_2};
  return (Hash){avalanche(h.low), 0 - avalanche(h.high)};
}

UNUSED static Hash hash_to_240(const uint8_t *p, size_t n) {
  const uint8_t *k = SECRET;
  Hash a = {(uint64_t)n * P64_1, 0};
  if (n <= 128) {
    for (size_t i = (n - 1) / 32 + 1; i-- > 0;) mix32(&a, p + 16 * i, p + n - 16 * (i + 1), k + 32 * i);
    return finish_mid(a, n);
  }
  for (size_t i = 0; i < 128; i += 32) mix32(&a, p + i, p + i + 16, k + i);
  a.low = avalanche(a.low);
  a.high = avalanche(a.high);
  for (size_t i = 128; i + 32 <= n; i += 32) mix32(&a, p + i, p + i + 16, k + 3 + i - 128);
  mix32(&a, p + n - 16, p + n - 32, k + 136 - 17 - 16);
  return finish_mid(a, n);
}

static const uint64_t HASH_START[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

INLINE uint64_t merge_sums(const uint64_t *sums, const uint8_t *k, uint64_t start) {
  uint64_t h = start;
  for (int i = 0; i < 4; i++)
    h += folded_product(sums[2 * i] ^ read64(k + 16 * i), sums[2 * i + 1] ^ read64(k + 16 * i + 8));
  return avalanche(h);
}

UNUSED static Hash finish_long(const uint64_t *sums, size_t n) {
  return (Hash){merge_sums(sums, SECRET + 11, (uint64_t)n * P64_1),
                merge_sums(sums, SECRET + 192 - 64 - 11, ~((uint64_t)n * P64_2))};
}

#if defined(VECTOR_CODE) /* the loop for long inputs, in vectors if the processor has them */
#if PORTABLE
LANE void stripe(uint64_t *sums, const uint8_t *p, const uint8_t *key) {
  uint64_t data[8], keyed[8];
  for (int i = 0; i < 8; i++) {
    data[i] = read64(p + 8 * i);
    keyed[i] = data[i] ^ read64(key + 8 * i);
  }
  for (int i = 0; i < 8; i++) sums[i] += data[i ^ 1] + (uint64_t)(uint32_t)keyed[i] * (keyed[i] >> 32);
}

LANE void scramble(uint64_t *sums, const uint8_t *key) {
  for (int i = 0; i < 8; i++) sums[i] = (sums[i] ^ (sums[i] >> 47) ^ read64(key + 8 * i)) * P32_1;
}

static void hash_long(const uint8_t *p, size_t n, uint64_t *sums) {
  memcpy(sums, HASH_START, sizeof HASH_START);
  size_t blocks = (n - 1) / 1024;
  for (size_t b = 0; b < blocks; b++, p += 1024) {
    for (size_t i = 0; i < 16; i++) stripe(sums, p + 64 * i, SECRET + 8 * i);
    scramble(sums, SECRET + 128);
  }
  size_t rest = n - blocks * 1024, stripes = (rest - 1) / 64;
  for (size_t i = 0; i < stripes; i++) stripe(sums, p + 64 * i, SECRET + 8 * i);
  stripe(sums, p + rest - 64, SECRET + 192 - 64 - 7);
}
#else
LANE VI stripe(VI sums, VI data, VI key) {
#if WIDE
  VI keyed = _mm512_xor_si512(data, key);
#else
  VI keyed = _mm256_xor_si256(data, key);
#endif
  VI product = OP(mul_epu32)(keyed, OP(srli_epi64)(keyed, 32));
  return OP(add_epi64)(OP(add_epi64)(sums, OP(shuffle_epi32)(data, 0x4E)), product);
}

LANE VI scramble(VI sums, VI key) {
  const VI prime = OP(set1_epi32)((int)P32_1);
#if WIDE
  VI v = _mm512_ternarylogic_epi64(sums, _mm512_srli_epi64(sums, 47), key, 0x96);
#else
  VI v = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), key);
#endif
  VI low = OP(mul_epu32)(v, prime), high = OP(mul_epu32)(OP(srli_epi64)(v, 32), prime);
  return OP(add_epi64)(low, OP(slli_epi64)(high, 32));
}

static void hash_long(const uint8_t *p, size_t n, uint64_t *out) {
  enum { PARTS = 16 / WIDTH, PART = 4 * WIDTH };
  VI sums[PARTS];
  for (int v = 0; v < PARTS; v++) sums[v] = load_bits((const uint8_t *)HASH_START + PART * v);
  size_t blocks = (n - 1) / 1024;
  for (size_t b = 0; b < blocks; b++, p += 1024) {
    for (size_t i = 0; i < 16; i++)
      for (int v = 0; v < PARTS; v++)
        sums[v] = stripe(sums[v], load_bits(p + 64 * i + PART * v), load_bits(SECRET + 8 * i + PART * v));
    for (int v = 0; v < PARTS; v++) sums[v] = scramble(sums[v], load_bits(SECRET + 128 + PART * v));
  }
  size_t rest = n - blocks * 1024, stripes = (rest - 1) / 64;
  for (size_t i = 0; i < stripes; i++)
    for (int v = 0; v < PARTS; v++)
      sums[v] = stripe(sums[v], load_bits(p + 64 * i + PART * v), load_bits(SECRET + 8 * i + PART * v));
  for (int v = 0; v < PARTS; v++) {
    sums[v] = stripe(sums[v], load_bits(p + rest - 64 + PART * v), load_bits(SECRET + 121 + PART * v));
    memcpy(out + PART / 8 * v, &sums[v], PART);
  }
}
#endif
#endif
