/* Numbers as text: the fewest digits that are read back as the same float64, written as Python writes them.
 *
 * Schubfach (Giulietti 2020): of the decimals of the length that fits, those above and below are looked at, and one
 * digit fewer where one of those is nearer than the next float64. Powers of ten are rounded up to 128 bits; those up to
 * 10^54 are exact, or the rest of one exact division. What needs greater ones is left to the caller.
 */

enum { MOST_TENS = 54, LONGEST_NUMBER = 25, ABSENT = 0, REAL = 1, WHOLE = 2 };

typedef unsigned __int128 Wide;
typedef struct { Wide up[MOST_TENS + 1], down[MOST_TENS + 1]; } Tens;

static void make_tens(Tens *tens) {
  Wide five = 1;
  for (int k = 0; k <= MOST_TENS; k++, five *= 5) {
    Wide whole = five, quotient = 0, rest = 1;
    while (!(whole >> 127)) whole <<= 1;
    tens->up[k] = whole;
    do {
      rest <<= 1;
      quotient = quotient << 1 | (rest >= five);
      if (rest >= five) rest -= five;
    } while (!(quotient >> 127));
    tens->down[k] = quotient + (rest != 0);
  }
}

/* floor(q log10(2)), floor(q log10(2) - log10(4/3)), floor(k log2(10)): exact far beyond what is asked here. */
INLINE int tens_of(int q, int closer) { return (int)(((int64_t)q * 1262611 - (closer ? 524031 : 0)) >> 22); }
INLINE int twos_of(int k) { return (int)(((int64_t)k * 1741647) >> 19); }

/* The upper half of a product, its last bit set where something was cut off. */
INLINE uint64_t cut(Wide ten, uint64_t by) {
  const Wide low = (Wide)(uint64_t)ten * by;
  const Wide high = (ten >> 64) * by + (uint64_t)(low >> 64);
  return (uint64_t)(high >> 64) | ((uint64_t)high > 1);
}

/* The digits of a positive finite number and the power of ten behind them; 0 where that is beyond the table. */
static uint64_t shortest(const Tens *tens, double value, int *power) {
  const uint64_t word = bits_of(value);
  const uint64_t fraction = word & ((1ull << 52) - 1);
  const int exponent = (int)(word >> 52);
  const int closer = fraction == 0 && exponent > 1; /* the float64 below is half as far as the one above */
  const uint64_t c = exponent ? fraction | 1ull << 52 : fraction;
  const int q = (exponent ? exponent : 1) - 1075, odd = (int)(c & 1);
  const int k = tens_of(q, closer);
  if (k < -MOST_TENS || k > MOST_TENS) return 0;
  const Wide ten = k <= 0 ? tens->up[-k] : tens->down[k];
  const int shift = q + twos_of(-k) + 1;
  const uint64_t lower = cut(ten, (4 * c - 2 + (uint64_t)closer) << shift) + (uint64_t)odd;
  const uint64_t middle = cut(ten, (4 * c) << shift);
  const uint64_t upper = cut(ten, (4 * c + 2) << shift) - (uint64_t)odd;
  const uint64_t s = middle / 4;
  *power = k;
  if (s >= 10) {
    const uint64_t fewer = s / 10;
    const int down = lower <= 40 * fewer, up = 40 * fewer + 40 <= upper;
    if (down != up) {
      *power = k + 1;
      return fewer + (uint64_t)up;
    }
  }
  const int down = lower <= 4 * s, up = 4 * s + 4 <= upper;
  if (down != up) return s + (uint64_t)up;
  return s + (middle > 4 * s + 2 || (middle == 4 * s + 2 && (s & 1)));
}

static char *write_whole(char *out, uint64_t value) {
  char digits[20];
  int n = 0;
  do digits[n++] = (char)('0' + value % 10);
  while (value /= 10);
  while (n) *out++ = digits[--n];
  return out;
}

/* One float64 as `repr` has it; NULL where `shortest` does not know it. */
static char *write_real(const Tens *tens, char *out, double value) {
  if (value != value) return (char *)memcpy(out, "nan", 3) + 3;
  if (signbit(value)) *out++ = '-';
  value = fabs(value);
  if (value == 0) return (char *)memcpy(out, "0.0", 3) + 3;
  if (value > DBL_MAX) return (char *)memcpy(out, "inf", 3) + 3;
  int power = 0;
  uint64_t digits = shortest(tens, value, &power);
  if (!digits) return NULL;
  while (digits % 10 == 0) digits /= 10, power++;
  char text[20];
  const int n = (int)(write_whole(text, digits) - text), point = n + power; /* 0.DIGITS times ten to this */
  if (point > 16 || point <= -4) {
    *out++ = text[0];
    if (n > 1) {
      *out++ = '.';
      memcpy(out, text + 1, (size_t)n - 1);
      out += n - 1;
    }
    const int e = point - 1;
    *out++ = 'e';
    *out++ = e < 0 ? '-' : '+';
    if (e < 10 && e > -10) *out++ = '0';
    return write_whole(out, (uint64_t)(e < 0 ? -e : e));
  }
  if (point <= 0) {
    memcpy(out, "0.000", 5);
    out += 2 - point;
    memcpy(out, text, (size_t)n);
    return out + n;
  }
  for (int i = 0; i < point; i++) *out++ = i < n ? text[i] : '0';
  *out++ = '.';
  if (point >= n) *out++ = '0';
  else memcpy(out, text + point, (size_t)(n - point)), out += n - point;
  return out;
}

/* Lines of numbers with commas between them. `kinds`: whether each is absent (no text), real, or a whole number.
 * Returns how many bytes that was, of LONGEST_NUMBER + 1 each at most; -1 where one of them cannot be written here. */
EXPORT int64_t driftline_number_lines(const double *values, const uint8_t *kinds, int64_t lines, int64_t columns,
                                      char *out) {
  Tens tens;
  make_tens(&tens);
  char *at = out;
  for (int64_t i = 0; i < lines * columns; i++) {
    const double value = values[i];
    if (kinds[i] == REAL) at = write_real(&tens, at, value);
    else if (kinds[i] == WHOLE) {
      if (!(fabs(value) < 0x1p53)) return -1;
      if (value < 0) *at++ = '-';
      at = write_whole(at, (uint64_t)fabs(value));
    }
    if (!at) return -1;
    *at++ = (i + 1) % columns ? ',' : '\n';
  }
  return at - out;
}
