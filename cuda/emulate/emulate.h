/*
 * CUDA's execution model on the host, so that the kernels of this folder run under a sanitizer without a GPU: the same
 * source, compiled by a C++ compiler with ONT_EMULATE. The threads of a block are fibers with a stack each; barriers
 * and shuffles switch among them; blocks run one after the other, so __shared__ can be `static`.
 *
 * Behaviour that the hardware leaves undefined is reported as a failed launch: a barrier that not all threads reach, a
 * shuffle in which not all lanes of the mask take part, an access of an address that is not aligned to its size, and
 * with ONT_RACES (races.cc) a data race and a read of shared memory that the block has not written. ONT_EMULATE_ORDER=
 * reverse runs blocks and threads from the last to the first, "random N" in an order that the seed N chooses.
 */
#ifndef ONT_CUDA_EMULATE_H
#define ONT_CUDA_EMULATE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <tuple>

struct ont_dim3 {
    unsigned x, y, z;
    ont_dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
typedef ont_dim3 dim3;
typedef void *cudaStream_t;

/* Functions of CUDA that libm lacks: Newton's method, from below the root. */
static inline double erfinv(double x)
{
    double a = fabs(x), y = 0;
    for (int i = 0; i < 100 && a < 1; i++) y -= (erf(y) - a) * 0.88622692545275801365 * exp(y * y);
    return a < 1 ? copysign(y, x) : a == 1 ? x * INFINITY : NAN;
}
static inline float erfinvf(float x) { return (float)erfinv((double)x); }

struct ont_lane { /* identity of a thread */
    dim3 thread, block, block_size, grid_size;
    unsigned index; /* in its block */
};
extern ont_lane *ont_lane_now;
extern unsigned char *ont_shared_now;

#define __global__ static /* of which the sanitizer protects the arrays; it leaves out templates that are not */
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (ont_lane_now->thread)
#define blockIdx (ont_lane_now->block)
#define blockDim (ont_lane_now->block_size)
#define gridDim (ont_lane_now->grid_size)
#define warpSize 32

void ont_emulate_barrier(void);
/* Every lane of the mask gives `bytes`, and gets those of lane `from`. */
void ont_emulate_shuffle(unsigned mask, int from, const void *give, void *get, size_t bytes);
unsigned ont_emulate_ballot(unsigned mask, int predicate);
/* Collects the values of all lanes of a full warp; they stay until each lane has read them. */
struct alignas(16) ont_warp_values {
    unsigned char of[32][32];
};
const ont_warp_values *ont_emulate_exchange(const void *give, size_t bytes);
void ont_emulate_exchanged(void);
/* Fails the launch where an address is not a multiple of `bytes`, which is an error on hardware. */
void ont_emulate_need_aligned(const void *p, size_t bytes);
/*
 * Copies that run while the thread goes on (cp.async): to shared memory, from global memory or of zeros (NULL). They
 * are done when the thread waits for them, and not before: until then NaN is there. A thread that ends before its
 * copies fails the launch.
 */
void ont_emulate_copy(void *to, const void *from, size_t bytes);
void ont_emulate_copy_wait(void);
/* Number of launches so far of kernels with `part` in their names. */
extern "C" __attribute__((visibility("default"))) long ont_emulate_launches(const char *part);
/* Bytes of dynamic shared memory of the last launch of the first such kernel. */
extern "C" __attribute__((visibility("default"))) size_t ont_emulate_shared(const char *part);
/* 0, or an error code for the launch macro; the message is kept for ont_emulate_error(). */
/* The name; ends the process where the stream is another device's than the current one. */
const char *ont_emulate_on_stream(const char *name, const void *stream);
int ont_emulate_launch(const char *name, dim3 grid, dim3 block, size_t shared, void (*body)(void *), void *context);
extern "C" const char *ont_emulate_error(void);

#define __syncthreads() ont_emulate_barrier()
#define __syncwarp ont_emulate_warp_barrier
void ont_emulate_warp_barrier(unsigned mask = 0xffffffffu);
unsigned ont_emulate_warp_mask(void); /* lanes that the warp was launched with */

template <class T> static inline T ont_shuffle(unsigned mask, T value, int from)
{
    T result;
    ont_emulate_shuffle(mask, from, &value, &result, sizeof value);
    return result;
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32)
{
    int lane = (int)(ont_lane_now->index % 32);
    return ont_shuffle(mask, value, lane / width * width + from % width);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32)
{
    int lane = (int)(ont_lane_now->index % 32), from = lane ^ lanes;
    return ont_shuffle(mask, value, from / width == lane / width ? from : lane);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    int lane = (int)(ont_lane_now->index % 32), from = lane + (int)delta;
    return ont_shuffle(mask, value, from < (lane / width + 1) * width ? from : lane);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    int lane = (int)(ont_lane_now->index % 32), from = lane - (int)delta;
    return ont_shuffle(mask, value, from >= lane / width * width ? from : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) { return ont_emulate_ballot(mask, predicate); }

/* What the race detector is told besides the accesses that the compiler reports to it. */
#ifdef ONT_RACES
#define ONT_UNWATCHED __attribute__((no_sanitize("thread")))
void ont_emulate_atomic(const void *at, size_t bytes);
void *ont_emulate_memcpy(void *to, const void *from, size_t bytes);
#else
#define ONT_UNWATCHED
static inline void ont_emulate_atomic(const void *, size_t) {}
#endif

template <class T> ONT_UNWATCHED static inline T atomicAdd(T *at, T value)
{
    ont_emulate_atomic(at, sizeof *at);
    T old = *at;
    *at = old + value;
    return old;
}
template <class T> ONT_UNWATCHED static inline T atomicMax(T *at, T value)
{
    ont_emulate_atomic(at, sizeof *at);
    T old = *at;
    if (value > old) *at = value;
    return old;
}
template <class T> ONT_UNWATCHED static inline T atomicCAS(T *at, T expected, T value)
{
    ont_emulate_atomic(at, sizeof *at);
    T old = *at;
    if (old == expected) *at = value;
    return old;
}
template <class T> ONT_UNWATCHED static inline T atomicExch(T *at, T value)
{
    ont_emulate_atomic(at, sizeof *at);
    T old = *at;
    *at = value;
    return old;
}
static inline void __threadfence(void) {}
static inline void __threadfence_system(void) {}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline int __float_as_int(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline float __fadd_rn(float a, float b) { return a + b; } /* this build joins no product and sum */
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double rsqrt(double x) { return 1 / sqrt(x); }

/* Dynamic shared memory as an array of `type`. */
#define ONT_SHARED(type, name) type *name = (type *)(void *)ont_shared_now

/* While a graph is recorded, work is kept instead of executed. `forget` frees the context. */
extern "C" bool ont_emulate_recording(void);
extern "C" int ont_emulate_record(int (*work)(void *), void *context, void (*forget)(void *));

/* The shared memory of a kernel: 48 KiB until it is allowed more. */
int ont_emulate_allow(const void *kernel, size_t bytes);
int ont_emulate_check_shared(const char *name, const void *kernel, size_t bytes);
size_t ont_shared_limit(void);
#define ONT_ALLOW_SHARED(kernel, bytes) ((bytes) <= 49152 ? 0 : ont_emulate_allow((const void *)(kernel), (bytes)))

/* A launch with its arguments by value, as on hardware. */
template <class... P> struct ont_emulated {
    const char *name;
    void (*kernel)(P...);
    dim3 grid, block;
    size_t shared;
    std::tuple<P...> arguments;

    static int run(void *self)
    {
        ont_emulated *l = (ont_emulated *)self;
        if (int error = ont_emulate_check_shared(l->name, (const void *)l->kernel, l->shared)) return error;
        return ont_emulate_launch(l->name, l->grid, l->block, l->shared, [](void *context) {
            ont_emulated *inner = (ont_emulated *)context;
            std::apply(inner->kernel, inner->arguments);
        }, l);
    }
    static void forget(void *self) { delete (ont_emulated *)self; }
};
template <class... P, class... A>
static inline int ont_emulate_kernel(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                                     A... arguments)
{
    ont_emulated<P...> launch = {name, kernel, grid, block, shared, std::tuple<P...>((P)arguments...)};
    if (!ont_emulate_recording()) return ont_emulated<P...>::run(&launch);
    return ont_emulate_record(ont_emulated<P...>::run, new ont_emulated<P...>(launch), ont_emulated<P...>::forget);
}
#define ONT_LAUNCH(kernel, grid, block, shared, stream, ...) \
    ont_emulate_kernel(ont_emulate_on_stream(#kernel, (stream)), (kernel), (grid), (block), (shared), __VA_ARGS__)
#ifdef ONT_RACES
#define memcpy ont_emulate_memcpy /* which the compiler may expand without a report */
#endif

#endif
