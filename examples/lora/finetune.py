"""Fine-tunes a causal language model with LoRA by transformers' Trainer, with and without `wrap_trainer`.

    python finetune.py                                                       # a small Llama, on Python's own sources
    python finetune.py --model FOLDER_OR_NAME --data text.txt --block 512 --bf16 --output adapter      # your model
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import peft
import torch
import transformers

import onnxtrain
from onnxtrain.integrations import wrap_trainer


def sources() -> str:
    """Text of the installed Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("a*.py")))


def load(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, and token ids (blocks, block) to train on. Without --model the tokens are bytes."""
    text = args.data.read_text(encoding="utf-8") if args.data else sources()
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model)
        ids = transformers.AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=args.block, bos_token_id=None, eos_token_id=None))
        ids = list(text.encode())
    model.config.use_cache = False
    blocks = torch.tensor(ids[:len(ids) // args.block * args.block]).view(-1, args.block)
    return model, blocks


class Clock(transformers.TrainerCallback):
    """Notes when training begins, and when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.times.append(time.perf_counter())

    on_step_end = on_train_begin


def train(model: torch.nn.Module, blocks: torch.Tensor, args: argparse.Namespace,
          wrap: bool) -> tuple[list[float], list[float], transformers.Trainer]:
    """The losses of all steps, when they began and ended, and the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=args.lr, bf16=args.bf16,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], seed=args.seed,
            disable_tqdm=True, log_level="error", use_cpu=not torch.cuda.is_available())
        rows = [{"input_ids": row, "labels": row} for row in blocks]
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)
        if wrap:
            wrap_trainer(trainer)  # the one line
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], clock.times, trainer


def main(given: list[str] | None = None) -> tuple[list[float], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="what from_pretrained reads; none: a small new Llama")
    parser.add_argument("--data", type=Path, help="text file")
    parser.add_argument("--block", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder for the adapter, which PeftModel.from_pretrained reads")
    args = parser.parse_args(given)
    torch.manual_seed(args.seed)
    model, blocks = load(args)
    whole = None if args.model else ["embed_tokens", "lm_head"]  # a new model has yet to learn these
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=args.rank, target_modules="all-linear",
                                                       modules_to_save=whole))
    model.print_trainable_parameters()
    eager_losses, eager, _ = train(copy.deepcopy(model), blocks, args, wrap=False)
    losses, ours, trainer = train(model, blocks, args, wrap=True)
    print("step    eager  onnxtrain")
    for step in range(0, args.steps, max(args.steps // 10, 1)):
        print(f"{step:4} {eager_losses[step]:8.4f}   {losses[step]:8.4f}")
    counts = onnxtrain.stats(trainer.model_wrapped)
    times = [statistics.median(end - begin for begin, end in zip(ends[1:], ends[2:])) * 1e3 for ends in (eager, ours)]
    print(f"{counts['engine_steps']} of {args.steps} steps ran in the engine; eager {times[0]:.1f} ms a step (median), "
          f"onnxtrain {times[1]:.1f} ms ({times[0] / times[1]:.2f}x)")
    print(f"in all, eager {eager[-1] - eager[0]:.1f} s, onnxtrain {ours[-1] - ours[0]:.1f} s, of which "
          f"{counts['capture_seconds']:.1f} s for capture and export")
    if args.output:
        model.save_pretrained(args.output)
    return eager_losses, losses


if __name__ == "__main__":
    main()
