/*
 * cuDNN's recurrent layers against the own kernels: outputs and every gradient of a few steps of the layer, on random
 * operands, when a program with a new layer is built. The verdict is known before the node is expanded, so a layer
 * that cuDNN computes otherwise costs no result: the node is expanded, as it is without cuDNN. For a layer in 16 bits
 * the own kernels compute in float32, on numbers that both types have.
 */
#include "ops/rnn.h"

#include <string.h>

#include "ops/compare.h"
#include "ops/recurrent.h"

extern const ont_allocator *ont_cuda_allocator;

enum { MOST_STEPS = 8, MOST_TAKEN = 96, ALIGN = 256 };

typedef struct check {
    const ont_device *device;
    void *stream;
    ont_rnn_shape shape; /* with the dtype of the own kernels */
    ont_dtype library;   /* the dtype of cuDNN's tensors */
    ont_rnn_plan *plan;
    size_t size;         /* of an element of the own kernels */
    uint64_t random;
    ont_memory taken[MOST_TAKEN];
    size_t taken_bytes[MOST_TAKEN];
    int n_taken;
    ont_status status; /* the first failure: later calls do nothing */
    ont_verdict verdict;
} check;

/* Operands in the order of ONNX, and the gradients of the results. */
typedef struct operands {
    void *x, *w, *r, *b, *h, *c, *dy, *dlast_h, *dlast_c;
} operands;

typedef struct results {
    void *y, *last_h, *last_c, *dx, *dw, *dr, *db, *dh, *dc;
} results;

#define DO(c, call) \
    do { \
        if ((c)->status == ONT_OK) (c)->status = (call); \
    } while (0)

static void *take(check *c, size_t bytes)
{
    int i = c->n_taken;
    if (c->status != ONT_OK) return NULL;
    bytes += ALIGN;
    if (i == MOST_TAKEN) c->status = ont_fail(ONT_ESTATE, "too many tensors");
    DO(c, c->device->ops->alloc(c->device, bytes, ONT_UINT8, &c->taken[i]));
    if (c->status != ONT_OK) return NULL;
    c->taken_bytes[i] = bytes;
    c->n_taken++;
    return (void *)(((uintptr_t)c->taken[i].data + ALIGN - 1) / ALIGN * ALIGN);
}

static void *numbers(check *c, int64_t count) { return take(c, (size_t)count * c->size); }

/* A number of at most seven bits between 2^-14 and 2^15, or 0: no dtype rounds it. */
static void put(void *to, ont_dtype dtype, int64_t i, double value)
{
    const float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    const uint32_t half = value == 0 ? 0 : (bits & 0x7fffffff) - (112u << 23); /* the exponents' offsets: 127 and 15 */
    switch (dtype) {
    case ONT_FLOAT64: ((double *)to)[i] = value; break;
    case ONT_FLOAT32: ((float *)to)[i] = single; break;
    case ONT_BFLOAT16: ((uint16_t *)to)[i] = (uint16_t)(bits >> 16); break;
    default: ((uint16_t *)to)[i] = (uint16_t)((bits >> 16 & 0x8000) | half >> 13);
    }
}

static double get(const void *from, ont_dtype dtype, int64_t i)
{
    if (dtype == ONT_FLOAT64) return ((const double *)from)[i];
    if (dtype == ONT_FLOAT32) return (double)((const float *)from)[i];
    const uint32_t bits = ((const uint16_t *)from)[i], wide = bits << 16;
    const int exponent = (int)(bits >> 10 & 31), mantissa = (int)(bits & 1023);
    float single;
    memcpy(&single, &wide, sizeof single);
    if (dtype == ONT_BFLOAT16) return (double)single;
    double value = exponent ? ldexp(mantissa + 1024, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31) value = NAN;
    return bits >> 15 ? -value : value;
}

