/*
 * The executor: fills a table of pointers, then calls the bound kernels in order. See run.h.
 */
#include "run/run.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "base/clock.h"
#include "base/denormals.h"
#include "base/asan.h"
#include "run/device_memory.h"
#include "run/replay.h"
#include "run/timing.h"

struct ont_run {
    ont_program *program;
    ont_pool *pool;
    ont_random random;
    char *slab;            /* in device memory if there is a device; its random state follows the planned bytes */
    ont_memory slab_memory;
    void *stream;    /* the stream that used the slab last */
    void **pointers; /* per value id */
    const void **in; /* operands of the current step */
    void **out;
    ont_block **outputs;   /* per graph output: blocks that the run references; during backward also gradients */
    ont_block **copies;    /* contiguous copies of strided inputs; n_copies of them */
    uint32_t n_copies, max_copies;
    const ont_grad_callback *callback; /* set during backward */
    uint32_t n_delivered, mode;        /* gradients delivered so far; floating-point mode of the caller of backward */
    bool used;
    ont_slab shared; /* the slab where it is one of the pool's; see shares_slab() */
    ont_replay replays[2]; /* of forward and of backward */
    ont_run *next;         /* next in the program's list of idle runs */
};

enum { MAX_IDLE_RUNS = 2 }; /* idle runs kept with their slabs: one for training, one for overlapping forwards */

static size_t slab_bytes(const ont_program *p)
{
    return p->plan.slab_bytes + (p->device ? ONT_PLAN_ALIGN : 0);
}

/*
 * A graph that depends on the contents of batches has many programs of about the same size, each of them rarely used.
 * On the CPU their idle runs have no slab of their own; on a device, where a slab for each number of packed rows would
 * fill the memory, no run is kept, and PyTorch's allocator gets its slab.
 */
static bool shares_slab(const ont_program *p) { return !p->device && p->n_known && !p->probe; }
static bool keeps_idle_runs(const ont_program *p)
{
    return !p->device || !p->n_known || p->probe || !p->graph->packed.nodes;
}

/* Where device kernels read the random state: key, seed and block. */
static uint64_t *seed_at(const ont_run *run)
{
    return run->program->device ? (uint64_t *)(void *)(run->slab + run->program->plan.slab_bytes) : NULL;
}

static void run_destroy(ont_run *run)
{
    if (!run) return;
    const ont_program *p = run->program;
    void *last = run->used ? run->stream : run->slab_memory.stream;
    for (int phase = 0; phase < 2; phase++) ont_replay_deinit(&run->replays[phase], p->device, last);
    ont_device_free_after(p->device, &run->slab_memory, slab_bytes(p), last);
    if (run->used) (void)ont_device_wait_for_use(p->device, &p->constants, last);
    ont_free(run->pointers);
    ont_free(run->in);
    ont_free(run->out);
    ont_free(run->outputs);
    ont_free(run->copies);
    ont_free(run);
}

void ont_run_free_idle(ont_program *program)
{
    for (ont_run *run = program->idle, *next; run; run = next) {
        next = run->next;
        run_destroy(run);
    }
    program->idle = NULL;
}

/*
 * Sets pointers into the slab and to constants, which are valid as long as the run; those of inputs and outputs are set
 * in each call.
 */
static void set_fixed_pointers(ont_run *run)
{
    const ont_program *p = run->program;
    for (uint32_t i = 0; i < p->graph->n_values; i++) {
        const ont_location *location = &p->plan.locations[i];
        if (location->kind == ONT_LOCATION_SLAB) run->pointers[i] = run->slab + location->offset;
        if (location->kind == ONT_LOCATION_CONSTANT)
            run->pointers[i] = p->device ? p->constant_addresses[location->index]
                                         : p->graph->values[location->index]->data->data;
    }
}

