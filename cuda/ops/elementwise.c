/*
 * Elementwise operators and fused groups of them on a device: both become one program (elementwise.h) for the
 * interpreter or for a generated kernel. An operator's step is what its descriptor's tile() says, so there is no list
 * of operators here but for those without.
 */
#include <math.h>
#include <string.h>

#include "generate.h"
#include "ops_common.h"

typedef struct state {
    ont_ew program;
    ont_generated *generated; /* NULL: interpreted */
} state;

static void add_step(ont_ew *e, ont_ew_kind kind, ont_dtype in, ont_dtype out, int n_operands)
{
    ont_ew_step *s = &e->steps[e->n_steps++];
    *s = (ont_ew_step){.kind = (int16_t)kind, .in = (int16_t)in, .out = (int16_t)out, .n_operands = (int16_t)n_operands,
                       .operand = {0, 1, 2}};
}

static void copy_step(const ont_tile_step *from, ont_ew_step *to)
{
    *to = (ont_ew_step){.kind = (int16_t)from->kind,
                        .loop = (int16_t)from->loop,
                        .in = (int16_t)from->in,
                        .out = (int16_t)from->out,
                        .n_operands = (int16_t)from->n_operands,
                        .p = {from->p[0], from->p[1]},
                        .stream = (uint64_t)from->stream};
    for (int k = 0; k < from->n_operands; k++) to->operand[k] = (int16_t)from->operand[k];
}

/* ---- operators whose step is not a tile's ---- */

static bool is_castable(ont_dtype dtype)
{
    return ont_dtype_is_float(dtype) || ont_dtype_is_int(dtype) || dtype == ONT_BOOL;
}

/* Dropout in every mode: the interpreter's step with its own numbers. */
static bool dropout_step(const ont_node *node, ont_ew *e)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    double ratio = ont_attr_float(node, "ratio", 0.5), mode = (double)ont_attr_int(node, "training_mode", 0);
    if (ont_node_in(node, 1) && ont_const_scalar(node, 1, &ratio) != ONT_OK) return false;
    if (ont_node_in(node, 2) && ont_const_scalar(node, 2, &mode) != ONT_OK) return false;
    if (!ont_is_float32_or_64(dtype)) return false;
    bool active = mode != 0 && ratio > 0;
    add_step(e, active ? ONT_EW_DROPOUT : ONT_EW_CAST, dtype, dtype, 1);
    ont_ew_step *s = &e->steps[e->n_steps - 1];
    ont_dropout_rule rule = active ? ont_dropout_rule_of(node, ratio) : (ont_dropout_rule){0, 1};
    s->p[0] = (double)rule.threshold;
    s->p[1] = rule.scale;
    s->stream = ont_dropout_stream(node);
    if (ont_node_out(node, 1)) { /* where nothing is dropped the threshold is 0 */
        add_step(e, ONT_EW_MASK, dtype, ONT_BOOL, 1);
        e->steps[e->n_steps - 1].p[0] = s->p[0];
        e->steps[e->n_steps - 1].stream = s->stream;
    }
    return true;
}

static bool clip_step(const ont_node *node, ont_ew *e)
{
    ont_dtype d = ont_node_in(node, 0)->dtype;
    if (d != ONT_FLOAT32 && d != ONT_FLOAT64 && d != ONT_INT32 && d != ONT_INT64 && d != ONT_UINT64) return false;
    add_step(e, ONT_EW_CLIP, d, d, 3);
    e->n_operands = 3; /* run() puts in bounds that are not given */
    return true;
}

/* Max, Min, Sum and Mean of any number of operands, one after the other. */
static bool chain_step(const ont_node *node, ont_loop loop, ont_ew *e)
{
    ont_dtype d = ont_node_in(node, 0)->dtype;
    bool known = ont_is_float32_or_64(d) || (ont_dtype_is_int(d) && ont_dtype_size(d) >= 4);
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (!ont_node_in(node, i) || ont_node_in(node, i)->dtype != d) known = false;
    if (!known) return false;
    if (node->n_inputs == 1) add_step(e, ONT_EW_CAST, d, d, 1);
    for (uint32_t i = 1; i < node->n_inputs; i++) {
        add_step(e, ONT_EW_BINARY, d, d, 2);
        ont_ew_step *s = &e->steps[e->n_steps - 1];
        s->loop = (int16_t)loop;
        s->operand[0] = (int16_t)(i == 1 ? 0 : (int)node->n_inputs + e->n_steps - 2);
        s->operand[1] = (int16_t)i;
    }
    if (!strcmp(node->op->name, "Mean")) { /* of floats: inference refuses others */
        add_step(e, ONT_EW_DIVIDE, d, d, 1);
        ont_ew_step *s = &e->steps[e->n_steps - 1];
        s->operand[0] = (int16_t)((int)node->n_inputs + e->n_steps - 2);
        s->p[0] = node->n_inputs;
    }
    return true;
}

