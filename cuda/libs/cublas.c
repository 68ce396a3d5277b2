/*
 * blas.h by cuBLASLt, opened at run time: torch's CUDA build has loaded it.
 *
 * Row-major C = A B is column-major C' = B' A' for the library: the operands are swapped, and nothing is transposed.
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <string.h>

#include "libs/blas.h"
#include "libs/cublas_lt.h"
#include "libs/symbols.h"
#include "libs/timing.h"
#include "ops_common.h"
#include "plan/plan.h"

extern const ont_allocator *ont_cuda_allocator;

enum { CANDIDATES = 8, WORKSPACE = 32 << 20 };
/* The library requires a workspace at a multiple of WORK_ALIGN; blocks of the slab are at multiples of ONT_PLAN_ALIGN.
 * ALIGNMENTS: the powers of two from 1 to that. */
enum { WORK_ALIGN = 256, ALIGNMENTS = 7 };
_Static_assert(1 << (ALIGNMENTS - 1) == (int)ONT_PLAN_ALIGN && (int)WORK_ALIGN >= (int)ONT_PLAN_ALIGN, "alignments");

static cublas_functions lt;
static void *handles[ONT_PLUGIN_DEVICES];
static bool found;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The algorithms for operands whose addresses are all multiples of one power of two. */
typedef struct proposals {
    heuristic candidates[CANDIDATES];
    int n_candidates, choice; /* -1: not chosen yet */
} proposals;

typedef struct plan {
    ont_blas_gemm gemm;
    void *handle, *desc, *a, *b, *c;
    proposals *by_alignment[ALIGNMENTS]; /* by the logarithm of the alignment; NULL until a call needs them */
    size_t workspace;
    bool f64, tf32;
    pthread_mutex_t lock; /* each call sets pointers of the descriptor and may add proposals */
} plan;

static void open_library(void)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
    static const ont_symbol symbols[] = {
#define X(member, name) {#name, offsetof(cublas_functions, member)},
        ONT_CUBLAS_FUNCTIONS(X)
#undef X
    };
    found = ont_library_open(names, sizeof names / sizeof *names, symbols, sizeof symbols / sizeof *symbols, &lt);
}

static ont_status check(int error, const char *what)
{
    return error ? ont_fail(ONT_ESTATE, "cuBLASLt, %s: status %d", what, error) : ONT_OK;
}

/* The handle of the current device. */
static ont_status handle_of_device(void **handle)
{
    int id = 0;
    if (cudaGetDevice(&id) != cudaSuccess || id < 0 || id >= ONT_PLUGIN_DEVICES)
        return ont_fail(ONT_ESTATE, "no current CUDA device");
    pthread_mutex_lock(&lock);
    ont_status status = handles[id] ? ONT_OK : check(lt.create(&handles[id]), "creating a handle");
    *handle = handles[id];
    pthread_mutex_unlock(&lock);
    return status;
}

static int type_of(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32   ? TYPE_32F
           : dtype == ONT_FLOAT64 ? TYPE_64F
           : dtype == ONT_FLOAT16 ? TYPE_16F
                                  : TYPE_16BF;
}

static int epilogue_of(const ont_blas_gemm *p)
{
    static const int numbers[] = {[ONT_EPILOGUE_NONE] = EPILOGUE_DEFAULT,
                                  [ONT_EPILOGUE_BIAS] = EPILOGUE_BIAS,
                                  [ONT_EPILOGUE_GELU] = GELU | EPILOGUE_BIAS,
                                  [ONT_EPILOGUE_GELU_AUX] = GELU | EPILOGUE_BIAS | AUX,
                                  [ONT_EPILOGUE_DGELU] = DGELU | AUX};
    return numbers[p->epilogue];
}

static ont_status create(const ont_blas_gemm *gemm, void **result);
static void destroy(void *opaque);

