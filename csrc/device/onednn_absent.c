/*
 * What conv.h and matmul.h declare, in a build without oneDNN's headers: every product and convolution is refused, so
 * that the kernels of this project run. setup.py compiles either this file or conv.c and matmul.c.
 */
#include "base/assert.h"
#include "device/conv.h"
#include "device/matmul.h"

static const char refusal[] = "this build has no oneDNN";

const char *ont_dnnl_conv_refuses(const ont_conv *conv, ont_conv_kind kind, bool bias)
{
    (void)conv, (void)kind, (void)bias;
    return refusal;
}

ont_status ont_dnnl_conv_create(const ont_conv *conv, ont_conv_kind kind, bool bias, ont_dnnl_conv **result)
{
    (void)conv, (void)kind, (void)bias, (void)result;
    return ont_fail(ONT_EUNSUPPORTED, "%s", refusal);
}

void ont_dnnl_conv_destroy(ont_dnnl_conv *conv)
{
    ONT_ASSERT(!conv);
    (void)conv;
}

size_t ont_dnnl_conv_work_bytes(const ont_dnnl_conv *conv)
{
    (void)conv;
    return 0;
}

ont_status ont_dnnl_conv_run(ont_dnnl_conv *conv, const void *x, const void *w, const void *y, const void *bias,
                             void *work)
{
    (void)conv, (void)x, (void)w, (void)y, (void)bias, (void)work;
    return ont_fail(ONT_EINTERNAL, "%s", refusal);
}

const char *ont_dnnl_matmul_refuses(ont_dtype dtype)
{
    (void)dtype;
    return refusal;
}

ont_status ont_dnnl_matmul_create(const ont_matmul *m, ont_dnnl_matmul **result)
{
    (void)m, (void)result;
    return ont_fail(ONT_EUNSUPPORTED, "%s", refusal);
}

void ont_dnnl_matmul_destroy(ont_dnnl_matmul *matmul)
{
    ONT_ASSERT(!matmul);
    (void)matmul;
}

size_t ont_dnnl_matmul_work_bytes(const ont_dnnl_matmul *matmul)
{
    (void)matmul;
    return 0;
}

ont_status ont_dnnl_matmul_run(ont_dnnl_matmul *matmul, const void *a, const void *b, const void *bias, void *c,
                               void *work)
{
    (void)matmul, (void)a, (void)b, (void)bias, (void)c, (void)work;
    return ont_fail(ONT_EINTERNAL, "%s", refusal);
}
