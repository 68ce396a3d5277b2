/*
 * The operators of a CUDA device, a line for each, with the kernel family that takes it. An operator that is not here,
 * or whose kernel declines, is an error that names it when a program is built.
 */
#include "ops_common.h"

#define ONE(domain_, name_, since_, family, index) {domain_, name_, since_, &ont_cuda_##family##_kernels[index], 1},
#define THREE(domain_, name_, since_, family) {domain_, name_, since_, ont_cuda_##family##_kernels, 3},
#define TWO(domain_, name_, since_, family) {domain_, name_, since_, ont_cuda_##family##_kernels, 2},
#define POOL(name) ONE("", #name, 1, pool, 0) ONE(ONT_DOMAIN, #name "Grad", 1, pool, 1)
#define EW(name) ONE("", #name, 1, elementwise, 0)
#define EW_OURS(name) ONE(ONT_DOMAIN, #name, 1, elementwise, 0)
#define COPY(name) ONE("", #name, 1, move, 0)
#define REDUCE(name) ONE("", #name, 1, reduce, 0)

const ont_kernel_list ont_cuda_lists[] = {
    EW(Neg) EW(Abs) EW(Sqrt) EW(Reciprocal) EW(Exp) EW(Log) EW(Erf) EW(Tanh) EW(Sigmoid) EW(Relu) EW(LeakyRelu) EW(Elu)
    EW(Selu) EW(HardSigmoid) EW(HardSwish) EW(Gelu) EW(Softplus) EW(Softsign) EW(Mish) EW(Sin) EW(Cos) EW(Tan) EW(Asin)
    EW(Acos) EW(Atan) EW(Sinh) EW(Cosh) EW(Asinh) EW(Acosh) EW(Atanh) EW(Sign) EW(Floor) EW(Ceil) EW(Round) EW(Swish)
    ONE("", "Add", 7, elementwise, 0) ONE("", "Sub", 7, elementwise, 0) ONE("", "Mul", 7, elementwise, 0)
    ONE("", "Div", 7, elementwise, 0) ONE("", "Pow", 7, elementwise, 0) EW(Min) EW(Max)
    ONE("", "Mod", 10, elementwise, 0)
    ONE("", "Sum", 8, elementwise, 0) ONE("", "Equal", 7, elementwise, 0)
    ONE("", "Greater", 7, elementwise, 0) ONE("", "Less", 7, elementwise, 0) EW(GreaterOrEqual) EW(LessOrEqual)
    EW_OURS(AbsGrad) EW_OURS(ErfGrad) EW_OURS(TanhGrad) EW_OURS(SigmoidGrad) EW_OURS(ReluGrad) EW_OURS(LeakyReluGrad)
    EW_OURS(EluGrad) EW_OURS(SeluGrad) EW_OURS(HardSigmoidGrad) EW_OURS(HardSwishGrad) EW_OURS(GeluGrad)
    EW_OURS(SoftplusGrad) EW_OURS(Log1p) EW_OURS(Expm1) EW_OURS(Remainder) EW_OURS(Atan2)
    EW_OURS(Lgamma) EW_OURS(Digamma) EW_OURS(Trigamma) EW_OURS(Erfc) EW_OURS(Erfinv) EW_OURS(Logit) EW_OURS(LogitGrad)
    EW(Where) ONE("", "And", 7, elementwise, 0) ONE("", "Or", 7, elementwise, 0)
    ONE("", "Xor", 7, elementwise, 0) EW(Not)
    EW(IsNaN) ONE("", "Clip", 6, elementwise, 0) EW_OURS(HardTanh) ONE("", "Cast", 6, elementwise, 0)
    ONE("", "Dropout", 7, elementwise, 0) EW_OURS(DropoutGrad) EW_OURS(FusedElementwise)
    COPY(Transpose) COPY(Expand) COPY(Slice) ONE(ONT_DOMAIN, "PutSlice", 1, move, 0) ONE("", "Split", 2, move, 0)
    ONE("", "Concat", 4, move, 0) ONE("", "Gather", 1, move, 1) ONE(ONT_DOMAIN, "TorchGather", 1, move, 1)
    ONE(ONT_DOMAIN, "GatherGrad", 1, move, 2)
    ONE("", "Range", 11, move, 3) ONE("", "Trilu", 14, move, 4) ONE(ONT_DOMAIN, "Rotate", 1, move, 5)
    REDUCE(ReduceSum) REDUCE(ReduceMean) REDUCE(ReduceMax) REDUCE(ReduceMin) REDUCE(ReduceProd) REDUCE(ReduceL1)
    REDUCE(ReduceL2) REDUCE(ReduceSumSquare) REDUCE(ReduceLogSum) REDUCE(ReduceLogSumExp)
    ONE(ONT_DOMAIN, "SumTo", 1, reduce, 0)
    ONE("", "LayerNormalization", 17, norm, 0) ONE(ONT_DOMAIN, "LayerNormGrad", 1, norm, 1)
    ONE(ONT_DOMAIN, "FusedNorm", 1, norm, 2) ONE(ONT_DOMAIN, "FusedNormGrad", 1, norm, 3)
    ONE("", "Softmax", 1, softmax, 0) ONE("", "LogSoftmax", 1, softmax, 0) ONE(ONT_DOMAIN, "SoftmaxGrad", 1, softmax, 1)
    ONE(ONT_DOMAIN, "LogSoftmaxGrad", 1, softmax, 1)
    ONE("", "SoftmaxCrossEntropyLoss", 12, loss, 0) ONE("", "NegativeLogLikelihoodLoss", 12, loss, 0)
    ONE(ONT_DOMAIN, "SoftmaxCrossEntropyLoss", 1, loss, 0) ONE(ONT_DOMAIN, "SoftmaxCrossEntropyGrad", 1, loss, 1)
    ONE(ONT_DOMAIN, "NegativeLogLikelihoodGrad", 1, loss, 1)
    TWO(ONT_DOMAIN, "FusedAttention", 1, attention) TWO(ONT_DOMAIN, "FusedAttentionGrad", 1, attention_grad)
    ONE("", "MatMul", 1, matmul, 0) ONE(ONT_DOMAIN, "FusedMatMul", 1, matmul, 0) ONE("", "Gemm", 7, matmul, 0)
    ONE(ONT_DOMAIN, "GeluMatMul", 1, matmul, 1) ONE(ONT_DOMAIN, "GeluMatMulGrad", 1, matmul, 1)
    THREE("", "Conv", 1, conv) THREE(ONT_DOMAIN, "ConvGradInput", 1, conv)
    THREE(ONT_DOMAIN, "ConvGradWeight", 1, conv)
    POOL(MaxPool) POOL(AveragePool) POOL(GlobalMaxPool) POOL(GlobalAveragePool)
    ONE(ONT_DOMAIN, "AdaptiveAveragePool", 1, pool, 0) ONE(ONT_DOMAIN, "AdaptiveAveragePoolGrad", 1, pool, 1)
    ONE("", "BatchNormalization", 1, batchnorm, 0) ONE(ONT_DOMAIN, "FusedBatchNorm", 1, batchnorm, 0)
    ONE(ONT_DOMAIN, "BatchNormGrad", 1, batchnorm, 1)
    TWO(ONT_DOMAIN, "ConvTranspose", 1, conv)
    ONE(ONT_DOMAIN, "GroupNorm", 1, group_norm, 0) ONE(ONT_DOMAIN, "GroupNormGrad", 1, group_norm, 1)
    ONE("", "Pad", 1, pad, 0) ONE(ONT_DOMAIN, "PadGrad", 1, pad, 1) ONE("", "Resize", 10, resize, 0)
    ONE("", "Upsample", 1, resize, 0) ONE(ONT_DOMAIN, "ResizeGrad", 1, resize, 0)
    ONE("", "GatherElements", 11, index, 0) ONE(ONT_DOMAIN, "TorchGatherElements", 1, index, 0)
    ONE("", "GatherND", 11, index, 0) ONE(ONT_DOMAIN, "GatherNDGrad", 1, index, 2)
    ONE("", "ScatterElements", 11, index, 1) ONE(ONT_DOMAIN, "TorchScatterElements", 1, index, 1)
    ONE("", "Scatter", 9, index, 1) ONE("", "ScatterND", 11, index, 1)
    ONE("", "CumSum", 11, index, 3) ONE("", "CumProd", 26, index, 3) ONE(ONT_DOMAIN, "TorchCumProd", 1, index, 3)
    ONE(ONT_DOMAIN, "CumProdGrad", 1, index, 4)
    ONE("", "ArgMax", 1, index, 5) ONE("", "ArgMin", 1, index, 5) ONE("", "TopK", 1, index, 5)
    ONE(ONT_DOMAIN, "TorchTopK", 1, index, 5)
    ONE(ONT_DOMAIN, "CountNonZero", 1, nonzero, 0) ONE(ONT_DOMAIN, "NonZeroOf", 1, nonzero, 1)
    ONE(ONT_DOMAIN, "CTCLoss", 1, ctc, 0) ONE(ONT_DOMAIN, "CTCLossGrad", 1, ctc, 0)
    ONE(ONT_DOMAIN, "GroupedMatMul", 1, grouped, 0) ONE(ONT_DOMAIN, "GroupedMatMulGrad", 1, grouped, 0)
    ONE(ONT_DOMAIN, "RecurrentSteps", 1, recurrent, 0) ONE(ONT_DOMAIN, "RecurrentStepsGrad", 1, recurrent, 1)
};

const size_t ont_cuda_n_lists = sizeof ont_cuda_lists / sizeof *ont_cuda_lists;
