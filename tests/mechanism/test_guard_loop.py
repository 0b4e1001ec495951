"""The guard in a loop of somebody's own: bit for bit the loop that never saw what was skipped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from runner import Guard, Sampler
from runner.embed.data.loaders import batch_digest, source_of
from runner.embed.loop.measure import Logged
from runner.embed.loop.rollback_state import DataPosition, RollbackState
from runner.embed.state.randomness import Randomness
from runner.system.error import CheckpointError, ConfigError, Halted

pytestmark = pytest.mark.usefixtures("node_memory")

NUM = 60  # batches
CLIP = 0.5
RULES: dict[str, Any] = {"every": 8, "clean_after": 3, "min_history": 8, "persist": 3}
NAN = float("nan")


def batches(bad: set[int] = frozenset(), num: int = NUM) -> list[torch.Tensor]:  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(8, 6, generator=generator) for _ in range(num)]
    for number in bad:
        made[number][0, 0] = NAN
    return made


class Net(nn.Module):
    """Something of everything that has state: dropout, running statistics, BF16 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(16).bfloat16())
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        # Python's and NumPy's randomness too: augmentation is often theirs.
        hidden = hidden * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))
        return self.last(hidden * self.scale)


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)


class Killed(Exception):
    pass


def die(guard: Guard) -> None:
    """Nothing is saved: as a process that is gone, but for its lease."""
    guard._finalizer()
    raise Killed


@dataclass
class Job:
    """What a script builds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    seen: list[int] = field(default_factory=list)

    @classmethod
    def make(cls, optimizer: Optimizers = adamw) -> Job:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = Net()
        made = optimizer(model)
        return cls(model, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 80))

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self, is_allowed: bool) -> None:
        if is_allowed:
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()

    def guard(self, out: Path, **settings: Any) -> Guard:
        rules = {**RULES, **settings}
        return Guard(
            out, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **rules
        )

    def train(self, guard: Guard, loader: Any, kill_at: int | None = None) -> None:
        """A pass; it dies within the step ``kill_at`` of this start."""
        for count, batch in enumerate(guard.over(loader)):
            loss = self.backward(batch)
            if count == kill_at:
                die(guard)
            self.update(guard.ok(loss))

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }


def same(a: Any, b: Any, where: str = "") -> None:
    """Equal to the last bit, types and structure too."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{where}.{number}")
    elif isinstance(a, np.ndarray):
        assert np.array_equal(a, b), where
    else:
        assert a == b, where


def bare(
    data: list[torch.Tensor], skip: list[tuple[int, int]], optimizer: Optimizers = adamw
) -> dict[str, Any]:
    """The loop as anybody writes it; it never sees what is to be skipped."""
    job = Job.make(optimizer)
    for number, batch in enumerate(data):
        if any(start <= number < stop for start, stop in skip):
            continue
        job.backward(batch)
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), CLIP)
        job.update(True)
    return job.state()


class Stateful:
    """A loader with ``state_dict``: state of several types, one that is no JSON."""

    def __init__(self, data: list[torch.Tensor]) -> None:
        self._data = data
        self._at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._at < len(self._data):
            self._at += 1
            yield self._data[self._at - 1]
        self._at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self._at), "bytes": b"\0\xff", "pair": (1, NAN)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["bytes"] == b"\0\xff" and state["pair"][0] == 1
        self._at = int(state["at"])


def indexed(data: list[torch.Tensor]) -> Any:
    return data


def plain(data: list[torch.Tensor]) -> Any:
    return (batch for batch in data)


KINDS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "indexed": indexed,
    "stateful": Stateful,
    "plain": plain,
}


def guarded(
    out: Path,
    loader: Any,
    *,
    kill_at: int | None = None,
    optimizer: Optimizers = adamw,
    **settings: Any,
) -> tuple[Job, Guard]:
    """The same loop with a guard."""
    job = Job.make(optimizer)
    guard = job.guard(out, clip=CLIP, **settings)
    job.train(guard, loader, kill_at)
    return job, guard


