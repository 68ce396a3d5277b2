"""`python -m onnxtrain finetune`: LoRA fine-tuning of a language model of transformers, on the processor.

transformers loads the model and has the loop (Trainer), peft the adapters, bitsandbytes the 4-bit weights;
wrap_trainer() puts the engine in. Here are the command's options, its data, what it says, and what it does when it is
interrupted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxtrain._memory import bytes_of
from onnxtrain.finetune import outputs
from onnxtrain.finetune.data import batch_of, read
from onnxtrain.finetune.files import FinetuneError, checkpoints, writing
from onnxtrain.finetune.model import GB, choose_level, load, loaded, multiplies_bfloat16, rate
from onnxtrain.finetune.progress import clock, progress

_NEEDED = "pip install transformers peft"


def parser() -> argparse.ArgumentParser:
    """Options have the names that users of Trainer and peft know, with `-` or with their `_`."""
    made = argparse.ArgumentParser(prog="python -m onnxtrain finetune", description=__doc__.splitlines()[0])

    def add(name: str, **how: Any) -> None:
        made.add_argument(f"--{name}", f"--{name.replace('-', '_')}", **how)

    made.add_argument("--model", required=True, help="a folder, or a name of the hub")
    made.add_argument("--data", required=True, type=Path, help="JSON lines, each an object with text, with messages "
                      "(role and content), or with prompt and completion, of which the completion is learnt")
    made.add_argument("--out", required=True, type=Path, help="a folder for the adapter, and for checkpoints")
    for form in ("merged", "gguf", "onnx"):
        made.add_argument(f"--{form}", type=Path, help="a folder for the model with the adapter in its weights, as "
                          + {"merged": "transformers has it", "gguf": "GGUF", "onnx": "ONNX"}[form])
    made.add_argument("--base", choices=("auto", "bfloat16", "nf4", "float32"), default="auto",
                      help="of the frozen weights; auto: bfloat16 where the processor multiplies it, else float32")
    made.add_argument("--memory", help="such as 8GB: the fastest memory level whose steps fit, with the weights")
    for name, default, text in (
            ("lora-r", 16, "rank"), ("max-length", 1024, "tokens of an example, at most"), ("seed", 42, ""),
            ("per-device-train-batch-size", 1, "examples of a step"), ("gradient-accumulation-steps", 8, ""),
            ("max-steps", -1, "updates; -1: as epochs have it"), ("save-steps", 100, "updates between checkpoints")):
        add(name, type=int, default=default, help=text)
    for name, number, text in (("lora-alpha", 32.0, "the adapter counts by alpha / r"), ("lora-dropout", 0.0, ""),
                               ("learning-rate", 2e-4, ""), ("num-train-epochs", 1.0, ""), ("warmup-steps", 0.0, "")):
        add(name, type=float, default=number, help=text)
    add("target-modules", default="all-linear", help="names of layers, with commas")
    add("modules-to-save", help="names of layers that are trained themselves, with commas")
    add("use-dora", action="store_true", help="weights by direction and length (DoRA)")
    add("use-rslora", action="store_true", help="the adapter counts by alpha / sqrt(r)")
    add("lr-scheduler-type", default="cosine")
    return made


def train(args: argparse.Namespace) -> None:
    """Trains, and writes the adapter and what else is asked for.

    Raises FinetuneError for what the user has to change.
    """
    try:
        import peft
        import transformers
    except ImportError as error:
        raise FinetuneError(f"finetune needs {error.name}: {_NEEDED}") from None
    from onnxtrain.integrations import wrap_trainer

    transformers.set_seed(args.seed)
    if args.base == "auto":
        args.base = "bfloat16" if multiplies_bfloat16() else "float32"
    try:
        limit = bytes_of(args.memory) if args.memory else None
    except ValueError as error:
        raise FinetuneError(f"--memory: {error}") from None
    tokenizer = loaded(transformers.AutoTokenizer, args.model)
    outputs.check(args, loaded(transformers.AutoConfig, args.model), tokenizer)
    examples = read(args.data, tokenizer, args.max_length)
    model = load(args.model, args.base)
    tokens = [len(each["input_ids"]) for each in examples]
    layers = args.target_modules if args.target_modules == "all-linear" else args.target_modules.split(",")
    adapters = peft.LoraConfig(
        r=args.lora_r, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, task_type="CAUSAL_LM",
        target_modules=layers, use_dora=args.use_dora, use_rslora=args.use_rslora,
        modules_to_save=args.modules_to_save.split(",") if args.modules_to_save else None)
    try:
        model = peft.get_peft_model(model, adapters)
    except ValueError as error:
        raise FinetuneError(f"--target-modules {args.target_modules}: {error}") from None
    trained, every = model.get_nb_trainable_parameters()
    print(f"{args.model}: {every / 1e6:.0f} M parameters in {args.base}, of which {trained / 1e6:.1f} M are trained; "
          f"{sum(p.nbytes for p in model.parameters()) / GB:.1f} GB of weights")
    steps = args.num_train_epochs * len(tokens)
    if args.max_steps > 0:
        steps = args.max_steps * args.gradient_accumulation_steps * args.per_device_train_batch_size
    seconds = steps * sum(tokens) / len(tokens) / rate(model)
    print(f"{args.data}: {len(examples)} examples, {sum(tokens)} tokens, the longest {max(tokens)}; about "
          f"{clock(seconds)} on this computer")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    if limit is not None:
        longest = sorted(examples, key=lambda each: -len(each["input_ids"]))[:args.per_device_train_batch_size]
        os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] = str(choose_level(model, batch_of(longest, pad), int(limit)))
    with writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    settings = transformers.TrainingArguments(
        output_dir=str(args.out), per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps, learning_rate=args.learning_rate,
        num_train_epochs=args.num_train_epochs, max_steps=args.max_steps, lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.warmup_steps, seed=args.seed, save_steps=args.save_steps, save_total_limit=1, logging_steps=1,
        report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False)
    said = progress(tokens)
    trainer = wrap_trainer(transformers.Trainer(
        model=model, args=settings, train_dataset=examples, callbacks=[said],
        data_collator=lambda rows: batch_of(rows, pad)))
    trainer.remove_callback(transformers.PrinterCallback)
    saved = bool(checkpoints(args.out))
    if saved:
        print(f"{args.out} has a checkpoint: the run goes on from there")
    with writing(args.out):
        trainer.train(resume_from_checkpoint=saved)
    if said.interrupted:
        print(f"{args.out} has a checkpoint; the same command goes on from there")
        return
    outputs.write(args, model, tokenizer, examples[0])
    for folder in checkpoints(args.out):
        shutil.rmtree(folder)


def main(arguments: Sequence[str]) -> int:
    """The command; the status of the process."""
    try:
        train(parser().parse_args(arguments))
    except FinetuneError as error:
        print(f"finetune: {error}", file=sys.stderr)
        return 1
    return 0
