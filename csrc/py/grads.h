/*
 * What grads.c offers to the module's table of functions in module.c.
 */
#ifndef ONT_PY_GRADS_H
#define ONT_PY_GRADS_H

#include "py/python.h"

PyObject *ont_sums_of_squares(PyObject *module, PyObject *tensors);
PyObject *ont_scale_tensors(PyObject *module, PyObject *args);

#endif
