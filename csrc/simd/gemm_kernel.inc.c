/*
 * Panels and products of gemm_kernel.h, compiled once per instruction set with ONT_ISA naming it. The order of loops is
 * that of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008: sums of a tile stay in
 * registers, and panels of B in the first cache.
 */
#include "simd/gemm_kernel.h"

#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "simd/lanes.h"

#if defined(__AVX512F__)
#define WIDE 1
#else
#define WIDE 0
#endif
enum { ROWS = WIDE ? 14 : 6, COLUMNS = 2 * LANES, LINE = 64 / sizeof(float), AHEAD = 8 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- panels ---- */

typedef int32_t lanes_of __attribute__((vector_size(LANES * 4)));

/* LANES rows become columns: blocks of 1, 2, 4 and 8 change places over the diagonal. */
INLINE void turn_all(vec x[LANES])
{
#if defined(__AVX512F__)
    static const lanes_of low[] = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                                   {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                                   {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                                   {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}};
    static const lanes_of high[] = {{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31},
                                    {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31},
                                    {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31},
                                    {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}};
#elif defined(__AVX2__)
    static const lanes_of low[] = {{0, 8, 2, 10, 4, 12, 6, 14}, {0, 1, 8, 9, 4, 5, 12, 13}, {0, 1, 2, 3, 8, 9, 10, 11}};
    static const lanes_of high[] = {{1, 9, 3, 11, 5, 13, 7, 15}, {2, 3, 10, 11, 6, 7, 14, 15},
                                    {4, 5, 6, 7, 12, 13, 14, 15}};
#else
    static const lanes_of low[] = {{0, 4, 2, 6}, {0, 1, 4, 5}}, high[] = {{1, 5, 3, 7}, {2, 3, 6, 7}};
#endif
#pragma GCC unroll 4
    for (int level = 0; level < (int)(sizeof low / sizeof *low); level++)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & 1 << level)) {
                vec a = x[i], b = x[i + (1 << level)];
                x[i] = __builtin_shuffle(a, b, low[level]);
                x[i + (1 << level)] = __builtin_shuffle(a, b, high[level]);
            }
}

/* Panels of `width` of an operand stored (k, count). */
INLINE void lay_across(const ont_gemm_source *s, const int64_t width, float *panels)
{
    const float *x = s->x;
    for (int64_t k = 0; k < s->k; k++, x += s->ld, panels += width) {
        float *to = panels;
        int64_t i = 0;
        if (k + AHEAD < s->k)
            for (int64_t line = 0; line < s->count; line += LINE) __builtin_prefetch(x + AHEAD * s->ld + line);
        for (; i + width <= s->count; i += width, to += width * s->k) memcpy(to, x + i, (size_t)width * sizeof *to);
        if (i == s->count) continue;
        memcpy(to, x + i, (size_t)(s->count - i) * sizeof *to);
        memset(to + s->count - i, 0, (size_t)(width - s->count + i) * sizeof *to);
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
            const float *x = s->x + (i + g) * s->ld;
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

static void lay_b(const ont_gemm_source *s, void *panels)
{
    if (s->across) lay_across(s, COLUMNS, panels);
    else lay_along(s, COLUMNS, panels);
}

/* ---- products ---- */

/* Lines that the next tiles read first, one fetched per step of k. */
typedef struct ahead {
    const float *a, *b;
    int64_t lines_a, lines_b;
} ahead;

typedef void (*tile_fn)(const ont_gemm_block *p, const float *a, const float *b, float *sums, const ont_gemm_place *to,
                        const ahead *next);

INLINE void tile(const ont_gemm_block *p, const float *a, const float *b, float *sums, const ont_gemm_place *to,
                 const ahead *next, const int rows)
{
    vec sum[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = (vec){0};
#define STEP \
    do { \
        vec b0 = load(b), b1 = load(b + LANES); \
        for (int r = 0; r < rows; r++) { \
            vec x = a[r] - (vec){0}; \
            sum[r][0] += x * b0; \
            sum[r][1] += x * b1; \
        } \
        a += ROWS; \
        b += COLUMNS; \
    } while (0)
    int64_t k = 0, last = least(p->k, next->lines_a);
    for (const float *line = next->a; k < last; k++, line += LINE) {
        __builtin_prefetch(line, 0, 2);
        STEP;
    }
    last = least(p->k, k + next->lines_b);
    for (const float *line = next->b; k < last; k++, line += LINE) {
        __builtin_prefetch(line, 0, 2);
        STEP;
    }
#pragma GCC unroll 2
    for (; k < p->k; k++) STEP;
#undef STEP
    if (p->add) /* chunks are summed apart: errors of a long sum stay small */
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) sum[r][v] += load(sums + r * p->ld + v * LANES);
    if (!to) {
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) store(sums + r * p->ld + v * LANES, sum[r][v]);
        return;
    }
    vec row[2];
    for (int v = 0; v < 2; v++) row[v] = to->row ? load(to->row + v * LANES) : (vec){0};
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) store(to->c + r * to->ldc + v * LANES, to->alpha * sum[r][v] + row[v]);
}

