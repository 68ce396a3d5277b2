/*
 * The graph: values and nodes in topological order, with use lists.
 *
 * A graph owns an arena and everything in it: nodes are never freed one by one, a removed node is only unlinked. The
 * loader and the passes build graphs; the memory planner and the program read them. A node refers to its operator by an
 * opaque pointer, which ops/registry.c resolves, so that this layer depends on no operator.
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

/* One input of a node, linked into the use list of the value that it reads. */
typedef struct ont_use {
    ont_value *value; /* NULL: an optional input left out */
    ont_node *user;
    struct ont_use *prev, *next;
} ont_use;

typedef enum ont_value_kind {
    ONT_VALUE_INPUT,    /* graph input: bound at each call */
    ONT_VALUE_CONSTANT, /* initializer or folded constant: `data` holds its elements */
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
    const char *name; /* never empty; unique among the model's names, and unique among the anonymous values */
    bool anonymous;   /* the name was generated; a name of the model may be spelled the same */
    ont_dtype dtype;  /* ONT_UNDEFINED until inferred */
    bool has_shape;
    ont_shape shape;
    ont_node *def;      /* ONT_VALUE_NODE: the node that produces the value */
    uint32_t def_index; /* ONT_VALUE_NODE: index among the outputs of `def` */
    uint32_t input;     /* ONT_VALUE_INPUT: index among the graph's inputs */
    bool parameter;     /* ONT_VALUE_INPUT: a parameter of the module, constant between optimizer steps */
    ont_use *uses;
    ont_container container; /* sequences and optionals exist only while a program is built; see sequence.c */
    const ont_tensor *data;  /* elements where known at build time; a NODE value keeps `def` until it is folded */
    bool value_required;     /* shape inference needs the elements of this value; see passes/infer.c */
    bool probed;             /* a value probe computed the elements; see passes/pass.h */
};

struct ont_node {
    uint32_t id;
    const char *name;   /* unique; generated where the model gives none */
    const char *domain; /* "" is ai.onnx */
    const char *op_type;
    int64_t version;     /* opset version of its domain in the model that it came from */
    const struct ont_op *op;
    uint32_t n_inputs, n_outputs;
    ont_use *inputs;     /* trailing absent inputs are trimmed */
    ont_value **outputs; /* NULL: an optional output that is absent */
    ont_attr *attrs;
    ont_node *prev, *next;
    bool backward;          /* belongs to the backward phase */
    /*
     * Of a forward node in regions of torch.utils.checkpoint: their names, outermost first, each followed by '/'. NULL:
     * it is in none.
     */
    const char *region;
    const ont_node *origin; /* forward node whose gradient, recomputation or replacement this node is, or NULL */
};

struct ont_graph {
    ont_arena arena;
    const char *name;
    ont_node *first, *last;
    uint32_t n_nodes; /* node ids assigned so far, those of removed nodes included */
    ont_value **values;
    uint32_t n_values, cap_values;
    ont_value **inputs;
    uint32_t n_inputs;
    ont_value **outputs;
    uint32_t n_outputs;
    const char **symbols; /* names of symbolic dims */
    uint32_t n_symbols;
    /*
     * Of a subgraph, which is an attribute of one node: its last n_captures inputs are values of the enclosing graph.
     * They are inputs of the owning node from index first_capture on.
     */
    uint32_t n_captures, first_capture;
    const struct ont_device *device; /* the device that runs the graph; NULL: the CPU */
    bool torch_random;               /* Dropout draws the numbers of torch's CUDA kernels (passes/torch_random.c) */
    uint64_t random_offset;          /* how far forward advances the offset of torch's generator */
    struct {
        int level;      /* requested recompute level; see passes/cost.h */
        uint32_t nodes; /* nodes that run again in backward */
        size_t bytes;
        double cost;    /* cost added so far, in units of passes/cost.h */
        double marked;  /* cost of what the model marks, which no limit applies to (passes/recompute_regions.c) */
        double step;    /* cost of a step without either */
        size_t limit;   /* target of live bytes, which evict.c raises to the lowest possible; 0: by the level */
    } recompute;
    struct {
        uint32_t wanted;    /* which rows may be left out: ONT_PACK_ of passes/pack_rows.h */
        uint32_t nodes;     /* forward nodes that compute some rows only */
        int64_t rows[3][2]; /* computed, and all: of selected rows, those with labels, those that attention sees */
    } packed;
    struct {
        const struct ont_recompute_plan *plans; /* which ones the caller wants run again; see passes/recompute.h */
        uint32_t n_plans;
        struct ont_recompute_cluster *clusters; /* those that could */
        uint32_t n_clusters;
    } subgraphs;
};

