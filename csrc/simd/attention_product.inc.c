/*
 * Products of blocks of attention, compiled once per instruction set with ONT_ISA naming it. See attention_product.h. Vectors
 * are the compiler's; a tile's sums stay in registers over all of k, and as many rows are in a tile as keep the multipliers busy.
 */
#include "simd/attention_product.h"

#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4 }; /* VECTORS: of a tile's row */
#elif defined(__AVX2__)
enum { LANES = 8, VECTORS = 2 };
#else
enum { LANES = 4, VECTORS = 2 };
#endif
enum { ROWS = 12 };

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float vec_any __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t places __attribute__((vector_size(16)));
typedef float quad_any __attribute__((vector_size(16), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const vec_any *)p; }
INLINE void store(float *p, vec v) { *(vec_any *)p = v; }
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

/* Four rows become four columns. */
INLINE void turn(quad r[4])
{
    quad a = __builtin_shuffle(r[0], r[1], (places){0, 4, 1, 5});
    quad b = __builtin_shuffle(r[2], r[3], (places){0, 4, 1, 5});
    quad c = __builtin_shuffle(r[0], r[1], (places){2, 6, 3, 7});
    quad d = __builtin_shuffle(r[2], r[3], (places){2, 6, 3, 7});
    r[0] = __builtin_shuffle(a, b, (places){0, 1, 4, 5});
    r[1] = __builtin_shuffle(a, b, (places){2, 3, 6, 7});
    r[2] = __builtin_shuffle(c, d, (places){0, 1, 4, 5});
    r[3] = __builtin_shuffle(c, d, (places){2, 3, 6, 7});
}

static void transpose(const float *x, int64_t stride, int64_t rows, int64_t width, float *y, int64_t ld)
{
    int64_t whole = rows / 4 * 4, quads = width / 4 * 4, padded = (rows + ONT_TILE_LANES - 1) / ONT_TILE_LANES * ONT_TILE_LANES;
    for (int64_t i = 0; i < whole; i += 4) {
        const float *from = x + i * stride;
        for (int64_t k = 0; k < quads; k += 4) {
            quad r[4];
            for (int l = 0; l < 4; l++) r[l] = *(const quad_any *)(from + l * stride + k);
            turn(r);
            for (int l = 0; l < 4; l++) *(quad_any *)(y + (k + l) * ld + i) = r[l];
        }
        for (int64_t k = quads; k < width; k++)
            for (int l = 0; l < 4; l++) y[k * ld + i + l] = from[l * stride + k];
    }
    for (int64_t k = 0; k < width; k++)
        for (int64_t i = whole; i < padded; i++) y[k * ld + i] = i < rows ? x[i * stride + k] : 0;
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
