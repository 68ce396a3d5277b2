/*
 * Building a graph of cuDNN (dnn_graph.h) descriptor by descriptor, for sdpa.c and conv_graph.c. The first error is
 * kept: later calls do nothing, and ont_dnn_configs() returns none.
 */
#ifndef ONT_CUDA_DNN_BUILD_H
#define ONT_CUDA_DNN_BUILD_H

#include <math.h>
#include <string.h>

#include "libs/dnn_graph.h"

enum { ONT_DNN_DESCRIPTORS = 192, ONT_DNN_OPS = 32, ONT_DNN_CONFIGS = 32, ONT_DNN_NOTES = 32,
       ONT_DNN_TOO_MANY = -1 }; /* an error of our own */

typedef struct ont_dnn_owned { /* descriptors in order of creation */
    void *all[ONT_DNN_DESCRIPTORS];
    int n;
} ont_dnn_owned;

typedef struct ont_dnn_build {
    const ont_dnn_graph *dnn;
    void *handle;
    ont_dnn_owned *owned;
    void *ops[ONT_DNN_OPS];
    int64_t n_ops;
    int error;            /* the first one */
    int64_t limit;        /* bytes of a workspace */
    bool is_large;        /* a kernel was left out because of its workspace */
} ont_dnn_build;

typedef struct ont_dnn_tensor {
    void *descriptor;
    int64_t dims[4], strides[4];
} ont_dnn_tensor;

/* ---- descriptors ---- */

static inline void *ont_dnn_make(ont_dnn_build *b, int type)
{
    void *descriptor = NULL;
    if (!b->error) b->error = b->owned->n < ONT_DNN_DESCRIPTORS ? b->dnn->create(type, &descriptor) : ONT_DNN_TOO_MANY;
    if (b->error) return NULL;
    return b->owned->all[b->owned->n++] = descriptor;
}

static inline void ont_dnn_release(const ont_dnn_graph *dnn, ont_dnn_owned *owned)
{
    while (owned->n) dnn->destroy(owned->all[--owned->n]);
}

static inline void ont_dnn_set(ont_dnn_build *b, void *descriptor, int name, int type, int64_t n, const void *values)
{
    if (!b->error) b->error = b->dnn->set(descriptor, name, type, n, values);
}

static inline void ont_dnn_set_int(ont_dnn_build *b, void *descriptor, int name, int type, int value)
{
    ont_dnn_set(b, descriptor, name, type, 1, &value); /* the library's enumerations have the size of int */
}