static void *upload(check *c, int64_t count, ont_dtype dtype, const double *values)
{
    const size_t bytes = (size_t)count * ont_dtype_size(dtype);
    void *made = take(c, bytes), *host = ont_malloc(bytes);
    if (!host) DO(c, ONT_ENOMEM);
    for (int64_t i = 0; i < count && host; i++) put(host, dtype, i, values[i]);
    DO(c, c->device->ops->write(c->device, made, host, bytes, c->stream));
    DO(c, c->device->ops->synchronize(c->device, c->stream));
    ont_free(host);
    return made;
}

/* From about -scale to scale, by xorshift; the same for cuDNN and for the own kernels. */
static void random_numbers(check *c, int64_t count, double scale, void **library, void **own)
{
    const double unit = exp2(round(log2(scale)) - 6);
    double *values = ont_malloc((size_t)count * sizeof *values);
    *library = *own = NULL;
    if (!values) DO(c, ONT_ENOMEM);
    for (int64_t i = 0; i < count && values; i++) {
        c->random ^= c->random << 13;
        c->random ^= c->random >> 7;
        c->random ^= c->random << 17;
        values[i] = unit * (double)((int64_t)(c->random >> 40) % 127 - 63);
    }
    if (c->status == ONT_OK) *own = upload(c, count, (ont_dtype)c->shape.dtype, values);
    *library = *own;
    if (c->status == ONT_OK && c->library != (ont_dtype)c->shape.dtype) *library = upload(c, count, c->library, values);
    ont_free(values);
}

static void *at(const check *c, void *base, int64_t element) { return (char *)base + element * (int64_t)c->size; }

/* ---- cuDNN ---- */

static void move_weights(check *c, const ont_rnn_weights *weights, void *space, bool back)
{
    ont_rnn_parts parts;
    DO(c, ont_rnn_plan_parts(c->plan, weights, space, back, &parts));
    DO(c, ont_launched(ont_launch_rnn_parts(&parts, c->stream)));
}

static void run_library(check *c, const operands *o, const results *out)
{
    const ont_rnn_bytes bytes = ont_rnn_plan_bytes(c->plan);
    const ont_rnn_weights weights = {o->w, o->r, o->b}, grads = {out->dw, out->dr, out->db};
    void *space = take(c, bytes.weights), *dspace = take(c, bytes.weights), *work = take(c, bytes.work);
    void *saved = take(c, bytes.saved);
    const ont_rnn_operands forward = {.x = o->x, .h = o->h, .c = o->c, .y = out->y, .last_h = out->last_h,
                                      .last_c = out->last_c, .space = space, .work = work, .saved = saved,
                                      .stream = c->stream};
    const ont_rnn_grad_operands backward = {
        .x = o->x, .h = o->h, .c = o->c, .y = out->y, .dy = o->dy, .dlast_h = o->dlast_h, .dlast_c = o->dlast_c,
        .dx = out->dx, .dh = out->dh, .dc = out->dc, .space = space, .dspace = dspace, .work = work, .saved = saved,
        .stream = c->stream};
    move_weights(c, &weights, space, false);
    DO(c, ont_rnn_plan_forward(c->plan, &forward));
    DO(c, c->device->ops->clear(c->device, dspace, bytes.weights, c->stream));
    DO(c, ont_rnn_plan_backward(c->plan, &backward));
    move_weights(c, &grads, dspace, true);
}

/* ---- the own kernels ---- */

static void multiply(check *c, ont_blas_gemm gemm, const void *a, const void *b, void *to)
{
    const ont_blas *blas = ont_blas_get();
    void *plan = NULL;
    gemm.dtype = gemm.result = (ont_dtype)c->shape.dtype;
    gemm.batch = 1;
    gemm.alpha = 1;
    DO(c, blas->create(&gemm, &plan));
    void *work = c->status == ONT_OK ? take(c, blas->work_bytes(plan)) : NULL;
    const ont_blas_operands operands = {.a = a, .b = b, .c = to, .work = work};
    DO(c, blas->run(plan, &operands, c->stream));
    DO(c, c->device->ops->synchronize(c->device, c->stream));
    if (plan) blas->destroy(plan);
}

