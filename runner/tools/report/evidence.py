"""The evidence that a run wrote for explained steps: the repeated computations and the samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.run_dir.paths import RunDir
from runner.system.files import read_bounded
from runner.system.parsing import parse_json
from runner.tools.report.side_files import number

_JSON_BYTES = 4 << 20
_TEXT_BYTES = 1 << 20
_MOST_PROBES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One repetition of the step, with one variation.

    Attributes:
        name: the variation.
        loss: nats per token; None if not finite.
        grad_norm: before clipping; None if not finite.
        nonfinite_ranks: ranks that had NaN or Inf.
    """

    name: str
    loss: float | None
    grad_norm: float | None
    nonfinite_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvidence:
    """The evidence of one step: its probes, and the text of ``samples.txt``."""

    number: int
    probes: tuple[Probe, ...]
    samples: str


def number_of(cause: Mapping[str, Any]) -> int | None:
    """The number of the evidence that a verdict names; None if it names none."""
    bundle = cause.get("bundle")
    return bundle if type(bundle) is int and 0 <= bundle < 10**12 else None


def evidence(run_dir: RunDir, number: int, *, most_characters: int) -> StepEvidence | None:
    """Read the evidence with this number; None if there is none, or it cannot be read."""
    folder = run_dir.explanation(number)
    try:
        incident = parse_json(read_bounded(folder / "incident.json", _JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    try:
        text = read_bounded(folder / "samples.txt", _TEXT_BYTES).decode(errors="replace")
    except OSError:
        text = ""
    probes = incident.get("probes") if isinstance(incident, dict) else None
    return StepEvidence(
        number=number,
        probes=tuple(
            _probe(name, probe)
            for name, probe in list((probes if isinstance(probes, dict) else {}).items())
            if isinstance(probe, dict)
        )[:_MOST_PROBES],
        samples=_without_head(text)[:most_characters],
    )


def _probe(name: str, probe: Mapping[str, Any]) -> Probe:
    ranks = probe.get("nonfinite_ranks")
    return Probe(
        name=name[:60],
        loss=number(probe.get("loss")),
        grad_norm=number(probe.get("grad_norm")),
        nonfinite_ranks=tuple(
            rank for rank in (ranks if isinstance(ranks, list) else []) if type(rank) is int
        )[:64],
    )


def _without_head(text: str) -> str:
    """The text without its first line, which repeats the verdict."""
    return text.partition("\n")[2].strip()
