/*
 * Reads plain tensors through torch's C shim, which takes a fifth of the instructions of DLPack's exchange table: every
 * call of that acquires the GIL and counts references. For loops over thousands of tensors; other tensors go through
 * py/dlpack.h.
 */
#ifndef ONT_PY_TORCH_ABI_H
#define ONT_PY_TORCH_ABI_H

#include "py/python.h"

/*
 * Call after ont_dlpack_init(). If anything differs from what is expected, this interface stays disabled and no
 * exception is raised.
 */
void ont_torch_abi_init(ont_state *state);

/*
 * Fills the view (strides as torch has them) if `tensor` is exactly a torch.Tensor or Parameter, strided, on the CPU,
 * of a dtype that optimizers support, and with memory. False otherwise, without an exception: the caller must then use
 * DLPack, which reports the reason.
 */
bool ont_torch_read_tensor(const ont_state *state, PyObject *tensor, ont_tensor_view *view);

/* Type of a strided tensor on any device, in torch's own numbers; false for another layout. */
typedef struct ont_torch_type {
    int32_t dtype, device, index, rank; /* index: of the device among those of its type; -1: the current one */
} ont_torch_type;
bool ont_torch_type_of(void *handle, ont_torch_type *kind);

/*
 * The same in parts, for loops that must not run Python code. A handle is NULL if `tensor` is not exactly a
 * torch.Tensor or Parameter; a gradient is NULL if there is none. If ont_torch_has_autograd_abi() is false, only
 * ont_torch_read_tensor() may be called. These functions change no reference count and no exception.
 */
bool ont_torch_has_autograd_abi(void);
void *ont_torch_handle(const ont_state *state, PyObject *tensor);
bool ont_torch_read_handle(void *handle, ont_tensor_view *view);
void *ont_torch_grad(void *handle);
/*
 * Whether the tensor has a version counter, and its address as ont_torch_hints() returns it. Tensors created in
 * inference mode have none and must not be bumped. A handle is the address of one word; a copy of that word may be used
 * instead.
 */
bool ont_torch_has_version(const void *handle, const void **version);
void ont_torch_bump_version(void *handle);

/*
 * An uninitialized tensor of at least that many bytes on a device of DLPack's type, allocated by torch, whose element
 * type is `dtype`. False: torch or this dtype does not support it, or there is no memory. Needs no GIL.
 */
bool ont_torch_empty(int32_t device_type, int32_t device_id, size_t bytes, ont_dtype dtype, ont_memory *memory);
void ont_torch_delete(void *tensor); /* a tensor of ont_torch_empty(); needs no GIL */
/*
 * A torch.Tensor of this shape that shares the memory of a tensor of ont_torch_empty(). Its memory is torch's own, so
 * that record_stream() has its effect. NULL with an exception.
 */
PyObject *ont_torch_wrap(void *tensor, const ont_shape *shape);

/* Version counter of any tensor: how often it was modified in place; -1 if it has none. Raises nothing. */
int64_t ont_torch_version(const ont_state *state, PyObject *tensor);

/*
 * Address of torch's object of the tensor's memory, to tell whether two tensors share it or `.data` was assigned; NULL
 * if it is not known. Raises nothing.
 */
const void *ont_torch_storage(const ont_state *state, PyObject *tensor);

/*
 * Addresses that torch will read together with a tensor that was just read, NULL for absent ones. They are hints for
 * prefetching in the next step and must not be dereferenced: they may be stale.
 */
enum { ONT_TORCH_HINT_STORAGE, ONT_TORCH_HINT_AUTOGRAD, ONT_TORCH_HINT_EXTRA, ONT_TORCH_HINT_VERSION, ONT_TORCH_HINTS };
void ont_torch_hints(const void *handle, const void *hints[ONT_TORCH_HINTS]);

#endif
