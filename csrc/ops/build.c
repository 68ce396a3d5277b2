/*
 * Helpers of the operator contract (op.h): common shape inference, reading constant inputs, building inferred nodes.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "ops/op.h"

/* ---- views ---- */

bool ont_node_is_view(const ont_node *node)
{
    return node && node->op->flags & ONT_OP_VIEW;
}

const ont_value *ont_value_root(const ont_value *v)
{
    while (ont_node_is_view(v->def)) v = v->def->inputs[0].value;
    return v;
}

int64_t ont_last_dim(const ont_value *v)
{
    return v->shape.rank ? v->shape.dims[v->shape.rank - 1] : 0;
}

/* ---- shape inference ---- */

ont_status ont_infer_out(ont_node *node, uint32_t index, ont_dtype dtype, const ont_shape *shape)
{
    ont_value *out = ont_node_out(node, index);
    if (!out) return ONT_OK;
    size_t bytes;
    ONT_TRY(ont_shape_bytes(shape, dtype, &bytes));
    out->dtype = dtype;
    out->has_shape = true;
    out->shape = *shape;
    return ONT_OK;
}

ont_status ont_need_input(const ont_node *node, uint32_t index, ont_value **value)
{
    ont_value *v = ont_node_in(node, index);
    if (!v) return ont_fail(ONT_EINVAL, "input %u is missing", index);
    *value = v;
    return ONT_OK;
}

ont_status ont_infer_same(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    return ont_infer_out(node, 0, x->dtype, &x->shape);
}

ont_status ont_infer_shape_attr(ont_graph *g, ont_node *node)
{
    (void)g;
    size_t n;
    ont_value *x;
    const int64_t *dims = ont_attr_ints(node, "shape", &n);
    ONT_TRY(ont_need_input(node, 0, &x));
    if (n > ONT_MAX_RANK) return ont_fail(ONT_EINVAL, "attribute 'shape' has %zu entries, at most %d", n, ONT_MAX_RANK);
    ont_shape shape = ont_shape_of((int)n, dims);
    return ont_infer_out(node, 0, x->dtype, &shape);
}

static ont_status infer_broadcast_as(ont_node *node, ont_dtype result)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    ont_shape shape = x->shape;
    for (uint32_t i = 1; i < node->n_inputs; i++) {
        ont_value *y;
        ONT_TRY(ont_need_input(node, i, &y));
        if (y->dtype != x->dtype)
            return ont_fail(ONT_ETYPE, "input '%s' is %s and input '%s' is %s", x->name, ont_dtype_name(x->dtype),
                            y->name, ont_dtype_name(y->dtype));
        ONT_TRY(ont_context(ont_shape_broadcast(&shape, &y->shape, &shape), "input '%s'", y->name));
    }
    return ont_infer_out(node, 0, result == ONT_UNDEFINED ? x->dtype : result, &shape);
}

ont_status ont_infer_broadcast(ont_graph *g, ont_node *node)
{
    (void)g;
    return infer_broadcast_as(node, ONT_UNDEFINED);
}

ont_status ont_infer_compare(ont_graph *g, ont_node *node)
{
    (void)g;
    return infer_broadcast_as(node, ONT_BOOL);
}

ont_status ont_need_data(const ont_node *node, uint32_t index, const ont_tensor **data)
{
    ont_value *v = ont_node_in(node, index);
    if (!v) return ont_fail(ONT_EINVAL, "input %u is missing", index);
    if (!v->data) {
        v->value_required = true;
        return ont_fail(ONT_ENEEDVALUE, "input %u ('%s') depends on data: it must be known when the program is built",
                        index, v->name);
    }
    *data = v->data;
    return ONT_OK;
}

static bool tensor_int(const ont_tensor *data, int64_t i, int64_t *value)
{
    if (!ont_dtype_is_int(data->dtype) && data->dtype != ONT_BOOL) return false;
    *value = ont_integer_at(data->data, data->dtype, i);
    return true;
}

