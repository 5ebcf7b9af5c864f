// Backward: each worker takes a key head (or a chunk of its keys), tile by tile of keys, through all rows of Q, so that
// dK and dV of a tile are sums in fast memory. Scores are computed again from lse. dQ is summed over the tiles in order;
// where several chunks add to one dQ, each keeps its own sum, and the sums are added in order at the end.
#include "pairs.h"

namespace {

constexpr double LOG2E = 1.4426950408889634;

int64_t find_chunks(const Call& c) {
  if (c.chunks) return c.chunks;
  const int64_t pieces = (c.join_batch ? 1 : c.n_members) * (c.join_heads ? 1 : c.heads_k);
  if (pieces == 0) return 1;
  // 16 pieces of work; fewer keys than 512 a chunk are not worth a sum of their own.
  return most<int64_t>(1, least(parts(16, pieces), (c.k_to - c.k_from) / 512));
}

struct Layout {  // where the sums of dQ of each block of rows lie
  const Call& call;
  Buffer starts;
  int64_t blocks = 0;
  explicit Layout(const Call& c) : call(c), starts((c.n_members + 1) * 8) {
    for (int64_t i = 0; i < c.n_members; i++) {
      first(i) = blocks;
      blocks += c.heads_k * cut(c, sequence(c, i)).count;
    }
    first(c.n_members) = blocks;
  }
  int64_t& first(int64_t i) const { return ((int64_t*)starts.data)[i]; }
  int64_t size() const { return call.dim * ROWS; }  // of one block, in floats
};

struct Block {  // rows of Q, with what the pass reads of them
  Rows rows;
  // Columns [dim][lanes] and rows [lanes][dim], of Q and dout, as products want them; sums of dQ [dim][lanes].
  float *q_columns, *dout_columns, *q_rows, *dout_rows, *dq;
  // lse in the unit of the scores, what it lost to rounding, and delta = dout . out - dlse.
  alignas(64) float lse[ROWS], rest[ROWS], delta[ROWS];
};

template <class E, int T>
struct Worker {
  const Call& c;
  const Layout& layout;
  float* dq_parts;
  int64_t dim, dim_v, longest;  // whole vectors of dim; most blocks of one run of rows
  bool modified;
  float unit;  // weights are 2^(unit * score - lse)
  int sign;
  Buffer blocks, columns, rows, sums, s, p, bits, k, v, k_other, dk, dv, narrow_p, narrow_s, pairs_s, bias, slope;
  MatrixTiles matrix_tiles;

  static int64_t most_blocks(const Call& c) {
    int64_t n = 0;
    for (int64_t i = 0; i < c.n_members; i++) n = most(n, cut(c, sequence(c, i)).per_head);
    return n;
  }

  Worker(const Call& call, const Layout& l, float* parts_, int64_t chunk_keys)
      : c(call), layout(l), dq_parts(parts_), dim(round_up(c.dim, VL)), dim_v(round_up(c.dim_v, VL)),
        longest(most_blocks(c)), modified(modifies(c)),
        unit((float)(modified || c.scale == 0 ? LOG2E : std::fabs(c.scale) * LOG2E)),
        sign(modified || c.scale > 0 ? 1 : c.scale < 0 ? -1 : 0), blocks(longest * (int64_t)sizeof(Block)),
        columns(longest * ROWS * (dim + dim_v) * 4 / E::DEPTH), rows(longest * ROWS * (dim + dim_v) * 4 / E::DEPTH),
        sums(dq_parts ? 0 : longest * ROWS * c.dim * 4), s((KEYS + 2) * ROWS * 4), p((KEYS + 2) * ROWS * 4),
        bits(KEYS * 16), k((KEYS + 32) * dim * 4), v(KEYS * dim_v * 4), k_other((KEYS + 32) * dim * 4),
        dk(chunk_keys * dim * 4), dv(chunk_keys * dim_v * 4), narrow_p(E::DEPTH == 2 ? KEYS * ROWS * 2 : 0),
        narrow_s(E::DEPTH == 2 ? KEYS * ROWS * 2 : 0), pairs_s(E::DEPTH == 2 ? KEYS * ROWS * 2 : 0),
        bias(c.bias ? (KEYS + VL) * ROWS * 4 : 0), slope(c.softcap != 0 ? KEYS * ROWS * 4 : 0) {}

