/*
 * The Updater's slow path: every tensor is examined in every step, since any of them may have been replaced,
 * resized or written. Only the location of each parameter's state in the optimizer's state dict is cached, and checked
 * first. Called by optim.c if the fast path (optim_fast_path.c) finds a tensor that is not plain.
 */
#include "py/optim.h" /* Python.h before any system header */

#include "base/alloc.h"

enum { PREFETCH_PARAMS = 6 }; /* prefetch distance in parameters */

/* ---- state ---- */

/* Whether the state dict holds the same objects in the same order as at the end of the last step. */
bool ont_optim_state_unchanged(const ont_updater *self, PyObject *states)
{
    Py_ssize_t at = 0;
    PyObject *key, *value;
    size_t n = 0;
    /* n_order 0: the last step failed */
    if (!self->n_order || (size_t)PyDict_Size(states) != self->n_order) return false;
    while (PyDict_Next(states, &at, &key, &value)) {
        if (n >= self->n_order || self->order[n].key != key || self->order[n].inner != value) return false;
        n++;
    }
    return n == self->n_order;
}

/*
 * Whether the states found in this step are those recorded from the state dict: Python code may run in between, and
 * other threads with it, which may replace some. Both are nearly always in the same order.
 */
static bool slots_agree(const ont_updater *self)
{
    enum { APART = 64 };
    size_t at = 0;
    for (size_t i = 0; i < self->n_slots; i++) {
        const ont_slot *s = &self->slots[i];
        size_t tries = 0;
        if (s->generation != self->generation || !s->inner) continue;
        while (tries < APART && at < self->n_order && self->order[at].key != s->param) {
            at = at + 1 < self->n_order ? at + 1 : 0;
            tries++;
        }
        if (tries == APART || at >= self->n_order || self->order[at].inner != s->inner) return false;
    }
    return true;
}

/* Records the state dict at the end of the traversal. */
static int remember_state(ont_updater *self, PyObject *states)
{
    Py_ssize_t at = 0;
    PyObject *key, *value;
    self->n_order = 0;
    size_t n = (size_t)PyDict_Size(states);
    if (ont_optim_reserve(&self->order, &self->order_capacity, n, sizeof *self->order) != ONT_OK) {
        PyErr_NoMemory();
        return -1;
    }
    while (PyDict_Next(states, &at, &key, &value)) self->order[self->n_order++] = (ont_state_entry){key, value};
    if (!slots_agree(self)) self->n_order = 0;
    return 0;
}

/* Holds the recorded states until the end of the step, whatever happens to the dict. */
static int hold_known(const ont_walk *w)
{
    for (size_t i = 0; w->known && i < w->self->n_order; i++)
        if (ont_hold(w->self, Py_NewRef(w->self->order[i].inner)) < 0) return -1;
    return 0;
}

/* Borrowed; NULL without an exception if the parameter has no state yet. */
static PyObject *find_inner(ont_walk *w, PyObject *param)
{
    ont_updater *self = w->self;
    ont_slot *s = &self->slots[w->position];
    if (w->known && s->param == param && s->inner && s->generation == self->generation) return s->inner;
    PyObject *inner = PyDict_GetItemWithError(w->states, param);
    s->param = param;
    s->generation = self->generation;
    ont_cache_state_dict(s, inner);
    if (inner && !PyDict_Check(inner)) {
        ont_param_error(w, PyExc_TypeError, "its state", " is not a dict");
        s->inner = NULL;
        return NULL;
    }
    return inner;
}

static int add_operand(ont_walk *w, ont_optim_tensor *t, PyObject *tensor, int k, const ont_tensor_view *param,
                       const int64_t *strides[ONT_OPERAND_COUNT])
{
    ont_tensor_view view;
    if (ont_borrow_operand(w, tensor, k, &view) < 0) return -1;
    if (!ont_same_dims(&view, param))
        return ont_param_error(w, PyExc_ValueError, ont_operand_text[k], " has another shape than the parameter");
    bool is_8_bit = (k == ONT_OPERAND_STATE || k == ONT_OPERAND_STATE + 1) && param->dtype != ONT_FLOAT64 &&
                 (view.dtype == ONT_INT8 || view.dtype == ONT_UINT8);
    if (!is_8_bit && ont_optim_storage(view.dtype) == ONT_STORAGE_COUNT) {
        PyErr_Format(PyExc_TypeError, "%U: parameter %zd of group %zd: %s is %s, which is not supported", w->self->name,
                     w->index, w->group, ont_operand_text[k], ont_dtype_name(view.dtype));
        return -1;
    }
    t->data[k] = view.data;
    t->dtype[k] = (uint8_t)view.dtype;
    strides[k] = view.strides;
    return 0;
}

