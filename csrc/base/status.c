/*
 * The thread-local error message. A fixed buffer: reporting "out of memory" must not allocate.
 */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MESSAGE_BYTES = 2048 };

static _Thread_local char message[MESSAGE_BYTES];

void ont_set_error(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
}

ont_status ont_context(ont_status status, const char *format, ...)
{
    if (status == ONT_OK) return status;
    char context[MESSAGE_BYTES / 4], reason[MESSAGE_BYTES - sizeof context - sizeof ": "];
    va_list args;
    va_start(args, format);
    vsnprintf(context, sizeof context, format, args);
    va_end(args);
    memcpy(reason, message, sizeof reason);
    reason[sizeof reason - 1] = '\0';
    snprintf(message, sizeof message, "%s: %s", context, reason);
    return status;
}

const char *ont_error_message(void)
{
    return message;
}

const char *ont_status_name(ont_status status)
{
    switch (status) {
#define X(name, exception, text) \
    case ONT_##name: return #name;
        ONT_STATUS_LIST(X)
#undef X
    }
    return "?";
}
