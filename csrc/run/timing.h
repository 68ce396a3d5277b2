/*
 * Records when the steps of runs begin and end, for profiles; and a hook that sees each step while it runs, for
 * torch.profiler. While kernels of a step compete (tuner.h), the time of a short step is that of all their turns, and a
 * step goes by the name of the kernel that runs next. Off unless asked for: a run then looks at two flags per phase.
 * run.c writes the records, py/timing.c hands them to Python.
 */
#ifndef ONT_RUN_TIMING_H
#define ONT_RUN_TIMING_H

#include "run/program.h"

/* One forward or backward of a program, or several without their times. Times are seconds of base/clock.h. */
typedef struct ont_phase_record {
    struct ont_phase_record *next;
    ont_program *program; /* a reference */
    const ont_pool *pool; /* identifies the session */
    uint64_t thread;
    uint32_t first, last;     /* the steps [first, last) of the program */
    uint64_t lost;            /* phases of the session that it stands for, whose times were dropped unread; or 0 */
    double begin, end;
    double deliver_seconds;   /* of the callback that receives gradients */
    double (*times)[2];       /* per step: begin and end; zero if the phase failed before it; NULL if lost */
} ont_phase_record;

/* time: runs write the times of their latest phases to their program. record: every phase is kept as well. */
void ont_timing_set(bool time, bool record);
bool ont_timing_is_on(void);

/* A record to fill, or NULL where none is kept: recording is off, or memory is short. */
ont_phase_record *ont_timing_begin(ont_program *program, const ont_pool *pool, uint32_t first, uint32_t last);
/* Keeps the record; beyond MAX_UNITS of unread ones the oldest lose their times. */
void ont_timing_end(ont_phase_record *record);

/* The records of a session, oldest first; the caller owns them. */
ont_phase_record *ont_timing_take(const ont_pool *pool);
void ont_timing_free(ont_phase_record *records);
/* Before a session is destroyed, whose graph the programs of its records refer to. */
void ont_timing_drop(const ont_pool *pool);

/* Called around each phase (step NULL) and each step, on the thread that runs them, without the GIL. */
typedef struct ont_step_hook {
    void *(*begin)(const ont_step *step, bool backward);
    void (*end)(void *begun);
} ont_step_hook;

void ont_timing_set_hook(const ont_step_hook *hook); /* NULL: none */
const ont_step_hook *ont_timing_hook(void);

#endif
