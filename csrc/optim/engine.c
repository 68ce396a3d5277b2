/*
 * Distributes the work of all tensors over all cores. Tensors are cut into chunks of a fixed size, and chunks are
 * grouped into batches, which threads take from queues. Sums are kept per chunk and added in a fixed order, so results
 * do not depend on the number of threads. Called by py/optim.c; it needs no GIL.
 */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/parallel.h"
#include "optim/optim.h"

enum {
    CHUNK_ELEMENTS = 1 << 16,      /* a multiple of ONT_QUANT_BLOCK and of STAGE_ELEMENTS */
    MIN_BATCH_ELEMENTS = 1 << 15,  /* long stretches of memory are read faster */
    MAX_BATCH_ELEMENTS = 1 << 20,  /* short batches balance the load */
    BATCHES_PER_THREAD = 64,       /* within these limits */
    TAIL_DIVISOR = 16,             /* the last 1/16 is cut into minimum batches, so that threads end together */
    SMALL_BYTES = 1 << 14,         /* operands up to this size are prefetched by software */
    PREFETCH_ELEMENTS = 256,       /* updated between two prefetches */
    INTERLEAVE_ELEMENTS = 1 << 10, /* read from each of two streams in turn */
    CACHE_LINE = 64,               /* bytes */
    PREFETCH_TENSORS = 16,         /* distance */
    MAX_QUEUES = 64,               /* further threads share queues */
};

ont_status ont_optim_reserve(void *array, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity) return ONT_OK;
    size_t grown = need > 2 * *capacity ? need : 2 * *capacity;
    void *block;
    memcpy(&block, array, sizeof block);
    void *moved = ont_realloc(block, grown, size);
    if (!moved) return ONT_ENOMEM;
    memcpy(array, &moved, sizeof moved);
    *capacity = grown;
    return ONT_OK;
}

void ont_optim_deinit(ont_optim *o)
{
    ont_free(o->tensors);
    ont_free(o->last);
    ont_free(o->updates);
    ont_free(o->chunks);
    ont_free(o->batches);
    ont_free(o->sums);
    ont_free(o->ratios);
    ont_free(o->ranges);
    ont_free(o->checked);
    ont_free(o->sorted);
    ont_free(o->grads_checked);
    ont_arena_deinit(&o->layouts);
    memset(o, 0, sizeof *o);
}

void ont_optim_clear(ont_optim *o)
{
    ont_optim_tensor *tensors = o->last;
    size_t capacity = o->last_capacity;
    o->last = o->tensors;
    o->last_capacity = o->tensors_capacity;
    o->n_last = o->overlap_checked ? o->n_tensors : 0;
    o->tensors = tensors;
    o->tensors_capacity = capacity;
    o->overlap_checked = false;
    o->n_tensors = o->n_updates = 0;
    if (o->layouts.bytes) {
        ont_arena_deinit(&o->layouts);
        ont_arena_init(&o->layouts);
    }
}

ont_status ont_optim_add_tensor(ont_optim *o, ont_optim_tensor **tensor)
{
    ONT_TRY(ont_optim_reserve(&o->tensors, &o->tensors_capacity, o->n_tensors + 1, sizeof *o->tensors));
    *tensor = &o->tensors[o->n_tensors++];
    memset(*tensor, 0, sizeof **tensor);
    return ONT_OK;
}

ont_status ont_optim_add_update(ont_optim *o, const ont_update *update, uint32_t *index)
{
    ONT_TRY(ont_optim_reserve(&o->updates, &o->updates_capacity, o->n_updates + 1, sizeof *o->updates));
    *index = (uint32_t)o->n_updates;
    o->updates[o->n_updates++] = *update;
    return ONT_OK;
}

ont_storage ont_optim_storage(ont_dtype dtype)
{
    switch (dtype) {
#define X(name, type) \
    case ONT_##type: return ONT_STORAGE_##name;
        ONT_STORAGE_LIST(X)
#undef X
    default: return ONT_STORAGE_COUNT;
    }
}

