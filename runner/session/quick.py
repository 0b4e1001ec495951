"""Runs the short preflight of a start, if it is enabled."""

from __future__ import annotations

from runner.config.network import is_hf
from runner.data.dataset import RecordDataset
from runner.data.feed import few
from runner.distributed.observers import ObservedRanks
from runner.engine.randomness import same_randomness
from runner.policy.decision.history import Incident
from runner.session import parts
from runner.session.phases import Machinery, Opened
from runner.startup.engine_checks import TrialBatch, sanity_checks
from runner.startup.resume import Resumed

_ROWS = 2


def quick_preflight(
    opened: Opened, machinery: Machinery, resumed: Resumed, ranks: ObservedRanks
) -> None:
    """Test the model; report each failed check once per run. Collective."""
    config, group, corpus = opened.lease.config, opened.group, opened.corpus
    dataset = corpus.dataset
    if not config.debug.preflight or isinstance(dataset, RecordDataset):
        return
    # A compiled model would be compiled again for other shapes.
    if resumed.step >= config.steps or config.compute.compile:
        return
    rows = min(_ROWS, config.batch.micro_size)
    is_untrained = resumed.is_fresh and config.model._target_ is None and not is_hf(config.model)
    # A data set or a model of the user's may draw from any generator when it is asked.
    with same_randomness(group.device):
        batch = ranks.all_or_none(
            "reading two samples", lambda: few(dataset, config.data.seq_len, rows)
        )
        trial = TrialBatch(
            batch=batch,
            works=parts.works_a_step(config, group.place),
            vocab_size=dataset.vocab_size,
            untrained_loss=corpus.network.untrained_loss if is_untrained else None,
            sum=ranks.sum,
        )
        checks = sanity_checks(machinery.engine, trial)
    for check in checks:
        if check.holds is not False:
            continue
        opened.written.report_once(
            Incident(
                kind="preflight",
                step=resumed.step,
                decision="only reported",
                reason=f"{check.name}: {check.found}. Remedy: {check.remedy}",
                detail={"check": check.name},
            )
        )
