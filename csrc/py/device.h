/*
 * Devices by name, and torch's allocator for plugins.
 */
#ifndef ONT_PY_DEVICE_H
#define ONT_PY_DEVICE_H

#include "py/dlpack.h"

/* "" and "cpu" give NULL; "cuda", "cuda:1", or a device of an opened plugin. -1 with a Python exception. */
int ont_device_by_name(const ont_state *state, const char *name, const ont_device **device);
void ont_device_init(const ont_state *state);

PyObject *ont_open_plugin(PyObject *module, PyObject *args);
PyObject *ont_set_graphs(PyObject *module, PyObject *args);
PyObject *ont_set_tf32(PyObject *module, PyObject *args);
PyObject *ont_device_operators(PyObject *module, PyObject *args);

#endif
