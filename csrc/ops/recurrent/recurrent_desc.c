/*
 * Reads RNN, GRU and LSTM: attributes, activations, shapes. It knows no kernel.
 */
#include "ops/recurrent/recurrent_desc.h"

#include <inttypes.h>
#include <string.h>
#include <strings.h>

#include "ops/recurrent/recurrent_whole.h"
#include "ops/support/compose.h"

/* ---- activations ---- */

#define PLAIN(op) \
    static ont_value *act_##op(ont_builder *b, ont_value *x, double alpha, double beta) \
    { \
        (void)alpha; \
        (void)beta; \
        return ont_build1(b, #op, x); \
    }
PLAIN(Relu)
PLAIN(Tanh)
PLAIN(Sigmoid)
PLAIN(Softsign)
PLAIN(Softplus)

static ont_value *act_affine(ont_builder *b, ont_value *x, double alpha, double beta)
{
    return ont_build_shift(b, ont_build_scale(b, x, alpha), beta);
}

static ont_value *act_leaky(ont_builder *b, ont_value *x, double alpha, double beta)
{
    (void)beta;
    return ont_build_attr_float(b, "LeakyRelu", x, "alpha", alpha);
}

static ont_value *act_elu(ont_builder *b, ont_value *x, double alpha, double beta)
{
    (void)beta;
    return ont_build_attr_float(b, "Elu", x, "alpha", alpha);
}

static ont_value *act_threshold(ont_builder *b, ont_value *x, double alpha, double beta)
{
    (void)beta;
    if (!x) return NULL;
    ont_value *above = ont_build2(b, "Greater", x, ont_build_scalar(b, x->dtype, alpha));
    return ont_build3(b, "Where", above, x, ont_build_scalar(b, x->dtype, 0));
}

static ont_value *act_scaled_tanh(ont_builder *b, ont_value *x, double alpha, double beta)
{
    return ont_build_scale(b, ont_build1(b, "Tanh", ont_build_scale(b, x, beta)), alpha);
}

static ont_value *act_hard_sigmoid(ont_builder *b, ont_value *x, double alpha, double beta)
{
    if (b->status != ONT_OK || !x) return NULL;
    ont_node *node = ont_build_node(b, "", "HardSigmoid", &x, 1, 1);
    if (node) b->status = ont_attr_set_float(b->graph, node, "alpha", alpha);
    if (node && b->status == ONT_OK) b->status = ont_attr_set_float(b->graph, node, "beta", beta);
    return ont_build_done(b, node);
}

static const ont_activation_kind kinds[] = {
    {"Relu", 0, 0, 0, act_Relu},          {"Tanh", 0, 0, 0, act_Tanh},
    {"Sigmoid", 0, 0, 0, act_Sigmoid},    {"Softsign", 0, 0, 0, act_Softsign},
    {"Softplus", 0, 0, 0, act_Softplus},  {"Affine", 1, 0, 2, act_affine},
    {"LeakyRelu", 0.01, 0, 1, act_leaky}, {"ThresholdedRelu", 1, 0, 1, act_threshold},
    {"Elu", 1, 0, 1, act_elu},            {"ScaledTanh", 1, 1, 2, act_scaled_tanh},
    {"HardSigmoid", 0.2, 0.5, 2, act_hard_sigmoid},
};

static ont_status find_activation(const char *name, ont_activation *act)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcasecmp(kinds[i].name, name)) {
            *act = (ont_activation){&kinds[i], kinds[i].alpha, kinds[i].beta};
            return ONT_OK;
        }
    return ont_fail(ONT_EUNSUPPORTED, "activation '%s' is not supported", name);
}

/* activation_alpha and activation_beta are lists: each activation that has the parameter takes the next entry. */
static ont_status read_activations(const ont_node *node, ont_recurrent *r)
{
    static const char *const defaults[3][3] = {{"Tanh"}, {"Sigmoid", "Tanh"}, {"Sigmoid", "Tanh", "Tanh"}};
    const ont_attr *names = ont_attr_find(node, "activations", ONT_ATTR_STRINGS);
    size_t n_alpha, n_beta, a = 0, c = 0, n = (size_t)r->acts * (size_t)r->directions;
    const double *alpha = ont_attr_floats(node, "activation_alpha", &n_alpha);
    const double *beta = ont_attr_floats(node, "activation_beta", &n_beta);
    if (names && names->count != n)
        return ont_fail(ONT_EINVAL, "attribute activations has %zu entries, expected %zu", names->count, n);
    for (size_t i = 0; i < n; i++) {
        ont_activation *act = &r->act[i];
        ONT_TRY(find_activation(names ? names->strings[i] : defaults[r->cell][i % (size_t)r->acts], act));
        if (act->kind->parameters > 0 && a < n_alpha) act->alpha = alpha[a++];
        if (act->kind->parameters > 1 && c < n_beta) act->beta = beta[c++];
    }
    return ONT_OK;
}

