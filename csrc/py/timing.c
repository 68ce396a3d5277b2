/*
 * Times of steps as Python objects: Session.timeline() of the latest run, Session.timings() of every run, and
 * set_ranges(), by which torch.profiler sees each step while it runs. onnxtrain/_timing.py uses them.
 */
#include "py/timing.h" /* Python.h before any system header */

#include <stdio.h>

#include "run/timing.h"

static size_t value_bytes(const ont_value *value)
{
    size_t bytes = 0;
    return value && ont_shape_bytes(&value->shape, value->dtype, &bytes) == ONT_OK ? bytes : 0;
}

/* Operands and results, each counted once. What a kernel reads several times, or not at all, is not known here. */
static size_t step_bytes(const ont_step *step)
{
    size_t sum = 0;
    for (uint32_t i = 0; i < step->node->n_inputs; i++) sum += value_bytes(ont_node_in(step->node, i));
    for (uint32_t i = 0; i < step->node->n_outputs; i++) sum += value_bytes(ont_node_out(step->node, i));
    return sum;
}

static const char *result_shape(const ont_node *node, char text[ONT_SHAPE_TEXT])
{
    *text = 0;
    return ont_node_out(node, 0) ? ont_shape_text(&ont_node_out(node, 0)->shape, text) : text;
}

PyObject *ont_session_timeline(PyObject *object, PyObject *unused)
{
    (void)unused;
    const ont_session *session = ont_session_of(object);
    if (!session) return NULL;
    ont_program *p = ont_session_ref_program(session); /* what is made below may run Python, and evict it */
    PyObject *list = PyList_New(0);
    for (uint32_t t = 0; list && p && t < p->n_steps; t++) {
        const ont_node *node = p->steps[t].node;
        const char *kernel = ont_step_kernel(&p->steps[t])->name;
        char shape[ONT_SHAPE_TEXT];
        PyObject *item = Py_BuildValue("ssssOdd", ont_node_origin(node)->name, node->op_type, kernel,
                                       result_shape(node, shape), node->backward ? Py_True : Py_False, p->times[t][0],
                                       p->times[t][1]);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    ont_program_unref(p);
    return list;
}

static PyObject *describe_steps(const ont_phase_record *record)
{
    PyObject *list = PyList_New(0);
    for (uint32_t t = record->first; list && t < record->last; t++) {
        const ont_step *step = &record->program->steps[t];
        const double *times = record->times[t - record->first];
        const char *kernel = ont_step_kernel(step)->name;
        char shape[ONT_SHAPE_TEXT];
        PyObject *item =
            Py_BuildValue("ssssnOdd", ont_node_origin(step->node)->name, step->node->op_type, kernel,
                          result_shape(step->node, shape), (Py_ssize_t)step_bytes(step),
                          step->node->backward ? Py_True : Py_False, times[0], times[1]);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

PyObject *ont_session_timings(PyObject *object, PyObject *unused)
{
    (void)unused;
    ont_session *session = ont_session_of(object);
    if (!session) return NULL;
    ont_phase_record *records = ont_timing_take(ont_session_pool(session));
    PyObject *list = PyList_New(0);
    for (const ont_phase_record *record = records; list && record; record = record->next) {
        PyObject *steps = describe_steps(record);
        PyObject *item = steps ? Py_BuildValue("OKKdddN", record->first ? Py_True : Py_False,
                                               (unsigned long long)record->lost, (unsigned long long)record->thread,
                                               record->begin, record->end, record->deliver_seconds, steps)
                               : NULL;
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    ont_timing_free(records);
    return list;
}

PyObject *ont_py_set_timing(PyObject *module, PyObject *args)
{
    (void)module;
    int on, record = 0;
    if (!PyArg_ParseTuple(args, "p|p:set_timing", &on, &record)) return NULL;
    ont_timing_set(on, record);
    Py_RETURN_NONE;
}

/* ---- ranges of torch.profiler ---- */

static PyObject *make_range; /* under the GIL; NULL: no ranges */

/* Makes and enters a range; a failure is reported and leaves the run alone. */
static void *range_begin(const ont_step *step, bool backward)
{
    char name[256];
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *trace, *range = NULL; /* a range must not disturb a pending exception */
    PyErr_Fetch(&type, &value, &trace);
    if (step)
        snprintf(name, sizeof name, "%s%s", ont_node_origin(step->node)->name, backward ? " (backward)" : "");
    else
        snprintf(name, sizeof name, "onnxtrain %s", backward ? "backward" : "forward");
    if (make_range) {
        PyObject *text = ont_text(name), *make = Py_NewRef(make_range);
        range = text ? PyObject_CallFunctionObjArgs(make, text, NULL) : NULL;
        PyObject *entered = range ? PyObject_CallMethod(range, "__enter__", NULL) : NULL;
        if (!entered) {
            Py_CLEAR(range);
            PyErr_WriteUnraisable(make);
        }
        Py_XDECREF(entered);
        Py_XDECREF(text);
        Py_DECREF(make);
    }
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
    return range;
}

static void range_end(void *begun)
{
    PyObject *range = begun, *type, *value, *trace;
    if (!range) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_Fetch(&type, &value, &trace);
    PyObject *result = PyObject_CallMethod(range, "__exit__", "OOO", Py_None, Py_None, Py_None);
    if (!result) PyErr_WriteUnraisable(range);
    Py_XDECREF(result);
    Py_DECREF(range);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
}

PyObject *ont_py_set_ranges(PyObject *module, PyObject *make)
{
    (void)module;
    static const ont_step_hook hook = {range_begin, range_end};
    if (make != Py_None && !PyCallable_Check(make)) {
        PyErr_SetString(PyExc_TypeError, "set_ranges() takes a function of a name, or None");
        return NULL;
    }
    PyObject *before = make_range;
    make_range = make == Py_None ? NULL : Py_NewRef(make);
    Py_XDECREF(before);
    ont_timing_set_hook(make_range ? &hook : NULL);
    Py_RETURN_NONE;
}
