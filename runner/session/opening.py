"""Opens lease, corpus and inventory, before anything is built.

Each phase takes the value of the previous one. All are collective and raise the same error on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.checkpoint.memory.tier import MemoryParts
from runner.checkpoint.protocol import Identity
from runner.config.compose import digest, flat
from runner.config.schema import RunConfig
from runner.config.sources import unsteady_samples
from runner.data.corpus_digest import Progress
from runner.data.dataset import Dataset
from runner.distributed.env import JobEnv
from runner.distributed.slow_agreement import all_or_none_slowly
from runner.health.crash_log import clear_fatal_logs, crash_incident
from runner.health.preemption import who_asked
from runner.model.blueprint import Blueprint
from runner.observe.alert import CommandAlerts
from runner.observe.journal import Journal
from runner.observe.tracker import Attempts, BackgroundTracker, RunFacts
from runner.observe.tracker_kinds import TensorBoardTracker, makers
from runner.policy.decision.history import Incident
from runner.session import parts
from runner.session.group import RankGroup
from runner.session.optim import rules_matched, state_shapes
from runner.session.phases import Corpus, Inventory, Lease, RunJournal
from runner.session.pretrained import keep_small_files, kept_files
from runner.startup.precision import settle_precision, settle_rope
from runner.startup.restore import Restorer, open_remote, with_highest
from runner.startup.resume import RunInventory, claim_run_dir, scan, settle_micro_size
from runner.startup.shared_memory import StateOnDevice, node_folder, open_memory
from runner.system.error import ConfigError, Preempted
from runner.system.json_lines import LineFile
from runner.system.process import parent_name
from runner.system.redact import redacted


def acquire_lease(config: RunConfig, group: RankGroup) -> Lease:
    """Acquire the write lease of ``out``, with settings that are equal on all ranks.

    Raises:
        ConfigError: the settings differ between ranks.
        RunnerError: another launch owns the run directory.
    """
    ranks, console = group.ranks, group.console
    _require_equal_settings(config, group)
    remote = open_remote(config, group.run_dir, ranks)
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
    return Lease(
        config=config, config_digest=digest(flat(config)), run_lease=run_lease, remote=remote
    )


def open_corpus(lease: Lease, group: RankGroup) -> Corpus:
    """Tokenise the data if needed, open it, and check that all ranks see the same.

    Raises:
        DataError: the corpus cannot be used.
        ConfigError: ranks see different data.
        Preempted: a stop was requested meanwhile.
    """
    config, ranks = lease.config, group.ranks
    prepared = _prepare_data(config, group)
    dataset, fingerprint = ranks.all_or_none(
        "opening the data", lambda: _opened(parts.open_dataset(config, prepared))
    )
    prints = ranks.gather(fingerprint)
    if len(set(prints)) > 1:
        raise ConfigError(
            f"ranks see different data; fingerprints by rank: {[one[:12] for one in prints]}; give "
            f"all nodes the same files{unsteady_samples(config.data)}"
        )
    stream = ranks.all_or_none("splitting the data", lambda: parts.sample_stream(config, dataset))
    validation = ranks.all_or_none(
        "opening data.val_path", lambda: parts.open_validation(config, prepared)
    )
    model_files = ranks.from_first(
        ranks.all_or_none(
            "looking for the model's files",
            lambda: kept_files(group.run_dir) if group.is_first else "",
        )
    )
    network = ranks.all_or_none(
        "sizing the model",
        lambda: _sized(config, dataset, Path(model_files) if model_files else None),
    )
    return Corpus(dataset=dataset, stream=stream, validation=validation, network=network)


def take_inventory(lease: Lease, corpus: Corpus, group: RankGroup) -> Inventory:
    """Read what is in ``out``; if it is lost, restore the run from the object store."""
    restorer = restored = None
    fingerprint = corpus.dataset.fingerprint()
    if lease.remote is not None:
        restorer = Restorer(
            lease.remote,
            group.run_dir,
            lease.directory(group),
            lease.config,
            fingerprint,
            group.ranks,
        )
        restorer.show = group.console.work
        restorer.moved = lambda: group.heart.enter("start")
        restored = restorer.restore_if_lost()
    inventory = scan(
        group.run_dir,
        lease.config,
        fingerprint,
        group.ranks,
        lease.run_lease,
        tensors=lambda: state_shapes(lease.config, corpus.network),
    )
    inventory = replace(inventory, next_serial=with_highest(inventory.next_serial, lease.remote))
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
    written = RunJournal(journal=journal, group=group, alerts=alerts, trackers=trackers)
    _report_all(run_inventory.changes, written)
    if group.is_first:
        # Only once they are journalled, so that a crash now does not hide them.
        lease.run_lease.check()
        group.run_dir.store_config(lease.config)
    if not run_inventory.records:
        group.ranks.all_or_none(
            "keeping the model's files",
            lambda: keep_small_files(lease.config, group.run_dir) if group.is_first else None,
        )
    _report_all(run_inventory.crashes, written)
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
    settled = settle_micro_size(batch.micro_size, lines)
    if settled.incident is not None:
        written.report(settled.incident)
    elif settled.size != batch.micro_size:
        written.group.console.say(
            f"micro-batches of {settled.size} sequences, not {batch.micro_size}: larger ones did "
            "not fit into memory (journal.jsonl); to retry, set another batch.micro_size"
        )
    batch = replace(batch, micro_size=settled.size)
    return replace(lease, config=replace(lease.config, batch=batch))


def open_slots(
    lease: Lease, group: RankGroup, state: StateOnDevice, identity: Identity
) -> MemoryParts:
    """Open this rank's part of the memory tier, sized for ``state``. Collective."""
    name = group.ranks.all_or_none(
        "naming the run", lambda: group.run_dir.identity() if group.is_first else None
    )
    return open_memory(
        lease.config,
        node_folder(group.ranks.from_first(name), group.run_dir.out),
        state,
        group.ranks,
        group.place,
        incarnation=lease.run_lease.number,
        identity=identity,
        say=group.console.say,
    )


def identity_of(lease: Lease, corpus: Corpus) -> Identity:
    """Return the identity of this command's checkpoints."""
    return Identity(
        config_digest=lease.config_digest, data_fingerprint=corpus.dataset.fingerprint()
    )


def _sized(config: RunConfig, dataset: Dataset, files: Path | None) -> Blueprint:
    network = parts.blueprint(config, dataset, files)
    rules_matched(config, network)  # raises for one that takes nothing
    return network


def _opened(dataset: Dataset) -> tuple[Dataset, str]:
    """With its fingerprint, for which a user's data set is read: that may fail on one rank."""
    return dataset, dataset.fingerprint()


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
        prepared = parts.prepare_data(config, progress) if not place.local_rank else []
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
    ranges = [(start, stop) for start, stop in lease.config.data.skip]

    def tell(line: Mapping[str, Any]) -> None:
        for listener in listeners:
            listener(line)

    return Journal(
        run_inventory.journal,
        told_to_skip=ranges,
        file=file,
        tell=tell,
    )


def _report_all(lines: Sequence[dict[str, Any]], written: RunJournal) -> None:
    for line in lines:
        written.report(Incident.from_json(line))
