/*
 * ont_simd_gemm_split() of gemm_kernel.h by tiles (AMX). Part of gemm_kernel.inc.c, included by nothing else.
 *
 * A tile is 16 rows of 16 words, and a word two bfloat16 that follow each other along k: rows of A, and for B rows of
 * words of 16 columns. A step of 32 elements of k is four tiles of a panel: the large parts of its two halves, and the
 * small ones.
 */
#pragma GCC push_options
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")

enum { HALF = 16, DEEP = 32, TILE_WORDS = HALF * HALF, STEP_WORDS = 4 * TILE_WORDS, SPLIT_SIDE = 2 * HALF };

/* Sixteen words: the large and the small parts of two vectors of floats. */
typedef struct split_words {
    __m512i large, small;
} split_words;

INLINE __m256i rounded(__m512 x)
{
    return (__m256i)_mm512_cvtneps_pbh(x);
}

/* What rounding takes from x. */
INLINE __m512 rest(__m512 x)
{
    return _mm512_sub_ps(x, widened(rounded(x)));
}

/* 32 elements of one row: neighbours share a word. */
INLINE split_words split_row(const float *x, int64_t n)
{
    __m512 a = _mm512_maskz_loadu_ps(first_of_16(n), x), b = _mm512_maskz_loadu_ps(first_of_16(n - HALF), x + HALF);
    return (split_words){(__m512i)_mm512_cvtne2ps_pbh(b, a), (__m512i)_mm512_cvtne2ps_pbh(rest(b), rest(a))};
}

/* Sixteen elements of two rows: elements above each other share a word. */
INLINE split_words split_pair(__m512 a, __m512 b)
{
    return (split_words){joined(rounded(a), rounded(b)), joined(rounded(rest(a)), rounded(rest(b)))};
}

/* Up to 16 rows of up to 32 elements as words, one row a vector; zeros behind them. */
INLINE void words_along(const float *x, int64_t ld, int64_t rows, int64_t depth, vec large[HALF], vec small[HALF])
{
#pragma GCC unroll 16
    for (int r = 0; r < HALF; r++) {
        split_words w = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        if (r < rows) {
            __builtin_prefetch(x + r * ld + AHEAD * LINE);
            w = split_row(x + r * ld, depth);
        }
        large[r] = (vec)w.large;
        small[r] = (vec)w.small;
    }
}

/* The same of an operand stored (k, count): a vector holds the words of up to 16 columns. */
INLINE void words_across(const float *x, int64_t ld, int64_t columns, int64_t depth, vec large[HALF], vec small[HALF])
{
    __mmask16 inside = first_of_16(columns);
    for (int64_t k = 0; k < DEEP; k += 2) {
        __m512 a = _mm512_setzero_ps(), b = a;
        __builtin_prefetch(x + (k + DEEP) * ld);
        __builtin_prefetch(x + (k + DEEP + 1) * ld);
        if (k < depth) a = _mm512_maskz_loadu_ps(inside, x + k * ld);
        if (k + 1 < depth) b = _mm512_maskz_loadu_ps(inside, x + (k + 1) * ld);
        split_words w = split_pair(a, b);
        large[k / 2] = (vec)w.large;
        small[k / 2] = (vec)w.small;
    }
}

/* Panels of 32; `columns` of B are turned where its rows lie along k, rows of A where they lie across. */
INLINE void lay_split(const ont_gemm_source *s, const bool columns, float *panels)
{
    int64_t steps = (s->k + DEEP - 1) / DEEP;
    for (int64_t i = 0; i < s->count; i += SPLIT_SIDE, panels += steps * STEP_WORDS)
        for (int64_t half = 0; half < 2; half++)
            for (int64_t step = 0; step < steps; step++) {
                float *to = panels + step * STEP_WORDS + half * TILE_WORDS;
                int64_t first = i + half * HALF, k = step * DEEP, left = s->count - first, depth = s->k - k;
                vec large[HALF], small[HALF];
                if (left < 0) left = 0;
                const float *x = s->x;
                if (s->across) words_across(x + k * s->ld + (left ? first : 0), s->ld, left, depth, large, small);
                else words_along(x + (left ? first : 0) * s->ld + k, s->ld, left, depth, large, small);
                if (s->across != columns) {
                    turn_all(large);
                    turn_all(small);
                }
#pragma GCC unroll 16
                for (int r = 0; r < HALF; r++) {
                    store(to + r * HALF, large[r]);
                    store(to + 2 * TILE_WORDS + r * HALF, small[r]);
                }
            }
}

