/*
 * Convolutions that the device takes so, and the nodes between them, on images in channels last: (batch, height, width,
 * channels), or (batch, length, channels) of signals, which are called images here too. Tensor cores multiply channels,
 * so cuDNN transposes images of any other order before and behind a convolution. For devices, after differentiation, so
 * that the gradients have the same order.
 *
 * A value in channels last is a value with permuted dims, so every kernel sees a dense tensor. Nodes for which the
 * order of dims has a meaning learn it from their attributes: axes, shapes, and "channels_last" of convolutions,
 * pooling and normalization. Models cannot have that attribute, as no operator declares it. Shape inference does not
 * know it: no pass behind this one may infer the nodes again.
 *
 * Where only a Relu reads the result of a convolution that will be in channels last, and the device takes both as one,
 * a pass of its own removes the Relu and gives the convolution the attribute "relu". The Relu's gradient reads its
 * result, not its operand. Promotion puts Casts around a Relu in 16 bits, which are removed too: a Relu rounds nothing.
 * That pass runs before rematerialization, which would have backward read the convolution's result instead.
 *
 * Values whose order is the same, because one node reads or writes them all, form a group. A group with a convolution
 * that the device takes in channels last becomes channels last; Transposes stand where a value enters or leaves it,
 * unless the model has the same one there.
 */
#include <string.h>

#include "base/assert.h"
#include "passes/pass.h"

typedef enum role { OTHER, CONVOLUTION, NORM, POOL, ELEMENTWISE, REDUCTION, SHAPED, EXPANSION, ALONG_AXIS, SLICE } role;

/* The ranks of images, and the axis of channels in the order of the model. */
enum { SIGNAL = 3, PLANE = 4, CHANNELS = 1 };
static const int64_t to_last[][PLANE] = {[SIGNAL] = {0, 2, 1}, [PLANE] = {0, 2, 3, 1}}; /* by rank */
static const int64_t to_first[][PLANE] = {[SIGNAL] = {0, 2, 1}, [PLANE] = {0, 3, 1, 2}};
static const char attribute[] = "channels_last", relu_attribute[] = "relu";

typedef struct state {
    ont_graph *g;
    uint32_t n, n_nodes; /* values and nodes of the graph before the pass */
    uint32_t *parent;    /* by value: another one of its group, or itself */
    bool *has_conv;      /* by the first value of a group */
    role *roles;         /* by node */
    ont_value **moved;   /* by value: the same in channels last, or NULL */
} state;

static bool is_image(const ont_value *v)
{
    return v && v->has_shape && (v->shape.rank == SIGNAL || v->shape.rank == PLANE);
}

static bool is_image_of(const ont_value *v, int rank)
{
    return is_image(v) && v->shape.rank == rank;
}

/* Of an image. */
static ont_shape in_channels_last(const ont_shape *shape)
{
    ont_shape result = *shape;
    for (int d = 0; d < shape->rank; d++) result.dims[d] = shape->dims[to_last[shape->rank][d]];
    return result;
}

/* Of the images of a node that has a role. */
static int rank_of(const ont_node *node)
{
    return node->outputs[0] && is_image(node->outputs[0]) ? node->outputs[0]->shape.rank
                                                          : ont_node_in(node, 0)->shape.rank;
}

/* ---- groups ---- */

/* A copy of a node whose images are in channels last, with a Relu or without, which a kernel may accept. */
static bool has_kernel_in_channels_last(const ont_graph *g, const ont_node *node, bool relu)
{
    enum { MOST = 4 };
    ont_value values[MOST];
    ont_use uses[MOST];
    ont_value *outputs[1];
    ont_attr last = {.next = node->attrs, .name = attribute, .kind = ONT_ATTR_INT, .count = 1, .i = 1};
    ont_attr with_relu = {.next = &last, .name = relu_attribute, .kind = ONT_ATTR_INT, .count = 1, .i = relu};
    ont_node copy = *node;
    uint32_t n = 0;
    if (node->n_inputs >= MOST || node->n_outputs != 1) return false;
    for (uint32_t i = 0; i <= node->n_inputs; i++) {
        const ont_value *v = i < node->n_inputs ? node->inputs[i].value : node->outputs[0];
        if (i < node->n_inputs) uses[i] = (ont_use){.value = v ? &values[n] : NULL, .user = &copy};
        else outputs[0] = &values[n];
        if (!v) continue;
        values[n] = *v;
        if (is_image(v)) values[n].shape = in_channels_last(&v->shape);
        n++;
    }
    copy.inputs = uses;
    copy.outputs = outputs;
    copy.attrs = &with_relu;
    return ont_op_has_kernel(&copy, g->device);
}

