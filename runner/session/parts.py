"""Turns settings into concrete parts: engine, feed, monitor, ring rules.

One function for each part; the phases of this package call them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runner.config.network import is_hf, rope_scaling_of
from runner.config.schema import (
    ExplainKind,
    Offload,
    OptimConfig,
    OptimKind,
    ParallelKind,
    Precision,
    RemedyKind,
    RunConfig,
)
from runner.config.validate import is_zero
from runner.data.cursor import SampleStream
from runner.data.dataset import Dataset, RecordDataset
from runner.data.feed import Feed, RankShare
from runner.distributed.agreement import Ranks
from runner.distributed.env import JobEnv, RankEnv
from runner.engine.fsdp import FsdpEngine, Layout, device_mesh, shard_model
from runner.engine.optimizer import OptimizerSettings
from runner.engine.protocol import Engine
from runner.engine.wider_precision import Wider, widen_buffers
from runner.explain.explaining_guard import ExplainRules
from runner.fault.inject import FaultInjector
from runner.fault.wrap import MicroBatchFaults, wrap_engine
from runner.health.preemption import StopRequest
from runner.health.rank_monitor import RankMonitor
from runner.model.blueprint import (
    Blueprint,
    DecoderBlueprint,
    GuestBlueprint,
    parameter_places,
    retie,
)
from runner.model.decoder import DecoderShape, RopeScaling, default_ffn_dim
from runner.observe.throughput import Throughput, peak_tflops
from runner.policy.batch_shards import shard_batch
from runner.policy.decision.history import History, Incident
from runner.policy.retention.interval import (
    MOST_SNAPSHOT_STEPS,
    IntervalRules,
    SnapshotRules,
    prior_seconds,
)
from runner.run_dir.paths import RunDir
from runner.session.corpus import data_words as data_words
from runner.session.corpus import digest_notes as digest_notes
from runner.session.corpus import open_dataset as open_dataset
from runner.session.corpus import open_validation as open_validation
from runner.session.corpus import prepare_data as prepare_data
from runner.session.corpus import sample_stream as sample_stream
from runner.session.optim import optimizer_settings
from runner.session.pretrained import head_losses, pretrained_blueprint
from runner.startup.shared_memory import memory_every
from runner.system.error import ConfigError
from runner.system.user_code import call_target, find_target
from runner.train.save_schedule import AutoInterval, FixedInterval, SaveTimes, SnapshotInterval

# Limits on replayed steps: for one incident, and for all as a share of the run's steps.
_EXPLAINING = {ExplainKind.quick: (10, 0.005), ExplainKind.full: (300, 0.05)}
_LEAST_INCIDENTS = 6  # incidents that any run may replay, however short

Report = Callable[[Incident], None]


def stop_request(config: RunConfig, launch: JobEnv) -> StopRequest:
    """Listen for stop signals and the scheduler's time limit, if known."""
    end = launch.end_time
    return StopRequest(
        grace_seconds=config.preempt.grace_seconds,
        stop_at=None if end is None else end - config.preempt.margin_seconds,
        has_agent=launch.has_agent,
    )


def rank_monitor(
    config: RunConfig, place: RankEnv, launch: JobEnv, run_dir: RunDir, stop: StopRequest
) -> RankMonitor:
    """Make the monitor of this rank."""
    return RankMonitor(
        place=place, launch=launch, run_dir=run_dir, stop=stop, watchdog=config.watchdog
    )


def explain_rules(config: RunConfig) -> ExplainRules | None:
    """The budget for finding a cause; None if it is off or would change nothing."""
    kind = config.explain
    if kind is ExplainKind.off or config.guard.remedy is RemedyKind.discard:
        return None
    if not config.guard.enabled:
        return None
    an_incident, share = _EXPLAINING[kind]
    return ExplainRules(
        an_incident=an_incident,
        in_all=max(_LEAST_INCIDENTS * an_incident, round(share * config.steps)),
        may_load=kind is ExplainKind.full,
        persist=config.guard.persist,
    )


