/*
 * oneDNN's convolution primitives, from the library opened at run time. See conv.h.
 */
#include "device/conv.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include <oneapi/dnnl/dnnl.h>

#include "base/alloc.h"
#include "base/parallel.h"
#include "device/library.h"
#include "device/matmul.h"

/* ---- the library's functions ---- */

#define FUNCTION_LIST(X) \
    X(engine_create) X(stream_create) X(stream_destroy) X(stream_wait) X(primitive_attr_create) \
    X(primitive_attr_destroy) X(primitive_attr_set_scratchpad_mode) X(memory_desc_create_with_strides) \
    X(memory_desc_create_with_tag) \
    X(memory_desc_destroy) X(memory_desc_equal) X(memory_desc_get_size) X(memory_create) X(memory_destroy) \
    X(memory_set_data_handle) X(primitive_desc_destroy) X(primitive_desc_query_md) X(primitive_desc_query) \
    X(primitive_create) \
    X(primitive_destroy) X(primitive_execute) X(reorder_primitive_desc_create) \
    X(convolution_forward_primitive_desc_create) \
    X(convolution_backward_data_primitive_desc_create) X(convolution_backward_weights_primitive_desc_create)

static struct {
#define X(name) __typeof__(&dnnl_##name) name;
    FUNCTION_LIST(X)
#undef X
    dnnl_engine_t engine;
    dnnl_primitive_attr_t attr;
    bool ready;
} dnn;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find_library(void)
{
    void *library = ont_library_dnnl();
    if (!library) return;
#define X(name) \
    *(void **)&dnn.name = dlsym(library, "dnnl_" #name); \
    if (!dnn.name) return;
    FUNCTION_LIST(X)
#undef X
    if (dnn.engine_create(&dnn.engine, dnnl_cpu, 0) != dnnl_success) return;
    if (dnn.primitive_attr_create(&dnn.attr) != dnnl_success) return;
    /* Scratch comes from the program's slab, so that no call allocates memory. */
    dnn.ready = dnn.primitive_attr_set_scratchpad_mode(dnn.attr, dnnl_scratchpad_mode_user) == dnnl_success;
}

static ont_status check(dnnl_status_t status, const char *what)
{
    if (status == dnnl_success) return ONT_OK;
    if (status == dnnl_out_of_memory) return ont_fail(ONT_ENOMEM, "oneDNN: %s: out of memory", what);
    return ont_fail(ONT_EUNSUPPORTED, "oneDNN: %s: status %d", what, (int)status);
}

/* ---- one convolution ---- */

enum { TENSOR_X, TENSOR_W, TENSOR_Y, N_TENSORS };

typedef struct operand {
    dnnl_memory_desc_t plain;   /* row-major, as in the graph */
    dnnl_memory_t user, inner;  /* in the graph's layout; in the primitive's, NULL where it is the same */
    dnnl_primitive_t reorder;   /* between the two; NULL where they are the same */
    size_t offset, bytes;       /* of `inner` in the scratch */
} operand;

struct ont_dnnl_conv {
    ont_conv_kind kind;
    pthread_mutex_t lock; /* memory objects hold the pointers of one call */
    int threads;          /* when the primitive was created: its scratch depends on it */
    dnnl_stream_t stream;
    dnnl_primitive_desc_t hint, desc;
    dnnl_primitive_t primitive;
    operand tensors[N_TENSORS];
    dnnl_memory_desc_t bias_desc;
    dnnl_memory_t bias, scratch;
    size_t scratch_offset, work_bytes;
};

static const int argument[3][N_TENSORS] = {
    [ONT_CONV_FORWARD] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST},
    [ONT_CONV_GRAD_INPUT] = {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST},
    [ONT_CONV_GRAD_WEIGHT] = {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST},
};
static const int result_of[3] = {TENSOR_Y, TENSOR_X, TENSOR_W};
static const dnnl_query_t query[3][N_TENSORS] = {
    [ONT_CONV_FORWARD] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md},
    [ONT_CONV_GRAD_INPUT] = {dnnl_query_diff_src_md, dnnl_query_weights_md, dnnl_query_diff_dst_md},
    [ONT_CONV_GRAD_WEIGHT] = {dnnl_query_src_md, dnnl_query_diff_weights_md, dnnl_query_diff_dst_md},
};

