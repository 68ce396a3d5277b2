/*
 * cuBLASLt of the emulated device, called by libs/cublas.c: products in double, and the rules that NVIDIA's
 * documentation has for a caller (contract.h). Some of what it proposes it marks as unsupported, and some it refuses
 * when it is called, as the library may.
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "libs/cublas_lt.h"
#include "emulate/contract.h"
#include "emulate/devices.h"
#include "emulate/values.h"

enum { HANDLE = 0x4c740001, PRODUCT, MATRIX, PREFERENCE, ALGORITHM }; /* first members: what an address refers to */
enum { WORK_ALIGN = 256, DEFAULT_ALIGN = 256, MOST_WORK = 6000, MOST_PROPOSALS = 4, UNSET = -1 };
enum { A, B, C, D, BIAS, AUXILIARY, OPERANDS };
static const char *const names[OPERANDS] = {"A", "B", "C", "D", "the bias", "the auxiliary matrix"};

typedef struct handle {
    int kind, device;
} handle;

typedef struct product {
    int kind, compute, scale, epilogue, bias_type;
    int32_t trans_a, trans_b, unused; /* no padding: a product is compared by its bytes */
    int64_t aux_ld;
    void *bias, *aux; /* last: no part of what an algorithm is for */
} product;

typedef struct matrix {
    int kind, type;
    uint64_t rows, columns;
    int64_t ld, stride;
    int32_t batch, unused;
} matrix;

typedef struct preference {
    int kind;
    size_t workspace;
    uint32_t alignment[4];
} preference;

/* What a product is: the descriptors of one call, without its pointers. */
typedef struct problem {
    product p;
    matrix m[4]; /* A, B, C, D */
} problem;

/* What the 64 bytes of an algorithm hold. */
typedef struct choice {
    uint64_t kind, problem, workspace;
    uint16_t alignment[OPERANDS]; /* of the operands, as the caller promised */
    bool refuses;
} choice;
_Static_assert(sizeof(choice) <= sizeof(algorithm), "an algorithm");

