/*
 * The gradient of Gather: rows of dy are added, where they were read, to zeros or to a third input.
 *
 * Indices are sorted once, stably. Each row of the table is then written once, by one thread: zeros, or the sum of its
 * rows of dy in the order of their positions. 16-bit floats are summed in float32 and rounded once. The sums never
 * depend on the number of threads. The reference has each thread look at all indices, which is faster for short rows.
 */
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/parallel.h"
#include "ops/index/row_hits.h"
#include "simd/simd.h"

enum {
    PIECE = 1024,      /* columns that are summed at a time, so that the sums of a long row stay in the L1 cache */
    SHORT = 1024,      /* bytes of a row below which looking at all indices is cheaper than sorting them */
    STREAM = 16 << 20, /* bytes of a result that exceeds the last-level cache: it is written by non-temporal stores */
};

static ont_status grad_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return ont_gather_prepare(node, node->outputs[0], ont_node_in(node, 1), arena, out);
}

static void add_row(const ont_gather *s, void *to, const void *from, int64_t count)
{
    if (s->size == sizeof(float) && count == 1)
        *(float *)to += *(const float *)from;
    else if (s->size == sizeof(float))
        ont_simd()->add_to(to, from, count);
    else
        for (int64_t k = 0; k < count; k++) ((double *)to)[k] += ((const double *)from)[k];
}

/* ---- sorted ---- */

typedef struct sorting {
    const ont_call *call;
    const ont_gather *s;
    ont_row_hits hits;
    bool base, inplace, stream;
    int64_t units;     /* units of work in a block: rows written and rows read */
    int64_t blocks, width; /* number of blocks of columns, and their width */
} sorting;

/* Writes zeros, by non-temporal stores where the result exceeds the last-level cache. */
static void zero(const sorting *t, char *to, size_t bytes)
{
#if defined(__x86_64__)
    size_t head = -(uintptr_t)to & 63;
    if (t->stream && bytes >= 1024) {
        memset(to, 0, head);
        for (to += head, bytes -= head; bytes >= 64; to += 64, bytes -= 64)
            for (int lane = 0; lane < 4; lane++) _mm_stream_si128((__m128i *)to + lane, _mm_setzero_si128());
    }
#else
    (void)t;
#endif
    memset(to, 0, bytes);
}

/* Rows [first, last), which no index names, columns [column, column + n): `out` and `base` point to row 0 of the
 * table. */
static void fill_rows(const sorting *t, char *out, const char *base, int64_t first, int64_t last, int64_t column,
                      int64_t n)
{
    const ont_gather *s = t->s;
    bool whole = n == s->inner;
    if (t->inplace) return;
    for (int64_t row = first; row < last; row = whole ? last : row + 1) {
        size_t at = (size_t)(row * s->inner + column) * s->size, bytes = (size_t)n * s->size;
        if (whole) bytes *= (size_t)(last - first);
        if (base)
            memcpy(out + at, base + at, bytes);
        else
            zero(t, out + at, bytes);
    }
}

/* Prefetches the rows that are read next: they lie anywhere, where no hardware prefetcher expects them. */
static inline void fetch_row(const char *row, size_t bytes)
{
    for (size_t at = 0; at < bytes && at < 2048; at += 64) __builtin_prefetch(row + at);
}

/* Sums at most PIECE columns of `count` hits and, unless NULL, of the base; rounds once. `dy` points to the first
 * column. */
static void sum_half(const sorting *t, char *out, const char *base, const char *dy, const ont_row_hit *hits,
                     int64_t count, int64_t n)
{
    const ont_simd_table *simd = ont_simd();
    bool brain = t->call->node->outputs[0]->dtype == ONT_BFLOAT16;
    void (*widen)(const void *, float *, int64_t) = brain ? simd->bfloat_to_float : simd->half_to_float;
    size_t row = (size_t)t->s->inner * t->s->size;
    float sum[PIECE], more[PIECE];
    if (base) widen(base, sum, n);
    for (int64_t k = 0; k < count; k++) {
        const char *from = dy + (size_t)ont_hit_position(hits[k]) * row;
        if (k + 1 < count) fetch_row(dy + (size_t)ont_hit_position(hits[k + 1]) * row, (size_t)n * t->s->size);
        if (k == 0 && !base) {
            widen(from, sum, n);
        } else if (brain) {
            simd->add_bfloat_rows(sum, from, 1, n, n);
        } else {
            widen(from, more, n);
            simd->add_to(sum, more, n);
        }
    }
    (brain ? simd->float_to_bfloat : simd->float_to_half)(sum, out, n);
}

