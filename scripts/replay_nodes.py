"""What remembering nodes is worth: ``python -m scripts.replay_nodes fault_trace.json``.

Plays the failures of a public trace against :mod:`runner.policy.nodes`. A job trains for the whole
trace on some nodes and has spares. A failure of a node in use is a restart; it is chosen anew among
those that are not in repair, by what is remembered of them. Every class of failure counts alike. A
repaired node passes its check, and comes back at the next restart if it is chosen. The job is drawn
from all servers, many times; each draw is played with and without memory.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from runner.policy.nodes import REMEMBER_DAYS, NodeEvent, choose, standing
from runner.policy.restart import HARDWARE
from scripts.soak_trace import DAYS, SERVERS, Failure, read_trace

DAY_SECONDS = 86400.0
NODES, DRAWS = 64, 60
SPARES = (1, 2, 4, 8, 16)
REMEMBERED = (1.0, 7.0, REMEMBER_DAYS, 90.0, 365.0)


def restarts(failures: Sequence[Failure], servers: Sequence[str], count: int, days: float) -> int:
    """How often a job on ``count`` of ``servers`` starts again.

    Args:
        failures: in order, of these servers.
        days: how long one is remembered.
    """
    past = defaultdict[str, list[NodeEvent]](list)
    repaired = defaultdict[str, float](float)  # on which day

    def chosen(day: float) -> list[str] | None:
        lost = {server for server, end in repaired.items() if end > day}
        now = day * DAY_SECONDS
        known = {server: standing(of, now=now, days=days) for server, of in past.items()}
        return choose(servers, count=count, lost=lost, known=known)

    used, number = chosen(0.0), 0
    for failure in failures:
        if used is None:  # it waits until enough are repaired
            enough = sorted(repaired[server] for server in servers)[count - 1]
            used = chosen(enough) if enough <= failure.begin else None
        when = failure.begin * DAY_SECONDS
        past[failure.server].append(NodeEvent(host=failure.server, kind=HARDWARE, time=when))
        repaired[failure.server] = max(repaired[failure.server], failure.end)
        if used is not None and failure.server in used:
            number += 1
            used = chosen(failure.begin)
    return number


def main() -> None:
    """Print the table of docs/clusters.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="InfiniteHBD's fault_trace.json")
    parser.add_argument("--draws", type=int, default=DRAWS)
    options = parser.parse_args()
    failures = read_trace(options.trace)
    named = sorted({failure.server for failure in failures})
    named += [f"never-failed-{number}" for number in range(SERVERS - len(named))]

    def total(spares: int, days: float) -> int:
        draws = [random.Random(seed).sample(named, NODES + spares) for seed in range(options.draws)]
        own = [[one for one in failures if one.server in set(servers)] for servers in draws]
        return sum(restarts(of, on, NODES, days) for of, on in zip(own, draws, strict=True))

    print(f"{NODES} nodes, {DAYS:.0f} days, mean of {options.draws} draws\n")
    print("| `cluster.remember_days` | " + " | ".join(f"spares {n}" for n in SPARES) + " |")
    print("|---|" + "---|" * len(SPARES))
    before = [total(spares, 0.0) for spares in SPARES]
    print("| nothing | " + " | ".join(f"{one / options.draws:.0f}" for one in before) + " |")
    for days in REMEMBERED:
        after = [total(spares, days) for spares in SPARES]
        pairs = zip(before, after, strict=True)
        cells = [f"{new / options.draws:.0f} (-{1 - new / old:.0%})" for old, new in pairs]
        print(f"| {days:g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
