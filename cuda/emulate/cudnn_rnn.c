/*
 * The recurrent layers of cuDNN for the emulated device, called by libs/rnn.c: loops in double, and the rules that
 * NVIDIA's documentation has for a caller (contract.h): sizes that were asked for, forward in training mode before the
 * gradient of the inputs, and that before the gradient of the weights, with one reserve space, which the first gradient
 * overwrites. Some layers are declined when sizes are asked for, or refused when they are called, as the library may.
 * Weights lie in the order of cuDNN's numbers, with gaps. ONT_EMULATE_RNN_FAULT plants a fault, for the tests of what
 * finds it: a word of the comments below.
 */
#include <math.h>
#include <string.h>

#include "libs/cudnn_rnn.h"
#include "emulate/cudnn_desc.h"
#include "emulate/values.h"

enum { ALIGN = 256, MOST_WORK = 4000, HEADER = 64, MOST_SLOTS = 5 };
enum { COMPUTED = 0x5e1f0001, DIFFERENTIATED }; /* what the reserve space contains */

typedef struct layer { /* int alone: it is compared by its bytes */
    int kind, cell, bias, directions, type, math, in, hidden;
} layer;

typedef struct sequences {
    int kind, type, steps, batch, width;
} sequences;

typedef struct trait { /* of a layer */
    size_t work[2], more; /* more: bytes of the reserve space that no call reads */
    int gap;
    bool declines, refuses_forward, refuses_weights;
} trait;

static long runs;

__attribute__((visibility("default"))) long ont_emulate_rnn_runs(void)
{
    return runs;
}

static bool has_fault(const char *name)
{
    const char *given = getenv("ONT_EMULATE_RNN_FAULT");
    return given && !strcmp(given, name);
}

static trait trait_of(const layer *l)
{
    uint64_t random = ont_emulate_key(l, sizeof *l), drawn = ont_emulate_random(&random);
    trait t = {.work = {drawn >> 8 & 1 ? (drawn >> 9) % MOST_WORK : 0, (drawn >> 24) % MOST_WORK},
               .more = (drawn >> 40) % MOST_WORK, .gap = 16 * (int)(drawn >> 52 & 3)};
    bool at_random = !getenv("ONT_EMULATE_RNN_FAULT"); /* else the planted fault is the only one */
    t.declines = at_random ? drawn % 16 == 0 : has_fault("declines"); /* declines: no layer is taken */
    t.refuses_forward = at_random ? drawn % 16 == 1 : has_fault("forward"); /* forward: the call fails */
    t.refuses_weights = at_random ? drawn % 16 == 2 : has_fault("weights"); /* weights: the last call of a step fails */
    return t;
}

static int gates_of(const layer *l) { return l->cell == RNN_LSTM ? 4 : l->cell == RNN_GRU ? 3 : 1; }
static ont_dtype dtype_of(int type)
{
    return type == DATA_DOUBLE ? ONT_FLOAT64 : type == DATA_FLOAT ? ONT_FLOAT32 : type == DATA_HALF ? ONT_FLOAT16
                                                                                                 : ONT_BFLOAT16;
}
static size_t size_of(int type) { return type == DATA_DOUBLE ? 8 : type == DATA_FLOAT ? 4 : 2; }
static bool is_half(int type) { return type == DATA_HALF || type == DATA_BFLOAT16; }

/* ---- descriptors ---- */

static size_t version(void)
{
    return 92800;
}

static int dropout_create(void **desc)
{
    *desc = fresh(sizeof(int), DROPOUT);
    return CUDNN_SUCCESS;
}

static int dropout_set(void *desc, void *opaque, float dropout, void *states, size_t bytes, unsigned long long seed)
{
    (void)read_handle(opaque, "cuDNN's recurrent layer");
    ONT_REQUIRE(*(int *)desc == DROPOUT && dropout == 0 && !states && !bytes && !seed, "cudnnSetDropoutDescriptor");
    return CUDNN_SUCCESS;
}

static int dropout_destroy(void *desc)
{
    return destroy(desc, DROPOUT);
}

