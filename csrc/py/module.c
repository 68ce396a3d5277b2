/*
 * The extension module: types, functions that describe the build, test hooks, and the log sink.
 */
#include "py/device.h" /* Python.h before any system header */

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/denormals.h"
#include "base/log.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "device/gemm_native.h"
#include "device/half_product.h"
#include "passes/options.h"
#include "py/comm.h"
#include "py/dist.h"
#include "py/grads.h"
#include "py/timing.h"
#include "py/torch_abi.h"
#include "py/bind_args.h"
#include "simd/simd.h"

#ifndef ONT_VERSION
#define ONT_VERSION "0.0.0"
#endif

ont_state *ont_get_state(PyObject *module)
{
    return PyModule_GetState(module);
}

/* Passes a line of the core to logging.getLogger("onnxtrain"); acquires the GIL, so it may be called on any thread. */
static void log_to_python(ont_log_level level, const char *line)
{
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *trace; /* logging must not disturb a pending exception */
    PyErr_Fetch(&type, &value, &trace);
    PyObject *logging = PyImport_ImportModule("logging");
    PyObject *logger = logging ? PyObject_CallMethod(logging, "getLogger", "s", "onnxtrain") : NULL;
    PyObject *result = logger ? PyObject_CallMethod(logger, "log", "isN", (int)level, "%s", ont_text(line)) : NULL;
    Py_XDECREF(result);
    Py_XDECREF(logger);
    Py_XDECREF(logging);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
}

static PyObject *set_log_level(PyObject *module, PyObject *args)
{
    (void)module;
    int level;
    if (!PyArg_ParseTuple(args, "i:set_log_level", &level)) return NULL;
    ont_log_install(log_to_python, (ont_log_level)level);
    Py_RETURN_NONE;
}

