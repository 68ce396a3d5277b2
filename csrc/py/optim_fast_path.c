/*
 * The Updater's fast path: all parameters are plain tensors with their state where it was in the last step. It runs no
 * Python code and counts no references, but for gradients of one element, so the GIL is held during the whole step, on
 * all cores: for thousands of small tensors this traversal takes as long as their update. Everything is examined again,
 * as on the slow path (optim_slow_path.c), which takes over and reports errors if anything is unexpected. Called by
 * py/optim.c.
 */
#include "py/optim.h" /* Python.h before any system header */

#include <stdatomic.h>
#include <string.h>

#include "base/parallel.h"

enum {
    PREFETCH_PARAMS = 8,    /* prefetch distance in parameters */
    PARAMS_PER_SHARE = 128, /* parameters per unit of work of a thread */
    MAX_ELEMENTS = 1 << 24, /* some ten milliseconds, for which other Python threads can wait */
    RETRY_STEPS = 32,       /* steps on the slow path after a failed attempt */
};

typedef struct fast_path {
    ont_walk *w;
    ont_updater *self;
    PyObject *groups;
    size_t n;
    atomic_size_t ready; /* parameters whose objects have been found */
    atomic_size_t next;
    atomic_bool must_fall_back;
} fast_path;

/* ---- first: find the objects; on the thread that holds the GIL ---- */

static int parse_groups(ont_walk *w, PyObject *groups, PyObject *hyper)
{
    ont_updater *self = w->self;
    size_t n = (size_t)PyList_Size(groups);
    if (ont_optim_reserve(&self->fast_groups, &self->fast_groups_capacity, n, sizeof *self->fast_groups) != ONT_OK)
        return 0;
    for (w->group = 0; (size_t)w->group < n; w->group++) {
        if (ont_optim_parse_hyper(w, PyList_GetItem(hyper, w->group)) < 0) return -1;
        ont_fast_group *g = &self->fast_groups[w->group];
        *g = (ont_fast_group){.needs = w->needs, .flags = w->flags, .sign = w->sign};
        memcpy(g->hyper, w->hyper, sizeof g->hyper);
    }
    return PyList_Size(groups) == (Py_ssize_t)n && PyList_Size(hyper) == (Py_ssize_t)n;
}

/* Finds the objects of a parameter's state; a missing one matters only if there is a gradient. */
static void find_state(const ont_updater *self, PyObject *inner, uint32_t needs, ont_fast_param *q)
{
    q->complete = true;
    for (int i = 0; i < ONT_RULE_STATES; i++)
        if (needs >> i & 1) q->complete &= (q->state[i] = PyDict_GetItemWithError(inner, self->key_state[i])) != NULL;
    if (self->rule->has_step) q->complete &= (q->step = PyDict_GetItemWithError(inner, self->key_step)) != NULL;
    if (!q->complete) PyErr_Clear();
}

static bool find_group(fast_path *l, PyObject *group)
{
    ont_walk *w = l->w;
    ont_updater *self = w->self;
    ont_fast_group *g = &self->fast_groups[w->group];
    PyObject *params = PyDict_Check(group) ? PyDict_GetItemWithError(group, self->key_params) : NULL;
    if (!params || !PyList_Check(params) || g->flags) return false;
    Py_ssize_t n = PyList_Size(params);
    bool stateless = !g->needs && !self->rule->has_step;
    if (w->position + (size_t)n > l->n) return false;
    for (w->index = 0; w->index < n; w->index++, w->position++) {
        if (w->position % PARAMS_PER_SHARE == 0) atomic_store_explicit(&l->ready, w->position, memory_order_release);
        if (w->position + PREFETCH_PARAMS < self->n_slots)
            ont_prefetch_dict(&self->slots[w->position + PREFETCH_PARAMS]);
        ont_slot *s = &self->slots[w->position];
        ont_fast_param *q = &self->fast[w->position];
        *q = (ont_fast_param){.param = PyList_GetItem(params, w->index), .complete = stateless};
        if (!stateless && q->param == s->param && s->inner && s->generation == self->generation)
            find_state(self, s->inner, g->needs, q);
    }
    g->end = w->position;
    return true;
}

