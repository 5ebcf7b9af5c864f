// Reading rows of tensors as products want them: in floats, or in bfloat16 whose pairs a product sums at a time; as rows,
// or as columns, where the pairs are of two rows.
#pragma once

#include "tile.h"

struct KeyTile {  // keys in memory, in bytes; `run`: how many have this stride
  const char* data;
  int64_t row, run;
};

struct Source {  // K or V of one head of a sequence
  const Call& c;
  const Strided& tensor;
  int64_t dim;
  const Sequence& s;
  int64_t head;

  KeyTile find(int64_t key) const {
    const int64_t slot = s.k_start + key;
    if (!c.pages) return {at(tensor, s.k_batch, slot, head), tensor.row, INT64_MAX};
    const int64_t page = c.pages[s.number * c.pages_row + slot / c.page_size], within = slot % c.page_size;
    return {at(tensor, page, within, head), tensor.row, c.page_size - within};
  }
  // use(i, key) for n keys from k0 on; null for one that no row sees, by `bits` if not null: 0 * NaN would reach the sums.
  template <class Use>
  void each(int64_t k0, int n, const uint64_t* bits, Use use) const {
    for (int i = 0; i < n;) {
      KeyTile keys = find(k0 + i);
      const int stop = i + (int)least<int64_t>(n - i, keys.run);
      for (; i < stop; i++, keys.data += keys.row) use(i, bits && !bits[i] ? nullptr : keys.data);
    }
  }
};
INLINE Source keys_of(const Call& c, const Sequence& s, int64_t head) { return {c, c.k, c.dim, s, head}; }
INLINE Source values_of(const Call& c, const Sequence& s, int64_t head) { return {c, c.v, c.dim_v, s, head}; }

// n numbers, or none from null, and zeros up to ld; as they are, or as floats.
template <int T, int BYTES = Products<T>::BYTES>
INLINE void copy_row(const char* from, int64_t n, char* to, int64_t ld) {
  if (!from) n = 0;
  if (SIZE<T> == BYTES && from) std::memcpy(to, from, (size_t)(n * BYTES));
  else
    for (int64_t d = 0; d < n; d += VL) store_some<FLOAT>(to + d * 4, load_some<T>(from + d * SIZE<T>, n - d), n - d);
  if (n < ld) std::memset(to + n * BYTES, 0, (size_t)((ld - n) * BYTES));
}

// n keys as rows [n][ld].
template <int T, int BYTES = Products<T>::BYTES>
static void copy_keys(const Source& source, int64_t k0, int n, const uint64_t* bits, char* to, int64_t ld) {
  const int64_t dim = source.dim;
  source.each(k0, n, bits, [&](int i, const char* key) { copy_row<T, BYTES>(key, dim, to + i * ld * BYTES, ld); });
}

// Numbers d ... d + VL - 1 of two rows of n, side by side; zeros from null, and past n.
INLINE Words some_halves(const char* row, int64_t n) {
  if (row && n >= VL) return halves((const uint16_t*)row);
  uint16_t numbers[VL] = {};
  if (row) std::memcpy(numbers, row, (size_t)n * 2);
  return halves(numbers);
}
INLINE Vec interleave(const char* a, const char* b, int64_t d, int64_t n) {
  return (Vec)(some_halves(a ? a + d * 2 : a, n - d) | some_halves(b ? b + d * 2 : b, n - d) << 16);
}

// n keys as columns [dim]: floats as rows [n][dim]; pairs with a zero after the last, since products start at any key.
template <int T>
static KeyTile copy_columns(const Source& source, int64_t k0, int n, const uint64_t* bits, const Buffer& to) {
  constexpr int LD = KEYS + 2 * VL;
  const int64_t dim = source.dim;
  if constexpr (Products<T>::DEPTH == 1) {
    copy_keys<T>(source, k0, n, bits, to.bytes(), dim);
    return {to.bytes(), dim * 4, n};
  }
  const char* rows[LD] = {};
  source.each(k0, n, bits, [&](int i, const char* key) { rows[i] = key; });
  to_columns((int)parts(n + 1, 2 * VL) * VL, dim, to.floats(), LD / 2,
             [&](int i, int64_t d) { return interleave(rows[2 * i], rows[2 * i + 1], d, dim); });
  return {to.bytes(), LD * 2, n};
}

// Keys of a look for products along the keys: of a tile of `size` as columns, without its first `skip`, or a copy in `own`
// where keys that no row sees, between them or paired with the last, are not to be read.
template <int T>
static Matrix as_columns(KeyTile tile, int64_t skip, int64_t size, const Source& source, const Look& look,
                       const uint64_t* bits, const Buffer& own) {
  constexpr int DEPTH = Products<T>::DEPTH;
  if (look.holes || (look.n % DEPTH && skip + look.n < size)) {
    tile = copy_columns<T>(source, look.k0, look.n, look.holes ? bits : nullptr, own);
    skip = 0;
  }
  return DEPTH == 2 ? Matrix{tile.data + skip * 2, tile.row, 4} : Matrix{tile.data + skip * tile.row, 4, tile.row};
}

// Rows of Q or dout, zeros from null, as columns [dim][lanes].
template <int T>
static void pack_columns(const char* const* rows, int lanes, int64_t dim, float* to) {
  constexpr int DEPTH = Products<T>::DEPTH;
  to_columns(lanes, parts(dim, DEPTH), to, lanes, [&](int i, int64_t d) {
    if (!rows[i]) return all(0.0f);
    if (DEPTH == 2) return load_some<FLOAT, 2>(rows[i] + d * 4, dim - d * 2);
    return load_some<T>(rows[i] + d * SIZE<T>, dim - d);
  });
}

// Columns [dim][lanes] times a factor a row, to the rows of a tensor.
template <int T>
static void unpack_columns(const Strided& t, const Rows& r, int64_t dim, const float* from, const float* factor) {
  for (int j = 0; j < r.lanes; j += VL)
    for (int64_t d = 0; d < dim; d += VL) {
      const int n = (int)least<int64_t>(VL, dim - d);
      Vec square[VL];
      for (int i = 0; i < VL; i++) square[i] = i < n ? load(from + (d + i) * r.lanes + j) * load(factor + j) : all(0.0f);
      transpose(square);
      for (int i = 0; i < least(VL, r.count - j); i++) store_some<T>(r.row(t, j + i) + d * SIZE<T>, square[i], n);
    }
}
