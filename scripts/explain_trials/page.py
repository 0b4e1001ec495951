"""Makes docs/records/explaining-trials.md of all rows. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from scripts.explain_trials.healthy import STEPS, HealthyRun
from scripts.explain_trials.kinds import NUMERICS, RATE, STATE
from scripts.explain_trials.outcome import NOTHING, Outcome
from scripts.explain_trials.unseen import Row
from tests.unseen_kinds import HEALTHY

COMMAND = "python -m scripts.explain_trials"
_OPEN = ("unclear", "not reproducible")
_HEAD = f"""# Causes named, counted

How often was the [verdict](../explaining.md) on a bad step right? `{COMMAND} run` and
`{COMMAND} healthy` made the rows in `docs/records/explaining-trials.jsonl`, and `{COMMAND} page`
this page of them. For each layout a small run is trained for 33 steps. Then incident after incident
is made in it: the state is restored, a fault is armed, and the run's own loop has to find the cause
with `explain=full`. Ranks, samples, modules and sizes are drawn at random. Exact means that rank,
samples, module and step are right (the step within one).

Mistakes found with a seed were corrected before the next; no rule was tuned on three layouts of
seed 6 (convolutions, preferences, a Hugging Face Llama). "The process ended" means that the
trial itself failed.
"""


_FAULTS = """How many of each kind the guard noticed, and in parentheses the wrong verdicts; the
others were right. What is healthy has no right verdict."""


def text(rows: Sequence[Outcome], healthy: Sequence[HealthyRun], unseen: Sequence[Row] = ()) -> str:
    """The page, as Markdown."""
    exact = [row for row in rows if not row.noise]
    noisy = [row for row in rows if row.noise]
    parts = [_HEAD, _bounds(rows), _healthy(healthy), _layouts(rows)]
    parts.append(f"## By fault\n\n{_FAULTS}\n\n{_table(exact)}")
    parts += [_unseen(unseen)] if unseen else []
    if noisy:
        parts.append(f"## With noise of 1e-6\n\n{_noise_sentence(noisy)}")
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _unseen(rows: Sequence[Row]) -> str:
    """The whole runs of scripts/explain_trials/unseen.py."""
    calm = [row for row in rows if row.causes == (HEALTHY,)]
    asked = [row for row in rows if row not in calm and row.said != NOTHING]
    same = [row for row in calm if row.is_right and not row.end]
    lines = [
        "## Whole runs, of kinds on which no rule was tuned",
        "",
        f"`{COMMAND} unseen --seed N`: faults that no rule was tuned on, in networks, engines and "
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
    groups = dict.fromkeys(row.group for row in asked)
    lines += [_ends(group, [row for row in asked if row.group == group]) for group in groups]
    causes = dict.fromkeys(row.causes[0] for row in asked)
    lines += [_ends(cause, [row for row in asked if row.causes[0] == cause]) for cause in causes]
    lines += [_ends("all", asked), ""]
    for row in rows:
        if not row.is_sound:
            unlike = f"; again: {row.again[:80]}" if row.again != row.wanted else ""
            named = f"; named wrongly: {', '.join(row.wrong[:6])}" if row.wrong else ""
            ended = f"; {row.end}" if row.end else ""
            lines.append(f"* {row.key}, {row.causes[0]}: {row.said}{named}{ended}{unlike}")
    return "\n".join(lines)


def _ends(name: str, rows: Sequence[Row]) -> str:
    replayed = [row for row in rows if row.moved is not None]
    cells = [
        f"{len(rows)}",
        _share([row for row in rows if row.is_right], rows),
        f"{sum(bool(row.wrong) for row in rows)}",
        _share([row for row in rows if not row.end], rows),
        _share([row for row in replayed if row.moved], replayed),
        _share([row for row in replayed if row.again == row.wanted], replayed),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _asked(rows: Sequence[Outcome]) -> list[Outcome]:
    """Incidents: faults that closed the gate, or ended the process."""
    return [row for row in rows if row.said != NOTHING and not row.is_healthy]


def _bounds(rows: Sequence[Outcome]) -> str:
    """The goals, and what was counted with each seed."""
    seeds = list(dict.fromkeys(row.seed for row in rows))
    columns = [_counted([row for row in rows if row.seed == seed]) for seed in seeds]
    lines = [f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | goal |"]
    lines.append("|---|" + "---|" * (len(seeds) + 1))
    for cells in zip(*columns, strict=True):
        what, _, bound = cells[0]
        lines.append(f"| {what} | {' | '.join(count for _, count, _ in cells)} | {bound} |")
    return "\n".join(lines)


def _counted(of_seed: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """What is counted, the count, and the goal."""
    rows = [row for row in of_seed if not row.noise]
    noisy = _asked([row for row in of_seed if row.noise])
    asked, calm = _asked(rows), [row for row in rows if row.is_healthy]
    causes = {row.causes[0] for row in asked}
    least = min((_of_cause(asked, cause) for cause in causes), default=(0.0, ""))
    accused = [r for r in calm if r.said.startswith("hardware") or r.said in (NUMERICS, RATE)]
    silent = sum(row.said == NOTHING and not row.is_healthy for row in rows)
    return [
        ("incidents", f"{len(asked)}", "120"),
        ("verdict right", _share([row for row in asked if row.is_right], asked), "95 %"),
        ("lowest share of right verdicts for a cause", f"{least[1]} {least[0]:.1f} %", "85 %"),
        (
            "unclear or not reproducible",
            _share([r for r in asked if r.said in _OPEN], asked),
            "5 %",
        ),
        ("wrong ranks named", _count(r.wrong_ranks for r in of_seed), "0"),
        ("wrong modules named", _count(r.wrong_modules for r in of_seed), "-"),
        ("wrong samples named", _count(r.wrong_samples for r in asked), "-"),
        ("hard but healthy batches, and level shifts", f"{len(calm)}", "30"),
        ("of these called hardware, numerics or rate", f"{len(accused)}", "0"),
        *_of_samples(asked),
        *_of_weights(asked),
        (
            "with 1e-6 relative noise: verdict right",
            _share([row for row in noisy if row.is_right], noisy),
            "90 %",
        ),
        ("faults that the guard did not notice, not counted above", f"{silent}", "-"),
    ]


def _of_samples(asked: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    rows = []
    for group, words, bound in (
        ("single", "a single culprit among 32: exact", "all of 40"),
        ("pair", "two culprits: exact", "90 %"),
    ):
        of_group = [row for row in asked if row.group == group]
        rows.append((words, _share([r for r in of_group if r.is_complete], of_group), bound))
        most = max((row.tries for row in of_group), default=0)
        rows.append(
            (
                "computations of probe E, at most",
                f"{most}",
                "8" if group == "single" else "-",
            )
        )
    many = [row for row in asked if row.group == "many"]
    for name in ("precision", "recall"):
        values = [getattr(row, name) or 0.0 for row in many]
        mean = f"{statistics.mean(values):.3f} ({len(many)})" if many else "-"
        rows.append((f"20 culprits of 32: mean {name}", mean, "0.95"))
    return rows


def _of_weights(asked: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    state = [row for row in asked if row.causes[0] == STATE]
    numerics = [row for row in asked if row.causes[0] == NUMERICS]
    ratios = [row.rate_ratio for row in asked if row.causes[0] == RATE and row.rate_ratio]
    near = [ratio for ratio in ratios if ratio <= 3.01]
    return [
        ("state: the step within one", _share([r for r in state if r.is_complete], state), "95 %"),
        ("numerics: the module", _share([r for r in numerics if r.is_complete], numerics), "90 %"),
        ("rate: within 3 times of the largest that cures", _share(near, ratios), "all"),
    ]


def _healthy(healthy: Sequence[HealthyRun]) -> str:
    same = [row for row in healthy if row.is_same]
    warnings = sum(row.warnings for row in healthy)
    explained = sum(row.explained for row in healthy)
    return f"""## Undisturbed runs

