/*
 * BitShift, BitwiseAnd, BitwiseOr, BitwiseXor, BitwiseNot: every integer type through the unsigned type of its size,
 * except right shifts, which keep the sign.
 */
#include <string.h>

#include "base/parallel.h"
#include "ops/support/broadcast.h"

typedef enum bitwise { AND, OR, XOR, SHIFT_LEFT, SHIFT_RIGHT, SHIFT_SIGNED } bitwise;

static const char *accept_int(const ont_node *node)
{
    return ont_dtype_is_int(ont_node_in(node, 0)->dtype) ? NULL : "dtype is not an integer";
}

static ont_status bitwise_infer(ont_graph *g, ont_node *node)
{
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    if (!ont_dtype_is_int(x->dtype))
        return ont_fail(ONT_ETYPE, "input is %s, integers are expected", ont_dtype_name(x->dtype));
    if (ONT_IS(node, BitShift)) {
        const char *direction = ont_attr_string(node, "direction", "");
        if (strcmp(direction, "LEFT") && strcmp(direction, "RIGHT"))
            return ont_fail(ONT_EINVAL, "attribute direction is '%s', expected LEFT or RIGHT", direction);
    }
    return ont_infer_broadcast(g, node);
}

typedef struct bitwise_state {
    ont_bcast b;
    bitwise kind;
    size_t size;
} bitwise_state;

static bool is_signed(ont_dtype dtype)
{
    return dtype == ONT_INT8 || dtype == ONT_INT16 || dtype == ONT_INT32 || dtype == ONT_INT64;
}

static ont_status bitwise_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    bitwise_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ont_bcast_init(&s->b, node, 2);
    s->size = ont_dtype_size(node->outputs[0]->dtype);
    s->kind = ONT_IS(node, BitwiseAnd) ? AND : ONT_IS(node, BitwiseOr) ? OR : ONT_IS(node, BitwiseXor) ? XOR
              : !strcmp(ont_attr_string(node, "direction", ""), "LEFT") ? SHIFT_LEFT
                  : is_signed(node->outputs[0]->dtype) ? SHIFT_SIGNED : SHIFT_RIGHT;
    out->state = s;
    return ONT_OK;
}

/* A shift by the width or more, or by a negative number, gives 0, or -1 for a negative number shifted right. */
#define BITWISE_ROW(suffix, type, signed_type) \
    static void row_##suffix(const void *context, const ont_bcast *b, char *const *at, int64_t n) \
    { \
        type *z = (type *)at[0]; \
        const type *x = (const type *)at[1], *y = (const type *)at[2]; \
        int64_t sx = b->inner_stride[1], sy = b->inner_stride[2]; \
        switch (*(const bitwise *)context) { \
        case AND: \
            for (int64_t i = 0; i < n; i++) z[i] = x[i * sx] & y[i * sy]; \
            break; \
        case OR: \
            for (int64_t i = 0; i < n; i++) z[i] = x[i * sx] | y[i * sy]; \
            break; \
        case XOR: \
            for (int64_t i = 0; i < n; i++) z[i] = x[i * sx] ^ y[i * sy]; \
            break; \
        case SHIFT_LEFT: \
            for (int64_t i = 0; i < n; i++) \
                z[i] = y[i * sy] < 8 * sizeof(type) ? (type)((uint64_t)x[i * sx] << y[i * sy]) : 0; \
            break; \
        case SHIFT_RIGHT: \
            for (int64_t i = 0; i < n; i++) z[i] = y[i * sy] < 8 * sizeof(type) ? (type)(x[i * sx] >> y[i * sy]) : 0; \
            break; \
        case SHIFT_SIGNED: \
            for (int64_t i = 0; i < n; i++) { \
                int by = y[i * sy] < 8 * sizeof(type) ? (int)y[i * sy] : (int)(8 * sizeof(type)) - 1; \
                z[i] = (type)((signed_type)x[i * sx] >> by); \
            } \
            break; \
        } \
    }
BITWISE_ROW(u8, uint8_t, int8_t)
BITWISE_ROW(u16, uint16_t, int16_t)
BITWISE_ROW(u32, uint32_t, int32_t)
BITWISE_ROW(u64, uint64_t, int64_t)

static ont_status bitwise_run(const ont_call *call)
{
    const bitwise_state *s = call->state;
    ont_bcast_row row = s->size == 1 ? row_u8 : s->size == 2 ? row_u16 : s->size == 4 ? row_u32 : row_u64;
    ont_bcast_run(&s->b, (char *const[]){call->out[0], (char *)call->in[0], (char *)call->in[1]}, row, &s->kind);
    return ONT_OK;
}

static ont_status not_run(const ont_call *call)
{
    const ont_value *y = call->node->outputs[0];
    size_t bytes = (size_t)ont_shape_count(&y->shape) * ont_dtype_size(y->dtype);
    const uint8_t *from = call->in[0];
    uint8_t *to = call->out[0];
    for (size_t i = 0; i < bytes; i++) to[i] = (uint8_t)~from[i];
    return ONT_OK;
}

static const ont_kernel bitwise_kernels[] = {
    {.name = "bitwise_ref", .accept = accept_int, .prepare = bitwise_prepare, .run = bitwise_run, .inplace = 3},
};
static const ont_kernel not_kernels[] = {{.name = "bitwise_not_ref", .accept = accept_int, .run = not_run,
                                          .inplace = 1}};

#define BITWISE(name_, since_, attributes_) \
    const ont_op ont_op_##name_ = {.domain = "", .name = #name_, .since = since_, .min_inputs = 2, .max_inputs = 2, \
                                   .flags = ONT_OP_NO_GRAD, .attributes = attributes_, .infer = bitwise_infer, \
                                   ONT_KERNELS(bitwise_kernels)}
BITWISE(BitwiseAnd, 18, "");
BITWISE(BitwiseOr, 18, "");
BITWISE(BitwiseXor, 18, "");
BITWISE(BitShift, 11, "direction:s");
const ont_op ont_op_BitwiseNot = {.domain = "", .name = "BitwiseNot", .since = 18, .min_inputs = 1, .max_inputs = 1,
                                  .flags = ONT_OP_NO_GRAD, .attributes = "", .infer = bitwise_infer,
                                  ONT_KERNELS(not_kernels)};
