/*
 * How the Updater borrows tensors: without a Python call if the tensor is plain; prefetching; error messages for
 * tensors that cannot be borrowed. Called by py/optim_slow_path.c and optim_fast_path.c; independent of groups and
 * rules.
 */
#include "py/optim.h" /* Python.h before any system header */

#include <string.h>

const char *const ont_operand_text[ONT_OPERAND_COUNT] = {
    "the parameter", "the gradient", "the first state", "the second state", "the third state", "the master copy"};

/* Nearly all objects are of two types; the search through base classes is for the rest. */
bool ont_is_tensor(const ont_updater *self, PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object), *tensor_type = self->state->tensor_type;
    return type == tensor_type || type == self->state->parameter_type ||
           PyType_IsSubtype((PyTypeObject *)type, (PyTypeObject *)tensor_type);
}

/* ---- errors ---- */

int ont_param_error(const ont_walk *w, PyObject *type, const char *what, const char *problem)
{
    PyErr_Format(type, "%U: parameter %zd of group %zd: %s%s", w->self->name, w->index, w->group, what, problem);
    return -1;
}

static int is_true(PyObject *tensor, const char *attribute)
{
    PyObject *value = PyObject_GetAttrString(tensor, attribute);
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    if (truth < 0) PyErr_Clear();
    return truth > 0;
}

/* Raises an exception that names the parameter and the reason why DLPack refused the tensor. */
static int raise_borrow_error(const ont_walk *w, PyObject *tensor, int operand)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *layout = PyObject_GetAttrString(tensor, "layout"), *device = PyObject_GetAttrString(tensor, "device");
    PyErr_Clear();
    if (is_true(tensor, "is_sparse") || is_true(tensor, "is_sparse_csr"))
        PyErr_Format(PyExc_RuntimeError,
                     "%U does not support sparse gradients: %s %zd of group %zd is %S; use dense gradients "
                     "(sparse=False in nn.Embedding) or torch.optim.SparseAdam",
                     w->self->name, operand == ONT_OPERAND_GRAD ? "the gradient of parameter" : "parameter", w->index,
                     w->group, layout ? layout : Py_None);
    else if (device && w->device)
        PyErr_Format(PyExc_TypeError, "%U: parameter %zd of group %zd: %s is on %S; the others are on %s:%d",
                     w->self->name, w->index, w->group, ont_operand_text[operand], device, w->device->ops->name,
                     (int)w->device->id);
    else if (device && !is_true(tensor, "is_cpu"))
        PyErr_Format(PyExc_TypeError, "%U: parameter %zd of group %zd: %s is on %S; CPU tensors are supported",
                     w->self->name, w->index, w->group, ont_operand_text[operand], device);
    else
        PyErr_Format(type, "%U: parameter %zd of group %zd: %s: %S", w->self->name, w->index, w->group,
                     ont_operand_text[operand], value ? value : Py_None);
    Py_XDECREF(device);
    Py_XDECREF(layout);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
}

/* ---- prefetching ---- */

/*
 * Prefetches cache lines around an address that may be stale. An unmapped address costs a page-table walk each time,
 * hence the check for NULL.
 */
static void prefetch(const void *address, int before, int after)
{
    if (!address) return;
    uintptr_t at = (uintptr_t)address;
    for (int line = -before; line <= after; line++)
        __builtin_prefetch((const void *)(at + (uintptr_t)(intptr_t)line * 64), 0, 2);
}

void ont_prefetch_dict(const ont_slot *s)
{
    prefetch(s->param, 0, 0);
    prefetch(s->inner, 0, 0);
    prefetch(s->entries, 0, 2);
}

/* A TensorImpl has its sizes near the middle of some 200 bytes, all of which are read. */
void ont_prefetch_tensors(const ont_slot *s)
{
    for (int k = 0; k <= ONT_OPERAND_COUNT; k++) {
        prefetch(s->object[k], 0, 0);
        prefetch(s->sizes[k], 1, 2);
        prefetch(s->storage[k], 0, 1);
    }
    prefetch(s->hints_of_param[ONT_TORCH_HINT_AUTOGRAD], 0, 1);
    prefetch(s->step, 0, 0);
}

void ont_prefetch_slot(const ont_slot *s)
{
    ont_prefetch_dict(s);
    ont_prefetch_tensors(s);
}

