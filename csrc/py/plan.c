/*
 * Session.plan(): the memory plan of the program of some input shapes, as Python objects. Builds the program and runs
 * nothing, so that a model is planned without its tensors.
 */
#include "py/call.h" /* Python.h before any system header */

#include "base/alloc.h"
#include "passes/cost.h"

static PyObject *describe_lifetimes(const ont_program *p)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < p->plan.n_lifetimes; i++) {
        const ont_plan_lifetime *l = &p->plan.lifetimes[i];
        const ont_node *node = p->graph->values[l->value]->def;
        PyObject *item = Py_BuildValue("ssOnII", ont_node_origin(node)->name, node->op_type,
                                       node->backward ? Py_True : Py_False, (Py_ssize_t)l->bytes, l->first, l->last);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *describe_steps(const ont_program *p)
{
    PyObject *list = PyList_New(0);
    for (uint32_t t = 0; list && t < p->n_steps; t++) {
        const ont_node *node = p->steps[t].node;
        PyObject *item = Py_BuildValue("ssOn", ont_node_origin(node)->name, node->op_type,
                                       node->backward ? Py_True : Py_False, (Py_ssize_t)p->steps[t].work_bytes);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* Bytes of graph outputs [first, last): of those that are blocks of the pool. */
static Py_ssize_t block_bytes(const ont_program *p, uint32_t first, uint32_t last)
{
    size_t sum = 0, bytes;
    for (uint32_t i = first; i < last; i++) {
        const ont_value *v = p->graph->outputs[i];
        if (p->plan.deliver_before[i] == ONT_PLAN_BLOCK && ont_shape_bytes(&v->shape, v->dtype, &bytes) == ONT_OK)
            sum += bytes;
    }
    return (Py_ssize_t)sum;
}

static PyObject *describe(const ont_program *p)
{
    PyObject *lifetimes = describe_lifetimes(p), *steps = lifetimes ? describe_steps(p) : NULL;
    if (!steps) {
        Py_XDECREF(lifetimes);
        return NULL;
    }
    uint32_t n = p->grads.n_forward_outputs;
    return Py_BuildValue("{sn sn sI sn sn sI sn sd sn sN sN}", "slab_bytes", (Py_ssize_t)p->plan.slab_bytes,
                         "lower_bound", (Py_ssize_t)p->plan.lower_bound, "forward_steps", p->split, "output_bytes",
                         block_bytes(p, 0, n), "gradient_bytes", block_bytes(p, n, p->graph->n_outputs),
                         "recomputed_nodes", p->graph->recompute.nodes, "recomputed_bytes",
                         (Py_ssize_t)p->graph->recompute.bytes, "recomputed_share",
                         ont_recompute_cost_fraction(p->graph), "budget_bytes", (Py_ssize_t)p->budget_bytes,
                         "lifetimes", lifetimes, "steps", steps);
}

/* Reads one shape into `dims`, which has room for ONT_MAX_RANK; returns its rank, or -1 with an exception. */
static int read_shape(PyObject *object, int64_t *dims)
{
    PyObject *tuple = PySequence_Tuple(object);
    if (!tuple) return -1;
    Py_ssize_t rank = PyTuple_Size(tuple);
    if (rank > ONT_MAX_RANK) PyErr_Format(PyExc_ValueError, "a shape has rank %zd, at most %d", rank, ONT_MAX_RANK);
    for (Py_ssize_t i = 0; i < rank && !PyErr_Occurred(); i++) {
        dims[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (dims[i] < 0 && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a shape has a negative size");
    }
    Py_DECREF(tuple);
    return PyErr_Occurred() ? -1 : (int)rank;
}

static PyObject *plan(ont_session_object *self, const ont_tensor_view *views, const uint8_t *wants)
{
    ont_probed_values probed = {0};
    ont_program *program;
    ont_status status = ont_session_program(self->session, views, wants, &probed, &program);
    if (status == ONT_OK && program->probe)
        status = ont_fail(ONT_EUNSUPPORTED, "shapes of this model depend on the contents of its inputs: only a step "
                          "with them has a plan");
    if (status != ONT_OK) return ont_raise(self->state, status);
    ont_program_ref(program); /* what describe() makes may run Python, and evict it */
    PyObject *result = describe(program);
    ont_program_unref(program);
    return result;
}

PyObject *ont_session_plan(PyObject *object, PyObject *args)
{
    ont_session_object *self = (ont_session_object *)object;
    PyObject *shapes, *result = NULL;
    const char *mask;
    Py_ssize_t mask_size;
    if (!PyArg_ParseTuple(args, "Oy#:plan", &shapes, &mask, &mask_size)) return NULL;
    if (!self->session) return PyErr_Format(PyExc_RuntimeError, "this Session was never initialised");
    const ont_graph *g = ont_session_graph(self->session);
    Py_ssize_t n = (Py_ssize_t)g->n_inputs;
    if (mask_size != n) return PyErr_Format(PyExc_ValueError, "grad_mask has %zd bytes, expected %zd", mask_size, n);
    PyObject *tuple = ont_sequence(shapes, n, "shapes");
    if (!tuple) return NULL;
    ont_tensor_view *views = ont_calloc((size_t)n + 1, sizeof *views);
    int64_t(*dims)[ONT_MAX_RANK] = ont_calloc((size_t)n + 1, sizeof *dims);
    bool all = views && dims;
    if (!all) PyErr_NoMemory();
    for (Py_ssize_t i = 0; all && i < n; i++) {
        views[i] = (ont_tensor_view){.dtype = ont_dtype_carrier(g->inputs[i]->dtype), .dims = dims[i],
                                     .rank = read_shape(PyTuple_GetItem(tuple, i), dims[i])};
        all = views[i].rank >= 0;
    }
    if (all) result = plan(self, views, (const uint8_t *)mask);
    ont_free(views);
    ont_free(dims);
    Py_DECREF(tuple);
    return result;
}
