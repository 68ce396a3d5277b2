"""Exports on disk: a second process loads them; whatever changes the graph is a miss; bad files are passed over."""

import copy
import json
import logging
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import onnxtrain
from onnxtrain._export import cache
from onnxtrain.ortmodule import ORTModule

ROOT = Path(__file__).resolve().parents[2]


class Net(nn.Module):
    def __init__(self, width=4, scale=2.0, mode="relu"):
        super().__init__()
        self.fc = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale, self.mode, self.held = scale, mode, torch.ones(width)
        self.plain = nn.Linear(3, width, bias=False)  # a parameter that is None

    def forward(self, x, flag=False):
        h = self.fc(x) * self.scale + self.held + self.norm(self.fc(x).detach()) + self.plain(x)
        h = h.relu() if self.mode == "relu" else h
        return {"out": -h if flag else h, "rows": [h.sum(1), 3, None]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def counts(module, *args):
    model = ORTModule(module)
    eager = copy.deepcopy(module)
    x = torch.randn(5, 3)
    for rows in (5, 2):
        got, want = model(x[:rows], *args), eager(x[:rows], *args)
        torch.testing.assert_close(got["out"], want["out"])
        assert got["rows"][1:] == want["rows"][1:]
        got["out"].square().sum().backward(), want["out"].square().sum().backward()
    for p, q in zip(model.parameters(), eager.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    for a, b in zip(model.buffers(), eager.buffers()):
        torch.testing.assert_close(a, b)
    found = onnxtrain.stats(model)
    assert found["fallback_steps"] == 0, found["reasons"]
    return found["exports"], found["cached_exports"]


def test_kept_and_loaded_with_gradients_buffers_and_new_sizes(folder):
    assert counts(Net()) == (1, 0)
    assert counts(Net()) == (0, 1)
    assert len(list(folder.glob("*.zip"))) == 1


def test_whatever_changes_the_graph_is_a_miss(folder, monkeypatch):
    assert counts(Net()) == (1, 0)
    assert counts(Net(scale=3.0)) == (1, 0)
    assert counts(Net(mode="none")) == (1, 0)
    assert counts(Net(width=5)) == (1, 0)
    assert counts(Net(), True) == (1, 0)
    module = Net()
    module.norm.eval()
    assert counts(module) == (1, 0)
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "19")
    assert counts(Net()) == (1, 0)
    monkeypatch.delenv("ORTMODULE_ONNX_OPSET_VERSION")
    module = Net()
    module.held = torch.full((4,), 2.0)  # read anew at each step: no miss
    assert counts(module) == (0, 1)
    assert counts(Net(scale=3.0)) == (0, 1)


def test_another_release_or_torch_is_a_miss(folder, monkeypatch):
    assert counts(Net()) == (1, 0)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert counts(Net()) == (1, 0)


SCRIPT = """
    import sys, time, torch, onnxtrain
    from onnxtrain.ortmodule import ORTModule

    FACTOR = 2.0

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(3, 4)

        def forward(self, x):
            return self.fc(x) * FACTOR

    model = ORTModule(Net())
    x = torch.ones(2, 3)
    assert torch.equal(model(x), model.module(x))
    counts = onnxtrain.stats(model)
    print(counts["exports"], counts["cached_exports"], "onnxscript" in sys.modules,
          "torch.onnx._internal.exporter._core" in sys.modules)
"""


def test_another_process_starts_without_the_exporter_and_a_new_source_exports_again(folder, tmp_path):
    script = tmp_path / "train.py"
    run = lambda: subprocess.run([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)},  # noqa: E731
                                 capture_output=True, text=True, check=True).stdout.split()
    script.write_text(textwrap.dedent(SCRIPT))
    assert run()[:2] == ["1", "0"]
    assert run() == ["0", "1", "False", "False"]
    script.write_text(textwrap.dedent(SCRIPT).replace("FACTOR = 2.0", "FACTOR = 3.0"))
    assert run()[:2] == ["1", "0"]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Calls(Net):
    def forward(self, x):
        return {"out": Twice.apply(self.fc(x)), "rows": [None]}


def test_what_cannot_be_written_down_is_not_kept(folder, caplog):
    module = Net()
    module.mode = lambda: 3  # an attribute that has a value of its own
    module.mode.__defaults__ = (1,)
    with caplog.at_level(logging.INFO, "onnxtrain"):
        assert counts(module) == (1, 0) and counts(Calls()) == (1, 0)
    assert "not kept" in caplog.text and not list(folder.glob("*.zip"))


def rewrite(path, change):
    with zipfile.ZipFile(path) as archive:
        meta, model = json.loads(archive.read("meta.json")), archive.read("model.onnx")
    change(meta)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("meta.json", json.dumps(meta))
        archive.writestr("model.onnx", model)


def test_bad_files_are_passed_over(folder, caplog, tmp_path):
    assert counts(Net()) == (1, 0)
    (path,) = folder.glob("*.zip")
    whole = path.read_bytes()
    marker = tmp_path / "marker"
    evil = f"__import__('pathlib').Path({str(marker)!r}).touch() or True"
    changes = [lambda: path.write_bytes(whole[:100]), lambda: path.write_bytes(b""),
               lambda: rewrite(path, lambda meta: meta.pop("outputs")),
               lambda: rewrite(path, lambda meta: meta["guards"][1].append([evil, "x"])),
               lambda: rewrite(path, lambda meta: meta["guards"][2].append(["s0", evil])),
               lambda: rewrite(path, lambda meta: meta["guards"][1].append(["torch.ones(1).sum() > 0", "x"]))]
    for change in changes:
        path.write_bytes(whole)
        change()
        for other in set(folder.glob("*.zip")) - {path}:
            other.unlink()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "onnxtrain"):
            assert counts(Net()) == (1, 0)
        assert "is passed over" in caplog.text and not marker.exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        assert counts(Net()) == (1, 0)
    assert "cannot keep" in caplog.text


def test_closures_are_not_compared():
    with pytest.raises(cache.NotKept):
        cache._identity((lambda n: lambda: n)(3))
