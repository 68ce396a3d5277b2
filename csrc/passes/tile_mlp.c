/*
 * The backward of an MLP in tiles of its hidden columns: X -> products -> elementwise -> product becomes one node of
 * backward (ops/matmul/mlp_grad.h), which computes the hidden values again. So none of them is kept, and backward never
 * holds a whole one. At memory levels 1 and 2, where rematerialization would otherwise run the same products again and
 * hold three hidden layers at once; before that pass, which then plans the rest.
 *
 * Hidden values are found from a product of forward: results of elementwise nodes over them, in both phases, and the
 * gradient of the hidden layer, a product of backward. Nodes of backward that read them must be elementwise too, or the
 * gradient of a weight, of X or of a bias: then nothing else depends on them. Another reader, or another operand of
 * that shape, as LoRA adds to a product, leaves the MLP as it is.
 */
#include "base/alloc.h"
#include "base/number.h"
#include "ops/elementwise/elementwise.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul/mlp_grad.h"
#include "passes/pipeline.h"
#include "passes/recompute.h"

enum { NODES = ONT_TILE_STEPS, VALUES = 2 * NODES, OPERANDS = ONT_TILE_OPERANDS + 2 * ONT_MLP_PRODUCTS + 2,
       MIN_HIDDEN_BYTES = 4 << 20, MIN_COLUMNS = 512 };

/* A product or sum of backward that reads a hidden value, and that value. */
typedef struct reader {
    ont_node *node;
    const ont_value *hidden;
    bool transposed; /* of a weight's gradient: (hidden, k) */
} reader;

typedef struct mlp {
    ont_graph *g;
    const uint32_t *position; /* by node id */
    int64_t rows, columns;    /* of a hidden value */
    const ont_value *x;
    const ont_value *values[VALUES]; /* storages of hidden values */
    ont_node *nodes[NODES];   /* elementwise */
    ont_node *products[ONT_MLP_PRODUCTS];
    reader weight_grads[ONT_MLP_WEIGHT_GRADS], row_grads[ONT_MLP_ROW_GRADS], sums[ONT_MLP_SUMS];
    int n_values, n_nodes, n_products, n_weight_grads, n_row_grads, n_sums;
    ont_node *dy; /* the product of backward, which reads dY */
} mlp;

/* ---- the hidden values ---- */

static bool is_hidden(const mlp *m, const ont_value *v)
{
    return v->has_shape && ont_last_dim(v) == m->columns && ont_shape_count(&v->shape) == m->rows * m->columns;
}

/* The value before views and before casts of 16 bits to float32, which are exact. */
static const ont_value *source_of(const ont_value *v)
{
    for (v = ont_value_root(v); v->def && ONT_IS(v->def, Cast) && v->dtype == ONT_FLOAT32;)
        if (ont_dtype_is_half(ont_node_in(v->def, 0)->dtype)) v = ont_value_root(ont_node_in(v->def, 0));
        else break;
    return v;
}

/* Whether both are the same rows. */
static bool is_same(const ont_value *a, const ont_value *b)
{
    return source_of(a) == source_of(b) && ont_last_dim(a) == ont_last_dim(b) && a->dtype == b->dtype;
}

/* Whether the value is there when backward begins. */
static bool is_available(const ont_value *v)
{
    const ont_value *root = ont_value_root(v);
    return root->kind != ONT_VALUE_NODE || !root->def->backward;
}

/* A product of rows and a matrix, perhaps with a bias, that is as exact as its operands. */
static bool is_row_product(const ont_node *node, ont_matmul_desc *p)
{
    if (!ONT_IS(node, Gemm) && !ONT_IS(node, MatMul) && !ONT_IS(node, FusedMatMul)) return false;
    const ont_value *out = ont_node_out(node, 0), *bias = ont_node_in(node, 2);
    if (ont_node_out(node, 1) || ont_matmul_desc_read(node, p) != ONT_OK) return false;
    if (out->dtype != ONT_FLOAT32 && out->dtype != ONT_FLOAT64) return false;
    if (ont_node_in(node, 0)->dtype != out->dtype || ont_attr_int(node, "bf16x3", 0)) return false;
    if (bias && (!ont_matmul_desc_is_bias(p, &bias->shape) || ont_attr_float(node, "beta", 1.0) != 1)) return false;
    return p->alpha == 1 && !p->trans_a && !p->vector_a && !p->vector_b && p->b.rank == 2 && p->k;
}

