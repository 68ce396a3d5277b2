/*
 * Fuses elementwise nodes of one shape that feed each other, so that intermediate results stay in the cache. Runs late,
 * on the graph of forward and backward, and never across the two phases.
 *
 * Greedy, in graph order: a node joins the groups of its producers one by one. A group runs at one point of the order,
 * after the producers of its operands and before all other users of its results. The slot of a node is twice its
 * position, which leaves room in between; the slot of a group is the last one before its users. A merge creates no
 * cycle exactly if the slots of all producers are below that of the group and those of all users above it. On a device,
 * where a pass over memory is dear, a producer is tried again after others have joined: those may have been in its way.
 */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "ops/support/broadcast.h"
#include "ops/elementwise/tile_program.h"
#include "passes/pass.h"

enum {
    SHORT_ROW = 64,   /* elements per row; for shorter rows call overhead exceeds the savings */
    GROUP_NODES = 24, /* at most, on the CPU; on a device as many as a program has steps */
};

typedef struct group {
    int n;
    uint32_t member[ONT_TILE_STEPS]; /* positions in the graph, ascending */
    int64_t slot;
} group;

typedef struct fusion {
    ont_graph *g;
    uint32_t n;
    ont_node **nodes;   /* by position */
    uint32_t *position; /* by node id */
    uint32_t *group_of; /* by position: index of its group */
    group *groups;      /* initially one per fusable node; n == 0: merged away, or not fusable */
} fusion;

static bool is_fusable(const ont_node *node)
{
    ont_tile_step step;
    if (!node->op->tile || node->n_outputs < 1 || !node->outputs[0]) return false;
    for (uint32_t i = 1; i < node->n_outputs; i++)
        if (node->outputs[i]) return false;
    if (ont_shape_count(&node->outputs[0]->shape) < 2 || !node->op->tile(node, &step)) return false;
    ont_bcast walk; /* the rows of a group are the shortest of its nodes */
    ont_bcast_init(&walk, node, step.n_operands);
    return walk.inner >= SHORT_ROW || walk.inner == walk.count;
}

static const ont_shape *shape_of(const fusion *f, const group *a)
{
    return &f->nodes[a->member[0]]->outputs[0]->shape;
}

static bool contains(const group *a, uint32_t position)
{
    for (int i = 0; i < a->n; i++)
        if (a->member[i] == position) return true;
    return false;
}

static int64_t slot_of(const fusion *f, uint32_t position)
{
    const group *a = &f->groups[f->group_of[position]];
    return a->n ? a->slot : 2 * (int64_t)position;
}

/* Merges the members of both in graph order; false if there are too many. */
static bool merge_members(const fusion *f, const group *a, const group *b, group *merged)
{
    *merged = (group){0};
    if (a->n + b->n > (f->g->device ? (int)ONT_TILE_STEPS : (int)GROUP_NODES)) return false;
    for (int i = 0, j = 0; i < a->n || j < b->n;) {
        bool first = j == b->n || (i < a->n && a->member[i] < b->member[j]);
        merged->member[merged->n++] = first ? a->member[i++] : b->member[j++];
    }
    return true;
}

/* The last slot before the users of its results; false if an operand is produced after that. */
static bool find_slot(const fusion *f, group *a)
{
    int64_t slot = 2 * (int64_t)a->member[a->n - 1], latest_producer = -1;
    for (int i = 0; i < a->n; i++) {
        const ont_node *node = f->nodes[a->member[i]];
        for (const ont_use *use = node->outputs[0]->uses; use; use = use->next) {
            uint32_t user = f->position[use->user->id];
            int64_t at = slot_of(f, user);
            if (!contains(a, user) && at <= slot) slot = at - 1;
        }
        for (uint32_t k = 0; k < node->n_inputs; k++) {
            const ont_value *x = node->inputs[k].value;
            if (!x || x->kind != ONT_VALUE_NODE || contains(a, f->position[x->def->id])) continue;
            int64_t at = slot_of(f, f->position[x->def->id]);
            if (at > latest_producer) latest_producer = at;
        }
    }
    a->slot = slot;
    return latest_producer < slot;
}

