/*
 * What several passes ask of nodes and values while they match patterns.
 */
#ifndef ONT_PASSES_MATCH_H
#define ONT_PASSES_MATCH_H

#include "base/alloc.h"
#include "ops/op.h"

/* The node that computes the value; NULL: none, it is an input or a constant, or absent. */
static inline ont_node *ont_producer(const ont_value *v)
{
    return v && v->kind == ONT_VALUE_NODE ? v->def : NULL;
}

/* The value whose memory input `index` aliases; NULL: the input is absent. */
static inline const ont_value *ont_root_in(const ont_node *node, uint32_t index)
{
    const ont_value *v = node->inputs[index].value;
    return v ? ont_value_root(v) : NULL;
}

/* The 16-bit value of which v is a Cast; else v. */
static inline ont_value *ont_before_cast(ont_value *v)
{
    const ont_node *cast = ont_producer(v);
    return ONT_IS(cast, Cast) && ont_dtype_is_half(ont_node_in(cast, 0)->dtype) ? ont_node_in(cast, 0) : v;
}

static inline bool ont_is_matmul(const ont_node *node)
{
    return ONT_IS(node, MatMul) || ONT_IS(node, FusedMatMul);
}

static inline bool ont_is_matmul_or_gemm(const ont_node *node)
{
    return ont_is_matmul(node) || ONT_IS(node, Gemm);
}

/* Turns a MatMul into a FusedMatMul of the same operands. */
static inline ont_status ont_matmul_become_fused(ont_node *node)
{
    const ont_op *op = ont_op_find(ONT_DOMAIN, "FusedMatMul", INT64_MAX);
    if (!op) return ont_fail(ONT_EINTERNAL, "FusedMatMul is not in the table");
    node->domain = op->domain;
    node->op_type = op->name;
    node->op = op;
    node->version = op->since;
    return ONT_OK;
}

/* The position of each node by its id, from 1 on, as an array of `room` elements, at least g->n_nodes; to be freed. */
static inline ont_status ont_node_positions(const ont_graph *g, size_t room, uint32_t **positions)
{
    uint32_t at = 0, *found = ont_calloc(room ? room : 1, sizeof *found);
    if (!found) return ONT_ENOMEM;
    for (const ont_node *node = g->first; node; node = node->next) found[node->id] = ++at;
    *positions = found;
    return ONT_OK;
}

#endif
