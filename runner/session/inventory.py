"""Opens lease, corpus and inventory, before anything is built; also for a user's loop.

Each phase takes the value of the previous one. All are collective and raise the same error on every
rank.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint.protocol import Identity
from runner.config.compose import digest, flat
from runner.config.mappings import unsteady_samples
from runner.config.schema import BatchConfig, Precision, RunConfig
from runner.config.validate import is_zero
from runner.data.corpus_digest import Progress
from runner.data.cursor import OneSource
from runner.data.mixture import MixtureOrder
from runner.distributed.agreement import Ranks, all_or_none_slowly
from runner.distributed.device import device_facts, versions
from runner.distributed.env import WATCHED, JobEnv
from runner.distributed.rendezvous import difference
from runner.health.cause_reporter import clear_fatal_logs, crash_incident
from runner.health.preemption import who_asked
from runner.model.blueprint import Blueprint
from runner.observe.journal import Journal
from runner.observe.tracker import (
    Attempts,
    BackgroundTracker,
    CommandAlerts,
    RunFacts,
    TensorBoardTracker,
    makers,
)
from runner.policy.decision.history import Incident
from runner.run_dir.lease import RunLease
from runner.run_dir.time_account import Past, past
from runner.session import parts
from runner.session.corpus import data_words, open_data, prepare_data
from runner.session.parts import keep_small_files, kept_files, rules_matched, state_shapes
from runner.startup.restore import RemoteRun, RestoredRun, Restorer, open_remote, with_highest
from runner.startup.resume import RunInventory, claim_run_dir, scan, settle_micro_size
from runner.system.environment import variables
from runner.system.error import ConfigError, Preempted
from runner.system.json_lines import Backlog, LineFile, iter_lines
from runner.system.process import host_name, parent_name
from runner.system.units import name_ranks, ranks_on
from runner.train.run import Corpus, RankGroup, Resumed, Run, RunJournal, ring_directory

# Resolves what a run's first start decides: ``compute.precision=auto``.
#
# A resumed run keeps what it began with; a new one takes what every rank supports.

Stored = Callable[[], Mapping[str, Any]]
_KEY = "compute.precision"
# Caps on the instruction set that oneDNN may use (its "CPU Dispatcher Control"). None of these
# multiplies in BF16, so under them oneDNN emulates BF16 on any CPU.
_CAPS_WITHOUT_BF16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first one set wins


def settle_precision(
    config: RunConfig,
    stored: Stored,
    device: torch.device,
    ranks: Ranks,
    say: Callable[[str], None],
) -> RunConfig:
    """Replace ``auto`` by ``bf16`` or ``fp32``, alike on all ranks. Collective.

    Args:
        stored: reads, on rank 0, the settings that the run began with; empty for a new run.

    Raises:
        ConfigError: the stored settings cannot be read, or the run began in FP32 and the engine
            that is configured computes in BF16 only.
    """
    if config.compute.precision is not Precision.auto:
        return config
    natives = ranks.gather(has_native_bf16(device, variables()))
    lacking = [rank for rank, has in enumerate(natives) if not has]
    began = ranks.of_first("reading compute.precision", lambda: stored().get(_KEY))
    if began not in (Precision.bf16.value, Precision.fp32.value):  # auto, stored by an import
        began = None
    zero = is_zero(config.parallel.kind)
    if zero and began == Precision.fp32.value:
        raise ConfigError(
            f"parallel={config.parallel.kind.value}: computes in BF16 only, and the run in out="
            f"{config.out} began with compute.precision=fp32; give another engine, another out, or "
            "compute.precision=bf16 and resume.allow=[compute.precision]"
        )
    by_device = Precision.fp32 if lacking and not zero else Precision.bf16
    precision = Precision(began) if began else by_device
    message = _message(precision, began, lacking, ranks.world_size)
    if message:
        say(message)
    return replace(config, compute=replace(config.compute, precision=precision))


def _message(precision: Precision, began: str | None, lacking: list[int], world_size: int) -> str:
    """A line about an unexpected choice; empty if all ranks have BF16 and use it."""
    who = f"the processors of {name_ranks(lacking)} have"
    if len(lacking) == world_size:
        who = "the processor has"
    if precision is Precision.fp32:
        if began:
            return f"{_KEY}=auto: fp32, as the run began"
        return (
            f"{_KEY}=auto: fp32, since {who} no BF16 instructions; "
            f"{_KEY}=bf16 uses BF16 anyway (emulated, several times slower)"
        )
    if not lacking:
        return ""
    why = "as the run began" if began else "which this engine needs"
    slow = f"{who} no BF16 instructions: emulated, several times slower"
    return f"{_KEY}=auto: bf16, {why}, but {slow}"


def has_native_bf16(device: torch.device, environ: Mapping[str, str]) -> bool:
    """Whether the device multiplies BF16 matrices natively, and so no slower than FP32.

    Args:
        environ: may cap oneDNN's instruction set by ``ONEDNN_MAX_CPU_ISA``.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without oneDNN torch only converts. With it, on ARM, support means native instructions.
    has_library = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not has_library or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    is_x86: bool = torch.cpu._is_avx2_supported()  # every x86 CPU that oneDNN supports has AVX2
    return not is_x86 or _x86_multiplies_bf16(environ)