ont_value *ont_recurrent_activate(const ont_recurrent *r, int d, int k, ont_value *x)
{
    const ont_activation *act = &r->act[d * r->acts + k];
    if (r->clip > 0) {
        ont_value *bounds[] = {x, ont_build_scalar(r->b, r->dtype, -r->clip),
                               ont_build_scalar(r->b, r->dtype, r->clip)};
        x = x ? ont_build_op(r->b, "Clip", bounds, 3) : NULL;
    }
    return act->kind->build(r->b, x, act->alpha, act->beta);
}

/* ---- arguments ---- */

static ont_status expect(const ont_node *node, uint32_t index, const char *name, const ont_recurrent *r,
                         const ont_shape *shape)
{
    const ont_value *v = ont_node_in(node, index);
    char got[ONT_SHAPE_TEXT], want[ONT_SHAPE_TEXT];
    if (!v) return ONT_OK;
    if (v->dtype != r->dtype)
        return ont_fail(ONT_ETYPE, "%s is %s, but X is %s", name, ont_dtype_name(v->dtype), ont_dtype_name(r->dtype));
    if (!ont_shape_equal(&v->shape, shape))
        return ont_fail(ONT_EINVAL, "%s is %s, expected %s", name, ont_shape_text(&v->shape, got),
                        ont_shape_text(shape, want));
    return ONT_OK;
}

static ont_status read_direction(const ont_node *node, ont_recurrent *r)
{
    const char *direction = ont_attr_string(node, "direction", "forward");
    bool both = !strcasecmp(direction, "bidirectional"), back = !strcasecmp(direction, "reverse");
    if (!both && !back && strcasecmp(direction, "forward"))
        return ont_fail(ONT_EINVAL, "direction is '%s', expected forward, reverse or bidirectional", direction);
    r->directions = both ? 2 : 1;
    r->reversed[0] = back;
    r->reversed[1] = both;
    return ONT_OK;
}

static ont_status check_shapes(const ont_node *node, const ont_recurrent *r)
{
    int64_t d = r->directions, h = r->hidden, g = r->gates;
    ont_shape state = ont_shape_of(3, (int64_t[]){d, r->batch, h});
    if (r->batch_first) state = ont_shape_of(3, (int64_t[]){r->batch, d, h});
    ont_shape w = ont_shape_of(3, (int64_t[]){d, g * h, r->in}), rec = ont_shape_of(3, (int64_t[]){d, g * h, h});
    ont_shape bias = ont_shape_of(2, (int64_t[]){d, 2 * g * h}), peep = ont_shape_of(2, (int64_t[]){d, 3 * h});
    ONT_TRY(expect(node, 1, "W", r, &w));
    ONT_TRY(expect(node, 2, "R", r, &rec));
    ONT_TRY(expect(node, 3, "B", r, &bias));
    ONT_TRY(expect(node, 5, "initial_h", r, &state));
    ONT_TRY(expect(node, 6, "initial_c", r, &state));
    ONT_TRY(expect(node, 7, "P", r, &peep));
    const ont_value *lens = ont_node_in(node, 4);
    if (lens && (lens->shape.rank != 1 || lens->shape.dims[0] != r->batch))
        return ont_fail(ONT_EINVAL, "sequence_lens must have one entry per sequence, here %" PRId64, r->batch);
    if (lens && !ont_dtype_is_int(lens->dtype))
        return ont_fail(ONT_ETYPE, "sequence_lens is %s, integers are expected", ont_dtype_name(lens->dtype));
    return ONT_OK;
}

