"""Prepares the corpora of BERT's pre-training: download, one article a line, shards of sentences, HDF5.

Everything lies under $BERT_PREP_WORKING_DIR. An output that is there and newer than what it is made of is kept, so that
a run that was stopped goes on. Articles are read one by one; only their sizes are held in memory.
"""

from __future__ import annotations

import argparse
import html
import os
import random
import re
import shutil
import subprocess
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from create_pretraining_data import Recipe, Vocabulary, add_recipe, create, recipe_of

WIKIPEDIA = "https://dumps.wikimedia.org/{0}wiki/latest/{0}wiki-latest-pages-articles.xml.bz2"
SOURCES = {
    "wikicorpus_en": [WIKIPEDIA.format("en")],
    "wikicorpus_zh": [WIKIPEDIA.format("zh")],
    "google_pretrained_weights": [f"https://storage.googleapis.com/bert_models/{name}.zip" for name in (
        "2018_10_18/uncased_L-12_H-768_A-12", "2018_10_18/uncased_L-24_H-1024_A-16",
        "2018_10_18/cased_L-12_H-768_A-12", "2018_10_18/cased_L-24_H-1024_A-16", "2018_11_03/chinese_L-12_H-768_A-12")],
    "mrpc": [f"https://dl.fbaipublicfiles.com/senteval/senteval_data/msr_paraphrase_{part}.txt"
             for part in ("train", "test")],
    "squad": [f"https://rajpurkar.github.io/SQuAD-explorer/dataset/{part}.json"
              for part in ("train-v1.1", "dev-v1.1", "train-v2.0", "dev-v2.0")],
}
BY_HAND = {
    "bookscorpus": "put the books, a .txt each, into {}: no server has this corpus any more",
    "nvidia_pretrained_weights": "put the files from NVIDIA's catalogue, which asks for an account, into {}",
}
CORPORA = ("bookscorpus", "wikicorpus_en", "wikicorpus_zh", "books_wiki_en_corpus")
DATASETS = (*CORPORA, "google_pretrained_weights", "nvidia_pretrained_weights", "mrpc", "squad", "all")
ABBREVIATIONS = frozenset((
    "mr", "mrs", "ms", "dr", "st", "prof", "gen", "col", "lt", "sgt", "capt", "rev", "hon", "jr", "sr", "vs", "etc",
    "no", "vol", "fig", "inc", "ltd", "co", "e.g", "i.e", "u.s", "u.k", "a.m", "p.m", "cf", "al", "approx"))
END = re.compile(r"[.!?]['\")\]”’]*(?:\s['\")\]”’]+(?=\s))?\s+(?=['\"(\[“‘]*\s?[^\W_a-z])|(?<=[。！？])\s*")
HEADING = re.compile(r"^\s*(=(?:\s?=)*) (.+?) \1\s*$")


def folder() -> Path:
    """Raises SystemExit: the variable is not set."""
    if not os.environ.get("BERT_PREP_WORKING_DIR"):
        raise SystemExit("set BERT_PREP_WORKING_DIR to the folder for the data")
    return Path(os.environ["BERT_PREP_WORKING_DIR"])


def is_current(output: Path, inputs: Iterable[Path]) -> bool:
    return output.exists() and all(path.stat().st_mtime <= output.stat().st_mtime for path in inputs)


