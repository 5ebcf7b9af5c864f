// Forward: each worker takes a block of rows of Q through the keys (or a split of them) with an online softmax, one row
// a lane. Few rows (decoding) take dot products instead, whose lanes run along dim, so that none stands idle.
#include "plan.h"

namespace {

template <int T>
struct Worker : Tile {
  using E = Products<T>;
  const int64_t dim = round_up(c.dim, VL * E::DEPTH), dim_v = round_up(c.dim_v, VL);  // whole vectors of them
  const Buffer parts_{plan.together * (int64_t)sizeof(Part)}, q{plan.together * dim * ROWS * 4};
  const Buffer sums{plan.together * State::size(c) * 4}, spare{dim_v * ROWS * 4}, decay{ROWS * 4};
  const Buffer keys{held * dim * 4}, values{KEYS * dim_v * 4}, own{KEYS * most(dim, dim_v) * 4};
  KeyTile k_tile, v_tile;  // of the tile that is computed; V for pairs as columns
  int64_t next;            // the first key of the tile after it, 0 where none is to be asked for

  using Tile::Tile;
  Part& part(int64_t i) const { return ((Part*)parts_.data)[i]; }
  bool dots(const Rows& r) const { return r.count <= plan.dot_rows; }

  // The blocks of a piece through one split of their keys; `partial`: room for what each leaves, to be joined.
  void run(int64_t piece, int64_t split, float* partial) {
    int64_t count, begin = INT64_MAX, end = 0;
    const int64_t first = plan.begin(piece, count);
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = partial ? (first + i) * plan.splits + split : i;
      Part& p = part(i) = {plan.rows(first + i), State((partial ? partial : sums.floats()) + at * State::size(c)),
                           q.floats() + i * dim * ROWS};
      start(p);
      begin = least(begin, p.rows.begin), end = most(end, p.rows.end);
    }
    const int64_t size = round_up(parts(most<int64_t>(end - begin, 0), plan.splits), 32);
    begin += split * size, end = least(end, begin + size);
    for (int64_t k0 = begin, n; k0 < end; k0 += n) {
      const Rows& r = part(0).rows;
      const int64_t run = keys_of(c, r.sequence, r.key_head).find(k0).run;
      n = least(plan.at_once, end - k0);
      if (run >= plan.at_once / 4) n = least(n, run);  // up to the end of a page, to be read in place
      next = plan.neighbours && k0 + n < end ? k0 + n : 0;
      k_tile.data = nullptr;
      for (int64_t i = 0; i < count; i++) tile(part(i), k0, n, count);
    }
    for (int64_t i = 0; i < count; i++) {
      Part& p = part(i);
      if (dots(p.rows)) rows_to_columns(p.rows, p.state);
      if (!partial) finish(p.rows, p.state);
    }
  }

  void start(Part& p) {
    const Rows& r = p.rows;
    for (int i = 0; i < r.lanes; i++) p.state.row_max[i] = -INFINITY, p.state.row_sum[i] = 0;
    std::memset(p.state.out, 0, (size_t)((dots(r) ? r.count : r.lanes) * dim_v) * 4);
    const char* from[ROWS] = {};
    for (int i = 0; i < r.count; i++) from[i] = r.row(c.q, i);
    if (!dots(r)) return Read<T>::pack_columns(from, r.lanes, c.dim, p.q);
    for (int i = 0; i < r.count; i++) Read<T>::copy_row(from[i], c.dim, (char*)p.q + i * dim * E::BYTES, dim);
    std::memset(s.data, 0, (size_t)(held * r.lanes) * 4);  // idle lanes
  }

  void tile(Part& p, int64_t begin, int64_t size, int64_t count) {
    const Rows& r = p.rows;
    const Look look = see(c, r, begin, begin + size, seen());
    if (look.n == 0) return;
    const int64_t skip = look.k0 - begin;
    if (dots(r)) {  // pairs as they lie
      const KeyTile of_k = find(keys_of(c, r.sequence, r.key_head), look, nullptr, dim);
      dot_rows<E::DEPTH == 2 ? FLOAT : T>(p, 0, of_k, look.n);
    } else {
      if (!k_tile.data) pack(r, begin, (int)size, count);
      Read<T>::product(k_tile, skip, c.dim, p.q, s.floats(), r.lanes, look.n);
    }
    finish_scores(r, look, nullptr);
    bool moved = false;
    for (int j = 0; j < r.lanes; j += 2 * VL)
      moved |= j + VL < r.lanes ? softmax<2>(p.state, r.lanes, j, look.n) : softmax<1>(p.state, r.lanes, j, look.n);
    if (dots(r)) dots_accumulate(p, look, moved);
    else accumulate(p, look, skip, size, moved);
  }

