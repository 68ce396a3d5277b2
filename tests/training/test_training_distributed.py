"""Several processes, by torch.distributed and by MPI: the weights of one that has all batches, with ZeRO or without;
what is refused.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import h5py
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_training import run, run_by_mpi, start, without_mpi
from eager_training import DESCRIPTION, batches, cross_entropy, options
from test_training_legacy import legacy

import onnxtrain
from onnxtrain.training import ORTTrainer, _distributed, amp, checkpoint, optim
from onnxtrain.training._distributed import divided

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")
CONFIGS = {"sgd": optim.SGDConfig(lr=0.1), "adam": optim.AdamConfig(lr=0.01, lambda_coef=0.01),
           "transformers": optim.AdamConfig(lr=0.01, lambda_coef=0.01,
                                            weight_decay_mode=optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE),
           "lamb": optim.LambConfig(lr=0.02, lambda_coef=0.01)}
CASES = [("sgd", 3), ("adam", 1), ("transformers", 3), ("lamb", 1)]  # and the steps of one update
SIZE = 6  # of one process's batch


class Wide(torch.nn.Module):
    """Weights of odd sizes, one of which dominates, and one that no loss needs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 61), torch.nn.Linear(61, 13)
        self.last, self.unused = torch.nn.Linear(13, 4), torch.nn.Parameter(torch.ones(3))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.last(torch.tanh(self.second(F.gelu(self.first(x))))) * self.scale


def wide(seed):
    torch.manual_seed(seed)
    return Wide()


def trainer_of(seed, config, world, stage=0, steps=1, adasum=False, module=None, **more):
    return ORTTrainer(module or wide(seed), DESCRIPTION, CONFIGS[config], loss_fn=cross_entropy, options=options(
        batch={"gradient_accumulation_steps": steps}, distributed={
            "world_size": world, "allreduce_post_accumulation": True, "deepspeed_zero_optimization": {"stage": stage},
            "enable_adasum": adasum},
        **more))


def part(data, rank):
    return [(x[SIZE * rank:SIZE * (rank + 1)], y[SIZE * rank:SIZE * (rank + 1)]) for x, y in data]


def data_of(count, world):
    return batches(count, size=SIZE * world)


def weights(trainer):
    return {name: value.clone() for name, value in trainer._torch_model.state_dict().items()}


def close(one, other):
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


def elements_of_moments(trainer):
    return sum(value.numel() for _, optimizer in trainer._trained.update._optimizers
               for entry in optimizer.state.values() for key, value in entry.items() if key != "step")


# ---- equal to one process ----


def train_all(rank, world, folder):
    """Of each configuration and stage: losses and weights, and how much state this process has; and a checkpoint."""
    found = {}
    for config, steps in CASES:
        for stage in (0, 1):
            trainer = trainer_of(rank, config, world, stage, steps)  # other weights in each process before the first step
            losses = [trainer.train_step(x, y)[0] for x, y in part(data_of(51, world), rank)]
            evaluated = trainer.eval_step(*part(data_of(1, world), rank)[0])[0] if rank == 0 else None  # by itself
            found[config, steps, stage] = losses, weights(trainer), evaluated, elements_of_moments(trainer)
    found["overflow"] = overflow(rank, world)
    found["adasum"] = adasum(rank, world)
    found["bfloat16"] = bfloat16(rank, world)
    found["goes on"] = go_on(rank, world, folder)
    found["in one call"] = in_one_call(rank, world)
    return found


def overflow(rank, world):
    """Whether an update was made, and the scale, where one process alone has gradients that are not finite."""
    found = []
    for stage, combine in ((0, False), (1, False), (0, True)):
        scaler = amp.DynamicLossScaler(loss_scale=1024.0)
        trainer = trainer_of(0, "adam", world, stage, adasum=combine,
                             mixed_precision={"enabled": True, "loss_scaler": scaler})
        for bad in (False, True, False):
            x, y = part(data_of(1, world), rank)[0]
            before = weights(trainer)
            trainer.train_step(x * (float("inf") if bad and rank else 1.0), y)
            same = all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
            found.append((trainer._train_step_info.all_finite, same, scaler.loss_scale))
    return found


def adasum(rank, world):
    trainer = trainer_of(rank, "adam", world, adasum=True)
    for x, y in part(data_of(5, world), rank):
        trainer.train_step(x, y)
    return weights(trainer)


def bfloat16(rank, world):
    os.environ["ONNXTRAIN_REDUCE_DTYPE"] = "bfloat16" if rank else "float32"
    with pytest.raises(ValueError, match="the trainers of the processes differ"):
        trainer_of(0, "sgd", world).train_step(*part(data_of(1, world), rank)[0])
    os.environ["ONNXTRAIN_REDUCE_DTYPE"] = "bfloat16"
    found = []
    for stage in (0, 1):
        trainer = trainer_of(0, "sgd", world, stage)
        trainer.train_step(*part(data_of(1, world), rank)[0])
        found.append(weights(trainer))
    del os.environ["ONNXTRAIN_REDUCE_DTYPE"]
    return found


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.norm(x))