def reads_late(config: RunConfig, device: torch.device) -> bool:
    """Whether signals are read one step late: ``guard.sync``, else only on CUDA."""
    return device.type == "cuda" if config.guard.sync is None else not config.guard.sync


def feed(
    config: RunConfig, dataset: Dataset, stream: SampleStream, place: RankEnv, device: torch.device
) -> Feed:
    """Make this rank's loader."""
    return Feed(
        dataset,
        stream,
        settings=config.data,
        share=RankShare(
            global_size=config.batch.global_size,
            micro_size=config.batch.micro_size,
            rank=place.rank,
            world_size=place.world_size,
        ),
        pin_memory=config.data.pin_memory and device.type == "cuda",
        seed=config.seed,
    )


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
        head_losses=head_losses(config, z_loss=0.0),
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
    losses = head_losses(config, z_loss=config.model.z_loss)
    return DecoderBlueprint(shape=shape, head_losses=losses, frozen=config.compute.frozen)


def layout(config: RunConfig, place: RankEnv) -> Layout:
    """Replicas and shards for ``parallel.kind``."""
    parallel, precision = config.parallel, config.compute.precision
    assert precision is not Precision.auto, "settle_precision comes first"
    shard_size = place.world_size
    if parallel.kind is ParallelKind.ddp:
        shard_size = 1
    elif parallel.kind is ParallelKind.hsdp:
        shard_size = parallel.shard_size or place.local_world_size
    return Layout(
        replicas=place.world_size // shard_size,
        shard_size=shard_size,
        dtype=torch.bfloat16 if precision is Precision.bf16 else torch.float32,
        reshard_after_forward=parallel.reshard_after_forward,
        reduce_each_micro_batch=parallel.reduce_each_micro_batch,
        compile=config.compute.compile,
        offload=parallel.offload is Offload.cpu,
    )


def works_a_step(config: RunConfig, place: RankEnv) -> int:
    """Micro-batches of every step, whatever its samples: DeepSpeed counts them."""
    if not is_zero(config.parallel.kind):
        return 1
    batch = config.batch
    return len(shard_batch(batch.global_size, batch.micro_size, place.world_size, place.rank))


