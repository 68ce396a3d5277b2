"""GFLOP/s of each provider over the products of the workloads, and the share of the best square product of the same
run.

    python tests/bench/gemm.py [--rounds 3] [--threads N] [--only BERT]

Providers take turns, and the best of all rounds counts. "torch" is torch's BLAS, "onednn" oneDNN's sgemm, "matmul"
oneDNN's primitive, which adds a bias for nothing, "native" our own kernel, which does so as well. "bf16x3" takes each
operand in two bfloat16 parts (precision "high"), and the last four columns are bfloat16 operands with bfloat16 and
float32 results, by the primitive and by our own kernel; the share is that of exact float32.
"""

from __future__ import annotations

import argparse
import math

import torch

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
NOT_EXACT = ("bf16x3", "bfloat16", "bfloat16 to float32", "native bfloat16", "native bfloat16 to float32")


def best(provider: str, shape: tuple, before: float) -> float:
    """GFLOP/s; 0 where the provider is not there."""
    _, trans_a, trans_b, m, n, k = shape
    took = _C.measure_gemm(provider, trans_a, trans_b, m, n, k)
    return max(before, 2e-9 * m * n * k / took) if took else 0.0


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
    providers = [*(name for name in _C.build_info()["gemm"] if name != "reference"), "matmul", *NOT_EXACT]
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