WAYS = {"all-reduce": {}, "accumulation": {"steps": 3}, "ZeRO": {"stage": 1, "steps": 2}, "Adasum": {"adasum": True},
        "BatchNorm": {}}  # of joining gradients


def in_one_call(rank, world):
    """Of each way: whether steps in one call of the core have the bits of steps by autograd; which were one call; and
    the buckets that were reduced during the latest backward.
    """
    found = {}
    for way, given in WAYS.items():
        weights_of = []
        for disabled in ("whole_step", ""):
            os.environ["ONNXTRAIN_DISABLE"] = disabled
            torch.manual_seed(0)
            module = Normed() if way == "BatchNorm" else None
            trainer = trainer_of(0, "adam", world, module=module, **given)
            calls = []
            for x, y in part(data_of(6, world), rank):
                trainer.train_step(x, y)
                engine = trainer._trained
                calls.append(bool(engine._whole and engine._whole.loss is not None))
            weights_of.append(weights(trainer))
        same = all(torch.equal(value, weights_of[1][name]) for name, value in weights_of[0].items())
        found[way] = same, calls, engine.reducer and engine.reducer.early
    del os.environ["ONNXTRAIN_DISABLE"]
    return found


def go_on(rank, world, folder):
    """Checkpoints of both forms, within the steps of an update too; losses and weights of what follows."""
    data = part(data_of(9, world), rank)
    trainer = trainer_of(0, "adam", world, 1, 2)
    for x, y in data[:4]:
        trainer.train_step(x, y)
    trainer.save_checkpoint(f"{folder}/{rank}.ort")
    checkpoint.experimental_save_checkpoint(trainer, folder, "even", {"epoch": 3})
    trainer.train_step(*data[4])
    checkpoint.experimental_save_checkpoint(trainer, folder, "odd")
    rest = [float(trainer.train_step(x, y)[0]) for x, y in data[5:]]
    again = {}
    trainer._trained.peers._collectives.all_reduce(torch.zeros(1))  # both files are written
    for name, first in (("hdf5", 4), ("even", 4), ("odd", 5)):
        other = trainer_of(5, "adam", world, 1, 2)
        if name == "hdf5":
            other.load_checkpoint(*(f"{folder}/{rank}.ort" for rank in range(world)))
        else:
            checkpoint.experimental_load_checkpoint(other, folder, name, strict=True)
        losses = [float(other.train_step(x, y)[0]) for x, y in data[first:]]
        again[name] = losses[-4:] == rest and all(
            torch.equal(value, weights(trainer)[key]) for key, value in weights(other).items())
    plain = trainer_of(5, "adam", world, 0, 2)  # into the same run without ZeRO
    checkpoint.experimental_load_checkpoint(plain, folder, "even", strict=True)
    torch.testing.assert_close([float(plain.train_step(x, y)[0]) for x, y in data[4:]][1:], rest, rtol=1e-5, atol=1e-6)
    return again, rest


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def launcher(request):
    if request.param == "mpi" and (reason := without_mpi()):
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, launcher):
    return tmp_path_factory.mktemp(launcher)


@pytest.fixture(scope="module")
def results(folder, launcher):
    return (run if launcher == "gloo" else run_by_mpi)(train_all, 2, folder, 2, str(folder))


@pytest.mark.parametrize("config, steps", CASES)
def test_two_processes_equal_one(config, steps, results):
    alone = trainer_of(0, config, 1, 0, steps)
    losses = [float(alone.train_step(x, y)[0]) for x, y in data_of(51, 2)]
    evaluated = alone.eval_step(*part(data_of(1, 2), 0)[0])[0]
    for stage in (0, 1):
        ours = [results[rank][config, steps, stage] for rank in range(2)]
        for name, value in ours[0][1].items():
            assert torch.equal(value, ours[1][1][name]), name
        close(weights(alone), ours[0][1])
        torch.testing.assert_close((torch.stack(ours[0][0]) + torch.stack(ours[1][0])) / 2, torch.tensor(losses),
                                   rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[0][2], evaluated, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours[0][1]["unused"], torch.ones(3))
        whole = elements_of_moments(alone)
        assert sum(own[3] for own in ours) == whole * (1 if stage else 2)
        assert not stage or config == "lamb" or all(own[3] <= 0.55 * whole for own in ours)


def test_an_overflow_in_one_process_is_everybodys(results):
    once = [(True, False, 1024.0), (False, True, 512.0), (True, False, 512.0)]
    assert results[0]["overflow"] == results[1]["overflow"] == once * 3


