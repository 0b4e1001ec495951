"""``python -m runner demo``: poison a range, kill a rank, compare with an undisturbed run.

Both runs are real: two ranks each, started as ``launch`` starts any run. The first reads samples
that give NaN and later loses a rank to SIGKILL. The second skips the same samples from the start.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.command.arguments import Parser
from runner.run_dir.paths import RunDir
from runner.system.environment import variables
from runner.system.error import EXIT_CRASH, EXIT_DONE
from runner.system.json_lines import read_lines

# A tiny decoder and a synthetic language. FP32 is fast on every processor.
SETTINGS = (
    "model=tiny",
    "compute.precision=fp32",
    "data=synthetic",
    "data.workers=0",
    "eval.every=0",
    "steps=60",
    "schedule.warmup=5",
    "checkpoint.every=10",
    "checkpoint.clean_after=5",
    "guard.min_history=10",
    "track.every=20",
    "guard.remedy=discard",  # the demo shows the ladder
)
# Three steps read these samples; the rank dies after the run went back and skipped them.
FAULTS = "faults=[poison@samples=700-790,kill@step=40,rank=1]"
_LAUNCH = ("launch", "--nproc", "2", "--restarts", "0", "--torchrun-restarts", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoEnd:
    """The results of one run."""

    digest: str
    skipped: Sequence[Sequence[int]]
    kinds: frozenset[str]
    restarts: int


def demo_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns 0 if both runs end with the same state."""
    options = _parser().parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as own:
        folder = Path(options.keep or own)
        _say("1. A run that reads a poisoned range and then loses a rank")
        healed = _run(folder / "healed", FAULTS)
        if healed is None:
            return EXIT_CRASH
        _say("2. A run without faults that skips these samples from the start")
        skipping = _run(folder / "told", skip_override(healed.skipped))
        if skipping is None:
            return EXIT_CRASH
    problem = verdict(healed, skipping)
    _say(f"state of the healed run:        {healed.digest}")
    sys.stdout.write(f"state of the run that skipped:  {skipping.digest}\n")
    seconds = time.monotonic() - began
    if problem:
        sys.stdout.write(f"FAILED: {problem} ({seconds:.0f} s)\n")
        return EXIT_CRASH
    sys.stdout.write(
        "equal: weights and optimizer state are the same bit for bit; neither the poison nor the "
        f"killed rank left a trace ({seconds:.0f} s)\n"
    )
    return EXIT_DONE


def verdict(healed: DemoEnd, skipping: DemoEnd) -> str | None:
    """What the demo failed to show; None if it showed everything."""
    if "rollback" not in healed.kinds or not healed.skipped:
        return "the first run did not go back and skip the poisoned range"
    if "crash" not in healed.kinds or not healed.restarts:
        return "the first run did not lose a rank and resume"
    if skipping.kinds & {"discard", "rollback", "crash"}:
        return "the second run had bad steps or a crash"
    if healed.digest != skipping.digest:
        return "the two states differ"
    return None


def _run(out: Path, *settings: str) -> DemoEnd | None:
    """Train to the end; None, after a message, if that failed."""
    command = [sys.executable, "-m", "runner", *_LAUNCH, f"out={out}", *SETTINGS, *settings]
    sys.stdout.flush()
    environment = {"OMP_NUM_THREADS": "1", **variables()}
    code = subprocess.run(command, env=environment, check=False).returncode
    if code != EXIT_DONE:
        sys.stdout.write(f"FAILED: the run in {out} ended with {code}\n")
        return None
    return ended(out)


def ended(out: Path) -> DemoEnd:
    """Read what a finished run left in ``out``."""
    paths = RunDir(out)
    summary: dict[str, Any] = json.loads(paths.summary.read_text())
    journal, _ = read_lines(paths.journal)
    return DemoEnd(
        digest=str(summary["state_digest"]),
        skipped=summary["skipped"],
        kinds=frozenset(str(line["kind"]) for line in journal),
        restarts=int(summary["restarts"]),
    )


def skip_override(skipped: Sequence[Sequence[int]]) -> str:
    """The setting that makes a run skip these half-open ranges."""
    return "data.skip=" + json.dumps([list(pair) for pair in skipped]).replace(" ", "")


def _say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")


def _parser() -> Parser:
    parser = Parser("demo", __doc__)
    parser.add_argument("--keep", metavar="DIR", help="leave both runs there")
    return parser