/* ---- second: read the tensors, on all threads ---- */

static bool read_operand(ont_updater *self, ont_slot *s, PyObject *object, void *handle, int k, ont_optim_tensor *t,
                         ont_tensor_view *view)
{
    if (!handle || !ont_torch_read_handle(handle, view) || !ont_tensor_view_is_contiguous(view) ||
        !ont_tensor_view_count(view))
        return false;
    if (ont_optim_storage(view->dtype) == ONT_STORAGE_COUNT) return false;
    if (object) ont_cache_tensor(self, s, k, object, view);
    t->data[k] = view->data;
    t->dtype[k] = (uint8_t)view->dtype;
    return true;
}

static bool read_step(ont_updater *self, ont_slot *s, PyObject *object, ont_optim_tensor *t)
{
    ont_tensor_view view;
    if (!object) return true;
    if (!ont_torch_read_tensor(self->state, object, &view) || view.rank != 0) return false;
    if (view.dtype != ONT_FLOAT32 && view.dtype != ONT_FLOAT64) return false;
    ont_cache_tensor(self, s, ONT_OPERAND_COUNT, object, &view);
    t->step = view.data;
    t->step_is_double = view.dtype == ONT_FLOAT64;
    return true;
}

/* Reads tensor `i`; its data stays NULL if there is no gradient. */
static bool read_param(ont_updater *self, size_t i)
{
    ont_slot *s = &self->slots[i];
    ont_fast_param *q = &self->fast[i];
    ont_optim_tensor *t = &self->work.tensors[i];
    ont_tensor_view view, other;
    memset(t, 0, sizeof *t);
    void *param = ont_torch_handle(self->state, q->param), *grad = param ? ont_torch_grad(param) : NULL;
    if (!grad) return param != NULL;
    if (!q->complete || !ont_torch_has_version(param, &q->version)) return false;
    memcpy(&q->impl, param, sizeof q->impl);
    if (!read_operand(self, s, q->param, param, ONT_OPERAND_PARAM, t, &view)) return false;
    if (!read_operand(self, s, NULL, grad, ONT_OPERAND_GRAD, t, &other) || !ont_same_dims(&view, &other)) return false;
    ont_cache_grad(s, grad, &other);
    for (int k = 0; k < ONT_RULE_STATES; k++) {
        if (!q->state[k]) continue;
        void *state = ont_torch_handle(self->state, q->state[k]);
        if (!read_operand(self, s, q->state[k], state, ONT_OPERAND_STATE + k, t, &other) ||
            !ont_same_dims(&view, &other))
            return false;
    }
    t->count = ont_tensor_view_count(&view);
    t->stream = (uint32_t)i;
    return read_step(self, s, q->step, t);
}

/* Reads units of parameters until none is left, each as soon as its objects are known. */
static void read_params(fast_path *l)
{
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&l->next, PARAMS_PER_SHARE, memory_order_relaxed);
        size_t end = i + PARAMS_PER_SHARE < l->n ? i + PARAMS_PER_SHARE : l->n;
        while (i < end && atomic_load_explicit(&l->ready, memory_order_acquire) < end)
            if (atomic_load_explicit(&l->must_fall_back, memory_order_relaxed)) return;
        if (i >= end || atomic_load_explicit(&l->must_fall_back, memory_order_relaxed)) return;
        for (size_t k = i; k < end && k < i + PREFETCH_PARAMS; k++) ont_prefetch_tensors(&l->self->slots[k]);
        for (; i < end; i++) {
            if (i + PREFETCH_PARAMS < l->n) ont_prefetch_tensors(&l->self->slots[i + PREFETCH_PARAMS]);
            if (read_param(l->self, i)) continue;
            atomic_store_explicit(&l->must_fall_back, true, memory_order_relaxed);
            return;
        }
    }
}

/* The thread that holds the GIL finds the objects first, while other threads read those found so far. */
static void find_and_read_params(void *context, int64_t first, int64_t last)
{
    fast_path *l = context;
    ont_walk *w = l->w;
    (void)last;
    if (first == 0) {
        bool is_plain = true;
        for (w->group = 0; is_plain && w->group < PyList_Size(l->groups); w->group++)
            is_plain = find_group(l, PyList_GetItem(l->groups, w->group));
        if (!is_plain || w->position != l->n) atomic_store_explicit(&l->must_fall_back, true, memory_order_relaxed);
        atomic_store_explicit(&l->ready, l->n, memory_order_release);
    }
    read_params(l);
}