static ont_status run_create(ont_program *p, ont_run **result)
{
    ont_run *run = ont_calloc(1, sizeof *run);
    if (!run) return ONT_ENOMEM;
    run->program = p;
    run->max_copies = p->graph->n_inputs * 2 + 1;
    ont_status status = shares_slab(p) ? ONT_OK : ont_device_alloc(p->device, slab_bytes(p), &run->slab_memory);
    run->slab = run->slab_memory.data;
    run->pointers = ont_calloc(p->graph->n_values + 1, sizeof *run->pointers);
    run->in = ont_calloc(p->max_in + 1, sizeof *run->in);
    run->out = ont_calloc(p->max_out + 1, sizeof *run->out);
    run->outputs = ont_calloc(p->graph->n_outputs + 1, sizeof *run->outputs);
    run->copies = ont_calloc(run->max_copies, sizeof *run->copies);
    if ((!run->slab && !shares_slab(p)) || !run->pointers || !run->in || !run->out || !run->outputs ||
        !run->copies) {
        run_destroy(run);
        return status == ONT_OK ? ONT_ENOMEM : status;
    }
    if (run->slab) set_fixed_pointers(run);
    *result = run;
    return ONT_OK;
}

static ont_status run_take(ont_program *p, ont_pool *pool, const ont_random *random, ont_run **result)
{
    pthread_mutex_lock(&p->lock);
    ont_run *run = p->idle;
    if (run) {
        p->idle = run->next;
        p->n_idle--;
    }
    pthread_mutex_unlock(&p->lock);
    if (!run) ONT_TRY(run_create(p, &run));
    if (shares_slab(p)) {
        ont_status status = ont_pool_take_slab(pool, slab_bytes(p), &run->shared);
        if (status != ONT_OK) {
            run_destroy(run);
            return status;
        }
        run->slab = run->shared.data;
        set_fixed_pointers(run);
    }
    ont_program_ref(p);
    run->pool = pool;
    run->random = *random;
    run->next = NULL;
    ont_pool_open_runs(pool, 1);
    *result = run;
    return ONT_OK;
}

void ont_run_release(ont_run *run)
{
    if (!run) return;
    ont_program *p = run->program;
    for (uint32_t i = 0; i < p->graph->n_outputs; i++) {
        ont_block_unref(run->outputs[i]);
        run->outputs[i] = NULL;
    }
    for (uint32_t i = 0; i < run->n_copies; i++) ont_block_unref(run->copies[i]);
    run->n_copies = 0;
    if (run->shared.data) {
        ont_pool_give_slab(run->pool, run->shared);
        run->shared = (ont_slab){0};
        run->slab = NULL;
    }
    ont_pool_open_runs(run->pool, -1);
    pthread_mutex_lock(&p->lock);
    bool keep = p->n_idle < MAX_IDLE_RUNS && keeps_idle_runs(p);
    if (keep) {
        run->next = p->idle;
        p->idle = run;
        p->n_idle++;
    }
    pthread_mutex_unlock(&p->lock);
    if (!keep) run_destroy(run);
    ont_program_unref(p);
}

ont_program *ont_run_program(const ont_run *run)
{
    return run->program;
}

/*
 * Row-major elements of a view: its own memory, or a copy that lives as long as the run. Never NULL, which means an
 * absent input: a tensor without elements may have a NULL address.
 */
static ont_status make_contiguous(ont_run *run, const ont_tensor_view *view, void **data)
{
    static char nothing[64];
    if (ont_tensor_view_is_contiguous(view)) {
        *data = view->data ? view->data : nothing;
        return ONT_OK;
    }
    ont_shape shape = ont_shape_of(view->rank, view->dims);
    ont_block *block;
    ONT_TRY(ont_pool_take(run->pool, view->dtype, &shape, &block));
    run->copies[run->n_copies++] = block;
    *data = block->data;
    return ont_device_copy_view(run->program->device, view, block->data, run->stream);
}

