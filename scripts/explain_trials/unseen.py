"""Incidents of kinds on which no rule was tuned, as whole runs with the illnesses of tests/ill.py.

The verdict, who is named, and the end are compared with what was done: after a transient fault or
spoilt weights the run must end as the undisturbed one, after bad data as the one told to skip it.
The run's folder is then moved away, and ``holdfast replay`` must say the same of it there, and find
the cause again from the run's settings.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.run_dir.explanations import explanations, read_explanation
from tests import warm
from tests.run import Result, command, skip_override, train
from tests.unseen_kinds import DATA, HEALTHY, MISREAD, STATE, TRANSIENT, Incident

_PROGRAM = Path("tests/ill.py").resolve()
_SETTINGS = ("guard.remedy=verdict", "explain=full", "eval.every=0", "steps=50")
_TRACELESS = (TRANSIENT, MISREAD, STATE)
_OPEN = ("unclear", "not reproducible")
_CALM = {"evaluation", "start", "resume", "preflight"}
GOOD = "the step is good"


@dataclass(kw_only=True)
class Row:
    """What came of one.

    Args:
        said: the first cause that is named.
        wrong: ranks, samples and modules named or skipped that were not hit.
        end: what is not as it should be at the end of the run.
        moved: whether the evidence says the same elsewhere; ``again``: what is found there anew.
    """

    key: str
    group: str
    causes: tuple[str, ...]
    commit: str
    said: str = "nothing"
    why: str = ""
    wrong: list[str] = field(default_factory=list)
    end: str = ""
    moved: bool | None = None
    again: str = ""
    wanted: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.said in self.causes

    @property
    def is_sound(self) -> bool:
        return self.is_right and not self.wrong and not self.end and self.again == self.wanted


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Row(**{**row, "causes": tuple(row["causes"])}) for row in map(json.loads, lines)]


def append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


class Trials:
    """Runs incidents in a folder; undisturbed runs are made once.

    Args:
        keep: where runs that are not as they should be are kept; None: nowhere.
    """

    def __init__(self, folder: Path, commit: str, keep: Path | None = None) -> None:
        self._folder, self._commit, self._keep = folder, commit, keep
        self._twins: dict[str, Result] = {}

    def try_one(self, one: Incident, key: str) -> Row:
        began = time.monotonic()
        row = Row(key=key, group=one.group, causes=one.causes, commit=self._commit)
        out = self._folder / "hit"
        hit = self._train(one, out, one.ills, *_faults(one))
        try:
            self._judge(row, one, hit)
        except (OSError, KeyError, ValueError) as error:
            row.said, row.why = "the trial failed", f"{error!r} {hit.tail[-1000:]}"
        moved = self._folder / "elsewhere" / "run"
        if self._keep and not row.is_sound:
            kept = self._keep / key.replace("/", "_")
            for folder in (out, moved):
                shutil.copytree(folder, kept, dirs_exist_ok=True) if folder.exists() else None
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(moved.parent, ignore_errors=True)
        row.seconds = round(time.monotonic() - began, 1)
        return row

    def _train(self, one: Incident, out: Path, ills: Any, *words: str) -> Result:
        env = {"ILL": json.dumps([*one.lasting, *ills])}
        words = (*_SETTINGS, *one.settings, *words)
        return train(out, *words, ranks=one.world_size, env=env, program=_PROGRAM)

    def _twin(self, one: Incident, *words: str) -> str:
        """The digest of the undisturbed run."""
        key = json.dumps([one.settings, one.world_size, one.lasting, words])
        if key not in self._twins:
            out = self._folder / f"twin{len(self._twins)}"
            self._twins[key] = self._train(one, out, (), *words)
        return self._twins[key].digest

    def _judge(self, row: Row, one: Incident, hit: Result) -> None:
        lines = hit.journal()
        causes = [c for line in lines if isinstance(c := line["detail"].get("cause"), dict)]
        if one.causes == (HEALTHY,):
            kinds = {line["kind"] for line in lines} - _CALM
            row.said, row.why = ("an alarm" if kinds else HEALTHY), ", ".join(sorted(kinds))
            is_same = hit.digest == self._twin(one, "explain=off")
            row.end = "" if is_same else "not that of explain=off"
            return
        named = [cause for cause in causes if cause["cause"] not in _OPEN] or causes
        if not named:
            return
        row.said, row.why = named[0]["cause"], named[0]["why"]
        row.wrong = _wrong(one, hit, causes)
        if row.is_right and row.said in _TRACELESS:
            row.end = "" if hit.digest == self._twin(one) else "a trace is left"
        elif row.is_right and row.said == DATA:
            skipping = self._twin(one, skip_override(hit.summary["skipped"]))
            row.end = "" if hit.digest == skipping else "not that of the run told to skip"
        self._replay(row, one, hit)

    def _replay(self, row: Row, one: Incident, hit: Result) -> None:
        """In a copy elsewhere, the original gone."""
        folder = hit.out / "explanations"
        before = [read_explanation(folder / f"{n:06d}") for n in explanations(folder)]
        moved = self._folder / "elsewhere" / "run"
        moved.parent.mkdir()
        shutil.move(hit.out, moved)
        numbers = explanations(moved / "explanations")
        after = [json.loads(self._said(one, moved, n, "--json")) for n in numbers]
        row.moved = [e["finding"] for e in after] == [e["finding"] for e in before]
        index = next(i for i, e in enumerate(before) if e["finding"]["cause"] == row.said)
        words = command(moved, *_SETTINGS, *one.settings, *_faults(one), ranks=0)
        settings = [word for word in words[3:] if not word.startswith("out=")]
        text = self._said(one, moved, numbers[index], "--", *settings)
        lines = [line.split(":")[0] for line in text.splitlines() if line.startswith("  here ")]
        row.again = lines[0].removeprefix("  here").strip() if lines else text[-400:]
        row.wanted = one.again or GOOD

    def _said(self, one: Incident, out: Path, number: int, *words: str) -> str:
        # The model's operations are as they were; the devices are others.
        ills = [*one.lasting, *(ill for ill in one.ills if one.sites)]
        arguments = [sys.executable, str(_PROGRAM), "replay", str(out), "--incident", str(number)]
        env = {"ILL": json.dumps(ills)}
        done = warm.finished([*arguments, *words], timeout=200, env=env)
        return done.stdout or done.stderr


def _faults(one: Incident) -> tuple[str, ...]:
    return (f"faults=[{','.join(one.faults)}]",) if one.faults else ()


def _wrong(one: Incident, hit: Result, causes: list[Mapping[str, Any]]) -> list[str]:
    """Who or what was named or skipped, and is innocent."""
    wrong = []
    for cause in causes:
        samples = cause["positions"] if cause["cause"] == DATA else []
        wrong += [f"rank {rank}" for rank in cause["ranks"] if rank not in one.ranks]
        wrong += [f"sample {at}" for at in samples if at not in one.positions]
        module = cause["module"]
        if module and not f".{module}".endswith(tuple(f".{site}" for site in one.sites)):
            wrong.append(module)
    skipped = (at for start, stop in hit.summary["skipped"] for at in range(start, stop))
    wrong += [f"skipped {at}" for at in skipped if at not in one.positions][:4]
    return list(dict.fromkeys(wrong))