  uint64_t* seen() const { return (uint64_t*)bits.data; }
  uint64_t* kept() const { return seen() + KEYS; }
  Block& block(int64_t i) const { return ((Block*)blocks.data)[i]; }

  // One key head of one sequence, keys [begin, end).
  void run(int64_t position, int64_t key_head, int64_t chunk, int64_t begin, int64_t end) {
    const Sequence sequence_ = sequence(c, position);
    const Blocks b = cut(c, sequence_);
    end = least(end, sequence_.k_len);
    if (begin >= end && dq_parts && !c.delta) return;
    const int64_t runs = b.count ? b.count / b.per_head : 0;  // of rows: a head, or short heads together
    const int64_t first = layout.first(position) + key_head * b.count;
    if (runs == 0) write_keys(sequence_, key_head, begin, end, begin, true);
    for (int64_t i = 0; i < runs; i++) {
      for (int64_t j = 0; j < b.per_head; j++) {
        float* dq = dq_parts ? dq_parts + (chunk * layout.blocks + first + i * b.per_head + j) * layout.size()
                             : sums.floats() + j * layout.size();
        prepare(j, make_rows(c, sequence_, key_head, i * b.per_head + j), chunk, dq);
      }
      for (int64_t k0 = begin; k0 < end; k0 += KEYS) {
        const int n = (int)least<int64_t>(KEYS, end - k0);
        const int64_t base = runs > 1 ? begin : k0;  // several runs add to one dK: it is kept for all keys
        key_tile(sequence_, key_head, chunk, k0, n, base, i == 0, b.per_head);
        if (i == runs - 1) write_keys(sequence_, key_head, k0, k0 + n, base, false);
      }
      for (int64_t j = 0; j < b.per_head && !dq_parts; j++) write_queries(block(j).rows, block(j).dq);
    }
  }

  void write_queries(const Rows& r, const float* dq) {
    alignas(64) float scale[ROWS];
    for (float& x : scale) x = (float)c.scale;
    if (c.dq.data) unpack_columns<T>(c.dq, r, c.dim, dq, scale);
  }

  void prepare(int64_t j, const Rows& r, int64_t chunk, float* dq) {
    Block& b = block(j);
    b.rows = r;
    b.dq = dq;
    if (!dq_parts) std::memset(dq, 0, (size_t)layout.size() * 4);
    const int64_t width = (dim + dim_v) * ROWS / E::DEPTH;
    b.q_columns = columns.floats() + j * width;
    b.dout_columns = b.q_columns + dim * ROWS / E::DEPTH;
    b.q_rows = rows.floats() + j * width;
    b.dout_rows = b.q_rows + dim * ROWS / E::DEPTH;
    bool blind[ROWS] = {};
    for (int i = 0; i < r.lanes; i++) {
      b.lse[i] = INFINITY;  // 2^(s - inf) = 0: rows without a key, and lanes without a row, weigh nothing
      b.rest[i] = b.delta[i] = 0;
      if (i >= r.count) continue;
      const int64_t batch = r.sequence.q_batch, row = r.sequence.q_start + r.query(i), head = r.query_head(i);
      const int64_t at_row = batch * c.row_batch + head * c.row_head + row;
      const double lse = (double)c.lse[at_row] + c.rest[at_row], sink = c.sink ? c.sink[head] : 0;
      blind[i] = lse == -INFINITY || (c.sink && lse - sink <= 1e-13 * std::fabs(sink));  // nothing, or nothing but the sink
      float delta = c.dlse && (c.sink || !blind[i]) ? -c.dlse[batch * c.dlse_batch + head * c.dlse_head + row * c.dlse_row] : 0;
      if (!blind[i]) {
        delta += dot(at(c.dout, batch, row, head), at(c.out, batch, row, head), c.dim_v);
        const double in_unit = lse * (modified ? 1.0 : LOG2E);
        b.lse[i] = (float)in_unit;
        b.rest[i] = std::isfinite(in_unit) ? (float)(in_unit - (double)b.lse[i]) : 0.0f;
        b.delta[i] = delta;
      }
      if (c.delta && chunk == 0) c.delta[at_row] = delta;
    }
    pack_columns<E, T>(c.q, r, c.dim, sign, b.q_columns, blind);
    pack_columns<E, T>(c.dout, r, c.dim_v, 1, b.dout_columns, blind);
    pack_rows(c.q, r, c.dim, dim, b.q_rows, blind);
    pack_rows(c.dout, r, c.dim_v, dim_v, b.dout_rows, blind);
  }

