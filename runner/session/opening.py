"""Opens lease, corpus and inventory, before anything is built; also for a user's loop.

Each phase takes the value of the previous one. All are collective and raise the same error on every
rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.checkpoint.memory.tier import MemoryParts
from runner.checkpoint.protocol import Identity
from runner.config.compose import digest, flat
from runner.config.schema import RunConfig
from runner.config.sources import unsteady_samples
from runner.data.corpus_digest import Progress
from runner.distributed.agreement import all_or_none_slowly
from runner.distributed.device import device_facts, ranks_on, versions
from runner.distributed.env import JobEnv
from runner.distributed.rendezvous import difference
from runner.health.cause_reporter import clear_fatal_logs, crash_incident
from runner.health.preemption import who_asked
from runner.model.blueprint import Blueprint
from runner.observe.backlog import Backlog
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
from runner.run_dir.time_account import Past, past
from runner.session import parts
from runner.session.corpus import open_dataset, open_validation, prepare_data, sample_stream
from runner.session.parts import keep_small_files, kept_files, rules_matched, state_shapes
from runner.startup.precision import settle_precision, settle_rope
from runner.startup.restore import RemoteRun, RestoredRun, Restorer, open_remote, with_highest
from runner.startup.resume import RunInventory, claim_run_dir, scan, settle_micro_size
from runner.startup.shared_memory import StateOnDevice, node_folder, open_memory
from runner.system.environment import redacted
from runner.system.error import ConfigError, Preempted
from runner.system.json_lines import LineFile, iter_lines
from runner.system.process import host_name, parent_name
from runner.train.run import Corpus, Lease, RankGroup, Resumed, Run, RunJournal


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What earlier incarnations left, in ``out`` or in the object store (``restored``)."""

    found: RunInventory
    restorer: Restorer | None = None
    restored: RestoredRun | None = None


def acquire_lease(config: RunConfig, group: RankGroup) -> tuple[Lease, RemoteRun | None]:
    """Acquire the write lease of ``out``, with settings that are equal on all ranks.

    Also returns the listing of the object store; None without one.

    Raises:
        ConfigError: the settings differ between ranks.
        RunnerError: another launch owns the run directory.
    """
    ranks, console = group.ranks, group.console
    _require_equal_settings(config, group)
    remote = open_remote(config.checkpoint, group.run_dir, ranks)
    run_lease = claim_run_dir(
        group.run_dir,
        config,
        _known_launch(group),
        ranks,
        console.say,
        after=remote.seen.claim if remote else 0,
    )

    def stored() -> Mapping[str, Any]:
        return group.run_dir.stored_settings() or (remote.settings() if remote else {})

    config = settle_precision(config, stored, group.device, ranks, console.say)
    config = settle_rope(config, stored, ranks, console.say)
    group.monitor.begin(run_lease, group.peers)
    if group.is_first and group.run_dir.is_open_to_all:
        console.say(
            f"warning: other users can write to {group.run_dir.out} and so change what a restart "
            "loads; chmod o-w it"
        )
    lease = Lease(config=config, config_digest=digest(flat(config)), run_lease=run_lease)
    return lease, remote


def open_corpus(lease: Lease, group: RankGroup) -> Corpus:
    """Tokenise the data if needed, open it, and check that all ranks see the same.

    Raises:
        DataError: the corpus cannot be used.
        ConfigError: ranks see different data.
        Preempted: a stop was requested meanwhile.
    """
    config, ranks = lease.config, group.ranks
    prepared = _prepare_data(config, group)
    dataset = ranks.all_or_none("opening the data", lambda: open_dataset(config, prepared))
    # A user's data set is read for it, which may fail on one rank.
    prints = ranks.gather(ranks.all_or_none("reading the data", dataset.fingerprint))
    if len(set(prints)) > 1:
        raise ConfigError(
            f"ranks see different data; fingerprints by rank: {[one[:12] for one in prints]}; give "
            f"all nodes the same files{unsteady_samples(config.data)}"
        )
    stream = ranks.all_or_none("splitting the data", lambda: sample_stream(config, dataset))
    validation = ranks.all_or_none(
        "opening data.val_path", lambda: open_validation(config, prepared)
    )
    model_files = ranks.of_first("looking for the model's files", lambda: kept_files(group.run_dir))

    def sized() -> Blueprint:
        network = parts.blueprint(config, dataset, Path(model_files) if model_files else None)
        rules_matched(config, network)  # raises for one that takes nothing
        return network

    network = ranks.all_or_none("sizing the model", sized)
    return Corpus(dataset=dataset, stream=stream, validation=validation, network=network)


