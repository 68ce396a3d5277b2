/*
 * What happens to a matrix product at once, while its result is in a register: the row that a linear layer adds, and
 * the way of a 16-bit product to float32. After differentiation, so that the rules see the parts: before widening,
 * which would put Casts between them, and once more for the Casts that it did put there. A result that anybody else
 * reads stays.
 */
#include <string.h>

#include "ops/matmul.h"
#include "passes/pass.h"

static bool is_product(const ont_node *node)
{
    return ont_node_is(node, "", "MatMul") || ont_node_is(node, ONT_DOMAIN, "FusedMatMul");
}

/* ---- a row added ---- */

/* The row that `reader` adds to the product; NULL: it does something else. */
static ont_value *row_added(const ont_node *product, const ont_node *reader)
{
    const ont_value *y = product->outputs[0];
    ont_product p;
    if (!ont_node_is(reader, "", "Add") || product->n_inputs > 2 || ont_attr_float(product, "alpha", 1.0) != 1)
        return NULL;
    if (ont_product_read(product, &p) != ONT_OK || p.vector_b || !ont_dtype_is_float(y->dtype)) return NULL;
    ont_value *row = ont_node_in(reader, ont_node_in(reader, 0) == y);
    if (row == y || row->dtype != y->dtype || y->dtype != ont_node_in(product, 0)->dtype) return NULL;
    return ont_product_is_row(&p, &row->shape) && ont_shape_equal(&reader->outputs[0]->shape, &y->shape) ? row : NULL;
}

/* One node at the place of `reader`, where the row is known as well. */
static ont_status join(ont_graph *g, ont_node *product, ont_node *reader, ont_value *row, ont_node **joined)
{
    ont_value *inputs[] = {ont_node_in(product, 0), ont_node_in(product, 1), row};
    ont_builder b = {.graph = g, .before = reader, .backward = product->backward, .origin = product->origin};
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "FusedMatMul", inputs, 3, 1);
    if (!node) return b.status;
    node->name = product->name;
    ONT_TRY(ont_attr_copy_all(g, node, product));
    ont_build_done(&b, node);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, reader->outputs[0], node->outputs[0]);
    ont_graph_remove_node(g, reader);
    ont_graph_remove_node(g, product);
    *joined = node;
    return ONT_OK;
}

/* ---- to float32 without rounding first ---- */

/* The Cast of the product to float32, with nothing but views between; NULL: none. */
static ont_node *cast_behind(const ont_graph *g, const ont_node *product)
{
    const ont_value *y = product->outputs[0];
    ont_node *reader = ont_single_user_in_phase(g, y);
    if (y->dtype != ONT_BFLOAT16 && y->dtype != ONT_FLOAT16) return NULL;
    while (reader && reader->op->flags & ONT_OP_VIEW && reader->inputs[0].value == y) {
        y = reader->outputs[0];
        reader = ont_single_user_in_phase(g, y);
    }
    return reader && ont_node_is(reader, "", "Cast") && reader->outputs[0]->dtype == ONT_FLOAT32 ? reader : NULL;
}

static ont_status absorb_cast(ont_graph *g, ont_node *product, ont_node *cast)
{
    const ont_op *op = ont_op_find(ONT_DOMAIN, "FusedMatMul", INT64_MAX);
    if (!op) return ont_fail(ONT_EINTERNAL, "FusedMatMul is not in the table");
    product->domain = op->domain;
    product->op_type = op->name;
    product->op = op;
    product->version = op->since;
    ONT_TRY(ont_attr_set_int(g, product, "to", ONT_FLOAT32));
    ont_value *y = ont_node_in(cast, 0);
    for (ont_value *v = y;; v = v->def->inputs[0].value) { /* the views as well */
        v->dtype = ONT_FLOAT32;
        if (v->def == product) break;
    }
    ont_value_replace_uses(g, cast->outputs[0], y);
    ont_graph_remove_node(g, cast);
    return ONT_OK;
}

ont_status ont_pass_fuse_gemm(ont_graph *g)
{
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        if (!is_product(node)) continue;
        ont_node *reader = ont_single_user_in_phase(g, node->outputs[0]), *cast;
        ont_value *row = reader ? row_added(node, reader) : NULL;
        if (row && next == reader) next = reader->next;
        if (row) ONT_TRY(join(g, node, reader, row, &node));
        cast = g->device ? NULL : cast_behind(g, node); /* a device's library has its row in the type of its result */
        if (cast && next == cast) next = cast->next;
        if (cast) ONT_TRY(absorb_cast(g, node, cast));
    }
    return ONT_OK;
}