/* The storage type in which a loop can update all operands in place; ONT_STORAGE_COUNT: none. */
static ont_storage direct(const ont_optim_tensor *t)
{
    if (t->layout || t->stochastic || t->data[ONT_OPERAND_MASTER]) return ONT_STORAGE_COUNT;
    for (int k = 1; k < ONT_OPERAND_MASTER; k++)
        if (t->data[k] && t->dtype[k] != t->dtype[ONT_OPERAND_PARAM]) return ONT_STORAGE_COUNT;
    ont_storage storage = ont_optim_storage(t->dtype[ONT_OPERAND_PARAM]);
    return storage == ONT_STORAGE_F16 ? ONT_STORAGE_COUNT : storage;
}

/* Elements per batch. Sums are kept per chunk, so this may depend on the number of threads. */
static int64_t batch_size(int64_t total)
{
    int64_t size = total / (BATCHES_PER_THREAD * ont_parallel_threads());
    return size < MIN_BATCH_ELEMENTS ? MIN_BATCH_ELEMENTS : size > MAX_BATCH_ELEMENTS ? MAX_BATCH_ELEMENTS : size;
}

/* Cuts the tensors into chunks, in order, and groups the chunks into batches. */
static ont_status partition(ont_optim *o)
{
    size_t n = 0;
    int64_t total = 0;
    for (size_t i = 0; i < o->n_tensors; i++) {
        n += (size_t)((o->tensors[i].count + CHUNK_ELEMENTS - 1) / CHUNK_ELEMENTS);
        total += o->tensors[i].count;
    }
    ONT_TRY(ont_optim_reserve(&o->chunks, &o->chunks_capacity, n, sizeof *o->chunks));
    ONT_TRY(ont_optim_reserve(&o->batches, &o->batches_capacity, n + 1, sizeof *o->batches));
    ONT_TRY(ont_optim_reserve(&o->sums, &o->sums_capacity, 2 * n, sizeof *o->sums));
    ONT_TRY(ont_optim_reserve(&o->ratios, &o->ratios_capacity, o->n_tensors, sizeof *o->ratios));
    o->n_chunks = o->n_batches = 0;
    int64_t size = batch_size(total), remaining = total, batch_elements = size;
    for (size_t i = 0; i < o->n_tensors; i++)
        for (int64_t first = 0; first < o->tensors[i].count; first += CHUNK_ELEMENTS) {
            int64_t count = o->tensors[i].count - first < CHUNK_ELEMENTS ? o->tensors[i].count - first : CHUNK_ELEMENTS;
            if (batch_elements >= (remaining < total / TAIL_DIVISOR ? MIN_BATCH_ELEMENTS : size)) {
                o->batches[o->n_batches++] = (int64_t)o->n_chunks;
                batch_elements = 0;
            }
            batch_elements += count;
            remaining -= count;
            o->chunks[o->n_chunks++] = (ont_optim_chunk){(uint32_t)i, first, count};
        }
    o->batches[o->n_batches] = (int64_t)o->n_chunks;
    return ONT_OK;
}

/*
 * A queue of batches. Each thread starts with the same queue in every step, so that its cache still holds what it wrote
 * there, and then helps with the other queues.
 */
typedef struct queue {
    _Alignas(CACHE_LINE) atomic_size_t next;
    size_t end;
} queue;

typedef struct pass {
    ont_optim *o;
    const ont_optim_table *loops;
    const ont_optim_request *request;
    ont_rule rule;
    void (*body)(struct pass *pass, size_t chunk, size_t next); /* `next`: the chunk that this thread processes next */
    bool runs_callback;
    bool rounding_reads_step; /* stochastic rounding reads the step count from before the step */
    bool backwards; /* alternate passes run backwards: the end of the previous pass is still in the cache */
    size_t n_queues;
    queue *queues; /* of the current pass over memory */
} pass;

/* Increments the step counts, on one thread: two parameters may share a count. */
static void increment_steps(const ont_optim *o)
{
    for (size_t i = 0; i < o->n_tensors; i++) {
        if (i + PREFETCH_TENSORS < o->n_tensors) __builtin_prefetch(o->tensors[i + PREFETCH_TENSORS].step, 1);
        const ont_optim_tensor *t = &o->tensors[i];
        if (t->step && t->step_is_double) *(double *)t->step += 1;
        else if (t->step) *(float *)t->step += 1;
    }
}

