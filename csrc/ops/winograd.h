/*
 * The Winograd kernels of Conv and its two gradients; conv.c lists them in front of oneDNN's. Which shapes they take is
 * winograd_choice.c's to say.
 */
#ifndef ONT_OPS_WINOGRAD_H
#define ONT_OPS_WINOGRAD_H

#include "device/conv.h"
#include "ops/op.h"

const char *ont_winograd_accept(const ont_node *node);
ont_status ont_winograd_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_winograd_run(const ont_call *call);
ont_status ont_winograd_grad_run(const ont_call *call);

/* Whether accept() takes anything; on at first. */
void ont_winograd_enable(bool on);

#define ONT_CONV_WINOGRAD(kernel_name) \
    {.name = kernel_name, .accept = ont_winograd_accept, .prepare = ont_winograd_prepare, .run = ont_winograd_run}
#define ONT_CONV_WINOGRAD_GRAD(kernel_name) \
    {.name = kernel_name, .accept = ont_winograd_accept, .prepare = ont_winograd_prepare, .run = ont_winograd_grad_run}

/* ---- one convolution: what the kernels and the measurement share ---- */

/*
 * Tiles of a source, in groups: the transformed tiles of a group are in the caches while they are multiplied. A
 * convolution's gradient of the input is a convolution of dy with the weights turned, and its source is dy.
 */
typedef struct ont_winograd {
    ont_conv_kind kind;
    int64_t n, c, k; /* images; channels that are summed over (of x for a weight's gradient); channels of the result */
    int64_t in[2], out[2];      /* of the source; of what is written, or of dy */
    int64_t pad[2];
    int64_t rows, columns;      /* of tiles in an image */
    int64_t bands;              /* rows of tiles in all images */
    int64_t group_bands, group_tiles; /* of a group, tiles rounded up to blocks */
    int64_t channel_blocks, part_blocks; /* blocks of channels; blocks of tiles that one product has */
    int64_t parts, slots;       /* a group's tiles are shared out in parts; pieces of scratch */
    int64_t v_plane, w_plane, u_plane, m_plane; /* floats between points */
    size_t v_at, w_at, sums_at, slots_at, slot_bytes, work_bytes;
} ont_winograd;

/* NULL, or why the algorithm does not apply. */
const char *ont_winograd_refuses(const ont_conv *conv);
void ont_winograd_init(const ont_conv *conv, ont_conv_kind kind, int threads, ont_winograd *s);
/* src and weight to dst, or (dy, x) to the weight's gradient; bias may be NULL. */
void ont_winograd_compute(const ont_winograd *s, const float *src, const float *weight, const float *bias, float *dst,
                          char *work);
void ont_winograd_compute_grad(const ont_winograd *s, const float *dy, const float *x, float *dweight, char *work);

#endif
