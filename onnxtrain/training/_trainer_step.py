"""One training step of a model: loss, backward, accumulation, scaling, update. Both trainers share it.

It knows no descriptions and no options: orttrainer.py and legacy.py read those.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from onnxtrain import options
from onnxtrain._export.domain import DOMAIN
from onnxtrain.ortmodule._program import Program
from onnxtrain.training._distributed import Processes, Shards
from onnxtrain.training._models import TorchModel
from onnxtrain.training._onnx_model import OnnxModel
from onnxtrain.training._reducer import Reducer
from onnxtrain.training._update import TensorLike, Update, UpdateCall
from onnxtrain.training._whole_step import WholeStep

_log = logging.getLogger("onnxtrain")
_NOTHING = contextlib.nullcontext()


class TrainedModel:
    """A model that is being trained.

    Args:
        model: what is trained.
        optimizer: name of the optimizer.
        hyperparameters: of a weight's name gives its hyperparameters.
        frozen: names of weights that stay as they are; they are marked so (``requires_grad``). So are parameters of a
            module that are marked already.
        clip: whether Adam and LAMB clip gradients.
        accumulation: calls of step() for one update.
        mixed_precision: run under autocast to float16, and leave updates out whose gradients are not finite.
        deterministic: use torch's and the engine's deterministic algorithms.
        device: where the weights are moved to; with several processes "cuda" is that of the local rank.
        processes: those that train together. Each gives its own batches and makes the same updates, of the mean of
            all gradients; weights and buffers begin as those of process 0.

    Attributes:
        peers: the processes; None where there is one. shards: who keeps what of the optimizer's state with ZeRO; else
            None. graphs: files of save_graphs(), with the stage of the graph and whether it has the update.

    Raises:
        RuntimeError: a frozen weight is none of the model's; device is one of CUDA, and torch has none.
        RuntimeError, UnsupportedError, ValueError: see Processes.join(), Shards.
    """

    def __init__(self, model: TorchModel | OnnxModel, optimizer: str,
                 hyperparameters: Callable[[str], dict[str, float]], frozen: Sequence[str] = (), clip: bool = True,
                 accumulation: int = 1, mixed_precision: bool = False, deterministic: bool = False,
                 device: str = "cpu", processes: Processes = Processes()) -> None:  # noqa: B008
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"the trainer's device is '{device}', and torch has no CUDA device here: ask for 'cpu' "
                               "(ORTTrainerOptions({'device': {'id': 'cpu'}})), or for none")
        if self.device == torch.device("cuda") and (index := processes.local_rank()) is not None:
            self.device = torch.device("cuda", index)
            torch.cuda.set_device(self.device)
        self.peers = processes.join(self.device)
        self.model = model
        model.to(self.device)
        weights = model.parameters()
        unknown = [name for name in frozen if name not in weights and name not in model.buffers()]
        if unknown:
            raise RuntimeError(f"{unknown} params from 'frozen_weights' not found in the ONNX model.")
        for name in frozen:
            if name in weights:
                weights[name].requires_grad_(False)
        self._trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        self.shards: Shards | None = None
        self._adasum = self.peers is not None and processes.adasum
        if self.peers is not None:
            values = self.everything().values()
            self.peers.check([*processes.settings(), accumulation, len(self._trained), len(values),
                              sum(value.numel() for value in values)], self.device)
        if self.peers is None or not processes.zero_stage:
            shared = self.peers is not None and self._adasum and mixed_precision
            norm_if_finite = self.peers.norm_if_finite if self.peers is not None and shared else None
            self.update = Update(optimizer, self._trained, hyperparameters, clip, norm_if_finite)
        else:
            self.shards = Shards(self._trained, self.peers, optimizer == "LambOptimizer")
            self.update = Update(optimizer, self.shards.pieces, hyperparameters, clip, self.shards.squares)
        if self.peers is not None:
            self.peers.broadcast(list(self.everything().values()))
        self.reducer: Reducer | None = None
        if self.peers is not None and self.shards is None and not self._adasum:
            self.reducer = Reducer(self._trained.values(), self.peers)
            model.deliver_to(self.reducer)
        self._one: tuple[float, Tensor | None] = (0.0, None)
        self._scale = 1.0  # of the latest forward, and its rate
        self._rate: Callable[[], float] = float
        self._whole: WholeStep | None = None
        self.graphs: dict[str, tuple[str, bool]] = {}
        if self.device.type == "cpu" and "whole_step" not in options.read("ONNXTRAIN_DISABLE"):
            self._whole = WholeStep(self._trained.values(), self._scaled_one, self._update_within,
                                    None if self.peers is None else self._reduce, self.reducer)
        self.accumulation = accumulation
        self.mixed_precision = mixed_precision
        self._deterministic = deterministic

    # ---- weights ----

    def weights(self) -> dict[str, Tensor]:
        """Those that are trained."""
        return dict(self._trained)

    def everything(self) -> dict[str, Tensor]:
        """Those that are trained, frozen ones and buffers."""
        return {**self.model.parameters(), **self.model.buffers()}

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> None:
        """Sets weights, frozen ones and buffers; names that are none of the model's are left out.

        Raises:
            ValueError: a value has another shape. Nothing has been set then.
        """
        own = self.everything()
        for name, value in values.items():
            if name in own and own[name].shape != value.shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, expected {tuple(own[name].shape)}")
        for name, value in values.items():
            if name in own:
                own[name].copy_(value)

    def accumulated(self, steps: int) -> dict[str, Tensor]:
        """The sums of this process's gradients that wait for an update, after this many steps altogether; copies on the
        CPU.
        """
        if not steps % self.accumulation:
            return {}
        return {name: weight.grad.detach().cpu().clone() for name, weight in self._trained.items()
                if weight.grad is not None}

    def load_accumulated(self, values: dict[str, Tensor]) -> None:
        """The opposite."""
        for name, weight in self._trained.items():
            weight.grad = values[name].to(weight.device, weight.dtype).clone() if name in values else None

    def load_optimizer(self, state: Mapping[str, Mapping[str, TensorLike]]) -> None:
        """Update.load_state() of whole weights; with ZeRO each process keeps its part of it."""
        self.update.load_state(state if self.shards is None else self.shards.cut(state))

    # ---- as files ----

    def save_graphs(self) -> None:
        """Writes `graphs`, once, of the step that has been taken; a warning says which file cannot be written."""
        graphs, self.graphs = self.graphs, {}
        for path, (stage, update) in graphs.items():
            program = self.model.latest()
            if program is None or program.session is None:
                _log.warning("ORTTrainer did not write %s: the module does not run as one graph", path)
                continue
            if cuts := self.model.cuts():
                _log.warning("ORTTrainer: %s holds one of several graphs, because Dynamo cut the module: %s", path,
                             cuts[0])
            data = program.save(stage)
            try:
                Path(path).write_bytes(self._with_update(data, program) if update else data)
            except OSError as error:
                _log.warning("ORTTrainer did not write %s: %s", path, error)

    def _with_update(self, data: bytes, program: Program) -> bytes:
        """The graph with a node for the update of each weight, which is a call of onnxtrain.optim after it."""
        model = onnx.load_model_from_string(data)
        wanted = [source for source, wants in zip(program.exported.inputs, program.latest_mask) if wants]
        gradients = [value.name for value in model.graph.output][-len(wanted):] if wanted else []
        for source, gradient in zip(wanted, gradients):
            if source.kind == "parameter":
                model.graph.node.append(onnx.helper.make_node(
                    self.update.name, [source.name, gradient], [f"{source.name}_updated"], domain=DOMAIN))
        return model.SerializeToString()

    # ---- steps ----

    def _switches(self, autocast: bool) -> contextlib.AbstractContextManager[None]:
        """Deterministic algorithms where they are asked for; autocast too in forward, but not in backward."""
        return self._switched(autocast) if autocast or self._deterministic else _NOTHING

    @contextlib.contextmanager
    def _switched(self, autocast: bool) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            if self._deterministic:
                torch.use_deterministic_algorithms(True)
            with torch.autocast(self.device.type, torch.float16) if autocast else contextlib.nullcontext():
                yield
        finally:
            if self._deterministic:
                torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def inputs(self, given: Sequence[object]) -> list[object]:
        """The inputs, on the device."""
        return [value.to(self.device) if isinstance(value, Tensor) else value for value in given]

    def forward(self, given: Sequence[object], loss: int, step: int, scale: float, rate: Callable[[], float],
                read: Sequence[int] | None = None) -> list[Tensor]:
        """Outputs in training. Where the core takes the step in one call (_whole_step.py), backward and the update have
        been done as well, and backward() and apply() say so.

        Args:
            given: the inputs.
            loss: which output is the loss: float, of one element.
            step: number of this call, from 1; gradients are dropped where it is the first one after an update.
            scale: of the loss whose gradients are taken.
            rate: gives the learning rate, once, where an update follows; it is rounded to float32, which is what a rate
                that comes as a tensor is.
            read: which outputs beside the loss are read; a module's others are None. None: all.

        Raises:
            RuntimeError: the loss is something else.
        """
        if (step - 1) % self.accumulation == 0:
            self.update.zero_grad()
            if self.shards is not None:
                for weight in self._trained.values():
                    weight.grad = None
        if self.reducer is not None:
            self.reducer.begin(self.is_update(step))
        self._scale, self._rate = scale, rate
        whole, given = self._whole, self.inputs(given)
        if whole is not None:
            whole.begin(given, scale, self.is_update(step))
        try:
            with self._switches(self.mixed_precision):
                outputs = self.model(given, read)
        finally:
            if whole is not None:
                whole.end()
        if whole is not None and whole.loss is not None and outputs[loss] is not whole.loss:
            raise RuntimeError("the weights were updated with a loss that is not the one that the module returns. This "
                               "is a defect of onnxtrain: please report it, and set ONNXTRAIN_DISABLE=whole_step")
        if loss >= len(outputs) or outputs[loss].numel() != 1 or not outputs[loss].is_floating_point():
            raise RuntimeError(f"output {loss} is the loss, which must be a float tensor of one element; the model's "
                               f"outputs are {[f'{o.dtype} {tuple(o.shape)}' for o in outputs if o is not None]}")
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of the loss, times the scale, to those of the steps before since the last update.

        Raises:
            RuntimeError: there are weights to be trained, and the loss depends on none of them.
        """
        if self._whole is not None:
            if self._whole.loss is not None:
                return
            self._whole.learn(loss)
        if not loss.requires_grad:
            if self._trained:
                raise RuntimeError("the loss depends on no weight that is trained: was it computed from detached "
                                   "tensors?")
            return
        if self.reducer is not None:
            self.reducer.backward(loss)
        with self._switches(False):
            loss.backward(self._scaled_one(loss, self._scale))

    def _scaled_one(self, loss: Tensor, scale: float) -> Tensor:
        """The gradient of the loss: as the loss, with this value."""
        kept, like = self._one
        if kept != scale or like is None or (like.dtype, like.shape, like.device) != (
                loss.dtype, loss.shape, loss.device):
            like = torch.full_like(loss, scale)
            self._one = scale, like
        return like

    def evaluate(self, given: Sequence[object]) -> list[Tensor]:
        """Outputs in evaluation."""
        with self._switches(self.mixed_precision):
            return self.model.evaluate(self.inputs(given))

    def is_update(self, step: int) -> bool:
        """Whether an update follows this step, counted from 1."""
        return step % self.accumulation == 0

    def _last_arguments(self) -> tuple[float, float, bool]:
        """Of Update.step(): the rate, what gradients are multiplied by, and whether they have to be finite."""
        processes = 1 if self.peers is None or self._adasum else self.peers.size
        return (float(np.float32(self._rate())), 1.0 / (self._scale * self.accumulation * processes),
                self.mixed_precision)

    def apply(self) -> bool:
        """The update, of all processes' gradients; with mixed precision only of finite ones.

        Returns:
            Whether it has been done.
        """
        if self._whole is not None and self._whole.done is not None:
            done = self._whole.done
        else:
            if self.peers is not None:
                self._reduce()
            done = self._update()
        if self.peers is not None:
            self.peers.broadcast(list(self.model.buffers().values()))
        return done

    def _update_within(self, step: Callable[[UpdateCall], float | None]) -> bool:
        """The update as the end of a whole step, which has joined the processes' gradients before."""
        if self.update.is_one_call and not self._adasum:
            return self.update.step(*self._last_arguments(), within=step)
        return bool(step((self._update, ())))

    def _reduce(self) -> None:
        """Joins all processes' gradients. With Adasum each process updates by its own, and the changes of the weights
        are combined.
        """
        if self.shards is not None:
            self.shards.reduce()
        elif self.reducer is not None:
            self.reducer.finish()
        else:
            assert self.peers is not None
            self.peers.fill_gradients(list(self._trained.values()))

    def _update(self) -> bool:
        weights = list(self._trained.values()) if self._adasum else []
        before = [weight.detach().clone() for weight in weights]
        done = self.update.step(*self._last_arguments())
        if done and self.shards is not None:
            self.shards.gather()
        if done and self._adasum:
            assert self.peers is not None
            self.peers.adasum(weights, before)
        return done
