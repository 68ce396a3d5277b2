"""Training steps on a GPU: ORTModule, eager PyTorch and torch.compile (default and max-autotune), all with
AdamW(fused=True).

    python tests/bench/gpu.py [--model NAME ...] [--kinds onnxtrain,eager,compile,max-autotune] [--rounds 20] [--only
    steps|adam|mlp]
                              [--limit SECONDS] [--kernels]

All kinds train one module with one optimizer, so that the largest model fits once; rounds take turns, and medians are
compared. TFLOP/s counts the products of forward and backward alone (recomputed ones not), and its share is of 790, what
bf16 products reach on an H200. Peak memory is that of a step without what the other kinds hold. Then FusedAdam's
bandwidth beside a copy's and torch's fused AdamW, and the CPU time of a small MLP's step above that of a bare autograd
Function. Goals that are missed end it with 1. A kind that is not ready after --limit seconds (max-autotune may take
minutes to compile) is left out, and said; FusedAdam and the MLP come first, as they are quick. A step of ours that
PyTorch ran in our place counts as a failure. `--kernels` prints another table, for each kind: the 25 CUDA kernels (on
the CPU, torch's operators) of one step that took longest, by torch.profiler, with their times and numbers of calls.
`--device cpu --tiny` runs the same code on small sizes, for its test.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import adam as adam_bench
import overhead
import torch
import torch.nn.functional as F
import workloads
from torch import nn

from onnxtrain import _report
from onnxtrain.optim import FusedAdam
from onnxtrain.ortmodule import ORTModule

PEAK = 790e12
KINDS = ("onnxtrain", "eager", "compile", "max-autotune")
OVER_EAGER, OVER_COMPILE, OF_COPY, MLP_MICROSECONDS = 1.45, 1.1, 0.9, 25.0
KERNEL_ROWS, KERNEL_NAME = 25, 100  # of the table of kernels; characters of a name


class Task(NamedTuple):
    module: nn.Module
    batch: tuple[torch.Tensor, ...]
    loss: Callable[..., torch.Tensor]
    tokens: int
    flops: float  # of the products of a step, forward and backward
    autocast: bool


def decoder_flops(tokens: int, weights: int, layers: int, width: int, length: int) -> float:
    """Six per token and weight in a product; two products of attention forward and four backward,
    2 * width * length each.
    """
    return tokens * (6.0 * weights + 12.0 * layers * width * length)


def products(module: nn.Module) -> int:
    """Elements of the weights that are operands of products: of Linear layers and of attention's projections."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)) + \
        sum(m.in_proj_weight.numel() for m in module.modules() if isinstance(m, nn.MultiheadAttention))


def language_task(module: nn.Module, words: int, batch: int, length: int, layers: int, width: int) -> Task:
    x, y = (torch.randint(0, words, (batch, length)) for _ in range(2))
    flops = decoder_flops(batch * length, products(module), layers, width, length)
    return Task(module, (x, y), lambda m, x, y: m(x, y), batch * length, flops, True)


def gpt2(tiny: bool) -> Task:
    """GPT-2 of 124M parameters, 16 x 1024 tokens."""
    words, width, heads, layers, batch, length = (96, 16, 2, 2, 2, 8) if tiny else (50257, 768, 12, 12, 16, 1024)
    return language_task(workloads.GPT2(words, width, heads, layers, length), words, batch, length, layers, width)


def bert(tiny: bool) -> Task:
    """BERT-base, 64 x 128 tokens, dropout 0.1."""
    words, width, heads, layers, batch, length = (96, 16, 2, 2, 2, 8) if tiny else (30522, 768, 12, 12, 64, 128)
    return language_task(workloads.Bert(words, width, layers, length, heads), words, batch, length, layers, width)


