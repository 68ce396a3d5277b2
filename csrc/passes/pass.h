/*
 * Passes: each is one function over a graph, idempotent, and leaves it verified. passes/pipeline.c holds the order.
 */
#ifndef ONT_PASSES_PASS_H
#define ONT_PASSES_PASS_H

#include "ops/op.h"

/*
 * Infers dtype and shape of every value from those of the inputs, which must be static, and folds on the way: a node
 * whose result is known becomes a constant, so that shape subgraphs vanish. EUNSUPPORTED names an operator without a
 * descriptor, EINVAL or ETYPE the node whose inputs do not fit.
 */
ont_status ont_pass_infer(ont_graph *g) ONT_MUST_USE;

/*
 * The same for a model whose shapes depend on contents. Nodes that cannot be inferred without the contents of an input
 * are left, with all that depends on them, and the rest of the graph is done; those inputs are the needs of this round.
 * Each round takes its contents from the facts and goes on; where the facts have come to their end, the pass stops with
 * n_needs > 0, and the graph computes them (run/program.c makes a probe of it). Rounds and needs come in the same order
 * every time, so that facts need no names.
 */
enum { ONT_KNOWN_VALUE_BYTES = 1 << 16 }; /* of one value that may decide about a program */

typedef struct ont_known_values {
    const ont_tensor *tensors; /* contents of the needs of all rounds so far */
    uint32_t n, used;
    ont_value **required;         /* of the round that found no facts; in the graph's arena */
    uint32_t n_required;
} ont_known_values;

ont_status ont_pass_infer_with_values(ont_graph *g, ont_known_values *known) ONT_MUST_USE;

/*
 * Takes sequences and optionals among the graph's outputs apart: their items stand there instead. counts, one per
 * output as they were: ONT_RESULT_TENSOR, ONT_RESULT_NONE (an optional without element), or the length of a sequence.
 */
enum { ONT_RESULT_TENSOR = -1, ONT_RESULT_NONE = -2 };
ont_status ont_pass_flatten(ont_graph *g, int32_t *counts) ONT_MUST_USE;

/*
 * Dropout on a GPU by torch's numbers, where graph->torch_random; graph->random_offset in any case. See torch_random.c.
 */
ont_status ont_pass_torch_random(ont_graph *g) ONT_MUST_USE;

/* Removes nodes whose outputs nobody reads, and drops optional outputs (from the second on) that nobody reads. */
ont_status ont_pass_dce(ont_graph *g) ONT_MUST_USE;

/* Puts Casts around nodes that have no kernel for their dtypes but one for wider ones; see promote.c. */
ont_status ont_pass_promote(ont_graph *g) ONT_MUST_USE;

/* Float32 products by bfloat16 ones, as torch.set_float32_matmul_precision() allows. See matmul_precision.c. */
ont_status ont_pass_matmul_precision(ont_graph *g) ONT_MUST_USE;

/* Makes a Gemm of a Conv whose kernel covers the whole input. See conv_to_gemm.c. */
ont_status ont_pass_conv_to_gemm(ont_graph *g) ONT_MUST_USE;

/* Joins products with the row added to them, and with their Cast to float32. See fuse_gemm.c. */
ont_status ont_pass_fuse_gemm(ont_graph *g) ONT_MUST_USE;
/* Makes one node of a rotary position embedding. See fuse_rotary.c. */
ont_status ont_pass_fuse_rotary(ont_graph *g) ONT_MUST_USE;
/* Puts GELU and its gradient into products, on devices that have them. See fuse_gelu.c. */
ont_status ont_pass_fuse_gelu(ont_graph *g) ONT_MUST_USE;

/* Has cross-entropy read and write scores and gradient in the 16 bits that they are had in. See fuse_loss.c. */
ont_status ont_pass_fuse_loss(ont_graph *g) ONT_MUST_USE;

/*
 * Has cross-entropy compute the scores it reads, where memory is asked for, so that they are never stored. See
 * stream_loss.c.
 */
ont_status ont_pass_stream_loss(ont_graph *g) ONT_MUST_USE;

/* Adds a Gather's gradient to another's in place. See fuse_gradients.c. */
ont_status ont_pass_fuse_gradients(ont_graph *g) ONT_MUST_USE;

/* Joins BatchNormalization with the Add and Relu behind it, and their gradients. See fuse_batchnorm.c. */
ont_status ont_pass_fuse_batchnorm(ont_graph *g) ONT_MUST_USE;

/*
 * Makes one node of elementwise nodes of one shape that feed each other; after differentiation. See fuse_elementwise.c.
 */
ont_status ont_pass_fuse_elementwise(ont_graph *g) ONT_MUST_USE;

/* Makes reductions part of the group whose results they read. See fuse_reductions.c. */
ont_status ont_pass_fuse_reductions(ont_graph *g) ONT_MUST_USE;

/* Has products sum the columns of what they read. See fuse_sums.c. */
ont_status ont_pass_fuse_sums(ont_graph *g) ONT_MUST_USE;

/* Computes again in backward what is cheap to compute and large to keep. See recompute.c. */
ont_status ont_pass_recompute(ont_graph *g) ONT_MUST_USE;

/* Merges nodes of equal operator, attributes and inputs; random ones are left alone. */
ont_status ont_pass_cse(ont_graph *g) ONT_MUST_USE;

/* What the gradient pass added. Arrays live in the graph's arena. */
typedef struct ont_gradients {
    uint32_t n_forward_outputs; /* graph outputs before the pass; input gradients follow them */
    uint32_t n_forward_inputs;  /* graph inputs before the pass; output gradients follow them */
    int32_t *grad_input;        /* per forward output: graph input that holds its gradient, -1: not differentiable */
    int32_t *grad_output;       /* per forward input: graph output that is its gradient, -1: none flows */
} ont_gradients;

/*
 * Reverse-mode differentiation in the same graph: appends backward nodes that compute the gradient of every input i
 * with wants[i] from the gradients of the outputs, which become new graph inputs. Rules are the operators' own
 * (ops/<family>.c); this walk accumulates, reduces broadcast gradients and skips what nobody needs.
 * Source: Griewank and Walther, Evaluating Derivatives, 2nd ed., chapter 3 (adjoint accumulation).
 */
ont_status ont_pass_grad(ont_graph *g, const uint8_t *wants, ont_gradients *gradients) ONT_MUST_USE;

/*
 * The same walk from y, seeded with ones, to the values xs, which count as independent of each other: grads[i] is the
 * gradient of xs[i], zeros where none flows. Nodes are built before `before`, as part of the forward.
 */
ont_status ont_pass_grad_within(ont_graph *g, ont_value *y, ont_value *const *xs, uint32_t n, ont_node *before,
                                ont_value **grads) ONT_MUST_USE;
/* Puts the gradients that a node with ONT_OP_GRADIENT names in its place; *next is the node to go on with. */
ont_status ont_pass_gradient_node(ont_graph *g, ont_node *node, ont_node **next) ONT_MUST_USE;

#endif
