// Backward: each worker takes a key head (or a chunk of its keys), tile by tile of keys, through all rows of Q, so that
// dK and dV of a tile are sums in fast memory. Scores are computed again from lse. dQ is summed over the tiles in order;
// where several chunks add to one dQ, each keeps its own sum, and the sums are added in order at the end.
#include "plan.h"

namespace {

int64_t find_chunks(const Call& c) {
  if (c.chunks) return c.chunks;
  const int64_t pieces = (c.join_batch ? 1 : c.n_members) * (c.join_heads ? 1 : c.heads_k);
  // 16 pieces of work; fewer keys than 512 a chunk are not worth a sum of their own.
  return most<int64_t>(1, least(parts(16, most<int64_t>(pieces, 1)), (c.k_to - c.k_from) / 512));
}

int64_t dq_size(const Call& c) { return c.dim * ROWS; }  // floats of the sum of a block

struct Block {  // rows of Q, with what the pass reads of them
  Rows rows;
  float *q, *dout;  // as products want them: columns [dim][lanes], then rows [lanes][dim]
  float* dq;        // sums [dim][lanes]
  // lse in the unit of the scores, what it lost to rounding, and delta = dout . out - dlse.
  alignas(64) float lse[ROWS], rest[ROWS], delta[ROWS];
};

template <int T>
struct Worker : Tile {
  using E = Products<T>;
  static constexpr int64_t OF_PAIRS = E::DEPTH == 2 ? 2 : 0;  // bytes of a number in what only products of pairs need
  float* const dq_parts;
  const int64_t chunk_keys, longest = parts(c.q_to - c.q_from, ROWS);  // most blocks of a run of rows
  const int64_t dim = round_up(c.dim, VL), dim_v = round_up(c.dim_v, VL);  // whole vectors of them
  const int64_t width = dim * ROWS / E::DEPTH, width_v = dim_v * ROWS / E::DEPTH;  // floats of a block of Q, of dout
  const Buffer blocks{longest * (int64_t)sizeof(Block)}, packed{longest * 2 * (width + width_v) * 4};
  const Buffer sums{dq_parts ? 0 : longest * dq_size(c) * 4}, dk{chunk_keys * dim * 4}, dv{chunk_keys * dim_v * 4};
  const Buffer k{KEYS * dim * 4}, v{KEYS * dim_v * 4}, k_columns{(KEYS + 2 * VL) * dim * OF_PAIRS}, own{KEYS * dim * 4};
  const Buffer p{KEYS * ROWS * 4}, narrow_{KEYS * ROWS * OF_PAIRS}, pairs{KEYS * ROWS * OF_PAIRS};
  const Buffer slope{c.softcap != 0 ? KEYS * ROWS * 4 : 0};

  Worker(const Plan& p, float* parts_, int64_t keys) : Tile(p), dq_parts(parts_), chunk_keys(keys) {}
  Block& block(int64_t i) const { return ((Block*)blocks.data)[i]; }

