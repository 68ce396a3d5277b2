/*
 * Einsum by expansion. Labels that an operand repeats become a diagonal; labels that one operand alone has and the
 * result lacks are summed; then operands are contracted from left to right, each pair by one batched MatMul. A label is
 * a letter. The dims of "..." get labels of their own, counted from the right, and dims of 1 broadcast.
 */
#include <string.h>

#include "ops/op.h"

#define FAIL(...) \
    do { \
        ont_build_fail(b, __VA_ARGS__); \
        return; \
    } while (0)

enum { ELLIPSIS = 128, LABELS = ELLIPSIS + ONT_MAX_RANK };

/* A tensor, and the label of each dim. */
typedef struct term {
    ont_value *v;
    int n;
    uint8_t labels[2 * ONT_MAX_RANK];
} term;

typedef struct equation {
    const char *text;
    bool wanted[LABELS]; /* whether the result has the label */
    int uses[LABELS];    /* number of operands, not yet contracted, that have the label */
    int64_t size[LABELS];
    int ellipsis;        /* number of dims of the longest "..." */
} equation;

/* isalpha() without the locale, since a label is an index. */
static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static int find(const term *t, int label)
{
    for (int d = 0; d < t->n; d++)
        if (t->labels[d] == label) return d;
    return -1;
}

/* Reads the subscripts of one operand, up to ',' or '-' or the end. `rank` is -1 for the result, whose "..." has all
 * dims. */
static const char *parse_term(ont_builder *b, const equation *e, const char *at, int rank, term *t)
{
    int letters = 0;
    for (const char *p = at; *p && *p != ',' && *p != '-'; p++) letters += is_letter(*p);
    t->n = 0;
    for (; *at && *at != ',' && *at != '-'; at++) {
        if (*at == ' ') continue;
        int dims = rank < 0 ? e->ellipsis : rank - letters;
        if (!strncmp(at, "...", 3)) {
            if (dims < 0 || dims > ONT_MAX_RANK || t->n + dims > ONT_MAX_RANK) break;
            for (int d = dims; d > 0; d--) t->labels[t->n++] = (uint8_t)(ELLIPSIS + d - 1);
            at += 2;
        } else if (is_letter(*at) && t->n < ONT_MAX_RANK) {
            t->labels[t->n++] = (uint8_t)*at;
        } else {
            break;
        }
    }
    if (*at && *at != ',' && *at != '-') ont_build_fail(b, ONT_EINVAL, "equation '%s': unexpected '%s'", e->text, at);
    return at;
}

/* ---- steps on one term ---- */

static void permute(ont_builder *b, term *t, const int *order)
{
    int64_t perm[2 * ONT_MAX_RANK];
    const term old = *t;
    bool same = true;
    for (int d = 0; d < t->n; d++) {
        perm[d] = order[d];
        t->labels[d] = old.labels[order[d]];
        same &= order[d] == d;
    }
    if (!same && t->v) t->v = ont_build_transpose(b, t->v, perm);
}

/* Takes the diagonal of dims i < j with one label: moved to the end, n x n elements are read with stride n + 1. */
static void take_diagonal(ont_builder *b, term *t, int i, int j)
{
    int order[ONT_MAX_RANK], n = 0;
    for (int d = 0; d < t->n; d++)
        if (d != i && d != j) order[n++] = d;
    order[n++] = i;
    order[n] = j;
    permute(b, t, order);
    if (!t->v) return;
    ont_shape shape = t->v->shape;
    int64_t size = shape.dims[n], zero = 0, end = size * size, axis = n - 1, step = size + 1;
    if (shape.dims[n - 1] != size)
        FAIL(ONT_EINVAL, "a repeated label stands for dims of %lld and %lld", (long long)shape.dims[n - 1],
             (long long)size);
    shape.rank = n;
    shape.dims[n - 1] = size * size;
    ont_value *in[] = {ont_build_reshape(b, t->v, &shape), ont_build_const_ints(b, &zero, 1),
                       ont_build_const_ints(b, &end, 1),
                       ont_build_const_ints(b, &axis, 1), ont_build_const_ints(b, &step, 1)};
    t->v = b->status == ONT_OK ? ont_build_done(b, ont_build_node(b, "", "Slice", in, 5, 1)) : NULL;
    t->n = n;
}

