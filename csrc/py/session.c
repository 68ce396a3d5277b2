/*
 * The Python type Session over run/session.h: forward, and descriptions of a session's programs. Releases the GIL
 * around kernels; backward belongs to the Run (run_object.c).
 */
#include "py/device.h" /* Python.h before any system header */

#include <string.h>

#include "base/alloc.h"
#include "onnx/load.h"
#include "onnx/save.h"
#include "passes/pack_rows.h"
#include "passes/recompute.h"
#include "py/call.h"
#include "py/timing.h"
#include "run/replay.h"

/* ---- descriptions ---- */

static PyObject *dims_tuple(const ont_graph *g, const ont_shape *shape)
{
    PyObject *tuple = PyTuple_New(shape->rank);
    for (int i = 0; tuple && i < shape->rank; i++) {
        int64_t dim = shape->dims[i];
        PyObject *item = dim >= 0                 ? PyLong_FromLongLong(dim)
                         : dim == ONT_DIM_UNKNOWN ? PyUnicode_FromString("?")
                                                  : PyUnicode_FromString(g->symbols[ONT_DIM_SYMBOL_INDEX(dim)]);
        if (!item || PyTuple_SetItem(tuple, i, item) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *describe_values(const ont_graph *g, ont_value *const *values, uint32_t n)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < n; i++) {
        PyObject *dims = values[i]->has_shape ? dims_tuple(g, &values[i]->shape) : Py_NewRef(Py_None);
        PyObject *item = dims ? Py_BuildValue("ssN", values[i]->name, ont_dtype_name(values[i]->dtype), dims) : NULL;
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* ---- Session ---- */

enum { MAX_PROGRAMS = 4096 };

/* Reads [(subgraph, compromise, count)]; NULL: none. -1 with an exception on failure. */
static int read_subgraphs(ont_graph *g, PyObject *list)
{
    PyObject *items = list ? PySequence_Tuple(list) : PyTuple_New(0);
    if (!items) return -1;
    Py_ssize_t n = PyTuple_Size(items);
    ont_recompute_plan *plans = ont_arena_array(&g->arena, (size_t)n + 1, sizeof *plans);
    int result = plans ? 0 : -1;
    if (!plans) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n && result == 0; i++) {
        const char *subgraph;
        int compromise;
        long long count;
        PyObject *item = PyTuple_GetItem(items, i);
        if (!PyTuple_Check(item)) PyErr_SetString(PyExc_TypeError, "an item of subgraphs is not a tuple");
        else if (PyArg_ParseTuple(item, "spL:subgraphs", &subgraph, &compromise, &count))
            plans[i] = (ont_recompute_plan){ont_arena_strdup(&g->arena, subgraph), compromise, count};
        if (!PyErr_Occurred() && !plans[i].subgraph) PyErr_NoMemory();
        if (PyErr_Occurred()) result = -1;
    }
    g->subgraphs.plans = plans;
    g->subgraphs.n_plans = (uint32_t)n;
    Py_DECREF(items);
    return result;
}

static int check_parameters(const ont_graph *g, Py_ssize_t n)
{
    if (!n || (size_t)n == g->n_inputs) return 0;
    PyErr_Format(PyExc_ValueError, "parameters has %zd bytes, expected one for each of the graph's %u inputs", n,
                 g->n_inputs);
    return -1;
}

static int check_memory(int recompute, double budget)
{
    if (!(budget >= 0))
        PyErr_SetString(PyExc_ValueError, "budget is negative, expected bytes, or a fraction of at most 1");
    else if (recompute < 0 || recompute >= ONT_RECOMPUTE_LEVELS)
        PyErr_Format(PyExc_ValueError, "recompute is %d, expected 0 to %d", recompute, ONT_RECOMPUTE_LEVELS - 1);
    return PyErr_Occurred() ? -1 : 0;
}

static int session_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    ont_session_object *self = (ont_session_object *)object;
    char *names[] = {"model", "programs", "device", "torch_random", "recompute", "parameters", "budget", "rows",
                     "subgraphs", NULL};
    const char *bytes, *parameters = NULL;
    Py_ssize_t size, n_parameters = 0;
    const char *device_name = "";
    const ont_device *device;
    int programs = 16, torch_random = 0, recompute = ONT_RECOMPUTE_MEMORY_BOUND, rows = 0;
    double budget = 0;
    PyObject *subgraphs = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y#|ispiy#diO:Session", names, &bytes, &size, &programs,
                                     &device_name, &torch_random, &recompute, &parameters, &n_parameters, &budget,
                                     &rows, &subgraphs))
        return -1;
    if (check_memory(recompute, budget) < 0) return -1;
    if (rows & ~(ONT_PACK_SELECTED | ONT_PACK_LABELS | ONT_PACK_KEYS)) {
        PyErr_Format(PyExc_ValueError, "rows is %d, expected a sum of 1, 2 and 4", rows);
        return -1;
    }
    if (programs < 1 || programs > MAX_PROGRAMS) {
        PyErr_Format(PyExc_ValueError, "programs is %d, expected 1 to %d", programs, MAX_PROGRAMS);
        return -1;
    }
    if (self->session) {
        PyErr_SetString(PyExc_RuntimeError, "a Session is initialised once");
        return -1;
    }
    if (ont_device_by_name(self->state, device_name, &device) < 0) return -1;
    ont_graph *graph;
    ont_status status = ont_onnx_load((const uint8_t *)bytes, (size_t)size, &graph);
    if (status == ONT_OK && (check_parameters(graph, n_parameters) < 0 || read_subgraphs(graph, subgraphs) < 0)) {
        ont_graph_destroy(graph);
        return -1;
    }
    if (status == ONT_OK) { /* programs clone the graph and these settings */
        graph->torch_random = torch_random;
        graph->recompute.level = recompute;
        graph->packed.wanted = (uint32_t)rows;
        for (Py_ssize_t i = 0; i < n_parameters; i++) graph->inputs[i]->parameter = parameters[i];
    }
    if (status == ONT_OK) status = ont_session_create(graph, (uint32_t)programs, device, &self->session);
    if (status == ONT_OK) {
        ont_session_set_budget(self->session, budget);
        return 0;
    }
    ont_raise(self->state, status);
    return -1;
}