/* The scales of 8-bit state: float32, one per block. */
static int add_scale(ont_walk *w, ont_optim_tensor *t, PyObject *inner, int i)
{
    PyObject *tensor = PyDict_GetItemWithError(inner, w->self->key_scale[i]);
    ont_tensor_view view;
    if (!tensor)
        return PyErr_Occurred() ? -1 : ont_param_error(w, PyExc_KeyError, "8-bit state", " without its scales");
    if (ont_hold(w->self, Py_NewRef(tensor)) < 0 || ont_borrow_operand(w, tensor, ONT_OPERAND_STATE + i, &view) < 0)
        return -1;
    int64_t blocks = (t->count + ONT_QUANT_BLOCK - 1) / ONT_QUANT_BLOCK;
    bool dense = !view.strides || blocks < 2 || view.strides[0] == 1;
    if (view.dtype != ONT_FLOAT32 || view.rank != 1 || view.dims[0] != blocks || !dense)
        return ont_param_error(w, PyExc_ValueError, "the scales of its 8-bit state",
                               " are not contiguous float32, one per block");
    t->scale[i] = view.data;
    return 0;
}

static int add_step(ont_walk *w, ont_optim_tensor *t, PyObject *tensor, double *step)
{
    ont_tensor_view view;
    PyObject *keep = NULL;
    const ont_state *state = w->self->state;
    if (w->device) {
        if (ont_dlpack_borrow_on(state, w->device, tensor, "step of parameter", w->index, &view, &keep) < 0) return -1;
        if (keep && ont_hold(w->self, keep) < 0) return -1;
        if (view.rank != 0 || !view.data || view.dtype != ONT_FLOAT32)
            return ont_param_error(w, PyExc_TypeError, "its step",
                                   " is not a float32 number on the parameter's device");
        t->step = view.data;
        *step = 1; /* the step count is on the device */
        return 0;
    }
    if (ont_torch_read_tensor(state, tensor, &view)) {
        ont_cache_tensor(w->self, &w->self->slots[w->position], ONT_OPERAND_COUNT, tensor, &view);
    } else {
        if (ont_dlpack_borrow(state, tensor, "step of parameter", w->index, &view, &keep) < 0) return -1;
        if (keep && ont_hold(w->self, keep) < 0) return -1;
    }
    if (view.rank != 0 || !view.data || (view.dtype != ONT_FLOAT32 && view.dtype != ONT_FLOAT64))
        return ont_param_error(w, PyExc_TypeError, "its step", " is not a float32 or float64 number on the CPU");
    t->step = view.data;
    t->step_is_double = view.dtype == ONT_FLOAT64;
    *step = 1 + (t->step_is_double ? *(double *)view.data : (double)*(float *)view.data);
    return 0;
}

static bool wants_master(const ont_walk *w, const ont_optim_tensor *t)
{
    ont_dtype dtype = t->dtype[ONT_OPERAND_PARAM];
    return w->flags & GROUP_MASTER && (dtype == ONT_BFLOAT16 || dtype == ONT_FLOAT16);
}

/* 1 if the entry is present and a tensor, 0 if not, -1 with an exception. */
static int look_up_entry(const ont_walk *w, PyObject *inner, PyObject *key, PyObject **entry)
{
    *entry = PyDict_GetItemWithError(inner, key);
    if (!*entry) return PyErr_Occurred() ? -1 : 0;
    return ont_is_tensor(w->self, *entry);
}

