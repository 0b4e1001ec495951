"""A ring in an object store, or wherever an fsspec URL leads.

    URL/ring/000007-step-00000350/  rank-00000.bin ... manifest.json  CLEAN  COMMITTED
                                    run/journal.jsonl run/metrics.jsonl run/config.yaml
                                    run/files.json    sizes and digests of the three
    URL/incarnation/000003.json         who writes there; the highest name does

The same names and bytes as in ``out``, so that any tool can copy them back. Object stores have
no rename and no append: what makes a checkpoint whole is ``COMMITTED``, put last, removed first.

A claim takes the next name, which most stores can create only if it does not exist
(``If-None-Match`` on S3): of two that claim at once one gets it, and the other learns it. Where a
store cannot, claims are ``000003-5f0c.json`` with a token of their own; each looks once more
after writing its own, and the highest token wins.

The checkpoints' own writes are not conditional. A writer therefore looks for a higher
claim just before it publishes or removes. An older one can still do this in the instant between
that look and its write: publish a whole, proven, older checkpoint of the same run under its own
name, which the newer one's next sweep removes. It never removes what is newer than its own.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from runner.checkpoint.disk.directory import CLEAN, COMMITTED, MANIFEST, Entry, checked_manifest
from runner.checkpoint.manifest import MOST_BYTES, FileFacts, Manifest
from runner.checkpoint.remote.retrying_files import (
    PAUSES_SECONDS,
    RemoteFault,
    RemoteFiles,
    message_of,
)
from runner.policy.retention.records import Record, State, folder_name, parse_name
from runner.system.error import CorruptCheckpoint
from runner.system.files import file_digest
from runner.system.parsing import json_text, whole

RUN_FILES = ("journal.jsonl", "metrics.jsonl", "config.yaml")
_FACTS = "run/files.json"
_SMALL_BYTES = 1 << 16  # of markers, claims and files.json
_CLAIM = re.compile(r"([0-9]{6,7})(?:-([0-9a-f]{8,64}))?\.json")
_MOST_TRIES = 20  # attempts to get a name while others take theirs
_DAMAGED = "damaged claim"  # in place of the run of one that cannot be read


class RemoteTaken(RemoteFault):
    """A newer writer, or another run, owns the remote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterClaim:
    """A claim to write to a remote: ``number`` is the incarnation, ``token`` is its own."""

    number: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """An existing claim. ``place`` is the number in its name: the incarnation's, or a
    higher one where another run has left claims behind."""

    place: int
    number: int
    token: str
    run: str
    whose: str

    def is_of(self, claim: WriterClaim) -> bool:
        return (self.number, self.token) == (claim.number, claim.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteListing:
    """The contents of a remote.

    Whole checkpoints by serial, the highest serial of any folder, and the newest claim's
    number and run (0 and empty without one).
    """

    stored: list[Record]
    highest: int
    claim: int
    run: str


class RemoteRing:
    """Checkpoints and claims at a URL, made of ``files``. Blocks, as these do.

    Args:
        pauses: seconds before each further attempt.

    Raises:
        ConfigError: as :class:`RemoteFiles`.
    """

    def __init__(self, url: str, *, pauses: tuple[float, ...] = PAUSES_SECONDS) -> None:
        self.files = RemoteFiles(url, pauses=pauses)
        self.url = self.files.url
        self._is_exclusive: bool | None = None  # not asked yet

    # -- reading --------------------------------------------------------------------------

    def list_checkpoints(self) -> RemoteListing:
        """List the remote.

        Raises:
            RemoteFault: it cannot be read.
        """
        folders = {name: parse_name(name) for name in self.files.names("ring")}
        known = {name: manifest for name, manifest in folders.items() if manifest is not None}
        stored = []
        for name, (serial, step) in sorted(known.items()):
            marks = set(self.files.names(f"ring/{name}"))
            state = State.clean if CLEAN in marks else State.committed
            if COMMITTED in marks:
                stored.append(Record(serial=serial, step=step, cursor=0, state=state))
        claim = self._newest_claim()
        return RemoteListing(
            stored=stored,
            highest=max((serial for serial, _ in known.values()), default=0),
            claim=claim.number if claim else 0,
            run=claim.run if claim else "",
        )

    def entries(self, *, verify: bool) -> tuple[list[Entry], list[str]]:
        """Whole checkpoints by serial, and a sentence for each that is damaged.

        Args:
            verify: read every byte of them.

        Raises:
            RemoteFault: it cannot be read.
        """
        sound: list[Entry] = []
        damaged: list[str] = []
        for record in self.list_checkpoints().stored:
            folder = folder_name(record)
            try:
                manifest, _ = self.manifest(folder)
                if verify:
                    of_run = {f"run/{name}": f for name, f in self.run_facts(folder).items()}
                    for name, facts in {**manifest.files, **of_run}.items():
                        self.files.verify(f"ring/{folder}/{name}", facts)
            except CorruptCheckpoint as error:
                damaged.append(str(error))
                continue
            found = replace(record, cursor=manifest.cursor)
            sound.append(Entry(record=found, folder=Path(folder), manifest=manifest))
        return sound, damaged

    def manifest(self, folder: str) -> tuple[Manifest, bytes]:
        """A checkpoint's manifest and its bytes, checked like a local one.

        Raises:
            CorruptCheckpoint: it is damaged, or belongs to another checkpoint.
            RemoteFault: it cannot be read.
        """
        promised = self.files.read(f"ring/{folder}/{COMMITTED}", _SMALL_BYTES).strip()
        data = self.files.read(f"ring/{folder}/{MANIFEST}", MOST_BYTES)
        return checked_manifest(data, promised, f"{self.url}/ring/{folder}"), data

    def run_facts(self, folder: str) -> dict[str, FileFacts]:
        """Sizes and digests of the run's own files as they were at the upload.

        Raises:
            CorruptCheckpoint, RemoteFault: as :meth:`manifest`.
        """
        name = f"ring/{folder}/{_FACTS}"
        try:
            tree = json.loads(self.files.read(name, _SMALL_BYTES))
            return {file: FileFacts.from_json(tree[file]) for file in RUN_FILES}
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{self.url}/{name}: {message_of(error)}") from None

    # -- writing --------------------------------------------------------------------------

    def prepare(self, folder: str, committed: bytes) -> None:
        """Unpublish a checkpoint of this name, unless it is the same one.

        Raises:
            RemoteFault: it cannot be done.
        """
        existing = self.files.names(f"ring/{folder}")
        if COMMITTED in existing and committed != self.files.read(
            f"ring/{folder}/{COMMITTED}", _SMALL_BYTES
        ):
            self.files.delete(f"ring/{folder}/{COMMITTED}")

    def put_run_files(self, folder: str, out: Path, scratch: Path) -> None:
        """Upload copies of the run's own files, with their sizes and digests.

        Whole lines only: the loop may be writing one. The journal comes first: metrics of
        steps that it does not know of are cut away by a restart, as after a crash.
        """
        facts = {}
        for name in RUN_FILES:
            copied = _copy_whole_lines(out / name, scratch / name)
            self.files.put(scratch / name, f"ring/{folder}/run/{name}", copied)
            facts[name] = copied.to_json()
        data = json_text(facts, indent=1).encode() + b"\n"
        self.files.put_bytes(f"ring/{folder}/{_FACTS}", data)

    def remove(self, folder: str) -> None:
        """Delete a checkpoint, its marker first."""
        names = self.files.names(f"ring/{folder}")
        inner = [f"run/{name}" for name in self.files.names(f"ring/{folder}/run")]
        for name in sorted([*names, *inner], key=lambda name: name != COMMITTED):
            if name != "run":
                self.files.delete(f"ring/{folder}/{name}")
        self.files.delete_folder(f"ring/{folder}")

    def sweep(self, kept: set[int], *, below: int) -> None:
        """Remove every checkpoint, whole or not, under serial ``below`` but the ``kept``."""
        for name in self.files.names("ring"):
            parsed = parse_name(name)
            if parsed is not None and parsed[0] < below and parsed[0] not in kept:
                self.remove(name)

    # -- claims ---------------------------------------------------------------------------

    def claim(self, claim: WriterClaim, run: str) -> None:
        """Claim the right to write to the remote.

        Raises:
            RemoteTaken: another run's checkpoints or a newer writer are there, or another
                writer was faster.
            RemoteFault: it cannot be read or written.
        """
        newest = self._newest_claim()
        if newest is not None and newest.run != run and self.list_checkpoints().stored:
            raise RemoteTaken(
                f"{self.url} has the checkpoints of a different run ({newest.run[:12]})"
            )
        if newest is None or not newest.is_of(claim):
            self._refuse_older(newest, claim, run)
            if self._is_exclusive is None:
                self._is_exclusive = self.files.is_exclusive(f"incarnation/probe-{claim.token}")
            self._take_name(newest, claim, run, is_exclusive=self._is_exclusive)
        self._remove_older_claims(claim)

    def _refuse_older(self, newest: _Standing | None, claim: WriterClaim, run: str) -> None:
        if newest is not None and newest.run == run and newest.number >= claim.number:
            raise RemoteTaken(_taken(self.url, newest))

    def _take_name(
        self, newest: _Standing | None, claim: WriterClaim, run: str, *, is_exclusive: bool
    ) -> None:
        content = {
            "run": run,
            "incarnation": claim.number,
            "token": claim.token,
            "host": os.uname().nodename,
            "time": time.time(),
        }
        data = json_text(content).encode() + b"\n"
        for _ in range(_MOST_TRIES):
            place = max(claim.number, newest.place + 1 if newest else 0)
            if not is_exclusive:
                self.files.put_bytes(f"incarnation/{place:06d}-{claim.token}.json", data)
                return
            if self.files.create(f"incarnation/{place:06d}.json", data):
                return
            newest = self._newest_claim()
            if newest is not None and newest.run != run:
                raise RemoteTaken(f"{self.url}: another run was faster ({newest.whose})")
            self._refuse_older(newest, claim, run)
        raise RemoteTaken(f"{self.url}: others claim it all the time")

    def _remove_older_claims(self, claim: WriterClaim) -> None:
        own = self.check(claim)
        for name in self.files.names("incarnation"):
            match = _CLAIM.fullmatch(name)
            if match and int(match[1]) < own.place:
                self.files.delete(f"incarnation/{name}")

    def check(self, claim: WriterClaim) -> _Standing:
        """Read the newest claim, which must be ``claim``.

        Raises:
            RemoteTaken: ``claim`` is no longer the newest.
        """
        newest = self._newest_claim()
        if newest is None or not newest.is_of(claim):
            raise RemoteTaken(_taken(self.url, newest))
        return newest

    def _newest_claim(self) -> _Standing | None:
        standing = self._standing_claim()
        # Removed by a newer one since it was listed, or read in the midst of a write: look again.
        is_odd = standing is not None and standing.run == _DAMAGED
        return self._standing_claim() if is_odd else standing

    def _standing_claim(self) -> _Standing | None:
        claims = [
            match for match in map(_CLAIM.fullmatch, self.files.names("incarnation")) if match
        ]
        newest = max(claims, key=lambda match: (int(match[1]), match[2] or ""), default=None)
        return self._read_claim(newest) if newest else None

    def _read_claim(self, name: re.Match[str]) -> _Standing:
        place = int(name[1])
        damaged = _Standing(
            place=place, number=place, token=name[2] or "", run=_DAMAGED, whose="a damaged claim"
        )
        try:
            claim = json.loads(self.files.read(f"incarnation/{name[0]}", _SMALL_BYTES))
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(claim["time"])))
            return replace(
                damaged,
                number=whole(claim["incarnation"], "incarnation"),
                token=str(claim["token"]),
                run=str(claim["run"]),
                whose=f"host {str(claim['host'])[:64]}, since {when}",
            )
        except (LookupError, TypeError, ValueError, RecursionError, OverflowError):
            return damaged
        except CorruptCheckpoint:  # too large, or removed in the meantime
            return damaged


def folder_bytes(manifest: Manifest, facts: Mapping[str, FileFacts]) -> int:
    """Bytes that a download needs on the disk."""
    return sum(f.num_bytes for f in (*manifest.files.values(), *facts.values()))


def _taken(url: str, newest: _Standing | None) -> str:
    if newest is None:
        return f"{url}: the claim of this run was removed"
    return f"{url}: incarnation {newest.number} has taken this run over there ({newest.whose})"


def _copy_whole_lines(source: Path, target: Path) -> FileFacts:
    """Copy a file up to its last line end; nothing if it does not exist."""
    size = 0
    target.touch()
    if source.exists() and shutil.copyfile(source, target).stat().st_size:
        with target.open("rb+") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                size = mapped.rfind(b"\n") + 1
            file.truncate(size)
    return FileFacts(num_bytes=size, sha256=file_digest(target))