static int data_create(void **desc)
{
    *desc = fresh(sizeof(sequences), SEQUENCES);
    return CUDNN_SUCCESS;
}

static int data_destroy(void *desc)
{
    return destroy(desc, SEQUENCES);
}

static int data_set(void *desc, int type, int layout, int steps, int batch, int width, const int *lengths, void *fill)
{
    const char *call = "cudnnSetRNNDataDescriptor";
    CHECKED(sequences, SEQUENCES, desc, s);
    ONT_REQUIRE(type == DATA_FLOAT || type == DATA_DOUBLE || is_half(type), "%s: type %d", call, type);
    ONT_REQUIRE(layout == RNN_SEQ_MAJOR_UNPACKED && !fill, "%s: layout %d", call, layout);
    ONT_REQUIRE(steps > 0 && batch > 0 && width > 0, "%s: %d, %d, %d", call, steps, batch, width);
    for (int i = 0; i < batch; i++) ONT_REQUIRE(lengths[i] == steps, "%s: length %d", call, lengths[i]);
    *s = (sequences){SEQUENCES, type, steps, batch, width};
    return CUDNN_SUCCESS;
}

static int rnn_create(void **desc)
{
    *desc = fresh(sizeof(layer), RECURRENT);
    return CUDNN_SUCCESS;
}

static int rnn_destroy(void *desc)
{
    return destroy(desc, RECURRENT);
}

static int rnn_set(void *desc, int algorithm, int cell, int bias, int directions, int input, int type, int compute,
                   int math, int32_t in, int32_t hidden, int32_t projection, int32_t layers, void *dropout,
                   uint32_t flags)
{
    const char *call = "cudnnSetRNNDescriptor_v8";
    CHECKED(layer, RECURRENT, desc, l);
    ONT_REQUIRE(dropout && *(int *)dropout == DROPOUT, "%s: no descriptor of dropout", call);
    ONT_REQUIRE(algorithm == RNN_ALGO_STANDARD && cell >= RNN_RELU && cell <= RNN_GRU && input == RNN_LINEAR_INPUT,
                "%s: algorithm %d, cell %d, input mode %d", call, algorithm, cell, input);
    ONT_REQUIRE(bias == RNN_NO_BIAS || bias == RNN_DOUBLE_BIAS, "%s: bias mode %d", call, bias);
    ONT_REQUIRE(compute == (is_half(type) ? DATA_FLOAT : type) && (compute == DATA_FLOAT || compute == DATA_DOUBLE),
                "%s: types %d and %d", call, type, compute);
    ONT_REQUIRE(math == MATH_DEFAULT || (math == MATH_FMA && type == DATA_FLOAT) ||
                    (math == MATH_TENSOR_OP && is_half(type)), "%s: math type %d", call, math);
    ONT_REQUIRE(in > 0 && hidden > 0 && projection == hidden && layers == 1, "%s: sizes %d, %d, %d, %d layers", call,
                in, hidden, projection, layers);
    ONT_REQUIRE(flags == RNN_PADDED_IO_ENABLED, "%s: flags %u, and the data is padded", call, flags);
    *l = (layer){RECURRENT, cell, bias, directions == RNN_BIDIRECTIONAL ? 2 : 1, type, math, in, hidden};
    return CUDNN_SUCCESS;
}

/* ---- sizes ---- */

/*
 * Bytes in front of part `part` of a direction's matrices (or biases): all matrices, then all biases, in the order of
 * cuDNN's numbers. cuDNN 9.28 leaves no gaps; here there may be some.
 */
static size_t place_of(const layer *l, int direction, int part, bool bias)
{
    const size_t gap = (size_t)trait_of(l).gap, size = size_of(l->type);
    size_t at = 0;
    for (int pass = 0; pass <= bias; pass++)
        for (int d = 0; d < l->directions; d++)
            for (int i = 0; i < 2 * gates_of(l); i++) {
                if (pass == bias && d == direction && i == part) return at;
                int columns = pass ? 1 : i < gates_of(l) ? l->in : l->hidden;
                at += (size_t)l->hidden * (size_t)columns * size + gap;
            }
    return at;
}