/* The library says whether it has a GELU epilogue for these sizes and this device; without, the pass does not fuse. */
static const char *accept(const ont_blas_gemm *p)
{
    void *plan;
    if (p->epilogue < ONT_EPILOGUE_GELU) return NULL;
    if (create(p, &plan) != ONT_OK) return "cuBLASLt has no algorithm with this epilogue";
    destroy(plan);
    return NULL;
}

static void destroy(void *opaque)
{
    plan *p = opaque;
    if (!p) return;
    if (p->a) lt.layout_destroy(p->a);
    if (p->b) lt.layout_destroy(p->b);
    if (p->c) lt.layout_destroy(p->c);
    if (p->desc) lt.desc_destroy(p->desc);
    for (int i = 0; i < ALIGNMENTS; i++) ont_free(p->by_alignment[i]);
    pthread_mutex_destroy(&p->lock);
    ont_free(p);
}

static ont_status make_layout(void **layout, int type, uint64_t rows, uint64_t columns, int64_t ld, int64_t batch,
                              int64_t stride)
{
    int32_t count = (int32_t)batch;
    ONT_TRY(check(lt.layout_create(layout, type, rows, columns, ld), "a matrix"));
    if (batch == 1) return ONT_OK;
    ONT_TRY(check(lt.layout_set(*layout, LAYOUT_BATCH_COUNT, &count, sizeof count), "the batch"));
    return check(lt.layout_set(*layout, LAYOUT_BATCH_OFFSET, &stride, sizeof stride), "the batch's stride");
}

static ont_status describe(plan *p)
{
    const ont_blas_gemm *g = &p->gemm;
    int type = type_of(g->dtype), result = type_of(g->result), epilogue = epilogue_of(g);
    int32_t op_first = g->trans_b ? OP_T : OP_N, op_second = g->trans_a ? OP_T : OP_N;
    int compute = p->f64 ? COMPUTE_64F : p->tf32 ? COMPUTE_32F_FAST_TF32 : COMPUTE_32F;
    ONT_TRY(check(lt.desc_create(&p->desc, compute, p->f64 ? TYPE_64F : TYPE_32F), "a product"));
    ONT_TRY(check(lt.desc_set(p->desc, DESC_TRANSA, &op_first, sizeof op_first), "transpose"));
    ONT_TRY(check(lt.desc_set(p->desc, DESC_TRANSB, &op_second, sizeof op_second), "transpose"));
    ONT_TRY(check(lt.desc_set(p->desc, DESC_EPILOGUE, &epilogue, sizeof epilogue), "epilogue"));
    if (g->epilogue) ONT_TRY(check(lt.desc_set(p->desc, DESC_BIAS_TYPE, &result, sizeof result), "the bias' type"));
    if (epilogue & AUX) ONT_TRY(check(lt.desc_set(p->desc, DESC_AUX_LD, &g->ldc, sizeof g->ldc), "the second matrix"));
    uint64_t m = (uint64_t)g->n, n = (uint64_t)g->m, k = (uint64_t)g->k;
    ONT_TRY(make_layout(&p->a, type, g->trans_b ? k : m, g->trans_b ? m : k, g->ldb, g->batch, g->stride_b));
    ONT_TRY(make_layout(&p->b, type, g->trans_a ? n : k, g->trans_a ? k : n, g->lda, g->batch, g->stride_a));
    return make_layout(&p->c, result, m, n, g->ldc, g->batch, g->stride_c);
}

static ont_status set_pointers(plan *p, const void *bias, const void *aux)
{
    if (bias) ONT_TRY(check(lt.desc_set(p->desc, DESC_BIAS_POINTER, &bias, sizeof bias), "the bias"));
    return aux ? check(lt.desc_set(p->desc, DESC_AUX_POINTER, &aux, sizeof aux), "the second matrix") : ONT_OK;
}

static ont_status set_preferences(void *preference, uint32_t alignment, size_t workspace)
{
    ONT_TRY(check(lt.preference_set(preference, PREFERENCE_WORKSPACE, &workspace, sizeof workspace), "preferences"));
    for (int i = PREFERENCE_ALIGNMENT_A; i <= PREFERENCE_ALIGNMENT_D; i++)
        ONT_TRY(check(lt.preference_set(preference, i, &alignment, sizeof alignment), "preferences"));
    return ONT_OK;
}

