"""StatisticsSubscriber: a file of statistics for each activation, direction and step, to compare two runs by."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from onnxtrain.utils.hooks._subscribers import SubscriberBase


def summary(tensor: Tensor, bucket_size: int) -> str:
    """One line for each statistic of a tensor of any shape and dtype, taken over finite entries, in float64.

    Args:
        bucket_size: entries that are converted at a time.
    """
    flat = tensor.reshape(-1)
    parts = flat.split(bucket_size) if flat.numel() else ()
    counts = {"nan": 0, "inf": 0, "zero": 0, "negative": 0, "positive": 0}
    total = squares = 0.0
    low, high, finite = float("inf"), float("-inf"), 0
    for part in parts:
        wide = part.double() if not part.is_complex() else part.abs().double()
        kept = wide[wide.isfinite()]
        for name, flags in (("nan", wide.isnan()), ("inf", wide.isinf()), ("zero", wide == 0), ("negative", wide < 0),
                            ("positive", wide > 0)):
            counts[name] += int(flags.sum())
        if kept.numel():
            total += float(kept.sum())
            low, high = min(low, float(kept.min())), max(high, float(kept.max()))
            finite += kept.numel()
    mean = total / finite if finite else float("nan")
    for part in parts:
        wide = part.double() if not part.is_complex() else part.abs().double()
        squares += float((wide[wide.isfinite()] - mean).square().sum())
    deviation = (squares / (finite - 1)) ** 0.5 if finite > 1 else float("nan")
    lines = [f"shape: {tuple(tensor.shape)}", f"dtype: {tensor.dtype}", f"min: {low:.10g}", f"max: {high:.10g}",
             f"mean: {mean:.10g}", f"std: {deviation:.10g}", *(f"{name}: {count}" for name, count in counts.items())]
    return "\n".join(lines) + "\n"


class StatisticsSubscriber(SubscriberBase):
    """Writes `{output_dir}/step_{step}/{activation}_{forward|backward}`, and their order in `order.txt` there.

    Args:
        output_dir: made where it does not exist.
        start_step, end_step: see SubscriberBase.
        override_output_dir: remove what is in output_dir; an output_dir that exists is an error otherwise.
        run_on_cpu: take a tensor to the CPU before its statistics are taken.
        bucket_size: entries of a tensor that are converted at a time; bounds the memory that this needs.

    Raises:
        FileExistsError: output_dir exists, and override_output_dir is False.
        ValueError: bucket_size is not positive.
    """

    def __init__(self, output_dir: str | os.PathLike[str], start_step: int | None = None, end_step: int | None = None,
                 override_output_dir: bool = False, run_on_cpu: bool = False, bucket_size: int = 1 << 24) -> None:
        super().__init__(start_step, end_step)
        if bucket_size < 1:
            raise ValueError(f"bucket_size is {bucket_size}, expected a positive number")
        self._folder = Path(output_dir)
        if self._folder.exists():
            if not override_output_dir:
                raise FileExistsError(f"Directory {self._folder} exists; set override_output_dir=True to replace it.")
            shutil.rmtree(self._folder)
        self._run_on_cpu, self._bucket_size = run_on_cpu, bucket_size

    def forward_activation(self, name: str, tensor: Tensor, step: int) -> None:
        """Writes its statistics."""
        self._write(f"{name}_forward", tensor, step)

    def backward_activation(self, name: str, gradient: Tensor, step: int) -> None:
        """Writes its statistics."""
        self._write(f"{name}_backward", gradient, step)

    def _write(self, name: str, tensor: Tensor, step: int) -> None:
        folder = self._folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            text = summary(tensor.cpu() if self._run_on_cpu else tensor, self._bucket_size)
        (folder / name).write_text(text, encoding="utf-8")
        with (folder / "order.txt").open("a", encoding="utf-8") as order:
            order.write(f"{name}\n")
