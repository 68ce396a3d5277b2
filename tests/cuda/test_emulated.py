"""CUDA's kernels without a GPU: the same sources, emulated on the host under AddressSanitizer and under a detector of
data races, against the CPU's kernels.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from planted import environment
from seeds import drawn_seed

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "emulated"
SLOW = os.environ.get("ONNXTRAIN_SLOW") == "1"
PATHS = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])  # with the folders of helpers: tests/conftest.py


def run(script: str, plugin: Path, *arguments: str, **variables: str) -> dict:
    """The JSON that a script of this folder prints; run under AddressSanitizer, if the plugin is built with it."""
    env = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1",
           "ONT_EMULATE_SEED": str(drawn_seed()), **variables}  # of what the emulated libraries propose and refuse
    if plugin.parent.name == "asan":
        env |= environment("--sanitize")
    done = subprocess.run([sys.executable, str(ROOT / "tests/cuda" / script), str(plugin), "emulated", *arguments],
                          env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{script}: status {done.returncode}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def built(folder: str, *options: str) -> Path:
    """The plugin that cuda/emulate/build.py makes."""
    done = subprocess.run([sys.executable, str(ROOT / "cuda/emulate/build.py"), str(FOLDER / folder), *options],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def plugin() -> Path:
    return built("asan", "--sanitize")


@pytest.fixture(scope="session")
def watched() -> Path:
    """With the race detector, and the kernels of planted.cu."""
    return built("races", "--races", str(ROOT / "tests/cuda/planted.cu"))


@pytest.fixture(scope="session")
def models(emulated, plugin, tmp_path_factory) -> dict:
    """Whole models under the sanitizer, from exports that a run without it has kept: under it, one takes minutes.
    ONNXTRAIN_SLOW=1 runs all, else a sample.
    """
    every = ["mlp", "cnn", "vgg", "resnet", "gpt2", "bert", "llama", "sample", "unet", "lstm", "warped", "wav2vec2",
             "roberta", "mixtral", "cnn bf16", "vgg bf16", "resnet bf16", "gpt2 bf16", "bert bf16", "llama bf16",
             "unet bf16", "mixtral bf16"]
    seed = drawn_seed()
    chosen = every if SLOW else random.Random(seed).sample(every, 4)
    print(f"models, seed {seed}: {', '.join(chosen)}")
    kept = str(tmp_path_factory.mktemp("exports"))
    for built_as in (emulated, plugin):
        report = run("models.py", built_as, ",".join(chosen), ORTMODULE_CACHE_DIR=kept)
        assert not report["failed"], "\n".join(f"{what}: {message}" for what, message in report["failed"])
    return {**report, "chosen": chosen}


@pytest.fixture(scope="session")
def cases(plugin) -> dict:
    return run("cases.py", plugin)


@pytest.fixture(scope="session")
def programs(plugin) -> dict:
    return run("programs.py", plugin, "-padded")  # these take minutes, and test_padded.py runs them


def test_cases_agree_with_the_cpu(cases):
    assert cases["passed"] > 900
    assert not cases["failed"], "\n".join(f"{what}: {message}" for what, message in cases["failed"][:20])


def documented() -> dict[str, str]:
    """What docs/operators.md says of ONNX's operators on CUDA, each as of its newest opset, which comes first."""
    rows = re.findall(r"^\| (\w+) \| \d+ \|.*\| ([\w ]*) \|$",
                      (ROOT / "docs/operators.md").read_text(encoding="utf-8"), re.M)
    return dict(reversed(rows))


def test_operators_that_are_built_from_others_are_as_documented(cases):
    """docs/operators.md says which of them run on CUDA."""
    listed = documented()
    parts = {name for name, cell in listed.items() if cell == "parts"}
    assert len(parts & set(cases["built"])) > 25
    wrong = [name for name, runs in cases["built"].items() if listed.get(name) in ("parts", "")
             and runs != (listed[name] == "parts")]
    assert not wrong, wrong


