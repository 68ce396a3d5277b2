/*
 * Shape inference with sample sizes, and the expressions fitted to the results. See symbolic.h.
 */
#include "run/symbolic.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "passes/pass.h"

enum { SAMPLES = 4, MAX_SYMBOLS = 256 };

/* The type of a value in each sample. */
typedef struct observed {
    uint32_t n; /* samples in which it had a shape */
    ont_dtype dtype;
    bool differs; /* dtype or rank differ between samples */
    int rank;
    int64_t dims[SAMPLES][ONT_MAX_RANK];
} observed;

typedef struct sampler {
    const ont_graph *loaded;
    uint32_t n_symbols;        /* the graph's symbols, then one per unnamed dim of an input */
    int64_t (*sizes)[SAMPLES]; /* per symbol */
    observed *values;          /* per value of the loaded graph, then per output of it */
} sampler;

static bool is_prime(int64_t n)
{
    for (int64_t d = 2; d * d <= n; d++)
        if (n % d == 0) return false;
    return true;
}

/*
 * Sizes are distinct primes times `factor`: no two symbols agree in two samples, and `factor` makes most divisions in
 * models exact.
 */
static void choose_sizes(sampler *s, int64_t factor)
{
    int64_t prime = 5;
    for (int t = 0; t < SAMPLES; t++)
        for (uint32_t i = 0; i < s->n_symbols; i++, prime++) {
            while (!is_prime(prime)) prime++;
            s->sizes[i][t] = prime * factor;
        }
}

/* Sets the sizes of every input; false if one has no rank. */
static bool set_inputs(const sampler *s, ont_graph *g, int sample)
{
    uint32_t unnamed = s->loaded->n_symbols;
    for (uint32_t i = 0; i < g->n_inputs; i++) {
        ont_value *input = g->inputs[i];
        if (!input->has_shape) return false;
        for (int d = 0; d < input->shape.rank; d++) {
            int64_t dim = input->shape.dims[d];
            if (dim >= 0) continue;
            uint32_t symbol = dim == ONT_DIM_UNKNOWN ? unnamed++ : (uint32_t)ONT_DIM_SYMBOL_INDEX(dim);
            input->shape.dims[d] = s->sizes[symbol][sample];
        }
    }
    for (uint32_t i = 0; i < g->n_values; i++)
        if (g->values[i]->kind == ONT_VALUE_NODE) {
            g->values[i]->has_shape = false;
            g->values[i]->dtype = ONT_UNDEFINED;
        }
    return true;
}

static void observe(observed *at, const ont_value *v, int sample)
{
    if (!v->has_shape || v->container != ONT_TENSOR) return;
    if (at->n && (at->dtype != v->dtype || at->rank != v->shape.rank)) at->differs = true;
    at->dtype = v->dtype;
    at->rank = v->shape.rank;
    memcpy(at->dims[sample], v->shape.dims, sizeof at->dims[sample]);
    at->n++;
}

/* A clone has the non-input values in the same order, then the inputs. */
static void observe_all(sampler *s, const ont_graph *g, int sample)
{
    uint32_t other = 0;
    for (uint32_t i = 0; i < s->loaded->n_values; i++) {
        const ont_value *v = s->loaded->values[i];
        observe(&s->values[i], v->kind == ONT_VALUE_INPUT ? g->inputs[v->input] : g->values[other++], sample);
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) observe(&s->values[s->loaded->n_values + i], g->outputs[i], sample);
}

static ont_status run_sample(sampler *s, int sample, bool *done)
{
    ont_graph *g;
    ont_known_values none = {0};
    ONT_TRY(ont_graph_clone(s->loaded, &g));
    *done = set_inputs(s, g, sample);
    ont_status status = *done ? ont_pass_infer_with_values(g, &none) : ONT_OK;
    if (status == ONT_OK && *done) observe_all(s, g, sample);
    ont_graph_destroy(g);
    return status;
}

/* Runs all samples with one factor; errors of the model at these sizes are returned. */
static ont_status run_samples(sampler *s, int64_t factor, bool *done)
{
    choose_sizes(s, factor);
    memset(s->values, 0, ((size_t)s->loaded->n_values + s->loaded->n_outputs) * sizeof *s->values);
    *done = true;
    for (int t = 0; t < SAMPLES && *done; t++) ONT_TRY(run_sample(s, t, done));
    return ONT_OK;
}

/* ---- expressions ---- */

static const char *symbol_name(const sampler *s, uint32_t i)
{
    return i < s->loaded->n_symbols ? s->loaded->symbols[i] : NULL;
}

/* `factor`*body + term. */
static const char *format_affine(ont_arena *arena, int64_t factor, const char *body, int64_t term)
{
    const char *scaled = factor == 1 ? body : ont_arena_format(arena, "%" PRId64 "*%s", factor, body);
    if (!scaled || !term) return scaled;
    return ont_arena_format(arena, "%s %c %" PRId64, scaled, term < 0 ? '-' : '+', term < 0 ? -term : term);
}

