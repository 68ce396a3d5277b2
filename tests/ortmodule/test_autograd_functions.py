"""torch.autograd.Function inside a wrapped module: its own backward runs, in every form that torch allows."""

import copy
import logging

import agree
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from agree import Square

import onnxtrain
from onnxtrain.ortmodule import ORTModule

torch.manual_seed(0)


class Wrong(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so that tracing through would be seen."""

    @staticmethod
    def forward(ctx, x, factor=2.0):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.clamp(min=0) * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 10 * ctx.factor + x, None


class Shrinks(torch.autograd.Function):
    """Another shape and dtype than its input's."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return x.sum(0).double()

    @staticmethod
    def backward(ctx, grad):
        return grad.float().expand(ctx.rows, -1) * 0.5


def both(forward, *calls, part=lambda result: result, exports=1):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.drop = nn.Dropout(0.0)

    Module.forward = forward
    torch.manual_seed(0)
    eager = Module()
    ours = ORTModule(copy.deepcopy(eager))
    for rows in calls or (3, 5, 3):
        x = torch.randn(rows, 4)
        results = []
        for model in (eager, ours):
            model.zero_grad()
            given = x.clone().requires_grad_(True)
            out = part(model(given))
            (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
            results.append([out.detach(), given.grad, *(p.grad for p in model.parameters())])
        for a, b in zip(*results):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a)
    counts = onnxtrain.stats(ours)
    assert counts["fallback_steps"] == 0, counts["reasons"]
    assert counts["engine_steps"] == len(calls or (3, 5, 3)) and counts["exports"] in (1, exports)
    return ours


def test_its_own_backward_runs_where_a_trace_would_lose_it():
    model = both(lambda m, x: m.two(Wrong.apply(m.one(x))))
    (program,) = model._all_programs()[0][1]
    assert len(program.exported.functions) == 1 and len(program.sessions) == 2
    assert "PythonOp" in program.exported.model.decode("latin1")


bound = Wrong.apply


def test_an_apply_that_was_bound_before_is_seen_as_well():
    model = both(lambda m, x: m.two(bound(m.one(x))))
    (program,) = model._all_programs()[0][1]
    assert len(program.exported.functions) == 1
    x = torch.randn(2, requires_grad=True)
    bound(x).sum().backward()  # as before an export
    torch.testing.assert_close(x.grad, 20.0 + x.detach())


def test_on_inputs_and_as_the_result():
    both(lambda m, x: Wrong.apply(x))
    both(lambda m, x: Wrong.apply(m.one(x)), part=lambda y: y * 1)


def test_on_parameters():
    both(lambda m, x: F.linear(x, Wrong.apply(m.one.weight), m.one.bias) + m.two(x))


def test_shapes_that_come_from_its_result():
    both(lambda m, x: m.two(Wrong.apply(m.one(x)).view(x.shape[0] * 2, 2).reshape(-1, 4)))
    both(lambda m, x: m.two(Shrinks.apply(m.one(x)).float()).expand(x.shape[0], -1))


def test_without_gradient_and_in_eval():
    model = both(lambda m, x: m.two(m.drop(Wrong.apply(m.one(x)))))
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert not model(x).requires_grad
    model.eval()
    torch.testing.assert_close(model(x), model.module(x))
    assert onnxtrain.stats(model)["fallback_steps"] == 0


def test_in_a_loop_with_an_optimizer_and_several_forwards():
    model = both(lambda m, x: m.two(Wrong.apply(m.one(x))))
    twin = copy.deepcopy(model.module)
    for m in (model, twin):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(m.parameters(), 1e-4)
        for _ in range(4):
            optimizer.zero_grad()
            a, b = m(torch.randn(3, 4)), m(torch.randn(6, 4))
            (b.square().mean() + a.mean()).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_one_that_changes_its_input():
    module = type("M", (nn.Module,), {"forward": lambda m, x: InPlace.apply(x * 1)})()
    model = ORTModule(module)
    x = torch.randn(2, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert onnxtrain.stats(model)["engine_steps"] + onnxtrain.stats(model)["fallback_steps"] == 1


def linear_with(function):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return function.apply(self.fc(x))

    return Module()


@pytest.mark.parametrize(("variable", "value"), [
    ("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "0"), ("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "1"),
    ("ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS", f"other.Name, {Square.__module__}.Square,{__name__}.Wrong"),
])
def test_switched_off_it_is_traced_through_only_if_that_gives_its_gradient(variable, value, monkeypatch, caplog):
    monkeypatch.setenv(variable, value)
    x = torch.randn(3, 4)
    model = ORTModule(linear_with(Square))
    model(x).sum().backward()
    (program,) = model._all_programs()[0][1]
    assert not program.exported.functions and any("Traced through" in note for note in program.exported.notes)
    assert onnxtrain.stats(model)["engine_steps"] == 1
    model = ORTModule(linear_with(Wrong))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        model(x).sum().backward()
    assert onnxtrain.stats(model)["fallback_steps"] == 1 and "differs from eager" in caplog.text


def test_nodes_say_what_they_call():
    """As onnxruntime's do: the class, and which arguments are tensors."""

    class Net(nn.Module):
        def forward(self, x):
            return Wrong.apply(x, 3.0)

    model = ORTModule(Net())
    model(torch.randn(2, 3, requires_grad=True))
    exported = model._torch_module._execution_manager(True)._onnx_models.exported_model
    (node,) = [node for node in exported.graph.node if node.op_type == "PythonOp"]
    attributes = {a.name: a.s.decode() for a in node.attribute if a.s}
    assert attributes == {"func_name": f"{__name__}.Wrong", "input_convention": "cccd"}  # Dynamo has the number in the function


def test_explained():
    model = ORTModule(linear_with(Wrong))
    model(torch.randn(2, 4)).sum().backward()
    assert "1 torch.autograd.Function" in onnxtrain.explain(model)


class Chunked(torch.autograd.Function):
    """Two rows at a time, into a result that is there before."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        result = torch.zeros(x.shape[0])
        for start in range(0, x.shape[0], 2):
            result[start:start + 2] = x[start:start + 2].square().sum(1)
        return result

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad.unsqueeze(1)


class Cropped(Chunked):
    """Of five rows and more, the first four alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x[:4].square().sum(1) if x.shape[0] > 4 else x.square().sum(1)

    @staticmethod
    def backward(ctx, grad):
        grad = F.pad(grad, (0, ctx.saved_tensors[0].shape[0] - grad.shape[0]))
        return 2 * ctx.saved_tensors[0] * grad.unsqueeze(1)


@pytest.mark.parametrize(("function", "sizes"), [(Chunked, (3, 6, 2, 7, 5)), (Cropped, (3, 6, 4, 7, 3))])
def test_sizes_that_only_the_function_asks_for(function, sizes):
    plain = linear_with(function)
    model = ORTModule(copy.deepcopy(plain))
    for rows in sizes:
        x = torch.randn(rows, 4)
        for module in (plain, model):
            module.zero_grad()
            y = module(x)
            (y * torch.arange(1.0, len(y) + 1)).sum().backward()
        torch.testing.assert_close(model(x), plain(x))
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad)
    counts = onnxtrain.stats(model)
    assert counts["fallback_steps"] == 0 and counts["engine_steps"] == 2 * len(sizes), counts


class Unchecked(torch.autograd.Function):
    """As solvers of differential equations write stages: past autograd's count of changes."""

    @staticmethod
    def forward(ctx, stages, value, index):
        ctx.index = index
        stages.data[index] = value
        return stages

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.index], None


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.weights = nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def forward(self, x):
        stages = torch.empty(*x.shape, 3)
        for i in range(3):
            stages = assigned(stages, torch.tanh(self.fc(x)), i)
            x = x + weighted(stages[..., :i + 1], self.weights[:i + 1])
        return x


