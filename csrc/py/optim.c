/*
 * The Python type Updater: describes the tensors of all parameter groups to optim/optim.h (optim_fast_path.c, else
 * optim_slow_path.c, whose update runs without the GIL) and runs one step. Called by onnxtrain/optim/_base.py.
 */
#include "py/optim.h" /* Python.h before any system header */

#include "base/alloc.h"
#include "py/device.h"

enum {
    PREFETCH_HELD = 24,   /* prefetch distance for releasing references */
    PARAMS_PER_MARK = 64, /* parameters per call of increment_version() */
};

int ont_optim_check_ready(const ont_updater *self)
{
    if (self->rule) return 0;
    PyErr_SetString(PyExc_RuntimeError, "this Updater was never initialised");
    return -1;
}

/* ---- the step ---- */

static int check_arguments(const ont_walk *w, PyObject *groups, PyObject *hyper)
{
    Py_ssize_t n = PyList_Check(groups) && PyList_Check(hyper) ? PyList_Size(groups) : -1;
    if (n < 0 || PyList_Size(hyper) != n || !PyDict_Check(w->states)) {
        PyErr_Format(PyExc_TypeError, "%U: step() needs lists of groups and of their numbers, and a dict of state",
                     w->self->name);
        return -1;
    }
    return 0;
}

int ont_optim_check_overlap(ont_updater *self)
{
    bool overlaps = false;
    ont_optim_overlap where;
    ont_status status = ont_optim_check(&self->work, &overlaps, &where);
    if (status != ONT_OK) {
        ont_raise(self->state, status);
        return -1;
    }
    if (!overlaps) return 0;
    const ont_optim_tensor *tensors = self->work.tensors;
    PyErr_Format(PyExc_ValueError, "%U: %s number %u, counted over all groups, shares memory with %s number %u",
                 self->name, ont_operand_text[where.operand], tensors[where.tensor].stream,
                 ont_operand_text[where.other_operand], tensors[where.other_tensor].stream);
    return -1;
}

/* updated: list of the parameters of work.tensors. In slices, so that the next slice can be prefetched. */
static int mark_updated(ont_updater *self, PyObject *updated)
{
    Py_ssize_t n = PyList_Size(updated);
    for (Py_ssize_t first = 0; first < n; first += PARAMS_PER_MARK) {
        Py_ssize_t end = first + 2 * PARAMS_PER_MARK < n ? first + 2 * PARAMS_PER_MARK : n;
        for (Py_ssize_t i = first ? first + PARAMS_PER_MARK : 0; i < end; i++)
            ont_prefetch_param(&self->slots[self->work.tensors[i].stream]);
        PyObject *slice = PyList_GetSlice(updated, first, first + PARAMS_PER_MARK);
        PyObject *result = slice ? PyObject_CallFunctionObjArgs(self->increment_version, slice, NULL) : NULL;
        Py_XDECREF(slice);
        Py_XDECREF(result);
        if (!result) return -1;
    }
    return 0;
}

/*
 * Bumping versions takes a large part of a small tensor's update, so this thread does it while other threads begin the
 * update.
 */
typedef struct version_marking {
    ont_updater *self;
    PyObject *updated;
    PyThreadState *thread;
    int result;
} version_marking;

static void mark_concurrently(void *context)
{
    version_marking *m = context;
    PyEval_RestoreThread(m->thread);
    m->result = mark_updated(m->self, m->updated);
    m->thread = PyEval_SaveThread();
}

/* updated: as in mark_updated(); NULL after the fast path, during which no other code may run. */
static PyObject *run_step(ont_updater *self, PyObject *updated, ont_optim_request *request)
{
    version_marking mark = {.self = self, .updated = updated};
    request->concurrent_callback = updated ? mark_concurrently : ont_optim_fast_path_mark;
    request->context = updated ? (void *)&mark : self;
    double norm = 0;
    if (updated) mark.thread = PyEval_SaveThread();
    ont_status status = ont_optim_run(&self->work, request, &norm);
    if (updated) PyEval_RestoreThread(mark.thread);
    if (status != ONT_OK) return ont_raise(self->state, status);
    if (mark.result < 0) return NULL;
    return request->max_norm >= 0 ? PyFloat_FromDouble(norm) : Py_NewRef(Py_None);
}

void ont_optim_release_held(ont_updater *self)
{
    for (size_t i = 0; i < self->n_held; i++) {
        if (i + PREFETCH_HELD < self->n_held) __builtin_prefetch(self->held[i + PREFETCH_HELD], 1);
        Py_DECREF(self->held[i]);
    }
    self->n_held = 0;
}

static PyObject *slow_path_step(ont_walk *w, PyObject *groups, PyObject *hyper, PyObject *scalars,
                                ont_optim_request *request)
{
    ont_updater *self = w->self;
    PyObject *result = NULL;
    self->work.n_tensors = self->work.n_updates = 0; /* left over from the fast path */
    w->updated = PyList_New(0);
    if (w->updated && ont_optim_slow_path(w, groups, hyper) == 0 && ont_optim_check_overlap(self) == 0) {
        if (!w->device) result = run_step(self, w->updated, request);
        else if (mark_updated(self, w->updated) == 0) result = ont_optim_device_step(w, scalars, request);
    }
    Py_XDECREF(w->updated);
    return result;
}