static void sum_hits(const sorting *t, char *out, const char *base, const char *dy, const ont_row_hit *hits,
                     int64_t count, int64_t columns)
{
    const ont_gather *s = t->s;
    size_t row = (size_t)s->inner * s->size;
    if (count == 1 && !base) {
        memcpy(out, dy + (size_t)ont_hit_position(hits[0]) * row, (size_t)columns * s->size);
        return;
    }
    for (int64_t at = 0, n; at < columns; at += n) {
        n = columns - at < PIECE ? columns - at : PIECE;
        size_t skip = (size_t)at * s->size;
        if (s->size == 2) {
            sum_half(t, out + skip, base ? base + skip : NULL, dy + skip, hits, count, n);
            continue;
        }
        if (!t->inplace)
            memcpy(out + skip, base ? base + skip : dy + (size_t)ont_hit_position(hits[0]) * row + skip,
                   (size_t)n * s->size);
        for (int64_t k = !base; k < count; k++) {
            if (k + 1 < count) fetch_row(dy + (size_t)ont_hit_position(hits[k + 1]) * row + skip, (size_t)n * s->size);
            add_row(s, out + skip, dy + (size_t)ont_hit_position(hits[k]) * row + skip, n);
        }
    }
}

/* For outer index `o`, the rows whose work has its middle in units [first, last); columns of one block. */
static void write_rows(const sorting *t, int64_t o, int64_t block, int64_t first, int64_t last)
{
    const ont_gather *s = t->s;
    int64_t column = block * t->width, n = s->inner - column < t->width ? s->inner - column : t->width;
    int64_t row = ont_row_hits_row_at(&t->hits, first), end = ont_row_hits_row_at(&t->hits, last);
    int64_t k = row ? ont_row_hits_before(&t->hits, row) : 0;
    int64_t stop = end == s->table ? s->count : ont_row_hits_before(&t->hits, end);
    size_t slab = (size_t)(s->table * s->inner) * s->size * (size_t)o;
    char *out = (char *)t->call->out[0] + slab;
    const char *base = t->base ? (const char *)t->call->in[2] + slab : NULL;
    const char *dy = (const char *)t->call->in[0] + (size_t)(o * s->count * s->inner + column) * s->size;
    for (int64_t count; k < stop; k += count) {
        int64_t at = ont_hit_row(t->hits.at[k]);
        size_t place = (size_t)(at * s->inner + column) * s->size;
        for (count = 1; k + count < stop && ont_hit_row(t->hits.at[k + count]) == at;) count++;
        fill_rows(t, out, base, row, at, column, n);
        sum_hits(t, out + place, base ? base + place : NULL, dy, t->hits.at + k, count, n);
        row = at + 1;
    }
    fill_rows(t, out, base, row, end, column, n);
}

static void sorted_range(void *context, int64_t first, int64_t last)
{
    const sorting *t = context;
    for (int64_t at = first, n; at < last; at += n) {
        int64_t slab = at / t->units, unit = at % t->units;
        n = t->units - unit < last - at ? t->units - unit : last - at;
        write_rows(t, slab / t->blocks, slab % t->blocks, unit, unit + n);
    }
#if defined(__x86_64__)
    if (t->stream) _mm_sfence();
#endif
}

/* Columns are divided among threads too where rows alone would leave threads idle: few rows, or most hits in one
 * row. */
static void choose_blocks(sorting *t)
{
    const ont_gather *s = t->s;
    int64_t threads = ont_parallel_threads(), most = 1, same = 1, least = 512;
    for (int64_t i = 1; i < s->count; i++) {
        same = ont_hit_row(t->hits.at[i]) == ont_hit_row(t->hits.at[i - 1]) ? same + 1 : 1;
        if (same > most) most = same;
    }
    t->blocks = 1;
    if (s->outer * t->units < 4 * threads * (most + 1)) {
        t->blocks = s->inner / least < threads ? s->inner / least : threads;
        if (t->blocks < 1) t->blocks = 1;
    }
    t->width = (s->inner + t->blocks - 1) / t->blocks;
    t->blocks = (s->inner + t->width - 1) / t->width;
}

