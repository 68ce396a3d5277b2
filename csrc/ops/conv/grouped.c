/*
 * GroupedMatMul, for mixtures of experts: x (S, K), whose rows are sorted by expert, ends (E), the cumulative number of
 * rows of each expert, and a matrix per expert: (E, K, N). Each group of rows is multiplied by its matrix. Ends are
 * values, not shapes, so one program serves every routing. Rows after the last end give zero. GroupedMatMulGrad is the
 * gradient of the matrices.
 */
#include <inttypes.h>
#include <string.h>

#include "device/gemm.h"
#include "ops/op.h"

typedef struct grouped_state {
    int64_t rows, groups; /* S, E */
    bool wide;            /* ends are int64 */
    ont_gemm gemm;        /* m, or k for the gradient, is set to the size of each group */
    const ont_gemm_backend *backend;
} grouped_state;

static ont_status check_ends(const ont_node *node)
{
    ont_value *ends;
    ONT_TRY(ont_need_input(node, 2, &ends));
    if (ends->dtype != ONT_INT64 && ends->dtype != ONT_INT32)
        return ont_fail(ONT_ETYPE, "ends are %s, expected int32 or int64", ont_dtype_name(ends->dtype));
    if (ends->shape.rank != 1) return ont_fail(ONT_EINVAL, "ends have rank %d, expected 1", ends->shape.rank);
    return ONT_OK;
}

static ont_status grouped_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *w;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &w));
    ONT_TRY(check_ends(node));
    bool trans = ont_attr_int(node, "transB", 0);
    if (x->dtype != w->dtype)
        return ont_fail(ONT_ETYPE, "rows are %s, matrices %s", ont_dtype_name(x->dtype), ont_dtype_name(w->dtype));
    if (x->shape.rank != 2 || w->shape.rank != 3)
        return ont_fail(ONT_EINVAL, "rows have rank %d, matrices %d, expected 2 and 3", x->shape.rank, w->shape.rank);
    int64_t groups = ont_node_in(node, 2)->shape.dims[0], k = w->shape.dims[trans ? 2 : 1];
    if (w->shape.dims[0] != groups)
        return ont_fail(ONT_EINVAL, "%" PRId64 " matrices, %" PRId64 " ends", w->shape.dims[0], groups);
    if (x->shape.dims[1] != k)
        return ont_fail(ONT_EINVAL, "rows have %" PRId64 " columns, matrices %" PRId64 " rows", x->shape.dims[1], k);
    ont_shape shape = ont_shape_of(2, (int64_t[]){x->shape.dims[0], w->shape.dims[trans ? 1 : 2]});
    return ont_infer_out(node, 0, x->dtype, &shape);
}

/* The end of a group, checked: ends do not decrease and are at most S. */
static ont_status read_end(const grouped_state *s, const void *ends, int64_t group, int64_t from, int64_t *end)
{
    *end = s->wide ? ((const int64_t *)ends)[group] : ((const int32_t *)ends)[group];
    if (*end < from || *end > s->rows)
        return ont_fail(ONT_EINDEX, "end %" PRId64 " of group %" PRId64 " is outside %" PRId64 " to %" PRId64, *end,
                        group, from, s->rows);
    return ONT_OK;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, bool gradient, bool reference, ont_prepared *out)
{
    const ont_value *x = ont_node_in(node, 0), *w = ont_node_in(node, 1), *ends = ont_node_in(node, 2);
    grouped_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    int64_t columns = x->shape.dims[1], n = node->outputs[0]->shape.dims[gradient ? 2 : 1];
    *s = (grouped_state){.rows = x->shape.dims[0], .groups = ends->shape.dims[0], .wide = ends->dtype == ONT_INT64};
    int64_t usual = s->groups ? s->rows / s->groups : 0; /* the mean group, for the choice of the backend */
    s->gemm = (ont_gemm){.dtype = x->dtype, .n = n, .ldc = n, .lda = columns, .alpha = 1};
    s->gemm.trans_a = gradient;
    s->gemm.trans_b = !gradient && ont_attr_int(node, "transB", 0);
    s->gemm.m = gradient ? columns : usual;
    s->gemm.k = gradient ? usual : columns;
    s->gemm.ldb = w->shape.dims[w->shape.rank - 1];
    s->backend =
        reference || !(s->gemm.m && n && s->gemm.k) ? ont_gemm_reference() : ont_gemm_choose(&s->gemm);
    out->state = s;
    return ONT_OK;
}

static ont_status prepare_forward(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare(node, arena, false, false, out);
}

static ont_status prepare_forward_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare(node, arena, false, true, out);
}

static ont_status prepare_grad(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare(node, arena, true, false, out);
}

static ont_status prepare_grad_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare(node, arena, true, true, out);
}