  static float dot(const char* a, const char* b, int64_t n) {
    Vec total = all(0.0f);
    int64_t d = 0;
    for (; d + VL <= n; d += VL) total = fma(load_as<T>(a + d * SIZE<T>), load_as<T>(b + d * SIZE<T>), total);
    if (d < n)
      total = fma(load_some<T>(a + d * SIZE<T>, (int)(n - d)), load_some<T>(b + d * SIZE<T>, (int)(n - d)), total);
    return sum(total);
  }

  // Rows as they are: [lanes][ld] floats, or [lanes / 2][ld] pairs of two rows.
  static void pack_rows(const Strided& t, const Rows& r, int64_t width, int64_t ld, float* to, const bool* blind) {
    const auto row = [&](int i) -> const char* {
      if (i >= r.count || blind[i]) return nullptr;
      return at(t, r.sequence.q_batch, r.sequence.q_start + r.query(i), r.query_head(i));
    };
    if constexpr (E::DEPTH == 2) {
#if HAS_PAIRS
      static const uint16_t zeros[16] = {};
      for (int i = 0; i < r.lanes; i += 2)
        for (int64_t d = 0; d < width; d += 16) {
          const char *a = row(i), *b = row(i + 1);
          store(to + i / 2 * ld + d, interleave(a ? (const uint16_t*)a + d : zeros, b ? (const uint16_t*)b + d : zeros,
                                                (int)least<int64_t>(16, width - d)));
        }
#endif
    } else {
      for (int i = 0; i < r.lanes; i++) {
        const char* from = row(i);
        if (from) widen<T>(from, to + i * ld, width);
        std::memset(to + i * ld + (from ? width : 0), 0, (size_t)(ld - (from ? width : 0)) * 4);
      }
    }
  }

  // Keys k0 ... k0 + n - 1 against all prepared blocks. dk and dv hold the keys from `base` on.
  void key_tile(const Sequence& q, int64_t head, int64_t chunk, int64_t k0, int n, int64_t base, bool fresh, int64_t count) {
    float *dk_tile = dk.floats() + (k0 - base) * dim, *dv_tile = dv.floats() + (k0 - base) * dim_v;
    if (fresh) {
      std::memset(dk_tile, 0, (size_t)(n * dim) * 4);
      std::memset(dv_tile, 0, (size_t)(n * dim_v) * 4);
    }
    copy_keys<E, T>(c, c.k, q, head, k0, n, nullptr, c.dim, k.bytes());
    copy_keys<E, T>(c, c.v, q, head, k0, n, nullptr, c.dim_v, v.bytes());
#if HAS_PAIRS
    if (E::DEPTH == 2) turn_keys(c, c.k, q, head, k0, n, nullptr, c.dim, (uint16_t*)k_other.data, KEYS + 32);
#endif
    bool other_is_whole = true;  // k_other holds all keys of the tile
    for (int64_t j = 0; j < count; j++) {
      Block& b = block(j);
      const Rows& r = b.rows;
      int64_t first = most(k0, r.begin);
      int keys = (int)(least(k0 + n, r.end) - first);
      bool holes;
      if (keys <= 0) continue;
      const Sight sight = see(c, r, first, keys, seen(), holes);
      if (sight == NONE) continue;
      const int64_t skip = first - k0;
      products(r, b, skip, keys);
      if (modified) modify(c, r, first, keys, s.floats(), bias.floats(), c.softcap != 0 ? slope.floats() : nullptr);
      if (sight == SOME) hide(s.floats(), r.lanes, keys, seen(), -INFINITY);
      if (sight == SOME && c.softcap != 0) hide(slope.floats(), r.lanes, keys, seen(), 0.0f);
      if (c.drops) survive(c, r, first, keys, kept());
      if (modified) weigh<true>(b, keys, sight);
      else weigh<false>(b, keys, sight);
      if (modified) unwind(b, chunk, first, keys);
      if (c.dv.data) add_to_keys(r, p, narrow_p, b.dout_rows, dim_v, dv_tile + skip * dim_v, keys);
      if (!c.dq.data && !c.dk.data) continue;
      narrow(r, keys);
      if (c.dk.data) add_to_keys(r, s, narrow_s, b.q_rows, dim, dk_tile + skip * dim, keys);
      if (c.dq.data) add_to_queries(q, head, b, first, skip, keys, holes, k0, n, other_is_whole);
    }
  }

