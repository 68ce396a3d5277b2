/*
 * Convolution: the geometry for all kernels, and oneDNN's primitives, one handle for each convolution.
 * ops/conv/conv_onednn.c fills in the geometry and calls them.
 */
#ifndef ONT_DEVICE_CONV_H
#define ONT_DEVICE_CONV_H

#include "base/dtype.h"

/*
 * y (N, O, out) = x (N, C, in) * w (O, C / groups, kernel). Spatial dims are right-aligned: the sizes of a 1-d
 * convolution are in entry 2; entries 0 and 1 are 1.
 */
typedef struct ont_conv {
    ont_dtype dtype;
    int spatial; /* 1 to 3 */
    int64_t n, c, o, groups;
    int64_t in[3], out[3], kernel[3], stride[3], dilation[3];
    int64_t pad[3];     /* before */
    int64_t pad_end[3]; /* after */
} ont_conv;

/* Of the convolution, and of each of its gradients. */
static inline double ont_conv_multiplications(const ont_conv *c)
{
    const int64_t channels = c->c / c->groups; /* that a filter reads */
    double count = (double)(c->n * c->o * channels);
    for (int d = 0; d < 3; d++) count *= (double)(c->out[d] * c->kernel[d]);
    return count;
}

typedef enum ont_conv_kind { ONT_CONV_FORWARD, ONT_CONV_GRAD_INPUT, ONT_CONV_GRAD_WEIGHT } ont_conv_kind;

typedef struct ont_dnnl_conv ont_dnnl_conv;

/* NULL, or why oneDNN does not support the convolution. */
const char *ont_dnnl_conv_refuses(const ont_conv *conv, ont_conv_kind kind, bool bias);

/* EUNSUPPORTED where ont_dnnl_conv_refuses() gives a reason. */
ont_status ont_dnnl_conv_create(const ont_conv *conv, ont_conv_kind kind, bool bias,
                                ont_dnnl_conv **result) ONT_MUST_USE;
void ont_dnnl_conv_destroy(ont_dnnl_conv *conv);
size_t ont_dnnl_conv_work_bytes(const ont_dnnl_conv *conv);
/*
 * x, w, y: two are operands and one is the result, by the kind; bias (O) or NULL. Concurrent calls on one handle run
 * one after the other.
 */
ont_status ont_dnnl_conv_run(ont_dnnl_conv *conv, const void *x, const void *w, const void *y, const void *bias,
                             void *work) ONT_MUST_USE;

#endif
