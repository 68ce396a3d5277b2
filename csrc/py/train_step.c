/*
 * Session.step(), a training step in one call: forward, backward, gradients into .grad, and the optimizer's update.
 * Called by onnxtrain/training/_whole_step.py; independent of kernels and optimizers.
 */
#include "py/call.h" /* Python.h before any system header */

#include "base/assert.h"

typedef struct train_step {
    PyObject *tensors, *seed, *gradient, *update;
    const char *mask; /* one byte per tensor: whether its gradient is wanted */
    Py_ssize_t n, loss;
} train_step;

/* One item per output: None, and the gradient of the loss. */
static PyObject *output_gradients(const train_step *s, PyObject *outputs)
{
    Py_ssize_t n = PyTuple_Size(outputs);
    if (s->loss < 0 || s->loss >= n) return PyErr_Format(PyExc_IndexError, "there is no output %zd", s->loss);
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple && i < n; i++)
        if (PyTuple_SetItem(tuple, i, Py_NewRef(i == s->loss ? s->gradient : Py_None)) < 0) Py_CLEAR(tuple);
    return tuple;
}

/* As autograd does for a leaf: .grad is set, or added to in place. */
static int accumulate(PyObject *tensor, PyObject *key, PyObject *gradient)
{
    PyObject *before = PyObject_GetAttr(tensor, key);
    if (!before) return -1;
    int result;
    if (before == Py_None) {
        result = PyObject_SetAttr(tensor, key, gradient);
    } else {
        PyObject *sum = PyObject_CallMethod(before, "add_", "O", gradient);
        result = sum ? 0 : -1;
        Py_XDECREF(sum);
    }
    Py_DECREF(before);
    return result;
}

static int accumulate_all(const train_step *s, PyObject *gradients)
{
    PyObject *key = PyUnicode_InternFromString("grad");
    int result = key ? 0 : -1;
    ONT_ASSERT(PyTuple_Size(gradients) == s->n);
    for (Py_ssize_t i = 0; result == 0 && i < s->n; i++) {
        PyObject *gradient = PyTuple_GetItem(gradients, i);
        if (s->mask[i] && gradient != Py_None) result = accumulate(PyTuple_GetItem(s->tensors, i), key, gradient);
    }
    Py_XDECREF(key);
    return result;
}

/* Calls update, a tuple of a callable and its arguments; None: nothing. */
static PyObject *call_update(PyObject *update)
{
    if (update == Py_None) return Py_NewRef(Py_None);
    PyObject *function, *arguments;
    if (!PyTuple_Check(update)) return PyErr_Format(PyExc_TypeError, "the update is not a tuple");
    if (!PyArg_ParseTuple(update, "OO!:update", &function, &PyTuple_Type, &arguments)) return NULL;
    return PyObject_CallObject(function, arguments);
}

/* Backward and update; returns what the update has returned. */
static PyObject *finish(const train_step *s, PyObject *outputs, PyObject *run)
{
    if (run == Py_None) return PyErr_Format(PyExc_RuntimeError, "no output of this graph has a gradient");
    PyObject *saved = ont_run_object_saved(run, s->tensors, outputs);
    PyObject *gradients = saved ? output_gradients(s, outputs) : NULL;
    PyObject *found = gradients ? ont_run_object_backward(run, saved, gradients, NULL, NULL) : NULL;
    PyObject *result = found && accumulate_all(s, found) == 0 ? call_update(s->update) : NULL;
    Py_XDECREF(found);
    Py_XDECREF(gradients);
    Py_XDECREF(saved);
    return result;
}

PyObject *ont_session_object_step(PyObject *session, PyObject *args)
{
    train_step s = {.update = Py_None};
    if (!PyArg_ParseTuple(args, "O!y#OnO|O:step", &PyTuple_Type, &s.tensors, &s.mask, &s.n, &s.seed, &s.loss,
                          &s.gradient, &s.update))
        return NULL;
    if (s.n != PyTuple_Size(s.tensors))
        return PyErr_Format(PyExc_ValueError, "grad_mask has %zd bytes, expected %zd", s.n, PyTuple_Size(s.tensors));
    PyObject *pair = ont_session_object_forward(session, s.tensors, s.mask, s.n, s.seed);
    if (!pair) return NULL;
    PyObject *outputs = PyTuple_GetItem(pair, 0), *result = NULL;
    PyObject *updated = finish(&s, outputs, PyTuple_GetItem(pair, 1));
    if (updated) result = PyTuple_Pack(2, outputs, updated);
    Py_XDECREF(updated);
    Py_DECREF(pair);
    return result;
}
