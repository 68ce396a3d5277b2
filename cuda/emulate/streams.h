/*
 * Which work of streams is known to be over, by events and by waits of the host; and which streams have used a block of
 * memory. Work that is enqueued on one stream is in order; work of two streams is not, unless one has waited for the
 * other. For one thread of the host.
 */
#ifndef ONT_EMULATE_STREAMS_H
#define ONT_EMULATE_STREAMS_H

#include <stdbool.h>
#include <stdint.h>

enum { ONT_EMULATE_STREAMS = 8 };

typedef struct ont_emulate_uses { /* of a block of memory; by the number of the stream */
    struct {
        uint64_t read, written; /* the last work of the stream that did; 0: none */
        const char *what;
    } of[ONT_EMULATE_STREAMS];
} ont_emulate_uses;

int ont_emulate_stream_number(int device, const void *stream);
/* Work begins on the stream; until the next call, uses are its uses. */
void ont_emulate_stream_begin(int number);
void ont_emulate_stream_wait(int number, int other);
void ont_emulate_host_wait(int number);
/* Ends the process where another stream's work, which may not be over, reads what is written or writes what is used. */
void ont_emulate_use(const char *what, ont_emulate_uses *uses, bool writes);
/* Ends the process where another stream has used the block and `number`, which gets it again, has not waited for it. */
void ont_emulate_free_uses(const ont_emulate_uses *uses, int number);

#endif