/* A power of float32 or float64; the exponent may be of another type. */
static bool pow_step(const ont_node *node, ont_ew *e)
{
    ont_dtype d = ont_node_in(node, 0)->dtype, exponent = ont_node_in(node, 1)->dtype;
    if (!ont_is_float32_or_64(d) || !is_castable(exponent)) return false;
    if (exponent != d) {
        add_step(e, ONT_EW_CAST, exponent, d, 1);
        e->steps[0].operand[0] = 1;
    }
    add_step(e, ONT_EW_BINARY, d, d, 2);
    e->steps[e->n_steps - 1].loop = ONT_LOOP_Pow;
    if (exponent != d) e->steps[e->n_steps - 1].operand[1] = 2;
    return true;
}

static bool integer_step(const ont_node *node, ont_ew *e)
{
    static const struct {
        const char *name;
        ont_loop loop;
    } loops[] = {{"Div", ONT_LOOP_Div}};
    ont_dtype d = ont_node_in(node, 0)->dtype;
    for (size_t i = 0; i < sizeof loops / sizeof *loops; i++) {
        if (strcmp(loops[i].name, node->op->name) || !ont_dtype_is_int(d) || node->n_inputs != 2) continue;
        if (ont_dtype_size(d) < 4) return false; /* widened, as on the CPU */
        add_step(e, ONT_EW_BINARY, d, d, 2);
        e->steps[e->n_steps - 1].loop = (int16_t)loops[i].loop;
        return true;
    }
    return false;
}

/* Remainders and bits of integers; infinities, and PRelu of floats. */
static bool number_step(const ont_node *node, ont_ew *e)
{
    static const struct {
        const char *name;
        ont_ew_bits which;
    } bits[] = {{"BitwiseAnd", ONT_EW_BITS_AND}, {"BitwiseOr", ONT_EW_BITS_OR}, {"BitwiseXor", ONT_EW_BITS_XOR},
                {"BitwiseNot", ONT_EW_BITS_NOT}};
    const char *name = node->op->name;
    ont_dtype in = ont_node_in(node, 0)->dtype, out = node->outputs[0]->dtype;
    ont_ew_step *s = &e->steps[0];
    if (!strcmp(name, "PRelu") && ont_is_float32_or_64(in)) {
        add_step(e, ONT_EW_BINARY, in, out, 2);
        s->loop = ONT_LOOP_PRelu;
    } else if (!strcmp(name, "Mod") && ont_dtype_is_int(in)) { /* of floats with fmod=1, there is a tile's step */
        add_step(e, ONT_EW_MOD, in, out, 2);
        s->p[0] = (double)ont_attr_int(node, "fmod", 0);
    } else if (!strcmp(name, "IsInf") && ont_dtype_is_float(in)) {
        add_step(e, ONT_EW_ISINF, in, out, 1);
        s->p[0] = (double)ont_attr_int(node, "detect_negative", 1);
        s->p[1] = (double)ont_attr_int(node, "detect_positive", 1);
    }
    for (size_t i = 0; i < sizeof bits / sizeof *bits; i++) {
        if (strcmp(name, bits[i].name) || !ont_dtype_is_int(in)) continue;
        add_step(e, ONT_EW_BITS, in, out, (int)node->n_inputs);
        s->p[0] = bits[i].which;
    }
    if (!strcmp(name, "BitShift") && ont_dtype_is_int(in)) {
        add_step(e, ONT_EW_BITS, in, out, 2);
        s->p[0] = strcmp(ont_attr_string(node, "direction", ""), "LEFT") ? ONT_EW_BITS_RIGHT : ONT_EW_BITS_LEFT;
    }
    return e->n_steps == 1;
}

