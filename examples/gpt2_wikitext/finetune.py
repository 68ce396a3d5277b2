"""Fine-tunes GPT-2 on a text such as Wikitext-2: by transformers' Trainer alone (eager) and with `wrap_trainer`
(trainer), or by ORTTrainer.

    python finetune.py                                         # a small GPT-2, on Python's own sources
    python finetune.py --data wikitext-2 --model gpt2-folder --block 1024 --by ort_trainer

`--data` is a folder of train.txt (or test.txt) and valid.txt, or one text file. `--model` is a folder of
save_pretrained(), with its tokenizer; without it a small GPT-2 is made, and a tokenizer of the text's own words.
The weights go back to the module: `--output` gets them by save_pretrained(), of the last way of `--by`.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

import onnxtrain
import onnxtrain.compat.onnxruntime  # noqa: F401
from onnxtrain.integrations import wrap_trainer

# isort: split
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim

NOT_DECAYED = ("bias", "ln_")


def texts(path: Path | None) -> tuple[str, str]:
    """Training and validation text, of Python's standard library without a path. FileNotFoundError names a file that
    is missing.
    """
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("a*.py")))
        return text[:len(text) * 9 // 10], text[len(text) * 9 // 10:]
    if path.is_dir():
        train = path / "train.txt"
        train = train if train.exists() else path / "test.txt"
        return train.read_text(encoding="utf-8"), (path / "valid.txt").read_text(encoding="utf-8")
    whole = path.read_text(encoding="utf-8")
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


def small(text: str, words: int, block: int) -> tuple[torch.nn.Module, Any]:
    """A GPT-2 of two layers, and what turns a text into ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([text], tokenizers.trainers.BpeTrainer(
        vocab_size=words, special_tokens=["<unk>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    config = transformers.GPT2Config(vocab_size=tokenizer.get_vocab_size(), n_positions=block, n_embd=128, n_layer=2,
                                     n_head=4, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), lambda part: tokenizer.encode(part).ids


def blocks(ids: list[int], size: int) -> torch.Tensor:
    """(blocks, size), the rest left out. ValueError if there is not one."""
    if len(ids) < size:
        raise ValueError(f"the text has {len(ids)} tokens, and a block {size} (--block)")
    return torch.tensor(ids[:len(ids) // size * size]).view(-1, size)


class Loss(torch.nn.Module):
    """GPT-2 with its loss alone; ids (batch, block) are the labels too."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=input_ids, use_cache=False).loss


def by_trainer(model: torch.nn.Module, train: torch.Tensor, args: argparse.Namespace,
               wrap: Any = wrap_trainer) -> list[float]:
    """transformers' Trainer; the losses of all updates."""
    rows = [{"input_ids": row, "labels": row} for row in train]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation, learning_rate=args.lr, weight_decay=0.01, max_grad_norm=1.0,
            lr_scheduler_type="linear", warmup_steps=0, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=args.device == "cpu", disable_tqdm=True, seed=args.seed)
        trainer = wrap(transformers.Trainer(model, arguments, train_dataset=rows))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_ort_trainer(model: torch.nn.Module, train: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """ORTTrainer; the losses of all updates."""
    whole = Loss(model)
    still = [name for name, _ in whole.named_parameters() if any(part in name for part in NOT_DECAYED)]
    trainer = ORTTrainer(
        whole, {"inputs": [("input_ids", ["batch", "block"])], "outputs": [("loss", [], True)]},
        optim.AdamConfig([{"params": still, "lambda_coef": 0.0}], lr=args.lr, lambda_coef=0.01),
        options=ORTTrainerOptions({
            "device": {"id": args.device}, "batch": {"gradient_accumulation_steps": args.accumulation},
            "lr_scheduler": optim.LinearWarmupLRScheduler(total_steps=args.steps, warmup=0.0)}))
    draw = torch.Generator().manual_seed(args.seed)
    losses: list[float] = []
    for _ in range(args.steps):
        rows = torch.randint(0, len(train), (args.accumulation, args.batch), generator=draw)
        found = [float(trainer.train_step(train[some])) for some in rows]
        losses.append(sum(found) / len(found))
    return losses


def by_eager(model: torch.nn.Module, train: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """transformers' Trainer in PyTorch."""
    return by_trainer(model, train, args, wrap=lambda trainer: trainer)


WAYS = {"eager": by_eager, "trainer": by_trainer, "ort_trainer": by_ort_trainer}


@torch.no_grad()
def perplexity(model: torch.nn.Module, valid: torch.Tensor, batch: int) -> float:
    model.eval()
    device = next(model.parameters()).device
    found = [(len(some), model(input_ids=some.to(device), labels=some.to(device)).loss.item())
             for some in valid.split(batch)]
    model.train()
    return math.exp(sum(count * loss for count, loss in found) / sum(count for count, _ in found))


def main(given: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="folder of train.txt and valid.txt, or a text file; none: Python's standard library")
    add("--model", type=Path, help="folder of a GPT-2 with its tokenizer; none: a small new one")
    add("--by", nargs="+", choices=list(WAYS), default=["eager", "trainer"], help="one after another")
    add("--block", type=int, default=64, help="tokens of a sequence; GPT-2 has 1024")
    add("--batch", type=int, default=4, help="sequences of a micro-batch")
    add("--accumulation", type=int, default=4, help="micro-batches of an update")
    add("--steps", type=int, default=50, help="updates")
    add("--lr", type=float, default=5e-4)
    add("--words", type=int, default=2000, help="vocabulary of the small model")
    add("--device", default="cpu")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="folder for the weights")
    args = parser.parse_args(given)
    torch.manual_seed(args.seed)
    train_text, valid_text = texts(args.data)
    if args.model:
        model = transformers.GPT2LMHeadModel.from_pretrained(args.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        encode = lambda part: tokenizer(part)["input_ids"]  # noqa: E731
    else:
        model, encode = small(train_text, args.words, args.block)
    train, valid = blocks(encode(train_text), args.block), blocks(encode(valid_text), args.block)
    before = perplexity(model, valid, args.batch)
    print(f"{len(train)} blocks of {args.block} tokens, {args.steps} updates; perplexity of the validation text "
          f"{before:.1f}")
    first = model
    for way in args.by:
        model, counts, start = copy.deepcopy(first), onnxtrain.stats(), time.perf_counter()
        losses = WAYS[way](model, train, args)
        seconds, steps = time.perf_counter() - start, args.steps * args.accumulation
        engine = onnxtrain.stats()["engine_steps"] - counts["engine_steps"]
        print(f"{way:>11}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, perplexity "
              f"{perplexity(model, valid, args.batch):.1f}, {seconds:.1f} s, which is {seconds / steps * 1e3:.0f} ms "
              f"a micro-batch, {engine} of {steps} in the engine")
    if args.output:
        model.save_pretrained(args.output)
    return losses


if __name__ == "__main__":
    main()
