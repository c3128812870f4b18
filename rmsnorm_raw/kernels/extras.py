"""Extras: what a problem may have beyond y = x * rstd * weight, woven into both operations.

Version 1: bias, residual, weight offset, the Llama family's rounding, heads, an 8-bit y.

A block works on one of a token's heads, the next block on the next one, so that blocks that run
together read memory that lies together; to the kernel the tokens are the rows, and all pointers are
the head's. Forward's residuals are never restrict: residual_out may be the residual.
"""

TEXT = r"""
#define SCALE_NONE 0
#define SCALE_STATIC 1
#define SCALE_DYNAMIC 2
// The value of a kind that is nearest to v.
template <int KIND> RR_FN float rounded(float v) {
  if constexpr (KIND == FP32) return v;
  const u32 bits = round_pair<KIND == FP32 ? BF16 : KIND>(v, 0.0f);
  return KIND == BF16 ? bf16_value(bits) : f16_value((u16)bits);
}

// Two values clamped, rounded to nearest even and packed as 8-bit floats; NaN stays NaN.
template <int KIND> RR_FN u32 round_fp8(float low, float high) {
#if !RR_AMD && !defined(RR_SIMULATOR)
  static_assert(KIND == E4M3, "CUDA has OCP's e4m3");
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
#else
  constexpr float MOST = KIND == E4M3 ? 448.0f : 240.0f;
  low = low > MOST ? MOST : low < -MOST ? -MOST : low;
  high = high > MOST ? MOST : high < -MOST ? -MOST : high;
#if defined(RR_SIMULATOR)
  return rr_sim_e4m3_bits(low, KIND == E4M3_FNUZ) |
         (u32)rr_sim_e4m3_bits(high, KIND == E4M3_FNUZ) << 8;
#else
  static_assert(KIND == (RR_GFX >= 950 ? E4M3 : E4M3_FNUZ), "each generation has its own e4m3");
  return (u32)__builtin_amdgcn_cvt_pk_fp8_f32(low, high, 0, false) & 0xffffu;
#endif
#endif
}

[[maybe_unused]] constexpr bool HAS_BIAS = RR_HAS_BIAS, HAS_RESIDUAL = RR_HAS_RESIDUAL;
[[maybe_unused]] constexpr bool HAS_RESIDUAL_OUT = RR_HAS_RESIDUAL_OUT;
typedef Pack<RR_B, RR_ELEMENTS> BPack;
typedef Pack<RR_RESIDUAL, RR_ELEMENTS> RPack;

RR_FN float weight_at(const WPack& w, int e) {
  return RR_WEIGHT_OFFSET == 0.0f ? w[e] : w[e] + RR_WEIGHT_OFFSET;
}
RR_FN BPack load_bias(const void* bias, u64 element) {
  return load_pack<RR_B, RR_ELEMENTS, POLICY_DEFAULT>(bias, element);
}

// ---- heads
RR_FN u32 head() { return blockIdx.x % RR_HEADS; }
RR_FN u32 program() { return blockIdx.x / RR_HEADS; }  // of the head's programs()
RR_FN u32 programs() { return gridDim.x / RR_HEADS; }
RR_FN i64 list_at(i64 row) { return row * RR_HEADS + head(); }
// A matrix, and a list of columns, from this block's head on.
template <int KIND> RR_FN void* of_head(void* matrix, i64 head_stride) {
  return (char*)matrix + (u64)(head() * head_stride) * ELEMENT_BYTES(KIND);
}
template <int KIND> RR_FN const void* of_head(const void* matrix, i64 head_stride) {
  return (const char*)matrix + (u64)(head() * head_stride) * ELEMENT_BYTES(KIND);
}
template <int KIND> RR_FN const void* columns_of_head(const void* list, u32 cols) {
  return (const char*)list + (RR_PER_HEAD ? (u64)head() * cols : 0) * ELEMENT_BYTES(KIND);
}

// ---- forward
// x, and the residual where there is one; together in fp32 what is normalised.
#if RR_HAS_RESIDUAL
struct In {
  XPack x;
  RPack residual;
  RR_FN float operator[](int e) const { return x[e] + residual[e]; }
};
RR_FN XPack& x_of(In& in) { return in.x; }
#define RR_LOAD_RESIDUAL(in, row, element)                         \
  (in).residual = load_pack<RR_RESIDUAL, RR_ELEMENTS, RR_LOAD_POLICY>( \
      residual, (u64)((row) * residual_stride) + (element))
#if defined(RR_CHUNKS)
RR_FN void await_pack(In& in) {
  await_pack(in.x);
  await_pack(in.residual);
}
#endif
#else
typedef XPack In;
RR_FN XPack& x_of(In& in) { return in; }
#define RR_LOAD_RESIDUAL(in, row, element)
#endif

RR_FN float normalised(const In& in, const WPack& w, const BPack& b, int e, float rstd) {
  float value = in[e] * rstd;
  if constexpr (RR_LLAMA) value = rounded<RR_X>(value);
  if constexpr (HAS_WEIGHT) value *= weight_at(w, e);
  if constexpr (HAS_BIAS) value += b[e];
  return value;
}
RR_FN void add_largest(const In& in, const WPack& w, const BPack& b, float rstd, float& largest) {
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e)
    largest = fmaxf(largest, fabsf(normalised(in, w, b, e, rstd)));
}
RR_FN void store_normalised(void* y, u64 element, const In& in, const WPack& w, const BPack& b,
                            float rstd, float inverse_scale) {
  float out[RR_ELEMENTS];
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e) {
    out[e] = normalised(in, w, b, e, rstd);
    if constexpr (RR_SCALE != SCALE_NONE) out[e] *= inverse_scale;
  }
  store_pack<RR_Y, RR_ELEMENTS, RR_STORE_POLICY>(y, element, out);
}
RR_FN void store_residual_out(void* residual_out, u64 element, const In& in) {
  float out[RR_ELEMENTS];
#pragma unroll
  for (int e = 0; e < RR_ELEMENTS; ++e) out[e] = in[e];
  store_pack<RR_RESIDUAL_OUT, RR_ELEMENTS, RR_STORE_POLICY>(residual_out, element, out);
}

// The largest of a value over the lanes of a row. `area`: a float a wave, none that a row_sum one
// barrier ahead uses.
RR_FN float row_max(float value, float* area) {
  value = lane_max<ROW_LANES>(value);
  if constexpr (ROW_WAVES > 1) {
    const int wave = threadIdx.x / RR_WAVE;
    if (threadIdx.x % RR_WAVE == 0) write_sum(area + wave, value);
    exchange_barrier();
    const float* first = area + wave / ROW_WAVES * ROW_WAVES;
    float part[ROW_WAVES];
#pragma unroll
    for (int i = 0; i < ROW_WAVES; ++i) part[i] = read_sum(first + i);
#pragma unroll
    for (int i = 0; i < ROW_WAVES; ++i) {
      wait_for_sum(part[i]);
      value = fmaxf(value, part[i]);
    }
  }
  return value;
}
// A row's scale: its largest y becomes the largest number of y's kind. 2^-100 for rows of zeros.
RR_FN float scale_of(float largest) {
  return fmaxf(largest * (1.0f / (RR_Y == E4M3_FNUZ ? 240.0f : 448.0f)), 7.888609e-31f);
}

#define RR_FORWARD_EXTRAS                                                                         \
  , const void *__restrict__ bias, const void *residual, i64 residual_stride, void *residual_out, \
      i64 residual_out_stride, float *scales, i64 x_head, i64 y_head, i64 residual_head,          \
      i64 residual_out_head
#define RR_BACKWARD_EXTRAS                                                                 \
  , const void *__restrict__ dresidual_out, i64 dresidual_out_stride,                      \
      void *__restrict__ dresidual, i64 dresidual_stride, float *__restrict__ bias_partial
#define RR_BACKWARD_HEADS                                                                       \
  , i64 dout_head, i64 x_head, i64 dx_head, i64 dresidual_out_head, i64 dresidual_head
"""
