/*
 * StreamedCrossEntropy and its gradient on a device, in pieces of rows: blas.h multiplies a piece of h by W, loss.cu
 * computes the losses of its scores and writes their gradient over them, and blas.h multiplies that by W and adds it to
 * the gradient of W. One piece of scores exists at a time, in the scratch memory of the node. Pieces are added in
 * their order.
 *
 * As in PyTorch, and not as on the CPU, a row with an ignored label takes part in the products, with a gradient of
 * zeros: what is not finite in such a row of h, or in W, makes gradients NaN.
 *
 * float16 cannot hold gradients of a mean over many rows: softmax / rows underflows. Where forward computes them, they
 * are multiplied by a power of two in front of the products, which divide by it again, in float32.
 */
#include <string.h>

#include "libs/blas.h"
#include "ops_common.h"

enum { IN_H, IN_W, IN_LABELS, IN_ROW, IN_DLOSS, IN_STATS };
enum { EARLY = 2, OUT_STATS = 1, WORK_ALIGN = 256, ROW_ALIGN = 16, MAX_LOG_SCALE = 15 };

/* Pieces where no attribute says how many rows they have: of so many bytes of scores, but no fewer rows. The emulation
 * has small ones, so that each case has several. */
#ifdef ONT_EMULATE
enum { PIECE_BYTES = 1, LEAST_ROWS = 2 };
#else
enum { PIECE_BYTES = 256 << 20, LEAST_ROWS = 2048 };
#endif

enum { TO_SCORES, TO_H, TO_W, ADD_TO_W, PRODUCTS };

typedef struct products {
    void *plans[PRODUCTS]; /* of blas.h; NULL: not needed */
} products;

typedef struct state {
    const ont_blas *blas;
    ont_loss loss;                                     /* of all rows; its columns are those of a piece */
    ont_piece_kind kind;
    int64_t piece, rest, width, n;                     /* rows of a piece, of the last, smaller one; columns of h, W */
    int64_t parts, rest_parts;                         /* partial sums of a piece's columns */
    bool trans_w;
    ont_dtype operand, wide;                           /* of h, W and scores; of loss, statistics and gradients */
    double scale;                                      /* of the gradients of scores */
    size_t gemm_bytes, terms, norm, sums, total, gemm; /* offsets in the scratch memory, after the scores */
    products whole, last;
} state;

/* ---- prepare ---- */

static bool is_grad(const ont_node *node) { return strstr(node->op->name, "Grad") != NULL; }

static uint32_t first_gradient(const ont_node *node) { return is_grad(node) ? 0 : EARLY; }

static int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* The rows of a piece. */
static int64_t rows_of_piece(const ont_node *node, const ont_loss *s)
{
    const int64_t size = (int64_t)ont_dtype_size((ont_dtype)s->dtype), given = ont_attr_int(node, "rows", 0);
    int64_t rows = PIECE_BYTES / (s->columns * size);
    if (rows < LEAST_ROWS) rows = LEAST_ROWS;
    if (given > 0) rows = given;
    return rows < s->rows ? rows : s->rows;
}

/* 2^n, at least the number of rows, by which the gradient of a mean is multiplied in float16; at most 2^15, so that
 * that of a single row is finite. */
static double scale_of(const state *s)
{
    int64_t scale = 1;
    if (s->kind != ONT_PIECE_BOTH || s->operand != ONT_FLOAT16 || s->loss.reduction != 2) return 1;
    while (scale < s->loss.rows && scale < INT64_C(1) << MAX_LOG_SCALE) scale *= 2;
    return (double)scale;
}