static bool is_used_outside(const fusion *f, const group *a, const ont_value *v)
{
    for (const ont_use *use = v->uses; use; use = use->next)
        if (!contains(a, f->position[use->user->id])) return true;
    return ont_value_is_output(f->g, v);
}

static int step_of(const fusion *f, const group *a, const ont_value *v)
{
    for (int i = 0; i < a->n; i++)
        if (f->nodes[a->member[i]]->outputs[0] == v) return i;
    return -1;
}

static int index_of(ont_value *const *values, int n, const ont_value *v)
{
    for (int i = 0; i < n; i++)
        if (values[i] == v) return i;
    return -1;
}

/*
 * Writes the group as a program; `operands` and `results` are its values in order, the last step's result first. False
 * if it exceeds a limit, or if the last step's result is not used outside.
 */
static bool write_program(const fusion *f, const group *a, ont_tile_program *p, ont_value **operands,
                          ont_value **results)
{
    *p = (ont_tile_program){.n_steps = a->n};
    for (int i = 0; i < a->n; i++) {
        const ont_node *node = f->nodes[a->member[i]];
        ont_tile_step *s = &p->steps[i];
        if (!node->op->tile(node, s)) return false;
        for (int k = 0; k < s->n_operands; k++) {
            ont_value *v = node->inputs[k].value;
            s->operand[k] = step_of(f, a, v);
            if (s->operand[k] >= 0) continue;
            int at = index_of(operands, p->n_operands, v);
            if (at < 0 && p->n_operands == ONT_TILE_OPERANDS) return false;
            if (at < 0) {
                p->operand_size[p->n_operands] = ont_dtype_size(v->dtype);
                operands[at = p->n_operands++] = v;
            }
            s->operand[k] = -1 - at;
        }
    }
    for (int i = a->n - 1; i >= 0; i--) {
        if (!is_used_outside(f, a, f->nodes[a->member[i]]->outputs[0])) {
            if (i == a->n - 1) return false;
            continue;
        }
        if (p->n_results == ONT_TILE_RESULTS) return false;
        results[p->n_results] = f->nodes[a->member[i]]->outputs[0];
        p->result[p->n_results++] = i;
    }
    for (int i = 0; i < a->n; i++) /* the number of operands is known now */
        for (int k = 0; k < p->steps[i].n_operands; k++) {
            int at = p->steps[i].operand[k];
            p->steps[i].operand[k] = at < 0 ? -1 - at : p->n_operands + at;
        }
    return ont_tile_link(p);
}

static bool try_join(fusion *f, uint32_t from, uint32_t to)
{
    group *a = &f->groups[from], *b = &f->groups[to], merged;
    ont_tile_program p;
    ont_value *operands[ONT_TILE_OPERANDS], *results[ONT_TILE_RESULTS];
    if (from == to || !a->n || !b->n || !ont_shape_equal(shape_of(f, a), shape_of(f, b))) return false;
    if (f->nodes[a->member[0]]->backward != f->nodes[b->member[0]]->backward) return false;
    if (!merge_members(f, a, b, &merged) || !find_slot(f, &merged) || !write_program(f, &merged, &p, operands, results))
        return false;
    for (int i = 0; i < merged.n; i++) f->group_of[merged.member[i]] = to;
    a->n = 0;
    *b = merged;
    return true;
}

/* Joins the node with its producers; whether one has joined. */
static bool join_producers(fusion *f, uint32_t i)
{
    const ont_node *node = f->nodes[i];
    bool joined = false;
    for (uint32_t k = 0; k < node->n_inputs; k++) {
        const ont_value *x = node->inputs[k].value;
        if (x && x->kind == ONT_VALUE_NODE)
            joined |= try_join(f, f->group_of[f->position[x->def->id]], f->group_of[i]);
    }
    return joined;
}

static void find_groups(fusion *f)
{
    for (uint32_t i = 0; i < f->n; i++)
        if (f->groups[i].n)
            while (join_producers(f, i) && f->g->device) continue;
}

/* ---- rewriting ---- */

