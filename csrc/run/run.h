/*
 * A run: one forward of a program and the backward that may follow. Owns its slab (activations) until backward has
 * ended or it is released; holds the output blocks that backward reads.
 */
#ifndef ONT_RUN_RUN_H
#define ONT_RUN_RUN_H

#include "run/program.h"

typedef struct ont_run ont_run;

/* What a run's random numbers follow from: the key of ours, and where torch's generator stood (blocks of four words).
 */
typedef struct ont_random {
    uint64_t key, seed, block;
} ont_random;

/*
 * Executes the forward part. outputs: one block per forward output, each a reference for the caller. *run is NULL
 * where the program has nothing to differentiate. The pool must be the session's, the same for all runs of a program.
 */
ont_status ont_run_forward(ont_program *program, ont_pool *pool, const ont_tensor_view *inputs,
                           const ont_random *random,
                           ont_block **outputs, ont_run **run) ONT_MUST_USE;

/*
 * Takes the gradients of inputs that were asked for with ONT_WANT_CALLBACK, one after the other on the thread that runs
 * backward, and may overwrite the input: `gradient`, row-major and of the input's dtype and shape, is gone afterwards.
 * Floats are treated as the caller of backward has it. A failure ends backward.
 */
typedef struct ont_grad_callback {
    ont_status (*call)(void *context, uint32_t input, const void *gradient);
    void *context;
} ont_grad_callback;

/*
 * Executes the backward part, once. `inputs` and `outputs` hold the tensors that saved_inputs and saved_outputs ask
 * for (others are ignored), `grads` one per forward output (data NULL with rank -1: zero). in_grads: per forward
 * input a block for the caller, or NULL where none flows. The slab is given back on success and on failure. sink: what
 * gradients that are applied go to; NULL where the program has none.
 *
 * spent: NULL, or per forward input whether backward may overwrite what `inputs` has of it, which nobody else reads or
 * will. Where that saves a block the gradient is computed there: in_grads is NULL, spent stays set. It is cleared for
 * all others. On failure such inputs may be half overwritten.
 */
ont_status ont_run_backward(ont_run *run, const ont_tensor_view *inputs, const ont_tensor_view *outputs,
                            const ont_tensor_view *grads,
                            const ont_grad_callback *callback, uint8_t *donated, ont_block **in_grads) ONT_MUST_USE;

void ont_run_release(ont_run *run); /* the run is gone afterwards; its slab may serve the next one */
ont_program *ont_run_program(const ont_run *run);
void ont_run_free_idle(ont_program *program); /* called by the program when it goes */

/* From now on every run notes in its program when each step began and ended; concurrent runs overwrite each other's. */
void ont_run_set_timing(bool on);

/* Row-major copy of a strided tensor. */
void ont_tensor_view_copy(const ont_tensor_view *view, void *to);
bool ont_tensor_view_is_contiguous(const ont_tensor_view *view);

#endif
