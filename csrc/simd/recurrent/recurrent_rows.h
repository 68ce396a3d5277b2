/*
 * One row of each cell of recurrent.h in the type NUM. Included by recurrent.inc.c alone, once per dtype, with NUM, F,
 * SIGMOID and TANH, which it undefines. No two operands overlap, but for the state that a step replaces.
 */
#define RUN(i) ((i) * n + k)
#define IVDEP _Pragma("GCC ivdep") /* GCC takes pointers that are based on one for aliases */

static void F(tanh_step)(const ont_cell_row *r)
{
    const NUM *restrict x = r->x, *restrict q = r->q;
    NUM *restrict h = r->h, *restrict after = r->saved, *restrict before = after + r->hidden;
    IVDEP
    for (int64_t k = 0; k < r->hidden; k++) {
        before[k] = h[k];
        after[k] = h[k] = TANH(x[k] + q[k]);
    }
}

static void F(relu_step)(const ont_cell_row *r)
{
    const NUM *restrict x = r->x, *restrict q = r->q;
    NUM *restrict h = r->h, *restrict after = r->saved, *restrict before = after + r->hidden;
    IVDEP
    for (int64_t k = 0; k < r->hidden; k++) {
        NUM y = x[k] + q[k];
        before[k] = h[k];
        after[k] = h[k] = y < 0 ? 0 : y; /* a NaN stays */
    }
}

static void F(gru_step)(const ont_cell_row *r)
{
    const int64_t n = r->hidden;
    const NUM *restrict x = r->x, *restrict q = r->q, *restrict bias = r->bias;
    NUM *restrict h = r->h, *restrict z = r->saved, *restrict reset = z + n, *restrict fresh = z + 2 * n;
    NUM *restrict part = z + 3 * n, *restrict before = z + 4 * n;
    for (int64_t k = 0; k < n; k++) part[k] = q[RUN(2)];
    if (bias)
        for (int64_t k = 0; k < n; k++) part[k] += bias[k];
    IVDEP
    for (int64_t k = 0; k < n; k++) {
        z[k] = SIGMOID(x[k] + q[k]);
        reset[k] = SIGMOID(x[RUN(1)] + q[RUN(1)]);
    }
    IVDEP
    for (int64_t k = 0; k < n; k++) {
        fresh[k] = TANH(x[RUN(2)] + reset[k] * part[k]);
        before[k] = h[k];
        h[k] = (1 - z[k]) * fresh[k] + z[k] * before[k];
    }
}

static void F(lstm_step)(const ont_cell_row *r)
{
    const int64_t n = r->hidden;
    const NUM *restrict x = r->x, *restrict q = r->q;
    NUM *restrict h = r->h, *restrict c = r->c, *restrict i = r->saved, *restrict o = i + n, *restrict f = i + 2 * n;
    NUM *restrict g = i + 3 * n, *restrict c_before = i + 4 * n, *restrict bounded = i + 5 * n;
    NUM *restrict before = i + 6 * n;
    IVDEP
    for (int64_t k = 0; k < n; k++) {
        i[k] = SIGMOID(x[k] + q[k]);
        o[k] = SIGMOID(x[RUN(1)] + q[RUN(1)]);
        f[k] = SIGMOID(x[RUN(2)] + q[RUN(2)]);
    }
    IVDEP
    for (int64_t k = 0; k < n; k++) {
        g[k] = TANH(x[RUN(3)] + q[RUN(3)]);
        c_before[k] = c[k];
        before[k] = h[k];
        c[k] = f[k] * c_before[k] + i[k] * g[k];
        bounded[k] = TANH(c[k]);
        h[k] = o[k] * bounded[k];
    }
}

/* dh += dr + dy: all of the gradient of h'. */
INLINE void F(add_up)(const ont_cell_grad_row *r)
{
    const NUM *restrict dr = r->dr, *restrict dy = r->dy;
    NUM *restrict dh = r->dh;
    for (int64_t k = 0; k < r->hidden; k++) dh[k] += dr[k];
    if (dy)
        for (int64_t k = 0; k < r->hidden; k++) dh[k] += dy[k];
}

