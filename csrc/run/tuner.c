#include "run/tuner.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/assert.h"
#include "base/autotune.h"
#include "base/log.h"
#include "base/parallel.h"

enum { KEY_BYTES = 256, CAPACITY = 2048, MAX_RUNS = 3 };
static const double
    REPEAT_MARGIN = 1.05, /* times the best: kernels that get a third run */
    LATER_MARGIN = 0.97;  /* a kernel must take less than this part of an earlier one's time */
static const char ARROW[] = " > ";

/* The key is "threads operator inputs... outputs attributes... : kernels...", zero-padded. */
struct ont_tuner {
    char key[KEY_BYTES];
    int threads;
    int n, winner; /* kernels; the index of the one that stays, or -1 */
    int runs[ONT_MAX_RIVALS];
    double seconds[ONT_MAX_RIVALS]; /* of the fastest run */
};

static ont_tuner tuners[CAPACITY];
static ont_tune_cache cache = ONT_TUNE_CACHE(tuners);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows `key` */

/* ---- key ---- */

/* The nearest half power of two, so that another batch size rarely is another kind. */
static long long size_class(int64_t dim)
{
    return dim > 0 ? llround(exp2(round(2 * log2((double)dim)) / 2)) : dim;
}

typedef struct text {
    char *at;
    size_t left;
    bool full;
} text;

#define APPEND(t, ...) append((t), snprintf((t)->at, (t)->left, __VA_ARGS__))
static void append(text *t, int n)
{
    t->full |= n < 0 || (size_t)n >= t->left;
    if (!t->full) t->at += n, t->left -= (size_t)n;
}

static void append_input(text *t, const ont_value *v)
{
    APPEND(t, " %s", v ? ont_dtype_name(v->dtype) : "none");
    for (int d = 0; v && d < v->shape.rank; d++) APPEND(t, "%c%lld", d ? ',' : '[', size_class(v->shape.dims[d]));
    if (v && v->shape.rank) APPEND(t, "]");
}

/* False where the text is too long. */
static bool write_key(const ont_node *node, const ont_kernel *const *kernels, uint32_t n, char *key)
{
    text t = {.at = key, .left = KEY_BYTES};
    memset(key, 0, KEY_BYTES);
    APPEND(&t, "%d %s", ont_parallel_threads(), node->op->name);
    for (uint32_t i = 0; i < node->n_inputs; i++) append_input(&t, ont_node_in(node, i));
    for (uint32_t i = 0; i < node->n_outputs; i++)
        if (node->outputs[i]) APPEND(&t, " %u:%s", i, ont_dtype_name(node->outputs[i]->dtype));
    for (const ont_attr *a = node->attrs; a; a = a->next)
        if (a->kind == ONT_ATTR_INT) APPEND(&t, " %s=%lld", a->name, (long long)a->i);
    APPEND(&t, " :");
    for (uint32_t i = 0; i < n; i++) APPEND(&t, " %s", kernels[i]->name);
    return !t.full;
}

ont_tuner *ont_tuner_find(const ont_node *node, const ont_kernel *const *kernels, uint32_t n)
{
    static bool full;
    ONT_ASSERT(n > 1 && n <= ONT_MAX_RIVALS);
    ont_tuner fresh = {.threads = ont_parallel_threads(), .n = (int)n, .winner = -1};
    if (!write_key(node, kernels, n, fresh.key)) return NULL;
    ont_tuner *tuner = ont_tune_keep(&cache, &fresh);
    if (!tuner && !__atomic_exchange_n(&full, true, __ATOMIC_RELAXED))
        ont_log(ONT_LOG_INFO, "%d kinds of products are tuned; others have the first kernel", CAPACITY);
    return tuner;
}

/* ---- turns ---- */

/* The fastest kernel so far; a later one must be clearly faster than an earlier one. -1: none has run. */
static int fastest(const ont_tuner *tuner)
{
    int best = -1;
    for (int i = 0; i < tuner->n; i++)
        if (tuner->runs[i] && (best < 0 || tuner->seconds[i] < LATER_MARGIN * tuner->seconds[best])) best = i;
    return best;
}

/* Two runs each, of which the first may meet cold memory, and a third for those near the best. */
static bool needs_run(const ont_tuner *tuner, int index)
{
    int best = fastest(tuner);
    return tuner->runs[index] < 2 ||
           (tuner->runs[index] < MAX_RUNS && tuner->seconds[index] <= REPEAT_MARGIN * tuner->seconds[best]);
}

/* The kernel of the next run; -1: all have had their runs. */
static int next_kernel(const ont_tuner *tuner)
{
    int next = -1;
    for (int i = 0; i < tuner->n; i++)
        if (needs_run(tuner, i) && (next < 0 || tuner->runs[i] < tuner->runs[next])) next = i;
    return next;
}

