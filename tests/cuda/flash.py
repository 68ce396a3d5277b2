"""Attention on a device: the graphs of tests/graph/test_fuse_attention.py, and of three files that compare by it, there,
and on tensor cores against float64.

    python tests/cuda/flash.py PLUGIN DEVICE [part/parts]

Every comparison of those files' cases is between the nodes one by one on the CPU and FusedAttention on the device.
Prints what checks.py says.
"""

from __future__ import annotations

import ctypes
import os
import sys

import pytest
import test_fuse_attention as graphs
import test_fused_attention as node
import torch
from checks import Report, every_nth, in_part

from onnxtrain import _C

PLUGIN, DEVICE = "", "cpu"
REPORT = Report()
# Of the CPU's kernels, or of when the CPU does not fuse; the last ones are long, and here with fewer columns.
LEFT_OUT = ("test_kernels_agree", "test_narrow_floats[7", "test_narrow_floats[2048", "test_memory_does_not",
            "test_few_heads_are_split", "test_many_blocks", "test_against_torch", "[300-",
            "test_long_causal_rows_of_narrow_floats_are_one_node[255",
            "test_long_causal_rows_of_narrow_floats_are_one_node[511")
disable_passes, disabled = _C.disable_passes, []


def remember(names: list[str]) -> None:
    disabled[:] = names
    disable_passes(names)


