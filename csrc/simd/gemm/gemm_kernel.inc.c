/*
 * Packing and macro-kernels of gemm_kernel.h, compiled once per instruction set; ONT_ISA names it. As in Goto and van
 * de Geijn, 2008, accumulators of a micro-tile stay in registers and a panel stays in L1.
 */
#include "simd/gemm/gemm_kernel.h"

#include <string.h>

#include "base/int_math.h"
#if defined(__AVX512F__)
#include <immintrin.h>

#include "simd/words.h"
#endif

#include "simd/lanes.h"

#if defined(__AVX512F__)
#define WIDE 1
#else
#define WIDE 0
#endif
enum {
    MR = WIDE ? 14 : 6, /* rows of a micro-tile */
    NR = 2 * LANES,     /* its columns: two vectors */
    TAIL = NR / 4,      /* columns of an interleaved tail panel (interleave_tail) */
    LINE = 64 / sizeof(float), /* floats of a cache line */
    PREFETCH_LINES = 8,
};

/* ---- packing ---- */

enum { PACK_ROWS = 16 }; /* rows of an mn-major operand that are packed at a time */

/* sums (n) += x (rows, n), row after row. */
INLINE void add_rows(float *sums, const float *x, int64_t ld, int64_t rows, int64_t n)
{
    int64_t i = 0;
    for (; rows == PACK_ROWS && i + LANES <= n; i += LANES) {
        vec sum = load(sums + i);
#pragma GCC unroll 16
        for (int r = 0; r < PACK_ROWS; r++) sum += load(x + r * ld + i);
        store(sums + i, sum);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = i; j < n; j++) sums[j] += x[r * ld + j];
}

/*
 * Panels of `width` from an operand (k, count). PACK_ROWS rows at a time, so that adjacent cache lines of a panel are
 * written together; prefetching the next rows does not help then.
 */
INLINE void pack_mn_major(const ont_gemm_pack_source *s, const int64_t width, float *panels)
{
    const float *x = s->x;
    for (int64_t k = 0; k < s->k; k += PACK_ROWS, x += PACK_ROWS * s->ld, panels += PACK_ROWS * width) {
        const int64_t rows = ont_min(PACK_ROWS, s->k - k);
        float *to = panels;
        int64_t i = 0;
        if (s->k_sums) add_rows(s->k_sums, x, s->ld, rows, s->count);
        for (; i + width <= s->count; i += width, to += width * s->k)
            for (int64_t r = 0; r < rows; r++) memcpy(to + r * width, x + r * s->ld + i, (size_t)width * sizeof *to);
        for (int64_t r = 0; i < s->count && r < rows; r++) {
            memcpy(to + r * width, x + r * s->ld + i, (size_t)(s->count - i) * sizeof *to);
            memset(to + r * width + s->count - i, 0, (size_t)(width - s->count + i) * sizeof *to);
        }
    }
}

/*
 * Transposes x (rows <= LANES, LANES) into `lines` lines of a panel, `width` floats apart. Prefetches `distance` floats
 * behind each row of x.
 */
INLINE void pack_transposed(const float *x, int64_t ld, int64_t distance, int64_t rows, int64_t lines,
                            const int64_t width, float *to)
{
    const int64_t kept = width < LANES ? width : LANES;
    vec v[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) {
        v[r] = (vec){0};
        if (r >= rows) continue;
        if (lines == LANES) {
            v[r] = load(x + r * ld);
            __builtin_prefetch(x + r * ld + distance);
        } else {
            memcpy(&v[r], x + r * ld, (size_t)lines * sizeof *x);
        }
    }
    transpose_lanes(v);
    if (lines == LANES) {
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) /* the next store overwrites the excess lanes of a narrow line */
            if (kept == LANES || l < LANES - 1) store(to + l * width, v[l]);
            else memcpy(to + l * width, &v[l], (size_t)kept * sizeof *to);
    } else {
        for (int64_t l = 0; l < lines; l++) memcpy(to + l * width, &v[l], (size_t)kept * sizeof *to);
    }
}

