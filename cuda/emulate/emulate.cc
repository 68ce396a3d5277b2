/*
 * Fibers and the scheduler behind emulate.h. One launch at a time. A fiber that ends without having met a barrier gives
 * its stack to the next thread, so a kernel without barriers needs one stack.
 */
#include "emulate/emulate.h"
#include "emulate/races.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <numeric>
#include <vector>

#undef memcpy

/* Of devices.c, which the library of a generated kernel has not: it runs within the work of the device. */
extern "C" __attribute__((weak)) void ont_emulate_begin_work(const char *what);
extern "C" __attribute__((weak)) void ont_emulate_end_work(void);
extern "C" __attribute__((weak)) void ont_emulate_check_stream(const char *what, const void *stream);

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
static inline void __sanitizer_start_switch_fiber(void **, const void *, size_t) {}
static inline void __sanitizer_finish_switch_fiber(void *, const void **, size_t *) {}
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

enum {
    STACK = 256 << 10,
    MAX_THREADS = 1024,
    MAX_WARPS = MAX_THREADS / 32,
    DEFAULT_SHARED = 48 << 10,
    LAUNCH_FAILED = 719
};
static size_t shared_limit = 227 << 10; // bytes of a block
enum state { FRESH, READY, AT_BARRIER, AT_WARP, DONE };

struct fiber {
    char *stack;
#if defined(__x86_64__)
    void *sp;
#else
    ucontext_t context;
#endif
    void *fake;
};

struct copy { /* under way */
    void *to;
    const void *from;
    size_t bytes;
};

struct thread {
    ont_lane lane;
    state at;
    int fiber; /* -1: none yet */
    unsigned mask; /* AT_WARP: lanes that it waits for */
    bool orders;   /* memory, as __syncwarp alone does */
    std::vector<copy> copies;
};

static struct launch {
    const char *name;
    void (*body)(void *);
    void *context;
    unsigned n;
    thread threads[MAX_THREADS];
    ont_warp_values values[MAX_WARPS]; /* of the exchange under way */
    fiber fibers[MAX_THREADS];
    int idle[MAX_THREADS], n_idle, n_fibers;
    int current;
    bool failed;
    fiber home;
} now;

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static char message[400];
ont_lane *ont_lane_now;
unsigned char *ont_shared_now;

const char *ont_emulate_error(void)
{
    return message;
}

/* ---- switching ---- */

#if defined(__x86_64__)
extern "C" void ont_fiber_switch(void **save, void *to);
__asm__(".text\n"
        ".globl ont_fiber_switch\n"
        ".hidden ont_fiber_switch\n"
        ".type ont_fiber_switch, @function\n"
        "ont_fiber_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".size ont_fiber_switch, .-ont_fiber_switch\n");
static void jump(fiber *from, fiber *to) { ont_fiber_switch(&from->sp, to->sp); }
#else
static void jump(fiber *from, fiber *to) { swapcontext(&from->context, &to->context); }
#endif

static const void *home_bottom; /* for AddressSanitizer */
static size_t home_size;

static void to_home(bool over)
{
    fiber *self = &now.fibers[now.threads[now.current].fiber];
    (void)over;
    __sanitizer_start_switch_fiber(over ? nullptr : &self->fake, home_bottom, home_size);
    jump(self, &now.home);
    __sanitizer_finish_switch_fiber(self->fake, &home_bottom, &home_size);
}

static void entry()
{
    fiber *self = &now.fibers[now.threads[now.current].fiber];
    __sanitizer_finish_switch_fiber(nullptr, &home_bottom, &home_size);
    for (;;) {
        now.body(now.context);
        now.threads[now.current].at = DONE;
        if (!now.threads[now.current].copies.empty()) {
            now.failed = true;
            snprintf(message, sizeof message, "%s: thread %d ends before a copy that it has not waited for", now.name,
                     now.current);
        }
        (void)self;
        to_home(false); /* returns when the fiber is given to another thread */
    }
}

static bool take_fiber(thread *t)
{
    if (now.n_idle) {
        t->fiber = now.idle[--now.n_idle];
        return true;
    }
    fiber *f = &now.fibers[now.n_fibers];
    if (!f->stack) {
        void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) return false;
        f->stack = (char *)stack;
#if defined(__x86_64__)
        void **top = (void **)(void *)(f->stack + STACK - 64);
        *--top = nullptr; /* aligns the stack as at a call */
        *--top = (void *)entry;
        for (int i = 0; i < 6; i++) *--top = nullptr;
        f->sp = top;
#else
        getcontext(&f->context);
        f->context.uc_stack.ss_sp = f->stack;
        f->context.uc_stack.ss_size = STACK;
        f->context.uc_link = nullptr;
        makecontext(&f->context, (void (*)())entry, 0);
#endif
    }
    t->fiber = now.n_fibers++;
    return true;
}

