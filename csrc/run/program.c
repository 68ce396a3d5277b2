/*
 * Builds a program: specialise, infer and fold, differentiate, optimise, bind kernels, plan memory.
 */
#include "run/program.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "passes/cost.h"
#include "passes/pipeline.h"
#include "run/device_memory.h"
#include "run/run.h"
#include "run/schedule.h"

/* Sets the shape of one input to that of the call, checked against the declaration; each symbol has one size. */
static ont_status specialise_input(ont_value *input, const ont_tensor_view *view, int64_t *sizes, const ont_graph *g)
{
    if (view->dtype != ont_dtype_carrier(input->dtype))
        return ont_fail(ONT_ETYPE, "input '%s': dtype is %s, the graph has %s", input->name,
                        ont_dtype_name(view->dtype), ont_dtype_name(input->dtype));
    if (view->rank > ONT_MAX_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "input '%s': rank %d, at most %d", input->name, view->rank, ONT_MAX_RANK);
    ont_shape shape = ont_shape_of(view->rank, view->dims);
    char text[ONT_SHAPE_TEXT], declared[ONT_SHAPE_TEXT];
    if (input->has_shape && input->shape.rank != shape.rank)
        return ont_fail(ONT_EINVAL, "input '%s': shape is %s, the graph has %s", input->name,
                        ont_shape_text(&shape, text), ont_shape_text(&input->shape, declared));
    for (int i = 0; input->has_shape && i < shape.rank; i++) {
        int64_t dim = input->shape.dims[i];
        if (dim >= 0 && dim != shape.dims[i])
            return ont_fail(ONT_EINVAL, "input '%s': shape is %s, the graph has %s", input->name,
                            ont_shape_text(&shape, text), ont_shape_text(&input->shape, declared));
        if (dim >= 0 || dim == ONT_DIM_UNKNOWN) continue;
        int64_t *size = &sizes[ONT_DIM_SYMBOL_INDEX(dim)];
        if (*size >= 0 && *size != shape.dims[i])
            return ont_fail(ONT_EINVAL, "input '%s': dim %d is %" PRId64 ", but '%s' is %" PRId64 " elsewhere",
                            input->name, i, shape.dims[i], g->symbols[ONT_DIM_SYMBOL_INDEX(dim)], *size);
        *size = shape.dims[i];
    }
    input->has_shape = true;
    input->shape = shape;
    return ONT_OK;
}

static ont_status specialise(ont_graph *g, const ont_tensor_view *inputs)
{
    int64_t *sizes = ont_arena_array(&g->arena, g->n_symbols + 1, sizeof *sizes);
    if (!sizes) return ONT_ENOMEM;
    for (uint32_t i = 0; i < g->n_symbols; i++) sizes[i] = -1;
    for (uint32_t i = 0; i < g->n_inputs; i++) ONT_TRY(specialise_input(g->inputs[i], &inputs[i], sizes, g));
    for (uint32_t i = 0; i < g->n_values; i++) /* types that the model declares for inner values are inferred again */
        if (g->values[i]->kind == ONT_VALUE_NODE) {
            g->values[i]->has_shape = false;
            g->values[i]->dtype = ONT_UNDEFINED;
        }
    return ONT_OK;
}

static const double SHORT_STEP = 1e9; /* operations: a few milliseconds on two threads */

/* Prepares the kernels among which the first runs decide; one, where that is known. */
static ont_status bind_kernels(ont_program *p, ont_step *step, ont_plan_step *plan_step)
{
    const ont_node *node = step->node;
    const ont_kernel *rivals[ONT_MAX_RIVALS], **kernels = rivals;
    ONT_TRY(ont_op_choose(node, p->device, true, &rivals[0]));
    uint32_t n = ont_op_rivals(node, p->device, rivals[0], rivals, ONT_MAX_RIVALS);
    if (n > 1) step->tuner = ont_tuner_find(node, rivals, n);
    int winner = step->tuner ? ont_tuner_winner(step->tuner) : 0;
    if (winner >= 0) kernels += winner, n = 1, step->tuner = NULL;
    ONT_ASSERT((n > 1) == (step->tuner != NULL));
    step->is_short = ont_node_cost(node) <= SHORT_STEP;
    step->kernels = ont_arena_array(&p->arena, n, sizeof *step->kernels);
    if (!step->kernels) return ONT_ENOMEM;
    *plan_step = (ont_plan_step){.node = node};
    for (; step->n_kernels < n; step->n_kernels++) {
        const ont_kernel *kernel = kernels[step->n_kernels];
        ont_prepared prepared = {0};
        if (kernel->prepare)
            ONT_TRY(ont_context(kernel->prepare(node, &p->arena, &prepared), "%s '%s'", node->op_type, node->name));
        step->kernels[step->n_kernels] = (ont_bound_kernel){kernel, prepared.state};
        ONT_ASSERT(n == 1 || !kernel->inplace);
        plan_step->inplace = kernel->inplace;
        if (prepared.work_bytes > plan_step->work_bytes) plan_step->work_bytes = prepared.work_bytes;
    }
    return ONT_OK;
}

