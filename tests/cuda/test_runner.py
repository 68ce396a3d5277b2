"""The runner of the scripts: results as they come, failures, processes that crash or take too long, one summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import runner

SCRIPTS = {  # what a script of this name does with its slice; each has printed a result before
    "good": "",
    "bad": "line('second', 'failed', 'AssertionError: output 0: 0.5')",
    "unsupported": "line('second', 'refused', 'Det: no kernel of device takes it')",
    "crashing": "print('third', file=sys.stderr, flush=True); os.abort()",
    "slow": "print('third', file=sys.stderr, flush=True); subprocess.run(['sleep', '20'])",
    "silent": "sys.exit(0)",
    "together": "[time.sleep(0.05) for _ in range(400) if not os.path.exists(sys.argv[0] + '.other')]; "
                "assert os.path.exists(sys.argv[0] + '.other')",
}


def run(tmp_path: Path, *names: str, parts: tuple[str, ...] = ("check",), **environment: str) -> tuple[int, str]:
    """Status and output of the runner with these scripts, of two slices each."""
    for name in names:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(f"""
            import json, os, subprocess, sys, time
            def line(case, result, message=""):
                print(". " + json.dumps({{"case": case, "result": result, "message": message}}), flush=True)
            line(f"first of {{sys.argv[3]}} on {{sys.argv[2]}}", "passed")
            if sys.argv[3].startswith("0/"):
                {SCRIPTS[name] or 'pass'}
            else:
                open(sys.argv[0] + ".other", "w").close()
            print(json.dumps({{"ran": [], "passed": 1}}))
        """), encoding="utf-8")
    command = [sys.executable, runner.__file__, "--device", "emulated", "--out", str(tmp_path / "out"), *parts,
               "--scripts", *(f"{tmp_path}/{name}.py=2" for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_all_that_pass(tmp_path):
    status, text = run(tmp_path, "good", "unsupported", JOBS="2")
    assert status == 0, text
    assert text.splitlines()[-1].startswith("==== check: 4 passed, 0 failed, 1 refused, "), text
    assert "refused 1 times: Det: no kernel of device takes it" in text
    lines = [json.loads(line) for line in (tmp_path / "out/check.jsonl").read_text().splitlines()]
    assert {"job": "good 1/2", "case": "first of 1/2 on emulated", "result": "passed", "message": ""} in lines


def test_slices_run_at_the_same_time(tmp_path):
    """One waits for what the other writes."""
    status, text = run(tmp_path, "together", JOBS="2")
    assert status == 0, text


def test_failures_crashes_and_timeouts_are_summed_up(tmp_path):
    """What was found before a process ended is kept, and the reason names the case that it was at."""
    start = time.monotonic()
    status, text = run(tmp_path, "bad", "crashing", "slow", "silent", LIMIT="3", JOBS="8")
    assert status == 1 and time.monotonic() - start < 60
    lines = text.splitlines()
    assert lines[-1].startswith("==== check failed: 8 passed, 4 failed, 0 refused, "), text
    found = "\n".join(line for line in lines if line.startswith("FAILED "))
    assert "FAILED bad 0/2: second: AssertionError: output 0: 0.5" in found, text
    assert "FAILED crashing 0/2: crashing 0/2: ended with status -6 before its report:" in found, text
    assert "FAILED slow 0/2: slow 0/2: stopped after 3 seconds, in or behind third" in found, text
    assert "FAILED silent 0/2: silent 0/2: ended with status 0 before its report:" in found, text
    assert "1/2" not in found
    kept = (tmp_path / "out/check.jsonl").read_text()
    assert all(f'"job": "{name} 0/2", "case": "first of 0/2' in kept for name in ("bad", "crashing", "slow", "silent"))


def test_a_part_that_has_no_time_left_says_what_it_did_not_start(tmp_path):
    status, text = run(tmp_path, "slow", "good", PART_LIMIT="2", JOBS="1")
    assert status == 1
    assert "FAILED good 0/2: good 0/2: not started: the 2 seconds of the part are over" in text, text


def test_a_runner_that_is_killed_leaves_what_it_found(tmp_path):
    """The results are in the file while processes still run."""
    run(tmp_path, "good")
    run(tmp_path, "slow", LIMIT="1")
    command = [sys.executable, runner.__file__, "--out", str(tmp_path / "killed"), "check", "--scripts",
               f"{tmp_path}/good.py=1", f"{tmp_path}/slow.py=1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "JOBS": "1", "LIMIT": "5"})
    file = tmp_path / "killed/check.jsonl"
    for _ in range(400):
        if file.exists() and '"job": "slow 0/1"' in file.read_text():
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["job"] for line in lines if "case" in line] == ["good 0/1", "slow 0/1"], lines


def test_errors_of_the_sanitizer_are_failures(tmp_path):
    """With a stand-in for compute-sanitizer that finds an error in one slice, though all cases pass."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/bash\n[ \"${*:1:6}\" = '--tool memcheck --error-exitcode 9 --print-limit 20' ] || exit 3\n"
                    "shift 6\n\"$@\"\n[ \"$PYTORCH_NO_CUDA_MEMORY_CACHING\" = 1 ] || exit 4\n"
                    "[ \"${!#}\" = 0/2 ] || exit 0\necho '========= Invalid __global__ read of size 4 bytes'\nexit 9\n")
    tool.chmod(0o755)
    status, text = run(tmp_path, "good", parts=("memcheck",), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert status == 1
    assert "FAILED good 0/2: good 0/2: memcheck has found errors:\n========= Invalid __global__ read" in text, text
    assert text.splitlines()[-1].startswith("==== memcheck failed: 2 passed, 1 failed"), text
    status, text = run(tmp_path, "good", parts=("racecheck",), PATH="/usr/bin:/bin")
    assert status == 1 and "racecheck failed: compute-sanitizer is not installed" in text


@pytest.mark.parametrize("slices", [1, 3, 4, 100])
def test_slices_of_a_part_hold_every_case_once(slices):
    """By index, as programs.py takes its slice."""
    found = []
    for index in range(slices):
        for job in runner.jobs_of(f"check:{index}/{slices}", {Path("programs.py"): 4}):
            first, step = map(int, job.slice.split("/"))
            found += range(100)[first::step]
    assert sorted(found) == list(range(100))