  // The keys of a tile as products want them: where they lie, or packed where they need a change of form, or where several
  // blocks read them and they are not contiguous. (Rows 4 KiB apart, 16 heads of 64 floats, fall into few cache sets.)
  void pack(const Rows& r, int64_t k0, int n, int64_t count) {
    const Source of_k = keys_of(c, r.sequence, r.key_head), of_v = values_of(c, r.sequence, r.key_head);
    const int64_t ld = round_up(c.dim, E::DEPTH);
    k_tile = of_k.find(k0);
    if (SIZE<T> != E::BYTES || n > k_tile.run || ld != c.dim || (count > 1 && k_tile.row != c.dim * SIZE<T>))
      k_tile = Read<T>::copy_keys(of_k, k0, n, nullptr, keys, ld);
    v_tile = of_v.find(k0);
    if (T != FLOAT || n > v_tile.run || (count > 1 && v_tile.row != c.dim_v * 4))
      v_tile = Read<T>::copy_columns(of_v, k0, n, nullptr, values);
  }

  // out [dim_v][lanes] += V^T weights, of the keys from `skip` in the tile on.
  void accumulate(const Part& p, const Look& look, int64_t skip, int64_t size, bool moved) {
    const Rows& r = p.rows;
    for (int64_t d = 0; d < c.dim_v && moved; d++)
      for (int j = 0; j < r.lanes; j += VL) {
        float* sum = p.state.out + d * r.lanes + j;
        store(sum, load(sum) * load(decay.floats() + j));
      }
    const Source of_v = values_of(c, r.sequence, r.key_head);
    const Matrix left = Read<T>::as_columns(v_tile, skip, size, of_v, look, seen(), own);
    multiply<E, true>(left, matrix(s.data, r.lanes), p.state.out, r.lanes, c.dim_v, r.lanes, parts(look.n, E::DEPTH));
  }

  // Online softmax of N vectors of rows from j0 on. Scores in s become weights (pairs of two keys, where products
  // take those), row_max and row_sum move on; returns whether what was summed before has a factor, in `decay`, not 1.
  template <int N>
  bool softmax(const State& state, int ld, int j0, int n) {
    constexpr int PAIR = E::DEPTH;
    const Vec keep = all((float)c.keep_scale), by = all(unit);
    float *scores = s.floats() + j0, *row_max = state.row_max + j0, *row_sum = state.row_sum + j0;
    Vec top[N][2], from[N], total[N];
    bool moved = false;
    for (int j = 0; j < N; j++) top[j][0] = top[j][1] = load(row_max + j * VL);
    for (int i = 0; i < n; i += 2)
#pragma GCC unroll 4
      for (int t = 0; t < 2 * N; t++)
        top[t / 2][t % 2] = max_or_second(load(scores + least(i + t % 2, n - 1) * ld + t / 2 * VL), top[t / 2][t % 2]);
#pragma GCC unroll 2
    for (int j = 0; j < N; j++) {
      if (n % PAIR) store(scores + n * ld + j * VL, all(-INFINITY));  // beside the last
      const Vec before = load(row_max + j * VL), now = max_or_second(top[j][0], top[j][1]);
      // A row that saw no key yet has maximum -inf; less 0, its -inf scores weigh 0, not NaN.
      const Vec base = select(above(now, all(-INFINITY)), now, all(0.0f)), factor = decay_of(before, base);
      from[j] = modified ? base : base * by;
      total[j] = load(row_sum + j * VL) * factor;
      store(row_max + j * VL, now);
      store(decay.floats() + j0 + j * VL, factor);
      moved |= differ(select(above(before, all(-INFINITY)), before, now), now);
    }
    for (int i = 0; i < n; i += PAIR)
#pragma GCC unroll 2
      for (int j = 0; j < N; j++) {
        Vec w[2];
#pragma GCC unroll 2
        for (int t = 0; t < PAIR; t++) {
          float* p = scores + (i + t) * ld + j * VL;
          w[t] = exp2<PAIR == 2>(modified ? (load(p) - from[j]) * by : fma(load(p), by, all(0.0f) - from[j]));
          total[j] = total[j] + w[t];
          if (c.drops) w[t] = select(lanes(kept()[i + t], j0 / VL + j), w[t] * keep, all(0.0f));
          if (PAIR == 1) store(p, w[t]);
        }
        if constexpr (PAIR == 2) store(scores + i / 2 * ld + j * VL, E::pair_up(w[0], w[1]));
      }
    for (int j = 0; j < N; j++) store(row_sum + j * VL, total[j]);
    return moved;
  }

