"""The examples of getting started, GPT-2 and MNIST, small; build.sh's options; the BERT example has a file of its own."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def module_of(path):
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of three short texts of few words."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = [a + b for a in "bdfgk" for b in "aeiou"]
    for name, lines in (("train", 200), ("valid", 60), ("test", 60)):
        (folder / f"{name}.txt").write_text("\n".join(
            " ".join(words[(start + step) % 25] for step in range(20)) for start in draw.choices(range(25), k=lines)))
    return folder


@pytest.mark.parametrize("kind", ["module", "trainer", "legacy"])
def test_getting_started(kind, text, tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "getting_started/train_ort.py", "--ort", kind, "--data", text, "--epochs", "1",
         "--max-batches", "6", "--result", tmp_path / "result.json"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "result.json").read_text())["losses"]
    assert len(losses) > 4 and losses[-1] < losses[0] and "epoch 1" in done.stdout


def test_notebook(tmp_path):
    """Its cells run one after another, as Jupyter runs them; it is stored without outputs."""
    path = EXAMPLES / "getting_started/getting_started.ipynb"
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells) + """
assert losses[-1] < losses[0] and max(abs(a - b) for a, b in zip(losses, eager_losses)) < 1e-2
assert onnxtrain.stats(model)["engine_steps"] == 17 and difference < 1e-3
""")
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, env={
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(path.parent)]), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "16 in the engine, 0 in PyTorch" in done.stdout


def test_gpt2(text, tmp_path, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    example = module_of(EXAMPLES / "gpt2_wikitext/finetune.py")
    given = ["--data", str(text), "--block", "16", "--batch", "4", "--accumulation", "2", "--steps", "12", "--words",
             "300", "--lr", "5e-3"]
    for kind in ("trainer", "ort_trainer"):
        before = onnxtrain.stats()
        losses = example.main([*given, "--by", kind, "--output", str(tmp_path / kind)])
        after = onnxtrain.stats()
        assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
        assert after["engine_steps"] - before["engine_steps"] >= 24
        assert after["fallback_steps"] == before["fallback_steps"]
        assert "ms a micro-batch, 24 of 24 in the engine" in capsys.readouterr().out
        assert (tmp_path / kind / "model.safetensors").exists()


def test_mnist(capsys):
    example = module_of(EXAMPLES / "mnist/train.py")
    assert example.main(["--images", "1920", "--epochs", "2"]) > 0.9
    assert "epoch 2" in capsys.readouterr().out


def test_mnist_files(tmp_path):
    import gzip

    example = module_of(EXAMPLES / "mnist/train.py")
    for part, count in (("train", 64), ("t10k", 16)):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(bytes(16) + bytes(range(256)) * (count * 784 // 256))
        with gzip.open(tmp_path / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes(i % 10 for i in range(count)))
    images, labels = example.read(tmp_path, "train")
    assert images.shape == (64, 784) and labels[:3].tolist() == [0, 1, 2]
    assert float(images[0, 1]) == pytest.approx((1 / 255 - 0.1307) / 0.3081)
    assert 0 <= example.main(["--data", str(tmp_path), "--epochs", "1"]) <= 1


def build(tmp_path, *arguments, **variables):
    """What build.sh asks of Python: its command line, and the variables."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@"\nenv | grep -E "^(ONNXTRAIN|CUD|MPI)"\nfor last; do :; done\n'
                    f'[ "$2" = pip ] && touch {tmp_path}/Debug/dist/a.whl {tmp_path}/RelWithDebInfo/dist/a.whl; true\n')
    fake.chmod(0o755)
    for config in ("Debug", "RelWithDebInfo"):
        (tmp_path / config / "dist").mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ONNXTRAIN", "CUD", "MPI"))}
    return subprocess.run(["bash", ROOT / "build.sh", *arguments], capture_output=True, text=True,
                          env={**environment, "PYTHON": str(fake), **variables})


def test_build_script(tmp_path):
    done = build(tmp_path, "--enable_training", "--use_cuda", "--config", "RelWithDebInfo", "--build_wheel", "--build_dir",
                 str(tmp_path), "--parallel", "3", "--cuda_home", "/cuda", CUDACXX="/cuda/bin/nvcc", CUDNN_HOME="/dnn",
                 MPI_CXX_INCLUDE_PATH="/mpi/include")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == f"-m pip wheel --no-deps -w {tmp_path}/RelWithDebInfo/dist ."
    assert {"ONNXTRAIN_CUDA=1", "ONNXTRAIN_JOBS=3", "CUDA_HOME=/cuda", "CUDACXX=/cuda/bin/nvcc", "CUDNN_HOME=/dnn",
            "MPI_CXX_INCLUDE_PATH=/mpi/include"} <= set(lines)
    done = build(tmp_path, "--enable_training", "--config", "Debug", "--use_mpi", "--mpi_home", "/other")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == "setup.py -q egg_info build_ext --inplace"
    assert {"ONNXTRAIN_DEBUG=1", "ONNXTRAIN_MPI=1", "MPI_CXX_INCLUDE_PATH=/other/include"} <= set(lines)
    done = build(tmp_path, "--config=Debug", "--use_mpi=false", "--cmake_extra_defines", "A=1", "B=/c", "--cuda_version=12.8",
                 "--nccl_home", "/nccl", "--build_shared_lib", "--allow_running_as_root", "--parallel")
    assert done.returncode == 0 and {"ONNXTRAIN_DEBUG=1", "ONNXTRAIN_MPI=0"} <= set(done.stdout.splitlines())
    for wrong in (["--use_tensorrt"], ["--config", "Fast"], ["--config"], ["--config=Fast"], ["--nccl_home"]):
        done = build(tmp_path, *wrong)
        assert done.returncode == 2 and wrong[-1].lstrip("-").split("=")[-1] in done.stderr


def test_the_build_heeds_the_environment(tmp_path, monkeypatch):
    """CUDA_HOME, CUDACXX, MPI_CXX_INCLUDE_PATH and MPICC decide what is found."""
    monkeypatch.syspath_prepend(str(ROOT / "third_party"))
    import dependencies

    headers = tmp_path / "include"
    headers.mkdir()
    monkeypatch.delenv("MPICC", raising=False)
    monkeypatch.setenv("MPI_CXX_INCLUDE_PATH", str(headers))
    with pytest.raises(SystemExit, match="there is no mpi.h in it"):
        dependencies.mpi()
    (headers / "mpi.h").touch()
    (tmp_path / "lib").mkdir()
    command, libraries = dependencies.mpi()
    assert f"-isystem{headers}" in command and libraries == [f"-L{tmp_path / 'lib'}", "-lmpi"]
    monkeypatch.setenv("MPICC", "sh")
    assert dependencies.mpi()[0][0].endswith("/sh")
    (headers / "cuda_runtime_api.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert dependencies.cuda_home() == tmp_path
    monkeypatch.setenv("CUDACXX", "sh")
    assert dependencies.nvcc().endswith("sh")
