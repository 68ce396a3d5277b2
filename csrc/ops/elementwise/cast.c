/*
 * Cast, CastLike and BitCast. Pairs of C types have a loop each in simd/cast, 16-bit floats go through float32 in the
 * vector loops, narrow formats go element by element.
 */
#include <math.h>
#include <string.h>

#include "base/number.h"
#include "base/parallel.h"
#include "ops/elementwise/tile_program.h"
#include "simd/cast/cast.h"

static ont_cast_loop loop_of(ont_dtype to, ont_dtype from)
{
    return ont_simd_cast()[to][from];
}

static bool is_plain(ont_dtype dtype)
{
    return loop_of(ONT_FLOAT64, dtype) != NULL;
}

static void half_to_float(const void *x, ont_dtype from, float *y, int64_t n)
{
    (from == ONT_FLOAT16 ? ont_simd()->half_to_float : ont_simd()->bfloat_to_float)(x, y, n);
}

static void float_to_half(const float *x, void *y, ont_dtype to, int64_t n)
{
    (to == ONT_FLOAT16 ? ont_simd()->float_to_half : ont_simd()->float_to_bfloat)(x, y, n);
}

/* With a 16-bit float on at least one side: through float32, in pieces that stay in the L1 cache. */
static void cast_by_float(const char *x, ont_dtype from, char *y, ont_dtype to, int64_t n)
{
    enum { PIECE = 1024 };
    float piece[PIECE];
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t m = n - at < PIECE ? n - at : PIECE;
        const char *in = x + (size_t)at * ont_dtype_size(from);
        char *out = y + (size_t)at * ont_dtype_size(to);
        float *middle = to == ONT_FLOAT32 ? (float *)out : piece;
        if (ont_dtype_is_half(from))
            half_to_float(in, from, middle, m);
        else if (from != ONT_FLOAT32)
            loop_of(ONT_FLOAT32, from)(in, middle, m);
        if (ont_dtype_is_half(to))
            float_to_half(from == ONT_FLOAT32 ? (const float *)in : middle, out, to, m);
        else if (to != ONT_FLOAT32)
            loop_of(to, ONT_FLOAT32)(middle, out, m);
    }
}

typedef struct cast_state {
    ont_dtype from, to;
    int64_t count;
    bool saturate;
    ont_e8m0_round round;
} cast_state;

/* double to float16 through float32 would round twice, so it goes element by element */
static void cast_each(const cast_state *s, const void *x, void *y, int64_t n)
{
    bool whole = !ont_dtype_is_float(s->from) && !ont_dtype_is_narrow_float(s->from);
    if (s->from == ONT_UINT64 && ont_dtype_is_float(s->to)) whole = false; /* not all uint64 values fit in int64 */
    bool narrow_float = ont_dtype_is_narrow_float(s->to);
    for (int64_t i = 0; i < n; i++) {
        if (narrow_float) {
            double v = ont_number_at(x, s->from, i);
            ((uint8_t *)y)[i] = s->to == ONT_FLOAT8E8M0 ? ont_e8m0(v, s->saturate, s->round)
                                                        : ont_narrow_float(v, s->to, s->saturate);
        } else if (whole) {
            ont_integer_put(y, s->to, i, ont_integer_at(x, s->from, i));
        } else {
            ont_number_put(y, s->to, i, ont_number_at(x, s->from, i));
        }
    }
}

/* ---- Cast, CastLike ---- */

static ont_status cast_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x, *like = ont_node_in(node, 1);
    ONT_TRY(ont_need_input(node, 0, &x));
    int64_t to = like ? (int64_t)like->dtype : ont_attr_int(node, "to", 0);
    if (to <= 0 || to >= ONT_DTYPE_COUNT || !ont_dtype_size((ont_dtype)to))
        return ont_fail(ONT_EUNSUPPORTED, "cast to %s (dtype number %lld) is not supported",
                        ont_dtype_name((ont_dtype)to), (long long)to);
    const char *mode = ont_attr_string(node, "round_mode", "up");
    if (strcmp(mode, "up") && strcmp(mode, "down") && strcmp(mode, "nearest"))
        return ont_fail(ONT_EINVAL, "attribute round_mode is '%s', expected up, down or nearest", mode);
    return ont_infer_out(node, 0, (ont_dtype)to, &x->shape);
}

static bool is_number(ont_dtype dtype)
{
    return is_plain(dtype) || ont_dtype_is_half(dtype) || ont_dtype_is_narrow(dtype);
}

static const char *cast_accept(const ont_node *node)
{
    return is_number(ont_node_in(node, 0)->dtype) && is_number(node->outputs[0]->dtype) ? NULL : "dtype";
}

static ont_status cast_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    const char *mode = ont_attr_string(node, "round_mode", "up");
    cast_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    *s = (cast_state){.from = ont_node_in(node, 0)->dtype, .to = node->outputs[0]->dtype,
                      .count = ont_shape_count(&node->outputs[0]->shape), .saturate = ont_attr_int(node, "saturate", 1),
                      .round = *mode == 'u' ? ONT_E8M0_UP : *mode == 'd' ? ONT_E8M0_DOWN : ONT_E8M0_NEAREST};
    out->state = s;
    return ONT_OK;
}

