/*
 * Bodies of batchnorm.inc.c for one dtype; included only by it, once for each. The includer defines NUM (the type of
 * the arithmetic), WHOLE (an integer of the same width), DATA (the type of the tensors' elements: NUM, or uint16_t for
 * bfloat16, which is widened to float when it is read and rounded when it is written) and F(name) (adds the suffix).
 * The rest of a row that does not fill a vector runs through a whole vector, whose other lanes add nothing and are not
 * stored. The loops over several rows are for DATA equal to NUM: NARROW is defined where it is not.
 */
#define VEC F(vec)
#define ANY F(vec_any)
#define BITS F(bits)
#define LANES ((int64_t)(BYTES / sizeof(NUM)))
#define SUMS F(sums)
#ifdef NARROW
#define HALVES F(halves)
#define WORDS F(words)
#endif
#define BLOCK 1024

typedef NUM VEC __attribute__((vector_size(BYTES)));
typedef NUM ANY __attribute__((vector_size(BYTES), aligned(sizeof(NUM)), may_alias));
typedef WHOLE BITS __attribute__((vector_size(BYTES)));

#ifdef NARROW
typedef uint16_t HALVES __attribute__((vector_size(BYTES / 2)));
typedef uint32_t WORDS __attribute__((vector_size(BYTES)));

INLINE VEC F(widen)(HALVES h) { return (VEC)(__builtin_convertvector(h, WORDS) << 16); }

/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE HALVES F(narrow)(VEC v)
{
    WORDS w = (WORDS)v, nan = (WORDS)(v != v);
    w = (w + 0x7fff + (w >> 16 & 1)) >> 16;
    return __builtin_convertvector((w & ~nan) | (nan & 0x7fc0), HALVES);
}

INLINE VEC F(load_some)(const DATA *p, int64_t n)
{
    HALVES h = {0};
    memcpy(&h, p, (size_t)n * sizeof(DATA));
    return F(widen)(h);
}

INLINE void F(store_some)(DATA *p, VEC v, int64_t n)
{
    HALVES h = F(narrow)(v);
    memcpy(p, &h, (size_t)n * sizeof(DATA));
}

INLINE VEC F(load)(const DATA *p) { return F(load_some)(p, LANES); }
INLINE void F(store)(DATA *p, VEC v) { F(store_some)(p, v, LANES); }
#else
INLINE VEC F(load)(const DATA *p) { return *(const ANY *)p; }
INLINE void F(store)(DATA *p, VEC v) { *(ANY *)p = v; }

INLINE VEC F(load_some)(const DATA *p, int64_t n)
{
    VEC v = {0};
    memcpy(&v, p, (size_t)n * sizeof(DATA));
    return v;
}

INLINE void F(store_some)(DATA *p, VEC v, int64_t n) { memcpy(p, &v, (size_t)n * sizeof(DATA)); }
#endif

/* v where the mask is set, else 0 */
INLINE VEC F(where)(BITS mask, VEC v) { return (VEC)((BITS)v & mask); }

INLINE NUM F(total)(VEC v)
{
    NUM lanes[BYTES / sizeof(NUM)];
    memcpy(lanes, &v, sizeof v);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Two sums over up to BLOCK elements, in two vectors each, so that an addition does not wait for the one before. */
typedef struct SUMS {
    VEC a[2], b[2];
} SUMS;

INLINE void F(meet)(const SUMS *s, double *a, double *b)
{
    *a += (double)F(total)(s->a[0] + s->a[1]);
    if (b) *b += (double)F(total)(s->b[0] + s->b[1]);
}

/* TERM(i, load, k): adds vector i to the sums k. */
#define FOR_BLOCKS(n, a, b, TERM) \
    for (int64_t from = 0; from < (n); from += BLOCK) { \
        SUMS s = {0}; \
        int64_t end = (n) - from < BLOCK ? (n) : from + BLOCK, i = from; \
        for (; i + 2 * LANES <= end; i += 2 * LANES) { \
            TERM(F(load)(at), 0, LANES, i); \
            TERM(F(load)(at), 1, LANES, i + LANES); \
        } \
        if (i + LANES <= end) { \
            TERM(F(load)(at), 0, LANES, i); \
            i += LANES; \
        } \
        if (i < end) TERM(F(load_some)(at, end - i), 1, end - i, i); \
        F(meet)(&s, (a), (b)); \
    }

/* all bits set in lanes below n */
INLINE BITS F(first)(int64_t n)
{
    WHOLE lanes[BYTES / sizeof(NUM)];
    BITS mask;
    for (int64_t i = 0; i < LANES; i++) lanes[i] = i < n ? -1 : 0;
    memcpy(&mask, lanes, sizeof mask);
    return mask;
}

static void F(sum)(const void *data, int64_t n, double *a)
{
    const DATA *x = data;
#define TERM(load, k, lanes, i) \
    do { \
        const DATA *at = x + (i); \
        s.a[k] += load; \
    } while (0)
    FOR_BLOCKS(n, a, NULL, TERM)
#undef TERM
}

static void F(squares)(const void *data, double centre, int64_t n, double *a, double *b)
{
    const DATA *x = data;
    const NUM m = (NUM)centre;
#define TERM(load, k, lanes, i) \
    do { \
        const DATA *at = x + (i); \
        VEC v_ = (load)-m; \
        if ((lanes) < LANES) v_ = F(where)(F(first)(lanes), v_); \
        s.a[k] += v_; \
        s.b[k] += v_ * v_; \
    } while (0)
    FOR_BLOCKS(n, a, b, TERM)
#undef TERM
}

/* The forward result before residual and ReLU. The gradient repeats this arithmetic, so that the sign is the same. */
#define VALUE(x) (((x)-m) * slope + shift)

INLINE VEC F(rectified)(VEC v) { return F(where)(~(v < 0), v); }

INLINE void F(apply_form)(const ont_channel *c, const DATA *x, const DATA *r, bool relu, DATA *y,
                          int64_t n)
{
    const NUM m = (NUM)c->centre, slope = (NUM)c->slope, shift = (NUM)c->shift;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        VEC v = VALUE(F(load)(x + i));
        if (r) v += F(load)(r + i);
        F(store)(y + i, relu ? F(rectified)(v) : v);
    }
    if (i == n) return;
    VEC v = VALUE(F(load_some)(x + i, n - i));
    if (r) v += F(load_some)(r + i, n - i);
    F(store_some)(y + i, relu ? F(rectified)(v) : v, n - i);
}

