/*
 * The update rules for one storage type. Part of optim.inc.c, which includes it once per type with these set:
 *   S(name)   name with the storage's suffix        STORED  type in memory
 *   NUM       type of the arithmetic                GET(x), PUT(x)  between the two
 *   UNIT      elements in a word, which get_<type> and put_<type> take together
 * Plain loops over independent elements, which the compiler vectorises; formulas and sources in csrc/optim/rules.c.
 */

typedef struct S(coefficients) {
    NUM grad, l2, keep_before, keep_after, rate, beta1, beta2, eps, one_minus_beta1, one_minus_beta2, decay,
        correct;
} S(coefficients);

/* A NaN without a payload: see PUT for bfloat16. */
INLINE NUM S(number)(double x)
{
    return x != x ? (NUM)NAN : (NUM)x;
}

static S(coefficients) S(rounded)(const ont_update *u)
{
    return (S(coefficients)){
        S(number)(u->grad), S(number)(u->l2), S(number)(u->keep_before), S(number)(u->keep_after), S(number)(u->rate),
        S(number)(u->beta1), S(number)(u->beta2), S(number)(u->eps), S(number)(u->one_minus_beta1),
        S(number)(u->one_minus_beta2), S(number)(u->decay), S(number)(u->correct)};
}

/* One element of a rule: parameter, gradient and states as numbers, to be changed in place. */
typedef struct S(element) {
    NUM x, g, s[ONT_RULE_STATES];
} S(element);

/*
 * Runs `rule` over all elements. `states` and `rule` are constants where this is inlined. Elements come in units of
 * what fills a word, which for bfloat16 makes loads and stores a shift or a mask: packing single ones costs a third
 * more. Streaming stores take 15% longer here: every line that is written has been read.
 */
INLINE void S(each)(const S(coefficients) c, int64_t n, STORED *restrict p, const STORED *grad, void *const *state,
                    int states, void (*rule)(const S(coefficients) *c, S(element) *e))
{
    STORED *restrict s0 = states > 0 ? state[0] : NULL;
    STORED *restrict s1 = states > 1 ? state[1] : NULL;
    STORED *restrict s2 = states > 2 ? state[2] : NULL;
    int64_t whole = n - n % UNIT;
#pragma GCC ivdep
    for (int64_t i = 0; i < whole; i += UNIT) {
        NUM x[UNIT], g[UNIT], a[UNIT], b[UNIT], d[UNIT];
        S(get)(p + i, x);
        S(get)(grad + i, g);
        if (states > 0) S(get)(s0 + i, a);
        if (states > 1) S(get)(s1 + i, b);
        if (states > 2) S(get)(s2 + i, d);
        for (int k = 0; k < UNIT; k++) {
            S(element) e = {x[k], g[k], {states > 0 ? a[k] : 0, states > 1 ? b[k] : 0, states > 2 ? d[k] : 0}};
            rule(&c, &e);
            x[k] = e.x, a[k] = e.s[0], b[k] = e.s[1], d[k] = e.s[2];
        }
        if (states > 0) S(put)(s0 + i, a);
        if (states > 1) S(put)(s1 + i, b);
        if (states > 2) S(put)(s2 + i, d);
        S(put)(p + i, x);
    }
    if (whole < n) { /* a unit is two at most */
        int64_t i = whole;
        S(element) e = {GET(p[i]), GET(grad[i]),
                        {states > 0 ? GET(s0[i]) : 0, states > 1 ? GET(s1[i]) : 0, states > 2 ? GET(s2[i]) : 0}};
        rule(&c, &e);
        if (states > 0) s0[i] = PUT(e.s[0]);
        if (states > 1) s1[i] = PUT(e.s[1]);
        if (states > 2) s2[i] = PUT(e.s[2]);
        p[i] = PUT(e.x);
    }
}