static void cast_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const cast_state *s = call->state;
    const char *x = (const char *)call->in[0] + (size_t)first * ont_dtype_size(s->from);
    char *y = (char *)call->out[0] + (size_t)first * ont_dtype_size(s->to);
    bool narrow = ont_dtype_is_narrow(s->from) || ont_dtype_is_narrow(s->to);
    if (s->from == s->to)
        memmove(y, x, (size_t)(last - first) * ont_dtype_size(s->to));
    else if (loop_of(s->to, s->from))
        loop_of(s->to, s->from)(x, y, last - first);
    else if (narrow || s->from == ONT_FLOAT64 || s->to == ONT_FLOAT64 ||
             !(s->from == ONT_FLOAT32 || s->to == ONT_FLOAT32))
        cast_each(s, x, y, last - first);
    else
        cast_by_float(x, s->from, y, s->to, last - first);
}

static ont_status cast_run(const ont_call *call)
{
    ont_parallel(((const cast_state *)call->state)->count, 16384, cast_range, (void *)call);
    return ONT_OK;
}

static void cast_ref_range(void *context, int64_t first, int64_t last)
{
    const ont_call *call = context;
    const cast_state *s = call->state;
    cast_each(s, (const char *)call->in[0] + (size_t)first * ont_dtype_size(s->from),
              (char *)call->out[0] + (size_t)first * ont_dtype_size(s->to), last - first);
}

static ont_status cast_ref_run(const ont_call *call)
{
    ont_parallel(((const cast_state *)call->state)->count, 16384, cast_ref_range, (void *)call);
    return ONT_OK;
}

/* The gradient passes through a narrow format unchanged: narrow formats have no gradients of their own. */
static void cast_grad(ont_grad *g)
{
    GI(0, ont_build_cast(&g->b, GO(0), I(0)->dtype));
}

static const ont_kernel cast_kernels[] = {
    {.name = "cast_simd", .accept = cast_accept, .prepare = cast_prepare, .run = cast_run},
    {.name = "cast_ref", .accept = cast_accept, .prepare = cast_prepare, .run = cast_ref_run},
};

static bool cast_tile(const ont_node *node, ont_tile_step *step)
{
    ont_dtype from = ont_node_in(node, 0)->dtype, to = node->outputs[0]->dtype;
    *step = (ont_tile_step){.kind = ONT_TILE_CAST, .in = from, .out = to, .n_operands = 1};
    return ont_tile_casts(from, to);
}

/* Becomes a Cast, so that the second operand has no user left. */
static void cast_like_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    ont_value *x = ont_node_in(node, 0);
    ont_dtype to = ont_node_in(node, 1)->dtype;
    outputs[0] = x;
    if (to == x->dtype) return;
    ont_node *cast = ont_build_node(b, "", "Cast", &x, 1, 1);
    if (cast) b->status = ont_attr_copy_all(b->graph, cast, node);
    if (b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, cast, "to", to);
    outputs[0] = ont_build_done(b, cast);
}

const ont_op ont_op_Cast = {.domain = "", .name = "Cast", .since = 6, .min_inputs = 1, .max_inputs = 1,
                            .attributes = "to:i saturate:i round_mode:s", .infer = cast_infer, .grad = cast_grad,
                            .tile = cast_tile, .rows = ONT_ROWS_ELEMENTWISE, ONT_KERNELS(cast_kernels)};
const ont_op ont_op_CastLike = {.domain = "", .name = "CastLike", .since = 15, .min_inputs = 2, .max_inputs = 2,
                                .nondiff_inputs = 2, .attributes = "saturate:i round_mode:s", .infer = cast_infer,
                                .expand = cast_like_expand};

/* ---- BitCast: the same bytes under another dtype of equal size ---- */

static ont_status bit_cast_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    ONT_TRY(ont_need_input(node, 0, &x));
    int64_t to = ont_attr_int(node, "to", 0);
    if (to <= 0 || to >= ONT_DTYPE_COUNT || !ont_dtype_size((ont_dtype)to))
        return ont_fail(ONT_EUNSUPPORTED, "bit cast to dtype number %lld is not supported", (long long)to);
    if (ont_dtype_bits((ont_dtype)to) != ont_dtype_bits(x->dtype))
        return ont_fail(ONT_EINVAL, "bit cast from %s to %s: the sizes of their elements differ",
                        ont_dtype_name(x->dtype), ont_dtype_name((ont_dtype)to));
    return ont_infer_out(node, 0, (ont_dtype)to, &x->shape);
}

/* int4 and uint4 are stored one to a byte, sign-extended or not: their four bits are copied, not their bytes. */
static ont_status bit_cast_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0), *y = call->node->outputs[0];
    int64_t n = ont_shape_count(&y->shape);
    const uint8_t *in = call->in[0];
    uint8_t *out = call->out[0];
    int bits = ont_dtype_bits(y->dtype);
    if (n && bits >= 8) memmove(out, in, (size_t)n * ont_dtype_size(x->dtype));
    if (y->dtype == ONT_BOOL)
        for (int64_t i = 0; i < n; i++) out[i] = out[i] != 0;
    for (int64_t i = 0; bits < 8 && i < n; i++) {
        int v = in[i] & ((1 << bits) - 1);
        if (ont_dtype_is_narrow_float(y->dtype))
            out[i] = (uint8_t)v;
        else
            ont_integer_put(out, y->dtype, i, v);
    }
    return ONT_OK;
}

static const ont_kernel bit_cast_kernels[] = {{.name = "bit_cast_ref", .accept = ont_accept_any, .run = bit_cast_run}};
const ont_op ont_op_BitCast = {.domain = "", .name = "BitCast", .since = 26, .min_inputs = 1, .max_inputs = 1,
                               .flags = ONT_OP_NO_GRAD, .attributes = "to:i", .infer = bit_cast_infer,
                               ONT_KERNELS(bit_cast_kernels)};