/* The exponent of a power that is one or two multiplications; 0: none. */
static int exponent_of(const ont_node *node)
{
    if (!ONT_IS(node, Pow) || ont_pow_constant_accept(node)) return 0;
    double e = ont_number_at(ont_node_in(node, 1)->data->data, ont_node_in(node, 1)->data->dtype, 0);
    return e == 2 || e == 3 ? (int)e : 0;
}

/* An elementwise node with a hidden result; `step`: what it does to operands. */
static bool is_elementwise(const mlp *m, const ont_node *node, ont_tile_step *step)
{
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (!node->outputs[i] != (i > 0)) return false;
    if (!is_hidden(m, node->outputs[0])) return false;
    ont_dtype dtype = node->outputs[0]->dtype;
    *step = (ont_tile_step){.kind = ONT_TILE_BINARY, .loop = ONT_LOOP_Mul, .in = dtype, .out = dtype, .n_operands = 1};
    return exponent_of(node) || (node->op->tile && node->op->tile(node, step));
}

static bool is_known(const mlp *m, const ont_value *root)
{
    for (int i = 0; i < m->n_values; i++)
        if (m->values[i] == root) return true;
    return false;
}

static bool add_product(mlp *m, ont_node *node)
{
    ont_matmul_desc p;
    const ont_value *bias = ont_node_in(node, 2);
    if (m->n_products == ONT_MLP_PRODUCTS || !is_row_product(node, &p)) return false;
    if (!is_available(ont_node_in(node, 1)) || (bias && !is_available(bias))) return false;
    if (node->backward ? m->dy != NULL : !is_same(ont_node_in(node, 0), m->x)) return false;
    if (node->backward) m->dy = node;
    m->products[m->n_products++] = node;
    return true;
}

/* A single number, or one for each column. */
static bool is_broadcast(const mlp *m, const ont_value *v)
{
    int64_t count = ont_shape_count(&v->shape);
    return count == 1 || (count == m->columns && ont_last_dim(v) == count);
}

static bool add_value(mlp *m, const ont_value *v);

static bool add_node(mlp *m, ont_node *node, const ont_tile_step *step)
{
    if (m->n_nodes == NODES) return false;
    m->nodes[m->n_nodes++] = node;
    for (int k = 0; k < step->n_operands; k++) {
        const ont_value *operand = ont_node_in(node, (uint32_t)k);
        if (!(is_broadcast(m, operand) ? is_available(operand) : add_value(m, operand))) return false;
    }
    return true;
}

/* Adds a hidden value, and those that it is computed from; false if it cannot be computed for some columns alone. */
static bool add_value(mlp *m, const ont_value *v)
{
    ont_tile_step step;
    const ont_value *root = ont_value_root(v);
    if (is_known(m, root)) return true;
    if (m->n_values == VALUES || !is_hidden(m, root) || root->kind != ONT_VALUE_NODE) return false;
    m->values[m->n_values++] = root;
    return is_elementwise(m, root->def, &step) ? add_node(m, root->def, &step) : add_product(m, root->def);
}

/* ---- the readers of hidden values ---- */

static bool add_reader(reader *readers, int *n, int most, reader r)
{
    if (*n == most) return false;
    readers[(*n)++] = r;
    return true;
}

/* A sum over the rows. */
static bool is_sum(const mlp *m, const ont_node *node)
{
    const ont_shape *shape = &node->outputs[0]->shape;
    bool fits = shape->rank == 1 && shape->dims[0] == m->columns;
    return ONT_IS(node, SumTo) && fits && is_hidden(m, ont_node_in(node, 0));
}

