/*
 * Finds the data races of an emulated launch, in whatever order its threads ran. `build.py --races` compiles kernels
 * with -fsanitize=thread, which makes them call a function of ThreadSanitizer's interface at each access to memory. Its
 * functions are here, instead of in its library, because CUDA's rules are simpler than those of locks:
 *
 *   __syncthreads orders all threads of a block, __syncwarp the lanes of its mask, the end of a launch everything;
 *   a copy that cp.async has begun is ordered before nothing until its thread has waited for it;
 *   shuffles, votes, matrix instructions, fences and atomics order nothing; blocks of one launch are never ordered.
 *
 * Two accesses to one byte are a race if one of them writes, they are not both atomic, and nothing orders them. Each
 * byte that a launch touches has a record of the accesses that a later one may conflict with. A read of shared memory
 * that the block has not written is reported too: on hardware its contents are undefined.
 */
#ifdef ONT_RACES
#include "emulate/emulate.h"
#include "emulate/races.h"

#include <stdio.h>

#include <unordered_map>
#include <vector>

#undef memcpy

/* Of the linker, about this library: its start, and the zeroed part, which holds what kernels declare as __shared__. */
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));
extern "C" const char __bss_start __attribute__((visibility("hidden")));
extern "C" const char _end __attribute__((visibility("hidden")));

namespace {

enum { PAGE = 256, WARP = 32, MAX_THREADS = 1024 };
enum kind { READ, WRITE, ATOMIC };

struct segment { /* what a thread does between two barriers */
    unsigned long block;
    unsigned barriers, thread;
    unsigned syncs; /* that the thread has taken part in, of its warp */
    bool copies; /* what the thread has begun to copy, and not waited for: nothing is ordered behind it */
};

struct access {
    uint32_t segment : 31, atomic : 1; /* segment 0: no access */
    uint32_t code; /* offset in the library */
};

/* An access that is ordered before a later one of its kind is dropped for it. Others of this block are concurrent: of
 * two, any later write without a barrier between conflicts with at least one. */
struct cell {
    access write, others[2]; /* others: reads and atomics of this block */
    access earlier;          /* a read or atomic of a block before, in global memory */
};

struct page {
    cell cells[PAGE];
};

std::vector<segment> segments;
std::vector<page *> pages; /* all that were ever needed; the first n_used are this launch's */
size_t n_used;
std::unordered_map<uintptr_t, page *> page_of;
uintptr_t last_number;
page *last_page;

unsigned long block;
unsigned barriers, self;
uint32_t own[MAX_THREADS]; /* segments; 0: made at the next access */
/* known[t][l]: how many of lane l's warp barriers are ordered before what thread t does now. */
uint32_t known[MAX_THREADS][WARP];
uintptr_t stack_start, stack_bytes, shared_start, shared_bytes, emulator_start, emulator_bytes;
char message[240], unwritten[240]; /* the latter is said where there is no race: of a race, either may come first */

bool is_shared(uintptr_t at)
{
    return at - shared_start < shared_bytes || (at >= (uintptr_t)&__bss_start && at < (uintptr_t)&_end);
}

bool is_ordered(const access &a, bool shared)
{
    const segment &s = segments[a.segment];
    if (s.block != block) return shared; /* a block's shared memory is not the block's before */
    if (s.copies) return false;
    if (s.barriers != barriers || s.thread == self) return true;
    return s.thread / WARP == self / WARP && known[self][s.thread % WARP] > s.syncs;
}

cell *cell_of(uintptr_t at)
{
    uintptr_t number = at / PAGE;
    if (!last_page || number != last_number) {
        page *&found = page_of[number];
        if (!found) {
            if (n_used == pages.size()) pages.push_back(new page);
            found = pages[n_used++];
            memset(found, 0, sizeof *found);
        }
        last_page = found;
        last_number = number;
    }
    return &last_page->cells[at % PAGE];
}

uint32_t segment_now()
{
    if (!own[self]) {
        own[self] = (uint32_t)segments.size();
        segments.push_back({block, barriers, self, known[self][self % WARP], false});
    }
    return own[self];
}

const char *verb(kind k, const access &a)
{
    return k == WRITE ? "writes" : a.atomic ? "changes atomically" : "reads";
}

void report(kind k, const access &now, kind before, const access &a, bool shared)
{
    const segment &s = segments[a.segment];
    snprintf(message, sizeof message,
             "a race in %s memory: thread %u of block %lu %s (code %#x), and thread %u of block %lu %s (code %#x)",
             shared ? "shared" : "global", s.thread, s.block, verb(before, a), a.code, self, block, verb(k, now),
             now.code);
}

void check(const cell &c, kind k, const access &now, bool shared)
{
    if (c.write.segment && !is_ordered(c.write, shared)) return report(k, now, WRITE, c.write, shared);
    for (const access *a : {&c.others[0], &c.others[1], &c.earlier})
        if (a->segment && (k == WRITE || a->atomic != now.atomic) && !is_ordered(*a, shared))
            return report(k, now, READ, *a, shared);
}

void check_written(const cell &c, const access &now)
{
    if (*unwritten || (c.write.segment && segments[c.write.segment].block == block)) return;
    snprintf(unwritten, sizeof unwritten,
             "thread %u of block %lu reads shared memory that the block has not written (code %#x)", self, block,
             now.code);
}

void remember(cell &c, kind k, const access &now, bool shared)
{
    if (k == WRITE) {
        c = {now, {}, {}};
        return;
    }
    access *empty = nullptr;
    for (access &a : c.others) {
        if (a.segment && segments[a.segment].block != block) {
            if (!shared) c.earlier = a;
            a = {};
        }
        if (a.segment && a.atomic == now.atomic && is_ordered(a, shared)) a = {};
        if (!a.segment) empty = &a;
    }
    unsigned warp = self / WARP;
    if (empty)
        *empty = now;
    else if (segments[c.others[0].segment].thread / WARP != warp || segments[c.others[1].segment].thread / WARP != warp)
        c.others[1] = now;
}

/* Kernels run on the stacks of their threads; what else runs this code, a launcher, does not. */
void watch(const void *p, size_t bytes, kind k, const void *code)
{
    uintptr_t at = (uintptr_t)p;
    bool in_kernel = (uintptr_t)__builtin_frame_address(0) - stack_start < stack_bytes;
    if (!in_kernel || at - stack_start < stack_bytes || at - emulator_start < emulator_bytes) return;
    if (p == &ont_lane_now || p == &ont_shared_now || *message) return;
    bool shared = is_shared(at);
    access now = {};
    now.segment = segment_now();
    now.atomic = k == ATOMIC;
    now.code = (uint32_t)((uintptr_t)code - 1 - (uintptr_t)&__ehdr_start);
    for (size_t i = 0; i < bytes && !*message; i++) {
        cell *c = cell_of(at + i);
        check(*c, k, now, shared);
        if (shared && k != WRITE) check_written(*c, now);
        remember(*c, k, now, shared);
    }
}

} // namespace