  // s = K Q^T, p = V dout^T: [keys][lanes].
  void products(const Rows& r, const Block& b, int64_t skip, int keys) {
    const int64_t element = E::DEPTH == 2 ? 2 : 4, ld = round_up(c.dim, E::DEPTH) * element;
    const int64_t ld_v = round_up(c.dim_v, E::DEPTH) * element;
    const int depth = (int)parts(c.dim, E::DEPTH), depth_v = (int)parts(c.dim_v, E::DEPTH);
    multiply<E, false>({k.bytes() + skip * ld, ld, 4}, right(b.q_columns, r.lanes), s.floats(), r.lanes, keys, r.lanes, depth);
    multiply<E, false>({v.bytes() + skip * ld_v, ld_v, 4}, right(b.dout_columns, r.lanes), p.floats(), r.lanes, keys, r.lanes,
                       depth_v);
  }

  // s becomes dS = P * (dP - delta), by the modified score; p becomes P as dropout leaves it.
  template <bool MODIFIED>
  void weigh(const Block& b, int keys, Sight sight) {
    const int ld = b.rows.lanes;
    const Vec per_unit = all(unit), log2e = all((float)LOG2E), keep = all((float)c.keep_scale);
    for (int i = 0; i < keys; i++)
      for (int j = 0; j < ld; j += VL) {
        float *score = s.floats() + i * ld + j, *product = p.floats() + i * ld + j;
        // In natural units the difference comes first: a score of -3e38 must not overflow by log2(e).
        Vec t = MODIFIED ? load(score) - load(b.lse + j) : fma(load(score), per_unit, all(0.0f) - load(b.lse + j));
        t = t - load(b.rest + j);
        const Vec weight = exp2<E::COARSE>(MODIFIED ? t * log2e : t);
        Vec dp = load(product), left = weight;
        if (c.drops) {
          const Lanes stays = lanes(kept()[i], j / VL);
          dp = select(stays, dp * keep, all(0.0f));
          left = select(stays, weight * keep, all(0.0f));
        }
        Vec ds = weight * (dp - load(b.delta + j));
        if (sight == SOME) ds = select(lanes(seen()[i], j / VL), ds, all(0.0f));  // what is hidden may hold NaN
        store(product, left);
        store(score, ds);
      }
  }

  // dS by the scaled score, and the gradients of bias and slopes on the way.
  void unwind(const Block& b, int64_t chunk, int64_t k0, int keys) {
    const Rows& r = b.rows;
    const int ld = r.lanes;
    const int64_t number = r.sequence.number;
    if (c.dalibi)
      for (int i = 0; i < r.count; i++) {
        float total = 0;
        const int64_t diagonal = r.query(i) + r.sequence.k_len - r.sequence.q_len - k0;
        for (int m = 0; m < keys; m++) total += s.floats()[m * ld + i] * (float)(diagonal > m ? diagonal - m : m - diagonal);
        c.dalibi[(chunk * c.batch + number) * c.heads_q + r.query_head(i)] -= total;
      }
    const auto to = [&](int lane, int64_t key) -> float* {
      return c.dbias + chunk * c.dbias_chunk + number * c.dbias_batch + r.query_head(lane) * c.dbias_head + key * c.dbias_k +
             (c.dbias_kind == BIAS_K ? 0 : r.query(lane));
    };
    if (c.dbias_kind == BIAS_QK)
      for (int m = 0; m < keys; m++) {
        int i = 0;
        for (; r.heads == 1 && i + VL <= r.count; i += VL) store(to(i, k0 + m), load(to(i, k0 + m)) + load(s.floats() + m * ld + i));
        for (; i < r.count; i++) *to(i, k0 + m) += s.floats()[m * ld + i];
      }
    else if (c.dbias_kind != NO_BIAS)
      for (int i = 0; i < r.count; i++)
        for (int m = 0; m < keys; m++) *to(i, k0 + m) += s.floats()[m * ld + i];
    if (c.softcap != 0)
      for (int64_t i = 0; i < keys * ld; i += VL) store(s.floats() + i, load(s.floats() + i) * load(slope.floats() + i));
  }