def finish(out: Path, loader: Callable[[], Any], kills: list[int] = [], **settings: Any) -> Any:  # noqa: B006
    """Run, kill, start again, until it is through; what it ends with, and what it skipped."""
    for kill_at in kills:
        with pytest.raises(Killed):
            guarded(out, loader(), kill_at=kill_at, **settings)
    job, guard = guarded(out, loader(), **settings)
    end = job.state()
    guard.close()
    return end, guard.skipped


def journal(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_batches_leave_no_trace(tmp_path: Path, kind: str) -> None:
    """Nor do kills."""
    data = batches({5, 18, 30, 31, 32})  # two alone, and three in a row: a rollback
    job, guard = guarded(tmp_path / "a", KINDS[kind](data))
    end = job.state()
    assert len(journal(tmp_path / "a", "rollback")) == 1
    [(start, stop)] = [pair for pair in guard.skipped if pair[1] > 30]
    assert start <= 30 and stop == 33
    assert ((start, stop) == (29, 33)) is (kind != "plain")
    same(end, bare(data, guard.skipped))
    guard.close()
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["steps"] == guard.updates == NUM - sum(b - a for a, b in guard.skipped)
    assert summary["rollbacks"] == 1 and summary["status"] == "done"
    end, skipped = finish(tmp_path / "b", lambda: KINDS[kind](data), [13, 2, 20])
    if kind != "plain":  # which checkpoint it goes back to, and so what it skips, is the ring's
        assert skipped == guard.skipped
    same(end, bare(data, skipped))


def test_what_only_looks_ends_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P14: what writes the lines of the ring and shows the progress fails in each step."""

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("runner.observe.side_lines.RingLines.note", fail)
    monkeypatch.setattr("runner.train.report.Reporter._show_progress", fail)
    with caplog.at_level("WARNING"):
        job, guard = guarded(tmp_path / "a", batches({20}))
    guard.close()
    same(job.state(), bare(batches({20}), guard.skipped))
    said = [text for text in caplog.messages if "no space left" in text]
    assert sorted(text.split(":")[0] for text in said) == ["live line", "ring lines"], "once each"


class Lazy(Stateful):
    """Draws a seed when its first batch is read, as litdata and MosaicML Streaming do."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.empty((), dtype=torch.int64).random_()
        yield from super().__iter__()


def test_a_loader_that_draws_with_its_first_batch(tmp_path: Path) -> None:
    end, skipped = finish(tmp_path / "a", lambda: Lazy(batches({5, 30, 31, 32})), [13, 2, 20])
    assert len(journal(tmp_path / "a", "rollback")) == 1
    same(end, finish(tmp_path / "b", lambda: Lazy(batches()), skip=skipped)[0])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_stateful_dataloader(tmp_path: Path, workers: int) -> None:
    """The real one of torchdata, which shuffles: an order that only its own state tells."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(bad: set[int]) -> Any:
        return torchdata.StatefulDataLoader(
            batches(bad),
            batch_size=None,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(11),
        )

    whole = [batch[0, 1].item() for batch in loader(set())]
    order = [[b[0, 1].item() for b in batches()].index(value) for value in whole]
    bad = {order[number] for number in (5, 30, 31, 32)}
    end, skipped = finish(tmp_path / "a", lambda: loader(bad), [13, 2, 20])
    assert len(journal(tmp_path / "a", "rollback")) == 1
    assert skipped == [(5, 6), (29, 33)] or skipped == [(5, 6), (30, 33)]
    same(end, finish(tmp_path / "b", lambda: loader(set()), skip=skipped)[0])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def lbfgs_like(model: nn.Module) -> torch.optim.Optimizer:
    """State that is neither a tensor nor like the parameter, and a rate that is a tensor."""

    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("past", [])
                    state["past"] = [*state["past"][-2:], parameter.detach().flatten()[:2].clone()]
                    state["count"] = state.get("count", 0) + 1
                    state["best"] = (float("inf"), None)

    return Odd(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("optimizer", [sgd, lbfgs_like])
def test_any_optimizer(tmp_path: Path, optimizer: Optimizers) -> None:
    data = batches({20, 21, 22}, num=36)
    end, skipped = finish(tmp_path / "a", lambda: data, [11], optimizer=optimizer)
    assert journal(tmp_path / "a", "rollback")
    same(end, bare(data, skipped, optimizer))


def test_shuffled_epochs_of_a_dataloader(tmp_path: Path) -> None:
    """Shuffling draws from the global generator at each epoch: a restart in the second one."""
    data = batches({3}, num=20)

    def epochs(out: Path, kill_at: int = -1) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        job = Job.make()
        guard = job.guard(out)
        loader = DataLoader(data, batch_size=None, shuffle=True)  # type: ignore[arg-type]
        for epoch in range(3):
            job.train(guard, loader, kill_at - epoch * len(data))
        end = job.state()
        guard.close()
        return end, guard.skipped

    with pytest.raises(Killed):
        epochs(tmp_path / "a", 32)
    end, skipped = epochs(tmp_path / "a")
    whole, others = epochs(tmp_path / "b")
    assert len(skipped) == 3 and skipped == others
    same(end, whole)


def accumulated(out: Path, data: Any, bad: Any = (), kill_at: int = -1, **settings: Any) -> Any:
    """Four batches make a step; the loss of those in ``bad`` is NaN, its gradients are not."""
    job = Job.make()
    guard = job.guard(out, accumulate=4, **settings)
    for count, batch in enumerate(guard.over(data)):
        loss = job.backward(batch)
        if count == kill_at:
            die(guard)
        assert guard._steps.in_hand is not None
        if guard._steps.in_hand[1] - 1 in bad:
            loss = loss * NAN
        if count % 4 < 3:
            guard.note(loss)
        else:
            job.update(guard.ok(loss))
    end = job.state()
    guard.close()
    return end, guard.skipped


def test_several_batches_make_a_step(tmp_path: Path) -> None:
    data = batches({21}, num=40)
    with pytest.raises(Killed):
        accumulated(tmp_path / "a", data, kill_at=33)
    end, skipped = accumulated(tmp_path / "a", data)
    assert skipped == [(20, 24)]
    job = Job.make()
    for number, batch in enumerate(data):
        if number not in range(20, 24):
            job.backward(batch)
            if number % 4 == 3:
                job.update(True)
    same(end, job.state())


def test_nan_in_the_loss_of_an_early_batch_of_a_step(tmp_path: Path) -> None:
    """Its gradients are finite, so that nothing else shows it."""
    data = batches(num=80)
    end, skipped = accumulated(tmp_path / "a", data, {9, 46})
    assert skipped == [(8, 12), (44, 48)]
    named = [line["sample_ids"] for line in journal(tmp_path / "a", "discard")]
    assert named == [["batch 9"], ["batch 46"]]
    same(end, accumulated(tmp_path / "b", data, skip=skipped)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_is_left_early_and_closed(tmp_path: Path, kind: str) -> None:
    """The batch in hand is read by the next start; one that cannot be read again is skipped."""
    data = batches(num=30)

    def some(leave_at: int | None) -> tuple[Job, Guard]:
        job = Job.make()
        guard = job.guard(tmp_path, clip=CLIP)
        for batch in guard.over(KINDS[kind](data)):
            loss = job.backward(batch)
            if guard.updates == leave_at:
                break
            job.update(guard.ok(loss))
        guard.close()
        return job, guard

    some(11)
    some(12)
    job, guard = some(None)
    lost = [(11, 12), (13, 14)] if kind == "stateful" else []
    assert guard.skipped == lost
    same(job.state(), bare(data, lost))


def test_a_loop_that_never_asks_is_told(tmp_path: Path) -> None:
    job = Job.make()
    guard = Guard(tmp_path, model=job.model, optimizer=job.optimizer)
    with pytest.raises(ConfigError, match=r"has read 3 batches and never called guard\.ok"):
        for batch in guard.over(batches(num=3)):
            job.backward(batch)
    guard._finalizer()


def test_one_batch_and_two_guards_in_a_process(tmp_path: Path) -> None:
    jobs = [Job.make(), Job.make()]
    guards = [job.guard(tmp_path / str(number)) for number, job in enumerate(jobs)]
    for guard, job in zip(guards, jobs, strict=True):
        for _ in range(3):
            job.train(guard, batches(num=1))
        assert guard.updates == 3 and guard.skipped == []
    with pytest.raises(ConfigError, match=r"in use by a living run.*: this process itself"):
        Guard(tmp_path / "0", model=jobs[0].model, optimizer=jobs[0].optimizer, stale_seconds=5)
    for guard in guards:
        guard.close()


def test_a_cell_that_is_run_again_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a prompt an interrupted cell leaves its guard open: the next one closes it."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    job = Job.make()
    former = job.guard(tmp_path / "run", every=3)
    job.train(former, batches(num=4))
    again = Job.make()
    guard = again.guard(tmp_path / "." / "run", every=3)
    assert guard.updates == 4
    former.close()  # does nothing any more
    again.train(guard, batches(num=6))
    guard.close()
    whole = Job.make()
    other = whole.guard(tmp_path / "whole")
    whole.train(other, batches(num=6))
    assert guard.state_digest() == other.state_digest()
    other.close()


def test_without_a_gate_everything_is_applied(tmp_path: Path) -> None:
    job = Job.make()
    guard = job.guard(tmp_path, enabled=False)
    job.train(guard, batches({1}, num=3))
    assert guard.updates == 3 and not torch.isfinite(job.model.scale).all()
    guard._finalizer()


def test_several_groups_and_a_last_batch_that_is_smaller(tmp_path: Path) -> None:
    """BatchNorm, rates of their own, a schedule of them, ``DataLoader(drop_last=False)``."""

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        names = [["first.weight"], ["scale"], []]
        names[2] = [n for n, _ in model.named_parameters() if n not in ("first.weight", "scale")]
        by_name = dict(model.named_parameters())
        return torch.optim.AdamW(
            [{"params": [by_name[n] for n in part], "lr": 1e-2 / (1 + at)} for at, part in
             enumerate(names)], weight_decay=0.1,
        )  # fmt: skip

    rows = torch.cat(batches({7}, num=24))[:-3]
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    end, skipped = finish(tmp_path, lambda: loader, [9], optimizer=groups)
    assert skipped == [(7, 8)]
    same(end, bare(loader, skipped, groups))  # type: ignore[arg-type]


def test_the_end_again_is_the_end(tmp_path: Path) -> None:
    data = batches(num=10)
    job, guard = guarded(tmp_path, data)
    end, digest = job.state(), guard.state_digest()
    guard.close()
    again, other = guarded(tmp_path, data)
    same(end, again.state())
    assert other.state_digest() == digest and other.updates == 10
    other.close()


def test_it_gives_up_with_its_exit_code(tmp_path: Path) -> None:
    data = batches(set(range(10, 60)))
    with pytest.raises(Halted) as caught:
        guarded(tmp_path, data, max_rollbacks=1)
    assert isinstance(caught.value, SystemExit) and caught.value.code == 3
    assert journal(tmp_path, "halt")


@pytest.mark.parametrize("is_in_evaluation", [False, True])
def test_a_stop_is_saved_and_has_its_exit_code(tmp_path: Path, is_in_evaluation: bool) -> None:
    job = Job.make()
    guard = job.guard(tmp_path, grace_seconds=60.0)
    with pytest.raises(SystemExit) as caught:
        for number, batch in enumerate(guard.over(batches(num=20))):
            loss = job.backward(batch)
            if number == 12:
                guard._run.group.stop.ask("SIGTERM")
            job.update(guard.ok(loss))
            if is_in_evaluation and number in (5, 12):
                job.model.eval()
                guard.check_stop()
                assert number == 5, "it has left"
                job.model.train()
    assert caught.value.code == 75
    again = Job.make()
    other = again.guard(tmp_path)
    assert other.resumed_step == 13
    assert again.model.training
    same(job.model.state_dict(), again.model.state_dict())
    other.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_at_the_step_of_a_rollback_saves_where_it_went_back_to(
    tmp_path: Path, kind: str
) -> None:
    """The loader itself is still where the bad step was."""
    data, rules = batches({30, 31, 32}), {"every": 40, "memory_every": 5}
    job = Job.make()
    guard = job.guard(tmp_path, clip=CLIP, grace_seconds=60.0, **rules)
    with pytest.raises(SystemExit):
        for number, batch in enumerate(guard.over(KINDS[kind](data))):
            loss = job.backward(batch)
            if number == 32:
                guard._run.group.stop.ask("SIGTERM")
            job.update(guard.ok(loss))
    [back] = journal(tmp_path, "rollback")
    [left] = journal(tmp_path, "preempted")
    assert f"saved at step {back['detail']['to_step']}" in left["reason"]
    end, skipped = finish(tmp_path, lambda: KINDS[kind](data), **rules)
    same(end, bare(data, skipped))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_left_at_the_step_of_a_rollback_loses_no_batch(tmp_path: Path, kind: str) -> None:
    """What was undone is trained first where it can be read again; the next pass is whole."""
    data, more = batches({30, 31, 32}, num=36), batches(num=12)
    job = Job.make()
    guard = job.guard(tmp_path, clip=CLIP)
    for number, batch in enumerate(guard.over(KINDS[kind](data))):
        job.update(guard.ok(job.backward(batch)))
        if number == 32:
            break
    assert journal(tmp_path, "rollback")
    job.train(guard, KINDS[kind](more))
    end = job.state()
    guard.close()
    read = data[:33] if kind == "plain" else data
    same(end, bare([*read, *more], guard.skipped))


@pytest.mark.parametrize(
    ("seeds", "same_as"), [([50, 51, 52], [0, 1, None]), ([7, 7, 7], [0, 0, 0])]
)
def test_a_rank_that_was_not_there_draws_what_no_other_does(
    seeds: list[int], same_as: list[int | None]
) -> None:
    """``manual_seed(50 + rank)``, resumed on three ranks of two; those seeded alike stay alike."""
    saved, left = [], []
    for number in range(2):
        torch.manual_seed(90 + number)
        saved.append({"random": Randomness().to_json()})
        left.append(torch.rand(1))
    for rank, seed in enumerate(seeds):
        torch.manual_seed(seed)
        own = torch.rand(1)
        torch.manual_seed(seed)
        ranks: Any = SimpleNamespace(rank=rank, gather=lambda _: seeds)
        state = RollbackState(Any, [], DataPosition(), ranks, Logged())  # type: ignore[arg-type]
        state._last = {"ranks": saved, "alike": [seeds[:2].index(one) for one in seeds[:2]]}
        torch.manual_seed(0)  # what it draws on the way
        state.restore_randomness()
        source = same_as[rank]
        assert torch.rand(1) == (own if source is None else left[source])


_DRAWS_NOTHING = """
import random, sys
import numpy as np, torch
from torch import nn

random.seed(1), np.random.seed(1), torch.manual_seed(1)
model = nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
states = lambda: (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
before = states()
from runner import Guard

with Guard(sys.argv[1], model=model, optimizer=optimizer, every=8, clean_after=3) as guard:
    for batch in guard.over([torch.ones(4, 2)] * 20):
        loss = model(batch).square().mean()
        loss.backward()
        if guard.ok(loss):
            optimizer.step()
        optimizer.zero_grad()
assert states() == before
"""


def test_a_guard_draws_nothing_in_a_new_process(tmp_path: Path) -> None:
    """Nor does what it imports, whenever that is."""
    command = [sys.executable, "-c", _DRAWS_NOTHING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_slots_in_memory_go_where_a_rollback_has_fewer_tensors(tmp_path: Path) -> None:
    """Back to before the optimizer's first update, and a save before the next one."""
    job = Job.make()
    guard = job.guard(tmp_path)
    state, changes = guard._sharded, list[int]()
    first = state.capture()["tensors"]
    job.train(guard, batches(num=3))
    state.before_change = lambda: changes.append(len(state.shards()))
    state.expect(first)
    job.optimizer.state.clear()
    assert state.capture()["tensors"] == first
    assert len(changes) == 1
    state.capture()
    assert len(changes) == 1
    guard.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"persits": 3}, "did you mean persist"),
        ({"persist": "3"}, "persist='3': must be int"),
        ({"window": 2}, "guard.window=2"),
        ({"remote": "s3://a"}, "not available in a loop of your own"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"cooldown_steps": 5}, "your schedule"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"skip": [[3, 3]]}, "half-open"),
        (
            {"pipeline": object(), "scheduler": torch.amp.GradScaler("cpu")},
            "sees overflows of its own stage alone",
        ),
        ({"pipeline": object(), "on_oom": "halve"}, "made for micro-batches of one size"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    job = Job.make()
    with pytest.raises(ConfigError, match=words):
        Guard(tmp_path, model=job.model, optimizer=job.optimizer, **settings)


def test_stages_of_a_pipeline_read_the_same_samples(tmp_path: Path) -> None:
    guard = Job.make().guard(tmp_path)
    stages, data = guard._sharded.stages, [torch.ones(4)] * 8
    alone, stages.members = stages.members, [(0,), (1,)]
    loader = DataLoader(data, batch_sampler=Sampler(data, global_size=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give it rank= and world_size= of the pipelines"):
        next(iter(guard.over(loader)))
    stages.members = alone
    guard.close()


def test_another_model_and_other_settings_are_refused(tmp_path: Path) -> None:
    guarded(tmp_path, batches(num=4))[1].close()
    with pytest.raises(ConfigError, match=r"guard.persist: was 3, now 4"):
        Job.make().guard(tmp_path, persist=4)
    other = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="another model"):
        Guard(tmp_path, model=other, optimizer=torch.optim.SGD(other.parameters()), **RULES)


def test_ok_wants_a_batch(tmp_path: Path) -> None:
    guard = Job.make().guard(tmp_path)
    with pytest.raises(ConfigError, match=r"guard.over"):
        guard.ok(1.0)
    with pytest.raises(ConfigError, match="mapping"):
        next(iter(guard.over({})))
    guard.close()


def test_a_pass_that_is_read_again_has_the_epoch_that_the_loop_set_for_it() -> None:
    """As after a rollback over the end of a pass: the loop's set_epoch is not run again."""
    data = list(range(8))
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0)  # type: ignore[arg-type, var-annotated]
    loader: Any = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    passes, begun, read = [], [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        passes.append(source_of(loader))
        begun.append(passes[-1].begin())
        read.append([passes[-1].read(number).tolist() for number in range(4)])
    assert read[0] != read[1]
    state = {"last": batch_digest(torch.tensor(read[0][1]))}
    passes[0].resume(begun[0], state, 2, is_over=False)
    assert [passes[0].read(number).tolist() for number in (2, 3)] == read[0][2:]
    passes[1].begin()
    assert [passes[1].read(number).tolist() for number in range(4)] == read[1]
