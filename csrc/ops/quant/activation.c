/*
 * What backward reads of forward, in a byte an element: pass compress_activations puts these nodes around values that
 * it keeps. A block of ONT_QUANT_BLOCK elements in row-major order shares a scale, its largest magnitude s; an element
 * is s sign(q) (q / 127)^2. The square spends the levels where most elements of an activation are: near zero.
 *
 * QuantizeActivation: float32 x -> int8 q as x, float32 scales of the blocks. A block that holds NaN or infinity gets
 * that as scale, and gives back no finite number.
 */
#include "base/parallel.h"
#include "ops/op.h"
#include "simd/optim/optim.h"

static int64_t blocks_of(const ont_shape *x)
{
    return (ont_shape_count(x) + ONT_QUANT_BLOCK - 1) / ONT_QUANT_BLOCK;
}

static ont_shape scales_shape(const ont_shape *x)
{
    return ont_shape_of(1, &(int64_t){blocks_of(x)});
}

typedef struct job {
    float *x, *scales;
    int8_t *q;
    int64_t n;
} job;

/* The elements of some blocks: their number; *at is the first one. */
static int64_t range_of(const job *j, int64_t first, int64_t last, int64_t *at)
{
    int64_t end = last * ONT_QUANT_BLOCK;
    *at = first * ONT_QUANT_BLOCK;
    return (end < j->n ? end : j->n) - *at;
}

static void quantize(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    int64_t at, n = range_of(j, first, last, &at);
    ont_optim_loops()->store_signed(j->x + at, j->q + at, j->scales + first, n);
}

static void dequantize(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    int64_t at, n = range_of(j, first, last, &at);
    ont_optim_loops()->load_signed(j->q + at, j->scales + first, j->x + at, n);
}

enum { BLOCKS_PER_TASK = 64 };

static ont_status quantize_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (x->dtype != ONT_FLOAT32) return ont_fail(ONT_ETYPE, "x is %s, expected float", ont_dtype_name(x->dtype));
    ont_shape scales = scales_shape(&x->shape);
    ONT_TRY(ont_infer_out(node, 0, ONT_INT8, &x->shape));
    return ont_infer_out(node, 1, ONT_FLOAT32, &scales);
}

static ont_status quantize_run(const ont_call *call)
{
    const ont_shape *shape = &call->node->inputs[0].value->shape;
    job j = {.x = (float *)call->in[0], .scales = call->out[1], .q = call->out[0], .n = ont_shape_count(shape)};
    ont_parallel(blocks_of(shape), BLOCKS_PER_TASK, quantize, &j);
    return ONT_OK;
}

static const ont_kernel quantize_kernels[] = {
    {.name = "quantize_activation", .accept = ont_accept_any, .run = quantize_run},
};

const ont_op ont_op_QuantizeActivation = {.domain = ONT_DOMAIN, .name = "QuantizeActivation", .since = 1,
                                          .min_inputs = 1, .max_inputs = 1, .flags = ONT_OP_NO_GRAD | ONT_OP_PUBLIC,
                                          .nondiff_outputs = 3, .attributes = "", .infer = quantize_infer,
                                          ONT_KERNELS(quantize_kernels)};

static ont_status dequantize_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *q, *scales;
    ONT_TRY(ont_need_input(node, 0, &q));
    ONT_TRY(ont_need_input(node, 1, &scales));
    ont_shape expected = scales_shape(&q->shape);
    if (q->dtype != ONT_INT8 || scales->dtype != ONT_FLOAT32 || !ont_shape_equal(&scales->shape, &expected))
        return ont_fail(ONT_EINVAL, "expected the results of QuantizeActivation");
    return ont_infer_out(node, 0, ONT_FLOAT32, &q->shape);
}

static ont_status dequantize_run(const ont_call *call)
{
    const ont_shape *shape = &call->node->inputs[0].value->shape;
    job j = {.x = call->out[0], .scales = (float *)call->in[1], .q = (int8_t *)call->in[0],
             .n = ont_shape_count(shape)};
    ont_parallel(blocks_of(shape), BLOCKS_PER_TASK, dequantize, &j);
    return ONT_OK;
}

static const ont_kernel dequantize_kernels[] = {
    {.name = "dequantize_activation", .accept = ont_accept_any, .run = dequantize_run},
};

const ont_op ont_op_DequantizeActivation = {.domain = ONT_DOMAIN, .name = "DequantizeActivation", .since = 1,
                                            .min_inputs = 2, .max_inputs = 2, .flags = ONT_OP_NO_GRAD | ONT_OP_PUBLIC,
                                            .attributes = "", .infer = dequantize_infer,
                                            ONT_KERNELS(dequantize_kernels)};