/* Dims of x, w or y in oneDNN's order: weights of a grouped convolution have a leading dim of groups. */
static int tensor_dims(const ont_conv *c, int tensor, dnnl_dims_t dims)
{
    const int64_t *size = tensor == TENSOR_X ? c->in : tensor == TENSOR_W ? c->kernel : c->out;
    int rank = 0;
    if (tensor == TENSOR_W) {
        if (c->groups > 1) dims[rank++] = c->groups;
        dims[rank++] = c->o / c->groups;
        dims[rank++] = c->c / c->groups;
    } else {
        dims[rank++] = c->n;
        dims[rank++] = tensor == TENSOR_X ? c->c : c->o;
    }
    for (int d = 3 - c->spatial; d < 3; d++) dims[rank++] = size[d];
    return rank;
}

static dnnl_data_type_t data_type(const ont_conv *c)
{
    return c->dtype == ONT_BFLOAT16 ? dnnl_bf16 : dnnl_f32;
}

static ont_status plain_desc(const ont_conv *c, int tensor, dnnl_memory_desc_t *desc)
{
    dnnl_dims_t dims, strides;
    int rank = tensor_dims(c, tensor, dims);
    int64_t stride = 1;
    for (int d = rank - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= dims[d];
    }
    return check(dnn.memory_desc_create_with_strides(desc, rank, dims, data_type(c), strides), "memory descriptor");
}

/* md: descriptors of x, w and y. A backward primitive needs the forward descriptor as a hint. */
static ont_status create_desc(ont_dnnl_conv *h, const ont_conv *c, const dnnl_memory_desc_t *md)
{
    dnnl_dims_t strides, dilates, pad, pad_end;
    for (int d = 0; d < c->spatial; d++) {
        int from = d + 3 - c->spatial;
        strides[d] = c->stride[from];
        dilates[d] = c->dilation[from] - 1;
        pad[d] = c->pad[from];
        pad_end[d] = c->pad_end[from];
    }
    bool forward = h->kind == ONT_CONV_FORWARD;
    ONT_TRY(check(dnn.convolution_forward_primitive_desc_create(forward ? &h->desc : &h->hint, dnn.engine,
                                                                dnnl_forward_training, dnnl_convolution_direct,
                                                                md[TENSOR_X], md[TENSOR_W],
                                                                forward ? h->bias_desc : NULL, md[TENSOR_Y], strides,
                                                                dilates, pad, pad_end, dnn.attr),
                  "convolution"));
    if (h->kind == ONT_CONV_GRAD_INPUT)
        return check(dnn.convolution_backward_data_primitive_desc_create(&h->desc, dnn.engine, dnnl_convolution_direct,
                                                                         md[TENSOR_X], md[TENSOR_W], md[TENSOR_Y],
                                                                         strides, dilates, pad, pad_end, h->hint,
                                                                         dnn.attr),
                     "gradient of the input");
    if (h->kind == ONT_CONV_GRAD_WEIGHT)
        return check(dnn.convolution_backward_weights_primitive_desc_create(&h->desc, dnn.engine,
                                                                            dnnl_convolution_direct, md[TENSOR_X],
                                                                            md[TENSOR_W], NULL, md[TENSOR_Y], strides,
                                                                            dilates, pad, pad_end, h->hint, dnn.attr),
                     "gradient of the weight");
    return ONT_OK;
}

static size_t reserve(ont_dnnl_conv *h, size_t bytes)
{
    size_t at = h->work_bytes;
    h->work_bytes += (bytes + 63) & ~(size_t)63;
    return at;
}

/* Memory objects of one tensor, and the reorder between the graph's layout and the primitive's where they differ. */
static ont_status create_operand(ont_dnnl_conv *h, int tensor)
{
    operand *t = &h->tensors[tensor];
    const_dnnl_memory_desc_t inner = dnn.primitive_desc_query_md(h->desc, query[h->kind][tensor], 0);
    ONT_TRY(check(dnn.memory_create(&t->user, t->plain, dnn.engine, DNNL_MEMORY_NONE), "memory"));
    if (dnn.memory_desc_equal(inner, t->plain)) return ONT_OK;
    ONT_TRY(check(dnn.memory_create(&t->inner, inner, dnn.engine, DNNL_MEMORY_NONE), "memory"));
    t->offset = reserve(h, dnn.memory_desc_get_size(inner));
    bool result = result_of[h->kind] == tensor;
    dnnl_primitive_desc_t desc;
    ONT_TRY(check(dnn.reorder_primitive_desc_create(&desc, result ? inner : t->plain, dnn.engine,
                                                    result ? t->plain : inner, dnn.engine, NULL),
                  "reorder"));
    dnnl_status_t status = dnn.primitive_create(&t->reorder, desc);
    dnn.primitive_desc_destroy(desc);
    return check(status, "reorder");
}