static void lay_split_a(const ont_gemm_source *s, void *panels)
{
    lay_split(s, false, panels);
}

static void lay_split_b(const ont_gemm_source *s, void *panels)
{
    lay_split(s, true, panels);
}

/* Tiles 0 to 3 hold sums, 4 and 5 halves of A, 6 and 7 of B. */
INLINE void split_tile(const float *a, const float *b, int64_t steps, float *sums, int64_t ld, bool add,
                       const float *next)
{
    enum { ROW_BYTES = 64 };
    int64_t stride = ld * (int64_t)sizeof(float);
    if (add) {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + HALF, stride);
        _tile_loadd(2, sums + HALF * ld, stride);
        _tile_loadd(3, sums + HALF * ld + HALF, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
#define PRODUCTS \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7)
    for (int64_t step = 0; step < steps; step++, a += STEP_WORDS, b += STEP_WORDS, next += STEP_WORDS) {
        _tile_loadd(4, a, ROW_BYTES);
        _tile_loadd(5, a + TILE_WORDS, ROW_BYTES);
        _tile_loadd(6, b + 2 * TILE_WORDS, ROW_BYTES);
        _tile_loadd(7, b + 3 * TILE_WORDS, ROW_BYTES);
        PRODUCTS; /* large times small */
#pragma GCC unroll 16
        for (int line = 0; line < STEP_WORDS / LINE / 4; line++) __builtin_prefetch(next + line * LINE, 0, 2);
        _tile_loadd(6, b, ROW_BYTES);
        _tile_loadd(7, b + TILE_WORDS, ROW_BYTES);
        PRODUCTS; /* large times large */
        _tile_loadd(4, a + 2 * TILE_WORDS, ROW_BYTES);
        _tile_loadd(5, a + 3 * TILE_WORDS, ROW_BYTES);
        PRODUCTS; /* small times large */
    }
#undef PRODUCTS
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + HALF, stride);
    _tile_stored(2, sums + HALF * ld, stride);
    _tile_stored(3, sums + HALF * ld + HALF, stride);
}

static void multiply_split(const ont_gemm_block *p)
{
    static const struct __attribute__((packed)) {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    int64_t steps = p->k / DEEP, panel = steps * STEP_WORDS;
    _tile_loadconfig(&shape);
    for (int64_t j = 0; j < p->n; j += SPLIT_SIDE)
        for (int64_t i = 0; i < p->m; i += SPLIT_SIDE) {
            const float *a = (const float *)p->a + i / SPLIT_SIDE * panel;
            const float *b = (const float *)p->b + j / SPLIT_SIDE * panel;
            split_tile(a, b, steps, p->sums + i * p->ld + j, p->ld, p->add, a + panel);
        }
    _tile_release();
    if (p->last) put_f32(p->sums, p->ld, p->m, p->n, &p->place);
}

extern const ont_gemm_kernel PASTE(ont_gemm_split_, ONT_ISA);
const ont_gemm_kernel PASTE(ont_gemm_split_, ONT_ISA) = {
    .rows = SPLIT_SIDE, .columns = SPLIT_SIDE, .step = DEEP, .chunk = 256, .element = 4, .laid = 4,
    .lay_a = lay_split_a, .lay_b = lay_split_b, .multiply = multiply_split};

#pragma GCC pop_options
