"""``python -m runner import SOURCE key=value ...``: begins a run from another program's weights.

Writes one ordinary checkpoint of step 0 into ``out``; the training command with the same settings
then starts from it. SOURCE: a safetensors file, or a folder of them. A config.json beside the
weights (Hugging Face: llama, mistral, qwen3) gives the model's settings and the names of its
parameters; anything that this decoder cannot do is refused.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.disk.shards import Snapshot, collect_indexes, numbers, write_rank_file
from runner.checkpoint.manifest import Manifest
from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.config.compose import compose, digest, flat, override_text
from runner.config.schema import RunConfig
from runner.config.validate import check
from runner.convert.model_config import NAME as CONFIG_NAME
from runner.convert.model_config import RENAMES, ForeignModel, config_beside, read_model
from runner.convert.weights import StoredWeights, open_source
from runner.distributed.env import place_from
from runner.model.blueprint import frozen_names
from runner.model.decoder import Decoder, default_ffn_dim
from runner.run_dir.paths import RunDir
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.system.environment import variables
from runner.system.error import ConfigError
from runner.system.units import counted, first_few
from runner.train.state import TrainState

Shapes = Mapping[str, tuple[int, ...]]
_PREFIXES = ("module.", "_orig_mod.", "model.")
_SHOWN = 5
_SERIAL = 1
_FP32_BYTES = 4


def import_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit code.

    Raises:
        ConfigError: ``out`` is in use, or the source is refused or does not fit.
    """
    parser = Parser("import", __doc__)
    parser.add_argument("source", metavar="SOURCE", help="file or directory with the weights")
    words = "rename parameters (re.sub), in the order given; what becomes empty is left out"
    parser.repeated("--rename", "REGEX=REPLACEMENT", words)
    words = f"the model's {CONFIG_NAME}; default: the one beside the weights; none: read none"
    parser.add_argument("--model-config", metavar="FILE", help=words)
    words = f"pass over a key of {CONFIG_NAME}: it changes nothing that the model computes"
    parser.repeated("--ignore", "KEY", words)
    parser.add_settings()
    # Intermixed: settings may stand before and after the options.
    options = parser.parse_intermixed_args(arguments)
    source_path = Path(options.source)
    if not source_path.exists():
        raise ConfigError(f"{source_path}: no such file or folder; give the weights to begin with")
    config = compose(options.overrides, config_dir=options.config_dir)
    foreign = _foreign_model(options, config, source_path)
    added = _settings_of(foreign, config, options.overrides) if foreign else []
    config = compose([*options.overrides, *added], config_dir=options.config_dir)
    if place_from(variables()).world_size != 1:
        raise ConfigError("import: runs in one process; start it without torchrun")
    check(config, world_size=config.parallel.shard_size or 1)
    run_dir = RunDir(Path(config.out))
    _refuse_used(run_dir)
    with Bar("preparing the data", 0) as bar:
        dataset = open_dataset(config, progress=lambda what, done, total: bar.at(done, total))
    with torch.device("meta"):
        model = Decoder(parts.model_shape(config, dataset))
    wanted = {name: tuple(value.shape) for name, value in sorted(model.named_parameters())}
    source = open_source(source_path)
    config_renames = [(re.compile(one), other) for one, other in RENAMES] if foreign else []
    renames = [*(_rename(text) for text in options.rename), *config_renames]
    named_weights = named(source.shapes, renames)
    refuse_misfit(wanted, {name: source.shapes[was] for name, was in named_weights.items()})
    trained = wanted.keys() - frozen_names(wanted, config.compute.frozen)
    run_dir.create()
    shapes = {f"param/{name}": shape for name, shape in wanted.items()}
    for name in trained:
        shapes |= {f"{moment}/{name}": wanted[name] for moment in ("exp_avg", "exp_avg_sq")}
    shapes = dict(sorted(shapes.items()))
    names = {f"param/{name}": named_weights[name] for name in wanted}
    weights = partial(_state_of_step_0, source, names, shapes)
    _write(config, run_dir, dataset.fingerprint(), shapes, weights)
    Console(soft_wrap=True).print(
        f"imported {counted(len(wanted), 'tensor')} from {options.source}; out={run_dir.out} "
        "starts from them",
        markup=False,
    )
    if foreign and added:
        sys.stdout.write(f"{foreign.path} sets: {' '.join(added)}\n")
        sys.stdout.write("pass them to the training command as well\n")
    return 0


def _foreign_model(options: Namespace, config: RunConfig, source_path: Path) -> ForeignModel | None:
    """The model in the ``config.json`` of the weights; None without one."""
    given = options.model_config
    path = config_beside(source_path) if given is None else Path(given)
    if given == "none" or path is None:
        if options.ignore:
            raise ConfigError(f"--ignore {options.ignore[0]}: no {CONFIG_NAME} is read")
        return None
    return read_model(path, seq_len=config.data.seq_len, ignored=options.ignore)


