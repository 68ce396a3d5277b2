"""Every operator case of tests/ops on a device against the CPU; run as a script, so that it can be run under a
sanitizer.

    python tests/cuda/cases.py PLUGIN DEVICE [part/parts]

PLUGIN "" is the CUDA one beside the extension.

Operators that the device has no kernel for are tried as well, until one of their cases passes: many are built from
others. Those of OWN_PARTS have all of their cases.

Prints what checks.py says, and `built`: per operator without a kernel whether a case passed. A case is refused where
the device lacks an operator: by name, which is checked.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import harness
import numpy as np
import torch
from checks import Report, in_part
from harness import Case, assert_close, call, model_of

from onnxtrain import _C

OPS = Path(__file__).resolve().parents[1] / "ops"
FLOATS = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 5e-5, torch.float64: 1e-10}


def all_cases() -> list[Case]:
    """Cases that stand in the modules of tests/ops, in lists and tuples; but for those whose sizes are chosen for many
    threads, whose sums are longer than the tolerances are for.
    """
    found: dict[str, Case] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules([str(OPS)]) if m.name != "thread_cases"):
        names = vars(importlib.import_module(module)).values()
        for value in names:
            for case in value if isinstance(value, (list, tuple)) else ():
                if isinstance(case, Case):
                    found.setdefault(f"{module}:{case}", case)
    return list(found.values())


def results(case: Case, arrays: list, device: str) -> tuple[list, list, set[str]]:
    """Outputs, gradients and the kernels used."""
    session = _C.Session(model_of(case, arrays), 16, device)
    run = harness._run_inputs(case, arrays)
    inputs = harness._grad_inputs(case, arrays)
    place = device if device.startswith("cuda") else "cpu"
    tensors = [harness._tensor(arrays[i]).to(place) for i in run]
    mask = bytes(i in inputs for i in run)
    outputs, _ = call(session, tensors, bytes(len(run)), None, seed=5)
    used = kernels(session)
    grads: tuple = ()
    if any(mask):
        given = [None if g is None else g.to(place) for g in harness._output_grads(case, [o.cpu() for o in outputs])]
        outputs, grads = call(session, tensors, mask, given, seed=5)
        used |= kernels(session)
    outputs, grads = ([None if t is None else t.cpu() for t in ts] for ts in (outputs, grads))
    return outputs, grads, used


def kernels(session: _C.Session) -> set[str]:
    """Of the program that ran last, as "Op:kernel"."""
    return {f"{operator}:{kernel}" for _, operator, kernel, *_ in session.timeline()}


def compare(case: Case, arrays: list, device: str) -> set[str]:
    want_outputs, want_grads, _ = results(case, arrays, "cpu")
    got_outputs, got_grads, used = results(case, arrays, device)
    for kind, want, got in (("output", want_outputs, got_outputs), ("gradient", want_grads, got_grads)):
        assert len(want) == len(got)
        for k, (w, g) in enumerate(zip(want, got)):
            assert (w is None) == (g is None), f"{kind} {k} is there on one side only"
            if w is not None:
                tol = max(FLOATS.get(w.dtype, 0), (case.tol or 0) if w.dtype == torch.float32 else 0)
                assert_close(g.float().numpy() if g.dtype == torch.bfloat16 else g.numpy(),
                             w.float().numpy() if w.dtype == torch.bfloat16 else w.numpy(), f"{case} {kind} {k}", tol)
    return used


TRIALS = 12  # of one operator
# Built from parts that have kernels for nothing else: all of their cases run.
OWN_PARTS = {"DeformConv", "NonMaxSuppression", "Unique"}


def built(case: Case, device: str, report: Report) -> bool:
    """Whether the device runs a case of an operator that it has no kernel for, by kernels of others: what is folded
    away needs none. A difference is a failure.
    """
    try:
        used = compare(case, harness._arrays(case, case.dtypes[0]), device)
        report.ran |= used
        return bool(used)
    except _C.UnsupportedError:
        return False
    except Exception as error:  # noqa: BLE001 - reported
        report.raised(f"{case}, built from others", error)
        return False


def main(plugin: str, device: str, part: str = "0/1") -> None:
    _C.open_plugin(plugin or None)
    _C.set_timing(True)  # what timeline() is about
    names = {name for _, name, _ in _C.device_operators(device)}
    report = Report()
    composed: dict[str, bool] = {}
    tried: dict[str, int] = {}
    for case in all_cases():
        if case.op_type not in names | OWN_PARTS:
            tried[case.op_type] = tried.get(case.op_type, 0) + 1
            if in_part(case.op_type, part) and not composed.get(case.op_type) and tried[case.op_type] <= TRIALS:
                composed[case.op_type] = built(case, device, report)
            continue
        if not in_part(str(case), part):
            continue
        for dtype in case.dtypes if any(isinstance(i, harness.R) and i.is_float
                                        for i in case.inputs) else case.dtypes[:1]:
            what = f"{case} {np.dtype(dtype)}"
            report.begin(what)
            try:
                report.passes(what, compare(case, harness._arrays(case, dtype), device))
            except _C.UnsupportedError as error:
                if "of device" in str(error):
                    report.refuses(what, str(error))
                else:
                    report.fails(what, f"refused without a name: {error}")
            except Exception as error:  # noqa: BLE001 - reported
                report.raised(what, error)
    report.finish(built=composed)


if __name__ == "__main__":
    main(*sys.argv[1:])