static inline void ont_dnn_set_descriptor(ont_dnn_build *b, void *descriptor, int name, void *value)
{
    ont_dnn_set(b, descriptor, name, DNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static inline void ont_dnn_finish(ont_dnn_build *b, void *descriptor)
{
    if (!b->error) b->error = b->dnn->finalize(descriptor);
}

static inline void ont_dnn_finish_op(ont_dnn_build *b, void *op)
{
    ont_dnn_finish(b, op);
    if (b->n_ops < ONT_DNN_OPS) b->ops[b->n_ops++] = op;
    else b->error = ONT_DNN_TOO_MANY;
}

/* Operands begin at multiples of 16 bytes. A virtual tensor is in no memory, one by value in that of the host. */
static inline ont_dnn_tensor ont_dnn_tensor_of(ont_dnn_build *b, int64_t uid, int type, const int64_t dims[4],
                                               const int64_t strides[4], bool is_virtual, bool by_value)
{
    ont_dnn_tensor t = {ont_dnn_make(b, DNN_BACKEND_TENSOR_DESCRIPTOR), {0}, {0}};
    const int64_t alignment = 16;
    memcpy(t.dims, dims, sizeof t.dims);
    memcpy(t.strides, strides, sizeof t.strides);
    ont_dnn_set(b, t.descriptor, DNN_ATTR_TENSOR_UNIQUE_ID, DNN_TYPE_INT64, 1, &uid);
    ont_dnn_set_int(b, t.descriptor, DNN_ATTR_TENSOR_DATA_TYPE, DNN_TYPE_DATA_TYPE, type);
    ont_dnn_set(b, t.descriptor, DNN_ATTR_TENSOR_DIMENSIONS, DNN_TYPE_INT64, 4, dims);
    ont_dnn_set(b, t.descriptor, DNN_ATTR_TENSOR_STRIDES, DNN_TYPE_INT64, 4, strides);
    ont_dnn_set(b, t.descriptor, DNN_ATTR_TENSOR_BYTE_ALIGNMENT, DNN_TYPE_INT64, 1, &alignment);
    ont_dnn_set(b, t.descriptor, DNN_ATTR_TENSOR_IS_VIRTUAL, DNN_TYPE_BOOLEAN, 1, &is_virtual);
    ont_dnn_set(b, t.descriptor, DNN_ATTR_TENSOR_IS_BY_VALUE, DNN_TYPE_BOOLEAN, 1, &by_value);
    ont_dnn_finish(b, t.descriptor);
    return t;
}

/* second and third: NULL where the mode has fewer operands; axis: of an index. A Relu keeps NaN and infinity. */
static inline void ont_dnn_pointwise(ont_dnn_build *b, int mode, const ont_dnn_tensor *x, const ont_dnn_tensor *second,
                                     const ont_dnn_tensor *third, const ont_dnn_tensor *y, int64_t axis)
{
    const float one = 1;
    const int keep = DNN_PROPAGATE_NAN;
    const float infinity = INFINITY;
    int compute = mode == DNN_POINTWISE_CMP_GE ? DNN_DATA_BOOLEAN : DNN_DATA_FLOAT;
    void *how = ont_dnn_make(b, DNN_BACKEND_POINTWISE_DESCRIPTOR);
    ont_dnn_set_int(b, how, DNN_ATTR_POINTWISE_MODE, DNN_TYPE_POINTWISE_MODE, mode);
    ont_dnn_set_int(b, how, DNN_ATTR_POINTWISE_MATH_PREC, DNN_TYPE_DATA_TYPE, compute);
    if (mode == DNN_POINTWISE_RELU_FWD)
        ont_dnn_set(b, how, DNN_ATTR_POINTWISE_NAN_PROPAGATION, DNN_TYPE_NAN_PROPOGATION, 1, &keep);
    if (mode == DNN_POINTWISE_RELU_FWD)
        ont_dnn_set(b, how, DNN_ATTR_POINTWISE_RELU_UPPER_CLIP, DNN_TYPE_FLOAT, 1, &infinity);
    if (mode == DNN_POINTWISE_GEN_INDEX) ont_dnn_set(b, how, DNN_ATTR_POINTWISE_AXIS, DNN_TYPE_INT64, 1, &axis);
    ont_dnn_finish(b, how);
    void *op = ont_dnn_make(b, DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    ont_dnn_set_descriptor(b, op, DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    ont_dnn_set_descriptor(b, op, DNN_ATTR_OPERATION_POINTWISE_XDESC, x->descriptor);
    ont_dnn_set_descriptor(b, op, DNN_ATTR_OPERATION_POINTWISE_YDESC, y->descriptor);
    if (second) ont_dnn_set_descriptor(b, op, DNN_ATTR_OPERATION_POINTWISE_BDESC, second->descriptor);
    if (third) ont_dnn_set_descriptor(b, op, DNN_ATTR_OPERATION_POINTWISE_TDESC, third->descriptor);
    ont_dnn_set(b, op, DNN_ATTR_OPERATION_POINTWISE_ALPHA1, DNN_TYPE_FLOAT, 1, &one);
    ont_dnn_set(b, op, DNN_ATTR_OPERATION_POINTWISE_ALPHA2, DNN_TYPE_FLOAT, 1, &one);
    ont_dnn_finish_op(b, op);
}

/* ---- kernels for the graph ---- */

/* Whether the configuration's engine has none of the numerical notes in the mask 1 << note | ... */
static inline bool ont_dnn_lacks_notes(ont_dnn_build *b, void *config, unsigned mask)
{
    int notes[ONT_DNN_NOTES];
    int64_t n = 0;
    void *engine = ont_dnn_make(b, DNN_BACKEND_ENGINE_DESCRIPTOR);
    if (b->error || b->dnn->get(config, DNN_ATTR_ENGINECFG_ENGINE, DNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine) ||
        b->dnn->get(engine, DNN_ATTR_ENGINE_NUMERICAL_NOTE, DNN_TYPE_NUMERICAL_NOTE, ONT_DNN_NOTES, &n, notes))
        return false;
    for (int64_t i = 0; i < n && i < ONT_DNN_NOTES; i++)
        if (notes[i] >= 0 && notes[i] < 32 && mask >> notes[i] & 1) return false;
    return n <= ONT_DNN_NOTES;
}

/* NULL where the configuration cannot run, or needs a workspace above the limit. */
static inline void *ont_dnn_execution(ont_dnn_build *b, void *config, int64_t *workspace)
{
    int64_t n = 0;
    void *execution = ont_dnn_make(b, DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    ont_dnn_set(b, execution, DNN_ATTR_EXECUTION_PLAN_HANDLE, DNN_TYPE_HANDLE, 1, &b->handle);
    ont_dnn_set_descriptor(b, execution, DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    if (b->error || b->dnn->finalize(execution) ||
        b->dnn->get(execution, DNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, DNN_TYPE_INT64, 1, &n, workspace))
        return NULL;
    b->is_large |= *workspace > b->limit;
    return *workspace >= 0 && *workspace <= b->limit ? execution : NULL;
}

/* The configurations for the graph, in cuDNN's order of expected speed; NULL, or why there is none. */
static inline const char *ont_dnn_configs(ont_dnn_build *b, void *configs[ONT_DNN_CONFIGS], int64_t *n)
{
    void *ops = ont_dnn_make(b, DNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    ont_dnn_set(b, ops, DNN_ATTR_OPERATIONGRAPH_HANDLE, DNN_TYPE_HANDLE, 1, &b->handle);
    ont_dnn_set(b, ops, DNN_ATTR_OPERATIONGRAPH_OPS, DNN_TYPE_BACKEND_DESCRIPTOR, b->n_ops, b->ops);
    ont_dnn_finish(b, ops);
    *n = 0;
    if (b->error) return "cuDNN does not take the graph";
    void *heuristic = ont_dnn_make(b, DNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    ont_dnn_set_descriptor(b, heuristic, DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, ops);
    ont_dnn_set_int(b, heuristic, DNN_ATTR_ENGINEHEUR_MODE, DNN_TYPE_HEUR_MODE, DNN_HEUR_MODE_A);
    ont_dnn_finish(b, heuristic);
    if (!b->error)
        b->error = b->dnn->get(heuristic, DNN_ATTR_ENGINEHEUR_RESULTS, DNN_TYPE_BACKEND_DESCRIPTOR, 0, n, NULL);
    if (b->error || *n <= 0) return "cuDNN has no kernel for the graph";
    if (*n > ONT_DNN_CONFIGS) *n = ONT_DNN_CONFIGS;
    for (int64_t i = 0; i < *n; i++) configs[i] = ont_dnn_make(b, DNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (!b->error)
        b->error = b->dnn->get(heuristic, DNN_ATTR_ENGINEHEUR_RESULTS, DNN_TYPE_BACKEND_DESCRIPTOR, *n, n, configs);
    return b->error ? "cuDNN has no kernel for the graph" : NULL;
}

/* ---- execution ---- */

enum { ONT_DNN_BINDINGS = 16 };

typedef struct ont_dnn_bindings { /* where the tensors are that are not virtual */
    int64_t uids[ONT_DNN_BINDINGS], n;
    void *pointers[ONT_DNN_BINDINGS];
} ont_dnn_bindings;

static inline void ont_dnn_bind(ont_dnn_bindings *b, int64_t uid, const void *pointer)
{
    b->uids[b->n] = uid;
    b->pointers[b->n++] = (void *)(uintptr_t)pointer;
}

/* Returns 0, or cuDNN's error code. */
static inline int ont_dnn_execute(const ont_dnn_graph *dnn, void *handle, void *execution, const ont_dnn_bindings *b,
                                  void *work, void *stream)
{
    void *pack = NULL;
    int error = dnn->create(DNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    if (error) return error;
    error = dnn->set(pack, DNN_ATTR_VARIANT_PACK_UNIQUE_IDS, DNN_TYPE_INT64, b->n, b->uids);
    if (!error) error = dnn->set(pack, DNN_ATTR_VARIANT_PACK_DATA_POINTERS, DNN_TYPE_VOID_PTR, b->n, b->pointers);
    if (!error) error = dnn->set(pack, DNN_ATTR_VARIANT_PACK_WORKSPACE, DNN_TYPE_VOID_PTR, 1, &work);
    if (!error) error = dnn->finalize(pack);
    if (!error) {
        dnn->lock();
        error = dnn->set_stream(handle, stream);
        if (!error) error = dnn->execute(handle, execution, pack);
        dnn->unlock();
    }
    dnn->destroy(pack);
    return error;
}

#endif
