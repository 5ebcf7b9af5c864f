// Tiles: which rows of Q share one, which pairs of it are visible or dropped, and its scores' modifications.
#pragma once

#include "call.h"
#include "matmul.h"

constexpr int KEYS = 256;  // most keys of a tile

struct Rows {  // up to ROWS rows of Q with one key head: `heads` query heads of `queries` queries each
  Sequence sequence;
  int64_t key_head, head, heads, q0, queries;
  int count, lanes;                                // rows; rounded up to whole vectors
  int32_t lo[ROWS], hi[ROWS];                      // keys [lo, hi) that the mask's intervals leave each row
  int64_t begin, end, full_begin, full_end;        // keys that some row sees; that every row sees
  int64_t query(int lane) const { return q0 + lane % queries; }
  int64_t query_head(int lane) const { return head + lane / queries; }
};

struct Blocks {  // how the rows of one key head are cut
  int64_t first, queries, heads, per_head, count;
};

INLINE Blocks cut(const Call& c, const Sequence& s) {
  const int64_t group = c.heads_q / c.heads_k, to = least(c.q_to, s.q_len), n = most<int64_t>(to - c.q_from, 0);
  if (n == 0) return {c.q_from, 1, 1, 0, 0};
  if (n >= ROWS) return {c.q_from, ROWS, 1, parts(n, ROWS), group * parts(n, ROWS)};
  const int64_t heads = least(group, ROWS / n);  // short: rows of several heads share a tile
  return {c.q_from, n, heads, 1, parts(group, heads)};
}

static void find_intervals(const Call& c, Rows& r) {
  const Sequence& s = r.sequence;
  const int64_t shift = s.k_len - s.q_len;
  r.begin = r.full_end = s.k_len;
  r.end = r.full_begin = 0;
  for (int i = 0; i < r.lanes; i++) {
    int64_t q = r.query(i), lo = 0, hi = s.k_len;
    if (i >= r.count) {
      r.lo[i] = r.hi[i] = 0;
      continue;
    }
    if (c.left != UNBOUNDED) lo = most(lo, q + shift - c.left);
    if (c.top_left != UNBOUNDED) lo = most(lo, q - c.top_left);
    if (c.right != UNBOUNDED) hi = least(hi, q + shift + c.right + 1);
    if (c.top_right != UNBOUNDED) hi = least(hi, q + c.top_right + 1);
    if (c.lo) {
      const int64_t at = s.number * c.interval_batch + q;
      lo = most<int64_t>(lo, c.lo[at]);
      hi = least<int64_t>(hi, c.hi[at]);
    }
    if (lo >= hi) lo = hi = 0;
    r.lo[i] = (int32_t)lo;
    r.hi[i] = (int32_t)hi;
    r.full_begin = most(r.full_begin, lo);
    r.full_end = least(r.full_end, hi);
    if (lo < hi) r.begin = least(r.begin, lo), r.end = most(r.end, hi);
  }
  r.begin = most(r.begin, c.k_from);
  r.end = least(r.end, c.k_to);
}

static Rows make_rows(const Call& c, const Sequence& s, int64_t key_head, int64_t block) {
  const Blocks b = cut(c, s);
  const int64_t group = c.heads_q / c.heads_k, head = block / b.per_head * b.heads;
  Rows r;
  r.sequence = s;
  r.key_head = key_head;
  r.head = key_head * group + head;
  r.heads = least(b.heads, group - head);
  r.q0 = b.first + block % b.per_head * b.queries;
  r.queries = least(b.queries, least(c.q_to, s.q_len) - r.q0);
  r.count = (int)(r.heads * r.queries);
  r.lanes = (int)round_up(r.count, VL);
  find_intervals(c, r);
  return r;
}

// Visibility: one word a key, a bit a row.

enum Sight { NONE, SOME, ALL };

INLINE void transpose_bits(uint64_t* a) {  // 64 x 64
  uint64_t low = 0x00000000FFFFFFFFu;
  for (int j = 32; j; j >>= 1, low ^= low << j)
    for (int k = 0; k < 64; k = (k + j + 1) & ~j) {
      const uint64_t t = ((a[k] >> j) ^ a[k + j]) & low;
      a[k] ^= t << j;
      a[k + j] ^= t;
    }
}

