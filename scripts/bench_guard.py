"""What the guard costs: the same training step with guard=default and guard=off, in turn.

    torchrun --nproc-per-node=2 scripts/bench_guard.py [--pairs N] [--null] [key=value ...]

Two complete runs (own engine, own loop) live in the same processes. Prints the ratio of their
step times pair by pair. Never a gate for a test.
"""

from __future__ import annotations

import argparse
import json
import os

from paired import compare, open_loop, settings, shared_folder

from runner.dist.group import choose_device, end_group, leave, start_group
from runner.dist.launcher import place_from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=60, help="pairs before; arms the guard")
    parser.add_argument("--null", action="store_true", help="guard off twice: the noise alone")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    place = place_from(os.environ)
    device = choose_device("auto", place)
    start_group(place, device, timeout_seconds=300)
    folder = shared_folder(device)
    guard = "off" if options.null else "default"
    guarded, bare = (
        open_loop(settings(folder / side, [*options.overrides, f"guard={kind}"]), place, device)
        for side, kind in (("guarded", guard), ("bare", "off"))
    )
    result = compare(guarded.step, bare.step, warmup=options.warmup, pairs=options.pairs)
    if place.is_first:
        print(json.dumps({"compared": f"guard={guard} / guard=off"} | result))
    end_group()
    leave(0)


if __name__ == "__main__":
    main()
