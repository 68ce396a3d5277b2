/*
 * The graph: values and nodes in topological order, with use lists.
 *
 * A graph owns an arena and everything in it: there is no per-node free, a removed node is only unlinked. Loaders and
 * passes build graphs, planners read them. Nodes know their operator as an opaque pointer, resolved by ops/table.c,
 * so that this layer knows no operator by name.
 */
#ifndef ONT_IR_GRAPH_H
#define ONT_IR_GRAPH_H

#include "base/arena.h"
#include "base/shape.h"
#include "ir/attr.h"

typedef struct ont_graph ont_graph;
typedef struct ont_node ont_node;
typedef struct ont_value ont_value;
struct ont_op;
struct ont_device;

/* One input slot of a node, linked into the use list of the value it reads. */
typedef struct ont_use {
    ont_value *value; /* NULL: an optional input left out */
    ont_node *user;
    struct ont_use *prev, *next;
} ont_use;

typedef enum ont_value_kind {
    ONT_VALUE_INPUT,    /* graph input: bound at each call */
    ONT_VALUE_CONSTANT, /* initializer or folded: contents in `data` */
    ONT_VALUE_NODE,     /* output of a node */
} ont_value_kind;

typedef enum ont_container {
    ONT_TENSOR,
    ONT_SEQUENCE,
    ONT_OPTIONAL,
} ont_container;

struct ont_value {
    uint32_t id;        /* index in graph->values */
    ont_value_kind kind;
    const char *name;   /* never empty; unique among the given ones, and among the made-up ones */
    bool anonymous;       /* the name is not the model's, which may have one that reads the same */
    ont_dtype dtype;    /* ONT_UNDEFINED until inferred */
    bool has_shape;
    ont_shape shape;
    ont_node *def;      /* producing node, of kind NODE */
    uint32_t def_index; /* which output of it */
    uint32_t input;     /* which graph input, of kind INPUT */
    bool parameter;     /* of kind INPUT: a module's, which changes between steps alone */
    ont_use *uses;
    ont_container container; /* not TENSOR: exists only while a program is built; see ops/sequence.c */
    const ont_tensor *data; /* contents where known at build time; a NODE value keeps its node until folded */
    bool value_required;            /* an inference could not go on without its contents; for passes/infer.c */
    bool probed;           /* its contents were given by a probe */
};

struct ont_node {
    uint32_t id;
    const char *name;    /* unique, made up where the model has none */
    const char *domain;  /* "" is ai.onnx */
    const char *op_type;
    int64_t version;     /* opset of its domain in the model it came from */
    const struct ont_op *op;
    uint32_t n_inputs, n_outputs;
    ont_use *inputs;     /* trailing absent inputs are trimmed */
    ont_value **outputs; /* NULL: an optional output nobody asked for */
    ont_attr *attrs;
    ont_node *prev, *next;
    bool backward;       /* made by the gradient pass, or moved behind the split */
    const ont_node *origin; /* forward node that this one is the gradient of, or NULL */
};

struct ont_graph {
    ont_arena arena;
    const char *name;
    ont_node *first, *last;
    uint32_t n_nodes; /* ids handed out, removed nodes counted */
    ont_value **values;
    uint32_t n_values, cap_values;
    ont_value **inputs;
    uint32_t n_inputs;
    ont_value **outputs;
    uint32_t n_outputs;
    const char **symbols; /* names of symbolic dims */
    uint32_t n_symbols;
    /* A subgraph, attribute of one node: its last inputs are values from around it, that node's inputs from here on. */
    uint32_t n_captures, first_capture;
    const struct ont_device *device; /* whose kernels will run it; NULL: the CPU's */
    bool torch_random;      /* Dropout draws what torch's kernels draw on that device (passes/torch_random.c) */
    uint64_t random_offset; /* by which torch's generator is ahead after the forward part */
    struct {
        int level;      /* asked for; passes/recompute.h */
        uint32_t nodes; /* that run again in backward, and the bytes that are not kept for it */
        size_t bytes;
        double work;    /* spent on them so far, as passes/recompute.c counts */
    } recompute;
};

