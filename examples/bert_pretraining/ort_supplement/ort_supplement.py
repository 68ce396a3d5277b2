"""ORTTrainer for BERT's pre-training: process, description, trainer, rate, step. run_pretraining_ort.py calls these.

`args` is what that script's options parse to.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor

import onnxtrain.compat.onnxruntime  # noqa: F401

# isort: split
from onnxruntime.capi._pybind_state import (
    get_mpi_context_local_rank,
    get_mpi_context_world_rank,
    get_mpi_context_world_size,
)
from onnxruntime.capi.ort_trainer import IODescription, LossScaler, ModelDescription, ORTTrainer

NOT_DECAYED = ("bias", "gamma", "beta", "LayerNorm")


def setup_onnxruntime_with_mpi(args: argparse.Namespace) -> torch.device:
    """Sets local_rank, world_rank, world_size and n_gpu of args, as mpirun or torchrun has told this process. The
    device: a GPU of this process's, or the CPU.
    """
    args.world_rank, args.world_size = get_mpi_context_world_rank(), get_mpi_context_world_size()
    args.local_rank = get_mpi_context_local_rank()
    gpus = torch.cuda.device_count()
    args.local_rank = args.local_rank % gpus if gpus else args.local_rank
    args.n_gpu = 1
    if not gpus:
        return torch.device("cpu")
    torch.cuda.set_device(args.local_rank)
    total = torch.cuda.get_device_properties(args.local_rank).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_memory_limit_gb * 2**30 / total))
    return torch.device("cuda", args.local_rank)


def bert_model_description(args: argparse.Namespace) -> ModelDescription:
    """Four inputs [batch, sequence] and next_sentence_labels [batch], int64, and the loss."""
    tokens = ["batch", "sequence"]
    inputs = [IODescription(name, tokens, torch.int64, num_classes=classes) for name, classes in
              (("input_ids", args.vocab_size), ("segment_ids", 2), ("input_mask", 2),
               ("masked_lm_labels", args.vocab_size))]
    inputs.append(IODescription("next_sentence_labels", ["batch"], torch.int64, num_classes=2))
    return ModelDescription(inputs, [IODescription("loss", [], torch.float32)])


def optimizer_attributes(name: str) -> dict[str, Any]:
    """LAMB's, of one weight."""
    return {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-6, "do_bias_correction": False,
            "lambda": 0.0 if any(part in name for part in NOT_DECAYED) else 0.01}


def create_ort_trainer(args: argparse.Namespace, device: torch.device, model: torch.nn.Module) -> ORTTrainer:
    """Raises onnxtrain.UnsupportedError where the trainer cannot do what args ask for."""
    if args.fp16:
        scale = args.loss_scale or float(1 << 20)
        args.ort_loss_scale = LossScaler("loss_scale_input_name", args.loss_scale == 0, loss_scale=scale,
                                         up_scale_window=2000)
    return ORTTrainer(
        model, None, bert_model_description(args), "LambOptimizer", optimizer_attributes,
        IODescription("Learning_Rate", [1], torch.float32), device,
        gradient_accumulation_steps=args.gradient_accumulation_steps, world_rank=args.world_rank,
        world_size=args.world_size, use_mixed_precision=args.fp16,
        allreduce_post_accumulation=args.allreduce_post_accumulation,
        deepspeed_zero_stage=1 if args.deepspeed_zero_stage else 0, _opset_version=12)


def warmup_poly(x: float, warmup: float) -> float:
    return x / warmup if x < warmup else max(0.0, 1.0 - x) ** 0.5


def warmup_constant(x: float, warmup: float) -> float:
    return x / warmup if x < warmup else 1.0


def warmup_linear(x: float, warmup: float) -> float:
    return x / warmup if x < warmup else max((x - 1.0) / (warmup - 1.0), 0.0)


def warmup_cosine(x: float, warmup: float) -> float:
    return x / warmup if x < warmup else 0.5 * (1.0 + math.cos(math.pi * x))


SCHEDULES = {"warmup_poly": warmup_poly, "warmup_constant": warmup_constant, "warmup_linear": warmup_linear,
             "warmup_cosine": warmup_cosine}


def get_lr(args: argparse.Namespace, training_steps: int, schedule: str = "warmup_poly") -> float:
    """The rate of the update that follows so many; with max_steps -1 the same for all."""
    if args.max_steps == -1:
        return args.learning_rate
    return args.learning_rate * SCHEDULES[schedule](training_steps / args.max_steps, args.warmup_proportion)


def run_ort_training_step(args: argparse.Namespace, global_step: int, training_steps: int, model: ORTTrainer,
                          batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """One step, and at the last of an accumulation the update.

    Args:
        global_step: updates so far, this one not counted.
        training_steps: steps so far, this one counted.
        batch: input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels.

    Returns:
        The loss, and updates so far. One that is left out for gradients that are not finite does not count.
    """
    extra = [torch.tensor([get_lr(args, global_step, args.schedule)])]
    if args.fp16:
        extra.append(torch.tensor([args.ort_loss_scale.loss_scale_]))
    found = model.train_step(*batch, *extra)
    loss, finite = (found[0], bool(found[1])) if isinstance(found, list) else (found, True)
    if training_steps % args.gradient_accumulation_steps == 0:
        if args.fp16:
            args.ort_loss_scale.update_loss_scale(finite)
        global_step += finite
    return loss, global_step
