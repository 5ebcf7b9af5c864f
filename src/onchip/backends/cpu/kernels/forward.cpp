// Forward: each worker takes a block of rows of Q through the keys (or a split of them) with an online softmax, one row
// a lane. Few rows (decoding) take dot products instead, whose lanes run along dim, so that none stands idle.
#include "pairs.h"

namespace {

constexpr int DOT_ROWS = VL >= 8 ? 8 : 4;  // at most so many rows are worth dot products
constexpr double LOG2E = 1.4426950408889634;

struct Item {
  int64_t position, key_head, block, split;
};

struct Plan {  // every block of rows, in order, times the splits of the keys; and which keys are packed before
  const Call& call;
  int64_t splits, blocks = 0, columns = 0;
  bool packs_k, packs_v;
  Buffer starts;  // of each sequence: its first block; its first packed key

  // Keys are read once for every block of rows: worth a copy where they are not contiguous or need a change of form.
  // (Rows 4 KiB apart, 16 heads of 64 floats, fall into few cache sets: 100 against 128 GFLOP/s a core.)
  Plan(const Call& c, bool changes_k, bool changes_v, bool turns)
      : call(c), splits(c.splits), packs_k(changes_k || c.pages || c.k.row != c.dim * size_of(c.dtype)),
        packs_v(changes_v || c.pages || c.v.row != c.dim_v * size_of(c.dtype)), starts((c.n_members + 1) * 16) {
    for (int64_t i = 0; i <= c.n_members; i++) {
      first(i) = blocks;
      column(i) = columns;
      if (i == c.n_members) break;
      const Sequence s = sequence(c, i);
      const Blocks b = cut(c, s);
      blocks += c.heads_k * b.count;
      if (turns ? b.queries * b.heads > DOT_ROWS : b.count >= 4) columns += round_up(s.k_len, 32);
    }
    // 32 pieces keep the cores of one socket busy; a split of fewer than 512 keys costs more to join than it brings.
    if (splits == 0)
      splits = blocks >= 32 || blocks == 0 ? 1 : least(parts(32, blocks), most<int64_t>(c.seqlen_k / 512, 1));
  }
  int64_t& first(int64_t i) const { return ((int64_t*)starts.data)[2 * i]; }
  int64_t& column(int64_t i) const { return ((int64_t*)starts.data)[2 * i + 1]; }
  int64_t find(int64_t n, int64_t& (Plan::*start)(int64_t) const) const {  // the sequence that n falls in
    int64_t low = 0, high = call.n_members;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      ((this->*start)(middle) <= n ? low : high) = middle;
    }
    return low;
  }
  Item item(int64_t n) const {
    const int64_t block = n / splits, i = find(block, &Plan::first), within = block - first(i);
    const int64_t per_head = (first(i + 1) - first(i)) / call.heads_k;
    return {i, within / per_head, per_head - 1 - within % per_head, n % splits};  // causal: the longest first
  }
  int64_t width(int64_t i) const { return column(i + 1) - column(i); }
  int64_t packed(int64_t i, int64_t head) const { return column(i) * call.heads_k + head * width(i); }  // first key
};

struct State {  // running sums of a block: out [dim_v][lanes] of weights 2^(unit * (score - row_max)), and their sum
  float *out, *row_max, *row_sum;
};

template <class E, int T>
struct Worker {
  const Call& c;
  const Plan& plan;
  const char *packed_k, *packed_v;  // [keys][dim], V for pairs [dim_v][keys]: of each head of each sequence
  int64_t dim, dim_v;      // whole vectors of them
  bool modified;
  float unit;  // a weight is 2^(unit * score)
  int sign;    // Q is multiplied by it
  Buffer q, s, out, rows, bits, keys, weights, bias;
  MatrixTiles matrix_tiles;

