"""The gate's own kernels: data, float64 sums and comparison, all on the device.

With them a problem of full size is checked without being copied to the host. Naive on purpose: one
element at a time, no wave operation, no atomic, no LDS, no barrier, and no name of the prelude, for
a fault there must not hide itself here. Dtypes, and what a problem has beyond the plain operation,
are run-time arguments, so one build serves every problem. :mod:`rmsnorm_raw.bounds` and
:mod:`rmsnorm_raw.gate_data` state the same in NumPy, and are what these are tested against.
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
    "reference_row_maxima",
    "reference_combine",
    "reference_worst_y",
    "reference_worst_dx",
    "reference_worst_sum",
    "reference_broken",
    "reference_gather",
)

TEXT = r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define REF_FN static __device__ __forceinline__
#define REF_KERNEL extern "C" __global__ void __launch_bounds__(256)

// ---- formats: p is the bits of the significand: bfloat16 8, float16 11, float32 24, e4m3fn 4,
// and for e4m3fnuz -4 -----------------------------------------------------------------------------
REF_FN bool is_fp8(int p) { return p == 4 || p == -4; }
REF_FN int digits(int p) { return p < 0 ? -p : p; }
REF_FN int sign_bit(int p) { return p == 24 ? 31 : is_fp8(p) ? 7 : 15; }
REF_FN int min_exponent(int p) { return p == 11 ? -14 : p == 4 ? -6 : p == -4 ? -7 : -126; }
// the exponent field after that of the largest number; in 8 bits there is none, nor an infinity
REF_FN int top_field(int p) { return p == 11 ? 31 : is_fp8(p) ? 16 : 255; }
REF_FN double from_bits(u64 bits) { return __builtin_bit_cast(double, bits); }
REF_FN double power_of_two(int k) { return from_bits((u64)(k + 1023) << 52); }
REF_FN double magnitude(double value) { return value < 0.0 ? -value : value; }
REF_FN double larger(double a, double b) { return a > b ? a : b; }
REF_FN double infinity() { return from_bits(0x7ff0000000000000ULL); }
REF_FN double not_a_number() { return from_bits(0x7ff8000000000000ULL); }

REF_FN u32 load_bits(const void* data, i64 at, int p) {
  if (p == 24) return ((const u32*)data)[at];
  return is_fp8(p) ? ((const u8*)data)[at] : ((const u16*)data)[at];
}

// An infinity decodes to the power of two after the largest finite number, and is compared as that.
REF_FN double decode(u32 bits, int p) {
  const int fraction_bits = digits(p) - 1, top = top_field(p);
  const u32 hidden = 1u << fraction_bits, fraction = bits & (hidden - 1);
  const int field = (int)(bits >> fraction_bits) & (is_fp8(p) ? 15 : top);
  if (field == top && fraction) return not_a_number();
  if (p == 4 && (bits & 0x7f) == 0x7f) return not_a_number();
  if (p == -4 && bits == 0x80) return not_a_number();
  const double significand = field ? fraction + hidden : fraction;
  const double value =
      significand * power_of_two((field ? field : 1) + min_exponent(p) - fraction_bits - 1);
  return bits >> sign_bit(p) ? -value : value;
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
REF_FN double spacing(double value, int p) {
  return power_of_two(binade(value, p) - (digits(p) - 1));
}

// Nearest, ties to even: adding 1.5 * 2^52 leaves a double no fraction bits.
REF_FN double steps_of(double value, int p) {
  const double shift = 6755399441055744.0;
  return value * power_of_two(digits(p) - 1 - binade(value, p)) + shift - shift;
}
REF_FN double nearest(double value, int p) { return steps_of(value, p) * spacing(value, p); }
REF_FN u32 encode(double value, int p) {  // not to 8 bits
  const u32 sign = value < 0.0 ? 1u << sign_bit(p) : 0u;
  const u32 binades = (u32)(binade(value, p) - min_exponent(p));
  return sign | ((binades << (p - 1)) + (u32)magnitude(steps_of(value, p)));
}
// Within an 8-bit float's range; within what infinities stand for, of the others.
REF_FN double clamped(double value, int p) {
  const double after = power_of_two(top_field(p) + min_exponent(p) - 1);
  const double limit = p == 4 ? 448.0 : p == -4 ? 240.0 : after;
  return value > limit ? limit : value < -limit ? -limit : value;
}

// ---- tensors: a matrix has rows of tokens and, in each, of heads; a list is as long as a row, or
// has a part for each head ------------------------------------------------------------------------
#define MATRIX(m) const void *m, i64 m##_stride, i64 m##_head_stride, int m##_p
#define LIST(list) const void *list, int list##_p
#define SHAPE i64 rows, i64 cols, i64 heads, int per_head, double offset
REF_FN i64 row_at(i64 row, i64 heads, i64 stride, i64 head_stride) {
  return heads == 1 ? row * stride : row / heads * stride + row % heads * head_stride;
}
#define PLACE(m, row, col) (row_at(row, heads, m##_stride, m##_head_stride) + (col))
#define AT(m, row, col) value_at(m, PLACE(m, row, col), m##_p)
#define AT_IF(m, row, col) (m ? AT(m, row, col) : 0.0)
#define OF_LIST(list, row, col) \
  value_at(list, per_head ? (row) % heads * cols + (col) : (col), list##_p)
#define WEIGHT_AT(row, col) (weight ? OF_LIST(weight, row, col) + offset : 1.0)

// ---- gate data: a hash of (seed, tensor, element), then integers times powers of two ------------
#define TENSOR_X 0
#define TENSOR_DOUT 1
#define TENSOR_WEIGHT 2
#define TENSOR_RESIDUAL 3
#define TENSOR_BIAS 4
#define TENSOR_DRESIDUAL_OUT 5

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
// What a weight is times: one of 16 is 0, three are negative.
REF_FN double sign_of(u64 r) { return (r & 15) == 0 ? 0.0 : (r & 15) < 4 ? -1.0 : 1.0; }
REF_FN u32 datum(
    int tensor, int exact, u64 seed, i64 zero_row, i64 large_row, i64 row, i64 col, i64 cols,
    int p) {
  if (row == zero_row) return 0;  // +0.0 in every format
  const u64 element = (u64)(row * cols + col), r = draw(seed, tensor, element);
  const bool large = row == large_row;
  const int scale = large ? (p == 11 ? 13 : 30) : (int)(row * 5 % 13) - 6;  // log2 of the row's
  const double integer = (double)((int)((r >> 32) % 17) - 8);
  double value;
  if (tensor == TENSOR_X) {
    value = (exact ? (r & 1 ? -65536 : 65536) : bell(r)) * power_of_two(scale - 16);
  } else if (tensor == TENSOR_DOUT) {  // half of x / scale in it: the row term of dx must matter
    value = exact ? integer
                  : (2 * bell(r) + bell(draw(seed, TENSOR_X, element))) * power_of_two(-17);
  } else if (tensor == TENSOR_WEIGHT) {
    value = exact ? power_of_two((int)((r >> 32) % 3) - 1) : 1.0 + bell(r) * power_of_two(-19);
    value *= sign_of(r) * (large && (r >> 4 & 15) == 0 ? 32768.0 : 1.0);
  } else if (tensor == TENSOR_RESIDUAL) {  // six bits longer than x, so that the sum has to round
    value = (64 * bell(r) + (int)(r & 63)) * power_of_two(scale - 24);
  } else if (tensor == TENSOR_BIAS) {
    value = bell(r) * power_of_two(-17);
  } else {
    value = (exact ? integer : bell(r) * power_of_two(-16)) * power_of_two(-scale);
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
struct Wanted {  // the error allowed is a factor * scale + slack
  double value, scale, slack;
};
// xhat is rounded to cast_p, if that is not 0, and may be off by the factor before.
REF_FN Wanted wanted_y(double xhat, double w, double b, int cast_p, double factor) {
  double slack = 0.0;
  if (cast_p) {
    const double low = nearest(xhat * (1.0 - factor), cast_p);
    const double high = nearest(xhat * (1.0 + factor), cast_p);
    xhat = (low + high) / 2, slack = magnitude((high - low) * w) / 2;
  }
  return {xhat * w + b, magnitude(xhat * w) + magnitude(b), slack};
}
// The bound is half a spacing (none for float32) + factor * scale + slack + 2^-126; in the exact
// case, equality after one rounding. Of 8 bits it is how far the rounding of what is off by the
// error, or by 1e-5 of itself, can be.
REF_FN void judge(
    Worst& worst, double got, Wanted wanted, double factor, int p, int exact, i64 row, i64 col) {
  double want = clamped(wanted.value, p), bound = 0.0, ratio;
  if (exact) {
    want = nearest(want, p);
    ratio = got == want ? 0.0 : infinity();
  } else {
    double error = factor * wanted.scale + wanted.slack;
    if (is_fp8(p)) {
      error = larger(1e-5 * magnitude(want), error);
      bound = larger(magnitude(nearest(clamped(want - error, p), p) - want),
                     magnitude(nearest(clamped(want + error, p), p) - want));
    } else {
      bound = (p == 24 ? 0.0 : spacing(want, p) / 2) + error;
    }
    bound += power_of_two(-126);
    ratio = magnitude(got - want) / bound;
    if (!(ratio >= 0.0)) ratio = infinity();  // NaN
  }
  keep_worse(worst, ratio, row, col, got, want, bound);
}
// Rows of a matrix go to blocks and their columns to threads, lists to the threads of all blocks.
#define EACH_ELEMENT(row, rows, col, cols)                   \
  for (i64 row = blockIdx.x; row < (rows); row += gridDim.x) \
    for (i64 col = threadIdx.x; col < (cols); col += blockDim.x)
#define EACH_ITEM(item, items)                                                           \
  for (i64 item = (i64)blockIdx.x * blockDim.x + threadIdx.x; item < (items); item += \
       (i64)gridDim.x * blockDim.x)

REF_KERNEL reference_write(
    void* data, i64 data_stride, i64 data_head_stride, int p, i64 rows, i64 cols, i64 heads,
    int tensor, int exact, u64 seed, i64 zero_row, i64 large_row) {
  EACH_ELEMENT(row, rows, col, cols) {
    const u32 bits = datum(tensor, exact, seed, zero_row, large_row, row, col, cols, p);
    const i64 at = PLACE(data, row, col);
    if (p == 24) {
      ((u32*)data)[at] = bits;
    } else {
      ((u16*)data)[at] = (u16)bits;
    }
  }
}

// Leaves a record of an element that is no longer what reference_write wrote, as bits.
REF_KERNEL reference_changed(
    MATRIX(data), i64 rows, i64 cols, i64 heads, int tensor, int exact, u64 seed, i64 zero_row,
    i64 large_row, double* records) {
  Worst worst = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  EACH_ELEMENT(row, rows, col, cols) {
    const u32 got = load_bits(data, PLACE(data, row, col), data_p);
    const u32 want = datum(tensor, exact, seed, zero_row, large_row, row, col, cols, data_p);
    if (got != want) keep_worse(worst, infinity(), row, col, got, want, 0.0);
  }
  leave(worst, records);
}

// partials: (shares, 3, rows) sums of h^2, g*h and |g*h| over every shares-th column, with
// h = x + residual and g = dout * weight. All but x may be absent (0).
REF_KERNEL reference_row_partials(
    MATRIX(dout), MATRIX(x), MATRIX(residual), LIST(weight), SHAPE, i64 shares, double* partials) {
  EACH_ITEM(item, rows * shares) {
    const i64 row = item / shares, share = item % shares;
    double square = 0.0, dot = 0.0, spread = 0.0;
    for (i64 col = share; col < cols; col += shares) {
      const double value = AT(x, row, col) + AT_IF(residual, row, col);
      square += value * value;
      if (dout) {
        const double product = AT(dout, row, col) * WEIGHT_AT(row, col) * value;
        dot += product;
        spread += magnitude(product);
      }
    }
    double* sums = partials + share * 3 * rows + row;
    sums[0] = square, sums[rows] = dot, sums[2 * rows] = spread;
  }
}

// partials: (shares, kinds, items) sums of dout*xhat and |dout*xhat|, and of dout and |dout| where
// there are four kinds, over `share_steps` rows each, with xhat = x * rstd. Per head there are cols
// items a head, and a step is all the heads of a token.
REF_KERNEL reference_column_partials(
    MATRIX(dout), MATRIX(x), const double* rstd, SHAPE, i64 shares, i64 share_steps, i64 kinds,
    double* partials) {
  const i64 parts = per_head ? heads : 1, items = parts * cols, steps = rows / parts;
  EACH_ITEM(item, items * shares) {
    const i64 share = item / items, at = item % items, col = at % cols;
    const i64 first = share * share_steps, next = first + share_steps;
    const i64 last = next < steps ? next : steps;
    double sum = 0.0, spread = 0.0, plain = 0.0, plain_spread = 0.0;
    for (i64 row = first * parts + at / cols; row < last * parts; row += parts) {
      const double d = AT(dout, row, col), product = d * (AT(x, row, col) * rstd[row]);
      sum += product, spread += magnitude(product);
      plain += d, plain_spread += magnitude(d);
    }
    double* sums = partials + share * kinds * items + at;
    sums[0] = sum, sums[items] = spread;
    if (kinds == 4) sums[2 * items] = plain, sums[3 * items] = plain_spread;
  }
}

// partials: (shares, 3, rows) maxima of |y|, and of the scale and the slack of its bound
REF_KERNEL reference_row_maxima(
    MATRIX(x), MATRIX(residual), LIST(weight), LIST(bias), const double* rstd, SHAPE, int cast_p,
    double factor, i64 shares, double* partials) {
  EACH_ITEM(item, rows * shares) {
    const i64 row = item / shares, share = item % shares;
    double value = 0.0, scale = 0.0, slack = 0.0;
    for (i64 col = share; col < cols; col += shares) {
      const double xhat = (AT(x, row, col) + AT_IF(residual, row, col)) * rstd[row];
      const double b = bias ? OF_LIST(bias, row, col) : 0.0;
      const Wanted y = wanted_y(xhat, WEIGHT_AT(row, col), b, cast_p, factor);
      value = larger(value, magnitude(y.value));
      scale = larger(scale, y.scale), slack = larger(slack, y.slack);
    }
    double* maxima = partials + share * 3 * rows + row;
    maxima[0] = value, maxima[rows] = scale, maxima[2 * rows] = slack;
  }
}

// results[i] = the sum, or the largest, over shares of partials[share][i]
REF_KERNEL reference_combine(
    const double* partials, i64 shares, i64 items, int largest, double* results) {
  EACH_ITEM(item, items) {
    double result = 0.0;
    for (i64 share = 0; share < shares; ++share) {
      const double partial = partials[share * items + item];
      result = largest ? larger(result, partial) : result + partial;
    }
    results[item] = result;
  }
}

// Compares y with its float64 value; an 8-bit one over the scale that is stored: one a row, or one
// (scale_step 0).
REF_KERNEL reference_worst_y(
    MATRIX(y), MATRIX(x), MATRIX(residual), LIST(weight), LIST(bias), const double* rstd,
    const float* scale, i64 scale_step, SHAPE, int cast_p, double factor, double* records) {
  Worst worst = {-1.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  EACH_ELEMENT(row, rows, col, cols) {
    const double xhat = (AT(x, row, col) + AT_IF(residual, row, col)) * rstd[row];
    const double b = bias ? OF_LIST(bias, row, col) : 0.0;
    Wanted wanted = wanted_y(xhat, WEIGHT_AT(row, col), b, cast_p, factor);
    if (scale) {
      const double over = scale[row * scale_step];
      wanted = {wanted.value / over, wanted.scale / over, wanted.slack / over};
    }
    judge(worst, AT(y, row, col), wanted, factor, y_p, 0, row, col);
  }
  leave(worst, records);
}

// Compares dx or dresidual. terms: (3, rows) rstd, mean(g*xhat) and mean|g*xhat|.
REF_KERNEL reference_worst_dx(
    MATRIX(dx), MATRIX(dout), MATRIX(x), MATRIX(dresidual_out), LIST(weight), const double* terms,
    SHAPE, double factor, int exact, double* records) {
  Worst worst = {-1.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  EACH_ELEMENT(row, rows, col, cols) {
    const double rstd = terms[row], xhat = AT(x, row, col) * rstd;
    const double g = AT(dout, row, col) * WEIGHT_AT(row, col);
    const double more = AT_IF(dresidual_out, row, col);
    const Wanted wanted = {
        rstd * (g - xhat * terms[rows + row]) + more,
        rstd * (magnitude(g) + magnitude(xhat) * terms[2 * rows + row]),
        power_of_two(-24) * magnitude(more)};
    judge(worst, AT(dx, row, col), wanted, factor, dx_p, exact, row, col);
  }
  leave(worst, records);
}

// Compares residual_out with x + residual, rounded to float32 and then once more.
REF_KERNEL reference_worst_sum(
    MATRIX(out), MATRIX(x), MATRIX(residual), SHAPE, double* records) {
  Worst worst = {-1.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  EACH_ELEMENT(row, rows, col, cols) {
    const double sum = nearest(AT(x, row, col) + AT_IF(residual, row, col), 24);
    judge(worst, AT(out, row, col), {sum, 0.0, 0.0}, 0.0, out_p, 1, row, col);
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
