/*
 * The type Watch, an identity guard: whether dicts, lists and sets still hold the same objects as when it was created.
 * ORTModule calls it in every step to check that a module's attributes are those that the graph was exported for, so it
 * compares pointers and runs no Python code (except for sets). Python decides what a difference means.
 */
#include "py/python.h"

#include "base/alloc.h"

typedef struct watch_entry {
    PyObject *container;
    PyObject *keys;   /* tuple: only these keys of a dict; NULL: all of it */
    PyObject *values; /* tuple; for a whole dict: key, value, key, value ... */
    PyObject *absent; /* stands for an absent key; borrowed from the Watch */
} watch_entry;

typedef struct watch_object {
    PyObject_HEAD
    watch_entry *entries;
    Py_ssize_t n;
    PyObject *absent;
} watch_object;

/* 1: same, 0: different, -1: exception. For lists. */
static int same_sequence(const watch_entry *e)
{
    Py_ssize_t n = PyList_Size(e->container);
    if (n != PyTuple_Size(e->values)) return 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (PyList_GetItem(e->container, i) != PyTuple_GetItem(e->values, i)) return 0;
    return 1;
}

static int same_keys(const watch_entry *e)
{
    Py_ssize_t n = PyTuple_Size(e->keys);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *now = PyDict_GetItemWithError(e->container, PyTuple_GetItem(e->keys, i));
        if (!now && PyErr_Occurred()) return -1;
        if ((now ? now : e->absent) != PyTuple_GetItem(e->values, i)) return 0;
    }
    return 1;
}

static int same_dict(const watch_entry *e)
{
    if (2 * PyDict_Size(e->container) != PyTuple_Size(e->values)) return 0;
    PyObject *key, *value;
    Py_ssize_t at = 0, i = 0;
    while (PyDict_Next(e->container, &at, &key, &value)) {
        if (key != PyTuple_GetItem(e->values, i) || value != PyTuple_GetItem(e->values, i + 1)) return 0;
        i += 2;
    }
    return 1;
}

static int same_entry(const watch_entry *e)
{
    if (PyDict_Check(e->container)) return e->keys ? same_keys(e) : same_dict(e);
    if (PyList_Check(e->container)) return same_sequence(e);
    return PyObject_RichCompareBool(e->container, e->values, Py_EQ);
}

static PyObject *watch_changed(PyObject *object, PyObject *unused)
{
    (void)unused;
    watch_object *self = (watch_object *)object;
    for (Py_ssize_t i = 0; i < self->n; i++) {
        int same = same_entry(&self->entries[i]);
        if (same < 0) return NULL;
        if (!same) return PyLong_FromSsize_t(i);
    }
    return PyLong_FromLong(-1);
}

static int entry_init(watch_entry *e, PyObject *item, PyObject *absent)
{
    PyObject *container, *keys, *values;
    if (!PyArg_ParseTuple(item, "OOO:Watch", &container, &keys, &values)) return -1;
    bool dict = PyDict_Check(container), list = PyList_Check(container);
    if ((dict || list) && !PyTuple_Check(values)) return PyErr_SetString(PyExc_TypeError, "values must be a tuple"), -1;
    if (!dict && !list && PyTuple_Check(values))
        return PyErr_SetString(PyExc_TypeError, "a Watch compares dicts, lists and sets"), -1;
    if (keys != Py_None && (!dict || !PyTuple_Check(keys) || PyTuple_Size(keys) != PyTuple_Size(values)))
        return PyErr_SetString(PyExc_TypeError, "keys must be a tuple as long as values, of a dict"), -1;
    *e = (watch_entry){Py_NewRef(container), keys == Py_None ? NULL : Py_NewRef(keys), Py_NewRef(values), absent};
    return 0;
}

static int watch_clear(PyObject *object)
{
    watch_object *self = (watch_object *)object;
    watch_entry *entries = self->entries;
    Py_ssize_t n = self->n;
    self->entries = NULL;
    self->n = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_XDECREF(entries[i].container);
        Py_XDECREF(entries[i].keys);
        Py_XDECREF(entries[i].values);
    }
    ont_free(entries);
    Py_CLEAR(self->absent);
    return 0;
}

static int watch_traverse(PyObject *object, visitproc visit, void *arg)
{
    watch_object *self = (watch_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->absent);
    for (Py_ssize_t i = 0; i < self->n; i++) {
        Py_VISIT(self->entries[i].container);
        Py_VISIT(self->entries[i].keys);
        Py_VISIT(self->entries[i].values);
    }
    return 0;
}

static int watch_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    watch_object *self = (watch_object *)object;
    char *names[] = {"entries", "absent", NULL};
    PyObject *entries, *absent;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:Watch", names, &entries, &absent)) return -1;
    PyObject *tuple = PySequence_Tuple(entries);
    if (!tuple) return -1;
    watch_clear(object);
    Py_ssize_t n = PyTuple_Size(tuple);
    self->absent = Py_NewRef(absent);
    self->entries = ont_calloc((size_t)n + 1, sizeof *self->entries);
    if (!self->entries) PyErr_NoMemory();
    while (self->entries && self->n < n &&
           entry_init(&self->entries[self->n], PyTuple_GetItem(tuple, self->n), absent) == 0)
        self->n++;
    Py_DECREF(tuple);
    return self->entries && self->n == n ? 0 : -1;
}

static void watch_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    watch_clear(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef watch_methods[] = {
    {"changed", watch_changed, METH_NOARGS, "changed() -> index of the first entry that differs, or -1"},
    {NULL, NULL, 0, NULL},
};

PyType_Spec ont_watch_spec = {
    .name = "onnxtrain._C.Watch",
    .basicsize = sizeof(watch_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = (PyType_Slot[]){{Py_tp_init, watch_init},
                             {Py_tp_dealloc, watch_dealloc},
                             {Py_tp_traverse, watch_traverse},
                             {Py_tp_clear, watch_clear},
                             {Py_tp_methods, watch_methods},
                             {Py_tp_doc, "Whether containers still hold the same objects."},
                             {0, NULL}},
};
