/*
 * Panels and products of gemm_kernel.h, compiled once per instruction set with ONT_ISA naming it. The order of loops is
 * that of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008: sums of a tile stay in
 * registers, and panels of B in the first cache.
 */
#include "simd/gemm_kernel.h"

#include <string.h>
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
enum { ROWS = WIDE ? 14 : 6, COLUMNS = 2 * LANES, REST = LANES / 2, LINE = 64 / sizeof(float), AHEAD = 8 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- panels ---- */

enum { TOGETHER = 16 }; /* rows of an operand stored (k, count) that are laid out at a time */

/* Rows of x are added one by one. */
INLINE void add_rows(float *sums, const float *x, int64_t ld, int64_t rows, int64_t n)
{
    int64_t i = 0;
    for (; rows == TOGETHER && i + LANES <= n; i += LANES) {
        vec sum = load(sums + i);
#pragma GCC unroll 16
        for (int r = 0; r < TOGETHER; r++) sum += load(x + r * ld + i);
        store(sums + i, sum);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = i; j < n; j++) sums[j] += x[r * ld + j];
}

/*
 * Panels of `width` of an operand stored (k, count). Some rows at a time, so that a panel gets lines that lie together;
 * asking for the next rows gains nothing then.
 */
INLINE void lay_across(const ont_gemm_source *s, const int64_t width, float *panels)
{
    const float *x = s->x;
    for (int64_t k = 0; k < s->k; k += TOGETHER, x += TOGETHER * s->ld, panels += TOGETHER * width) {
        const int64_t rows = least(TOGETHER, s->k - k);
        float *to = panels;
        int64_t i = 0;
        if (s->sums) add_rows(s->sums, x, s->ld, rows, s->count);
        for (; i + width <= s->count; i += width, to += width * s->k)
            for (int64_t r = 0; r < rows; r++) memcpy(to + r * width, x + r * s->ld + i, (size_t)width * sizeof *to);
        for (int64_t r = 0; i < s->count && r < rows; r++) {
            memcpy(to + r * width, x + r * s->ld + i, (size_t)(s->count - i) * sizeof *to);
            memset(to + r * width + s->count - i, 0, (size_t)(width - s->count + i) * sizeof *to);
        }
    }
}

/* Elements [k, k + LANES) of `rows` rows become LANES lines of a panel, `width` apart, of which `lines` are kept. What
 * lies `ahead` of each row is read soon. */
INLINE void lay_lines(const float *x, int64_t ld, int64_t ahead, int64_t rows, int64_t lines, const int64_t width,
                      float *to)
{
    const int64_t kept = width < LANES ? width : LANES;
    vec v[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) {
        v[r] = (vec){0};
        if (r >= rows) continue;
        if (lines == LANES) {
            v[r] = load(x + r * ld);
            __builtin_prefetch(x + r * ld + ahead);
        } else {
            memcpy(&v[r], x + r * ld, (size_t)lines * sizeof *x);
        }
    }
    turn_all(v);
    if (lines == LANES) {
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) /* what is behind a narrow line is written over by the next one */
            if (kept == LANES || l < LANES - 1) store(to + l * width, v[l]);
            else memcpy(to + l * width, &v[l], (size_t)kept * sizeof *to);
    } else {
        for (int64_t l = 0; l < lines; l++) memcpy(to + l * width, &v[l], (size_t)kept * sizeof *to);
    }
}

/* Panels of `width` of an operand stored (count, k). */
INLINE void lay_along(const ont_gemm_source *s, const int64_t width, float *panels)
{
    const int64_t group = width < LANES ? width : LANES;
    for (int64_t i = 0; i < s->count; i += width, panels += width * s->k)
        for (int64_t g = 0; g < width; g += group) {
            const float *x = (const float *)s->x + (i + g) * s->ld;
            int64_t rows = least(group, s->count - i - g), k = 0;
            int64_t next = group * s->ld - s->k; /* from behind a row to the row of the next group */
            if (rows == group)
                for (; k + LANES <= s->k; k += LANES)
                    lay_lines(x + k, s->ld, AHEAD * LINE + (k + AHEAD * LINE < s->k ? 0 : next), group, LANES, width,
                              panels + k * width + g);
            for (; k < s->k; k += LANES)
                lay_lines(x + k, s->ld, 0, rows, least(LANES, s->k - k), width, panels + k * width + g);
        }
}

static void lay_a(const ont_gemm_source *s, void *panels)
{
    if (s->across) lay_across(s, ROWS, panels);
    else lay_along(s, ROWS, panels);
}

/* The columns from `first` on, a quarter of a panel or less, where a line holds two steps of k side by side. */
INLINE void lay_rest(const ont_gemm_source *s, int64_t first, float *to)
{
    const int64_t n = s->count - first, next = s->across ? 1 : s->ld;
    for (int64_t k = 0; k < s->k; k += 2, to += LANES) {
        const float *x = (const float *)s->x + (s->across ? k * s->ld + first : first * s->ld + k);
        const float *odd = k + 1 < s->k ? x + (s->across ? s->ld : 1) : NULL;
        float line[LANES] = {0};
        for (int64_t j = 0; j < n; j++) line[2 * j] = x[j * next];
        for (int64_t j = 0; odd && j < n; j++) line[2 * j + 1] = odd[j * next];
        memcpy(to, line, sizeof line);
    }
}

static void lay_b(const ont_gemm_source *s, void *panels)
{
    ont_gemm_source whole = *s;
    int64_t rest = s->count % COLUMNS;
    if (s->paired && rest <= REST) whole.count -= rest;
    if (s->across) lay_across(&whole, COLUMNS, panels);
    else lay_along(&whole, COLUMNS, panels);
    if (whole.count < s->count) lay_rest(s, whole.count, (float *)panels + whole.count * s->k);
}

