"""A ring in an object store, or wherever an fsspec URL leads.

    URL/ring/000007-step-00000350/  rank-00000.bin ... manifest.json  CLEAN  COMMITTED
                                    run/journal.jsonl run/metrics.jsonl run/config.yaml
                                    run/files.json    sizes and digests of the three
    URL/incarnation/000003-5f0c.json    who writes there; the highest name does

The same names and bytes as in ``out``, so that any tool can copy them back. Object stores have
no rename and no append: what makes a checkpoint whole is ``COMMITTED``, put last, removed first.

They have no compare-and-swap that fsspec offers either. A writer therefore looks for a higher
claim just before it publishes or removes. What an older one can still do in the instant between
that look and its write: publish a whole, proven, older checkpoint of the same run under its own
name, which the newer one's next sweep removes. It never removes what is newer than its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.checkpoint.manifest import MOST_BYTES, FileFacts, Manifest, parse_manifest
from runner.checkpoint.remote_files import (
    PAUSES_SECONDS,
    RemoteFault,
    RemoteFiles,
    in_words,
)
from runner.checkpoint.store import (
    CLEAN,
    COMMITTED,
    MANIFEST,
    Entry,
    folder_name,
    parse_name,
)
from runner.error import CorruptCheckpoint
from runner.files import file_digest
from runner.policy.ring import Record, State
from runner.strict import whole

RUN_FILES = ("journal.jsonl", "metrics.jsonl", "config.yaml")
_FACTS = "run/files.json"
_SMALL_BYTES = 1 << 16  # of markers, claims and files.json
_CLAIM = re.compile(r"([0-9]{6,7})-([0-9a-f]{8,64})\.json")


class RemoteTaken(RemoteFault):
    """A newer writer, or another run, has the remote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who writes to a remote: ``number`` is the incarnation, ``token`` is its own."""

    number: int
    token: str

    @property
    def name(self) -> str:
        return f"{self.number:06d}-{self.token}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What lies at a remote.

    Whole clean checkpoints by serial, the highest serial of any folder, and the newest claim's
    number and run (0 and empty without one).
    """

    stored: list[Record]
    highest: int
    claim: int
    run: str


