"""Incidents of kinds on which no rule was tuned, as whole runs with the illnesses of tests/ill.py.

    python -m scripts.explain_trials unseen --seed 1    # a row a run, appended to ROWS
    python -m scripts.explain_trials page               # their section of PAGE, made anew

The verdict, who is named, and the end are compared with what was done: after a transient fault or
spoilt weights the run must end as the undisturbed one, after bad data as the one told to skip it.
The run's folder is then moved away, and ``holdfast replay`` must say the same of it there, and find
the cause again from the run's settings. The other sections of the page are of trials that are in
``scripts`` at commit 5c076d1.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.run_dir.paths import explanations, read_explanation
from tests import warm
from tests.run import Result, command, skip_override, train
from tests.unseen_kinds import DATA, HEALTHY, MISREAD, STATE, TRANSIENT, Incident, drawn, healthy

ROWS = Path("docs/records/explaining-trials.unseen.jsonl")
PAGE = Path("docs/records/explaining-trials.md")
NOTHING = "nothing"  # no gate was closed
GOOD = "the step is good"
_PROGRAM = Path("tests/ill.py").resolve()
_SETTINGS = ("guard.remedy=verdict", "explain=full", "eval.every=0", "steps=50")
_TRACELESS = (TRANSIENT, MISREAD, STATE)
_OPEN = ("unclear", "not reproducible")
_CALM = {"evaluation", "start", "resume", "preflight"}
_SECTION = "## Whole runs, of kinds on which no rule was tuned\n"


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
    said: str = NOTHING
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


class Trials:
    """Runs incidents in a folder; undisturbed runs are made once.

    Args:
        keep: where runs that are not as they should be are kept; None: nowhere.
    """

    def __init__(self, folder: Path, commit: str, keep: Path | None) -> None:
        self._folder, self._commit, self._keep = folder, commit, keep
        self._twins: dict[str, Result] = {}

    def try_one(self, incident: Incident, key: str) -> Row:
        began = time.monotonic()
        row = Row(key=key, group=incident.group, causes=incident.causes, commit=self._commit)
        out = self._folder / "hit"
        hit = self._train(incident, out, incident.ills, *_faults(incident))
        try:
            self._judge(row, incident, hit)
        except (OSError, KeyError, ValueError) as error:
            row.said, row.why = "the trial failed", f"{error!r} {hit.tail[-1000:]}"
        moved = self._folder / "elsewhere" / "run"
        for folder in (out, moved):
            if self._keep and not row.is_sound and folder.exists():
                shutil.copytree(folder, self._keep / key.replace("/", "_"), dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        row.seconds = round(time.monotonic() - began, 1)
        return row

    def _train(self, incident: Incident, out: Path, ills: Any, *words: str) -> Result:
        env = {"ILL": json.dumps([*incident.lasting, *ills])}
        words = (*_SETTINGS, *incident.settings, *words)
        return train(out, *words, ranks=incident.world_size, env=env, program=_PROGRAM)

    def _twin(self, incident: Incident, *words: str) -> str:
        """The digest of the undisturbed run."""
        key = json.dumps([incident.settings, incident.world_size, incident.lasting, words])
        if key not in self._twins:
            out = self._folder / f"twin{len(self._twins)}"
            self._twins[key] = self._train(incident, out, (), *words)
        return self._twins[key].digest

    def _judge(self, row: Row, incident: Incident, hit: Result) -> None:
        lines = hit.journal()
        if incident.causes == (HEALTHY,):
            kinds = {line["kind"] for line in lines} - _CALM
            row.said, row.why = ("an alarm" if kinds else HEALTHY), ", ".join(sorted(kinds))
            is_same = hit.digest == self._twin(incident, "explain=off")
            row.end = "" if is_same else "not that of explain=off"
            return
        causes = [c for line in lines if isinstance(c := line["detail"].get("cause"), dict)]
        named = [cause for cause in causes if cause["cause"] not in _OPEN] or causes
        if not named:
            return
        row.said, row.why = named[0]["cause"], named[0]["why"]
        row.wrong = _wrong(incident, hit, causes)
        if row.is_right and row.said in _TRACELESS:
            row.end = "" if hit.digest == self._twin(incident) else "a trace is left"
        elif row.is_right and row.said == DATA:
            skipping = self._twin(incident, skip_override(hit.summary["skipped"]))
            row.end = "" if hit.digest == skipping else "not that of the run told to skip"
        self._replay(row, incident, hit)

    def _replay(self, row: Row, incident: Incident, hit: Result) -> None:
        """In a copy elsewhere, the original gone."""
        folder = hit.out / "explanations"
        before = [read_explanation(folder / f"{n:06d}") for n in explanations(folder)]
        moved = self._folder / "elsewhere" / "run"
        moved.parent.mkdir(exist_ok=True)
        shutil.move(hit.out, moved)
        numbers = explanations(moved / "explanations")
        after = [json.loads(_replayed(incident, moved, n, "--json")) for n in numbers]
        row.moved = [e["finding"] for e in after] == [e["finding"] for e in before]
        index = next(i for i, e in enumerate(before) if e["finding"]["cause"] == row.said)
        words = command(moved, *_SETTINGS, *incident.settings, *_faults(incident), ranks=0)
        settings = [word for word in words[3:] if not word.startswith("out=")]
        text = _replayed(incident, moved, numbers[index], "--", *settings)
        lines = [line.split(":")[0] for line in text.splitlines() if line.startswith("  here ")]
        row.again = lines[0].removeprefix("  here").strip() if lines else text[-400:]
        row.wanted = incident.again or GOOD


def _replayed(incident: Incident, out: Path, number: int, *words: str) -> str:
    # The model's operations are as they were; the devices are others.
    ills = [*incident.lasting, *(ill for ill in incident.ills if incident.sites)]
    arguments = [sys.executable, str(_PROGRAM), "replay", str(out), "--incident", str(number)]
    done = warm.finished([*arguments, *words], timeout=200, env={"ILL": json.dumps(ills)})
    return done.stdout or done.stderr


def _faults(incident: Incident) -> tuple[str, ...]:
    return (f"faults=[{','.join(incident.faults)}]",) if incident.faults else ()


def _wrong(incident: Incident, hit: Result, causes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who or what was named or skipped, and is innocent."""
    wrong = []
    for cause in causes:
        samples = cause["positions"] if cause["cause"] == DATA else []
        wrong += [f"rank {rank}" for rank in cause["ranks"] if rank not in incident.ranks]
        wrong += [f"sample {at}" for at in samples if at not in incident.positions]
        module = cause["module"]
        if module and not f".{module}".endswith(tuple(f".{site}" for site in incident.sites)):
            wrong.append(module)
    skipped = (at for start, stop in hit.summary["skipped"] for at in range(start, stop))
    wrong += [f"skipped {at}" for at in skipped if at not in incident.positions][:4]
    return list(dict.fromkeys(wrong))


