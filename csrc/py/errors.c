/*
 * The one place where a status becomes a Python exception.
 */
#include "py/python.h"

static PyObject *exception_of(const ont_state *state, ont_status status)
{
    switch (status) {
    case ONT_EINVAL: return PyExc_ValueError;
    case ONT_ETYPE: return PyExc_TypeError;
    case ONT_EINDEX: return PyExc_IndexError;
    case ONT_ENOMEM: return PyExc_MemoryError;
    case ONT_ENEEDVALUE:
    case ONT_EUNSUPPORTED: return state->unsupported_error;
    case ONT_EIO: return PyExc_OSError;
    case ONT_OK:
    case ONT_ESTATE:
    case ONT_EINTERNAL: break;
    }
    return PyExc_RuntimeError;
}

PyObject *ont_raise(const ont_state *state, ont_status status)
{
    PyErr_SetString(exception_of(state, status), ont_error_message());
    return NULL;
}
