/*
 * Tells whether tensors of a step share memory in a way that makes the result depend on the order of the threads.
 * Sorting all ranges would cost more than the update of small tensors, so what was found clear is remembered: written
 * ranges are sorted again only when one has moved, and a gradient is looked up only where it has not been seen before;
 * where nothing at all has moved since the last step, nothing is looked at.
 */
#include <stdlib.h>
#include <string.h>

#include "optim/optim.h"

/* The bytes between the lowest and the highest element. */
static ont_optim_range range_of(const ont_optim_tensor *t, uint32_t index, int k)
{
    size_t size = ont_dtype_size(t->dtype[k]);
    int64_t span = t->count;
    const ont_optim_layout *l = t->layout;
    if (l) {
        span = 1;
        for (int d = 0; d < l->rank; d++) span += (l->dims[d] - 1) * l->strides[k][d];
    }
    uintptr_t first = (uintptr_t)t->data[k];
    return (ont_optim_range){first, first + (size_t)span * size, index, (uint8_t)k, span != t->count};
}

static bool same_range(const ont_optim_range *a, const ont_optim_range *b)
{
    return a->first == b->first && a->last == b->last;
}

static bool is_written(const ont_optim_tensor *t, int k)
{
    return k != ONT_OPERAND_GRAD && t->data[k] && t->count;
}

/* All written ranges, in the order of the tensors. */
static ont_status collect(ont_optim *o, size_t *count)
{
    size_t n = 0;
    ONT_TRY(ont_optim_reserve(&o->ranges, &o->ranges_capacity, o->n_tensors * ONT_OPERAND_COUNT, sizeof *o->ranges));
    for (size_t i = 0; i < o->n_tensors; i++)
        for (int k = 0; k < ONT_OPERAND_COUNT; k++)
            if (is_written(&o->tensors[i], k)) o->ranges[n++] = range_of(&o->tensors[i], (uint32_t)i, k);
    *count = n;
    return ONT_OK;
}

static bool unchanged(const ont_optim *o, size_t n)
{
    if (n != o->n_checked) return false;
    for (size_t i = 0; i < n; i++)
        if (!same_range(&o->ranges[i], &o->checked[i])) return false;
    return true;
}

static int by_first(const void *a, const void *b)
{
    uintptr_t x = ((const ont_optim_range *)a)->first, y = ((const ont_optim_range *)b)->first;
    return x < y ? -1 : x > y;
}

static void tell(ont_optim_overlap *where, const ont_optim_range *a, const ont_optim_range *b)
{
    *where = (ont_optim_overlap){a->tensor, b->tensor, a->operand, b->operand};
}

/* Two strided tensors may interleave without sharing an element; then only the same first element is a clash. */
static bool clash(const ont_optim_range *a, const ont_optim_range *b)
{
    if (a->first >= b->last || b->first >= a->last) return false;
    return !(a->sparse && b->sparse) || a->first == b->first;
}

/* ranges: sorted by first. A range may reach past several others. */
static bool find_written(const ont_optim_range *ranges, size_t n, ont_optim_overlap *where)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = i + 1; j < n && ranges[j].first < ranges[i].last; j++)
            if (clash(&ranges[i], &ranges[j])) {
                tell(where, &ranges[j], &ranges[i]);
                return true;
            }
    return false;
}

enum { PROBES = 8 };

/* Where the range is remembered, or the place to remember it: near its hash, the first place if all are taken. */
static ont_optim_range *place_of(const ont_optim *o, const ont_optim_range *r, bool *known)
{
    size_t mask = o->grads_capacity - 1, hash = (size_t)((r->first >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> 32);
    ont_optim_range *free_place = &o->grads_checked[hash & mask];
    *known = true;
    for (size_t i = 0; i < PROBES; i++) {
        ont_optim_range *place = &o->grads_checked[(hash + i) & mask];
        if (same_range(place, r)) return place;
        if (place->first == 0) {
            free_place = place;
            break;
        }
    }
    *known = false;
    return free_place;
}

static ont_status make_grads_table(ont_optim *o)
{
    size_t need = 64;
    while (need < 4 * o->n_tensors) need *= 2;
    if (need > o->grads_capacity) {
        ONT_TRY(ont_optim_reserve(&o->grads_checked, &o->grads_capacity, need, sizeof *o->grads_checked));
        o->n_checked = 0; /* all is looked at again */
    }
    return ONT_OK;
}

/* Whether the gradient is walked as its parameter is. */
static bool same_order(const ont_optim_layout *l)
{
    size_t size = l ? (size_t)l->rank * sizeof l->strides[0][0] : 0;
    return !l || !memcmp(l->strides[ONT_OPERAND_PARAM], l->strides[ONT_OPERAND_GRAD], size);
}

/*
 * The written ranges do not clash. What starts before `grad` and reaches into it is then the neighbour before it, or
 * one of the interleaved ranges, of which the longest has `reach` bytes.
 */
static bool find_grad(const ont_optim *o, const ont_optim_range *grad, ont_optim_overlap *where)
{
    const ont_optim_tensor *own = &o->tensors[grad->tensor];
    const ont_optim_range *sorted = o->sorted;
    uintptr_t from = grad->first > o->reach ? grad->first - o->reach : 0;
    size_t n = o->n_checked, low = 0, high = n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (sorted[middle].first < from) low = middle + 1;
        else high = middle;
    }
    for (size_t i = low ? low - 1 : 0; i < n && sorted[i].first < grad->last; i++) {
        bool in_place = sorted[i].tensor == grad->tensor && sorted[i].operand == ONT_OPERAND_PARAM &&
                        same_range(&sorted[i], grad) && same_order(own->layout) &&
                        own->dtype[ONT_OPERAND_GRAD] == own->dtype[ONT_OPERAND_PARAM];
        if (!in_place && clash(&sorted[i], grad)) {
            tell(where, grad, &sorted[i]);
            return true;
        }
    }
    return false;
}