def take_inventory(
    lease: Lease, remote: RemoteRun | None, corpus: Corpus, group: RankGroup
) -> Inventory:
    """Read what is in ``out``; if it is lost, restore the run from the object store."""
    restorer = restored = None
    fingerprint = corpus.dataset.fingerprint()
    if remote is not None:
        restorer = Restorer(
            remote,
            group.run_dir,
            lease.directory(group),
            lease.config,
            fingerprint,
            group.ranks,
            show=group.console.work,
            moved=lambda: group.heart.enter("start"),
        )
        restored = restorer.restore_if_lost()
    inventory = scan(
        group.run_dir,
        lease.config,
        fingerprint,
        group.ranks,
        lease.run_lease,
        tensors=lambda: state_shapes(lease.config, corpus.network),
    )
    inventory = replace(inventory, next_serial=with_highest(inventory.next_serial, remote))
    for name in inventory.torn:
        group.console.say(f"removed {name}: it was never committed")
    for sentence in inventory.damaged:
        group.console.say(f"damaged checkpoint, which will not be used: {sentence}")
    return Inventory(found=inventory, restorer=restorer, restored=restored)


def open_journal(lease: Lease, inventory: Inventory, group: RankGroup) -> RunJournal:
    """Open the journal; record changed settings, earlier crashes and restored checkpoints."""
    run_inventory = inventory.found
    command = lease.config.track.command
    alerts = CommandAlerts(command, group.run_dir.out) if command and group.is_first else None
    trackers = group.ranks.all_or_none(
        "opening the trackers", lambda: _trackers(lease, group) if group.is_first else []
    )
    listeners = [*([alerts.tell] if alerts else []), *(one.tell for one in trackers)]
    journal = group.ranks.all_or_none(
        "opening the journal", lambda: _journal(lease, run_inventory, group, listeners)
    )
    written = RunJournal(journal=journal, console=group.console, alerts=alerts, trackers=trackers)
    for line in run_inventory.changes:
        written.report(Incident.from_json(line))
    if group.is_first:
        # Only once they are journalled, so that a crash now does not hide them.
        lease.run_lease.check()
        group.run_dir.store_config(lease.config)
    if not run_inventory.records:
        group.ranks.all_or_none(
            "keeping the model's files",
            lambda: keep_small_files(lease.config, group.run_dir) if group.is_first else None,
        )
    for line in run_inventory.crashes:
        written.report(Incident.from_json(line))
    if group.is_first:
        clear_fatal_logs(group.run_dir, lease.run_lease.number)
        group.monitor.write_causes_to(
            lambda cause, number: journal.add(crash_incident(cause, number))
        )
    for incident in inventory.restored.incidents if inventory.restored else []:
        written.report(incident)
    return written


def _trackers(lease: Lease, group: RankGroup) -> list[BackgroundTracker]:
    """The configured trackers; on rank 0 only.

    Raises:
        ConfigError: ``track._target_`` does not exist, or takes other arguments.
    """
    track, run_dir, run_lease = lease.config.track, group.run_dir, lease.run_lease
    if not (track.tensorboard or track.wandb or track.mlflow or track._target_):
        return []
    facts = RunFacts(
        run_id=run_dir.identity(),
        config=redacted(flat(lease.config)),
        digest=lease.config_digest,
        out=run_dir.out,
    )

    def tensorboard() -> TensorBoardTracker:
        return TensorBoardTracker(
            run_dir.tensorboard, number=run_lease.number, check=run_lease.check
        )

    return [
        BackgroundTracker(name, make, Attempts(run_dir.attempts(name), run_lease.check))
        for name, make in makers(track, facts, tensorboard)
    ]


