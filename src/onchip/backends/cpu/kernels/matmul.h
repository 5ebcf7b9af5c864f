// C [rows][columns] (+)= A [rows][depth] * B [depth][columns], columns a multiple of VL.
//
// An element of A is broadcast from where it lies, whatever its strides; B and C have contiguous rows. Elements are
// floats, or pairs of bfloat16 that a product sums two at a time (32 bits each, the first of the pair below). Floats of
// B may be stored as bfloat16 or fp16 (T) and are widened as they are read.
#pragma once

#include "vec.h"

struct Floats {
  static constexpr int DEPTH = 1;  // numbers of the depth in one element
  static constexpr bool COARSE = false;
  static inline __attribute__((always_inline)) Vec multiply_add(const char* a, Vec b, Vec c) {
    float x;
    std::memcpy(&x, a, 4);
    return fma(all(x), b, c);
  }
};

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
struct Pairs {
  static constexpr int DEPTH = 2;
  static constexpr bool COARSE = true;
  static inline __attribute__((always_inline)) Vec multiply_add(const char* a, Vec b, Vec c) {
    int32_t x;
    std::memcpy(&x, a, 4);
    return _mm512_dpbf16_ps(c, (__m512bh)all(x), (__m512bh)b);
  }
};
#endif

struct Left {  // A, strides in bytes
  const char* data;
  int64_t row, column;
  Left rows_from(int64_t i) const { return {data + i * row, row, column}; }
  Left depth_from(int64_t i) const { return {data + i * column, row, column}; }
};

struct Right {  // B, row stride in bytes
  const char* data;
  int64_t row;
  Right columns_from(int64_t bytes) const { return {data + bytes, row}; }
  Right depth_from(int64_t i) const { return {data + i * row, row}; }
};
INLINE Right right(const float* b, int64_t ldb) { return {(const char*)b, ldb * 4}; }

template <int N>
struct Number {
  static constexpr int value = N;
};

template <class E, int T, int M, int N, bool ADD>
INLINE void micro(Left a, Right b, float* c, int64_t ldc, int depth) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[i][j] = ADD ? load(c + i * ldc + j * VL) : all(0.0f);
  for (int k = 0; k < depth; k++) {
    Vec row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) row[j] = load_as<T>(b.data + k * b.row + j * VL * SIZE<T>);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sums[i][j] = E::multiply_add(a.data + i * a.row + k * a.column, row[j], sums[i][j]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) store(c + i * ldc + j * VL, sums[i][j]);
}

template <class E, int T, int N, bool ADD>
static void multiply_columns(Left a, Right b, float* c, int64_t ldc, int rows, int depth) {
  int i = 0;
  const auto take = [&](auto size) {
    constexpr int M = decltype(size)::value;
    micro<E, T, M, N, ADD>(a.rows_from(i), b, c + i * ldc, ldc, depth);
    i += M;
  };
  while (i + MICRO_ROWS <= rows) take(Number<MICRO_ROWS>{});
  if (i + 4 <= rows) take(Number<4>{});
  if (i + 2 <= rows) take(Number<2>{});
  if (i < rows) take(Number<1>{});
}

template <class E, int T, bool ADD>
static void multiply_by_vectors(Left a, Right b, float* c, int64_t ldc, int rows, int columns, int depth) {
  int j = 0;
  const auto take = [&](auto size) {
    constexpr int N = decltype(size)::value;
    multiply_columns<E, T, N, ADD>(a, b.columns_from(j * SIZE<T>), c + j, ldc, rows, depth);
    j += N * VL;
  };
  while (j + GROUP * VL <= columns) take(Number<GROUP>{});
  if (GROUP > 2 && j + 2 * VL <= columns) take(Number<2>{});
  if (j < columns) take(Number<1>{});
}

#if defined(__AMX_BF16__)
// Matrix tiles of 16 rows x 64 bytes: the layout of A, B and C above is theirs too, where A's pairs are neighbours.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
struct MatrixTiles {  // held by a thread while it multiplies
  MatrixTiles() {
    TileConfig config;
    _tile_loadconfig(&config);
  }
  ~MatrixTiles() { _tile_release(); }
};

template <int M, int N, bool ADD>  // 16 * M rows, 16 * N columns
INLINE void multiply_tiles(Left a, Right b, float* c, int64_t ldc, int depth) {
  if (ADD) {
    _tile_loadd(0, c, ldc * 4);
    if (N > 1) _tile_loadd(1, c + 16, ldc * 4);
    if (M > 1) _tile_loadd(2, c + 16 * ldc, ldc * 4);
    if (M > 1 && N > 1) _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < depth; k += 16) {
    _tile_loadd(4, a.data + k * 4, a.row);
    _tile_loadd(6, b.data + k * b.row, b.row);
    _tile_dpbf16ps(0, 4, 6);
    if (N > 1) _tile_loadd(7, b.data + k * b.row + 64, b.row);
    if (N > 1) _tile_dpbf16ps(1, 4, 7);
    if (M > 1) _tile_loadd(5, a.data + 16 * a.row + k * 4, a.row);
    if (M > 1) _tile_dpbf16ps(2, 5, 6);
    if (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, ldc * 4);
  if (N > 1) _tile_stored(1, c + 16, ldc * 4);
  if (M > 1) _tile_stored(2, c + 16 * ldc, ldc * 4);
  if (M > 1 && N > 1) _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
}

template <bool ADD>
static void multiply_in_tiles(Left a, Right b, float* c, int64_t ldc, int rows, int columns, int depth) {
  const int whole_rows = rows & ~15, whole_depth = depth & ~15;
  for (int j = 0; j < columns; j += 32)
    for (int i = 0; i < whole_rows; i += 32) {
      const Left left = a.rows_from(i);
      const Right right = b.columns_from(j * 4);
      const bool two_rows = whole_rows - i > 16, two_columns = columns - j > 16;
      float* out = c + i * ldc + j;
      if (two_rows && two_columns) multiply_tiles<2, 2, ADD>(left, right, out, ldc, whole_depth);
      else if (two_rows) multiply_tiles<2, 1, ADD>(left, right, out, ldc, whole_depth);
      else if (two_columns) multiply_tiles<1, 2, ADD>(left, right, out, ldc, whole_depth);
      else multiply_tiles<1, 1, ADD>(left, right, out, ldc, whole_depth);
    }
  if (whole_depth < depth)
    multiply_by_vectors<Pairs, FLOAT, true>(a.depth_from(whole_depth), b.depth_from(whole_depth), c, ldc, whole_rows,
                                            columns, depth - whole_depth);
  if (whole_rows < rows)
    multiply_by_vectors<Pairs, FLOAT, ADD>(a.rows_from(whole_rows), b, c + whole_rows * ldc, ldc, rows - whole_rows,
                                           columns, depth);
}
#else
struct MatrixTiles {};
#endif

template <class E, bool ADD>
static void multiply(Left a, Right b, float* c, int64_t ldc, int rows, int columns, int depth) {
#if defined(__AMX_BF16__)
  if (E::DEPTH == 2 && a.column == 4 && rows >= 16 && depth >= 16)
    return multiply_in_tiles<ADD>(a, b, c, ldc, rows, columns, depth);
#endif
  multiply_by_vectors<E, FLOAT, ADD>(a, b, c, ldc, rows, columns, depth);
}
