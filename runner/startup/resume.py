"""Scans ``out`` and resumes the run from there, or begins it.

Rank 0 reads and tells all ranks; loading is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.ring import CheckpointRing
from runner.config.mappings import unsteady_samples
from runner.config.schema import DataConfig, ResumeConfig, RunConfig
from runner.data.cursor import SampleStream
from runner.data.mixture import MixtureOrder, Phase, describe_phase
from runner.distributed.agreement import Ranks
from runner.distributed.env import JobEnv
from runner.engine.buffers import is_buffer
from runner.health.cause_reporter import unexplained
from runner.health.root_cause import MEMORY
from runner.observe.journal import Journal, read_journal
from runner.observe.metrics import MetricsLine
from runner.policy.decision.finding import Recorded, from_rows, recorded_in
from runner.policy.decision.history import Incident
from runner.policy.decision.signals import json_float
from runner.policy.restart import HARDWARE
from runner.policy.retention.records import Record, State, resume_order
from runner.run_dir.lease import RunLease, acquire
from runner.run_dir.paths import RunDir, is_allowed
from runner.system.error import CheckpointError, ConfigError
from runner.system.json_lines import count_of, iter_lines, last_line, step_of
from runner.system.units import counted
from runner.train.run import Resumed, Run, ring_directory
from runner.train.state import TrainState

_MICRO_SIZE = "micro_size"  # a kind of journal lines
Tensors = Mapping[str, tuple[int, ...]]  # names and shapes of what a checkpoint holds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInventory:
    """What ``out`` holds.

    ``damaged`` has a sentence for each unreadable manifest, ``crashes`` the journal lines for
    earlier incarnations that ended without writing their own, ``changes`` for settings that the
    user let change, ``buffers`` the names of those in the newest checkpoint. ``last_cursor`` is
    where the last line of the metrics ends.
    """

    journal: list[dict[str, Any]]
    journal_bytes: int
    records: list[Record]
    damaged: list[str]
    torn: list[str]
    last_metrics_step: int
    last_cursor: int
    metrics_bytes: int
    next_serial: int
    crashes: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    buffers: list[str]


def claim_run_dir(
    run_dir: RunDir,
    resume: ResumeConfig,
    launch: JobEnv,
    ranks: Ranks,
    say: Callable[[str], None],
    *,
    after: int = 0,
) -> RunLease:
    """Acquire the write lease of ``out``. Collective.

    Args:
        after: the last known incarnation where ``out`` is empty.

    Raises:
        ConfigError: another launch is alive there, or it cannot be written.
    """

    def take() -> int:
        run_dir.create()
        return acquire(
            run_dir.incarnation,
            launch,
            stale_seconds=resume.stale_seconds,
            take_over=resume.take_over,
            say=say,
            after=after,
        ).number

    return RunLease(run_dir.incarnation, ranks.of_first("taking out", take))


def scan(
    run_dir: RunDir,
    config: RunConfig,
    fingerprint: str,
    ranks: Ranks,
    run_lease: RunLease,
    tensors: Callable[[], Tensors] | None = None,
    sources: Collection[str] | None = None,
) -> RunInventory:
    """Read ``out`` on rank 0 and tell all ranks. Collective.

    Args:
        tensors: returns what a checkpoint of these settings holds, to compare with what is there.
        sources: names of the mixture's sources; None: the data is no mixture.

    Raises:
        ConfigError: the run there has other settings, another model or other data, has read from
            a source that is gone, or a file is not ours.
    """
    inventory = ranks.of_first(
        "opening out", lambda: _read(run_dir, config, fingerprint, run_lease, tensors, sources)
    )
    inventory["records"] = [
        Record(serial=serial, step=step, cursor=cursor, state=State(state))
        for serial, step, cursor, state in inventory["records"]
    ]
    return RunInventory(**inventory)


def _read(
    run_dir: RunDir,
    config: RunConfig,
    fingerprint: str,
    run_lease: RunLease,
    tensors: Callable[[], Tensors] | None,
    sources: Collection[str] | None,
) -> dict[str, Any]:
    store = ring_directory(run_dir, run_lease)
    torn = store.sweep()  # before the ring is scanned: see CheckpointDirectory.commit
    entries, damaged = store.entries()
    last = last_line(run_dir.metrics) or {}
    changed = {}
    if entries and config.epochs is not None:  # steps follow from the data: they are told first
        _data_changed(config, entries[-1].manifest.data_fingerprint, fingerprint)
    if (
        entries or damaged or last
    ):  # a start that failed before its first step has left its settings
        changed = _settings_changed(run_dir, config)
    buffers: list[str] = []
    if entries:
        newest = entries[-1].manifest
        buffers = [name.partition("/")[2] for name in newest.shapes if is_buffer(name)]
        if tensors is not None:
            known = {name: s for name, s in newest.shapes.items() if not is_buffer(name)}
            run_dir.refuse_other_tensors(known, tensors(), changed)
        changed |= _data_changed(config, newest.data_fingerprint, fingerprint)
    lines, length = read_journal(run_dir.journal)
    refuse_gone_sources(lines, sources)
    if entries:
        _refuse_lost_lines(run_dir, len(lines), entries[-1].manifest)
    serials = [0, *(entry.record.serial for entry in entries), *map(_serial_in, lines)]
    return {
        "journal": lines,
        "journal_bytes": length,
        "records": [
            [e.record.serial, e.record.step, e.record.cursor, e.record.state.value] for e in entries
        ],
        "damaged": damaged,
        "torn": torn,
        "last_metrics_step": step_of(last),
        "last_cursor": count_of(last, "cursor"),
        "metrics_bytes": run_dir.metrics.stat().st_size if run_dir.metrics.exists() else 0,
        "next_serial": max(serials) + 1 + len(damaged),
        "buffers": buffers,
        "crashes": [i.to_json() for i in unexplained(run_dir, lines, run_lease.number)],
        "changes": [
            _change(key, was, now, entries[-1].record.step if entries else 0).to_json()
            for key, (was, now) in changed.items()
        ],
    }


def _settings_changed(run_dir: RunDir, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The changed settings that may change; raises for those that may not."""
    try:
        changed = run_dir.settings_changed(config)
    except ConfigError:
        if not config.resume.allow_change:
            raise
        return {}  # damaged: the old settings are unknown, and the new ones were allowed
    run_dir.refuse_change(changed, config)
    return changed


