"""Refuses impossible settings before anything starts; names key, value and what is allowed.

It also warns of settings that are mostly mistakes, and looks for the packages that settings need.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runner.config.compose import fields
from runner.config.mappings import EMPTY_PATH, is_hf, is_source_name, network_problems, sources_of
from runner.config.schema import (
    DataConfig,
    DataKind,
    Offload,
    OptimKind,
    ParallelKind,
    Precision,
    RunConfig,
    former_key,
)
from runner.config.unknown_key import suggestion
from runner.system.error import ConfigError, MissingPackage, has_package, is_installed, lacking

_LAST_SAMPLE = 1 << 60  # positions are 64-bit numbers

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(?<!\.json)")
_RULE_KEYS = {"match", "rate", "weight_decay"}
_HOLDS: dict[str, tuple[str, Callable[[Any, float], bool]]] = {
    "ge": ("at least", lambda value, bound: value >= bound),
    "gt": ("greater than", lambda value, bound: value > bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "lt": ("less than", lambda value, bound: value < bound),
}


def check(config: RunConfig, *, world_size: int) -> None:
    """Raise on settings that cannot work.

    Raises:
        ConfigError: names every problem, one per line.
    """
    problems = [
        *_bounds(config),
        *_lists(config),
        *(message for broken, message in _rules(config, world_size) if broken),
        *_optimizer(config),
        *_remote(config),
        *_sources(config),
        *network_problems(config),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _bounds(config: RunConfig) -> list[str]:
    problems = []
    for name, spec, value in fields(config):
        choices = spec.metadata["choices"]
        if choices and isinstance(value, str) and value not in choices:
            allowed = f"a whole number or {' or '.join(choices)}"
            problems.append(f"{name}={value[:100]}: must be {allowed} ({spec.metadata['help']})")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        broken = [
            f"{comparison} {spec.metadata[bound]:g}"
            for bound, (comparison, holds) in _HOLDS.items()
            if bound in spec.metadata and not holds(value, spec.metadata[bound])
        ]
        if not math.isfinite(value):
            broken.append("finite")
        if broken:
            help_text = spec.metadata["help"]
            problems.append(f"{name}={value}: must be {' and '.join(broken)} ({help_text})")
    return problems


def _lists(config: RunConfig) -> list[str]:
    problems = []
    paths = config.data.path
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        problems.append(f"data.path={paths}: must be a path or a list of paths")
    elif not all(path.strip() for path in paths):
        problems.append(f"data.path={paths}: {EMPTY_PATH}")
    problems += _val_path(config.data)
    for pair in config.data.skip:
        if not _is_range(pair):
            problems.append(
                f"data.skip={str(config.data.skip)[:200]}: {str(pair)[:100]} is no half-open range "
                "of sample positions; write data.skip=[[400,432]] with 0 <= start < end <= 2^60"
            )
    return [*problems, *_allowed(config.resume.allow)]


def _val_path(data: DataConfig) -> list[str]:
    setting = data.val_path
    if setting is None:
        return []
    sets = setting if isinstance(setting, dict) else {"": setting}
    if not sets or not all(_are_paths(paths) for paths in sets.values()):
        return [
            f"data.val_path={str(setting)[:200]}: must be a path, a list of paths, or names with "
            "one of these each, such as {wiki: wiki.txt, code: [a.py, b.py]}"
        ]
    odd = [name for name in sets if isinstance(setting, dict) and not is_source_name(name)]
    if odd:
        return [
            f"data.val_path: {str(odd[0])[:80]!r} is no name of a held-out set; use letters, "
            "digits, '.', '_' and '-', 64 at most"
        ]
    if data.sources is not None or data._target_ is not None or data.kind is DataKind.synthetic:
        return [
            f"data.val_path={str(setting)[:200]}: is for data=text, tokens and hf; sources of a "
            "mixture, code of your own and synthetic data have held-out samples of their own "
            "(data.held_out)"
        ]
    return []


def _are_paths(paths: Any) -> bool:
    is_list = isinstance(paths, list) and bool(paths)
    return is_list and all(isinstance(p, str) and p.strip() for p in paths)


def _sources(config: RunConfig) -> list[str]:
    try:
        parts = [source.data for source in sources_of(config.data)] or [config.data]
    except ConfigError as error:
        return [str(error)]
    problems = []
    for data in parts:
        is_rows = data.kind is DataKind.hf and data._target_ is None
        if data.pack and not (is_rows or data._target_):
            problems.append(
                "data.pack=true: puts rows of data=hf and samples of data._target_ together, and "
                f"data={data.kind.value} has full windows already; leave it out"
            )
        if data.messages is not None and not is_rows:
            problems.append(f"data.messages={data.messages}: is for data=hf")
    return problems


def _optimizer(config: RunConfig) -> list[str]:
    optim = config.optim
    problems = [
        f"optim.groups={str(optim.groups)[:200]}: {str(group)[:100]} is no rule; write "
        "optim.groups=[{match: REGEX, rate: 0.1, weight_decay: 0}], rate and weight_decay being "
        "numbers of 0 or more"
        for group in (optim.groups if isinstance(optim.groups, list) else [optim.groups])
        if not _is_parameter_rule(group)
    ]
    if is_zero(config.parallel.kind) and optim._target_ is None and optim.kind is OptimKind.muon:
        problems.append(
            f"optim.kind=muon: works on whole matrices, and parallel={config.parallel.kind.value} "
            "updates flat partitions, in which no parameter has its shape; use parallel=fsdp, "
            "which shards as zero3 does, or optim=adamw, sgd or lion"
        )
    return problems


def _is_parameter_rule(group: Any) -> bool:
    if not isinstance(group, dict) or not {"match"} <= group.keys() <= _RULE_KEYS:
        return False
    try:
        re.compile(group["match"])
    except (re.error, TypeError):
        return False
    numbers = [value for name, value in group.items() if name != "match"]
    return all(
        isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < math.inf
        for n in numbers
    )


def _allowed(keys: list[str]) -> list[str]:
    """Check the names in ``resume.allow``: a typing mistake would allow nothing."""
    known = {name for name, spec, _ in fields(RunConfig()) if spec.metadata["trajectory"]}
    known |= {name.partition(".")[0] for name in known} | {"steps"}
    return [
        f"resume.allow=[{','.join(keys)[:200]}]: {key[:100]} "
        + (
            former_key(key)
            or "is no setting that changes the trajectory, nor a group of them"
            + suggestion(key, known)
        )
        for key in keys
        if key not in known
    ]


def _is_range(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    whole = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in pair)
    return whole and 0 <= pair[0] < pair[1] <= _LAST_SAMPLE


def _rules(config: RunConfig, world_size: int) -> list[tuple[bool, str]]:
    """Pairs: whether a rule is broken, and its message. The next two functions are alike."""
    batch, guard = config.batch, config.guard
    return [
        *_checkpoint_rules(config),
        *_engine_rules(config, world_size),
        (
            world_size > batch.global_size,
            f"batch.global_size={batch.global_size}: fewer sequences than the {world_size} "
            f"ranks; use at least {world_size}, or fewer ranks",
        ),
        (
            guard.min_history > guard.window,
            f"guard.min_history={guard.min_history}: more than guard.window={guard.window} "
            "holds; the guard would never be armed",
        ),
        (
            # A run may end within its warm-up on purpose: so does one that is continued
            # by the schedule of a shorter one.
            config.schedule.total is not None
            and config.schedule.total <= config.schedule.warmup < config.steps,
            f"schedule.total={config.schedule.total}: must exceed schedule.warmup="
            f"{config.schedule.warmup}",
        ),
        (
            config.epochs is not None and config.data.sources is not None,
            f"epochs={config.epochs or 0:g}: a mixture's sources have no common end; give steps",
        ),
        (
            config.eval.every == 0 and (config.eval.stop_after > 0 or config.checkpoint.keep_best),
            "eval.every=0: eval.stop_after and checkpoint.keep_best need evaluations",
        ),
        (
            not config.eval.metric.startswith("eval_"),
            f"eval.metric={config.eval.metric}: must be a held-out number, whose name begins with "
            f"eval_; eval.metric=eval_{config.eval.metric}?",
        ),
        (not config.out.strip(), "out=: must name a directory"),
    ]


def _checkpoint_rules(config: RunConfig) -> list[tuple[bool, str]]:
    ring = config.checkpoint
    shortest = ring.every if isinstance(ring.every, int) else ring.clean_after
    longest = ring.clean_after + (ring.keep - 1) * shortest
    return [
        (
            isinstance(ring.every, int) and ring.every < ring.clean_after,
            f"checkpoint.every={ring.every}: shorter than the probation "
            f"checkpoint.clean_after={ring.clean_after}; a checkpoint must be proven before "
            f"the next is due: use checkpoint.every>={ring.clean_after}",
        ),
        (
            ring.memory_every == 0 and ring.memory_mirror,
            "checkpoint.memory_mirror=true: there are no snapshots to mirror with "
            "checkpoint.memory_every=0; use checkpoint.memory_every=10",
        ),
        (
            ring.memory_every == 0 and ring.memory_slots is not None,
            f"checkpoint.memory_slots={ring.memory_slots}: there are no snapshots to hold with "
            "checkpoint.memory_every=0; use checkpoint.memory_every=10, or memory_slots=null",
        ),
        (
            ring.auto_most < ring.clean_after,
            f"checkpoint.auto_most={ring.auto_most}: shorter than the probation "
            f"checkpoint.clean_after={ring.clean_after}",
        ),
        (
            ring.keep >= 1 and config.debug.replica_check_every > longest,
            f"debug.replica_check_every={config.debug.replica_check_every}: a mismatch distrusts "
            f"what was saved since the last look, and the {ring.keep} clean checkpoints kept may "
            f"all be younger; use at most {longest} (clean_after + (keep - 1) * every), or a "
            "larger checkpoint.keep",
        ),
    ]


def _engine_rules(config: RunConfig, world_size: int) -> list[tuple[bool, str]]:
    kind, shard = config.parallel.kind, config.parallel.shard_size
    return [
        (
            kind is ParallelKind.single and world_size != 1,
            f"parallel=single: is one process, but there are {world_size} ranks; use "
            "parallel=fsdp, ddp or hsdp",
        ),
        (
            shard is not None and world_size % shard != 0,
            f"parallel.shard_size={shard}: must divide the {world_size} ranks",
        ),
        (
            config.parallel.device not in ("auto", "cpu", "cuda"),
            f"parallel.device={config.parallel.device}: must be auto, cpu or cuda",
        ),
        (
            is_zero(kind) and config.compute.precision is Precision.fp32,
            f"parallel={kind.value}: needs compute.precision=bf16",
        ),
        (
            not isinstance(config.parallel.deepspeed or {}, dict),
            f"parallel.deepspeed={config.parallel.deepspeed}: must be a mapping, such as "
            "{zero_optimization:{overlap_comm:true}}, or null",
        ),
        (
            config.parallel.offload is Offload.cpu and is_zero(kind),
            f"parallel.offload=cpu: is for engines on FSDP2; {kind.value} takes "
            "'parallel.deepspeed={zero_optimization:{offload_optimizer:{device:cpu}}}'",
        ),
        (
            bool(config.parallel.deepspeed) and not is_zero(kind),
            f"parallel.deepspeed: is for zero1, zero2 and zero3, not for {kind.value}",
        ),
    ]


def _remote(config: RunConfig) -> list[str]:
    remote = config.checkpoint.remote
    problem = url_problem(remote) if remote is not None else ""
    return [f"checkpoint.remote={_without_secrets(remote or '')}: {problem}"] if problem else []


def is_zero(kind: ParallelKind) -> bool:
    """Whether the settings choose DeepSpeed."""
    return kind in (ParallelKind.zero1, ParallelKind.zero2, ParallelKind.zero3)


def url_problem(url: str) -> str:
    """What is wrong with a URL; empty if nothing is."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "is no URL"
    if "://" not in url or "::" in url:
        return "must be one URL, such as s3://bucket/prefix"
    if parts.password is not None or parts.query or parts.fragment:
        return (
            "must hold no password and no query: credentials belong in the environment, or in "
            "fsspec's own configuration"
        )
    if not (parts.netloc + parts.path).strip("/"):
        return "names no bucket or directory"
    return ""


