/*
 * Every dtype survives the way to DLPack and back.
 */
#include "base/dtype.h"
#include "check.h"

TEST(dtype_dlpack_round_trip)
{
    for (int d = 0; d <= ONT_DTYPE_COUNT; d++) {
        uint8_t code = 0, bits = 0;
        ont_dtype back = ONT_UNDEFINED;
        size_t size = ont_dtype_size((ont_dtype)d);
        if (d == ONT_UNDEFINED || d == ONT_STRING || d == ONT_DTYPE_COUNT) {
            CHECK_INT(size, 0);
            continue;
        }
        ont_dtype_to_dlpack((ont_dtype)d, &code, &bits);
        CHECK(ont_dtype_from_dlpack(code, bits, &back));
        CHECK_INT(back, ont_dtype_carrier((ont_dtype)d));
        CHECK(back == (ont_dtype)d || (ont_dtype_is_narrow((ont_dtype)d) && ont_dtype_bits((ont_dtype)d) < 8));
        CHECK_INT(bits, size * 8);
        CHECK(!(ont_dtype_is_float((ont_dtype)d) && ont_dtype_is_int((ont_dtype)d)));
    }
    ont_dtype left = ONT_INT8;
    CHECK(!ont_dtype_from_dlpack(2, 7, &left) && !ont_dtype_from_dlpack(99, 32, &left));
    CHECK_INT(left, ONT_INT8);
    CHECK_TEXT(ont_dtype_name(ONT_DTYPE_COUNT), "?");
}
