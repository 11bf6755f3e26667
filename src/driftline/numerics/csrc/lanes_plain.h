/* Float32 lanes without an instruction set of their own: the compiler's vectors, four wide (SSE2, NEON). */

#undef VF
#undef VI
#undef OP
#undef AS_FLOAT
#undef AS_BITS
#undef AND_BITS
#undef ABS
#undef SPLIT
#undef MASK
#undef TALLY
#undef NO_TALLY
#undef HIT
#undef NO_HIT
#undef HALF_ORDINALS
#undef WORD_ENDS
#undef DOTS

typedef float PlainFloats __attribute__((vector_size(16)));
typedef int32_t PlainInts __attribute__((vector_size(16)));
typedef uint32_t PlainWords __attribute__((vector_size(16)));

#define VF PlainFloats
#define VI PlainInts
#define OP(name) plain_##name
#define AS_FLOAT(v) ((VF)(v))
#define AS_BITS(v) ((VI)(v))
#define AND_BITS(a, b) ((a) & (b))
#define ABS(v) ((VF)((VI)(v) & plain_set1_epi32(INT32_MAX)))
#define SPLIT VI /* lanes that hold no error */
#define MASK VI
#define TALLY VI
#define NO_TALLY plain_set1_epi32(0)
#define HIT VI
#define NO_HIT plain_set1_epi32(0)
#define HALF_ORDINALS 0
#define WORD_ENDS 0
#define DOTS 0

LANE_FN VF plain_set1_ps(float v) { return (VF){v, v, v, v}; }
LANE_FN VF plain_setzero_ps(void) { return (VF){0, 0, 0, 0}; }
LANE_FN VI plain_set1_epi32(int32_t v) { return (VI){v, v, v, v}; }
LANE_FN VF plain_add_ps(VF a, VF b) { return a + b; }
LANE_FN VF plain_mul_ps(VF a, VF b) { return a * b; }
LANE_FN VF plain_div_ps(VF a, VF b) { return a / b; }
LANE_FN VF plain_sub_ps(VF a, VF b) { return a - b; }
LANE_FN VF plain_fmadd_ps(VF a, VF b, VF c) { return a * b + c; } /* two roundings; the bounds allow for them */
/* Unsigned: an int32 sum that wraps is no accident here. */
LANE_FN VI plain_add_epi32(VI a, VI b) { return (VI)((PlainWords)a + (PlainWords)b); }
LANE_FN VI plain_sub_epi32(VI a, VI b) { return (VI)((PlainWords)a - (PlainWords)b); }
LANE_FN VI plain_slli_epi32(VI a, int by) { return (VI)((PlainWords)a << by); }
LANE_FN VI plain_srli_epi32(VI a, int by) { return (VI)((PlainWords)a >> by); }
LANE_FN void plain_storeu_ps(float *p, VF v) { memcpy(p, &v, sizeof v); }
LANE_FN VI plain_max_epi32(VI a, VI b) { VI m = (VI)(a > b); return (a & m) | (b & ~m); }
LANE_FN VI plain_max_epi16(VI a, VI b) { (void)b; return a; } /* never asked: see WORD_ENDS */
LANE_FN VI plain_max_epu16(VI a, VI b) { (void)b; return a; }
LANE_FN VI plain_add_epi16(VI a, VI b) { (void)b; return a; }
LANE_FN VI load_bits(const uint8_t *p) { VI v; memcpy(&v, p, sizeof v); return v; }

LANE_FN VF chosen(MASK mask, VF yes, VF no) { return (VF)(((VI)yes & mask) | ((VI)no & ~mask)); }
LANE_FN VI plain_max_epu32(VI a, VI b) { VI m = (VI)((PlainWords)a > (PlainWords)b); return (a & m) | (b & ~m); }
LANE_FN VI plain_min_epu32(VI a, VI b) { VI m = (VI)((PlainWords)a < (PlainWords)b); return (a & m) | (b & ~m); }

