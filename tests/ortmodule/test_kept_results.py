"""Results of operations that a process before has kept: they are what torch makes, with the same conditions on sizes,
and nothing else is taken for one.
"""

import contextlib
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_repeats import described
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import onnxtrain
from onnxtrain._export import files
from onnxtrain.ortmodule import ORTModule, _kept_results, _repeats

ROOT = Path(__file__).resolve().parents[2]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, y):
        q = self.norm(x)
        h = F.scaled_dot_product_attention(q, F.gelu(self.up(q)), x)
        return self.drop(h) + x + y[2:].unsqueeze(1), torch.cumsum(h, -1).mean(-1)


@pytest.fixture
def later(tmp_path, monkeypatch):
    """A function that captures a model as a later process would: it returns the model, its results, the names of the
    operations whose results were kept, each of which is compared with torch's, and the conditions on sizes.
    """
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    plain_remembering, plain_find = _repeats._remembering, _kept_results.Kept.find
    found, conditions, kept = [], [], []

    def find(self, name, mode):
        result = plain_find(self, name, mode)
        kept.append(result is not None)
        return result

    def remembering(plain, own=None):
        ours = plain_remembering(plain, own)

        def both(tracer, node, args, kwargs, nnmodule):
            kept.clear()
            result = ours(tracer, node, args, kwargs, nnmodule)
            if any(kept):
                mode = result.fake_mode
                before = len(mode.shape_env.guards)
                assert described(result) == described(plain(tracer, node, args, kwargs, nnmodule)), node
                assert len(mode.shape_env.guards) == before, "a condition of torch's was not decided again"
                found.append(str(getattr(node.target, "__name__", node.target)))
            if isinstance(result, FakeTensor):
                conditions[:] = [str(guard.expr) for guard in result.fake_mode.shape_env.guards]
            return result

        return both

    monkeypatch.setattr(_kept_results.Kept, "find", find)
    monkeypatch.setattr(_repeats, "_remembering", remembering)

    def run(make, *inputs):
        torch._dynamo.reset()
        found.clear()
        torch.manual_seed(0)
        module = make()
        model = ORTModule(module)
        results = model(*inputs)
        return model, results, list(found), list(conditions)

    return run


def same_as_eager(model, module, inputs):
    torch.manual_seed(1)
    got = model(*inputs)
    sum(part.sum() for part in got).backward()
    torch.manual_seed(1)
    want = module(*inputs)
    sum(part.sum() for part in want).backward()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


INPUTS = torch.randn(5, 6, 8), torch.randn(7, 8)


def test_a_later_capture_takes_results_and_conditions(later):
    _, _, found, first = later(Model, *INPUTS)
    assert not found and any("Eq" in condition for condition in first)  # y is two longer than x
    model, _, found, second = later(Model, *INPUTS)
    assert second == first
    assert {"layer_norm", "scaled_dot_product_attention", "gelu", "linear", "add", "dropout", "cumsum"} <= set(found)
    model._module.drop.p = 0.0
    module = copy.deepcopy(model._module)
    same_as_eager(model, module, INPUTS)
    # The condition holds for sizes that only the second process sees: with 3 rows of y its row is broadcast.
    for inputs in ((torch.randn(4, 3, 8), torch.randn(6, 8)), (torch.randn(4, 3, 8), torch.randn(3, 8))):
        model.zero_grad()
        module.zero_grad()
        same_as_eager(model, module, inputs)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


@contextlib.contextmanager
def _default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Frozen(Model):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Evaluated(Model):
    def __init__(self):
        super().__init__()
        self.eval()


class Patched(Model):
    def forward(self, x, y):
        return super().forward(x * 2, y)


def _of(make):
    """The class under the name that the first process has seen."""
    make.__name__ = make.__qualname__ = "Model"
    return make


