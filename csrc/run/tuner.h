/*
 * Online autotuning of steps: where several kernels that are marked `tuned` accept a node, its first runs try them in
 * turn, and the fastest stays. What is found holds for all steps of one kind: the same operator, dtypes, whole-number
 * attributes, kernels and number of threads, with sizes within a factor of 1.4. It measures nothing on
 * other memory, or while a program is built, as ops/conv/winograd_choice.c does.
 */
#ifndef ONT_RUN_TUNER_H
#define ONT_RUN_TUNER_H

#include "ops/op.h"

enum { ONT_MAX_RIVALS = 3 };

typedef struct ont_tuner ont_tuner;

/*
 * The tuner of nodes of this kind, with 2 to ONT_MAX_RIVALS kernels, the preferred one first. It lives until the
 * process ends. NULL where there is no room for another kind: the first kernel is to be used.
 */
ont_tuner *ont_tuner_find(const ont_node *node, const ont_kernel *const *kernels, uint32_t n);
/* The index of the kernel that stays; -1: not decided yet. */
int ont_tuner_winner(const ont_tuner *tuner);
/* The index of the kernel that the next run is to use. */
int ont_tuner_next(ont_tuner *tuner);
/* A run with this kernel took so many seconds. False if it does not count: it used another number of threads. */
bool ont_tuner_record(ont_tuner *tuner, int kernel, double seconds);

/* All decisions as text, one line each, for another process on the same machine. NULL without memory; ont_free(). */
char *ont_tuner_export(void);
/*
 * Adds decisions of an exported text, also about kinds that are undecided here, and returns how many were new. Lines
 * that do not parse are skipped; a line whose kernels are not those of this process is never looked up. A text fills at
 * most half of the table. No text leads to wrong results.
 */
int ont_tuner_import(const char *text);

#endif