  // 2^(unit * (before - now)). Modified scores are subtracted first: -3e38 must not overflow by log2(e). Others are taken
  // in log2, where a weight is one fused multiply-add and a power; the rounding of the maximum there is in all of them.
  Vec decay_of(Vec before, Vec now) const {
    const Vec by = all(unit);
    return exp2<false>(modified ? (before - now) * by : before * by - now * by);
  }

  // Few rows: s [n][lanes] by dot products along dim; q [rows][dim], out [rows][dim_v].

  // Keys of a look as whole vectors, and pairs, of their own dtype; zeros without a bit. Where heads are neighbours,
  // the rows of one lie a page apart, and no hardware prefetcher follows: those of the next tile are asked for.
  KeyTile find(const Source& source, const Look& look, const uint64_t* bits, int64_t ld) const {
    KeyTile found = source.find(look.k0);
    if (next) found.ahead = source.find(next).data - found.data;
    if (look.n <= found.run && !bits && source.dim == ld && look.n % E::DEPTH == 0) return found;
    found = Read<T>::template copy_keys<SIZE<T>>(source, look.k0, look.n, bits, own, ld, found.ahead);
    if (look.n % E::DEPTH) std::memset(own.bytes() + look.n * found.row, 0, (size_t)found.row);
    return found;
  }

  template <int KIND, int R = 4>
  void dot_rows(const Part& p, int row, KeyTile k, int n) {
    for (; row + R <= p.rows.count; row += R) dots_of<KIND, R>(p, row, k, n);
    if constexpr (R > 1) dot_rows<KIND, R / 2>(p, row, k, n);
  }

  template <int KIND, int R>  // R rows against VL / R keys at once: a product a vector
  void dots_of(const Part& p, int row, KeyTile k, int n) {
    constexpr int N = VL / R;
    const int64_t words = dim * E::BYTES / 4;
    const float* q_rows = p.q + row * words;
    for (int i = 0; i < n; i += N) {
      Vec products[N * R] = {};
      const char* key[N];
      for (int t = 0; t < N; t++) key[t] = k.data + least(i + t, n - 1) * k.row;
      const char *later = key[0] + k.ahead, *row_end = later + words * SIZE<KIND>;  // row by row
      for (int64_t d = 0; d < words; d += VL) {
#pragma GCC unroll 16
        for (int t = 0; t < N; t++) {
          fetch(later);
          later += VL * SIZE<KIND>;
          if (later == row_end) later += k.row - words * SIZE<KIND>, row_end += k.row;
          const Vec of_key = load_as<KIND>(key[t] + d * SIZE<KIND>);
#pragma GCC unroll 4
          for (int m = 0; m < R; m++)
            products[t * R + m] = E::add_product(of_key, load(q_rows + m * words + d), products[t * R + m]);
        }
      }
      alignas(64) float sums_[VL];
      store(sums_, sums_of(products));
      for (int t = 0; t < least(N, n - i); t++)
        std::memcpy(s.floats() + (i + t) * p.rows.lanes + row, sums_ + t * R, R * 4);
    }
  }

  void dots_accumulate(const Part& p, const Look& look, bool moved) {
    const Rows& r = p.rows;
    float* out = p.state.out;
    for (int i = 0; i < r.count && moved; i++)
      for (int64_t d = 0; d < dim_v; d += VL) store(out + i * dim_v + d, load(out + i * dim_v + d) * all(decay.floats()[i]));
    const KeyTile v = find(values_of(c, r.sequence, r.key_head), look, look.holes ? seen() : nullptr, dim_v);
    multiply<E, true, T, true>({s.bytes(), 4, r.lanes * 4}, {v.data, v.row, 0, v.ahead}, out, dim_v, r.count, dim_v,
                               parts(look.n, E::DEPTH));
  }

  void rows_to_columns(const Rows& r, const State& state) {
    to_columns(r.lanes, c.dim_v, spare.floats(), r.lanes,
               [&](int i, int64_t d) { return i < r.count ? load(state.out + i * dim_v + d) : all(0.0f); });
    std::memcpy(state.out, spare.data, (size_t)(c.dim_v * r.lanes) * 4);
  }