#define TILE(rows) \
    static void tile_##rows(const ont_gemm_block *p, const float *a, const float *b, float *sums, \
                            const ont_gemm_place *to, const ahead *next) \
    { \
        tile(p, a, b, sums, to, next, rows); \
    }
#define TILES(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define MORE_TILES(X) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#define NAME(rows) tile_##rows,
TILES(TILE)
#if WIDE
MORE_TILES(TILE)
static const tile_fn tiles[] = {NULL, TILES(NAME) MORE_TILES(NAME)};
#else
static const tile_fn tiles[] = {NULL, TILES(NAME)};
#endif

/* Rows and columns of sums go to their place. */
static void put(const float *sums, int64_t ld, int64_t m, int64_t n, const ont_gemm_place *to)
{
    const float alpha = to->alpha, *row = to->row;
    for (int64_t i = 0; i < m; i++, sums += ld) {
        float *c = to->c + i * to->ldc;
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

/* Panels of A pass by each panel of B; meanwhile the next of each come nearer. Whole tiles go to their place at once,
 * but what passes the caches goes in long rows. */
static void multiply(const ont_gemm_block *p)
{
    int64_t panels = (p->m + ROWS - 1) / ROWS, lines_a = p->k * ROWS / LINE, lines_b = p->k * COLUMNS / LINE,
            share = (lines_b + panels - 1) / panels, at_once = p->last && !p->place.stream ? p->n / COLUMNS * COLUMNS : 0;
    for (int64_t j = 0; j < p->n; j += COLUMNS) {
        const float *b = (const float *)p->b + j * p->k;
        for (int64_t i = 0, panel = 0; i < p->m; i += ROWS, panel++) {
            const float *a = (const float *)p->a + i * p->k;
            ont_gemm_place to = {p->place.c + i * p->place.ldc + j, p->place.ldc, p->place.row ? p->place.row + j : NULL,
                                 p->place.alpha, false};
            ahead next = {0};
            if (!j && i + ROWS < p->m) next.a = a + ROWS * p->k, next.lines_a = lines_a;
            if (j + COLUMNS < p->n)
                next.b = b + COLUMNS * p->k + panel * share * LINE, next.lines_b = least(share, lines_b - panel * share);
            tiles[least(ROWS, p->m - i)](p, a, b, p->sums + i * p->ld + j, j < at_once ? &to : NULL, &next);
        }
    }
    if (!p->last || at_once == p->n) return;
    ont_gemm_place rest = p->place;
    rest.c += at_once;
    if (rest.row) rest.row += at_once;
    put(p->sums + at_once, p->ld, p->m, p->n - at_once, &rest);
}

extern const ont_gemm_kernel PASTE(ont_gemm_kernel_, ONT_ISA);
const ont_gemm_kernel PASTE(ont_gemm_kernel_, ONT_ISA) = {ROWS, COLUMNS, 1, 512, sizeof(float), lay_a, lay_b,
                                                          multiply};

#if WIDE
#include "simd/gemm_split.h"
#endif
