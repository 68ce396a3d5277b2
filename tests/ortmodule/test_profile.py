"""onnxtrain.profile(): where the time of a step goes by modules, and what it says of the time outside the engine."""

import json
import re
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain._profile import _length
from onnxtrain.ortmodule import ORTModule


class Net(nn.Module):
    def __init__(self, cut=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 10)
        self.cut = cut

    def forward(self, x):
        x = self.body(x)
        if self.cut:
            torch._dynamo.graph_break()
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x)


def steps(model, count, sleep=0.0):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 16, 64)).square().mean().backward()
        optimizer.step()
        time.sleep(sleep)


def rows(text):
    """{name: (ms, calls)} of a table."""
    found = [re.match(r" *([\d.]+) +[\d.]+%(?: +[\d.]+ +[\d.]+ +(\d+) +[\d.]+)?  +(\S.*)", line)
             for line in text.splitlines()]
    return {row[3]: (float(row[1]), int(row[2] or 0)) for row in found if row}


@pytest.mark.parametrize("cut", [False, True])
def test_time_is_given_by_the_names_of_the_users_modules(cut):
    """Where Dynamo cuts the graph as well, though each part names modules from where it begins."""
    model = ORTModule(Net(cut))
    steps(model, 2)
    with onnxtrain.profile(model) as profile:
        steps(model, 3)
    found = rows(profile.table())
    assert {"body.0", "body.1", "body.2", "attention", "head"} <= set(found)
    assert not any(name.startswith("(top)") for name in found)
    assert found["body.1"][1] == 6  # GELU, forward and backward, in three steps
    assert set(rows(profile.table(depth=1))) >= {"body", "attention", "head"}
    assert "3 calls of the module" in str(profile) and "module" in str(profile)
    assert "Gelu" in profile.table("operator") and "head/" in profile.table("node")
    with pytest.raises(ValueError, match="expected 'module'"):
        profile.table("layer")


def test_the_rows_add_up_to_the_whole():
    model = ORTModule(Net())
    steps(model, 1)
    with onnxtrain.profile(model) as profile:
        steps(model, 5, sleep=0.01)
    found, whole = rows(profile.table(top=100)), profile.seconds * 1e3
    assert abs(sum(ms for ms, _ in found.values()) - whole) < 0.01 * whole
    outside = found["(outside the module: loss, autograd, data, Python)"][0]
    assert 50 <= outside < whole and found["(optimizer)"][0] > 0
    few = rows(profile.table(top=1))
    assert abs(sum(ms for ms, _ in few.values()) - whole) < 0.01 * whole and len(few) < len(found)


def test_it_is_turned_on_and_off_on_a_module_that_has_run():
    model = ORTModule(Net())
    steps(model, 1)
    (program,), before = model._all_programs()[0][1], model.__dict__.copy()
    for count in (1, 2):
        with onnxtrain.profile(model) as profile:
            steps(model, count)
        assert profile.calls == count
        steps(model, 3)  # is in no profile
        assert program.session.timings() == [] and model.__dict__ == before
    assert onnxtrain.stats(model)["exports"] == 1


def test_two_profiles_at_once_see_their_own_modules_only():
    one, other = ORTModule(Net()), ORTModule(nn.Sequential(nn.Linear(64, 8)))
    steps(one, 1), steps(other, 1)
    with onnxtrain.profile(one) as outer, onnxtrain.profile(nn.ModuleList([one, other])) as both:
        steps(one, 2), steps(other, 1)
    assert outer.calls == 2 and both.calls == 3
    assert len(outer.kernels) < len(both.kernels)
    assert outer.kernels == [k for k in both.kernels if k in outer.kernels]


