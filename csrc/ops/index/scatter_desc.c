/*
 * The reductions of ScatterElements, Scatter and ScatterND: their names, and one combining loop for each dtype. It
 * knows no kernel.
 */
#include <string.h>

#include "ops/index/scatter.h"

ont_status ont_scatter_reduction(const ont_node *node, ont_scatter *reduction)
{
    static const char *const names[] = {"none", "add", "mul", "max", "min"};
    const char *name = ont_attr_string(node, "reduction", "none");
    for (int i = 0; i < 5; i++)
        if (!strcmp(name, names[i])) {
            *reduction = (ont_scatter)i;
            return ONT_OK;
        }
    return ont_fail(ONT_EUNSUPPORTED, "attribute reduction is '%s', expected none, add, mul, max or min", name);
}

/* NaN in either operand gives NaN, as in PyTorch. */
#define COMBINE_LOOP(type, expression) \
    for (int64_t i = 0; i < n; i++) { \
        type a = to[i], v = from[i]; \
        to[i] = (type)(expression); \
    } \
    break;
#define COMBINE(suffix, type) \
    static void combine_##suffix(ont_scatter reduction, type *to, const type *from, int64_t n) \
    { \
        switch (reduction) { \
        case ONT_SCATTER_ADD: COMBINE_LOOP(type, a + v) \
        case ONT_SCATTER_MUL: COMBINE_LOOP(type, a * v) \
        case ONT_SCATTER_MAX: COMBINE_LOOP(type, a != a || a > v ? a : v) \
        case ONT_SCATTER_MIN: COMBINE_LOOP(type, a != a || a < v ? a : v) \
        case ONT_SCATTER_NONE: COMBINE_LOOP(type, ((void)a, v)) \
        } \
    }
#define EACH_DTYPE(X) \
    X(FLOAT32, f32, float) X(FLOAT64, f64, double) X(INT8, i8, int8_t) X(INT16, i16, int16_t) X(INT32, i32, int32_t) \
    X(INT64, i64, int64_t) X(UINT8, u8, uint8_t) X(UINT16, u16, uint16_t) X(UINT32, u32, uint32_t) \
    X(UINT64, u64, uint64_t)
#define X(dtype, suffix, type) COMBINE(suffix, type)
EACH_DTYPE(X)
#undef X

const char *ont_scatter_accept(const ont_node *node)
{
    ont_scatter reduction;
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (ont_scatter_reduction(node, &reduction) != ONT_OK) return "reduction";
    bool number = dtype == ONT_FLOAT32 || dtype == ONT_FLOAT64 || ont_dtype_is_int(dtype);
    return reduction == ONT_SCATTER_NONE || number ? NULL : "the reduction is not supported for this dtype";
}

void ont_scatter_combine(ont_dtype dtype, ont_scatter reduction, void *to, const void *from, int64_t n)
{
    switch (dtype) {
#define X(dtype_, suffix, type) \
    case ONT_##dtype_: combine_##suffix(reduction, to, from, n); break;
        EACH_DTYPE(X)
#undef X
    default: break; /* accept() refuses these */
    }
}
