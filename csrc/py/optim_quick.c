/*
 * The walk where nothing is out of the ordinary: all parameters plain, with their state where it was in the last step.
 * It runs no Python code and counts no references, so the GIL is kept through the step, on all cores: for thousands of
 * small tensors the walk takes as long as their update. Everything is looked at anew, as in the careful walk of
 * optim.c, which takes over, and says what is wrong, where anything is not as expected. Called by py/optim.c.
 */
#include "py/optim.h" /* Python.h before any system header */

#include <stdatomic.h>
#include <string.h>

#include "base/parallel.h"

enum {
    AHEAD = 8,     /* parameters whose memory is asked for before they are looked at */
    SHARE = 128,   /* parameters that a thread takes at once */
    LONGEST = 1 << 24, /* elements: some ten milliseconds, for which other Python threads can wait */
    PAUSE = 32,    /* steps without a try after one that failed */
};

typedef struct look {
    ont_walk *w;
    ont_updater *self;
    PyObject *groups;
    size_t n;
    atomic_size_t ready; /* parameters whose objects are known */
    atomic_size_t next;
    atomic_bool odd;
} look;

/* ---- first: which objects there are; by the thread that has the GIL ---- */

static int parse_groups(ont_walk *w, PyObject *groups, PyObject *hyper)
{
    ont_updater *self = w->self;
    size_t n = (size_t)PyList_Size(groups);
    if (ont_optim_reserve(&self->quick_groups, &self->quick_groups_capacity, n, sizeof *self->quick_groups) != ONT_OK)
        return 0;
    for (w->group = 0; (size_t)w->group < n; w->group++) {
        if (ont_optim_parse_hyper(w, PyList_GetItem(hyper, w->group)) < 0) return -1;
        ont_quick_group *g = &self->quick_groups[w->group];
        *g = (ont_quick_group){.needs = w->needs, .flags = w->flags, .sign = w->sign};
        memcpy(g->hyper, w->hyper, sizeof g->hyper);
    }
    return PyList_Size(groups) == (Py_ssize_t)n && PyList_Size(hyper) == (Py_ssize_t)n;
}

/* The state's objects; none where something is missing, which matters only where there is a gradient. */
static void find_state(const ont_updater *self, PyObject *inner, uint32_t needs, ont_quick_param *q)
{
    q->complete = true;
    for (int i = 0; i < ONT_RULE_STATES; i++)
        if (needs >> i & 1) q->complete &= (q->state[i] = PyDict_GetItemWithError(inner, self->key_state[i])) != NULL;
    if (self->rule->has_step) q->complete &= (q->step = PyDict_GetItemWithError(inner, self->key_step)) != NULL;
    if (!q->complete) PyErr_Clear();
}

static bool find_group(look *l, PyObject *group)
{
    ont_walk *w = l->w;
    ont_updater *self = w->self;
    ont_quick_group *g = &self->quick_groups[w->group];
    PyObject *params = PyDict_Check(group) ? PyDict_GetItemWithError(group, self->key_params) : NULL;
    if (!params || !PyList_Check(params) || g->flags) return false;
    Py_ssize_t n = PyList_Size(params);
    bool stateless = !g->needs && !self->rule->has_step;
    if (w->position + (size_t)n > l->n) return false;
    for (w->index = 0; w->index < n; w->index++, w->position++) {
        if (w->position % SHARE == 0) atomic_store_explicit(&l->ready, w->position, memory_order_release);
        if (w->position + AHEAD < self->n_slots) ont_warm_up_dict(&self->slots[w->position + AHEAD]);
        ont_slot *s = &self->slots[w->position];
        ont_quick_param *q = &self->quick[w->position];
        *q = (ont_quick_param){.param = PyList_GetItem(params, w->index), .complete = stateless};
        if (!stateless && q->param == s->param && s->inner && s->generation == self->generation)
            find_state(self, s->inner, g->needs, q);
    }
    g->end = w->position;
    return true;
}

/* ---- second: what they are, by all threads ---- */

static bool look_at(ont_updater *self, ont_slot *s, PyObject *object, void *handle, int k, ont_optim_tensor *t,
                    ont_tensor_view *view)
{
    if (!handle || !ont_peek_at(handle, view) || !ont_tensor_view_is_contiguous(view) ||
        ont_tensor_view_count(view) < 2)
        return false;
    if (ont_optim_storage(view->dtype) == ONT_STORAGE_COUNT) return false;
    if (object) ont_saw(self, s, k, object, view);
    t->data[k] = view->data;
    t->dtype[k] = (uint8_t)view->dtype;
    return true;
}

static bool look_at_step(ont_updater *self, ont_slot *s, PyObject *object, ont_optim_tensor *t)
{
    ont_tensor_view view;
    if (!object) return true;
    if (!ont_peek(self->state, object, &view) || view.rank != 0) return false;
    if (view.dtype != ONT_FLOAT32 && view.dtype != ONT_FLOAT64) return false;
    ont_saw(self, s, ONT_OPERAND_COUNT, object, &view);
    t->step = view.data;
    t->step_is_double = view.dtype == ONT_FLOAT64;
    return true;
}

