"""The sampler: each sample once, on any world size, with any number of workers, from any place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from runner import Sampler
from runner.system.error import ConfigError
from tests.mechanism.test_guard_loop import Job, Killed, Stateful, die, journal, same

pytestmark = pytest.mark.usefixtures("node_memory")

N, G = 103, 8
State = dict[str, Any]


def samplers(world_size: int, state: State | None = None, **told: Any) -> list[Sampler]:
    made = [
        Sampler(N, global_size=G, seed=3, rank=rank, world_size=world_size, **told)
        for rank in range(world_size)
    ]
    for one in made:
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)))
    return made


def passes(ranks: list[Sampler], count: int) -> Iterator[tuple[int, ...]]:
    """The global batches of ``count`` passes, as their samples in order."""
    for _ in range(count):
        for parts in zip(*ranks, strict=True):
            yield tuple(sorted(index for part in parts for index in part))


def test_each_sample_once_an_epoch_on_any_world_size() -> None:
    alone = list(passes(samplers(1), G))
    assert len(alone) == N  # G epochs are N whole batches
    read = [index for batch in alone for index in batch]
    assert sorted(read) == sorted(list(range(N)) * G)
    assert set(read[: N - N % G]) <= set(range(N)) and len(set(read[: N - N % G])) == N - N % G
    for world_size in (2, 3, 5, 8):
        assert list(passes(samplers(world_size), G)) == alone


def test_the_order_is_another_one_each_epoch_and_for_each_seed() -> None:
    [one] = samplers(1)
    first, second = list(one), list(one)
    assert first != second and one.epoch == 2
    assert list(Sampler(N, global_size=G, seed=4)) != first
    in_order = Sampler(N, global_size=G, shuffle=False)
    assert [i for batch in in_order for i in batch] == list(range(N - N % G))
    assert next(iter(in_order)) == [*range(N - N % G, N), 0]  # what was left comes first


@pytest.mark.parametrize(("was", "now"), [(1, 3), (4, 2), (2, 5)])
@pytest.mark.parametrize("at", [0, 5, 12, 13, 31])
def test_resumed_on_another_world_size(was: int, now: int, at: int) -> None:
    """13 batches a pass, but for some of 12."""
    unbroken = list(passes(samplers(1), 4))
    ranks = samplers(was)
    begun = passes(ranks, 4)
    head = [next(begun) for _ in range(at)]
    states = [one.state_dict() for one in ranks]
    assert all(state == states[0] for state in states)
    resumed = samplers(now, states[0])
    assert head + list(passes(resumed, 4 - resumed[0].epoch)) == unbroken
    assert len(json.dumps(states[0])) < 200


def test_what_is_skipped_is_never_read() -> None:
    skip = [(0, 3), (40, 61), (N + 7, N + 9)]
    alone = list(passes(samplers(1, skip=skip), 3))
    assert list(passes(samplers(3, skip=skip), 3)) == alone
    positions = [p for p in range(3 * N) if not any(a <= p < b for a, b in skip)]
    whole = Sampler(N, global_size=1, seed=3)
    order = [index for _ in range(3) for [index] in whole]
    wanted = [tuple(sorted(order[p] for p in positions[k : k + G])) for k in range(0, 3 * N, G)]
    assert alone == [batch for batch in wanted if len(batch) == G]
    [one] = samplers(1, skip=skip)
    assert [len(one), len(list(one)), len(one)] == [9, 9, (2 * N - 26) // G - 9]
    one.set_epoch(1)
    assert list(passes([one], 1)) == alone[9 : 9 + (2 * N - 26) // G - 9]


@pytest.mark.parametrize("skip", [[], [(0, 3), (N + 7, N + 9)]])
def test_a_pass_that_is_jumped_to_begins_with_what_the_ones_before_left(skip: Any) -> None:
    for epoch in (1, 2, 3):
        [walked], [jumped] = samplers(1, skip=skip), samplers(1, skip=skip)
        for _ in range(epoch):
            list(walked)
        jumped.set_epoch(epoch)
        assert list(jumped) == list(walked)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)

    def __len__(self) -> int:
        return N


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_ahead_and_nothing_is_lost(workers: int) -> None:
    unbroken = list(passes(samplers(1), 2))

    def loader(sampler: Sampler) -> Any:
        return DataLoader(Rows(), batch_sampler=sampler, num_workers=workers)

    [sampler] = samplers(1)
    read: list[tuple[int, ...]] = []
    for batch in sampler.over(loader(sampler)):
        read.append(tuple(sorted(batch.tolist())))
        if len(read) == 5:
            break
    assert sampler.positions == (4 * G, 5 * G)
    [resumed] = samplers(1, sampler.state_dict())
    while resumed.epoch < 2:
        read += [tuple(sorted(b.tolist())) for b in resumed.over(loader(resumed))]
    assert read == unbroken


@pytest.mark.parametrize("workers", [0, 2])
def test_going_back_in_the_midst(workers: int) -> None:
    """The state of batch 3, and what batches 6 and 7 read is skipped: as if it never was there."""
    [sampler] = samplers(1)
    loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=workers)
    torch.manual_seed(0)
    read: list[tuple[int, ...]] = []
    bad: list[tuple[int, int]] = []
    state: State = {}
    for batch in sampler.over(loader):
        read.append(tuple(sorted(batch.tolist())))
        before = torch.get_rng_state()
        if len(read) == 3:
            state = sampler.state_dict()
        if len(read) in (7, 8) and len(bad) < 2:
            bad.append(sampler.positions)
        if len(read) == 8 and state:
            del read[3:]
            sampler.load_state_dict(state)
            sampler.skip(bad[0][0], bad[1][1])
            state = {}
        assert torch.equal(before, torch.get_rng_state())
    assert sampler.skipped == [(6 * G, 8 * G)]
    assert read == list(passes(samplers(1, skip=[(6 * G, 8 * G)]), 1))


def test_a_ledger_is_not_rolled_back() -> None:
    [sampler] = samplers(1)
    state = sampler.state_dict()
    sampler.skip(3, 5)
    sampler.load_state_dict(state)
    assert sampler.skipped == [(3, 5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_keeps_its_state(workers: int) -> None:
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )
    unbroken = list(passes(samplers(1), 3))

    def loader(state: State | None) -> Any:
        made = stateful.StatefulDataLoader(
            Rows(), batch_sampler=samplers(1)[0], num_workers=workers
        )
        if state is not None:
            made.load_state_dict(state)
        return made

    read: list[tuple[int, ...]] = []
    state: State | None = None
    for stop in (5, 12, 20, 99):  # the second is the last of a pass
        one = loader(state)
        while len(read) < min(stop, len(unbroken)):
            for batch in one:
                read.append(tuple(sorted(batch.tolist())))
                if len(read) == stop:
                    break
        state = one.state_dict()
    assert read == unbroken
    with pytest.raises(ConfigError, match="keeps its own position"):
        one.batch_sampler.over(one)


BAD: list[tuple[str, Any]] = [
    ("global_size", 0), ("global_size", 2.0), ("skip", [(5, 5)]), ("skip", [(0.5, 5)]),
    ("skip", [3]), ("rank", 1), ("world_size", 2), ("seed", "a"), ("data", iter([])),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD)
def test_what_cannot_be_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Sampler.*"):
        Sampler(**{"data": N, "global_size": G, key: value})
    with pytest.raises(ConfigError, match="epoch=-1"):
        Sampler(N, global_size=G).set_epoch(-1)


def test_a_state_of_another_order_is_refused() -> None:
    [sampler] = samplers(1)
    for name, value in (("seed", 9), ("num_samples", 5), ("shuffle", False), ("cursor", "x")):
        with pytest.raises(ConfigError, match="load_state_dict"):
            sampler.load_state_dict({**sampler.state_dict(), name: value})
    with pytest.raises(ConfigError, match="batch_sampler=sampler"):
        sampler.over([1, 2])
    with pytest.raises(ConfigError, match="world_size=9"):
        Sampler(N, global_size=G, rank=0, world_size=9)


# -- with the guard -----------------------------------------------------------------------


def test_under_the_guard(tmp_path: Path) -> None:
    """Bad batches, a rollback over the end of a pass, kills: as a plain loop without them."""
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(160, 6, generator=generator)
    per_pass, num = 20, 60

    def loop(out: Path | None, skip: Any = (), kill_at: int = -1) -> Any:
        job, sampler = Job.make(), Sampler(len(data), global_size=8, seed=5)
        loader = DataLoader(data, batch_sampler=sampler)  # type: ignore[arg-type]
        guard = job.guard(out) if out else None
        count = 0
        for _ in range(num // per_pass):
            for batch in guard.over(loader) if guard else loader:
                number = sampler.positions[0] // 8
                count += 1
                if any(a <= number < b for a, b in skip):
                    continue
                loss = job.backward(batch * (float("nan") if number in (5, 20, 21, 22) else 1))
                if guard is not None and count == kill_at:
                    die(guard)
                job.update(guard is None or guard.ok(loss))
        end = job.state()
        if guard:
            guard.close()
        return end, guard and guard.skipped

    for kill_at in (13, 10, 2, 30):
        with pytest.raises(Killed):
            loop(tmp_path / "a", kill_at=kill_at)
    end, skipped = loop(tmp_path / "a")
    assert journal(tmp_path / "a", "rollback") and sum(b - a for a, b in skipped) < 8
    same(end, loop(None, skipped)[0])


@pytest.mark.parametrize("kind", ["stateful", "sampled"])
def test_killed_at_the_beginning_of_a_pass(tmp_path: Path, kind: str) -> None:
    """The newest checkpoint is of the end of the pass before: that pass is not read once more."""
    data = list(torch.randn(10, 8, 6, generator=torch.Generator().manual_seed(7)))

    def loop(out: Path, kill_at: int = -1) -> tuple[State, int]:
        job = Job.make()
        guard = job.guard(out, every=1000, clean_after=1)
        sampler = Sampler(data, global_size=1, rank=0, world_size=1)
        sampled = DataLoader(data, batch_sampler=sampler, collate_fn=lambda rows: rows[0])  # type: ignore[arg-type]
        loader: Any = Stateful(data) if kind == "stateful" else sampled
        for epoch in range(3):
            job.train(guard, loader, kill_at - epoch * len(data))
        end, updates = job.state(), guard.updates
        guard.close()
        return end, updates

    with pytest.raises(Killed):
        loop(tmp_path / "a", 12)
    end, updates = loop(tmp_path / "a")
    unbroken, _ = loop(tmp_path / "b")
    assert updates == 30
    same(end, unbroken)
