/*
 * The contract of an operator: what a descriptor says, what its functions may rely on.
 *
 * A file csrc/ops/<family>.c holds attributes, shape inference, gradient rule, kernels (best first, the plain
 * reference last) and ends in descriptors, each listed once in ops.def. Passes, planner and executor know operators
 * through this header alone.
 *
 * Graphs are specialised before anything here runs: every input of infer() has dtype and a static shape, and shapes
 * that a model computes (Shape, Gather, Concat ... into Reshape) have been folded to constants on the way.
 */
#ifndef ONT_OPS_OP_H
#define ONT_OPS_OP_H

#include "ir/graph.h"

typedef struct ont_op ont_op;
typedef struct ont_kernel ont_kernel;
typedef struct ont_call ont_call;
typedef struct ont_builder ont_builder;
typedef struct ont_tile_step ont_tile_step; /* ops/tile.h */
typedef struct ont_kernel_list ont_kernel_list;
struct ont_device;

/* ---- shape inference ---------------------------------------------------------------------------------------- */

/*
 * infer(g, node): checks arity, dtypes and attributes, sets dtype and shape of every present output with
 * ont_infer_out(), and output->data where it follows without computing (Shape). Errors need not name the node: the
 * pass puts "<op_type> '<name>'" in front. A value input that must be a constant is read with ont_const_ints().
 */
typedef ont_status (*ont_infer_fn)(ont_graph *g, ont_node *node);

ont_status ont_infer_out(ont_node *node, uint32_t index, ont_dtype dtype, const ont_shape *shape) ONT_MUST_USE;
/* out(0) has the dtype and shape of in(0): unary elementwise operators need nothing else. */
ont_status ont_infer_same(ont_graph *g, ont_node *node) ONT_MUST_USE;
/* out(0) has the dtype of in(0) and the shape that the attribute "shape" states. */
ont_status ont_infer_shape_attr(ont_graph *g, ont_node *node) ONT_MUST_USE;
/* out(0) is the broadcast of all inputs, whose dtypes must agree; and the same with bool result. */
ont_status ont_infer_broadcast(ont_graph *g, ont_node *node) ONT_MUST_USE;
ont_status ont_infer_compare(ont_graph *g, ont_node *node) ONT_MUST_USE;
/* Gradients of a normalisation (x, scale ...) -> (dx, dscale, dbias): as x, and twice as scale where there is one. */
ont_status ont_infer_norm_grad(ont_graph *g, ont_node *node) ONT_MUST_USE;
/* EINVAL naming the input where absent. */
ont_status ont_need_input(const ont_node *node, uint32_t index, ont_value **value) ONT_MUST_USE;
/*
 * Integers of input `index` (int64 or int32, known at build time), or of attribute `attr` where that input is absent
 * (older opsets; either may be NULL/-1). *count is -1 where neither is given. At most `capacity` are stored.
 */
ont_status ont_const_ints(const ont_node *node, int index, const char *attr, int64_t *values, int capacity,
                          int *count) ONT_MUST_USE;
/*
 * Contents of input `index`. ENEEDVALUE where they are not known yet: infer() hands that on, a probe computes them and
 * infer() is called again, with a constant in the input's place. Ask for inputs of the node only, and in expand()
 * before anything is built. Contents that are not an input, such as a count: expand, deferred, into a node that
 * computes them and one that has them as an input.
 */
ont_status ont_need_data(const ont_node *node, uint32_t index, const ont_tensor **data) ONT_MUST_USE;
/* The one element of a constant input as double; EINVAL otherwise. */
ont_status ont_const_scalar(const ont_node *node, uint32_t index, double *value) ONT_MUST_USE;

/* ---- building nodes ----------------------------------------------------------------------------------------- */

/*
 * Adds inferred nodes at one place of a graph. The first failure sticks: later calls return NULL at once, so formulas
 * nest, and who began it looks at `status` at the end. A NULL operand where a value is needed counts as a failure.
 */
struct ont_builder {
    ont_graph *graph;
    ont_node *before;   /* NULL: at the end */
    bool backward;      /* mark what is built */
    const ont_node *origin;
    const char *scope;  /* not NULL: nodes are named "<scope>/<name>", so that a message leads back to the model */
    bool deferred; /* nothing built is inferred here: for an expand() whose parts ask for contents; the walk does it */
    ont_status status;
};

ont_node *ont_build_node(ont_builder *b, const char *domain, const char *op_type, ont_value *const *inputs,
                         uint32_t n_inputs, uint32_t n_outputs);  /* not inferred: set attributes, then ... */
ont_value *ont_build_done(ont_builder *b, ont_node *node);        /* ... infer it; returns output 0 */
ont_value *ont_build1(ont_builder *b, const char *op_type, ont_value *x);
ont_value *ont_build2(ont_builder *b, const char *op_type, ont_value *x, ont_value *y);
ont_value *ont_build3(ont_builder *b, const char *op_type, ont_value *x, ont_value *y, ont_value *z);
/* op_type with a "ours:" prefix means domain ai.onnxtrain; `ints` attributes of one name in one call. */
ont_value *ont_build_ints(ont_builder *b, const char *op_type, ont_value *x, const char *attr, const int64_t *values,
                          size_t count);
