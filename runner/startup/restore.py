"""The object store at a start: lists it, checks that it is this run's, and restores a lost run.

Rank 0 lists it and tells all ranks; all ranks fetch the files together.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.manifest import FileFacts, Manifest, by_kind
from runner.checkpoint.remote.retrying_files import RemoteFault
from runner.checkpoint.remote.store import RemoteListing, RemoteRing, WriterClaim, folder_bytes
from runner.checkpoint.remote.upload import Uploads
from runner.config.compose import from_yaml
from runner.config.schema import CheckpointConfig, RunConfig
from runner.distributed.agreement import Ranks, all_or_none_slowly
from runner.health.preemption import StopRequested
from runner.observe.journal import read_journal
from runner.policy.decision.history import History, Incident
from runner.policy.retention.records import Record, State, folder_name, resume_order
from runner.run_dir.paths import RunDir, is_allowed, settings_differing
from runner.system.error import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    RankError,
    RunnerError,
)
from runner.system.files import sync_directory
from runner.system.json_lines import iter_lines
from runner.system.process import in_thread
from runner.train.run import Run, ring_directory

_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """The remote of one run on one rank; ``seen`` lists what was there at the start.

    ``silence`` says why it could not be listed; empty if it could.
    """

    ring: RemoteRing
    seen: RemoteListing
    silence: str
    run_dir: RunDir

    def settings(self) -> dict[str, Any]:
        """Dotted keys of the settings of the newest whole checkpoint; empty without any.

        Raises:
            RemoteFault: the remote does not answer; to be started again.
        """
        silence: RemoteFault | None = None
        for record in sorted(self.seen.stored, key=lambda one: one.serial, reverse=True):
            try:
                return self.settings_of(folder_name(record))
            except CorruptCheckpoint:  # reported when it is restored
                continue
            except RemoteFault as error:
                silence = error
        if silence is not None:
            raise silence
        return {}

    def settings_of(self, folder: str) -> dict[str, Any]:
        """Dotted keys of the settings that a checkpoint was made with.

        Raises:
            CorruptCheckpoint: they are not what was uploaded.
            RemoteFault: the remote does not answer; to be started again.
        """
        facts = self.ring.run_facts(folder)
        name = f"ring/{folder}/run/config.yaml"
        data = self.ring.files.read(name, _CONFIG_BYTES)
        if hashlib.sha256(data).hexdigest() != facts["config.yaml"].sha256:
            raise CorruptCheckpoint(
                f"{self.ring.url}/{name}: digest differs: damaged at the remote"
            )
        return from_yaml(data.decode(errors="replace"), source=Path(name))

    def uploads(self, run: Run, settings: CheckpointConfig) -> Uploads:
        """Make the uploads; report a silent remote, and one that is ahead of this start. The
        journal must have its first line by now."""
        step, stored = run.resumed.step, self.seen.stored
        refused = {one.serial for one in stored if run.history.refuses(one)}
        ahead = [one for one in stored if one.step > step and one.serial not in refused]
        reason = f"{self.ring.url}: {self.silence}" if self.silence else ""
        for newest in ahead[-1:]:
            reason = f"{self.ring.url} has checkpoint {newest.serial} of step {newest.step}, and "
            reason += f"this start goes on from step {step}: what lies between is trained again"
        if reason:
            kind = "remote_ahead" if ahead else "remote_unreachable"
            decision = "go on; uploads are still tried"
            run.written.report(Incident(kind=kind, step=step, decision=decision, reason=reason))
        return Uploads(
            self.ring,
            ring_directory(run.group.run_dir, run.lease),
            run=run_name(self.run_dir) if run.ranks.rank == 0 else "",
            claim=WriterClaim(number=run.lease.number, token=secrets.token_hex(8)),
            settings=settings,
            stored=list(stored),
            tainted=refused,
            queue=run.ring.upload_queue,
            ranks=run.ranks,
            report=run.written.report,
            show=run.group.console.work,
        )


def open_remote(settings: CheckpointConfig, run_dir: RunDir, ranks: Ranks) -> RemoteRun | None:
    """List ``checkpoint.remote``; None where none is configured. Collective.

    Raises:
        ConfigError: its package is not installed, or another run's checkpoints are there.
    """
    url, seconds = settings.remote, settings.remote_wait_seconds
    if url is None:
        return None
    ring = ranks.all_or_none("opening checkpoint.remote", lambda: RemoteRing(url))
    # One that is silent may be waited for longer than a collective waits.
    looked = ranks.all_or_none_patiently(
        "looking at checkpoint.remote",
        lambda: _look(ring, run_dir, seconds) if ranks.rank == 0 else None,
    )
    seen, silence = ranks.from_first(looked)
    seen["stored"] = [
        Record(serial=serial, step=step, cursor=0, state=State(state))
        for serial, step, state in seen["stored"]
    ]
    return RemoteRun(ring, RemoteListing(**seen), silence, run_dir)


def _look(ring: RemoteRing, run_dir: RunDir, seconds: float) -> tuple[dict[str, Any], str]:
    """The listing as JSON, and why there is none."""
    silence = ""
    try:
        # A store that never answers must not block the start.
        listing = in_thread(ring.list_checkpoints, "remote").result(seconds)
    except (RemoteFault, TimeoutError) as error:
        silence = str(error) or f"no answer within {seconds:g} s"
        listing = RemoteListing(stored=[], highest=0, claim=0, run="")
    own = run_name(run_dir)
    if own and listing.stored and listing.run not in ("", own):  # a manual copy has no claim
        raise ConfigError(
            f"checkpoint.remote={ring.url}: has the checkpoints of a different run from "
            f"out={run_dir.out} (its name is {listing.run[:12]!r}, this one's {own[:12]!r}); give "
            "each run its own place"
        )
    stored = [[record.serial, record.step, record.state.value] for record in listing.stored]
    return asdict(listing) | {"stored": stored}, silence


def run_name(run_dir: RunDir) -> str:
    """The identity of a run over all incarnations: the digest of its journal's first line.

    Empty before there is one.
    """
    first = next(islice(iter_lines(run_dir.journal), 1), None)
    if first is None:
        return ""
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()


# -- restoring a run ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRun:
    """What was restored, newest first, and the incidents to report."""

    records: list[Record]
    incidents: list[Incident]


def is_lost(run_dir: RunDir, store: CheckpointDirectory) -> bool:
    """Whether ``out`` has no checkpoint that a start could load, judged by its manifests."""
    entries, _ = store.entries()
    history = _history(run_dir)
    usable = resume_order([entry.record for entry in entries])
    return not [record for record in usable if not history.refuses(record)]


def _history(run_dir: RunDir) -> History:
    history = History()
    for line in read_journal(run_dir.journal)[0]:
        history.add(Incident.from_json(line))
    return history


@dataclass(eq=False, slots=True)
class Restorer:
    """Copies the newest checkpoint back into ``out``, and the newest clean one, to go back to;
    the journal, the metrics and the settings as well where ``out`` has lost its journal.

    Args:
        show: called with the progress of this rank's share, in bytes.
        moved: called when any rank's download has progressed.
        is_asked_to_stop: whether this rank was asked to stop; a download then ends in
            :class:`StopRequested`, on all ranks alike.
    """

    remote: RemoteRun
    run_dir: RunDir
    store: CheckpointDirectory
    config: RunConfig
    fingerprint: str
    ranks: Ranks
    show: Callable[[str, int, int], None] = lambda what, done, total: None
    moved: Callable[[], None] = lambda: None
    is_asked_to_stop: Callable[[], bool] = lambda: False

    def restore_if_lost(self) -> RestoredRun | None:
        """:meth:`restore` where ``out`` has nothing to load. Collective.

        Raises:
            RankError: the remote could not be listed; a fresh start might throw a run away.
        """
        if not self.ranks.of_first("reading the ring", lambda: is_lost(self.run_dir, self.store)):
            return None
        remote = self.remote
        if remote.silence and not self.config.resume.without_remote:
            raise RankError(
                f"out={self.run_dir.out} has no checkpoint to resume from, and checkpoint.remote="
                f"{remote.ring.url} does not answer ({remote.silence}), so it may hold this "
                "run's: start again when it answers, or begin at step 0 with "
                "resume.without_remote=true"
            )
        return self.restore()

    def restore(self) -> RestoredRun | None:
        """Restore the newest checkpoint whose every byte is right; None without any. Collective.

        One that the remote does not give, however often it is asked, is left out like a damaged
        one: a store may refuse one object for ever.

        Raises:
            CheckpointError: there are checkpoints, and none can be used.
            ConfigError: they belong to other settings or other data.
            RankError: none can be used, but the remote only refused one; to be started again.
        """
        faults, taken, has_refused = list[Incident](), list[Record](), False
        states = {folder_name(record): record.state for record in self.remote.seen.stored}
        for folder in self.ranks.of_first("choosing a checkpoint", self._candidates):
            try:
                taken.append(self._take_back(folder, states[folder]))
            except (CorruptCheckpoint, RemoteFault) as error:
                has_refused |= isinstance(error, RemoteFault)
                faults.append(_left_out(error))
                continue
            if states[folder] is State.clean:
                break
        if taken:
            return RestoredRun(records=taken, incidents=[*faults, self._incident(taken[0])])
        if faults:
            damage = "; ".join(incident.reason for incident in faults)
            told = (
                f"no checkpoint in {self.run_dir.ring} can be loaded, and none at "
                f"checkpoint.remote={self.remote.ring.url}: {damage}"
            )
            if has_refused:
                raise RankError(f"{told}; start again when it answers")
            raise CheckpointError(told)
        return None

    def _candidates(self) -> list[str]:
        history = _history(self.run_dir)
        newest_first = sorted(self.remote.seen.stored, key=lambda r: r.serial, reverse=True)
        return [folder_name(r) for r in newest_first if not history.refuses(r)]

    def _take_back(self, folder: str, state: State) -> Record:
        ranks = self.ranks
        fetched: tuple[Manifest, bytes] = ranks.all_or_none(
            "reading the remote", lambda: self.remote.ring.manifest(folder)
        )
        manifest, data = fetched
        facts = ranks.of_first("preparing the download", lambda: self._prepare(folder, manifest))
        of_run = {name: FileFacts.from_json(tree) for name, tree in facts.items()}
        # It may take longer than a collective may, and longer on some ranks than on others.
        serial = all_or_none_slowly(
            ranks,
            "downloading",
            lambda tell: self._fetch(folder, manifest, of_run, tell),
            moved=self.moved,
            show=self.show,
            is_asked_to_stop=self.is_asked_to_stop,
        )
        if serial is None:
            raise StopRequested
        ranks.all_or_none(
            "taking the run back",
            lambda: self.store.take_back(manifest, data, state) if ranks.rank == 0 else None,
        )
        return Record(
            serial=manifest.serial, step=manifest.step, cursor=manifest.cursor, state=state
        )

    def _prepare(self, folder: str, manifest: Manifest) -> dict[str, Any]:
        """Refuse what belongs to another run or does not fit; which of its own files to fetch."""
        ring = self.remote.ring
        facts = ring.run_facts(folder)
        self._refuse_others(folder, manifest)
        needed = folder_bytes(manifest, facts)
        free = shutil.disk_usage(self.run_dir.out).free
        if needed > free:
            raise ConfigError(
                f"out={self.run_dir.out}: {needed} bytes are needed to take the run back from "
                f"{ring.url}, {free} are free; free space or choose another out"
            )
        writing = self.store.writing_folder(manifest.serial)
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        is_due = not self.run_dir.journal.exists()
        return {name: one.to_json() for name, one in facts.items()} if is_due else {}

    def _refuse_others(self, folder: str, manifest: Manifest) -> None:
        if self.config.resume.allow_change:
            return
        stored = self.remote.settings_of(folder)
        place = f"checkpoint.remote={self.remote.ring.url}"
        self.run_dir.refuse_change(settings_differing(stored, self.config), self.config, place)
        other_data = manifest.data_fingerprint != self.fingerprint
        if other_data and not is_allowed("data.path", self.config.resume):
            raise ConfigError(
                f"{place}: its run was trained on another corpus than data.path="
                f"{self.config.data.path} (fingerprint {manifest.data_fingerprint[:12]}, now "
                f"{self.fingerprint[:12]}). Restore the corpus, choose another remote, or "
                "resume.allow=[data.path]"
            )

    def _fetch(
        self,
        folder: str,
        manifest: Manifest,
        of_run: Mapping[str, FileFacts],
        tell: Callable[[str, int, int], None],
    ) -> int:
        """Fetch this rank's share of the files, rank 0 the run's own as well; their serial.
        ``tell`` may raise, to end it."""
        writing, out = self.store.writing_folder(manifest.serial), self.run_dir.out
        shares = by_kind(manifest.files)[self.ranks.rank :: self.ranks.world_size]
        wanted = [(name, writing / name, manifest.files[name]) for name in shares]
        if self.ranks.rank == 0:
            # The journal last of them, so that it marks them as whole.
            own = sorted(of_run, key=lambda name: name == self.run_dir.journal.name)
            wanted[:0] = [(f"run/{one}", out / f"{one}.fetched", of_run[one]) for one in own]
        due, fetched = sum(facts.num_bytes for _, _, facts in wanted), 0

        def moved(count: int) -> None:
            nonlocal fetched
            fetched += count
            tell("taking back", min(fetched, due), due)

        files = self.remote.ring.files
        before, files.moved = files.moved, moved
        try:
            for name, target, facts in wanted:
                files.fetch(f"ring/{folder}/{name}", target, facts)
                if target.suffix == ".fetched":
                    target.rename(target.with_suffix(""))
        finally:
            files.moved = before  # what is read next, of another checkpoint, is no part of this
        sync_directory(out)
        return manifest.serial

    def _incident(self, record: Record) -> Incident:
        return Incident(
            kind="restored",
            step=record.step,
            decision=f"go on from checkpoint {record.serial} of step {record.step}",
            reason=f"out had no usable checkpoint; taken back from {self.remote.ring.url}, every "
            "byte verified",
            detail={"serial": record.serial},
        )


def _left_out(error: RunnerError) -> Incident:
    kind = "checkpoint_damaged" if isinstance(error, CorruptCheckpoint) else "remote_unreachable"
    return Incident(kind=kind, step=0, decision="an older one is used", reason=str(error))


def with_highest(next_serial: int, remote: RemoteRun | None) -> int:
    """The next serial, higher than any that the remote knows."""
    return max(next_serial, remote.seen.highest + 1) if remote else next_serial
