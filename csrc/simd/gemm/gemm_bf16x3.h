/*
 * ont_simd_gemm_bf16x3() of gemm_kernel.h by AMX. Part of gemm_kernel.inc.c; no other file includes it.
 *
 * x = high + low, both bfloat16; A B is computed as Ah Bl + Ah Bh + Al Bh. An AMX tile is 16 rows of 16 words; a word
 * holds two bfloat16 that are adjacent along k. A tile of A is (16 rows, 32 k); a tile of B is (16 pairs of k, 16
 * columns). For each 32 elements of k, a panel of 32 rows or columns stores four tiles: high parts of rows 0-15 and
 * 16-31, then their low parts.
 */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")
#endif

enum {
    AMX_ROWS = 16,
    AMX_KR = 32,
    TILE_WORDS = AMX_ROWS * AMX_ROWS,
    STEP_WORDS = 4 * TILE_WORDS,
    AMX_MR = 2 * AMX_ROWS, /* and NR */
};

/* Sixteen words each: the high and the low parts of 32 floats. */
typedef struct high_low {
    __m512i high, low;
} high_low;

INLINE __m256i f32_to_bf16(__m512 x)
{
    return (__m256i)_mm512_cvtneps_pbh(x);
}

/* x minus its high part. */
INLINE __m512 residual(__m512 x)
{
    return _mm512_sub_ps(x, bf16_to_f32(f32_to_bf16(x)));
}

/* 32 elements of one k-major row: adjacent elements share a word. */
INLINE high_low split_k_major(const float *x, int64_t n)
{
    __m512 a = _mm512_maskz_loadu_ps(mask_first_16(n), x);
    __m512 b = _mm512_maskz_loadu_ps(mask_first_16(n - AMX_ROWS), x + AMX_ROWS);
    return (high_low){(__m512i)_mm512_cvtne2ps_pbh(b, a), (__m512i)_mm512_cvtne2ps_pbh(residual(b), residual(a))};
}

/* Sixteen elements of two mn-major rows: elements of one column share a word. */
INLINE high_low split_mn_major(__m512 a, __m512 b)
{
    return (high_low){interleave_bf16(f32_to_bf16(a), f32_to_bf16(b)),
                      interleave_bf16(f32_to_bf16(residual(a)), f32_to_bf16(residual(b)))};
}

/* x (rows <= 16, depth <= 32), zero-padded: vector r holds the words of row r. */
INLINE void tile_k_major(const float *x, int64_t ld, int64_t rows, int64_t depth, vec high[AMX_ROWS],
                         vec low[AMX_ROWS])
{
#pragma GCC unroll 16
    for (int r = 0; r < AMX_ROWS; r++) {
        high_low w = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        if (r < rows) {
            __builtin_prefetch(x + r * ld + PREFETCH_LINES * LINE);
            w = split_k_major(x + r * ld, depth);
        }
        high[r] = (vec)w.high;
        low[r] = (vec)w.low;
    }
}

/* x (depth <= 32, columns <= 16), zero-padded: vector k / 2 holds the words of all columns. */
INLINE void tile_mn_major(const float *x, int64_t ld, int64_t columns, int64_t depth, vec high[AMX_ROWS],
                          vec low[AMX_ROWS])
{
    __mmask16 inside = mask_first_16(columns);
    for (int64_t k = 0; k < AMX_KR; k += 2) {
        __m512 a = _mm512_setzero_ps(), b = a;
        __builtin_prefetch(x + (k + AMX_KR) * ld);
        __builtin_prefetch(x + (k + AMX_KR + 1) * ld);
        if (k < depth) a = _mm512_maskz_loadu_ps(inside, x + k * ld);
        if (k + 1 < depth) b = _mm512_maskz_loadu_ps(inside, x + (k + 1) * ld);
        high_low w = split_mn_major(a, b);
        high[k / 2] = (vec)w.high;
        low[k / 2] = (vec)w.low;
    }
}

