"""The composition root: the one place that turns settings into concrete parts.

Knows everything; nothing knows it but the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from runner.cadence import Auto, Cadence, Fixed
from runner.check import is_zero
from runner.checkpoint.protocol import Identity, RingRules
from runner.checkpoint.ring import Ring
from runner.checkpoint.store import RingStore
from runner.config import DataKind, ParallelKind, Precision, RunConfig
from runner.data.cursor import SampleStream
from runner.data.dataset import Dataset
from runner.data.feed import Feed
from runner.data.synthetic import SyntheticLanguage
from runner.data.text import open_text
from runner.data.tokens import open_tokens
from runner.dist.agree import Ranks
from runner.dist.heartbeat import Patience
from runner.dist.launcher import Launch, Place
from runner.engine.adamw import AdamWSettings
from runner.engine.forward import SequenceLosses
from runner.engine.fsdp import FsdpEngine, Layout, device_mesh, shard_model
from runner.engine.protocol import Engine
from runner.error import ConfigError
from runner.fault.inject import FaultInjector
from runner.model.decoder import Decoder, DecoderShape, default_ffn_dim, flops_per_token
from runner.model.frozen import freeze, num_frozen_multiplied
from runner.model.initial import initial_range, initial_rule
from runner.model.loss import sequence_losses
from runner.observe.console import Console
from runner.observe.goodput import Past
from runner.observe.journal import Journal
from runner.observe.metrics import Metrics
from runner.observe.throughput import Throughput, peak_tflops
from runner.observe.tracker import TensorBoardTracker, Tracker
from runner.policy.elastic import deal
from runner.policy.history import History, Incident
from runner.policy.interval import IntervalRules, prior_seconds
from runner.policy.schedule import Schedule
from runner.report import Reporter
from runner.resume import Resumed
from runner.rules import judge_rules as judge_rules
from runner.rules import named
from runner.rules import remedy_rules as remedy_rules
from runner.rundir import RunDir
from runner.tier import MemoryParts
from runner.watch.fence import Fence
from runner.watch.stop import StopRequest
from runner.watch.witness import WatchRules, Witness

Report = Callable[[Incident], None]


def stop_request(config: RunConfig, launch: Launch) -> StopRequest:
    """Signals, and the scheduler's time limit where it is known."""
    end = launch.end_time
    return StopRequest(
        grace_seconds=config.preempt.grace_seconds,
        stop_at=None if end is None else end - config.preempt.margin_seconds,
    )


def witness(
    config: RunConfig, place: Place, launch: Launch, run_dir: RunDir, stop: StopRequest
) -> Witness:
    """What watches over this rank."""
    watchdog = config.watchdog
    return Witness(
        place=place,
        launch=launch,
        run_dir=run_dir,
        stop=stop,
        rules=WatchRules(
            enabled=watchdog.enabled,
            settle_seconds=watchdog.settle_seconds,
            patience=Patience(**named(Patience, watchdog)),
        ),
    )


def schedule(config: RunConfig) -> Schedule:
    """The learning rate over updates."""
    return Schedule(
        kind=config.schedule.kind.value,
        peak=config.optim.lr,
        total=config.schedule.total or config.steps,
        warmup=config.schedule.warmup,
        floor=config.schedule.floor,
        decay=config.schedule.decay,
    )


def open_dataset(config: RunConfig) -> Dataset:
    """The corpus.

    Raises:
        DataError: it cannot be trained on.
    """
    data = config.data
    if data.kind is DataKind.synthetic:
        return SyntheticLanguage(
            vocab_size=data.vocab_size or 64,
            samples=data.samples,
            seq_len=data.seq_len,
            seed=config.seed,
        )
    if data.kind is DataKind.tokens:
        return open_tokens(
            paths=data.path,
            token_dtype=data.token_dtype.value,
            vocab_size=data.vocab_size,
            seq_len=data.seq_len,
            end_token=data.end_token,
            isolate_documents=data.isolate_documents,
        )
    return open_text(
        paths=data.path,
        suffixes=data.suffixes,
        tokenizer=data.tokenizer,
        seq_len=data.seq_len,
        isolate_documents=data.isolate_documents,
        cache=token_cache(data.cache),
    )