/* each() for rules with states: AT_ONCE elements at a time, and every operand is prefetched one page ahead. */
INLINE void S(each_ahead)(const S(coefficients) c, int64_t n, STORED *p, const STORED *grad, void *const *state,
                          int states, void (*rule)(const S(coefficients) *c, S(element) *e))
{
    const size_t bytes = AT_ONCE * sizeof *p;
    int64_t i = 0;
    for (;; i += AT_ONCE) {
        void *s[ONT_RULE_STATES] = {NULL};
        for (int k = 0; k < states; k++) s[k] = (STORED *)state[k] + i;
        if (i + AT_ONCE > n) {
            S(each)(c, n - i, p + i, grad + i, s, states, rule);
            return;
        }
        ont_prefetch_read(grad + i, bytes);
        ont_prefetch_write(p + i, bytes);
        for (int k = 0; k < states; k++) ont_prefetch_write(s[k], bytes);
        S(each)(c, AT_ONCE, p + i, grad + i, s, states, rule);
    }
}

/* The gradient with its penalty; without one, an infinite parameter stays what it is. */
INLINE NUM S(penalised)(const S(coefficients) *c, const S(element) *e)
{
    NUM g = e->g * c->grad;
    return c->l2 != 0 ? g + c->l2 * e->x : g;
}

INLINE void S(adam_rule)(const S(coefficients) *c, S(element) *e, bool amsgrad, bool l2)
{
    NUM g = e->g * c->grad;
    if (l2) g += c->l2 * e->x;
    e->s[0] += c->one_minus_beta1 * (g - e->s[0]);
    NUM v = c->beta2 * e->s[1] + c->one_minus_beta2 * g * g;
    e->s[1] = v;
    if (amsgrad) e->s[2] = v = v < e->s[2] ? e->s[2] : v; /* NaN stays */
    e->x = (e->x * c->keep_before - c->rate * e->s[0] / (SQRT(v) + c->eps)) * c->keep_after;
}

INLINE void S(adam_plain)(const S(coefficients) *c, S(element) *e) { S(adam_rule)(c, e, false, false); }
INLINE void S(adam_l2)(const S(coefficients) *c, S(element) *e) { S(adam_rule)(c, e, false, true); }
INLINE void S(adam_most)(const S(coefficients) *c, S(element) *e) { S(adam_rule)(c, e, true, false); }
INLINE void S(adam_most_l2)(const S(coefficients) *c, S(element) *e) { S(adam_rule)(c, e, true, true); }

static void S(adam)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)sums;
    S(coefficients) c = S(rounded)(u);
    bool amsgrad = u->flags & ONT_UPDATE_AMSGRAD;
    if (amsgrad && u->l2 != 0) S(each_ahead)(c, n, param, grad, state, 3, S(adam_most_l2));
    else if (amsgrad) S(each_ahead)(c, n, param, grad, state, 3, S(adam_most));
    else if (u->l2 != 0) S(each_ahead)(c, n, param, grad, state, 2, S(adam_l2));
    else S(each_ahead)(c, n, param, grad, state, 2, S(adam_plain));
}

INLINE void S(lamb_element)(const S(coefficients) c, const STORED *p, const STORED *grad, STORED *m, STORED *v,
                            double *pp, double *uu)
{
    NUM x = GET(*p), g = GET(*grad) * c.grad, m1 = GET(*m), v1 = GET(*v);
    m1 += c.one_minus_beta1 * (g - m1);
    v1 = c.beta2 * v1 + c.one_minus_beta2 * g * g;
    *m = PUT(m1);
    *v = PUT(v1);
    NUM step = c.correct * m1 / (SQRT(v1) + c.eps) + c.decay * x;
    *pp += (double)x * (double)x;
    *uu += (double)step * (double)step;
}

/*
 * Moments, and the squared norms of the parameter and of the step u that lamb_apply() will take: summed in double, so
 * that the ratio of the two is the same float in whatever order and pieces memory is walked.
 */