/* 1 if all required entries are present and tensors, 0 if not, -1 with an exception. */
static int find_entries(const ont_walk *w, const ont_optim_tensor *t, PyObject *inner, ont_param_state *e)
{
    const ont_updater *self = w->self;
    *e = (ont_param_state){0};
    int found = inner != NULL;
    if (found == 1 && self->rule->has_step) found = look_up_entry(w, inner, self->key_step, &e->step);
    if (found == 1 && wants_master(w, t)) found = look_up_entry(w, inner, self->key_master, &e->master);
    for (int i = 0; found == 1 && i < ONT_RULE_STATES; i++)
        if (w->needs >> i & 1) found = look_up_entry(w, inner, self->key_state[i], &e->state[i]);
    return found;
}

/* The parameter's state dict and its entries, created or completed by Python's prepare() if necessary. */
static PyObject *complete_inner(ont_walk *w, const ont_optim_tensor *t, PyObject *param, ont_param_state *e,
                                bool *first)
{
    PyObject *inner = find_inner(w, param);
    if (!inner && PyErr_Occurred()) return NULL;
    int found = find_entries(w, t, inner, e);
    if (found != 0) return found < 0 ? NULL : inner;
    PyObject *made = PyObject_CallFunction(w->prepare, "On", param, w->group);
    if (!made) return NULL;
    *first = PyObject_IsTrue(made) > 0;
    Py_DECREF(made);
    w->known = false;
    w->changed = true;
    inner = find_inner(w, param);
    found = PyErr_Occurred() ? -1 : find_entries(w, t, inner, e);
    if (found == 0) ont_param_error(w, PyExc_KeyError, "its state", " is incomplete");
    return found > 0 ? inner : NULL;
}

static int hold_entries(ont_updater *self, PyObject *inner, const ont_param_state *e)
{
    PyObject *const all[] = {inner, e->step, e->master, e->state[0], e->state[1], e->state[2]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] && ont_hold(self, Py_NewRef(all[i])) < 0) return -1;
    return 0;
}

static int add_state(ont_walk *w, ont_optim_tensor *t, PyObject *param, const ont_tensor_view *view,
                     const int64_t *strides[ONT_OPERAND_COUNT], double *step, bool *first)
{
    ont_updater *self = w->self;
    ont_param_state e;
    PyObject *inner = complete_inner(w, t, param, &e, first);
    if (!inner || hold_entries(self, inner, &e) < 0) return -1;
    for (int i = 0; i < ONT_RULE_STATES; i++) {
        if (!e.state[i]) continue;
        int k = ONT_OPERAND_STATE + i;
        if (add_operand(w, t, e.state[i], k, view, strides) < 0) return -1;
        bool is_8_bit = t->dtype[k] == ONT_INT8 || t->dtype[k] == ONT_UINT8;
        if (i < 2 && is_8_bit && add_scale(w, t, inner, i) < 0) return -1;
    }
    if (e.step && add_step(w, t, e.step, step) < 0) return -1;
    if (!e.master) return 0;
    if (add_operand(w, t, e.master, ONT_OPERAND_MASTER, view, strides) < 0) return -1;
    if (t->dtype[ONT_OPERAND_MASTER] != ONT_FLOAT32)
        return ont_param_error(w, PyExc_TypeError, ont_operand_text[ONT_OPERAND_MASTER], " is not float32");
    return 0;
}

/* ---- groups and parameters ---- */

int ont_optim_take_update(ont_walk *w, ont_optim_tensor *t, double step, bool first)
{
    ont_updater *self = w->self;
    if (step != w->last_step || first != w->last_first) {
        ont_update u;
        self->rule->fill(w->hyper, step, first, &u);
        u.grad = w->sign;
        if (ont_optim_add_update(&self->work, &u, &w->last_update) != ONT_OK) {
            PyErr_NoMemory();
            return -1;
        }
        w->last_step = step;
        w->last_first = first;
    }
    t->update = w->last_update;
    return 0;
}

