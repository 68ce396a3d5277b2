/*
 * Unit tests of csrc/simd: each instruction set that this processor has against the plain loops, which are libm's, and
 * the vector math against double precision, to the accuracy that simd.h states.
 */
#include <float.h>
#include <math.h>

#include "base/number.h"
#include "check.h"
#include "simd/simd.h"

extern const ont_simd_table ont_simd_table_avx2, ont_simd_table_avx512, ont_simd_table_neon;

enum { ROOM = 700 };
static const int64_t lengths[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 257, 600};
enum { N_LENGTHS = sizeof lengths / sizeof *lengths };

/* The tables to compare with the plain one; says which are left out. */
static int tables(const ont_simd_table **out)
{
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx2) out[n++] = &ont_simd_table_avx2;
    if (avx512) out[n++] = &ont_simd_table_avx512;
    printf("avx2 %s, avx512 %s\n", avx2 ? "tested" : "not of this processor",
           avx512 ? "tested" : "not of this processor");
#elif defined(__aarch64__)
    out[n++] = &ont_simd_table_neon;
#endif
    return n;
}

static const char *const names[] = {
#define X(name, expression) #name,
    ONT_UNARY_FLOAT_LIST(X) ONT_UNARY_NUMBER_LIST(X) ONT_BINARY_FLOAT_LIST(X) ONT_BINARY_NUMBER_LIST(X)
        ONT_COMPARE_LIST(X)
#undef X
};

static const char *loop_name(int loop)
{
    return loop < (int)(sizeof names / sizeof *names) ? names[loop] : "?";
}

static double load(ont_dtype dtype, const void *data, int64_t i)
{
    switch (dtype) {
    case ONT_FLOAT32: return ((const float *)data)[i];
    case ONT_FLOAT64: return ((const double *)data)[i];
    case ONT_INT32: return ((const int32_t *)data)[i];
    case ONT_INT64: return (double)((const int64_t *)data)[i];
    default: return ((const uint8_t *)data)[i];
    }
}

static void store(ont_dtype dtype, void *data, int64_t i, double value)
{
    switch (dtype) {
    case ONT_FLOAT32: ((float *)data)[i] = (float)value; break;
    case ONT_FLOAT64: ((double *)data)[i] = value; break;
    case ONT_INT32: ((int32_t *)data)[i] = (int32_t)value; break;
    case ONT_INT64: ((int64_t *)data)[i] = (int64_t)value; break;
    default: ((uint8_t *)data)[i] = value > 0; break;
    }
}

static double uniform(double low, double high)
{
    return low + (high - low) * (double)(check_random() >> 11) * 0x1p-53;
}

/* Numbers of every size, and for floats now and then one that is special. Integers are not 0: they may be divisors. */
static void fill(ont_dtype dtype, void *data, int64_t n, bool special)
{
    static const double odd[] = {0,       -0.0,  INFINITY, -INFINITY, NAN,    FLT_MAX, -FLT_MAX,
                                 FLT_MIN, 1e-40, -1e-40,   88.7,      -103.9, 1,       -1};
    for (int64_t i = 0; i < n; i++) {
        double x = uniform(-1, 1) * pow(10, (double)check_between(-3, 1));
        if (dtype == ONT_INT32 || dtype == ONT_INT64) {
            x = (double)check_between(-1000, 1000);
            if (x == 0) x = -1;
        } else if (special && !check_between(0, 5)) {
            x = odd[check_between(0, sizeof odd / sizeof *odd - 1)];
        }
        store(dtype, data, i, x);
    }
}

/* Near in the sense of one or two roundings of a value of that size, and of its summands, which are of order 1 or
 * below. */
static bool near(ont_dtype dtype, double got, double want, double scale)
{
    if (isnan(want) || isnan(got)) return isnan(want) && isnan(got);
    if (isinf(want) || isinf(got)) return want == got;
    double eps = dtype == ONT_FLOAT32 ? 2e-6 : dtype == ONT_FLOAT64 ? 1e-14 : 0;
    return fabs(got - want) <= eps * (fabs(want) + scale);
}

static const double parameters[2] = {0.3, 0.7};

