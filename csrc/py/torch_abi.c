/*
 * See torch_abi.h. A handle of torch's C shim (torch/csrc/inductor/aoti_torch/c/shim.h) is the address of an
 * at::Tensor, which is a field of the tensor object; torch's own headers read it there inline (THPVariable_Unpack).
 * Without those headers the offset of the field is found at import: it is the only word equal to Tensor._cdata.
 * Everything that the shim reports of a sample tensor must then agree with DLPack.
 */
#include "py/torch_abi.h" /* Python.h before any system header */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "device/library.h"
#include "py/dlpack.h"

enum { DTYPES = 64 };

typedef int32_t shim_status; /* 0: no error */

static struct shim {
    size_t offset; /* offset of the at::Tensor in a tensor object; 0: disabled */
    shim_status (*data)(void *tensor, void **data);
    shim_status (*dim)(void *tensor, int64_t *dim);
    shim_status (*sizes)(void *tensor, int64_t **sizes);
    shim_status (*strides)(void *tensor, int64_t **strides);
    shim_status (*dtype)(void *tensor, int32_t *dtype);
    shim_status (*device)(void *tensor, int32_t *device);
    shim_status (*index)(void *tensor, int32_t *index);
    shim_status (*layout)(void *tensor, int32_t *layout);
    int32_t cpu, strided;
    ont_dtype dtypes[DTYPES];                 /* by torch's number; ONT_UNDEFINED: not supported */
    bool has_autograd;                        /* the functions below have passed their tests */
    void *(*grad)(const void *impl);          /* const at::Tensor &c10::TensorImpl::grad() const */
    void (*bump_version)(const void *tensor); /* void torch::autograd::impl::bump_version(const at::Tensor &) */
    int64_t (*version)(const void *tensor);   /* int64_t at::TensorBase::_version() const; NULL: by Python */
    shim_status (*defined)(void *tensor, bool *defined);
    bool has_tensors;                         /* the functions below have passed their test */
    shim_status (*empty)(int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,
                         int32_t device_id, void **tensor);
    shim_status (*alias)(void *tensor, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset,
                         void **alias);
    shim_status (*delete)(void *tensor);
    PyObject *(*wrap)(const void *tensor);    /* PyObject *THPVariable_Wrap(const at::TensorBase &) */
    int32_t cuda;
    int32_t numbers[ONT_DTYPE_COUNT];         /* torch's numbers; -1: none */
} shim;

