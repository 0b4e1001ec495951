"""What came of one trial, and whether it is right. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HEALTHY = "healthy"
NOTHING = "nothing"  # no gate was closed
ENDED = "the process ended"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is done to a run, and what is right.

    Args:
        causes: that are right; the first is told in the table.
        tuned: the rules were developed on this kind.
        group: "single", "pair" or "many" culprits, counted by themselves.
        faults: as for ``faults=[...]``.
        tampering: names of what :mod:`scripts.explain_trials.tamper` does.
        ranks, positions, modules: that may be named; of ranks and positions all should be.
        step: the first that the spoilt state enters.
        rate: factor of the learning rate from the next step on; ``growth``: per step.
    """

    kind: str
    causes: tuple[str, ...]
    tuned: bool = False
    group: str = ""
    faults: tuple[str, ...] = ()
    tampering: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    step: int | None = None
    rate: float = 1.0
    growth: float = 1.0


@dataclass(kw_only=True)
class Outcome:
    """One row of the file.

    Args:
        key: names the trial among all: LAYOUT/SEED/ROUND/KIND.
        said: the cause in the journal; ``NOTHING`` where no gate was closed.
        wrong_ranks, wrong_modules, wrong_samples: named, and not hit.
        is_complete: rank, samples, module and step are exactly those that were hit.
        computations: of a step, that the explanation took; ``tries`` of them without samples.
        rate_ratio: the largest rate that cures over the one that was named.
    """

    key: str
    layout: str
    kind: str
    tuned: bool
    group: str
    causes: tuple[str, ...]
    said: str = NOTHING
    wrong_ranks: list[int] = field(default_factory=list)
    wrong_modules: list[str] = field(default_factory=list)
    wrong_samples: list[int] = field(default_factory=list)
    is_complete: bool = False
    precision: float | None = None
    recall: float | None = None
    computations: int = 0
    tries: int = 0
    rate_ratio: float | None = None
    seconds: float = 0.0
    noise: float = 0.0
    repeats_bits: bool = True
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> str:
        return self.key.split("/")[1]

    @property
    def is_healthy(self) -> bool:
        return self.causes[0] == HEALTHY

    @property
    def is_right(self) -> bool:
        return self.said in self.causes


def judge(outcome: Outcome, trial: Trial, causes: Sequence[Mapping[str, Any]]) -> Outcome:
    """Fill in what the journal's ``causes`` of this trial say; the last that names one counts."""
    if not causes:
        return outcome
    last = next((c for c in reversed(causes) if c["cause"] != "unclear"), causes[-1])
    outcome.said = last["cause"]
    outcome.computations = sum(cause["steps"] for cause in causes)
    outcome.detail = {k: last[k] for k in ("ranks", "positions", "module", "step", "rate_factor")}
    outcome.detail["why"] = last["why"]
    samples = last["positions"] if last["cause"] in ("data", "data mix") else []
    outcome.wrong_ranks = sorted(set(last["ranks"]) - set(trial.ranks))
    module = last["module"]
    outcome.wrong_modules = [module] if module and module not in trial.modules else []
    if trial.positions:
        hit, named = set(trial.positions), set(samples)
        outcome.wrong_samples = sorted(named - hit)
        outcome.precision = len(named & hit) / len(named) if named else 0.0
        outcome.recall = len(named & hit) / len(hit)
    elif trial.causes[0] != HEALTHY:
        outcome.wrong_samples = sorted(samples)
    is_near = trial.step is None or abs((last["step"] or -9) - trial.step) <= 1
    is_named = tuple(last["ranks"]) == trial.ranks and tuple(samples) == trial.positions
    is_module = module in trial.modules if trial.modules else not module
    outcome.is_complete = is_named and is_module and is_near
    return outcome


def read(path: Path) -> list[Outcome]:
    """All rows of a file; none where there is no file. A torn last line is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows.append(Outcome(**{**row, "causes": tuple(row["causes"])}))
    return rows


def append(path: Path, rows: Iterable[Outcome]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
