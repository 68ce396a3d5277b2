"""Runs scripts of other projects in eager PyTorch and in ORTModule and says whether they agree and what ran where.

    python tests/real/run.py [--only NAME]... [--steps N] [--sources FOLDER] [--markdown] [--requirements]

A script that comes from PyPI needs its package: `python tests/real/run.py --requirements` prints what pip is to
install. One that comes from a repository is imported from FOLDER/owner+name (build/real by default), a checkout of the
commit that its file names; what is not there is fetched by git from GitHub. Nothing of these projects is kept here.

Each script runs from the same seed, with the same data and optimizer, in processes of its own: in eager, and with its
modules in ORTModule. The two take turns step by step, so that what else the machine does slows both alike. The loss of
each step and, at the end, each parameter and buffer must be equal, relative to its norm by 1e-4. Where they are not, the
script runs three times in eager from weights that differ by one rounding, and ten times what that changes is allowed. A
line says

    whole      equal, and each call ran in the engine as one graph (PyTorch draws its random numbers)
    parts      equal; the engine runs graphs, and PyTorch or Python runs what is named
    pytorch    equal, but nothing ran in the engine
    different  the two runs do not agree
    error      a run failed, or took too long
    absent     a package is not installed, or a checkout cannot be had

The exit status is 1 if a script is different or fails. --markdown writes the table of docs/models.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ORTMODULE_CACHE_DIR", "")  # the first step is timed
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import scripts  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

TOLERANCE = 1e-4
ROUNDINGS = 10  # times what one rounding of the weights changes
LIMIT = 1200  # seconds for a script
PAGE = ROOT / "docs" / "models.md"
FOLDER = re.compile(r"(?<=in )/\S*?(?=(?<=site-packages/)|[^/ ]+\+[^/ ]+/)")  # of this machine, ahead of a project's files
SECTION = "## Scripts of other projects\n"


@dataclasses.dataclass
class Line:
    """What is printed of a script."""

    name: str
    verdict: str
    engine: int = 0
    torch: int = 0
    exports: int = 0
    loss: float = float("nan")
    weights: float = float("nan")
    first: float = float("nan")
    ours: float = float("nan")  # ms
    eager: float = float("nan")
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        reason = f"  {' | '.join(' '.join(reason.split())[:300] for reason in self.reasons)}" if self.reasons else ""
        return (f"{self.name:28} {self.verdict:9} engine {self.engine:3d} PyTorch {self.torch:3d} exports {self.exports:2d} "
                f"loss {self.loss:.0e} weights {self.weights:.0e} first {self.first:5.1f} s, then {self.ours:7.1f} ms, "
                f"eager {self.eager:7.1f} ms{reason}")


def gap(expected: Tensor, got: Tensor) -> float:
    """The norm of the difference over the norm; infinite where kinds differ or one has a NaN alone."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, got) else float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    expected, got = expected.to(wide), got.to(wide)
    if not torch.equal(expected.isnan(), got.isnan()):
        return float("inf")
    same = (expected == got) | expected.isnan()
    difference = torch.where(same, 0, expected - got).norm().item()
    return difference / max(torch.where(expected.isfinite(), expected, 0).norm().item(), 1e-30) if difference else 0.0


