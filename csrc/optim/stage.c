/*
 * General path of an update: a block of every operand is converted to float in the cache (to double if the parameter or
 * a state is double), updated there, and converted back. Handles mixed dtypes, strides, float16, float32 master
 * weights, 8-bit state and stochastic rounding; engine.c updates in place if all operands have one storage type.
 */
#include <string.h>

#include "optim/optim.h"

enum { STAGE_ELEMENTS = 1024 }; /* five float operands fit into 32 KiB of L1; a multiple of ONT_QUANT_BLOCK */

/* Operands that a rule reads and writes, one bit each. */
static uint32_t reads(ont_rule rule)
{
    return rule == ONT_RULE_LAMB_APPLY ? ~(1u << ONT_OPERAND_GRAD) : ~0u;
}

static uint32_t writes(ont_rule rule)
{
    const uint32_t params = 1u << ONT_OPERAND_PARAM | 1u << ONT_OPERAND_MASTER, grad = 1u << ONT_OPERAND_GRAD;
    return rule == ONT_RULE_LAMB_APPLY ? params : rule == ONT_RULE_LAMB ? ~(params | grad) : ~grad;
}

static bool needs_double(const ont_optim_tensor *t)
{
    for (int k = 0; k < ONT_OPERAND_COUNT; k++)
        if (k != ONT_OPERAND_GRAD && t->data[k] && t->dtype[k] == ONT_FLOAT64) return true;
    return false;
}

/* A run of elements of constant stride: all operands of one innermost row of the layout. */
typedef struct stride_run {
    int64_t offset[ONT_OPERAND_COUNT], stride[ONT_OPERAND_COUNT]; /* in elements */
    int64_t count;
} stride_run;

/* The run of at most `limit` elements that begins at element `first`. */
static stride_run run_at(const ont_optim_tensor *t, int64_t first, int64_t limit)
{
    stride_run w;
    const ont_optim_layout *l = t->layout;
    if (!l) {
        for (int k = 0; k < ONT_OPERAND_COUNT; k++) w.offset[k] = first, w.stride[k] = 1;
        w.count = limit;
        return w;
    }
    int64_t index[ONT_MAX_RANK], rest = first;
    for (int d = l->rank - 1; d >= 0; d--) {
        index[d] = rest % l->dims[d];
        rest /= l->dims[d];
    }
    for (int k = 0; k < ONT_OPERAND_COUNT; k++) {
        w.offset[k] = 0;
        for (int d = 0; d < l->rank; d++) w.offset[k] += index[d] * l->strides[k][d];
        w.stride[k] = l->strides[k][l->rank - 1];
    }
    w.count = l->dims[l->rank - 1] - index[l->rank - 1];
    if (w.count > limit) w.count = limit;
    return w;
}

/* A block of a tensor that passes through the stage. */
typedef struct stage {
    const ont_optim_tensor *tensor;
    const ont_optim_table *loops;
    int64_t first, n; /* elements; n <= STAGE_ELEMENTS */
    bool wide;        /* double in the stage */
    uint64_t seed;    /* of stochastic rounding */
} stage;

/* NULL: not an 8-bit state */
static float *scale_at(const ont_optim_tensor *t, int k, int64_t first)
{
    float *scale = k == ONT_OPERAND_STATE ? t->scale[0] : k == ONT_OPERAND_STATE + 1 ? t->scale[1] : NULL;
    return scale ? scale + first / ONT_QUANT_BLOCK : NULL;
}

static void load_stage(const stage *s, int k, void *to)
{
    const ont_optim_tensor *t = s->tensor;
    const ont_optim_table *loops = s->loops;
    ont_dtype dtype = t->dtype[k];
    const float *scale = scale_at(t, k, s->first);
    if (scale) {
        if (dtype == ONT_INT8) loops->load_signed((const int8_t *)t->data[k] + s->first, scale, to, s->n);
        else loops->load_unsigned((const uint8_t *)t->data[k] + s->first, scale, to, s->n);
        return;
    }
    size_t size = ont_dtype_size(dtype), out = s->wide ? sizeof(double) : sizeof(float);
    for (int64_t done = 0; done < s->n;) {
        stride_run w = run_at(t, s->first + done, s->n - done);
        loops->load[ont_optim_storage(dtype)][s->wide]((const char *)t->data[k] + w.offset[k] * (int64_t)size,
                                                       w.stride[k], (char *)to + (size_t)done * out, w.count);
        done += w.count;
    }
}