INLINE uint64_t pack_bits(const uint8_t* p, int64_t stride, int n) {  // bytes 0 or 1
  uint64_t bits = 0;
  if (stride == 0) return *p ? (n == 64 ? ~0ull : (1ull << n) - 1) : 0;
  if (stride == 1)
    for (int i = 0; i < n; i += 8) {
      uint64_t eight = 0;
      std::memcpy(&eight, p + i, (size_t)least(8, n - i));
      bits |= (eight * 0x0102040810204080ull >> 56) << i;  // byte i's lowest bit to bit i
    }
  else
    for (int i = 0; i < n; i++) bits |= (uint64_t)(p[i * stride] & 1) << i;
  return bits;
}

static void see_elements(const Call& c, const Rows& r, int64_t k0, int n, uint64_t* bits) {
  const uint8_t* base = c.seen + r.sequence.position * c.seen_batch + (k0 - c.k_from) * c.seen_k;
  for (int at = 0; at < n; at += 64) {
    const int keys = least(64, n - at);
    uint64_t square[64] = {};
    for (int i = 0; i < r.count; i++)
      square[i] = pack_bits(base + r.query_head(i) * c.seen_head + (r.query(i) - c.q_from) * c.seen_q + at * c.seen_k,
                            c.seen_k, keys);
    transpose_bits(square);
    for (int i = 0; i < keys; i++) bits[at + i] &= square[i];
  }
}

static void see_blocks(const Call& c, const Rows& r, int64_t k0, int n, uint64_t* bits) {
  for (int64_t k = k0; k < k0 + n;) {
    const int64_t column = k / c.block_n, stop = least((column + 1) * c.block_n, k0 + n);
    uint64_t word = 0;
    for (int i = 0; i < r.count; i++) {
      const uint8_t* map = c.blocks + r.sequence.number * c.blocks_batch + r.query_head(i) * c.blocks_head;
      word |= (uint64_t)(map[r.query(i) / c.block_m * c.blocks_row + column] & 1) << i;
    }
    for (; k < stop; k++) bits[k - k0] &= word;
  }
}

// Which rows see keys k0 ... k0 + n - 1. Keys that none sees are cut off at either end; `holes`: some are left between.
static Sight see(const Call& c, const Rows& r, int64_t& k0, int& n, uint64_t* bits, bool& holes) {
  const uint64_t everyone = r.count == 64 ? ~0ull : (1ull << r.count) - 1;
  holes = false;
  if (!c.seen && !c.blocks && r.full_begin <= k0 && k0 + n <= r.full_end) return ALL;
  for (int i = 0; i < n; i++) {
    const Ints key = all((int32_t)(k0 + i));
    uint64_t word = 0;
    for (int j = 0; j < r.lanes / VL; j++)
      word |= (at_least(key, load(r.lo + j * VL)) & ~at_least(key, load(r.hi + j * VL))) << (j * VL);
    bits[i] = word & everyone;
  }
  if (c.blocks) see_blocks(c, r, k0, n, bits);
  if (c.seen) see_elements(c, r, k0, n, bits);
  int first = 0, last = n;
  while (first < n && !bits[first]) first++;
  while (last > first && !bits[last - 1]) last--;
  if (first == last) return NONE;
  bool full = true;
  for (int i = first; i < last; i++) {
    full &= bits[i] == everyone;
    holes |= bits[i] == 0;
    bits[i - first] = bits[i];
  }
  k0 += first;
  n = last - first;
  return full ? ALL : SOME;
}