static PyObject *updater_step(PyObject *object, PyObject *args)
{
    ont_updater *self = (ont_updater *)object;
    PyObject *groups, *hyper, *states, *prepare, *scalars = NULL;
    ont_optim_request request = {.rule = self->rule};
    unsigned long long seed;
    int only_finite;
    const char *device_name = "";
    const ont_device *device;
    if (ont_optim_check_ready(self) < 0) return NULL;
    if (!PyArg_ParseTuple(args, "OOOO(ddp)dK|sO:step", &groups, &hyper, &states, &prepare, &request.max_norm,
                          &request.norm_epsilon, &only_finite, &request.unscale, &seed, &device_name, &scalars))
        return NULL;
    request.seed = seed;
    request.only_finite = only_finite;
    if (ont_device_by_name(self->state, device_name, &device) < 0) return NULL;
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "%U: step() is already running", self->name);
    ont_walk w = {.self = self, .states = states, .prepare = prepare, .device = device};
    if (check_arguments(&w, groups, hyper) < 0) return NULL;
    self->busy = true;
    ont_optim_clear(&self->work);
    self->tables.n_groups = 0;
    PyObject *result = NULL;
    int fast = ont_optim_fast_path(&w, groups, hyper);
    self->fast_steps += fast > 0;
    if (fast > 0 && ont_optim_check_overlap(self) == 0)
        result = run_step(self, NULL, &request);
    else if (fast == 0)
        result = slow_path_step(&w, groups, hyper, scalars, &request);
    if (!result) self->n_order = 0;
    else self->steps++;
    ont_optim_release_held(self);
    self->busy = false;
    return result;
}

static PyObject *updater_walks(PyObject *object, PyObject *unused)
{
    const ont_updater *self = (ont_updater *)object;
    (void)unused;
    return Py_BuildValue("KK", (unsigned long long)self->steps, (unsigned long long)self->fast_steps);
}

/* ---- type ---- */

static int make_keys(ont_updater *self, const ont_optim_rule *rule)
{
    self->key_params = PyUnicode_InternFromString("params");
    self->key_grad = PyUnicode_InternFromString("grad");
    self->key_step = PyUnicode_InternFromString("step");
    self->key_master = PyUnicode_InternFromString("master_param");
    bool good = self->key_params && self->key_grad && self->key_step && self->key_master;
    for (int i = 0; i < ONT_RULE_STATES; i++) {
        const char *key = rule->states[i];
        if (!key) continue;
        good = good && (self->key_state[i] = PyUnicode_InternFromString(key));
        if (i < 2) good = good && (self->key_scale[i] = PyUnicode_FromFormat("%s_scale", key));
    }
    return good ? 0 : -1;
}

static int updater_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    ont_updater *self = (ont_updater *)object;
    char *names[] = {"rule", "name", NULL};
    const char *rule_name;
    PyObject *name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sU:Updater", names, &rule_name, &name)) return -1;
    if (self->module) {
        PyErr_SetString(PyExc_RuntimeError, "Updater.__init__ was already called");
        return -1;
    }
    self->module = PyType_GetModule(Py_TYPE(object));
    if (!self->module) return -1;
    Py_INCREF(self->module);
    self->state = ont_get_state(self->module);
    const ont_optim_rule *rule = ont_optim_find_rule(rule_name);
    if (!rule) {
        PyErr_Format(PyExc_ValueError, "there is no update rule '%s'", rule_name);
        return -1;
    }
    self->name = Py_NewRef(name);
    PyObject *graph = PyImport_ImportModule("torch.autograd.graph");
    self->increment_version = graph ? PyObject_GetAttrString(graph, "increment_version") : NULL;
    Py_XDECREF(graph);
    if (!self->increment_version || make_keys(self, rule) < 0) return -1;
    self->rule = rule; /* last: with a rule, the other fields are set */
    return 0;
}

static void updater_dealloc(PyObject *object)
{
    ont_updater *self = (ont_updater *)object;
    PyTypeObject *type = Py_TYPE(object);
    ont_optim_deinit(&self->work);
    ont_optim_device_free(&self->tables);
    ont_free(self->slots);
    ont_free(self->order);
    ont_free(self->held);
    ont_free(self->fast);
    ont_free(self->fast_groups);
    Py_XDECREF(self->name);
    Py_XDECREF(self->key_params);
    Py_XDECREF(self->key_grad);
    Py_XDECREF(self->key_step);
    Py_XDECREF(self->key_master);
    for (int i = 0; i < ONT_RULE_STATES; i++) Py_XDECREF(self->key_state[i]);
    for (int i = 0; i < 2; i++) Py_XDECREF(self->key_scale[i]);
    Py_XDECREF(self->increment_version);
    Py_XDECREF(self->module);
    freefunc free_object = PyType_GetSlot(type, Py_tp_free);
    free_object(object);
    Py_DECREF(type);
}

static PyMethodDef updater_methods[] = {
    {"step", updater_step, METH_VARARGS,
     "step(groups, hyper, state, prepare, (max_norm, epsilon, only_finite), unscale, seed, device=\"\", scalars=None) "
     "-> norm of all gradients, or None"},
    {"backward", ont_updater_backward, METH_VARARGS,
     "backward(run, saved, grads, groups, hyper, state, prepare, seed, targets, done) -> gradients of the other "
     "inputs"},
    {"walks", updater_walks, METH_NOARGS, "walks() -> steps so far, and how many of them took the fast path"},
    {NULL, NULL, 0, NULL},
};

PyType_Spec ont_updater_spec = {
    .name = "onnxtrain._C.Updater",
    .basicsize = sizeof(ont_updater),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_init, updater_init},
                             {Py_tp_dealloc, updater_dealloc},
                             {Py_tp_methods, updater_methods},
                             {Py_tp_doc, "One optimizer's update of all its parameters in one call."},
                             {0, NULL}},
};