  Worker(const Call& call, const Plan& p, const Buffer& k, const Buffer& v)
      : c(call), plan(p), packed_k(k.bytes()), packed_v(v.bytes()), dim(round_up(c.dim, VL)), dim_v(round_up(c.dim_v, VL)), modified(modifies(c)),
        unit((float)(modified || c.scale == 0 ? LOG2E : std::fabs(c.scale) * LOG2E)),
        sign(modified || c.scale > 0 ? 1 : c.scale < 0 ? -1 : 0),  // 0: every score is 0, and what is hidden stays -inf
        q(dim * ROWS * 4), s((KEYS + 2) * ROWS * 4), out(dim_v * ROWS * 4), rows(5 * ROWS * 4), bits(KEYS * 16),
        keys((KEYS + 32) * most(dim, dim_v) * 4), weights(E::DEPTH == 2 ? KEYS * ROWS * 2 : 0),
        bias(c.bias ? (KEYS + VL) * ROWS * 4 : 0) {}

  uint64_t* seen() const { return (uint64_t*)bits.data; }
  uint64_t* kept() const { return seen() + KEYS; }

  void run(const Item& item, State* part) {
    const Rows r = make_rows(c, sequence(c, item.position), item.key_head, item.block);
    const bool dots = r.count <= DOT_ROWS;
    State state{out.floats(), rows.floats(), rows.floats() + ROWS};
    int64_t begin = r.begin, end = r.end;
    if (part) {
      const int64_t size = round_up(parts(most<int64_t>(end - begin, 0), plan.splits), 32);
      begin += item.split * size;
      end = least(end, begin + size);
      state = *part;
    }
    for (int i = 0; i < r.lanes; i++) state.row_max[i] = -INFINITY, state.row_sum[i] = 0;
    if (dots) pack_rows(r), std::memset(s.data, 0, (size_t)(KEYS * r.lanes) * 4);  // lanes without a row
    else pack_columns<E, T>(c.q, r, c.dim, sign, q.floats());
    bool first = true;
    for (int64_t next = begin; next < end;) {
      int64_t k0 = next, run;
      int n = (int)least<int64_t>(KEYS, end - k0);
      find_keys(c, c.k, r.sequence, r.key_head, k0, run);
      if (run >= 64) n = (int)least<int64_t>(n, run);  // up to the end of a page, to be read in place
      next += n;
      bool holes;
      const Sight sight = see(c, r, k0, n, seen(), holes);
      if (sight == NONE) continue;
      if (dots) dot_products(r, k0, n);
      else products(r, k0, n);
      const bool moved = softmax(r, state, k0, n, sight, dots);
      if (dots) dots_accumulate(r, state, k0, n, holes, moved, first);
      else accumulate(r, state, k0, n, holes, moved, first);
      first = false;
    }
    if (first) std::memset(state.out, 0, (size_t)(dim_v * r.lanes) * 4);
    else if (dots) rows_to_columns(r, state);
    if (!part) finish(r, state);
  }

  // s [n][lanes] = K Q^T.
  void products(const Rows& r, int64_t k0, int n) {
    constexpr int element = E::DEPTH == 2 ? 2 : 4;
    const int64_t i = r.sequence.position, ld = round_up(c.dim, E::DEPTH) * element;
    int64_t run;
    const KeyTile direct = find_keys(c, c.k, r.sequence, r.key_head, k0, run);
    Left left{direct.data, direct.row, 4};
    if (packed_k && plan.width(i)) left = {packed_k + (plan.packed(i, r.key_head) + k0) * ld, ld, 4};
    else if ((E::DEPTH == 1 && T != FLOAT) || n > run || c.dim % E::DEPTH) {
      copy_keys<E, T>(c, c.k, r.sequence, r.key_head, k0, n, nullptr, c.dim, keys.bytes());
      left = {keys.bytes(), ld, 4};
    }
    const int depth = (int)parts(c.dim, E::DEPTH);
    multiply<E, false>(left, right(q.floats(), r.lanes), s.floats(), r.lanes, n, r.lanes, depth);
  }

