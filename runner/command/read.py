"""``python -m runner read FILE...``: says what recorded training curves show, and what to try.

A healthy curve has no findings. Files as for backtest: CSV, JSONL, TensorBoard event files, W&B CSV
exports, trainer_state.json of Hugging Face's trainer; a folder with metrics.jsonl or event files
counts as one curve. Options name the columns, where common names do not find them; what is not
there is not judged.

--eval-loss: held out. --update-ratio: norm of a step's update over that of the weights.
--layer-ratio: gradient norm of the first quarter of the layers over the last's. --entropy: of a
batch's tokens. --corpus-entropy: of the corpus' (unigram, nats), a column or one number.
--clip: the norm to which gradients were clipped; of a run's folder it is known.
"""

from __future__ import annotations

import argparse
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError
from runner.system.json_lines import iter_lines
from runner.system.parsing import json_text
from runner.system.process import add_options, stay_beside
from runner.system.units import counted
from runner.tools.backtest.recording import ALWAYS, objects, option, read_columns
from runner.tools.reading import LEAST_ROWS, read, trouble
from runner.tools.reading.curve import (
    CORPUS_ENTROPY,
    ENTROPY,
    FURTHER,
    HELD_OUT,
    LEARNING_RATE,
    SIGNATURES,
    Curve,
    Signature,
)

_OF_SET = re.compile(r"eval_([^/]+)_loss$")
_OWN = ("step", "loss", "grad_norm", "lr", "eval_loss", "entropy")  # columns of our own metrics


