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

/* Removes nodes whose outputs nobody reads, and drops optional outputs (from the second on) that nobody reads. */
ont_status ont_pass_dce(ont_graph *g) ONT_MUST_USE;

/* Puts Casts around nodes that have no kernel for their dtypes but one for wider ones; see widen.c. */
ont_status ont_pass_widen(ont_graph *g) ONT_MUST_USE;

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

#endif
