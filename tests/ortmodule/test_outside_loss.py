"""torch's cross_entropy of the engine's scores: the same loss and gradients as eager's, by the engine where that is
said, and by
torch's own kernels for all else."""

import contextlib
import copy
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._C._dynamo.eval_frame import set_eval_frame

import onnxtrain
from onnxtrain.ortmodule import ORTModule, _outside_loss

ROWS, CLASSES = 96, 4096


class Head(nn.Module):
    def __init__(self, classes=CLASSES):
        super().__init__()
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(x)


@pytest.fixture
def runs(monkeypatch):
    """The sessions' losses that were computed: (dtype of the scores, reduction)."""
    found = []
    apply = _outside_loss._Loss.apply
    monkeypatch.setattr(_outside_loss._Loss, "apply",
                        lambda session, scores, *rest: found.append((scores.dtype, rest[1]))
                        or apply(session, scores, *rest))
    return found


def models(classes=CLASSES):
    torch.manual_seed(0)
    eager = Head(classes)
    ours = ORTModule(copy.deepcopy(eager))
    x = torch.randn(ROWS, 16)
    target = torch.randint(0, classes, (ROWS,))
    ours(x).sum().backward()  # the first large scores put the kernels in their place
    ours.zero_grad()
    return eager, ours, x, target


def step(model, x, loss, autocast=None):
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        value = loss(model(x))
    value.sum().backward()
    return value, [p.grad for p in model.parameters()]


def agree(ours, eager, tolerance):
    (got, got_grads), (want, want_grads) = ours, eager
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)
    for one, other in zip(got_grads, want_grads):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= tolerance * other.abs().max()


