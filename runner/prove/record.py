"""What the processes of a run recorded: by step and rank, as plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

Entry: TypeAlias = Sequence[Any]  # digest, norm or None, narrowest type where it was asked for
Batch: TypeAlias = tuple[str, ...]  # a digest for each sample of a micro-batch


class Undecided(Exception):
    """Nothing can be said of the script's resume; the message says why."""


@dataclass(slots=True, kw_only=True)
class Step:
    """What one rank's step began with and read; tensors by name.

    ``gradients`` is empty for the state after the last step.
    """

    weights: dict[str, Entry] = field(default_factory=dict)
    frozen: dict[str, Entry] = field(default_factory=dict)
    state: dict[str, Entry] = field(default_factory=dict)  # NAME/KEY, such as w/exp_avg
    options: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # by parameter
    gradients: dict[str, Entry | None] = field(default_factory=dict)
    buffers: dict[str, Entry] = field(default_factory=dict)
    copies: dict[str, Mapping[str, Entry]] = field(default_factory=dict)
    scalers: list[Mapping[str, Any]] = field(default_factory=list)
    random: dict[str, str] = field(default_factory=dict)
    between: list[str] = field(default_factory=list)  # generators moved since the step before it
    batches: list[Batch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)  # their counters
    # Further calls before the first backward pass of a process: batch, random, buffers.
    later: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def loss(self) -> float | None:
        """The mean of what its backward passes began with."""
        return sum(self.losses) / len(self.losses) if self.losses else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Files that were written between two steps: after which, how many bytes, largest first."""

    after: int
    num_bytes: int
    names: tuple[str, ...]

    def is_like(self, other: Save) -> bool:
        """Whether it has the other's largest file, but for the numbers in its name."""
        return _pattern(other.names[0]) in map(_pattern, self.names)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The steps of one start of a script, numbered from 1, or of the whole run."""

    steps: dict[int, dict[int, Step]] = field(default_factory=dict)  # by step and rank
    world_size: int = 1
    saves: list[Save] = field(default_factory=list)
    num_bytes: int = 0  # of the weights that the ranks train
    has_workers: bool = False

    @property
    def last(self) -> int:
        """The last step that every rank has done."""
        done = [s for s, ranks in self.steps.items() if all(r.gradients for r in ranks.values())]
        return max((s for s in done if len(self.steps[s]) == self.world_size), default=0)

    def moved(self, by: int) -> Trajectory:
        """The same with other numbers of steps."""
        steps = {number + by: ranks for number, ranks in self.steps.items()}
        saves = [replace(save, after=save.after + by) for save in self.saves]
        return replace(self, steps=steps, saves=saves)


class Process:
    """One process's file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.lines: list[dict[str, Any]] = []
        self.stopped = False

    def poll(self) -> None:
        """Read what was added; a line that is not whole waits."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if "stopped" in line:
                self.stopped = True
            else:
                self.lines.append(line)

    @property
    def done(self) -> int:
        """Steps that it has done."""
        return max((int(line["step"]) for line in self.lines if "end" not in line), default=0)


class StartRecord:
    """The files of one start of the script."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[Path, Process] = {}

    def poll(self) -> None:
        """Read what was added."""
        for path in sorted(self._folder.glob("steps-*.jsonl")):
            self._processes.setdefault(path, Process(path)).poll()

    @property
    def ranks(self) -> list[Process]:
        """The processes that have done a step."""
        return [process for process in self._processes.values() if process.lines]

    @property
    def done(self) -> int:
        """Steps that every rank has done; 0 until all have begun."""
        if not self.are_all_there:
            return 0
        return min(process.done for process in self.ranks)

    @property
    def are_all_there(self) -> bool:
        """Whether every rank has done a step."""
        return bool(self.ranks) and len(self.ranks) >= int(self.ranks[0].lines[0]["world_size"])

    @property
    def have_stopped(self) -> bool:
        """Whether every rank stands still."""
        return self.are_all_there and all(process.stopped for process in self.ranks)

    def error(self) -> str:
        """What went wrong with the recording; empty if nothing."""
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("error-*.txt")))

    def trajectory(self) -> Trajectory:
        """All that is recorded.

        Raises:
            Undecided: two processes were the same rank.
        """
        found = Trajectory()
        owners: dict[int, Any] = {}
        for process in self.ranks:
            first = process.lines[0]
            rank = int(first["rank"])
            if owners.setdefault(rank, first["pid"]) != first["pid"]:
                raise Undecided(
                    f"two processes trained as rank {rank}: several trainings at once cannot be "
                    "told apart; run one of them"
                )
            found.world_size = max(found.world_size, int(first["world_size"]))
            found.has_workers |= bool(first["workers"])
            _add(found, rank, process.lines)
        found.saves = _saves(self.ranks)
        _drop_half(found)
        return found


def _add(found: Trajectory, rank: int, lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        found.num_bytes += int(line.get("num_bytes", 0))
        step = found.steps.setdefault(int(line["step"]), {}).setdefault(rank, Step())
        read = dict(line) | {
            "options": {name: own for names, own in line["options"] for name in names},
            "batches": [tuple(rows) for rows in line.get("batches", [])],
        }
        for name in Step.__slots__:
            own, more = getattr(step, name), read.get(name)
            if more and isinstance(own, dict):
                own.update({key: value for key, value in more.items() if key not in own})
            elif more:
                own += more
    steps = [ranks[rank] for ranks in found.steps.values() if rank in ranks]
    trained = {re.sub(r"^optimizer \d+: ", "", name) for step in steps for name in step.weights}
    for step in steps:  # one optimizer's are frozen while another one steps
        step.frozen = {name: entry for name, entry in step.frozen.items() if name not in trained}


def _drop_half(found: Trajectory) -> None:
    """Leave out the last step if only the first of several optimizers has stepped in it."""
    sizes = {s: min(len(r.gradients) for r in ranks.values()) for s, ranks in found.steps.items()}
    last = max((step for step, size in sizes.items() if size), default=0)
    if last and sizes[last] < max(sizes.values()):
        del found.steps[last]


def _saves(processes: Sequence[Process]) -> list[Save]:
    by_step: dict[int, dict[str, int]] = {}
    for process in processes:
        for line in process.lines:
            files = by_step.setdefault(int(line["step"]) - 1, {})
            for name, size, former in line.get("written", []):
                for earlier in by_step.values():  # it is whole once it has its own name
                    earlier.pop(former, None)
                if not _is_log(name):
                    files[name] = int(size)
    return [
        Save(
            after=step,
            num_bytes=sum(files.values()),
            names=tuple(sorted(files, key=files.__getitem__, reverse=True)),
        )
        for step, files in sorted(by_step.items())
        if files
    ]


def _is_log(name: str) -> bool:
    """Whether it grows in many steps, or only describes a checkpoint."""
    return name.endswith((".jsonl", ".json", ".log", ".txt", ".csv")) or "tfevents" in name


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def checkpoints(trajectory: Trajectory) -> list[Save]:
    """The saves that are large enough for the weights; those in a row are one, of the last step.

    A save counts from half the bytes of the weights that are trained: those may be saved in BF16.
    """
    large = [s for s in trajectory.saves if s.after > 0 and s.num_bytes * 2 >= trajectory.num_bytes]
    is_each_step = len(large) > trajectory.last // 2
    merged: list[Save] = []
    for save in large:
        if merged and not is_each_step and save.after == merged[-1].after + 1:
            begun = merged.pop()
            largest = max(begun, save, key=lambda one: one.num_bytes)
            save = replace(largest, after=save.after)
        merged.append(save)
    return merged
