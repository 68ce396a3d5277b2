"""Pre-trains BERT on ORTTrainer, phase 1 (short sequences) or phase 2 (--phase2), on the HDF5 files of bertPrep.py.

README.md says what it writes. A run that goes on from a checkpoint continues bit for bit: weights, moments, place in
the data and random state are in it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hdf5_data import PretrainingFile, file_of, training_files
from logs import Log
from modeling import BertConfig, BertForPreTraining
from ort_supplement import ort_supplement
from tqdm import tqdm

KEPT = 3  # checkpoints


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--input_dir", required=True, help="a folder of HDF5 files; those with 'training' in their names are read")
    add("--config_file", required=True, help="bert_config.json")
    add("--output_dir", type=Path, required=True, help="for checkpoints")
    add("--bert_model", default="bert-large-uncased", help="no effect: config_file says it")
    add("--init_checkpoint", help="weights to start from")
    add("--max_seq_length", type=int, default=512, help="tokens of an instance, as in the files")
    add("--max_predictions_per_seq", type=int, default=80, help="masked tokens of an instance, at most")
    add("--train_batch_size", type=int, default=32, help="sequences of an update of one process")
    add("--learning_rate", type=float, default=5e-5)
    add("--num_train_epochs", type=float, default=3.0, help="no effect: max_steps ends a run")
    add("--max_steps", type=float, default=1000, help="updates of the phase")
    add("--warmup_proportion", type=float, default=0.01)
    add("--local_rank", type=int, default=-1, help="no effect: MPI says it")
    add("--seed", type=int, default=42)
    add("--gradient_accumulation_steps", type=int, default=1, help="divides train_batch_size")
    add("--fp16", action="store_true", help="mixed precision")
    add("--loss_scale", type=float, default=0.0, help="0: dynamic")
    add("--log_freq", type=float, default=1.0, help="updates from one line to the next")
    add("--checkpoint_activations", action="store_true", help="compute again in backward instead of keeping")
    add("--resume_from_checkpoint", action="store_true")
    add("--resume_step", type=int, default=-1, help="-1: the last checkpoint")
    add("--num_steps_per_checkpoint", type=int, default=100)
    add("--skip_checkpoint", action="store_true", help="write none")
    add("--phase2", action="store_true")
    add("--phase1_end_step", type=int, default=7038)
    add("--allreduce_post_accumulation", action="store_true", help="processes exchange gradients once an update")
    add("--allreduce_post_accumulation_fp16", action="store_true", help="no effect")
    add("--do_train", action="store_true", help="has to be there")
    add("--use_env", action="store_true", help="no effect")
    add("--disable_progress_bar", action="store_true")
    add("--json-summary", default="dllogger.json")
    add("--tensorboard_dir", help="for TensorBoard, if it is installed")
    add("--use_ib", action="store_true", help="no effect")
    add("--gpu_memory_limit_gb", type=float, default=32)
    add("--schedule", default="warmup_poly", choices=list(ort_supplement.SCHEDULES))
    add("--deepspeed_zero_stage", action="store_true", help="share the optimizer's state among processes")
    args = parser.parse_args(given)
    if not args.do_train:
        parser.error("--do_train has to be given: this script does nothing else")
    steps = args.gradient_accumulation_steps
    if steps < 1:
        raise ValueError(f"gradient_accumulation_steps is {steps}, expected at least 1")
    if args.train_batch_size < steps or args.train_batch_size % steps:
        raise ValueError(f"train_batch_size {args.train_batch_size} is no multiple of gradient_accumulation_steps "
                         f"{steps}")
    return args


# ---- checkpoints ----

def complete(args: argparse.Namespace, step: int) -> bool:
    """Whether every process has written its file: one that was killed then has not."""
    ranks = range(args.world_size if args.deepspeed_zero_stage else 1)
    return all(checkpoint_path(args, step, rank).exists() for rank in ranks)


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(found[1]) for path in folder.glob("ckpt_*.pt") if (found := re.fullmatch(r"ckpt_(\d+)\.pt",
                                                                                            path.name)))


def checkpoint_path(args: argparse.Namespace, step: int, rank: int) -> Path:
    """With ZeRO each process has its own part of the state, and so its own file."""
    part = f".rank{rank}" if args.deepspeed_zero_stage and rank else ""
    return args.output_dir / f"ckpt_{step}.pt{part}"


def save_whole(value: dict[str, Any], path: Path) -> None:
    fresh = path.with_name(f".{path.name}.part")
    torch.save(value, fresh)
    fresh.replace(path)


def save_checkpoint(args: argparse.Namespace, step: int, content: dict[str, Any]) -> None:
    """Written by the first process, or by each with ZeRO; older ones than the last three go."""
    if args.world_rank and not args.deepspeed_zero_stage:
        return
    save_whole(content, checkpoint_path(args, step, args.world_rank))
    if args.world_rank == 0:
        for old in checkpoint_steps(args.output_dir)[:-KEPT]:
            for path in args.output_dir.glob(f"ckpt_{old}.pt*"):
                path.unlink()


def load_checkpoint(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The last checkpoint of which all files are there, and its step, which counts phase 1 too.

    Raises:
        FileNotFoundError: there is none.
    """
    steps = [step for step in checkpoint_steps(args.output_dir) if complete(args, step)]
    step = args.resume_step if args.resume_step != -1 else steps[-1] if steps else -1
    path = checkpoint_path(args, step, args.world_rank)
    if not path.exists():
        raise FileNotFoundError(f"{args.output_dir} has no checkpoint {path.name if step >= 0 else ''} to go on from")
    return torch.load(path, map_location="cpu", weights_only=True), step