static bool in_thread;

static bool run_thread(unsigned i)
{
    thread *t = &now.threads[i];
    if (t->at == FRESH && !take_fiber(t)) return false;
    t->at = READY;
    now.current = (int)i;
    ont_lane_now = &t->lane;
    fiber *f = &now.fibers[t->fiber];
    __sanitizer_start_switch_fiber(&now.home.fake, f->stack, STACK);
    ont_races_switch(i, f->stack, STACK);
    in_thread = true;
    jump(&now.home, f);
    in_thread = false;
    ont_races_switch(0, nullptr, 0);
    __sanitizer_finish_switch_fiber(now.home.fake, nullptr, nullptr);
    if (t->at == DONE) {
        now.idle[now.n_idle++] = t->fiber;
        t->fiber = -1;
    }
    return true;
}

/* ---- barriers and exchanges ---- */

void ont_emulate_barrier(void)
{
    now.threads[now.current].at = AT_BARRIER;
    to_home(false);
}

/* Waits until all lanes of the mask have arrived. */
static const ont_warp_values *meet(unsigned mask, bool orders = false)
{
    unsigned index = ont_lane_now->index;
    thread *self = &now.threads[now.current];
    if (!(mask >> index % 32 & 1)) {
        now.failed = true;
        snprintf(message, sizeof message, "%s: lane %u is not in its own mask %08x", now.name, index % 32, mask);
    }
    self->mask = mask;
    self->orders = orders;
    self->at = AT_WARP;
    to_home(false);
    return &now.values[index / 32];
}

unsigned ont_emulate_warp_mask(void)
{
    unsigned base = ont_lane_now->index / 32 * 32, lanes = now.n - base;
    return lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
}

void ont_emulate_warp_barrier(unsigned mask)
{
    meet(mask & ont_emulate_warp_mask(), true);
}

void ont_emulate_shuffle(unsigned mask, int from, const void *give, void *get, size_t bytes)
{
    unsigned index = ont_lane_now->index;
    mask &= ont_emulate_warp_mask();
    memcpy(now.values[index / 32].of[index % 32], give, bytes);
    const ont_warp_values *all = meet(mask);
    unsigned lane = (unsigned)from & 31;
    if (!(mask >> lane & 1)) { /* undefined on hardware */
        memset(get, 0x7f, bytes);
    } else {
        memcpy(get, all->of[lane], bytes);
    }
    meet(mask); /* no lane writes the next value before all have read this one */
}

const ont_warp_values *ont_emulate_exchange(const void *give, size_t bytes)
{
    unsigned index = ont_lane_now->index;
    memcpy(now.values[index / 32].of[index % 32], give, bytes);
    return meet(0xffffffffu);
}

void ont_emulate_exchanged(void)
{
    meet(0xffffffffu);
}

void ont_emulate_need_aligned(const void *p, size_t bytes)
{
    if ((uintptr_t)p % bytes == 0) return;
    now.failed = true;
    snprintf(message, sizeof message, "%s: an address is no multiple of %zu", now.name, bytes);
}

