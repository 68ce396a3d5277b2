/*
 * Promotes dtypes for which a node has no kernel to wider ones: Casts are put around the node, so that its result is
 * rounded (or wrapped) once. 16-bit floats become float32, small integers int32, larger ones int64: integer arithmetic
 * truncated to the narrow type equals arithmetic in the narrow type. A convolution that Winograd's algorithm computes
 * faster in float32 is promoted, too. Runs after all other passes that change dtypes.
 */
#include <string.h>

#include "ops/conv/winograd.h"
#include "passes/pass.h"

typedef struct promotion {
    const char *name;
    ont_dtype to[ONT_DTYPE_COUNT]; /* ONT_UNDEFINED: unchanged */
} promotion;

/* Tried in this order. uint64 is absent because int64 lacks its range; operators have kernels of their own for it. */
static const promotion promotions[] = {
    {"float32", {[ONT_FLOAT16] = ONT_FLOAT32, [ONT_BFLOAT16] = ONT_FLOAT32}},
    {"int32", {[ONT_INT8] = ONT_INT32, [ONT_INT16] = ONT_INT32, [ONT_UINT8] = ONT_INT32, [ONT_UINT16] = ONT_INT32}},
    {"int64", {[ONT_INT8] = ONT_INT64, [ONT_INT16] = ONT_INT64, [ONT_UINT8] = ONT_INT64, [ONT_UINT16] = ONT_INT64,
               [ONT_INT32] = ONT_INT64, [ONT_UINT32] = ONT_INT64}},
    {"float32 and int64", {[ONT_FLOAT16] = ONT_FLOAT32, [ONT_BFLOAT16] = ONT_FLOAT32, [ONT_INT8] = ONT_INT64,
                           [ONT_INT16] = ONT_INT64, [ONT_UINT8] = ONT_INT64, [ONT_UINT16] = ONT_INT64,
                           [ONT_INT32] = ONT_INT64, [ONT_UINT32] = ONT_INT64}},
};

/* A copy of the node with promoted dtypes, which accept() and infer() read. */
typedef struct trial {
    ont_node node;
    ont_use *uses;
    ont_value *values;
    ont_value **outputs;
} trial;

static ont_status make_trial(ont_graph *g, const ont_node *node, trial *t)
{
    uint32_t n = node->n_inputs + node->n_outputs;
    t->uses = ont_arena_array(&g->arena, node->n_inputs + 1, sizeof *t->uses);
    t->values = ont_arena_array(&g->arena, n + 1, sizeof *t->values);
    t->outputs = ont_arena_array(&g->arena, node->n_outputs + 1, sizeof *t->outputs);
    return t->uses && t->values && t->outputs ? ONT_OK : ONT_ENOMEM;
}

/*
 * Whether the node has a kernel with promotion `w` applied to its inputs. Values known at build time are known in the
 * copy too.
 */
static ont_status fits(ont_graph *g, const ont_node *node, const promotion *w, trial *t, bool *result)
{
    bool changes = false;
    t->node = *node;
    t->node.inputs = t->uses;
    t->node.outputs = t->outputs;
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        const ont_value *v = node->inputs[i].value;
        t->uses[i] = (ont_use){.value = v ? &t->values[i] : NULL, .user = &t->node};
        if (!v) continue;
        t->values[i] = *v;
        if (w->to[v->dtype] == ONT_UNDEFINED) continue;
        t->values[i].dtype = w->to[v->dtype];
        changes = true;
    }
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        t->outputs[i] = node->outputs[i] ? &t->values[node->n_inputs + i] : NULL;
        if (t->outputs[i]) *t->outputs[i] = *node->outputs[i];
    }
    ont_status status = changes ? node->op->infer(g, &t->node) : ONT_OK;
    *result = changes && status == ONT_OK && ont_op_has_kernel(&t->node, g->device);
    return status == ONT_ENOMEM ? status : ONT_OK; /* any other error: this promotion does not fit */
}

static ont_status promote_node(ont_graph *g, ont_node *node, const promotion *w, const trial *t)
{
    ont_builder before = {.graph = g, .before = node, .backward = node->backward, .origin = ont_node_origin(node)};
    ont_builder after = {.graph = g, .before = node->next, .backward = node->backward, .origin = ont_node_origin(node)};
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        ont_value *v = node->inputs[i].value;
        if (!v || w->to[v->dtype] == ONT_UNDEFINED) continue;
        ont_value *wide = ont_build_cast(&before, v, w->to[v->dtype]);
        ONT_TRY(before.status);
        ont_node_set_input(node, i, wide);
    }
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        ont_value *out = node->outputs[i];
        if (!out || t->outputs[i]->dtype == out->dtype) continue;
        ont_value *result;
        ont_dtype dtype = out->dtype;
        /*
         * The node gets a new output, and the Cast takes over the old value with its users and its place among the
         * graph outputs.
         */
        ONT_TRY(ont_graph_add_value(g, ONT_VALUE_NODE, NULL, &result));
        result->dtype = t->outputs[i]->dtype;
        result->has_shape = true;
        result->shape = out->shape;
        result->def = node;
        result->def_index = i;
        node->outputs[i] = result;
        const ont_node_spec spec = {.domain = "", .op_type = "Cast", .inputs = &result, .n_inputs = 1, .outputs = &out,
                                    .n_outputs = 1};
        ont_node *cast;
        ONT_TRY(ont_graph_add_node(g, after.before, &spec, &cast));
        cast->op = ont_op_find("", "Cast", INT64_MAX);
        cast->version = cast->op->since;
        cast->backward = node->backward;
        cast->origin = node->origin;
        cast->region = node->region;
        ONT_TRY(ont_attr_set_int(g, cast, "to", dtype));
    }
    return ONT_OK;
}

static bool stays(const ont_graph *g, const ont_node *node)
{
    if (node->op->flags & ONT_OP_VIEW || !node->op->n_kernels) return true;
    return ont_op_has_kernel(node, g->device) && (g->device || !ont_winograd_is_faster_than_bf16(node));
}

ont_status ont_pass_promote(ont_graph *g)
{
    bool changed = false;
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        trial t;
        if (stays(g, node)) continue;
        ONT_TRY(make_trial(g, node, &t));
        bool done = false;
        for (size_t i = 0; i < sizeof promotions / sizeof *promotions && !done; i++) {
            ONT_TRY(fits(g, node, &promotions[i], &t, &done));
            if (done) ONT_TRY(promote_node(g, node, &promotions[i], &t));
        }
        changed |= done;
    }
    return changed ? ont_pass_infer(g) : ONT_OK; /* folds Casts of constants */
}
