/*
 * Fuses reductions of an elementwise group's results into the group (fused_reduce.h): tiles are reduced while they
 * are in the cache, and a result without other users is never stored. After fuse_elementwise. The fused node takes the
 * position of the group, which precedes all users of the reductions.
 */
#include <string.h>

#include "ops/support/broadcast.h"
#include "ops/reduce/fused_reduce.h"
#include "passes/pass.h"

enum { LARGE = 1 << 22 }; /* elements; larger tensors leave the cache before they are read again */

typedef struct fused {
    ont_graph *g;
    ont_node *node; /* one elementwise node, or a group */
    ont_tile_program p;
    int64_t count;
    ont_sink sinks[ONT_TILE_SINKS];
    ont_node *reductions[ONT_TILE_SINKS];
    ont_value *results[ONT_TILE_RESULTS]; /* results that are still stored */
} fused;

/* Reads the node's steps; false if it has none, or if its rows are too short. */
static bool read_program(fused *f)
{
    const ont_node *node = f->node;
    ont_tile_program *p = &f->p;
    if (node->n_outputs < 1 || !node->outputs[0]) return false;
    f->count = ont_shape_count(&node->outputs[0]->shape);
    if (ONT_IS(node, FusedElementwise)) return ont_tile_read(node, p) == ONT_OK;
    if (!node->op->tile) return false;
    for (uint32_t i = 1; i < node->n_outputs; i++)
        if (node->outputs[i]) return false;
    *p = (ont_tile_program){.n_steps = 1, .n_results = 1};
    if (!node->op->tile(node, &p->steps[0])) return false;
    ont_bcast walk;
    ont_bcast_init(&walk, node, p->steps[0].n_operands);
    if (walk.inner < 64 && walk.inner != walk.count) return false;
    for (; p->n_operands < p->steps[0].n_operands; p->n_operands++) {
        p->operand_size[p->n_operands] = ont_dtype_size(node->inputs[p->n_operands].value->dtype);
        p->steps[0].operand[p->n_operands] = p->n_operands;
    }
    return true;
}

static bool is_view_of(const ont_node *node, const ont_value *v)
{
    return node->op->flags & ONT_OP_VIEW && node->n_outputs == 1 && node->inputs[0].value == v &&
           node->outputs[0]->dtype == v->dtype;
}

/*
 * Finds the reductions among the users of `v`, which is result k or a view of it, that can be fused together with those
 * found so far.
 */
static void find_sinks(fused *f, int k, const ont_value *v)
{
    for (const ont_use *use = v->uses; use && f->p.n_sinks < ONT_TILE_SINKS; use = use->next) {
        ont_node *user = use->user;
        int n = f->p.n_sinks;
        if (user->backward != f->node->backward || ont_node_in(user, 0) != v) continue;
        if (is_view_of(user, v)) {
            find_sinks(f, k, user->outputs[0]);
            continue;
        }
        if (!ont_sink_of(user, &f->sinks[n]) || !ont_sink_unit(f->sinks, n + 1, f->count)) continue;
        f->p.sink[n] = f->p.result[k];
        f->reductions[n] = user;
        f->p.n_sinks++;
    }
}

/* Whether the value has users besides the fused reductions and views that only these use. */
static bool has_other_users(const fused *f, const ont_value *v)
{
    for (const ont_use *use = v->uses; use; use = use->next) {
        bool ours = is_view_of(use->user, v) && !has_other_users(f, use->user->outputs[0]);
        for (int k = 0; k < f->p.n_sinks; k++) ours |= use->user == f->reductions[k];
        if (!ours) return true;
    }
    return ont_value_is_output(f->g, v);
}

/* Sums along rows alone gain nothing if the elements are stored anyway and stay in a cache. */
static bool gains(const fused *f)
{
    bool gain = f->count >= LARGE;
    for (int k = 0; k < f->p.n_sinks; k++) gain |= f->sinks[k].form != ONT_SINK_ROWS;
    for (int k = 0; k < f->p.n_results; k++) gain |= !has_other_users(f, f->node->outputs[k]);
    return gain;
}

