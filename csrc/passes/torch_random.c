/*
 * Gives every Dropout node the random words that torch's CUDA kernel would draw at that point, and computes how far
 * torch's generator advances. torch launches T = 256 min(max blocks, ceil(n / 256)) threads for n elements; each thread
 * draws groups of four words from its own subsequence of Philox4x32-10, beginning at the generator's offset, which then
 * advances by 4 ceil(n / 4T). How elements are assigned to threads depends on the number of elements in 16 bytes
 * (cuda/kernels/math.cuh).
 *
 * Other nodes that draw have numbers of our own. They advance the generator as a Dropout of their size does, so that
 * the next run has another key.
 *
 * Runs before fusion and before passes that change dtypes, on a graph in the order of the model, which is the order of
 * eager's calls. Source: the behaviour of torch.native_dropout on CUDA, torch 2.10 to 2.13, for contiguous tensors at
 * aligned addresses.
 */
#include <string.h>

#include "ops/random/random.h"
#include "passes/pass.h"

static bool const_number(const ont_node *node, uint32_t input, const char *name, double *v)
{
    if (ont_node_in(node, input)) return ont_const_scalar(node, input, v) == ONT_OK;
    const ont_attr *attr = ont_attr_find(node, name, ONT_ATTR_INT);
    *v = attr ? (double)attr->i : ont_attr_float(node, name, *v);
    return true;
}

/* log2 of the number of elements that torch's kernel reads at once: 16 bytes, fewer if n is not divisible. */
static int lanes_of(ont_dtype dtype, int64_t n)
{
    int lanes = dtype == ONT_FLOAT64 ? 1 : dtype == ONT_FLOAT32 ? 2 : 3;
    while (n % (1 << lanes)) lanes--;
    return lanes;
}

/* The thread blocks that torch's kernel launches for n elements; the generator advances by what these draw. */
static int64_t advance(ont_graph *g, int64_t n)
{
    int64_t most = ont_random_blocks(g), blocks = (n + ONT_LAYOUT_THREADS - 1) / ONT_LAYOUT_THREADS;
    if (blocks > most) blocks = most;
    g->random_offset += 4 * (uint64_t)((n - 1) / (ONT_LAYOUT_THREADS * blocks * 4) + 1);
    return blocks;
}

/* Applies to nodes without a seed of their own, in training mode and with a ratio strictly between 0 and 1. */
static ont_status assign_layout(ont_graph *g, ont_node *node)
{
    const ont_value *x = ont_node_in(node, 0);
    double ratio = 0.5, training = 0;
    if (!const_number(node, 1, "ratio", &ratio) || !const_number(node, 2, "training_mode", &training)) return ONT_OK;
    int64_t n = ont_shape_count(&x->shape);
    uint64_t first = g->random_offset / 4;
    if (!training || !(ratio > 0) || !(ratio < 1) || !n || ont_attr_find(node, "seed", ONT_ATTR_INT)) return ONT_OK;
    uint64_t blocks = (uint64_t)advance(g, n);
    uint64_t layout = first | (blocks - 1) << ONT_LAYOUT_BLOCKS | (uint64_t)lanes_of(x->dtype, n) << ONT_LAYOUT_LANES;
    return g->torch_random ? ont_attr_set_int(g, node, "torch_layout", (int64_t)layout) : ONT_OK;
}

static bool draws(const ont_node *node)
{
    return ONT_IS(node, RandomNormal) || ONT_IS(node, RandomUniform) || ONT_IS(node, Bernoulli) ||
           ONT_IS(node, Multinomial);
}

ont_status ont_pass_torch_random(ont_graph *g)
{
    if (!ont_random_blocks(g)) return ONT_OK;
    g->random_offset = 0;
    for (ont_node *node = g->first; node; node = node->next) {
        if (ONT_IS(node, Dropout) && !*node->domain) ONT_TRY(assign_layout(g, node));
        int64_t n = draws(node) ? ont_shape_count(&node->outputs[0]->shape) : 0;
        if (n) (void)advance(g, n);
    }
    return ONT_OK;
}
