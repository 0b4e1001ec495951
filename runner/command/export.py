"""``python -m runner export OUT DIR``: writes a run's weights as safetensors.

``--format hf`` writes a folder for ``AutoModelForCausalLM.from_pretrained``. Takes the newest
proven (clean) checkpoint; where that is not the last one it says why. Only reads OUT; a run
may be going on meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from runner.checkpoint.disk.directory import CheckpointDirectory, Entry, again_while_retired
from runner.checkpoint.disk.shards import ShardReader, verify_files
from runner.checkpoint.elements import dtype_of
from runner.checkpoint.state_digest import digest_of_sums, is_whole, state_digest
from runner.checkpoint.tensor_sums import Summing
from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.config.schema import EvalConfig, Goal
from runner.engine.buffers import SAVED
from runner.policy.retention.records import State
from runner.run_dir.paths import RunDir
from runner.system.error import CheckpointError, ConfigError, CorruptCheckpoint, RetiredCheckpoint
from runner.system.files import write_durably
from runner.system.json_lines import iter_lines, step_of
from runner.tools.report.markup import plain

_SHARD_BYTES = 4 << 30
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MOST_CHARACTERS = 500
_BEST = "best"
# A parameter's whole value in FP32, by the name it has in the checkpoint.
Read = Callable[[str], torch.Tensor]
PARAM = "param/"
AVERAGE = "ema/"


# -- which tensors -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor to write; ``make`` gives it in FP32, or a buffer in its own type.

    ``source``: a tensor of the checkpoint. ``dtype``: it is written in it; None: in the layout's.
    """

    shape: tuple[int, ...]
    source: str = ""
    make: Callable[[Read, str], torch.Tensor] = lambda read, source: read(source)
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of an export.

    Args:
        stem: of the weights' file names, ``model`` for ``model.safetensors``.
        tensors: by name.
        dtype: they are written in it.
        finish: writes further files into the folder; returns notes for the user.
    """

    stem: str
    tensors: Mapping[str, Output]
    dtype: torch.dtype
    finish: Callable[[Path], Sequence[str]]

    def dtype_of(self, name: str) -> torch.dtype:
        """The type in which a tensor is written."""
        return self.tensors[name].dtype or self.dtype


LayoutOf = Callable[[Entry], Layout]


def shapes_in(entry: Entry) -> dict[str, tuple[int, ...]]:
    """Whole shapes of a checkpoint's parameters, by name and in its order."""
    return {
        name.removeprefix(PARAM): shape
        for name, shape in sorted(entry.manifest.shapes.items())
        if name.startswith(PARAM)
    }


def buffers_in(entry: Entry) -> dict[str, Output]:
    """The buffers of a checkpoint that a ``state_dict`` has, in their own types."""
    prefix = f"{SAVED}/"
    return {
        name.removeprefix(prefix): Output(
            shape=shape,
            source=name.removeprefix(prefix),
            dtype=dtype_of(entry.manifest.dtype(name)),
        )
        for name, shape in sorted(entry.manifest.shapes.items())
        if name.startswith(prefix)
    }


def has_average(entry: Entry) -> bool:
    """Whether an average of the weights was kept (``optim.ema``), and has begun."""
    is_there = any(name.startswith(AVERAGE) for name in entry.manifest.shapes)
    return is_there and any(entry.manifest.update_counts.values())


def exported_name(entry: Entry, name: str) -> str:
    """The tensor that is exported for a parameter, its average where there is one, or for a
    buffer."""
    if (buffer := f"{SAVED}/{name}") in entry.manifest.shapes:
        return buffer
    average = f"{AVERAGE}{name}"
    is_averaged = has_average(entry) and average in entry.manifest.shapes
    return average if is_averaged else f"{PARAM}{name}"


def plain_layout(entry: Entry, *, dtype: torch.dtype = torch.float32) -> Layout:
    """The model's own parameter names, and no other file."""
    return Layout(
        stem="model",
        tensors={
            **{name: Output(shape, name) for name, shape in shapes_in(entry).items()},
            **buffers_in(entry),
        },
        dtype=dtype,
        finish=lambda folder: (),
    )


# -- the command ---------------------------------------------------------------------------