/* Rows of both, (rows, n) each, added into the first. */
static void add(check *c, int64_t count, void *to, const void *more)
{
    DO(c, ont_launched(ont_launch_index_add(c->shape.dtype, count, to, more, to, c->stream)));
}

/* Direction d of a tensor (D, ...) of which each entry has `count` elements; NULL stays NULL. */
static void *of(const check *c, void *base, int d, int64_t count) { return base ? at(c, base, d * count) : NULL; }

/* The input's part of the gates with the biases, except a GRU's candidate's recurrent one: recurrent.c has that. */
static void *gates_of(check *c, const operands *o, int d, int64_t wide)
{
    const ont_rnn_shape *s = &c->shape;
    const int64_t rows = s->steps * s->batch, of_state = s->cell == ONT_CELL_GRU ? 2 * s->hidden : wide;
    void *x = numbers(c, rows * wide), *bias = of(c, o->b, d, 2 * wide), *rest = numbers(c, wide);
    multiply(c, (ont_blas_gemm){.trans_b = true, .m = rows, .n = wide, .k = s->in, .lda = s->in, .ldb = s->in,
                                .ldc = wide}, o->x, of(c, o->w, d, wide * s->in), x);
    if (!bias) return x;
    DO(c, c->device->ops->clear(c->device, rest, (size_t)wide * c->size, c->stream));
    DO(c, c->device->ops->copy(c->device, rest, at(c, bias, wide), (size_t)of_state * c->size, c->stream));
    DO(c, ont_launched(ont_launch_channel_bias(s->dtype, rows, wide, 1, bias, x, c->stream)));
    DO(c, ont_launched(ont_launch_channel_bias(s->dtype, rows, wide, 1, rest, x, c->stream)));
    return x;
}

/* The gradients of W, B and x from those of the gates, and of R's bias from those of the products. */
static void input_grads(check *c, const operands *o, const results *out, int d, void *dgates, void *dproducts,
                        void *dx)
{
    const ont_rnn_shape *s = &c->shape;
    const int64_t rows = s->steps * s->batch, wide = ont_cell_gates((ont_cell)s->cell) * s->hidden;
    void *db = of(c, out->db, d, 2 * wide);
    multiply(c, (ont_blas_gemm){.trans_a = true, .m = wide, .n = s->in, .k = rows, .lda = wide, .ldb = s->in,
                                .ldc = s->in}, dgates, o->x, of(c, out->dw, d, wide * s->in));
    multiply(c, (ont_blas_gemm){.m = rows, .n = s->in, .k = wide, .lda = wide, .ldb = s->in, .ldc = s->in}, dgates,
             of(c, o->w, d, wide * s->in), dx);
    if (!db) return;
    DO(c, ont_launched(ont_launch_column_sums(s->dtype, rows, wide, wide, dgates, db, c->stream)));
    DO(c, ont_launched(ont_launch_column_sums(s->dtype, rows, wide, wide, dproducts, at(c, db, wide), c->stream)));
}