def _without_secrets(url: str) -> str:
    """The URL without secrets."""
    head, mark, tail = url.partition("://")
    return f"{head}{mark}{tail.split('?')[0].split('#')[0].rpartition('@')[2]}"


_LOW_BETA2 = 0.9
_LONG = 10  # memories of the second moment; shorter runs are trials
_HIGH_RATE = 0.02  # of AdamW, whose steps are about as large as its rate


def odd_settings(config: RunConfig) -> list[str]:
    """Sentences that name the key, its value and its usual effect; none if all is usual."""
    optim, schedule = config.optim, config.schedule
    is_adamw = optim.kind is OptimKind.adamw and optim._target_ is None
    memory = 1 / (1 - optim.beta2)
    is_short = schedule._target_ is None and schedule.warmup < round(memory)
    rules = [
        (
            is_adamw and optim.beta2 < _LOW_BETA2,
            f"optim.beta2={optim.beta2:g}: the second moment forgets within {memory:.0f} updates; "
            "0.95 to 0.999 are usual",
        ),
        (
            is_adamw and is_short and _LONG * memory <= config.steps,
            f"schedule.warmup={schedule.warmup}: the second moment (optim.beta2={optim.beta2:g}) "
            f"needs about {memory:.0f} updates to settle, and the full rate comes before; a spike "
            "there is no surprise",
        ),
        (
            schedule._target_ is None
            and schedule.total is None
            and schedule.warmup > 20
            and schedule.warmup >= config.steps,
            f"schedule.warmup={schedule.warmup}: is no shorter than the run (steps="
            f"{config.steps}), whose rate never reaches optim.lr={optim.lr:g}",
        ),
        (
            optim.clip == 0,
            "optim.clip=0: one large gradient that the gate lets pass is applied in full",
        ),
        (
            is_adamw and optim.lr > _HIGH_RATE,
            f"optim.lr={optim.lr:g}: AdamW mostly diverges above {_HIGH_RATE:g}",
        ),
        (
            not config.guard.enabled,
            "guard.enabled=false: a NaN is applied, and there are no rollbacks",
        ),
    ]
    return [sentence for is_odd, sentence in rules if is_odd]


