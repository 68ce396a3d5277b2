"""A signal ends a wait for other processes, and what MPI may still write to is held."""

import pytest
from distributed_training import mpirun, without_mpi

pytestmark = pytest.mark.skipif(bool(without_mpi()), reason=without_mpi())


def test_an_interrupt_ends_a_wait():
    script = """
import gc, os, signal, threading, weakref
import numpy as np
import torch
from onnxtrain import _C
if _C.mpi_open()["rank"]:
    import time
    time.sleep(60)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
memory = np.ones(3, np.float32)
alive, tensor = weakref.ref(memory), torch.from_numpy(memory)
try:
    _C.mpi_all_reduce(tensor)
except KeyboardInterrupt:
    print("interrupted")
tensor.data = torch.zeros(1)
del memory, tensor
gc.collect()
print("held" if alive() is not None else "freed")  # MPI may still write to it
try:
    _C.mpi_barrier()
except RuntimeError as error:
    print(error)
os._exit(7)
"""
    text, _ = mpirun(2, ["-c", script]).communicate(timeout=120)
    assert "interrupted" in text and "held" in text and "an earlier collective operation has failed" in text, text
