/*
 * Collectives by MPI as functions of the module: tensors become memory, waiting happens without the GIL, and a signal
 * (Ctrl-C) ends it. Called by onnxtrain/training/_collectives.py.
 */
#include "py/dist.h" /* Python.h before any system header */

#include "dist/collectives.h"

/* One call: its table, its tensors, how it waits. */
typedef struct ont_dist_call {
    const ont_state *state;
    const ont_collectives *table;
    PyObject *tensors[2]; /* borrowed from the caller */
    PyObject *keep[2];
    ont_wait wait;
} ont_dist_call;

/* On the thread that waits, which has no GIL. */
static bool has_signal(void *context)
{
    (void)context;
    PyGILState_STATE gil = PyGILState_Ensure();
    bool raised = PyErr_CheckSignals() < 0;
    PyGILState_Release(gil);
    return raised;
}

static int begin(ont_dist_call *c, PyObject *module)
{
    *c = (ont_dist_call){.state = ont_get_state(module), .wait = {.interrupted = has_signal}};
    ont_status status;
    Py_BEGIN_ALLOW_THREADS /* the first call waits for the others */
    status = ont_collectives_get(&c->table);
    Py_END_ALLOW_THREADS
    if (status == ONT_OK) return 0;
    ont_raise(c->state, status);
    return -1;
}

/* Holds the memory of a tensor for good, whatever the tensor is given later. A pending exception is kept. */
static void leak(PyObject *tensor)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!PyObject_CallMethod(tensor, "detach", NULL)) Py_INCREF(tensor);
    PyErr_Restore(type, value, trace);
}

static PyObject *end(ont_dist_call *c, ont_status status)
{
    for (int i = 0; c->wait.pending && i < 2; i++)
        if (c->tensors[i]) leak(c->tensors[i]);
    for (int i = 0; i < 2; i++) Py_XDECREF(c->keep[i]);
    if (status == ONT_OK) Py_RETURN_NONE;
    if (PyErr_Occurred()) return NULL; /* a signal's */
    return ont_raise(c->state, ont_fail(status, "%s", c->wait.message));
}

/* Borrows argument number `index`; ValueError unless its memory is row-major. */
static int take(ont_dist_call *c, PyObject *tensor, int index, ont_tensor_view *view, size_t *n)
{
    if (ont_dlpack_borrow(c->state, tensor, "tensor", index, view, &c->keep[index]) < 0) return -1;
    c->tensors[index] = tensor;
    *n = 1;
    int64_t step = 1;
    bool dense = true;
    for (int i = view->rank - 1; i >= 0; i--) {
        dense = dense && (!view->strides || view->dims[i] == 1 || view->strides[i] == step);
        step *= view->dims[i];
        *n *= (size_t)view->dims[i];
    }
    if (dense || !*n) return 0;
    PyErr_Format(PyExc_ValueError, "tensor %d is not contiguous", index);
    return -1;
}

/* whole has size times the elements of own, and its dtype. */
static int take_pair(ont_dist_call *c, PyObject *own, PyObject *whole, ont_tensor_view views[2], size_t *n)
{
    size_t all;
    if (take(c, own, 0, &views[0], n) < 0 || take(c, whole, 1, &views[1], &all) < 0) return -1;
    if (all == *n * (size_t)c->table->size && views[0].dtype == views[1].dtype) return 0;
    PyErr_Format(PyExc_ValueError, "%zu elements of %s in each of %d processes do not make %zu of %s", *n,
                 ont_dtype_name(views[0].dtype), c->table->size, all, ont_dtype_name(views[1].dtype));
    return -1;
}

PyObject *ont_mpi_open(PyObject *module, PyObject *unused)
{
    (void)unused;
    ont_dist_call c;
    if (begin(&c, module) < 0) return NULL;
    return Py_BuildValue("{ss si si si si}", "about", c.table->about, "rank", c.table->rank, "size", c.table->size,
                         "local_rank", c.table->local_rank, "local_size", c.table->local_size);
}

PyObject *ont_mpi_all_reduce(PyObject *module, PyObject *tensor)
{
    ont_dist_call c;
    ont_tensor_view view;
    size_t n;
    if (begin(&c, module) < 0) return NULL;
    ont_status status = ONT_EINVAL;
    if (take(&c, tensor, 0, &view, &n) < 0) return end(&c, status);
    Py_BEGIN_ALLOW_THREADS
    status = c.table->all_reduce(view.data, n, view.dtype, &c.wait);
    Py_END_ALLOW_THREADS
    return end(&c, status);
}

PyObject *ont_mpi_reduce_scatter(PyObject *module, PyObject *args)
{
    ont_dist_call c;
    PyObject *own, *whole;
    ont_tensor_view views[2];
    size_t n;
    if (!PyArg_ParseTuple(args, "OO:mpi_reduce_scatter", &own, &whole) || begin(&c, module) < 0) return NULL;
    ont_status status = ONT_EINVAL;
    if (take_pair(&c, own, whole, views, &n) < 0) return end(&c, status);
    Py_BEGIN_ALLOW_THREADS
    status = c.table->reduce_scatter(views[0].data, views[1].data, n, views[0].dtype, &c.wait);
    Py_END_ALLOW_THREADS
    return end(&c, status);
}

PyObject *ont_mpi_all_gather(PyObject *module, PyObject *args)
{
    ont_dist_call c;
    PyObject *own, *whole;
    ont_tensor_view views[2];
    size_t n;
    if (!PyArg_ParseTuple(args, "OO:mpi_all_gather", &whole, &own) || begin(&c, module) < 0) return NULL;
    ont_status status = ONT_EINVAL;
    if (take_pair(&c, own, whole, views, &n) < 0) return end(&c, status);
    Py_BEGIN_ALLOW_THREADS
    status = c.table->all_gather(views[1].data, views[0].data, n, views[0].dtype, &c.wait);
    Py_END_ALLOW_THREADS
    return end(&c, status);
}

PyObject *ont_mpi_broadcast(PyObject *module, PyObject *args)
{
    ont_dist_call c;
    PyObject *tensor;
    int root;
    ont_tensor_view view;
    size_t n;
    if (!PyArg_ParseTuple(args, "Oi:mpi_broadcast", &tensor, &root) || begin(&c, module) < 0) return NULL;
    ont_status status = ONT_EINVAL;
    if (take(&c, tensor, 0, &view, &n) < 0) return end(&c, status);
    Py_BEGIN_ALLOW_THREADS
    status = c.table->broadcast(view.data, n, view.dtype, root, &c.wait);
    Py_END_ALLOW_THREADS
    return end(&c, status);
}

static PyObject *wait_only(PyObject *module, bool leaving)
{
    ont_dist_call c;
    ont_status status;
    if (begin(&c, module) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = (leaving ? c.table->leave : c.table->barrier)(&c.wait);
    Py_END_ALLOW_THREADS
    return end(&c, status);
}

PyObject *ont_mpi_barrier(PyObject *module, PyObject *unused)
{
    (void)unused;
    return wait_only(module, false);
}

PyObject *ont_mpi_leave(PyObject *module, PyObject *unused)
{
    (void)unused;
    return wait_only(module, true);
}