def _settings_of(foreign: ForeignModel, config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """The settings from ``config.json`` that the overrides lack.

    Raises:
        ConfigError: they contradict it; names every such key.
    """
    values = flat(config)
    values |= {key: value for key, value in _nulls(foreign).items() if values[key] is None}
    differing = {key: value for key, value in foreign.settings.items() if values[key] != value}
    typed = {text.partition("=")[0].lstrip("+") for text in overrides}
    contradictions = [
        f"  {key}={values[key]}: {foreign.path} says {override_text(differing[key])}"
        for key in differing
        if key in typed
    ]
    if contradictions:
        raise ConfigError(
            "settings contradict the model of the weights:\n"
            + "\n".join(contradictions)
            + "\nRemove them: they are taken from that file"
        )
    return [f"{key}={override_text(value)}" for key, value in differing.items()]


def _nulls(foreign: ForeignModel) -> dict[str, Any]:
    """The values that null stands for in a model of the given sizes."""
    sizes = foreign.settings
    dim = sizes.get("model.dim")
    return {
        "model.kv_heads": sizes.get("model.heads"),
        "model.ffn_dim": default_ffn_dim(dim) if isinstance(dim, int) else None,
    }


def _refuse_used(run_dir: RunDir) -> None:
    ring = run_dir.ring
    # An import that was killed leaves only uncommitted files.
    kept = [p for p in ring.iterdir() if not p.name.startswith("writing-")] if ring.is_dir() else []
    if kept or run_dir.journal.exists():
        raise ConfigError(
            f"out={run_dir.out}: holds a run already; import starts a new one: choose another out"
        )


Rename = tuple[re.Pattern[str], str]


def _rename(text: str) -> Rename:
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(f"--rename {text!r}: write 'REGEX=REPLACEMENT'")
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise ConfigError(f"--rename {text!r}: {error}") from None
    return compiled, replacement


def named(source: Iterable[str], renames: Sequence[Rename]) -> dict[str, str]:
    """Map the model's names to the source's names of weights.

    Prefixes that wrappers add are taken off where all names have them; then ``renames``.

    Raises:
        ConfigError: two weights get the same name.
    """
    names = list(source)
    short = _without_prefixes(names)
    own_names: dict[str, str] = {}
    for name, plain in zip(names, short, strict=True):
        for pattern, replacement in renames:
            plain = pattern.sub(replacement, plain)
        if plain in own_names:
            raise ConfigError(
                f"{own_names[plain]!r} and {name!r} are both called {plain!r}: --rename"
            )
        if plain:
            own_names[plain] = name
    return own_names


def _without_prefixes(names: Sequence[str]) -> list[str]:
    # torch.compile of single blocks puts its prefix in the middle.
    short = [name.replace("._orig_mod.", ".") for name in names]
    while short:
        common = [p for p in _PREFIXES if all(name.startswith(p) for name in short)]
        if not common:
            break
        short = [name.removeprefix(common[0]) for name in short]
    return short


def refuse_misfit(wanted: Shapes, shapes: Shapes) -> None:
    """
    Raises:
        ConfigError: a parameter is missing, unexpected, or of another shape.
    """
    lines = [
        _list_some("missing", sorted(wanted.keys() - shapes.keys())),
        _list_some("unexpected", sorted(shapes.keys() - wanted.keys())),
        _list_some(
            "of another shape",
            [
                f"{name} {list(shapes[name])}, needed {list(shape)}"
                for name, shape in wanted.items()
                if shapes.get(name, shape) != shape
            ],
        ),
    ]
    problems = [line for line in lines if line]
    if problems:
        raise ConfigError(
            "the weights do not fit the model of these settings:\n"
            + "\n".join(problems)
            + "\nGive the model.* they were trained with; for other names --rename "
            "'REGEX=REPLACEMENT' (a name that becomes empty leaves its tensor out)"
        )


def _list_some(label: str, names: Sequence[str]) -> str:
    return f"  {label}: {first_few(names, _SHOWN, between='; ')}" if names else ""


def _state_of_step_0(
    source: StoredWeights, names: Mapping[str, str], shapes: Shapes, moved: Callable[[int], None]
) -> Iterator[Snapshot]:
    """The tensors of the source by their names in the ring, and zero moments.

    Each is read when it is needed: only one of a large model is in memory.
    """
    for name, shape in shapes.items():
        count = math.prod(shape)
        values = source.read(names[name], 0, count) if name in names else torch.zeros(count)
        moved(_FP32_BYTES * count)
        yield Snapshot(name=name, start=0, values=values)


def _write(
    config: RunConfig,
    run_dir: RunDir,
    fingerprint: str,
    shapes: Shapes,
    weights: Callable[[Callable[[int], None]], Iterator[Snapshot]],
) -> None:
    store = CheckpointDirectory(run_dir.ring)
    store.sweep()
    folder = store.writing_folder(_SERIAL)
    moments = [name for name in shapes if name.startswith("exp_avg/")]
    try:
        num_bytes = sum(_FP32_BYTES * math.prod(shape) for shape in shapes.values())
        with Bar("importing", num_bytes) as bar:
            write_rank_file(folder, 0, weights(bar.add), numbers(list(shapes)))
        layout, files = collect_indexes(folder, list(shapes), 1)
        manifest = Manifest(
            serial=_SERIAL,
            step=0,
            cursor=0,
            world_size=1,
            config_digest=digest(flat(config)),
            data_fingerprint=fingerprint,
            metrics_bytes=0,
            journal_lines=0,
            train_state=TrainState(config.guard).to_json(),
            update_counts={name.removeprefix("exp_avg/"): 0 for name in moments},
            shapes=dict(shapes),
            runs=layout.runs,
            files=files,
        )
        run_dir.store_config(config)
        store.commit(manifest)
    except BaseException as error:
        # Nothing is committed, so the files are of no use.
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"out={run_dir.out}: cannot be written ({error})") from None
        raise
