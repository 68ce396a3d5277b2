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

/* Makes the units of rows of `count` elements as large as the two addresses allow, at most 16 bytes. */
static inline void widen_units(int32_t *size, int64_t *count, const void *from, const void *to)
{
    while (*size < 16 && *count % 2 == 0 && ((uint64_t)from | (uint64_t)to) % (uint64_t)(2 * *size) == 0) {
        *size *= 2;
        *count /= 2;
    }
}

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

/* Before a loop: several of its steps at once would need a division, for their count. */
#ifdef ONT_EMULATE
#define ONT_KEEP_LOOP
#else
#define ONT_KEEP_LOOP _Pragma("unroll 1")
#endif

/* One thread for each of fewer than 2^31 units. */
static inline unsigned blocks_of_units(int64_t count) { return (unsigned)((count + ONT_THREADS - 1) / ONT_THREADS); }

ONT_DEVICE uint32_t quotient(uint32_t n, const divisor &d)
{
    return d.value == 1 ? n : __umulhi(n, d.factor) >> d.shift;
}

/* The same of numbers below 2^63: for kernels that take any size, so that one way serves all. A split by it has some 20
 * instructions. */
struct wide_divisor {
    uint64_t value, factor, shift;
};
struct wide_dims {
    wide_divisor size[12];
};

static inline wide_divisor wide_divisor_of(uint64_t value)
{
    wide_divisor d = {value, 0, 0};
    int log = 0;
    while (value > UINT64_C(1) << log) log++;
    d.shift = log ? (uint64_t)(log - 1) : 0;
    d.factor = log ? (uint64_t)((((unsigned __int128)1 << (63 + log)) + value - 1) / value) : 0;
    return d;
}

static inline wide_dims wide_dims_of(const int64_t *dims, int rank)
{
    wide_dims w = {};
    for (int d = 0; d < rank; d++) w.size[d] = wide_divisor_of((uint64_t)dims[d]);
    return w;
}

ONT_DEVICE uint64_t quotient(uint64_t n, const wide_divisor &d)
{
    return d.value == 1 ? n : __umul64hi(n, d.factor) >> d.shift;
}

/* Splits an index by the last of some dims: returns the index in that dim, and leaves the one in the others. */
ONT_DEVICE uint32_t split(uint32_t *rest, const divisor &last)
{
    const uint32_t n = *rest;
    *rest = quotient(n, last);
    return n - *rest * last.value;
}
ONT_DEVICE int64_t split(uint64_t *rest, const wide_divisor &last)
{
    const uint64_t n = *rest;
    *rest = quotient(n, last);
    return (int64_t)(n - *rest * last.value);
}

#endif