/* What kernels that are compiled with -fsanitize=alignment call before such an access; the layout is GCC's. */
extern "C" void __ubsan_handle_type_mismatch_v1(const void *about, const void *p)
{
    struct {
        const char *file;
        uint32_t line, column;
        const void *type;
        unsigned char log_alignment, kind;
    } access;
    memcpy(&access, about, sizeof access);
    now.failed = true;
    snprintf(message, sizeof message, "%s: %s:%u: address %p is no multiple of %u", now.name, access.file, access.line,
             p, 1u << access.log_alignment);
    if (in_thread) ont_emulate_barrier(); /* and no further: the instruction may be one that such an address stops */
}

unsigned ont_emulate_ballot(unsigned mask, int predicate)
{
    unsigned index = ont_lane_now->index;
    mask &= ont_emulate_warp_mask();
    int given = predicate != 0;
    memcpy(now.values[index / 32].of[index % 32], &given, sizeof given);
    const ont_warp_values *all = meet(mask);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        int value;
        memcpy(&value, all->of[lane], sizeof value);
        if (mask >> lane & 1 && value) bits |= 1u << lane;
    }
    meet(mask);
    return bits;
}

/* ---- copies that run while their thread goes on ---- */

void ont_emulate_copy(void *to, const void *from, size_t bytes)
{
    thread *self = &now.threads[now.current];
    ont_races_copy(to, bytes, __builtin_return_address(0));
    memset(to, 0xff, bytes);
    self->copies.push_back({to, from, bytes});
}

void ont_emulate_copy_wait(void)
{
    thread *self = &now.threads[now.current];
    for (const copy &c : self->copies) {
        if (c.from)
            memcpy(c.to, c.from, c.bytes);
        else
            memset(c.to, 0, c.bytes);
        ont_races_copied(c.to, c.from, c.bytes, __builtin_return_address(0));
    }
    self->copies.clear();
}

/* ---- the scheduler ---- */

/* The lanes that thread `i` waits for, if they all wait for the same; else 0. */
static unsigned complete(unsigned i)
{
    const unsigned mask = now.threads[i].mask, first = i / 32 * 32;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        if (first + lane >= now.n || now.threads[first + lane].at != AT_WARP || now.threads[first + lane].mask != mask)
            return 0;
    }
    return mask;
}

/* Releases threads whose barrier or exchange is complete; false where there are none. */
static bool release()
{
    bool any = false;
    unsigned waiting = 0, done = 0;
    for (unsigned i = 0; i < now.n; i++) {
        waiting += now.threads[i].at == AT_BARRIER;
        done += now.threads[i].at == DONE;
    }
    for (unsigned i = 0; i < now.n; i++) {
        const unsigned mask = now.threads[i].at == AT_WARP ? complete(i) : 0, first = i / 32 * 32;
        if (!mask) continue;
        for (unsigned lane = 0; lane < 32; lane++)
            if (mask >> lane & 1) now.threads[first + lane].at = READY;
        if (now.threads[i].orders) ont_races_warp_barrier(first, mask);
        any = true;
    }
    if (!any && waiting == now.n) {
        for (unsigned i = 0; i < now.n; i++) now.threads[i].at = READY;
        ont_races_barrier();
        any = true;
    }
    if (!any && !now.failed)
        snprintf(message, sizeof message,
                 "%s: of %u threads %u wait at a barrier, %u have returned, %u wait for lanes of their warp", now.name,
                 now.n, waiting, done, now.n - waiting - done);
    return any;
}

/* A permutation of [0, n): i goes to (factor * i + first) % n. */
struct order {
    unsigned long n, factor, first;
    unsigned long operator[](unsigned long i) const
    {
        return (unsigned long)(((unsigned __int128)factor * i + first) % n);
    }
};

static uint64_t random_state;
static unsigned long draw(unsigned long n) /* splitmix64 */
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (unsigned long)((z ^ z >> 31) % n);
}

