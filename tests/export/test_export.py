"""Exports against eager PyTorch: one test for each thing that a plain torch.onnx.export gets wrong for training.

The graph is evaluated by ONNX's reference evaluator, with dropout off where numbers are compared; each row also shows
that the plain export of the same module fails, or answers something else.
"""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from export_models import CNN, GPT2, MLP, Seq2SeqTransformer  # of this folder, which pytest puts on the path
from onnx.reference.op_run import OpRun
from torch import Tensor

import onnxtrain
from onnxtrain._export.exported import Exported
from onnxtrain.export import ExportError
from onnxtrain.ortmodule._whole import export_whole, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore")


class StopGradient(OpRun):
    op_domain = "ai.onnxtrain"

    def _run(self, x):
        return (x,)


class TorchGather(OpRun):
    op_domain = "ai.onnxtrain"

    def _run(self, x, indices, axis=0):
        return (np.take(x, indices, axis=axis or 0),)


class TorchGatherElements(OpRun):
    op_domain = "ai.onnxtrain"

    def _run(self, x, indices, axis=0):
        return (torch.from_numpy(x).gather(axis or 0, torch.from_numpy(indices)).numpy(),)


OWN = [StopGradient, TorchGather, TorchGatherElements]


def export(module: nn.Module, args: tuple, kwargs: dict, *, training: bool, opset: int = 20) -> Exported:
    return export_whole(module.train(training), args, kwargs, opset=opset)


def feeds_of(exported: Exported, module: nn.Module, args: tuple, kwargs: dict) -> dict[str, np.ndarray]:
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    leaves = list(tensors_of((args, kwargs)))
    tensors = {
        i.name: state[i.target] if isinstance(i.target, str) else leaves[i.target] if isinstance(i.target, int)
        else i.target
        for i in exported.inputs
    }
    return {name: t.detach().numpy() for name, t in tensors.items()}


def evaluate(exported: Exported, module: nn.Module, args: tuple, kwargs: dict) -> dict[tuple[str, Any], np.ndarray]:
    """(kind, target) -> value of every graph output."""
    evaluator = onnx.reference.ReferenceEvaluator(exported.model, new_ops=OWN)
    values = evaluator.run([o.name for o in exported.outputs], feeds_of(exported, module, args, kwargs))
    return {(o.kind, o.target): v for o, v in zip(exported.outputs, values, strict=True)}


def check(module: nn.Module, *args: Any, training: bool = True, tolerance: float = 1e-5, **kwargs: Any) -> Exported:
    """Exports, and compares outputs and buffers with eager's."""
    exported = export(module, args, kwargs, training=training)
    onnx.checker.check_model(exported.model)
    compare(exported, module, args, kwargs, tolerance)
    return exported


