"""Makes the parts that hold a run's state (``build``), and fills them (``resume``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from runner.checkpoint.ring import Ring
from runner.config.schema import RunConfig
from runner.data.feed import few
from runner.distributed.process_group import limit_groups
from runner.engine.protocol import Engine, MicroStep
from runner.engine.randomness import same_randomness
from runner.fault.inject import FaultInjector
from runner.fault.spec import parse_faults
from runner.model.blueprint import GuestBlueprint
from runner.session import parts
from runner.session.assemble import backlog_of
from runner.session.opening import identity_of, open_slots
from runner.session.phases import Machinery, Opened
from runner.startup.checks import refuse_or_say
from runner.startup.engine_checks import exactness_checks, running_buffers, works_of
from runner.startup.resume import Resumed, resume_from
from runner.system.error import CheckpointError, ConfigError, RankError
from runner.train.state import TrainState


def build(opened: Opened) -> Machinery:
    """Make engine, checkpoints and counters; :func:`resume` fills them. Collective."""
    group, lease, corpus = opened.group, opened.lease, opened.corpus
    config = lease.config
    faults = FaultInjector(
        parse_faults(config.faults), rank=group.place.rank, markers=group.run_dir.faults
    )
    # Without a checkpoint :func:`resume` initialises the weights.
    engine = parts.engine(
        config, corpus.network, group.place, group.device, faults, has_weights=False
    )
    if parts.explain_rules(config) is not None:
        parts.give_twin(engine, config, corpus.network, group.place, faults)
    limit_groups(config.parallel.timeout_seconds)
    has_weights = _keep_buffers(opened, engine)
    tier = open_slots(lease, group, engine, identity_of(lease, corpus))
    backlog = backlog_of(lease, opened.written)

    def before_write(step: int) -> None:
        faults.at("save", step)
        backlog.require_written()

    ring = Ring(
        lease.directory(group),
        sharded=engine,
        ranks=group.ranks,
        settings=config.checkpoint,
        identity=identity_of(lease, corpus),
        report=opened.written.report,
        before_write=before_write,
        memory=tier,
    )
    ring.show_restoring(group.console.work)
    return Machinery(
        engine=engine,
        faults=faults,
        tier=tier,
        backlog=backlog,
        ring=ring,
        has_weights=has_weights,
        state=TrainState(config.guard),
    )


def _keep_buffers(opened: Opened, engine: Engine) -> bool:
    """Settle which buffers are state: those of the run, or for a new one what a trial shows.

    Collective.

    Returns:
        Whether the trial has initialised the weights.
    """
    network, inventory = opened.corpus.network, opened.inventory.found
    if inventory.records:
        engine.running.keep(inventory.buffers)
        return False
    if not isinstance(network, GuestBlueprint) or not engine.running.has_any:
        return False
    ranks = opened.group.ranks
    parts.initialise(engine, opened.lease.config, network, ranks)
    with _two_samples(opened) as works:
        own = ranks.all_or_none("trying the model", lambda: running_buffers(engine, works))
    engine.running.keep({name for names in ranks.gather(own) for name in names})
    return True


@contextmanager
def _two_samples(opened: Opened) -> Iterator[Sequence[MicroStep]]:
    """A step of two samples, for trials; they draw no random numbers of the run's. Collective."""
    group, config = opened.group, opened.lease.config
    with same_randomness(group.device):
        batch = group.ranks.all_or_none(
            "reading two samples", lambda: few(opened.corpus.dataset, config.data.seq_len, 2)
        )
        yield works_of(batch, parts.works_a_step(config, group.place), group.device)


def resume(opened: Opened, machinery: Machinery) -> Resumed:
    """Load the newest usable checkpoint, or initialise the weights. Collective.

    Raises:
        ConfigError: a user's model cannot be trained exactly, or its weights cannot be read.
        CheckpointError: there are checkpoints, and none of them can be loaded.
        RankError: no local checkpoint can be loaded, and the object store does not answer.
    """
    resumed = _resume(opened, machinery)
    opened.group.console.close()  # ends the progress line
    if resumed.is_fresh and not machinery.has_weights:
        # Only now: a load overwrites all weights, and drawing random numbers takes time.
        config, ranks = opened.lease.config, opened.group.ranks
        parts.initialise(machinery.engine, config, opened.corpus.network, ranks)
    _check_model(opened, machinery.engine, is_fresh=resumed.is_fresh)
    return resumed


def _resume(opened: Opened, machinery: Machinery) -> Resumed:
    """Resume from the ring, or from the object store if every checkpoint is damaged."""
    group, inventory, written = opened.group, opened.inventory, opened.written
    ring, state = machinery.ring, machinery.state
    restorer = None if inventory.restored else inventory.restorer
    try:
        return resume_from(inventory.found, group.run_dir, ring, written.journal, state)
    except CheckpointError as error:
        if restorer is None:
            raise
        if restorer.silence:
            raise RankError(
                f"{error}; and checkpoint.remote does not answer ({restorer.silence}): start "
                "again when it does"
            ) from None
        ring.drain()
        restored = restorer.restore()
        if restored is None:
            raise
    for incident in restored.incidents:
        written.report(incident)
    only = replace(inventory.found, records=[restored.record], damaged=[])
    return resume_from(only, group.run_dir, ring, written.journal, state)


def _check_model(opened: Opened, engine: Engine, *, is_fresh: bool) -> None:
    """Test a user's model on two samples; its state does not change. Collective.

    Raises:
        ConfigError: it cannot be trained exactly.
    """
    group, corpus, config = opened.group, opened.corpus, opened.lease.config
    network = corpus.network
    if not isinstance(network, GuestBlueprint):
        return
    with _two_samples(opened) as works:
        checks = group.ranks.all_or_none(
            "trying the model", lambda: exactness_checks(network, engine, works)
        )
    signatures = group.ranks.gather(network.signature() if is_fresh else "")
    if len(set(signatures)) > 1:
        raise ConfigError(
            f"{network.setting}: ranks build different models or weights ({signatures} by rank); "
            "the model must not depend on the rank, the machine or the clock"
        )
    refuse_or_say(checks, network.setting, group.console.say)
    _say_large_logits(config, engine, network.setting, group.console.say)


def _say_large_logits(
    config: RunConfig, engine: Engine, setting: str, say: Callable[[str], None]
) -> None:
    """Say what logits take that cannot be made in parts; the trials have computed some."""
    one = getattr(engine.objective, "logits_bytes", 0)
    mib = one * config.batch.micro_size / (1 << 20)
    if 0 < config.model.loss_chunk_mib < mib:
        say(
            f"{setting}: the logits of a micro-batch are held whole, {mib:,.0f} MiB in FP32 and as "
            "much for their gradient: they can be made in parts (model.loss_chunk_mib) where "
            "get_output_embeddings() gives a plain nn.Linear, and not with parallel=zero3"
        )
