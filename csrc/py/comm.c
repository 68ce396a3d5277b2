/*
 * Collectives over memory of a device as functions of the module: on torch's current stream, and nothing waits for
 * them. The processes have met before, and tell each other the id (onnxtrain/training/_collectives.py).
 */
#include "py/comm.h" /* Python.h before any system header */

#include <string.h>

#include "base/alloc.h"
#include "device/comm.h"
#include "device/device.h"
#include "py/device.h"
#include "py/optim.h"
#include "run/run.h"

#define CAPSULE "onnxtrain.comm"

typedef struct ont_comm {
    const ont_device *device;
    const ont_comm_ops *ops;
    void *comm; /* NULL: closed */
    int size;
} ont_comm;

/* -1 with UnsupportedError where the device has no collectives. */
static int find_ops(const ont_state *state, const char *name, const ont_device **device, const ont_comm_ops **ops)
{
    if (ont_device_by_name(state, name, device) < 0) return -1;
    *ops = *device && (*device)->ops->comm ? (*device)->ops->comm() : NULL;
    if (*ops) return 0;
    ont_raise(state, ont_fail(ONT_EUNSUPPORTED,
                              "device '%s' has no NCCL (libnccl.so.2: a CUDA build of torch brings it)", name));
    return -1;
}

PyObject *ont_comm_about(PyObject *module, PyObject *args)
{
    const char *name;
    const ont_device *device;
    const ont_comm_ops *ops;
    if (!PyArg_ParseTuple(args, "s:comm_about", &name)) return NULL;
    if (find_ops(ont_get_state(module), name, &device, &ops) < 0) return NULL;
    return PyUnicode_FromString(ops->about());
}

PyObject *ont_comm_make_id(PyObject *module, PyObject *args)
{
    char id[ONT_COMM_ID];
    const char *name;
    const ont_device *device;
    const ont_comm_ops *ops;
    if (!PyArg_ParseTuple(args, "s:comm_id", &name)) return NULL;
    if (find_ops(ont_get_state(module), name, &device, &ops) < 0) return NULL;
    ont_status status = ops->id(id);
    return status == ONT_OK ? PyBytes_FromStringAndSize(id, sizeof id) : ont_raise(ont_get_state(module), status);
}

/* With the device current; the caller has no GIL. */
static ont_status open_on(ont_comm *c, const char *id, int rank)
{
    ont_scope scope;
    ONT_TRY(c->device->ops->enter(c->device, &scope));
    ont_status status = c->ops->open(id, rank, c->size, &c->comm);
    c->device->ops->leave(c->device, &scope);
    return status;
}

static void close_on(ont_comm *c, bool failed)
{
    ont_scope scope;
    if (!c->comm || c->device->ops->enter(c->device, &scope) != ONT_OK) return;
    c->ops->close(c->comm, failed);
    c->comm = NULL;
    c->device->ops->leave(c->device, &scope);
}

/* A communicator that is not closed: the other processes may be gone, so that nothing is waited for. */
static void forget(PyObject *capsule)
{
    ont_comm *c = PyCapsule_GetPointer(capsule, CAPSULE);
    if (c) close_on(c, true);
    ont_free(c);
}

PyObject *ont_comm_open(PyObject *module, PyObject *args)
{
    const char *name, *id;
    Py_ssize_t n;
    int rank, size;
    if (!PyArg_ParseTuple(args, "sy#ii:comm_open", &name, &id, &n, &rank, &size)) return NULL;
    if (n != ONT_COMM_ID) return PyErr_Format(PyExc_ValueError, "an id has %d bytes, not %zd", ONT_COMM_ID, n);
    ont_comm *c = ont_calloc(1, sizeof *c);
    if (!c) return PyErr_NoMemory();
    c->size = size;
    if (find_ops(ont_get_state(module), name, &c->device, &c->ops) < 0) {
        ont_free(c);
        return NULL;
    }
    ont_status status;
    Py_BEGIN_ALLOW_THREADS
    status = open_on(c, id, rank);
    Py_END_ALLOW_THREADS
    PyObject *capsule = status == ONT_OK ? PyCapsule_New(c, CAPSULE, forget) : ont_raise(ont_get_state(module), status);
    if (!capsule) {
        close_on(c, true);
        ont_free(c);
    }
    return capsule;
}

static ont_comm *comm_of(PyObject *capsule)
{
    ont_comm *c = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!c || c->comm) return c;
    PyErr_SetString(PyExc_RuntimeError, "the communicator is closed");
    return NULL;
}