def step(model: bytes, tensors: list, wants: list, seed: int = 11) -> tuple[list, list, str]:
    """As the file's own, on the device unless attention is taken apart."""
    device = "cpu" if "fuse_attention" in disabled else DEVICE
    session = _C.Session(model, 16, device)
    place = device if device.startswith("cuda") else "cpu"
    given = [t.to(place) for t in tensors]
    outputs, run = session.forward(given, bytes(wants), seed)
    grads: list = []
    if run is not None:
        saved = [given[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
        torch.manual_seed(5)
        grads = list(run.backward(saved, [torch.randn(y.shape, dtype=torch.float64).to(y.dtype).to(place)
                                          for y in outputs]))
    if device == DEVICE:
        REPORT.ran.update(f"{op}:{kernel}" for _, op, kernel, *_ in session.timeline())
    return [y.cpu() for y in outputs], [None if g is None else g.cpu() for g in grads], session.text("program")


class Results:
    """What pytest found, into the report; every eighth case that asks for all subsets has them."""

    def __init__(self, part: str) -> None:
        self.n, self.part = 0, part

    def pytest_collection_modifyitems(self, items: list) -> None:
        items[:] = [item for item in items if not any(part in item.name for part in LEFT_OUT)
                    and in_part(item.name, self.part)]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        REPORT.begin(item.name)
        self.n += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            REPORT.passes(report.nodeid)
        if report.failed:
            REPORT.fails(report.nodeid, str(report.longrepr)[-1500:])


def cases_of_the_graph(part: str) -> None:
    results = Results(part)
    compare = graphs.compare

    def fewer(*arguments, every_subset: bool = True, **options):
        return compare(*arguments, every_subset=every_subset and results.n % 8 == 0, **options)

    for module in (graphs, node):
        module.step, module.compare = step, fewer
    _C.disable_passes = remember
    import test_causal_mask  # these take compare() from there, as it is now
    import test_move_transpose
    import test_strides

    files = [module.__file__ for module in (graphs, node, test_causal_mask, test_move_transpose, test_strides)]
    status = pytest.main(["-q", "-s", "-p", "no:cacheprovider", "--no-header", "-o", "addopts=", *files],
                         plugins=[results])
    assert status in (0, 1, pytest.ExitCode.NO_TESTS_COLLECTED), status  # none: a part may have no case


# rows, columns, queries' heads, keys' heads, size, size of V, what else
TENSOR_CORES = [
    *[(dtype, 40, 40, 2, 2, size, size, "causal") for dtype in (torch.float16, torch.bfloat16) for size in (64, 128)],
    (torch.float16, 70, 131, 2, 2, 64, 64, "mask"),
    (torch.bfloat16, 140, 72, 1, 1, 64, 64, "where drop"),
    (torch.float16, 33, 75, 2, 2, 80, 96, "drop"),
    (torch.bfloat16, 20, 68, 4, 2, 128, 128, "causal drop"),
    (torch.float16, 17, 9, 4, 1, 8, 24, "mask drop"),
    (torch.bfloat16, 70, 90, 2, 2, 64, 64, "causal minus"),  # the largest score is of the smallest product
]


def tensor_cores(dtype: torch.dtype, rows: int, columns: int, heads: int, kv: int, size: int, v_size: int,
                 what: str) -> list:
    """Numbers of the device's 16-bit kernels, beside those of float64 on the CPU from the same 16-bit operands. Returns
    the device's results and gradients.
    """
    torch.manual_seed(0)
    results = []
    operands = [torch.randn(2, h, n, d).to(dtype) for h, n, d in ((heads, rows, size), (kv, columns, size),
                                                                  (kv, columns, v_size))]
    mask, hidden = torch.randn(heads, rows, columns).to(dtype), torch.rand(2, 1, rows, columns) < 0.3
    for wide in (False, True):
        m = graphs.Model(torch.float64 if wide else dtype)
        q, k, v = (m.input(t) for t in operands)
        if kv != heads:
            k, v = (m("Reshape", m("Expand", m("Unsqueeze", t, m.ints(2)), m.ints(2, kv, heads // kv, columns, d)),
                      m.ints(2, heads, columns, d))
                    for t, d in ((k, size), (v, v_size)))
        factor = m.constant(-(size**-0.5) if "minus" in what else size**-0.5, torch.float64 if wide else torch.float32)
        s = m("MatMul", q, m("Transpose", k, perm=[0, 1, 3, 2]))
        s = m("Mul", s, factor if wide else m("Cast", factor, to=graphs.TYPES[dtype]))
        if "causal" in what:
            seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            s = m("Where", m.constant(seen, torch.bool), s,
                  m("Cast", m.constant(float("-inf"), torch.float32), to=graphs.TYPES[m.dtype]))
        if "mask" in what:
            s = m("Add", s, m.input(mask))
        if "where" in what:
            s = m("Where", m.input(hidden), m("Cast", m.constant(-3.0, torch.float32), to=graphs.TYPES[m.dtype]), s)
        p = m("Softmax", s, axis=-1)
        if "drop" in what:
            p = m("Dropout", p, m.constant(0.3, torch.float32), m.constant(True, torch.bool))
        y = m("Transpose", m("MatMul", p, v), perm=[0, 2, 1, 3])
        disabled[:] = ["fuse_attention"] if wide else []  # the CPU's nodes one by one
        results.append(step(m.bytes(y), m.tensors, [t.is_floating_point() for t in m.tensors]))
    (ours, grads, text), (outputs, want, _) = results
    assert "FusedAttentionGrad " in text, text
    for name, got, expected in zip(("y", "dq", "dk", "dv", "dmask"), [*ours, *grads], [*outputs, *want], strict=False):
        if expected is None:
            continue
        error = (got.double() - expected).abs().max().item() / max(1.0, expected.abs().max().item())
        assert error < (6e-3 if dtype == torch.float16 else 4e-2), f"{name}: {error:.2e}"
    return [*ours, *grads]


def launches(part: str) -> int:
    """Of kernels with this name; on a GPU nobody counts."""
    return 0 if DEVICE.startswith("cuda") else ctypes.CDLL(PLUGIN).ont_emulate_launches(part.encode())


def main(plugin: str, device: str, part: str = "0/1") -> None:
    global PLUGIN, DEVICE
    PLUGIN, DEVICE = plugin, device
    _C.open_plugin(plugin or None)
    _C.set_timing(True)
    _C.disable_kernels(["cuda_attention_dnn", "cuda_attention_grad_dnn"])  # tests/cuda/sdpa.py has those
    for case in every_nth(TENSOR_CORES, part):
        REPORT.begin(str(case))
        before = launches("flash_mma")
        try:
            tensor_cores(*case)
            assert DEVICE.startswith("cuda") or launches("flash_mma") == before + 3, "not on tensor cores"
            REPORT.passes(str(case))
        except Exception as error:  # noqa: BLE001 - reported
            REPORT.raised(str(case), error)
    os.environ.setdefault("ONNXTRAIN_TEST_SEED", "1")
    cases_of_the_graph(part)
    print()
    REPORT.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
