"""The switch for a device's bits, the look whether they repeat, and collections at agreed steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.distributed.agreement import Ranks
from runner.engine.modes import be_deterministic, repeats_bits
from runner.engine.protocol import LocalSums, MicroStep
from runner.session.summary import collect_digest
from runner.system.garbage import EVERY, collect, collected_at_boundaries
from tests.mechanism.test_engine import CPU, RATE, batch, build

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def switches() -> Iterator[None]:
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def test_the_switch(switches: None) -> None:
    environment = {"NCCL_ALGO": "Tree"}
    effective = be_deterministic(environment)
    assert torch.are_deterministic_algorithms_enabled()
    assert (
        effective["CUBLAS_WORKSPACE_CONFIG"] == environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    )
    assert effective["NCCL_ALGO"] == "Tree", "what the user has set is kept"
    assert effective["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("switched", [False, True])
def test_bits_repeat_on_this_machine_and_looking_changes_nothing(
    switched: bool, switches: None
) -> None:
    if switched:
        be_deterministic({})
    looked, plain = build(), build()
    work = MicroStep(batch=batch(), seed=3)
    assert repeats_bits(looked, [work])
    one, zero = torch.ones(()), torch.zeros(())
    for engine in (looked, plain):
        for seed in range(3):
            engine.accumulate([replace(work, seed=seed)])
            engine.apply(skip=zero, grad_scale=one, learning_rate=RATE)
    one_end, other_end = (
        collect_digest(engine, Ranks(CPU), lambda: False) for engine in (looked, plain)
    )
    assert one_end is not None and one_end == other_end


class Noisy:
    """An engine whose device sums in another order the second time."""

    def __init__(self, what: str) -> None:
        self._engine: Any = build()
        self._what = what
        self._times = 0
        self.device = torch.device("cpu")

    def accumulate(self, works: Sequence[MicroStep]) -> LocalSums:
        sums: LocalSums = self._engine.accumulate(works)
        self._times += 1
        value = getattr(sums, self._what)
        noise = torch.nextafter(value, value + 1) - value
        return replace(sums, **{self._what: value + noise * (self._times - 1)})

    def apply(self, **how: Any) -> None:
        assert how["skip"].item() == 1.0, "the weights stay"
        self._engine.apply(**how)


@pytest.mark.parametrize("what", ["loss", "grad_square"])
def test_one_bit_that_differs_is_seen(what: str) -> None:
    noisy: Any = Noisy(what)
    assert not repeats_bits(noisy, [MicroStep(batch=batch(), seed=3)])


def test_garbage_is_collected_at_agreed_steps_alone() -> None:
    seen: list[str] = []

    def look(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(look)
    try:
        with collected_at_boundaries():
            assert gc.get_freeze_count() > 0
            seen.clear()
            for number in range(100_000):
                ring: list[Any] = [number]
                ring.append(ring)
            collect(EVERY + 1)
            assert not seen
            collect(2 * EVERY)
            assert seen == ["start", "stop"]
        assert gc.isenabled() and gc.get_freeze_count() == 0
        seen.clear()
        collect(EVERY)
        assert not seen, "a program of somebody else's has its own collections"
    finally:
        gc.callbacks.remove(look)
