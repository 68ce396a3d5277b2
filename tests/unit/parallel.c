/*
 * A parallel loop runs each item once, in ranges of at least the grain.
 */
#include "base/parallel.h"
#include "check.h"

typedef struct cover {
    int64_t n, grain;
    unsigned char *seen;
} cover;

static void cover_range(void *context, int64_t first, int64_t last)
{
    const cover *c = context;
    CHECK(0 <= first && first < last && last <= c->n);
    CHECK(last - first >= c->grain || last - first == c->n);
    for (int64_t i = first; i < last; i++) c->seen[i]++;
}

TEST(parallel_covers_each_item_once)
{
    static const int64_t sizes[] = {0, 1, 7, 64, 1000, 4096, 10007}, grains[] = {1, 3, 64, 1000, 100000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t j = 0; j < sizeof grains / sizeof *grains; j++) {
            cover c = {sizes[i], grains[j], ont_calloc((size_t)sizes[i], 1)};
            CHECK(c.seen != NULL);
            ont_parallel(c.n, c.grain, cover_range, &c);
            for (int64_t k = 0; k < c.n; k++) CHECK_INT(c.seen[k], 1);
            ont_free(c.seen);
        }
    CHECK(ont_parallel_threads() >= 1);
}
