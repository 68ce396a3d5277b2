/*
 * A step of the Updater on a device: the tensors become tables in device memory (device/multi.h), and a few launches on
 * torch's current stream perform the step. Nothing waits for the device, and only addresses come from the host, so that
 * a step may be captured once they repeat. Called by py/optim.c, and for each gradient of a backward by
 * py/optim_backward.c.
 */
#include "py/optim.h" /* Python.h before any system header */

#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "device/multi.h"
#include "run/device_memory.h"

_Static_assert((int)ONT_OPTIM_BLOCK == (int)ONT_QUANT_BLOCK, "elements that share a scale");
_Static_assert(ONT_OPTIM_CHUNK % ONT_OPTIM_BLOCK == 0, "a chunk is whole blocks");
_Static_assert(ONT_RULE_STATES == 3, "states of an ont_cuda_tensor");

enum { SCALAR_FOUND_INF, SCALAR_INV_SCALE, SCALAR_NORM, SCALARS }; /* followed by a learning rate per group */

int ont_optim_device_group(ont_walk *w)
{
    ont_step_tables *t = &w->self->tables;
    if (ont_optim_reserve(&t->groups, &t->groups_capacity, t->n_groups + 1, sizeof *t->groups) != ONT_OK) {
        PyErr_NoMemory();
        return -1;
    }
    ont_device_group *group = &t->groups[t->n_groups++];
    group->first = w->self->work.n_tensors;
    group->sign = w->sign;
    memcpy(group->hyper, w->hyper, sizeof group->hyper);
    return 0;
}

static void free_dense(ont_dense_grads *d)
{
    if (d->device) ont_device_free_after(d->device, &d->memory, d->bytes, d->last);
    *d = (ont_dense_grads){0};
}

void ont_optim_device_free(ont_step_tables *t)
{
    free_dense(&t->dense);
    ont_tables_free(&t->on_device);
    ont_free(t->groups);
    *t = (ont_step_tables){.n_groups = 0};
}

/* A float32 scalar on the device; *value is NULL for None. */
static int take_scalar(const ont_walk *w, PyObject *scalars, Py_ssize_t i, float **value)
{
    PyObject *tensor = PyTuple_GetItem(scalars, i), *keep = NULL;
    ont_tensor_view view;
    *value = NULL;
    if (!tensor) return -1;
    if (tensor == Py_None) return 0;
    if (ont_dlpack_borrow_on(w->self->state, w->device, tensor, "number of the step", i, &view, &keep) < 0) return -1;
    if (keep && ont_hold(w->self, keep) < 0) return -1;
    if (view.dtype != ONT_FLOAT32 || ont_tensor_view_count(&view) != 1) {
        PyErr_Format(PyExc_TypeError, "%U: number %zd of the step is not a float32 tensor on the parameters' device",
                     w->self->name, i);
        return -1;
    }
    *value = view.data;
    return 0;
}

static int64_t chunks_of(const ont_optim_tensor *t)
{
    return (t->count + ONT_OPTIM_CHUNK - 1) / ONT_OPTIM_CHUNK;
}

static ont_optim_kind kind_of(const ont_optim_tensor *t)
{
    bool wide = false;
    for (int k = 0; k < ONT_OPERAND_COUNT; k++)
        wide |= k != ONT_OPERAND_GRAD && t->data[k] && t->dtype[k] == ONT_FLOAT64;
    if (t->scale[0] || t->scale[1] || t->stochastic) {
        ONT_ASSERT(!wide);
        return ONT_OPTIM_BY_WARPS;
    }
    return wide ? ONT_OPTIM_WIDE : ONT_OPTIM_NARROW;
}

/* ---- gradients in another order than their parameters ---- */

/* Bytes of the copy of a gradient; 0: it is taken where it is. */
static size_t dense_bytes(const ont_optim_tensor *t)
{
    if (!t->layout) return 0;
    return ((size_t)t->count * ont_dtype_size(t->dtype[ONT_OPERAND_GRAD]) + 63) / 64 * 64;
}

