/*
 * Sums of squares and scaling of lists of gradients, each in one pass over memory: _C.sums_of_squares() and
 * _C.scale_tensors(). For clipping and unscaling outside of an optimizer step; called by onnxtrain/optim/_clip.py and
 * fp16_optimizer.py.
 */
#include "py/grads.h" /* Python.h before any system header */

#include "base/alloc.h"

int ont_grad_list_init(ont_grad_list *l, PyObject *module, const ont_device *device)
{
    *l = (ont_grad_list){.state = ont_get_state(module), .device = device, .items = PyList_New(0)};
    return l->items ? 0 : -1;
}

void ont_grad_list_deinit(ont_grad_list *l)
{
    ont_optim_deinit(&l->work);
    Py_XDECREF(l->items);
}

PyObject *ont_grad_list_hold(ont_grad_list *l, PyObject *sequence)
{
    PyObject *items = PySequence_List(sequence);
    if (!items) return NULL;
    int held = PyList_Append(l->items, items);
    Py_DECREF(items);
    return held < 0 ? NULL : items;
}

static int take_tensor(ont_grad_list *l, ont_optim_tensor *t, PyObject *tensor, int operand, Py_ssize_t index,
                       ont_tensor_view *view)
{
    PyObject *keep = NULL;
    if (ont_dlpack_borrow_on(l->state, l->device, tensor, "tensor", index, view, &keep) < 0) return -1;
    int held = keep ? PyList_Append(l->items, keep) : 0;
    Py_XDECREF(keep);
    if (held < 0) return -1;
    if (ont_optim_storage(view->dtype) == ONT_STORAGE_COUNT) {
        PyErr_Format(PyExc_TypeError, "tensor %zd is %s, which is not a float", index, ont_dtype_name(view->dtype));
        return -1;
    }
    t->data[operand] = view->data;
    t->dtype[operand] = (uint8_t)view->dtype;
    t->count = 1;
    for (int i = 0; i < view->rank; i++) t->count *= view->dims[i];
    return 0;
}

static int set_layout(ont_grad_list *l, ont_optim_tensor *t, const ont_tensor_view *view,
                      const int64_t *const strides[ONT_OPERAND_COUNT], Py_ssize_t index)
{
    ont_status status = ONT_OK;
    if (t->count) status = ont_optim_make_layout(&l->work, t, view->rank, view->dims, strides, &t->layout);
    if (status == ONT_OK) return 0;
    ont_context(status, "tensor %zd", index);
    ont_raise(l->state, status);
    return -1;
}

/* ---- sums of squares ---- */

int ont_grad_list_take(ont_grad_list *l, PyObject *items)
{
    for (Py_ssize_t i = 0; i < PyList_Size(items); i++) {
        ont_optim_tensor *t;
        ont_tensor_view view;
        const int64_t *strides[ONT_OPERAND_COUNT] = {0};
        if (ont_optim_add_tensor(&l->work, &t) != ONT_OK) {
            PyErr_NoMemory();
            return -1;
        }
        if (take_tensor(l, t, PyList_GetItem(items, i), ONT_OPERAND_GRAD, i, &view) < 0) return -1;
        strides[ONT_OPERAND_GRAD] = view.strides;
        if (l->device) { /* in place: iterate in the order of its memory */
            t->data[ONT_OPERAND_PARAM] = view.data;
            t->dtype[ONT_OPERAND_PARAM] = (uint8_t)view.dtype;
            strides[ONT_OPERAND_PARAM] = view.strides;
        }
        if (set_layout(l, t, &view, strides, i) < 0) return -1;
    }
    return 0;
}

static PyObject *list_of(const double *sums, size_t n)
{
    PyObject *result = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; result && i < n; i++) {
        PyObject *number = PyFloat_FromDouble(sums[i]);
        if (!number || PyList_SetItem(result, (Py_ssize_t)i, number) < 0) Py_CLEAR(result);
    }
    return result;
}