/* The seed is set anew at each launch, so that a launch has the same order whatever ran before it. */
static order order_of(unsigned long n, const char *kind)
{
    if (!strcmp(kind, "reverse")) return {n, n - 1, n - 1};
    if (strncmp(kind, "random", 6) != 0 || n == 1) return {n, 1, 0};
    unsigned long factor = 1 + draw(n - 1);
    while (std::gcd(factor, n) != 1) factor++;
    return {n, factor, draw(n)};
}

static bool run_block(const char *kind)
{
    order threads = order_of(now.n, kind);
    for (unsigned i = 0; i < now.n; i++) {
        now.threads[i].at = FRESH;
        now.threads[i].fiber = -1;
        now.threads[i].copies.clear();
    }
    for (;;) {
        bool over = true;
        for (unsigned k = 0; k < now.n; k++) {
            unsigned i = (unsigned)threads[k];
            if (now.threads[i].at == FRESH || now.threads[i].at == READY)
                if (!run_thread(i))
                    return snprintf(message, sizeof message, "%s: no memory for stacks", now.name), false;
            over = over && now.threads[i].at == DONE;
        }
        if (const char *race = ont_races_found()) {
            now.failed = true;
            snprintf(message, sizeof message, "%s: %s", now.name, race);
        }
        if (now.failed) return false;
        if (over) return true;
        bool ready = false;
        for (unsigned i = 0; i < now.n; i++) ready |= now.threads[i].at == READY;
        if (!ready && !release()) return false;
    }
}

/* Resets the stacks of threads that never continue. */
static void abandon()
{
    for (int i = 0; i < now.n_fibers; i++) {
        munmap(now.fibers[i].stack, STACK);
        now.fibers[i] = fiber();
    }
    now.n_fibers = now.n_idle = 0;
}

static struct count {
    const char *name;
    long n;
    size_t shared;
} counts[256];

static void count_launch(const char *name, size_t shared)
{
    count *c = counts;
    while (c < counts + 255 && c->name && c->name != name) c++;
    *c = {name, c->n + 1, shared};
}

extern "C" long ont_emulate_launches(const char *part)
{
    long n = 0;
    for (const count *c = counts; c < counts + 256; c++)
        if (c->name && strstr(c->name, part)) n += c->n;
    return n;
}

extern "C" size_t ont_emulate_shared(const char *part)
{
    for (const count *c = counts; c < counts + 256; c++)
        if (c->name && strstr(c->name, part)) return c->shared;
    return 0;
}

/* Of attention (kernels/flash.cuh): tiles of scores so far. */
static long n_tiles;
extern "C" __attribute__((visibility("default"))) long ont_emulate_tiles(void)
{
    return n_tiles;
}
void ont_emulate_count_tile(void)
{
    n_tiles++;
}

static bool run_one(unsigned long b, dim3 grid, dim3 block, size_t shared, const char *kind)
{
    /* A block of its exact size, so that AddressSanitizer knows its end. */
    unsigned char *shared_memory = shared ? (unsigned char *)malloc(shared) : nullptr;
    if (shared && !shared_memory) return false;
    if (shared) memset(shared_memory, 0x7f, shared); /* NaN: no kernel may rely on zeros */
    ont_shared_now = shared_memory;
    for (unsigned i = 0; i < now.n; i++) {
        ont_lane *lane = &now.threads[i].lane;
        lane->thread = dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y));
        lane->block = dim3((unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y));
        lane->block_size = block;
        lane->grid_size = grid;
        lane->index = i;
    }
    ont_races_block(b, now.n, shared_memory, shared);
    bool fine = run_block(kind);
    free(shared_memory);
    return fine;
}