def export_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns 0, or raises what ends the command."""
    parser = Parser("export", __doc__)
    parser.add_argument("run", metavar="OUT", help="the run's directory (out), or its ring")
    parser.add_argument("folder", metavar="DIR", help="where to write the safetensors files")
    words = "that checkpoint, proven or not; best: by eval.metric; default: the newest proven one"
    parser.add_argument("--step", type=_step, metavar="{STEP,best}", help=words)
    words = "hf: with config.json and tokenizer, as transformers loads it; default: plain"
    parser.add_argument("--format", choices=["plain", "hf"], default="plain", help=words)
    words = "of what is written; default: fp32"
    parser.add_argument("--dtype", choices=list(_DTYPES), default="fp32", help=words)
    parser.flag("--merge", "--format hf of model.lora: the whole model, not the adapters alone")
    options = parser.parse_args(arguments)
    if "://" in options.run:
        raise ConfigError(
            f"export {options.run}: reads local checkpoints; copy a folder of {options.run}/ring "
            "into a directory and name that directory"
        )
    run, folder = Path(options.run), Path(options.folder)
    for sentence in export_run(run, folder, step=options.step, layout=_layout_of(options, run)):
        sys.stdout.write(f"{sentence}\n")
    return 0


def _step(text: str) -> int | str:
    return text if text == _BEST else int(text)


def _best(out: RunDir, entries: Sequence[Entry]) -> tuple[Entry, list[str]]:
    """The best of the checkpoints that are there, and its value in words.

    Raises:
        CheckpointError: no checkpoint was evaluated.
    """
    # Imported here: the other exports do not need what evaluates.
    from runner.train.evaluate import BestEvaluation, evaluations

    settings = EvalConfig()
    stored = out.stored_settings()
    settings.metric = stored.get("eval.metric", settings.metric)
    settings.goal = Goal(stored.get("eval.goal", settings.goal))
    lines = iter_lines(out.metrics) if out.metrics.exists() else ()
    values = dict(evaluations(lines, settings.metric))
    best = BestEvaluation(settings, values.items())
    serials = best.serials(entry.record for entry in entries)
    found = [entry for entry in entries if entry.record.serial in serials]
    if not found:
        raise CheckpointError(
            f"--step best: none of the checkpoints was evaluated by eval.metric={settings.metric} "
            f"(evaluations: {len(values)}); there are: {_listed(entries)}. "
            "checkpoint.keep_best=true saves and keeps the best one; --step N takes any"
        )
    own = values[found[0].record.step]
    of_all, value = best.of_all() or (found[0].record.step, own)
    notes = [f"{settings.metric} {own:.6g}, the {settings.goal.value} of those kept"]
    if value != own:
        notes.append(
            f"step {of_all} had {value:.6g}, and its checkpoint is not kept: "
            "checkpoint.keep_best=true keeps it"
        )
    return found[0], notes


def _layout_of(options: argparse.Namespace, run: Path) -> LayoutOf:
    dtype = _DTYPES[options.dtype]
    if options.format == "hf":
        # Imported here: a plain export does not need the model's code.
        from runner.command.export_hf import HfExport

        refuse_weights_in(Path(options.folder))
        return HfExport(run_of(run), dtype=dtype, merge=options.merge)
    if options.merge:
        raise ConfigError("--merge: adapters are merged into a folder of --format hf; add that")
    return partial(plain_layout, dtype=dtype)


def refuse_weights_in(folder: Path) -> None:
    """
    Raises:
        ConfigError: there are other weights, which a loader might mix with the export.
    """
    kinds = ("*.safetensors", "*.bin", "*.safetensors.index.json")
    if existing := sorted(path.name for kind in kinds for path in folder.glob(kind)):
        raise ConfigError(
            f"{folder}: holds weights already ({existing[0]}), and a loader could take those; give "
            "a folder without"
        )


def ring_folder(run: Path) -> Path:
    """The ring of a run directory, or the directory itself.

    Raises:
        ConfigError: there is none.
    """
    folder = run / "ring" if (run / "ring").is_dir() else run
    if not folder.is_dir():
        raise ConfigError(f"{run}: no such run directory")
    return folder


def run_of(run: Path) -> RunDir:
    """The run of a directory, or of its ring."""
    ring = ring_folder(run)
    return RunDir(ring.parent if ring.name == "ring" else run)


def export_run(
    run: Path,
    folder: Path,
    *,
    step: int | str | None = None,
    serial: int | None = None,
    layout: LayoutOf = plain_layout,
) -> list[str]:
    """Write the weights of one checkpoint; returns sentences for the user.

    Args:
        step, serial: this checkpoint, or the best, proven or not; None: the newest proven one.
        layout: which tensors to write.

    Raises:
        CheckpointError: no checkpoint can be exported.
    """
    store, out = CheckpointDirectory(ring_folder(run)), run_of(run)

    def export_one() -> tuple[list[Entry], Entry, list[str]]:
        entries, damaged = store.entries()
        if step is None and serial is None:
            return entries, *_newest_proven(entries, damaged, folder, _unproven(out), layout)
        words: list[str] = []
        if isinstance(step, str):
            entry, words = _best(out, entries)
        else:
            entry = _asked_for(entries, step=step, serial=serial)
        return entries, entry, export(entry, folder, layout) + words

    entries, exported, notes = again_while_retired(export_one)
    total, record = _steps(out), exported.record
    total_text = f" of {total}" if total is not None else ""
    word = "clean" if record.state is State.clean else f"{record.state.value}, not proven"
    notes.insert(0, f"exported step {record.step}{total_text} ({word}) to {folder}")
    if record.step == 0:
        notes.append("step 0 is the state before the first update: nothing is learned yet")
    newest = max(entries, key=lambda entry: entry.record.serial).record.step
    if step is None and serial is None and total is not None and newest < total:
        notes.append(f"the run has not reached step {total}: its newest checkpoint is of {newest}")
    return notes


def _newest_proven(
    entries: Sequence[Entry],
    damaged: Sequence[str],
    folder: Path,
    unproven: Mapping[int, str],
    layout: LayoutOf,
) -> tuple[Entry, list[str]]:
    """Export the newest proven checkpoint; with notes, and why no newer one was used."""
    passed_over = [f"not exported, damaged: {sentence}" for sentence in damaged]
    for entry in reversed(entries):
        if entry.record.state is not State.clean:
            passed_over.append(_why_not(entry, unproven))
            continue
        try:
            notes = export(entry, folder, layout)
        except RetiredCheckpoint:
            raise
        except CorruptCheckpoint as error:
            passed_over.append(f"step {entry.record.step} is not exported: damaged: {error}")
            continue
        return entry, notes + passed_over
    raise CheckpointError(
        f"no proven checkpoint to export; there are: {_listed(entries)}"
        + "".join(f"; {sentence}" for sentence in passed_over)
        + (". One that is committed can be exported by name: --step N" if entries else "")
    )


def _why_not(entry: Entry, unproven: Mapping[int, str]) -> str:
    record = entry.record
    if record.state is State.tainted:
        why = "tainted: the run rolled back past it, or it was found damaged"
    else:
        why = unproven.get(record.step, "not proven: too few clean steps have followed it yet")
    return f"step {record.step} is not exported: {why}"


def _asked_for(entries: Sequence[Entry], *, step: int | None, serial: int | None) -> Entry:
    """The checkpoint of this serial, or the newest untainted one of this step."""
    chosen = [
        entry
        for entry in entries
        if (entry.record.serial == serial if step is None else entry.record.step == step)
    ]
    usable = [e for e in chosen if serial is not None or e.record.state is not State.tainted]
    if usable:
        return usable[-1]
    if chosen:
        raise CheckpointError(
            f"--step {step}: is tainted: the run rolled back past it, or it was found damaged. If "
            f"you want it anyway: ring OUT --export DIR --serial {chosen[-1].record.serial}"
        )
    requested = f"of step {step}" if step is not None else str(serial)
    raise CheckpointError(f"no checkpoint {requested} to export; there are: {_listed(entries)}")


def _listed(entries: Sequence[Entry]) -> str:
    lines = [f"{e.record.serial} (step {e.record.step}, {e.record.state.value})" for e in entries]
    return ", ".join(lines) or "none"


def _unproven(out: RunDir) -> dict[int, str]:
    """Steps whose last checkpoint could not be proven, and why, from the journal."""
    if not out.journal.exists():
        return {}
    lines = (line for line in iter_lines(out.journal) if line.get("kind") == "unproven")
    return {step_of(line): plain(str(line.get("reason"))[:_MOST_CHARACTERS]) for line in lines}


def _steps(out: RunDir) -> int | None:
    """The number of steps that the run was configured for; None if unknown."""
    try:
        steps = out.stored_settings().get("steps")
    except ConfigError:
        return None
    return steps if type(steps) is int else None


def export(entry: Entry, folder: Path, layout_of: LayoutOf = plain_layout) -> list[str]:
    """Write the weights of a checkpoint as safetensors, verified first.

    One file, or several of at most 4 GiB with the index that Hugging Face loaders read. The
    metadata of each has ``step``, ``state`` and ``digest``: the state digest of the checkpoint, as
    ``summary.json`` has it.

    Returns:
        Notes for the user about further files.

    Raises:
        CorruptCheckpoint: the checkpoint is damaged; nothing is written.
        ConfigError: the folder cannot be written, or the checkpoint not in this layout.
    """
    layout = layout_of(entry)
    with Bar("verifying", entry.num_bytes) as bar:
        verify_files(entry, sorted(entry.manifest.files), finite=True, moved=bar.add)
    metadata = {"step": str(entry.record.step), "state": entry.record.state.value}
    metadata["digest"] = _digest(entry)
    if has_average(entry):
        metadata["weights"] = "average (optim.ema)"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(entry, folder, layout, metadata)
        return list(layout.finish(folder))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error})") from None


def _digest(entry: Entry) -> str:
    manifest = entry.manifest
    num_bytes = 4 * sum(map(manifest.numel, manifest.shapes))
    with Bar("summing up", num_bytes) as bar, ShardReader(entry) as reader:

        def read(name: str) -> tuple[str, torch.Tensor]:
            bar.add(4 * manifest.numel(name))
            return name, _whole(entry, name, reader)

        whole = map(read, sorted(manifest.shapes))
        if is_whole(manifest.shapes.values()):
            return state_digest(whole, manifest.update_counts)
        summing = Summing()
        sums = {name: (tuple(x.shape), summing.of(name, 0, x.view(-1))) for name, x in whole}
    return digest_of_sums(sums, manifest.update_counts)


def _write(entry: Entry, folder: Path, layout: Layout, metadata: Mapping[str, str]) -> None:
    file_of: dict[str, str] = {}
    groups = _groups(layout)
    num_bytes = sum(_num_bytes(layout, name) for name in layout.tensors)
    with Bar("exporting", num_bytes) as bar, ShardReader(entry) as reader:

        def read(name: str) -> torch.Tensor:
            return _whole(entry, exported_name(entry, name), reader)

        for number, group in enumerate(groups, start=1):
            part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            file = f"{layout.stem}{part}.safetensors"
            tensors = {}
            for name in group:
                output = layout.tensors[name]
                values = output.make(read, output.source)
                tensors[name] = values.to(layout.dtype_of(name)).contiguous()
                bar.add(_num_bytes(layout, name))
            # Rename it only when it is whole.
            unfinished = folder / f".{file}.writing"
            save_file(tensors, unfinished, metadata={"format": "pt", **metadata})
            os.replace(unfinished, folder / file)
            file_of |= dict.fromkeys(tensors, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": num_bytes, **metadata}, "weight_map": file_of}
        text = json.dumps(index, indent=1).encode()
        write_durably(folder / f"{layout.stem}.safetensors.index.json", text)


def _groups(layout: Layout) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name in layout.tensors:
        num_bytes = _num_bytes(layout, name)
        if groups[-1] and size + num_bytes > _SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    return groups


def _num_bytes(layout: Layout, name: str) -> int:
    return math.prod(layout.tensors[name].shape) * layout.dtype_of(name).itemsize


def _whole(entry: Entry, name: str, reader: ShardReader) -> torch.Tensor:
    return reader.read(name, 0, entry.manifest.numel(name)).view(entry.manifest.shapes[name])
