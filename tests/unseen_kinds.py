"""The incidents of ``python -m scripts.explain_trials unseen``: no rule was tuned on their kinds.

Drawn anew for each seed: sizes, ranks, samples, steps. The illnesses are those of tests/ill.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

TRANSIENT, STICKY, MISREAD = "hardware, transient", "hardware, sticky", "read wrongly once"
DATA, NUMERICS, STATE, RATE = "data", "numerics", "state corrupted", "rate"
HEALTHY = "healthy"
STEP = 33  # of most incidents; clean checkpoints are of 10 and 20
BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Incident:
    """
    Args:
        group: the words of issue 27 that it is of.
        lasting: illnesses of the model itself, which its twin has too; ``ills``: the incident's.
        causes: that are right; ``ranks``, ``positions``: that may be named.
        sites: ends of the names of modules that may be named.
        again: what a replay in one process must find; "" where the step is good there.
    """

    name: str
    group: str = ""
    causes: tuple[str, ...] = (DATA,)
    settings: tuple[str, ...] = ()
    world_size: int = 2
    lasting: tuple[Mapping[str, Any], ...] = ()
    ills: tuple[Mapping[str, Any], ...] = ()
    faults: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    sites: tuple[str, ...] = ()
    again: str = ""


def ill(how: str, site: str = "", at: int = STEP, **more: Any) -> dict[str, Any]:
    return {"how": how, "site": site, "at": at, **more}


def _net(*traits: str, **more: object) -> tuple[str, ...]:
    words = ("model._target_=scripts.swarm.guests.Net", f"model.traits=[{','.join(traits)}]")
    own = ("data._target_=scripts.swarm.guests.Ids", "data.seq_len=16", "optim.lr=1e-2")
    return (*words, *own, *(f"model.{name}={value}" for name, value in more.items()))


def _units(factor: float) -> tuple[str, ...]:
    """Losses so many times as large, with the limits scaled as docs/guard.md asks."""
    limits = {"loss_floor": 0.4, "drift_nats": 4.0}
    return (
        *_net(units=factor),
        *(f"guard.{name}={value * factor:g}" for name, value in limits.items()),
    )


def _guest(name: str, *more: str) -> tuple[str, ...]:
    return (f"model._target_=tests.guests.{name}", *more)


BF16 = ("compute.precision=bf16",)
HALF = (ill("half only", "norm", at=0),)
COUPLED = (ill("coupled", "norm", at=0),)
LEVELS = (
    "data.sources=[{name: code, weight: 1, arguments: {level: 0.0, salt: 0}},"
    "{name: talk, weight: 2, arguments: {level: 0.3, salt: 1}},"
    "{name: web, weight: 1, arguments: {level: 1.0, salt: 2}}]",
)


class _Draw:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def samples(self, count: int) -> tuple[int, ...]:
        """Stream positions about the 33rd step, apart from each other."""
        first = STEP * BATCH - BATCH + self.dice.randrange(0, 64)
        return tuple(sorted(self.dice.sample(range(first, first + 24), count)))

    def bad(self, kind: str, count: int = 1, scale: int = 0) -> dict[str, Any]:
        """Arguments of an incident of bad samples."""
        scale = scale or self.dice.choice((80, 300, 2000))
        positions = self.samples(count)
        end = f",scale={scale}" if kind == "spike" else ""
        faults = tuple(f"{kind}@samples={p}{end}" for p in positions)
        return {"causes": (DATA,), "faults": faults, "positions": positions, "again": DATA}

    def rank(self, world_size: int = 2) -> int:
        return self.dice.randrange(world_size)

    def sick(self, how: str, site: str, *, causes: tuple[str, ...] = (STICKY,), **more: Any) -> Any:
        """Arguments of an incident on one rank; ``world_size`` and ``ranks`` may be given."""
        world_size = more.pop("world_size", 2)
        ranks = more.pop("ranks", (self.rank(world_size),))
        at = more.pop("at", STEP + self.dice.randrange(6))
        ills = (ill(how, site, at=at, ranks=list(ranks), **more),)
        return {"causes": causes, "world_size": world_size, "ills": ills, "ranks": ranks}

    def once(self, how: str, site: str, **more: Any) -> Any:
        return self.sick(how, site, causes=(TRANSIENT,), times=1, **more)


def drawn(seed: int) -> Iterator[Incident]:
    """All incidents of a seed."""
    draw = _Draw(seed)
    for group, rows in (
        ("an operation for half precisions only", _half(draw)),
        ("statistics of a micro-batch", _coupled(draw)),
        ("losses in other units", _in_units(draw)),
        ("wrong state in a checkpoint, and stale copies", _states(draw)),
        ("an intermittent device", _at_times(draw)),
        ("a device fault that depends on the data", _on_some(draw)),
        ("a mixture of sources with different levels", _mixed(draw)),
        ("two of four ranks", _two_of_four(draw)),
        ("BF16, accumulation, several engines", _engines(draw)),
        ("operations and rates", _operations(draw)),
    ):
        for row in rows:
            yield replace(row, group=group)


def _half(draw: _Draw) -> Iterator[Incident]:
    half = partial(Incident, lasting=HALF)
    yield half(name="half only, one NaN", settings=("explain=quick",), **draw.bad("poison"))
    yield half(name="half only, one loud, BF16", settings=BF16, **draw.bad("spike"))
    yield half(name="half only, two of an accumulated step", settings=("batch.micro_size=4",),
               **draw.bad("poison", 2))  # fmt: skip
    yield half(name="half only, moved once", **draw.once("moved", "norm"))
    yield half(name="half only, gradient infinite once, ddp", settings=("parallel=ddp",),
               **draw.once("gradient infinite", "embedding"))  # fmt: skip
    yield half(name="half only, a sick rank, zero2", settings=("parallel=zero2",),
               **draw.sick("moved", "embedding"))  # fmt: skip
    yield half(name="half only, an infinite weight", causes=(STATE,), ranks=(0,),
               ills=(ill("an infinite weight", ranks=[0], times=1),))  # fmt: skip


def _coupled(draw: _Draw) -> Iterator[Incident]:
    coupled = partial(Incident, lasting=COUPLED)
    norm, more = _net("batchnorm"), ("batch.micro_size=8",)
    yield coupled(name="coupled, one NaN", **draw.bad("poison"))
    yield coupled(name="coupled, one loud", **draw.bad("spike"))
    yield coupled(name="coupled, two NaN, small micro-batches", settings=more,
                  **draw.bad("poison", 2))  # fmt: skip
    yield Incident(name="BatchNorm, one NaN", settings=norm, **draw.bad("poison"))
    yield Incident(name="BatchNorm, one loud, accumulated", settings=(*norm, *more),
                   **draw.bad("spike"))  # fmt: skip
    yield Incident(name="BatchNorm, a sick rank", settings=norm,
                   **draw.sick("mixed up", "layers.1"))  # fmt: skip
    yield Incident(name="BatchNorm, lost once, ddp", settings=(*norm, "parallel=ddp"),
                   **draw.once("lost", "layers.0"))  # fmt: skip
    yield coupled(name="coupled, gradient far once, BF16", settings=BF16,
                  **draw.once("gradient far", "embedding"))  # fmt: skip


def _in_units(draw: _Draw) -> Iterator[Incident]:
    for factor in (30.0, 100.0, 1000.0):
        yield Incident(name=f"x {factor:g}, one loud", settings=_units(factor),
                       **draw.bad("spike"))  # fmt: skip
    yield Incident(name="x 0.01, two loud", settings=_units(0.01), **draw.bad("spike", 2, 2000))
    yield Incident(name="x 300, moved once", settings=_units(300.0),
                   **draw.once("moved", "kept"))  # fmt: skip
    yield Incident(name="x 50, a sick rank", settings=_units(50.0),
                   **draw.sick("turned", "layers.1"))  # fmt: skip
    yield Incident(name="x 1000, first moments", settings=_units(1000.0), causes=(STATE,),
                   ills=(ill("first moments x 3e4", times=1),))  # fmt: skip


def _states(draw: _Draw) -> Iterator[Incident]:
    """At 30, in the checkpoint, or at 33, in memory."""
    at = partial(ill, site="", times=1, saved=True)
    state = partial(Incident, causes=(STATE,))
    ddp = ("parallel=ddp",)
    yield state(name="second moments saved wrong", ills=(at("second moments x 1e-7", at=30),))
    yield state(name="second moments saved wrong, ddp", settings=ddp,
                ills=(at("second moments x 1e-7", at=30),))  # fmt: skip
    yield state(name="first moments saved wrong", ills=(at("first moments x 3e4", at=30),))
    yield state(name="first moments turned, BF16", settings=BF16,
                ills=(ill("first moments turned", times=1),))  # fmt: skip
    yield state(name="first moments far, ddp", settings=ddp,
                ills=(ill("first moments x 3e4", times=1),))  # fmt: skip
    rank = draw.rank()
    mine = {"ranks": [rank], "times": 1}
    yield state(name="a stale copy, ddp", settings=(*ddp, "guard.loss_floor=0.1"), ranks=(rank,),
                ills=(ill("as at first", **mine),))  # fmt: skip
    yield state(name="a copy x 6, ddp", settings=ddp, ranks=(rank,),
                ills=(ill("parameters x 6", **mine),))  # fmt: skip
    yield state(name="a column of a copy, ddp", settings=ddp, ranks=(rank,),
                ills=(ill("a column far", **mine),))  # fmt: skip
    yield state(name="a column of a shard", ills=(ill("a column far", **mine),), ranks=(rank,))


def _at_times(draw: _Draw) -> Iterator[Incident]:
    both = {"causes": (STICKY, TRANSIENT)}
    for chance, how, site, words in (
        (0.2, "moved", "norm", ()),
        (0.4, "gradient far", "embedding", ("parallel=ddp",)),
        (0.6, "far", "embedding", ("parallel=zero2",)),
        (0.8, "stuck", "norm", ()),
        (0.3, "gradient turned", "norm", BF16),
        (0.5, "gradient far", "weight", ("parallel=ddp",)),
        (0.3, "gradient far", "weight", ()),
    ):
        name = f"{how} at {site}, {chance:.0%} of the time {' '.join(words)}".strip()
        yield Incident(name=name, settings=("guard.persist=30", *words),
                       **draw.sick(how, site, chance=chance, **both))  # fmt: skip


def _on_some(draw: _Draw) -> Iterator[Incident]:
    for rows, how, site, words in (
        ("sum%5", "lost", "norm", ()),
        ("sum%9", "gradient far", "embedding", ()),
        ("last<3", "far", "norm", ("parallel=ddp",)),
        ("first", "mixed up", "norm", ("batch.micro_size=4",)),
        ("sum%7", "turned", "norm", ("parallel=zero2",)),
        ("sum%4", "lost", "embedding", (*BF16, "explain=quick")),
        ("sum%6", "gradient infinite", "norm", ()),
    ):
        name = f"{how} at {site} where {rows} {' '.join(words)}".strip()
        yield Incident(name=name, settings=words, **draw.sick(how, site, rows=rows))


def _mixed(draw: _Draw) -> Iterator[Incident]:
    levels = (*_net(), *LEVELS)
    yield Incident(name="levels, one NaN", settings=levels, **draw.bad("poison"))
    yield Incident(name="levels, one loud", settings=levels, **draw.bad("spike"))
    yield Incident(name="levels, three loud, ddp", settings=(*levels, "parallel=ddp"),
                   **draw.bad("spike", 3))  # fmt: skip
    yield Incident(name="levels, a sick rank", settings=levels, **draw.sick("turned", "layers.1"))
    yield Incident(name="levels, far once", settings=levels, **draw.once("far", "kept"))
    yield Incident(name="levels, moments", settings=levels, causes=(STATE,),
                   ills=(ill("first moments x 3e4", times=1),))  # fmt: skip


def _two_of_four(draw: _Draw) -> Iterator[Incident]:
    for how, site, words in (
        ("moved", "norm", ()),
        ("gradient far", "embedding", ("parallel=ddp",)),
        ("lost", "norm", ("parallel=zero2",)),
        ("gradient far", "weight", ()),
        ("mixed up", "norm", BF16),
    ):
        ranks = tuple(sorted(draw.dice.sample(range(4), 2)))
        yield Incident(name=f"{how} at {site} {' '.join(words)}".strip(), settings=words,
                       **draw.sick(how, site, world_size=4, ranks=ranks))  # fmt: skip


def _engines(draw: _Draw) -> Iterator[Incident]:
    hsdp = ("parallel=hsdp", "parallel.shard_size=1")
    yield Incident(name="one NaN, hsdp", settings=hsdp, **draw.bad("poison"))
    yield Incident(name="two loud, zero1", settings=("parallel=zero1",), **draw.bad("spike", 2))
    yield Incident(name="one NaN, zero3", settings=("parallel=zero3",), **draw.bad("poison"))
    yield Incident(name="stuck, hsdp", settings=hsdp, **draw.sick("stuck", "norm"))
    yield Incident(name="gradient far, zero1", settings=("parallel=zero1",),
                   **draw.sick("gradient far", "embedding"))  # fmt: skip
    yield Incident(name="lost once, zero3", settings=("parallel=zero3",),
                   **draw.once("lost", "blocks.0.ffn"))  # fmt: skip
    yield Incident(name="the sum once", causes=(TRANSIENT,), ills=(ill("sum", times=1),))
    yield Incident(name="the sum once on one of two copies, ddp, BF16", causes=(TRANSIENT,),
                   settings=(*BF16, "parallel=ddp"), ills=(ill("sum", times=1),))  # fmt: skip
    few = ("batch.micro_size=4",)
    yield Incident(name="accumulated, turned once", settings=few, **draw.once("turned", "norm"))
    yield Incident(name="accumulated, four loud", settings=(*few, *BF16), **draw.bad("spike", 4))
    yield Incident(name="accumulated, a sick rank", settings=few,
                   **draw.sick("gradient turned", "embedding"))  # fmt: skip
    for world_size in (2, 3):
        rank = draw.rank(world_size)
        misread = f"misread@step={STEP},rank={rank}"
        size = ("batch.global_size=24",) if world_size == 3 else ()
        yield Incident(name=f"misread, {world_size} ranks", causes=(MISREAD,), ranks=(rank,),
                       world_size=world_size, settings=size, faults=(misread,))  # fmt: skip


def _operations(draw: _Draw) -> Iterator[Incident]:
    for how, site, words in (
        ("fp16 sum", "blocks.0.ffn", ()),
        ("one pass variance", "norm", ("parallel=ddp",)),
        ("softmax unshifted", "blocks.0.attention", ()),
        ("fp16 sum", "embedding", (*BF16, "parallel=hsdp", "parallel.shard_size=1")),
        ("fp16 sum", "norm", ("batch.micro_size=4",)),
    ):
        yield Incident(name=f"{how} in {site} {' '.join(words)}".strip(), causes=(NUMERICS,),
                       settings=words, ills=(ill(how, site),), sites=(site,),
                       again=NUMERICS)  # fmt: skip
    for factor, words in ((300, ()), (100, BF16), (1000, ("parallel=ddp",))):
        rate = ("schedule._target_=tests.unseen_kinds.jump", f"schedule.factor={factor}")
        yield Incident(name=f"a rate x {factor} {' '.join(words)}".strip(), causes=(RATE,),
                       settings=(*rate, *words), again=RATE)  # fmt: skip


def jump(updates: int, factor: float) -> float:
    """A rate that jumps at the step of the incident."""
    return min(1.0, (updates + 1) / 5) * (factor if updates >= STEP - 1 else 1.0) * 3e-3


def healthy(seed: int) -> Iterator[Incident]:
    """Undisturbed runs of different networks, engines and data."""
    calm = partial(Incident, group="healthy", causes=(HEALTHY,))
    image = "data._target_=tests.guests.Images"
    tokens = ("data=synthetic",)
    rows: tuple[tuple[str, ...], ...] = (
        ("parallel=fsdp",), ("parallel=ddp",), ("parallel=zero1",), ("parallel=zero2",),
        ("parallel=zero3",), ("parallel=hsdp", "parallel.shard_size=1"), BF16,
        ("model.dropout=0.1", "batch.micro_size=4"), ("optim=muon",), ("optim=lion",),
        _net("batchnorm", "dropout"), (*_net("tied"), *LEVELS), _units(100.0), _units(0.01),
        (*_net(), "data.augmented=true"), (*_net(), "data.short=true", "data.pack=true"),
        _guest("Residual", image), _guest("Recurrent", *tokens), _guest("Convolved", *tokens),
        _guest("llama", *tokens), _guest("gpt2", *tokens, "model.dropout=0.1"),
        _guest("Preferring", "model.vocab_size=16", "data._target_=tests.guests.Pairs"),
    )  # fmt: skip
    for words in rows:
        yield calm(name=" ".join(words), settings=("steps=80", f"seed={seed}", *words))