static size_t bytes_of_weights(const layer *l)
{
    return place_of(l, l->directions, 0, l->bias == RNN_DOUBLE_BIAS);
}

static int weight_bytes(void *opaque, void *desc, size_t *bytes)
{
    (void)read_handle(opaque, "cuDNN's recurrent layer");
    CHECKED(layer, RECURRENT, desc, l);
    *bytes = bytes_of_weights(l);
    return CUDNN_SUCCESS;
}

static size_t bytes_of_reserve(const layer *l, const sequences *s)
{
    return HEADER + sizeof(double) * (size_t)(l->directions * s->steps * s->batch * MOST_SLOTS * l->hidden) +
           trait_of(l).more;
}

static int temporary_bytes(void *opaque, void *desc, int mode, void *data, size_t *work, size_t *reserve)
{
    (void)read_handle(opaque, "cuDNN's recurrent layer");
    CHECKED(layer, RECURRENT, desc, l);
    CHECKED(sequences, SEQUENCES, data, x);
    ONT_REQUIRE(x->width == l->in && x->type == l->type, "cudnnGetRNNTempSpaceSizes: the input has width %d", x->width);
    if (trait_of(l).declines) return CUDNN_NOT_SUPPORTED;
    *work = trait_of(l).work[mode];
    *reserve = mode == RNN_TRAINING ? bytes_of_reserve(l, x) : 0;
    return CUDNN_SUCCESS;
}

static int weight_part(void *opaque, void *desc, int32_t direction, size_t bytes, const void *weights, int32_t part,
                       void *matrix_desc, void **matrix, void *bias_desc, void **bias)
{
    const char *call = "cudnnGetRNNWeightParams";
    (void)read_handle(opaque, "cuDNN's recurrent layer");
    CHECKED(layer, RECURRENT, desc, l);
    CHECKED(tensor, TENSOR, matrix_desc, m);
    CHECKED(tensor, TENSOR, bias_desc, b);
    ONT_REQUIRE(bytes == bytes_of_weights(l), "%s: %zu bytes of weights", call, bytes);
    ONT_REQUIRE(direction >= 0 && direction < l->directions && part >= 0 && part < 2 * gates_of(l),
                "%s: part %d of layer %d", call, part, direction);
    if (has_fault("gates") && gates_of(l) > 1 && part < 2) part = 1 - part; /* gates: two are exchanged */
    if (has_fault("directions")) direction = l->directions - 1 - direction; /* directions: both are exchanged */
    int of_state = has_fault("halves") && l->in == l->hidden; /* halves: those of input and state are exchanged */
    if (of_state) part = (part + gates_of(l)) % (2 * gates_of(l));
    *matrix = (char *)(uintptr_t)weights + place_of(l, direction, part, false);
    *bias = l->bias == RNN_NO_BIAS ? NULL : (char *)(uintptr_t)weights + place_of(l, direction, part, true);
    *m = (tensor){TENSOR, l->type, 3, {1, l->hidden, part < gates_of(l) ? l->in : l->hidden}, {0}};
    *b = (tensor){TENSOR, l->type, *bias ? 3 : 0, {1, l->hidden, 1}, {0}};
    return CUDNN_SUCCESS;
}

/* ---- a call ---- */

typedef enum work_kind { FORWARD, BACKWARD_DATA, BACKWARD_WEIGHTS } work_kind;

typedef struct call {
    work_kind kind;
    layer l;
    int steps, batch, mode;
    const void *x, *y, *hx, *cx, *dy, *dhy, *dcy, *weights;
    void *to_y, *hy, *cy, *dx, *dhx, *dcx, *dweights, *work, *reserve;
    size_t work_bytes, reserve_bytes;
    size_t places[2][8][2]; /* of directions, parts, and matrix or bias: place_of() */
} call;

typedef struct header {
    uint64_t key;
    int64_t content;
} header;