def whole_gap(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """Of all floating-point tensors as one."""
    keys = [key for key, tensor in expected.items() if tensor.is_floating_point() and key in got]
    if not keys:
        return 0.0
    return gap(*(torch.cat([side[key].double().flatten() for key in keys]) for side in (expected, got)))


def named(result: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The losses and then the tensors of a run."""
    losses = torch.tensor(result["losses"], dtype=torch.float64)
    return [*((f"loss of step {i}", loss) for i, loss in enumerate(losses)), *result["tensors"].items()]


def compare(name: str, eager: dict[str, Any], ours: dict[str, Any], moved: list[dict[str, Any]] | None = None) -> Line:
    """The line of a script, of the results of its runs."""
    wrong = []
    if eager["tensors"].keys() != ours["tensors"].keys():
        wrong.append(f"the modules have other tensors: {sorted(eager['tensors'].keys() ^ ours['tensors'].keys())[:3]}")
    every = [tensor for tensor in eager["tensors"].values() if tensor.is_floating_point()]
    size = torch.stack([tensor.double().norm() for tensor in every]).norm().item() if every else 0.0
    for (what, wanted), (_, got), *roundings in zip(*map(named, (eager, ours, *(moved or ())))):
        difference = gap(wanted, got)
        # A bias ahead of a normalisation has a gradient of zero, and is what rounding makes of it.
        if wanted.is_floating_point() and difference * wanted.norm() <= torch.finfo(wanted.dtype).eps * size:
            continue
        limit = max([TOLERANCE, *(ROUNDINGS * gap(wanted, rounded) for _, rounded in roundings)])
        if not difference <= limit:
            wrong.append(f"{what}: {difference:.1e}, over {limit:.1e}")
    verdict = "different" if wrong else "pytorch" if not ours["graphs"] else "parts" if ours["reasons"] else "whole"
    if ours["torch"] and verdict == "whole":
        verdict = "parts"
    if verdict == "pytorch" and not ours["reasons"]:
        wrong.append("no method of a wrapped module that was called is in methods=")
    return Line(name, verdict, ours["engine"], ours["torch"], ours["exports"],
                max(gap(a, b) for (_, a), (_, b) in list(zip(named(eager), named(ours)))[:len(eager["losses"])]),
                whole_gap(eager["tensors"], ours["tensors"]),
                ours["seconds"][0], *(1e3 * statistics.median(r["seconds"][1:] or r["seconds"]) for r in (ours, eager)),
                tuple(wrong[:4] + ours["reasons"][:4]))


def here(script: scripts.Script, steps: int, **options: Any) -> Line:
    """Runs a script in this process; raises what it raises."""
    eager, ours = (scripts.run(script, how, steps, **options) for how in ("eager", "ours"))
    line = compare(script.name, eager, ours)
    if line.verdict != "different":
        return line
    return compare(script.name, eager, ours, [scripts.run(script, how, steps, **options) for how in scripts.MOVED])


def checkout(script: scripts.Script, sources: Path) -> Path | None:
    """The folder with the project's files, fetched where it is not there."""
    if script.repository is None:
        return None
    folder = sources / script.repository.replace("/", "+")
    if not folder.exists():
        address = f"https://github.com/{script.repository}"
        for command in (["init", "-q", folder], ["-C", folder, "fetch", "-q", "--depth", "1", address, script.commit],
                        ["-C", folder, "checkout", "-q", "FETCH_HEAD"]):
            subprocess.run(["git", *map(str, command)], check=True)
    head = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    if head.stdout.strip() != script.commit:
        print(f"{folder} is not at {script.commit}, but at {head.stdout.strip()}", file=sys.stderr)
    return folder


class Turns:
    """The child's side of the turns: a line to the parent when a step is done, and one from it to go on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the script prints

    def wait(self) -> None:
        sys.stdin.readline()

    def done(self) -> None:
        self._out.write("\n")
        self._out.flush()
        self.wait()


def child(name: str, how: str, steps: int, sources: Path, path: str) -> None:
    """A run in a process of its own, or the moved ones one after another."""
    turns = Turns()
    turns.wait()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    scripts.torchvision()
    script = scripts.load()[name]
    folder = checkout(script, sources)
    if how == "moved":
        torch.save([scripts.run(script, each, steps, folder=folder) for each in scripts.MOVED], path)
    else:
        torch.save(scripts.run(script, how, steps, folder=folder, wait=turns.done), path)


def take_turns(processes: list[subprocess.Popen[bytes]]) -> None:
    """Lets each go one step while others wait, until all have ended."""
    alive = list(processes)
    while alive:
        for process in list(alive):
            try:
                process.stdin.write(b"\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError:
                alive.remove(process)
                continue
            if not process.stdout.readline():  # type: ignore[union-attr]
                alive.remove(process)


def apart(script: scripts.Script, steps: int, sources: Path) -> Line:
    """Runs a script in processes of its own."""
    if missing := script.absent():
        return Line(script.name, "absent", reasons=(f"pip install {' '.join(missing)}",))
    try:
        checkout(script, sources)
    except (OSError, subprocess.CalledProcessError) as error:
        return Line(script.name, "absent", reasons=(str(error),))
    try:
        eager, ours = together(script, steps, sources, ("eager", "ours"))
        line = compare(script.name, eager, ours)
        if line.verdict == "different":
            line = compare(script.name, eager, ours, *together(script, steps, sources, ("moved",)))
        return line
    except RuntimeError as error:
        return Line(script.name, "error", reasons=tuple(str(error).splitlines()))


def together(script: scripts.Script, steps: int, sources: Path, hows: tuple[str, ...]) -> list[Any]:
    """What these runs of a script give, each in a process of its own.

    Raises:
        RuntimeError: one has failed; the last lines that it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = {how: open(f"{folder}/{how}.log", "w+b") for how in hows}
        processes = {how: subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--child", script.name, how, str(steps), str(sources), f"{folder}/{how}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) for how, log in logs.items()}
        timer = threading.Timer(LIMIT, lambda: [process.kill() for process in processes.values()])
        timer.start()
        try:
            take_turns(list(processes.values()))
        finally:
            timer.cancel()
        for how, process in processes.items():
            if process.wait():
                logs[how].seek(0)
                text = logs[how].read().decode(errors="replace").strip().splitlines()
                raise RuntimeError("\n".join((f"{how}, status {process.returncode}", *text[-6:])))
        return [torch.load(f"{folder}/{how}") for how in hows]


HEAD = SECTION + """
`python tests/real/run.py --markdown` writes this section; torch {torch}, CPU, {threads} thread{s}, {steps} steps each. The scripts and
libraries are those of other projects, at the commit or version named, with their models, losses and optimizers. A driver
in `tests/real` replaces data, device or process group, never the model, and sets dropout to 0. *Whole*: equal to eager, each call in
the engine as one graph, for which PyTorch draws the random numbers. *Parts*: equal, and PyTorch or Python runs what the last column names. *Engine* and *PyTorch*
count calls; *loss* is the largest relative difference of a step's loss, *weights* that of all parameters and buffers
after the last step. Times are of one run on a machine that does other work, in turns with eager step by step: they tell
orders of magnitude. A script of `tests/real` that has no row has not been measured.

| Script | Source | Verdict | Engine | PyTorch | Loss | Weights | First step, s | ms a step | Eager, ms | Reason |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def start(name: str) -> str:
    """Of a script's row."""
    return f"| {name.replace('_', ' ')} | "


def row(line: Line) -> str:
    """Of the table."""
    script = scripts.SCRIPTS[line.name]
    source = f"{script.repository} {script.commit[:7]}" if script.repository else script.source.replace("==", " ")
    reason = " ".join(line.reasons[0].split()) if line.reasons else ""
    reason = FOLDER.sub("", reason)[:160].replace("|", "/")
    return (f"{start(line.name)}{source} | {line.verdict} | {line.engine} | {line.torch} | {line.loss:.0e} | "
            f"{line.weights:.0e} | {line.first:.1f} | {line.ours:.1f} | {line.eager:.1f} | {reason} |\n")


def write(lines: list[Line], steps: int) -> None:
    """The section of the page, from its title to the page's end: the rows of these lines, and those that are there of
    other scripts."""
    page, _, old = PAGE.read_text(encoding="utf-8").partition(SECTION)
    rows = {start(name): text + "\n" for name in scripts.SCRIPTS for text in old.splitlines() if text.startswith(start(name))}
    rows |= {start(line.name): row(line) for line in lines if line.verdict != "absent"}
    threads = int(os.environ["OMP_NUM_THREADS"])
    head = HEAD.format(torch=torch.__version__.split("+")[0], threads=threads, s="s" * (threads > 1), steps=steps)
    PAGE.write_text(f"{page.rstrip()}\n\n{head}" + "".join(rows.get(start(name), "") for name in scripts.SCRIPTS),
                    encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sources", type=Path, default=ROOT / "build" / "real")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--requirements", action="store_true")
    given = parser.parse_args()
    known = scripts.load()
    if given.requirements:
        print("\n".join(sorted({requirement for script in known.values() for requirement in script.requirements})))
        return 0
    lines = []
    for name in given.only or known:
        lines.append(apart(known[name], given.steps, given.sources.resolve()))
        print(lines[-1], flush=True)
        if given.markdown:
            write(lines[-1:], given.steps)
    verdicts = [line.verdict for line in lines]
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)))
    return int("different" in verdicts or "error" in verdicts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6])
    else:
        sys.exit(main())
