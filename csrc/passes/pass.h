/*
 * Passes: each is one idempotent function over a graph and leaves the graph valid. passes/pipeline.c holds the order.
 */
#ifndef ONT_PASSES_PASS_H
#define ONT_PASSES_PASS_H

#include "ops/op.h"

/*
 * Infers dtype and shape of every value from the static shapes of the inputs, and folds constants in the same
 * traversal, so that shape subgraphs vanish. EUNSUPPORTED names an operator without a descriptor, EINVAL or ETYPE the
 * node whose inputs are invalid.
 */
ont_status ont_pass_infer(ont_graph *g) ONT_MUST_USE;

/*
 * The same for a model with data-dependent shapes. A node that cannot be inferred without the value of an input is
 * skipped, together with all nodes that depend on it, and the rest of the graph is inferred; those inputs are the
 * required values of this round. Each round takes their values from `tensors` and continues. If `tensors` is exhausted,
 * the pass stops with n_required > 0, and run/program.c turns the graph into a value probe that computes them. Rounds
 * and required values come in the same order every time, so values need no names.
 */
enum { ONT_KNOWN_VALUE_BYTES = 1 << 16 }; /* largest value that a program may be specialised to */

typedef struct ont_known_values {
    const ont_tensor *tensors; /* the required values of all rounds so far */
    uint32_t n, used;
    ont_value **required;         /* required values of the last round, which `tensors` lacks; in the graph's arena */
    uint32_t n_required;
} ont_known_values;

ont_status ont_pass_infer_with_values(ont_graph *g, ont_known_values *known) ONT_MUST_USE;

/*
 * Replaces sequences and optionals among the graph's outputs by their elements. counts, one per original output:
 * ONT_RESULT_TENSOR, ONT_RESULT_NONE (an optional without element), or the length of a sequence.
 */
enum { ONT_RESULT_TENSOR = -1, ONT_RESULT_NONE = -2 };
ont_status ont_pass_flatten(ont_graph *g, int32_t *counts) ONT_MUST_USE;

/*
 * Makes Dropout on a GPU draw torch's random numbers if graph->torch_random is set; sets graph->random_offset in any
 * case. See torch_random.c.
 */
ont_status ont_pass_torch_random(ont_graph *g) ONT_MUST_USE;

/* Removes nodes without users, and unused optional outputs (from the second on). */
ont_status ont_pass_dce(ont_graph *g) ONT_MUST_USE;

/*
 * Promotes dtypes: puts Casts around nodes that have no kernel for their dtypes but one for wider dtypes. See
 * promote.c.
 */
ont_status ont_pass_promote(ont_graph *g) ONT_MUST_USE;

/* Computes float32 matmuls in bfloat16 as torch.set_float32_matmul_precision() allows. See matmul_precision.c. */
ont_status ont_pass_matmul_precision(ont_graph *g) ONT_MUST_USE;

/* Makes a Gemm of a Conv whose kernel covers the whole input, and removes biases of zeros. See conv_to_gemm.c. */
ont_status ont_pass_conv_to_gemm(ont_graph *g) ONT_MUST_USE;

/* Pads GEMMs in 16 bits to rows of 16 bytes, on devices. See align_products.c. */
ont_status ont_pass_align_products(ont_graph *g) ONT_MUST_USE;

/* Concatenates the gradients of slices that do not overlap. See join_slices.c. */
ont_status ont_pass_join_slices(ont_graph *g) ONT_MUST_USE;
/* Converts convolutions and the operators between them to channels-last (devices only). See channels_last.c. */
ont_status ont_pass_channels_last(ont_graph *g) ONT_MUST_USE;
/* Fuses those convolutions with the Relu behind them; before that pass, and only with it. See channels_last.c. */
ont_status ont_pass_fuse_conv_relu(ont_graph *g) ONT_MUST_USE;

/* Turns GatherElements and adding ScatterElements whose index is equal in a row into Gather and GatherGrad of rows. */
ont_status ont_pass_row_indices(ont_graph *g) ONT_MUST_USE;

/* Makes products with sparse matrices of rows that are looked up, and multiplied or added. See fuse_sparse_matmul.c. */
ont_status ont_pass_fuse_sparse_matmul(ont_graph *g) ONT_MUST_USE;

