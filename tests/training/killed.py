"""Kills a process of a training run again and again; each time the job has to be over soon, name the rank, and go on
from its last checkpoint as if nothing had happened.

    python tests/training/killed.py --launcher torchrun --times 50 --seed 3

Every other time the process dies while it writes a checkpoint. At the end the losses of all steps, of those that were
taken twice too, are compared with those of a run that nobody disturbed. test_training_killed.py does it a few times.
"""

import argparse
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from distributed_training import MPI

EVERY = 2  # updates between checkpoints
NAMED = {"torchrun": r"local_rank: {0}\b", "mpirun": r"process rank {0} with PID"}


# ---- a process that trains ----

def steps_of(folder):
    """Those of which there is a checkpoint, or a part of one, the last one first."""
    return sorted({int(found[1]) for path in folder.glob("step*.ort.pt")
                   if (found := re.match(r"step(\d+)\.", path.name))}, reverse=True)


def dies_while_writing():
    """From now on torch.save() writes half of a file and is killed."""
    whole = torch.save

    def half(value, file):
        content = io.BytesIO()
        whole(value, content)
        file.write(content.getvalue()[:len(content.getvalue()) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half


def work(folder, updates, rank, victim, fatal_step):
    """Trains to so many updates, beginning with the last whole checkpoint."""
    from test_training_distributed import data_of, part, trainer_of

    from onnxtrain.training import checkpoint

    torch.set_num_threads(1)
    trainer = trainer_of(0, "adam", 2, 1)
    done = 0
    for step in steps_of(folder):
        try:
            checkpoint.experimental_load_checkpoint(trainer, str(folder), f"step{step}", strict=True)
        except AssertionError:  # not all processes have written theirs
            continue
        done = step
        break
    data = part(data_of(updates, 2), rank)
    with open(folder / f"losses{rank}", "a", encoding="utf-8") as losses:
        for step in range(done, updates):
            loss = float(trainer.train_step(*data[step])[0])
            losses.write(json.dumps([os.getpid(), step, loss]) + "\n")
            losses.flush()
            time.sleep(0.05)  # whoever kills it has to find it in time
            if (step + 1) % EVERY == 0:
                if rank == victim and step >= fatal_step >= 0:
                    dies_while_writing()
                checkpoint.experimental_save_checkpoint(trainer, str(folder), f"step{step + 1}")
                if rank == 0:
                    for old in steps_of(folder)[3:]:
                        for path in folder.glob(f"step{old}.*"):
                            path.unlink()


# ---- what kills it ----

def launched(launcher, folder, *arguments):
    """Two processes, as a subprocess.Popen."""
    command = [str(Path(__file__).resolve()), "--work", str(folder), *map(str, arguments)]
    start = {"torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                          "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"],
             "mpirun": ["mpirun", "--oversubscribe", "-np", "2", sys.executable]}[launcher]
    output = open(folder / "output", "w+", encoding="utf-8")  # noqa: SIM115
    return subprocess.Popen([*start, *command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                            env={**os.environ, **MPI, "ORTMODULE_CACHE_DIR": str(folder / "exports")})


def lines_of(folder, rank):
    path = folder / f"losses{rank}"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("]")]


def is_dead(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def kill_one(launcher, folder, updates, victim, writing, wait):
    """One run that is killed; seconds until it is over.

    Args:
        victim: rank of the process. writing: whether it dies while it writes a checkpoint, else some time after wait
            steps.
    """
    before = len(lines_of(folder, victim))
    first = max((line[1] for line in lines_of(folder, victim)), default=0)
    job = launched(launcher, folder, updates, victim, first + wait if writing else -1)
    end = time.time() + 300
    killed, sent = None, False
    while job.poll() is None and time.time() < end:
        found = lines_of(folder, victim)[before:]
        if found and killed is None:
            if len(found) >= wait and not writing and not sent:
                time.sleep(random.random() * 0.05)
                os.kill(found[0][0], signal.SIGKILL)
                sent = True
            killed = time.time() if is_dead(found[0][0]) else None
        time.sleep(0.01)
    over = time.time()
    text = (folder / "output").read_text(encoding="utf-8")
    assert job.poll() is not None, f"the job is still running after 300 s: {text}"
    assert job.returncode != 0, f"the job ended without an error: {text}"
    assert re.search(NAMED[launcher].format(victim), text), f"nobody names rank {victim}: {text}"
    return over - (killed or over)


def finish(launcher, folder, updates):
    job = launched(launcher, folder, updates, -1, -1)
    code = job.wait(600)
    assert code == 0, (folder / "output").read_text(encoding="utf-8")


def run(launcher, times, folder, seed):
    """Seconds that each of the jobs took to end. AssertionError where something is not as it has to be."""
    random.seed(seed)
    updates = 12 * times + 8
    quiet, folder = folder / "quiet", folder / "killed"
    for path in (quiet, folder):
        path.mkdir(parents=True)
    finish(launcher, quiet, updates)
    took = []
    for turn in range(times):
        victim, writing, wait = random.randrange(2), turn % 2 == 1, random.randrange(3, 8)
        took.append(kill_one(launcher, folder, updates, victim, writing, wait))
        print(f"{launcher} {turn + 1}: rank {victim} was killed {'while it wrote' if writing else 'in a step'}; the job "
              f"was over {took[-1]:.1f} s later", flush=True)
        assert took[-1] < 10
    finish(launcher, folder, updates)
    again = 0
    for rank in range(2):
        wanted = {step: loss for _, step, loss in lines_of(quiet, rank)}
        found = lines_of(folder, rank)
        assert {step for _, step, _ in found} == set(wanted) == set(range(updates))
        wrong = [(step, loss, wanted[step]) for _, step, loss in found if loss != wanted[step]]
        assert not wrong, f"rank {rank}: {wrong}"
        again += len(found) - updates
    print(f"{launcher}: {times} kills, seed {seed}: the losses of all {updates} steps are those of an undisturbed run, "
          f"{again} of them taken again; the longest job was over after {max(took):.1f} s")
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", help="run as a process of the job, in this folder")
    parser.add_argument("numbers", nargs="*", type=int, help="of --work: updates, victim, step from which on it dies")
    parser.add_argument("--launcher", choices=list(NAMED), default="torchrun")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.work:
        rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
        work(Path(given.work), given.numbers[0], rank, *given.numbers[1:])
        return
    with tempfile.TemporaryDirectory() as name:
        run(given.launcher, given.times, Path(name), given.seed)


if __name__ == "__main__":
    main()
