/*
 * Fused linear cross-entropy: logits of a large vocabulary are not stored. A matmul, the cross-entropy behind it and
 * their gradients become StreamedCrossEntropy, which computes the logits tile by tile (ops/loss/streamed_loss.c), and
 * in the same tiles the gradients of the matmul's operands for a loss whose own gradient is 1; ScaleGradient multiplies
 * them by that gradient in backward. Three matmuls as before. Where the loss is one of each row, or rows are few, the
 * session may ask to save memory (recompute level 1 and above): then StreamedCrossEntropyGrad computes the logits again
 * in backward, a fourth matmul. Runs after differentiation and after fuse_gemm, which adds the bias to matmuls; before
 * recompute, with which it shares the cost budget of a step.
 *
 * Applies only if the loss and its gradient are the only users of the logits, and the gradients of the linear layer are
 * the only users of the logits' gradient. A 16-bit matmul that promote.c computes in float32 is streamed in float32,
 * without rounding the logits. A bfloat16 matmul that the processor itself has is streamed as it is, and logits are
 * rounded where the program with stored ones does. float16 ones are left to fuse_loss.c on the CPU: their gradient is
 * rounded after it is multiplied by that of the loss, lest it underflows.
 *
 * On a device (cuda/ops/streamed_loss.c) a piece of rows takes the place of a tile, and costs another pass over the
 * gradient of W. So pieces are large and few at level 0, where a step must not become slower: see device_rows(). In
 * backward the gradients are multiplied by that of the loss, and converted, by elementwise operators, which other
 * passes join. If the device's kernel declines, the graph stays as it is.
 */
#include <string.h>

#include "ops/matmul/matmul.h"
#include "passes/cost.h"
#include "passes/match.h"
#include "passes/options.h"
#include "passes/pass.h"

enum {
    MIN_SCORES_BYTES = 4 << 20,
    TILE_BYTES = 24 << 20,         /* of scores that exist at a time if forward computes the gradients */
    TILE_BYTES_LEVEL_0 = 50 << 20,
    MIN_ROWS = 128,                /* of such a tile */
    MIN_ROWS_HALF = 256,           /* the same with bfloat16 matmuls, beside which W's gradient takes longer to read */
    EARLY = 2,                     /* first of StreamedCrossEntropy's outputs that are gradients */
    /* On a device each further chunk of rows reads and writes the gradient of W again, 8 bytes an element: the time
     * of the three matmuls over 351 rows (docs/performance/cuda_model.md). DEVICE_ROWS: rows of a chunk at level 0;
     * fewer rows are not divided, so that this is at most 351/8192 = 4.3% of the matmuls. DEVICE_ROWS_LOW: the same at
     * levels 1 and 2. */
    DEVICE_ROWS = 8192,
    DEVICE_ROWS_LOW = 2048,
    DEVICE_TILE = 128,             /* the rows of a chunk are a multiple */
    DEVICE_BYTES = 256 << 20,      /* that must be saved at level 0 */
};

/* The nodes and values that are replaced. */
typedef struct head {
    ont_node *loss, *grad, *product;
    ont_value *h, *w, *row;                    /* (..., k), (k, n) or (n, k), and the bias (n) or NULL */
    ont_matmul_desc p;
    bool rounds;                               /* to 16 bits: the logits of a 16-bit matmul */
    ont_value *grad_h, *grad_w, *grad_row;     /* NULL: not needed */
} head;

static bool is_half(const head *x)
{
    return ont_dtype_is_half(x->h->dtype);
}

/* Whether the node converts between float32 and 16 bits. */
static bool is_conversion(const ont_node *node)
{
    if (!ONT_IS(node, Cast)) return false;
    ont_dtype from = ont_node_in(node, 0)->dtype, to = node->outputs[0]->dtype;
    return (from == ONT_FLOAT32 && ont_dtype_is_half(to)) || (to == ONT_FLOAT32 && ont_dtype_is_half(from));
}