ont_status ont_const_ints(const ont_node *node, int index, const char *attr, int64_t *values, int capacity, int *count)
{
    if (index >= 0 && ont_node_in(node, (uint32_t)index)) {
        const ont_tensor *data;
        ONT_TRY(ont_need_data(node, (uint32_t)index, &data));
        int64_t n = ont_shape_count(&data->shape);
        if (n > capacity) return ont_fail(ONT_EINVAL, "input %d ('%s') has %" PRId64 " entries, at most %d fit", index,
                            ont_node_in(node, (uint32_t)index)->name, n, capacity);
        for (int64_t i = 0; i < n; i++)
            if (!tensor_int(data, i, &values[i]))
                return ont_fail(ONT_ETYPE, "input %d ('%s') is %s, integers are expected", index,
                                ont_node_in(node, (uint32_t)index)->name, ont_dtype_name(data->dtype));
        *count = (int)n;
        return ONT_OK;
    }
    const ont_attr *list = attr ? ont_attr_find(node, attr, ONT_ATTR_INTS) : NULL;
    if (!list) {
        *count = -1;
        return ONT_OK;
    }
    if (list->count > (size_t)capacity)
        return ont_fail(ONT_EINVAL, "attribute %s has %zu entries, at most %d fit", attr, list->count, capacity);
    if (list->count) memcpy(values, list->ints, list->count * sizeof *values);
    *count = (int)list->count;
    return ONT_OK;
}

ont_status ont_const_scalar(const ont_node *node, uint32_t index, double *value)
{
    const ont_tensor *data;
    ONT_TRY(ont_need_data(node, index, &data));
    if (ont_shape_count(&data->shape) != 1)
        return ont_fail(ONT_EINVAL, "input %u ('%s') has %" PRId64 " entries, one is expected", index,
                        ont_node_in(node, index)->name, ont_shape_count(&data->shape));
    if (data->dtype == ONT_COMPLEX64 || data->dtype == ONT_COMPLEX128)
        return ont_fail(ONT_ETYPE, "input %u ('%s') is %s, a number is expected", index, ont_node_in(node, index)->name,
                        ont_dtype_name(data->dtype));
    *value = ont_number_at(data->data, data->dtype, 0);
    return ONT_OK;
}

ont_status ont_infer_norm_grad(ont_graph *g, ont_node *node)
{
    (void)g;
    const ont_value *x = ont_node_in(node, 0), *scale = ont_node_in(node, 1);
    ONT_TRY(ont_infer_out(node, 0, x->dtype, &x->shape));
    if (!scale) return ONT_OK;
    ONT_TRY(ont_infer_out(node, 1, scale->dtype, &scale->shape));
    return ont_infer_out(node, 2, scale->dtype, &scale->shape);
}

/* ---- kernels ---- */

const char *ont_accept_any(const ont_node *node)
{
    (void)node;
    return NULL;
}

const char *ont_accept_float(const ont_node *node)
{
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    return dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 ? NULL : "dtype is neither float nor double";
}

/* ---- building nodes ---- */

/* Splits "ours:Name" into domain and name. */
static const char *split_domain(const char *op_type, const char **domain)
{
    *domain = strncmp(op_type, "ours:", 5) ? "" : ONT_DOMAIN;
    return **domain ? op_type + 5 : op_type;
}

ont_node *ont_build_node(ont_builder *b, const char *domain, const char *op_type, ont_value *const *inputs,
                         uint32_t n_inputs, uint32_t n_outputs)
{
    if (b->status != ONT_OK) return NULL;
    const ont_op *op = ont_op_find(domain, op_type, INT64_MAX);
    if (!op) {
        b->status = ont_fail(ONT_EUNSUPPORTED, "operator %s%s%s is not in the table", domain, *domain ? "." : "",
                             op_type);
        return NULL;
    }
    const ont_node_spec spec = {.domain = domain, .op_type = op_type, .inputs = inputs, .n_inputs = n_inputs,
                                .n_outputs = n_outputs};
    ont_node *node;
    b->status = ont_graph_add_node(b->graph, b->before, &spec, &node);
    if (b->status != ONT_OK) return NULL;
    node->op = op;
    node->version = op->since;
    node->backward = b->backward;
    node->origin = b->origin;
    if (b->scope && !(node->name = ont_arena_format(&b->graph->arena, "%s/%s", b->scope, node->name))) {
        b->status = ONT_ENOMEM;
        return NULL;
    }
    return node;
}

ont_value *ont_build_done(ont_builder *b, ont_node *node)
{
    if (b->status != ONT_OK || !node) return NULL;
    if (b->deferred) return node->outputs[0];
    if (node->op->infer)
        b->status = ont_context(node->op->infer(b->graph, node), "%s '%s'", node->op_type, node->name);
    ont_node *first;
    if (b->status == ONT_OK && !node->op->infer) b->status = ont_op_expand(b->graph, node, &first);
    if (b->status == ONT_OK && node->outputs[0] && !node->outputs[0]->has_shape)
        b->status = ont_fail(ONT_EUNSUPPORTED, "%s: its size depends on data", node->op_type);
    return b->status == ONT_OK ? node->outputs[0] : NULL;
}

