/*
 * cuDNN's convolutions behind dnn.h, opened at run time: PyTorch's CUDA build has them.
 *
 * Only deterministic algorithms are used. The fastest is measured at the first call of a kind of convolution.
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string.h>

#include "libs/cudnn.h"
#include "libs/cudnn_conv.h"
#include "libs/dnn.h"
#include "libs/symbols.h"
#include "libs/timing.h"
#include "ops_common.h"

extern const ont_allocator *ont_cuda_allocator;

enum { CANDIDATES = 12, WORKSPACE = 256 << 20, MOST_RANK = 5 };

static cudnn_functions dnn;
static void *handles[ONT_PLUGIN_DEVICES];
static bool found;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a handle has one stream: one call at a time */

typedef struct plan {
    ont_conv_shape shape;
    ont_conv_kind kind;
    int device, math;
    void *handle, *x, *w, *y, *conv;
    performance candidates[CANDIDATES];
    int n_candidates, choice; /* -1: not chosen yet */
    size_t workspace;
} plan;

static void open_library(void)
{
    static const char *const names[] = {"libcudnn.so.9", "libcudnn.so.8"};
    static const ont_symbol symbols[] = {
#define X(member, name) {#name, offsetof(cudnn_functions, member)},
        ONT_CUDNN_FUNCTIONS(X)
#undef X
    };
    found = ont_library_open(names, sizeof names / sizeof *names, symbols, sizeof symbols / sizeof *symbols, &dnn);
}

static ont_status check(int error, const char *what)
{
    return error ? ont_fail(ONT_ESTATE, "cuDNN, %s: status %d", what, error) : ONT_OK;
}

ont_status ont_cudnn_handle(int *id, void **handle)
{
    pthread_once(&once, open_library);
    if (!found) return ont_fail(ONT_ESTATE, "cuDNN is not found");
    if (cudaGetDevice(id) != cudaSuccess || *id < 0 || *id >= ONT_PLUGIN_DEVICES)
        return ont_fail(ONT_ESTATE, "no current CUDA device");
    pthread_mutex_lock(&lock);
    ont_status status = handles[*id] ? ONT_OK : check(dnn.create(&handles[*id]), "creating a handle");
    *handle = handles[*id];
    pthread_mutex_unlock(&lock);
    return status;
}

void ont_cudnn_lock(void)
{
    pthread_mutex_lock(&lock);
}

void ont_cudnn_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

/* cuDNN counts elements of a tensor in 32 bits. */
static const char *accept(const ont_conv_shape *s, ont_conv_kind kind)
{
    (void)kind;
    if (s->dtype == ONT_FLOAT64) return "float64";
    if (s->n * s->c * s->in_count > INT32_MAX || s->n * s->m * s->out_count > INT32_MAX)
        return "tensors of more than 2^31 elements";
    return s->m * (s->c / s->groups) * s->kernel_count > INT32_MAX ? "a weight of more than 2^31 elements" : NULL;
}

static void destroy(void *opaque)
{
    plan *p = opaque;
    if (!p) return;
    if (p->x) dnn.tensor_destroy(p->x);
    if (p->y) dnn.tensor_destroy(p->y);
    if (p->w) dnn.filter_destroy(p->w);
    if (p->conv) dnn.conv_destroy(p->conv);
    ont_free(p);
}

static int type_of(int dtype)
{
    return dtype == ONT_FLOAT32 ? DATA_FLOAT : dtype == ONT_FLOAT16 ? DATA_HALF : DATA_BFLOAT16;
}

/* (batch, channels, spatial...), with at least two spatial dims, as cuDNN requires. */
static int dims_of(int64_t lead, int64_t channels, const int64_t *spatial, int skip, int *dims, int *strides)
{
    int rank = 2 + 3 - skip, stride = 1;
    dims[0] = (int)lead;
    dims[1] = (int)channels;
    for (int d = skip; d < 3; d++) dims[2 + d - skip] = (int)spatial[d];
    for (int d = rank - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= dims[d];
    }
    return rank;
}