  // The block's rows of out, lse and rest.
  void finish(const Rows& r, const State& state) {
    alignas(64) float factor[ROWS] = {};
    for (int i = 0; i < r.count; i++) {
      const float in_log2 = state.row_max[i] * unit;  // as decay_of rounds it
      double top = modified ? state.row_max[i] : in_log2 / LOG2E, total = state.row_sum[i];
      const double logit = c.sink ? c.sink[r.query_head(i)] : -INFINITY;  // of a key without value
      const double highest = total == 0 ? logit : most(top, logit);
      const double weight = total == 0 || highest == -INFINITY ? 0.0 : std::exp(top - highest);
      total = total * weight + (logit == -INFINITY ? 0.0 : std::exp(logit - highest));
      factor[i] = weight == 0 ? 0.0f : (float)(weight / total);
      top = highest;
      const double lse = top + std::log(total);
      const int64_t row = r.statistic(c, i);
      c.lse[row] = (float)lse;
      // From its two parts: beside a bias of -1e30 even a double holds no log(total).
      c.rest[row] = std::isfinite(c.lse[row]) ? (float)(top - c.lse[row] + std::log(total)) : 0.0f;
    }
    Read<T>::unpack_columns(c.out, r, c.dim_v, state.out, [&](int64_t i) { return load(factor + i); });
  }

  // Joins the splits of a block, in order.
  void join(int64_t block, float* partial) {
    const Rows r = plan.rows(block);
    const State state(sums.floats());
    const auto split = [&](int64_t i) { return State(partial + (block * plan.splits + i) * State::size(c)); };
    for (int j = 0; j < r.lanes; j += VL) {
      Vec top = all(-INFINITY), total = all(0.0f);
      for (int64_t i = 0; i < plan.splits; i++) top = max_or_second(load(split(i).row_max + j), top);
      const Vec from = select(above(top, all(-INFINITY)), top, all(0.0f));
      for (int64_t i = 0; i < plan.splits; i++) {
        const Vec factor = decay_of(load(split(i).row_max + j), from);
        total = fma(load(split(i).row_sum + j), factor, total);
        for (int64_t d = 0; d < c.dim_v; d++) {
          float* sum = state.out + d * r.lanes + j;
          const Vec add = load(split(i).out + d * r.lanes + j) * factor;
          store(sum, i ? load(sum) + add : add);
        }
      }
      store(state.row_max + j, top);
      store(state.row_sum + j, total);
    }
    finish(r, state);
  }
};

int64_t items_of(const Plan& plan) { return plan.pieces * plan.splits; }
int64_t workers_of(const Plan& plan) { return least(plan.call.threads, most<int64_t>(items_of(plan), 1)); }
int64_t joined_of(const Plan& plan) { return plan.splits > 1 ? plan.blocks : 0; }
int64_t partial_bytes(const Plan& plan) { return joined_of(plan) * plan.splits * State::size(plan.call) * 4; }

template <int T>
int64_t memory(const Call& c) {  // what `forward` makes, by making it once and one of its workers
  const int64_t start = made;
  const Plan plan(c);
  const Buffer partial(partial_bytes(plan));
  const int64_t shared = made - start;
  const Worker<T> worker(plan);
  return shared + workers_of(plan) * (made - start - shared);
}

template <int T>
void share(const Plan& plan, float* partial) {  // of a thread in its team; all of it outside of one
  Worker<T> worker(plan);
#pragma omp for schedule(dynamic, 1)
  for (int64_t n = 0; n < items_of(plan); n++) worker.run(n / plan.splits, n % plan.splits, partial);
  if (!joined_of(plan)) return;
#pragma omp for schedule(dynamic, 1)
  for (int64_t block = 0; block < joined_of(plan); block++) worker.join(block, partial);
}

template <int T>
void forward(const Call& c) {
  const Plan plan(c);
  const Buffer partial(partial_bytes(plan));
  const int threads = (int)workers_of(plan);
  if (threads == 1) return share<T>(plan, partial.floats());  // a team of one would cost three system calls, 0.7 us
#pragma omp parallel num_threads(threads)
  share<T>(plan, partial.floats());
}

}  // namespace

EXPORT void onchip_forward(const Call* call) {
  constexpr void (*by_dtype[])(const Call&) = {forward<FLOAT>, forward<BF16>, forward<FP16>};
  by_dtype[call->dtype](*call);
}

EXPORT int64_t onchip_forward_splits(const Call* call) { return Plan(*call).splits; }

EXPORT int64_t onchip_forward_memory(const Call* call) {  // bytes that onchip_forward takes
  constexpr int64_t (*by_dtype[])(const Call&) = {memory<FLOAT>, memory<BF16>, memory<FP16>};
  return by_dtype[call->dtype](*call);
}
