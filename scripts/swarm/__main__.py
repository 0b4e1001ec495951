"""The command line of the swarm. See the package."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from scripts.bench.provenance import commit
from scripts.swarm import swarm
from scripts.swarm.case import read

_RECORD = Path("docs/records/swarm.jsonl")


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first case; they count up")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time")
    parser.add_argument("--case", type=Path, help="play this kept case alone")
    parser.add_argument("--keep", type=Path, default=Path("swarm-failures"), help="for failures")
    parser.add_argument("--record", action="store_true", help=f"add a line to {_RECORD}")
    parser.add_argument("--whole", action="store_true", help="do not shrink what fails")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--prove", action="store_true", help="which mutants are found in --minutes")
    parser.add_argument("mutants", nargs="*", help="of --prove, by their names; none: all")
    options = parser.parse_args()
    if options.prove:
        from scripts.swarm.prove import prove

        return prove(options.mutants, options.seed, options.minutes, options.jobs, _say)
    if options.case:
        with swarm.bench() as bench:
            wrong = bench.failures(read(options.case))
        _say("\n".join(wrong) or "passes")
        return 1 if wrong else 0
    began, used = time.monotonic(), swarm.processor_seconds()
    report = swarm.run(
        options.seed, options.minutes, jobs=options.jobs, keep=options.keep, say=_say,
        shrinks=not options.whole, most_failures=1 if options.first else 1_000,
    )  # fmt: skip
    row = {
        "seed": options.seed,
        "cases": report.cases,
        "refused": report.refused,
        "runs": report.runs,
        "failures": [one["seed"] for one in report.failures],
        "flaky": [one["seed"] for one in report.flaky],
        "seconds": round(time.monotonic() - began),
        "processor_seconds": round(swarm.processor_seconds() - used),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    _say(json.dumps(row))
    if options.record:
        with _RECORD.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
