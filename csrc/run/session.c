/*
 * Session and program cache. See session.h. A Run object of py/ keeps its Session alive, so the loaded graph, whose
 * constants the programs share, outlives every run.
 */
#include "run/session.h"

#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/parallel.h"
#include "device/gemm.h"
#include "device/plugin.h"
#include "passes/cost.h"
#include "passes/options.h"
#include "run/timing.h"

typedef struct entry {
    int64_t *key; /* one word of settings; per input dtype, wants, rank and dims; the probed values; see make_key() */
    size_t key_length;
    ont_program *program;
    uint64_t used;
} entry;

enum { MAX_PROBE_PROGRAMS = 256, MAX_PROBED_VALUES = 1 << 16 };

struct ont_session {
    ont_graph *graph;
    ont_pool *pool;
    const ont_device *device;
    entry *entries;
    uint32_t n_entries, max_entries; /* the array has MAX_PROBE_PROGRAMS more, for probes */
    entry *last;
    uint64_t clock;
    int64_t *key; /* scratch memory for make_key() */
    size_t key_capacity;
    ont_session_stats stats;
    double budget; /* see ont_session_set_budget() */
    bool random;
};

/* Checks the graph and all its subgraphs. */
static ont_status check_operators(ont_session *s, const ont_graph *g)
{
    for (const ont_node *node = g->first; node; node = node->next) {
        if (!node->op)
            return ont_fail(ONT_EUNSUPPORTED, "operator %s.%s (opset %lld), used by node '%s', is not supported",
                            *node->domain ? node->domain : "ai.onnx", node->op_type, (long long)node->version,
                            node->name);
        s->random |= (node->op->flags & ONT_OP_RANDOM) != 0;
        for (const ont_attr *attr = node->attrs; attr; attr = attr->next)
            if (attr->kind == ONT_ATTR_GRAPH) ONT_TRY(check_operators(s, attr->graph));
    }
    return ONT_OK;
}

ont_status ont_session_create(ont_graph *graph, uint32_t max_programs, const ont_device *device, ont_session **session)
{
    ont_session *s = ont_calloc(1, sizeof *s);
    if (!s) {
        ont_graph_destroy(graph);
        return ONT_ENOMEM;
    }
    s->graph = graph;
    s->device = device;
    s->max_entries = max_programs ? max_programs : 1;
    s->entries = ont_calloc(s->max_entries + MAX_PROBE_PROGRAMS, sizeof *s->entries);
    ont_status status = s->entries ? ont_pool_create(device, &s->pool) : ONT_ENOMEM;
    if (status == ONT_OK) status = check_operators(s, s->graph);
    if (status != ONT_OK) {
        ont_session_destroy(s);
        return status;
    }
    *session = s;
    return ONT_OK;
}

void ont_session_set_budget(ont_session *s, double budget)
{
    s->budget = budget;
}

static void entry_clear(entry *e)
{
    ont_program_unref(e->program);
    ont_free(e->key);
    *e = (entry){0};
}

void ont_session_destroy(ont_session *s)
{
    if (!s) return;
    if (s->pool) ont_timing_drop(s->pool);
    for (uint32_t i = 0; i < s->n_entries; i++) entry_clear(&s->entries[i]);
    ont_free(s->entries);
    ont_free(s->key);
    ont_pool_unref(s->pool);
    ont_graph_destroy(s->graph);
    ont_free(s);
}

/* Words of a value in the key: its size and its elements. The size tells an empty value from no value. */
static size_t key_words(const ont_tensor *value)
{
    return 1 + (value->bytes + sizeof(int64_t) - 1) / sizeof(int64_t);
}

static ont_status make_key(ont_session *s, const ont_tensor_view *inputs, const uint8_t *wants,
                           const ont_probed_values *probed,
                           size_t *length)
{
    size_t n = 1;
    for (uint32_t i = 0; i < s->graph->n_inputs; i++) n += 1 + (size_t)inputs[i].rank;
    for (uint32_t i = 0; i < probed->n_values; i++) n += key_words(&probed->values[i]);
    if (n > s->key_capacity) {
        int64_t *grown = ont_realloc(s->key, n, sizeof *grown);
        if (!grown) return ONT_ENOMEM;
        s->key = grown;
        s->key_capacity = n;
    }
    int64_t *word = s->key;
    /* Number of probed values; settings that decide which kernels are chosen; number of threads. */
    *word++ = (int64_t)probed->n_values | (int64_t)ont_matmul_precision_setting() << 32 |
            (int64_t)ont_gemm_is_deterministic() << 39 | (int64_t)ont_parallel_threads() << 40 |
            (s->device ? ont_plugin_flags() << 60 : 0);
    for (uint32_t i = 0; i < s->graph->n_inputs; i++) {
        const ont_tensor_view *v = &inputs[i];
        *word++ = (int64_t)v->dtype | (int64_t)(wants ? wants[i] : ONT_WANT_NOTHING) << 8 | (int64_t)v->rank << 16;
        for (int d = 0; d < v->rank; d++) *word++ = v->dims[d];
    }
    for (uint32_t i = 0; i < probed->n_values; i++) { /* their dtypes and shapes follow from the words before */
        const ont_tensor *value = &probed->values[i];
        word[key_words(value) - 1] = 0;
        word[0] = (int64_t)value->bytes;
        if (value->bytes) memcpy(word + 1, value->data, value->bytes);
        word += key_words(value);
    }
    *length = n;
    return ONT_OK;
}

