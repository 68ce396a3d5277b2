/*
 * Generated kernels through NVRTC, opened at run time. Machine code is kept in ORTMODULE_CACHE_DIR where that is set,
 * found by a hash of the source and checked against the source itself.
 */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "libs/jit.h"

typedef struct nvrtc {
    int (*create)(void **program, const char *source, const char *name, int n_headers, const char *const *headers,
                  const char *const *names);
    int (*destroy)(void **program);
    int (*compile)(void *program, int n, const char *const *options);
    int (*size)(void *program, size_t *bytes);
    int (*code)(void *program, char *code);
    int (*log_size)(void *program, size_t *bytes);
    int (*log)(void *program, char *log);
} nvrtc;

static nvrtc api;
static bool found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char
    preamble[] = "typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef int int32_t; typedef "
                 "unsigned int uint32_t;\n"
                 "typedef signed char int8_t; typedef short int16_t;\n"
                 "typedef long long int64_t; typedef unsigned long long uint64_t;\n"
                 "enum {"
#define X(name, number, bytes, text, dlcode, dlbits) " ONT_" #name " = " #number ","
    ONT_DTYPE_LIST(X)
#undef X
                 " };\n"
                 "#define ONT_DEVICE static __device__ __forceinline__\n"
                 "ONT_DEVICE float ont_f16_to_float(uint16_t h) { float f; asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(f) : "
                 "\"h\"(h)); return f; }\n"
                 "ONT_DEVICE uint16_t ont_float_to_f16(float f) { uint16_t h; asm(\"cvt.rn.f16.f32 %0, %1;\" : "
                 "\"=h\"(h) : \"f\"(f)); return h; }\n"
                 "ONT_DEVICE float ont_bf16_to_float(uint16_t h) { return __int_as_float((int)((uint32_t)h << 16)); }\n"
                 "#if __CUDA_ARCH__ >= 800\n"
                 "ONT_DEVICE uint16_t ont_float_to_bf16(float f) { uint16_t h; asm(\"cvt.rn.bf16.f32 %0, %1;\" : "
                 "\"=h\"(h) : \"f\"(f)); return h; }\n"
                 "#else\n"
                 "ONT_DEVICE uint16_t ont_float_to_bf16(float x) {\n"
                 "  uint32_t bits = (uint32_t)__float_as_int(x);\n"
                 "  return (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)0x7fc0 : (uint16_t)((bits + 0x7fff + (bits "
                 ">> 16 & 1)) >> 16); }\n"
                 "#endif\n";

/* PyTorch has loaded the other libraries; NVRTC it loads late. In the wheels, NVRTC is near them. */
static void *open_near(const char *neighbour, const char *name)
{
    static const char *const ways[] = {"", "../../cuda_nvrtc/lib/", "../../nvidia/cu13/lib/",
                                       "../../nvidia/cuda_nvrtc/lib/"};
    struct link_map *map = NULL;
    char path[4096];
    void *library = dlopen(neighbour, RTLD_LAZY | RTLD_NOLOAD), *opened = NULL;
    if (!library) return NULL;
    if (!dlinfo(library, RTLD_DI_LINKMAP, &map) && map && strrchr(map->l_name, '/'))
        for (size_t i = 0; i < sizeof ways / sizeof *ways && !opened; i++) {
            int n = snprintf(path, sizeof path, "%.*s/%s%s", (int)(strrchr(map->l_name, '/') - map->l_name),
                             map->l_name, ways[i], name);
            if (n > 0 && (size_t)n < sizeof path) opened = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
        }
    dlclose(library);
    return opened;
}

