/*
 * Selects the GEMM kernel of the instruction set that simd.c selected.
 */
#include "simd/gemm/gemm_kernel.h"

#include "simd/isa.h"

extern const ont_gemm_kernel ont_gemm_kernel_avx2, ont_gemm_kernel_avx512, ont_gemm_kernel_neon, ont_gemm_bf16x3_avx512,
    ont_gemm_bf16_avx512;

const ont_gemm_kernel *ont_simd_gemm(void)
{
    return ONT_ISA_CHOICE(&ont_gemm_kernel_, NULL);
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the processor has AMX with bfloat16, and the kernel grants this process the tile registers. */
static bool probe_amx(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 }; /* arch_prctl; bits of cpuid 7 */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return false;
    return __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool has_amx;

static void detect_amx(void)
{
    has_amx = probe_amx();
}

const ont_gemm_kernel *ont_simd_gemm_bf16x3(void)
{
    pthread_once(&once, detect_amx);
    return has_amx && ont_isa_is("avx512") ? &ont_gemm_bf16x3_avx512 : NULL;
}

const ont_gemm_kernel *ont_simd_gemm_bf16(void)
{
    bool has = __builtin_cpu_supports("avx512bf16") && ont_isa_is("avx512");
    return has ? &ont_gemm_bf16_avx512 : NULL;
}

#else

const ont_gemm_kernel *ont_simd_gemm_bf16x3(void)
{
    return NULL;
}

const ont_gemm_kernel *ont_simd_gemm_bf16(void)
{
    return NULL;
}

#endif
