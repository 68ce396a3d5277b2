/*
 * Messages of errors gain context in front, are cut, and belong to their thread.
 */
#include <pthread.h>

#include "base/status.h"
#include "check.h"

TEST(status_context_goes_in_front)
{
    CHECK_INT(ont_fail(ONT_EINVAL, "K is %d", 64), ONT_EINVAL);
    CHECK_TEXT(ont_error_message(), "K is 64");
    CHECK_INT(ont_context(ONT_EINVAL, "Gemm '%s'", "fc1"), ONT_EINVAL);
    CHECK_INT(ont_context(ONT_EINVAL, "model"), ONT_EINVAL);
    CHECK_TEXT(ont_error_message(), "model: Gemm 'fc1': K is 64");
    CHECK_INT(ont_context(ONT_OK, "nothing"), ONT_OK);
    CHECK_TEXT(ont_error_message(), "model: Gemm 'fc1': K is 64");
    CHECK_TEXT(ont_status_name(ONT_EUNSUPPORTED), "EUNSUPPORTED");
    CHECK_TEXT(ont_status_name((ont_status)99), "?");
}

TEST(status_long_messages_are_cut)
{
    static char lots[10000];
    memset(lots, 'x', sizeof lots - 1);
    (void)ont_fail(ONT_EINVAL, "%s", lots);
    size_t most = strlen(ont_error_message());
    CHECK(most > 1000 && most < sizeof lots - 1);
    for (int i = 0; i < 20; i++) (void)ont_context(ONT_EINVAL, "%s", lots);
    CHECK(strlen(ont_error_message()) <= most);
    for (int i = 0; i < 100; i++) (void)ont_context(ONT_EINVAL, "deep");
    CHECK(!strncmp(ont_error_message(), "deep: deep: ", 12));
}

static void *fail_elsewhere(void *unused)
{
    (void)unused;
    CHECK_TEXT(ont_error_message(), "");
    (void)ont_fail(ONT_EINVAL, "the other thread's");
    return NULL;
}

TEST(status_message_is_the_threads_own)
{
    pthread_t thread;
    (void)ont_fail(ONT_EINVAL, "ours");
    CHECK(!pthread_create(&thread, NULL, fail_elsewhere, NULL));
    CHECK(!pthread_join(thread, NULL));
    CHECK_TEXT(ont_error_message(), "ours");
}