def _x86_multiplies_bf16(environ: Mapping[str, str]) -> bool:
    """Whether an x86 CPU is native: oneDNN also reports AVX-512 emulation as supported."""
    cap = next((environ[name] for name in _CAPS if environ.get(name)), "")
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has) and cap.upper() not in _CAPS_WITHOUT_BF16


_COMMAND_CHARACTERS = 8000  # a longer one is not noted in the journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What earlier incarnations left, in ``out`` or in the object store (``restored``)."""

    found: RunInventory
    restorer: Restorer | None = None
    restored: RestoredRun | None = None


def acquire_lease(group: RankGroup, config: RunConfig) -> tuple[RunLease, RemoteRun | None]:
    """Acquire the write lease of ``out``, with settings that are equal on all ranks.

    Also returns the listing of the object store; None without one.

    Raises:
        ConfigError: the settings differ between ranks.
        RunnerError: another launch owns the run directory.
    """
    ranks, console = group.ranks, group.console
    _require_equal_settings(group, config)
    remote = open_remote(config.checkpoint, group.run_dir, ranks)
    lease = claim_run_dir(
        group.run_dir,
        config.resume,
        _known_launch(group),
        ranks,
        console.say,
        after=remote.seen.claim if remote else 0,
    )

    group.monitor.begin(lease, group.peers)
    if group.is_first and group.run_dir.is_open_to_all:
        console.say(
            f"warning: other users can write to {group.run_dir.out} and so change what a restart "
            "loads; chmod o-w it"
        )
    return lease, remote


def settled(group: RankGroup, config: RunConfig, remote: RemoteRun | None) -> RunConfig:
    """The settings, with what an earlier start has decided. Collective."""

    def stored() -> Mapping[str, Any]:
        return group.run_dir.stored_settings() or (remote.settings() if remote else {})

    return settle_precision(config, stored, group.device, group.ranks, group.console.say)