int ont_emulate_launch(const char *name, dim3 grid, dim3 block, size_t shared, void (*body)(void *), void *context)
{
    unsigned long threads = (unsigned long)block.x * block.y * block.z;
    bool valid = threads && threads <= MAX_THREADS && grid.x && grid.y && grid.z && grid.y < 65536 && grid.z < 65536 &&
                 grid.x <= 0x7fffffffu && shared <= shared_limit;
    pthread_mutex_lock(&one);
    if (!valid) {
        snprintf(message, sizeof message, "%s: grid %u %u %u, block %u %u %u, %zu bytes shared: not a launch", name,
                 grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
        pthread_mutex_unlock(&one);
        return 9; /* cudaErrorInvalidConfiguration */
    }
    const char *given = getenv("ONT_EMULATE_ORDER"), *kind = given ? given : "";
    bool fine = true;
    count_launch(name, shared);
    now.name = name;
    now.body = body;
    now.context = context;
    now.n = (unsigned)threads;
    now.failed = false;
    random_state = strncmp(kind, "random", 6) ? 0 : strtoul(kind + 6, nullptr, 10);
    ont_races_launch(&now, sizeof now);
    unsigned long n_blocks = (unsigned long)grid.x * grid.y * grid.z;
    order blocks = order_of(n_blocks, kind);
    if (ont_emulate_begin_work) ont_emulate_begin_work(name);
    for (unsigned long b = 0; b < n_blocks && fine; b++) fine = run_one(blocks[b], grid, block, shared, kind);
    if (ont_emulate_end_work) ont_emulate_end_work();
    if (!fine) abandon();
    pthread_mutex_unlock(&one);
    return fine ? 0 : LAUNCH_FAILED;
}

const char *ont_emulate_on_stream(const char *name, const void *stream)
{
    if (ont_emulate_check_stream) ont_emulate_check_stream(name, stream);
    return name;
}

/* ---- kernels with much shared memory ---- */

extern "C" __attribute__((visibility("default"))) void ont_emulate_set_shared_limit(size_t bytes)
{
    shared_limit = bytes;
}

size_t ont_shared_limit(void)
{
    return shared_limit;
}

static struct allowed {
    const void *kernel;
    size_t bytes;
} allowances[256];

static allowed *allowance(const void *kernel)
{
    allowed *a = allowances;
    while (a->kernel && a->kernel != kernel) a++;
    return a;
}

int ont_emulate_allow(const void *kernel, size_t bytes)
{
    pthread_mutex_lock(&one);
    allowed *a = allowance(kernel);
    *a = {kernel, bytes};
    pthread_mutex_unlock(&one);
    return bytes <= shared_limit ? 0 : 1;
}

int ont_emulate_check_shared(const char *name, const void *kernel, size_t bytes)
{
    if (bytes <= DEFAULT_SHARED) return 0;
    pthread_mutex_lock(&one);
    bool fine = allowance(kernel)->bytes >= bytes;
    if (!fine) snprintf(message, sizeof message, "%s: %zu bytes shared, which it was not allowed", name, bytes);
    pthread_mutex_unlock(&one);
    return fine ? 0 : 1;
}

/* ---- graphs: lists of work, in order ---- */

namespace {
struct work {
    int (*run)(void *);
    void *context;
    void (*forget)(void *);
    work *next;
};
struct list {
    work *first, **end;
};
list *recorded;
}

bool ont_emulate_recording(void)
{
    return recorded != nullptr;
}

int ont_emulate_record(int (*run)(void *), void *context, void (*forget)(void *))
{
    work *w = new work{run, context, forget, nullptr};
    *recorded->end = w;
    recorded->end = &w->next;
    return 0;
}

extern "C" __attribute__((visibility("default"))) void ont_emulate_capture_begin(void)
{
    recorded = new list{nullptr, nullptr};
    recorded->end = &recorded->first;
}

extern "C" __attribute__((visibility("default"))) void *ont_emulate_capture_end(void)
{
    list *done = recorded;
    recorded = nullptr;
    return done;
}

extern "C" __attribute__((visibility("default"))) int ont_emulate_graph_launch(void *graph)
{
    for (work *w = ((list *)graph)->first; w; w = w->next)
        if (int error = w->run(w->context)) return error;
    return 0;
}

extern "C" void ont_emulate_graph_destroy(void *graph)
{
    list *l = (list *)graph;
    for (work *w = l->first, *next; w; w = next) {
        next = w->next;
        w->forget(w->context);
        delete w;
    }
    delete l;
}
