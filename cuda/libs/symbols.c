/*
 * Libraries by dlopen(). See symbols.h.
 */
#include <dlfcn.h>
#include <string.h>

#include "libs/symbols.h"

bool ont_library_open(const char *const *names, size_t n_names, const ont_symbol *symbols, size_t n_symbols,
                      void *table)
{
    void *opened = NULL;
    for (int pass = 0; pass < 2 && !opened; pass++) /* in the first pass, only what is loaded */
        for (size_t i = 0; i < n_names && !opened; i++)
            opened = dlopen(names[i], RTLD_LAZY | RTLD_LOCAL | (pass ? 0 : RTLD_NOLOAD));
    if (!opened) return false;
    for (size_t i = 0; i < n_symbols; i++) {
        void *symbol = dlsym(opened, symbols[i].name);
        if (!symbol) return false;
        memcpy((char *)table + symbols[i].offset, &symbol, sizeof symbol);
    }
    return true;
}
