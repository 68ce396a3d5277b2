"""Learns a WordPiece vocabulary of text: make_vocab.py SIZE OUTPUT FILE..."""

from __future__ import annotations

import sys
from pathlib import Path

from create_pretraining_data import SPECIAL
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers


def learn(size: int, output: Path, files: list[str], lower: bool = True) -> int:
    """Writes one token a line, specials first. The number of tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train(files, trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL),
                                                     show_progress=False))
    index = tokenizer.get_vocab()
    fresh = output.with_name(f".{output.name}.part")
    fresh.write_text("".join(token + "\n" for token in sorted(index, key=index.__getitem__)), encoding="utf-8")
    fresh.replace(output)
    return len(index)


if __name__ == "__main__":
    print(f"{sys.argv[2]}: {learn(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])} tokens")
