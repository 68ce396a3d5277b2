"""What a script of another project is here, and one run of it: in eager PyTorch, or with its modules in ORTModule.

A script is a function that trains as the project's own script does, with the project's own model, loss and optimizer,
imported from its package or its checkout. It may replace device, data and process group, never the model. It calls
`run.wrap(module)` where a user would write `model = ORTModule(model)`, and `run.step(loss)` when a step is done.
The other files of this folder register scripts; run.py and test_real.py run them.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.metadata
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import onnxtrain
from onnxtrain._export import autograd_functions
from onnxtrain.ortmodule import ORTModule

FILES = ("gpt_trainers", "pytorch_examples", "language", "vision", "graphs", "science", "agents", "training_loops")
MOVED = ("moved 1", "moved 2", "moved 3")
HOWS = ("eager", "ours", *MOVED)


@dataclasses.dataclass
class Script:
    """Where it comes from and what the driver changes; `train` runs it."""

    name: str
    train: Callable[[Run], None]
    source: str  # "owner/name@commit", or a requirement for pip
    line: str  # what a user writes instead of the script's own line
    replaced: str  # by the driver
    requires: tuple[str, ...] = ()  # requirements for pip, beside the source

    @property
    def requirements(self) -> tuple[str, ...]:
        return self.requires if self.repository else (self.source, *self.requires)

    @property
    def repository(self) -> str | None:
        return self.source.split("@")[0] if "/" in self.source.split("==")[0] else None

    @property
    def commit(self) -> str:
        return self.source.split("@")[1]

    def absent(self) -> list[str]:
        """The requirements of which no version is installed."""
        missing = []
        for requirement in self.requirements:
            try:
                importlib.metadata.version(requirement.split("==")[0].split(">=")[0])
            except importlib.metadata.PackageNotFoundError:
                missing.append(requirement)
        return missing


SCRIPTS: dict[str, Script] = {}


def script(source: str, line: str = "model = ORTModule(model)", replaced: str = "data",
           requires: tuple[str, ...] = ()) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Registers the function that is decorated, by its name."""

    def register(train: Callable[[Run], None]) -> Callable[[Run], None]:
        assert train.__name__ not in SCRIPTS, train.__name__
        SCRIPTS[train.__name__] = Script(train.__name__, train, source, line, replaced, requires)
        return train

    return register


def load() -> dict[str, Script]:
    """All scripts of this folder, by name."""
    for name in FILES:
        importlib.import_module(name)
    return SCRIPTS


