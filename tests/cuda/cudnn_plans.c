/*
 * What the true cuDNN says of the graphs of cuda/libs/sdpa.c and conv_graph.c, without a GPU: it is given the properties
 * of a device instead of a handle, and plans, with all checks of support and the compilation of kernels. Nothing is
 * executed. cudnn.sh builds and runs it, beside a driver (driver.c) that answers nothing but that code was loaded.
 *
 * The numbers of dnn_graph.h are compared with cudnn_graph.h when this file is compiled.
 */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cudnn_graph.h"
#include "libs/conv_graph.h"
#include "libs/dnn_graph.h"
#include "libs/sdpa.h"

#define X(name, value) _Static_assert((int)CUDNN_##name == (value), #name);
ONT_DNN_NUMBERS(X)
#undef X

typedef struct device {
    const char *name;
    int version, processors, shared; /* shared: bytes of shared memory that a block may have */
} device;

static const device devices[] = {{"NVIDIA H200", 90, 132, 232448}, {"NVIDIA A100", 80, 108, 166912}};

typedef struct shape {
    const char *what;
    int64_t batch, heads, k_heads, v_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
} shape;

static const shape shapes[] = {
    {"GPT-2", 16, 12, 12, 12, 1024, 1024, 64, 64},  {"Llama 3.2 1B", 4, 32, 8, 8, 2048, 2048, 64, 64},
    {"V alone shared", 4, 32, 32, 8, 2048, 2048, 64, 64},
    {"heads of 128", 4, 32, 8, 8, 2048, 2048, 128, 128}, {"BERT", 64, 12, 12, 12, 128, 128, 64, 64},
    {"odd lengths", 2, 6, 3, 3, 999, 777, 64, 64},  {"heads of 80 and 96", 2, 4, 4, 4, 384, 640, 80, 96},
    {"heads of 8 and 24", 2, 4, 4, 4, 100, 60, 8, 24},
};

/* `rows` is 1, as are the rows of the kernel, for signals. */
typedef struct image_shape {
    const char *what;
    int64_t c, m, groups, rows, size, kernel, stride, pad;
} image_shape;

static const image_shape image_shapes[] = {
    {"ResNet-50, first", 3, 64, 1, 224, 224, 7, 2, 3},        {"ResNet-50, 1 x 1", 64, 256, 1, 56, 56, 1, 1, 0},
    {"ResNet-50, 3 x 3", 64, 64, 1, 56, 56, 3, 1, 1},         {"ResNet-50, 3 x 3 by 2", 128, 128, 1, 56, 56, 3, 2, 1},
    {"ResNet-50, 1 x 1 by 2", 256, 512, 1, 56, 56, 1, 2, 0},  {"ResNet-50, last", 512, 512, 1, 7, 7, 3, 1, 1},
    {"odd channels", 5, 7, 1, 30, 30, 3, 1, 1},               {"32 groups", 128, 128, 32, 56, 56, 3, 1, 1},
    {"each channel", 96, 96, 96, 56, 56, 3, 1, 1},            {"Whisper, first", 80, 384, 1, 1, 3000, 3, 1, 1},
    {"Whisper, second", 384, 384, 1, 1, 3000, 3, 2, 1},       {"wav2vec2, first", 1, 512, 1, 1, 16000, 10, 5, 0},
    {"wav2vec2, second", 512, 512, 1, 1, 3199, 3, 2, 0},      {"wav2vec2, last", 512, 512, 1, 1, 99, 2, 2, 0},
    {"Mamba", 1536, 1536, 1536, 1, 1024, 4, 1, 3},
    {"VGG, first", 3, 64, 1, 224, 224, 3, 1, 1},              {"VGG, second", 64, 64, 1, 224, 224, 3, 1, 1},
    {"VGG, third", 64, 128, 1, 112, 112, 3, 1, 1},            {"VGG, last but 3", 256, 512, 1, 28, 28, 3, 1, 1},
    {"VGG, last", 512, 512, 1, 14, 14, 3, 1, 1},              {"AlexNet, first", 3, 64, 1, 224, 224, 11, 4, 2},
    {"AlexNet, second", 64, 192, 1, 27, 27, 5, 1, 2},         {"SqueezeNet, 1 x 1", 64, 16, 1, 55, 55, 1, 1, 0},
};

const ont_core *ont_cuda_core;
static ont_core core;
static const ont_allocator allocator = {.tf32_conv = 1};
const ont_allocator *ont_cuda_allocator = &allocator;
static ont_dnn_graph real, table;
static void (*last_error)(char *message, size_t size);
static void *properties; /* of the device */
static int capability;
static bool is_wrong; /* a graph that is not attention is built, and must be refused */

static void print_log(ont_log_level level, const char *format, ...)
{
    va_list arguments;
    (void)level;
    va_start(arguments, format);
    printf("    ");
    vprintf(format, arguments);
    puts("");
    va_end(arguments);
}

