/* The digest's inner loop for any processor, and the read that benchmarks compare with. */

LANE_FN void stripe(uint64_t *sums, const uint8_t *p, const uint8_t *key) {
  uint64_t data[8], keyed[8];
  for (int i = 0; i < 8; i++) {
    data[i] = read64(p + 8 * i);
    keyed[i] = data[i] ^ read64(key + 8 * i);
  }
  for (int i = 0; i < 8; i++) sums[i] += data[i ^ 1] + (uint64_t)(uint32_t)keyed[i] * (keyed[i] >> 32);
}

LANE_FN void scramble(uint64_t *sums, const uint8_t *key) {
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

static uint64_t read_two(const uint8_t *a, const uint8_t *b, int64_t bytes, int64_t ahead, int64_t far) {
  (void)ahead, (void)far; /* no prefetch here: the compiler's own loop */
  uint64_t sums[4] = {0};
  for (int64_t i = 0; i + 32 <= bytes; i += 32)
    for (int j = 0; j < 4; j++) sums[j] += read64(a + i + 8 * j) + read64(b + i + 8 * j);
  return sums[0] + sums[1] + sums[2] + sums[3];
}
