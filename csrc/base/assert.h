/*
 * ONT_ASSERT(condition): an invariant that callers inside the core keep. It is checked in debug and sanitizer builds,
 * where a failure prints the condition and aborts, and costs nothing in a release. What a user can get wrong is not
 * asserted: it is an error with a message (ont_fail).
 */
#ifndef ONT_BASE_ASSERT_H
#define ONT_BASE_ASSERT_H

#ifdef NDEBUG
#define ONT_ASSERT(condition) ((void)sizeof(!(condition)))
#else
#include <stdio.h>
#include <stdlib.h>
#define ONT_ASSERT(condition) \
    ((condition) ? (void)0 \
                 : (fprintf(stderr, "%s:%d: %s: assertion failed: %s\n", __FILE__, __LINE__, __func__, #condition), \
                    abort()))
#endif

#endif
