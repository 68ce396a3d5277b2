/*
 * The only place where a status becomes a Python exception.
 */
#include "py/python.h"

#include <string.h>

PyObject *ont_text(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

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
    PyObject *message = ont_text(ont_error_message());
    if (message) PyErr_SetObject(exception_of(state, status), message);
    Py_XDECREF(message);
    return NULL;
}