static bool is_captured(const ont_device *device, void *stream)
{
    return device->ops->capturing && device->ops->capturing(device, stream);
}

/* Memory for the copies, whose addresses are in the tables. */
static ont_status reserve_dense(ont_dense_grads *d, const ont_device *device, size_t bytes, void *stream)
{
    if (bytes && is_captured(device, stream))
        return ont_fail(ONT_EUNSUPPORTED, "the caller captures this stream, but a gradient lies in memory in another "
                                          "order than its parameter, and its copy does not last as long as a graph");
    if (!bytes || (d->device == device && d->bytes >= bytes)) return ONT_OK;
    free_dense(d);
    ONT_TRY(ont_device_alloc(device, bytes, &d->memory));
    d->device = device;
    d->bytes = bytes;
    d->last = d->memory.stream;
    return ONT_OK;
}

/* Copies a gradient in the order of its parameter's memory, `at` bytes into the memory for that. */
static ont_status copy_dense(ont_dense_grads *d, const ont_optim_tensor *t, const void *gradient, size_t at,
                             void *stream)
{
    const ont_optim_layout *l = t->layout;
    ont_device_strided layout = {.rank = l->rank, .size = ont_dtype_size(t->dtype[ONT_OPERAND_GRAD])};
    ONT_ASSERT(at + dense_bytes(t) <= d->bytes);
    for (int i = 0; i < l->rank; i++) {
        layout.dims[i] = l->dims[i];
        layout.strides[i] = l->strides[ONT_OPERAND_GRAD][i];
    }
    d->last = stream;
    return d->device->ops->copy_strided(d->device, &layout, gradient, (char *)d->memory.data + at, stream);
}

static ont_status copy_all_dense(const ont_optim *work, ont_dense_grads *d, void *stream)
{
    size_t at = 0;
    for (size_t i = 0; i < work->n_tensors; i++) {
        const ont_optim_tensor *t = &work->tensors[i];
        if (t->layout) ONT_TRY(copy_dense(d, t, t->data[ONT_OPERAND_GRAD], at, stream));
        at += dense_bytes(t);
    }
    return ONT_OK;
}

/* ---- the step ---- */

/* In the device's layout, but for the chunks. */
static void fill_tensor(const ont_optim_tensor *t, ont_cuda_tensor *to)
{
    memset(to, 0, sizeof *to); /* padding included: tables are compared by memcmp() */
    to->param = t->data[ONT_OPERAND_PARAM];
    to->grad = t->data[ONT_OPERAND_GRAD];
    for (int k = 0; k < ONT_RULE_STATES; k++) {
        to->state[k] = t->data[ONT_OPERAND_STATE + k];
        to->state_dtype[k] = t->dtype[ONT_OPERAND_STATE + k];
    }
    for (int k = 0; k < 2; k++) to->scale[k] = t->scale[k];
    to->master = t->data[ONT_OPERAND_MASTER];
    to->step = t->step;
    to->count = t->count;
    to->param_dtype = t->dtype[ONT_OPERAND_PARAM];
    to->grad_dtype = t->dtype[ONT_OPERAND_GRAD];
    to->fresh = t->fresh;
    to->stochastic = t->stochastic;
    to->stream = t->stochastic ? t->stream : 0;
}

/*
 * Fills the tables of all groups in the device's layout: [tensors][tensor of each chunk], chunks numbered within each
 * group.
 */
static void fill_tables(const ont_updater *self, ont_cuda_tensor *to, int32_t *chunk_tensor)
{
    const ont_optim *work = &self->work;
    const ont_step_tables *tables = &self->tables;
    int64_t chunk = 0, first = 0;
    size_t dense = 0;
    for (size_t i = 0, group = 0; i < work->n_tensors; i++) {
        for (; group < tables->n_groups && tables->groups[group].first <= i; group++) first = chunk;
        int64_t group_tensor = (int64_t)(i - tables->groups[group - 1].first);
        fill_tensor(&work->tensors[i], &to[i]);
        if (work->tensors[i].layout) to[i].grad = (const char *)tables->dense.memory.data + dense;
        dense += dense_bytes(&work->tensors[i]);
        to[i].first_chunk = chunk - first;
        for (int64_t k = 0; k < chunks_of(&work->tensors[i]); k++) chunk_tensor[chunk++] = (int32_t)group_tensor;
    }
}

