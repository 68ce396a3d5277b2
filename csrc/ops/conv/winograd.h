/*
 * The Winograd kernels of Conv and its two gradients; conv.c lists them before oneDNN's. winograd_choice.c decides
 * which shapes they accept.
 */
#ifndef ONT_OPS_WINOGRAD_H
#define ONT_OPS_WINOGRAD_H

#include "device/conv.h"
#include "ops/op.h"

const char *ont_winograd_accept(const ont_node *node);
const char *ont_winograd_measure(const ont_node *node); /* beside oneDNN, where that accepts the node */
ont_status ont_winograd_prepare(const ont_node *node, ont_arena *arena, ont_prepared *out);
ont_status ont_winograd_run(const ont_call *call);
ont_status ont_winograd_grad_run(const ont_call *call);

/*
 * Whether the node, whose operands are bfloat16, is faster in float32 by this algorithm, Casts included, than by oneDNN
 * as it is. Measured as above.
 */
bool ont_winograd_is_faster_than_bf16(const ont_node *node);

/* With `on` false, accept() declines everything. Initially true. */
void ont_winograd_enable(bool on);

#define ONT_CONV_WINOGRAD(kernel_name) \
    {.name = kernel_name, .accept = ont_winograd_accept, .measure = ont_winograd_measure, \
     .prepare = ont_winograd_prepare, .run = ont_winograd_run}
#define ONT_CONV_WINOGRAD_GRAD(kernel_name) \
    {.name = kernel_name, .accept = ont_winograd_accept, .measure = ont_winograd_measure, \
     .prepare = ont_winograd_prepare, .run = ont_winograd_grad_run}

/* ---- one convolution; for the kernels and the benchmark ---- */

/*
 * The source image is divided into tiles of 6 x 6 that overlap by two; tiles are processed in groups, whose transforms
 * stay in the caches while they are multiplied. The gradient of the input is a convolution of dy, the source, with the
 * weights rotated by 180 degrees.
 *
 * A convolution of volumes with a filter of (taps, 3, 3) is one of images: each slice of the result is an image, whose
 * channels are those of `taps` slices of the source.
 */
typedef struct ont_winograd {
    ont_conv_kind kind;
    int64_t n;              /* images, or slices of the result (of dy) in all volumes */
    int64_t c;              /* channels that are summed over; for the gradient of the weights: channels of x */
    int64_t taps, each;     /* slices of the source for each of the result, and channels of one: c = taps * each */
    int64_t slices, depth;  /* of a volume: of the result (of dy), and of the source; 1 for images */
    int64_t before;         /* slices of padding */
    int64_t k;              /* channels of the result */
    int64_t in[2], out[2];  /* height and width of the source; of the result, or of dy */
    int64_t pad[2];
    int64_t rows, columns;  /* tiles of an image */
    int64_t bands;          /* rows of tiles in all images */
    int64_t group_bands, group_tiles; /* of a group; tiles are rounded up to whole blocks */
    int64_t channel_blocks; /* blocks of ONT_WINO_LANES channels */
    int64_t part_blocks, parts; /* blocks of tiles that are multiplied together; such parts of a group */
    int64_t slots;          /* threads, each with its own scratch */
    int64_t v_plane, w_plane, u_plane, m_plane; /* floats between the 36 points, of each transformed tensor */
    size_t v_at, w_at, sums_at, slots_at; /* offsets in the scratch */
    size_t slot_bytes, work_bytes;
} ont_winograd;

/* NULL, or why the algorithm does not apply. */
const char *ont_winograd_refuses(const ont_conv *conv);
void ont_winograd_init(const ont_conv *conv, ont_conv_kind kind, int threads, ont_winograd *s);
/* Forward: src is x, dst is y. Gradient of the input: src is dy, dst is dx. bias may be NULL. */
void ont_winograd_compute(const ont_winograd *s, const float *src, const float *weight, const float *bias, float *dst,
                          char *work);
/* The gradient of the weights. */
void ont_winograd_compute_grad(const ont_winograd *s, const float *dy, const float *x, float *dweight, char *work);

#endif