IN_ENGINE = {
    "module": lambda y, t: nn.CrossEntropyLoss()(y, t),
    "view": lambda y, t: F.cross_entropy(y.view(2, -1, CLASSES).view(-1, CLASSES), t),
    "sum": lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    "none": lambda y, t: F.cross_entropy(y, t, reduction="none"),
    "ignore_index": lambda y, t: F.cross_entropy(y, t.where(t % 3 != 0, -1), ignore_index=-1),
    "shifted": lambda y, t: F.cross_entropy(y[:-1].reshape(-1, CLASSES), t[1:]),
    "scaled": lambda y, t: 128 * F.cross_entropy(y, t),
    "twice": lambda y, t: F.cross_entropy(y, t) + F.cross_entropy(y, t.flip(0)),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", IN_ENGINE)
def test_runs_in_the_engine(name, autocast, runs):
    eager, ours, x, target = models()
    loss = IN_ENGINE[name]
    results = step(ours, x, lambda y: loss(y, target), autocast)
    assert [dtype for dtype, _ in runs] == [autocast or torch.float32] * (2 if name == "twice" else 1)
    runs.clear()
    agree(results, step(eager, x, lambda y: loss(y, target), autocast),
          {None: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[autocast])
    assert not runs


IN_TORCH = {
    "weight": lambda y, t: F.cross_entropy(y, t, weight=torch.linspace(0.5, 2, CLASSES)),
    "label_smoothing": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "probabilities": lambda y, t: F.cross_entropy(y, F.one_hot(t, CLASSES).float()),
    "a batch of positions": lambda y, t: F.cross_entropy(y.view(2, -1, CLASSES).transpose(1, 2), t.view(2, -1)),
    "computed further": lambda y, t:
                F.cross_entropy(torch.stack([y, y]).sum(0).relu().sigmoid().tanh().exp().neg().abs().sqrt(), t),
    "few": lambda y, t: F.cross_entropy(y[:4], t[:4]),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", IN_TORCH)
def test_runs_in_torch(name, autocast, runs):
    eager, ours, x, target = models()
    loss = IN_TORCH[name]
    agree(step(ours, x, lambda y: loss(y, target), autocast), step(eager, x, lambda y: loss(y, target), autocast),
          1e-5 if autocast is None else 2e-2)
    assert not runs


def test_a_module_of_bfloat16_has_torchs_loss(runs):
    """Outside autocast the loss of 16-bit scores has 16 bits."""
    eager, _, x, target = models()
    eager = eager.bfloat16()
    ours = ORTModule(copy.deepcopy(eager))
    agree(step(ours, x.bfloat16(), lambda y: F.cross_entropy(y, target)),
          step(eager, x.bfloat16(), lambda y: F.cross_entropy(y, target)),
          2e-2)
    assert not runs


def gradient_of_scores(model, x, loss, hold, autocast=None):
    """(the gradients of scores, where they lie, where the scores lay, what `hold` kept of the scores)."""
    gradients, places = [], []

    def forward():
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            scores = model(x)
            scores.register_hook(lambda g: (gradients.append(g.clone()), places.append(g.data_ptr())) and None)
            return loss(scores), hold(scores), scores.data_ptr()

    value, held, place = forward()
    value.backward()
    return gradients, places, place, held


ALONE = {
    "as they are": lambda y, t: F.cross_entropy(y, t),
    "view": lambda y, t: F.cross_entropy(y.view(2, -1, CLASSES).view(-1, CLASSES), t),
    "flatten": lambda y, t: nn.CrossEntropyLoss()(y.unflatten(0, (2, -1)).flatten(0, 1), t),
    "scaled": lambda y, t: 128 * F.cross_entropy(y, t),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_scores_that_nobody_reads_hold_their_gradient(name, autocast, runs):
    _, ours, x, target = models()
    loss = lambda y: ALONE[name](y, target)  # noqa: E731
    (over,), (there,), place, _ = gradient_of_scores(ours, x, loss, lambda y: None, autocast=autocast)
    assert there == place
    (apart,), (there,), place, scores = gradient_of_scores(ours, x, loss, lambda y: y, autocast=autocast)
    assert there != place
    assert over.dtype == apart.dtype and torch.equal(over, apart)
    with torch.no_grad(), torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        assert torch.equal(scores, ours(x))
    assert len(runs) == 2


READERS = {  # what keeps the scores, and what it reads of them afterwards
    "a variable": (lambda y: y, lambda y: y),
    "a list": (lambda y: [y], lambda kept: kept[0]),
    "a view": (lambda y: y.view(-1), lambda kept: kept.view(-1, CLASSES)),
    "detached": (lambda y: y.detach(), lambda kept: kept),
    "data": (lambda y: y.data, lambda kept: kept),
    "a frame": (lambda y: (lambda: y), lambda kept: kept()),
    "its own attribute": (lambda y: setattr(y, "own", y) or weakref.ref(y), lambda kept: kept()),
    "memory": (lambda y: y.untyped_storage(), lambda kept: torch.empty(0).set_(kept).view(-1, CLASSES)),
    "NumPy": (lambda y: y.detach().numpy(), torch.as_tensor),
    "DLPack": (lambda y: torch.from_dlpack(y.detach()), lambda kept: kept),
    "another gradient": (lambda y: y.square(), lambda kept: kept.grad_fn(torch.ones(ROWS, CLASSES)) / 2),
}


@pytest.mark.parametrize("view", [False, True], ids=["as they are", "view"])
@pytest.mark.parametrize("name", READERS)
def test_scores_that_somebody_reads_stay(name, view):
    _, ours, x, target = models()
    hold, read = READERS[name]
    expected = ours(x).detach()
    _, (there,), place, held = gradient_of_scores(
        ours, x, lambda y: F.cross_entropy(y.view(-1, CLASSES) if view else y, target), hold)
    assert there != place
    assert torch.equal(read(held).detach(), expected)


@pytest.mark.parametrize("hold", [lambda y: weakref.ref(y), lambda y: y.detach().share_memory_().is_shared()],
                         ids=["a weak reference", "another process"])
def test_scores_that_somebody_might_read_stay(hold):
    _, ours, x, target = models()
    _, (there,), place, _ = gradient_of_scores(ours, x, lambda y: F.cross_entropy(y, target), hold)
    assert there != place


def test_scores_of_a_retained_graph_stay():
    eager, ours, x, target = models()

    def forward():
        scores = ours(x)
        return F.cross_entropy(scores, target), torch.autograd.graph.get_gradient_edge(scores), scores.data_ptr()

    loss, scores, place = forward()
    found = [torch.autograd.grad(loss, scores, retain_graph=retain)[0] for retain in (True, True, False)]
    leaf = eager(x).detach().requires_grad_()
    F.cross_entropy(leaf, target).backward()
    for gradient in found:
        assert gradient.data_ptr() != place
        assert (gradient - leaf.grad).abs().max() <= 1e-5 * leaf.grad.abs().max()
    loss, scores, place = forward()
    assert torch.autograd.grad(loss, scores)[0].data_ptr() == place


@pytest.mark.parametrize("efficient", ["0", "1"])
@pytest.mark.parametrize("last", [nn.Tanh(), nn.LogSoftmax(1), nn.Softmax(1), nn.ReLU(), nn.Flatten()], ids=repr)
def test_scores_that_the_modules_own_backward_reads(last, efficient, monkeypatch):
    monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", efficient)
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, CLASSES), last)
    ours = ORTModule(copy.deepcopy(eager))
    x, target = torch.randn(ROWS, 16), torch.randint(0, CLASSES, (ROWS,))
    for _ in range(3):
        agree(step(ours, x, lambda y: F.cross_entropy(y, target)),
              step(eager, x, lambda y: F.cross_entropy(y, target)), 1e-5)
        ours.zero_grad()
        eager.zero_grad()


def test_scores_that_hooks_pack_stay():
    eager, ours, x, target = models()
    kept = {}

    def pack(tensor):
        kept[len(kept)] = tensor
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        loss = F.cross_entropy(ours(x), target)
    loss.backward()
    assert any(torch.equal(tensor, ours(x)) for tensor in kept.values())
    kept.clear()
    loss = F.cross_entropy(ours(x), target)
    loss.grad_fn._raw_saved_tensors[0].register_hooks(pack, kept.__getitem__)
    loss.backward()
    assert torch.equal(kept[0], ours(x))


def test_two_losses_of_the_same_scores():
    """The first of their backwards leaves the scores for the second."""
    eager, ours, x, target = models()
    for loss in (lambda y: F.cross_entropy(y, target) + F.cross_entropy(y, target.flip(0), reduction="sum"),
                 lambda y: F.cross_entropy(y, target) + y.square().mean(),
                 lambda y: y.logsumexp(1).mean() + F.cross_entropy(y.view(-1, CLASSES), target)):
        agree(step(ours, x, loss), step(eager, x, loss), 1e-5)
        ours.zero_grad()
        eager.zero_grad()


def test_scores_that_are_lost_are_not_read_again():
    """Where backward fails when it may have begun to write, a second one says so."""
    _, ours, x, target = models()
    loss = F.cross_entropy(ours(x), target)
    node = loss.grad_fn
    run = node.run

    class Failing:
        saved_inputs = run.saved_inputs

        def backward(self, saved, grads, spent):
            assert spent == (0,)
            raise MemoryError("no memory")

    node.run = Failing()
    with pytest.raises(MemoryError, match="no memory"):
        loss.backward(retain_graph=False)
    with pytest.raises(RuntimeError, match="has overwritten the scores|second time"):
        loss.backward()


def test_without_torchs_counters(monkeypatch):
    """A torch that does not count: gradients lie apart, as they did."""
    saved = _outside_loss._saved
    monkeypatch.setattr(_outside_loss, "_saved", lambda ctx: (*saved(ctx)[:2], (1,)))
    _outside_loss._references_alone.cache_clear()
    try:
        _, ours, x, target = models()
        _, (there,), place, _ = gradient_of_scores(ours, x, lambda y: F.cross_entropy(y, target), lambda y: None)
        assert there != place
    finally:
        _outside_loss._references_alone.cache_clear()


def test_counters_under_another_default_dtype():
    """References are counted with float32, whatever the default dtype is when the first loss is computed."""
    before = torch.get_default_dtype()
    _outside_loss._references_alone.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert _outside_loss._references_alone(False) is not None and _outside_loss._references_alone(True) is not None
    finally:
        torch.set_default_dtype(before)
        _outside_loss._references_alone.cache_clear()


@contextlib.contextmanager
def frame_evaluation():
    """Dynamo's frame evaluation stays installed, as while another thread runs a compiled function."""
    begun, over = threading.Event(), threading.Event()

    def run():
        set_eval_frame(False)
        begun.set()
        over.wait()
        set_eval_frame(None)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("counted", [False, True], ids=["counted before", "counted under it"])
def test_frame_evaluation_changes_no_counts(counted):
    """It changes how often CPython refers to the arguments of a Python function."""
    _outside_loss._references_alone.cache_clear()
    with frame_evaluation() if counted else contextlib.nullcontext():
        assert _outside_loss._references_alone(False) is not None and _outside_loss._references_alone(True) is not None
    _, ours, x, target = models()
    expected = ours(x).detach()
    loss = lambda y: F.cross_entropy(y, target)  # noqa: E731
    with contextlib.nullcontext() if counted else frame_evaluation():
        _, (there,), place, _ = gradient_of_scores(ours, x, loss, lambda y: None)
        assert there == place
        _, (there,), place, scores = gradient_of_scores(ours, x, loss, lambda y: y)
    assert there != place and torch.equal(scores, expected)


def test_torchs_own_errors():
    _, ours, x, target = models()
    with pytest.raises(IndexError, match="Target 4096 is out of bounds"):
        F.cross_entropy(ours(x), target.clone().fill_(CLASSES))
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(ours(x), target[1:])


def test_gradients_of_the_scores_again_and_further(runs):
    """retain_graph and create_graph between loss and scores, as torch's own loss has them."""
    eager, ours, x, target = models()
    found = []
    for model in (ours, eager):
        scores = model(x)
        loss = F.cross_entropy(scores, target)
        first = torch.autograd.grad(loss, scores, retain_graph=True)[0]
        second = torch.autograd.grad(loss, scores, retain_graph=True)[0]
        third = torch.autograd.grad(loss, scores, create_graph=True)[0]
        curvature = torch.autograd.grad(third.square().sum(), scores)[0]
        found.append((first, second, third, curvature))
    assert len(runs) == 1
    for got, want in zip(*found):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_evaluation_and_changed_scores(runs):
    eager, ours, x, target = models()
    with torch.no_grad():
        assert torch.allclose(F.cross_entropy(ours(x), target), F.cross_entropy(eager(x), target))
    assert not runs
    scores = ours(x)
    loss = F.cross_entropy(scores, target)
    with torch.no_grad():
        scores.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_and_exported_losses_are_torchs(runs):
    eager, ours, x, target = models()
    compiled = torch.compile(lambda y: F.cross_entropy(y, target), backend="aot_eager")
    agree(step(ours, x, compiled), step(eager, x, lambda y: F.cross_entropy(y, target)), 1e-5)
    program = torch.export.export(nn.CrossEntropyLoss(), (eager(x).detach(), target))
    assert any("cross_entropy" in str(node.target) for node in program.graph.nodes)
    per_row = torch.func.vmap(torch.func.grad(lambda y, t: F.cross_entropy(y, t)), in_dims=(0, 0))
    assert per_row(eager(x).detach(), target).shape == (ROWS, CLASSES)
    assert not runs


def test_scores_that_are_freed(runs, monkeypatch):
    """No block of the core outlives loss and scores."""
    monkeypatch.setenv("ONNXTRAIN_DISABLE", "unread")  # the graph with the loss has blocks of its own
    _, ours, x, target = models()

    def once():
        step(ours, x, lambda y: F.cross_entropy(y, target))
        ours.zero_grad()

    once()
    before = onnxtrain._C.live_blocks()
    for _ in range(3):
        once()
        F.cross_entropy(ours(x), target)  # never differentiated
    assert onnxtrain._C.live_blocks() <= before
    assert len(runs) == 7


def test_it_can_be_left_out():
    code = """if True:
        import torch
        from onnxtrain.ortmodule import ORTModule, _outside_loss
        model = ORTModule(torch.nn.Linear(16, 4096))
        loss = torch.nn.functional.cross_entropy(model(torch.randn(96, 16)), torch.zeros(96, dtype=torch.long))
        loss.backward()
        print(_outside_loss._library is None, type(loss.grad_fn).__name__)
    """
    for disabled, expected in (("cse,outside_loss", "True NllLossBackward0"), ("", "False _LossBackward")):
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "ONNXTRAIN_DISABLE": disabled},
                              capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
