/*
 * Updater.backward(), an optimizer in backward: runs a Run's backward and updates each parameter as soon as its
 * gradient is final. Everything that can fail for a parameter (its state, shapes, shared memory) is checked before
 * backward begins. Called by onnxtrain/optim/_in_backward.py; independent of kernels.
 */
#include "py/optim.h" /* Python.h before any system header */

#include <string.h>

#include "base/alloc.h"
#include "py/call.h"

typedef struct target {
    uint32_t tensor;
    bool is_target; /* false: the gradient is discarded */
} target;

typedef struct backward_step {
    ont_updater *self;
    const ont_device *device; /* of the program; NULL: the CPU */
    ont_optim_request request;
    target *targets;     /* per input of the program */
    uint32_t n_inputs;
    uint32_t *target_index; /* per input: index among the targets */
    uint8_t *done;    /* per target, in the caller's order: it was updated */
} backward_step;

/* ---- while backward runs, without the GIL ---- */

static ont_status apply_gradient(void *context, uint32_t input, const void *gradient, void *stream)
{
    backward_step *a = context;
    const target *t = &a->targets[input];
    if (!t->is_target) return ONT_OK;
    if (a->device) ONT_TRY(ont_optim_device_apply(a->self, a->device, a->request.seed, t->tensor, gradient, stream));
    else ONT_TRY(ont_optim_apply(&a->self->work, &a->request, t->tensor, gradient));
    a->done[a->target_index[input]] = 1;
    return ONT_OK;
}

/* ---- before ---- */

static int refuse_shared(const backward_step *a, const ont_tensor_view *view, uint32_t own, const char *what,
                         Py_ssize_t index)
{
    ont_optim_overlap where;
    uintptr_t first, last;
    ont_memory_range(view, &first, &last);
    if (first == last || !ont_optim_is_written(&a->self->work, first, last, own, &where)) return 0;
    PyErr_Format(PyExc_ValueError,
                 "%U: %s %zd, which backward reads, shares memory with %s number %u, counted over all groups, which is "
                 "updated meanwhile: nothing has been updated",
                 a->self->name, what, index, ont_operand_text[where.other_operand],
                 a->self->work.tensors[where.other_tensor].stream);
    return -1;
}

/*
 * Tensors that backward reads must not be updated before; a program input may be the parameter itself, which the engine
 * orders correctly.
 */
static int check_no_overlap(void *context, const ont_borrowed *inputs, const ont_borrowed *grads)
{
    const backward_step *a = context;
    for (Py_ssize_t i = 0; i < inputs->n; i++) {
        uint32_t own = i < (Py_ssize_t)a->n_inputs && a->targets[i].is_target ? a->targets[i].tensor : UINT32_MAX;
        if (inputs->views[i].data && refuse_shared(a, &inputs->views[i], own, "input", i) < 0) return -1;
    }
    for (Py_ssize_t i = 0; i < grads->n; i++)
        if (grads->views[i].rank >= 0 && grads->views[i].data &&
            refuse_shared(a, &grads->views[i], UINT32_MAX, "the gradient of output", i) < 0)
            return -1;
    return 0;
}

/* Reads one (input, position, parameter) into a table by position, which grows. */
static int read_target(backward_step *a, const ont_program *p, PyObject *item, uint32_t target_index, ont_walk *w,
                       size_t *capacity)
{
    Py_ssize_t input, position;
    PyObject *param;
    if (!PyTuple_Check(item)) return PyErr_Format(PyExc_TypeError, "a target is not a tuple"), -1;
    if (!PyArg_ParseTuple(item, "nnO:target", &input, &position, &param)) return -1;
    bool fits = input >= 0 && input < (Py_ssize_t)a->n_inputs && position >= 0 && position < INT32_MAX;
    bool known = false;
    for (uint32_t i = 0; fits && i < p->n_deliveries; i++) known |= p->deliveries[i].input == (uint32_t)input;
    if (!known || a->targets[input].is_target)
        return PyErr_Format(PyExc_ValueError, "input %zd has no gradient that goes to the callback", input), -1;
    if ((size_t)position >= w->n_expected) {
        if (ont_optim_reserve(&w->expected, capacity, (size_t)position + 1, sizeof *w->expected) != ONT_OK)
            return PyErr_NoMemory(), -1;
        while (w->n_expected <= (size_t)position) w->expected[w->n_expected++] = (ont_expected){0};
    }
    ont_expected *e = &w->expected[position];
    if (e->param) return PyErr_Format(PyExc_ValueError, "position %zd is given twice", position), -1;
    *e = (ont_expected){.param = param, .input = p->graph->inputs[input], .target_index = target_index};
    a->targets[input].is_target = true;
    a->target_index[input] = target_index;
    return 0;
}

static int read_targets(backward_step *a, const ont_program *p, PyObject *targets, ont_walk *w)
{
    size_t capacity = 0;
    a->n_inputs = p->grads.n_forward_inputs;
    a->targets = ont_calloc(a->n_inputs + 1, sizeof *a->targets);
    a->target_index = ont_calloc(a->n_inputs + 1, sizeof *a->target_index);
    a->done = ont_calloc((size_t)PyTuple_Size(targets) + 1, 1);
    w->expected = ont_malloc(sizeof *w->expected);
    if (!a->targets || !a->target_index || !a->done || !w->expected) return PyErr_NoMemory(), -1;
    capacity = 1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(targets); i++)
        if (read_target(a, p, PyTuple_GetItem(targets, i), (uint32_t)i, w, &capacity) < 0) return -1;
    return 0;
}

