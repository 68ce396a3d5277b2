/*
 * The pooling loops, compiled once per instruction set, which ONT_ISA names. See pool.h; the bodies are in
 * pool_plane.h, included once per dtype.
 */
#include <math.h>
#include <string.h>

#include "simd/macros.h"
#include "simd/pool/pool.h"

#define NUM float
#define CELL int32_t
#define LOWEST (-INFINITY)
#define FLOATS 1
#define ISNAN(v) ((v) != (v))
#define F(name) PASTE(name, _f32)
#define POW powf
#define FABS fabsf
#define SQRT sqrtf
#include "simd/pool/pool_plane.h"
#define NUM double
#define CELL int64_t
#define LOWEST (-(double)INFINITY)
#define FLOATS 1
#define ISNAN(v) ((v) != (v))
#define F(name) PASTE(name, _f64)
#define POW pow
#define FABS fabs
#define SQRT sqrt
#include "simd/pool/pool_plane.h"
#define NUM int8_t
#define CELL int32_t
#define LOWEST INT8_MIN
#define FLOATS 0
#define ISNAN(v) false
#define F(name) PASTE(name, _i8)
#include "simd/pool/pool_plane.h"
#define NUM uint8_t
#define CELL int32_t
#define LOWEST 0
#define FLOATS 0
#define ISNAN(v) false
#define F(name) PASTE(name, _u8)
#include "simd/pool/pool_plane.h"

const ont_pool_loops PASTE(ont_pool_loops_, ONT_ISA)[] = {
    {max_f32, max_grad_f32, sum_f32, sum_grad_f32, small_f32, small_grad_f32},
    {max_f64, max_grad_f64, sum_f64, sum_grad_f64, small_f64, small_grad_f64},
    {.max = max_i8, .small = small_i8},
    {.max = max_u8, .small = small_u8},
};
