"""What each kernel of a device costs on an H100, by a model: bytes, launches, arithmetic, and steps that wait for each
other. times.py prints tables of whole training steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import sass
import torch
from h100 import C, Cost, all_bytes, is_half, product_seconds, rate_of, up
from planned import SIZES, Node, Value
from sequence_costs import ctc, recurrent_layer, recurrent_layer_grad, recurrent_steps, recurrent_steps_grad

# ---- products ----

def sizes_of_product(node: Node) -> tuple[int, int, int, int]:
    """m, n, k and the number of products, as cuda/ops/matmul.c reads them."""
    a, b = ((1, *v.shape) if i == 0 and len(v.shape) == 1 else (*v.shape, 1) if len(v.shape) == 1 else v.shape
            for i, v in enumerate(node.inputs[:2]))
    if node.attributes.get("transA", 0):
        a = (*a[:-2], a[-1], a[-2])
    if node.attributes.get("transB", 0):
        b = (*b[:-2], b[-1], b[-2])
    batch, m = math.prod(node.outputs[0].shape) // (a[-2] * b[-1]), a[-2]
    if math.prod(b[:-2]) == 1 and not node.attributes.get("transA", 0):
        return m * batch, b[-1], a[-1], 1
    return m, b[-1], a[-1], batch


def product(node: Node) -> Cost:
    m, n, k, batch = sizes_of_product(node)
    added, result = node.input(2), node.outputs[0]
    is_bias = added is not None and added.count == n and added.shape[-1:] == (n,) and added.dtype == result.dtype
    spreads = (added is not None and not node.op.startswith("Gelu") and not is_bias
               and node.attributes.get("beta", 1.0) != 0)
    return Cost("products", 1 + spreads, all_bytes(node) + spreads * 2 * result.nbytes,
                product_seconds(m, n, k, batch, rate_of(node.inputs[0])), 2.0 * m * n * k * batch, foreign=1)


# ---- attention ----

class Attention(NamedTuple):
    heads: int  # times batch
    queries: int
    keys: int
    width: int  # of Q and K
    width_v: int
    causal: bool

    @property
    def scores(self) -> float:
        """That are not masked, over all heads; half of them if causal, as publications count."""
        return self.heads * self.queries * self.keys * (0.5 if self.causal else 1.0)

    @property
    def flops(self) -> float:
        """Of the forward products."""
        return 2.0 * self.scores * (self.width + self.width_v)


def attention_of(node: Node) -> Attention:
    queries, keys, width, width_v = node.attributes["sizes"]
    heads = math.prod(node.attributes["batch_dims"])
    return Attention(heads, queries, keys, width, width_v, bool(node.attributes.get("causal", 0)))


def published(a: Attention, gradient: bool) -> float:
    """cuDNN's FLOP/s."""
    width = 64 if a.width <= 64 else 128
    full, causal = C[f"forward full {width}"], C[f"forward causal {width}"]
    rate = C[f"gradient full {width}"] if gradient else full
    return rate * (causal / full if a.causal else 1.0) * (C["longer"] if a.queries >= 2048 else 1.0)


def attention_dnn(node: Node) -> Cost:
    """cuDNN, and a kernel that converts the statistics."""
    a = attention_of(node)
    return Cost("attention", 2, all_bytes(node), a.flops / published(a, False), a.flops, foreign=1)


def attention_grad_dnn(node: Node) -> Cost:
    """Two and a half times forward's products. The deterministic kernel stores the scores' gradients in 16 bits, and
    reads them for dQ in a kernel of its own, which waits for memory.
    """
    a = attention_of(node)
    return Cost("attention", 4, all_bytes(node) + 4.0 * a.scores,
                2.5 * a.flops / published(a, True) + 2.0 * a.scores / C["copy"], 2.5 * a.flops, foreign=3)


