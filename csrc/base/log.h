/*
 * Logging: the core formats a line; a sink installed by py/module.c passes it to Python's `logging`.
 */
#ifndef ONT_BASE_LOG_H
#define ONT_BASE_LOG_H

#include "base/status.h"

typedef enum ont_log_level { ONT_LOG_DEBUG = 10, ONT_LOG_INFO = 20, ONT_LOG_WARNING = 30,
                            ONT_LOG_ERROR = 40 } ont_log_level;

typedef void (*ont_log_sink)(ont_log_level level, const char *line);

void ont_log_install(ont_log_sink sink, ont_log_level threshold);
bool ont_log_enabled(ont_log_level level);
void ont_log(ont_log_level level, const char *format, ...) ONT_PRINTF(2, 3);

#endif