static int failed(const char *what, int status)
{
    char message[512] = "";
    if (!status) return 0;
    last_error(message, sizeof message);
    printf("    %s: status %d, %s\n", what, status, message);
    return status;
}

/* Heuristics and plans are for the device of the properties. */
static int create(int type, void **descriptor)
{
    int status = failed("creating", real.create(type, descriptor));
    int name = type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR        ? CUDNN_ATTR_ENGINEHEUR_DEVICEPROP
               : type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR ? CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP
                                                                 : -1;
    if (status || name < 0) return status;
    return failed("properties", real.set(*descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &properties));
}

static int set(void *descriptor, int name, int type, int64_t n, const void *values)
{
    const int sum = CUDNN_REDUCE_TENSOR_ADD;
    if (is_wrong && name == CUDNN_ATTR_REDUCTION_OPERATOR) values = &sum; /* the maximum of a row becomes its sum */
    return type == CUDNN_TYPE_HANDLE ? 0 : failed("setting", real.set(descriptor, name, type, n, values));
}

static int get(void *descriptor, int name, int type, int64_t room, int64_t *n, void *values)
{
    return failed("reading", real.get(descriptor, name, type, room, n, values));
}

static int finalize(void *descriptor)
{
    return failed("finalizing", real.finalize(descriptor));
}

static ont_status open_device(int *id, int *version, void **handle)
{
    *id = capability; /* so that each device has plans of its own */
    *version = capability;
    *handle = NULL;
    return ONT_OK;
}

const ont_dnn_graph *ont_dnn_graph_get(void)
{
    return &table;
}

static bool is_deterministic(void)
{
    return false;
}

static bool load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        puts(dlerror());
        return false;
    }
    *(void **)&real.version = dlsym(library, "cudnnGetVersion");
    *(void **)&real.create = dlsym(library, "cudnnBackendCreateDescriptor");
    *(void **)&real.destroy = dlsym(library, "cudnnBackendDestroyDescriptor");
    *(void **)&real.set = dlsym(library, "cudnnBackendSetAttribute");
    *(void **)&real.get = dlsym(library, "cudnnBackendGetAttribute");
    *(void **)&real.finalize = dlsym(library, "cudnnBackendFinalize");
    *(void **)&last_error = dlsym(library, "cudnnGetLastErrorString");
    table = real;
    table.create = create;
    table.set = set;
    table.get = get;
    table.finalize = finalize;
    table.open = open_device;
    core.log = print_log;
    core.gemm_is_deterministic = is_deterministic;
    core.calloc = (__typeof__(core.calloc))calloc;
    ont_cuda_core = &core;
    return true;
}

static bool choose(const device *d)
{
    char json[2048];
    int n = snprintf(json, sizeof json,
                     "{\"deviceName\": \"%s\", \"deviceVer\": %d, \"driverVer\": 13000, \"cudaDeviceId\": 0, "
                     "\"totalGlobalMem\": 80000000000, \"multiProcessorCount\": %d, "
                     "\"maxSharedMemoryPerBlockOptin\": %d, \"maxSharedMemoryPerBlock\": 49152, "
                     "\"reservedSharedMemoryPerBlock\": 1024, \"maxGridSize\": [2147483647, 65535, 65535], "
                     "\"maxBlockSize\": [1024, 1024, 64], \"regsPerBlock\": 65536, \"maxRegistersPerSM\": 65536, "
                     "\"maxCtasPerSM\": 32, \"maxThreadsPerBlock\": 1024, \"maxThreadsPerSM\": 2048, \"warpSize\": 32, "
                     "\"pciDeviceId\": 0, \"isTccDriver\": 0, \"supportCoopLaunch\": 1, \"smClockRateKHz\": 1500000, "
                     "\"memClockRateKHz\": 2000000, \"memoryBusWidth\": 5120, \"l2CacheSize\": 41943040}",
                     d->name, d->version * 10, d->processors, d->shared);
    capability = d->version;
    return !failed("properties", real.create(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &properties)) &&
           !failed("properties", real.set(properties, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, n,
                                          json)) &&
           !failed("properties", real.finalize(properties));
}

