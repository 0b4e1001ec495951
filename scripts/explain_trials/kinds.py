"""The kinds of incidents, drawn anew for each round: ranks, samples, modules, sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from scripts.explain_trials.outcome import HEALTHY, Trial

TRANSIENT, STICKY, MISREAD = "hardware, transient", "hardware, sticky", "read wrongly once"
DATA, NUMERICS, STATE, RATE = "data", "numerics", "state corrupted", "rate"
_LATER = 40  # batches: how far a change of the data lasts


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What trials are drawn from.

    Args:
        step: the one that comes next.
        batch: its stream positions; ``shares``: of each rank.
        modules: that may overflow.
        rise: nats per token by which the loss may rise before the gate is closed.
        loss: what is usual, nats per token.
        has_images: the samples are a guest's pictures.
        is_learnt: losses are nearly nothing: four times that is nothing as well.
        is_decoder: the model is the runner's own.
        is_bf16: what it computes in.
    """

    world_size: int
    step: int
    batch: Sequence[int]
    shares: Sequence[Sequence[int]]
    modules: Sequence[str]
    rise: float
    loss: float
    has_images: bool
    is_learnt: bool
    is_decoder: bool
    is_bf16: bool


def draw(scene: Scene, dice: random.Random) -> Iterator[Trial]:
    """One of each kind."""
    yield from _devices(scene, dice)
    yield from _samples(scene, dice)
    if scene.has_images:
        yield from _pictures(scene, dice)
    yield from _weights(scene, dice)
    yield from _healthy(scene, dice)


def _devices(scene: Scene, dice: random.Random) -> Iterator[Trial]:
    rank = dice.randrange(scene.world_size)
    at, ranks = f"step={scene.step},rank={rank}", (rank,)
    once = partial(Trial, causes=(TRANSIENT,), ranks=ranks)
    for kind in ("nan_loss", "nan_grad", "flip_grad"):
        yield once(kind=kind, tuned=True, faults=(f"{kind}@{at}",))
    yield once(kind="activations x 1e6 once", tampering=("activations x 1e6 once",))
    yield once(kind="gradients x 1e8 once", tampering=("gradients x 1e8 once",))
    yield Trial(
        kind="misread", tuned=True, causes=(MISREAD,), ranks=ranks, faults=(f"misread@{at}",)
    )
    lasting = partial(Trial, causes=(STICKY,), ranks=ranks)
    yield lasting(kind="all of a rank is NaN", tuned=True, faults=(f"sticky@{at}",))
    yield lasting(kind="a rank's activations x 1e3", tampering=("activations x 1e3",))
    yield lasting(kind="a rank's gradients x 1e6", tampering=("gradients x 1e6",))
    yield lasting(kind="a rank's first sequence is NaN", tampering=("first row NaN",))
    yield Trial(
        kind="a rank fails half of the time", causes=(STICKY, TRANSIENT), ranks=ranks,
        tampering=("now and then",),
    )  # fmt: skip
    yield lasting(kind="a rank fails on some samples", tampering=("some samples",))
    yield Trial(
        kind="a rank's gradients at times", causes=(STICKY, TRANSIENT), ranks=ranks,
        tampering=("gradients at times",),
    )  # fmt: skip


def _samples(scene: Scene, dice: random.Random) -> Iterator[Trial]:
    data = partial(Trial, causes=(DATA,))
    one, two, three = dice.sample(list(scene.batch), 3)
    pair = tuple(sorted((one, two)))
    poison = f"poison@samples={one}"
    yield data(kind="one NaN", tuned=True, group="single", positions=(one,), faults=(poison,))
    yield data(
        kind="one loud", tuned=True, group="single", positions=(two,),
        faults=(f"spike@samples={two},scale={dice.choice([60, 200, 1000])}",),
    )  # fmt: skip
    # Just enough to close the gate.
    least = 1 + 1.8 * scene.rise * len(scene.batch) / max(scene.loss, 0.1)
    yield data(
        kind="one just loud enough", group="single", positions=(three,),
        faults=(f"spike@samples={three},scale={least:.4g}",),
    )  # fmt: skip
    yield data(
        kind="one NaN, one loud", tuned=True, group="pair", positions=pair,
        faults=(poison, f"spike@samples={two},scale=300"),
    )  # fmt: skip
    half = 1 + (least - 1) / 2
    yield data(
        kind="two, each too little alone", group="pair", positions=pair,
        faults=tuple(f"spike@samples={p},scale={half:.4g}" for p in pair),
    )  # fmt: skip
    if not scene.is_learnt:
        many = tuple(sorted(dice.sample(list(scene.batch), 20)))
        yield data(
            kind="20 of 32, mildly", group="many", positions=many,
            faults=tuple(f"spike@samples={p},scale=4" for p in many),
        )  # fmt: skip
    share = tuple(sorted(dice.choice(list(scene.shares))))
    yield data(
        kind="all that one rank has", positions=share,
        faults=tuple(f"spike@samples={p},scale=60" for p in share),
    )  # fmt: skip


