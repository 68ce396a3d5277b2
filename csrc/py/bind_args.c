/*
 * Per-call argument handling of ORTModule, before the engine runs: a signature of the arguments' types, and the tensors
 * bound to the graph's inputs. In C, since a step of a small model takes a few microseconds. Independent of sessions.
 */
#include "py/bind_args.h" /* Python.h before any system header */

#include <string.h>

#include "py/torch_abi.h"

enum { KIND_BYTES = sizeof(ont_torch_type) };

/* Whether a tensor is nested; nested tensors have the type and the layout of plain ones. */
static int is_nested(const ont_state *state, PyObject *tensor)
{
    PyObject *answer = PyObject_GetAttr(tensor, state->is_nested);
    int nested = answer ? answer == Py_True : -1;
    Py_XDECREF(answer);
    return nested;
}

/*
 * signature(args) -> bytes that are equal for arguments of equal dtypes, ranks and devices; None if an argument is
 * not a plain tensor.
 */
PyObject *ont_signature(PyObject *module, PyObject *args)
{
    const ont_state *state = ont_get_state(module);
    if (!PyTuple_Check(args)) return PyErr_Format(PyExc_TypeError, "signature() takes a tuple");
    Py_ssize_t n = PyTuple_Size(args);
    PyObject *signature = PyBytes_FromStringAndSize(NULL, n * KIND_BYTES);
    char *to = signature ? PyBytes_AsString(signature) : NULL;
    for (Py_ssize_t i = 0; to && i < n; i++, to += KIND_BYTES) {
        PyObject *tensor = PyTuple_GetItem(args, i);
        ont_torch_type kind;
        void *handle = ont_torch_handle(state, tensor);
        int nested = handle && ont_torch_type_of(handle, &kind) ? is_nested(state, tensor) : 1;
        if (nested) {
            Py_DECREF(signature);
            if (nested < 0) return NULL;
            Py_RETURN_NONE;
        }
        memcpy(to, &kind, KIND_BYTES);
    }
    return signature;
}

/* The tensor of one source: (dict, name), or (None, index of an argument). A new reference. */
static PyObject *tensor_of(PyObject *source, PyObject *leaves)
{
    if (!source) return NULL; /* the list was shortened meanwhile */
    PyObject *owner = PyTuple_Check(source) && PyTuple_Size(source) == 2 ? PyTuple_GetItem(source, 0) : NULL;
    if (!owner || (owner != Py_None && !PyDict_Check(owner)))
        return PyErr_Format(PyExc_TypeError, "a source is (dict, name) or (None, index of an argument)");
    PyObject *name = PyTuple_GetItem(source, 1);
    if (owner == Py_None) {
        Py_ssize_t index = PyLong_AsSsize_t(name);
        return index == -1 && PyErr_Occurred() ? NULL : PySequence_GetItem(leaves, index);
    }
    PyObject *tensor = PyDict_GetItemWithError(owner, name);
    if (!tensor && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, name);
    return Py_XNewRef(tensor);
}

/* gather(sources, leaves, grad_enabled) -> (tensors, one byte per tensor: whether it requires a gradient). */
PyObject *ont_gather(PyObject *module, PyObject *args)
{
    const ont_state *state = ont_get_state(module);
    PyObject *sources, *leaves;
    int grad_enabled;
    if (!PyArg_ParseTuple(args, "O!Op:gather", &PyList_Type, &sources, &leaves, &grad_enabled)) return NULL;
    Py_ssize_t n = PyList_Size(sources);
    PyObject *tensors = PyTuple_New(n), *mask = PyBytes_FromStringAndSize(NULL, n);
    char *flags = mask ? PyBytes_AsString(mask) : NULL;
    for (Py_ssize_t i = 0; tensors && flags && i < n; i++) {
        PyObject *source = Py_XNewRef(PyList_GetItem(sources, i)), *tensor = tensor_of(source, leaves);
        Py_XDECREF(source);
        PyObject *wants = tensor && grad_enabled ? PyObject_GetAttr(tensor, state->requires_grad) : NULL;
        flags[i] = wants == Py_True;
        if (!tensor || (grad_enabled && !wants)) flags = NULL;
        Py_XDECREF(wants);
        if (tensor) PyTuple_SetItem(tensors, i, tensor);
    }
    PyObject *result = tensors && flags ? PyTuple_Pack(2, tensors, mask) : NULL;
    Py_XDECREF(tensors);
    Py_XDECREF(mask);
    return result;
}
