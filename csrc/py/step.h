/*
 * What ORTModule asks at every call, before the engine runs. Functions of the module, for module.c's table.
 */
#ifndef ONT_PY_STEP_H
#define ONT_PY_STEP_H

#include "py/python.h"

PyObject *ont_signature(PyObject *module, PyObject *args);
PyObject *ont_gather(PyObject *module, PyObject *args);

#endif