  // One key head of one sequence, keys [begin, end).
  void run(int64_t position, int64_t key_head, int64_t chunk, int64_t begin, int64_t end) {
    const Sequence of = sequence(c, position);
    const Source of_k = keys_of(c, of, key_head), of_v = values_of(c, of, key_head);
    const Blocks b = cut(c, of);
    end = least(end, of.k_len);
    if (begin >= end && dq_parts && !c.delta) return;
    const int64_t runs = b.count ? b.count / b.per_head : 1;  // of rows: a head, short heads together, or none
    const int64_t first = plan.first(position, 0) + key_head * b.count;
    for (int64_t i = 0; i < runs; i++) {
      for (int64_t j = 0; j < b.per_head; j++) {
        float* dq = dq_parts ? dq_parts + (chunk * plan.blocks + first + i * b.per_head + j) * dq_size(c)
                             : sums.floats() + j * dq_size(c);
        prepare(j, plan.rows(first + i * b.per_head + j), chunk, dq);
      }
      for (int64_t k0 = begin; k0 < end; k0 += KEYS) {
        const int n = (int)least<int64_t>(KEYS, end - k0);
        const int64_t base = runs > 1 ? begin : k0;  // several runs add to one dK: it is kept for all keys
        float *dk_tile = dk.floats() + (k0 - base) * dim, *dv_tile = dv.floats() + (k0 - base) * dim_v;
        if (i == 0) std::memset(dk_tile, 0, (size_t)(n * dim) * 4), std::memset(dv_tile, 0, (size_t)(n * dim_v) * 4);
        key_tile(of_k, of_v, chunk, k0, n, b.per_head, dk_tile, dv_tile);
        if (i < runs - 1) continue;
        write_keys(c.dk, of_k, k0, n, dk_tile, dim, (float)c.scale);
        write_keys(c.dv, of_v, k0, n, dv_tile, dim_v, 1.0f);
      }
      for (int64_t j = 0; j < b.per_head && !dq_parts; j++) write_queries(block(j).rows, block(j).dq);
    }
  }

  void write_queries(const Rows& r, const float* dq) {
    if (c.dq.data) Read<T>::unpack_columns(c.dq, r, c.dim, dq, [&](int64_t) { return all((float)c.scale); });
  }

  void prepare(int64_t j, const Rows& r, int64_t chunk, float* dq) {
    float* to = packed.floats() + j * 2 * (width + width_v);
    Block& b = block(j) = {r, to, to + 2 * width, dq};
    if (!dq_parts) std::memset(dq, 0, (size_t)dq_size(c) * 4);
    const char *q[ROWS] = {}, *dout[ROWS] = {};
    for (int i = 0; i < r.lanes; i++) {
      b.lse[i] = INFINITY;  // 2^(s - inf) = 0: rows without a key, and lanes without a row, weigh nothing
      if (i >= r.count) continue;
      const int64_t row = r.statistic(c, i);
      const double lse = (double)c.lse[row] + c.rest[row], sink = c.sink ? c.sink[r.query_head(i)] : 0;
      // No key, or nothing but the sink.
      const bool blind = lse == -INFINITY || (c.sink && lse - sink <= 1e-13 * std::fabs(sink));
      float delta = c.dlse && (c.sink || !blind) ? -c.dlse[row] : 0;
      if (!blind) {
        q[i] = r.row(c.q, i);
        dout[i] = r.row(c.dout, i);
        delta += dot(dout[i], r.row(c.out, i), c.dim_v);
        const double in_log2 = lse * LOG2E;
        b.lse[i] = modified ? c.lse[row] : (float)in_log2;
        b.rest[i] = modified ? c.rest[row] : std::isfinite(in_log2) ? (float)(in_log2 - (double)b.lse[i]) : 0.0f;
        b.delta[i] = delta;
      }
      if (c.delta && chunk == 0) c.delta[row] = delta;
    }
    pack(q, r.lanes, c.dim, dim, b.q);
    pack(dout, r.lanes, c.dim_v, dim_v, b.dout);
  }

  static float dot(const char* a, const char* b, int64_t n) {
    Vec total = all(0.0f);
    for (int64_t d = 0; d < n; d += VL)
      total = fma(load_some<T>(a + d * SIZE<T>, n - d), load_some<T>(b + d * SIZE<T>, n - d), total);
    float sum = 0;
    for (int i = 0; i < VL; i++) sum += total[i];
    return sum;
  }

  // Zeros from null; rows are [lanes][ld] floats, or [lanes / 2][ld] pairs of two.
  static void pack(const char* const* from, int lanes, int64_t n, int64_t ld, float* to) {
    Read<T>::pack_columns(from, lanes, n, to);
    to += ld * ROWS / E::DEPTH;
    for (int i = 0; i < lanes; i += E::DEPTH)
      if (E::DEPTH == 1) Read<T>::copy_row(from[i], n, (char*)(to + i * ld), ld);
      else
        for (int64_t d = 0; d < n; d += VL) store(to + i / 2 * ld + d, interleave(from[i], from[i + 1], d, n));
  }

