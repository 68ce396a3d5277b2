/*
 * MatMul, FusedMatMul and Gemm on a device, by blas.h. Batch dims are merged as far as their strides allow. A bias (n)
 * is the epilogue; any other C is written to the result first, and the GEMM adds to it. With GELU or its gradient the
 * library has an epilogue, too, which may be slower than a kernel behind the product: the first call measures both.
 */
#include <string.h>

#include "generate.h"
#include "libs/blas.h"
#include "libs/timing.h"
#include "ops_common.h"

extern const ont_allocator *ont_cuda_allocator;

enum { EPILOGUE, APART, WAYS };

typedef struct apart { /* a product with GELU as two kernels */
    void *plan;
    ont_ew gelu;
    ont_generated *generated; /* NULL: interpreted */
    int choice;               /* of WAYS; -1: not measured yet */
} apart;

typedef struct state {
    ont_blas_gemm gemm;
    const ont_blas *blas;
    void *plan;
    ont_shape outer; /* batch dims that one call does not cover */
    int64_t stride_a[ONT_MAX_RANK], stride_b[ONT_MAX_RANK], stride_c[ONT_MAX_RANK]; /* bytes */
    int64_t count;   /* calls */
    bool empty, no_inner;
    ont_ew spread;   /* broadcasts a C that is not a bias of the result's dtype to the result */
    bool spreads;
    size_t result_bytes;
    apart *apart; /* NULL: without GELU */
} state;

typedef struct shapes {
    ont_shape a, b, batch;
    int64_t m, n, k;
    bool trans_a, trans_b;
} shapes;

/* infer() has checked the shapes. */
static ont_status read_shapes(const ont_node *node, shapes *s)
{
    const ont_shape *a = &ont_node_in(node, 0)->shape, *b = &ont_node_in(node, 1)->shape;
    s->trans_a = ont_attr_int(node, "transA", 0) && a->rank > 1;
    s->trans_b = ont_attr_int(node, "transB", 0) && b->rank > 1;
    s->a = a->rank == 1 ? ont_shape_of(2, (int64_t[]){1, a->dims[0]}) : *a;
    s->b = b->rank == 1 ? ont_shape_of(2, (int64_t[]){b->dims[0], 1}) : *b;
    const int64_t *da = s->a.dims + s->a.rank - 2, *db = s->b.dims + s->b.rank - 2;
    s->m = da[s->trans_a];
    s->k = da[!s->trans_a];
    s->n = db[!s->trans_b];
    ont_shape lead_a = ont_shape_of(s->a.rank - 2, s->a.dims), lead_b = ont_shape_of(s->b.rank - 2, s->b.dims);
    ONT_TRY(ont_shape_broadcast(&lead_a, &lead_b, &s->batch));
    /* Fold the batch dims of A into m where B is one matrix. */
    if (ont_shape_count(&lead_b) == 1 && !s->trans_a && ont_shape_count(&lead_a) == ont_shape_count(&s->batch)) {
        s->m *= ont_shape_count(&lead_a);
        s->a = ont_shape_of(2, (int64_t[]){s->m, s->k});
        s->b = ont_shape_of(2, db);
        s->batch.rank = 0;
    }
    return ONT_OK;
}

static void batch_strides(const ont_shape *operand, const ont_shape *batch, int64_t *strides)
{
    ont_shape lead = ont_shape_of(operand->rank - 2, operand->dims);
    int64_t matrix = operand->dims[operand->rank - 1] * operand->dims[operand->rank - 2];
    ont_shape_broadcast_strides(&lead, batch, strides);
    for (int d = 0; d < batch->rank; d++) strides[d] *= matrix;
}

/* One call covers the inner batch dims that form one strided batch; the outer ones are iterated over here. */
static void split_batch(const shapes *p, size_t size, size_t result_size, state *s)
{
    int64_t a[ONT_MAX_RANK], b[ONT_MAX_RANK], c[ONT_MAX_RANK], dims[ONT_MAX_RANK], matrix = p->m * p->n;
    int rank = 0;
    batch_strides(&p->a, &p->batch, a);
    batch_strides(&p->b, &p->batch, b);
    for (int d = p->batch.rank - 1; d >= 0; d--) c[d] = matrix, matrix *= p->batch.dims[d];
    for (int d = 0; d < p->batch.rank; d++) { /* merged from the left */
        int64_t n = p->batch.dims[d];
        if (n == 1) continue;
        if (rank && a[rank - 1] == a[d] * n && b[rank - 1] == b[d] * n) {
            dims[rank - 1] *= n;
            a[rank - 1] = a[d], b[rank - 1] = b[d], c[rank - 1] = c[d];
            continue;
        }
        dims[rank] = n;
        a[rank] = a[d], b[rank] = b[d], c[rank] = c[d];
        rank++;
    }
    s->gemm.batch = rank ? dims[rank - 1] : 1;
    s->gemm.stride_a = rank ? a[rank - 1] : 0;
    s->gemm.stride_b = rank ? b[rank - 1] : 0;
    s->gemm.stride_c = rank ? c[rank - 1] : 0;
    s->outer = (ont_shape){.rank = rank ? rank - 1 : 0};
    s->count = 1;
    for (int d = 0; d < s->outer.rank; d++) {
        s->outer.dims[d] = dims[d];
        s->count *= dims[d];
        s->stride_a[d] = a[d] * (int64_t)size;
        s->stride_b[d] = b[d] * (int64_t)size;
        s->stride_c[d] = c[d] * (int64_t)result_size;
    }
}