def test_adasum(results):
    """Of the changes that two trainers make by themselves, one after the other from the same weights."""
    trainers = [trainer_of(0, "adam", 1) for _ in range(2)]
    modules = [trainer._torch_model for trainer in trainers]
    for x, y in data_of(5, 2):
        before = weights(trainers[0])
        for rank, trainer in enumerate(trainers):
            trainer.train_step(*part([(x, y)], rank)[0])
        with torch.no_grad():
            for name, one in modules[0].named_parameters():
                other = modules[1].get_parameter(name)
                a, b = one - before[name], other - before[name]
                if a.any() and b.any():
                    dot = (a * b).sum()
                    a, b = a * (1 - dot / (2 * (a * a).sum())), b * (1 - dot / (2 * (b * b).sum()))
                one.copy_(before[name] + a + b)
                other.copy_(one)
    for rank in range(2):
        close(weights(trainers[0]), results[rank]["adasum"])


def test_gradients_as_bfloat16(results):
    """The gradients of one step, as SGD's update shows them: rounded, added in bfloat16."""
    x, y = data_of(1, 2)[0]
    module = wide(0)
    parts = []
    for own in (part([(x, y)], rank)[0] for rank in range(2)):
        module.zero_grad()
        cross_entropy(module(own[0]), own[1]).backward()
        parts.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    for stage in (0, 1):
        after = results[0]["bfloat16"][stage]
        assert all(torch.equal(value, results[1]["bfloat16"][stage][name]) for name, value in after.items())
        for name, gradient in parts[0].items():
            want = module.state_dict()[name] - 0.05 * (gradient.bfloat16() + parts[1][name].bfloat16()).float()
            exact = module.state_dict()[name] - 0.05 * (gradient + parts[1][name])
            torch.testing.assert_close(after[name], want, rtol=0, atol=3e-6 + 0.05 * 2 ** -8 * float(gradient.abs().max()))
            if name == "first.weight":
                assert float((after[name] - exact).abs().max()) > 4e-6


@pytest.mark.parametrize("way", WAYS)
def test_a_step_with_other_processes_is_one_call(way, results):
    for own in results:
        same, calls, early = own["in one call"][way]
        assert same and calls == [False, True, True, True, True, True]  # of the first step it is learned
        assert early == {"ZeRO": None, "Adasum": None, "BatchNorm": 1}.get(way, 0)  # one bucket, with an unused weight


def test_a_run_with_zero_goes_on_bit_for_bit(results):
    for rank in range(2):
        assert results[rank]["goes on"][0] == {"hdf5": True, "even": True, "odd": True}


def test_one_process_goes_on_from_two(results, folder):
    """Both forms of checkpoint; what is refused."""
    rest = [sum(pair) / 2 for pair in zip(*(results[rank]["goes on"][1] for rank in range(2)))]
    paths = [f"{folder}/{rank}.ort" for rank in (1, 0)]
    for load in (lambda t: t.load_checkpoint(*paths), lambda t: checkpoint.experimental_load_checkpoint(
            t, str(folder), "even", strict=True)):
        alone = trainer_of(7, "adam", 1, 0, 2)
        load(alone)
        losses = [float(alone.train_step(x, y)[0]) for x, y in data_of(9, 2)[4:]]
        torch.testing.assert_close(losses[1:], rest, rtol=1e-4, atol=1e-5)
    state = checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
    assert state["trainer_options"] == {
        "mixed_precision": False, "zero_stage": 0, "world_rank": 0, "world_size": 1, "optimizer_name": b"AdamOptimizer",
        "data_parallel_size": 1, "horizontal_parallel_size": 1}
    assert state["optimizer"]["first.weight"]["Moment_1"].shape == (61, 8) and "partition_info" not in state
    wide(0).load_state_dict(checkpoint.aggregate_checkpoints(paths))
    for path in paths:  # as older releases wrote them
        shutil.copy(path, f"{path}.older")
        with h5py.File(f"{path}.older", "a") as file:
            del file["trainer_options/horizontal_parallel_size"]
    older = checkpoint.aggregate_checkpoints([f"{path}.older" for path in paths], pytorch_format=False)
    assert older["trainer_options"] == state["trainer_options"]
    with pytest.raises(AssertionError, match=r"processes \[1\], but 2 processes wrote one each"):
        checkpoint.aggregate_checkpoints(paths[:1])
    alone = trainer_of(7, "adam", 1, 0, 2)
    checkpoint.experimental_load_checkpoint(alone, str(folder), "odd")
    with pytest.raises(RuntimeError, match="within the steps of one update"):
        alone.train_step(*batches(1)[0])
    names = sorted(path.name for path in folder.glob("even*"))
    assert names == ["even.ZeRO.0.1.ort.pt", "even.ZeRO.1.1.ort.pt"]
    os.rename(folder / names[1], folder / "moved")
    with pytest.raises(AssertionError, match="are not one checkpoint"):
        checkpoint.experimental_load_checkpoint(alone, str(folder), "even")
    os.rename(folder / "moved", folder / names[1])


