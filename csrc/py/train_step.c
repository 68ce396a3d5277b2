/*
 * Session.step(), a training step in one call: forward, backward, gradients into .grad or to their receivers, the
 * collectives of several processes, and the optimizer's update. Called by onnxtrain/training/_whole_step.py;
 * independent of kernels, optimizers and the library of the collectives.
 */
#include "py/call.h" /* Python.h before any system header */

#include "base/assert.h"

typedef struct train_step {
    PyObject *tensors, *seed, *gradient, *update;
    PyObject *receivers, *ready; /* as Run.deliver()'s; Py_None: .grad receives every gradient */
    PyObject *reduce;            /* called between backward and the update; Py_None: nothing */
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

/* Calls update, a tuple of a callable and its arguments, after the reduction; None: neither. */
static PyObject *call_update(const train_step *s)
{
    if (s->update == Py_None) return Py_NewRef(Py_None);
    PyObject *function, *arguments;
    if (!PyTuple_Check(s->update)) return PyErr_Format(PyExc_TypeError, "the update is not a tuple");
    if (!PyArg_ParseTuple(s->update, "OO!:update", &function, &PyTuple_Type, &arguments)) return NULL;
    PyObject *reduced = s->reduce == Py_None ? Py_NewRef(Py_None) : PyObject_CallObject(s->reduce, NULL);
    PyObject *result = reduced ? PyObject_CallObject(function, arguments) : NULL;
    Py_XDECREF(reduced);
    return result;
}

/* The gradients of all inputs, but for those that have been delivered. */
static PyObject *backward(const train_step *s, PyObject *run, PyObject *saved, PyObject *gradients)
{
    if (s->receivers == Py_None) return ont_run_object_backward(run, saved, gradients, NULL);
    return PyObject_CallMethod(run, "deliver", "OOOO", saved, gradients, s->receivers, s->ready);
}

/* Backward and update; returns what the update has returned. */
static PyObject *finish(const train_step *s, PyObject *outputs, PyObject *run)
{
    if (run == Py_None) return PyErr_Format(PyExc_RuntimeError, "no output of this graph has a gradient");
    PyObject *saved = ont_run_object_saved(run, s->tensors, outputs);
    PyObject *gradients = saved ? output_gradients(s, outputs) : NULL;
    PyObject *found = gradients ? backward(s, run, saved, gradients) : NULL;
    PyObject *result = found && accumulate_all(s, found) == 0 ? call_update(s) : NULL;
    Py_XDECREF(found);
    Py_XDECREF(gradients);
    Py_XDECREF(saved);
    return result;
}

PyObject *ont_session_object_step(PyObject *session, PyObject *args)
{
    train_step s = {.update = Py_None, .receivers = Py_None, .ready = Py_None, .reduce = Py_None};
    if (!PyArg_ParseTuple(args, "O!y#OnO|OOOO:step", &PyTuple_Type, &s.tensors, &s.mask, &s.n, &s.seed, &s.loss,
                          &s.gradient, &s.update, &s.receivers, &s.ready, &s.reduce))
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
