/*
 * GEMM over blocks of attention, compiled once per instruction set, which ONT_ISA names. See attention_gemm.h. Vectors
 * are GCC vector extensions. The sums of a tile stay in registers over all of k; a tile has as many rows as hide the
 * latency of the multiply-adds.
 */
#include "simd/attention/attention_gemm.h"

#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>

#include "simd/words.h"
#endif

#include "simd/lanes.h"

enum { ROWS = 12, VECTORS = LANES == 16 ? 4 : 2 }; /* of a tile, at most */

/* One 32-bit word in all lanes: a float or two bfloat16, which must not pass through float arithmetic. */
INLINE vec broadcast(const float *p)
{
#if defined(__AVX512F__)
    int32_t word;
    memcpy(&word, p, sizeof word);
    return (vec)_mm512_set1_epi32(word);
#else
    return *p - (vec){0};
#endif
}
INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

#define T(name) name
#define K_PER_WORD 1
#define MULTIPLY(sum, x, b_row) ((sum) + (x) * (b_row))
#include "simd/attention/attention_gemm_tile.h"

/* Transposes squares of LANES by LANES. */
static void transpose(const float *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld)
{
    int64_t padded = (rows + ONT_ATTENTION_LANES - 1) / ONT_ATTENTION_LANES * ONT_ATTENTION_LANES;
    for (int64_t i = 0; i < padded; i += LANES)
        for (int64_t k = 0; k < width; k += LANES) {
            const float *from = x + i * stride + k;
            int64_t lines = min_i64(LANES, width - k), n = min_i64(LANES, rows - i);
            vec v[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                v[r] = (vec){0};
                if (r >= n) continue;
                if (lines == LANES) v[r] = load(from + r * stride);
                else memcpy(&v[r], from + r * stride, (size_t)lines * sizeof *x);
            }
            transpose_lanes(v);
            for (int64_t l = 0; l < lines; l++) store(y + (k + l) * ld + i, v[l]);
        }
}

static void copy(const float *x, int64_t stride, int64_t rows, int64_t width, float factor, float *y, int64_t ld)
{
    int64_t padded = (width + ONT_ATTENTION_LANES - 1) / ONT_ATTENTION_LANES * ONT_ATTENTION_LANES;
    for (int64_t i = 0; i < rows; i++, x += stride, y += ld) {
        for (int64_t k = 0; k < width; k++) y[k] = factor * x[k];
        for (int64_t k = width; k < padded; k++) y[k] = 0;
    }
}

static void store_rows(const float *x, int64_t ld, int64_t rows, int64_t width, bool add, float *y, int64_t stride)
{
    for (int64_t i = 0; i < rows; i++, x += ld, y += stride)
        if (add)
            for (int64_t k = 0; k < width; k++) y[k] += x[k];
        else
            for (int64_t k = 0; k < width; k++) y[k] = x[k];
}

extern const ont_attention_gemm_f32 PASTE(ont_attention_gemm_f32_, ONT_ISA);
const ont_attention_gemm_f32 PASTE(ont_attention_gemm_f32_, ONT_ISA) = {gemm, transpose, copy, store_rows};

#if defined(__AVX512F__)
#include "simd/attention/attention_gemm_bf16.h"
#endif
