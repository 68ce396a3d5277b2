/*
 * Run.deliver(), gradients in memory of the caller's: runs a Run's backward, writes each gradient of some inputs to a
 * tensor as soon as it is final, and tells a Python function. Called by onnxtrain/training/_reducer.py; independent of
 * kernels.
 */
#include "py/optim.h" /* Python.h before any system header */

#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "base/parallel.h"
#include "py/call.h"
#include "simd/simd.h"

enum { GRAIN = 65536 }; /* elements */

typedef struct receiver {
    char *to; /* NULL: the gradient is discarded */
    int64_t n;
    ont_dtype dtype;
    bool add;
} receiver;

typedef struct delivery {
    receiver *receivers; /* per input of the program */
    PyObject **keep;     /* per input: holds the tensor's memory, or NULL */
    uint32_t n_inputs;
    PyObject *ready;                /* Py_None: no function */
    PyObject *type, *value, *trace; /* what it has raised */
} delivery;

typedef struct move {
    const receiver *r;
    const char *gradient;
} move;

/* ---- while backward runs, without the GIL ---- */

static void move_range(void *context, int64_t first, int64_t last)
{
    const move *m = context;
    int64_t n = last - first, size = (int64_t)ont_dtype_size(m->r->dtype);
    char *to = m->r->to + first * size;
    const char *from = m->gradient + first * size;
    if (!m->r->add) {
        memcpy(to, from, (size_t)(n * size));
    } else if (m->r->dtype == ONT_FLOAT32) {
        ont_simd()->add_to((float *)to, (const float *)from, n);
    } else {
        for (int64_t i = 0; i < n; i++) ((double *)to)[i] += ((const double *)from)[i];
    }
}

static ont_status tell(delivery *d, uint32_t input)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(d->ready, "I", (unsigned)input);
    if (!result) PyErr_Fetch(&d->type, &d->value, &d->trace);
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return result ? ONT_OK : ont_fail(ONT_ESTATE, "the function that is called for each gradient has failed");
}

static ont_status receive(void *context, uint32_t input, const void *gradient, void *stream)
{
    (void)stream; /* of a device, which read_receivers() refuses */
    delivery *d = context;
    const receiver *r = &d->receivers[input];
    if (!r->to) return ONT_OK;
    move m = {r, gradient};
    ont_parallel(r->n, GRAIN, move_range, &m);
    return d->ready == Py_None ? ONT_OK : tell(d, input);
}

/* ---- before ---- */

static int refuse_shared(const delivery *d, const ont_tensor_view *view, const char *what, Py_ssize_t index)
{
    uintptr_t first, last;
    ont_memory_range(view, &first, &last);
    for (uint32_t i = 0; i < d->n_inputs; i++) {
        const receiver *r = &d->receivers[i];
        uintptr_t begin = (uintptr_t)r->to, end = begin + (size_t)r->n * ont_dtype_size(r->dtype);
        if (!r->to || begin == end || first == last || end <= first || last <= begin) continue;
        PyErr_Format(PyExc_ValueError, "%s %zd, which backward reads, shares memory with the gradient of input %u",
                     what, index, (unsigned)i);
        return -1;
    }
    return 0;
}

static int check_no_overlap(void *context, const ont_borrowed *inputs, const ont_borrowed *grads)
{
    const delivery *d = context;
    for (Py_ssize_t i = 0; i < inputs->n; i++)
        if (inputs->views[i].data && refuse_shared(d, &inputs->views[i], "input", i) < 0) return -1;
    for (Py_ssize_t i = 0; i < grads->n; i++)
        if (grads->views[i].rank >= 0 && grads->views[i].data &&
            refuse_shared(d, &grads->views[i], "the gradient of output", i) < 0)
            return -1;
    return 0;
}

