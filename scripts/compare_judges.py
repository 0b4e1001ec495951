"""Compares our judge with published rules, on real curves with planted faults and synthetic ones.

    python scripts/compare_judges.py                          # generated curves alone
    python scripts/compare_judges.py --curves ../shared/curves --half held-out
    python scripts/compare_judges.py --curves ../shared/curves --folds

Each published rule is implemented from its description, without using its code. A rule's answer to
a step counts as *discard* (it would leave the update out, or clip it) or as *rollback* (it would
stop the run or send it back).

Truth: healthy curves have none, so every answer there is false. Into stretches of them known
trouble is planted: jumps of several heights over three steps, slow rises, one hard batch, a lasting
change of level, NaN, and a gradient norm that grows for four steps before the loss does (after
BLOOM-176B). A rise on a curve that falls as fast is invisible, and is scored separately. Real
curves are split by the name of their run, in halves, or with ``--folds`` by the data they were
trained on: each fold is scored with the settings that a small grid prefers on all the others, so
a fold's own curves do not influence its settings.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import random
import re
import statistics
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from runner.config.compose import compose
from runner.config.rules import judge_rules, remedy_rules, save_rules
from runner.policy.decision.replay import Curve, Replay
from runner.tools.backtest.read import read_curve

APPLY, DISCARD, ROLLBACK = 0, 1, 2


class Judge(Protocol):
    """Answers one step at a time, in order."""

    def __call__(self, loss: float, norm: float) -> int: ...


class MeanAndSigma:
    """OLMo-core's skip-step optimizer: loss or norm above mean + 6 sigma of the last 128.

    Every value enters the window, outliers and NaN too; it judges once the window is half full.
    """

    def __init__(self, size: int = 128, sigmas: float = 6.0) -> None:
        self._windows = [Moments(size), Moments(size)]
        self._size, self._sigmas = size, sigmas

    def __call__(self, loss: float, norm: float) -> int:
        ok = True
        for window, value in zip(self._windows, (loss, norm), strict=True):
            if len(window) >= self._size // 2:
                mean, sigma = window.moments()
                ok = ok and value - mean <= self._sigmas * sigma
            window.push(value)
        return APPLY if ok else DISCARD


class Moments:
    """Mean and standard deviation of the last values; NaN while one of them is not finite."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._bad = 0

    def __len__(self) -> int:
        return len(self._values)

    def push(self, value: float) -> None:
        if len(self._values) == self._values.maxlen:
            self._bad -= not math.isfinite(self._values[0])
        self._values.append(value)
        self._bad += not math.isfinite(value)

    def moments(self) -> tuple[float, float]:
        if self._bad:
            return math.nan, math.nan
        count = len(self._values)
        mean = math.fsum(self._values) / count
        square = math.fsum((value - mean) ** 2 for value in self._values)
        return mean, math.sqrt(square / max(1, count - 1))


class RunningMeanWithPatience:
    """llm-foundry's loss-spike callback: above twice the mean of 100, five times in a row."""

    def __init__(self, size: int = 100, times: float = 2.0, patience: int = 4) -> None:
        self._window: deque[float] = deque(maxlen=size)
        self._times, self._patience, self._outliers = times, patience, 0

    def __call__(self, loss: float, norm: float) -> int:
        answer = APPLY
        if len(self._window) == self._window.maxlen:
            mean = sum(self._window) / len(self._window)
            self._outliers = self._outliers + 1 if loss > self._times * mean else 0
            if self._outliers > self._patience:
                answer, self._outliers = ROLLBACK, 0
        self._window.append(loss)
        return answer


class EarlyMaximum:
    """Megatron's re-run check: NaN, or ten times the largest of the first hundred losses."""

    def __init__(self, count: int = 100, times: float = 10.0) -> None:
        self._left, self._times, self._most = count, times, -math.inf

    def __call__(self, loss: float, norm: float) -> int:
        if not math.isfinite(loss):
            return DISCARD
        if self._left:
            self._left -= 1
            self._most = max(self._most, loss)
            return APPLY
        return DISCARD if loss > self._times * self._most else APPLY