/* Panels of 32. Tiles of B (`columns`) are transposed where it is k-major, tiles of A where it is mn-major. */
INLINE void pack_bf16x3(const ont_gemm_pack_source *s, const bool columns, float *panels)
{
    int64_t steps = (s->k + AMX_KR - 1) / AMX_KR;
    for (int64_t i = 0; i < s->count; i += AMX_MR, panels += steps * STEP_WORDS)
        for (int64_t half = 0; half < 2; half++)
            for (int64_t step = 0; step < steps; step++) {
                float *to = panels + step * STEP_WORDS + half * TILE_WORDS;
                int64_t first = i + half * AMX_ROWS, k = step * AMX_KR, left = s->count - first, depth = s->k - k;
                vec high[AMX_ROWS], low[AMX_ROWS];
                if (left < 0) left = 0;
                const float *x = s->x;
                if (s->mn_major) tile_mn_major(x + k * s->ld + (left ? first : 0), s->ld, left, depth, high, low);
                else tile_k_major(x + (left ? first : 0) * s->ld + k, s->ld, left, depth, high, low);
                if (s->mn_major != columns) {
                    transpose_lanes(high);
                    transpose_lanes(low);
                }
#pragma GCC unroll 16
                for (int r = 0; r < AMX_ROWS; r++) {
                    store(to + r * AMX_ROWS, high[r]);
                    store(to + 2 * TILE_WORDS + r * AMX_ROWS, low[r]);
                }
            }
}

static void pack_bf16x3_a(const ont_gemm_pack_source *s, void *panels)
{
    pack_bf16x3(s, false, panels);
}

static void pack_bf16x3_b(const ont_gemm_pack_source *s, void *panels)
{
    pack_bf16x3(s, true, panels);
}

/* A 32 x 32 micro-tile. Tile registers 0 to 3 accumulate, 4 and 5 hold A, 6 and 7 hold B. */
INLINE void microkernel_bf16x3(const float *a, const float *b, int64_t steps, float *acc, int64_t ld,
                               bool accumulate, const float *next)
{
    enum { ROW_BYTES = 64 };
    int64_t stride = ld * (int64_t)sizeof(float);
    if (accumulate) {
        _tile_loadd(0, acc, stride);
        _tile_loadd(1, acc + AMX_ROWS, stride);
        _tile_loadd(2, acc + AMX_ROWS * ld, stride);
        _tile_loadd(3, acc + AMX_ROWS * ld + AMX_ROWS, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
#define MULTIPLY_TILES \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7)
    for (int64_t step = 0; step < steps; step++, a += STEP_WORDS, b += STEP_WORDS, next += STEP_WORDS) {
        _tile_loadd(4, a, ROW_BYTES);
        _tile_loadd(5, a + TILE_WORDS, ROW_BYTES);
        _tile_loadd(6, b + 2 * TILE_WORDS, ROW_BYTES);
        _tile_loadd(7, b + 3 * TILE_WORDS, ROW_BYTES);
        MULTIPLY_TILES; /* high * low */
#pragma GCC unroll 16
        for (int line = 0; line < STEP_WORDS / LINE / 4; line++) __builtin_prefetch(next + line * LINE, 0, 2);
        _tile_loadd(6, b, ROW_BYTES);
        _tile_loadd(7, b + TILE_WORDS, ROW_BYTES);
        MULTIPLY_TILES; /* high * high */
        _tile_loadd(4, a + 2 * TILE_WORDS, ROW_BYTES);
        _tile_loadd(5, a + 3 * TILE_WORDS, ROW_BYTES);
        MULTIPLY_TILES; /* low * high */
    }
#undef MULTIPLY_TILES
    _tile_stored(0, acc, stride);
    _tile_stored(1, acc + AMX_ROWS, stride);
    _tile_stored(2, acc + AMX_ROWS * ld, stride);
    _tile_stored(3, acc + AMX_ROWS * ld + AMX_ROWS, stride);
}

static void multiply_bf16x3(const ont_gemm_block *p)
{
    static const struct __attribute__((packed)) {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    int64_t steps = p->k / AMX_KR, panel = steps * STEP_WORDS;
    _tile_loadconfig(&shape);
    for (int64_t j = 0; j < p->n; j += AMX_MR)
        for (int64_t i = 0; i < p->m; i += AMX_MR) {
            const float *a = (const float *)p->a + i / AMX_MR * panel;
            const float *b = (const float *)p->b + j / AMX_MR * panel;
            microkernel_bf16x3(a, b, steps, p->acc + i * p->ld_acc + j, p->ld_acc, p->accumulate, a + panel);
        }
    _tile_release();
    if (p->last_k) store_f32(p->acc, p->ld_acc, p->m, p->n, &p->epilogue);
}

extern const ont_gemm_kernel PASTE(ont_gemm_bf16x3_, ONT_ISA);
const ont_gemm_kernel PASTE(ont_gemm_bf16x3_, ONT_ISA) = {
    .mr = AMX_MR, .nr = AMX_MR, .kr = AMX_KR, .kc = 256, .element_size = 4, .packed_size = 4,
    .pack_a = pack_bf16x3_a, .pack_b = pack_bf16x3_b, .multiply = multiply_bf16x3};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
