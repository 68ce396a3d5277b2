/*
 * Status codes and the thread-local error message.
 *
 * Every function that can fail returns ont_status and leaves its out-parameters unchanged on failure. The first failure
 * formats the message with ont_fail(); callers may prepend context with ont_context(). Only py/errors.c maps a status
 * to a Python exception.
 */
#ifndef ONT_BASE_STATUS_H
#define ONT_BASE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* name, Python exception, meaning */
#define ONT_STATUS_LIST(X) \
    X(OK, "None", "success") \
    X(EINVAL, "ValueError", "invalid model or argument") \
    X(ETYPE, "TypeError", "wrong dtype or kind of argument") \
    X(EINDEX, "IndexError", "index out of range") \
    X(ENOMEM, "MemoryError", "out of memory") \
    X(EUNSUPPORTED, "UnsupportedError", "operator or case that onnxtrain does not have") \
    X(ENEEDVALUE, "UnsupportedError", "value that is unknown when a program is built") \
    X(ESTATE, "RuntimeError", "call in the wrong state") \
    X(EIO, "OSError", "file or library could not be read") \
    X(EINTERNAL, "RuntimeError", "broken invariant, a defect of onnxtrain")

typedef enum ont_status {
#define X(name, exception, text) ONT_##name,
    ONT_STATUS_LIST(X)
#undef X
} ont_status;

#ifdef __MINGW32__ /* built with __USE_MINGW_ANSI_STDIO, whose functions take C99's formats */
#define ONT_PRINTF(fmt, args) __attribute__((format(gnu_printf, fmt, args)))
#else
#define ONT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#endif
#define ONT_MUST_USE __attribute__((warn_unused_result))

/*
 * Formats the calling thread's message and evaluates to `status`, so that `return ont_fail(...)` is one statement. A
 * macro, so that the compiler can see that a failure is never ONT_OK.
 */
#define ont_fail(status, ...) (ont_set_error(__VA_ARGS__), (status))
void ont_set_error(const char *format, ...) ONT_PRINTF(1, 2);

/* Prepends "<context>: " to the message and returns `status`; no effect if status is ONT_OK. */
ont_status ont_context(ont_status status, const char *format, ...) ONT_PRINTF(2, 3);

const char *ont_error_message(void);           /* of the last failure on this thread, never NULL */
const char *ont_status_name(ont_status status); /* "EINVAL" */

/* Evaluates a call; on failure returns its status, or jumps to a label. */
#define ONT_TRY(call) \
    do { \
        ont_status try_status_ = (call); \
        if (try_status_ != ONT_OK) return try_status_; \
    } while (0)
#define ONT_TRYGOTO(status, label, call) \
    do { \
        (status) = (call); \
        if ((status) != ONT_OK) goto label; \
    } while (0)

#endif
