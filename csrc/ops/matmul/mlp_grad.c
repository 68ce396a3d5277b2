/*
 * MlpGrad. See mlp_grad.h. Products run on the fastest implementation for the shape of a tile (device/gemm.h); only the
 * row gradients need one that adds to its result.
 */
#include "ops/matmul/mlp_grad.h"

#include <string.h>

#include "base/assert.h"
#include "base/int_math.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "device/gemm_native.h"

enum {
    TILES = 8,       /* of the hidden columns, unless that makes them narrower than COLUMNS */
    COLUMNS = 256,   /* of a tile, at least: a GEMM of fewer is slower */
    ROUND = 16,      /* whole vectors */
    WIDTHS = 2,      /* of tiles: all but the last one, and the last one */
    ELEMENTS = 8192, /* of the elementwise program that are worth a thread */
};

/* ---- attributes ---- */

typedef struct list {
    const char *name;
    int64_t *count, *first;
    int64_t width, most;
} list;

enum { N_LISTS = 4 };

static void lists_of(ont_mlp *m, list *lists)
{
    const list all[N_LISTS] = {
        {"products", &m->n_products, &m->products[0].left, 4, ONT_MLP_PRODUCTS},
        {"weight_grads", &m->n_weight_grads, &m->weight_grads[0].result, 3, ONT_MLP_WEIGHT_GRADS},
        {"row_grads", &m->n_row_grads, &m->row_grads[0].result, 3, ONT_MLP_ROW_GRADS},
        {"sums", &m->n_sums, m->sums, 1, ONT_MLP_SUMS},
    };
    memcpy(lists, all, sizeof all);
}

ont_status ont_mlp_write(ont_graph *g, ont_node *node, const ont_mlp *m)
{
    ont_mlp copy = *m;
    list lists[N_LISTS];
    lists_of(&copy, lists);
    for (int i = 0; i < N_LISTS; i++)
        ONT_TRY(ont_attr_set_ints(g, node, lists[i].name, lists[i].first, (size_t)(*lists[i].count * lists[i].width)));
    return ont_attr_set_int(g, node, "first_operand", m->first_operand);
}

static ont_status read_lists(const ont_node *node, ont_mlp *m)
{
    list lists[N_LISTS];
    *m = (ont_mlp){.first_operand = ont_attr_int(node, "first_operand", 0)};
    lists_of(m, lists);
    for (int i = 0; i < N_LISTS; i++) {
        size_t n;
        const int64_t *values = ont_attr_ints(node, lists[i].name, &n);
        *lists[i].count = (int64_t)n / lists[i].width;
        if (*lists[i].count > lists[i].most || (int64_t)n % lists[i].width)
            return ont_fail(ONT_EINVAL, "attribute '%s' has %zu entries", lists[i].name, n);
        if (n) memcpy(lists[i].first, values, n * sizeof *values);
    }
    return ONT_OK;
}

/* ---- shapes ---- */

static const ont_value *weight_of(const ont_node *node, const ont_mlp *m, int i)
{
    return ont_node_in(node, (uint32_t)m->products[i].weight);
}

/* Number of hidden columns. */
static int64_t columns_of(const ont_node *node, const ont_mlp *m)
{
    return weight_of(node, m, 0)->shape.dims[!m->products[0].transposed];
}

/* Whether `v` is a matrix (k, columns), or the other way round. */
static bool is_weight(const ont_value *v, int64_t k, int64_t columns, bool columns_first)
{
    return v && v->shape.rank == 2 && v->shape.dims[!columns_first] == columns && v->shape.dims[columns_first] == k;
}