/* R' L or L' R, both being matrices of the same rows. */
static bool is_weight_grad(const mlp *m, const ont_node *node, uint32_t at)
{
    ont_matmul_desc p;
    if (!ONT_IS(node, FusedMatMul) || ont_matmul_desc_read(node, &p) != ONT_OK) return false;
    return at < 2 && p.alpha == 1 && p.trans_a && !p.trans_b && p.a.rank == 2 && p.b.rank == 2 && p.k == m->rows &&
           (at ? p.n : p.m) == m->columns && !ont_node_in(node, 2) && node->n_outputs == 1 &&
           node->outputs[0]->dtype == ont_node_in(node, 0)->dtype && !ont_attr_int(node, "bf16x3", 0);
}

static bool add_backward_reader(mlp *m, ont_node *node, uint32_t at, const ont_value *hidden)
{
    ont_matmul_desc p;
    reader r = {node, hidden, !at};
    if (is_sum(m, node)) return add_reader(m->sums, &m->n_sums, ONT_MLP_SUMS, r);
    if (is_weight_grad(m, node, at)) return add_reader(m->weight_grads, &m->n_weight_grads, ONT_MLP_WEIGHT_GRADS, r);
    if (at || !is_row_product(node, &p) || p.k != m->columns || ont_node_in(node, 2)) return false;
    return is_available(ont_node_in(node, 1)) && add_reader(m->row_grads, &m->n_row_grads, ONT_MLP_ROW_GRADS, r);
}

/* Adds what reads the hidden value `root` through `v`; false if backward reads it in another way. */
static bool add_readers(mlp *m, const ont_value *v, const ont_value *root)
{
    ont_tile_step step;
    if (root->def->backward && ont_value_is_output(m->g, v)) return false;
    for (const ont_use *use = v->uses; use; use = use->next) {
        ont_node *user = use->user;
        uint32_t at = (uint32_t)(use - user->inputs);
        bool fits = !user->backward;
        if (ont_node_is_view(user) && !at) fits = add_readers(m, user->outputs[0], root);
        else if (is_elementwise(m, user, &step)) fits = add_value(m, user->outputs[0]);
        else if (user->backward) fits = add_backward_reader(m, user, at, root);
        if (!fits) return false;
    }
    return true;
}

/* ---- what the readers have in common ---- */

static const ont_value *other_operand(const reader *r)
{
    return ont_node_in(r->node, r->transposed);
}

static bool reads_dy(const mlp *m, const reader *r)
{
    return is_same(other_operand(r), ont_node_in(m->dy, 0));
}

/* The sum that the value becomes part of, by additions that alone read it. */
static const ont_value *sum_of(const ont_graph *g, const ont_value *v)
{
    for (ont_node *user; (user = ont_single_user(g, v)) != NULL; v = user->outputs[0]) {
        bool adds = ONT_IS(user, Add) && ont_shape_equal(&user->outputs[0]->shape, &v->shape);
        if (!adds && !ont_node_is_view(user)) break;
    }
    return v;
}

/* The addition that reads the value, or a view of it. */
static ont_node *addition_of(const ont_graph *g, const ont_value *v, ont_value **other)
{
    ont_node *user = ont_single_user(g, v);
    while (user && ont_node_is_view(user)) v = user->outputs[0], user = ont_single_user(g, v);
    if (!user || !ONT_IS(user, Add)) return NULL;
    *other = ont_node_in(user, ont_node_in(user, 0) == v);
    return ont_shape_equal(&(*other)->shape, &user->outputs[0]->shape) ? user : NULL;
}

/* Whether the products with X have one width, and their row gradients are added up, so that one output has the sum. */
static bool is_one_sum(const mlp *m)
{
    ont_value *other;
    for (int i = 0; i < m->n_row_grads; i++)
        if (ont_last_dim(m->row_grads[i].node->outputs[0]) != ont_last_dim(m->x)) return false;
    if (m->n_row_grads < 2) return true;
    const ont_value *first = m->row_grads[0].node->outputs[0], *second = m->row_grads[1].node->outputs[0];
    return sum_of(m->g, first) == sum_of(m->g, second) && addition_of(m->g, second, &other);
}