static bool is_conv(const ont_node *node)
{
    return ONT_IS(node, Conv) || ONT_IS(node, ConvGradInput) || ONT_IS(node, ConvGradWeight);
}

static bool is_pool(const ont_node *node)
{
    return ((ONT_IS(node, MaxPool) || ONT_IS(node, GlobalMaxPool)) && !ont_node_out(node, 1)) ||
           ONT_IS(node, MaxPoolGrad) || ONT_IS(node, GlobalMaxPoolGrad) || ONT_IS(node, AveragePool) ||
           ONT_IS(node, AveragePoolGrad) || ONT_IS(node, GlobalAveragePool) || ONT_IS(node, GlobalAveragePoolGrad) ||
           ONT_IS(node, AdaptiveAveragePool) || ONT_IS(node, AdaptiveAveragePoolGrad);
}

/* A single element has no order. */
static bool is_image_or_number(const ont_value *v, int rank)
{
    return is_image_of(v, rank) || ont_shape_count(&v->shape) == 1;
}

/* Dropout draws a number for each element in the order of memory, which is that of the model in eager. */
static bool is_elementwise(const ont_node *node)
{
    if (!node->op->tile && !ONT_IS(node, Clip) && !ONT_IS(node, HardTanh) && !ONT_IS(node, Pow)) return false;
    if (node->op->flags & ONT_OP_RANDOM || ONT_IS(node, Dropout) || ONT_IS(node, DropoutGrad)) return false;
    if (node->n_outputs != 1 || !is_image(node->outputs[0])) return false;
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (ont_node_in(node, i) && !is_image_or_number(ont_node_in(node, i), node->outputs[0]->shape.rank))
            return false;
    return true;
}

/* The known axes of a node, by an input or by an attribute. */
static bool read_axes(const ont_node *node, uint32_t input, int64_t axes[PLANE], int *n)
{
    int from = node->n_inputs > input ? (int)input : -1, rank = ont_node_in(node, 0)->shape.rank;
    if (ont_const_ints(node, from, "axes", axes, rank, n) != ONT_OK || *n < 1) return false;
    for (int i = 0; i < *n; i++) {
        if (axes[i] < 0) axes[i] += rank;
        if (axes[i] < 0 || axes[i] >= rank) return false;
    }
    return true;
}

static uint32_t axes_input(const ont_node *node)
{
    return ONT_IS(node, Slice) ? 3 : 1;
}

/* Whether a reduction covers all spatial dims: its result is then the same in both layouts. */
static bool reduces_planes(const ont_node *node)
{
    int64_t axes[PLANE];
    int n;
    bool is_reduced[PLANE] = {false};
    if (!read_axes(node, axes_input(node), axes, &n)) return false;
    for (int i = 0; i < n; i++) is_reduced[axes[i]] = true;
    return is_reduced[2] && (is_reduced[3] || ont_node_in(node, 0)->shape.rank == SIGNAL);
}

static bool is_along_channels(const ont_node *node)
{
    int64_t axis = ont_attr_int(node, "axis", 0);
    return (ONT_IS(node, Concat) || ONT_IS(node, Split)) &&
           (axis == CHANNELS || axis == CHANNELS - ont_node_in(node, 0)->shape.rank);
}