#define CHECKED(type, kind_of_it, opaque, what) \
    type *what = opaque; \
    ONT_REQUIRE(what && what->kind == (kind_of_it), "cuBLASLt: not a %s", #what)

static void *fresh(size_t bytes, int kind)
{
    int *made = calloc(1, bytes);
    ONT_REQUIRE(made, "out of memory");
    *made = kind;
    return made;
}

static int create(void **made)
{
    ont_emulate_outside_capture("cublasLtCreate");
    handle *h = fresh(sizeof *h, HANDLE);
    h->device = ont_emulate_device();
    *made = h;
    return CUBLAS_SUCCESS;
}

static void check_handle(void *opaque, const char *function)
{
    CHECKED(handle, HANDLE, opaque, h);
    ONT_REQUIRE(h->device == ont_emulate_device(), "%s: a handle of device %d, but device %d is current", function,
                h->device, ont_emulate_device());
}

static int destroy(void *made, int kind)
{
    ONT_REQUIRE(*(int *)made == kind, "cuBLASLt: a destroy function of another kind of object");
    free(made);
    return CUBLAS_SUCCESS;
}

/* ---- descriptors ---- */

static int desc_create(void **desc, int compute, int scale)
{
    bool known = (compute == COMPUTE_64F && scale == TYPE_64F) ||
                 ((compute == COMPUTE_32F || compute == COMPUTE_32F_FAST_TF32) && scale == TYPE_32F);
    ONT_REQUIRE(known, "cublasLtMatmulDescCreate: compute type %d with scale type %d", compute, scale);
    product *p = fresh(sizeof *p, PRODUCT);
    p->compute = compute;
    p->scale = scale;
    p->epilogue = EPILOGUE_DEFAULT;
    p->bias_type = UNSET;
    *desc = p;
    return CUBLAS_SUCCESS;
}

static int desc_destroy(void *desc)
{
    return destroy(desc, PRODUCT);
}

typedef struct attribute {
    int number;
    size_t size;
    void *place;
} attribute;

static int set(const attribute *attributes, size_t n, int number, const void *value, size_t size, const char *call)
{
    const attribute *a = attributes;
    while (a < attributes + n && a->number != number) a++;
    ONT_REQUIRE(a < attributes + n, "%s: attribute %d", call, number);
    ONT_REQUIRE(size == a->size, "%s: attribute %d has %zu bytes, not %zu", call, number, a->size, size);
    memcpy(a->place, value, size);
    return CUBLAS_SUCCESS;
}
#define SET(call) set(attributes, sizeof attributes / sizeof *attributes, number, value, size, call)

static int desc_set(void *desc, int number, const void *value, size_t size)
{
    CHECKED(product, PRODUCT, desc, p);
    const attribute attributes[] = {
        {DESC_TRANSA, 4, &p->trans_a},       {DESC_TRANSB, 4, &p->trans_b}, {DESC_EPILOGUE, 4, &p->epilogue},
        {DESC_BIAS_POINTER, 8, &p->bias},    {DESC_BIAS_TYPE, 4, &p->bias_type},
        {DESC_AUX_POINTER, 8, &p->aux},      {DESC_AUX_LD, 8, &p->aux_ld},
    };
    return SET("cublasLtMatmulDescSetAttribute");
}

static int layout_create(void **layout, int type, uint64_t rows, uint64_t columns, int64_t ld)
{
    bool known = type == TYPE_32F || type == TYPE_64F || type == TYPE_16F || type == TYPE_16BF;
    ONT_REQUIRE(known, "cublasLtMatrixLayoutCreate: type %d", type);
    ONT_REQUIRE(rows && columns && ld > 0 && (uint64_t)ld >= rows,
                "cublasLtMatrixLayoutCreate: %llu rows, %llu columns, leading dimension %lld",
                (unsigned long long)rows, (unsigned long long)columns, (long long)ld);
    matrix *m = fresh(sizeof *m, MATRIX);
    m->type = type;
    m->rows = rows;
    m->columns = columns;
    m->ld = ld;
    m->batch = 1;
    *layout = m;
    return CUBLAS_SUCCESS;
}

static int layout_destroy(void *layout)
{
    return destroy(layout, MATRIX);
}

static int layout_set(void *layout, int number, const void *value, size_t size)
{
    CHECKED(matrix, MATRIX, layout, m);
    const attribute attributes[] = {{LAYOUT_BATCH_COUNT, 4, &m->batch}, {LAYOUT_BATCH_OFFSET, 8, &m->stride}};
    return SET("cublasLtMatrixLayoutSetAttribute");
}

static int preference_create(void **made)
{
    preference *p = fresh(sizeof *p, PREFERENCE);
    for (int i = 0; i < 4; i++) p->alignment[i] = DEFAULT_ALIGN;
    *made = p;
    return CUBLAS_SUCCESS;
}

static int preference_destroy(void *made)
{
    return destroy(made, PREFERENCE);
}

static int preference_set(void *made, int number, const void *value, size_t size)
{
    CHECKED(preference, PREFERENCE, made, p);
    const attribute attributes[] = {{PREFERENCE_WORKSPACE, 8, &p->workspace},
                                    {PREFERENCE_ALIGNMENT_A, 4, p->alignment},
                                    {PREFERENCE_ALIGNMENT_A + 1, 4, p->alignment + 1},
                                    {PREFERENCE_ALIGNMENT_A + 2, 4, p->alignment + 2},
                                    {PREFERENCE_ALIGNMENT_D, 4, p->alignment + 3}};
    int status = SET("cublasLtMatmulPreferenceSetAttribute");
    for (int i = 0; i < 4; i++)
        ONT_REQUIRE(p->alignment[i] && !(p->alignment[i] & (p->alignment[i] - 1)),
                    "cublasLtMatmulPreferenceSetAttribute: alignment %u", p->alignment[i]);
    return status;
}

/* ---- what a problem must be ---- */

static bool is_same(const matrix *a, const matrix *b)
{
    return a->type == b->type && a->rows == b->rows && a->columns == b->columns && a->batch == b->batch;
}

static void check_shapes(const problem *q, const char *call)
{
    const matrix *m = q->m;
    uint64_t rows = q->p.trans_a ? m[A].columns : m[A].rows, inner = q->p.trans_a ? m[A].rows : m[A].columns;
    uint64_t inner_b = q->p.trans_b ? m[B].columns : m[B].rows, columns = q->p.trans_b ? m[B].rows : m[B].columns;
    ONT_REQUIRE(inner == inner_b && rows == m[D].rows && columns == m[D].columns,
                "%s: A has %llu x %llu, B %llu x %llu, D %llu x %llu", call, (unsigned long long)rows,
                (unsigned long long)inner, (unsigned long long)inner_b, (unsigned long long)columns,
                (unsigned long long)m[D].rows, (unsigned long long)m[D].columns);
    ONT_REQUIRE(is_same(&m[C], &m[D]), "%s: C is not as D", call);
    for (int i = 0; i < 4; i++)
        ONT_REQUIRE(m[i].batch == m[D].batch && m[i].batch > 0, "%s: %s has a batch of %d, and D of %d", call,
                    names[i], m[i].batch, m[D].batch);
    ONT_REQUIRE(m[D].batch == 1 || (uint64_t)m[D].stride >= (m[D].columns - 1) * (uint64_t)m[D].ld + m[D].rows,
                "%s: the matrices of D overlap", call);
}

static void check_types(const problem *q, const char *call)
{
    int type = q->m[A].type, result = q->m[D].type;
    bool is_16 = type == TYPE_16F || type == TYPE_16BF;
    bool fine = q->p.compute == COMPUTE_64F   ? type == TYPE_64F
                : q->p.compute == COMPUTE_32F ? is_16 || type == TYPE_32F
                                              : type == TYPE_32F;
    fine = fine && q->m[B].type == type && (result == type || (is_16 && result == TYPE_32F));
    ONT_REQUIRE(fine, "%s: types %d, %d to %d with compute type %d", call, type, q->m[B].type, result, q->p.compute);
}

static void check_epilogue(const problem *q, const char *call)
{
    static const int known[] = {EPILOGUE_DEFAULT, EPILOGUE_BIAS, GELU | EPILOGUE_BIAS, GELU | EPILOGUE_BIAS | AUX,
                                DGELU | AUX};
    const product *p = &q->p;
    bool fine = false;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) fine = fine || p->epilogue == known[i];
    ONT_REQUIRE(fine, "%s: epilogue %d", call, p->epilogue);
    ONT_REQUIRE(!(p->epilogue & EPILOGUE_BIAS) || p->bias_type == UNSET || p->bias_type == q->m[D].type,
                "%s: a bias of type %d for a result of type %d", call, p->bias_type, q->m[D].type);
    if (!(p->epilogue & AUX)) return;
    ONT_REQUIRE(p->aux_ld % 8 == 0 && (uint64_t)p->aux_ld >= q->m[D].rows,
                "%s: leading dimension %lld of the auxiliary matrix, which has %llu rows", call, (long long)p->aux_ld,
                (unsigned long long)q->m[D].rows);
    ONT_REQUIRE(q->m[D].batch == 1, "%s: one auxiliary matrix for a batch", call);
}

