/*
 * The convolutions of cuDNN for the emulated device, called by libs/cudnn.c: loops in double, and the rules that
 * NVIDIA's documentation has for a caller (contract.h). Some of what it proposes is not supported, not deterministic,
 * or needs too much memory, and some it refuses when it is called, as the library may.
 */
#include <string.h>

#include "libs/cudnn_rnn.h"
#include "emulate/cudnn_desc.h"
#include "emulate/values.h"

enum { ALIGN = 16, MOST_WORK = 6000, TOO_MUCH = 1 << 30, ALGORITHMS = 4 };

typedef struct convolution {
    int kind, rank, pad[3], stride[3], dilation[3], mode, type, groups, math;
} convolution;

typedef struct problem { /* int alone, without padding: it is compared by its bytes */
    int kind;            /* ont_conv_kind */
    tensor x, w, y;
    convolution conv;
} problem;

static int create(void **made)
{
    ont_emulate_outside_capture("cudnnCreate");
    handle *h = fresh(sizeof *h, HANDLE);
    h->device = ont_emulate_device();
    *made = h;
    return CUDNN_SUCCESS;
}

static int set_stream(void *opaque, cudaStream_t stream)
{
    handle *h = read_handle(opaque, "cudnnSetStream");
    ont_emulate_check_stream("cudnnSetStream", stream);
    h->has_stream = true;
    h->stream = stream;
    return CUDNN_SUCCESS;
}

/* ---- descriptors ---- */

static int tensor_create(void **desc)
{
    *desc = fresh(sizeof(tensor), TENSOR);
    return CUDNN_SUCCESS;
}

static int tensor_destroy(void *desc)
{
    return destroy(desc, TENSOR);
}

static int filter_create(void **desc)
{
    *desc = fresh(sizeof(tensor), FILTER);
    return CUDNN_SUCCESS;
}

static int filter_destroy(void *desc)
{
    return destroy(desc, FILTER);
}

static void set_dims(tensor *t, int type, int rank, const int *dims, const char *call)
{
    bool state = rank == 3; /* of recurrent layers */
    ONT_REQUIRE(type == DATA_FLOAT || type == DATA_HALF || type == DATA_BFLOAT16 || (state && type == DATA_DOUBLE),
                "%s: type %d", call, type);
    ONT_REQUIRE(state || rank == 4 || rank == MOST_RANK, "%s: rank %d", call, rank);
    t->type = type;
    t->rank = rank;
    for (int d = 0; d < rank; d++) {
        ONT_REQUIRE(dims[d] > 0, "%s: dim %d is %d", call, d, dims[d]);
        t->dims[d] = dims[d];
    }
}

/* Strides of row-major tensors alone, which is what libs/cudnn.c and libs/rnn.c have. */
static int tensor_set(void *desc, int type, int rank, const int *dims, const int *strides)
{
    CHECKED(tensor, TENSOR, desc, t);
    int64_t stride = 1;
    set_dims(t, type, rank, dims, "cudnnSetTensorNdDescriptor");
    for (int d = rank - 1; d >= 0; d--) {
        ONT_REQUIRE(strides[d] == stride, "cudnnSetTensorNdDescriptor: stride %d of dim %d", strides[d], d);
        t->strides[d] = strides[d];
        stride *= dims[d];
    }
    return CUDNN_SUCCESS;
}

static int filter_set(void *desc, int type, int layout, int rank, const int *dims)
{
    CHECKED(tensor, FILTER, desc, w);
    ONT_REQUIRE(layout == LAYOUT_NCHW, "cudnnSetFilterNdDescriptor: layout %d", layout);
    set_dims(w, type, rank, dims, "cudnnSetFilterNdDescriptor");
    return CUDNN_SUCCESS;
}

static int conv_create(void **desc)
{
    convolution *c = fresh(sizeof *c, CONVOLUTION);
    c->groups = 1;
    *desc = c;
    return CUDNN_SUCCESS;
}