#if defined(__SSE2__)
LANE_FN VF plain_min_ps(VF a, VF b) { return (VF)_mm_min_ps((__m128)a, (__m128)b); }
LANE_FN VF plain_max_ps(VF a, VF b) { return (VF)_mm_max_ps((__m128)a, (__m128)b); }
LANE_FN vd widened(VF v, int half) {
  return (vd)_mm_cvtps_pd(half ? _mm_movehl_ps((__m128)v, (__m128)v) : (__m128)v);
}
LANE_FN VI load_halves(const uint8_t *p) {
  return (VI)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)p), _mm_setzero_si128());
}
#else
LANE_FN VF plain_min_ps(VF a, VF b) { return chosen((VI)(a < b), a, b); }
LANE_FN VF plain_max_ps(VF a, VF b) { return chosen((VI)(a > b), a, b); }
LANE_FN vd widened(VF v, int half) { return half ? (vd){v[2], v[3]} : (vd){v[0], v[1]}; }
LANE_FN VI load_halves(const uint8_t *p) {
  typedef uint16_t Halves __attribute__((vector_size(8)));
  Halves h;
  memcpy(&h, p, sizeof h);
  return (VI)__builtin_convertvector(h, PlainWords);
}
#endif

/* Four elements in their own order. */
LANE_FN VF load_lanes(const uint8_t *p, int kind) {
  if (kind == LANES_F32) return (VF)load_bits(p);
  VI halves = load_halves(p);
  if (kind == LANES_BF16) return (VF)plain_slli_epi32(halves, 16);
  /* As half_value() does it. */
  VI size = plain_slli_epi32(halves & plain_set1_epi32(0x7FFF), 13);
  VI sign = plain_slli_epi32(halves & plain_set1_epi32(0x8000), 16);
  VI past = (VI)(size >= plain_set1_epi32(0x0F800000)) & plain_set1_epi32(0x7F800000);
  return (VF)((VI)((VF)size * plain_set1_ps(0x1p112f)) | past | sign);
}