static ont_status check_inputs(const ont_node *node, const ont_mlp *m)
{
    const ont_value *x = ont_node_in(node, ONT_MLP_X), *dy = ont_node_in(node, ONT_MLP_DY);
    bool valid = x && dy && m->n_products > 0 && m->first_operand > ONT_MLP_WEIGHTS &&
                 m->first_operand <= (int64_t)node->n_inputs && ont_last_dim(x) > 0 && ont_last_dim(dy) > 0;
    for (uint32_t i = 0; valid && i < node->n_inputs; i++) valid = ont_node_in(node, i) != NULL;
    valid = valid && x->dtype == dy->dtype && ont_shape_count(&x->shape) > 0 &&
            ont_shape_count(&x->shape) / ont_last_dim(x) == ont_shape_count(&dy->shape) / ont_last_dim(dy);
    for (int64_t i = 0; valid && i < m->n_products; i++) {
        valid = m->products[i].weight < m->first_operand && m->products[i].bias < m->first_operand &&
                weight_of(node, m, (int)i)->shape.rank == 2;
        if (!valid) break;
        const ont_value *left = ont_node_in(node, (uint32_t)m->products[i].left), *w = weight_of(node, m, (int)i);
        valid = w->dtype == x->dtype &&
                is_weight(w, ont_last_dim(left), columns_of(node, m), m->products[i].transposed);
        const ont_value *bias = ont_node_in(node, (uint32_t)m->products[i].bias);
        if (valid && m->products[i].bias)
            valid = ont_shape_count(&bias->shape) == columns_of(node, m) && bias->dtype == x->dtype;
    }
    for (uint32_t i = (uint32_t)m->first_operand; valid && i < node->n_inputs; i++) {
        const ont_value *v = ont_node_in(node, i);
        int64_t count = ont_shape_count(&v->shape);
        valid = count == 1 || (count == columns_of(node, m) && ont_last_dim(v) == count);
    }
    return valid && columns_of(node, m) > 0 ? ONT_OK : ont_fail(ONT_EINVAL, "operands do not fit the products");
}

/* Whether results exist and have the dtype of X, where products and sums read them. */
static bool results_fit(const ont_node *node, const ont_mlp *m, const ont_tile_program *p)
{
    ont_dtype dtype = ont_node_in(node, ONT_MLP_X)->dtype;
    bool fit = true;
    for (int64_t i = 0; i < m->n_weight_grads; i++) fit &= m->weight_grads[i].result < p->n_results;
    for (int64_t i = 0; i < m->n_row_grads; i++) fit &= m->row_grads[i].result < p->n_results;
    for (int64_t i = 0; i < m->n_sums; i++) fit &= m->sums[i] < p->n_results;
    for (int k = 0; k < p->n_results; k++) fit &= p->steps[p->result[k]].out == dtype;
    return fit;
}

static ont_status read_node(const ont_node *node, ont_mlp *m, ont_tile_program *p)
{
    const ont_value *operands[ONT_TILE_OPERANDS];
    uint32_t n = 0;
    ONT_TRY(read_lists(node, m));
    ONT_TRY(check_inputs(node, m));
    for (int i = 0; i < m->n_products; i++) operands[n++] = weight_of(node, m, i);
    for (uint32_t i = (uint32_t)m->first_operand; i < node->n_inputs && n < ONT_TILE_OPERANDS; i++)
        operands[n++] = ont_node_in(node, i);
    ONT_TRY(ont_tile_read_over(node, operands, n, p));
    return results_fit(node, m, p) ? ONT_OK : ont_fail(ONT_EINVAL, "the program has other results");
}

static ont_status mlp_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_mlp m;
    ont_tile_program p;
    ONT_TRY(read_node(node, &m, &p));
    const ont_value *x = ont_node_in(node, ONT_MLP_X);
    int64_t columns = columns_of(node, &m);
    uint32_t at = 0;
    for (int64_t i = 0; i < m.n_row_grads; i++)
        if (!is_weight(ont_node_in(node, (uint32_t)m.row_grads[i].weight), ont_last_dim(x), columns,
                       !m.row_grads[i].transposed))
            return ont_fail(ONT_EINVAL, "the weight of a row gradient does not fit X");
    ONT_TRY(ont_infer_out(node, at++, x->dtype, &x->shape));
    for (int64_t i = 0; i < m.n_weight_grads; i++) {
        int64_t k = ont_last_dim(ont_node_in(node, (uint32_t)m.weight_grads[i].left));
        bool transposed = m.weight_grads[i].transposed;
        ont_shape shape = ont_shape_of(2, (int64_t[]){transposed ? columns : k, transposed ? k : columns});
        ONT_TRY(ont_infer_out(node, at++, x->dtype, &shape));
    }
    for (int64_t i = 0; i < m.n_sums; i++)
        ONT_TRY(ont_infer_out(node, at++, x->dtype, &(ont_shape){.rank = 1, .dims = {columns}}));
    return ONT_OK;
}

/* ---- preparation ---- */

/* One GEMM of a tile. */
typedef struct tile_gemm {
    ont_gemm gemm;
    const ont_gemm_backend *backend;
    ont_gemm_native native; /* without a kernel where the backend runs */
} tile_gemm;