static ont_status sorted_run(const ont_call *call)
{
    const ont_gather *s = call->state;
    ONT_TRY(ont_gather_check(s, ont_node_in(call->node, 1), call->in[1]));
    sorting t = {.call = call, .s = s, .base = call->node->n_inputs > 2};
    t.inplace = t.base && call->in[2] == call->out[0];
    t.stream = (size_t)(s->outer * s->table * s->inner) * s->size >= STREAM;
    t.units = s->count + (t.inplace ? 0 : s->table);
    if (!t.units || !s->inner) return ONT_OK;
    t.hits = ont_row_hits_sort(s, call->in[1], call->work, !t.inplace);
    choose_blocks(&t);
    ont_parallel(s->outer * t.blocks * t.units, 32768 / (t.width + 1) + 1, sorted_range, &t);
    return ONT_OK;
}

static const char *sorted_accept(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    int axis;
    if (dtype != ONT_FLOAT32 && dtype != ONT_FLOAT64 && !ont_dtype_is_half(dtype)) return "not floats";
    const ont_shape *shape = &node->outputs[0]->shape;
    if (ont_shape_axis(ont_attr_int(node, "axis", 0), shape->rank, &axis) != ONT_OK) return "no such axis";
    size_t row = (size_t)ont_shape_count_range(shape, axis + 1, shape->rank) * ont_dtype_size(dtype);
    if (row < SHORT && !ont_dtype_is_half(dtype)) return "short rows";
    bool fits = ont_row_hits_fit(shape->dims[axis], ont_shape_count(&ont_node_in(node, 1)->shape));
    return fits ? NULL : "more rows or indices than 32 bits count";
}

static ont_status sorted_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    ONT_TRY(grad_prepare(node, arena, out));
    out->work_bytes = ont_row_hits_bytes(((const ont_gather *)out->state)->count);
    return ONT_OK;
}

/* ---- reference ---- */

/* Rows [first, last) of the flattened (outer, table): zeros or rows of the third input, plus the rows of dy in
 * order. */
static void scatter_rows(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const ont_gather *s = call->state;
    size_t row = (size_t)s->inner * s->size;
    char *out = call->out[0];
    const char *base = call->node->n_inputs > 2 ? call->in[2] : NULL;
    if (!base)
        memset(out + (size_t)first * row, 0, (size_t)(last - first) * row);
    else if (base != out)
        memcpy(out + (size_t)first * row, base + (size_t)first * row, (size_t)(last - first) * row);
    for (int64_t o = first / s->table; o < s->outer && o * s->table < last; o++) {
        if (s->inner == 1 && s->size == sizeof(float)) {
            const float *dy = (const float *)call->in[0] + o * s->count;
            float *to = (float *)out + o * s->table;
            int64_t low = first - o * s->table, high = last - o * s->table;
            for (int64_t i = 0; i < s->count; i++) {
                int64_t at = ont_gather_index(s, call->in[1], i);
                if (at >= low && at < high) to[at] += dy[i];
            }
            continue;
        }
        for (int64_t i = 0; i < s->count; i++) {
            int64_t at = o * s->table + ont_gather_index(s, call->in[1], i);
            if (at < first || at >= last) continue;
            const char *from = (const char *)call->in[0] + (size_t)(o * s->count + i) * row;
            add_row(s, out + (size_t)at * row, from, s->inner);
        }
    }
}

static ont_status ref_run(const ont_call *call)
{
    const ont_gather *s = call->state;
    ONT_TRY(ont_gather_check(s, ont_node_in(call->node, 1), call->in[1]));
    if (s->table) ont_parallel(s->outer * s->table, 65536 / (s->inner + 1) + 1, scatter_rows, (void *)call);
    return ONT_OK;
}

static const ont_kernel grad_kernels[] = {
    {.name = "gather_grad_sorted", .accept = sorted_accept, .prepare = sorted_prepare, .run = sorted_run, .inplace = 4},
    {.name = "gather_grad_ref", .accept = ont_accept_float, .prepare = grad_prepare, .run = ref_run, .inplace = 4},
};
const ont_op ont_op_GatherGrad = {.domain = ONT_DOMAIN, .name = "GatherGrad", .since = 1, .min_inputs = 2,
                                  .max_inputs = 3, .attributes = "axis:i shape:I", .infer = ont_infer_shape_attr,
                                  ONT_KERNELS(grad_kernels)};