typedef struct step_call {
    ont_updater *self;
    const ont_device *device;
    const char *table;       /* on the device */
    size_t chunks_at, work_at;
    double max_norm;
    float *found_inf, *inv_scale, *norm, **lr;
    uint64_t seed; /* of random rounding */
    int32_t kinds; /* of all tensors: ont_optim_kind */
    bool draws;    /* some parameter is rounded at random */
    size_t dense;  /* bytes of gradients that are copied in the order of their parameters */
    int64_t n_chunks;
} step_call;

static int32_t rule_of(const ont_optim_rule *rule)
{
    static const char *const names[] = {"adam", "lamb", "sgd", "adagrad", "lion"}; /* in the order of ont_cuda_rule */
    for (int i = 0; i < 5; i++)
        if (!strcmp(names[i], rule->name)) return i;
    return -1;
}

static ont_cuda_optim job_of(const step_call *c, size_t first, size_t n, int64_t first_chunk, int64_t n_chunks,
                             double *work)
{
    return (ont_cuda_optim){.tensors = (const ont_cuda_tensor *)(const void *)c->table + first,
                            .chunk_tensor = (const int32_t *)(const void *)(c->table + c->chunks_at) + first_chunk,
                            .n_tensors = (int64_t)n, .n_chunks = n_chunks, .rule = rule_of(c->self->rule),
                            .max_norm = -1, .absent = ~c->kinds, .seed = c->seed, .found_inf = c->found_inf,
                            .inv_scale = c->inv_scale, .work = work};
}

/*
 * Computes sums of squares group by group into one row of work memory, adds them up, and then runs each group's step
 * with the resulting factor.
 */
static ont_status launch(const step_call *c, void *stream)
{
    const ont_step_tables *t = &c->self->tables;
    const ont_optim *work = &c->self->work;
    double *sums = (double *)(void *)(uintptr_t)(c->table + c->work_at), *rest = sums + 2 * c->n_chunks + 2;
    for (int pass = c->max_norm < 0; pass < 2; pass++) {
        int64_t chunk = 0;
        for (size_t g = 0; g < t->n_groups; g++) {
            size_t first = t->groups[g].first, end = g + 1 < t->n_groups ? t->groups[g + 1].first : work->n_tensors;
            int64_t n_chunks = 0;
            for (size_t i = first; i < end; i++) n_chunks += chunks_of(&work->tensors[i]);
            ont_cuda_optim job = job_of(c, first, end - first, chunk, n_chunks, pass ? rest : sums + 2 * chunk);
            chunk += n_chunks;
            if (!pass) {
                ONT_TRY(c->device->ops->optim(c->device, ONT_OPTIM_SQUARES, &job, NULL, stream));
                continue;
            }
            if (first == end) continue;
            if (c->max_norm >= 0) job.factor = sums + 2 * c->n_chunks;
            job.maximize = t->groups[g].sign < 0;
            memcpy(job.hyper, t->groups[g].hyper, sizeof job.hyper);
            job.lr = c->lr[g];
            ONT_TRY(c->device->ops->optim(c->device, ONT_OPTIM_STEP, &job, NULL, stream));
        }
        if (pass) break;
        ont_cuda_optim all = job_of(c, 0, work->n_tensors, 0, c->n_chunks, sums);
        all.max_norm = c->max_norm;
        all.norm = c->norm;
        ONT_TRY(c->device->ops->optim(c->device, ONT_OPTIM_FACTOR, &all, NULL, stream));
    }
    return ONT_OK;
}