static ont_status grouped_run(const ont_call *call)
{
    const grouped_state *s = call->state;
    const ont_value *w = ont_node_in(call->node, 1);
    size_t size = ont_dtype_size(w->dtype), matrix = (size_t)(w->shape.dims[1] * w->shape.dims[2]) * size;
    const char *x = call->in[0];
    char *y = call->out[0];
    ont_gemm gemm = s->gemm;
    int64_t from = 0, end;
    for (int64_t e = 0; e < s->groups; e++, from = end) {
        ONT_TRY(read_end(s, call->in[2], e, from, &end));
        gemm.m = end - from;
        char *rows = y + (size_t)(from * gemm.n) * size;
        if (!gemm.m || !gemm.n) continue;
        if (gemm.k)
            s->backend->run(&gemm, x + (size_t)(from * gemm.k) * size, (const char *)call->in[1] + (size_t)e * matrix,
                             rows);
        else
            memset(rows, 0, (size_t)(gemm.m * gemm.n) * size);
    }
    memset(y + (size_t)(from * gemm.n) * size, 0, (size_t)((s->rows - from) * gemm.n) * size);
    return ONT_OK;
}

/* (lhs rows (S, P), rhs rows (S, Q), ends (E)) to (E, P, Q): in each group, lhs transposed times rhs. */
static ont_status grad_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *lhs, *rhs;
    ONT_TRY(ont_need_input(node, 0, &lhs));
    ONT_TRY(ont_need_input(node, 1, &rhs));
    ONT_TRY(check_ends(node));
    ont_shape shape = ont_shape_of(3, (int64_t[]){ont_node_in(node, 2)->shape.dims[0], lhs->shape.dims[1],
                                                  rhs->shape.dims[1]});
    return ont_infer_out(node, 0, lhs->dtype, &shape);
}

static ont_status grad_run(const ont_call *call)
{
    const grouped_state *s = call->state;
    ont_gemm gemm = s->gemm;
    size_t size = ont_dtype_size(gemm.dtype), matrix = (size_t)(gemm.m * gemm.n) * size;
    int64_t from = 0, end;
    for (int64_t e = 0; e < s->groups; e++, from = end) {
        ONT_TRY(read_end(s, call->in[2], e, from, &end));
        gemm.k = end - from;
        char *dw = (char *)call->out[0] + (size_t)e * matrix;
        if (!matrix) continue;
        if (gemm.k)
            s->backend->run(&gemm, (const char *)call->in[0] + (size_t)(from * gemm.m) * size,
                             (const char *)call->in[1] + (size_t)(from * gemm.n) * size, dw);
        else
            memset(dw, 0, matrix);
    }
    return ONT_OK;
}

static void grouped_grad(ont_grad *g)
{
    ont_builder *b = &g->b;
    ont_value *dy = GO(0);
    bool trans = ont_attr_int(g->node, "transB", 0);
    if (WANTS(0)) {
        ont_node *node = ont_build_node(b, ONT_DOMAIN, "GroupedMatMul", (ont_value *[]){dy, I(1), I(2)}, 3, 1);
        if (node) b->status = ont_attr_set_int(b->graph, node, "transB", !trans);
        GI(0, ont_build_done(b, node));
    }
    if (!WANTS(1)) return;
    ont_value *operands[] = {trans ? dy : I(0), trans ? I(0) : dy, I(2)};
    GI(1, ont_build_done(b, ont_build_node(b, ONT_DOMAIN, "GroupedMatMulGrad", operands, 3, 1)));
}

static const ont_kernel grouped_kernels[] = {
    {.name = "grouped_matmul_blas", .accept = ont_accept_float, .prepare = prepare_forward, .run = grouped_run},
    {.name = "grouped_matmul_ref", .accept = ont_accept_float, .prepare = prepare_forward_ref, .run = grouped_run},
};
static const ont_kernel grad_kernels[] = {
    {.name = "grouped_matmul_grad_blas", .accept = ont_accept_float, .prepare = prepare_grad, .run = grad_run},
    {.name = "grouped_matmul_grad_ref", .accept = ont_accept_float, .prepare = prepare_grad_ref, .run = grad_run},
};
const ont_op ont_op_GroupedMatMul = {.domain = ONT_DOMAIN, .name = "GroupedMatMul", .since = 1, .min_inputs = 3,
                                     .max_inputs = 3, .flags = ONT_OP_PUBLIC, .nondiff_inputs = 4,
                                     .attributes = "transB:i", .infer = grouped_infer, .grad = grouped_grad,
                                     ONT_KERNELS(grouped_kernels)};
const ont_op ont_op_GroupedMatMulGrad = {.domain = ONT_DOMAIN, .name = "GroupedMatMulGrad", .since = 1, .min_inputs = 3,
                                         .max_inputs = 3, .nondiff_inputs = 4, .attributes = "", .infer = grad_infer,
                                         ONT_KERNELS(grad_kernels)};