/* Panels of `width` from an operand (count, k). */
INLINE void pack_k_major(const ont_gemm_pack_source *s, const int64_t width, float *panels)
{
    const int64_t group = width < LANES ? width : LANES;
    for (int64_t i = 0; i < s->count; i += width, panels += width * s->k)
        for (int64_t g = 0; g < width; g += group) {
            const float *x = (const float *)s->x + (i + g) * s->ld;
            int64_t rows = ont_min(group, s->count - i - g), k = 0;
            int64_t next = group * s->ld - s->k; /* from the end of a row to the same row of the next group */
            if (rows == group)
                for (; k + LANES <= s->k; k += LANES)
                    pack_transposed(x + k, s->ld,
                                    PREFETCH_LINES * LINE + (k + PREFETCH_LINES * LINE < s->k ? 0 : next), group,
                                    LANES, width, panels + k * width + g);
            for (; k < s->k; k += LANES)
                pack_transposed(x + k, s->ld, 0, rows, ont_min(LANES, s->k - k), width, panels + k * width + g);
        }
}

static void pack_a(const ont_gemm_pack_source *s, void *panels)
{
    if (s->mn_major) pack_mn_major(s, MR, panels);
    else pack_k_major(s, MR, panels);
}

/* An interleaved tail panel: columns [first, count), at most TAIL. Each vector is (k, k + 1) of column 0, of 1, ... */
INLINE void pack_tail(const ont_gemm_pack_source *s, int64_t first, float *to)
{
    const int64_t n = s->count - first, next = s->mn_major ? 1 : s->ld;
    for (int64_t k = 0; k < s->k; k += 2, to += LANES) {
        const float *x = (const float *)s->x + (s->mn_major ? k * s->ld + first : first * s->ld + k);
        const float *odd = k + 1 < s->k ? x + (s->mn_major ? s->ld : 1) : NULL;
        float line[LANES] = {0};
        for (int64_t j = 0; j < n; j++) line[2 * j] = x[j * next];
        for (int64_t j = 0; odd && j < n; j++) line[2 * j + 1] = odd[j * next];
        memcpy(to, line, sizeof line);
    }
}

static void pack_b(const ont_gemm_pack_source *s, void *panels)
{
    ont_gemm_pack_source whole = *s;
    int64_t rest = s->count % NR;
    if (s->interleave_tail && rest <= TAIL) whole.count -= rest;
    if (s->mn_major) pack_mn_major(&whole, NR, panels);
    else pack_k_major(&whole, NR, panels);
    if (whole.count < s->count) pack_tail(s, whole.count, (float *)panels + whole.count * s->k);
}

/* ---- epilogue ---- */

/* The epilogue of the sub-block whose first element is (i, j). */
INLINE ont_gemm_epilogue epilogue_at(const ont_gemm_epilogue *e, int64_t i, int64_t j)
{
    ont_gemm_epilogue at = *e;
    int64_t row = e->trans_c ? j : i, column = e->trans_c ? i : j;
    at.c = (char *)e->c + (row * e->ldc + column) * (e->c_is_bf16 ? 2 : 4);
    if (e->bias) at.bias = (const char *)e->bias + column * (e->bias_is_bf16 ? 2 : 4);
    return at;
}

/* Columns [0, NR) of row r. */
INLINE void write_f32(const ont_gemm_epilogue *e, int64_t r, const vec acc[2])
{
    float *c = (float *)e->c + r * e->ldc;
    const float *bias = e->bias;
    for (int v = 0; v < 2; v++)
        store(c + v * LANES, e->alpha * acc[v] + (bias ? load(bias + v * LANES) : (vec){0}));
}

/* The first n lanes; the others are zero. */
INLINE vec load_first(const float *x, int64_t n)
{
#if WIDE
    return (vec)_mm512_maskz_loadu_ps(mask_first_16(n), x);
#else
    vec v = {0};
    memcpy(&v, x, (size_t)n * sizeof *x);
    return v;
#endif
}

INLINE void store_first(float *x, int64_t n, vec v)
{
#if WIDE
    _mm512_mask_storeu_ps(x, mask_first_16(n), (__m512)v);
#else
    memcpy(x, &v, (size_t)n * sizeof *x);
#endif
}

/* A micro-tile (rows, NR) to c (NR, rows). */
INLINE void write_trans_c(const ont_gemm_epilogue *e, vec acc[MR][2], const int rows)
{
    for (int first = 0; first < rows; first += LANES) {
        const int n = rows - first < LANES ? rows - first : LANES;
        vec bias = e->bias ? load_first((const float *)e->bias + first, n) : (vec){0};
        for (int v = 0; v < 2; v++) {
            vec x[LANES];
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) x[l] = l < n ? acc[first + l][v] : (vec){0};
            transpose_lanes(x);
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++)
                store_first((float *)e->c + (v * LANES + l) * e->ldc + first, n, e->alpha * x[l] + bias);
        }
    }
}