def open_corpus(group: RankGroup, config: RunConfig) -> Corpus:
    """Tokenise the data if needed, open it, and check that all ranks see the same.

    Raises:
        DataError: the corpus cannot be used.
        ConfigError: ranks see different data.
        Preempted: a stop was requested meanwhile.
    """
    ranks = group.ranks
    prepared = _prepare_data(config, group)
    dataset, stream, validation = ranks.all_or_none(
        "opening the data", lambda: open_data(config, prepared)
    )
    # A user's data set is read for it, which may fail on one rank.
    prints = ranks.gather(ranks.all_or_none("reading the data", dataset.fingerprint))
    if len(set(prints)) > 1:
        raise ConfigError(
            f"ranks see different data; fingerprints by rank: {[one[:12] for one in prints]}; give "
            f"all nodes the same files{unsteady_samples(config.data)}"
        )
    model_files = ranks.of_first("looking for the model's files", lambda: kept_files(group.run_dir))

    def sized() -> Blueprint:
        network = parts.blueprint(config, dataset, Path(model_files) if model_files else None)
        rules_matched(config.optim, network)  # raises for one that takes nothing
        return network

    network = ranks.all_or_none("sizing the model", sized)
    return Corpus(
        dataset=dataset,
        stream=stream,
        validation=validation,
        network=network,
        words=data_words(config.data, dataset),
    )


def with_steps(group: RankGroup, config: RunConfig, corpus: Corpus) -> RunConfig:
    """The settings with the ``steps`` that ``epochs`` take, which it prints."""
    order = corpus.stream.order
    if config.epochs is None or not isinstance(order, OneSource):
        return config
    trained, size = order.num_trained, config.batch.global_size
    steps = max(1, math.ceil(config.epochs * trained / size))
    group.console.say(
        f"epochs={config.epochs:g} of {trained:,} training samples, {size} a step: steps={steps}"
    )
    return replace(config, steps=steps)


def take_inventory(
    group: RankGroup, config: RunConfig, lease: RunLease, remote: RemoteRun | None, corpus: Corpus
) -> Inventory:
    """Read what is in ``out``; if it is lost, restore the run from the object store."""
    restorer = restored = None
    fingerprint, order = corpus.dataset.fingerprint(), corpus.stream.order
    if remote is not None:
        restorer = Restorer(
            remote,
            group.run_dir,
            ring_directory(group.run_dir, lease),
            config,
            fingerprint,
            group.ranks,
            show=group.console.work,
            moved=lambda: group.heart.enter("start"),
            is_asked_to_stop=lambda: group.stop.is_set,
        )
        restored = restorer.restore_if_lost()
    inventory = scan(
        group.run_dir,
        config,
        fingerprint,
        group.ranks,
        lease,
        tensors=lambda: state_shapes(config.optim, corpus.network),
        sources=order.names if isinstance(order, MixtureOrder) else None,
    )
    inventory = replace(inventory, next_serial=with_highest(inventory.next_serial, remote))
    for name in inventory.torn:
        group.console.say(f"removed {name}: it was never committed")
    for sentence in inventory.damaged:
        group.console.say(f"damaged checkpoint, which will not be used: {sentence}")
    return Inventory(found=inventory, restorer=restorer, restored=restored)


def open_journal(
    group: RankGroup, config: RunConfig, lease: RunLease, identity: Identity, inventory: Inventory
) -> RunJournal:
    """Open the journal; record changed settings, earlier crashes and restored checkpoints."""
    run_inventory = inventory.found
    command = config.track.command
    alerts = None
    if command and group.is_first and WATCHED not in variables():
        run_dir = group.run_dir
        name, state = run_dir.alert_name, run_dir.alerts
        alerts = CommandAlerts(command, run_dir.out, name=name, state=state)
    trackers = group.ranks.all_or_none(
        "opening the trackers",
        lambda: _trackers(group, config, lease, identity) if group.is_first else [],
    )
    listeners = [*([alerts.tell] if alerts else []), *(one.tell for one in trackers)]
    journal = group.ranks.all_or_none(
        "opening the journal",
        lambda: _journal(config.data.skip, lease, run_inventory, group, listeners),
    )
    written = RunJournal(journal=journal, console=group.console, alerts=alerts, trackers=trackers)
    for line in run_inventory.changes:
        written.report(Incident.from_json(line))
    if group.is_first:
        # Only once they are journalled, so that a crash now does not hide them.
        lease.check()
        group.run_dir.store_config(config)
    if not run_inventory.records:
        group.ranks.of_first(
            "keeping the model's files",
            lambda: keep_small_files(config.model, config.data.tokenizer, group.run_dir),
        )
    for line in run_inventory.crashes:
        written.report(Incident.from_json(line))
    if group.is_first:
        clear_fatal_logs(group.run_dir, lease.number)
        group.monitor.causes.journal = lambda cause, number: journal.add(
            crash_incident(cause, number)
        )
    for incident in inventory.restored.incidents if inventory.restored else []:
        written.report(incident)
    return written


