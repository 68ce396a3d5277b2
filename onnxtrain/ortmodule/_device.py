"""On which device a module's program runs: where its tensors are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from onnxtrain import _C, options
from onnxtrain._C import UnsupportedError
from onnxtrain._torch import fp32_precision, pytree


def device_of(tensors: Iterable[torch.Tensor]) -> str:
    """The engine's name of the device that all of them are on: "cpu", or "cuda:1".

    Args:
        tensors: inputs, parameters and buffers of any dtype and shape; none of them is "cpu".

    Raises:
        UnsupportedError: they are on several devices, or on one that this build or machine has no engine for; the
            message says what it lacks.
    """
    devices = sorted({str(tensor.device) for tensor in tensors})
    if not devices or devices == ["cpu"]:
        return "cpu"
    if len(devices) > 1:
        raise UnsupportedError(f"tensors are on several devices ({', '.join(devices)}): move them to one")
    if not devices[0].startswith("cuda"):
        raise UnsupportedError(f"a tensor is on {devices[0]}, but the engine runs on cpu and cuda only")
    try:
        plugin = _C.open_plugin()
    except OSError as error:
        raise UnsupportedError(f"a tensor is on {devices[0]}, but this build runs on the CPU only: {error}") from None
    if plugin["left_out"] and devices[0] not in plugin["devices"]:
        raise UnsupportedError(f"a tensor is on {devices[0]}: {plugin['left_out']}")
    configure()
    return devices[0]


def names_of(forward: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> dict[int, str]:
    """The tensors among the arguments of a call, by their ids, with the names that forward has for them: "x", or
    "batch['ids']".
    """
    given = inspect.signature(forward).bind(*args, **kwargs).arguments
    found: dict[int, str] = {}
    for name, value in given.items():
        leaves, _ = pytree.tree_flatten_with_path(value)
        found.update((id(leaf), name + pytree.keystr(path)) for path, leaf in leaves if isinstance(leaf, torch.Tensor))
    return found


def on_several(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Says of tensors on several devices which they are: of each device the first one, by its name; "" where all are on
    one.
    """
    first: dict[str, str] = {}
    for name, tensor in named:
        first.setdefault(str(tensor.device), name)
    places = [f"{name} is on {place}" for place, name in first.items()]
    return f"{', '.join(places)}: move them to one device" if len(places) > 1 else ""


def configure() -> None:
    """Tells the engine what torch and the environment say about CUDA; programs built from now on go by it."""
    tell_tf32()
    _C.set_graphs(options.read("ORTMODULE_CUDA_GRAPH"))


# Both of torch's interfaces set this. After fp32_precision was set, torch raises RuntimeError where allow_tf32 or
# get_float32_matmul_precision() is read.
_OLDER_NAMES = {"bf16": "medium", "tf32": "high"}
_tf32: tuple[bool, bool] | None = None  # as the engine was told last


def matmul_precision() -> str:
    """The precision of float32 products on the CPU, as torch.get_float32_matmul_precision() names it."""
    return _OLDER_NAMES.get(fp32_precision("mkldnn", "matmul"), "highest")


def tell_tf32() -> None:
    """Tells the engine whether float32 products and convolutions on CUDA may use TF32; a step calls it, since another
    answer selects other programs.
    """
    global _tf32
    asked = fp32_precision("cuda", "matmul") == "tf32", fp32_precision("cuda", "conv") == "tf32"
    if _tf32 != asked:
        _C.set_tf32(*asked)
        _tf32 = asked
