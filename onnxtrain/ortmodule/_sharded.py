"""Whether a module's weights are in pieces on several processes, which its own hooks put together layer by layer.

Only PyTorch's calls of those layers run the hooks, so no graph of the whole can stand for them. Asked by _captured.py
before a capture.
"""

from __future__ import annotations

import sys

import torch

from onnxtrain._torch import is_traceable_wrapper_subclass


def reason(module: torch.nn.Module) -> str | None:
    """Why such a module runs in PyTorch; None where every weight is whole, as inside fully_shard(ORTModule(m))."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
    for name, child in module.named_modules():
        if isinstance(child, kinds):
            return (f"{'its module ' + name if name else 'it'} is already sharded ({type(child).__name__}): wrap the "
                    "module with ORTModule first, then shard the ORTModule")
    for name, parameter in module.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            return f"its parameter {name} is a {type(parameter).__name__}, whose memory the engine cannot read"
    return None