/* C of Gemm and the bias of FusedMatMul: a bias (n) with beta 1 is the library's epilogue; any other C is broadcast to
 * the result first. */
static void read_bias(const ont_node *node, state *s)
{
    const ont_value *c = ont_node_in(node, 2), *y = node->outputs[0];
    double beta = ont_attr_float(node, "beta", 1.0);
    if (!c || beta == 0) return;
    bool row =
        c->shape.rank && ont_shape_count(&c->shape) == s->gemm.n && c->shape.dims[c->shape.rank - 1] == s->gemm.n;
    if (beta == 1 && row && c->dtype == y->dtype && !s->no_inner) {
        s->gemm.epilogue = ONT_EPILOGUE_BIAS;
        return;
    }
    s->spread = (ont_ew){.n_operands = 1,
                         .n_steps = 1,
                         .n_results = 1,
                         .rank = y->shape.rank,
                         .count = ont_shape_count(&y->shape),
                         .size = {(int16_t)ont_dtype_size(c->dtype)}};
    s->spread.steps[0] =
        (ont_ew_step){.kind = ONT_EW_CAST, .in = (int16_t)c->dtype, .out = (int16_t)y->dtype, .n_operands = 1};
    for (int d = 0; d < y->shape.rank; d++) s->spread.dims[d] = y->shape.dims[d];
    ont_shape_broadcast_strides(&c->shape, &y->shape, s->spread.strides[0]);
    s->spreads = true;
    s->gemm.beta = beta;
}

/* With GELU or its gradient: (A, B, bias) -> y[, aux] and (A, B, aux) -> dx. */
static bool is_gelu(const ont_node *node)
{
    return !strncmp(node->op->name, "GeluMatMul", 10);
}

static bool is_gelu_grad(const ont_node *node)
{
    return !strcmp(node->op->name, "GeluMatMulGrad");
}

static ont_epilogue gelu_epilogue(const ont_node *node)
{
    if (is_gelu_grad(node)) return ONT_EPILOGUE_DGELU;
    return node->n_outputs > 1 && node->outputs[1] ? ONT_EPILOGUE_GELU_AUX : ONT_EPILOGUE_GELU;
}

static ont_status describe(const ont_node *node, state *s)
{
    shapes p;
    const ont_value *y = node->outputs[0];
    size_t size = ont_dtype_size(y->dtype);
    *s = (state){.blas = ont_blas_get()};
    ONT_TRY(read_shapes(node, &p));
    s->gemm = (ont_blas_gemm){.dtype = ont_node_in(node, 0)->dtype, .result = y->dtype, .trans_a = p.trans_a,
                                    .trans_b = p.trans_b, .m = p.m, .n = p.n, .k = p.k,
                                    .lda = p.a.dims[p.a.rank - 1], .ldb = p.b.dims[p.b.rank - 1], .ldc = p.n,
                                    .alpha = ont_attr_float(node, "alpha", 1.0)};
    split_batch(&p, ont_dtype_size(s->gemm.dtype), size, s);
    s->result_bytes = (size_t)ont_shape_count(&y->shape) * size;
    s->empty = !s->result_bytes;
    s->no_inner = !p.k;
    if (is_gelu(node))
        s->gemm.epilogue = gelu_epilogue(node);
    else
        read_bias(node, s);
    return ONT_OK;
}

static const char *accept(const ont_node *node)
{
    state s;
    ont_dtype d = ont_node_in(node, 0)->dtype;
    ont_dtype y = node->outputs[0]->dtype;
    if (!ont_dtype_is_float(d) || ont_node_in(node, 1)->dtype != d) return "dtype";
    if (y != d && (y != ONT_FLOAT32 || d == ONT_FLOAT64)) return "dtype of the result";
    if (describe(node, &s) != ONT_OK) return "shapes";
    if (!s.blas) return "cuBLASLt is not found";
    if (s.no_inner && s.spreads && s.gemm.beta != 1) return "beta with k = 0";
    if (s.spreads && ont_node_in(node, 2)->dtype != y && y != ONT_FLOAT32) return "dtype of what is added";
    if (s.empty || s.no_inner) return NULL;
    return s.blas->accept(&s.gemm);
}