class ZClip:
    """ZClip: a norm more than 2.5 sigmas above its moving average (0.97) is clipped to less."""

    def __init__(self, alpha: float = 0.97, threshold: float = 2.5, warmup: int = 25) -> None:
        self._alpha, self._threshold, self._warmup = alpha, threshold, warmup
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def __call__(self, loss: float, norm: float) -> int:
        if not math.isfinite(norm):
            return APPLY  # its statistics ignore NaN; the caller must handle it
        if len(self._first) < self._warmup:
            self._first.append(norm)
            self._mean = statistics.fmean(self._first)
            self._variance = statistics.pvariance(self._first)
            return APPLY
        sigma = math.sqrt(self._variance) + 1e-12
        z = (norm - self._mean) / sigma
        taken = norm
        if z > self._threshold:
            taken = self._mean + self._threshold**2 / z * sigma
        self._mean = self._alpha * self._mean + (1 - self._alpha) * taken
        self._variance = (
            self._alpha * self._variance + (1 - self._alpha) * (taken - self._mean) ** 2
        )
        return DISCARD if z > self._threshold else APPLY


class RatioToTheLastTen:
    """Lightning's spike detection: not finite, or off the mean of the last ten by twice it."""

    def __init__(self, size: int = 10, ratio: float = 2.0) -> None:
        self._window: deque[float] = deque(maxlen=size)
        self._ratio, self._last = ratio, math.inf

    def __call__(self, loss: float, norm: float) -> int:
        if not math.isfinite(loss):
            return DISCARD
        if self._window and loss > self._last:
            mean = sum(self._window) / len(self._window)
            if abs(loss - mean) >= abs(self._ratio * mean):
                return DISCARD
        self._window.append(loss)
        self._last = loss
        return APPLY


RULES: dict[str, Callable[[], Judge]] = {
    "mean + 6 sigma of 128 (OLMo-core)": MeanAndSigma,
    "2 x mean of 100, patience 4 (llm-foundry)": RunningMeanWithPatience,
    "10 x early maximum (Megatron)": EarlyMaximum,
    "z-score of the norm (ZClip)": ZClip,
    "ratio to the last ten (Lightning)": RatioToTheLastTen,
}

Answers = list[tuple[int, int]]  # (row, DISCARD or ROLLBACK)


def answers_of(make: Callable[[], Judge], curve: Curve) -> Answers:
    """A published rule's answers, without rows that it applies."""
    judge = make()
    answers = (judge(*row) for row in zip(curve.losses, curve.grad_norms, strict=True))
    return [(row, answer) for row, answer in enumerate(answers) if answer != APPLY]


def ours(overrides: Sequence[str]) -> Callable[[Curve], Answers]:
    """Our decisions; a halt or a new baseline counts as a rollback."""
    config = compose(overrides)
    judge, saves = judge_rules(config), save_rules(config)
    remedy = replace(remedy_rules(config), batch=1)

    def answers(curve: Curve) -> Answers:
        replay = Replay(curve, judge=judge, remedy=remedy, saves=saves)
        replay.run()
        return [(d.row, DISCARD if d.action == "discard" else ROLLBACK) for d in replay.decisions]

    return answers


# --- curves ---


@dataclass(frozen=True)
class Named:
    """A healthy curve and its source; faults are planted from ``first`` on."""

    name: str
    curve: Curve
    first: int = 60


def real_curves(folder: Path, half: str) -> list[Named]:
    """The healthy recordings below ``folder``: those not in a folder named spike or bloom."""
    files = [f for f in sorted(folder.rglob("*.csv")) if not {"spike", "bloom"} & set(f.parts)]
    chosen = [file for file in files if half in ("all", half_of(file.stem))]
    return [Named(file.stem, read_curve(str(file)).curve) for file in chosen]


def half_of(name: str) -> str:
    """The half of a run, by its name, so that no run is in both."""
    return ("tuning", "held-out")[hashlib.sha256(name.encode()).digest()[0] % 2]


