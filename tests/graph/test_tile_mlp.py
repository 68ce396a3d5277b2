"""MLPs whose backward runs in tiles of the hidden columns: where the pass applies, and that gradients stay the same."""

import re

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from onnx import helper
from torch.utils.checkpoint import checkpoint

import onnxtrain
from onnxtrain import _C
from onnxtrain.ortmodule import ORTModule

ROWS, WIDTH, HIDDEN = (2, 5), 6, 24


@pytest.fixture(autouse=True)
def switches_as_they_were():
    yield
    _C.disable_passes([])
    _C.disable_kernels([])


class Builder:
    """Nodes of a model, and its inputs in order."""

    def __init__(self, double=False):
        self.nodes, self.inputs, self.constants, self.random = [], {}, [], np.random.default_rng(1)
        self.dtype = np.float64 if double else np.float32

    def input(self, name, *shape):
        self.inputs[name] = torch.from_numpy(self.random.normal(size=shape).astype(self.dtype))
        return name

    def constant(self, value, dtype=None):
        name = f"c{len(self.constants)}"
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        self.constants.append(helper.make_tensor(name, kind, [], [value]))
        return name

    def add(self, op, *operands, **attrs):
        out = f"n{len(self.nodes)}"
        ours = {"domain": "ai.onnxtrain"} if op == "FusedMatMul" else {}
        self.nodes.append(helper.make_node(op, operands, [out], **ours, **attrs))
        return out

    def model(self, *outputs):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        inputs = [helper.make_tensor_value_info(k, kind, list(x.shape)) for k, x in self.inputs.items()]
        results = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", inputs, results, self.constants)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def tanh_form(b, h):
    """GELU as transformers' NewGELUActivation has it."""
    inner = b.add("Mul", b.add("Add", h, b.add("Mul", b.add("Pow", h, b.constant(3.0)), b.constant(0.044715))),
                  b.constant(0.7978845608028654))
    return b.add("Mul", b.add("Mul", h, b.constant(0.5)), b.add("Add", b.add("Tanh", inner), b.constant(1.0)))


ACTIVATIONS = {
    "gelu": lambda b, h: b.add("Gelu", h), "gelu_tanh": lambda b, h: b.add("Gelu", h, approximate="tanh"),
    "relu": lambda b, h: b.add("Relu", h), "silu": lambda b, h: b.add("Mul", h, b.add("Sigmoid", h)),
    "gelu_new": tanh_form,
    "squared": lambda b, h: b.add("Pow", b.add("Relu", h), b.constant(2.0)),
    "scaled": lambda b, h: b.add("Mul", b.add("Tanh", h), b.input("scale", HIDDEN)),
}


def linear(b, x, name, sizes, form):
    """x W (+ bias); form: how W is stored, and whether there is a bias."""
    w = b.input(f"w{name}", *(reversed(sizes) if form == "linear" else sizes))
    bias = [b.input(f"b{name}", sizes[1])] if form != "plain" else []
    if form == "gemm":
        return b.add("Gemm", x, w, *bias)
    return b.add("FusedMatMul", x, w, *bias, transB=int(form == "linear"))


def mlp(activation="gelu", form="linear", gated=False, ratio=0.0, double=False, sizes=(ROWS, WIDTH, HIDDEN), change=None):
    """(model, tensors). `change`: a function that adds to the hidden activation, or names more outputs."""
    b, (rows, width, hidden) = Builder(double), sizes
    rows = (int(np.prod(rows)),) if form == "gemm" else rows
    x = b.add("Tanh", b.input("x", *rows, width))
    h = linear(b, x, "1", (width, hidden), form)
    a = ACTIVATIONS[activation](b, h)
    if gated:
        a = b.add("Mul", a, linear(b, x, "3", (width, hidden), form))
    more = []
    if change:
        a, more = change(b, x, h, a)
    if ratio:
        a = b.add("Dropout", a, b.constant(ratio, np.float32), b.constant(True, np.bool_))
    y = b.add("Add", linear(b, a, "2", (hidden, width), form), x)
    return b.model(y, *more), b.inputs