ont_status ont_recurrent_parse(const ont_node *node, ont_recurrent_kind kind, ont_recurrent *r)
{
    static const int gates[] = {1, 3, 4}, acts[] = {1, 2, 3};
    ont_value *x, *w, *rec;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &w));
    ONT_TRY(ont_need_input(node, 2, &rec));
    if (x->shape.rank != 3 || rec->shape.rank != 3) return ont_fail(ONT_EINVAL, "X and R must have rank 3");
    if (!ont_dtype_is_float(x->dtype))
        return ont_fail(ONT_ETYPE, "X is %s, a float is expected", ont_dtype_name(x->dtype));
    r->cell = kind;
    r->gates = gates[kind];
    r->acts = acts[kind];
    r->dtype = x->dtype;
    r->batch_first = ont_attr_int(node, "layout", 0) != 0;
    r->steps = x->shape.dims[r->batch_first];
    r->batch = x->shape.dims[!r->batch_first];
    r->in = x->shape.dims[2];
    r->hidden = rec->shape.dims[2];
    if (ont_attr_int(node, "hidden_size", r->hidden) != r->hidden)
        return ont_fail(ONT_EINVAL, "hidden_size is %" PRId64 ", R has %" PRId64, ont_attr_int(node, "hidden_size", 0),
                        r->hidden);
    r->clip = ont_attr_float(node, "clip", 0);
    r->input_forget = ont_attr_int(node, "input_forget", 0) != 0;
    r->linear_before_reset = ont_attr_int(node, "linear_before_reset", 0) != 0;
    ONT_TRY(read_direction(node, r));
    ONT_TRY(read_activations(node, r));
    return check_shapes(node, r);
}

ont_cell ont_recurrent_torch_cell(const ont_recurrent *r, const ont_node *node, int d)
{
    static const char *const torchs[] = {"Sigmoid", "Tanh", "Tanh"};
    const ont_activation *act = &r->act[d * r->acts];
    if (r->clip > 0 || r->input_forget || ont_node_in(node, 7) || !r->steps || !r->batch || !r->hidden)
        return ONT_CELLS;
    if (r->cell == ONT_RECURRENT_RNN)
        return !strcmp(act[0].kind->name, "Tanh") ? ONT_CELL_TANH
               : !strcmp(act[0].kind->name, "Relu") ? ONT_CELL_RELU
                                                    : ONT_CELLS;
    for (int i = 0; i < r->acts; i++)
        if (strcmp(act[i].kind->name, torchs[i])) return ONT_CELLS;
    if (r->cell == ONT_RECURRENT_LSTM) return ONT_CELL_LSTM;
    return r->linear_before_reset ? ONT_CELL_GRU : ONT_CELLS;
}

bool ont_recurrent_is_full(const ont_recurrent *r, const ont_value *lens)
{
    bool full = lens->data && (lens->dtype == ONT_INT32 || lens->dtype == ONT_INT64);
    for (int64_t i = 0; full && i < r->batch; i++)
        full = (lens->dtype == ONT_INT32 ? ((const int32_t *)lens->data->data)[i]
                                         : ((const int64_t *)lens->data->data)[i]) >= r->steps;
    return full;
}

/* ---- for kernels that take the whole node ---- */

const char *ont_recurrent_read(const ont_node *node, ont_recurrent_form *form)
{
    ont_recurrent r = {0};
    ont_recurrent_kind kind = ONT_IS(node, LSTM)  ? ONT_RECURRENT_LSTM
                              : ONT_IS(node, GRU) ? ONT_RECURRENT_GRU
                                                  : ONT_RECURRENT_RNN;
    if (ont_recurrent_parse(node, kind, &r) != ONT_OK) return "arguments";
    ont_cell known = ont_recurrent_torch_cell(&r, node, 0);
    if (known == ONT_CELLS || (r.directions == 2 && ont_recurrent_torch_cell(&r, node, 1) != known))
        return "clip, peepholes, activations other than torch's, or nothing to compute";
    if (r.reversed[0]) return "backwards in time alone";
    if (r.batch_first) return "layout 1";
    if (ont_node_in(node, 4) && !ont_recurrent_is_full(&r, ont_node_in(node, 4)))
        return "lengths that are not known when the program is built";
    *form = (ont_recurrent_form){.steps = r.steps, .batch = r.batch, .in = r.in, .hidden = r.hidden,
                                 .directions = r.directions, .cell = known, .dtype = r.dtype};
    return NULL;
}