typedef struct mlp_state {
    ont_mlp m;
    ont_tile_program program;
    const ont_simd_table *simd;
    ont_dtype dtype;
    int64_t rows, columns, width; /* width: columns of a tile, at most */
    tile_gemm products[WIDTHS][ONT_MLP_PRODUCTS], weight_grads[WIDTHS][ONT_MLP_WEIGHT_GRADS],
        row_grads[WIDTHS][ONT_MLP_ROW_GRADS];
    size_t gemm_bytes;
} mlp_state;

static int64_t tile_width(int64_t columns)
{
    int64_t tiles = ont_min(columns / COLUMNS, TILES);
    return tiles < 2 ? columns : ont_round_up(ont_ceil_div(columns, tiles), ROUND);
}

/* The product that result 0 may overwrite, which the last step computes: a gradient, as a rule the last use; or -1. */
static int overwritten(const ont_mlp *m, const ont_tile_program *p)
{
    for (int i = 0; i < m->n_products; i++)
        if (m->products[i].left == ONT_MLP_DY && p->result_size[0] == p->operand_size[i]) return i;
    return -1;
}

/* Lays out the values of a tile; with `base` NULL it only adds up their bytes. */
static size_t layout_tile(const mlp_state *s, char *base, char **products, char **results)
{
    size_t used = 0, elements = (size_t)(s->rows * s->width);
    for (int i = 0; i < s->m.n_products; i++) {
        products[i] = base ? base + used : NULL;
        used += (elements * s->program.operand_size[i] + 63) / 64 * 64;
    }
    int over = overwritten(&s->m, &s->program);
    for (int k = 0; k < s->program.n_results; k++) {
        results[k] = base ? base + used : NULL;
        if (!k && over >= 0) results[k] = products[over];
        else used += (elements * s->program.result_size[k] + 63) / 64 * 64;
    }
    return used;
}

static ont_status read_state(const ont_node *node, mlp_state *s)
{
    const ont_value *x = ont_node_in(node, ONT_MLP_X);
    *s = (mlp_state){.dtype = x->dtype};
    ONT_TRY(read_node(node, &s->m, &s->program));
    s->rows = ont_shape_count(&x->shape) / ont_last_dim(x);
    s->columns = columns_of(node, &s->m);
    s->width = tile_width(s->columns);
    return ONT_OK;
}

size_t ont_mlp_tile_bytes(const ont_node *node)
{
    mlp_state s;
    char *products[ONT_MLP_PRODUCTS], *results[ONT_TILE_RESULTS];
    return read_state(node, &s) == ONT_OK ? layout_tile(&s, NULL, products, results) : 0;
}

static void choose(mlp_state *s, bool plain, tile_gemm *t, ont_gemm gemm, int epilogue)
{
    ont_gemm_impl impl = ONT_GEMM_BACKEND;
    gemm.dtype = s->dtype;
    gemm.alpha = 1;
    *t = (tile_gemm){.gemm = gemm, .backend = ont_gemm_reference()};
    if (plain) return;
    t->backend = ont_gemm_choose(&gemm, epilogue, &impl);
    const ont_gemm_kernel *kernel = impl == ONT_GEMM_NATIVE ? ont_gemm_native_kernel(impl, s->dtype) : NULL;
    if (!kernel) return;
    ont_gemm_native_init(&t->native, kernel, &gemm, ONT_FLOAT32, ont_parallel_threads());
    size_t bytes = ont_gemm_native_work_bytes(&t->native);
    if (bytes > s->gemm_bytes) s->gemm_bytes = bytes;
}