static bool matches(const entry *e, const int64_t *key, size_t length)
{
    return e->program && e->key_length == length && !memcmp(e->key, key, length * sizeof *key);
}

/* A free entry, or the least recently used one of the same kind (program or probe), cleared. */
static entry *evict_entry(ont_session *s, bool probe)
{
    entry *least_recent = NULL;
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_entries; i++) {
        entry *e = &s->entries[i];
        if (e->program->probe != probe) continue;
        n++;
        if (!least_recent || e->used < least_recent->used) least_recent = e;
    }
    if (n < (probe ? MAX_PROBE_PROGRAMS : s->max_entries)) return &s->entries[s->n_entries++];
    entry_clear(least_recent);
    return least_recent;
}

/* What the budget is for a program whose slab is `slab` without one. */
static size_t budget_bytes(const ont_session *s, size_t slab)
{
    return s->budget > 1 ? (size_t)s->budget : (size_t)(s->budget * (double)slab);
}

/* A call whose program is sought, and the best program so far. */
typedef struct budget_search {
    const ont_session *session;
    ont_program_request request;
    ont_program *best;
    size_t budget;
    double least; /* the lowest limit that could be, where a lower one was tried; 0: none was */
} budget_search;

enum { MAX_LIMITS = 24 };

/* Builds the program for one limit; keeps it if its slab is smaller. */
static ont_status try_limit(budget_search *b, double limit)
{
    ont_program *other;
    b->request.memory_limit = limit > 1 ? (size_t)limit : 1;
    ONT_TRY(ont_program_build(b->session->graph, &b->request, &other));
    if (other->graph->recompute.limit > b->request.memory_limit) b->least = (double)other->graph->recompute.limit;
    if (other->plan.slab_bytes < b->best->plan.slab_bytes) {
        ont_program *larger = b->best;
        b->best = other;
        other = larger;
    }
    ont_program_unref(other);
    return ONT_OK;
}

/*
 * Finds a program whose slab is within the budget. Tries the limits of a fixed ladder, from the highest one within the
 * budget down, and takes the first whose plan is within it, so that a smaller budget ends at the same step or below. If
 * no plan is, it takes the smallest of those near the lowest possible limit.
 */
static ont_status search_budget(budget_search *b)
{
    static const double ratio = 0.97;
    double limit = (double)b->best->plan.slab_bytes;
    while (limit > (double)b->budget && limit >= 1) limit *= ratio;
    for (int i = 0; i < MAX_LIMITS && !b->least && b->best->plan.slab_bytes > b->budget; i++, limit *= ratio)
        ONT_TRY(try_limit(b, limit));
    if (b->best->plan.slab_bytes <= b->budget) return ONT_OK;
    while (limit < b->least) limit /= ratio;
    for (int i = 0; i < MAX_LIMITS && b->best->plan.slab_bytes > b->budget; i++, limit /= ratio)
        ONT_TRY(try_limit(b, limit));
    return ONT_OK;
}

static ont_status keep_budget(const ont_session *s, const ont_program_request *request, ont_program **program)
{
    budget_search b = {s, *request, *program, budget_bytes(s, (*program)->plan.slab_bytes), 0};
    ont_status status = search_budget(&b);
    *program = b.best;
    if (status == ONT_OK && b.best->plan.slab_bytes > b.budget)
        ont_log(ONT_LOG_WARNING,
                "a step of these sizes needs at least %.1f MiB of activations, more than the budget of %.1f MiB: raise "
                "ORTMODULE_MEMORY_OPT_BUDGET, or make the batch smaller",
                (double)b.best->plan.slab_bytes / 0x1p20, (double)b.budget / 0x1p20);
    return status;
}

static ont_status build(ont_session *s, const ont_tensor_view *inputs, const uint8_t *wants,
                        const ont_probed_values *probed,
                        size_t length, entry **result)
{
    int64_t *key = ont_malloc(length * sizeof *key);
    if (!key) return ONT_ENOMEM;
    memcpy(key, s->key, length * sizeof *key);
    ont_program *program;
    ont_program_request request = {.inputs = inputs, .wants = wants, .known = probed->values,
                                   .n_known = probed->n_values, .device = s->device};
    ont_status status = ont_program_build(s->graph, &request, &program);
    size_t without = status == ONT_OK ? program->plan.slab_bytes : 0;
    if (status == ONT_OK && s->budget > 0 && program->differentiable) {
        status = keep_budget(s, &request, &program);
        if (status != ONT_OK) ont_program_unref(program);
    }
    if (status != ONT_OK) {
        ont_free(key);
        return status;
    }
    if (s->budget > 0) program->budget_bytes = budget_bytes(s, without);
    s->last = NULL; /* it may be the entry that is evicted */
    entry *e = evict_entry(s, program->probe);
    *e = (entry){.key = key, .key_length = length, .program = program};
    program->probe ? s->stats.probes_built++ : s->stats.programs_built++;
    s->stats.build_seconds += program->build_seconds;
    s->stats.last_build_seconds = program->build_seconds;
    *result = e;
    return ONT_OK;
}

