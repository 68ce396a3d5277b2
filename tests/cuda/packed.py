"""Unused rows on a device (csrc/passes/pack_rows.c): the tests of the CPU's pass with sessions of the device, attention
whose masks hide keys, and padded batches through ORTModule. programs.py runs these.
"""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import onnx
import test_attention_rows
import test_pack_rows
import test_pack_rows_build
import test_row_rules
import torch

from onnxtrain import _C, _report
from onnxtrain.ortmodule import ORTModule, _runner

ASKED = ("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER")
GRAPHS = (test_pack_rows.test_selected_by_data, test_pack_rows.test_labels_behind_a_slice,
          test_pack_rows_build.test_two_readers_read_the_union, test_row_rules.test_broadcast_operands,
          test_row_rules.test_layout_operators, test_pack_rows.test_counts_share_programs,
          test_pack_rows.test_overlapping_runs_of_programs_that_share_memory)
MASKS = (*test_attention_rows.MASKS, "gaps heads", "right first", "hidden")
SIZES = (2, 2, 40, 8)
OPERATORS = {"MarkRows", "CountRows", "SelectRows", "RowsWithin", "PackRows", "UnpackRows", "RowDropout", "VisibleKeys"}


@contextmanager
def forced() -> Iterator[None]:
    """Graphs of any size are packed, and a module's labels and padding are counted."""
    before = {name: os.environ.get(name) for name in ASKED}
    os.environ.update(dict.fromkeys(ASKED, "1"))
    _C.disable_passes(["+pack_rows"])
    try:
        yield
    finally:
        _C.disable_passes([])
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def names_of(session: _C.Session) -> set[str]:
    """Of probes, too, where all records are kept."""
    return {f"{operator}:{kernel}" for *_, steps in session.timings() for _, operator, kernel, *_ in steps}


def graphs(device: str, place: str) -> set[str]:
    """The tests of the pass: a graph with it and without, both on the device."""
    used: set[str] = set()
    made, session = [], test_pack_rows.session
    test_pack_rows.DEVICE, test_pack_rows.PLACE = device, place
    test_pack_rows.session = lambda *args, **kwargs: made.append(session(*args, **kwargs)) or made[-1]
    try:
        with forced():
            for reduction in ("mean", "sum"):
                test_pack_rows.test_labels(reduction, "float64", 1e-12)
                test_pack_rows.test_labels(reduction, "float32", 4e-6)
            for labelled in (0.0, 0.95):
                test_pack_rows.test_no_label_and_nearly_all_labels(labelled)
            for kind in test_pack_rows.SELECTIONS:
                test_pack_rows.test_selections(kind)
            for graph in GRAPHS:
                graph()
            exact_gradient()
        small_graphs()
        for each in made:
            used |= names_of(each)
    finally:
        test_pack_rows.DEVICE = test_pack_rows.PLACE = "cpu"
        test_pack_rows.session = session
    return used


def exact_gradient() -> None:
    """The gradient of dropout has the bits of PyTorch's rule: its scale is not rounded as forward's is."""
    made = onnx.helper.make_node
    nodes = [made("MatMul", ["x", "w"], ["p"]), made("Add", ["p", "z"], ["a"]),
             made("Dropout", ["a", "ratio", "training"], ["d"]), made("Gather", ["d", "i"], ["y"], axis=1)]
    tensors = {name: value for name, value in test_pack_rows.tensors_of("float32").items() if name in ("x", "w")}
    tensors["z"] = tensors["x"] + 1
    for ratio in (0.15, 0.42, 0.71):  # of which the two scales differ in float32
        constants = test_pack_rows.constants(i=np.array(0), ratio=np.array(ratio, np.float32))
        packed, whole = (test_pack_rows.session(nodes, tensors, constants=constants, rows=rows) for rows in (7, 0))
        got, wanted = (test_pack_rows.run(session, tensors)[1][2] for session in (packed, whole))
        assert packed.stats()["packed_nodes"] and wanted.any()
        assert torch.equal(got, wanted), ratio


def small_graphs() -> None:
    """Unless it is asked for, a selection of a small graph is computed from all rows."""
    nodes, more = test_pack_rows.SELECTIONS["first"]
    tensors = test_pack_rows.tensors_of()
    del tensors["labels"]
    made = test_pack_rows.session([*test_pack_rows.layer(), *nodes], tensors, constants=test_pack_rows.constants(**more))
    test_pack_rows.run(made, tensors)
    assert not made.stats()["packed_nodes"]