/* Sets the pointers of all values that are in a graph input or output block. */
static void set_bound_pointers(ont_run *run, void *const *inputs)
{
    const ont_program *p = run->program;
    for (uint32_t i = 0; i < p->graph->n_values; i++) {
        const ont_location *location = &p->plan.locations[i];
        if (location->kind == ONT_LOCATION_INPUT && inputs[location->index]) run->pointers[i] = inputs[location->index];
        if (location->kind != ONT_LOCATION_OUTPUT) continue;
        if (run->outputs[location->index]) run->pointers[i] = run->outputs[location->index]->data;
    }
}

/* Passes the gradients that are due before step t to the callback. */
static ont_status deliver_due(ont_run *run, uint32_t t)
{
    const ont_program *p = run->program;
    ont_status status = ONT_OK;
    uint32_t mode = ont_float_mode();
    ont_float_mode_set(run->mode);
    while (status == ONT_OK && run->n_delivered < p->n_deliveries && p->deliveries[run->n_delivered].before <= t) {
        const ont_grad_delivery *a = &p->deliveries[run->n_delivered++];
        status = run->callback->call(run->callback->context, a->input, run->pointers[a->value], run->stream);
    }
    ont_float_mode_set(mode);
    return status;
}

static bool has_delivery_due(const ont_run *run, uint32_t t)
{
    const ont_program *p = run->program;
    return run->callback && run->n_delivered < p->n_deliveries && p->deliveries[run->n_delivered].before <= t;
}

static void guard(const ont_run *run, void *data, size_t bytes, bool accessible)
{
    const ont_device *device = run->program->device;
    if (device)
        device->ops->guard(device, data, bytes, accessible);
    else if (accessible)
        ONT_UNPOISON(data, bytes);
    else
        ONT_POISON(data, bytes);
}

static void unpoison_values(const ont_run *run, const uint32_t *ids, uint32_t n)
{
    const ont_program *p = run->program;
    for (uint32_t i = 0; i < n; i++) {
        if (ids[i] == ONT_STEP_ABSENT || p->plan.locations[ids[i]].kind != ONT_LOCATION_SLAB) continue;
        const ont_value *v = p->graph->values[ids[i]];
        size_t bytes;
        if (ont_shape_bytes(&v->shape, v->dtype, &bytes) == ONT_OK) guard(run, run->pointers[ids[i]], bytes, true);
    }
}

/*
 * For AddressSanitizer: makes only the operands and scratch memory of a step accessible, and of a device's slab also
 * the random state; NULL: the whole slab.
 */
static void poison_slab(const ont_run *run, const ont_step *step)
{
    const ont_program *p = run->program;
    if (p->device ? !p->device->ops->guard : !ONT_ASAN) return;
    guard(run, run->slab, p->plan.slab_bytes, !step);
    if (!step) return;
    unpoison_values(run, step->in, step->node->n_inputs);
    unpoison_values(run, step->out, step->node->n_outputs);
    guard(run, run->slab + step->work_offset, step->work_bytes, true);
}

/* Who looks at the steps of a phase while they run. */
typedef struct observer {
    bool timed;
    ont_phase_record *record;  /* NULL: none is kept */
    const ont_step_hook *hook; /* NULL: none */
    void *phase;               /* what the hook's begin has returned for the phase */
} observer;

static observer observe(const ont_run *run, uint32_t first, uint32_t last)
{
    observer o = {.timed = ont_timing_is_on(), .hook = ont_timing_hook()};
    if (o.timed) o.record = ont_timing_begin(run->program, run->pool, first, last);
    if (o.hook) o.phase = o.hook->begin(NULL, first != 0);
    return o;
}

static void observe_end(const observer *o)
{
    if (o->hook) o->hook->end(o->phase);
    ont_timing_end(o->record);
}

static ont_status run_kernel(const ont_step *step, uint32_t index, ont_call *call)
{
    ONT_ASSERT(index < step->n_kernels);
    call->state = step->kernels[index].state;
    return step->kernels[index].kernel->run(call);
}

