"""A process of a training run is killed, in a step and while it writes a checkpoint: killed.py, a few times."""

import pytest
from distributed_training import without_mpi
from killed import run


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_run_goes_on_from_its_last_checkpoint(launcher, tmp_path):
    if launcher == "mpirun" and (reason := without_mpi()):
        pytest.skip(reason)
    assert len(run(launcher, 2, tmp_path, seed=1)) == 2