  // Pairs: dS rounded to bfloat16, by rows and in pairs of keys.
  void narrow(const Rows& r, int keys) {
    (void)r, (void)keys;
#if HAS_PAIRS
    if (E::DEPTH == 1) return;
    const int ld = r.lanes;
    for (int i = 0; i < keys; i += 2)
      for (int j = 0; j < ld; j += VL) {
        const Vec a = load(s.floats() + i * ld + j), b = i + 1 < keys ? load(s.floats() + (i + 1) * ld + j) : all(0.0f);
        to_bf16((uint16_t*)narrow_s.data + i * ld + j, a);
        if (i + 1 < keys) to_bf16((uint16_t*)narrow_s.data + (i + 1) * ld + j, b);
        store(pairs_s.floats() + i / 2 * ld + j, pair_up(a, b));
      }
#endif
  }

  // to [keys][ld] += tile [keys][lanes] * other [lanes][ld].
  void add_to_keys(const Rows& r, const Buffer& tile, const Buffer& narrow_tile, const float* other, int64_t ld, float* to,
                   int keys) {
    (void)narrow_tile;
    if constexpr (E::DEPTH == 2) {
#if HAS_PAIRS
      if (&tile == &p)
        for (int i = 0; i < keys * r.lanes; i += VL) to_bf16((uint16_t*)narrow_p.data + i, load(p.floats() + i));
      multiply<E, true>({narrow_tile.bytes(), r.lanes * 2, 4}, right(other, ld), to, ld, keys, (int)ld, r.lanes / 2);
#endif
    } else multiply<E, true>({tile.bytes(), r.lanes * 4, 4}, right(other, ld), to, ld, keys, (int)ld, r.count);
  }

  // dq [dim][lanes] += K^T dS. Keys that no row sees may hold NaN and count as zeros.
  void add_to_queries(const Sequence& q, int64_t head, Block& b, int64_t first, int64_t skip, int keys, bool holes, int64_t k0,
                      int n, bool& other_is_whole) {
    (void)k0, (void)n, (void)other_is_whole;
    const int64_t lanes_ = b.rows.lanes;
    if constexpr (E::DEPTH == 2) {
#if HAS_PAIRS
      const bool odd = keys % 2 && skip + keys < n;  // what stands beside the last key must not be read
      if (holes || odd) {
        turn_keys(c, c.k, q, head, first, keys, holes ? seen() : nullptr, c.dim, (uint16_t*)k_other.data, KEYS + 32);
        other_is_whole = false;
        skip = 0;
      } else if (!other_is_whole) {
        turn_keys(c, c.k, q, head, k0, n, nullptr, c.dim, (uint16_t*)k_other.data, KEYS + 32);
        other_is_whole = true;
      }
      multiply<E, true>({k_other.bytes() + skip * 2, (KEYS + 32) * 2, 4}, right(pairs_s.floats(), lanes_), b.dq, lanes_,
                        (int)c.dim, (int)lanes_, (keys + 1) / 2);
#endif
    } else {
      const char* from = k.bytes() + skip * c.dim * 4;
      if (holes) {
        gather<T>(c, c.k, q, head, first, keys, seen(), c.dim, k_other.floats(), c.dim);
        from = k_other.bytes();
      }
      multiply<E, true>({from, 4, c.dim * 4}, right(s.floats(), lanes_), b.dq, lanes_, (int)c.dim, (int)lanes_, keys);
    }
  }