static bool find_symbol(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

static bool find_number(void *library, const char *name, int32_t *number)
{
    int32_t (*ask)(void);
    if (!find_symbol(library, name, &ask)) return false;
    *number = ask();
    return true;
}

static bool find_functions(void *library)
{
    return find_symbol(library, "aoti_torch_get_data_ptr", &shim.data) &&
           find_symbol(library, "aoti_torch_get_dim", &shim.dim) &&
           find_symbol(library, "aoti_torch_get_sizes", &shim.sizes) &&
           find_symbol(library, "aoti_torch_get_strides", &shim.strides) &&
           find_symbol(library, "aoti_torch_get_dtype", &shim.dtype) &&
           find_symbol(library, "aoti_torch_get_device_type", &shim.device) &&
           find_symbol(library, "aoti_torch_get_device_index", &shim.index) &&
           find_symbol(library, "aoti_torch_get_layout", &shim.layout) &&
           find_number(library, "aoti_torch_device_type_cpu", &shim.cpu) &&
           find_number(library, "aoti_torch_layout_strided", &shim.strided);
}

/* The dtypes of parameters, gradients and optimizer state; tensors of others go through DLPack. */
static void find_dtypes(void *library)
{
    static const struct {
        const char *name;
        ont_dtype dtype;
    } known[] = {
        {"aoti_torch_dtype_float32", ONT_FLOAT32}, {"aoti_torch_dtype_float64", ONT_FLOAT64},
        {"aoti_torch_dtype_bfloat16", ONT_BFLOAT16}, {"aoti_torch_dtype_float16", ONT_FLOAT16},
        {"aoti_torch_dtype_int8", ONT_INT8}, {"aoti_torch_dtype_uint8", ONT_UINT8}};
    int32_t number;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (find_number(library, known[i].name, &number) && number >= 0 && number < DTYPES)
            shim.dtypes[number] = known[i].dtype;
}

/* The offset of the only word in the object that equals `word`; 0 if there is none, or more than one. */
static size_t find_word(PyObject *object, size_t size, uintptr_t word)
{
    size_t found = 0;
    for (size_t at = sizeof(PyObject); at + sizeof word <= size; at += sizeof word) {
        uintptr_t here;
        memcpy(&here, (const char *)object + at, sizeof here);
        if (here != word) continue;
        if (found) return 0;
        found = at;
    }
    return found;
}

static size_t find_offset(PyObject *tensor)
{
    PyObject *cdata = PyObject_GetAttrString(tensor, "_cdata");
    PyObject *size = cdata ? PyObject_GetAttrString((PyObject *)Py_TYPE(tensor), "__basicsize__") : NULL;
    uintptr_t word = cdata ? (uintptr_t)PyLong_AsVoidPtr(cdata) : 0;
    size_t bytes = size ? PyLong_AsSize_t(size) : 0;
    Py_XDECREF(cdata);
    Py_XDECREF(size);
    if (PyErr_Occurred()) return 0;
    return word ? find_word(tensor, bytes, word) : 0;
}

/* Whether the shim and DLPack agree on a tensor that is neither contiguous nor at the start of its memory. */
static bool matches_dlpack(const ont_state *state, PyObject *tensor)
{
    ont_tensor_view view;
    ont_dtype dtype;
    dlpack_tensor t;
    if (state->dlpack->tensor_from_object(tensor, &t) < 0 || !ont_torch_read_tensor(state, tensor, &view)) return false;
    size_t bytes = 2 * sizeof *t.shape;
    return t.ndim == 2 && view.rank == 2 && ont_dtype_from_dlpack(t.dtype.code, t.dtype.bits, &dtype) &&
           dtype == view.dtype && !memcmp(view.dims, t.shape, bytes) && t.strides && view.strides &&
           !memcmp(view.strides, t.strides, bytes) && view.data == (char *)t.data + t.byte_offset;
}

/* torch.zeros(3, 4).t()[1:], the sample for testing the shim. */
static PyObject *make_sample(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *zeros = torch ? PyObject_CallMethod(torch, "zeros", "ii", 3, 4) : NULL;
    PyObject *transposed = zeros ? PyObject_CallMethod(zeros, "t", NULL) : NULL;
    PyObject *sample = transposed ? PyObject_CallMethod(transposed, "narrow", "iii", 0, 1, 3) : NULL;
    Py_XDECREF(transposed);
    Py_XDECREF(zeros);
    Py_XDECREF(torch);
    return sample;
}

/*
 * Functions that the shim lacks, by their C++ names: their arguments and results are plain addresses. They are tested
 * at import; without them loops use Python.
 */
static bool find_autograd_functions(void *library)
{
    return find_symbol(library, "aoti_torch_is_defined", &shim.defined) &&
           find_symbol(library, "_ZNK3c1010TensorImpl4gradEv", &shim.grad) &&
           find_symbol(library, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", &shim.bump_version) &&
           (find_symbol(library, "_ZNK2at10TensorBase8_versionEv", &shim.version) || true);
}

static int version_of(PyObject *tensor)
{
    PyObject *value = PyObject_GetAttrString(tensor, "_version");
    long version = value ? PyLong_AsLong(value) : -1;
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : (int)version;
}

/*
 * Whether the functions report gradient `grad` for `tensor` (NULL: none), and whether its version counter increments by
 * one, or is absent.
 */
static bool autograd_matches(const ont_state *state, PyObject *tensor, PyObject *grad, bool counts)
{
    void *handle = ont_torch_handle(state, tensor);
    const void *impl = NULL, *expected = NULL, *version;
    if (!handle) return false;
    void *found = ont_torch_grad(handle);
    if (found) memcpy(&impl, found, sizeof impl);
    if (grad) memcpy(&expected, (const char *)grad + shim.offset, sizeof expected);
    if (impl != expected || ont_torch_has_version(handle, &version) != counts) return false;
    if (!counts) return true;
    int before = version_of(tensor);
    ont_torch_bump_version(handle);
    return before >= 0 && version_of(tensor) == before + 1 && (!shim.version || shim.version(handle) == before + 1);
}

/* Whether a view has the storage of its base, and another tensor has not. Called before has_autograd is set. */
static bool storages_match(const ont_state *state, PyObject *tensor, PyObject *other)
{
    PyObject *view = PyObject_CallMethod(tensor, "detach", NULL);
    const void *hints[3][ONT_TORCH_HINTS];
    PyObject *tensors[] = {tensor, view, other};
    bool read = view != NULL;
    for (int i = 0; read && i < 3; i++) {
        void *handle = ont_torch_handle(state, tensors[i]);
        read = handle != NULL;
        if (read) ont_torch_hints(handle, hints[i]);
    }
    Py_XDECREF(view);
    return read && hints[0][ONT_TORCH_HINT_STORAGE] == hints[1][ONT_TORCH_HINT_STORAGE] &&
           hints[0][ONT_TORCH_HINT_STORAGE] != hints[2][ONT_TORCH_HINT_STORAGE];
}

/* Tests them on a tensor with a gradient, on one without, and on one created in inference mode. */
static bool autograd_abi_matches(const ont_state *state)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *leaf = torch ? PyObject_CallMethod(torch, "zeros", "i", 3) : NULL;
    PyObject *grad = leaf ? PyObject_CallMethod(torch, "ones", "i", 3) : NULL;
    PyObject *mode = grad ? PyObject_CallMethod(torch, "inference_mode", NULL) : NULL;
    PyObject *entered = mode ? PyObject_CallMethod(mode, "__enter__", NULL) : NULL;
    PyObject *inferred = entered ? PyObject_CallMethod(torch, "zeros", "i", 3) : NULL;
    PyObject *left = entered ? PyObject_CallMethod(mode, "__exit__", "OOO", Py_None, Py_None, Py_None) : NULL;
    bool good = inferred && left && storages_match(state, leaf, grad) &&
                PyObject_SetAttrString(leaf, "grad", grad) == 0 &&
                autograd_matches(state, leaf, grad, true) && autograd_matches(state, grad, NULL, true) &&
                autograd_matches(state, inferred, NULL, false);
    Py_XDECREF(left);
    Py_XDECREF(inferred);
    Py_XDECREF(entered);
    Py_XDECREF(mode);
    Py_XDECREF(grad);
    Py_XDECREF(leaf);
    Py_XDECREF(torch);
    return good;
}

/* ---- tensors that torch allocates ---- */

static void find_all_dtypes(void *library)
{
    static const struct {
        ont_dtype dtype;
        const char *name;
    } names[] = {{ONT_FLOAT32, "float32"}, {ONT_FLOAT64, "float64"}, {ONT_FLOAT16, "float16"},
                 {ONT_BFLOAT16, "bfloat16"}, {ONT_UINT8, "uint8"}, {ONT_INT8, "int8"}, {ONT_INT16, "int16"},
                 {ONT_INT32, "int32"}, {ONT_INT64, "int64"}, {ONT_UINT16, "uint16"}, {ONT_UINT32, "uint32"},
                 {ONT_UINT64, "uint64"}, {ONT_BOOL, "bool"}, {ONT_COMPLEX64, "complex64"},
                 {ONT_COMPLEX128, "complex128"}};
    char symbol[64];
    for (int i = 0; i < ONT_DTYPE_COUNT; i++) shim.numbers[i] = -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(symbol, sizeof symbol, "aoti_torch_dtype_%s", names[i].name);
        if (!find_number(library, symbol, &shim.numbers[names[i].dtype])) shim.numbers[names[i].dtype] = -1;
    }
}