// Which pairs dropout keeps: Philox4x32-10, counted as rules.dropout_counter says.
static void survive(const Call& c, const Rows& r, int64_t k0, int n, uint64_t* kept) {
  for (int i = 0; i < n; i++) kept[i] = 0;
  if (c.threshold >> 32) return;
  const Ints bound = all((int32_t)(uint32_t)c.threshold);
  for (int j = 0; j < r.lanes / VL; j++) {
    alignas(64) int32_t query[VL], head[VL];
    for (int i = 0; i < VL; i++) {
      const int lane = least(j * VL + i, r.count - 1);
      query[i] = (int32_t)r.query(lane);
      head[i] = (int32_t)(uint32_t)(r.sequence.number * c.heads_q + r.query_head(lane));
    }
    for (int64_t four = k0 / 4; four * 4 < k0 + n; four++) {
      Ints c0 = all((int32_t)four), c1 = load(query), c2 = load(head), c3 = all(0);
      uint32_t key0 = (uint32_t)c.seed, key1 = (uint32_t)((uint64_t)c.seed >> 32);
      for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        Ints high0, low0, high1, low1;
        multiply(c0, all((int32_t)0xD2511F53u), high0, low0);
        multiply(c2, all((int32_t)0xCD9E8D57u), high1, low1);
        c0 = high1 ^ c1 ^ all((int32_t)key0);
        c2 = high0 ^ c3 ^ all((int32_t)key1);
        c1 = low1;
        c3 = low0;
      }
      const Ints words[4] = {c0, c1, c2, c3};
      for (int i = 0; i < 4; i++) {
        const int64_t key = 4 * four + i - k0;
        if (0 <= key && key < n) kept[key] |= at_least_unsigned(words[i], bound) << (j * VL);
      }
    }
  }
}

INLINE void hide(float* s, int width, int n, const uint64_t* bits, float with) {
  for (int i = 0; i < n; i++)
    for (int j = 0; j < width / VL; j++) {
      float* p = s + i * width + j * VL;
      store(p, select(lanes(bits[i], j), load(p), all(with)));
    }
}

// Scores.

constexpr double LOG2E = 1.4426950408889634;

struct Units {  // a weight is 2^(unit * score - what its row's softmax subtracts)
  bool modified;  // scores are not the products, and in natural units
  float unit;
  explicit Units(const Call& c)
      : modified(c.softcap != 0 || c.alibi || c.bias || c.scale <= 0), unit((float)(modified ? LOG2E : c.scale * LOG2E)) {}
};

template <int T>
static void read_bias(const Call& c, const Rows& r, int64_t k0, int n, float* tile) {  // tile [n][lanes]
  const char* base = c.bias + r.sequence.number * c.bias_batch + k0 * c.bias_k;
  const bool contiguous = c.bias_k == SIZE<T>;
  for (int j = 0; j < r.lanes; j += VL)
    for (int i = 0; i < n; i += VL) {
      const int keys = least(VL, n - i);
      Vec square[VL];
      for (int t = 0; t < VL; t++) {
        const int lane = least(j + t, r.count - 1);
        const char* row = base + r.query_head(lane) * c.bias_head + r.query(lane) * c.bias_q + i * c.bias_k;
        alignas(64) char own[4 * VL] = {};
        if (contiguous && keys == VL) square[t] = load_as<T>(row);
        else {
          for (int m = 0; m < keys; m++) std::memcpy(own + m * SIZE<T>, row + m * c.bias_k, SIZE<T>);
          square[t] = load_as<T>(own);
        }
      }
      transpose(square);
      for (int t = 0; t < keys; t++) store(tile + (i + t) * r.lanes + j, square[t]);
    }
}

// Raw products to modified scores in natural units, as rules.modify. `bias`: room for a tile. `slope`, where not null,
// receives d modified / d scaled.
static void modify(const Call& c, const Rows& r, int64_t k0, int n, float* s, float* bias, float* slope) {
  if (c.bias_dtype == BF16 && c.bias) read_bias<BF16>(c, r, k0, n, bias);
  else if (c.bias_dtype == FP16 && c.bias) read_bias<FP16>(c, r, k0, n, bias);
  else if (c.bias) read_bias<FLOAT>(c, r, k0, n, bias);
  alignas(64) float slopes[ROWS] = {}, position[ROWS] = {};
  if (c.alibi)
    for (int i = 0; i < r.count; i++) {
      slopes[i] = c.alibi[r.sequence.number * c.alibi_batch + r.query_head(i) * c.alibi_head];
      position[i] = (float)(r.query(i) + r.sequence.k_len - r.sequence.q_len - k0);
    }
  const Vec scale = all((float)c.scale), cap = all((float)c.softcap), inverse = all((float)(c.scale / c.softcap));
  for (int i = 0; i < n; i++)
    for (int j = 0; j < r.lanes; j += VL) {
      const int at = i * r.lanes + j;
      Vec x = load(s + at);
      if (c.softcap != 0) {
        const Vec capped = tanh(x * inverse);
        if (slope) store(slope + at, all(1.0f) - capped * capped);
        x = cap * capped;
      } else x = x * scale;
      if (c.alibi) x = x - load(slopes + j) * absolute(load(position + j) - all((float)i));
      if (c.bias) x = x + load(bias + at);
      store(s + at, x);
    }
}

