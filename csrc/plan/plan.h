/*
 * Memory plan: the location of every value of a program. A pure function of a specialised graph and of the requirements
 * of its bound kernels; contains no pointers.
 */
#ifndef ONT_PLAN_PLAN_H
#define ONT_PLAN_PLAN_H

#include "ir/graph.h"

typedef enum ont_location_kind {
    ONT_LOCATION_NONE,     /* not stored: the value has no users */
    ONT_LOCATION_INPUT,    /* graph input `index`, memory of the caller */
    ONT_LOCATION_CONSTANT, /* constant, data of value `index` */
    ONT_LOCATION_SLAB,     /* `offset` bytes into the slab of the run */
    ONT_LOCATION_OUTPUT,   /* in the block of graph output `index`, which outlives the run */
} ont_location_kind;

typedef struct ont_location {
    ont_location_kind kind;
    uint32_t index;
    size_t offset;
} ont_location;

typedef struct ont_plan_step { /* one kernel invocation, in execution order */
    const ont_node *node;
    uint32_t inplace;   /* as ont_kernel.inplace */
    size_t work_bytes;
} ont_plan_step;

/* A storage in the slab: its last value in a chain of views and in-place results, and its live range in steps. */
typedef struct ont_plan_lifetime {
    uint32_t value, first, last; /* inclusive */
    size_t bytes;
} ont_plan_lifetime;

typedef struct ont_plan { /* arrays live in the given arena */
    ont_location *locations; /* per value id */
    size_t *work_offsets;    /* per step: byte offset of its scratch memory in the slab */
    bool *copied_outputs;    /* per graph output: copied from its value to its block at the end of its phase */
    size_t slab_bytes;
    size_t lower_bound;    /* maximum of live bytes over all steps: no plan can need less */
    uint32_t inplace_count;
    /* per graph output: the step before which it goes to the gradient callback; ONT_PLAN_BLOCK: it is a block */
    uint32_t *deliver_before;
    bool *early_outputs;         /* per graph output: a gradient that forward begins, so that its block is there then */
    ont_plan_lifetime *lifetimes; /* the storages in the slab, by value; without scratch memory */
    uint32_t n_lifetimes;
} ont_plan;

enum { ONT_PLAN_ALIGN = 64 };
#define ONT_PLAN_BLOCK UINT32_MAX

/*
 * Steps [0, split) are forward, the rest backward; graph outputs [0, n_forward_outputs) belong to the forward phase.
 * is_view(node): output 0 of the node aliases its input 0.
 *
 * delivered: NULL, or per graph output NULL or the graph input whose gradient goes to the callback, which overwrites
 * that input (an optimizer in backward). Such an output has no block: it lives in the slab until the step before which
 * it is delivered, which is the first one at which it is final and no later step reads the input. An output that is
 * itself a graph input stays a block and keeps the value from before any input was overwritten.
 */
typedef struct ont_plan_input {
    const ont_graph *g;
    const ont_plan_step *steps;
    uint32_t n_steps, split, n_forward_outputs;
    bool (*is_view)(const ont_node *);
    const ont_value *const *delivered;
    size_t redzone; /* bytes that stay free behind each block */
} ont_plan_input;

/*
 * Offsets are assigned greedily, each block into the tightest gap among those live at the same time: by decreasing
 * size, then, while the plan is longer than its lower bound, in other orders, in which the block that ended last goes
 * first. Sources: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020 (greedy by size,
 * by breadth); Joslin and Clements, "Squeaky Wheel Optimization", 1999.
 */
ont_status ont_plan_memory(const ont_plan_input *in, ont_arena *arena, ont_plan *plan) ONT_MUST_USE;
/* No step writes over what it, or a later one, still needs. EINTERNAL names the step. Debug builds call it. */
ont_status ont_plan_verify(const ont_plan_input *in, const ont_plan *plan) ONT_MUST_USE;

/*
 * List scheduling of steps [first, last) of one phase to lower the peak of live bytes, without a guarantee: order[i] is
 * the step that becomes step i, set for that range only. The order is built from its end or from its start; neither is
 * better for every graph. Of the input, g, steps, n_steps and is_view count. See order.c.
 */
ont_status ont_plan_order(const ont_plan_input *in, uint32_t first, uint32_t last, bool from_end,
                          uint32_t *order) ONT_MUST_USE;

/* A block of memory with a live range, to which an offset is assigned; public for unit tests. */
typedef struct ont_plan_block {
    size_t bytes;
    uint32_t first, last; /* live range in steps, inclusive */
    size_t offset;        /* result, in bytes */
} ont_plan_block;

/* ENOMEM if the sum of all blocks exceeds the address space. */
ont_status ont_plan_assign(ont_plan_block *blocks, uint32_t n, size_t *total) ONT_MUST_USE;
size_t ont_plan_lower_bound(const ont_plan_block *blocks, uint32_t n, uint32_t n_steps, size_t *per_step);

#endif
