/*
 * Opens shared libraries, each once, when something asks for it: oneDNN's relocations alone take 11 MiB.
 */
#include "device/library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !ONT_NO_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#endif

static void *torch_library, *dnnl_library;
static pthread_once_t torch_once = PTHREAD_ONCE_INIT, dnnl_once = PTHREAD_ONCE_INIT;

/* ONNXTRAIN_ISA limits oneDNN's kernels, too. This must precede the first call of oneDNN. */
static void limit_isa(void)
{
#if !ONT_NO_ONEDNN
    const char *asked = getenv("ONNXTRAIN_ISA");
    if (!dnnl_library || !asked || (strcmp(asked, "avx2") && strcmp(asked, "plain"))) return;
    __typeof__(&dnnl_set_max_cpu_isa) set;
    *(void **)&set = dlsym(dnnl_library, "dnnl_set_max_cpu_isa");
    if (set) (void)set(dnnl_cpu_isa_avx2); /* fails where the processor has less, which is fine */
#endif
}

static void open_torch(void)
{
    torch_library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
}

static void open_dnnl(void)
{
    Dl_info self;
    if (dladdr((void *)(uintptr_t)open_dnnl, &self) && self.dli_fname) {
        char path[4096];
        const char *slash = strrchr(self.dli_fname, '/');
        int folder = slash ? (int)(slash - self.dli_fname) : 0;
        int n = snprintf(path, sizeof path, "%.*s/_libs/libdnnl.so.3", folder, self.dli_fname);
        if (slash && n > 0 && (size_t)n < sizeof path) dnnl_library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    }
    if (!dnnl_library) dnnl_library = dlopen("libdnnl.so.3", RTLD_LAZY | RTLD_LOCAL);
    limit_isa();
}

void *ont_library_torch(void)
{
    pthread_once(&torch_once, open_torch);
    return torch_library;
}

void *ont_library_dnnl(void)
{
    pthread_once(&dnnl_once, open_dnnl);
    return dnnl_library;
}