def run(seed: int, kinds: str, keep: Path | None) -> None:
    """Append the rows of a seed that the file does not have."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    known = {row.key for row in read_rows(ROWS)}
    wanted = [word for word in kinds.split(";") if word] or [""]
    with tempfile.TemporaryDirectory(prefix="unseen-", dir="/dev/shm") as folder:
        trials = Trials(Path(folder), commit, keep)
        for incident in (*drawn(seed), *healthy(seed)):
            key = f"{seed}/{incident.name}"
            if key in known or not any(w in f"{incident.group}/{incident.name}" for w in wanted):
                continue
            row = trials.try_one(incident, key)
            with ROWS.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(row, flush=True)


def with_section(page: str, rows: Sequence[Row]) -> str:
    """The page, the section of these rows made anew."""
    before, _, rest = page.partition(_SECTION)
    after = re.search(r"^## ", rest, re.MULTILINE)
    return before + section(rows) + (rest[after.start() :] if after else "")


def section(rows: Sequence[Row]) -> str:
    """What came of the whole runs, as Markdown."""
    calm = [row for row in rows if row.causes == (HEALTHY,)]
    asked = [row for row in rows if row not in calm and row.said != NOTHING]
    same = [row for row in calm if row.is_right and not row.end]
    lines = [
        _SECTION,
        "`python -m scripts.explain_trials unseen --seed N`: faults that no rule was tuned on, in "
        "networks, engines and "
        "data of many kinds (`tests/ill.py`, `tests/unseen_kinds.py`). The end is right if a run "
        "with a transient fault or a spoilt state has the digest of the undisturbed run, and one "
        "with bad data that of the run told to skip. Each run's folder is then moved away: there "
        "`holdfast replay` must say the same, and computed again in one process find the cause "
        "again, or for a fault of a device or of the state in memory that the step is good. "
        f"{len(same)} of {len(calm)} healthy runs had no line in the journal, and the digest of "
        "`explain=off`. Commits, with + where mends of this page's findings were added: "
        f"{', '.join(dict.fromkeys(row.commit for row in rows))}.",
        "",
        "| | incidents | verdict right | wrong names | end right | moved: same | found again |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in dict.fromkeys(row.group for row in asked):
        lines.append(_counts(group, [row for row in asked if row.group == group]))
    for cause in dict.fromkeys(row.causes[0] for row in asked):
        lines.append(_counts(cause, [row for row in asked if row.causes[0] == cause]))
    lines += [_counts("all", asked), ""]
    for row in rows:
        if not row.is_sound:
            unlike = f"; again: {row.again[:80]}" if row.again != row.wanted else ""
            named = f"; named wrongly: {', '.join(row.wrong[:6])}" if row.wrong else ""
            ended = f"; {row.end}" if row.end else ""
            lines.append(f"* {row.key}, {row.causes[0]}: {row.said}{named}{ended}{unlike}")
    return "\n".join(lines) + "\n\n"


def _counts(name: str, rows: Sequence[Row]) -> str:
    replayed = [row for row in rows if row.moved is not None]
    cells = [
        f"{len(rows)}",
        _share([row.is_right for row in rows]),
        f"{sum(bool(row.wrong) for row in rows)}",
        _share([not row.end for row in rows]),
        _share([bool(row.moved) for row in replayed]),
        _share([row.again == row.wanted for row in replayed]),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _share(holds: Sequence[bool]) -> str:
    if not holds:
        return "-"
    part, whole = sum(holds), len(holds)
    return f"{part}/{whole}" + ("" if part == whole else f" ({100 * part / whole:.1f} %)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trials of the verdicts on bad steps.")
    parser.add_argument("what", choices=("unseen", "page"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="kinds whose name contains one of a;b")
    parser.add_argument("--keep", type=Path, help="folder for runs that are not right")
    options = parser.parse_args()
    if options.what == "unseen":
        run(options.seed, options.kinds, options.keep)
    else:
        PAGE.write_text(with_section(PAGE.read_text(), read_rows(ROWS)))


if __name__ == "__main__":
    main()