/* The value before views, and before conversions from 16 bits, which are exact. */
static const ont_value *source(const ont_value *v)
{
    for (v = ont_value_root(v); v->def && is_conversion(v->def) && v->dtype == ONT_FLOAT32;)
        v = ont_value_root(ont_node_in(v->def, 0));
    return v;
}

/* The value before views and any conversions; *converted: there are some. */
static const ont_value *before_conversions(const ont_value *v, bool *converted)
{
    for (v = ont_value_root(v); v->def && is_conversion(v->def); *converted = true)
        v = ont_value_root(ont_node_in(v->def, 0));
    return v;
}

static bool is_view_or_conversion(const ont_node *node)
{
    return ont_node_is_view(node) || is_conversion(node);
}

/* Whether a matmul of operands of the one dtype that writes the other has a streamed form. */
static bool is_streamed_dtype(ont_dtype operand, ont_dtype out)
{
    if (ont_dtype_is_half(operand)) return out == operand || out == ONT_FLOAT32;
    return operand == out && (out == ONT_FLOAT32 || out == ONT_FLOAT64);
}

/* A matmul of matrices without scale; `row`: a bias is allowed. */
static bool is_matmul(const ont_node *node, bool row, ont_matmul_desc *p)
{
    if (!ont_is_matmul_or_gemm(node)) return false;
    if (ont_matmul_desc_read(node, p) != ONT_OK || p->alpha != 1 || p->vector_a || p->vector_b) return false;
    ont_dtype dtype = ont_node_in(node, 0)->dtype;
    if (!is_streamed_dtype(dtype, node->outputs[0]->dtype)) return false;
    const ont_value *c = ont_node_in(node, 2);
    if (!c) return true;
    return row && c->dtype == dtype && ont_matmul_desc_is_bias(p, &c->shape) &&
           ont_attr_float(node, "beta", 1.0) == 1;
}

/* ---- forward: matmul, views, loss ---- */

/*
 * Whether the loss and its gradient are the only users of the value, directly or through views and conversions, and use
 * it as their logits.
 */
static bool only_loss_uses(const ont_graph *g, const ont_value *v, const head *x)
{
    if (ont_value_is_output(g, v)) return false;
    for (const ont_use *use = v->uses; use; use = use->next) {
        if (use != &use->user->inputs[0]) return false;
        if (use->user == x->loss || use->user == x->grad) continue;
        if (!is_view_or_conversion(use->user) || !only_loss_uses(g, use->user->outputs[0], x)) return false;
    }
    return true;
}

static bool same_labels(const ont_node *loss, const ont_node *grad)
{
    const ont_attr *a = ont_attr_find(loss, "ignore_index", ONT_ATTR_INT);
    const ont_attr *b = ont_attr_find(grad, "ignore_index", ONT_ATTR_INT);
    if (!a != !b || (a && a->i != b->i) || ont_node_in(loss, 1) != ont_node_in(grad, 1)) return false;
    if (ont_attr_int(loss, "classes", -1) != ont_attr_int(grad, "classes", -1)) return false;
    return !strcmp(ont_attr_string(loss, "reduction", "mean"), ont_attr_string(grad, "reduction", "mean"));
}

/*
 * Finds the loss of which `grad` is the gradient, without class weights and log-probabilities, over logits (n, c).
 */
static bool find_loss(ont_node *grad, head *x)
{
    const ont_value *scores = ont_node_in(grad, 0), *pairs = ont_node_in(grad, 4);
    bool converted = false;
    ont_node *loss = pairs ? before_conversions(pairs, &converted)->def : NULL;
    if (!loss || !ONT_IS(loss, SoftmaxCrossEntropyLossPairs) || ont_node_in(loss, 0) != scores)
        return false;
    if (loss->outputs[1] || ont_node_in(loss, 2) || ont_node_in(grad, 2) || !same_labels(loss, grad)) return false;
    if (!loss->outputs[0]) return false;
    x->loss = loss;
    x->grad = grad;
    return ont_shape_count_range(&scores->shape, 2, scores->shape.rank) == 1;
}

