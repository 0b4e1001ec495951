"""Counts what ``holdfast preflight`` finds: settings with one thing wrong, and sound ones.

    python -m scripts.preflight_trials

Each is a process of its own, timed from its start to its end. Prints a Markdown table; 0 when each
wrong thing is named by the check that is to name it, each sound case passes without a warning, and
none takes longer than a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.bench.process import ROOT, environment
from tests.preflight_cases import DATA, MODELS, SOUND, WRONG

_MOST_SECONDS = 60.0
_SOUND_RESULTS = {"ok", "-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``results`` by check; ``failing`` those that are neither ok nor skipped."""

    results: dict[str, str]
    seconds: float

    @property
    def failing(self) -> list[str]:
        return [check for check, result in self.results.items() if result not in _SOUND_RESULTS]


def outcome(settings: Sequence[str]) -> Outcome:
    """Run ``preflight`` once.

    Raises:
        ValueError: it printed something else than its lines.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "runner", "preflight", "--json", *DATA, *settings],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if not lines:
        raise ValueError(f"preflight {' '.join(settings)}: {done.stderr.strip()[-500:]}")
    return Outcome(results={line["check"]: line["result"] for line in lines}, seconds=seconds)


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="name of a case; may be repeated")
    chosen = parser.parse_args().only
    print("| case | what must name it | result | other checks that fail | seconds |")
    print("|---|---|---|---|---|")
    counts = {True: [0, 0], False: [0, 0]}
    longest = 0.0
    cases = [(name, (f"model._target_={MODELS}.{w[0][0]}", *w[0][1:]), w[1])
             for name, w in WRONG.items()]  # fmt: skip
    cases += [(f"sound: {name}", settings, "") for name, settings in SOUND.items()]
    for name, settings, check in cases:
        if chosen and name not in chosen:
            continue
        one = outcome(settings)
        holds = one.results.get(check) == "FAILS" if check else not one.failing
        others = ", ".join(other for other in one.failing if other != check)
        counts[bool(check)][0] += holds
        counts[bool(check)][1] += 1
        longest = max(longest, one.seconds)
        result = ("named" if check else "passes") if holds else "WRONG"
        print(
            f"| {name} | {check or '-'} | {result} | {others or '-'} | {one.seconds:.0f} |",
            flush=True,
        )
    (named, wrong), (passed, sound) = counts[True], counts[False]
    print(
        f"\n{named} of {wrong} wrong ones named by the expected check, {passed} of {sound} sound "
        f"ones pass, at most {longest:.0f} s"
    )
    return int(named < wrong or passed < sound or longest > _MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