/* Processes the rest of a queue. */
static void drain_queue(pass *p, queue *s)
{
    for (;;) {
        size_t batch = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
        if (batch >= s->end) return;
        if (p->backwards) batch = p->o->n_batches - 1 - batch;
        size_t c = (size_t)p->o->batches[batch], end = (size_t)p->o->batches[batch + 1];
        for (; c < end; c++) p->body(p, c, c + 1 < end ? c + 1 : c);
    }
}

static void drain_queues(void *context, int64_t first, int64_t last)
{
    (void)last;
    pass *p = context;
    if (first == 0 && p->runs_callback) {
        p->request->concurrent_callback(p->request->context);
        if (!p->rounding_reads_step) increment_steps(p->o);
    }
    for (size_t k = 0; k < p->n_queues; k++) {
        size_t queue_index = ((size_t)first + k) % p->n_queues;
        drain_queue(p, &p->queues[p->backwards ? p->n_queues - 1 - queue_index : queue_index]);
    }
}

static void run_pass(pass *p, void (*body)(pass *, size_t, size_t))
{
    size_t n = p->o->n_batches;
    queue queues[MAX_QUEUES];
    p->body = body;
    p->queues = queues;
    int64_t threads = ont_parallel_threads();
    if (threads > (int64_t)n) threads = n ? (int64_t)n : 1;
    p->n_queues = (size_t)(threads < MAX_QUEUES ? threads : MAX_QUEUES);
    for (size_t k = 0; k < p->n_queues; k++) {
        atomic_init(&queues[k].next, n * k / p->n_queues);
        queues[k].end = n * (k + 1) / p->n_queues;
    }
    ont_parallel(threads, 1, drain_queues, p); /* every thread gets one call, which drains the queues */
    p->backwards = !p->backwards;
}

/* Operands of a chunk; NULL if absent, or if the tensor is strided. */
static void find_operands(const ont_optim *o, size_t chunk, void *at[ONT_OPERAND_COUNT])
{
    const ont_optim_chunk *c = &o->chunks[chunk];
    const ont_optim_tensor *t = &o->tensors[c->tensor];
    for (int k = 0; k < ONT_OPERAND_COUNT; k++) {
        char *data = t->layout ? NULL : t->data[k];
        at[k] = data ? data + c->first * (int64_t)ont_dtype_size(t->dtype[k]) : NULL;
    }
}

/*
 * Prefetches into L2. The hardware prefetcher restarts in every small tensor and stops at page boundaries. Not into L1,
 * which holds the operands being updated.
 */
static void prefetch(const char *data, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(data + at, 0, 2);
}

/*
 * Sum of squares of a chunk; a full chunk is read as two interleaved streams, which a core reads faster than one. The
 * order of the additions is fixed.
 */
static double chunk_squares(const pass *p, ont_dtype dtype, const char *from, int64_t count)
{
    double (*sum_squares)(const void *, int64_t) = p->loops->sum_squares[ont_optim_storage(dtype)];
    int64_t size = (int64_t)ont_dtype_size(dtype);
    if (count < CHUNK_ELEMENTS) return sum_squares(from, count);
    double sum[2] = {0};
    for (int64_t done = 0; done < CHUNK_ELEMENTS / 2; done += INTERLEAVE_ELEMENTS)
        for (int half = 0; half < 2; half++)
            sum[half] += sum_squares(from + (half * (CHUNK_ELEMENTS / 2) + done) * size, INTERLEAVE_ELEMENTS);
    return sum[0] + sum[1];
}

static void squares_body(pass *p, size_t chunk, size_t next)
{
    const ont_optim_chunk *c = &p->o->chunks[chunk];
    const ont_optim_tensor *t = &p->o->tensors[c->tensor];
    ont_storage storage = ont_optim_storage(t->dtype[ONT_OPERAND_GRAD]);
    double sum;
    if (t->layout || storage == ONT_STORAGE_F16) {
        sum = ont_optim_stage_squares(t, c->first, c->count);
    } else {
        const char *from = t->data[ONT_OPERAND_GRAD];
        from += c->first * (int64_t)ont_dtype_size(t->dtype[ONT_OPERAND_GRAD]);
        if (next != chunk && c->count <= SMALL_BYTES / 4) {
            void *next_operands[ONT_OPERAND_COUNT];
            find_operands(p->o, next, next_operands);
            if (next_operands[ONT_OPERAND_GRAD]) prefetch(next_operands[ONT_OPERAND_GRAD], c->count * 4);
        }
        sum = chunk_squares(p, t->dtype[ONT_OPERAND_GRAD], from, c->count);
    }
    p->o->sums[2 * chunk] = sum;
}