def made_up_curves(count: int, rows: int, seed: int) -> Iterator[Named]:
    """Language-model-like curves: a power law after a warm-up, in noise of several kinds.

    Noise from that of a large batch to that of a small one, normal or heavy tailed (Student's
    t, 4 degrees), a little correlated; one hard batch in 3,000 steps; norms log-normal with tails.
    """
    for number in range(count):
        generator = random.Random(f"{seed}-{number}")
        sigma = (0.02, 0.04, 0.06, 0.1)[number % 4]
        tails = number // 4 % 2 == 1
        end, scale, power = (
            generator.uniform(1.5, 3.2),
            generator.uniform(6, 8.5),
            generator.uniform(0.3, 0.8),
        )
        spread, pace, noise = generator.uniform(0.06, 0.25), generator.uniform(40, 200), 0.0
        losses, norms = [], []
        for step in range(rows):
            noise = 0.2 * noise + student(generator, tails) * sigma
            hard = generator.uniform(0.1, 0.3) if generator.random() < 1 / 3000 else 0.0
            losses.append(end + scale * (1 + step / pace) ** -power + noise + hard)
            usual = 0.3 + 6 * math.exp(-step / 60)
            norms.append(usual * math.exp(spread * student(generator, True)))
        kind = "heavy tails" if tails else "normal"
        curve = Curve(steps=range(rows), losses=losses, grad_norms=norms)
        yield Named(f"made up {number}: sigma {sigma}, {kind}", curve)


def student(draw: random.Random, tails: bool) -> float:
    """Unit scale in the middle: normal, or Student's t with 4 degrees of freedom."""
    value = draw.gauss(0, 1)
    if not tails:
        return value
    return value / math.sqrt(draw.gammavariate(2, 2) / 4)


# --- planted trouble ---


@dataclass(frozen=True)
class Plant:
    """A planted fault: added to the loss in nats, and a factor of the norm."""

    name: str
    loss: tuple[float, ...]
    norm: tuple[float, ...] = ()
    found_by: int = 1  # rows after the onset within which it must be found
    is_trouble: bool = True


_LEVEL_ROWS = 16  # whose median is a level
_RISES_BY = 0.3  # nats; a smaller rise is invisible
RISE = tuple(0.3 / 200 * at for at in range(334))  # to 0.5 nats
BLOOM = (3.9, 9.9, 66.0, 600.0, 3970.0, 1460.0, 1570.0, 2690.0)
PLANTS = (
    Plant("jump 0.5", (0.5,) * 3),
    Plant("jump 0.75", (0.75,) * 3),
    Plant("jump 1", (1.0,) * 3),
    Plant("jump 3", (3.0,) * 3),
    Plant("rise 0.3/200", RISE, found_by=len(RISE) - 1),
    Plant("NaN", (math.nan,), found_by=0),
    Plant("norm first", (0.02, 0.4, 0.04, 0.15, 2.9, 1.3, 1.0, 0.6), BLOOM, found_by=3),
    Plant("new level", (0.6,) * 400),
    Plant("hard batch", (1.0,), is_trouble=False),
)


def key_of(plant: Plant, stretch: Curve, onset: int, *, is_early: bool) -> str:
    """The name under which a plant is scored, by its visible effect."""
    if plant.name == "jump 0.5" and is_early:
        return "jump 0.5 early"
    if plant.name == "rise 0.3/200":
        before = stretch.losses[max(0, onset - _LEVEL_ROWS) : onset]
        end = stretch.losses[onset : onset + len(plant.loss)][-_LEVEL_ROWS:]
        if statistics.median(end) - statistics.median(before) < _RISES_BY:
            return "rise on a fall"
    return plant.name


def planted(curve: Curve, row: int, plant: Plant, before: int, after: int) -> tuple[Curve, int]:
    """A stretch of the curve around ``row`` with the fault in it, and the fault's row there."""
    start, stop = max(0, row - before), min(len(curve.steps), row + len(plant.loss) + after)
    losses, norms = list(curve.losses[start:stop]), list(curve.grad_norms[start:stop])
    onset = row - start
    for at, extra in enumerate(plant.loss[: stop - row]):
        losses[onset + at] += extra
    for at, factor in enumerate(plant.norm[: stop - row]):
        norms[onset + at] *= factor
    if math.isnan(plant.loss[0]):
        norms[onset] = math.nan
    stretch = Curve(steps=range(stop - start), losses=losses, grad_norms=norms)
    return stretch, onset


# --- scores ---