def searches(node: Node) -> int:
    """Launches that look for tiles which bias and mask hide, as ont_flash_tiles_bytes() decides."""
    a, masks = attention_of(node), [node.input(i) for i in (3, 4, 5)]
    layouts = [node.attributes[name] for name, x in zip(("bias", "mask", "masked_rows"), masks) if x is not None]
    hides = masks[0] is not None or masks[1] is not None and node.attributes.get("mask_value", -math.inf) < -1e30
    dims = node.attributes["batch_dims"]
    heads = math.prod(dim for d, dim in enumerate(dims) if not any(v[1 + d] for v in layouts))
    has_rows = any(v[1 + len(dims)] for v in layouts)
    found = hides and a.keys > 32 and node.inputs[0].dtype != "double" and (heads > 1 or not has_rows)
    return 2 if found else 0


def own_attention(node: Node, kernel: str, products: int) -> float:
    """Seconds of one of the kernels of flash_mma.cuh: of its loop over tiles, by loops.tsv, that unit is counted which is
    busy longest. No tile is taken to be hidden, since the program does not know what padding a batch will have: an upper
    bound for a batch with padding, and else a lower one.
    """
    a = attention_of(node)
    loop = sass.read_table().get(f"{kernel}<{64 if a.width <= 64 else 128}>")
    if loop is None or not is_half(node.inputs[0]):  # tiles in float32: four multiply-adds at once and no tensor cores
        return products * a.flops / 2 / (0.5 * C["float32"])
    per_score = sass.cycles(loop) / loop.scores
    return a.scores * per_score / (C["multiprocessors"] * C["clock"])


def attention_own(node: Node) -> Cost:
    a = attention_of(node)
    return Cost("attention", 1 + searches(node), all_bytes(node), own_attention(node, "flash_mma_kernel", 2), a.flops)


def attention_grad_own(node: Node) -> Cost:
    """Sums of dy * y, dQ with three products, dK and dV with four: seven, where five would do. Where heads share either
    K or V alone, dK and dV have a kernel with three products each.
    """
    a = attention_of(node)
    shared = [[stride == 0 for stride in node.attributes[name][1:-1]] for name in "kv"]
    passes = 1 if shared[0] == shared[1] else 2
    busy = own_attention(node, "flash_mma_dq_kernel", 3)
    busy += own_attention(node, "flash_mma_dkv_kernel", 4) * (1.0 if passes == 1 else 1.5)
    return Cost("attention", 2 + passes + searches(node), all_bytes(node), busy, 2.5 * a.flops)


# ---- what is bound by memory ----

def elementwise(node: Node) -> Cost:
    """One pass over all operands. Groups are taken to be generated; the interpreter is slower."""
    sources = {value.source for value in node.inputs if value is not None and value.count > 1}
    is_weight = node.op in ("Cast", "FusedElementwise") and sources == {"input"} and is_half(node.outputs[0])
    return Cost("weights in 16 bits" if is_weight else "norms, elementwise", 1, all_bytes(node),
                share=C["elementwise"])


def copy(node: Node) -> Cost:
    moved = 2 * sum(value.nbytes for value in node.outputs if value is not None)
    launches = sum(value is not None for value in node.outputs)
    if node.op == "Concat":
        launches = len(node.inputs)
    if node.op == "PutSlice":  # zeros, and then the slice
        return Cost("copies", 2, moved / 2 + 2 * node.inputs[0].nbytes, share=C["transpose"], foreign=1)
    return Cost("copies", launches, moved, share=C["transpose"])


def gather(node: Node) -> Cost:
    return Cost("embeddings", 1, node.inputs[1].nbytes + 2 * node.outputs[0].nbytes, share=C["transpose"])


def sorted_sums(part: str, count: int, places: int, rows: Value, result: Value) -> Cost:
    """Of `count` rows whose indices are below `places`, in one order: zeros; the sort, with three kernels for each byte
    of an index; sums over pieces of 32 rows, and over pieces.
    """
    passes = max(1, up(places.bit_length(), 8))
    partial = 2 * up(count, 32) * 4.0 * rows.count / max(count, 1)
    return Cost(part, 2 + 3 * passes + 1 + (count > 32), result.nbytes + 2 * rows.nbytes + 2 * partial,
                share=C["transpose"], serial=passes * up(256 * up(count, 512), 256) * C["scan"], foreign=1)


