"""``--help``: how to start, the presets and every key with its type, default and meaning."""

from __future__ import annotations

from enum import Enum

from runner.config.compose import fields, packaged_configs, type_name
from runner.config.schema import RunConfig
from runner.system.exit_codes import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_NO_CHECKPOINT,
    EXIT_PREEMPTED,
)

_USAGE = f"""\
Holdfast: a training runner that survives NaNs, loss spikes, bad data and crashes by itself.

  torchrun --nproc-per-node=8 -m runner out=runs/a key=value ...   train, or resume out=runs/a
  python -m runner key=value ...                                   the same with one process
  holdfast ...       the same as python -m runner, here and below
  python -m runner launch [--nodes N|MIN:MAX --head HOST] key=value ...
                     torchrun on this node, well set, started again after a crash
  python -m runner supervise -- torchrun ...                       the same for your own command
  python -m runner slurm --nodes 4 [--submit] key=value ...        the batch script, or its job
  python -m runner k8s --image IMAGE --nodes 4 key=value ...       Kubernetes manifests
                     (experimental: no cluster has run them)
  python -m runner ring DIR|URL [--verify]                         list and verify checkpoints
  python -m runner export OUT DIR [--step N]                       weights as safetensors
  python -m runner import SOURCE [--moments] [--rename 'REGEX=REPLACEMENT'] out=DIR key=value ...
                     begin out=DIR from a DeepSpeed, DCP, torch or safetensors checkpoint
  python -m runner backtest FILE... [guard.key=value ...] [--json] [--plot FILE]
                     what the guard would have done to recorded runs (CSV, JSONL, TensorBoard)
  python -m runner read FILE... [--json]                           what training curves show, and
                     what to try (same files)
  python -m runner replay OUT [--incident N] [--json] [-- SETTINGS]  why steps of a run were bad:
                     verdict, samples, ranks, and the numbers of every probe; with the run's
                     settings: computed again in one process, from a copy
  python -m runner plan --nodes N --mtbf-node-hours H [--run DIR] [--preset llama3] ...
                     goodput and the best checkpoint intervals of a large run
  python -m runner plan --ranks N [--room-gib G] key=value ...     memory of a rank, nothing started
  python -m runner check-model [--quick] key=value ...
                     what exactness asks of your model and data, tried in a minute on a CPU
  python -m runner preflight [--json] key=value ...
                     masks, gradients, rate, labels and data of a run, tried before it begins
  python -m runner demo [--keep DIR]
                     poison a range, kill a rank, and show that neither left a trace

  --cfg job          print the resolved settings and stop
  --get KEY          check the settings, print one of them and stop (for scripts)
  --config-dir DIR   your own presets, beside the packaged ones
  -h, --help         this text

exit codes: {EXIT_DONE} done, {EXIT_CONFIG} settings or data, {EXIT_HALTED} halted by the guard, \
{EXIT_NO_CHECKPOINT} no loadable checkpoint,
            {EXIT_PREEMPTED} stopped on request and saved (start again), else crash (start again)
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
