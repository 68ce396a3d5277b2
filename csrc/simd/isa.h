/*
 * Chooses among the tables that the loops of csrc/simd end in, which have one name each with the instruction set as its
 * suffix. setup.py (ISAS) lists the instruction sets of each machine.
 */
#ifndef ONT_SIMD_ISA_H
#define ONT_SIMD_ISA_H

#include <string.h>

#include "simd/simd.h"

static inline bool ont_isa_is(const char *isa)
{
    return !strcmp(ont_simd()->isa, isa);
}

/* name##<isa> for the instruction set that simd.c chose; `plain` where that is the plain one */
#if defined(__x86_64__)
#define ONT_ISA_CHOICE(name, plain) (ont_isa_is("avx512") ? name##avx512 : ont_isa_is("avx2") ? name##avx2 : (plain))
#elif defined(__aarch64__)
#define ONT_ISA_CHOICE(name, plain) (ont_isa_is("neon") ? name##neon : (plain))
#else
#define ONT_ISA_CHOICE(name, plain) (plain)
#endif

#endif
