"""The HDF5 files of examples/bert_pretraining, against BERT's published recipe, by a loader written from the layout."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

h5py = pytest.importorskip("h5py")
pytest.importorskip("tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bert_pretraining"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = ["##ing", "##ed", "##s"]
PAD, CLS, SEP, MASK, FIRST = 0, 2, 3, 4, 8  # FIRST: of the words
WORDS = [a + b for a in "bcdfghjklmnpqrstvwxz" for b in "aeiouy"]
LENGTH, PREDICTIONS, PROBABILITY = 64, 12, 0.15


def article(number: int, sentences: int, rng: random.Random) -> str:
    """Sentences that say which article they are of and where: "The NUMBER PLACE ..." in words."""
    def name(value):
        return f"{WORDS[value // 100 % 100]} {WORDS[value % 100]}"
    return " ".join(f"{name(number)} {name(place)} ".capitalize() + " ".join(
        rng.choice(WORDS) + rng.choice(["", "", "ing", "ed"]) for _ in range(rng.randint(3, 7))) + " ."
        for place in range(sentences))


def prepare(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(EXAMPLE / "bertPrep.py"), "--dataset", "wikicorpus_en", *options],
                          env={**os.environ, "BERT_PREP_WORKING_DIR": str(folder)}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Raw text, formatted and in shards, and a vocabulary."""
    folder, rng = tmp_path_factory.mktemp("bert"), random.Random(1)
    articles = [article(number, 40, rng) for number in range(60)]
    (folder / "raw.txt").write_text("".join(f" = Title {i} = \n\n {text} \n = = Part = = \n"
                                            for i, text in enumerate(articles)))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *PIECES, *WORDS, "."]) + "\n")
    for options in (["text_formatting", "--input_files", str(folder / "raw.txt")],
                    ["sharding", "--n_training_shards", "2", "--n_test_shards", "1"]):
        done = prepare(folder, "--action", *options)
        assert done.returncode == 0, done.stderr
    return folder


def hdf5(folder: Path, *options: str) -> Path:
    """Makes the files with two passes, and gives their folder."""
    done = prepare(folder, "--action", "create_hdf5_files", "--n_training_shards", "2", "--n_test_shards", "1",
                   "--vocab_file", str(folder / "vocab.txt"), "--max_seq_length", str(LENGTH),
                   "--max_predictions_per_seq", str(PREDICTIONS), "--dupe_factor", "2", "--n_processes", "1", *options)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[0].split(".hdf5")[0]).parent


@pytest.fixture(scope="module")
def files(folder) -> Path:
    return hdf5(folder)


def instances(folder: Path) -> list[dict]:
    """Reads the layout: tokens as they were before masking, what is masked, and the label."""
    found = []
    for path in sorted(folder.glob("*_training_*.hdf5")):
        with h5py.File(path) as file:
            expected = {"input_ids": ("i4", LENGTH), "input_mask": ("i1", LENGTH), "segment_ids": ("i1", LENGTH),
                        "masked_lm_positions": ("i4", PREDICTIONS), "masked_lm_ids": ("i4", PREDICTIONS),
                        "next_sentence_labels": ("i1", None)}
            assert set(file) == set(expected)
            count = len(file["input_ids"])
            for name, (dtype, width) in expected.items():
                assert file[name].dtype == dtype and file[name].compression == "gzip"
                assert file[name].shape == ((count,) if width is None else (count, width))
            data = {name: file[name][:].tolist() for name in file}
        for row in range(count):
            one = {name: values[row] for name, values in data.items()}
            size = sum(one["input_mask"])
            assert one["input_mask"] == [1] * size + [0] * (LENGTH - size)
            masked = one["masked_lm_positions"]
            masked = masked[:masked.index(0)] if 0 in masked else masked
            assert one["masked_lm_positions"] == masked + [0] * (PREDICTIONS - len(masked))
            assert one["masked_lm_ids"][len(masked):] == [0] * (PREDICTIONS - len(masked))
            assert masked == sorted(set(masked))
            tokens = one["input_ids"][:size]
            assert one["input_ids"][size:] == [PAD] * (LENGTH - size)
            shown = [tokens[place] for place in masked]
            for place, token in zip(masked, one["masked_lm_ids"]):
                tokens[place] = token
            found.append({"tokens": tokens, "masked": masked, "shown": shown, "segments": one["segment_ids"],
                          "random": one["next_sentence_labels"]})
    return found


@pytest.fixture(scope="module")
def read(files) -> list[dict]:
    return instances(files)


def test_form(read):
    for one in read:
        tokens = one["tokens"]
        middle = tokens.index(SEP)
        assert tokens[0] == CLS and tokens[-1] == SEP and tokens.count(SEP) == 2 and tokens.count(CLS) == 1
        assert 1 < middle < len(tokens) - 2  # both texts have tokens
        assert one["segments"] == ([0] * (middle + 1) + [1] * (len(tokens) - middle - 1)
                                   + [0] * (LENGTH - len(tokens)))
        assert MASK not in tokens and PAD not in tokens
        assert not {0, middle, len(tokens) - 1} & set(one["masked"])