def engine(
    config: RunConfig,
    network: Blueprint | DecoderShape,
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
    if isinstance(network, DecoderShape):
        network = decoder_blueprint(config, network)
    make = _zero if is_zero(config.parallel.kind) else _fsdp
    built = _with_faults(lambda inside: make(config, network, place, device, inside), faults)
    if has_weights:
        initialise(built, config, network)
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
    inside.attach(
        model,
        embedding,
        overflows=() if is_twin else faults.overflows(),
        wrong_gradients=() if is_twin else faults.wrong_gradients(),
    )
    return wrap_engine(built, faults, inside)


class Initial:
    """The initial values of a network; holds an error back until all ranks can raise it.

    An engine may run collectives after the last value: a rank that raised earlier would leave the
    others waiting in them.
    """

    def __init__(self, config: RunConfig, network: Blueprint) -> None:
        self._seed = config.seed
        self._network = network
        self._error: ConfigError | None = None

    def __call__(self, name: str, shape: tuple[int, ...], start: int, count: int) -> torch.Tensor:
        if self._error is None:
            try:
                return self._network.initial(self._seed, name, shape, start, count)
            except ConfigError as error:
                self._error = error
        return torch.zeros(count)

    def require(self) -> None:
        """
        Raises:
            ConfigError: a value could not be read.
        """
        if self._error is not None:
            raise self._error


def initialise(
    engine: Engine, config: RunConfig, network: Blueprint, ranks: Ranks | None = None
) -> None:
    """Give the engine its initial weights. Collective.

    Args:
        ranks: the other ranks; None if there are none.

    Raises:
        ConfigError: a rank cannot read its weights; raised on all.
    """
    values = Initial(config, network)
    engine.initialise(values)
    if ranks is None:
        values.require()
    else:
        ranks.all_or_none("reading the weights", values.require)


def _fsdp(
    config: RunConfig,
    blueprint: Blueprint,
    place: RankEnv,
    device: torch.device,
    inside: MicroBatchFaults | None,
) -> Made:
    """Make the engine, the module it calls, and the module of the first activation."""
    plan = layout(config, place)
    mesh = device_mesh(device, plan)
    how = _Sharding(plan, mesh, device, optimizer_settings(config))
    return _sharded(config, blueprint, how, inside)


@dataclass(frozen=True, slots=True)
class _Sharding:
    """How an FSDP2 engine shards a network, and its optimizer."""

    layout: Layout
    mesh: DeviceMesh
    device: torch.device
    settings: OptimizerSettings


def _sharded(
    config: RunConfig, blueprint: Blueprint, how: _Sharding, inside: MicroBatchFaults | None
) -> Made:
    device = how.device
    network = blueprint.on_meta()
    model = blueprint.objective(network, bf16=how.layout.dtype is torch.bfloat16)
    places = parameter_places(network)
    shard_model(model, blueprint.units(network), mesh=how.mesh, layout=how.layout)
    model.to_empty(device="cpu" if how.layout.offload else device)
    retie(network, places)
    blueprint.finish(network, device)
    if how.layout.is_wide:
        widen_buffers(network, how.layout.dtype)
    embedding = blueprint.probe(network)
    fsdp = FsdpEngine(
        model,
        embedding=embedding,
        settings=how.settings,
        layout=how.layout,
        mesh=how.mesh,
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
    how = _Sharding(wide, mesh, engine.device, settings)

    def make() -> Engine:
        return _with_faults(
            lambda inside: _sharded(config, network, how, inside), faults, is_twin=True
        )

    engine.twin.give(Wider(dtype=dtype, make=make))


def _zero(
    config: RunConfig,
    blueprint: Blueprint,
    place: RankEnv,
    device: torch.device,
    inside: MicroBatchFaults | None,
) -> Made:
    """As :func:`_fsdp`."""
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
        settings=optimizer_settings(config),
        plan=plan,
        device=device,
        probe=config.guard.enabled or inside is not None,
        disturb=inside,
    )
    # Stage 3 creates buffers in BF16.
    blueprint.finish(network, device)
    zero.running.note()
    return zero, model, embedding


def cadence(
    config: RunConfig,
    place: RankEnv,
    updates: int,
    history: History,
    ranks: Ranks,
    spent: Callable[[], Mapping[str, float]],
    report: Report,
) -> SaveTimes:
    """Make the schedule of checkpoints."""
    settings = config.checkpoint
    if isinstance(settings.every, int):
        return FixedInterval(settings.every)
    nodes = -(-place.world_size // place.local_world_size)
    return AutoInterval(
        rules=IntervalRules(
            clean_after=settings.clean_after,
            most=settings.auto_most,
            prior_seconds=prior_seconds(settings.mtbf_hours, nodes),
        ),
        updates=updates,
        history=history,
        from_first=ranks.from_first,
        spent=spent,
        report=report,
    )


def snapshot_times(
    config: RunConfig, history: History, ranks: Ranks, report: Report
) -> SaveTimes | None:
    """Make the schedule of snapshots in memory; None if they are off."""
    settings = config.checkpoint
    every = memory_every(settings)
    if every == 0:
        return None
    if settings.memory_every is not None:
        return FixedInterval(every)
    # An interval above the disk's would never be due.
    most = settings.every if isinstance(settings.every, int) else settings.auto_most
    return SnapshotInterval(
        rules=SnapshotRules(first=every, most=min(most, MOST_SNAPSHOT_STEPS)),
        history=history,
        from_first=ranks.from_first,
        report=report,
    )


def throughput(
    config: RunConfig, network: Blueprint, place: RankEnv, device: torch.device
) -> Throughput:
    """Tokens per second, and the share of the device's peak if it is known."""
    peak = config.track.peak_tflops
    if peak is None and device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(device))
    return Throughput(
        flops_per_token=network.flops_per_token() if peak else 0.0,
        peak_flops=peak * 1e12 * place.world_size if peak else None,
    )
