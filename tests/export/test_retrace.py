"""What torch.onnx need not trace a second time: the numbers are the same,
and whatever is not plain goes the long way.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain import _torch
from onnxtrain._export import retrace
from onnxtrain.ortmodule import ORTModule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.words = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens, targets):
        x = self.words(tokens)
        q, k, v = (t.view(*t.shape[:2], 4, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).split(16, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = F.dropout(F.gelu(x), 0.1, self.training) * 2 + tokens.unsqueeze(-1)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.count


class Branching(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


class InPlace(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[0] = 1.0
        return y.mul_(x)


class NoGrad(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x.exp()
        return x * y


TOKENS = torch.randint(0, 11, (3, 5))
X = torch.randn(3, 4)
CASES = {  # (module, arguments, decompositions are left out, so is promotion)
    "block": (Block, (TOKENS, TOKENS), True, False),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)),
                     (torch.randn(3, 3, 8, 8),), True, True),
    "normalized, changed in place": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8),
                                                           nn.Hardswish(inplace=True)),
                                     (torch.randn(3, 3, 8, 8),), True, None),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (torch.randn(3, 5, 16),), None,
                      None),
    "integers and floats": (lambda: type("Mixed", (nn.Module,),
                                         {"forward": lambda self, x, n: (x / 2 + n) * (n > 3)})(),
                            (X, torch.arange(4)), True, False),
    "mutated buffer": (Counting, (X,), True, None),
    "branch": (Branching, (X,), False, None),
    "in place": (InPlace, (X,), True, None),
    "no grad": (NoGrad, (X,), False, None),
    "double": (lambda: nn.Linear(4, 4).double(), (X.double(),), True, True),
}


def steps(make, batches):
    """Loss and every gradient of a step with each batch, in one module; and what explain() says."""
    torch.manual_seed(0)
    model = ORTModule(make())
    found = []
    for args in batches:
        args = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
        torch.manual_seed(1)
        y = model(*args)
        y.sum().backward()
        found += [y.detach(), *(a.grad for a in args), *(p.grad for p in model.parameters())]
        model.zero_grad()
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 0 and counts["exports"] == 1, counts["reasons"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_the_same(name, monkeypatch):
    make, args, final, promoted = CASES[name]
    batches = [args, [a[:2] for a in args]] if name not in ("integers and floats",) else [args]
    seen = {}
    for question in ("is_final", "unpromoted"):
        asked = getattr(retrace, question)
        monkeypatch.setattr(retrace, question, lambda *a, q=question, f=asked: seen.setdefault(q, f(*a)))
    spared = steps(make, batches)
    for question, expected in (("is_final", final), ("unpromoted", promoted)):
        assert expected is None or (not seen[question] if question == "unpromoted" else seen[question]) is expected
    monkeypatch.undo()
    if _torch.OpTraceDispatchMode is None:
        monkeypatch.setattr(retrace, "translated", lambda program, opset, ours: torch.onnx.export(
            program, opset_version=opset, optimize=False, verbose=False, custom_translation_table=ours))
    else:  # torch 2.10 cannot choose between two translations, nor promote by itself
        monkeypatch.setattr(retrace, "is_final", lambda *_: False)
    for a, b in zip(spared, steps(make, batches), strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_autocast_goes_the_long_way(monkeypatch):
    asked, seen = retrace.is_final, []
    monkeypatch.setattr(retrace, "is_final", lambda *a: seen.append(asked(*a)) or seen[-1])
    for on in (True, False):
        model = ORTModule(nn.Linear(4, 4))
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            assert model(X).dtype is (torch.bfloat16 if on else torch.float32)
    assert seen == [False, True]


class Shapes(nn.Module):
    """Every way to reshape that is not traced again."""

    def forward(self, x):
        y = x.transpose(1, 2).reshape(x.shape[0], 15, 2)
        flat = x.flatten().sum() + y.flatten(1).square().sum() + x.flatten(0, 1).exp().sum()
        return flat + (x.transpose(0, 1).contiguous() * 2).sum()


@pytest.mark.parametrize("rows", [4, 1, 0])
def test_reshapes_of_any_size(rows):
    model = ORTModule(Shapes())
    for size in (3, rows):
        x = torch.randn(size, 5, 6, requires_grad=True)
        model(x).backward()
        ours, x.grad = x.grad, None
        Shapes()(x).backward()
        torch.testing.assert_close(ours, x.grad)
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_a_registry_with_late_signatures_is_torchs() -> None:
    """Signatures of translations are read when a node needs them: the same as if all are read at once."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    whole = ONNXRegistry.from_torchlib(20)
    late = retrace._registry.__wrapped__(20)
    assert late.functions.keys() == whole.functions.keys() and len(whole.functions) > 400
    assert sum("signature" in vars(found) for listed in retrace._registry.__wrapped__(20).functions.values() for found in listed) < 40
    for target, listed in whole.functions.items():
        for one, other in zip(listed, late.functions[target], strict=True):
            assert one.fx_target is other.fx_target and one.onnx_function is other.onnx_function
            assert (one.is_complex, one.opset_introduced) == (other.is_complex, other.opset_introduced)
            assert str(one.signature) == str(other.signature)
