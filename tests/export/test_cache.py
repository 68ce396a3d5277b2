"""Exports on disk: a second process loads them; whatever changes the graph is a miss; bad files are passed over."""

import argparse
import collections
import copy
import functools
import importlib
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
from functions import Doubled

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


@pytest.mark.parametrize("pool", [nn.MaxPool1d(2), nn.MaxPool2d(2)])
def test_functions_of_torch_that_choose_another_are_kept(folder, pool):
    net = nn.Sequential(nn.Linear(6, 6), pool)
    for found in ((1, 0), (0, 1)):
        model = ORTModule(copy.deepcopy(net))
        model(torch.randn(2, 4, 6)).sum().backward()
        counted = onnxtrain.stats(model)
        assert (counted["exports"], counted["cached_exports"]) == found
        torch._dynamo.reset()


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


FLAGGED = """
import sys
import torch
import onnxtrain
from onnxtrain.ortmodule import ORTModule

class Inner(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

def other(self, x):
    return torch.nn.functional.linear(x, self.weight, self.bias) * 3

if "--other" in sys.argv:
    Inner.forward = other
torch.manual_seed(0)
module = torch.nn.Sequential(Inner(3, 2))
x = torch.randn(4, 3)
want = module(x).sum().item()
model = ORTModule(module)
assert abs(model(x).sum().item() - want) < 1e-5
print(onnxtrain.stats(model)["exports"])
"""


def test_a_flag_that_replaces_a_method_of_a_class_is_a_miss(folder):
    run = lambda *flags: subprocess.run([sys.executable, "-c", FLAGGED, *flags],  # noqa: E731
                                        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                                        check=True).stdout.strip()
    assert [run(), run(), run("--other"), run("--other"), run()] == ["1", "0", "1", "0", "0"]


class Calls(Net):
    def forward(self, x):
        return {"out": Doubled.apply(self.fc(x)), "rows": [None]}


class Draws(Net):
    def forward(self, x):
        kept = torch.bernoulli(torch.full_like(x[:, :1], 0.7)) + torch.rand((x.shape[0], 1), dtype=torch.float32)
        return {"out": self.fc(x * kept), "rows": [None]}


def test_draws_of_torch_are_kept_as_data_of_known_operators(folder, caplog):
    for exports in (1, 0, 1):
        torch.manual_seed(3)
        module = Draws()
        eager, model, x = copy.deepcopy(module), ORTModule(module), torch.randn(5, 3)
        torch.manual_seed(7)
        want = eager(x)["out"]
        torch.manual_seed(7)
        got = model(x)["out"]
        torch.testing.assert_close(got, want)
        got.square().sum().backward(), want.square().sum().backward()
        torch.testing.assert_close(model.fc.weight.grad, eager.fc.weight.grad)
        found = onnxtrain.stats(model)
        assert (found["exports"], found["cached_exports"], found["fallback_steps"]) == (exports, 1 - exports, 0)
        if not exports:  # the file says another operator: it is no data of ours
            caplog.clear()
            rewrite(next(folder.glob("*.zip")), lambda meta: meta["draws"][0].update(operator="aten.add.Tensor"))
    assert "ignores the export" in caplog.text and "KeyError" in caplog.text


def test_what_could_not_be_read_is_not_written(folder, monkeypatch):
    assert cache._guards(([1], [["max(1, d0_0) != 2", "two"]], []))([torch.ones(3)]) is None
    monkeypatch.delitem(cache.shape_guards._NAMESPACE, "max")
    plain = cache.shape_guards.from_program

    def with_a_maximum(*args):
        guards = plain(*args)
        guards.source[1].append(("max(1, d0_0) > 0", "a guard"))
        return guards

    monkeypatch.setattr(cache.shape_guards, "from_program", with_a_maximum)
    assert counts(Net()) == (1, 0)
    assert not list(folder.glob("*.zip"))


def test_what_cannot_be_written_down_is_not_kept(folder):
    assert counts(Calls()) == (1, 0)
    assert not list(folder.glob("*.zip"))


def rewrite(path, change):
    """Under a name that fits, so that only what is inside can be refused."""
    with zipfile.ZipFile(path) as archive:
        meta, model = json.loads(archive.read("meta.json")), archive.read("model.onnx")
    change(meta)
    text = json.dumps(meta).encode()
    path.unlink()
    with zipfile.ZipFile(path.with_name(f"{path.stem.split('-')[0]}-{cache._entry(text, model)}.zip"), "w") as archive:
        archive.writestr("meta.json", text)
        archive.writestr("model.onnx", model)


def swap(path, change):
    """Other content under the old name."""
    name = path.name
    rewrite(path, change)
    next(path.parent.glob("*.zip")).rename(path.with_name(name))