/* Sums over the dims `gone`, or drops them where their size is 1. */
static void sum_out(ont_builder *b, term *t, const bool *gone)
{
    int64_t axes[ONT_MAX_RANK];
    size_t n = 0;
    int kept = 0;
    for (int d = 0; d < t->n; d++) {
        if (gone[d])
            axes[n++] = d;
        else
            t->labels[kept++] = t->labels[d];
    }
    if (n && t->v) t->v = ont_build_reduce(b, "ReduceSum", t->v, axes, n, false);
    t->n = kept;
}

static void prepare_term(ont_builder *b, const equation *e, term *t)
{
    for (int i = 0; i < t->n; i++)
        for (int j = i + 1; j < t->n && b->status == ONT_OK; j++)
            if (t->labels[i] == t->labels[j]) {
                take_diagonal(b, t, i, j);
                i = -1; /* i = -1: dims have moved, so the search starts again */
                break;
            }
    bool gone[ONT_MAX_RANK] = {false};
    for (int d = 0; d < t->n && t->v; d++) gone[d] = !e->wanted[t->labels[d]] && e->uses[t->labels[d]] == 1;
    sum_out(b, t, gone);
}

/* ---- contraction of a pair ---- */

typedef struct group {
    int n;
    uint8_t labels[ONT_MAX_RANK];
    int64_t dims[ONT_MAX_RANK], size;
} group;

static void add_to(group *g, const term *t, int d)
{
    g->labels[g->n] = t->labels[d];
    g->dims[g->n++] = t->v->shape.dims[d];
    g->size *= t->v->shape.dims[d];
}

/* t as (batch, first, second), each in the order of the group's labels. */
static ont_value *as_matrix(ont_builder *b, term *t, const group *batch, const group *first, const group *second)
{
    const group *groups[] = {batch, first, second};
    int order[ONT_MAX_RANK], n = 0;
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < groups[k]->n; i++) order[n++] = find(t, groups[k]->labels[i]);
    permute(b, t, order);
    if (b->status != ONT_OK || !t->v) return NULL;
    ont_shape shape = ont_shape_of(3, (int64_t[]){batch->size, first->size, second->size});
    return ont_build_reshape(b, t->v, &shape);
}

/* Drops dims of 1 whose label is larger in the other term. */
static void drop_broadcast(ont_builder *b, const equation *e, term *t, const term *other)
{
    bool gone[ONT_MAX_RANK] = {false};
    for (int d = 0; d < t->n && t->v; d++)
        gone[d] = t->v->shape.dims[d] == 1 && e->size[t->labels[d]] != 1 && find(other, t->labels[d]) >= 0;
    sum_out(b, t, gone);
}

static void contract(ont_builder *b, equation *e, term *x, term *y)
{
    for (int d = 0; d < y->n; d++)
        if (find(x, y->labels[d]) >= 0) e->uses[y->labels[d]]--; /* one dim takes the place of two */
    drop_broadcast(b, e, x, y);
    drop_broadcast(b, e, y, x);
    if (b->status != ONT_OK) return;
    group batch = {.size = 1}, left = {.size = 1}, right = {.size = 1}, inner = {.size = 1};
    for (int d = 0; d < x->n; d++) {
        int label = x->labels[d];
        bool shared = find(y, label) >= 0, later = e->wanted[label] || e->uses[label] > 1;
        add_to(!shared ? &left : later ? &batch : &inner, x, d);
    }
    for (int d = 0; d < y->n; d++)
        if (find(x, y->labels[d]) < 0) add_to(&right, y, d);
    if (batch.n + left.n + right.n > ONT_MAX_RANK)
        FAIL(ONT_EUNSUPPORTED, "an intermediate result of rank over %d", ONT_MAX_RANK);
    ont_value *lhs = as_matrix(b, x, &batch, &left, &inner), *rhs = as_matrix(b, y, &batch, &inner, &right);
    const char *op = inner.n || ont_dtype_is_float(x->v ? x->v->dtype : ONT_FLOAT32) ? "MatMul" : "Mul";
    ont_value *product = ont_build2(b, op, lhs, rhs);
    ont_shape shape = {0};
    const group *groups[] = {&batch, &left, &right};
    x->n = 0;
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < groups[k]->n; i++) {
            x->labels[x->n++] = groups[k]->labels[i];
            shape.dims[shape.rank++] = groups[k]->dims[i];
        }
    x->v = ont_build_reshape(b, product, &shape);
    bool gone[ONT_MAX_RANK] = {false}; /* labels of both terms of which this dim of 1 was dropped */
    for (int d = 0; d < x->n && x->v; d++) gone[d] = !e->wanted[x->labels[d]] && e->uses[x->labels[d]] == 1;
    sum_out(b, x, gone);
}

