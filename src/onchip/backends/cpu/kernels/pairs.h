// Rows of bfloat16 as pairs for products that sum two numbers at a time: along dim as they lie, or along the rows.
#pragma once

#include "tile.h"

#if HAS_PAIRS

// Two rows side by side, n columns, at most 16, and zeros after them.
INLINE Vec interleave(const uint16_t* a, const uint16_t* b, int64_t n) {
  if (n == 16) return interleave(a, b);
  uint16_t x[16] = {}, y[16] = {};
  std::memcpy(x, a, (size_t)n * 2);
  std::memcpy(y, b, (size_t)n * 2);
  return interleave(x, y);
}

// (a, b) as bfloat16 pairs.
INLINE Vec pair_up(Vec a, Vec b) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(b, a);  // 16 of a, then 16 of b
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Vec)_mm512_permutexvar_epi16(order, halves);
}

// Keys k0 ... k0 + 31 as columns [dim][ld]: zeros from key k0 + n on, and where no row sees a key.
static void turn_32(const Call& c, const Strided& t, const Sequence& s, int64_t head, int64_t k0, int n, const uint64_t* bits,
                    int64_t dim, uint16_t* to, int64_t ld) {
  static const uint16_t zeros[16] = {};
  const uint16_t* rows[32];
  for (int i = 0; i < 32; i++) {
    int64_t run;
    rows[i] = i < n && !(bits && !bits[i]) ? (const uint16_t*)find_keys(c, t, s, head, k0 + i, run).data : nullptr;
  }
  for (int64_t d = 0; d < dim; d += 16) {
    const int64_t width = least<int64_t>(16, dim - d);
    Vec square[16];
    for (int i = 0; i < 16; i++) {
      const uint16_t *a = rows[2 * i], *b = rows[2 * i + 1];
      square[i] = interleave(a ? a + d : zeros, b ? b + d : zeros, width);
    }
    transpose(square);
    for (int i = 0; i < width; i++) store((float*)(to + (d + i) * ld), square[i]);
  }
}

// n keys likewise, with a zero after the last: products take keys in pairs, from any key on.
static void turn_keys(const Call& c, const Strided& t, const Sequence& s, int64_t head, int64_t k0, int n,
                      const uint64_t* bits, int64_t dim, uint16_t* to, int64_t ld) {
  for (int i = 0; i <= n; i += 32) turn_32(c, t, s, head, k0 + i, n - i, bits ? bits + i : nullptr, dim, to + i, ld);
}

#endif

// n keys as rows [n][ld] for products along dim, in floats or as bfloat16; zeros for keys without a bit, and past dim.
template <class E, int T>
static void copy_keys(const Call& c, const Strided& t, const Sequence& s, int64_t head, int64_t k0, int n,
                      const uint64_t* bits, int64_t dim, char* to, int64_t ld) {
  if (E::DEPTH == 1) return gather<T>(c, t, s, head, k0, n, bits, dim, (float*)to, ld);
  for (int i = 0; i < n; i++, to += ld * 2) {
    int64_t run;
    const size_t used = !bits || bits[i] ? (size_t)dim * 2 : 0;
    if (used) std::memcpy(to, find_keys(c, t, s, head, k0 + i, run).data, used);
    std::memset(to + used, 0, (size_t)ld * 2 - used);
  }
}

// n keys as columns [dim] for products along the keys: elements as E wants them, in floats as rows [n][dim].
template <class E, int T>
static KeyTile copy_columns(const Call& c, const Strided& t, const Sequence& s, int64_t head, int64_t k0, int n,
                            const uint64_t* bits, int64_t dim, const Buffer& to) {
#if HAS_PAIRS
  if (E::DEPTH == 2) {
    turn_keys(c, t, s, head, k0, n, bits, dim, (uint16_t*)to.data, KEYS + 32);
    return {to.bytes(), (KEYS + 32) * 2};
  }
#endif
  gather<T>(c, t, s, head, k0, n, bits, dim, to.floats(), dim);
  return {to.bytes(), dim * 4};
}
template <class E>
INLINE Left as_columns(KeyTile t, int64_t skip) {  // without the first `skip` keys
  return E::DEPTH == 2 ? Left{t.data + skip * 2, t.row, 4} : Left{t.data + skip * t.row, 4, t.row};
}
