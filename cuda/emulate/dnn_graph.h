/*
 * Descriptors and values of the emulated graph API, for dnn_graph.c and conv_graph.c.
 */
#ifndef ONT_EMULATE_DNN_GRAPH_H
#define ONT_EMULATE_DNN_GRAPH_H

#include <stdlib.h>

#include "emulate/contract.h"
#include "emulate/devices.h"
#include "emulate/values.h"
#include "libs/dnn_graph.h"

enum { BAD_PARAM = 2000, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
enum { MOST_ATTRIBUTES = 12 };

typedef struct attribute {
    int name, type;
    int64_t n;
    void *values;
} attribute;

typedef struct descriptor {
    int type, n_attributes;
    int engine; /* of configurations, engines and plans; 0 is not deterministic */
    bool is_final;
    const struct descriptor *graph; /* of configurations, engines and plans */
    attribute attributes[MOST_ATTRIBUTES];
} descriptor;

typedef struct value {
    const descriptor *of;
    const int64_t *dims;
    int64_t strides[4];
    ont_dtype dtype; /* of the storage: that of integers and booleans, which are all virtual, is float32 */
    void *data;
    bool is_owned;
    float number; /* by value: read when the graph is executed or recorded, as the library does */
} value;

static inline bool has_fault(const char *word)
{
    const char *planted = getenv("ONT_EMULATE_DNN_FAULT");
    return planted && !strcmp(planted, word);
}

static inline int refuse(int status, const char *what, int number)
{
    ont_log(ONT_LOG_WARNING, "emulated cuDNN: %s (%d)", what, number);
    return status;
}

/* The three convolutions: the rules that NVIDIA's documentation has for one, and its result. */
int ont_emulate_dnn_finalize_convolution(const descriptor *op);
void ont_emulate_dnn_convolve(const descriptor *op, value *(*value_of)(void *job, const descriptor *op, int name),
                              void *job);

/* ---- attributes ---- */

static inline const attribute *find(const descriptor *d, int name)
{
    for (int i = 0; i < d->n_attributes; i++)
        if (d->attributes[i].name == name) return &d->attributes[i];
    return NULL;
}

static inline const descriptor *part(const descriptor *d, int name)
{
    const attribute *a = find(d, name);
    return a ? *(const descriptor *const *)a->values : NULL;
}

static inline int64_t int64_of(const descriptor *d, int name)
{
    return *(const int64_t *)find(d, name)->values;
}

static inline int int_of(const descriptor *d, int name)
{
    return *(const int *)find(d, name)->values;
}

static inline bool bool_of(const descriptor *d, int name)
{
    return *(const bool *)find(d, name)->values;
}

static inline const int64_t *dims_of(const descriptor *d)
{
    return find(d, DNN_ATTR_TENSOR_DIMENSIONS)->values;
}

/* ---- values ---- */

static inline int64_t offset_of(const value *v, const int64_t at[4])
{
    int64_t offset = 0;
    for (int i = 0; i < 4; i++) {
        int64_t index = v->dims[i] == 1 ? 0 : at[i];
        offset += index * v->strides[i];
    }
    return offset;
}

static inline double load(const value *v, const int64_t at[4])
{
    return ont_emulate_get(v->dtype, v->data, offset_of(v, at));
}

static inline void store(value *v, const int64_t at[4], double x)
{
    ont_emulate_put(v->dtype, v->data, offset_of(v, at), x);
}

#endif
