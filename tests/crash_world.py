"""A run without training, for crash tests: the real ring, journal, metrics, fence and resume.

The state is one small tensor that each step changes in a known way, so that what is loaded after
a crash can be told exactly. Every promise is noted in the trace at the moment it is made, and
:func:`check` holds what a restart finds against the promises made before the crash.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.disk.shards import verify_files
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.protocol import CheckpointMetadata, Identity
from runner.checkpoint.ring import CheckpointRing
from runner.config.schema import CheckpointConfig
from runner.distributed.env import JobEnv
from runner.engine.protocol import Shard
from runner.observe.journal import Journal
from runner.policy.decision.history import Incident
from runner.policy.retention.records import Record, State, rollback_targets
from runner.run_dir.paths import RunDir
from runner.startup.resume import Resumed, RunInventory, claim_run_dir, resume_from, scan
from runner.system.files import naming
from runner.system.json_lines import Backlog, LineFile
from tests.observed import OneRank

BATCH = 4
CLEAN_AFTER = 2
Fact = Callable[[str, Any], None]
ANY_CONFIG = cast(
    Any,
    SimpleNamespace(
        epochs=None, resume=SimpleNamespace(allow_change=True, stale_seconds=0.02, take_over=False)
    ),
)


def disk_ring(folder: Path, settings: CheckpointConfig, **given: Any) -> CheckpointRing:
    """Of one rank and on an empty disk, but for what is given."""
    store = CheckpointDirectory(folder / "ring")
    store.sweep()
    usual = {"sharded": Holder(), "ranks": OneRank(), "report": lambda incident: None}
    identity = Identity(config_digest="c", data_fingerprint="d")
    return CheckpointRing(store, settings=settings, identity=identity, **usual | given)


class Holder:
    """A state with one tensor in two named halves."""

    replica = (0, 1)

    def __init__(self) -> None:
        self.values = torch.zeros(6)
        self.count = 0

    def shards(self) -> Sequence[Shard]:
        parts = {"param/a": self.values[:2], "param/b": self.values[2:]}
        return [
            Shard(name=name, shape=(len(part),), start=0, local=part)
            for name, part in parts.items()
        ]

    def update_counts(self) -> dict[str, int]:
        return {"a": self.count, "b": self.count}

    def complete_copies(self) -> None:
        pass

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        self.count = update_counts["a"]

    def step(self, cursor: int) -> None:
        self.values = self.values * 0.5 + float(cursor)
        self.count += 1


@dataclass
class Saved:
    """The values that were passed to a save."""

    step: int
    cursor: int
    values: list[float]
    metrics: str


@dataclass
class Promises:
    """What was promised so far, over all incarnations."""

    incarnation: int = 0
    lines: list[Any] = field(default_factory=list)  # incidents in the journal
    begun_lines: list[Any] = field(default_factory=list)  # written or about to be
    committed: set[int] = field(default_factory=set)
    clean: set[int] = field(default_factory=set)
    tainted: set[int] = field(default_factory=set)
    distrusted: set[int] = field(default_factory=set)  # mismatch: begun to be given up
    leaving: set[int] = field(default_factory=set)  # retirement has begun
    saved: dict[int, Saved] = field(default_factory=dict)

    def copy(self) -> Promises:
        return Promises(**{name: copy.copy(value) for name, value in vars(self).items()})

    def take(self, kind: str, value: Any) -> None:
        """Add one fact; its value is JSON."""
        if kind == "incarnation":
            self.incarnation = max(self.incarnation, value)
        elif kind == "line begun":
            self.begun_lines.append(value)
        elif kind == "line":
            self.lines.append(value)
        elif kind == "saved":
            self.saved[value["serial"]] = Saved(**{k: value[k] for k in value if k != "serial"})
        elif kind == "found":
            self._found(value["lines"], dict(value["records"]))
        else:
            getattr(self, kind).update(value)

    def _found(self, lines: list[Any], records: dict[int, str]) -> None:
        """The promises after a restart: everything that it found is durable."""
        self.lines = list(lines)
        self.begun_lines = list(lines)
        self.committed = set(records)
        self.clean = {serial for serial in records if records[serial] == State.clean.value}
        self.leaving.clear()

    def after(self, facts: Sequence[tuple[str, Any]]) -> Promises:
        """These promises and those of a trace."""
        updated = self.copy()
        for kind, value in facts:
            updated.take(kind, value)
        return updated


class World:
    """One incarnation: opens the run in ``out``, then follows instructions.

    Args:
        fact: takes each promise at the moment it is made.
    """

    def __init__(self, out: Path, fact: Fact) -> None:
        self.out = out
        self._fact = fact
        self.dir = RunDir(out)
        self.holder = Holder()
        baseline = SimpleNamespace(hold=lambda limits: None)
        self.state = SimpleNamespace(load_json=self._load, baseline=baseline, step=0, cursor=0)
        self.inline: Any = None  # does the ring's work at once, without a thread
        self.number = 0
        self.loaded: tuple[int, list[float]] = (0, [])  # serial and values; 0: begun anew

    def open(self, number: int) -> tuple[RunInventory, Resumed]:
        """Open the run like ``Session.open``; ``number`` orders the launches."""
        ranks = cast(Any, OneRank())
        launch = JobEnv(job="j", order=(number, 0), step="", end_time=None, has_agent=False)
        fence = claim_run_dir(self.dir, ANY_CONFIG.resume, launch, ranks, len)
        own_number = self.number = fence.number
        self._fact("incarnation", own_number)
        inventory = scan(self.dir, ANY_CONFIG, "d", ranks, fence)
        file = LineFile(self.dir.journal, length=inventory.journal_bytes, check=fence.check)
        states = [[r.serial, r.state.value] for r in inventory.records]
        self._fact("found", {"lines": inventory.journal, "records": states})
        self.journal = Journal(inventory.journal, told_to_skip=[], file=file, clock=lambda: 1.0)
        for line in inventory.crashes:
            self.add(Incident.from_json(line))
        backlog = Backlog(
            patience_seconds=300.0, ask_to_stop=len, from_first=ranks.from_first, say=len
        )
        backlog.add(file)
        self.ring = CheckpointRing(
            _Store(self.dir.ring, fence, self._fact),
            sharded=self.holder,
            ranks=ranks,
            settings=CheckpointConfig(clean_after=CLEAN_AFTER, keep=1, background=False),
            identity=Identity(config_digest="c", data_fingerprint="d"),
            report=self.add,
            before_write=lambda step: backlog.require_written(),
        )
        if self.inline is not None:
            for queue in self.ring._queues.queues:
                queue._thread = self.inline
        restore = self.ring.restore

        def noted(candidates: Sequence[Record]) -> Manifest:
            manifest = restore(candidates)
            self.loaded = (manifest.serial, self.holder.values.tolist())
            return manifest

        self.ring.restore = noted  # type: ignore[method-assign]
        resumed = resume_from(inventory, self.dir, self.ring, self.journal, cast(Any, self.state))
        self.begin = resumed.step
        self.ring.drain()  # what a rollback left behind is removed in the background
        self.metrics = LineFile(self.dir.metrics, length=resumed.metrics_bytes, check=fence.check)
        backlog.add(self.metrics)
        self.add(
            Incident(kind="start", step=resumed.step, decision="go on", reason="",
                     detail={"incarnation": own_number, "world_size": 1})
        )  # fmt: skip
        if not self.ring.records:
            self.save()
        return inventory, resumed

    def close(self) -> None:
        """Release thread and files."""
        if hasattr(self, "ring"):
            self.ring.close(wait=True)

    def _load(self, stored: Mapping[str, Any]) -> None:
        self.state.step, self.state.cursor = stored["step"], stored["cursor"]

    # -- what a run does ------------------------------------------------------------------------

    def train(self, num: int) -> None:
        for _ in range(num):
            self.holder.step(self.state.cursor)
            self.state.step += 1
            self.state.cursor += BATCH
            line = {"step": self.state.step, "cursor": self.state.cursor}
            self.metrics.append(line, durably=False)
            self.ring.after_step(self.state.step, self.state.step)
            self.ring.drain()

    def save(self) -> None:
        serial = self.ring.next_serial
        length = self.metrics.sync()
        with naming(self.dir.metrics):
            data = self.dir.metrics.read_bytes()[:length]
        saved = Saved(
            step=self.state.step,
            cursor=self.state.cursor,
            values=self.holder.values.tolist(),
            metrics=data.decode(),
        )
        self._fact("saved", asdict(saved) | {"serial": serial})
        state = {"step": saved.step, "cursor": saved.cursor}
        self.ring.save(
            CheckpointMetadata(step=saved.step, cursor=saved.cursor, train_state=state,
                   metrics_bytes=length, journal_lines=self.journal.num_lines)
        )  # fmt: skip
        self.ring.drain()

    def add(self, incident: Incident) -> None:
        line = incident.to_json()
        self._fact("line begun", line)
        self.journal.add(incident)
        file = self.journal.file
        if file is None or file.kept is None:  # else it is in memory, and lost with the process
            self._fact("line", line)

    def discard(self) -> None:
        start, stop = self.state.cursor, self.state.cursor + BATCH
        self.add(
            Incident(kind="discard", step=self.state.step + 1, decision="discard", reason="nan",
                     samples=(start, stop),
                     detail={"loss": "nan", "grad_norm": 1.0, "tokens": 1, "nonfinite_ranks": 1})
        )  # fmt: skip
        self.state.cursor = stop

    def roll_back(self) -> None:
        """Roll back like ``Recovery.roll_back``; does nothing without a clean checkpoint."""
        targets = rollback_targets(
            self.ring.records, cursor=self.state.cursor, step=self.state.step
        )
        if not targets:
            return
        onset, skip = self.state.step, (self.state.cursor, self.state.cursor + BATCH)
        length = self.metrics.sync()
        manifest = self.ring.restore(targets)
        self.add(
            Incident(
                kind="rollback", step=onset, decision="back", reason="", samples=skip,
                detail={
                    "onset_step": onset, "to_step": manifest.step, "cursor": manifest.cursor,
                    "serial": manifest.serial, "next_serial": self.ring.next_serial,
                    "repeat": 0, "metrics_bytes": length, "cut_factor": 1.0, "cut_steps": 0,
                    "read_again": False,
                },
            )
        )  # fmt: skip
        self.ring.abandon_after(manifest.serial)
        self.ring.drain()
        self.state.load_json(manifest.train_state)

    def distrust(self, good_step: int) -> None:
        """Taint like ``ReplicaInspector`` when copies differ; the run ends afterwards."""
        serials = {r.serial for r in self.ring.records if r.step > good_step}
        self._fact("distrusted", sorted(serials))
        self.add(
            Incident(kind="replica_mismatch", step=self.state.step, decision="", reason="",
                     detail={"good_step": good_step, "next_serial": self.ring.next_serial})
        )  # fmt: skip
        self._fact("tainted", sorted(serials))
        self.ring.distrust_after(good_step)


class _Store(CheckpointDirectory):
    """Records what each call promised when it returned."""

    def __init__(self, folder: Path, fence: Any, fact: Fact) -> None:
        super().__init__(folder, owner=fence.number, check=fence.check)
        self._fact = fact

    def commit(self, manifest: Any) -> None:
        super().commit(manifest)
        self._fact("committed", [manifest.serial])

    def mark(self, record: Any, state: State) -> None:
        super().mark(record, state)
        if state is State.clean:
            self._fact("clean", [record.serial])

    def remove(self, record: Any) -> None:
        self._fact("leaving", [record.serial])
        super().remove(record)


def check(
    world: World,
    inventory: RunInventory,
    resumed: Resumed,
    promises: Promises,
    *,
    only_committed: bool = False,
) -> None:
    """Check that a restart finds what was promised, or newer.

    Args:
        only_committed: the run ended by itself after an error: what it could not finish is not to
            be used.

    Raises:
        AssertionError: it is not.
    """
    assert world.number > promises.incarnation, "a number of an incarnation was given twice"
    assert not inventory.damaged, f"a crash is no damage: {inventory.damaged}"
    lines = [Incident.from_json(line).to_json() for line in inventory.journal]
    own = [_plain(line) for line in lines]
    _check_lines(own, promises)
    abandoned = _abandoned(own)  # not as the history has it: that is under test
    _check_checkpoints(world, inventory, promises, abandoned)
    if only_committed:
        loaded = world.loaded[0]
        assert loaded in promises.committed | {0}, (
            f"checkpoint {loaded} had failed, and was trusted"
        )
        clean = {r.serial for r in inventory.records if r.state is State.clean}
        assert clean <= promises.clean, (
            f"{clean - promises.clean} could not be marked, and are clean"
        )
    metrics = promises.saved[world.loaded[0]].metrics.encode() if world.loaded[0] else b""
    lost = f"metrics of the loaded checkpoint are lost: {len(metrics)} bytes were durable"
    assert world.dir.metrics.read_bytes()[: len(metrics)] == metrics, lost
    assert resumed.metrics_bytes <= world.dir.metrics.stat().st_size, lost
    assert world.ring.next_serial not in abandoned, "a new save would be given up already"
    names = sorted(path.name for path in world.dir.ring.iterdir())
    assert all("-step-" in name for name in names), f"not swept: {names}"
    assert all((world.dir.ring / name / "COMMITTED").exists() for name in names), names


def _plain(line: Mapping[str, Any]) -> dict[str, Any]:
    return Incident.from_json(line).to_json()


def _check_lines(own: list[dict[str, Any]], promises: Promises) -> None:
    promised = [_plain(line) for line in promises.lines]
    assert own[: len(promised)] == promised, (
        f"of {len(promised)} acknowledged journal lines {len(own)} are there or they differ"
    )
    begun = [_plain(line) for line in promises.begun_lines]
    assert all(line in begun for line in own[len(promised) :]), "a line that was never written"


def _abandoned(lines: Sequence[Mapping[str, Any]]) -> set[int]:
    """The serials that rollbacks abandoned."""
    spans = [line["detail"] for line in lines if line["kind"] == "rollback"]
    return {s for detail in spans for s in range(detail["serial"] + 1, detail["next_serial"])}


def _check_checkpoints(
    world: World, inventory: RunInventory, promises: Promises, abandoned: set[int]
) -> None:
    by_serial = {record.serial: record for record in inventory.records}
    # What its proof could not read is given up in words: not yet clean, an older one stands.
    unproven = {
        line["detail"]["serial"]
        for line in inventory.journal
        if line["kind"] == "checkpoint_damaged" and line["decision"] == "never to be used"
    }
    unusable = abandoned | promises.leaving | promises.distrusted | (unproven - promises.clean)
    standing = promises.committed - unusable
    loaded = _loaded(world, promises)
    newest = max(standing, default=0)
    assert loaded >= newest, f"checkpoint {newest} was committed, {loaded} was loaded"
    assert loaded not in abandoned, f"checkpoint {loaded} had been given up by a rollback"
    assert loaded not in promises.tainted, f"checkpoint {loaded} had been given up by a mismatch"
    last_clean = max(promises.clean - unusable, default=0)
    clean = [r for r in inventory.records if r.state is State.clean and r.serial not in abandoned]
    assert not last_clean or max((r.serial for r in clean), default=0) >= last_clean, (
        f"the last clean checkpoint {last_clean} is gone: {sorted(by_serial)}"
    )
    store = CheckpointDirectory(world.dir.ring)
    entries, _ = store.entries()
    for entry in entries:
        verify_files(entry, sorted(entry.manifest.files), finite=True)


def _loaded(world: World, promises: Promises) -> int:
    """The serial of the loaded checkpoint, whose values must match; 0 for a new run."""
    serial, values = world.loaded
    if serial == 0:
        assert not promises.committed, "a run that had checkpoints began anew"
        return 0
    saved = promises.saved[serial]
    assert values == saved.values, f"checkpoint {serial} holds other values than were saved"
    return serial
