"""Kills a process by SIGKILL while it writes a checkpoint, again and again: each time the last whole one has to be there,
bit for bit what was saved.

    python tests/training/killed_writing.py --times 50 --seed 3

Files of torch.save and of HDF5 take turns; a kill counts where a part of a file was on the disk. Nothing is exported:
the process updates weights by gradients that it draws. test_training_killed.py does it a few times.
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
import warnings
from pathlib import Path

import torch
from eager_training import DESCRIPTION, cross_entropy, options

from onnxtrain.training import ORTTrainer, checkpoint, optim

CONTEXT = multiprocessing.get_context("forkserver")  # of one process that has imported everything
CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.export", "killed_writing"])
FORMS = ("torch", "hdf5")
PARTS = ".onnxtrain-*"  # files that are not complete


class Wide(torch.nn.Module):
    """Weights and moments are 9 MB, which take a while to be written."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = torch.nn.Linear(8, 850), torch.nn.Linear(850, 850), torch.nn.Linear(850, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def trainer_of():
    trainer = ORTTrainer(Wide(), DESCRIPTION, optim.AdamConfig(lr=0.001), loss_fn=cross_entropy, options=options())
    trainer._init_session()
    return trainer


def digest(trainer):
    found = hashlib.sha256(str(vars(trainer._train_step_info)["step"]).encode())
    for name, value in sorted(checkpoint.experimental_state_dict(trainer).items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def numbers(folder):
    return sorted(int(path.stem) for path in folder.glob("*.ort") if re.fullmatch(r"\d+", path.stem))


def load(trainer, folder, form):
    """The last checkpoint, if there is one; its step."""
    if form == "torch" and (folder / "last.ort.pt").exists():
        return checkpoint.experimental_load_checkpoint(trainer, str(folder), "last", strict=True)["number"]
    if form == "hdf5" and numbers(folder):
        return trainer.load_checkpoint(str(folder / f"{numbers(folder)[-1]}.ort"))["number"]
    return 0


def work(folder, form):
    """Trains from the last checkpoint on, and notes each one before it is written and after it."""
    warnings.simplefilter("ignore")  # the older file is overwritten
    torch.set_num_threads(1)
    trainer = trainer_of()
    number = load(trainer, folder, form)
    with open(folder / "log", "a", encoding="utf-8") as log:
        while True:
            number += 1
            for weight in trainer._trained.weights().values():
                weight.grad = torch.randn_like(weight)
            trainer._trained.update.step(0.001, 1.0, False)
            trainer._train_step_info.step += 1
            log.write(f"begin {number} {digest(trainer)}\n")
            log.flush()
            if form == "torch":
                checkpoint.experimental_save_checkpoint(trainer, str(folder), "last", {"number": number})
            else:
                trainer.save_checkpoint(str(folder / f"{number}.ort"), {"number": number})
                for old in numbers(folder)[:-2]:
                    (folder / f"{old}.ort").unlink()
            log.write(f"end {number} -\n")
            log.flush()


def lines_of(folder):
    path = folder / "log"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line.split() for line in lines if line.count(" ") == 2]


def kill_one(folder, form, share, size):
    """Kills a process when this share of a file of so many bytes is there, not at its first one.

    Returns:
        Bytes of the part that is left; None where the file was complete before.
    """
    before, first = set(folder.glob(PARTS)), len(lines_of(folder))
    process = CONTEXT.Process(target=work, args=(folder, form))
    process.start()
    end = time.time() + 300
    while not any(kind == "end" for kind, _, _ in lines_of(folder)[first:]):
        assert process.is_alive() and time.time() < end, "the process writes no checkpoint"
        time.sleep(0.005)
    part = None
    while time.time() < end:
        try:
            part = next((path for path in folder.glob(PARTS) if path not in before), None)
            if part is not None and part.stat().st_size >= share * size:
                break
        except FileNotFoundError:  # renamed meanwhile
            continue
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    left = [path for path in folder.glob(PARTS) if path not in before]
    return left[0].stat().st_size if left else None


def run(times, folder, seed):
    """Bytes of the parts that were on the disk at each kill. AssertionError where a checkpoint was lost."""
    draw, found = random.Random(seed), []
    reader, size = {}, {}
    for form in FORMS:
        (folder / form).mkdir()
        reader[form] = trainer_of()
        trainer_of().save_checkpoint(str(folder / "one.ort"))
        size[form] = (folder / "one.ort").stat().st_size
        (folder / "one.ort").unlink()
    tries = 0
    while len(found) < times:
        tries += 1
        assert tries < 5 * times + 10, f"of {tries} kills {len(found)} came while a file was written"
        form = FORMS[len(found) % 2]
        own = folder / form
        left = kill_one(own, form, draw.random(), size[form])
        lines = lines_of(own)
        saved = max(int(number) for kind, number, _ in lines if kind == "end")
        known = {int(number): text for kind, number, text in lines if kind == "begin"}
        number = load(reader[form], own, form)
        assert number >= saved, f"{form}: checkpoint {saved} was written, and the last one is {number}"
        assert digest(reader[form]) == known[number], f"{form}: checkpoint {number} is not what was saved"
        if left is not None:
            found.append(left)
            print(f"{form} {len(found)}: killed with {left:,} bytes of {size[form]:,}; checkpoint {number} is whole",
                  flush=True)
    print(f"{times} kills while a checkpoint was written, seed {seed}, and {tries - times} between two: the last whole "
          "one was there each time")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run(given.times, Path(name), given.seed)


if __name__ == "__main__":
    main()