SPLITS = """#include "kernels/launch.cuh"
#include "kernels/units.cuh"
#include <random>
int main()
{
    std::mt19937_64 random(SEED);
    for (int i = 0; i < 1000000; i++) {
        const uint64_t d = (random() >> (random() % 62 + 2)) + (i % 9 == 0) + 1, n = random() >> (random() % 62 + 1);
        const uint64_t near = (UINT64_C(1) << random() % 63) - 2 + random() % 4, close = n - n % d + d - random() % 3;
        for (uint64_t of : {n, near, close, d, d - 1, UINT64_C(1) << 31, (UINT64_C(1) << 63) - 1}) {
            uint64_t rest = of;
            if (of >> 63) continue;
            if (split(&rest, wide_divisor_of(d)) != (int64_t)(of % d) || rest != of / d) return 1;
            uint32_t low = (uint32_t)of & INT32_MAX, by = (uint32_t)d & INT32_MAX, left = low;
            if (by && (split(&left, divisor_of(by)) != low % by || left != low / by)) return 2;
        }
    }
}
"""


def test_indices_are_split_as_by_division(tmp_path):
    """The multiplications of units.cuh, of 32 and of 64 bits, at any size: no other test has tensors of 2^31 elements."""
    source = tmp_path / "splits.cc"
    source.write_text(SPLITS.replace("SEED", str(drawn_seed())))
    subprocess.run(["c++", "-std=c++17", "-O2", "-DONT_EMULATE", f"-I{ROOT}/cuda", f"-I{ROOT}/csrc", str(source),
                    "-o", str(tmp_path / "splits")], check=True)
    assert subprocess.run([str(tmp_path / "splits")]).returncode == 0


def test_threads_in_reverse(plugin):
    """A kernel whose result depends on the order of threads has a race."""
    report = run("cases.py", plugin, "1/4", ONT_EMULATE_ORDER="reverse")
    assert report["passed"] and not report["failed"], report["failed"][:5]


def test_refusals_name_the_operator(cases):
    assert cases["refused"]
    for what, message in cases["refused"].items():
        assert (what.split("-")[0].split(" ")[0] in message and "no kernel of device emulated takes it"
                in message), (what, message)


def test_programs_agree_with_the_cpu(programs):
    assert programs["passed"]
    assert not programs["failed"], "\n".join(f"{what}: {message}" for what, message in programs["failed"])


def test_models_train_as_on_the_cpu(models):
    """The engine runs all of each model on the device: a node that no kernel takes would have been refused,
    and fallen back.
    """
    assert (models["passed"] == len(models["chosen"])
            and all(sum(counts.values()) > 5 for counts in models["nodes"].values()))


@pytest.mark.parametrize(("script", "order", "part"), [("optim.py", "", ()), ("optim_steps.py", "", ()),
                                                       ("dropout.py", "", ()),
                                                       ("device_memory.py", "", ()), ("flash.py", "", ()),
                                                       ("flash.py", "reverse", ("0/4",))])
def test_kernels_agree_with_torch(plugin, script, order, part):
    """Steps of optimizers beside the CPU's loops that round as the emulation does, so that every bit can be compared."""
    isa = {"ONNXTRAIN_ISA": "plain"} if script == "optim_steps.py" else {}
    report = run(script, plugin, *part, ONT_EMULATE_ORDER=order, **isa)
    assert (report["passed"] >= {"dropout.py": 7, "device_memory.py": 9}.get(script, 10)
            and not report["failed"]), "\n".join(f"{what}: {message}" for what, message in report["failed"])


ORDERS = ("", "reverse", "random 1", "random 2")


def planted(watched: Path, names: str) -> dict[str, tuple[str, str]]:
    """What the launches of kernels of planted.cu report, without their fault and with it."""
    library = ctypes.CDLL(str(watched))
    listed = library[names]
    library.ont_planted.restype = listed.restype = ctypes.c_char_p
    return {name: tuple(library.ont_planted(name.encode(), fine).decode() for fine in (1, 0))
            for name in listed().decode().split()}