static problem read_problem(void *desc, void *const *layouts, const char *call)
{
    CHECKED(product, PRODUCT, desc, p);
    problem q;
    memset(&q, 0, sizeof q);
    q.p = *p;
    for (int i = 0; i < 4; i++) {
        CHECKED(matrix, MATRIX, layouts[i], layout);
        q.m[i] = *layout;
    }
    check_shapes(&q, call);
    check_types(&q, call);
    check_epilogue(&q, call);
    return q;
}

static uint64_t key_of(problem q)
{
    q.p.bias = q.p.aux = NULL;
    return ont_emulate_key(&q, sizeof q);
}

static uint16_t alignment_of(const void *address)
{
    uintptr_t bits = (uintptr_t)address | DEFAULT_ALIGN;
    return (uint16_t)(bits & -bits);
}

/* ---- proposals ---- */

static heuristic propose(const problem *q, const preference *wants, uint64_t *random, bool must_run)
{
    heuristic h;
    choice c = {.kind = ALGORITHM, .problem = key_of(*q)};
    uint64_t drawn = ont_emulate_random(random);
    memset(&h, 0xff, sizeof h); /* where the state says unsupported, nothing else is valid */
    h.state = !must_run && drawn % 4 == 0 ? CUBLAS_NOT_SUPPORTED : CUBLAS_SUCCESS;
    if (h.state) return h;
    c.refuses = !must_run && drawn % 4 == 1;
    c.workspace = drawn >> 8 & 1 ? (drawn >> 16) % MOST_WORK : 0;
    if (c.workspace > wants->workspace) c.workspace = wants->workspace;
    for (int i = A; i <= D; i++) c.alignment[i] = (uint16_t)(wants->alignment[i] > 256 ? 256 : wants->alignment[i]);
    c.alignment[BIAS] = alignment_of(q->p.bias); /* the addresses say how operands of a call will be aligned */
    c.alignment[AUXILIARY] = alignment_of(q->p.aux);
    memcpy(&h.algo, &c, sizeof c);
    h.workspace = c.workspace;
    h.waves = 1;
    return h;
}