def token_cache(wanted: str | None) -> Path:
    """Where token files are kept: as asked, or the user's cache directory (XDG)."""
    if wanted is not None:
        return Path(wanted)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "holdfast"


def reads_late(config: RunConfig, device: torch.device) -> bool:
    """``guard.sync``, or what suits the device: on a CPU nothing is gained by reading late."""
    return device.type == "cuda" if config.guard.sync is None else not config.guard.sync


def sample_stream(config: RunConfig, dataset: Dataset) -> SampleStream:
    """The order of samples."""
    return SampleStream(
        num_samples=len(dataset),
        seed=config.seed,
        held_out_share=config.data.held_out,
        global_size=config.batch.global_size,
    )


def feed(
    config: RunConfig, dataset: Dataset, stream: SampleStream, place: Place, device: torch.device
) -> Feed:
    """This rank's loader."""
    return Feed(
        dataset,
        stream,
        seq_len=config.data.seq_len,
        global_size=config.batch.global_size,
        micro_size=config.batch.micro_size,
        rank=place.rank,
        world_size=place.world_size,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        pin_memory=config.data.pin_memory and device.type == "cuda",
    )


def model_shape(config: RunConfig, dataset: Dataset) -> DecoderShape:
    """The decoder's sizes, with what the data decides filled in.

    Raises:
        ConfigError: the embedding is smaller than the data's vocabulary, or sizes misfit.
    """
    model = config.model
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
        dropout=model.dropout,
        activation_checkpointing=model.activation_checkpointing,
        init_std=model.init_std,
    )


def layout(config: RunConfig, place: Place) -> Layout:
    """Copies and shards for ``parallel.kind``."""
    parallel = config.parallel
    shard_size = place.world_size
    if parallel.kind is ParallelKind.ddp:
        shard_size = 1
    elif parallel.kind is ParallelKind.hsdp:
        shard_size = parallel.shard_size or place.local_world_size
    return Layout(
        replicas=place.world_size // shard_size,
        shard_size=shard_size,
        bf16=config.model.precision is Precision.bf16,
        reshard_after_forward=parallel.reshard_after_forward,
        reduce_each_micro_batch=parallel.reduce_each_micro_batch,
        compile=config.model.compile,
    )


def engine(config: RunConfig, shape: DecoderShape, place: Place, device: torch.device) -> Engine:
    """The model over the ranks, with its initial weights. Collective."""
    made = (_zero if is_zero(config.parallel.kind) else _fsdp)(config, shape, place, device)
    made.initialise(lambda *where: _initial(config.seed, shape, *where))
    return made


def _fsdp(config: RunConfig, shape: DecoderShape, place: Place, device: torch.device) -> Engine:
    plan = layout(config, place)
    mesh = device_mesh(device, plan)
    with torch.device("meta"):
        model = Decoder(shape)
    freeze(model, config.model.frozen)
    shard_model(model, list(model.blocks), mesh=mesh, layout=plan)
    model.to_empty(device=device)
    model.reset_buffers()
    return FsdpEngine(
        model,
        embedding=model.embedding,
        sequence_losses=_losses(config),
        settings=_adamw_settings(config),
        layout=plan,
        mesh=mesh,
        device=device,
        probe=config.guard.enabled,
    )


def _zero(config: RunConfig, shape: DecoderShape, place: Place, device: torch.device) -> Engine:
    # Only here: deepspeed takes seconds to import, and needs a compiler on some machines.
    from runner.engine.zero import ZeroEngine, ZeroPlan, build_module, check_plan

    batch = config.batch
    shares = deal(batch.global_size, batch.micro_size, place.world_size, place.rank)
    plan = ZeroPlan(
        stage=int(config.parallel.kind.value.removeprefix("zero")),
        num_micro_batches=len(shares),
        extra=config.parallel.deepspeed or {},
    )
    check_plan(plan)
    model = build_module(lambda: Decoder(shape), plan, device)
    assert isinstance(model, Decoder)
    freeze(model, config.model.frozen)
    model.reset_buffers(device)  # stage 3 makes them in BF16
    return ZeroEngine(
        model,
        embedding=model.embedding,
        sequence_losses=_losses(config),
        settings=_adamw_settings(config),
        plan=plan,
        device=device,
        probe=config.guard.enabled,
    )


