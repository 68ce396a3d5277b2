"""Makes BERT's pre-training instances of text shards, as HDF5: one sentence a line, a blank line between documents.

bertPrep.py calls `create()` shard by shard; README.md describes the layout. A file holds one shard's tokens in memory,
its instances go through a temporary file. The same text, vocabulary and seed give the same file.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROWS = 4096  # of a chunk that is written at once

Sentence = list[int]
Document = list[Sentence]


@dataclass(frozen=True)
class Recipe:
    """How instances are made. Lengths are in tokens, probabilities in [0, 1]."""

    max_seq_length: int = 128
    max_predictions_per_seq: int = 20
    dupe_factor: int = 10
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1
    whole_word: bool = False
    random_seed: int = 12345

    def __post_init__(self) -> None:
        for name, least in (("max_seq_length", 5), ("max_predictions_per_seq", 1), ("dupe_factor", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {least}")
        for name in ("masked_lm_prob", "short_seq_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number from 0 to 1")

    def row(self) -> np.dtype:
        """One instance, under the names and dtypes of the file."""
        length, predictions = (self.max_seq_length,), (self.max_predictions_per_seq,)
        return np.dtype([("input_ids", "i4", length), ("input_mask", "i1", length), ("segment_ids", "i1", length),
                         ("masked_lm_positions", "i4", predictions), ("masked_lm_ids", "i4", predictions),
                         ("next_sentence_labels", "i1")])


class Vocabulary:
    """WordPiece by a vocabulary file, one token a line.

    Raises:
        ValueError: a special token is missing.
    """

    def __init__(self, path: str | os.PathLike[str], lower: bool = True) -> None:
        tokens = Path(path).read_text(encoding="utf-8").splitlines()
        index = {token: place for place, token in enumerate(tokens)}
        missing = [token for token in SPECIAL if token not in index]
        if missing:
            raise ValueError(f"{path} has no {', '.join(missing)}")
        self.size = len(tokens)
        self.cls, self.sep, self.mask = (index[token] for token in ("[CLS]", "[SEP]", "[MASK]"))
        self.continues = np.array([token.startswith("##") for token in tokens])
        self._tokenizer = Tokenizer(models.WordPiece(index, unk_token="[UNK]", max_input_chars_per_word=200))
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, sentences: Sequence[str]) -> list[Sentence]:
        """Ids, without special tokens."""
        return [found.ids for found in self._tokenizer.encode_batch(list(sentences), add_special_tokens=False)]


def documents_of(paths: Iterable[Path], vocabulary: Vocabulary) -> list[Document]:
    """Sentences as ids; empty sentences and documents are left out."""
    documents: list[Document] = []
    for path in paths:
        document: list[str] = []
        with path.open(encoding="utf-8") as lines:
            for line in [*lines, ""]:
                if line.strip():
                    document.append(line.strip())
                    continue
                found = [ids for ids in vocabulary.encode(document) if ids]
                documents += [found] if found else []
                document = []
    return documents


def truncate(first: Sentence, second: Sentence, length: int, rng: random.Random) -> None:
    """Takes tokens from the longer one, front or back at even odds, until both together have this length."""
    while len(first) + len(second) > length:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if rng.random() < 0.5 else -1)


def pairs_of(documents: Sequence[Document], place: int, recipe: Recipe,
             rng: random.Random) -> Iterator[tuple[Sentence, Sentence, bool]]:
    """The pairs of one document: two texts, and whether the second is a random one."""
    document = documents[place]
    room = recipe.max_seq_length - 3  # [CLS] and two [SEP]

    def draw_target() -> int:
        return rng.randint(2, room) if rng.random() < recipe.short_seq_prob else room

    target = draw_target()
    gathered: list[Sentence] = []
    length = at = 0
    while at < len(document):
        gathered.append(document[at])
        length += len(document[at])
        at += 1
        if length < target and at < len(document):
            continue
        cut = rng.randint(1, len(gathered) - 1) if len(gathered) > 1 else 1
        first = [token for sentence in gathered[:cut] for token in sentence]
        is_random = len(gathered) == 1 or rng.random() < 0.5
        if is_random:
            second: Sentence = []
            other = rng.randrange(len(documents) - 1)
            source = documents[other + (other >= place)]
            for sentence in source[rng.randrange(len(source)):]:
                second += sentence
                if len(second) >= target - len(first):
                    break
            at -= len(gathered) - cut  # what was not used comes again
        else:
            second = [token for sentence in gathered[cut:] for token in sentence]
        truncate(first, second, room, rng)
        yield first, second, is_random
        gathered, length, target = [], 0, draw_target()


def mask(tokens: Sentence, recipe: Recipe, vocabulary: Vocabulary,
         rng: random.Random) -> tuple[list[int], list[int]]:
    """Masks tokens in place. Positions, rising, and the ids that were there."""
    special = (vocabulary.cls, vocabulary.sep)
    units: list[list[int]] = []  # positions that are masked together
    for place, token in enumerate(tokens):
        if token in special:
            continue
        if recipe.whole_word and units and vocabulary.continues[token] and units[-1][-1] == place - 1:
            units[-1].append(place)
        else:
            units.append([place])
    rng.shuffle(units)
    count = min(recipe.max_predictions_per_seq, max(1, round(len(tokens) * recipe.masked_lm_prob)))
    chosen: list[int] = []
    for unit in units:
        if len(chosen) == count:
            break
        if len(chosen) + len(unit) <= count:
            chosen += unit
    chosen.sort()
    labels = [tokens[place] for place in chosen]
    for place in chosen:
        draw = rng.random()
        if draw < 0.8:
            tokens[place] = vocabulary.mask
        elif draw >= 0.9:
            tokens[place] = rng.randrange(vocabulary.size)
    return chosen, labels


def rows_of(documents: list[Document], recipe: Recipe, vocabulary: Vocabulary, rng: random.Random) -> Iterator[np.void]:
    """Instances, pass by pass.

    Raises:
        ValueError: there is one document alone, so no other one to take a random text of.
    """
    if len(documents) < 2:
        raise ValueError(f"{len(documents)} documents: at least 2 are needed, for random next sentences")
    rng.shuffle(documents)
    for _ in range(recipe.dupe_factor):
        for place in range(len(documents)):
            for first, second, is_random in pairs_of(documents, place, recipe, rng):
                tokens = [vocabulary.cls, *first, vocabulary.sep, *second, vocabulary.sep]
                positions, labels = mask(tokens, recipe, vocabulary, rng)
                row = np.zeros((), recipe.row())
                row["input_ids"][:len(tokens)] = tokens
                row["input_mask"][:len(tokens)] = 1
                row["segment_ids"][len(first) + 2:len(tokens)] = 1
                row["masked_lm_positions"][:len(positions)] = positions
                row["masked_lm_ids"][:len(labels)] = labels
                row["next_sentence_labels"] = is_random
                yield row


def create(inputs: Sequence[Path], output: Path, vocabulary: Vocabulary, recipe: Recipe) -> int:
    """Writes one file, whole or not at all, of instances in random order.

    Returns:
        How many instances it has.
    """
    rng = random.Random(recipe.random_seed)
    documents = documents_of(inputs, vocabulary)
    dtype, count = recipe.row(), 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=output.parent) as folder:
        with open(Path(folder) / "rows", "wb") as file:
            for row in rows_of(documents, recipe, vocabulary, rng):
                file.write(row.tobytes())
                count += 1
        rows = np.memmap(Path(folder) / "rows", dtype, "r", shape=(count,))
        order = np.random.default_rng(recipe.random_seed).permutation(count)
        fresh = Path(folder) / "whole"
        with h5py.File(fresh, "w") as target:
            for name in dtype.names or ():
                field = dtype[name]
                target.create_dataset(name, (count, *field.shape), field.base, compression="gzip",
                                      chunks=(min(count, ROWS), *field.shape))
            for start in range(0, count, ROWS):
                part = rows[order[start:start + ROWS]]
                for name in dtype.names or ():
                    target[name][start:start + len(part)] = part[name]
        del rows
        fresh.replace(output)
    return count


def add_recipe(parser: argparse.ArgumentParser, **defaults: float) -> None:
    """The options that create_pretraining_data.py and bertPrep.py share; do_lower_case is each one's own."""
    parser.add_argument("--max_seq_length", type=int, default=defaults["max_seq_length"], help="tokens, padding too")
    parser.add_argument("--dupe_factor", type=int, default=defaults["dupe_factor"],
                        help="passes over the text, each masked in another way")
    parser.add_argument("--max_predictions_per_seq", type=int, default=20, help="most masked tokens of an instance")
    parser.add_argument("--masked_lm_prob", type=float, default=0.15, help="share of masked tokens")
    parser.add_argument("--short_seq_prob", type=float, default=0.1, help="share of instances that aim at less")
    parser.add_argument("--random_seed", type=int, default=12345)
    parser.add_argument("--whole_word_masking", action="store_true", help="mask all pieces of a word together")


def recipe_of(args: argparse.Namespace) -> Recipe:
    return Recipe(args.max_seq_length, args.max_predictions_per_seq, args.dupe_factor, args.masked_lm_prob,
                  args.short_seq_prob, args.whole_word_masking, args.random_seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--vocab_file", required=True, help="WordPiece, one token a line")
    parser.add_argument("--input_file", type=Path, required=True, help="a text file, or a folder of .txt")
    parser.add_argument("--output_file", type=Path, required=True)
    parser.add_argument("--bert_model", default="bert-large-uncased", help="no effect: the vocabulary is the file's")
    parser.add_argument("--do_lower_case", action=argparse.BooleanOptionalAction, default=True,
                        help="lower case, accents taken off")
    add_recipe(parser, max_seq_length=128, dupe_factor=10)
    args = parser.parse_args()
    inputs = sorted(args.input_file.glob("*.txt")) if args.input_file.is_dir() else [args.input_file]
    if not inputs:
        raise SystemExit(f"{args.input_file} holds no .txt file")
    count = create(inputs, args.output_file, Vocabulary(args.vocab_file, args.do_lower_case), recipe_of(args))
    print(f"{args.output_file}: {count} instances of {len(inputs)} files")


if __name__ == "__main__":
    main()