/* One matrix; n as cuBLASLt requires for aux. */
static const char *accept_gelu(const ont_node *node)
{
    state s;
    ont_dtype d = ont_node_in(node, 0)->dtype;
    if (!ont_dtype_is_float(d) || d == ONT_FLOAT64 || ont_node_in(node, 1)->dtype != d ||
        ont_node_in(node, 2)->dtype != d)
        return "dtype";
    if (describe(node, &s) != ONT_OK) return "shapes";
    if (!s.blas) return "cuBLASLt is not found";
    if (s.empty || s.no_inner || s.count != 1 || s.gemm.batch != 1) return "a batch of matrices, or an empty result";
    return s.gemm.n % 8 ? "n is not a multiple of 8" : s.blas->accept(&s.gemm);
}

/* ---- GELU apart from the product ---- */

static void add_step(ont_ew *e, ont_ew_kind kind, int loop, ont_dtype in, ont_dtype out, int a, int b)
{
    e->steps[e->n_steps] = (ont_ew_step){.kind = (int16_t)kind, .loop = (int16_t)loop, .in = (int16_t)in,
                                         .out = (int16_t)out, .operand = {(int16_t)a, (int16_t)b},
                                         .n_operands = (int16_t)(1 + (kind == ONT_EW_BINARY))};
    e->result[0] = (int16_t)e->n_steps++;
}

/* gelu(x), or dy * gelu'(x) of the operands x and dy; 16-bit floats are computed in float32. */
static void describe_gelu(ont_ew *e, ont_dtype dtype, int64_t count, bool grad)
{
    int n = 1 + grad, loop = grad ? ONT_LOOP_GeluTanhGrad : ONT_LOOP_GeluTanh;
    ont_ew_kind kind = grad ? ONT_EW_BINARY : ONT_EW_UNARY;
    *e = (ont_ew){.n_operands = n, .n_results = 1, .rank = 1, .count = count, .dims = {count}};
    for (int k = 0; k < n; k++) {
        e->strides[k][0] = 1;
        e->size[k] = (int16_t)ont_dtype_size(dtype);
        if (dtype != ONT_FLOAT32) add_step(e, ONT_EW_CAST, 0, dtype, ONT_FLOAT32, k, 0);
    }
    int first = dtype == ONT_FLOAT32 ? 0 : n; /* the casts' results */
    add_step(e, kind, loop, ONT_FLOAT32, ONT_FLOAT32, first, first + grad);
    if (dtype != ONT_FLOAT32) add_step(e, ONT_EW_CAST, 0, ONT_FLOAT32, dtype, n + n, 0);
}

static ont_status prepare_apart(const ont_node *node, ont_arena *arena, state *s, ont_prepared *out)
{
    apart *p = s->apart = ont_arena_alloc(arena, sizeof *p);
    if (!p) return ONT_ENOMEM;
    ont_blas_gemm product = s->gemm;
    product.epilogue = is_gelu_grad(node) ? ONT_EPILOGUE_NONE : ONT_EPILOGUE_BIAS;
    *p = (apart){.choice = ont_gemm_is_deterministic() ? EPILOGUE : -1};
    describe_gelu(&p->gelu, s->gemm.dtype, s->gemm.m * s->gemm.n, is_gelu_grad(node));
    ONT_TRY(s->blas->create(&product, &p->plan));
    size_t bytes = s->blas->work_bytes(p->plan);
    if (bytes > out->work_bytes) out->work_bytes = bytes;
    return ont_generate(&p->gelu, &p->generated);
}

static ont_status run_apart(const state *s, const ont_blas_operands *x, void *stream)
{
    const apart *p = s->apart;
    bool grad = s->gemm.epilogue == ONT_EPILOGUE_DGELU;
    ont_blas_operands product = *x;
    ont_ew e = p->gelu;
    product.aux = NULL;
    if (!grad && x->aux) product.c = x->aux;
    e.in[0] = grad ? x->aux : product.c;
    e.in[1] = grad ? x->c : NULL;
    e.out[0] = x->c;
    ONT_TRY(s->blas->run(p->plan, &product, stream));
    if (p->generated && ont_generated_fits(p->generated, &e)) return ont_generated_run(p->generated, &e, stream);
    return ont_launched(ont_launch_elementwise(&e, stream));
}

