/*
 * Shared by the files of the Updater: its object, the state of one traversal of its tensors, and how tensors are
 * borrowed for it. Included by py/optim*.c only.
 */
#ifndef ONT_PY_OPTIM_H
#define ONT_PY_OPTIM_H

#include "py/dlpack.h"

#include "optim/optim.h"
#include "py/torch_abi.h"
#include "py/tables.h"

enum { GROUP_MASTER = 1, GROUP_STOCHASTIC = 2, GROUP_LEADING = 2 /* sign and flags, before the rule's own numbers */ };

/*
 * A parameter, its state dict, and the addresses at which its objects were last seen. `param` and `inner` are used only
 * after the optimizer's state dict has confirmed them. The rest are prefetch hints for the next step: with 10,000 small
 * tensors cache misses take most of the time. No field holds a reference.
 */
typedef struct ont_slot {
    PyObject *param, *inner;
    uint64_t generation;                       /* generation of the optimizer's state dict in which `inner` was found */
    const void *entries;                       /* address of the dict's table of entries */
    const void *object[ONT_OPERAND_COUNT + 1]; /* tensor objects; the last one is the step count */
    const void *sizes[ONT_OPERAND_COUNT + 1];  /* addresses of their sizes */
    const void *storage[ONT_OPERAND_COUNT + 1];
    const void *hints_of_param[ONT_TORCH_HINTS]; /* what the parameter refers to: its gradient, its version counter */
    const void *step;                            /* address of the step count's value */
} ont_slot;

typedef struct ont_state_entry {
    PyObject *key, *inner;
} ont_state_entry;

/* A parameter on the fast path, and a group: parameters up to `end` of the traversal. */
typedef struct ont_fast_param {
    PyObject *param, *state[ONT_RULE_STATES], *step; /* borrowed: no code runs that could release them */
    void *impl;          /* the word that the parameter's handle points to */
    const void *version; /* prefetch hint */
    bool complete;       /* all state that the group requires was found */
} ont_fast_param;

typedef struct ont_fast_group {
    size_t end;
    uint32_t needs;
    int flags;
    double sign, hyper[ONT_OPTIM_HYPER_MAX];
} ont_fast_group;

/* Parameters of one group on a device: tensors [first, first of the next group). */
typedef struct ont_device_group {
    size_t first;
    double sign, hyper[ONT_OPTIM_HYPER_MAX];
} ont_device_group;

/* Gradients that were copied in the order of their parameters, on a device. */
typedef struct ont_dense_grads {
    const ont_device *device;
    ont_memory memory;
    size_t bytes;
    void *last; /* the stream that used them last */
} ont_dense_grads;

/* Tables of a step on a device. */
typedef struct ont_step_tables {
    ont_device_tables on_device;
    ont_dense_grads dense;
    ont_device_group *groups;
    size_t n_groups, groups_capacity;
    size_t chunks_at, factor_at, work_at; /* of the step in backward: offsets in the memory of on_device */
} ont_step_tables;

typedef struct ont_updater {
    PyObject_HEAD
    PyObject *module;
    ont_state *state;
    const ont_optim_rule *rule;
    PyObject *name; /* of the optimizer, for error messages */
    PyObject *key_params, *key_grad, *key_step, *key_master, *key_state[ONT_RULE_STATES], *key_scale[2];
    PyObject *increment_version; /* torch.autograd.graph.increment_version */
    ont_optim work;
    ont_step_tables tables;
    ont_slot *slots;        /* by position among the parameters */
    ont_state_entry *order; /* by position in the state dict */
    PyObject **held;        /* references held for the duration of a step */
    ont_fast_param *fast;   /* by position */
    ont_fast_group *fast_groups;
    size_t n_slots, n_order, n_held, slots_capacity, order_capacity, held_capacity, fast_capacity,
        fast_groups_capacity;
    uint64_t generation;        /* counts changes of the optimizer's state dict */
    uint64_t steps, fast_steps; /* steps so far, and those on the fast path */
    uint64_t fast_retry_step;   /* step before which the fast path is not tried again */
    bool busy;
} ont_updater;

/*
 * Optimizer in backward: a parameter whose gradient the engine's backward will deliver; it is an input of the program.
 */
typedef struct ont_expected {
    PyObject *param; /* borrowed; NULL: no gradient is expected */
    const ont_value *input;
    uint32_t target_index, tensor; /* index among the expected parameters; index in work.tensors */
    bool found;
} ont_expected;

