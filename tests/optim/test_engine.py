"""The engine takes the same steps for any cut of the work over tensors, groups and threads."""

from __future__ import annotations

import pytest
import torch
from problem import make_params
from test_stage import MAKERS
from test_step import adamw


def test_thousands_of_tensors_in_groups():
    shapes = [(i % 37 + 1,) for i in range(3000)]
    ours, theirs = make_params(dtype=torch.float64, shapes=shapes), make_params(dtype=torch.float64, shapes=shapes)
    a = adamw([{"params": ours[i::7], "lr": 0.01 * (i + 1)} for i in range(7)])
    b = torch.optim.AdamW([{"params": theirs[i::7], "lr": 0.01 * (i + 1)} for i in range(7)])
    for step in range(3):
        for i, (p, q) in enumerate(zip(ours, theirs)):
            p.grad = q.grad = (None if (i + step) % 11 == 0
                               else torch.sin(torch.arange(p.numel(), dtype=torch.float64) + i))
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_results_do_not_depend_on_threads(name):
    shapes = [(300, 1000), (70_001,), *[(100,)] * 900]
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            params = make_params(0, torch.float32, shapes)
            optimizer = MAKERS[name](params, max_grad_norm=1.0)
            for seed in range(2):
                for i, p in enumerate(params):
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed * 1000 + i))
                optimizer.step()
            results.append([p.detach().clone() for p in params] + [torch.tensor(optimizer.grad_norm)])
        finally:
            torch.set_num_threads(threads)
    for a, b, c in zip(*results):
        assert torch.equal(a, b) and torch.equal(a, c)
