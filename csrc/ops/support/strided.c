/*
 * Strided copies. Adjacent dims are merged; contiguous inner runs are copied at once; where source and destination are
 * contiguous along different dims (a transpose), 2-d tiles are copied. Rows are divided among threads.
 */
#include "ops/support/strided.h"

#include <string.h>

#include "base/parallel.h"
#include "simd/shuffle.h"

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

typedef uint32_t word4 __attribute__((vector_size(16)));
ONT_DEFINE_SHUFFLE(shuffle_words, word4, word4)

/* Copies n words to `to` that lie in the opposite order before and at `from`. */
static void reverse_words(char *to, const char *from, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        word4 v;
        memcpy(&v, from - (i + 3) * 4, sizeof v);
        v = shuffle_words(v, v, (word4){3, 2, 1, 0});
        memcpy(to + i * 4, &v, sizeof v);
    }
    for (; i < n; i++) memcpy(to + i * 4, from - i * 4, 4);
}

/* n elements, `f` and `t` bytes apart. */
static void copy_row(char *to, int64_t t, const char *from, int64_t f, int64_t n, size_t size)
{
    if (f == (int64_t)size && t == f) {
        memcpy(to, from, (size_t)n * size);
        return;
    }
    if (size == 4 && f == -4 && t == 4) {
        reverse_words(to, from, n);
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

/*
 * Four vectors of 32-bit elements, `f` bytes apart, become the columns of four rows, `t` bytes apart. Written for
 * vectors of 16 bytes, which every processor has.
 */
static void transpose4(char *to, int64_t t, const char *from, int64_t f)
{
    word4 a, b, c, d;
    memcpy(&a, from, sizeof a);
    memcpy(&b, from + f, sizeof b);
    memcpy(&c, from + 2 * f, sizeof c);
    memcpy(&d, from + 3 * f, sizeof d);
    word4 ab = shuffle_words(a, b, (word4){0, 4, 1, 5}), cd = shuffle_words(c, d, (word4){0, 4, 1, 5});
    word4 ab_high = shuffle_words(a, b, (word4){2, 6, 3, 7});
    word4 cd_high = shuffle_words(c, d, (word4){2, 6, 3, 7});
    a = shuffle_words(ab, cd, (word4){0, 1, 4, 5});
    b = shuffle_words(ab, cd, (word4){2, 3, 6, 7});
    c = shuffle_words(ab_high, cd_high, (word4){0, 1, 4, 5});
    d = shuffle_words(ab_high, cd_high, (word4){2, 3, 6, 7});
    memcpy(to, &a, sizeof a);
    memcpy(to + t, &b, sizeof b);
    memcpy(to + 2 * t, &c, sizeof c);
    memcpy(to + 3 * t, &d, sizeof d);
}

/* rows x cols elements of the last two dims. */
static void copy_block(const ont_strided *s, const char *from, char *to, int64_t rows, int64_t cols)
{
    int r = s->rank - 2, c = s->rank - 1;
    int64_t i = 0, whole = cols & ~(int64_t)3;
    if (s->size == 4 && s->from[r] == 4 && s->to[c] == 4)
        for (; i + 4 <= rows; i += 4) {
            const char *x = from + i * 4;
            char *y = to + i * s->to[r];
            for (int64_t j = 0; j < whole; j += 4) transpose4(y + j * 4, s->to[r], x + j * s->from[c], s->from[c]);
            for (int64_t j = whole; j < cols; j++)
                for (int k = 0; k < 4; k++) memcpy(y + k * s->to[r] + j * 4, x + j * s->from[c] + k * 4, 4);
        }
    for (; i < rows; i++)
        copy_row(to + i * s->to[r], s->to[c], from + i * s->from[r], s->from[c], cols, s->size);
}

enum { TILE = 16 };

/* Rows of the last two dims, where one side is contiguous along rows and the other along columns: tiles keep both in
 * the cache. */
static void copy_tiles(const ont_strided *s, const char *from, char *to, int64_t rows)
{
    int r = s->rank - 2, c = s->rank - 1;
    for (int64_t i = 0; i < rows; i += TILE)
        for (int64_t j = 0; j < s->dims[c]; j += TILE)
            copy_block(s, from + i * s->from[r] + j * s->from[c], to + i * s->to[r] + j * s->to[c],
                       rows - i < TILE ? rows - i : TILE, s->dims[c] - j < TILE ? s->dims[c] - j : TILE);
}

/* Rows of a few bytes. */
static void copy_short_rows(char *to, int64_t t, const char *from, int64_t f, int64_t rows, size_t bytes)
{
    switch (bytes) {
#define SHORT(n) \
    case n: \
        for (int64_t i = 0; i < rows; i++) memcpy(to + i * t, from + i * f, n); \
        break;
        SHORT(2) SHORT(4) SHORT(8) SHORT(12) SHORT(16) SHORT(20) SHORT(24) SHORT(28) SHORT(32) SHORT(40) SHORT(48)
        SHORT(64)
#undef SHORT
    default:
        for (int64_t i = 0; i < rows; i++) memcpy(to + i * t, from + i * f, bytes);
    }
}

/* Contiguous rows of n equal elements each. */
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
    int outer;       /* dims that are iterated over; the others make up a piece */
    bool repeats;    /* a piece repeats one element a few times, and the next piece the next element */
    bool short_rows; /* a piece is a contiguous row of a few bytes */
    int64_t rows;    /* copy_transposed(): rows of the last dim but one in a piece */
} job;

/* Sets `index` to that of piece `piece` in the first `dims` dims, and moves the pointers there. */
static void seek(const ont_strided *s, int dims, int64_t piece, int64_t *index, const char **from, char **to)
{
    for (int d = dims - 1; d >= 0; d--) {
        index[d] = piece % s->dims[d];
        piece /= s->dims[d];
        *from += index[d] * s->from[d];
        *to += index[d] * s->to[d];
    }
}

static void copy_transposed(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_strided *s = j->s;
    int r = s->rank - 2;
    int64_t index[ONT_MAX_RANK], blocks = (s->dims[r] + j->rows - 1) / j->rows;
    for (int64_t piece = first; piece < last; piece++) {
        const char *from = j->from;
        char *to = j->to;
        int64_t row = piece % blocks * j->rows, left = s->dims[r] - row;
        seek(s, r, piece / blocks, index, &from, &to);
        copy_tiles(s, from + row * s->from[r], to + row * s->to[r], left < j->rows ? left : j->rows);
    }
}

static void copy_pieces(void *context, int64_t first, int64_t last)
{
    const job *j = context;
    const ont_strided *s = j->s;
    int64_t index[ONT_MAX_RANK];
    const char *from = j->from;
    char *to = j->to;
    int walked = j->outer - 1; /* the innermost dim that is iterated over */
    seek(s, j->outer, first, index, &from, &to);
    for (int64_t piece = first, step; piece < last; piece += step) {
        step = 1;
        if (j->repeats || j->short_rows) {
            int64_t left = s->dims[walked] - index[walked];
            step = last - piece < left ? last - piece : left;
        }
        if (j->repeats)
            copy_repeats(to, from, step, s->dims[j->outer], s->size);
        else if (j->short_rows)
            copy_short_rows(to, s->to[walked], from, s->from[walked], step, (size_t)s->dims[j->outer] * s->size);
        else if (s->rank > j->outer)
            copy_row(to, s->to[j->outer], from, s->from[j->outer], s->dims[j->outer], s->size);
        else
            memcpy(to, from, s->size);
        for (int64_t d = walked, by = step; d >= 0; d--, by = 1) {
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
    enum { FEW = 16, SHORT_BYTES = 64, GRAIN = 16384 };
    job j = {.s = s, .from = (const char *)from + s->from_offset, .to = (char *)to + s->to_offset,
             .outer = s->rank ? s->rank - 1 : 0};
    int last = s->rank - 1;
    int64_t size = (int64_t)s->size;
    bool in_rows = !s->rank || s->from[last] == size || s->from[last] == -size || s->from[last] == 0;
    if (s->rank >= 2 && !in_rows && s->dims[last - 1] > 1) {
        int64_t outer = s->count / s->dims[last] / s->dims[last - 1];
        j.rows = GRAIN / 4 / s->dims[last] / TILE * TILE;
        if (j.rows < TILE) j.rows = TILE;
        ont_parallel(outer * ((s->dims[last - 1] + j.rows - 1) / j.rows), GRAIN / (j.rows * s->dims[last]) + 1,
                     copy_transposed, &j);
        return;
    }
    if (s->rank >= 2) {
        j.repeats = s->from[last] == 0 && s->to[last] == size && s->from[last - 1] == size &&
                    s->to[last - 1] == size * s->dims[last] && s->dims[last] <= FEW && (size == 4 || size == 8);
        j.short_rows = s->from[last] == size && s->to[last] == size && s->dims[last] * size <= SHORT_BYTES;
    }
    int64_t per_piece = j.outer < s->rank ? s->dims[last] : 1;
    ont_parallel(s->count / per_piece, GRAIN / per_piece + 1, copy_pieces, &j);
}