def _change(key: str, was: Any, now: Any, step: int) -> Incident:
    most = 12 if key == "data" else 200  # a fingerprint is known by its beginning
    return Incident(
        kind="setting_changed",
        step=step,
        decision="go on with the new value",
        reason=f"{key}: was {str(was)[:most]}, now {str(now)[:most]}, as the command allows",
        detail={"key": key, "was": was, "now": now},
    )


def _refuse_lost_lines(run_dir: RunDir, num_lines: int, newest: Manifest) -> None:
    """Refuse a journal that lost acknowledged lines: the run would forget its skips."""
    if num_lines < newest.journal_lines:
        raise ConfigError(
            f"{run_dir.journal}: has {num_lines} whole lines, but had {newest.journal_lines} when "
            f"checkpoint {newest.serial} of step {newest.step} was saved: it was removed, cut or "
            "damaged. Put it back from a copy, or choose another out"
        )


def refuse_gone_sources(
    lines: Sequence[Mapping[str, Any]], sources: Collection[str] | None
) -> None:
    """Refuse a mixture without a source that was read, before anything is journalled or stored.

    Args:
        lines: the journal's.
        sources: names of those there are; None: no mixture.

    Raises:
        ConfigError: a source that the run has read from is gone.
    """
    if sources is None:
        return
    for line in lines:
        read = line["detail"]["weights"] if line["kind"] == "mixture" else ()
        if gone := next((name for name in read if name not in sources), None):
            raise ConfigError(
                f"data.sources: {gone!r} is missing, but this run has read from it; keep it, "
                "with weight 0 to stop reading it"
            )


def _serial_in(line: Mapping[str, Any]) -> int:
    """The highest checkpoint number in a journal line: no number is used twice."""
    return int(line["detail"].get("next_serial", 1)) - 1


