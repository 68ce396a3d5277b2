/*
 * Norm, clipping, unscaling and sums of squares of lists of gradients on a device, outside of an optimizer step:
 * _C.grads_on(), in a few launches (device/multi.h). Nothing waits for the device; results are written to tensors
 * there. The capsule of _C.grad_tables() keeps the tables on the device, so that a call with the same tensors uploads
 * nothing and may be captured. Called by onnxtrain/optim/_clip.py.
 */
#include "py/grads.h" /* Python.h before any system header */

#include <string.h>

#include "base/alloc.h"
#include "py/device.h"
#include "py/tables.h"

#define CAPSULE "onnxtrain.grad_tables"

static void forget(PyObject *capsule)
{
    ont_device_tables *t = PyCapsule_GetPointer(capsule, CAPSULE);
    if (t) ont_tables_free(t);
    ont_free(t);
}

PyObject *ont_grad_tables(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    ont_device_tables *t = ont_calloc(1, sizeof *t);
    PyObject *capsule = t ? PyCapsule_New(t, CAPSULE, forget) : PyErr_NoMemory();
    if (!capsule) ont_free(t);
    return capsule;
}

typedef struct grads_call {
    ont_grad_list list;
    ont_device_tables *tables;
    ont_optim_work what;
    ont_cuda_optim job;
    float *found_inf;
} grads_call;

/* `count` numbers on the device; NULL for None. */
static int take_numbers(grads_call *c, PyObject *tensor, const char *what, ont_dtype dtype, int64_t count, void **data)
{
    PyObject *keep = NULL;
    ont_tensor_view view;
    int64_t n = 1;
    *data = NULL;
    if (tensor == Py_None) return 0;
    if (ont_dlpack_borrow_on(c->list.state, c->list.device, tensor, what, 0, &view, &keep) < 0) return -1;
    int held = keep ? PyList_Append(c->list.items, keep) : 0;
    Py_XDECREF(keep);
    if (held < 0) return -1;
    for (int i = 0; i < view.rank; i++) n *= view.dims[i];
    if (view.dtype != dtype || n != count || (n > 1 && (view.rank != 1 || (view.strides && view.strides[0] != 1)))) {
        PyErr_Format(PyExc_TypeError, "%s: expected %lld contiguous numbers of dtype %s", what, (long long)count,
                     ont_dtype_name(dtype));
        return -1;
    }
    *data = view.data;
    return 0;
}

static int64_t chunks_of(const ont_optim_tensor *t)
{
    return (t->count + ONT_OPTIM_CHUNK - 1) / ONT_OPTIM_CHUNK;
}

/* Whether the tensor has no gaps and all operands have the same order: one linear range, whatever the dims are. */
static bool is_dense(const ont_optim_tensor *t)
{
    const ont_optim_layout *l = t->layout;
    bool dense = !l || (l->rank <= 1 && (!l->rank || l->dims[0] == t->count));
    for (int i = 0; l && l->rank == 1 && i < ONT_OPERAND_COUNT; i++) dense &= !t->data[i] || l->strides[i][0] == 1;
    return dense;
}

/* Fills the tables; every tensor is iterated in the order of its memory, a source in that of its target. */
static ont_status fill(const grads_call *c, ont_cuda_tensor *to, int32_t *chunk_tensor)
{
    int64_t chunk = 0;
    for (size_t i = 0; i < c->list.work.n_tensors; i++) {
        const ont_optim_tensor *t = &c->list.work.tensors[i];
        if (!is_dense(t)) return ont_fail(ONT_ETYPE, "tensor %zu is strided, which a device does not take", i);
        to[i].grad = t->data[ONT_OPERAND_GRAD];
        to[i].grad_dtype = t->dtype[ONT_OPERAND_GRAD];
        to[i].param = t->data[ONT_OPERAND_PARAM];
        to[i].param_dtype = t->dtype[ONT_OPERAND_PARAM];
        to[i].count = t->count;
        to[i].first_chunk = chunk;
        for (int64_t k = 0; k < chunks_of(t); k++) chunk_tensor[chunk++] = (int32_t)i;
    }
    return ONT_OK;
}

