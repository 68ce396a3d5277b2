/*
 * GEMM providers behind one table: torch's own BLAS found in the process, the same in shares of ours, oneDNN's where
 * its library is beside the extension, and a plain loop. Two other ways need a handle or scratch: oneDNN's primitive
 * (matmul.h) and our own kernel (tiled.h). The choice is measured per kind of product (sizes within a factor of 1.4)
 * and number of threads, once a process, or once a machine where its text is kept: on scratch memory, and of the
 * largest products in their first runs. Providers keep buffers of their own, and where one call has several threads it
 * must be the faster by it.
 */
#ifndef ONT_DEVICE_GEMM_H
#define ONT_DEVICE_GEMM_H

#include "base/dtype.h"

/* C (M, N) = alpha * op(A) (M, K) * op(B) (K, N) + beta * C, row-major; ld: elements between rows as stored. */
typedef struct ont_gemm {
    ont_dtype dtype; /* float32 or float64; bfloat16 for the ways that are no provider's */
    bool trans_a, trans_b;
    int64_t m, n, k;
    int64_t lda, ldb, ldc;
    double alpha, beta;
} ont_gemm;

typedef struct ont_gemm_provider {
    const char *name;
    bool (*available)(ont_dtype dtype); /* see ont_gemm_is_there() */
    void (*run)(const ont_gemm *g, const void *a, const void *b, void *c);
    bool alone; /* each thread calls the library for its own share */
} ont_gemm_provider;

/* In no order of speed: ont_gemm_choose() measures. The last one is always available. */
const ont_gemm_provider *ont_gemm_providers(size_t *count);
typedef enum ont_gemm_way {
    ONT_GEMM_PROVIDER,
    ONT_GEMM_PRIMITIVE,
    ONT_GEMM_TILED,
    ONT_GEMM_SPLIT, /* tiled, of float32 operands in two parts each: less exact, and never chosen by itself */
} ont_gemm_way;

/* What goes along with a product: a row (n) added to each of C's, and sums (m) of op(A) along k: A is float32 and
 * transposed. */
enum { ONT_GEMM_ROW = 1, ONT_GEMM_SUMS = 2 };

/* Ways of one very large product, among which its own runs decide. */
typedef struct ont_gemm_trial ont_gemm_trial;

struct ont_gemm_kernel;
/* The kernel of our own that goes this way; NULL: the way has none, or this processor. */
const struct ont_gemm_kernel *ont_gemm_kernel_of(ont_gemm_way way, ont_dtype dtype);

/*
 * With `on` no stopwatch decides from now on, for torch.use_deterministic_algorithms(): the same product goes the same
 * way in every process on such a processor.
 */
void ont_gemm_by_rule(bool on);
bool ont_gemm_is_by_rule(void);

/*
 * The fastest provider, and where `way` is not NULL the fastest way, of products `with` those things, each of which
 * costs a provider another pass. ONNXTRAIN_GEMM=torch|shares|onednn|primitive|tiled|plain fixes it. Small products are
 * not measured.
 */
const ont_gemm_provider *ont_gemm_choose(const ont_gemm *g, int with, ont_gemm_way *way);
/* The same of 16-bit operands, whose result is of their dtype or float32: the primitive or our own kernel. */
ont_gemm_way ont_gemm_choose_half(const ont_gemm *g, ont_dtype out, bool row);
const ont_gemm_provider *ont_gemm_plain(void);
/* Whether products of so many threads can go there: shares of one thread are the library itself. */
bool ont_gemm_is_there(const ont_gemm_provider *provider, ont_dtype dtype, int threads);

/* Memory that libraries keep and do not use goes back to the system: not all of those that are measured are used. */
void ont_gemm_release(void);
/*
 * Of products so large that a sample says little of them: NULL where the choice above stands. It outlives the caller,
 * who asks it before each run which way to go, and tells it how long that took in seconds. Every way that was near the
 * best takes its turn a few times, then it is always the fastest.
 */
ont_gemm_trial *ont_gemm_try(const ont_gemm *g, int with);
ont_gemm_way ont_gemm_trial_next(ont_gemm_trial *trial, const ont_gemm_provider **provider);
void ont_gemm_trial_note(ont_gemm_trial *trial, ont_gemm_way way, const ont_gemm_provider *provider, double seconds);
/*
 * What was measured, for ont_gemm_remember() in another process on the same machine: a line for each kind of product
 * and number of threads. NULL without memory; ont_free() takes it back.
 */
char *ont_gemm_measured(void);
/*
 * Takes such text in place of measurements, and answers how many kinds it learnt. Lines of another form, of ways that
 * are not here and of kinds already known are passed over; any text leads to correct products.
 */
int ont_gemm_remember(const char *text);
/* C += row (n) for so many matrices, one behind the other. */
void ont_gemm_add_row(const ont_gemm *g, int64_t matrices, const void *row, void *c);
/* sums (m) = A (k, m) along k: it is float32, and transposed in the product. */
void ont_gemm_sum(const ont_gemm *g, const float *a, float *sums);
/* Seconds of the best of a few runs on scratch memory; negative where there is no memory for it, or no such way. */
double ont_gemm_measure(ont_gemm_way way, const ont_gemm_provider *provider, const ont_gemm *g, ont_dtype out);

#endif