/*
 * Updates a chunk of a small tensor and prefetches the same amount of the next chunk, which may be shorter or of
 * another dtype: prefetching beyond it is harmless.
 */
static void update_small(pass *p, const ont_update *u, size_t chunk, size_t next, void *at[], double *sums)
{
    const ont_optim_chunk *c = &p->o->chunks[chunk];
    ont_dtype dtype = p->o->tensors[c->tensor].dtype[ONT_OPERAND_PARAM];
    ont_update_loop loop = p->loops->update[p->rule][ont_optim_storage(dtype)];
    int64_t size = (int64_t)ont_dtype_size(dtype);
    void *next_operands[ONT_OPERAND_COUNT] = {0};
    if (next != chunk) find_operands(p->o, next, next_operands);
    for (int64_t done = 0; done < c->count; done += PREFETCH_ELEMENTS) {
        int64_t n = c->count - done < PREFETCH_ELEMENTS ? c->count - done : PREFETCH_ELEMENTS;
        for (int k = 0; k < ONT_OPERAND_COUNT; k++)
            if (next_operands[k]) prefetch((const char *)next_operands[k] + done * size, n * size);
        loop(u, n, at[ONT_OPERAND_PARAM], at[ONT_OPERAND_GRAD], at + ONT_OPERAND_STATE, sums);
        for (int k = 0; k < ONT_OPERAND_COUNT; k++)
            if (at[k]) at[k] = (char *)at[k] + n * size;
    }
}

static void update_chunk(pass *p, const ont_update *u, size_t chunk, size_t next, double *sums)
{
    const ont_optim_chunk *c = &p->o->chunks[chunk];
    const ont_optim_tensor *t = &p->o->tensors[c->tensor];
    ont_storage storage = direct(t);
    if (storage == ONT_STORAGE_COUNT) {
        ont_optim_stage(t, p->rule, u, c->first, c->count, p->request->seed, sums);
        return;
    }
    void *at[ONT_OPERAND_COUNT];
    find_operands(p->o, chunk, at);
    if (c->count * (int64_t)ont_dtype_size(t->dtype[ONT_OPERAND_PARAM]) <= SMALL_BYTES) {
        update_small(p, u, chunk, next, at, sums);
        return;
    }
    p->loops->update[p->rule][storage](u, c->count, at[ONT_OPERAND_PARAM], at[ONT_OPERAND_GRAD],
                                       at + ONT_OPERAND_STATE, sums);
}

static void update_body(pass *p, size_t chunk, size_t next)
{
    size_t tensor = p->o->chunks[chunk].tensor;
    ont_update u = p->o->updates[p->o->tensors[tensor].update];
    if (p->rule == ONT_RULE_LAMB_APPLY) u.rate *= p->o->ratios[tensor];
    double *sums = p->o->sums + 2 * chunk;
    sums[0] = sums[1] = 0;
    update_chunk(p, &u, chunk, next, sums);
}

static double norm_of(pass *p)
{
    run_pass(p, squares_body);
    double sum = 0;
    for (size_t i = 0; i < p->o->n_chunks; i++) sum += p->o->sums[2 * i];
    return sqrt(sum) * fabs(p->request->unscale);
}

/*
 * LAMB's trust ratio |p| / |u| of every tensor from the sums of its chunks, clamped to its limits; 1, whatever these
 * are, if either norm is zero. NaN is kept.
 */
static void trust_ratios(ont_optim *o)
{
    size_t chunk = 0;
    for (size_t i = 0; i < o->n_tensors; i++) {
        double pp = 0, uu = 0;
        for (; chunk < o->n_chunks && o->chunks[chunk].tensor == i; chunk++) {
            pp += o->sums[2 * chunk];
            uu += o->sums[2 * chunk + 1];
        }
        const ont_update *u = &o->updates[o->tensors[i].update];
        double ratio = sqrt(pp) / sqrt(uu);
        o->ratios[i] = pp == 0 || uu == 0 ? 1
                       : ratio < u->ratio_min ? u->ratio_min
                       : ratio > u->ratio_max ? u->ratio_max
                                              : ratio;
    }
}

