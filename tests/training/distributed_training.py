"""Runs a function of a test in several processes of one thread each, as torchrun starts them."""

import multiprocessing
import os
import socket
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