PyObject *ont_sums_of_squares(PyObject *module, PyObject *tensors)
{
    ont_grad_list l;
    PyObject *items, *result = NULL;
    if (ont_grad_list_init(&l, module, NULL) < 0) return NULL;
    items = ont_grad_list_hold(&l, tensors);
    if (items && ont_grad_list_take(&l, items) == 0) {
        ont_status status = ONT_ENOMEM;
        double *sums = ont_calloc(l.work.n_tensors + 1, sizeof *sums);
        Py_BEGIN_ALLOW_THREADS
        if (sums) status = ont_optim_squares(&l.work, sums);
        Py_END_ALLOW_THREADS
        if (status == ONT_OK) result = list_of(sums, l.work.n_tensors);
        else if (!sums) PyErr_NoMemory();
        else ont_raise(l.state, status);
        ont_free(sums);
    }
    ont_grad_list_deinit(&l);
    return result;
}

/* ---- scaling ---- */

int ont_grad_list_pair(ont_grad_list *l, PyObject *sources, PyObject *targets, uint32_t update)
{
    if (PyList_Size(sources) != PyList_Size(targets)) {
        PyErr_Format(PyExc_ValueError, "there are %zd sources, but %zd targets", PyList_Size(sources),
                     PyList_Size(targets));
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(sources); i++) {
        ont_optim_tensor *t;
        ont_tensor_view from, to;
        const int64_t *strides[ONT_OPERAND_COUNT] = {0};
        if (ont_optim_add_tensor(&l->work, &t) != ONT_OK) {
            PyErr_NoMemory();
            return -1;
        }
        if (take_tensor(l, t, PyList_GetItem(sources, i), ONT_OPERAND_GRAD, i, &from) < 0 ||
            take_tensor(l, t, PyList_GetItem(targets, i), ONT_OPERAND_PARAM, i, &to) < 0)
            return -1;
        bool same = from.rank == to.rank;
        for (int d = 0; same && d < to.rank; d++) same = from.dims[d] == to.dims[d];
        if (!same) {
            PyErr_Format(PyExc_ValueError, "source %zd and its target differ in shape", i);
            return -1;
        }
        strides[ONT_OPERAND_GRAD] = from.strides;
        strides[ONT_OPERAND_PARAM] = to.strides;
        t->update = update;
        t->stream = (uint32_t)i;
        if (set_layout(l, t, &to, strides, i) < 0) return -1;
    }
    return 0;
}

int ont_grad_list_check(ont_grad_list *l)
{
    bool overlaps = false;
    ont_optim_overlap where;
    ont_status status = ont_optim_check(&l->work, &overlaps, &where);
    if (status == ONT_OK && !overlaps) return 0;
    if (status != ONT_OK)
        ont_raise(l->state, status);
    else
        PyErr_Format(PyExc_ValueError, "tensor %u shares memory with tensor %u", l->work.tensors[where.tensor].stream,
                     l->work.tensors[where.other_tensor].stream);
    return -1;
}

static PyObject *scale_all(ont_grad_list *l)
{
    bool finite = false;
    ont_status status;
    if (ont_grad_list_check(l) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = ont_optim_scale(&l->work, &finite);
    Py_END_ALLOW_THREADS
    return status == ONT_OK ? PyBool_FromLong(finite) : ont_raise(l->state, status);
}

PyObject *ont_scale_tensors(PyObject *module, PyObject *args)
{
    ont_grad_list l;
    PyObject *from, *to, *sources = NULL, *targets = NULL, *result = NULL;
    ont_update u = {0};
    uint32_t update;
    if (!PyArg_ParseTuple(args, "OOdd:scale_tensors", &from, &to, &u.grad, &u.keep_before)) return NULL;
    if (ont_grad_list_init(&l, module, NULL) < 0) return NULL;
    if (ont_optim_add_update(&l.work, &u, &update) != ONT_OK) PyErr_NoMemory();
    else if ((sources = ont_grad_list_hold(&l, from)) && (targets = ont_grad_list_hold(&l, to)) &&
             ont_grad_list_pair(&l, sources, targets, update) == 0)
        result = scale_all(&l);
    ont_grad_list_deinit(&l);
    return result;
}
