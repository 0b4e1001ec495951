"""``python -m runner ring DIR|URL``: list, verify and export a run's checkpoints.

Only reads; a run may be going on meanwhile. Snapshots in this node's memory are listed as well. Of
a ``checkpoint.remote`` the whole clean ones are listed; to export one, copy it back first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from runner.check import url_problem
from runner.checkpoint.memory import notes_on
from runner.checkpoint.note import Note
from runner.checkpoint.shards import read_range, verify_files
from runner.checkpoint.store import Entry, RingStore
from runner.command.arguments import Parser
from runner.error import CheckpointError, ConfigError, CorruptCheckpoint
from runner.files import write_durably
from runner.policy.ring import State
from runner.rundir import RunDir
from runner.tier import node_folder

_SHARD_BYTES = 4 << 30


def ring_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit code: 0, or 4 when nothing sound is there."""
    options = _parser().parse_args(arguments)
    if "://" in options.run:
        return _remote_ring(options.run, verify=options.verify, export=options.export)
    folder = _ring_folder(Path(options.run))
    entries, damaged = RingStore(folder).entries()
    console = Console(soft_wrap=True)
    faults = _verify(entries) if options.verify else {}
    _print_table(console, entries, faults, verified=options.verify)
    for sentence in [*faults.values(), *damaged]:
        console.print(f"damaged: {sentence}", markup=False)
    for sentence in _snapshots(folder.parent):
        console.print(sentence, markup=False)
    if options.export:
        written = export(_best(entries, options.serial), Path(options.export))
        console.print(f"exported to {written}", markup=False)
    sound = [entry for entry in entries if entry.record.serial not in faults]
    return 0 if sound and not faults and not damaged else CheckpointError.exit_code


def _remote_ring(url: str, *, verify: bool, export: str | None) -> int:
    from runner.checkpoint.remote import RemoteRing

    if problem := url_problem(url):
        raise ConfigError(f"ring: the URL {problem}")
    if export:
        raise ConfigError(
            f"--export {export}: reads local checkpoints; copy a folder of {url}/ring into a "
            "directory and name that directory"
        )
    entries, damaged = RemoteRing(url).entries(verify=verify)
    console = Console(soft_wrap=True)
    _print_table(console, entries, {}, verified=verify)
    for sentence in damaged:
        console.print(f"damaged: {sentence}", markup=False)
    return 0 if entries and not damaged else CheckpointError.exit_code


def _parser() -> Parser:
    parser = Parser(prog="python -m runner ring", description=__doc__)
    parser.add_argument("run", help="the run's directory (out), its ring, or an URL")
    parser.add_argument("--verify", action="store_true", help="read every byte")
    parser.add_argument("--export", metavar="DIR", help="write safetensors weights")
    parser.add_argument(
        "--serial", type=int, help="which checkpoint to export; default: newest clean"
    )
    return parser


def _ring_folder(run: Path) -> Path:
    folder = run / "ring" if (run / "ring").is_dir() else run
    if not folder.is_dir():
        raise ConfigError(f"{run}: no such run directory")
    return folder


def _snapshots(out: Path) -> list[str]:
    """What of the run lies in this node's memory; which of it is clean only the run knows."""
    try:
        run_id = RunDir(out).known_identity()
    except OSError:  # somebody else's run
        return []
    if run_id is None:
        return []
    by_serial: dict[tuple[int, int], list[Note]] = defaultdict(list)
    for note in notes_on(node_folder(run_id, out)):
        by_serial[note.serial, note.incarnation].append(note)
    return [
        f"in this node's memory: serial {serial}, step {notes[0].step}, "
        f"{len({note.rank for note in notes})} of {notes[0].world_size} ranks, "
        f"{_size(sum(note.num_bytes for note in notes))}, incarnation {incarnation}"
        for (serial, incarnation), notes in sorted(by_serial.items())
    ]


def _verify(entries: Sequence[Entry]) -> dict[int, str]:
    """Serial to fault, for those that are not as they were written."""
    faults: dict[int, str] = {}
    for entry in entries:
        try:
            verify_files(entry, sorted(entry.manifest.files), finite=True)
        except CorruptCheckpoint as error:
            faults[entry.record.serial] = str(error)
    return faults


def _print_table(
    console: Console, entries: Sequence[Entry], faults: dict[int, str], *, verified: bool
) -> None:
    table = Table()
    for title in ("serial", "step", "cursor", "state", "ranks", "size", "verified"):
        table.add_column(title, justify="right" if title != "verified" else "left")
    for entry in entries:
        is_damaged = entry.record.serial in faults
        said = ("damaged" if is_damaged else "every byte") if verified else "not now"
        table.add_row(
            str(entry.record.serial),
            str(entry.record.step),
            str(entry.record.cursor),
            entry.record.state.value,
            str(entry.manifest.world_size),
            _size(entry.num_bytes),
            said,
        )
    console.print(table)


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _best(entries: Sequence[Entry], serial: int | None) -> Entry:
    if serial is not None:
        chosen = [entry for entry in entries if entry.record.serial == serial]
    else:
        chosen = [entry for entry in entries if entry.record.state is State.clean] or [
            entry for entry in entries if entry.record.state is State.committed
        ]
    if not chosen:
        raise CheckpointError(
            f"no checkpoint {'' if serial is None else serial} to export; there are: "
            + (", ".join(str(entry.record.serial) for entry in entries) or "none")
        )
    return chosen[-1]


def export(entry: Entry, folder: Path) -> Path:
    """Write the weights of a checkpoint as FP32 safetensors, verified first.

    Names are the model's own parameter names. One file, or several of at most 4 GiB with the
    index that Hugging Face loaders read.

    Raises:
        CorruptCheckpoint: the checkpoint is damaged; nothing is written.
    """
    verify_files(entry, sorted(entry.manifest.files), finite=True)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(name for name in entry.manifest.shapes if name.startswith("param/"))
    groups = _groups(entry, names)
    where: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = _file_name(number, len(groups))
        tensors = {name.removeprefix("param/"): _whole(entry, name) for name in group}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    if len(groups) > 1:
        index = {"metadata": {}, "weight_map": where}
        text = json.dumps(index, indent=1).encode()
        write_durably(folder / "model.safetensors.index.json", text)
    return folder


def _file_name(number: int, total: int) -> str:
    if total == 1:
        return "model.safetensors"
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def _groups(entry: Entry, names: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name in names:
        num_bytes = 4 * _numel(entry, name)
        if groups[-1] and size + num_bytes > _SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    return groups


def _numel(entry: Entry, name: str) -> int:
    return sum(piece.count for piece in entry.manifest.pieces[name])


def _whole(entry: Entry, name: str) -> torch.Tensor:
    return read_range(entry, name, 0, _numel(entry, name)).view(entry.manifest.shapes[name])
