/*
 * Reductions of any dtype over one run of dims. float32 only where rows are short or long, or columns are few:
 * otherwise reduce_rows.c is faster. If there are few results, parts of the run are reduced in parallel, then combined.
 */
#include "ops/reduce/reduce.h"

#include "base/parallel.h"
#include "simd/reduce/reduce.h"

enum { GRAIN = 32768, MAX_PARTS = 64, LONG_ROW = 64 }; /* GRAIN: elements worth a thread */

typedef struct run_state {
    ont_reduce reduce;
    ont_reduce_loop loop;
    size_t size;
    int64_t parts, length; /* of the run: parts, and elements of each */
    int64_t strips;        /* of columns */
} run_state;

static bool read(const ont_node *node, run_state *s)
{
    if (ont_reduce_read(node, &s->reduce) != ONT_OK || s->reduce.n < 1) return false;
    ont_reduce_kind kind = s->reduce.kind;
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (dtype == ONT_FLOAT32 && kind == ONT_REDUCE_SUM) return false;
    s->loop = kind > ONT_REDUCE_PROD || kind == ONT_REDUCE_MEAN
                  ? NULL
                  : ont_simd_reduce()->run[kind == ONT_REDUCE_SUM   ? ONT_STEP_SUM
                                           : kind == ONT_REDUCE_MAX ? ONT_STEP_MAX
                                           : kind == ONT_REDUCE_MIN ? ONT_STEP_MIN
                                                                    : ONT_STEP_PROD][dtype];
    return s->loop != NULL;
}

const char *ont_reduce_run_accept(const ont_node *node)
{
    run_state s;
    if (!read(node, &s)) return "no loop for this reduction and dtype";
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32) return NULL;
    if (s.reduce.tail >= ONT_NARROW) return "many columns";
    bool longest = s.reduce.n >= LONG_ROW && s.reduce.kind != ONT_REDUCE_PROD;
    return s.reduce.tail > 1 || s.reduce.n < ONT_SHORT_ROW || longest ? NULL : "rows of middle length";
}

ont_status ont_reduce_run_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    run_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    if (!read(node, s)) return ont_fail(ONT_EINTERNAL, "not a run of dims");
    const ont_reduce *r = &s->reduce;
    s->size = ont_dtype_size(ont_node_in(node, 0)->dtype);
    s->strips = (r->tail + ONT_REDUCE_COLUMNS - 1) / ONT_REDUCE_COLUMNS;
    s->parts = r->lead * s->strips >= MAX_PARTS ? 1 : r->n * r->outputs / GRAIN + 1;
    if (s->parts > MAX_PARTS) s->parts = MAX_PARTS;
    if (r->kind == ONT_REDUCE_PROD && s->size == sizeof(float)) s->parts = 1; /* accumulates in float64 */
    s->length = (r->n + s->parts - 1) / s->parts;
    s->parts = (r->n + s->length - 1) / s->length;
    out->state = s;
    if (s->parts > 1) out->work_bytes = (size_t)(r->outputs * s->parts) * s->size;
    return ONT_OK;
}

static void whole_leads(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const run_state *s = call->state;
    const ont_reduce *r = &s->reduce;
    s->loop((const char *)call->in[0] + (size_t)(first * r->n * r->tail) * s->size,
            (char *)call->out[0] + (size_t)(first * r->tail) * s->size, last - first, r->n, r->tail, r->tail);
}

/* A unit is a strip of columns of one part of a lead. */
static void units(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const run_state *s = call->state;
    const ont_reduce *r = &s->reduce;
    char *to = s->parts > 1 ? call->work : call->out[0];
    for (int64_t i = first; i < last; i++) {
        int64_t strip = i % s->strips, part = i / s->strips % s->parts, lead = i / s->strips / s->parts;
        int64_t row = part * s->length, n = r->n - row < s->length ? r->n - row : s->length;
        int64_t column = strip * ONT_REDUCE_COLUMNS;
        int64_t width = r->tail - column < ONT_REDUCE_COLUMNS ? r->tail - column : ONT_REDUCE_COLUMNS;
        s->loop((const char *)call->in[0] + (size_t)((lead * r->n + row) * r->tail + column) * s->size,
                to + (size_t)((lead * s->parts + part) * r->tail + column) * s->size, 1, n, r->tail, width);
    }
}

ont_status ont_reduce_run_run(const ont_call *call)
{
    const run_state *s = call->state;
    const ont_reduce *r = &s->reduce;
    if (s->parts == 1 && s->strips == 1) {
        ont_parallel(r->lead, GRAIN / (r->n * r->tail) + 1, whole_leads, (void *)call);
        return ONT_OK;
    }
    int64_t each = s->length * (r->tail < ONT_REDUCE_COLUMNS ? r->tail : ONT_REDUCE_COLUMNS);
    ont_parallel(r->lead * s->parts * s->strips, GRAIN / each + 1, units, (void *)call);
    for (int64_t lead = 0; s->parts > 1 && lead < r->lead; lead++)
        for (int64_t column = 0, width; column < r->tail; column += width) {
            width = r->tail - column < ONT_REDUCE_COLUMNS ? r->tail - column : ONT_REDUCE_COLUMNS;
            s->loop((const char *)call->work + (size_t)(lead * s->parts * r->tail + column) * s->size,
                    (char *)call->out[0] + (size_t)(lead * r->tail + column) * s->size, 1, s->parts, r->tail, width);
        }
    return ONT_OK;
}
