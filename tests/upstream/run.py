"""Runs the test files of the old onnxruntime-training release from a copy of its repository, on the CPU.

`python tests/upstream/run.py CHECKOUT` copies the folder of its Python tests to a temporary one, reads "cuda" as "cpu"
in it, makes `onnxruntime.training` importable through onnxtrain's alias and runs pytest with plugin.py, which writes a
line of JSON for each case: outcome, time, steps in the engine and in PyTorch. `--report FILE...` makes a table of such
lines. Nothing of that repository is kept here, and no test of this project needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "orttraining/orttraining/test/python"
FILES = ("ortmodule_api", "ortmodule_onnx_ops", "ortmodule_autograd", "ortmodule_fallback", "ortmodule_hooks",
         "ortmodule_experimental_json_config", "hierarchical_ortmodule", "sampler", "utilities")
# The first GPU is the CPU; the cases of a second and third stay what they are, and are skipped by the files themselves.
READ_AS = ((r'"cuda(:0)?"', '"cpu"'), (r"\.cuda\(\)", '.to("cpu")'), (r"\btorch\.version\.cuda\b", '"cpu"'),
           (r"\bnot torch\.cuda\.is_available\(\)", "False"))


def prepared(checkout: Path, folder: Path) -> None:
    """The Python tests of a checkout, copied to `folder`, with the device's name exchanged."""
    for path in (checkout / FOLDER).iterdir():
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            for pattern, instead in READ_AS:
                text = re.sub(pattern, instead, text)
            (folder / path.name).write_text(text, encoding="utf-8")
        elif path.suffix == ".json":
            shutil.copy(path, folder)


def report(files: list[str]) -> str:
    """A table of cases per file, and the cases that failed or passed without the engine.
    A later line of a case counts.
    """
    cases: dict[str, dict] = {}
    for name in files:
        for line in Path(name).read_text(encoding="utf-8").splitlines():
            case = json.loads(line)
            cases[case["id"]] = case
    lines = ["| file | cases | runnable | passed | of those, engine ran |", "| --- | --- | --- | --- | --- |"]
    rest: list[str] = []
    for file in sorted({name.split("::")[0] for name in cases}):
        own = [case for name, case in cases.items() if name.startswith(file + "::")]
        runnable = [case for case in own if case["outcome"] != "skipped"]
        passed = [case for case in runnable if case["outcome"] == "passed"]
        engine = [case for case in passed if case["engine"]]
        lines.append(f"| {file} | {len(own)} | {len(runnable)} | {len(passed)} | {len(engine)} |")
        rest += [f"{case['id']}: {case['outcome']}: {case['error']}" for case in own if case["outcome"] != "passed"]
        rest += [f"{case['id']}: passed, {case['fallback']} steps in PyTorch: {case['reasons']}" for case in passed
                 if case["fallback"]]
        rest += [f"{case['id']}: passed, no step" for case in passed if not case["engine"] and not case["fallback"]]
    return "\n".join(lines + [""] + rest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, help="folder that holds " + FOLDER)
    parser.add_argument("--files", nargs="+", default=FILES, help="names without orttraining_test_ and .py")
    parser.add_argument("--every", type=int, default=1, help="run each so manieth case")
    parser.add_argument("--at", type=int, default=0, help="beginning with this one")
    parser.add_argument("--first", type=int, help="run only so many cases of each test function")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of a case")
    parser.add_argument("--out", type=Path, default=Path("upstream.jsonl"), help="a line for each case is added here")
    parser.add_argument("--only", help="a file of case ids, one a line; the others are left out")
    parser.add_argument("--known", nargs="*", default=[], help="files of earlier lines, whose cases are left out")
    parser.add_argument("--report", nargs="+", help="files of such lines; prints the table and runs nothing")
    parser.add_argument("-k", dest="keyword", help="as pytest's")
    given = parser.parse_args()
    if given.report:
        print(report(given.report))
        return 0
    if given.checkout is None or not (given.checkout / FOLDER).is_dir():
        parser.error(f"a checkout that holds {FOLDER} is needed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(given.checkout, folder)
        shutil.copy(Path(__file__).with_name("plugin.py"), folder / "conftest.py")
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {"every": given.every, "at": given.at, "first": given.first,
                    "seconds": given.seconds, "out": str(given.out.resolve()), "only": given.only
                    and str(Path(given.only).resolve()), "known": [str(Path(known).resolve()) for known in given.known]}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no",
                   "--continue-on-collection-errors", "--rootdir", name,
                   *(["-k", given.keyword] if given.keyword else []),
                   *(f"orttraining_test_{file}.py" for file in given.files)]
        return subprocess.run(command, cwd=folder,
                              env={**os.environ, "PYTHONPATH": path, "UPSTREAM": json.dumps(settings)},
                              check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
