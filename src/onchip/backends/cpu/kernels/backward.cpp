// Backward: each worker takes a key head (or a chunk of its keys), tile by tile of keys, through all rows of Q, so that
// dK and dV of a tile are sums in fast memory. Scores are computed again from lse. dQ is summed over the tiles in order;
// where several chunks add to one dQ, each keeps its own sum, and the sums are added in order at the end.
#include "pairs.h"
#include "plan.h"

namespace {

int64_t find_chunks(const Call& c) {
  if (c.chunks) return c.chunks;
  const int64_t pieces = (c.join_batch ? 1 : c.n_members) * (c.join_heads ? 1 : c.heads_k);
  if (pieces == 0) return 1;
  // 16 pieces of work; fewer keys than 512 a chunk are not worth a sum of their own.
  return most<int64_t>(1, least(parts(16, pieces), (c.k_to - c.k_from) / 512));
}

int64_t dq_size(const Call& c) { return c.dim * ROWS; }  // floats of the sum of a block

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
  const Plan& plan;
  float* dq_parts;
  int64_t dim, dim_v, longest;  // whole vectors of dim; most blocks of one run of rows
  const Units units;
  Buffer blocks, columns, rows, sums, s, p, bits, k, v, k_columns, own, dk, dv, narrow_p, narrow_s, pairs_s, bias, slope;

  static int64_t most_blocks(const Call& c) {
    int64_t n = 0;
    for (int64_t i = 0; i < c.n_members; i++) n = most(n, cut(c, sequence(c, i)).per_head);
    return n;
  }

  Worker(const Call& call, const Plan& p_, float* parts_, int64_t chunk_keys)
      : c(call), plan(p_), dq_parts(parts_), dim(round_up(c.dim, VL)), dim_v(round_up(c.dim_v, VL)),
        longest(most_blocks(c)), units(call), blocks(longest * (int64_t)sizeof(Block)),
        columns(longest * ROWS * (dim + dim_v) * 4 / E::DEPTH), rows(longest * ROWS * (dim + dim_v) * 4 / E::DEPTH),
        sums(dq_parts ? 0 : longest * ROWS * c.dim * 4), s((KEYS + 2) * ROWS * 4), p((KEYS + 2) * ROWS * 4),
        bits(KEYS * 16), k((KEYS + 32) * dim * 4), v(KEYS * dim_v * 4), k_columns(E::DEPTH == 2 ? (KEYS + 32) * dim * 2 : 0), own((KEYS + 32) * dim * 4),
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
    const int64_t first = plan.first(position, 0) + key_head * b.count;
    if (runs == 0) write_keys(sequence_, key_head, begin, end, begin, true);
    for (int64_t i = 0; i < runs; i++) {
      for (int64_t j = 0; j < b.per_head; j++) {
        float* dq = dq_parts ? dq_parts + (chunk * plan.blocks + first + i * b.per_head + j) * dq_size(c)
                             : sums.floats() + j * dq_size(c);
        prepare(j, plan.rows(first + i * b.per_head + j), chunk, dq);
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
    if (!dq_parts) std::memset(dq, 0, (size_t)dq_size(c) * 4);
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
        const double in_log2 = lse * LOG2E;
        b.lse[i] = units.modified ? c.lse[at_row] : (float)in_log2;
        b.rest[i] = units.modified ? c.rest[at_row] : std::isfinite(in_log2) ? (float)(in_log2 - (double)b.lse[i]) : 0.0f;
        b.delta[i] = delta;
      }
      if (c.delta && chunk == 0) c.delta[at_row] = delta;
    }
    pack_columns<E, T>(c.q, r, c.dim, b.q_columns, blind);
    pack_columns<E, T>(c.dout, r, c.dim_v, b.dout_columns, blind);
    pack_rows(c.q, r, c.dim, dim, b.q_rows, blind);
    pack_rows(c.dout, r, c.dim_v, dim_v, b.dout_rows, blind);
  }

  static float dot(const char* a, const char* b, int64_t n) {
    Vec total = all(0.0f);
    for (int64_t d = 0; d < n; d += VL)
      total = fma(load_some<T>(a + d * SIZE<T>, n - d), load_some<T>(b + d * SIZE<T>, n - d), total);
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
                                                least<int64_t>(16, width - d)));
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
    copy_keys<E, T>(c, c.k, q, head, k0, n, nullptr, c.dim, k.bytes(), round_up(c.dim, E::DEPTH));
    copy_keys<E, T>(c, c.v, q, head, k0, n, nullptr, c.dim_v, v.bytes(), round_up(c.dim_v, E::DEPTH));
    if (E::DEPTH == 2) copy_columns<E, T>(c, c.k, q, head, k0, n, nullptr, c.dim, k_columns);
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
      if (units.modified) modify(c, r, first, keys, s.floats(), bias.floats(), c.softcap != 0 ? slope.floats() : nullptr);
      if (sight == SOME) hide(s.floats(), r.lanes, keys, seen(), -INFINITY);
      if (sight == SOME && c.softcap != 0) hide(slope.floats(), r.lanes, keys, seen(), 0.0f);
      if (c.drops) survive(c, r, first, keys, kept());
      if (units.modified) weigh<true>(b, keys, sight);
      else weigh<false>(b, keys, sight);
      if (units.modified) unwind(b, chunk, first, keys);
      if (c.dv.data) add_to_keys(r, p, narrow_p, b.dout_rows, dim_v, dv_tile + skip * dim_v, keys);
      if (!c.dq.data && !c.dk.data) continue;
      narrow(r, keys);
      if (c.dk.data) add_to_keys(r, s, narrow_s, b.q_rows, dim, dk_tile + skip * dim, keys);
      if (c.dq.data) add_to_queries(q, head, b, first, skip, keys, holes, n);
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
    const Vec per_unit = all(units.unit), log2e = all((float)LOG2E), keep = all((float)c.keep_scale);
    for (int i = 0; i < keys; i++)
      for (int j = 0; j < ld; j += VL) {
        float *score = s.floats() + i * ld + j, *product = p.floats() + i * ld + j;
        // In natural units the difference comes first: a score of -3e38 must not overflow by log2(e).
        Vec t = MODIFIED ? load(score) - load(b.lse + j) : fma(load(score), per_unit, all(0.0f) - load(b.lse + j));
        t = t - load(b.rest + j);
        const Vec weight = exp2<E::DEPTH == 2>(MODIFIED ? t * log2e : t);
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
    for (int m = 0; c.dbias && m < keys; m++) {
      const float* ds = s.floats() + m * ld;
      const auto to = [&](int lane) {
        return c.dbias + chunk * c.dbias_chunk + number * c.dbias_batch + r.query_head(lane) * c.dbias_head +
               (k0 + m) * c.dbias_k + r.query(lane) * c.dbias_q;
      };
      int i = 0;
      for (; r.heads == 1 && c.dbias_q && i + VL <= r.count; i += VL) store(to(i), load(to(i)) + load(ds + i));
      for (; i < r.count; i++) *to(i) += ds[i];
    }
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
      multiply<E, true>({narrow_tile.bytes(), r.lanes * 2, 4}, right(other, ld), to, ld, keys, ld, r.lanes / 2);
#endif
    } else multiply<E, true>({tile.bytes(), r.lanes * 4, 4}, right(other, ld), to, ld, keys, ld, r.count);
  }

  // dq [dim][lanes] += K^T dS. Keys that no row sees may hold NaN and count as zeros.
  void add_to_queries(const Sequence& q, int64_t head, Block& b, int64_t first, int64_t skip, int keys, bool holes, int n) {
    const int64_t ld = b.rows.lanes;
    Left left = as_columns<E>(E::DEPTH == 2 ? KeyTile{k_columns.bytes(), (KEYS + 32) * 2} : KeyTile{k.bytes(), c.dim * 4}, skip);
    if (holes || (keys % E::DEPTH && skip + keys < n))  // what stands beside the last key must not be read
      left = as_columns<E>(copy_columns<E, T>(c, c.k, q, head, first, keys, holes ? seen() : nullptr, c.dim, own), 0);
    multiply<E, true>(left, right(E::DEPTH == 2 ? pairs_s.floats() : s.floats(), ld), b.dq, ld, c.dim, ld, parts(keys, E::DEPTH));
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
      store_some<T>(to + d * SIZE<T>, x, n - d);
    }
  }
};