static role role_of(const ont_graph *g, const ont_node *node)
{
    int64_t axes[PLANE];
    int n;
    const ont_value *x = ont_node_in(node, 0), *y = node->outputs[0];
    if (is_elementwise(node)) return ELEMENTWISE;
    if (ONT_IS(node, Expand)) return is_image(y) && is_image_or_number(x, y->shape.rank) ? EXPANSION : OTHER;
    if (!is_image(x)) return OTHER;
    if (is_conv(node)) return has_kernel_in_channels_last(g, node, false) ? CONVOLUTION : OTHER;
    if (ONT_IS(node, BatchNormalization) || ONT_IS(node, FusedBatchNorm) || ONT_IS(node, BatchNormGrad)) return NORM;
    if (is_pool(node)) return POOL;
    if (ONT_IS(node, ReduceSum) || ONT_IS(node, ReduceMean) || ONT_IS(node, ReduceMax))
        return reduces_planes(node) ? REDUCTION : OTHER;
    if (ONT_IS(node, Slice)) return read_axes(node, axes_input(node), axes, &n) ? SLICE : OTHER;
    if (ONT_IS(node, SumTo) || ONT_IS(node, PutSlice)) return is_image_of(y, x->shape.rank) ? SHAPED : OTHER;
    return is_along_channels(node) ? ALONG_AXIS : OTHER;
}

/* A weight has an order of its own, which the convolution alone determines. */
static bool is_weight(const ont_node *node, bool is_input, uint32_t index)
{
    if (!is_conv(node)) return false;
    return is_input ? index == 1 && !ONT_IS(node, ConvGradWeight) : ONT_IS(node, ConvGradWeight);
}

static uint32_t group_of(state *s, uint32_t id)
{
    while (s->parent[id] != id) id = s->parent[id] = s->parent[s->parent[id]];
    return id;
}

/* The images of a node, in turn: its inputs, then its outputs; NULL behind the last one. */
static ont_value *next_image(const ont_node *node, uint32_t *at)
{
    while (*at < node->n_inputs + node->n_outputs) {
        uint32_t i = (*at)++;
        bool is_input = i < node->n_inputs;
        if (!is_input) i -= node->n_inputs;
        ont_value *v = is_input ? ont_node_in(node, i) : ont_node_out(node, i);
        if (is_image(v) && !is_weight(node, is_input, i)) return v;
    }
    return NULL;
}

static void join_images(state *s, const ont_node *node)
{
    uint32_t at = 0;
    const ont_value *first = next_image(node, &at);
    bool has_conv = s->roles[node->id] == CONVOLUTION;
    for (const ont_value *v = first; v; v = next_image(node, &at)) {
        uint32_t a = group_of(s, first->id), b = group_of(s, v->id);
        s->parent[b] = a;
        s->has_conv[a] |= s->has_conv[b] || has_conv;
    }
}

/* ---- rewriting ---- */

/* Whether the permutation leaves the elements where they are. */
static bool is_view(const ont_shape *image_in_model_order)
{
    return image_in_model_order->dims[CHANNELS] == 1 ||
           ont_shape_count_range(image_in_model_order, 2, image_in_model_order->rank) == 1;
}

static ont_status move_input(state *s, ont_node *node, uint32_t index)
{
    ont_value *v = ont_node_in(node, index);
    ONT_ASSERT(v->id < s->n);
    const ont_value *known = s->moved[v->id];
    bool is_late = known && known->def && known->def->backward && !node->backward;
    if (!known || is_late) { /* in front of the first node that needs it */
        ont_builder b = {.graph = s->g, .before = node, .backward = node->backward, .origin = ont_node_origin(node)};
        ont_shape shape = in_channels_last(&v->shape);
        ont_value *moved = is_view(&v->shape) ? ont_build_reshape(&b, v, &shape)
                                              : ont_build_transpose(&b, v, to_last[v->shape.rank]);
        ONT_TRY(b.status);
        s->moved[v->id] = moved;
    }
    ont_node_set_input(node, index, s->moved[v->id]);
    return ONT_OK;
}

