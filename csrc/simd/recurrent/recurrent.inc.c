/*
 * The loops of recurrent cells, compiled once per instruction set, which ONT_ISA names. See recurrent.h; the bodies are
 * in recurrent_rows.h, included once per dtype.
 */
#include "simd/recurrent/recurrent.h"
#include "simd/math.h"

INLINE double f64_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

#define NUM float
#define F(name) PASTE(name, _f32)
#define SIGMOID f32_sigmoid
#define TANH f32_tanh
#include "simd/recurrent/recurrent_rows.h"
#define NUM double
#define F(name) PASTE(name, _f64)
#define SIGMOID f64_sigmoid
#define TANH tanh
#include "simd/recurrent/recurrent_rows.h"

const ont_cell_loops PASTE(ont_cell_loops_, ONT_ISA)[2][ONT_CELLS] = {
    {{tanh_step_f32, tanh_grad_f32}, {relu_step_f32, relu_grad_f32}, {gru_step_f32, gru_grad_f32},
     {lstm_step_f32, lstm_grad_f32}},
    {{tanh_step_f64, tanh_grad_f64}, {relu_step_f64, relu_grad_f64}, {gru_step_f64, gru_grad_f64},
     {lstm_step_f64, lstm_grad_f64}},
};