/* y is (T, B, H), of this direction alone. */
static void run_direction(check *c, const operands *o, const results *out, int d, void *y, void *dy, void *dx)
{
    const ont_rnn_shape *s = &c->shape;
    const ont_cell cell = (ont_cell)s->cell;
    const int64_t wide = ont_cell_gates(cell) * s->hidden, state = s->batch * s->hidden, rows = s->steps * s->batch;
    const bool gru = cell == ONT_CELL_GRU;
    ont_steps forward = ont_steps_of(cell, (ont_dtype)s->dtype, s->steps, s->batch, s->hidden, d == 1, false);
    ont_steps backward = ont_steps_of(cell, (ont_dtype)s->dtype, s->steps, s->batch, s->hidden, d == 1, true);
    size_t bytes[2] = {0};
    DO(c, ont_steps_prepare(&forward, false, &bytes[0]));
    DO(c, ont_steps_prepare(&backward, true, &bytes[1]));
    void *bias = of(c, o->b, d, 2 * wide), *saved = numbers(c, rows * ont_cell_saved(cell) * s->hidden);
    void *work = take(c, bytes[0] > bytes[1] ? bytes[0] : bytes[1]), *dgates = numbers(c, rows * wide);
    void *dproducts = gru ? numbers(c, rows * wide) : NULL;
    const ont_steps_operands ahead = {
        .x = gates_of(c, o, d, wide), .r = of(c, o->r, d, wide * s->hidden), .h0 = of(c, o->h, d, state),
        .c0 = of(c, o->c, d, state), .bias = gru && bias ? at(c, bias, wide + 2 * s->hidden) : NULL, .y = y,
        .h = of(c, out->last_h, d, state), .c = of(c, out->last_c, d, state), .saved = saved, .work = work,
        .stream = c->stream};
    const ont_steps_grad_operands back = {
        .saved = saved, .r = ahead.r, .dy = dy, .dh = of(c, o->dlast_h, d, state), .dc = of(c, o->dlast_c, d, state),
        .dx = dgates, .dr = of(c, out->dr, d, wide * s->hidden), .dh0 = of(c, out->dh, d, state),
        .dc0 = of(c, out->dc, d, state), .dproducts = dproducts, .work = work, .stream = c->stream};
    DO(c, ont_steps_run(&forward, c->device, &ahead));
    DO(c, ont_steps_grad_run(&backward, c->device, &back));
    input_grads(c, o, out, d, dgates, gru ? dproducts : dgates, dx);
    DO(c, c->device->ops->synchronize(c->device, c->stream));
    ont_steps_release(&forward);
    ont_steps_release(&backward);
}

/* Direction d of (T, B, D, H), as rows without gaps. */
static void *direction_of(check *c, const void *both, int d, ont_dtype dtype)
{
    const ont_rnn_shape *s = &c->shape;
    const int64_t rows = s->steps * s->batch;
    const ont_device_strided layout = {.rank = 2, .dims = {rows, s->hidden}, .strides = {s->directions * s->hidden, 1},
                                       .size = ont_dtype_size(dtype)};
    void *one = take(c, (size_t)(rows * s->hidden) * layout.size);
    DO(c, c->device->ops->copy_strided(c->device, &layout, (const char *)both + d * s->hidden * (int64_t)layout.size,
                                       one, c->stream));
    return one;
}

/* ---- comparison ---- */

static double tolerance_of(const check *c)
{
    bool rough = ont_cuda_allocator->tf32_conv || ont_cuda_allocator->tf32 || c->shape.cell == ONT_CELL_RELU;
    if (c->library == ONT_FLOAT64) return 1e-8;
    if (c->library == ONT_FLOAT16) return 0.02;
    if (c->library == ONT_BFLOAT16) return 0.08;
    return rough ? 0.05 : 1e-3;
}

static void compare_host(check *c, const void *got, const void *want, int64_t rows, int64_t n, float *differences)
{
    for (int64_t row = 0; row < rows; row++) {
        double difference = 0, norm = 0;
        for (int64_t i = row * n; i < (row + 1) * n; i++) {
            double g = get(got, c->library, i), w = get(want, (ont_dtype)c->shape.dtype, i);
            difference += (g - w) * (g - w);
            norm += w * w;
        }
        differences[2 * row] = (float)difference;
        differences[2 * row + 1] = (float)norm;
    }
    ont_verdict found = ont_judge_rows(differences, rows, tolerance_of(c));
    if (found != ONT_VERDICT_ACCEPTED) c->verdict = ONT_VERDICT_REFUSED;
}

