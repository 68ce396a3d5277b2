/*
 * Borrows the tensors that go into a call of a Session or a Run, and wraps those that come out.
 */
#include "py/call.h" /* Python.h before any system header */

#include "base/alloc.h"

void ont_borrowed_deinit(ont_borrowed *b)
{
    for (Py_ssize_t i = 0; b->keep && i < b->n; i++) Py_XDECREF(b->keep[i]);
    ont_free(b->keep);
    ont_free(b->views);
}

int ont_borrowed_init(ont_borrowed *b, Py_ssize_t n)
{
    *b = (ont_borrowed){.n = n};
    b->views = ont_calloc((size_t)n + 1, sizeof *b->views);
    b->keep = ont_calloc((size_t)n + 1, sizeof *b->keep);
    if (b->views && b->keep) return 0;
    ont_borrowed_deinit(b);
    PyErr_NoMemory();
    return -1;
}

void ont_memory_range(const ont_tensor_view *view, uintptr_t *first, uintptr_t *last)
{
    int64_t span = 1, step = 1;
    for (int d = view->rank - 1; d >= 0; d--) {
        span = span && view->dims[d] ? span + (view->dims[d] - 1) * (view->strides ? view->strides[d] : step) : 0;
        step *= view->dims[d];
    }
    *first = (uintptr_t)view->data;
    *last = *first + (size_t)span * ont_dtype_size(view->dtype);
}

int ont_borrow_inputs(const ont_state *state, const ont_device *device, PyObject *tensors, ont_borrowed *b)
{
    for (Py_ssize_t i = 0; i < b->n; i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        if (ont_dlpack_borrow_on(state, device, tensor, "input", i, &b->views[i], &b->keep[i]) < 0) return -1;
    }
    return 0;
}

PyObject *ont_wrap_blocks(const ont_state *state, ont_block **blocks, uint32_t n)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    for (uint32_t i = 0; i < n; i++) {
        if (!tuple) {
            ont_block_unref(blocks[i]);
            continue;
        }
        PyObject *item = blocks[i] ? ont_dlpack_wrap(state, blocks[i]) : Py_NewRef(Py_None);
        if (!item || PyTuple_SetItem(tuple, (Py_ssize_t)i, item) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *ont_sequence(PyObject *object, Py_ssize_t expected, const char *what)
{
    PyObject *tuple = PySequence_Tuple(object);
    if (tuple && PyTuple_Size(tuple) != expected) {
        PyErr_Format(PyExc_ValueError, "%zd %s, expected %zd", PyTuple_Size(tuple), what, expected);
        Py_CLEAR(tuple);
    }
    return tuple;
}
