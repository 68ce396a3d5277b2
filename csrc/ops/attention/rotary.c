/*
 * RotaryEmbedding by expansion: pairs of features of a head are rotated by an angle that depends on the position.
 * Source: Su et al., RoFormer, 2021.
 */
#include <inttypes.h>

#include "ops/support/compose.h"

typedef struct rotary {
    bool packed;              /* (batch, seqlen, heads * head_dim) rather than (batch, heads, seqlen, head_dim) */
    int64_t batch, seqlen, heads, head_dim, rotary_dim; /* rotary_dim: rotated features of a head, the first ones */
    bool interleaved;
} rotary;

static ont_status read_rotary(const ont_node *node, rotary *r)
{
    ont_value *x, *c, *s;
    ONT_TRY(ont_need_input(node, 0, &x));
    ONT_TRY(ont_need_input(node, 1, &c));
    ONT_TRY(ont_need_input(node, 2, &s));
    if (x->shape.rank != 3 && x->shape.rank != 4) return ont_fail(ONT_EINVAL, "X must have rank 3 or 4");
    if (c->dtype != x->dtype || s->dtype != x->dtype || !ont_dtype_is_float(x->dtype))
        return ont_fail(ONT_ETYPE, "X is %s, the caches %s and %s", ont_dtype_name(x->dtype), ont_dtype_name(c->dtype),
                        ont_dtype_name(s->dtype));
    r->packed = x->shape.rank == 3;
    r->batch = x->shape.dims[0];
    r->seqlen = x->shape.dims[r->packed ? 1 : 2];
    r->heads = r->packed ? ont_attr_int(node, "num_heads", 0) : x->shape.dims[1];
    if (r->packed && (r->heads < 1 || x->shape.dims[2] % r->heads))
        return ont_fail(ONT_EINVAL, "num_heads is %" PRId64 ", which does not divide %" PRId64 " features", r->heads,
                        x->shape.dims[2]);
    r->head_dim = r->packed ? x->shape.dims[2] / r->heads : x->shape.dims[3];
    r->rotary_dim = ont_attr_int(node, "rotary_embedding_dim", 0);
    if (!r->rotary_dim) r->rotary_dim = r->head_dim;
    if (r->rotary_dim < 0 || r->rotary_dim > r->head_dim || r->rotary_dim % 2)
        return ont_fail(ONT_EINVAL,
                        "rotary_embedding_dim is %" PRId64 ", an even number of at most %" PRId64 " is expected",
                        r->rotary_dim, r->head_dim);
    r->interleaved = ont_attr_int(node, "interleaved", 0) != 0;
    const ont_value *ids = ont_node_in(node, 3);
    int rank = ids ? 2 : 3;
    if (!ont_shape_equal(&c->shape, &s->shape) || c->shape.rank != rank || c->shape.dims[rank - 1] != r->rotary_dim / 2)
        return ont_fail(ONT_EINVAL, "the caches must have rank %d and %" PRId64 " columns", rank, r->rotary_dim / 2);
    if (ids && ids->dtype != ONT_INT64)
        return ont_fail(ONT_ETYPE, "position_ids is %s, int64 is expected", ont_dtype_name(ids->dtype));
    const ont_shape *lead = ids ? &ids->shape : &c->shape;
    if ((ids && ids->shape.rank != 2) || lead->dims[0] != r->batch || lead->dims[1] != r->seqlen)
        return ont_fail(ONT_EINVAL, "positions must have the shape (%" PRId64 ", %" PRId64 ")", r->batch, r->seqlen);
    return ONT_OK;
}

static ont_status rotary_infer(ont_graph *g, ont_node *node)
{
    rotary r;
    ONT_TRY(read_rotary(node, &r));
    return ont_infer_same(g, node);
}

/* Cosines or sines of every position: (batch, 1, seqlen, rotary_dim / 2), packed (batch, seqlen, 1, rotary_dim / 2). */
static ont_value *angles(ont_builder *b, const rotary *r, ont_value *cache, ont_value *ids)
{
    if (ids) cache = ont_build2(b, "Gather", cache, ids);
    int64_t half = r->rotary_dim / 2;
    ont_shape shape = ont_shape_of(4, (int64_t[]){r->batch, 1, r->seqlen, half});
    if (r->packed) shape = ont_shape_of(4, (int64_t[]){r->batch, r->seqlen, 1, half});
    return cache ? ont_build_reshape(b, cache, &shape) : NULL;
}

static void rotary_expand(ont_builder *b, ont_node *node, ont_value **outputs)
{
    rotary r;
    b->status = read_rotary(node, &r);
    if (b->status != ONT_OK) return;
    ont_value *x = ont_node_in(node, 0), *part[2], *half[2];
    ont_shape shape = x->shape, split = x->shape;
    if (r.packed) split = ont_shape_of(4, (int64_t[]){r.batch, r.seqlen, r.heads, r.head_dim});
    x = ont_build_reshape(b, x, &split);
    bool rest = r.rotary_dim < r.head_dim;
    ont_build_split(b, x, 3, (int64_t[]){r.rotary_dim, r.head_dim - r.rotary_dim}, rest ? 2 : 1, part);
    if (r.interleaved) {
        half[0] = ont_build_slice(b, part[0], 3, 0, r.head_dim, 2);
        half[1] = ont_build_slice(b, part[0], 3, 1, r.head_dim, 2);
    } else {
        ont_build_split_even(b, part[0], 3, 2, half);
    }
    ont_value *c = angles(b, &r, ont_node_in(node, 1), ont_node_in(node, 3));
    ont_value *s = angles(b, &r, ont_node_in(node, 2), ont_node_in(node, 3));
    ont_value *rotated[2] = {
        ont_build2(b, "Sub", ont_build2(b, "Mul", c, half[0]), ont_build2(b, "Mul", s, half[1])),
        ont_build2(b, "Add", ont_build2(b, "Mul", s, half[0]), ont_build2(b, "Mul", c, half[1])),
    };
    ont_value *joined;
    if (r.interleaved) {
        for (int i = 0; i < 2; i++) rotated[i] = ont_build_unsqueeze(b, rotated[i], 4);
        ont_shape flat = split;
        flat.dims[3] = r.rotary_dim;
        joined = ont_build_concat(b, rotated, 2, 4);
        if (joined) joined = ont_build_reshape(b, joined, &flat);
    } else {
        joined = ont_build_concat(b, rotated, 2, 3);
    }
    if (rest) joined = ont_build_concat(b, (ont_value *[]){joined, part[1]}, 2, 3);
    outputs[0] = joined ? ont_build_reshape(b, joined, &shape) : NULL;
}

const ont_op ont_op_RotaryEmbedding = {.domain = "", .name = "RotaryEmbedding", .since = 23, .min_inputs = 3,
                                       .max_inputs = 4,
                                       .attributes = "interleaved:i num_heads:i rotary_embedding_dim:i",
                                       .nondiff_inputs = 1 << 3, .infer = rotary_infer, .expand = rotary_expand};