static ont_value *build(ont_builder *b, const char *op_type, ont_value *const *inputs, uint32_t n)
{
    const char *domain;
    op_type = split_domain(op_type, &domain);
    for (uint32_t i = 0; i < n && b->status == ONT_OK; i++)
        if (!inputs[i]) b->status = ont_fail(ONT_EINTERNAL, "building %s: operand %u is missing", op_type, i);
    return ont_build_done(b, ont_build_node(b, domain, op_type, inputs, n, 1));
}

ont_value *ont_build1(ont_builder *b, const char *op_type, ont_value *x)
{
    return build(b, op_type, (ont_value *[]){x}, 1);
}

ont_value *ont_build2(ont_builder *b, const char *op_type, ont_value *x, ont_value *y)
{
    return build(b, op_type, (ont_value *[]){x, y}, 2);
}

ont_value *ont_build3(ont_builder *b, const char *op_type, ont_value *x, ont_value *y, ont_value *z)
{
    return build(b, op_type, (ont_value *[]){x, y, z}, 3);
}

/* A node with operand `x`, attributes still to be set; NULL if the builder has failed. */
static ont_node *begin_unary(ont_builder *b, const char *op_type, ont_value *x)
{
    const char *domain;
    op_type = split_domain(op_type, &domain);
    if (b->status == ONT_OK && !x) b->status = ont_fail(ONT_EINTERNAL, "building %s: operand is missing", op_type);
    return ont_build_node(b, domain, op_type, &x, 1, 1);
}

static ont_value *build_ints(ont_builder *b, const char *op_type, ont_value *x, const char *attr, const int64_t *values,
                             size_t count)
{
    ont_node *node = begin_unary(b, op_type, x);
    if (node) b->status = ont_attr_set_ints(b->graph, node, attr, values, count);
    return ont_build_done(b, node);
}

static ont_value *constant(ont_builder *b, const ont_tensor *data)
{
    ont_value *v = NULL;
    if (b->status == ONT_OK) b->status = ont_graph_add_constant(b->graph, NULL, data, &v);
    return b->status == ONT_OK ? v : NULL;
}

ont_value *ont_build_const_ints(ont_builder *b, const int64_t *values, size_t count)
{
    ont_shape shape = ont_shape_of(1, (int64_t[]){(int64_t)count});
    return constant(b, &(ont_tensor){ONT_INT64, shape, count * sizeof *values, (void *)values});
}

ont_value *ont_build_scalar(ont_builder *b, ont_dtype dtype, double value)
{
    uint64_t bits = 0;
    if (!ont_dtype_size(dtype) || ont_dtype_size(dtype) > sizeof bits || dtype == ONT_COMPLEX64) {
        if (b->status == ONT_OK)
            b->status = ont_fail(ONT_EUNSUPPORTED, "a scalar constant of dtype %s", ont_dtype_name(dtype));
        return NULL;
    }
    ont_number_put(&bits, dtype, 0, value);
    return constant(b, &(ont_tensor){dtype, {0}, ont_dtype_size(dtype), &bits});
}

ont_value *ont_build_full(ont_builder *b, ont_dtype dtype, const ont_shape *shape, double value)
{
    ont_value *scalar = ont_build_scalar(b, dtype, value);
    if (!shape->rank) return scalar;
    return ont_build2(b, "Expand", scalar, ont_build_const_ints(b, shape->dims, (size_t)shape->rank));
}

ont_value *ont_build_cast(ont_builder *b, ont_value *x, ont_dtype to)
{
    if (x && x->dtype == to) return x;
    ont_node *node = begin_unary(b, "Cast", x);
    if (node) b->status = ont_attr_set_int(b->graph, node, "to", to);
    return ont_build_done(b, node);
}

ont_value *ont_build_reshape(ont_builder *b, ont_value *x, const ont_shape *shape)
{
    if (x && ont_shape_equal(&x->shape, shape)) return x;
    ont_value *inputs[] = {x, ont_build_const_ints(b, shape->dims, (size_t)shape->rank)};
    if (b->status != ONT_OK || !x) return NULL;
    ont_node *node = ont_build_node(b, "", "Reshape", inputs, 2, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "allowzero", 1); /* a dim of 0 means 0 */
    return ont_build_done(b, node);
}