# ---- a run ----

class Place:
    """Where in the data a process is: turn of files, batches of the present file, epochs."""

    def __init__(self, files: list[str], turn: int = 0, batch: int = 0, epoch: int = 0) -> None:
        self.files, self.turn, self.batch, self.epoch = files, turn, batch, epoch


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_at(args: argparse.Namespace, updates: int) -> None:
    """Of several processes' random states a checkpoint has one: each begins anew there, with numbers of its own."""
    seed_everything(args.seed + args.world_rank + args.world_size * updates)


def prepare(args: argparse.Namespace) -> tuple[BertForPreTraining, Any, Place, int, torch.device]:
    """The model, its trainer, where to go on in the data, updates of this phase so far, and the device.

    Raises:
        ValueError: there are checkpoints, and nobody asked to go on.
    """
    device = ort_supplement.setup_onnxruntime_with_mpi(args)
    seed_everything(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if not args.resume_from_checkpoint and checkpoint_steps(args.output_dir):
        raise ValueError(f"{args.output_dir} has checkpoints: go on with --resume_from_checkpoint, or take another "
                         "folder")
    config = BertConfig.from_json(args.config_file).padded()
    if args.max_seq_length > config.max_position_embeddings:
        raise ValueError(f"max_seq_length is {args.max_seq_length}, and the model has {config.max_position_embeddings} "
                         "positions")
    args.vocab_size = config.vocab_size
    model = BertForPreTraining(config, args.max_predictions_per_seq)
    if args.init_checkpoint:
        found = torch.load(args.init_checkpoint, map_location="cpu", weights_only=True)
        found = found.get("model", found)
        wrong = model.load_state_dict({name: value for name, value in found.items() if name in model.state_dict()},
                                      strict=False)
        print(f"{args.init_checkpoint}: {len(model.state_dict()) - len(wrong.missing_keys)} weights loaded; not in it: "
              f"{', '.join(wrong.missing_keys) or 'none'}")
    if args.checkpoint_activations:
        os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] = "1"
    trainer = ort_supplement.create_ort_trainer(args, device, model)
    files = training_files(args.input_dir, args.seed)
    seed_everything(args.seed + args.world_rank)
    if not args.resume_from_checkpoint:
        return model, trainer, Place(files), 0, device
    found, step = load_checkpoint(args)
    step -= args.phase1_end_step if args.phase2 else 0
    if step < 0:
        raise ValueError(f"the last checkpoint is of step {step + args.phase1_end_step}: phase 1 ends at step "
                         f"{args.phase1_end_step} (--phase1_end_step)")
    trainer.load_state_dict(found["model"], strict=False)
    if args.phase2 and step == 0:  # other data
        return model, trainer, Place(files), 0, device
    if args.fp16:
        args.ort_loss_scale.loss_scale_, args.ort_loss_scale.stable_steps_ = found["loss_scale"]
    if args.world_size > 1:
        seed_at(args, step)
    else:
        torch.set_rng_state(found["random"])
        if device.type == "cuda" and "random_cuda" in found:
            torch.cuda.set_rng_state(found["random_cuda"])
    return model, trainer, Place(found["files"][1:], found["files"][0], found["batch"], found["epoch"]), step, device


