"""GFLOP/s of each implementation over the products of the workloads, and the share of the best square product of the
same run.

    python tests/bench/gemm.py [--rounds 3] [--threads N] [--only BERT]

Implementations take turns, and the best of all rounds counts; ONNXTRAIN_GEMM has their names. "bf16x3" takes each
operand in two bfloat16 parts (precision "high"), and the last four columns are bfloat16 operands with bfloat16 and
float32 results, by oneDNN's primitive and by our own kernel; the share is that of exact float32.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import time

import torch
from onnx import ValueInfoProto, helper

from onnxtrain import _C

# name, trans_a, trans_b, M, N, K
LAYERS = [  # name, rows, inputs, outputs of a linear layer: three products
    ("sample qkv", 700, 200, 600),
    ("sample projection", 700, 200, 200),
    ("sample decoder", 700, 200, 28782),
    ("MLP first", 64, 784, 500),
    ("BERT qkv", 1024, 512, 1536),
    ("BERT projection", 1024, 512, 512),
    ("BERT up", 1024, 512, 2048),
    ("BERT down", 1024, 2048, 512),
    ("BERT head", 1024, 512, 30522),
    ("GPT-2 qkv", 256, 768, 2304),
    ("GPT-2 up", 256, 768, 3072),
    ("GPT-2 down", 256, 3072, 768),
    ("GPT-2 head", 256, 768, 50257),
]
SQUARE = ("square", False, False, 2048, 2048, 2048)
SHAPES = [SQUARE, *[shape for name, rows, inputs, outputs in LAYERS for shape in (
    (name, False, True, rows, outputs, inputs),
    (f"{name}, input gradient", False, False, rows, inputs, outputs),
    (f"{name}, weight gradient", True, False, outputs, inputs, rows))]]
# What ONNXTRAIN_GEMM asks for, whether operands are bfloat16, attributes, and the kernel if it is another than asked for
PROVIDERS = {
    "torch": ("torch", False, {}, "matmul_blas"),
    "onednn": ("onednn", False, {}, "matmul_blas"),
    "primitive": ("primitive", False, {}, "matmul_primitive"),
    "native": ("native", False, {}, "matmul_native"),
    "bf16x3": ("native", False, {"bf16x3": 1}, "matmul_bf16x3"),
    "bfloat16": ("onednn", True, {}, "matmul_half"),
    "bfloat16 to float32": ("onednn", True, {"to": 1}, "matmul_half"),
    "native bfloat16": ("native", True, {}, "matmul_half_native"),
    "native bfloat16 to float32": ("native", True, {"to": 1}, "matmul_half_native"),
}
NOT_EXACT = [name for name, (_, half, attributes, _) in PROVIDERS.items() if half or attributes]
RUNS = 3


@functools.lru_cache(maxsize=1)
def operands(shape: tuple, half: bool) -> list[torch.Tensor]:
    _, trans_a, trans_b, m, n, k = shape
    dtype = torch.bfloat16 if half else torch.float32
    return [torch.ones(size, dtype=dtype) for size in ((k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n))]


def best(provider: str, shape: tuple, before: float) -> float:
    """GFLOP/s of the engine's product of two matrices; 0 where the implementation is not there."""
    asked, half, attributes, expected = PROVIDERS[provider]
    _, trans_a, trans_b, m, n, k = shape
    tensors = operands(shape, half)
    node = helper.make_node("FusedMatMul", ["a", "b"], ["y"], domain="ai.onnxtrain", transA=int(trans_a),
                            transB=int(trans_b), **attributes)
    inputs = [helper.make_tensor_value_info(name, 16 if half else 1, t.shape) for name, t in zip("ab", tensors)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, [ValueInfoProto(name="y")]), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)])
    os.environ["ONNXTRAIN_GEMM"] = asked
    session = _C.Session(model.SerializeToString())
    session.forward(tensors, b"\0\0")
    if [kernel for _, kernel, _ in session.kernels()] != [expected] or (
            expected == "matmul_blas" and asked not in _C.build_info()["gemm"]):
        return 0.0
    for _ in range(RUNS):
        start = time.perf_counter()
        session.forward(tensors, b"\0\0")
        before = max(before, 2e-9 * m * n * k / (time.perf_counter() - start))
    return before


def print_line(name: str, sizes: tuple, providers: list[str], cells: list[str], last: str) -> None:
    columns = (f"{cell:>{max(10, len(provider)) + 2}}" for cell, provider in zip(cells, providers))
    print(f"{name:<34}" + "".join(f"{size:>7}" for size in sizes) + "".join(columns) + f"{last:>14}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="", help="products whose names begin so")
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape is SQUARE or shape[0].startswith(args.only)]
    if args.threads:
        torch.set_num_threads(args.threads)
    providers = list(PROVIDERS)
    rates = {(shape, provider): 0.0 for shape in shapes for provider in providers}
    for _ in range(args.rounds):
        for shape in shapes:
            for provider in providers:
                rates[shape, provider] = best(provider, shape, rates[shape, provider])
    floats = [p for p in providers if p not in NOT_EXACT]
    peak = max(rates[SQUARE, provider] for provider in floats)
    print(f"{torch.get_num_threads()} threads; the square product at {peak:.0f} GFLOP/s is 100%")
    print_line("product", ("M", "N", "K"), providers, providers, "best float32")
    shares = []
    for shape in shapes:
        row = [rates[shape, provider] for provider in providers]
        shares.append(max(rates[shape, p] for p in floats) / peak)
        print_line(shape[0], shape[3:], providers, [f"{rate:.0f}" for rate in row], f"{shares[-1]:.0%}")
    print(f"geometric mean of the share: {math.exp(sum(map(math.log, shares)) / len(shares)):.0%}")


if __name__ == "__main__":
    main()
