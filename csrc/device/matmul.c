/*
 * oneDNN's matmul primitive, from the library opened at run time. See matmul.h.
 */
#include "device/matmul.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <oneapi/dnnl/dnnl.h>

#include "base/alloc.h"
#include "base/parallel.h"
#include "device/library.h"

/* ---- the library's functions ---- */

#define FUNCTION_LIST(X) \
    X(engine_create) X(post_ops_append_sum) \
    X(stream_create) X(stream_destroy) X(stream_wait) X(primitive_attr_create) X(primitive_attr_destroy) \
        X(primitive_attr_set_scratchpad_mode) X(primitive_attr_set_post_ops) X(post_ops_create) X(post_ops_destroy) \
            X(post_ops_append_eltwise) X(memory_desc_create_with_strides) X(memory_desc_destroy) \
                X(memory_desc_get_size) X(memory_create) X(memory_destroy) X(memory_set_data_handle) \
                    X(primitive_desc_destroy) X(primitive_desc_query_md) X(primitive_create) X(primitive_destroy) \
                        X(primitive_execute) X(matmul_primitive_desc_create) X(get_effective_cpu_isa)

static struct {
#define X(name) __typeof__(&dnnl_##name) name;
    FUNCTION_LIST(X)
#undef X
    dnnl_engine_t engine;
    bool ready, bf16, fp16;
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
    /* The value of an instruction set has the bits of all sets that it includes. */
    unsigned isa = (unsigned)dnn.get_effective_cpu_isa();
    dnn.bf16 = (isa & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
    dnn.fp16 = (isa & dnnl_cpu_isa_avx512_core_fp16) == dnnl_cpu_isa_avx512_core_fp16;
    dnn.ready = true;
}

static ont_status check(dnnl_status_t status, const char *what)
{
    if (status == dnnl_success) return ONT_OK;
    if (status == dnnl_out_of_memory) return ont_fail(ONT_ENOMEM, "oneDNN: %s: out of memory", what);
    return ont_fail(ONT_EUNSUPPORTED, "oneDNN: %s: status %d", what, (int)status);
}

const char *ont_dnnl_matmul_refuses(ont_dtype dtype)
{
    pthread_once(&once, find_library);
    if (!dnn.ready) return "oneDNN is not found";
    if (dtype == ONT_FLOAT32 || (dtype == ONT_BFLOAT16 && dnn.bf16) || (dtype == ONT_FLOAT16 && dnn.fp16)) return NULL;
    return dtype == ONT_BFLOAT16 || dtype == ONT_FLOAT16 ? "this processor cannot multiply that dtype" : "dtype";
}

/* ---- one product ---- */

enum { TENSOR_A, TENSOR_B, TENSOR_BIAS, TENSOR_C, TENSOR_SCRATCH, N_TENSORS };

struct ont_dnnl_matmul {
    pthread_mutex_t lock; /* memory objects hold the pointers of one call */
    int threads;          /* when the primitive was created: its scratch depends on it */
    dnnl_stream_t stream;
    dnnl_primitive_attr_t attr;
    dnnl_primitive_desc_t desc;
    dnnl_primitive_t primitive;
    dnnl_memory_desc_t md[N_TENSORS]; /* without the scratchpad's, which the primitive owns */
    dnnl_memory_t memory[N_TENSORS];
    size_t work_bytes;
};

static const int argument[N_TENSORS] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DST,
                                        DNNL_ARG_SCRATCHPAD};

static dnnl_data_type_t type_of(ont_dtype dtype)
{
    return dtype == ONT_BFLOAT16 ? dnnl_bf16 : dtype == ONT_FLOAT16 ? dnnl_f16 : dnnl_f32;
}

/* The operand padded with leading ones to `rank` dims, the last two swapped where it is transposed. ld: as lda. */
static ont_status operand_desc(const ont_shape *shape, bool transposed, int rank, ont_dtype dtype, int64_t ld,
                               dnnl_memory_desc_t *desc)
{
    dnnl_dims_t dims, strides;
    int64_t stride = 1;
    for (int d = rank - 1; d >= 0; d--) {
        int at = d - (rank - shape->rank);
        dims[d] = at >= 0 ? shape->dims[at] : 1;
        strides[d] = stride;
        stride = ld && d == rank - 1 ? ld : stride * dims[d];
    }
    if (transposed) {
        int64_t dim = dims[rank - 1], step = strides[rank - 1];
        dims[rank - 1] = dims[rank - 2], strides[rank - 1] = strides[rank - 2];
        dims[rank - 2] = dim, strides[rank - 2] = step;
    }
    return check(dnn.memory_desc_create_with_strides(desc, rank, dims, type_of(dtype), strides), "memory descriptor");
}

static ont_status create_attr(ont_dnnl_matmul *h, double alpha, bool adds_to_c)
{
    ONT_TRY(check(dnn.primitive_attr_create(&h->attr), "attributes"));
    /* Scratch comes from the program's slab, so that no call allocates memory. */
    ONT_TRY(check(dnn.primitive_attr_set_scratchpad_mode(h->attr, dnnl_scratchpad_mode_user), "scratchpad"));
    if (alpha == 1 && !adds_to_c) return ONT_OK;
    dnnl_post_ops_t ops;
    ONT_TRY(check(dnn.post_ops_create(&ops), "scale"));
    dnnl_status_t status = adds_to_c ? dnn.post_ops_append_sum(ops, 1, 0, dnnl_data_type_undef)
                                     : dnn.post_ops_append_eltwise(ops, dnnl_eltwise_linear, (float)alpha, 0);
    if (status == dnnl_success) status = dnn.primitive_attr_set_post_ops(h->attr, ops);
    dnn.post_ops_destroy(ops);
    return check(status, "scale");
}

