/*
 * libcuda.so.1 for cudnn_plans.c: there is no device, and code that is loaded is accepted unseen, so that cuDNN can
 * plan without a GPU. Nothing can be launched.
 */
#include <stddef.h>

enum { NO_DEVICE = 100, NOT_FOUND = 500 };

static char anything;

#define ABSENT(name) int name(void) { return NO_DEVICE; }
#define LOADED(name) \
    int name(void **what) \
    { \
        *what = &anything; \
        return 0; \
    }
#define DONE(name) int name(void) { return 0; }

ABSENT(cuInit)
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxGetLimit)
ABSENT(cuCtxPopCurrent)
ABSENT(cuCtxPushCurrent)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetCount)
ABSENT(cuGetErrorName)
ABSENT(cuGetErrorString)
LOADED(cuKernelGetFunction)
DONE(cuKernelSetAttribute)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLaunchKernelEx)
LOADED(cuLibraryGetKernel)
LOADED(cuLibraryLoadData)
LOADED(cuLibraryLoadFromFile)
DONE(cuLibraryUnload)
ABSENT(cuLinkAddData)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate)
ABSENT(cuLinkDestroy)
LOADED(cuModuleGetFunction)
LOADED(cuModuleLoadData)
DONE(cuModuleUnload)
ABSENT(cuOccupancyMaxPotentialClusterSize)
ABSENT(cuStreamGetCtx)
ABSENT(cuTensorMapEncodeIm2col)
ABSENT(cuTensorMapEncodeTiled)

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}

int cuKernelGetAttribute(int *value)
{
    *value = 0;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function)
{
    (void)name;
    *function = NULL;
    return NOT_FOUND;
}

int cuGetExportTable(const void **exports)
{
    *exports = NULL;
    return NOT_FOUND;
}