static int find(void *of_device, void *desc, void *a, void *b, void *c, void *d, void *preferences, int wanted,
                heuristic *found, int *n)
{
    const char *call = "cublasLtMatmulAlgoGetHeuristic";
    problem q = read_problem(desc, (void *[]){a, b, c, d}, call);
    CHECKED(preference, PREFERENCE, preferences, wants);
    check_handle(of_device, call);
    ONT_REQUIRE(wanted > 0, "%s: no place", call);
    *n = 0;
    if (q.p.epilogue >= GELU && q.p.compute == COMPUTE_64F) return CUBLAS_NOT_SUPPORTED;
    uint64_t random = key_of(q) + wants->alignment[A];
    int count = 1 + (int)(ont_emulate_random(&random) % MOST_PROPOSALS);
    int works = (int)(ont_emulate_random(&random) % (uint64_t)count); /* this one always does */
    for (int i = 0; i < count && i < wanted; i++)
        found[(*n)++] = propose(&q, wants, &random, i == works || works >= wanted);
    return CUBLAS_SUCCESS;
}

/* ---- a product ---- */

typedef struct call {
    problem q;
    const void *a, *b, *c;
    void *d, *work;
    size_t work_bytes;
    double alpha, beta;
} call;

static ont_dtype dtype_of(int type)
{
    return type == TYPE_32F ? ONT_FLOAT32 : type == TYPE_64F ? ONT_FLOAT64 : type == TYPE_16F ? ONT_FLOAT16
                                                                                              : ONT_BFLOAT16;
}

/* Matrix `o` of a batch as (n, k) with k contiguous; transposed: it is stored so. */
static double *unpack(const matrix *m, const void *data, int32_t o, bool stored, bool tf32)
{
    int64_t n = (int64_t)(stored ? m->columns : m->rows), k = (int64_t)(stored ? m->rows : m->columns);
    double *all = malloc((size_t)(n * k) * sizeof *all);
    ONT_REQUIRE(all, "out of memory");
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < k; j++) {
            int64_t at = o * m->stride + (stored ? i * m->ld + j : j * m->ld + i);
            double value = ont_emulate_get(dtype_of(m->type), data, at);
            all[i * k + j] = tf32 ? ont_emulate_round_to_tf32(value) : value;
        }
    return all;
}

static double gelu(double x, bool slope)
{
    double t = tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x));
    if (!slope) return 0.5 * x * (1 + t);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286535588 * (1 + 3 * 0.044715 * x * x);
}

static double apply_epilogue(const call *call, int64_t row, int64_t column, double value)
{
    const product *p = &call->q.p;
    ont_dtype type = dtype_of(call->q.m[D].type);
    int64_t at = column * p->aux_ld + row;
    if (p->epilogue & DGELU) return value * gelu(ont_emulate_get(type, p->aux, at), true);
    if (p->epilogue & EPILOGUE_BIAS) value += ont_emulate_get(type, p->bias, row);
    if (p->epilogue & AUX) ont_emulate_put(type, p->aux, at, value);
    return p->epilogue & GELU ? gelu(value, false) : value;
}

static void multiply_one(const call *call, int32_t o)
{
    const problem *q = &call->q;
    const matrix *d = &q->m[D];
    bool tf32 = q->p.compute == COMPUTE_32F_FAST_TF32;
    double *a = unpack(&q->m[A], call->a, o, q->p.trans_a, tf32);
    double *b = unpack(&q->m[B], call->b, o, !q->p.trans_b, tf32);
    int64_t inner = (int64_t)(q->p.trans_a ? q->m[A].rows : q->m[A].columns);
    for (int64_t j = 0; j < (int64_t)d->columns; j++)
        for (int64_t i = 0; i < (int64_t)d->rows; i++) {
            double sum = 0;
            for (int64_t k = 0; k < inner; k++) sum += a[i * inner + k] * b[j * inner + k];
            int64_t to = o * d->stride + j * d->ld + i, from = o * q->m[C].stride + j * q->m[C].ld + i;
            sum *= call->alpha;
            if (call->beta != 0) sum += call->beta * ont_emulate_get(dtype_of(d->type), call->c, from);
            ont_emulate_put(dtype_of(d->type), call->d, to, apply_epilogue(call, i, j, sum));
        }
    free(a);
    free(b);
}

static int multiply(void *context)
{
    const call *call = context;
    ont_emulate_begin_work("cublasLtMatmul");
    if (call->q.p.epilogue & (GELU | DGELU)) ont_emulate_note_epilogue();
    if (call->work_bytes) memset(call->work, 0x7f, call->work_bytes); /* as the library, which writes to all of it */
    for (int32_t o = 0; o < call->q.m[D].batch; o++) multiply_one(call, o);
    ont_emulate_end_work();
    return 0;
}

/* ---- rules of a call ---- */