/* Describes the GEMMs of tiles of n columns. Row gradients add to C, which the native GEMM does not. */
static void prepare_width(mlp_state *s, const ont_node *node, bool plain, int at, int64_t n)
{
    const ont_mlp *m = &s->m;
    for (int i = 0; i < m->n_products; i++) {
        int64_t k = ont_last_dim(ont_node_in(node, (uint32_t)m->products[i].left));
        bool trans = m->products[i].transposed;
        ont_gemm gemm = {.trans_b = trans, .m = s->rows, .n = n, .k = k, .lda = k, .ldb = trans ? k : s->columns,
                         .ldc = n};
        choose(s, plain, &s->products[at][i], gemm, m->products[i].bias ? ONT_GEMM_BIAS : 0);
    }
    for (int i = 0; i < m->n_weight_grads; i++) {
        int64_t k = ont_last_dim(ont_node_in(node, (uint32_t)m->weight_grads[i].left));
        ont_gemm gemm = {.trans_a = true, .m = k, .n = n, .k = s->rows, .lda = k, .ldb = n, .ldc = s->columns};
        if (m->weight_grads[i].transposed) gemm.m = gemm.lda = n, gemm.n = gemm.ldb = gemm.ldc = k;
        choose(s, plain, &s->weight_grads[at][i], gemm, 0);
    }
    for (int i = 0; i < m->n_row_grads; i++) {
        int64_t k = ont_last_dim(ont_node_in(node, ONT_MLP_X));
        bool trans = m->row_grads[i].transposed;
        ont_gemm gemm = {.dtype = s->dtype, .trans_b = trans, .m = s->rows, .n = k, .k = n, .lda = n,
                         .ldb = trans ? s->columns : k, .ldc = k, .alpha = 1};
        s->row_grads[at][i].gemm = gemm;
        s->row_grads[at][i].backend = plain ? ont_gemm_reference() : ont_gemm_choose(&gemm, 0, NULL);
    }
}

static ont_status prepare_with(bool plain, const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    char *products[ONT_MLP_PRODUCTS], *results[ONT_TILE_RESULTS];
    mlp_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(read_state(node, s));
    s->simd = plain ? ont_simd_plain() : ont_simd();
    if (plain) s->width = ont_min(s->columns, 3);
    prepare_width(s, node, plain, 0, s->width);
    if (s->columns % s->width) prepare_width(s, node, plain, 1, s->columns % s->width);
    out->state = s;
    out->work_bytes = layout_tile(s, NULL, products, results) + s->gemm_bytes;
    return ONT_OK;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_with(false, node, arena, out);
}

/* The reference: narrow tiles and the scalar loops. */
static ont_status prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_with(true, node, arena, out);
}

/* ---- tiles ---- */

/* Hidden columns [from, from + n). */
typedef struct job {
    const ont_call *call;
    const mlp_state *s;
    int64_t from, n;
    int at; /* which of the widths n is */
    char *products[ONT_MLP_PRODUCTS], *results[ONT_TILE_RESULTS];
    void *gemm_work;
    const double *x; /* of sum_columns_f64 */
    double *sums;
} job;

/* Element i of an array of the state's dtype. */
static void *element(const job *j, const void *array, int64_t i)
{
    return (char *)(uintptr_t)array + i * (int64_t)ont_dtype_size(j->s->dtype);
}

static void run_gemm(const job *j, const tile_gemm *t, const void *a, const void *b, void *c)
{
    if (t->native.kernel) ont_gemm_native_run(&t->native, a, b, NULL, c, NULL, j->gemm_work);
    else t->backend->run(&t->gemm, a, b, c);
}

static void run_products(const job *j)
{
    const ont_mlp *m = &j->s->m;
    for (int i = 0; i < m->n_products; i++) {
        const tile_gemm *t = &j->s->products[j->at][i];
        const void *left = j->call->in[m->products[i].left];
        const void *w = element(j, j->call->in[m->products[i].weight],
                                m->products[i].transposed ? j->from * t->gemm.k : j->from);
        const void *bias = m->products[i].bias ? element(j, j->call->in[m->products[i].bias], j->from) : NULL;
        if (t->native.kernel) {
            ont_gemm_native_run(&t->native, left, w, bias, j->products[i], NULL, j->gemm_work);
            continue;
        }
        t->backend->run(&t->gemm, left, w, j->products[i]);
        if (bias) ont_gemm_add_bias(&t->gemm, 1, bias, j->products[i]);
    }
}

/* The elementwise program over rows [first, last) of the tile; Dropout counts elements of the whole hidden layer. */
static void run_program(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const mlp_state *s = j->s;
    const ont_tile_program *p = &s->program;
    for (int64_t row = first; row < last; row++) {
        ont_tile_bind bind = {.first = row * s->columns + j->from, .seed = j->call->seed};
        for (int i = 0; i < p->n_operands; i++) {
            uint32_t input = (uint32_t)(s->m.first_operand + i - s->m.n_products);
            ONT_ASSERT(i < s->m.n_products || input < j->call->node->n_inputs);
            bool single = i >= s->m.n_products && ont_shape_count(&ont_node_in(j->call->node, input)->shape) == 1;
            bind.stride[i] = !single;
            if (i < s->m.n_products)
                bind.operand[i] = j->products[i] + (size_t)(row * j->n) * p->operand_size[i];
            else
                bind.operand[i] = (const char *)j->call->in[input] +
                                  (size_t)(single ? 0 : j->from) * p->operand_size[i];
        }
        for (int k = 0; k < p->n_results; k++)
            bind.result[k] = j->results[k] + (size_t)(row * j->n) * p->result_size[k];
        ont_tile_run(s->simd, p, &bind, j->n);
    }
}

