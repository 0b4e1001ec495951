"""``python -m runner backtest FILE...``: what the guard would have done to recorded runs.

Replays the guard over curves: CSV, JSONL, TensorBoard event files or W&B CSV exports; a folder
with metrics.jsonl or event files counts as one curve. guard.* and checkpoint.* as in training.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.config.compose import compose
from runner.config.validate import check
from runner.policy.decision.ladder import RemedyRules
from runner.system.error import ConfigError
from runner.system.parsing import json_text
from runner.system.units import counted
from runner.tools.backtest.guard_replay import Decision, GuardReplay
from runner.tools.backtest.recording import ALWAYS, RecordedRun, option, read_curve

# The report shows the first few; --json has all.
_EPISODES_SHOWN = 20


def backtest_command(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ConfigError: a file, a column or an override that cannot be used.
    """
    parser = Parser("backtest", __doc__)
    for column in ALWAYS:
        words = "the column, where common names do not find it"
        parser.add_argument(option(column), metavar="NAME", help=words)
    words = '{"file", "rows", "decisions": [{"step", "verdict", "action", "reason"}]}'
    parser.flag("--json", f"one line per file: {words}")
    words = ".png or .html; of several curves: FILE with -1, -2, ... in its name"
    parser.add_argument("--plot", metavar="FILE", help=words)
    parser.add_argument("--config-dir", metavar="DIR", help="presets of your own")
    parser.add_argument("what", nargs="*", metavar="FILE | guard.key=value")
    options = parser.parse_intermixed_args(arguments)
    files = [text for text in options.what if not _is_override(text)]
    overrides = [text for text in options.what if _is_override(text)]
    if not files:
        raise ConfigError("backtest: no file given; see python -m runner backtest --help")
    _refuse_other_keys(overrides)
    config = compose(overrides, config_dir=options.config_dir)
    check(config, world_size=1)
    rules = RemedyRules(guard=config.guard, batch=1)
    names = {name: getattr(options, name) for name in ALWAYS}
    for number, file in enumerate(files, start=1):
        began = time.monotonic()
        with Bar("reading", 0) as bar:
            recording = read_curve(file, names, memory=config.guard.window, moved=bar.at)
        replay = GuardReplay(
            recording.curve,
            rules=rules,
            checkpoint=config.checkpoint,
            keep_limits=options.plot is not None,
        )
        with Bar("backtesting", len(recording.curve.steps), unit="rows") as bar:
            replay.run(bar.at)
        seconds = time.monotonic() - began
        noted = _with_unit_note(recording, config.guard.loss_floor)
        text = _json_line(recording, replay) if options.json else _report(noted, replay, seconds)
        sys.stdout.write(f"{text}\n")
        if options.plot is not None:
            _plot(recording, replay, options.plot, number if len(files) > 1 else None)
    return 0


def _is_override(text: str) -> bool:
    return "=" in text and not Path(text).exists()


def _refuse_other_keys(overrides: Sequence[str]) -> None:
    """Refuse keys that have no effect here, rather than ignore them silently."""
    for text in overrides:
        if not text.lstrip("+~").startswith(("guard.", "guard=", "checkpoint.", "checkpoint=")):
            raise ConfigError(f"{text}: a backtest only takes guard.* and checkpoint.*")


def _plot(recording: RecordedRun, replay: GuardReplay, name: str, number: int | None) -> None:
    from runner.tools.backtest.plot import plot

    path = Path(name)
    if number is not None:
        path = path.with_stem(f"{path.stem}-{number}")
    plot(recording, replay, path)
    sys.stderr.write(f"wrote {path}\n")


def _json_line(recording: RecordedRun, replay: GuardReplay) -> str:
    steps = recording.curve.steps
    decisions = [
        {
            "step": steps[decision.row],
            "verdict": decision.verdict,
            "action": decision.action,
            "reason": decision.reason,
        }
        for decision in replay.decisions
    ]
    return json_text({"file": recording.path, "rows": len(steps), "decisions": decisions})


def _with_unit_note(recording: RecordedRun, floor: float) -> RecordedRun:
    """Add a note if the losses are smaller than the thresholds, which are in nats."""
    finite = [loss for loss in recording.curve.losses if math.isfinite(loss)]
    if not finite or abs(statistics.median(finite)) >= floor:
        return recording
    note = (
        f"most losses lie below guard.loss_floor={floor:g}: smaller jumps are ignored; set it, and "
        "guard.drift_nats too, in the unit of this loss"
    )
    return replace(recording, notes=(*recording.notes, note))


def _report(recording: RecordedRun, replay: GuardReplay, seconds: float) -> str:
    steps, decisions = recording.curve.steps, replay.decisions
    counts = Counter(decision.action for decision in decisions)
    num_skipped = replay.skipped.num_skipped(0, len(steps))
    lines = [
        f"{recording.path}: {counted(len(steps), 'row')}, steps {min(steps):,} to {max(steps):,} "
        f"({len(steps) / max(seconds, 1e-9):,.0f} rows/s)",
        *(f"  note: {note}" for note in recording.notes),
        f"  {counts['discard']} discarded ({100 * counts['discard'] / len(steps):.3g} % of the "
        "steps), "
        f"{counts['rollback']} rollbacks ({sum(d.num_undone for d in decisions)} steps undone, "
        f"{num_skipped} skipped), {counts['rebaseline']} new baselines, {counts['halt']} halts",
    ]
    groups = _episodes(decisions)
    lines += [_episode_line(group, recording, replay) for group in groups[:_EPISODES_SHOWN]]
    if len(groups) > _EPISODES_SHOWN:
        lines.append(f"  and {len(groups) - _EPISODES_SHOWN} more: --json lists them all")
    return "\n".join(lines)


def _episodes(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """Group decisions that share an onset, up to the one that ended the episode."""
    groups: list[list[Decision]] = []
    for decision in decisions:
        last = groups[-1][-1] if groups else None
        if last is not None and last.action == "discard" and decision.onset == last.onset:
            groups[-1].append(decision)
        else:
            groups.append([decision])
    return groups


def _episode_line(group: Sequence[Decision], recording: RecordedRun, replay: GuardReplay) -> str:
    steps, first, last = recording.curve.steps, group[0], group[-1]
    onset = min(decision.onset for decision in group)
    counts = Counter(decision.action for decision in group)
    actions = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items())
    after = first.row - onset
    when = "at its first row" if not after else f"{after} rows after its onset"
    text = (
        f"  step {steps[onset]:,}: {first.verdict}, {when}: {actions}"
        f"{f' up to step {steps[last.row]:,}' if last.row > first.row else ''}\n"
        f"      {last.reason}"
    )
    finding = replay.findings.get(onset)
    return text if finding is None else f"{text}\n      {finding[1].describe(steps[onset])}"
