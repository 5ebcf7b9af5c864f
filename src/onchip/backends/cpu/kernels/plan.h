// How rows are cut into blocks; of the forward pass also the pieces of work, which take some blocks through the keys
// together, and the splits of the keys.
#pragma once

#include "read.h"

constexpr int DOT_ROWS = VL >= 8 ? 8 : 4;  // at most so many rows are worth dot products, whose lanes run along dim

struct Plan {
  const Call& call;
  const int64_t dot_rows;  // at most so many rows of a block are taken by dot products, whose sums are of another order
  // Where all rows are few, reading K and V is the work: a piece is the blocks of all heads, whose keys lie side by side.
  // Else it is a few blocks of one head, for which a tile of keys is packed once, and as many as fit a core's L2.
  bool decoding, neighbours;  // neighbours: whether K and V of all heads of a key lie side by side then
  int64_t splits, blocks = 0, pieces = 0;
  int64_t together, at_once;  // most blocks of a piece; keys of a tile
  Buffer starts;              // of each sequence: its first block, its first piece

  explicit Plan(const Call& c)
      : call(c), dot_rows(c.recomputed ? 0 : DOT_ROWS), decoding((c.q_to - c.q_from) * c.heads_q <= dot_rows * c.heads_k),
        neighbours(decoding && c.k.head == c.dim * size_of(c.dtype) && c.v.head == c.dim_v * size_of(c.dtype)), splits(c.splits),
        starts((c.n_members + 1) * 16) {
    const int64_t dims = most<int64_t>(c.dim + c.dim_v, 1);
    for (int64_t i = 0; i < c.n_members; i++) first(i, 0) = blocks, blocks += c.heads_k * cut(c, sequence(c, i)).count;
    first(c.n_members, 0) = blocks;
    // 32 pieces keep the cores of one socket busy; a split of fewer than 512 keys costs more to join than it brings.
    together = decoding ? c.heads_k : most<int64_t>(1, least(blocks / 32, (1 << 18) / (ROWS * dims * 4)));
    const int64_t fitting = (1 << 18) / (c.heads_k * dims * size_of(c.dtype)) / 16 * 16;  // of all heads in 256 KiB
    at_once = decoding ? least<int64_t>(128, most<int64_t>(16, fitting)) : KEYS;
    for (int64_t i = 0; i < c.n_members; i++) {
      first(i, 1) = pieces;
      pieces += decoding ? of_head(i) > 0 : c.heads_k * parts(of_head(i), together);
    }
    first(c.n_members, 1) = pieces;
    if (splits == 0) splits = pieces >= 32 || pieces == 0 ? 1 : least(parts(32, pieces), most<int64_t>(c.seqlen_k / 512, 1));
  }
  int64_t& first(int64_t i, int which) const { return ((int64_t*)starts.data)[2 * i + which]; }
  int64_t of_head(int64_t i) const { return (first(i + 1, 0) - first(i, 0)) / call.heads_k; }  // blocks of a sequence
  int64_t find(int64_t n, int which) const {  // the sequence that a block, or a piece, is of
    int64_t low = 0, high = call.n_members;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first(middle, which) <= n ? low : high) = middle;
    }
    return low;
  }
  int64_t begin(int64_t piece, int64_t& count) const {  // the first block of a piece, and how many it has
    const int64_t i = find(piece, 1), within = piece - first(i, 1);
    if (decoding) return count = call.heads_k, first(i, 0);
    const int64_t of_pieces = parts(of_head(i), together), at = within % of_pieces * together;
    count = least(together, of_head(i) - at);
    return first(i, 0) + within / of_pieces * of_head(i) + at;
  }
  Rows rows(int64_t block) const {
    const int64_t i = find(block, 0), within = block - first(i, 0), n = of_head(i);
    return make_rows(call, sequence(call, i), within / n, n - 1 - within % n);  // causal: longest first
  }
};

// Running sums of a block: out of weights 2^(unit * (score - row_max)), and the weights' sum. out is [dim_v][lanes], or
// [rows][whole vectors of dim_v] while dot products add to it.
struct State {
  float *row_max, *row_sum, *out;
  explicit State(float* at) : row_max(at), row_sum(at + ROWS), out(at + 2 * ROWS) {}
  static int64_t size(const Call& c) { return (round_up(c.dim_v, VL) + 2) * ROWS; }
};

struct Part {  // a block on its way through the keys
  Rows rows;
  State state;
  float* q;
};

// The keys and values after a tile, asked for by lines of 64 bytes in the order in which they lie in memory, where heads are
// neighbours: then the rows of one lie a page apart, and no hardware prefetcher follows. Requests go out all through the
// computation, keys and values in turn, at a distance: too many at once are dropped or hold up what follows. (Two cores of
// a Zen 5, 65536 keys of 8 x 128 floats: 25 GB/s without, 34 in bursts of four lines, 35 to 45 like this.)
struct Ahead {
  const Call& c;
  Sequence sequence;
  int64_t key, end, left = 0;  // lines left of this key, of the longer of the two
  const char *k = nullptr, *v = nullptr;

  void start(const Sequence& s, int64_t from, int64_t to) {
    sequence = s, key = from, end = to, left = 0;
    if (key < end) find();
  }
  void find() {
    k = keys_of(c, sequence, 0).find(key).data;
    v = values_of(c, sequence, 0).find(key).data;
    left = parts(c.heads_k * most(c.dim, c.dim_v) * size_of(c.dtype), 64);
  }
  inline __attribute__((always_inline)) void fetch() {  // a line of each
    if (left == 0) return;
    __builtin_prefetch(k);
    __builtin_prefetch(v);
    k += 64, v += 64;
    if (--left == 0 && ++key < end) find();
  }
};
