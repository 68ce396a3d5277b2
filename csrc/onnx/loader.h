/*
 * What the parts of the loader share: load.c (model and graph), nodes.c (nodes), inline.c (calls of functions),
 * subgraph.c (bodies of control flow).
 * Nobody else includes it.
 */
#ifndef ONT_ONNX_LOADER_H
#define ONT_ONNX_LOADER_H

#include "base/map.h"
#include "ir/graph.h"
#include "onnx-ml.pb-c.h"

enum {
    ONT_MAX_CALL_DEPTH = 32,      /* functions that call functions */
    ONT_MAX_INLINED = 200000,     /* nodes that functions may expand to */
    ONT_MAX_ATTRIBUTES = 1024,    /* of one node */
    ONT_MAX_OPSETS = 256,         /* imports of a model or function */
    ONT_MAX_SYMBOLS = 4096,       /* names of symbolic dims */
    ONT_MAX_INTERFACE = 1 << 16,  /* inputs or outputs of a graph or node */
    ONT_MAX_OPSET = 28,           /* of ai.onnx: later ones may mean something else by the same name */
};

/* An attribute of the function that is being inlined: what its call gives, or the default, or NULL: neither. */
typedef struct ont_binding {
    const char *name;
    const Onnx__AttributeProto *value;
} ont_binding;

/* A value from around a subgraph that is read in it, in the order of the inputs that stand for them. */
typedef struct ont_captured {
    ont_value *value;
    struct ont_captured *next;
} ont_captured;

/* Where names have a meaning: the graph itself, one call of a function, or a subgraph. */
typedef struct ont_onnx_scope {
    const struct ont_onnx_scope *caller; /* NULL: the graph */
    const Onnx__FunctionProto *function; /* NULL: the graph */
    const char *where;                   /* "" or "function 'f' called by ...: ", for messages */
    const char *prefix;                  /* of names that this scope gives to the graph: "" or "<call>/" */
    int depth;
    Onnx__OperatorSetIdProto **opsets;
    size_t n_opsets;
    ont_map values;                      /* name here to ont_value; to ont_onnx_absent: left out by the call */
    ont_map results;                     /* name of a function's output here to its name in the graph */
    const ont_binding *attributes;
    size_t n_attributes;
    struct ont_onnx_scope *outer; /* of a subgraph: where names are looked up that it does not define */
    ont_graph *g;                 /* of a subgraph: what is loaded */
    ont_captured *first_captured, *last_captured;
} ont_onnx_scope;

typedef struct ont_loader {
    ont_graph *g;
    ont_map names;      /* every name given to a value of the graph */
    ont_map node_names;
    ont_map functions;  /* of the model, by ont_onnx_function's key */
    size_t n_inlined;
    size_t most_bytes;  /* of the graph's arena, so that a small file cannot expand without end */
    uint64_t n_renamed;
    int64_t n_random;
} ont_loader;

extern ont_value ont_onnx_absent;

static inline const char *ont_onnx_text(const char *text) /* an optional string field */
{
    return text ? text : "";
}

static inline const char *ont_onnx_domain(const char *domain) /* "ai.onnx" is an alias of "" */
{
    domain = ont_onnx_text(domain);
    return domain[0] == 'a' && !__builtin_strcmp(domain, "ai.onnx") ? "" : domain;
}

/* load.c: EINVAL where `name` has a value in this scope. The name is borrowed from the model. */
ont_status ont_onnx_define(ont_onnx_scope *scope, const char *name, ont_value *value) ONT_MUST_USE;
/* load.c: the name in the graph of what this scope calls `name`; unique, in the arena. */
ont_status ont_onnx_name(ont_loader *l, ont_onnx_scope *scope, const char *name, const char **result) ONT_MUST_USE;
/* load.c: ont_onnx_name and a value of that name. */
ont_status ont_onnx_value(ont_loader *l, ont_onnx_scope *scope, ont_value_kind kind, const char *name,
                          ont_value **value) ONT_MUST_USE;
/* load.c: a constant with contents that are already in the arena. */
ont_status ont_onnx_constant_value(ont_loader *l, ont_onnx_scope *scope, const char *name, const ont_tensor *tensor)
    ONT_MUST_USE;

/* nodes.c */
ont_status ont_onnx_check_opsets(const ont_onnx_scope *scope) ONT_MUST_USE;
ont_status ont_onnx_nodes(ont_loader *l, ont_onnx_scope *scope, Onnx__NodeProto *const *nodes, size_t n) ONT_MUST_USE;
/* nodes.c: the value named; *value is NULL for "" and for an input that the call leaves out. */
ont_status ont_onnx_input(ont_loader *l, ont_onnx_scope *scope, const char *what, const char *name,
                          ont_value **value) ONT_MUST_USE;
/* nodes.c: what `proto` stands for here: itself, or the attribute of the call that it refers to; NULL: not given. */
ont_status ont_onnx_resolve(const ont_onnx_scope *scope, const char *what, const Onnx__AttributeProto *proto,
                            const Onnx__AttributeProto **resolved) ONT_MUST_USE;

/* nodes.c: `wanted` where it is free (it may be NULL), else the node's made-up name, made unique. */
ont_status ont_onnx_name_node(ont_loader *l, const char *wanted, ont_node *node) ONT_MUST_USE;
/* nodes.c: an Identity node. The name is unique already. */
ont_status ont_onnx_copy(ont_loader *l, const char *name, ont_value *from, ont_value **to) ONT_MUST_USE;

/* load.c: what a graph proto lists; the nodes are between them. */
ont_status ont_onnx_initializers(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto) ONT_MUST_USE;
ont_status ont_onnx_inputs(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto) ONT_MUST_USE;

/* subgraph.c: every subgraph among a call's attributes, and the values from around that they read. */
typedef struct ont_subgraphs {
    struct ont_subgraph {
        const char *name;
        ont_graph *g;
    } *items;
    uint32_t n, n_captured;
    ont_value **captured;
} ont_subgraphs;
ont_status ont_onnx_subgraphs(ont_loader *l, ont_onnx_scope *scope, const Onnx__NodeProto *call, const char *what,
                              ont_subgraphs *subgraphs) ONT_MUST_USE;
/* The node's inputs end with what was captured: it owns the subgraphs from now on. */
ont_status ont_onnx_attach_subgraphs(ont_subgraphs *subgraphs, ont_graph *g, ont_node *node) ONT_MUST_USE;
void ont_onnx_drop_subgraphs(ont_subgraphs *subgraphs); /* those that no node owns */

/* inline.c */
ont_status ont_onnx_list_functions(ont_loader *l, const Onnx__ModelProto *model) ONT_MUST_USE;
ont_status ont_onnx_function(ont_loader *l, const Onnx__NodeProto *node, const Onnx__FunctionProto **function)
    ONT_MUST_USE;
ont_status ont_onnx_inline(ont_loader *l, ont_onnx_scope *caller, const Onnx__NodeProto *call,
                           const Onnx__FunctionProto *function, const char *what) ONT_MUST_USE;
/* inline.c: counts nodes that come from functions; EINVAL beyond the limits. */
ont_status ont_onnx_charge(ont_loader *l, const char *what, size_t nodes) ONT_MUST_USE;

#endif