INLINE void F(copy)(const ont_cell_grad_row *r, int64_t count)
{
    if (r->dx) memcpy(r->dx, r->dq, (size_t)count * sizeof(NUM));
}

static void F(tanh_grad)(const ont_cell_grad_row *r)
{
    const NUM *restrict saved = r->saved;
    NUM *restrict dh = r->dh, *restrict dq = r->dq;
    F(add_up)(r);
    IVDEP
    for (int64_t k = 0; k < r->hidden; k++) {
        dq[k] = dh[k] * (1 - saved[k] * saved[k]);
        dh[k] = 0;
    }
    F(copy)(r, r->hidden);
}

static void F(relu_grad)(const ont_cell_grad_row *r)
{
    const NUM *restrict saved = r->saved;
    NUM *restrict dh = r->dh, *restrict dq = r->dq;
    F(add_up)(r);
    IVDEP
    for (int64_t k = 0; k < r->hidden; k++) {
        dq[k] = saved[k] <= 0 ? 0 : dh[k]; /* as torch: where the result is NaN, it goes through */
        dh[k] = 0;
    }
    F(copy)(r, r->hidden);
}

static void F(gru_grad)(const ont_cell_grad_row *r)
{
    const int64_t n = r->hidden;
    const NUM *restrict z = r->saved, *restrict reset = z + n, *restrict fresh = z + 2 * n, *restrict part = z + 3 * n;
    const NUM *restrict before = z + 4 * n;
    NUM *restrict dh = r->dh, *restrict dx_z = r->dx, *restrict dx_reset = dx_z + n, *restrict dx_fresh = dx_z + 2 * n;
    NUM *restrict dq_z = r->dq, *restrict dq_reset = dq_z + n, *restrict dq_fresh = dq_z + 2 * n;
    F(add_up)(r);
    IVDEP
    for (int64_t k = 0; k < n; k++) {
        NUM dn = dh[k] * (1 - z[k]) * (1 - fresh[k] * fresh[k]);
        dx_z[k] = dq_z[k] = dh[k] * (before[k] - fresh[k]) * z[k] * (1 - z[k]);
        dx_reset[k] = dq_reset[k] = dn * part[k] * reset[k] * (1 - reset[k]);
        dx_fresh[k] = dn;
        dq_fresh[k] = dn * reset[k];
        dh[k] *= z[k];
    }
}

static void F(lstm_grad)(const ont_cell_grad_row *r)
{
    const int64_t n = r->hidden;
    const NUM *restrict i = r->saved, *restrict o = i + n, *restrict f = i + 2 * n, *restrict g = i + 3 * n;
    const NUM *restrict c_before = i + 4 * n, *restrict bounded = i + 5 * n;
    NUM *restrict dh = r->dh, *restrict dc = r->dc, *restrict di = r->dq, *restrict d_o = di + n;
    NUM *restrict df = di + 2 * n, *restrict dg = di + 3 * n;
    F(add_up)(r);
    IVDEP
    for (int64_t k = 0; k < n; k++) {
        NUM dcell = dc[k] + dh[k] * o[k] * (1 - bounded[k] * bounded[k]);
        di[k] = dcell * g[k] * i[k] * (1 - i[k]);
        d_o[k] = dh[k] * bounded[k] * o[k] * (1 - o[k]);
        df[k] = dcell * c_before[k] * f[k] * (1 - f[k]);
        dg[k] = dcell * i[k] * (1 - g[k] * g[k]);
        dc[k] = dcell * f[k];
        dh[k] = 0;
    }
    F(copy)(r, 4 * n);
}

#undef RUN
#undef IVDEP
#undef NUM
#undef F
#undef SIGMOID
#undef TANH
