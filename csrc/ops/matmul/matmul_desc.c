/*
 * Reads the matrix product of a node, for the kernels of MatMul, Gemm and FusedMatMul. It knows none of them.
 */
#include "ops/matmul/matmul.h"

static bool transposed(const ont_node *node, const char *name)
{
    return ont_attr_int(node, name, 0) != 0;
}

ont_status ont_matmul_desc_read(const ont_node *node, ont_matmul_desc *p)
{
    ont_value *a, *b;
    ONT_TRY(ont_need_input(node, 0, &a));
    ONT_TRY(ont_need_input(node, 1, &b));
    if (a->dtype != b->dtype)
        return ont_fail(ONT_ETYPE, "operands are %s and %s, one dtype is expected", ont_dtype_name(a->dtype),
                        ont_dtype_name(b->dtype));
    if (!a->shape.rank || !b->shape.rank) return ont_fail(ONT_EINVAL, "an operand is a scalar");
    *p = (ont_matmul_desc){.a = a->shape, .b = b->shape, .trans_a = transposed(node, "transA"),
                           .trans_b = transposed(node, "transB"), .alpha = ont_attr_float(node, "alpha", 1.0)};
    p->vector_a = p->a.rank == 1;
    p->vector_b = p->b.rank == 1;
    if (p->vector_a) p->a = ont_shape_of(2, (int64_t[]){1, p->a.dims[0]}), p->trans_a = false;
    if (p->vector_b) p->b = ont_shape_of(2, (int64_t[]){p->b.dims[0], 1}), p->trans_b = false;
    const int64_t *da = p->a.dims + p->a.rank - 2, *db = p->b.dims + p->b.rank - 2;
    p->m = da[p->trans_a];
    p->k = da[!p->trans_a];
    p->n = db[!p->trans_b];
    if (p->k != db[p->trans_b]) {
        char ta[ONT_SHAPE_TEXT], tb[ONT_SHAPE_TEXT];
        return ont_fail(ONT_EINVAL, "inner dims differ: A is %s, B is %s", ont_shape_text(&a->shape, ta),
                        ont_shape_text(&b->shape, tb));
    }
    ont_shape batch_a = ont_shape_of(p->a.rank - 2, p->a.dims), batch_b = ont_shape_of(p->b.rank - 2, p->b.dims);
    return ont_shape_broadcast(&batch_a, &batch_b, &p->batch);
}

void ont_matmul_desc_fold_batch(ont_matmul_desc *p)
{
    int64_t batch_a = ont_shape_count_range(&p->a, 0, p->a.rank - 2);
    if (ont_shape_count_range(&p->b, 0, p->b.rank - 2) != 1 || p->trans_a || batch_a != ont_shape_count(&p->batch))
        return;
    p->m *= batch_a;
    p->a = ont_shape_of(2, (int64_t[]){p->m, p->k});
    p->b = ont_shape_of(2, p->b.dims + p->b.rank - 2);
    p->batch.rank = 0;
}

bool ont_matmul_desc_is_bias(const ont_matmul_desc *p, const ont_shape *c)
{
    return c->rank >= 1 && c->dims[c->rank - 1] == p->n && ont_shape_count(c) == p->n;
}
