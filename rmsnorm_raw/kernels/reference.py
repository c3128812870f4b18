"""The gate's own kernels: data, float64 sums and comparison, all on the device.

With them a problem of full size is checked without being copied to the host. Naive on purpose: one
element at a time, no wave operation, no atomic, no LDS, no barrier, and no name of the prelude, for
a fault there must not hide itself here. Dtypes are run-time arguments, so one build serves every
problem. :mod:`rmsnorm_raw.bounds` states the same formulas in NumPy, and is what these are tested
against.
"""

#: threads of a block, in every kernel here
BLOCK = 256
#: doubles that each thread of the comparing kernels writes: ratio, row, column, got, want, bound
RECORD = 6

ENTRY_POINTS = (
    "reference_write",
    "reference_changed",
    "reference_row_partials",
    "reference_column_partials",
    "reference_combine",
    "reference_worst",
    "reference_broken",
    "reference_gather",
)

TEXT = r"""
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define REF_FN static __device__ __forceinline__
#define REF_KERNEL extern "C" __global__ void __launch_bounds__(256)

// ---- formats: p is the bits of the significand: bfloat16 8, float16 11, float32 24 --------------
REF_FN int min_exponent(int p) { return p == 11 ? -14 : -126; }
REF_FN int top_field(int p) { return p == 11 ? 31 : 255; }
REF_FN double from_bits(u64 bits) { return __builtin_bit_cast(double, bits); }
REF_FN double power_of_two(int k) { return from_bits((u64)(k + 1023) << 52); }
REF_FN double magnitude(double value) { return value < 0.0 ? -value : value; }
REF_FN double infinity() { return from_bits(0x7ff0000000000000ULL); }

REF_FN u32 load_bits(const void* data, i64 at, int p) {
  return p == 24 ? ((const u32*)data)[at] : ((const u16*)data)[at];
}

// An infinity decodes to the power of two after the largest finite number, and is compared as that.
REF_FN double decode(u32 bits, int p) {
  const u32 hidden = 1u << (p - 1), fraction = bits & (hidden - 1);
  const int field = (int)(bits >> (p - 1)) & top_field(p);
  if (field == top_field(p) && fraction) return from_bits(0x7ff8000000000000ULL);
  const double significand = field ? fraction + hidden : fraction;
  const double value = significand * power_of_two((field ? field : 1) + min_exponent(p) - p);
  return bits >> (p == 24 ? 31 : 15) ? -value : value;
}
REF_FN double value_at(const void* data, i64 at, int p) {
  return decode(load_bits(data, at, p), p);
}

// The spacing of the format at a value, in the lowest binade below it and in the highest above it.
REF_FN int binade(double value, int p) {
  const int exponent = (int)(__builtin_bit_cast(u64, value) >> 52 & 0x7ff) - 1023;
  const int low = min_exponent(p), high = top_field(p) + low - 2;
  return exponent < low ? low : exponent > high ? high : exponent;
}
REF_FN double spacing(double value, int p) { return power_of_two(binade(value, p) - (p - 1)); }

// Nearest, ties to even: adding 1.5 * 2^52 leaves a double no fraction bits.
REF_FN double steps_of(double value, int p) {
  const double shift = 6755399441055744.0;
  return value * power_of_two(p - 1 - binade(value, p)) + shift - shift;
}
REF_FN u32 encode(double value, int p) {
  const u32 sign = value < 0.0 ? 1u << (p == 24 ? 31 : 15) : 0u;
  const u32 binades = (u32)(binade(value, p) - min_exponent(p));
  return sign | ((binades << (p - 1)) + (u32)magnitude(steps_of(value, p)));
}

// ---- gate data: a hash of (seed, tensor, element), then integers times powers of two ------------
#define TENSOR_X 0
#define TENSOR_DOUT 1
#define TENSOR_WEIGHT 2

REF_FN u64 mix(u64 z) {  // the finaliser of splitmix64 (Steele, Lea, Flood 2014; Stafford's mix 13)
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
  return z ^ z >> 31;
}
REF_FN u64 draw(u64 seed, int tensor, u64 element) {
  const u64 golden = 0x9e3779b97f4a7c15ULL;
  return mix(mix(seed + (u64)tensor * golden) + (element + 1) * golden);
}
// Four uniform 16-bit numbers added up and centred; odd, so never 0. Times 2^-16: |v| <= 4,
// standard deviation 1.155.
REF_FN int bell(u64 r) {
  const u64 total = (r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48);
  return 2 * (int)total - 262139;
}
REF_FN u32 datum(int tensor, int exact, u64 seed, i64 row, i64 col, i64 cols, int p) {
  const u64 element = (u64)(row * cols + col), r = draw(seed, tensor, element);
  const int scale = (int)(row * 5 % 13) - 6;  // of the row, a power of two
  double value;
  if (tensor == TENSOR_X) {
    value = (exact ? (r & 1 ? -65536 : 65536) : bell(r)) * power_of_two(scale - 16);
  } else if (tensor == TENSOR_DOUT) {  // half of x / scale in it: the row term of dx must matter
    value = exact ? (double)((int)((r >> 32) % 17) - 8)
                  : (2 * bell(r) + bell(draw(seed, TENSOR_X, element))) * power_of_two(-17);
  } else {
    value = exact ? power_of_two((int)((r >> 32) % 3) - 1) : 1.0 + bell(r) * power_of_two(-19);
  }
  return encode(value, p);
}

// ---- what each comparing thread leaves ----------------------------------------------------------
struct Worst {
  double ratio, row, col, got, want, bound;
};
REF_FN void keep_worse(
    Worst& worst, double ratio, i64 row, i64 col, double got, double want, double bound) {
  if (ratio > worst.ratio) worst = {ratio, (double)row, (double)col, got, want, bound};
}
REF_FN void leave(const Worst& worst, double* records) {
  double* record = records + 6 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
  record[0] = worst.ratio, record[1] = worst.row, record[2] = worst.col;
  record[3] = worst.got, record[4] = worst.want, record[5] = worst.bound;
}
// Rows of a matrix go to blocks and their columns to threads, lists to the threads of all blocks.
#define EACH_ELEMENT(row, rows, col, cols)                   \
  for (i64 row = blockIdx.x; row < (rows); row += gridDim.x) \
    for (i64 col = threadIdx.x; col < (cols); col += blockDim.x)
#define EACH_ITEM(item, items)                                                           \
  for (i64 item = (i64)blockIdx.x * blockDim.x + threadIdx.x; item < (items); item += \
       (i64)gridDim.x * blockDim.x)

// data: (rows, cols), rows `stride` elements apart.
REF_KERNEL reference_write(
    void* data, i64 rows, i64 cols, i64 stride, int p, int tensor, int exact, u64 seed) {
  EACH_ELEMENT(row, rows, col, cols) {
    const u32 bits = datum(tensor, exact, seed, row, col, cols, p);
    if (p == 24) {
      ((u32*)data)[row * stride + col] = bits;
    } else {
      ((u16*)data)[row * stride + col] = (u16)bits;
    }
  }
}

// Leaves a record of an element that is no longer what reference_write wrote, as bits.
REF_KERNEL reference_changed(
    const void* data, i64 rows, i64 cols, i64 stride, int p, int tensor, int exact, u64 seed,
    double* records) {
  Worst worst = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  EACH_ELEMENT(row, rows, col, cols) {
    const u32 got = load_bits(data, row * stride + col, p);
    const u32 want = datum(tensor, exact, seed, row, col, cols, p);
    if (got != want) keep_worse(worst, infinity(), row, col, got, want, 0.0);
  }
  leave(worst, records);
}

// partials: (shares, 3, rows) sums of x^2, g*x and |g*x| over every shares-th column, with
// g = dout * weight. dout and weight may be absent (0).
REF_KERNEL reference_row_partials(
    const void* dout, i64 dout_stride, const void* x, i64 x_stride, const void* weight, i64 rows,
    i64 cols, int p, int weight_p, i64 shares, double* partials) {
  EACH_ITEM(item, rows * shares) {
    const i64 row = item / shares, share = item % shares;
    double square = 0.0, dot = 0.0, spread = 0.0;
    for (i64 col = share; col < cols; col += shares) {
      const double value = value_at(x, row * x_stride + col, p);
      square += value * value;
      if (dout) {
        const double w = weight ? value_at(weight, col, weight_p) : 1.0;
        const double product = value_at(dout, row * dout_stride + col, p) * w * value;
        dot += product;
        spread += magnitude(product);
      }
    }
    double* sums = partials + share * 3 * rows + row;
    sums[0] = square, sums[rows] = dot, sums[2 * rows] = spread;
  }
}

// partials: (shares, 2, cols) sums of dout*xhat and |dout*xhat| over `share_rows` rows each, with
// xhat = x * rstd.
REF_KERNEL reference_column_partials(
    const void* dout, i64 dout_stride, const void* x, i64 x_stride, const double* rstd, i64 rows,
    i64 cols, int p, i64 shares, i64 share_rows, double* partials) {
  EACH_ITEM(item, cols * shares) {
    const i64 share = item / cols, col = item % cols;
    const i64 first = share * share_rows, next = first + share_rows;
    const i64 last = next < rows ? next : rows;
    double sum = 0.0, spread = 0.0;
    for (i64 row = first; row < last; ++row) {
      const double xhat = value_at(x, row * x_stride + col, p) * rstd[row];
      const double product = value_at(dout, row * dout_stride + col, p) * xhat;
      sum += product;
      spread += magnitude(product);
    }
    double* sums = partials + share * 2 * cols + col;
    sums[0] = sum, sums[cols] = spread;
  }
}

// sums[i] = the sum over shares of partials[share][i]
REF_KERNEL reference_combine(const double* partials, i64 shares, i64 items, double* sums) {
  EACH_ITEM(item, items) {
    double sum = 0.0;
    for (i64 share = 0; share < shares; ++share) sum += partials[share * items + item];
    sums[item] = sum;
  }
}

// Compares y (dout absent) or dx with its float64 value. terms: (3, rows) rstd, mean(g*xhat) and
// mean|g*xhat|. The bound is half a spacing (none for float32) + factor * scale + 2^-126; in the
// exact case, equality after one rounding.
REF_KERNEL reference_worst(
    const void* out, i64 out_stride, const void* dout, i64 dout_stride, const void* x, i64 x_stride,
    const void* weight, const double* terms, i64 rows, i64 cols, int p, int weight_p, double factor,
    int exact, double* records) {
  Worst worst = {-1.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  const double limit = power_of_two(top_field(p) + min_exponent(p) - 1);
  EACH_ELEMENT(row, rows, col, cols) {
    const double w = weight ? value_at(weight, col, weight_p) : 1.0;
    const double xhat = value_at(x, row * x_stride + col, p) * terms[row];
    double want = xhat * w, scale = magnitude(xhat * w);
    if (dout) {
      const double g = value_at(dout, row * dout_stride + col, p) * w;
      want = terms[row] * (g - xhat * terms[rows + row]);
      scale = terms[row] * (magnitude(g) + magnitude(xhat) * terms[2 * rows + row]);
    }
    want = want > limit ? limit : want < -limit ? -limit : want;
    const double got = value_at(out, row * out_stride + col, p);
    double bound = 0.0, ratio;
    if (exact) {
      want = steps_of(want, p) * spacing(want, p);
      ratio = got == want ? 0.0 : infinity();
    } else {
      bound = (p == 24 ? 0.0 : spacing(want, p) / 2) + factor * scale + power_of_two(-126);
      ratio = magnitude(got - want) / bound;
      if (!(ratio >= 0.0)) ratio = infinity();  // NaN
    }
    keep_worse(worst, ratio, row, col, got, want, bound);
  }
  leave(worst, records);
}

// Leaves a record of a byte that is not `fill`, in rows of `width` bytes `stride` bytes apart.
REF_KERNEL reference_broken(
    const unsigned char* bytes, i64 rows, i64 width, i64 stride, int fill, double* records) {
  Worst worst = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  EACH_ELEMENT(row, rows, col, width) {
    const int got = bytes[row * stride + col];
    if (got != fill) keep_worse(worst, infinity(), row, col, got, fill, 0.0);
  }
  leave(worst, records);
}

// The worst of many records, a few for each thread here: out has one for each of those.
REF_KERNEL reference_gather(const double* records, i64 count, double* out) {
  Worst worst = {-1.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  EACH_ITEM(item, count) {
    const double* r = records + 6 * item;
    keep_worse(worst, r[0], (i64)r[1], (i64)r[2], r[3], r[4], r[5]);
  }
  leave(worst, out);
}
"""