static int finish_tensor(ont_walk *w, ont_optim_tensor *t, const ont_tensor_view *view,
                         const int64_t *strides[ONT_OPERAND_COUNT], double step, bool first)
{
    ont_updater *self = w->self;
    bool strided = false, wide = false, is_8_bit = false;
    for (int k = 0; k < ONT_OPERAND_COUNT; k++) {
        strided |= t->data[k] && strides[k];
        if (k == ONT_OPERAND_GRAD || !t->data[k]) continue;
        wide |= t->dtype[k] == ONT_FLOAT64;
        is_8_bit |= t->dtype[k] == ONT_INT8 || t->dtype[k] == ONT_UINT8;
    }
    if (wide && is_8_bit) return ont_param_error(w, PyExc_TypeError, "8-bit state", " beside float64 is not supported");
    if (strided && t->count > 0) {
        ont_status status = ont_optim_make_layout(&self->work, t, view->rank, view->dims, strides, &t->layout);
        if (status != ONT_OK) {
            ont_context(status, "parameter %zd of group %zd", w->index, w->group);
            ont_raise(self->state, status);
            return -1;
        }
    }
    ont_dtype dtype = t->dtype[ONT_OPERAND_PARAM];
    t->stochastic = w->flags & GROUP_STOCHASTIC && !t->data[ONT_OPERAND_MASTER] && !wide &&
                    (dtype == ONT_BFLOAT16 || dtype == ONT_FLOAT16);
    t->stream = (uint32_t)w->position;
    t->fresh = first;
    if (w->device && t->layout && !ont_optim_only_grad_is_strided(t))
        return ont_param_error(w, PyExc_TypeError, "the parameter and its states",
                               " lie in memory in different orders, or with gaps, which a device does not take");
    return ont_optim_take_update(w, t, step, first);
}

/*
 * Optimizer in backward: the gradient comes later, row-major; until the tensor is complete the parameter stands in for
 * it.
 */
static int expect_gradient(const ont_walk *w, ont_optim_tensor *t, const ont_tensor_view *param)
{
    ont_expected *e = &w->expected[w->position];
    ont_shape shape = ont_shape_of(param->rank <= ONT_MAX_RANK ? param->rank : 0, param->dims);
    if (param->rank > ONT_MAX_RANK || param->dtype != e->input->dtype || !ont_shape_equal(&shape, &e->input->shape))
        return ont_param_error(w, PyExc_ValueError, "the parameter", " has another dtype or shape than forward saw");
    t->data[ONT_OPERAND_GRAD] = t->data[ONT_OPERAND_PARAM];
    t->dtype[ONT_OPERAND_GRAD] = t->dtype[ONT_OPERAND_PARAM];
    e->tensor = (uint32_t)(w->self->work.n_tensors - 1);
    e->found = true;
    return 0;
}

/* Adds one parameter; the caller holds both objects. grad: NULL if it is expected later. */
static int add_param(ont_walk *w, PyObject *param, PyObject *grad)
{
    ont_updater *self = w->self;
    const int64_t *strides[ONT_OPERAND_COUNT] = {0};
    ont_optim_tensor *t;
    ont_tensor_view view;
    double step = 0;
    bool first = false;
    if (ont_optim_add_tensor(&self->work, &t) != ONT_OK) {
        PyErr_NoMemory();
        return -1;
    }
    if (ont_borrow_operand(w, param, ONT_OPERAND_PARAM, &view) < 0) return -1;
    if (ont_optim_storage(view.dtype) == ONT_STORAGE_COUNT) {
        PyErr_Format(PyExc_TypeError,
                     "%U: parameter %zd of group %zd is %s; float, double, bfloat16 and float16 are supported",
                     self->name, w->index, w->group, ont_dtype_name(view.dtype));
        return -1;
    }
    t->count = ont_tensor_view_count(&view);
    t->data[ONT_OPERAND_PARAM] = view.data;
    t->dtype[ONT_OPERAND_PARAM] = (uint8_t)view.dtype;
    strides[ONT_OPERAND_PARAM] = view.strides;
    if (!grad ? expect_gradient(w, t, &view) : add_operand(w, t, grad, ONT_OPERAND_GRAD, &view, strides)) return -1;
    if ((w->needs || self->rule->has_step || wants_master(w, t)) &&
        add_state(w, t, param, &view, strides, &step, &first) < 0)
        return -1;
    if (finish_tensor(w, t, &view, strides, step, first) < 0) return -1;
    if (!grad) t->data[ONT_OPERAND_GRAD] = NULL;
    return PyList_Append(w->updated, param);
}