static ont_status bind_step(ont_program *p, const ont_node *node, ont_step *step, ont_plan_step *plan_step)
{
    step->node = node;
    step->in = ont_arena_array(&p->arena, node->n_inputs + 1, sizeof *step->in);
    step->out = ont_arena_array(&p->arena, node->n_outputs + 1, sizeof *step->out);
    if (!step->in || !step->out) return ONT_ENOMEM;
    for (uint32_t i = 0; i < node->n_inputs; i++)
        step->in[i] = node->inputs[i].value ? node->inputs[i].value->id : ONT_STEP_ABSENT;
    for (uint32_t i = 0; i < node->n_outputs; i++)
        step->out[i] = node->outputs[i] ? node->outputs[i]->id : ONT_STEP_ABSENT;
    if (node->n_inputs > p->max_in) p->max_in = node->n_inputs;
    if (node->n_outputs > p->max_out) p->max_out = node->n_outputs;
    return bind_kernels(p, step, plan_step);
}

static ont_status bind_steps(ont_program *p, ont_plan_step **plan_steps)
{
    uint32_t n = 0;
    for (const ont_node *node = p->graph->first; node; node = node->next) n += !ont_node_is_view(node);
    p->steps = ont_arena_array(&p->arena, n + 1, sizeof *p->steps);
    *plan_steps = ont_arena_array(&p->arena, n + 1, sizeof **plan_steps);
    p->times = ont_arena_array(&p->arena, n + 1, sizeof *p->times);
    if (!p->steps || !*plan_steps || !p->times) return ONT_ENOMEM;
    for (const ont_node *node = p->graph->first; node; node = node->next) {
        if (ont_node_is_view(node)) continue;
        if (!node->backward) p->split = p->n_steps + 1;
        uint32_t t = p->n_steps++; /* first: a kernel may be bound when a later one fails */
        ONT_TRY(bind_step(p, node, &p->steps[t], &(*plan_steps)[t]));
    }
    return ONT_OK;
}

static void mark_saved_value(ont_program *p, uint32_t id)
{
    const ont_location *location = &p->plan.locations[id];
    if (location->kind == ONT_LOCATION_INPUT && location->index < p->grads.n_forward_inputs)
        p->saved_inputs[location->index] = 1;
    if (location->kind == ONT_LOCATION_OUTPUT && location->index < p->grads.n_forward_outputs)
        p->saved_outputs[location->index] = 1;
}

/* Marks the inputs and outputs that backward reads, which the caller must keep unchanged. */
static ont_status mark_saved(ont_program *p)
{
    p->saved_inputs = ont_arena_array(&p->arena, p->grads.n_forward_inputs + 1, 1);
    p->saved_outputs = ont_arena_array(&p->arena, p->grads.n_forward_outputs + 1, 1);
    if (!p->saved_inputs || !p->saved_outputs) return ONT_ENOMEM;
    for (uint32_t t = p->split; t < p->n_steps; t++)
        for (uint32_t i = 0; i < p->steps[t].node->n_inputs; i++)
            if (p->steps[t].in[i] != ONT_STEP_ABSENT) mark_saved_value(p, p->steps[t].in[i]);
    for (uint32_t i = p->grads.n_forward_outputs; i < p->graph->n_outputs; i++)
        if (p->plan.copied_outputs[i]) mark_saved_value(p, p->graph->outputs[i]->id);
    return ONT_OK;
}

static ont_status differentiate(ont_program *p, const uint8_t *wants)
{
    bool any = false;
    for (uint32_t i = 0; wants && i < p->graph->n_inputs; i++) any |= wants[i] != ONT_WANT_NOTHING;
    if (any) {
        ONT_TRY(ont_pass_grad(p->graph, wants, &p->grads));
        p->differentiable = p->graph->n_outputs > p->grads.n_forward_outputs;
        return ONT_OK;
    }
    p->grads.n_forward_inputs = p->graph->n_inputs;
    p->grads.n_forward_outputs = p->graph->n_outputs;
    return ONT_OK;
}

/* Turns the graph inferred so far into a value probe, whose outputs are the required values. */
static ont_status become_probe(ont_program *p, const ont_known_values *known)
{
    p->probe = true;
    ONT_TRY(ont_graph_set_outputs(p->graph, known->required, known->n_required));
    return ont_pass_dce(p->graph);
}

