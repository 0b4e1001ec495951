"""Makes the trackers that the settings name; on rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runner.config.compose import flat
from runner.config.schema import TrackConfig
from runner.observe.attempts import Attempts
from runner.observe.run_tracker import BackgroundRunTracker, RunFacts, RunTracker
from runner.session.group import RankGroup
from runner.session.phases import Lease
from runner.system.guest import bound_target
from runner.system.redact import redacted


def run_trackers(lease: Lease, group: RankGroup) -> list[BackgroundRunTracker]:
    """Make each tracker in a thread of its own, where it may wait for its server.

    Raises:
        ConfigError: ``track._target_`` does not exist, or takes other arguments.
    """
    wanted = lease.config.track
    if not (wanted.wandb or wanted.mlflow or wanted._target_):
        return []
    facts = RunFacts(
        run_id=group.run_dir.identity(),
        config=redacted(flat(lease.config)),
        digest=lease.config_digest,
        out=group.run_dir.out,
    )
    return [
        BackgroundRunTracker(name, make, Attempts(group.run_dir.attempts(name), lease.fence.check))
        for name, make in _makers(wanted, facts)
    ]


def _makers(wanted: TrackConfig, facts: RunFacts) -> Iterator[tuple[str, Callable[[], RunTracker]]]:
    if wanted.wandb:

        def make_wandb() -> RunTracker:
            from runner.observe.wandb_tracker import WandbTracker

            return WandbTracker(facts, wanted.project)

        yield "wandb", make_wandb
    if wanted.mlflow:

        def make_mlflow() -> RunTracker:
            from runner.observe.mlflow_tracker import MlflowTracker

            return MlflowTracker(facts, wanted.project)

        yield "mlflow", make_mlflow
    if wanted._target_ is not None:
        offered = {
            "run_id": facts.run_id,
            "config": dict(facts.config),
            "digest": facts.digest,
            "out": facts.out,
        }
        make = bound_target("track._target_", wanted._target_, wanted.arguments or {}, offered)
        yield wanted._target_.rpartition(".")[2], make