def compare(exported: Exported, module: nn.Module, args: tuple, kwargs: dict, tolerance: float = 1e-5) -> None:
    got = evaluate(exported, module, args, kwargs)
    reference = copy.deepcopy(module)
    for index, leaf in enumerate(tensors_of(reference(*args, **kwargs))):
        value = got[("user", index)]
        assert value.shape == tuple(leaf.shape) and value.dtype == leaf.detach().numpy().dtype
        np.testing.assert_allclose(value, leaf.detach().numpy(), rtol=tolerance, atol=tolerance)
    before = dict(module.named_buffers())
    for name, after in reference.named_buffers():
        if ("buffer", name) in got:
            np.testing.assert_allclose(got["buffer", name], after.detach().numpy(), rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(after, before[name]), f"{name} changes in eager and has no output"


def proto(exported: Exported | Any) -> onnx.ModelProto:
    return onnx.load_from_string(exported.model) if isinstance(exported, Exported) else exported.model_proto


def ops(exported: Exported | Any, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in proto(exported).graph.node if node.op_type == op_type]


def naive(module: nn.Module, *args: Any, optimize: bool = False, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.onnx.export(copy.deepcopy(module), args, kwargs=kwargs, dynamo=True, optimize=optimize,
                                 verbose=False)


def real_dropouts(exported: Exported | Any) -> int:
    """Dropouts whose training_mode input is a constant true."""
    model = proto(exported)
    constants = {n.output[0]: onnx.numpy_helper.to_array(a.t) for n in model.graph.node if n.op_type == "Constant"
                 for a in n.attribute if a.name == "value"}
    constants |= {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    return sum(len(n.input) > 2 and bool(constants[n.input[2]]) for n in ops(exported, "Dropout"))


def ancestors(model: onnx.ModelProto, name: str, barrier: str) -> set[str]:
    """Names that `name` depends on without passing a node of type `barrier`."""
    producers = {output: node for node in model.graph.node for output in node.output}
    found, queue = set(), [name]
    while queue:
        node = producers.get(queue.pop())
        if node is not None and node.op_type != barrier:
            queue += [i for i in node.input if i not in found]
            found.update(node.input)
    return found


class Of(nn.Module):
    """A module out of a function, with one linear layer to have a parameter."""

    def __init__(self, function: Any, features: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(features, features)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "seq2seq", "gpt2"])
def test_models(name: str, training: bool) -> None:
    module, args, kwargs = {
        "mlp": lambda: (MLP(), (torch.randn(8, 12),), {}),
        "cnn": lambda: (CNN(), (torch.randn(4, 3, 12, 12),), {}),
        "seq2seq": lambda: (Seq2SeqTransformer(dropout=0.0), (torch.randint(0, 50, (9, 4)),), {}),
        "gpt2": lambda: (GPT2(dropout=0.0), (torch.randint(0, 61, (3, 8)),), {"labels": torch.randint(0, 61, (3, 8))}),
    }[name]()
    if name == "cnn":
        module.bn2.momentum = 0.1  # Dynamo cuts where None has it read the count
    exported = check(module, *args, training=training, **kwargs)
    assert not exported.needs_verification
    assert not proto(exported).graph.initializer
    assert not any(n.op_type.startswith("Sequence") for n in proto(exported).graph.node)


def test_seq2seq_needs_help() -> None:
    module = Seq2SeqTransformer()
    src = torch.randint(0, 50, (9, 4))
    with pytest.raises(Exception, match="(?i)data-dependent|GuardOnDataDependent"):
        torch.export.export(module, (src,), strict=False)  # Dynamo, once ORTModule has used it, takes the mask as it is
    exported = export(module, (src,), {}, training=True)
    assert module.src_mask is None
    assert real_dropouts(exported) == 1 + 4
    assert exported.guards([torch.zeros(9, 7, dtype=torch.long)]) is None


# --- the rows of the table --------------------------------------------------------------------------------------------


def test_detach() -> None:
    module = Of(lambda m, x: m.fc(x).detach() * m.fc(x).data.exp() + x)
    exported = check(module, torch.randn(3, 4))
    assert len(ops(exported, "StopGradient")) == 2
    assert "fc.weight" not in ancestors(proto(exported), exported.outputs[0].name, "StopGradient")
    plain = naive(Of(lambda m, x: m.fc(x).detach() + x), torch.randn(3, 4))
    assert not ops(plain, "StopGradient")


def test_no_grad() -> None:
    def forward(m, x):
        with torch.no_grad():
            a = m.fc(x) * 2
            with torch.enable_grad():
                b = x * 3
            c = a.exp()
        return a, b, c + x

    exported = check(Of(forward), torch.randn(3, 4))
    paths = {o.target: ancestors(proto(exported), o.name, "StopGradient") for o in exported.outputs}
    assert "fc.weight" not in paths[0] and "fc.weight" not in paths[2]
    names = [i.name for i in exported.inputs if i.kind == "user"]
    assert names[0] in paths[1] and names[0] in paths[2]
    assert not ops(naive(Of(forward), torch.randn(3, 4)), "StopGradient")


def test_equal_and_zero_parameters_are_kept() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    nn.init.zeros_(module[0].bias)
    module[2].load_state_dict(module[0].state_dict())
    exported = check(module, torch.randn(3, 4))
    assert {i.target for i in exported.inputs if i.kind == "parameter"} == set(dict(module.named_parameters()))
    assert len(naive(module, torch.randn(3, 4), optimize=True).model.graph.initializers) < 8


def test_tied_weights() -> None:
    module = GPT2(dropout=0.0)
    exported = export(module, (torch.randint(0, 61, (2, 5)),), {}, training=True)
    assert [i.name for i in exported.inputs if "wte" in i.name or "lm_head" in i.name] == ["wte.weight"]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def test_custom_function_is_a_node() -> None:
    module = Of(lambda m, x: Square.apply(m.fc(x)))
    exported = export(module, (torch.randn(3, 4),), {}, training=True)
    assert [call.function.__qualname__ for call in exported.functions] == ["Square"] and b"PythonOp" in exported.model
    assert ops(naive(module, torch.randn(3, 4)), "Mul")  # traced through
    module(torch.randn(3, 4)).sum().backward()  # and apply() is itself again


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_is_inlined(reentrant: bool) -> None:
    module = Of(lambda m, x: torch.utils.checkpoint.checkpoint(lambda t: m.fc(t).tanh(), x, use_reentrant=reentrant))
    exported = check(module, torch.randn(3, 4, requires_grad=True))
    assert len([note for note in exported.notes if note.startswith("torch.utils.checkpoint around ")]) == 1
    regions = {node.op_type: entry.value for node in proto(exported).graph.node for entry in node.metadata_props
               if entry.key == "onnxtrain.region"}
    assert {"Gemm", "Tanh"} <= regions.keys() and len(set(regions.values())) == 1
    assert "fc.weight" in ancestors(proto(exported), exported.outputs[0].name, "StopGradient")


class Counter(nn.Module):
    """Ways to change a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("added", "data", "average", "untouched", "unused"):
            self.register_buffer(name, torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.added.add_(1)
        self.data.data.mul_(3)
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0) * 0.1)
        return x * self.added + self.untouched + self.average


def test_buffers() -> None:
    module = Counter()
    x = torch.randn(3, 4)
    exported = check(module, x)
    assert {o.target for o in exported.outputs if o.kind == "buffer"} == {"added", "data", "average"}
    assert all(torch.equal(buffer, torch.ones(4)) for buffer in module.buffers())
    assert len(naive(nn.Sequential(nn.BatchNorm1d(4)), x).model.graph.outputs) == 1


def test_branch_on_a_value() -> None:
    module = Of(lambda m, x: x * 2 if x.sum() > 0 else x * 3)
    with pytest.raises(ExportError, match="Dynamo does not capture the module as one graph"):
        export(module, (torch.ones(2, 4),), {}, training=True)


def test_autocast_is_baked() -> None:
    module = MLP()
    with torch.autocast("cpu", torch.bfloat16):
        exported = export(module, (torch.randn(3, 12),), {}, training=True)
        assert torch.is_autocast_enabled("cpu")
    assert ops(exported, "Cast")
    assert not ops(export(module, (torch.randn(3, 12),), {}, training=True), "Cast")


def test_opsets() -> None:
    for asked, used in ((9, 18), (17, 18), (18, 18), (22, 22), (24, 22)):
        exported = export(MLP(), (torch.randn(3, 12),), {}, training=True, opset=asked)
        assert exported.opset == used == next(o.version for o in proto(exported).opset_import if not o.domain)
        assert any(str(asked) in note for note in exported.notes) == (asked != used)


# --- arguments and results --------------------------------------------------------------------------------------------


def test_structured_arguments_and_results() -> None:
    def forward(m, batch, *, scale=1.0, flag=False):
        y = m.fc(batch["x"]) * scale + batch["pair"][1]
        return {"y": y if flag else -y, "others": [y * 2, y + 1], "n": 3}

    batch = {"x": torch.randn(3, 4), "pair": (None, torch.randn(3, 4)), "name": "b"}
    exported = check(Of(forward), batch, scale=2.0, flag=True)
    assert exported.results == 3 and {i.kind for i in exported.inputs} == {"parameter", "user"}


@pytest.mark.parametrize("function, words", [(lambda m, x: (m.fc(x), x), "it may be an argument"),
                                             (lambda m, x: (m.fc(x), x.view(-1)), "or a view of one|it may be an argument"),
                                             (lambda m, x: (m.fc(x), m.fc.weight), "it may be an argument or a weight")])
def test_results_that_no_file_has_are_named(function, words) -> None:
    with pytest.raises(ExportError, match=words):
        export(Of(function), (torch.randn(3, 4),), {}, training=True)


def test_constants() -> None:
    module = Of(lambda m, x: m.fc(x) * m.held + torch.tensor([1.0, 2.0, 3.0, 4.0]) + table.sum())
    module.held = torch.ones(4) * 3
    table = torch.ones(50, 50)
    exported = check(module, torch.randn(3, 4))
    constants = [i.target for i in exported.inputs if i.kind == "constant"]
    assert any(tensor is table for tensor in constants) and any(tensor is module.held for tensor in constants)


def test_parameter_changed_in_forward_is_refused() -> None:
    def forward(m, x):
        with torch.no_grad():
            m.fc.weight.clamp_(-0.1, 0.1)
        return m.fc(x)

    with pytest.raises(ExportError, match="parameter"):
        export(Of(forward), (torch.randn(3, 4),), {}, training=True)


def test_hidden_change_of_an_activation_is_refused() -> None:
    def forward(m, x):
        y = m.fc(x)
        y.detach().mul_(3)
        return y * 2

    with pytest.raises(ExportError, match="in place"):
        export(Of(forward), (torch.randn(3, 4),), {}, training=True)


def test_a_hook_of_a_result_is_a_function_or_refused() -> None:
    def hooked(m, x):
        y = m.fc(x)
        y.register_hook(lambda grad: grad * 2)
        return y

    if torch.__version__ < (2, 11):
        with pytest.raises(ExportError, match="register_hook|as one graph"):
            export(Of(hooked), (torch.randn(3, 4),), {}, training=True)
        return
    (call,) = export(Of(hooked), (torch.randn(3, 4),), {}, training=True).functions
    assert call.function.__name__ == "Hook"


# --- nothing is left behind -------------------------------------------------------------------------------------------


class Messy(nn.Module):
    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.cache: Tensor | None = None
        self.seen: list[Any] = []
        self.table: dict[str, Any] = {}
        self.fail = fail

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x * 2
        self.late = x
        self.fc.note = x
        y = self.bn(self.fc(x))
        if self.fail:
            self.seen.append(x)
            self.table["x"] = x
            raise ValueError("on purpose")
        return F.dropout(y, 0.5, self.training)


@pytest.mark.parametrize("fail", [False, True])
def test_state_is_restored(fail: bool) -> None:
    module = Messy(fail).train()
    x = torch.randn(3, 4)
    buffers = {name: (b, b.clone(), b._version) for name, b in module.named_buffers()}
    functions = (F.cross_entropy, F.scaled_dot_product_attention)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with torch.no_grad():
        if fail:
            with pytest.raises(ExportError, match="as one graph"):
                export(module, (x,), {}, training=True)
        else:
            export(module, (x,), {}, training=True)
        assert not torch.is_grad_enabled()
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()
    assert module.cache is None and module.seen == [] and module.table == {}
    assert not hasattr(module, "late") and not hasattr(module.fc, "note")
    assert all(child.training for child in module.modules())
    for name, b in module.named_buffers():
        assert b is buffers[name][0] and torch.equal(b, buffers[name][1]) and b._version == buffers[name][2]
    assert functions == (F.cross_entropy, F.scaled_dot_product_attention)
    assert module.fc.weight.grad is None


def test_a_weight_may_bear_a_name_that_the_exporter_uses():
    """torch.round(decimals=) is written with a value `scale`."""
    from onnxtrain.ortmodule import ORTModule

    class Rounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return torch.round(x * self.scale, decimals=1) + x * self.scale

    model, x = ORTModule(Rounded()), torch.randn(4, 5)
    y = model(x)
    y.sum().backward()
    torch.testing.assert_close(y, Rounded()(x))
    torch.testing.assert_close(model.scale.grad, x.sum())
    assert onnxtrain.stats(model)["engine_steps"] == 1