{len(healthy)} runs of {STEPS} steps (goal: 100), each repeated with `explain=off`:
{warnings} early warnings (goal: at most 1), {explained} analysed steps (goal: none), and the same
state at the end, bit for bit, in {_share(same, healthy)} (goal: all).
A step is computed again only if the guard found it bad. Without `explain` such a step is discarded,
so these runs end differently."""


def _of_cause(asked: Sequence[Outcome], cause: str) -> tuple[float, str]:
    rows = [row for row in asked if row.causes[0] == cause]
    return 100 * sum(row.is_right for row in rows) / len(rows), cause


def _layouts(rows: Sequence[Outcome]) -> str:
    lines = ["## Layouts", "", "| run | incidents | right | seconds each |", "|---|---|---|---|"]
    for layout in dict.fromkeys(row.layout for row in rows):
        of_layout = [row for row in rows if row.layout == layout]
        asked = _asked(of_layout)
        right = sum(row.is_right for row in asked)
        seconds = statistics.mean(row.seconds for row in of_layout)
        lines.append(f"| {layout} | {len(asked)} | {right} | {seconds:.1f} |")
    return "\n".join(lines)


def _noise_sentence(noisy: Sequence[Outcome]) -> str:
    unseen = sum(row.repeats_bits for row in noisy)
    check = "The check at the start reported in each run that the machine does not repeat its bits."
    if unseen:
        check = f"The check at the start did not notice the noise in the runs of {unseen} trials."
    asked = _asked(noisy)
    wrong = sorted({row.kind for row in asked if not row.is_right})
    verdicts = f"{sum(row.is_right for row in asked)} of {len(asked)} verdicts were right"
    return (
        f"Every embedding's output differs by 1e-6, relatively, each time. {check} {verdicts}"
        f"{'; not: ' + ', '.join(wrong) if wrong else ''}."
    )


def _table(rows: Sequence[Outcome]) -> str:
    lines = ["| right verdict | rules tuned on it | not tuned on it |", "|---|---|---|"]
    for causes in dict.fromkeys(row.causes for row in rows):
        cells = []
        for tuned in (True, False):
            of_cell = [row for row in rows if row.causes == causes and row.tuned is tuned]
            kinds = dict.fromkeys(row.kind for row in of_cell)
            cells.append("; ".join(_kind([r for r in of_cell if r.kind == kind]) for kind in kinds))
        lines.append(f"| {' or '.join(causes)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _kind(rows: Sequence[Outcome]) -> str:
    """A kind of fault, how many of it were noticed, and its wrong verdicts."""
    noticed = [row for row in rows if row.said != NOTHING]
    others = [row.said for row in noticed if not row.is_right]
    wrong = ", ".join(f"{others.count(word)} {word}" for word in dict.fromkeys(others))
    return f"{rows[0].kind} {len(noticed)}/{len(rows)}{f' ({wrong})' if wrong else ''}"


def _share(part: Sequence[Any], whole: Sequence[Any]) -> str:
    if not whole:
        return "-"
    percent = "" if len(part) == len(whole) else f" ({100 * len(part) / len(whole):.1f} %)"
    return f"{len(part)}/{len(whole)}{percent}"


def _count(named: Any) -> str:
    return str(sum(bool(one) for one in named))
