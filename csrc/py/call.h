/*
 * Shared by Session.forward(), Run.backward() and what else runs or plans a program: arguments as a tuple, tensors
 * borrowed for the duration of the call, and blocks returned as tensors.
 */
#ifndef ONT_PY_CALL_H
#define ONT_PY_CALL_H

#include "py/dlpack.h"

/* Borrowed tensors of one call: views, and objects that keep them alive on the fallback path. */
typedef struct ont_borrowed {
    ont_tensor_view *views;
    PyObject **keep;
    Py_ssize_t n;
} ont_borrowed;

/* Allocates n empty entries; -1 and MemoryError, after which nothing needs to be released. */
int ont_borrowed_init(ont_borrowed *b, Py_ssize_t n);
void ont_borrowed_deinit(ont_borrowed *b);

/* The addresses [first, last) that a view reaches; equal for an empty one. */
void ont_memory_range(const ont_tensor_view *view, uintptr_t *first, uintptr_t *last);

/* Borrows a tuple of b->n graph inputs; -1 with an exception. */
int ont_borrow_inputs(const ont_state *state, const ont_device *device, PyObject *tensors, ont_borrowed *b);

/* Wraps blocks as tensors (None for NULL); takes all references, also on failure. */
PyObject *ont_wrap_blocks(const ont_state *state, ont_block **blocks, uint32_t n);

/*
 * Hooks of a backward whose gradients the caller receives. check: gets every tensor that backward reads (inputs that it
 * does not read have data NULL) before anything runs; -1 with an exception.
 */
typedef struct ont_backward_hooks {
    ont_grad_callback gradient; /* receives the gradients; called without the GIL */
    int (*check)(void *context, const ont_borrowed *inputs, const ont_borrowed *grads);
} ont_backward_hooks;

/* Run.backward(); hooks: NULL if the program delivers no gradient. */
PyObject *ont_run_object_backward(PyObject *run, PyObject *saved, PyObject *grads, const ont_backward_hooks *hooks);
/* Those of both that backward reads, as a tuple. */
PyObject *ont_run_object_saved(PyObject *run, PyObject *inputs, PyObject *outputs);
/* (outputs, Run or None); NULL with an exception. */
PyObject *ont_session_object_forward(PyObject *session, PyObject *tensors, const char *mask, Py_ssize_t mask_size,
                                     PyObject *seed);
/* py/train_step.c: Session.step(). */
PyObject *ont_session_object_step(PyObject *session, PyObject *args);
/* py/deliver.c: Run.deliver(). */
PyObject *ont_run_object_deliver(const ont_state *state, PyObject *run, PyObject *args);
/* The program of a Run whose backward has not run; NULL with TypeError or RuntimeError. */
ont_program *ont_run_object_program(const ont_state *state, PyObject *run);

/* Converts any iterable to a tuple; ValueError with `what` if its length is not `expected`. */
PyObject *ont_sequence(PyObject *object, Py_ssize_t expected, const char *what);

#endif
