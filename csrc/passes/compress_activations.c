/*
 * Stores what backward reads of forward in fewer bytes: as bfloat16 by Cast, or as int8 by QuantizeActivation
 * (ops/quant/activation.c), behind its last reader in forward; and back to float32 in front of its first reader in
 * backward. The session asks for it (graph->kept); gradients then are approximations, outputs are not.
 *
 * A value qualifies if
 *   - it is float32, of at least MIN_ELEMENTS, and no result of the graph shares its memory;
 *   - it is an activation: statistics of a norm or of attention stay, as do gradients that forward computes;
 *   - every reader in backward is smooth in it: products, attention, gradients of norms and of softmax, and groups of
 *     elementwise nodes that lead it through loops of bounded slope only. A divisor stays, and what is compared;
 *     ReLU's gradient reads a sign, which only the stored value itself has kept.
 *
 * Runs last, so that it sees the values that are really kept.
 * Source: Chen et al., ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training, 2021.
 */
#include "base/alloc.h"
#include "ops/elementwise/tile_program.h"
#include "passes/pass.h"
#include "passes/recompute.h"

enum { MIN_ELEMENTS = 1 << 14 };

/* Whether a change of the operand changes the result by no more than a bounded multiple of it. */
static bool has_bounded_slope(ont_loop loop)
{
    switch (loop) {
    case ONT_LOOP_Relu:
    case ONT_LOOP_Neg:
    case ONT_LOOP_Abs:
    case ONT_LOOP_Erf:
    case ONT_LOOP_Tanh:
    case ONT_LOOP_Sigmoid:
    case ONT_LOOP_LeakyRelu:
    case ONT_LOOP_Elu:
    case ONT_LOOP_Selu:
    case ONT_LOOP_Softplus:
    case ONT_LOOP_Softsign:
    case ONT_LOOP_HardSigmoid:
    case ONT_LOOP_HardSwish:
    case ONT_LOOP_Mish:
    case ONT_LOOP_Swish:
    case ONT_LOOP_GeluErf:
    case ONT_LOOP_GeluTanh:
    case ONT_LOOP_Sin:
    case ONT_LOOP_Cos:
    case ONT_LOOP_SigmoidGrad:
    case ONT_LOOP_TanhGrad:
    case ONT_LOOP_ErfGrad:
    case ONT_LOOP_GeluErfGrad:
    case ONT_LOOP_GeluTanhGrad:
    case ONT_LOOP_EluGrad:
    case ONT_LOOP_SoftplusGrad:
    case ONT_LOOP_Add:
    case ONT_LOOP_Sub:
    case ONT_LOOP_Mul: return true;
    default: return false;
    }
}

/* Whether the slope that the second operand is multiplied by follows from the sign of the first one. */
static bool reads_sign(ont_loop loop)
{
    return loop == ONT_LOOP_ReluGrad || loop == ONT_LOOP_LeakyReluGrad || loop == ONT_LOOP_SeluGrad ||
           loop == ONT_LOOP_AbsGrad;
}

/* Of an operand of a step: a stored value, which has kept its sign, or what was computed from one, which may not. */
static bool is_smooth_step(const ont_tile_step *s, int operand, bool stored)
{
    switch (s->kind) {
    case ONT_TILE_UNARY: return has_bounded_slope(s->loop);
    case ONT_TILE_BINARY:
        if (reads_sign(s->loop)) return operand == 1 || stored;
        return has_bounded_slope(s->loop) || (s->loop == ONT_LOOP_Div && operand == 0);
    case ONT_TILE_DROPOUT: return true;
    case ONT_TILE_CAST: return ont_dtype_is_float(s->out);
    default: return s->kind == ONT_TILE_WHERE && operand > 0;
    }
}

/* Whether every step that an operand reaches is smooth in it. */
static bool is_smooth_program(const ont_tile_program *p, uint32_t operand)
{
    bool reached[ONT_TILE_OPERANDS + ONT_TILE_STEPS] = {false};
    reached[operand] = true;
    for (int j = 0; j < p->n_steps; j++)
        for (int i = 0; i < p->steps[j].n_operands; i++) {
            if (!reached[p->steps[j].operand[i]]) continue;
            if (!is_smooth_step(&p->steps[j], i, p->steps[j].operand[i] < p->n_operands)) return false;
            reached[p->n_operands + j] = true;
        }
    return true;
}

static bool is_smooth_in(const ont_node *node, uint32_t input)
{
    ont_tile_program p;
    ont_tile_step step = {0};
    if (node->op->flags & ONT_OP_SMOOTH || node->op->cost == ONT_COST_MATMUL || node->op->cost == ONT_COST_CONV ||
        node->op->cost == ONT_COST_ATTENTION)
        return true;
    if (ONT_IS(node, FusedElementwise) || ONT_IS(node, FusedReduce))
        return ont_tile_read(node, &p) == ONT_OK && is_smooth_program(&p, input);
    return node->op->tile && node->op->tile(node, &step) && is_smooth_step(&step, (int)input, true);
}

typedef struct kept_value {
    ont_node *last_forward, *first_backward; /* readers */
    bool smooth;
} kept_value;

