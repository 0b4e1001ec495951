"""Undisturbed runs, each with ``explain=quick`` and once more with ``explain=off``.

Looking for causes must change nothing while all is well: both end with the same state, no probe was
computed, and next to no warning was given. Each run is a process of its own, forked from one that
has imported everything, and goes through the command's own composition root.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

STEPS = 300
_AT_ONCE = 2  # pairs of runs


@dataclass(frozen=True, kw_only=True)
class HealthyRun:
    """One row of the file.

    Args:
        lines: of the journal with ``explain=quick``, by kind.
        explained: bad steps that were looked into there.
        is_same: both runs end with the same state.
    """

    seed: int
    settings: tuple[str, ...]
    steps: int
    lines: dict[str, int]
    explained: int
    is_same: bool
    seconds: float

    @property
    def warnings(self) -> int:
        return self.lines.get("warning", 0)


def read(path: Path) -> list[HealthyRun]:
    """All rows of a file; none where there is no file."""
    if not path.exists():
        return []
    return [HealthyRun(**json.loads(line)) for line in path.read_text().splitlines()]


def run_all(path: Path, count: int) -> None:
    """Append the runs of the seeds up to ``count`` that the file does not have yet."""
    import torch._dynamo  # noqa: F401  # comes with the first wrapper otherwise, in each run anew

    import runner.session.session  # noqa: F401

    known = {row.seed for row in read(path)}
    missing = [seed for seed in range(count) if seed not in known]
    for at in range(0, len(missing), _AT_ONCE):
        begun = [_Pair(seed) for seed in missing[at : at + _AT_ONCE]]
        for pair in begun:
            row = pair.ended()
            with path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(row, flush=True)


def _settings(seed: int) -> tuple[str, ...]:
    """Another model and rate for each seed."""
    dice = random.Random(seed)
    return (
        f"seed={seed}",
        f"model.dim={dice.choice((8, 16))}",
        f"model.layers={dice.choice((1, 1, 2))}",
        f"optim.lr={dice.choice((1e-3, 3e-3, 6e-3))}",
        f"schedule={dice.choice(('cosine', 'wsd', 'linear'))}",
        f"schedule.warmup={dice.choice((20, 50))}",
        f"batch.global_size={dice.choice((4, 8))}",
        f"model.qk_norm={dice.choice(('false', 'true'))}",
    )


class _Pair:
    """Both runs of one seed, begun."""

    def __init__(self, seed: int) -> None:
        memory = Path("/dev/shm")
        self._seed = seed
        self._settings = _settings(seed)
        self._folder = Path(
            tempfile.mkdtemp(prefix="healthy-", dir=memory if memory.is_dir() else None)
        )
        self._children = {}
        for kind in ("quick", "off"):
            child = os.fork()
            if not child:
                os._exit(_train(self._folder / kind, (*self._settings, f"explain={kind}")))
            self._children[kind] = child

    def ended(self) -> HealthyRun:
        """
        Raises:
            SystemExit: a run did not end well.
        """
        seconds = sum(self._seconds(child) for child in self._children.values())
        out = self._folder / "quick"
        journal = (out / "journal.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in journal]
        first, second = (
            json.loads((self._folder / kind / "summary.json").read_text())
            for kind in self._children
        )
        shutil.rmtree(self._folder, ignore_errors=True)
        return HealthyRun(
            seed=self._seed,
            settings=self._settings,
            steps=first["steps"],
            lines=dict(Counter(line["kind"] for line in lines)),
            explained=sum("cause" in line.get("detail", {}) for line in lines),
            is_same=first["state_digest"] == second["state_digest"],
            seconds=round(seconds, 2),
        )

    def _seconds(self, child: int) -> float:
        """Of the processor, until it has ended."""
        _, status, usage = os.wait4(child, 0)
        if status:
            code = os.waitstatus_to_exitcode(status)
            raise SystemExit(f"{' '.join(self._settings)}: ended with {code}")
        return usage.ru_utime + usage.ru_stime


def _train(out: Path, settings: tuple[str, ...]) -> int:
    import torch

    from runner.config.compose import compose
    from runner.distributed.env import place_from
    from runner.session.session import train

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    alike = ("model=tiny", "data=synthetic", "data.seq_len=16", "data.workers=0", "eval.every=0")
    more = ("parallel=single", "compute.precision=fp32", f"steps={STEPS}", "checkpoint.every=100")
    try:
        return train(compose([*alike, *more, *settings, f"out={out}"]), place_from({}))
    except Exception as error:
        print(error, file=sys.stderr)
        return 1
