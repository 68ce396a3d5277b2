"""What ORTModule logs at its start, at WARNING, on rank 0: the start table, once per mode, with the features that are
on and the start-up time; before that, where an export takes long, that it goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

PROGRESS = (2.0, 10.0, 30.0)  # seconds after which a line is logged; then each minute


TESTED = (2, 15)  # the newest torch that the tests have run on


def newer_torch(debug: Any) -> None:
    """Says, once in a process, that this torch is not tested yet."""
    global _is_said
    if not _is_said and tuple(map(int, torch.__version__.split(".")[:2])) > TESTED:
        _is_said = True
        debug.log(logging.INFO, "torch %s is newer than %d.%d, the newest release that onnxtrain has been tested with",
                  torch.__version__, *TESTED)


_is_said = False


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0") or 0)


@contextlib.contextmanager
def progress(name: str, debug: Any) -> Iterator[None]:
    """Logs, at WARNING, that a module is still being exported, while that goes on; only on rank 0."""
    if _rank() != 0:
        yield
        return
    start, is_over = time.monotonic(), threading.Event()

    def report() -> None:
        for seconds in itertools.chain(PROGRESS, itertools.count(60.0, 60.0)):
            if is_over.wait(start + seconds - time.monotonic()):
                return
            debug.log(logging.WARNING, "ORTModule: %s is being captured and exported, %.0f s so far. Later steps need "
                      "less of this, and later processes read the export from ORTMODULE_CACHE_DIR.", name, seconds)

    thread = threading.Thread(target=report, name="onnxtrain-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _share(totals: dict[str, Any], kind: str, before: str, behind: str) -> str:
    """How many of all rows a program computes; "" if it computes all."""
    rows, all_rows = totals.get(f"{kind}_rows", 0), totals.get(f"{kind}_rows_of", 0)
    return f"{before}{rows} of {all_rows}{behind}" if all_rows else ""


def features(program: Any, debug: Any, fallback: Any) -> list[tuple[str, bool, str]]:
    """(feature, on, remark) of one program; for a missing feature, OFF and its substitute."""
    totals, functions = program.totals(), program.exported.functions
    recomputed, compressed = totals.get("recomputed_nodes", 0), totals.get("compressed_values", 0)
    operators = any(not isinstance(call.function, type) for call in functions)
    classes = any(isinstance(call.function, type) for call in functions)
    packed, random = totals.get("packed_nodes", 0), any(session.random for session in program.sessions)
    return [
        ("ATen executor", operators, "PyTorch runs operators that the engine does not have" if operators
         else "the engine has every operator of this graph"),
        ("Fallback to PyTorch", fallback.enabled, "PyTorch runs a call that the engine cannot run"
         if fallback.enabled else "ORTMODULE_FALLBACK_POLICY turns what the engine cannot run into an error"),
        ("Custom autograd function", classes, "PyTorch runs the torch.autograd.Functions of this graph" if classes
         else "this graph has no torch.autograd.Function"),
        ("Cast propagation", False, "values stay in the types that autocast gives them"),
        ("Compute optimizer", bool(packed), f"{packed} nodes leave out rows that nothing reads"
         f"{_share(totals, 'selected', '; they compute ', ' rows')}" if packed else "every node computes all rows"),
        ("Label sparsity", bool(totals.get("label_rows_of")),
         _share(totals, "label", "", " rows of scores are computed") or "all rows of scores are computed"),
        ("Embedding sparsity", bool(totals.get("key_rows_of")),
         _share(totals, "key", "", " tokens are computed") or "all tokens are computed"),
        ("Memory optimizer", bool(recomputed),
         f"backward runs {recomputed} nodes again, {totals['recomputed_share']:.1%} of the work, and saves "
         f"{totals['recomputed_bytes'] / 2**20:.1f} MiB" if recomputed else
         "backward runs nothing again; ORTMODULE_MEMORY_OPT_LEVEL=1 or 2 saves memory"),
        ("Activation compression", bool(compressed),
         f"{compressed} values are kept in {totals['compressed_bytes'] / 2**20:.1f} MiB instead of "
         f"{totals['compressed_from'] / 2**20:.1f}" if compressed else
         "activations keep their type; ORTMODULE_ACTIVATION_COMPRESSION=bf16 halves them"),
        ("Random numbers", random, "operators such as dropout follow torch's generator" if random
         else "this graph draws no random numbers"),
        ("Verification", bool(debug.verify), "the first steps are compared with eager PyTorch" if debug.verify
         else "DebugOptions(verify=True) compares the first step with eager PyTorch"),
    ]


def ready(name: str, training: bool, program: Any, debug: Any, fallback: Any) -> None:
    """Logs the table and the start-up time; only on rank 0."""
    if _rank() != 0:
        return
    exported, session = program.exported, program.totals()
    mode = "training" if training else "inference"
    export_seconds = exported.seconds.get("total", 0.0)
    build = program.build_seconds + session.get("build_seconds", 0.0)
    rows = [f"  {feature:<28} {'ON' if on else 'OFF':<4} {remark}"
            for feature, on, remark in features(program, debug, fallback)]
    debug.log(logging.WARNING,
              "ORTModule: %s is ready for %s\n%s\n  initialization overhead %.2f s: the export took %.2f s, the "
              "build of the program %.3f s", name, mode, "\n".join(rows), export_seconds + build, export_seconds, build)


def beside_loss(model: Any, program: Any) -> None:
    """Logs what the results beside the loss cost, and what leaves them out, where no one has said which are read; only
    on rank 0.

    Args:
        model: of the graph, which is one of an ORTModule's.
    """
    parts = model.__dict__.get("_part_of", lambda: None)()
    if program.beside_loss and parts is not None and parts._model()._outputs is None and _rank() == 0:
        model._debug.log(logging.WARNING, "ORTModule: %s. If the script reads the loss alone, ORTModule(model, "
                         "outputs='loss') or ORTMODULE_OUTPUTS=loss leaves them out, with rows that have no label and "
                         "padding", program.beside_loss)


def memory(model: Any, program: Any) -> None:
    """ORTMODULE_PRINT_MEMORY_STATS: prints planned and held bytes, on rank 0, in the first ten steps and then in steps
    that are powers of two.
    """
    step = program.steps
    if _rank() != 0 or step > 10 and step & (step - 1):
        return
    totals = program.totals()
    mode = "training" if model._is_training() else "inference"
    parameters = sum(p.nbytes for p in model.parameters())
    print(f"step {step}, {mode}: activations {totals['slab_bytes'] / 2**20:.2f} MiB (at least "
          f"{totals['slab_lower_bound'] / 2**20:.2f}; forward {totals['forward_bytes'] / 2**20:.2f}, kept "
          f"{totals['kept_bytes'] / 2**20:.2f}, backward {totals['backward_bytes'] / 2**20:.2f}), parameters "
          f"{parameters / 2**20:.2f} MiB, outputs and gradients {totals['pool_live_bytes'] / 2**20:.2f} "
          f"MiB live, {totals['pool_cached_bytes'] / 2**20:.2f} cached, {totals['pool_peak_bytes'] / 2**20:.2f} at the "
          "peak")


def density(model: Any, program: Any) -> None:
    """ORTMODULE_PRINT_INPUT_DENSITY: prints how many of all rows this step computed, rounded up to one of 64 sizes."""
    if _rank() != 0:
        return
    totals = program.totals()
    parts = []
    for name, kind in (("label", "label"), ("embedding", "key")):
        rows, all_rows = totals.get(f"{kind}_rows", 0), totals.get(f"{kind}_rows_of", 0)
        parts.append(f"{name} density {100 * rows / all_rows:.1f}% ({rows} of {all_rows} rows)" if all_rows
                     else f"{name} density 100.0%")
    print(f"step {program.steps}, {'training' if model._is_training() else 'inference'}: {', '.join(parts)}")
