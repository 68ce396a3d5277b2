"""What an ORTTrainer trains, in one form: a torch.nn.Module with its loss, run as ORTModule runs it.

_onnx_model.py has the same of an onnx.ModelProto. Used by _trainer_step.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import Tensor

from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._whole import tensors_of
from onnxtrain.training import _saved
from onnxtrain.training._opset import OPSET

if TYPE_CHECKING:
    from onnxtrain.ortmodule._program import Program
    from onnxtrain.training._reducer import Reducer


class ModelWithLoss(torch.nn.Module):
    """A module and its loss as one: of the inputs in the order of their description, the last of which is the loss's.

    Without that last one it is the module alone. In training, results beside output `loss` are detached: their
    gradients, which no step gives, would be zeros that the engine reads and adds.

    Attributes:
        read: places of the results that a step's caller reads in training; the others, but the loss, are None then.
            None for all.
    """

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[..., object] | None, names: Sequence[str],
                 by_position: bool, loss: int) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn
        self.names = tuple(names)
        self.by_position = by_position
        self.loss = loss
        self.read: tuple[int, ...] | None = None

    def _results(self, inputs: Sequence[object]) -> object:
        if self.by_position:
            return self.module(*inputs)
        return self.module(**dict(zip(self.names, inputs)))

    def _with_loss(self, inputs: Sequence[object]) -> object:
        if self.loss_fn is None or len(inputs) < len(self.names):
            return self._results(inputs)
        prediction = self._results(inputs[:-1])
        return self.loss_fn(prediction, inputs[-1]), prediction

    def forward(self, *inputs: object) -> object:
        results = self._with_loss(inputs)
        if not self.training:
            return results
        read = self.read
        return tuple(result if index == self.loss else result.detach() if read is None or index in read else None
                     for index, result in enumerate(tensors_of(results)))


def parameters_of(module: torch.nn.Module) -> tuple[list[str], bool]:
    """The names of forward's parameters, and whether it takes any other by name."""
    kinds = inspect.Parameter
    found = inspect.signature(module.forward).parameters.values()
    return ([p.name for p in found if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)],
            any(p.kind == kinds.VAR_KEYWORD for p in found))


def alone(outputs: list[Tensor]) -> Any:
    """What a step returns: a single output by itself, several as a list."""
    return outputs[0] if len(outputs) == 1 else outputs


def _open(described: Sequence[int | str], shape: Sequence[int]) -> list[int]:
    """A shape with at least 2 for each size that has a name: an export has a size of 1 as a constant."""
    named = [isinstance(size, str) for size in described]
    return [max(size, 2) if axis < len(named) and named[axis] else size for axis, size in enumerate(shape)]


class TorchModel:
    """A module, its loss, and the programs that run them.

    Args:
        module: stays the user's: its parameters are what is trained.
        loss_fn: called with the module's output and the last input; None where the module gives its loss itself.
        inputs, outputs: (name, shape) of each, as a description has them; the loss's included.
        by_position: inputs go to forward in their order; else by name.
        loss: which output is the loss.
        opset: of proto().

    Raises:
        ValueError: forward has no parameter of some input's name.
    """

    def __init__(self, module: torch.nn.Module, loss_fn: Callable[..., object] | None,
                 inputs: Sequence[_saved.Described], outputs: Sequence[_saved.Described], by_position: bool,
                 loss: int = 0, opset: int = OPSET) -> None:
        names = [described[0] for described in inputs]
        if not by_position:
            known, any_name = parameters_of(module)
            wrong = [name for name in (names if loss_fn is None else names[:-1]) if name not in known]
            if wrong and not any_name:
                raise ValueError(f"the description names inputs {wrong}, but forward of {type(module).__name__} takes "
                                 f"{known}")
        self.module = module
        self._inputs, self._outputs, self._opset = inputs, outputs, opset
        self._composed = ModelWithLoss(module, loss_fn, names, by_position, loss)
        self.ort_module = ORTModule(self._composed, outputs=())
        self._example: list[tuple[torch.Size, torch.dtype]] | None = None

    # ---- weights ----

    @staticmethod
    def _own(name: str) -> str:
        return name.removeprefix("module.")

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters, frozen ones included, under the module's own names; tied ones once."""
        return {self._own(name): parameter for name, parameter in self._composed.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """What else the module computes with and keeps in its state_dict."""
        kept = self._composed.state_dict(keep_vars=True)
        return {self._own(name): buffer for name, buffer in self._composed.named_buffers() if name in kept}

    def to(self, device: torch.device) -> None:
        """Moves the module there."""
        self._composed.to(device)

    def deliver_to(self, reducer: Reducer) -> None:
        """From now on the engine writes gradients where this Reducer says."""
        self.ort_module._join(reducer)

    # ---- running ----

    def __call__(self, inputs: Sequence[object], read: Iterable[int] | None = None) -> list[Any]:
        """The outputs in training, under autograd; beside the loss those alone that are read, and None for the others.
        None: all are.
        """
        if not (self._composed.training and self.module.training):
            self._composed.train()
        self._composed.read = None if read is None else tuple(read)
        self._note(inputs)
        return list(self._run(inputs))

    def _run(self, inputs: Sequence[object]) -> Iterable[Any]:
        return self.ort_module(*inputs)

    def evaluate(self, inputs: Sequence[object]) -> list[Tensor]:
        """The outputs in evaluation; every submodule is in its own mode again afterwards."""
        self._note(inputs)
        with _saved.evaluating(self._composed), torch.no_grad():
            return self._tensors(self._run(inputs))

    def eager(self, inputs: Sequence[object]) -> list[Tensor]:
        """The same as evaluate(), by PyTorch."""
        with _saved.evaluating(self._composed), torch.no_grad():
            return self._tensors(self._composed(*inputs))

    @staticmethod
    def _tensors(results: object) -> list[Tensor]:
        return list(tensors_of(results))

    def _note(self, inputs: Sequence[Any]) -> None:
        """Sizes and dtypes for the export of save(); those of a call with every input."""
        if (self._example is None or len(self._example) < len(inputs)) and all(
                isinstance(value, Tensor) for value in inputs):
            self._example = [(value.shape, value.dtype) for value in inputs]

    def latest(self) -> Program | None:
        """The program of the latest step; None where PyTorch runs the module."""
        programs = [program for _, known in self.ort_module._all_programs() for program in known]
        return max(programs, key=lambda program: program.used, default=None)

    def cuts(self) -> list[str]:
        """Why the module runs as several graphs; nothing where it is one."""
        return list(self.ort_module._counters.graph_breaks)

    # ---- as ONNX ----

    def proto(self) -> onnx.ModelProto:
        """The module and its loss in evaluation, with the weights as they are.

        Raises:
            ExportError: torch cannot export it.
            UnsupportedError: it has operators that only this engine knows, or that the opset does not have.
        """
        if self._example is None:
            raise RuntimeError("no step with tensors as inputs has run yet: run one first")
        device = next(iter([*self._composed.parameters(), *self._composed.buffers()]), torch.empty(0)).device
        example = [torch.zeros(_open(described[1], shape), dtype=dtype, device=device)
                   for described, (shape, dtype) in zip(self._inputs, self._example)]
        return _saved.proto_of(self._composed, example, self._own, self._inputs, self._outputs, self._opset)