static int conv_destroy(void *desc)
{
    return destroy(desc, CONVOLUTION);
}

static int conv_set(void *desc, int rank, const int *pad, const int *stride, const int *dilation, int mode, int type)
{
    const char *call = "cudnnSetConvolutionNdDescriptor";
    CHECKED(convolution, CONVOLUTION, desc, c);
    ONT_REQUIRE(rank == 2 || rank == 3, "%s: %d dims", call, rank);
    ONT_REQUIRE(mode == CROSS_CORRELATION && type == DATA_FLOAT, "%s: mode %d, type %d", call, mode, type);
    c->rank = rank;
    c->mode = mode;
    c->type = type;
    for (int d = 0; d < rank; d++) {
        ONT_REQUIRE(pad[d] >= 0 && stride[d] > 0 && dilation[d] > 0, "%s: pad %d, stride %d, dilation %d", call, pad[d],
                    stride[d], dilation[d]);
        c->pad[d] = pad[d];
        c->stride[d] = stride[d];
        c->dilation[d] = dilation[d];
    }
    return CUDNN_SUCCESS;
}

static int conv_groups(void *desc, int groups)
{
    CHECKED(convolution, CONVOLUTION, desc, c);
    ONT_REQUIRE(groups > 0, "cudnnSetConvolutionGroupCount: %d", groups);
    c->groups = groups;
    return CUDNN_SUCCESS;
}

static int conv_math(void *desc, int math)
{
    CHECKED(convolution, CONVOLUTION, desc, c);
    ONT_REQUIRE(math >= MATH_DEFAULT && math <= MATH_FMA, "cudnnSetConvolutionMathType: %d", math);
    c->math = math;
    return CUDNN_SUCCESS;
}

static problem read_problem(int kind, void *x, void *w, void *y, void *conv, const char *call)
{
    CHECKED(tensor, TENSOR, x, input);
    CHECKED(tensor, FILTER, w, weight);
    CHECKED(tensor, TENSOR, y, output);
    CHECKED(convolution, CONVOLUTION, conv, c);
    problem q = {kind, *input, *weight, *output, *c};
    ONT_REQUIRE(input->rank && input->rank == weight->rank && input->rank == output->rank && input->rank == c->rank + 2,
                "%s: ranks %d, %d, %d and %d", call, input->rank, weight->rank, output->rank, c->rank);
    ONT_REQUIRE(input->type == weight->type && input->type == output->type, "%s: types %d, %d, %d", call, input->type,
                weight->type, output->type);
    ONT_REQUIRE(input->dims[0] == output->dims[0] && output->dims[1] == weight->dims[0] &&
                    input->dims[1] == weight->dims[1] * c->groups && weight->dims[0] % c->groups == 0,
                "%s: channels do not match", call);
    for (int d = 0; d < c->rank; d++) {
        int reach = input->dims[d + 2] + 2 * c->pad[d] - c->dilation[d] * (weight->dims[d + 2] - 1) - 1;
        ONT_REQUIRE(reach >= 0 && reach / c->stride[d] + 1 == output->dims[d + 2], "%s: dim %d of the output is %d",
                    call, d, output->dims[d + 2]);
    }
    return q;
}

/* ---- proposals ---- */

typedef struct trait { /* of an algorithm for a problem */
    performance told;
    bool refuses;
} trait;

static uint64_t key_of(problem q)
{
    q.conv.math = 0; /* it is set again before a call */
    return ont_emulate_key(&q, sizeof q);
}

static trait trait_of(const problem *q, int algorithm)
{
    uint64_t random = key_of(*q);
    int works = (int)(ont_emulate_random(&random) % ALGORITHMS); /* this one always does */
    random += (uint64_t)algorithm * 0x632be59bd9b4e019u;
    uint64_t drawn = ont_emulate_random(&random);
    trait t = {.told = {.algorithm = algorithm, .time = -1, .determinism = DETERMINISTIC}};
    if (drawn >> 8 & 1) t.told.memory = (drawn >> 16) % MOST_WORK;
    t.told.math = drawn >> 9 & 1 ? MATH_DEFAULT : drawn >> 10 & 1 ? MATH_FMA : MATH_TENSOR_OP;
    if (algorithm == works) return t;
    switch (drawn % 6) {
    case 0: t.told.status = CUDNN_NOT_SUPPORTED; break;
    case 1: t.told.determinism = !DETERMINISTIC; break;
    case 2: t.told.memory = TOO_MUCH; break;
    case 3: t.refuses = true; break;
    default: break;
    }
    return t;
}

