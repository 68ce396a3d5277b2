/*
 * See current.h. By the functions of PyTorch's guards: cudaSetDevice() makes a context on a device that has none, which
 * takes hundreds of megabytes, and so a process that uses one GPU alone would get one on the first GPU as well. PyTorch
 * keeps in mind instead which device is to be current.
 */
#include "libs/current.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>

#include "libs/symbols.h"

static struct {
    int8_t (*exchange)(int8_t to);       /* c10::cuda::ExchangeDevice(); returns the device before */
    int8_t (*maybe_exchange)(int8_t to); /* c10::cuda::MaybeExchangeDevice(): makes no context */
} torch;
static bool found;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_library(void)
{
    static const char *const names[] = {"libc10_cuda.so"};
    static const ont_symbol symbols[] = {
        {"_ZN3c104cuda14ExchangeDeviceEa", offsetof(__typeof__(torch), exchange)},
        {"_ZN3c104cuda19MaybeExchangeDeviceEa", offsetof(__typeof__(torch), maybe_exchange)}};
    found = ont_library_open(names, sizeof names / sizeof *names, symbols, sizeof symbols / sizeof *symbols, &torch);
}

int ont_current_enter(int id, int *previous)
{
    pthread_once(&once, open_library);
    cudaError_t error = cudaGetDevice(previous);
    if (error == cudaSuccess && found)
        *previous = torch.exchange((int8_t)id);
    else if (error == cudaSuccess && *previous != id)
        error = cudaSetDevice(id);
    return (int)error;
}

void ont_current_leave(int previous)
{
    if (found) torch.maybe_exchange((int8_t)previous);
    else cudaSetDevice(previous);
}