static bool finds_all(mlp *m, ont_node *product)
{
    ont_matmul_desc p;
    if (product->backward || !is_row_product(product, &p) || p.n < 2) return false;
    m->columns = p.n;
    m->rows = ont_shape_count(&product->outputs[0]->shape) / p.n;
    m->x = ont_node_in(product, 0);
    if (m->rows < 2 || !add_value(m, product->outputs[0])) return false;
    for (int i = 0; i < m->n_values; i++)
        if (!add_readers(m, m->values[i], m->values[i])) return false;
    if (!m->dy || m->n_products < 2 || m->n_weight_grads + m->n_row_grads + m->n_sums == 0) return false;
    if (m->products[0]->backward) return false;
    for (int i = 0; i < m->n_weight_grads; i++)
        if (!reads_dy(m, &m->weight_grads[i]) && !is_same(other_operand(&m->weight_grads[i]), m->x)) return false;
    return is_one_sum(m);
}

/* ---- the elementwise program ---- */

typedef struct writer {
    mlp *m;
    ont_mlp description;
    ont_tile_program program;
    ont_value *inputs[OPERANDS]; /* of the new node */
    int n_inputs;
    const ont_value *results[ONT_TILE_RESULTS];
    bool needed[NODES];
    int step[NODES]; /* that gives the node's result */
} writer;

/* The index of a value among inputs [first, n), to which it is added; -1: there are too many. */
static int input_of(writer *w, ont_value *v, int first)
{
    for (int i = first; i < w->n_inputs; i++)
        if (w->inputs[i] == v) return i;
    if (w->n_inputs == OPERANDS) return -1;
    w->inputs[w->n_inputs] = v;
    return w->n_inputs++;
}

static int node_of(const mlp *m, const ont_value *root)
{
    for (int i = 0; i < m->n_nodes; i++)
        if (m->nodes[i] == root->def) return i;
    return -1;
}

/* The first of several casts of one value to one type. */
static const ont_value *first_cast(const mlp *m, const ont_value *root)
{
    for (int i = 0; i < m->n_nodes && ONT_IS(root->def, Cast); i++) {
        const ont_value *other = m->nodes[i]->outputs[0];
        if (ONT_IS(m->nodes[i], Cast) && other->dtype == root->dtype &&
            ont_value_root(ont_node_in(m->nodes[i], 0)) == ont_value_root(ont_node_in(root->def, 0))) return other;
    }
    return root;
}

/* The value as products read it: of 16 bits its cast to float32. */
static const ont_value *widened(const mlp *m, const ont_value *root)
{
    for (int i = 0; i < m->n_nodes && ont_dtype_is_half(root->dtype); i++)
        if (ONT_IS(m->nodes[i], Cast) && m->nodes[i]->outputs[0]->dtype == ONT_FLOAT32 &&
            ont_value_root(ont_node_in(m->nodes[i], 0)) == root) return m->nodes[i]->outputs[0];
    return root;
}

static int operands_of(const mlp *m, const ont_node *node)
{
    ont_tile_step step = {0};
    return is_elementwise(m, node, &step) ? step.n_operands : 0;
}

static void mark_needed(writer *w, const ont_value *v)
{
    int i = node_of(w->m, first_cast(w->m, ont_value_root(v)));
    if (i < 0 || w->needed[i]) return;
    w->needed[i] = true;
    const ont_node *node = w->m->nodes[i];
    for (int k = 0; k < operands_of(w->m, node); k++)
        if (!is_broadcast(w->m, ont_node_in(node, (uint32_t)k))) mark_needed(w, ont_node_in(node, (uint32_t)k));
}

/* The index of a hidden value among the results, to which it is added; -1: it is none that the program computes. */
static int result_of(writer *w, const ont_value *root)
{
    int k = 0;
    root = first_cast(w->m, widened(w->m, root));
    while (k < w->program.n_results && w->results[k] != root) k++;
    if (k < w->program.n_results) return k;
    bool fits = node_of(w->m, root) >= 0 && root->dtype == w->m->products[0]->outputs[0]->dtype;
    if (k == ONT_TILE_RESULTS || !fits) return -1;
    w->results[w->program.n_results++] = root;
    return k;
}

