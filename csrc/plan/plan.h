/*
 * Memory plan: where every value of a program lives. A pure function of a specialised graph and its bound kernels'
 * needs; knows no pointers.
 */
#ifndef ONT_PLAN_PLAN_H
#define ONT_PLAN_PLAN_H

#include "ir/graph.h"

typedef enum ont_location_kind {
    ONT_LOCATION_NONE,     /* not stored: nobody reads it */
    ONT_LOCATION_INPUT,    /* graph input `index`, borrowed */
    ONT_LOCATION_CONSTANT, /* contents in the graph */
    ONT_LOCATION_SLAB,     /* at `offset` of the run's slab */
    ONT_LOCATION_OUTPUT,   /* in the block of graph output `index`, which outlives the run */
} ont_location_kind;

typedef struct ont_location {
    ont_location_kind kind;
    uint32_t index;
    size_t offset;
} ont_location;

typedef struct ont_plan_step { /* one node that runs a kernel, in order */
    const ont_node *node;
    uint32_t inplace;   /* as in ont_kernel */
    size_t work_bytes;
} ont_plan_step;

typedef struct ont_plan { /* arrays live in the arena given */
    ont_location *locations;     /* per value id */
    size_t *work_offsets;  /* per step, into the slab */
    bool *copied_outputs;  /* per graph output: not computed in place, copied from its value at the end of its phase */
    size_t slab_bytes;
    size_t lower_bound;    /* most bytes live at one step: no plan can need less */
    uint32_t inplace_count;
    uint32_t *deliver_before; /* per graph output: the step before which it is applied, ONT_PLAN_BLOCK: it is a block */
    bool *may_alias_input;       /* per graph output, a gradient: it may be computed over the input that it belongs to */
} ont_plan;

enum { ONT_PLAN_ALIGN = 64 };
#define ONT_PLAN_BLOCK UINT32_MAX

/*
 * Steps [0, split) are forward, the rest backward; graph outputs [0, n_forward_outputs) belong to the forward phase.
 * `is_view(node)` tells whether a node's output 0 is its input 0's storage.
 *
 * applied: NULL, or for each graph output NULL or the graph input that somebody will overwrite who reads this output
 * between two steps of the backward phase. Such an output is no block: it lies in the slab until then, which is as soon
 * as it is computed and no later step reads that input. An output that is itself a graph input stays a block, with what
 * the input held before anything was overwritten.
 *
 * gradient_of: NULL, or for each graph output the index of the graph input whose gradient it is, or -1. Where every
 * step that reads such an input comes before its gradient is written, or is the one that writes it and may work in
 * place, the gradient may lie in the input's memory if that is nobody else's, which only the caller of backward knows:
 * the plan gives it a block, and says in over_input that it need not be one.
 *
 * Offsets are assigned greedily, each into the tightest gap among blocks alive at the same time: by decreasing size,
 * then, as long as the plan is longer than its lower bound, in other orders, in which the block that stuck out goes
 * first. Sources: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020 (greedy by size,
 * by breadth); Joslin and Clements, "Squeaky Wheel Optimization", 1999.
 */
ont_status ont_plan_memory(const ont_graph *g, const ont_plan_step *steps, uint32_t n_steps, uint32_t split,
                           uint32_t n_forward_outputs, bool (*is_view)(const ont_node *),
                           const ont_value *const *delivered, const int32_t *gradient_of, ont_arena *arena,
                           ont_plan *plan) ONT_MUST_USE;

/*
 * An order of steps [first, last), all of them of one phase, in which less is alive at once than in theirs, it may be:
 * order[i] is the step that becomes step i, for i of that range alone. It is built from its end or from its start, and
 * neither is always the better one. See order.c.
 */
ont_status ont_plan_order(const ont_graph *g, const ont_plan_step *steps, uint32_t n_steps, uint32_t first,
                          uint32_t last, bool from_end, bool (*is_view)(const ont_node *),
                          uint32_t *order) ONT_MUST_USE;

/* One block of the assignment problem; exposed for tests. */
typedef struct ont_plan_block {
    size_t bytes;
    uint32_t first, last; /* steps at which it is alive, inclusive */
    size_t offset;        /* result */
} ont_plan_block;

/* ENOMEM where the blocks would not have addresses even one after the other. */
ont_status ont_plan_assign(ont_plan_block *blocks, uint32_t n, size_t *total) ONT_MUST_USE;
size_t ont_plan_lower_bound(const ont_plan_block *blocks, uint32_t n, uint32_t n_steps, size_t *per_step);

#endif