/* Whether nothing but `half` and float32 lies between the product and the loss; *rounds: `half` does. */
static bool find_rounding(const ont_value *scores, ont_dtype half, bool *rounds)
{
    for (const ont_value *v = scores;; v = ont_node_in(v->def, 0)) {
        if (v->dtype != ONT_FLOAT32 && v->dtype != half) return false;
        *rounds |= v->dtype == half;
        if (!is_view_or_conversion(v->def)) return true;
    }
}

static bool find_product(const ont_graph *g, head *x)
{
    bool converted = false;
    const ont_value *scores = ont_node_in(x->grad, 0), *scores_root = before_conversions(scores, &converted);
    ont_node *node = scores_root->def;
    if (!node || node->backward || !is_matmul(node, true, &x->p) || x->p.trans_a) return false;
    x->product = node;
    x->h = ont_node_in(node, 0);
    x->w = ont_node_in(node, 1);
    x->row = ont_node_in(node, 2);
    ont_dtype dtype = x->loss->outputs[0]->dtype;
    if (dtype != (is_half(x) ? ONT_FLOAT32 : x->h->dtype)) return false;
    if (x->h->dtype == ONT_FLOAT16 && !g->device) return false;
    if (is_half(x) && !find_rounding(scores, x->h->dtype, &x->rounds)) return false;
    /* A model that rounds the logits of a float32 matmul gets what it asks for. */
    if ((converted || scores->dtype != dtype) &&
        !(ont_dtype_is_half(source(x->h)->dtype) && ont_dtype_is_half(source(x->w)->dtype))) return false;
    bool rows = x->w->shape.rank == 2 && ont_last_dim(scores_root) == x->p.n && scores->shape.dims[1] == x->p.n;
    return rows && only_loss_uses(g, scores_root, x);
}

/* ---- backward: views and conversions of the logits' gradient, and its users ---- */

static bool is_matrix(const ont_value *v, int64_t rows, int64_t columns)
{
    return v->shape.rank == 2 && v->shape.dims[0] == rows && v->shape.dims[1] == columns;
}

/* Records the first gradient of its kind; false for a second one or another shape. */
static bool set_once(ont_value **gradient, ont_node *node, const ont_value *operand)
{
    if (*gradient || !ont_shape_equal(&node->outputs[0]->shape, &operand->shape)) return false;
    *gradient = node->outputs[0];
    return true;
}

/* Whether `node`, whose input `at` is the logits' gradient d, is one of the gradients of the linear layer. */
static bool match_user(head *x, ont_node *node, uint32_t at)
{
    ont_matmul_desc p;
    if (ONT_IS(node, SumTo)) return x->row && set_once(&x->grad_row, node, x->row);
    if (!is_matmul(node, false, &p) || ont_node_in(node, at)->dtype != x->h->dtype) return false;
    ont_value *d = ont_node_in(node, at), *other = ont_node_in(node, !at);
    if (!at && !p.trans_a) /* gradient of h: d W' */
        return source(other) == source(x->w) && ont_shape_equal(&other->shape, &x->w->shape) &&
               p.trans_b != x->p.trans_b && ont_last_dim(d) == x->p.n && set_once(&x->grad_h, node, x->h);
    /* gradient of W: d' h or h' d, depending on how W is stored */
    int64_t rows = x->p.n ? ont_shape_count(&d->shape) / x->p.n : 0;
    if (at != !x->p.trans_b || !p.trans_a || p.trans_b || source(other) != source(x->h)) return false;
    return is_matrix(d, rows, x->p.n) && is_matrix(other, rows, x->p.k) && set_once(&x->grad_w, node, x->w);
}

static bool find_gradients(const ont_graph *g, head *x, const ont_value *d)
{
    if (ont_value_is_output(g, d)) return false;
    for (const ont_use *use = d->uses; use; use = use->next) {
        ont_node *user = use->user;
        uint32_t at = (uint32_t)(use - user->inputs);
        bool found = is_view_or_conversion(user) && !at ? find_gradients(g, x, user->outputs[0])
                                                        : at < 2 && match_user(x, user, at);
        if (!found) return false;
    }
    return true;
}

