"""One writer per run directory: incarnation numbers, taken at start, checked before each commit.

    out/incarnation/000003.json    the third owner's claim; made once, never changed
    out/incarnation/000003.ended   it has ended by itself
    out/incarnation/beat           a counter that the living owner keeps moving

The highest number owns ``out``. The clock of another machine proves nothing, and a
process that exists may hang: an owner is alive while its counter moves. Two facts make an older
incarnation harmless even between its last check and its next write. Its open journal and metrics
files are no longer the ones in ``out`` (:class:`runner.system.json_lines.LineFile` takes over by
rename). Its unfinished checkpoints were moved away before the new incarnation read the ring.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.config.schema import RunConfig
from runner.distributed.env import JobEnv
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError, Superseded
from runner.system.files import make_folder, naming, read_bounded, sync_directory
from runner.system.json_lines import read_object
from runner.system.process import is_alive, own_process

BEAT_SECONDS = 2.0
_CLAIM_NAME = re.compile(r"[0-9]{6,7}")
_LAST_NUMBER = 9_999_999
_CLAIM_BYTES = 1 << 20
# Errors of a file system without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class RunLease:
    """This incarnation's right to write; ``number`` counts the incarnations from 1."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self._folder = folder
        self._next = _claim_path(folder, number + 1)
        self._own = _claim_path(folder, number)
        self._claim: bytes | None = None
        self._beats = 0

    def check(self) -> None:
        """
        Raises:
            Superseded: a newer incarnation owns the run directory.
        """
        if self._next.exists():
            raise Superseded(
                f"{self._folder.parent}: incarnation {self.number + 1} has taken this run over "
                f"({_describe(_read_claim(self._next))}); incarnation {self.number} stops"
            )

    def beat(self) -> None:
        """Show that the incarnation is alive. Rank 0 calls it every :data:`BEAT_SECONDS`.

        Raises:
            Superseded: a newer incarnation owns the run directory, or the directory was replaced.
        """
        self._check_own()
        self._beats += 1
        temporary = self._folder / f"beat.{self.number}"
        temporary.write_text(f"{self.number} {self._beats}\n")
        self.check()
        temporary.rename(self._folder / "beat")

    def _check_own(self) -> None:
        """Check that the claim is unchanged, so that the run directory was not moved away.

        Saves would recreate the folders, and a restart would take them for a new run.
        """
        try:
            claim = read_bounded(self._own, _CLAIM_BYTES)
        except FileNotFoundError:
            claim = None
        self._claim = self._claim or claim
        if claim is None or claim != self._claim:
            raise Superseded(
                f"{self._folder.parent}: was removed or replaced while incarnation {self.number} "
                f"ran ({self._own.name} is {'gone' if claim is None else 'another'}); it stops"
            )

    def release(self) -> None:
        """Mark this incarnation as ended, so that the next one need not wait. Rank 0 only."""
        with contextlib.suppress(OSError):  # the next one finds out by itself
            _claim_path(self._folder, self.number).with_suffix(".ended").touch()


def acquire(
    folder: Path,
    launch: JobEnv,
    *,
    stale_seconds: float,
    take_over: bool,
    say: Callable[[str], None],
    after: int = 0,
) -> RunLease:
    """Become the owner. On rank 0 only.

    Args:
        after: the number to continue from in a directory without an owner.

    Raises:
        ConfigError: another launch is alive there.
    """
    make_folder(folder)
    while True:
        newest = newest_number(folder)
        if newest >= _LAST_NUMBER:
            raise ConfigError(
                f"{_claim_path(folder, newest)}: the number is impossibly high; remove the file, "
                "or choose another out"
            )
        if newest and not take_over:
            _wait_for_its_end(folder, newest, launch, stale_seconds, say)
        number = (newest or min(after, _LAST_NUMBER - 1)) + 1
        if _claim(folder, number, launch):
            return RunLease(folder, number)


def newest_number(folder: Path) -> int:
    """The number of the owner; 0 when there never was one."""
    return max(_numbers(folder), default=0)


def is_done(run: RunDir, config: RunConfig) -> bool:
    """Whether the last start of this very command ended the run, so that nothing is left to do."""
    summary = run.stored_summary() or {}
    last = (summary.get("status"), summary.get("incarnation"))
    return last == ("done", newest_number(run.incarnation)) and run.has_settings(config)


def oldest_number(folder: Path) -> int:
    """The number of the first owner; 1 when there never was one."""
    return min(_numbers(folder), default=1)


def _numbers(folder: Path) -> list[int]:
    names = [path.stem for path in folder.glob("[0-9]*.json")]
    return [int(name) for name in names if _CLAIM_NAME.fullmatch(name)]


def has_ended(folder: Path, number: int) -> bool:
    """Whether an incarnation ended by itself."""
    return _claim_path(folder, number).with_suffix(".ended").exists()