def _pictures(scene: Scene, dice: random.Random) -> Iterator[Trial]:
    data = partial(Trial, causes=(DATA,))
    one, two = dice.sample(list(scene.batch), 2)
    yield data(kind="a picture of NaN", group="single", positions=(one,), tampering=("pixels NaN",))
    yield data(
        kind="a picture x 1e4", group="single", positions=(two,), tampering=("pixels x 1e4",)
    )
    pair = tuple(sorted((one, two)))
    yield data(kind="two pictures of NaN", group="pair", positions=pair, tampering=("pixels NaN",))
    many = tuple(sorted(dice.sample(list(scene.batch), len(scene.batch) // 2)))
    yield data(kind="half of the pictures misnamed", positions=many, tampering=("misnamed",))
    yield Trial(
        kind="pictures x 3", causes=(HEALTHY,), positions=tuple(scene.batch),
        tampering=("pixels x 3",),
    )  # fmt: skip
    later = tuple(range(scene.batch[0], scene.batch[0] + _LATER * len(scene.batch)))
    yield Trial(
        kind="pictures x 3 from now on", causes=(HEALTHY,), positions=later,
        tampering=("pixels x 3",),
    )  # fmt: skip


def _weights(scene: Scene, dice: random.Random) -> Iterator[Trial]:
    at = f"step={scene.step},rank={dice.randrange(scene.world_size)}"
    numerics = partial(Trial, causes=(NUMERICS,))
    modules = [dice.choice(list(scene.modules)) for _ in range(3)]
    yield numerics(kind="overflow", tuned=True, modules=tuple(modules[:1]), tampering=("overflow",))
    yield numerics(kind="x 1e4 in the run's precision", modules=(modules[1],), tampering=("x 1e4",))
    yield numerics(kind="an operation in FP16", modules=(modules[2],), tampering=("FP16 inside",))
    if not scene.is_bf16:  # FP32, the wider precision there, has no larger numbers
        yield numerics(
            kind="the logarithm of e**x", modules=(modules[0],), tampering=("log of exp",)
        )
    state = partial(Trial, causes=(STATE,), step=scene.step)
    yield state(kind="a weight's bit", tuned=True, faults=(f"spoil_state@{at}",))
    if scene.is_decoder:
        yield state(kind="a matrix x 50", tuned=True, tampering=("a matrix x 50",))
    yield state(kind="a weight NaN", tampering=("a weight NaN",))
    yield state(kind="a shard x 100", tampering=("a shard x 100",))
    yield state(kind="second moments x 1e-6", tampering=("second moments x 1e-6",))
    yield state(kind="first moments x 1e5", tampering=("first moments x 1e5",))
    high = dice.choice([100.0, 300.0, 1000.0])
    yield Trial(kind="rate too high", tuned=True, causes=(RATE,), rate=high)
    yield Trial(kind="rate too high by less", causes=(RATE,), rate=dice.choice([20.0, 40.0]))
    yield Trial(kind="rate grows by half a step", causes=(RATE,), growth=1.5)


def _healthy(scene: Scene, dice: random.Random) -> Iterator[Trial]:
    healthy = partial(Trial, causes=(HEALTHY,))
    first, last = scene.batch[0], scene.batch[-1]
    hard = dice.choice([1.7, 2.0, 2.5])
    yield healthy(
        kind="hard batch", tuned=True, faults=(f"spike@samples={first}-{last},scale={hard}",)
    )
    half = sorted(dice.sample(list(scene.batch), len(scene.batch) // 2))
    yield healthy(
        kind="half of a batch hard", positions=tuple(half),
        faults=tuple(f"spike@samples={p},scale={2 * hard:.3g}" for p in half),
    )  # fmt: skip
    shift = dice.choice([1.6, 2.0])
    yield healthy(
        kind="level shift", tuned=True,
        faults=(f"spike@samples={first}-99999999,scale={shift}",),
    )  # fmt: skip
    mixed = [p for p in range(first, first + _LATER * len(scene.batch)) if dice.random() < 0.5]
    yield healthy(
        kind="half of the samples harder from now on", positions=tuple(mixed),
        faults=tuple(f"spike@samples={p},scale=3" for p in mixed),
    )  # fmt: skip
