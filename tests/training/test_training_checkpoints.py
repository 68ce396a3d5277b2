"""State of an ORTTrainer: dicts, files, and runs that go on from them bit for bit."""

import copy
import functools
import os
import time
import warnings

import numpy as np
import pytest
import torch
from eager_training import batches, net, trainer_of

from onnxtrain.training import amp, checkpoint, optim
from onnxtrain.training._state import written_whole

CONFIGS = {"sgd": optim.SGDConfig, "adam": optim.AdamConfig, "lamb": optim.LambConfig}


def trainer(name="adam", seed=0, steps=2, **more):
    """With everything that a run can have: a schedule, accumulation, float16."""
    return trainer_of(net(seed, dropout=0.2), CONFIGS[name](lr=0.01), batch={"gradient_accumulation_steps": steps},
                      lr_scheduler=optim.LinearWarmupLRScheduler(20, 0.1), mixed_precision={
                          "enabled": True, "loss_scaler": amp.DynamicLossScaler(up_scale_window=3)}, **more)


def run(trainer, data):
    torch.manual_seed(5)
    return [trainer.train_step(x, label)[0] for x, label in data]


def same_state(one, other):
    for (a, x), (b, y) in zip(one._torch_model.state_dict().items(), other._torch_model.state_dict().items()):
        assert a == b and torch.equal(x, y), a
    for entry in (one.state_dict(), other.state_dict()):
        assert set(entry) >= {"model", "optimizer", "train_step_info", "trainer_options", "loss_scaler"}
    np.testing.assert_equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("steps", [4, 5])  # after an update, and within the steps of one
