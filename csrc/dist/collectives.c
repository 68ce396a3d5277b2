/*
 * Opens _mpi.so, once. It is never closed: MPI cannot be initialised a second time.
 */
#include "dist/collectives.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { PATH = 4096 };

static ont_collectives opened;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Of _mpi.so, whether or not the file exists. */
static const char *library_path(void)
{
    static char path[PATH];
    Dl_info self;
    if (!dladdr((void *)(uintptr_t)library_path, &self) || !self.dli_fname) return "_mpi.so";
    const char *slash = strrchr(self.dli_fname, '/');
    int n = snprintf(path, sizeof path, "%.*s/_mpi.so", slash ? (int)(slash - self.dli_fname) : 1,
                     slash ? self.dli_fname : ".");
    return n > 0 && (size_t)n < sizeof path ? path : "_mpi.so";
}

static ont_status open_library(ont_collectives *table)
{
    /* RTLD_GLOBAL: MPI opens plugins of its own, which look for its symbols. */
    void *library = dlopen(library_path(), RTLD_NOW | RTLD_GLOBAL);
    if (!library) return ont_fail(ONT_EIO, "%s", dlerror());
    void *symbol = dlsym(library, "ont_mpi_open");
    ont_collectives_open_fn open;
    memcpy(&open, &symbol, sizeof open); /* ISO C does not cast object pointers to function pointers */
    if (!open) return ont_fail(ONT_EIO, "%s: no library of collectives", library_path());
    ont_wait wait = {0};
    ont_status status = open(table, &wait);
    if (status != ONT_OK) return ont_fail(status, "%s", wait.message);
    if (table->version != ONT_COLLECTIVES_VERSION)
        return ont_fail(ONT_EIO, "%s: version %d, expected %d", library_path(), table->version,
                        ONT_COLLECTIVES_VERSION);
    return ONT_OK;
}

ont_status ont_collectives_get(const ont_collectives **table)
{
    ont_status status = ONT_OK;
    pthread_mutex_lock(&lock);
    if (!opened.size) {
        ont_collectives fresh = {0};
        status = open_library(&fresh);
        if (status == ONT_OK) opened = fresh;
    }
    pthread_mutex_unlock(&lock);
    if (status == ONT_OK) *table = &opened;
    return status;
}