int ont_optim_parse_hyper(ont_walk *w, PyObject *numbers)
{
    const ont_optim_rule *rule = w->self->rule;
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != GROUP_LEADING + rule->n_hyper) {
        PyErr_Format(PyExc_ValueError, "%U: group %zd needs the numbers sign, flags, %s", w->self->name, w->group,
                     rule->hyper);
        return -1;
    }
    double leading[GROUP_LEADING];
    for (int i = 0; i < GROUP_LEADING + rule->n_hyper; i++) {
        double x = PyFloat_AsDouble(PyTuple_GetItem(numbers, i));
        if (x == -1 && PyErr_Occurred()) return -1;
        *(i < GROUP_LEADING ? &leading[i] : &w->hyper[i - GROUP_LEADING]) = x;
    }
    w->sign = leading[0];
    w->flags = (int)leading[1];
    w->needs = rule->needs(w->hyper);
    w->last_step = -1;
    return 0;
}

/* Optimizer in backward: 1 if a gradient of this parameter is expected, 0 if not, -1 with an exception. */
static int is_expected(const ont_walk *w, PyObject *param, PyObject *grad)
{
    const ont_expected *e = w->position < w->n_expected ? &w->expected[w->position] : NULL;
    if (!e || !e->param) return 0;
    if (e->param != param)
        return ont_param_error(w, PyExc_RuntimeError, "the parameter", " is not the one that forward read");
    if (grad != Py_None)
        return ont_param_error(w, PyExc_RuntimeError, "its .grad",
                               " is there already, and step_in_backward() would leave it out: call zero_grad() before "
                               "backward; gradients cannot be accumulated");
    return 1;
}

static int add_group(ont_walk *w, PyObject *group)
{
    ont_updater *self = w->self;
    PyObject *params = PyDict_Check(group) ? PyDict_GetItemWithError(group, self->key_params) : NULL;
    if (!params || !PyList_Check(params)) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "%U: group %zd is not a dict with a list of params", self->name, w->group);
        return -1;
    }
    if (ont_hold(self, Py_NewRef(params)) < 0) return -1;
    if (w->device && ont_optim_device_group(w) < 0) return -1;
    for (w->index = 0; w->index < PyList_Size(params); w->index++, w->position++) {
        PyObject *param = PyList_GetItem(params, w->index);
        if (ont_hold(self, Py_NewRef(param)) < 0) return -1;
        if (w->position >= self->n_slots) {
            size_t need = w->position + 1;
            if (ont_optim_reserve(&self->slots, &self->slots_capacity, need, sizeof *self->slots) != ONT_OK) {
                PyErr_NoMemory();
                return -1;
            }
            self->slots[self->n_slots++] = (ont_slot){0};
        }
        if (w->position + PREFETCH_PARAMS < self->n_slots)
            ont_prefetch_slot(&self->slots[w->position + PREFETCH_PARAMS]);
        PyObject *grad = PyObject_GetAttr(param, self->key_grad);
        if (!grad || ont_hold(self, grad) < 0) return -1;
        int taken = w->expected ? is_expected(w, param, grad) : grad != Py_None;
        if (taken < 0 || (taken && add_param(w, param, w->expected ? NULL : grad) < 0)) return -1;
    }
    return 0;
}

int ont_optim_slow_path(ont_walk *w, PyObject *groups, PyObject *hyper)
{
    Py_ssize_t n = PyList_Size(groups);
    w->position = 0;
    w->known = ont_optim_state_unchanged(w->self, w->states);
    w->changed = !w->known;
    if (w->changed) w->self->generation++;
    if (hold_known(w) < 0) return -1;
    for (w->group = 0; w->group < n && w->group < PyList_Size(groups) && w->group < PyList_Size(hyper); w->group++)
        if (ont_optim_parse_hyper(w, PyList_GetItem(hyper, w->group)) < 0 ||
            add_group(w, PyList_GetItem(groups, w->group)) < 0)
            return -1;
    w->self->n_slots = w->position; /* fewer if parameters were removed */
    return w->changed ? remember_state(w->self, w->states) : 0;
}