/* ---- rewriting ---- */

static ont_status copy_attributes(ont_graph *g, ont_node *node, const head *x)
{
    const ont_attr *ignored = ont_attr_find(x->loss, "ignore_index", ONT_ATTR_INT);
    const char *reduction = ont_attr_string(x->loss, "reduction", "mean");
    if (ignored) ONT_TRY(ont_attr_set_int(g, node, "ignore_index", ignored->i));
    ONT_TRY(ont_attr_set_int(g, node, "transB", x->p.trans_b));
    int64_t classes = ont_attr_int(x->loss, "classes", x->p.n);
    if (classes != x->p.n) ONT_TRY(ont_attr_set_int(g, node, "classes", classes));
    if (is_half(x)) ONT_TRY(ont_attr_set_int(g, node, "to", x->rounds ? x->h->dtype : ONT_FLOAT32));
    return ont_attr_set_string(g, node, "reduction", reduction, strlen(reduction));
}

/*
 * `rows`: of a tile, and forward computes the gradients; or 0. *made is NULL if the device declines the node. The loss
 * does not read it yet.
 */
static ont_status build_forward(ont_graph *g, const head *x, int64_t rows, ont_node **made)
{
    ont_value *operands[] = {x->h, x->w, ont_node_in(x->loss, 1), x->row};
    ont_value *const gradients[] = {x->grad_h, x->grad_w, x->grad_row};
    ont_builder b = {.graph = g, .before = x->loss, .origin = ont_node_origin(x->loss)};
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "StreamedCrossEntropy", operands, 4, rows ? EARLY + 3 : 2);
    if (!node) return b.status;
    node->name = x->loss->name;
    ONT_TRY(copy_attributes(g, node, x));
    if (rows) {
        ONT_TRY(ont_attr_set_int(g, node, "rows", rows));
        node->outputs[1] = NULL;
    }
    for (uint32_t i = 0; rows && i < 3; i++)
        if (!gradients[i]) node->outputs[EARLY + i] = NULL;
    ont_build_done(&b, node);
    ONT_TRY(b.status);
    if (g->device && !ont_op_has_kernel(node, g->device)) {
        ont_graph_remove_node(g, node);
        node = NULL;
    }
    *made = node;
    return ONT_OK;
}

/* `gradient` takes the place of `old`, in its dtype. */
static ont_status replace_gradient(ont_builder *b, ont_value *old, ont_value *gradient)
{
    if (old->dtype != gradient->dtype) gradient = ont_build_cast(b, gradient, old->dtype);
    if (b->status == ONT_OK) ont_value_replace_uses(b->graph, old, gradient);
    return b->status;
}

/* x times the gradient of the loss. The other passes of a device join Mul with what converts or adds the result. */
static ont_value *scale(ont_builder *b, ont_value *x, ont_value *dloss)
{
    ont_value *operands[] = {x, dloss};
    bool device = b->graph->device != NULL;
    ont_node *node = ont_build_node(b, device ? "" : ONT_DOMAIN, device ? "Mul" : "ScaleGradient", operands, 2, 1);
    return node ? ont_build_done(b, node) : NULL;
}

/* The gradients that forward computed, times the gradient of the loss. */
static ont_status scale_backward(ont_graph *g, const head *x, const ont_node *forward)
{
    ont_value *const gradients[] = {x->grad_h, x->grad_w, x->grad_row};
    ont_builder b = {.graph = g, .before = x->grad, .backward = true, .origin = ont_node_origin(x->grad)};
    for (uint32_t i = 0; i < 3; i++) {
        if (!gradients[i]) continue;
        ont_value *scaled = scale(&b, forward->outputs[EARLY + i], ont_node_in(x->grad, 3));
        ONT_TRY(b.status);
        ONT_TRY(replace_gradient(&b, gradients[i], scaled));
    }
    return ONT_OK;
}

