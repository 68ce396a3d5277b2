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
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "orttraining/orttraining/test/python"
FILES = ("ortmodule_api", "ortmodule_onnx_ops", "ortmodule_autograd", "ortmodule_fallback", "ortmodule_hooks",
         "ortmodule_experimental_json_config", "hierarchical_ortmodule", "sampler", "utilities")
TRAINER_FILES = ("orttrainer_frontend", "orttrainer_bert_toy_onnx", "orttrainer_checkpoint_functions",
                 "checkpoint_storage", "debuggability", "transformers", "postprocess", "ort_trainer",
                 "ort_trainer_with_mixed_precision")
# The first GPU is the CPU; the cases of a second and third stay what they are, and are skipped by the files themselves.
READ_AS = ((r"""(["'])cuda(:0)?\1""", '"cpu"'), (r"\.cuda\(\)", '.to("cpu")'), (r"\btorch\.version\.cuda\b", '"cpu"'),
           (r"\bnot torch\.cuda\.is_available\(\)", "False"),
           (r"\b28785\b", "285"),  # words of the sample's corpus, which is a made one (stand_ins.py)
           # Two trainers train one module: the old release on copies of its weights, here the weights are the module's.
           (r"= run_test\(\n(\s*)model,", r"= run_test(\n\1__import__('copy').deepcopy(model),"))


def prepared(checkout: Path, folder: Path) -> None:
    """The Python tests of a checkout, copied to `folder`, with the device's name exchanged; and what they read."""
    copied(checkout, folder, READ_AS)
    for model in (checkout / "onnxruntime/test/testdata").glob("bert_toy*.onnx"):
        (folder / "testdata").mkdir(exist_ok=True)
        shutil.copy(model, folder / "testdata")
    if not (folder / "testdata/bert_toy_postprocessed.onnx").exists():
        subprocess.run([sys.executable, ROOT / "tests/upstream/stand_ins.py", folder / "testdata/bert_toy_postprocessed.onnx"],
                       check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(
                           [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])})


def copied(checkout: Path, folder: Path, read_as: Sequence[tuple[str, str]]) -> None:
    """The Python tests of a checkout, copied to `folder`, with these patterns replaced."""
    for path in [*(checkout / "onnxruntime/test/python").glob("*.py"), *(checkout / "samples").rglob("*"),
                 *(checkout / FOLDER).rglob("*")]:
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            for pattern, instead in read_as:
                text = re.sub(pattern, instead, text)
            roots = (checkout / FOLDER, checkout / "onnxruntime/test/python", checkout)
            below = path.relative_to(next(root for root in roots if path.is_relative_to(root)))
            (folder / below).parent.mkdir(parents=True, exist_ok=True)
            (folder / below).write_text(text, encoding="utf-8")
        elif path.suffix == ".json" and path.parent == checkout / FOLDER:
            shutil.copy(path, folder)


def file_of(folder: Path, name: str) -> str:
    """A test file by the last part of its name."""
    found = [f"{first}_test_{name}.py" for first in ("orttraining", "onnxruntime")]
    return next((file for file in found if (folder / file).exists()), found[0])


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
    parser.add_argument("--trainer", action="store_true", help="the files of ORTTrainer instead")
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepared(given.checkout, folder)
        shutil.copy(Path(__file__).with_name("plugin.py"), folder / "conftest.py")
        shutil.copy(Path(__file__).with_name("stand_ins.py"), folder)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {"every": given.every, "at": given.at, "first": given.first,
                    "seconds": given.seconds, "out": str(given.out.resolve()), "only": given.only
                    and str(Path(given.only).resolve()), "known": [str(Path(known).resolve()) for known in given.known]}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no",
                   "--continue-on-collection-errors", "--rootdir", temporary,
                   *(["-k", given.keyword] if given.keyword else []),
                   *(file_of(folder, name) for name in (TRAINER_FILES if given.trainer else given.files))]
        return subprocess.run(command, cwd=folder,
                              env={**os.environ, "PYTHONPATH": path, "UPSTREAM": json.dumps(settings)},
                              check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