/* An operand: a step from 0 on, or -1 - i for operand i of the program. NONE: there are too many. */
enum { NONE = INT32_MIN };

static int operand_of(writer *w, ont_value *v)
{
    const mlp *m = w->m;
    const ont_value *root = ont_value_root(v);
    if (is_broadcast(m, v)) {
        int at = input_of(w, v, (int)w->description.first_operand);
        return at < 0 ? NONE : -1 - (m->n_products + at - (int)w->description.first_operand);
    }
    for (int i = 0; i < m->n_products; i++)
        if (m->products[i] == root->def) return -1 - i;
    return w->step[node_of(m, first_cast(m, root))];
}

static bool add_step(writer *w, const ont_tile_step *step)
{
    if (w->program.n_steps == ONT_TILE_STEPS) return false;
    w->program.steps[w->program.n_steps++] = *step;
    return true;
}

static bool write_node(writer *w, int i)
{
    const ont_node *node = w->m->nodes[i];
    ont_tile_step step;
    int exponent = exponent_of(node);
    if (!is_elementwise(w->m, node, &step)) return false;
    for (int k = 0; k < step.n_operands; k++) {
        step.operand[k] = operand_of(w, ont_node_in(node, (uint32_t)k));
        if (step.operand[k] == NONE) return false;
    }
    if (exponent) step.n_operands = 2, step.operand[1] = step.operand[0];
    if (exponent == 3) {
        if (!add_step(w, &step)) return false;
        step.operand[0] = w->program.n_steps - 1;
    }
    w->step[i] = w->program.n_steps;
    return add_step(w, &step);
}

/* Operands get their final numbers, and the last step's result becomes result 0. */
static bool link_program(writer *w)
{
    ont_tile_program *p = &w->program;
    p->n_operands = w->m->n_products + w->n_inputs - (int)w->description.first_operand;
    if (p->n_operands > ONT_TILE_OPERANDS) return false;
    for (int j = 0; j < p->n_steps; j++)
        for (int k = 0; k < p->steps[j].n_operands; k++) {
            int at = p->steps[j].operand[k];
            p->steps[j].operand[k] = at < 0 ? -1 - at : p->n_operands + at;
        }
    for (int k = 0; k < p->n_results; k++) {
        p->result[k] = w->step[node_of(w->m, w->results[k])];
        if (p->result[k] != p->n_steps - 1) continue;
        const ont_value *last = w->results[k];
        w->results[k] = w->results[0], p->result[k] = p->result[0];
        w->results[0] = last, p->result[0] = p->n_steps - 1;
    }
    return ont_tile_link(p);
}

/* Finds the inputs that are weights and biases. */
static bool describe_products(writer *w)
{
    const mlp *m = w->m;
    ont_matmul_desc p;
    ont_mlp *d = &w->description;
    w->n_inputs = ONT_MLP_WEIGHTS;
    d->n_products = m->n_products;
    for (int i = 0; i < m->n_products; i++) {
        ont_node *node = m->products[i];
        if (ont_matmul_desc_read(node, &p) != ONT_OK) return false;
        d->products[i].left = node->backward ? ONT_MLP_DY : ONT_MLP_X;
        d->products[i].weight = input_of(w, ont_node_in(node, 1), ONT_MLP_WEIGHTS);
        d->products[i].transposed = p.trans_b;
        d->products[i].bias = ont_node_in(node, 2) ? input_of(w, ont_node_in(node, 2), ONT_MLP_WEIGHTS) : 0;
    }
    d->n_row_grads = m->n_row_grads;
    for (int i = 0; i < m->n_row_grads; i++) {
        if (ont_matmul_desc_read(m->row_grads[i].node, &p) != ONT_OK) return false;
        d->row_grads[i].weight = input_of(w, ont_node_in(m->row_grads[i].node, 1), ONT_MLP_WEIGHTS);
        d->row_grads[i].transposed = p.trans_b;
    }
    d->first_operand = w->n_inputs;
    return true;
}

