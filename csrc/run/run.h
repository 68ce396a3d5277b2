/*
 * A run: one forward of a program and the backward that may follow. Owns the slab (activations) until backward has
 * ended or the run is released; holds references to the output blocks that backward reads.
 */
#ifndef ONT_RUN_RUN_H
#define ONT_RUN_RUN_H

#include "run/program.h"

typedef struct ont_run ont_run;

/* Random state of a run: our Philox key, and torch's seed and offset (in blocks of four 32-bit words). */
typedef struct ont_random {
    uint64_t key, seed, block;
} ont_random;

/*
 * Executes the forward phase. outputs: one block per forward output, each a reference for the caller. *run is NULL if
 * the program has no backward. All runs of a program must use the pool of its session.
 */
ont_status ont_run_forward(ont_program *program, ont_pool *pool, const ont_tensor_view *inputs,
                           const ont_random *random,
                           ont_block **outputs, ont_run **run) ONT_MUST_USE;

/*
 * Receives the gradients of inputs with ONT_WANT_CALLBACK, one after the other on the thread that runs backward, and
 * may overwrite the input. `gradient` is row-major, of the input's dtype and shape, and invalid after the call. The
 * floating-point mode is that of the caller of backward. A failure ends backward. On a device, `gradient` is final for
 * work on `stream`, the input may be overwritten by such work, and the gradient stays valid for it.
 */
typedef struct ont_grad_callback {
    ont_status (*call)(void *context, uint32_t input, const void *gradient, void *stream);
    void *context;
} ont_grad_callback;

/*
 * Executes the backward phase, once. `inputs` and `outputs` hold the tensors for which saved_inputs and saved_outputs
 * are set (others are ignored), `grads` one per forward output (data NULL with rank -1: zeros). in_grads: per forward
 * input a block for the caller, or NULL if no gradient flows. The slab is released on success and on failure. callback:
 * receives the gradients with ONT_WANT_CALLBACK; NULL if there are none.
 */
ont_status ont_run_backward(ont_run *run, const ont_tensor_view *inputs, const ont_tensor_view *outputs,
                            const ont_tensor_view *grads, const ont_grad_callback *callback,
                            ont_block **in_grads) ONT_MUST_USE;

void ont_run_release(ont_run *run); /* `run` is invalid afterwards; its slab may be reused */
ont_program *ont_run_program(const ont_run *run);
void ont_run_free_idle(ont_program *program); /* called when the program is destroyed */

/* Row-major copy of a strided tensor. */
void ont_tensor_view_copy(const ont_tensor_view *view, void *to);
bool ont_tensor_view_is_contiguous(const ont_tensor_view *view);

#endif