// Reading rows of tensors.

struct KeyTile {  // rows of K or V in memory
  const char* data;
  int64_t row;
};

// Keys k0 ... of one tensor where they lie, and how many of them have one stride.
INLINE KeyTile find_keys(const Call& c, const Strided& t, const Sequence& s, int64_t head, int64_t k0, int64_t& run) {
  const int64_t slot = s.k_start + k0;
  if (!c.pages) {
    run = INT64_MAX;
    return {at(t, s.k_batch, slot, head), t.row};
  }
  const int64_t page = c.pages[s.number * c.pages_row + slot / c.page_size], within = slot % c.page_size;
  run = c.page_size - within;
  return {at(t, page, within, head), t.row};
}

template <int T>
INLINE void widen(const char* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += VL) store_some<FLOAT>((char*)(to + i), load_some<T>(from + i * SIZE<T>, n - i), n - i);
}

// n keys as floats [n][ld], zeros where no row sees a key (bits, if not null) and past dim: 0 * NaN would reach the sums.
template <int T>
static void gather(const Call& c, const Strided& t, const Sequence& s, int64_t head, int64_t k0, int n,
                   const uint64_t* bits, int64_t dim, float* to, int64_t ld) {
  for (int i = 0; i < n;) {
    int64_t run;
    const KeyTile keys = find_keys(c, t, s, head, k0 + i, run);
    const int stop = (int)least<int64_t>(n, i + run);
    for (int64_t first = i; i < stop; i++) {
      float* row = to + i * ld;
      const bool used = !bits || bits[i];
      if (used) widen<T>(keys.data + (i - first) * keys.row, row, dim);
      std::memset(row + (used ? dim : 0), 0, (size_t)(ld - (used ? dim : 0)) * 4);
    }
  }
}

// Rows of Q (or dout) as columns: to [dim][lanes], elements as E wants them.
template <class E, int T>
static void pack_columns(const Strided& t, const Rows& r, int64_t dim, float* to, const bool* blind = nullptr) {
  constexpr int unit = E::DEPTH == 2 ? 4 : SIZE<T>;  // bytes of an element
  const int64_t elements = parts(dim, E::DEPTH);
  for (int j = 0; j < r.lanes; j += VL)
    for (int64_t d = 0; d < elements; d += VL) {
      const int64_t left = least<int64_t>(dim * SIZE<T> - d * unit, unit * VL);
      Vec square[VL];
      for (int i = 0; i < VL; i++) {
        square[i] = all(0.0f);
        if (j + i >= r.count || (blind && blind[j + i])) continue;
        const char* row = at(t, r.sequence.q_batch, r.sequence.q_start + r.query(j + i), r.query_head(j + i)) + d * unit;
        if (E::DEPTH == 1) square[i] = load_some<T>(row, left / unit);
        else if (left == 4 * VL) square[i] = load((const float*)row);
        else std::memcpy(&square[i], row, (size_t)left);
      }
      transpose(square);
      for (int64_t i = 0; i < least<int64_t>(VL, elements - d); i++) store(to + (d + i) * r.lanes + j, square[i]);
    }
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
      for (int i = 0; i < least(VL, r.count - j); i++) {
        char* row = at(t, r.sequence.q_batch, r.sequence.q_start + r.query(j + i), r.query_head(j + i)) + d * SIZE<T>;
        store_some<T>(row, square[i], n);
      }
    }
}
