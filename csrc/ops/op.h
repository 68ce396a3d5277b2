/*
 * The contract of an operator: what a descriptor contains, what its functions may rely on.
 *
 * A file ops/<family>/<file>.c holds attributes, shape inference, gradient rule and kernels (best first, the reference
 * kernel behind all of its dtypes), and ends in descriptors, each of which is listed once in ops.def. Passes, planner
 * and executor access operators through this header alone.
 *
 * Graphs are specialised before anything here runs: every input of infer() has a dtype and a static shape. Shapes that
 * a model computes (Shape, Gather, Concat ... into Reshape) have been folded to constants.
 */
#ifndef ONT_OPS_OP_H
#define ONT_OPS_OP_H

#include "ir/graph.h"
#include "simd/simd.h"

typedef struct ont_op ont_op;
typedef struct ont_kernel ont_kernel;
typedef struct ont_call ont_call;
typedef struct ont_builder ont_builder;
typedef struct ont_tile_step ont_tile_step; /* ops/elementwise/tile_program.h */
typedef struct ont_kernel_list ont_kernel_list;
struct ont_device;

/* ---- shape inference ---------------------------------------------------------------------------------------- */

/*
 * infer(g, node): checks arity, dtypes and attributes, sets dtype and shape of every present output with
 * ont_infer_out(), and sets output->data if it follows without computation (Shape). Errors need not name the node: the
 * pass prepends "<op_type> '<name>'". An input whose value must be known is read with ont_const_ints().
 */
typedef ont_status (*ont_infer_fn)(ont_graph *g, ont_node *node);

ont_status ont_infer_out(ont_node *node, uint32_t index, ont_dtype dtype, const ont_shape *shape) ONT_MUST_USE;
/* Output 0 has the dtype and shape of input 0: enough for unary elementwise operators. */
ont_status ont_infer_same(ont_graph *g, ont_node *node) ONT_MUST_USE;
/* Output 0 has the dtype of input 0 and the shape in attribute "shape". */
ont_status ont_infer_shape_attr(ont_graph *g, ont_node *node) ONT_MUST_USE;
/* Output 0 is the broadcast of all inputs, whose dtypes must agree; ont_infer_compare() gives it dtype bool. */
ont_status ont_infer_broadcast(ont_graph *g, ont_node *node) ONT_MUST_USE;
ont_status ont_infer_compare(ont_graph *g, ont_node *node) ONT_MUST_USE;
/*
 * Gradient of a normalisation: (x, scale ...) -> (dx as x, dscale as scale, dbias as scale), the last two if scale is
 * present.
 */
ont_status ont_infer_norm_grad(ont_graph *g, ont_node *node) ONT_MUST_USE;
/* EINVAL names the input if it is absent. */
ont_status ont_need_input(const ont_node *node, uint32_t index, ont_value **value) ONT_MUST_USE;
/*
 * Reads the integers of input `index` (int64 or int32, known at build time), or of attribute `attr` if that input is
 * absent (older opsets). Either source may be disabled by -1 or NULL. *count is -1 if neither is present. EINVAL if
 * there are more than `capacity`.
 */
ont_status ont_const_ints(const ont_node *node, int index, const char *attr, int64_t *values, int capacity,
                          int *count) ONT_MUST_USE;
/*
 * Elements of input `index`. ENEEDVALUE if they are unknown: infer() returns that status, a value probe computes the
 * elements, and infer() runs again with a constant as the input. Request inputs of the node only, and in expand()
 * before anything is built. An operator whose shape depends on something else, such as a count, expands (deferred) into
 * a node that computes it and a node that has it as an input.
 */
ont_status ont_need_data(const ont_node *node, uint32_t index, const ont_tensor **data) ONT_MUST_USE;
/* The single element of a constant input as double; EINVAL otherwise. */
ont_status ont_const_scalar(const ont_node *node, uint32_t index, double *value) ONT_MUST_USE;

/* ---- building nodes ----------------------------------------------------------------------------------------- */

