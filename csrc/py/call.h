/*
 * What a call of Session.forward() and one of Run.backward() share: arguments as a tuple, tensors borrowed for the time
 * of the call, and blocks that leave as tensors. Included by session.c and run_object.c only.
 */
#ifndef ONT_PY_CALL_H
#define ONT_PY_CALL_H

#include "py/dlpack.h"

/* Borrowed tensors of one call: views, and what keeps them alive on the fallback path. */
typedef struct ont_borrowed {
    ont_tensor_view *views;
    PyObject **keep;
    Py_ssize_t n;
} ont_borrowed;

/* Room for n, all empty; -1 and MemoryError, with nothing to give back. */
int ont_borrowed_init(ont_borrowed *b, Py_ssize_t n);
void ont_borrowed_deinit(ont_borrowed *b);

/* Borrows a tuple of graph inputs, as many as there is room for; -1 with an exception. */
int ont_borrow_inputs(const ont_state *state, const ont_device *device, PyObject *tensors, ont_borrowed *b);

/* Wraps blocks as tensors (None where NULL); takes all references over, also on failure. */
PyObject *ont_wrap_blocks(const ont_state *state, ont_block **blocks, uint32_t n);

/*
 * Run.backward() with somebody who takes the gradients that are applied. check: sees every tensor that backward will
 * read, inputs that it does not read with data NULL, before anything is run; -1 with an exception.
 */
typedef struct ont_backward_hooks {
    ont_grad_callback gradient; /* called without the GIL */
    int (*check)(void *context, const ont_borrowed *inputs, const ont_borrowed *grads);
} ont_backward_hooks;

/* spent: NULL, or a sequence of inputs that may be overwritten, as in run.h; a tensor that is comes back as its
 * gradient. */
PyObject *ont_run_object_backward(PyObject *run, PyObject *saved, PyObject *grads, PyObject *donated,
                                  const ont_backward_hooks *hooks);
/* The program of a Run that is still open; NULL with TypeError or RuntimeError. */
ont_program *ont_run_object_program(const ont_state *state, PyObject *run);

/* A tuple of any iterable; ValueError with `what` where it has not as many items as expected. */
PyObject *ont_sequence(PyObject *object, Py_ssize_t expected, const char *what);

#endif
