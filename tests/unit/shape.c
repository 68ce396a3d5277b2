/*
 * Shapes count, broadcast and print as defined, and their sizes never overflow.
 */
#include "base/shape.h"
#include "check.h"

static ont_shape shape(int rank, const int64_t *dims)
{
    return ont_shape_of(rank, dims);
}
#define SHAPE(...) shape(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), (int64_t[]){__VA_ARGS__})

TEST(shape_bytes)
{
    ont_shape scalar = {0}, plain = SHAPE(2, 3, 4), empty = SHAPE(5, 0, 7);
    size_t bytes = 0;
    CHECK_OK(ont_shape_bytes(&scalar, ONT_FLOAT64, &bytes));
    CHECK_INT(bytes, 8);
    CHECK_OK(ont_shape_bytes(&plain, ONT_INT16, &bytes));
    CHECK_INT(bytes, 48);
    CHECK_OK(ont_shape_bytes(&empty, ONT_FLOAT32, &bytes));
    CHECK_INT(bytes, 0);
    CHECK_INT(ont_shape_count(&scalar), 1);
    CHECK_INT(ont_shape_count(&plain), 24);
    CHECK_INT(ont_shape_count(&empty), 0);
    CHECK_INT(ont_shape_count_range(&plain, 1, 3), 12);
    CHECK_INT(ont_shape_count_range(&plain, 2, 2), 1);
}

TEST(shape_bytes_that_overflow)
{
    const int64_t m = INT64_MAX;
    ont_shape bad[] = {SHAPE(m), SHAPE(m, m), SHAPE(1ll << 31, 1ll << 31, 2), SHAPE(0, m, m), SHAPE(m, 0, m),
                       SHAPE(1ll << 62, 4), SHAPE(3, m / 2)};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        size_t bytes = 77;
        CHECK_FAILS(ont_shape_bytes(&bad[i], ONT_FLOAT32, &bytes), ONT_EINVAL, "overflows");
        CHECK_INT(bytes, 77);
    }
    size_t bytes = 77;
    ont_shape negative = SHAPE(2, -1), symbol = SHAPE(ONT_DIM_SYMBOL(3)), one = SHAPE(1);
    CHECK_FAILS(ont_shape_bytes(&negative, ONT_FLOAT32, &bytes), ONT_EINVAL, "negative or unknown");
    CHECK_FAILS(ont_shape_bytes(&symbol, ONT_FLOAT32, &bytes), ONT_EINVAL, "negative or unknown");
    CHECK_FAILS(ont_shape_bytes(&one, ONT_STRING, &bytes), ONT_ETYPE, "string");
    CHECK_FAILS(ont_shape_bytes(&one, ONT_UNDEFINED, &bytes), ONT_ETYPE, "undefined");
    CHECK_INT(bytes, 77);
}

/* Random sizes with and without overflow, against 128-bit arithmetic. */
TEST(shape_bytes_against_wide_arithmetic)
{
    for (int round = 0; round < 20000; round++) {
        ont_shape s = {.rank = (int32_t)check_between(0, ONT_MAX_RANK)};
        unsigned __int128 total = 4;
        bool fits = true;
        for (int i = 0; i < s.rank; i++) {
            s.dims[i] = (int64_t)(check_random() >> check_between(1, 62));
            if (!s.dims[i]) s.dims[i] = 1;
            if (fits) total *= (unsigned __int128)s.dims[i];
            fits = fits && total <= INT64_MAX / 2;
        }
        size_t bytes = 0;
        ont_status status = ont_shape_bytes(&s, ONT_FLOAT32, &bytes);
        CHECK_INT(status, fits ? ONT_OK : ONT_EINVAL);
        if (fits) CHECK_INT(bytes, (size_t)total);
    }
}