/* *made is NULL if the device declines the node, and the gradients stay those of the stored scores. */
static ont_status stream_backward(ont_graph *g, const head *x, ont_value *pairs, ont_node **made)
{
    ont_value *operands[] = {x->h, x->w, ont_node_in(x->loss, 1), x->row, ont_node_in(x->grad, 3), pairs};
    ont_value *const gradients[] = {x->grad_h, x->grad_w, x->grad_row};
    ont_builder b = {.graph = g, .before = x->grad, .backward = true, .origin = ont_node_origin(x->grad)};
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "StreamedCrossEntropyGrad", operands, 6, 3);
    if (!node) return b.status;
    for (uint32_t i = 0; i < 3; i++)
        if (!gradients[i]) node->outputs[i] = NULL;
    ONT_TRY(copy_attributes(g, node, x));
    ont_build_done(&b, node);
    ONT_TRY(b.status);
    *made = node;
    if (g->device && !ont_op_has_kernel(node, g->device)) {
        ont_graph_remove_node(g, node);
        *made = NULL;
        return ONT_OK;
    }
    for (uint32_t i = 0; i < 3; i++)
        if (gradients[i]) ONT_TRY(replace_gradient(&b, gradients[i], node->outputs[i]));
    return ONT_OK;
}

/* Whether the second matmul is within the cost budget. */
static bool is_within_budget(const ont_graph *g, const head *x)
{
    double budget = ont_graph_cost(g) * ont_recompute_budget_fraction(g->recompute.level);
    return ont_node_cost(x->product) + g->recompute.cost <= budget;
}

/*
 * Whether the float32 gradient of a 16-bit W, which backward rounds, would take more bytes until then than the scores
 * that it saves.
 */
static bool keeps_more(const head *x, size_t score_bytes)
{
    return x->grad_w && ont_dtype_is_half(x->grad_w->dtype) &&
           (size_t)ont_shape_count(&x->w->shape) * sizeof(float) >= score_bytes;
}

/*
 * Rows of scores that exist at a time if forward computes the gradients too, at most 1/`least_tiles` of all; 0: it
 * cannot. W and its gradient are read once for each such tile, so that few rows take long.
 */
static int64_t early_rows(const ont_graph *g, const head *x, int64_t least_tiles)
{
    const ont_value *scores = ont_node_in(x->grad, 0);
    int64_t count = scores->shape.dims[0], classes = scores->shape.dims[1];
    bool low = g->recompute.level >= ONT_RECOMPUTE_LAYERS;
    if (!strcmp(ont_attr_string(x->loss, "reduction", "mean"), "none") || !count || !classes) return 0;
    if (ont_recompute_is_everywhere()) return low ? 0 : 3; /* for tests */
    int64_t tile = low ? TILE_BYTES : TILE_BYTES_LEVEL_0;
    int64_t rows = tile / ((int64_t)ont_dtype_size(x->h->dtype) * classes) / 16 * 16;
    int64_t least = is_half(x) ? MIN_ROWS_HALF : MIN_ROWS;
    if (rows > count / least_tiles) rows = count / least_tiles / 16 * 16;
    if (rows < least) rows = least;
    return rows * least_tiles <= count ? rows : 0;
}

static size_t bytes_of(const ont_value *v)
{
    return v ? (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype) : 0;
}

/*
 * Bytes by which a device's plan gets smaller with such a piece of the scores. The gradients of h and W exist from
 * forward on, in float32 for 16 bits; a gradient of W that is a result of the graph has another block.
 */
static int64_t saved_on_device(const ont_graph *g, const head *x, int64_t rows)
{
    const ont_value *scores = x->product->outputs[0];
    int64_t all = (int64_t)bytes_of(scores), count = ont_node_in(x->grad, 0)->shape.dims[0];
    int64_t wide = is_half(x) ? (int64_t)sizeof(float) : (int64_t)ont_dtype_size(x->h->dtype);
    int64_t h = x->grad_h ? ont_shape_count(&x->h->shape) * wide : 0;
    int64_t w = x->grad_w ? ont_shape_count(&x->w->shape) * wide : 0;
    int64_t stored = x->grad_w && !ont_value_is_output(g, x->grad_w) ? (int64_t)bytes_of(x->grad_w) : 0;
    return all - all / count * rows - h - w + stored;
}