/* Rows of n elements; of Relu one row, because a sum that is 0 but for roundings may have a gradient or none. */
static void compare(check *c, const void *got, const void *want, int64_t rows, int64_t n)
{
    if (!got || c->status != ONT_OK) return;
    if (c->shape.cell == ONT_CELL_RELU) {
        n *= rows;
        rows = 1;
    }
    const size_t bytes = (size_t)(rows * n) * c->size, got_bytes = (size_t)(rows * n) * ont_dtype_size(c->library);
    void *a = ont_malloc(got_bytes), *b = ont_malloc(bytes);
    float *differences = ont_malloc((size_t)rows * 2 * sizeof *differences);
    if (!a || !b || !differences) c->status = ONT_ENOMEM;
    DO(c, c->device->ops->read(c->device, a, got, got_bytes, c->stream));
    DO(c, c->device->ops->read(c->device, b, want, bytes, c->stream));
    if (c->status == ONT_OK) compare_host(c, a, b, rows, n, differences);
    ont_free(a);
    ont_free(b);
    ont_free(differences);
}

static results new_results(check *c, ont_dtype dtype)
{
    const ont_rnn_shape *s = &c->shape;
    const bool lstm = s->cell == ONT_CELL_LSTM;
    const int64_t d = s->directions, n = s->hidden, wide = ont_cell_gates((ont_cell)s->cell) * n * d;
    const size_t size = ont_dtype_size(dtype), rows = (size_t)(s->steps * s->batch) * size;
    const size_t state = (size_t)(d * s->batch * n) * size, row = (size_t)wide * size;
    return (results){.y = take(c, rows * (size_t)(d * n)), .last_h = take(c, state),
                     .last_c = lstm ? take(c, state) : NULL, .dx = take(c, rows * (size_t)s->in),
                     .dw = take(c, row * (size_t)s->in), .dr = take(c, row * (size_t)n),
                     .db = s->has_bias ? take(c, 2 * row) : NULL, .dh = take(c, state),
                     .dc = lstm ? take(c, state) : NULL};
}

static void new_operands(check *c, operands *library, operands *own)
{
    const ont_rnn_shape *s = &c->shape;
    const int64_t d = s->directions, n = s->hidden, wide = ont_cell_gates((ont_cell)s->cell) * n * d;
    const int64_t rows = s->steps * s->batch, state = d * s->batch * n;
    *library = *own = (operands){0};
    random_numbers(c, rows * s->in, 1, &library->x, &own->x);
    random_numbers(c, wide * s->in, 1.7 / sqrt((double)s->in), &library->w, &own->w);
    random_numbers(c, wide * n, 1.7 / sqrt((double)n), &library->r, &own->r);
    if (s->has_bias) random_numbers(c, 2 * wide, 0.5, &library->b, &own->b);
    random_numbers(c, state, 1, &library->h, &own->h);
    random_numbers(c, rows * d * n, 1, &library->dy, &own->dy);
    random_numbers(c, state, 1, &library->dlast_h, &own->dlast_h);
    if (s->cell != ONT_CELL_LSTM) return;
    random_numbers(c, state, 1, &library->c, &own->c);
    random_numbers(c, state, 1, &library->dlast_c, &own->dlast_c);
}

static void compare_layers(check *c)
{
    const ont_rnn_shape *s = &c->shape;
    const int64_t d = s->directions, wide = ont_cell_gates((ont_cell)s->cell) * s->hidden * d;
    const int64_t rows = s->steps * s->batch, n = s->hidden;
    const ont_dtype dtype = (ont_dtype)s->dtype;
    operands theirs, o;
    new_operands(c, &theirs, &o);
    const results got = new_results(c, c->library), want = new_results(c, dtype);
    void *second = numbers(c, rows * s->in);
    run_library(c, &theirs, &got);
    for (int i = 0; i < d && c->status == ONT_OK; i++) {
        void *y = numbers(c, rows * n);
        run_direction(c, &o, &want, i, y, direction_of(c, o.dy, i, dtype), i ? second : want.dx);
        compare(c, direction_of(c, got.y, i, c->library), y, rows, n);
    }
    if (d == 2) add(c, rows * s->in, want.dx, second);
    compare(c, got.last_h, want.last_h, d * s->batch, n);
    compare(c, got.last_c, want.last_c, d * s->batch, n);
    compare(c, got.dx, want.dx, rows, s->in);
    compare(c, got.dw, want.dw, wide, s->in);
    compare(c, got.dr, want.dr, wide, n);
    compare(c, got.db, want.db, 2 * wide / n, n);
    compare(c, got.dh, want.dh, d * s->batch, n);
    compare(c, got.dc, want.dc, d * s->batch, n);
}