def gather_grad(node: Node) -> Cost:
    dy, index, table = *node.inputs[:2], node.outputs[0]
    return sorted_sums("embeddings", index.count, table.shape[node.attributes.get("axis", 0)], dy, table)


# ---- indices, positions and counts ----

def index_gather(node: Node) -> Cost:
    return gather(node)._replace(part="copies")


def places_of(node: Node, data: Value, index: Value) -> tuple[int, int]:
    """Slices of the data that an index may name, and how many are named."""
    if "ND" not in node.op:
        return data.count, index.count
    depth = index.shape[-1] + node.attributes.get("batch_dims", 0)
    return math.prod(data.shape[:depth]), index.count // index.shape[-1]


def sums_by_place(node: Node, data: Value, index: Value, rows: Value) -> Cost:
    """A kernel that finds the places, and sums by place."""
    places, count = places_of(node, data, index)
    sums = sorted_sums("copies", count, places, rows, data)
    return sums._replace(launches=1 + sums.launches, nbytes=sums.nbytes + index.nbytes + 8.0 * count)


def gather_nd_grad(node: Node) -> Cost:
    return sums_by_place(node, node.outputs[0], node.inputs[1], node.inputs[0])


def scatter(node: Node) -> Cost:
    """Without a reduction: zeros, the last update of each place, and the result. Floats that are added: sums by place,
    and an addition. Others: a copy, places, and the updates one after another.
    """
    data, index, updates = node.inputs[:3]
    reduction = node.attributes.get("reduction", b"none")
    if reduction == b"add" and data.dtype in ("float", "double", "float16", "bfloat16"):
        sums = sums_by_place(node, data, index, updates)
        return sums._replace(launches=1 + sums.launches, nbytes=sums.nbytes + 3.0 * data.nbytes)
    places, count = places_of(node, data, index)
    moved = index.nbytes + updates.nbytes + 2.0 * data.nbytes
    if reduction == b"none":
        return Cost("copies", 3, moved + 4.0 * (2 * places + 2 * count), share=C["transpose"], foreign=1)
    last = count if "ND" in node.op else index.shape[node.attributes.get("axis", 0)]
    return Cost("copies", 3, moved + 8.0 * count + 2.0 * updates.nbytes, share=C["transpose"],
                serial=last * C["dependent"], foreign=1)


def product_grad(node: Node) -> Cost:
    """A thread for each line goes through it forwards and backwards."""
    x, dy, dx = *node.inputs[:2], node.outputs[0]
    return Cost("norms, elementwise", 1, 2.0 * x.nbytes + dy.nbytes + 3.0 * dx.nbytes,
                2 * x.shape[node.attributes["axis"][0]] * C["dependent"], share=C["transpose"])


