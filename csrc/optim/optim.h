/*
 * One optimizer step over any number of tensors: gradient norm, clipping and update rule, each in one pass over memory,
 * distributed over all cores. py/optim*.c describe the tensors for every step; this layer is independent of
 * Python, autograd and parameter groups.
 */
#ifndef ONT_OPTIM_OPTIM_H
#define ONT_OPTIM_OPTIM_H

#include "base/arena.h"
#include "base/shape.h"
#include "simd/optim/optim.h"

enum {
    ONT_OPERAND_PARAM,
    ONT_OPERAND_GRAD,
    ONT_OPERAND_STATE, /* ONT_RULE_STATES of them */
    ONT_OPERAND_MASTER = ONT_OPERAND_STATE + ONT_RULE_STATES,
    ONT_OPERAND_COUNT
};

/* Iteration order of strided operands: that of the parameter's memory, dims outermost first, adjacent dims merged. */
typedef struct ont_optim_layout {
    int rank;
    int64_t dims[ONT_MAX_RANK];
    int64_t strides[ONT_OPERAND_COUNT][ONT_MAX_RANK]; /* in elements */
} ont_optim_layout;

typedef struct ont_optim_tensor {
    int64_t count;                 /* fields from here to `dtype`, and `layout`, decide about overlaps */
    void *data[ONT_OPERAND_COUNT]; /* NULL: absent */
    uint8_t dtype[ONT_OPERAND_COUNT];
    bool stochastic;                     /* the 16-bit parameter uses stochastic rounding */
    bool step_is_double;
    bool fresh;                     /* its states were created for this step */
    uint32_t update;                /* index in `updates` of its coefficients */
    uint32_t stream;                /* random stream of its stochastic rounding */
    float *scale[2];                /* of 8-bit states 0 and 1: one scale per ONT_QUANT_BLOCK elements */
    void *step;                     /* step count, incremented after the step; NULL: none */
    const ont_optim_layout *layout; /* NULL: all operands are dense in the same order */
} ont_optim_tensor;

/* The largest number of hyperparameters that a rule takes. */
enum { ONT_OPTIM_HYPER_MAX = 12 };

/* An update rule; rules.c has the formulas. */
typedef struct ont_optim_rule {
    const char *name;      /* "adam" */
    ont_rule rule, second; /* rule of the second pass over memory; equal to `rule` if there is none */
    int n_hyper;
    const char *hyper;                   /* their names, for error messages */
    const char *states[ONT_RULE_STATES]; /* keys of torch's state dict; NULL: fewer */
    bool has_step;
    uint32_t (*needs)(const double *hyper); /* bit i: state i is used with these hyperparameters */
    /*
     * Computes the coefficients. `step` counts from 1; `first`: the states were created for this step. Sets all fields
     * but `grad`.
     */
    void (*fill)(const double *hyper, double step, bool first, ont_update *u);
} ont_optim_rule;

const ont_optim_rule *ont_optim_find_rule(const char *name); /* NULL: there is none */

typedef struct ont_optim_chunk {
    uint32_t tensor;
    int64_t first, count;
} ont_optim_chunk;

typedef struct ont_optim_range {
    uintptr_t first, last; /* bytes [first, last) */
    uint32_t tensor;
    uint8_t operand;
    bool sparse; /* a strided operand with gaps, which other operands may use */
} ont_optim_range;

/* Tensors and scratch memory of one optimizer; memory is reused from step to step. All zero is the empty state. */
typedef struct ont_optim {
    ont_optim_tensor *tensors, *last; /* `last`: of the previous step, checked to be free of overlaps */
    ont_update *updates;
    ont_optim_chunk *chunks;
    int64_t *batches; /* first chunk of each batch, and the end */
    double *sums;     /* two per chunk */
    double *ratios;   /* one per tensor */
    /* written ranges of this step, and those checked to be free of overlaps, by tensor */
    ont_optim_range *ranges, *checked;
    ont_optim_range *sorted;        /* `checked`, sorted by address */
    uintptr_t max_sparse_bytes;     /* bytes of the longest sparse range */
    ont_optim_range *grads_checked; /* hash table of gradients known not to overlap `checked` */
    size_t n_tensors, n_last, n_updates, n_chunks, n_batches, n_checked;
    bool overlap_checked; /* `tensors` were checked to be free of overlaps */
    size_t tensors_capacity, last_capacity, updates_capacity, chunks_capacity, batches_capacity, sums_capacity;
    size_t ratios_capacity;
    size_t ranges_capacity, checked_capacity, sorted_capacity, grads_capacity;
    ont_arena layouts;
} ont_optim;

