"""The GPU benchmark's logic on the CPU: counts of products, tables, goals, and every part of it at a small size."""

from __future__ import annotations

import os
import random
import time

import gpu
import pytest
import torch
from seeds import drawn_seed
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("name", gpu.TASKS)
def test_products_are_counted_as_torch_counts_them(name):
    torch.manual_seed(0)
    task = gpu.TASKS[name](tiny=True)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        task.loss(task.module, *task.batch).backward()
    assert task.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_the_largest_models_have_the_sizes_that_their_names_say():
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in gpu.TASKS[name](tiny=False).module.parameters())
                 for name in ("gpt2", "bert", "llama")}
    assert sizes["gpt2"] == 124439808 and 1.2e9 < sizes["llama"] < 1.3e9 and 1.08e8 < sizes["bert"] < 1.4e8, sizes


def test_a_table_states_rates_and_shares():
    task = gpu.TASKS["gpt2"](tiny=True)._replace(tokens=1000, flops=7.9e12)
    lines = gpu.table("gpt2", task, {"onnxtrain": (0.02, 2**31), "eager": (0.03, 2**32)})
    assert lines[2].split() == ["onnxtrain", "20.000", "50000", "395.0", "50.0%", "2.00", "1.00", "x"]
    assert lines[3].split() == ["eager", "30.000", "33333", "263.3", "33.3%", "4.00", "1.50", "x"]


def test_goals_that_are_missed_are_named():
    assert not gpu.missed("gpt2", {"onnxtrain": (1.0, 0), "eager": (1.5, 0), "compile": (1.2, 0),
                                   "max-autotune": (1.11, 0)})
    found = gpu.missed("gpt2", {"onnxtrain": (1.0, 0), "eager": (1.4, 0), "compile": (1.2, 0),
                                "max-autotune": (1.0, 0)})
    assert found == ["gpt2: 1.40 x eager, the goal is 1.45", "gpt2: 1.00 x max-autotune, the goal is 1.1"]
    assert gpu.missed("gpt2", {"eager": (1.0, 0)}) == ["gpt2: onnxtrain did not run"]


def failures(printed: str) -> list[str]:
    """All lines but the one that says at the start how a module runs."""
    return [line for line in printed.splitlines() if not line.startswith("ORTModule: ")
            or " runs in the engine: " not in line]


def test_every_part_runs(capsys):
    """With one of the models, which the seed names; all with ONNXTRAIN_SLOW=1.
    tests/cuda/models.py trains them as well.
    """
    seed = drawn_seed()
    names = (list(gpu.TASKS) if os.environ.get("ONNXTRAIN_SLOW") == "1"
             else random.Random(seed).sample(list(gpu.TASKS), 1))
    print(f"seed {seed}: {names}")
    gpu.main(["--device", "cpu", "--tiny", "--rounds", "2", "--kinds", "onnxtrain,eager", "--limit", "300", "--model",
              *names])
    printed = capsys.readouterr()
    assert not failures(printed.err), printed.err
    for name in names:
        assert f"\n{name}: " in printed.out
    assert (printed.out.count("onnxtrain ") >= len(names) + 1 and "GB/s" in printed.out and "microseconds of CPU"
            in printed.out)


def test_kernels_of_a_step_are_listed(capsys):
    """Of ours and of eager; on the CPU, torch's operators."""
    assert not gpu.main(["--device", "cpu", "--tiny", "--kernels", "--kinds", "onnxtrain,eager", "--model", "gpt2"])
    printed = capsys.readouterr()
    assert not failures(printed.err), printed.err
    tables = printed.out.split("kernels of different names")
    assert len(tables) == 3 and all("calls  kernel" in table and table.count("\n") > 6 for table in tables[1:])
    assert all("aten::_fused_adamw_" in table for table in tables[1:])
    assert "/MatMul" in tables[1] and "/MatMul" not in tables[2]  # ours, by the names of nodes


def test_a_table_of_kernels_sums_up_the_rest():
    lines = gpu.kernel_table("eager", [(f"kernel {n}", 30.0 - n, n + 1) for n in range(27)])
    assert lines[0] == "  eager: 27 kernels of different names" and len(lines) == 2 + 25 + 2
    assert lines[2].split() == ["30.000", "1", "kernel", "0"]
    assert lines[-2].split() == ["9.000", "53", "the", "others"]
    assert lines[-1].split() == ["459.000", "378", "all"]


def test_a_kind_that_takes_too_long_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "wrapped", lambda kind, module: module)
    slow = [False, True]
    monkeypatch.setattr(gpu, "warm_up", lambda model, step: time.sleep(60) if slow.pop(0) else None)
    found = gpu.measure(gpu.TASKS["gpt2"](tiny=True), ("eager", "max-autotune"), 1, "cpu", 1)
    assert (list(found) == ["eager"] and "max-autotune failed: TimeoutError: not ready after 1 seconds"
            in capsys.readouterr().err)


def test_a_step_that_pytorch_ran_is_no_step_of_ours(monkeypatch):
    model = gpu.ORTModule(torch.nn.Linear(2, 2))
    monkeypatch.setattr(gpu._report, "stats", lambda module: {"fallback_steps": 3, "reasons": ["an operator"]})
    with pytest.raises(RuntimeError, match="PyTorch ran 3 of the steps: .*an operator"):
        gpu.warm_up(model, lambda: None)
