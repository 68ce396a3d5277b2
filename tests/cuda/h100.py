"""An H100 as costs.py takes it: CONSTANTS has every number with its source; the cost of a kernel, and the time of a
product.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from planned import SIZES, Node, Value


class Constant(NamedTuple):
    value: float
    unit: str
    source: str


CONSTANTS = {
    "multiprocessors": Constant(132, "", "NVIDIA, H100 SXM5"),
    "clock": Constant(1.755e9, "Hz", "what an H100 SXM5 holds under load; its boost clock is 1.98 GHz"),
    "copy": Constant(3.0e12, "bytes/s", "QuACK, memory-bound kernels on an H100 (2025): 3.0 of 3.35e12"),
    "tensor": Constant(790e12, "FLOP/s", "large bfloat16 products of cuBLASLt, as in tests/bench/gpu.py; peak 989e12"),
    "float32": Constant(50e12, "FLOP/s", "assumed: three quarters of the peak of float32 without tensor cores, 67e12"),
    "fill": Constant(1.0e-6, "s", "assumed: of a product's tile before its first and after its last instruction"),
    "library": Constant(0.9, "", "assumed: of that model, what cuBLASLt reaches"),
    "launch": Constant(2.0e-6, "s", "assumed: between kernels of a replayed graph, with first load and last store"),
    "scan": Constant(1.0e-6, "s", "assumed: a step of the one block that scans the counts of a sort, 17 barriers"),
    "dependent": Constant(0.5e-6, "s", "assumed: a load that waits for the one before it, and a barrier"),
    "forward causal 64": Constant(288e12, "FLOP/s", "FlashAttention-3 (2024), cuDNN, length 1024"),
    "forward full 64": Constant(373e12, "FLOP/s", "the same"),
    "gradient full 64": Constant(348e12, "FLOP/s", "the same; without a causal figure: scaled as forward"),
    "forward causal 128": Constant(410e12, "FLOP/s", "the same"),
    "forward full 128": Constant(574e12, "FLOP/s", "the same"),
    "gradient full 128": Constant(408e12, "FLOP/s", "the same"),
    "longer": Constant(1.13, "", "the same: the gradient at 2048 and more over that at 1024, 395 over 348"),
    "elementwise": Constant(0.95, "", "assumed: of the copy's bandwidth"),
    "norm": Constant(0.9, "", "assumed, the same"),
    "norm gradient": Constant(0.8, "", "assumed, the same: two blocks of 384 threads with 128 registers"),
    "columns": Constant(0.9, "", "assumed, the same"),
    "loss": Constant(0.9, "", "assumed, the same"),
    "transpose": Constant(0.75, "", "assumed, the same: copies, transposes and gathers"),
    "optimizer": Constant(0.9, "", "assumed, the same"),
}
C = {name: constant.value for name, constant in CONSTANTS.items()}


class Cost(NamedTuple):
    """Of one node. `busy`: seconds at the rate of the units that bound it, if not memory; `share`: of the copy's
    bandwidth that such a kernel reaches; `serial`: seconds of steps that wait for each other and move few bytes;
    `foreign`: how many of the launches are a library's, or copies and zeros by the runtime.
    """

    part: str
    launches: int
    nbytes: float
    busy: float = 0.0
    flops: float = 0.0  # on tensor cores
    share: float = 1.0
    serial: float = 0.0
    foreign: int = 0

    @property
    def seconds(self) -> float:
        """Without the launches' own time."""
        return max(self.nbytes / (self.share * C["copy"]), self.busy) + self.serial


# ---- sizes ----

def all_bytes(node: Node) -> int:
    return sum(value.nbytes for value in node.operands())


def is_half(value: Value) -> bool:
    return SIZES[value.dtype] == 2


def rate_of(value: Value) -> float:
    """FLOP/s of products of such values."""
    return C["tensor"] if is_half(value) else C["float32"]


def up(a: float, b: float) -> int:
    return math.ceil(a / b)


# ---- products ----

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 64, 0.6))  # and what each reaches, assumed
SPLITS = (1, 2, 4, 8)  # of k, where there are fewer tiles than multiprocessors


def product_seconds(m: int, n: int, k: int, batch: int, rate: float) -> float:
    """Of the best tile: waves of tiles on all multiprocessors, and what a split of k writes and reads in float32."""
    def of(tile: tuple[int, int, float], split: int) -> float:
        rows, columns, reached = tile
        waves = up(up(m, rows) * up(n, columns) * batch * split, C["multiprocessors"])
        each = 2.0 * rows * columns * up(k, split) / (reached * rate / C["multiprocessors"]) + C["fill"]
        return waves * each + (8.0 * m * n * batch * split / C["copy"] if split > 1 else 0.0)

    return min(of(tile, split) for tile in TILES for split in SPLITS) / C["library"]