def select(node: Node) -> Cost:
    """ArgMax and ArgMin read once. TopK of few elements reads once for each; of more, once for each digit of 8 bits, and
    twice to gather, and sorts the k elements by comparisons of two, in log2(k)^2 / 2 steps.
    """
    x, first = node.inputs[0], node.output(0) or node.output(1)
    k = first.count * x.shape[node.attributes.get("axis", -1)] // x.count if node.op.endswith("TopK") else 1
    digits = SIZES[x.dtype]
    reads = k if k <= digits else digits + 2
    depth = math.log2(max(k, 2))
    lines = up(first.count // k, C["multiprocessors"])  # a block for each line
    sort = lines * depth * (depth + 1) / 2 * C["dependent"] if k > digits else 0.0
    return Cost("copies", 1, (reads - 1) * x.nbytes + all_bytes(node), share=C["transpose"], serial=sort)


TILE = 4 * 256  # elements whose count is one number


def count_nonzero(node: Node) -> Cost:
    """Counts of tiles, and their sum by one block."""
    x = node.inputs[0]
    tiles = up(x.count, TILE)
    return Cost("copies", 2, x.nbytes + 8.0 * tiles, share=C["transpose"], serial=up(tiles, 256) * C["dependent"])


def nonzero(node: Node) -> Cost:
    """Counts of tiles, their scan by one block, and coordinates."""
    x = node.inputs[0]
    tiles = up(x.count, TILE)
    return Cost("copies", 3, 2.0 * x.nbytes + 16.0 * tiles + node.outputs[0].nbytes, share=C["transpose"],
                serial=up(tiles, 256) * C["scan"])


def mark_rows(node: Node) -> Cost:
    """Zeros, numbers as 32 bits, and bytes of these."""
    return Cost("copies", 3, all_bytes(node) + 12.0 * node.outputs[0].count, share=C["transpose"], foreign=1)


def count_rows(node: Node) -> Cost:
    """A count, which one thread rounds up."""
    cost = count_nonzero(node)
    return cost._replace(launches=cost.launches + 1)


def select_rows(node: Node) -> Cost:
    """Counts of tiles, their scan by one block, rows and inverse, and spare rows."""
    tiles = up(node.inputs[0].count, TILE)
    return Cost("copies", 4, node.inputs[0].nbytes + all_bytes(node) + 16.0 * tiles, share=C["transpose"],
                serial=up(tiles, 256) * C["scan"])


def copy_rows(node: Node) -> Cost:
    """What is written, and the rows of it that are read."""
    read = min(node.inputs[0].nbytes, node.outputs[0].nbytes)
    return Cost("copies", 1, read + node.outputs[0].nbytes + sum(v.nbytes for v in node.inputs[1:]),
                share=C["transpose"])


def visible_keys(node: Node) -> Cost:
    """Zeros; then masks are read by query and by key."""
    return Cost("copies", 3, 2.0 * sum(v.nbytes for v in node.inputs if v) + 2.0 * node.outputs[0].nbytes,
                share=C["transpose"], foreign=1)


def resize(node: Node) -> Cost:
    """The lists of taps are parameters of launches, of 504 words each; then one pass. Positions at an edge may have
    fewer taps than are counted here.
    """
    x, y = node.inputs[0], node.outputs[0]
    taps = {b"nearest": 1, b"linear": 2, b"cubic": 4}[node.attributes.get("mode", b"nearest")]
    axes = [d for d, size in enumerate(x.shape) if y.shape[d] != size]
    words = 3 * (3 - len(axes))
    for d in axes:  # where each list begins and its indices, in 32 bits, and its weights
        listed = taps * (x if node.op == "ResizeGrad" else y).shape[d]
        words += up(y.shape[d] + 1, 2) + up(listed, 2) + listed
    return one_pass(node)._replace(launches=1 + up(words, 504), share=C["transpose"])


def axes_of_sum(node: Node) -> tuple[int, ...]:
    """Dims that a reduction sums over."""
    x, y = node.inputs[0], node.outputs[0]
    if node.op == "SumTo":
        lead = len(x.shape) - len(y.shape)
        return (*range(lead), *(d for d in range(lead, len(x.shape)) if y.shape[d - lead] != x.shape[d]))
    given = node.input(1)
    axes = node.constants.get(given.name) if given else node.attributes.get("axes")
    return tuple(sorted(axis % len(x.shape) for axis in axes)) if axes else tuple(range(len(x.shape)))


def ranges_of_sum(node: Node) -> int:
    """Blocks that share a result, as reduce.cu chooses them; their sums are added by another kernel."""
    x = node.inputs[0]
    axes = [d for d in axes_of_sum(node) if x.shape[d] > 1]
    is_one_dim = axes and all(x.shape[d] == 1 or d in axes for d in range(axes[0], axes[-1]))
    if x.dtype not in ("float", "double", "float16", "bfloat16") or not is_one_dim:
        return 1
    n, tail = math.prod(x.shape[d] for d in axes), math.prod(x.shape[axes[-1] + 1:])
    lead, size = x.count // (n * tail), SIZES[x.dtype]
    if tail == 1:
        return 1 if node.op == "ReduceLogSumExp" else max(1, min(n // (16 * 256), 1024 // lead))
    if node.op not in ("SumTo", "ReduceSum", "ReduceMean"):
        return 1
    chunks = lead * tail // (1 if tail % (16 // size) else 16 // size)
    lanes = min(32, 1 << (chunks - 1).bit_length())
    return max(1, min(1024 // up(chunks, lanes), n * lanes // (8 * 256), 256))


def reduction(node: Node) -> Cost:
    x, y = node.inputs[0], node.outputs[0]
    ranges = ranges_of_sum(node)
    is_bias = node.backward and y.count == x.shape[-1] and 0 in axes_of_sum(node)
    partial = 8.0 * y.count * ranges if ranges > 1 else 0.0
    return Cost("bias gradients" if is_bias else "norms, elementwise", 1 + (ranges > 1), all_bytes(node) + partial,
                share=C["columns"])


def norm(node: Node) -> Cost:
    return Cost("norms, elementwise", 1, all_bytes(node), share=C["norm"])


def partial_sums(rows: int, n: int) -> int:
    """Blocks of norm_grad_kernel, as norm.cu chooses them; 0 where rows are not kept in registers."""
    if n % 8 or n > 8192:
        return 0
    chunks = 1 if n <= 8 * 384 else 2
    width = up(n // 8, chunks * 32) * 32
    at_once = 384 // width if chunks == 1 else 1
    steps, most = up(rows, at_once), 132 * 768 // (width * at_once)
    return up(steps, up(steps, most))


def norm_grad(node: Node) -> Cost:
    """One kernel, and one that adds its partial sums; or two passes and the same."""
    x, n = node.inputs[0], node.inputs[1].count
    rows, sums = x.count // n, any(node.output(i) is not None for i in (1, 2))
    parts = partial_sums(rows, n)
    nbytes = all_bytes(node) + 2 * sums * 8.0 * (parts or min(256, up(rows, 32))) * n
    if not parts:
        nbytes += sums * (x.nbytes + node.inputs[4].nbytes)
    return Cost("norms, elementwise", 1 + sums if parts else 1 + 2 * sums, nbytes, share=C["norm gradient"])


def loss(node: Node) -> Cost:
    return Cost("loss", 2, all_bytes(node), share=C["loss"])


def loss_grad(node: Node) -> Cost:
    mean = node.attributes.get("reduction", b"mean") == b"mean"
    return Cost("loss", 1 + mean, all_bytes(node), share=C["loss"])


def streamed(node: Node) -> Cost:
    """The products of each piece of rows (`rows`; 0: of 256 MiB, but not below 2048), its loss, and the sums of its
    columns, one behind the other. The scores are read once more for their gradient: the cache may have them. The
    gradient of W is read and written again for each piece but the first, beside the product's own time.
    """
    h, w = node.inputs[0], node.inputs[1]
    width, count = h.shape[-1], h.count // h.shape[-1]
    columns, is_grad = w.count // width, node.op == "StreamedCrossEntropyGrad"
    given = node.attributes.get("rows", 0)
    rows = min(count, given or max(2048, (256 << 20) // (columns * SIZES[w.dtype])))
    dh, dw, drow = (node.output(i) for i in (range(3) if is_grad else range(2, 5)))
    pieces = [min(rows, count - first) for first in range(0, count, rows)]
    rate = rate_of(w)
    score_bytes = float(count * columns * SIZES[w.dtype])
    passes = (2 if is_grad else 3 if given else 1) + (drow is not None)  # over the scores, after their product
    added = 2.0 * dw.nbytes * (len(pieces) - 1) if dw is not None else 0.0
    busy = sum(product_seconds(m, columns, width, 1, rate)
               + (dh is not None) * product_seconds(m, width, columns, 1, rate)
               + (dw is not None) * product_seconds(columns, width, m, 1, rate) for m in pieces)
    busy += passes * score_bytes / (C["loss"] * C["copy"]) + added / C["copy"]
    products = 1 + (dh is not None) + (dw is not None)
    launches = 1 + len(pieces) * (1 + products + (drow is not None)) + 2 * (drow is not None) + (not is_grad)
    return Cost("scores in pieces", launches, all_bytes(node) + added + score_bytes * (products + passes), busy,
                2.0 * count * columns * width * products, foreign=products * len(pieces))


def one_pass(node: Node) -> Cost:
    return Cost("norms, elementwise", 1, all_bytes(node), share=C["norm"])


def pool_grad(node: Node) -> Cost:
    """Of the largest: an element of each window is found first."""
    return one_pass(node)._replace(launches=2 if "Max" in node.op else 1)


def convolution(node: Node) -> Cost:
    """(x, w, bias) -> y, (dy, w) -> dx, (dy, x) -> dw; by cuDNN at three fifths of what products reach: assumed.
    float32 in channels last is TF32, of which tensor cores compute half as much; bias and Relu are no launches there.
    """
    kernel = node.outputs[0] if node.op == "ConvGradWeight" else node.inputs[1]
    result = node.outputs[0] if node.op == "Conv" else node.inputs[0]
    flops = 2.0 * result.count * math.prod(kernel.shape[1:])
    is_tf32 = node.kernel == "cuda_conv_graph" and not is_half(node.inputs[0])
    rate = C["tensor"] / 2 if is_tf32 else rate_of(node.inputs[0])
    with_bias = node.op == "Conv" and node.input(2) is not None and node.kernel != "cuda_conv_graph"  # joins both
    return Cost("products", 1 + with_bias, all_bytes(node) + 2 * with_bias * result.nbytes, flops / (0.6 * rate), flops,
                foreign=int(node.kernel != "cuda_conv"))


def batchnorm(node: Node) -> Cost:
    """Statistics or sums of x (and dy), what follows for each channel, and another pass."""
    passes = 1 if node.op == "BatchNormalization" else 2
    training = passes == 2 or bool(node.attributes.get("training_mode", 0))
    return Cost("norms, elementwise", 2 + training, all_bytes(node) + training * passes * node.inputs[0].nbytes,
                share=C["norm"])


def group_norm_grad(node: Node) -> Cost:
    """Sums of x and dy for each channel, another pass over both, and the sums of the images."""
    scale = node.output(1) or node.output(2)
    passes = 1 + (node.output(0) is not None)
    again = (node.inputs[0].nbytes + node.inputs[4].nbytes) * (passes - 1)
    return Cost("norms, elementwise", passes + (scale is not None), all_bytes(node) + again, share=C["norm"])


def multinomial(node: Node) -> Cost:
    """Reads each row twice for the sums and writes an end for each tile of 256; a sample reads a tile again. An
    exponential in float64 is about 40 operations, at half the rate of float32: assumed.
    """
    x, tiles = node.inputs[0], up(node.inputs[0].shape[1], 256) * node.inputs[0].shape[0]
    nbytes = all_bytes(node) + x.nbytes + 3 * 8.0 * tiles
    return Cost("norms, elementwise", 1, nbytes, 40.0 * x.count / (C["float32"] / 2), share=C["norm"])


def grouped_product(node: Node) -> Cost:
    """(x, weights of the groups, ends) -> y or (x, dy, ends) -> dw: tiles of 64 by 64 without tensor cores, at half of
    their peak.
    """
    n = (node.inputs[1] if node.op.endswith("Grad") else node.outputs[0]).shape[-1]
    flops = 2.0 * node.inputs[0].count * n
    return Cost("products", 1, all_bytes(node), flops / (0.5 * C["float32"]), flops)


# ---- vision ----

def sample_grad(node: Node) -> Cost:
    """Of the image: taps are written, sorted byte by byte of the cells' numbers, and added by cell, a run of more than
    512 by a block. Of the points: one pass.
    """
    x, dy = node.inputs[0], node.inputs[-1]
    groups = node.attributes.get("offset_group", 1)  # of DeformCols
    mode = node.attributes.get("mode", b"linear").removeprefix(b"bi")
    taps = dy.count // max(1, x.shape[1]) * groups * {b"nearest": 1, b"cubic": 4}.get(mode, 2) ** (len(x.shape) - 2)
    image, places = node.output(0) is not None, any(value is not None for value in node.outputs[1:])
    passes = image * max(1, up((x.count // max(1, x.shape[1]) * groups).bit_length(), 8))
    nbytes = all_bytes(node) + taps * (image * 2 * (4 + SIZES[x.dtype]) + 24 * passes)
    return Cost("norms, elementwise", image * (4 + 3 * passes + (taps >= 512)) + places, nbytes, share=C["transpose"],
                serial=passes * up(256 * up(taps, 512), 256) * C["scan"])


def roi(node: Node) -> Cost:
    """The regions, and what is read of them. The gradient of a maximum finds its cells first."""
    finds = node.op == "MaxRoiPoolGrad" or (node.op == "RoiAlignGrad" and node.attributes.get("mode") == b"max")
    return Cost("norms, elementwise", 2 + finds, all_bytes(node), share=C["norm"])


def unpool(node: Node) -> Cost:
    """Zeros for each element, the position of the last value of each, and the values."""
    return Cost("norms, elementwise", 3, all_bytes(node) + 8.0 * node.outputs[0].count + node.inputs[1].nbytes,
                share=C["norm"], foreign=1)


def merges(n: int, items: int, nbytes: float) -> tuple[int, float]:
    """Launches and bytes of a merge sort of rows of n items: their order, and a pass for each doubling of the runs."""
    passes = max(0, n - 1).bit_length()
    return 1 + passes, passes * (nbytes + 8.0 * items)


def unique(node: Node) -> Cost:
    """Keys of 64 bits, the sort, where a value begins, a scan of that, and the results; in the order of first items two
    more kernels.
    """
    x, axis = node.inputs[0], node.attributes.get("axis")
    n = x.count if axis is None else x.shape[axis]
    launches, nbytes = merges(n, n, 8.0 * x.count)
    ranks = 0 if node.attributes.get("sorted", 1) else 2
    return Cost("norms, elementwise", launches + 5 + ranks, all_bytes(node) + nbytes + 8.0 * x.count + 20.0 * n,
                share=C["transpose"])


def suppression(node: Node) -> Cost:
    """Keys, the sort, three barriers for each box of a class, a scan of the counts, and the results."""
    scores = node.inputs[1]
    launches, nbytes = merges(scores.shape[-1], scores.count, 8.0 * scores.count)
    return Cost("norms, elementwise", launches + 4, all_bytes(node) + nbytes + 12.0 * scores.count,
                share=C["transpose"], serial=scores.shape[-1] * C["dependent"])


def determinant(node: Node) -> Cost:
    """A block for each matrix, 1056 at once, waits for four barriers in each row; the gradient has a matrix for each
    element.
    """
    n = node.inputs[0].shape[-1]
    matrices = node.inputs[0].count // (1 if node.op == "DetGrad" else max(1, n * n))
    return Cost("norms, elementwise", 1, all_bytes(node), 2.0 * matrices * n**3 / 3 / (C["float32"] / 2),
                share=C["norm"], serial=up(matrices, 1056) * n * C["dependent"])


MODELS: dict[str, Callable[[Node], Cost]] = {
    "cuda_matmul": product, "cuda_gelu_matmul": product,
    "cuda_attention_dnn": attention_dnn, "cuda_attention_grad_dnn": attention_grad_dnn,
    "cuda_attention": attention_own, "cuda_attention_grad": attention_grad_own,
    "cuda_elementwise": elementwise, "cuda_copy": copy, "cuda_rotate": one_pass, "cuda_range": one_pass,
    "cuda_trilu": one_pass, "cuda_gather": gather, "cuda_gather_grad": gather_grad, "cuda_reduce": reduction,
    "cuda_norm": norm, "cuda_fused_norm": norm, "cuda_norm_grad": norm_grad, "cuda_fused_norm_grad": norm_grad,
    "cuda_softmax": one_pass, "cuda_softmax_grad": one_pass,
    "cuda_cross_entropy": loss, "cuda_cross_entropy_grad": loss_grad,
    "cuda_streamed_cross_entropy": streamed, "cuda_streamed_cross_entropy_grad": streamed,
    "cuda_conv_graph": convolution, "cuda_conv_dnn": convolution, "cuda_conv": convolution,
    "cuda_pool": one_pass, "cuda_pool_grad": pool_grad,
    "cuda_batchnorm": batchnorm, "cuda_batchnorm_grad": batchnorm,
    "cuda_groupnorm": one_pass, "cuda_groupnorm_grad": group_norm_grad,
    "cuda_fill": one_pass, "cuda_pad": one_pass, "cuda_pad_grad": one_pass, "cuda_scan": one_pass,
    "cuda_random_fill": one_pass, "cuda_multinomial": multinomial, "cuda_quantize": one_pass,
    "cuda_product_grad": product_grad, "cuda_index_gather": index_gather, "cuda_gather_nd_grad": gather_nd_grad,
    "cuda_scatter": scatter, "cuda_select": select, "cuda_count_nonzero": count_nonzero, "cuda_nonzero": nonzero,
    "cuda_mark_rows": mark_rows, "cuda_count_rows": count_rows, "cuda_select_rows": select_rows,
    "cuda_rows_within": one_pass, "cuda_copy_rows": copy_rows, "cuda_row_dropout": one_pass,
    "cuda_visible_keys": visible_keys,
    "cuda_resize": resize, "cuda_ctc": ctc, "cuda_grouped_matmul": grouped_product,
    "cuda_recurrent_steps": recurrent_steps, "cuda_recurrent_steps_grad": recurrent_steps_grad,
    "cuda_rnn_dnn": recurrent_layer, "cuda_rnn_dnn_grad": recurrent_layer_grad,
    "cuda_sample": one_pass, "cuda_sample_grad": sample_grad, "cuda_roi": roi, "cuda_roi_grad": roi,
    "cuda_unpool": unpool, "cuda_unpool_grad": one_pass, "cuda_im2col": one_pass, "cuda_col2im": one_pass,
    "cuda_reverse": one_pass, "cuda_search": one_pass,
    "cuda_unique": unique, "cuda_nms": suppression,
    "cuda_det": determinant, "cuda_det_grad": determinant,
}
# cuDNN's kernels, and the own ones that run where cuDNN declines.
OWN = {"cuda_attention_dnn": "cuda_attention", "cuda_attention_grad_dnn": "cuda_attention_grad"}


def cost_of(node: Node, own_attention_kernels: bool = False) -> Cost:
    """Raises KeyError, with the node, where its kernel has no model."""
    kernel = OWN.get(node.kernel, node.kernel) if own_attention_kernels else node.kernel
    if kernel not in MODELS:
        raise KeyError(f"{node.op} '{node.name}': no model of the kernel {kernel}")
    return MODELS[kernel](node)


PHASES, KEY = 2, Cost("norms, elementwise", 1, 24.0)  # each begins with a kernel that stores its random key


def optimizer(parameters: Iterable[torch.nn.Parameter]) -> Cost:
    """AdamW in float32: reads four numbers of each element and writes three; in a few launches."""
    return Cost("optimizer", 4, 28.0 * sum(p.numel() for p in parameters), share=C["optimizer"])