/* Leaves out the proposals that the library marks as unsupported. */
static void keep_supported(proposals *list, int n)
{
    for (int i = 0; i < n; i++)
        if (!list->candidates[i].state) list->candidates[list->n_candidates++] = list->candidates[i];
}

/* The algorithms for operands at multiples of 2^log bytes, with at most `workspace` bytes. */
static ont_status find_candidates(plan *p, int log, size_t workspace)
{
    /* the heuristic takes the alignment of bias and auxiliary matrix from their addresses */
    const void *aligned = (const void *)((uintptr_t)1 << log);
    int n = 0;
    void *preference = NULL;
    int epilogue = epilogue_of(&p->gemm);
    ONT_TRY(set_pointers(p, epilogue & EPILOGUE_BIAS ? aligned : NULL, epilogue & AUX ? aligned : NULL));
    proposals *list = ont_calloc(1, sizeof *list);
    if (!list) return ONT_ENOMEM;
    list->choice = ont_gemm_is_deterministic() ? 0 : -1;
    ont_status status = check(lt.preference_create(&preference), "preferences");
    if (status == ONT_OK) status = set_preferences(preference, 1u << log, workspace);
    if (status == ONT_OK)
        status = check(lt.find(p->handle, p->desc, p->a, p->b, p->c, p->c, preference, CANDIDATES, list->candidates,
                               &n),
                       "looking for an algorithm");
    if (preference) lt.preference_destroy(preference);
    keep_supported(list, n);
    if (status == ONT_OK && !list->n_candidates)
        status = ont_fail(ONT_EUNSUPPORTED, "cuBLASLt has no algorithm for this GEMM");
    if (status == ONT_OK)
        p->by_alignment[log] = list;
    else
        ont_free(list);
    return status;
}

/* Of the largest power of two, at most ONT_PLAN_ALIGN, that divides `address`. */
static int log_of_alignment(uintptr_t address)
{
    return __builtin_ctzll(address | ONT_PLAN_ALIGN);
}

static ont_status create(const ont_blas_gemm *gemm, void **result)
{
    plan *p = ont_calloc(1, sizeof *p);
    if (!p) return ONT_ENOMEM;
    p->gemm = *gemm;
    p->f64 = gemm->dtype == ONT_FLOAT64;
    p->tf32 = gemm->dtype == ONT_FLOAT32 && ont_cuda_allocator->tf32;
    pthread_mutex_init(&p->lock, NULL);
    ont_status status = handle_of_device(&p->handle);
    if (status == ONT_OK) status = describe(p);
    int log = log_of_alignment(ONT_PLAN_ALIGN);
    if (status == ONT_OK) status = find_candidates(p, log, WORKSPACE);
    if (status != ONT_OK) {
        destroy(p);
        return status;
    }
    const proposals *list = p->by_alignment[log];
    for (int i = 0; i < list->n_candidates; i++)
        if (list->candidates[i].workspace > p->workspace) p->workspace = list->candidates[i].workspace;
    *result = p;
    return ONT_OK;
}

static size_t work_bytes(const void *opaque)
{
    size_t bytes = ((const plan *)opaque)->workspace;
    return bytes ? bytes + WORK_ALIGN - ONT_PLAN_ALIGN : 0;
}

typedef struct call {
    plan *p;
    proposals *list; /* for the alignment of the operands */
    const ont_blas_operands *x;
    int log; /* of that alignment */
    cudaStream_t stream;
} call;

