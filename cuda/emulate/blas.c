/*
 * The emulated device's matrix products: plain loops in double.
 */
#include <stdlib.h>

#include "blas.h"
#include "emulate/number.h"

static const char *accept(const ont_blas_product *p)
{
    (void)p;
    return NULL;
}

static ont_status create(const ont_blas_product *product, void **plan)
{
    ont_blas_product *p = malloc(sizeof *p);
    if (!p) return ont_fail(ONT_ENOMEM, "out of memory");
    *p = *product;
    *plan = p;
    return ONT_OK;
}

static size_t work_bytes(const void *plan)
{
    (void)plan;
    return 0;
}

typedef struct call {
    const ont_blas_product *p;
    const void *a, *b, *bias;
    void *c;
} call;

static int multiply(void *context)
{
    const call *call = context;
    const ont_blas_product *p = call->p;
    for (int64_t o = 0; o < p->batch; o++)
        for (int64_t i = 0; i < p->m; i++)
            for (int64_t j = 0; j < p->n; j++) {
                double sum = 0;
                for (int64_t k = 0; k < p->k; k++)
                    sum += ont_emulate_get(p->dtype, call->a, o * p->stride_a + (p->trans_a ? k * p->lda + i : i * p->lda + k)) *
                           ont_emulate_get(p->dtype, call->b, o * p->stride_b + (p->trans_b ? j * p->ldb + k : k * p->ldb + j));
                int64_t to = o * p->stride_c + i * p->ldc + j;
                double value = p->alpha * sum + (p->beta != 0 ? p->beta * ont_emulate_get(p->result, call->c, to) : 0);
                if (p->epilogue == ONT_EPILOGUE_BIAS) value += ont_emulate_get(p->result, call->bias, j);
                ont_emulate_put(p->result, call->c, to, value);
            }
    return 0;
}

static ont_status run(void *plan, const void *a, const void *b, void *c, const void *bias, void *work, void *stream)
{
    call now = {plan, a, b, bias, c};
    (void)work;
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
