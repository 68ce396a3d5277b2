/*
 * Adam on bfloat16, a vector of 32 elements at a time. Part of optim.inc.c where that is compiled for AVX-512BW. The
 * plain loop of optim_rules.h spends a quarter of its time on rounding; here two vectors of results become one before
 * they are rounded, in 16-bit lanes. The numbers are those of the plain loop.
 */

INLINE __m512 adam_even(__m512i words)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

INLINE __m512 adam_odd(__m512i words)
{
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
}

/* Rounds to nearest even as bf16_above() does, which says why NaN needs no case: up where the lower half, or one more
 * of it where the upper half is odd, is above 0x8000. */
INLINE __m512i adam_pack(__m512 even, __m512 odd)
{
    enum { SELECT = 0xca, OR_AND = 0xf8 };
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000), one = _mm512_set1_epi16(1);
    __m512i e = _mm512_castps_si512(even), o = _mm512_castps_si512(odd);
    __m512i high = _mm512_ternarylogic_epi32(upper, o, _mm512_srli_epi32(e, 16), SELECT);
    __m512i low = _mm512_ternarylogic_epi32(upper, _mm512_slli_epi32(o, 16), e, SELECT);
    __m512i rest = _mm512_ternarylogic_epi32(low, high, one, OR_AND);
    __mmask32 up = _mm512_cmpgt_epu16_mask(rest, _mm512_set1_epi16((short)0x8000));
    return _mm512_mask_add_epi16(high, up, high, one);
}

/* As adam_rule(). */
INLINE void adam_vector(const coefficients_bf16 *c, __m512 *x, __m512 g, __m512 *m, __m512 *v, bool l2)
{
    const __m512 scale = _mm512_set1_ps(c->grad);
    g = l2 ? _mm512_fmadd_ps(g, scale, _mm512_mul_ps(_mm512_set1_ps(c->l2), *x)) : _mm512_mul_ps(g, scale);
    *m = _mm512_fmadd_ps(_mm512_set1_ps(c->one_minus_beta1), _mm512_sub_ps(g, *m), *m);
    __m512 square = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(c->one_minus_beta2), g), g);
    *v = _mm512_fmadd_ps(_mm512_set1_ps(c->beta2), *v, square);
    __m512 below = _mm512_add_ps(_mm512_sqrt_ps(*v), _mm512_set1_ps(c->eps));
    __m512 step = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(c->rate), *m), below);
    __m512 kept = _mm512_fmsub_ps(*x, _mm512_set1_ps(c->keep_before), step);
    *x = _mm512_mul_ps(kept, _mm512_set1_ps(c->keep_after));
}

INLINE void adam_vectors(const coefficients_bf16 c, int64_t n, uint16_t *p, const uint16_t *grad, uint16_t *m,
                         uint16_t *v, bool l2)
{
    for (int64_t i = 0; i < n; i += ADAM_VECTOR) {
        __m512i words = _mm512_loadu_si512(p + i), g = _mm512_loadu_si512(grad + i);
        __m512 xe = adam_even(words), xo = adam_odd(words);
        words = _mm512_loadu_si512(m + i);
        __m512 me = adam_even(words), mo = adam_odd(words);
        words = _mm512_loadu_si512(v + i);
        __m512 ve = adam_even(words), vo = adam_odd(words);
        adam_vector(&c, &xe, adam_even(g), &me, &ve, l2);
        adam_vector(&c, &xo, adam_odd(g), &mo, &vo, l2);
        _mm512_storeu_si512(m + i, adam_pack(me, mo));
        _mm512_storeu_si512(v + i, adam_pack(ve, vo));
        _mm512_storeu_si512(p + i, adam_pack(xe, xo));
    }
}

/* Whole vectors here, the rest and AMSGrad there. */
static void adam_wide_bf16(const ont_update *u, int64_t n, void *param, const void *grad, void *const *state,
                           double *sums)
{
    int64_t whole = u->flags & ONT_UPDATE_AMSGRAD ? 0 : n - n % ADAM_VECTOR;
    uint16_t *p = param, *m = state[0], *v = state[1];
    const uint16_t *g = grad;
    if (u->l2 != 0) adam_vectors(rounded_bf16(u), whole, p, g, m, v, true);
    else adam_vectors(rounded_bf16(u), whole, p, g, m, v, false);
    void *const rest[ONT_RULE_STATES] = {m + whole, v + whole, u->flags & ONT_UPDATE_AMSGRAD ? state[2] : NULL};
    if (whole < n) adam_bf16(u, n - whole, p + whole, g + whole, rest, sums);
}
