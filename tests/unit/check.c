/*
 * Runs one unit test by name; see check.h. Ends with 1 where a check fails or where the test leaves blocks allocated.
 */
#include "check.h"

#include <stdarg.h>
#include <time.h>

enum { MOST = 512 };

static struct {
    const char *name;
    void (*run)(void);
} tests[MOST];
static int n_tests;

void check_register(const char *name, void (*test)(void))
{
    if (n_tests == MOST) abort();
    tests[n_tests].name = name;
    tests[n_tests++].run = test;
}

void check_failed(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    fflush(NULL);
    _Exit(1); /* what the test holds is no leak of the code's */
}

/* SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014. */
uint64_t check_random(void)
{
    static uint64_t state;
    static bool seeded;
    if (!seeded) {
        const char *asked = getenv("ONNXTRAIN_TEST_SEED");
        state = asked && *asked ? strtoull(asked, NULL, 10) : (uint64_t)time(NULL);
        printf("ONNXTRAIN_TEST_SEED=%llu\n", (unsigned long long)state);
        fflush(stdout);
        seeded = true;
    }
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int64_t check_between(int64_t low, int64_t high)
{
    return low + (int64_t)(check_random() % (uint64_t)(high - low + 1));
}

TEST(check_of_the_harness)
{
    bool condition_that_fails = getenv("ONNXTRAIN_UNIT_FAIL") == NULL;
    CHECK(condition_that_fails);
}

int main(int argc, char **argv)
{
    for (int i = 0; i < n_tests; i++) {
        if (argc < 2) puts(tests[i].name);
        if (argc < 2 || strcmp(tests[i].name, argv[1])) continue;
        tests[i].run();
        ont_alloc_fail_after(-1);
        if (ont_alloc_live()) check_failed(__FILE__, __LINE__, "%lld blocks are left", (long long)ont_alloc_live());
        return 0;
    }
    if (argc > 1) fprintf(stderr, "no test '%s'\n", argv[1]);
    return argc > 1;
}