def read_command(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ConfigError: a file or a column that cannot be used.
    """
    signatures = "\n".join(f"  {name:<26}{meaning}" for name, meaning in SIGNATURES.items())
    parser = Parser(
        "read",
        __doc__,
        epilog=f"signatures:\n{signatures}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in (*ALWAYS, *FURTHER):
        parser.add_argument(option(name), metavar="NAME")
    words = '{"signature", "rows", "steps", "evidence", "try", "confidence"}'
    parser.add_argument("--clip", type=float, metavar="NORM")
    parser.flag("--json", f'one line per file: {{"file", "rows", "signatures": [{words}]}}')
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--stop", type=int, help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args(arguments)
    if stay_beside(options):
        return _read_beside(options)
    if not options.files:
        raise ConfigError("read: no file given; see python -m runner read --help")
    entropy = _number(options.corpus_entropy)
    names = {name: getattr(options, name) for name in (*ALWAYS, *FURTHER)}
    if entropy is not None:
        names[CORPUS_ENTROPY] = None
    for file in options.files:
        with Bar("reading", 0) as bar:
            columns, notes = read_columns(file, names, moved=bar.at)
            sets = _of_sets(Path(file), columns["step"])
            columns = {HELD_OUT: next(iter(sets.values()))} | columns | sets if sets else columns
            curve = curve_of(columns, entropy)
            findings = read(curve)
        text = _json_line(file, curve, findings) if options.json else _report(file, curve, findings)
        if not options.json:
            clip = _clip_of(Path(file)) if options.clip is None else options.clip
            notes = list(filter(None, [trouble.clipping(curve, clip), *notes]))
            text += "".join(f"\n  note: {note}" for note in notes)
        sys.stdout.write(text + "\n")
    return 0


def _read_beside(options: argparse.Namespace) -> int:
    """Read the metrics of the run that started this process, as far as ``--stop``."""
    (file,) = options.files
    curve = curve_of_run(Path(file), options.stop, _number(options.corpus_entropy))
    sys.stdout.write(_json_line(file, curve, read(curve)) + "\n")
    return 0


def curve_of(
    columns: Mapping[str, list[float | None]], corpus_entropy: float | None = None
) -> Curve:
    """The arrays of a file's columns."""
    steps, losses, norms = (columns[name] for name in ALWAYS)
    further = {name: values for name, values in columns.items() if name not in ALWAYS}
    if corpus_entropy is not None:
        further[CORPUS_ENTROPY] = [corpus_entropy] * len(losses)
    return Curve.of(steps, losses, norms, further)


def curve_of_run(metrics: Path, stop: int, corpus_entropy: float | None) -> Curve:
    """The applied steps in the first ``stop`` bytes of the metrics."""
    columns = {name: array("d") for name in _OWN}
    for line in iter_lines(metrics, stop=stop):
        if line.get("action") == "apply":
            for name, column in columns.items():
                value = line.get(name)
                column.append(float(value) if isinstance(value, int | float) else np.nan)
    steps, loss, grad_norm, rate, held_out, entropy = (np.array(columns[name]) for name in _OWN)
    further = {LEARNING_RATE: rate, HELD_OUT: held_out, ENTROPY: entropy}
    if corpus_entropy:
        further[CORPUS_ENTROPY] = np.full(len(loss), corpus_entropy)
    sets = {n: np.array(c, dtype=float) for n, c in _of_sets(metrics, steps, stop).items()}
    if sets and not np.isfinite(held_out).any():
        further[HELD_OUT] = next(iter(sets.values()))
    further |= sets
    return Curve.of(steps, loss, grad_norm, further)


def _of_sets(
    path: Path, steps: Iterable[float | None], stop: int | None = None
) -> dict[str, list[float | None]]:
    """Columns with the loss of each held-out set, for rows of these steps; of JSON files.

    Ours are called ``eval_loss/NAME``, those of Hugging Face's trainer ``eval_NAME_loss``: several
    of these, without an ``eval_loss``, are sets.
    """
    file = RunDir(path).metrics if path.is_dir() else path
    if not file.is_file() or not file.name.endswith((".jsonl", ".json")):
        return {}
    losses: dict[str, dict[float, float]] = {}
    for line in objects(file) if stop is None else iter_lines(file, stop=stop):
        step = (line or {}).get("step")
        if line is None or not isinstance(step, int):
            continue
        for name, value in line.items():
            if name.startswith("eval_") and "loss" in name and isinstance(value, int | float):
                losses.setdefault(name, {})[step] = value
    sets = {name: of for name, of in losses.items() if name.startswith(f"{HELD_OUT}/")}
    theirs = {_OF_SET.sub(rf"{HELD_OUT}/\1", n): of for n, of in losses.items() if _OF_SET.match(n)}
    if not sets and HELD_OUT not in losses and len(theirs) > 1:
        sets = theirs
    rows = list(steps)
    return {
        name: [None if step is None else of_set.get(step) for step in rows]
        for name, of_set in sets.items()
    }


def _clip_of(out: Path) -> float:
    """``optim.clip`` of a run's folder; 0 for anything else, such as a user's loop."""
    try:
        settings = RunDir(out).stored_settings()
        clip = settings.get("optim.clip") if "steps" in settings else 0.0
    except ConfigError:  # of another program
        return 0.0
    return float(clip) if isinstance(clip, int | float) else 0.0


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _json_line(file: str, curve: Curve, findings: Sequence[Signature]) -> str:
    signatures = [finding.to_json(curve) for finding in findings]
    return json_text({"file": file, "rows": len(curve), "signatures": signatures})


def _report(file: str, curve: Curve, findings: Sequence[Signature]) -> str:
    columns = ["loss"] + ["grad_norm"] * bool((~np.isnan(curve.grad_norm)).any())
    columns += [name for name in FURTHER if name in curve.columns]
    columns += [f"{len(curve.held_out)} held-out losses"] if len(curve.held_out) else []
    warning = f"; fewer than {LEAST_ROWS}: too few to judge" if len(curve) < LEAST_ROWS else ""
    lines = [
        f"{file}: {counted(len(curve), 'row')}, steps {int(curve.steps.min()):,} to "
        f"{int(curve.steps.max()):,} ({', '.join(columns)}){warning}"
    ]
    if not findings:
        lines.append("  no signature found")
    for finding in findings:
        steps = f"steps {curve.steps[finding.first]:,} to {curve.steps[finding.last]:,}"
        lines += [
            f"  {finding.signature} ({steps}; confidence {finding.confidence})",
            f"      {finding.evidence}",
            f"      try: {finding.remedy}",
        ]
    return "\n".join(lines)