/*
 * Adds inferred nodes at one position of a graph. The first failure is kept: later calls return NULL at once, so that
 * calls can be nested and the caller checks `status` once at the end. A NULL operand counts as a failure.
 */
struct ont_builder {
    ont_graph *graph;
    ont_node *before; /* insertion point; NULL: at the end */
    bool backward;    /* nodes are added to the backward phase */
    const ont_node *origin;
    const char *scope; /* if not NULL, nodes are named "<scope>/<name>", which leads errors back to the model's node */
    bool deferred;     /* nodes are left for the inference pass: for an expand() whose nodes need probed values */
    ont_status status;
};

ont_node *ont_build_node(ont_builder *b, const char *domain, const char *op_type, ont_value *const *inputs,
                         uint32_t n_inputs, uint32_t n_outputs); /* not inferred: set attributes, then call ... */
ont_value *ont_build_done(ont_builder *b, ont_node *node); /* ... this, which infers the node and returns output 0 */
ont_value *ont_build1(ont_builder *b, const char *op_type, ont_value *x);
ont_value *ont_build2(ont_builder *b, const char *op_type, ont_value *x, ont_value *y);
ont_value *ont_build3(ont_builder *b, const char *op_type, ont_value *x, ont_value *y, ont_value *z);
ont_value *ont_build_scalar(ont_builder *b, ont_dtype dtype, double value);            /* 0-d constant */
ont_value *ont_build_const_ints(ont_builder *b, const int64_t *values, size_t count);  /* 1-d int64 constant */
ont_value *ont_build_full(ont_builder *b, ont_dtype dtype, const ont_shape *shape, double value); /* by Expand */
ont_value *ont_build_cast(ont_builder *b, ont_value *x, ont_dtype to);
ont_value *ont_build_reshape(ont_builder *b, ont_value *x, const ont_shape *shape);
ont_value *ont_build_transpose(ont_builder *b, ont_value *x, const int64_t *perm);
ont_value *ont_build_sum_to(ont_builder *b, ont_value *x, const ont_shape *shape); /* sums over broadcast dims */
ont_value *ont_build_reduce(ont_builder *b, const char *op_type, ont_value *x, const int64_t *axes, size_t n_axes,
                            bool keepdims);

/* ---- expansion ---------------------------------------------------------------------------------------------- */

/*
 * expand(b, node, outputs): builds the node from other operators and sets outputs[i] for every present output i. Runs
 * after the node's inputs are inferred (and after infer(), if there is one) and before differentiation, so that
 * gradients are those of the parts. Called by the inference pass, and by ont_build_done() for a node that a gradient
 * rule or another expansion built. An operator with expand() needs neither kernels nor infer(); one that has kernels
 * on the graph's device and a gradient (or NO_GRAD) is expanded only if no kernel accepts it. outputs[i] may be an
 * input, which is passed through. Absent outputs may be set too: the array has room for ONT_EXPAND_SPARE entries beyond
 * those of the node. Failures go to b->status; the operator's name is prepended.
 */
enum { ONT_EXPAND_SPARE = 8 };
typedef void (*ont_expand_fn)(ont_builder *b, ont_node *node, ont_value **outputs);

bool ont_op_expands(const ont_graph *g, const ont_node *node);
/*
 * Replaces the node by its expansion: users read its outputs instead, node->outputs[i] points to them, and the node is
 * removed. *first (may be NULL) is the first node built, or the node behind the removed one if none was.
 */
ont_status ont_op_expand(ont_graph *g, ont_node *node, ont_node **first) ONT_MUST_USE;
/* Fails the builder: for expand() what `return ont_fail()` is for infer(). */
#define ont_build_fail(b, code, ...) \
    do { \
        if ((b)->status == ONT_OK) (b)->status = ont_fail((code), __VA_ARGS__); \
    } while (0)

/* ---- gradients ---------------------------------------------------------------------------------------------- */