def settle_memory(lease: Lease, inventory: Inventory, written: RunJournal) -> Lease:
    """Set the micro-batch size, halved after each out-of-memory crash.

    The stored settings and their digest keep the user's value.
    """
    batch = lease.config.batch
    lines = [*inventory.found.journal, *inventory.found.crashes]
    size, incident = settle_micro_size(batch.micro_size, lines)
    if incident is not None:
        written.report(incident)
    elif size != batch.micro_size:
        written.console.say(
            f"micro-batches of {size} sequences, not {batch.micro_size}: larger ones did "
            "not fit into memory (journal.jsonl); to retry, set another batch.micro_size"
        )
    batch = replace(batch, micro_size=size)
    return replace(lease, config=replace(lease.config, batch=batch))


def open_slots(
    lease: Lease, group: RankGroup, state: StateOnDevice, identity: Identity
) -> MemoryParts:
    """Open this rank's part of the memory tier, sized for ``state``. Collective."""
    name = group.ranks.of_first("naming the run", group.run_dir.identity)
    return open_memory(
        lease.config,
        node_folder(name, group.run_dir.out),
        state,
        group.ranks,
        group.place,
        incarnation=lease.run_lease.number,
        identity=identity,
        say=group.console.say,
    )


def _require_equal_settings(config: RunConfig, group: RankGroup) -> None:
    """Compare the settings, which every rank composes separately."""
    ranks = group.ranks
    if len(set(ranks.gather(digest(flat(config))))) == 1:
        return
    settings = ranks.gather(flat(config))
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
    lease: Lease,
    run_inventory: RunInventory,
    group: RankGroup,
    listeners: Sequence[Callable[[Mapping[str, Any]], None]],
) -> Journal:
    file = None
    if group.is_first:
        lease.run_lease.check()
        file = LineFile(
            group.run_dir.journal, length=run_inventory.journal_bytes, check=lease.run_lease.check
        )

    def tell(line: Mapping[str, Any]) -> None:
        for listener in listeners:
            listener(line)

    ranges = [(start, stop) for start, stop in lease.config.data.skip]
    return Journal(run_inventory.journal, told_to_skip=ranges, file=file, tell=tell)


def backlog_of(lease: Lease, group: RankGroup, written: RunJournal) -> Backlog:
    """The lines that could not be written yet; with the journal's."""
    backlog = Backlog(
        patience_seconds=lease.config.track.unwritten_seconds,
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


def start_incident(run: Run, spent: Past, *, reason: str, parallel: str, data: str) -> Incident:
    """The journal line of this start, alike on all ranks. Collective.

    Args:
        spent: the time before this start, see :func:`time_before`.
        reason: what started the run.
        parallel: how the state is laid over the ranks.
        data: the fingerprint of the data.
    """
    group, lease, resumed = run.group, run.lease, run.resumed
    by_rank = group.ranks.gather({"host": host_name(), **device_facts(group.device)})
    hosts = [str(facts.pop("host")) for facts in by_rank]
    if differing := difference(by_rank):
        group.console.say(f"warning: the ranks' devices differ: {differing}")
    before = group.ranks.from_first({"lost": spent.lost, "idle_seconds": spent.idle_seconds})
    return Incident(
        kind="start",
        step=resumed.step,
        decision=f"go on from step {resumed.step}" if resumed.step else "begin",
        reason=reason,
        detail={
            "incarnation": lease.run_lease.number,
            "world_size": group.place.world_size,
            "hosts": {host: ranks_on(host, hosts) for host in dict.fromkeys(hosts)},
            "parallel": parallel,
            "device": group.device.type,
            **versions(),
            **{name: text for name, text in group.device_versions.items() if name != "device"},
            "settings": lease.config_digest,
            "data": data,
            "debug": dict(group.debug),
            **before,
            "tier": resumed.tier.value if resumed.step else None,
        },
    )
