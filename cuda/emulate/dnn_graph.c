/*
 * cuDNN's graph API for tests: checks the contracts of descriptors (attribute names, types and counts, order of
 * finalization, ids, what is virtual, alignment), and computes a graph operation by operation in plain loops. So the
 * graphs that libs/sdpa.c and libs/conv_graph.c build are what is computed. conv_graph.c has the convolutions.
 *
 * ONT_EMULATE_DNN_VERSION is the version that it claims. With ONT_EMULATE_DNN_TIME it claims times of its kernels, else
 * none is measured. ONT_EMULATE_DNN_FAULT plants a fault, for the tests of what finds it: a word of the comments below.
 */
#include "emulate/dnn_graph.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { MOST_VALUES = 96, WORKSPACE = 4096, ENGINES = 3 };

typedef struct rule {
    int descriptor, name, type;
    int64_t least, most; /* number of elements */
    int of;              /* what kind of descriptor the elements are; -1: any operation, or no descriptor */
    bool required;
} rule;

#define ENUM(kind, name, type) {DNN_BACKEND_##kind, DNN_ATTR_##name, DNN_TYPE_##type, 1, 1, -1, true},
#define PART(kind, name, of) \
    {DNN_BACKEND_##kind, DNN_ATTR_##name, DNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, DNN_BACKEND_##of, true},
#define PAIR(kind, name) {DNN_BACKEND_##kind, DNN_ATTR_##name, DNN_TYPE_INT64, 2, 2, -1, true},
#define CONVOLUTION(kind, name, w, x, y) \
    ENUM(OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, OPERATION_CONVOLUTION_##name##_ALPHA, FLOAT) \
    ENUM(OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, OPERATION_CONVOLUTION_##name##_BETA, FLOAT) \
    PART(OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, OPERATION_CONVOLUTION_##name##_CONV_DESC, CONVOLUTION_DESCRIPTOR) \
    PART(OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, OPERATION_CONVOLUTION_##name##_##w, TENSOR_DESCRIPTOR) \
    PART(OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, OPERATION_CONVOLUTION_##name##_##x, TENSOR_DESCRIPTOR) \
    PART(OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, OPERATION_CONVOLUTION_##name##_##y, TENSOR_DESCRIPTOR)
#define MAYBE(kind, name, type, of) {DNN_BACKEND_##kind, DNN_ATTR_##name, DNN_TYPE_##type, 1, 1, of, false},
static const rule rules[] = {
    ENUM(TENSOR_DESCRIPTOR, TENSOR_UNIQUE_ID, INT64)
    ENUM(TENSOR_DESCRIPTOR, TENSOR_DATA_TYPE, DATA_TYPE)
    ENUM(TENSOR_DESCRIPTOR, TENSOR_BYTE_ALIGNMENT, INT64)
    ENUM(TENSOR_DESCRIPTOR, TENSOR_IS_VIRTUAL, BOOLEAN)
    ENUM(TENSOR_DESCRIPTOR, TENSOR_IS_BY_VALUE, BOOLEAN)
    {DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_DIMENSIONS, DNN_TYPE_INT64, 4, 4, -1, true},
    {DNN_BACKEND_TENSOR_DESCRIPTOR, DNN_ATTR_TENSOR_STRIDES, DNN_TYPE_INT64, 4, 4, -1, true},
    ENUM(POINTWISE_DESCRIPTOR, POINTWISE_MODE, POINTWISE_MODE)
    ENUM(POINTWISE_DESCRIPTOR, POINTWISE_MATH_PREC, DATA_TYPE)
    MAYBE(POINTWISE_DESCRIPTOR, POINTWISE_AXIS, INT64, -1)
    MAYBE(POINTWISE_DESCRIPTOR, POINTWISE_NAN_PROPAGATION, NAN_PROPOGATION, -1)
    MAYBE(POINTWISE_DESCRIPTOR, POINTWISE_RELU_UPPER_CLIP, FLOAT, -1)
    ENUM(REDUCTION_DESCRIPTOR, REDUCTION_OPERATOR, REDUCTION_OPERATOR_TYPE)
    ENUM(REDUCTION_DESCRIPTOR, REDUCTION_COMP_TYPE, DATA_TYPE)
    ENUM(MATMUL_DESCRIPTOR, MATMUL_COMP_TYPE, DATA_TYPE)
    PART(OPERATION_POINTWISE_DESCRIPTOR, OPERATION_POINTWISE_PW_DESCRIPTOR, POINTWISE_DESCRIPTOR)
    PART(OPERATION_POINTWISE_DESCRIPTOR, OPERATION_POINTWISE_XDESC, TENSOR_DESCRIPTOR)
    PART(OPERATION_POINTWISE_DESCRIPTOR, OPERATION_POINTWISE_YDESC, TENSOR_DESCRIPTOR)
    MAYBE(OPERATION_POINTWISE_DESCRIPTOR, OPERATION_POINTWISE_BDESC, BACKEND_DESCRIPTOR, DNN_BACKEND_TENSOR_DESCRIPTOR)
    MAYBE(OPERATION_POINTWISE_DESCRIPTOR, OPERATION_POINTWISE_TDESC, BACKEND_DESCRIPTOR, DNN_BACKEND_TENSOR_DESCRIPTOR)
    MAYBE(OPERATION_POINTWISE_DESCRIPTOR, OPERATION_POINTWISE_ALPHA1, FLOAT, -1)
    MAYBE(OPERATION_POINTWISE_DESCRIPTOR, OPERATION_POINTWISE_ALPHA2, FLOAT, -1)
    PART(OPERATION_REDUCTION_DESCRIPTOR, OPERATION_REDUCTION_DESC, REDUCTION_DESCRIPTOR)
    PART(OPERATION_REDUCTION_DESCRIPTOR, OPERATION_REDUCTION_XDESC, TENSOR_DESCRIPTOR)
    PART(OPERATION_REDUCTION_DESCRIPTOR, OPERATION_REDUCTION_YDESC, TENSOR_DESCRIPTOR)
    PART(OPERATION_MATMUL_DESCRIPTOR, OPERATION_MATMUL_DESC, MATMUL_DESCRIPTOR)
    PART(OPERATION_MATMUL_DESCRIPTOR, OPERATION_MATMUL_ADESC, TENSOR_DESCRIPTOR)
    PART(OPERATION_MATMUL_DESCRIPTOR, OPERATION_MATMUL_BDESC, TENSOR_DESCRIPTOR)
    PART(OPERATION_MATMUL_DESCRIPTOR, OPERATION_MATMUL_CDESC, TENSOR_DESCRIPTOR)
    ENUM(CONVOLUTION_DESCRIPTOR, CONVOLUTION_COMP_TYPE, DATA_TYPE)
    ENUM(CONVOLUTION_DESCRIPTOR, CONVOLUTION_CONV_MODE, CONVOLUTION_MODE)
    ENUM(CONVOLUTION_DESCRIPTOR, CONVOLUTION_SPATIAL_DIMS, INT64)
    PAIR(CONVOLUTION_DESCRIPTOR, CONVOLUTION_DILATIONS) PAIR(CONVOLUTION_DESCRIPTOR, CONVOLUTION_FILTER_STRIDES)
    PAIR(CONVOLUTION_DESCRIPTOR, CONVOLUTION_PRE_PADDINGS) PAIR(CONVOLUTION_DESCRIPTOR, CONVOLUTION_POST_PADDINGS)
    CONVOLUTION(FORWARD, FORWARD, W, X, Y)
    CONVOLUTION(BACKWARD_DATA, BWD_DATA, W, DX, DY)
    CONVOLUTION(BACKWARD_FILTER, BWD_FILTER, DW, X, DY)
    PART(OPERATION_RESHAPE_DESCRIPTOR, OPERATION_RESHAPE_XDESC, TENSOR_DESCRIPTOR)
    PART(OPERATION_RESHAPE_DESCRIPTOR, OPERATION_RESHAPE_YDESC, TENSOR_DESCRIPTOR)
    ENUM(OPERATIONGRAPH_DESCRIPTOR, OPERATIONGRAPH_HANDLE, HANDLE)
    {DNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, DNN_ATTR_OPERATIONGRAPH_OPS, DNN_TYPE_BACKEND_DESCRIPTOR, 1, 64, -1, true},
    PART(ENGINEHEUR_DESCRIPTOR, ENGINEHEUR_OPERATION_GRAPH, OPERATIONGRAPH_DESCRIPTOR)
    ENUM(ENGINEHEUR_DESCRIPTOR, ENGINEHEUR_MODE, HEUR_MODE)
    ENUM(EXECUTION_PLAN_DESCRIPTOR, EXECUTION_PLAN_HANDLE, HANDLE)
    PART(EXECUTION_PLAN_DESCRIPTOR, EXECUTION_PLAN_ENGINE_CONFIG, ENGINECFG_DESCRIPTOR)
    {DNN_BACKEND_VARIANT_PACK_DESCRIPTOR, DNN_ATTR_VARIANT_PACK_UNIQUE_IDS, DNN_TYPE_INT64, 1, 64, -1, true},
    {DNN_BACKEND_VARIANT_PACK_DESCRIPTOR, DNN_ATTR_VARIANT_PACK_DATA_POINTERS, DNN_TYPE_VOID_PTR, 1, 64, -1, true},
    ENUM(VARIANT_PACK_DESCRIPTOR, VARIANT_PACK_WORKSPACE, VOID_PTR)
};
#undef ENUM
#undef PART
#undef PAIR
#undef CONVOLUTION
#undef MAYBE
enum { N_RULES = sizeof rules / sizeof *rules };

static char handles[ONT_EMULATE_DEVICES]; /* the address of one is a handle */
static long n_runs, n_opened[ONT_EMULATE_DEVICES];
static int latest_engine;

/* Whether it is the handle of the current device; that of another one is a mistake, and no refusal. */
static bool is_handle(const void *given)
{
    for (int i = 0; i < ONT_EMULATE_DEVICES; i++)
        ONT_REQUIRE(given != &handles[i] || i == ont_emulate_device(),
                    "cuDNN's graphs: a handle of device %d, but device %d is current", i, ont_emulate_device());
    return given == &handles[ont_emulate_device()];
}

/* ---- descriptors ---- */

static size_t size_of(int type)
{
    bool is_wide = type == DNN_TYPE_HANDLE || type == DNN_TYPE_INT64 || type == DNN_TYPE_VOID_PTR ||
                   type == DNN_TYPE_BACKEND_DESCRIPTOR;
    return is_wide ? 8 : type == DNN_TYPE_BOOLEAN ? 1 : 4;
}

static int create(int type, void **result)
{
    descriptor *d = calloc(1, sizeof *d);
    if (!d) return EXECUTION_FAILED;
    d->type = type;
    *result = d;
    return 0;
}

static int destroy(void *opaque)
{
    descriptor *d = opaque;
    for (int i = 0; i < d->n_attributes; i++) free(d->attributes[i].values);
    free(d);
    return 0;
}

static int set(void *opaque, int name, int type, int64_t n, const void *values)
{
    descriptor *d = opaque;
    const rule *r = NULL;
    for (int i = 0; i < N_RULES && !r; i++)
        if (rules[i].descriptor == d->type && rules[i].name == name) r = &rules[i];
    if (d->is_final) return refuse(BAD_PARAM, "a finalized descriptor is changed", name);
    if (!r) return refuse(BAD_PARAM, "the descriptor has no such attribute", name);
    if (r->type != type || n < r->least || n > r->most) return refuse(BAD_PARAM, "type or count of an attribute", name);
    if (find(d, name)) return refuse(BAD_PARAM, "an attribute is set twice", name);
    for (int64_t i = 0; type == DNN_TYPE_BACKEND_DESCRIPTOR && i < n; i++) {
        const descriptor *given = ((const descriptor *const *)values)[i];
        if (!given || !given->is_final) return refuse(BAD_PARAM, "a descriptor that is not finalized", name);
        if (r->of >= 0 && given->type != r->of) return refuse(BAD_PARAM, "a descriptor of another kind", name);
    }
    if (type == DNN_TYPE_HANDLE && !is_handle(*(void *const *)values)) return refuse(BAD_PARAM, "the handle", name);
    attribute a = {name, type, n, malloc((size_t)n * size_of(type))};
    if (!a.values) return EXECUTION_FAILED;
    memcpy(a.values, values, (size_t)n * size_of(type));
    d->attributes[d->n_attributes++] = a;
    return 0;
}

static const descriptor *output_of(const descriptor *op);

/* Bytes of a plan; ONT_EMULATE_DNN_WORK has those for each index of the batch. */
static int64_t workspace_of(const descriptor *plan)
{
    const char *claimed = getenv("ONT_EMULATE_DNN_WORK");
    const attribute *ops = find(plan->graph, DNN_ATTR_OPERATIONGRAPH_OPS);
    const descriptor *first = *(const descriptor *const *)ops->values;
    const descriptor *x = part(first, DNN_ATTR_OPERATION_MATMUL_ADESC);
    if (!x) x = part(first, DNN_ATTR_OPERATION_POINTWISE_XDESC);
    if (!x) x = output_of(first);
    return claimed ? strtoll(claimed, NULL, 10) * *dims_of(x) : WORKSPACE;
}

static int get(void *opaque, int name, int type, int64_t room, int64_t *n, void *values)
{
    descriptor *d = opaque;
    if (!d->is_final) return refuse(BAD_PARAM, "an attribute is read before the descriptor is final", name);
    if (name == DNN_ATTR_ENGINEHEUR_RESULTS && type == DNN_TYPE_BACKEND_DESCRIPTOR) {
        descriptor **configs = values; /* the first one is not deterministic, and must not be taken */
        *n = ENGINES;
        for (int64_t i = 0; i < room && i < ENGINES; i++) {
            if (configs[i]->type != DNN_BACKEND_ENGINECFG_DESCRIPTOR) return refuse(BAD_PARAM, "kind of results", name);
            configs[i]->graph = part(d, DNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
            configs[i]->is_final = true;
            configs[i]->engine = (int)i;
        }
        return 0;
    }
    if (name == DNN_ATTR_ENGINECFG_ENGINE && type == DNN_TYPE_BACKEND_DESCRIPTOR && room == 1) {
        descriptor *engine = *(descriptor **)values;
        if (engine->type != DNN_BACKEND_ENGINE_DESCRIPTOR) return refuse(BAD_PARAM, "kind of an engine", name);
        engine->is_final = true;
        engine->engine = d->engine;
        *n = 1;
        return 0;
    }
    if (name == DNN_ATTR_ENGINE_NUMERICAL_NOTE && type == DNN_TYPE_NUMERICAL_NOTE && room > 1) {
        *(int *)values = d->engine ? 0 : DNN_NUMERICAL_NOTE_NONDETERMINISTIC;
        *n = 1;
        return 0;
    }
    if (name != DNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE || type != DNN_TYPE_INT64 || room != 1)
        return refuse(BAD_PARAM, "an attribute that cannot be read so", name);
    *(int64_t *)values = workspace_of(d);
    *n = 1;
    return 0;
}

/* ---- finalization ---- */

static int finalize_tensor(const descriptor *d)
{
    const int64_t *dims = dims_of(d), *strides = find(d, DNN_ATTR_TENSOR_STRIDES)->values;
    for (int i = 0; i < 4; i++)
        if (dims[i] <= 0 || strides[i] <= 0) return refuse(BAD_PARAM, "a dim or a stride is not positive", i);
    if (int64_of(d, DNN_ATTR_TENSOR_BYTE_ALIGNMENT) % 16) return refuse(BAD_PARAM, "alignment", 0);
    bool is_virtual = bool_of(d, DNN_ATTR_TENSOR_IS_VIRTUAL), by_value = bool_of(d, DNN_ATTR_TENSOR_IS_BY_VALUE);
    return is_virtual && by_value ? refuse(BAD_PARAM, "virtual and by value", 0) : 0;
}

/* Whether x broadcasts to y; along heads also in groups, as keys do. */
static bool broadcasts(const int64_t *x, const int64_t *y, int from, int to)
{
    for (int i = from; i < to; i++)
        if (x[i] != y[i] && x[i] != 1 && !(i == 1 && y[1] % x[1] == 0)) return false;
    return true;
}

static int finalize_pointwise(const descriptor *d)
{
    const descriptor *how = part(d, DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const descriptor *x = part(d, DNN_ATTR_OPERATION_POINTWISE_XDESC), *y = part(d, DNN_ATTR_OPERATION_POINTWISE_YDESC);
    const descriptor *b = part(d, DNN_ATTR_OPERATION_POINTWISE_BDESC), *t = part(d, DNN_ATTR_OPERATION_POINTWISE_TDESC);
    int mode = int_of(how, DNN_ATTR_POINTWISE_MODE);
    bool is_index = mode == DNN_POINTWISE_GEN_INDEX, is_select = mode == DNN_POINTWISE_BINARY_SELECT;
    bool is_relu = mode == DNN_POINTWISE_RELU_FWD;
    bool is_unary = is_index || is_relu || mode == DNN_POINTWISE_EXP || mode == DNN_POINTWISE_LOG;
    if (is_index != !!find(how, DNN_ATTR_POINTWISE_AXIS)) return refuse(BAD_PARAM, "axis", mode);
    const attribute *nan = find(how, DNN_ATTR_POINTWISE_NAN_PROPAGATION);
    if (!is_relu && (nan || find(how, DNN_ATTR_POINTWISE_RELU_UPPER_CLIP)))
        return refuse(BAD_PARAM, "an attribute of a Relu", mode);
    if (nan && *(const int *)nan->values != DNN_PROPAGATE_NAN) return refuse(NOT_SUPPORTED, "treatment of NaN", mode);
    if (!b != is_unary || !t != !is_select) return refuse(BAD_PARAM, "number of operands", mode);
    if (is_select && int_of(t, DNN_ATTR_TENSOR_DATA_TYPE) != DNN_DATA_BOOLEAN) return refuse(BAD_PARAM, "mask", mode);
    const descriptor *in[] = {x, b, t};
    for (int i = 0; i < 3; i++)
        if (in[i] && !broadcasts(dims_of(in[i]), dims_of(y), 0, 4)) return refuse(BAD_PARAM, "shape of operand", i);
    return 0;
}

static int finalize_matmul(const descriptor *d)
{
    const int64_t *a = dims_of(part(d, DNN_ATTR_OPERATION_MATMUL_ADESC));
    const int64_t *b = dims_of(part(d, DNN_ATTR_OPERATION_MATMUL_BDESC));
    const int64_t *c = dims_of(part(d, DNN_ATTR_OPERATION_MATMUL_CDESC));
    bool fits = a[2] == c[2] && a[3] == b[2] && b[3] == c[3] && a[0] == c[0] && a[1] == c[1] && broadcasts(b, c, 0, 2);
    return fits ? 0 : refuse(BAD_PARAM, "shapes of a product", 0);
}

static int finalize_reduction(const descriptor *d)
{
    const int64_t *x = dims_of(part(d, DNN_ATTR_OPERATION_REDUCTION_XDESC));
    const int64_t *y = dims_of(part(d, DNN_ATTR_OPERATION_REDUCTION_YDESC));
    return broadcasts(y, x, 0, 4) ? 0 : refuse(BAD_PARAM, "shapes of a reduction", 0);
}

static int finalize_reshape(const descriptor *d)
{
    const int64_t *x = dims_of(part(d, DNN_ATTR_OPERATION_RESHAPE_XDESC));
    const int64_t *y = dims_of(part(d, DNN_ATTR_OPERATION_RESHAPE_YDESC));
    bool fits = x[0] * x[1] * x[2] * x[3] == y[0] * y[1] * y[2] * y[3];
    return fits ? 0 : refuse(BAD_PARAM, "number of elements", 0);
}

static const int input_names[] = {DNN_ATTR_OPERATION_POINTWISE_XDESC, DNN_ATTR_OPERATION_POINTWISE_BDESC,
                                  DNN_ATTR_OPERATION_POINTWISE_TDESC, DNN_ATTR_OPERATION_MATMUL_ADESC,
                                  DNN_ATTR_OPERATION_MATMUL_BDESC, DNN_ATTR_OPERATION_REDUCTION_XDESC,
                                  DNN_ATTR_OPERATION_RESHAPE_XDESC, DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                                  DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                                  DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                                  DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                                  DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY};
static const int output_names[] = {DNN_ATTR_OPERATION_POINTWISE_YDESC, DNN_ATTR_OPERATION_MATMUL_CDESC,
                                   DNN_ATTR_OPERATION_REDUCTION_YDESC, DNN_ATTR_OPERATION_RESHAPE_YDESC,
                                   DNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, DNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                                   DNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW};
enum { N_INPUTS = sizeof input_names / sizeof *input_names, N_OUTPUTS = sizeof output_names / sizeof *output_names };

static const descriptor *output_of(const descriptor *op)
{
    const descriptor *y = NULL;
    for (int i = 0; i < N_OUTPUTS && !y; i++) y = part(op, output_names[i]);
    return y;
}

/* The tensors of a graph, each once; -1 where an id is used twice, or there are too many. */
static int tensors_of(const descriptor *graph, const descriptor *tensors[MOST_VALUES])
{
    const attribute *ops = find(graph, DNN_ATTR_OPERATIONGRAPH_OPS);
    int n = 0;
    for (int64_t i = 0; i < ops->n; i++) {
        const descriptor *op = ((const descriptor *const *)ops->values)[i];
        for (int k = 0; k <= N_INPUTS; k++) {
            const descriptor *t = k < N_INPUTS ? part(op, input_names[k]) : output_of(op);
            int j = 0;
            if (!t) continue;
            int64_t uid = int64_of(t, DNN_ATTR_TENSOR_UNIQUE_ID);
            while (j < n && int64_of(tensors[j], DNN_ATTR_TENSOR_UNIQUE_ID) != uid) j++;
            if (j == MOST_VALUES || (j < n && tensors[j] != t)) return -1;
            if (j == n) tensors[n++] = t;
        }
    }
    return n;
}

/* Every virtual tensor is written once, before it is read; what is real is read, or written once. */
static int finalize_graph(const descriptor *d)
{
    const descriptor *tensors[MOST_VALUES], *written[MOST_VALUES];
    const attribute *ops = find(d, DNN_ATTR_OPERATIONGRAPH_OPS);
    int n_written = 0;
    if (tensors_of(d, tensors) < 0) return refuse(BAD_PARAM, "two tensors have one id", 0);
    for (int64_t i = 0; i < ops->n; i++) {
        const descriptor *op = ((const descriptor *const *)ops->values)[i], *y = output_of(op);
        if (!y) return refuse(BAD_PARAM, "not an operation", (int)i);
        for (int k = 0; k < N_INPUTS; k++) {
            const descriptor *x = part(op, input_names[k]);
            bool is_known = !x || !bool_of(x, DNN_ATTR_TENSOR_IS_VIRTUAL);
            for (int j = 0; j < n_written; j++) is_known |= written[j] == x;
            if (!is_known) return refuse(BAD_PARAM, "a virtual tensor is read before it is written", (int)i);
        }
        for (int j = 0; j < n_written; j++)
            if (written[j] == y) return refuse(BAD_PARAM, "a tensor is written twice", (int)i);
        if (bool_of(y, DNN_ATTR_TENSOR_IS_BY_VALUE)) return refuse(BAD_PARAM, "a value is written", (int)i);
        written[n_written++] = y;
    }
    return 0;
}

/* Faults in a graph with a Relu: "relu" leaves it out, "order" has it in front of the bias, "double" doubles it. */
static bool has_fault_of_relu(const descriptor *graph, const char *word)
{
    const attribute *ops = find(graph, DNN_ATTR_OPERATIONGRAPH_OPS);
    const descriptor *last = ((const descriptor *const *)ops->values)[ops->n - 1];
    const descriptor *how = part(last, DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    return how && int_of(how, DNN_ATTR_POINTWISE_MODE) == DNN_POINTWISE_RELU_FWD && has_fault(word);
}

static int finalize_pack(const descriptor *d)
{
    const attribute *uids = find(d, DNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    if (uids->n != find(d, DNN_ATTR_VARIANT_PACK_DATA_POINTERS)->n) return refuse(BAD_PARAM, "ids and pointers", 0);
    for (int64_t i = 0; i < uids->n; i++)
        for (int64_t j = 0; j < i; j++)
            if (((const int64_t *)uids->values)[i] == ((const int64_t *)uids->values)[j])
                return refuse(BAD_PARAM, "an id occurs twice", (int)i);
    return 0;
}

static int finalize(void *opaque)
{
    descriptor *d = opaque;
    int status = 0;
    if (d->is_final) return refuse(BAD_PARAM, "finalized twice", d->type);
    for (int i = 0; i < N_RULES; i++)
        if (rules[i].descriptor == d->type && rules[i].required && !find(d, rules[i].name))
            return refuse(BAD_PARAM, "an attribute is missing", rules[i].name);
    switch (d->type) {
    case DNN_BACKEND_TENSOR_DESCRIPTOR: status = finalize_tensor(d); break;
    case DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: status = finalize_pointwise(d); break;
    case DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR: status = finalize_matmul(d); break;
    case DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: status = finalize_reduction(d); break;
    case DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR: status = finalize_reshape(d); break;
    case DNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
    case DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
    case DNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
        status = ont_emulate_dnn_finalize_convolution(d);
        break;
    case DNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR: status = finalize_graph(d); break;
    case DNN_BACKEND_VARIANT_PACK_DESCRIPTOR: status = finalize_pack(d); break;
    case DNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
        d->graph = part(d, DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)->graph;
        /* no kernel takes the graph; fusion: none with a Relu */
        if (has_fault("finalize") || has_fault_of_relu(d->graph, "fusion")) return NOT_SUPPORTED;
        d->engine = part(d, DNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)->engine;
        break;
    default: break;
    }
    d->is_final = !status;
    return status;
}

/* ---- execution ---- */

typedef struct job {
    const descriptor *graph;
    void *work;
    size_t work_bytes;
    int n;
    value values[MOST_VALUES];
} job;

/* The next index in row-major order; false behind the last one. */
static bool next(const int64_t dims[4], int64_t at[4])
{
    for (int i = 3; i >= 0; i--) {
        if (++at[i] < dims[i]) return true;
        at[i] = 0;
    }
    return false;
}

static value *value_of(void *context, const descriptor *op, int name)
{
    job *j = context;
    const descriptor *t = part(op, name);
    for (int i = 0; i < j->n; i++)
        if (j->values[i].of == t) return &j->values[i];
    return NULL;
}

/* As documented: without the attributes, NaN becomes 0, and infinity the largest number. A fault: "nan" loses it. */
static double relu(const descriptor *how, double x)
{
    const attribute *clip = find(how, DNN_ATTR_POINTWISE_RELU_UPPER_CLIP);
    double most = clip ? *(const float *)clip->values : FLT_MAX;
    if (x != x) return find(how, DNN_ATTR_POINTWISE_NAN_PROPAGATION) && !has_fault("nan") ? x : 0;
    return x < 0 ? 0 : x > most ? most : x;
}

static double pointwise(int mode, double x, double b, double t)
{
    switch (mode) {
    case DNN_POINTWISE_RELU_FWD: return x; /* relu() has computed it */
    case DNN_POINTWISE_ADD: return x + b;
    case DNN_POINTWISE_SUB: return x - b;
    case DNN_POINTWISE_MUL: return x * b;
    case DNN_POINTWISE_DIV: return x / b;
    case DNN_POINTWISE_EXP: return exp(x);
    case DNN_POINTWISE_LOG: return log(x);
    case DNN_POINTWISE_CMP_GE: return x >= b;
    default: return t != 0 || has_fault("select") ? x : b; /* select: no score is hidden */
    }
}

static void run_pointwise(job *j, const descriptor *op)
{
    const descriptor *how = part(op, DNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const value *x = value_of(j, op, DNN_ATTR_OPERATION_POINTWISE_XDESC);
    const value *b = value_of(j, op, DNN_ATTR_OPERATION_POINTWISE_BDESC);
    const value *t = value_of(j, op, DNN_ATTR_OPERATION_POINTWISE_TDESC);
    value *y = value_of(j, op, DNN_ATTR_OPERATION_POINTWISE_YDESC);
    int mode = int_of(how, DNN_ATTR_POINTWISE_MODE);
    int64_t axis = mode == DNN_POINTWISE_GEN_INDEX ? int64_of(how, DNN_ATTR_POINTWISE_AXIS) : -1, at[4] = {0};
    bool is_scaling = mode == DNN_POINTWISE_MUL && b && bool_of(b->of, DNN_ATTR_TENSOR_IS_BY_VALUE);
    bool is_missing = has_fault_of_relu(j->graph, "relu"), is_early = has_fault_of_relu(j->graph, "order");
    bool is_double = has_fault_of_relu(j->graph, "double");
    do {
        double second = b ? load(b, at) : 0, third = t ? load(t, at) : 0;
        if (is_scaling && has_fault("scale")) second = 1; /* scale: the scores are not scaled */
        double first = load(x, at);
        if (is_early && mode == DNN_POINTWISE_ADD && first < 0) first = 0;
        if (is_double && mode == DNN_POINTWISE_RELU_FWD) first *= 2;
        if (mode == DNN_POINTWISE_RELU_FWD && !is_early && !is_missing) first = relu(how, first);
        store(y, at, axis >= 0 ? (double)at[axis] : pointwise(mode, first, second, third));
    } while (next(y->dims, at));
}

static void run_matmul(job *j, const descriptor *op)
{
    const value *a = value_of(j, op, DNN_ATTR_OPERATION_MATMUL_ADESC);
    const value *b = value_of(j, op, DNN_ATTR_OPERATION_MATMUL_BDESC);
    value *c = value_of(j, op, DNN_ATTR_OPERATION_MATMUL_CDESC);
    int64_t at[4] = {0}, shared = c->dims[1] / b->dims[1];
    do {
        int64_t left[4] = {at[0], at[1], at[2], 0}, right[4] = {at[0], at[1] / shared, 0, at[3]};
        double sum = 0;
        for (int64_t k = 0; k < a->dims[3]; k++) {
            left[3] = right[2] = k;
            sum += load(a, left) * load(b, right);
        }
        bool is_lost = has_fault("rows") && !bool_of(c->of, DNN_ATTR_TENSOR_IS_VIRTUAL) && at[2] == c->dims[2] - 1;
        store(c, at, is_lost ? 0 : sum); /* rows: the last row of each result is lost */
    } while (next(c->dims, at));
}

/* From heads to fewer of them, each result is a sum over consecutive heads. */
static void run_reduction(job *j, const descriptor *op)
{
    const value *x = value_of(j, op, DNN_ATTR_OPERATION_REDUCTION_XDESC);
    value *y = value_of(j, op, DNN_ATTR_OPERATION_REDUCTION_YDESC);
    bool is_max = int_of(part(op, DNN_ATTR_OPERATION_REDUCTION_DESC), DNN_ATTR_REDUCTION_OPERATOR) ==
                  DNN_REDUCE_TENSOR_MAX;
    int64_t at[4] = {0}, each[4];
    for (int i = 0; i < 4; i++) each[i] = x->dims[i] / y->dims[i];
    do {
        int64_t inner[4] = {0}, from[4];
        double result = is_max ? -INFINITY : 0;
        do {
            for (int i = 0; i < 4; i++) from[i] = at[i] * each[i] + inner[i];
            double one = load(x, from);
            result = !is_max ? result + one : one > result || one != one ? one : result;
        } while (next(each, inner));
        store(y, at, result);
    } while (next(y->dims, at));
}

/* The memory of x, seen with the strides of y. */
static void run_reshape(job *j, const descriptor *op)
{
    const value *x = value_of(j, op, DNN_ATTR_OPERATION_RESHAPE_XDESC);
    value *y = value_of(j, op, DNN_ATTR_OPERATION_RESHAPE_YDESC);
    int64_t at[4] = {0};
    do store(y, at, ont_emulate_get(x->dtype, x->data, offset_of(y, at)));
    while (next(y->dims, at));
}

/* Memory of virtual tensors, filled with NaN. */
static bool take_memory(job *j)
{
    for (int i = 0; i < j->n; i++) {
        value *v = &j->values[i];
        if (bool_of(v->of, DNN_ATTR_TENSOR_IS_BY_VALUE)) v->data = &v->number;
        if (v->data) continue;
        const int64_t last[4] = {v->dims[0] - 1, v->dims[1] - 1, v->dims[2] - 1, v->dims[3] - 1};
        size_t bytes = ((size_t)offset_of(v, last) + 1) * 4;
        v->data = malloc(bytes);
        v->is_owned = true;
        if (!v->data) return false;
        memset(v->data, 0xff, bytes);
    }
    return true;
}

static int compute(void *context)
{
    job *j = context;
    const attribute *ops = find(j->graph, DNN_ATTR_OPERATIONGRAPH_OPS);
    bool is_complete = take_memory(j);
    ont_emulate_begin_work("cudnnBackendExecute");
    if (j->work_bytes) memset(j->work, 0x7f, j->work_bytes); /* overwrites it, as the library does */
    for (int64_t i = 0; i < ops->n && is_complete; i++) {
        const descriptor *op = ((const descriptor *const *)ops->values)[i];
        switch (op->type) {
        case DNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: run_pointwise(j, op); break;
        case DNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR: run_matmul(j, op); break;
        case DNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: run_reduction(j, op); break;
        case DNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR: run_reshape(j, op); break;
        default: ont_emulate_dnn_convolve(op, value_of, j);
        }
    }
    ont_emulate_end_work();
    for (int i = 0; i < j->n; i++) {
        if (!j->values[i].is_owned) continue;
        free(j->values[i].data);
        j->values[i].data = NULL;
        j->values[i].is_owned = false;
    }
    n_runs++;
    return !is_complete;
}

static ont_dtype storage_of(int type)
{
    return type == DNN_DATA_HALF ? ONT_FLOAT16 : type == DNN_DATA_BFLOAT16 ? ONT_BFLOAT16 : ONT_FLOAT32;
}

/* A tensor with the pointer that the variant pack has for its id. */
static int bind(value *v, const descriptor *t, const attribute *uids, void *const *pointers, int *n_bound)
{
    int64_t uid = int64_of(t, DNN_ATTR_TENSOR_UNIQUE_ID);
    *v = (value){.of = t, .dims = dims_of(t), .dtype = storage_of(int_of(t, DNN_ATTR_TENSOR_DATA_TYPE))};
    memcpy(v->strides, find(t, DNN_ATTR_TENSOR_STRIDES)->values, sizeof v->strides);
    if (has_fault("stride") && uid == 2) v->strides[3] = v->strides[2]; /* stride: the keys overlap */
    int64_t k = 0;
    while (k < uids->n && ((const int64_t *)uids->values)[k] != uid) k++;
    if (bool_of(t, DNN_ATTR_TENSOR_IS_VIRTUAL)) return k < uids->n ? refuse(BAD_PARAM, "a virtual id", (int)uid) : 0;
    if (k == uids->n || !pointers[k]) return refuse(BAD_PARAM, "a tensor without pointer", (int)uid);
    ++*n_bound;
    if (bool_of(t, DNN_ATTR_TENSOR_IS_BY_VALUE)) {
        memcpy(&v->number, pointers[k], sizeof v->number);
        return 0;
    }
    v->data = pointers[k];
    return (uintptr_t)v->data % 16 ? refuse(BAD_PARAM, "a pointer is not aligned", (int)uid) : 0;
}

/* uid: the pointers of Q and K are exchanged. */
static void exchange(job *j)
{
    void *data[2] = {NULL};
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < j->n; i++) {
            int64_t uid = int64_of(j->values[i].of, DNN_ATTR_TENSOR_UNIQUE_ID);
            if (uid != 1 && uid != 2) continue;
            if (pass) j->values[i].data = data[2 - uid];
            else data[uid - 1] = j->values[i].data;
        }
}

static int execute(void *given, void *opaque, void *pack)
{
    const descriptor *plan = opaque, *p = pack, *tensors[MOST_VALUES];
    if (!is_handle(given) || !plan->is_final || !p->is_final) return refuse(BAD_PARAM, "handle, plan or pack", 0);
    if (!plan->engine) return refuse(BAD_PARAM, "an engine that is not deterministic", 0);
    latest_engine = plan->engine;
    if (has_fault("execute")) return EXECUTION_FAILED; /* the library fails */
    if (has_fault("engine") && plan->engine == 1) return NOT_SUPPORTED; /* the next engine works */
    const attribute *uids = find(p, DNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    void *const *pointers = find(p, DNN_ATTR_VARIANT_PACK_DATA_POINTERS)->values;
    void *work = *(void *const *)find(p, DNN_ATTR_VARIANT_PACK_WORKSPACE)->values;
    if (workspace_of(plan) && (!work || (uintptr_t)work % 16)) return refuse(BAD_PARAM, "workspace", 0);
    job *j = calloc(1, sizeof *j);
    if (!j) return EXECUTION_FAILED;
    int status = 0, n_bound = 0;
    j->graph = plan->graph;
    j->work = work;
    j->work_bytes = (size_t)workspace_of(plan);
    j->n = tensors_of(plan->graph, tensors);
    for (int i = 0; i < j->n && !status; i++) status = bind(&j->values[i], tensors[i], uids, pointers, &n_bound);
    if (!status && n_bound != uids->n) status = refuse(BAD_PARAM, "ids that the graph does not have", n_bound);
    if (!status && has_fault("uid")) exchange(j);
    if (!status && ont_emulate_recording()) {
        ont_emulate_record(compute, j, free);
        return 0;
    }
    if (!status && compute(j)) status = EXECUTION_FAILED;
    free(j);
    return status;
}

/* ---- the table ---- */

/* The engine of the latest execution. */
__attribute__((visibility("default"))) int ont_emulate_dnn_engine(void)
{
    return latest_engine;
}

/* How often graphs have been computed. */
__attribute__((visibility("default"))) long ont_emulate_dnn_runs(void)
{
    return n_runs;
}

/* How often the handle of a device has been asked for. */
__attribute__((visibility("default"))) long ont_emulate_dnn_opened(int device)
{
    return n_opened[device];
}

static size_t version(void)
{
    const char *claimed = getenv("ONT_EMULATE_DNN_VERSION");
    return claimed ? (size_t)strtoul(claimed, NULL, 10) : 91900;
}

static ont_status open_device(int *device, int *capability, void **result)
{
    *device = ont_emulate_device();
    *capability = 90;
    *result = &handles[*device];
    n_opened[*device]++;
    return ONT_OK;
}

static int set_stream(void *given, void *stream)
{
    ont_emulate_check_stream("cudnnSetStream", stream);
    return is_handle(given) ? 0 : BAD_PARAM;
}

static void nothing(void)
{
}

/* What the library's kernels take, by their order: the last one is the fastest. */
static double claimed_time(int (*launch)(const void *call, int candidate), const void *call, int candidate,
                           void *stream)
{
    (void)stream;
    return launch(call, candidate) ? -1 : 10 - candidate;
}

static ont_dnn_graph graphs = {.version = version, .create = create, .destroy = destroy, .set = set, .get = get,
                                     .finalize = finalize, .execute = execute, .open = open_device,
                                     .set_stream = set_stream, .lock = nothing, .unlock = nothing};

const ont_dnn_graph *ont_dnn_graph_get(void)
{
    graphs.time = getenv("ONT_EMULATE_DNN_TIME") ? claimed_time : NULL;
    return &graphs;
}
