/*
 * Tensor cores: products of 16 x 16 by 16 x 8 with sums in float32 (mma.sync, compute capability 8.0 on), and the loads
 * of their operands from shared memory (ldmatrix). The emulation does what each instruction is defined to do, lane by
 * lane, so that the kernels' use of the layouts is what a test proves.
 *
 * Layouts (PTX ISA, "Matrix fragments for mma.m16n8k16"), g = lane / 4, t = lane % 4, two values a register:
 *   A  a0 (g, 2t) a1 (g + 8, 2t) a2 (g, 2t + 8) a3 (g + 8, 2t + 8)
 *   B  b0 (2t, g) b1 (2t + 8, g), along the first
 *   C  c0 c1 (g, 2t) c2 c3 (g + 8, 2t), float32
 */
#ifndef ONT_CUDA_MMA_CUH
#define ONT_CUDA_MMA_CUH

#include "kernels/launch.cuh"

struct alignas(16) ont_16bytes {
    uint32_t x[4];
};

#ifdef ONT_EMULATE

static inline bool ont_has_mma() { return true; }

ONT_DEVICE ont_16bytes ont_load16(const void *p)
{
    ont_emulate_need_aligned(p, 16);
    ont_16bytes v;
    memcpy(&v, p, 16);
    return v;
}
ONT_DEVICE void ont_store16(void *p, const ont_16bytes &v)
{
    ont_emulate_need_aligned(p, 16);
    memcpy(p, &v, 16);
}

ONT_DEVICE void ont_copy16_async(void *to, const void *from, bool valid)
{
    ont_emulate_need_aligned(to, 16);
    if (valid) ont_emulate_need_aligned(from, 16);
    ont_emulate_copy(to, valid ? from : nullptr, 16);
}
ONT_DEVICE void ont_copy_wait() { ont_emulate_copy_wait(); }

template <class T> ONT_DEVICE void ont_mma(float *c, const uint32_t *a, const uint32_t *b)
{
    struct {
        T a[8], b[4];
    } own;
    memcpy(own.a, a, sizeof own.a);
    memcpy(own.b, b, sizeof own.b);
    const ont_warp_values *all = ont_emulate_exchange(&own, sizeof own);
    int lane = (int)ont_lane_now->index % 32, g = lane / 4, t = lane % 4;
    float sums[4];
    for (int e = 0; e < 4; e++) {
        int row = g + 8 * (e / 2), column = 2 * t + e % 2;
        sums[e] = c[e];
        for (int k = 0; k < 16; k++) {
            const T *left = (const T *)(const void *)all->of[row % 8 * 4 + k % 8 / 2],
                    *right = (const T *)(const void *)all->of[column * 4 + k % 8 / 2];
            sums[e] += ont_load(&left[(row / 8 + 2 * (k / 8)) * 2 + k % 2]) * ont_load(&right[8 + k / 8 * 2 + k % 2]);
        }
    }
    ont_emulate_exchanged();
    memcpy(c, sums, sizeof sums);
}

ONT_DEVICE void ont_ldmatrix(uint32_t *r, const void *row, bool transposed)
{
    ont_emulate_need_aligned(row, 16);
    const ont_warp_values *all = ont_emulate_exchange(&row, sizeof row);
    int lane = (int)ont_lane_now->index % 32, g = lane / 4, t = lane % 4;
    for (int m = 0; m < 4; m++)
        for (int e = 0; e < 2; e++) {
            const uint16_t *from;
            memcpy(&from, all->of[m * 8 + (transposed ? 2 * t + e : g)], sizeof from);
            uint32_t value = from[transposed ? g : 2 * t + e];
            r[m] = e ? r[m] | value << 16 : value;
        }
    ont_emulate_exchanged();
}
ONT_DEVICE void ont_ldmatrix4(uint32_t *r, const void *row) { ont_ldmatrix(r, row, false); }
ONT_DEVICE void ont_ldmatrix4_trans(uint32_t *r, const void *row) { ont_ldmatrix(r, row, true); }

#else

static inline bool ont_has_mma()
{
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8;
}

ONT_DEVICE ont_16bytes ont_load16(const void *p) { return *reinterpret_cast<const ont_16bytes *>(p); }
/* To global memory. In PTX, since nvcc splits some of such assignments into four stores. */
ONT_DEVICE void ont_store16(void *p, const ont_16bytes &v)
{
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x[0]), "r"(v.x[1]),
                 "r"(v.x[2]), "r"(v.x[3])
                 : "memory");
}

template <class T> ONT_DEVICE void ont_mma(float *c, const uint32_t *a, const uint32_t *b);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
/* From global to shared memory, or zeros there, without a register. The thread may read it after it has waited for its
 * copies, other threads after a barrier behind that. */
ONT_DEVICE void ont_copy16_async(void *to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
}
ONT_DEVICE void ont_copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#define ONT_MMA(type, name) \
    template <> __device__ __forceinline__ void ont_mma<type>(float *c, const uint32_t *a, const uint32_t *b) \
    { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 " \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
    }
#else /* never launched there, since ont_has_mma() is false */
ONT_DEVICE void ont_copy16_async(void *, const void *, bool) { __trap(); }
ONT_DEVICE void ont_copy_wait() {}
#define ONT_MMA(type, name) \
    template <> __device__ __forceinline__ void ont_mma<type>(float *, const uint32_t *, const uint32_t *) { __trap(); }
#endif
ONT_MMA(ont_f16, "f16")
ONT_MMA(ont_bf16, "bf16")
#undef ONT_MMA

ONT_DEVICE void ont_ldmatrix4(uint32_t *r, const void *row)
{
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
ONT_DEVICE void ont_ldmatrix4_trans(uint32_t *r, const void *row)
{
    uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

ONT_DEVICE __half2 ont_round_two(float low, float high, const ont_f16 *) { return __floats2half2_rn(low, high); }
ONT_DEVICE __nv_bfloat162 ont_round_two(float low, float high, const ont_bf16 *)
{
    return __floats2bfloat162_rn(low, high);
}

#endif

/* Two values of 16 bits, rounded by one instruction. */
template <class T> ONT_DEVICE uint32_t ont_pack(float low, float high)
{
#ifdef ONT_EMULATE
    T two[2];
    ont_store(&two[0], low);
    ont_store(&two[1], high);
#else
    const auto two = ont_round_two(low, high, (const T *)nullptr);
#endif
    uint32_t bits;
    memcpy(&bits, &two, sizeof bits);
    return bits;
}

#endif
