/*
 * Runs elementwise steps over tiles. See tile_program.h.
 */
#include "ops/elementwise/tile_program.h"

#include <string.h>

#include "base/prefetch.h"

enum { INTS_PER_STEP = 8 };

bool ont_tile_casts(ont_dtype from, ont_dtype to)
{
    bool half_from = from == ONT_FLOAT16 || from == ONT_BFLOAT16, half_to = to == ONT_FLOAT16 || to == ONT_BFLOAT16;
    return (half_from && to == ONT_FLOAT32) || (from == ONT_FLOAT32 && half_to);
}

/* ---- register allocation: one pass over the steps; a register is free again after its last use ---- */

static int last_use(const ont_tile_program *p, int step)
{
    int last = step;
    for (int j = step + 1; j < p->n_steps; j++)
        for (int k = 0; k < p->steps[j].n_operands; k++)
            if (p->steps[j].operand[k] == p->n_operands + step) last = j;
    return last;
}

bool ont_tile_link(ont_tile_program *p)
{
    int free_from[ONT_TILE_REGISTERS] = {0}; /* the first step that may write a register */
    for (int j = 0; j < p->n_steps; j++) {
        int location = ONT_TILE_REGISTERS;
        for (int k = 0; k < p->n_results; k++)
            if (p->result[k] == j) location = -1 - k;
        for (int r = 0; location == ONT_TILE_REGISTERS && r < ONT_TILE_REGISTERS; r++)
            if (free_from[r] <= j) location = r;
        if (location == ONT_TILE_REGISTERS) return false;
        /* The last user may overwrite its operand only where element sizes are equal; the step after it always may. */
        int last = last_use(p, j);
        bool one_size = ont_dtype_size(p->steps[j].out) == ont_dtype_size(p->steps[last].out);
        if (location >= 0) free_from[location] = one_size && last > j ? last : last + 1;
        p->location[j] = location;
    }
    return true;
}

/* ---- run ---- */

typedef struct tile {
    const ont_tile_program *p;
    const ont_tile_bind *bind;
    const ont_simd_table *simd;
    int64_t at; /* index of the tile's first element in the row */
    char *registers;
} tile;

static char *result_of(const tile *t, int step)
{
    int location = t->p->location[step];
    if (location >= 0) return t->registers + (size_t)location * ONT_TILE * 8;
    return t->bind->result[-1 - location] + (size_t)t->at * ont_dtype_size(t->p->steps[step].out);
}

static const void *operand_of(const tile *t, int operand, int64_t *stride)
{
    if (operand >= t->p->n_operands) {
        *stride = 1;
        return result_of(t, operand - t->p->n_operands);
    }
    *stride = t->bind->stride[operand];
    return t->bind->operand[operand] + (size_t)(t->at * *stride) * t->p->operand_size[operand];
}

static void cast_step(const tile *t, const ont_tile_step *s, const void *x, void *out, int64_t n)
{
    if (s->in == ONT_FLOAT16) t->simd->half_to_float(x, out, n);
    if (s->in == ONT_BFLOAT16) t->simd->bfloat_to_float(x, out, n);
    if (s->out == ONT_FLOAT16) t->simd->float_to_half(x, out, n);
    if (s->out == ONT_BFLOAT16) t->simd->float_to_bfloat(x, out, n);
}

static void run_step(const tile *t, int step, int64_t n)
{
    const ont_tile_step *s = &t->p->steps[step];
    const void *in[3] = {0};
    int64_t stride[3] = {0};
    for (int k = 0; k < s->n_operands; k++) in[k] = operand_of(t, s->operand[k], &stride[k]);
    void *out = result_of(t, step);
    switch (s->kind) {
    case ONT_TILE_UNARY: t->simd->unary[s->loop][s->in](in[0], out, n, s->p); break;
    case ONT_TILE_BINARY: t->simd->binary[s->loop][s->in](in[0], stride[0], in[1], stride[1], out, n, s->p); break;
    case ONT_TILE_WHERE: t->simd->where(ont_dtype_size(s->out), in[0], in[1], in[2], stride, out, n); break;
    case ONT_TILE_DROPOUT:
        t->simd->dropout(&(ont_dropout_params){.key = t->bind->seed, .stream = (uint64_t)s->stream,
                                               .threshold = (uint32_t)s->p[0], .scale = (float)s->p[1]},
                         in[0], out, NULL, t->bind->first + t->at, n);
        break;
    case ONT_TILE_CAST: cast_step(t, s, in[0], out, n); break;
    case ONT_TILE_KINDS: break;
    }
}