def attention(device: str, place: str) -> set[str]:
    """Layers of attention whose masks hide keys: packed on the device, and whole on the CPU."""
    used: set[str] = set()
    for seed, how in enumerate(MASKS):
        torch.manual_seed(seed)
        for dtype in (torch.float64, torch.float32):
            made, y = test_attention_rows.model_of(how, dtype, SIZES)
            data, tensors = made.bytes(y), made.tensors
            wanted = test_attention_rows.step(_C.Session(data), made)
            made.tensors = [t.to(place) for t in tensors]
            with forced():
                session = _C.Session(data, device=device, rows=7)
                got = test_attention_rows.step(session, made)
            assert session.stats()["packed_nodes"], how
            assert "causal" in how or session.stats()["key_rows"] or "first" in how, how
            tolerance = 1e-11 if dtype == torch.float64 else 3e-5
            for a, b in zip(got, wanted, strict=True):
                assert (a is None) == (b is None)
                if b is not None:
                    scale = max(1.0, float(b.abs().max()))
                    torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance * scale,
                                               msg=lambda text, how=how: f"{how}: {text}")
            used |= names_of(session)
    return used


def both_ways(padded: ModuleType, kind: str, model: torch.nn.Module, place: str, half: bool, tolerance: float) -> None:
    """Two steps, with padding behind and in front, over some rows and over all."""
    packed, plain = ORTModule(copy.deepcopy(model)), ORTModule(copy.deepcopy(model))
    for step, left in enumerate((False, True)):
        inputs = [t.to(place) for t in padded.batch(kind, left)]
        found = []
        for wrapped, rows in ((packed, forced), (plain, _all_rows)):
            with rows(), torch.autocast(place.split(":")[0], torch.bfloat16, enabled=half):
                torch.manual_seed(step)
                loss = wrapped(*inputs)
            found.append((loss, padded.gradients(wrapped, loss)))
        (loss, got), (wanted_loss, wanted) = found
        torch.testing.assert_close(loss, wanted_loss, rtol=tolerance, atol=tolerance)
        padded.same(got, wanted, 2 * tolerance)
        stats = padded.totals(packed)
        assert stats["packed_nodes"] > 40 and 42 <= stats["key_rows"] < 60, (kind, half, stats)
    assert not padded.totals(plain)["packed_nodes"]


def modules(device: str, place: str) -> set[str]:
    """Padded batches, dropout on: the same elements are dropped with rows left out. Needs transformers."""
    import padded_models

    _C.set_timing(True, True)
    device_of, _runner.device_of = _runner.device_of, lambda tensors: device
    try:
        for kind, make in padded_models.MODELS.items():
            torch.manual_seed(0)
            model = make().to(place).train()
            if kind != "classes":
                both_ways(padded_models, kind, model, place, True, 1e-2)
            both_ways(padded_models, kind, model.double(), place, False, 1e-10)
        return {name for program in _report._programs for session in program.sessions for name in names_of(session)}
    finally:
        _runner.device_of = device_of
        _C.set_timing(True)


@contextmanager
def _all_rows() -> Iterator[None]:
    _C.disable_passes(["pack_rows"])
    try:
        yield
    finally:
        _C.disable_passes([])


class _Mallinfo2(ctypes.Structure):
    """glibc's."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]


def _allocated(place: str) -> int:
    """Bytes of tensors; on the CPU, of everything."""
    if place != "cpu":
        return torch.cuda.memory_allocated()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return found.uordblks + found.hblkhd


def memory(device: str, place: str) -> None:
    """Programs of other numbers of rows, which the batch decides, keep no memory of their own."""
    tensors = test_pack_rows.tensors_of("float32", 0.1)
    big = {name: value.repeat(800, axis=0) if name in ("x", "labels") else value for name, value in tensors.items()}
    count = big["labels"].size
    test_pack_rows.DEVICE, test_pack_rows.PLACE = device, place
    try:
        with forced():
            made = test_pack_rows.session([*test_pack_rows.layer(), *test_pack_rows.loss()], big,
                                          constants=test_pack_rows.constants(), programs=64)
            kept = []
            for share in (0.1, *(k / 40 for k in range(4, 24))):
                labels = big["labels"].ravel()
                labels[:] = -100
                labels[:int(share * count)] = 1
                test_pack_rows.run(made, big)
                kept.append(_allocated(place))
    finally:
        test_pack_rows.DEVICE = test_pack_rows.PLACE = "cpu"
    stats = made.stats()
    assert stats["programs_built"] > 15, stats
    assert kept[-1] - kept[0] < 3 * stats["slab_bytes"], (kept, stats["slab_bytes"])


def rows(device: str, place: str) -> set[str]:
    _C.set_timing(True, True)
    used = graphs(device, place) | attention(device, place)
    _C.set_timing(True)
    missing = OPERATORS - {name.split(":")[0] for name in used}
    assert not missing, missing
    return used
