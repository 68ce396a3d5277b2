/*
 * std::partial_sort, std::nth_element and std::sort, with the algorithms of libstdc++ (bits/stl_heap.h, stl_algo.h):
 * the C++ standard does not specify their treatment of ties, on which torch's results depend.
 */
#include "ops/reduce/introselect.h"

static bool less(const ont_ranked *a, const ont_ranked *b) { return a->rank < b->rank; }

static void swap(ont_ranked *a, ont_ranked *b)
{
    ont_ranked held = *a;
    *a = *b;
    *b = held;
}

/* ---- heaps, with the highest rank at the root ---- */

/* Puts `value` into the heap of n whose entry `hole` is free: down to a leaf, then up. */
static void adjust_heap(ont_ranked *x, int64_t hole, int64_t n, ont_ranked value)
{
    int64_t top = hole, child = hole;
    while (child < (n - 1) / 2) {
        child = 2 * (child + 1);
        if (less(&x[child], &x[child - 1])) child--;
        x[hole] = x[child];
        hole = child;
    }
    if (!(n & 1) && child == (n - 2) / 2) {
        child = 2 * (child + 1);
        x[hole] = x[child - 1];
        hole = child - 1;
    }
    for (int64_t parent = (hole - 1) / 2; hole > top && less(&x[parent], &value); parent = (hole - 1) / 2) {
        x[hole] = x[parent];
        hole = parent;
    }
    x[hole] = value;
}

/* Moves the root of the heap of n to *to, and the old *to into the heap. */
static void pop_heap(ont_ranked *x, int64_t n, ont_ranked *to)
{
    ont_ranked value = *to;
    *to = x[0];
    adjust_heap(x, 0, n, value);
}

/* Makes a heap of the k lowest of n. */
static void heap_select(ont_ranked *x, int64_t k, int64_t n)
{
    for (int64_t parent = (k - 2) / 2; k > 1 && parent >= 0; parent--) adjust_heap(x, parent, k, x[parent]);
    for (int64_t i = k; i < n; i++)
        if (less(&x[i], &x[0])) pop_heap(x, k, &x[i]);
}

static void sort_heap(ont_ranked *x, int64_t n)
{
    for (; n > 1; n--) pop_heap(x, n - 1, &x[n - 1]);
}

/* ---- partitions ---- */

static void median_to(ont_ranked *to, ont_ranked *a, ont_ranked *b, ont_ranked *c)
{
    if (less(a, b))
        swap(to, less(b, c) ? b : less(a, c) ? c : a);
    else
        swap(to, less(a, c) ? a : less(b, c) ? c : b);
}

/* Partitions [first, last) around a median of three, moved first. Returns the start of the upper part. */
static ont_ranked *partition(ont_ranked *first, ont_ranked *last)
{
    const ont_ranked *pivot = first;
    median_to(first, first + 1, first + (last - first) / 2, last - 1);
    for (first++;; first++) {
        while (less(first, pivot)) first++;
        last--;
        while (less(pivot, last)) last--;
        if (first >= last) return first;
        swap(first, last);
    }
}

static void insertion_sort(ont_ranked *x, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        ont_ranked value = x[i];
        int64_t to = i;
        for (; to > 0 && less(&value, &x[to - 1]); to--) x[to] = x[to - 1];
        x[to] = value;
    }
}

static int twice_log2(int64_t n)
{
    int log = 0;
    while (n >>= 1) log++;
    return 2 * log;
}

enum { SMALL = 16 };

/* Sorts down to unsorted parts of at most SMALL entries; insertion sort does the rest. */
static void introsort(ont_ranked *x, int64_t n, int depth)
{
    while (n > SMALL) {
        if (!depth--) {
            heap_select(x, n, n);
            sort_heap(x, n);
            return;
        }
        int64_t cut = partition(x, x + n) - x;
        introsort(x + cut, n - cut, depth);
        n = cut;
    }
}

static void sort(ont_ranked *x, int64_t n)
{
    if (n) introsort(x, n, twice_log2(n));
    insertion_sort(x, n);
}

/* Puts entry k in its sorted position, lower ones before it. */
static void nth_element(ont_ranked *x, int64_t k, int64_t n)
{
    for (int depth = twice_log2(n); n > 3;) {
        if (!depth--) {
            heap_select(x, k + 1, n);
            swap(&x[0], &x[k]);
            return;
        }
        int64_t cut = partition(x, x + n) - x;
        if (cut <= k) {
            x += cut;
            k -= cut;
            n -= cut;
        } else {
            n = cut;
        }
    }
    insertion_sort(x, n);
}

void ont_lowest_first(ont_ranked *x, int64_t n, int64_t k, bool sorted)
{
    if (!k) return;
    if (k <= n / 64) {
        heap_select(x, k, n);
        sort_heap(x, k);
        return;
    }
    nth_element(x, k - 1, n);
    if (sorted) sort(x, k - 1);
}
