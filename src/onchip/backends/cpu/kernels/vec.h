// One vector of floats, and the few operations that the kernels need of it: of each instruction set what differs, then
// what the compiler's vectors (GCC and clang) say for all.
//
// VL floats fit a vector. Lanes hold -1 or 0; bit j*VL + i of a 64-bit word stands for lane i of vector j.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#define INLINE static inline __attribute__((always_inline))

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)

constexpr int VL = 16, GROUP = 4, MICRO_ROWS = 6;  // GROUP vectors and MICRO_ROWS rows of accumulators fill 32 registers
using Vec = __m512;
typedef int32_t Ints __attribute__((vector_size(64)));

INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec max_or_second(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where one of them is NaN
INLINE uint64_t to_bits(Ints x) { return _mm512_movepi32_mask((__m512i)x); }
INLINE Vec from_fp16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void to_fp16(uint16_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
// t - floor(t), and p * 2^floor(t); scalef turns what is too small, -inf included, into 0.
INLINE Vec fraction(Vec t) { return _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE Vec times_power(Vec p, Vec t) { return _mm512_scalef_ps(p, t); }
// Both halves of a 32 x 32 bit product, lane by lane.
INLINE void multiply(Ints a, Ints b, Ints& high, Ints& low) {
  const __m512i x = (__m512i)a, y = (__m512i)b, even = _mm512_mul_epu32(x, y);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(y, 32));
  low = (Ints)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = (Ints)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

#elif defined(__AVX2__)

constexpr int VL = 8, GROUP = 2, MICRO_ROWS = 6;
using Vec = __m256;
typedef int32_t Ints __attribute__((vector_size(32)));

INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec max_or_second(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE uint64_t to_bits(Ints x) { return (uint64_t)_mm256_movemask_ps((Vec)x); }
INLINE Vec from_fp16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void to_fp16(uint16_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
INLINE Vec floor(Vec x) { return _mm256_floor_ps(x); }
INLINE void multiply(Ints a, Ints b, Ints& high, Ints& low) {
  const __m256i x = (__m256i)a, y = (__m256i)b, even = _mm256_mul_epu32(x, y);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
  low = (Ints)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = (Ints)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

#elif defined(__aarch64__)

constexpr int VL = 4, GROUP = 4, MICRO_ROWS = 6;
using Vec = float32x4_t;
using Ints = int32x4_t;

INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
INLINE Vec max_or_second(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE uint64_t to_bits(Ints x) {
  const uint32x4_t each = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vreinterpretq_u32_s32(x), each));
}
INLINE Vec from_fp16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void to_fp16(uint16_t* p, Vec x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE Vec floor(Vec x) { return vrndmq_f32(x); }
INLINE void multiply(Ints a, Ints b, Ints& high, Ints& low) {
  const uint32x4_t x = vreinterpretq_u32_s32(a), y = vreinterpretq_u32_s32(b);
  const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(y)));
  const uint32x4_t last = vreinterpretq_u32_u64(vmull_high_u32(x, y));
  low = vreinterpretq_s32_u32(vuzp1q_u32(first, last));
  high = vreinterpretq_s32_u32(vuzp2q_u32(first, last));
}

#else
#error "no vectors for this processor: the tiled loop of torch serves it"
#endif

constexpr int ROWS = 64;  // rows of Q in a tile, one a lane
static_assert(ROWS % (VL * GROUP) == 0, "lane groups fill a tile");

using Lanes = Ints;
typedef uint32_t Words __attribute__((vector_size(4 * VL)));
typedef uint16_t Halves __attribute__((vector_size(2 * VL)));

template <class V, class N>
INLINE V load_any(const N* p) {
  V x;
  std::memcpy(&x, p, sizeof(V));
  return x;
}
INLINE Vec load(const float* p) { return load_any<Vec>(p); }
INLINE Ints load(const int32_t* p) { return load_any<Ints>(p); }
INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
INLINE Vec all(float x) { return x - Vec{}; }
INLINE Ints all(int32_t x) { return x - Ints{}; }

template <int... I>
INLINE Ints powers(std::integer_sequence<int, I...>) { return Ints{(1 << I)...}; }
INLINE Lanes lanes(uint64_t bits, int j) {
  const Ints each = powers(std::make_integer_sequence<int, VL>{});
  return (Lanes)((all((int32_t)(bits >> (VL * j))) & each) != 0);
}
INLINE Vec select(Lanes take, Vec a, Vec b) { return (Vec)((take & (Ints)a) | (~take & (Ints)b)); }
INLINE Lanes above(Vec a, Vec b) { return (Lanes)(a > b); }
INLINE bool differ(Vec a, Vec b) { return to_bits((Lanes)(a == b)) != (1u << VL) - 1; }
INLINE uint64_t at_least(Ints a, Ints b) { return to_bits((Lanes)(a >= b)); }
INLINE uint64_t at_least_unsigned(Ints a, Ints b) { return to_bits((Lanes)((Words)a >= (Words)b)); }
INLINE Vec absolute(Vec x) { return (Vec)((Ints)x & all(INT32_MAX)); }
INLINE float sum(Vec x) {
  float total = 0;
  for (int i = 0; i < VL; i++) total += x[i];
  return total;
}

INLINE Vec from_bf16(const uint16_t* p) { return (Vec)(__builtin_convertvector(load_any<Halves>(p), Words) << 16); }
INLINE void to_bf16(uint16_t* p, Vec x) {  // to the nearest, ties to even
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
  const Words u = (Words)x, rounded = u + 0x7fff + (u >> 16 & 1), kept = (Words)(x == x);
  const Halves words = __builtin_convertvector(((rounded & kept) | (0x7fc00000 & ~kept)) >> 16, Halves);
  std::memcpy(p, &words, sizeof words);
#endif
}

#if !defined(__AVX512F__)
INLINE Vec fraction(Vec t) { return t - floor(t); }
INLINE Vec times_power(Vec p, Vec t) {  // 0 below 2^-126; NaN where t is
  const Ints exponent = __builtin_convertvector(floor(max_or_second(all(-126.0f), t)), Ints) << 23;
  const Vec scaled = select((Lanes)(t == t), (Vec)((Ints)p + exponent), t);
  return select((Lanes)(t < all(-126.0f)), all(0.0f), scaled);
}
#endif

// Lanes 0 ... VL - 1 are those of a, the next VL those of b.
#if defined(__clang__)
#define PICK(a, b, ...) (Vec) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) (Vec) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
template <int D, int... I>  // blocks of D lanes: the even ones of a and of b in turn; the odd ones
INLINE Vec evens(Vec a, Vec b, std::integer_sequence<int, I...>) { return PICK(a, b, (I & D ? I - D + VL : I)...); }
template <int D, int... I>
INLINE Vec odds(Vec a, Vec b, std::integer_sequence<int, I...>) { return PICK(a, b, (I & D ? I + VL : I + D)...); }

template <int D = VL / 2>
INLINE void transpose(Vec* r) {  // VL x VL floats, rows to columns
  if constexpr (D > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++)
      if (!(i & D)) {
        const Vec a = r[i], b = r[i + D];
        r[i] = evens<D>(a, b, std::make_integer_sequence<int, VL>{});
        r[i + D] = odds<D>(a, b, std::make_integer_sequence<int, VL>{});
      }
    transpose<D / 2>(r);
  }
}

template <int D = VL / 2>
INLINE Vec sums_of(Vec* r) {  // lane i: the sum of r[i]
  if constexpr (D > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < D; i++)
      r[i] = evens<D>(r[i], r[i + D], std::make_integer_sequence<int, VL>{}) +
             odds<D>(r[i], r[i + D], std::make_integer_sequence<int, VL>{});
    return sums_of<D / 2>(r);
  }
  return r[0];
}

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
  const Vec size = absolute(x), square = x * x;
  Vec r = fma(all(-0.0055910106748f), square, all(0.020538816228f));
  r = fma(r, square, all(-0.053709656f));
  r = fma(r, square, all(0.13331092894f));
  r = fma(r, square, all(-0.33333268762f));
  const Vec near = fma(r * square, x, x);
  const Vec decay = exp2<false>(size * all(-2.8853900818f));  // e^-2|x|
  const Vec far = (all(1.0f) - decay) / (all(1.0f) + decay);
  return select(above(all(0.625f), size), near, select(above(all(0.0f), x), all(0.0f) - far, far));
}

enum Dtype { FLOAT = 0, BF16 = 1, FP16 = 2 };
template <int T>
constexpr int SIZE = T == FLOAT ? 4 : 2;

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
// The first n numbers, at most VL, zeros after them.
template <int T>
INLINE Vec load_some(const char* p, int64_t n) {
  if (n >= VL) return load_as<T>(p);
  alignas(64) char buffer[4 * VL] = {};
  std::memcpy(buffer, p, (size_t)n * SIZE<T>);
  return load_as<T>(buffer);
}
template <int T>
INLINE void store_some(char* p, Vec x, int64_t n) {
  if (n >= VL) return store_as<T>(p, x);
  alignas(64) char buffer[4 * VL];
  store_as<T>(buffer, x);
  std::memcpy(p, buffer, (size_t)n * SIZE<T>);
}
