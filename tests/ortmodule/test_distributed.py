"""DistributedDataParallel around ORTModule: two gloo processes, gradients and weights equal to eager's under DDP."""

import copy
import gc
import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import onnxtrain
from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
WORLD = 2


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Net(nn.Module):
    def __init__(self, custom=False, unused=True):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)
        self.custom = custom
        if unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, x):
        h = F.gelu(self.norm(self.first(x)))
        return self.second(Twice.apply(h) if self.custom else h)


def train(rank, module, wrap, **options):
    """Losses and weights after some steps, with accumulation under no_sync."""
    torch.manual_seed(0)
    inner = wrap(module)
    model = DistributedDataParallel(inner, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        for accumulate in (False,) if "static_graph" in options else (True, False):  # torch has no no_sync() for those
            x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
            if accumulate:
                with model.no_sync():
                    F.cross_entropy(model(x), y).backward()
            else:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return inner, losses, [p.detach().clone() for p in module.parameters()]


def worker(rank, port, queue):
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=WORLD)
        search = {"find_unused_parameters": True}
        cases = [(search, False, True), (search, True, True),
                 (search | {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}, False, True),
                 ({"broadcast_buffers": False}, False, False),
                 ({"static_graph": True, "bucket_cap_mb": 0.001}, False, False)]
        for options, custom, unused in cases:
            torch.manual_seed(0)
            module = Net(custom, unused)
            _, want, weights = train(rank, copy.deepcopy(module), lambda m: m, **options)
            inner, got, ours = train(rank, module, ORTModule, **options)
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-5)
            for a, b in zip(ours, weights):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
            counts = onnxtrain.stats(inner)
            assert (counts["fallback_steps"] == 0 and counts["engine_steps"] == (3 if "static_graph" in options
                                                                                 else 6)), counts
            gathered = [torch.empty_like(ours[0]) for _ in range(WORLD)]
            dist.all_gather(gathered, ours[0])
            assert torch.equal(gathered[0], gathered[1])
        queue.put((rank, None))
        dist.barrier()
        gc.collect()  # no reducer outlives the group, see test_managed_gradients.py
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  the parent raises it
        queue.put((rank, traceback.format_exc()))


def test_two_processes():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(rank, port, queue)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            rank, error = queue.get(timeout=300)
            assert error is None, f"rank {rank}: {error}"
    finally:
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.terminate()