static ont_status run_on(step_call *c, char *fresh, const ont_table_sizes *sizes, void *stream)
{
    ont_step_tables *t = &c->self->tables;
    if (c->draws && is_captured(c->device, stream))
        return ont_fail(ONT_EUNSUPPORTED, "the caller captures this stream, but stochastic_rounding needs another "
                                          "random key in each step, and a captured step would repeat one");
    ONT_TRY(reserve_dense(&t->dense, c->device, c->dense, stream));
    fill_tables(c->self, (ont_cuda_tensor *)(void *)fresh, (int32_t *)(void *)(fresh + c->chunks_at));
    ONT_TRY(ont_tables_put(&t->on_device, c->device, fresh, sizes, stream));
    ONT_TRY(copy_all_dense(&c->self->work, &t->dense, stream));
    c->table = t->on_device.memory.data;
    return launch(c, stream);
}

static ont_status run(step_call *c, char *fresh, const ont_table_sizes *sizes)
{
    ont_scope scope;
    ONT_TRY(c->device->ops->enter(c->device, &scope));
    ont_status status = run_on(c, fresh, sizes, scope.stream);
    c->device->ops->leave(c->device, &scope);
    return status;
}

static int take_scalars(const ont_walk *w, PyObject *scalars, step_call *c)
{
    Py_ssize_t n = (Py_ssize_t)w->self->tables.n_groups;
    if (!scalars || !PyTuple_Check(scalars) || PyTuple_Size(scalars) != SCALARS + n) {
        PyErr_Format(PyExc_TypeError,
                     "%U: a step on a device needs found_inf, the scale's inverse, the norm and a rate per group",
                     w->self->name);
        return -1;
    }
    if (take_scalar(w, scalars, SCALAR_FOUND_INF, &c->found_inf) < 0 ||
        take_scalar(w, scalars, SCALAR_INV_SCALE, &c->inv_scale) < 0 ||
        take_scalar(w, scalars, SCALAR_NORM, &c->norm) < 0)
        return -1;
    for (Py_ssize_t g = 0; g < n; g++)
        if (take_scalar(w, scalars, SCALARS + g, &c->lr[g]) < 0) return -1;
    return 0;
}

PyObject *ont_optim_device_step(ont_walk *w, PyObject *scalars, const ont_optim_request *request)
{
    ont_updater *self = w->self;
    size_t n = self->work.n_tensors, groups = self->tables.n_groups;
    step_call c = {.self = self, .device = w->device, .max_norm = request->max_norm, .seed = request->seed};
    PyObject *result = NULL;
    if (!w->device->ops->optim)
        return PyErr_Format(PyExc_TypeError, "%U: device %s has no optimizers", self->name, w->device->ops->name);
    for (size_t i = 0; i < n; i++) {
        c.n_chunks += chunks_of(&self->work.tensors[i]);
        c.kinds |= (int32_t)kind_of(&self->work.tensors[i]);
        c.draws |= self->work.tensors[i].stochastic;
        c.dense += dense_bytes(&self->work.tensors[i]);
    }
    c.chunks_at = n * sizeof(ont_cuda_tensor);
    ont_table_sizes sizes = {.head = c.chunks_at};
    sizes.bytes = (c.chunks_at + (size_t)c.n_chunks * sizeof(int32_t) + 63) / 64 * 64;
    sizes.work = (size_t)(4 * c.n_chunks + (int64_t)n + 4) * sizeof(double);
    c.work_at = sizes.bytes;
    char *fresh = ont_calloc(sizes.bytes + 1, 1);
    c.lr = ont_calloc(groups + 1, sizeof *c.lr);
    if (!fresh || !c.lr) {
        PyErr_NoMemory();
    } else if (take_scalars(w, scalars, &c) == 0) {
        ont_status status = n ? run(&c, fresh, &sizes) : ONT_OK;
        result = status == ONT_OK ? Py_NewRef(Py_None) : ont_raise(self->state, status);
    }
    ont_free(fresh);
    ont_free(c.lr);
    return result;
}

/* ---- the step in backward ---- */

/*
 * Each tensor is a job of its own, so that all of them share one table of chunks, which is zeros, and the kernels' work
 * memory. The layout is [tensors][chunks of the longest][the factor of all gradients, 1][work].
 */
