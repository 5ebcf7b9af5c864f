// Rows of bfloat16 as pairs for products that sum two numbers at a time: along dim as they lie, or along the rows.
#pragma once

#include "tile.h"

#if HAS_PAIRS

// Two rows side by side: pairs (a[d], b[d]) of 16 columns.
INLINE Vec interleave(const uint16_t* a, const uint16_t* b, int n) {
  __m256i x, y;
  if (n >= 16) {
    x = _mm256_loadu_si256((const __m256i*)a);
    y = _mm256_loadu_si256((const __m256i*)b);
  } else {
    const __mmask16 some = (__mmask16)((1u << n) - 1);
    x = _mm256_maskz_loadu_epi16(some, a);
    y = _mm256_maskz_loadu_epi16(some, b);
  }
  return as_vec(_mm512_or_si512(_mm512_cvtepu16_epi32(x), _mm512_slli_epi32(_mm512_cvtepu16_epi32(y), 16)));
}

// (a, b) as bfloat16 pairs.
INLINE Vec pair_up(Vec a, Vec b) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(b, a);  // 16 of a, then 16 of b
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return as_vec(_mm512_permutexvar_epi16(order, halves));
}

// Rows first ... first + 31 of `row(i)` (null: zeros) turned to columns: to [dim][ld numbers].
template <class Row>
INLINE void turn_32(Row row, int64_t dim, uint16_t* to, int64_t ld) {
  alignas(64) static const uint16_t zeros[16] = {};
  for (int64_t d = 0; d < dim; d += 16) {
    const int n = (int)least<int64_t>(16, dim - d);
    Vec square[16];
    for (int i = 0; i < 16; i++) {
      const uint16_t *a = row(2 * i), *b = row(2 * i + 1);
      square[i] = interleave(a ? a + d : zeros, b ? b + d : zeros, n);
    }
    transpose(square);
    for (int i = 0; i < n; i++) store((float*)(to + (d + i) * ld), square[i]);
  }
}

// Keys k0 ... k0 + n - 1 as columns [dim][ld], in steps of 32 with zeros after the last and where no row sees a key.
static void turn_keys(const Call& c, const Strided& t, const Sequence& s, int64_t head, int64_t k0, int n,
                      const uint64_t* bits, int64_t dim, uint16_t* to, int64_t ld) {
  for (int i = 0; i < n; i += 32)
    turn_32(
        [&](int j) -> const uint16_t* {
          int64_t run;
          if (i + j >= n || (bits && !bits[i + j])) return nullptr;
          return (const uint16_t*)find_keys(c, t, s, head, k0 + i + j, run).data;
        },
        dim, to + i, ld);
}

#endif

// n keys as rows for products along dim: floats, or bfloat16 with a zero past an odd dim; zeros for keys without a bit.
template <class E, int T>
static void copy_keys(const Call& c, const Strided& t, const Sequence& s, int64_t head, int64_t k0, int n,
                      const uint64_t* bits, int64_t dim, char* to) {
  if (E::DEPTH == 1) return gather<T>(c, t, s, head, k0, n, bits, dim, (float*)to, dim);
  const int64_t ld = round_up(dim, 2) * 2;
  for (int i = 0; i < n; i++) {
    int64_t run;
    const bool used = !bits || bits[i];
    if (used) std::memcpy(to + i * ld, find_keys(c, t, s, head, k0 + i, run).data, (size_t)dim * 2);
    std::memset(to + i * ld + (used ? dim * 2 : 0), 0, (size_t)(used ? ld - dim * 2 : ld));
  }
}
