/*
 * What the modules of this layer share about the times of steps: see timing.c.
 */
#ifndef ONT_PY_TIMING_H
#define ONT_PY_TIMING_H

#include "py/python.h"

PyObject *ont_session_timeline(PyObject *session, PyObject *unused);
PyObject *ont_session_timings(PyObject *session, PyObject *unused);
PyObject *ont_py_set_timing(PyObject *module, PyObject *args);
PyObject *ont_py_set_ranges(PyObject *module, PyObject *make);

#endif
