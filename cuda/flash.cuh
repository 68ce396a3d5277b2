/*
 * What the attention kernels share: where matrices of a view lie, the leads that share an operand, scores behind their
 * masks, and which probabilities dropout keeps.
 */
#ifndef ONT_CUDA_FLASH_CUH
#define ONT_CUDA_FLASH_CUH

#include "launch.cuh"

#include "flash.h"
#include "math.cuh"

/* Offset in elements of matrix number `l` of a view. */
ONT_DEVICE int64_t flash_at(const ont_flash &f, int view, int64_t l)
{
    int64_t at = f.view[view].offset;
    for (int d = f.n_leads - 1; d >= 0; d--) {
        at += l % f.leads[d] * f.view[view].lead[d];
        l /= f.leads[d];
    }
    return at;
}

/*
 * Leads that share an operand (its stride is 0) have one gradient, which one block adds up over them. `mask` has their
 * bits; lead number from the numbers among those apart and among those shared.
 */
ONT_DEVICE int64_t flash_lead(const ont_flash &f, unsigned mask, int64_t apart, int64_t shared)
{
    int64_t lead = 0, step = 1;
    for (int d = f.n_leads - 1; d >= 0; d--) {
        int64_t *from = mask >> d & 1 ? &shared : &apart;
        lead += *from % f.leads[d] * step;
        *from /= f.leads[d];
        step *= f.leads[d];
    }
    return lead;
}

static inline unsigned flash_shared_leads(const ont_flash *f, int view)
{
    unsigned mask = 0;
    for (int d = 0; d < f->n_leads; d++)
        if (!f->view[view].lead[d]) mask |= 1u << d;
    return mask;
}

static inline int64_t flash_count(const ont_flash *f, unsigned mask, bool shared)
{
    int64_t n = 1;
    for (int d = 0; d < f->n_leads; d++)
        if ((mask >> d & 1) == (unsigned)shared) n *= f->leads[d];
    return n;
}

/* Columns that row i sees. */
ONT_DEVICE int64_t flash_visible(const ont_flash &f, int64_t i)
{
    if (!f.causal) return f.columns;
    int64_t n = i + f.diagonal + 1;
    return n < 0 ? 0 : n > f.columns ? f.columns : n;
}

/* The first row that sees column j. */
ONT_DEVICE int64_t flash_first_row(const ont_flash &f, int64_t j)
{
    int64_t i = f.causal ? j - f.diagonal : 0;
    return i < 0 ? 0 : i;
}

template <class C> ONT_DEVICE C flash_number(const void *p, int dtype, int64_t i)
{
    switch (dtype) {
    case ONT_FLOAT32: return (C)((const float *)p)[i];
    case ONT_FLOAT64: return (C)((const double *)p)[i];
    case ONT_FLOAT16: return (C)ont_load((const ont_f16 *)p + i);
    default: return (C)ont_load((const ont_bf16 *)p + i);
    }
}

template <class C> ONT_DEVICE void flash_put_number(void *p, int dtype, int64_t i, C v)
{
    switch (dtype) {
    case ONT_FLOAT32: ((float *)p)[i] = (float)v; break;
    case ONT_FLOAT64: ((double *)p)[i] = (double)v; break;
    case ONT_FLOAT16: ont_store((ont_f16 *)p + i, (float)v); break;
    default: ont_store((ont_bf16 *)p + i, (float)v);
    }
}

/* What a lead's masks begin at. */
struct flash_masks {
    int64_t bias, keep;
};

ONT_DEVICE flash_masks flash_masks_of(const ont_flash &f, int64_t lead)
{
    flash_masks m = {f.bias ? flash_at(f, ONT_FLASH_BIAS, lead) : 0, f.keep ? flash_at(f, ONT_FLASH_KEEP, lead) : 0};
    return m;
}

ONT_DEVICE bool flash_replaced(const ont_flash &f, const flash_masks &m, int64_t i, int64_t j)
{
    if (!f.keep) return false;
    const ont_flash_view &v = f.view[ONT_FLASH_KEEP];
    return (f.keep[m.keep + i * v.row + j * v.column] != 0) != (f.keep_if != 0);
}

/* The score of row i and column j, both in range, whose scaled product is given. */
template <class C> ONT_DEVICE C flash_score(const ont_flash &f, const flash_masks &m, int64_t i, int64_t j, C s)
{
    if (f.bias) {
        const ont_flash_view &v = f.view[ONT_FLASH_BIAS];
        s += flash_number<C>(f.bias, f.bias_dtype, m.bias + i * v.row + j * v.column);
    }
    if (flash_replaced(f, m, i, j)) s = (C)f.fill;
    return f.causal && j > i + f.diagonal ? -(C)INFINITY : s;
}

/* N words of dropout's stream from word `at` on: as few runs of the generator as there are blocks of four. */
template <int N> ONT_DEVICE void flash_words(const ont_flash &f, int64_t at, uint32_t *words)
{
    uint32_t block[4];
    int64_t known = -1;
    ONT_UNROLL
    for (int n = 0; n < N; n++) {
        if ((at + n) >> 2 != known) {
            known = (at + n) >> 2;
            ont_philox(*f.seed, f.stream, (uint64_t)known, block);
        }
        int word = (int)(at + n) & 3;
        words[n] = word == 0 ? block[0] : word == 1 ? block[1] : word == 2 ? block[2] : block[3];
    }
}

template <class C> ONT_DEVICE bool flash_is_void(const ont_flash &f, C sum) { return f.zero_nan && !(sum > 0); }

/* Whether row i of a lead gives zeros and no gradient. */
ONT_DEVICE bool flash_is_empty(const ont_flash &f, int64_t lead, int64_t i)
{
    return f.empty && f.empty[flash_at(f, ONT_FLASH_EMPTY, lead) + i * f.view[ONT_FLASH_EMPTY].row];
}

#endif
