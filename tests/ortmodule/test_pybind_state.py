"""Functions that samples of the old trainers call answer by the launcher's variables, and need no GPU."""

import torch

import onnxtrain.compat.onnxruntime  # noqa: F401


def test_helpers_of_samples(monkeypatch, caplog):
    """Without a launcher, by torchrun's environment, by mpirun's; what concerns a GPU changes nothing without one."""
    from onnxruntime.capi._pybind_state import (
        ArenaExtendStrategy,
        get_mpi_context_local_rank,
        get_mpi_context_local_size,
        get_mpi_context_world_rank,
        get_mpi_context_world_size,
        set_arena_extend_strategy,
        set_cuda_device_id,
        set_cuda_mem_limit,
        set_seed,
    )

    def told():
        return (get_mpi_context_world_rank(), get_mpi_context_world_size(), get_mpi_context_local_rank(),
                get_mpi_context_local_size())

    torchrun = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    mpirun = {"OMPI_COMM_WORLD_RANK": 2, "OMPI_COMM_WORLD_SIZE": 6, "OMPI_COMM_WORLD_LOCAL_RANK": 0,
              "OMPI_COMM_WORLD_LOCAL_SIZE": 3}
    for name in (*torchrun, *mpirun):
        monkeypatch.delenv(name, raising=False)
    assert told() == (0, 1, 0, 1)
    for name, value in mpirun.items():
        monkeypatch.setenv(name, str(value))
    assert told() == (2, 6, 0, 3)
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    assert told() == (5, 8, 1, 4)
    set_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(1))
    set_arena_extend_strategy(ArenaExtendStrategy.kSameAsRequested)
    assert "no effect" in caplog.text
    from onnxruntime import SessionOptions
    from onnxruntime.training import ORTTrainerOptions

    session = SessionOptions()
    session.enable_mem_pattern = False
    assert ORTTrainerOptions({"session_options": session}).session_options.enable_mem_pattern is False
    if not torch.cuda.is_available():
        set_cuda_device_id(0)
        set_cuda_mem_limit(int(32e9))