  // out [dim_v][lanes] += V^T weights.
  void accumulate(const Rows& r, const State& state, int64_t k0, int n, bool holes, bool moved, bool first) {
    const float* decay = rows.floats() + 3 * ROWS;
    if (moved && !first)
      for (int64_t d = 0; d < c.dim_v; d++)
        for (int j = 0; j < r.lanes; j += VL) {
          float* p = state.out + d * r.lanes + j;
          store(p, load(p) * load(decay + j));
        }
    int64_t run;
    const KeyTile direct = find_keys(c, c.v, r.sequence, r.key_head, k0, run);
    const uint64_t* which = holes ? seen() : nullptr;
    const int64_t i = r.sequence.position, first_key = plan.packed(i, r.key_head);
    Left left{direct.data, 4, direct.row};
    const float* right_side = s.floats();
    if constexpr (E::DEPTH == 2) {
#if HAS_PAIRS
      left = {packed_v + (first_key * c.dim_v + k0) * 2, plan.width(i) * 2, 4};
      if (holes || (n % 2 && k0 + n < r.sequence.k_len)) {  // what stands beside the last key must not be read
        turn_keys(c, c.v, r.sequence, r.key_head, k0, n, which, c.dim_v, (uint16_t*)keys.data, KEYS + 32);
        left = {keys.bytes(), (KEYS + 32) * 2, 4};
      }
      right_side = weights.floats();
#endif
    } else if (packed_v && plan.width(i) && !holes) {
      left = {packed_v + (first_key + k0) * c.dim_v * 4, 4, c.dim_v * 4};
    } else if (T != FLOAT || holes || n > run) {
      copy_keys<E, T>(c, c.v, r.sequence, r.key_head, k0, n, which, c.dim_v, keys.bytes());
      left = {keys.bytes(), 4, c.dim_v * 4};
    }
    const int depth = (int)parts(n, E::DEPTH);
    if (first) multiply<E, false>(left, right(right_side, r.lanes), state.out, r.lanes, (int)c.dim_v, r.lanes, depth);
    else multiply<E, true>(left, right(right_side, r.lanes), state.out, r.lanes, (int)c.dim_v, r.lanes, depth);
  }

  // Products in s become weights, row_max and row_sum move on; whether the factor of what was summed before is not 1.
  bool softmax(const Rows& r, const State& state, int64_t k0, int n, Sight sight, bool dots) {
    const int ld = r.lanes;
    float *scores = s.floats(), *base = rows.floats() + 2 * ROWS, *decay = base + ROWS;
    if (modified) modify(c, r, k0, n, scores, bias.floats(), nullptr);
    if (sight == SOME) hide(scores, ld, n, seen(), -INFINITY);
    if (c.drops) survive(c, r, k0, n, kept());
    bool moved = false;
    for (int j = 0; j < ld; j += VL) {
      const Vec before = load(state.row_max + j);
      Vec top[4] = {before, before, before, before};
      int i = 0;
      for (; i + 4 <= n; i += 4)
        for (int t = 0; t < 4; t++) top[t] = max_or_second(load(scores + (i + t) * ld + j), top[t]);
      for (; i < n; i++) top[0] = max_or_second(load(scores + i * ld + j), top[0]);
      const Vec now = max_or_second(max_or_second(top[0], top[1]), max_or_second(top[2], top[3]));
      // A row that saw no key yet has maximum -inf; less 0, its -inf scores weigh 0, not NaN.
      const Vec from = select(above(now, all(-INFINITY)), now, all(0.0f));
      const Vec factor = decay_of(before, from);
      store(state.row_max + j, now);
      store(base + j, modified ? from : from * all(unit));
      store(decay + j, factor);
      store(state.row_sum + j, load(state.row_sum + j) * factor);
      moved |= differ(before, now);
    }
    for (int j = 0; j < ld; j += 2 * VL)
      if (j + VL < ld) dots ? weigh<2, false>(state, ld, j, n) : weigh<2, E::DEPTH == 2>(state, ld, j, n);
      else dots ? weigh<1, false>(state, ld, j, n) : weigh<1, E::DEPTH == 2>(state, ld, j, n);
    return moved;
  }

  // 2^(unit * (before - now)). Modified scores are subtracted first: -3e38 must not overflow by log2(e). Others are taken
  // in log2, where a weight is one fused multiply-add and a power; the rounding of the maximum there is in all of them.
  Vec decay_of(Vec before, Vec now) const {
    return exp2<false>(modified ? (before - now) * all(unit) : before * all(unit) - now * all(unit));
  }