typedef struct gelu_call {
    const state *s;
    const ont_blas_operands *x;
    void *stream;
} gelu_call;

static int launch_gelu(const void *context, int way)
{
    const gelu_call *c = context;
    return (way == APART ? run_apart(c->s, c->x, c->stream) : c->s->blas->run(c->s->plan, c->x, c->stream)) != ONT_OK;
}

static double measure_gelu(void *context, int way)
{
    return ont_cuda_time(launch_gelu, context, way, ((const gelu_call *)context)->stream);
}

typedef struct cache_entry {
    int64_t key[12];
    int choice;
} cache_entry;

static cache_entry entries[256];
static ont_tune_cache cache = ONT_TUNE_CACHE(entries);

/* The epilogue, until both ways have been measured; a stream that is captured cannot be waited for. */
static int choose_way(const ont_call *call, gelu_call *c)
{
    const ont_blas_gemm *g = &c->s->gemm;
    int *choice = &c->s->apart->choice, known = __atomic_load_n(choice, __ATOMIC_RELAXED);
    if (known >= 0) return known;
    cache_entry k = {.key = {g->dtype, g->trans_a, g->trans_b, g->m, g->n, g->k, g->lda, g->ldb, g->ldc, g->epilogue,
                             call->device->id, ont_cuda_allocator->tf32}};
    const cache_entry *found = ont_tune_find(&cache, k.key);
    if (!found && call->device->ops->capturing(call->device, call->stream)) return EPILOGUE;
    if (!found) {
        k.choice = ont_tune_fastest(WAYS, measure_gelu, c);
        if (k.choice < 0) return EPILOGUE;
        found = ont_tune_keep(&cache, &k);
    }
    known = found ? found->choice : k.choice;
    __atomic_store_n(choice, known, __ATOMIC_RELAXED);
    return known;
}

static ont_status run_gelu(const ont_call *call, const state *s, const ont_blas_operands *x)
{
    gelu_call c = {s, x, call->stream};
    return choose_way(call, &c) == APART ? run_apart(s, x, call->stream) : s->blas->run(s->plan, x, call->stream);
}

/* ---- a node ---- */

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(describe(node, s));
    if (!s->empty && !s->no_inner) {
        ONT_TRY(s->blas->create(&s->gemm, &s->plan));
        out->work_bytes = s->blas->work_bytes(s->plan);
        if (is_gelu(node)) ONT_TRY(prepare_apart(node, arena, s, out));
    }
    out->state = s;
    return ONT_OK;
}

static ont_status run(const ont_call *call)
{
    const state *s = call->state;
    if (s->empty) return ONT_OK;
    if (s->spreads) {
        ont_ew spread = s->spread;
        spread.in[0] = call->in[2];
        spread.out[0] = call->out[0];
        ONT_TRY(ont_launched(ont_launch_elementwise(&spread, call->stream)));
    }
    if (s->no_inner && !s->spreads)
        return call->device->ops->clear(call->device, call->out[0], s->result_bytes, call->stream);
    if (s->no_inner) return ONT_OK;
    void *third = s->gemm.epilogue != ONT_EPILOGUE_NONE ? (void *)(uintptr_t)call->in[2] : NULL;
    ont_blas_operands x = {.bias = is_gelu_grad(call->node) ? NULL : third,
                           .aux = is_gelu_grad(call->node) ? third : is_gelu(call->node) ? ont_result(call, 1) : NULL,
                           .work = call->work};
    for (int64_t i = 0; i < s->count; i++) {
        const char *a = call->in[0], *b = call->in[1];
        char *c = call->out[0];
        int64_t rest = i;
        for (int d = s->outer.rank - 1; d >= 0; d--) {
            int64_t index = rest % s->outer.dims[d];
            rest /= s->outer.dims[d];
            a += index * s->stride_a[d];
            b += index * s->stride_b[d];
            c += index * s->stride_c[d];
        }
        x.a = a;
        x.b = b;
        x.c = c;
        ONT_TRY(s->apart ? run_gelu(call, s, &x) : s->blas->run(s->plan, &x, call->stream));
    }
    return ONT_OK;
}

static void release(void *opaque)
{
    const state *s = opaque;
    if (s->plan) s->blas->destroy(s->plan);
    if (s->apart && s->apart->plan) s->blas->destroy(s->apart->plan);
    if (s->apart) ont_generated_destroy(s->apart->generated);
}

const ont_kernel ont_cuda_matmul_kernels[2] = {
    {.name = "cuda_matmul", .accept = accept, .prepare = prepare, .run = run, .release = release},
    {.name = "cuda_gelu_matmul", .accept = accept_gelu, .prepare = prepare, .run = run, .release = release},
};
