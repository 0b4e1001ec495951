"""Synthetic training curves: healthy ones of many kinds, and one for each signature.

The shape is a power law down to a floor, as of language models; the noise of a batch has heavy
tails and grows with the level. Nothing here knows the rules of runner/tools/reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runner.tools.reading.curve import Curve

Floats = NDArray[np.float64]


@dataclass
class Made:
    """Columns of a file; NaN for an empty cell, but a NaN in ``losses`` is a bad loss."""

    steps: Floats
    loss: Floats
    grad_norm: Floats
    further: dict[str, Floats] = field(default_factory=dict)

    def curve(self) -> Curve:
        return Curve.of(self.steps, self.loss, self.grad_norm, self.further)

    def csv(self) -> str:
        """The curve as CSV, with column names that trackers use."""
        names = {"lr": "learning_rate", "eval_loss": "eval/loss", "epoch": "train/epoch"}
        columns = {"step": self.steps, "train/loss": self.loss, "grad_norm": self.grad_norm}
        columns |= {names.get(name, name): values for name, values in self.further.items()}
        lines = [",".join(columns)]
        empty = {name for name in columns if name != "train/loss"}
        for row in zip(*columns.values(), strict=True):
            cells = zip(columns, row, strict=True)
            lines.append(
                ",".join(
                    "" if name in empty and np.isnan(value) else f"{value:.8g}"
                    for name, value in cells
                )
            )
        return "\n".join(lines) + "\n"


def schedule(kind: str, rows: int, peak: float, warmup: float = 0.02, total: float = 1.0) -> Floats:
    """The rate by row; ``warmup`` and ``total`` are shares of the rows."""
    at = (np.arange(rows) + 1) / rows
    rise = np.minimum(1.0, at / warmup) if warmup else np.ones(rows)
    share = np.clip((at - warmup) / max(total - warmup, 1e-9), 0, 1)
    falls = {
        "constant": np.ones(rows),
        "cosine": 0.1 + 0.45 * (1 + np.cos(np.pi * share)),
        "linear": 1 - 0.97 * share,
        "wsd": np.where(share < 0.8, 1.0, 1 - 0.95 * (share - 0.8) / 0.2),
    }
    rates: Floats = peak * rise * falls[kind]
    return rates


def healthy(
    random: np.random.Generator,
    *,
    rows: int = 0,
    kind: str = "",
    start: float = 0.0,
    noise: float = 0.0,
    evaluations: int = 0,
    drop: float = 0.0,
) -> Made:
    """A healthy training; values that are not given are drawn."""
    rows = rows or int(random.choice([200, 400, 1000, 3000]))
    kind = kind or str(random.choice(["constant", "cosine", "linear", "wsd"]))
    start = start or float(np.log(random.choice([64, 256, 4096, 50304])))
    drop = drop or random.uniform(0.3, 0.65)
    rate = schedule(kind, rows, 10 ** random.uniform(-4, -2.5), random.choice([0.0, 0.02, 0.05]))
    time = np.cumsum(rate) / np.max(rate)
    scale = rows * random.uniform(0.01, 0.06)
    fall = 1 - (1 + time / scale) ** -random.uniform(0.5, 1.2)
    fall = fall / fall[-1] + 0.03 * (1 - rate / np.max(rate)) * (time > 5 * scale)
    trend = start * (1 - drop * fall)
    loss = trend + _noise(random, rows, noise or start * random.choice([0.003, 0.01, 0.03]))
    norm = random.uniform(0.2, 3) * (1 + 6 * np.exp(-time / scale)) * _bumpy(random, rows, 0.15)
    norm *= np.sqrt(np.max(rate) / np.maximum(rate, 0.05 * np.max(rate))) ** 0.5
    every = random.choice([1, 1, 10, 50])
    further = {"lr": rate}
    if evaluations:
        further["eval_loss"] = _evaluated(random, trend * random.uniform(1.0, 1.04), evaluations)
    return Made(np.arange(rows) * float(every), loss, norm, further)


def _noise(random: np.random.Generator, rows: int, size: float) -> Floats:
    raw = random.standard_t(6, rows)
    values: Floats = size * raw
    return values


def _bumpy(random: np.random.Generator, rows: int, size: float) -> Floats:
    values: Floats = np.exp(size * random.standard_normal(rows))
    return values


def _evaluated(random: np.random.Generator, trend: Floats, number: int) -> Floats:
    """The trend with little noise at this many rows; NaN elsewhere."""
    losses = np.full(len(trend), np.nan)
    at = np.linspace(len(trend) // number, len(trend) - 1, number).astype(int)
    losses[at] = trend[at] * (1 + 0.002 * random.standard_normal(number))
    return losses


# -- healthy kinds ---------------------------------------------------------------------------------


def _fine_tuned(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=400, start=random.uniform(1.0, 2.5), drop=0.25, evaluations=8)
    curve.further["epoch"] = np.arange(400) / 140.0
    return curve


def _small_unit(random: np.random.Generator) -> Made:
    return healthy(random, start=random.uniform(0.05, 0.4), noise=0.01)


def _single_outliers(random: np.random.Generator) -> Made:
    """Single hard batches a few deviations off, as in any corpus."""
    curve = healthy(random, rows=3000)
    sigma = np.median(np.abs(np.diff(curve.loss)))
    curve.loss[random.integers(200, 3000, 8)] += 4 * sigma
    return curve


def _mid_warmup(random: np.random.Generator) -> Made:
    """Stopped during the warm-up, but learning."""
    curve = healthy(random, rows=200, kind="constant", drop=0.45)
    curve.further["lr"] = np.linspace(1e-6, 1e-4, 200)
    return curve


def _several_sets(random: np.random.Generator) -> Made:
    """Of two held-out sets one is learned, and the other hardly gets any better."""
    curve = healthy(random, rows=1000, evaluations=int(random.integers(6, 20)))
    at = np.flatnonzero(np.isfinite(curve.further["eval_loss"]))
    learned = curve.further["eval_loss"][at]
    stays = np.full(len(at), learned[0]) * np.linspace(1, random.uniform(0.95, 1.01), len(at))
    return _with_sets(random, curve, at, {"learned": learned, "far": stays})


HEALTHY: dict[str, Callable[[np.random.Generator], Made]] = {
    "drawn": healthy,
    "with evaluations": lambda random: healthy(random, evaluations=int(random.integers(6, 20))),
    "noisy": lambda random: healthy(random, rows=400, noise=0.25),
    "fine-tuning": _fine_tuned,
    "small unit": _small_unit,
    "hard batches": _single_outliers,
    "in its warm-up": _mid_warmup,
    "several sets": _several_sets,
    "long": lambda random: healthy(random, rows=20000),
}


# -- signatures ------------------------------------------------------------------------------------


def _not_finite(random: np.random.Generator) -> Made:
    curve = healthy(random)
    at = int(len(curve.loss) * random.uniform(0.2, 0.95))
    until = len(curve.loss) if random.random() < 0.5 else at + 1
    curve.loss[at:until] = np.nan if random.random() < 0.7 else np.inf
    return curve


def _spike(random: np.random.Generator) -> Made:
    curve = healthy(random)
    rows = len(curve.loss)
    at, length = int(rows * random.uniform(0.25, 0.8)), int(random.integers(1, rows // 25))
    height = random.uniform(0.4, 1.5) * curve.loss[at]
    curve.loss[at : at + length] += height * np.exp(-3 * np.arange(length) / length)
    return curve


def _divergence(random: np.random.Generator) -> Made:
    curve = healthy(random)
    rows = len(curve.loss)
    at = int(rows * random.uniform(0.3, 0.7))
    lost = curve.loss[0] - curve.loss[at]
    if random.random() < 0.5:  # slowly
        rise = random.uniform(0.5, 1.0) * lost * np.linspace(0, 1, rows - at)
    else:  # at once, and back to knowing little
        rise = random.uniform(0.6, 1.0) * lost * np.minimum(1, np.arange(rows - at) / 10)
    curve.loss[at:] += rise
    curve.grad_norm[at:] *= 1 + 5 * rise / max(lost, 1e-9)
    return curve


def _level_shift(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=1000, noise=0.02)
    at = int(random.integers(500, 700))
    curve.loss[at:] += max(0.2 * (curve.loss[0] - curve.loss[at]), 0.17 * curve.loss[at])
    return curve


def _rate_too_high(random: np.random.Generator) -> Made:
    """The loss rises as the rate comes near its peak, and heals as the rate falls."""
    curve = healthy(random, rows=1000, kind="cosine", noise=0.05, start=float(np.log(4096)))
    share = np.arange(1000) / 1000
    hump = np.exp(-(((share - random.uniform(0.15, 0.3)) / random.uniform(0.06, 0.1)) ** 2))
    curve.loss += random.uniform(1.5, 2.5) * hump
    curve.further["lr"] = schedule("cosine", 1000, 0.03, warmup=0.1)
    return curve


def _rate_too_high_by_updates(random: np.random.Generator) -> Made:
    curve = _flat(random)
    curve.further["update_ratio"] = 0.05 * _bumpy(random, len(curve.loss), 0.2)
    return curve


def _flat(random: np.random.Generator) -> Made:
    """Learns almost nothing after the first rows."""
    curve = healthy(random, rows=500, drop=0.08, kind="constant", start=float(np.log(4096)))
    curve.further["lr"] = schedule("constant", 500, 1e-3)
    return curve


def _rate_too_low(random: np.random.Generator) -> Made:
    rows, start = 600, float(np.log(random.choice([256, 4096])))
    share = np.linspace(0, 1, rows)
    loss = start * (1 - random.uniform(0.04, 0.12) * share ** random.uniform(0.9, 1.1))
    loss += _noise(random, rows, 0.01 * start)
    norm = 2 * _bumpy(random, rows, 0.1)
    return Made(np.arange(rows) * 1.0, loss, norm, {"lr": schedule("constant", rows, 1e-6)})


def _rate_too_low_by_updates(random: np.random.Generator) -> Made:
    curve = _flat(random)
    curve.further["update_ratio"] = 1e-4 * _bumpy(random, len(curve.loss), 0.2)
    return curve


def _warmup_too_long(random: np.random.Generator) -> Made:
    curve = _rate_too_low(random)
    curve.further["lr"] = np.linspace(1e-7, 1e-4, len(curve.loss))
    return curve


def _vanishing(random: np.random.Generator) -> Made:
    curve = _flat(random)
    if random.random() < 0.5:
        curve.further["layer_ratio"] = 0.01 * _bumpy(random, len(curve.loss), 0.3)
    else:
        curve.grad_norm *= np.geomspace(1, 1e-4, len(curve.loss))
    return curve


def _degenerate(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=600)
    entropy = 4.2 + 0.05 * random.standard_normal(600)
    at = int(random.integers(100, 300))
    entropy[at : at + int(random.integers(60, 250))] *= random.uniform(0.1, 0.5)
    curve.further["entropy"] = entropy
    return curve


def _floor_early(random: np.random.Generator) -> Made:
    """A decay that ends at half of the run, and progress with it."""
    rows, end = 1000, random.uniform(0.4, 0.6)
    rate = schedule("linear", rows, 1e-3, 0.02, end)
    rate = np.maximum(rate, 1e-5)
    time = np.cumsum(rate) / np.max(rate)
    start = float(np.log(4096))
    loss = start - 0.5 * start * (time / time[-1]) ** 0.7 + _noise(random, rows, 0.03)
    norm = _bumpy(random, rows, 0.15)
    return Made(np.arange(rows) * 1.0, loss, norm, {"lr": rate})


def _norm_creep(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=1000, kind="constant", noise=0.05)
    curve.grad_norm = np.geomspace(0.3, random.uniform(3, 10), 1000) * _bumpy(random, 1000, 0.2)
    return curve


def _overfitting(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=1000, drop=0.6, evaluations=0)
    number = int(random.integers(8, 20))
    share = np.linspace(0, 1, number)
    best = random.uniform(0.25, 0.6)
    start, lowest = curve.loss[50], 0.75 * curve.loss[0]
    falls = lowest + (start - lowest) * np.exp(-6 * share)
    rises = random.uniform(0.1, 0.35) * lowest * np.clip((share - best) / (1 - best), 0, 1)
    at = np.linspace(60, 999, number).astype(int)
    held_out = np.full(1000, np.nan)
    held_out[at] = (falls + rises) * (1 + 0.004 * random.standard_normal(number))
    curve.further["eval_loss"] = held_out
    return curve


def _forgetting(random: np.random.Generator) -> Made:
    """One held-out set gets worse while another, and the mean of both, get better."""
    curve = healthy(random, rows=1000, drop=0.5, evaluations=0)
    number = int(random.integers(8, 20))
    at = np.linspace(60, 999, number).astype(int)
    share = np.linspace(0, 1, number)
    level = curve.loss[0]
    sets = {
        "new": level * (0.9 - random.uniform(0.35, 0.5) * share),
        "old": level * (0.5 + random.uniform(0.08, 0.2) * share),
    }
    return _with_sets(random, curve, at, sets)


def _with_sets(
    random: np.random.Generator, curve: Made, at: NDArray[np.int64], sets: dict[str, Floats]
) -> Made:
    """The held-out losses of several sets at these rows, with noise, and their mean."""
    for name, losses in {**sets, "": sum(sets.values()) / len(sets)}.items():
        column = np.full(len(curve.loss), np.nan)
        column[at] = losses * (1 + 0.004 * random.standard_normal(len(at)))
        curve.further[f"eval_loss/{name}".rstrip("/")] = column
    return curve


def _held_out_below(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=600, evaluations=10)
    curve.further["eval_loss"] /= random.choice([2, 4, 8])
    return curve


def _held_out_stalls(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=2000, noise=0.02, drop=0.55, start=float(np.log(4096)))
    share = np.linspace(0, 1, 2000)
    curve.loss = np.log(4096) * (1 - 0.35 * np.minimum(1, share / 0.2) - 0.35 * share)
    curve.loss += _noise(random, 2000, 0.03)
    held_out = np.full(2000, np.nan)
    at = np.linspace(100, 1999, 20).astype(int)
    held_out[at] = np.maximum(curve.loss[at], np.log(4096) * 0.55)
    held_out[at] *= 1 + 0.002 * random.standard_normal(20)
    curve.further["eval_loss"] = held_out
    return curve


def _memorised(random: np.random.Generator) -> Made:
    rows = 800
    loss = 2.5 * np.exp(-np.arange(rows) / 100) + 0.03 + 0.005 * np.abs(_noise(random, rows, 1))
    norm = np.exp(-np.arange(rows) / 300) * _bumpy(random, rows, 0.2)
    return Made(np.arange(rows) * 1.0, loss, norm, {"epoch": np.arange(rows) / 50.0})


def _epoch_steps(random: np.random.Generator) -> Made:
    per_epoch, epochs = int(random.integers(80, 200)), int(random.integers(3, 5))
    rows = per_epoch * epochs
    epoch = np.arange(rows) / per_epoch
    level = random.uniform(1.2, 2.0)
    loss = level * (1 - random.uniform(0.12, 0.25) * np.floor(epoch) - 0.03 * (epoch % 1))
    loss += _noise(random, rows, 0.03 * level)
    norm = _bumpy(random, rows, 0.15)
    return Made(np.arange(rows) * 1.0, loss, norm, {"epoch": epoch})


def _oscillation(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=1000, kind="constant", noise=0.1)
    number = int(random.integers(12, 30))
    at = np.linspace(50, 999, number).astype(int)
    held_out = np.full(1000, np.nan)
    level = 0.8 * curve.loss[0]
    held_out[at] = level * (1 + random.uniform(0.05, 0.1) * random.standard_normal(number))
    curve.further["eval_loss"] = held_out
    return curve


def _data_order(random: np.random.Generator) -> Made:
    curve = healthy(random, rows=3000, noise=0.03)
    period = random.uniform(80, 400)
    curve.loss += random.uniform(0.1, 0.2) * (2 * ((np.arange(3000) / period) % 1) - 1)
    return curve


# By signature; a name may come with what else is shown, after "/".
TROUBLED: dict[str, Callable[[np.random.Generator], Made]] = {
    "not_finite": _not_finite,
    "spike": _spike,
    "divergence": _divergence,
    "level_shift": _level_shift,
    "rate_too_high": _rate_too_high,
    "rate_too_high/by updates": _rate_too_high_by_updates,
    "rate_too_low": _rate_too_low,
    "rate_too_low/by updates": _rate_too_low_by_updates,
    "warmup_too_long": _warmup_too_long,
    "vanishing_gradients": _vanishing,
    "degenerate_batches": _degenerate,
    "plateau": _flat,
    "floor_early": _floor_early,
    "norm_creep": _norm_creep,
    "overfitting": _overfitting,
    "forgetting": _forgetting,
    "held_out_below_training": _held_out_below,
    "held_out_stalls": _held_out_stalls,
    "memorised": _memorised,
    "epoch_steps": _epoch_steps,
    "oscillation": _oscillation,
    "data_order": _data_order,
}
