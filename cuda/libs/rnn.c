/*
 * Recurrent layers by cuDNN (rnn.h), with its standard algorithm, which is products by cuBLAS and kernels for cells.
 * A call that fails while a plan is made means that there is none: the node is computed by the own kernels.
 */
#include "libs/rnn.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "libs/cudnn.h"
#include "libs/cudnn_rnn.h"
#include "libs/symbols.h"

extern const ont_allocator *ont_cuda_allocator;

enum { VERSION = 90000, MOST_GATES = 4 };

typedef struct key { /* compared by its bytes */
    ont_rnn_shape shape;
    int32_t device, math;
} key;

struct ont_rnn_plan {
    key key;
    const char *refusal; /* NULL, or why there is no plan */
    void *handle, *rnn, *dropout, *x, *y, *state, *matrix, *bias;
    ont_rnn_bytes bytes;
    _Atomic ont_verdict verdict;
    ont_rnn_plan *next;
};

static cudnn_rnn_functions dnn;
static bool found;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */
static ont_rnn_plan *plans;

static void open_library(void)
{
    static const char *const names[] = {"libcudnn.so.9"};
    static const ont_symbol symbols[] = {
#define X(member, name) {#name, offsetof(cudnn_rnn_functions, member)},
        ONT_CUDNN_RNN_FUNCTIONS(X)
#undef X
    };
    found = ont_library_open(names, sizeof names / sizeof *names, symbols, sizeof symbols / sizeof *symbols, &dnn) &&
            dnn.version() >= VERSION;
}

static ont_status check(int error, const char *what)
{
    return error ? ont_fail(ONT_ESTATE, "cuDNN, %s: status %d", what, error) : ONT_OK;
}

/* ---- descriptions ---- */

static int gates_of(const ont_rnn_shape *s) { return ont_cell_gates((ont_cell)s->cell); }

static ont_status describe_data(void **desc, const ont_rnn_shape *s, int type, int64_t width)
{
    int *lengths = ont_malloc((size_t)s->batch * sizeof *lengths);
    if (!lengths) return ONT_ENOMEM;
    for (int64_t i = 0; i < s->batch; i++) lengths[i] = (int)s->steps;
    ont_status status = check(dnn.data_create(desc), "sequences");
    if (status == ONT_OK)
        status = check(dnn.data_set(*desc, type, RNN_SEQ_MAJOR_UNPACKED, (int)s->steps, (int)s->batch, (int)width,
                                    lengths, NULL), "sequences");
    ont_free(lengths);
    return status;
}

static int type_of(int dtype)
{
    return dtype == ONT_FLOAT64 ? DATA_DOUBLE : dtype == ONT_FLOAT16 ? DATA_HALF : dtype == ONT_BFLOAT16 ? DATA_BFLOAT16
                                                                                                       : DATA_FLOAT;
}

/* 16 bits are added in float32. */
static ont_status describe(ont_rnn_plan *p)
{
    static const int cells[ONT_CELLS] = {[ONT_CELL_TANH] = RNN_TANH, [ONT_CELL_RELU] = RNN_RELU,
                                         [ONT_CELL_GRU] = RNN_GRU, [ONT_CELL_LSTM] = RNN_LSTM};
    const ont_rnn_shape *s = &p->key.shape;
    const int type = type_of(s->dtype), sums = s->dtype == ONT_FLOAT64 ? DATA_DOUBLE : DATA_FLOAT;
    const int dims[3] = {s->directions, (int)s->batch, (int)s->hidden};
    const int strides[3] = {(int)(s->batch * s->hidden), (int)s->hidden, 1};
    ONT_TRY(check(dnn.dropout_create(&p->dropout), "dropout"));
    ONT_TRY(check(dnn.dropout_set(p->dropout, p->handle, 0, NULL, 0, 0), "dropout"));
    ONT_TRY(check(dnn.rnn_create(&p->rnn), "a recurrent layer"));
    ONT_TRY(check(dnn.rnn_set(p->rnn, RNN_ALGO_STANDARD, cells[s->cell], s->has_bias ? RNN_DOUBLE_BIAS : RNN_NO_BIAS,
                              s->directions == 2 ? RNN_BIDIRECTIONAL : RNN_UNIDIRECTIONAL, RNN_LINEAR_INPUT, type, sums,
                              p->key.math, (int32_t)s->in, (int32_t)s->hidden, (int32_t)s->hidden, 1, p->dropout,
                              RNN_PADDED_IO_ENABLED), "a recurrent layer"));
    ONT_TRY(describe_data(&p->x, s, type, s->in));
    ONT_TRY(describe_data(&p->y, s, type, s->hidden * s->directions));
    ONT_TRY(check(dnn.tensor_create(&p->state), "states"));
    ONT_TRY(check(dnn.tensor_set(p->state, type, 3, dims, strides), "states"));
    ONT_TRY(check(dnn.tensor_create(&p->matrix), "a matrix"));
    return check(dnn.tensor_create(&p->bias), "a bias");
}