  template <int N, bool PAIRS>  // N vectors of rows from j0 on; PAIRS: to `weights`, two keys in one element
  void weigh(const State& state, int ld, int j0, int n) {
    const float* base = rows.floats() + 2 * ROWS + j0;
    const Vec keep = all((float)c.keep_scale), per_unit = all(unit);
    Vec from[N], total[N];
    for (int j = 0; j < N; j++) from[j] = load(base + j * VL), total[j] = load(state.row_sum + j0 + j * VL);
    for (int i = 0; i < n; i += 1 + PAIRS)
#pragma GCC unroll 2
      for (int j = 0; j < N; j++) {
        Vec w[2];
#pragma GCC unroll 2
        for (int t = 0; t <= PAIRS; t++) {
          float* p = s.floats() + (i + t) * ld + j0 + j * VL;
          if (i + t == n) { w[t] = all(0.0f); continue; }
          w[t] = exp2<PAIRS>(modified ? (load(p) - from[j]) * per_unit : fma(load(p), per_unit, all(0.0f) - from[j]));
          total[j] = total[j] + w[t];
          if (c.drops) w[t] = select(lanes(kept()[i + t], j0 / VL + j), w[t] * keep, all(0.0f));
          if (!PAIRS) store(p, w[t]);
        }
#if HAS_PAIRS
        if (PAIRS) store(weights.floats() + i / 2 * ld + j0 + j * VL, pair_up(w[0], w[1]));
#endif
      }
    for (int j = 0; j < N; j++) store(state.row_sum + j0 + j * VL, total[j]);
  }

  // Few rows: s [n][lanes] by dot products along dim; q [rows][dim], out [rows][dim_v], floats.

  void pack_rows(const Rows& r) {
    for (int i = 0; i < r.count; i++) {
      float* row = q.floats() + i * dim;
      std::memset(row, 0, (size_t)dim * 4);
      widen<T>(at(c.q, r.sequence.q_batch, r.sequence.q_start + r.query(i), r.query_head(i)), row, c.dim);
      for (int64_t d = 0; d < dim; d += VL) store(row + d, sign ? load(row + d) * all((float)sign) : all(0.0f));
    }
  }

  void dot_products(const Rows& r, int64_t k0, int n) {
    int64_t run;
    const KeyTile direct = find_keys(c, c.k, r.sequence, r.key_head, k0, run);
    if (n <= run && c.dim % VL == 0) {
      int64_t own;
      const KeyTile values = find_keys(c, c.v, r.sequence, r.key_head, k0, own);
      return dots_with<T>(r, direct.data, direct.row, n, values);
    }
    gather<T>(c, c.k, r.sequence, r.key_head, k0, n, nullptr, c.dim, keys.floats(), dim);
    dots_with<FLOAT>(r, keys.bytes(), dim * 4, n, {nullptr, 0});
  }

  template <int TK>
  void dots_with(const Rows& r, const char* k, int64_t stride, int n, const KeyTile& values) {
    for (int i = 0; i < n; i += VL) {
      // Rows of one head lie a page apart where heads are neighbours: no hardware prefetcher follows. Asked for here, the
      // next keys and these values arrive while the products are made.
      for (int t = i; values.data && t < least(i + VL, n); t++) {
        for (int64_t d = 0; d < c.dim * SIZE<TK>; d += 64) __builtin_prefetch(k + (t + VL) * stride + d, 0, 3);
        for (int64_t d = 0; d < c.dim_v * SIZE<TK>; d += 64) __builtin_prefetch(values.data + t * values.row + d, 0, 2);
      }
      int row = 0;
      for (; row + 4 <= r.count; row += 4) dots_of<TK, 4>(r, row, k, stride, i, n);
      if (row + 2 <= r.count) dots_of<TK, 2>(r, row, k, stride, i, n), row += 2;
      if (row < r.count) dots_of<TK, 1>(r, row, k, stride, i, n);
    }
  }

