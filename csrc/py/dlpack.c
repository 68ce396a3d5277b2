/*
 * DLPack in both directions. See dlpack.h. A deleter may run on any thread, without the GIL, at interpreter exit: it
 * only uses the pool.
 */
#include "py/dlpack.h" /* Python.h before any system header */

#include <stdio.h>

#include "base/alloc.h"
#include "py/torch_abi.h"

int ont_dlpack_init(ont_state *state)
{
    PyObject *torch = PyImport_ImportModule("torch");
    if (!torch) return -1;
    state->tensor_type = PyObject_GetAttrString(torch, "Tensor");
    PyObject *nn = PyObject_GetAttrString(torch, "nn");
    state->parameter_type = nn ? PyObject_GetAttrString(nn, "Parameter") : NULL;
    Py_XDECREF(nn);
    Py_DECREF(torch);
    if (!state->tensor_type || !state->parameter_type) return -1;
    PyObject *capsule = PyObject_GetAttrString(state->tensor_type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear(); /* an older torch: use the Python protocol */
        return 0;
    }
    const dlpack_exchange_api *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (!api) return -1;
    while (api && api->version.major != 1) api = api->previous;
    if (api && api->tensor_from_object && api->managed_to_object) state->dlpack = api;
    return 0;
}

static int refuse(const char *what, Py_ssize_t index, const char *reason)
{
    PyErr_Format(PyExc_TypeError, "%s %zd: %s", what, index, reason);
    return -1;
}

static int refuse_device(const char *what, Py_ssize_t index, dlpack_device given, const ont_device *expected)
{
    char place[32] = "the CPU";
    if (given.type != DLPACK_CPU)
        snprintf(place, sizeof place, "%s %d", given.type == DLPACK_CUDA ? "CUDA device" : "another kind of device",
                 (int)given.id);
    PyErr_Format(PyExc_TypeError, "%s %zd: the tensor is on %s, expected %s:%d", what, index, place,
                 expected->ops->name, (int)expected->id);
    return -1;
}

/*
 * torch's own exception (for a sparse, meta or vmapped tensor) does not name the tensor: it becomes the cause of one
 * that does.
 */
static int refused_by_torch(const char *what, Py_ssize_t index)
{
    PyObject *type, *cause, *error, *trace;
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) return -1;
    PyErr_Fetch(&type, &cause, &trace);
    PyErr_NormalizeException(&type, &cause, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    refuse(what, index, "a dense tensor with memory of its own is expected");
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error && cause)
        PyException_SetCause(error, cause); /* steals it */
    else
        Py_XDECREF(cause);
    PyErr_Restore(type, error, trace);
    return -1;
}

static int view_of(const ont_device *device, const dlpack_tensor *t, const char *what, Py_ssize_t index,
                   ont_tensor_view *view)
{
    if (!device && t->device.type != DLPACK_CPU && t->device.type != DLPACK_CUDA_HOST)
        return refuse(what, index, "the tensor is not on the CPU");
    if (device &&
        (t->device.type != device->ops->dlpack || (t->device.type != DLPACK_CPU && t->device.id != device->id)))
        return refuse_device(what, index, t->device, device);
    if (t->dtype.lanes != 1 || !ont_dtype_from_dlpack(t->dtype.code, t->dtype.bits, &view->dtype))
        return refuse(what, index, "the tensor's dtype is not supported");
    view->rank = t->ndim;
    view->dims = t->shape;
    view->strides = t->strides;
    view->data = t->data ? (char *)t->data + t->byte_offset : NULL;
    if (view->data) return 0;
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return 0;
    return refuse(what, index, "the tensor has no memory of its own (a DTensor or FakeTensor?)");
}

/* Through tensor.detach().__dlpack__(): the capsule is held while the view is used. */
static int borrow_by_protocol(const ont_device *device, PyObject *tensor, const char *what, Py_ssize_t index,
                              ont_tensor_view *view, PyObject **keep)
{
    PyObject *detached = PyObject_CallMethod(tensor, "detach", NULL);
    PyObject *capsule = detached ? PyObject_CallMethod(detached, "__dlpack__", NULL) : NULL;
    Py_XDECREF(detached);
    if (!capsule) return refused_by_torch(what, index);
    const dlpack_managed_legacy *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (!managed || view_of(device, &managed->tensor, what, index, view) < 0) {
        Py_DECREF(capsule);
        return -1;
    }
    *keep = capsule;
    return 0;
}

int ont_call_predicate(PyObject *tensor, const char *method)
{
    PyObject *answer = PyObject_CallMethod(tensor, method, NULL);
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return yes;
}

/*
 * DLPack exports a conjugate or negative view without that flag, so such tensors are refused. Negative views are
 * imaginary parts of conjugate ones: strided, or a single element. Other tensors skip the calls.
 */
