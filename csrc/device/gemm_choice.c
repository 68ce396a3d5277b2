/*
 * The rules about implementations of a GEMM. See gemm.h.
 */
#include <stdlib.h>
#include <string.h>

#include "device/gemm.h"
#include "device/gemm_native.h"

#ifdef __x86_64__
enum { X86 = 1 };
#else
enum { X86 = 0 };
#endif
static const double SMALL = 1e6, SMALL_HALF = 1e7; /* floating-point operations; of float32, and of 16-bit operands */

/* So few operations that a call's own time counts. */
static bool is_small(const ont_gemm *g)
{
    return 2.0 * (double)g->m * (double)g->n * (double)g->k < (ont_dtype_is_half(g->dtype) ? SMALL_HALF : SMALL);
}

const ont_gemm_kernel *ont_gemm_native_kernel(ont_dtype dtype)
{
    return dtype == ONT_FLOAT32 ? ont_simd_gemm() : dtype == ONT_BFLOAT16 ? ont_simd_gemm_bf16() : NULL;
}

const char *ont_gemm_requested(void)
{
    static const char *const names[][2] = {{"torch", "torch"}, {"onednn", "onednn"}, {"primitive", "primitive"},
                                           {"native", "native"}, {"tiled", "native"}, /* older names are accepted */
                                           {"reference", "reference"}, {"plain", "reference"}};
    const char *name = getenv("ONNXTRAIN_GEMM");
    for (size_t i = 0; name && i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i][0])) return names[i][1];
    return NULL;
}

const char *ont_gemm_refuses(const char *name, const ont_gemm *g)
{
    const char *requested = ont_gemm_requested();
    if (requested) return strcmp(requested, name) ? "ONNXTRAIN_GEMM names another implementation" : NULL;
    return is_small(g) ? "too small" : NULL;
}

static bool deterministic;

void ont_gemm_set_deterministic(bool on)
{
    __atomic_store_n(&deterministic, on, __ATOMIC_RELAXED);
}

bool ont_gemm_is_deterministic(void)
{
    return __atomic_load_n(&deterministic, __ATOMIC_RELAXED);
}

bool ont_gemm_is_by_rule(void)
{
    return ont_gemm_is_deterministic() || ont_gemm_requested();
}

/* BLAS takes 32-bit sizes; larger GEMMs use the reference loop. */
static bool fits_int32(const ont_gemm *g)
{
    return g->m <= INT32_MAX && g->n <= INT32_MAX && g->k <= INT32_MAX && g->lda <= INT32_MAX && g->ldb <= INT32_MAX &&
           g->ldc <= INT32_MAX;
}

const ont_gemm_backend *ont_gemm_choose(const ont_gemm *g)
{
    const char *requested = ont_gemm_requested();
    size_t count;
    const ont_gemm_backend *backends = ont_gemm_backends(&count), *chosen = ont_gemm_reference();
    /* torch's BLAS for small GEMMs, since its calls are short; for others on x86-64 oneDNN's, whichever torch has */
    bool first = !requested && (!X86 || is_small(g));
    for (size_t i = 0; i < count && fits_int32(g); i++) { /* asking for a library opens it */
        if (first && chosen != ont_gemm_reference()) break;
        if (!backends[i].available(g->dtype)) continue;
        if (requested && !strcmp(requested, backends[i].name)) return &backends[i];
        if (&backends[i] != ont_gemm_reference()) chosen = &backends[i];
    }
    return chosen;
}

bool ont_gemm_half_is_native(const ont_gemm *g)
{
    if (!ont_gemm_native_kernel(g->dtype) || ont_gemm_refuses("native", g)) return false;
    return ont_gemm_requested() || !ont_simd_gemm_bf16x3(); /* where there is AMX, oneDNN uses it */
}
