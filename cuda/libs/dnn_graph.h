/*
 * cuDNN's graph ("backend") API behind a table: dnn_graph.c, or cuda/emulate/dnn_graph.c where kernels are emulated.
 * The numbers are written from NVIDIA's documentation, so that the build needs none of its headers;
 * tests/cuda/cudnn.sh compares them with cudnn_graph.h.
 */
#ifndef ONT_CUDA_DNN_GRAPH_H
#define ONT_CUDA_DNN_GRAPH_H

#include "core_shim.h"

/* Names without CUDNN_. */
#define ONT_DNN_NUMBERS(X) \
    X(DATA_FLOAT, 0) X(DATA_HALF, 2) X(DATA_INT32, 4) X(DATA_BFLOAT16, 9) X(DATA_BOOLEAN, 11) \
    X(TYPE_HANDLE, 0) X(TYPE_DATA_TYPE, 1) X(TYPE_BOOLEAN, 2) X(TYPE_INT64, 3) X(TYPE_FLOAT, 4) X(TYPE_VOID_PTR, 6) \
    X(TYPE_HEUR_MODE, 8) X(TYPE_NUMERICAL_NOTE, 11) X(TYPE_POINTWISE_MODE, 14) X(TYPE_BACKEND_DESCRIPTOR, 15) \
    X(TYPE_REDUCTION_OPERATOR_TYPE, 18) \
    X(BACKEND_POINTWISE_DESCRIPTOR, 0) X(BACKEND_ENGINE_DESCRIPTOR, 2) X(BACKEND_ENGINECFG_DESCRIPTOR, 3) \
    X(BACKEND_ENGINEHEUR_DESCRIPTOR, 4) X(BACKEND_EXECUTION_PLAN_DESCRIPTOR, 5) \
    X(BACKEND_OPERATION_POINTWISE_DESCRIPTOR, 13) X(BACKEND_OPERATIONGRAPH_DESCRIPTOR, 15) \
    X(BACKEND_VARIANT_PACK_DESCRIPTOR, 16) X(BACKEND_TENSOR_DESCRIPTOR, 17) X(BACKEND_MATMUL_DESCRIPTOR, 18) \
    X(BACKEND_OPERATION_MATMUL_DESCRIPTOR, 19) X(BACKEND_REDUCTION_DESCRIPTOR, 21) \
    X(BACKEND_OPERATION_REDUCTION_DESCRIPTOR, 22) X(BACKEND_OPERATION_RESHAPE_DESCRIPTOR, 31) \
    X(ATTR_POINTWISE_MODE, 0) X(ATTR_POINTWISE_MATH_PREC, 1) X(ATTR_POINTWISE_AXIS, 9) \
    X(ATTR_ENGINEHEUR_MODE, 200) X(ATTR_ENGINEHEUR_OPERATION_GRAPH, 201) X(ATTR_ENGINEHEUR_RESULTS, 202) \
    X(ATTR_ENGINECFG_ENGINE, 300) X(ATTR_EXECUTION_PLAN_HANDLE, 400) X(ATTR_EXECUTION_PLAN_ENGINE_CONFIG, 401) \
    X(ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, 402) X(ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, 750) \
    X(ATTR_OPERATION_POINTWISE_XDESC, 751) X(ATTR_OPERATION_POINTWISE_BDESC, 752) \
    X(ATTR_OPERATION_POINTWISE_YDESC, 753) X(ATTR_OPERATION_POINTWISE_ALPHA1, 754) \
    X(ATTR_OPERATION_POINTWISE_ALPHA2, 755) X(ATTR_OPERATION_POINTWISE_TDESC, 758) \
    X(ATTR_OPERATIONGRAPH_HANDLE, 800) X(ATTR_OPERATIONGRAPH_OPS, 801) X(ATTR_TENSOR_BYTE_ALIGNMENT, 900) \
    X(ATTR_TENSOR_DATA_TYPE, 901) X(ATTR_TENSOR_DIMENSIONS, 902) X(ATTR_TENSOR_STRIDES, 903) \
    X(ATTR_TENSOR_UNIQUE_ID, 906) X(ATTR_TENSOR_IS_VIRTUAL, 907) X(ATTR_TENSOR_IS_BY_VALUE, 908) \
    X(ATTR_VARIANT_PACK_UNIQUE_IDS, 1000) X(ATTR_VARIANT_PACK_DATA_POINTERS, 1001) \
    X(ATTR_VARIANT_PACK_WORKSPACE, 1003) X(ATTR_ENGINE_NUMERICAL_NOTE, 1303) X(ATTR_MATMUL_COMP_TYPE, 1500) \
    X(ATTR_OPERATION_MATMUL_ADESC, 1520) X(ATTR_OPERATION_MATMUL_BDESC, 1521) X(ATTR_OPERATION_MATMUL_CDESC, 1522) \
    X(ATTR_OPERATION_MATMUL_DESC, 1523) X(ATTR_REDUCTION_OPERATOR, 1600) X(ATTR_REDUCTION_COMP_TYPE, 1601) \
    X(ATTR_OPERATION_REDUCTION_XDESC, 1610) X(ATTR_OPERATION_REDUCTION_YDESC, 1611) \
    X(ATTR_OPERATION_REDUCTION_DESC, 1612) X(ATTR_OPERATION_RESHAPE_XDESC, 2200) \
    X(ATTR_OPERATION_RESHAPE_YDESC, 2201) \
    X(POINTWISE_ADD, 0) X(POINTWISE_MUL, 1) X(POINTWISE_DIV, 6) X(POINTWISE_SUB, 9) X(POINTWISE_EXP, 13) \
    X(POINTWISE_LOG, 15) X(POINTWISE_CMP_GE, 303) X(POINTWISE_GEN_INDEX, 501) X(POINTWISE_BINARY_SELECT, 601) \
    X(REDUCE_TENSOR_ADD, 0) X(REDUCE_TENSOR_MAX, 3) X(HEUR_MODE_A, 3) X(NUMERICAL_NOTE_NONDETERMINISTIC, 4)

enum {
#define X(name, value) DNN_##name = value,
    ONT_DNN_NUMBERS(X)
#undef X
};

/* Functions return 0, or an error code. */
typedef struct ont_dnn_graph {
    size_t (*version)(void); /* 90300 is 9.3.0 */
    int (*create)(int descriptor_type, void **descriptor);
    int (*destroy)(void *descriptor);
    int (*set)(void *descriptor, int name, int type, int64_t n, const void *values);
    int (*get)(void *descriptor, int name, int type, int64_t room, int64_t *n, void *values);
    int (*finalize)(void *descriptor);
    int (*execute)(void *handle, void *plan, void *variant_pack);
    /* The current device, its compute capability (90 is 9.0), and its handle, which the convolutions use too. */
    ont_status (*open)(int *device, int *capability, void **handle);
    int (*set_stream)(void *handle, void *stream);
    /* Around set_stream() and execute(): a handle has one stream. */
    void (*lock)(void);
    void (*unlock)(void);
    /* Milliseconds of three launches, negative where one fails; synchronizes. NULL: nothing is measured. */
    double (*time)(int (*launch)(const void *call, int candidate), const void *call, int candidate, void *stream);
} ont_dnn_graph;

/* The table of this plugin; NULL where the library is not found. */
const ont_dnn_graph *ont_dnn_graph_get(void);

#endif
