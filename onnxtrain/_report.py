"""stats() and explain(): what ran where."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any


@dataclasses.dataclass
class Counters:
    """Counts of one module, or of the process."""

    engine_steps: int = 0
    fallback_steps: int = 0
    exports: int = 0
    export_seconds: float = 0.0
    build_seconds: float = 0.0
    reasons: list[str] = dataclasses.field(default_factory=list)


_process = Counters()
_lock = threading.Lock()


def count(module_counters: Counters, **amounts: Any) -> None:
    """Adds to a module's counters and to the process's."""
    with _lock:
        for name, amount in amounts.items():
            for counters in (module_counters, _process):
                setattr(counters, name, getattr(counters, name) + amount)


def engine_step(module_counters: Counters) -> None:
    """One more step in the engine: on the step path, so spelled out."""
    with _lock:
        module_counters.engine_steps += 1
        _process.engine_steps += 1


def stats(model: Any = None) -> dict[str, Any]:
    """Counts since the process started, or of one ORTModule: engine_steps, fallback_steps, exports, seconds, reasons."""
    counters = _process if model is None else model._counters
    with _lock:
        return dataclasses.asdict(counters)


def explain(model: Any) -> str:
    """Prints and returns, for an ORTModule, which exporter was used, what ran where and why, and what it cost."""
    lines = [f"onnxtrain: {type(model.module).__name__}"]
    for key, programs in model._programs.items():
        for program in programs:
            session = program.session.stats()
            mode = "training" if key.training else "inference"
            lines.append(
                f"  {mode}: exporter {program.exported.exporter}, opset {program.exported.opset}, "
                f"{session['steps']} kernels ({session['forward_steps']} forward), "
                f"export {program.exported.seconds.get('total', 0.0):.2f} s, build {session['build_seconds'] * 1e3:.1f} ms "
                f"for {session['programs_built']} shapes, slab {session['slab_bytes'] / 2**20:.1f} MiB"
            )
            lines += [f"    note: {note}" for note in program.exported.notes]
    counts = stats(model)
    lines.append(f"  steps: {counts['engine_steps']} in the engine, {counts['fallback_steps']} in PyTorch")
    lines += [f"  in PyTorch because: {reason}" for reason in counts["reasons"]]
    text = "\n".join(lines)
    print(text)
    return text
