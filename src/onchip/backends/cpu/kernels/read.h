// Reading rows of tensors as products want them: in floats, or in bfloat16 whose pairs a product sums at a time; as rows,
// or as columns, where the pairs are of two rows.
#pragma once

#include "tile.h"

struct KeyTile {  // keys in memory, in bytes; `run`: how many have this stride; `ahead`: as far is what is read later
  const char* data;
  int64_t row, run, ahead = 0;
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

// VL numbers of a row of n from `at` on; zeros from null, and past n. `OF` numbers are one of a vector.
template <int T, int OF = 1>
INLINE Vec some_of(const char* row, int64_t at, int64_t n) {
  return row ? load_some<T, OF>(row + at * SIZE<T> / OF, n - at) : all(0.0f);
}
// Numbers of bfloat16 of two rows, side by side.
INLINE Vec interleave(const char* a, const char* b, int64_t at, int64_t n) {
  return (Vec)((Words)some_of<BF16>(a, at, n) >> 16 | (Words)some_of<BF16>(b, at, n));
}

template <int T>
struct Read {
  using E = Products<T>;
  static constexpr int DEPTH = E::DEPTH, LD = KEYS + 2 * VL;  // keys of a row of copied columns

  // n numbers, or none from null, and zeros up to ld; as they are, or as floats.
  template <int BYTES = E::BYTES>
  INLINE void copy_row(const char* from, int64_t n, char* to, int64_t ld) {
    if (!from) n = 0;
    if (SIZE<T> == BYTES && from) std::memcpy(to, from, (size_t)(n * BYTES));
    else
      for (int64_t d = 0; d < n; d += VL) store_some<FLOAT>(to + d * 4, some_of<T>(from, d, n), n - d);
    if (n < ld) std::memset(to + n * BYTES, 0, (size_t)((ld - n) * BYTES));
  }

  // n keys as rows [n][ld]; asks for those that lie `ahead` of them, if not 0.
  template <int BYTES = E::BYTES>
  static KeyTile copy_keys(const Source& of, int64_t k0, int n, const uint64_t* bits, const Buffer& to, int64_t ld,
                           int64_t ahead = 0) {
    of.each(k0, n, bits, [&](int i, const char* key) {
      for (int64_t at = 0; ahead && key && at < of.dim * SIZE<T>; at += 64) fetch(key + at + ahead);
      copy_row<BYTES>(key, of.dim, to.bytes() + i * ld * BYTES, ld);
    });
    return {to.bytes(), ld * BYTES, n};
  }

  // n keys as columns [dim]: floats as rows [n][dim]; pairs with a zero after the last, since products start at any key.
  static KeyTile copy_columns(const Source& source, int64_t k0, int n, const uint64_t* bits, const Buffer& to) {
    if constexpr (DEPTH == 1) return copy_keys(source, k0, n, bits, to, source.dim);
    const char* rows[LD] = {};
    source.each(k0, n, bits, [&](int i, const char* key) { rows[i] = key; });
    to_columns((int)parts(n + 1, 2 * VL) * VL, source.dim, to.floats(), LD / 2,
               [&](int i, int64_t d) { return interleave(rows[2 * i], rows[2 * i + 1], d, source.dim); });
    return {to.bytes(), LD * 2, n};
  }

  // Keys of a look for products along the keys: of a tile of `size` as columns, without its first `skip`, or a copy in
  // `own` where keys that no row sees, between them or paired with the last, are not to be read.
  static Matrix as_columns(KeyTile tile, int64_t skip, int64_t size, const Source& source, const Look& look,
                           const uint64_t* bits, const Buffer& own) {
    if (look.holes || (look.n % DEPTH && skip + look.n < size)) {
      tile = copy_columns(source, look.k0, look.n, look.holes ? bits : nullptr, own);
      skip = 0;
    }
    return DEPTH == 2 ? Matrix{tile.data + skip * 2, tile.row, 4} : Matrix{tile.data + skip * tile.row, 4, tile.row};
  }

  // Rows of Q or dout, zeros from null, as columns [dim][lanes].
  static void pack_columns(const char* const* rows, int lanes, int64_t dim, float* to) {
    to_columns(lanes, parts(dim, DEPTH), to, lanes, [&](int i, int64_t d) {
      return DEPTH == 2 ? some_of<FLOAT, 2>(rows[i], d * 2, dim) : some_of<T>(rows[i], d, dim);
    });
  }

  // Columns [dim][lanes] times a factor a row, to the rows of a tensor.
  template <class Factor>
  static void unpack_columns(const Strided& t, const Rows& r, int64_t dim, const float* from, const Factor& factor) {
    transposed(dim, r.count,
               [&](int d, int64_t i) { return d < dim ? load(from + d * r.lanes + i) * factor(i) : all(0.0f); },
               [&](int64_t i, int64_t d, Vec x) { store_some<T>(r.row(t, (int)i) + d * SIZE<T>, x, dim - d); });
  }

  // to [keys][lanes]: products of the keys from `skip` in a tile on with columns [dim][lanes].
  static void product(KeyTile tile, int64_t skip, int64_t dim, const float* columns, float* to, int lanes, int keys) {
    const Matrix left{tile.data + skip * tile.row, tile.row, 4};
    multiply<E, false>(left, matrix(columns, lanes), to, lanes, keys, lanes, parts(dim, DEPTH));
  }
};
