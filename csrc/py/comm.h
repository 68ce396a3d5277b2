/*
 * Collectives over memory of a device as functions of the module (device/comm.h).
 */
#ifndef ONT_PY_COMM_H
#define ONT_PY_COMM_H

#include "py/dlpack.h"

PyObject *ont_comm_about(PyObject *module, PyObject *args);
PyObject *ont_comm_make_id(PyObject *module, PyObject *args);
PyObject *ont_comm_open(PyObject *module, PyObject *args);
PyObject *ont_comm_enqueue(PyObject *module, PyObject *args);
PyObject *ont_comm_check(PyObject *module, PyObject *capsule);
PyObject *ont_comm_close(PyObject *module, PyObject *args);

#endif