typedef struct range {
    uintptr_t begin, end;
} range;

static range range_of(const matrix *m, const void *data)
{
    size_t size = m->type == TYPE_64F ? 8 : m->type == TYPE_32F ? 4 : 2;
    uint64_t one = (m->columns - 1) * (uint64_t)m->ld + m->rows, rest = (uint64_t)(m->batch - 1) * (uint64_t)m->stride;
    return (range){(uintptr_t)data, (uintptr_t)data + (one + rest) * size};
}

static void check_apart(range one, range other, const char *name)
{
    ONT_REQUIRE(one.end <= other.begin || other.end <= one.begin, "cublasLtMatmul: D overlaps %s", name);
}

static void check_operands(const call *call, const choice *chosen)
{
    const product *p = &call->q.p;
    const void *addresses[OPERANDS] = {call->a, call->b, call->c, call->d, p->epilogue & EPILOGUE_BIAS ? p->bias : NULL,
                                       p->epilogue & AUX ? p->aux : NULL};
    bool used[OPERANDS] = {true, true, true, true, p->epilogue & EPILOGUE_BIAS, p->epilogue & AUX};
    for (int i = 0; i < OPERANDS; i++) {
        ONT_REQUIRE(addresses[i] || !used[i], "cublasLtMatmul: no %s", names[i]);
        ONT_REQUIRE((uintptr_t)addresses[i] % chosen->alignment[i] == 0 || !used[i],
                    "cublasLtMatmul: %s at %p is not aligned to %d bytes, as the heuristic was told", names[i],
                    addresses[i], chosen->alignment[i]);
    }
    range d = range_of(&call->q.m[D], call->d);
    check_apart(d, range_of(&call->q.m[A], call->a), "A");
    check_apart(d, range_of(&call->q.m[B], call->b), "B");
    if (call->work_bytes)
        check_apart(d, (range){(uintptr_t)call->work, (uintptr_t)call->work + call->work_bytes}, "the workspace");
    if (call->c != call->d || call->q.m[C].ld != call->q.m[D].ld || call->q.m[C].stride != call->q.m[D].stride)
        check_apart(d, range_of(&call->q.m[C], call->c), "C, and is not the same");
}

static const choice *read_choice(const algorithm *algo, const problem *q, size_t work_bytes, const void *work)
{
    const choice *c = (const void *)algo;
    ONT_REQUIRE(algo && c->kind == ALGORITHM, "cublasLtMatmul: an algorithm that no heuristic has given");
    ONT_REQUIRE(c->problem == key_of(*q), "cublasLtMatmul: an algorithm for another product");
    ONT_REQUIRE(work_bytes >= c->workspace, "cublasLtMatmul: %zu bytes of workspace, and the algorithm needs %zu",
                work_bytes, (size_t)c->workspace);
    ONT_REQUIRE(!work_bytes || (work && (uintptr_t)work % WORK_ALIGN == 0),
                "cublasLtMatmul: a workspace at %p, which is not a multiple of %d", work, WORK_ALIGN);
    return c;
}

static int matmul(void *of_device, void *desc, const void *alpha, const void *a, void *la, const void *b, void *lb,
                  const void *beta, const void *c, void *lc, void *d, void *ld, const algorithm *algo, void *work,
                  size_t work_bytes, cudaStream_t stream)
{
    bool wide;
    ont_emulate_check_stream("cublasLtMatmul", stream);
    check_handle(of_device, "cublasLtMatmul");
    call now = {.q = read_problem(desc, (void *[]){la, lb, lc, ld}, "cublasLtMatmul"), .a = a, .b = b, .c = c, .d = d,
                .work = work, .work_bytes = work_bytes};
    wide = now.q.p.scale == TYPE_64F;
    now.alpha = wide ? *(const double *)alpha : (double)*(const float *)alpha;
    now.beta = wide ? *(const double *)beta : (double)*(const float *)beta;
    const choice *chosen = read_choice(algo, &now.q, work_bytes, work);
    check_operands(&now, chosen);
    if (chosen->refuses) return CUBLAS_NOT_SUPPORTED;
    if (!ont_emulate_recording()) return multiply(&now);
    call *kept = malloc(sizeof *kept);
    ONT_REQUIRE(kept, "out of memory");
    *kept = now;
    return ont_emulate_record(multiply, kept, free);
}

const ont_emulate_function ont_emulate_cublas[] = {
#define X(member, name) {#name, (void (*)(void))member},
    ONT_CUBLAS_FUNCTIONS(X)
#undef X
    {NULL, NULL},
};