static void check_result(const char *isa, int loop, ont_dtype in, ont_dtype out, const void *a, const void *b,
                         int64_t sb, const void *got, const void *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double x = load(in, a, i), y = b ? load(in, b, sb ? i : 0) : 0;
        double scale = isfinite(y) && fabs(y) > 1 ? fabs(y) : 1;
        if (!near(out, load(out, got, i), load(out, want, i), scale))
            check_failed(__FILE__, __LINE__, "%s %s of %s: (%.9g, %.9g) gives %.9g, expected %.9g", isa,
                         loop_name(loop), ont_dtype_name(in), x, y, load(out, got, i), load(out, want, i));
    }
}

/* A block that ends where n elements end, so that the sanitizer sees a read or write past them. */
static void *exact(ont_dtype dtype, int64_t n)
{
    void *block = ont_malloc((size_t)n * ont_dtype_size(dtype));
    CHECK(block != NULL);
    return block;
}

static void check_unary(const ont_simd_table *t, int loop, ont_dtype dtype, int64_t n)
{
    void *a = exact(dtype, n), *got = exact(dtype, n), *want = exact(dtype, n);
    fill(dtype, a, n, true);
    t->unary[loop][dtype](a, got, n, parameters);
    ont_simd_plain()->unary[loop][dtype](a, want, n, parameters);
    check_result(t->isa, loop, dtype, dtype, a, NULL, 0, got, want, n);
    if (n) memcpy(want, got, (size_t)n * ont_dtype_size(dtype));
    if (n) memcpy(got, a, (size_t)n * ont_dtype_size(dtype));
    t->unary[loop][dtype](got, got, n, parameters); /* onto its operand */
    for (int64_t i = 0; i < n; i++) CHECK(near(ONT_BOOL, load(dtype, got, i), load(dtype, want, i), 0));
    ont_free(a);
    ont_free(got);
    ont_free(want);
}

TEST(simd_unary_loops)
{
    const ont_simd_table *all[4];
    int n = tables(all), tested = 0;
    for (int k = 0; k < n; k++)
        for (int loop = 0; loop < ONT_LOOP_COUNT; loop++)
            for (int d = 0; d < ONT_DTYPE_COUNT; d++) {
                CHECK(!all[k]->unary[loop][d] == !ont_simd_plain()->unary[loop][d]);
                if (!all[k]->unary[loop][d]) continue;
                tested++;
                for (int i = 0; i < N_LENGTHS; i++) check_unary(all[k], loop, (ont_dtype)d, lengths[i]);
            }
    CHECK(tested >= n * 60);
}

/* Comparisons give bool, the rest the operands' type. */
static bool compares(int loop)
{
    switch (loop) {
#define X(name, expression) case ONT_LOOP_##name:
        ONT_COMPARE_LIST(X)
#undef X
        return true;
    default: return false;
    }
}

static void check_binary(const ont_simd_table *t, int loop, ont_dtype dtype, int64_t n, int64_t sa, int64_t sb)
{
    ont_dtype out = compares(loop) ? ONT_BOOL : dtype;
    void *a = exact(dtype, sa ? n : 1), *b = exact(dtype, sb ? n : 1), *got = exact(out, n), *want = exact(out, n);
    fill(dtype, a, sa ? n : 1, true);
    fill(dtype, b, sb ? n : 1, true);
    if (loop == ONT_LOOP_Div && ont_dtype_is_int(dtype)) /* the kernel refuses a zero before it calls the loop */
        for (int64_t i = 0; i < (sb ? n : 1); i++)
            if (ont_integer_at(b, dtype, i) == 0) ont_integer_put(b, dtype, i, 1);
    t->binary[loop][dtype](a, sa, b, sb, got, n, parameters);
    ont_simd_plain()->binary[loop][dtype](a, sa, b, sb, want, n, parameters);
    for (int64_t i = 0; i < n; i++) {
        double x = load(dtype, a, sa ? i : 0), y = load(dtype, b, sb ? i : 0);
        double scale = isfinite(y) && fabs(y) > 1 ? fabs(y) : 1;
        if (!near(out, load(out, got, i), load(out, want, i), scale))
            check_failed(__FILE__, __LINE__, "%s %s of %s: (%.9g, %.9g) gives %.9g, expected %.9g", t->isa,
                         loop_name(loop), ont_dtype_name(dtype), x, y, load(out, got, i), load(out, want, i));
    }
    if (sa && out == dtype && n) {
        t->binary[loop][dtype](a, 1, b, sb, a, n, parameters); /* onto its first operand */
        CHECK(!memcmp(a, got, (size_t)n * ont_dtype_size(dtype)));
    }
    ont_free(a);
    ont_free(b);
    ont_free(got);
    ont_free(want);
}