def llama(tiny: bool) -> Task:
    """Llama-style of 1.2 billion parameters, 4 x 2048 tokens."""
    sizes = (96, 16, 4, 2, 32, 2, 8) if tiny else (128256, 2048, 32, 8, 8192, 16, 2048)
    module = workloads.Llama(*sizes)
    return language_task(module, sizes[0], 2 if tiny else 4, sizes[-1], sizes[-2], sizes[1])


def sample(tiny: bool) -> Task:
    """The getting-started sample: 35 x 20 words of Wikitext-2's vocabulary, float32."""
    words, length, batch = (96, 5, 4) if tiny else (workloads.WORDS, 35, 20)
    module = workloads.TransformerModel(words)
    x, y = torch.randint(0, words, (length, batch)), torch.randint(0, words, (length * batch,))
    width = next(m for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer)).linear1.in_features
    layers = sum(isinstance(m, nn.TransformerEncoderLayer) for m in module.modules())
    flops = decoder_flops(length * batch, products(module), layers, width, length)
    return Task(module, (x, y), lambda m, x, y: F.cross_entropy(m(x).view(-1, words), y), length * batch, flops, False)


TASKS: dict[str, Callable[[bool], Task]] = {f.__name__: f for f in (gpt2, bert, llama, sample)}


# ---- measuring ----

def wrapped(kind: str, module: nn.Module) -> nn.Module:
    """The module as a kind runs it."""
    if kind == "onnxtrain":
        return ORTModule(module)
    if kind == "eager":
        return module
    return torch.compile(module, mode=None if kind == "compile" else kind)


def stepper(model: nn.Module, task: Task, optimizer: torch.optim.Optimizer, device: str) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=task.autocast):
            loss = task.loss(model, *task.batch)
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    """Of one step, by the device's clock."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@contextlib.contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Raises TimeoutError in what runs here after so many seconds; 0: never."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {limit} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def warm_up(model: nn.Module, step: Callable[[], None]) -> None:
    """Exports, compiles and records. Raises RuntimeError where PyTorch ran a step of ours."""
    for _ in range(8):
        step()
    stats = _report.stats(model) if isinstance(model, ORTModule) else {"fallback_steps": 0}
    if stats["fallback_steps"]:
        raise RuntimeError(f"PyTorch ran {stats['fallback_steps']} of the steps: {stats['reasons']}")


def held(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def on_device(task: Task, device: str) -> tuple[Task, torch.optim.Optimizer]:
    task = task._replace(module=task.module.to(device), batch=tuple(t.to(device) for t in task.batch))
    return task, torch.optim.AdamW(task.module.parameters(), 1e-4, fused=True)


def ready(kind: str, task: Task, optimizer: torch.optim.Optimizer, device: str,
          limit: int) -> Callable[[], None] | None:
    """The step of a kind after its warm-up. None where it fails; the reason is printed, and the other kinds go on."""
    model = wrapped(kind, task.module)
    step = stepper(model, task, optimizer, device)
    try:
        with at_most(limit):
            warm_up(model, step)
    except Exception as error:  # noqa: BLE001 - printed
        print(f"{kind} failed: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        return None
    return step


def measure(task: Task, kinds: tuple[str, ...], rounds: int, device: str,
            limit: int = 0) -> dict[str, tuple[float, float]]:
    """Per kind: median seconds of a step, and the peak bytes of one. A kind that fails is left out, and says why."""
    task, optimizer = on_device(task, device)
    steps: dict[str, Callable[[], None]] = {}
    own: dict[str, int] = {}
    for kind in kinds:
        before = held(device) if own else 0
        step = ready(kind, task, optimizer, device, limit)
        if step:
            steps[kind], own[kind] = step, held(device) - before if own else 0
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    peaks: dict[str, float] = dict.fromkeys(steps, 0.0)
    for _ in range(rounds):
        for kind, step in steps.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times[kind].append(seconds(step, device))
            if device == "cuda":
                others = sum(bytes_ for name, bytes_ in own.items() if name != kind)
                peaks[kind] = max(peaks[kind], torch.cuda.max_memory_allocated() - others)
    return {kind: (statistics.median(times[kind]), peaks[kind]) for kind in steps}


def table(name: str, task: Task, results: dict[str, tuple[float, float]]) -> list[str]:
    """Lines of a table of one model."""
    lines = [f"{name}: {task.tokens} tokens, {task.flops / 1e12:.3g} TFLOP a step, "
             f"{'bf16 autocast' if task.autocast else 'float32'}",
             f"  {'kind':14}{'ms':>10}{'tokens/s':>12}{'TFLOP/s':>10}{'of 790':>9}{'peak GiB':>10}{'ours is':>10}"]
    ours = results.get("onnxtrain", (0.0, 0.0))[0]
    for kind, (took, peak) in results.items():
        rate = task.flops / took
        lines.append(f"  {kind:14}{took * 1e3:10.3f}{task.tokens / took:12.0f}{rate / 1e12:10.1f}"
                     f"{rate / PEAK:9.1%}{peak / 2**30:10.2f}"
                     f"{f'{took / ours:.2f} x' if ours else '-':>10}")
    return lines


def missed(name: str, results: dict[str, tuple[float, float]]) -> list[str]:
    """Goals that a model's results do not reach."""
    if "onnxtrain" not in results:
        return [f"{name}: onnxtrain did not run"]
    ours, found = results["onnxtrain"][0], []
    for kind, goal in (("eager", OVER_EAGER), ("compile", OVER_COMPILE), ("max-autotune", OVER_COMPILE)):
        if kind in results and results[kind][0] / ours < goal:
            found.append(f"{name}: {results[kind][0] / ours:.2f} x {kind}, the goal is {goal}")
    return found


