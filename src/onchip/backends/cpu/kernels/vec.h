// One vector of floats, and the few operations that the kernels need of it: of each instruction set what differs, then
// what the compiler's vectors (GCC and clang) say for all.
//
// VL floats fit a vector. Lanes hold -1 or 0; bit j*VL + i of a 64-bit word stands for lane i of vector j.
#pragma once

#include <stdint.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include <immintrin.h>

constexpr int VL = 16, GROUP = 4, MICRO_ROWS = 6;  // GROUP vectors and MICRO_ROWS rows of accumulators fill 32 registers
using Vec = __m512;
typedef int32_t Ints __attribute__((vector_size(64)));

INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec max_or_second(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where one of them is NaN
INLINE uint64_t to_bits(Ints x) { return _mm512_movepi32_mask((__m512i)x); }
INLINE Ints halves(const void* p) { return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
INLINE Vec from_fp16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void to_fp16(uint16_t* p, Vec x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
// t - floor(t), and p * 2^floor(t); scalef turns what is too small, -inf included, into 0.
INLINE Vec fraction(Vec t) { return _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE Vec times_power(Vec p, Vec t) { return _mm512_scalef_ps(p, t); }
// Of each 64 bits the lower 32, multiplied to 64.
INLINE Ints multiply_lower(Ints a, Ints b) { return (Ints)_mm512_mul_epu32((__m512i)a, (__m512i)b); }

#elif defined(__AVX2__)
#include <immintrin.h>

constexpr int VL = 8, GROUP = 2, MICRO_ROWS = 6;
using Vec = __m256;
typedef int32_t Ints __attribute__((vector_size(32)));

INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec max_or_second(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE uint64_t to_bits(Ints x) { return (uint64_t)_mm256_movemask_ps((Vec)x); }
INLINE Ints halves(const void* p) { return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE Vec from_fp16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE void to_fp16(uint16_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
INLINE Vec floor(Vec x) { return _mm256_floor_ps(x); }
INLINE Ints multiply_lower(Ints a, Ints b) { return (Ints)_mm256_mul_epu32((__m256i)a, (__m256i)b); }

#elif defined(__aarch64__)
#include <arm_neon.h>

constexpr int VL = 4, GROUP = 4, MICRO_ROWS = 6;
using Vec = float32x4_t;
using Ints = int32x4_t;

INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
INLINE Vec max_or_second(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE uint64_t to_bits(Ints x) { return vaddvq_u32(vandq_u32(vreinterpretq_u32_s32(x), uint32x4_t{1, 2, 4, 8})); }
INLINE Ints halves(const void* p) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16((const uint16_t*)p))); }
INLINE Vec from_fp16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void to_fp16(uint16_t* p, Vec x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
INLINE Vec floor(Vec x) { return vrndmq_f32(x); }
INLINE Ints multiply_lower(Ints a, Ints b) { return (Ints)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b)); }

#else
#error "no vectors for this processor: the tiled loop of torch serves it"
#endif

constexpr int ROWS = 64;  // rows of Q in a tile, one a lane
static_assert(ROWS % (VL * GROUP) == 0, "lane groups fill a tile");

using Lanes = Ints;
typedef uint32_t Words __attribute__((vector_size(4 * VL)));
typedef uint16_t Halves __attribute__((vector_size(2 * VL)));

template <class N>
INLINE N least(N a, N b) { return a < b ? a : b; }
template <class N>
INLINE N most(N a, N b) { return a > b ? a : b; }
INLINE int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
INLINE int64_t round_up(int64_t n, int64_t to) { return parts(n, to) * to; }

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

constexpr std::make_integer_sequence<int, VL> EACH{};
template <int... I>
INLINE Ints powers(std::integer_sequence<int, I...>) { return Ints{(1 << I)...}; }
INLINE Lanes lanes(uint64_t bits, int j) { return (Lanes)((all((int32_t)(bits >> (VL * j))) & powers(EACH)) != 0); }
INLINE Vec select(Lanes take, Vec a, Vec b) { return (Vec)((take & (Ints)a) | (~take & (Ints)b)); }
INLINE Lanes above(Vec a, Vec b) { return (Lanes)(a > b); }
INLINE bool differ(Vec a, Vec b) { return to_bits((Lanes)(a == b)) != (1u << VL) - 1; }
INLINE Vec absolute(Vec x) { return (Vec)((Ints)x & all(INT32_MAX)); }

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
        r[i] = evens<D>(a, b, EACH);
        r[i + D] = odds<D>(a, b, EACH);
      }
    transpose<D / 2>(r);
  }
}

template <int D = VL / 2>
INLINE Vec sums_of(Vec* r) {  // lane i: the sum of r[i]
  if constexpr (D > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < D; i++) r[i] = evens<D>(r[i], r[i + D], EACH) + odds<D>(r[i], r[i + D], EACH);
    return sums_of<D / 2>(r);
  }
  return r[0];
}

