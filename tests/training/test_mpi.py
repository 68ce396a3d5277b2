"""What mpirun alone has: processes that end, interrupts, a library that is missing. That training is the same as in one
process is in test_training_distributed.py, and collectives are in test_collectives.py.
"""

import os
import re
import subprocess
import sys
import time

import pytest
from distributed_training import MPI, mpirun, without_mpi

pytestmark = pytest.mark.skipif(bool(without_mpi()), reason=without_mpi())


LOOP = """
import os, signal, sys, time
from pathlib import Path
import torch
from test_training_distributed import data_of, part, trainer_of
torch.set_num_threads(1)
rank, how = int(os.environ["OMPI_COMM_WORLD_RANK"]), sys.argv[1]
trainer = trainer_of(0, "adam", 2, 1)
data = part(data_of(3, 2), rank)
trainer.train_step(*data[0])
if rank == 1:
    Path(sys.argv[2]).write_text(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ArithmeticError("rank 1 has had enough")
    sys.exit(3)
trainer.train_step(*data[1])
print("not reached")
"""


@pytest.mark.parametrize("how, message", [
    ("kill", "rank 1 .*exited on signal 9"), ("raise", "rank 0 of 2: all_reduce failed.*: rank 1 has ended"),
    ("exit", "rank 0 of 2: all_reduce failed.*: rank 1 has ended")])
def test_a_process_that_ends_ends_the_job(how, message, tmp_path):
    job = mpirun(2, ["-c", LOOP, how, tmp_path / "when"])
    text, _ = job.communicate(timeout=180)
    assert time.time() - float((tmp_path / "when").read_text()) < 10
    assert job.returncode != 0 and "not reached" not in text
    assert re.search(message, text), text


def test_without_the_library():
    """Under mpirun, a build without MPI says so."""
    script = """
from onnxtrain import _C
def missing():
    raise OSError("_mpi.so: cannot open shared object file")
_C.mpi_open = missing
from test_training_distributed import trainer_of
from eager_training import batches
try:
    trainer_of(0, "sgd", 2).train_step(*batches(1)[0])
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env={**os.environ, **MPI, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
    assert "mpirun started this process, but MPI cannot be used: _mpi.so" in done.stdout, done.stderr