static void describe(const ont_node *node, state *s)
{
    const ont_value *w = ont_node_in(node, IN_W), *labels = ont_node_in(node, IN_LABELS);
    const char *reduction = ont_attr_string(node, "reduction", "mean");
    const ont_attr *ignore = ont_attr_find(node, "ignore_index", ONT_ATTR_INT);
    *s = (state){.blas = ont_blas_get(), .operand = w->dtype, .trans_w = ont_attr_int(node, "transB", 0) != 0};
    s->wide = ont_dtype_is_half(w->dtype) ? ONT_FLOAT32 : w->dtype;
    s->width = w->shape.dims[s->trans_w];
    s->n = w->shape.dims[!s->trans_w];
    s->kind = is_grad(node) ? ONT_PIECE_GRAD : ont_attr_int(node, "rows", 0) > 0 ? ONT_PIECE_BOTH : ONT_PIECE_LOSS;
    s->loss = (ont_loss){.rows = ont_shape_count(&labels->shape), .classes = ont_attr_int(node, "classes", s->n),
                         .columns = up(s->n, ROW_ALIGN / (int64_t)ont_dtype_size(w->dtype)), .inner = 1,
                         .ignores = ignore != NULL, .ignored = ignore ? ignore->i : 0,
                         .wide = labels->dtype == ONT_INT64, .dtype = w->dtype, .grad_dtype = w->dtype, .softmax = 1,
                         .wide_loss = 1, .wide_weights = 1,
                         .reduction = !strcmp(reduction, "none") ? 0 : !strcmp(reduction, "sum") ? 1 : 2};
    if (!s->loss.rows || !s->n) return;
    s->piece = rows_of_piece(node, &s->loss);
    s->rest = s->loss.rows % s->piece;
    s->scale = scale_of(s);
}

static const char *accept(const ont_node *node)
{
    state s;
    const ont_dtype dtype = ont_node_in(node, IN_W)->dtype;
    if (!ont_dtype_is_float(dtype)) return "dtype";
    if (ont_dtype_is_half(dtype) && ont_attr_int(node, "to", dtype) != (int64_t)dtype) return "dtype of the scores";
    describe(node, &s);
    if (!s.blas) return "cuBLASLt is not found";
    return s.loss.rows && s.n && s.width ? NULL : "a dim is 0";
}

/* The product of a piece of `rows` rows. The scores' rows are `columns` apart, of which W has n. */
static ont_blas_gemm gemm_of(const ont_node *node, const state *s, int product, int64_t rows)
{
    const int64_t ld_w = s->trans_w ? s->width : s->n, columns = s->loss.columns;
    ont_blas_gemm g = {.dtype = s->operand, .result = s->wide, .m = rows, .n = s->width, .k = s->n, .lda = columns,
                       .ldb = ld_w, .ldc = s->width, .trans_b = !s->trans_w, .batch = 1, .alpha = 1 / s->scale};
    if (product == TO_SCORES) {
        g.result = s->operand;
        g.n = s->n, g.k = g.lda = s->width, g.ldc = columns;
        g.trans_b = s->trans_w;
        g.alpha = 1;
        if (ont_node_in(node, IN_ROW)) g.epilogue = ONT_EPILOGUE_BIAS;
    }
    if (product == TO_W || product == ADD_TO_W) {
        g.m = s->trans_w ? s->n : s->width, g.lda = s->trans_w ? columns : s->width;
        g.n = s->trans_w ? s->width : s->n, g.ldb = s->trans_w ? s->width : columns;
        g.k = rows, g.ldc = ld_w;
        g.trans_a = true, g.trans_b = false;
        g.beta = product == ADD_TO_W;
    }
    return g;
}

/* Whether the whole pieces, or the smaller last one, need the product. */
static bool needs(const ont_node *node, const state *s, int product, bool whole)
{
    const uint32_t gradients = first_gradient(node);
    if (product == TO_SCORES) return true;
    if (s->kind == ONT_PIECE_LOSS) return false;
    if (product == TO_H) return ont_node_out(node, gradients) != NULL;
    if (!ont_node_out(node, gradients + 1)) return false;
    return product == TO_W ? whole : !whole || s->loss.rows / s->piece > 1;
}

