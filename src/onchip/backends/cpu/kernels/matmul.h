// C [rows][columns] (+)= A [rows][depth] * B [depth][columns], columns a multiple of VL.
//
// An element of A is broadcast from where it lies, whatever its strides; B and C have contiguous rows. Elements are
// floats, or pairs of bfloat16 that a product sums two at a time (32 bits each, the first of the pair below). B may be
// stored as rows of bfloat16 or fp16 (T): they are widened, or paired, as they are read.
#pragma once

#include "vec.h"

struct Floats {
  static constexpr int DEPTH = 1, BYTES = 4;  // numbers of the depth in one element; bytes of a number
  INLINE Vec add_product(Vec a, Vec b, Vec c) { return fma(a, b, c); }
  template <int T>
  static constexpr int step = 1;  // rows of B as stored in one of products
  template <int T>
  INLINE Vec load_right(const char* b, int64_t) { return load_as<T>(b); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int DEPTH = 2, BYTES = 2;
  INLINE Vec add_product(Vec a, Vec b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
  template <int T>
  static constexpr int step = T == FLOAT ? 1 : 2;
  template <int T>  // FLOAT: pairs as they lie; else two rows of bfloat16, to be paired
  INLINE Vec load_right(const char* b, int64_t row) {
    if (T == FLOAT) return load((const float*)b);
    return (Vec)(halves((const uint16_t*)b) | halves((const uint16_t*)(b + row)) << 16);
  }
  INLINE Vec pair_up(Vec a, Vec b) {  // (a, b), rounded
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);  // 16 of a, then 16 of b
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Vec)_mm512_permutexvar_epi16(order, both);
  }
};
#else
using Pairs = Floats;  // bfloat16 is widened
#endif

template <int T>
using Products = std::conditional_t<T == BF16, Pairs, Floats>;  // of tensors of this dtype

struct Matrix {  // A or B, strides in bytes
  const char* data;
  int64_t row, column = 4;
};
INLINE Matrix matrix(const void* data, int64_t ld) { return {(const char*)data, ld * 4}; }

struct Nothing {
  void operator()(int) const {}
};

template <class E, int T, int M, int N, bool ADD, class Beside>
INLINE void micro(Matrix a, Matrix b, float* c, int64_t ldc, int depth, const Beside& beside) {
  Vec sums[M][N];
#pragma GCC unroll 24
  for (int i = 0; i < M * N; i++) sums[i / N][i % N] = ADD ? load(c + i / N * ldc + i % N * VL) : all(0.0f);
  for (int k = 0; k < depth; k++) {
    Vec row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      beside(j);
      row[j] = E::template load_right<T>(b.data + k * E::template step<T> * b.row + j * VL * SIZE<T>, b.row);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const Vec element = all(load_any<float>(a.data + i * a.row + k * a.column));
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sums[i][j] = E::add_product(element, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < M * N; i++) store(c + i / N * ldc + i % N * VL, sums[i / N][i % N]);
}

template <class E, int T, int M, int N, bool ADD, class Beside>
static void multiply_rows(Matrix a, Matrix b, float* c, int64_t ldc, int64_t rows, int depth, const Beside& beside) {
  for (; rows >= M; rows -= M, a.data += M * a.row, c += M * ldc) micro<E, T, M, N, ADD>(a, b, c, ldc, depth, beside);
  if constexpr (M > 1) multiply_rows<E, T, M == MICRO_ROWS ? 4 : M / 2, N, ADD>(a, b, c, ldc, rows, depth, beside);
}

// `beside` is called before every vector of B is read.
template <class E, bool ADD, int T = FLOAT, int N = GROUP, class Beside = Nothing>
static void multiply(Matrix a, Matrix b, float* c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth,
                     const Beside& beside = {}) {
  for (; columns >= N * VL; columns -= N * VL, b.data += N * VL * SIZE<T>, c += N * VL)
    multiply_rows<E, T, MICRO_ROWS, N, ADD>(a, b, c, ldc, rows, (int)depth, beside);
  if constexpr (N > 1) multiply<E, ADD, T, N / 2>(a, b, c, ldc, rows, columns, depth, beside);
}
