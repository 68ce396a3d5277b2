"""Python numbers that are others at each call: inputs of one graph where an operator can take them, and no more than 8
graphs where they are constants; results, gradients and state are eager's at each step.
"""

import copy
import logging

import changing_state
import pytest
import sympy
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import RECENT, X
from changing_state import STATES, difference, steps
from torch.utils._sympy import functions as sizes

import onnxtrain
from onnxtrain._export.numbers import _computed
from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._captured import MAX_CAPTURES
from onnxtrain.ortmodule._numbers import _INSTEAD

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
STEPS = 2 * MAX_CAPTURES
# Torch 2.10 reads these numbers in a trace, and has no line for a length.
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


def compared(forward, arguments=None, tolerance=1e-5):
    torch.manual_seed(0)
    eager = Counting(forward)
    ours = ORTModule(copy.deepcopy(eager))
    for got, want in zip(run(ours._module, ours, arguments), run(eager, eager, arguments), strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2 * tolerance, atol=tolerance)
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


def test_captures_exports_and_programs_are_counted_apart():
    counts = compared(grown)
    assert (counts["captures"], counts["exports"], counts["programs"]) == (MAX_CAPTURES,) * 3
    torch._dynamo.reset()
    counts = compared(named)
    assert counts["captures"] > counts["exports"] == counts["programs"]


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
    (grown, f"len(module.seen) == 7, in {__file__}, line " if RECENT else "len(module.seen) == 7"),
    (looped, f"module.calls == 7, in {__file__}, line " if RECENT else "module.calls == ")])
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


# What decides how many operators or results there are, or their shapes; a list's length; interpolate's scale. After the
# captures that there may be, PyTorch runs them.
CONSTANTS = {"the length of a growing list", "the latest of a growing list", "a list of losses", "a tuple",
             "a string of many", "interpolate's scale", "chunks"}
CUT = {"layers that are dropped", "a branch by random.random()", "a branch by NumPy's", "a layer that NumPy chooses",
       "layers in a drawn order", "a sample", "a generator of the script", "a time", "frozen by requires_grad_()"}  # where Python draws, asks the time, freezes