static void sum_columns_f64(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    for (int64_t c = first; c < last; c++) j->sums[c] = 0;
    for (int64_t row = 0; row < j->s->rows; row++)
        for (int64_t c = first; c < last; c++) j->sums[c] += j->x[row * j->n + c];
}

static void run_sum(job *j, const void *x, void *sums)
{
    if (j->s->dtype == ONT_FLOAT64) {
        j->x = x, j->sums = sums;
        ont_parallel(j->n, 64, sum_columns_f64, j);
        return;
    }
    ont_gemm gemm = {.m = j->n, .k = j->s->rows, .lda = j->n};
    ont_gemm_sum_a(&gemm, x, sums);
}

static void run_gradients(job *j)
{
    const ont_mlp *m = &j->s->m;
    const ont_call *call = j->call;
    for (int i = 0; i < m->n_weight_grads; i++) {
        const tile_gemm *t = &j->s->weight_grads[j->at][i];
        const void *left = call->in[m->weight_grads[i].left], *result = j->results[m->weight_grads[i].result];
        bool transposed = m->weight_grads[i].transposed;
        run_gemm(j, t, transposed ? result : left, transposed ? left : result,
                 element(j, call->out[1 + i], transposed ? j->from * t->gemm.n : j->from));
    }
    for (int i = 0; i < m->n_sums; i++)
        run_sum(j, j->results[m->sums[i]], element(j, call->out[1 + m->n_weight_grads + i], j->from));
    for (int i = 0; i < m->n_row_grads; i++) {
        const tile_gemm *t = &j->s->row_grads[j->at][i];
        ont_gemm gemm = t->gemm;
        gemm.beta = j->from > 0 || i > 0;
        const void *w = element(j, call->in[m->row_grads[i].weight],
                                m->row_grads[i].transposed ? j->from : j->from * gemm.n);
        t->backend->run(&gemm, j->results[m->row_grads[i].result], w, call->out[0]);
    }
}

static ont_status run(const ont_call *call)
{
    const mlp_state *s = call->state;
    job j = {.call = call, .s = s};
    j.gemm_work = (char *)call->work + layout_tile(s, call->work, j.products, j.results);
    for (; j.from < s->columns; j.from += j.n) {
        j.n = ont_min(s->width, s->columns - j.from);
        j.at = j.n < s->width;
        ONT_ASSERT(!j.at || j.n == s->columns % s->width); /* the widths that have GEMMs */
        run_products(&j);
        ont_parallel(s->rows, ELEMENTS / j.n + 1, run_program, &j);
        run_gradients(&j);
    }
    return ONT_OK;
}

static const char *accept(const ont_node *node)
{
    mlp_state s;
    const ont_value *x = ont_node_in(node, ONT_MLP_X);
    if (x->dtype != ONT_FLOAT32 && x->dtype != ONT_FLOAT64) return "dtype";
    return read_state(node, &s) == ONT_OK ? NULL : "operands";
}

static const ont_kernel kernels[] = {
    {.name = "mlp_grad", .accept = accept, .prepare = prepare, .run = run},
    {.name = "mlp_grad_ref", .accept = accept, .prepare = prepare_ref, .run = run},
};

const ont_op ont_op_MlpGrad = {.domain = ONT_DOMAIN, .name = "MlpGrad", .since = 1, .min_inputs = 4,
                               .max_inputs = ONT_MLP_WEIGHTS + 2 * ONT_MLP_PRODUCTS + ONT_TILE_OPERANDS,
                               .flags = ONT_OP_NO_FOLD,
                               .attributes = "products:I weight_grads:I row_grads:I sums:I first_operand:i "
                                             "parameters:F results:I steps:I",
                               .infer = mlp_infer, ONT_KERNELS(kernels)};