static ont_status set_formula(ont_graph *g, ont_node *node, const fusion *f, const group *a)
{
    char text[256];
    size_t length = 0;
    for (int i = 0; i < a->n; i++) {
        const char *name = f->nodes[a->member[i]]->op_type;
        size_t n = strlen(name);
        if (length + n + 1 >= sizeof text) break;
        if (i) text[length++] = ' ';
        memcpy(text + length, name, n);
        length += n;
    }
    text[length] = 0;
    return ont_attr_set_string(g, node, "formula", text, length);
}

static ont_status replace(fusion *f, const group *a, ont_node *before)
{
    ont_tile_program p;
    ont_value *operands[ONT_TILE_OPERANDS], *results[ONT_TILE_RESULTS];
    if (!write_program(f, a, &p, operands, results))
        return ont_fail(ONT_EINTERNAL, "a group that was found cannot be written");
    const ont_node *last = f->nodes[a->member[a->n - 1]];
    ont_builder b = {.graph = f->g, .before = before, .backward = last->backward, .origin = ont_node_origin(last),
                     .scope = last->name};
    ont_node *node = ont_build_node(&b, ONT_DOMAIN, "FusedElementwise", operands, (uint32_t)p.n_operands,
                                    (uint32_t)p.n_results);
    if (!node) return b.status;
    ONT_TRY(ont_tile_write(f->g, node, &p));
    ONT_TRY(set_formula(f->g, node, f, a));
    ont_build_done(&b, node);
    ONT_TRY(b.status);
    for (int k = 0; k < p.n_results; k++) ont_value_replace_uses(f->g, results[k], node->outputs[k]);
    for (int i = a->n - 1; i >= 0; i--) {
        ont_graph_remove_node(f->g, f->nodes[a->member[i]]);
        f->nodes[a->member[i]] = NULL;
    }
    return ONT_OK;
}

static int by_slot(const void *a, const void *b)
{
    const group *x = *(group *const *)a, *y = *(group *const *)b;
    if (x->slot != y->slot) return x->slot < y->slot ? -1 : 1;
    return x->member[0] < y->member[0] ? -1 : 1;
}

/* Replaces the groups in ascending order of slots, each in front of the first remaining node at or behind its slot. */
static ont_status rewrite(fusion *f)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < f->n; i++) n += f->groups[i].n > 1;
    group **order = ont_calloc((size_t)n + 1, sizeof *order);
    if (!order) return ONT_ENOMEM;
    n = 0;
    for (uint32_t i = 0; i < f->n; i++)
        if (f->groups[i].n > 1) order[n++] = &f->groups[i];
    qsort(order, n, sizeof *order, by_slot);
    ont_status status = ONT_OK;
    for (uint32_t i = 0; i < n && status == ONT_OK; i++) {
        uint32_t at = (uint32_t)((order[i]->slot + 1) / 2);
        while (at < f->n && !f->nodes[at]) at++;
        status = replace(f, order[i], at < f->n ? f->nodes[at] : NULL);
    }
    ont_free(order);
    return status;
}

ont_status ont_pass_fuse_elementwise(ont_graph *g)
{
    fusion f = {.g = g};
    for (ont_node *node = g->first; node; node = node->next) f.n++;
    f.nodes = ont_calloc(f.n + 1, sizeof *f.nodes);
    f.position = ont_calloc(g->n_nodes + 1, sizeof *f.position);
    f.group_of = ont_calloc(f.n + 1, sizeof *f.group_of);
    f.groups = ont_calloc(f.n + 1, sizeof *f.groups);
    ont_status status = f.nodes && f.position && f.group_of && f.groups ? ONT_OK : ONT_ENOMEM;
    uint32_t i = 0;
    for (ont_node *node = g->first; node && status == ONT_OK; node = node->next, i++) {
        f.nodes[i] = node;
        f.position[node->id] = f.group_of[i] = i;
        f.groups[i] = (group){.n = is_fusable(node), .member = {i}, .slot = 2 * (int64_t)i};
    }
    if (status == ONT_OK) {
        find_groups(&f);
        status = rewrite(&f);
    }
    ont_free(f.nodes);
    ont_free(f.position);
    ont_free(f.group_of);
    ont_free(f.groups);
    return status;
}
