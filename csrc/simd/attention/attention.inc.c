/*
 * The loops of attention, compiled once per instruction set with ONT_ISA naming it. See attention.h; the bodies are in
 * attention_rows.h, included once per dtype.
 */
#include <math.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd/attention/attention.h"
#include "simd/macros.h"
#include "simd/math.h"

#define NUM float
#define F(name) PASTE(name, _f32)
#if ONT_ISA_PLAIN
#define VEXP expf
#else
#define VEXP f32_exp
#endif
#if defined(__AVX2__)
#define VECTORS
#include "simd/attention/attention_vectors.h"
#endif
#include "simd/attention/attention_rows.h"
#undef VECTORS
#define NUM double
#define F(name) PASTE(name, _f64)
#define VEXP exp
#include "simd/attention/attention_rows.h"

const ont_attention_loops PASTE(ont_attention_loops_, ONT_ISA)[] = {
    {softmax_f32, grad_f32, dot_f32},
    {softmax_f64, grad_f64, dot_f64},
};
