"""Resumes a mixture: finds the weights of each range of the stream.

The journal has a line for each change of weights, with the position from which it holds. What lies
before that position keeps its weights, whatever checkpoint a later start loads.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.data.cursor import SampleStream
from runner.data.mixture import MixtureOrder, Phase, describe_phase
from runner.observe.journal import Journal
from runner.policy.decision.history import Incident
from runner.system.error import ConfigError
from runner.train.state import TrainState


def settle_mixture(
    stream: SampleStream, journal: Journal, state: TrainState, *, reached: int
) -> Incident | None:
    """Give the stream its phases, and a new one where the weights have changed.

    Args:
        reached: the position that the run had reached before, perhaps behind ``state.cursor``.

    Returns:
        The new phase for the journal, alike on all ranks; None where nothing changed.

    Raises:
        ConfigError: a source that the run has read from is gone.
    """
    order = stream.order
    if not isinstance(order, MixtureOrder):
        return None
    history = journal.history
    phases = [Phase(start=start, weights=weights) for start, weights in history.mixtures]
    for phase in phases:
        gone = [name for name in phase.weights if name not in order.names]
        if gone:
            raise ConfigError(
                f"data.sources: {gone[0]!r} is missing, but this run has read from it; keep it, "
                "with weight 0 to stop reading it"
            )
    wanted = _wanted(order.wanted)
    incident = None
    if not phases or _wanted(phases[-1].weights) != wanted:
        # Behind all skipped positions up to there, whether it found them or was told: they must
        # keep their samples. What it is told to skip further on it has not met yet.
        stops = [stop for begin, stop in history.ledger if begin < reached]
        start = max(state.cursor, history.known_stop, *stops) if phases else 0
        phases.append(Phase(start=start, weights=wanted))
        incident = _incident(phases, state)
    order.load(phases)
    stream.forget()
    return incident


def _wanted(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights without those of 0: a new source of weight 0 changes nothing."""
    return {name: weight for name, weight in sorted(weights.items()) if weight > 0}


def _incident(phases: list[Phase], state: TrainState) -> Incident:
    newest = phases[-1]
    is_first = len(phases) == 1
    was = "" if is_first else f"; before, {describe_phase(phases[-2])}"
    return Incident(
        kind="mixture",
        step=state.updates,
        decision=f"from position {newest.start} on: {describe_phase(newest)}",
        reason=("data.sources" if is_first else "data.sources was changed") + was,
        detail={"start": newest.start, "weights": dict(newest.weights)},
    )