/* Replaces outputs that are sequences or optionals by their elements; py/session.c regroups them. */
static ont_status flatten_results(ont_program *p)
{
    bool any = false;
    uint32_t n = p->graph->n_outputs;
    for (uint32_t i = 0; i < n; i++) any |= p->graph->outputs[i]->container != ONT_TENSOR;
    if (!any) return ONT_OK;
    p->n_results = n;
    p->result_counts = ont_arena_array(&p->arena, n, sizeof *p->result_counts);
    if (!p->result_counts) return ONT_ENOMEM;
    return ont_pass_flatten(p->graph, p->result_counts);
}

/* Per graph output: the input whose gradient it delivers to the callback; all NULL, or NULL, if there is none. */
static ont_status find_delivered(ont_program *p, const uint8_t *wants, const ont_value ***delivered)
{
    *delivered = NULL;
    for (uint32_t i = 0; wants && p->differentiable && i < p->grads.n_forward_inputs; i++) {
        if (wants[i] != ONT_WANT_CALLBACK || p->grads.grad_output[i] < 0) continue;
        if (!*delivered) *delivered = ont_arena_array(&p->arena, p->graph->n_outputs + 1, sizeof **delivered);
        if (!*delivered) return ONT_ENOMEM;
        (*delivered)[p->grads.grad_output[i]] = p->graph->inputs[i];
    }
    return ONT_OK;
}

/* Lists the deliveries in the order of steps; those before the same step in the order of the inputs. */
static ont_status order_deliveries(ont_program *p, const ont_value *const *delivered)
{
    if (!delivered) return ONT_OK;
    p->deliveries = ont_arena_array(&p->arena, p->grads.n_forward_inputs + 1, sizeof *p->deliveries);
    if (!p->deliveries) return ONT_ENOMEM;
    for (uint32_t i = 0; i < p->grads.n_forward_inputs; i++) {
        int32_t output = p->grads.grad_output[i];
        if (output < 0 || p->plan.deliver_before[output] == ONT_PLAN_BLOCK) continue;
        ont_grad_delivery a = {p->plan.deliver_before[output], i, p->graph->outputs[output]->id};
        uint32_t at = p->n_deliveries++;
        for (; at && p->deliveries[at - 1].before > a.before; at--) p->deliveries[at] = p->deliveries[at - 1];
        p->deliveries[at] = a;
    }
    return ONT_OK;
}

/* From the graph as loaded to steps with their kernels. The device is current, which its kernels need to accept. */
static ont_status build_steps(ont_program *p, const ont_program_request *request, ont_plan_step **plan_steps)
{
    ont_known_values known = {.tensors = request->known, .n = request->n_known};
    ONT_TRY(specialise(p->graph, request->inputs));
    ONT_TRY(ont_passes_before_grad(p->graph, &known));
    ONT_TRY(known.n_required ? become_probe(p, &known) : flatten_results(p));
    ONT_TRY(differentiate(p, p->probe ? NULL : request->wants));
    ONT_TRY(ont_passes_after_grad(p->graph));
    return bind_steps(p, plan_steps);
}

static ont_status build(ont_program *p, const ont_graph *loaded, const ont_program_request *request)
{
    ont_plan_step *plan_steps;
    const ont_value **delivered;
    ont_scope scope;
    ONT_TRY(ont_graph_clone(loaded, &p->graph));
    p->graph->device = p->device;
    p->graph->torch_random = loaded->torch_random;
    p->graph->recompute.limit = request->memory_limit;
    ONT_TRY(ont_device_enter(p->device, &scope));
    ont_status built = build_steps(p, request, &plan_steps);
    ont_device_leave(p->device, &scope);
    ONT_TRY(built);
    ONT_TRY(find_delivered(p, p->probe ? NULL : request->wants, &delivered));
    ONT_TRY(ont_program_schedule(p, plan_steps, delivered));
    ONT_TRY(order_deliveries(p, delivered));
    for (uint32_t t = 0; t < p->n_steps; t++) {
        p->steps[t].work_offset = p->plan.work_offsets[t];
        p->steps[t].work_bytes = plan_steps[t].work_bytes;
    }
    ONT_TRY(mark_saved(p));
    return ont_device_upload_constants(p);
}

