"""What the core records of runs, and the ranges of torch.profiler."""

import json
import sys
import threading

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, schedule, tensorboard_trace_handler

from onnxtrain import _C, _timing
from onnxtrain.ortmodule import ORTModule


@pytest.fixture
def model():
    made = ORTModule(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)))
    made(torch.randn(4, 8)).sum().backward()
    yield made
    _C.set_timing(False)


def session(model):
    return model._all_programs()[0][1][0].session


def test_every_run_is_recorded_once(model):
    own = session(model)
    _C.set_timing(True, True)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    phases = own.timings()
    assert [phase[0] for phase in phases] == [False, True, False, True] and own.timings() == []
    for backward, lost, thread, start, end, delivering, steps in phases:
        assert steps and start <= end and delivering == 0 and thread and not lost
        assert all(step[5] == backward and start <= step[6] <= step[7] <= end for step in steps)
    first = phases[0][6][0]
    assert first[:2] == ("0/Gemm_0", "Gemm") and first[3:5] == ("[4, 16]", 4 * (4 * 8 + 16 * 8 + 16 + 4 * 16))


def test_nothing_is_recorded_unless_asked_for(model):
    _C.set_timing(True)
    model(torch.randn(4, 8)).sum().backward()
    assert session(model).timings() == [] and all(end > 0 for *_, end in session(model).timeline())
    _C.set_timing(True, True)
    model(torch.randn(4, 8))
    _C.set_timing(False)
    assert session(model).timings() == []


def test_the_oldest_times_are_dropped_and_counted():
    model, other = (ORTModule(nn.Sequential(nn.Linear(2, 2))) for _ in range(2))
    x, limit = torch.randn(1, 2), (1 << 21) // 9  # forwards of one step
    for one in (model, other):
        one(x).sum().backward()
    _C.set_timing(True, True)
    try:
        own, mask = session(model), b"\0" * 3
        tensors = [x, *model.parameters()]
        other(x)
        assert len([step for step in own.timeline() if not step[4]]) == 1
        for _ in range(limit + 3):
            own.forward(tensors, mask)
        assert [phase[1] for phase in session(other).timings()] == [1]  # the oldest
        phases = own.timings()
        assert phases[0][1] > 0 and all(phase[1] == 0 for phase in phases[1:]) and own.timings() == []
        assert phases[0][1] + len(phases) - 1 == limit + 3
    finally:
        _C.set_timing(False)


def test_threads_record_side_by_side(model):
    inputs = [torch.randn(4, 8) for _ in range(4)]
    _C.set_timing(True, True)
    threads = [threading.Thread(target=lambda x=x: [model(x).sum().backward() for _ in range(5)]) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    phases = session(model).timings()
    assert len(phases) == 40
    assert all(step[6] <= step[7] and phase[3] <= step[6] for phase in phases for step in phase[6])


@pytest.mark.parametrize(("paths", "modules", "prefix"), [
    ((), ("a",), ""),
    (("enc.a", "enc.b"), ("a", "b"), "enc."),
    (("a", "b"), ("a", "b", "c"), ""),
    (("enc.layers.0.a", "enc.layers.1.a"), ("layers.0.a", "layers.1.a", "layers.0"), "enc."),
    (("head",), ("",), "head/"),
    (("one", "two"), ("",), ""),
])
def test_a_part_of_a_module_has_its_path_before_its_names(paths, modules, prefix):
    assert _timing._prefix(paths, modules) == prefix


def test_torchs_profiler_shows_each_node(model):
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
    found = {event.key: event for event in profile.key_averages()}
    for name, count in (("onnxtrain forward", 3), ("onnxtrain backward", 3), ("0/Gemm_0", 3), ("1/Gelu_1", 3),
                        ("2/Gemm_2", 3), ("1/Gelu_1 (backward)", 3), ("2/Gemm_2 (backward)", 6)):
        assert found[name].count == count, name
    for phase, ending in (("forward", ""), ("backward", " (backward)")):
        whole = found[f"onnxtrain {phase}"].cpu_time_total
        inside = sum(event.cpu_time_total for name, event in found.items() if name.partition("/")[0] in ("0", "1", "2")
                     and name.endswith(ending) and (ending or "backward" not in name))
        assert 0 < inside <= whole
    outer = found["_ORTModuleFunction"].cpu_time_total
    assert found["onnxtrain forward"].cpu_time_total <= outer
    model(torch.randn(4, 8))
    assert not _timing.in_ranges


def test_a_trace_for_tensorboard_holds_the_nodes(model, tmp_path):
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2),
                                on_trace_ready=tensorboard_trace_handler(str(tmp_path))) as profile:
        for _ in range(4):
            model(torch.randn(4, 8)).sum().backward()
            profile.step()
    (file,) = tmp_path.glob("*.pt.trace.json")
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    assert names.count("1/Gelu_1") == 2 and names.count("1/Gelu_1 (backward)") == 2


def test_a_range_that_fails_leaves_the_run_alone(model, monkeypatch):
    x, seen = torch.randn(4, 8), []
    expected = model(x)

    def fail(name):
        raise KeyError(name)

    monkeypatch.setattr(sys, "unraisablehook", lambda failure: seen.append(failure.exc_value))
    monkeypatch.setattr(_timing, "RecordFunctionFast", fail)
    with torch.profiler.profile():
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    names = ("onnxtrain forward", "0/Gemm_0", "1/Gelu_1", "2/Gemm_2")
    assert [str(error) for error in seen] == [repr(name) for name in names]
    with pytest.raises(TypeError, match="function"):
        _C.set_ranges(3)