def test_every_backward_is_seen_where_forwards_come_first():
    model = ORTModule(Net())
    steps(model, 1)
    with onnxtrain.profile(model) as profile:
        losses = [model(torch.randn(4, 16, 64)).sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
    engine = [span.name for span in profile.spans if span.kind == "engine"]
    assert engine == ["forward"] * 3 + ["backward"] * 3


def test_the_first_step_has_its_export_as_a_row():
    model = ORTModule(Net())
    with onnxtrain.profile(model) as profile:
        steps(model, 1)
    found = rows(profile.table())
    assert found["(export and build)"][0] > 10 and "head" in found


def test_pytorchs_fallback_is_a_row(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    monkeypatch.setenv("ORTMODULE_ALWAYS_FALLBACK", "1")
    model = ORTModule(Net())
    with onnxtrain.profile(model) as profile:
        steps(model, 2)
    found = rows(profile.table())
    assert found["(PyTorch fallback)"][0] > 0 and not profile.kernels


def test_the_optimizer_within_backward_is_a_row():
    from onnxtrain.optim import FusedAdam, step_in_backward

    model = ORTModule(Net())
    optimizer = FusedAdam(model.parameters())
    step_in_backward(optimizer, model)
    for _ in range(2):
        model(torch.randn(4, 16, 64)).square().mean().backward()
        optimizer.step()
    with onnxtrain.profile(model) as profile:
        model(torch.randn(4, 16, 64)).square().mean().backward()
        optimizer.step()
    assert rows(profile.table())["(updates and reductions within backward)"][0] > 0


def test_a_saved_trace_has_every_kernel_and_names_of_modules(tmp_path):
    model = ORTModule(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model(torch.randn(4, 8)).sum().backward()
    with onnxtrain.profile(model) as profile:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    path = tmp_path / "trace.json"
    profile.save(path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in events} == {"forward", "backward", "module", "engine", "optimizer"}
    assert {e["name"].rpartition("/")[0] for e in events if e["cat"] == "forward"} == {"0", "1", "2"}
    gelu = [e for e in events if e["cat"] == "forward" and e["args"]["operator"] == "Gelu"]
    assert len(gelu) == 3 and all(e["args"]["kernel"] for e in gelu) and all(e["dur"] >= 0 for e in events)
    assert len([e for e in events if e["cat"] == "backward"]) >= 3 * 4
    assert len({(e["name"], e["cat"], e["ts"], e["args"].get("shape", "")) for e in events}) == len(events)
    with pytest.raises(OSError):
        profile.save(tmp_path / "no" / "trace.json")


def test_what_is_no_module_of_the_engine_is_refused():
    with pytest.raises(TypeError, match="ORTModule.*not Linear"):
        onnxtrain.profile(nn.Linear(2, 2))
    model = ORTModule(Net())
    with onnxtrain.profile(model) as profile, pytest.raises(RuntimeError, match="already"):
        profile.__enter__()


def test_a_profile_without_steps_says_how_to_record_some():
    assert "with onnxtrain.profile(model)" in str(onnxtrain.profile(ORTModule(Net())))


def test_the_length_of_a_union():
    assert _length([]) == 0
    assert _length([(3, 4), (1, 2), (1, 3), (6, 8), (7, 7.5)]) == 5


def test_the_page_shows_what_is_printed():
    page = (Path(__file__).parents[2] / "docs/debugging.md").read_text(encoding="utf-8")
    shown = page.split("```text\n")[1].split("```")[0]
    body = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    model = ORTModule(nn.Sequential(OrderedDict(body=body, head=nn.Linear(256, 10))))
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()

    step()
    with onnxtrain.profile(model) as profile:
        for _ in range(20):
            step()
    for text in (shown, str(profile)):
        head, columns, *_ = text.splitlines()
        assert re.sub(r"[\d.]+ ms", "# ms", head) == (
            "20 calls of the module in # ms: 200 kernels, # ms, of which forward # ms and backward # ms")
        assert columns.split() == ["ms", "share", "forward", "backward", "calls", "MiB", "module"]
    printed, expected = ({name: calls for name, (_, calls) in rows(text).items()} for text in (shown, str(profile)))
    assert printed == expected