ont_status ont_graph_create(const char *name, ont_graph **graph) ONT_MUST_USE;
void ont_graph_destroy(ont_graph *graph);
/* Deep copy, constants' contents shared by reference: `from` must outlive the copy. */
ont_status ont_graph_clone(const ont_graph *from, ont_graph **copy) ONT_MUST_USE;

/*
 * Copies the nodes of `body` (a subgraph, untouched) in front of `before`: results[i] is its output i with values given
 * for its inputs. Values get made-up names, nodes "<scope>/<name>"; constants' contents are shared by reference.
 */
ont_status ont_graph_instantiate(ont_graph *g, ont_node *before, const ont_graph *body, const char *scope,
                                 ont_value *const *inputs, ont_value **results) ONT_MUST_USE;

/* Name NULL: made up from the id, as "%<id>". A given name must be free: the loader checks, builders give none. */
ont_status ont_graph_add_value(ont_graph *g, ont_value_kind kind, const char *name, ont_value **value) ONT_MUST_USE;
ont_status ont_graph_add_input(ont_graph *g, const char *name, ont_dtype dtype, const ont_shape *shape,
                               ont_value **value) ONT_MUST_USE;
/* Copies `data` (shape, dtype and bytes) into the arena. */
ont_status ont_graph_add_constant(ont_graph *g, const char *name, const ont_tensor *data,
                                  ont_value **value) ONT_MUST_USE;
ont_status ont_graph_set_outputs(ont_graph *g, ont_value *const *outputs, uint32_t n) ONT_MUST_USE;
int ont_graph_symbol(ont_graph *g, const char *name); /* its index, added where new; -1 without memory */

/*
 * Adds a node before `before`, or at the end where that is NULL, with `n_outputs` fresh output values (or the values
 * given in `outputs`, entries of which may be NULL). Strings are copied.
 */
ont_status ont_graph_add_node(ont_graph *g, ont_node *before, const char *domain, const char *op_type,
                              ont_value *const *inputs, uint32_t n_inputs, ont_value *const *outputs,
                              uint32_t n_outputs, ont_node **node) ONT_MUST_USE;
/* The optional output `index` of a node, added where the node was built without it (a gradient rule wants it saved). */
ont_status ont_node_ensure_output(ont_graph *g, ont_node *node, uint32_t index, ont_value **value) ONT_MUST_USE;
void ont_graph_remove_node(ont_graph *g, ont_node *node); /* its outputs must be unused */
void ont_graph_move_before(ont_graph *g, ont_node *node, ont_node *before);
void ont_node_set_input(ont_node *node, uint32_t index, ont_value *value);
void ont_value_replace_uses(ont_graph *g, ont_value *from, ont_value *to); /* graph outputs included */
bool ont_value_is_output(const ont_graph *g, const ont_value *value);
uint32_t ont_value_n_uses(const ont_value *value);

/* False for NULL. */
bool ont_node_is(const ont_node *node, const char *domain, const char *op_type);
/* The only reader of a value; NULL where there are others, the caller of the graph among them. */
ont_node *ont_single_user(const ont_graph *g, const ont_value *value);
/* The same, NULL also where it is on the other side of the split between forward and backward. */
ont_node *ont_single_user_in_phase(const ont_graph *g, const ont_value *value);

static inline ont_value *ont_node_in(const ont_node *node, uint32_t index)
{
    return index < node->n_inputs ? node->inputs[index].value : NULL;
}
static inline ont_value *ont_node_out(const ont_node *node, uint32_t index)
{
    return index < node->n_outputs ? node->outputs[index] : NULL;
}

/*
 * Checks every invariant: order, use lists, ids, operators' outputs owned by their nodes, unique names of the graph's
 * inputs and outputs. EINTERNAL names the node. Passes are verified with it in debug builds; the loader runs it always.
 */
ont_status ont_graph_verify(const ont_graph *g) ONT_MUST_USE;

/*
 * ONNX-text style, for tests, logs and save_onnx. A given name that could be taken for something else, a made-up name
 * among them, stands in quotes. *text is heap memory: ont_free() it.
 */
ont_status ont_graph_print(const ont_graph *g, char **text) ONT_MUST_USE;

#endif