static ont_status create_in(ont_dnnl_matmul *h, const ont_matmul *m)
{
    int rank = m->c.rank;
    ONT_TRY(operand_desc(&m->a, m->trans_a, rank, m->dtype, m->lda, &h->md[TENSOR_A]));
    ONT_TRY(operand_desc(&m->b, m->trans_b, rank, m->dtype, m->ldb, &h->md[TENSOR_B]));
    ONT_TRY(operand_desc(&m->c, false, rank, m->out, m->ldc, &h->md[TENSOR_C]));
    if (m->bias) {
        ont_shape row = ont_shape_of(1, &m->c.dims[rank - 1]);
        ONT_TRY(operand_desc(&row, false, rank, m->dtype, 0, &h->md[TENSOR_BIAS]));
    }
    ONT_TRY(create_attr(h, m->alpha, m->adds_to_c));
    ONT_TRY(check(dnn.matmul_primitive_desc_create(&h->desc, dnn.engine, h->md[TENSOR_A], h->md[TENSOR_B],
                                                   h->md[TENSOR_BIAS], h->md[TENSOR_C], h->attr),
                  "product"));
    ONT_TRY(check(dnn.primitive_create(&h->primitive, h->desc), "product"));
    ONT_TRY(check(dnn.stream_create(&h->stream, dnn.engine, dnnl_stream_default_flags), "stream"));
    const_dnnl_memory_desc_t scratch = dnn.primitive_desc_query_md(h->desc, dnnl_query_scratchpad_md, 0);
    h->work_bytes = dnn.memory_desc_get_size(scratch);
    for (int i = 0; i < N_TENSORS; i++) {
        const_dnnl_memory_desc_t md = i == TENSOR_SCRATCH ? scratch : h->md[i];
        if (md) ONT_TRY(check(dnn.memory_create(&h->memory[i], md, dnn.engine, DNNL_MEMORY_NONE), "memory"));
    }
    return ONT_OK;
}

void ont_dnnl_matmul_destroy(ont_dnnl_matmul *h)
{
    if (!h) return;
    for (int i = 0; i < N_TENSORS; i++) {
        if (h->memory[i]) dnn.memory_destroy(h->memory[i]);
        if (h->md[i]) dnn.memory_desc_destroy(h->md[i]);
    }
    if (h->primitive) dnn.primitive_destroy(h->primitive);
    if (h->desc) dnn.primitive_desc_destroy(h->desc);
    if (h->attr) dnn.primitive_attr_destroy(h->attr);
    if (h->stream) dnn.stream_destroy(h->stream);
    pthread_mutex_destroy(&h->lock);
    ont_free(h);
}

ont_status ont_dnnl_matmul_create(const ont_matmul *m, ont_dnnl_matmul **result)
{
    const char *refusal = ont_dnnl_matmul_refuses(m->dtype);
    if (refusal) return ont_fail(ONT_EUNSUPPORTED, "%s", refusal);
    ont_dnnl_matmul *h = ont_calloc(1, sizeof *h);
    if (!h) return ONT_ENOMEM;
    pthread_mutex_init(&h->lock, NULL);
    h->threads = ont_parallel_threads();
    ont_status status = create_in(h, m);
    if (status != ONT_OK) {
        ont_dnnl_matmul_destroy(h);
        return status;
    }
    *result = h;
    return ONT_OK;
}

size_t ont_dnnl_matmul_work_bytes(const ont_dnnl_matmul *h)
{
    return h->work_bytes;
}

static dnnl_status_t execute(ont_dnnl_matmul *h, void *const *data)
{
    dnnl_exec_arg_t args[N_TENSORS];
    int n = 0;
    for (int i = 0; i < N_TENSORS; i++) {
        if (!h->memory[i]) continue;
        dnnl_status_t status = dnn.memory_set_data_handle(h->memory[i], data[i]);
        if (status != dnnl_success) return status;
        args[n++] = (dnnl_exec_arg_t){argument[i], h->memory[i]};
    }
    dnnl_status_t status = dnn.primitive_execute(h->primitive, h->stream, n, args);
    return status == dnnl_success ? dnn.stream_wait(h->stream) : status;
}

ont_status ont_dnnl_matmul_run(ont_dnnl_matmul *h, const void *a, const void *b, const void *bias, void *c, void *work)
{
    void *data[N_TENSORS] = {(void *)(uintptr_t)a, (void *)(uintptr_t)b, (void *)(uintptr_t)bias, c, work};
    pthread_mutex_lock(&h->lock);
    ont_omp_settings before = ont_omp_enter_library(h->threads);
    dnnl_status_t status = execute(h, data);
    ont_omp_leave_library(before);
    pthread_mutex_unlock(&h->lock);
    if (status == dnnl_success) return ONT_OK;
    return ont_fail(ONT_EINTERNAL, "oneDNN: product failed with status %d", (int)status);
}
