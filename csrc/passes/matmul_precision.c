/*
 * torch.set_float32_matmul_precision(): float32 matmuls in bfloat16 with float32 accumulation, if the processor
 * supports that and the matmul gains. "medium" rounds both operands to bfloat16. "high" splits each operand into the
 * sum of two bfloat16 numbers and omits the product of the low parts: three matmuls with an error of 2^-16 of the
 * operands' magnitude, for processors with AMX, where a 16-bit matmul costs an eighth. One kernel splits the operands
 * while it packs them, and adds the three products in registers (gemm_bf16x3.h). "highest" changes nothing. Source
 * of the split: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
 * Higher-Precision Computations", 2019.
 */
#include <string.h>

#include "ops/matmul/matmul.h"
#include "passes/match.h"
#include "passes/options.h"
#include "passes/pass.h"

/* Rounding costs one pass over each operand: profitable for large matmuls only. */
static bool is_profitable(const ont_matmul_desc *p)
{
    return p->k >= 64 && p->m >= 32 && p->n >= 32 && p->m * p->n >= 128 * (p->m + p->n);
}

/* Gemm is taken only as a linear layer (beta 1). */
static bool is_float32_matmul(const ont_node *node, bool always)
{
    ont_matmul_desc p;
    if (!ont_is_matmul_or_gemm(node)) return false;
    if (ont_node_in(node, 0)->dtype != ONT_FLOAT32 || ont_node_in(node, 1)->dtype != ONT_FLOAT32) return false;
    if (ont_matmul_desc_read(node, &p) != ONT_OK || p.vector_a || p.vector_b) return false;
    if (ONT_IS(node, Gemm) && ont_node_in(node, 2) && ont_attr_float(node, "beta", 1.0) != 1) return false;
    ont_matmul_desc_fold_batch(&p);
    return always || is_profitable(&p);
}

static ont_value *build_matmul(ont_builder *b, const ont_node *like, ont_value *x, ont_value *y, const char *attr,
                               int64_t value)
{
    ont_node *node = x && y ? ont_build_node(b, ONT_DOMAIN, "FusedMatMul", (ont_value *[]){x, y}, 2, 1) : NULL;
    if (node) b->status = ont_attr_set_int(b->graph, node, "transA", ont_attr_int(like, "transA", 0));
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_int(b->graph, node, "transB", ont_attr_int(like, "transB", 0));
    if (node && b->status == ONT_OK)
        b->status = ont_attr_set_float(b->graph, node, "alpha", ont_attr_float(like, "alpha", 1.0));
    if (node && b->status == ONT_OK) b->status = ont_attr_set_int(b->graph, node, attr, value);
    return ont_build_done(b, node);
}

static ont_status lower(ont_graph *g, ont_node *node, ont_matmul_precision precision)
{
    ont_builder b = {.graph = g, .before = node, .backward = node->backward, .origin = ont_node_origin(node)};
    ont_value *x = ont_node_in(node, 0), *y = ont_node_in(node, 1), *c = ont_node_in(node, 2), *sum;
    if (precision == ONT_PRECISION_HIGH) {
        if (ONT_IS(node, FusedMatMul)) return ont_attr_set_int(g, node, "bf16x3", 1);
        sum = build_matmul(&b, node, x, y, "bf16x3", 1);
    } else {
        ont_value *x16 = ont_build_cast(&b, x, ONT_BFLOAT16), *y16 = ont_build_cast(&b, y, ONT_BFLOAT16);
        sum = build_matmul(&b, node, x16, y16, "to", ONT_FLOAT32);
    }
    if (c) sum = ont_build2(&b, "Add", sum, c);
    ONT_TRY(b.status);
    ont_value_replace_uses(g, node->outputs[0], sum);
    ont_graph_remove_node(g, node);
    return ONT_OK;
}

ont_status ont_pass_matmul_precision(ont_graph *g)
{
    int setting = ont_matmul_precision_setting();
    bool always = setting & ONT_PRECISION_EVERYWHERE;
    ont_matmul_precision precision = (ont_matmul_precision)(setting & ~ONT_PRECISION_EVERYWHERE);
    if (precision == ONT_PRECISION_HIGHEST || g->device) return ONT_OK;
    bool has = precision == ONT_PRECISION_HIGH ? ont_matmul_has_bf16x3() : always || ont_matmul_half_is_fast();
    if (!has) return ONT_OK;
    for (ont_node *node = g->first, *next; node; node = next) {
        next = node->next;
        if (is_float32_matmul(node, always)) ONT_TRY(lower(g, node, precision));
    }
    return ONT_OK;
}
