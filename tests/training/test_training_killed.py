"""A process of a training run is killed, in a step and while it writes a checkpoint: killed.py and killed_writing.py, a few
times.
"""

import killed_writing
import pytest
from distributed_training import without_mpi
from killed import run


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_run_goes_on_from_its_last_checkpoint(launcher, tmp_path):
    if launcher == "mpirun" and (reason := without_mpi()):
        pytest.skip(reason)
    assert len(run(launcher, 2, tmp_path, seed=1)) == 2


def test_the_last_whole_checkpoint_survives_a_kill(tmp_path):
    assert len(killed_writing.run(4, tmp_path, seed=1)) == 4
