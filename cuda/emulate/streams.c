/*
 * See streams.h. Work of a stream is numbered from 1 on; each stream knows up to which work of every other one it has
 * waited (a vector clock).
 */
#include "emulate/streams.h"

#include <stddef.h>

#include "emulate/contract.h"

static struct {
    int device;
    const void *stream;
    uint64_t known[ONT_EMULATE_STREAMS]; /* of itself: the work that was enqueued last */
} streams[ONT_EMULATE_STREAMS];
static uint64_t known_to_host[ONT_EMULATE_STREAMS];
static int n_streams, working;

static void merge(uint64_t *known, const uint64_t *others)
{
    for (int i = 0; i < ONT_EMULATE_STREAMS; i++)
        if (others[i] > known[i]) known[i] = others[i];
}

int ont_emulate_stream_number(int device, const void *stream)
{
    for (int i = 0; i < n_streams; i++)
        if (streams[i].device == device && streams[i].stream == stream) return i;
    ONT_REQUIRE(n_streams < ONT_EMULATE_STREAMS, "more than %d streams", ONT_EMULATE_STREAMS);
    streams[n_streams].device = device;
    streams[n_streams].stream = stream;
    return n_streams++;
}

void ont_emulate_stream_begin(int number)
{
    working = number;
    merge(streams[number].known, known_to_host);
    streams[number].known[number]++;
}

void ont_emulate_stream_wait(int number, int other)
{
    merge(streams[number].known, known_to_host);
    merge(streams[number].known, streams[other].known);
}

void ont_emulate_host_wait(int number)
{
    merge(known_to_host, streams[number].known);
}

void ont_emulate_use(const char *what, ont_emulate_uses *uses, bool writes)
{
    const uint64_t *known = streams[working].known;
    for (int i = 0; i < n_streams; i++) {
        ONT_REQUIRE(uses->of[i].written <= known[i],
                    "%s on stream %p %s what %s on stream %p writes, and has not waited", what,
                    streams[working].stream, writes ? "writes" : "reads", uses->of[i].what, streams[i].stream);
        ONT_REQUIRE(!writes || uses->of[i].read <= known[i],
                    "%s on stream %p writes what %s on stream %p reads, and has not waited", what,
                    streams[working].stream, uses->of[i].what, streams[i].stream);
    }
    uses->of[working].what = what;
    if (writes)
        uses->of[working].written = known[working];
    else
        uses->of[working].read = known[working];
}

void ont_emulate_free_uses(const ont_emulate_uses *uses, int number)
{
    for (int i = 0; i < n_streams; i++)
        ONT_REQUIRE(i == number || (uses->of[i].read <= streams[number].known[i] &&
                                    uses->of[i].written <= streams[number].known[i]) ||
                        (uses->of[i].read <= known_to_host[i] && uses->of[i].written <= known_to_host[i]),
                    "memory of stream %p is freed, which has not waited for %s on stream %p", streams[number].stream,
                    uses->of[i].what, streams[i].stream);
}
