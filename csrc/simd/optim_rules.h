/*
 * The update rules for one storage type. Part of optim.inc.c, which includes it once per type with these set:
 *   S(name)   name with the storage's suffix        STORED  type in memory
 *   NUM       type of the arithmetic                GET(x), PUT(x)  between the two
 * Plain loops over independent elements, which the compiler vectorises; formulas and sources in csrc/optim/rules.c.
 */

typedef struct S(coefficients) {
    NUM grad, l2, keep_before, keep_after, rate, beta1, beta2, eps, one_minus_beta1, one_minus_beta2, decay,
        correct;
} S(coefficients);

static S(coefficients) S(rounded)(const ont_update *u)
{
    return (S(coefficients)){(NUM)u->grad, (NUM)u->l2, (NUM)u->keep_before, (NUM)u->keep_after, (NUM)u->rate,
                             (NUM)u->beta1, (NUM)u->beta2, (NUM)u->eps, (NUM)u->one_minus_beta1,
                             (NUM)u->one_minus_beta2, (NUM)u->decay, (NUM)u->correct};
}

INLINE void S(adam_body)(const S(coefficients) c, int64_t n, STORED *restrict p, const STORED *grad, STORED *restrict m,
                         STORED *restrict v, STORED *restrict most, bool l2)
{
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
        NUM x = GET(p[i]), g = GET(grad[i]) * c.grad;
        if (l2) g += c.l2 * x;
        NUM m1 = GET(m[i]), v1 = GET(v[i]);
        m1 += c.one_minus_beta1 * (g - m1);
        v1 = c.beta2 * v1 + c.one_minus_beta2 * g * g;
        m[i] = PUT(m1);
        v[i] = PUT(v1);
        if (most) {
            NUM old = GET(most[i]);
            v1 = v1 < old ? old : v1; /* NaN stays */
            most[i] = PUT(v1);
        }
        x = x * c.keep_before - c.rate * m1 / (SQRT(v1) + c.eps);
        p[i] = PUT(x * c.keep_after);
    }
}

static void S(adam)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)sums;
    S(coefficients) c = S(rounded)(u);
    STORED *most = u->flags & ONT_UPDATE_AMSGRAD ? state[2] : NULL;
    if (most && u->l2 != 0) S(adam_body)(c, n, param, grad, state[0], state[1], most, true);
    else if (most) S(adam_body)(c, n, param, grad, state[0], state[1], most, false);
    else if (u->l2 != 0) S(adam_body)(c, n, param, grad, state[0], state[1], NULL, true);
    else S(adam_body)(c, n, param, grad, state[0], state[1], NULL, false);
}

INLINE void S(lamb_element)(const S(coefficients) c, const STORED *p, const STORED *grad, STORED *m, STORED *v,
                            NUM *pp, NUM *uu)
{
    NUM x = GET(*p), g = GET(*grad) * c.grad + c.l2 * x, m1 = GET(*m), v1 = GET(*v);
    m1 += c.one_minus_beta1 * (g - m1);
    v1 = c.beta2 * v1 + c.one_minus_beta2 * g * g;
    *m = PUT(m1);
    *v = PUT(v1);
    NUM step = c.correct * m1 / (SQRT(v1) + c.eps) + c.decay * x;
    *pp += x * x;
    *uu += step * step;
}

/* Moments, and the squared norms of the parameter and of the step u that lamb_apply() will take. */
static void S(lamb)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    S(coefficients) c = S(rounded)(u);
    const STORED *restrict p = param;
    const STORED *restrict gradient = grad;
    STORED *restrict m = state[0], *restrict v = state[1];
    for (int64_t done = 0; done < n; done += PIECE) {
        int64_t end = done + PIECE < n ? done + PIECE : n, i = done;
        NUM pp[LANES] = {0}, uu[LANES] = {0};
        for (; i + LANES <= end; i += LANES)
            for (int k = 0; k < LANES; k++)
                S(lamb_element)(c, p + i + k, gradient + i + k, m + i + k, v + i + k, &pp[k], &uu[k]);
        for (; i < end; i++) S(lamb_element)(c, &p[i], &gradient[i], &m[i], &v[i], &pp[0], &uu[0]);
        for (int lane = 0; lane < LANES; lane++) {
            sums[0] += (double)pp[lane];
            sums[1] += (double)uu[lane];
        }
    }
}

static void S(lamb_apply)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state,
                          double *sums)
{
    (void)grad;
    (void)sums;
    S(coefficients) c = S(rounded)(u);
    STORED *restrict p = param;
    const STORED *restrict m = state[0], *restrict v = state[1];
    for (int64_t i = 0; i < n; i++) {
        NUM x = GET(p[i]);
        NUM step = c.correct * GET(m[i]) / (SQRT(GET(v[i])) + c.eps) + c.decay * x;
        p[i] = PUT(x - c.rate * step);
    }
}

