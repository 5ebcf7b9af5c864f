// Holds libraries of native kernels to plain loops in double precision: native_driver onchip_avx2.so ...
// It needs neither Python nor torch, so that an emulator of another processor can run it.
#include <dlfcn.h>

#include <cstdio>
#include <vector>

#include "call.h"

namespace {

using Numbers = std::vector<double>;

struct Format {
  const char* name;
  int64_t dtype;
  int mantissa, bias;  // of the 16-bit ones
  double room;         // error allowed, of the largest number: some roundings, of inputs that are exact
};
constexpr Format FORMATS[] = {
    {"float32", FLOAT, 0, 0, 0x1p-17}, {"bfloat16", BF16, 7, 127, 0x1p-6}, {"float16", FP16, 10, 15, 0x1p-9}};

struct Tensor {  // (batch, rows, heads, dim), contiguous; NaN until set
  const Format& format;
  int64_t batch, rows, heads, dim;
  std::vector<char> bytes;
  Tensor(const Format& f, int64_t b, int64_t r, int64_t h, int64_t d)
      : format(f), batch(b), rows(r), heads(h), dim(d), bytes((size_t)(b * r * h * d * size_of(f.dtype)), (char)0xFF) {}
  Strided strided() {
    const int64_t size = size_of(format.dtype) * dim;
    return {bytes.data(), rows * heads * size, heads * size, size};
  }
  void set(const Numbers& from) {  // normal numbers that the format holds exactly, and 0
    for (size_t i = 0; i < from.size(); i++)
      if (format.dtype == FLOAT) ((float*)bytes.data())[i] = (float)from[i];
      else ((uint16_t*)bytes.data())[i] = to_bits(from[i]);
  }
  Numbers get() const {
    Numbers to(bytes.size() / (size_t)size_of(format.dtype));
    for (size_t i = 0; i < to.size(); i++)
      to[i] = format.dtype == FLOAT ? ((const float*)bytes.data())[i] : from_bits(((const uint16_t*)bytes.data())[i]);
    return to;
  }
  uint16_t to_bits(double x) const {
    if (x == 0) return 0;
    const int e = std::ilogb(x), fraction = (int)std::ldexp(std::ldexp(std::fabs(x), -e) - 1, format.mantissa);
    return (uint16_t)((x < 0) << 15 | (e + format.bias) << format.mantissa | fraction);
  }
  double from_bits(int bits) const {
    const int e = (bits & 0x7FFF) >> format.mantissa, one = 1 << format.mantissa, fraction = bits & (one - 1);
    if (e == 0x7FFF >> format.mantissa) return NAN;
    const double size = std::ldexp(e ? one + fraction : fraction, (e ? e : 1) - format.bias - format.mantissa);
    return bits >> 15 ? -size : size;
  }
};

Numbers draw(size_t n) {  // multiples of 1/16 up to 2
  static uint64_t state = 1;
  Numbers found(n);
  for (double& x : found) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = (double)((int64_t)(state >> 33) % 65 - 32) / 16;
  }
  return found;
}

bool close(const char* library, const char* name, const Format& f, double room, const Numbers& found, const Numbers& exact) {
  double error = 0, largest = 0;
  for (size_t i = 0; i < exact.size(); i++) {
    const double off = std::fabs(found[i] - exact[i]);
    error = off <= error ? error : off;  // NaN stays
    largest = most(largest, std::fabs(exact[i]));
  }
  if (error <= room * largest) return true;
  std::printf("%s %s %s: off by %g of %g\n", library, f.name, name, error, largest);
  return false;
}