# ---- who is not there ----


def wait_for_the_dead(rank, path):
    """Steps until another process is killed; the exception, and the seconds from then."""
    trainer = trainer_of(0, "adam", 2, 1)
    data = part(data_of(3, 2), rank)
    trainer.train_step(*data[0])
    trainer.train_step(*data[1])
    if rank == 1:
        time.sleep(1.5)
        Path(path).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 0 of 2: all_reduce failed: ") as error:
        trainer.train_step(*data[2])
    return str(error.value), time.time()


def test_a_process_that_is_killed_ends_the_others(tmp_path):
    context = start(wait_for_the_dead, 2, tmp_path, str(tmp_path / "killed"))
    for process in context.processes:
        process.join(120)
    found = torch.load(tmp_path / "wait_for_the_dead0.pt", weights_only=False)
    assert isinstance(found, tuple), found
    assert found[1] - float((tmp_path / "killed").read_text()) < 10
    assert context.processes[1].exitcode == -signal.SIGKILL and context.processes[0].exitcode == 0


@pytest.mark.parametrize("given, error, message", [
    ({"world_size": 2}, RuntimeError, "torch.distributed is not initialised.*the environment lacks RANK, WORLD_SIZE"),
    ({"world_rank": 1}, ValueError, "world_rank is 1, but world_size is 1"),
])
def test_without_other_processes(given, error, message, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    x, y = batches(1)[0]
    with pytest.raises(error, match=message):
        ORTTrainer(wide(0), DESCRIPTION, CONFIGS["sgd"], loss_fn=cross_entropy,
                   options=options(distributed=given)).train_step(x, y)
    with pytest.raises(error, match=message):
        legacy(wide(0), **given).train_step(x, y, torch.tensor([0.1]))
    with pytest.raises(onnxtrain.UnsupportedError, match="stage 2 is not supported.*fully_shard"):
        legacy(wide(0), **{**given, "deepspeed_zero_stage": 2}).train_step(x, y, torch.tensor([0.1]))


def test_another_number_of_processes(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="world_size is 2, but torch.distributed has 1 processes"):
            trainer_of(0, "sgd", 2).train_step(*batches(1)[0])
        trainer_of(0, "sgd", 1).train_step(*batches(1)[0])
    finally:
        dist.destroy_process_group()


# ---- who has what ----


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_pieces_cover_every_weight_once(ranks, whole):
    sizes = {"b": 1000, "a": 17, "empty": 0, "scalar": 1, "z": 333}
    parts, length = divided(sizes, ranks, whole)
    covered = {name: [0] * size for name, size in sizes.items()}
    for pieces in parts:
        at = 0
        for piece in pieces:
            assert piece.at == at and (not whole or piece.stop - piece.start == sizes[piece.name])
            at += piece.stop - piece.start
            for place in range(piece.start, piece.stop):
                covered[piece.name][place] += 1
        assert at <= length
    assert all(count == 1 for counts in covered.values() for count in counts)
    assert whole or length == 32 * (sum(sizes.values()) // (32 * ranks) + 1)


def several_buckets(rank):
    """Equal results from collectives of few bytes, and gradients of a frozen weight's neighbour."""
    found = []
    for size in (1 << 20, 256):
        _distributed._BUCKET = size
        for stage in (0, 1):
            trainer = trainer_of(rank, "lamb", 3, stage, utils={"frozen_weights": ["second.bias"]})
            for x, y in part(data_of(3, 3), rank):
                trainer.train_step(x, y)
            assert stage or trainer._trained.reducer.early == len(trainer._trained.reducer._buckets) - 1
            found.append(weights(trainer))
    older = legacy(wide(rank), "AdamOptimizer", world_size=3, deepspeed_zero_stage=1)
    for x, y in part(data_of(3, 3), rank):
        older.train_step(x, y, torch.tensor([0.01]))
    return found, older.state_dict()


def test_three_processes_and_small_buckets(tmp_path):
    results = run(several_buckets, 3, tmp_path)
    for found, _ in results:
        for other in found:
            close(results[0][0][0], other)
    older = legacy(wide(0), "AdamOptimizer")
    for x, y in data_of(3, 3):
        older.train_step(x, y, torch.tensor([0.01]))
    alone = older.state_dict()
    close({name: value for name, value in alone.items() if "_" not in name}, results[2][1])
    moment = torch.cat([state["Moment_2_first.weight"] for _, state in results if "Moment_2_first.weight" in state])
    torch.testing.assert_close(moment.view(61, 8), alone["Moment_2_first.weight"], rtol=1e-4, atol=1e-7)
