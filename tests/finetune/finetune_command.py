"""`python -m onnxtrain finetune` in this process."""

from __future__ import annotations

import re

from safetensors.torch import load_file

from onnxtrain import finetune


def run(capfd, folder, data, out, *more):
    """The status, and what was printed, mistakes last."""
    status = finetune.main(["--model", str(folder), "--data", str(data), "--out", str(out), "--base", "float32",
                            "--lora_r=4", "--learning-rate", "0.01", "--gradient-accumulation-steps", "2",
                            "--num-train-epochs", "2", *more])
    return status, "".join(capfd.readouterr())


def losses(text):
    return [float(each) for each in re.findall(r"loss ([\d.]+)", text)]


def weights(out):
    return load_file(out / "adapter_model.safetensors")