  void write_keys(const Sequence& q, int64_t head, int64_t begin, int64_t end, int64_t base, bool zero) {
    for (int64_t key = begin; key < end; key++) {
      if (c.dk.data) write_row(at(c.dk, q.k_batch, q.k_start + key, head), dk.floats() + (key - base) * dim, c.dim, (float)c.scale, zero);
      if (c.dv.data) write_row(at(c.dv, q.k_batch, q.k_start + key, head), dv.floats() + (key - base) * dim_v, c.dim_v, 1.0f, zero);
    }
  }

  static void write_row(char* to, const float* from, int64_t n, float scale, bool zero) {
    for (int64_t d = 0; d < n; d += VL) {
      const Vec x = zero ? all(0.0f) : load(from + d) * all(scale);
      if (d + VL <= n) store_as<T>(to + d * SIZE<T>, x);
      else store_some<T>(to + d * SIZE<T>, x, (int)(n - d));
    }
  }
};

template <class E, int T>
void backward(const Call& c) {
  const Layout layout(c);
  const int64_t chunks = find_chunks(c), span = c.k_to - c.k_from;
  const int64_t chunk_keys = most<int64_t>(round_up(parts(span, chunks), KEYS), KEYS), size = layout.size();
  const Buffer own(chunks > 1 && !c.dq_parts ? chunks * layout.blocks * size * 4 : 0);
  float* dq_parts = c.dq_parts ? c.dq_parts : own.floats();
  const int64_t sequences = c.join_batch ? 1 : c.n_members, heads = c.join_heads ? 1 : c.heads_k;
  const int64_t at_once = c.join_batch ? c.n_members : 1, heads_at_once = c.join_heads ? c.heads_k : 1;
#pragma omp parallel num_threads((int)c.threads)
  {
    if (own.data) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < chunks * layout.blocks; i++) std::memset(own.floats() + i * size, 0, (size_t)size * 4);
    }
    Worker<E, T> worker(c, layout, dq_parts, c.heads_q / most<int64_t>(c.heads_k, 1) > 1 ? chunk_keys : KEYS);
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < sequences * heads * chunks; n++) {
      const int64_t chunk = n % chunks, begin = c.k_from + chunk * chunk_keys;
      for (int64_t i = 0; i < at_once; i++)
        for (int64_t j = 0; j < heads_at_once; j++)
          worker.run(n / chunks / heads + i, n / chunks % heads + j, chunk, begin, least(begin + chunk_keys, c.k_to));
    }
    if (dq_parts && c.dq.data && (c.last || own.data)) {
#pragma omp for schedule(static)
      for (int64_t n = 0; n < layout.blocks; n++) {
        float* total = dq_parts + n * size;
        for (int64_t chunk = 1; chunk < chunks; chunk++)
          for (int64_t i = 0; i < size; i += VL)
            store(total + i, load(total + i) + load(total + chunk * layout.blocks * size + i));
        int64_t i = 0;
        while (layout.first(i + 1) <= n) i++;
        const Sequence s = sequence(c, i);
        const int64_t per_head = cut(c, s).count, within = n - layout.first(i);
        worker.write_queries(make_rows(c, s, within / per_head, within % per_head), total);
      }
    }
  }
}

}  // namespace

// What the caller provides room for: chunks of the keys; floats of dq_parts.
extern "C" __attribute__((visibility("default"))) void onchip_backward_sizes(const Call* call, int64_t* sizes) {
  const Layout layout(*call);
  sizes[0] = find_chunks(*call);
  sizes[1] = sizes[0] * layout.blocks * layout.size();
}

extern "C" __attribute__((visibility("default"))) void onchip_backward(const Call* call) {
  switch (call->dtype) {
    case FLOAT: return backward<Floats, FLOAT>(*call);
#if HAS_PAIRS
    case BF16: return backward<Pairs, BF16>(*call);
#else
    case BF16: return backward<Floats, BF16>(*call);
#endif
    case FP16: return backward<Floats, FP16>(*call);
  }
}