static PyObject *operators(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    size_t n;
    const ont_op *const *all = ont_op_all(&n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *kernels = PyList_New(0);
        for (uint32_t k = 0; kernels && k < all[i]->n_kernels; k++) {
            PyObject *name = PyUnicode_FromString(all[i]->kernels[k].name);
            if (!name || PyList_Append(kernels, name) < 0) Py_CLEAR(kernels);
            Py_XDECREF(name);
        }
        PyObject *item = !kernels ? NULL
                                  : Py_BuildValue("{ss ss si sN sN sN sN sN sN sN sz}", "domain", all[i]->domain,
                                                  "name", all[i]->name, "since", all[i]->since, "grad",
                                                  PyBool_FromLong(all[i]->grad != NULL), "containers",
                                                  PyBool_FromLong(all[i]->flags & ONT_OP_CONTAINERS), "no_grad",
                                                  PyBool_FromLong(all[i]->flags & ONT_OP_NO_GRAD), "view",
                                                  PyBool_FromLong(all[i]->flags & ONT_OP_VIEW), "expands",
                                                  PyBool_FromLong(all[i]->expand != NULL), "random",
                                                  PyBool_FromLong(all[i]->flags & ONT_OP_RANDOM), "kernels", kernels,
                                                  "attributes", all[i]->attributes);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* Joins the names of a sequence by commas for disable_names(). */
static PyObject *disable(PyObject *module, PyObject *names, ont_status (*disable_names)(const char *))
{
    PyObject *comma = PyUnicode_FromString(",");
    PyObject *joined = comma ? PyUnicode_Join(comma, names) : NULL;
    PyObject *bytes = joined ? PyUnicode_AsUTF8String(joined) : NULL;
    Py_XDECREF(comma);
    Py_XDECREF(joined);
    if (!bytes) return NULL;
    ont_status status = disable_names(PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    if (status != ONT_OK) return ont_raise(ont_get_state(module), status);
    Py_RETURN_NONE;
}

static PyObject *disable_kernels(PyObject *module, PyObject *names)
{
    return disable(module, names, ont_op_disable_kernels);
}

static PyObject *disable_passes(PyObject *module, PyObject *names)
{
    return disable(module, names, ont_passes_disable);
}

static PyObject *live_blocks(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLongLong(ont_alloc_live());
}

static PyObject *fail_allocation_after(PyObject *module, PyObject *args)
{
    (void)module;
    long long countdown;
    if (!PyArg_ParseTuple(args, "L:fail_allocation_after", &countdown)) return NULL;
    bool fired = ont_alloc_fail_fired();
    ont_alloc_fail_after(countdown);
    return PyBool_FromLong(fired);
}

static PyObject *build_info(PyObject *module, PyObject *unused)
{
    (void)unused;
    size_t n, n_backends;
    ont_op_all(&n);
    const ont_gemm_backend *backends = ont_gemm_backends(&n_backends);
    PyObject *gemm = PyList_New(0);
    for (size_t i = 0; gemm && i <= n_backends; i++) {
        bool ours = i == n_backends;
        if (ours ? !ont_gemm_native_kernel(ONT_FLOAT32)
                 : !backends[i].available(ONT_FLOAT32))
            continue;
        PyObject *name = PyUnicode_FromString(ours ? "native" : backends[i].name);
        if (!name || PyList_Append(gemm, name) < 0) Py_CLEAR(gemm);
        Py_XDECREF(name);
    }
    if (!gemm) return NULL;
    return Py_BuildValue("{ss sn si sO ss sN sO sO}", "version", ONT_VERSION, "operators", (Py_ssize_t)n, "threads",
                         ont_parallel_threads(), "dlpack_exchange", ont_get_state(module)->dlpack ? Py_True : Py_False,
                         "isa", ont_simd()->isa, "gemm", gemm, "split_products",
                         ont_simd_gemm_bf16x3() ? Py_True : Py_False, "bfloat16_products",
                         ont_half_product_refuses(ONT_BFLOAT16) ? Py_False : Py_True);
}

static PyObject *set_flush_denormals(PyObject *module, PyObject *args)
{
    (void)module;
    int on;
    if (!PyArg_ParseTuple(args, "p:set_flush_denormals", &on)) return NULL;
    ont_denormals_enable(on);
    Py_RETURN_NONE;
}

static PyObject *set_deterministic(PyObject *module, PyObject *args)
{
    (void)module;
    int on;
    if (!PyArg_ParseTuple(args, "p:set_deterministic", &on)) return NULL;
    ont_gemm_set_deterministic(on);
    Py_RETURN_NONE;
}

static PyObject *set_matmul_precision(PyObject *module, PyObject *args)
{
    (void)module;
    static const char *const names[] = {"highest", "high", "medium"};
    const char *name;
    int everywhere = 0;
    if (!PyArg_ParseTuple(args, "s|p:set_matmul_precision", &name, &everywhere)) return NULL;
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i])) continue;
        ont_set_matmul_precision((ont_matmul_precision)i, everywhere);
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "precision is '%s', expected highest, high or medium", name);
}

static PyObject *recompute_everywhere(PyObject *module, PyObject *args)
{
    (void)module;
    int on;
    if (!PyArg_ParseTuple(args, "p:recompute_everywhere", &on)) return NULL;
    ont_recompute_everywhere(on);
    Py_RETURN_NONE;
}

static PyObject *measured_products(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    char *text = ont_tuner_export();
    PyObject *result = text ? ont_text(text) : PyErr_NoMemory();
    ont_free(text);
    return result;
}

static PyObject *remember_products(PyObject *module, PyObject *args)
{
    (void)module;
    const char *text;
    if (!PyArg_ParseTuple(args, "s:remember_products", &text)) return NULL;
    return PyLong_FromLong(ont_tuner_import(text));
}

