/*
 * Lists of gradients outside of an optimizer's step: what grads.c and grads_device.c share, and what they offer to the
 * module's table of functions in module.c.
 */
#ifndef ONT_PY_GRADS_H
#define ONT_PY_GRADS_H

#include "py/dlpack.h"

#include "optim/optim.h"

typedef struct ont_grad_list {
    const ont_state *state;
    const ont_device *device; /* NULL: the CPU */
    ont_optim work;
    PyObject *items; /* the sequences as lists, and what must be held */
} ont_grad_list;

int ont_grad_list_init(ont_grad_list *l, PyObject *module, const ont_device *device);
void ont_grad_list_deinit(ont_grad_list *l);
/* A list of the sequence's items, held until the end; NULL: it is none. */
PyObject *ont_grad_list_hold(ont_grad_list *l, PyObject *sequence);
/* Adds each tensor as a gradient. */
int ont_grad_list_take(ont_grad_list *l, PyObject *items);
/* Adds each source as a gradient, and the target of its shape as a parameter, under the update. */
int ont_grad_list_pair(ont_grad_list *l, PyObject *sources, PyObject *targets, uint32_t update);
/* Refuses tensors that share memory. */
int ont_grad_list_check(ont_grad_list *l);

PyObject *ont_sums_of_squares(PyObject *module, PyObject *tensors);
PyObject *ont_scale_tensors(PyObject *module, PyObject *args);
PyObject *ont_grad_tables(PyObject *module, PyObject *unused);
PyObject *ont_grads_on(PyObject *module, PyObject *args);

#endif
