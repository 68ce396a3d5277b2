"""Every operator by itself, forward and backward, through ORTModule and in eager torch: a table sorted by the ratio.

    python tests/bench/operators.py [--only NAME ...] [--threads N] [--rounds 7] [--below 0.5] [--top N]

Turns are interleaved in one process; times are medians of the rounds. With one thread they are the processor's, so that neighbours
who share the cores do not decide. The ratio is eager's time over ours, of whole steps; forward's
and backward's own stand beside it, and the kernel in which our step spends most. Shapes are such that a step takes a third of a
millisecond or more, so that a call's own 30 us do not decide. With --below, exit code 1 if a row's ratio is below; such rows are
measured again before, since a neighbour's work in one turn is no cliff.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from typing import Any, Callable

import torch
from operator_rows import ROWS, Row

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import DebugOptions, LogLevel, ORTModule

warnings.filterwarnings("ignore")
clock: Callable[[], float] = time.perf_counter
WARM_UP, TURN = 3, 0.01  # steps; seconds of a turn, at least one step


class Peer:
    """One row's module with its inputs, stepped by itself."""

    def __init__(self, module: torch.nn.Module, inputs: list[torch.Tensor]) -> None:
        self.module, self.inputs = module, inputs
        self.leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
        self.seeds: list[torch.Tensor] = []

    def step(self) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        for leaf in self.leaves:
            leaf.grad = None
        start = clock()
        result = self.module(*self.inputs)
        middle = clock()
        outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t.requires_grad]
        if not outputs:
            return middle - start, 0.0
        if not self.seeds:
            self.seeds = [torch.randn(t.shape) for t in outputs]
        middle_again = clock()
        torch.autograd.backward(outputs, self.seeds)
        return middle - start, clock() - middle_again


def slowest_kernel(model: ORTModule, step: Any) -> str:
    """Of one more step: the kernel with most of the time, its share and phase."""
    _C.set_timing(True)
    step()
    _C.set_timing(False)
    events = [event for _, known in model._all_programs() for program in known for session in program.sessions
              for event in session.timeline()]
    total = sum(end - start for *_, start, end in events)
    if not total:
        return "-"
    _, operator, kernel, shape, backward, start, end = max(events, key=lambda event: event[-1] - event[-2])
    return f"{operator}:{kernel} {shape} {'backward' if backward else 'forward'} {(end - start) / total:.0%}"


class Result:
    """Medians of one row."""

    def __init__(self, row: Row, rounds: int) -> None:
        self.row = row
        torch.manual_seed(0)
        module, inputs = row.make()
        model = ORTModule(module, DebugOptions(LogLevel.WARNING))
        eager, ours = Peer(module, inputs), Peer(model, inputs)
        for peer in (eager, ours):
            for _ in range(WARM_UP):
                first = sum(peer.step())
            peer.seeds = eager.seeds
        counts = onnxtrain.stats(model)
        self.reason = counts["reasons"][0] if counts["fallback_steps"] else ""
        steps = max(1, min(50, int(TURN / max(first, 1e-6))))
        times: dict[Peer, list[tuple[float, float]]] = {eager: [], ours: []}
        for _ in range(rounds):
            for peer, samples in times.items():
                peer.step()
                turn = [peer.step() for _ in range(steps)]
                samples.append((statistics.median(f for f, _ in turn), statistics.median(b for _, b in turn)))
        self.eager, self.ours = ([statistics.median(phase) for phase in zip(*times[peer])] for peer in (eager, ours))
        self.kernel = slowest_kernel(model, ours.step)

    @property
    def ratio(self) -> float:
        return sum(self.eager) / sum(self.ours)

    def __str__(self) -> str:
        by_phase = [f"{e / o:.2f}" if o else "-" for e, o in zip(self.eager, self.ours)]
        where = f"in PyTorch: {self.reason}" if self.reason else self.kernel
        return (f"{self.row.name:<52}{1e3 * sum(self.eager):>9.2f}{1e3 * sum(self.ours):>9.2f}{self.ratio:>7.2f}"
                f"{by_phase[0]:>7}{by_phase[1]:>7}  {where}")


def measure(row: Row, rounds: int) -> Result | None:
    try:
        return Result(row, rounds)
    except Exception as error:  # noqa: BLE001 - one row must not end the table
        print(f"{row.name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        return None
    finally:
        torch._dynamo.reset()
        gc.collect()


def main() -> int:
    global clock
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="rows whose name has one of these in it")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--below", type=float, help="exit code 1 if a ratio is below")
    parser.add_argument("--top", type=int, help="so many rows of the table, the slowest ones")
    parser.add_argument("--since", help="rows from the first one on whose name has this in it")
    parser.add_argument("--progress", action="store_true", help="each row as soon as it is measured")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if torch.get_num_threads() == 1:
        clock = time.thread_time
    rows = [row for row in ROWS if not args.only or any(part in row.name for part in args.only)]
    if args.since:
        rows = rows[next(i for i, row in enumerate(rows) if args.since in row.name):]
    results, failed = [], 0
    for row in rows:
        result = measure(row, args.rounds)
        if result and args.below and result.ratio < args.below:
            result = max((r for r in (result, measure(row, 2 * args.rounds)) if r), key=lambda r: r.ratio)
        failed += result is None
        if result:
            results.append(result)
            if args.progress:
                print(result, flush=True)
    results.sort(key=lambda r: r.ratio)
    print(f"\n{torch.get_num_threads()} threads, torch {torch.__version__}, {_C.build_info()['isa']}, {args.rounds} rounds\n"
          f"{'':<52}{'eager ms':>9}{'ours ms':>9}{'ratio':>7}{'fwd':>7}{'bwd':>7}  slowest kernel")
    for result in results[:args.top]:
        print(result)
    low = [r for r in results if args.below and r.ratio < args.below]
    print(f"{len(results)} rows, geometric mean {statistics.geometric_mean([r.ratio for r in results]):.2f}, "
          f"{sum(bool(r.reason) for r in results)} in PyTorch, {failed} failed" + (f", {len(low)} below {args.below}" if args.below else ""))
    return int(bool(low) or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