def step(model, tensors, passes, wants=None, level=1):
    """Outputs and gradients, and the text of the program."""
    _C.disable_passes(passes)
    session = _C.Session(model, recompute=level)
    given = list(tensors.values())
    outputs, run = session.forward(given, bytes(wants is None or k in wants for k in tensors), 11)
    draws = torch.Generator().manual_seed(2)
    saved = [given[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    grads = run.backward(saved, [torch.randn(y.shape, generator=draws, dtype=y.dtype) for y in outputs])
    return [*outputs, *[g for g in grads if g is not None]], session.text("program")


def check(model, tensors, applies=True, wants=None):
    """With the pass every result is as without it; returns the text of the program."""
    plain, text = step(model, tensors, ["tile_mlp"], wants)
    assert "MlpGrad" not in text
    tolerance = 1e-13 if plain[0].dtype == torch.float64 else 1e-5
    for kernels in [], ["mlp_grad"]:  # one tile of all columns; tiles of three columns
        _C.disable_kernels(kernels)
        got, text = step(model, tensors, ["+tile_mlp"], wants)
        assert ("MlpGrad" in text) == applies, text
        for one, want in zip(got, plain, strict=True):
            assert (one - want).abs().max() <= tolerance * want.abs().max()
    return text


@pytest.mark.parametrize("double", [False, True], ids=["float", "double"])
@pytest.mark.parametrize("form", ["linear", "gemm", "plain"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, gated, form, double):
    text = check(*mlp(activation, form, gated, double=double))
    backward = text.split("# backward")[1]
    assert not re.search(rf"\[(2,5|10),{HIDDEN}\] %?\w+ =", backward.replace(", ", ",")), backward


@pytest.mark.parametrize("gated", [False, True])
def test_dropout_draws_the_same_numbers(gated):
    check(*mlp("gelu_new", gated=gated, ratio=0.25, sizes=((3, 7), 6, 40)))
    # no vector loop draws for float64
    check(*mlp(gated=gated, ratio=0.25, double=True), applies=False)


@pytest.mark.parametrize("sizes", [((2,), 1, 2), ((3, 5), 17, 31), ((64,), 48, 1031), ((4, 33), 24, 2048)], ids=str)
def test_sizes(sizes):
    for form in "linear", "plain":
        check(*mlp(form=form, gated=True, sizes=sizes, double=True))
        check(*mlp(form=form, sizes=sizes))


@pytest.mark.parametrize("wants", [("x",), ("w1",), ("b1",), ("w2",), ("b2", "w1"), ("w2", "b1", "x"), ("x", "w3")],
                         ids="-".join)
def test_what_is_frozen_has_no_gradient(wants):
    model, tensors = mlp(gated=True)
    text = check(model, tensors, applies=wants != ("w2",), wants=wants)  # a product with dY alone needs no tile
    if wants != ("w2",):
        assert " MatMul" not in text.split("# backward")[1]


def lora(b, x, h, a):
    """A product of low rank joins the activation."""
    low = b.add("FusedMatMul", b.add("FusedMatMul", x, b.input("down", WIDTH, 2)), b.input("up", 2, HIDDEN))
    return b.add("Add", a, low), []


def norm(b, x, h, a):
    return b.add("LayerNormalization", a, b.input("g", HIDDEN)), []


CHANGES = {"lora": lora, "norm": norm, "output": lambda b, x, h, a: (a, [b.add("Exp", a)]),
           "softmax": lambda b, x, h, a: (b.add("Softmax", a), []),
           "sum": lambda b, x, h, a: (b.add("Mul", a, b.add("ReduceMean", a, keepdims=1)), []),
           "two": lambda b, x, h, a: (a, [b.add("FusedMatMul", a, b.input("other", HIDDEN, 3))])}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_left_as_it_is(change):
    check(*mlp(change=CHANGES[change]), applies=False)


def test_hidden_values_that_are_results_stay():
    model, tensors = mlp(change=lambda b, x, h, a: (a, [h]))
    check(model, tensors, applies=False)  # its own gradient is added


def test_levels_and_sizes(monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_GEMM", "native")  # nothing is measured
    small, large = mlp(), mlp(sizes=((4, 256), 320, 1024))  # 4 MiB
    assert "MlpGrad" not in step(*small, [])[1]
    for level in 0, 1, 2:  # the first product once more is a sixth of the step
        assert ("MlpGrad" in step(*large, [], level=level)[1]) == (level > 0), level
    assert "MlpGrad" not in step(*large, ["tile_mlp"], level=2)[1]


def test_one_weight_for_both_products():
    b = Builder()
    x, w = b.add("Tanh", b.input("x", 5, 8)), b.input("w", 8, 8)
    check(b.model(b.add("MatMul", b.add("Gelu", b.add("MatMul", x, w)), w)), b.inputs)


class Layer(nn.Module):
    """An MLP with LayerNorm and residual, large enough for tiles."""

    def __init__(self, gated):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.gate = nn.Linear(256, 1024) if gated else None

    def forward(self, x):
        h = self.norm(x)
        a = F.silu(self.gate(h)) * self.up(h) if self.gate else F.gelu(self.up(h))
        return x + self.down(F.dropout(a, 0.1, self.training))


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("gated, dtype, region", [(True, torch.float32, False), (False, torch.bfloat16, False),
                                                  (True, torch.float32, True)])
def test_modules_at_level_2(gated, dtype, region, monkeypatch):
    """Gradients as without the pass, for two batches of one exported graph, and a smaller slab."""
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "2")
    monkeypatch.setenv("ONNXTRAIN_GEMM", "native")
    _C.disable_kernels(["matmul_half", "gemm_half"])  # as where the processor does not multiply bfloat16
    torch.manual_seed(0)
    module = nn.Sequential(*(Checkpointed(Layer(gated)) if region else Layer(gated) for _ in range(2)))

    def grads(passes):
        _C.disable_passes(passes)
        model = ORTModule(module)
        for batch in 2, 3:
            module.zero_grad()
            torch.manual_seed(3)
            x = torch.randn(batch, 512, 256, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                model(x).float().square().sum().backward()
        (programs,) = (programs for _, programs in model._all_programs())
        return ([x.grad, *(p.grad.clone() for p in module.parameters())], programs[-1].session.text("program"),
                onnxtrain.stats(model)["slab_bytes"])

    plain, text, before = grads(["tile_mlp"])
    assert "MlpGrad" not in text
    got, text, after = grads([])
    assert text.count("ai.onnxtrain.MlpGrad") == 2
    for one, want in zip(got, plain, strict=True):
        assert (one - want).norm() <= (1e-5 if dtype == torch.float32 else 2e-3) * want.norm()
    assert after < 0.85 * before


SMALL = {"vocab_size": 211, "use_cache": False}
T5 = SMALL | {"num_layers": 1, "d_model": 32, "d_kv": 16, "d_ff": 72, "num_heads": 2, "decoder_start_token_id": 0}
MODELS = {
    "GPT2LMHeadModel": transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, bos_token_id=0, eos_token_id=0, **SMALL),
    "BertForMaskedLM": transformers.BertConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2,
                                               intermediate_size=72, vocab_size=211),
    "LlamaForCausalLM": transformers.LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2,
                                                 num_key_value_heads=1, intermediate_size=72, **SMALL),
    "T5ForConditionalGeneration-relu": transformers.T5Config(feed_forward_proj="relu", **T5),
    "T5ForConditionalGeneration-gated": transformers.T5Config(feed_forward_proj="gated-gelu", **T5),
}


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        return self.model(input_ids=tokens, labels=labels).loss


@pytest.mark.parametrize("double", [False, True], ids=["float", "double"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name, double):
    """Dropout is 0.1 as configured; without it for float64."""
    torch.manual_seed(0)
    module = Loss(getattr(transformers, name.split("-")[0])(MODELS[name])).train()
    tokens = torch.randint(0, 211, (2, 16))
    if double:
        module = module.double()
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0

    def grads(passes):
        _C.disable_passes(passes)
        module.zero_grad()
        model = ORTModule(module)
        torch.manual_seed(3)
        model(tokens, tokens.clone()).backward()
        return {k: p.grad for k, p in module.named_parameters()}, [
            programs[-1].session.text("program") for _, programs in model._all_programs()]

    plain, (text,) = grads(["tile_mlp"])
    assert "MlpGrad" not in text
    _C.disable_kernels(["mlp_grad"])  # tiles of three columns
    got, (text,) = grads(["+tile_mlp"])
    assert text.count("ai.onnxtrain.MlpGrad") == 2
    largest = max(want.norm() for want in plain.values())  # gradients of keys' biases are sums of what cancels out
    for k, want in plain.items():
        error = (got[k] - want).norm()
        assert error <= (1e-12 if double else 1e-5) * want.norm() + (1e-15 if double else 1e-7) * largest, k
