"""A short training of an installed onnxtrain against eager PyTorch; needs torch and the wheel, and no other file.

    python tests/smoke.py [--installed]

An MLP and the getting-started transformer in small take five SGD steps each through ORTModule and in eager from equal
weights: losses, first gradients and final weights agree, and every step ran in the engine. `--installed` also checks
that the package comes from site-packages, that it brings its own libraries, that the process holds one libgomp, and that
torch.compile knows the backend.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

STEPS = 5
VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH, BATCH = 97, 32, 2, 48, 11, 6


class Language(nn.Module):
    """Token ids (sequence, batch), int64, to logits (sequence, batch, vocabulary):
    the mask is made and kept in forward.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        self.register_buffer("positions", torch.randn(LENGTH, 1, WIDTH))
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(tokens):
            ends = torch.full((len(tokens), len(tokens)), float("-inf"), device=tokens.device)
            self.mask = torch.triu(ends, diagonal=1)
        x = self.dropout(self.embedding(tokens) * math.sqrt(WIDTH) + self.positions[: tokens.size(0)])
        return self.decoder(self.encoder(x, self.mask))


def mlp() -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    return model, lambda: (torch.randn(8, 20), torch.randint(0, 5, (8,)))


def language(dropout: float = 0.0) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    return Language(dropout), lambda: (torch.randint(0, VOCABULARY, (LENGTH, BATCH)),
                                       torch.randint(0, VOCABULARY, (LENGTH * BATCH,)))


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], list[Tensor]]:
    """The losses, and the gradients of the first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, first = [], []
    for x, target in batches:
        optimizer.zero_grad()
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target)
        loss.backward()
        first = first or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def farthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor."""
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in zip(ours, theirs, strict=True))


def compare(name: str, make: Callable[[], tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]]) -> None:
    torch.manual_seed(1)
    eager, batch = make()
    batches = [batch() for _ in range(STEPS)]
    wrapped = ORTModule(copy.deepcopy(eager))
    steps = onnxtrain.stats()["engine_steps"]
    theirs, their_grads = train(eager, batches)
    ours, our_grads = train(wrapped, batches)
    ran = onnxtrain.stats()["engine_steps"] - steps
    assert ran == STEPS, f"{name}: {ran} of {STEPS} steps ran in the engine: {onnxtrain.explain(wrapped)}"
    loss = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    grad = farthest(our_grads, their_grads)
    weight = farthest(list(wrapped.parameters()), list(eager.parameters()))
    print(f"{name}: {STEPS} steps, loss {ours[0]:.4f} to {ours[-1]:.4f}; off by {loss:.1e}, gradients {grad:.1e}, "
          f"weights {weight:.1e}")
    assert loss < 1e-5 and grad < 1e-4 and weight < 1e-4, f"{name}: differs from eager"


def drops_out() -> None:
    """Dropout that is ruled by torch.manual_seed."""
    model, batch = language(0.5)
    wrapped, (x, _) = ORTModule(model), batch()
    outputs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outputs.append(wrapped(x).detach().clone())
    assert (torch.equal(outputs[0], outputs[1])
            and not torch.equal(outputs[0], outputs[2])), "dropout does not follow the seed"


def check_installed() -> None:
    package = Path(onnxtrain.__file__).resolve().parent
    assert package.parent.name == "site-packages", f"onnxtrain comes from {package}"
    implementations = set(_C.build_info()["gemm"])  # opens the libraries
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    gomp = sorted(path for path in maps if "libgomp" in path)
    assert len(gomp) == 1, f"not one libgomp: {gomp}"
    onednn = platform.machine() == "x86_64"  # PyPI has none for other processors
    for library in ("libprotobuf-c", *(["libdnnl"] if onednn else [])):
        places = [path for path in maps if library in path]
        assert places and all(Path(path).is_relative_to(package.parent) for path in places), f"{library}: {places}"
    assert {"torch", *(["onednn"] if onednn else [])} <= implementations, implementations


def compiles() -> None:
    """torch.compile finds the backend by its entry point."""
    model, batch = mlp()
    x, _ = batch()
    steps = onnxtrain.stats()["engine_steps"]
    torch.testing.assert_close(torch.compile(model, backend="onnxtrain")(x), model(x))
    assert onnxtrain.stats()["engine_steps"] == steps + 1, "torch.compile did not reach the engine"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installed", action="store_true")
    options = parser.parse_args()
    logging.getLogger("onnxtrain").setLevel(logging.WARNING)
    began = time.monotonic()
    compare("mlp", mlp)
    compare("transformer", language)
    drops_out()
    if options.installed:
        check_installed()
        compiles()
    info = _C.build_info()
    print(f"smoke ok: CPython {platform.python_version()}, torch {torch.__version__}, onnxtrain "
          f"{onnxtrain.__version__}, {info['isa']}, GEMM {' '.join(info['gemm'])}, C exchange "
          f"{'yes' if info['dlpack_exchange'] else 'no'}, {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