static ont_status keep_known_values(ont_program *p, const ont_tensor *known, uint32_t n)
{
    p->known = ont_arena_array(&p->arena, n + 1, sizeof *p->known);
    if (!p->known) return ONT_ENOMEM;
    for (; p->n_known < n; p->n_known++) {
        const ont_tensor *value = &known[p->n_known];
        void *copy = ont_arena_alloc(&p->arena, value->bytes + 1);
        if (!copy) return ONT_ENOMEM;
        if (value->bytes) memcpy(copy, value->data, value->bytes);
        p->known[p->n_known] = *value;
        p->known[p->n_known].data = copy;
    }
    return ONT_OK;
}

ont_status ont_program_build(const ont_graph *loaded, const ont_program_request *request, ont_program **program)
{
    double start = ont_seconds();
    ont_program *p = ont_calloc(1, sizeof *p);
    if (!p) return ONT_ENOMEM;
    ont_arena_init(&p->arena);
    pthread_mutex_init(&p->lock, NULL);
    p->refs = 1;
    p->device = request->device;
    ont_status status = build(p, loaded, request);
    if (status == ONT_OK) status = keep_known_values(p, request->known, request->n_known);
    if (status != ONT_OK) {
        ont_program_unref(p);
        return status;
    }
    p->build_seconds = ont_seconds() - start;
    ont_log(ONT_LOG_INFO,
            "built a %s of %u kernels (%u in forward): activations need %.1f MiB (the least is %.1f), %.1f ms",
            p->probe ? "probe" : "program", p->n_steps, p->split, (double)p->plan.slab_bytes / 0x1p20,
            (double)p->plan.lower_bound / 0x1p20, p->build_seconds * 1e3);
    *program = p;
    return ONT_OK;
}

/* The input shapes of a program as views without data. */
static void views_of(const ont_program *p, ont_tensor_view *views, uint8_t *wants)
{
    for (uint32_t i = 0; i < p->grads.n_forward_inputs; i++) {
        const ont_value *v = p->graph->inputs[i];
        views[i] = (ont_tensor_view){.dtype = v->dtype, .rank = v->shape.rank, .dims = v->shape.dims};
        wants[i] = p->differentiable && p->grads.grad_output[i] >= 0;
    }
}

/* As in build_steps(). */
static ont_status build_stage(ont_program *scratch, const ont_program_request *request, bool differentiated)
{
    ont_known_values known = {.tensors = request->known, .n = request->n_known};
    ONT_TRY(specialise(scratch->graph, request->inputs));
    ONT_TRY(ont_passes_before_grad(scratch->graph, &known));
    return differentiated && !known.n_required ? differentiate(scratch, request->wants) : ONT_OK;
}

ont_status ont_program_stage(const ont_program *p, const ont_graph *loaded, bool differentiated, ont_graph **graph)
{
    ont_program scratch = {0};
    ont_scope scope;
    ont_status status = ONT_ENOMEM;
    ont_tensor_view *views = ont_calloc(p->grads.n_forward_inputs + 1, sizeof *views);
    uint8_t *wants = ont_calloc(p->grads.n_forward_inputs + 1, 1);
    if (!views || !wants) goto done;
    views_of(p, views, wants);
    ONT_TRYGOTO(status, done, ont_graph_clone(loaded, &scratch.graph));
    scratch.graph->device = p->device;
    scratch.graph->torch_random = loaded->torch_random;
    ONT_TRYGOTO(status, done, ont_device_enter(p->device, &scope));
    ont_program_request request = {.inputs = views, .wants = wants, .known = p->known, .n_known = p->n_known};
    status = build_stage(&scratch, &request, differentiated);
    ont_device_leave(p->device, &scope);
    if (status != ONT_OK) goto done;
    *graph = scratch.graph;
    scratch.graph = NULL;
done:
    ont_graph_destroy(scratch.graph);
    ont_free(wants);
    ont_free(views);
    return status;
}

ont_program *ont_program_ref(ont_program *program)
{
    ONT_ASSERT(program->refs > 0);
    __atomic_fetch_add(&program->refs, 1, __ATOMIC_RELAXED);
    return program;
}

static void release_kernels(const ont_step *step)
{
    for (uint32_t i = 0; i < step->n_kernels; i++) {
        const ont_bound_kernel *bound = &step->kernels[i];
        if (bound->state && bound->kernel->release) bound->kernel->release(bound->state);
    }
}

void ont_program_unref(ont_program *p)
{
    if (!p || __atomic_sub_fetch(&p->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    ont_run_free_idle(p);
    for (uint32_t t = 0; p->steps && t < p->n_steps; t++) release_kernels(&p->steps[t]);
    ont_device_free(p->device, &p->constants, p->constant_bytes);
    if (p->fault) p->device->ops->free_shared(p->device, p->fault);
    ont_graph_destroy(p->graph);
    ont_arena_deinit(&p->arena);
    pthread_mutex_destroy(&p->lock);
    ont_free(p);
}
