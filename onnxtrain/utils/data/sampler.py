"""Samplers that give every rank samples of like complexity at the same time, so that none waits for the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class LoadBalancingDistributedSampler(Sampler[int]):
    """Deals a dataset, sorted by complexity, to the ranks: each chunk of world_size consecutive samples, one to each.

    Args:
        dataset: indexable, with a length.
        complexity_fn: takes a sample, gives a number: its sequence length, say. Called once per sample.
        world_size, rank: those of torch.distributed where None.
        shuffle: the chunks (or the groups) come in another order each epoch, by seed + epoch.
        group_size: sort only within groups of so many consecutive samples, and shuffle the groups.
        seed: must be equal on all ranks.
        drop_last: drop the tail that does not fill a chunk; otherwise it is filled from the start, wrapping round.
        random_level: in [0, 1]: adds noise of that share of the range of complexities before sorting.

    Raises:
        ValueError: rank, group_size or random_level is out of range, or the dataset is empty.
    """

    def __init__(self, dataset: Any, complexity_fn: Callable[[Any], float], world_size: int | None = None,
                 rank: int | None = None, shuffle: bool = True, group_size: int | None = None, seed: int = 0,
                 drop_last: bool = False, random_level: float = 0) -> None:
        self.world_size = dist.get_world_size() if world_size is None else world_size
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}, expected 0 to {self.world_size - 1}")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size is {group_size}, expected 1 or more")
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level is {random_level}, expected 0 to 1")
        if not len(dataset):
            raise ValueError("the dataset is empty")
        self.dataset, self.shuffle, self.group_size = dataset, shuffle, group_size
        self.seed, self.drop_last, self.random_level = seed, drop_last, random_level
        self.epoch = 0
        self._complexities = torch.tensor([float(complexity_fn(dataset[i])) for i in range(len(dataset))],
                                          dtype=torch.float64)

    @property
    def num_samples(self) -> int:
        """Samples of each rank in an epoch."""
        whole, rest = divmod(len(self.dataset), self.world_size)
        return whole + (rest > 0 and not self.drop_last)

    def _sorted_groups(self, generator: torch.Generator) -> list[list[int]]:
        complexities = self._complexities
        if self.random_level:
            span = (complexities.max() - complexities.min()) * self.random_level
            complexities = complexities + torch.rand(len(complexities), generator=generator, dtype=torch.float64) * span
        size = self.group_size or len(complexities)
        order = complexities.tolist()
        return [sorted(range(start, min(start + size, len(order))), key=order.__getitem__)
                for start in range(0, len(order), size)]

    def _dealt(self) -> list[tuple[int, ...]]:
        """Chunks of world_size indices, in the order of this epoch."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        groups = self._sorted_groups(generator)
        if self.shuffle and self.group_size is not None:
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        indices = [index for group in groups for index in group]
        total = self.num_samples * self.world_size
        indices = list(itertools.islice(itertools.cycle(indices), total))
        chunks = [tuple(indices[i:i + self.world_size]) for i in range(0, total, self.world_size)]
        if self.shuffle and self.group_size is None:
            chunks = [chunks[i] for i in torch.randperm(len(chunks), generator=generator).tolist()]
        return chunks

    def indices(self, rank: int) -> list[int]:
        """What `rank` is dealt in this epoch."""
        return [chunk[rank] for chunk in self._dealt()]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.rank))

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Another order; call it before each epoch, with the same number on all ranks."""
        self.epoch = epoch


class LoadBalancingDistributedBatchSampler(Sampler[list[int]], Sized):
    """Batches of the user's own making over a LoadBalancingDistributedSampler, as many on each rank.

    Args:
        batch_sampler: the sampler; its drop_last must be False.
        batch_fn: takes a rank's indices, gives a list of lists of them: batches of equal token count, say.
        drop_last: cut every rank to the fewest batches; otherwise a rank with fewer repeats its first ones.

    Raises:
        ValueError: the sampler's drop_last is True.
    """

    def __init__(self, batch_sampler: LoadBalancingDistributedSampler,
                 batch_fn: Callable[[list[int]], list[list[int]]], drop_last: bool = False) -> None:
        if batch_sampler.drop_last:
            raise ValueError("drop_last of the sampler is True, expected False: whole batches are dropped here")
        self.batch_sampler, self.batch_fn, self.drop_last = batch_sampler, batch_fn, drop_last

    def _batches(self) -> list[list[int]]:
        sampler = self.batch_sampler
        chunks = sampler._dealt()
        ranks = [self.batch_fn([chunk[rank] for chunk in chunks]) for rank in range(sampler.world_size)]
        own = ranks[sampler.rank]
        count = (min if self.drop_last else max)(len(batches) for batches in ranks)
        return list(itertools.islice(itertools.cycle(own), count)) if own else []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """As the sampler's."""
        self.batch_sampler.set_epoch(epoch)