/* The node gets a new output. A Transpose takes over the old value with its users; where they move too, it is dead. */
static ont_status move_output(state *s, ont_node *node, uint32_t index)
{
    ont_value *old = node->outputs[index], *moved;
    bool views = is_view(&old->shape);
    ont_builder b = {.graph = s->g, .before = node->next, .backward = node->backward,
                     .origin = ont_node_origin(node)};
    ONT_TRY(ont_graph_add_value(s->g, ONT_VALUE_NODE, NULL, &moved));
    moved->dtype = old->dtype;
    moved->has_shape = true;
    moved->shape = in_channels_last(&old->shape);
    moved->def = node;
    moved->def_index = index;
    node->outputs[index] = moved;
    s->moved[old->id] = moved;
    ont_value *inputs[] = {moved, views ? ont_build_const_ints(&b, old->shape.dims, (size_t)old->shape.rank) : NULL};
    ONT_TRY(b.status);
    const ont_node_spec spec = {.domain = "", .op_type = views ? "Reshape" : "Transpose", .inputs = inputs,
                                .n_inputs = 2, .outputs = &old, .n_outputs = 1};
    ont_node *back;
    ONT_TRY(ont_graph_add_node(s->g, b.before, &spec, &back));
    back->op = ont_op_find("", spec.op_type, INT64_MAX);
    back->version = back->op->since;
    back->backward = node->backward;
    back->origin = b.origin;
    back->region = node->region;
    return views ? ont_attr_set_int(s->g, back, "allowzero", 1)
                 : ont_attr_set_ints(s->g, back, "perm", to_first[old->shape.rank], (size_t)old->shape.rank);
}

static ont_status set_constant(state *s, ont_node *node, uint32_t input, const int64_t *values, size_t n)
{
    ont_builder b = {.graph = s->g, .before = node, .backward = node->backward, .origin = ont_node_origin(node)};
    ont_value *constant = ont_build_const_ints(&b, values, n);
    ONT_TRY(b.status);
    ont_node_set_input(node, input, constant);
    return ONT_OK;
}

static ont_status move_axes(state *s, ont_node *node)
{
    int64_t axes[PLANE];
    uint32_t input = axes_input(node);
    int n;
    if (!read_axes(node, input, axes, &n)) return ont_fail(ONT_EINTERNAL, "'%s': axes", node->name);
    for (int i = 0; i < n; i++) axes[i] = to_first[rank_of(node)][axes[i]]; /* where a dim of the model is */
    return node->n_inputs > input ? set_constant(s, node, input, axes, (size_t)n)
                                  : ont_attr_set_ints(s->g, node, "axes", axes, (size_t)n);
}

/* Attributes with an entry for each dim. */
static ont_status move_dims(state *s, ont_node *node)
{
    static const char *const names[] = {"shape", "start", "step"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t n;
        const int64_t *dims = ont_attr_ints(node, names[i], &n);
        ont_shape shape = {.rank = rank_of(node)};
        if (!dims || n != (size_t)shape.rank) continue;
        memcpy(shape.dims, dims, sizeof *dims * n);
        shape = in_channels_last(&shape);
        ONT_TRY(ont_attr_set_ints(s->g, node, names[i], shape.dims, n));
    }
    return ONT_OK;
}

static ont_status move_attributes(state *s, ont_node *node)
{
    switch (s->roles[node->id]) {
    case ELEMENTWISE: return ONT_OK;
    case REDUCTION:
    case SLICE: return move_axes(s, node);
    case SHAPED: return move_dims(s, node);
    case ALONG_AXIS: return ont_attr_set_int(s->g, node, "axis", rank_of(node) - 1);
    case EXPANSION: {
        ont_shape shape = in_channels_last(&node->outputs[0]->shape);
        return set_constant(s, node, 1, shape.dims, (size_t)shape.rank);
    }
    default: ONT_TRY(move_dims(s, node)); return ont_attr_set_int(s->g, node, attribute, 1);
    }
}

static ont_status move_node(state *s, ont_node *node)
{
    ONT_TRY(move_attributes(s, node));
    for (uint32_t i = 0; i < node->n_inputs; i++)
        if (is_image(ont_node_in(node, i))) ONT_TRY(move_input(s, node, i));
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (is_image(ont_node_out(node, i))) ONT_TRY(move_output(s, node, i));
    return ONT_OK;
}

static bool moves(state *s, const ont_node *node)
{
    uint32_t at = 0;
    const ont_value *v = s->roles[node->id] ? next_image(node, &at) : NULL;
    while (v && v->id >= s->n) v = next_image(node, &at); /* join_transpose() has put it here: no value of a group */
    return v && s->has_conv[group_of(s, v->id)];
}

static bool is_transpose_by(const ont_node *node, const int64_t perms[][PLANE])
{
    size_t n;
    const ont_value *x = ont_node_in(node, 0);
    const int64_t *perm = is_image(x) ? ont_attr_ints(node, "perm", &n) : NULL;
    return perm && n == (size_t)x->shape.rank && !memcmp(perm, perms[n], n * sizeof *perm);
}