static void store_stage(const stage *s, int k, const void *from)
{
    const ont_optim_tensor *t = s->tensor;
    const ont_optim_table *loops = s->loops;
    ont_dtype dtype = t->dtype[k];
    float *scale = scale_at(t, k, s->first);
    if (scale) {
        if (dtype == ONT_INT8) loops->store_signed(from, (int8_t *)t->data[k] + s->first, scale, s->n);
        else loops->store_unsigned(from, (uint8_t *)t->data[k] + s->first, scale, s->n);
        return;
    }
    size_t size = ont_dtype_size(dtype), in = s->wide ? sizeof(double) : sizeof(float);
    ont_storage storage = ont_optim_storage(dtype);
    double step = !t->step || !t->stochastic ? 0 : t->step_is_double ? *(double *)t->step : (double)*(float *)t->step;
    uint64_t stream = (uint64_t)step << 32 | t->stream;
    for (int64_t done = 0; done < s->n;) {
        stride_run w = run_at(t, s->first + done, s->n - done);
        char *to = (char *)t->data[k] + w.offset[k] * (int64_t)size;
        const char *piece = (const char *)from + (size_t)done * in;
        if (k == ONT_OPERAND_PARAM && t->stochastic && !s->wide && loops->store_stochastic[storage])
            loops->store_stochastic[storage]((const float *)piece, to, w.stride[k], w.count, s->first + done, s->seed,
                                             stream);
        else
            loops->store[storage][s->wide](piece, to, w.stride[k], w.count);
        done += w.count;
    }
}

/*
 * Loads the parameter: the master copy, unless the 16-bit parameter has been modified since. Where it is not the
 * rounding of the master copy, its value is taken (equal values compare equal, so -0 and NaN are harmless).
 */
static void load_master(const stage *s, void *x)
{
    float written[STAGE_ELEMENTS], rounded[STAGE_ELEMENTS], copy[STAGE_ELEMENTS];
    float *master = s->wide ? copy : x;
    uint16_t narrow[STAGE_ELEMENTS];
    ont_storage storage = ont_optim_storage(s->tensor->dtype[ONT_OPERAND_PARAM]);
    stage floats = *s;
    floats.wide = false;
    load_stage(&floats, ONT_OPERAND_PARAM, written);
    load_stage(&floats, ONT_OPERAND_MASTER, master);
    s->loops->store[storage][0](master, narrow, 1, s->n);
    s->loops->load[storage][0](narrow, 1, rounded, s->n);
    for (int64_t i = 0; i < s->n; i++) master[i] = rounded[i] == written[i] ? master[i] : written[i];
    if (s->wide) s->loops->load[ONT_STORAGE_F32][1](master, 1, x, s->n);
}

void ont_optim_stage(const ont_optim_tensor *t, ont_rule rule, const ont_update *u, int64_t first, int64_t count,
                     uint64_t seed, double *sums)
{
    _Alignas(64) double memory[ONT_OPERAND_MASTER][STAGE_ELEMENTS]; /* floats use the first half of each row */
    const ont_optim_table *loops = ont_optim_loops();
    bool wide = needs_double(t), master = t->data[ONT_OPERAND_MASTER];
    ont_storage storage = wide ? ONT_STORAGE_F64 : ONT_STORAGE_F32;
    void *staged[ONT_OPERAND_MASTER];
    for (int k = 0; k < ONT_OPERAND_MASTER; k++)
        staged[k] = t->data[k] ? (char *)memory + (size_t)k * STAGE_ELEMENTS * (wide ? sizeof(double) : sizeof(float))
                               : NULL;
    stage s = {.tensor = t, .loops = loops, .wide = wide, .seed = seed};
    for (int64_t done = 0; done < count; done += STAGE_ELEMENTS) {
        s.first = first + done;
        s.n = count - done < STAGE_ELEMENTS ? count - done : STAGE_ELEMENTS;
        for (int k = master; k < ONT_OPERAND_MASTER; k++)
            if (staged[k] && reads(rule) >> k & 1) load_stage(&s, k, staged[k]);
        if (master) load_master(&s, staged[ONT_OPERAND_PARAM]);
        loops->update[rule][storage](u, s.n, staged[ONT_OPERAND_PARAM], staged[ONT_OPERAND_GRAD],
                                     staged + ONT_OPERAND_STATE, sums);
        for (int k = 0; k < ONT_OPERAND_MASTER; k++)
            if (staged[k] && writes(rule) >> k & 1) store_stage(&s, k, staged[k]);
        if (master && writes(rule) >> ONT_OPERAND_MASTER & 1)
            store_stage(&s, ONT_OPERAND_MASTER, staged[ONT_OPERAND_PARAM]);
    }
}

double ont_optim_stage_squares(const ont_optim_tensor *t, int64_t first, int64_t count)
{
    double piece[STAGE_ELEMENTS], sum = 0;
    stage s = {.tensor = t, .loops = ont_optim_loops(), .wide = t->dtype[ONT_OPERAND_GRAD] == ONT_FLOAT64};
    for (int64_t done = 0; done < count; done += STAGE_ELEMENTS) {
        s.first = first + done;
        s.n = count - done < STAGE_ELEMENTS ? count - done : STAGE_ELEMENTS;
        load_stage(&s, ONT_OPERAND_GRAD, piece);
        sum += s.loops->sum_squares[s.wide ? ONT_STORAGE_F64 : ONT_STORAGE_F32](piece, s.n);
    }
    return sum;
}
