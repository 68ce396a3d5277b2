/*
 * Iteration with broadcasting. See broadcast.h.
 */
#include "ops/support/broadcast.h"

#include <string.h>

#include "base/parallel.h"

enum {
    GRAIN = 8192, /* elements worth a thread */
    SHORT = 32,   /* rows of fewer elements are gathered into one, */
    TILE = 512,   /* of so many elements, */
    GATHERED = 4, /* for at most so many operands */
};

/* Whether dims d and d + 1 are one dim for every operand. */
static bool mergeable(const int64_t (*strides)[ONT_MAX_RANK], int n, const int64_t *dims, int d)
{
    for (int k = 0; k < n; k++)
        if (strides[k][d] != strides[k][d + 1] * dims[d + 1]) return false;
    return true;
}

/* Operand 0 is a result of this shape, or NULL. */
static void init(ont_bcast *b, const ont_node *node, int n_in, const ont_shape *shape, const ont_value *out)
{
    int64_t strides[ONT_BCAST_MAX][ONT_MAX_RANK], dims[ONT_MAX_RANK + 1] = {0};
    int64_t full[ONT_BCAST_MAX][ONT_MAX_RANK];
    int rank = 0;
    *b = (ont_bcast){.n = n_in + 1, .count = ont_shape_count(shape)};
    for (int k = 0; k < b->n; k++)
        ont_shape_broadcast_strides(k ? &node->inputs[k - 1].value->shape : shape, shape, full[k]);
    if (!out) memset(full[0], 0, sizeof full[0]);
    for (int d = 0; d < shape->rank; d++) {
        if (shape->dims[d] == 1) continue;
        dims[rank] = shape->dims[d];
        for (int k = 0; k < b->n; k++) strides[k][rank] = full[k][d];
        rank++;
        if (rank < 2 || !mergeable((const int64_t(*)[ONT_MAX_RANK])strides, b->n, dims, rank - 2)) continue;
        dims[rank - 2] *= dims[rank - 1];
        for (int k = 0; k < b->n; k++) strides[k][rank - 2] = strides[k][rank - 1];
        rank--;
    }
    b->inner = rank ? dims[rank - 1] : 1;
    b->rank = rank ? rank - 1 : 0;
    for (int k = 0; k < b->n; k++) {
        const ont_value *v = k ? node->inputs[k - 1].value : out;
        int64_t size = v ? (int64_t)ont_dtype_size(v->dtype) : 0;
        b->inner_stride[k] = rank ? strides[k][rank - 1] : 0;
        b->step[k] = b->inner_stride[k] * size;
        b->size[k] = size;
        b->dense[k] = b->inner_stride[k] == 1;
        for (int d = 0; d < b->rank; d++) b->strides[k][d] = strides[k][d] * size;
        for (int64_t d = b->rank - 1, length = b->inner * size; d >= 0; length *= dims[d--])
            b->dense[k] = b->dense[k] && b->strides[k][d] == length;
    }
    memcpy(b->dims, dims, (size_t)b->rank * sizeof *dims);
}

void ont_bcast_init(ont_bcast *b, const ont_node *node, int n_in)
{
    init(b, node, n_in, &node->outputs[0]->shape, node->outputs[0]);
}

void ont_bcast_init_over(ont_bcast *b, const ont_node *node, int n_in, const ont_shape *shape)
{
    init(b, node, n_in, shape, NULL);
}

typedef struct job {
    const ont_bcast *b;
    char *const *base;
    ont_bcast_row row;
    const void *context;
} job;

/* Copies the n elements from `first` on of operand k to contiguous memory. */
static void gather(const ont_bcast *b, int k, const char *base, int64_t first, int64_t n, void *out)
{
    int64_t index[ONT_MAX_RANK], row = first / b->inner, column = first % b->inner, step = b->step[k];
    for (int d = b->rank - 1; d >= 0; d--) {
        index[d] = row % b->dims[d];
        row /= b->dims[d];
        base += index[d] * b->strides[k][d];
    }
    for (int64_t at = 0, m; at < n; at += m, column = 0) {
        const char *from = base + column * step;
        m = b->inner - column < n - at ? b->inner - column : n - at;
        switch (b->size[k]) {
#define COPY(bytes, type) \
    case bytes: \
        for (int64_t i = 0; i < m; i++) ((type *)out)[at + i] = *(const type *)(from + i * step); \
        break;
            COPY(1, uint8_t)
            COPY(2, uint16_t)
            COPY(4, uint32_t)
            COPY(8, uint64_t)
#undef COPY
        }
        for (int d = b->rank - 1; d >= 0; d--) {
            base += b->strides[k][d];
            if (++index[d] < b->dims[d]) break;
            base -= b->dims[d] * b->strides[k][d];
            index[d] = 0;
        }
    }
}

static bool has_short_rows(const ont_bcast *b)
{
    bool fits = b->rank && b->inner < SHORT && b->n <= GATHERED && b->dense[0];
    for (int k = 0; fits && k < b->n; k++)
        fits = b->size[k] == 1 || b->size[k] == 2 || b->size[k] == 4 || b->size[k] == 8;
    return fits;
}

/* For short rows: operands that are not dense are gathered, TILE elements at a time. */
static void walk_tiles(const job *j, int64_t first, int64_t last)
{
    ont_bcast flat = *j->b;
    uint64_t gathered[GATHERED][TILE];
    char *at[GATHERED];
    for (int k = 0; k < flat.n; k++) {
        flat.inner_stride[k] = 1;
        flat.step[k] = flat.size[k];
    }
    for (int64_t n; first < last; first += n) {
        n = last - first < TILE ? last - first : TILE;
        for (int k = 0; k < flat.n; k++) {
            at[k] = flat.dense[k] ? j->base[k] + first * flat.size[k] : (char *)gathered[k];
            if (!flat.dense[k]) gather(j->b, k, j->base[k], first, n, gathered[k]);
        }
        j->row(j->context, &flat, at, n);
    }
}

static void walk(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_bcast *b = j->b;
    if (has_short_rows(b)) {
        walk_tiles(j, first, last);
        return;
    }
    int64_t index[ONT_MAX_RANK], row = first / b->inner, column = first % b->inner;
    char *at[ONT_BCAST_MAX], *start[ONT_BCAST_MAX];
    for (int k = 0; k < b->n; k++) start[k] = j->base[k];
    for (int d = b->rank - 1; d >= 0; d--) {
        index[d] = row % b->dims[d];
        row /= b->dims[d];
        for (int k = 0; k < b->n; k++) start[k] += index[d] * b->strides[k][d];
    }
    while (first < last) {
        int64_t n = b->inner - column;
        if (n > last - first) n = last - first;
        for (int k = 0; k < b->n; k++) at[k] = start[k] + column * b->step[k];
        j->row(j->context, b, at, n);
        first += n;
        column = 0;
        for (int d = b->rank - 1; d >= 0; d--) {
            for (int k = 0; k < b->n; k++) start[k] += b->strides[k][d];
            if (++index[d] < b->dims[d]) break;
            for (int k = 0; k < b->n; k++) start[k] -= b->dims[d] * b->strides[k][d];
            index[d] = 0;
        }
    }
}

void ont_bcast_range(const ont_bcast *b, char *const *base, ont_bcast_row row, const void *context, int64_t first,
                     int64_t last)
{
    job j = {b, base, row, context};
    walk(&j, first, last);
}

void ont_bcast_run(const ont_bcast *b, char *const *base, ont_bcast_row row, const void *context)
{
    job j = {b, base, row, context};
    if (b->count) ont_parallel(b->count, GRAIN, walk, &j);
}