@contextmanager
def whole(path: Path) -> Iterator[IO[str]]:
    """A text file that appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.part")
    with fresh.open("w", encoding="utf-8") as file:
        yield file
    fresh.replace(path)


# ---- download ----

def fetch(url: str, path: Path) -> None:
    """A file from the net; goes on where an earlier call was cut off."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request) as answer:
        goes_on = getattr(answer, "status", 200) == 206
        with part.open("ab" if goes_on else "wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
    part.replace(path)
    print(f"{path}: {path.stat().st_size} bytes")


def download(dataset: str) -> None:
    """Raises SystemExit: the data have to be put there by hand, and are not."""
    if dataset in ("all", "books_wiki_en_corpus"):
        for each in DATASETS[:-1] if dataset == "all" else ("bookscorpus", "wikicorpus_en"):
            if each != "books_wiki_en_corpus":
                download(each)
        return
    target = folder() / "download" / dataset
    if dataset in BY_HAND:
        if not any(target.glob("*")):
            raise SystemExit(f"{dataset}: {BY_HAND[dataset].format(target)}")
        return
    for url in SOURCES[dataset]:
        path = target / url.rsplit("/", 1)[1]
        fetch(url, path)
        if path.suffix == ".zip" and not (target / path.stem).exists():
            with zipfile.ZipFile(path) as archive:
                archive.extractall(target)
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")


# ---- one article a line ----

def one_line(text: str) -> str:
    """White space folded, and the marks by which Wikitext-103 and Wikitext-2 take words apart joined again."""
    text = re.sub(r" @([-,.])@ ", r"\1", html.unescape(text))
    return " ".join(text.split())


def articles_of(path: Path) -> Iterator[str]:
    """Articles of one file: wikiextractor's ``<doc>``, Wikitext's `` = Title = ``, or else the file is one article."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        kind, article = "", []
        for line in lines:
            heading = HEADING.match(line)
            starts = line.startswith("<doc ") or bool(heading and heading.group(1) == "=" and kind != "doc")
            if starts:
                kind = "doc" if line.startswith("<doc ") else "wikitext"
                if one_line(" ".join(article)):
                    yield one_line(" ".join(article))
                article = []
            elif not (line.startswith("</doc>") or heading and kind == "wikitext"):
                article.append(line)
        if one_line(" ".join(article)):
            yield one_line(" ".join(article))


def formatted(dataset: str) -> Path:
    unit = "book" if dataset == "bookscorpus" else "article"
    return folder() / "formatted_one_article_per_line" / f"{dataset}_one_{unit}_per_line.txt"


def extract(dataset: str) -> None:
    """The articles of a dump of Wikipedia, by wikiextractor."""
    target = folder() / "extracted" / dataset
    if target.exists():
        return
    tool = shutil.which("wikiextractor")
    if tool is None:
        raise SystemExit("wikiextractor is not installed: pip install wikiextractor, or put its output into "
                         f"{target} and pass --skip_wikiextractor 1")
    dump = next((folder() / "download" / dataset).glob("*.bz2"), None)
    if dump is None:
        raise SystemExit(f"{dataset}: there is no dump: run --action download first")
    part = target.with_name(target.name + ".part")
    subprocess.run([tool, str(dump), "-b", "1000M", "-o", str(part)], check=True)
    part.replace(target)


def text_formatting(args: argparse.Namespace) -> None:
    if args.dataset == "books_wiki_en_corpus":
        raise SystemExit("format bookscorpus and wikicorpus_en; sharding reads both")
    if args.input_files:
        sources = [Path(name) for name in args.input_files.split(",")]
    elif args.dataset == "bookscorpus":
        sources = sorted((folder() / "download" / "bookscorpus").rglob("*.txt"))
    else:
        if not args.skip_wikiextractor:
            extract(args.dataset)
        sources = sorted(path for path in (folder() / "extracted" / args.dataset).rglob("wiki_*"))
    if not sources:
        raise SystemExit(f"{args.dataset}: there is no text to format")
    output, count = formatted(args.dataset), 0
    if is_current(output, sources):
        print(f"{output} is there")
        return
    with whole(output) as file:
        for source in sources:
            for article in articles_of(source):
                file.write(article + "\n")
                count += 1
    print(f"{output}: {count} articles of {len(sources)} files")


# ---- shards ----

def sentences_of(article: str) -> list[str]:
    """By punctuation before a capital, digit or quote, but after abbreviations and initials."""
    found, start = [], 0
    for end in END.finditer(article):
        word = article[start:end.start()].rsplit(None, 1)[-1:] or [""]
        last = word[0].strip("('\"[").lower()
        if article[end.start():end.start() + 1] == "." and (last in ABBREVIATIONS or len(last) == 1 and last.isalpha()):
            continue
        found.append(article[start:end.end()].strip())
        start = end.end()
    return [sentence for sentence in [*found, article[start:].strip()] if sentence]


def shard_folder(args: argparse.Namespace) -> Path:
    return folder() / (f"sharded_training_shards_{args.n_training_shards}_test_shards_{args.n_test_shards}"
                       f"_fraction_{args.fraction_test_set}") / args.dataset


def sharding(args: argparse.Namespace) -> None:
    """Deals articles to shards of about equal numbers of sentences; the test set is a random part of the articles.

    Raises:
        AssertionError: there are fewer articles than shards.
    """
    if args.input_files:
        sources = [Path(name) for name in args.input_files.split(",")]
    else:
        parts = ["bookscorpus", "wikicorpus_en"] if args.dataset == "books_wiki_en_corpus" else [args.dataset]
        sources = [formatted(part) for part in parts]
    missing = [str(path) for path in sources if not path.exists()]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not there: run --action text_formatting first")
    target = shard_folder(args)
    names = [target / f"{args.dataset}_{kind}_{place}.txt" for kind, count in
             (("training", args.n_training_shards), ("test", args.n_test_shards)) for place in range(count)]
    if all(is_current(name, sources) for name in names):
        print(f"{target} is there")
        return
    sizes = [len(sentences_of(line)) for path in sources for line in path.open(encoding="utf-8")]
    order = list(range(len(sizes)))
    random.Random(args.random_seed).shuffle(order)
    tests = round(len(order) * args.fraction_test_set)
    owner = {}
    for articles, shards in ((order[tests:], names[:args.n_training_shards]),
                             (order[:tests], names[args.n_training_shards:])):
        assert len(articles) >= len(shards), (
            f"{len(articles)} articles for {len(shards)} shards: ask for fewer shards")
        load = dict.fromkeys(shards, 0)
        for article in sorted(articles, key=lambda article: -sizes[article]):
            shard = min(load, key=load.__getitem__)
            owner[article] = shard
            load[shard] += max(1, sizes[article])
    place = 0
    with ExitStack() as stack:
        pending = {name: stack.enter_context(whole(name)) for name in names}
        for path in sources:
            for line in path.open(encoding="utf-8"):
                if place in owner:
                    pending[owner[place]].write("\n".join(sentences_of(line)) + "\n\n")
                place += 1
    print(f"{target}: {place} articles, {sum(sizes)} sentences")


# ---- HDF5 ----

def hdf5_folder(args: argparse.Namespace) -> Path:
    return folder() / (f"hdf5_lower_case_{args.do_lower_case}_seq_len_{args.max_seq_length}"
                       f"_max_pred_{args.max_predictions_per_seq}_masked_lm_prob_{args.masked_lm_prob}"
                       f"_random_seed_{args.random_seed}_dupe_factor_{args.dupe_factor}"
                       + ("_whole_word_1" if args.whole_word_masking else "")) / args.dataset


def one_shard(source: Path, output: Path, vocabulary: str, lower: bool, recipe: Recipe) -> tuple[Path, int]:
    if is_current(output, [source, Path(vocabulary)]):
        return output, 0
    return output, create([source], output, Vocabulary(vocabulary, lower), recipe)


def create_hdf5_files(args: argparse.Namespace) -> None:
    """One process for a shard, n_processes at a time."""
    vocabulary = args.vocab_file or str(folder() / "download" / "google_pretrained_weights" /
                                        "uncased_L-24_H-1024_A-16" / "vocab.txt")
    if not Path(vocabulary).exists():
        raise SystemExit(f"{vocabulary}: there is no vocabulary: pass --vocab_file, or download "
                         "google_pretrained_weights")
    sources = sorted(shard_folder(args).glob(f"{args.dataset}_*.txt"))
    if not sources:
        raise SystemExit(f"{shard_folder(args)}: there are no shards: run --action sharding first")
    outputs = [hdf5_folder(args) / (source.stem + ".hdf5") for source in sources]
    with ProcessPoolExecutor(args.n_processes) as pool:
        made = [pool.submit(one_shard, source, output, vocabulary, bool(args.do_lower_case), recipe_of(args))
                for source, output in zip(sources, outputs)]
        for future in made:
            output, count = future.result()
            print(f"{output}: {count} instances" if count else f"{output} is there")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--action", required=True, choices=["download", "text_formatting", "sharding",
                                                            "create_tfrecord_files", "create_hdf5_files"])
    parser.add_argument("--dataset", required=True, choices=DATASETS)
    parser.add_argument("--input_files", help="a,b: raw text to format, or formatted text to shard")
    parser.add_argument("--n_training_shards", type=int, default=256)
    parser.add_argument("--n_test_shards", type=int, default=256)
    parser.add_argument("--fraction_test_set", type=float, default=0.2, help="share of the articles")
    parser.add_argument("--n_processes", type=int, default=4)
    parser.add_argument("--do_lower_case", type=int, default=1, choices=[0, 1])
    parser.add_argument("--vocab_file", help="WordPiece, one token a line; default: BERT-large's, once downloaded")
    parser.add_argument("--skip_wikiextractor", type=int, default=0, choices=[0, 1])
    add_recipe(parser, max_seq_length=512, dupe_factor=5)
    args = parser.parse_args()
    if args.action == "download":
        download(args.dataset)
        return
    if args.action == "create_tfrecord_files":
        raise SystemExit("create_tfrecord_files: TensorFlow's format is not supported; use create_hdf5_files")
    if args.dataset not in CORPORA:
        raise SystemExit(f"{args.action}: {args.dataset} is not a corpus; those are {', '.join(CORPORA)}")
    actions = {"text_formatting": text_formatting, "sharding": sharding, "create_hdf5_files": create_hdf5_files}
    actions[args.action](args)


if __name__ == "__main__":
    main()
