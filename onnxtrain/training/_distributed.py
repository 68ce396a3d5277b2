"""Training in several processes, each with its own batches: averaged gradients, and ZeRO stage 1.

Used by _trainer_step.py. What a step needs of the other processes are methods of Peers; it knows weights, and nothing
of models. _collectives.py carries the tensors.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onnxtrain import UnsupportedError, options
from onnxtrain.training import _collectives
from onnxtrain.training._collectives import Collectives, MpiCollectives
from onnxtrain.training._update import MOMENTS, TensorLike, as_tensor

_log = logging.getLogger("onnxtrain")
_T = TypeVar("_T", bound=Tensor)
_Result = TypeVar("_Result")
_BUCKET = 25 << 20  # bytes that one collective takes


@dataclasses.dataclass(frozen=True)
class Processes:
    """What a trainer is asked for: how many processes, which one this is, the stage of ZeRO, and whether updates are
    combined by Adasum.
    """

    world_size: int = 1
    world_rank: int = 0
    zero_stage: int = 0
    adasum: bool = False

    def local_rank(self) -> int | None:
        """The index of this process's GPU; None for one process, and if the environment does not set it."""
        told = _collectives.by_mpirun() or self.world_size > 1 and "LOCAL_RANK" in os.environ
        return _collectives.local_rank() if told else None

    def join(self, device: torch.device) -> Peers | None:
        """The others: met by torch.distributed, which is initialised from torchrun's environment where it is not yet;
        else by MPI, where mpirun has started this process. mpirun's numbers of processes and ranks count then.

        Args:
            device: of the weights: torch.distributed has NCCL for CUDA, gloo for the CPU; beside MPI, NCCL carries
                tensors of CUDA.

        Returns:
            None where there is one process.

        Raises:
            UnsupportedError: a stage above 1; Adasum with ZeRO, or of processes whose number is no power of two.
            RuntimeError: torch.distributed is not initialised, and neither torchrun nor mpirun has started this
                process; or mpirun has, and this build has no MPI.
            ValueError: torch.distributed has more or fewer processes than world_size, or world_rank is not among them.
        """
        if self.zero_stage > 1:
            raise UnsupportedError(f"ORTTrainer: ZeRO stage {self.zero_stage} is not supported: the highest is stage "
                                   "1, which divides the optimizer's state; for stages 2 and 3 wrap an ORTModule in "
                                   "torch.distributed.fsdp.fully_shard")
        if not _initialized() and _collectives.by_mpirun():
            return self._with(self._by_mpi(device))
        self._check_adasum(self.world_size)
        if self.world_size == 1:
            if self.world_rank:
                raise ValueError(f"world_rank is {self.world_rank}, but world_size is 1: set distributed.world_size")
            if _initialized() and dist.get_world_size() > 1:
                _log.warning("ORTTrainer: world_size is 1, but there are %d processes: this process trains by itself",
                             dist.get_world_size())
            return None
        return self._with(self._by_torch(device))

    def _with(self, collectives: Collectives) -> Peers | None:
        self._check_adasum(collectives.size)
        return Peers(collectives) if collectives.size > 1 else None

    def _check_adasum(self, size: int) -> None:
        if self.adasum and size > 1 and (self.zero_stage or size & (size - 1)):
            raise UnsupportedError(f"ORTTrainer: Adasum needs 2, 4, 8 ... processes and no ZeRO, but there are {size} "
                                   f"processes with ZeRO stage {self.zero_stage}")

    def _by_mpi(self, device: torch.device) -> Collectives:
        found = MpiCollectives(device)
        if self.world_size != found.size or self.world_rank not in (0, found.rank):
            _log.warning("ORTTrainer: world_size is %d and world_rank %d, but mpirun sets %d and %d, which apply",
                         self.world_size, self.world_rank, found.size, found.rank)
        return found

    def _by_torch(self, device: torch.device) -> Collectives:
        if not _initialized():
            missing = _collectives.lacking()
            if missing:
                raise RuntimeError(
                    f"world_size is {self.world_size}, but torch.distributed is not initialised: call "
                    "torch.distributed.init_process_group(), or start the script by torchrun or mpirun (the "
                    f"environment lacks {', '.join(missing)})")
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        rank, size = dist.get_rank(), dist.get_world_size()
        if size != self.world_size:
            raise ValueError(f"world_size is {self.world_size}, but torch.distributed has {size} processes")
        if self.world_rank not in (0, rank):
            _log.warning("ORTTrainer: world_rank is %d, but torch.distributed sets %d, which applies", self.world_rank,
                         rank)
        return Collectives()

    def settings(self) -> list[int]:
        """What has to be the same in all processes."""
        dtypes = ("", "float32", "bfloat16")
        return [self.zero_stage, self.adasum, dtypes.index(options.read("ONNXTRAIN_REDUCE_DTYPE"))]


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