/* Tensor `i` of the walk; without data where there is no gradient. */
static bool look_at_param(ont_updater *self, size_t i)
{
    ont_slot *s = &self->slots[i];
    ont_quick_param *q = &self->quick[i];
    ont_optim_tensor *t = &self->work.tensors[i];
    ont_tensor_view view, other;
    memset(t, 0, sizeof *t);
    void *param = ont_peek_handle(self->state, q->param), *grad = param ? ont_peek_grad(param) : NULL;
    if (!grad) return param != NULL;
    if (!q->complete || !ont_peek_counts(param, &q->version)) return false;
    memcpy(&q->impl, param, sizeof q->impl);
    if (!look_at(self, s, q->param, param, ONT_OPERAND_PARAM, t, &view)) return false;
    if (!look_at(self, s, NULL, grad, ONT_OPERAND_GRAD, t, &other) || !ont_same_dims(&view, &other)) return false;
    ont_saw_grad(s, grad, &other);
    for (int k = 0; k < ONT_RULE_STATES; k++) {
        if (!q->state[k]) continue;
        void *state = ont_peek_handle(self->state, q->state[k]);
        if (!look_at(self, s, q->state[k], state, ONT_OPERAND_STATE + k, t, &other) || !ont_same_dims(&view, &other))
            return false;
    }
    t->count = ont_tensor_view_count(&view);
    t->stream = (uint32_t)i;
    return look_at_step(self, s, q->step, t);
}

/* Takes shares of the parameters until none is left, each as soon as its objects are known. */
static void look_at_all(look *l)
{
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&l->next, SHARE, memory_order_relaxed);
        size_t end = i + SHARE < l->n ? i + SHARE : l->n;
        while (i < end && atomic_load_explicit(&l->ready, memory_order_acquire) < end)
            if (atomic_load_explicit(&l->odd, memory_order_relaxed)) return;
        if (i >= end || atomic_load_explicit(&l->odd, memory_order_relaxed)) return;
        for (size_t k = i; k < end && k < i + AHEAD; k++) ont_warm_up_tensors(&l->self->slots[k]);
        for (; i < end; i++) {
            if (i + AHEAD < l->n) ont_warm_up_tensors(&l->self->slots[i + AHEAD]);
            if (look_at_param(l->self, i)) continue;
            atomic_store_explicit(&l->odd, true, memory_order_relaxed);
            return;
        }
    }
}

/* The thread that has the GIL finds the objects first, while others look at those that it has found already. */
static void find_and_look(void *context, int64_t first, int64_t last)
{
    look *l = context;
    ont_walk *w = l->w;
    (void)last;
    if (first == 0) {
        bool good = true;
        for (w->group = 0; good && w->group < PyList_Size(l->groups); w->group++)
            good = find_group(l, PyList_GetItem(l->groups, w->group));
        if (!good || w->position != l->n) atomic_store_explicit(&l->odd, true, memory_order_relaxed);
        atomic_store_explicit(&l->ready, l->n, memory_order_release);
    }
    look_at_all(l);
}

/* ---- third: their coefficients, and parameters without gradients left out ---- */

static bool finish(ont_walk *w)
{
    ont_updater *self = w->self;
    size_t kept = 0, i = 0, all = self->work.n_tensors;
    int64_t elements = 0;
    for (const ont_quick_group *g = self->quick_groups; i < all; g++) {
        memcpy(w->hyper, g->hyper, sizeof w->hyper);
        w->sign = g->sign;
        w->last_step = -1;
        for (; i < g->end; i++) {
            ont_optim_tensor *t = &self->work.tensors[i];
            if (!t->data[ONT_OPERAND_GRAD]) continue;
            double step = !t->step ? 0 : 1 + (t->step_is_double ? *(double *)t->step : (double)*(float *)t->step);
            if (ont_optim_take_update(w, t, step, false) < 0) return false;
            elements += t->count;
            if (kept != i) self->work.tensors[kept] = *t;
            kept++;
        }
    }
    self->work.n_tensors = kept;
    return elements <= LONGEST;
}

static bool needs_state(const ont_updater *self, size_t n_groups)
{
    bool needs = self->rule->has_step;
    for (size_t i = 0; i < n_groups; i++) needs |= self->quick_groups[i].needs != 0;
    return needs;
}

static bool find_all(ont_walk *w, PyObject *groups)
{
    ont_updater *self = w->self;
    look l = {.w = w, .self = self, .groups = groups, .n = self->n_slots};
    if (ont_optim_reserve(&self->quick, &self->quick_capacity, l.n, sizeof *self->quick) != ONT_OK ||
        ont_optim_reserve(&self->work.tensors, &self->work.tensors_capacity, l.n, sizeof *self->work.tensors) != ONT_OK)
        return false;
    self->work.n_tensors = l.n;
    int64_t threads = ont_parallel_threads(), shares = (int64_t)(l.n / SHARE) + 1;
    ont_parallel(shares < threads ? shares : threads, 1, find_and_look, &l);
    return !atomic_load(&l.odd) && finish(w);
}

int ont_optim_quick(ont_walk *w, PyObject *groups, PyObject *hyper)
{
    ont_updater *self = w->self;
    if (w->device || !ont_peek_plain() || !self->n_slots || self->steps < self->quick_after) return 0;
    int parsed = parse_groups(w, groups, hyper);
    if (parsed <= 0) return parsed;
    if (needs_state(self, (size_t)PyList_Size(groups)) && !ont_optim_state_unchanged(self, w->states)) return 0;
    if (find_all(w, groups)) return 1;
    if (PyErr_Occurred()) return -1;
    self->quick_after = self->steps + PAUSE;
    return 0;
}

/* Versions of all parameters; while others update already. */
void ont_optim_quick_mark(void *context)
{
    ont_updater *self = context;
    const ont_optim *o = &self->work;
    for (size_t i = 0; i < o->n_tensors; i++) {
        if (i + AHEAD < o->n_tensors) {
            const ont_quick_param *ahead = &self->quick[o->tensors[i + AHEAD].stream];
            __builtin_prefetch(ahead->impl, 0, 2);
            __builtin_prefetch(ahead->version, 1, 2);
        }
        ont_peek_count_up(&self->quick[o->tensors[i].stream].impl);
    }
}
