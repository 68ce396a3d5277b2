"""One process of test_deepspeed.py: trains a small model under ZeRO in every way, and saves what it saw.

    python zero_worker.py OUT      (RANK, WORLD_SIZE, MASTER_PORT as usual)
"""

from __future__ import annotations

import itertools
import sys

import deepspeed
import deepspeed.comm
import torch
from deepspeed.accelerator import get_accelerator

from onnxtrain.optim import AdamWMode, FusedAdam
from onnxtrain.optim.fp16_optimizer import FP16_Optimizer

STEPS, BAD = 14, 6  # the gradients of step BAD overflow on the last process only


KINDS, STAGES, INNER = ("bf16", "fp16", "fp16 static"), (1, 2), ("torch", "ours")


def train(kind: str, stage: int, inner: str, wrapped: bool) -> dict:
    rank = deepspeed.comm.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5), torch.nn.Tanh(),
                                torch.nn.Linear(5, 1))
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    if inner == "ours":
        optimizer = FusedAdam(groups, lr=2e-2, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH)
    else:
        optimizer = torch.optim.AdamW(groups, lr=2e-2)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.3,
              "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
              "steps_per_print": 10**9, kind.removesuffix(" static"): {"enabled": True}}
    if kind == "fp16":
        config["fp16"].update(initial_scale_power=10, loss_scale_window=4, hysteresis=1)
    elif kind == "fp16 static":
        config["fp16"].update(loss_scale=64)
    engine, zero, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    calls = []
    if wrapped:
        assert FP16_Optimizer(zero) is zero and zero._onnxtrain_patched
        if inner == "ours":
            plain = optimizer._run
            optimizer._run = lambda limit, factor: calls.append(factor) or plain(limit, factor)
    generator = torch.Generator().manual_seed(rank + 1)
    seen = []
    for step in range(STEPS):
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            x = torch.randn(4, 10, generator=generator).to(zero.dtype)
            loss = (engine(x) - x[:, :1]).float().pow(2).mean()
            if step == BAD and rank == 1:
                loss = loss * float("inf")
            engine.backward(loss)
            engine.step()
        norm = zero._global_grad_norm
        seen.append({"loss": loss.item(), "scale": float(zero.loss_scale), "norm": float(norm),
                     "overflow": bool(zero.overflow),
                     "changed": any(not torch.equal(p, b) for p, b in zip(model.parameters(), before))})
    masters = [p.detach().clone() for p in zero.single_partition_of_fp32_groups]
    return {"seen": seen, "params": [p.detach().clone() for p in model.parameters()], "masters": masters,
            "calls": calls}


def main(out: str) -> None:
    get_accelerator().is_fp16_supported = lambda: True  # slow on most CPUs, but right
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    results = {case: train(*case) for case in itertools.product(KINDS, STAGES, INNER, (False, True))}
    torch.save(results, f"{out}.{deepspeed.comm.get_rank()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