bool check(const char* path, void* library, const Format& f, int64_t queries, int64_t keys) {
  using Run = void (*)(const Call*);
  const auto forward = (Run)dlsym(library, "onchip_forward"), backward = (Run)dlsym(library, "onchip_backward");
  const int64_t B = 2, H = 4, HK = 2, D = 40, DV = 24, shift = keys - queries;
  Tensor q(f, B, queries, H, D), k(f, B, keys, HK, D), v(f, B, keys, HK, DV), out(f, B, queries, H, DV);
  Tensor dout = out, dq = q, dk = k, dv = v;
  const Numbers nq = draw(B * queries * H * D), nk = draw(B * keys * HK * D), nv = draw(B * keys * HK * DV);
  const Numbers ng = draw(B * queries * H * DV);
  q.set(nq), k.set(nk), v.set(nv), dout.set(ng);
  std::vector<float> lse(B * H * queries, NAN), rest = lse;

  Call c{};
  c.q = q.strided(), c.k = k.strided(), c.v = v.strided(), c.out = out.strided(), c.dout = dout.strided();
  c.dq = dq.strided(), c.dk = dk.strided(), c.dv = dv.strided();
  c.lse = lse.data(), c.rest = rest.data(), c.row_head = queries, c.row_batch = H * queries;
  c.dtype = f.dtype, c.batch = c.n_members = B, c.heads_q = H, c.heads_k = HK, c.dim = D, c.dim_v = DV;
  c.seqlen_q = c.q_to = queries, c.seqlen_k = c.k_to = keys;
  c.left = c.top_left = c.top_right = UNBOUNDED, c.right = 0;  // causal, the last query with the last key
  c.scale = 0.125, c.threads = 2;
  forward(&c);
  backward(&c);

  Numbers eout(ng.size()), else_(lse.size()), edq(nq.size()), edk(nk.size()), edv(nv.size()), p(keys);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < queries; i++) {
        const int64_t row = (b * queries + i) * H + h, n = i + shift + 1;
        const auto at = [&](int64_t j) { return (b * keys + j) * HK + h / (H / HK); };
        double sum = 0, delta = 0;
        for (int64_t j = 0; j < n; j++) {
          double s = 0;
          for (int64_t d = 0; d < D; d++) s += nq[row * D + d] * nk[at(j) * D + d];
          sum += p[j] = std::exp(s * c.scale);
        }
        else_[(b * H + h) * queries + i] = std::log(sum);
        for (int64_t j = 0; j < n; j++)
          for (int64_t d = 0; d < DV; d++) eout[row * DV + d] += p[j] / sum * nv[at(j) * DV + d];
        for (int64_t d = 0; d < DV; d++) delta += ng[row * DV + d] * eout[row * DV + d];
        for (int64_t j = 0; j < n; j++) {
          double dp = -delta;
          for (int64_t d = 0; d < DV; d++) {
            dp += ng[row * DV + d] * nv[at(j) * DV + d];
            edv[at(j) * DV + d] += p[j] / sum * ng[row * DV + d];
          }
          for (int64_t d = 0; d < D; d++) {
            edq[row * D + d] += p[j] / sum * dp * c.scale * nk[at(j) * D + d];
            edk[at(j) * D + d] += p[j] / sum * dp * c.scale * nq[row * D + d];
          }
        }
      }
  const Numbers found_lse(lse.begin(), lse.end());
  return close(path, "out", f, f.room, out.get(), eout) & close(path, "lse", f, FORMATS[0].room, found_lse, else_) &
         close(path, "dq", f, f.room, dq.get(), edq) & close(path, "dk", f, f.room, dk.get(), edk) &
         close(path, "dv", f, f.room, dv.get(), edv);
}

}  // namespace

int main(int count, char** paths) {
  bool good = true;
  for (int i = 1; i < count; i++) {
    void* library = dlopen(paths[i], RTLD_NOW);
    if (!library) return std::printf("%s\n", dlerror()), 1;
    for (const Format& f : FORMATS)
      // Whole and cut tiles; few rows, which take dot products; one query of many keys, whose chunks add to one dq.
      for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{70, 130}, {64, 576}, {3, 300}, {1, 1100}})
        good &= check(paths[i], library, f, queries, keys);
    std::printf("%s: %s\n", paths[i], good ? "agrees" : "does not agree");
  }
  return !good;
}
