/*
 * Products of blocks of attention, compiled once per instruction set with ONT_ISA naming it. See attention_product.h.
 * Vectors are the compiler's; a tile's sums stay in registers over all of k, and as many rows are in a tile as keep the
 * multipliers busy.
 */
#include "simd/attention_product.h"

#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>

#include "simd/words.h"
#endif

#include "simd/lanes.h"

enum { ROWS = 12, VECTORS = LANES == 16 ? 4 : 2 }; /* VECTORS: of a tile's row */

/* A word in all lanes: a float, or two of bfloat16 that are nothing as a float. */
INLINE vec spread(const float *p)
{
#if defined(__AVX512F__)
    int32_t word;
    memcpy(&word, p, sizeof word);
    return (vec)_mm512_set1_epi32(word);
#else
    return *p - (vec){0};
#endif
}
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

#define T(name) name
#define STEP 1
#define MULTIPLY(sum, x, line) ((sum) + (x) * (line))
#include "simd/attention_tile.h"

/* LANES rows of LANES elements at a time; rows behind the last are 0. */
static void transpose(const float *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld)
{
    int64_t padded = (rows + ONT_TILE_LANES - 1) / ONT_TILE_LANES * ONT_TILE_LANES;
    for (int64_t i = 0; i < padded; i += LANES)
        for (int64_t k = 0; k < width; k += LANES) {
            const float *from = x + i * stride + k;
            int64_t lines = least(LANES, width - k), n = least(LANES, rows - i);
            vec v[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) {
                v[r] = (vec){0};
                if (r >= n) continue;
                if (lines == LANES) v[r] = load(from + r * stride);
                else memcpy(&v[r], from + r * stride, (size_t)lines * sizeof *x);
            }
            turn_all(v);
            for (int64_t l = 0; l < lines; l++) store(y + (k + l) * ld + i, v[l]);
        }
}

static void copy(const float *x, int64_t stride, int64_t rows, int64_t width, float factor, float *y, int64_t ld)
{
    int64_t padded = (width + ONT_TILE_LANES - 1) / ONT_TILE_LANES * ONT_TILE_LANES;
    for (int64_t i = 0; i < rows; i++, x += stride, y += ld) {
        for (int64_t k = 0; k < width; k++) y[k] = factor * x[k];
        for (int64_t k = width; k < padded; k++) y[k] = 0;
    }
}

static void put(const float *x, int64_t ld, int64_t rows, int64_t width, bool add, float *y, int64_t stride)
{
    for (int64_t i = 0; i < rows; i++, x += ld, y += stride)
        if (add)
            for (int64_t k = 0; k < width; k++) y[k] += x[k];
        else
            for (int64_t k = 0; k < width; k++) y[k] = x[k];
}

extern const ont_tile_loops PASTE(ont_tile_loops_, ONT_ISA);
const ont_tile_loops PASTE(ont_tile_loops_, ONT_ISA) = {product, transpose, copy, put};

#if defined(__AVX512F__)
#include "simd/attention_pairs.h"
#endif