/* acc (m, n), rows `ld` apart, to c (m, n). */
static void store_f32(const float *acc, int64_t ld, int64_t m, int64_t n, const ont_gemm_epilogue *e)
{
    const float alpha = e->alpha, *bias = e->bias;
    for (int64_t i = 0; i < m; i++, acc += ld) {
        float *c = (float *)e->c + i * e->ldc;
        int64_t j = 0;
#if WIDE
        if (e->nontemporal) {
            int64_t head = ont_min(n, (int64_t)(-(uintptr_t)c & 63) / (int64_t)sizeof *c);
            for (; j < head; j++) c[j] = alpha * acc[j] + (bias ? bias[j] : 0);
            for (; j + LANES <= n; j += LANES)
                _mm512_stream_ps(c + j, (__m512)(alpha * load(acc + j) + (bias ? load(bias + j) : (vec){0})));
        }
#endif
        for (; j < n; j++) c[j] = alpha * acc[j] + (bias ? bias[j] : 0);
    }
#if WIDE
    if (e->nontemporal) _mm_sfence();
#endif
}

/* acc (m, n) to c (n, m), ROWS_AT_ONCE rows of acc at a time. */
static void store_trans_c(const float *acc, int64_t ld, int64_t m, int64_t n, const ont_gemm_epilogue *e)
{
    enum { ROWS_AT_ONCE = 256 };
    float columns[LANES * ROWS_AT_ONCE];
    for (int64_t i = 0; i < m; i += ROWS_AT_ONCE)
        for (int64_t j = 0; j < n; j += LANES) {
            int64_t rows = ont_min(ROWS_AT_ONCE, m - i);
            for (int64_t r = 0; r < rows; r += LANES) {
                vec x[LANES];
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) x[l] = i + r + l < m ? load(acc + (i + r + l) * ld + j) : (vec){0};
                transpose_lanes(x);
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) store(columns + l * ROWS_AT_ONCE + r, x[l]);
            }
            ont_gemm_epilogue at = epilogue_at(e, i, j);
            store_f32(columns, ROWS_AT_ONCE, ont_min(LANES, n - j), rows, &at);
        }
}

/* ---- micro-kernels ---- */

/* Of a micro-tile: m <= MR rows of `vectors` <= 2 vectors. Constants where it is inlined. */
typedef struct tile_size {
    int m, vectors;
} tile_size;

/* Cache lines that the next micro-tiles read; one is prefetched per step of k. */
typedef struct prefetch_list {
    const float *a, *b;
    int64_t lines_a, lines_b;
} prefetch_list;

/* acc: this micro-tile's accumulators in memory. e: where to write the result, or NULL to write acc. */
typedef void (*microkernel_fn)(const ont_gemm_block *p, const float *a, const float *b, float *acc,
                               const ont_gemm_epilogue *e, const prefetch_list *next);

#if WIDE
#define FOR_EACH_MR(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define FOR_EACH_MR(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

#define T(name) name##_packed
#define W(name) name##_f32
#define UNPACKED_A 0
#define KR 1
#define BROADCAST(a) (*(a) - (vec){0})
#define MULTIPLY_ADD(sum, x, line) ((sum) + (x) * (line))
#include "simd/gemm/gemm_microkernel.h"

#define T(name) name##_unpacked
#define W(name) name##_f32
#define UNPACKED_A 1
#define KR 1
#define BROADCAST(a) (*(a) - (vec){0})
#define MULTIPLY_ADD(sum, x, line) ((sum) + (x) * (line))
#include "simd/gemm/gemm_microkernel.h"

static void multiply_f32(const ont_gemm_block *p)
{
    (p->lda ? multiply_unpacked : multiply_packed)(p);
}

extern const ont_gemm_kernel PASTE(ont_gemm_kernel_, ONT_ISA);
const ont_gemm_kernel PASTE(ont_gemm_kernel_, ONT_ISA) = {
    .mr = MR, .nr = NR, .kr = 1, .kc = 512, .element_size = 4, .packed_size = 4, .is_full = true,
    .pack_a = pack_a, .pack_b = pack_b, .multiply = multiply_f32};

#if WIDE
#include "simd/gemm/gemm_bf16.h"
#include "simd/gemm/gemm_bf16x3.h"
#endif