/* ---- the verdict ---- */

static ont_dtype own_dtype(const ont_rnn_shape *s)
{
    return ont_is_float32_or_64((ont_dtype)s->dtype) ? (ont_dtype)s->dtype : ONT_FLOAT32;
}

/* Unknown where memory is short. */
static ont_verdict judge(const ont_rnn_shape *shape, ont_rnn_plan *plan, const ont_device *device)
{
    check c = {.device = device, .shape = *shape, .library = (ont_dtype)shape->dtype, .plan = plan,
               .random = 88172645463325252u, .verdict = ONT_VERDICT_ACCEPTED};
    c.shape.dtype = (int32_t)own_dtype(shape);
    c.size = ont_dtype_size((ont_dtype)c.shape.dtype);
    ont_scope scope;
    if (device->ops->enter(device, &scope) != ONT_OK) return ONT_VERDICT_REFUSED;
    c.stream = scope.stream;
    compare_layers(&c);
    if (device->ops->synchronize(device, c.stream) != ONT_OK) c.verdict = ONT_VERDICT_REFUSED;
    for (int i = 0; i < c.n_taken; i++) device->ops->free(device, &c.taken[i], c.taken_bytes[i]);
    device->ops->leave(device, &scope);
    if (c.status == ONT_OK && c.verdict == ONT_VERDICT_REFUSED)
        (void)ont_fail(ONT_ESTATE, "cuDNN's results differ from those of the own kernels");
    return c.status == ONT_OK ? c.verdict : c.status == ONT_ENOMEM ? ONT_VERDICT_UNKNOWN : ONT_VERDICT_REFUSED;
}

static const char *text_of(ont_verdict verdict)
{
    return verdict == ONT_VERDICT_ACCEPTED ? NULL
           : verdict == ONT_VERDICT_UNKNOWN ? "no memory to compare it with the own kernels"
                                            : "cuDNN failed, or its results differ from the own kernels'";
}

const char *ont_rnn_check(const ont_node *node, ont_rnn_plan *plan, const ont_rnn_shape *shape)
{
    ont_rnn_shape few = *shape;
    ont_rnn_plan *short_plan = plan;
    ont_verdict verdict = ont_rnn_plan_verdict(plan);
    ont_steps forward = ont_steps_of((ont_cell)shape->cell, own_dtype(shape), shape->steps, shape->batch,
                                     shape->hidden, false, false);
    if (verdict != ONT_VERDICT_UNKNOWN) return text_of(verdict);
    if (ont_steps_refusal(&forward)) return "there are no own kernels to compare with";
    if (few.steps > MOST_STEPS) few.steps = MOST_STEPS;
    const char *refusal = ont_rnn_plan_get(&few, &short_plan);
    if (refusal) return refusal;
    verdict = ont_rnn_plan_verdict(short_plan);
    if (verdict == ONT_VERDICT_UNKNOWN) {
        verdict = judge(&few, short_plan, ont_cuda_device());
        if (verdict == ONT_VERDICT_REFUSED)
            ont_log(ONT_LOG_WARNING, "%s '%s': the own kernels compute it: %s", node->op_type, node->name,
                    ont_error_message());
    }
    ont_rnn_plan_judge(short_plan, verdict);
    ont_rnn_plan_judge(plan, verdict);
    return text_of(verdict);
}
