/*
 * SearchSorted, as torch.searchsorted and torch.bucketize: the position of each value in a sorted row. One row serves
 * all values, or each row of values has its own.
 */
#include "base/parallel.h"
#include "ops/op.h"

static ont_status search_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *sorted, *x;
    ONT_TRY(ont_need_input(node, 0, &sorted));
    ONT_TRY(ont_need_input(node, 1, &x));
    if (sorted->dtype != x->dtype)
        return ont_fail(ONT_ETYPE, "the sorted rows are %s and the values %s, one dtype is expected",
                        ont_dtype_name(sorted->dtype), ont_dtype_name(x->dtype));
    bool alike = sorted->shape.rank == x->shape.rank;
    for (int d = 0; alike && d < x->shape.rank - 1; d++) alike = sorted->shape.dims[d] == x->shape.dims[d];
    if (sorted->shape.rank != 1 && !(alike && x->shape.rank))
        return ont_fail(ONT_EINVAL, "the sorted sequence must be one row, or one row for each row of values");
    return ont_infer_out(node, 0, ONT_INT64, &x->shape);
}

static const char *search_accept(const ont_node *node)
{
    ont_dtype d = ont_node_in(node, 0)->dtype;
    return d == ONT_FLOAT32 || d == ONT_FLOAT64 || d == ONT_INT32 || d == ONT_INT64
        ? NULL : "dtype is not one of float, double, int32, int64";
}

/* NaN sorts behind all numbers. */
#define SEARCH(suffix, type) \
    static void search_##suffix(void *context, int64_t first, int64_t last) \
    { \
        const ont_call *call = context; \
        const ont_shape *rows = &ont_node_in(call->node, 0)->shape, *shape = &ont_node_in(call->node, 1)->shape; \
        int64_t n = rows->dims[rows->rank - 1], width = rows->rank > 1 ? shape->dims[shape->rank - 1] : 0; \
        bool right = ont_attr_int(call->node, "right", 0) != 0; \
        for (int64_t i = first; i < last; i++) { \
            const type *row = (const type *)call->in[0] + (width ? i / width * n : 0); \
            type v = ((const type *)call->in[1])[i]; \
            int64_t from = 0, length = n; \
            while (length) { \
                int64_t half = length / 2; \
                type middle = row[from + half]; \
                bool beyond = right ? !(middle > v) : !(middle >= v); \
                from = beyond ? from + half + 1 : from; \
                length = beyond ? length - half - 1 : half; \
            } \
            ((int64_t *)call->out[0])[i] = from; \
        } \
    }
SEARCH(f32, float)
SEARCH(f64, double)
SEARCH(i32, int32_t)
SEARCH(i64, int64_t)

static ont_status search_run(const ont_call *call)
{
    ont_range_fn body = search_i64;
    switch (ont_node_in(call->node, 0)->dtype) {
    case ONT_FLOAT32: body = search_f32; break;
    case ONT_FLOAT64: body = search_f64; break;
    case ONT_INT32: body = search_i32; break;
    default: break;
    }
    ont_parallel(ont_shape_count(&call->node->outputs[0]->shape), 1024, body, (void *)call);
    return ONT_OK;
}

static const ont_kernel search_kernels[] = {{.name = "search_ref", .accept = search_accept, .run = search_run}};
const ont_op ont_op_SearchSorted = {.domain = ONT_DOMAIN, .name = "SearchSorted", .since = 1, .min_inputs = 2,
                                    .max_inputs = 2, .flags = ONT_OP_NO_GRAD | ONT_OP_PUBLIC, .attributes = "right:i",
                                    .infer = search_infer, ONT_KERNELS(search_kernels)};
