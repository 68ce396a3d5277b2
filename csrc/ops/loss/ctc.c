/*
 * CTCLoss in our own domain: one loss for each sample. Inputs: log_probs (T, N, C), targets (N, S) or concatenated (sum
 * of target_lengths), input_lengths (N), target_lengths (N). Like PyTorch's, the gradient is exp(log_prob) minus the
 * posterior probability of the class: the true gradient plus a term that the gradient of log-softmax removes. The
 * backward pass recomputes the forward sums; nothing is saved. Source: Graves et al., Connectionist Temporal
 * Classification, 2006.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/parallel.h"
#include "ops/op.h"

typedef struct ctc_state {
    int64_t steps, batch, classes; /* T, N, C */
    int64_t padded;                /* S, or -1 for concatenated targets */
    int64_t total;                 /* elements of targets */
    int64_t blank;
    bool zero_infinity;
    bool wide[3]; /* targets, input_lengths, target_lengths are int64 */
} ctc_state;

/* One sample: frames, targets, and sums over paths, (frames, 2 * length + 1). */
typedef struct ctc_sample {
    int64_t index, frames, length, first; /* length, first: number of its targets, and the index of the first */
    int64_t rows_before;                  /* frames of the samples before it, as an offset in the sums */
} ctc_sample;

static int64_t read_int(const void *values, bool wide, int64_t i)
{
    return wide ? ((const int64_t *)values)[i] : ((const int32_t *)values)[i];
}

static ont_status ctc_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    static const char *const names[] = {"", "targets", "input_lengths", "target_lengths"};
    ont_value *x, *v;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (x->shape.rank != 3) return ont_fail(ONT_EINVAL, "log_probs have rank %d, expected 3", x->shape.rank);
    int64_t batch = x->shape.dims[1], blank = ont_attr_int(node, "blank", 0);
    for (uint32_t i = 1; i < 4; i++) {
        ONT_TRY(ont_need_input(node, i, &v));
        if (v->dtype != ONT_INT64 && v->dtype != ONT_INT32)
            return ont_fail(ONT_ETYPE, "%s are %s, expected int32 or int64", names[i], ont_dtype_name(v->dtype));
        bool fits = i == 1 ? v->shape.rank == 1 || (v->shape.rank == 2 && v->shape.dims[0] == batch)
                           : v->shape.rank == 1 && v->shape.dims[0] == batch;
        char text[ONT_SHAPE_TEXT];
        if (!fits)
            return ont_fail(ONT_EINVAL, "%s are %s for a batch of %" PRId64, names[i], ont_shape_text(&v->shape, text),
                            batch);
    }
    if (blank < 0 || blank >= x->shape.dims[2])
        return ont_fail(ONT_EINVAL, "blank is %" PRId64 " of %" PRId64 " classes", blank, x->shape.dims[2]);
    return ont_infer_out(node, 0, x->dtype, &(ont_shape){.rank = 1, .dims = {batch}});
}

static ont_status ctc_grad_infer(ont_graph *g, ont_node *node)
{
    return ont_infer_same(g, node);
}

/* Scratch for the sums of every sample and two rows of backward sums of each. */
static ont_status ctc_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *targets = ont_node_in(node, 1);
    ctc_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (ctc_state){.steps = x->shape.dims[0], .batch = x->shape.dims[1], .classes = x->shape.dims[2],
                     .padded = targets->shape.rank == 2 ? targets->shape.dims[1] : -1,
                     .total = ont_shape_count(&targets->shape), .blank = ont_attr_int(node, "blank", 0),
                     .zero_infinity = ont_attr_int(node, "zero_infinity", 0)};
    for (uint32_t i = 0; i < 3; i++) s->wide[i] = ont_node_in(node, i + 1)->dtype == ONT_INT64;
    size_t cells = (size_t)(2 * s->total + s->batch) * (size_t)(s->steps + 2);
    out->work_bytes = cells * ont_dtype_size(x->dtype) + (size_t)s->batch * sizeof(ctc_sample) + 64;
    out->state = s;
    return ONT_OK;
}

/* In scratch, the samples come before the sums. */
static size_t sums_at(const ctc_state *s)
{
    return ((size_t)s->batch * sizeof(ctc_sample) + 63) / 64 * 64;
}