def _data_changed(config: RunConfig, was: str, now: str) -> dict[str, tuple[Any, Any]]:
    """The data's fingerprint if it has changed; else None.

    Raises:
        ConfigError: it has changed, and that is not allowed.
    """
    if was == now:
        return {}
    if not is_allowed("data.path", config.resume):
        raise ConfigError(
            f"{_named(config.data)}: the corpus is not the one that out={config.out} was "
            f"trained on (fingerprint {was[:12]}, now {now[:12]}); positions would name other "
            "samples. Restore the corpus, choose another out, or add data.path to resume.allow: "
            f"'resume.allow=[{','.join([*config.resume.allow, 'data.path'])}]'"
            f"{unsteady_samples(config.data)}"
        )
    return {"data": (was, now)}


def _named(data: DataConfig) -> str:
    """The setting that names the corpus."""
    if data.sources is not None:
        return "data.sources"
    return f"data._target_={data._target_}" if data._target_ else f"data.path={data.path}"


def resume_from(
    inventory: RunInventory,
    run_dir: RunDir,
    ring: CheckpointRing,
    journal: Journal,
    state: TrainState,
) -> Resumed:
    """Load the newest checkpoint that can be used, or begin. Collective.

    Raises:
        CheckpointError: there were checkpoints, and none can be used.
    """
    history = journal.history
    left_behind = {record.serial for record in inventory.records if history.refuses(record)}
    usable = [record for record in inventory.records if record.serial not in left_behind]
    ring.adopt(usable, next_serial=inventory.next_serial)
    for sentence in inventory.damaged:
        journal.add_once(
            Incident(kind="checkpoint_damaged", step=0, decision="not to be used", reason=sentence)
        )
    # In memory and on disk: the marks of a mismatch may have come too late for either.
    unused = ring.inherit(
        last_incarnation(inventory.journal),
        is_refused=history.refuses,
        metrics_bytes=inventory.metrics_bytes,
        journal_lines=len(inventory.journal),
    )
    if not ring.records:
        return _begin(inventory, run_dir)
    restored = ring.restore(resume_order(ring.records))
    state.load_json(restored.train_state)
    state.baseline.hold(history.held)
    for record in inventory.records:
        if record.serial in left_behind:
            ring.remove(record)
    # The later of the checkpoint's save and the last rollback to it.
    rollback = history.last_rollback_to(restored.serial)
    metrics_bytes = rollback.metrics_bytes if rollback else restored.metrics_bytes
    if metrics_bytes != restored.metrics_bytes:
        state.unreported = None  # the metrics have it
    return Resumed(
        step=restored.step,
        metrics_bytes=metrics_bytes,
        known_discards=history.discards_from(restored.cursor),
        tier=restored.tier,
        unused=tuple(unused),
    )


def last_incarnation(journal: list[dict[str, Any]]) -> int:
    """The last incarnation that trained: only its snapshots agree with all journal lines.

    A node that was left out since then may hold older snapshots.
    """
    starts = [line["detail"] for line in journal if line["kind"] == "start"]
    number = starts[-1].get("incarnation") if starts else 0
    return number if type(number) is int else 0


def _begin(inventory: RunInventory, run_dir: RunDir) -> Resumed:
    if inventory.last_metrics_step or inventory.damaged:
        raise CheckpointError(
            f"out={run_dir.out}: the run had reached step {inventory.last_metrics_step}, but no "
            f"checkpoint in {run_dir.ring} can be used"
            + "".join(f"; {sentence}" for sentence in inventory.damaged)
            + ". Restore the ring from a copy, or choose another out to start over."
        )
    return Resumed(step=0, metrics_bytes=0, known_discards=[], is_fresh=True)