/* Creates the descriptors, which is enough to know whether oneDNN supports the convolution. */
static ont_status create_descs(ont_dnnl_conv *h, const ont_conv *c, bool bias, bool blocked)
{
    dnnl_memory_desc_t md[N_TENSORS] = {0};
    ont_status status = ONT_OK;
    for (int i = 0; i < N_TENSORS && status == ONT_OK; i++) {
        dnnl_dims_t dims;
        status = plain_desc(c, i, &h->tensors[i].plain);
        if (status == ONT_OK && blocked)
            status = check(dnn.memory_desc_create_with_tag(&md[i], tensor_dims(c, i, dims), dims,
                                                           data_type(c), dnnl_format_tag_any),
                           "memory descriptor");
    }
    if (status == ONT_OK && bias)
        status = check(dnn.memory_desc_create_with_tag(&h->bias_desc, 1, (dnnl_dims_t){c->o}, data_type(c), dnnl_a),
                       "bias");
    dnnl_memory_desc_t plain[N_TENSORS] = {h->tensors[0].plain, h->tensors[1].plain, h->tensors[2].plain};
    if (status == ONT_OK) status = create_desc(h, c, blocked ? md : plain);
    for (int i = 0; i < N_TENSORS; i++)
        if (md[i]) dnn.memory_desc_destroy(md[i]);
    return status;
}

static ont_status create_in(ont_dnnl_conv *h, const ont_conv *c, bool bias, bool blocked)
{
    ONT_TRY(create_descs(h, c, bias, blocked));
    ONT_TRY(check(dnn.stream_create(&h->stream, dnn.engine, dnnl_stream_default_flags), "stream"));
    ONT_TRY(check(dnn.primitive_create(&h->primitive, h->desc), "primitive"));
    for (int i = 0; i < N_TENSORS; i++) ONT_TRY(create_operand(h, i));
    if (bias) ONT_TRY(check(dnn.memory_create(&h->bias, h->bias_desc, dnn.engine, DNNL_MEMORY_NONE), "bias"));
    const_dnnl_memory_desc_t scratch = dnn.primitive_desc_query_md(h->desc, dnnl_query_scratchpad_md, 0);
    h->scratch_offset = reserve(h, dnn.memory_desc_get_size(scratch));
    return check(dnn.memory_create(&h->scratch, scratch, dnn.engine, DNNL_MEMORY_NONE), "scratchpad");
}

static void deinit(ont_dnnl_conv *h)
{
    for (int i = 0; i < N_TENSORS; i++) {
        operand *t = &h->tensors[i];
        if (t->reorder) dnn.primitive_destroy(t->reorder);
        if (t->inner) dnn.memory_destroy(t->inner);
        if (t->user) dnn.memory_destroy(t->user);
        if (t->plain) dnn.memory_desc_destroy(t->plain);
    }
    if (h->bias) dnn.memory_destroy(h->bias);
    if (h->bias_desc) dnn.memory_desc_destroy(h->bias_desc);
    if (h->scratch) dnn.memory_destroy(h->scratch);
    if (h->primitive) dnn.primitive_destroy(h->primitive);
    if (h->desc) dnn.primitive_desc_destroy(h->desc);
    if (h->hint) dnn.primitive_desc_destroy(h->hint);
    if (h->stream) dnn.stream_destroy(h->stream);
}

void ont_dnnl_conv_destroy(ont_dnnl_conv *h)
{
    if (!h) return;
    deinit(h);
    pthread_mutex_destroy(&h->lock);
    ont_free(h);
}

size_t ont_dnnl_conv_work_bytes(const ont_dnnl_conv *h)
{
    return h->work_bytes;
}

static dnnl_status_t reorder(ont_dnnl_conv *h, operand *t, bool out)
{
    dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, out ? t->inner : t->user}, {DNNL_ARG_TO, out ? t->user : t->inner}};
    return t->reorder ? dnn.primitive_execute(t->reorder, h->stream, 2, args) : dnnl_success;
}