/* State of one call of step(). */
typedef struct ont_walk {
    ont_updater *self;
    PyObject *states, *prepare, *updated;
    const ont_device *device; /* NULL: the CPU */
    ont_expected *expected;   /* by position; NULL: process the parameters that have gradients */
    size_t n_expected;
    bool known, changed; /* the state dict is unchanged since the last step; prepare() has changed it */
    size_t position;     /* index among all parameters */
    Py_ssize_t group, index;
    double hyper[ONT_OPTIM_HYPER_MAX], sign;
    int flags;
    uint32_t needs;
    double last_step; /* step count of the last coefficients of this group; negative: none */
    bool last_first;
    uint32_t last_update;
} ont_walk;

extern const char *const ont_operand_text[ONT_OPERAND_COUNT];

/* The entries of a parameter's state that the rule and the group require; borrowed from the dict. */
typedef struct ont_param_state {
    PyObject *step, *master, *state[ONT_RULE_STATES];
} ont_param_state;

/* py/optim_device.c: a step on a device, for the tensors in work. */
PyObject *ont_optim_device_step(ont_walk *w, PyObject *scalars, const ont_optim_request *request);
int ont_optim_device_group(ont_walk *w); /* a group begins */
/*
 * The same, one tensor at a time, as ont_optim_apply(): before backward, tables of all tensors, whose gradients are not
 * known yet; then one step of each, on the stream that its gradient is computed on.
 */
int ont_optim_device_prepare(ont_walk *w); /* -1 with an exception */
ont_status ont_optim_device_apply(ont_updater *self, const ont_device *device, uint64_t seed, uint32_t tensor,
                                  const void *gradient, void *stream) ONT_MUST_USE;
void ont_optim_device_free(ont_step_tables *t);

/* py/optim.c: -1 with ValueError if tensors of the step share memory. */
int ont_optim_check_ready(const ont_updater *self); /* -1 and RuntimeError where __init__() did not run or failed */
int ont_optim_check_overlap(ont_updater *self);
void ont_optim_release_held(ont_updater *self); /* releases the held references */

/* py/optim_backward.c: Updater.backward(). */
PyObject *ont_updater_backward(PyObject *object, PyObject *args);

/* py/optim_slow_path.c: the slow path, and functions of both paths. -1 with an exception. */
int ont_optim_slow_path(ont_walk *w, PyObject *groups, PyObject *hyper);
bool ont_optim_state_unchanged(const ont_updater *self, PyObject *states);
int ont_optim_parse_hyper(ont_walk *w, PyObject *numbers);
/* Sets the coefficients of a tensor in its `step`-th step: the last ones, or new ones. -1 with an exception. */
int ont_optim_take_update(ont_walk *w, ont_optim_tensor *t, double step, bool first);

/*
 * py/optim_fast_path.c: the fast path. 1 if it has found all tensors, 0 if the slow path must run, -1 with an
 * exception. The GIL must be held while its tensors are used.
 */
int ont_optim_fast_path(ont_walk *w, PyObject *groups, PyObject *hyper);
void ont_optim_fast_path_mark(void *updater);

bool ont_is_tensor(const ont_updater *self, PyObject *object);
/* Raises an exception that names the parameter; returns -1. */
int ont_param_error(const ont_walk *w, PyObject *type, const char *what, const char *problem);
/* Holds the reference until the end of the step; takes it, also on failure. */
int ont_hold(ont_updater *self, PyObject *object);
/* Borrows a tensor's memory for the duration of the step; strides are NULL if row-major. */
int ont_borrow_operand(ont_walk *w, PyObject *tensor, int operand, ont_tensor_view *view);
void ont_prefetch_slot(const ont_slot *s);
void ont_prefetch_dict(const ont_slot *s);    /* the parameter and its state dict */
void ont_prefetch_tensors(const ont_slot *s); /* its tensors */
void ont_prefetch_param(const ont_slot *s);
/* Record the addresses of a tensor that was read, and of a parameter's state dict. */
void ont_cache_tensor(ont_updater *self, ont_slot *s, int operand, PyObject *object, const ont_tensor_view *view);
void ont_cache_grad(ont_slot *s, const void *handle, const ont_tensor_view *view);
void ont_cache_state_dict(ont_slot *s, PyObject *inner);
int64_t ont_tensor_view_count(const ont_tensor_view *view);
bool ont_same_dims(const ont_tensor_view *a, const ont_tensor_view *b);

#endif