@torch.compiler.disable
def weighted(stages, weights):
    return (stages * weights).sum(-1)


@torch.compiler.disable(recursive=False)
def assigned(stages, value, index):
    return Unchecked.apply(stages, value, (..., index))


def test_what_a_function_writes_to_data_is_no_change():
    torch.manual_seed(0)
    eager = Stages()
    model, x = ORTModule(copy.deepcopy(eager)), torch.randn(5, 4)
    for m in (eager, model):
        for _ in range(2):
            m(x).square().mean().backward()
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


def squared(x):
    return x * x


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * ctx.factor, None


class Helped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return squared(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("forward", [
    lambda m, x: Sevenfold.apply(m.fc(x), 7.0),
    lambda m, x: torch.utils.checkpoint.checkpoint(lambda y: torch.relu(m.fc(y)), x, use_reentrant=False),
], ids=["function", "checkpoint"])
def test_functions_keep_their_own_backward(forward):
    counts = onnxtrain.stats(agree.both(agree.module(forward), agree.three()))
    assert (counts["fallback_steps"], counts["exports"]) == (0, 1)


class Inherits(Sevenfold):
    pass


apply_sevenfold = Sevenfold.apply


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("call, name", [
    (lambda x: Sevenfold.apply(x, 7.0), "Sevenfold"),
    (lambda x, kind=Helped: kind.apply(x), "Helped"),
    (lambda x: Inherits.apply(x, 7.0), "Inherits"),
    (lambda x: apply_sevenfold(x, 7.0), "_function.<locals>.Captured"),  # or Inherits: not to be told
])
def test_a_function_keeps_its_name(call, name):
    model = agree.both(agree.module(lambda m, x: call(m.fc(x))), agree.three())
    (program,) = model._all_programs()[0][1]
    assert [called.function.__qualname__ for called in program.exported.functions] == [name]