/*
 * The kernels of an undecided step take turns. Those of a short one do so at once on the same operands, so that a
 * second call of a module has the bits of the first; the turns of a long one are its next runs, each of which
 * costs only what its kernel is slower.
 */
static ont_status run_tuned(const ont_step *step, ont_call *call)
{
    for (;;) {
        int winner = ont_tuner_winner(step->tuner);
        if (winner >= 0) return run_kernel(step, (uint32_t)winner, call);
        int index = ont_tuner_next(step->tuner);
        double start = ont_seconds();
        ONT_TRY(run_kernel(step, (uint32_t)index, call));
        if (!ont_tuner_record(step->tuner, index, ont_seconds() - start) || !step->is_short) return ONT_OK;
    }
}

static ont_status run_step(const ont_step *step, ont_call *call)
{
    return step->tuner ? run_tuned(step, call) : run_kernel(step, 0, call);
}

static ont_status run_observed(const observer *o, const ont_program *p, ont_call *call)
{
    const ont_step *step = &p->steps[call->step];
    void *begun = o->hook ? o->hook->begin(step, step->node->backward) : NULL;
    double *times = p->times[call->step];
    if (o->timed) times[0] = ont_seconds();
    ont_status status = run_step(step, call);
    if (o->timed) times[1] = ont_seconds();
    if (o->record) memcpy(o->record->times[(uint32_t)call->step - o->record->first], times, sizeof p->times[0]);
    if (o->hook) o->hook->end(begun);
    return status;
}

static ont_status deliver_observed(const observer *o, ont_run *run, uint32_t t)
{
    double begin = o->record ? ont_seconds() : 0;
    ont_status status = deliver_due(run, t);
    if (o->record) o->record->deliver_seconds += ont_seconds() - begin;
    return status;
}

static ont_status execute_observed(ont_run *run, uint32_t first, uint32_t last, const observer *o)
{
    const ont_program *p = run->program;
    ont_call call = {.in = run->in, .out = run->out, .seed = run->random.key, .device = p->device,
                     .stream = run->stream, .seed_at = seed_at(run), .fault = p->fault};
    bool observed = o->timed || o->hook;
    for (uint32_t t = first; t < last; t++) {
        const ont_step *step = &p->steps[t];
        if (has_delivery_due(run, t)) ONT_TRY(deliver_observed(o, run, t));
        for (uint32_t i = 0; i < step->node->n_inputs; i++)
            run->in[i] = step->in[i] == ONT_STEP_ABSENT ? NULL : run->pointers[step->in[i]];
        for (uint32_t i = 0; i < step->node->n_outputs; i++)
            run->out[i] = step->out[i] == ONT_STEP_ABSENT ? NULL : run->pointers[step->out[i]];
        call.node = step->node;
        call.step = (int32_t)t;
        call.work = run->slab + step->work_offset;
        poison_slab(run, step);
        ont_status status = observed ? run_observed(o, p, &call) : run_step(step, &call);
        poison_slab(run, NULL);
        if (status != ONT_OK) return ont_context(status, "%s '%s'", step->node->op_type, step->node->name);
    }
    return ONT_OK;
}

static ont_status execute_steps(ont_run *run, uint32_t first, uint32_t last)
{
    ONT_ASSERT(first <= last && last <= run->program->n_steps);
    observer o = observe(run, first, last);
    ont_status status = execute_observed(run, first, last, &o);
    observe_end(&o);
    return status;
}

/*
 * Libraries run matmuls on an OpenMP team, whose threads need the mode too; for a small program setting it would take
 * longer than the steps.
 */
static ont_status execute_flushed(ont_run *run, uint32_t first, uint32_t last)
{
    enum { LARGE = 8 << 20 }; /* bytes of activations, about some milliseconds of work */
    bool team = run->program->plan.slab_bytes >= LARGE;
    ont_float_modes before;
    ont_denormals_flush(team, &before);
    ont_status status = execute_steps(run, first, last);
    ont_denormals_restore(before);
    return status;
}

