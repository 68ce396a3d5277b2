/*
 * GEMM of the emulated device: loops in double.
 */
#include <math.h>
#include <stdlib.h>

#include "libs/blas.h"
#include "emulate/values.h"

static const char *accept(const ont_blas_gemm *p)
{
    (void)p;
    return NULL;
}

static ont_status create(const ont_blas_gemm *gemm, void **plan)
{
    ont_blas_gemm *p = malloc(sizeof *p);
    if (!p) return ont_fail(ONT_ENOMEM, "out of memory");
    *p = *gemm;
    *plan = p;
    return ONT_OK;
}

static size_t work_bytes(const void *plan)
{
    (void)plan;
    return 0;
}

typedef struct call {
    const ont_blas_gemm *p;
    ont_blas_operands x;
} call;

static double gelu(double x, bool slope)
{
    double t = tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x));
    if (!slope) return 0.5 * x * (1 + t);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456080286535588 * (1 + 3 * 0.044715 * x * x);
}

/* Epilogue of one element of the result. */
static double epilogue(const call *call, int64_t at, int64_t column, double value)
{
    const ont_blas_gemm *p = call->p;
    ont_epilogue e = p->epilogue;
    if (e == ONT_EPILOGUE_NONE) return value;
    if (e == ONT_EPILOGUE_DGELU)
        return value * gelu(ont_emulate_get(p->result, call->x.aux, at), true);
    value += ont_emulate_get(p->result, call->x.bias, column);
    if (e == ONT_EPILOGUE_GELU_AUX) ont_emulate_put(p->result, call->x.aux, at, value);
    return e == ONT_EPILOGUE_BIAS ? value : gelu(value, false);
}

static int multiply(void *context)
{
    const call *call = context;
    const ont_blas_gemm *p = call->p;
    for (int64_t o = 0; o < p->batch; o++)
        for (int64_t i = 0; i < p->m; i++)
            for (int64_t j = 0; j < p->n; j++) {
                double sum = 0;
                for (int64_t k = 0; k < p->k; k++)
                    sum += ont_emulate_get(p->dtype, call->x.a,
                                           o * p->stride_a + (p->trans_a ? k * p->lda + i : i * p->lda + k)) *
                           ont_emulate_get(p->dtype, call->x.b,
                                           o * p->stride_b + (p->trans_b ? j * p->ldb + k : k * p->ldb + j));
                int64_t to = o * p->stride_c + i * p->ldc + j;
                double before = p->beta != 0 ? p->beta * ont_emulate_get(p->result, call->x.c, to) : 0;
                double value = p->alpha * sum + before;
                ont_emulate_put(p->result, call->x.c, to, epilogue(call, to, j, value));
            }
    return 0;
}

static ont_status run(void *plan, const ont_blas_operands *operands, void *stream)
{
    call now = {plan, *operands};
    (void)stream;
    if (!ont_emulate_recording()) {
        multiply(&now);
        return ONT_OK;
    }
    call *kept = malloc(sizeof *kept);
    if (!kept) return ont_fail(ONT_ENOMEM, "out of memory");
    *kept = now;
    ont_emulate_record(multiply, kept, free);
    return ONT_OK;
}

static const ont_blas loops = {
    .name = "loops", .accept = accept, .create = create, .work_bytes = work_bytes, .run = run, .destroy = free};

const ont_blas *ont_blas_get(void)
{
    return &loops;
}
