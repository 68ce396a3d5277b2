/*
 * The Python type Run: a forward that awaits its backward, created by Session.forward(). Releases the GIL around
 * kernels. It can hold the arguments of forward, so that forward can be repeated after backward (retain_graph).
 */
#include "py/call.h" /* Python.h before any system header */

#include "base/alloc.h"
#include "py/torch_abi.h"

typedef struct held_input {
    int64_t version;     /* of its version counter */
    const void *storage; /* torch's object of its memory; NULL: not known */
} held_input;

typedef struct run_object {
    PyObject_HEAD
    ont_run *run; /* NULL: backward has run, or the run was released */
    ont_session_object *session;
    PyObject *saved_inputs, *saved_outputs, *differentiable, *applied;
    ont_program *program; /* used by again() */
    ont_random random;
    PyObject *inputs, *call; /* held by saved(): a tuple of all graph inputs, and an object of the caller; or NULL */
    held_input *held;        /* state of the inputs when they were held */
} run_object;

/* A tuple of the indices i with flags[i] set. */
static PyObject *flagged_indices(const uint8_t *flags, uint32_t n)
{
    Py_ssize_t count = 0;
    for (uint32_t i = 0; i < n; i++) count += flags[i] != 0;
    PyObject *tuple = PyTuple_New(count);
    Py_ssize_t at = 0;
    for (uint32_t i = 0; tuple && i < n; i++) {
        if (!flags[i]) continue;
        PyObject *item = PyLong_FromUnsignedLong(i);
        if (!item || PyTuple_SetItem(tuple, at++, item) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

/* A tuple of the inputs whose gradients go to the callback, in that order. */
static PyObject *applied_inputs(const ont_program *p)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)p->n_deliveries);
    for (uint32_t i = 0; tuple && i < p->n_deliveries; i++) {
        PyObject *item = PyLong_FromUnsignedLong(p->deliveries[i].input);
        if (!item || PyTuple_SetItem(tuple, (Py_ssize_t)i, item) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *ont_run_object_new(ont_session_object *session, ont_run *run, const ont_random *random)
{
    PyTypeObject *type = session->state->run_type;
    run_object *self = (run_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) {
        ont_run_release(run);
        return NULL;
    }
    const ont_program *p = ont_run_program(run);
    self->run = run;
    self->program = ont_program_ref((ont_program *)p);
    self->random = *random;
    self->session = (ont_session_object *)Py_NewRef((PyObject *)session);
    self->saved_inputs = flagged_indices(p->saved_inputs, p->grads.n_forward_inputs);
    self->saved_outputs = flagged_indices(p->saved_outputs, p->grads.n_forward_outputs);
    self->differentiable = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)p->grads.n_forward_outputs);
    if (!self->saved_inputs || !self->saved_outputs || !self->differentiable) {
        Py_DECREF(self);
        return NULL;
    }
    if (p->n_deliveries && !(self->applied = applied_inputs(p))) {
        Py_DECREF(self);
        return NULL;
    }
    char *flags = PyBytes_AsString(self->differentiable);
    for (uint32_t i = 0; i < p->grads.n_forward_outputs; i++) flags[i] = p->grads.grad_input[i] >= 0;
    return (PyObject *)self;
}

static void release_inputs(run_object *self)
{
    Py_CLEAR(self->inputs);
    Py_CLEAR(self->call);
    ont_free(self->held);
    self->held = NULL;
}

/* What it holds may reach it again: an output's node does, and the caller's object may hold an output. */
static int run_traverse(PyObject *object, visitproc visit, void *arg)
{
    run_object *self = (run_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->inputs);
    Py_VISIT(self->call);
    return 0;
}

static int run_clear(PyObject *object)
{
    release_inputs((run_object *)object);
    return 0;
}

static void run_dealloc(PyObject *object)
{
    run_object *self = (run_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    release_inputs(self);
    ont_run_release(self->run);
    ont_program_unref(self->program);
    Py_XDECREF(self->saved_inputs);
    Py_XDECREF(self->saved_outputs);
    Py_XDECREF(self->differentiable);
    Py_XDECREF(self->applied);
    Py_XDECREF((PyObject *)self->session);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *run_saved_inputs(PyObject *object, void *closure)
{
    (void)closure;
    return Py_NewRef(((run_object *)object)->saved_inputs);
}

static PyObject *run_saved_outputs(PyObject *object, void *closure)
{
    (void)closure;
    return Py_NewRef(((run_object *)object)->saved_outputs);
}

static PyObject *run_differentiable(PyObject *object, void *closure)
{
    (void)closure;
    return Py_NewRef(((run_object *)object)->differentiable);
}

static PyObject *run_applied(PyObject *object, void *closure)
{
    (void)closure;
    PyObject *applied = ((run_object *)object)->applied;
    return applied ? Py_NewRef(applied) : PyTuple_New(0);
}

/* Copies the items of `from` at `indices` to `to` from index `at` on; returns the next index, or -1. */
static Py_ssize_t append_items(PyObject *to, Py_ssize_t at, PyObject *from, PyObject *indices)
{
    Py_ssize_t n = PyTuple_Size(indices);
    for (Py_ssize_t k = 0; k < n && at >= 0; k++) {
        PyObject *item = PySequence_GetItem(from, PyLong_AsSsize_t(PyTuple_GetItem(indices, k)));
        at = item && PyTuple_SetItem(to, at, item) == 0 ? at + 1 : -1;
    }
    return at;
}

static held_input state_of(const run_object *self, PyObject *tensor)
{
    const ont_state *state = self->session->state;
    return (held_input){ont_torch_version(state, tensor), ont_torch_storage(state, tensor)};
}

/* Holds the inputs with their current state, and the caller's object. */
static int hold(run_object *self, PyObject *inputs, PyObject *call)
{
    Py_ssize_t n = self->program->grads.n_forward_inputs;
    PyObject *tuple = ont_sequence(inputs, n, "inputs");
    if (!tuple) return -1;
    held_input *held = ont_calloc((size_t)n + 1, sizeof *held);
    if (!held) {
        Py_DECREF(tuple);
        return PyErr_NoMemory(), -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) held[i] = state_of(self, PyTuple_GetItem(tuple, i));
    release_inputs(self);
    self->inputs = tuple;
    self->call = Py_NewRef(call);
    self->held = held;
    return 0;
}

PyObject *ont_run_object_saved(PyObject *object, PyObject *inputs, PyObject *outputs)
{
    run_object *self = (run_object *)object;
    PyObject *saved = PyTuple_New(PyTuple_Size(self->saved_inputs) + PyTuple_Size(self->saved_outputs));
    Py_ssize_t at = saved ? append_items(saved, 0, inputs, self->saved_inputs) : -1;
    if (at >= 0) at = append_items(saved, at, outputs, self->saved_outputs);
    if (at < 0) Py_CLEAR(saved);
    return saved;
}

static PyObject *run_saved(PyObject *object, PyObject *args)
{
    PyObject *inputs, *outputs, *call = NULL;
    if (!PyArg_ParseTuple(args, "OO|O:saved", &inputs, &outputs, &call)) return NULL;
    if (call && hold((run_object *)object, inputs, call) < 0) return NULL;
    return ont_run_object_saved(object, inputs, outputs);
}

static PyObject *run_release(PyObject *object, PyObject *unused)
{
    (void)unused;
    run_object *self = (run_object *)object;
    ont_run *run = self->run;
    self->run = NULL;
    release_inputs(self);
    ont_run_release(run);
    Py_RETURN_NONE;
}

static PyObject *run_forget(PyObject *object, PyObject *unused)
{
    (void)unused;
    release_inputs((run_object *)object);
    Py_RETURN_NONE;
}

static PyObject *run_inputs(PyObject *object, void *closure)
{
    (void)closure;
    PyObject *inputs = ((run_object *)object)->inputs;
    return Py_NewRef(inputs ? inputs : Py_None);
}

static PyObject *run_call(PyObject *object, void *closure)
{
    (void)closure;
    PyObject *call = ((run_object *)object)->call;
    return Py_NewRef(call ? call : Py_None);
}

static PyObject *run_over(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(!((run_object *)object)->run);
}

/* NULL and RuntimeError if the inputs are not held. */
static PyObject *held_inputs(run_object *self)
{
    if (!self->inputs) PyErr_Format(PyExc_RuntimeError, "the inputs of this run are not held");
    return self->inputs;
}

static PyObject *run_changed(PyObject *object, PyObject *unused)
{
    (void)unused;
    run_object *self = (run_object *)object;
    PyObject *inputs = held_inputs(self), *list = inputs ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; list && i < PyTuple_Size(inputs); i++) {
        held_input now = state_of(self, PyTuple_GetItem(inputs, i));
        if (now.version == self->held[i].version && now.storage == self->held[i].storage) continue;
        PyObject *index = PyLong_FromSsize_t(i);
        if (!index || PyList_Append(list, index) < 0) Py_CLEAR(list);
        Py_XDECREF(index);
    }
    return list;
}

/*
 * Checks that a saved tensor still has the dtype and shape of the program's input: a hook may have replaced it, or
 * resize_() changed it.
 */
static int check_saved(const ont_tensor_view *view, const ont_value *input)
{
    ont_shape shape = ont_shape_of(view->rank <= ONT_MAX_RANK ? view->rank : 0, view->dims);
    if (view->dtype == ont_dtype_carrier(input->dtype) && view->rank <= ONT_MAX_RANK &&
        ont_shape_equal(&shape, &input->shape)) return 0;
    PyErr_Format(PyExc_ValueError, "saved input '%s' came back with another dtype or shape", input->name);
    return -1;
}

/*
 * Checks that input i still has the memory that forward read. Assigning `.data` replaces it, which no version counter
 * shows. Hooks of autograd may have saved another tensor than the input, which then does not matter.
 */
static int check_memory(const run_object *self, Py_ssize_t i, PyObject *saved)
{
    const ont_state *state = self->session->state;
    if (!self->inputs) return 0;
    const void *now = ont_torch_storage(state, PyTuple_GetItem(self->inputs, i));
    if (now == self->held[i].storage || now != ont_torch_storage(state, saved)) return 0;
    PyErr_Format(PyExc_RuntimeError,
                 "one of the variables needed for gradient computation has other memory than in forward: `.data` of "
                 "'%s' was assigned in between", self->program->graph->inputs[i]->name);
    return -1;
}

/* Repeats forward with the same random numbers; its outputs are dropped. NULL with an exception. */
static ont_run *run_once_more(run_object *self, const ont_borrowed *in)
{
    ont_program *program = self->program;
    uint32_t n = program->grads.n_forward_outputs;
    ont_block **outputs = ont_calloc(n + 1, sizeof *outputs);
    if (!outputs) return PyErr_NoMemory(), NULL;
    ont_run *run = NULL;
    ont_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ont_run_forward(program, ont_session_pool(self->session->session), in->views, &self->random, outputs,
                             &run);
    Py_END_ALLOW_THREADS
    for (uint32_t i = 0; status == ONT_OK && i < n; i++) ont_block_unref(outputs[i]);
    ont_free(outputs);
    if (status != ONT_OK) ont_raise(self->session->state, status);
    return run;
}

/* Makes `run` the open one; another thread, or code that this one called, may have opened one meanwhile. */
static void replace_run(run_object *self, ont_run *run)
{
    ont_run *before = self->run;
    self->run = run;
    ont_run_release(before);
}

static PyObject *run_again(PyObject *object, PyObject *unused)
{
    (void)unused;
    run_object *self = (run_object *)object;
    PyObject *inputs = Py_XNewRef(held_inputs(self));
    ont_borrowed in;
    if (!inputs || ont_borrowed_init(&in, PyTuple_Size(inputs)) < 0) {
        Py_XDECREF(inputs);
        return NULL;
    }
    ont_run *run = NULL;
    bool fits = ont_borrow_inputs(self->session->state, self->program->device, inputs, &in) == 0;
    for (Py_ssize_t i = 0; fits && i < in.n; i++)
        fits = check_saved(&in.views[i], self->program->graph->inputs[i]) == 0;
    if (fits) run = run_once_more(self, &in);
    ont_borrowed_deinit(&in);
    Py_DECREF(inputs);
    if (!run) return NULL;
    replace_run(self, run);
    Py_RETURN_NONE;
}

typedef struct backward_call {
    ont_borrowed inputs, grads;
    PyObject *saved, *grads_tuple; /* tuples */
} backward_call;

static int borrow_backward(run_object *self, const ont_program *p, backward_call *call)
{
    const ont_state *state = self->session->state;
    Py_ssize_t n_saved = PyTuple_Size(self->saved_inputs);
    for (Py_ssize_t k = 0; k < n_saved; k++) {
        Py_ssize_t i = PyLong_AsSsize_t(PyTuple_GetItem(self->saved_inputs, k));
        ont_tensor_view *view = &call->inputs.views[i];
        PyObject *saved = PyTuple_GetItem(call->saved, k);
        if (check_memory(self, i, saved) < 0) return -1;
        if (ont_dlpack_borrow_on(state, p->device, saved, "saved", k, view, &call->inputs.keep[i]) < 0) return -1;
        if (check_saved(view, p->graph->inputs[i]) < 0) return -1;
    }
    for (Py_ssize_t i = 0; i < call->grads.n; i++) {
        PyObject *grad = PyTuple_GetItem(call->grads_tuple, i);
        ont_tensor_view *view = &call->grads.views[i];
        if (grad == Py_None)
            view->rank = -1;
        else if (ont_dlpack_borrow_on(state, p->device, grad, "gradient of output", i, view, &call->grads.keep[i]) < 0)
            return -1;
    }
    return 0;
}

/* Takes the run, also on failure. */
static PyObject *backward_borrowed(run_object *self, ont_run *run, backward_call *call,
                                   const ont_grad_callback *callback)
{
    uint32_t n = ont_run_program(run)->grads.n_forward_inputs;
    ont_block **in_grads = ont_calloc(n + 1, sizeof *in_grads);
    if (!in_grads) {
        ont_run_release(run);
        return PyErr_NoMemory();
    }
    ont_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ont_run_backward(run, call->inputs.views, NULL, call->grads.views, callback, in_grads);
    Py_END_ALLOW_THREADS
    PyObject *result = status == ONT_OK ? ont_wrap_blocks(self->session->state, in_grads, n)
                                        : ont_raise(self->session->state, status);
    ont_free(in_grads);
    return result;
}

ont_program *ont_run_object_program(const ont_state *state, PyObject *object)
{
    if (!PyObject_TypeCheck(object, state->run_type)) {
        PyErr_Format(PyExc_TypeError, "a Run is expected");
        return NULL;
    }
    ont_run *run = ((run_object *)object)->run;
    if (!run)
        PyErr_Format(PyExc_RuntimeError, "backward of this run was already called, or the run was released: its "
                                         "activations are gone");
    return run ? ont_run_program(run) : NULL;
}

PyObject *ont_run_object_backward(PyObject *object, PyObject *saved, PyObject *grads,
                                  const ont_backward_hooks *hooks)
{
    run_object *self = (run_object *)object;
    if (!ont_run_object_program(self->session->state, object)) return NULL;
    ont_run *run = self->run;
    self->run = NULL; /* backward runs once, and the code below may run Python code that releases the run */
    const ont_program *p = ont_run_program(run);
    backward_call call = {0};
    PyObject *result = NULL;
    Py_ssize_t n_saved = PyTuple_Size(self->saved_inputs) + PyTuple_Size(self->saved_outputs);
    call.saved = ont_sequence(saved, n_saved, "saved tensors");
    call.grads_tuple = call.saved ? ont_sequence(grads, (Py_ssize_t)p->grads.n_forward_outputs, "gradients") : NULL;
    if (!call.grads_tuple) goto done;
    if (ont_borrowed_init(&call.inputs, (Py_ssize_t)p->grads.n_forward_inputs) < 0) goto done;
    if (ont_borrowed_init(&call.grads, (Py_ssize_t)p->grads.n_forward_outputs) < 0) goto done_inputs;
    if (borrow_backward(self, p, &call) == 0 &&
        (!hooks || hooks->check(hooks->gradient.context, &call.inputs, &call.grads) == 0)) {
        result = backward_borrowed(self, run, &call, hooks ? &hooks->gradient : NULL);
        run = NULL;
    }
    ont_borrowed_deinit(&call.grads);
done_inputs:
    ont_borrowed_deinit(&call.inputs);
done:
    if (run) replace_run(self, run); /* invalid arguments leave the run open */
    Py_XDECREF(call.saved);
    Py_XDECREF(call.grads_tuple);
    return result;
}

static PyObject *run_backward(PyObject *object, PyObject *args, PyObject *kwargs)
{
    char *names[] = {"saved", "grads", NULL};
    PyObject *saved, *grads;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:backward", names, &saved, &grads)) return NULL;
    return ont_run_object_backward(object, saved, grads, NULL);
}

static PyObject *run_deliver(PyObject *object, PyObject *args)
{
    return ont_run_object_deliver(((run_object *)object)->session->state, object, args);
}

static PyMethodDef run_methods[] = {
    {"backward", (PyCFunction)(void (*)(void))run_backward, METH_VARARGS | METH_KEYWORDS,
     "backward(saved, grads) -> one gradient or None per graph input"},
    {"deliver", run_deliver, METH_VARARGS,
     "deliver(saved, grads, receivers, ready=None) -> backward() that writes gradients to tensors on the way"},
    {"saved", run_saved, METH_VARARGS,
     "saved(inputs, outputs[, call]) -> those of both that backward reads; with a call, holds it and the inputs"},
    {"changed", run_changed, METH_NOARGS, "changed() -> indices of held inputs that were changed in place since"},
    {"again", run_again, METH_NOARGS, "again() runs forward once more on the held inputs, for a further backward()"},
    {"forget", run_forget, METH_NOARGS, "forget() lets go of what saved() holds"},
    {"release", run_release, METH_NOARGS, "release() gives the activations back"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef run_getset[] = {
    {"saved_inputs", run_saved_inputs, NULL, "indices of the graph inputs that backward reads", NULL},
    {"saved_outputs", run_saved_outputs, NULL, "indices of the graph outputs that backward reads", NULL},
    {"inputs", run_inputs, NULL, "the held inputs, or None", NULL},
    {"call", run_call, NULL, "what saved() was given as call, or None", NULL},
    {"over", run_over, NULL, "whether backward() has run, or release()", NULL},
    {"applied", run_applied, NULL, "indices of the graph inputs whose gradients are applied, in that order", NULL},
    {"differentiable", run_differentiable, NULL, "one byte per graph output", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyType_Spec ont_run_spec = {
    .name = "onnxtrain._C.Run",
    .basicsize = sizeof(run_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_GC,
    .slots = (PyType_Slot[]){{Py_tp_dealloc, run_dealloc},
                             {Py_tp_traverse, run_traverse},
                             {Py_tp_clear, run_clear},
                             {Py_tp_methods, run_methods},
                             {Py_tp_getset, run_getset},
                             {Py_tp_doc, "A forward that waits for its backward."},
                             {0, NULL}},
};