def test_masking(read):
    """15% of all tokens, at most as many as there is room for; 80% [MASK], 10% kept, 10% any entry, evenly."""
    assert all(len(one["masked"]) == min(PREDICTIONS, max(1, round(PROBABILITY * len(one["tokens"]))))
               for one in read)
    kinds, replaced = Counter(), Counter()
    for one in read:
        for place, token in zip(one["masked"], one["shown"]):
            kind = "mask" if token == MASK else "kept" if token == one["tokens"][place] else "random"
            kinds[kind] += 1
            replaced[token] += kind == "random"
    total = sum(kinds.values())
    assert total > 8000
    for kind, share in (("mask", 0.8), ("kept", 0.1), ("random", 0.1)):
        assert abs(kinds[kind] / total - share) < 4 * (share * (1 - share) / total) ** 0.5 + 1 / 120, (kind, kinds)
    assert len([token for token in replaced if replaced[token]]) > 100  # of 129 entries
    places = Counter(place * 8 // len(one["tokens"]) for one in read for place in one["masked"] if
                     len(one["tokens"]) == LENGTH)
    assert max(places.values()) < 1.25 * min(places[place] for place in range(1, 7))


def test_lengths(read):
    """Nine in ten aim at the full length; the others at any from 2."""
    sizes = Counter(len(one["tokens"]) for one in read)
    full = sizes[LENGTH] / len(read)
    assert 0.75 < full < 0.95 and max(sizes) == LENGTH
    assert len([size for size in sizes if size < LENGTH // 2]) > 5


def articles_of(one: dict) -> tuple[set, set]:
    """Which articles the two texts have beginnings of sentences of: the two words after a full stop."""
    stop, middle = len(SPECIAL) + len(PIECES) + len(WORDS), one["tokens"].index(SEP)
    found = []
    for part in (one["tokens"][1:middle], one["tokens"][middle + 1:-1]):
        found.append({tuple(part[place + 1:place + 3]) for place, token in enumerate(part) if token == stop
                      and place + 2 < len(part)})
    return found[0], found[1]


def test_next_sentence(read):
    """Half of the second texts are random, of another article; the others go on."""
    share = sum(one["random"] for one in read) / len(read)
    assert 0.5 - 4 * 0.5 / len(read) ** 0.5 < share < 0.6  # one sentence alone is always followed by a random one
    seen = Counter()
    for one in read:
        first, second = articles_of(one)
        assert len(first) <= 1 and len(second) <= 1
        if first and second:
            assert (first != second) == one["random"]
            seen[one["random"]] += 1
    assert min(seen[0], seen[1]) > 200


def test_whole_words(folder, read):
    """By default pieces are masked one by one; as an option those of a word together."""
    def cut(found):
        """How many words are masked in part."""
        total = 0
        for one in found:
            tokens, masked = one["tokens"], set(one["masked"])
            for place in range(1, len(tokens)):
                if 5 <= tokens[place] < FIRST and tokens[place - 1] not in (CLS, SEP):
                    total += (place in masked) != (place - 1 in masked)
        return total
    assert cut(read) > 1000
    whole = instances(hdf5(folder, "--whole_word_masking"))
    assert cut(whole) == 0 and sum(len(one["masked"]) for one in whole) > 0.9 * sum(len(one["masked"]) for one in read)


def test_again(folder, files):
    """A second call keeps what is there, makes what is missing, and the same seed gives the same data."""
    paths = sorted(files.glob("*.hdf5"))
    before, kept = instances(files), paths[-1].stat().st_mtime_ns
    (files / "wikicorpus_en_training_0.hdf5").unlink()
    assert hdf5(folder) == files and instances(files) == before and paths[-1].stat().st_mtime_ns == kept
    assert not [path for path in files.iterdir() if path.name.startswith(".")]
    other = hdf5(folder, "--random_seed", "7")
    assert other != files and instances(other) != before


@pytest.mark.parametrize("options, message", [
    (["--action", "create_tfrecord_files"], "use create_hdf5_files"),
    (["--action", "sharding", "--n_training_shards", "50", "--n_test_shards", "1"], "ask for fewer shards"),
    (["--action", "create_hdf5_files", "--vocab_file", "none"], "no vocabulary"),
])
def test_refusals(folder, options, message):
    done = prepare(folder, *options)
    assert done.returncode and message in done.stderr


def test_download_goes_on(tmp_path, monkeypatch):
    """A file that was cut off is continued, not fetched again."""
    import http.server
    import threading
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import bertPrep
    data, asked = bytes(range(256)) * 40, []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers.get("Range"))
            start = int(asked[-1][6:-1]) if asked[-1] else 0
            self.send_response(206 if asked[-1] else 200)
            self.end_headers()
            self.wfile.write(data[start:])

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (tmp_path / "file.part").write_bytes(data[:1000])
        bertPrep.fetch(f"http://127.0.0.1:{server.server_port}/file", tmp_path / "file")
        bertPrep.fetch(f"http://127.0.0.1:{server.server_port}/other", tmp_path / "other")
    finally:
        server.shutdown()
        server.server_close()
    assert asked == ["bytes=1000-", None]
    assert (tmp_path / "file").read_bytes() == (tmp_path / "other").read_bytes() == data
