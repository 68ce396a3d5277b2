"""An updater takes the same steps with every instruction set, once for all groups, and refuses misuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_step import ALL

from onnxtrain import _C
from onnxtrain.optim import FusedAdam

STEPS = """
import sys
import torch
from onnxtrain import _C
from onnxtrain.optim import SGD, Adagrad, FusedAdam, Lamb, Lion
from problem import make_params, Problem
made = {}
shapes = [(1,), (7,), (16, 33), (5000,)]
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for name, make in {
        "adam": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1, max_grad_norm=1.0),
        "amsgrad": lambda p: FusedAdam(p, amsgrad=True),
        "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        "adagrad": lambda p: Adagrad(p, weight_decay=0.1),
        "lamb": lambda p: Lamb(p, weight_decay=0.1), "lion": lambda p: Lion(p, lr=2.0**-7, betas=(0.75, 0.875)),
        "int8": lambda p: FusedAdam(p, state_dtype="int8"),
        "random": lambda p: SGD(p, lr=0.01, stochastic_rounding=True),
        "master": lambda p: FusedAdam(p, lr=0.01, master_weights=True)}.items():
        torch.manual_seed(0)
        params = make_params(dtype=dtype, shapes=shapes)
        optimizer, problem = make(params), Problem(params)
        for _ in range(3):
            problem.set_grads()
            optimizer.step()
        made[name, dtype] = [p.detach() for p in params]
torch.save({"isa": _C.build_info()["isa"], "made": made}, sys.argv[1])
"""


def take_steps(isa: str, out: Path) -> dict:
    subprocess.run([sys.executable, "-c", STEPS, str(out)], check=True, timeout=300,
                   env={**os.environ, "ONNXTRAIN_ISA": isa})
    return torch.load(out)


def test_same_steps(tmp_path):
    """What the processor does not have answers as the best that it has, and is compared under that name."""
    results = {}
    for asked in ("plain", "avx2", "avx512"):
        result = take_steps(asked, tmp_path / asked)
        results[result["isa"]] = result["made"]
    assert "plain" in results and _C.build_info()["isa"] in results
    plain = results.pop("plain")
    for isa, made in results.items():
        for (name, dtype), params in made.items():
            tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
            tolerance = max(tolerance, 2e-3) if name == "int8" and dtype != torch.float64 else tolerance
            for a, b in zip(params, plain[name, dtype]):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance,
                                           msg=lambda m: f"{isa} {name} {dtype} {tuple(a.shape)}: {m}")


@pytest.mark.parametrize("kind", ALL)
def test_one_call_of_the_core_for_all_groups(kind):
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    params = [torch.nn.Parameter(torch.ones(i % 9 + 1, dtype=dtypes[i % 4])) for i in range(400)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = ALL[kind]([{"params": params[i::5], "lr": 0.1 * (i + 1)} for i in range(5)])
    updater, calls = optimizer._updater, []

    class Counted:
        def step(self, *args):
            calls.append(args)
            return updater.step(*args)

    optimizer._updater = Counted()
    for steps in (1, 2):
        optimizer.step()
        assert len(calls) == steps
    assert all((p < 1).all() for p in params)


def test_step_inside_a_step_is_refused():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = FusedAdam([p])
    prepare = optimizer._prepare

    def again(*args):
        optimizer._run(-1.0, 1.0)
        return prepare(*args)

    optimizer._prepare = again
    with pytest.raises(RuntimeError, match="already running"):
        optimizer.step()


@pytest.mark.parametrize("use", [lambda u: u.step([], [], {}, None, (-1.0, 0.0, 0), 1.0, 0),
                                 lambda u: u.backward(None, [], [], [], [], {}, None, 0, [], bytearray())])
def test_updater_that_was_never_initialised(use):
    broken = _C.Updater.__new__(_C.Updater)
    with pytest.raises(ValueError, match="no update rule 'nonsense'"):
        broken.__init__("nonsense", "Nonsense")
    for updater in (_C.Updater.__new__(_C.Updater), broken):
        with pytest.raises(RuntimeError, match="never initialised"):
            use(updater)
    with pytest.raises(RuntimeError, match="already called"):
        broken.__init__("sgd", "SGD")
