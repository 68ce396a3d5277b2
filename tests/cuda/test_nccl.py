"""NCCL between processes, as the emulation has it: training with MPI to meet, and rules of the library."""

from __future__ import annotations

import peers
import pytest
import torch
from distributed_training import mpirun, run_by_mpi, without_mpi
from planted import Fault

needs_mpi = pytest.mark.skipif(bool(without_mpi()), reason=without_mpi())


def in_a_call(code: str, message: str) -> Fault:
    begin = "static ont_status enqueue(void *comm, const ont_comm_call *c, void *stream)\n{\n    int type, sum;\n"
    return Fault("libs/nccl.c", begin, f"{begin}    int device = 0;\n    cudaGetDevice(&device);\n    {code}\n",
                 "two_ranks", message)


FAULTS = {
    "of another size": in_a_call(
        "ont_comm_call less = *c;\n    less.n -= (size_t)device;\n    c = &less;",
        "ncclAllReduce of 7 elements in rank 0, but ncclAllReduce of 6 in rank 1"),
    "that one rank leaves out": in_a_call("if (device) return ONT_OK;", "waits for ranks that do not call it"),
    "of another device": in_a_call("cudaSetDevice(0);", "a communicator of device 1, but device 0 is current"),
    "with another device's memory": in_a_call(
        "static const void *_Atomic kept;\n    if (device) kept = c->from;\n    ont_comm_call other = *c;\n"
        "    while (!kept) continue;\n    other.from = kept;\n    c = &other;",
        "ncclAllReduce: a buffer of device 1, and the communicator is device 0's"),
    "on another device's stream": in_a_call(
        "static void *_Atomic kept;\n    if (device) kept = stream;\n    while (!kept) continue;\n    stream = kept;",
        "ncclAllReduce: the stream is device 1's, but device 0 is current"),
    "whose buffers overlap": in_a_call(
        "ont_comm_call other = *c;\n    other.to = (char *)other.to + 4;\n    c = &other;",
        "ncclAllReduce: the buffers overlap"),
    "of another type": Fault("libs/nccl.c", "case ONT_FLOAT64: *type = NCCL_FLOAT64;",
                             "case ONT_FLOAT64: *type = NCCL_FLOAT64 + 2;", "two_ranks", "NCCL: there is no type 10"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_call(planted_faults, name):
    planted_faults.assert_found(name)


@needs_mpi
def test_training_is_that_of_one_process_and_of_mpi(plugin_of_peers, tmp_path, monkeypatch):
    """With all batches; to the bit as through the memory of the CPU, since two terms have one sum."""
    by_nccl = run_by_mpi(peers.train, 2, tmp_path, plugin_of_peers)
    monkeypatch.setenv("ONT_EMULATE_MISSING", "libnccl.so.2")
    by_mpi = run_by_mpi(peers.train, 2, tmp_path, plugin_of_peers)
    counts = [[found.pop("calls") for found in results] for results in (by_nccl, by_mpi)]
    assert min(counts[0]) > 50 and counts[1] == [0, 0], counts
    for rank in (0, 1):
        for key, (losses, values, elements) in by_nccl[rank].items():
            same_losses, same, _ = by_mpi[rank][key]
            assert all(torch.equal(a, b) for a, b in zip(losses, same_losses, strict=True)), key
            assert all(torch.equal(value, same[name]) for name, value in values.items()), key
            assert all(torch.equal(value, by_nccl[0][key][1][name]) for name, value in values.items()), key
            config, stage = key
            whole = by_nccl[rank][config, 0][2]
            assert elements == whole if not stage or not whole else 0 < elements < whole, key
    for config, steps in (("adam", 1), ("lamb", 2), ("sgd", 1)):
        losses, values = peers.alone(config, steps)
        for stage in (0, 1):
            both = [by_nccl[rank][config, stage] for rank in (0, 1)]
            for k, loss in enumerate(losses):
                torch.testing.assert_close((both[0][0][k] + both[1][0][k]) / 2, loss, rtol=2e-5, atol=2e-6)
            for name, value in values.items():
                torch.testing.assert_close(both[0][1][name], value, rtol=2e-5, atol=2e-6)


@needs_mpi
def test_a_process_that_ends_is_known(plugin_of_peers, tmp_path):
    path = tmp_path / "ends.py"
    path.write_text("import sys, torch, peers\nrank = int(__import__('os').environ['OMPI_COMM_WORLD_RANK'])\n"
                    "torch.set_num_threads(1)\nprint(peers.ends(rank, sys.argv[1]))\n", encoding="utf-8")
    text, _ = mpirun(2, [path, plugin_of_peers]).communicate(timeout=200)
    assert "heard" in text, text


@needs_mpi
@pytest.mark.parametrize(("variable", "value", "said"), [
    ("ONT_EMULATE_MISSING", "libnccl.so.2", "device 'emulated:0' has no NCCL (libnccl.so.2"),
    ("ONT_EMULATE_NCCL_FAULT", "ncclGetUniqueId", "NCCL, an id: unhandled system error"),
    ("ONT_EMULATE_NCCL_FAULT", "ncclCommInitRank", "NCCL, a communicator: unhandled system error"),
])
def test_without_nccl_a_sentence_says_so(plugin_of_peers, tmp_path, variable, value, said, monkeypatch):
    monkeypatch.setenv(variable, value)
    path = tmp_path / "without.py"
    path.write_text("import sys, torch, peers\nfrom onnxtrain.training import _collectives\n"
                    "rank = int(__import__('os').environ['OMPI_COMM_WORLD_RANK'])\npeers.on_device(sys.argv[1], rank)\n"
                    "table = _collectives.MpiCollectives(torch.device('cpu'))\nassert table._nccl is None\n"
                    "table.all_reduce(value := torch.ones(3))\nassert value.tolist() == [2.0] * 3\n", encoding="utf-8")
    job = mpirun(2, [path, plugin_of_peers])
    text, _ = job.communicate(timeout=200)
    assert job.returncode == 0, text
    assert "gradients go through the memory of the CPU, which is slow, because" in text and said in text, text


@needs_mpi
@pytest.mark.parametrize(("fault", "said"), [("ncclAllReduce", "NCCL, ncclAllReduce: unhandled system error"),
                                             ("async", "a collective that was enqueued before: unhandled system")])
def test_a_failure_of_the_library_is_an_exception(plugin_of_peers, tmp_path, monkeypatch, fault, said):
    monkeypatch.setenv("ONT_EMULATE_NCCL_FAULT", fault)
    path = tmp_path / "fails.py"
    path.write_text("import sys, torch, peers\nrank = int(__import__('os').environ['OMPI_COMM_WORLD_RANK'])\n"
                    "torch.set_num_threads(1)\npeers.train(rank, sys.argv[1], (0,))\n", encoding="utf-8")
    job = mpirun(2, [path, plugin_of_peers])
    text, _ = job.communicate(timeout=200)
    assert job.returncode and "all_reduce failed" in text and said in text, text