/* Captures the steps on a private stream. If a capture fails, the phase runs eagerly from now on. */
static ont_status capture(ont_run *run, ont_replay *replay, uint32_t first, uint32_t last)
{
    const ont_device *device = run->program->device;
    void *stream = run->stream, *graph = NULL;
    ont_status status = device->ops->capture_begin(device, stream, &run->stream);
    if (status == ONT_OK) {
        status = execute_steps(run, first, last);
        ont_status ended = device->ops->capture_end(device, run->stream, status == ONT_OK, &graph);
        if (status == ONT_OK) status = ended;
    }
    run->stream = stream;
    replay->graph = status == ONT_OK ? graph : NULL;
    replay->capture_failed = status != ONT_OK;
    return status;
}

/*
 * Collects address and size of every graph input and output of this phase. Saved forward outputs are read by backward.
 */
static void collect_addresses(const ont_run *run, void *const *inputs, void **addresses, size_t *bytes)
{
    const ont_program *p = run->program;
    for (uint32_t i = 0; i < p->graph->n_inputs; i++) {
        const ont_value *v = p->graph->inputs[i];
        addresses[i] = inputs[i];
        bytes[i] = (size_t)ont_shape_count(&v->shape) * ont_dtype_size(v->dtype);
    }
    for (uint32_t i = 0; i < p->graph->n_outputs; i++) {
        addresses[p->graph->n_inputs + i] = run->outputs[i] ? run->outputs[i]->data : NULL;
        bytes[p->graph->n_inputs + i] = run->outputs[i] ? run->outputs[i]->bytes : 0;
    }
}

/* Copies inputs to their static buffers before the launch, or results from theirs after it. */
static ont_status copy_static_buffers(ont_run *run, const ont_replay *replay, uint32_t first, bool results)
{
    const ont_program *p = run->program;
    uint32_t n_inputs = p->graph->n_inputs, first_own = first ? p->grads.n_forward_outputs : 0;
    uint32_t end = first ? p->graph->n_outputs : p->grads.n_forward_outputs;
    for (uint32_t i = 0; i < replay->n_tensors; i++) {
        const ont_replay_tensor *tensor = &replay->tensors[i];
        bool is_result = i >= n_inputs + first_own && i < n_inputs + end;
        if (!tensor->static_buffer.data || !tensor->address || is_result != results) continue;
        ONT_TRY(ont_device_copy(p->device, results ? tensor->address : tensor->static_buffer.data,
                                results ? tensor->static_buffer.data : tensor->address, tensor->bytes, run->stream));
    }
    return ONT_OK;
}

static void use_static_buffers(ont_run *run, const ont_replay *replay)
{
    const ont_program *p = run->program;
    for (uint32_t i = 0; i < p->graph->n_values; i++) {
        const ont_location *location = &p->plan.locations[i];
        if (location->kind != ONT_LOCATION_INPUT && location->kind != ONT_LOCATION_OUTPUT) continue;
        const ont_replay_tensor *tensor =
            &replay->tensors[location->index + (location->kind == ONT_LOCATION_OUTPUT ? p->graph->n_inputs : 0)];
        if (tensor->static_buffer.data && tensor->address) run->pointers[i] = tensor->static_buffer.data;
    }
}

static ont_status choose_mode(ont_run *run, void *const *inputs, ont_replay *replay, ont_replay_mode *mode,
                              const char **reason)
{
    const ont_graph *g = run->program->graph;
    ont_replay_call call = {.stream = run->stream, .n = g->n_inputs + g->n_outputs};
    call.addresses = ont_calloc(call.n + 1, sizeof *call.addresses);
    call.bytes = ont_calloc(call.n + 1, sizeof *call.bytes);
    ont_status status = call.addresses && call.bytes ? ONT_OK : ONT_ENOMEM;
    if (status == ONT_OK) {
        collect_addresses(run, inputs, call.addresses, call.bytes);
        status = ont_replay_choose_mode(replay, run->program->device, &call, mode, reason);
    }
    ont_free(call.addresses);
    ont_free(call.bytes);
    return status;
}

