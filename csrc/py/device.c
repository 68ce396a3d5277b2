/*
 * Devices by name. Plugins allocate from torch's caching allocator through DLPack's exchange table, which needs no GIL,
 * and run on torch's current stream.
 */
#include "py/device.h" /* Python.h before any system header */

#include <stdlib.h>
#include <string.h>

#include "device/plugin.h"
#include "ops/plugin_api.h"
#include "py/torch_abi.h"
#include "run/replay.h"

enum { MAX_OPENED = 4 };

static const ont_plugin *opened[MAX_OPENED];
static int n_opened;
static ont_allocator allocator;

static void keep_error(void *context, const char *kind, const char *message)
{
    (void)context;
    ont_set_error("%s: %s", kind, message);
}

/*
 * A tensor of torch's that can be given to the caller, or if torch's shim lacks something, a uint8 tensor of DLPack. If
 * the first one fails for lack of memory, so does the second, which says why.
 */
static ont_status take(void *context, int32_t type, int32_t id, size_t bytes, ont_dtype dtype, ont_memory *memory)
{
    const dlpack_exchange_api *api = context;
    if (ont_torch_empty(type, id, bytes, dtype, memory)) return ONT_OK;
    int64_t shape = (int64_t)bytes, stride = 1;
    dlpack_tensor prototype = {
        .device = {type, id}, .ndim = 1, .dtype = {1, 8, 1}, .shape = &shape, .strides = &stride};
    dlpack_managed *managed = NULL;
    if (api->allocate(&prototype, &managed, NULL, keep_error) < 0) return ONT_ENOMEM;
    *memory = (ont_memory){.data = (char *)managed->tensor.data + managed->tensor.byte_offset, .owner = managed};
    return ONT_OK;
}

static void give(ont_memory *memory)
{
    dlpack_managed *managed = memory->owner;
    if (memory->tensor)
        ont_torch_delete(memory->tensor);
    else if (managed->deleter)
        managed->deleter(managed);
}

static ont_status current_stream(void *context, int32_t type, int32_t id, void **stream)
{
    const dlpack_exchange_api *api = context;
    if (api->current_stream(type, id, stream) < 0)
        return ont_fail(ONT_ESTATE, "torch gives no current stream of device %d", id);
    return ONT_OK;
}

void ont_device_init(const ont_state *state)
{
    if (!state->dlpack || !state->dlpack->allocate || !state->dlpack->current_stream) return;
    allocator = (ont_allocator){(void *)(uintptr_t)state->dlpack, take, give, current_stream, 0, 0};
    ont_plugin_set_allocator(&allocator);
}

PyObject *ont_set_graphs(PyObject *module, PyObject *args)
{
    (void)module;
    int on;
    if (!PyArg_ParseTuple(args, "p:set_graphs", &on)) return NULL;
    ont_replay_enable(on);
    Py_RETURN_NONE;
}

PyObject *ont_set_tf32(PyObject *module, PyObject *args)
{
    (void)module;
    int products, convolutions;
    if (!PyArg_ParseTuple(args, "pp:set_tf32", &products, &convolutions)) return NULL;
    allocator.tf32 = products;
    allocator.tf32_conv = convolutions;
    Py_RETURN_NONE;
}

static ont_status open_path(const char *path, const ont_plugin **plugin)
{
    ONT_TRY(ont_plugin_get(path, &ont_core_table, plugin));
    for (int i = 0; i < n_opened; i++)
        if (opened[i] == *plugin) return ONT_OK;
    if (n_opened == MAX_OPENED) return ont_fail(ONT_EUNSUPPORTED, "more than %d plugins", MAX_OPENED);
    opened[n_opened++] = *plugin;
    return ONT_OK;
}

/* UnsupportedError for a GPU that the plugin leaves out, ValueError for a device that does not exist. */
static int raise_missing(const ont_state *state, const char *name)
{
    for (int i = 0; i < n_opened; i++) {
        const char *left_out = opened[i]->left_out;
        size_t length = left_out ? strcspn(left_out, " ") : 0; /* "cuda:0 has ..." */
        if (!left_out || strlen(name) != length || memcmp(left_out, name, length)) continue;
        ont_raise(state, ont_fail(ONT_EUNSUPPORTED, "%s", left_out));
        return -1;
    }
    PyErr_Format(PyExc_ValueError, "there is no device '%s'", name);
    return -1;
}

static const ont_device *find(const char *kind, size_t length, long id)
{
    for (int i = 0; i < n_opened; i++)
        for (int k = 0; k < opened[i]->n_devices; k++) {
            const ont_device *device = opened[i]->devices[k];
            if (strlen(device->ops->name) == length && !memcmp(device->ops->name, kind, length) && device->id == id)
                return device;
        }
    return NULL;
}

int ont_device_by_name(const ont_state *state, const char *name, const ont_device **device)
{
    const char *colon = strchr(name, ':');
    char *end = NULL;
    size_t length = colon ? (size_t)(colon - name) : strlen(name);
    long id = colon ? strtol(colon + 1, &end, 10) : 0;
    *device = NULL;
    if (!length || !strcmp(name, "cpu")) return 0;
    if (colon && (end == colon + 1 || *end)) {
        PyErr_Format(PyExc_ValueError, "device is '%s', expected a kind and a number as 'cuda:0'", name);
        return -1;
    }
    *device = find(name, length, id);
    if (!*device && length == 4 && !memcmp(name, "cuda", 4)) {
        const ont_plugin *plugin;
        ont_status status = open_path(ont_plugin_cuda_path(), &plugin);
        if (status != ONT_OK) {
            ont_raise(state, ont_context(ONT_EUNSUPPORTED, "device '%s'", name));
            return -1;
        }
        *device = find(name, length, id);
    }
    return *device ? 0 : raise_missing(state, name);
}

static PyObject *describe(const ont_plugin *plugin)
{
    PyObject *devices = PyList_New(0);
    for (int i = 0; devices && i < plugin->n_devices; i++) {
        PyObject *item = PyUnicode_FromFormat("%s:%d", plugin->devices[i]->ops->name, (int)plugin->devices[i]->id);
        if (!item || PyList_Append(devices, item) < 0) Py_CLEAR(devices);
        Py_XDECREF(item);
    }
    return devices ? Py_BuildValue("{ss sz sz sN}", "about", plugin->about, "missing", plugin->missing, "left_out",
                                   plugin->left_out, "devices", devices)
                   : NULL;
}

PyObject *ont_open_plugin(PyObject *module, PyObject *args)
{
    const char *path = NULL;
    const ont_plugin *plugin;
    if (!PyArg_ParseTuple(args, "|z:open_plugin", &path)) return NULL;
    ont_status status = open_path(path ? path : ont_plugin_cuda_path(), &plugin);
    return status == ONT_OK ? describe(plugin) : ont_raise(ont_get_state(module), status);
}

static PyObject *names_of(const ont_kernel_list *list)
{
    PyObject *names = PyList_New(0);
    for (uint32_t k = 0; names && k < list->n_kernels; k++) {
        PyObject *name = PyUnicode_FromString(list->kernels[k].name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyObject *ont_device_operators(PyObject *module, PyObject *args)
{
    const char *name;
    const ont_device *device;
    if (!PyArg_ParseTuple(args, "s:device_operators", &name)) return NULL;
    if (ont_device_by_name(ont_get_state(module), name, &device) < 0) return NULL;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && device && i < device->n_lists; i++) {
        PyObject *kernels = names_of(&device->lists[i]);
        PyObject *item =
            kernels ? Py_BuildValue("(ssN)", device->lists[i].domain, device->lists[i].name, kernels) : NULL;
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}
