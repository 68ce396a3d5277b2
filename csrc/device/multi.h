/*
 * One optimizer step over any number of tensors on a device, in a few launches. All that changes from step to step
 * (step counts, found_inf, the inverse scale) is read from device memory, so that the launches can be captured in a
 * graph. For C and C++.
 *
 * Formulas, and the order of `hyper`, are those of csrc/optim/rules.c.
 */
#ifndef ONT_DEVICE_MULTI_H
#define ONT_DEVICE_MULTI_H

#include <stddef.h>
#include <stdint.h>

enum {
    ONT_OPTIM_CHUNK = 16384, /* a multiple of ONT_OPTIM_BLOCK */
    ONT_OPTIM_BLOCK = 256,   /* elements that share a scale: ONT_QUANT_BLOCK of simd/optim/optim.h */
    ONT_OPTIM_HYPER = 12
};

typedef enum ont_cuda_rule {
    ONT_CUDA_ADAM,
    ONT_CUDA_LAMB,
    ONT_CUDA_SGD,
    ONT_CUDA_ADAGRAD,
    ONT_CUDA_LION
} ont_cuda_rule;

/* Dense tensors in one order. A dtype is ONNX's number of float32, float64, float16 or bfloat16; a state's also of int8
 * or uint8. */
typedef struct ont_cuda_tensor {
    void *param;
    const void *grad;
    void *state[3];     /* NULL where the rule has fewer */
    float *scale[2];    /* of 8-bit states 0 and 1: one for each ONT_OPTIM_BLOCK elements; NULL: a float state */
    float *master;      /* float32 copy of a 16-bit parameter, or NULL */
    float *step;        /* counts up when the step is done; NULL: the rule has none */
    int64_t count;
    int32_t param_dtype, grad_dtype, state_dtype[3];
    int32_t fresh;      /* its states were created in this step */
    int32_t stochastic; /* the 16-bit parameter is rounded at random, by this stream of the job's seed */
    uint32_t stream;
    int64_t first_chunk; /* chunks of ONT_OPTIM_CHUNK elements, in order */
} ont_cuda_tensor;

/* Which kernel updates a tensor: in float, in double, or by warps (8-bit states or random rounding). */
typedef enum ont_optim_kind {
    ONT_OPTIM_NARROW = 1,
    ONT_OPTIM_WIDE = 2,
    ONT_OPTIM_BY_WARPS = 4
} ont_optim_kind;

typedef struct ont_cuda_optim {
    const ont_cuda_tensor *tensors; /* on the device */
    const int32_t *chunk_tensor;    /* per chunk, on the device */
    int64_t n_tensors, n_chunks;
    int32_t rule, maximize;
    double hyper[ONT_OPTIM_HYPER];
    double max_norm;                /* negative: no clipping */
    const float *found_inf;         /* nonzero: nothing happens, steps included; NULL: always */
    const float *inv_scale;         /* gradients are multiplied by it; NULL: 1 */
    float *norm;                    /* of the unscaled gradients, where max_norm is not negative */
    double *work;                   /* 2 * n_chunks + n_tensors + 2 */
    const double *factor;           /* clipping factor of another job (its work + 2 * n_chunks); NULL: this job's */
    const float *lr;                /* in place of the first of hyper; NULL: that one */
    double *wide_out;               /* of sums: one per tensor; of a norm: the norm in double, or NULL */
    uint64_t seed;                  /* of random rounding */
    const void *grad;               /* of the only tensor, whose table has none; NULL: the tables have them */
    int32_t absent;                 /* kinds (ont_optim_kind) that no tensor has: a launch less for each */
} ont_cuda_optim;

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ont_optim_work {
    ONT_OPTIM_STEP, ONT_OPTIM_NORM, ONT_OPTIM_CLIP, ONT_OPTIM_UNSCALE,
    ONT_OPTIM_SQUARES, /* the first part of a norm: sums of squares of chunks into work */
    ONT_OPTIM_FACTOR,  /* the second: the norm from them, and the factor */
    ONT_OPTIM_SUMS,    /* of squares, one per tensor, to wide_out */
    ONT_OPTIM_SCALE    /* param = grad * inv_scale + hyper[0] * param; *found_inf = 1 where that is not finite */
} ont_optim_work;

/* Seen from outside the plugin: tests call them. */
#define ONT_OPTIM_API __attribute__((visibility("default")))

/* Each returns a CUDA error code. found_inf: of the unscaling alone. */
int ont_launch_optim(int what, const ont_cuda_optim *o, float *found_inf, void *stream);
ONT_OPTIM_API int ont_launch_optim_step(const ont_cuda_optim *o, void *stream);
/* norm of all gradients, in a fixed order */
ONT_OPTIM_API int ont_launch_optim_norm(const ont_cuda_optim *o, void *stream);
/* gradients *= min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ */
ONT_OPTIM_API int ont_launch_optim_clip(const ont_cuda_optim *o, void *stream);
/* gradients *= inv_scale; *found_inf = 1 where one is not finite (it is not cleared), as GradScaler.unscale_ */
ONT_OPTIM_API int ont_launch_optim_unscale(const ont_cuda_optim *o, float *found_inf, void *stream);

#ifdef __cplusplus
}
#endif
#endif