@pytest.mark.parametrize("name", STATES)
def test_state_that_changes_is_eagers(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    for i, (ours, found) in enumerate(steps(STATES[name], 24)):
        assert not difference(*found), f"step {i}"
        counts = onnxtrain.stats(ours)
    # Beside exports the folder has one file of the machine's measured products, if an earlier test measured some.
    assert counts["exports"] <= MAX_CAPTURES and len(list(tmp_path.glob("*.zip"))) <= MAX_CAPTURES
    if name in CONSTANTS:
        (reason,) = counts["reasons"]
        assert f"in {changing_state.__file__}, line " in reason
    elif name == "all layers dropped":
        assert (counts["engine_steps"], counts["fallback_steps"], counts["reasons"]) == (16, 8, [])
    elif RECENT:
        assert counts["fallback_steps"] == 0, counts["reasons"]
        assert bool(counts["graph_breaks"]) == (name in CUT), counts["graph_breaks"]


@pytest.mark.parametrize("forward", [
    lambda m, x: F.huber_loss(m.fc(x), x, delta=1.0 - 0.2 * m.calls),
    lambda m, x: F.cross_entropy(m.fc(x), torch.tensor([0, 1, 2]), label_smoothing=0.3 * m.calls),
    lambda m, x: F.dropout(m.fc(x), 0.3 * m.calls), lambda m, x: m.fc(x).quantile(0.3 * m.calls)],
    ids=["huber", "label smoothing", "dropout", "quantile"])
def test_a_number_out_of_its_range_raises_torchs_error(forward):
    said = []
    for model in (Counting(forward), ORTModule(Counting(forward))):
        for _ in range(3):
            model(X).sum().backward()
        with pytest.raises((RuntimeError, ValueError)) as raised:
            for _ in range(2):
                model(X)
        said.append((type(raised.value), str(raised.value), model.calls))
    assert said[0] == said[1]


def half_dropped(m, x):
    y = F.dropout(m.fc(x), min(0.5, m.calls * 0.01), m.training)
    return torch.where(y == 0, 0.0, y * (1 - min(0.5, m.calls * 0.01)) - m.fc(x)).round(decimals=1) + m.fc(x)


@pytest.mark.parametrize("forward", [
    lambda m, x: torch.roll(m.fc(x), m.calls, -1), half_dropped,
    lambda m, x: F.cross_entropy(m.fc(x), torch.tensor([0, 1, 2]), label_smoothing=m.scale / 5)],
    ids=["roll", "dropout", "label smoothing"])
def test_numbers_are_inputs_under_autocast(forward):
    def cast(m, x):
        with torch.autocast("cpu"):
            return forward(m, x)

    counts = compared(cast, tolerance=2e-2)
    assert counts["exports"] <= (3 if RECENT else MAX_CAPTURES)
    assert not RECENT or (counts["fallback_steps"], counts["graph_breaks"]) == (0, []), counts["reasons"]


@pytest.mark.parametrize("formula", [
    lambda a, b, f: a + 1, lambda a, b, f: sizes.FloorDiv(a, b), lambda a, b, f: sizes.PythonMod(-a, b),
    lambda a, b, f: sizes.ToFloat(a) * 0.1, lambda a, b, f: sizes.Max(a, b), lambda a, b, f: sympy.Eq(a, b),
    lambda a, b, f: sizes.TruncToFloat(f), lambda a, b, f: sizes.Where(a > b, a, b),
    lambda a, b, f: sizes.FloatPow(f, 2.5)])
def test_a_number_among_results_is_its_formula(formula):
    a, b = sympy.symbols("s0 s1", integer=True)
    f = sympy.Symbol("zf0", real=True)
    made = formula(a, b, f)
    for values in ((7, 3, 1.75), (3, 3, 0.1)):
        assert _computed(made)(dict(zip(("s0", "s1", "zf0"), values))) == made.subs(dict(zip((a, b, f), values)))


EDGES = torch.tensor([[-3.0, -1.0, -0.5, -0.0, 0.0, 0.25], [0.5, 1.0, 3.0, float("nan"), float("inf"), -float("inf")]])
SHARES = torch.tensor([[0.0, 0.1, 0.3], [0.7, 0.9, 1.0]])
OTHER = torch.tensor([[-1.0, -1.0, 0.5, 0.5, 1.0, 0.25]])
SIGNS, CLASSES = torch.tensor([1.0, -1.0]), torch.tensor([1, -100])
_nn = torch._C._nn
FORMS = {
    "elu": (_nn.elu, EDGES, 0.5), "celu": (torch.celu, EDGES, 0.5), "hardtanh": (_nn.hardtanh, EDGES, -0.5, 1.0),
    "softshrink": (_nn.softshrink, EDGES, 0.5), "logit": (torch.logit, SHARES, 0.1),
    "nan_to_num": (torch.nan_to_num, EDGES, 0.5, 7.0, -7.0), "nan alone": (torch.nan_to_num, EDGES, 0.5),
    "decimals": (lambda f, x: f(x, decimals=1), torch.round, EDGES),
    "tens": (lambda f, x: f(100 * x, decimals=-1), torch.round, EDGES),
    "roll": (torch.roll, EDGES, -8, 1), "roll of all": (torch.roll, EDGES, 3),
    "roll of two": (torch.roll, EDGES, (1, -2), (0, 1)),
    **{f"norm {p}": (torch.linalg.vector_norm, EDGES[:1], p, [1]) for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.5)},
    "norm of zeros": (torch.linalg.vector_norm, torch.zeros(2, 3), 1.5, [1], True),
    "dist": (torch.dist, EDGES[:1], OTHER, 2.5),
    "addmm": (lambda f, x: f(x, x, torch.eye(2, dtype=x.dtype), beta=0.5, alpha=2.0), torch.addmm, EDGES[:, :2]),
    "addmm, nothing of it": (lambda f, x: f(EDGES[:, 3:5].to(x.dtype), x, torch.eye(2, dtype=x.dtype), beta=0.0),
                             torch.addmm, EDGES[:, :2]),
    "attention": (lambda f, x: f(x, x, x, scale=0.3), _nn.scaled_dot_product_attention, EDGES[None, :1]),
    "padding": (_nn.pad, EDGES, [1, -2], "constant", 0.5),
    "layer norm": (torch.layer_norm, EDGES[:1], [6], OTHER[0], OTHER[0], 0.1),
    **{f"cross entropy, {reduction}": (
        _nn.cross_entropy_loss, EDGES[:1].repeat(2, 1), CLASSES, None, reduction, -100, 0.2) for reduction in range(3)},
    "cross entropy of shares": (_nn.cross_entropy_loss, EDGES[:1], OTHER.softmax(-1), None, 1, -100, 0.2),
    "weighted cross entropy": (_nn.cross_entropy_loss, EDGES[:1].repeat(2, 1), CLASSES, OTHER[0].abs(), 1, -100, 0.2),
    **{f"huber, {reduction}": (_nn.huber_loss, EDGES[:1], OTHER, reduction, 0.5) for reduction in range(3)},
    "smooth_l1": (_nn.smooth_l1_loss, EDGES[:1], OTHER, 0, 0.5),
    "triplet": (torch.triplet_margin_loss, EDGES[:1], OTHER, -OTHER, 0.5, 2.0, 1e-6, True, 2),
    "ranking": (torch.margin_ranking_loss, EDGES[0, :2], OTHER[0, 2:4], SIGNS, 0.5, 1),
    "hinge": (torch.hinge_embedding_loss, EDGES[0, 4:], SIGNS, 0.2, 0),
    "cosine": (torch.cosine_embedding_loss, EDGES[:1].repeat(2, 1), OTHER.repeat(2, 1), SIGNS, 0.1, 0),
    "quantile": (torch.quantile, EDGES[:1], 0.3, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMS)
def test_a_function_in_operators_that_take_numbers_is_torchs(name, dtype):
    use, *given = FORMS[name]
    plain = given.pop(0) if callable(given[0]) else use
    results = []
    for function in (plain, _INSTEAD[plain].function):
        x, *others = [value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                      for value in given]
        x = x.clone().requires_grad_()
        result = function(x, *others) if use is plain else use(function, x)
        (result * torch.arange(1.0, 1 + result.numel()).view(result.shape)).sum().backward()
        results.append((result.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0], equal_nan=True)


@pytest.mark.parametrize("function, shape", [(torch.dropout, (200, 300)), (torch.feature_dropout, (200, 300, 2))])
def test_dropout_of_a_probability_that_changes(function, shape):
    x = torch.ones(shape, requires_grad=True)
    ours = _INSTEAD[function].function
    result = ours(x, 0.25, True)
    result.sum().backward()
    torch.testing.assert_close(result.unique().detach(), torch.tensor([0.0, 1 / 0.75]))
    assert torch.equal(result, x.grad)
    assert abs((result == 0).float().mean() - 0.25) < 0.02
    assert result.dim() == 2 or torch.equal(result[..., 0], result[..., 1])
    assert torch.equal(ours(x, 0.0, True), x) and torch.equal(ours(x, 0.5, False), x)
    assert not ours(x, 1.0, True).any()
