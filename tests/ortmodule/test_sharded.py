"""FSDP of both kinds with ORTModule: two gloo processes, losses and weights equal to FSDP's over eager PyTorch."""

import os
import socket
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
WORLD, STEPS = 2, 3


class Block(nn.Module):
    """With a parameter of its own, beside those of its layers."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


def forms(mesh):
    """Of a Sequential of two blocks: name -> what trains, and the wrappers in it with the steps they run."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def by_blocks(model, wrap):
        wrapped = [wrap(model[i]) for i in range(2)]
        for i in range(2):
            model[i] = fully_shard(wrapped[i], mesh=mesh, reshard_after_forward=True)
        return fully_shard(model, mesh=mesh), wrapped

    def whole(model, wrap, **options):
        wrapped = wrap(model)
        return fully_shard(wrapped, mesh=mesh, **options), [wrapped]

    def layers_before(model, wrap):
        for block in model:
            fully_shard(block, mesh=mesh)
        return whole(model, wrap)

    def first_kind(model, wrap):
        wrapped = wrap(model)
        return FullyShardedDataParallel(wrapped, device_id=torch.device("cpu")), [wrapped]

    def first_kind_inside(model, wrap):
        wrapped = wrap(FullyShardedDataParallel(model, device_id=torch.device("cpu")))
        return wrapped, [wrapped]

    return {"whole": (whole, True), "whole, resharded": (lambda m, w: whole(m, w, reshard_after_forward=True), True),
            "by blocks": (by_blocks, True), "layers before": (layers_before, False),
            "FSDP1": (first_kind, True), "FSDP1 inside": (first_kind_inside, False)}


def train(rank, form, wrap):
    """Losses, gradients' norms, and the weights after some steps; and what the wrappers counted."""
    torch.manual_seed(0)
    model, wrapped = form(nn.Sequential(Block(), Block()), wrap)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.randn(4, 6, generator=generator)), torch.ones(4, 6))
        loss.backward()
        seen += [loss.detach()] + [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                                   for p in model.parameters()]
        optimizer.step()
    seen += [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    return seen, [onnxtrain.stats(m) for m in wrapped if isinstance(m, ORTModule)]


def worker(rank, port, queue):
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", rank=rank, world_size=WORLD)
        for name, (form, engine) in forms(dist.device_mesh.init_device_mesh("cpu", (WORLD,))).items():
            want, _ = train(rank, form, lambda m: m)
            got, counts = train(rank, form, ORTModule)
            assert len(got) == len(want), name
            for i, (a, b) in enumerate(zip(got, want)):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}, {i}: {text}")
            for each in counts:
                ran = each["engine_steps"], each["fallback_steps"]
                assert ran == ((STEPS, 0) if engine else (0, STEPS)), (name, each)
                assert engine or "already sharded" in each["reasons"][0] and "ORTModule first" in each["reasons"][0]
        dist.destroy_process_group()
        queue.put(None)
    except BaseException:
        queue.put(traceback.format_exc())


def test_sharded_weights():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(rank, port, queue)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    errors = [queue.get(timeout=280) for _ in processes]
    for process in processes:
        process.join(30)
    assert errors == [None] * WORLD, "\n".join(filter(None, errors))


def test_a_class_of_the_wrapper_is_not_the_modules():
    """What fully_shard does: the wrapped module keeps its class, and walks over modules find the wrapper first."""
    inner = nn.Sequential(nn.Linear(4, 4))
    model = ORTModule(inner)
    assert next(iter(model.modules())) is inner
    model.__class__ = type("Sharded", (type(model),), {})
    assert type(inner) is nn.Sequential and isinstance(model, ORTModule) and type(model).__name__ == "Sharded"
    assert list(model.modules()) == [model, inner[0]]
    assert [name for name, _ in model.named_modules()] == ["", "0"]
    model(torch.randn(2, 4)).sum().backward()
    assert onnxtrain.stats(model)["engine_steps"] == 1


def test_a_parameter_that_is_no_plain_tensor_is_said():
    from torch.testing._internal.two_tensor import TwoTensor

    inner = nn.Linear(4, 4)
    inner.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    model = ORTModule(inner)
    with torch.no_grad():
        model(torch.ones(2, 4))
    (reason,) = onnxtrain.stats(model)["reasons"]
    assert "parameter weight is a TwoTensor" in reason