def check_extras(config: RunConfig) -> None:
    """Look for every package that the settings need, before any process waits for another.

    Raises:
        MissingPackage: names each setting whose extra is not installed, one per line.
    """
    track, data, kind = config.track, config.data, config.parallel.kind
    is_s3 = (config.checkpoint.remote or "").startswith(("s3://", "s3a://"))
    is_tokenized = data.kind is DataKind.text and data.tokenizer is not None
    needs = [
        (is_zero(kind), f"parallel={kind.value}", "zero"),
        (track.tensorboard, "track=tensorboard", "tensorboard"),
        (track.wandb, "track=wandb", "wandb"),
        (track.mlflow, "track=mlflow", "mlflow"),
        (is_tokenized, f"data.tokenizer={data.tokenizer}", "text"),
        (config.model.quantize is not None, f"model.quantize={config.model.quantize}", "quantised"),
        (data._target_ is None and data.kind is DataKind.hf, "data=hf", "hf"),
        (is_s3, "checkpoint.remote=s3://...", "remote"),
    ]
    problems = [
        lacking(what, extra) for is_set, what, extra in needs if is_set and not is_installed(extra)
    ]
    of_model = ("transformers", *(["peft"] if config.model.lora is not None else []))
    problems += [
        lacking("model=hf", "hf", package)
        for package in of_model
        if is_hf(config.model) and not has_package(package)
    ]
    if problems:
        raise MissingPackage("\n".join(problems))
    _refuse_hub_names(config)


def _refuse_hub_names(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a path is no path here, and looks like a name on the Hugging Face Hub.
    """
    with contextlib.suppress(OSError):  # storage that is away: who reads there says so
        if not Path(config.out, "config.yaml").exists():  # else the run has its own copies
            _refuse_names(config)


def _refuse_names(config: RunConfig) -> None:
    paths = [("data.path", path) for path in config.data.path if config.data._target_ is None]
    if config.data.tokenizer is not None:
        paths.insert(0, ("data.tokenizer", config.data.tokenizer))
    if is_hf(config.model):
        paths.insert(0, ("model.path", config.model.path))
    for key, path in paths:
        is_name = key != "data.path" or "/" in path
        is_here = Path(path).exists() or (Path(path).parts[:-1] and Path(path).parent.exists())
        if is_name and _HUB_NAME.fullmatch(path) and not is_here:
            kind = " --repo-type dataset" if key == "data.path" else ""
            raise ConfigError(
                f"{key}={path}: no such file or folder. Nothing is downloaded by a run; if it is a "
                f"name on the Hugging Face Hub: `hf download {path}{kind} --local-dir DIR`, then "
                f"{key}=DIR"
            )