static int find(const problem *q, void *opaque, int wanted, int *n, performance *found)
{
    (void)read_handle(opaque, "cudnnGetConvolutionAlgorithm_v7");
    for (*n = 0; *n < wanted && *n < ALGORITHMS; ++*n) {
        found[*n] = trait_of(q, *n).told;
        if (q->conv.math == MATH_FMA && found[*n].math == MATH_TENSOR_OP) found[*n].math = MATH_FMA;
    }
    return CUDNN_SUCCESS;
}

static int find_forward(void *h, void *x, void *w, void *conv, void *y, int wanted, int *n, performance *found)
{
    problem q = read_problem(ONT_CONV_FORWARD, x, w, y, conv, "cudnnGetConvolutionForwardAlgorithm_v7");
    return find(&q, h, wanted, n, found);
}

static int find_grad_input(void *h, void *w, void *y, void *conv, void *x, int wanted, int *n, performance *found)
{
    problem q = read_problem(ONT_CONV_GRAD_INPUT, x, w, y, conv, "cudnnGetConvolutionBackwardDataAlgorithm_v7");
    return find(&q, h, wanted, n, found);
}

static int find_grad_weight(void *h, void *x, void *y, void *conv, void *w, int wanted, int *n, performance *found)
{
    problem q = read_problem(ONT_CONV_GRAD_WEIGHT, x, w, y, conv, "cudnnGetConvolutionBackwardFilterAlgorithm_v7");
    return find(&q, h, wanted, n, found);
}

/* ---- a convolution ---- */

typedef struct call {
    problem q;
    const void *in[2]; /* of x, w and y the two that are read, in this order */
    void *out, *work;
    size_t work_bytes;
} call;

static ont_conv_shape shape_of(const problem *q)
{
    ont_conv_shape s = {.n = q->x.dims[0], .c = q->x.dims[1], .m = q->w.dims[0], .groups = q->conv.groups,
                        .in = {1, 1, 1}, .out = {1, 1, 1}, .kernel = {1, 1, 1}, .stride = {1, 1, 1},
                        .dilation = {1, 1, 1}, .in_count = 1, .out_count = 1, .kernel_count = 1};
    s.dtype = q->x.type == DATA_FLOAT ? ONT_FLOAT32 : q->x.type == DATA_HALF ? ONT_FLOAT16 : ONT_BFLOAT16;
    for (int d = 0; d < q->conv.rank; d++) {
        int to = 3 - q->conv.rank + d;
        s.in_count *= s.in[to] = q->x.dims[d + 2];
        s.out_count *= s.out[to] = q->y.dims[d + 2];
        s.kernel_count *= s.kernel[to] = q->w.dims[d + 2];
        s.stride[to] = q->conv.stride[d];
        s.dilation[to] = q->conv.dilation[d];
        s.pad[to] = q->conv.pad[d];
    }
    return s;
}

static double *unpack(int dtype, const void *data, int64_t n)
{
    double *all = malloc((size_t)n * sizeof *all);
    ONT_REQUIRE(all, "out of memory");
    for (int64_t i = 0; i < n; i++) all[i] = ont_emulate_get((ont_dtype)dtype, data, i);
    return all;
}

