"""`python -m onnxtrain finetune`: LoRA fine-tuning of a language model of transformers, on the processor.

transformers loads the model and has the loop (Trainer), peft the adapters, bitsandbytes the 4-bit weights;
wrap_trainer() puts the engine in. Here are the command's options, its data, what it says, and what it does when it is
interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onnxtrain._memory import bytes_of
from onnxtrain.utils.torch_profile_utils import memory_of_the_process

_PAD_TO = 64  # tokens: batches of few lengths, so that few programs are built
GB = 2**30  # as ORTMODULE_MEMORY_OPT_BUDGET has it
_IGNORED = -100  # a label that the loss leaves out
_NEEDED = "pip install transformers peft"
_BEYOND = 0.4 * GB  # what Trainer's own capture and programs of other lengths take beside a step that was planned

Example = dict[str, list[int]]  # input_ids and labels, of equal length


class FinetuneError(Exception):
    """What the user has to change, in a sentence."""


def parser() -> argparse.ArgumentParser:
    """Options have the names that users of Trainer and peft know, with `-` or with their `_`."""
    made = argparse.ArgumentParser(prog="python -m onnxtrain finetune", description=__doc__.splitlines()[0])

    def add(name: str, **how: Any) -> None:
        made.add_argument(f"--{name}", f"--{name.replace('-', '_')}", **how)

    made.add_argument("--model", required=True, help="a folder, or a name of the hub")
    made.add_argument("--data", required=True, type=Path, help="JSON lines, each an object with text, with messages "
                      "(role and content), or with prompt and completion, of which the completion is learnt")
    made.add_argument("--out", required=True, type=Path, help="a folder for the adapter, and for checkpoints")
    made.add_argument("--merged", type=Path, help="a folder for the model with the adapter in its weights")
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
    add("lr-scheduler-type", default="cosine")
    return made


# ---- data ----


def _tokens(row: object, where: str, tokenizer: Any, longest: int) -> Example:
    """One row of the file as token ids, and as labels."""
    skipped = 0
    match row:
        case {"text": str(text)}:
            ids = tokenizer(text)["input_ids"]
            if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                ids = [*ids, tokenizer.eos_token_id]
        case {"messages": [_, *_] as messages}:
            if not tokenizer.chat_template:
                raise FinetuneError(f"{where} has messages, but the model's tokenizer has no chat template")
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception as error:  # noqa: BLE001  a template raises what it likes
                raise FinetuneError(f"{where}: the chat template refuses its messages: {error}") from None
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        case {"prompt": str(prompt), "completion": str(completion)}:
            first = tokenizer(prompt)["input_ids"]
            if first and first[-1] == tokenizer.eos_token_id:
                first = first[:-1]
            ids = [*first, *tokenizer(completion, add_special_tokens=False)["input_ids"]]
            ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
            skipped = len(first)
        case _:
            raise FinetuneError(f"{where} is no object with text, with messages, or with prompt and completion")
    ids = ids[:longest]
    return {"input_ids": ids, "labels": [_IGNORED] * min(skipped, len(ids)) + ids[skipped:]}


def read(path: Path, tokenizer: Any, longest: int) -> list[Example]:
    """The examples of a file of JSON lines; those without a token to learn are left out.

    Raises FinetuneError for a file that cannot be read, a line that is none of the forms, and a file without examples.
    """
    examples = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FinetuneError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise FinetuneError(f"{where} is no JSON: {error}") from None
        example = _tokens(row, where, tokenizer, longest)
        if any(label != _IGNORED for label in example["labels"][1:]):
            examples.append(example)
    if not examples:
        raise FinetuneError(f"{path} has no example with a token to learn")
    return examples


def batch_of(examples: Sequence[Example], pad: int) -> dict[str, torch.Tensor]:
    """A batch, padded on the right to a multiple of _PAD_TO: input_ids, attention_mask and labels."""
    width = -(-max(len(each["input_ids"]) for each in examples) // _PAD_TO) * _PAD_TO
    rows = [(each["input_ids"], each["labels"], width - len(each["input_ids"])) for each in examples]
    return {"input_ids": torch.tensor([[*ids, *[pad] * rest] for ids, _, rest in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * rest for ids, _, rest in rows]),
            "labels": torch.tensor([[*labels, *[_IGNORED] * rest] for _, labels, rest in rows])}


# ---- model ----


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
    model = _loaded(transformers.AutoModelForCausalLM, name, **settings)
    if base == "nf4":  # norms that stay in a file would keep all of it mapped, which counts as the process's memory
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data = parameter.data.clone()
    model.config.use_cache = False
    return model


def _loaded(kind: Any, name: str, **settings: Any) -> Any:
    try:
        return kind.from_pretrained(name, **settings)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise FinetuneError(f"{name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 products."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
    report = memory_report(wrapped)
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


# ---- the run ----


def _progress(tokens: Sequence[int]) -> Any:
    """Prints a line for each update; Ctrl-C saves a checkpoint and ends the run."""
    import transformers

    mean = sum(tokens) / len(tokens)

    class Progress(transformers.TrainerCallback):  # type: ignore[misc]
        interrupted = False
        times: list[float]  # of the begin of the first update, and the ends of all

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.times = [time.monotonic()]
            self.before = signal.signal(signal.SIGINT, self.interrupt)

        def interrupt(self, *_: object) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            print("Ctrl-C: this step ends, and a checkpoint is saved; once more ends at once", flush=True)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if self.interrupted:
                control.should_save = control.should_training_stop = True
            return control

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None,
                   **_: Any) -> None:
            if not logs or "loss" not in logs:
                return
            self.times.append(time.monotonic())
            later = self.times[len(self.times) > 2:]  # the first update captures, exports and builds
            seconds = (later[-1] - later[0]) / (len(later) - 1)
            rate = args.gradient_accumulation_steps * args.per_device_train_batch_size * mean / seconds
            left = (state.max_steps - state.global_step) * seconds
            print(f"update {state.global_step} of {state.max_steps}: loss {float(logs['loss']):.4f}, {rate:.0f} "
                  f"tokens/s, {_clock(left)} left, {memory_of_the_process()['max resident'] / GB:.1f} GB", flush=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            signal.signal(signal.SIGINT, self.before)

    return Progress()


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def _checkpoints(out: Path) -> list[Path]:
    """Those that are whole; of others, which a full disk or a kill has left, nothing stays."""
    found = [path for path in out.glob("checkpoint-*") if path.is_dir()]
    whole = [path for path in found if (path / "trainer_state.json").exists()]  # which Trainer writes last
    for path in set(found).difference(whole):
        shutil.rmtree(path)
    return whole


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Errors of the disk, as the libraries that write to it raise them, are FinetuneErrors."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise FinetuneError(f"{folder} cannot be written: {error}") from error
    except RuntimeError as error:  # of torch.save, which has no class of its own for it
        if torch.serialization.__file__ not in {frame.filename for frame in traceback.extract_tb(error.__traceback__)}:
            raise
        raise FinetuneError(f"{folder} cannot be written: {error}") from error


def _replacing(folder: Path, save: Callable[[Path], object]) -> None:
    """Files that save() writes to a folder come to this one once all are written."""
    part = folder / ".part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        with _writing(folder):
            part.mkdir(parents=True)
            save(part)
            for file in part.iterdir():
                os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _merged(args: argparse.Namespace, model: Any, tokenizer: Any, example: Example) -> None:
    """Writes the merged model, and reads it back: its logits must be those of the model in memory. Says how far they
    are from the trained one's, since a merged weight is rounded to the base's dtype.
    """
    import peft
    import transformers

    ids = torch.tensor([example["input_ids"]])

    def logits(of: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = of.eval()(input_ids=ids).logits.float()
        return found

    trained = logits(model)
    if args.base == "nf4":  # the adapter goes to the weights before they were quantized
        plain = load(args.model, "bfloat16" if multiplies_bfloat16() else "float32")
        model = peft.PeftModel.from_pretrained(plain, args.out)
    merged = model.merge_and_unload()

    def save(folder: Path) -> None:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    _replacing(args.merged, save)
    read = logits(_loaded(transformers.AutoModelForCausalLM, args.merged, dtype=merged.dtype))
    if not torch.allclose(read, logits(merged), rtol=1e-3, atol=1e-3):
        raise FinetuneError(f"{args.merged} was read back, and computes other logits than the model that was written")
    away = ((read - trained).norm() / trained.norm()).item()
    print(f"{args.merged}: the merged model, read back; its logits differ by {away:.1e} of the trained ones'")


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
    tokenizer = _loaded(transformers.AutoTokenizer, args.model)
    examples = read(args.data, tokenizer, args.max_length)
    model = load(args.model, args.base)
    tokens = [len(each["input_ids"]) for each in examples]
    layers = args.target_modules if args.target_modules == "all-linear" else args.target_modules.split(",")
    adapters = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout,
                               task_type="CAUSAL_LM", target_modules=layers)
    try:
        model = peft.get_peft_model(model, adapters)
    except ValueError as error:
        raise FinetuneError(f"--target-modules {args.target_modules}: {error}") from None
    trained, every = model.get_nb_trainable_parameters()
    print(f"{args.model}: {every / 1e6:.0f} M parameters in {args.base}, of which {trained / 1e6:.1f} M are trained; "
          f"{sum(p.nbytes for p in model.parameters()) / GB:.1f} GB of weights")
    print(f"{args.data}: {len(examples)} examples, {sum(tokens)} tokens, the longest {max(tokens)}")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    if limit is not None:
        longest = sorted(examples, key=lambda each: -len(each["input_ids"]))[:args.per_device_train_batch_size]
        os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] = str(choose_level(model, batch_of(longest, pad), int(limit)))
    with _writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    settings = transformers.TrainingArguments(
        output_dir=str(args.out), per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps, learning_rate=args.learning_rate,
        num_train_epochs=args.num_train_epochs, max_steps=args.max_steps, lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.warmup_steps, seed=args.seed, save_steps=args.save_steps, save_total_limit=1, logging_steps=1,
        report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False)
    progress = _progress(tokens)
    trainer = wrap_trainer(transformers.Trainer(
        model=model, args=settings, train_dataset=examples, callbacks=[progress],
        data_collator=lambda rows: batch_of(rows, pad)))
    trainer.remove_callback(transformers.PrinterCallback)
    saved = bool(_checkpoints(args.out))
    if saved:
        print(f"{args.out} has a checkpoint: the run goes on from there")
    with _writing(args.out):
        trainer.train(resume_from_checkpoint=saved)
    if progress.interrupted:
        print(f"{args.out} has a checkpoint; the same command goes on from there")
        return
    _replacing(args.out, lambda part: model.save_pretrained(str(part)))
    for folder in _checkpoints(args.out):
        shutil.rmtree(folder)
    print(f"{args.out}: the adapter")
    if args.merged:
        _merged(args, model, tokenizer, examples[0])


def main(arguments: Sequence[str]) -> int:
    """The command; the status of the process."""
    try:
        train(parser().parse_args(arguments))
    except FinetuneError as error:
        print(f"finetune: {error}", file=sys.stderr)
        return 1
    return 0