CHANGES = {
    "other sizes": (Model, (torch.randn(4, 6, 8), torch.randn(6, 8)), contextlib.nullcontext, set()),
    "float64": (lambda: Model().double(), tuple(x.double() for x in INPUTS), contextlib.nullcontext, set()),
    "a leaf": (Model, (INPUTS[0].clone().requires_grad_(), INPUTS[1]), contextlib.nullcontext, None),
    "strides": (Model, (INPUTS[0].transpose(0, 1).contiguous().transpose(0, 1), INPUTS[1]), contextlib.nullcontext,
                None),
    "no gradient": (Model, INPUTS, torch.no_grad, set()),
    "frozen": (_of(Frozen), INPUTS, contextlib.nullcontext, set()),
    "eval": (_of(Evaluated), INPUTS, contextlib.nullcontext, None),
    "autocast": (Model, INPUTS, lambda: torch.autocast("cpu", torch.bfloat16), set()),
    "default dtype": (lambda: Model().float(), INPUTS, _default_dtype, set()),
    "without oneDNN": (Model, INPUTS, lambda: torch.backends.mkldnn.flags(enabled=False), set()),
    "another method": (_of(Patched), INPUTS, contextlib.nullcontext, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_at_a_time(later, change):
    """All kept results are compared with torch's; where an argument or a mode of all operations differs, none is."""
    later(Model, *INPUTS)
    make, inputs, context, expected = CHANGES[change]
    with context():
        model, _, found, _ = later(make, *inputs)
        if expected is not None:
            assert set(found) == expected
        model._module.drop.p = 0.0
        if torch.is_grad_enabled() and change not in ("autocast", "frozen"):
            same_as_eager(model, copy.deepcopy(model._module), inputs)
        else:
            torch.testing.assert_close(model(*inputs), model._module(*inputs), rtol=0.02, atol=0.02)


def test_settings_of_torch_and_versions_have_files_of_their_own(tmp_path, monkeypatch):
    from torch.fx.experimental import _config

    def name():
        return _kept_results.of(Model(), str(tmp_path))._name

    first = name()
    assert name() == first
    with _config.patch(backed_size_oblivious=not _config.backed_size_oblivious):
        assert name() != first
    for owner, attribute, value in ((torch, "__version__", "0.0"), (sys, "version", "3.0"),
                                    (torch.backends.cpu, "get_cpu_capability", lambda: "another processor")):
        monkeypatch.setattr(owner, attribute, value)
        assert name() != first
        monkeypatch.undo()
    other = Model()
    other.up = nn.Linear(8, 8, bias=False)
    assert _kept_results.of(other, str(tmp_path))._name != first
    assert _kept_results.of(Model(), "") is None


def test_no_name_stands_for_functions_of_others(tmp_path):
    def own(x):
        return x

    for target in (own, lambda x: x, torch.compiler.disable(own), len.__call__, json.dumps, Model):
        with pytest.raises(_repeats.Unknown):
            _kept_results._function(target)
    assert _kept_results._function(torch.add) != _kept_results._function(torch.mul)
    assert _kept_results._function(F.layer_norm) == ("function", "torch.nn.functional", "layer_norm")


def test_no_name_stands_for_other_devices(tmp_path):
    kept, mode = _kept_results.Kept(str(tmp_path), "results-a"), FakeTensorMode()
    assert kept.name(("call_method", "to", torch.device("cpu")), mode) is not None
    for device in ("cuda", "meta"):
        assert kept.name(("call_method", "to", torch.device(device)), mode) is None


def test_a_function_that_took_the_place_of_torchs_has_no_name(monkeypatch):
    plain = F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda *args: plain(*args))
    for target in (plain, F.layer_norm):
        with pytest.raises(_repeats.Unknown):
            _kept_results._function(target)


@pytest.mark.parametrize("damage", ("content", "no table", "not JSON", "others may write", "entries"))
def test_damaged_files_are_passed_over(later, tmp_path, damage, caplog):
    later(Model, *INPUTS)
    (path,) = tmp_path.glob("results-*.json")
    text = path.read_bytes()
    stem = path.name.rsplit("-", 1)[0]
    if damage == "content":
        path.write_bytes(text.replace(b"float32", b"float64"))
    elif damage == "others may write":
        path.chmod(0o666)
    else:
        path.unlink()
        entries = {name: [["s0"], ["__import__"], "torch.load", "cpu", 1, 1, [[["eval", 1], False]], ""]
                   for name in json.loads(text)}
        new = {"no table": b"[]", "not JSON": b"{", "entries": json.dumps(entries).encode()}[damage]
        path.with_name(f"{stem}-{_kept_results.hashlib.sha256(new).hexdigest()}.json").write_bytes(new)
    model, _, found, _ = later(Model, *INPUTS)
    assert not found
    assert ("which it cannot read" in caplog.text) == (damage != "entries")
    model._module.drop.p = 0.0
    same_as_eager(model, copy.deepcopy(model._module), INPUTS)


def test_files_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(_kept_results, "MAX_ENTRIES", 2)
    with _kept_results.Kept(str(tmp_path), "results-a") as kept:
        kept._entries, kept._is_new = {str(i): i for i in range(5)}, True
    assert _kept_results._read(str(tmp_path), "results-a") == {"3": 3, "4": 4}
    with _kept_results.Kept(str(tmp_path), "results-a") as kept:
        kept._entries["5"], kept._is_new = 5, True
    assert len(list(tmp_path.glob("results-a-*.json"))) == 1
    monkeypatch.setattr(_kept_results, "MAX_BYTES", 20)
    _kept_results._write(str(tmp_path), "results-b", {"1": "a" * 10})
    assert [path.name.split("-")[1] for path in tmp_path.glob("results-*.json")] == ["b"]
    assert not list(tmp_path.glob(files._TEMPORARY + "*"))


SCRIPT = """
import sys
import torch, torch.nn as nn, torch.nn.functional as F
import onnxtrain
from onnxtrain.ortmodule import ORTModule, _kept_results
hits, plain = [], _kept_results.Kept.find
_kept_results.Kept.find = lambda *given: (hits.append(plain(*given)), hits[-1])[1]
wide = int(sys.argv[1])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        h = F.gelu(self.up(x))
        h = torch.cat([h] * wide, -1)
        return h * h.shape[-1]

torch.manual_seed(0)
module, x = Model(), torch.randn(3, 8)
model = ORTModule(module)
torch.testing.assert_close(model(x), module(x))
print(onnxtrain.stats(model)["cached_exports"], sum(hit is not None for hit in hits))
"""


def test_a_flag_of_a_script_is_seen(tmp_path):
    """The second process changes a global that forward reads; the third one changes it back."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORTMODULE_CACHE_DIR": str(tmp_path / "cache"),
                   "PYTHONHASHSEED": "random"}
    said = [[int(word) for word in subprocess.run(
        [sys.executable, "-c", SCRIPT, flag], env=environment, capture_output=True, text=True, check=True,
    ).stdout.split()[-2:]] for flag in ("1", "2", "1")]
    assert said[0] == [0, 0]
    assert said[1][0] == 0 and 2 <= said[1][1] < said[2][1]
    assert said[2][0] == 1