def _claim_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _claim(folder: Path, number: int, launch: JobEnv) -> bool:
    """Make the claim atomically; False when another process was faster."""
    claim = {
        "job": launch.job,
        "order": list(launch.order),
        "step": launch.step,
        "agents": list(launch.agents),
        "time": time.time(),
        **own_process(),
    }
    temporary = folder / f"claim-{claim['host']}-{claim['pid']}"
    with naming(temporary), temporary.open("w") as file:
        json.dump(claim, file)
        file.flush()
        os.fsync(file.fileno())
    path = _claim_path(folder, number)
    try:
        # A link fails when the name is taken, on NFS too, where O_EXCL has not always done so.
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not _create(path, temporary.read_bytes()):
            return False
    finally:
        temporary.unlink()
    sync_directory(folder)
    return True


def _create(path: Path, claim: bytes) -> bool:
    """Make a claim without hard links, as on object stores mounted with FUSE.

    Raises:
        ConfigError: two launches made the same file: this file system cannot ensure one writer.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with naming(path), os.fdopen(descriptor, "wb") as file:
        file.write(claim)
        file.flush()
        os.fsync(file.fileno())
    content = read_bounded(path, _CLAIM_BYTES)
    if content != claim:
        raise ConfigError(
            f"{path}: another start has also made this file: the file system has no hard links, "
            "and does not keep a name that was created exclusively. Put out on one that has either "
            "(NFS, Lustre, GPFS, a local disk), and copy checkpoints with checkpoint.remote"
        )
    return True


def _read_claim(path: Path) -> dict[str, Any]:
    """Read a claim; empty when the file is not one of ours."""
    claim = read_object(path, _CLAIM_BYTES)
    return claim if "job" in claim and _is_claim(claim) else {}


def _is_claim(claim: dict[str, Any]) -> bool:
    order, when = claim.get("order"), claim.get("time")
    fields = [claim.get(name) for name in ("host", "boot", "started", "step")]
    job, pid = claim.get("job"), claim.get("pid")
    agents = claim.get("agents")
    return (
        isinstance(agents, list)
        and all(isinstance(word, str) for word in [*fields, *agents, job or ""])
        and type(pid) is int
        and isinstance(order, list)
        and [type(number) for number in order] == [int, int]
        and isinstance(when, int | float)
        and 0 <= when < 1e11
    )


def _describe(claim: dict[str, Any]) -> str:
    if not claim:
        return "a damaged claim"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(claim.get("time", 0))))
    job = f", job {claim['job']}" if claim.get("job") else ""
    return f"host {claim.get('host')}, process {claim.get('pid')}{job}, since {when}"


def _is_own(claim: dict[str, Any]) -> bool:
    return bool(claim) and claim | own_process() == claim


def _wait_for_its_end(
    folder: Path, number: int, launch: JobEnv, stale_seconds: float, say: Callable[[str], None]
) -> None:
    """Return once incarnation ``number`` is known to be over, or ours may replace it."""
    claim = _read_claim(_claim_path(folder, number))
    if has_ended(folder, number):
        return
    # Claims are made atomically: an unreadable one was damaged, and its owner may be alive.
    if claim and launch.supersedes(
        claim["job"], tuple(claim["order"]), claim["step"], claim["agents"]
    ):
        return
    alive = is_alive(claim) if claim else None
    if alive is False:
        return
    if alive is None:
        say(
            f"out={folder.parent}: was last held by {_describe(claim)}; waiting up to "
            f"{stale_seconds:g} s for a sign of life"
        )
    if _still_beats(folder, stale_seconds):
        same = claim and launch.job is not None and launch.job == claim["job"]
        raise ConfigError(
            f"out={folder.parent}: is in use by a living run ({_describe(claim)})"
            + (", of which this launch has the name but is no restart" if same else "")
            + (
                ": this process itself. Call close() of its Guard or Ring first"
                if _is_own(claim)
                else ". End that one first, or choose another out; resume.take_over=true stops it "
                "and continues here"
            )
        )
    if alive:
        # The process exists, but has not moved for longer than the watchdog allows.
        say(
            f"out={folder.parent}: is held by {_describe(claim)}, which lives but gave no sign of "
            f"movement for {stale_seconds:g} s; taking the run over"
        )


def _still_beats(folder: Path, seconds: float) -> bool:
    first, limit = last_beat(folder), time.monotonic() + seconds
    while time.monotonic() < limit:
        time.sleep(min(0.2, seconds / 10))
        if last_beat(folder) != first:
            return True
    return False


def last_beat(folder: Path) -> str:
    """What changes while the owner lives; empty before it begins."""
    try:
        return read_bounded(folder / "beat", _CLAIM_BYTES).decode(errors="replace")
    except OSError:
        return ""