ont_status ont_graph_create(const char *name, ont_graph **graph) ONT_MUST_USE;
void ont_graph_destroy(ont_graph *graph);
/* Deep copy. Elements of constants are shared by reference: `from` must outlive the copy. */
ont_status ont_graph_clone(const ont_graph *from, ont_graph **copy) ONT_MUST_USE;

/*
 * Copies the nodes of `body` (a subgraph, left unchanged) in front of `before`. `inputs` replace the inputs of `body`;
 * results[i] receives its output i. Copied values are anonymous, copied nodes are named "<scope>/<name>". Elements of
 * constants are shared by reference.
 */
ont_status ont_graph_instantiate(ont_graph *g, ont_node *before, const ont_graph *body, const char *scope,
                                 ont_value *const *inputs, ont_value **results) ONT_MUST_USE;

/*
 * NULL as name makes the value anonymous ("%<id>"). A given name must be free: the loader checks that, passes give no
 * names.
 */
ont_status ont_graph_add_value(ont_graph *g, ont_value_kind kind, const char *name, ont_value **value) ONT_MUST_USE;
ont_status ont_graph_add_input(ont_graph *g, const char *name, ont_dtype dtype, const ont_shape *shape,
                               ont_value **value) ONT_MUST_USE;
/* Copies `data` (shape, dtype and bytes) into the arena. */
ont_status ont_graph_add_constant(ont_graph *g, const char *name, const ont_tensor *data,
                                  ont_value **value) ONT_MUST_USE;
ont_status ont_graph_set_outputs(ont_graph *g, ont_value *const *outputs, uint32_t n) ONT_MUST_USE;
/* index of the symbol, which is added if new; -1 if out of memory */
int ont_graph_symbol(ont_graph *g, const char *name);

/* Operator and operands of a node to add. Entries of inputs and outputs may be NULL. */
typedef struct ont_node_spec {
    const char *domain, *op_type;
    ont_value *const *inputs, *const *outputs; /* outputs NULL: new values */
    uint32_t n_inputs, n_outputs;
} ont_node_spec;

/*
 * Adds a node in front of `before`, or at the end if that is NULL, and to the region of `before`. Strings and arrays
 * are copied.
 */
ont_status ont_graph_add_node(ont_graph *g, ont_node *before, const ont_node_spec *spec, ont_node **node) ONT_MUST_USE;
/*
 * Returns optional output `index` of a node and adds it if absent; gradient rules use it to save intermediate results.
 */
ont_status ont_node_ensure_output(ont_graph *g, ont_node *node, uint32_t index, ont_value **value) ONT_MUST_USE;
void ont_graph_remove_node(ont_graph *g, ont_node *node); /* the outputs of the node must have no uses */
void ont_graph_move_before(ont_graph *g, ont_node *node, ont_node *before);
void ont_node_set_input(ont_node *node, uint32_t index, ont_value *value);
void ont_value_replace_uses(ont_graph *g, ont_value *from, ont_value *to); /* graph outputs included */
bool ont_value_is_output(const ont_graph *g, const ont_value *value);

/* The only user of a value; NULL if it has several uses or is a graph output. */
ont_node *ont_single_user(const ont_graph *g, const ont_value *value);
/* The same, but NULL if the user belongs to another phase (forward or backward) than the value. */
ont_node *ont_single_user_in_phase(const ont_graph *g, const ont_value *value);

/* The node of the model that a node belongs to: the forward node that it differentiates or repeats, or itself. */
static inline const ont_node *ont_node_origin(const ont_node *node)
{
    while (node->origin) node = node->origin;
    return node;
}
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
 * Prints the graph in the style of ONNX's textual format, for tests, logs and save_onnx. A name that could be mistaken
 * for something else, such as that of an anonymous value, is quoted. *text is freed by ont_free().
 */
ont_status ont_graph_print(const ont_graph *g, char **text) ONT_MUST_USE;

#endif