static ont_status create_products(const ont_node *node, state *s, products *p, bool whole)
{
    for (int i = 0; i < PRODUCTS; i++) {
        if (!needs(node, s, i, whole)) continue;
        const ont_blas_gemm g = gemm_of(node, s, i, whole ? s->piece : s->rest);
        ONT_TRY(s->blas->create(&g, &p->plans[i]));
        const size_t bytes = s->blas->work_bytes(p->plans[i]);
        if (bytes > s->gemm_bytes) s->gemm_bytes = bytes;
    }
    return ONT_OK;
}

static void release(void *opaque)
{
    const state *s = opaque;
    for (int i = 0; i < PRODUCTS; i++) {
        if (s->whole.plans[i]) s->blas->destroy(s->whole.plans[i]);
        if (s->last.plans[i]) s->blas->destroy(s->last.plans[i]);
    }
}

/* Appends `bytes` to the scratch memory; returns where they begin. */
static size_t append(size_t *end, size_t bytes)
{
    const size_t at = *end;
    *end += (size_t)up((int64_t)bytes, WORK_ALIGN);
    return at;
}

/* The scores of a piece come first. Returns the size. */
static size_t lay_out(const ont_node *node, state *s)
{
    const int64_t columns = s->loss.columns;
    const size_t row = (size_t)columns * ont_dtype_size(s->wide);
    size_t end = 0;
    append(&end, (size_t)(s->piece * columns) * ont_dtype_size(s->operand));
    s->terms = append(&end, (size_t)s->loss.rows * 2 * sizeof(double));
    s->norm = append(&end, sizeof(double));
    if (s->kind != ONT_PIECE_LOSS && ont_node_out(node, first_gradient(node) + 2)) {
        s->parts = ont_column_parts((int)s->operand, s->piece, columns);
        s->rest_parts = s->rest ? ont_column_parts((int)s->operand, s->rest, columns) : 0;
        s->sums = append(&end, (size_t)(s->loss.rows / s->piece * s->parts + s->rest_parts) * row);
        s->total = append(&end, row);
    }
    s->gemm = append(&end, s->gemm_bytes);
    return end + WORK_ALIGN;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    describe(node, s);
    ont_status status = create_products(node, s, &s->whole, true);
    if (status == ONT_OK && s->rest) status = create_products(node, s, &s->last, false);
    if (status != ONT_OK) {
        release(s);
        return status;
    }
    out->work_bytes = lay_out(node, s);
    out->state = s;
    return ONT_OK;
}

/* ---- run ---- */

typedef struct job {
    const ont_call *call;
    const state *s;
    ont_loss loss;
    ont_loss_piece piece;
    char *work;         /* aligned */
    char *h, *dh, *dw;  /* NULL: not needed */
    void *drow;
    int64_t parts;      /* partial sums of drow so far */
} job;

static job begin(const ont_call *call)
{
    const state *s = call->state;
    const uint32_t gradients = first_gradient(call->node);
    char *work = (char *)(((uintptr_t)call->work + WORK_ALIGN - 1) / WORK_ALIGN * WORK_ALIGN);
    job j = {.call = call, .s = s, .loss = s->loss, .work = work, .h = (char *)(uintptr_t)call->in[IN_H]};
    j.loss.fault = s->kind == ONT_PIECE_GRAD ? NULL : call->fault; /* forward has reported what is wrong */
    j.loss.step = call->step;
    j.piece = (ont_loss_piece){.kind = s->kind, .labels = call->in[IN_LABELS], .x = work,
                               .norm = (const double *)(work + s->norm), .terms = (double *)(work + s->terms),
                               .scale = s->scale};
    if (s->kind == ONT_PIECE_LOSS) j.piece.stats = ont_result(call, OUT_STATS);
    if (s->kind == ONT_PIECE_GRAD) {
        j.piece.stats = (void *)(uintptr_t)call->in[IN_STATS];
        j.piece.dloss = call->in[IN_DLOSS];
    }
    if (s->kind == ONT_PIECE_LOSS) return j;
    j.dh = ont_result(call, gradients), j.dw = ont_result(call, gradients + 1);
    j.drow = ont_result(call, gradients + 2);
    return j;
}