INLINE void S(sgd_body)(const S(coefficients) c, int64_t n, STORED *restrict p, const STORED *grad, STORED *restrict m,
                        bool nesterov)
{
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
        NUM x = GET(p[i]), g = GET(grad[i]) * c.grad + c.l2 * x;
        if (m) {
            NUM b = c.beta1 * GET(m[i]) + c.one_minus_beta1 * g;
            m[i] = PUT(b);
            g = nesterov ? g + c.beta2 * b : b;
        }
        p[i] = PUT(x - c.rate * g);
    }
}

static void S(sgd)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)sums;
    S(coefficients) c = S(rounded)(u);
    if (!(u->flags & ONT_UPDATE_MOMENTUM)) S(sgd_body)(c, n, param, grad, NULL, false);
    else if (u->flags & ONT_UPDATE_NESTEROV) S(sgd_body)(c, n, param, grad, state[0], true);
    else S(sgd_body)(c, n, param, grad, state[0], false);
}

static void S(adagrad)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)sums;
    S(coefficients) c = S(rounded)(u);
    STORED *restrict p = param, *restrict total = state[0];
    const STORED *gradient = grad;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
        NUM x = GET(p[i]), g = GET(gradient[i]) * c.grad + c.l2 * x, s = GET(total[i]) + g * g;
        total[i] = PUT(s);
        p[i] = PUT(x - c.rate * g / (SQRT(s) + c.eps));
    }
}

static void S(lion)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)sums;
    S(coefficients) c = S(rounded)(u);
    STORED *restrict p = param, *restrict m = state[0];
    const STORED *gradient = grad;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; i++) {
        NUM x = GET(p[i]), g = GET(gradient[i]) * c.grad, m1 = GET(m[i]);
        NUM mixed = c.beta1 * m1 + c.one_minus_beta1 * g;
        NUM sign = (NUM)(mixed > 0) - (NUM)(mixed < 0) + (mixed - mixed); /* NaN comes through, as in torch.sign */
        m[i] = PUT(c.beta2 * m1 + c.one_minus_beta2 * g);
        p[i] = PUT(x * c.keep_before - c.rate * sign);
    }
}

/* p = keep_before p + grad g; p is not read where keep_before is 0. */
INLINE void S(scale_body)(const S(coefficients) c, int64_t n, STORED *p, const STORED *grad, double *sums, bool add)
{
    NUM bad[LANES] = {0};
    int64_t i = 0;
#define SCALE_ELEMENT(i, lane) \
    do { \
        NUM g = GET(grad[i]), x = g * c.grad; \
        bad[lane] += g - g; /* NaN from an infinity or NaN */ \
        p[i] = PUT(add ? x + c.keep_before * GET(p[i]) : x); \
    } while (0)
    for (; i + LANES <= n; i += LANES)
#pragma GCC ivdep
        for (int lane = 0; lane < LANES; lane++) SCALE_ELEMENT(i + lane, lane);
    for (; i < n; i++) SCALE_ELEMENT(i, 0);
#undef SCALE_ELEMENT
    for (int lane = 0; lane < LANES; lane++) sums[0] += (double)bad[lane];
}

static void S(scale)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)state;
    S(coefficients) c = S(rounded)(u);
    if (u->keep_before != 0) S(scale_body)(c, n, param, grad, sums, true);
    else S(scale_body)(c, n, param, grad, sums, false);
}

/* In parts of NUM that stay exact to a few ulp; a part that overflowed or vanished is added again in double. */
static double S(sum_squares)(const void *from, int64_t n)
{
    const STORED *restrict x = from;
    double total = 0;
    for (int64_t done = 0; done < n; done += PIECE) {
        int64_t end = done + PIECE < n ? done + PIECE : n, i = done;
        NUM part[4 * LANES] = {0};
        for (; i + 4 * LANES <= end; i += 4 * LANES)
            for (int lane = 0; lane < 4 * LANES; lane++) {
                NUM a = GET(x[i + lane]);
                part[lane] += a * a;
            }
        for (; i < end; i++) part[0] += GET(x[i]) * GET(x[i]);
        for (int half = 2 * LANES; half; half /= 2)
            for (int lane = 0; lane < half; lane++) part[lane] += part[lane + half];
        double sum = (double)part[0];
        if (!(sum < 1e37 && sum > 1e-25)) {
            sum = 0;
            for (i = done; i < end; i++) sum += (double)GET(x[i]) * (double)GET(x[i]);
        }
        total += sum;
    }
    return total;
}
