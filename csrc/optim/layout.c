/*
 * Iteration order of operands with different strides: that of the parameter's memory, so that a dense parameter and
 * state created like it are one linear range whatever their dims are. Called by py/ while it describes tensors.
 */
#include "optim/optim.h"

#include <string.h>

#include "base/assert.h"

static bool same_strides(const ont_optim_layout *l, const void *const data[], int outer, int inner)
{
    for (int k = 0; k < ONT_OPERAND_COUNT; k++)
        if (data[k] && l->strides[k][outer] != l->dims[inner] * l->strides[k][inner]) return false;
    return true;
}

static void swap_dims(ont_optim_layout *l, int a, int b)
{
    int64_t dim = l->dims[a];
    l->dims[a] = l->dims[b];
    l->dims[b] = dim;
    for (int k = 0; k < ONT_OPERAND_COUNT; k++) {
        int64_t stride = l->strides[k][a];
        l->strides[k][a] = l->strides[k][b];
        l->strides[k][b] = stride;
    }
}

/* Sorts dims by decreasing stride of the parameter; stable. */
static void sort_dims(ont_optim_layout *l)
{
    for (int i = 1; i < l->rank; i++)
        for (int j = i; j > 0 && l->strides[ONT_OPERAND_PARAM][j] > l->strides[ONT_OPERAND_PARAM][j - 1]; j--)
            swap_dims(l, j, j - 1);
}

static void merge_dims(ont_optim_layout *l, const void *const data[])
{
    int out = 0;
    for (int i = 1; i < l->rank; i++) {
        if (same_strides(l, data, out, i)) {
            l->dims[out] *= l->dims[i];
            for (int k = 0; k < ONT_OPERAND_COUNT; k++) l->strides[k][out] = l->strides[k][i];
        } else {
            out++;
            l->dims[out] = l->dims[i];
            for (int k = 0; k < ONT_OPERAND_COUNT; k++) l->strides[k][out] = l->strides[k][i];
        }
    }
    if (l->rank) l->rank = out + 1;
}

/* Whether no two elements can share memory: each stride exceeds the extent of all dims with smaller strides. */
static bool is_injective(ont_optim_layout l, int k)
{
    for (int i = 1; i < l.rank; i++)
        for (int j = i; j > 0 && l.strides[k][j] > l.strides[k][j - 1]; j--) swap_dims(&l, j, j - 1);
    int64_t extent = 0;
    for (int i = l.rank - 1; i >= 0; i--) {
        if (l.strides[k][i] <= extent) return false;
        extent += (l.dims[i] - 1) * l.strides[k][i];
    }
    return true;
}

static bool is_flat(const ont_optim_layout *l, const void *const data[])
{
    for (int k = 0; l->rank && k < ONT_OPERAND_COUNT; k++)
        if (data[k] && l->strides[k][0] != 1) return false;
    return l->rank <= 1;
}

/* 8-bit state must be, since its scales are per block of consecutive elements. */
static bool is_row_major(const ont_optim_layout *l, int k)
{
    int64_t stride = 1;
    for (int i = l->rank - 1; i >= 0; i--) {
        if (l->strides[k][i] != stride) return false;
        stride *= l->dims[i];
    }
    return true;
}

bool ont_optim_only_grad_is_strided(const ont_optim_tensor *t)
{
    ONT_ASSERT(t->layout);
    for (int k = 0; k < ONT_OPERAND_COUNT; k++)
        if (k != ONT_OPERAND_GRAD && t->data[k] && !is_row_major(t->layout, k)) return false;
    return true;
}

ont_status ont_optim_make_layout(ont_optim *o, const ont_optim_tensor *t, int rank, const int64_t *dims,
                                 const int64_t *const strides[ONT_OPERAND_COUNT], const ont_optim_layout **layout)
{
    ont_optim_layout l = {0};
    const void *data[ONT_OPERAND_COUNT];
    for (int k = 0; k < ONT_OPERAND_COUNT; k++) data[k] = t->data[k];
    int64_t row_major[ONT_MAX_RANK], stride = 1;
    if (rank > ONT_MAX_RANK)
        return ont_fail(ONT_EUNSUPPORTED, "it has %d dims, at most %d are supported", rank, ONT_MAX_RANK);
    for (int i = rank - 1; i >= 0; i--) row_major[i] = stride, stride *= dims[i];
    for (int i = 0; i < rank; i++) {
        if (dims[i] == 1) continue;
        for (int k = 0; k < ONT_OPERAND_COUNT; k++) {
            l.strides[k][l.rank] = strides[k] ? strides[k][i] : row_major[i];
            if (data[k] && l.strides[k][l.rank] < 0) return ont_fail(ONT_EUNSUPPORTED, "it has a negative stride");
        }
        l.dims[l.rank++] = dims[i];
    }
    sort_dims(&l);
    merge_dims(&l, data);
    for (int k = 0; k < ONT_OPERAND_COUNT; k++) {
        if (!data[k] || k == ONT_OPERAND_GRAD) continue;
        if (!is_injective(l, k)) return ont_fail(ONT_EINVAL, "it or its state overlaps itself (an expanded tensor?)");
        if ((t->dtype[k] == ONT_INT8 || t->dtype[k] == ONT_UINT8) && !is_row_major(&l, k))
            return ont_fail(ONT_EUNSUPPORTED, "its 8-bit state has other strides than the parameter");
    }
    *layout = NULL;
    if (is_flat(&l, data)) return ONT_OK;
    ont_optim_layout *kept = ont_arena_alloc(&o->layouts, sizeof *kept);
    if (!kept) return ONT_ENOMEM;
    *kept = l;
    *layout = kept;
    return ONT_OK;
}