  template <int TK, int R>  // R rows against a vector of keys from i on: a key is read, and widened, once for them
  inline __attribute__((always_inline)) void dots_of(const Rows& r, int row, const char* k, int64_t stride, int i, int n) {
    Vec sums[R][VL];
    const float* rows_of_q = q.floats() + row * dim;
    for (int t = 0; t < VL; t++) {
      const char* key = k + least(i + t, n - 1) * stride;
      Vec x[R];
      for (int m = 0; m < R; m++) x[m] = all(0.0f);
      for (int64_t d = 0; d < dim; d += VL) {
        const Vec of_key = load_as<TK>(key + d * SIZE<TK>);
#pragma GCC unroll 4
        for (int m = 0; m < R; m++) x[m] = fma(of_key, load(rows_of_q + m * dim + d), x[m]);
      }
      for (int m = 0; m < R; m++) sums[m][t] = x[m];
    }
    for (int m = 0; m < R; m++) {
      transpose(sums[m]);
      for (int half = VL / 2; half; half /= 2)
        for (int t = 0; t < half; t++) sums[m][t] = sums[m][t] + sums[m][t + half];
      alignas(64) float of_key[VL];
      store(of_key, sums[m][0]);
      for (int t = 0; t < least(VL, n - i); t++) s.floats()[(i + t) * r.lanes + row + m] = of_key[t];
    }
  }

  void dots_accumulate(const Rows& r, const State& state, int64_t k0, int n, bool holes, bool moved, bool first) {
    const float* decay = rows.floats() + 3 * ROWS;
    if (first) std::memset(state.out, 0, (size_t)(r.count * dim_v) * 4);
    else if (moved)
      for (int i = 0; i < r.count; i++)
        for (int64_t d = 0; d < dim_v; d += VL) store(state.out + i * dim_v + d, load(state.out + i * dim_v + d) * all(decay[i]));
    int64_t run;
    const KeyTile direct = find_keys(c, c.v, r.sequence, r.key_head, k0, run);
    const Left left{s.bytes(), 4, r.lanes * 4};
    const int columns = (int)dim_v;
    if (n <= run && !holes && c.dim_v % VL == 0)
      return multiply_by_vectors<Floats, T, true>(left, {direct.data, direct.row}, state.out, dim_v, r.count, columns, n);
    gather<T>(c, c.v, r.sequence, r.key_head, k0, n, holes ? seen() : nullptr, c.dim_v, keys.floats(), dim_v);
    multiply_by_vectors<Floats, FLOAT, true>(left, right(keys.floats(), dim_v), state.out, dim_v, r.count, columns, n);
  }

  void rows_to_columns(const Rows& r, const State& state) {
    for (int64_t d = 0; d < c.dim_v; d++)
      for (int i = 0; i < r.lanes; i++) s.floats()[d * r.lanes + i] = i < r.count ? state.out[i * dim_v + d] : 0.0f;
    std::memcpy(state.out, s.data, (size_t)(c.dim_v * r.lanes) * 4);
  }

  // The block's rows of out, lse and rest.
  void finish(const Rows& r, const State& state) {
    alignas(64) float factor[ROWS] = {};
    for (int i = 0; i < r.count; i++) {
      const float in_log2 = state.row_max[i] * unit;  // as decay_of rounds it
      const double top = modified ? (double)state.row_max[i] * unit : in_log2;
      double total = state.row_sum[i], lse = top + std::log2(total);
      factor[i] = total == 0 ? 0.0f : (float)(1.0 / total);
      if (c.sink) {  // a key without value
        const double logit = c.sink[r.query_head(i)] * LOG2E, base = total == 0 ? logit : most(top, logit);
        const double weight = total == 0 ? 0.0 : std::exp2(top - base);
        total = total * weight + std::exp2(logit - base);
        lse = base == -INFINITY ? base : base + std::log2(total);
        factor[i] = weight == 0 ? 0.0f : (float)(weight / total);
      }
      lse /= LOG2E;
      const int64_t row = r.sequence.q_batch * c.row_batch + r.query_head(i) * c.row_head + r.sequence.q_start + r.query(i);
      c.lse[row] = (float)lse;
      c.rest[row] = std::isfinite(lse) ? (float)(lse - (double)(float)lse) : 0.0f;
    }
    unpack_columns<T>(c.out, r, c.dim_v, state.out, factor);
  }

