/*
 * TfIdfVectorizer over integers: counts of the n-grams of a pool, with skips, as term frequency, presence, or weighted.
 * A pool of strings is refused.
 */
#include <inttypes.h>
#include <string.h>

#include "base/number.h"
#include "ops/op.h"

typedef struct pool {
    const int64_t *items, *counts,
        *places; /* the n-grams, concatenated; offset of each length; output columns */
    size_t n_items, n_counts, n_places;
    const double *weights;
    size_t n_weights;
    int64_t shortest, longest, skips, columns;
    char mode; /* T (TF), I (IDF), or B (TFIDF) */
} pool;

static ont_status read_pool(const ont_node *node, pool *p)
{
    const char *mode = ont_attr_string(node, "mode", "");
    if (ont_attr_find(node, "pool_strings", ONT_ATTR_STRINGS))
        return ont_fail(ONT_EUNSUPPORTED, "attribute pool_strings is not supported: onnxtrain has no strings");
    p->mode = !strcmp(mode, "TF") ? 'T' : !strcmp(mode, "IDF") ? 'I' : !strcmp(mode, "TFIDF") ? 'B' : 0;
    if (!p->mode) return ont_fail(ONT_EINVAL, "attribute mode is '%s', expected TF, IDF or TFIDF", mode);
    p->items = ont_attr_ints(node, "pool_int64s", &p->n_items);
    p->counts = ont_attr_ints(node, "ngram_counts", &p->n_counts);
    p->places = ont_attr_ints(node, "ngram_indexes", &p->n_places);
    p->weights = ont_attr_floats(node, "weights", &p->n_weights);
    p->shortest = ont_attr_int(node, "min_gram_length", 1);
    p->longest = ont_attr_int(node, "max_gram_length", 1);
    p->skips = ont_attr_int(node, "max_skip_count", 0);
    if (p->shortest < 1 || p->longest < p->shortest || p->skips < 0)
        return ont_fail(ONT_EINVAL, "n-grams of %" PRId64 " to %" PRId64 " entries, at most %" PRId64 " skips",
                        p->shortest, p->longest, p->skips);
    if (p->weights && p->n_weights != p->n_places)
        return ont_fail(ONT_EINVAL, "weights has %zu entries for %zu n-grams", p->n_weights, p->n_places);
    p->columns = 0;
    for (size_t i = 0; i < p->n_places; i++) {
        if (p->places[i] < 0 || p->places[i] > INT32_MAX)
            return ont_fail(ONT_EINVAL, "ngram_indexes has the entry %" PRId64 ", expected 0 to %d", p->places[i],
                            INT32_MAX);
        if (p->places[i] >= p->columns) p->columns = p->places[i] + 1;
    }
    size_t grams = 0;
    for (size_t i = 0; i < p->n_counts; i++) {
        int64_t first = p->counts[i], end = i + 1 < p->n_counts ? p->counts[i + 1] : (int64_t)p->n_items;
        if (first < 0 || end < first || end > (int64_t)p->n_items || (end - first) % (int64_t)(i + 1))
            return ont_fail(ONT_EINVAL, "ngram_counts do not fit a pool of %zu entries", p->n_items);
        grams += (size_t)(end - first) / (i + 1);
    }
    if (grams == p->n_places) return ONT_OK;
    return ont_fail(ONT_EINVAL, "the pool has %zu n-grams, but ngram_indexes has %zu entries", grams, p->n_places);
}

static ont_status tfidf_infer(ont_graph *g, ont_node *node)
{
    (void)g;
    ont_value *x;
    pool p;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(read_pool(node, &p));
    if (x->dtype != ONT_INT32 && x->dtype != ONT_INT64)
        return ont_fail(ONT_ETYPE, "x is %s, expected int32 or int64", ont_dtype_name(x->dtype));
    if (x->shape.rank < 1 || x->shape.rank > 2)
        return ont_fail(ONT_EINVAL, "x has rank %d, expected 1 or 2", x->shape.rank);
    ont_shape shape = x->shape;
    shape.dims[shape.rank - 1] = p.columns;
    return ont_infer_out(node, 0, ONT_FLOAT32, &shape);
}

/* Counts n-gram `gram` of `length` entries in a row, with `skip` - 1 entries left out between neighbours. */
static int64_t occurrences(const ont_call *call, int64_t row, int64_t n, const int64_t *gram, int64_t length,
                           int64_t skip)
{
    ont_dtype dtype = ont_node_in(call->node, 0)->dtype;
    int64_t count = 0;
    for (int64_t start = 0; start + (length - 1) * skip < n; start++) {
        int64_t same = 0;
        while (same < length && ont_integer_at(call->in[0], dtype, row * n + start + same * skip) == gram[same]) same++;
        count += same == length;
    }
    return count;
}

static ont_status tfidf_run(const ont_call *call)
{
    const ont_value *x = ont_node_in(call->node, 0), *y = call->node->outputs[0];
    int64_t n = x->shape.dims[x->shape.rank - 1], rows = x->shape.rank == 2 ? x->shape.dims[0] : 1;
    float *out = call->out[0];
    pool p;
    ONT_TRY(read_pool(call->node, &p));
    memset(out, 0, (size_t)ont_shape_count(&y->shape) * sizeof *out);
    for (int64_t r = 0; r < rows; r++) {
        size_t gram = 0;
        for (size_t i = 0; i < p.n_counts; i++) {
            int64_t length = (int64_t)i + 1, end = i + 1 < p.n_counts ? p.counts[i + 1] : (int64_t)p.n_items;
            for (int64_t at = p.counts[i]; at < end; at += length, gram++) {
                if (length < p.shortest || length > p.longest) continue;
                int64_t count = 0;
                for (int64_t skip = 1; skip - 1 <= (length == 1 ? 0 : p.skips) && (length - 1) * skip < n; skip++)
                    count += occurrences(call, r, n, p.items + at, length, skip);
                double weight = p.weights ? p.weights[gram] : 1, value = p.mode == 'T' ? (double)count : p.mode == 'I'
                                ? (count ? weight : 0) : (double)count * weight;
                out[r * p.columns + p.places[gram]] += (float)value;
            }
        }
    }
    return ONT_OK;
}

static const ont_kernel kernels[] = {{.name = "tfidf_ref", .accept = ont_accept_any, .run = tfidf_run}};
const ont_op ont_op_TfIdfVectorizer = {.domain = "", .name = "TfIdfVectorizer", .since = 9, .min_inputs = 1,
                                       .max_inputs = 1,
                                       .flags = ONT_OP_NO_GRAD,
                                       .attributes = "max_gram_length:i max_skip_count:i min_gram_length:i mode:s "
                                                     "ngram_counts:I ngram_indexes:I pool_int64s:I pool_strings:S "
                                                     "weights:F",
                                       .infer = tfidf_infer, ONT_KERNELS(kernels)};