# ---- kernels ----

def kernels(step: Callable[[], None], device: str) -> list[tuple[str, float, int]]:
    """Name, milliseconds and calls of each CUDA kernel of one step, the longest first; on the CPU of torch's operators.
    Kernels of CUDA graphs are among them.
    """
    on_gpu = device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    rows = [(event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3, event.count)
            for event in profile.key_averages()]
    return sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])


def kernel_table(kind: str, rows: list[tuple[str, float, int]]) -> list[str]:
    """Lines of the table of one kind: the longest kernels, the others together, and the sum."""
    lines = [f"  {kind}: {len(rows)} kernels of different names", f"  {'ms':>10}{'calls':>8}  kernel"]
    lines += [f"  {ms:10.3f}{calls:8}  {name[:KERNEL_NAME]}" for name, ms, calls in rows[:KERNEL_ROWS]]
    rest = rows[KERNEL_ROWS:]
    if rest:
        lines.append(f"  {sum(ms for _, ms, _ in rest):10.3f}{sum(calls for *_, calls in rest):8}  the others")
    return [*lines, f"  {sum(ms for _, ms, _ in rows):10.3f}{sum(calls for *_, calls in rows):8}  all"]


def print_kernels(name: str, task: Task, kinds: tuple[str, ...], device: str, limit: int) -> list[str]:
    """Prints the tables of a model; the kinds that failed."""
    task, optimizer = on_device(task, device)
    print(f"{name}: {task.tokens} tokens, one step", flush=True)
    missing = []
    for kind in kinds:
        step = ready(kind, task, optimizer, device, limit)
        if step:
            print("\n".join(kernel_table(kind, kernels(step, device))), flush=True)
        else:
            missing.append(f"{name}: {kind} did not run")
    return missing


# ---- FusedAdam, MLP ----