def _trackers(
    group: RankGroup, config: RunConfig, lease: RunLease, identity: Identity
) -> list[BackgroundTracker]:
    """The configured trackers; on rank 0 only.

    Raises:
        ConfigError: ``track._target_`` does not exist, or takes other arguments.
    """
    track, run_dir = config.track, group.run_dir
    if not (track.tensorboard or track.wandb or track.mlflow or track._target_):
        return []
    facts = RunFacts(
        run_id=run_dir.identity(),
        config=flat(config),
        digest=identity.config_digest,
        out=run_dir.out,
    )

    def tensorboard() -> TensorBoardTracker:
        return TensorBoardTracker(run_dir.tensorboard, number=lease.number, check=lease.check)

    return [
        BackgroundTracker(name, make, Attempts(run_dir.attempts(name), lease.check))
        for name, make in makers(track, facts, tensorboard)
    ]


def settle_memory(batch: BatchConfig, inventory: Inventory, written: RunJournal) -> BatchConfig:
    """Set the micro-batch size, halved after each out-of-memory crash.

    The stored settings and their digest keep the user's value.
    """
    lines = [*inventory.found.journal, *inventory.found.crashes]
    size, incident = settle_micro_size(batch.micro_size, lines)
    if incident is not None:
        written.report(incident)
    elif size != batch.micro_size:
        written.console.say(
            f"micro-batches of {size} sequences, not {batch.micro_size}: larger ones did "
            "not fit into memory (journal.jsonl); to retry, set another batch.micro_size"
        )
    return replace(batch, micro_size=size)


def _require_equal_settings(group: RankGroup, config: RunConfig) -> None:
    """Compare the settings, which every rank composes separately."""
    ranks, own = group.ranks, flat(config)
    if len(set(ranks.gather(digest(own)))) == 1:
        return
    settings = ranks.gather(own)
    differing = [key for key in settings[0] if len({repr(s[key]) for s in settings}) > 1]
    message = "; ".join(f"{key}: {[s[key] for s in settings]} by rank" for key in differing)
    raise ConfigError(f"ranks were started with different settings: {message}")


def _known_launch(group: RankGroup) -> JobEnv:
    """Complete the launch facts with the launcher processes, from one rank per node. Collective."""
    tells = group.launch.has_agent and group.place.local_rank == 0
    names = group.ranks.gather(parent_name() if tells else "")
    return replace(group.launch, agents=tuple(sorted({name for name in names if name})))


def _prepare_data(config: RunConfig, group: RankGroup) -> list[str]:
    """Tokenise or find the tokens, on one rank of each node for all its ranks. Collective.

    Returns:
        The path of each source's prepared data; empty if nothing had to be prepared.
    """
    ranks, place = group.ranks, group.place

    def work(progress: Progress) -> list[list[str]]:
        prepared = prepare_data(config, progress) if not place.local_rank else []
        return [[str(one.place), one.notice] if one else ["", ""] for one in prepared]

    prepared = all_or_none_slowly(
        ranks,
        "preparing the data",
        work,
        moved=lambda: group.heart.enter("start"),
        show=group.console.work,
        is_asked_to_stop=lambda: group.stop.is_set,
    )
    group.console.close()
    if prepared is None:
        raise Preempted(
            f"asked to stop ({who_asked(group.asked_to_stop())}) while the data was prepared; "
            "nothing was trained yet, and unfinished preparation starts over"
        )
    by_rank = ranks.gather(prepared)[place.rank - place.local_rank]
    for notice in dict.fromkeys(notice for _, notice in by_rank if notice):
        is_of_tokenizer = not notice.startswith("data.")
        place_of = f"data.tokenizer={config.data.tokenizer}: " if is_of_tokenizer else ""
        group.console.say(f"{place_of}{notice}")
    return [folder for folder, _ in by_rank]