/* BitCast as a copy of whole bytes, whatever they mean. */
static bool bit_cast_step(const ont_node *node, ont_ew *e)
{
    ont_dtype out = node->outputs[0]->dtype;
    ont_dtype whole = ont_dtype_size(out) == 1   ? ONT_UINT8
                      : ont_dtype_size(out) == 2 ? ONT_UINT16
                      : ont_dtype_size(out) == 4 ? ONT_UINT32
                                                 : ONT_UINT64;
    if (!is_castable(ont_node_in(node, 0)->dtype) || !is_castable(out)) return false;
    add_step(e, ONT_EW_CAST, whole, out == ONT_BOOL ? ONT_BOOL : whole, 1);
    return true;
}

static bool own_step(const ont_node *node, ont_ew *e)
{
    const char *name = node->op->name;
    ont_dtype in = ont_node_in(node, 0)->dtype, out = node->outputs[0]->dtype;
    if (!strcmp(name, "Cast")) {
        if (!is_castable(in) || !is_castable(out)) return false;
        add_step(e, ONT_EW_CAST, in, out, 1);
        e->n_operands = 1;
        return true;
    }
    if (!strcmp(name, "BitCast")) return bit_cast_step(node, e);
    if (!strcmp(name, "And") || !strcmp(name, "Or") || !strcmp(name, "Xor")) {
        add_step(e, *name == 'A' ? ONT_EW_AND : *name == 'O' ? ONT_EW_OR : ONT_EW_XOR, in, out, 2);
        return true;
    }
    if (!strcmp(name, "Not") || !strcmp(name, "IsNaN")) {
        if (*name == 'I' && !ont_dtype_is_float(in)) return false;
        add_step(e, *name == 'N' ? ONT_EW_NOT : ONT_EW_ISNAN, in, out, 1);
        return true;
    }
    if (!strncmp(name, "Dropout", 7)) {
        e->n_operands = 1;
        return dropout_step(node, e);
    }
    if (!strcmp(name, "Pow")) return pow_step(node, e);
    if (!strcmp(name, "Max") || !strcmp(name, "Min"))
        return chain_step(node, *name == 'M' && name[1] == 'a' ? ONT_LOOP_Max : ONT_LOOP_Min, e);
    if (!strcmp(name, "Sum") || !strcmp(name, "Mean")) return chain_step(node, ONT_LOOP_Add, e);
    if (!strcmp(name, "Clip") || !strcmp(name, "HardTanh")) return clip_step(node, e);
    return integer_step(node, e) || number_step(node, e);
}

/* ---- the program of a node ---- */

static bool read_fused(const ont_node *node, ont_ew *e)
{
    ont_tile_program p;
    if (ont_tile_read(node, &p) != ONT_OK || p.n_steps > ONT_EW_STEPS || p.n_operands > ONT_EW_OPERANDS) return false;
    e->n_steps = p.n_steps;
    e->n_results = p.n_results;
    for (int j = 0; j < p.n_steps; j++) copy_step(&p.steps[j], &e->steps[j]);
    for (int k = 0; k < p.n_results; k++) e->result[k] = (int16_t)p.result[k];
    return true;
}

/* Everything but sizes: what accept() asks. */
static bool read_program(const ont_node *node, ont_ew *e)
{
    ont_tile_step step;
    *e = (ont_ew){.n_operands = (int32_t)node->n_inputs, .n_results = 1};
    if (!strcmp(node->op->name, "FusedElementwise")) return read_fused(node, e);
    if (node->n_inputs > ONT_EW_OPERANDS || !ont_node_in(node, 0) || !node->outputs[0]) return false;
    if (node->op->tile && node->n_outputs == 1 && node->op->tile(node, &step)) {
        for (int k = 0; k < step.n_operands; k++) step.operand[k] = k;
        copy_step(&step, &e->steps[0]);
        e->n_steps = 1;
        e->n_operands = step.n_operands;
        return true;
    }
    if (!own_step(node, e)) return false;
    /* Dropout has a step per result; others end in their one. */
    e->n_results = (int32_t)node->n_outputs > 1 && node->outputs[1] ? 2 : 1;
    for (int k = 0; k < e->n_results; k++) e->result[k] = (int16_t)(e->n_steps - e->n_results + k);
    return true;
}