  // Keys k0 ... k0 + n - 1 against the prepared blocks.
  void key_tile(const Source& of_k, const Source& of_v, int64_t chunk, int64_t k0, int n, int64_t count, float* dk_tile,
                float* dv_tile) {
    const KeyTile k_rows = Read<T>::copy_keys(of_k, k0, n, nullptr, k, round_up(c.dim, E::DEPTH));
    const KeyTile v_rows = Read<T>::copy_keys(of_v, k0, n, nullptr, v, round_up(c.dim_v, E::DEPTH));
    KeyTile columns = k_rows;  // rows of floats are their own
    if (E::DEPTH == 2) columns = Read<T>::copy_columns(of_k, k0, n, nullptr, k_columns);
    for (int64_t j = 0; j < count; j++) {
      const Block& b = block(j);
      const Rows& r = b.rows;
      const Look look = see(c, r, k0, k0 + n, seen());
      if (look.n == 0) continue;
      const int64_t skip = look.k0 - k0;
      Read<T>::product(k_rows, skip, c.dim, b.q, s.floats(), r.lanes, look.n);
      Read<T>::product(v_rows, skip, c.dim_v, b.dout, p.floats(), r.lanes, look.n);
      finish_scores(r, look, slope.floats());
      weigh(b, look);
      if (modified) unwind(b, chunk, look.k0, look.n);
      const int size = r.lanes * look.n;
      if (c.dv.data) add_to_keys(r, narrow(p, size), b.dout + width_v, dim_v, dv_tile + skip * dim_v, look.n);
      if (!c.dq.data && !c.dk.data) continue;
      const char* ds = narrow(s, size);
      if (c.dk.data) add_to_keys(r, ds, b.q + width, dim, dk_tile + skip * dim, look.n);
      if (c.dq.data) add_to_queries(b, ds, Read<T>::as_columns(columns, skip, n, of_k, look, seen(), own), look.n);
    }
  }

