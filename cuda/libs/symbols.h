/*
 * Functions of a library that is opened at run time, by name: symbols.c, or in the emulation a table of fakes.
 */
#ifndef ONT_CUDA_SYMBOLS_H
#define ONT_CUDA_SYMBOLS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct ont_symbol {
    const char *name;
    size_t offset; /* in the table: the place of the function's address */
} ont_symbol;

/* Opens the first library that is found and fills the table. One that is loaded already, which is PyTorch's, comes
 * before all others. False where no library is found, or where the one that is found lacks a function. */
bool ont_library_open(const char *const *names, size_t n_names, const ont_symbol *symbols, size_t n_symbols,
                      void *table);

#endif
