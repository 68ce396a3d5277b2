/*
 * A program: one graph specialised to concrete shapes and to a set of inputs that want gradients, differentiated,
 * planned and bound to kernels. Built in milliseconds, immutable afterwards; runs carry what changes.
 */
#ifndef ONT_RUN_PROGRAM_H
#define ONT_RUN_PROGRAM_H

#include <pthread.h>

#include "device/device.h"
#include "passes/pass.h"
#include "plan/plan.h"
#include "run/pool.h"

/* A tensor that somebody else owns, as DLPack describes it. */
typedef struct ont_tensor_view {
    ont_dtype dtype;
    int32_t rank;
    const int64_t *dims;
    const int64_t *strides; /* in elements; NULL: row-major */
    void *data;
} ont_tensor_view;

typedef struct ont_step {
    const ont_kernel *kernel;
    const ont_node *node;
    void *state;
    uint32_t *in, *out; /* value ids; ONT_STEP_ABSENT where left out */
    size_t work_offset, work_bytes;
} ont_step;

enum { ONT_STEP_ABSENT = UINT32_MAX };

/*
 * What is asked of an input: nothing, its gradient as a block, or that its gradient is handed to whoever takes it (see
 * ont_sink in run.h) as soon as it is final and no later step reads the input, which may be overwritten then.
 */
enum { ONT_WANT_NOTHING, ONT_WANT_GRADIENT, ONT_WANT_CALLBACK };

/* A gradient that is handed over: before step `before`, or behind the last one. */
typedef struct ont_grad_delivery {
    uint32_t before, input, value;
} ont_grad_delivery;

/* How a phase has run on a device that records: how often as one graph, and why not the last time. */
typedef struct ont_phase_note {
    uint64_t captured, launched;
    char reason[160]; /* empty: as a graph */
} ont_phase_note;

typedef struct ont_program {
    ont_graph *graph;
    const ont_device *device;       /* NULL: the CPU */
    ont_memory constants;           /* on the device, and where each of them is; the CPU reads the graph's own */
    size_t constant_bytes;
    void **constant_addresses;
    ont_fault *fault;
    ont_arena arena;
    ont_gradients grads;
    ont_plan plan;
    ont_step *steps;
    uint32_t n_steps, split;
    uint32_t max_in, max_out;       /* widest step */
    bool differentiable;            /* backward has something to do */
    double (*times)[2];             /* per step: when it began and ended in the latest timed run, in seconds */
    uint8_t *saved_inputs;          /* per forward input: backward reads it */
    uint8_t *saved_outputs;         /* per forward output: backward reads its block */
    ont_grad_delivery *deliveries;             /* in their order */
    uint32_t n_deliveries;
    int32_t *result_counts;         /* per output of the loaded graph, see ont_pass_flatten(); NULL: all are tensors */
    uint32_t n_results;
    bool probe;                     /* computes what must be known before the real program can be built */
    ont_tensor *known;              /* contents that it was built for */
    uint32_t n_known;
    double build_seconds;
    uint64_t last_used;
    /* shared: the cache holds one reference, every run one; runs that ended are kept for the next */
    int refs;
    pthread_mutex_t lock;
    struct ont_run *idle;
    uint32_t n_idle;
    ont_phase_note notes[2];
} ont_program;

/*
 * Takes its own copy of `loaded`, whose constants' contents it shares: `loaded` must outlive it. Where shapes depend on
 * contents that `facts` do not hold, the program is a probe: its outputs are the facts that come next.
 */
ont_status ont_program_build(const ont_graph *loaded, const ont_tensor_view *inputs, const uint8_t *wants,
                             const ont_tensor *known, uint32_t n_known, const ont_device *device,
                             ont_program **program) ONT_MUST_USE;
/*
 * What the graph of a program was on the way: specialised and folded, and, where asked for, differentiated, before the
 * passes that follow. For save_onnx; built anew, the caller's to destroy.
 */
ont_status ont_program_stage(const ont_program *program, const ont_graph *loaded, bool differentiated,
                             ont_graph **graph) ONT_MUST_USE;
ont_program *ont_program_ref(ont_program *program);
void ont_program_unref(ont_program *program);

#endif