static ont_status ask_bytes(ont_rnn_plan *p)
{
    size_t work[2], saved[2];
    ONT_TRY(check(dnn.weight_bytes(p->handle, p->rnn, &p->bytes.weights), "the size of weights"));
    for (int mode = RNN_INFERENCE; mode <= RNN_TRAINING; mode++)
        ONT_TRY(check(dnn.temporary_bytes(p->handle, p->rnn, mode, p->x, &work[mode], &saved[mode]),
                      "the size of work memory"));
    p->bytes.work = work[RNN_INFERENCE] > work[RNN_TRAINING] ? work[RNN_INFERENCE] : work[RNN_TRAINING];
    p->bytes.saved = saved[RNN_TRAINING];
    return ONT_OK;
}

static void forget(ont_rnn_plan *p)
{
    if (p->rnn) dnn.rnn_destroy(p->rnn);
    if (p->dropout) dnn.dropout_destroy(p->dropout);
    if (p->x) dnn.data_destroy(p->x);
    if (p->y) dnn.data_destroy(p->y);
    if (p->state) dnn.tensor_destroy(p->state);
    if (p->matrix) dnn.tensor_destroy(p->matrix);
    if (p->bias) dnn.tensor_destroy(p->bias);
    p->rnn = p->dropout = p->x = p->y = p->state = p->matrix = p->bias = NULL;
}

static const char *build(ont_rnn_plan *p)
{
    ont_cudnn_lock();
    ont_status status = describe(p);
    if (status == ONT_OK) status = ask_bytes(p);
    ont_cudnn_unlock();
    if (status == ONT_OK) return NULL;
    forget(p);
    return "cuDNN declines the layer";
}

/*
 * cuDNN's standard algorithm runs products of cuBLAS on several streams, whose sums may differ from run to run unless
 * cuBLAS has one of these workspaces (PyTorch says so in the notes of nn.LSTM).
 */
static bool may_differ(void)
{
    const char *given = getenv("CUBLAS_WORKSPACE_CONFIG");
    return ont_gemm_is_deterministic() && !(given && (!strcmp(given, ":16:8") || !strcmp(given, ":4096:2")));
}

static const char *refusal_of(const ont_rnn_shape *s)
{
    const int64_t wide = s->in > s->directions * s->hidden ? s->in : s->directions * s->hidden;
    if (ont_dtype_size((ont_dtype)s->dtype) < 2) return "dtype";
    if (!s->in) return "nothing to compute";
    if (s->steps * s->batch > INT32_MAX / wide || gates_of(s) * s->hidden > INT32_MAX / wide)
        return "tensors of more than 2^31 elements";
    return may_differ() ? "cuDNN may add in another order at each run; CUBLAS_WORKSPACE_CONFIG=:4096:2 prevents it"
                        : NULL;
}

const char *ont_rnn_plan_get(const ont_rnn_shape *shape, ont_rnn_plan **plan)
{
    key k;
    void *handle;
    int device;
    pthread_once(&once, open_library);
    if (!found) return "cuDNN 9 is not found";
    const char *refusal = refusal_of(shape);
    if (refusal) return refusal;
    if (ont_cudnn_handle(&device, &handle) != ONT_OK) return "cuDNN has no handle for the device";
    memset(&k, 0, sizeof k);
    k.shape = *shape;
    k.device = device;
    if (shape->dtype == ONT_FLOAT32) k.math = ont_cuda_allocator->tf32_conv ? MATH_DEFAULT : MATH_FMA;
    else k.math = shape->dtype == ONT_FLOAT64 ? MATH_DEFAULT : MATH_TENSOR_OP;
    pthread_mutex_lock(&lock);
    ont_rnn_plan *p = plans;
    while (p && memcmp(&p->key, &k, sizeof k)) p = p->next;
    if (!p && (p = ont_calloc(1, sizeof *p))) {
        p->key = k;
        p->handle = handle;
        p->refusal = build(p);
        p->next = plans;
        plans = p;
    }
    pthread_mutex_unlock(&lock);
    if (!p) return "out of memory";
    *plan = p;
    return p->refusal;
}

ont_rnn_bytes ont_rnn_plan_bytes(const ont_rnn_plan *p)
{
    return p->bytes;
}

/* ---- weights ---- */

/*
 * cuDNN's number of each gate in ONNX's order: of LSTM (i, o, f, c) among (i, f, c, o), of GRU (z, r, h) among
 * (r, z, h). The matrices of the state have numbers behind those of the input.
 */
static const int gate_numbers[ONT_CELLS][MOST_GATES] = {
    [ONT_CELL_GRU] = {1, 0, 2}, [ONT_CELL_LSTM] = {0, 3, 1, 2}};

/* A part that begins at element `at` of ONNX's tensor; NULL: it is not wanted. */
static void add_part(ont_rnn_parts *parts, bool back, void *ours, int64_t at, void *theirs, int64_t count)
{
    if (!ours) return;
    void *own = (char *)ours + at * parts->size;
    ONT_ASSERT(parts->n < ONT_RNN_PARTS);
    parts->part[parts->n++] = back ? (ont_rnn_part){theirs, own, count} : (ont_rnn_part){own, theirs, count};
}

