/*
 * The DLPack ABI, written from its specification (https://dmlc.github.io/dlpack), version 1.3, and conversions between
 * torch tensors and the core's tensor views and blocks through torch's C exchange table. tests/test_dlpack.py compares
 * the offsets with the header that torch ships.
 */
#ifndef ONT_PY_DLPACK_H
#define ONT_PY_DLPACK_H

#include "py/python.h"

typedef struct dlpack_version {
    uint32_t major, minor;
} dlpack_version;

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2, DLPACK_CUDA_HOST = 3 };
enum { DLPACK_READ_ONLY = 1 << 0 };

typedef struct dlpack_device {
    int32_t type, id;
} dlpack_device;

typedef struct dlpack_dtype {
    uint8_t code, bits;
    uint16_t lanes;
} dlpack_dtype;

typedef struct dlpack_tensor {
    void *data;
    dlpack_device device;
    int32_t ndim;
    dlpack_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* NULL: row-major (before 1.2) */
    uint64_t byte_offset;
} dlpack_tensor;

typedef struct dlpack_managed {
    dlpack_version version;
    void *manager;
    void (*deleter)(struct dlpack_managed *self);
    uint64_t flags;
    dlpack_tensor tensor;
} dlpack_managed;

typedef struct dlpack_managed_legacy { /* capsule "dltensor", before 1.0 */
    dlpack_tensor tensor;
    void *manager;
    void (*deleter)(struct dlpack_managed_legacy *self);
} dlpack_managed_legacy;

typedef struct dlpack_exchange_api {
    dlpack_version version;
    struct dlpack_exchange_api *previous;
    int (*allocate)(dlpack_tensor *prototype, dlpack_managed **out, void *context,
                    void (*set_error)(void *context, const char *kind, const char *message));
    int (*managed_from_object)(void *object, dlpack_managed **out);
    int (*managed_to_object)(dlpack_managed *tensor, void **object); /* steals the tensor */
    int (*tensor_from_object)(void *object, dlpack_tensor *out);     /* borrowed; may be NULL */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} dlpack_exchange_api;

/* Finds torch.Tensor and its exchange table (NULL for a torch without one; then the Python protocol is used). */
int ont_dlpack_init(ont_state *state);

/*
 * Borrows a tensor's memory as a view, valid until the tensor is resized. `what` and `index` name it in errors:
 * TypeError if it is not a dense CPU tensor of a known dtype. `keep` gets an object to hold while the view is used
 * (fallback path only), else stays NULL.
 */
int ont_dlpack_borrow(const ont_state *state, PyObject *tensor, const char *what, Py_ssize_t index,
                      ont_tensor_view *view,
                      PyObject **keep);
/* The same for a tensor on a device; NULL is the CPU. */
int ont_dlpack_borrow_on(const ont_state *state, const ont_device *device, PyObject *tensor, const char *what,
                         Py_ssize_t index, ont_tensor_view *view, PyObject **keep);

/* What a method of a tensor without arguments says: 1, 0, or -1 with an exception. */
int ont_call_predicate(PyObject *tensor, const char *method);

/* Wraps the block as a torch tensor; takes the caller's reference, also on failure. */
PyObject *ont_dlpack_wrap(const ont_state *state, ont_block *block);

#endif
