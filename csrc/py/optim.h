/*
 * What the files of the Updater share: its object, one walk over its tensors, and how tensors are borrowed for it.
 * Nothing outside py/optim*.c includes this.
 */
#ifndef ONT_PY_OPTIM_H
#define ONT_PY_OPTIM_H

#include "py/dlpack.h"

#include "optim/optim.h"
#include "py/peek.h"
#include "py/tables.h"

enum { GROUP_MASTER = 1, GROUP_STOCHASTIC = 2, GROUP_LEADING = 2 /* sign and flags, before the rule's own numbers */ };

/*
 * A parameter, its state dict, and where all that belongs to it was last seen. The first two are used once the
 * optimizer's dict confirms them; the rest only tells the cache what the walk will read soon, which for 10,000 small
 * tensors is most of the time. None is a reference.
 */
typedef struct ont_slot {
    PyObject *param, *inner;
    uint64_t generation;                        /* of the optimizer's dict, when `inner` was found there */
    const void *entries;                        /* where the dict keeps its own */
    const void *object[ONT_OPERAND_COUNT + 1];  /* tensors; the last is the step count */
    const void *inside[ONT_OPERAND_COUNT + 1];  /* their sizes */
    const void *storage[ONT_OPERAND_COUNT + 1];
    const void *beside[ONT_PEEK_HINTS];         /* what the parameter refers to: its gradient, its version */
    const void *step;                           /* the count itself */
} ont_slot;

typedef struct ont_entry {
    PyObject *key, *inner;
} ont_entry;

/* A parameter of the quick walk, and a group: parameters up to `end` of the walk. */
typedef struct ont_quick_param {
    PyObject *param, *state[ONT_RULE_STATES], *step; /* borrowed; nothing runs that could drop them */
    void *impl;          /* what the parameter's handle holds */
    const void *version; /* only for the cache */
    bool complete;       /* all state that the group needs was found */
} ont_quick_param;

typedef struct ont_quick_group {
    size_t end;
    uint32_t needs;
    int flags;
    double sign, hyper[ONT_OPTIM_HYPER_MAX];
} ont_quick_group;

/* Parameters of one group on a device: tensors [first, next group's first) of the walk. */
typedef struct ont_device_group {
    size_t first;
    double sign, hyper[ONT_OPTIM_HYPER_MAX];
} ont_device_group;

/* Of a step on a device. */
typedef struct ont_step_tables {
    ont_device_tables on_device;
    ont_device_group *groups;
    size_t n_groups, groups_capacity;
} ont_step_tables;

typedef struct ont_updater {
    PyObject_HEAD
    PyObject *module;
    ont_state *state;
    const ont_optim_rule *rule;
    PyObject *name; /* of the optimizer, for messages */
    PyObject *key_params, *key_grad, *key_step, *key_master, *key_state[ONT_RULE_STATES], *key_scale[2];
    PyObject *increment_version; /* torch.autograd.graph's */
    ont_optim work;
    ont_step_tables tables;
    ont_slot *slots;           /* by position among the parameters */
    ont_entry *order;          /* by position in the state dict */
    PyObject **held;       /* references for the time of a step */
    ont_quick_param *quick;    /* by position */
    ont_quick_group *quick_groups;
    size_t n_slots, n_order, n_held, slots_capacity, order_capacity, held_capacity, quick_capacity,
        quick_groups_capacity;
    uint64_t generation;         /* how often the optimizer's dict was found changed */
    uint64_t steps, quick_steps; /* so far; those of the quick walk */
    uint64_t quick_after;        /* before that many steps the quick walk is not tried again */
    bool busy;
} ont_updater;

/* A parameter whose gradient comes later, from the engine's backward, where it is an input of the program. */
typedef struct ont_expected {
    PyObject *param;        /* borrowed; NULL: not one of them */
    const ont_value *input;
    uint32_t number, tensor; /* among those expected; of the walk */
    bool found;
} ont_expected;

/* One call of step(). */
typedef struct ont_walk {
    ont_updater *self;
    PyObject *states, *prepare, *updated;
    const ont_device *device; /* NULL: the CPU */
    ont_expected *expected;   /* by position, NULL: the walk is for parameters that have gradients */
    size_t n_expected;
    bool known, changed; /* the state dict is as last time; it was changed by prepare() */
    size_t position;     /* among all parameters */
    Py_ssize_t group, index;
    double hyper[ONT_OPTIM_HYPER_MAX], sign;
    int flags;
    uint32_t needs;
    double last_step; /* whose coefficients were added last for this group; negative: none */
    bool last_first;
    uint32_t last_update;
} ont_walk;

extern const char *const ont_operand_text[ONT_OPERAND_COUNT];

/* The entries of a parameter's state that the rule and the group need; borrowed from the dict. */
typedef struct ont_entries {
    PyObject *step, *master, *state[ONT_RULE_STATES];
} ont_entries;

/* py/optim_device.c: the step on a device, of the tensors that the walk has found. */
PyObject *ont_optim_device_step(ont_walk *w, PyObject *scalars, double max_norm);
int ont_optim_device_group(ont_walk *w); /* a group begins */
void ont_optim_device_free(ont_step_tables *t);

/* py/optim.c: -1 with ValueError where tensors of the walk share memory. */
int ont_optim_check_overlap(ont_updater *self);
void ont_optim_let_go(ont_updater *self); /* of what the walk held */

/* py/optim_backward.c: Updater.backward(). */
PyObject *ont_updater_backward(PyObject *object, PyObject *args);

/* py/optim_walk.c: the careful walk, and what both walks use. -1 with an exception. */
int ont_optim_careful(ont_walk *w, PyObject *groups, PyObject *hyper);
bool ont_optim_state_unchanged(const ont_updater *self, PyObject *states);
int ont_optim_parse_hyper(ont_walk *w, PyObject *numbers);
/* The coefficients of a tensor that takes its `step`-th step: the last ones, or new ones. Raises. */
int ont_optim_take_update(ont_walk *w, ont_optim_tensor *t, double step, bool first);

/*
 * py/optim_quick.c: the quick walk. 1 where it has found all tensors, 0 where the careful walk must, -1 with an
 * exception. The GIL must be kept while its tensors are used.
 */
int ont_optim_quick(ont_walk *w, PyObject *groups, PyObject *hyper);
void ont_optim_quick_mark(void *updater);

bool ont_is_tensor(const ont_updater *self, PyObject *object);
/* Raises with the parameter's place; returns -1. */
int ont_blame(const ont_walk *w, PyObject *type, const char *what, const char *problem);
/* Keeps the reference until the step is over; takes it over, also on failure. */
int ont_hold(ont_updater *self, PyObject *object);
/* A tensor's memory for the time of the step; strides are NULL where row-major. */
int ont_grasp(ont_walk *w, PyObject *tensor, int operand, ont_tensor_view *view);
void ont_warm_up(const ont_slot *s);
void ont_warm_up_dict(const ont_slot *s);    /* parts of the former: the parameter and its state dict */
void ont_warm_up_tensors(const ont_slot *s); /* and the tensors */
void ont_warm_up_param(const ont_slot *s);
/* Remember where a tensor that was peeked at, and a parameter's state, lie. */
void ont_saw(ont_updater *self, ont_slot *s, int operand, PyObject *object, const ont_tensor_view *view);
void ont_saw_grad(ont_slot *s, const void *handle, const ont_tensor_view *view);
void ont_saw_inner(ont_slot *s, PyObject *inner);
int64_t ont_tensor_view_count(const ont_tensor_view *view);
bool ont_same_dims(const ont_tensor_view *a, const ont_tensor_view *b);

#endif