/* Why the phase cannot be captured, whatever its addresses are; NULL: it can. */
static const char *capture_obstacle(const ont_run *run)
{
    if (!run->program->device->ops->capture_begin) return "the device does not capture graphs";
    if (!ont_replay_enabled()) return "off: ORTMODULE_CUDA_GRAPH is 0";
    /* a replay calls nothing on the host */
    if (run->callback && run->program->n_deliveries) return "backward passes gradients to an optimizer's step";
    return ont_timing_is_on() ? "steps are timed" : NULL;
}

/* Updates the statistics that explain() shows. */
static void record_phase(ont_run *run, uint32_t first, ont_replay_mode mode, const char *reason)
{
    ont_program *p = run->program;
    ont_phase_stats *n = &p->phase_stats[first != 0];
    pthread_mutex_lock(&p->lock);
    n->captured += mode == ONT_REPLAY_CAPTURE;
    n->launched += mode != ONT_REPLAY_EAGER;
    snprintf(n->reason, sizeof n->reason, "%s", reason ? reason : "");
    pthread_mutex_unlock(&p->lock);
    if (mode != ONT_REPLAY_EAGER) ont_replay_count(ONT_REPLAY_LAUNCH);
    if (mode == ONT_REPLAY_CAPTURE) ont_replay_count(ONT_REPLAY_CAPTURE);
}

/* Runs steps [first, last) eagerly or as a graph. `inputs`: addresses of the bound graph inputs. */
static ont_status execute(ont_run *run, void *const *inputs, uint32_t first, uint32_t last)
{
    const ont_device *device = run->program->device;
    ont_replay *replay = &run->replays[first != 0];
    ont_replay_mode mode = ONT_REPLAY_EAGER;
    if (!device) return execute_flushed(run, first, last);
    if (first >= last) return ONT_OK;
    const char *reason = capture_obstacle(run);
    bool failed_before = replay->capture_failed;
    if (!reason) ONT_TRY(choose_mode(run, inputs, replay, &mode, &reason));
    if (mode == ONT_REPLAY_EAGER) {
        /* the reason of a failed capture stays */
        if (!failed_before) record_phase(run, first, mode, reason);
        return execute_steps(run, first, last);
    }
    use_static_buffers(run, replay);
    ONT_TRY(copy_static_buffers(run, replay, first, false));
    if (mode == ONT_REPLAY_CAPTURE && capture(run, replay, first, last) != ONT_OK) {
        record_phase(run, first, ONT_REPLAY_EAGER, ont_error_message());
        ONT_TRY(execute_steps(run, first, last));
    } else {
        ONT_TRY(device->ops->graph_launch(device, replay->graph, run->stream));
        record_phase(run, first, mode, NULL);
    }
    return copy_static_buffers(run, replay, first, true);
}

/*
 * Allocates the blocks of graph outputs [first, last), before their phase; those of gradients that forward begins
 * before forward.
 */
static ont_status alloc_outputs(ont_run *run, uint32_t first, uint32_t last, bool early)
{
    ONT_ASSERT(first <= last && last <= run->program->graph->n_outputs);
    const ont_plan *plan = &run->program->plan;
    for (uint32_t i = first; i < last; i++) {
        const ont_value *v = run->program->graph->outputs[i];
        if (plan->deliver_before[i] != ONT_PLAN_BLOCK || plan->early_outputs[i] != early) continue;
        ONT_TRY(ont_pool_take(run->pool, v->dtype, &v->shape, &run->outputs[i]));
    }
    return ONT_OK;
}

static ont_status copy_outputs(ont_run *run, uint32_t first, uint32_t last)
{
    ONT_ASSERT(last <= run->program->graph->n_outputs);
    const ont_program *p = run->program;
    for (uint32_t i = first; i < last; i++) {
        ont_block *block = run->outputs[i];
        if (p->plan.copied_outputs[i] && block->bytes)
            ONT_TRY(ont_device_copy(p->device, block->data, run->pointers[p->graph->outputs[i]->id], block->bytes,
                                    run->stream));
    }
    return ONT_OK;
}