  // Joins the splits of a block, in order.
  void join(int64_t block, const State* part) {
    const Item item = plan.item(block * plan.splits);
    const Rows r = make_rows(c, sequence(c, item.position), item.key_head, item.block);
    State state{out.floats(), rows.floats(), rows.floats() + ROWS};
    for (int j = 0; j < r.lanes; j += VL) {
      Vec top = load(part[0].row_max + j), total = all(0.0f);
      for (int64_t i = 1; i < plan.splits; i++) top = max_or_second(load(part[i].row_max + j), top);
      const Vec from = select(above(top, all(-INFINITY)), top, all(0.0f));
      for (int64_t i = 0; i < plan.splits; i++) {
        const Vec factor = decay_of(load(part[i].row_max + j), from);
        total = fma(load(part[i].row_sum + j), factor, total);
        for (int64_t d = 0; d < c.dim_v; d++) {
          float* sum = state.out + d * r.lanes + j;
          const Vec add = load(part[i].out + d * r.lanes + j) * factor;
          store(sum, i ? load(sum) + add : add);
        }
      }
      store(state.row_max + j, top);
      store(state.row_sum + j, total);
    }
    finish(r, state);
  }
};

// Keys of every sequence in the form that products want, once for all blocks of rows.
template <class E, int T>
void pack(const Call& c, const Plan& plan, char* k, char* v) {
  constexpr int element = E::DEPTH == 2 ? 2 : 4;
  const int64_t tiles = plan.columns / 32, dim = round_up(c.dim, E::DEPTH);
#pragma omp parallel for num_threads((int)c.threads) schedule(static)
  for (int64_t n = 0; n < tiles * c.heads_k; n++) {
    const int64_t column = n / c.heads_k * 32, head = n % c.heads_k, i = plan.find(column, &Plan::column);
    const Sequence s = sequence(c, i);
    const int64_t k0 = column - plan.column(i), to = plan.packed(i, head);
    const int keys = (int)least<int64_t>(32, s.k_len - k0);
    if (k) copy_keys<E, T>(c, c.k, s, head, k0, keys, nullptr, c.dim, k + (to + k0) * dim * element);
    if (!v) continue;
#if HAS_PAIRS
    if (E::DEPTH == 2) {
      turn_keys(c, c.v, s, head, k0, keys, nullptr, c.dim_v, (uint16_t*)v + to * c.dim_v + k0, plan.width(i));
      continue;
    }
#endif
    copy_keys<E, T>(c, c.v, s, head, k0, keys, nullptr, c.dim_v, v + (to + k0) * c.dim_v * element);
  }
}

template <class E, int T>
void forward(const Call& c) {
  constexpr int element = E::DEPTH == 2 ? 2 : 4;
  const Plan plan(c, E::DEPTH == 1 && T != FLOAT, E::DEPTH == 2 || T != FLOAT, E::DEPTH == 2);
  const int64_t items = plan.blocks * plan.splits, size = (round_up(c.dim_v, VL) + 2) * ROWS;
  const int64_t keys = plan.columns * c.heads_k * element;
  const Buffer k(plan.packs_k ? keys * round_up(c.dim, E::DEPTH) : 0), v(plan.packs_v ? keys * c.dim_v : 0);
  const Buffer sums(plan.splits > 1 ? items * size * 4 : 0);
  pack<E, T>(c, plan, k.bytes(), v.bytes());
  const auto part = [&](int64_t n) {
    float* p = sums.floats() + n * size;
    return State{p + 2 * ROWS, p, p + ROWS};
  };
#pragma omp parallel num_threads((int)least(c.threads, most<int64_t>(items, 1)))
  {
    Worker<E, T> worker(c, plan, k, v);
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < items; n++) {
      State own = part(n);
      worker.run(plan.item(n), plan.splits > 1 ? &own : nullptr);
    }
    if (plan.splits > 1) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t block = 0; block < plan.blocks; block++) {
        Buffer list(plan.splits * (int64_t)sizeof(State));
        State* states = (State*)list.data;
        for (int64_t i = 0; i < plan.splits; i++) states[i] = part(block * plan.splits + i);
        worker.join(block, states);
      }
    }
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void onchip_forward(const Call* call) {
  switch (call->dtype) {
    case FLOAT: return forward<Floats, FLOAT>(*call);
#if HAS_PAIRS
    case BF16: return forward<Pairs, BF16>(*call);
#else
    case BF16: return forward<Floats, BF16>(*call);
#endif
    case FP16: return forward<Floats, FP16>(*call);
  }
}