void ont_tile_bind_row(ont_tile_bind *bind, const ont_tile_program *p, const ont_call *call, const ont_bcast *walk,
                       char *const *at)
{
    for (int i = 0; i < p->n_operands; i++) {
        bind->operand[i] = at[i + 1];
        bind->stride[i] = walk->inner_stride[i + 1];
    }
    for (int k = 0; k < p->n_results; k++)
        bind->result[k] = (char *)call->out[k] + (size_t)bind->first * p->result_size[k];
}

/* Prefetches the part of step `step` of the `bytes` at `at`, which are divided among n_steps steps. */
static void prefetch_part(const char *at, size_t bytes, int step, int n_steps)
{
    size_t lines = bytes / ONT_CACHE_LINE, first = lines * (size_t)step / (size_t)n_steps;
    size_t last = lines * (size_t)(step + 1) / (size_t)n_steps;
    for (; first < last; first++) __builtin_prefetch(at + first * ONT_CACHE_LINE);
}

/* Prefetches a few lines of the next tile, of m elements, between the steps of this one. */
static void prefetch_next_tile(const tile *t, int step, int64_t m)
{
    const ont_tile_program *p = t->p;
    const size_t next = (size_t)(t->at + m);
    for (int i = 0; i < p->n_operands; i++)
        if (t->bind->stride[i])
            prefetch_part(t->bind->operand[i] + next * p->operand_size[i], (size_t)m * p->operand_size[i], step,
                        p->n_steps);
    for (int k = 0; k < p->n_results; k++)
        prefetch_part(t->bind->result[k] + next * p->result_size[k], (size_t)m * p->result_size[k], step, p->n_steps);
}

void ont_tile_run(const ont_simd_table *simd, const ont_tile_program *p, const ont_tile_bind *bind, int64_t n)
{
    _Alignas(64) char registers[ONT_TILE_REGISTERS * ONT_TILE * 8];
    tile t = {p, bind, simd, 0, registers};
    int64_t size = bind->tile ? bind->tile : ONT_TILE_DEFAULT;
    for (; t.at < n; t.at += size) {
        int64_t m = n - t.at < size ? n - t.at : size;
        for (int step = 0; step < p->n_steps; step++) {
            prefetch_next_tile(&t, step, m);
            run_step(&t, step, m);
            for (int k = 0; k < p->n_sinks; k++)
                if (p->sink[k] == step) bind->drain(bind->context, k, result_of(&t, step), m);
        }
    }
}

/* ---- attributes ---- */

ont_status ont_tile_write(ont_graph *g, ont_node *node, const ont_tile_program *p)
{
    int64_t steps[ONT_TILE_STEPS * INTS_PER_STEP], results[ONT_TILE_RESULTS], sinks[ONT_TILE_SINKS];
    double parameters[ONT_TILE_STEPS * 2];
    for (int j = 0; j < p->n_steps; j++) {
        const ont_tile_step *s = &p->steps[j];
        memcpy(steps + j * INTS_PER_STEP,
               (int64_t[]){s->kind, s->loop, s->in, s->out, s->operand[0], s->operand[1], s->operand[2], s->stream},
               INTS_PER_STEP * sizeof *steps);
        memcpy(parameters + 2 * j, s->p, sizeof s->p);
    }
    for (int k = 0; k < p->n_results; k++) results[k] = p->result[k];
    for (int k = 0; k < p->n_sinks; k++) sinks[k] = p->sink[k];
    if (p->n_sinks) ONT_TRY(ont_attr_set_ints(g, node, "sinks", sinks, (size_t)p->n_sinks));
    ONT_TRY(ont_attr_set_ints(g, node, "steps", steps, (size_t)p->n_steps * INTS_PER_STEP));
    ONT_TRY(ont_attr_set_floats(g, node, "parameters", parameters, (size_t)p->n_steps * 2));
    return ont_attr_set_ints(g, node, "results", results, (size_t)p->n_results);
}

