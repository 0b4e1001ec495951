"""A guard that reads a step's numbers one step late ends as one that waits, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from runner import Guard
from runner.system.error import ConfigError
from tests.mechanism.test_guard_loop import (
    CLIP,
    KINDS,
    NAN,
    RULES,
    Job,
    Killed,
    batches,
    finish,
    guarded,
    journal,
    same,
)

pytestmark = pytest.mark.usefixtures("node_memory")

ALONE = {6, 22, 23, 41, 59}  # the last one of all too
BAD = ALONE | {40, 42}  # so that it goes back
FULL = pytest.mark.full


def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def fused_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Of FP32 alone: on a CPU torch 2.13 leaves garbage in its momentum of BF16 parameters."""
    weights = [one for one in model.parameters() if one.dtype is torch.float32]
    return torch.optim.SGD(weights, lr=1e-2, momentum=0.9, fused=True)


def fused_tensor_rate(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2), fused=True)


def told_of(out: Path) -> list[dict[str, Any]]:
    """What the metrics and the journal say, but for the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines += [line for kind in ("discard", "rollback", "episode") for line in journal(out, kind)]
    clocks = {"time", "cost_seconds", "tokens_per_second", "seconds", "detail", "seq", "stalls"}
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines]


@pytest.mark.parametrize(
    "optimizer",
    [fused, pytest.param(fused_sgd, marks=FULL), pytest.param(fused_tensor_rate, marks=FULL)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_late_is_at_once(
    tmp_path: Path, kind: str, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
) -> None:
    def ended(name: str, **settings: Any) -> Any:
        loader = KINDS[kind](batches(ALONE))
        return finish(tmp_path / name, lambda: loader, optimizer=optimizer, **settings)

    same(ended("late", sync=False), ended("at-once"))
    assert told_of(tmp_path / "late") == told_of(tmp_path / "at-once")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_and_starts_after_kills(tmp_path: Path, kind: str) -> None:
    """Which checkpoint it goes back to is the ring's: it depends on what is proven by then."""

    def loader() -> Any:
        return KINDS[kind](batches(BAD))

    end, skipped = finish(tmp_path / "a", loader, [13, 2, 20], optimizer=fused, sync=False)
    assert journal(tmp_path / "a", "rollback")
    same(end, finish(tmp_path / "b", loader, optimizer=fused, skip=skipped)[0])
    assert not journal(tmp_path / "b", "rollback")


class Counting(torch.nn.Module):
    """What it computes depends on a counter, and on extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.count, self._seen = torch.nn.Linear(6, 1), 0, [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self._seen[0] += 0.0025
        return self.last(x) * (1 + 0.001 * self.count + self._seen[0])

    def get_extra_state(self) -> Any:
        return {"seen": self._seen[0]}

    def set_extra_state(self, state: Any) -> None:
        self._seen[0] = state["seen"]


def test_what_modules_count_is_as_before_the_step_that_was_read_late(tmp_path: Path) -> None:
    def trained(data: list[torch.Tensor], out: Path | None) -> tuple[Any, list[tuple[int, int]]]:
        torch.manual_seed(3)
        model = Counting()
        optimizer = fused(model)
        rules = {**RULES, "sync": False}
        guard = out and Guard(out, model=model, optimizer=optimizer, **rules)
        for batch in guard.over(data) if guard else data:
            loss = model(batch).square().mean()
            loss.backward()
            if guard is None or guard.ok(loss):
                optimizer.step()
            optimizer.zero_grad()
        skipped = guard.skipped if guard else []
        if guard:
            guard.close()
        return (model.state_dict(), model.count), skipped

    end, skipped = trained(batches(ALONE), tmp_path / "a")
    assert sum(stop - start for start, stop in skipped) == len(ALONE)
    kept = [b for n, b in enumerate(batches()) if not any(a <= n < z for a, z in skipped)]
    same(end, trained(kept, None)[0])


def accumulated(out: Path, loader: Any, **settings: Any) -> tuple[Any, Guard, list[bool]]:
    """Three batches a step, of which the first one's loss may be NaN and its gradients finite."""
    job, allowed = Job.make(fused), []
    guard = job.guard(out, clip=CLIP, accumulate=3, **settings)
    for count, batch in enumerate(guard.over(loader)):
        loss = job.backward(batch[0])
        if count % 3 < 2:
            guard.note(loss * batch[1])
            continue
        allowed.append(guard.ok(loss))
        job.update(allowed[-1])
    end = job.state()
    guard.close()
    return end, guard, allowed