TEST(simd_binary_loops)
{
    const ont_simd_table *all[4];
    int n = tables(all), tested = 0;
    for (int k = 0; k < n; k++)
        for (int loop = 0; loop < ONT_LOOP_COUNT; loop++)
            for (int d = 0; d < ONT_DTYPE_COUNT; d++) {
                CHECK(!all[k]->binary[loop][d] == !ont_simd_plain()->binary[loop][d]);
                if (!all[k]->binary[loop][d]) continue;
                tested++;
                for (int i = 0; i < N_LENGTHS; i++)
                    for (int strides = 0; strides < 4; strides++)
                        check_binary(all[k], loop, (ont_dtype)d, lengths[i], strides & 1, strides >> 1);
            }
    CHECK(tested >= n * 60);
}

/* ---- accuracy, in units of the last place of the exact result (at least of `floor_`) ---- */

static double ulp_of(double exact_value, double floor_)
{
    int exponent;
    frexp(fmax(fabs(exact_value), floor_), &exponent);
    return ldexp(1, exponent - 24 > -149 ? exponent - 24 : -149);
}

static double worst_error(const ont_simd_table *t, ont_loop loop, double (*exact_of)(double), double low, double high,
                          double floor_)
{
    enum { CHUNK = 512 };
    float x[CHUNK], y[CHUNK];
    double worst = 0;
    for (int round = 0; round < 1000; round++) {
        for (int i = 0; i < CHUNK; i++) x[i] = (float)uniform(low, high);
        t->unary[loop][ONT_FLOAT32](x, y, CHUNK, parameters);
        for (int i = 0; i < CHUNK; i++) {
            double want = exact_of((double)x[i]), error = fabs((double)y[i] - want) / ulp_of(want, floor_);
            if (error > worst) worst = error;
        }
    }
    printf("%s: %.3f ulp in [%g, %g]\n", t->isa, worst, low, high);
    return worst;
}

TEST(simd_accuracy_of_the_vector_math)
{
    const ont_simd_table *all[4];
    int n = tables(all);
    for (int k = 0; k < n; k++) {
        CHECK(worst_error(all[k], ONT_LOOP_Exp, exp, -87, 88.7, 0) <= 1);
        CHECK(worst_error(all[k], ONT_LOOP_Exp, exp, -1, 1, 0) <= 1);
        CHECK(worst_error(all[k], ONT_LOOP_Tanh, tanh, -10, 10, 0) <= 2);
        CHECK(worst_error(all[k], ONT_LOOP_Tanh, tanh, -0.7, 0.7, 0) <= 2);
        CHECK(worst_error(all[k], ONT_LOOP_Erf, erf, -5, 5, 1) <= 2);
        CHECK(worst_error(all[k], ONT_LOOP_Erf, erf, -0.1, 0.1, 1) <= 2);
    }
}

TEST(simd_exp_at_its_ends)
{
    const ont_simd_table *all[4];
    int n = tables(all);
    const float x[] = {89, 1e30f, INFINITY, -104, -1e30f, -INFINITY, NAN, 0, -0.0f, 88.72f, -87.33f, -100};
    float y[12];
    for (int k = 0; k < n; k++) {
        all[k]->unary[ONT_LOOP_Exp][ONT_FLOAT32](x, y, 12, parameters);
        for (int i = 0; i < 12; i++) CHECK(near(ONT_FLOAT32, y[i], expf(x[i]), 1e-37));
        CHECK(y[0] == INFINITY && y[3] == 0 && y[7] == 1 && y[8] == 1);
    }
}

/* ---- rows ---- */

static void normal(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = (float)uniform(-3, 3);
}

static void check_near(const char *what, const float *got, const float *want, int64_t n, double tolerance)
{
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= tolerance * (1 + fabs((double)want[i]))))
            check_failed(__FILE__, __LINE__, "%s: element %lld is %.9g, expected %.9g", what, (long long)i,
                         (double)got[i], (double)want[i]);
}

