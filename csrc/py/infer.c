/*
 * Session.infer(): types of all values in terms of the symbolic dims of the inputs, as Python objects. See
 * run/symbolic.h.
 */
#include "base/arena.h"
#include "py/python.h"
#include "run/symbolic.h"

static PyObject *dims_of(const ont_symbolic *v)
{
    if (!v->has_shape) return Py_NewRef(Py_None);
    PyObject *dims = PyTuple_New(v->rank);
    for (int i = 0; dims && i < v->rank; i++) {
        const ont_symbolic_dim *dim = &v->dims[i];
        PyObject *item = dim->size >= 0 ? PyLong_FromLongLong(dim->size)
                         : dim->text   ? PyUnicode_FromString(dim->text)
                                       : Py_NewRef(Py_None);
        if (!item || PyTuple_SetItem(dims, i, item) < 0) Py_CLEAR(dims);
    }
    return dims;
}

PyObject *ont_session_infer(PyObject *object, PyObject *unused)
{
    (void)unused;
    const ont_session_object *self = (const ont_session_object *)object;
    ont_arena arena;
    ont_symbolic *values;
    uint32_t n;
    ont_arena_init(&arena);
    ont_status status = ont_infer_symbolic(ont_session_graph(self->session), &arena, &values, &n);
    PyObject *result = status == ONT_OK ? PyDict_New() : ont_raise(self->state, status);
    for (uint32_t i = 0; result && status == ONT_OK && i < n; i++) {
        PyObject *item = Py_BuildValue("sN", ont_dtype_name(values[i].dtype), dims_of(&values[i]));
        if (!item || PyDict_SetItemString(result, values[i].name, item) < 0) Py_CLEAR(result);
        Py_XDECREF(item);
    }
    ont_arena_deinit(&arena);
    return result;
}