/* Slot of a step in the reserve space: activations of gates, a GRU's product, an LSTM's cell; then their gradients. */
static double *slot_of(const call *c, int d, int t, int b, int slot)
{
    double *all = (double *)(void *)((char *)c->reserve + HEADER);
    return all + ((((int64_t)d * c->steps + t) * c->batch + b) * MOST_SLOTS + slot) * c->l.hidden;
}

static double get(const call *c, const void *data, int64_t i)
{
    return data ? ont_emulate_get(dtype_of(c->l.type), data, i) : 0;
}

static void put(const call *c, void *data, int64_t i, double value)
{
    if (data) ont_emulate_put(dtype_of(c->l.type), data, i, value);
}

static double weight(const call *c, int d, int part, int64_t row, int64_t column)
{
    int width = part < gates_of(&c->l) ? c->l.in : c->l.hidden;
    return get(c, (const char *)c->weights + c->places[d][part][0], row * width + column);
}

static double bias(const call *c, int d, int part, int64_t row)
{
    return c->l.bias == RNN_NO_BIAS ? 0 : get(c, (const char *)c->weights + c->places[d][part][1], row);
}

static int64_t x_at(const call *c, int t, int b) { return ((int64_t)t * c->batch + b) * c->l.in; }
static int64_t state_at(const call *c, int d, int b) { return ((int64_t)d * c->batch + b) * c->l.hidden; }
static int64_t y_at(const call *c, int d, int t, int b)
{
    return (((int64_t)t * c->batch + b) * c->l.directions + d) * c->l.hidden;
}

/* Number k of the state in front of step t; the step after it in time of direction 1. */
static double h_before(const call *c, const void *y, int d, int t, int b, int64_t k)
{
    int before = d ? t + 1 : t - 1;
    if (before < 0 || before == c->steps) return get(c, c->hx, state_at(c, d, b) + k);
    return get(c, y, y_at(c, d, before, b) + k);
}

static double c_before(const call *c, int d, int t, int b, int64_t k)
{
    int before = d ? t + 1 : t - 1;
    if (before < 0 || before == c->steps) return get(c, c->cx, state_at(c, d, b) + k);
    return slot_of(c, d, before, b, 4)[k];
}

static double sigmoid(double v) { return 1 / (1 + exp(-v)); }

/* The sums of a gate for the input and for the state. */
static void sums_of(const call *c, int d, int t, int b, int gate, int64_t k, double *of_x, double *of_h)
{
    int gates = gates_of(&c->l);
    *of_x = bias(c, d, gate, k);
    *of_h = bias(c, d, gates + gate, k);
    for (int64_t i = 0; i < c->l.in; i++) *of_x += weight(c, d, gate, k, i) * get(c, c->x, x_at(c, t, b) + i);
    for (int64_t i = 0; i < c->l.hidden; i++)
        *of_h += weight(c, d, gates + gate, k, i) * h_before(c, c->to_y, d, t, b, i);
}

/* One number of the state of a step. cuDNN's order of gates: LSTM i, f, c, o; GRU r, z, n. */
static double cell(const call *c, int d, int t, int b, int64_t k)
{
    double x[4], h[4], *slot[MOST_SLOTS];
    for (int g = 0; g < gates_of(&c->l); g++) sums_of(c, d, t, b, g, k, &x[g], &h[g]);
    for (int i = 0; i < MOST_SLOTS; i++) slot[i] = slot_of(c, d, t, b, i) + k;
    if (c->l.cell == RNN_LSTM) {
        *slot[0] = sigmoid(x[0] + h[0]);
        *slot[1] = sigmoid(x[1] + h[1]);
        *slot[2] = tanh(x[2] + h[2]);
        *slot[3] = sigmoid(x[3] + h[3]);
        *slot[4] = *slot[1] * c_before(c, d, t, b, k) + *slot[0] * *slot[2];
        return *slot[3] * tanh(*slot[4]);
    }
    if (c->l.cell == RNN_GRU) {
        *slot[0] = sigmoid(x[0] + h[0]);
        *slot[1] = sigmoid(x[1] + h[1]);
        *slot[3] = h[2];
        *slot[2] = tanh(x[2] + *slot[0] * h[2]);
        return (1 - *slot[1]) * *slot[2] + *slot[1] * h_before(c, c->to_y, d, t, b, k);
    }
    double sum = x[0] + h[0];
    return *slot[0] = c->l.cell == RNN_TANH ? tanh(sum) : sum > 0 ? sum : 0;
}

