"""What every process of distributed.py imports; a process without threads does so once, and the others are forks of it."""

import sys

sys.modules["transformers"] = None  # type: ignore[assignment]  # which no scenario needs

import plugin  # noqa: F401  "cuda" is the CPU, the alias, and what the scripts ask the network for
import torch._dynamo
import torch.distributed
import torch.export

import onnxtrain.training.legacy  # noqa: F401

torch.set_num_threads(1)
