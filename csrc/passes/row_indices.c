/*
 * GatherElements and an adding ScatterElements whose indices are expanded over whole rows, as graph networks have them,
 * become a Gather of rows and a GatherGrad. The indices of every element, eight bytes each, are then not made. After
 * differentiation.
 */
#include <string.h>

#include "passes/pass.h"

/* The indices of rows, of which `node` reads an expansion over all other dims of its data; NULL if it does not. */
static ont_value *row_indices(const ont_node *node, int axis)
{
    const ont_value *data = ont_node_in(node, 0), *index = ont_node_in(node, 1);
    if (!index->def || !ONT_IS(index->def, Expand)) return NULL;
    ont_value *rows = ont_node_in(index->def, 0);
    int missing = index->shape.rank - rows->shape.rank;
    for (int d = 0; d < index->shape.rank; d++) {
        int64_t before = d < missing ? 1 : rows->shape.dims[d - missing];
        if (d == axis ? before != index->shape.dims[d] : before != 1 || index->shape.dims[d] != data->shape.dims[d])
            return NULL;
    }
    return ont_shape_count(&index->shape) && ont_shape_count(&data->shape) ? rows : NULL;
}

static bool is_gather(const ont_node *node)
{
    return ONT_IS(node, GatherElements) || ONT_IS(node, TorchGatherElements);
}

static bool is_adding_scatter(const ont_node *node)
{
    if (!ONT_IS(node, ScatterElements) && !ONT_IS(node, TorchScatterElements)) return false;
    ont_dtype dtype = node->outputs[0]->dtype; /* GatherGrad sums 16-bit floats in float32 */
    return !strcmp(ont_attr_string(node, "reduction", "none"), "add") &&
           (dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64);
}

static ont_status replace(ont_graph *g, ont_node *node, int axis, ont_value *rows)
{
    ont_builder b = {.graph = g, .before = node, .backward = node->backward, .origin = node};
    ont_value *data = ont_node_in(node, 0);
    bool gather = is_gather(node), torch = *node->op->domain;
    ont_shape flat = ont_shape_of(1, (int64_t[]){ont_shape_count(&rows->shape)});
    ont_value *index = ont_build_reshape(&b, rows, &flat);
    if (torch && !gather && b.status == ONT_OK) { /* torch's scatter has no negative indices; GatherGrad has */
        ont_value *limit = ont_build_scalar(&b, ONT_INT64, (double)data->shape.dims[axis]);
        ont_value *inputs[] = {index, limit};
        index = ont_build_done(&b, ont_build_node(&b, ONT_DOMAIN, "InRange", inputs, 2, 1));
    }
    ONT_TRY(b.status);
    ont_value *inputs[] = {gather ? data : ont_node_in(node, 2), index, gather ? NULL : data};
    ont_node *made = ont_build_node(&b, gather && !torch ? "" : ONT_DOMAIN,
                                    !gather ? "GatherGrad" : torch ? "TorchGather" : "Gather", inputs, gather ? 2 : 3,
                                    1);
    if (made) {
        made->name = node->name;
        b.status = ont_attr_set_int(g, made, "axis", axis);
    }
    if (made && !gather && b.status == ONT_OK)
        b.status = ont_attr_set_ints(g, made, "shape", data->shape.dims, (size_t)data->shape.rank);
    ont_value *result = ont_build_done(&b, made);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, node->outputs[0], result);
    return ONT_OK;
}

ont_status ont_pass_row_indices(ont_graph *g)
{
    bool changed = false;
    for (ont_node *node = g->first; node; node = node->next) {
        if (!is_gather(node) && !is_adding_scatter(node)) continue;
        int axis;
        ONT_TRY(ont_shape_axis(ont_attr_int(node, "axis", 0), ont_node_in(node, 0)->shape.rank, &axis));
        ont_value *rows = row_indices(node, axis);
        if (!rows) continue;
        ONT_TRY(replace(g, node, axis, rows));
        changed = true;
    }
    return changed ? ont_pass_dce(g) : ONT_OK;
}
