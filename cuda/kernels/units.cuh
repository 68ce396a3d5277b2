/*
 * What kernels that copy share: units of up to 16 bytes, and quick divisions for indices.
 */
#ifndef ONT_CUDA_UNITS_CUH
#define ONT_CUDA_UNITS_CUH

struct pair16 {
    uint64_t low, high;
};
template <class T> struct unit { /* a whole number of bytes in one access */
    typedef T type;
};
#ifndef ONT_EMULATE
template <> struct unit<pair16> {
    typedef uint4 type;
};
#endif

/* Division of numbers below 2^31 by numbers that a launch knows, as a multiplication. Source: Granlund and Montgomery,
 * Division by Invariant Integers using Multiplication, 1994. */
struct divisor {
    uint32_t value, factor, shift;
};

static inline divisor divisor_of(uint32_t value)
{
    divisor d = {value, 0, 0};
    uint32_t log = 0;
    while (value > 1u << log) log++;
    d.shift = log ? log - 1 : 0;
    d.factor = log ? (uint32_t)(((UINT64_C(1) << (31 + log)) + value - 1) / value) : 0;
    return d;
}

/* One thread for each of fewer than 2^31 units. */
static inline unsigned blocks_of_units(int64_t count) { return (unsigned)((count + ONT_THREADS - 1) / ONT_THREADS); }

ONT_DEVICE uint32_t quotient(uint32_t n, const divisor &d)
{
    return d.value == 1 ? n : __umulhi(n, d.factor) >> d.shift;
}

#endif
