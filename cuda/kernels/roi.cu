/*
 * RoiAlign, MaxRoiPool and their gradients to the features. The regions are read once, by a thread each, in float64 as
 * on the CPU. The gradient gathers, so that the result does not depend on the order of threads: a thread for each cell
 * of some channels goes through all regions, and adds the bins of those over its cell; of a maximum, a bin's cell is
 * found first. It reads every region for each cell and CHANNELS channels: regions * cells * channels / CHANNELS.
 */
#include "kernels/launch.cuh"

#include "kernels/kernels.h"

#ifdef ONT_EMULATE
enum { CHANNELS = 2 };
#else
enum { CHANNELS = 8 };
#endif

struct region {
    int64_t image; /* -1: invalid */
    double top, left, bin_h, bin_w;
    int64_t grid_h, grid_w;
    int64_t low[2], high[2]; /* rows and columns that may have a part in it: low to high */
};

ONT_DEVICE double at_least(double a, double b) { return a > b ? a : b; }
ONT_DEVICE double at_most(double a, double b) { return a < b ? a : b; }

/* Cells that samples from `first` to `last` may read, and one more on each side. */
ONT_DEVICE void reach(double first, double last, int64_t size, int64_t *low, int64_t *high)
{
    const double a = at_most(first, last) - 2, b = at_least(first, last) + 2, top = (double)(size - 1);
    *low = (int64_t)at_most(at_least(floor(a), 0), top);
    *high = (int64_t)at_most(at_least(ceil(b), 0), top);
}

/* batch: of RoiAlign, int64; else the first of five columns */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    roi_regions_kernel(const ont_roi_shape s, const T *rois, const int64_t *batch, region *to)
{
    const int columns = s.align ? 4 : 5;
    ONT_FOR(r, s.rois)
    {
        const double image = s.align ? (double)batch[r] : (double)rois[r * columns];
        region box = {};
        double edge[4];
        bool fits = true;
        to[r].image = -1;
        if (!(image >= 0 && image < (double)s.n)) {
            ont_report(s.fault, ONT_FAULT_INDEX, s.step, fabs(image) < 1e15 ? (int64_t)image : -1, r, s.n);
            continue;
        }
        for (int i = 0; i < 4; i++) {
            const double v = (double)rois[r * columns + columns - 4 + i] * s.scale;
            fits = fits && fabs(v) < 1e9;
            edge[i] = s.align ? v - (s.half_pixel ? 0.5 : 0) : round(v);
        }
        double width = edge[2] - edge[0], height = edge[3] - edge[1];
        if (!s.align || !s.half_pixel) {
            width = at_least(width + (s.align ? 0 : 1), 1);
            height = at_least(height + (s.align ? 0 : 1), 1);
        }
        box.image = (int64_t)image;
        box.top = edge[1];
        box.left = edge[0];
        box.bin_h = height / (double)s.out_h;
        box.bin_w = width / (double)s.out_w;
        if (fits && s.align) {
            box.grid_h = s.sampling ? s.sampling : (int64_t)at_least(ceil(box.bin_h), 0);
            box.grid_w = s.sampling ? s.sampling : (int64_t)at_least(ceil(box.bin_w), 0);
            fits = box.grid_h <= s.most_samples && box.grid_w <= s.most_samples;
        }
        if (!fits) {
            ont_report(s.fault, ONT_FAULT_REGION, s.step, 0, r, s.most_samples);
            continue;
        }
        reach(box.top, box.top + height, s.height, &box.low[0], &box.high[0]);
        reach(box.left, box.left + width, s.width, &box.low[1], &box.high[1]);
        to[r] = box;
    }
}

/* Two cells along an axis around a sample, and their weights; false where the sample is outside. */
struct pair_of_cells {
    int64_t cell[2];
    double weight[2];
};

ONT_DEVICE bool cells_around(double v, int64_t size, pair_of_cells *p)
{
    if (v < -1 || v > (double)size) return false;
    v = at_least(v, 0);
    int64_t first = (int64_t)v, second = first + 1;
    if (first >= size - 1) {
        second = first = size - 1;
        v = (double)first;
    }
    const double f = v - (double)first;
    p->cell[0] = first;
    p->cell[1] = second;
    p->weight[0] = 1 - f;
    p->weight[1] = f;
    return true;
}

ONT_DEVICE double sample_place(double start, int64_t bin, int64_t k, int64_t n, double size)
{
    return start + ((double)bin + ((double)k + 0.5) / (double)n) * size;
}

/* The whole cells of bin i along an axis: [from, to). */
ONT_DEVICE void cells_of(double start, double size, int64_t i, int64_t cells, int64_t *from, int64_t *to)
{
    const double low = floor((double)i * size) + start, high = ceil((double)(i + 1) * size) + start;
    *from = (int64_t)at_most(at_least(low, 0), (double)cells);
    *to = (int64_t)at_most(at_least(high, 0), (double)cells);
}

