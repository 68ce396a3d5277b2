"""Samplers: balance, coverage, epochs, groups, noise, tails, batches."""

import pytest
import torch

from onnxtrain.utils.data.sampler import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler


def lengths(n, seed=0):
    return torch.randint(1, 100, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def samplers(data, world, **options):
    return [LoadBalancingDistributedSampler(data, float, world, rank, **options) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 7, 30])
def test_every_sample_once_and_the_tail_wraps_round(world, n):
    data = lengths(n)
    dealt = [list(s) for s in samplers(data, world, shuffle=False)]
    assert len({len(d) for d in dealt}) == 1 == len({len(s) for s in samplers(data, world)})
    together = [i for chunk in zip(*dealt) for i in chunk]
    assert sorted(together[:n]) == list(range(n)) and together[n:] == together[:len(together) - n][:len(together) - n]
    assert [data[i] for i in together[:n]] == sorted(data)


def test_drop_last():
    dealt = [list(s) for s in samplers(lengths(11), 4, drop_last=True)]
    assert [len(d) for d in dealt] == [2] * 4 and len({i for d in dealt for i in d}) == 8


def test_ranks_meet_equals_in_every_epoch_and_epochs_differ():
    data = [x for x in lengths(25) for _ in range(2)]
    pair = samplers(data, 2)
    orders = []
    for epoch in (0, 1, 2, 1):
        for sampler in pair:
            sampler.set_epoch(epoch)
        orders.append([list(s) for s in pair])
        assert all(data[i] == data[j] for i, j in zip(*orders[-1]))
        assert sorted(orders[-1][0] + orders[-1][1]) == list(range(50))
    assert orders[0] != orders[1] != orders[2] and orders[1] == orders[3]


def test_groups_are_sorted_within_and_shuffled_whole():
    data = lengths(30)
    (sampler,) = samplers(data, 1, group_size=8)
    order = list(sampler)
    groups = {start: sorted(range(start, min(start + 8, 30)), key=data.__getitem__) for start in range(0, 30, 8)}
    permutation = torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist()
    assert order == [i for g in permutation for i in groups[8 * g]]
    sampler.set_epoch(3)
    assert list(sampler) != order and sorted(sampler) == list(range(30))


def test_noise_of_a_share_of_the_range():
    data = list(range(100))
    plain, noisy = (list(samplers(data, 1, shuffle=False, random_level=level)[0]) for level in (0, 0.1))
    assert plain == data and noisy != data
    assert max(abs(position - value) for position, value in enumerate(noisy)) <= 10


@pytest.mark.parametrize(("options", "name"), [({"rank": 2}, "rank"), ({"group_size": 0}, "group_size"),
                                               ({"random_level": 1.5}, "random_level")])
def test_out_of_range(options, name):
    with pytest.raises(ValueError, match=name):
        LoadBalancingDistributedSampler([1, 2], float, 2, **{"rank": 0, **options})
    with pytest.raises(ValueError, match="empty"):
        LoadBalancingDistributedSampler([], float, 2, 0)


def by_tokens(data, budget):
    def batch(indices):
        batches, used = [[]], 0
        for i in indices:
            if batches[-1] and used + data[i] > budget:
                batches.append([])
                used = 0
            batches[-1].append(i)
            used += data[i]
        return batches

    return batch


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_as_many_on_each_rank(drop_last):
    data = [60 if i % 2 else 20 for i in range(41)]
    ranks = [LoadBalancingDistributedSampler(data, lambda _: 1, 2, rank, shuffle=False) for rank in range(2)]
    batchers = [LoadBalancingDistributedBatchSampler(s, by_tokens(data, 120), drop_last) for s in ranks]
    own = [len(by_tokens(data, 120)(s.indices(r))) for r, s in enumerate(ranks)]
    assert own[0] != own[1]
    for epoch in range(2):
        for batcher in batchers:
            batcher.set_epoch(epoch)
        made = [list(b) for b in batchers]
        assert len(made[0]) == len(made[1]) == len(batchers[0])
    counts = (min if drop_last else max)
    for batcher in batchers:
        batcher.set_epoch(0)
    assert len(batchers[0]) == counts(own)


def test_batches_need_a_sampler_that_drops_nothing():
    with pytest.raises(ValueError, match="drop_last"):
        LoadBalancingDistributedBatchSampler(samplers(lengths(4), 2, drop_last=True)[0], lambda i: [i])