/* Makes the device current, adopts the caller's stream, and uploads the random state. */
static ont_status enter(ont_run *run, ont_scope *scope)
{
    const ont_device *device = run->program->device;
    ONT_TRY(ont_device_enter(device, scope));
    ont_status status = ont_device_check_fault(run->program); /* faults recorded since the last check */
    if (status == ONT_OK && device && device->ops->capturing && device->ops->capturing(device, scope->stream))
        status = ont_fail(ONT_EUNSUPPORTED,
                          "the caller captures this stream into a graph, whose replays would repeat one random key: "
                          "do not capture it, since the engine captures its own graphs");
    if (device && status == ONT_OK && run->used && run->stream != scope->stream)
        status = device->ops->join(device, scope->stream, run->stream);
    run->stream = scope->stream;
    run->used = true;
    uint64_t words[] = {run->random.key, run->random.seed, run->random.block};
    if (device && status == ONT_OK) status = device->ops->store(device, seed_at(run), words, 3, run->stream);
    if (status != ONT_OK) ont_device_leave(device, scope);
    return status;
}

ont_status ont_run_forward(ont_program *p, ont_pool *pool, const ont_tensor_view *inputs, const ont_random *random,
                           ont_block **outputs, ont_run **result)
{
    ONT_ASSERT(p->split <= p->n_steps);
    ONT_ASSERT(p->grads.n_forward_inputs <= p->graph->n_inputs);
    ont_run *run = NULL;
    ont_scope scope;
    void **data = ont_calloc(p->graph->n_inputs + 1, sizeof *data);
    if (!data) return ONT_ENOMEM;
    ont_status status = run_take(p, pool, random, &run);
    if (status != ONT_OK) goto done;
    ONT_TRYGOTO(status, fail_run, enter(run, &scope));
    for (uint32_t i = 0; i < p->grads.n_forward_inputs; i++)
        ONT_TRYGOTO(status, fail, make_contiguous(run, &inputs[i], &data[i]));
    ONT_TRYGOTO(status, fail, alloc_outputs(run, 0, p->grads.n_forward_outputs, false));
    ONT_TRYGOTO(status, fail, alloc_outputs(run, p->grads.n_forward_outputs, p->graph->n_outputs, true));
    set_bound_pointers(run, data);
    ONT_TRYGOTO(status, fail, execute(run, data, 0, p->split));
    ONT_TRYGOTO(status, fail, copy_outputs(run, 0, p->grads.n_forward_outputs));
    if (p->device && p->device->ops->waits) ONT_TRYGOTO(status, fail, ont_device_check_fault(p));
    for (uint32_t i = 0; i < p->grads.n_forward_outputs; i++) {
        outputs[i] = run->outputs[i];
        run->outputs[i] = p->differentiable && p->saved_outputs[i] ? ont_block_ref(outputs[i]) : NULL;
    }
    for (uint32_t i = 0; i < run->n_copies; i++) ont_block_unref(run->copies[i]);
    run->n_copies = 0; /* the caller passes the inputs of backward again */
    if (p->differentiable) {
        *result = run;
        ont_device_leave(p->device, &scope);
        goto done;
    }
    *result = NULL;
fail:
    ont_device_leave(p->device, &scope);
fail_run:
    ont_run_release(run);
done:
    ont_free(data);
    return status;
}

