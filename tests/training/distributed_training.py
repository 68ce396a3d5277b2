"""Runs a function of a test in several processes of one thread each, as torchrun starts them, or by mpirun."""

import importlib
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# One process imports what all the others need; it has no threads, so that they may be forks of it.
multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.export", "onnxtrain.training.legacy"])


def _main(rank, function, size, port, folder, args):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "ORTMODULE_CACHE_DIR": str(Path(folder) / "exports")}
    torch.set_num_threads(1)
    path = Path(folder) / f"{function.__name__}{rank}.pt"
    try:
        torch.save(function(rank, *args), path)
    except BaseException:
        torch.save(traceback.format_exc(), path)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


HERE = Path(__file__).resolve().parent
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


def without_mpi():
    """Why mpirun cannot be used here; empty where it can."""
    from onnxtrain import _C

    if shutil.which("mpirun") is None:
        return "mpirun is not installed (Debian: openmpi-bin)"
    if not Path(_C.__file__).with_name("_mpi.so").exists():
        return "this build has no _mpi.so (Debian: libopenmpi-dev, then build again)"
    return ""


def mpirun(size, command, **more):
    """The job, as a subprocess.Popen in a session of its own; `size` times a command of Python's."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(["mpirun", "--oversubscribe", "-np", str(size), sys.executable, *map(str, command)],
                            env={**os.environ, **MPI, "PYTHONPATH": path}, start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


def run_by_mpi(function, size, folder, *args):
    """run(), started by mpirun."""
    (Path(folder) / "arguments").write_bytes(pickle.dumps((str(folder), args)))
    job = mpirun(size, [__file__, function.__module__, function.__name__, Path(folder) / "arguments"])
    text, _ = job.communicate(timeout=300)
    assert job.returncode == 0, text
    return [torch.load(Path(folder) / f"{function.__name__}{rank}.pt", weights_only=False) for rank in range(size)]


def _main_by_mpi(module, name, path):
    folder, args = pickle.loads(Path(path).read_bytes())
    os.environ["ORTMODULE_CACHE_DIR"] = str(Path(folder) / "exports")
    torch.set_num_threads(1)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    torch.save(getattr(importlib.import_module(module), name)(rank, *args), Path(folder) / f"{name}{rank}.pt")


def start(function, size, folder, *args):
    """The processes, without waiting for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return mp.start_processes(_main, (function, size, port, str(folder), args), size, join=False,
                              start_method="forkserver")


def run(function, size, folder, *args):
    """What function(rank, *args), of a module's top level, gives in each process.

    The environment is torchrun's; the trainer initialises torch.distributed.
    """
    context = start(function, size, folder, *args)
    while not context.join(timeout=120):
        pass
    return [torch.load(Path(folder) / f"{function.__name__}{rank}.pt", weights_only=False) for rank in range(size)]


if __name__ == "__main__":
    _main_by_mpi(*sys.argv[1:])
