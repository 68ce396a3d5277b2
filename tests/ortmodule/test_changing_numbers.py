"""Python numbers that are others at each call: inputs of one graph where an operator can take them, and no more than 8
graphs where they are constants; results, gradients and state are eager's at each step.
"""

import copy
import logging

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import X

import onnxtrain
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._captured import MAX_CAPTURES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
STEPS = 2 * MAX_CAPTURES
RECENT = torch.__version__ >= (2, 11)  # an older torch reads these numbers in a trace, and has no line for a length
CONSTANTS_BEFORE = ("an exponent", "a power of a float")


class Counting(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.fc, self.calls, self.scale, self.use = nn.Linear(4, 4), 0, 1.0, forward
        self.counts, self.seen, self.held = {"calls": 0}, [], nn.Module()
        self.held.calls = 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, *numbers):
        self.calls += 1
        self.scale *= 0.97
        return self.use(self, x, *numbers)


def nested(m, x):
    m.held.calls += 2
    return m.fc(x) / m.held.calls


def entry(m, x):
    m.counts["calls"] += 1
    return m.fc(x) + m.counts["calls"]


def averaged(m, x):
    m.mean.mul_(1 - 1 / m.calls).add_(x.detach().mean(0), alpha=1 / m.calls)
    return m.fc(x) - m.mean


def annealed(m, x):
    share = min(1.0, m.calls / 10)
    return m.fc(x) * share + x * (1 - share)


def corrected(m, x):
    return m.fc(x) / (1 - 0.9 ** m.calls)


INPUTS = {
    "a counter that nothing reads": lambda m, x: m.fc(x),
    "a whole number": lambda m, x: m.fc(x) * m.calls,
    "a whole number of whole ones": lambda m, x: m.fc(x) + (x.long() * m.calls + m.calls // 3),
    "its quotient": lambda m, x: m.fc(x) * (1.0 / m.calls),
    "its remainder": lambda m, x: m.fc(x) + m.calls % 5 - 2 * (m.calls // 2),
    "a float": lambda m, x: m.fc(x) * m.scale,
    "a float and a whole number": lambda m, x: m.fc(x) * (m.scale + m.calls * 0.5),
    "a bound": lambda m, x: m.fc(x).clamp(-m.scale, m.scale / 2),
    "an exponent": lambda m, x: m.fc(x).abs().add(0.1).pow(1 + m.calls * 0.01),
    "a power of a float": lambda m, x: m.fc(x) * m.scale ** 2,
    "a filled tensor": lambda m, x: m.fc(x) + torch.full((4,), float(m.calls)),
    "filled alike": lambda m, x: m.fc(x) * torch.full_like(x, m.scale) + torch.zeros_like(x).fill_(m.calls),
    "a comparison": lambda m, x: torch.where(x > m.scale - 0.7, m.fc(x) * m.calls, x),
    "a mask": lambda m, x: m.fc(x).masked_fill(x > 0, m.scale),
    "an interpolation": lambda m, x: torch.lerp(m.fc(x), x, m.scale),
    "alpha": lambda m, x: torch.add(m.fc(x), x, alpha=m.scale),
    "a negative slope": lambda m, x: F.leaky_relu(m.fc(x), m.scale / 10),
    "of a tensor": lambda m, x: m.fc(x) + torch.tensor(m.scale) * 2,
    "a submodule's": nested,
    "a dict's": entry,
    "an average": averaged,
    "annealed": annealed,
    "a correction of bias": corrected,
}
ARGUMENTS = {
    "a whole number": (lambda m, x, n: m.fc(x) * n, range(1, STEPS + 1)),
    "a float": (lambda m, x, t: m.fc(x) * torch.sigmoid(x * t) + t, [0.1 * i for i in range(1, STEPS + 1)]),
    "an embedding of time": (lambda m, x, n: m.fc(x) + torch.sin(torch.arange(4) * n / 10), range(3, STEPS + 3)),
}


def run(module, model, arguments=None):
    results = []
    for i in range(STEPS):
        module.zero_grad()
        x = (X + 0.1 * i).requires_grad_()
        out = model(x, *([] if arguments is None else [arguments[i]]))
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad.clone() for p in module.parameters()), module.mean.clone(),
                        torch.tensor([module.calls, module.scale, module.counts["calls"], module.held.calls])])
    return results


def compared(forward, arguments=None):
    torch.manual_seed(0)
    eager = Counting(forward)
    ours = ORTModule(copy.deepcopy(eager))
    for got, want in zip(run(ours._module, ours, arguments), run(eager, eager, arguments), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5)
    return onnxtrain.stats(ours)


@pytest.mark.parametrize("name", INPUTS)
def test_a_number_that_changes_is_an_input(name):
    counts = compared(INPUTS[name])
    if not RECENT and name in CONSTANTS_BEFORE:
        assert counts["exports"] <= MAX_CAPTURES + 1 and f"in {__file__}, line " in counts["reasons"][0]
        return
    assert (counts["engine_steps"], counts["fallback_steps"]) == (STEPS, 0), counts["reasons"]
    assert counts["exports"] <= 3


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_changes_is_an_input(name):
    counts = compared(*ARGUMENTS[name])
    assert (counts["engine_steps"], counts["fallback_steps"]) == (STEPS, 0), counts["reasons"]
    assert counts["exports"] <= 3


def grown(m, x):
    m.seen.append(0.5)
    return m.fc(x) + len(m.seen)


def looped(m, x):
    for _ in range(m.calls):
        x = x + 0.1
    return m.fc(x)


def named(m, x):
    m.name = f"step {m.calls % 3}"
    return m.fc(x) * (2 if m.name == "step 1" else 1)


def chosen(m, x):
    return m.fc(x) * {1: 2.0, 2: 3.0}.get(m.calls, 4.0) if m.calls < STEPS else m.fc(x)


@pytest.mark.parametrize("forward, what", [
    (grown, f"len(module.seen) == 7, in {__file__}, line " if RECENT else "len(module.seen) == 7"), (looped, "module.calls == ")])
def test_pytorch_runs_what_is_captured_too_often(forward, what, caplog):
    with caplog.at_level(logging.WARNING):
        counts = compared(forward)
    assert counts["fallback_steps"] >= STEPS - MAX_CAPTURES and counts["exports"] <= MAX_CAPTURES + 1
    said = [record.getMessage() for record in caplog.records if "runs in PyTorch" in record.getMessage()]
    assert len(said) == 1 and what in said[0]


@pytest.mark.parametrize("forward", [named, chosen])
def test_what_python_decides_is_eagers(forward):
    counts = compared(forward)
    assert counts["exports"] <= MAX_CAPTURES + 1