static int read_kind(const char *name, ont_comm_kind *kind)
{
    static const char *const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast"};
    for (int i = 0; i < 4; i++) {
        *kind = (ont_comm_kind)i;
        if (!strcmp(name, names[i])) return 0;
    }
    PyErr_Format(PyExc_ValueError, "there is no collective '%s'", name);
    return -1;
}

/* Elements of a contiguous tensor on the device; -1 with an exception. */
static int64_t take(const ont_state *state, const ont_comm *c, PyObject *tensor, int index, ont_tensor_view *view,
                    PyObject **keep)
{
    if (ont_dlpack_borrow_on(state, c->device, tensor, "tensor", index, view, keep) < 0) return -1;
    if (!ont_tensor_view_is_contiguous(view)) {
        PyErr_Format(PyExc_ValueError, "tensor %d is not contiguous", index);
        return -1;
    }
    return ont_tensor_view_count(view);
}

/* Fills the call; -1 with an exception where the tensors do not fit each other. */
static int read_call(const ont_comm *c, const ont_tensor_view views[2], const int64_t counts[2], ont_comm_call *call)
{
    bool scatters = call->kind == ONT_COMM_REDUCE_SCATTER, gathers = call->kind == ONT_COMM_ALL_GATHER;
    int64_t from = scatters ? counts[1] * c->size : counts[0], to = gathers ? counts[0] * c->size : counts[1];
    if (from != counts[0] || to != counts[1] || views[0].dtype != views[1].dtype) {
        PyErr_Format(PyExc_ValueError, "%lld elements of %s do not make %lld of %s in %d processes",
                     (long long)counts[0], ont_dtype_name(views[0].dtype), (long long)counts[1],
                     ont_dtype_name(views[1].dtype), c->size);
        return -1;
    }
    call->from = views[0].data;
    call->to = views[1].data;
    call->n = (size_t)(scatters ? counts[1] : counts[0]);
    call->dtype = views[0].dtype;
    return 0;
}

static ont_status enqueue_on(const ont_comm *c, const ont_comm_call *call)
{
    const ont_device_ops *ops = c->device->ops;
    ont_scope scope;
    ONT_TRY(ops->enter(c->device, &scope));
    ont_status status = ops->capturing && ops->capturing(c->device, scope.stream)
                            ? ont_fail(ONT_EUNSUPPORTED, "the caller captures this stream, and the other processes are "
                                                         "met at each collective, which a graph would not repeat")
                            : c->ops->enqueue(c->comm, call, scope.stream);
    ops->leave(c->device, &scope);
    return status;
}

PyObject *ont_comm_enqueue(PyObject *module, PyObject *args)
{
    const ont_state *state = ont_get_state(module);
    PyObject *capsule, *tensors[2], *keep[2] = {NULL};
    const char *kind;
    ont_comm_call call = {.root = 0};
    ont_tensor_view views[2];
    int64_t counts[2];
    if (!PyArg_ParseTuple(args, "OsOO|i:comm_enqueue", &capsule, &kind, &tensors[0], &tensors[1], &call.root))
        return NULL;
    const ont_comm *c = comm_of(capsule);
    if (!c || read_kind(kind, &call.kind) < 0) return NULL;
    PyObject *result = NULL;
    bool fine = true;
    for (int i = 0; i < 2 && fine; i++) fine = (counts[i] = take(state, c, tensors[i], i, &views[i], &keep[i])) >= 0;
    if (fine && read_call(c, views, counts, &call) == 0) {
        ont_status status;
        Py_BEGIN_ALLOW_THREADS
        status = enqueue_on(c, &call);
        Py_END_ALLOW_THREADS
        result = status == ONT_OK ? Py_NewRef(Py_None) : ont_raise(state, status);
    }
    for (int i = 0; i < 2; i++) Py_XDECREF(keep[i]);
    return result;
}

PyObject *ont_comm_check(PyObject *module, PyObject *capsule)
{
    const ont_comm *c = comm_of(capsule);
    if (!c) return NULL;
    ont_status status = c->ops->check(c->comm);
    return status == ONT_OK ? Py_NewRef(Py_None) : ont_raise(ont_get_state(module), status);
}

PyObject *ont_comm_close(PyObject *module, PyObject *args)
{
    PyObject *capsule;
    int failed;
    (void)module;
    if (!PyArg_ParseTuple(args, "Op:comm_close", &capsule, &failed)) return NULL;
    ont_comm *c = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!c) return NULL;
    Py_BEGIN_ALLOW_THREADS /* it may wait for the others */
    close_on(c, failed);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