static int refuse_lazy(PyObject *tensor, const ont_tensor_view *view, const char *what, Py_ssize_t index)
{
    bool complex = view->dtype == ONT_COMPLEX64 || view->dtype == ONT_COMPLEX128;
    ont_shape shape = ont_shape_of(view->rank <= ONT_MAX_RANK ? view->rank : 0, view->dims);
    int conjugate = complex ? ont_call_predicate(tensor, "is_conj") : 0;
    bool may_be = complex || (ont_dtype_is_float(view->dtype) &&
                              (!ont_tensor_view_is_contiguous(view) || ont_shape_count(&shape) == 1));
    int negative = may_be && conjugate >= 0 ? ont_call_predicate(tensor, "is_neg") : 0;
    if (conjugate < 0 || negative < 0) return -1;
    if (conjugate) return refuse(what, index, "a conjugate view: call resolve_conj() first");
    return negative ? refuse(what, index, "a negative view: call resolve_neg() first") : 0;
}

int ont_dlpack_borrow(const ont_state *state, PyObject *tensor, const char *what, Py_ssize_t index,
                      ont_tensor_view *view,
                      PyObject **keep)
{
    return ont_dlpack_borrow_on(state, NULL, tensor, what, index, view, keep);
}

int ont_dlpack_borrow_on(const ont_state *state, const ont_device *device, PyObject *tensor, const char *what,
                         Py_ssize_t index, ont_tensor_view *view, PyObject **keep)
{
    /* By type, not by isinstance(), which runs Parameter's metaclass in Python for every parameter of every step. */
    if (!PyType_IsSubtype(Py_TYPE(tensor), (PyTypeObject *)state->tensor_type))
        return refuse(what, index, "a torch.Tensor is expected");
    *keep = NULL;
    if (!state->dlpack) return borrow_by_protocol(device, tensor, what, index, view, keep);
    dlpack_tensor borrowed;
    if (state->dlpack->tensor_from_object(tensor, &borrowed) < 0) return refused_by_torch(what, index);
    if (view_of(device, &borrowed, what, index, view) < 0) return -1;
    return refuse_lazy(tensor, view, what, index);
}

typedef struct wrapped {
    dlpack_managed managed;
    int64_t strides[ONT_MAX_RANK];
} wrapped;

static void wrapped_delete(dlpack_managed *self)
{
    ont_block_unref(self->manager);
    ont_free(self);
}

/* The legacy capsule, for a torch without the exchange table. */
typedef struct wrapped_legacy {
    dlpack_managed_legacy managed;
    int64_t strides[ONT_MAX_RANK];
} wrapped_legacy;

static void wrapped_legacy_delete(dlpack_managed_legacy *self)
{
    ont_block_unref(self->manager);
    ont_free(self);
}

static void fill(dlpack_tensor *t, ont_block *block, int64_t *strides)
{
    ont_shape_strides(&block->shape, strides);
    *t = (dlpack_tensor){.data = block->bytes ? block->data : NULL, .device = {DLPACK_CPU, 0},
                         .ndim = block->shape.rank};
    if (block->device) t->device = (dlpack_device){block->device->ops->dlpack, block->device->id};
    ont_dtype_to_dlpack(block->dtype, &t->dtype.code, &t->dtype.bits);
    t->dtype.lanes = 1;
    t->shape = block->shape.dims;
    t->strides = strides;
}

static PyObject *wrap_by_protocol(ont_block *block)
{
    wrapped_legacy *w = ont_malloc(sizeof *w);
    if (!w) {
        ont_block_unref(block);
        return PyErr_NoMemory();
    }
    w->managed.manager = block;
    w->managed.deleter = wrapped_legacy_delete;
    fill(&w->managed.tensor, block, w->strides);
    PyObject *capsule = PyCapsule_New(&w->managed, "dltensor", NULL);
    PyObject *module = capsule ? PyImport_ImportModule("torch.utils.dlpack") : NULL;
    PyObject *tensor = module ? PyObject_CallMethod(module, "from_dlpack", "O", capsule) : NULL;
    /* the consumer renames the capsule and then owns its tensor */
    bool taken = capsule && !PyCapsule_IsValid(capsule, "dltensor");
    if (!tensor && !taken) wrapped_legacy_delete(&w->managed);
    Py_XDECREF(module);
    Py_XDECREF(capsule);
    return tensor;
}

PyObject *ont_dlpack_wrap(const ont_state *state, ont_block *block)
{
    if (block->memory.tensor) {
        PyObject *own = ont_torch_wrap(block->memory.tensor, &block->shape);
        ont_block_unref(block);
        return own;
    }
    if (!state->dlpack) return wrap_by_protocol(block);
    wrapped *w = ont_malloc(sizeof *w);
    if (!w) {
        ont_block_unref(block);
        return PyErr_NoMemory();
    }
    w->managed.version = (dlpack_version){1, 0};
    w->managed.manager = block;
    w->managed.deleter = wrapped_delete;
    w->managed.flags = 0;
    fill(&w->managed.tensor, block, w->strides);
    void *tensor = NULL;
    /* it takes the tensor also on failure */
    if (state->dlpack->managed_to_object(&w->managed, &tensor) < 0) return NULL;
    return tensor;
}