/* Operands are (batch, length, heads, size), as models have them. */
static const char *plan_of(const shape *s, int variant, size_t *bytes)
{
    ont_sdpa *plan;
    ont_sdpa_shape g;
    memset(&g, 0, sizeof g);
    g.batch = s->batch, g.heads = s->heads, g.k_heads = s->k_heads, g.v_heads = s->v_heads;
    g.seqlen_q = s->seqlen_q, g.seqlen_k = s->seqlen_k;
    g.head_dim = s->head_dim, g.head_dim_v = s->head_dim_v;
    const int64_t sizes[4][3] = {{g.seqlen_q, g.heads, g.head_dim}, {g.seqlen_k, g.k_heads, g.head_dim},
                                 {g.seqlen_k, g.v_heads, g.head_dim_v}, {g.seqlen_q, g.heads, g.head_dim_v}};
    for (int i = 0; i < 4; i++) {
        g.strides[i][0] = sizes[i][0] * sizes[i][1] * sizes[i][2];
        g.strides[i][1] = sizes[i][2];
        g.strides[i][2] = sizes[i][1] * sizes[i][2];
    }
    g.scale = 0.125;
    g.gradient = variant & 1;
    g.causal = variant >> 1 & 1;
    g.dtype = variant & 4 ? ONT_FLOAT16 : ONT_BFLOAT16;
    const char *refusal = ont_sdpa_get(&g, &plan);
    *bytes = refusal ? 0 : ont_sdpa_work_bytes(plan);
    return refusal;
}

/* Forward with what is behind it, forward, and the gradients, of 32 images; the number of those without a plan. */
static int plan_images(const char *name, const image_shape *s, ont_dtype dtype)
{
    static const char *const dtype_names[] = {
        [ONT_FLOAT32] = "float32 (TF32)", [ONT_FLOAT16] = "float16", [ONT_BFLOAT16] = "bfloat16"};
    static const struct {
        const char *name;
        ont_conv_kind kind;
        ont_conv_epilogue epilogue;
    } variants[] = {{"forward with bias and Relu", ONT_CONV_FORWARD, ONT_CONV_BIAS_RELU},
                    {"forward with bias", ONT_CONV_FORWARD, ONT_CONV_BIAS},
                    {"forward", ONT_CONV_FORWARD, ONT_CONV_PLAIN},
                    {"gradient of the input", ONT_CONV_GRAD_INPUT, ONT_CONV_PLAIN},
                    {"gradient of the weight", ONT_CONV_GRAD_WEIGHT, ONT_CONV_PLAIN}};
    const bool is_signal = s->rows == 1;
    const int64_t high = is_signal ? 1 : s->kernel, by = is_signal ? 1 : s->stride, above = is_signal ? 0 : s->pad;
    const int64_t rows = (s->rows + 2 * above - high) / by + 1;
    const int64_t columns = (s->size + 2 * s->pad - s->kernel) / s->stride + 1;
    ont_conv_shape g = {.n = 32, .c = s->c, .m = s->m, .groups = s->groups, .in = {1, s->rows, s->size},
                        .out = {1, rows, columns}, .kernel = {1, high, s->kernel}, .stride = {1, by, s->stride},
                        .dilation = {1, 1, 1}, .pad = {0, above, s->pad}, .in_count = s->rows * s->size,
                        .out_count = rows * columns, .kernel_count = high * s->kernel, .dtype = (int32_t)dtype,
                        .spatial = is_signal ? 1 : 2, .channels_last = 1};
    int missing = 0;
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        ont_conv_plan *plan;
        const char *refusal = ont_conv_plan_get(&g, variants[i].kind, variants[i].epilogue, &plan);
        missing += refusal != NULL;
        printf("%s, %s, %s, %s: ", name, s->what, dtype_names[dtype], variants[i].name);
        if (refusal) printf("%s\n", refusal);
        else printf("%.1f MiB\n", (double)ont_conv_plan_work_bytes(plan) / (1 << 20));
    }
    return missing;
}

int main(int argc, char **argv)
{
    int missing = 0;
    if (argc != 2 || !load(argv[1])) return 2;
    printf("cuDNN %zu\n", real.version());
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        if (!choose(&devices[i])) return 2;
        for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
            for (int variant = 0; variant < 8; variant++) {
                size_t bytes;
                const char *refusal = plan_of(&shapes[k], variant, &bytes);
                missing += refusal != NULL;
                printf("%s, %s, %s, %s, %s: ", devices[i].name, shapes[k].what, variant & 4 ? "float16" : "bfloat16",
                       variant & 2 ? "causal" : "full", variant & 1 ? "gradient" : "forward");
                if (refusal) printf("%s\n", refusal);
                else printf("%.1f MiB\n", (double)bytes / (1 << 20));
            }
    }
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        if (!choose(&devices[i])) return 2;
        for (size_t k = 0; k < sizeof image_shapes / sizeof *image_shapes; k++) {
            missing += plan_images(devices[i].name, &image_shapes[k], ONT_BFLOAT16);
            missing += plan_images(devices[i].name, &image_shapes[k], ONT_FLOAT16);
            missing += plan_images(devices[i].name, &image_shapes[k], ONT_FLOAT32);
        }
    }
    size_t bytes;
    shape other = shapes[0]; /* without a plan yet */
    other.batch = 3;
    is_wrong = true;
    bool is_refused = plan_of(&other, 0, &bytes) != NULL;
    printf("%d without a plan; a wrong graph is %s\n", missing, is_refused ? "refused" : "taken");
    return missing || !is_refused;
}
