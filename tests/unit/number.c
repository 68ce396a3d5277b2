/*
 * Every narrow float is written back as the bits that it was read from, and floats beyond an integer convert as on x86.
 */
#include <math.h>

#include "base/number.h"
#include "check.h"

TEST(number_narrow_floats_round_trip)
{
    for (int d = 0; d < ONT_DTYPE_COUNT; d++)
        for (int bits = 0; ont_dtype_is_narrow((ont_dtype)d) && ont_dtype_is_float((ont_dtype)d) &&
                           bits < 1 << ont_dtype_bits((ont_dtype)d); bits++) {
            double value = ont_narrow_float_at((uint8_t)bits, (ont_dtype)d);
            uint8_t back = ont_narrow_float(value, (ont_dtype)d, false);
            if (isnan(value)) CHECK(isnan(ont_narrow_float_at(back, (ont_dtype)d)));
            else CHECK_INT(back, bits);
        }
}

TEST(number_floats_beyond_integers)
{
    CHECK_INT(ont_f64_to_i32(NAN), INT32_MIN);
    CHECK(ont_f64_to_i64(1e300) == INT64_MIN && ont_f64_to_i64(-2.9) == -2);
    CHECK(ont_f64_to_u64(-1) == UINT64_MAX && ont_f64_to_u64(0x1p64) == 0 && ont_f64_to_u64(0x1p63) == 1ull << 63);
}