def _losses(config: RunConfig) -> SequenceLosses:
    fp32, z_loss = config.model.loss_fp32, config.model.z_loss
    return lambda logits, targets: sequence_losses(logits, targets, fp32=fp32, z_loss=z_loss)


def _adamw_settings(config: RunConfig) -> AdamWSettings:
    optim = config.optim
    return AdamWSettings(
        beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay
    )


def _initial(
    seed: int, model: DecoderShape, name: str, shape: Sequence[int], start: int, count: int
) -> torch.Tensor:
    rule = initial_rule(name, model)
    return initial_range(
        name=name,
        shape=tuple(shape),
        std=rule.std,
        ones=rule.ones,
        seed=seed,
        start=start,
        count=count,
    )


def ring(
    config: RunConfig,
    store: RingStore,
    made: Engine,
    ranks: Ranks,
    identity: Identity,
    report: Report,
    faults: FaultInjector,
    tier: MemoryParts,
) -> Ring:
    """The checkpoints."""
    return Ring(
        store,
        holder=made,
        ranks=ranks,
        rules=RingRules(
            clean_after=config.checkpoint.clean_after,
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            background=config.checkpoint.background,
            write_bytes_per_second=config.checkpoint.write_mib_per_second * (1 << 20),
        ),
        identity=identity,
        report=report,
        before_write=lambda step: faults.at("save", step),
        memory=tier.memory,
        mirror=tier.mirror,
    )


def cadence(
    config: RunConfig,
    place: Place,
    updates: int,
    history: History,
    ranks: Ranks,
    spent: Callable[[], Mapping[str, float]],
    report: Report,
) -> Cadence:
    """When checkpoints are due."""
    wanted = config.checkpoint
    if isinstance(wanted.every, int):
        return Fixed(wanted.every)
    nodes = -(-place.world_size // place.local_world_size)
    return Auto(
        rules=IntervalRules(
            clean_after=wanted.clean_after,
            most=wanted.auto_most,
            prior_seconds=prior_seconds(wanted.mtbf_hours, nodes),
        ),
        updates=updates,
        history=history,
        from_first=ranks.from_first,
        spent=spent,
        report=report,
    )


def reporter(
    config: RunConfig,
    shape: DecoderShape,
    place: Place,
    device: torch.device,
    run_dir: RunDir,
    console: Console,
    journal: Journal,
    made: Ring,
    resumed: Resumed,
    past: Past,
    fence: Fence,
) -> Reporter:
    """Metrics, trackers and the live line; files on rank 0 only."""
    peak = config.track.peak_tflops
    if peak is None and device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(device))
    trackers: list[Tracker] = []
    if config.track.tensorboard and place.is_first:
        trackers.append(
            TensorBoardTracker(
                run_dir.tensorboard,
                first_step=resumed.step + 1,
                number=fence.number,
                check=fence.check,
            )
        )
    return Reporter(
        metrics=Metrics(
            run_dir.metrics if place.is_first else None,
            length=resumed.metrics_bytes,
            check=fence.check,
        ),
        trackers=trackers,
        console=console,
        throughput=Throughput(
            flops_per_token=_flops_per_token(config, shape),
            peak_flops=peak * 1e12 * place.world_size if peak else None,
        ),
        history=journal.history,
        ring=made,
        total_steps=config.steps,
        past=past,
        began=journal.began,
    )


def _flops_per_token(config: RunConfig, shape: DecoderShape) -> float:
    with torch.device("meta"):
        model = Decoder(shape)
    freeze(model, config.model.frozen)
    return flops_per_token(shape, num_frozen=num_frozen_multiplied(model))