/* Removes unused views of `v`. */
static void prune_views(ont_graph *g, const ont_value *v)
{
    for (const ont_use *use = v->uses, *next; use; use = next) {
        ont_node *view = use->user;
        next = use->next;
        if (!is_view_of(view, v)) continue;
        prune_views(g, view->outputs[0]);
        if (!view->outputs[0]->uses && !ont_value_is_output(g, view->outputs[0])) ont_graph_remove_node(g, view);
    }
}

static ont_status set_formula(fused *f, ont_node *node)
{
    char text[256];
    size_t length = 0;
    const char *own = ONT_IS(f->node, FusedElementwise) ? ont_attr_string(f->node, "formula", "")
                                                                           : f->node->op_type;
    for (int k = -1; k < f->p.n_sinks; k++) {
        const char *part = k < 0 ? own : f->reductions[k]->op_type;
        size_t n = strlen(part);
        if (length + n + 1 >= sizeof text) break;
        if (k >= 0) text[length++] = ' ';
        memcpy(text + length, part, n);
        length += n;
    }
    text[length] = 0;
    return ont_attr_set_string(f->g, node, "formula", text, length);
}

static ont_status rewrite(fused *f)
{
    ont_value *operands[ONT_TILE_OPERANDS];
    int n_results = f->p.n_results;
    f->p.n_results = 0;
    for (int k = 0; k < n_results; k++) {
        if (!has_other_users(f, f->node->outputs[k])) continue;
        f->results[f->p.n_results] = f->node->outputs[k];
        f->p.result[f->p.n_results++] = f->p.result[k];
    }
    if (!ont_tile_link(&f->p)) return ONT_OK; /* not enough registers */
    for (int i = 0; i < f->p.n_operands; i++) operands[i] = f->node->inputs[i].value;
    ont_builder b = {.graph = f->g, .before = f->node, .backward = f->node->backward,
                     .origin = ont_node_origin(f->node), .scope = f->node->name};
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "FusedReduce", operands, (uint32_t)f->p.n_operands,
                                    (uint32_t)(f->p.n_results + f->p.n_sinks));
    if (!node) return b.status;
    ONT_TRY(ont_tile_write(f->g, node, &f->p));
    ONT_TRY(ont_sinks_write(f->g, node, f->sinks, f->p.n_sinks));
    ONT_TRY(set_formula(f, node));
    ont_build_done(&b, node);
    ONT_TRY(b.status);
    for (int k = 0; k < f->p.n_sinks; k++) {
        ont_value_replace_uses(f->g, f->reductions[k]->outputs[0], node->outputs[f->p.n_results + k]);
        ont_graph_remove_node(f->g, f->reductions[k]);
    }
    for (int k = 0; k < n_results; k++) prune_views(f->g, f->node->outputs[k]);
    for (int k = 0; k < f->p.n_results; k++) ont_value_replace_uses(f->g, f->results[k], node->outputs[k]);
    ont_graph_remove_node(f->g, f->node);
    return ONT_OK;
}

ont_status ont_pass_fuse_reductions(ont_graph *g)
{
    for (ont_node *node = g->first, *next; node; node = next) {
        ont_node *before = node->prev;
        fused f = {.g = g, .node = node};
        next = node->next;
        if (!read_program(&f)) continue;
        for (int k = 0; k < f.p.n_results; k++) find_sinks(&f, k, node->outputs[k]);
        if (!f.p.n_sinks || !gains(&f)) continue;
        ONT_TRY(rewrite(&f));
        next = before ? before->next : g->first; /* the next node may have been removed */
        while (next && next != node && ONT_IS(next, FusedReduce)) next = next->next;
        if (next == node) next = node->next;
    }
    return ONT_OK;
}