static bool find_tensor_functions(void *library)
{
    void *python = dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY);
    bool found = python && find_symbol(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE", &shim.wrap) &&
                 find_symbol(library, "aoti_torch_empty_strided", &shim.empty) &&
                 find_symbol(library, "aoti_torch__reinterpret_tensor", &shim.alias) &&
                 find_symbol(library, "aoti_torch_delete_tensor_object", &shim.delete) &&
                 find_number(library, "aoti_torch_device_type_cuda", &shim.cuda);
    if (python) dlclose(python); /* torch holds it */
    return found;
}

/* Whether a tensor of 2 x 3 float32 that torch allocates, and its object, are what DLPack says of the object. */
static bool tensor_functions_match(const ont_state *state)
{
    ont_memory memory;
    ont_shape shape = ont_shape_of(2, (const int64_t[]){2, 3});
    ont_tensor_view view;
    if (!ont_torch_empty(DLPACK_CPU, 0, 24, ONT_FLOAT32, &memory)) return false;
    PyObject *object = ont_torch_wrap(memory.tensor, &shape);
    bool good = object && (PyObject *)Py_TYPE(object) == state->tensor_type &&
                ont_torch_read_tensor(state, object, &view) && matches_dlpack(state, object) &&
                view.data == memory.data && view.dims[0] == 2 && view.dims[1] == 3 && view.dtype == ONT_FLOAT32;
    Py_XDECREF(object);
    ont_torch_delete(memory.tensor);
    return good;
}