/* Describes the node; false where it exceeds a limit. */
static bool describe(writer *w)
{
    mlp *m = w->m;
    ont_mlp *d = &w->description;
    if (!describe_products(w)) return false;
    bool fits = true;
    for (int i = 0; i < m->n_weight_grads; i++) fits &= result_of(w, m->weight_grads[i].hidden) >= 0;
    for (int i = 0; i < m->n_row_grads; i++) fits &= result_of(w, m->row_grads[i].hidden) >= 0;
    for (int i = 0; i < m->n_sums; i++) fits &= result_of(w, m->sums[i].hidden) >= 0;
    for (int k = 0; k < w->program.n_results; k++) mark_needed(w, w->results[k]);
    for (int i = 0; i < m->n_nodes && fits; i++) fits = !w->needed[i] || write_node(w, i);
    if (!fits || !link_program(w)) return false;
    d->n_weight_grads = m->n_weight_grads;
    for (int i = 0; i < m->n_weight_grads; i++) {
        d->weight_grads[i].result = result_of(w, m->weight_grads[i].hidden);
        d->weight_grads[i].left = reads_dy(m, &m->weight_grads[i]) ? ONT_MLP_DY : ONT_MLP_X;
        d->weight_grads[i].transposed = m->weight_grads[i].transposed;
    }
    for (int i = 0; i < m->n_row_grads; i++) d->row_grads[i].result = result_of(w, m->row_grads[i].hidden);
    d->n_sums = m->n_sums;
    for (int i = 0; i < m->n_sums; i++) d->sums[i] = result_of(w, m->sums[i].hidden);
    return true;
}

/* ---- rewriting ---- */

/* The first node that reads dY, and dY as it does. */
static ont_node *first_reader(const mlp *m, ont_value **dy)
{
    ont_node *first = m->dy;
    *dy = ont_node_in(first, 0);
    for (int i = 0; i < m->n_weight_grads; i++) {
        const reader *r = &m->weight_grads[i];
        if (!reads_dy(m, r) || m->position[r->node->id] > m->position[first->id]) continue;
        first = r->node;
        *dy = ont_node_in(first, r->transposed);
    }
    return first;
}

static ont_status build(writer *w, ont_node **result)
{
    const mlp *m = w->m;
    ont_builder b = {.graph = m->g, .backward = true, .origin = ont_node_origin(m->dy)};
    b.before = first_reader(m, &w->inputs[ONT_MLP_DY]);
    w->inputs[ONT_MLP_X] = ont_node_in(m->products[0], 0); /* not m->x, which another MLP may have replaced */
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "MlpGrad", w->inputs, (uint32_t)w->n_inputs,
                                    (uint32_t)(1 + m->n_weight_grads + m->n_sums));
    if (!node) return b.status;
    if (!m->n_row_grads) node->outputs[0] = NULL;
    ONT_TRY(ont_mlp_write(m->g, node, &w->description));
    ONT_TRY(ont_tile_write(m->g, node, &w->program));
    ont_build_done(&b, node);
    *result = node;
    return b.status;
}

/* The gradient of X in place of the first row gradient, the sum of all; the others are no longer added. */
static ont_status replace_row_grads(const mlp *m, ont_node *node)
{
    ont_builder b = {.graph = m->g, .before = node->next, .backward = true, .origin = ont_node_origin(node)};
    for (int i = 1; i < m->n_row_grads; i++) {
        ont_value *other;
        ont_node *addition = addition_of(m->g, m->row_grads[i].node->outputs[0], &other);
        ont_value_replace_uses(m->g, addition->outputs[0], other);
    }
    ont_value *dx = node->outputs[0], *old = m->n_row_grads ? m->row_grads[0].node->outputs[0] : NULL;
    if (!old) return ONT_OK;
    if (!ont_shape_equal(&old->shape, &dx->shape)) dx = ont_build_reshape(&b, dx, &old->shape);
    ONT_TRY(b.status);
    ont_value_replace_uses(m->g, old, dx);
    return ONT_OK;
}