static ont_status launch(grads_call *c)
{
    const ont_device *device = c->list.device;
    size_t n = c->list.work.n_tensors;
    ont_cuda_optim *job = &c->job;
    ont_table_sizes sizes = {.head = n * sizeof(ont_cuda_tensor)};
    ont_scope scope;
    job->n_tensors = (int64_t)n;
    for (size_t i = 0; i < n; i++) job->n_chunks += chunks_of(&c->list.work.tensors[i]);
    sizes.bytes = (sizes.head + (size_t)job->n_chunks * sizeof(int32_t) + 63) / 64 * 64;
    sizes.work = ((size_t)(2 * job->n_chunks) + n + 2) * sizeof(double);
    char *fresh = ont_calloc(sizes.bytes + 1, 1);
    if (!fresh) return ONT_ENOMEM;
    ont_status status = fill(c, (ont_cuda_tensor *)(void *)fresh, (int32_t *)(void *)(fresh + sizes.head));
    if (status == ONT_OK) status = device->ops->enter(device, &scope);
    if (status == ONT_OK) {
        status = ont_tables_put(c->tables, device, fresh, &sizes, scope.stream);
        char *table = c->tables->memory.data;
        job->tensors = (const ont_cuda_tensor *)(const void *)table;
        job->chunk_tensor = (const int32_t *)(const void *)(table + sizes.head);
        job->work = (double *)(void *)(table + sizes.bytes);
        if (status == ONT_OK) status = device->ops->optim(device, (int)c->what, job, c->found_inf, scope.stream);
        device->ops->leave(device, &scope);
    }
    ont_free(fresh);
    return status;
}

static int read_what(const char *name, ont_optim_work *what)
{
    static const struct {
        const char *name;
        ont_optim_work what;
    } names[] = {{"norm", ONT_OPTIM_NORM}, {"clip", ONT_OPTIM_CLIP}, {"unscale", ONT_OPTIM_UNSCALE},
                 {"sums", ONT_OPTIM_SUMS},
                 {"scale", ONT_OPTIM_SCALE}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        *what = names[i].what;
        if (!strcmp(name, names[i].name)) return 0;
    }
    PyErr_Format(PyExc_ValueError, "grads_on() knows no '%s'", name);
    return -1;
}

/* Adds the sources, and the targets if they are scaled into these. */
static int take_tensors(grads_call *c, PyObject *sources, PyObject *targets)
{
    PyObject *from = ont_grad_list_hold(&c->list, sources), *to = NULL;
    if (!from || (targets != Py_None && !(to = ont_grad_list_hold(&c->list, targets)))) return -1;
    if ((c->what == ONT_OPTIM_SCALE) != (to != NULL)) {
        PyErr_SetString(PyExc_ValueError, "targets are for scaling, and needed there");
        return -1;
    }
    if ((to ? ont_grad_list_pair(&c->list, from, to, 0) : ont_grad_list_take(&c->list, from)) < 0) return -1;
    return to ? ont_grad_list_check(&c->list) : 0;
}

PyObject *ont_grads_on(PyObject *module, PyObject *args)
{
    PyObject *capsule, *sources, *targets, *found_inf, *inv_scale, *out, *result = NULL;
    const char *device_name, *what;
    const ont_device *device;
    grads_call c = {.job = {.max_norm = -1}};
    void *found = NULL, *inverse = NULL, *numbers = NULL;
    if (!PyArg_ParseTuple(args, "OssOOOOOdd:grads_on", &capsule, &device_name, &what, &sources, &targets, &found_inf,
                          &inv_scale, &out, &c.job.max_norm, &c.job.hyper[0]))
        return NULL;
    if (!(c.tables = PyCapsule_GetPointer(capsule, CAPSULE)) || read_what(what, &c.what) < 0) return NULL;
    if (ont_device_by_name(ont_get_state(module), device_name, &device) < 0) return NULL;
    if (!device || !device->ops->optim)
        return PyErr_Format(PyExc_TypeError, "device '%s' cannot clip, scale or add gradients", device_name);
    if (ont_grad_list_init(&c.list, module, device) < 0) return NULL;
    if (take_tensors(&c, sources, targets) == 0) {
        bool sums = c.what == ONT_OPTIM_SUMS;
        int64_t n = sums ? (int64_t)c.list.work.n_tensors : 1;
        if (take_numbers(&c, found_inf, "found_inf", ONT_FLOAT32, 1, &found) == 0 &&
            take_numbers(&c, inv_scale, "inv_scale", ONT_FLOAT32, 1, &inverse) == 0 &&
            take_numbers(&c, out, "out", ONT_FLOAT64, n, &numbers) == 0) {
            c.found_inf = found;
            c.job.inv_scale = inverse;
            c.job.wide_out = numbers;
            ont_status status = c.list.work.n_tensors ? launch(&c) : ONT_OK;
            result = status == ONT_OK ? Py_NewRef(Py_None) : ont_raise(c.list.state, status);
        }
    }
    ont_grad_list_deinit(&c.list);
    return result;
}