static PyObject *session_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args;
    (void)kwargs;
    PyObject *module = PyType_GetModule(type);
    if (!module) return NULL;
    ont_session_object *self = (ont_session_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    self->module = Py_NewRef(module);
    self->state = ont_get_state(module);
    return (PyObject *)self;
}

static void session_dealloc(PyObject *object)
{
    ont_session_object *self = (ont_session_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    ont_session_destroy(self->session);
    Py_XDECREF(self->module);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* NULL and RuntimeError for an object whose __init__() did not run or failed. */
ont_session *ont_session_of(PyObject *object)
{
    ont_session *session = ((ont_session_object *)object)->session;
    if (!session) PyErr_SetString(PyExc_RuntimeError, "this Session was never initialised");
    return session;
}

static PyObject *session_inputs(PyObject *object, void *closure)
{
    (void)closure;
    const ont_session *session = ont_session_of(object);
    if (!session) return NULL;
    const ont_graph *g = ont_session_graph(session);
    return describe_values(g, g->inputs, g->n_inputs);
}

static PyObject *session_outputs(PyObject *object, void *closure)
{
    (void)closure;
    const ont_session *session = ont_session_of(object);
    if (!session) return NULL;
    const ont_graph *g = ont_session_graph(session);
    return describe_values(g, g->outputs, g->n_outputs);
}

static PyObject *session_random(PyObject *object, void *closure)
{
    (void)closure;
    const ont_session *session = ont_session_of(object);
    return session ? PyBool_FromLong(ont_session_is_random(session)) : NULL;
}

/* Runs a value probe and adds the results to `probed`. */
static ont_status run_probe(ont_session_object *self, ont_program *probe, const ont_borrowed *in,
                            const ont_random *random, ont_probed_values *probed)
{
    uint32_t n = probe->grads.n_forward_outputs;
    ont_block **outputs = ont_calloc(n + 1, sizeof *outputs);
    if (!outputs) return ONT_ENOMEM;
    ont_run *run = NULL; /* stays NULL: a probe has no backward */
    ont_status status;
    ont_program_ref(probe);
    Py_BEGIN_ALLOW_THREADS
    status = ont_run_forward(probe, ont_session_pool(self->session), in->views, random, outputs, &run);
    Py_END_ALLOW_THREADS
    if (status == ONT_OK) status = ont_probed_values_add(self->session, probed, outputs, n);
    for (uint32_t i = 0; i < n; i++) ont_block_unref(outputs[i]);
    ont_program_unref(probe);
    ont_free(outputs);
    return status;
}

/* Finds the program of a call; runs as many value probes as necessary. */
static ont_status find_program(ont_session_object *self, const ont_borrowed *in, const uint8_t *wants,
                               const ont_random *random, ont_program **program)
{
    ont_probed_values probed = {0};
    ont_status status;
    for (;;) {
        status = ont_session_program(self->session, in->views, wants, &probed, program);
        if (status != ONT_OK || !(*program)->probe) break;
        status = run_probe(self, *program, in, random, &probed);
        if (status != ONT_OK) break;
    }
    ont_probed_values_deinit(&probed);
    return status;
}

/*
 * Regroups flat outputs, one result per output of the model: a list for a sequence, None for an optional without
 * element. Takes the reference to `flat`.
 */
static PyObject *regroup(const ont_program *p, PyObject *flat)
{
    if (!flat || !p->result_counts) return flat;
    PyObject *results = PyTuple_New((Py_ssize_t)p->n_results);
    Py_ssize_t at = 0;
    for (uint32_t i = 0; results && i < p->n_results; i++) {
        int32_t count = p->result_counts[i];
        PyObject *item = count == ONT_RESULT_NONE ? Py_NewRef(Py_None) : count >= 0 ? PyList_New(count) : NULL;
        if (count == ONT_RESULT_TENSOR) item = Py_NewRef(PyTuple_GetItem(flat, at++));
        for (int32_t k = 0; item && k < count; k++)
            if (PyList_SetItem(item, k, Py_NewRef(PyTuple_GetItem(flat, at++))) < 0) Py_CLEAR(item);
        if (!item || PyTuple_SetItem(results, (Py_ssize_t)i, item) < 0) Py_CLEAR(results);
    }
    Py_DECREF(flat);
    return results;
}

/* Calls a method of a generator that returns a 64-bit integer. */
static int call_uint64(PyObject *generator, const char *method, uint64_t *number)
{
    PyObject *result = PyObject_CallMethod(generator, method, NULL);
    if (!result) return -1;
    *number = PyLong_AsUnsignedLongLongMask(result);
    Py_DECREF(result);
    return PyErr_Occurred() ? -1 : 0;
}

/* splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014. */
static uint64_t splitmix64(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* Reads the seed from a number, or from a CUDA torch.Generator, which is not modified before advance(). */
static int read_random(PyObject *seed, ont_random *random)
{
    *random = (ont_random){0};
    if (!seed) return 0;
    if (PyIndex_Check(seed)) {
        PyObject *number = PyNumber_Index(seed);
        if (!number) return -1;
        random->key = random->seed = PyLong_AsUnsignedLongLongMask(number);
        Py_DECREF(number);
        return PyErr_Occurred() ? -1 : 0;
    }
    uint64_t offset;
    if (call_uint64(seed, "initial_seed", &random->seed) < 0 || call_uint64(seed, "get_offset", &offset) < 0) return -1;
    random->block = offset / 4;
    random->key = splitmix64(random->seed ^ splitmix64(offset));
    return 0;
}

/* Advances the generator by what torch's own kernels would have drawn in this forward. */
static int advance(PyObject *generator, const ont_random *random, const ont_program *program)
{
    if (!generator || PyIndex_Check(generator) || !program->graph->random_offset) return 0;
    PyObject *result = PyObject_CallMethod(generator, "set_offset", "K",
                                           (unsigned long long)random->block * 4 + program->graph->random_offset);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Runs forward of a program to which the caller holds a reference; returns (outputs, Run or None). */
static PyObject *run_forward(ont_session_object *self, ont_program *program, const ont_borrowed *in,
                             const ont_random *random)
{
    uint32_t n = program->grads.n_forward_outputs;
    ont_block **outputs = ont_calloc(n + 1, sizeof *outputs);
    if (!outputs) return PyErr_NoMemory();
    ont_run *run = NULL;
    ont_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ont_run_forward(program, ont_session_pool(self->session), in->views, random, outputs, &run);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    if (status != ONT_OK) {
        ont_raise(self->state, status);
    } else {
        PyObject *tensors = regroup(program, ont_wrap_blocks(self->state, outputs, n));
        PyObject *open = !run ? Py_NewRef(Py_None) : ont_run_object_new(self, run, random);
        if (tensors && open) result = PyTuple_Pack(2, tensors, open);
        Py_XDECREF(tensors);
        Py_XDECREF(open);
    }
    ont_free(outputs);
    return result;
}

/* Runs the forward of a borrowed call; returns (outputs, Run or None). */
static PyObject *forward_borrowed(ont_session_object *self, const ont_borrowed *in, const uint8_t *wants,
                                  PyObject *seed)
{
    ont_program *program;
    ont_random random;
    if (read_random(seed, &random) < 0) return NULL;
    ont_status status = find_program(self, in, wants, &random, &program);
    if (status != ONT_OK) return ont_raise(self->state, status);
    ont_program_ref(program); /* the generator's method or another thread may evict it from the cache */
    PyObject *result = advance(seed, &random, program) < 0 ? NULL : run_forward(self, program, in, &random);
    ont_program_unref(program);
    return result;
}

PyObject *ont_session_object_forward(PyObject *object, PyObject *tensors, const char *mask, Py_ssize_t mask_size,
                                     PyObject *seed)
{
    ont_session_object *self = (ont_session_object *)object;
    if (!ont_session_of(object)) return NULL;
    Py_ssize_t n = (Py_ssize_t)ont_session_graph(self->session)->n_inputs;
    if (mask_size != n) return PyErr_Format(PyExc_ValueError, "grad_mask has %zd bytes, expected %zd", mask_size, n);
    PyObject *tuple = ont_sequence(tensors, n, "tensors");
    if (!tuple) return NULL;
    ont_borrowed in;
    PyObject *result = NULL;
    if (ont_borrowed_init(&in, n) == 0) {
        if (ont_borrow_inputs(self->state, ont_session_device(self->session), tuple, &in) == 0)
            result = forward_borrowed(self, &in, (const uint8_t *)mask, seed);
        ont_borrowed_deinit(&in);
    }
    Py_DECREF(tuple);
    return result;
}

static PyObject *session_forward(PyObject *object, PyObject *args, PyObject *kwargs)
{
    char *names[] = {"tensors", "grad_mask", "seed", NULL};
    PyObject *tensors, *seed = NULL;
    const char *mask;
    Py_ssize_t mask_size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy#|O:forward", names, &tensors, &mask, &mask_size, &seed))
        return NULL;
    return ont_session_object_forward(object, tensors, mask, mask_size, seed);
}

static PyObject *session_stats(PyObject *object, PyObject *unused)
{
    (void)unused;
    ont_session_stats s = {0};
    const ont_session *session = ont_session_of(object);
    if (!session) return NULL;
    ont_session_get_stats(session, &s);
    return Py_BuildValue("{sK sK sK sK sd sd sn sn sn sn sn sn sI sd sn sI sI sn sn sn sK sK sK sK sI sL sL sL sL sL "
                         "sL}",
                         "programs_built",
                         s.programs_built, "program_hits", s.program_hits, "probes_built", s.probes_built, "probe_runs",
                         s.probe_runs, "build_seconds", s.build_seconds, "last_build_seconds", s.last_build_seconds,
                         "slab_bytes", (Py_ssize_t)s.slab_bytes, "slab_lower_bound", (Py_ssize_t)s.slab_lower_bound,
                         "forward_bytes", (Py_ssize_t)s.phase_bytes[0], "kept_bytes", (Py_ssize_t)s.kept_bytes,
                         "backward_bytes", (Py_ssize_t)s.phase_bytes[1],
                         "recomputed_bytes", (Py_ssize_t)s.recomputed_bytes, "recomputed_nodes", s.recomputed_nodes,
                         "recomputed_share", s.recomputed_share, "budget_bytes", (Py_ssize_t)s.budget_bytes, "steps",
                         s.steps, "forward_steps", s.forward_steps, "pool_live_bytes",
                         (Py_ssize_t)s.pool.live_bytes, "pool_cached_bytes", (Py_ssize_t)s.pool.cached_bytes,
                         "pool_peak_bytes", (Py_ssize_t)s.pool.peak_bytes, "blocks_taken", s.pool.taken,
                         "blocks_reused", s.pool.reused, "graphs_captured", ont_replay_get_counts().captured,
                         "graph_launches", ont_replay_get_counts().launched, "packed_nodes", s.packed_nodes,
                         "selected_rows", (long long)s.packed_rows[0][0], "selected_rows_of",
                         (long long)s.packed_rows[0][1], "label_rows", (long long)s.packed_rows[1][0],
                         "label_rows_of", (long long)s.packed_rows[1][1], "key_rows", (long long)s.packed_rows[2][0],
                         "key_rows_of", (long long)s.packed_rows[2][1]);
}

static PyObject *session_text(PyObject *object, PyObject *args)
{
    ont_session_object *self = (ont_session_object *)object;
    const char *stage = "loaded";
    if (!PyArg_ParseTuple(args, "|s:text", &stage) || !ont_session_of(object)) return NULL;
    bool loaded = !strcmp(stage, "loaded");
    if (!loaded && strcmp(stage, "program"))
        return PyErr_Format(PyExc_ValueError, "stage is '%s', expected 'loaded' or 'program'", stage);
    ont_program *program = loaded ? NULL : ont_session_ref_program(self->session);
    if (!loaded && !program) return PyErr_Format(PyExc_RuntimeError, "no program has been built yet");
    char *text;
    ont_status status = ont_graph_print(loaded ? ont_session_graph(self->session) : program->graph, &text);
    ont_program_unref(program);
    if (status != ONT_OK) return ont_raise(self->state, status);
    PyObject *result = ont_text(text);
    ont_free(text);
    return result;
}

/*
 * The graph of a stage, of the latest program or NULL; *owned is a graph that the caller destroys, or NULL. NULL with a
 * Python exception on failure.
 */
static const ont_graph *stage_graph(const ont_session_object *self, const char *stage, const ont_program *program,
                                    ont_graph **owned)
{
    const ont_graph *loaded = ont_session_graph(self->session);
    *owned = NULL;
    if (!strcmp(stage, "post_processed")) return loaded;
    bool pre_grad = !strcmp(stage, "optimized_pre_grad"), execution = !strcmp(stage, "execution_model");
    if (!pre_grad && !execution && strcmp(stage, "optimized")) {
        PyErr_Format(PyExc_ValueError,
                     "stage is '%s', expected post_processed, optimized_pre_grad, optimized or execution_model", stage);
        return NULL;
    }
    if (!program) {
        PyErr_Format(PyExc_RuntimeError, "no program has been built yet");
        return NULL;
    }
    if (execution) return program->graph;
    ont_status status = ont_program_stage(program, loaded, !pre_grad, owned);
    if (status != ONT_OK) ont_raise(self->state, status);
    return *owned;
}

static PyObject *session_save(PyObject *object, PyObject *args)
{
    ont_session_object *self = (ont_session_object *)object;
    const char *stage = "execution_model";
    if (!PyArg_ParseTuple(args, "|s:save", &stage) || !ont_session_of(object)) return NULL;
    ont_graph *owned;
    ont_program *program = ont_session_ref_program(self->session);
    const ont_graph *g = stage_graph(self, stage, program, &owned);
    PyObject *result = NULL;
    if (g) {
        uint8_t *bytes = NULL;
        size_t size = 0;
        ont_status status = ont_onnx_save(g, &bytes, &size);
        result = status == ONT_OK ? PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)size)
                                  : ont_raise(self->state, status);
        ont_free(bytes);
        ont_graph_destroy(owned);
    }
    ont_program_unref(program);
    return result;
}

static PyObject *session_kernels(PyObject *object, PyObject *unused)
{
    (void)unused;
    const ont_session *session = ont_session_of(object);
    if (!session) return NULL;
    ont_program *p = ont_session_ref_program(session); /* what is made below may run Python, and evict it */
    PyObject *list = PyList_New(0);
    for (uint32_t t = 0; list && p && t < p->n_steps; t++) {
        const ont_step *step = &p->steps[t];
        PyObject *item = Py_BuildValue("ssO", step->node->name, ont_step_kernel(step)->name,
                                       step->node->backward ? Py_True : Py_False);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    ont_program_unref(p);
    return list;
}

static PyObject *session_subgraphs(PyObject *object, PyObject *unused)
{
    (void)unused;
    const ont_session *session = ont_session_of(object);
    if (!session) return NULL;
    ont_program *p = ont_session_ref_program(session);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && p && i < p->graph->subgraphs.n_clusters; i++) {
        const ont_recompute_cluster *c = &p->graph->subgraphs.clusters[i];
        PyObject *item = Py_BuildValue("sOIIn", c->subgraph, c->compromise ? Py_True : Py_False, c->frequency,
                                       c->applied, (Py_ssize_t)c->bytes);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    ont_program_unref(p);
    return list;
}

static PyObject *session_graphs(PyObject *object, PyObject *unused)
{
    (void)unused;
    const ont_session *session = ont_session_of(object);
    if (!session) return NULL;
    ont_program *p = ont_session_ref_program(session);
    PyObject *list = PyList_New(0);
    for (int phase = 0; list && p && p->device && phase < 1 + p->differentiable; phase++) {
        const ont_phase_stats *n = &p->phase_stats[phase];
        PyObject *item = Py_BuildValue("sKKs", phase ? "backward" : "forward", (unsigned long long)n->captured,
                                       (unsigned long long)n->launched, n->reason);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    ont_program_unref(p);
    return list;
}

static PyMethodDef session_methods[] = {
    {"forward", (PyCFunction)(void (*)(void))session_forward, METH_VARARGS | METH_KEYWORDS,
     "forward(tensors, grad_mask, seed=0) -> (outputs, run)"},
    {"step", ont_session_object_step, METH_VARARGS,
     "step(tensors, grad_mask, seed, loss, gradient, update=None[, receivers, ready, reduce]) -> (outputs, what the "
     "update has returned)"},
    {"plan", ont_session_plan, METH_VARARGS, "plan(shapes, grad_mask) -> the memory plan, without a run"},
    {"stats", session_stats, METH_NOARGS, "stats() -> dict of counts, seconds and bytes"},
    {"text", session_text, METH_VARARGS, "text(stage='loaded') -> the graph as text"},
    {"save", session_save, METH_VARARGS, "save(stage='execution_model') -> a ModelProto as bytes"},
    {"kernels", session_kernels, METH_NOARGS, "kernels() -> [(node, kernel, backward)] of the latest program"},
    {"subgraphs", session_subgraphs, METH_NOARGS,
     "subgraphs() -> [(subgraph, compromise, frequency, applied, bytes)] that the latest program could recompute"},
    {"graphs", session_graphs, METH_NOARGS,
     "graphs() -> [(phase, recorded, replayed, reason)] of the latest program, on a device"},
    {"timeline", ont_session_timeline, METH_NOARGS,
     "timeline() -> [(node, operator, kernel, shape, backward, start, end)] of the latest program's timed run"},
    {"timings", ont_session_timings, METH_NOARGS, "timings() -> what was recorded of runs since the last call"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef session_getset[] = {
    {"inputs", session_inputs, NULL, "(name, dtype, dims) of every graph input", NULL},
    {"outputs", session_outputs, NULL, "(name, dtype, dims) of every graph output", NULL},
    {"random", session_random, NULL, "whether forward() wants a seed", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyType_Spec ont_session_spec = {
    .name = "onnxtrain._C.Session",
    .basicsize = sizeof(ont_session_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = (PyType_Slot[]){{Py_tp_new, session_new},
                             {Py_tp_init, session_init},
                             {Py_tp_dealloc, session_dealloc},
                             {Py_tp_methods, session_methods},
                             {Py_tp_getset, session_getset},
                             {Py_tp_doc, "One exported graph and the programs specialised from it."},
                             {0, NULL}},
};
