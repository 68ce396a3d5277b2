/*
 * Fuses transposes into matmuls. Before differentiation, so that the gradients need no transposes either: the exporter
 * emits a linear layer as a matmul with a transposed weight.
 */
#include "passes/fuse_transpose.h"

#include <string.h>

#include "passes/match.h"
#include "passes/pass.h"

/* The value of which `v` is the transpose in the last two dims; NULL: none. */
static ont_value *transposed(const ont_value *v)
{
    if (!v || v->kind != ONT_VALUE_NODE || v->shape.rank < 2 || !ONT_IS(v->def, Transpose)) return NULL;
    int rank = v->shape.rank;
    size_t n;
    const int64_t *perm = ont_attr_ints(v->def, "perm", &n);
    if (!perm) return rank == 2 ? ont_node_in(v->def, 0) : NULL; /* without perm all dims are reversed */
    if (n != (size_t)rank || perm[rank - 2] != rank - 1 || perm[rank - 1] != rank - 2) return NULL;
    for (int d = 0; d < rank - 2; d++)
        if (perm[d] != d) return NULL;
    return ont_node_in(v->def, 0);
}

static ont_status absorb(ont_graph *g, ont_node *node)
{
    static const char *const flags[] = {"transA", "transB"};
    for (uint32_t i = 0; i < 2; i++) {
        for (ont_value *x; (x = transposed(ont_node_in(node, i)));) {
            if (ONT_IS(node, MatMul)) ONT_TRY(ont_matmul_become_fused(node));
            ONT_TRY(ont_attr_set_int(g, node, flags[i], !ont_attr_int(node, flags[i], 0)));
            ont_node_set_input(node, i, x);
        }
    }
    return ONT_OK;
}

ont_status ont_pass_fuse_transpose(ont_graph *g)
{
    for (ont_node *node = g->first; node; node = node->next)
        if (ont_is_matmul_or_gemm(node)) ONT_TRY(absorb(g, node));
    return ont_pass_dce(g);
}