TEST(shape_strides_and_axis)
{
    ont_shape s = SHAPE(2, 3, 4);
    int64_t strides[ONT_MAX_RANK];
    int axis = 9;
    ont_shape_strides(&s, strides);
    CHECK(strides[0] == 12 && strides[1] == 4 && strides[2] == 1);
    for (int i = -3; i < 3; i++) {
        CHECK_OK(ont_shape_axis(i, 3, &axis));
        CHECK_INT(axis, i < 0 ? i + 3 : i);
    }
    CHECK_FAILS(ont_shape_axis(3, 3, &axis), ONT_EINVAL, "axis 3 is out of range for rank 3");
    CHECK_FAILS(ont_shape_axis(-4, 3, &axis), ONT_EINVAL, "axis -4");
    CHECK_FAILS(ont_shape_axis(0, 0, &axis), ONT_EINVAL, "rank 0");
    CHECK_FAILS(ont_shape_axis(INT64_MIN, 3, &axis), ONT_EINVAL, "out of range");
    CHECK_INT(axis, 2);
}

/* The element at each index of the result, found by both ways of counting. */
TEST(shape_broadcast_against_indexing)
{
    for (int round = 0; round < 3000; round++) {
        ont_shape to = {.rank = (int32_t)check_between(0, 5)}, from = {0};
        for (int i = 0; i < to.rank; i++) to.dims[i] = check_between(0, 4);
        from.rank = (int32_t)check_between(0, to.rank);
        for (int i = 0; i < from.rank; i++) {
            int64_t dim = to.dims[to.rank - from.rank + i];
            from.dims[i] = check_between(0, 1) ? dim : 1;
        }
        ont_shape result;
        CHECK_OK(ont_shape_broadcast(&from, &to, &result));
        CHECK(ont_shape_equal(&result, &to));
        result = from;
        CHECK_OK(ont_shape_broadcast(&result, &to, &result)); /* the result may be an operand */
        CHECK(ont_shape_equal(&result, &to));
        int64_t strides[ONT_MAX_RANK], own[ONT_MAX_RANK], all[ONT_MAX_RANK], n = ont_shape_count(&to);
        ont_shape_broadcast_strides(&from, &to, strides);
        ont_shape_strides(&from, own);
        ont_shape_strides(&to, all);
        for (int64_t flat = 0; flat < n; flat++) {
            int64_t got = 0, want = 0;
            for (int i = 0; i < to.rank; i++) {
                int64_t index = flat / all[i] % to.dims[i];
                int at = i - (to.rank - from.rank);
                got += index * strides[i];
                if (at >= 0) want += (from.dims[at] == 1 ? 0 : index) * own[at];
            }
            CHECK_INT(got, want);
        }
    }
    ont_shape a = SHAPE(2, 3), b = SHAPE(4, 3), out = SHAPE(9);
    CHECK_FAILS(ont_shape_broadcast(&a, &b, &out), ONT_EINVAL, "[2, 3] and [4, 3] do not broadcast");
    CHECK_INT(out.dims[0], 9);
}

TEST(shape_text_fits_its_buffer)
{
    char text[ONT_SHAPE_TEXT];
    ont_shape most = {.rank = ONT_MAX_RANK}, none = {0}, mixed = SHAPE(2, -1, ONT_DIM_SYMBOL(0), 0);
    for (int i = 0; i < ONT_MAX_RANK; i++) most.dims[i] = INT64_MAX;
    CHECK_INT(strlen(ont_shape_text(&most, text)), 2 + 19 * ONT_MAX_RANK + 2 * (ONT_MAX_RANK - 1));
    CHECK_TEXT(ont_shape_text(&none, text), "[]");
    CHECK_TEXT(ont_shape_text(&mixed, text), "[2, ?, ?, 0]");
    CHECK(!ont_shape_is_static(&mixed) && ont_shape_is_static(&most) && ont_shape_is_static(&none));
    for (int k = 0; k < 5000; k += 99) CHECK_INT(ONT_DIM_SYMBOL_INDEX(ONT_DIM_SYMBOL(k)), k);
}