@pytest.mark.parametrize("kind", KINDS)
def test_several_batches_a_step_are_given_once_more(tmp_path: Path, kind: str) -> None:
    data = [(batch, NAN if number == 33 else 1.0) for number, batch in enumerate(batches(num=66))]
    end, guard, allowed = accumulated(tmp_path / "a", KINDS[kind](data), sync=False)  # type: ignore[arg-type]
    assert guard.skipped == [(33, 36)] and guard.updates == 21
    # The step after the bad one was computed too early: it is not allowed, and computed again.
    assert allowed == [True] * 12 + [False] + [True] * 10
    same(end, accumulated(tmp_path / "b", KINDS[kind](data), skip=guard.skipped)[0])  # type: ignore[arg-type]


def test_it_ends_at_the_very_update(tmp_path: Path) -> None:
    ends = []
    for name, sync in (("at-once", True), ("late", False)):
        job = Job.make(fused)
        guard = job.guard(tmp_path / name, sync=sync)
        for batch in guard.over(batches({6, 21}), steps=21):
            job.update(guard.ok(job.backward(batch)))
        ends.append((job.state(), guard.skipped, guard.updates))
        guard.close()
    same(ends[1], ends[0])
    assert ends[1][1:] == ([(6, 7), (21, 22)], 21)


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_a_loop_left_in_a_speculative_step_loses_no_batch(tmp_path: Path, kind: str) -> None:
    """The step before is found bad only when the loop is left; the next start reads the batch."""
    data = batches({7}, num=14)
    for stop in (8, None):
        job = Job.make(fused)
        guard = job.guard(tmp_path, every=50, sync=False)
        for number, batch in enumerate(guard.over(KINDS[kind](data))):
            if number == stop:
                assert guard._steps.is_unread
                break
            job.update(guard.ok(job.backward(batch)))
        guard.close()
    assert guard.skipped == ([(7, 8)] if kind == "plain" else [(7, 9)])
    assert guard.updates == (13 if kind == "plain" else 12)


def test_another_start_may_wait(tmp_path: Path) -> None:
    """It changes nothing of the run."""
    data = batches({18, 30, 31, 32})
    with pytest.raises(Killed):
        guarded(tmp_path / "a", data, kill_at=20, optimizer=fused, sync=False)
    end = finish(tmp_path / "a", lambda: data, optimizer=fused)
    same(end, finish(tmp_path / "b", lambda: data, optimizer=fused))


def test_what_cannot_be_held_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sync=False needs optimizers .* this is AdamW"):
        Job.make().guard(tmp_path / "a", sync=False)
    guard = Job.make(fused).guard(tmp_path / "c", sync=False)
    with pytest.raises(ConfigError, match=r"sync=False needs guard\.over"):
        guard.take(0)
    guard._finalizer()


def test_which_optimizers_say_that_they_read_found_inf() -> None:
    """``_step_supports_amp_scaling`` is private in torch."""
    weights = [torch.nn.Parameter(torch.ones(3))]
    kinds = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]
    if Version(torch.__version__) >= Version("2.13"):
        kinds.append(torch.optim.Adagrad)
    for kind in kinds:
        for is_fused in (True, False):
            optimizer = kind(weights, lr=0.1, fused=is_fused)
            assert getattr(optimizer, "_step_supports_amp_scaling", False) is is_fused
            if not is_fused:
                continue
            optimizer.found_inf = torch.ones(())
            weights[0].grad = torch.full((3,), NAN)
            optimizer.step()
            assert torch.equal(weights[0].detach(), torch.ones(3))
