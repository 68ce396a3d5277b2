"""Results that share memory with arguments, weights or one another, and arguments that forward changes in place:
as in eager.
"""

import copy

import pytest
import torch
import torch.nn as nn
from agree import X, Y, both, in_engine, module, step

import onnxtrain
from onnxtrain._export import views
from onnxtrain.ortmodule import ORTModule


def _no_grad(x):
    with torch.no_grad():
        return x.t()


def _autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x.view(2, 2, 2)


VIEWS = {
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(x.shape[1], x.shape[0]),
    "a size of the batch": lambda x: x.view(1, x.shape[0] * 2, -1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "squeeze": lambda x: x[None].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x[:, :, None].permute(2, 0, 1),
    "select": lambda x: x[-1],
    "slice": lambda x: x[1:, ::2],
    "ellipsis": lambda x: x[..., 1:3],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split([1, 3], 1)[1],
    "unbind": lambda x: list(x.unbind(1)),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "expand": lambda x: x[:1].expand(5, -1),
    "several in a row": lambda x: x.t()[1:].unsqueeze(0).flatten(1),
    "detach": lambda x: x.detach().t(),
    "no_grad": _no_grad,
    "autocast": _autocast,
    "an equal dtype": lambda x: x.to(torch.float32).t(),
}


def _memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _leaves(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("strided", [False, True])
def test_a_view_of_an_argument_is_one(name, strided):
    def use(model):
        leaf = X.detach()[:2].clone().requires_grad_(True)
        x = (leaf.t().contiguous().t() if strided else leaf) * 1  # no leaf, so that it may change in place
        result, other = model(x)
        described = [(v.shape, v.stride(), v.storage_offset(), _memory(v, x), v.requires_grad) for v in _leaves(result)]
        roots = [v.sum() for v in (*_leaves(result), other) if v.requires_grad]
        torch.stack(roots).cumsum(0).sum().backward()
        with torch.no_grad():
            if _memory(_leaves(result)[0], x):
                _leaves(result)[0].select(0, 0).mul_(3)
        return [leaf.grad, x.detach(), *_leaves(result)], described

    if name == "view" and strided:  # eager PyTorch refuses it as well
        for made in (lambda m: m, ORTModule):
            with pytest.raises(RuntimeError, match="view"):
                use(made(module(lambda self, x: (VIEWS[name](x), self.fc(x)))()))
        return
    if name in ("a size of the batch", "autocast") and strided:
        return
    model = both(module(lambda self, x: (VIEWS[name](x), self.fc(x))), use)
    in_engine(model)


def test_a_change_of_the_view_reaches_the_argument_and_its_gradient():
    def use(model):
        leaf = X.detach().clone().requires_grad_(True)
        x = leaf * 2
        view, h = model(x)
        view[0].mul_(5)  # autograd goes on from x's new history
        (x.sum() + view.sum() * 2).backward()
        return x.detach(), leaf.grad

    in_engine(both(module(lambda self, x: (x.view(-1, 2), self.fc.weight.sum())), use))


def test_a_change_of_the_view_before_backward_is_an_error_where_the_graph_needs_the_argument():
    def use(model):
        x = X.detach().clone()
        view, h = model(x)
        view.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            h.sum().backward()
        return x

    in_engine(both(module(lambda self, x: (x.t(), self.fc(x))), use))


def test_views_of_weights_and_buffers():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("table", torch.arange(8.0).view(2, 4))
            self.register_buffer("count", torch.zeros(3))
            self.register_buffer("newest", torch.zeros(3, 4))

        def forward(self, x):
            self.count += 1
            before = self.newest[0]
            self.newest = x * 2
            return self.fc.weight.t(), self.table[1:], self.count.view(-1), before, self.newest[0], self.fc(x)

    def use(model):
        weight, table, count, *rest = model(X.detach())
        inner = model.module if isinstance(model, ORTModule) else model
        shared = [_memory(weight, inner.fc.weight), _memory(table, inner.table), _memory(count, inner.count)]
        (weight * 2).sum().backward()
        table.zero_()
        values = [v.clone() for v in (weight, table, count, *rest)]
        model(X.detach() + 1)
        return values, shared, count, inner.table

    in_engine(both(Made, use), 2)


@pytest.mark.parametrize("change", [None, lambda h, v: h.mul_(2), lambda h, v: v[:2].mul_(3)])
@pytest.mark.parametrize("autocast", [False, True])
def test_results_that_share_memory_with_each_other(change, autocast):
    def forward(self, x):
        h = self.fc(x)
        if autocast:
            with torch.autocast("cpu", torch.bfloat16):
                h = h * 2
        return h.view(-1), h, h.t()[1:], h.detach(), h, _no_grad(h)

    def use(model):
        x = X.detach().clone().requires_grad_(True)
        v, h, t, d, again, n = model(x)
        shared = [_memory(o, h) for o in (v, t, d, again, n)], again is h
        if change is not None:
            change(h, v)
        (h.sum() + (2 * v).sum() + (3 * t).sum()).backward()
        return [v, h, t, d, again, n], shared, x.grad

    in_engine(both(module(forward), use))


def test_results_of_a_layer_that_writes_in_place():
    def forward(self, x):
        h = self.fc(x)
        v = h.view(-1)
        h.relu_()
        return v, h

    in_engine(both(module(forward), step(X)))


def test_views_from_the_cache_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    made = module(lambda self, x: (x.view(x.shape[0] * 2, -1), self.fc(x)))()
    for cached in (0, 1):
        model = ORTModule(copy.deepcopy(made))
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            view, _ = model(x)
            assert _memory(view, x) and view.shape == (rows * 2, 2)
        assert onnxtrain.stats(model)["cached_exports"] == cached
        in_engine(model, 2)


def test_steps_that_are_no_views_are_refused():
    for name in ("aten.relu_.default", "aten.clone.default", "operator.setitem", "os.system", "aten.nothing.default"):
        with pytest.raises(ValueError, match="not an operation of a view"):
            views.Replay([[["input", 0], ["call", name, [{"v": 0}], {}, None]], [[0, 1]]])


# --- arguments that forward changes -----------------------------------------------------------------------------------


def _masked(self, x, y):
    y[y > 0] = 0.5
    return self.fc(x + y)


WRITTEN = {
    "added": lambda self, x, y: (y.add_(1), self.fc(y) + x)[1],
    "a part": lambda self, x, y: (y[0].zero_(), self.fc(x) * y)[1],
    "by a mask": _masked,
    "relu": lambda self, x, y: self.fc(torch.relu_(y)) + x,
    "to a result of weights": lambda self, x, y: (y.mul_(self.fc.bias), x + y)[1],
    "and returned": lambda self, x, y: (y.mul_(2), y, y.view(-1), self.fc(x)),
    "labels": lambda self, x, y: self.fc(x) * _labels(y.to(torch.int64)) + y,
}


def _labels(y):
    with torch.no_grad():
        y.masked_fill_(y == 0, -100)
    return y


@pytest.mark.parametrize("name", WRITTEN)
def test_an_argument_changed_in_place_is_changed(name):
    def use(model):
        given = []
        for _ in range(2):
            y = Y.clone()
            x = X.detach().clone().requires_grad_(True)
            result = list(_leaves(model(x, y)))
            sum((t * (i + 1)).sum() for i, t in enumerate([*result, y]) if t.requires_grad).backward()
            given += [y, x.grad, *result]
        return given

    in_engine(both(module(WRITTEN[name]), use), 2)


def test_integer_arguments_changed_under_no_grad():
    def use(model):
        y = torch.tensor([[0, 1, 2, 3]])
        return model(X.detach(), y), y

    in_engine(both(module(lambda self, x, y: self.fc(x) * _labels(y)), use))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_argument_changed_in_place_in_inference_mode(mode):
    def use(model):
        with mode():
            made = Y.clone()
            return [model(X.detach(), made).clone() for _ in range(2)], made.clone()

    in_engine(both(module(WRITTEN["a part"]), use), 2)


def test_an_argument_of_another_shape_afterwards():
    def use(model):
        y = Y.clone()[:, None]
        return model(X.detach(), y), y

    in_engine(both(module(lambda self, x, y: self.fc(x) * y.squeeze_(1)), use))


def test_an_argument_with_a_history_goes_on_from_the_change():
    def use(model):
        leaf = X.detach().clone().requires_grad_(True)
        x = leaf * 3
        out = model(x)
        ((x * x).sum() + out.sum()).backward()
        return x, leaf.grad

    in_engine(both(module(lambda self, x: (x.mul_(2).add_(1), self.fc(x).relu())[1]), use))


def test_a_leaf_that_wants_a_gradient_may_not_change():
    def use(model):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            model(X.detach().clone().requires_grad_(True))
        y = X.detach().clone()
        return model(y), y

    both(module(lambda self, x: (x.add_(1), self.fc(x))[1]), use)


# --- containers that forward changes ----------------------------------------------------------------------------------


def _append(self, x, given):
    h = self.fc(x)
    given["list"].append(h.detach())
    return h


def _pop(self, x, given):
    return self.fc(x) + given.pop("y")


def _exchange(self, x, given):
    given["list"][0] = self.fc(x)
    return given["list"][0] * 2


CONTAINERS = {"append": _append, "pop": _pop, "exchange": _exchange}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_forward_changes_is_changed(name):
    def use(model):
        given = {"list": [torch.ones(3, 4)], "y": Y.clone()}
        return model(X, given), sorted(given), given["list"]

    in_engine(both(module(CONTAINERS[name]), use))


@pytest.mark.parametrize("view", [torch.Tensor.detach, torch.Tensor.t], ids=["detach", "t"])
def test_views_alone_are_no_copies(view):
    y = X.detach().clone()
    assert ORTModule(module(lambda self, x: view(x))())(y).data_ptr() == y.data_ptr()


def test_views_alone_need_no_program_and_no_fallback(monkeypatch):
    def use(model):
        x = X.detach().clone().requires_grad_(True)
        for _ in range(2):
            (first, second), weight = model(x)
        (first.sum() + weight.sum()).backward()
        return x.grad, _memory(second, x), second, weight

    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    counts = in_engine(both(module(lambda self, x: (x.chunk(2, -1), self.fc.weight.t())), use), 2)
    assert counts["exports"] == 0


def test_a_container_that_forward_reads_only():
    def forward(self, x, given):
        mine = dict(given)
        return self.fc(x) + mine.pop("y")

    in_engine(both(module(forward), step(X, {"y": Y})))