@pytest.mark.parametrize("order", ORDERS)
def test_planted_races_are_found(watched, order, monkeypatch):
    """Each kernel of planted.cu has a race without its barrier, and none with it, in whatever order threads run."""
    monkeypatch.setenv("ONT_EMULATE_ORDER", order)
    said = planted(watched, "ont_planted_names")
    assert len(said) == 14
    assert not [name for name, (fine, raced) in said.items() if fine or "a race in " not in raced], said
    assert all(("global" if "block" in name or name == "bytes" else "shared") in raced
               for name, (_, raced) in said.items()), said


def test_planted_faults_of_memory_are_found(watched):
    """Addresses that are not aligned, reads of shared memory that the block has not written, copies without a wait."""
    said = planted(watched, "ont_planted_others")
    assert {name: fine for name, (fine, _) in said.items() if fine} == {}
    unwritten = "reads shared memory that the block has not written"
    messages = {"a_vector": "is no multiple of 16", "a_number": "is no multiple of 8", "an_array": unwritten,
                "shared_memory": unwritten, "a_count": unwritten,
                "a_copy_without_wait": "ends before a copy that it has not waited for"}
    assert said.keys() == messages.keys()
    assert all(message in said[name][1] for name, message in messages.items()), said


@pytest.mark.parametrize("script", ["cases.py", "flash.py", "tiles.py", "optim.py", "optim_steps.py", "programs.py"])
def test_kernels_have_no_races(watched, script):
    """A launch with a race fails, so that what the script compares is missing. Each run has another order of threads,
    and another part of attention's cases; ONNXTRAIN_SLOW=1 takes all of these. Programs that count replays of graphs
    launch no other kernels, and depend on addresses that the allocator repeats.
    """
    seed = drawn_seed()
    part = {"flash.py": [] if SLOW else [f"{seed % 14}/14"], "tiles.py": [] if SLOW else [f"{seed % 5}/5"],
            "programs.py": ["-graph,padded"]}.get(script, [])
    report = run(script, watched, *part, ONT_EMULATE_ORDER=f"random {seed}")
    assert report["passed"] >= 10, seed
    assert not report["failed"], "\n".join(f"{what}: {message}" for what, message in report["failed"])


def unproven(claimed: list, ran: set[str]) -> list[str]:
    """Kernels that the device lists for an operator, and that ran in no case of it that passed."""
    return [f"{name}:{kernel}" for _, name, kernels in claimed for kernel in kernels if f"{name}:{kernel}" not in ran]


def test_every_claimed_operator_ran(plugin, cases, programs):
    """An operator that the device's table claims, and that no case ran there, is named."""
    script = ("import sys, json; from onnxtrain import _C; _C.open_plugin(sys.argv[1]); "
              "print(json.dumps(_C.device_operators('emulated')))")
    done = subprocess.run([sys.executable, "-c", script, str(plugin)], capture_output=True, text=True, check=True,
                          cwd=ROOT, env={**os.environ, "PYTHONPATH": PATHS, **environment("--sanitize")})
    ran = set(cases["ran"]) | set(programs["ran"])
    claimed = json.loads(done.stdout)
    assert len(claimed) > 100 and not unproven(claimed, ran)
    kernels = {name for name, cell in documented().items() if cell == "kernel"}
    assert kernels == {name for domain, name, _ in claimed if not domain and name in documented()}
    assert unproven([*claimed, ["", "Nothing", ["cuda_elementwise"]]], ran) == ["Nothing:cuda_elementwise"]
    known = {f"{name}:{kernel}" for _, name, kernels in claimed for kernel in kernels}
    assert all(unproven(claimed, ran - {one}) == [one] for one in sorted(known)[:3])
