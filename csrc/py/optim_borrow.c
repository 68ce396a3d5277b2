/*
 * How the Updater takes hold of tensors: borrowing without a Python call where the tensor is plain, asking for memory
 * ahead of its use, and words for what cannot be taken. Called by py/optim_walk.c; knows nothing of groups and rules.
 */
#include "py/optim.h" /* Python.h before any system header */

#include <string.h>

const char *const ont_operand_text[ONT_OPERAND_COUNT] = {
    "the parameter", "the gradient", "the first state", "the second state", "the third state", "the master copy"};

/* Two types are nearly all there are; the walk through base classes is for the rest. */
bool ont_is_tensor(const ont_updater *self, PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object), *tensor_type = self->state->tensor_type;
    return type == tensor_type || type == self->state->parameter_type ||
           PyType_IsSubtype((PyTypeObject *)type, (PyTypeObject *)tensor_type);
}

/* ---- errors ---- */

int ont_blame(const ont_walk *w, PyObject *type, const char *what, const char *problem)
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

/* Why DLPack did not take the tensor, in the optimizer's words. */
static int blame_borrow(const ont_walk *w, PyObject *tensor, int operand)
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
        PyErr_Format(PyExc_TypeError, "%U: parameter %zd of group %zd: %s is on %S; the others are on device %s",
                     w->self->name, w->index, w->group, ont_operand_text[operand], device, w->device->ops->name);
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

/* ---- what comes next into the cache ---- */

/* Lines around an address that may be anything. What is not mapped costs a look at the page tables each time: not NULL.
 */
static void fetch(const void *address, int before, int after)
{
    if (!address) return;
    uintptr_t at = (uintptr_t)address;
    for (int line = -before; line <= after; line++)
        __builtin_prefetch((const void *)(at + (uintptr_t)(intptr_t)line * 64), 0, 2);
}

void ont_warm_up_dict(const ont_slot *s)
{
    fetch(s->param, 0, 0);
    fetch(s->inner, 0, 0);
    fetch(s->entries, 0, 2);
}

/* A tensor object keeps its sizes near the middle of some 200 bytes, all of which are read. */
void ont_warm_up_tensors(const ont_slot *s)
{
    for (int k = 0; k <= ONT_OPERAND_COUNT; k++) {
        fetch(s->object[k], 0, 0);
        fetch(s->inside[k], 1, 2);
        fetch(s->storage[k], 0, 1);
    }
    fetch(s->beside[ONT_PEEK_AUTOGRAD], 0, 1);
    fetch(s->step, 0, 0);
}

void ont_warm_up(const ont_slot *s)
{
    ont_warm_up_dict(s);
    ont_warm_up_tensors(s);
}

/* Object and version of the parameter alone. */
void ont_warm_up_param(const ont_slot *s)
{
    fetch(s->object[ONT_OPERAND_PARAM], 0, 0);
    fetch(s->inside[ONT_OPERAND_PARAM], 1, 0);
    fetch(s->beside[ONT_PEEK_AUTOGRAD], 0, 0);
    fetch(s->beside[ONT_PEEK_VERSION], 0, 0);
}

/* Writes only what is new: unchanged lines need not go back to memory. */
static void see(void *remembered, const void *seen, size_t bytes)
{
    if (memcmp(remembered, seen, bytes)) memcpy(remembered, seen, bytes);
}

static void saw_place(ont_slot *s, int operand, PyObject *object, const ont_tensor_view *view, const void *storage)
{
    see(&s->object[operand], &object, sizeof object);
    see(&s->inside[operand], &view->dims, sizeof view->dims);
    see(&s->storage[operand], &storage, sizeof storage);
}

void ont_saw(ont_updater *self, ont_slot *s, int operand, PyObject *object, const ont_tensor_view *view)
{
    const void *hints[ONT_PEEK_HINTS];
    void *handle = ont_peek_handle(self->state, object);
    if (!handle) return;
    ont_peek_hints(handle, hints);
    if (operand == ONT_OPERAND_PARAM) see(s->beside, hints, sizeof hints);
    if (operand == ONT_OPERAND_COUNT) see(&s->step, &view->data, sizeof s->step);
    saw_place(s, operand, object, view, hints[ONT_PEEK_STORAGE]);
}

/* The quick walk does not touch a gradient's object. */
void ont_saw_grad(ont_slot *s, const void *handle, const ont_tensor_view *view)
{
    const void *hints[ONT_PEEK_HINTS];
    ont_peek_hints(handle, hints);
    saw_place(s, ONT_OPERAND_GRAD, NULL, view, hints[ONT_PEEK_STORAGE]);
}

void ont_saw_inner(ont_slot *s, PyObject *inner)
{
    s->inner = inner;
    s->entries = NULL;
    /* behind reference count, type, size and a tag; every dict has as many words, and the address is only a hint */
    if (inner && PyDict_Check(inner)) memcpy(&s->entries, (const char *)inner + 4 * sizeof(void *), sizeof s->entries);
}

/* ---- tensors ---- */

/* Takes the reference over, also on failure. */
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
 * What is plain, row-major and larger than one element is taken at once; everything else goes the careful way. strides
 * are NULL where row-major.
 */
int ont_grasp(ont_walk *w, PyObject *tensor, int operand, ont_tensor_view *view)
{
    const ont_state *state = w->self->state;
    if (!w->device && ont_peek(state, tensor, view)) {
        ont_saw(w->self, &w->self->slots[w->position], operand, tensor, view);
        if (ont_tensor_view_is_contiguous(view) && ont_tensor_view_count(view) > 1) {
            view->strides = NULL;
            return 0;
        }
    }
    PyObject *keep = NULL;
    if (ont_dlpack_borrow_on(state, w->device, tensor, ont_operand_text[operand], w->index, view, &keep) < 0)
        return blame_borrow(w, tensor, operand);
    if (keep && ont_hold(w->self, keep) < 0) return -1;
    return 0;
}

bool ont_same_dims(const ont_tensor_view *a, const ont_tensor_view *b)
{
    return a->rank == b->rank && (a->rank == 0 || !memcmp(a->dims, b->dims, (size_t)a->rank * sizeof *a->dims));
}