@dataclass
class Score:
    """One judge's score on a set of curves; plants by name, early ones (below row 600) separate."""

    rows: int = 0
    discards: int = 0
    rollbacks: int = 0
    planted: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    settled: int = 0
    sent_back: int = 0
    delays: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def healthy(self, curve: Curve, answers: Answers) -> None:
        """Score a healthy curve: every answer is false."""
        self.rows += len(curve.steps)
        self.discards += sum(answer == DISCARD for _, answer in answers)
        self.rollbacks += sum(answer == ROLLBACK for _, answer in answers)

    def plant(self, key: str, plant: Plant, onset: int, answers: Answers, rows: int) -> None:
        """Score a stretch that is bad from ``onset`` on."""
        after = [(row - onset, answer) for row, answer in answers if row >= onset]
        self.planted[key] += 1
        if after and after[0][0] <= plant.found_by:
            self.found[key] += 1
            self.delays[key].append(after[0][0])
        if plant.name == "hard batch":
            self.sent_back += any(answer == ROLLBACK for _, answer in after)
        if plant.name == "new level":
            self.settled += not any(row + onset >= rows - 100 for row, _ in after)


def measure(
    curves: Sequence[Named],
    judges: dict[str, Callable[[Curve], Answers]],
    places: int,
    only: Sequence[str] = (),
) -> dict[str, Score]:
    """All judges over the same curves with the same plants, or some of these."""
    scores = {name: Score() for name in judges}
    for named in curves:
        for name, answers in judges.items():
            scores[name].healthy(named.curve, answers(named.curve))
        for plant, key, stretch, onset in plants_of(named, places):
            if only and key not in only:
                continue
            for name, answers in judges.items():
                stretch_answers = answers(stretch)
                scores[name].plant(key, plant, onset, stretch_answers, len(stretch.steps))
    return scores


