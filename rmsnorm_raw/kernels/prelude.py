"""The dialect: one vocabulary for hiprtc, NVRTC, clang and the CPU simulator.

Kernels are written against the names below and never against a vendor's. The text includes nothing
and defines its own integer names: hiprtc 7 has no ``uint16_t``, NVRTC has no headers at all.

Two branches, AMD (wave 64) and CUDA (wave 32). The simulator compiles either, by its wave, and
supplies only the leaves marked RR_SIMULATOR: conversions, the copies behind loads and stores, the
AMD lane builtins and ``__shfl_xor_sync``.

Version 1: vectors, conversions, policies, sums over the lanes of a wave by DPP, permlane swaps or
    shuffles.
"""

TEXT = r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#if RR_WAVE == 64
#define RR_AMD 1
#else
#define RR_AMD 0
#endif
#define RR_FN __device__ __forceinline__

// AMD's second launch bound is waves per SIMD, CUDA's is blocks per multiprocessor; the host fills
// RR_SECOND_BOUND from the knob of its own vendor. The first is not optional: without it hiprtc
// plans for 1024 threads, caps at 128 registers and spills.
#if RR_SECOND_BOUND
#define RR_BOUNDS __launch_bounds__(RR_BLOCK, RR_SECOND_BOUND)
#else
#define RR_BOUNDS __launch_bounds__(RR_BLOCK)
#endif

// One LDS object a kernel, 16-byte aligned, sized at the launch. With two objects hiprtc drains
// every copy in flight before each read.
#if defined(RR_SIMULATOR)
#define RR_LDS(name) float* name = (float*)rr_sim_lds()
#else
#define RR_LDS(name)                                                           \
  extern __shared__ __attribute__((aligned(16))) unsigned char rr_lds_bytes[]; \
  float* name = (float*)rr_lds_bytes
#endif

// ---- vectors ----------------------------------------------------------------------------------
// Structs, not vector attributes: NVRTC ignores ext_vector_type and vector_size with a warning, and
// a quarter of the data would be moved. An aligned struct becomes one wide access everywhere.
template <int BYTES> struct Words;
template <> struct alignas(16) Words<16> { u32 w[4]; };
template <> struct alignas(8) Words<8> { u32 w[2]; };
template <> struct alignas(4) Words<4> { u32 w[1]; };
template <> struct alignas(2) Words<2> { u16 w[1]; };
template <> struct Words<1> { u8 w[1]; };
#define RR_EXACT(T, bytes) \
  static_assert(sizeof(T) == bytes && alignof(T) == bytes, "a vector has the wrong size")
RR_EXACT(Words<16>, 16);
RR_EXACT(Words<8>, 8);
RR_EXACT(Words<4>, 4);
RR_EXACT(Words<2>, 2);
RR_EXACT(Words<1>, 1);

#if RR_AMD && !defined(RR_SIMULATOR)
// the nontemporal builtins want clang's own vectors
template <int BYTES> struct Native;
template <> struct Native<16> { typedef u32 type __attribute__((ext_vector_type(4))); };
template <> struct Native<8> { typedef u32 type __attribute__((ext_vector_type(2))); };
template <> struct Native<4> { typedef u32 type; };
template <> struct Native<2> { typedef u16 type; };
template <> struct Native<1> { typedef u8 type; };
RR_EXACT(Native<16>::type, 16);
RR_EXACT(Native<8>::type, 8);
#endif
#if !RR_AMD && !defined(RR_SIMULATOR)
RR_FN u32 lds_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#endif
RR_FN float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
RR_FN u32 as_bits(float value) { return __builtin_bit_cast(u32, value); }

// ---- loads and stores with a cache policy -----------------------------------------------------
#define POLICY_DEFAULT 0
#define POLICY_KEEP 1    // CUDA: L2 evict_last. AMD has none.
#define POLICY_STREAM 2  // CUDA: L2 evict_first. AMD: nt.