def adam(rounds: int, device: str, tiny: bool) -> list[str]:
    """Bandwidth of FusedAdam on GPT-2's parameters, of torch's fused AdamW, and of a copy; the goals missed."""
    shapes = adam_bench.shapes_of("gpt2", 0.02 if tiny else 1.0)
    kinds = {"torch": lambda params: torch.optim.AdamW(params, 1e-4, fused=True),
             "onnxtrain": lambda params: FusedAdam(params, 1e-4)}
    steps: dict[str, Callable[[], object]] = {}
    count = 0
    for kind, make in kinds.items():
        params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        count = sum(p.numel() for p in params)
        steps[kind] = make(params).step
        try:
            for _ in range(3):
                steps[kind]()
        except Exception as error:  # noqa: BLE001 - said below
            print(f"FusedAdam: {type(error).__name__}: {str(error)[:300]}")
            return [f"{kind}'s fused Adam does not run on {device}"]
    source = torch.randn(max(1, count * 7 // 2), device=device)
    target = torch.empty_like(source)
    steps["copy"] = lambda: target.copy_(source)
    steps["copy"]()
    times = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, step in steps.items():
            times[kind].append(seconds(step, device))
    rates = {kind: (8 * source.numel() if kind == "copy" else 28 * count) / statistics.median(took)
             for kind, took in times.items()}
    print("FusedAdam, GPT-2's parameters:", ", ".join(f"{kind} {rate / 1e9:.0f} GB/s" for kind, rate in rates.items()),
          f"({rates['onnxtrain'] / rates['copy']:.1%} of the copy, {rates['onnxtrain'] / rates['torch']:.2f} x torch)")
    found = ([] if rates["onnxtrain"] >= OF_COPY * rates["copy"]
             else [f"FusedAdam is at {rates['onnxtrain'] / rates['copy']:.1%} of a copy"])
    return found if rates["onnxtrain"] >= rates["torch"] else [*found, "FusedAdam is slower than torch's fused AdamW"]


def mlp(rounds: int, device: str) -> list[str]:
    """CPU time of a 784-500-10 step with graphs above a bare autograd Function with the same inputs;
    nothing waits for the device.
    """
    module = workloads.mlp().module.to(device)
    x, grad = torch.randn(64, 784, device=device), torch.randn(64, 10, device=device)
    model, stored = ORTModule(module), [torch.zeros(64, 10, device=device),
                                        [None, *(torch.zeros_like(p) for p in module.parameters())]]

    def clear() -> None:
        for p in module.parameters():
            p.grad = None

    def ours() -> None:
        clear()
        model(x).backward(grad)

    def bare() -> None:
        clear()
        overhead.Bare.apply(stored, x, *module.parameters()).backward(grad)

    for _ in range(8):
        ours(), bare()
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(rounds):
        for kind, step in (("ours", ours), ("bare", bare)):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                step()
            times[kind].append((time.perf_counter() - start) / 20)
    above = (statistics.median(times["ours"]) - statistics.median(times["bare"])) * 1e6
    print(f"MLP: {above:.1f} microseconds of CPU a step above a bare autograd Function")
    return ([] if above < MLP_MICROSECONDS or device == "cpu"
            else [f"MLP: {above:.1f} microseconds, the goal is {MLP_MICROSECONDS}"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("steps", "adam", "mlp"))
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args(arguments)
    goals: list[str] = []
    kinds = tuple(chosen.kinds.split(","))
    if chosen.kernels:
        chosen.only = "steps"
    if chosen.only in (None, "adam"):
        goals += adam(chosen.rounds, chosen.device, chosen.tiny)
    if chosen.only in (None, "mlp"):
        goals += mlp(chosen.rounds, chosen.device)
    for name in chosen.model if chosen.only in (None, "steps") else ():
        torch.manual_seed(0)
        task = TASKS[name](chosen.tiny)
        if chosen.kernels:
            goals += print_kernels(name, task, kinds, chosen.device, chosen.limit)
        else:
            results = measure(task, kinds, chosen.rounds, chosen.device, chosen.limit)
            print("\n".join(table(name, task, results)), flush=True)
            goals += missed(name, results)
        del task
        if chosen.device == "cuda":
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
    print("\n".join(f"missed: {goal}" for goal in goals) or ("" if chosen.kernels else "all goals are met"))
    return bool(goals)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
