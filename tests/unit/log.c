/*
 * The log hands a line to the sink that is installed, from its threshold on, and cuts long ones.
 */
#include "base/log.h"
#include "check.h"

static char seen[2000];
static int n_seen;

static void sink(ont_log_level level, const char *line)
{
    CHECK(level >= ONT_LOG_INFO);
    strcpy(seen, line);
    n_seen++;
}

TEST(log_lines_reach_the_sink_from_the_threshold_on)
{
    ont_log(ONT_LOG_ERROR, "nobody listens");
    CHECK(!ont_log_enabled(ONT_LOG_ERROR));
    ont_log_install(sink, ONT_LOG_INFO);
    ont_log(ONT_LOG_DEBUG, "too low");
    CHECK(n_seen == 0 && !ont_log_enabled(ONT_LOG_DEBUG) && ont_log_enabled(ONT_LOG_INFO));
    ont_log(ONT_LOG_INFO, "%d nodes", 3);
    CHECK_TEXT(seen, "3 nodes");
    ont_log(ONT_LOG_WARNING, "%1500d", 1);
    CHECK_INT(strlen(seen), 1023);
}
