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
    size_t n_slots, n_order, n_held, slots_capacity, order_capacity, held_capacity;
    bool busy;
} ont_updater;

/* One call of step(). */
typedef struct ont_walk {
    ont_updater *self;
    PyObject *states, *prepare, *updated;
    const ont_device *device; /* NULL: the CPU */
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

bool ont_is_tensor(const ont_updater *self, PyObject *object);
/* Raises with the parameter's place; returns -1. */
int ont_blame(const ont_walk *w, PyObject *type, const char *what, const char *problem);
/* Keeps the reference until the step is over; takes it over, also on failure. */
int ont_hold(ont_updater *self, PyObject *object);
/* A tensor's memory for the time of the step; strides are NULL where row-major. */
int ont_grasp(ont_walk *w, PyObject *tensor, int operand, ont_view *view);
void ont_warm_up(const ont_slot *s);
void ont_warm_up_param(const ont_slot *s);
/* Remember where a tensor that was peeked at, and a parameter's state, lie. */
void ont_saw(ont_walk *w, int operand, PyObject *object, const ont_view *view);
void ont_saw_inner(ont_slot *s, PyObject *inner);
int64_t ont_view_count(const ont_view *view);
bool ont_same_dims(const ont_view *a, const ont_view *b);

#endif
