/*
 * The kernels of unary, binary and comparison operators: one pair (fast, reference) for all; the inner loop is looked
 * up by the operator's name when a program is built. Descriptors and gradients are in elementwise_ops.c.
 */
#include "ops/elementwise/elementwise.h"

#include <string.h>

#include "base/number.h"
#include "base/parallel.h"
#include "base/prefetch.h"
#include "ops/support/broadcast.h"

/* The loop of a node's operator; that of Gelu and its gradient depends on an attribute, too. */
static ont_loop loop_of(const ont_node *node)
{
    ont_loop loop = node->op->loop;
    bool tanh_form = !strcmp(ont_attr_string(node, "approximate", "none"), "tanh");
    if (tanh_form && loop == ONT_LOOP_GeluErf) return ONT_LOOP_GeluTanh;
    if (tanh_form && loop == ONT_LOOP_GeluErfGrad) return ONT_LOOP_GeluTanhGrad;
    return loop;
}

/* Attributes alpha, beta or gamma with the operator's defaults. */
static void parameters(const ont_node *node, double *p)
{
    p[0] = p[1] = 0;
    if (ONT_IS(node, LeakyRelu) || ONT_IS(node, LeakyReluGrad)) p[0] = ont_attr_float(node, "alpha", 0.01);
    if (ONT_IS(node, Swish) || ONT_IS(node, Elu) || ONT_IS(node, EluGrad)) p[0] = ont_attr_float(node, "alpha", 1.0);
    if (ONT_IS(node, Selu) || ONT_IS(node, SeluGrad)) {
        /* The specification rounds the defaults to float32; in float64 the exact numbers are used, as in torch. */
        const double alpha = 1.6732632423543772848, gamma = 1.0507009873554804934;
        p[0] = ont_attr_float(node, "alpha", alpha);
        p[1] = ont_attr_float(node, "gamma", gamma);
        if ((float)p[0] == (float)alpha) p[0] = alpha;
        if ((float)p[1] == (float)gamma) p[1] = gamma;
    }
    if (ONT_IS(node, HardSigmoid) || ONT_IS(node, HardSigmoidGrad)) {
        p[0] = ont_attr_float(node, "alpha", 0.2);
        p[1] = ont_attr_float(node, "beta", 0.5);
    }
}

/* ---- unary ---- */

enum { PREFETCH_ELEMENTS = 128 }; /* the loops prefetch once per so many elements */

typedef struct unary_state {
    ont_unary_loop loop;
    double p[2];
    int64_t count;
    size_t in_size, out_size;
} unary_state;

static const char *unary_accept(const ont_node *node)
{
    ont_loop loop = loop_of(node);
    if (loop == ONT_LOOP_NONE || !ont_simd_plain()->unary[loop][ont_node_in(node, 0)->dtype]) return "dtype";
    return NULL;
}

static ont_status unary_prepare_with(const ont_simd_table *simd, const ont_node *node, ont_arena *arena,
                                     ont_prepared *out)
{
    unary_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    const ont_value *x = ont_node_in(node, 0);
    s->loop = simd->unary[loop_of(node)][x->dtype];
    parameters(node, s->p);
    s->count = ont_shape_count(&x->shape);
    s->in_size = ont_dtype_size(x->dtype);
    s->out_size = ont_dtype_size(node->outputs[0]->dtype);
    out->state = s;
    return ONT_OK;
}

static ont_status unary_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return unary_prepare_with(ont_simd(), node, arena, out);
}

static ont_status unary_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return unary_prepare_with(ont_simd_plain(), node, arena, out);
}

static void unary_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const unary_state *s = call->state;
    for (int64_t n; first < last; first += n) {
        const char *x = (const char *)call->in[0] + (size_t)first * s->in_size;
        char *y = (char *)call->out[0] + (size_t)first * s->out_size;
        n = last - first < PREFETCH_ELEMENTS ? last - first : PREFETCH_ELEMENTS;
        ont_prefetch_read(x, (size_t)n * s->in_size);
        ont_prefetch_write(y, (size_t)n * s->out_size);
        s->loop(x, y, n, s->p);
    }
}

static ont_status unary_run(const ont_call *call)
{
    ont_parallel(((const unary_state *)call->state)->count, 8192, unary_range, (void *)call);
    return ONT_OK;
}

const ont_kernel ont_unary_kernels[2] = {
    {.name = "unary_simd", .accept = unary_accept, .prepare = unary_prepare, .run = unary_run, .inplace = 1},
    {.name = "unary_ref", .accept = unary_accept, .prepare = unary_prepare_ref, .run = unary_run, .inplace = 1},
};

bool ont_unary_tile(const ont_node *node, ont_tile_step *step)
{
    if (unary_accept(node)) return false;
    *step = (ont_tile_step){.kind = ONT_TILE_UNARY, .loop = loop_of(node), .in = ont_node_in(node, 0)->dtype,
                            .out = node->outputs[0]->dtype, .n_operands = 1};
    parameters(node, step->p);
    return true;
}

/* ---- binary ---- */

