"""Runs the scripts of this folder on a device, many at a time, and prints one summary. gpu.sh calls it.

    python tests/cuda/runner.py [--device cuda:0] [--plugin PATH] [--out FOLDER] PART...

PART is check, memcheck, racecheck or synccheck: all scripts, alone or under that tool of compute-sanitizer. "PART:0/4"
takes the first of four slices of the cases. JOBS processes run at once (by default as many as there are processors, at
most 8), each at most LIMIT seconds (500), and a part takes at most PART_LIMIT (530), so that it fits into ten minutes.

FOLDER/PART.jsonl (build/gpu) gets every result as soon as it is known. What was found before a process ended early, or
before this one was killed, is not lost.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO

HERE = Path(__file__).resolve().parent
# Each script and the number of its slices that run side by side, the longest first.
SCRIPTS = {"cases": 8, "models": 4, "programs": 4, "flash": 4, "sdpa": 3, "tiles": 2, "conv_graph": 2,
           "optim_steps": 2, "rnn": 2, "draws": 2, "optim": 1, "dropout": 1, "device_memory": 1}
SANITIZERS = ("memcheck", "racecheck", "synccheck")
SANITIZER_ERRORS = 9  # exit status


class Job(NamedTuple):
    script: Path
    slice: str

    @property
    def name(self) -> str:
        return f"{self.script.stem} {self.slice}"


class Settings(NamedTuple):
    device: str
    plugin: str
    jobs: int
    limit: float  # seconds of one process
    part_limit: float


class Outcome(NamedTuple):
    """What became of a job: results by case, and what ended it early."""

    job: Job
    passed: int
    refused: dict[str, str]
    failed: list[tuple[str, str]]
    seconds: float


def jobs_of(part: str, scripts: dict[Path, int]) -> list[Job]:
    """The jobs of a part: "check", or "check:1/4" for one of four disjoint slices, which together hold all cases."""
    _, _, chosen = part.partition(":")
    index, slices = map(int, (chosen or "0/1").split("/"))
    found = []
    for script, count in scripts.items():
        side_by_side = max(1, count // slices)
        found += [Job(script, f"{index + slices * k}/{slices * side_by_side}") for k in range(side_by_side)]
    return found


class Part:
    """One part: starts its jobs, collects their lines, and prints what it found."""

    def __init__(self, name: str, settings: Settings, log: TextIO) -> None:
        self.name, self.settings, self.log = name, settings, log
        self.kind = name.partition(":")[0]
        self.end = time.monotonic() + settings.part_limit
        self.lock = threading.Lock()

    def command(self, job: Job) -> list[str]:
        found = [sys.executable, str(job.script), self.settings.plugin, self.settings.device, job.slice]
        if self.kind == "check":
            return found
        return ["compute-sanitizer", "--tool", self.kind, "--error-exitcode", str(SANITIZER_ERRORS), "--print-limit",
                "20", *found]

    def environment(self) -> dict[str, str]:
        """memcheck sees an access behind a tensor only where each tensor is an allocation of its own."""
        return {**os.environ, "PYTHONUNBUFFERED": "1",
                **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if self.kind == "memcheck" else {})}

    def write(self, line: dict, shown: str = "") -> None:
        with self.lock:
            print(json.dumps(line), file=self.log, flush=True)
            if shown:
                print(shown, flush=True)

    def run(self, job: Job) -> Outcome:
        began = time.monotonic()
        limit = min(self.settings.limit, self.end - began)
        if limit < 1:
            reason = f"not started: the {self.settings.part_limit:g} seconds of the part are over"
            return self.ended(job, Results(), reason, began)
        results = Results()
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = subprocess.Popen(self.command(job), stdout=subprocess.PIPE, stderr=errors, text=True,
                                       errors="replace", env=self.environment(), process_group=0)
            timed_out = threading.Event()
            timer = threading.Timer(limit, lambda: (timed_out.set(), kill(process)))
            timer.start()
            assert process.stdout
            for line in process.stdout:
                result = results.read(line)
                if result:
                    failed = result["result"] == "failed"
                    self.write({"job": job.name, **result},
                               f"  FAILED {job.name}: {result['case']}: {result['message']}" if failed else "")
            status = process.wait()
            timer.cancel()
            errors.seek(0)
            last = collections.deque((line.strip() for line in errors if line.strip()), 12)
        return self.ended(job, results, self.reason(results, status, timed_out.is_set(), limit, list(last)), began)

    def reason(self, results: Results, status: int, timed_out: bool, limit: float, last: list[str]) -> str:
        """Why a process counts as failed apart from its cases; empty: it does not."""
        at = f", in or behind {last[-1]}" if last else ""
        if timed_out:
            return f"stopped after {limit:.0f} seconds{at}"
        if self.kind != "check" and status == SANITIZER_ERRORS:
            return f"{self.kind} has found errors:\n" + "\n".join(results.sanitizer)
        if status or not results.complete:
            return f"ended with status {status}{'' if results.complete else ' before its report'}:\n" + "\n".join(last)
        return ""

    def ended(self, job: Job, results: Results, reason: str, began: float) -> Outcome:
        took = time.monotonic() - began
        failed = list(results.failed)
        if reason:
            failed.append((job.name, reason))
            self.write({"job": job.name, "case": "", "result": "failed", "message": reason},
                       f"  FAILED {job.name}: {reason}")
        self.write({"job": job.name, "passed": results.passed, "refused": len(results.refused), "failed": len(failed),
                    "seconds": round(took, 1)},
                   f"  {job.name}: {results.passed} passed, {len(failed)} failed, {len(results.refused)} refused, "
                   f"{took:.0f} s")
        return Outcome(job, results.passed, results.refused, failed, took)

    def run_all(self, jobs: list[Job]) -> bool:
        """Whether everything passed."""
        print(f"==== {self.name}: {len(jobs)} processes, {self.settings.jobs} at a time", flush=True)
        if self.kind != "check" and not shutil.which("compute-sanitizer"):
            print(f"==== {self.name} failed: compute-sanitizer is not installed", flush=True)
            return False
        began = time.monotonic()
        with ThreadPoolExecutor(self.settings.jobs) as pool:
            outcomes = list(pool.map(self.run, jobs))
        lines, good = summary(self.name, outcomes, time.monotonic() - began)
        print("\n".join(lines), flush=True)
        return good


class Results:
    """The lines of one process."""

    def __init__(self) -> None:
        self.passed, self.complete = 0, False
        self.refused: dict[str, str] = {}
        self.failed: list[tuple[str, str]] = []
        self.sanitizer: list[str] = []  # the first lines of compute-sanitizer

    def read(self, line: str) -> dict | None:
        """The result of a case, if the line has one. Other text of the process may stand before it."""
        if line.startswith("=====") and len(self.sanitizer) < 20:
            self.sanitizer.append(line.rstrip())
        try:
            found = json.loads(line[line.index("{"):])
        except ValueError:
            return None
        if not isinstance(found, dict) or "case" not in found:
            self.complete |= isinstance(found, dict) and "passed" in found
            return None
        if found["result"] == "failed":
            self.failed.append((found["case"], found["message"]))
        elif found["result"] == "refused":
            self.refused[found["case"]] = found["message"]
        else:
            self.passed += 1
        return found


def kill(process: subprocess.Popen) -> None:
    """With the processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def summary(name: str, outcomes: list[Outcome], seconds: float) -> tuple[list[str], bool]:
    """Per script one line, the reasons of what was refused, every failure, and one line of all; whether all passed."""
    lines = []
    for script in dict.fromkeys(outcome.job.script for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.job.script == script]
        failures, refusals = sum(len(o.failed) for o in own), sum(len(o.refused) for o in own)
        lines.append(f"{script.stem:14} {sum(o.passed for o in own):6} passed {failures:5} failed {refusals:5} refused "
                     f"{sum(o.seconds for o in own):7.0f} s")
    reasons = collections.Counter(message for o in outcomes for message in o.refused.values())
    lines += [f"refused {count} times: {message}" for message, count in reasons.most_common(20)]
    failed = [(o.job.name, case, message) for o in outcomes for case, message in o.failed]
    lines += [f"FAILED {job}: {case}: {message}" for job, case, message in failed]
    passed = sum(o.passed for o in outcomes)
    good = not failed and passed > 0
    lines.append(f"==== {name}{'' if good else ' failed'}: {passed} passed, {len(failed)} failed, "
                 f"{sum(reasons.values())} refused, {seconds:.0f} s")
    return lines, good


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--plugin", default=str(HERE.parents[1] / "onnxtrain/_cuda.so"))
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "build/gpu")
    parser.add_argument("--scripts", nargs="*", help="SCRIPT=SLICES, instead of those of this folder")
    chosen = parser.parse_args(arguments)
    scripts = dict(item.rsplit("=", 1) for item in chosen.scripts or ()) or SCRIPTS
    paths = {HERE / f"{name}.py" if "/" not in name else Path(name): int(n) for name, n in scripts.items()}
    settings = Settings(chosen.device, chosen.plugin, int(os.environ.get("JOBS", min(8, os.cpu_count() or 1))),
                        float(os.environ.get("LIMIT", 500)), float(os.environ.get("PART_LIMIT", 530)))
    unknown = [part for part in chosen.parts if part.partition(":")[0] not in ("check", *SANITIZERS)]
    if unknown:
        parser.error(f"no part is called {unknown[0]}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    good = True
    for part in chosen.parts:
        with open(chosen.out / f"{part.replace(':', '_').replace('/', '_')}.jsonl", "w", encoding="utf-8") as log:
            good = Part(part, settings, log).run_all(jobs_of(part, paths)) and good
    return not good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
