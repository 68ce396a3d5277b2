/*
 * Several elements of a row or column in accesses of 16 bytes, converted to and from the type of the arithmetic.
 */
#ifndef ONT_CUDA_CHUNKS_CUH
#define ONT_CUDA_CHUNKS_CUH

#include "kernels/mma.cuh"

/* N elements, a multiple of 16 bytes, from p, which is aligned to 16 bytes; or one element from any p. */
template <class T, class C, int N> ONT_DEVICE void load_chunk(const T *p, C (&v)[N])
{
    ONT_UNROLL
    for (int k = 0; k < N; k += 16 / (int)sizeof(T)) {
        T part[16 / sizeof(T)];
        const ont_16bytes bits = ont_load16(p + k);
        memcpy(part, &bits, 16);
        ONT_UNROLL
        for (int j = 0; j < 16 / (int)sizeof(T); j++) v[k + j] = ont_load(&part[j]);
    }
}
template <class T, class C> ONT_DEVICE void load_chunk(const T *p, C (&v)[1]) { v[0] = ont_load(p); }

template <class T, class C> ONT_DEVICE void convert(T *to, const C *v, int n)
{
    ONT_UNROLL
    for (int k = 0; k < n; k++) ont_store(&to[k], v[k]);
}
template <class T> ONT_DEVICE void convert_pairs(T *to, const float *v, int n)
{
    ONT_UNROLL
    for (int k = 0; k < n; k += 2) {
        const uint32_t two = ont_pack<T>(v[k], v[k + 1]);
        memcpy(to + k, &two, sizeof two);
    }
}
ONT_DEVICE void convert(ont_f16 *to, const float *v, int n) { convert_pairs(to, v, n); }
ONT_DEVICE void convert(ont_bf16 *to, const float *v, int n) { convert_pairs(to, v, n); }

/* The same to p. */
template <class T, class C, int N> ONT_DEVICE void store_chunk(T *p, const C (&v)[N])
{
    ONT_UNROLL
    for (int k = 0; k < N; k += 16 / (int)sizeof(T)) {
        T part[16 / sizeof(T)];
        ont_16bytes bits;
        convert(part, v + k, 16 / (int)sizeof(T));
        memcpy(&bits, part, 16);
        ont_store16(p + k, bits);
    }
}
template <class T, class C> ONT_DEVICE void store_chunk(T *p, const C (&v)[1]) { ont_store(p, v[0]); }

/* Whether each pointer that is not NULL is aligned to 16 bytes. */
static inline bool are_aligned(const void *const *pointers, int n)
{
    for (int i = 0; i < n; i++)
        if ((uintptr_t)pointers[i] % 16) return false;
    return true;
}

#endif
