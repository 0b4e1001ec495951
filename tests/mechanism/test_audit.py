"""What the bits of several ranks speak for, and who may be named."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.explain import probe
from runner.explain.audit import AgreedNumbers, Auditor, Changed, OwnGradients, SameBatch
from runner.policy.outlier_ranks import Opinion, changed_ranks, named, opinion_on
from runner.policy.retention.records import Record, State

GOOD, BAD, WORSE = [1.0, 2.0], [1.0, 2.0000000001], [1.5, 2.0]


def told(*numbers: list[float], kinds: str = "") -> list[list[object]]:
    return [[kinds[at : at + 1] or "x", own] for at, own in enumerate(numbers)]


@pytest.mark.parametrize(
    ("numbers", "odd", "is_clear"),
    [
        ((GOOD, GOOD, GOOD), (), True),
        ((GOOD, BAD, GOOD), (1,), True),
        ((GOOD, BAD), (0, 1), False),
        ((GOOD, GOOD, BAD, BAD), (0, 1, 2, 3), False),
        ((GOOD, BAD, WORSE, GOOD, GOOD), (1, 2), True),
        (([float("nan")] * 2, GOOD, GOOD), (0,), True),
    ],
)
def test_opinions(numbers: tuple[list[float], ...], odd: tuple[int, ...], is_clear: bool) -> None:
    assert opinion_on(told(*numbers), exactly=True) == Opinion(odd=odd, is_clear=is_clear)


def test_only_devices_of_one_kind_are_compared() -> None:
    assert opinion_on(told(GOOD, BAD, kinds="ab"), exactly=True).agrees
    assert opinion_on(told(GOOD, GOOD, BAD, BAD, WORSE, kinds="aabbb"), exactly=True).odd == (4,)


def test_noise_is_no_fault_where_bits_do_not_repeat() -> None:
    noisy = told(GOOD, [1.0001, 2.0], [1.0, 2.0001])
    assert opinion_on(noisy, exactly=False).agrees
    assert opinion_on(told(GOOD, WORSE, GOOD), exactly=False).odd == (1,)


@pytest.mark.parametrize(
    ("rounds", "ranks"),
    [
        ([(GOOD, BAD, GOOD)] * 3, (1,)),
        ([(GOOD, BAD, GOOD), (GOOD, GOOD, GOOD), (GOOD, GOOD, GOOD)], (1,)),
        ([(GOOD, BAD)] * 3, ()),
        ([(GOOD, BAD), (GOOD, WORSE), (GOOD, BAD)], (1,)),
        ([(GOOD, BAD), (WORSE, WORSE), (GOOD, BAD)], ()),
        ([(GOOD, BAD, GOOD), (BAD, GOOD, GOOD), (GOOD, GOOD, GOOD)], ()),
        ([(GOOD, BAD, WORSE, GOOD, GOOD)] * 3, ()),
    ],
)
def test_who_is_named(rounds: list[tuple[list[float], ...]], ranks: tuple[int, ...]) -> None:
    every = [told(*numbers) for numbers in rounds]
    assert named(every, [opinion_on(each, exactly=True) for each in every]) == ranks


@pytest.mark.parametrize(
    ("again", "ranks"),
    [
        ((GOOD, BAD), (1,)),
        ((WORSE, GOOD), (0,)),
        ((GOOD, GOOD), ()),
        ((WORSE, WORSE), ()),
        ((BAD, WORSE), ()),
        ((BAD, GOOD, BAD, GOOD), (0, 2)),
    ],
)
def test_those_are_named_that_have_changed_unless_all_have(
    again: tuple[list[float], ...], ranks: tuple[int, ...]
) -> None:
    assert changed_ranks(told(*[GOOD] * len(again)), told(*again), exactly=True) == ranks


class Ring:
    """Checkpoints, and what is asked to stay."""

    next_serial = 4

    def __init__(self) -> None:
        self.records = [
            Record(serial=1, step=0, cursor=0, state=State.clean),
            Record(serial=2, step=10, cursor=10, state=State.clean),
            Record(serial=3, step=20, cursor=20, state=State.committed),
        ]
        self.loaded: list[int] = []
        self.serials: Callable[[], Collection[int]] = set

    def also_keep(self, serials: Callable[[], Collection[int]]) -> None:
        self.serials = serials

    def compute(self, record: Record, compute: Callable[[], Any]) -> Any:
        self.loaded.append(record.serial)
        return compute()


def agreed_numbers(ring: Ring, by_rank: list[Any]) -> tuple[AgreedNumbers, Any]:
    """Over ranks that always compute ``by_rank``, with checkpoints every 10 updates."""
    same: Any = SimpleNamespace(repeats_bits=True, compute=lambda batches: deepcopy(by_rank))
    weights: Any = ring
    numbers = AgreedNumbers(
        same=same, weights=weights, ring=ring, is_saved=lambda updates: updates % 10 == 0
    )
    return numbers, [SimpleNamespace(shape=[2, 8])]


def test_the_newest_agreement_whose_checkpoint_is_there_is_computed_again() -> None:
    ring, by_rank = Ring(), told(GOOD, GOOD)
    numbers, batches = agreed_numbers(ring, by_rank)
    numbers.begin(10, batches)
    assert ring.loaded == [2] and numbers.newest_step == 10
    numbers.note_if_saved(35, batches, told(GOOD, GOOD))
    assert numbers.newest_step == 10, "its state is not saved"
    numbers.note_if_saved(30, batches, told(GOOD, GOOD))
    assert numbers.newest_step == 30
    by_rank[1][1] = BAD
    changed = numbers.changed(batches)
    assert ring.loaded == [2, 2], "the checkpoint of step 30 is not on disk yet"
    assert changed is not None and (changed.ranks, changed.step) == ((1,), 10)
    ring.records.append(Record(serial=4, step=30, cursor=30, state=State.committed))
    assert numbers.changed(batches) is not None and ring.loaded[-1] == 4
    other: Any = [SimpleNamespace(shape=[1, 8])]
    assert numbers.changed(other) is None, "micro-batches of another size"
    ring.records.clear()
    assert numbers.changed(batches) is None


def test_what_the_ranks_did_not_agree_on_shows_nothing() -> None:
    ring = Ring()
    numbers, batches = agreed_numbers(ring, told(GOOD, BAD))
    numbers.begin(10, batches)
    assert numbers.newest_step is None and numbers.changed(batches) is None


def test_a_checkpoint_from_before_the_last_agreement_is_kept() -> None:
    ring, good = Ring(), [10]
    numbers, batches = agreed_numbers(ring, told(GOOD, GOOD))
    numbers.keep_from_before(lambda: good[0])
    assert ring.serials() == {2}
    good[0] = 9
    assert ring.serials() == {1}
    numbers.begin(10, batches)
    assert ring.serials() == {1, 2}


@pytest.mark.parametrize(
    ("free", "lacking", "did"), [(160, 0, True), (159, 0, False), (999, 1, False)]
)
def test_no_weights_are_put_in_place_without_memory_for_a_copy_on_every_node(
    free: int, lacking: int, did: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with 40 bytes each, which may take half of what is free."""
    monkeypatch.setattr(probe, "free_memory_bytes", lambda: free)
    shard = SimpleNamespace(local=torch.zeros(10))
    engine: Any = SimpleNamespace(
        shards=lambda: [shard], buffers=dict, update_counts=dict, finish_load=lambda counts: None
    )
    ring: Any = SimpleNamespace(restore=lambda records: None, before_update=lambda: None)
    ranks: Any = SimpleNamespace(sum=lambda numbers: [numbers[0] + lacking])
    stop: Any = SimpleNamespace(now=lambda: None)
    run = of_observers(ranks, stop, engine=engine, ring=ring)
    run.group.place = SimpleNamespace(local_world_size=2)
    weights = probe.CleanWeights(run)
    assert (weights.compute(Ring().records[0], lambda: "done") == "done") is did