class Peers:
    """All processes that train together, and what they do at the same time.

    Attributes:
        rank: of this one. size: how many there are.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.rank = collectives.rank
        self.size = collectives.size
        self._wire = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(options.read("ONNXTRAIN_REDUCE_DTYPE"))

    def _together(self, collective: Callable[..., _Result], *args: Tensor, name: str = "") -> _Result:
        """Raises RuntimeError where it fails, as it does where another process has ended; the launcher says which."""
        try:
            return collective(*args)
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank} of {self.size}: {name or collective.__name__} failed: "
                               f"{error}") from error

    def sum(self, value: Tensor) -> None:
        """Replaces a tensor by the sum of all processes'."""
        self._together(self._collectives.all_reduce, value)

    def sum_scattered(self, own: Tensor, value: Tensor) -> None:
        """own (n,) = this process's part of the sum of all values (size n,)."""
        sent, part = (value, own) if self._wire is None else (value.to(self._wire), own.to(self._wire))
        self._together(self._collectives.reduce_scatter, part, sent)
        own.copy_(part)

    def gather(self, value: Tensor, own: Tensor) -> None:
        """value (size n,) = the own (n,) of all processes in their order."""
        self._together(self._collectives.all_gather, value, own)

    def check(self, settings: Sequence[int], device: torch.device) -> None:
        """Raises ValueError where these whole numbers are others in another process."""
        own = torch.tensor(settings, device=device)
        rows = own.new_empty(self.size * len(settings))
        self.gather(rows, own)
        found = rows.view(self.size, -1).tolist()
        if any(row != list(settings) for row in found):
            raise ValueError("the trainers of the processes differ. ZeRO's stage, Adasum, dtype of the reduction, "
                             "steps of one update, number of trained weights, number of all weights and buffers, and "
                             f"their elements are, for each process: {found}")

    # ---- of lists ----

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Gives all processes the values of process 0."""
        self._in_buckets(tensors, lambda flat: self._together(self._collectives.broadcast, flat))

    def start_sum(self, value: Tensor) -> Callable[[], None]:
        """Begins to replace a contiguous tensor by the sum of all processes'. What is returned waits for that."""
        sent = value if self._wire is None else value.to(self._wire)
        wait = self._together(self._collectives.start_all_reduce, sent, name="all_reduce")

        def finish() -> None:
            self._together(wait, name="all_reduce")
            if sent is not value:
                value.copy_(sent)

        return finish

    @torch.no_grad()
    def adasum(self, weights: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Replaces each process's weights by those before plus the Adasum of all processes' changes (Maleki et al.,
        "Scaling Distributed Training with Adaptive Summation", MLSys 2021): for each weight by itself

        ``Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b``,

        of processes 0 and 1, 2 and 3 and so on, then of these, in pairs. Equal changes count once, orthogonal ones are
        added. Products are of float64.
        """
        changes = [weight - old for weight, old in zip(weights, before)]
        for bucket in buckets(changes):
            flat = torch.cat([change.reshape(-1) for change in bucket])
            rows = flat.new_empty(self.size * flat.numel())
            self.gather(rows, flat)
            sizes = [change.numel() for change in bucket]
            found = [list(row.split(sizes)) for row in rows.view(self.size, -1)]
            while len(found) > 1:
                found = [[_adasum(a, b) for a, b in zip(one, other)] for one, other in zip(found[::2], found[1::2])]
            for change, combined in zip(bucket, found[0]):
                change.copy_(combined.view(change.shape))
        for weight, old, change in zip(weights, before, changes):
            weight.copy_(old + change)

    def norm_if_finite(self, norm: float | Tensor) -> float | Tensor:
        """A norm of this process's gradients; infinite where any process's is not finite."""
        own = torch.as_tensor(norm)
        bad = (~torch.isfinite(own)).to(torch.int32)
        self.sum(bad)
        return math.inf if int(bad) else norm

    def any_of(self, own: Sequence[bool], weights: Sequence[torch.nn.Parameter]) -> list[bool]:
        """Of a flag for each weight, whether any process has it set."""
        if not weights:
            return []
        flags = torch.tensor(own, dtype=torch.int32, device=weights[0].device)
        self.sum(flags)
        return [count > 0 for count in flags.tolist()]

    def fill_gradients(self, weights: Sequence[torch.nn.Parameter]) -> None:
        """Zeros for gradients that only other processes have."""
        for weight, there in zip(weights, self.any_of([weight.grad is not None for weight in weights], weights)):
            if there and weight.grad is None:
                weight.grad = torch.zeros_like(weight, requires_grad=False)

    @staticmethod
    def _in_buckets(tensors: Sequence[Tensor], change: Callable[[Tensor], None]) -> None:
        """Lets change() work in place on one-dimensional copies, each of several tensors of one dtype."""
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            change(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
                tensor.copy_(part.view(tensor.shape))


def _adasum(a: Tensor, b: Tensor) -> Tensor:
    one, other = a.double(), b.double()
    dot, aa, bb = float(one.dot(other)), float(one.dot(one)), float(other.dot(other))
    return a * (1.0 - dot / (2.0 * aa) if aa else 1.0) + b * (1.0 - dot / (2.0 * bb) if bb else 1.0)


def buckets(tensors: Sequence[_T]) -> Iterator[list[_T]]:
    """Tensors in groups of one dtype and about _BUCKET bytes, in an order that all processes share."""
    by_dtype: dict[torch.dtype, list[_T]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        bucket: list[_T] = []
        size = 0
        for tensor in group:
            if bucket and size + tensor.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened weight, which lie at `at` of their process's part."""

    name: str
    start: int
    stop: int
    at: int


def divided(sizes: Mapping[str, int], ranks: int, whole: bool) -> tuple[list[list[Piece]], int]:
    """Which process updates what of the weights, which lie one behind the other, sorted by name.

    Args:
        sizes: elements of each.
        ranks: how many processes.
        whole: no weight is cut: each belongs to the process in whose equal share its middle lies. Else shares are
            equal, but for the end, of a multiple of 32 elements.

    Returns:
        The pieces of each process, and the elements of the longest part.
    """
    total = sum(sizes.values())
    share = (total // (32 * ranks) + 1) * 32
    parts: list[list[Piece]] = [[] for _ in range(ranks)]
    lengths = [0] * ranks
    position = 0
    for name in sorted(sizes):
        size = sizes[name]
        first = position
        while first < position + size:
            if whole:
                rank, last = min(ranks - 1, (position + size // 2) * ranks // total), position + size
            else:
                rank, last = first // share, min(position + size, (first // share + 1) * share)
            parts[rank].append(Piece(name, first - position, last - position, lengths[rank]))
            lengths[rank] += last - first
            first = last
        position += size
    return parts, max(share, *lengths) if whole else share


class Shards:
    """ZeRO stage 1: every process keeps and updates the optimizer state of its part of the weights.

    LAMB's ratio is of a whole weight's norms, so that for LAMB no weight is cut.

    Args:
        weights: the trained ones, by name.
        peers: the processes.
        whole: see divided().

    Attributes:
        pieces: one-dimensional views of this process's parts of weights, by weight; their gradients are the sums of
            all processes' after reduce().
        own: where they lie.

    Raises:
        UnsupportedError: weights are of several dtypes, or one is not contiguous.
    """

    def __init__(self, weights: Mapping[str, torch.nn.Parameter], peers: Peers, whole: bool) -> None:
        self._weights, self._peers = dict(weights), peers
        dtypes = {weight.dtype for weight in weights.values()}
        if len(dtypes) > 1:
            raise UnsupportedError(f"ORTTrainer: ZeRO stage 1 needs weights of one dtype, not "
                                   f"{', '.join(sorted(map(str, dtypes)))}")
        for name, weight in weights.items():
            if not weight.is_contiguous():
                raise UnsupportedError(f"ORTTrainer: ZeRO stage 1 needs contiguous weights, and {name} is not")
        self._parts, self._length = divided({name: weight.numel() for name, weight in weights.items()}, peers.size,
                                            whole)
        self.own = {piece.name: piece for piece in self._parts[peers.rank]}
        self.pieces = {name: torch.nn.Parameter(self._view(piece)) for name, piece in self.own.items()}

    def _view(self, piece: Piece) -> Tensor:
        return self._weights[piece.name].detach().view(-1)[piece.start:piece.stop]

    def _rounds(self) -> Iterator[tuple[int, int]]:
        """Ranges [first, last) of every process's part that one collective takes, together about _BUCKET bytes."""
        size = next(iter(self._weights.values())).element_size() if self._weights else 1
        step = max(1, _BUCKET // size // self._peers.size)
        for first in range(0, self._length if self._weights else 0, step):
            yield first, min(self._length, first + step)

    def _overlaps(self, rank: int, first: int, last: int) -> Iterator[tuple[str, slice, slice]]:
        """What lies there: the weight's name, which of its elements, and where in the range."""
        for piece in self._parts[rank]:
            begin, end = max(first, piece.at), min(last, piece.at + piece.stop - piece.start)
            if begin < end:
                shift = piece.start - piece.at
                yield piece.name, slice(begin + shift, end + shift), slice(begin - first, end - first)

    @torch.no_grad()
    def reduce(self) -> None:
        """The gradients of the pieces: of all processes, added. Those of whole weights stay."""
        weights = self._weights
        self._peers.fill_gradients(list(weights.values()))
        like = next(iter(weights.values()), torch.empty(0)).detach()
        own = like.new_empty(self._length)
        for first, last in self._rounds():
            rows = like.new_zeros(self._peers.size, last - first)
            for rank, row in enumerate(rows):
                for name, source, target in self._overlaps(rank, first, last):
                    gradient = weights[name].grad
                    if gradient is not None:
                        row[target] = gradient.reshape(-1)[source]
            self._peers.sum_scattered(own[first:last], rows.view(-1))
        for name, piece in self.own.items():
            parameter = self.pieces[name]
            parameter.data = self._view(piece)  # other code may have given the weight other memory
            parameter.grad = (None if weights[name].grad is None else
                              own[piece.at:piece.at + piece.stop - piece.start])

    @torch.no_grad()
    def gather(self) -> None:
        """Gives every process the weights that the others have updated."""
        views = {name: weight.detach().view(-1) for name, weight in self._weights.items()}
        like = next(iter(views.values()), torch.empty(0))
        for first, last in self._rounds():
            own = like.new_zeros(last - first)
            for name, source, target in self._overlaps(self._peers.rank, first, last):
                own[target] = views[name][source]
            rows = like.new_empty(self._peers.size, last - first)
            self._peers.gather(rows.view(-1), own)
            for rank, row in enumerate(rows):
                if rank != self._peers.rank:
                    for name, source, target in self._overlaps(rank, first, last):
                        views[name][source] = row[target]

    def squares(self, norm: float | Tensor) -> float | Tensor:
        """The norm of all gradients, from that of the pieces' in each process."""
        own = norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64)
        device = next(iter(self._weights.values())).device if self._weights else own.device
        total = (own.double() ** 2).to(device)
        self._peers.sum(total)
        return total.sqrt() if isinstance(norm, Tensor) else math.sqrt(float(total))

    def cut(self, state: Mapping[str, Mapping[str, TensorLike]]) -> dict[str, dict[str, TensorLike]]:
        """An optimizer's state of whole weights, or of this process's own pieces, as one of the pieces.

        Raises:
            ValueError: a moment is of neither shape.
        """
        found = {name: dict(entry) for name, entry in state.items()
                 if name in self.pieces or name not in self._weights}
        for name, piece in self.own.items():
            for moment in MOMENTS:
                if moment not in found.get(name, {}):
                    continue
                value = as_tensor(found[name][moment])
                if value.shape == self._weights[name].shape:
                    value = value.reshape(-1)[piece.start:piece.stop]
                elif value.shape != (piece.stop - piece.start,):
                    raise ValueError(f"{moment} of {name} has the shape {tuple(value.shape)}, expected "
                                     f"{tuple(self._weights[name].shape)}")
                found[name][moment] = value
        return found