/* Whether a node will move v, as an image whose dims mean something else there, or as a weight. */
static bool is_moved_later(state *s, const ont_value *v)
{
    for (const ont_use *use = v->uses; use; use = use->next)
        if (use->user->id < s->n_nodes && moves(s, use->user)) return true;
    return false;
}

/* Uses the model's own transposes to or from channels last in place of new ones. */
static void join_transpose(state *s, ont_node *node)
{
    ont_value *x = ont_node_in(node, 0), *y = node->outputs[0];
    if (is_transpose_by(node, to_first) && s->has_conv[group_of(s, y->id)]) s->moved[y->id] = x;
    ont_value *moved = x->id < s->n && is_transpose_by(node, to_last) ? s->moved[x->id] : NULL;
    bool is_late = moved && moved->def && moved->def->backward && !node->backward;
    if (moved && !is_late && !is_moved_later(s, y) && !ont_value_is_output(s->g, y))
        ont_value_replace_uses(s->g, y, moved);
}

ont_status ont_pass_channels_last(ont_graph *g)
{
    state s = {.g = g, .n = g->n_values, .n_nodes = g->n_nodes};
    bool has_conv = false;
    if (!g->device) return ONT_OK; /* the attribute means nothing to the kernels of the CPU */
    s.parent = ont_arena_array(&g->arena, s.n + 1, sizeof *s.parent);
    s.has_conv = ont_arena_array(&g->arena, s.n + 1, sizeof *s.has_conv);
    s.moved = ont_arena_array(&g->arena, s.n + 1, sizeof *s.moved);
    s.roles = ont_arena_array(&g->arena, g->n_nodes + 1, sizeof *s.roles);
    if (!s.parent || !s.has_conv || !s.moved || !s.roles) return ONT_ENOMEM;
    for (uint32_t i = 0; i < s.n; i++) s.parent[i] = i;
    for (const ont_node *node = g->first; node; node = node->next) {
        s.roles[node->id] = role_of(g, node);
        has_conv |= s.roles[node->id] == CONVOLUTION;
        if (s.roles[node->id]) join_images(&s, node);
    }
    if (!has_conv) return ONT_OK;
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        if (moves(&s, node)) ONT_TRY(move_node(&s, node));
        else if (ONT_IS(node, Transpose)) join_transpose(&s, node);
    }
    return ont_pass_dce(g);
}

/* Whether the node casts without rounding. */
static bool is_widening(const ont_node *node)
{
    const ont_value *from = ont_node_in(node, 0), *to = node->outputs[0];
    return ONT_IS(node, Cast) && ont_dtype_is_float(to->dtype) &&
           ont_dtype_size(to->dtype) > ont_dtype_size(from->dtype);
}

static ont_status fuse_relu(ont_graph *g, ont_node *conv)
{
    ont_value *y = conv->outputs[0];
    ont_node *first = ont_single_user_in_phase(g, y), *relu = first;
    if (first && is_widening(first)) relu = ont_single_user_in_phase(g, first->outputs[0]);
    if (!ONT_IS(relu, Relu)) return ONT_OK;
    ont_node *last = relu == first ? relu : ont_single_user_in_phase(g, relu->outputs[0]);
    if (!last || last->outputs[0]->dtype != y->dtype || (last != relu && !ONT_IS(last, Cast))) return ONT_OK;
    if (!has_kernel_in_channels_last(g, conv, true)) return ONT_OK;
    ONT_TRY(ont_attr_set_int(g, conv, relu_attribute, 1));
    ont_value_replace_uses(g, last->outputs[0], y);
    if (last != relu) ont_graph_remove_node(g, last);
    ont_graph_remove_node(g, relu);
    if (first != relu) ont_graph_remove_node(g, first);
    return ONT_OK;
}

ont_status ont_pass_fuse_conv_relu(ont_graph *g)
{
    if (!g->device) return ONT_OK;
    for (ont_node *node = g->first; node; node = node->next)
        if (ONT_IS(node, Conv) && is_image(ont_node_in(node, 0))) ONT_TRY(fuse_relu(g, node));
    return ONT_OK;
}