one: Any = SimpleNamespace


def of_observers(ranks: Any, stop: Any, **more: Any) -> Any:
    """A run whose ranks and stop are these."""
    return one(
        observers=one(ranks=ranks),
        group=one(
            stop_look=one(through=lambda ranks: stop),
            heart=one(enter=lambda phase: None),
            device=torch.device("cpu"),
        ),
        lease=one(number=1),
        repeats_bits=True,
        **{"stepper": one(newest_plan=object()), "written": one(report=str), **more},
    )


def reading(read_again: Callable[..., None], world_size: int = 2) -> Any:
    """A run whose samples cannot be read again, so that nothing is computed."""
    return of_observers(
        one(world_size=world_size, sum=lambda numbers: numbers),
        one(now=lambda: None),
        engine=one(device=torch.device("cpu"), network=torch.nn.Identity(), works_a_step=1),
        feed=one(read_again=lambda *asked: (read_again(*asked), (one(unreadable=["all"]),))[1]),
    )


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_reading_samples_again_leaves_no_trace_in_any_generator() -> None:
    """A data set of the user's may draw from each when it is asked for a sample."""
    same = SameBatch(reading(lambda plan, rank: drawn()), seed=0)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    usual = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    assert same.batches(one(), 1) is None
    assert drawn() == usual