/* Fuses matmuls with the bias added to them, and with their Cast to float32. See fuse_gemm.c. */
ont_status ont_pass_fuse_gemm(ont_graph *g) ONT_MUST_USE;
/* Fuses a rotary position embedding (RoPE) into one node. See fuse_rotary.c. */
ont_status ont_pass_fuse_rotary(ont_graph *g) ONT_MUST_USE;
/* Lets that node read and write 16 bits, on devices. See fuse_rotary.c. */
ont_status ont_pass_narrow_rotary(ont_graph *g) ONT_MUST_USE;
/* Fuses GELU and its gradient into matmuls, on devices that have such kernels. See fuse_gelu.c. */
ont_status ont_pass_fuse_gelu(ont_graph *g) ONT_MUST_USE;

/* Fuses RMSNormalization that models write out, on devices that have such a kernel. See fuse_rms_norm.c. */
ont_status ont_pass_fuse_rms_norm(ont_graph *g) ONT_MUST_USE;
/* Fuses normalization with additions and Casts around it, on devices that have such kernels. See fuse_norm.c. */
ont_status ont_pass_fuse_norm(ont_graph *g) ONT_MUST_USE;

/* Lets cross-entropy read logits and write their gradient in 16 bits. See fuse_loss.c. */
ont_status ont_pass_fuse_loss(ont_graph *g) ONT_MUST_USE;

/*
 * Fused linear cross-entropy: the loss computes its logits tile by tile, or on a device in pieces of rows, so that they
 * are never stored. See stream_loss.c.
 */
ont_status ont_pass_stream_loss(ont_graph *g) ONT_MUST_USE;


/* Accumulates a Gather's gradient into another gradient in place. See fuse_gradients.c. */
ont_status ont_pass_fuse_gradients(ont_graph *g) ONT_MUST_USE;

/* Fuses BatchNormalization with the Add and Relu behind it, and their gradients. See fuse_batchnorm.c. */
ont_status ont_pass_fuse_batchnorm(ont_graph *g) ONT_MUST_USE;

/* Fuses elementwise nodes of one shape that feed each other; after differentiation. See fuse_elementwise.c. */
ont_status ont_pass_fuse_elementwise(ont_graph *g) ONT_MUST_USE;

/* Fuses reductions into the elementwise group whose results they read. See fuse_reductions.c. */
ont_status ont_pass_fuse_reductions(ont_graph *g) ONT_MUST_USE;

/* Lets weight-gradient matmuls also compute the bias gradient. See fuse_sums.c. */
ont_status ont_pass_fuse_sums(ont_graph *g) ONT_MUST_USE;

/*
 * Runs regions of torch.utils.checkpoint again in backward, which keeps only what leaves them, and subgraphs that the
 * caller names. See recompute_regions.c.
 */
ont_status ont_pass_recompute_regions(ont_graph *g) ONT_MUST_USE;

/*
 * Backward reads values of 16 bits in place of the float32 ones that forward makes of them, where elementwise nodes
 * read these, which run the Cast in the same pass over memory. See recompute.c.
 */
ont_status ont_pass_keep_narrow(ont_graph *g) ONT_MUST_USE;

/*
 * Rematerialization: recomputes forward values in backward that are cheap to compute and large to keep. See
 * evict.c.
 */
ont_status ont_pass_recompute(ont_graph *g) ONT_MUST_USE;


/*
 * Common subexpression elimination: merges nodes of equal operator, attributes and inputs; random nodes are excluded.
 */
ont_status ont_pass_cse(ont_graph *g) ONT_MUST_USE;

/* What the gradient pass added. Arrays live in the graph's arena. */
typedef struct ont_gradients {
    uint32_t n_forward_outputs; /* graph outputs before the pass; gradients of inputs follow them */
    uint32_t n_forward_inputs;  /* graph inputs before the pass; gradients of outputs follow them */
    int32_t *grad_input;        /* per forward output: the graph input that is its gradient; -1: not differentiable */
    int32_t *grad_output;       /* per forward input: the graph output that is its gradient; -1: no gradient flows */
} ont_gradients;

/*
 * Reverse-mode differentiation within the graph: appends backward nodes that compute the gradient of every input i with
 * wants[i] from the gradients of the outputs, which become new graph inputs. Gradient rules belong to the operators
 * (ops/<family>/<file>.c); this pass accumulates, reduces broadcast gradients and skips unused ones.
 * Source: Griewank and Walther, Evaluating Derivatives, 2nd ed., chapter 3 (adjoint accumulation).
 */
ont_status ont_pass_grad(ont_graph *g, const uint8_t *wants, ont_gradients *gradients) ONT_MUST_USE;

#endif
