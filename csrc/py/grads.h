/*
 * Lists of gradients outside of an optimizer step: shared by grads.c and grads_device.c, with the functions for
 * module.c's table.
 */
#ifndef ONT_PY_GRADS_H
#define ONT_PY_GRADS_H

#include "py/dlpack.h"

#include "optim/optim.h"

typedef struct ont_grad_list {
    const ont_state *state;
    const ont_device *device; /* NULL: the CPU */
    ont_optim work;
    PyObject *items; /* the sequences as lists, and other objects to hold */
} ont_grad_list;

int ont_grad_list_init(ont_grad_list *l, PyObject *module, const ont_device *device);
void ont_grad_list_deinit(ont_grad_list *l);
/* Converts the sequence to a list, held until deinit; NULL with an exception if it is no sequence. */
PyObject *ont_grad_list_hold(ont_grad_list *l, PyObject *sequence);
/* Adds each tensor as a gradient. */
int ont_grad_list_take(ont_grad_list *l, PyObject *items);
/*
 * Adds each source as a gradient, and the target of the same index, which must have its shape, as a parameter with
 * coefficients `update`.
 */
int ont_grad_list_pair(ont_grad_list *l, PyObject *sources, PyObject *targets, uint32_t update);
/* ValueError if tensors share memory. */
int ont_grad_list_check(ont_grad_list *l);

PyObject *ont_sums_of_squares(PyObject *module, PyObject *tensors);
PyObject *ont_scale_tensors(PyObject *module, PyObject *args);
PyObject *ont_grad_tables(PyObject *module, PyObject *unused);
PyObject *ont_grads_on(PyObject *module, PyObject *args);

#endif