#if !RR_AMD && !defined(RR_SIMULATOR)
template <int POLICY> RR_FN u64 l2_policy() {
  static_assert(POLICY == POLICY_KEEP || POLICY == POLICY_STREAM, "the default has no policy word");
  u64 policy;
  if constexpr (POLICY == POLICY_KEEP) {
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}
// Not volatile: a load may be moved and merged like any other, or the loads in flight shrink.
RR_FN Words<16> load_hinted(const Words<16>* p, u64 policy) {
  Words<16> v;
  asm("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p), "l"(policy));
  return v;
}
RR_FN Words<8> load_hinted(const Words<8>* p, u64 policy) {
  Words<8> v;
  asm("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
      : "=r"(v.w[0]), "=r"(v.w[1]) : "l"(p), "l"(policy));
  return v;
}
RR_FN Words<4> load_hinted(const Words<4>* p, u64 policy) {
  Words<4> v;
  asm("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(v.w[0]) : "l"(p), "l"(policy));
  return v;
}
RR_FN Words<2> load_hinted(const Words<2>* p, u64 policy) {
  Words<2> v;
  asm("ld.global.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(v.w[0]) : "l"(p), "l"(policy));
  return v;
}
RR_FN void store_hinted(Words<16>* p, const Words<16>& v, u64 policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
               ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]), "l"(policy)
               : "memory");
}
RR_FN void store_hinted(Words<8>* p, const Words<8>& v, u64 policy) {
  asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;"
               ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "l"(policy) : "memory");
}
RR_FN void store_hinted(Words<4>* p, const Words<4>& v, u64 policy) {
  asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;"
               ::"l"(p), "r"(v.w[0]), "l"(policy) : "memory");
}
RR_FN void store_hinted(Words<2>* p, const Words<2>& v, u64 policy) {
  asm volatile("st.global.L2::cache_hint.u16 [%0], %1, %2;"
               ::"l"(p), "h"(v.w[0]), "l"(policy) : "memory");
}
RR_FN void store_hinted(Words<1>* p, const Words<1>& v, u64 policy) {
  asm volatile("st.global.L2::cache_hint.u8 [%0], %1, %2;"
               ::"l"(p), "h"((u16)v.w[0]), "l"(policy) : "memory");
}
#endif

template <int POLICY, int BYTES> RR_FN Words<BYTES> load_words(const void* address) {
  static_assert(!RR_AMD || POLICY == POLICY_DEFAULT || POLICY == POLICY_STREAM, "not AMD's");
#if defined(RR_SIMULATOR)
  Words<BYTES> v;
  rr_sim_load(&v, address, BYTES);
  return v;
#elif RR_AMD
  if constexpr (POLICY == POLICY_STREAM) {
    typedef typename Native<BYTES>::type T;
    const T v = __builtin_nontemporal_load((const T*)address);
    return __builtin_bit_cast(Words<BYTES>, v);
  } else {
    return *(const Words<BYTES>*)address;
  }
#else
  if constexpr (POLICY == POLICY_DEFAULT) {
    return *(const Words<BYTES>*)address;
  } else {
    return load_hinted((const Words<BYTES>*)address, l2_policy<POLICY>());
  }
#endif
}

template <int POLICY, int BYTES> RR_FN void store_words(void* address, const Words<BYTES>& v) {
  static_assert(!RR_AMD || POLICY == POLICY_DEFAULT || POLICY == POLICY_STREAM, "not AMD's");
#if defined(RR_SIMULATOR)
  rr_sim_store(address, &v, BYTES);
#elif RR_AMD
  // clang's own vector here too: it takes a struct apart, and puts fp32 stores of two_pass together
  // no more (hiprtc 7.0.0 and 7.2.4: four of 4 bytes)
  typedef typename Native<BYTES>::type T;
  if constexpr (POLICY == POLICY_STREAM) {
    __builtin_nontemporal_store(__builtin_bit_cast(T, v), (T*)address);
  } else {
    *(T*)address = __builtin_bit_cast(T, v);
  }
#else
  if constexpr (POLICY == POLICY_DEFAULT) {
    *(Words<BYTES>*)address = v;
  } else {
    store_hinted((Words<BYTES>*)address, v, l2_policy<POLICY>());
  }
#endif
}

// ---- elements: storage is always u16 or u32 (fp8: u8), arithmetic always fp32 -----------------
#define FP16 0
#define BF16 1
#define FP32 2
#define E4M3 3       // OCP's: gfx950, CUDA
#define E4M3_FNUZ 4  // gfx942's
#define ELEMENT_BYTES(KIND) ((KIND) == FP32 ? 4 : (KIND) < FP32 ? 2 : 1)

