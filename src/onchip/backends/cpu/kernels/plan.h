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
  int64_t splits, blocks, pieces;
  int64_t together, at_once;  // most blocks of a piece; keys of a tile
  Buffer starts;              // of each sequence: its first block, its first piece

  explicit Plan(const Call& c)
      : call(c), dot_rows(c.recomputed ? 0 : DOT_ROWS), decoding((c.q_to - c.q_from) * c.heads_q <= dot_rows * c.heads_k),
        neighbours(decoding && c.k.head == c.dim * size_of(c.dtype) && c.v.head == c.dim_v * size_of(c.dtype)), splits(c.splits),
        starts((c.n_members + 1) * 16) {
    const int64_t dims = most<int64_t>(c.dim + c.dim_v, 1);
    first(0, 0) = first(0, 1) = 0;
    for (int64_t i = 0; i < c.n_members; i++)
      first(i + 1, 0) = first(i, 0) + c.heads_k * cut(c, sequence(c, i)).count;
    blocks = first(c.n_members, 0);
    // 32 pieces keep the cores of one socket busy; a split of fewer than 512 keys costs more to join than it brings.
    together = decoding ? c.heads_k : most<int64_t>(1, least(blocks / 32, (1 << 18) / (ROWS * dims * 4)));
    const int64_t fitting = (1 << 18) / (c.heads_k * dims * size_of(c.dtype)) / 16 * 16;  // of all heads in 256 KiB
    at_once = decoding ? least<int64_t>(128, most<int64_t>(16, fitting)) : KEYS;
    for (int64_t i = 0; i < c.n_members; i++)
      first(i + 1, 1) = first(i, 1) + (decoding ? of_head(i) > 0 : c.heads_k * parts(of_head(i), together));
    pieces = first(c.n_members, 1);
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

struct Tile {  // of one worker: scores [keys][lanes], a word of `seen` and of `kept` a key
  const Plan& plan;
  const Call& c = plan.call;
  // A weight is 2^(unit * score - what its row's softmax subtracts); modified scores are in natural units.
  const bool modified = c.softcap != 0 || c.alibi || c.bias || c.scale <= 0;
  const float unit = (float)(modified ? LOG2E : c.scale * LOG2E);
  const int64_t held = least<int64_t>(KEYS, most<int64_t>(round_up(c.seqlen_k, 32), 32));  // keys of a tile, at most
  const Buffer s{held * ROWS * 4}, bias{c.bias ? held * ROWS * 4 : 0}, bits{held * 16};

  explicit Tile(const Plan& p) : plan(p) {}
  uint64_t* seen() const { return (uint64_t*)bits.data; }
  uint64_t* kept() const { return seen() + held; }

  // Products in s become scores, -inf where hidden.
  void finish_scores(const Rows& r, const Look& look, float* slope) const {
    if (modified) modify(c, r, look.k0, look.n, s.floats(), bias.floats(), slope);
    if (!look.all) hide(s.floats(), r.lanes, look.n, seen(), -INFINITY);
    if (!look.all && slope) hide(slope, r.lanes, look.n, seen(), 0.0f);
    if (c.drops) survive(c, r, look.k0, look.n, kept());
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