static void compute(const call *c)
{
    bool lost = has_fault("last"); /* last: the last sequence is not computed */
    for (int d = 0; d < c->l.directions; d++)
        for (int i = 0; i < c->steps; i++)
            for (int b = 0; b < c->batch; b++) {
                int t = d ? c->steps - 1 - i : i;
                for (int64_t k = 0; k < c->l.hidden; k++) {
                    double h = lost && b == c->batch - 1 ? 0 : cell(c, d, t, b, k);
                    put(c, c->to_y, y_at(c, d, t, b) + k, h);
                    if (i < c->steps - 1) continue;
                    put(c, c->hy, state_at(c, d, b) + k, h);
                    put(c, c->cy, state_at(c, d, b) + k, *(slot_of(c, d, t, b, 4) + k));
                }
            }
}

/* dh: of the state behind a step, dc of its cell. Slots become the gradients of the gates' sums; those of a GRU's
 * product are in slot 3. *rest: the gradient of the state in front that came by no product. */
static void grad_of_cell(const call *c, int d, int t, int b, int64_t k, double dh, double *dc, double *rest)
{
    double *slot[MOST_SLOTS], s[MOST_SLOTS];
    for (int i = 0; i < MOST_SLOTS; i++) {
        slot[i] = slot_of(c, d, t, b, i) + k;
        s[i] = *slot[i];
    }
    *rest = 0;
    if (c->l.cell == RNN_LSTM) {
        double tanh_c = tanh(s[4]), all = *dc + dh * s[3] * (1 - tanh_c * tanh_c);
        *slot[0] = all * s[2] * s[0] * (1 - s[0]);
        *slot[1] = all * c_before(c, d, t, b, k) * s[1] * (1 - s[1]);
        *slot[2] = all * s[0] * (1 - s[2] * s[2]);
        *slot[3] = dh * tanh_c * s[3] * (1 - s[3]);
        *dc = all * s[1];
    } else if (c->l.cell == RNN_GRU) {
        double dn = dh * (1 - s[1]) * (1 - s[2] * s[2]);
        *slot[0] = dn * s[3] * s[0] * (1 - s[0]);
        *slot[1] = dh * (h_before(c, c->y, d, t, b, k) - s[2]) * s[1] * (1 - s[1]);
        *slot[2] = dn;
        *slot[3] = dn * s[0];
        *rest = dh * s[1];
    } else {
        *slot[0] = c->l.cell == RNN_TANH ? dh * (1 - s[0] * s[0]) : s[0] > 0 ? dh : 0;
    }
}

/* The slot with the gradient of a gate's sum for the state. */
static int slot_of_state(const call *c, int gate) { return c->l.cell == RNN_GRU && gate == 2 ? 3 : gate; }

static void differentiate_direction(const call *c, int d, double *dh, double *dc, double *dx)
{
    const int64_t n = c->l.hidden;
    const int gates = gates_of(&c->l);
    for (int i = 0; i < c->steps; i++)
        for (int b = 0; b < c->batch; b++) {
            int t = d ? i : c->steps - 1 - i;
            double *state = dh + b * n, *rest = calloc((size_t)n, sizeof *rest);
            ONT_REQUIRE(rest, "out of memory");
            for (int64_t k = 0; k < n; k++)
                grad_of_cell(c, d, t, b, k, state[k] + get(c, c->dy, y_at(c, d, t, b) + k), &dc[b * n + k], &rest[k]);
            memcpy(state, rest, (size_t)n * sizeof *rest);
            free(rest);
            for (int g = 0; g < gates; g++)
                for (int64_t k = 0; k < n; k++) {
                    double of_x = slot_of(c, d, t, b, g)[k], of_h = slot_of(c, d, t, b, slot_of_state(c, g))[k];
                    for (int64_t j = 0; j < n; j++) state[j] += weight(c, d, gates + g, k, j) * of_h;
                    for (int64_t j = 0; j < c->l.in; j++) dx[x_at(c, t, b) + j] += weight(c, d, g, k, j) * of_x;
                }
        }
}

