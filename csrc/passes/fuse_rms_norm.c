/*
 * Fuses RMSNormalization as models write it, scale * x / sqrt(mean(x^2) + epsilon) along the last axis, into one node,
 * for devices with such a kernel. Before differentiation. 16-bit arithmetic is left alone, since it rounds every
 * intermediate result; with Casts to float32 before it and back behind it, it is fused (passes/fuse_norm.c).
 */
#include "passes/pass.h"

typedef struct match {
    ont_value *x, *scale;
    double eps;
} match;

/* Whether v is `root` squared. */
static bool is_square(const ont_value *v, const ont_value *root)
{
    double exponent;
    if (ONT_IS(v->def, Mul)) return ont_node_in(v->def, 0) == root && ont_node_in(v->def, 1) == root;
    return ONT_IS(v->def, Pow) && ont_node_in(v->def, 0) == root &&
           ont_const_scalar(v->def, 1, &exponent) == ONT_OK && exponent == 2;
}

/* Whether v is the mean of the squares of x along its last axis. */
static bool is_mean_square(const ont_value *v, const ont_value *x)
{
    int64_t axis;
    int n = -1;
    const ont_node *mean = v->def;
    if (!ONT_IS(mean, ReduceMean) || !ont_attr_int(mean, "keepdims", 1) || !is_square(ont_node_in(mean, 0), x))
        return false;
    if (ont_const_ints(mean, mean->n_inputs > 1 ? 1 : -1, "axes", &axis, 1, &n) != ONT_OK || n != 1) return false;
    return axis == -1 || axis == x->shape.rank - 1;
}

/* Whether v is sqrt(mean(x^2) + eps). */
static bool is_root_mean_square(const ont_value *v, const ont_value *x, double *eps)
{
    const ont_node *add = ONT_IS(v->def, Sqrt) ? ont_node_in(v->def, 0)->def : NULL;
    for (uint32_t i = 0; ONT_IS(add, Add) && i < 2; i++)
        if (ont_const_scalar(add, 1 - i, eps) == ONT_OK && is_mean_square(ont_node_in(add, i), x)) return true;
    return false;
}

/* The x that v divides by its root mean square; NULL: none. */
static ont_value *normalized(const ont_value *v, double *eps)
{
    const ont_node *node = v->def;
    if (ONT_IS(node, Div))
        return is_root_mean_square(ont_node_in(node, 1), ont_node_in(node, 0), eps) ? ont_node_in(node, 0) : NULL;
    for (uint32_t i = 0; ONT_IS(node, Mul) && i < 2; i++) {
        const ont_node *inverse = ont_node_in(node, 1 - i)->def;
        if (ONT_IS(inverse, Reciprocal) &&
            is_root_mean_square(ont_node_in(inverse, 0), ont_node_in(node, i), eps))
            return ont_node_in(node, i);
    }
    return NULL;
}

static bool find(const ont_node *product, match *m)
{
    for (uint32_t i = 0; i < 2; i++) {
        m->scale = ont_node_in(product, i);
        m->x = normalized(ont_node_in(product, 1 - i), &m->eps);
        if (!m->x || m->scale->shape.rank < 1) continue;
        const int64_t n = ont_last_dim(m->x);
        return m->x->dtype == m->scale->dtype && ont_last_dim(m->scale) == n &&
               ont_shape_count(&m->scale->shape) == n && ont_shape_equal(&product->outputs[0]->shape, &m->x->shape);
    }
    return false;
}

ont_status ont_pass_fuse_rms_norm(ont_graph *g)
{
    bool changed = false;
    for (ont_node *node = g->first; node; node = node->next) {
        match m;
        if (!ONT_IS(node, Mul) || !find(node, &m)) continue;
        ont_builder b = {.graph = g, .before = node, .backward = node->backward, .origin = node};
        ont_value *inputs[] = {m.x, m.scale};
        ont_node *fused = ont_build_node(&b, ONT_DOMAIN, "FusedNorm", inputs, 2, 1);
        if (!fused) return b.status;
        fused->name = node->name;
        ONT_TRY(ont_attr_set_int(g, fused, "axis", -1));
        ONT_TRY(ont_attr_set_int(g, fused, "rms", 1));
        ONT_TRY(ont_attr_set_float(g, fused, "epsilon", m.eps));
        ont_value *y = ont_build_done(&b, fused);
        ONT_TRY(b.status);
        if (!ont_op_has_kernel(fused, g->device)) {
            ont_graph_remove_node(g, fused);
            continue;
        }
        ont_value_replace_uses(g, node->outputs[0], y);
        changed = true;
    }
    return changed ? ont_pass_dce(g) : ONT_OK;
}
