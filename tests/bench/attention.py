"""
Attention, forward and backward, out of one product of Q, K and V: the fused node against the nodes one by one and
against torch's scaled_dot_product_attention. Interleaved rounds, minima: python tests/bench/attention.py [--rounds 15]
[--threads 2] [--bf16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import onnx
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

from onnxtrain import _C

# name, batch, heads, length, head size, causal, dropout
SHAPES = [
    ("sample", 20, 2, 35, 100, False, 0.2),
    ("GPT-2", 4, 12, 64, 64, True, 0.0),
    ("BERT-style", 8, 8, 128, 64, False, 0.1),
    ("BERT-style, no dropout", 8, 8, 128, 64, False, 0.0),
    ("length 256", 4, 8, 256, 64, True, 0.0),
    ("length 512", 2, 8, 512, 64, False, 0.0),
    ("length 512, causal", 2, 8, 512, 64, True, 0.0),
    ("length 1024, dropout", 1, 8, 1024, 64, False, 0.1),
    ("length 2048, causal", 1, 4, 2048, 64, True, 0.0),
]


def model_of(batch: int, heads: int, length: int, size: int, causal: bool, dropout: float, narrow: bool) -> bytes:
    """x (B, S, 3 H D) to (B, S, H D), as an exporter writes it; `narrow`: products in bfloat16,
    as autocast has them.
    """
    constants: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def constant(tensor: torch.Tensor) -> str:
        constants.append(numpy_helper.from_array(tensor.numpy(), f"c{len(constants)}"))
        return constants[-1].name

    def op(kind: str, *inputs: str, n: int = 1, **attributes) -> list[str]:
        outputs = [f"v{len(nodes)}_{i}" for i in range(n)]
        nodes.append(helper.make_node(kind, inputs, outputs, **attributes))
        return outputs

    def cast(value: str, to: int) -> str:
        return op("Cast", value, to=to)[0] if narrow else value

    split = op("Split", "x", n=3, axis=2, num_outputs=3)
    shape = constant(torch.tensor([batch, length, heads, size]))
    q, k, v = (op("Transpose", *op("Reshape", t, shape), perm=perm)[0]
               for t, perm in zip(split, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True))
    (scores,) = op("MatMul", q, k)
    (scores,) = op("Mul", cast(scores, onnx.TensorProto.FLOAT), constant(torch.tensor(size ** -0.5)))
    if causal:
        (scores,) = op("Add", scores, constant(torch.full((length, length), float("-inf")).triu(1)))
    (p,) = op("Softmax", scores, axis=-1)
    if dropout:
        (p,) = op("Dropout", p, constant(torch.tensor(dropout)), constant(torch.tensor(True)))
    (y,) = op("Transpose", *op("MatMul", cast(p, onnx.TensorProto.BFLOAT16), v), perm=[0, 2, 1, 3])
    (y,) = op("Reshape", y, constant(torch.tensor([batch, length, heads * size])))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.BFLOAT16 if narrow else onnx.TensorProto.FLOAT,
                                      (batch, length, 3 * heads * size))
    graph = helper.make_graph(nodes, "attention", [x], [onnx.ValueInfoProto(name=y)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def ours(model: bytes, x: torch.Tensor, dy: torch.Tensor,
         disabled: list[str]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward alone, and forward and backward."""
    session = _C.Session(model)

    def both() -> None:
        outputs, run = session.forward([x], b"\1", 1)
        run.backward([x for _ in run.saved_inputs] + [outputs[i] for i in run.saved_outputs], [dy])

    def forward() -> None:
        session.forward([x], b"\0", 1)

    _C.disable_passes(disabled)
    both(), forward()
    _C.disable_passes([])
    return forward, both


def torchs(x: torch.Tensor, dy: torch.Tensor, batch: int, heads: int, length: int, size: int, causal: bool,
           dropout: float) -> tuple[Callable[[], None], Callable[[], None]]:
    leaf = x.clone().requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(batch, length, heads, size).transpose(1, 2) for t in x.split(heads * size, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)
        return y.transpose(1, 2).reshape(dy.shape)

    def forward() -> None:
        with torch.no_grad():
            run(x)

    def both() -> None:
        run(leaf).backward(dy)
        leaf.grad = None

    return forward, both


def best(functions: list[Callable[[], None]], rounds: int) -> list[float]:
    """Milliseconds: the least of each function's rounds, which take turns."""
    least = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            least[i] = min(least[i], 1e3 * (time.perf_counter() - start))
    return least


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16")
    parser.add_argument("--only", default="", help="shapes whose name has this in it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'milliseconds':<26}{'forward':>36}{'forward and backward':>36}{'share of':>10}")
    print(f"{'':<26}" + f"{'fused':>9}{'apart':>9}{'torch':>9}{'a/f':>5}{'t/f':>5}" * 2 + f"{'GFLOP/s':>10}")
    for name, batch, heads, length, size, causal, dropout in SHAPES:
        if args.only not in name:
            continue
        model = model_of(batch, heads, length, size, causal, dropout, args.bf16)
        x, dy = torch.randn(batch, length, 3 * heads * size), torch.randn(batch, length, heads * size)
        x, dy = (t.bfloat16() if args.bf16 else t for t in (x, dy))
        sides = [ours(model, x, dy, []), ours(model, x, dy, ["fuse_attention"]),
                 torchs(x, dy, batch, heads, length, size, causal, dropout)]
        times = best([side[0] for side in sides] + [side[1] for side in sides], args.rounds)
        cells = "".join("".join(f"{t:>9.2f}" for t in part) + f"{part[1] / part[0]:>5.2f}{part[2] / part[0]:>5.2f}"
                        for part in (times[:3], times[3:]))
        flops = 7 * 2 * batch * heads * length * length * size * (0.5 if causal else 1)
        print(f"{name:<26}{cells}{1e-6 * flops / times[3]:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