static ont_status multiply(const job *j, int product, const void *a, const void *b, void *c)
{
    const products *p = j->piece.rows == j->s->piece ? &j->s->whole : &j->s->last;
    ont_blas_operands x = {.a = a, .b = b, .c = c, .work = j->work + j->s->gemm};
    if (product == TO_SCORES) x.bias = (void *)(uintptr_t)ont_operand(j->call, IN_ROW);
    return j->s->blas->run(p->plans[product], &x, j->call->stream);
}

/* Adds a piece of scores, which holds their gradient, to the gradients that are needed. */
static ont_status add_piece(job *j)
{
    const state *s = j->s;
    const int64_t size = (int64_t)ont_dtype_size(s->operand), wide = (int64_t)ont_dtype_size(s->wide);
    const int64_t columns = s->loss.columns, rows = j->piece.rows, first = j->piece.first;
    char *h = j->h + first * s->width * size, *scores = j->work;
    if (j->dh) ONT_TRY(multiply(j, TO_H, scores, j->call->in[IN_W], j->dh + first * s->width * wide));
    if (j->dw)
        ONT_TRY(multiply(j, first ? ADD_TO_W : TO_W, s->trans_w ? scores : h, s->trans_w ? h : scores, j->dw));
    if (!j->drow) return ONT_OK;
    char *parts = j->work + s->sums + j->parts * columns * wide;
    j->parts += rows == s->piece ? s->parts : s->rest_parts;
    return ont_launched(ont_launch_column_parts((int)s->operand, rows, columns, scores, parts, j->call->stream));
}

/* drow has n columns, the partial sums those of the scores. */
static ont_status finish_row(const job *j)
{
    const state *s = j->s;
    void *total = j->work + s->total;
    if (!j->drow) return ONT_OK;
    ONT_TRY(ont_launched(ont_launch_column_sum((int)s->wide, j->parts, s->loss.columns, 1 / s->scale,
                                               j->work + s->sums, total, j->call->stream)));
    return j->call->device->ops->copy(j->call->device, j->drow, total, (size_t)s->n * ont_dtype_size(s->wide),
                                      j->call->stream);
}

static ont_status run(const ont_call *call)
{
    job j = begin(call);
    const state *s = j.s;
    const int64_t row = s->width * (int64_t)ont_dtype_size(s->operand);
    void *stream = call->stream;
    ONT_TRY(ont_launched(ont_launch_loss_norm(&j.loss, j.piece.labels, (double *)(j.work + s->norm), stream)));
    for (int64_t first = 0; first < s->loss.rows; first += s->piece) {
        const int64_t left = s->loss.rows - first;
        j.piece.first = first;
        j.piece.rows = left < s->piece ? left : s->piece;
        ONT_TRY(multiply(&j, TO_SCORES, j.h + first * row, call->in[IN_W], j.work));
        ONT_TRY(ont_launched(ont_launch_loss_piece(&j.loss, &j.piece, stream)));
        ONT_TRY(add_piece(&j));
    }
    ONT_TRY(finish_row(&j));
    if (s->kind == ONT_PIECE_GRAD) return ONT_OK;
    return ont_launched(ont_launch_loss_sum(&j.loss, (const double *)(j.work + s->terms), call->out[0], stream));
}

const ont_kernel ont_cuda_streamed_loss_kernels[2] = {
    {.name = "cuda_streamed_cross_entropy", .accept = accept, .prepare = prepare, .run = run, .release = release},
    {.name = "cuda_streamed_cross_entropy_grad", .accept = accept, .prepare = prepare, .run = run, .release = release},
};
