/*
 * Shared by the files of this layer: the limited API, module state, error mapping. No lower layer includes it.
 */
#ifndef ONT_PY_PYTHON_H
#define ONT_PY_PYTHON_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "run/session.h"

typedef struct ont_state { /* per module */
    PyTypeObject *session_type, *run_type, *watch_type, *updater_type;
    PyObject *unsupported_error;
    PyObject *tensor_type, *parameter_type; /* torch.Tensor, torch.nn.Parameter */
    PyObject *requires_grad, *is_nested;    /* names */
    const struct dlpack_exchange_api *dlpack;
} ont_state;

extern struct PyModuleDef ont_module_def;
ont_state *ont_get_state(PyObject *module);

/* Sets the Python exception for a failed status, with the message of base/status; returns NULL. */
PyObject *ont_raise(const ont_state *state, ont_status status);

/* A str of text that may hold arbitrary bytes: a string attribute, or a message that was cut within a character. */
PyObject *ont_text(const char *text);

extern PyType_Spec ont_session_spec, ont_run_spec, ont_watch_spec, ont_updater_spec;

typedef struct ont_session_object {
    PyObject_HEAD
    ont_session *session;
    ont_state *state;
    PyObject *module;
} ont_session_object;

ont_session *ont_session_of(PyObject *session);                  /* session.c; NULL with an exception */
PyObject *ont_session_plan(PyObject *session, PyObject *args);    /* plan.c */

/* Creates a Run for a run that awaits its backward; steals `run`. */
PyObject *ont_run_object_new(ont_session_object *session, ont_run *run, const ont_random *random);

#endif