/*
 * grad(g): reads input I(i), output O(i) and output gradient GO(i), builds nodes with g->b, and calls GI(i, value) for
 * inputs with WANTS(i). A gradient of the broadcast shape is accepted: the gradient pass reduces it to the shape of the
 * input, accumulates, and drops gradients that have no use. GO(i) is a tensor of zeros, built on demand, if no gradient
 * reached output i.
 */
typedef struct ont_grad {
    ont_builder b;
    ont_node *node;
    ont_value **out_grads; /* per output; NULL: no gradient reached it */
    ont_value **in_grads;  /* per input; set by the rule */
    const bool *wants;     /* per input */
} ont_grad;

typedef void (*ont_grad_fn)(ont_grad *g);

#define I(i) ont_node_in(g->node, (i))
#define O(i) ont_node_out(g->node, (i))
#define GO(i) ont_grad_out(g, (i))
#define WANTS(i) ((i) < g->node->n_inputs && g->wants[i])
#define GI(i, value) ont_grad_set(g, (i), (value))

ont_value *ont_grad_out(ont_grad *g, uint32_t index);
void ont_grad_set(ont_grad *g, uint32_t index, ont_value *value);
/* Fails with ONT_EUNSUPPORTED and a reason; the pass names the node. */
void ont_grad_refuse(ont_grad *g, const char *reason);

/* ---- kernels ------------------------------------------------------------------------------------------------ */

struct ont_call {
    const ont_node *node;  /* dtypes, shapes and attributes; immutable while the program lives */
    const void *state;     /* result of prepare(), or NULL */
    const void *const *in; /* per input: row-major elements; NULL: absent */
    void *const *out;      /* per output: row-major memory; NULL: absent */
    void *work;            /* scratch memory of work_bytes, 64-byte aligned */
    uint64_t seed;         /* Philox key of this run */
    /* Device kernels only; all pointers above are device memory. */
    const struct ont_device *device;
    void *stream;
    const uint64_t *seed_at; /* the key in device memory, so that a captured graph reads the key of the current run */
    struct ont_fault *fault; /* device/device.h */
    int32_t step;
};

typedef struct ont_prepared {
    void *state;
    size_t work_bytes;
} ont_prepared;

struct ont_kernel {
    const char *name; /* <op>_<what is special about it>; <op>_ref: the reference */
    /* NULL if the kernel supports the node, else the reason why not. */
    const char *(*accept)(const ont_node *node);
    /*
     * Optional, of an accepted node when a program is built: NULL if the kernel is faster than the next one, by a
     * measurement that takes milliseconds, else the reason why not.
     */
    const char *(*measure)(const ont_node *node);
    /* Optional: computes and allocates once; memory comes from the program's arena. */
    ont_status (*prepare)(const ont_node *node, ont_arena *arena, ont_prepared *prepared);
    /* Allocates nothing and writes only outputs and work; may fail on invalid data (an index out of range). */
    ont_status (*run)(const ont_call *call);
    /* Optional: releases what prepare() allocated outside the arena (a library's handle). */
    void (*release)(void *state);
    uint32_t inplace; /* bit i: output 0 may share storage with input i (same size in bytes) */
    /* Competes with other tuned kernels that accept the node, see ont_op_rivals(); may run twice, so not in place. */
    bool tuned;
    /* Optional: bytes of what forward keeps for the gradient in a layout of the kernel's own (recurrent_whole.c). */
    size_t (*saved_bytes)(const ont_node *node);
};

/* The kernels of a device for one operator (from opset `since` on), best first. */
struct ont_kernel_list {
    const char *domain, *name;
    int since;
    const ont_kernel *kernels;
    uint32_t n_kernels;
};

/* accept() of kernels that support every dtype, and of those that need float32 or float64 as first input. */
const char *ont_accept_any(const ont_node *node);
const char *ont_accept_float(const ont_node *node);

/* ---- descriptor --------------------------------------------------------------------------------------------- */