TEST(simd_reductions_of_a_row)
{
    const ont_simd_table *all[4], *plain = ont_simd_plain();
    int count = tables(all);
    for (int k = 0; k < count; k++)
        for (int i = 0; i < N_LENGTHS; i++) {
            int64_t n = lengths[i];
            float *x = exact(ONT_FLOAT32, n), *y = exact(ONT_FLOAT32, n), *acc = exact(ONT_FLOAT32, n);
            normal(x, n);
            normal(y, n);
            double sum = 0, dot = 0;
            for (int64_t j = 0; j < n; j++) sum += (double)x[j], dot += (double)x[j] * (double)y[j];
            CHECK(fabs((double)all[k]->sum(x, n) - sum) <= 1e-6 * (double)(n + 1));
            CHECK(fabs((double)all[k]->dot(x, y, n) - dot) <= 3e-6 * (double)(n + 1));
            if (n) {
                CHECK(all[k]->max(x, n) == plain->max(x, n));
                int64_t at = check_between(0, n - 1);
                x[at] = 50;
                CHECK(all[k]->max(x, n) == 50);
                x[at] = NAN;
                CHECK(isnan(all[k]->max(x, n)));
                x[at] = -INFINITY;
                CHECK(all[k]->max(x, n) == plain->max(x, n));
                x[at] = 1;
                memcpy(acc, y, (size_t)n * sizeof *y);
            }
            all[k]->add_to(acc, x, n);
            for (int64_t j = 0; j < n; j++) CHECK(acc[j] == y[j] + x[j]);
            ont_free(x);
            ont_free(y);
            ont_free(acc);
        }
}

TEST(simd_softmax_of_a_row)
{
    const ont_simd_table *all[4], *plain = ont_simd_plain();
    int count = tables(all);
    for (int k = 0; k < count; k++)
        for (int i = 1; i < N_LENGTHS; i++) {
            int64_t n = lengths[i];
            float *x = exact(ONT_FLOAT32, n), *dy = exact(ONT_FLOAT32, n), *y = exact(ONT_FLOAT32, n),
                  *dx = exact(ONT_FLOAT32, n);
            float want[ROOM], want_dx[ROOM];
            normal(x, n);
            normal(dy, n);
            if (n > 2) x[n / 2] = -INFINITY; /* as a mask writes it */
            if (n > 7) x[1] = 80;
            all[k]->softmax(x, y, n);
            plain->softmax(x, want, n);
            check_near("softmax", y, want, n, 1e-6);
            all[k]->softmax_grad(y, dy, dx, n);
            plain->softmax_grad(y, dy, want_dx, n);
            check_near("softmax gradient", dx, want_dx, n, 1e-6);
            if (n > 2) x[n / 2] = -100;
            all[k]->log_softmax(x, y, n);
            plain->log_softmax(x, want, n);
            check_near("log softmax", y, want, n, 1e-6);
            all[k]->log_softmax_grad(y, dy, dx, n);
            plain->log_softmax_grad(y, dy, want_dx, n);
            check_near("log softmax gradient", dx, want_dx, n, 1e-5);
            ont_free(x);
            ont_free(dy);
            ont_free(y);
            ont_free(dx);
        }
}

/* `parts`: bit 0 scale, bit 1 bias or its gradient. */
static void check_layernorm(const ont_simd_table *t, int64_t n, int parts)
{
    const ont_simd_table *plain = ont_simd_plain();
    float *in[3], x[2][ROOM], mean[2], inv[2], dx[2][ROOM], dscale[2][ROOM] = {{0}}, dbias[2][ROOM] = {{0}};
    for (int i = 0; i < 3; i++) {
        in[i] = exact(ONT_FLOAT32, n);
        normal(in[i], n);
    }
    const float *scale = parts & 1 ? in[1] : NULL, *bias = parts & 2 ? in[2] : NULL;
    const ont_layernorm_params norm = {.scale = scale, .bias = bias, .eps = 1e-5f, .n = n};
    t->layernorm(&norm, in[0], x[0], &mean[0], &inv[0]);
    plain->layernorm(&norm, in[0], x[1], &mean[1], &inv[1]);
    check_near("layernorm", x[0], x[1], n, 1e-5);
    check_near("mean", &mean[0], &mean[1], 1, 1e-6);
    check_near("deviation", &inv[0], &inv[1], 1, 1e-5);
    for (int i = 0; i < 2; i++) {
        const ont_layernorm_grad_params grad = {.scale = scale, .dscale = parts & 1 ? dscale[i] : NULL,
                                                .dbias = parts & 2 ? dbias[i] : NULL, .n = n};
        (i ? plain : t)->layernorm_grad(&grad, in[0], mean[1], inv[1], in[2], dx[i]);
    }
    check_near("layernorm gradient", dx[0], dx[1], n, 1e-4);
    check_near("gradient of scale", dscale[0], dscale[1], n, 1e-5);
    check_near("gradient of bias", dbias[0], dbias[1], n, 1e-6);
    for (int i = 0; i < 3; i++) ont_free(in[i]);
}

