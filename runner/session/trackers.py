"""Makes the configured trackers; on rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runner.config.compose import flat
from runner.config.schema import TrackConfig
from runner.observe.attempts import Attempts
from runner.observe.run_tracker import BackgroundRunTracker, RunFacts, RunTracker
from runner.session.group import RankGroup
from runner.session.phases import Lease
from runner.system.redact import redacted
from runner.system.user_code import bound_target


def run_trackers(lease: Lease, group: RankGroup) -> list[BackgroundRunTracker]:
    """Make each tracker in its own thread, where it may wait for its server.

    Raises:
        ConfigError: ``track._target_`` does not exist, or takes other arguments.
    """
    settings = lease.config.track
    if not (settings.wandb or settings.mlflow or settings._target_):
        return []
    facts = RunFacts(
        run_id=group.run_dir.identity(),
        config=redacted(flat(lease.config)),
        digest=lease.config_digest,
        out=group.run_dir.out,
    )
    return [
        BackgroundRunTracker(
            name, make, Attempts(group.run_dir.attempts(name), lease.run_lease.check)
        )
        for name, make in _makers(settings, facts)
    ]


def _makers(
    settings: TrackConfig, facts: RunFacts
) -> Iterator[tuple[str, Callable[[], RunTracker]]]:
    if settings.wandb:

        def make_wandb() -> RunTracker:
            from runner.observe.wandb_tracker import WandbTracker

            return WandbTracker(facts, settings.project)

        yield "wandb", make_wandb
    if settings.mlflow:

        def make_mlflow() -> RunTracker:
            from runner.observe.mlflow_tracker import MlflowTracker

            return MlflowTracker(facts, settings.project)

        yield "mlflow", make_mlflow
    if settings._target_ is not None:
        offered = {
            "run_id": facts.run_id,
            "config": dict(facts.config),
            "digest": facts.digest,
            "out": facts.out,
        }
        make = bound_target("track._target_", settings._target_, settings.arguments or {}, offered)
        yield settings._target_.rpartition(".")[2], make
