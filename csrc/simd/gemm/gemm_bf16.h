/*
 * ont_simd_gemm_bf16() of gemm_kernel.h by AVX512-BF16. Part of gemm_kernel.inc.c; no other file includes it. A panel
 * consists of 32-bit words; each holds two elements that are adjacent along k.
 */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512bf16")
#endif

/* ---- packing ---- */

/* Panels of `width` words from an operand (k, count): two rows are interleaved. */
INLINE void pack_bf16_mn_major(const ont_gemm_pack_source *s, const int64_t width, float *panels)
{
    int64_t steps = (s->k + 1) / 2;
    for (int64_t step = 0; step < steps; step++, panels += width) {
        const uint16_t *x = (const uint16_t *)s->x + 2 * step * s->ld;
        bool second = 2 * step + 1 < s->k;
        if (2 * step + PREFETCH_LINES < s->k)
            for (int64_t line = 0; line < s->count; line += 2 * LINE) {
                __builtin_prefetch(x + PREFETCH_LINES * s->ld + line);
                __builtin_prefetch(x + (PREFETCH_LINES + 1) * s->ld + line);
            }
        float *to = panels;
        for (int64_t i = 0; i < s->count; i += width, to += width * steps)
            for (int64_t l = 0; l < width; l += LANES) {
                __mmask16 inside = mask_first_16(s->count - i - l);
                const uint16_t *at = x + (inside ? i + l : 0);
                __m256i low = _mm256_maskz_loadu_epi16(inside, at), high = _mm256_setzero_si256();
                if (second) high = _mm256_maskz_loadu_epi16(inside, at + s->ld);
                _mm512_mask_storeu_epi32(to + l, mask_first_16(width - l), interleave_bf16(low, high));
            }
    }
}

/* Panels of `width` words from an operand (count, k): transposes LANES x LANES words at a time. */
INLINE void pack_bf16_k_major(const ont_gemm_pack_source *s, const int64_t width, float *panels)
{
    const int64_t group = width < LANES ? width : LANES;
    int64_t steps = (s->k + 1) / 2;
    for (int64_t i = 0; i < s->count; i += width, panels += width * steps)
        for (int64_t g = 0; g < width; g += group) {
            int64_t rows = ont_min(group, s->count - i - g);
            const uint16_t *x = (const uint16_t *)s->x + (rows > 0 ? i + g : 0) * s->ld;
            for (int64_t step = 0; step < steps; step += LANES) {
                __mmask32 inside = mask_first_32(s->k - 2 * step);
                vec v[LANES];
#pragma GCC unroll 16
                for (int r = 0; r < LANES; r++) {
                    v[r] = (vec){0};
                    if (r >= rows) continue;
                    v[r] = (vec)_mm512_maskz_loadu_epi16(inside, x + r * s->ld + 2 * step);
                    __builtin_prefetch(x + r * s->ld + 2 * step + PREFETCH_LINES * 2 * LINE);
                }
                transpose_lanes(v);
                float *to = panels + step * width + g;
                for (int64_t l = 0; l < ont_min(LANES, steps - step); l++)
                    _mm512_mask_storeu_ps(to + l * width, mask_first_16(group), (__m512)v[l]);
            }
        }
}

static void pack_bf16_a(const ont_gemm_pack_source *s, void *panels)
{
    if (s->mn_major) pack_bf16_mn_major(s, MR, panels);
    else pack_bf16_k_major(s, MR, panels);
}

static void pack_bf16_b(const ont_gemm_pack_source *s, void *panels)
{
    if (s->mn_major) pack_bf16_mn_major(s, NR, panels);
    else pack_bf16_k_major(s, NR, panels);
}

/* ---- epilogue ---- */

/* The results of `inside` out of 32 lanes to c. */
INLINE void write_vectors(const ont_gemm_epilogue *e, const vec acc[2], const uint16_t *bias, char *c,
                          __mmask32 inside, bool nontemporal)
{
    __m512 y[2];
    for (int v = 0; v < 2; v++) {
        __mmask16 part = (__mmask16)(inside >> (v * LANES));
        y[v] = (__m512)(e->alpha * acc[v]);
        if (bias) y[v] += bf16_to_f32(_mm256_maskz_loadu_epi16(part, bias + v * LANES));
        if (e->adds_to_c) y[v] += _mm512_maskz_loadu_ps(part, c + 64 * v);
    }
    if (e->c_is_bf16) {
        __m512i narrow = (__m512i)_mm512_cvtne2ps_pbh(y[1], y[0]);
        if (nontemporal) _mm512_stream_si512((__m512i *)(void *)c, narrow);
        else _mm512_mask_storeu_epi16(c, inside, narrow);
        return;
    }
    for (int v = 0; v < 2; v++)
        if (nontemporal) _mm512_stream_ps((float *)(void *)c + v * LANES, y[v]);
        else _mm512_mask_storeu_ps(c + 64 * v, (__mmask16)(inside >> (v * LANES)), y[v]);
}

INLINE void write_bf16(const ont_gemm_epilogue *e, int64_t r, const vec acc[2])
{
    write_vectors(e, acc, e->bias, (char *)e->c + r * e->ldc * (e->c_is_bf16 ? 2 : 4), UINT32_MAX, false);
}

/* n <= 32 accumulators; the other lanes are zero. */
INLINE void load_vectors(const float *acc, int64_t n, vec to[2])
{
    for (int v = 0; v < 2; v++) to[v] = (vec)_mm512_maskz_loadu_ps(mask_first_16(n - v * LANES), acc + v * LANES);
}

static void store_bf16(const float *acc, int64_t ld, int64_t m, int64_t n, const ont_gemm_epilogue *e)
{
    int64_t size = e->c_is_bf16 ? 2 : 4;
    for (int64_t i = 0; i < m; i++, acc += ld) {
        char *c = (char *)e->c + i * e->ldc * size;
        const uint16_t *bias = e->bias;
        int64_t head = e->nontemporal ? ont_min(n, (int64_t)(-(uintptr_t)c & 63) / size) : 0;
        vec both[2];
        if (head) {
            load_vectors(acc, head, both);
            write_vectors(e, both, bias, c, mask_first_32(head), false);
        }
        for (int64_t j = head; j < n; j += 2 * LANES) {
            __mmask32 inside = mask_first_32(n - j);
            load_vectors(acc + j, n - j, both);
            write_vectors(e, both, bias ? bias + j : NULL, c + j * size, inside,
                          e->nontemporal && inside == UINT32_MAX);
        }
    }
    if (e->nontemporal) _mm_sfence();
}

/* ---- micro-kernels ---- */

INLINE vec broadcast_word(const float *a)
{
    int32_t word;
    memcpy(&word, a, sizeof word);
    return (vec)_mm512_set1_epi32(word);
}

#define T(name) name##_bf16
#define W(name) name##_bf16
#define UNPACKED_A 0
#define KR 2
#define BROADCAST(a) broadcast_word(a)
#define MULTIPLY_ADD(sum, x, line) (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(line))
#include "simd/gemm/gemm_microkernel.h"

extern const ont_gemm_kernel PASTE(ont_gemm_bf16_, ONT_ISA);
const ont_gemm_kernel PASTE(ont_gemm_bf16_, ONT_ISA) = {
    .mr = MR, .nr = NR, .kr = 2, .kc = 768, .element_size = 2, .packed_size = 2,
    .pack_a = pack_bf16_a, .pack_b = pack_bf16_b, .multiply = multiply_bf16};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