static ont_status describe(plan *p)
{
    const ont_conv_shape *s = &p->shape;
    int type = type_of(s->dtype), skip = s->spatial == 3 ? 0 : 1, dims[MOST_RANK], strides[MOST_RANK], pad[3],
        stride[3], dilation[3];
    for (int d = skip; d < 3; d++) {
        pad[d - skip] = (int)s->pad[d];
        stride[d - skip] = (int)s->stride[d];
        dilation[d - skip] = (int)s->dilation[d];
    }
    ONT_TRY(check(dnn.tensor_create(&p->x), "the input"));
    ONT_TRY(check(dnn.tensor_create(&p->y), "the output"));
    ONT_TRY(check(dnn.filter_create(&p->w), "the weight"));
    ONT_TRY(check(dnn.conv_create(&p->conv), "a convolution"));
    int rank = dims_of(s->n, s->c, s->in, skip, dims, strides);
    ONT_TRY(check(dnn.tensor_set(p->x, type, rank, dims, strides), "the input"));
    dims_of(s->n, s->m, s->out, skip, dims, strides);
    ONT_TRY(check(dnn.tensor_set(p->y, type, rank, dims, strides), "the output"));
    dims_of(s->m, s->c / s->groups, s->kernel, skip, dims, strides);
    ONT_TRY(check(dnn.filter_set(p->w, type, LAYOUT_NCHW, rank, dims), "the weight"));
    ONT_TRY(check(dnn.conv_set(p->conv, rank - 2, pad, stride, dilation, CROSS_CORRELATION, DATA_FLOAT),
                  "a convolution"));
    ONT_TRY(check(dnn.conv_groups(p->conv, (int)s->groups), "groups"));
    return check(dnn.conv_math(p->conv, p->math), "arithmetic");
}

/* The algorithms that can run, in cuDNN's order of expected speed. */
static ont_status find_candidates(plan *p)
{
    performance all[CANDIDATES];
    int n = 0, status;
    void *first = p->kind == ONT_CONV_GRAD_INPUT ? p->w : p->x, *last = p->kind == ONT_CONV_FORWARD      ? p->y
                                                                         : p->kind == ONT_CONV_GRAD_INPUT ? p->x
                                                                                                          : p->w;
    pthread_mutex_lock(&lock);
    status = dnn.find[p->kind](p->handle, first, p->kind == ONT_CONV_FORWARD ? p->w : p->y, p->conv, last, CANDIDATES,
                               &n, all);
    pthread_mutex_unlock(&lock);
    ONT_TRY(check(status, "looking for an algorithm"));
    for (int i = 0; i < n; i++) {
        bool may_tf32 = p->math != MATH_FMA || all[i].math == MATH_FMA || all[i].math == MATH_DEFAULT;
        if (all[i].status || all[i].determinism != DETERMINISTIC || all[i].memory > WORKSPACE || !may_tf32) continue;
        p->candidates[p->n_candidates++] = all[i];
        if (all[i].memory > p->workspace) p->workspace = all[i].memory;
    }
    return p->n_candidates ? ONT_OK
                           : ont_fail(ONT_EUNSUPPORTED, "cuDNN has no deterministic algorithm for the convolution");
}

static ont_status create(const ont_conv_shape *shape, ont_conv_kind kind, void **result)
{
    plan *p = ont_calloc(1, sizeof *p);
    if (!p) return ONT_ENOMEM;
    p->shape = *shape;
    p->kind = kind;
    p->choice = ont_gemm_is_deterministic() ? 0 : -1; /* cuDNN's first proposal; a measurement may differ every time */
    p->math = shape->dtype != ONT_FLOAT32 ? MATH_TENSOR_OP : ont_cuda_allocator->tf32_conv ? MATH_DEFAULT : MATH_FMA;
    ont_status status = ont_cudnn_handle(&p->device, &p->handle);
    if (status == ONT_OK) status = describe(p);
    if (status == ONT_OK) status = find_candidates(p);
    if (status != ONT_OK) {
        destroy(p);
        return status;
    }
    *result = p;
    return ONT_OK;
}