/* What a bin is: its value; of a maximum also its cell, or -1, and the weight of that cell. In float64, as on the CPU:
 * of equal values the first is taken. */
struct bin_value {
    double value, weight;
    int64_t cell;
};

template <class T>
ONT_DEVICE bin_value align_bin(const ont_roi_shape &s, const region &r, int64_t i, int64_t j, const T *x)
{
    bin_value best = {0, 0, -1};
    double sum = 0;
    bool any = false;
    for (int64_t a = 0; a < r.grid_h; a++)
        for (int64_t b = 0; b < r.grid_w; b++) {
            pair_of_cells y, z;
            const bool row = cells_around(sample_place(r.top, i, a, r.grid_h, r.bin_h), s.height, &y);
            const bool inside = cells_around(sample_place(r.left, j, b, r.grid_w, r.bin_w), s.width, &z) && row;
            for (int t = 0; t < 4; t++) {
                const int64_t cell = inside ? y.cell[t >> 1] * s.width + z.cell[t & 1] : -1;
                const double w = inside ? y.weight[t >> 1] * z.weight[t & 1] : 0, v = inside ? w * (double)x[cell] : 0;
                sum += v;
                if (!s.maximum || (any && !(v > best.value))) continue;
                best.value = v;
                best.weight = w;
                best.cell = cell;
                any = true;
            }
        }
    if (!s.maximum) best.value = sum / at_least((double)(r.grid_h * r.grid_w), 1);
    return best;
}

template <class T>
ONT_DEVICE bin_value pool_bin(const ont_roi_shape &s, const region &r, int64_t i, int64_t j, const T *x)
{
    bin_value best = {0, 1, -1};
    int64_t rows[2], columns[2];
    cells_of(r.top, r.bin_h, i, s.height, &rows[0], &rows[1]);
    cells_of(r.left, r.bin_w, j, s.width, &columns[0], &columns[1]);
    for (int64_t a = rows[0]; a < rows[1]; a++)
        for (int64_t b = columns[0]; b < columns[1]; b++) {
            const double v = (double)x[a * s.width + b];
            if (best.cell >= 0 && !(v > best.value)) continue;
            best.value = v;
            best.cell = a * s.width + b;
        }
    return best;
}

/* y (rois, c, out_h, out_w), or of a maximum the cells and their weights; the others are NULL. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    roi_bins_kernel(const ont_roi_shape s, const region *regions, const T *x, T *y, int32_t *cells, T *weights)
{
    const int64_t bins = s.out_h * s.out_w;
    ONT_FOR(n, s.rois * s.c * bins)
    {
        const int64_t k = n % bins, c = n / bins % s.c;
        const region r = regions[n / bins / s.c];
        bin_value bin = {0, 0, -1};
        if (r.image >= 0) {
            const T *plane = x + (r.image * s.c + c) * s.height * s.width;
            bin = s.align ? align_bin<T>(s, r, k / s.out_w, k % s.out_w, plane)
                          : pool_bin<T>(s, r, k / s.out_w, k % s.out_w, plane);
        }
        if (y) y[n] = (T)bin.value;
        if (cells) cells[n] = (int32_t)bin.cell;
        if (weights) weights[n] = (T)bin.weight;
    }
}

/* The weight of cell `at` in a bin along an axis; false where no sample reads it. */
ONT_DEVICE bool weight_in_bin(double start, double size, int64_t bin, int64_t n, int64_t at, int64_t cells, double *sum)
{
    bool reads = false;
    *sum = 0;
    for (int64_t k = 0; k < n; k++) {
        pair_of_cells p;
        if (!cells_around(sample_place(start, bin, k, n, size), cells, &p)) continue;
        for (int t = 0; t < 2; t++) {
            if (p.cell[t] != at) continue;
            *sum += p.weight[t];
            reads = true;
        }
    }
    return reads;
}