static void F(apply)(const ont_channel *c, const void *x, const void *residual, bool relu, void *y, int64_t n)
{
    if (residual && relu)
        F(apply_form)(c, x, residual, true, y, n);
    else if (residual)
        F(apply_form)(c, x, residual, false, y, n);
    else if (relu)
        F(apply_form)(c, x, NULL, true, y, n);
    else
        F(apply_form)(c, x, NULL, false, y, n);
}

/* dy under the mask. As in PyTorch, dy passes where the result is NaN. */
#define MASKED(g, x_, y_) \
    (mask == ONT_MASK_NONE ? (g) : F(where)(~(mask == ONT_MASK_Y ? (y_) <= 0 : VALUE(x_) <= 0), (g)))

/* (x - centre) * mean_dot; 0 where mean_dot is 0, as with running statistics, also where x is not finite */
#define SHARE(d, e) F(where)((e) != 0, (d) * (e))

/* `mask`: g->mask, known when this is inlined */
INLINE void F(grad_sums_form)(const ont_channel *c, ont_relu_mask mask, const ont_batchnorm_gradient *g, int64_t n,
                              double *a, double *b)
{
    const DATA *x = g->x, *y = g->y, *dy = g->dy;
    const NUM m = (NUM)c->centre, slope = (NUM)c->slope, shift = (NUM)c->shift;
    (void)slope, (void)shift;
#define TERM(load, k, lanes, i) \
    do { \
        VEC x_, y_ = {0}, g_; \
        const DATA *at = x + (i); \
        x_ = load; \
        if (mask == ONT_MASK_Y) at = y + (i), y_ = load; \
        at = dy + (i); \
        g_ = load; \
        g_ = MASKED(g_, x_, y_); \
        s.a[k] += g_; \
        x_ -= m; \
        if ((lanes) < LANES) x_ = F(where)(F(first)(lanes), x_); /* 0 * inf is NaN */ \
        s.b[k] += g_ * x_; \
    } while (0)
    FOR_BLOCKS(n, a, b, TERM)
#undef TERM
}

static void F(grad_sums)(const ont_channel *c, const ont_batchnorm_gradient *g, int64_t n, double *a, double *b)
{
    if (g->mask == ONT_MASK_NONE)
        F(grad_sums_form)(c, ONT_MASK_NONE, g, n, a, b);
    else if (g->mask == ONT_MASK_Y)
        F(grad_sums_form)(c, ONT_MASK_Y, g, n, a, b);
    else
        F(grad_sums_form)(c, ONT_MASK_V, g, n, a, b);
}

INLINE void F(grad_form)(const ont_channel *c, ont_relu_mask mask, const ont_batchnorm_gradient *operands, NUM mean_dy,
                         NUM mean_dot, DATA *dx, int64_t n)
{
    const DATA *x = operands->x, *y = operands->y, *dy = operands->dy;
    const NUM m = (NUM)c->centre, slope = (NUM)c->slope, shift = (NUM)c->shift;
    const VEC e = mean_dot + (VEC){0};
    (void)shift;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        VEC x_ = F(load)(x + i), y_ = mask == ONT_MASK_Y ? F(load)(y + i) : (VEC){0}, g = F(load)(dy + i);
        g = MASKED(g, x_, y_);
        F(store)(dx + i, slope * (g - mean_dy - SHARE(x_ - m, e)));
    }
    if (i == n) return;
    VEC x_ = F(load_some)(x + i, n - i), y_ = mask == ONT_MASK_Y ? F(load_some)(y + i, n - i) : (VEC){0};
    VEC g = F(load_some)(dy + i, n - i);
    g = MASKED(g, x_, y_);
    F(store_some)(dx + i, slope * (g - mean_dy - SHARE(x_ - m, e)), n - i);
}

static void F(grad)(const ont_channel *c, const ont_batchnorm_gradient *g, double mean_dy, double mean_dot, void *dx,
                    int64_t n)
{
    NUM d = (NUM)mean_dy, e = (NUM)mean_dot;
    if (g->mask == ONT_MASK_NONE)
        F(grad_form)(c, ONT_MASK_NONE, g, d, e, dx, n);
    else if (g->mask == ONT_MASK_Y)
        F(grad_form)(c, ONT_MASK_Y, g, d, e, dx, n);
    else
        F(grad_form)(c, ONT_MASK_V, g, d, e, dx, n);
}

#ifdef NARROW
#undef HALVES
#undef WORDS
#else
#include "simd/norm/batchnorm_rows.h"
#endif

#undef SHARE
#undef MASKED
#undef VALUE
#undef FOR_BLOCKS
#undef BLOCK
#undef SUMS
#undef LANES
#undef BITS
#undef ANY
#undef VEC
#undef NUM
#undef WHOLE
#undef DATA
#undef F
