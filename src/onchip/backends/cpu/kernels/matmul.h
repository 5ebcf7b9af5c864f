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
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int DEPTH = 2, BYTES = 2;
  INLINE Vec add_product(Vec a, Vec b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
  INLINE Vec pair_up(Vec a, Vec b) {  // (a, b), rounded
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);  // 16 of a, then 16 of b
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (Vec)_mm512_permutexvar_epi16((__m512i)(lane | (lane + VL) << 16), both);
  }
};
#else
using Pairs = Floats;  // bfloat16 is widened
#endif

template <int T>
using Products = std::conditional_t<T == BF16, Pairs, Floats>;  // of tensors of this dtype

// Asks for a line of memory, to be brought into the L2: in the L1, many would drive out what is being read. (Rows of 512
// bytes, 4 KiB apart, two cores of a Zen 4: 45 GB/s so, 25 into the L1, 27 unasked, 51 of one contiguous stretch.)
INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }

struct Matrix {  // A or B, strides in bytes; `ahead`: as far from an element of B as what is read soon after it
  const char* data;
  int64_t row, column = 4, ahead = 0;
};
INLINE Matrix matrix(const void* data, int64_t ld) { return {(const char*)data, ld * 4}; }

template <class E, int T, int M, int N, bool ADD, bool FETCH>
INLINE void micro(Matrix a, Matrix b, float* c, int64_t ldc, int depth) {
  constexpr int STEP = T == FLOAT ? 1 : E::DEPTH;  // rows of B as stored in one of products: two are paired
  Vec sums[M][N];
#pragma GCC unroll 24
  for (int i = 0; i < M * N; i++) sums[i / N][i % N] = ADD ? load(c + i / N * ldc + i % N * VL) : all(0.0f);
  for (int k = 0; k < depth; k++) {
    Vec row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      const char* from = b.data + k * STEP * b.row + j * VL * SIZE<T>;
      for (int i = 0; i < STEP; i++)
        if (FETCH && j * VL * SIZE<T> % 64 == 0) fetch(from + i * b.row + b.ahead);
      row[j] = STEP == 1 ? load_as<T>(from) : (Vec)(halves(from) | halves(from + b.row) << 16);
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

template <class E, int T, int M, int N, bool ADD, bool FETCH>
static void multiply_rows(Matrix a, Matrix b, float* c, int64_t ldc, int64_t rows, int depth) {
  for (; rows >= M; rows -= M, a.data += M * a.row, c += M * ldc) micro<E, T, M, N, ADD, FETCH>(a, b, c, ldc, depth);
  if constexpr (M > 1) multiply_rows<E, T, M == MICRO_ROWS ? 4 : M / 2, N, ADD, FETCH>(a, b, c, ldc, rows, depth);
}

template <class E, bool ADD, int T = FLOAT, bool FETCH = false, int N = GROUP>
static void multiply(Matrix a, Matrix b, float* c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth) {
  for (; columns >= N * VL; columns -= N * VL, b.data += N * VL * SIZE<T>, c += N * VL)
    multiply_rows<E, T, MICRO_ROWS, N, ADD, FETCH>(a, b, c, ldc, rows, (int)depth);
  if constexpr (N > 1) multiply<E, ADD, T, FETCH, N / 2>(a, b, c, ldc, rows, columns, depth);
}
