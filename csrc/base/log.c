/*
 * Logging sink and threshold. Nothing is written until a sink is installed.
 */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static _Atomic(ont_log_sink) installed;
static _Atomic int minimum = ONT_LOG_WARNING;

void ont_log_install(ont_log_sink sink, ont_log_level threshold)
{
    atomic_store(&minimum, (int)threshold);
    atomic_store(&installed, sink);
}

bool ont_log_enabled(ont_log_level level)
{
    return atomic_load(&installed) && (int)level >= atomic_load(&minimum);
}

void ont_log(ont_log_level level, const char *format, ...)
{
    ont_log_sink sink = atomic_load(&installed);
    if (!sink || (int)level < atomic_load(&minimum)) return;
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    sink(level, line);
}