static ont_status check_targets(const ctc_state *s, const void *targets, const ctc_sample *p)
{
    for (int64_t i = 0; i < p->length; i++) {
        int64_t target = read_int(targets, s->wide[0], p->first + i);
        if (target < 0 || target >= s->classes)
            return ont_fail(ONT_EINDEX,
                            "target %" PRId64 " of sample %" PRId64 " is out of range for %" PRId64 " classes", target,
                            p->index, s->classes);
    }
    return ONT_OK;
}

/* Checks lengths and targets, which are values of tensors, before they are used as indices. */
static ont_status read_samples(const ont_call *call)
{
    const ctc_state *s = call->state;
    ctc_sample *samples = call->work;
    int64_t before = 0;
    for (int64_t n = 0; n < s->batch; n++) {
        int64_t frames = read_int(call->in[2], s->wide[1], n), length = read_int(call->in[3], s->wide[2], n);
        int64_t room = s->padded >= 0 ? s->padded : s->total - before;
        if (frames < 0 || frames > s->steps)
            return ont_fail(ONT_EINDEX, "input length %" PRId64 " of sample %" PRId64 " is outside 0 to %" PRId64,
                            frames, n, s->steps);
        if (length < 0 || length > room)
            return ont_fail(ONT_EINDEX, "target length %" PRId64 " of sample %" PRId64 " is outside 0 to %" PRId64,
                            length, n, room);
        samples[n] = (ctc_sample){n, frames, length, s->padded >= 0 ? n * s->padded : before, 2 * before + n};
        ONT_TRY(check_targets(s, call->in[1], &samples[n]));
        before += length;
    }
    return ONT_OK;
}

/* Class of state k: blanks alternate with targets, and stand at both ends. */
static int64_t class_of(const ctc_state *s, const void *targets, const ctc_sample *p, int64_t k)
{
    return k % 2 ? read_int(targets, s->wide[0], p->first + k / 2) : s->blank;
}

#define CTC(suffix, type, exp_, log_) \
    static type add_##suffix(type a, type b) /* log(exp(a) + exp(b)) */ \
    { \
        type most = a > b ? a : b, least = a > b ? b : a; \
        return least == -INFINITY ? most : most + log_(1 + exp_(least - most)); \
    } \
    static type *sums_##suffix(const ont_call *call, const ctc_sample *p) \
    { \
        const ctc_state *s = call->state; \
        return (type *)((char *)call->work + sums_at(s)) + p->rows_before * (s->steps + 2); \
    } \
    /* alpha (frames, 2 * length + 1): log-probability of paths that end in a state at a frame. Returns the loss. */ \
    static type forward_##suffix(const ont_call *call, const ctc_sample *p, type *alpha) \
    { \
        const ctc_state *s = call->state; \
        const type *x = (const type *)call->in[0] + p->index * s->classes; \
        int64_t states = 2 * p->length + 1, stride = s->batch * s->classes; \
        if (!p->frames) return p->length ? INFINITY : 0; \
        for (int64_t t = 0; t < p->frames; t++) { \
            const type *last = t ? alpha + (t - 1) * states : NULL; \
            for (int64_t k = 0; k < states; k++) { \
                int64_t c = class_of(s, call->in[1], p, k); \
                type sum = t ? last[k] : k < 2 ? 0 : -INFINITY; \
                if (t && k > 0) sum = add_##suffix(sum, last[k - 1]); \
                if (t && k > 1 && class_of(s, call->in[1], p, k - 2) != c) sum = add_##suffix(sum, last[k - 2]); \
                alpha[t * states + k] = sum + x[t * stride + c]; \
            } \
        } \
        const type *end = alpha + p->frames * states; \
        return -(p->length ? add_##suffix(end[-1], end[-2]) : end[-1]); \
    } \
    static void losses_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ctc_state *s = call->state; \
        for (int64_t n = first; n < last; n++) { \
            const ctc_sample *p = (const ctc_sample *)call->work + n; \
            type loss = forward_##suffix(call, p, sums_##suffix(call, p)); \
            ((type *)call->out[0])[n] = s->zero_infinity && loss == INFINITY ? 0 : loss; \
        } \
    } \
    /* beta (2, 2 * length + 1): log-probability of paths that go on from a state. shares (C): log-sum by class. */ \
    static void shares_##suffix(const ont_call *call, const ctc_sample *p, int64_t t, const type *alpha, type *beta, \
                                type *shares) \
    { \
        const ctc_state *s = call->state; \
        int64_t states = 2 * p->length + 1; \
        const type *x = (const type *)call->in[0] + (t * s->batch + p->index) * s->classes; \
        type *row = beta + t % 2 * states; \
        const type *next = beta + (t + 1) % 2 * states; \
        for (int64_t c = 0; c < s->classes; c++) shares[c] = -INFINITY; \
        for (int64_t k = states - 1; k >= 0; k--) { \
            int64_t c = class_of(s, call->in[1], p, k); \
            bool end = t == p->frames - 1; \
            type sum = !end ? next[k] : k >= states - 2 ? 0 : -INFINITY; \
            if (!end && k + 1 < states) sum = add_##suffix(sum, next[k + 1]); \
            if (!end && k + 2 < states && \
                class_of(s, call->in[1], p, k + 2) != c) sum = add_##suffix(sum, next[k + 2]); \
            row[k] = sum + x[c]; \
            shares[c] = add_##suffix(shares[c], alpha[t * states + k] + row[k]); \
        } \
    } \
    static void grads_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ctc_state *s = call->state; \
        for (int64_t n = first; n < last; n++) { \
            const ctc_sample *p = (const ctc_sample *)call->work + n; \
            type *alpha = sums_##suffix(call, p), loss = forward_##suffix(call, p, alpha), \
                                                dy = ((const type *)call->in[4])[n]; \
            bool nothing = s->zero_infinity && loss == INFINITY; \
            type *beta = alpha + s->steps * (2 * p->length + 1); \
            for (int64_t t = s->steps - 1; t >= 0; t--) { \
                const type *x = (const type *)call->in[0] + (t * s->batch + n) * s->classes; \
                type *dx = (type *)call->out[0] + (t * s->batch + n) * s->classes; \
                bool counts = !nothing && t < p->frames; \
                if (counts) \
                    shares_##suffix(call, p, t, alpha, beta, dx); \
                for (int64_t c = 0; c < s->classes; c++) \
                    dx[c] = counts ? (exp_(x[c]) - exp_(dx[c] + loss - x[c])) * dy : 0; \
            } \
        } \
    }