/* Whether d = factor * x + term in every sample, with integers. */
static bool fits_affine(const int64_t *d, const int64_t *x, int64_t *factor, int64_t *term)
{
    if (x[1] == x[0] || (d[1] - d[0]) % (x[1] - x[0])) return false;
    *factor = (d[1] - d[0]) / (x[1] - x[0]);
    *term = d[0] - *factor * x[0];
    for (int t = 0; t < SAMPLES; t++)
        if (d[t] != *factor * x[t] + *term) return false;
    return *factor != 0;
}

/* Fits symbol i, then i + j, then i * j, each scaled and shifted; *text stays NULL if nothing fits. */
static ont_status fit_expression(const sampler *s, ont_arena *arena, const int64_t *d, const char **text)
{
    int64_t factor, term, x[SAMPLES];
    for (uint32_t i = 0; i < s->n_symbols; i++) {
        if (!fits_affine(d, s->sizes[i], &factor, &term)) continue;
        if (!symbol_name(s, i)) return ONT_OK; /* the fitting symbol has no name */
        *text = format_affine(arena, factor, symbol_name(s, i), term);
        return *text ? ONT_OK : ONT_ENOMEM;
    }
    for (int product = 0; product < 2; product++)
        for (uint32_t i = 0; i < s->n_symbols; i++)
            for (uint32_t j = i; j < s->n_symbols; j++) {
                for (int t = 0; t < SAMPLES; t++)
                    x[t] = product ? s->sizes[i][t] * s->sizes[j][t] : s->sizes[i][t] + s->sizes[j][t];
                const char *a = symbol_name(s, i), *b = symbol_name(s, j);
                if (!a || !b || !fits_affine(d, x, &factor, &term) || (!product && factor != 1)) continue;
                const char *body = ont_arena_format(arena, product ? "%s*%s" : "%s + %s", a, b);
                *text = body ? format_affine(arena, factor, body, term) : NULL;
                return *text ? ONT_OK : ONT_ENOMEM;
            }
    return ONT_OK;
}

static ont_status derive_type(const sampler *s, ont_arena *arena, const observed *from, ont_symbolic *to)
{
    to->dtype = from->dtype;
    to->has_shape = from->n == SAMPLES && !from->differs;
    to->rank = to->has_shape ? from->rank : 0;
    for (int i = 0; i < to->rank; i++) {
        int64_t d[SAMPLES];
        bool same = true;
        for (int t = 0; t < SAMPLES; t++) {
            d[t] = from->dims[t][i];
            same &= d[t] == d[0];
        }
        to->dims[i] = (ont_symbolic_dim){same ? d[0] : ONT_DIM_UNKNOWN, NULL};
        if (!same) ONT_TRY(fit_expression(s, arena, d, &to->dims[i].text));
    }
    return ONT_OK;
}

static ont_status collect(const sampler *s, ont_arena *arena, ont_symbolic **values, uint32_t *n)
{
    const ont_graph *g = s->loaded;
    ont_symbolic *all = ont_arena_array(arena, (size_t)g->n_values + g->n_outputs + 1, sizeof *all);
    uint32_t count = 0;
    if (!all) return ONT_ENOMEM;
    for (uint32_t i = 0; i < g->n_values + g->n_outputs; i++) {
        const ont_value *v = i < g->n_values ? g->values[i] : g->outputs[i - g->n_values];
        bool output = i >= g->n_values;
        if (v->kind == ONT_VALUE_CONSTANT || v->anonymous || !s->values[i].n) continue;
        if (!output && ont_value_is_output(g, v)) continue; /* listed as an output */
        all[count].name = ont_arena_strdup(arena, v->name);
        if (!all[count].name) return ONT_ENOMEM;
        ONT_TRY(derive_type(s, arena, &s->values[i], &all[count]));
        count++;
    }
    *values = all;
    *n = count;
    return ONT_OK;
}

ont_status ont_infer_symbolic(const ont_graph *loaded, ont_arena *arena, ont_symbolic **values, uint32_t *n)
{
    static const int64_t factors[] = {1, 12, 64};
    sampler s = {.loaded = loaded, .n_symbols = loaded->n_symbols};
    for (uint32_t i = 0; i < loaded->n_inputs; i++)
        for (int d = 0; loaded->inputs[i]->has_shape && d < loaded->inputs[i]->shape.rank; d++)
            s.n_symbols += loaded->inputs[i]->shape.dims[d] == ONT_DIM_UNKNOWN;
    if (s.n_symbols > MAX_SYMBOLS)
        return ont_fail(ONT_EUNSUPPORTED, "the graph has %u symbolic dims, at most %d are supported", s.n_symbols,
                        MAX_SYMBOLS);
    s.sizes = ont_arena_array(arena, (size_t)s.n_symbols + 1, sizeof *s.sizes);
    s.values = ont_arena_array(arena, (size_t)loaded->n_values + loaded->n_outputs + 1, sizeof *s.values);
    if (!s.sizes || !s.values) return ONT_ENOMEM;
    ont_status status = ONT_EINTERNAL;
    bool done = false;
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        status = run_samples(&s, factors[i], &done);
        if (status == ONT_OK || status == ONT_ENOMEM) break;
    }
    ONT_TRY(status);
    if (!done) return ont_fail(ONT_EUNSUPPORTED, "the rank of an input is not known");
    return collect(&s, arena, values, n);
}
