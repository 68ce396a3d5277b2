"""Names of the files that DebugOptions(save_onnx=True) writes."""

from __future__ import annotations

import torch


def _get_onnx_file_name(name_prefix: str, name: str, export_mode: torch.onnx.TrainingMode) -> str:
    """`{prefix}_{name}_{training|inference}.onnx`."""
    return f"{name_prefix}_{name}_{'training' if export_mode == torch.onnx.TrainingMode.TRAINING else 'inference'}.onnx"