static void S(lamb)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    S(coefficients) c = S(rounded)(u);
    const STORED *restrict p = param;
    const STORED *restrict gradient = grad;
    STORED *restrict m = state[0], *restrict v = state[1];
    for (int64_t done = 0; done < n; done += PIECE) {
        int64_t end = done + PIECE < n ? done + PIECE : n, i = done;
        double pp[LANES] = {0}, uu[LANES] = {0};
        for (; i + LANES <= end; i += LANES)
            for (int k = 0; k < LANES; k++)
                S(lamb_element)(c, p + i + k, gradient + i + k, m + i + k, v + i + k, &pp[k], &uu[k]);
        for (; i < end; i++) S(lamb_element)(c, &p[i], &gradient[i], &m[i], &v[i], &pp[0], &uu[0]);
        for (int lane = 0; lane < LANES; lane++) {
            sums[0] += pp[lane];
            sums[1] += uu[lane];
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

INLINE void S(sgd_plain)(const S(coefficients) *c, S(element) *e)
{
    e->x -= c->rate * S(penalised)(c, e);
}

INLINE void S(sgd_rule)(const S(coefficients) *c, S(element) *e, bool nesterov)
{
    NUM g = S(penalised)(c, e), b = c->beta1 * e->s[0] + c->one_minus_beta1 * g;
    e->s[0] = b;
    e->x -= c->rate * (nesterov ? g + c->beta2 * b : b);
}

INLINE void S(sgd_momentum)(const S(coefficients) *c, S(element) *e) { S(sgd_rule)(c, e, false); }
INLINE void S(sgd_nesterov)(const S(coefficients) *c, S(element) *e) { S(sgd_rule)(c, e, true); }

/* Whether the next AT_ONCE elements are all +0. For most gradients the first cache line decides. */
INLINE bool S(is_zero)(const STORED *x)
{
    enum { WORDS = ONT_CACHE_LINE / sizeof(uint64_t), LINE = ONT_CACHE_LINE / sizeof *x };
    for (int64_t at = 0; at < AT_ONCE; at += LINE) {
        uint64_t words[WORDS], any = 0;
        memcpy(words, x + at, sizeof words);
        for (int i = 0; i < WORDS; i++) any |= words[i];
        if (any) return false;
    }
    return true;
}

/*
 * Two streams and hardly any arithmetic: both are asked for a few lines at a time. Where the gradient is +0, as in most
 * rows of an embedding's, the parameter is what it was, and is neither read nor written.
 */
static void S(sgd_alone)(const S(coefficients) c, int64_t n, STORED *param, const STORED *grad)
{
    const bool skips = c.l2 == 0 && c.rate > 0 && c.rate < (NUM)INFINITY && c.grad > 0 && c.grad < (NUM)INFINITY;
    int64_t i = 0;
    for (; i + AT_ONCE <= n; i += AT_ONCE) {
        ont_prefetch_read(grad + i, AT_ONCE * sizeof *grad);
        if (skips && S(is_zero)(grad + i)) continue;
        ont_prefetch_write(param + i, AT_ONCE * sizeof *param);
        S(each)(c, AT_ONCE, param + i, grad + i, NULL, 0, S(sgd_plain));
    }
    S(each)(c, n - i, param + i, grad + i, NULL, 0, S(sgd_plain));
}

static void S(sgd)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)sums;
    S(coefficients) c = S(rounded)(u);
    if (!(u->flags & ONT_UPDATE_MOMENTUM)) S(sgd_alone)(c, n, param, grad);
    else if (u->flags & ONT_UPDATE_NESTEROV) S(each_ahead)(c, n, param, grad, state, 1, S(sgd_nesterov));
    else S(each_ahead)(c, n, param, grad, state, 1, S(sgd_momentum));
}

INLINE void S(adagrad_rule)(const S(coefficients) *c, S(element) *e)
{
    NUM g = S(penalised)(c, e);
    e->s[0] += g * g;
    e->x -= c->rate * g / (SQRT(e->s[0]) + c->eps);
}

static void S(adagrad)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)sums;
    S(each_ahead)(S(rounded)(u), n, param, grad, state, 1, S(adagrad_rule));
}

INLINE void S(lion_rule)(const S(coefficients) *c, S(element) *e)
{
    NUM g = e->g * c->grad, mixed = c->beta1 * e->s[0] + c->one_minus_beta1 * g;
    NUM sign = (NUM)(mixed > 0) - (NUM)(mixed < 0) + (mixed - mixed); /* NaN comes through, as in torch.sign */
    e->s[0] = c->beta2 * e->s[0] + c->one_minus_beta2 * g;
    e->x = e->x * c->keep_before - c->rate * sign;
}

static void S(lion)(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state, double *sums)
{
    (void)sums;
    S(each_ahead)(S(rounded)(u), n, param, grad, state, 1, S(lion_rule));
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
