"""csrc/py/comm.c: collectives over memory of devices, in three processes on two of them, and what is refused."""

from __future__ import annotations

import peers
import pytest
from distributed_training import run_by_mpi, without_mpi

from onnxtrain import _C, UnsupportedError


@pytest.mark.skipif(bool(without_mpi()), reason=without_mpi())
def test_collectives(plugin_of_peers, tmp_path):
    for rank, found in enumerate(run_by_mpi(peers.collectives, 3, tmp_path, plugin_of_peers)):
        peers.check_exchanged(found, rank, 3)
        assert found["short"].tolist() == [3, 3, 3] and found["value"].tolist() == [3.0] * 4


def test_refusals(emulated):
    for call in (_C.comm_about, _C.comm_id, lambda name: _C.comm_open(name, bytes(128), 0, 1)):
        with pytest.raises(UnsupportedError, match="device 'cpu' has no NCCL"):
            call("cpu")
    _C.open_plugin(str(emulated))
    assert _C.comm_about("emulated") == "NCCL 2.28.9"
    with pytest.raises(ValueError, match="an id has 128 bytes, not 3"):
        _C.comm_open("emulated", b"abc", 0, 1)
    with pytest.raises(ValueError, match="there is no device 'emulated:7'"):
        _C.comm_about("emulated:7")