class Run:
    """One run of a script.

    eager: as it is. moved: eager, from weights that differ by one rounding, in ways of this number: how far roundings
    alone lead. ours: each module that it gives to `wrap` in an ORTModule.
    """

    def __init__(self, how: str, steps: int, folder: Path | None = None,
                 wait: Callable[[], None] = lambda: None) -> None:
        assert how in HOWS
        self.how, self.steps, self.folder = how, steps, folder
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.modules: list[nn.Module] = []
        self.wrapped: list[ORTModule] = []
        self._wait = wait
        self._began = time.perf_counter()

    def wrap(self, module: Any, **options: Any) -> Any:
        """What the script trains instead of the module: the module or, in the run `ours`, its ORTModule. Dropout is
        off in all runs, since the engine draws other masks than PyTorch."""
        for part in module.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
            elif isinstance(part, nn.RNNBase | nn.MultiheadAttention):
                part.dropout = 0.0
        if self.how.startswith("moved"):
            _move(module, int(self.how.split()[1]))
        self.modules.append(module)
        if self.how == "ours":
            module = ORTModule(module, **options)
            self.wrapped.append(module)
        self._began = time.perf_counter()
        return module

    def step(self, loss: Tensor | float) -> None:
        """A step has ended with this loss."""
        self.losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))
        self.seconds.append(time.perf_counter() - self._began)
        self._wait()
        self._began = time.perf_counter()

    def sizes(self, usual: int, last: int) -> Iterator[int]:
        """How many samples each step's batch has: the last one is smaller, as a DataLoader's is."""
        yield from [usual] * (self.steps - 1)
        yield last

    def result(self) -> dict[str, Any]:
        """What compare() in run.py reads: losses, seconds, parameters and buffers, and what ran where."""
        tensors = {f"{i}.{name}": tensor.detach().clone() for i, module in enumerate(self.modules)
                   for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        result: dict[str, Any] = dict(losses=self.losses, seconds=self.seconds, tensors=tensors, engine=0, torch=0,
                                      exports=0, graphs=0, reasons=[])
        for model in self.wrapped:
            counts = onnxtrain.stats(model)
            programs = [program for _, known in model._all_programs() for program in known]
            calls = {_name(call) for program in programs for call in program.exported.functions or () if not _draws(call)}
            result["engine"] += counts["engine_steps"]
            result["torch"] += counts["fallback_steps"]
            result["exports"] += counts["exports"]
            result["graphs"] += sum(program.steps for program in programs)
            result["reasons"] += [*counts["reasons"], *(f"the graph is cut: {cut}" for cut in counts["graph_breaks"]),
                                  *(f"PyTorch runs {name} between parts of the graph" for name in sorted(calls))]
        return result


def _draws(call: Any) -> bool:
    """PyTorch draws the random numbers of a graph, so that they are eager's: that is no part of its own."""
    return autograd_functions.only_draws(call) or _name(call).startswith("aten.multinomial")


def _name(call: Any) -> str:
    return call.function.__qualname__ if isinstance(call.function, type) else str(call.function)


def run(script: Script, how: str, steps: int, **options: Any) -> dict[str, Any]:
    """Runs a script in this process, and gives its result()."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    one = Run(how, steps, **options)
    script.train(one)
    assert len(one.losses) == steps, f"{script.name} made {len(one.losses)} steps instead of {steps}"
    return one.result()


def _move(module: nn.Module, seed: int) -> None:
    """Each weight by one rounding or none, either way."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                ways = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * ways)


def definitions(path: Path, only: tuple[str, ...] = (), replace: dict[str, str] | None = None, **given: Any) -> types.ModuleType:
    """A script as a module that has its imports, classes and functions (or only these) and the names given, and that has
    not run what the script does when it is started. `replace` is for its device and process group."""
    text = path.read_text(encoding="utf-8")
    for old, new in (replace or {}).items():
        text = text.replace(old, new)
    tree = ast.parse(text)
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds) and (not only or getattr(node, "name", "") in only)]
    module = types.ModuleType("script_" + "_".join(path.with_suffix("").parts[-2:]).replace("-", "_"))
    module.__dict__.update(given, __file__=str(path))
    sys.modules[module.__name__] = module  # where Dynamo looks for the globals of its functions
    exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


@contextlib.contextmanager
def without_compile() -> Iterator[None]:
    """torch.compile gives the function back: for a script that compiles its optimizer where it is defined."""
    kept = torch.compile

    def same(function: Any = None, **options: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function

    torch.compile = same  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = kept


class OneProcess:
    """torch.distributed of one process."""

    get_world_size, get_rank = staticmethod(lambda: 1), staticmethod(lambda: 0)
    broadcast = staticmethod(lambda tensor, src: None)

    @staticmethod
    def all_gather(tensors: list[Tensor], tensor: Tensor, async_op: bool = False) -> None:
        if tensors[0] is not tensor:
            tensors[0].copy_(tensor)


def tokens(vocabulary: int, *shape: int) -> Tensor:
    """int64: random words, drawn from torch's stream."""
    return torch.randint(0, vocabulary, shape)


def images(batch: int, channels: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """float32 (batch, channels, size, size) and int64 labels (batch,)."""
    return torch.randn(batch, channels, size, size), torch.randint(0, classes, (batch,))


def torchvision() -> None:
    """Imports torchvision where it is installed. PyPI's has operators for a torch with CUDA alone, which are not used
    here: declared, it can be imported without."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
