/*
 * A program: one graph specialised to concrete shapes and to the set of inputs that need gradients, differentiated,
 * planned and bound to kernels. Built in milliseconds, then immutable; runs hold the mutable state.
 */
#ifndef ONT_RUN_PROGRAM_H
#define ONT_RUN_PROGRAM_H

#include <pthread.h>

#include "device/device.h"
#include "passes/pass.h"
#include "plan/plan.h"
#include "run/pool.h"
#include "run/tuner.h"

/* A borrowed tensor, as DLPack describes it. */
typedef struct ont_tensor_view {
    ont_dtype dtype;
    int32_t rank;
    const int64_t *dims;
    const int64_t *strides; /* in elements; NULL: row-major */
    void *data;
} ont_tensor_view;

/* A kernel with what its prepare() returned. */
typedef struct ont_bound_kernel {
    const ont_kernel *kernel;
    void *state;
} ont_bound_kernel;

typedef struct ont_step {
    const ont_node *node;
    ont_bound_kernel *kernels;
    uint32_t n_kernels; /* more than one: `tuner` says before each run which one it uses */
    ont_tuner *tuner;
    bool is_short; /* the kernels' turns are taken at once */
    uint32_t *in, *out; /* value ids; ONT_STEP_ABSENT: absent */
    size_t work_offset, work_bytes;
} ont_step;

enum { ONT_STEP_ABSENT = UINT32_MAX };

/* The kernel that the next run uses. */
static inline const ont_kernel *ont_step_kernel(const ont_step *step)
{
    return step->kernels[step->tuner ? ont_tuner_next(step->tuner) : 0].kernel;
}

/*
 * Per input: no gradient; its gradient as a block; or its gradient passed to the callback of ont_run_backward() as soon
 * as it is final and no later step reads the input, which the callback may then overwrite (an optimizer in backward).
 */
enum { ONT_WANT_NOTHING, ONT_WANT_GRADIENT, ONT_WANT_CALLBACK };

/*
 * The gradient of graph input `input`, in value `value`, goes to the callback before step `before`, or after the last
 * step.
 */
typedef struct ont_grad_delivery {
    uint32_t before, input, value;
} ont_grad_delivery;

/* Per phase, on a device that captures graphs: number of captures and launches, and why the last call ran eagerly. */
typedef struct ont_phase_stats {
    uint64_t captured, launched;
    char reason[160]; /* empty: it ran as a graph */
} ont_phase_stats;

typedef struct ont_program {
    ont_graph *graph;
    const ont_device *device; /* NULL: the CPU */
    ont_memory constants;     /* device copy of the constants; the CPU reads those in the graph */
    size_t constant_bytes;
    void **constant_addresses;
    ont_fault *fault;
    ont_arena arena;
    ont_gradients grads;
    ont_plan plan;
    ont_step *steps;
    uint32_t n_steps, split;
    uint32_t max_in, max_out;      /* the largest number of inputs and outputs of a step */
    bool differentiable;           /* there is a backward phase */
    double (*times)[2];            /* per step: begin and end in seconds of the latest timed run */
    uint8_t *saved_inputs;         /* per forward input: whether backward reads it */
    uint8_t *saved_outputs;        /* per forward output: whether backward reads its block */
    ont_grad_delivery *deliveries; /* in order of `before` */
    uint32_t n_deliveries;
    int32_t *result_counts;         /* per output of the loaded graph, see ont_pass_flatten(); NULL: all are tensors */
    uint32_t n_results;
    bool probe;        /* a value probe: computes values that the real program is specialised to */
    ont_tensor *known; /* values that it is specialised to */
    uint32_t n_known;
    double build_seconds;
    size_t budget_bytes; /* that the slab should stay within; 0: no budget */
    /* Shared: the cache holds one reference, every run one. `idle` are finished runs, kept for reuse. */
    int refs;
    pthread_mutex_t lock;
    struct ont_run *idle;
    uint32_t n_idle;
    ont_phase_stats phase_stats[2];
} ont_program;

/* What a program is specialised to. */
typedef struct ont_program_request {
    const ont_tensor_view *inputs; /* one for each graph input; their data are not read */
    const uint8_t *wants;          /* per input: ONT_WANT_NOTHING and so on; NULL: no gradients */
    const ont_tensor *known;       /* values that the shapes depend on */
    uint32_t n_known;
    const ont_device *device; /* NULL: the CPU */
    size_t memory_limit;      /* live bytes that recomputation aims at; 0: none */
} ont_program_request;

/*
 * Clones `loaded`, whose constants it shares: `loaded` must outlive the program. If shapes depend on values that
 * `known` lacks, the program is a value probe, whose outputs are the next required values.
 */
ont_status ont_program_build(const ont_graph *loaded, const ont_program_request *request,
                             ont_program **program) ONT_MUST_USE;
/*
 * The graph of a program at an earlier stage: specialised and folded and, if `differentiated`, with its backward,
 * before later passes. For save_onnx; built again and owned by the caller.
 */
ont_status ont_program_stage(const ont_program *program, const ont_graph *loaded, bool differentiated,
                             ont_graph **graph) ONT_MUST_USE;
ont_program *ont_program_ref(ont_program *program);
void ont_program_unref(ont_program *program);

#endif