int ont_tuner_winner(const ont_tuner *tuner)
{
    return __atomic_load_n(&tuner->winner, __ATOMIC_ACQUIRE);
}

int ont_tuner_next(ont_tuner *tuner)
{
    int next = ont_tuner_winner(tuner);
    if (next >= 0) return next;
    pthread_mutex_lock(&lock);
    next = tuner->winner >= 0 ? tuner->winner : next_kernel(tuner);
    pthread_mutex_unlock(&lock);
    ONT_ASSERT(next >= 0 && next < tuner->n); /* the last run decides */
    return next;
}

static void log_decision(const ont_tuner *tuner)
{
    char times[KEY_BYTES] = "";
    text t = {.at = times, .left = sizeof times};
    for (int i = 0; i < tuner->n; i++)
        APPEND(&t, "%s%.0f us%s", i ? ", " : "", tuner->seconds[i] * 1e6, i == tuner->winner ? " (stays)" : "");
    ont_log(ONT_LOG_DEBUG, "tuned %s: %s", tuner->key, times);
}

bool ont_tuner_record(ont_tuner *tuner, int kernel, double seconds)
{
    ONT_ASSERT(kernel >= 0 && kernel < tuner->n);
    if (tuner->threads != ont_parallel_threads()) return false;
    pthread_mutex_lock(&lock);
    bool decided = false;
    if (tuner->winner < 0) {
        if (!tuner->runs[kernel]++ || seconds < tuner->seconds[kernel]) tuner->seconds[kernel] = seconds;
        decided = next_kernel(tuner) < 0;
        if (decided) __atomic_store_n(&tuner->winner, fastest(tuner), __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    if (decided) log_decision(tuner); /* outside the lock: the log may wait for the GIL */
    return true;
}

/* ---- export and import ---- */

/* The kernel with this index, of `length` characters, among the names at the end of a key; NULL: there are fewer. */
static const char *kernel_name(const char *key, int index, size_t *length)
{
    const char *colon = strstr(key, " : "), *at = colon ? colon + strlen(" : ") : "";
    for (; *at; at += *length + (at[*length] == ' ')) {
        *length = strcspn(at, " ");
        if (!index--) return at;
    }
    return NULL;
}

char *ont_tuner_export(void)
{
    size_t count = ont_tune_count(&cache), length;
    char *text = ont_calloc(count + 1, 2 * KEY_BYTES), *end = text;
    for (size_t i = 0; text && i < count; i++) {
        int winner = ont_tuner_winner(&tuners[i]);
        const char *name = winner < 0 ? NULL : kernel_name(tuners[i].key, winner, &length);
        if (name) end += sprintf(end, "%s%s%.*s\n", tuners[i].key, ARROW, (int)length, name);
    }
    return text;
}

/* Reads a line of ont_tuner_export(), without its end. */
static bool read_line(const char *line, size_t length, ont_tuner *tuner)
{
    char whole[2 * KEY_BYTES];
    if (length >= sizeof whole) return false;
    memcpy(whole, line, length);
    whole[length] = '\0';
    char *arrow = strstr(whole, ARROW);
    if (!arrow || arrow - whole >= KEY_BYTES) return false;
    const char *winner = arrow + strlen(ARROW), *name;
    *arrow = '\0';
    *tuner = (ont_tuner){.threads = atoi(whole), .winner = -1};
    strcpy(tuner->key, whole);
    for (size_t n; tuner->n < ONT_MAX_RIVALS && (name = kernel_name(whole, tuner->n, &n)); tuner->n++)
        if (n == strlen(winner) && !memcmp(name, winner, n)) tuner->winner = tuner->n;
    return tuner->n > 1 && tuner->winner >= 0 && !kernel_name(whole, ONT_MAX_RIVALS, &length);
}

/* Whether the decision is new. */
static bool take(const ont_tuner *told)
{
    ont_tuner *known = ont_tune_find(&cache, told->key);
    if (!known) return ont_tune_count(&cache) < CAPACITY / 2 && ont_tune_keep(&cache, told);
    pthread_mutex_lock(&lock);
    bool undecided = known->winner < 0;
    if (undecided) __atomic_store_n(&known->winner, told->winner, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return undecided;
}

int ont_tuner_import(const char *text)
{
    int imported = 0;
    for (size_t length; *text; text += length + (text[length] == '\n')) {
        ont_tuner tuner;
        length = strcspn(text, "\n");
        imported += read_line(text, length, &tuner) && take(&tuner);
    }
    return imported;
}