static void *open_any(void)
{
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    static const char *const neighbours[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libtorch_cuda.so"};
    enum { NAMES = sizeof names / sizeof *names, NEIGHBOURS = sizeof neighbours / sizeof *neighbours };
    void *opened = NULL;
    for (int i = 0; i < NAMES && !opened; i++) opened = dlopen(names[i], RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
    for (int i = 0; i < NAMES * NEIGHBOURS && !opened; i++)
        opened = open_near(neighbours[i % NEIGHBOURS], names[i / NEIGHBOURS]);
    for (int i = 0; i < NAMES && !opened; i++) opened = dlopen(names[i], RTLD_LAZY | RTLD_LOCAL);
    return opened;
}

static void open_library(void)
{
    static const struct {
        const char *name;
        size_t offset;
    } symbols[] = {
        {"nvrtcCreateProgram", offsetof(nvrtc, create)},     {"nvrtcDestroyProgram", offsetof(nvrtc, destroy)},
        {"nvrtcCompileProgram", offsetof(nvrtc, compile)},   {"nvrtcGetCUBINSize", offsetof(nvrtc, size)},
        {"nvrtcGetCUBIN", offsetof(nvrtc, code)},            {"nvrtcGetProgramLogSize", offsetof(nvrtc, log_size)},
        {"nvrtcGetProgramLog", offsetof(nvrtc, log)},
    };
    void *opened = open_any();
    if (!opened) return;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(opened, symbols[i].name);
        if (!symbol) return;
        memcpy((char *)&api + symbols[i].offset, &symbol, sizeof symbol);
    }
    found = true;
}

typedef struct code {
    char *bytes;
    size_t size;
} code;

/* ---- the cache on disk: length of the source, the source, machine code ---- */

static uint64_t hash(const char *text, int architecture)
{
    uint64_t h = 0xcbf29ce484222325u + (uint64_t)architecture; /* FNV-1a */
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h;
}

static bool cache_path(char *path, size_t size, const char *source, int architecture)
{
    const char *folder = getenv("ORTMODULE_CACHE_DIR");
    if (!folder || !*folder) return false;
    int n = snprintf(path, size, "%s/elementwise_sm%d_%016" PRIx64 ".cubin", folder, architecture,
                     hash(source, architecture));
    return n > 0 && (size_t)n < size;
}

static bool read_cache(const char *path, const char *source, code *out)
{
    size_t length = strlen(source);
    FILE *file = fopen(path, "rb");
    if (!file) return false;
    long end = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
    bool fine = end > (long)(sizeof length + length) && end < 64 << 20 && !fseek(file, 0, SEEK_SET);
    char *all = fine ? ont_malloc((size_t)end) : NULL;
    fine = all && fread(all, 1, (size_t)end, file) == (size_t)end && !memcmp(all, &length, sizeof length) &&
           !memcmp(all + sizeof length, source, length);
    fclose(file);
    if (fine) {
        out->size = (size_t)end - sizeof length - length;
        memmove(all, all + sizeof length + length, out->size);
        out->bytes = all;
    } else {
        ont_free(all);
    }
    return fine;
}

/* Written to a file of its own and then renamed, since another process may read meanwhile. A failure to write is
 * ignored: the source is compiled again. */
static void write_cache(const char *path, const char *source, const code *c)
{
    char fresh[4200];
    size_t length = strlen(source);
    int n = snprintf(fresh, sizeof fresh, "%s.%ld", path, (long)getpid());
    FILE *file = n > 0 && (size_t)n < sizeof fresh ? fopen(fresh, "wb") : NULL;
    if (!file) return;
    bool fine = fwrite(&length, sizeof length, 1, file) == 1 && fwrite(source, 1, length, file) == length &&
                fwrite(c->bytes, 1, c->size, file) == c->size;
    fine = !fclose(file) && fine;
    if (!fine || rename(fresh, path)) remove(fresh);
}

/* ---- compiling ---- */

static ont_status refused(void *program, int error)
{
    char log[400] = "";
    size_t bytes = 0;
    char *whole = !api.log_size(program, &bytes) && bytes ? ont_malloc(bytes + 1) : NULL;
    if (whole && !api.log(program, whole)) snprintf(log, sizeof log, "%.399s", whole);
    ont_free(whole);
    return ont_fail(ONT_EINTERNAL, "NVRTC refuses a generated kernel (%d): %s", error, log);
}

static ont_status build(const char *source, int architecture, code *out)
{
    char target[40];
    void *program = NULL;
    snprintf(target, sizeof target, "--gpu-architecture=sm_%d", architecture);
    const char *options[] = {target, "--std=c++17"};
    int error = api.create(&program, source, "elementwise.cu", 0, NULL, NULL);
    if (error) return ont_fail(ONT_EINTERNAL, "NVRTC makes no program (%d)", error);
    error = api.compile(program, 2, options);
    ont_status status = error ? refused(program, error) : ONT_OK;
    if (status == ONT_OK && (api.size(program, &out->size) || !out->size))
        status = ont_fail(ONT_EINTERNAL, "NVRTC gives no code");
    if (status == ONT_OK && !(out->bytes = ont_malloc(out->size))) status = ONT_ENOMEM;
    if (status == ONT_OK && api.code(program, out->bytes)) status = ont_fail(ONT_EINTERNAL, "NVRTC gives no code");
    api.destroy(&program);
    return status;
}

static int target(void)
{
    int id = 0, major = 0, minor = 0;
    if (!cudaGetDevice(&id) && !cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id) &&
        !cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id))
        return major * 10 + minor;
    cudaGetLastError();
    return 0;
}

static ont_status compile(const char *source, void **function)
{
    char path[4096];
    code c = {0};
    int architecture = target();
    if (!architecture) return ont_fail(ONT_ESTATE, "the device's architecture is not to be had");
    bool cached = cache_path(path, sizeof path, source, architecture), hit = cached && read_cache(path, source, &c);
    ont_status status = hit ? ONT_OK : build(source, architecture, &c);
    if (status == ONT_OK && cached && !hit) write_cache(path, source, &c);
    cudaLibrary_t library;
    cudaKernel_t kernel;
    if (status == ONT_OK && (cudaLibraryLoadData(&library, c.bytes, NULL, NULL, 0, NULL, NULL, 0) ||
                             cudaLibraryGetKernel(&kernel, library, "ont_fused"))) {
        cudaGetLastError();
        status = ont_fail(ONT_ESTATE, "a generated kernel was not loaded");
    }
    ont_free(c.bytes);
    if (status == ONT_OK) *function = (void *)kernel;
    return status;
}

static ont_status launch(void *function, unsigned blocks, ont_jit_args *args, void *stream)
{
    void *arguments[] = {args};
    cudaError_t error =
        cudaLaunchKernel(function, (dim3){blocks, 1, 1}, (dim3){ONT_JIT_THREADS, 1, 1}, arguments, 0, stream);
    if (error == cudaSuccess) return ONT_OK;
    cudaGetLastError();
    return ont_fail(ONT_ESTATE, "a generated kernel was not launched: %s", cudaGetErrorString(error));
}

static const ont_jit jit = {preamble, target, compile, launch};

const ont_jit *ont_jit_get(void)
{
    pthread_once(&once, open_library);
    return found ? &jit : NULL;
}