/* ---- results ---- */

/* The place of what is behind sums (i, j). */
INLINE ont_gemm_place moved(const ont_gemm_place *to, int64_t i, int64_t j)
{
    ont_gemm_place at = *to;
    int64_t row = to->turned ? j : i, column = to->turned ? i : j;
    at.c = (char *)to->c + (row * to->ldc + column) * (to->half ? 2 : 4);
    if (to->row) at.row = (const char *)to->row + column * (to->half_row ? 2 : 4);
    return at;
}

/* Two vectors of row r. */
INLINE void write_f32(const ont_gemm_place *to, int64_t r, const vec sums[2])
{
    float *c = (float *)to->c + r * to->ldc;
    const float *row = to->row;
    for (int v = 0; v < 2; v++)
        store(c + v * LANES, to->alpha * sums[v] + (row ? load(row + v * LANES) : (vec){0}));
}

/* The first n lanes, those behind them 0. */
INLINE vec load_first(const float *x, int64_t n)
{
#if WIDE
    return (vec)_mm512_maskz_loadu_ps(first_of_16(n), x);
#else
    vec v = {0};
    memcpy(&v, x, (size_t)n * sizeof *x);
    return v;
#endif
}

INLINE void store_first(float *x, int64_t n, vec v)
{
#if WIDE
    _mm512_mask_storeu_ps(x, first_of_16(n), (__m512)v);
#else
    memcpy(x, &v, (size_t)n * sizeof *x);
#endif
}

/* Two vectors of each row become 2 LANES rows. */
INLINE void write_turned(const ont_gemm_place *to, vec sums[ROWS][2], const int rows)
{
    for (int first = 0; first < rows; first += LANES) {
        const int n = rows - first < LANES ? rows - first : LANES;
        vec add = to->row ? load_first((const float *)to->row + first, n) : (vec){0};
        for (int v = 0; v < 2; v++) {
            vec x[LANES];
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) x[l] = l < n ? sums[first + l][v] : (vec){0};
            turn_all(x);
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++)
                store_first((float *)to->c + (v * LANES + l) * to->ldc + first, n, to->alpha * x[l] + add);
        }
    }
}

/* Rows and columns of sums go to their place. */
static void put_f32(const float *sums, int64_t ld, int64_t m, int64_t n, const ont_gemm_place *to)
{
    const float alpha = to->alpha, *row = to->row;
    for (int64_t i = 0; i < m; i++, sums += ld) {
        float *c = (float *)to->c + i * to->ldc;
        int64_t j = 0;
#if WIDE
        if (to->stream) {
            int64_t head = least(n, (int64_t)(-(uintptr_t)c & 63) / (int64_t)sizeof *c);
            for (; j < head; j++) c[j] = alpha * sums[j] + (row ? row[j] : 0);
            for (; j + LANES <= n; j += LANES)
                _mm512_stream_ps(c + j, (__m512)(alpha * load(sums + j) + (row ? load(row + j) : (vec){0})));
        }
#endif
        for (; j < n; j++) c[j] = alpha * sums[j] + (row ? row[j] : 0);
    }
#if WIDE
    if (to->stream) _mm_sfence();
#endif
}

/* Rows and columns of sums change places, some at a time, on their way. */
static void put_turned(const float *sums, int64_t ld, int64_t m, int64_t n, const ont_gemm_place *to)
{
    enum { AT_ONCE = 256 };
    float turned[LANES * AT_ONCE];
    for (int64_t i = 0; i < m; i += AT_ONCE)
        for (int64_t j = 0; j < n; j += LANES) {
            int64_t rows = least(AT_ONCE, m - i);
            for (int64_t r = 0; r < rows; r += LANES) {
                vec x[LANES];
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) x[l] = i + r + l < m ? load(sums + (i + r + l) * ld + j) : (vec){0};
                turn_all(x);
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) store(turned + l * AT_ONCE + r, x[l]);
            }
            ont_gemm_place at = moved(to, i, j);
            put_f32(turned, AT_ONCE, least(LANES, n - j), rows, &at);
        }
}

/* ---- products ---- */

/* Lines that the next tiles read first, one fetched per step of k. */
typedef struct ahead {
    const float *a, *b;
    int64_t lines_a, lines_b;
} ahead;

typedef void (*tile_fn)(const ont_gemm_block *p, const float *a, const float *b, float *sums, const ont_gemm_place *to,
                        const ahead *next);

#if WIDE
#define ALL_TILES(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define ALL_TILES(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

#define T(name) name##_laid
#define W(name) name##_f32
#define STORED 0
#define DEPTH 1
#define SPREAD(a) (*(a) - (vec){0})
#define MULTIPLY(sum, x, line) ((sum) + (x) * (line))
#include "simd/gemm_tile.h"

#define T(name) name##_stored
#define W(name) name##_f32
#define STORED 1
#define DEPTH 1
#define SPREAD(a) (*(a) - (vec){0})
#define MULTIPLY(sum, x, line) ((sum) + (x) * (line))
#include "simd/gemm_tile.h"

static void multiply_f32(const ont_gemm_block *p)
{
    (p->lda ? multiply_stored : multiply_laid)(p);
}

extern const ont_gemm_kernel PASTE(ont_gemm_kernel_, ONT_ISA);
const ont_gemm_kernel PASTE(ont_gemm_kernel_, ONT_ISA) = {
    .rows = ROWS, .columns = COLUMNS, .step = 1, .chunk = 512, .element = 4, .laid = 4, .direct = true,
    .lay_a = lay_a, .lay_b = lay_b, .multiply = multiply_f32};

#if WIDE
#include "simd/gemm_pairs.h"
#include "simd/gemm_split.h"
#endif
