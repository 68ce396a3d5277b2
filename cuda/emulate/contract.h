/*
 * For the emulated device and libraries: what their documentation requires of a caller. A call that breaks a rule ends
 * the process with a message, as a sanitizer does: an error status could be taken for a refusal, and the caller would
 * go on with something slower.
 */
#ifndef ONT_EMULATE_CONTRACT_H
#define ONT_EMULATE_CONTRACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Ends the process; the message begins with what was called. */
void ont_emulate_refuse(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
#define ONT_REQUIRE(condition, ...) \
    do { \
        if (!(condition)) ont_emulate_refuse(__VA_ARGS__); \
    } while (0)
/* Ends the process while a graph is captured: the call waits for the device or allocates memory, which CUDA refuses. */
void ont_emulate_outside_capture(const char *call);

/* A product with GELU has run; tests decide whether that takes long (runtime.c). */
void ont_emulate_note_epilogue(void);

/* Random numbers that are the same in each run for one key and ONT_EMULATE_SEED (0 where it is not set). */
uint64_t ont_emulate_key(const void *bytes, size_t n);
uint64_t ont_emulate_random(uint64_t *state);

/* Functions of an emulated library, up to a NULL. */
typedef struct ont_emulate_function {
    const char *name;
    void (*function)(void);
} ont_emulate_function;
extern const ont_emulate_function ont_emulate_cublas[], ont_emulate_cudnn[], ont_emulate_cudnn_rnn[],
    ont_emulate_nccl[];

#endif
