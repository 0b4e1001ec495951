"""``--help``: how to start, the presets and every key with its type, default and meaning."""

from __future__ import annotations

from enum import Enum

from runner.compose import fields, packaged_configs, type_name
from runner.config import RunConfig

_USAGE = """\
Holdfast: a training runner that survives NaNs, loss spikes, bad data and crashes by itself.

  torchrun --nproc-per-node=8 -m runner out=runs/a key=value ...   train, or resume out=runs/a
  python -m runner key=value ...                                   the same with one process
  python -m runner launch [--nodes N|MIN:MAX --head HOST] key=value ...
                     torchrun on this node, well set, started again after a crash
  python -m runner supervise -- torchrun ...                       the same for your own command
  python -m runner slurm --nodes 4 [--submit] key=value ...        the batch script, or its job
  python -m runner k8s --image IMAGE --nodes 4 key=value ...       Kubernetes manifests
  python -m runner ring DIR|URL [--verify] [--export DIR]          list, verify, export checkpoints
  python -m runner import SOURCE [--moments] [--rename 'REGEX=REPLACEMENT'] out=DIR key=value ...
                     begin out=DIR from a DeepSpeed, DCP, torch or safetensors checkpoint
  python -m runner backtest FILE... [guard.key=value ...] [--json] [--plot FILE]
                     what the guard would have done to recorded runs (CSV, JSONL, TensorBoard)
  python -m runner plan --nodes N --mtbf-node-hours H [--run DIR] [--preset llama3] ...
                     goodput and the best checkpoint intervals of a large run

  --cfg job          print the resolved settings and stop
  --get KEY          check the settings, print one of them and stop (for scripts)
  --config-dir DIR   your own presets, beside the packaged ones
  -h, --help         this text

exit codes: 0 done, 2 settings or data, 3 halted by the guard, 4 no loadable checkpoint,
            75 stopped on request and saved (start again), else crash (start again)
"""


def help_text() -> str:
    """The whole text of ``--help``."""
    return "\n".join([_USAGE, "presets (GROUP=NAME):", *_presets(), "", "keys:", *_keys()])


def _presets() -> list[str]:
    groups = sorted(folder for folder in packaged_configs().iterdir() if folder.is_dir())
    return [
        f"  {group.name:<12}{', '.join(sorted(file.stem for file in group.glob('*.yaml')))}"
        for group in groups
    ]


def _keys() -> list[str]:
    lines = []
    for name, spec, value in fields(RunConfig()):
        shown = value.value if isinstance(value, Enum) else value
        default = "null" if shown is None else shown
        lines.append(f"  {name}={default}  ({type_name(spec)}) {spec.metadata['help']}")
    return lines