static int launch(const void *context, int candidate)
{
    const call *call = context;
    plan *p = call->p;
    const heuristic *h = &call->list->candidates[candidate];
    void *work = (void *)(((uintptr_t)call->x->work + WORK_ALIGN - 1) / WORK_ALIGN * WORK_ALIGN);
    float alpha32 = (float)p->gemm.alpha, beta32 = (float)p->gemm.beta;
    const void *alpha = p->f64 ? (const void *)&p->gemm.alpha : &alpha32,
               *beta = p->f64 ? (const void *)&p->gemm.beta : &beta32;
    return lt.matmul(p->handle, p->desc, alpha, call->x->b, p->a, call->x->a, p->b, beta, call->x->c, p->c, call->x->c,
                     p->c, &h->algo, work, h->workspace, call->stream);
}

static double measure(void *context, int candidate)
{
    return ont_cuda_time(launch, context, candidate, ((const call *)context)->stream);
}

typedef struct cache_entry {
    int64_t key[19];
    int choice;
} cache_entry;

static cache_entry entries[1024];
static ont_tune_cache cache = ONT_TUNE_CACHE(entries);

/* A GEMM with beta != 0 cannot be repeated for a measurement, and a stream that is being captured cannot synchronise:
 * the library's first proposal is used then. */
static ont_status choose(const call *call)
{
    plan *p = call->p;
    proposals *list = call->list;
    const ont_blas_gemm *g = &p->gemm;
    int id = 0;
    cudaGetDevice(&id);
    cache_entry k = {.key = {g->dtype,    g->result,   g->trans_a,   g->trans_b,  g->m,     g->n,
                             g->k,        g->lda,      g->ldb,       g->ldc,      g->batch, g->stride_a,
                             g->stride_b, g->stride_c, g->beta != 0, g->epilogue, id,       p->tf32,
                             call->log}};
    const cache_entry *known = ont_tune_find(&cache, k.key);
    list->choice = known && known->choice < list->n_candidates ? known->choice : -1;
    if (list->choice >= 0) return ONT_OK;
    enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(call->stream, &capturing);
    if (g->beta != 0 || list->n_candidates == 1 || capturing != cudaStreamCaptureStatusNone) return ONT_OK;
    k.choice = list->choice = ont_tune_fastest(list->n_candidates, measure, (void *)call);
    if (list->choice < 0) return ont_fail(ONT_EUNSUPPORTED, "none of %d algorithms can be used", list->n_candidates);
    ont_tune_keep(&cache, &k);
    return ONT_OK;
}

/* Sets the proposals for the alignment of the operands; the caller holds the lock. */
static ont_status find_proposals(call *call)
{
    plan *p = call->p;
    const ont_blas_operands *x = call->x;
    call->log = log_of_alignment((uintptr_t)x->a | (uintptr_t)x->b | (uintptr_t)x->c | (uintptr_t)x->bias |
                                 (uintptr_t)x->aux);
    if (!p->by_alignment[call->log]) ONT_TRY(find_candidates(p, call->log, p->workspace));
    call->list = p->by_alignment[call->log];
    return ONT_OK;
}

/* The chosen proposal, or the first one behind it that the library takes: it may refuse at a call what it proposed. */
static int launch_supported(const call *call)
{
    int candidate = call->list->choice < 0 ? 0 : call->list->choice, error = launch(call, candidate);
    while (error == CUBLAS_NOT_SUPPORTED && ++candidate < call->list->n_candidates) error = launch(call, candidate);
    return error;
}

static ont_status run(void *opaque, const ont_blas_operands *x, void *stream)
{
    call call = {.p = opaque, .x = x, .stream = stream};
    pthread_mutex_lock(&call.p->lock);
    ont_status status = find_proposals(&call);
    if (status == ONT_OK) status = set_pointers(call.p, x->bias, x->aux);
    if (status == ONT_OK && call.list->choice < 0) status = choose(&call);
    if (status == ONT_OK) status = check(launch_supported(&call), "a product");
    pthread_mutex_unlock(&call.p->lock);
    return status;
}

static const ont_blas cublas = {
    .name = "cuBLASLt", .accept = accept, .create = create, .work_bytes = work_bytes, .run = run, .destroy = destroy};

const ont_blas *ont_blas_get(void)
{
    pthread_once(&once, open_library);
    return found ? &cublas : NULL;
}