static size_t work_bytes(const void *opaque)
{
    return ((const plan *)opaque)->workspace;
}

typedef struct call {
    plan *p;
    void *x, *w, *y, *work;
    cudaStream_t stream;
} call;

static int launch(const void *context, int candidate)
{
    const call *c = context;
    plan *p = c->p;
    const performance *a = &p->candidates[candidate];
    const float one = 1, zero = 0;
    if (p->n_candidates > 1 || a->math != p->math) {
        int status = dnn.conv_math(p->conv, p->math == MATH_FMA ? MATH_FMA : a->math);
        if (status) return status;
    }
    switch (p->kind) {
    case ONT_CONV_FORWARD:
        return dnn.run[p->kind](p->handle, &one, p->x, c->x, p->w, c->w, p->conv, a->algorithm, c->work, a->memory,
                                &zero, p->y, c->y);
    case ONT_CONV_GRAD_INPUT:
        return dnn.run[p->kind](p->handle, &one, p->w, c->w, p->y, c->y, p->conv, a->algorithm, c->work, a->memory,
                                &zero, p->x, c->x);
    default:
        return dnn.run[p->kind](p->handle, &one, p->x, c->x, p->y, c->y, p->conv, a->algorithm, c->work, a->memory,
                                &zero, p->w, c->w);
    }
}

static double measure(void *context, int candidate)
{
    return ont_cuda_time(launch, context, candidate, ((const call *)context)->stream);
}

typedef struct cache_entry {
    struct {
        ont_conv_shape shape;
        int kind, device, math, n;
    } key;
    int choice;
} cache_entry;

static cache_entry entries[1024];
static ont_tune_cache cache = ONT_TUNE_CACHE(entries);

/* Waiting is not allowed during a graph capture: then cuDNN's first proposal is used until the next call. */
static ont_status choose(const call *call)
{
    plan *p = call->p;
    cache_entry k;
    memset(&k, 0, sizeof k);
    memcpy(&k.key.shape, &p->shape, sizeof p->shape);
    k.key.kind = p->kind;
    k.key.device = p->device;
    k.key.math = p->math;
    k.key.n = p->n_candidates;
    const cache_entry *known = ont_tune_find(&cache, &k.key);
    p->choice = known ? known->choice : -1;
    if (p->choice >= 0) return ONT_OK;
    enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(call->stream, &capturing);
    if (p->n_candidates == 1 || capturing != cudaStreamCaptureStatusNone) return ONT_OK;
    k.choice = p->choice = ont_tune_fastest(p->n_candidates, measure, (void *)call);
    if (p->choice < 0) return ont_fail(ONT_EUNSUPPORTED, "none of %d algorithms can be used", p->n_candidates);
    ont_tune_keep(&cache, &k);
    return ONT_OK;
}

static bool is_refusal(int status)
{
    return status / 1000 * 1000 == CUDNN_NOT_SUPPORTED || status == CUDNN_8_NOT_SUPPORTED;
}

/* The chosen algorithm, or the first one behind it that the library takes: it may refuse at a call what it proposed. */
static int launch_supported(const call *call)
{
    int candidate = call->p->choice < 0 ? 0 : call->p->choice, status = launch(call, candidate);
    while (is_refusal(status) && ++candidate < call->p->n_candidates) status = launch(call, candidate);
    return status;
}

static ont_status run(void *opaque, void *x, void *w, void *y, void *work, void *stream)
{
    call call = {opaque, x, w, y, work, stream};
    pthread_mutex_lock(&lock);
    ont_status status = check(dnn.set_stream(call.p->handle, call.stream), "a stream");
    if (status == ONT_OK && call.p->choice < 0) status = choose(&call);
    if (status == ONT_OK) status = check(launch_supported(&call), "a convolution");
    pthread_mutex_unlock(&lock);
    return status;
}

static const ont_dnn cudnn = {
    .name = "cuDNN", .accept = accept, .create = create, .work_bytes = work_bytes, .run = run, .destroy = destroy};

const ont_dnn *ont_dnn_get(void)
{
    pthread_once(&once, open_library);
    return found ? &cudnn : NULL;
}