/* Sets the index in work.tensors of each target. */
static int find_tensors(backward_step *a, const ont_walk *w, Py_ssize_t n)
{
    uint32_t *tensor = ont_calloc((size_t)n + 1, sizeof *tensor);
    bool all = true;
    if (!tensor) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < w->n_expected; i++) {
        const ont_expected *e = &w->expected[i];
        all &= !e->param || e->found;
        if (e->param) tensor[e->target_index] = e->tensor;
    }
    for (uint32_t i = 0; i < a->n_inputs; i++) a->targets[i].tensor = tensor[a->target_index[i]];
    ont_free(tensor);
    if (all) return 0;
    PyErr_Format(PyExc_RuntimeError, "%U: its groups have lost a parameter between forward and backward",
                 a->self->name);
    return -1;
}

/* ---- after ---- */

/*
 * Reports to the caller which parameters were updated and bumps their versions, also if backward failed. A pending
 * exception is kept.
 */
static int mark_done(ont_updater *self, PyObject *targets, const uint8_t *done, PyObject *done_out)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *updated = PyList_New(0), *result = NULL;
    bool good = updated != NULL;
    if (PyByteArray_Size(done_out) == PyTuple_Size(targets))
        memcpy(PyByteArray_AsString(done_out), done, (size_t)PyTuple_Size(targets));
    for (Py_ssize_t i = 0; good && i < PyTuple_Size(targets); i++)
        if (done[i]) good = PyList_Append(updated, PyTuple_GetItem(PyTuple_GetItem(targets, i), 2)) == 0;
    if (good) result = PyObject_CallFunctionObjArgs(self->increment_version, updated, NULL);
    Py_XDECREF(updated);
    Py_XDECREF(result);
    if (type) PyErr_Restore(type, value, trace);
    return result ? 0 : -1;
}

/* ---- the call ---- */

typedef struct arguments {
    PyObject *run, *saved, *grads, *groups, *hyper, *targets, *done;
} arguments;

static int prepare(backward_step *a, ont_walk *w, const arguments *in, const ont_program *p)
{
    ont_updater *self = a->self;
    if (read_targets(a, p, in->targets, w) < 0) return -1;
    if (!(w->updated = PyList_New(0)) || ont_optim_slow_path(w, in->groups, in->hyper) < 0) return -1;
    if (find_tensors(a, w, PyTuple_Size(in->targets)) < 0 || ont_optim_check_overlap(self) < 0) return -1;
    if (a->device) return ont_optim_device_prepare(w);
    if (ont_optim_prepare_apply(&self->work) == ONT_OK) return 0;
    PyErr_NoMemory();
    return -1;
}

static bool arguments_fit(const arguments *in, const ont_walk *w)
{
    return PyList_Check(in->groups) && PyList_Check(in->hyper) && PyList_Check(in->targets) &&
           PyByteArray_Check(in->done) && PyDict_Check(w->states) &&
           PyList_Size(in->groups) == PyList_Size(in->hyper) &&
           PyByteArray_Size(in->done) == PyList_Size(in->targets);
}

PyObject *ont_updater_backward(PyObject *object, PyObject *args)
{
    ont_updater *self = (ont_updater *)object;
    ont_walk w = {.self = self};
    backward_step a = {.self = self};
    arguments in;
    unsigned long long seed;
    if (ont_optim_check_ready(self) < 0) return NULL;
    if (!PyArg_ParseTuple(args, "OOOOOOOKOO:backward", &in.run, &in.saved, &in.grads, &in.groups, &in.hyper, &w.states,
                          &w.prepare, &seed, &in.targets, &in.done))
        return NULL;
    if (!arguments_fit(&in, &w))
        return PyErr_Format(PyExc_TypeError, "%U: backward() needs lists of groups, of their numbers and of targets, a "
                                             "dict of state, and a bytearray with a byte per target", self->name);
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "%U: an update is already running", self->name);
    ont_program *p = ont_run_object_program(self->state, in.run);
    if (!p || !(in.targets = PyList_AsTuple(in.targets))) return NULL;
    self->busy = true;
    w.device = a.device = p->device;
    ont_optim_clear(&self->work);
    self->tables.n_groups = 0;
    ont_program_ref(p); /* preparing state runs Python code, which may release the run */
    PyObject *result = NULL;
    if (prepare(&a, &w, &in, p) == 0) {
        ont_backward_hooks hooks = {.gradient = {apply_gradient, &a}, .check = check_no_overlap};
        a.request = (ont_optim_request){.rule = self->rule, .unscale = 1, .max_norm = -1, .seed = seed};
        result = ont_run_object_backward(in.run, in.saved, in.grads, &hooks);
        if (mark_done(self, in.targets, a.done, in.done) < 0) Py_CLEAR(result);
    }
    if (!result) self->n_order = 0;
    else self->steps++;
    ont_optim_release_held(self);
    ont_program_unref(p);
    Py_XDECREF(w.updated);
    ont_free(w.expected);
    ont_free(a.targets);
    ont_free(a.target_index);
    ont_free(a.done);
    Py_DECREF(in.targets);
    self->busy = false;
    return result;
}
