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
 * Fills the view (strides as torch has them) where `tensor` is exactly a torch.Tensor or Parameter, strided, on the CPU,
 * of a dtype that optimizers have, and with memory; false where somebody else must look, and say why. Raises nothing.
 */
bool ont_peek(const ont_state *state, PyObject *tensor, ont_view *view);

/*
 * Of a tensor that was just peeked at: addresses that torch will read with it, the storage's first. They tell the cache
 * what to fetch at the next step and must not be followed: they may point anywhere.
 */
enum { ONT_PEEK_HINTS = 4 };
void ont_peek_hints(PyObject *tensor, const void *hints[ONT_PEEK_HINTS]);

#endif