  // s becomes dS = P * (dP - delta), by the modified score; p becomes P as dropout leaves it.
  void weigh(const Block& b, const Look& look) {
    const int ld = b.rows.lanes;
    const Vec per_unit = all(unit), log2e = all((float)LOG2E), keep = all((float)c.keep_scale);
    for (int i = 0; i < look.n; i++)
      for (int j = 0; j < ld; j += VL) {
        float *score = s.floats() + i * ld + j, *product = p.floats() + i * ld + j;
        // In natural units the difference comes first: a score of -3e38 must not overflow by log2(e).
        Vec t = modified ? load(score) - load(b.lse + j) : fma(load(score), per_unit, all(0.0f) - load(b.lse + j));
        t = t - load(b.rest + j);
        const Vec weight = exp2<E::DEPTH == 2>(modified ? t * log2e : t);
        Vec dp = load(product), left = weight;
        if (c.drops) {
          const Lanes stays = lanes(kept()[i], j / VL);
          dp = select(stays, dp * keep, all(0.0f));
          left = select(stays, weight * keep, all(0.0f));
        }
        Vec ds = weight * (dp - load(b.delta + j));
        if (!look.all) ds = select(lanes(seen()[i], j / VL), ds, all(0.0f));  // what is hidden may hold NaN
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

  // A tile as products want it: as it is, or rounded to bfloat16.
  const char* narrow(const Buffer& tile, int n) const {
    if (E::DEPTH == 1) return tile.bytes();
    for (int i = 0; i < n; i += VL) to_bf16((uint16_t*)narrow_.data + i, load(tile.floats() + i));
    return narrow_.bytes();
  }

  // to [keys][ld] += tile [keys][lanes] * rows [lanes][ld].
  static void add_to_keys(const Rows& r, const char* tile, const float* rows, int64_t ld, float* to, int keys) {
    multiply<E, true>({tile, r.lanes * E::BYTES, 4}, matrix(rows, ld), to, ld, keys, ld, parts(r.count, E::DEPTH));
  }

  // dq [dim][lanes] += K^T dS.
  void add_to_queries(const Block& b, const char* ds, Matrix k_, int keys) {
    const int64_t lanes = b.rows.lanes;
    if (E::DEPTH == 2) {
      for (int i = 0; i < keys; i += 2)
        for (int64_t j = 0; j < lanes; j += VL) {
          const char* row = ds + (i * lanes + j) * 2;
          const Ints after = i + 1 < keys ? halves(row + lanes * 2) : Ints{};
          store(pairs.floats() + i / 2 * lanes + j, (Vec)(halves(row) | after << 16));
        }
      ds = pairs.bytes();
    }
    multiply<E, true>(k_, {ds, lanes * 4}, b.dq, lanes, c.dim, lanes, parts(keys, E::DEPTH));
  }

  // n keys' sums [n][ld] to rows of a tensor.
  static void write_keys(const Strided& t, const Source& of, int64_t k0, int n, const float* from, int64_t ld, float scale) {
    for (int i = 0; i < n && t.data; i++, from += ld) {
      char* to = at(t, of.s.k_batch, of.s.k_start + k0 + i, of.head);
      for (int64_t d = 0; d < of.dim; d += VL) store_some<T>(to + d * SIZE<T>, load(from + d) * all(scale), of.dim - d);
    }
  }
};

int64_t keys_of_chunk(const Call& c) { return most<int64_t>(round_up(parts(c.k_to - c.k_from, find_chunks(c)), KEYS), KEYS); }
int64_t keys_held(const Call& c) { return c.heads_q > c.heads_k ? keys_of_chunk(c) : KEYS; }  // of dK and dV, by a worker
int64_t owned_of(const Plan& plan) {  // blocks of dq whose sums the pass keeps itself
  const int64_t chunks = find_chunks(plan.call);
  return chunks > 1 && !plan.call.dq_parts ? chunks * plan.blocks : 0;
}

template <int T>
int64_t memory(const Call& c) {  // what `backward` makes, by making it once and one of its workers
  const int64_t start = made;
  const Plan plan(c);
  const Buffer own(owned_of(plan) * dq_size(c) * 4);
  const int64_t shared = made - start;
  const Worker<T> worker(plan, c.dq_parts ? c.dq_parts : own.floats(), keys_held(c));
  return shared + c.threads * (made - start - shared);
}

template <int T>
void backward(const Call& c) {
  const Plan plan(c);
  const int64_t chunks = find_chunks(c), chunk_keys = keys_of_chunk(c), size = dq_size(c), owned = owned_of(plan);
  const Buffer own(owned * size * 4);
  float* dq_parts = c.dq_parts ? c.dq_parts : own.floats();
  const int64_t sequences = c.join_batch ? 1 : c.n_members, heads = c.join_heads ? 1 : c.heads_k;
  const int64_t at_once = c.join_batch ? c.n_members : 1, heads_at_once = c.join_heads ? c.heads_k : 1;
#pragma omp parallel num_threads((int)c.threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < owned; i++) std::memset(own.floats() + i * size, 0, (size_t)size * 4);
    Worker<T> worker(plan, dq_parts, keys_held(c));
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
EXPORT void onchip_backward_sizes(const Call* call, int64_t* sizes) {
  sizes[0] = find_chunks(*call);
  sizes[1] = sizes[0] * Plan(*call).blocks * dq_size(*call);
}

EXPORT void onchip_backward(const Call* call) {
  constexpr void (*by_dtype[])(const Call&) = {backward<FLOAT>, backward<BF16>, backward<FP16>};
  by_dtype[call->dtype](*call);
}

EXPORT int64_t onchip_backward_memory(const Call* call) {  // bytes that onchip_backward takes
  constexpr int64_t (*by_dtype[])(const Call&) = {memory<FLOAT>, memory<BF16>, memory<FP16>};
  return by_dtype[call->dtype](*call);
}
