/*
 * What cuda/libs/ writes by hand of cuBLASLt, cuDNN and NCCL, against NVIDIA's headers: numbers, layouts of structs, and how
 * each function is called. For the compiler alone; tests/cuda/facts.py passes it the headers.
 */
#include <cublasLt.h>
#include <cudnn.h>
#include <nccl.h>

#include <type_traits>

#include "libs/cublas_lt.h"
#include "libs/cudnn_rnn.h"
#include "libs/dnn_graph.h"
#include "libs/nccl_api.h"

#define SAME(ours, theirs) \
    static_assert(static_cast<long>(ours) == static_cast<long>(theirs), "another number: " #ours)

SAME(COMPUTE_32F, CUBLAS_COMPUTE_32F);
SAME(COMPUTE_64F, CUBLAS_COMPUTE_64F);
SAME(COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32F_FAST_TF32);
SAME(TYPE_32F, CUDA_R_32F);
SAME(TYPE_64F, CUDA_R_64F);
SAME(TYPE_16F, CUDA_R_16F);
SAME(TYPE_16BF, CUDA_R_16BF);
SAME(DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(DESC_TRANSB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(DESC_BIAS_TYPE, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
SAME(DESC_AUX_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
SAME(DESC_AUX_LD, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
SAME(LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
SAME(LAYOUT_BATCH_OFFSET, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
SAME(PREFERENCE_WORKSPACE, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(PREFERENCE_ALIGNMENT_A, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(PREFERENCE_ALIGNMENT_A + 1, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(PREFERENCE_ALIGNMENT_A + 2, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(PREFERENCE_ALIGNMENT_D, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_DEFAULT);
SAME(EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BIAS);
SAME(GELU, CUBLASLT_EPILOGUE_GELU);
SAME(GELU | EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_BIAS);
SAME(GELU | EPILOGUE_BIAS | AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
SAME(DGELU | AUX, CUBLASLT_EPILOGUE_DGELU);
SAME(OP_N, CUBLAS_OP_N);
SAME(OP_T, CUBLAS_OP_T);
SAME(CUBLAS_SUCCESS, CUBLAS_STATUS_SUCCESS);
SAME(CUBLAS_NOT_SUPPORTED, CUBLAS_STATUS_NOT_SUPPORTED);

SAME(DATA_FLOAT, CUDNN_DATA_FLOAT);
SAME(DATA_HALF, CUDNN_DATA_HALF);
SAME(DATA_BFLOAT16, CUDNN_DATA_BFLOAT16);
SAME(LAYOUT_NCHW, CUDNN_TENSOR_NCHW);
SAME(CROSS_CORRELATION, CUDNN_CROSS_CORRELATION);
SAME(MATH_DEFAULT, CUDNN_DEFAULT_MATH);
SAME(MATH_TENSOR_OP, CUDNN_TENSOR_OP_MATH);
SAME(MATH_FMA, CUDNN_FMA_MATH);
SAME(DETERMINISTIC, CUDNN_DETERMINISTIC);
SAME(CUDNN_SUCCESS, CUDNN_STATUS_SUCCESS);
SAME(CUDNN_NOT_SUPPORTED, CUDNN_STATUS_NOT_SUPPORTED);
SAME(DATA_DOUBLE, CUDNN_DATA_DOUBLE);
SAME(RNN_ALGO_STANDARD, CUDNN_RNN_ALGO_STANDARD);
SAME(RNN_RELU, CUDNN_RNN_RELU);
SAME(RNN_TANH, CUDNN_RNN_TANH);
SAME(RNN_LSTM, CUDNN_LSTM);
SAME(RNN_GRU, CUDNN_GRU);
SAME(RNN_NO_BIAS, CUDNN_RNN_NO_BIAS);
SAME(RNN_DOUBLE_BIAS, CUDNN_RNN_DOUBLE_BIAS);
SAME(RNN_UNIDIRECTIONAL, CUDNN_UNIDIRECTIONAL);
SAME(RNN_BIDIRECTIONAL, CUDNN_BIDIRECTIONAL);
SAME(RNN_LINEAR_INPUT, CUDNN_LINEAR_INPUT);
SAME(RNN_SEQ_MAJOR_UNPACKED, CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_UNPACKED);
SAME(RNN_PADDED_IO_ENABLED, CUDNN_RNN_PADDED_IO_ENABLED);
SAME(RNN_INFERENCE, CUDNN_FWD_MODE_INFERENCE);
SAME(RNN_TRAINING, CUDNN_FWD_MODE_TRAINING);
SAME(RNN_WGRAD_ADD, CUDNN_WGRAD_MODE_ADD);

#define X(name, value) SAME(DNN_##name, CUDNN_##name);
ONT_DNN_NUMBERS(X)
#undef X

SAME(NCCL_SUCCESS, ncclSuccess);
SAME(NCCL_SYSTEM_ERROR, ncclSystemError);
SAME(NCCL_IN_PROGRESS, ncclInProgress);
SAME(NCCL_INT8, ncclInt8);
SAME(NCCL_UINT8, ncclUint8);
SAME(NCCL_INT32, ncclInt32);
SAME(NCCL_UINT32, ncclUint32);
SAME(NCCL_INT64, ncclInt64);
SAME(NCCL_UINT64, ncclUint64);
SAME(NCCL_FLOAT16, ncclFloat16);
SAME(NCCL_FLOAT32, ncclFloat32);
SAME(NCCL_FLOAT64, ncclFloat64);
SAME(NCCL_BFLOAT16, ncclBfloat16);
SAME(NCCL_SUM, ncclSum);
SAME(NCCL_MAX, ncclMax);
static_assert(sizeof(nccl_id) == sizeof(ncclUniqueId), "another size: nccl_id");

#define SAME_PLACE(ours, member, theirs, other) \
    static_assert(offsetof(ours, member) == offsetof(theirs, other) && \
                      sizeof(ours::member) == sizeof(theirs::other), "another place: " #ours "." #member)

static_assert(sizeof(algorithm) == sizeof(cublasLtMatmulAlgo_t), "another size: algorithm");
static_assert(sizeof(heuristic) == sizeof(cublasLtMatmulHeuristicResult_t), "another size: heuristic");
SAME_PLACE(heuristic, algo, cublasLtMatmulHeuristicResult_t, algo);
SAME_PLACE(heuristic, workspace, cublasLtMatmulHeuristicResult_t, workspaceSize);
SAME_PLACE(heuristic, state, cublasLtMatmulHeuristicResult_t, state);
SAME_PLACE(heuristic, waves, cublasLtMatmulHeuristicResult_t, wavesCount);

template <class T> constexpr bool is_performance()
{
    return sizeof(performance) == sizeof(T) && offsetof(performance, algorithm) == offsetof(T, algo) &&
           offsetof(performance, status) == offsetof(T, status) && offsetof(performance, time) == offsetof(T, time) &&
           offsetof(performance, memory) == offsetof(T, memory) &&
           offsetof(performance, determinism) == offsetof(T, determinism) &&
           offsetof(performance, math) == offsetof(T, mathType);
}
static_assert(is_performance<cudnnConvolutionFwdAlgoPerf_t>(), "another layout: performance, forward");
static_assert(is_performance<cudnnConvolutionBwdDataAlgoPerf_t>(), "another layout: performance, of the input");
static_assert(is_performance<cudnnConvolutionBwdFilterAlgoPerf_t>(), "another layout: performance, of the weight");

/* Whether arguments of both types are passed alike: both are pointers, or numbers of one size and kind. */
template <class T, class U> constexpr bool passes_alike()
{
    return std::is_pointer<T>::value == std::is_pointer<U>::value && sizeof(T) == sizeof(U) &&
           std::is_floating_point<T>::value == std::is_floating_point<U>::value;
}
template <class T, class U> struct calls_alike : std::false_type {};
template <class R, class... P, class S, class... Q> struct calls_alike<R (*)(P...), S (*)(Q...)> {
    template <class... T> struct list {};
    template <class T, class U> struct each : std::false_type {};
    template <class... T, class... U> struct each<list<T...>, list<U...>> {
        static constexpr bool value = (passes_alike<T, U>() && ...);
    };
    static constexpr bool compare()
    {
        if constexpr (sizeof...(P) == sizeof...(Q))
            return passes_alike<R, S>() && each<list<P...>, list<Q...>>::value;
        else
            return false;
    }
    static constexpr bool value = compare();
};

static cublas_functions cublas;
static cudnn_functions dnn;
static cudnn_rnn_functions rnn;
static nccl_functions nccl;
#define X(member, name) \
    static_assert(calls_alike<std::decay_t<decltype(cublas.member)>, decltype(&name)>::value, "called otherwise: " #name);
ONT_CUBLAS_FUNCTIONS(X)
#undef X
#define X(member, name) \
    static_assert(calls_alike<std::decay_t<decltype(dnn.member)>, decltype(&name)>::value, "called otherwise: " #name);
ONT_CUDNN_FUNCTIONS(X)
#undef X
#define X(member, name) \
    static_assert(calls_alike<std::decay_t<decltype(rnn.member)>, decltype(&name)>::value, "called otherwise: " #name);
ONT_CUDNN_RNN_FUNCTIONS(X)
#undef X
#define X(member, name) \
    static_assert(calls_alike<std::decay_t<decltype(nccl.member)>, decltype(&name)>::value, "called otherwise: " #name);
ONT_NCCL_FUNCTIONS(X)
#undef X
static ont_dnn_graph graph;
#define X(member, name) \
    static_assert(calls_alike<decltype(graph.member), decltype(&name)>::value, "called otherwise: " #name);
X(version, cudnnGetVersion)
X(create, cudnnBackendCreateDescriptor)
X(destroy, cudnnBackendDestroyDescriptor)
X(set, cudnnBackendSetAttribute)
X(get, cudnnBackendGetAttribute)
X(finalize, cudnnBackendFinalize)
X(execute, cudnnBackendExecute)
X(set_stream, cudnnSetStream)
#undef X
