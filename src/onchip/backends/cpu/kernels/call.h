// What the Python side states of a call: `arguments.py` mirrors it field by field, each of 8 bytes.
#pragma once

#include "vec.h"

struct Strided {  // strides in bytes; the last dim is contiguous
  char* data;
  int64_t batch, row, head;
};

constexpr int64_t UNBOUNDED = INT64_MAX / 2;  // a side of a band; sums with positions do not overflow

struct Call {
  Strided q, k, v, out, dout, dq, dk, dv;
  // Row statistics (batch, heads_q, seqlen_q), or packed (heads_q, total): strides in floats, rows contiguous.
  float *lse, *rest, *delta;
  const float* dlse;
  int64_t row_batch, row_head;

  int64_t dtype, batch, heads_q, heads_k, dim, dim_v, seqlen_q, seqlen_k;
  // Sequences, each list null where the default holds: members (all), starts (0), lengths (seqlen), k_index (its number).
  int64_t n_members;
  const int64_t *members, *q_start, *q_len, *k_start, *k_len, *k_index;
  const int32_t* pages;  // (batch, pages_row): k and v are pages of page_size rows
  int64_t pages_row, page_size;
  int64_t q_from, q_to, k_from, k_to;  // the part of every sequence that this call computes

  // Mask: all that are present must allow a pair.
  int64_t left, right, top_left, top_right;  // band, as rules.Band
  const int32_t *lo, *hi;                    // keys [lo, hi) of each query (batch | 1, seqlen_q)
  int64_t interval_batch;
  const uint8_t* seen;  // bytes 0 or 1 of pairs from (q_from, k_from) on, by position in members; strides 0 = shared
  int64_t seen_batch, seen_head, seen_q, seen_k;
  const uint8_t* blocks;  // a byte a block of block_m x block_n pairs
  int64_t blocks_batch, blocks_head, blocks_row, block_m, block_n;

  // Score.
  double scale, softcap;  // softcap 0: none
  const float* alibi;
  int64_t alibi_batch, alibi_head;
  const char* bias;  // strides in bytes
  int64_t bias_dtype, bias_batch, bias_head, bias_q, bias_k;
  const float* sink;
  int64_t drops, threshold, seed;  // drops: whether there is dropout; a word below threshold (up to 2^32) drops its pair
  double keep_scale;

  // Gradients of the score, null where not wanted. Strides in floats, 0 where summed over; dbias_q is 0 or 1.
  float *dbias, *dalibi;  // dalibi (chunks, batch, heads_q)
  int64_t dbias_chunk, dbias_batch, dbias_head, dbias_q, dbias_k;
  int64_t join_batch, join_heads;  // whether one worker takes all sequences, or all heads, in turn: they share a dbias

  int64_t splits, chunks;  // of the keys: forward, backward; results depend on them, never on threads
  float* dq_parts;         // (chunks, ...) sums of dq where there are several chunks or calls, else null
  int64_t last;            // whether this call is the last to add to dq_parts
  int64_t threads;
  int64_t recomputed;  // whether a backward pass follows: its scores are those of whole tiles, to the last bit
};

#define EXPORT extern "C" __attribute__((visibility("default")))

INLINE int64_t size_of(int64_t dtype) { return dtype == FLOAT ? 4 : 2; }

struct Sequence {  // `number` is also the batch of its queries, whose stride is 0 where sequences are packed
  int64_t position, number, q_start, q_len, k_start, k_len, k_batch;
};

INLINE Sequence sequence(const Call& c, int64_t position) {
  const int64_t n = c.members ? c.members[position] : position;
  const auto of = [n](const int64_t* list, int64_t otherwise) { return list ? list[n] : otherwise; };
  return {position, n, of(c.q_start, 0), of(c.q_len, c.seqlen_q), of(c.k_start, 0), of(c.k_len, c.seqlen_k), of(c.k_index, n)};
}

// Where row `row` of a sequence and head lies.
INLINE char* at(const Strided& t, int64_t batch, int64_t row, int64_t head) {
  return t.data + batch * t.batch + row * t.row + head * t.head;
}

inline thread_local int64_t made = 0;  // bytes of the buffers that this thread has made so far, for `..._memory`

// Memory of one thread; plain so that no template of the standard library is compiled for one instruction set and
// picked by the linker for another.
struct Buffer {
  void *own = nullptr, *data = nullptr;
  explicit Buffer(int64_t bytes) {
    made += most<int64_t>(bytes, 0);
    if (bytes <= 0) return;
#if defined(ONCHIP_POISON)  // sanitizer builds see what reads past the last byte, and what is read before it is written is NaN
    if (!posix_memalign(&own, 64, (size_t)bytes)) std::memset(own, 0xFF, (size_t)bytes);
    data = own;
#else  // posix_memalign cuts each block out of a larger one, at twice the time
    own = std::malloc((size_t)bytes + 63);
    data = (void*)(((uintptr_t)own + 63) & ~(uintptr_t)63);
#endif
  }
  ~Buffer() { std::free(own); }
  Buffer(const Buffer&) = delete;
  float* floats() const { return (float*)data; }
  char* bytes() const { return (char*)data; }
};