static ont_status prepare_tables(const ont_walk *w, ont_step_tables *t, int64_t n_chunks, size_t dense)
{
    const ont_optim *work = &w->self->work;
    const ont_device *device = w->device;
    ont_scope scope;
    t->chunks_at = work->n_tensors * sizeof(ont_cuda_tensor);
    ont_table_sizes sizes = {.head = t->chunks_at};
    t->factor_at = sizes.bytes = (t->chunks_at + (size_t)n_chunks * sizeof(int32_t) + 63) / 64 * 64;
    t->work_at = t->factor_at + sizeof(double);
    sizes.work = (size_t)(1 + 2 * n_chunks + 1 + 2) * sizeof(double);
    char *fresh = ont_calloc(sizes.bytes + 1, 1);
    if (!fresh) return ONT_ENOMEM;
    for (size_t i = 0; i < work->n_tensors; i++)
        fill_tensor(&work->tensors[i], (ont_cuda_tensor *)(void *)fresh + i);
    ont_status status = device->ops->enter(device, &scope);
    if (status == ONT_OK) {
        status = reserve_dense(&t->dense, device, dense, scope.stream);
        if (status == ONT_OK) status = ont_tables_put(&t->on_device, device, fresh, &sizes, scope.stream);
        char *memory = t->on_device.memory.data;
        ont_cuda_optim none = {.max_norm = -1, .work = (double *)(void *)(memory + t->factor_at)};
        if (status == ONT_OK) status = device->ops->optim(device, ONT_OPTIM_FACTOR, &none, NULL, scope.stream);
        device->ops->leave(device, &scope);
    }
    ont_free(fresh);
    return status;
}

int ont_optim_device_prepare(ont_walk *w)
{
    ont_updater *self = w->self;
    int64_t n_chunks = 0;
    size_t dense = 0;
    if (!w->device->ops->optim) {
        PyErr_Format(PyExc_TypeError, "%U: device %s has no optimizers", self->name, w->device->ops->name);
        return -1;
    }
    for (size_t i = 0; i < self->work.n_tensors; i++) {
        int64_t n = chunks_of(&self->work.tensors[i]);
        if (n > n_chunks) n_chunks = n;
        if (dense_bytes(&self->work.tensors[i]) > dense) dense = dense_bytes(&self->work.tensors[i]);
    }
    ont_status status = self->work.n_tensors ? prepare_tables(w, &self->tables, n_chunks, dense) : ONT_OK;
    if (status == ONT_OK) return 0;
    ont_raise(self->state, status);
    return -1;
}

ont_status ont_optim_device_apply(ont_updater *self, const ont_device *device, uint64_t seed, uint32_t tensor,
                                  const void *gradient, void *stream)
{
    ont_step_tables *t = &self->tables;
    const ont_optim_tensor *own = &self->work.tensors[tensor];
    if (own->layout) {
        ONT_TRY(copy_dense(&t->dense, own, gradient, 0, stream));
        gradient = t->dense.memory.data;
    }
    size_t g = t->n_groups;
    while (g > 0 && t->groups[g - 1].first > tensor) g--;
    ONT_ASSERT(g > 0 && t->on_device.device == device);
    const ont_device_group *group = &t->groups[g - 1];
    char *memory = t->on_device.memory.data;
    ont_cuda_optim job = {.tensors = (const ont_cuda_tensor *)(void *)memory + tensor,
                          .chunk_tensor = (const int32_t *)(void *)(memory + t->chunks_at), .n_tensors = 1,
                          .n_chunks = chunks_of(own), .rule = rule_of(self->rule), .maximize = group->sign < 0,
                          .max_norm = -1, .factor = (const double *)(void *)(memory + t->factor_at),
                          .work = (double *)(void *)(memory + t->work_at), .seed = seed,
                          .absent = ~(int32_t)kind_of(own), .grad = gradient};
    memcpy(job.hyper, group->hyper, sizeof job.hyper);
    return device->ops->optim(device, ONT_OPTIM_STEP, &job, NULL, stream);
}
