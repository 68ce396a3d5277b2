"""A file of JSON lines as examples, and examples as batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onnxtrain.finetune.files import FinetuneError

_PAD_TO = 64  # tokens: batches of few lengths, so that few programs are built
_IGNORED = -100  # a label that the loss leaves out

Example = dict[str, list[int]]  # input_ids and labels, of equal length


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