def plants_of(named: Named, places: int) -> Iterator[tuple[Plant, str, Curve, int]]:
    """Every fault at some early and some late rows, reproducibly."""
    draw = random.Random(named.name)
    total = len(named.curve.steps)
    for plant in PLANTS:
        for place in range(places):
            is_early = place % 2 == 0
            # A rise needs a level to rise from: the first hundreds of steps fall faster.
            low = named.first if is_early and plant.name != "rise 0.3/200" else min(600, total // 2)
            high = min(600, total // 2) if low == named.first else total - len(plant.loss) - 10
            if high > low:
                row = draw.randrange(low, high)
                stretch, onset = planted(named.curve, row, plant, 600, 120)
                key = key_of(plant, stretch, onset, is_early=low == named.first)
                yield plant, key, stretch, onset


# --- settings chosen without the curves they are scored on ---

GRID: dict[str, tuple[float, ...]] = {
    "guard.loss_sigmas": (15.0, 10.0),
    "guard.pair_floor": (0.25, 0.2),
    "guard.drift_slack": (0.12, 0.2),
}
SOUGHT = ("jump 0.5 early", "jump 0.5", "rise 0.3/200")


def fold_of(name: str) -> str:
    """The data set, which is the first word after the number of the study; else the name."""
    match = re.search(r"study_\d+__([a-z]+)", name)
    return match[1] if match else name


def together(scores: Sequence[Score]) -> Score:
    """The sum of several scores."""
    total = Score()
    for score in scores:
        total.rows += score.rows
        total.discards += score.discards
        total.rollbacks += score.rollbacks
        total.planted += score.planted
        total.found += score.found
    return total


def worth(score: Score) -> tuple[bool, bool, float]:
    """The aims first (no false rollback, 100 false discards in a million), then what is found."""
    recall = statistics.fmean(score.found[key] / max(1, score.planted[key]) for key in SOUGHT)
    return score.rollbacks == 0, score.discards <= 1e-4 * score.rows, recall


def fold_table(curves: Sequence[Named], places: int) -> str:
    """Markdown: each fold with the settings that the other folds prefer."""
    settings = [
        tuple(f"{key}={value:g}" for key, value in zip(GRID, values, strict=True))
        for values in itertools.product(*GRID.values())
    ]
    folds: dict[str, list[Named]] = defaultdict(list)
    for named in curves:
        folds[fold_of(named.name)].append(named)
    scores = {
        (name, chosen): measure(held_out, {"ours": ours(chosen)}, places, SOUGHT)["ours"]
        for name, held_out in folds.items()
        for chosen in settings
    }
    lines = [
        "| fold | rows | chosen on the others | "
        + " | ".join(SOUGHT)
        + " | discards | rollbacks |",
        "|---" * (5 + len(SOUGHT)) + "|",
    ]
    for name in folds:
        others = [other for other in folds if other != name]
        # The first of equals: the grid begins with the defaults.
        best = max(settings, key=lambda s: worth(together([scores[o, s] for o in others])))
        score = scores[name, best]
        shares = [f"{score.found[key]} of {score.planted[key]}" for key in SOUGHT]
        counts = [str(score.discards), str(score.rollbacks)]
        lines.append(
            f"| {' | '.join([name, f'{score.rows:,}', ', '.join(best), *shares, *counts])} |"
        )
    return "\n".join(lines)


# --- the table ---

COLUMNS = (
    "jump 0.5 early", "jump 0.5", "jump 0.75", "jump 1", "jump 3", "rise 0.3/200",
    "rise on a fall", "NaN", "norm first", "new level",
)  # fmt: skip


def table(title: str, scores: dict[str, Score]) -> str:
    """Markdown: the share found in time, and false answers on healthy steps."""
    one = next(iter(scores.values()))
    head = [*COLUMNS, "settles", "hard batch sent back", "false discards", "false rollbacks"]
    lines = [
        f"**{title}**: {one.rows:,} healthy steps; planted: "
        + ", ".join(f"{one.planted[key]} {key}" for key in (*COLUMNS, "hard batch")),
        "",
        "| judge | " + " | ".join(head) + " |",
        "|---" * (len(head) + 1) + "|",
    ]
    for name, score in scores.items():
        cells = [share(score.found[key], score.planted[key]) for key in COLUMNS]
        cells += [share(score.settled, score.planted["new level"])]
        cells += [share(score.sent_back, score.planted["hard batch"])]
        cells += [per_million(score.discards, score.rows), per_million(score.rollbacks, score.rows)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Median steps from onset to the first answer (rise): " + rise_delays(scores)]
    return "\n".join(lines)


def share(part: int, whole: int) -> str:
    return "-" if not whole else f"{100 * part / whole:.3g} %"


def per_million(count: int, rows: int) -> str:
    return f"{1e6 * count / rows:,.0f}" if count else "0"


def rise_delays(scores: dict[str, Score]) -> str:
    delays = {name: score.delays["rise 0.3/200"] for name, score in scores.items()}
    return "; ".join(f"{n}: {statistics.median(d):.0f}" for n, d in delays.items() if d) or "none"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--curves",
        default=os.environ.get("HOLDFAST_CURVES"),
        help="a folder of healthy recorded curves (CSV); without one only made-up curves",
    )
    parser.add_argument("--half", choices=["tuning", "held-out", "all"], default="held-out")
    parser.add_argument("--places", type=int, default=6, help="plants of a kind per curve")
    parser.add_argument("--made-up", type=int, default=16, help="how many curves to make up")
    parser.add_argument("--rows", type=int, default=10_000, help="length of a made-up curve")
    parser.add_argument("--seed", type=int, default=2, help="of the made-up curves")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument(
        "--folds", action="store_true", help="our judge, tuned on all data sets but one at a time"
    )
    parser.add_argument("overrides", nargs="*", help="guard.key=value for our judge")
    options = parser.parse_args(arguments)
    if options.folds:
        if not options.curves:
            parser.error("--folds: needs --curves DIR")
        print(fold_table(real_curves(Path(options.curves), "all"), options.places))
        return 0
    judges: dict[str, Callable[[Curve], Answers]] = {"ours": ours(options.overrides)}
    if not options.ours_only:
        judges |= {name: partial(answers_of, make) for name, make in RULES.items()}
    if options.curves:
        curves = real_curves(Path(options.curves), options.half)
        print(
            table(
                f"Real curves, {options.half} runs ({len(curves)})",
                measure(curves, judges, options.places),
            ),
            end="\n\n",
        )
    made_up = list(made_up_curves(options.made_up, options.rows, options.seed))
    for kind in ("normal", "heavy tails") if made_up else ():
        curves = [named for named in made_up if named.name.endswith(kind)]
        print(
            table(
                f"Synthetic curves, {kind} noise ({len(curves)}, seed {options.seed})",
                measure(curves, judges, options.places),
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