enum {
    ONT_OP_VIEW = 1 << 0,   /* output 0 aliases input 0 with another shape: needs no kernel */
    ONT_OP_RANDOM = 1 << 1, /* reads call->seed; the loader adds a unique int attribute "rng_stream" */
    ONT_OP_NO_GRAD = 1 << 2,/* no gradient flows to any input */
    ONT_OP_NO_FOLD = 1 << 3,/* never constant-folded */
    ONT_OP_CONTAINERS = 1 << 5, /* inputs may be sequences and optionals */
    /*
     * Of our domain and allowed in a model. The loader refuses other operators of our domain: passes create them, and
     * they trust their operands.
     */
    ONT_OP_PUBLIC = 1 << 6,
    /*
     * Memory-bound: cheaper to recompute in backward than to keep its result. Elementwise operators count as such too.
     */
    ONT_OP_MEMORY_BOUND = 1 << 7,
    /*
     * Together with NO_GRAD: differentiable with derivative zero everywhere. The gradient of an input that reaches an
     * output only through such operators is zeros; behind any other NO_GRAD operator there is none.
     */
    ONT_OP_ZERO_DERIVATIVE = 1 << 8,
    ONT_OP_GLOBAL = 1 << 9, /* pooling whose window is the whole plane */
};

/* How recomputation estimates the cost of a node (passes/cost.c). */
typedef enum ont_cost_class {
    ONT_COST_ELEMENTS, /* by elements read or written */
    ONT_COST_MATMUL,
    ONT_COST_CONV,
    ONT_COST_ATTENTION,
    ONT_COST_STREAMED_LOSS,
} ont_cost_class;

/*
 * How a node's result can be computed for some rows alone. The rows lie in the leading dims of output 0; inputs that
 * have no such dims, or 1 in their place, are read whole.
 */
typedef enum ont_row_rule {
    ONT_ROWS_ALL = 0,     /* it cannot: every row of every input counts */
    ONT_ROWS_ELEMENTWISE, /* inputs broadcast, and element by element */
    ONT_ROWS_VIEW,        /* elements keep their order */
    ONT_ROWS_NORM,        /* input 0 along attribute "axis", and perhaps all axes behind it */
    ONT_ROWS_MATMUL,      /* rows of input 0 times a matrix */
    ONT_ROWS_REDUCE,      /* input 0 along constant axes */
    ONT_ROWS_GATHER,      /* entries of input 0 at indices along "axis": rows of the indices, or of input 0 */
    ONT_ROWS_GATHER_ND,   /* the same with a vector of indices for each entry */
    ONT_ROWS_SLICE,       /* a box of input 0 */
    ONT_ROWS_CONCAT,      /* of all inputs along "axis" */
    ONT_ROWS_SPLIT,       /* of input 0 along "axis" */
    ONT_ROWS_TRANSPOSE,   /* of input 0 by "perm" */
    ONT_ROWS_EXPAND,      /* input 0, broadcast */
    ONT_ROWS_DROPOUT,     /* input 0, with a random word for each element's position */
    ONT_ROWS_LOSS,        /* the sum or mean over the rows of input 0 whose label is not ignored */
    ONT_ROWS_ATTENTION,   /* queries by their rows; keys where any query attends to them */
} ont_row_rule;

/* False for NULL. */
bool ont_node_is_view(const ont_node *node);
/* The value whose storage `v` aliases, through any number of views. */
const ont_value *ont_value_root(const ont_value *v);
/* The last dim of a value with a shape; 0 of a scalar. */
int64_t ont_last_dim(const ont_value *v);