static bool is_dtype(int64_t dtype)
{
    return dtype > ONT_UNDEFINED && dtype < ONT_DTYPE_COUNT && ont_dtype_size((ont_dtype)dtype);
}

/* Whether a step is valid. Attributes may come from a file, so no number is trusted to be an index. */
static bool is_valid(const ont_tile_program *p, int step)
{
    const ont_tile_step *s = &p->steps[step];
    const ont_simd_table *plain = ont_simd_plain();
    for (int k = 0; k < s->n_operands; k++)
        if (s->operand[k] < 0 || s->operand[k] >= p->n_operands + step) return false;
    switch (s->kind) {
    case ONT_TILE_UNARY: return plain->unary[s->loop][s->in];
    case ONT_TILE_BINARY: return plain->binary[s->loop][s->in];
    case ONT_TILE_CAST: return ont_tile_casts(s->in, s->out);
    case ONT_TILE_DROPOUT: return s->in == ONT_FLOAT32 && s->out == ONT_FLOAT32;
    default: return s->kind == ONT_TILE_WHERE && s->in == s->out;
    }
}

ont_status ont_tile_read(const ont_node *node, ont_tile_program *p)
{
    static const int arity[ONT_TILE_KINDS] = {1, 2, 3, 1, 1};
    size_t n_steps, n_parameters, n_results, n_sinks;
    const int64_t *steps = ont_attr_ints(node, "steps", &n_steps);
    const int64_t *results = ont_attr_ints(node, "results", &n_results);
    const int64_t *sinks = ont_attr_ints(node, "sinks", &n_sinks);
    const double *parameters = ont_attr_floats(node, "parameters", &n_parameters);
    *p = (ont_tile_program){.n_operands = (int)node->n_inputs, .n_steps = (int)(n_steps / INTS_PER_STEP),
                            .n_results = (int)n_results, .n_sinks = (int)n_sinks};
    bool valid = n_steps && n_steps % INTS_PER_STEP == 0 && n_steps <= ONT_TILE_STEPS * INTS_PER_STEP &&
                 n_parameters == n_steps / INTS_PER_STEP * 2 && n_results + n_sinks && n_results <= ONT_TILE_RESULTS &&
                 n_sinks <= ONT_TILE_SINKS && node->n_inputs <= ONT_TILE_OPERANDS;
    for (int j = 0; valid && j < p->n_steps; j++) {
        const int64_t *s = steps + j * INTS_PER_STEP;
        valid = s[0] >= 0 && s[0] < ONT_TILE_KINDS && s[1] >= 0 && s[1] < ONT_LOOP_COUNT && is_dtype(s[2]) &&
                is_dtype(s[3]);
        if (!valid) break;
        p->steps[j] = (ont_tile_step){.kind = (ont_tile_kind)s[0], .loop = (ont_loop)s[1], .in = (ont_dtype)s[2],
                                      .out = (ont_dtype)s[3], .n_operands = arity[s[0]], .stream = s[7],
                                      .operand = {(int)s[4], (int)s[5], (int)s[6]},
                                      .p = {parameters[2 * j], parameters[2 * j + 1]}};
        valid = is_valid(p, j);
    }
    for (size_t k = 0; valid && k < n_results; k++) {
        valid = results[k] >= 0 && results[k] < p->n_steps;
        p->result[k] = (int)results[k];
        if (valid) p->result_size[k] = ont_dtype_size(p->steps[p->result[k]].out);
    }
    for (size_t k = 0; valid && k < n_sinks; k++) {
        valid = sinks[k] >= 0 && sinks[k] < p->n_steps;
        p->sink[k] = (int)sinks[k];
    }
    for (uint32_t i = 0; valid && i < node->n_inputs; i++) {
        const ont_value *operand = ont_node_in(node, i);
        valid = operand != NULL;
        if (valid) p->operand_size[i] = ont_dtype_size(operand->dtype);
    }
    if (!valid || (!n_sinks && p->result[0] != p->n_steps - 1) || !ont_tile_link(p))
        return ont_fail(ONT_EINVAL, "attributes do not describe a valid program");
    return ONT_OK;
}

const char *ont_tile_accept(const ont_node *node)
{
    ont_tile_program p;
    return ont_tile_read(node, &p) == ONT_OK ? NULL : "steps";
}
