/*
 * Detects tensors of a step that share memory, which would make results depend on the order of threads.
 *
 * Sorting all ranges in every step would cost more than the update of small tensors, so results are cached: written
 * ranges are sorted again only if one of them has moved, a gradient is searched only if it is not in the hash table,
 * and nothing is checked if no tensor has moved since the last step.
 */
#include <stdlib.h>
#include <string.h>

#include "optim/optim.h"

/* The byte range from the lowest to the highest element. */
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

/* Collects all written ranges in the order of the tensors. */
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

static void set_overlap(ont_optim_overlap *where, const ont_optim_range *a, const ont_optim_range *b)
{
    *where = (ont_optim_overlap){a->tensor, b->tensor, a->operand, b->operand};
}

/*
 * Two sparse ranges may interleave without sharing an element; they are taken to overlap only if they begin at the same
 * address.
 */
static bool overlaps_element(const ont_optim_range *a, const ont_optim_range *b)
{
    if (a->first >= b->last || b->first >= a->last) return false;
    return !(a->sparse && b->sparse) || a->first == b->first;
}

/* ranges: sorted by first. A range may span several others. */
static bool find_written(const ont_optim_range *ranges, size_t n, ont_optim_overlap *where)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = i + 1; j < n && ranges[j].first < ranges[i].last; j++)
            if (overlaps_element(&ranges[i], &ranges[j])) {
                set_overlap(where, &ranges[j], &ranges[i]);
                return true;
            }
    return false;
}

enum { MAX_PROBE_LENGTH = 8 };

/*
 * The hash-table entry of the range, or the entry to store it in: the first free one within MAX_PROBE_LENGTH, else the
 * first one.
 */
static ont_optim_range *find_entry(const ont_optim *o, const ont_optim_range *r, bool *known)
{
    size_t mask = o->grads_capacity - 1, hash = (size_t)((r->first >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> 32);
    ont_optim_range *free_entry = &o->grads_checked[hash & mask];
    *known = true;
    for (size_t i = 0; i < MAX_PROBE_LENGTH; i++) {
        ont_optim_range *entry = &o->grads_checked[(hash + i) & mask];
        if (same_range(entry, r)) return entry;
        if (entry->first == 0) {
            free_entry = entry;
            break;
        }
    }
    *known = false;
    return free_entry;
}

static ont_status make_grads_table(ont_optim *o)
{
    size_t need = 64;
    while (need < 4 * o->n_tensors) need *= 2;
    if (need > o->grads_capacity) {
        ONT_TRY(ont_optim_reserve(&o->grads_checked, &o->grads_capacity, need, sizeof *o->grads_checked));
        o->n_checked = 0; /* all ranges are checked again */
    }
    return ONT_OK;
}

/* Whether the gradient has the element order of its parameter. */
static bool same_order(const ont_optim_layout *l)
{
    size_t size = l ? (size_t)l->rank * sizeof l->strides[0][0] : 0;
    return !l || !memcmp(l->strides[ONT_OPERAND_PARAM], l->strides[ONT_OPERAND_GRAD], size);
}

/*
 * Searches written ranges that overlap `grad`. They do not overlap each other, so one that begins before `grad` and
 * extends into it is the preceding one, or a sparse one of at most max_sparse_bytes.
 */
static bool find_grad(const ont_optim *o, const ont_optim_range *grad, ont_optim_overlap *where)
{
    const ont_optim_tensor *self = &o->tensors[grad->tensor];
    const ont_optim_range *sorted = o->sorted;
    uintptr_t from = grad->first > o->max_sparse_bytes ? grad->first - o->max_sparse_bytes : 0;
    size_t n = o->n_checked, low = 0, high = n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (sorted[middle].first < from) low = middle + 1;
        else high = middle;
    }
    for (size_t i = low ? low - 1 : 0; i < n && sorted[i].first < grad->last; i++) {
        bool in_place = sorted[i].tensor == grad->tensor && sorted[i].operand == ONT_OPERAND_PARAM &&
                        same_range(&sorted[i], grad) && same_order(self->layout) &&
                        self->dtype[ONT_OPERAND_GRAD] == self->dtype[ONT_OPERAND_PARAM];
        if (!in_place && overlaps_element(&sorted[i], grad)) {
            set_overlap(where, grad, &sorted[i]);
            return true;
        }
    }
    return false;
}

static bool check_grads(ont_optim *o, ont_optim_overlap *where)
{
    for (size_t i = 0; i < o->n_tensors; i++) {
        /* optimizer in backward: the gradient comes later */
        if (!o->tensors[i].count || !o->tensors[i].data[ONT_OPERAND_GRAD]) continue;
        ont_optim_range grad = range_of(&o->tensors[i], (uint32_t)i, ONT_OPERAND_GRAD);
        bool known;
        ont_optim_range *entry = find_entry(o, &grad, &known);
        if (known) continue;
        if (find_grad(o, &grad, where)) return true;
        *entry = grad;
    }
    return false;
}

/* Checks all written ranges. */
static ont_status check_written(ont_optim *o, size_t n, bool *found, ont_optim_overlap *where)
{
    ONT_TRY(ont_optim_reserve(&o->checked, &o->checked_capacity, n, sizeof *o->checked));
    ONT_TRY(ont_optim_reserve(&o->sorted, &o->sorted_capacity, n, sizeof *o->sorted));
    memcpy(o->checked, o->ranges, n * sizeof *o->ranges);
    memcpy(o->sorted, o->ranges, n * sizeof *o->ranges);
    memset(o->grads_checked, 0, o->grads_capacity * sizeof *o->grads_checked);
    qsort(o->sorted, n, sizeof *o->sorted, by_first);
    o->max_sparse_bytes = 0;
    for (size_t i = 0; i < n; i++)
        if (o->sorted[i].sparse && o->sorted[i].last - o->sorted[i].first > o->max_sparse_bytes)
            o->max_sparse_bytes = o->sorted[i].last - o->sorted[i].first;
    *found = find_written(o->sorted, n, where);
    return ONT_OK;
}

/* Whether all tensors have the addresses of the last step, which was checked. */
static bool same_as_last_step(const ont_optim *o)
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
    bool found = false;
    *overlaps = false;
    o->overlap_checked = same_as_last_step(o);
    if (o->overlap_checked) return ONT_OK;
    ONT_TRY(make_grads_table(o));
    ONT_TRY(collect(o, &n));
    if (!unchanged(o, n)) {
        o->n_checked = 0;
        ONT_TRY(check_written(o, n, &found, where));
        o->n_checked = n;
    }
    found = found || check_grads(o, where);
    if (found) o->n_checked = 0;
    o->overlap_checked = !found;
    *overlaps = found;
    return ONT_OK;
}

bool ont_optim_is_written(const ont_optim *o, uintptr_t first, uintptr_t last, uint32_t own, ont_optim_overlap *where)
{
    uintptr_t from = first > o->max_sparse_bytes ? first - o->max_sparse_bytes : 0;
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
