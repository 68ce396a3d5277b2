/*
 * The list of records, shared by all threads. See timing.h.
 */
#include "run/timing.h"

#include "base/alloc.h"
#include "base/assert.h"
#include "base/clock.h"

enum { MAX_UNITS = 1 << 21, RECORD_UNITS = 8 }; /* kept unread: 32 MiB; a unit is 16 bytes, as the times of a step */

static bool timed, recorded; /* read once per phase */
static const ont_step_hook *hook;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ont_phase_record *oldest, **end = &oldest; /* under the lock, as all below */
static size_t n_units;

void ont_timing_free(ont_phase_record *records)
{
    for (ont_phase_record *record = records, *next; record; record = next) {
        next = record->next;
        ont_program_unref(record->program);
        ont_free(record->times);
        ont_free(record);
    }
}

void ont_timing_set(bool time, bool record)
{
    pthread_mutex_lock(&lock);
    ont_phase_record *dropped = record ? NULL : oldest;
    if (!record) {
        oldest = NULL;
        end = &oldest;
        n_units = 0;
    }
    __atomic_store_n(&timed, time || record, __ATOMIC_RELAXED);
    __atomic_store_n(&recorded, record, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
    ont_timing_free(dropped);
}

bool ont_timing_is_on(void)
{
    return __atomic_load_n(&timed, __ATOMIC_RELAXED);
}

ont_phase_record *ont_timing_begin(ont_program *program, const ont_pool *pool, uint32_t first, uint32_t last)
{
    ONT_ASSERT(first <= last && last <= program->n_steps);
    if (!__atomic_load_n(&recorded, __ATOMIC_RELAXED)) return NULL;
    ont_phase_record *record = ont_calloc(1, sizeof *record);
    double(*times)[2] = record ? ont_calloc((size_t)(last - first) + 1, sizeof *times) : NULL;
    if (!times) {
        ont_free(record);
        return NULL;
    }
    *record = (ont_phase_record){.program = ont_program_ref(program), .pool = pool, .times = times, .first = first,
                                 .last = last, .thread = (uint64_t)(uintptr_t)pthread_self(),
                                 .begin = ont_seconds()};
    return record;
}

static size_t units(const ont_phase_record *record)
{
    return record->lost ? 0 : RECORD_UNITS + record->last - record->first;
}

/* Drops the times of the oldest record that has some. One record a session counts those that it has lost. */
static void lose_oldest(void)
{
    ont_phase_record **at = &oldest, *earlier = NULL;
    while (*at && (*at)->lost) at = &(*at)->next; /* those that count stand in front */
    ont_phase_record *record = *at;
    ONT_ASSERT(record);
    n_units -= units(record);
    for (ont_phase_record *r = oldest; r != record; r = r->next)
        if (r->pool == record->pool) earlier = r;
    ont_free(record->times);
    record->times = NULL;
    record->last = record->first;
    record->lost = 1;
    if (!earlier) return;
    earlier->lost++;
    *at = record->next;
    if (end == &record->next) end = at;
    record->next = NULL;
    ont_timing_free(record);
}

void ont_timing_end(ont_phase_record *record)
{
    if (!record) return;
    ONT_ASSERT(!record->next);
    record->end = ont_seconds();
    pthread_mutex_lock(&lock);
    bool kept = recorded;
    if (kept) {
        *end = record;
        end = &record->next;
        n_units += units(record);
        while (n_units > MAX_UNITS) lose_oldest();
    }
    pthread_mutex_unlock(&lock);
    if (!kept) ont_timing_free(record);
}

ont_phase_record *ont_timing_take(const ont_pool *pool)
{
    ont_phase_record *taken = NULL, **taken_end = &taken;
    pthread_mutex_lock(&lock);
    end = &oldest;
    for (ont_phase_record *record = oldest, *next; record; record = next) {
        next = record->next;
        ont_phase_record ***list = record->pool == pool ? &taken_end : &end;
        if (record->pool == pool) n_units -= units(record);
        **list = record;
        *list = &record->next;
    }
    *end = NULL;
    *taken_end = NULL;
    pthread_mutex_unlock(&lock);
    return taken;
}

void ont_timing_drop(const ont_pool *pool)
{
    ont_timing_free(ont_timing_take(pool));
}

void ont_timing_set_hook(const ont_step_hook *new_hook)
{
    __atomic_store_n(&hook, new_hook, __ATOMIC_RELEASE);
}

const ont_step_hook *ont_timing_hook(void)
{
    return __atomic_load_n(&hook, __ATOMIC_ACQUIRE);
}