/* ---- third: set coefficients, drop parameters without gradients ---- */

/* Whether the gradient of one element is, or may be, a negative view: see refuse_lazy() in py/dlpack.c. */
static bool is_negative_view(const ont_updater *self, PyObject *param)
{
    PyObject *grad = PyObject_GetAttr(param, self->key_grad);
    int negative = grad ? ont_call_predicate(grad, "is_neg") : -1;
    Py_XDECREF(grad);
    return negative != 0;
}

static bool finish(ont_walk *w)
{
    ont_updater *self = w->self;
    size_t kept = 0, i = 0, all = self->work.n_tensors;
    int64_t elements = 0;
    for (const ont_fast_group *g = self->fast_groups; i < all; g++) {
        memcpy(w->hyper, g->hyper, sizeof w->hyper);
        w->sign = g->sign;
        w->last_step = -1;
        for (; i < g->end; i++) {
            ont_optim_tensor *t = &self->work.tensors[i];
            if (!t->data[ONT_OPERAND_GRAD]) continue;
            if (t->count == 1 && is_negative_view(self, self->fast[i].param)) return false;
            double step = !t->step ? 0 : 1 + (t->step_is_double ? *(double *)t->step : (double)*(float *)t->step);
            if (ont_optim_take_update(w, t, step, false) < 0) return false;
            elements += t->count;
            if (kept != i) self->work.tensors[kept] = *t;
            kept++;
        }
    }
    self->work.n_tensors = kept;
    return elements <= MAX_ELEMENTS;
}

static bool needs_state(const ont_updater *self, size_t n_groups)
{
    bool needs = self->rule->has_step;
    for (size_t i = 0; i < n_groups; i++) needs |= self->fast_groups[i].needs != 0;
    return needs;
}

static bool find_all(ont_walk *w, PyObject *groups)
{
    ont_updater *self = w->self;
    fast_path l = {.w = w, .self = self, .groups = groups, .n = self->n_slots};
    if (ont_optim_reserve(&self->fast, &self->fast_capacity, l.n, sizeof *self->fast) != ONT_OK ||
        ont_optim_reserve(&self->work.tensors, &self->work.tensors_capacity, l.n, sizeof *self->work.tensors) != ONT_OK)
        return false;
    self->work.n_tensors = l.n;
    int64_t threads = ont_parallel_threads(), shares = (int64_t)(l.n / PARAMS_PER_SHARE) + 1;
    ont_parallel(shares < threads ? shares : threads, 1, find_and_read_params, &l);
    return !atomic_load(&l.must_fall_back) && finish(w);
}

int ont_optim_fast_path(ont_walk *w, PyObject *groups, PyObject *hyper)
{
    ont_updater *self = w->self;
    if (w->device || !ont_torch_has_autograd_abi() || !self->n_slots || self->steps < self->fast_retry_step) return 0;
    int parsed = parse_groups(w, groups, hyper);
    if (parsed <= 0) return parsed;
    if (needs_state(self, (size_t)PyList_Size(groups)) && !ont_optim_state_unchanged(self, w->states)) return 0;
    if (find_all(w, groups)) return 1;
    if (PyErr_Occurred()) return -1;
    self->fast_retry_step = self->steps + RETRY_STEPS;
    return 0;
}

/* Bumps the versions of all parameters while other threads begin the update. */
void ont_optim_fast_path_mark(void *context)
{
    ont_updater *self = context;
    const ont_optim *o = &self->work;
    for (size_t i = 0; i < o->n_tensors; i++) {
        if (i + PREFETCH_PARAMS < o->n_tensors) {
            const ont_fast_param *ahead = &self->fast[o->tensors[i + PREFETCH_PARAMS].stream];
            __builtin_prefetch(ahead->impl, 0, 2);
            __builtin_prefetch(ahead->version, 1, 2);
        }
        ont_torch_bump_version(&self->fast[o->tensors[i].stream].impl);
    }
}