ont_status ont_session_program(ont_session *s, const ont_tensor_view *inputs, const uint8_t *wants,
                               const ont_probed_values *probed,
                               ont_program **program)
{
    size_t length;
    ONT_TRY(make_key(s, inputs, wants, probed, &length));
    entry *found = s->last && matches(s->last, s->key, length) ? s->last : NULL;
    for (uint32_t i = 0; i < s->n_entries && !found; i++)
        if (matches(&s->entries[i], s->key, length)) found = &s->entries[i];
    if (!found)
        ONT_TRY(build(s, inputs, wants, probed, length, &found));
    else if (!found->program->probe)
        s->stats.program_hits++;
    found->used = ++s->clock;
    s->last = found;
    *program = found->program;
    return ONT_OK;
}

/* Copies a block to host memory; waits for the device. */
static ont_status read_block(const ont_block *block, void *to)
{
    const ont_device *device = block->device;
    if (!device) {
        memcpy(to, block->data, block->bytes);
        return ONT_OK;
    }
    ont_scope scope;
    ONT_TRY(device->ops->enter(device, &scope));
    ont_status status = device->ops->read(device, to, block->data, block->bytes, scope.stream);
    device->ops->leave(device, &scope);
    return status;
}

ont_status ont_probed_values_add(ont_session *s, ont_probed_values *probed, ont_block *const *outputs, uint32_t n)
{
    s->stats.probe_runs++;
    if (probed->n_values + n > MAX_PROBED_VALUES)
        return ont_fail(ONT_EUNSUPPORTED, "one call needs more than %d probed values",
                        MAX_PROBED_VALUES);
    ont_tensor *values = ont_realloc(probed->values, probed->n_values + n, sizeof *values);
    if (!values) return ONT_ENOMEM;
    probed->values = values;
    for (uint32_t i = 0; i < n; i++) {
        ont_tensor value = {outputs[i]->dtype, outputs[i]->shape, outputs[i]->bytes, ont_malloc(outputs[i]->bytes + 1)};
        if (!value.data) return ONT_ENOMEM;
        values[probed->n_values++] = value;
        if (value.bytes) ONT_TRY(read_block(outputs[i], value.data));
    }
    return ONT_OK;
}

void ont_probed_values_deinit(ont_probed_values *probed)
{
    for (uint32_t i = 0; i < probed->n_values; i++) ont_free(probed->values[i].data);
    ont_free(probed->values);
    *probed = (ont_probed_values){0};
}

const ont_graph *ont_session_graph(const ont_session *s)
{
    return s->graph;
}

ont_pool *ont_session_pool(ont_session *s)
{
    return s->pool;
}

const ont_device *ont_session_device(const ont_session *s)
{
    return s->device;
}

bool ont_session_is_random(const ont_session *s)
{
    return s->random;
}

ont_program *ont_session_ref_program(const ont_session *s)
{
    return s->last ? ont_program_ref(s->last->program) : NULL;
}

/* Live bytes by phase, scratch memory included. Zeros if memory runs out. */
static void sum_phases(const ont_program *p, ont_session_stats *stats)
{
    size_t *live = ont_calloc((size_t)p->n_steps + 1, sizeof *live);
    for (uint32_t i = 0; live && i < p->plan.n_lifetimes; i++) {
        const ont_plan_lifetime *l = &p->plan.lifetimes[i];
        for (uint32_t t = l->first; t <= l->last && t < p->n_steps; t++) live[t] += l->bytes;
        if (l->first < p->split && l->last >= p->split) stats->kept_bytes += l->bytes;
    }
    for (uint32_t t = 0; live && t < p->n_steps; t++) {
        size_t bytes = live[t] + p->steps[t].work_bytes, *most = &stats->phase_bytes[t >= p->split];
        if (bytes > *most) *most = bytes;
    }
    ont_free(live);
}

void ont_session_get_stats(const ont_session *s, ont_session_stats *stats)
{
    *stats = s->stats;
    ont_pool_get_stats(s->pool, &stats->pool);
    if (!s->last) return;
    const ont_program *p = s->last->program;
    stats->slab_bytes = p->plan.slab_bytes;
    stats->slab_lower_bound = p->plan.lower_bound;
    stats->recomputed_bytes = p->graph->recompute.bytes;
    stats->recomputed_nodes = p->graph->recompute.nodes;
    stats->recomputed_share = ont_recompute_cost_fraction(p->graph);
    stats->budget_bytes = p->budget_bytes;
    sum_phases(p, stats);
    stats->packed_nodes = p->graph->packed.nodes;
    memcpy(stats->packed_rows, p->graph->packed.rows, sizeof stats->packed_rows);
    stats->steps = p->n_steps;
    stats->forward_steps = p->split;
}