/* Only the object and the version counter of the parameter. */
void ont_prefetch_param(const ont_slot *s)
{
    prefetch(s->object[ONT_OPERAND_PARAM], 0, 0);
    prefetch(s->sizes[ONT_OPERAND_PARAM], 1, 0);
    prefetch(s->hints_of_param[ONT_TORCH_HINT_AUTOGRAD], 0, 0);
    prefetch(s->hints_of_param[ONT_TORCH_HINT_VERSION], 0, 0);
}

/* Writes only changes, so that unchanged cache lines stay clean. */
static void store_if_changed(void *remembered, const void *seen, size_t bytes)
{
    if (memcmp(remembered, seen, bytes)) memcpy(remembered, seen, bytes);
}

static void cache_addresses(ont_slot *s, int operand, PyObject *object, const ont_tensor_view *view,
                            const void *storage)
{
    store_if_changed(&s->object[operand], &object, sizeof(PyObject *));
    store_if_changed(&s->sizes[operand], &view->dims, sizeof view->dims);
    store_if_changed(&s->storage[operand], &storage, sizeof storage);
}

void ont_cache_tensor(ont_updater *self, ont_slot *s, int operand, PyObject *object, const ont_tensor_view *view)
{
    const void *hints[ONT_TORCH_HINTS];
    void *handle = ont_torch_handle(self->state, object);
    if (!handle) return;
    ont_torch_hints(handle, hints);
    if (operand == ONT_OPERAND_PARAM) store_if_changed(s->hints_of_param, hints, sizeof hints);
    if (operand == ONT_OPERAND_COUNT) store_if_changed(&s->step, &view->data, sizeof s->step);
    cache_addresses(s, operand, object, view, hints[ONT_TORCH_HINT_STORAGE]);
}

/* The fast path does not read the gradient's Python object. */
void ont_cache_grad(ont_slot *s, const void *handle, const ont_tensor_view *view)
{
    const void *hints[ONT_TORCH_HINTS];
    ont_torch_hints(handle, hints);
    cache_addresses(s, ONT_OPERAND_GRAD, NULL, view, hints[ONT_TORCH_HINT_STORAGE]);
}

void ont_cache_state_dict(ont_slot *s, PyObject *inner)
{
    s->inner = inner;
    s->entries = NULL;
    /* behind reference count, type, size and a version tag; the word is only a prefetch hint */
    if (inner && PyDict_Check(inner)) memcpy(&s->entries, (const char *)inner + 4 * sizeof(void *), sizeof s->entries);
}

/* ---- tensors ---- */

/* Takes the reference, also on failure. */
int ont_hold(ont_updater *self, PyObject *object)
{
    if (self->n_held == self->held_capacity &&
        ont_optim_reserve(&self->held, &self->held_capacity, self->n_held + 1, sizeof *self->held) != ONT_OK) {
        Py_DECREF(object);
        PyErr_NoMemory();
        return -1;
    }
    self->held[self->n_held++] = object;
    return 0;
}

int64_t ont_tensor_view_count(const ont_tensor_view *view)
{
    int64_t count = 1;
    for (int i = 0; i < view->rank; i++) count *= view->dims[i];
    return count;
}

/*
 * A plain, row-major tensor of more than one element is read directly; others go through DLPack. strides are NULL if
 * row-major.
 */
int ont_borrow_operand(ont_walk *w, PyObject *tensor, int operand, ont_tensor_view *view)
{
    const ont_state *state = w->self->state;
    if (!w->device && ont_torch_read_tensor(state, tensor, view)) {
        ont_cache_tensor(w->self, &w->self->slots[w->position], operand, tensor, view);
        if (ont_tensor_view_is_contiguous(view) && ont_tensor_view_count(view) > 1) {
            view->strides = NULL;
            return 0;
        }
    }
    PyObject *keep = NULL;
    if (ont_dlpack_borrow_on(state, w->device, tensor, ont_operand_text[operand], w->index, view, &keep) < 0)
        return raise_borrow_error(w, tensor, operand);
    if (keep && ont_hold(w->self, keep) < 0) return -1;
    return 0;
}

bool ont_same_dims(const ont_tensor_view *a, const ont_tensor_view *b)
{
    return a->rank == b->rank && (a->rank == 0 || !memcmp(a->dims, b->dims, (size_t)a->rank * sizeof *a->dims));
}