typedef struct binary_state {
    ont_binary_loop loop;
    double p[2];
    ont_bcast b;
    bool checks_zero; /* integer division */
} binary_state;

static const char *binary_accept(const ont_node *node)
{
    ont_loop loop = loop_of(node);
    const ont_value *x = ont_node_in(node, 0), *y = ont_node_in(node, 1);
    if (loop == ONT_LOOP_NONE || node->n_inputs != 2) return "two inputs";
    if (x->dtype != y->dtype || !ont_simd_plain()->binary[loop][x->dtype]) return "dtype";
    if (loop == ONT_LOOP_Fmod && !ont_attr_int(node, "fmod", 0)) return "fmod is 0";
    return NULL;
}

static ont_status binary_prepare_with(const ont_simd_table *simd, const ont_node *node, ont_arena *arena,
                                      ont_prepared *out)
{
    binary_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    ont_loop loop = loop_of(node);
    s->loop = simd->binary[loop][dtype];
    s->checks_zero = loop == ONT_LOOP_Div && !ont_dtype_is_float(dtype);
    parameters(node, s->p);
    ont_bcast_init(&s->b, node, 2);
    out->state = s;
    return ONT_OK;
}

static ont_status binary_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return binary_prepare_with(ont_simd(), node, arena, out);
}

static ont_status binary_prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return binary_prepare_with(ont_simd_plain(), node, arena, out);
}

static void binary_row(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    const binary_state *s = context;
    for (int64_t done = 0, m; done < n; done += m) {
        m = n - done < PREFETCH_ELEMENTS ? n - done : PREFETCH_ELEMENTS;
        ont_prefetch_write(at[0] + done * b->step[0], (size_t)(m * b->step[0]));
        for (int k = 1; k < 3; k++)
            if (b->inner_stride[k]) ont_prefetch_read(at[k] + done * b->step[k], (size_t)(m * b->step[k]));
        s->loop(at[1] + done * b->step[1], b->inner_stride[1], at[2] + done * b->step[2], b->inner_stride[2],
                at[0] + done * b->step[0], m, s->p);
    }
}

static ont_status binary_run(const ont_call *call)
{
    const binary_state *s = call->state;
    const ont_value *divisor = ont_node_in(call->node, 1);
    if (s->checks_zero && ont_integers_have_zero(call->in[1], divisor->dtype, ont_shape_count(&divisor->shape)))
        return ont_fail(ONT_EINVAL, "integer division by zero in input '%s'", divisor->name);
    ont_bcast_run(&s->b, (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1]}, binary_row, s);
    return ONT_OK;
}

bool ont_binary_tile(const ont_node *node, ont_tile_step *step)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (binary_accept(node) || (loop_of(node) == ONT_LOOP_Div && !ont_dtype_is_float(dtype))) return false;
    *step = (ont_tile_step){.kind = ONT_TILE_BINARY, .loop = loop_of(node), .in = dtype, .out = node->outputs[0]->dtype,
                            .n_operands = 2};
    parameters(node, step->p);
    return true;
}

/* In place is safe with broadcasting: the planner gives the output only storage of an operand of the same size. */
const ont_kernel ont_binary_kernels[2] = {
    {.name = "binary_simd", .accept = binary_accept, .prepare = binary_prepare, .run = binary_run, .inplace = 3},
    {.name = "binary_ref", .accept = binary_accept, .prepare = binary_prepare_ref, .run = binary_run, .inplace = 3},
};

const ont_kernel ont_pow_kernels[5] = {
    {.name = "pow_constant", .accept = ont_pow_constant_accept, .run = ont_pow_constant_run, .inplace = 1},
    {.name = "pow_of_two", .accept = ont_pow_of_two_accept, .run = ont_pow_of_two_run, .inplace = 2},
    {.name = "binary_simd", .accept = binary_accept, .prepare = binary_prepare, .run = binary_run, .inplace = 3},
    {.name = "binary_ref", .accept = binary_accept, .prepare = binary_prepare_ref, .run = binary_run, .inplace = 3},
    {.name = "pow_ref", .accept = ont_pow_ref_accept, .prepare = ont_pow_ref_prepare, .run = ont_pow_ref_run},
};

const ont_kernel ont_mod_kernels[3] = {
    {.name = "binary_simd", .accept = binary_accept, .prepare = binary_prepare, .run = binary_run, .inplace = 3},
    {.name = "binary_ref", .accept = binary_accept, .prepare = binary_prepare_ref, .run = binary_run, .inplace = 3},
    {.name = "mod_ref", .accept = ont_mod_accept, .prepare = ont_mod_prepare, .run = ont_mod_run, .inplace = 3},
};

const ont_kernel ont_prelu_kernels[3] = {
    {.name = "binary_simd", .accept = binary_accept, .prepare = binary_prepare, .run = binary_run, .inplace = 3},
    {.name = "binary_ref", .accept = binary_accept, .prepare = binary_prepare_ref, .run = binary_run, .inplace = 3},
    {.name = "prelu_int", .accept = ont_prelu_int_accept, .prepare = ont_prelu_int_prepare, .run = ont_prelu_int_run,
     .inplace = 1},
};