struct ont_op {
    const char *domain; /* "" is ai.onnx; ONT_DOMAIN is our own; "com.microsoft" is onnxruntime's */
    const char *name;
    int since;                       /* first opset version that the descriptor describes */
    uint32_t min_inputs, max_inputs; /* in ai.onnx the first min_inputs inputs are required */
    uint32_t flags;
    /*
     * Every attribute that the operator accepts, those that passes set included, as "axis:i perm:I": i int, f float, s
     * string, t tensor, g graph; I, F and S are lists; several letters if versions differ. The loader refuses any other
     * attribute by name. "": none; NULL: not declared, anything is accepted.
     */
    const char *attributes;
    uint64_t nondiff_inputs; /* bit i: no gradient flows to input i (indices, shapes, conditions) */
    uint64_t nondiff_outputs; /* bit i: no gradient flows from output i */
    ont_infer_fn infer;
    ont_grad_fn grad;     /* NULL without NO_GRAD: differentiating is EUNSUPPORTED */
    ont_expand_fn expand; /* optional */
    /*
     * Elementwise operators: fills `step`, operands excepted, for use in a fused group; false if the node cannot be
     * fused.
     */
    bool (*tile)(const ont_node *node, ont_tile_step *step);
    ont_loop loop; /* elementwise operators: the inner loop of simd.h; Gelu's depends on an attribute, too */
    ont_cost_class cost;
    uint64_t early_gradients; /* bit i: output i is a gradient that forward computes, or one scaled in place */
    ont_row_rule rows;
    const ont_kernel *kernels;
    uint32_t n_kernels;
};

/* Every descriptor of ops.def. */
#define X(symbol) extern const ont_op ont_op_##symbol;
#include "ops/ops.def"
#undef X

/* Whether the node's operator is `op`; false for NULL. ONT_IS(node, Add) asks for ont_op_Add. */
static inline bool ont_is_op(const ont_node *node, const ont_op *op)
{
    return node && node->op == op;
}
#define ONT_IS(node, symbol) ont_is_op(node, &ont_op_##symbol)

static inline bool ont_is_early_gradient(const ont_value *v)
{
    return v->def && v->def->op && v->def_index < 64 && v->def->op->early_gradients >> v->def_index & 1;
}

#define ONT_DOMAIN "ai.onnxtrain"
#define ONT_KERNELS(table) .kernels = (table), .n_kernels = sizeof(table) / sizeof(table)[0]

/* The descriptor of that name with the highest since <= version; NULL if there is none. */
const ont_op *ont_op_find(const char *domain, const char *name, int64_t version);
const ont_op *const *ont_op_all(size_t *count);
/* The kernels of an operator on a device; NULL is the CPU. */
const ont_kernel *ont_op_kernels(const ont_op *op, const struct ont_device *device, uint32_t *count);
/* Whether ont_op_choose() would succeed with `measure`, if no measurement refuses. */
bool ont_op_has_kernel(const ont_node *node, const struct ont_device *device);
/*
 * The first kernel that accepts the node. Logs each refusal at debug level; EUNSUPPORTED lists the reasons. A kernel
 * with a measure() is asked it with `measure`, and passed over without.
 */
ont_status ont_op_choose(const ont_node *node, const struct ont_device *device, bool measure,
                         const ont_kernel **kernel) ONT_MUST_USE;
/*
 * Which kernels compete for a node that `first`, of ont_op_choose(), accepts: those of the same list behind it that are
 * tuned too, if it is (run/tuner.h); itself alone otherwise, and where choices must not depend on measurements. Returns
 * how many, at most `capacity`, with `first` as rivals[0].
 */
uint32_t ont_op_rivals(const ont_node *node, const struct ont_device *device, const ont_kernel *first,
                       const ont_kernel **rivals, uint32_t capacity);
/* EUNSUPPORTED for an attribute that the operator does not declare, EINVAL for one of another type than declared. */
ont_status ont_op_check_attributes(const ont_node *node) ONT_MUST_USE;
/*
 * Comma-separated names of kernels to disable: they decline every node from now on. "Op:kernel" disables a kernel for
 * one operator only (operators may share a kernel). NULL or "" enables all.
 */
ont_status ont_op_disable_kernels(const char *names) ONT_MUST_USE;
bool ont_op_is_disabled(const ont_op *op, const ont_kernel *kernel);

#endif
