/*
 * A plain tensor's memory, read through torch's C shim in a fifth of the instructions of DLPack's exchange table, whose
 * every call takes the GIL anew and counts references. For walks over thousands of tensors; what is not plain goes by
 * py/dlpack.h.
 */
#ifndef ONT_PY_PEEK_H
#define ONT_PY_PEEK_H

#include "py/python.h"

/* After ont_dlpack_init(). Where anything is not as expected, peeking stays off, and nothing is raised. */
void ont_peek_init(ont_state *state);

/*
 * Fills the view (strides as torch has them) where `tensor` is exactly a torch.Tensor or Parameter, strided, on the
 * CPU, of a dtype that optimizers have, and with memory; false where somebody else must look, and say why. Raises
 * nothing.
 */
bool ont_peek(const ont_state *state, PyObject *tensor, ont_tensor_view *view);

/* Of what kind a strided tensor of any device is, by torch's own numbers; false for another layout. */
typedef struct ont_peek_kind {
    int32_t dtype, device, rank;
} ont_peek_kind;
bool ont_peek_kind_of(void *handle, ont_peek_kind *kind);

/*
 * The same in steps, for walks that may not run a line of Python. A handle is NULL where `tensor` is not exactly a
 * torch.Tensor or Parameter, a gradient where there is none. ont_peek_plain() tells whether gradients and versions can
 * be had this way; without it only ont_peek() may be called. None of them touches a reference count or an exception.
 */
bool ont_peek_plain(void);
void *ont_peek_handle(const ont_state *state, PyObject *tensor);
bool ont_peek_at(void *handle, ont_tensor_view *view);
void *ont_peek_grad(void *handle);
/*
 * Whether the tensor counts its versions, and an address as ont_peek_hints() gives them; tensors made in inference mode
 * do not, and must not be counted up. A handle is an address of one word, of which a copy serves as well.
 */
bool ont_peek_counts(const void *handle, const void **version);
void ont_peek_count_up(void *handle);

/* How often any tensor was changed in place, -1 where it does not count. Raises nothing. */
int64_t ont_peek_version(const ont_state *state, PyObject *tensor);

/*
 * Of a tensor that was just peeked at: addresses that torch will read with it, NULL for what it has not. They tell the
 * cache what to fetch at the next step and must not be followed: they may point anywhere.
 */
enum { ONT_PEEK_STORAGE, ONT_PEEK_AUTOGRAD, ONT_PEEK_EXTRA, ONT_PEEK_VERSION, ONT_PEEK_HINTS };
void ont_peek_hints(const void *handle, const void *hints[ONT_PEEK_HINTS]);

#endif