/* ---- the equation ---- */

/* Without "->", the result has "..." and then the letters that occur once, in alphabetical order. */
static void implicit_result(const equation *e, const char *text, term *result)
{
    int count[LABELS] = {0};
    for (; *text; text++)
        if (is_letter(*text)) count[(unsigned char)*text]++;
    result->n = 0;
    for (int d = e->ellipsis; d > 0; d--) result->labels[result->n++] = (uint8_t)(ELLIPSIS + d - 1);
    for (int c = 0; c < ELLIPSIS; c++)
        if (count[c] == 1 && result->n < ONT_MAX_RANK) result->labels[result->n++] = (uint8_t)c;
}

static void read_operands(ont_builder *b, equation *e, const ont_node *node, term *terms, const char **rest)
{
    const char *at = e->text;
    for (uint32_t i = 0; i < node->n_inputs && b->status == ONT_OK; i++) {
        terms[i].v = ont_node_in(node, i);
        if (!terms[i].v || (i && *at != ','))
            FAIL(ONT_EINVAL, "equation '%s' is not of %u operands", e->text, node->n_inputs);
        const ont_shape *shape = &terms[i].v->shape;
        at = parse_term(b, e, at + (i > 0), shape->rank, &terms[i]);
        if (b->status != ONT_OK) return;
        if (terms[i].n != shape->rank)
            FAIL(ONT_EINVAL, "equation '%s': operand %u has rank %d, its subscripts stand for %d", e->text, i,
                 shape->rank, terms[i].n);
        for (int d = 0; d < terms[i].n; d++) {
            int label = terms[i].labels[d];
            int64_t *size = &e->size[label], dim = shape->dims[d];
            if (find(&terms[i], label) == d) e->uses[label]++;
            if (label >= ELLIPSIS && label - ELLIPSIS >= e->ellipsis) e->ellipsis = label - ELLIPSIS + 1;
            if (*size > 0 || e->uses[label] > 1 || find(&terms[i], label) != d) {
                if (*size != dim && *size != 1 && dim != 1)
                    FAIL(ONT_EINVAL, "equation '%s': operand %u has %lld where %lld is expected", e->text, i,
                         (long long)dim, (long long)*size);
                if (*size == 1) *size = dim;
            } else {
                *size = dim;
            }
        }
    }
    *rest = at;
}

static void read_result(ont_builder *b, equation *e, const char *at, term *result)
{
    if (b->status != ONT_OK) return;
    if (!*at) {
        implicit_result(e, e->text, result);
    } else {
        if (strncmp(at, "->", 2)) FAIL(ONT_EINVAL, "equation '%s': unexpected '%s'", e->text, at);
        at = parse_term(b, e, at + 2, -1, result);
        if (*at) FAIL(ONT_EINVAL, "equation '%s': unexpected '%s'", e->text, at);
    }
    for (int d = 0; d < result->n; d++) {
        int label = result->labels[d];
        if (!e->uses[label] || e->wanted[label])
            FAIL(ONT_EINVAL, "equation '%s': the result names '%c' %s", e->text, label, e->wanted[label] ? "twice"
                 : "alone");
        e->wanted[label] = true;
    }
}

static void einsum_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    equation e = {.text = ont_attr_string(node, "equation", "")};
    term *terms = ont_arena_array(&b->graph->arena, node->n_inputs + 1, sizeof *terms), result = {0};
    const char *rest = "";
    if (!terms) {
        b->status = ONT_ENOMEM;
        return;
    }
    read_operands(b, &e, node, terms, &rest);
    read_result(b, &e, rest, &result);
    for (uint32_t i = 0; i < node->n_inputs && b->status == ONT_OK; i++) prepare_term(b, &e, &terms[i]);
    for (uint32_t i = 1; i < node->n_inputs && b->status == ONT_OK; i++) contract(b, &e, &terms[0], &terms[i]);
    if (b->status != ONT_OK) return;
    int order[ONT_MAX_RANK];
    if (terms[0].n != result.n)
        FAIL(ONT_EINTERNAL, "equation '%s': %d dims, expected %d", e.text, terms[0].n, result.n);
    for (int d = 0; d < result.n; d++) order[d] = find(&terms[0], result.labels[d]);
    permute(b, &terms[0], order);
    outputs[0] = terms[0].v;
}

const ont_op ont_op_Einsum = {.domain = "", .name = "Einsum", .since = 12, .min_inputs = 1, .max_inputs = 64,
                              .attributes = "equation:s", .expand = einsum_expand};