static ont_status rewrite(writer *w)
{
    ont_node *node = NULL;
    const mlp *m = w->m;
    uint32_t at = 1;
    ONT_TRY(build(w, &node));
    for (int i = 0; i < m->n_weight_grads; i++)
        ont_value_replace_uses(m->g, m->weight_grads[i].node->outputs[0], node->outputs[at++]);
    ont_builder b = {.graph = m->g, .before = node->next, .backward = true, .origin = ont_node_origin(node)};
    for (int i = 0; i < m->n_sums; i++) {
        ont_value *old = m->sums[i].node->outputs[0], *sum = node->outputs[at++];
        if (old->dtype != sum->dtype) sum = ont_build_cast(&b, sum, old->dtype);
        ONT_TRY(b.status);
        ont_value_replace_uses(m->g, old, sum);
    }
    return replace_row_grads(m, node);
}

/* ---- the choice ---- */

/* Counts what backward computes again; false where that exceeds what the level may add to a step. */
static bool pays(const mlp *m)
{
    ont_graph *g = m->g;
    bool forced = ont_pass_is_forced("tile_mlp");
    double cost = 0, budget = g->recompute.step * ont_recompute_budget_fraction(g->recompute.level);
    size_t bytes = 0;
    for (int i = 0; i < m->n_values; i++) {
        if (m->values[i]->def->backward) continue;
        cost += ont_recompute_node_cost(m->values[i]->def);
        bytes += (size_t)ont_shape_count(&m->values[i]->shape) * ont_dtype_size(m->values[i]->dtype);
    }
    size_t hidden = (size_t)(m->rows * m->columns) * ont_dtype_size(m->products[0]->outputs[0]->dtype);
    bool large = hidden >= MIN_HIDDEN_BYTES && m->columns >= MIN_COLUMNS;
    if (!forced && (!large || g->recompute.cost + cost > budget)) return false;
    g->recompute.cost += cost;
    g->recompute.bytes += bytes;
    for (int i = 0; i < m->n_values; i++) g->recompute.nodes += !m->values[i]->def->backward;
    return true;
}

static void sort_nodes(mlp *m)
{
    for (int i = 1; i < m->n_nodes; i++)
        for (int k = i; k && m->position[m->nodes[k]->id] < m->position[m->nodes[k - 1]->id]; k--) {
            ont_node *later = m->nodes[k - 1];
            m->nodes[k - 1] = m->nodes[k];
            m->nodes[k] = later;
        }
}

/* `done`: by node id, products of MLPs in tiles. */
static ont_status tile(ont_graph *g, ont_node *product, const uint32_t *position, bool *done)
{
    mlp m = {.g = g, .position = position};
    writer w = {.m = &m};
    if (done[product->id] || !finds_all(&m, product)) return ONT_OK;
    sort_nodes(&m);
    if (!describe(&w) || !pays(&m)) return ONT_OK;
    for (int i = 0; i < m.n_products; i++) done[m.products[i]->id] = true;
    return rewrite(&w);
}

ont_status ont_pass_tile_mlp(ont_graph *g)
{
    bool low = g->recompute.level >= ONT_RECOMPUTE_LAYERS || ont_pass_is_forced("tile_mlp");
    if (g->device || !low || !g->last || !g->last->backward) return ONT_OK;
    if (!g->recompute.step) g->recompute.step = ont_recompute_graph_cost(g);
    uint32_t n_nodes = g->n_nodes, at = 0;
    uint32_t *position = ont_calloc(n_nodes + 1, sizeof *position);
    bool *done = ont_calloc(n_nodes + 1, sizeof *done);
    ont_status status = position && done ? ONT_OK : ONT_ENOMEM;
    for (const ont_node *node = g->first; node && position; node = node->next) position[node->id] = at++;
    for (ont_node *node = g->first; node && !node->backward && status == ONT_OK; node = node->next)
        status = tile(g, node, position, done);
    ont_free(position);
    ont_free(done);
    return status == ONT_OK && g->n_nodes > n_nodes ? ont_pass_dce(g) : status;
}
