/*
 * FusedElementwise: a group of elementwise operators of one shape as one node. Only passes/fuse_elementwise.c creates
 * it, after differentiation. Its operands broadcast to the result; its attributes are a program of tile_program.h.
 */
#include <string.h>

#include "ops/support/broadcast.h"
#include "ops/elementwise/tile_program.h"

_Static_assert((int)ONT_BCAST_MAX > (int)ONT_TILE_OPERANDS, "the walk has room for the operands and the result");

static ont_status infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_tile_program p;
    ONT_TRY(ont_tile_read(node, &p));
    if ((int)node->n_outputs != p.n_results)
        return ont_fail(ONT_EINVAL, "%u outputs, expected %d", node->n_outputs, p.n_results);
    ont_shape shape = node->inputs[0].value->shape;
    for (uint32_t i = 1; i < node->n_inputs; i++)
        ONT_TRY(ont_shape_broadcast(&shape, &node->inputs[i].value->shape, &shape));
    for (int k = 0; k < p.n_results; k++) ONT_TRY(ont_infer_out(node, (uint32_t)k, p.steps[p.result[k]].out, &shape));
    return ONT_OK;
}

typedef struct fused_state {
    ont_tile_program program;
    ont_bcast walk;
    const ont_simd_table *simd;
} fused_state;

static ont_status prepare_with(const ont_simd_table *simd, const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    fused_state *s = ont_arena_alloc(arena, sizeof *s);
    if (!s) return ONT_ENOMEM;
    ONT_TRY(ont_tile_read(node, &s->program));
    ont_bcast_init(&s->walk, node, (int)node->n_inputs);
    s->simd = simd;
    out->state = s;
    return ONT_OK;
}

static ont_status prepare(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_with(ont_simd(), node, arena, out);
}

static ont_status prepare_ref(const ont_node *node, ont_arena *arena, ont_prepared *out)
{
    return prepare_with(ont_simd_plain(), node, arena, out);
}

static void row(const void *context, const ont_bcast *b, char *const *at, int64_t n)
{
    const ont_call *call = context;
    const fused_state *s = call->state;
    ont_tile_bind bind = {.first = (at[0] - (char *)call->out[0]) / (int64_t)s->program.result_size[0],
                          .seed = call->seed};
    ont_tile_bind_row(&bind, &s->program, call, b, at);
    ont_tile_run(s->simd, &s->program, &bind, n);
}

static ont_status run(const ont_call *call)
{
    const fused_state *s = call->state;
    char *base[ONT_BCAST_MAX] = {call->out[0]};
    for (int i = 0; i < s->program.n_operands; i++) base[i + 1] = (char *)(uintptr_t)call->in[i];
    ont_bcast_run(&s->walk, base, row, call);
    return ONT_OK;
}

static const ont_kernel kernels[] = {
    {.name = "fused_simd", .accept = ont_tile_accept, .prepare = prepare, .run = run, .inplace = UINT32_MAX},
    {.name = "fused_ref", .accept = ont_tile_accept, .prepare = prepare_ref, .run = run, .inplace = UINT32_MAX},
};

const ont_op ont_op_FusedElementwise = {.domain = ONT_DOMAIN, .name = "FusedElementwise", .since = 1, .min_inputs = 1,
                                        .max_inputs = ONT_TILE_OPERANDS, .flags = ONT_OP_NO_FOLD,
                                        .attributes = "formula:s parameters:F results:I steps:I", .infer = infer,
                                        ONT_KERNELS(kernels)};