def settle_micro_size(
    wanted: int, lines: Sequence[Mapping[str, Any]]
) -> tuple[int, Incident | None]:
    """Halve ``batch.micro_size`` after each crash for want of memory. Pure.

    Not within the step: a rank that runs out of memory leaves the others in a collective that it
    does not enter, and NCCL would wait for ever. The global batch stays, so the result agrees to
    rounding.

    Args:
        wanted: ``batch.micro_size`` as configured; a changed value resets the halving.
        lines: the journal's, including crashes that this start has found.

    Returns:
        Sequences per micro-batch in this start, and the incident where the last start had more.
    """
    crashes = [
        line
        for line in lines
        if line.get("kind") == "crash" and line.get("detail", {}).get("cause") == MEMORY
    ]
    settled = [line["detail"] for line in lines if line.get("kind") == _MICRO_SIZE]
    last = settled[-1] if settled and settled[-1].get("wanted") == wanted else None
    if last is not None:
        size, seen = int(last["size"]), int(last["crashes"])
    else:
        size, seen = wanted, int(settled[-1]["crashes"]) if settled else 0
    if len(crashes) <= seen or size == 1:
        return size, None
    half = -(-size // 2)
    return half, Incident(
        kind=_MICRO_SIZE,
        step=int(crashes[-1].get("step", 0)),
        decision=f"batch.micro_size {size} -> {half}, the global batch stays",
        reason=str(crashes[-1].get("reason", "")),
        ranks=tuple(int(rank) for rank in crashes[-1].get("ranks", ())),
        detail={"wanted": wanted, "size": half, "crashes": len(crashes)},
    )


def settle_mixture(
    stream: SampleStream, journal: Journal, state: TrainState, *, reached: int
) -> Incident | None:
    """Give the stream its phases, and a new one where the weights have changed.

    The journal has a line for each change of weights, with the position from which it holds. What
    lies before that position keeps its weights, whatever checkpoint a later start loads.

    Args:
        reached: the position that the run had reached before, perhaps behind ``state.cursor``.

    Returns:
        The new phase for the journal, alike on all ranks; None where nothing changed.
    """
    order = stream.order
    if not isinstance(order, MixtureOrder):
        return None
    history = journal.history
    phases = [Phase(start=start, weights=weights) for start, weights in history.mixtures]
    wanted = _nonzero(order.wanted)
    incident = None
    if not phases or _nonzero(phases[-1].weights) != wanted:
        # Behind all skipped positions up to there, whether it found them or was told: they must
        # keep their samples. What it is told to skip further on it has not met yet.
        stops = [stop for begin, stop in history.ledger if begin < reached]
        start = max(state.cursor, history.known_stop, *stops) if phases else 0
        phases.append(Phase(start=start, weights=wanted))
        incident = _phase_incident(phases, state)
    order.load(phases)
    stream.forget()
    return incident


def _nonzero(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights without those of 0: a new source of weight 0 changes nothing."""
    return {name: weight for name, weight in sorted(weights.items()) if weight > 0}


def _phase_incident(phases: list[Phase], state: TrainState) -> Incident:
    newest = phases[-1]
    is_first = len(phases) == 1
    was = "" if is_first else f"; before, {describe_phase(phases[-2])}"
    return Incident(
        kind="mixture",
        step=state.updates,
        decision=f"from position {newest.start} on: {describe_phase(newest)}",
        reason=("data.sources" if is_first else "data.sources was changed") + was,
        detail={"start": newest.start, "weights": dict(newest.weights)},
    )


# Checks that the first steps after a resume equal the recorded ones.
#
# Steps after the newest checkpoint are computed again. If the machine repeats bits the lines must
# be equal; otherwise they must be close. A resume with wrong moments agrees on its first step,
# since the weights are right, and differs from the second on.

KIND = "resume"
# Tolerances without repeated bits (other ranks or device): nats, and a share of the norm.
_NEAR_LOSS, _NEAR_NORM = 0.02, 0.1
_MOST_STEPS = 1000
# Fields of a start's journal line on which the bits of a step depend.
_OF_EACH_START = ("incarnation", "lost", "idle_seconds", "start_seconds", "tier")
_SAME = ("world_size", "hosts", "parallel", "device", "repeats_bits", "settings", "torch")


def recomputed(run: Run) -> dict[int, Recorded]:
    """The recorded steps that this start computes again, by step. Collective.

    Only the metrics from before they are cut have them.
    """
    path, resumed = run.group.run_dir.metrics, run.resumed
    first = resumed.step + 1
    rows = run.ranks.of_first(
        "reading the metrics",
        lambda: (
            recorded_in(iter_lines(path, start=resumed.metrics_bytes), first, first + _MOST_STEPS)
            if resumed.step
            else []
        ),
    )
    return from_rows(rows)


def tested_before(run: Run, rows: Mapping[int, Recorded], start: Incident) -> bool | None:
    """Whether bits repeat here, as the previous start found; None if that does not apply now.

    It applies if the same supervisor has started the same command again on the same machines, and
    the previous start has trained: model, settings and machines are as it tested them, and the
    steps in ``rows`` are computed again and compared. Collective.

    Args:
        start: the line of this start, which the journal does not have yet.
    """
    since = _since_last_start(run)
    known = None
    if since and run.group.times.is_restart:
        before = since[0]
        is_same = all(
            before.detail.get(name) == value
            for name, value in start.detail.items()
            if name not in _OF_EACH_START
        )
        is_broken = any(line.detail.get("cause") == HARDWARE for line in since)
        if is_same and not is_broken and (rows or run.resumed.step > before.step):
            known = before.detail.get("repeats_bits")
    return known if run.ranks.sum([float(known is None)])[0] == 0 else None


def _since_last_start(run: Run) -> Sequence[Incident]:
    """The line of the start before this one, and those after it; empty where this is the first."""
    incidents = run.history.incidents
    starts = [at for at, line in enumerate(incidents) if line.kind == "start"]
    return incidents[starts[-1] :] if starts else []


def repeats_as_before(previous: Mapping[str, Any] | None, current: Mapping[str, Any]) -> bool:
    """Whether two starts compute the same bits, according to their journal lines."""
    if previous is None or not current.get("repeats_bits"):
        return False
    return all(previous.get(name) == current.get(name) for name in _SAME)


class ResumeCheck:
    """Compares each applied step with the recorded one; reports the first that differs.

    Args:
        rows: see :func:`recomputed`.
        start: the line of this start, which the journal does not have yet.
    """

    def __init__(self, run: Run, rows: Mapping[int, Recorded], start: Incident) -> None:
        since = _since_last_start(run)
        before = since[0].detail if since else None
        is_changed = any(line.kind == "setting_changed" for line in since)  # as allowed
        self._from = run.resumed.step
        self._rows = {} if is_changed else dict(rows)
        # Compared bit for bit.
        self._exactly = repeats_as_before(before, start.detail)
        self._report = run.written.report
        self.num_compared = 0

    def applied(self, line: MetricsLine) -> None:
        """Take one applied step."""
        row = self._rows.pop(line.step, None)
        if row is None:
            return
        if row.samples != tuple(line.samples) or row.learning_rate != line.lr:
            self._rows = {}  # not the same step: other samples or another rate
            return
        self.num_compared += 1
        if self._is_alike(row, line):
            return
        self._rows = {}
        how = "bit for bit" if self._exactly else "nearly"
        first = line.step == self._from + 1
        self._report(
            Incident(
                kind=KIND,
                step=line.step,
                decision="only reported: use an older checkpoint if the loss stays different",
                reason=f"step {line.step}, computed again after the resume at step {self._from}, "
                f"has loss {line.loss:.9g} and grad norm {line.grad_norm:.9g}; the recorded ones "
                f"are {row.loss:.9g} and {row.grad_norm:.9g}, and must be the same {how}: "
                + (
                    "the weights are not those that were saved"
                    if first
                    else f"{counted(self.num_compared - 1, 'step')} before it agreed, so the "
                    "weights were right: check moments, update counts and the schedule"
                ),
                samples=row.samples,
                detail={
                    "loss": json_float(line.loss),
                    "recorded_loss": json_float(row.loss),
                    "exactly": self._exactly,
                },
            )
        )

    def _is_alike(self, row: Recorded, line: MetricsLine) -> bool:
        if self._exactly:
            return (row.loss, row.grad_norm) == (line.loss, line.grad_norm)
        return abs(row.loss - line.loss) <= _NEAR_LOSS and abs(
            row.grad_norm - line.grad_norm
        ) <= _NEAR_NORM * max(row.grad_norm, 1e-12)