bool ont_torch_empty(int32_t device_type, int32_t device_id, size_t bytes, ont_dtype dtype, ont_memory *memory)
{
    size_t size = ont_dtype_size(dtype);
    int64_t stride = 1, n = size ? (int64_t)((bytes + size - 1) / size) : 0;
    int32_t type = device_type == DLPACK_CUDA ? shim.cuda : shim.cpu;
    if (!shim.has_tensors || !n || shim.numbers[dtype] < 0 || (device_type != DLPACK_CPU && device_type != DLPACK_CUDA))
        return false;
    *memory = (ont_memory){0};
    if (shim.empty(1, &n, &stride, shim.numbers[dtype], type, device_type == DLPACK_CPU ? -1 : device_id,
                   &memory->tensor))
        return false;
    if (!shim.data(memory->tensor, &memory->data) && memory->data) return true;
    ont_torch_delete(memory->tensor);
    return false;
}

void ont_torch_delete(void *tensor)
{
    ONT_ASSERT(tensor && shim.delete);
    shim.delete(tensor);
}

/* The alias has a TensorImpl of its own: autograd's data of the object must not be reachable from the block. */
PyObject *ont_torch_wrap(void *tensor, const ont_shape *shape)
{
    int64_t strides[ONT_MAX_RANK];
    void *alias = NULL;
    ONT_ASSERT(tensor && shim.alias && shim.wrap);
    ont_shape_strides(shape, strides);
    if (shim.alias(tensor, shape->rank, shape->dims, strides, 0, &alias)) {
        PyErr_SetString(PyExc_RuntimeError, "torch gives no view of a tensor that it has allocated");
        return NULL;
    }
    PyObject *object = shim.wrap(alias);
    shim.delete(alias);
    return object;
}

void ont_torch_abi_init(ont_state *state)
{
    void *library = ont_library_torch();
    PyObject *sample = library && state->dlpack ? make_sample() : NULL;
    if (sample && find_functions(library)) {
        find_dtypes(library);
        shim.offset = find_offset(sample);
        if (shim.offset && !matches_dlpack(state, sample)) shim.offset = 0;
    }
    if (shim.offset) shim.has_autograd = find_autograd_functions(library) && autograd_abi_matches(state);
    if (shim.offset) find_all_dtypes(library);
    shim.has_tensors = shim.offset && find_tensor_functions(library);
    shim.has_tensors = shim.has_tensors && tensor_functions_match(state);
    PyErr_Clear();
    Py_XDECREF(sample);
}