/* Readers of a value, and of the views of it. `order`: position by node id. */
static void find_readers(const ont_value *v, const uint32_t *order, kept_value *k)
{
    for (const ont_use *use = v->uses; use; use = use->next) {
        ont_node *user = use->user;
        bool view = ont_node_is_view(user) && use == &user->inputs[0];
        if (view) find_readers(user->outputs[0], order, k);
        if (user->backward && (!k->first_backward || order[user->id] < order[k->first_backward->id]))
            k->first_backward = user;
        if (!user->backward && (!k->last_forward || order[user->id] > order[k->last_forward->id]))
            k->last_forward = user;
        if (user->backward && !view) k->smooth &= is_smooth_in(user, (uint32_t)(use - user->inputs));
    }
}

static bool is_activation(const ont_value *v)
{
    const ont_op *op = v->def->op;
    bool statistic = v->def_index && !ONT_IS(v->def, FusedElementwise) && op->rows != ONT_ROWS_SPLIT;
    return !statistic && !ont_is_early_gradient(v);
}

/* Lets readers in backward read `to`, of the same shape, in place of `from`. */
static ont_status read_instead(ont_graph *g, const ont_value *from, ont_value *to)
{
    for (ont_use *use = from->uses, *next; use; use = next) {
        ont_node *user = use->user;
        next = use->next;
        if (user->backward) {
            ont_node_set_input(user, (uint32_t)(use - user->inputs), to);
        } else if (ont_node_is_view(user) && use == &user->inputs[0]) {
            ont_value **inputs = ont_arena_array(&g->arena, user->n_inputs, sizeof *inputs);
            ont_node *view;
            if (!inputs) return ONT_ENOMEM;
            for (uint32_t i = 0; i < user->n_inputs; i++) inputs[i] = i ? user->inputs[i].value : to;
            ONT_TRY(ont_recompute_copy(g, user, to->def->next, inputs, UINT32_MAX, &view));
            ONT_TRY(read_instead(g, user->outputs[0], view->outputs[0]));
            if (!view->outputs[0]->uses) ont_graph_remove_node(g, view);
        }
    }
    return ONT_OK;
}

/* The compressed value: of Cast, or the two of QuantizeActivation. */
static ont_status compress(ont_graph *g, ont_value *v, const kept_value *k, ont_node **packed)
{
    ont_node *behind = k->last_forward ? k->last_forward : v->def;
    ont_builder b = {.graph = g, .before = behind->next, .origin = v->def ? ont_node_origin(v->def) : NULL};
    bool quantized = g->kept.dtype == ONT_INT8;
    ont_node *node = ont_build_node(&b, quantized ? ONT_DOMAIN : "", quantized ? "QuantizeActivation" : "Cast", &v, 1,
                                    quantized ? 2 : 1);
    if (node && !quantized) b.status = ont_attr_set_int(g, node, "to", g->kept.dtype);
    if (node) ont_build_done(&b, node);
    *packed = node;
    return b.status;
}

static ont_status decompress(ont_graph *g, const kept_value *k, const ont_node *packed, ont_value **v)
{
    ont_builder b = {.graph = g, .before = k->first_backward, .backward = true, .origin = packed};
    if (g->kept.dtype == ONT_INT8) {
        ont_node *node = ont_build_node(&b, ONT_DOMAIN, "DequantizeActivation", packed->outputs, 2, 1);
        *v = node ? ont_build_done(&b, node) : NULL;
    } else {
        *v = ont_build_cast(&b, packed->outputs[0], ONT_FLOAT32);
    }
    return b.status;
}

static ont_status keep_compressed(ont_graph *g, ont_value *v, const uint32_t *order)
{
    kept_value k = {.smooth = true};
    ont_node *packed;
    ont_value *unpacked;
    find_readers(v, order, &k);
    if (!k.first_backward || !k.smooth) return ONT_OK;
    ONT_TRY(compress(g, v, &k, &packed));
    ONT_TRY(decompress(g, &k, packed, &unpacked));
    ONT_TRY(read_instead(g, v, unpacked));
    g->kept.values++;
    for (uint32_t i = 0; i < packed->n_outputs; i++)
        g->kept.bytes += (size_t)ont_shape_count(&packed->outputs[i]->shape) *
                         ont_dtype_size(packed->outputs[i]->dtype);
    g->kept.bytes_before += (size_t)ont_shape_count(&v->shape) * sizeof(float);
    return ONT_OK;
}

ont_status ont_pass_compress_activations(ont_graph *g)
{
    if (!g->kept.dtype) return ONT_OK;
    uint32_t n_values = g->n_values, position = 0;
    int64_t least = ont_recompute_is_everywhere() ? 1 : MIN_ELEMENTS;
    uint32_t *order = ont_calloc((size_t)g->n_nodes + 1, sizeof *order);
    bool *is_result = ont_calloc((size_t)n_values + 1, sizeof *is_result);
    ont_status status = order && is_result ? ONT_OK : ONT_ENOMEM;
    for (ont_node *node = g->first; node && status == ONT_OK; node = node->next) order[node->id] = ++position;
    for (uint32_t i = 0; i < g->n_outputs && status == ONT_OK; i++) is_result[ont_value_root(g->outputs[i])->id] = true;
    for (uint32_t i = 0; i < n_values && status == ONT_OK; i++) {
        ont_value *v = g->values[i];
        if (v->kind == ONT_VALUE_NODE && !v->def->backward && !ont_node_is_view(v->def) && v->dtype == ONT_FLOAT32 &&
            !is_result[i] && ont_shape_count(&v->shape) >= least && is_activation(v))
            status = keep_compressed(g, v, order);
    }
    ont_free(order);
    ont_free(is_result);
    return status;
}
