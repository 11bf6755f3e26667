/* The digest's inner loop in vectors, and the read that benchmarks compare with. */

LANE_FN VI stripe(VI sums, VI data, VI key) {
#if WIDTH == 16
  VI keyed = _mm512_xor_si512(data, key);
#else
  VI keyed = _mm256_xor_si256(data, key);
#endif
  VI product = OP(mul_epu32)(keyed, OP(srli_epi64)(keyed, 32));
  return OP(add_epi64)(OP(add_epi64)(sums, OP(shuffle_epi32)(data, 0x4E)), product);
}

LANE_FN VI scramble(VI sums, VI key) {
  const VI prime = OP(set1_epi32)((int)P32_1);
#if WIDTH == 16
  VI v = _mm512_ternarylogic_epi64(sums, _mm512_srli_epi64(sums, 47), key, 0x96);
#else
  VI v = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), key);
#endif
  VI low = OP(mul_epu32)(v, prime), high = OP(mul_epu32)(OP(srli_epi64)(v, 32), prime);
  return OP(add_epi64)(low, OP(slli_epi64)(high, 32));
}

TARGET static void hash_long(const uint8_t *p, size_t n, uint64_t *out) {
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

/* For the benchmark: two streams read as fast as this processor can, with nothing done to them. */
TARGET static uint64_t read_two(const uint8_t *a, const uint8_t *b, int64_t bytes, int64_t ahead, int64_t far) {
  enum { PART = 4 * WIDTH };
  VI x[4];
  for (int v = 0; v < 4; v++) x[v] = OP(set1_epi32)(0);
  for (int64_t i = 0; i + 4 * PART <= bytes; i += 4 * PART) {
    for (int line = 0; line < 4 * PART; line += 64) {
      _mm_prefetch((const char *)(a + i + line + ahead), _MM_HINT_T0);
      _mm_prefetch((const char *)(b + i + line + ahead), _MM_HINT_T0);
      if (!far) continue;
      _mm_prefetch((const char *)(a + i + line + far), _MM_HINT_T1);
      _mm_prefetch((const char *)(b + i + line + far), _MM_HINT_T1);
    }
    for (int v = 0; v < 4; v++)
      x[v] = OP(add_epi32)(x[v], OP(add_epi32)(load_bits(a + i + PART * v), load_bits(b + i + PART * v)));
  }
  return (uint64_t)count_lanes(OP(add_epi32)(OP(add_epi32)(x[0], x[1]), OP(add_epi32)(x[2], x[3])));
}
