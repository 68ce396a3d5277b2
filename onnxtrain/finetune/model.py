"""The model: how it is loaded, and what memory and time it needs."""

from __future__ import annotations

import time
from typing import Any

import torch

from onnxtrain import _C
from onnxtrain.finetune.files import FinetuneError
from onnxtrain.utils.torch_profile_utils import memory_of_the_process

GB = 2**30  # as ORTMODULE_MEMORY_OPT_BUDGET has it
_SHARE = 0.7  # see docs/finetune.md
_BEYOND = 0.4 * GB  # what Trainer's own capture and programs of other lengths take beside a step that was planned


def load(name: str, base: str) -> Any:
    """The model without adapters.

    Raises FinetuneError where transformers cannot load it.
    """
    import transformers

    dtype = torch.float32 if base == "float32" else torch.bfloat16
    settings: dict[str, Any] = {"dtype": dtype}
    if base == "nf4":
        settings |= {"device_map": {"": "cpu"}, "quantization_config": transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)}
    model = loaded(transformers.AutoModelForCausalLM, name, **settings)
    if base == "nf4":  # what stays in the file would keep all of it mapped, which counts as the process's memory
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.clone()
    model.config.use_cache = False
    return model


def loaded(kind: Any, name: str, **settings: Any) -> Any:
    try:
        return kind.from_pretrained(name, **settings)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise FinetuneError(f"{name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def multiplies_bfloat16() -> bool:
    """Whether the engine multiplies bfloat16 here; otherwise it does so in float32."""
    return bool(_C.build_info()["bfloat16_products"])


def choose_level(model: Any, batch: dict[str, torch.Tensor], limit: int) -> int:
    """The fastest memory level whose steps of this batch fit in a limit, in bytes, of the whole process. One step runs
    at the smallest level; the others are planned.

    Raises FinetuneError where none fits.
    """
    from onnxtrain import memory_report
    from onnxtrain._export.state import random_unchanged
    from onnxtrain.ortmodule import ORTModule

    wrapped = ORTModule(model.train(), outputs="loss")
    wrapped._runtime.memory_optimization_level = 2
    with random_unchanged():
        wrapped(**batch).loss.backward()
    model.zero_grad()
    try:
        report = memory_report(wrapped)
    except RuntimeError as error:  # says why the model does not run in the engine
        raise FinetuneError(f"--memory: {error}") from None
    states = 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)  # two moments and a gradient
    rest = memory_of_the_process()["resident"] - report.slab_bytes + states + _BEYOND
    fits = [level for level, (size, _) in report.levels.items() if rest + size <= limit]
    if not fits:
        least = rest + min(size for size, _ in report.levels.values())
        raise FinetuneError(f"a step needs {least / GB:.1f} GB, more than --memory: a smaller batch or --max-length, "
                            "or --base nf4, needs less")
    level = min(fits, key=lambda each: (report.levels[each][1], each))
    size, share = report.levels[level]
    print(f"memory level {level}: about {(rest + size) / GB:.1f} GB; backward repeats {share:.0%} of a step's work")
    return level


def rate(model: Any) -> float:
    """Tokens a second that training may reach: a token is multiplied by the weights of all linear layers, there and
    back, at _SHARE of the rate of a square product.
    """
    dtype, size = next(p.dtype for p in model.parameters() if p.is_floating_point()), 2048
    square, times = torch.ones(size, size, dtype=dtype), []
    for _ in range(4):
        start = time.perf_counter()
        square @ square
        times.append(time.perf_counter() - start)
    weights = sum(each.in_features * each.out_features for each in model.modules() if isinstance(each, torch.nn.Linear))
    return float(_SHARE * 2 * size**3 / min(times) / (4 * weights))