/* The element of a plane of x that an output reads through a tap of the kernel; -1: padding. */
static int64_t cell_of(const ont_conv_shape *s, int64_t output, int64_t tap)
{
    int64_t at[3] = {output / s->out[2] / s->out[1], output / s->out[2] % s->out[1], output % s->out[2]};
    int64_t of[3] = {tap / s->kernel[2] / s->kernel[1], tap / s->kernel[2] % s->kernel[1], tap % s->kernel[2]};
    int64_t cell = 0;
    for (int d = 0; d < 3; d++) {
        int64_t in = at[d] * s->stride[d] - s->pad[d] + of[d] * s->dilation[d];
        if (in < 0 || in >= s->in[d]) return -1;
        cell = cell * s->in[d] + in;
    }
    return cell;
}

/* Adds every product of a convolution to the one of x, w and y that is written. */
static void add_products(const ont_conv_shape *s, int kind, double *x, double *w, double *y)
{
    int64_t channels = s->c / s->groups, each = s->m / s->groups;
    for (int64_t o = 0; o < s->out_count; o++)
        for (int64_t k = 0; k < s->kernel_count; k++) {
            int64_t cell = cell_of(s, o, k);
            for (int64_t i = 0; cell >= 0 && i < s->n * s->m; i++) {
                int64_t m = i % s->m, first = i / s->m * s->c + m / each * channels;
                double *to = y + i * s->out_count + o;
                for (int64_t c = 0; c < channels; c++) {
                    double *from = x + (first + c) * s->in_count + cell;
                    double *weight = w + (m * channels + c) * s->kernel_count + k;
                    if (kind == ONT_CONV_FORWARD) *to += *from * *weight;
                    else if (kind == ONT_CONV_GRAD_INPUT) *from += *to * *weight;
                    else *weight += *from * *to;
                }
            }
        }
}

static int convolve(void *context)
{
    const call *call = context;
    ont_conv_shape s = shape_of(&call->q);
    ont_emulate_begin_work("cuDNN's convolution");
    int kind = call->q.kind, written = kind == ONT_CONV_FORWARD ? 2 : kind == ONT_CONV_GRAD_INPUT ? 0 : 1, next = 0;
    int64_t n[3] = {s.n * s.c * s.in_count, s.m * (s.c / s.groups) * s.kernel_count, s.n * s.m * s.out_count};
    double *values[3];
    if (call->work_bytes) memset(call->work, 0x7f, call->work_bytes); /* as the library, which writes to all of it */
    for (int i = 0; i < 3; i++)
        values[i] = i == written ? calloc((size_t)n[i], sizeof(double)) : unpack(s.dtype, call->in[next++], n[i]);
    ONT_REQUIRE(values[written], "out of memory");
    add_products(&s, kind, values[0], values[1], values[2]);
    for (int64_t i = 0; i < n[written]; i++) ont_emulate_put((ont_dtype)s.dtype, call->out, i, values[written][i]);
    for (int i = 0; i < 3; i++) free(values[i]);
    ont_emulate_end_work();
    return 0;
}

/* ---- rules of a call ---- */

static void check_address(const void *address, const char *name, const char *function)
{
    ONT_REQUIRE(address && (uintptr_t)address % ALIGN == 0, "%s: %s at %p is not a multiple of %d", function, name,
                address, ALIGN);
}

static int run(const call *call, void *opaque, int algorithm, const void *alpha, const void *beta, const char *function)
{
    const handle *h = read_handle(opaque, function);
    const problem *q = &call->q;
    ONT_REQUIRE(h->has_stream, "%s: the handle has no stream", function);
    ONT_REQUIRE(algorithm >= 0 && algorithm < ALGORITHMS, "%s: algorithm %d", function, algorithm);
    ONT_REQUIRE(*(const float *)alpha == 1 && *(const float *)beta == 0, "%s: factors", function);
    trait t = trait_of(q, algorithm);
    ONT_REQUIRE(!t.told.status, "%s: algorithm %d, which is not supported", function, algorithm);
    ONT_REQUIRE(t.told.determinism == DETERMINISTIC, "%s: algorithm %d, which is not deterministic", function,
                algorithm);
    ONT_REQUIRE(q->conv.math == t.told.math || q->conv.math == MATH_FMA,
                "%s: math type %d, and the algorithm is for %d", function, q->conv.math, t.told.math);
    ONT_REQUIRE(call->work_bytes >= t.told.memory, "%s: %zu bytes of workspace, and the algorithm needs %zu", function,
                call->work_bytes, t.told.memory);
    if (t.told.memory) check_address(call->work, "the workspace", function);
    check_address(call->in[0], "the first operand", function);
    check_address(call->in[1], "the second operand", function);
    check_address(call->out, "the result", function);
    if (t.refuses) return CUDNN_NOT_SUPPORTED;
    if (!ont_emulate_recording()) return convolve((void *)call);
    void *kept = malloc(sizeof *call);
    ONT_REQUIRE(kept, "out of memory");
    memcpy(kept, call, sizeof *call);
    return ont_emulate_record(convolve, kept, free);
}