static bool check_grads(ont_optim *o, ont_optim_overlap *where)
{
    for (size_t i = 0; i < o->n_tensors; i++) {
        if (!o->tensors[i].count || !o->tensors[i].data[ONT_OPERAND_GRAD]) continue; /* or it comes later */
        ont_optim_range grad = range_of(&o->tensors[i], (uint32_t)i, ONT_OPERAND_GRAD);
        bool known;
        ont_optim_range *place = place_of(o, &grad, &known);
        if (known) continue;
        if (find_grad(o, &grad, where)) return true;
        *place = grad;
    }
    return false;
}

/* Looks at all written ranges anew. */
static ont_status check_written(ont_optim *o, size_t n, bool *bad, ont_optim_overlap *where)
{
    ONT_TRY(ont_optim_reserve(&o->checked, &o->checked_capacity, n, sizeof *o->checked));
    ONT_TRY(ont_optim_reserve(&o->sorted, &o->sorted_capacity, n, sizeof *o->sorted));
    memcpy(o->checked, o->ranges, n * sizeof *o->ranges);
    memcpy(o->sorted, o->ranges, n * sizeof *o->ranges);
    memset(o->grads_checked, 0, o->grads_capacity * sizeof *o->grads_checked);
    qsort(o->sorted, n, sizeof *o->sorted, by_first);
    o->reach = 0;
    for (size_t i = 0; i < n; i++)
        if (o->sorted[i].sparse && o->sorted[i].last - o->sorted[i].first > o->reach)
            o->reach = o->sorted[i].last - o->sorted[i].first;
    *bad = find_written(o->sorted, n, where);
    return ONT_OK;
}

/* Whether all tensors are where the last step had them, and that one's were clear. */
static bool as_last(const ont_optim *o)
{
    if (o->n_tensors != o->n_last) return false;
    for (size_t i = 0; i < o->n_tensors; i++) {
        const ont_optim_tensor *t = &o->tensors[i], *last = &o->last[i];
        if (t->layout || last->layout || memcmp(t, last, offsetof(ont_optim_tensor, stochastic))) return false;
    }
    return true;
}

ont_status ont_optim_check(ont_optim *o, bool *overlaps, ont_optim_overlap *where)
{
    size_t n;
    bool bad = false;
    *overlaps = false;
    o->clear = as_last(o);
    if (o->clear) return ONT_OK;
    ONT_TRY(make_grads_table(o));
    ONT_TRY(collect(o, &n));
    if (!unchanged(o, n)) {
        o->n_checked = 0;
        ONT_TRY(check_written(o, n, &bad, where));
        o->n_checked = n;
    }
    bad = bad || check_grads(o, where);
    if (bad) o->n_checked = 0;
    o->clear = !bad;
    *overlaps = bad;
    return ONT_OK;
}

bool ont_optim_is_written(const ont_optim *o, uintptr_t first, uintptr_t last, uint32_t own, ont_optim_overlap *where)
{
    uintptr_t from = first > o->reach ? first - o->reach : 0;
    size_t low = 0, high = o->n_checked;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (o->sorted[middle].first < from) low = middle + 1;
        else high = middle;
    }
    for (size_t i = low ? low - 1 : 0; i < o->n_checked && o->sorted[i].first < last; i++) {
        const ont_optim_range *r = &o->sorted[i];
        if (r->last <= first || (r->tensor == own && r->operand == ONT_OPERAND_PARAM)) continue;
        *where = (ont_optim_overlap){.other_tensor = r->tensor, .other_operand = r->operand};
        return true;
    }
    return false;
}