ont_value *ont_build_scalar(ont_builder *b, ont_dtype dtype, double value);            /* 0-d constant */
ont_value *ont_build_const_ints(ont_builder *b, const int64_t *values, size_t count);  /* 1-d int64 constant */
ont_value *ont_build_full(ont_builder *b, ont_dtype dtype, const ont_shape *shape, double value); /* via Expand */
ont_value *ont_build_cast(ont_builder *b, ont_value *x, ont_dtype to);
ont_value *ont_build_reshape(ont_builder *b, ont_value *x, const ont_shape *shape);
ont_value *ont_build_transpose(ont_builder *b, ont_value *x, const int64_t *perm);
ont_value *ont_build_sum_to(ont_builder *b, ont_value *x, const ont_shape *shape); /* undo a broadcast */
ont_value *ont_build_reduce(ont_builder *b, const char *op_type, ont_value *x, const int64_t *axes, size_t n_axes,
                            bool keepdims);

/* ---- expansion ---------------------------------------------------------------------------------------------- */

/*
 * expand(b, node, outputs): builds what the node stands for with other operators and sets outputs[i] for every present
 * output i. Runs when the node's inputs are inferred (after infer(), where there is one) and before differentiation, so
 * that the gradient is that of the parts; called by the inference walk, and by ont_build_done() for a node that a
 * gradient rule or another expansion built. An operator that has expand() needs no kernels and no infer(); one that has
 * kernels and a gradient (or NO_GRAD) is expanded only where all of them decline. outputs[i] may be an input: it is
 * handed through. An absent output may be set too: there is room for ONT_EXPAND_SPARE beyond those of the node. Fail by
 * b->status; the operator's name is put in front.
 */
enum { ONT_EXPAND_SPARE = 8 };
typedef void (*ont_expand_fn)(ont_builder *b, ont_node *node, ont_value **outputs);

bool ont_op_expands(const ont_graph *g, const ont_node *node);
/*
 * Puts the expansion in place of the node: readers read its outputs instead, node->outputs[i] names them, and the node
 * is out of the graph. *first is the first node built, or what stood behind the node where none was; it may be NULL.
 */
ont_status ont_op_expand(ont_graph *g, ont_node *node, ont_node **first) ONT_MUST_USE;
/* Fails the builder: for expand(), as `return ont_fail()` is for infer(). */
#define ont_build_fail(b, code, ...) \
    do { \
        if ((b)->status == ONT_OK) (b)->status = ont_fail((code), __VA_ARGS__); \
    } while (0)

/* ---- gradients ---------------------------------------------------------------------------------------------- */

/*
 * grad(g): reads I(i), O(i), GO(i), builds with g->b, and calls GI(i, value) for inputs with WANTS(i). A gradient of
 * the broadcast shape is accepted: the walk reduces it to the input's, accumulates, and drops what nobody needs.
 * GO(i) is zeros, built on demand, where no gradient reached output i.
 */