/*
 * Rows of a piece on a device; 0: the scores are stored. A piece more costs time in proportion to W's gradient, so that
 * few are made at level 0. Level 1 and above ask for memory: pieces are smaller, and what is saved may be less.
 */
static int64_t device_rows(const ont_graph *g, const head *x)
{
    int64_t count = ont_node_in(x->grad, 0)->shape.dims[0];
    bool low = g->recompute.level >= ONT_RECOMPUTE_LAYERS;
    if (!strcmp(ont_attr_string(x->loss, "reduction", "mean"), "none") || !count || !x->p.n) return 0;
    if (ont_recompute_is_everywhere()) return low ? 0 : 3; /* for tests */
    int64_t pieces = count / (low ? DEVICE_ROWS_LOW : DEVICE_ROWS);
    if (!low && pieces == 1) pieces = 2;
    if (pieces < 2) return 0;
    int64_t rows = (count + pieces - 1) / pieces;
    rows = (rows + DEVICE_TILE - 1) / DEVICE_TILE * DEVICE_TILE;
    return saved_on_device(g, x, rows) >= (low ? MIN_SCORES_BYTES : DEVICE_BYTES) ? rows : 0;
}

static ont_status stream_early(ont_graph *g, const head *x, int64_t rows)
{
    ont_node *forward = NULL;
    ONT_TRY(build_forward(g, x, rows, &forward));
    if (!forward) return ONT_OK;
    ont_value_replace_uses(g, x->loss->outputs[0], forward->outputs[0]);
    return scale_backward(g, x, forward);
}

/* With a second matmul in backward. */
static ont_status stream_again(ont_graph *g, const head *x)
{
    ont_node *forward = NULL, *backward = NULL;
    ONT_TRY(build_forward(g, x, 0, &forward));
    if (!forward) return ONT_OK;
    ONT_TRY(stream_backward(g, x, forward->outputs[1], &backward));
    if (!backward) {
        ont_graph_remove_node(g, forward);
        return ONT_OK;
    }
    ont_value_replace_uses(g, x->loss->outputs[0], forward->outputs[0]);
    g->recompute.cost += ont_node_cost(x->product);
    g->recompute.bytes += bytes_of(x->product->outputs[0]);
    g->recompute.nodes++;
    return ONT_OK;
}

/*
 * With few rows at level 1 or above, backward computes the scores again in small tiles if the cost budget allows a
 * second product.
 */
static ont_status stream(ont_graph *g, const head *x)
{
    bool low = g->recompute.level >= ONT_RECOMPUTE_LAYERS, everywhere = ont_recompute_is_everywhere();
    size_t bytes = bytes_of(x->product->outputs[0]);
    if (!everywhere && (bytes < MIN_SCORES_BYTES || keeps_more(x, bytes))) return ONT_OK;
    int64_t rows = g->device ? device_rows(g, x) : early_rows(g, x, low ? 4 : 2);
    bool again = low && !rows && (everywhere || is_within_budget(g, x));
    if (!rows && !again && !g->device) rows = early_rows(g, x, 2);
    if (rows) return stream_early(g, x, rows);
    return again ? stream_again(g, x) : ONT_OK;
}

ont_status ont_pass_stream_loss(ont_graph *g)
{
    uint32_t before = g->n_nodes;
    for (ont_node *node = g->first; node; node = node->next) {
        head x = {0};
        if (!ONT_IS(node, SoftmaxCrossEntropyGrad) || !find_loss(node, &x)) continue;
        if (find_product(g, &x) && find_gradients(g, &x, node->outputs[0])) ONT_TRY(stream(g, &x));
    }
    return g->n_nodes == before ? ONT_OK : ont_pass_dce(g);
}