def content_of(args: argparse.Namespace, trainer: Any, place: Place, device: torch.device) -> dict[str, Any]:
    scaler = getattr(args, "ort_loss_scale", None)
    return {"model": trainer.state_dict(), "files": [place.turn, *place.files], "batch": place.batch,
            "epoch": place.epoch, "random": torch.get_rng_state(),
            **({"random_cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else {}),
            **({"loss_scale": (scaler.loss_scale_, scaler.stable_steps_)} if scaler else {})}


class Progress:
    """Losses and times since the last line; prints and logs."""

    def __init__(self, args: argparse.Namespace, log: Log, updates: int) -> None:
        self._args, self._log, self._from = args, log, updates
        self._losses: list[torch.Tensor] = []
        self.start = self._since = time.time()
        self.last_loss = float("nan")

    def add(self, loss: torch.Tensor) -> None:
        self._losses.append(loss)

    def line(self, epoch: int, updates: int, shown: int) -> None:
        """After an update; `shown` is its number in the log."""
        args = self._args
        if updates % max(1, round(args.log_freq)):
            return
        now, count = time.time(), updates - self._from
        print(f"throughput =  {count * args.train_batch_size / max(now - self._since, 1e-9):.4f} seq/sec", flush=True)
        self.last_loss = float(torch.stack(self._losses).mean())
        steps = self._losses[-args.gradient_accumulation_steps:]
        self._log((epoch, shown), {
            "average_loss": self.last_loss, "step_loss": float(torch.stack(steps).mean()),
            "learning_rate": ort_supplement.get_lr(args, updates - 1, args.schedule)})
        self._losses, self._since, self._from = [], now, updates


def train(args: argparse.Namespace) -> None:
    _, trainer, place, updates, device = prepare(args)
    if updates >= args.max_steps:
        print(f"nothing to do: {updates} of {args.max_steps:g} updates are done")
        return
    log = Log(Path(args.json_summary), args.world_rank, args.tensorboard_dir)
    for name, value in (("Config", str(vars(args))), ("SEED", args.seed), ("train_start", True),
                        ("batch_size_per_gpu", args.train_batch_size), ("learning_rate", args.learning_rate)):
        log("PARAMETER", {name: value})
    micro = args.train_batch_size // args.gradient_accumulation_steps
    offset = args.phase1_end_step if args.phase2 else 0
    before = updates
    steps = updates * args.gradient_accumulation_steps
    progress = Progress(args, log, updates)

    def save() -> None:
        if not args.skip_checkpoint:
            log("PARAMETER", {"checkpoint_step": updates + offset})
            save_checkpoint(args, updates + offset, content_of(args, trainer, place, device))
            if args.world_size > 1:
                seed_at(args, updates)

    bar = tqdm(total=int(args.max_steps), initial=updates, disable=args.disable_progress_bar or args.world_rank > 0)
    idle = 0  # files in a row without a whole batch
    while updates < args.max_steps:
        path = file_of(place.files, place.turn, args.world_rank, args.world_size)
        data = PretrainingFile(path, args.max_predictions_per_seq)
        if data.batch(torch.tensor([0]))[0].size(1) != args.max_seq_length:
            raise ValueError(f"{path}: instances do not have {args.max_seq_length} tokens (--max_seq_length)")
        idle = idle + 1 if len(data) < micro else 0
        if idle > len(place.files):
            raise ValueError(f"{args.input_dir}: no file has {micro} instances, which is one batch")
        order = args.seed + place.turn * args.world_size + args.world_rank
        for batch in data.batches(micro, order, place.batch):
            place.batch += 1
            steps += 1
            done = updates
            loss, updates = ort_supplement.run_ort_training_step(args, updates, steps, trainer, batch)
            progress.add(loss.detach().reshape(()))
            if updates == done:
                continue
            bar.update()
            progress.line(place.epoch, updates, updates + offset)
            if updates < args.max_steps and updates % args.num_steps_per_checkpoint == 0:
                save()
            if updates >= args.max_steps:
                break
        else:
            place.batch = 0
            place.turn += 1
            place.epoch = place.turn * min(args.world_size, len(place.files)) // len(place.files)
    bar.close()
    seconds = time.time() - progress.start
    if args.world_rank == 0:  # before the last checkpoint: a run that goes on from that has nothing to do
        name = "final_bert.onnx" if args.phase2 else "phase1_bert.onnx"
        trainer.save_as_onnx(str(args.output_dir / name))
    save()
    log((), {"e2e_train_time": time.time() - progress.start,
             "training_sequences_per_second": args.train_batch_size * (updates - before) / max(seconds, 1e-9),
             "final_loss": progress.last_loss, "raw_train_time": seconds})
    log.close()


if __name__ == "__main__":
    train(parse_arguments())
