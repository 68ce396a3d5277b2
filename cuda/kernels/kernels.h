/*
 * The launchers of the kernel files, for C. Each checks its launch and returns a CUDA error code, 0 for success.
 * Pointers are device pointers; sizes count elements unless they say bytes.
 */
#ifndef ONT_CUDA_KERNELS_H
#define ONT_CUDA_KERNELS_H

#include "device/device.h"
#include "kernels/elementwise.h"
#include "ops/quant/quantize.h"
#include "ops/random/fill.h"
#include "ops/reduce/cumulative.h"
#include "ops/support/sample.h"
#include "simd/pool/pool.h"
#include "simd/recurrent/recurrent.h"

#ifdef __cplusplus
extern "C" {
#endif

/* elementwise.cu */
int ont_launch_elementwise(const ont_ew *e, void *stream);

/* random.cu: the numbers of csrc/ops/random/random_fill.c. random: the run's key, in device memory; x: probabilities */
int ont_launch_fill(const ont_fill *s, int64_t n, const uint64_t *random, const void *x, void *out, void *stream);
/* x (rows, n): logarithms of probabilities; out (rows, samples), int64 or int32 */
typedef struct ont_multinomial {
    int64_t rows, n, samples;
    uint64_t stream;
    int32_t dtype, wide; /* of x; wide: int64 */
} ont_multinomial;
size_t ont_multinomial_work(const ont_multinomial *s);
int ont_launch_multinomial(const ont_multinomial *s, const uint64_t *random, const void *x, void *out, void *work,
                           void *stream);

/* quantize.cu: in: x, scale, zero point or NULL; `count` elements, y an integer */
int ont_launch_quantize(const ont_quantize *q, int64_t count, const void *const *in, void *y, void *stream);

/* copy.cu: between strided layouts; strides and offsets in bytes */
typedef struct ont_copy {
    int32_t rank, size;
    int64_t count;
    int64_t dims[12], from[12], to[12];
    int64_t from_offset, to_offset;
} ont_copy;
int ont_launch_copy(const ont_copy *c, const void *from, void *to, void *stream);
/* One to four words, by value. */
int ont_launch_store(void *to, const uint64_t *words, int n, void *stream);
/* out[i] = first + i * step, for int64, int32, float or double */
int ont_launch_range(int dtype, const void *first, const void *step, void *out, int64_t n, void *stream);
/* in: x (rows, 2, half), and cos and sin, whose rows have these strides over dims, in float64 beside float64 and else
 * in float32; at most 2^31 elements */
typedef struct ont_rotate {
    int64_t rows, half;
    int64_t dims[12], cos[12], sin[12];
    int32_t rank, dtype, back;
} ont_rotate;
int ont_launch_rotate(const ont_rotate *s, const void *const *in, void *out, void *stream);
/* y = x where row - column of the last two dims is on the kept side of k, else 0 */
typedef struct ont_trilu {
    int64_t count, rows, columns, k;
    int32_t upper, size; /* size: bytes of an element */
} ont_trilu;
int ont_launch_trilu(const ont_trilu *s, const void *x, void *y, void *stream);

/* gather.cu: data (outer, table, inner), `count` indices */
typedef struct ont_gather {
    int64_t outer, table, inner, count;
    int32_t size, wide; /* size: bytes of an element; wide: indices are int64 */
    int32_t dtype, step;
    int32_t from_end; /* indices below 0 are allowed */
    ont_fault *fault;
} ont_gather;
int ont_launch_gather(const ont_gather *g, const void *data, const void *indices, void *out, void *stream);
size_t ont_gather_grad_work(const ont_gather *g);
/* out (outer, table, inner), which is zero before: sums of the rows of dy (outer, count, inner) by index */
int ont_launch_gather_grad(const ont_gather *g, const void *dy, const void *indices, void *out, void *work,
                           void *stream);

/* A stable sort of `count` keys in [0, table]; fewer than 2^31. Those equal to `table` are last. */
typedef struct ont_pair {
    int32_t key, position;
} ont_pair;
size_t ont_sort_work(int64_t count);
int ont_launch_sort(int64_t count, int64_t table, const int32_t *keys, void *work, const ont_pair **sorted,
                    void *stream);

/* reduce.cu */
typedef struct ont_reduction {
    int32_t kind, dtype; /* ont_reduce_kind */
    int32_t n_kept, n_reduced;
    int64_t kept[12], kept_stride[12], reduced[12], reduced_stride[12];
    int64_t outputs, each;
    int64_t lead, n, tail; /* one run of dims is reduced: (lead, n, tail); else n is -1 */
} ont_reduction;
size_t ont_reduce_work(const ont_reduction *r);
int ont_launch_reduce(const ont_reduction *r, const void *x, void *y, void *work, void *stream);
/*
 * Sums of the columns of a matrix (rows, columns) that exists in pieces of rows: `parts` rows of partial sums of a
 * piece, which are in float32 for 16 bits; and y (columns) = scale * the sums of all partial ones.
 */
int64_t ont_column_parts(int dtype, int64_t rows, int64_t columns);
int ont_launch_column_parts(int dtype, int64_t rows, int64_t columns, const void *x, void *parts, void *stream);
int ont_launch_column_sum(int dtype, int64_t parts, int64_t columns, double scale, const void *x, void *y,
                          void *stream);

/*
 * norm.cu: `rows` rows of n elements. Scale, bias and statistics have the dtype, float32 or float64; any other operand
 * has it too, or is 16-bit where a bit of half_in or half_out says so. Absent operands are NULL.
 */
typedef struct ont_norm {
    int64_t rows, n;
    double eps;
    int32_t dtype, half, rms; /* half: dtype of 16-bit operands; rms: no mean is subtracted */
    uint32_t half_in, half_out;
} ont_norm;
/* in: x, scale, bias, addend to x; out: y, mean, inverse standard deviation, sum of x and addend, copy of y */
int ont_launch_norm(const ont_norm *s, const void *const *in, void *const *out, void *stream);
size_t ont_norm_grad_work(const ont_norm *s);
/* in: x, scale, mean, inverse standard deviation, dy, second dy, addend to dx; out: dx, dscale, dbias, copy of dx */
int ont_launch_norm_grad(const ont_norm *s, const void *const *in, void *const *out, void *work, void *stream);

/* softmax.cu: (outer, n, inner) along n; float32, float64, float16, bfloat16 */
typedef struct ont_softmax {
    int64_t outer, n, inner;
    int32_t dtype, log_form;
} ont_softmax;
int ont_launch_softmax(const ont_softmax *s, const void *x, void *y, void *stream);
int ont_launch_softmax_grad(const ont_softmax *s, const void *y, const void *dy, void *dx, void *stream);

/*
 * loss.cu: scores (rows, classes, inner), labels (rows, inner); float32, float64, float16, bfloat16. Statistics and,
 * where wide_loss and wide_weights say so, the loss with its gradient and the weights are in float32 for 16-bit scores;
 * all else has the dtype of the scores, but for a 16-bit gradient of float32 scores (grad_dtype). Where inner is 1,
 * scores and their gradient may have more columns than classes: the others are not read, and their gradient is 0.
 */
typedef struct ont_loss {
    int64_t rows, classes, inner, ignored, columns;
    int32_t dtype, grad_dtype, reduction; /* reduction: 0 none, 1 sum, 2 mean */
    int32_t ignores, wide, softmax, step; /* wide: labels are int64 */
    int32_t wide_loss, wide_weights;      /* 1 for float32 and float64 scores */
    ont_fault *fault;
} ont_loss;
size_t ont_loss_work(const ont_loss *s);
/* in: scores, labels, weights or NULL; out: loss, log-probabilities or NULL, statistics or NULL */
int ont_launch_loss(const ont_loss *s, const void *const *in, void *const *out, void *work, void *stream);
/* in: scores, labels, weights or NULL, dloss, statistics */
int ont_launch_loss_grad(const ont_loss *s, const void *const *in, void *dx, void *work, void *stream);

/*
 * The rows [first, first + rows) of a loss of s->rows rows, where inner is 1, wide_loss is 1 and there are no weights.
 * x: their scores (rows, columns), over which their gradient is written. All other operands are those of all rows:
 * labels, statistics, dloss, and terms (s->rows, 2), from which ont_launch_loss_sum() computes the loss. No label is
 * reported: ont_launch_loss_norm() reports those out of range, and counts the others in *norm. `scale`: of
 * ONT_PIECE_BOTH, the gradient of the loss itself.
 */
typedef enum ont_piece_kind { ONT_PIECE_LOSS, ONT_PIECE_GRAD, ONT_PIECE_BOTH } ont_piece_kind;
typedef struct ont_loss_piece {
    ont_piece_kind kind; /* LOSS: terms and, unless NULL, statistics; GRAD: from statistics and dloss; BOTH: terms */
    int64_t first, rows;
    const void *labels, *dloss;
    void *x, *stats;
    const double *norm;
    double *terms, scale;
} ont_loss_piece;
int ont_launch_loss_norm(const ont_loss *s, const void *labels, double *norm, void *stream);
int ont_launch_loss_piece(const ont_loss *s, const ont_loss_piece *p, void *stream);
int ont_launch_loss_sum(const ont_loss *s, const double *terms, void *loss, void *stream);

/* pool.cu: `indices` and, for the gradient of a maximum, x as in ops/pool/pool.c */
typedef struct ont_image_pool {
    ont_pool planes;
    int64_t channels; /* of images in channels last, which have no indices; else 1 */
} ont_image_pool;
int ont_launch_pool(int dtype, const ont_image_pool *p, const void *x, void *y, int64_t *indices, void *stream);
size_t ont_pool_grad_work(const ont_pool *p);
/* in: x, dy, and y of a p-norm */
int ont_launch_pool_grad(int dtype, const ont_image_pool *p, const void *const *in, void *dx, void *work, void *stream);

/* Values are written where MaxPool found them, and 0 elsewhere: of several at one cell the last one; `from` are the
 * dims in which indices count cells, `to` those of the result. Fewer than 2^31 elements. */
enum { ONT_UNPOOL_RANK = 12 };
typedef struct ont_unpool_shape {
    int64_t count, to_count, from_count;
    int64_t from[ONT_UNPOOL_RANK], to[ONT_UNPOOL_RANK];
    int32_t rank, size, step;
    ont_fault *fault;
} ont_unpool_shape;
/* last: an int32 for each element of y, all zero */
int ont_launch_unpool(const ont_unpool_shape *s, const void *x, const int64_t *indices, void *y, int32_t *last,
                      void *stream);
int ont_launch_unpool_grad(const ont_unpool_shape *s, const void *dy, const int64_t *indices, void *dx, void *stream);

/* batchnorm.cu: x (n, c, d), where d is 1 for rows of channels, as in channels last; scale, bias and statistics (c) are
 * float32 for 16-bit x, else of the dtype of x */
typedef struct ont_batchnorm {
    int64_t n, c, d;
    double eps, momentum;
    int32_t dtype, training, relu; /* relu: of y, in forward */
} ont_batchnorm;
size_t ont_batchnorm_work(const ont_batchnorm *s);
/* in: x, scale, bias, running mean, running variance, a residual that is added or NULL; out: y, and new mean, new
 * variance, saved mean, saved inverse standard deviation, each or NULL */
int ont_launch_batchnorm(const ont_batchnorm *s, const void *const *in, void *const *out, void *work, void *stream);
/* in: x, scale, mean, inverse standard deviation, dy, and of a Relu behind the norm its result or the norm's bias, each
 * or NULL */
int ont_launch_batchnorm_grad(const ont_batchnorm *s, const void *const *in, void *dx, void *dscale, void *dbias,
                              void *work, void *stream);
/* y (images, c, d) += bias (c) */
int ont_launch_channel_bias(int dtype, int64_t images, int64_t c, int64_t d, const void *bias, void *y, void *stream);

/* conv.cu: y (n, m, out) = x (n, c, in) * w (m, c / groups, kernel); spatial dims are right-aligned, absent ones
 * are 1. With channels_last: y (n, out, m) = x (n, in, c) * w (m, kernel, c / groups). Compared by its bytes. */
typedef enum ont_conv_kind { ONT_CONV_FORWARD, ONT_CONV_GRAD_INPUT, ONT_CONV_GRAD_WEIGHT } ont_conv_kind;
typedef struct ont_conv_shape {
    int64_t n, c, m, groups;
    int64_t in[3], out[3], kernel[3], stride[3], dilation[3], pad[3];
    int64_t in_count, out_count, kernel_count;
    int32_t dtype, spatial, channels_last, unused;
} ont_conv_shape;
/* first, second: x, w; or dy, w; or dy, x. Computes the last `count` elements of the result, of which to[0] is the
 * first. */
int ont_launch_conv(int kind, const ont_conv_shape *s, const void *first, const void *second, void *to, int64_t count,
                    void *stream);
/* y (count) = y < 0 ? 0 : y */
int ont_launch_relu(int dtype, void *y, int64_t count, void *stream);

/* group_norm.cu: x (n, groups, channels, d), fewer than 2^31 elements in a group; 16-bit x and y have float32 for what
 * is per channel or group */
typedef struct ont_groupnorm {
    int64_t n, groups, channels, d;
    double eps;
    int32_t dtype;
} ont_groupnorm;
/* in: x, scale, bias; out: y, and mean and inverse standard deviation (n, groups), each or NULL */
int ont_launch_groupnorm(const ont_groupnorm *s, const void *const *in, void *const *out, void *stream);
size_t ont_groupnorm_grad_work(const ont_groupnorm *s);
/* in: x, scale, mean, inverse standard deviation, dy; out: dx, dscale, dbias, each or NULL */
int ont_launch_groupnorm_grad(const ont_groupnorm *s, const void *const *in, void *const *out, void *work,
                              void *stream);

/* pad.cu: fewer than 2^31 elements */
enum { ONT_PAD_CONSTANT, ONT_PAD_REFLECT, ONT_PAD_EDGE, ONT_PAD_WRAP, ONT_PAD_RANK = 12 };
typedef struct ont_pad_shape {
    int32_t mode, rank;
    int32_t narrow[ONT_PAD_RANK], wide[ONT_PAD_RANK], low[ONT_PAD_RANK]; /* dims without and with pads */
    int64_t stride[ONT_PAD_RANK]; /* of the tensor without pads */
    int64_t narrow_count, wide_count;
    uint64_t fill; /* the bits of an element, where no value is given */
} ont_pad_shape;
int ont_launch_pad(const ont_pad_shape *p, int size, const void *x, const void *value, void *y, void *stream);
int ont_launch_pad_grad(const ont_pad_shape *p, int dtype, const void *dy, void *dx, void *stream);

/* resize.cu: words of 8 bytes, read at the call */
int ont_launch_upload(void *to, const void *host, size_t n_words, void *stream);
enum { ONT_RESAMPLE_RANK = 12, ONT_RESAMPLE_AXES = 3 };
typedef struct ont_resample {
    int32_t rank, dtype, size, copies; /* copies: elements of `size` bytes are copied, one for each */
    int64_t dims[ONT_RESAMPLE_RANK];   /* of the result; fewer than 2^31 elements */
    int64_t stride[ONT_RESAMPLE_RANK]; /* of the input, in elements */
    int32_t axis[ONT_RESAMPLE_RANK];   /* which of the resized axes a dim is, or -1 */
    int64_t count, axis_stride[ONT_RESAMPLE_AXES];
    /* places in the tables, in words: int32 first (n + 1), int32 index, double weight; int32 outside (n), or -1 */
    int64_t first[ONT_RESAMPLE_AXES], index[ONT_RESAMPLE_AXES], weight[ONT_RESAMPLE_AXES], outside[ONT_RESAMPLE_AXES];
    double extrapolation;
} ont_resample;
int ont_launch_resample(const ont_resample *r, const void *tables, const void *x, void *y, void *stream);

/* roi.cu: x (n, c, height, width) in float32 or float64; fewer than 2^31 elements */
typedef struct ont_roi_shape {
    int64_t rois, n, c, height, width, out_h, out_w, sampling, most_samples;
    double scale;
    int32_t half_pixel, maximum, align, dtype, step; /* align: RoiAlign; else MaxRoiPool */
    ont_fault *fault;
} ont_roi_shape;
size_t ont_roi_work(const ont_roi_shape *s, int gradient);
/* in: x, rois, images of RoiAlign or NULL, and dy of the gradient */
int ont_launch_roi(const ont_roi_shape *s, const void *const *in, void *y, void *work, void *stream);
int ont_launch_roi_grad(const ont_roi_shape *s, const void *const *in, void *dx, void *work, void *stream);

/* columns.cu: images (planes, in), columns (planes, kernel, out), fewer than 2^31 elements each; spatial dims are
 * right-aligned, absent ones are 1 */
typedef struct ont_column_shape {
    int64_t planes, in_count, out_count, kernel_count;
    int64_t in[3], out[3], kernel[3], stride[3], dilation[3], begin[3];
} ont_column_shape;
int ont_launch_im2col(const ont_column_shape *s, int size, const void *x, void *y, void *stream);
/* float32, float64, the 16-bit floats, int32, int64, uint64 */
int ont_launch_col2im(const ont_column_shape *s, int dtype, const void *x, void *y, void *stream);

/*
 * grid_sample.cu: x (images, channels, cells) is sampled between its cells into y (images, channels, points), of fewer
 * than 2^31 floats or doubles. A point is in a grid (images, points, rank), or is cell k of window o, at k *
 * windows + o, moved by offsets (images, window cells, rank, windows); a mask (images, points) or NULL scales y.
 */
typedef struct ont_sampling {
    ont_sampler sampler;
    int64_t images, channels, cells, points;
    int64_t windows; /* 0: a grid */
    int64_t out[3], kernel[3], stride[3], dilation[3], begin[3];
    int32_t dtype;
} ont_sampling;
/* in: x, grid or offsets, mask */
int ont_launch_sample(const ont_sampling *s, const void *const *in, void *y, void *stream);
/* Bytes of scratch for dx. */
size_t ont_sample_grad_work(const ont_sampling *s);
/* in: x, grid or offsets, mask, dy; out: dx, that of grid or offsets, dmask, each or NULL */
int ont_launch_sample_grad(const ont_sampling *s, const void *const *in, void *const *out, void *work, void *stream);

/* scan.cu: for the dtypes of ont_scan_accept() */
int ont_launch_scan(const ont_scan *s, const void *x, void *y, void *stream);
int ont_launch_product_grad(const ont_scan *s, const void *x, const void *dy, void *dx, void *stream);

/* index.cu: fewer than 2^31 elements in data, indices and updates */
enum { ONT_INDEX_NONE, ONT_INDEX_ADD, ONT_INDEX_MUL, ONT_INDEX_MAX, ONT_INDEX_MIN, ONT_INDEX_RANK = 12 };
typedef struct ont_index {
    int64_t count, slice;      /* of indices or tuples; elements that each names */
    int64_t places;            /* slices of the data */
    int32_t depth;             /* length of a tuple; 0: an index for each element, along an axis */
    int32_t rank, wide, from_end; /* rank: of the indices; wide: int64; from_end: indices below 0 are allowed */
    int64_t sizes[ONT_INDEX_RANK], strides[ONT_INDEX_RANK]; /* of the indexed dims, in slices; of an axis the first */
    int64_t per_batch, batch_slices;                        /* tuples, and slices of the data, of a batch */
    int64_t index_dims[ONT_INDEX_RANK], data_strides[ONT_INDEX_RANK]; /* an axis: stride 0 */
    int64_t along, inner;      /* an axis: its indices, and the elements after it */
    int32_t size, dtype, reduction, step;
    ont_fault *fault;
} ont_index;
int ont_launch_index_gather(const ont_index *s, const void *data, const void *indices, void *out, void *stream);
/* The place of each index or tuple, `places` where it is out of range. */
int ont_launch_places(const ont_index *s, const void *indices, int32_t *places, void *stream);
/* in: data, indices, updates. last (places) is zero before. out may be the data. */
int ont_launch_put(const ont_index *s, const void *const *in, void *out, int32_t *last, void *stream);
int ont_launch_index_add(int dtype, int64_t n, const void *data, const void *sums, void *out, void *stream);
/* out, which has the data, takes the updates in their order. */
int ont_launch_combine(const ont_index *s, const int32_t *places, const void *updates, void *out, void *stream);

/* The first `length` steps of a row are reversed, one length for each batch entry. Strides count elements; x has
 * `count` of them. */
typedef struct ont_reverse {
    int64_t count, batch, batch_stride, steps, time_stride;
    int32_t size, wide, step; /* wide: lengths are int64 */
    ont_fault *fault;
} ont_reverse;
int ont_launch_reverse(const ont_reverse *s, const void *x, const void *lengths, void *y, void *stream);
/* The places of `count` values in sorted rows of n: one row, or one for each `width` values; float32, float64, int32,
 * int64. */
typedef struct ont_sorted_search {
    int64_t count, n, width; /* width 0: one row */
    int32_t right, dtype;
} ont_sorted_search;
int ont_launch_search(const ont_sorted_search *s, const void *sorted, const void *values, int64_t *to, void *stream);

/* nonzero.cu: x of n elements, fewer than 2^31; those with a bit of the mask are not zero */
enum { ONT_NONZERO_RANK = 12 };
typedef struct ont_nonzero {
    int64_t n, found;
    uint64_t mask;
    int64_t dims[ONT_NONZERO_RANK];
    int32_t size, rank, step; /* size: bytes of an element */
    ont_fault *fault;
} ont_nonzero;
size_t ont_nonzero_work(const ont_nonzero *s);
int ont_launch_count_nonzero(const ont_nonzero *s, const void *x, int64_t *total, void *work, void *stream);
/* out (rank, found): the coordinates of each */
int ont_launch_nonzero(const ont_nonzero *s, const void *x, int64_t *out, void *work, void *stream);
/* Of marks, a vector: their count, rounded up to a multiple of `step`, at least 1, and to n from nine tenths on; and as
 * many as `found`: rows (found), of which spare ones repeat the first, and inverse (n), or NULL. */
int ont_launch_count_rows(const ont_nonzero *s, int64_t step, const void *marks, int64_t *count, void *work,
                          void *stream);
int ont_launch_select_rows(const ont_nonzero *s, const void *marks, int64_t *rows, int64_t *inverse, void *work,
                           void *stream);

/* pack.cu: operators of csrc/ops/index/rows.h. marks (n): true for each number whose entry of `among` is, or all where
 * that is NULL; work: 4 n bytes, which are zero. */
int ont_launch_mark_rows(int64_t m, const int64_t *numbers, const uint8_t *among, int64_t n, void *work, uint8_t *marks,
                         void *stream);
/* rows (m) and inverse (n), or NULL, of a subset within a set. in: rows and inverse of the set, of the subset */
int ont_launch_rows_within(int64_t n, int64_t m, const int64_t *const *in, int64_t *rows, int64_t *inverse,
                           void *stream);
/* y (rows, width): rows of x by the numbers in `rows`, or with `unpacks` by `inverse`. Spare rows, or those that are
 * not there, are `fill` if `fills`. */
typedef struct ont_row_copy {
    int64_t rows, width;
    uint64_t fill; /* the bits of an element */
    int32_t size, unpacks, fills; /* size: bytes of an element */
} ont_row_copy;
int ont_launch_copy_rows(const ont_row_copy *s, const void *x, const int64_t *rows, const int64_t *inverse, void *y,
                         void *stream);
/* x and y (rows, width): row i drops what row numbers[i] of the tensor before packing would */
typedef struct ont_row_dropout {
    int64_t rows, width;
    uint64_t stream; /* as ont_dropout_word() takes it */
    double scale;
    uint32_t threshold;
    int32_t dtype;
} ont_row_dropout;
int ont_launch_row_dropout(const ont_row_dropout *s, const uint64_t *random, const void *x, const int64_t *numbers,
                           void *y, void *stream);

/* sort.cu: fewer than 2^31 elements */
typedef struct ont_unique {
    int64_t outer, n, inner; /* n items of outer * inner elements */
    int32_t dtype, sorted;
} ont_unique;
/* (n) each: first item and number of items of each unique value, 0 behind the last; unique value of each item; the
 * number of unique values. Each may be NULL. */
typedef struct ont_unique_results {
    int64_t *first, *inverse, *counts, *count;
} ont_unique_results;
size_t ont_unique_work(const ont_unique *s);
int ont_launch_unique(const ont_unique *s, const void *x, const ont_unique_results *to, void *work, void *stream);
typedef struct ont_nms {
    int64_t batches, classes, n;
    int32_t centre;
} ont_nms;
size_t ont_nms_work(const ont_nms *s);
/* in: boxes (batches, n, 4), scores (batches, classes, n), and of NmsFull most boxes (int64), overlap and score, each
 * or NULL; rows (batches * classes * n, 3) */
int ont_launch_nms(const ont_nms *s, const void *const *in, int64_t *rows, int64_t *total, void *work, void *stream);

/* det.cu: x (batch, n, n) in float32 or float64 */
size_t ont_det_work(int64_t batch, int64_t n, int gradient);
int ont_launch_det(int dtype, int64_t batch, int64_t n, const void *x, void *y, void *work, void *stream);
/* in: x, dy */
int ont_launch_det_grad(int dtype, int64_t batch, int64_t n, const void *const *in, void *dx, void *work, void *stream);

/* ctc.cu: log-probabilities (steps, batch, classes) in float32 or float64; targets (batch, padded), or all in a row
 * (padded: -1) */
typedef struct ont_ctc {
    int64_t steps, batch, classes, padded, total, blank; /* total: number of targets */
    int32_t zero_infinity, dtype, step;
    int32_t wide[3]; /* targets, input lengths and target lengths are int64 */
    ont_fault *fault;
} ont_ctc;
size_t ont_ctc_work(const ont_ctc *s, int gradient);
/* in: log-probabilities, targets, input lengths, target lengths, and for the gradient dloss (batch) */
int ont_launch_ctc(const ont_ctc *s, const void *const *in, void *losses, void *work, void *stream);
int ont_launch_ctc_grad(const ont_ctc *s, const void *const *in, void *dx, void *work, void *stream);

/* select.cu: x (outer, n, inner) along n; the first k, in order; float32, float64, int32, int64, uint64 */
enum { ONT_SELECT_LARGEST, ONT_SELECT_SMALLEST, ONT_SELECT_ASCENDING };
typedef struct ont_select {
    int64_t outer, n, inner, k;
    int32_t kind, last, dtype; /* last: among equals the last one; ascending: the smallest with NaN above all */
} ont_select;
/* Whether the launch needs memory for the positions. */
int ont_select_needs_positions(const ont_select *s);
/* values may be NULL, and positions (int64) where they are not needed. */
int ont_launch_select(const ont_select *s, const void *x, void *values, void *positions, void *stream);

/* grouped.cu: x (rows, k), w (groups, k, n) or transposed, ends; of the gradient rows (rows, k) and (rows, n) */
typedef struct ont_grouped {
    int64_t rows, groups, k, n;
    int32_t dtype, wide, trans, step; /* wide: ends are int64 */
    ont_fault *fault;
} ont_grouped;
int64_t ont_grouped_blocks(const ont_grouped *s, int gradient);
int ont_launch_grouped(const ont_grouped *s, int gradient, const void *const *in, void *out, void *stream);

/* recurrent.cu: step t of all sequences; rows of `gates` and of `runs` times `hidden` numbers in float32 or float64 */
typedef struct ont_cell_step {
    int64_t batch, hidden, t;
    int32_t cell, gates, runs, dtype; /* cell: ont_cell */
} ont_cell_step;
/* As in ont_cell_row and ont_cell_grad_row, for all sequences; bias, lengths (int64), y, dy and dx may be NULL. */
typedef struct ont_cell_operands {
    const void *x, *q, *bias, *lengths;
    void *h, *c, *saved, *y; /* c: LSTM alone */
} ont_cell_operands;
int ont_launch_cell(const ont_cell_step *s, const ont_cell_operands *o, void *stream);
typedef struct ont_cell_grad_operands {
    const void *saved, *lengths, *dy, *dr;
    void *dh, *dc, *dq, *dx;
} ont_cell_grad_operands;
int ont_launch_cell_grad(const ont_cell_step *s, const ont_cell_grad_operands *o, void *stream);
/* Copies of `count` elements of 2, 4 or 8 bytes each: the matrices and biases of a recurrent layer, in one launch. */
enum { ONT_RNN_PARTS = 32 };
typedef struct ont_rnn_part {
    const void *from;
    void *to;
    int64_t count;
} ont_rnn_part;
typedef struct ont_rnn_parts {
    ont_rnn_part part[ONT_RNN_PARTS];
    int32_t n, size;
} ont_rnn_parts;
int ont_launch_rnn_parts(const ont_rnn_parts *parts, void *stream);
/* sums (n) over rows that are `pitch` apart */
int ont_launch_column_sums(int dtype, int64_t rows, int64_t n, int64_t pitch, const void *x, void *sums, void *stream);

#ifdef __cplusplus
}
#endif
#endif
