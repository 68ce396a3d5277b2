"""stats() and explain(): what ran in the engine, what ran in PyTorch, and how long it took."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING, Any

from onnxtrain import _torch

if TYPE_CHECKING:
    from onnxtrain.ortmodule._module import ORTModule
    from onnxtrain.ortmodule._program import Program


@dataclasses.dataclass
class Counters:
    """Counts of one module, or of the process."""

    engine_steps: int = 0
    fallback_steps: int = 0
    captures: int = 0
    exports: int = 0
    cached_exports: int = 0
    export_seconds: float = 0.0
    build_seconds: float = 0.0
    capture_seconds: float = 0.0
    forward_seconds: float = 0.0  # of calls that were not captured; added without a lock, as engine_step() does
    reasons: list[str] = dataclasses.field(default_factory=list)
    graph_breaks: list[str] = dataclasses.field(default_factory=list)
    sizes: list[str] = dataclasses.field(default_factory=list)  # of the tensors of calls that were captured
    engine_graphs: int = 0  # of an ORTModule's that ran for its steps, in the engine and in PyTorch
    torch_graphs: int = 0
    methods: dict[str, int] | None = dataclasses.field(default_factory=dict)  # looked up so often; None: that is said


process = Counters()  # of all modules
_lock = threading.Lock()


def count(module_counters: Counters, **amounts: float) -> None:
    """Adds to a module's counters and to the process's."""
    with _lock:
        for name, amount in amounts.items():
            for counters in (module_counters, process):
                setattr(counters, name, getattr(counters, name) + amount)


def note(module_counters: Counters, what: str, text: str) -> None:
    """Adds a text to the reasons, graph_breaks or sizes of a module and of the process, once."""
    with _lock:
        for counters in (module_counters, process):
            if text not in (texts := getattr(counters, what)):
                texts.append(text)


def engine_step(module_counters: Counters) -> None:
    """Counts a step of the engine. It takes no lock, for speed: the interpreter switches threads only at calls and
    jumps, and an increment has neither."""
    module_counters.engine_steps += 1
    process.engine_steps += 1


_programs: weakref.WeakSet[Program] = weakref.WeakSet()


def register(program: Program) -> None:
    """Adds a program to stats() for as long as it lives."""
    _programs.add(program)


def stats(model: ORTModule | None = None) -> dict[str, Any]:
    """Counts since the process started, or of one ORTModule.

    Returns:
        engine_steps, fallback_steps: calls of forward that ran in the engine, and in PyTorch.
        captures, capture_seconds: times that Dynamo captured forward, or a part of it behind a cut, and the time of
            calls with captures, exports included.
        programs: graphs that are ready to run, each for all sizes of its dynamic dims; equal ones share an export.
        exports, export_seconds, build_seconds: exports by torch, their time, and the time to load their
            graphs.
        cached_exports: exports loaded from ORTMODULE_CACHE_DIR.
        engine_share: of the time of forward in all other calls, what the engine took; None before there are such calls.
        specialisations, specialise_seconds, last_specialise_seconds: programs for new sizes of dynamic dims or new
            sets of gradients, without an export.
        slab_bytes: planned activations of the programs used last.
        reasons: one text for each cause of fallbacks.
        graph_breaks: one text for each place where Dynamo cut a graph and Python runs.

    Raises:
        TypeError: model is none.
    """
    if model is None:
        counters, programs = process, list(_programs)
    else:
        check(model, "stats")
        counters, programs = model._counters, [program for _, known in model._all_programs() for program in known]
    with _lock:
        result = dataclasses.asdict(counters)
    for name in ("engine_graphs", "torch_graphs", "methods", "sizes"):
        del result[name]
    seconds = result.pop("forward_seconds")
    engine = sum(program.step_seconds - program.first_seconds for program in programs)  # the first ones are captures
    result["engine_share"] = min(max(engine / seconds, 0.0), 1.0) if seconds > 0 else None
    result["programs"] = len(programs)
    sessions = [session.stats() for program in programs for session in program.sessions]
    latest = max(programs, key=lambda program: program.used, default=None)
    result["specialisations"] = sum(session["programs_built"] for session in sessions)
    result["specialise_seconds"] = sum(session["build_seconds"] for session in sessions)
    result["last_specialise_seconds"] = 0.0 if latest is None else latest.totals().get("last_build_seconds", 0.0)
    result["slab_bytes"] = sum(session["slab_bytes"] for session in sessions)
    return result


def counted(number: float, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def explained(training: bool, program: Program) -> list[str]:
    """Lines on one export: where its nodes run, its times and memory."""
    totals, exported = program.totals(), program.exported
    rows = [
        f"  {'training' if training else 'inference'} graph: opset {exported.opset}, "
        f"{counted(totals.get('steps', 0), 'kernel')} ({totals.get('forward_steps', 0)} in forward), "
        f"{counted(program.steps, 'step')}",
        f"    start: the export took {exported.seconds.get('total', 0.0):.2f} s, the build "
        f"{totals.get('build_seconds', 0.0):.2f} s for batches of {counted(totals.get('programs_built', 0), 'size')}",
        f"    memory: {totals.get('slab_bytes', 0) / 2**20:.1f} MiB are planned for activations; without "
        f"recomputation no plan needs less than {totals.get('slab_lower_bound', 0) / 2**20:.1f}",
    ]
    if program.beside_loss:
        rows.append(f"    {program.beside_loss}: ORTModule(outputs=) leaves out what is not read")
    rows += [f"    {totals[f'{kind}_rows']} of {totals[f'{kind}_rows_of']} {what}"
             for kind, what in (("selected", "rows are computed where later nodes read some of the rows"),
                                ("label", "rows of scores are computed: those of tokens with a label"),
                                ("key", "tokens are computed: padding is not")) if totals.get(f"{kind}_rows_of")]
    if totals.get("recomputed_nodes"):
        rows.append(f"    backward runs {counted(totals['recomputed_nodes'], 'node')} again instead of keeping "
                    f"{totals['recomputed_bytes'] / 2**20:.1f} MiB")
    if program.steps:
        later = (program.step_seconds - program.first_seconds) / max(program.steps - 1, 1) * 1e3
        rows.append(f"    time: the first forward of the engine took {program.first_seconds * 1e3:.3f} ms"
                    + (f", later ones {later:.3f} ms on average" if program.steps > 1 else ""))
    if exported.functions:
        for kind, calls in (("torch.autograd.Function",
                             [c for c in exported.functions if isinstance(c.function, type)]),
                            ("operator", [c for c in exported.functions if not isinstance(c.function, type)])):
            if calls:
                names = ", ".join(sorted({getattr(c.function, "__qualname__", str(c.function)) for c in calls}))
                rows.append(f"    PyTorch runs {len(calls)} {kind} call{'s' * (len(calls) > 1)} ({names}) between "
                            f"{len(program.sessions)} parts of the graph")
    for session in program.sessions:
        rows += [f"    CUDA graph of {phase}: recorded {recorded} times, replayed {replayed} times"
                 + (f"; the latest call ran without it: {reason}" if reason else "")
                 for phase, recorded, replayed, reason in session.graphs()]
    return rows + [f"    note: {note}" for note in exported.notes]


def check(model: object, function: str) -> None:
    """Raises TypeError where the model is no ORTModule."""
    if not hasattr(model, "_all_programs"):
        raise TypeError(f"{function}() takes an ORTModule, but was given a {type(model).__name__}: "
                        f"model = ORTModule(model), then {function}(model). A module that holds an ORTModule, as "
                        "DistributedDataParallel does, has it as an attribute")


MOST_GRAPHS = 4  # that explain() describes, those that took the most time
LEAST_BUILDS = 0.2  # of forward's time, what programs for new sizes take where the advice is to have fewer sizes


class Text(str):
    """A text of several lines, which a notebook and the interpreter show as they are."""

    def __repr__(self) -> str:
        return str(self)


def _verdict(counts: dict[str, Any], seconds: float, sizes: list[str]) -> tuple[str, str]:
    """How a module with these counts, and this time of forward, runs, and the one thing to do about it.

    Args:
        sizes: of calls that were captured.
    """
    engine, by_torch, reasons = counts["engine_steps"], counts["fallback_steps"], counts["reasons"]
    calls, share = engine + by_torch, counts["engine_share"]
    if not calls:
        return "has not been called", "run some steps first"
    reason = reasons[-1] if reasons else "they raised an exception"
    time = "" if share is None else f", which takes {share:.0%} of forward's time"
    if not engine and counts["programs"]:
        return f"runs in part in the engine{time}; PyTorch runs a part of each call", f"remove the reason: {reason}"
    if not engine:
        return "runs in PyTorch, no call of it in the engine", f"remove the reason: {reason}"
    if by_torch > engine and reasons:
        return f"runs in PyTorch in {by_torch} of {calls} calls", f"remove the reason: {reason}"
    if by_torch and reasons:
        return (f"runs in the engine{time}, but {by_torch} of {calls} calls in PyTorch", f"remove the reason: {reason}")
    if counts["graph_breaks"]:
        return (f"runs in part in the engine{time}",
                f"change the code at which the graph is cut: {counts['graph_breaks'][0]}")
    if by_torch:
        return f"runs in the engine{time}; {by_torch} of {calls} calls raised an exception", "nothing"
    if counts["captures"] > max(3, calls // 2) and len(sizes) > counts["captures"] // 2:
        return (f"runs in the engine{time}, but most calls have sizes that need a capture of their own",
                "give batches of like sizes: one row, and another height or width of pictures, have graphs of their "
                f"own. The latest: {sizes[-1]}")
    if counts["captures"] > max(3, calls // 2):
        return (f"runs in the engine{time}, but Dynamo captures most calls again",
                "find the Python value that changes from call to call; TORCH_LOGS=recompiles names it")
    if counts["specialisations"] > max(8, calls // 2) and counts["specialise_seconds"] > LEAST_BUILDS * seconds:
        return f"runs in the engine{time}, but most calls have new sizes", "pad sizes to a few, or sort by them"
    if share is not None and share < 0.5:
        return f"runs in the engine{time}", "use larger batches: Python around the engine takes the rest"
    return f"runs in the engine{time}", "nothing; onnxtrain.profile(model) shows where the time goes"


def explain(model: ORTModule) -> str:
    """How an ORTModule runs: a verdict and the one thing to do, then counts, reasons, and each graph's time and memory.

    Returns:
        A text to print; a notebook shows it by itself.

    Raises:
        TypeError: model is no ORTModule.
    """
    check(model, "explain")
    counts = stats(model)
    verdict, advice = _verdict(counts, model._counters.forward_seconds, model._counters.sizes)
    called = "forward and methods" if model._methods else "forward"
    lines = [
        f"{type(model.module).__name__} {verdict}",
        f"  to do: {advice}",
        f"  calls of {called}: {counts['engine_steps']} in the engine, {counts['fallback_steps']} in PyTorch",
        f"  captures: {counts['captures']} in {counts['capture_seconds']:.2f} s, with "
        f"{counted(counts['exports'], 'export')} in {counts['export_seconds']:.2f} s and {counts['cached_exports']} "
        "from disk",
    ]
    if (more := counts["specialisations"] - counts["programs"]) > 0:
        lines.append(f"  programs: {counts['specialisations']}, of them {more} for new sizes, built in "
                     f"{counts['specialise_seconds']:.2f} s, the latest in {counts['last_specialise_seconds']:.2f} s")
    lines += [f"  Dynamo cuts the graph, and Python runs in between: {reason}" for reason in counts["graph_breaks"]]
    lines += [f"  in PyTorch because: {reason}" for reason in counts["reasons"]]
    if names := _torch.left_alone():
        lines.append(f"  PyTorch is left alone at {', '.join(names)}, which it has in another form: `python -m "
                     "onnxtrain doctor` says what for")
    graphs = [(key.training, program) for key, programs in model._all_programs() for program in programs]
    shown = sorted(graphs, key=lambda graph: -graph[1].step_seconds)[:MOST_GRAPHS]
    for graph in graphs:
        lines += explained(*graph) if graph in shown else []
    if len(graphs) > MOST_GRAPHS:
        lines.append(f"  and {counted(len(graphs) - MOST_GRAPHS, 'graph')} that took less time")
    return Text("\n".join(lines))