void ont_races_launch(const void *emulator, size_t bytes)
{
    emulator_start = (uintptr_t)emulator;
    emulator_bytes = bytes;
    segments.assign(1, segment());
    page_of.clear();
    n_used = 0;
    last_page = nullptr;
    *message = *unwritten = 0;
}

void ont_races_block(unsigned long index, unsigned threads, const void *shared, size_t bytes)
{
    block = index;
    barriers = 0;
    shared_start = (uintptr_t)shared;
    shared_bytes = bytes;
    memset(own, 0, threads * sizeof *own);
    memset(known, 0, threads * sizeof *known);
}

void ont_races_copy(void *to, size_t bytes, const void *code)
{
    watch(to, bytes, WRITE, code);
    segments.push_back({block, barriers, self, known[self][self % WARP], true});
    for (size_t i = 0; i < bytes && !*message; i++)
        cell_of((uintptr_t)to + i)->write.segment = (uint32_t)segments.size() - 1;
}

void ont_races_copied(void *to, const void *from, size_t bytes, const void *code)
{
    if (*message) return;
    for (size_t i = 0; i < bytes; i++) *cell_of((uintptr_t)to + i) = {};
    watch(to, bytes, WRITE, code);
    if (from) watch(from, bytes, READ, code);
}

void ont_races_switch(unsigned thread, const char *stack, size_t bytes)
{
    self = thread;
    stack_start = (uintptr_t)stack;
    stack_bytes = stack ? bytes : 0;
}

void ont_races_barrier(void)
{
    barriers++;
    memset(own, 0, sizeof own);
}

void ont_races_warp_barrier(unsigned first, unsigned mask)
{
    uint32_t joined[WARP] = {0};
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (!(mask >> lane & 1)) continue;
        known[first + lane][lane]++;
        own[first + lane] = 0;
        for (unsigned l = 0; l < WARP; l++)
            if (known[first + lane][l] > joined[l]) joined[l] = known[first + lane][l];
    }
    for (unsigned lane = 0; lane < WARP; lane++)
        if (mask >> lane & 1) memcpy(known[first + lane], joined, sizeof joined);
}

const char *ont_races_found(void)
{
    return *message ? message : *unwritten ? unwritten : nullptr;
}

/* ---- what compiled kernels call ---- */

void ont_emulate_atomic(const void *at, size_t bytes)
{
    watch(at, bytes, ATOMIC, __builtin_return_address(0));
}

void *ont_emulate_memcpy(void *to, const void *from, size_t bytes)
{
    watch(from, bytes, READ, __builtin_return_address(0));
    watch(to, bytes, WRITE, __builtin_return_address(0));
    return memcpy(to, from, bytes);
}

#define WATCH(bytes) \
    void __tsan_read##bytes(void *at) { watch(at, bytes, READ, __builtin_return_address(0)); } \
    void __tsan_write##bytes(void *at) { watch(at, bytes, WRITE, __builtin_return_address(0)); } \
    void __tsan_unaligned_read##bytes(void *at) { watch(at, bytes, READ, __builtin_return_address(0)); } \
    void __tsan_unaligned_write##bytes(void *at) { watch(at, bytes, WRITE, __builtin_return_address(0)); }

extern "C" {
WATCH(1)
WATCH(2)
WATCH(4)
WATCH(8)
WATCH(16)
void __tsan_read_range(void *at, size_t bytes) { watch(at, bytes, READ, __builtin_return_address(0)); }
void __tsan_write_range(void *at, size_t bytes) { watch(at, bytes, WRITE, __builtin_return_address(0)); }
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
void __tsan_init(void) {}
}
#endif