// Both halves of a product of 32 by 32 bits, lane by lane.
INLINE void multiply(Ints a, uint32_t b, Ints& high, Ints& low) {
  const Vec even = (Vec)multiply_lower(a, all((int32_t)b));
  const Vec odd = (Vec)multiply_lower((Ints)odds<1>((Vec)a, (Vec)a, EACH), all((int32_t)b));
  low = (Ints)evens<1>(even, odd, EACH);
  high = (Ints)odds<1>(even, odd, EACH);
}

template <class... Floats>
INLINE Vec polynomial(Vec x, float highest, Floats... others) {  // coefficients of falling powers
  Vec p = all(highest);
  ((p = fma(p, x, all(others))), ...);
  return p;
}

// 2^t for t <= 0, by 2^floor(t) and a polynomial in the fraction: minimax in relative error with p(0) = 1, so that the
// weight of a row's maximum is exactly 1. Degree 5 is off by 8e-8, degree 4 by 3e-6 (for products in bfloat16).
template <bool COARSE>
INLINE Vec exp2(Vec t) {
  const Vec f = fraction(t);
  const Vec p =
      COARSE ? polynomial(f, 0.013426701538f, 0.052242446691f, 0.24128021300f, 0.69304484129f, 1.0f)
             : polynomial(f, 0.0018671316793f, 0.0090170269832f, 0.055799916387f, 0.24016444385f, 0.69315129519f, 1.0f);
  return times_power(p, t);
}

// x + x^3 * r(x^2) near 0, where the exponential form cancels; 1 - 2 / (e^2x + 1) beyond.
INLINE Vec tanh(Vec x) {
  const Vec size = absolute(x), square = x * x;
  const Vec r = polynomial(square, -0.0055910106748f, 0.020538816228f, -0.053709656f, 0.13331092894f, -0.33333268762f);
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
  return T == BF16 ? (Vec)(halves(p) << 16) : from_fp16((const uint16_t*)p);
}
template <int T>
INLINE void store_as(char* p, Vec x) {
  if (T == FLOAT) store((float*)p, x);
  else if (T == BF16) to_bf16((uint16_t*)p, x);
  else to_fp16((uint16_t*)p, x);
}
// The first n numbers, at most VL, zeros after them; or of OF numbers each.
template <int T, int OF = 1>
INLINE Vec load_some(const char* p, int64_t n) {
  if (n >= VL * OF) return load_as<T>(p);
  alignas(64) char buffer[4 * VL] = {};
  std::memcpy(buffer, p, (size_t)(n * SIZE<T> / OF));
  return load_as<T>(buffer);
}
template <int T>
INLINE void store_some(char* p, Vec x, int64_t n) {
  if (n >= VL) return store_as<T>(p, x);
  alignas(64) char buffer[4 * VL];
  store_as<T>(buffer, x);
  std::memcpy(p, buffer, (size_t)n * SIZE<T>);
}

// The transpose of what `read` gives, VL numbers of a row from a column on; `write` takes as many of a column.
template <class Read, class Write>
INLINE void transposed(int64_t rows, int64_t columns, const Read& read, const Write& write) {
  for (int64_t j = 0; j < rows; j += VL)
    for (int64_t d = 0; d < columns; d += VL) {
      Vec square[VL];
      for (int i = 0; i < VL; i++) square[i] = read((int)j + i, d);
      transpose(square);
      for (int64_t i = 0; i < least<int64_t>(VL, columns - d); i++) write(d + i, j, square[i]);
    }
}
template <class Read>
INLINE void to_columns(int lanes, int64_t columns, float* to, int64_t ld, const Read& read) {  // to [columns][lanes]
  transposed(lanes, columns, read, [&](int64_t column, int64_t lane, Vec x) { store(to + column * ld + lane, x); });
}
