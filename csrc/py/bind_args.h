/*
 * Per-call argument handling of ORTModule, before the engine runs. Functions for module.c's table.
 */
#ifndef ONT_PY_BIND_ARGS_H
#define ONT_PY_BIND_ARGS_H

#include "py/python.h"

PyObject *ont_signature(PyObject *module, PyObject *args);
PyObject *ont_gather(PyObject *module, PyObject *args);

#endif
