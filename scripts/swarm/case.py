"""A case: one tiny run with all that is to meet in it. Plain values, which are also JSON.

A default means that a feature is absent, so a case is as large as what is not a default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """One start that is ended from outside, and what the next start has otherwise.

    Args:
        how: ``kill`` (SIGKILL to all processes), ``kill_one``, ``term`` or ``int`` (to all ranks).
            Of a run by the runner also ``notice``: a file tells that the machine goes.
        at: ``PHASE:N``: as the N-th such phase of the start begins (``step:N``: as step N begins).
        delay: seconds from there to the signal.
        ranks, engine: of the next start; 0 and "": as before. In a loop ranks alone.
        weights: of the mixture's sources from the next start on.
    """

    how: str = "kill"
    at: str = "step:12"
    delay: float = 0.0
    ranks: int = 0
    engine: str = ""
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All features of a run by the runner (``where`` = runner) or of a ``Guard`` loop (loop).

    ``hf``, ``lightning``, ``accelerate`` and ``nano`` are scripts of tests/ with a place to die.

    Args:
        model: traits of :class:`scripts.swarm.guests.Net`; none: the runner's own decoder.
        data: ``synthetic``, ``own``, ``stream``, ``augmented``, ``packed``, ``text``, ``texts``
            (a mixture, whose tokens each start may have to make), ``mixture`` (sources of one
            level) or ``levels`` (sources that differ in how well they can be learnt). In a
            loop: ``list``, ``own`` (iterable), ``windows`` (drawn from the process's generator),
            ``shuffled`` (a DataLoader), ``stateful`` (torchdata's) or ``sampler`` (our Sampler).
        units: the loss is this many times what it would be, as are the guard's limits.
        tracker: ``tensorboard``, ``wandb``, ``mlflow``, or a class of tests/tracking.py.
        mirror: snapshots are also kept in the memory of another node.
        faults: as in ``faults=[...]``.
        bad: loop: numbers of the batches that are NaN on rank 0.
        sick: ``HOW@step=N,ranks=A+B``: a device that computes wrongly from then on.
        flaky: seconds for which the storage refuses to read samples, from the start on.
        stop_after: as ``eval.stop_after``, with the first evaluation the best one: the run ends so
            many evaluations later.
        auto: the interval of checkpoints is chosen by their cost.
        advice: the step at which a file says that the machine may go soon; 0 for none.
        full: loop: numbers of the batches that do not fit into rank 0's memory at once.
        out_of_memory: loop: ``halve`` or ``skip``, as ``Guard(on_oom=...)``; "": nothing runs out.
        logs: loop: with metrics of its own.
        checks_stop: loop: each evaluation calls ``guard.check_stop()``.
        waits: loop: each save is on disk before the loop goes on.
        looked: loop: the model is evaluated before ``Guard(...)``.
        late_copies: snapshots are copied as late as on a GPU (tests/late_copies.py).
        ring_alone: loop: with :class:`runner.Ring` and no guard.
        settings: further ones of the runner, or of the guard (numbers); ``OUT`` in them is the
            run's directory.
    """

    where: str = "runner"
    seed: int = 0
    engine: str = "single"
    ranks: int = 1
    model: tuple[str, ...] = ()
    data: str = "synthetic"
    optim: str = "adamw"
    ema: bool = False
    micro: int = 8
    precision: str = "fp32"
    units: float = 1.0
    evaluate: int = 0
    best: bool = False
    stop_after: int = 0
    audit: int = 0
    layers: int = 0
    replicas: int = 0
    preflight: bool = False
    explain: str = "off"
    remedy: str = "discard"
    tracker: str = ""
    late: bool = False
    workers: int = 0
    keep: int = 3
    memory: bool = False
    mirror: bool = False
    late_copies: bool = False
    background: bool = False
    clip: float = 0.0
    accumulate: int = 1
    waits: bool = False
    looked: bool = False
    ring_alone: bool = False
    auto: bool = False
    advice: int = 0
    full: tuple[int, ...] = ()
    out_of_memory: str = ""
    logs: bool = False
    checks_stop: bool = False
    faults: tuple[str, ...] = ()
    bad: tuple[int, ...] = ()
    sick: str = ""
    flaky: float = 0.0
    settings: tuple[str, ...] = ()
    breaks: tuple[Break, ...] = ()

    @property
    def is_runner(self) -> bool:
        return self.where == "runner"

    def to_json(self) -> dict[str, Any]:
        """What is not a default."""
        return {name: _plain(value) for name, value in _given(self).items()}

    def describe(self) -> str:
        return json.dumps(self.to_json())


def _given(one: Case | Break) -> dict[str, Any]:
    values, usual = {field.name: getattr(one, field.name) for field in fields(one)}, type(one)()
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def _plain(value: Any) -> Any:
    if isinstance(value, Break):
        return {name: _plain(part) for name, part in _given(value).items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def from_json(given: dict[str, Any]) -> Case:
    """
    Raises:
        TypeError: a feature has another name.
    """
    breaks = tuple(Break(**_tuples(one)) for one in given.get("breaks", ()))
    return Case(**_tuples(given) | {"breaks": breaks})


def _tuples(given: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}


def read(path: Path) -> Case:
    """A case from a file of a failure, or one written by hand: only its features."""
    given = json.loads(path.read_text())
    return from_json(given.get("case", given))


def simpler(case: Case) -> Iterator[Case]:
    """The case without one of its features each; the dearest ones first."""
    for name, value in _given(case).items():
        if isinstance(value, tuple):
            for number in range(len(value)):
                yield replace(case, **{name: value[:number] + value[number + 1 :]})
        elif name not in ("where", "engine", "ranks"):
            yield replace(case, **{name: getattr(Case(), name)})
    for number, one in enumerate(case.breaks):
        for name in _given(one).keys() & {"ranks", "engine", "weights", "delay"}:
            less = replace(one, **{name: getattr(Break(), name)})
            yield replace(case, breaks=(*case.breaks[:number], less, *case.breaks[number + 1 :]))
    yield from _fewer_ranks(case)


def _fewer_ranks(case: Case) -> Iterator[Case]:
    if case.ranks == 1 or case.where not in ("runner", "loop"):
        return
    if not case.breaks or not any(one.ranks or one.engine for one in case.breaks):
        yield replace(case, ranks=1, engine="single")
    if case.ranks > 2 and case.engine != "hsdp":
        yield replace(case, ranks=2)
    if case.engine not in ("fsdp", "ddp"):
        yield replace(case, engine="ddp")


def size(case: Case) -> int:
    """How many features it has."""
    return sum(len(v) if isinstance(v, tuple) else 1 for v in _given(case).values())


# What breaks a run, looks at it, or keeps copies of it.
_DISTURBING = (
    *("faults", "bad", "sick", "flaky", "breaks", "audit", "layers", "replicas", "preflight"),
    *("explain", "tracker", "best", "memory", "waits", "looked", "late", "late_copies", "mirror"),
    *("auto", "advice"),
)
_LOOKING = ("checkpoint.", "debug.", "track.", "watchdog.")


def as_told(case: Case) -> Case:
    """The same trajectory undisturbed: nothing breaks, and nobody looks."""
    plain = Case()
    own = tuple(one for one in case.settings if not one.startswith(_LOOKING))
    return replace(
        case, keep=9, settings=own, **{name: getattr(plain, name) for name in _DISTURBING}
    )
