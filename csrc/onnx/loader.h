/*
 * Shared by the parts of the loader: load.c (model and graph), nodes.c (nodes), inline.c (function calls), subgraph.c
 * (bodies of control flow). Included by these only.
 */
#ifndef ONT_ONNX_LOADER_H
#define ONT_ONNX_LOADER_H

#include "base/map.h"
#include "ir/graph.h"
#include "onnx-ml.pb-c.h"

enum {
    ONT_MAX_CALL_DEPTH = 32,     /* nesting of function calls */
    ONT_MAX_INLINED = 200000,    /* nodes created by inlining */
    ONT_MAX_ATTRIBUTES = 1024,   /* per node */
    ONT_MAX_OPSETS = 256,        /* per model or function */
    ONT_MAX_SYMBOLS = 4096,      /* symbolic dims */
    ONT_MAX_INTERFACE = 1 << 16, /* inputs or outputs per graph or node */
    ONT_MAX_OPSET = 28,          /* of ai.onnx: later opsets may change the meaning of an operator */
};

/* An attribute of a function being inlined: the value that the call gives, or the default, or NULL. */
typedef struct ont_binding {
    const char *name;
    const Onnx__AttributeProto *value;
} ont_binding;

/* A value of the enclosing graph that a subgraph reads, in the order of the subgraph inputs that stand for them. */
typedef struct ont_captured {
    ont_value *value;
    struct ont_captured *next;
} ont_captured;

/* A scope of names: the graph itself, one call of a function, or a subgraph. */
typedef struct ont_onnx_scope {
    const struct ont_onnx_scope *caller; /* NULL: the graph */
    const Onnx__FunctionProto *function; /* NULL: the graph */
    const char *where;                   /* "" or "function 'f' called by ...: ", for error messages */
    const char *prefix;                  /* prefix of names added to the graph: "" or "<call>/" */
    int depth;
    Onnx__OperatorSetIdProto **opsets;
    size_t n_opsets;
    ont_map values;  /* name in this scope to ont_value; ont_onnx_absent: omitted by the call */
    ont_map results; /* name of a function output in this scope to its name in the graph */
    const ont_binding *attributes;
    size_t n_attributes;
    struct ont_onnx_scope *outer; /* of a subgraph: the enclosing scope */
    ont_graph *g;                 /* of a subgraph: the graph being loaded */
    ont_captured *first_captured, *last_captured;
} ont_onnx_scope;

typedef struct ont_loader {
    ont_graph *g;
    ont_map names;      /* all names of values of the graph */
    ont_map node_names;
    ont_map functions;  /* functions of the model, by the key of ont_onnx_function() */
    size_t n_inlined;
    size_t max_bytes;  /* limit of the graph's arena, so that a small file cannot expand without bound */
    uint64_t n_renamed;
    int64_t n_random;
} ont_loader;

extern ont_value ont_onnx_absent;

static inline const char *ont_onnx_text(const char *text) /* for optional string fields */
{
    return text ? text : "";
}

static inline const char *ont_onnx_domain(const char *domain) /* "ai.onnx" is an alias of "" */
{
    domain = ont_onnx_text(domain);
    return domain[0] == 'a' && !__builtin_strcmp(domain, "ai.onnx") ? "" : domain;
}

/* load.c: EINVAL if `name` is already defined in this scope. The name is borrowed from the model. */
ont_status ont_onnx_define(ont_onnx_scope *scope, const char *name, ont_value *value) ONT_MUST_USE;
/* load.c: the unique name in the graph for `name` in this scope, allocated in the arena. */
ont_status ont_onnx_name(ont_loader *l, ont_onnx_scope *scope, const char *name, const char **result) ONT_MUST_USE;
/* load.c: ont_onnx_name() and a value of that name. */
ont_status ont_onnx_value(ont_loader *l, ont_onnx_scope *scope, ont_value_kind kind, const char *name,
                          ont_value **value) ONT_MUST_USE;
/* load.c: a constant whose elements are already in the arena. */
ont_status ont_onnx_constant_value(ont_loader *l, ont_onnx_scope *scope, const char *name, const ont_tensor *tensor)
    ONT_MUST_USE;

/* nodes.c */
ont_status ont_onnx_check_opsets(const ont_onnx_scope *scope) ONT_MUST_USE;
ont_status ont_onnx_nodes(ont_loader *l, ont_onnx_scope *scope, Onnx__NodeProto *const *nodes, size_t n) ONT_MUST_USE;
/* nodes.c: looks up a value; *value is NULL for "" and for an input that the call omits. */
ont_status ont_onnx_input(ont_loader *l, ont_onnx_scope *scope, const char *what, const char *name,
                          ont_value **value) ONT_MUST_USE;
/* nodes.c: resolves `proto`: itself, or the attribute of the call that it refers to; NULL: the call gives none. */
ont_status ont_onnx_resolve(const ont_onnx_scope *scope, const char *what, const Onnx__AttributeProto *proto,
                            const Onnx__AttributeProto **resolved) ONT_MUST_USE;

/* nodes.c: adds an Identity node. The name must be unique. */
ont_status ont_onnx_copy(ont_loader *l, const char *name, ont_value *from, ont_value **to) ONT_MUST_USE;

/* load.c: initializers and inputs of a GraphProto, loaded before its nodes. */
ont_status ont_onnx_initializers(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto) ONT_MUST_USE;
ont_status ont_onnx_inputs(ont_loader *l, ont_onnx_scope *scope, const Onnx__GraphProto *proto) ONT_MUST_USE;

/* subgraph.c: all subgraphs among a node's attributes, and the values of the enclosing graph that they read. */
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
/* Transfers the subgraphs to the node, whose last inputs are the captured values. */
ont_status ont_onnx_attach_subgraphs(ont_subgraphs *subgraphs, ont_graph *g, ont_node *node) ONT_MUST_USE;
void ont_onnx_drop_subgraphs(ont_subgraphs *subgraphs); /* destroys subgraphs that no node owns */

/* inline.c */
ont_status ont_onnx_list_functions(ont_loader *l, const Onnx__ModelProto *model) ONT_MUST_USE;
ont_status ont_onnx_function(ont_loader *l, const Onnx__NodeProto *node, const Onnx__FunctionProto **function)
    ONT_MUST_USE;
ont_status ont_onnx_inline(ont_loader *l, ont_onnx_scope *caller, const Onnx__NodeProto *call,
                           const Onnx__FunctionProto *function, const char *what) ONT_MUST_USE;
/* inline.c: counts nodes created by inlining; EINVAL beyond the limits. */
ont_status ont_onnx_charge(ont_loader *l, const char *what, size_t nodes) ONT_MUST_USE;

#endif
