"""Runs the old trainer's scenarios of several processes from a copy of onnxruntime's repository, on the CPU with gloo.

`python tests/upstream/distributed.py CHECKOUT` runs checkpoints of one process, of data parallel ones and of ZeRO, in
float32 and mixed precision, saved and loaded each into each; joined ones; state of optimizers and of sessions; Adasum.
CHECKOUT is a tree of before September 2022, when they were removed. Each scenario is started as they start it, by its
name; those of tensor parallel layers (megatron) and of BART, which only these need, are left out. A line of JSON for
each goes where run.py's go. Nothing of that repository is kept here, and no test of this project needs it.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ("checkpoint/orttraining_test_save_checkpoint.py", "checkpoint/orttraining_test_load_checkpoint.py",
         "checkpoint/orttraining_test_checkpoint_aggregation.py",
         "checkpoint/orttraining_test_load_optimizer_state.py", "checkpoint/orttraining_test_backend_api.py",
         "orttraining_test_allreduce_adasum.py")
READ_AS = ((r"""(["'])cuda:\1 ?\+ ?str\(world_rank\)""", '"cpu"'), (r"""backend=(["'])nccl\1""", 'backend="gloo"'),
           (r"""os\.environ\[(["'])MASTER_PORT\1\] = (["'])\d+\2""", 'os.environ["MASTER_PORT"]'))
CONTEXT = multiprocessing.get_context("forkserver")
SAVED = re.compile(r"(single_node|data_parallelism|distributed_zero)_(full|mixed)_precision(?:_(adam|lamb))?")


def scenarios(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """File, name, and whether it takes several processes; in the order in which they need each other."""
    for file in FILES:
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        table = next(node.value for node in tree.body if isinstance(node, ast.Assign)
                     and getattr(node.targets[0], "id", "") == "function_map")
        several = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)
                   and any(getattr(decorator, "id", "") == "distributed_setup" for decorator in node.decorator_list)}
        assert isinstance(table, ast.Dict)
        for key in table.keys:
            assert isinstance(key, ast.Constant)
            name = str(key.value)
            if "megatron" not in name and "bart" not in name:
                yield file, name, name in several or "adasum" in name


def checkpoints_of(name: str) -> str:
    """The folder that a scenario writes to, or reads from."""
    found = SAVED.search(name)
    assert found is not None
    optimizer = found[3] or ("lamb" if found[1] == "distributed_zero" else "")
    return "/".join(filter(None, ["saved", found[1], f"{found[2]}_precision", optimizer]))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_one(folder: Path, file: str, name: str, count: int, launcher: str, seconds: int) -> dict[str, object]:
    """One scenario in so many processes, as a line of run.py's."""
    arguments = [file, "--scenario", name]
    if "save" in file:
        shutil.rmtree(folder / checkpoints_of(name), ignore_errors=True)  # of an earlier run with --work
    elif SAVED.search(name):
        (folder / checkpoints_of(name)).mkdir(parents=True, exist_ok=True)  # some write their states beside
    if "adasum" not in name:
        arguments += ["--checkpoint_dir", "." if "backend" in file else checkpoints_of(name)]
    stats = folder / "stats"
    stats.mkdir(exist_ok=True)
    for old in stats.iterdir():
        old.unlink()
    common = {"STATS": str(stats), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "ORTMODULE_CACHE_DIR": str(folder / "exports")}
    begin = time.time()
    with (folder / "output").open("w") as output:
        if count > 1 and launcher == "mpirun":
            allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            jobs: list[Any] = [subprocess.Popen(
                ["mpirun", "--oversubscribe", "-np", str(count), sys.executable, __file__, "--child", *arguments],
                cwd=folder, env={**os.environ, **common, **allowed}, stdout=output, stderr=subprocess.STDOUT)]
        else:
            jobs = []
            for rank in range(count):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)} if count > 1 else {}
                jobs.append(CONTEXT.Process(target=forked, args=(str(folder), arguments, {**common, **own})))
                jobs[-1].start()
    codes = results_of(jobs)
    while None in codes and time.time() < begin + seconds and not any(codes):
        time.sleep(0.1)
        codes = results_of(jobs)
    end = time.time() + 20  # where one has failed, the others hear of it
    while None in results_of(jobs) and any(codes) and time.time() < end:
        time.sleep(0.1)
    for job in jobs:
        job.kill()
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(stats.iterdir())]
    passed = codes == [0] * len(jobs) and len(found) == count
    text = "" if passed else (folder / "output").read_text(encoding="utf-8", errors="replace")
    return {"id": f"{file}::{name}", "outcome": "passed" if passed else "failed", "processes": count,
            "seconds": round(time.time() - begin, 1), "engine": min((one["engine_steps"] for one in found), default=0),
            "fallback": sum(one["fallback_steps"] for one in found),
            "reasons": [reason for one in found for reason in one["reasons"]][:3],
            "error": " ".join(text[-1500:].split())}


def results_of(jobs: list[Any]) -> list[int | None]:
    """Of each process what it ended with; None while it runs."""
    return [job.poll() if isinstance(job, subprocess.Popen) else job.exitcode for job in jobs]


def forked(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    """A process of a scenario, of a process that has imported what all need."""
    os.chdir(folder)
    os.environ |= environment
    output = os.open("output", os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    child(*arguments)


def child(script: str, *arguments: str) -> None:
    """Runs a script as Python does."""
    import preloaded  # noqa: F401

    import onnxtrain

    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        path = Path(os.environ["STATS"]) / os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        path.write_text(json.dumps(onnxtrain.stats(), default=str), encoding="utf-8")


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    import run
    import stand_ins

    os.environ |= {"UPSTREAM": "{}", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                   "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    CONTEXT.set_forkserver_preload(["preloaded"])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder that holds " + run.FOLDER)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--launcher", choices=("environment", "mpirun"), default="environment",
                        help="the variables of torchrun, or mpirun")
    parser.add_argument("--seconds", type=int, default=600, help="time limit of a scenario")
    parser.add_argument("--out", type=Path, default=Path("distributed.jsonl"), help="a line for each is added here")
    parser.add_argument("--work", type=Path, help="a folder that is kept, with the checkpoints; else a temporary one")
    parser.add_argument("-k", dest="pattern", default="", help="a regular expression: those that it finds, in order")
    given = parser.parse_args()
    if not (given.checkout / run.FOLDER / "checkpoint").is_dir():
        parser.error(f"a checkout of before September 2022 is needed, that holds {run.FOLDER}/checkpoint")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.work or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        run.copied(given.checkout, folder, (*run.READ_AS, *READ_AS))
        stand_ins.write_corpus(folder)
        failed = 0
        for file, name, several in scenarios(folder):
            if not re.search(given.pattern, name):
                continue
            line = run_one(folder, file, name, given.processes if several else 1, given.launcher, given.seconds)
            failed += line["outcome"] != "passed"
            with given.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            print(f"{line['outcome']}: {name} ({line['processes']} processes, {line['seconds']} s)", flush=True)
    print(run.report([str(given.out)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