static PyMethodDef methods[] = {
    {"measured_products", measured_products, METH_NOARGS, "measured_products() -> which kernels won, as text"},
    {"remember_products", remember_products, METH_VARARGS,
     "remember_products(text) -> how many kinds of products it decides"},
    {"signature", ont_signature, METH_O, "signature(args) -> bytes of the arguments' kinds, or None"},
    {"gather", ont_gather, METH_VARARGS, "gather(sources, leaves, grad_enabled) -> (tensors, which want gradients)"},
    {"build_info", build_info, METH_NOARGS, "build_info() -> what this build and machine have"},
    {"operators", operators, METH_NOARGS, "operators() -> the operator registry"},
    {"disable_kernels", disable_kernels, METH_O, "disable_kernels(names): they decline from now on"},
    {"disable_passes", disable_passes, METH_O, "disable_passes(names): they are skipped from now on"},
    {"live_blocks", live_blocks, METH_NOARGS, "live_blocks() -> heap blocks now allocated"},
    {"fail_allocation_after", fail_allocation_after, METH_VARARGS, "fail_allocation_after(countdown) -> fired before"},
    {"sums_of_squares", ont_sums_of_squares, METH_O, "sums_of_squares(tensors) -> a float for each"},
    {"grad_tables", ont_grad_tables, METH_NOARGS,
     "grad_tables() -> what grads_on() keeps on a device from call to call"},
    {"grads_on", ont_grads_on, METH_VARARGS,
     "grads_on(tables, device, what, sources, targets, found_inf, inv_scale, out, max_norm, keep): norm, clip, "
     "unscale, sums or scale"},
    {"scale_tensors", ont_scale_tensors, METH_VARARGS,
     "scale_tensors(sources, targets, factor, keep) -> all were finite"},
    {"set_flush_denormals", set_flush_denormals, METH_VARARGS,
     "set_flush_denormals(on): kernels take denormals as zero"},
    {"set_deterministic", set_deterministic, METH_VARARGS,
     "set_deterministic(on): programs' kernels are chosen by rule, not by measurement"},
    {"set_matmul_precision", set_matmul_precision, METH_VARARGS, "set_matmul_precision(name, everywhere=False)"},
    {"recompute_everywhere", recompute_everywhere, METH_VARARGS,
     "recompute_everywhere(on): also where it is too small or too dear"},
    {"open_plugin", ont_open_plugin, METH_VARARGS, "open_plugin(path=None) -> what a device plugin has and lacks"},
    {"device_operators", ont_device_operators, METH_VARARGS, "device_operators(device) -> [(domain, name, kernels)]"},
    {"set_graphs", ont_set_graphs, METH_VARARGS,
     "set_graphs(on): phases whose addresses repeat are recorded and replayed"},
    {"set_tf32", ont_set_tf32, METH_VARARGS,
     "set_tf32(products, convolutions): those of float32 on CUDA may use TF32, in steps from now on"},
    {"comm_about", ont_comm_about, METH_VARARGS, "comm_about(device) -> the version of NCCL"},
    {"comm_id", ont_comm_make_id, METH_VARARGS, "comm_id(device) -> bytes that all processes of a communicator get"},
    {"comm_open", ont_comm_open, METH_VARARGS, "comm_open(device, id, rank, size) -> a communicator"},
    {"comm_enqueue", ont_comm_enqueue, METH_VARARGS, "comm_enqueue(comm, kind, from, to, root=0): a collective"},
    {"comm_check", ont_comm_check, METH_O, "comm_check(comm): raises RuntimeError where a collective has failed"},
    {"comm_close", ont_comm_close, METH_VARARGS, "comm_close(comm, failed): ends it"},
    {"mpi_open", ont_mpi_open, METH_NOARGS, "mpi_open() -> library, rank and size; meets the other processes"},
    {"mpi_all_reduce", ont_mpi_all_reduce, METH_O, "mpi_all_reduce(tensor): the sum of all processes'"},
    {"mpi_reduce_scatter", ont_mpi_reduce_scatter, METH_VARARGS, "mpi_reduce_scatter(own, whole): a part of the sum"},
    {"mpi_all_gather", ont_mpi_all_gather, METH_VARARGS, "mpi_all_gather(whole, own): those of all processes"},
    {"mpi_broadcast", ont_mpi_broadcast, METH_VARARGS, "mpi_broadcast(tensor, root): that of process root"},
    {"mpi_barrier", ont_mpi_barrier, METH_NOARGS, "mpi_barrier(): waits for all processes"},
    {"mpi_leave", ont_mpi_leave, METH_NOARGS, "mpi_leave(): waits until all processes leave"},
    {"set_timing", ont_py_set_timing, METH_VARARGS,
     "set_timing(on, record=False): runs note when their steps begin and end"},
    {"set_ranges", ont_py_set_ranges, METH_O, "set_ranges(make): make(name) is entered around each step of a run"},
    {"set_log_level", set_log_level, METH_VARARGS, "set_log_level(level): lines below it are not made"},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

static int module_exec(PyObject *module)
{
    ont_state *state = ont_get_state(module);
    state->requires_grad = PyUnicode_InternFromString("requires_grad");
    state->is_nested = PyUnicode_InternFromString("is_nested");
    if (!state->requires_grad || !state->is_nested || ont_dlpack_init(state) < 0) return -1;
    ont_device_init(state);
    ont_torch_abi_init(state);
    if (add_type(module, &ont_session_spec, &state->session_type) < 0) return -1;
    if (add_type(module, &ont_run_spec, &state->run_type) < 0) return -1;
    if (add_type(module, &ont_watch_spec, &state->watch_type) < 0) return -1;
    if (add_type(module, &ont_updater_spec, &state->updater_type) < 0) return -1;
    state->unsupported_error = PyErr_NewExceptionWithDoc(
        "onnxtrain._C.UnsupportedError", "An operator, attribute or dtype that onnxtrain does not have.",
        PyExc_NotImplementedError, NULL);
    if (!state->unsupported_error) return -1;
    if (PyModule_AddObjectRef(module, "UnsupportedError", state->unsupported_error) < 0) return -1;
    if (PyModule_AddStringConstant(module, "__version__", ONT_VERSION) < 0) return -1;
    if (PyModule_AddStringConstant(module, "ISA", ont_simd()->isa) < 0) return -1;
    const char *flush = getenv("ONNXTRAIN_FLUSH_DENORMALS");
    ont_denormals_enable(!flush || !(!strcmp(flush, "0") || !strcmp(flush, "off") || !strcmp(flush, "false")));
    ont_status status = ont_passes_disable(getenv("ONNXTRAIN_DISABLE"));
    if (status != ONT_OK) {
        ont_raise(state, status);
        return -1;
    }
    ont_log_install(log_to_python, ONT_LOG_WARNING);
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    ont_state *state = ont_get_state(module);
    Py_VISIT(state->session_type);
    Py_VISIT(state->run_type);
    Py_VISIT(state->watch_type);
    Py_VISIT(state->updater_type);
    Py_VISIT(state->unsupported_error);
    Py_VISIT(state->tensor_type);
    Py_VISIT(state->parameter_type);
    Py_VISIT(state->requires_grad);
    Py_VISIT(state->is_nested);
    return 0;
}

static int module_clear(PyObject *module)
{
    ont_state *state = ont_get_state(module);
    Py_CLEAR(state->session_type);
    Py_CLEAR(state->run_type);
    Py_CLEAR(state->watch_type);
    Py_CLEAR(state->updater_type);
    Py_CLEAR(state->unsupported_error);
    Py_CLEAR(state->tensor_type);
    Py_CLEAR(state->parameter_type);
    Py_CLEAR(state->requires_grad);
    Py_CLEAR(state->is_nested);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

struct PyModuleDef ont_module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "onnxtrain._C",
    .m_doc = "The C core of onnxtrain: sessions over one exported graph.",
    .m_size = sizeof(ont_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&ont_module_def);
}