bool ont_torch_has_autograd_abi(void)
{
    return shim.has_autograd;
}

void *ont_torch_handle(const ont_state *state, PyObject *tensor)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (!shim.offset || (type != state->tensor_type && type != state->parameter_type)) return NULL;
    return (char *)tensor + shim.offset;
}

void *ont_torch_grad(void *handle)
{
    const void *impl;
    bool defined;
    memcpy(&impl, handle, sizeof impl);
    void *grad = shim.grad(impl);
    return shim.defined(grad, &defined) || !defined ? NULL : grad;
}

bool ont_torch_has_version(const void *handle, const void **version)
{
    const void *hints[ONT_TORCH_HINTS];
    ont_torch_hints(handle, hints);
    *version = hints[ONT_TORCH_HINT_VERSION];
    return *version != NULL;
}

void ont_torch_bump_version(void *handle)
{
    shim.bump_version(handle);
}

int64_t ont_torch_version(const ont_state *state, PyObject *tensor)
{
    const void *version;
    void *handle = shim.has_autograd && shim.version ? ont_torch_handle(state, tensor) : NULL;
    if (handle) return ont_torch_has_version(handle, &version) ? shim.version(handle) : -1;
    int counted = version_of(tensor);
    PyErr_Clear();
    return counted;
}

const void *ont_torch_storage(const ont_state *state, PyObject *tensor)
{
    const void *hints[ONT_TORCH_HINTS] = {NULL};
    void *handle = shim.has_autograd ? ont_torch_handle(state, tensor) : NULL;
    if (handle) ont_torch_hints(handle, hints);
    return hints[ONT_TORCH_HINT_STORAGE];
}

bool ont_torch_read_tensor(const ont_state *state, PyObject *tensor, ont_tensor_view *view)
{
    void *handle = ont_torch_handle(state, tensor);
    return handle && ont_torch_read_handle(handle, view);
}

bool ont_torch_type_of(void *handle, ont_torch_type *kind)
{
    int32_t layout, device, index, dtype;
    int64_t dim;
    if (shim.layout(handle, &layout) || layout != shim.strided || shim.device(handle, &device)) return false;
    if (shim.index(handle, &index) || shim.dtype(handle, &dtype) || shim.dim(handle, &dim)) return false;
    *kind = (ont_torch_type){dtype, device, index, (int32_t)dim};
    return true;
}

bool ont_torch_read_handle(void *handle, ont_tensor_view *view)
{
    int32_t layout, device, dtype;
    int64_t dim, *sizes, *strides;
    /* The order matters: the other functions must not be called for another layout or device. */
    if (shim.layout(handle, &layout) || layout != shim.strided || shim.device(handle, &device) || device != shim.cpu)
        return false;
    if (shim.dtype(handle, &dtype) || dtype < 0 || dtype >= DTYPES || !shim.dtypes[dtype]) return false;
    if (shim.dim(handle, &dim) || dim > INT32_MAX || shim.sizes(handle, &sizes) || shim.strides(handle, &strides))
        return false;
    void *data;
    if (shim.data(handle, &data) || !data) return false;
    *view = (ont_tensor_view){shim.dtypes[dtype], (int32_t)dim, sizes, strides, data};
    return true;
}

void ont_torch_hints(const void *handle, const void *hints[ONT_TORCH_HINTS])
{
    const char *impl;
    memcpy(&impl, handle, sizeof impl);
    /* behind the vtable pointer and the reference count; a TensorImpl is far larger than these six words */
    memcpy(hints, impl + 2 * sizeof(void *), ONT_TORCH_HINTS * sizeof *hints);
}