LANE_FN double sum_lanes(VF v) { return ((double)v[0] + v[2]) + ((double)v[1] + v[3]); }
LANE_FN float max_lane(VF v) {
  float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
LANE_FN float min_lane(VF v) {
  float a = v[0] < v[1] ? v[0] : v[1], b = v[2] < v[3] ? v[2] : v[3];
  return a < b ? a : b;
}
LANE_FN uint32_t least_lane(VI v) {
  PlainWords w = (PlainWords)v;
  uint32_t a = w[0] < w[1] ? w[0] : w[1], b = w[2] < w[3] ? w[2] : w[3];
  return a < b ? a : b;
}

LANE_FN SPLIT split(VF e) { return (VI)(e == plain_setzero_ps()); }
LANE_FN VF relative(SPLIT s, VF ae, VF ar) { return (VF)((VI)(ae / ar) & ~s); }
LANE_FN TALLY tally_errors(TALLY tally, SPLIT s) { return tally - ~s; }
LANE_FN unsigned equal_lanes(VF a, VF b) {
  VI m = (VI)(a == b);
  return (m[0] & 1u) | (m[1] & 2u) | (m[2] & 4u) | (m[3] & 8u);
}
LANE_FN TALLY tally_zeros(TALLY tally, VF v) { return tally - split(v); }
LANE_FN int64_t tallied(TALLY t) { return (int64_t)t[0] + t[1] + t[2] + t[3]; }
LANE_FN int64_t tallied_errors(TALLY t, int64_t n) { (void)n; return tallied(t); }
LANE_FN int64_t tallied_words(TALLY t, int64_t n) { (void)n; return tallied(t); }
LANE_FN uint32_t any_hit(HIT hit) {
  uint64_t halves[2];
  memcpy(halves, &hit, sizeof halves);
  return (halves[0] | halves[1]) != 0;
}
enum { NAME(MARK) = 1 };
LANE_FN HIT mark(HIT any, uint8_t *marks, int64_t i, VF rel, VF limit, VF ae, VF least) {
  HIT here = (VI)(rel > limit) & (VI)(ae > least);
  marks[i] = (uint8_t)any_hit(here);
  return any | here;
}
LANE_FN VI word_steps(VI r, VI c) { (void)c; return r; } /* never asked, as are the next four */
LANE_FN VI word_distance(VI r, VI c) { (void)c; return r; }
LANE_FN VF added_dots(VF sum, VI a, VI b) { (void)a, (void)b; return sum; }
LANE_FN unsigned greatest_code(VI v) { (void)v; return 0; }
LANE_FN TALLY tally_words(TALLY tally, VI a, VI b) { (void)a, (void)b; return tally; } /* never asked */
LANE_FN VI steps_past(SPLIT s, VF ae, VF allowed) { return plain_sub_epi32((VI)ae, (VI)allowed) | s; }
LANE_FN TALLY tally_past(TALLY tally, VI past) { return tally - (VI)(past >= plain_set1_epi32(0)); }
/* No unsigned minimum in SSE2: all there is to know is whether the margin was ever too small. */
LANE_FN VI nearer(VI margin, VI past) {
  return margin & ~(VI)((PlainWords)past <= (PlainWords)plain_set1_epi32(MARGIN_STEPS));
}
LANE_FN TALLY tally_negative(TALLY tally, VI a, VI b) {
  const VI zero = plain_set1_epi32(0);
  return tally - (VI)(a < zero) - (VI)(b < zero);
}
LANE_FN VI least_past(VI margin, VI a, VI b) {
  const PlainWords far = (PlainWords)plain_set1_epi32(-MARGIN_STEPS);
  return margin | (VI)((PlainWords)a >= far) | (VI)((PlainWords)b >= far);
}
LANE_FN uint32_t too_near(VI margin) { return any_hit(margin); }
LANE_FN int too_near_zero(VI margin) { return any_hit(~margin); }
LANE_FN int all_finite(VF v) { return !any_hit(~(VI)(v <= plain_set1_ps(FLT_MAX))); }
LANE_FN VI greatest_beyond(VI most, VI v, VF third, VF limit) { return plain_max_epi32(most, v & (VI)(third > limit)); }
LANE_FN uint32_t any_beyond(VF a, VF a_limit, VF b, VF b_limit) { return any_hit((VI)(a > a_limit) & (VI)(b > b_limit)); }
LANE_FN MASK ordinary(VF r, VF c, VF r_mask, VF c_mask) {
  const VF top = plain_set1_ps(FLT_MAX);
  return (VI)(ABS(r) <= top) & (VI)(ABS(c) <= top) & (VI)(r != r_mask) & (VI)(c != c_mask);
}
LANE_FN unsigned mask_word(MASK m) { return (m[0] & 1u) | (m[1] & 2u) | (m[2] & 4u) | (m[3] & 8u); }
LANE_FN VI opposite_signs(VF r, VF c, VI yes, VI no) {
  VI mask = (VI)(((VI)r ^ (VI)c) < plain_set1_epi32(0));
  return (yes & mask) | (no & ~mask);
}
LANE_FN VI half_words(VF a, VF b) { (void)b; return (VI)a; } /* never asked either */
LANE_FN VI steps_of_bits(VF r, VF c) {
  VI apart = plain_sub_epi32((VI)r, (VI)c);
  return plain_max_epi32(apart, plain_sub_epi32(plain_set1_epi32(0), apart));
}
LANE_FN uint32_t any_more(VI v, VI limit) { return any_hit((VI)((PlainWords)v > (PlainWords)limit)); }
LANE_FN VI half_ordinals(VI magnitudes) { return magnitudes; } /* never asked: see HALF_ORDINALS */

#define S(bits) {(bits & 1u) << 31, (bits >> 1 & 1u) << 31, (bits >> 2 & 1u) << 31, (bits >> 3 & 1u) << 31}
static const uint32_t SKETCH_TURNS[16][4] __attribute__((aligned(16))) = {
  S(0), S(1), S(2), S(3), S(4), S(5), S(6), S(7), S(8), S(9), S(10), S(11), S(12), S(13), S(14), S(15)};
#undef S

/* Four of a group's values, signs turned, moved to their buckets' lanes: neighbours change places, then halves. */
LANE_FN VF sketched(VF value, uint64_t signs, unsigned flip, unsigned v) {
  VI turned = (VI)value ^ load_bits((const uint8_t *)SKETCH_TURNS[signs >> (4 * v) & 15]);
  VI near = {turned[1], turned[0], turned[3], turned[2]}, by_one = plain_set1_epi32(-(int)(flip & 1));
  turned = (near & by_one) | (turned & ~by_one);
  VI far = {turned[2], turned[3], turned[0], turned[1]}, by_two = plain_set1_epi32(-(int)(flip >> 1 & 1));
  return (VF)((far & by_two) | (turned & ~by_two));
}