static int run_forward(void *h, const void *alpha, void *dx, const void *x, void *dw, const void *w, void *conv,
                       int algorithm, void *work, size_t bytes, const void *beta, void *dy, void *y)
{
    const char *name = "cudnnConvolutionForward";
    call now = {read_problem(ONT_CONV_FORWARD, dx, dw, dy, conv, name), {x, w}, y, work, bytes};
    return run(&now, h, algorithm, alpha, beta, name);
}

static int run_grad_input(void *h, const void *alpha, void *dw, const void *w, void *dy, const void *y, void *conv,
                          int algorithm, void *work, size_t bytes, const void *beta, void *dx, void *x)
{
    const char *name = "cudnnConvolutionBackwardData";
    call now = {read_problem(ONT_CONV_GRAD_INPUT, dx, dw, dy, conv, name), {w, y}, x, work, bytes};
    return run(&now, h, algorithm, alpha, beta, name);
}

static int run_grad_weight(void *h, const void *alpha, void *dx, const void *x, void *dy, const void *y, void *conv,
                           int algorithm, void *work, size_t bytes, const void *beta, void *dw, void *w)
{
    const char *name = "cudnnConvolutionBackwardFilter";
    call now = {read_problem(ONT_CONV_GRAD_WEIGHT, dx, dw, dy, conv, name), {x, y}, w, work, bytes};
    return run(&now, h, algorithm, alpha, beta, name);
}

#define FUNCTION(name, function) {name, (void (*)(void))function}
const ont_emulate_function ont_emulate_cudnn[] = {
    FUNCTION("cudnnCreate", create),
    FUNCTION("cudnnSetStream", set_stream),
    FUNCTION("cudnnCreateTensorDescriptor", tensor_create),
    FUNCTION("cudnnSetTensorNdDescriptor", tensor_set),
    FUNCTION("cudnnDestroyTensorDescriptor", tensor_destroy),
    FUNCTION("cudnnCreateFilterDescriptor", filter_create),
    FUNCTION("cudnnSetFilterNdDescriptor", filter_set),
    FUNCTION("cudnnDestroyFilterDescriptor", filter_destroy),
    FUNCTION("cudnnCreateConvolutionDescriptor", conv_create),
    FUNCTION("cudnnSetConvolutionNdDescriptor", conv_set),
    FUNCTION("cudnnSetConvolutionGroupCount", conv_groups),
    FUNCTION("cudnnSetConvolutionMathType", conv_math),
    FUNCTION("cudnnDestroyConvolutionDescriptor", conv_destroy),
    FUNCTION("cudnnGetConvolutionForwardAlgorithm_v7", find_forward),
    FUNCTION("cudnnGetConvolutionBackwardDataAlgorithm_v7", find_grad_input),
    FUNCTION("cudnnGetConvolutionBackwardFilterAlgorithm_v7", find_grad_weight),
    FUNCTION("cudnnConvolutionForward", run_forward),
    FUNCTION("cudnnConvolutionBackwardData", run_grad_input),
    FUNCTION("cudnnConvolutionBackwardFilter", run_grad_weight),
    {NULL, NULL},
};