static const char *accept(const ont_node *node)
{
    ont_ew e;
    return read_program(node, &e) ? NULL : "dtype or attributes";
}

/* Dims merged as far as all operands allow; strides in elements. */
static void read_layout(const ont_node *node, ont_ew *e)
{
    ont_bcast b;
    int present = 0;
    while (present < e->n_operands && ont_node_in(node, (uint32_t)present)) present++;
    bool clips = e->steps[0].kind == ONT_EW_CLIP && strcmp(node->op->name, "FusedElementwise");
    ont_bcast_init(&b, node, clips ? 1 : present); /* bounds are one number each */
    e->count = b.count;
    e->rank = b.rank + 1;
    for (int d = 0; d < b.rank; d++) e->dims[d] = b.dims[d];
    e->dims[b.rank] = b.inner;
    for (int k = 0; k < e->n_operands; k++) {
        const ont_value *v = ont_node_in(node, (uint32_t)k);
        e->size[k] = (int16_t)ont_dtype_size(v ? v->dtype : ont_node_in(node, 0)->dtype);
        for (int d = 0; d < e->rank && (!clips || !k); d++)
            e->strides[k][d] = d < b.rank ? b.strides[k + 1][d] / e->size[k] : b.inner_stride[k + 1];
    }
    if (!e->count) e->rank = 0;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    if (!read_program(node, &s->program)) return ont_fail(ONT_EINTERNAL, "the program changed");
    read_layout(node, &s->program);
    if (s->program.steps[0].kind == ONT_EW_CLIP) out->work_bytes = 16;
    ONT_TRY(ont_generate(&s->program, &s->generated));
    out->state = s;
    return ONT_OK;
}

/* Bounds that the node does not give, or gives as attributes, are written to scratch. */
static ont_status fill_bounds(const ont_call *call, ont_ew *e)
{
    const ont_node *node = call->node;
    uint64_t bounds[2] = {0, 0};
    double low = ont_attr_float(node, "min", -INFINITY), high = ont_attr_float(node, "max", INFINITY);
    float narrow[2] = {(float)low, (float)high};
    int32_t whole[2] = {INT32_MIN, INT32_MAX};
    switch (ont_node_in(node, 0)->dtype) {
    case ONT_FLOAT32: memcpy(&bounds[0], &narrow[0], 4), memcpy(&bounds[1], &narrow[1], 4); break;
    case ONT_FLOAT64: memcpy(&bounds[0], &low, 8), memcpy(&bounds[1], &high, 8); break;
    case ONT_INT32: memcpy(&bounds[0], &whole[0], 4), memcpy(&bounds[1], &whole[1], 4); break;
    case ONT_UINT64: bounds[1] = UINT64_MAX; break;
    default: bounds[0] = (uint64_t)INT64_MIN, bounds[1] = INT64_MAX; break;
    }
    if (e->in[1] && e->in[2]) return ONT_OK;
    ONT_TRY(call->device->ops->store(call->device, call->work, bounds, 2, call->stream));
    if (!e->in[1]) e->in[1] = call->work;
    if (!e->in[2]) e->in[2] = (char *)call->work + 8;
    return ONT_OK;
}

static ont_status run(const ont_call *call)
{
    const state *s = call->state;
    ont_ew e = s->program;
    for (int k = 0; k < e.n_operands; k++) e.in[k] = ont_operand(call, (uint32_t)k);
    if (e.steps[0].kind == ONT_EW_CLIP) ONT_TRY(fill_bounds(call, &e));
    for (int k = 0; k < e.n_results; k++) e.out[k] = call->out[k];
    e.seed = call->seed_at;
    e.fault = call->fault;
    e.index = call->step;
    if (s->generated && ont_generated_fits(s->generated, &e)) return ont_generated_run(s->generated, &e, call->stream);
    return ont_launched(ont_launch_elementwise(&e, call->stream));
}

static void release(void *opaque)
{
    ont_generated_destroy(((state *)opaque)->generated);
}

const ont_kernel ont_cuda_elementwise_kernels[1] = {
    {.name = "cuda_elementwise",
     .accept = accept,
     .prepare = prepare,
     .run = run,
     .release = release,
     .inplace = UINT32_MAX},
};