static void update_all(pass *p)
{
    const ont_optim_rule *rule = p->request->rule;
    run_pass(p, update_body);
    p->runs_callback = false;
    if (rule->second == rule->rule) return;
    trust_ratios(p->o);
    p->rule = rule->second;
    run_pass(p, update_body);
}

ont_status ont_optim_run(ont_optim *o, const ont_optim_request *request, double *norm)
{
    ONT_TRY(partition(o));
    pass p = {.o = o, .loops = ont_optim_loops(), .request = request, .rule = request->rule->rule};
    double factor = request->unscale;
    if (request->max_norm >= 0) {
        *norm = norm_of(&p);
        if (request->only_finite && !isfinite(*norm)) return ONT_OK;
        double clip = request->max_norm / (*norm + request->norm_epsilon);
        factor *= clip > 1 ? 1 : clip; /* NaN is kept */
    }
    for (size_t i = 0; i < o->n_updates; i++) o->updates[i].grad *= factor;
    p.runs_callback = true;
    for (size_t i = 0; i < o->n_tensors; i++) p.rounding_reads_step |= o->tensors[i].stochastic;
    update_all(&p);
    if (p.rounding_reads_step) increment_steps(o);
    return ONT_OK;
}

ont_status ont_optim_prepare_apply(ont_optim *o)
{
    int64_t largest = 0;
    for (size_t i = 0; i < o->n_tensors; i++) largest = o->tensors[i].count > largest ? o->tensors[i].count : largest;
    size_t n = (size_t)((largest + CHUNK_ELEMENTS - 1) / CHUNK_ELEMENTS);
    ONT_TRY(ont_optim_reserve(&o->chunks, &o->chunks_capacity, n, sizeof *o->chunks));
    ONT_TRY(ont_optim_reserve(&o->batches, &o->batches_capacity, n + 1, sizeof *o->batches));
    ONT_TRY(ont_optim_reserve(&o->sums, &o->sums_capacity, 2 * n, sizeof *o->sums));
    return ont_optim_reserve(&o->ratios, &o->ratios_capacity, 1, sizeof *o->ratios);
}

ont_status ont_optim_apply(ont_optim *o, const ont_optim_request *request, uint32_t tensor, const void *gradient)
{
    ont_optim one = *o; /* uses the memory reserved by ont_optim_prepare_apply() */
    one.tensors = &o->tensors[tensor];
    one.n_tensors = 1;
    memcpy(&one.tensors->data[ONT_OPERAND_GRAD], &gradient, sizeof gradient);
    ONT_TRY(partition(&one));
    pass p = {.o = &one, .loops = ont_optim_loops(), .request = request, .rule = request->rule->rule};
    update_all(&p);
    increment_steps(&one);
    /* the gradient is no longer valid, and ont_optim_check() compares this field */
    one.tensors->data[ONT_OPERAND_GRAD] = NULL;
    return ONT_OK;
}

ont_status ont_optim_squares(ont_optim *o, double *sums)
{
    ONT_TRY(partition(o));
    pass p = {.o = o, .loops = ont_optim_loops()};
    run_pass(&p, squares_body);
    for (size_t i = 0; i < o->n_tensors; i++) sums[i] = 0;
    for (size_t c = 0; c < o->n_chunks; c++) sums[o->chunks[c].tensor] += o->sums[2 * c];
    return ONT_OK;
}

ont_status ont_optim_scale(ont_optim *o, bool *finite)
{
    ONT_TRY(partition(o));
    ont_optim_request request = {.unscale = 1};
    pass p = {.o = o, .loops = ont_optim_loops(), .request = &request, .rule = ONT_RULE_SCALE};
    run_pass(&p, update_body);
    *finite = true;
    for (size_t c = 0; c < o->n_chunks; c++) *finite = *finite && o->sums[2 * c] == 0;
    return ONT_OK;
}