RR_FN float bf16_value(u32 bits) { return as_float(bits << 16); }
RR_FN float f16_value(u16 bits) {
#if defined(RR_SIMULATOR)
  return rr_sim_f16_value(bits);
#elif RR_AMD
  return (float)__builtin_bit_cast(_Float16, bits);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

// Two values rounded to nearest even and packed, `low` in the low half; NaN stays NaN.
template <int KIND> RR_FN u32 round_pair(float low, float high) {
  static_assert(KIND == FP16 || KIND == BF16, "fp32 needs no rounding");
#if defined(RR_SIMULATOR)
  return KIND == BF16 ? rr_sim_bf16_bits(low) | (u32)rr_sim_bf16_bits(high) << 16
                      : rr_sim_f16_bits(low) | (u32)rr_sim_f16_bits(high) << 16;
#elif RR_AMD
  // whole vectors only: clang's bit cast of one vector element returns element 0 for every index
  if constexpr (KIND == BF16) {
    typedef __bf16 pair __attribute__((ext_vector_type(2)));
    const pair v = {(__bf16)low, (__bf16)high};
    return __builtin_bit_cast(u32, v);
  } else {
    typedef _Float16 pair __attribute__((ext_vector_type(2)));
    const pair v = {(_Float16)low, (_Float16)high};
    return __builtin_bit_cast(u32, v);
  }
#else
  u32 bits;  // PTX names the high half first
  if constexpr (KIND == BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
#endif
}

// Two values clamped, rounded and packed as 8-bit floats: extras.py, which alone stores them.
template <int KIND> RR_FN u32 round_fp8(float low, float high);

// COUNT elements of one kind as they lie in memory, moved in pieces of at most 16 bytes.
template <int KIND, int COUNT> struct Pack {
  static constexpr int BYTES = COUNT * ELEMENT_BYTES(KIND);
  static constexpr int PIECE = BYTES < 16 ? BYTES : 16;
  static constexpr int PIECES = BYTES / PIECE;
  Words<PIECE> piece[PIECES];

  // element i, as fp32
  RR_FN float operator[](int i) const {
    constexpr int EACH = PIECE / ELEMENT_BYTES(KIND);
    const Words<PIECE>& p = piece[i / EACH];
    const int at = i % EACH;
    if constexpr (KIND == FP32) {
      return as_float(p.w[at]);
    } else {
      // a short piece holds its one element in w[0]; otherwise two elements share a word
      if constexpr (PIECE == 2) {
        return KIND == BF16 ? bf16_value(p.w[0]) : f16_value(p.w[0]);
      } else {
        const u32 word = p.w[at / 2];
        if constexpr (KIND == BF16) {
          return at % 2 ? as_float(word & 0xffff0000u) : bf16_value(word);
        } else {
          return f16_value((u16)(at % 2 ? word >> 16 : word));
        }
      }
    }
  }
};

template <int KIND, int COUNT, int POLICY>
RR_FN Pack<KIND, COUNT> load_pack(const void* base, u64 element) {
  Pack<KIND, COUNT> pack;
  const char* address = (const char*)base + element * ELEMENT_BYTES(KIND);
#pragma unroll
  for (int i = 0; i < pack.PIECES; ++i)
    pack.piece[i] = load_words<POLICY, pack.PIECE>(address + i * pack.PIECE);
  return pack;
}

template <int KIND, int COUNT, int POLICY>
RR_FN void store_pack(void* base, u64 element, const float (&value)[COUNT]) {
  Pack<KIND, COUNT> pack;
  constexpr int EACH = pack.PIECE / ELEMENT_BYTES(KIND);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    Words<pack.PIECE>& p = pack.piece[i / EACH];
    if constexpr (KIND == FP32) {
      p.w[i % EACH] = as_bits(value[i]);
    } else if constexpr (KIND > FP32 && pack.PIECE == 1) {
      p.w[0] = (u8)round_fp8<KIND>(value[i], 0.0f);
    } else if constexpr (KIND > FP32 && pack.PIECE == 2) {
      if (i % 2 == 0) p.w[0] = (u16)round_fp8<KIND>(value[i], value[i + 1]);
    } else if constexpr (KIND > FP32) {
      if (i % 4 == 0)
        p.w[i % EACH / 4] = round_fp8<KIND>(value[i], value[i + 1]) |
                            round_fp8<KIND>(value[i + 2], value[i + 3]) << 16;
    } else if constexpr (pack.PIECE == 2) {
      p.w[0] = (u16)round_pair<KIND>(value[i], 0.0f);
    } else {
      if (i % 2 == 0) p.w[i % EACH / 2] = round_pair<KIND>(value[i], value[i + 1]);
    }
  }
  char* address = (char*)base + element * ELEMENT_BYTES(KIND);
#pragma unroll
  for (int i = 0; i < pack.PIECES; ++i)
    store_words<POLICY, pack.PIECE>(address + i * pack.PIECE, pack.piece[i]);
}

RR_FN float reciprocal_sqrt(float v) {
#if defined(RR_SIMULATOR)
  return rr_sim_rsqrt(v);
#elif RR_AMD
  return __builtin_amdgcn_rsqf(v);  // one instruction; 1/sqrtf is about 25
#else
  return rsqrtf(v);
#endif
}

// ---- sums over lanes --------------------------------------------------------------------------
#if RR_AMD
// v of the lane that a DPP control names; with all rows and banks enabled it folds into the add
template <int CONTROL> RR_FN float dpp(float v) {
  return as_float(__builtin_amdgcn_update_dpp(0, (int)as_bits(v), CONTROL, 0xf, 0xf, true));
}
RR_FN float read_lane(float v, int lane) {
  return as_float(__builtin_amdgcn_readlane((int)as_bits(v), lane));
}
// what all lanes of a wave have alike, as a scalar
RR_FN u32 uniform(u32 v) { return (u32)__builtin_amdgcn_readfirstlane((int)v); }
RR_FN u64 uniform(u64 v) { return (u64)uniform((u32)(v >> 32)) << 32 | uniform((u32)v); }
#endif

// v combined over each aligned group of LANES lanes of a wave, in every lane of the group. All of
// the wave must be here. A butterfly: lanes combine the same pairs, so all agree bitwise.
template <int LANES, typename Combine> RR_FN float over_lanes(float v, Combine combine) {
  static_assert(LANES <= RR_WAVE && (LANES & (LANES - 1)) == 0, "lanes: a power of two");
#if RR_AMD
  if constexpr (LANES >= 2) v = combine(v, dpp<0xb1>(v));    // quad_perm [1,0,3,2]: the neighbour
  if constexpr (LANES >= 4) v = combine(v, dpp<0x4e>(v));    // quad_perm [2,3,0,1]: the other pair
  if constexpr (LANES >= 8) v = combine(v, dpp<0x141>(v));   // row_half_mirror: the other quad
  if constexpr (LANES >= 16) v = combine(v, dpp<0x140>(v));  // row_mirror: the other half row
#if RR_GFX >= 950
  if constexpr (LANES >= 32) {
    const u32 bits = as_bits(v);
    auto swapped = __builtin_amdgcn_permlane16_swap(bits, bits, false, false);
    const u32 even_row = swapped[0], odd_row = swapped[1];
    v = combine(as_float(even_row), as_float(odd_row));
  }
  if constexpr (LANES >= 64) {
    const u32 bits = as_bits(v);
    auto swapped = __builtin_amdgcn_permlane32_swap(bits, bits, false, false);
    const u32 low_half = swapped[0], high_half = swapped[1];
    v = combine(as_float(low_half), as_float(high_half));
  }
#else
  // gfx942 has no permlane swaps: the four rows' results are read into scalars
  if constexpr (LANES >= 32) {
    const float low = combine(read_lane(v, 0), read_lane(v, 16));
    const float high = combine(read_lane(v, 32), read_lane(v, 48));
    v = LANES == 64 ? combine(low, high) : (threadIdx.x & 32) ? high : low;
  }
#endif
#else
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2)
    v = combine(v, __shfl_xor_sync(0xffffffffu, v, distance));
#endif
  return v;
}
template <int LANES> RR_FN float lane_sum(float v) {
  return over_lanes<LANES>(v, [](float a, float b) { return a + b; });
}
template <int LANES> RR_FN float lane_max(float v) {
  return over_lanes<LANES>(v, [](float a, float b) { return fmaxf(a, b); });
}

// A balanced tree over values FIRST to FIRST + COUNT - 1.
template <int FIRST, int COUNT, int N> RR_FN float tree_sum(const float (&value)[N]) {
  if constexpr (COUNT == 1) {
    return value[FIRST];
  } else {
    constexpr int HALF = COUNT / 2;
    return tree_sum<FIRST, HALF>(value) + tree_sum<FIRST + HALF, COUNT - HALF>(value);
  }
}
template <int N> RR_FN float tree_sum(const float (&value)[N]) { return tree_sum<0, N>(value); }
"""