template <class E, int T>
void backward(const Call& c) {
  const Plan plan(c);
  const int64_t chunks = find_chunks(c), span = c.k_to - c.k_from;
  const int64_t chunk_keys = most<int64_t>(round_up(parts(span, chunks), KEYS), KEYS), size = dq_size(c);
  const Buffer own(chunks > 1 && !c.dq_parts ? chunks * plan.blocks * size * 4 : 0);
  float* dq_parts = c.dq_parts ? c.dq_parts : own.floats();
  const int64_t sequences = c.join_batch ? 1 : c.n_members, heads = c.join_heads ? 1 : c.heads_k;
  const int64_t at_once = c.join_batch ? c.n_members : 1, heads_at_once = c.join_heads ? c.heads_k : 1;
#pragma omp parallel num_threads((int)c.threads)
  {
    if (own.data) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < chunks * plan.blocks; i++) std::memset(own.floats() + i * size, 0, (size_t)size * 4);
    }
    Worker<E, T> worker(c, plan, dq_parts, c.heads_q / most<int64_t>(c.heads_k, 1) > 1 ? chunk_keys : KEYS);
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < sequences * heads * chunks; n++) {
      const int64_t chunk = n % chunks, begin = c.k_from + chunk * chunk_keys;
      for (int64_t i = 0; i < at_once; i++)
        for (int64_t j = 0; j < heads_at_once; j++)
          worker.run(n / chunks / heads + i, n / chunks % heads + j, chunk, begin, least(begin + chunk_keys, c.k_to));
    }
    if (dq_parts && c.dq.data && (c.last || own.data)) {
#pragma omp for schedule(static)
      for (int64_t n = 0; n < plan.blocks; n++) {
        float* total = dq_parts + n * size;
        for (int64_t chunk = 1; chunk < chunks; chunk++)
          for (int64_t i = 0; i < size; i += VL)
            store(total + i, load(total + i) + load(total + chunk * plan.blocks * size + i));
        worker.write_queries(plan.rows(n), total);
      }
    }
  }
}

}  // namespace

// What the caller provides room for: chunks of the keys; floats of dq_parts.
extern "C" __attribute__((visibility("default"))) void onchip_backward_sizes(const Call* call, int64_t* sizes) {
  sizes[0] = find_chunks(*call);
  sizes[1] = sizes[0] * Plan(*call).blocks * dq_size(*call);
}

extern "C" __attribute__((visibility("default"))) void onchip_backward(const Call* call) {
  switch (call->dtype) {
    case FLOAT: return backward<Floats, FLOAT>(*call);
    case BF16: return backward<Pairs, BF16>(*call);
    case FP16: return backward<Floats, FP16>(*call);
  }
}
