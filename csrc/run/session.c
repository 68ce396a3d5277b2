/*
 * Session and program cache. See session.h. A Run object of py/ keeps its Session alive, so the loaded graph, whose
 * constants programs share, outlives every run.
 */
#include "run/session.h"

#include <string.h>

#include "base/alloc.h"

typedef struct entry {
    int64_t *key; /* per input: dtype, wants, rank, dims */
    size_t key_length;
    ont_program *program;
    uint64_t used;
} entry;

struct ont_session {
    ont_graph *graph;
    ont_pool *pool;
    entry *entries;
    uint32_t n_entries, max_entries;
    entry *last;
    uint64_t clock;
    int64_t *key; /* scratch */
    size_t key_capacity;
    ont_session_stats stats;
    bool random;
};

static ont_status check_operators(ont_session *s)
{
    for (const ont_node *node = s->graph->first; node; node = node->next) {
        if (!node->op)
            return ont_fail(ONT_EUNSUPPORTED, "operator %s.%s (opset %lld), used by node '%s', is not supported",
                            *node->domain ? node->domain : "ai.onnx", node->op_type, (long long)node->version, node->name);
        s->random |= (node->op->flags & ONT_OP_RANDOM) != 0;
    }
    return ONT_OK;
}

ont_status ont_session_create(ont_graph *graph, uint32_t max_programs, ont_session **session)
{
    ont_session *s = ont_calloc(1, sizeof *s);
    if (!s) {
        ont_graph_destroy(graph);
        return ONT_ENOMEM;
    }
    s->graph = graph;
    s->max_entries = max_programs ? max_programs : 1;
    s->entries = ont_calloc(s->max_entries, sizeof *s->entries);
    ont_status status = s->entries ? ont_pool_create(&s->pool) : ONT_ENOMEM;
    if (status == ONT_OK) status = check_operators(s);
    if (status != ONT_OK) {
        ont_session_destroy(s);
        return status;
    }
    *session = s;
    return ONT_OK;
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
    for (uint32_t i = 0; i < s->n_entries; i++) entry_clear(&s->entries[i]);
    ont_free(s->entries);
    ont_free(s->key);
    ont_pool_unref(s->pool);
    ont_graph_destroy(s->graph);
    ont_free(s);
}

static ont_status make_key(ont_session *s, const ont_view *inputs, const uint8_t *wants, size_t *length)
{
    size_t n = 0;
    for (uint32_t i = 0; i < s->graph->n_inputs; i++) n += 1 + (size_t)inputs[i].rank;
    if (n > s->key_capacity) {
        int64_t *bigger = ont_realloc(s->key, n, sizeof *bigger);
        if (!bigger) return ONT_ENOMEM;
        s->key = bigger;
        s->key_capacity = n;
    }
    int64_t *at = s->key;
    for (uint32_t i = 0; i < s->graph->n_inputs; i++) {
        const ont_view *v = &inputs[i];
        *at++ = (int64_t)v->dtype | (int64_t)(wants && wants[i]) << 8 | (int64_t)v->rank << 16;
        for (int d = 0; d < v->rank; d++) *at++ = v->dims[d];
    }
    *length = n;
    return ONT_OK;
}

static bool matches(const entry *e, const int64_t *key, size_t length)
{
    return e->program && e->key_length == length && (!length || !memcmp(e->key, key, length * sizeof *key));
}

/* A free entry, or the one least recently used, emptied. */
static entry *free_entry(ont_session *s)
{
    if (s->n_entries < s->max_entries) return &s->entries[s->n_entries++];
    entry *oldest = &s->entries[0];
    for (uint32_t i = 1; i < s->n_entries; i++)
        if (s->entries[i].used < oldest->used) oldest = &s->entries[i];
    entry_clear(oldest);
    return oldest;
}

static ont_status build(ont_session *s, const ont_view *inputs, const uint8_t *wants, size_t length, entry **result)
{
    int64_t *key = ont_malloc(length * sizeof *key);
    if (!key) return ONT_ENOMEM;
    if (length) memcpy(key, s->key, length * sizeof *key);
    ont_program *program;
    ont_status status = ont_program_build(s->graph, inputs, wants, &program);
    if (status != ONT_OK) {
        ont_free(key);
        return status;
    }
    s->last = NULL; /* may be the one that is emptied */
    entry *e = free_entry(s);
    *e = (entry){.key = key, .key_length = length, .program = program};
    s->stats.programs_built++;
    s->stats.build_seconds += program->build_seconds;
    s->stats.last_build_seconds = program->build_seconds;
    *result = e;
    return ONT_OK;
}

ont_status ont_session_program(ont_session *s, const ont_view *inputs, const uint8_t *wants, ont_program **program)
{
    size_t length;
    ONT_TRY(make_key(s, inputs, wants, &length));
    entry *found = s->last && matches(s->last, s->key, length) ? s->last : NULL;
    for (uint32_t i = 0; i < s->n_entries && !found; i++)
        if (matches(&s->entries[i], s->key, length)) found = &s->entries[i];
    if (found)
        s->stats.program_hits++;
    else
        ONT_TRY(build(s, inputs, wants, length, &found));
    found->used = ++s->clock;
    s->last = found;
    *program = found->program;
    return ONT_OK;
}

const ont_graph *ont_session_graph(const ont_session *s)
{
    return s->graph;
}

ont_pool *ont_session_pool(ont_session *s)
{
    return s->pool;
}

bool ont_session_is_random(const ont_session *s)
{
    return s->random;
}

const ont_program *ont_session_last_program(const ont_session *s)
{
    return s->last ? s->last->program : NULL;
}

void ont_session_get_stats(const ont_session *s, ont_session_stats *stats)
{
    *stats = s->stats;
    ont_pool_get_stats(s->pool, &stats->pool);
    const ont_program *p = ont_session_last_program(s);
    if (!p) return;
    stats->slab_bytes = p->plan.slab_bytes;
    stats->slab_lower_bound = p->plan.lower_bound;
    stats->steps = p->n_steps;
    stats->forward_steps = p->split;
}