@pytest.mark.parametrize("way", ["file", "dict", "flat dict", "loaded after a step"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_goes_on_bit_for_bit(name, way, steps, tmp_path):
    first, data = trainer(name), batches(9)
    run(first, data[:steps])
    second = trainer(name, seed=3)
    if way == "loaded after a step":
        run(second, data[:1])
    if way == "dict":
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    elif way == "flat dict":
        checkpoint.experimental_load_state_dict(second, checkpoint.experimental_state_dict(first), strict=True)
        second._train_step_info.step = steps
        second._train_step_info.optimization_step = first._train_step_info.optimization_step
        second.options.mixed_precision.loss_scaler = copy.copy(first.options.mixed_precision.loss_scaler)
    else:
        checkpoint.experimental_save_checkpoint(first, str(tmp_path), checkpoint_state_dict={"epoch": 3})
        assert checkpoint.experimental_load_checkpoint(second, str(tmp_path), strict=True) == {"epoch": 3}
    assert run(second, data[steps:]) == run(first, data[steps:])
    same_state(first, second)
    assert second._train_step_info.optimization_step == 4


def test_layout():
    made = trainer(steps=1)
    with pytest.warns(UserWarning, match="session is not initialized yet. Please run train_step or eval_step"):
        assert made.state_dict() == {}
    run(made, batches(2))
    state = made.state_dict()
    weights = dict(made._torch_model.named_parameters())
    assert set(state["model"]["full_precision"]) == set(weights) == set(state["optimizer"])
    entry = state["optimizer"]["first.weight"]
    assert set(entry) == {"Moment_1", "Moment_2", "Update_Count"} and entry["Moment_1"].shape == (16, 8)
    assert entry["Update_Count"].dtype == np.int64 and entry["Update_Count"].tolist() == [3]
    assert state["trainer_options"] == {
        "mixed_precision": True, "zero_stage": 0, "world_rank": 0, "world_size": 1, "optimizer_name": "AdamOptimizer",
        "data_parallel_size": 1, "horizontal_parallel_size": 1}
    assert state["train_step_info"] == {"optimization_step": 2, "step": 2}
    plain = made.state_dict(pytorch_format=True)
    net().load_state_dict(plain)
    before = state["model"]["full_precision"]["first.weight"].copy()
    run(made, batches(1))
    np.testing.assert_array_equal(before, state["model"]["full_precision"]["first.weight"])  # a copy
    assert "Moment_1_first.weight" in checkpoint.experimental_state_dict(made)
    assert set(checkpoint.experimental_state_dict(made, include_optimizer_state=False)) == set(weights)
    lamb = trainer("lamb", steps=1)
    run(lamb, batches(2))
    assert lamb.state_dict()["optimizer"]["shared_optimizer_state"]["Step"].tolist() == [3]
    sgd = trainer("sgd", steps=1)
    run(sgd, batches(1))
    assert sgd.state_dict()["optimizer"] == {}


@pytest.mark.parametrize("flat", [False, True])
def test_weights_of_bfloat16(flat):
    """NumPy has no such dtype of its own."""
    first, second = [trainer_of(net(seed).bfloat16(), optim.SGDConfig()) for seed in (0, 1)]
    for each in (first, second):
        each.train_step(*[x.bfloat16() if x.is_floating_point() else x for x in batches(1)[0]])
    if flat:
        checkpoint.experimental_load_state_dict(second, checkpoint.experimental_state_dict(first), strict=True)
    else:
        second.load_state_dict(first.state_dict())
    for one, other in zip(first._torch_model.parameters(), second._torch_model.parameters()):
        assert one.dtype == torch.bfloat16 and torch.equal(one, other)


def ready(name="adam"):
    made = trainer(name, steps=1)
    run(made, batches(1))
    return made


@pytest.mark.parametrize("change, message", [
    (lambda s: s["model"].pop("full_precision"), r"Missing keys: \['full_precision'\] in state_dict\[model\]"),
    (lambda s: s["model"].update(half=1), r"Unexpected keys: \['half'\] in state_dict\[model\]"),
    (lambda s: s["model"]["full_precision"].pop("last.bias"),
     r"Missing keys: \['last.bias'\] in state_dict\[model\]\[full_precision\]"),
    (lambda s: s["optimizer"].update(x={}), r"Unexpected keys: \['x'\] in state_dict\[optimizer\]"),
    (lambda s: s["optimizer"]["last.bias"].pop("Moment_1"),
     r"Missing keys: \['Moment_1'\] in state_dict\[optimizer\]\[last.bias\]"),
])
def test_names_that_differ(change, message):
    made = ready()
    state = made.state_dict()
    change(state)
    before = made.state_dict()
    with pytest.raises(RuntimeError, match=message):
        made.load_state_dict(state)
    np.testing.assert_equal(made.state_dict(), before)


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_without_a_buffer(flat):
    """As onnxruntime-training's, whose graph does not read a BatchNorm's count."""
    def train(trainer):
        trainer.train_step(*batches(1)[0])
        return trainer

    class Named(torch.nn.Module):
        """forward has the description's name."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))

        def forward(self, x):
            return self.layers(x)

    first, second = [train(trainer_of(Named(), optim.SGDConfig())) for _ in range(2)]
    state = checkpoint.experimental_state_dict(first) if flat else first.state_dict()
    values = state if flat else state["model"]["full_precision"]
    del values["layers.1.num_batches_tracked"]
    load = functools.partial(checkpoint.experimental_load_state_dict, second) if flat else second.load_state_dict
    second._torch_model.layers[1].num_batches_tracked.fill_(7)
    with pytest.warns(UserWarning, match=r"no value for the buffers \['layers.1.num_batches_tracked'\]"):
        load(state, strict=True)
    own = second._torch_model.state_dict()
    assert own.pop("layers.1.num_batches_tracked") == 7
    assert all(torch.equal(value, first._torch_model.state_dict()[name]) for name, value in own.items())
    del values["layers.0.weight"]
    with pytest.raises(RuntimeError, match="Missing keys: .*layers.0.weight"):
        load(state, strict=True)


def test_other_refusals_and_parts():
    made, before = ready(), ready().state_dict()
    with pytest.raises(AssertionError, match="Optimizer mismatch: expected AdamOptimizer, got LambOptimizer"):
        made.load_state_dict(ready("lamb").state_dict(), strict=False)
    wrong = made.state_dict()
    wrong["model"]["full_precision"]["last.bias"] = np.zeros(7, np.float32)
    with pytest.raises(ValueError, match=r"last.bias has the shape \(7,\), expected \(4,\)"):
        made.load_state_dict(wrong)
    wrong = made.state_dict()
    wrong["optimizer"]["last.bias"]["Moment_2"] = np.zeros(7, np.float32)
    with pytest.raises(ValueError, match=r"Moment_2 of last.bias has the shape \(7,\), expected \(4,\)"):
        made.load_state_dict(wrong)
    flat = checkpoint.experimental_state_dict(made)
    flat["other"] = flat.pop("last.bias")
    with pytest.raises(RuntimeError, match=r"Missing keys: \['last.bias'\] in .*; Unexpected keys: \['other'\]"):
        checkpoint.experimental_load_state_dict(made, flat, strict=True)
    checkpoint.experimental_load_state_dict(made, flat)
    part = {key: before[key] for key in ("optimizer", "trainer_options")}
    part["optimizer"]["first.bias"]["Moment_1"] += 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.load_state_dict(part)
    assert [str(w.message) for w in caught] == ["Missing key: train_step_info in state_dict",
                                                "Missing key: model in state_dict"]
    np.testing.assert_equal(made.state_dict()["optimizer"], part["optimizer"])


def test_a_file_is_whole_or_not_there(tmp_path):
    made = ready()
    path = tmp_path / "x.ort.pt"
    checkpoint.experimental_save_checkpoint(made, str(tmp_path), "x")
    old = path.read_bytes()

    class Unpickable:
        def __reduce__(self):
            raise RuntimeError("no")

    with pytest.warns(UserWarning, match="already exists, overwriting"), pytest.raises(RuntimeError, match="no"):
        checkpoint.experimental_save_checkpoint(made, str(tmp_path), "x", {"bad": Unpickable()})
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["x.ort.pt"]

    def fails(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        written_whole(tmp_path / "y", fails)
    assert os.listdir(tmp_path) == ["x.ort.pt"]
    for name, age in ((".onnxtrain-old", 7200), (".onnxtrain-new", 60)):  # of processes that were killed
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    checkpoint.experimental_save_checkpoint(made, str(tmp_path), "x")
    assert sorted(os.listdir(tmp_path)) == [".onnxtrain-new", "x.ort.pt"]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        written_whole(tmp_path / "no" / "y", fails)
    with pytest.raises(AssertionError, match="checkpoint_dir directory doesn't exist"):
        checkpoint.experimental_save_checkpoint(made, str(tmp_path / "no"))
    with pytest.raises(AssertionError, match="checkpoint file not found"):
        checkpoint.experimental_load_checkpoint(made, str(tmp_path))


# --- files of HDF5 ----------------------------------------------------------------------------------------------------


class TestHdf5:
    def test_a_run_goes_on(self, tmp_path):
        path = str(tmp_path / "a.ort")
        first, second, data = trainer(), trainer(seed=3), batches(8)
        run(first, data[:5])
        first.save_checkpoint(path, user_dict={"epoch": 3})
        assert os.listdir(tmp_path) == ["a.ort"]
        assert second.load_checkpoint(path) == {"epoch": 3}
        assert run(second, data[5:]) == run(first, data[5:])
        same_state(first, second)
        with pytest.raises(FileExistsError):
            first.save_checkpoint(path)
        with pytest.raises(AssertionError, match="a complete checkpoint, without ZeRO"):
            first.load_checkpoint(path, path)

    def test_parts_are_joined(self, tmp_path):
        """As onnxruntime-training cuts them: with mixed precision weights too, else moments alone."""
        from onnxtrain.training import _checkpoint_storage as storage

        whole = np.arange(12, dtype=np.float32).reshape(3, 4)
        for mixed in (False, True):
            paths = [str(tmp_path / f"{mixed}{rank}") for rank in (1, 0)]
            for path, rank, piece in zip(paths, (1, 0), (slice(5, 12), slice(0, 5))):
                cut = whole.reshape(-1)[piece]
                storage.save({
                    "model": {"full_precision": {"w": cut if mixed else whole, "bias": np.ones(2)}},
                    "optimizer": {"w": {"Moment_1": cut, "Moment_2": cut + 1, "Update_Count": np.array([4])}},
                    "partition_info": {"w": {"original_dim": [3, 4], "megatron_row_partition": [-1]}},
                    "trainer_options": {"mixed_precision": mixed, "zero_stage": 1, "world_size": 2, "world_rank": rank,
                                        "optimizer_name": "AdamOptimizer"}}, path)
            state = checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
            np.testing.assert_equal(state["model"]["full_precision"], {"w": whole, "bias": np.ones(2)})
            np.testing.assert_equal(state["optimizer"]["w"], {"Moment_1": whole, "Moment_2": whole + 1,
                                                              "Update_Count": np.array([4])})
            assert state["trainer_options"]["mixed_precision"] is mixed and state["trainer_options"]["zero_stage"] == 0
            assert torch.equal(checkpoint.aggregate_checkpoints(paths)["w"], torch.from_numpy(whole))
            with pytest.raises(AssertionError, match=r"processes \[1\], but 2 processes wrote one each"):
                checkpoint.aggregate_checkpoints(paths[:1])

    def test_parts_are_refused(self, tmp_path):
        from onnxtrain import UnsupportedError
        from onnxtrain.training import _checkpoint_storage as storage

        made, given = ready(), ready().state_dict()["trainer_options"]
        for place, (change, error, message) in enumerate((
                ({"horizontal_parallel_size": 2}, UnsupportedError, "horizontal_parallel_size above 1"),
                ({"zero_stage": 1}, AssertionError, "have no partition_info"))):
            storage.save({"trainer_options": {**given, **change}}, tmp_path / str(place))
            with pytest.raises(error, match=message):
                made.load_checkpoint(str(tmp_path / str(place)))
        storage.save({"trainer_options": {"zero_stage": 1}}, tmp_path / "a")
        with pytest.raises(AssertionError, match="trainer_options must have mixed_precision"):
            made.load_checkpoint(str(tmp_path / "a"))
        part = made.state_dict()
        part["trainer_options"] |= {"zero_stage": 1, "world_rank": 1, "world_size": 2}
        with pytest.raises(RuntimeError, match="the part of process 1 of 2, but this is process 0 of 1"):
            made.load_state_dict(part)
