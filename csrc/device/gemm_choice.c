/*
 * Which implementation of a GEMM is used. See gemm.h.
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

bool ont_gemm_is_small(const ont_gemm *g)
{
    return 2.0 * (double)g->m * (double)g->n * (double)g->k < (ont_dtype_is_half(g->dtype) ? SMALL_HALF : SMALL);
}

const ont_gemm_kernel *ont_gemm_native_kernel(ont_gemm_impl impl, ont_dtype dtype)
{
    if (impl == ONT_GEMM_BF16X3 && dtype == ONT_FLOAT32) return ont_simd_gemm_bf16x3();
    if (impl != ONT_GEMM_NATIVE) return NULL;
    return dtype == ONT_FLOAT32 ? ont_simd_gemm() : dtype == ONT_BFLOAT16 ? ont_simd_gemm_bf16() : NULL;
}

/* Older names in ONNXTRAIN_GEMM are still accepted. */
const char *ont_gemm_requested(void)
{
    static const char *const older[][2] = {{"tiled", "native"}, {"plain", "reference"}};
    const char *name = getenv("ONNXTRAIN_GEMM");
    if (!name || !*name) return NULL;
    for (size_t i = 0; i < sizeof older / sizeof *older; i++)
        if (!strcmp(name, older[i][0])) return older[i][1];
    return name;
}

const char *ont_gemm_refuses(const char *name, const ont_gemm *g)
{
    const char *requested = ont_gemm_requested();
    if (requested) return strcmp(requested, name) ? "ONNXTRAIN_GEMM names another implementation" : NULL;
    return ont_gemm_is_small(g) ? "too small" : NULL;
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
    for (size_t i = 0; i < count && fits_int32(g); i++) { /* asking for a library opens it */
        if (!backends[i].available(g->dtype)) continue;
        if (requested && !strcmp(requested, backends[i].name)) return &backends[i];
        /* torch's BLAS for small GEMMs, since its calls are short; oneDNN's for others on x86-64, whichever that is */
        bool better = chosen == ont_gemm_reference() || (X86 && !ont_gemm_is_small(g));
        if (better && &backends[i] != ont_gemm_reference()) chosen = &backends[i];
    }
    return chosen;
}

bool ont_gemm_half_is_native(const ont_gemm *g)
{
    if (!ont_gemm_native_kernel(ONT_GEMM_NATIVE, g->dtype) || ont_gemm_refuses("native", g)) return false;
    return ont_gemm_requested() || !ont_simd_gemm_bf16x3(); /* where there is AMX, oneDNN uses it */
}