def test_bad_files_are_passed_over(folder, caplog, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "code_of_a_stranger.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    monkeypatch.syspath_prepend(tmp_path)
    assert counts(Net()) == (1, 0)
    (path,) = folder.glob("*.zip")
    whole = path.read_bytes()
    evil = f"__import__('pathlib').Path({str(marker)!r}).touch() or True"
    changes = [lambda: path.write_bytes(whole[:100]), lambda: path.write_bytes(b""),
               lambda: rewrite(path, lambda meta: meta.pop("outputs")),
               lambda: swap(path, lambda meta: meta["notes"].append("another")),
               lambda: rewrite(path, lambda meta: meta.update(results=evil)),
               lambda: rewrite(path, lambda meta: meta["guards"][1].append([evil, "x"])),
               lambda: rewrite(path, lambda meta: meta["guards"][2].append(["s0", evil])),
               lambda: rewrite(path, lambda meta: meta["guards"][1].append(["torch.ones(1).sum() > 0", "x"]))]
    for change in changes:
        for other in folder.glob("*.zip"):
            other.unlink()
        path.write_bytes(whole)
        path.chmod(0o600)
        change()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "onnxtrain"):
            assert counts(Net()) == (1, 0)
        assert "ignores the export" in caplog.text and not marker.exists()


# --- what forward reads outside of the module -----------------------------------------------------------------------

SCALE = 2.0
OPTIONS = {"bias": [1.0, 2.0]}
ARGS = argparse.Namespace(width=argparse.Namespace(gain=2.0), run="a")


class Settings:
    gain = 2.0


def made(gain):
    def by(h):
        return h * gain

    return by


BY = made(2.0)
PART = functools.partial(torch.mul, other=2.0)
KIND = collections.namedtuple("KIND", "gain bias")


def by_default(h, gain=2.0):
    return h * gain


class Outside(Net):
    def forward(self, x):
        h = self.fc(x) * SCALE + OPTIONS["bias"][1] * ARGS.width.gain + Settings.gain + KIND(1.0, 2.0).bias
        h = PART(by_default(BY(h))) * float(os.environ.get("SCALE_OF_THE_RUN", "1"))
        return {"out": self.last(h), "rows": [None]}

    def last(self, h):
        return h


def test_values_that_forward_reads_elsewhere_are_compared(folder, monkeypatch):
    here = sys.modules[__name__]
    assert counts(Outside()) == (1, 0) and counts(Outside()) == (0, 1)
    for change in (lambda: monkeypatch.setattr(here, "SCALE", 3.0),
                   lambda: monkeypatch.setattr(ARGS.width, "gain", 3.0),
                   lambda: monkeypatch.setitem(OPTIONS, "bias", [1.0, 3.0]),
                   lambda: monkeypatch.setattr(Settings, "gain", 3.0),
                   lambda: monkeypatch.setattr(here, "BY", made(3.0)),
                   lambda: monkeypatch.setattr(here, "PART", functools.partial(torch.mul, other=3.0)),
                   lambda: monkeypatch.setattr(by_default, "__defaults__", (3.0,)),
                   lambda: monkeypatch.setattr(Outside, "last", lambda self, h: -h),
                   lambda: monkeypatch.setenv("SCALE_OF_THE_RUN", "3")):
        change()
        assert counts(Outside()) == (1, 0)
    monkeypatch.setattr(ARGS, "run", "b")  # which forward does not read
    assert counts(Outside()) == (0, 1)
    monkeypatch.undo()
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(folder))
    assert counts(Outside()) == (0, 1)


def test_a_package_whose_helper_changes_is_exported_again(folder, tmp_path, monkeypatch):
    place = tmp_path / "site-packages"
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    (place / "a_helper.py").write_text("def helped(h):\n    return h * 2\n")
    helper = importlib.import_module("a_helper")

    class Helped(Net):
        def forward(self, x):
            return {"out": helper.helped(self.fc(x)), "rows": [None]}

    assert counts(Helped()) == (1, 0) and counts(Helped()) == (0, 1)
    (place / "a_helper.py").write_text("def helped(h):\n    return h * 22\n")
    importlib.reload(helper)
    assert counts(Helped()) == (1, 0)
    monkeypatch.delitem(sys.modules, "a_helper")


class MakesItsLoss(Net):
    def forward(self, x):
        return {"out": nn.MSELoss()(self.fc(x), self.held.expand(x.size(0), -1)), "rows": [None]}


def test_modules_that_forward_makes_itself_are_no_hindrance(folder):
    assert counts(MakesItsLoss()) == (1, 0) and counts(MakesItsLoss()) == (0, 1)


def image(size):
    """Equal operations for every size, each with guards of its own."""
    model, x = ORTModule(nn.Conv2d(1, 1, 2)), torch.randn(2, 1, size, size)
    torch.testing.assert_close(model(x), model.module(x))
    found = onnxtrain.stats(model)
    return found["exports"], found["cached_exports"]


def test_the_exports_used_longest_ago_go(folder, monkeypatch):
    monkeypatch.setattr(cache, "MAX_ENTRIES", 2)
    for step, size in enumerate((4, 5, 4, 6)):  # the second 4 is a use of the first
        image(size)
        for path in folder.glob("*.zip"):
            if path.stat().st_mtime > 1e9:
                os.utime(path, (step, step))
    assert len(list(folder.glob("*.zip"))) == 2
    assert image(4) == (0, 1) and image(5) == (1, 0)
    monkeypatch.setattr(cache, "MAX_BYTES", 1)
    other, left = folder / "kept.zip", folder / ".onnxtrain-left"
    other.touch(), left.touch()
    os.utime(left, (0, 0))
    assert counts(Net(width=5)) == (1, 0)
    assert len(list(folder.glob("*.zip"))) == 2 and other.exists() and not left.exists()
