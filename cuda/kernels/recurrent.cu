/*
 * The cells of one step of an RNN, GRU or LSTM and their gradient: a thread for each number of the state. Formulas and
 * what is saved are those of csrc/simd/recurrent/recurrent.h. Products are left to the library. Every sequence takes
 * part in every step; one that has ended keeps its state, and what it saves is zero.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

ONT_DEVICE float bounded(float v) { return tanhf(v); }
ONT_DEVICE double bounded(double v) { return tanh(v); }
ONT_DEVICE float gate(float v) { return 1 / (1 + expf(-v)); }
ONT_DEVICE double gate(double v) { return 1 / (1 + exp(-v)); }

/* Pointers of step t; each to its element k of sequence b, from which a run is `hidden` elements. */
template <class T>
ONT_DEVICE void step_of_cell(const ont_cell_step &s, const T *x, const T *q, T bias, T *h, T *c, T *saved)
{
    const int64_t n = s.hidden;
    const T before = *h;
    if (s.cell == ONT_CELL_TANH || s.cell == ONT_CELL_RELU) {
        const T sum = x[0] + q[0];
        *h = s.cell == ONT_CELL_TANH ? bounded(sum) : sum < 0 ? (T)0 : sum; /* a NaN stays */
        saved[0] = *h;
        saved[n] = before;
    } else if (s.cell == ONT_CELL_GRU) {
        const T z = gate(x[0] + q[0]), reset = gate(x[n] + q[n]), part = q[2 * n] + bias;
        const T fresh = bounded(x[2 * n] + reset * part);
        *h = (1 - z) * fresh + z * before;
        saved[0] = z;
        saved[n] = reset;
        saved[2 * n] = fresh;
        saved[3 * n] = part;
        saved[4 * n] = before;
    } else {
        const T i = gate(x[0] + q[0]), o = gate(x[n] + q[n]), f = gate(x[2 * n] + q[2 * n]);
        const T g = bounded(x[3 * n] + q[3 * n]), c_before = *c;
        *c = f * c_before + i * g;
        const T tanh_c = bounded(*c);
        *h = o * tanh_c;
        saved[0] = i;
        saved[n] = o;
        saved[2 * n] = f;
        saved[3 * n] = g;
        saved[4 * n] = c_before;
        saved[5 * n] = tanh_c;
        saved[6 * n] = before;
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    cell_kernel(const ont_cell_step s, const ont_cell_operands o)
{
    const T *x = (const T *)o.x, *q = (const T *)o.q, *bias = (const T *)o.bias;
    T *h = (T *)o.h, *c = (T *)o.c, *y = (T *)o.y;
    ONT_FOR(at, s.batch * s.hidden)
    {
        const int64_t b = at / s.hidden, k = at - b * s.hidden, gates = b * s.gates * s.hidden + k;
        T *own = (T *)o.saved + b * s.runs * s.hidden + k;
        const bool ended = o.lengths && s.t >= ((const int64_t *)o.lengths)[b];
        if (ended)
            for (int r = 0; r < s.runs; r++) own[r * s.hidden] = 0;
        else
            step_of_cell<T>(s, x + gates, q + gates, bias ? bias[k] : (T)0, h + at, c ? c + at : NULL, own);
        if (y) y[at] = ended ? (T)0 : h[at];
    }
}

/* dh: the gradient of h'; it becomes that of h by other ways than the product. dx: of a GRU, or NULL. */
template <class T>
ONT_DEVICE void grad_of_cell(const ont_cell_step &s, const T *saved, T *dh, T *dc, T *dq, T *dx)
{
    const int64_t n = s.hidden;
    const T d = *dh;
    *dh = 0;
    if (s.cell == ONT_CELL_TANH) {
        dq[0] = d * (1 - saved[0] * saved[0]);
    } else if (s.cell == ONT_CELL_RELU) {
        dq[0] = saved[0] <= 0 ? (T)0 : d;
    } else if (s.cell == ONT_CELL_GRU) {
        const T z = saved[0], reset = saved[n], fresh = saved[2 * n], part = saved[3 * n], before = saved[4 * n];
        const T dn = d * (1 - z) * (1 - fresh * fresh);
        dq[0] = d * (before - fresh) * z * (1 - z);
        dq[n] = dn * part * reset * (1 - reset);
        dq[2 * n] = dn * reset;
        *dh = d * z;
        if (!dx) return;
        dx[0] = dq[0];
        dx[n] = dq[n];
        dx[2 * n] = dn;
    } else {
        const T i = saved[0], o = saved[n], f = saved[2 * n], g = saved[3 * n], tanh_c = saved[5 * n];
        const T cell = *dc + d * o * (1 - tanh_c * tanh_c);
        dq[0] = cell * g * i * (1 - i);
        dq[n] = d * tanh_c * o * (1 - o);
        dq[2 * n] = cell * saved[4 * n] * f * (1 - f);
        dq[3 * n] = cell * i * (1 - g * g);
        *dc = cell * f;
    }
}

template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    cell_grad_kernel(const ont_cell_step s, const ont_cell_grad_operands o)
{
    const T *saved = (const T *)o.saved, *dy = (const T *)o.dy, *dr = (const T *)o.dr;
    T *dh = (T *)o.dh, *dc = (T *)o.dc, *dq = (T *)o.dq, *dx = (T *)o.dx;
    ONT_FOR(at, s.batch * s.hidden)
    {
        const int64_t b = at / s.hidden, k = at - b * s.hidden, gates = b * s.gates * s.hidden + k;
        const bool ended = o.lengths && s.t >= ((const int64_t *)o.lengths)[b];
        dh[at] += dr[at];
        if (dy && !ended) dh[at] += dy[at];
        for (int g = 0; ended && g < s.gates; g++) {
            dq[gates + g * s.hidden] = 0;
            if (dx) dx[gates + g * s.hidden] = 0;
        }
        if (!ended)
            grad_of_cell<T>(s, saved + b * s.runs * s.hidden + k, dh + at, dc ? dc + at : NULL, dq + gates,
                            dx ? dx + gates : NULL);
    }
}

extern "C" int ont_launch_cell(const ont_cell_step *s, const ont_cell_operands *o, void *stream)
{
    const unsigned blocks = ont_blocks(s->batch * s->hidden, ONT_THREADS);
    return s->dtype == ONT_FLOAT32 ? ONT_LAUNCH(cell_kernel<float>, blocks, ONT_THREADS, 0, stream, *s, *o)
                                   : ONT_LAUNCH(cell_kernel<double>, blocks, ONT_THREADS, 0, stream, *s, *o);
}

extern "C" int ont_launch_cell_grad(const ont_cell_step *s, const ont_cell_grad_operands *o, void *stream)
{
    const unsigned blocks = ont_blocks(s->batch * s->hidden, ONT_THREADS);
    return s->dtype == ONT_FLOAT32 ? ONT_LAUNCH(cell_grad_kernel<float>, blocks, ONT_THREADS, 0, stream, *s, *o)
                                   : ONT_LAUNCH(cell_grad_kernel<double>, blocks, ONT_THREADS, 0, stream, *s, *o);
}

/* sums (n) of columns of rows that are `pitch` apart, by a block for each column */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    column_sums_kernel(int64_t rows, int64_t n, int64_t pitch, const T *x, T *sums)
{
    __shared__ T scratch[32];
    for (int64_t k = blockIdx.x; k < n; k += gridDim.x) {
        T sum = 0;
        for (int64_t i = threadIdx.x; i < rows; i += blockDim.x) sum += x[i * pitch + k];
        sum = ont_block_sum(sum, scratch);
        if (!threadIdx.x) sums[k] = sum;
    }
}

extern "C" int ont_launch_column_sums(int dtype, int64_t rows, int64_t n, int64_t pitch, const void *x, void *sums,
                                      void *stream)
{
    const unsigned blocks = ont_blocks(n, 1), threads = ont_row_threads(rows);
    if (dtype == ONT_FLOAT32)
        return ONT_LAUNCH(column_sums_kernel<float>, blocks, threads, 0, stream, rows, n, pitch, (const float *)x,
                          (float *)sums);
    return ONT_LAUNCH(column_sums_kernel<double>, blocks, threads, 0, stream, rows, n, pitch, (const double *)x,
                      (double *)sums);
}

template <class T> __global__ void __launch_bounds__(ONT_THREADS) rnn_parts_kernel(const ont_rnn_parts parts)
{
    const ont_rnn_part part = parts.part[blockIdx.y];
    ONT_FOR(i, part.count) ((T *)part.to)[i] = ((const T *)part.from)[i];
}

extern "C" int ont_launch_rnn_parts(const ont_rnn_parts *parts, void *stream)
{
    int64_t most = 0;
    for (int i = 0; i < parts->n; i++)
        if (parts->part[i].count > most) most = parts->part[i].count;
    if (!most) return 0;
    const dim3 grid(ont_blocks(most, 4 * ONT_THREADS), (unsigned)parts->n);
    if (parts->size == 2) return ONT_LAUNCH(rnn_parts_kernel<uint16_t>, grid, ONT_THREADS, 0, stream, *parts);
    return parts->size == 4 ? ONT_LAUNCH(rnn_parts_kernel<uint32_t>, grid, ONT_THREADS, 0, stream, *parts)
                            : ONT_LAUNCH(rnn_parts_kernel<uint64_t>, grid, ONT_THREADS, 0, stream, *parts);
}