def _journal(
    skip: Sequence[Sequence[int]],
    lease: RunLease,
    run_inventory: RunInventory,
    group: RankGroup,
    listeners: Sequence[Callable[[Mapping[str, Any]], None]],
) -> Journal:
    file = None
    if group.is_first:
        lease.check()
        length = run_inventory.journal_bytes
        file = LineFile(group.run_dir.journal, length=length, check=lease.check)

    def tell(line: Mapping[str, Any]) -> None:
        for listener in listeners:
            listener(line)

    ranges = [(start, stop) for start, stop in skip]
    return Journal(run_inventory.journal, told_to_skip=ranges, file=file, tell=tell)


def backlog_of(patience_seconds: float, group: RankGroup, written: RunJournal) -> Backlog:
    """The lines that could not be written yet; with the journal's."""
    backlog = Backlog(
        patience_seconds=patience_seconds,
        ask_to_stop=group.stop.ask,
        from_first=group.ranks.from_first,
        say=group.console.say,
    )
    backlog.add(written.journal.file)
    return backlog


def time_before(group: RankGroup, resumed: Resumed, journal: list[dict[str, Any]]) -> Past:
    """How the run's time was spent before this start; only rank 0 reads it.

    Args:
        journal: the lines of the journal.
    """
    if not group.is_first:
        return past([], [], [])
    path, length = group.run_dir.metrics, resumed.metrics_bytes
    return past(
        iter_lines(path, stop=length),
        iter_lines(path, start=length),
        journal,
        summary=group.run_dir.stored_summary(),
        now=time.time(),
    )


def start_incident(
    run: Run, spent: Past, *, reason: str, parallel: str, unit: str = "", counted: str = "tokens"
) -> Incident:
    """The journal line of this start, alike on all ranks. Collective.

    Args:
        spent: the time before this start, see :func:`time_before`.
        reason: what started the run.
        parallel: how the state is laid over the ranks.
        unit: of losses; empty where it is not known.
        counted: what the speed is of, tokens or samples.
    """
    group, resumed = run.group, run.resumed
    by_rank = group.ranks.gather({"host": host_name(), **device_facts(group.device)})
    hosts = [str(facts.pop("host")) for facts in by_rank]
    if differing := difference(by_rank):
        group.console.say(f"warning: the ranks' devices differ: {differing}")
    before = group.ranks.from_first(
        {
            "lost": spent.lost,
            "idle_seconds": spent.idle_seconds,
            "start_seconds": group.times.seconds(),
        }
    )
    return Incident(
        kind="start",
        step=resumed.step,
        decision=f"go on from step {resumed.step}" if resumed.step else "begin",
        reason=reason,
        detail={
            "incarnation": run.lease.number,
            "world_size": group.place.world_size,
            "hosts": {host: ranks_on(host, hosts) for host in dict.fromkeys(hosts)},
            "parallel": parallel,
            "unit": unit,
            "counted": counted,
            "command": sys.argv if len(" ".join(sys.argv)) <= _COMMAND_CHARACTERS else [],
            "device": group.device.type,
            **versions(),
            **{name: text for name, text in group.device_versions.items() if name != "device"},
            "settings": run.identity.config_digest,
            "data": run.identity.data_fingerprint,
            "debug": dict(group.debug),
            **before,
            "tier": resumed.tier.value if resumed.step else None,
        },
    )