class RemoteRing:
    """Checkpoints and claims at a URL; ``files`` are what they are made of. Blocks, as these do.

    Args:
        pauses: seconds before each further attempt.

    Raises:
        ConfigError: as :class:`RemoteFiles`.
    """

    def __init__(self, url: str, *, pauses: tuple[float, ...] = PAUSES_SECONDS) -> None:
        self.files = RemoteFiles(url, pauses=pauses)
        self.url = self.files.url

    # -- reading --------------------------------------------------------------------------

    def look(self) -> Seen:
        """Raises RemoteFault: it cannot be read."""
        folders = {name: parse_name(name) for name in self.files.names("ring")}
        known = {name: found for name, found in folders.items() if found is not None}
        stored = [
            Record(serial=serial, step=step, cursor=0, state=State.clean)
            for name, (serial, step) in sorted(known.items())
            if {COMMITTED, CLEAN} <= set(self.files.names(f"ring/{name}"))
        ]
        claim = self._newest_claim()
        return Seen(
            stored=stored,
            highest=max((serial for serial, _ in known.values()), default=0),
            claim=claim.number if claim else 0,
            run=self._run_of(claim) if claim else "",
        )

    def entries(self, *, verify: bool) -> tuple[list[Entry], list[str]]:
        """Whole clean checkpoints by serial, and a sentence for each that is damaged.

        Args:
            verify: read every byte of them.

        Raises:
            RemoteFault: it cannot be read.
        """
        found: list[Entry] = []
        damaged: list[str] = []
        for record in self.look().stored:
            folder = folder_name(record)
            try:
                manifest, _ = self.manifest(folder)
                if verify:
                    self._verify_all(folder, manifest)
            except CorruptCheckpoint as error:
                damaged.append(str(error))
                continue
            record = replace(record, cursor=manifest.cursor)
            found.append(Entry(record=record, folder=Path(folder), manifest=manifest))
        return found, damaged

    def _verify_all(self, folder: str, manifest: Manifest) -> None:
        for name, facts in manifest.files.items():
            self.files.verify(f"ring/{folder}/{name}", facts)
        for name, facts in self.run_facts(folder).items():
            self.files.verify(f"ring/{folder}/run/{name}", facts)

    def manifest(self, folder: str) -> tuple[Manifest, bytes]:
        """A checkpoint's manifest and its bytes, checked as a local one.

        Raises:
            CorruptCheckpoint: it is damaged, or another's.
            RemoteFault: it cannot be read.
        """
        where = f"{self.url}/ring/{folder}"
        promised = self.files.read(f"ring/{folder}/{COMMITTED}", _SMALL_BYTES).strip()
        data = self.files.read(f"ring/{folder}/{MANIFEST}", MOST_BYTES)
        if promised != hashlib.sha256(data).hexdigest().encode():
            raise CorruptCheckpoint(f"{where}/{MANIFEST}: digest differs from {COMMITTED}")
        manifest = parse_manifest(data, Path(f"{folder}/{MANIFEST}"))
        if parse_name(folder) != (manifest.serial, manifest.step):
            raise CorruptCheckpoint(f"{where}: holds serial {manifest.serial}: moved or renamed")
        return manifest, data

    def run_facts(self, folder: str) -> dict[str, FileFacts]:
        """Sizes and digests of the run's own files as they were at the upload.

        Raises:
            CorruptCheckpoint, RemoteFault: as :meth:`manifest`.
        """
        name = f"ring/{folder}/{_FACTS}"
        try:
            tree = json.loads(self.files.read(name, _SMALL_BYTES))
            return {
                file: FileFacts(
                    num_bytes=whole(tree[file]["bytes"], "bytes"), sha256=str(tree[file]["sha256"])
                )
                for file in RUN_FILES
            }
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{self.url}/{name}: {in_words(error)}") from None

    # -- writing --------------------------------------------------------------------------

    def prepare(self, folder: str, committed: bytes) -> None:
        """Unpublish what stands under this name, unless it is the very same checkpoint.

        Raises:
            RemoteFault: it cannot be done.
        """
        there = self.files.names(f"ring/{folder}")
        if COMMITTED in there and committed != self.files.read(
            f"ring/{folder}/{COMMITTED}", _SMALL_BYTES
        ):
            self.files.delete(f"ring/{folder}/{COMMITTED}")

    def put_run_files(self, folder: str, out: Path, scratch: Path) -> None:
        """Copies of the run's own files, and what they should be.

        Whole lines only: the loop may be writing one. The journal comes first: metrics of
        steps that it does not know of are cut away by a restart, as after a crash.
        """
        facts = {}
        for name in RUN_FILES:
            copy = scratch / name
            facts[name] = _copy_whole_lines(out / name, copy)
            self.files.put(copy, f"ring/{folder}/run/{name}", facts[name])
        told = {n: {"bytes": f.num_bytes, "sha256": f.sha256} for n, f in facts.items()}
        self.files.put_bytes(f"ring/{folder}/{_FACTS}", json.dumps(told, indent=1).encode() + b"\n")

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
            found = parse_name(name)
            if found is not None and found[0] < below and found[0] not in kept:
                self.remove(name)

    # -- who writes there -----------------------------------------------------------------

    def claim(self, claim: Claim, run: str) -> None:
        """Become the one that writes there.

        Raises:
            RemoteTaken: another run's checkpoints are there, or a newer writer is.
            RemoteFault: it cannot be read or written.
        """
        newest = self._newest_claim()
        if newest is not None:
            owner = self._run_of(newest)
            if owner != run and self.look().stored:
                raise RemoteTaken(f"{self.url} holds the checkpoints of another run ({owner[:12]})")
            if owner == run and (newest.number, newest.token) > (claim.number, claim.token):
                raise RemoteTaken(_taken(self.url, newest))
        told = {"run": run, "host": os.uname().nodename, "time": time.time()}
        self.files.put_bytes(f"incarnation/{claim.name}", json.dumps(told).encode() + b"\n")
        for name in self.files.names("incarnation"):
            other = _parse_claim(name)
            if other is not None and (other.number < claim.number or self._is_foreign(other, run)):
                self.files.delete(f"incarnation/{name}")
        self.check(claim)

    def _is_foreign(self, claim: Claim, run: str) -> bool:
        return self._run_of(claim) != run

    def check(self, claim: Claim) -> None:
        """
        Raises:
            RemoteTaken: ``claim`` is not the newest any more.
        """
        newest = self._newest_claim()
        if newest is None or (newest.number, newest.token) > (claim.number, claim.token):
            raise RemoteTaken(_taken(self.url, newest))

    def _newest_claim(self) -> Claim | None:
        claims = [_parse_claim(name) for name in self.files.names("incarnation")]
        found = [claim for claim in claims if claim is not None]
        return max(found, key=lambda claim: (claim.number, claim.token), default=None)

    def _run_of(self, claim: Claim) -> str:
        try:
            told = json.loads(self.files.read(f"incarnation/{claim.name}", _SMALL_BYTES))
            return str(told["run"])
        except (LookupError, TypeError, ValueError, RecursionError, CorruptCheckpoint):
            return "damaged claim"


def folder_bytes(manifest: Manifest, facts: Mapping[str, FileFacts]) -> int:
    """What a download needs on the disk."""
    return sum(f.num_bytes for f in (*manifest.files.values(), *facts.values()))


def _taken(url: str, newest: Claim | None) -> str:
    if newest is None:
        return f"{url}: the claim of this run was removed"
    return f"{url}: incarnation {newest.number} has taken this run over there"


def _parse_claim(name: str) -> Claim | None:
    match = _CLAIM.fullmatch(name)
    return Claim(number=int(match[1]), token=match[2]) if match else None


def _copy_whole_lines(source: Path, target: Path) -> FileFacts:
    """Up to the last line end; nothing where there is no file."""
    size = 0
    if source.exists():
        shutil.copyfile(source, target)
        with target.open("rb+") as file:
            size = _end_of_last_line(file)
            file.truncate(size)
    else:
        target.write_bytes(b"")
    return FileFacts(num_bytes=size, sha256=file_digest(target))


def _end_of_last_line(file: Any) -> int:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _SMALL_BYTES)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return int(begin + found + 1)
        end = begin
    return 0
