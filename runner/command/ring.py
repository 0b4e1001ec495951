"""``python -m runner ring DIR|URL``: lists, verifies and exports a run's checkpoints.

Only reads; the run may be active. Snapshots in this node's memory are listed as well. Of
a ``checkpoint.remote`` it lists the whole ones; to export one, copy it back first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runner.checkpoint.disk.directory import MOST_LISTINGS, CheckpointDirectory, Entry
from runner.checkpoint.disk.shards import verify_files
from runner.checkpoint.memory.snapshot import SnapshotHeader, headers_on
from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.command.export import export_run, ring_folder
from runner.config.validate import url_problem
from runner.run_dir.paths import RunDir
from runner.startup.shared_memory import node_folder
from runner.system.error import CheckpointError, ConfigError, CorruptCheckpoint, RetiredCheckpoint
from runner.system.units import format_bytes


def ring_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit code: 0, or 4 if a checkpoint is damaged or none is there."""
    parser = Parser("ring", __doc__)
    parser.add_argument("run", help="the run's directory (out), its ring, or an URL")
    parser.flag("--verify", "read every byte")
    parser.add_argument("--export", metavar="DIR", help="as the command export")
    words = "which checkpoint to export; default: the newest proven one"
    parser.add_argument("--serial", type=int, help=words)
    options = parser.parse_args(arguments)
    is_remote = "://" in options.run
    if is_remote and options.export:
        raise ConfigError(
            f"--export {options.export}: reads local checkpoints; copy a folder of "
            f"{options.run}/ring into a directory and name that directory"
        )
    listed = _remote if is_remote else _local
    entries, damaged, faults = listed(options.run, verify=options.verify)
    sentences = [f"damaged: {sentence}" for sentence in [*faults.values(), *damaged]]
    if not is_remote:
        sentences += _snapshots(ring_folder(Path(options.run)).parent)
    console = Console(soft_wrap=True)
    console.print(_table(entries, faults, verified=options.verify))
    for sentence in sentences:
        console.print(sentence, markup=False)
    if options.export:
        for sentence in export_run(Path(options.run), Path(options.export), serial=options.serial):
            console.print(sentence, markup=False)
    intact = [entry for entry in entries if entry.record.serial not in faults]
    return 0 if intact and not faults and not damaged else CheckpointError.exit_code


# The checkpoints, sentences about damaged manifests, and the other faults, by serial.
Listed = tuple[list[Entry], list[str], dict[int, str]]


def _remote(url: str, *, verify: bool) -> Listed:
    from runner.checkpoint.remote.store import RemoteRing

    if problem := url_problem(url):
        raise ConfigError(f"ring: the URL {problem}")
    return *RemoteRing(url).entries(verify=verify), {}


def _snapshots(out: Path) -> list[str]:
    """The run's snapshots in this node's memory; only the run knows which are clean."""
    try:
        run_id = RunDir(out).known_identity()
    except OSError:  # another user's run
        return []
    if run_id is None:
        return []
    by_serial: dict[tuple[int, int], list[SnapshotHeader]] = defaultdict(list)
    for header in headers_on(node_folder(run_id, out)):
        by_serial[header.serial, header.incarnation].append(header)
    return [
        f"in this node's memory: serial {serial}, step {headers[0].step}, "
        f"{len({header.rank for header in headers})} of {headers[0].world_size} ranks, "
        f"{format_bytes(sum(header.num_bytes for header in headers))}, incarnation {incarnation}"
        for (serial, incarnation), headers in sorted(by_serial.items())
    ]


def _local(run: str, *, verify: bool) -> Listed:
    """A living run retires checkpoints meanwhile: those are left out."""
    store = CheckpointDirectory(ring_folder(Path(run)))
    checked: dict[int, str] = {}
    for _ in range(MOST_LISTINGS):
        entries, damaged = store.entries()
        new = [entry for entry in entries if entry.record.serial not in checked]
        if not verify or not new:
            break
        checked |= _verify(new)
    if verify:
        entries = [entry for entry in entries if entry.record.serial in checked]
    return entries, damaged, {serial: fault for serial, fault in checked.items() if fault}


def _verify(entries: Sequence[Entry]) -> dict[int, str]:
    """Serial to fault ("": none) of each checkpoint that is still there."""
    faults: dict[int, str] = {}
    with Bar("verifying", sum(entry.num_bytes for entry in entries)) as bar:
        for entry in entries:
            try:
                verify_files(entry, sorted(entry.manifest.files), finite=True, moved=bar.add)
                faults[entry.record.serial] = ""
            except RetiredCheckpoint:
                continue
            except CorruptCheckpoint as error:
                faults[entry.record.serial] = str(error)
    return faults


def _table(entries: Sequence[Entry], faults: Mapping[int, str], *, verified: bool) -> Table:
    table = Table()
    for title in ("serial", "step", "cursor", "state", "ranks", "size", "verified"):
        table.add_column(title, justify="right" if title != "verified" else "left")
    for entry in entries:
        is_damaged = entry.record.serial in faults
        verification = ("damaged" if is_damaged else "every byte") if verified else "not now"
        record = entry.record
        numbers = map(str, (record.serial, record.step, record.cursor))
        ranks, size = str(entry.manifest.world_size), format_bytes(entry.num_bytes)
        table.add_row(*numbers, record.state.value, ranks, size, verification)
    return table
