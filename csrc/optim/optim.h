/*
 * One step of an optimizer over any number of tensors: gradient norm, clipping, update rule, each in one pass over
 * memory with the work of all tensors shared among all cores. py/optim*.c describe the tensors anew for every step;
 * nothing here knows Python, autograd or parameter groups.
 */
#ifndef ONT_OPTIM_OPTIM_H
#define ONT_OPTIM_OPTIM_H

#include "base/arena.h"
#include "base/shape.h"
#include "simd/optim.h"

enum {
    ONT_OPERAND_PARAM,
    ONT_OPERAND_GRAD,
    ONT_OPERAND_STATE, /* ONT_RULE_STATES of them */
    ONT_OPERAND_MASTER = ONT_OPERAND_STATE + ONT_RULE_STATES,
    ONT_OPERAND_COUNT
};

/* Strided operands, walked in the order of the parameter's memory: dims outermost first, neighbours merged. */
typedef struct ont_optim_layout {
    int rank;
    int64_t dims[ONT_MAX_RANK];
    int64_t strides[ONT_OPERAND_COUNT][ONT_MAX_RANK]; /* in elements */
} ont_optim_layout;

typedef struct ont_optim_tensor {
    int64_t count; /* from here to `dtype`: what the check for overlaps depends on, beside the layout */
    void *data[ONT_OPERAND_COUNT];       /* NULL: absent */
    uint8_t dtype[ONT_OPERAND_COUNT];
    bool stochastic;                     /* the 16-bit parameter is rounded at random */
    bool step_is_double;
    bool fresh;                          /* its states were made for this step */
    uint32_t update;                     /* index of its coefficients */
    uint32_t stream;                     /* which random stream */
    float *scale[2];                     /* of 8-bit states 0 and 1: one per ONT_QUANT_BLOCK elements */
    void *step;                          /* counts up when the step is done; NULL: not kept */
    const ont_optim_layout *layout;      /* NULL: all operands are dense in the same order */
} ont_optim_tensor;

/* The largest number of hyperparameters that a rule takes. */
enum { ONT_OPTIM_HYPER_MAX = 12 };

/* What a rule is called and needs; rules.c has the formulas. */
typedef struct ont_optim_rule {
    const char *name;                       /* "adam" */
    ont_rule rule, second;                  /* second pass, or the same */
    int n_hyper;
    const char *hyper;                      /* their names, for messages */
    const char *states[ONT_RULE_STATES];    /* keys of torch's state dict; NULL: fewer */
    bool has_step;
    uint32_t (*needs)(const double *hyper); /* bit i: state i is used with these hyperparameters */
    /* `step` counts from 1; `first`: the states were made for this step. Leaves `grad` and nothing else unset. */
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
    bool sparse; /* bounds of a strided operand with holes: others may lie in them */
} ont_optim_range;

/* Tensors and scratch memory of one optimizer; memory is kept from step to step. Zeroed is empty. */
typedef struct ont_optim {
    ont_optim_tensor *tensors, *last; /* `last`: of the step before, found clear of overlaps */
    ont_update *updates;
    ont_optim_chunk *chunks;
    int64_t *batches;             /* first chunk of each share of work, and one past the last */
    double *sums;                 /* two per chunk */
    double *ratios;               /* one per tensor */
    ont_optim_range *ranges, *checked; /* written memory of this step, and what was found clear, by tensor */
    ont_optim_range *sorted;           /* the latter by address */
    uintptr_t reach;                   /* bytes of the longest range with holes */
    ont_optim_range *grads_checked; /* a table of gradients known to lie clear of `checked` */
    size_t n_tensors, n_last, n_updates, n_chunks, n_batches, n_checked;
    bool clear; /* `tensors` were found so */
    size_t tensors_capacity, last_capacity, updates_capacity, chunks_capacity, batches_capacity, sums_capacity;
    size_t ratios_capacity;
    size_t ranges_capacity, checked_capacity, sorted_capacity, grads_capacity;
    ont_arena layouts;
} ont_optim;