/* Row-major memory of the gradient of a forward output; zeros if there is none. */
static ont_status bind_gradient(ont_run *run, const ont_value *input, const ont_tensor_view *view, void **data)
{
    if (view->rank < 0) {
        ont_block *block;
        ONT_TRY(ont_pool_take(run->pool, input->dtype, &input->shape, &block));
        run->copies[run->n_copies++] = block;
        *data = block->data;
        return ont_device_clear(run->program->device, block->data, block->bytes, run->stream);
    }
    ont_shape shape = ont_shape_of(view->rank <= ONT_MAX_RANK ? view->rank : 0, view->dims);
    if (view->dtype != input->dtype || view->rank > ONT_MAX_RANK || !ont_shape_equal(&shape, &input->shape)) {
        char got[ONT_SHAPE_TEXT], expected[ONT_SHAPE_TEXT];
        return ont_fail(ONT_EINVAL, "'%s': gradient is %s%s, expected %s%s", input->name, ont_dtype_name(view->dtype),
                        ont_shape_text(&shape, got), ont_dtype_name(input->dtype),
                        ont_shape_text(&input->shape, expected));
    }
    return make_contiguous(run, view, data);
}

static ont_status bind_backward(ont_run *run, const ont_tensor_view *inputs, const ont_tensor_view *outputs,
                                const ont_tensor_view *grads, void **data)
{
    const ont_program *p = run->program;
    for (uint32_t i = 0; i < p->grads.n_forward_inputs; i++)
        if (p->saved_inputs[i]) ONT_TRY(make_contiguous(run, &inputs[i], &data[i]));
    for (uint32_t i = 0; i < p->grads.n_forward_outputs; i++) {
        int32_t input = p->grads.grad_input[i];
        if (input >= 0) ONT_TRY(bind_gradient(run, p->graph->inputs[input], &grads[i], &data[input]));
    }
    ONT_TRY(alloc_outputs(run, p->grads.n_forward_outputs, p->graph->n_outputs, false));
    set_bound_pointers(run, data);
    /* the run holds their blocks; the caller checks by autograd's version counters that they are unchanged */
    (void)outputs;
    return ONT_OK;
}

/* Returns the gradients of graph inputs, each a reference for the caller. */
static void return_gradients(ont_run *run, ont_block **in_grads)
{
    const ont_program *p = run->program;
    for (uint32_t i = 0; i < p->grads.n_forward_inputs; i++) {
        int32_t output = p->grads.grad_output[i];
        in_grads[i] = output < 0 ? NULL : run->outputs[output];
        if (output >= 0) run->outputs[output] = NULL;
    }
}

ont_status ont_run_backward(ont_run *run, const ont_tensor_view *inputs, const ont_tensor_view *outputs,
                            const ont_tensor_view *grads, const ont_grad_callback *callback, ont_block **in_grads)
{
    ONT_ASSERT(run && run->program->differentiable);
    ONT_ASSERT(in_grads);
    const ont_program *p = run->program;
    ont_scope scope;
    void **data = ont_calloc(p->graph->n_inputs + 1, sizeof *data);
    ont_status status = data ? enter(run, &scope) : ONT_ENOMEM;
    if (status != ONT_OK) goto done;
    status = p->n_deliveries && !callback
                 ? ont_fail(ONT_EINVAL, "the program passes gradients to a callback, but none is given")
                 : ONT_OK;
    run->callback = callback;
    run->n_delivered = 0;
    run->mode = ont_float_mode();
    if (status == ONT_OK) status = bind_backward(run, inputs, outputs, grads, data);
    if (status == ONT_OK) status = execute(run, data, p->split, p->n_steps);
    if (status == ONT_OK) status = copy_outputs(run, p->grads.n_forward_outputs, p->graph->n_outputs);
    if (status == ONT_OK && has_delivery_due(run, p->n_steps)) {
        observer o = observe(run, p->n_steps, p->n_steps);
        status = deliver_observed(&o, run, p->n_steps);
        observe_end(&o);
    }
    run->callback = NULL;
    if (status == ONT_OK && p->device && p->device->ops->waits) status = ont_device_check_fault(p);
    if (status == ONT_OK) return_gradients(run, in_grads);
    ont_device_leave(p->device, &scope);
done:
    ont_run_release(run);
    ont_free(data);
    return status;
}
