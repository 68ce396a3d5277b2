"""One process of test_zero.py: trains a wrapped and a plain module under DeepSpeed's ZeRO, and saves what it saw.

    python zero_engine.py OUT      (RANK, WORLD_SIZE, MASTER_PORT as usual)
"""

from __future__ import annotations

import copy
import sys

import deepspeed
import deepspeed.comm
import torch
import torch.nn as nn
import torch.nn.functional as F

import onnxtrain
from onnxtrain.ortmodule import ORTModule

CASES = [(1, "fp32"), (2, "fp32"), (1, "bf16"), (2, "bf16")]
STEPS = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(20, 16), nn.Linear(16, 33)
        self.norm, self.head = nn.LayerNorm(33), nn.Linear(33, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        scores = self.head(F.gelu(self.norm(self.fc(self.embed(words).mean(1)))))
        return scores if labels is None else F.cross_entropy(scores.float(), labels)


def train(module: nn.Module, stage: int, kind: str, folder: str) -> dict:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
              "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    if kind == "bf16":
        config["bf16"] = {"enabled": True}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config)
    generator = torch.Generator().manual_seed(deepspeed.comm.get_rank() + 1)
    losses, norms = [], []
    for _ in range(STEPS):
        for _ in range(2):
            words = torch.randint(0, 20, (4, 7), generator=generator)
            labels = torch.randint(0, 3, (4,), generator=generator)
            loss = engine(words, labels=labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    weights = [p.detach().float().clone() for p in module.parameters()]
    engine.save_checkpoint(folder, tag="end")
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    engine.load_checkpoint(folder, tag="end")
    same = all(torch.equal(p.detach().float(), w) for p, w in zip(module.parameters(), weights, strict=True))
    return {"losses": losses, "norms": norms, "weights": weights, "restored": same}


def main(out: str) -> None:
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    results = {}
    for stage, kind in CASES:
        torch.manual_seed(0)
        plain = Net()
        wrapped = ORTModule(copy.deepcopy(plain))
        runs = []
        for number, module in enumerate((plain, wrapped)):
            folder = f"{out}-{stage}-{kind}-{number}"
            runs.append(train(module, stage, kind, folder))
        results[stage, kind] = (*runs, onnxtrain.stats(wrapped))
    torch.save(results, f"{out}.{deepspeed.comm.get_rank()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
