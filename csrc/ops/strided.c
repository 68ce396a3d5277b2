/*
 * Strided copies: dims merged, the innermost run copied whole where it is dense, 2-d tiles where the fast dims of the
 * two sides differ (a transpose), rows shared among threads.
 */
#include "ops/strided.h"

#include <string.h>

#include "base/parallel.h"

void ont_strided_init(ont_strided *s, const ont_shape *dims, const int64_t *from, int64_t from_offset,
                      const int64_t *to, int64_t to_offset, size_t size)
{
    int64_t bytes = (int64_t)size;
    *s = (ont_strided){.size = size, .from_offset = from_offset * bytes, .to_offset = to_offset * bytes, .count = 1};
    for (int d = 0; d < dims->rank; d++) {
        s->count *= dims->dims[d];
        if (dims->dims[d] == 1) continue;
        int r = s->rank;
        int64_t f = from[d] * bytes, t = to[d] * bytes, n = dims->dims[d];
        if (r && s->from[r - 1] == f * n && s->to[r - 1] == t * n) {
            s->dims[r - 1] *= n;
            s->from[r - 1] = f;
            s->to[r - 1] = t;
        } else {
            s->dims[r] = n;
            s->from[r] = f;
            s->to[r] = t;
            s->rank++;
        }
    }
}

/* n elements, `f` and `t` bytes apart. */
static void copy_row(char *to, int64_t t, const char *from, int64_t f, int64_t n, size_t size)
{
    if (f == (int64_t)size && t == f) {
        memcpy(to, from, (size_t)n * size);
        return;
    }
    switch (size) {
#define ROW(bytes, type) \
    case bytes: \
        if (f == 0 && t == bytes) { \
            type v = *(const type *)from; \
            for (int64_t i = 0; i < n; i++) ((type *)to)[i] = v; \
        } else { \
            for (int64_t i = 0; i < n; i++) *(type *)(to + i * t) = *(const type *)(from + i * f); \
        } \
        break;
        ROW(1, uint8_t)
        ROW(2, uint16_t)
        ROW(4, uint32_t)
        ROW(8, uint64_t)
#undef ROW
    default:
        for (int64_t i = 0; i < n; i++) memcpy(to + i * t, from + i * f, size);
    }
}

/* The last two dims where one side is dense along rows and the other along columns: tiles keep both in cache. */
static void copy_tile(const ont_strided *s, const char *from, char *to)
{
    enum { TILE = 16 };
    int r = s->rank - 2, c = s->rank - 1;
    for (int64_t i = 0; i < s->dims[r]; i += TILE)
        for (int64_t j = 0; j < s->dims[c]; j += TILE) {
            int64_t rows = s->dims[r] - i < TILE ? s->dims[r] - i : TILE;
            int64_t cols = s->dims[c] - j < TILE ? s->dims[c] - j : TILE;
            for (int64_t k = 0; k < rows; k++)
                copy_row(to + (i + k) * s->to[r] + j * s->to[c], s->to[c], from + (i + k) * s->from[r] + j * s->from[c],
                         s->from[c], cols, s->size);
        }
}

/* Rows of n equal elements, one behind the other. */
static void copy_repeats(char *to, const char *from, int64_t rows, int64_t n, size_t size)
{
#define REPEATS(type, times) \
    for (int64_t i = 0; i < rows; i++) \
        for (int64_t k = 0; k < (times); k++) ((type *)to)[i * (times) + k] = ((const type *)from)[i]
#define EACH(type) \
    switch (n) { \
    case 2: REPEATS(type, 2); break; \
    case 3: REPEATS(type, 3); break; \
    case 4: REPEATS(type, 4); break; \
    case 5: REPEATS(type, 5); break; \
    default: REPEATS(type, n); break; \
    }
    if (size == sizeof(uint32_t)) {
        EACH(uint32_t)
    } else {
        EACH(uint64_t)
    }
#undef EACH
#undef REPEATS
}

typedef struct job {
    const ont_strided *s;
    const char *from;
    char *to;
    int outer;    /* dims that are walked; the rest is one piece */
    bool repeats; /* a piece repeats one element a few times, and the next piece the next one */
} job;

static void copy_pieces(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_strided *s = j->s;
    int64_t index[ONT_MAX_RANK], rest = first;
    const char *from = j->from;
    char *to = j->to;
    for (int d = j->outer - 1; d >= 0; d--) {
        index[d] = rest % s->dims[d];
        rest /= s->dims[d];
        from += index[d] * s->from[d];
        to += index[d] * s->to[d];
    }
    for (int64_t piece = first, step; piece < last; piece += step) {
        step = 1;
        if (j->repeats) {
            int64_t left = s->dims[j->outer - 1] - index[j->outer - 1];
            step = last - piece < left ? last - piece : left;
            copy_repeats(to, from, step, s->dims[j->outer], s->size);
        } else if (s->rank - j->outer == 2)
            copy_tile(s, from, to);
        else if (s->rank > j->outer)
            copy_row(to, s->to[j->outer], from, s->from[j->outer], s->dims[j->outer], s->size);
        else
            memcpy(to, from, s->size);
        for (int64_t d = j->outer - 1, by = step; d >= 0; d--, by = 1) {
            from += by * s->from[d];
            to += by * s->to[d];
            if ((index[d] += by) < s->dims[d]) break;
            from -= s->dims[d] * s->from[d];
            to -= s->dims[d] * s->to[d];
            index[d] = 0;
        }
    }
}

void ont_strided_copy(const ont_strided *s, const void *from, void *to)
{
    if (!s->count) return;
    job j = {s, (const char *)from + s->from_offset, (char *)to + s->to_offset, s->rank ? s->rank - 1 : 0, false};
    int last = s->rank - 1;
    bool crossed = s->rank >= 2 && s->from[last] != (int64_t)s->size && s->from[last] != 0 && s->dims[last - 1] > 1;
    /* With outer dims left to share, a piece is a 2-d tile walk. */
    if (crossed && s->rank > 2) j.outer = s->rank - 2;
    enum { FEW = 16 };
    int64_t size = (int64_t)s->size;
    j.repeats = s->rank >= 2 && s->from[last] == 0 && s->to[last] == size && s->from[last - 1] == size &&
                s->to[last - 1] == size * s->dims[last] && s->dims[last] <= FEW && (size == 4 || size == 8);
    int64_t pieces = 1;
    for (int d = 0; d < j.outer; d++) pieces *= s->dims[d];
    int64_t per_piece = s->count / pieces;
    ont_parallel(pieces, per_piece ? 16384 / per_piece + 1 : 1, copy_pieces, &j);
}
