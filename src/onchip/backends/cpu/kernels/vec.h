// One vector of floats per instruction set, and the few operations that the kernels need of it.
//
// VL floats fit a vector. A Lanes value chooses among them; bit j*VL + i of a 64-bit word stands for lane i of vector j.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

#if defined(__AVX512F__)

constexpr int VL = 16, GROUP = 4, MICRO_ROWS = 6;  // GROUP vectors and MICRO_ROWS rows of accumulators fill 32 registers
using Vec = __m512;
using Ints = __m512i;
using Lanes = __mmask16;

INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
INLINE Vec all(float x) { return _mm512_set1_ps(x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec max_or_second(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where one of them is NaN
INLINE Lanes lanes(uint64_t bits, int j) { return (Lanes)(bits >> (16 * j)); }
INLINE Vec select(Lanes take, Vec a, Vec b) { return _mm512_mask_blend_ps(take, b, a); }
INLINE Lanes above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE bool differ(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }
INLINE Vec absolute(Vec x) { return _mm512_abs_ps(x); }
INLINE float sum(Vec x) { return _mm512_reduce_add_ps(x); }

INLINE Ints load(const int32_t* p) { return _mm512_loadu_si512(p); }
INLINE Ints all(int32_t x) { return _mm512_set1_epi32(x); }
INLINE uint64_t at_least(Ints a, Ints b) { return _mm512_cmp_epi32_mask(a, b, _MM_CMPINT_NLT); }
INLINE uint64_t at_least_unsigned(Ints a, Ints b) { return _mm512_cmp_epu32_mask(a, b, _MM_CMPINT_NLT); }
INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Ints exclusive_or(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
INLINE Vec as_floats(Ints x) { return _mm512_cvtepi32_ps(x); }

// Both halves of a 32 x 32 bit product, lane by lane.
INLINE void multiply(Ints a, Ints b, Ints& high, Ints& low) {
  Ints even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

INLINE Vec from_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE Vec from_fp16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void to_fp16(uint16_t* p, Vec x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void to_bf16(uint16_t* p, Vec x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
  Ints u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), all(1));
  Ints rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, all(0x7fff)));
  rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, all(0x7fc00000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

INLINE Vec floor(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// t - floor(t), and p * 2^floor(t); scalef turns what is too small, -inf included, into 0.
INLINE Vec fraction(Vec t) { return _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE Vec times_power(Vec p, Vec t) { return _mm512_scalef_ps(p, t); }

// VL x VL floats, rows to columns.
INLINE void transpose(Vec* r) {
  Vec t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d a = (__m512d)t[4 * i], b = (__m512d)t[4 * i + 1], c = (__m512d)t[4 * i + 2], d = (__m512d)t[4 * i + 3];
    r[4 * i] = (Vec)_mm512_unpacklo_pd(a, c);
    r[4 * i + 1] = (Vec)_mm512_unpackhi_pd(a, c);
    r[4 * i + 2] = (Vec)_mm512_unpacklo_pd(b, d);
    r[4 * i + 3] = (Vec)_mm512_unpackhi_pd(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // quarters of 128 bits: a 4 x 4 transpose of them
    Vec a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x44), b = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xEE);
    Vec c = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x44), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xEE);
    t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(a, c, 0xDD);
    t[i + 8] = _mm512_shuffle_f32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = t[i];
}

#elif defined(__AVX2__)

constexpr int VL = 8, GROUP = 2, MICRO_ROWS = 6;
using Vec = __m256;
using Ints = __m256i;
using Lanes = __m256;

INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
INLINE Vec all(float x) { return _mm256_set1_ps(x); }
INLINE Ints all(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec max_or_second(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Lanes lanes(uint64_t bits, int j) {
  const Ints each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return (Vec)_mm256_cmpeq_epi32(_mm256_and_si256(all((int32_t)(bits >> (8 * j) & 255)), each), each);
}
INLINE Vec select(Lanes take, Vec a, Vec b) { return _mm256_blendv_ps(b, a, take); }
INLINE Lanes above(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE bool differ(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0; }
INLINE Vec absolute(Vec x) { return _mm256_andnot_ps(all(-0.0f), x); }
INLINE float sum(Vec x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE Ints load(const int32_t* p) { return _mm256_loadu_si256((const Ints*)p); }
INLINE uint64_t at_least(Ints a, Ints b) { return 255 & ~_mm256_movemask_ps((Vec)_mm256_cmpgt_epi32(b, a)); }
INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Ints exclusive_or(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
INLINE uint64_t at_least_unsigned(Ints a, Ints b) {
  Ints flip = all(INT32_MIN);
  return at_least(exclusive_or(a, flip), exclusive_or(b, flip));
}
INLINE Vec as_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
INLINE void multiply(Ints a, Ints b, Ints& high, Ints& low) {
  Ints even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

INLINE Vec from_bf16(const uint16_t* p) {
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
INLINE Vec from_fp16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void to_fp16(uint16_t* p, Vec x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void to_bf16(uint16_t* p, Vec x) {
  Ints u = (Ints)x, odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), all(1));
  Ints rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, all(0x7fff)));
  rounded = (Ints)_mm256_blendv_ps((Vec)rounded, (Vec)all(0x7fc00000), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  Ints words = _mm256_srli_epi32(rounded, 16);
  words = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(words));
}

INLINE Vec floor(Vec x) { return _mm256_floor_ps(x); }
INLINE Vec fraction(Vec t) { return t - floor(t); }
INLINE Vec times_power(Vec p, Vec t) {  // 0 below 2^-126; NaN where t is
  Vec n = floor(max_or_second(all(-126.0f), t));
  Vec scaled = (Vec)_mm256_add_epi32((Ints)p, _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
  scaled = _mm256_blendv_ps(scaled, t, _mm256_cmp_ps(t, t, _CMP_UNORD_Q));
  return _mm256_andnot_ps(_mm256_cmp_ps(t, all(-126.0f), _CMP_LT_OQ), scaled);
}

INLINE void transpose(Vec* r) {
  Vec t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    __m256d a = (__m256d)t[4 * i], b = (__m256d)t[4 * i + 1], c = (__m256d)t[4 * i + 2], d = (__m256d)t[4 * i + 3];
    r[4 * i] = (Vec)_mm256_unpacklo_pd(a, c);
    r[4 * i + 1] = (Vec)_mm256_unpackhi_pd(a, c);
    r[4 * i + 2] = (Vec)_mm256_unpacklo_pd(b, d);
    r[4 * i + 3] = (Vec)_mm256_unpackhi_pd(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    Vec low = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    t[i] = low;
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = t[i];
}

#elif defined(__aarch64__)

constexpr int VL = 4, GROUP = 4, MICRO_ROWS = 6;
using Vec = float32x4_t;
using Ints = int32x4_t;
using Lanes = uint32x4_t;

INLINE Vec load(const float* p) { return vld1q_f32(p); }
INLINE void store(float* p, Vec x) { vst1q_f32(p, x); }
INLINE Vec all(float x) { return vdupq_n_f32(x); }
INLINE Ints all(int32_t x) { return vdupq_n_s32(x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
INLINE Lanes lanes(uint64_t bits, int j) {
  const uint32x4_t each = {1, 2, 4, 8};
  return vceqq_u32(vandq_u32(vdupq_n_u32((uint32_t)(bits >> (4 * j) & 15)), each), each);
}
INLINE Vec select(Lanes take, Vec a, Vec b) { return vbslq_f32(take, a, b); }
INLINE Lanes above(Vec a, Vec b) { return vcgtq_f32(a, b); }
INLINE Vec max_or_second(Vec a, Vec b) { return select(above(a, b), a, b); }
INLINE bool differ(Vec a, Vec b) { return vminvq_u32(vceqq_f32(a, b)) == 0; }
INLINE Vec absolute(Vec x) { return vabsq_f32(x); }
INLINE float sum(Vec x) { return vaddvq_f32(x); }

INLINE Ints load(const int32_t* p) { return vld1q_s32(p); }
INLINE uint64_t to_bits(uint32x4_t x) {
  const uint32x4_t each = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(x, each));
}
INLINE uint64_t at_least(Ints a, Ints b) { return to_bits(vcgeq_s32(a, b)); }
INLINE uint64_t at_least_unsigned(Ints a, Ints b) {
  return to_bits(vcgeq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
}
INLINE Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
INLINE Ints exclusive_or(Ints a, Ints b) { return veorq_s32(a, b); }
INLINE Vec as_floats(Ints x) { return vcvtq_f32_s32(x); }
INLINE void multiply(Ints a, Ints b, Ints& high, Ints& low) {
  uint32x4_t x = vreinterpretq_u32_s32(a), y = vreinterpretq_u32_s32(b);
  uint64x2_t first = vmull_u32(vget_low_u32(x), vget_low_u32(y)), last = vmull_high_u32(x, y);
  low = vreinterpretq_s32_u32(vuzp1q_u32(vreinterpretq_u32_u64(first), vreinterpretq_u32_u64(last)));
  high = vreinterpretq_s32_u32(vuzp2q_u32(vreinterpretq_u32_u64(first), vreinterpretq_u32_u64(last)));
}

INLINE Vec from_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
INLINE Vec from_fp16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void to_fp16(uint16_t* p, Vec x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE void to_bf16(uint16_t* p, Vec x) {
  uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  rounded = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
  vst1_u16(p, vshrn_n_u32(rounded, 16));
}

INLINE Vec floor(Vec x) { return vrndmq_f32(x); }
INLINE Vec fraction(Vec t) { return vsubq_f32(t, floor(t)); }
INLINE Vec times_power(Vec p, Vec t) {
  Vec n = floor(max_or_second(all(-126.0f), t));
  Ints exponent = vshlq_n_s32(vcvtq_s32_f32(n), 23);
  Vec scaled = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), exponent));
  scaled = select(vceqq_f32(t, t), scaled, t);
  return select(vcltq_f32(t, all(-126.0f)), all(0.0f), scaled);
}

INLINE void transpose(Vec* r) {
  float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
  r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

#else
#error "no vectors for this processor: the tiled loop of torch serves it"
#endif

constexpr int ROWS = 64;  // rows of Q in a tile, one a lane
static_assert(ROWS % (VL * GROUP) == 0, "lane groups fill a tile");

// 2^t for t <= 0, by 2^floor(t) and a polynomial in the fraction: minimax in relative error with p(0) = 1, so that the
// weight of a row's maximum is exactly 1. Degree 5 is off by 8e-8, degree 4 by 3e-6 (for products in bfloat16).
template <bool COARSE>
INLINE Vec exp2(Vec t) {
  Vec f = fraction(t), p;
  if (COARSE) {
    p = fma(all(0.013426701538f), f, all(0.052242446691f));
    p = fma(p, f, all(0.24128021300f));
    p = fma(p, f, all(0.69304484129f));
  } else {
    p = fma(all(0.0018671316793f), f, all(0.0090170269832f));
    p = fma(p, f, all(0.055799916387f));
    p = fma(p, f, all(0.24016444385f));
    p = fma(p, f, all(0.69315129519f));
  }
  return times_power(fma(p, f, all(1.0f)), t);
}

// x + x^3 * r(x^2) near 0, where the exponential form cancels; 1 - 2 / (e^2x + 1) beyond.
INLINE Vec tanh(Vec x) {
  Vec size = absolute(x), square = x * x;
  Vec r = fma(all(-0.0055910106748f), square, all(0.020538816228f));
  r = fma(r, square, all(-0.053709656f));
  r = fma(r, square, all(0.13331092894f));
  r = fma(r, square, all(-0.33333268762f));
  Vec near = fma(r * square, x, x);
  Vec decay = exp2<false>(size * all(-2.8853900818f));  // e^-2|x|
  Vec far = (all(1.0f) - decay) / (all(1.0f) + decay);
  far = select(above(all(0.0f), x), all(0.0f) - far, far);
  return select(above(all(0.625f), size), near, far);
}

INLINE float from_bf16(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

enum Dtype { FLOAT = 0, BF16 = 1, FP16 = 2 };

template <int T>
INLINE Vec load_as(const char* p) {  // VL numbers of a tensor
  if (T == FLOAT) return load((const float*)p);
  return T == BF16 ? from_bf16((const uint16_t*)p) : from_fp16((const uint16_t*)p);
}
template <int T>
INLINE void store_as(char* p, Vec x) {
  if (T == FLOAT) store((float*)p, x);
  else if (T == BF16) to_bf16((uint16_t*)p, x);
  else to_fp16((uint16_t*)p, x);
}
INLINE Vec load_bytes(const char* p, int64_t n) {  // zeros past them
  alignas(64) char buffer[4 * VL] = {};
  std::memcpy(buffer, p, (size_t)n);
  return load((const float*)buffer);
}
INLINE Ints as_ints(Vec x) { return (Ints)x; }
INLINE Vec as_vec(Ints x) { return (Vec)x; }
template <int T>
constexpr int SIZE = T == FLOAT ? 4 : 2;

// The first n < VL numbers, zeros after them.
template <int T>
INLINE Vec load_some(const char* p, int n) {
  alignas(64) char buffer[4 * VL] = {};
  std::memcpy(buffer, p, (size_t)n * SIZE<T>);
  return load_as<T>(buffer);
}
template <int T>
INLINE void store_some(char* p, Vec x, int n) {
  alignas(64) char buffer[4 * VL];
  store_as<T>(buffer, x);
  std::memcpy(p, buffer, (size_t)n * SIZE<T>);
}