static void differentiate(const call *c)
{
    const int64_t states = (int64_t)c->batch * c->l.hidden, inputs = (int64_t)c->steps * c->batch * c->l.in;
    double *dx = calloc((size_t)inputs, sizeof *dx);
    ONT_REQUIRE(dx, "out of memory");
    for (int d = 0; d < c->l.directions; d++) {
        double *dh = calloc((size_t)states, sizeof *dh), *dc = calloc((size_t)states, sizeof *dc);
        ONT_REQUIRE(dh && dc, "out of memory");
        for (int64_t i = 0; i < states; i++) {
            dh[i] = has_fault("state") ? 0 : get(c, c->dhy, d * states + i); /* state: its gradient is lost */
            dc[i] = get(c, c->dcy, d * states + i);
        }
        differentiate_direction(c, d, dh, dc, dx);
        for (int64_t i = 0; i < states; i++) {
            put(c, c->dhx, d * states + i, dh[i]);
            put(c, c->dcx, d * states + i, dc[i]);
        }
        free(dh);
        free(dc);
    }
    for (int64_t i = 0; i < inputs; i++) put(c, c->dx, i, dx[i]);
    free(dx);
}

/* Adds to the gradient of one row of a part. */
static void add_row(const call *c, int d, int part, int64_t k)
{
    const int gates = gates_of(&c->l), gate = part % gates;
    const bool of_state = part >= gates;
    const int width = of_state ? c->l.hidden : c->l.in, slot = of_state ? slot_of_state(c, gate) : gate;
    void *matrix = (char *)c->dweights + c->places[d][part][0];
    void *vector = c->l.bias == RNN_NO_BIAS ? NULL : (char *)c->dweights + c->places[d][part][1];
    for (int64_t j = -1; j < width; j++) { /* -1: the bias */
        double sum = get(c, j < 0 ? vector : matrix, j < 0 ? k : k * width + j);
        for (int t = 0; t < c->steps; t++)
            for (int b = 0; b < c->batch; b++)
                sum += slot_of(c, d, t, b, slot)[k] *
                       (j < 0 ? 1 : of_state ? h_before(c, c->y, d, t, b, j) : get(c, c->x, x_at(c, t, b) + j));
        put(c, j < 0 ? vector : matrix, j < 0 ? k : k * width + j, sum);
    }
}

static int execute(void *context)
{
    call *c = context, whole = *c;
    header *h = c->reserve;
    uint64_t key = ont_emulate_key(&c->l, sizeof c->l);
    void *own = NULL;
    ont_emulate_begin_work("cuDNN's recurrent layer");
    if (c->work_bytes) memset(c->work, 0x7f, c->work_bytes); /* as the library, which writes to all of it */
    if (!h) { /* inference */
        whole.reserve = h = own = malloc(c->reserve_bytes);
        ONT_REQUIRE(own, "out of memory");
    }
    if (c->kind == FORWARD) {
        compute(&whole);
        *h = (header){key, COMPUTED};
    } else {
        ONT_REQUIRE(h->key == key, "cuDNN: the reserve space is of another layer");
        ONT_REQUIRE(h->content == (c->kind == BACKWARD_DATA ? COMPUTED : DIFFERENTIATED),
                    "cuDNN: the reserve space is not that of the call before");
    }
    if (c->kind == BACKWARD_DATA) {
        differentiate(c);
        h->content = DIFFERENTIATED;
    }
    for (int i = 0; c->kind == BACKWARD_WEIGHTS && i < c->l.directions * 2 * gates_of(&c->l); i++)
        for (int64_t k = 0; k < c->l.hidden; k++) add_row(c, i / (2 * gates_of(&c->l)), i % (2 * gates_of(&c->l)), k);
    free(own);
    ont_emulate_end_work();
    return 0;
}