ont_value *ont_build_transpose(ont_builder *b, ont_value *x, const int64_t *perm)
{
    return build_ints(b, "Transpose", x, "perm", perm, x ? (size_t)x->shape.rank : 0);
}

ont_value *ont_build_sum_to(ont_builder *b, ont_value *x, const ont_shape *shape)
{
    if (x && ont_shape_equal(&x->shape, shape)) return x;
    return build_ints(b, "ours:SumTo", x, "shape", shape->dims, (size_t)shape->rank);
}

ont_value *ont_build_reduce(ont_builder *b, const char *op_type, ont_value *x, const int64_t *axes, size_t n_axes,
                            bool keepdims)
{
    ont_value *inputs[] = {x, ont_build_const_ints(b, axes, n_axes)};
    if (b->status != ONT_OK || !x) return NULL;
    ont_node *node = ont_build_node(b, "", op_type, inputs, 2, 1);
    if (node) b->status = ont_attr_set_int(b->graph, node, "keepdims", keepdims);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, "noop_with_empty_axes", 1);
    return ont_build_done(b, node);
}

/* ---- expansion ---- */

bool ont_op_expands(const ont_graph *g, const ont_node *node)
{
    const ont_op *op = node->op;
    const ont_kernel *kernel;
    uint32_t n_kernels;
    if (!op->expand) return false;
    ont_op_kernels(op, g->device, &n_kernels);
    if (!op->infer || !n_kernels || !(op->grad || op->flags & ONT_OP_NO_GRAD)) return true;
    return ont_op_choose(node, g->device, false, &kernel) != ONT_OK;
}

/* Users of output i read `result` instead, whose type must match what infer() set. */
static ont_status replace_output(ont_graph *g, ont_node *node, uint32_t i, ont_value *result)
{
    ont_value *out = node->outputs[i];
    if (!out) return ONT_OK;
    if (!result) return ont_fail(ONT_EINVAL, "the operator has no output %u", i);
    if (out->has_shape && node->op->infer &&
        (out->dtype != result->dtype || !ont_shape_equal(&out->shape, &result->shape))) {
        char declared[ONT_SHAPE_TEXT], built[ONT_SHAPE_TEXT];
        return ont_fail(ONT_EINTERNAL, "output %u is %s%s, its expansion %s%s", i, ont_dtype_name(out->dtype),
                        ont_shape_text(&out->shape, declared), ont_dtype_name(result->dtype),
                        ont_shape_text(&result->shape, built));
    }
    if (out != result) ont_value_replace_uses(g, out, result);
    node->outputs[i] = result;
    return ONT_OK;
}

ont_status ont_op_expand(ont_graph *g, ont_node *node, ont_node **first)
{
    ont_builder b = {.graph = g, .before = node, .backward = node->backward, .origin = ont_node_origin(node),
                     .scope = node->name, .status = ONT_OK};
    ont_node *previous = node->prev;
    ont_value **results = ont_arena_array(&g->arena, node->n_outputs + ONT_EXPAND_SPARE, sizeof *results);
    if (!results) return ONT_ENOMEM;
    node->op->expand(&b, node, results);
    for (uint32_t i = 0; i < node->n_outputs && b.status == ONT_OK; i++)
        b.status = replace_output(g, node, i, results[i]);
    ONT_TRY(ont_context(b.status, "%s '%s'", node->op_type, node->name));
    ont_graph_remove_node(g, node);
    *first = previous ? previous->next : g->first;
    return ONT_OK;
}

/* ---- gradient rules ---- */

ont_value *ont_grad_out(ont_grad *g, uint32_t index)
{
    ont_value *out = ont_node_out(g->node, index);
    if (index < g->node->n_outputs && g->out_grads[index]) return g->out_grads[index];
    if (!out) {
        if (g->b.status == ONT_OK)
            g->b.status = ont_fail(ONT_EINTERNAL, "gradient of output %u, which is absent", index);
        return NULL;
    }
    return g->out_grads[index] = ont_build_full(&g->b, out->dtype, &out->shape, 0.0);
}

void ont_grad_set(ont_grad *g, uint32_t index, ont_value *value)
{
    if (g->b.status == ONT_OK && WANTS(index)) g->in_grads[index] = value;
}

void ont_grad_refuse(ont_grad *g, const char *reason)
{
    if (g->b.status == ONT_OK) g->b.status = ont_fail(ONT_EUNSUPPORTED, "no gradient: %s", reason);
}
