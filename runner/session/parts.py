"""Turns settings into the network, its engine, and the learning rate.

``model=hf``: the network is made from settings and a folder, and the folder's small files are
copied, so that a resume or an export does not depend on its later changes. Its weights are read
only once.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runner.config.mappings import is_hf, lora_of, rope_scaling_of
from runner.config.schema import (
    ModelConfig,
    OptimConfig,
    OptimKind,
    Precision,
    RunConfig,
    ScheduleConfig,
    TrackConfig,
)
from runner.config.validate import is_zero
from runner.convert.weights import FILES, copy_tokenizer, open_pretrained
from runner.data.cursor import shard_batch
from runner.data.dataset import Dataset, RecordDataset
from runner.distributed.agreement import Ranks
from runner.distributed.env import RankEnv
from runner.engine.fsdp import FsdpEngine, MeshLayout, device_mesh, shard_model
from runner.engine.optimizer import OptimizerSettings
from runner.engine.protocol import Engine
from runner.engine.wider_precision import widen_buffers
from runner.fault.inject import FaultInjector
from runner.fault.wrap import MicroBatchFaults, wrap_engine
from runner.model.blueprint import (
    Blueprint,
    DecoderBlueprint,
    GuestBlueprint,
    parameter_places,
    retie,
)
from runner.model.decoder import DecoderShape, RopeScaling, default_ffn_dim
from runner.model.loss import HeadLosses
from runner.model.pretrained import CONFIG, PretrainedBlueprint, build, read_config
from runner.model.quantised import NO_BASE, quantised_layers, require_one_base, require_same_base
from runner.observe.metrics import Throughput, peak_tflops
from runner.policy.schedule import Schedule
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError
from runner.system.user_code import call_target, find_target


def model_shape(config: RunConfig, dataset: Dataset) -> DecoderShape:
    """The decoder's sizes, completed from the data.

    Raises:
        ConfigError: the embedding is smaller than the data's vocabulary, or sizes do not match.
    """
    model = config.model
    if isinstance(dataset, RecordDataset):
        raise ConfigError(
            f"data._target_={config.data._target_}: returns samples without token ids, and the "
            "decoder needs input_ids; set model._target_ to a model for these samples"
        )
    vocab_size = model.vocab_size or dataset.vocab_size
    if vocab_size < dataset.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size}: the data has {dataset.vocab_size} token ids; use "
            "at least that, or null"
        )
    return DecoderShape(
        vocab_size=vocab_size,
        dim=model.dim,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        ffn_dim=model.ffn_dim or default_ffn_dim(model.dim),
        seq_len=config.data.seq_len,
        tied_head=model.tied_head,
        qk_norm=model.qk_norm,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        rope_scaling=_rope_scaling(model.rope_scaling),
        dropout=model.dropout,
        recompute=config.compute.recompute.value,
        document_attention=config.compute.document_attention.value,
        init_std=model.init_std,
    )


def _rope_scaling(value: object) -> RopeScaling | None:
    given = rope_scaling_of(value)
    if given is None:
        return None
    length = given.pop("original_max_position_embeddings")
    return RopeScaling(**given, original_max_position_embeddings=int(length))


def blueprint(config: RunConfig, dataset: Dataset, files: Path | None = None) -> Blueprint:
    """The network to build: the decoder, a Hugging Face model, or ``model._target_``.

    Args:
        files: see :func:`pretrained_blueprint`.

    Raises:
        ConfigError: sizes do not match, or the target cannot be called.
    """
    model = config.model
    if is_hf(model):
        return _with_segments(config, pretrained_blueprint(config, dataset, files))
    if model._target_ is None:
        return decoder_blueprint(config, model_shape(config, dataset))
    target, arguments = model._target_, model.arguments or {}
    vocab_size = getattr(dataset, "vocab_size", None) or 0
    offered = {"seq_len": config.data.seq_len}
    if vocab_size:
        offered["vocab_size"] = vocab_size
    # Before DeepSpeed patches modules during construction.
    find_target("model._target_", target)
    guest = GuestBlueprint(
        name=target,
        make=lambda: call_target("model._target_", target, arguments, offered),
        seed=config.seed,
        seq_len=config.data.seq_len,
        vocab_size=vocab_size,
        frozen=config.compute.frozen,
        head_losses=head_losses(config.model),
        recompute=config.compute.recompute.value,
    )
    return _with_segments(config, guest)


def _with_segments(config: RunConfig, guest: GuestBlueprint) -> GuestBlueprint:
    """
    Raises:
        ConfigError: documents must not attend to each other, and the network cannot ensure that.
    """
    if (config.data.isolate_documents or config.data.pack) and not guest.takes_segments():
        key = "data.pack" if config.data.pack else "data.isolate_documents"
        remedy = "" if is_hf(config.model) else "give it a parameter segments (int32 [B, T]), or "
        raise ConfigError(
            f"{key}=true: forward of {guest.setting} takes no segments; {remedy}remove the setting"
        )
    return guest


def decoder_blueprint(config: RunConfig, shape: DecoderShape) -> DecoderBlueprint:
    """Make the decoder with the configured loss."""
    losses = head_losses(config.model, z_loss=config.model.z_loss)
    return DecoderBlueprint(shape=shape, head_losses=losses, frozen=config.compute.frozen)


def layout(config: RunConfig, place: RankEnv) -> MeshLayout:
    """Replicas and shards for ``parallel.kind``."""
    return MeshLayout.of(config.parallel, config.compute, place.world_size, place.local_world_size)


def engine(
    config: RunConfig,
    network: Blueprint,
    place: RankEnv,
    device: torch.device,
    faults: FaultInjector | None = None,
    *,
    has_weights: bool = True,
) -> Engine:
    """Build the model over the ranks, with its initial weights. Collective.

    Args:
        has_weights: False leaves the weights undefined, for :func:`initialise` or a load.
    """

    def make(inside: MicroBatchFaults | None) -> Made:
        if is_zero(config.parallel.kind):
            return _zero(config, network, place, device, inside)
        plan, optim = layout(config, place), OptimizerSettings.of(config.optim)
        return _sharded(config, network, plan, device_mesh(device, plan), optim, inside, device)

    built = _with_faults(make, faults)
    if has_weights:
        initialise(built, config.seed, network)
    return built


# The engine, the module that it calls, and the module of the first activation.
Made = tuple[Engine, nn.Module, nn.Module]


def _with_faults(
    make: Callable[[MicroBatchFaults | None], Made],
    faults: FaultInjector | None,
    *,
    is_twin: bool = False,
) -> Engine:
    if faults is None or not faults.has_any:
        return make(None)[0]
    inside = MicroBatchFaults()
    built, model, embedding = make(inside)
    inside.attach(model, embedding, None if is_twin else faults)
    return wrap_engine(built, faults, inside)


def initialise(engine: Engine, seed: int, network: Blueprint, ranks: Ranks | None = None) -> None:
    """Give the engine its initial weights. Collective.

    Args:
        ranks: the other ranks; None if there are none.

    Raises:
        ConfigError: a rank cannot read its weights; raised on all.
    """
    errors: list[ConfigError] = []

    def initial(name: str, shape: tuple[int, ...], start: int, count: int) -> torch.Tensor:
        # An engine may run collectives after the last value: a rank that raised earlier would
        # leave the others waiting in them.
        if not errors:
            try:
                return network.initial(seed, name, shape, start, count)
            except ConfigError as error:
                errors.append(error)
        return torch.zeros(count)

    def require() -> None:
        if errors:
            raise errors[0]

    engine.initialise(initial)
    if ranks is None:
        require()
    else:
        ranks.all_or_none("reading the weights", require)


def _sharded(
    config: RunConfig,
    blueprint: Blueprint,
    plan: MeshLayout,
    mesh: DeviceMesh,
    settings: OptimizerSettings,
    inside: MicroBatchFaults | None,
    device: torch.device,
) -> Made:
    network = blueprint.on_meta()
    model = blueprint.objective(network, bf16=plan.dtype is torch.bfloat16)
    places = parameter_places(network)
    shard_model(model, blueprint.units(network), mesh=mesh, layout=plan)
    model.to_empty(device="cpu" if plan.offload else device)
    retie(network, places)
    blueprint.finish(network, device)
    if plan.is_wide:
        widen_buffers(network, plan.dtype)
    embedding = blueprint.probe(network)
    fsdp = FsdpEngine(
        model,
        embedding=embedding,
        settings=settings,
        layout=plan,
        mesh=mesh,
        device=device,
        probe=config.guard.enabled or inside is not None,
        disturb=inside,
    )
    return fsdp, model, embedding


def give_twin(
    engine: Engine,
    config: RunConfig,
    network: Blueprint,
    place: RankEnv,
    faults: FaultInjector | None = None,
) -> None:
    """Configure the engine's twin in a wider precision.

    BF16 is arbitrated by FP32; FP32 by FP64, on a CPU, where that costs little.
    """
    is_bf16 = config.compute.precision is Precision.bf16
    if not is_bf16 and engine.device.type != "cpu":
        return
    dtype = torch.float32 if is_bf16 else torch.float64
    wide = replace(layout(config, place), dtype=dtype, is_wide=True, compile=False)
    mesh = getattr(engine, "mesh", None) or device_mesh(engine.device, wide)
    # The twin is never updated: plain SGD needs no state.
    settings = OptimizerSettings(OptimConfig(kind=OptimKind.sgd, momentum=0))

    def make() -> Engine:
        return _with_faults(
            lambda inside: _sharded(config, network, wide, mesh, settings, inside, engine.device),
            faults,
            is_twin=True,
        )

    engine.twin.give(dtype, make)


def _zero(
    config: RunConfig,
    blueprint: Blueprint,
    place: RankEnv,
    device: torch.device,
    inside: MicroBatchFaults | None,
) -> Made:
    # Imported lazily: deepspeed takes seconds, and needs a compiler on some machines.
    from runner.engine.zero import ZeroEngine, ZeroPlan, build_module, check_plan

    batch = config.batch
    shares = shard_batch(batch.global_size, batch.micro_size, place.world_size, place.rank)
    plan = ZeroPlan(
        stage=int(config.parallel.kind.value.removeprefix("zero")),
        num_micro_batches=len(shares),
        extra=config.parallel.deepspeed or {},
    )
    check_plan(plan)
    # Once before stage 3 patches constructors: classes that are imported meanwhile lose their own.
    blueprint.parameters()
    network = build_module(blueprint.made, plan, device)
    model = blueprint.objective(network, bf16=True)
    embedding = blueprint.probe(network)
    zero = ZeroEngine(
        model,
        embedding=embedding,
        settings=OptimizerSettings.of(config.optim),
        plan=plan,
        device=device,
        probe=config.guard.enabled or inside is not None,
        disturb=inside,
    )
    # Stage 3 creates buffers in BF16.
    blueprint.finish(network, device)
    zero.running.note()
    return zero, model, embedding


def throughput(
    track: TrackConfig, network: Blueprint, place: RankEnv, device: torch.device
) -> Throughput:
    """Tokens per second, and the share of the device's peak if it is known."""
    peak = track.peak_tflops
    if peak is None and device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(device))
    return Throughput(
        flops_per_token=network.flops_per_token() if peak else 0.0,
        peak_flops=peak * 1e12 * place.world_size if peak else None,
    )


