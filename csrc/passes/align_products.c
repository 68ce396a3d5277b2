/*
 * Tensor cores read rows of 16 bytes: a GEMM in 16 bits whose rows of C are no multiple of them takes several
 * times as long, forward and for both gradients. Vocabularies are often odd (GPT-2's has 50,257 words). This pass adds
 * columns of zeros to B and to the bias, and cuts them off C with a Slice. For devices, before differentiation, so
 * that the gradients' GEMMs have the aligned rows too.
 */
#include "passes/match.h"
#include "passes/pass.h"

/* ALIGNED: elements of 16 bits in 16 bytes. Below MIN_INNER the copies of C would take as long as the GEMM gains;
 * below MIN_WORK multiplications neither takes long. */
enum { ALIGNED = 8, MIN_INNER = 128, MIN_WORK = 1 << 28 };

static ont_value *bias_of(const ont_node *node)
{
    return node->n_inputs > 2 ? ont_node_in(node, 2) : NULL;
}

static bool gains(const ont_node *node)
{
    const ont_value *a = ont_node_in(node, 0), *b = ont_node_in(node, 1), *y = node->outputs[0];
    const ont_value *bias = bias_of(node);
    if (!ont_dtype_is_half(a->dtype) || b->dtype != a->dtype || y->dtype != a->dtype) return false;
    if (b->shape.rank != 2) return false;
    if (bias && bias->shape.rank != 1) return false;
    int trans_b = ont_attr_int(node, "transB", 0) != 0;
    int64_t n = b->shape.dims[1 - trans_b], k = b->shape.dims[trans_b];
    return n % ALIGNED && n > ALIGNED && k >= MIN_INNER && ont_shape_count(&y->shape) >= MIN_WORK / k;
}

/* x with zeros behind it along the axis, `length` long. */
static ont_value *extend(ont_builder *b, ont_value *x, int axis, int64_t length)
{
    ont_shape shape = x->shape;
    shape.dims[axis] = length - shape.dims[axis];
    ont_value *inputs[] = {x, ont_build_full(b, x->dtype, &shape, 0)};
    ont_node *concat = ont_build_node(b, "", "Concat", inputs, 2, 1);
    if (concat) b->status = ont_attr_set_int(b->graph, concat, "axis", axis);
    return ont_build_done(b, concat);
}

/* The first n columns. */
static ont_value *cut(ont_builder *b, ont_value *x, int64_t n)
{
    int64_t zero = 0, axis = x->shape.rank - 1;
    ont_value *inputs[] = {x, ont_build_const_ints(b, &zero, 1), ont_build_const_ints(b, &n, 1),
                           ont_build_const_ints(b, &axis, 1)};
    return ont_build_done(b, ont_build_node(b, "", "Slice", inputs, 4, 1));
}

static ont_status align(ont_graph *g, ont_node *node)
{
    ont_builder b = {.graph = g, .before = node, .backward = node->backward, .origin = node};
    int axis = ont_attr_int(node, "transB", 0) ? 0 : 1;
    ont_value *bias = bias_of(node), *weight = ont_node_in(node, 1);
    int64_t n = weight->shape.dims[axis], length = (n + ALIGNED - 1) / ALIGNED * ALIGNED;
    ont_value *inputs[] = {ont_node_in(node, 0), extend(&b, weight, axis, length), bias};
    if (bias && bias->shape.dims[0] == n) inputs[2] = extend(&b, bias, 0, length);
    ONT_TRY(b.status);
    ont_node *wide = ont_build_node(&b, node->op->domain, node->op_type, inputs, bias ? 3 : 2, 1);
    if (!wide) return b.status;
    wide->name = node->name;
    ONT_TRY(ont_attr_copy_all(g, wide, node));
    ont_value *y = cut(&b, ont_build_done(&b, wide), n);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, node->outputs[0], y);
    return ONT_OK;
}

ont_status ont_pass_align_products(ont_graph *g)
{
    bool changed = false;
    for (ont_node *node = g->first; node; node = node->next) {
        if (!ont_is_matmul_or_gemm(node) || !gains(node)) continue;
        ONT_TRY(align(g, node));
        changed = true;
    }
    return changed ? ont_pass_dce(g) : ONT_OK;
}