typedef struct ont_grad {
    ont_builder b;
    ont_node *node;
    ont_value **out_grads; /* per output, NULL: none */
    ont_value **in_grads;  /* per input, filled by the rule */
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
/* Fails the gradient with ONT_EUNSUPPORTED and a reason; the pass names the node. */
void ont_grad_refuse(ont_grad *g, const char *reason);

/* ---- kernels ------------------------------------------------------------------------------------------------ */

struct ont_call {
    const ont_node *node;    /* dtypes, shapes and attributes; constant for the program's life */
    const void *state;       /* what prepare() made, or NULL */
    const void *const *in;   /* row-major contents per input; NULL: absent */
    void *const *out;        /* NULL: absent */
    void *work;              /* work_bytes of scratch, 64-byte aligned */
    uint64_t seed;           /* Philox key of this run */
    /* Of kernels of a device; pointers above are its own. */
    const struct ont_device *device;
    void *stream;
    const uint64_t *seed_at; /* the key in the device's memory, so that a captured graph reads the one of its run */
    struct ont_fault *fault; /* device/device.h */
    int32_t step;
};

typedef struct ont_prepared {
    void *state;
    size_t work_bytes;
} ont_prepared;

struct ont_kernel {
    const char *name; /* <op>_<dtype>_<isa>, or <op>_ref */
    /* NULL when it takes the node, else the reason why not. */
    const char *(*accept)(const ont_node *node);
    /* Optional: everything that can be computed or allocated once; memory from the program's arena. */
    ont_status (*prepare)(const ont_node *node, ont_arena *arena, ont_prepared *prepared);
    /* Allocates nothing, touches nothing but outputs and work; may fail on bad data (an index out of range). */
    ont_status (*run)(const ont_call *call);
    /* Optional: gives back what prepare() took outside the arena (a library's handle). */
    void (*release)(void *state);
    uint32_t inplace; /* bit i: output 0 may share storage with input i (same byte size) */
};

/* The kernels that a device has for one operator (from opset `since` on), best first. */
struct ont_kernel_list {
    const char *domain, *name;
    int since;
    const ont_kernel *kernels;
    uint32_t n_kernels;
};

/* accept() of kernels that take every dtype, and of those for float32 and float64 by their first input. */
const char *ont_accept_any(const ont_node *node);
const char *ont_accept_float(const ont_node *node);

/* ---- descriptor --------------------------------------------------------------------------------------------- */

enum {
    ONT_OP_VIEW = 1 << 0,   /* output 0 is input 0's storage under another shape: planned away, needs no kernel */
    ONT_OP_RANDOM = 1 << 1, /* reads call->seed; has a unique int attribute "rng_stream" after load */
    ONT_OP_NO_GRAD = 1 << 2,/* gradient is zero or meaningless: nothing flows to any input */
    ONT_OP_NO_FOLD = 1 << 3,/* never computed at build time */
    ONT_OP_GRADIENT = 1 << 4,/* stands for derivatives within the graph: the inference walk puts them in its place */
    ONT_OP_CONTAINERS = 1 << 5, /* inputs may be sequences and optionals */
    /* Of our domain, and a model may name it. The others there are made by passes and trust their operands: refused. */
    ONT_OP_PUBLIC = 1 << 6,
    /* beside elementwise ones: a few passes over memory, worth less than keeping its result */
    ONT_OP_MEMORY_BOUND = 1 << 7,
    /* Beside NO_GRAD: differentiable, with a slope of zero everywhere. What reaches an output through such alone has a
     * gradient of zeros, where behind another NO_GRAD it has none. */
    ONT_OP_ZERO_DERIVATIVE = 1 << 8,
};

/* False for NULL. */
bool ont_node_is_view(const ont_node *node);
/* The value whose storage `v` shows, through views. */
const ont_value *ont_value_root(const ont_value *v);

struct ont_op {
    const char *domain; /* "" is ai.onnx; ONT_DOMAIN is ours */
    const char *name;
    int since;          /* first opset that this descriptor is true of */
    uint32_t min_inputs, max_inputs; /* of ai.onnx, the first min_inputs are never absent */
    uint32_t flags;
    /*
     * Every attribute that the operator honours or that changes nothing, those of passes included, as "axis:i perm:I":
     * i int, f float, s string, t tensor, g graph; I, F and S are lists; several letters where versions differ. Any
     * other is refused by name. "" is none, NULL: not declared, anything passes.
     */
    const char *attributes;
    uint64_t nondiff_inputs; /* bit i: no gradient ever flows to input i (indices, shapes, conditions) */
    uint64_t nondiff_outputs; /* bit i: output i is data for others, no gradient comes back through it */
    ont_infer_fn infer;
    ont_grad_fn grad;   /* NULL without NO_GRAD: asking for it is EUNSUPPORTED */
    ont_expand_fn expand; /* or NULL */
    /* Elementwise operators: fills the step, operands apart, that the node may become in a fused group; false: it may
     * not. */
    bool (*tile)(const ont_node *node, ont_tile_step *step);
    const ont_kernel *kernels;
    uint32_t n_kernels;
};

#define ONT_DOMAIN "ai.onnxtrain"
#define ONT_KERNELS(table) .kernels = (table), .n_kernels = sizeof(table) / sizeof(table)[0]

/* Highest descriptor of that name with since <= version; NULL where there is none. */
const ont_op *ont_op_find(const char *domain, const char *name, int64_t version);
const ont_op *const *ont_op_all(size_t *count);
/* The kernels of an operator on a device, NULL for the CPU. */
const ont_kernel *ont_op_kernels(const ont_op *op, const struct ont_device *device, uint32_t *count);
/* Whether ont_op_choose() would find one. */
bool ont_op_has_kernel(const ont_node *node, const struct ont_device *device);
/* The first kernel that accepts, each refusal logged at debug; EUNSUPPORTED lists the reasons. */
ont_status ont_op_choose(const ont_node *node, const struct ont_device *device, const ont_kernel **kernel) ONT_MUST_USE;
/* EUNSUPPORTED for an attribute that the operator does not declare, EINVAL for one of another kind than declared. */
ont_status ont_op_check_attributes(const ont_node *node) ONT_MUST_USE;
/*
 * Comma-separated names of kernels that decline everything from now on, "Op:kernel" for one operator's alone (operators
 * may share a kernel); NULL or "": none.
 */
ont_status ont_op_disable_kernels(const char *names) ONT_MUST_USE;
bool ont_op_is_disabled(const ont_op *op, const ont_kernel *kernel);

#endif