static dnnl_status_t execute(ont_dnnl_conv *h, const void *const *data, const void *bias, char *work)
{
    dnnl_exec_arg_t args[N_TENSORS + 2];
    int n = 0, result = result_of[h->kind];
    dnnl_status_t status = dnnl_success;
    for (int i = 0; i < N_TENSORS && status == dnnl_success; i++) {
        operand *t = &h->tensors[i];
        status = dnn.memory_set_data_handle(t->user, (void *)data[i]);
        if (status == dnnl_success && t->inner) status = dnn.memory_set_data_handle(t->inner, work + t->offset);
        if (status == dnnl_success && i != result) status = reorder(h, t, false);
        args[n++] = (dnnl_exec_arg_t){argument[h->kind][i], t->inner ? t->inner : t->user};
    }
    if (status == dnnl_success && h->bias) {
        status = dnn.memory_set_data_handle(h->bias, (void *)bias);
        args[n++] = (dnnl_exec_arg_t){DNNL_ARG_BIAS, h->bias};
    }
    if (status == dnnl_success) status = dnn.memory_set_data_handle(h->scratch, work + h->scratch_offset);
    args[n++] = (dnnl_exec_arg_t){DNNL_ARG_SCRATCHPAD, h->scratch};
    if (status == dnnl_success) status = dnn.primitive_execute(h->primitive, h->stream, n, args);
    if (status == dnnl_success) status = reorder(h, &h->tensors[result], true);
    return status == dnnl_success ? dnn.stream_wait(h->stream) : status;
}

ont_status ont_dnnl_conv_run(ont_dnnl_conv *h, const void *x, const void *w, const void *y, const void *bias,
                             void *work)
{
    pthread_mutex_lock(&h->lock);
    ont_omp_settings before = ont_omp_enter_library(h->threads);
    dnnl_status_t status = execute(h, (const void *[]){x, w, y}, bias, work);
    ont_omp_leave_library(before);
    pthread_mutex_unlock(&h->lock);
    if (status == dnnl_success) return ONT_OK;
    return ont_fail(ONT_EINTERNAL, "oneDNN: convolution failed with status %d", (int)status);
}

/* ---- layouts ---- */

/*
 * oneDNN's blocked layouts, including reorders, were faster in every measured case but one: the gradient of an input
 * with fewer than four channels, which they pad to a whole vector (64 images of 1 x 28 x 28, 32 channels: 3.8 ms,
 * against 0.5 ms row-major).
 */
static bool wants_blocked(const ont_conv *c, ont_conv_kind kind)
{
    return kind != ONT_CONV_GRAD_INPUT || c->groups > 1 || c->c >= 4;
}

/*
 * Whether oneDNN unrolls windows for a product or has only its reference for the convolution. In 16 bits, both are
 * slower than float32 (32 groups of 8 channels, 4 images of 16 x 16, the weight's gradient: 1.98 ms against 0.39).
 */
static bool is_unoptimized(const ont_dnnl_conv *h)
{
    const char *name = NULL;
    if (dnn.primitive_desc_query(h->desc, dnnl_query_impl_info_str, 0, (void *)&name) != dnnl_success) return true;
    return strstr(name, "ref") || strstr(name, "gemm");
}

const char *ont_dnnl_conv_refuses(const ont_conv *c, ont_conv_kind kind, bool bias)
{
    pthread_once(&once, find_library);
    if (!dnn.ready) return "oneDNN is not found";
    if (c->dtype != ONT_FLOAT32 && c->dtype != ONT_BFLOAT16) return "dtype";
    const char *refusal = ont_dnnl_matmul_refuses(c->dtype);
    if (refusal) return refusal;
    ont_dnnl_conv h = {.kind = kind};
    ont_status status = create_descs(&h, c, bias, wants_blocked(c, kind));
    bool slow = status == ONT_OK && c->dtype == ONT_BFLOAT16 && is_unoptimized(&h);
    deinit(&h);
    return status != ONT_OK ? "oneDNN does not support it" : slow ? "oneDNN has no fast kernel for it" : NULL;
}

ont_status ont_dnnl_conv_create(const ont_conv *c, ont_conv_kind kind, bool bias, ont_dnnl_conv **result)
{
    const char *refusal = ont_dnnl_conv_refuses(c, kind, bias);
    if (refusal) return ont_fail(ONT_EUNSUPPORTED, "%s", refusal);
    ont_dnnl_conv *h = ont_calloc(1, sizeof *h);
    if (!h) return ONT_ENOMEM;
    h->kind = kind;
    pthread_mutex_init(&h->lock, NULL);
    h->threads = ont_parallel_threads();
    ont_status status = create_in(h, c, bias, wants_blocked(c, kind));
    if (status != ONT_OK) {
        ont_dnnl_conv_destroy(h);
        return status;
    }
    *result = h;
    return ONT_OK;
}
