/*
 * A convolution whose kernel covers the whole input, of which there is one output per filter, is a matrix product:
 * (N, C * K) times (M, C * K) transposed. Squeeze-and-excite blocks and heads have them on images of one pixel, where
 * an image at a time would be a product of a matrix and a vector. Before differentiation.
 *
 * A bias of zeros, which exporters write where a convolution has none, is removed: adding it costs a pass over memory.
 */
#include "passes/pass.h"

static bool covers_input(const ont_node *conv)
{
    const ont_value *x = ont_node_in(conv, 0), *w = ont_node_in(conv, 1), *y = conv->outputs[0];
    size_t n_pads = 0;
    const int64_t *pads = ont_attr_ints(conv, "pads", &n_pads);
    if (ont_attr_int(conv, "group", 1) != 1 || !ont_shape_count(&y->shape) || !ont_shape_count(&x->shape)) return false;
    for (size_t i = 0; pads && i < n_pads; i++)
        if (pads[i]) return false;
    for (int d = 2; d < x->shape.rank; d++)
        if (y->shape.dims[d] != 1 || w->shape.dims[d] != x->shape.dims[d]) return false;
    return true;
}

static ont_value *flattened(ont_builder *b, ont_value *v)
{
    int64_t rows = v->shape.dims[0];
    ont_shape flat = ont_shape_of(2, (int64_t[]){rows, ont_shape_count(&v->shape) / rows});
    return ont_build_reshape(b, v, &flat);
}

static ont_status replace(ont_graph *g, ont_node *conv)
{
    ont_builder b = {.graph = g, .before = conv, .backward = conv->backward, .origin = conv};
    ont_value *inputs[] = {flattened(&b, ont_node_in(conv, 0)), flattened(&b, ont_node_in(conv, 1)),
                           ont_node_in(conv, 2)};
    ONT_TRY(b.status);
    ont_node *gemm = ont_build_node(&b, "", "Gemm", inputs, inputs[2] ? 3 : 2, 1);
    if (gemm) {
        gemm->name = conv->name;
        b.status = ont_attr_set_int(g, gemm, "transB", 1);
    }
    ont_value *y = ont_build_reshape(&b, ont_build_done(&b, gemm), &conv->outputs[0]->shape);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, conv->outputs[0], y);
    return ONT_OK;
}

static bool is_zero(const ont_value *v)
{
    if (!v || v->kind != ONT_VALUE_CONSTANT || !v->data) return false;
    const char *bytes = v->data->data;
    for (size_t i = 0; i < v->data->bytes; i++)
        if (bytes[i]) return false;
    return true;
}

ont_status ont_pass_conv_to_gemm(ont_graph *g)
{
    bool changed = false;
    for (ont_node *node = g->first; node; node = node->next) {
        if ((ONT_IS(node, Conv) || ONT_IS(node, ConvTransposePlain)) && is_zero(ont_node_in(node, 2)))
            ont_node_set_input(node, 2, NULL);
        if (!ONT_IS(node, Conv) || !covers_input(node)) continue;
        ONT_TRY(replace(g, node));
        changed = true;
    }
    return changed ? ont_pass_dce(g) : ONT_OK;
}