/* cells is NULL for an average. */
template <class T>
__global__ void __launch_bounds__(ONT_THREADS)
    roi_grad_kernel(const ont_roi_shape s, const region *regions, const int32_t *cells, const T *weights, const T *dy,
                    T *dx)
{
    const int64_t plane = s.height * s.width, bins = s.out_h * s.out_w, chunks = (s.c + CHANNELS - 1) / CHANNELS;
    ONT_FOR(n, s.n * chunks * plane)
    {
        const int64_t cell = n % plane, image = n / plane / chunks, first = n / plane % chunks * CHANNELS;
        const int64_t at[2] = {cell / s.width, cell % s.width};
        const int m = s.c - first < CHANNELS ? (int)(s.c - first) : (int)CHANNELS;
        T sum[CHANNELS];
        for (int c = 0; c < CHANNELS; c++) sum[c] = 0;
        for (int64_t r = 0; r < s.rois; r++) {
            const region box = regions[r];
            if (box.image != image || at[0] < box.low[0] || at[0] > box.high[0] || at[1] < box.low[1] ||
                at[1] > box.high[1])
                continue;
            const int64_t from = (r * s.c + first) * bins;
            const double count = at_least((double)(box.grid_h * box.grid_w), 1);
            for (int64_t i = 0; i < s.out_h; i++) {
                double row = 0;
                if (!cells && !weight_in_bin(box.top, box.bin_h, i, box.grid_h, at[0], s.height, &row)) continue;
                for (int64_t j = 0; j < s.out_w; j++) {
                    double column = 0;
                    const int64_t k = from + i * s.out_w + j;
                    if (!cells && !weight_in_bin(box.left, box.bin_w, j, box.grid_w, at[1], s.width, &column)) continue;
                    for (int c = 0; c < CHANNELS; c++) {
                        if (c >= m) continue;
                        if (!cells)
                            sum[c] += (T)(row * column / count) * dy[k + c * bins];
                        else if (cells[k + c * bins] == cell)
                            sum[c] += weights[k + c * bins] * dy[k + c * bins];
                    }
                }
            }
        }
        for (int c = 0; c < CHANNELS; c++)
            if (c < m) dx[(image * s.c + first + c) * plane + cell] = sum[c];
    }
}

/* Regions, and of the gradient of a maximum the cells of bins and their weights. */
struct parts {
    size_t weights, cells, bytes;
};

static parts parts_of(const ont_roi_shape *s, int gradient)
{
    const int64_t n = gradient && (s->maximum || !s->align) ? s->rois * s->c * s->out_h * s->out_w : 0;
    parts p;
    p.weights = (size_t)s->rois * sizeof(region);
    p.cells = p.weights + (size_t)n * (s->dtype == ONT_FLOAT64 ? sizeof(double) : sizeof(float));
    p.bytes = p.cells + (size_t)n * sizeof(int32_t);
    return p;
}

extern "C" size_t ont_roi_work(const ont_roi_shape *s, int gradient) { return parts_of(s, gradient).bytes; }

template <class T> static int read_regions(const ont_roi_shape *s, const void *const *in, void *work, void *stream)
{
    return ONT_LAUNCH(roi_regions_kernel<T>, ont_blocks(s->rois, ONT_THREADS), ONT_THREADS, 0, stream, *s,
                      (const T *)in[1], (const int64_t *)in[2], (region *)work);
}

template <class T>
static int read_bins(const ont_roi_shape *s, const void *work, const void *x, T *y, int32_t *cells, T *weights,
                     void *stream)
{
    const int64_t n = s->rois * s->c * s->out_h * s->out_w;
    if (!n) return 0;
    return ONT_LAUNCH(roi_bins_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s, (const region *)work,
                      (const T *)x, y, cells, weights);
}

template <class T>
static int forward(const ont_roi_shape *s, const void *const *in, void *y, void *work, void *stream)
{
    const int error = s->rois ? read_regions<T>(s, in, work, stream) : 0;
    return error ? error : read_bins<T>(s, work, in[0], (T *)y, nullptr, nullptr, stream);
}

template <class T>
static int backward(const ont_roi_shape *s, const void *const *in, void *dx, void *work, void *stream)
{
    const parts p = parts_of(s, 1);
    const bool finds = s->maximum || !s->align;
    T *weights = finds ? (T *)((char *)work + p.weights) : nullptr;
    int32_t *cells = finds ? (int32_t *)((char *)work + p.cells) : nullptr;
    const int64_t n = s->n * ((s->c + CHANNELS - 1) / CHANNELS) * s->height * s->width;
    int error = s->rois ? read_regions<T>(s, in, work, stream) : 0;
    if (!error && finds) error = read_bins<T>(s, work, in[0], (T *)nullptr, cells, weights, stream);
    if (error || !n) return error;
    return ONT_LAUNCH(roi_grad_kernel<T>, ont_blocks(n, ONT_THREADS), ONT_THREADS, 0, stream, *s, (const region *)work,
                      (const int32_t *)cells, (const T *)weights, (const T *)in[3], (T *)dx);
}

extern "C" int ont_launch_roi(const ont_roi_shape *s, const void *const *in, void *y, void *work, void *stream)
{
    return s->dtype == ONT_FLOAT64 ? forward<double>(s, in, y, work, stream) : forward<float>(s, in, y, work, stream);
}

extern "C" int ont_launch_roi_grad(const ont_roi_shape *s, const void *const *in, void *dx, void *work, void *stream)
{
    return s->dtype == ONT_FLOAT64 ? backward<double>(s, in, dx, work, stream)
                                   : backward<float>(s, in, dx, work, stream);
}
