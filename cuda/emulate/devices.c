/*
 * See devices.h. The memory of a device is one range of addresses. While another device works, that range cannot be
 * accessed: the fault names what worked and whose memory it touched. Where streams are watched, the range of the device
 * that works cannot be accessed either at first: each block that the work touches has two faults at most, at its first
 * read and at its first write, which note its use.
 */
#include "emulate/devices.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "emulate/contract.h"
#include "emulate/streams.h"

#define EXPORTED __attribute__((visibility("default")))

/* LEAST: of the logarithm of a block's bytes, which are whole pages. */
enum { HEADER = 256, LEAST = 12, CLASSES = 31, PAGE = 1 << LEAST, ROOM = 1 << 30 };

typedef struct block { /* followed by the memory, HEADER bytes behind it */
    struct block *next;
    int device, size_class, stream; /* the number of the stream that was current, which alone gets the block again */
    bool is_free;
    uint64_t work;                  /* the last that touched it */
    ont_emulate_uses uses;
} block;
_Static_assert(sizeof(block) <= HEADER, "a block's memory begins behind it");

static struct {
    char *begin;
    size_t used;
    block *given[CLASSES]; /* blocks of 2^class bytes that were given back */
    block *of_page[ROOM / PAGE];
    char stream;           /* its address is a stream of this device */
    void *current_stream;
} devices[ONT_EMULATE_DEVICES] = {[1] = {.current_stream = &devices[1].stream}};

static pthread_mutex_t of_memory = PTHREAD_MUTEX_INITIALIZER, of_work = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;
static _Thread_local int current, depth;
static const char *working; /* what the holder of of_work does */
static uint64_t works;       /* how many there have been */
static bool is_watched;
static _Thread_local const void *latest_stream; /* that something was enqueued on */

/* From now on work that does not wait for other streams' work on the same memory ends the process. */
EXPORTED void ont_emulate_watch_streams(void)
{
    is_watched = true;
}

int ont_emulate_device(void)
{
    return current;
}

EXPORTED int ont_emulate_set_device(int id)
{
    int previous = current;
    ONT_REQUIRE(id >= 0 && id < ONT_EMULATE_DEVICES, "cudaSetDevice: there is no device %d", id);
    current = id;
    return previous;
}

/* ---- streams ---- */

/* Of the first device. NULL is the default stream of whatever device is current. */
EXPORTED void ont_emulate_set_stream(void *stream)
{
    devices[0].current_stream = stream;
}

void *ont_emulate_stream(int device)
{
    return devices[device].current_stream;
}

void ont_emulate_check_stream(const char *what, const void *stream)
{
    for (int i = 0; i < ONT_EMULATE_DEVICES; i++)
        ONT_REQUIRE(stream != &devices[i].stream || i == current,
                    "%s: the stream is device %d's, but device %d is current", what, i, current);
    latest_stream = stream;
}

EXPORTED void ont_emulate_join_streams(const void *stream, const void *other)
{
    ont_emulate_stream_wait(ont_emulate_stream_number(current, stream), ont_emulate_stream_number(current, other));
}

void ont_emulate_wait_for_stream(const void *stream)
{
    ont_emulate_host_wait(ont_emulate_stream_number(current, stream));
}

/* ---- memory ---- */

EXPORTED int ont_emulate_owner(const void *address)
{
    for (int i = 0; i < ONT_EMULATE_DEVICES; i++)
        if (devices[i].begin && (uintptr_t)address - (uintptr_t)devices[i].begin < ROOM) return i;
    return -1;
}

/* The first access of a work to a block, which is taken for a read, or the second, which is a write. */
static void on_access(const void *address)
{
    block *b = devices[current].of_page[((uintptr_t)address - (uintptr_t)devices[current].begin) / PAGE];
    mprotect(b, PAGE, PROT_READ | PROT_WRITE); /* which has the fields */
    ONT_REQUIRE(!b->is_free, "%s uses memory that was freed", working);
    bool writes = b->work == works;
    ont_emulate_use(working, &b->uses, writes);
    b->work = works;
    mprotect(b, (size_t)1 << b->size_class, writes ? PROT_READ | PROT_WRITE : PROT_READ);
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    int owner = ont_emulate_owner(info->si_addr);
    (void)context;
    if (owner >= 0 && !depth) { /* the host reads this device's memory, while another thread has the other one work */
        sched_yield();
        return;
    }
    if (owner >= 0 && owner == current && is_watched) {
        on_access(info->si_addr);
        return;
    }
    ONT_REQUIRE(owner < 0, "%s on device %d touches memory of device %d", working, current, owner);
    sigaction(number, &before, NULL); /* the instruction is repeated */
}

static void reserve(int device)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    void *range = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ONT_REQUIRE(range != MAP_FAILED, "no room for the memory of device %d", device);
    if (!devices[0].begin && !devices[1].begin) sigaction(SIGSEGV, &action, &before);
    devices[device].begin = range;
}

EXPORTED void *ont_emulate_take(int device, size_t bytes)
{
    int size_class = LEAST;
    while (size_class < CLASSES && (size_t)1 << size_class < bytes + HEADER) size_class++;
    if (size_class == CLASSES) return NULL;
    pthread_mutex_lock(&of_work); /* else a range that grows could not be accessed */
    pthread_mutex_lock(&of_memory);
    if (!devices[device].begin) reserve(device);
    int stream = is_watched ? ont_emulate_stream_number(device, devices[device].current_stream) : 0;
    block **at = &devices[device].given[size_class], *found;
    while (*at && (*at)->stream != stream) at = &(*at)->next;
    found = *at;
    if (found) {
        *at = found->next;
    } else if (devices[device].used + ((size_t)1 << size_class) <= ROOM) {
        found = (block *)(void *)(devices[device].begin + devices[device].used);
        for (size_t i = 0; i < (size_t)1 << size_class; i += PAGE)
            devices[device].of_page[(devices[device].used + i) / PAGE] = found;
        devices[device].used += (size_t)1 << size_class;
    }
    if (found) *found = (block){.device = device, .size_class = size_class, .stream = stream};
    if (found) memset((char *)found + HEADER, 0x7f, bytes);
    pthread_mutex_unlock(&of_memory);
    pthread_mutex_unlock(&of_work);
    return found ? (char *)found + HEADER : NULL;
}

EXPORTED void ont_emulate_give(void *data)
{
    block *given = (block *)(void *)((char *)data - HEADER);
    if (is_watched) ont_emulate_free_uses(&given->uses, given->stream);
    pthread_mutex_lock(&of_memory);
    given->is_free = true;
    memset(data, 0x7f, ((size_t)1 << given->size_class) - HEADER);
    given->next = devices[given->device].given[given->size_class];
    devices[given->device].given[given->size_class] = given;
    pthread_mutex_unlock(&of_memory);
}

static void protect(int access)
{
    for (int i = 0; i < ONT_EMULATE_DEVICES; i++) {
        size_t bytes = (devices[i].used + PAGE - 1) / PAGE * PAGE;
        if ((i != current || is_watched) && bytes)
            ONT_REQUIRE(!mprotect(devices[i].begin, bytes, access), "the memory of device %d is not protected", i);
    }
}

void ont_emulate_begin_work(const char *what)
{
    if (depth++) return;
    pthread_mutex_lock(&of_work);
    working = what;
    works++;
    if (is_watched) ont_emulate_stream_begin(ont_emulate_stream_number(current, latest_stream));
    protect(PROT_NONE);
}

void ont_emulate_end_work(void)
{
    if (--depth) return;
    protect(PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&of_work);
}