@pytest.mark.parametrize(
    ("numbers", "good_step", "ranks", "words", "changed"),
    [
        ((GOOD, BAD), 5, (0, 1), "ranks 0 and 1 give different bits", ()),
        ((GOOD, BAD, GOOD, BAD), 5, (0, 1, 2, 3), "ranks 0 = 2 and 1 = 3 give different bits", ()),
        (
            *((GOOD, BAD, GOOD, BAD), 5, (1, 3)),
            "ranks 1 on node0 and 3 on node0 give other bits than the others for the same "
            "micro-batch, 3 times of 3; with the weights of the checkpoint of step 0 they no "
            "longer give the bits on which all agreed then, and the others do: their devices "
            "silently compute wrongly; all ranks agreed at step 5",
            (1, 3),
        ),
        ((GOOD, BAD, BAD, GOOD, GOOD), 5, (1, 2), "ranks 1 = 2 give other bits than most", ()),
        ((GOOD, BAD, GOOD), 5, (1,), "all ranks agreed at step 5", ()),
        ((GOOD, BAD, GOOD), 0, (1,), "no audit since the start at step 0 found all ranks", ()),
    ],
)
def test_what_an_audit_says(
    numbers: tuple[list[float], ...],
    good_step: int,
    ranks: tuple[int, ...],
    words: str,
    changed: tuple[int, ...],
) -> None:
    reports: list[Any] = []
    ranks_told = one(gather=lambda value: [value] * len(numbers))
    auditor = Auditor(
        of_observers(ranks_told, one(), written=one(report=reports.append)),
        same=one(repeats_bits=True),
        agreed=one(
            changed=lambda batches: Changed(changed, 0) if changed else None,
            keep_from_before=lambda step: None,
        ),
        replicas=one(look=lambda step, good_step: None),
        every=5,
        until=100,
    )
    auditor._host = "node0"
    auditor.begin(0)
    auditor._good_step = good_step
    auditor._judge(10, [told(*numbers)] * 3, [{} for _ in numbers], ())
    (line,) = reports
    assert line.ranks == ranks and words in line.reason, line.reason
    assert ("without a majority" in line.reason) is (len(ranks) == len(numbers))


def test_audits_take_the_samples_of_each_rank_in_turn() -> None:
    asked: list[int] = []
    run = reading(lambda plan, rank: asked.append(rank), world_size=3)
    auditor = Auditor(
        run,
        same=SameBatch(run, seed=0),
        agreed=one(newest_step=None),
        replicas=one(),
        every=5,
        until=100,
    )
    for updates in range(5, 35, 5):
        auditor.look(updates)
    assert asked == [1, 2, 0, 1, 2, 0]


def heard(inputs: Sequence[float]) -> OwnGradients:
    """One weight's gradient is the input, in a backward pass each."""
    linear = torch.nn.Linear(1, 1, bias=False)
    own = OwnGradients(linear)
    with own.over():
        for value in inputs:
            linear(torch.tensor([value])).sum().backward()
    return own


def test_the_gradient_of_each_micro_batch_counts() -> None:
    plain = heard([3.0, 4.0]).checksums()
    assert heard([3.0, 4.0]).checksums() == plain
    others = ([3.0, 5.0], [2.0, 4.0], [4.0, 3.0], [3.0], [3.0, 4.0, 4.0])
    assert all(heard(inputs).checksums() != plain for inputs in others)
    assert heard([3.0, 4.0]).norms() == {"weight": 5.0}