/* Reads one (input, tensor, add); -1 with an exception. */
static int read_receiver(delivery *d, const ont_state *state, const ont_program *p, PyObject *item)
{
    Py_ssize_t input;
    PyObject *tensor;
    int add;
    if (!PyTuple_Check(item)) return PyErr_Format(PyExc_TypeError, "a receiver is not a tuple"), -1;
    if (!PyArg_ParseTuple(item, "nOp:receiver", &input, &tensor, &add)) return -1;
    if (input < 0 || input >= (Py_ssize_t)d->n_inputs || d->receivers[input].to)
        return PyErr_Format(PyExc_ValueError, "there is no input %zd, or it is given twice", input), -1;
    ont_tensor_view view;
    if (ont_dlpack_borrow(state, tensor, "receiver", input, &view, &d->keep[input]) < 0) return -1;
    const ont_value *own = p->graph->inputs[input];
    bool fits = view.dtype == own->dtype && view.rank == own->shape.rank && ont_tensor_view_is_contiguous(&view);
    for (int i = 0; fits && i < view.rank; i++) fits = view.dims[i] == own->shape.dims[i];
    if (!fits || (add && view.dtype != ONT_FLOAT32 && view.dtype != ONT_FLOAT64))
        return PyErr_Format(PyExc_ValueError, "receiver %zd is not contiguous, or has another dtype or shape than the "
                                              "input; only float and double are added", input), -1;
    d->receivers[input] = (receiver){view.data, ont_tensor_view_count(&view), view.dtype, add != 0};
    return 0;
}

static int read_receivers(delivery *d, const ont_state *state, const ont_program *p, PyObject *receivers)
{
    if (p->device)
        return PyErr_Format(PyExc_TypeError, "gradients are delivered to memory of the CPU, and this program runs on "
                                             "device %s", p->device->ops->name), -1;
    d->n_inputs = p->grads.n_forward_inputs;
    d->receivers = ont_calloc(d->n_inputs + 1, sizeof *d->receivers);
    d->keep = ont_calloc(d->n_inputs + 1, sizeof(PyObject *));
    if (!d->receivers || !d->keep) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(receivers); i++)
        if (read_receiver(d, state, p, PyTuple_GetItem(receivers, i)) < 0) return -1;
    return 0;
}

/* ---- after ---- */

/* A gradient that is an input of backward's own nodes is returned; it reaches its receiver here. */
static int deliver_returned(delivery *d, const ont_state *state, PyObject *result)
{
    for (uint32_t i = 0; i < d->n_inputs; i++) {
        PyObject *gradient = PyTuple_GetItem(result, i), *keep = NULL;
        ont_tensor_view view;
        if (!d->receivers[i].to || gradient == Py_None) continue;
        if (ont_dlpack_borrow(state, gradient, "gradient", i, &view, &keep) < 0) return -1;
        ONT_ASSERT(ont_tensor_view_is_contiguous(&view) && ont_tensor_view_count(&view) == d->receivers[i].n);
        ont_status status = receive(d, i, view.data, NULL);
        Py_XDECREF(keep);
        if (status != ONT_OK || PyTuple_SetItem(result, i, Py_NewRef(Py_None)) < 0) return -1;
    }
    return 0;
}

PyObject *ont_run_object_deliver(const ont_state *state, PyObject *run, PyObject *args)
{
    PyObject *saved, *grads, *receivers, *result = NULL;
    delivery d = {.ready = Py_None};
    if (!PyArg_ParseTuple(args, "OOO|O:deliver", &saved, &grads, &receivers, &d.ready)) return NULL;
    ont_program *p = ont_run_object_program(state, run);
    if (!p || !(receivers = PySequence_Tuple(receivers))) return NULL;
    ont_program_ref(p); /* Python code that reads a tensor may release the run */
    if (read_receivers(&d, state, p, receivers) == 0) {
        ont_backward_hooks hooks = {.gradient = {receive, &d}, .check = check_no_overlap};
        result = ont_run_object_backward(run, saved, grads, &hooks);
        if (result && deliver_returned(&d, state, result) < 0) Py_CLEAR(result);
        if (d.type) PyErr_Restore(d.type, d.value, d.trace); /* in place of the engine's */
    }
    for (uint32_t i = 0; d.keep && i < d.n_inputs; i++) Py_XDECREF(d.keep[i]);
    ont_free(d.receivers);
    ont_free(d.keep);
    ont_program_unref(p);
    Py_DECREF(receivers);
    return result;
}
