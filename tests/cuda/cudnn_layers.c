/*
 * Whether the true cuDNN takes the recurrent layers of cuda/libs/rnn.c, and where it keeps their weights, without a GPU
 * (cudnn.sh): its parts by number are the matrices of the input, then those of the state, each with a bias, and they do
 * not overlap. What a number means (which gate it is) cannot be asked: that is compared when a program is built.
 *
 * A handle cannot be made without a device. Descriptions do not need one; the functions of sizes and places are given
 * zeroed memory in its place.
 */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "libs/cudnn_rnn.h"

enum { IN = 7, HIDDEN = 6, STEPS = 5, BATCH = 3, MOST_PARTS = 64 };

static cudnn_rnn_functions dnn;
static int (*tensor_get)(void *desc, int wanted, int *type, int *rank, int *dims, int *strides);

static bool load(const char *library)
{
    static const struct {
        const char *name;
        size_t offset;
    } symbols[] = {
#define X(member, name) {#name, offsetof(cudnn_rnn_functions, member)},
        ONT_CUDNN_RNN_FUNCTIONS(X)
#undef X
    };
    void *opened = dlopen(library, RTLD_LAZY), *symbol;
    for (size_t i = 0; opened && i < sizeof symbols / sizeof *symbols; i++) {
        if (!(symbol = dlsym(opened, symbols[i].name))) return false;
        memcpy((char *)&dnn + symbols[i].offset, &symbol, sizeof symbol);
    }
    symbol = opened ? dlsym(opened, "cudnnGetTensorNdDescriptor") : NULL;
    memcpy(&tensor_get, &symbol, sizeof symbol);
    return symbol != NULL;
}

typedef struct layer {
    int cell, gates, bias, directions, type, sums, math;
    size_t size;
} layer;

typedef struct part {
    size_t at, bytes;
} part;

static bool has_dims(void *desc, int rows, int columns)
{
    int type, rank, dims[3] = {0}, strides[3];
    return !tensor_get(desc, 3, &type, &rank, dims, strides) && dims[0] == 1 && dims[1] == rows && dims[2] == columns;
}

/* Adds the parts of a direction; false where one is not as expected. */
static bool add_parts(const layer *l, void *handle, void *rnn, int direction, size_t bytes, part *parts, int *n)
{
    void *matrix_desc, *bias_desc, *matrix, *bias;
    char *space = malloc(bytes);
    bool fits = space && !dnn.tensor_create(&matrix_desc) && !dnn.tensor_create(&bias_desc);
    for (int i = 0; fits && i < 2 * l->gates; i++) {
        int columns = i < l->gates ? IN : HIDDEN;
        fits = !dnn.weight_part(handle, rnn, direction, bytes, space, i, matrix_desc, &matrix, bias_desc, &bias) &&
               has_dims(matrix_desc, HIDDEN, columns) && (!l->bias || has_dims(bias_desc, HIDDEN, 1));
        if (!fits) break;
        parts[(*n)++] = (part){(size_t)((char *)matrix - space), (size_t)(HIDDEN * columns) * l->size};
        if (l->bias) parts[(*n)++] = (part){(size_t)((char *)bias - space), HIDDEN * l->size};
    }
    free(space);
    return fits;
}

static bool overlap(const part *parts, int n, size_t bytes)
{
    for (int i = 0; i < n; i++) {
        if (parts[i].at > bytes || parts[i].bytes > bytes - parts[i].at) return true;
        for (int k = 0; k < i; k++)
            if (parts[i].at < parts[k].at + parts[k].bytes && parts[k].at < parts[i].at + parts[i].bytes) return true;
    }
    return false;
}

/* NULL, or what differs. */
static const char *try_layer(const layer *l, void *handle)
{
    int lengths[BATCH] = {STEPS, STEPS, STEPS}, dims[3] = {l->directions, BATCH, HIDDEN}, n = 0;
    int strides[3] = {BATCH * HIDDEN, HIDDEN, 1};
    void *dropout, *rnn, *data, *state;
    part parts[MOST_PARTS];
    size_t bytes;
    if (dnn.dropout_create(&dropout) || dnn.dropout_set(dropout, handle, 0, NULL, 0, 0)) return "no dropout";
    if (dnn.rnn_create(&rnn) ||
        dnn.rnn_set(rnn, RNN_ALGO_STANDARD, l->cell, l->bias ? RNN_DOUBLE_BIAS : RNN_NO_BIAS,
                    l->directions == 2 ? RNN_BIDIRECTIONAL : RNN_UNIDIRECTIONAL, RNN_LINEAR_INPUT, l->type, l->sums,
                    l->math, IN, HIDDEN, HIDDEN, 1, dropout, RNN_PADDED_IO_ENABLED))
        return "the layer is refused";
    if (dnn.data_create(&data) ||
        dnn.data_set(data, l->type, RNN_SEQ_MAJOR_UNPACKED, STEPS, BATCH, IN, lengths, NULL))
        return "the sequences are refused";
    if (dnn.tensor_create(&state) || dnn.tensor_set(state, l->type, 3, dims, strides)) return "the states are refused";
    if (dnn.weight_bytes(handle, rnn, &bytes)) return "the weights have no size";
    for (int d = 0; d < l->directions; d++)
        if (!add_parts(l, handle, rnn, d, bytes, parts, &n)) return "a part of the weights is another one";
    return overlap(parts, n, bytes) ? "parts of the weights overlap" : NULL;
}

int main(int argc, char **argv)
{
    static const layer kinds[] = {{.type = DATA_FLOAT, .sums = DATA_FLOAT, .math = MATH_FMA, .size = 4},
                                  {.type = DATA_FLOAT, .sums = DATA_FLOAT, .math = MATH_DEFAULT, .size = 4},
                                  {.type = DATA_DOUBLE, .sums = DATA_DOUBLE, .math = MATH_DEFAULT, .size = 8},
                                  {.type = DATA_HALF, .sums = DATA_FLOAT, .math = MATH_TENSOR_OP, .size = 2},
                                  {.type = DATA_BFLOAT16, .sums = DATA_FLOAT, .math = MATH_TENSOR_OP, .size = 2}};
    int tried = 0, wrong = 0;
    void *handle = calloc(1, 1 << 20);
    if (argc != 2 || !handle || !load(argv[1])) return 2;
    for (int i = 0; i < 16 * (int)(sizeof kinds / sizeof *kinds); i++) {
        layer l = kinds[i / 16];
        l.cell = i % 4;
        l.gates = l.cell == RNN_LSTM ? 4 : l.cell == RNN_GRU ? 3 : 1;
        l.bias = i / 4 % 2;
        l.directions = 1 + i / 8 % 2;
        const char *differs = try_layer(&l, handle);
        if (differs)
            printf("cell %d, bias %d, %d directions, type %d: %s\n", l.cell, l.bias, l.directions, l.type, differs);
        wrong += differs != NULL;
        tried++;
    }
    printf("cuDNN %zu: %d recurrent layers, %d otherwise than expected\n", dnn.version(), tried, wrong);
    return wrong != 0;
}
