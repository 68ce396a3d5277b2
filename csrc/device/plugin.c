/*
 * Opens plugins. See plugin.h. They are never closed, because programs refer to their devices.
 */
#include "device/plugin.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

enum { MAX_PLUGINS = 4, PATH = 4096 };

static struct {
    char path[PATH];
    ont_plugin plugin;
} opened[MAX_PLUGINS];
static int n_opened;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const ont_allocator *memory;

void ont_plugin_set_allocator(const ont_allocator *allocator)
{
    memory = allocator;
}

int64_t ont_plugin_flags(void)
{
    return memory ? (memory->tf32 != 0) | (memory->tf32_conv != 0) << 1 : 0;
}

const char *ont_plugin_cuda_path(void)
{
    static char path[PATH];
    Dl_info self;
    if (!dladdr((void *)(uintptr_t)ont_plugin_cuda_path, &self) || !self.dli_fname) return "_cuda.so";
    const char *slash = strrchr(self.dli_fname, '/');
    int n = snprintf(path, sizeof path, "%.*s/_cuda.so", slash ? (int)(slash - self.dli_fname) : 1,
                     slash ? self.dli_fname : ".");
    return n > 0 && (size_t)n < sizeof path ? path : "_cuda.so";
}

static ont_status open_plugin(const char *path, const struct ont_core *core, ont_plugin *plugin)
{
    if (strlen(path) >= PATH) return ont_fail(ONT_EINVAL, "the plugin's path is longer than %d bytes", PATH - 1);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return ont_fail(ONT_EIO, "%s", dlerror());
    ont_plugin_open_fn open;
    void *symbol = dlsym(library, "ont_plugin_open");
    memcpy(&open, &symbol, sizeof open); /* ISO C does not cast object pointers to function pointers */
    ont_status status = open ? open(core, memory, plugin) : ont_fail(ONT_EIO, "%s: not a plugin of onnxtrain", path);
    if (status == ONT_OK && plugin->version != ONT_PLUGIN_VERSION)
        status = ont_fail(ONT_EIO, "%s: plugin version %d, expected %d", path, plugin->version, ONT_PLUGIN_VERSION);
    if (status != ONT_OK) dlclose(library);
    return status;
}

ont_status ont_plugin_get(const char *path, const struct ont_core *core, const ont_plugin **plugin)
{
    char resolved[PATH_MAX]; /* one library by two paths would be opened twice */
    if (strchr(path, '/') && realpath(path, resolved)) path = resolved;
    ont_status status = ONT_OK;
    int found = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_opened; i++)
        if (!strcmp(opened[i].path, path)) found = i;
    if (found < 0 && n_opened == MAX_PLUGINS) status = ont_fail(ONT_EUNSUPPORTED, "more than %d plugins", MAX_PLUGINS);
    if (found < 0 && status == ONT_OK) {
        ont_plugin fresh = {0};
        status = open_plugin(path, core, &fresh);
        if (status == ONT_OK) {
            found = n_opened++;
            strcpy(opened[found].path, path);
            opened[found].plugin = fresh;
        }
    }
    pthread_mutex_unlock(&lock);
    if (status == ONT_OK) *plugin = &opened[found].plugin;
    return status;
}