/* Whether cuDNN's part lies in its space. */
static bool is_inside(const ont_rnn_plan *p, const void *space, const void *part, size_t bytes)
{
    size_t at = (size_t)((const char *)part - (const char *)space);
    return part && at <= p->bytes.weights && bytes <= p->bytes.weights - at;
}

/* Matrix number i and its bias: by direction, then by gate, for the input and for the state. */
static ont_status add_gate(const ont_rnn_plan *p, const ont_rnn_weights *w, void *space, bool back, int i,
                           ont_rnn_parts *parts)
{
    const ont_rnn_shape *s = &p->key.shape;
    const int g = i / 2 % gates_of(s), direction = i / 2 / gates_of(s), of_state = i % 2;
    const int64_t gates = gates_of(s), wide = of_state ? s->hidden : s->in, rows = direction * gates + g;
    void *matrix = NULL, *bias = NULL;
    ONT_TRY(check(dnn.weight_part(p->handle, p->rnn, direction, p->bytes.weights, space,
                                  gate_numbers[s->cell][g] + (of_state ? (int)gates : 0), p->matrix, &matrix, p->bias,
                                  &bias), "a matrix of weights"));
    if (!is_inside(p, space, matrix, (size_t)(s->hidden * wide * parts->size)) ||
        (s->has_bias && !is_inside(p, space, bias, (size_t)(s->hidden * parts->size))))
        return ont_fail(ONT_ESTATE, "cuDNN's weights are outside their memory");
    add_part(parts, back, of_state ? w->r : w->w, rows * s->hidden * wide, matrix, s->hidden * wide);
    if (s->has_bias)
        add_part(parts, back, w->b, (direction * 2 * gates + (of_state ? gates : 0) + g) * s->hidden, bias,
                 s->hidden);
    return ONT_OK;
}

ont_status ont_rnn_plan_parts(const ont_rnn_plan *p, const ont_rnn_weights *weights, void *space, bool back,
                              ont_rnn_parts *parts)
{
    const ont_rnn_shape *s = &p->key.shape;
    ont_status status = ONT_OK;
    *parts = (ont_rnn_parts){.size = (int32_t)ont_dtype_size((ont_dtype)s->dtype)};
    ont_cudnn_lock();
    for (int i = 0; i < s->directions * gates_of(s) * 2 && status == ONT_OK; i++)
        status = add_gate(p, weights, space, back, i, parts);
    ont_cudnn_unlock();
    return status;
}

/* ---- runs ---- */

ont_status ont_rnn_plan_forward(const ont_rnn_plan *p, const ont_rnn_operands *o)
{
    bool lstm = p->key.shape.cell == ONT_CELL_LSTM;
    ont_cudnn_lock();
    ont_status status = check(dnn.set_stream(p->handle, o->stream), "a stream");
    if (status == ONT_OK)
        status = check(dnn.forward(p->handle, p->rnn, o->saved ? RNN_TRAINING : RNN_INFERENCE, NULL, p->x, o->x, p->y,
                                   o->y, p->state, o->h, o->last_h, p->state, lstm ? o->c : NULL,
                                   lstm ? o->last_c : NULL, p->bytes.weights, o->space, p->bytes.work, o->work,
                                   o->saved ? p->bytes.saved : 0, o->saved), "a recurrent layer");
    ont_cudnn_unlock();
    return status;
}

/* cuDNN adds to the gradients of the weights: `dspace` is zeros. */
ont_status ont_rnn_plan_backward(const ont_rnn_plan *p, const ont_rnn_grad_operands *o)
{
    bool lstm = p->key.shape.cell == ONT_CELL_LSTM;
    ont_cudnn_lock();
    ont_status status = check(dnn.set_stream(p->handle, o->stream), "a stream");
    if (status == ONT_OK)
        status = check(dnn.backward_data(p->handle, p->rnn, NULL, p->y, o->y, o->dy, p->x, o->dx, p->state, o->h,
                                         o->dlast_h, o->dh, p->state, lstm ? o->c : NULL, lstm ? o->dlast_c : NULL,
                                         lstm ? o->dc : NULL, p->bytes.weights, o->space, p->bytes.work, o->work,
                                         p->bytes.saved, o->saved), "the gradient of a recurrent layer");
    if (status == ONT_OK && o->dspace)
        status = check(dnn.backward_weights(p->handle, p->rnn, RNN_WGRAD_ADD, NULL, p->x, o->x, p->state, o->h, p->y,
                                            o->y, p->bytes.weights, o->dspace, p->bytes.work, o->work, p->bytes.saved,
                                            o->saved), "the gradient of a layer's weights");
    ont_cudnn_unlock();
    return status;
}

ont_verdict ont_rnn_plan_verdict(const ont_rnn_plan *p)
{
    return p->verdict;
}

void ont_rnn_plan_judge(ont_rnn_plan *p, ont_verdict verdict)
{
    p->verdict = verdict;
}