/* ---- rules of a call ---- */

static void check_address(const call *c, const void *address, bool wanted, const char *name)
{
    ONT_REQUIRE(address || !wanted, "cuDNN's recurrent layer: %s is NULL", name);
    ONT_REQUIRE((uintptr_t)address % size_of(c->l.type) == 0, "cuDNN's recurrent layer: %s at %p", name, address);
}

static void check_space(const void *address, size_t bytes, size_t least, const char *name)
{
    ONT_REQUIRE(bytes >= least, "cuDNN's recurrent layer: %zu bytes of %s, which needs %zu", bytes, name, least);
    ONT_REQUIRE(!least || (address && (uintptr_t)address % ALIGN == 0), "cuDNN's recurrent layer: %s at %p", name,
                address);
}

static void check_state(const layer *l, const sequences *x, void *desc)
{
    CHECKED(tensor, TENSOR, desc, t);
    ONT_REQUIRE(t->rank == 3 && t->type == l->type && t->dims[0] == l->directions && t->dims[1] == x->batch &&
                    t->dims[2] == l->hidden, "cuDNN's recurrent layer: the states are described otherwise");
}

static int run(call *c, void *opaque, void *desc, void *x_desc, void *y_desc, void *h_desc, size_t weights)
{
    const handle *h = read_handle(opaque, "cuDNN's recurrent layer");
    CHECKED(layer, RECURRENT, desc, l);
    CHECKED(sequences, SEQUENCES, x_desc, x);
    CHECKED(sequences, SEQUENCES, y_desc, y);
    ONT_REQUIRE(h->has_stream, "cuDNN's recurrent layer: the handle has no stream");
    ONT_REQUIRE(x->width == l->in && y->width == l->hidden * l->directions && x->steps == y->steps &&
                    x->batch == y->batch && x->type == l->type && y->type == l->type,
                "cuDNN's recurrent layer: the sequences are described otherwise");
    check_state(l, x, h_desc);
    c->l = *l;
    c->steps = x->steps;
    c->batch = x->batch;
    const trait t = trait_of(l);
    ONT_REQUIRE(!t.declines, "cuDNN's recurrent layer: it has been declined");
    ONT_REQUIRE(weights == bytes_of_weights(l), "cuDNN's recurrent layer: %zu bytes of weights", weights);
    check_space(c->kind == BACKWARD_WEIGHTS ? c->dweights : c->weights, weights, weights, "weights");
    check_space(c->work, c->work_bytes, t.work[c->mode], "workspace");
    if (c->mode == RNN_TRAINING)
        check_space(c->reserve, c->reserve_bytes, bytes_of_reserve(l, x), "reserve space");
    else
        c->reserve_bytes = bytes_of_reserve(l, x);
    check_address(c, c->x, c->kind != BACKWARD_DATA, "x");
    check_address(c, c->kind == FORWARD ? c->to_y : c->y, true, "y");
    check_address(c, c->dy, c->kind == BACKWARD_DATA, "dy");
    check_address(c, c->dx, c->kind == BACKWARD_DATA, "dx");
    for (int i = 0; i < l->directions * 2 * gates_of(l); i++)
        for (int of_bias = 0; of_bias <= (l->bias == RNN_DOUBLE_BIAS); of_bias++)
            c->places[i / (2 * gates_of(l))][i % (2 * gates_of(l))][of_bias] =
                place_of(l, i / (2 * gates_of(l)), i % (2 * gates_of(l)), of_bias);
    if ((t.refuses_forward && c->kind == FORWARD) || (t.refuses_weights && c->kind == BACKWARD_WEIGHTS))
        return CUDNN_NOT_SUPPORTED;
    runs++;
    if (!ont_emulate_recording()) return execute(c);
    void *kept = malloc(sizeof *c);
    ONT_REQUIRE(kept, "out of memory");
    memcpy(kept, c, sizeof *c);
    return ont_emulate_record(execute, kept, free);
}

