/*
 * Checks of the C unit tests. A file of tests is a list of TEST(name) { ... }; check.c runs the one that is named on
 * its command line, test_unit.py makes a pytest case of each. A check that fails prints where and ends the process.
 */
#ifndef ONT_TESTS_CHECK_H
#define ONT_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

void check_register(const char *name, void (*test)(void));
_Noreturn void check_failed(const char *file, int line, const char *format, ...) ONT_PRINTF(3, 4);
/* A stream that is the same for the same ONNXTRAIN_TEST_SEED; the seed is printed once. */
uint64_t check_random(void);
/* In [low, high]. */
int64_t check_between(int64_t low, int64_t high);

#define TEST(name) \
    static void name(void); \
    __attribute__((constructor)) static void register_##name(void) \
    { \
        check_register(#name, name); \
    } \
    static void name(void)

#define CHECK(condition) \
    do { \
        if (!(condition)) check_failed(__FILE__, __LINE__, "%s", #condition); \
    } while (0)

#define CHECK_INT(actual, expected) \
    do { \
        long long actual_ = (long long)(actual), expected_ = (long long)(expected); \
        if (actual_ != expected_) \
            check_failed(__FILE__, __LINE__, "%s is %lld, expected %s = %lld", #actual, actual_, #expected, \
                         expected_); \
    } while (0)

#define CHECK_TEXT(actual, expected) \
    do { \
        const char *actual_ = (actual), *expected_ = (expected); \
        if (strcmp(actual_, expected_)) \
            check_failed(__FILE__, __LINE__, "%s is\n%s\nexpected\n%s", #actual, actual_, expected_); \
    } while (0)

#define CHECK_OK(call) \
    do { \
        ont_status status_ = (call); \
        if (status_ != ONT_OK) \
            check_failed(__FILE__, __LINE__, "%s: %s, %s", #call, ont_status_name(status_), ont_error_message()); \
    } while (0)

/* The call fails with this status, and the message has `text` in it. */
#define CHECK_FAILS(call, status, text) \
    do { \
        ont_status status_ = (call); \
        if (status_ != (status)) \
            check_failed(__FILE__, __LINE__, "%s: %s, expected %s", #call, ont_status_name(status_), #status); \
        if (!strstr(ont_error_message(), (text))) \
            check_failed(__FILE__, __LINE__, "%s: message '%s' does not contain '%s'", #call, ont_error_message(), \
                         (text)); \
    } while (0)

#endif