typedef struct ont_optim_request {
    const ont_optim_rule *rule;
    double unscale;  /* gradients are multiplied by this */
    double max_norm; /* of all gradients together, after unscale; negative: no clipping and no norm */
    uint64_t seed;   /* of stochastic rounding */
    void (*meanwhile)(void *context); /* called by this thread while others update already */
    void *context;
} ont_optim_request;

void ont_optim_deinit(ont_optim *o);
void ont_optim_clear(ont_optim *o);
/* Zeroed; valid until the next. */
ont_status ont_optim_add_tensor(ont_optim *o, ont_optim_tensor **tensor) ONT_MUST_USE;
ont_status ont_optim_add_update(ont_optim *o, const ont_update *update, uint32_t *index) ONT_MUST_USE;

/*
 * Finds the order in which to walk the operands of `t`, whose data and dtypes are set, and refuses what overlaps
 * itself. strides[k] may be NULL: row-major. *layout stays valid until the next clear; NULL where memory order serves.
 */
ont_status ont_optim_make_layout(ont_optim *o, const ont_optim_tensor *t, int rank, const int64_t *dims,
                                 const int64_t *const strides[ONT_OPERAND_COUNT],
                                 const ont_optim_layout **layout) ONT_MUST_USE;

/*
 * No written memory may be written twice, and no gradient may lie in memory that is written, except exactly in its own
 * parameter. Where it *overlaps, *where tells what.
 */
typedef struct ont_optim_overlap {
    uint32_t tensor, other_tensor;
    int operand, other_operand;
} ont_optim_overlap;
ont_status ont_optim_check(ont_optim *o, bool *overlaps, ont_optim_overlap *where) ONT_MUST_USE;

/* Does the step. On failure (memory only) nothing was touched. *norm: of the unscaled gradients, where asked for. */
ont_status ont_optim_run(ont_optim *o, const ont_optim_request *request, double *norm) ONT_MUST_USE;

/*
 * The same one tensor at a time, as its gradient comes, for which the tensor has the strides in its layout, and NULL.
 * Without norm and clipping. Every bit is as ont_optim_run() has it. After prepare nothing is allocated.
 */
ont_status ont_optim_prepare_apply(ont_optim *o) ONT_MUST_USE;
ont_status ont_optim_apply(ont_optim *o, const ont_optim_request *request, uint32_t tensor,
                           const void *gradient) ONT_MUST_USE;
/*
 * After ont_optim_check(): whether bytes [first, last) lie in memory that is written, and where. Those of parameter
 * `own` do not count, UINT32_MAX: all do.
 */
bool ont_optim_is_written(const ont_optim *o, uintptr_t first, uintptr_t last, uint32_t own,
                          ont_optim_overlap *where);

/*
 * Of tensors that have gradients only: the sum of squares of each, in double and in a fixed order, so that it is finite
 * exactly where all elements are (but for float64 beyond 1e154).
 */
ont_status ont_optim_squares(ont_optim *o, double *sums) ONT_MUST_USE;
/* param = keep_before param + grad gradient with each tensor's coefficients; whether all gradients were finite. */
ont_status ont_optim_scale(ont_optim *o, bool *finite) ONT_MUST_USE;

/* ---- inside optim/ ---- */

/* Makes room for `need` elements of `size` bytes; at least doubles. */
ont_status ont_optim_reserve(void *array, size_t *capacity, size_t need, size_t size) ONT_MUST_USE;
/* Updates elements [first, first + count) of a tensor through converted copies; see stage.c. */
void ont_optim_stage(const ont_optim_tensor *t, ont_rule rule, const ont_update *u, int64_t first, int64_t count,
                     uint64_t seed, double *sums);
double ont_optim_stage_squares(const ont_optim_tensor *t, int64_t first, int64_t count);
/* The storage in which a loop can work on all operands in place; ONT_STORAGE_COUNT: none. */
ont_storage ont_optim_direct(const ont_optim_tensor *t);
ont_storage ont_optim_storage(ont_dtype dtype); /* ONT_STORAGE_COUNT: not a float */

#endif