class QuantisedBase:
    """The digest of a model's quantised weights: in each checkpoint, and compared at each load."""

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def to_json(self) -> dict[str, str]:
        return {"base": self.digest}

    def load_json(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: the checkpoint was made on other weights.
        """
        require_same_base(str(state.get("base", NO_BASE)), self.digest)


def quantised_base(ranks: Ranks, network: Blueprint, device: torch.device) -> QuantisedBase | None:
    """Quantise the frozen weights; None where none are to be. Collective.

    Raises:
        ConfigError: a rank cannot read them, or has other ones.
    """
    has_any = any(quantised_layers(network.twin_network))
    if not (has_any and isinstance(network, PretrainedBlueprint)):
        return None
    digest = ranks.all_or_none("quantising the weights", lambda: network.base_digest(device))
    require_one_base(ranks.gather(digest), range(ranks.world_size))
    return QuantisedBase(digest)


GENERATION: Final = "generation_config.json"


def pretrained_blueprint(
    config: RunConfig, dataset: Dataset, files: Path | None
) -> PretrainedBlueprint:
    """The network of ``model.path``.

    Args:
        files: the run's copy of the small files; None before the run has begun.

    Raises:
        ConfigError: the network cannot be built, or is too small for the data.
    """
    model, path = config.model, Path(config.model.path).expanduser()
    lora = lora_of(model.lora)
    model_config = read_config(files or path)
    if isinstance(dataset, RecordDataset):
        raise ConfigError(
            f"data._target_={config.data._target_}: returns samples without token ids, and "
            f"model.path={path} needs input_ids"
        )
    inner = model_config.get_text_config()
    if dataset.vocab_size > inner.vocab_size:
        raise ConfigError(
            f"model.path={path}: its embedding has {inner.vocab_size} rows, and the data "
            f"{dataset.vocab_size} token ids; use the model's own tokenizer (data.tokenizer). If "
            f"it is, and no text has the ids beyond: data.vocab_size={inner.vocab_size}; samples "
            "that have one are then left out, and named"
        )
    most = getattr(inner, "max_position_embeddings", None)
    if isinstance(most, int) and config.data.seq_len > most:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len}: the model of model.path={path} has {most} "
            f"positions (max_position_embeddings); use at most that"
        )
    has_weights = model.init == "weights"
    return PretrainedBlueprint(
        name=f"hf:{model_config.model_type}",
        path=str(path),
        make=partial(
            build,
            model_config,
            lora,
            recompute=config.compute.recompute.value,
            quantize=model.quantize,
        ),
        open_weights=partial(open_pretrained, path) if has_weights else None,
        seed=config.seed,
        seq_len=config.data.seq_len,
        vocab_size=inner.vocab_size,
        frozen=config.compute.frozen,
        head_losses=head_losses(config.model),
    )


def head_losses(model: ModelConfig, *, z_loss: float = 0.0) -> HeadLosses:
    """How the loss of large logits is computed."""
    most_bytes = round(model.loss_chunk_mib * (1 << 20))
    return HeadLosses(fp32=True, z_loss=z_loss, most_bytes=most_bytes)


def keep_small_files(model: ModelConfig, tokenizer: str | None, run_dir: RunDir) -> None:
    """Copy the folder's ``config.json`` and tokenizer into the run directory.

    Raises:
        ConfigError: they cannot be copied.
    """
    if not is_hf(model):
        return
    source, folder = Path(model.path).expanduser(), run_dir.pretrained
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*FILES, GENERATION, CONFIG):
            (folder / name).unlink(missing_ok=True)  # from an earlier start that saved nothing
        copy_tokenizer(Path(tokenizer).expanduser() if tokenizer is not None else source, folder)
        # Copied last: it marks the copy as complete.
        for name in (GENERATION, CONFIG):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / f".{name}")
                (folder / f".{name}").rename(folder / name)
    except OSError as error:
        raise ConfigError(f"out={run_dir.out}: cannot be written ({error})") from None


def kept_files(run_dir: RunDir) -> str:
    """The folder of the copies; empty if no checkpoint belongs to them."""
    is_begun = run_dir.ring.is_dir() and any(
        not path.name.startswith("writing-") for path in run_dir.ring.iterdir()
    )
    has_files = (run_dir.pretrained / CONFIG).is_file()
    return str(run_dir.pretrained) if is_begun and has_files else ""


_NAMED = 8  # parameters in a message


def schedule(settings: ScheduleConfig, *, peak: float, steps: int) -> Callable[[int], float]:
    """The learning rate of the update that follows so many applied ones.

    Args:
        peak: the rate after the warm-up.
        steps: updates of the run, which end the schedule where it has no ``total`` of its own.

    Raises:
        ConfigError: ``schedule._target_`` cannot be called.
    """
    total = settings.total or steps
    if settings._target_ is None:
        return Schedule(schedule=settings, peak=peak, total=total).rate
    target = settings._target_
    offered = {"peak": peak, "total": total, "warmup": settings.warmup, "floor": settings.floor}

    def own_rate(updates: int) -> float:
        key = "schedule._target_"
        given = {"updates": updates, **(settings.arguments or {})}
        value = call_target(key, target, given, offered)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise ConfigError(
                f"{key}={target}: returns {value!r} after {updates} updates; must be a finite "
                "learning rate of 0 or more"
            )
        return float(value)

    own_rate(0)
    return own_rate


def rules_matched(optim: OptimConfig, network: Blueprint) -> list[tuple[str, int]]:
    """Each rule's match in ``optim.groups``, and how many tensors take it.

    Raises:
        ConfigError: none takes a rule.
    """
    settings = OptimizerSettings.of(optim)
    names = [name for name, one in network.parameters().items() if one.requires_grad]
    matched = [sum(settings.rule(name) is rule for name in names) for rule in settings.rules]
    for number, (rule, count) in enumerate(zip(settings.rules, matched, strict=True)):
        if count:
            continue
        fits = any(re.search(rule.match, name) for name in names)
        why = "an earlier rule takes all that it fits" if fits else "no trained parameter fits it"
        shown = ", ".join(names[:_NAMED]) + (", ..." if names[_NAMED:] else "")
        raise ConfigError(
            f"optim.groups[{number}]: match={rule.match!r} takes no tensor, because {why}; change "
            f"or remove it. The trained parameters are {shown}"
        )
    return [(rule.match, count) for rule, count in zip(settings.rules, matched, strict=True)]


def state_shapes(optim: OptimConfig, network: Blueprint) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of the tensors in a checkpoint of these settings.

    With ``optim._target_``, parameters only: its state is known once it is built.
    """
    settings = OptimizerSettings.of(optim)
    is_known = settings.make is None
    return {
        f"{kind}/{name}": tuple(parameter.shape)
        for name, parameter in network.parameters().items()
        for kind in (
            "param",
            *(
                settings.kinds(name, len(parameter.shape))
                if parameter.requires_grad and is_known
                else ()
            ),
        )
    }
