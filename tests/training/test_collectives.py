"""Collectives by MPI give every process the sums and pieces of all, and a script its place among them."""

import os

import pytest
import torch
from distributed_training import run_by_mpi, without_mpi
from test_training_distributed import data_of, part, trainer_of, weights
from test_training_legacy import legacy

from onnxtrain import _C
from onnxtrain.training import _collectives

pytestmark = pytest.mark.skipif(bool(without_mpi()), reason=without_mpi())

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def collectives(rank):
    """All of them, of three processes, and what they refuse before anything is sent."""
    info = _C.mpi_open()
    found = {"info": info, "env": int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])}
    for dtype in DTYPES:
        value = torch.arange(7).to(dtype) * (rank + 1)
        _C.mpi_all_reduce(value)
        own = torch.empty(2, dtype=dtype)
        _C.mpi_reduce_scatter(own, torch.arange(6).to(dtype) * (rank + 1))
        whole = torch.empty(6, dtype=dtype)
        _C.mpi_all_gather(whole, own)
        sent = torch.full((3,), rank).to(dtype)
        _C.mpi_broadcast(sent, 2)
        found[dtype] = value, own, whole, sent
    rounded = torch.tensor([256.0], dtype=torch.bfloat16) if rank == 0 else torch.tensor([1.0], dtype=torch.bfloat16)
    _C.mpi_all_reduce(rounded)
    empty = torch.empty(0)
    _C.mpi_all_reduce(empty)
    _C.mpi_barrier()
    found["rounded"] = float(rounded)
    for error, message, call, *args in (
            (ValueError, "not contiguous", _C.mpi_all_reduce, torch.ones(4, 4).t()),
            (ValueError, "2 elements of float in each of 3 processes do not make 5 of float", _C.mpi_reduce_scatter,
             torch.empty(2), torch.empty(5)),
            (ValueError, "of float in each of 3 processes do not make 6 of double", _C.mpi_all_gather,
             torch.empty(6).double(), torch.empty(2)),
            (ValueError, "root is rank 3, expected 0 to 2", _C.mpi_broadcast, torch.empty(2), 3),
            (ValueError, "ONNX dtype number 14 is not supported", _C.mpi_all_reduce, torch.ones(2, dtype=torch.complex64)),
            (TypeError, "tensor", _C.mpi_all_reduce, [1.0])):
        with pytest.raises(error, match=message):
            call(*args)
    found["told"] = (_collectives.world_rank(), _collectives.world_size(), _collectives.local_rank(),
                     _collectives.local_size())
    _C.mpi_barrier()  # what was refused has not been sent
    _C.mpi_leave()
    return found


def test_collectives(tmp_path):
    results = run_by_mpi(collectives, 3, tmp_path)
    for rank, found in enumerate(results):
        info = found["info"]
        assert "MPI" in info["about"] and found["told"] == (rank, 3, info["local_rank"], info["local_size"])
        assert (info["rank"], info["size"], info["local_rank"]) == (rank, 3, found["env"])
        for dtype in DTYPES:
            value, own, whole, sent = found[dtype]
            assert torch.equal(value, (torch.arange(7) * 6).to(dtype))
            assert torch.equal(own, (torch.arange(6) * 6)[2 * rank:2 * rank + 2].to(dtype))
            assert torch.equal(whole, (torch.arange(6) * 6).to(dtype))
            assert torch.equal(sent, torch.full((3,), 2).to(dtype))
        assert found["rounded"] == 258.0 or found["rounded"] == 256.0  # 256 + 1 is 256 in bfloat16, 1 + 1 + 256 is 258


def mpirun_counts(rank):
    """A trainer that was not told of several processes, and the older form that was told of others."""
    trainer = trainer_of(rank, "sgd", 1)
    for x, y in part(data_of(3, 2), rank):
        trainer.train_step(x, y)
    older = legacy(torch.nn.Linear(8, 4), "SGDOptimizer", world_size=4, world_rank=3)
    older.train_step(*part(data_of(1, 2), rank)[0], torch.tensor([0.1]))
    state = trainer.state_dict()["trainer_options"]
    return weights(trainer), older.state_dict(), state["world_rank"], state["world_size"]


def test_mpirun_says_how_many_processes_there_are(tmp_path):
    one, other = run_by_mpi(mpirun_counts, 2, tmp_path)
    assert one[2:] == (0, 2) and other[2:] == (1, 2)
    alone = trainer_of(0, "sgd", 1)
    for x, y in data_of(3, 2):
        alone.train_step(x, y)
    for name, value in weights(alone).items():
        assert torch.equal(one[0][name], other[0][name]), name
        torch.testing.assert_close(one[0][name], value, rtol=2e-5, atol=2e-6)
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
