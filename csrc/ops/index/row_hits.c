/*
 * Sorts indices of rows, and divides the rows among threads by the number of their hits.
 */
#include "ops/index/row_hits.h"

/* 8 bits at a time, from the lowest. */
ont_row_hits ont_row_hits_sort(const ont_gather *s, const void *indices, ont_row_hit *work, bool every_row)
{
    ont_row_hit *to = work, *spare = work + s->count;
    bool sorted = true;
    for (int64_t i = 0; i < s->count; i++) {
        to[i] = (ont_row_hit)ont_gather_index(s, indices, i) << 32 | (ont_row_hit)i;
        sorted &= !i || to[i] >= to[i - 1];
    }
    for (int shift = 32; !sorted && (s->table - 1) >> (shift - 32); shift += 8) {
        uint32_t at[257] = {0};
        for (int64_t i = 0; i < s->count; i++) at[(to[i] >> shift & 255) + 1]++;
        for (int d = 1; d < 256; d++) at[d] += at[d - 1];
        for (int64_t i = 0; i < s->count; i++) spare[at[to[i] >> shift & 255]++] = to[i];
        ont_row_hit *other = to;
        to = spare;
        spare = other;
    }
    return (ont_row_hits){.at = to, .count = s->count, .rows = s->table, .every_row = every_row};
}

int64_t ont_row_hits_before(const ont_row_hits *h, int64_t row)
{
    int64_t low = 0, high = h->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (ont_hit_row(h->at[middle]) < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int64_t ont_row_hits_row_at(const ont_row_hits *h, int64_t unit)
{
    int64_t low = 0, high = h->rows;
    if (!unit) return 0;
    if (unit == ont_row_hits_units(h)) return high;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int64_t twice = ont_row_hits_before(h, middle) + ont_row_hits_before(h, middle + 1) +
                        (h->every_row ? 2 * middle + 1 : 0);
        if (twice < 2 * unit)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}