TEST(simd_layernorm_of_a_row)
{
    const ont_simd_table *all[4];
    int count = tables(all);
    for (int k = 0; k < count; k++)
        for (int i = 2; i < N_LENGTHS; i++)
            for (int parts = 0; parts < 4; parts++) check_layernorm(all[k], lengths[i], parts);
}

/* The same mask on every instruction set, from any first element, and as Philox 4x32-10 gives it. */
TEST(simd_dropout_draws_one_stream)
{
    const ont_simd_table *all[4], *plain = ont_simd_plain();
    int count = tables(all);
    static float x[ROOM], whole[ROOM], part[ROOM];
    static uint8_t mask[ROOM], part_mask[ROOM];
    const ont_dropout_params dropout = {.key = check_random(), .stream = check_random(), .threshold = 0x60000000u,
                                        .scale = 1.6f};
    normal(x, ROOM);
    plain->dropout(&dropout, x, whole, mask, 0, ROOM);
    int kept = 0;
    for (int i = 0; i < ROOM; i++) {
        CHECK(whole[i] == (mask[i] ? x[i] * 1.6f : 0));
        kept += mask[i];
    }
    CHECK(kept > ROOM * 0.625 - 6 * 13 && kept < ROOM * 0.625 + 6 * 13); /* six deviations */
    all[count] = plain;
    for (int k = 0; k <= count; k++)
        for (int round = 0; round < 300; round++) {
            int64_t first = check_between(0, ROOM - 1), n = check_between(0, ROOM - first);
            memset(part, 0xff, sizeof part);
            memset(part_mask, 0xff, sizeof part_mask);
            all[k]->dropout(&dropout, x + first, round % 3 ? part : NULL, round % 3 < 2 ? part_mask : NULL, first, n);
            for (int64_t i = 0; i < n; i++) {
                if (round % 3) CHECK(part[i] == whole[first + i]);
                if (round % 3 < 2) CHECK(part_mask[i] == mask[first + i]);
            }
            CHECK(n == ROOM || (isnan(part[n]) && part_mask[n] == 0xff));
        }
    for (int k = 0; k < count; k++) /* a counter's lower word runs over */
        for (int round = 0; round < 20; round++) {
            int64_t first = ((int64_t)1 << 34) - check_between(0, 200);
            plain->dropout(&dropout, x, NULL, mask, first, 400);
            all[k]->dropout(&dropout, x, NULL, part_mask, first, 400);
            CHECK(!memcmp(mask, part_mask, 400));
        }
}

/* The known answer of Random123's test set for Philox4x32-10 with counter and key of zeros. A mask says whether a word
   is at least the threshold. */
TEST(simd_philox_known_answer)
{
    static const uint32_t want[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    const ont_simd_table *all[4];
    int n = tables(all);
    all[n] = ont_simd_plain();
    const float x[4] = {1, 1, 1, 1};
    uint8_t mask[4];
    for (int k = 0; k <= n; k++)
        for (int word = 0; word < 4; word++) {
            ont_dropout_params dropout = {.threshold = want[word], .scale = 1};
            all[k]->dropout(&dropout, x, NULL, mask, 0, 4);
            CHECK(mask[word] == 1);
            dropout.threshold++;
            all[k]->dropout(&dropout, x, NULL, mask, 0, 4);
            CHECK(mask[word] == 0);
        }
}

TEST(simd_choice_follows_the_environment)
{
    const ont_simd_table *all[4], *chosen = ont_simd();
    int n = tables(all);
    CHECK(chosen == (n ? all[n - 1] : ont_simd_plain())); /* the widest, without ONNXTRAIN_ISA */
    CHECK(ont_simd() == chosen);
    CHECK_TEXT(ont_simd_plain()->isa, "plain");
}
