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
  char* row(const Strided& t, int lane) const {
    return at(t, sequence.number, sequence.q_start + query(lane), query_head(lane));
  }
  int64_t statistic(const Call& c, int lane) const {  // where its lse is
    return sequence.number * c.row_batch + query_head(lane) * c.row_head + sequence.q_start + query(lane);
  }
};

struct Blocks {  // how the rows of one key head are cut
  int64_t queries, heads, per_head, count;
};

INLINE Blocks cut(const Call& c, const Sequence& s) {
  const int64_t group = c.heads_q / c.heads_k, to = least(c.q_to, s.q_len), n = most<int64_t>(to - c.q_from, 0);
  if (n == 0) return {1, 1, 0, 0};
  if (n >= ROWS) return {ROWS, 1, parts(n, ROWS), group * parts(n, ROWS)};
  const int64_t heads = least(group, ROWS / n);  // short: rows of several heads share a tile
  return {n, heads, 1, parts(group, heads)};
}

static Rows make_rows(const Call& c, const Sequence& s, int64_t key_head, int64_t block) {
  const Blocks b = cut(c, s);
  const int64_t group = c.heads_q / c.heads_k, head = block / b.per_head * b.heads;
  const int64_t heads = least(b.heads, group - head);
  const int64_t q0 = c.q_from + block % b.per_head * b.queries, queries = least(b.queries, least(c.q_to, s.q_len) - q0);
  const int count = (int)(heads * queries);
  Rows r{s, key_head, key_head * group + head, heads, q0, queries, count, (int)round_up(count, VL)};
  const int64_t shift = s.k_len - s.q_len;
  r.begin = r.full_end = s.k_len;
  for (int i = 0; i < r.count; i++) {
    const int64_t q = r.query(i);
    int64_t lo = most(c.k_from, most(q + shift - c.left, q - c.top_left));
    int64_t hi = least(least(s.k_len, c.k_to), least(q + shift + c.right, q + c.top_right) + 1);
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
  return r;
}

// Visibility: one word a key, a bit a row.

struct Look {  // at keys k0 ... k0 + n - 1, the first and last of which some row sees; n is 0 where no row sees any
  int64_t k0;
  int n;
  bool all, holes;  // whether every row sees them all; whether no row sees some
};

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
  for (int i = 0; i < n; i += 8) {
    uint8_t eight[8] = {};
    if (stride == 1) std::memcpy(eight, p + i, (size_t)least(8, n - i));
    else
      for (int m = 0; m < least(8, n - i); m++) eight[m] = p[(i + m) * stride];
    bits |= (load_any<uint64_t>(eight) * 0x0102040810204080ull >> 56) << i;  // byte i's lowest bit to bit i
  }
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

// Which rows see keys `begin` to `end`.
static Look see(const Call& c, const Rows& r, int64_t begin, int64_t end, uint64_t* bits) {
  const uint64_t everyone = r.count == 64 ? ~0ull : (1ull << r.count) - 1;
  const int64_t k0 = most(begin, r.begin);
  const int n = (int)most<int64_t>(least(end, r.end) - k0, 0);
  if (n == 0 || (!c.seen && !c.blocks && r.full_begin <= k0 && k0 + n <= r.full_end)) return {k0, n, true, false};
  for (int i = 0; i < n; i++) {
    const Ints key = all((int32_t)(k0 + i));
    uint64_t word = 0;
    for (int j = 0; j < r.lanes / VL; j++)
      word |= to_bits((Lanes)((key >= load(r.lo + j * VL)) & (key < load(r.hi + j * VL)))) << (j * VL);
    bits[i] = word & everyone;
  }
  if (c.blocks) see_blocks(c, r, k0, n, bits);
  if (c.seen) see_elements(c, r, k0, n, bits);
  int first = 0, last = n;
  while (first < n && !bits[first]) first++;
  while (last > first && !bits[last - 1]) last--;
  Look look{k0 + first, last - first, true, false};
  for (int i = 0; i < look.n; i++) {
    bits[i] = bits[first + i];
    look.all &= bits[i] == everyone;
    look.holes |= bits[i] == 0;
  }
  return look;
}

// Which pairs dropout keeps: Philox4x32-10, counted as rules.dropout_counter says.
static void survive(const Call& c, const Rows& r, int64_t k0, int n, uint64_t* kept) {
  std::memset(kept, 0, (size_t)n * 8);
  if (c.threshold >> 32) return;
  const Words bound = (Words)all((int32_t)c.threshold);
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
        multiply(c0, 0xD2511F53u, high0, low0);
        multiply(c2, 0xCD9E8D57u, high1, low1);
        c0 = high1 ^ c1 ^ all((int32_t)key0);
        c2 = high0 ^ c3 ^ all((int32_t)key1);
        c1 = low1;
        c3 = low0;
      }
      const Words words[4] = {(Words)c0, (Words)c1, (Words)c2, (Words)c3};
      for (int i = 0; i < 4; i++) {
        const int64_t key = 4 * four + i - k0;
        if (0 <= key && key < n) kept[key] |= to_bits((Lanes)(words[i] >= bound)) << (j * VL);
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

template <int T>
static void read_bias(const Call& c, const Rows& r, int64_t k0, int n, float* tile) {  // tile [n][lanes]
  to_columns(r.lanes, n, tile, r.lanes, [&](int lane, int64_t key) {
    const int i = least(lane, r.count - 1);
    const char* p = c.bias + r.sequence.number * c.bias_batch + r.query_head(i) * c.bias_head + r.query(i) * c.bias_q +
                    (k0 + key) * c.bias_k;
    if (c.bias_k == SIZE<T>) return load_some<T>(p, n - key);
    alignas(64) char own[4 * VL] = {};
    for (int m = 0; m < least<int64_t>(VL, n - key); m++) std::memcpy(own + m * SIZE<T>, p + m * c.bias_k, SIZE<T>);
    return load_as<T>(own);
  });
}

// Raw products to modified scores in natural units, as rules.modify. `bias`: room for a tile. `slope`, where not null,
// receives d modified / d scaled.
static void modify(const Call& c, const Rows& r, int64_t k0, int n, float* s, float* bias, float* slope) {
  constexpr decltype(&read_bias<FLOAT>) by_dtype[] = {read_bias<FLOAT>, read_bias<BF16>, read_bias<FP16>};
  if (c.bias) by_dtype[c.bias_dtype](c, r, k0, n, bias);
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
