"""What ORTModule logs at its start, on rank 0: where a capture takes long, that it goes on; then, once per mode, one
line at WARNING that says how the module runs, and at INFO what explain() says of its graphs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from onnxtrain import _report

if TYPE_CHECKING:
    from onnxtrain.ortmodule._module import ORTModule
    from onnxtrain.ortmodule._program import Program

PROGRESS = (2.0, 10.0, 30.0)  # seconds after which a line is logged; then each minute


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)  # of torchrun, of mpirun


@contextlib.contextmanager
def start(model: ORTModule) -> Iterator[None]:
    """Around a call of an ORTModule that Dynamo captures: counts it, logs, at WARNING, that it still goes on, and then
    how it ran; it logs on rank 0 alone.
    """
    name, debug, by_torch = type(model._module).__name__, model._debug, model._counters.torch_graphs
    start, is_over = time.monotonic(), threading.Event()

    def report() -> None:
        for seconds in itertools.chain(PROGRESS, itertools.count(60.0, 60.0)):
            if is_over.wait(start + seconds - time.monotonic()):
                return
            counters, folder = model._counters, model._runtime.cache_dir
            is_kept = counters.cached_exports and not counters.exports
            debug.log(logging.WARNING, "ORTModule: %s is being captured%s, %.0f s so far. Later steps need less of "
                      "this%s.", name, "" if is_kept else " and exported", seconds,
                      f", and later processes read {folder}" if folder and not is_kept else "")

    thread = threading.Thread(target=report, name="onnxtrain-progress", daemon=True)
    if is_first := _rank() == 0:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if is_first:
            thread.join()
    seconds = time.monotonic() - start
    _report.count(model._counters, capture_seconds=seconds)
    _ready(model, seconds, bool(model._counters.graph_breaks) or model._counters.torch_graphs > by_torch, is_first)


def _ready(model: ORTModule, seconds: float, is_part: bool, logs: bool) -> None:
    """Logs, once per mode, how a module runs, if any of it runs in the engine; is_part: not all of it does."""
    if (training := model._is_training()) in model._announced:
        return
    programs = [program for key, known in model._all_programs() if key.training == training for program in known
                if program.steps]
    if not programs:
        return
    model._announced.add(training)
    if not logs:
        return
    name = type(model._module).__name__
    each = [program.totals() for program in programs]
    totals = {key: sum(totals.get(key, 0) for totals in each) for key in each[0]}
    graphs = f" in {len(programs)} graphs" if len(programs) > 1 else ""
    model._debug.log(logging.WARNING, "ORTModule: %s runs %sin the engine%s: %s%s, first call %.1f s, %.1f MiB "
                     "planned%s", name, "partly " if is_part else "", "" if training else " without gradients",
                     _report.counted(totals.get("steps", 0), "kernel"), graphs, seconds,
                     totals.get("slab_bytes", 0) / 2**20,
                     "; onnxtrain.explain(model) names the rest" if is_part else "")
    for program in programs:
        model._debug.log(logging.INFO, "ORTModule: %s", "\n".join(_report.explained(training, program)).strip())


def beside_loss(model: ORTModule, program: Program) -> None:
    """Logs what the results beside the loss cost, and what leaves them out, where no one has said which are read; only
    on rank 0.

    Args:
        model: the ORTModule.
    """
    if program.beside_loss and model._outputs is None and _rank() == 0:
        model._debug.log(logging.WARNING, "ORTModule: %s. If the script reads the loss alone, ORTModule(model, "
                         "outputs=) with the loss's name or place among the results, 'loss' or 0, leaves them out, and "
                         "rows without a label and padding; ORTMODULE_OUTPUTS says the same", program.beside_loss)


def _mode(graph: torch.nn.Module) -> str:
    return "training" if graph.training and torch.is_grad_enabled() else "inference"


def memory(graph: torch.nn.Module, program: Program) -> None:
    """ORTMODULE_PRINT_MEMORY_STATS: prints planned and held bytes, on rank 0, in the first ten steps and then in steps
    that are powers of two.
    """
    step = program.steps
    if _rank() != 0 or step > 10 and step & (step - 1):
        return
    totals = program.totals()
    parameters = sum(p.nbytes for p in graph.parameters())
    print(f"step {step}, {_mode(graph)}: activations {totals['slab_bytes'] / 2**20:.2f} MiB (at least "
          f"{totals['slab_lower_bound'] / 2**20:.2f}; forward {totals['forward_bytes'] / 2**20:.2f}, kept "
          f"{totals['kept_bytes'] / 2**20:.2f}, backward {totals['backward_bytes'] / 2**20:.2f}), parameters "
          f"{parameters / 2**20:.2f} MiB, outputs and gradients {totals['pool_live_bytes'] / 2**20:.2f} "
          f"MiB live, {totals['pool_cached_bytes'] / 2**20:.2f} cached, {totals['pool_peak_bytes'] / 2**20:.2f} at the "
          "peak")


def density(graph: torch.nn.Module, program: Program) -> None:
    """ORTMODULE_PRINT_INPUT_DENSITY: prints how many of all rows this step computed, rounded up to one of 64 sizes."""
    if _rank() != 0:
        return
    totals = program.totals()
    parts = []
    for name, kind in (("label", "label"), ("embedding", "key")):
        rows, all_rows = totals.get(f"{kind}_rows", 0), totals.get(f"{kind}_rows_of", 0)
        parts.append(f"{name} density {100 * rows / all_rows:.1f}% ({rows} of {all_rows} rows)" if all_rows
                     else f"{name} density 100.0%")
    print(f"step {program.steps}, {_mode(graph)}: {', '.join(parts)}")