typedef struct ont_optim_request {
    const ont_optim_rule *rule;
    double unscale;                             /* gradients are multiplied by this */
    double max_norm;        /* limit of the global gradient norm after unscaling; negative: neither clipping nor norm */
    double norm_epsilon;    /* clipping multiplies by max_norm / (norm + norm_epsilon) */
    bool only_finite;       /* with max_norm >= 0: do nothing if the norm is not finite */
    uint64_t seed;                              /* of stochastic rounding */
    void (*concurrent_callback)(void *context); /* called on the calling thread while other threads begin the update */
    void *context;
} ont_optim_request;

void ont_optim_deinit(ont_optim *o);
void ont_optim_clear(ont_optim *o);
/* Adds a zeroed tensor; the pointer is valid until the next call. */
ont_status ont_optim_add_tensor(ont_optim *o, ont_optim_tensor **tensor) ONT_MUST_USE;
ont_status ont_optim_add_update(ont_optim *o, const ont_update *update, uint32_t *index) ONT_MUST_USE;

/*
 * Determines the iteration order of the operands of `t`, whose data and dtypes are set; refuses operands that overlap
 * themselves. strides[k] may be NULL: row-major. *layout is valid until the next ont_optim_clear(); NULL if all
 * operands are dense in the same order.
 */
ont_status ont_optim_make_layout(ont_optim *o, const ont_optim_tensor *t, int rank, const int64_t *dims,
                                 const int64_t *const strides[ONT_OPERAND_COUNT],
                                 const ont_optim_layout **layout) ONT_MUST_USE;
/* Of a tensor with a layout: whether all operands but the gradient are dense in its order, as a copied gradient is. */
bool ont_optim_only_grad_is_strided(const ont_optim_tensor *t);

/*
 * Checks that no memory is written twice and that no gradient overlaps written memory, unless it is exactly its own
 * parameter. If *overlaps, *where names the operands.
 */
typedef struct ont_optim_overlap {
    uint32_t tensor, other_tensor;
    int operand, other_operand;
} ont_optim_overlap;
ont_status ont_optim_check(ont_optim *o, bool *overlaps, ont_optim_overlap *where) ONT_MUST_USE;

/*
 * Performs the step. On failure (ENOMEM only) nothing was modified. *norm: of the unscaled gradients, if requested;
 * with only_finite nothing was modified either if it is not finite, and the callback was not called.
 */
ont_status ont_optim_run(ont_optim *o, const ont_optim_request *request, double *norm) ONT_MUST_USE;

/*
 * The same, one tensor at a time as its gradient becomes available (optimizer in backward), without norm and clipping;
 * bitwise equal to ont_optim_run(). Until then the layout of a tensor has strides for the gradient and its data is
 * NULL. Allocates nothing after ont_optim_prepare_apply().
 */
ont_status ont_optim_prepare_apply(ont_optim *o) ONT_MUST_USE;
ont_status ont_optim_apply(ont_optim *o, const ont_optim_request *request, uint32_t tensor,
                           const void *gradient) ONT_MUST_USE;
/*
 * After ont_optim_check(): whether bytes [first, last) overlap written memory, and where. The parameter of tensor `own`
 * is excluded; UINT32_MAX: nothing is.
 */
bool ont_optim_is_written(const ont_optim *o, uintptr_t first, uintptr_t last, uint32_t own,
                          ont_optim_overlap *where);

/*
 * For tensors with a gradient only: the sum of squares of each, in double and in a fixed order. It is finite exactly if
 * all elements are (except for float64 beyond 1e154).
 */
ont_status ont_optim_squares(ont_optim *o, double *sums) ONT_MUST_USE;
/* param = keep_before * param + grad * gradient with each tensor's coefficients; *finite: all gradients were finite. */
ont_status ont_optim_scale(ont_optim *o, bool *finite) ONT_MUST_USE;

/* ---- inside optim/ ---- */

/* Grows the array to `need` elements of `size` bytes; at least doubles its capacity. */
ont_status ont_optim_reserve(void *array, size_t *capacity, size_t need, size_t size) ONT_MUST_USE;
/* Updates elements [first, first + count) of a tensor through float or double copies; see stage.c. */
void ont_optim_stage(const ont_optim_tensor *t, ont_rule rule, const ont_update *u, int64_t first, int64_t count,
                     uint64_t seed, double *sums);
double ont_optim_stage_squares(const ont_optim_tensor *t, int64_t first, int64_t count);
ont_storage ont_optim_storage(ont_dtype dtype); /* ONT_STORAGE_COUNT: not a float */

#endif