CTC(f32, float, expf, logf)
CTC(f64, double, exp, log)

static ont_status ctc_run(const ont_call *call)
{
    const ctc_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ONT_TRY(read_samples(call));
    ont_parallel(s->batch, 1, f32 ? losses_f32 : losses_f64, (void *)call);
    return ONT_OK;
}

static ont_status ctc_grad_run(const ont_call *call)
{
    const ctc_state *s = call->state;
    bool f32 = ont_node_in(call->node, 0)->dtype == ONT_FLOAT32;
    ONT_TRY(read_samples(call));
    ont_parallel(s->batch, 1, f32 ? grads_f32 : grads_f64, (void *)call);
    return ONT_OK;
}

static void ctc_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *operands[] = {I(0), I(1), I(2), I(3), GO(0)};
    ont_node *node = ont_build_node(b, ONT_DOMAIN, "CTCLossGrad", operands, 5, 1);
    if (node) b->status = ont_attr_copy_all(b->graph, node, g->node);
    GI(0, ont_build_done(b, node));
}

static const ont_kernel ctc_kernels[] = {
    {.name = "ctc_ref", .accept = ont_accept_float, .prepare = ctc_prepare, .run = ctc_run},
};
static const ont_kernel ctc_grad_kernels[] = {
    {.name = "ctc_grad_ref", .accept = ont_accept_float, .prepare = ctc_prepare, .run = ctc_grad_run},
};
const ont_op ont_op_CTCLoss = {.domain = ONT_DOMAIN, .name = "CTCLoss", .since = 1, .min_inputs = 4, .max_inputs = 4,
                               .flags = ONT_OP_PUBLIC, .nondiff_inputs = 14, .attributes = "blank:i zero_infinity:i",
                               .infer = ctc_infer, .grad = ctc_grad, ONT_KERNELS(ctc_kernels)};
const ont_op ont_op_CTCLossGrad = {.domain = ONT_DOMAIN, .name = "CTCLossGrad", .since = 1, .min_inputs = 5,
                                   .max_inputs = 5, .nondiff_inputs = 14, .attributes = "blank:i zero_infinity:i",
                                   .infer = ctc_grad_infer, ONT_KERNELS(ctc_grad_kernels)};