static int forward(void *h, void *rnn, int mode, const int32_t *lengths, void *x_desc, const void *x, void *y_desc,
                   void *y, void *h_desc, const void *hx, void *hy, void *c_desc, const void *cx, void *cy,
                   size_t weight_bytes, const void *weights, size_t work_bytes, void *work, size_t reserve_bytes,
                   void *reserve)
{
    call c = {.kind = FORWARD, .mode = mode, .x = x, .to_y = y, .hx = hx, .hy = hy, .cx = cx, .cy = cy,
              .weights = weights, .work = work, .work_bytes = work_bytes,
              .reserve = mode == RNN_TRAINING ? reserve : NULL, .reserve_bytes = reserve_bytes};
    ONT_REQUIRE(c_desc == h_desc && !lengths, "cudnnRNNForward: arguments");
    return run(&c, h, rnn, x_desc, y_desc, h_desc, weight_bytes);
}

static int backward_data(void *h, void *rnn, const int32_t *lengths, void *y_desc, const void *y, const void *dy,
                         void *x_desc, void *dx, void *h_desc, const void *hx, const void *dhy, void *dhx, void *c_desc,
                         const void *cx, const void *dcy, void *dcx, size_t weight_bytes, const void *weights,
                         size_t work_bytes, void *work, size_t reserve_bytes, void *reserve)
{
    call c = {.kind = BACKWARD_DATA, .mode = RNN_TRAINING, .y = y, .dy = dy, .dx = dx, .hx = hx, .dhy = dhy,
              .dhx = dhx, .cx = cx, .dcy = dcy, .dcx = dcx, .weights = weights, .work = work, .work_bytes = work_bytes,
              .reserve = reserve, .reserve_bytes = reserve_bytes};
    ONT_REQUIRE(c_desc == h_desc && !lengths, "cudnnRNNBackwardData_v8: arguments");
    return run(&c, h, rnn, x_desc, y_desc, h_desc, weight_bytes);
}

static int backward_weights(void *h, void *rnn, int add, const int32_t *lengths, void *x_desc, const void *x,
                            void *h_desc, const void *hx, void *y_desc, const void *y, size_t weight_bytes,
                            void *dweights, size_t work_bytes, void *work, size_t reserve_bytes, void *reserve)
{
    call c = {.kind = BACKWARD_WEIGHTS, .mode = RNN_TRAINING, .x = x, .hx = hx, .y = y, .dweights = dweights,
              .work = work, .work_bytes = work_bytes, .reserve = reserve, .reserve_bytes = reserve_bytes};
    ONT_REQUIRE(add == RNN_WGRAD_ADD && !lengths, "cudnnRNNBackwardWeights_v8: arguments");
    return run(&c, h, rnn, x_desc, y_desc, h_desc, weight_bytes);
}

#define FUNCTION(name, function) {name, (void (*)(void))function}
const ont_emulate_function ont_emulate_cudnn_rnn[] = {
    FUNCTION("cudnnGetVersion", version),
    FUNCTION("cudnnCreateDropoutDescriptor", dropout_create),
    FUNCTION("cudnnSetDropoutDescriptor", dropout_set),
    FUNCTION("cudnnDestroyDropoutDescriptor", dropout_destroy),
    FUNCTION("cudnnCreateRNNDataDescriptor", data_create),
    FUNCTION("cudnnSetRNNDataDescriptor", data_set),
    FUNCTION("cudnnDestroyRNNDataDescriptor", data_destroy),
    FUNCTION("cudnnCreateRNNDescriptor", rnn_create),
    FUNCTION("cudnnSetRNNDescriptor_v8", rnn_set),
    FUNCTION("cudnnDestroyRNNDescriptor", rnn_destroy),
    FUNCTION("cudnnGetRNNWeightSpaceSize", weight_bytes),
    FUNCTION("cudnnGetRNNTempSpaceSizes", temporary_bytes),
    FUNCTION("cudnnGetRNNWeightParams", weight_part),
    FUNCTION("cudnnRNNForward", forward),
    FUNCTION("cudnnRNNBackwardData_v8", backward_data),
    FUNCTION("cudnnRNNBackwardWeights_v8", backward_weights),
    {NULL, NULL},
};
