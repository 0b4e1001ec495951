"""Takes up a mixture where the run left it: by which weights each stretch of the stream was read.

The journal has a line for each change of weights, with the position from which it holds. What lies
before that position is as it was, whatever checkpoint a later start goes back to.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.data.cursor import SampleStream
from runner.data.mixture import MixtureOrder, Phase, phase_words
from runner.observe.journal import Journal
from runner.policy.decision.history import Incident
from runner.system.error import ConfigError
from runner.train.state import TrainState


def settle_mixture(stream: SampleStream, journal: Journal, state: TrainState) -> Incident | None:
    """Give the stream its phases, with a new one where the weights are others by now.

    Returns:
        The new phase as it is to be journalled, alike on all ranks; None where nothing changed.

    Raises:
        ConfigError: a source that was read from is no more.
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
                f"data.sources: {gone[0]!r} is gone, from which this run has read, so that what "
                "was read is no longer known; keep it, with weight 0 if it is to be read no more"
            )
    wanted = _wanted(order.wanted)
    incident = None
    if not phases or _wanted(phases[-1].weights) != wanted:
        # Behind what the ledger names: those positions are to lead to the samples that they led to.
        start = max(state.cursor, history.known_stop) if phases else 0
        phases.append(Phase(start=start, weights=wanted))
        incident = _incident(phases, state)
    order.load(phases)
    stream.forget()
    return incident


def _wanted(weights: Mapping[str, float]) -> dict[str, float]:
    """Without the sources that give nothing: a new one of weight 0 changes nothing."""
    return {name: weight for name, weight in sorted(weights.items()) if weight > 0}


def _incident(phases: list[Phase], state: TrainState) -> Incident:
    newest = phases[-1]
    is_first = len(phases) == 1
    was = "" if is_first else f"; before, {phase_words(phases[-2])}"
    return Incident(
        kind="mixture",
        step=state.updates,
        decision=f"from position {newest.start} on: {phase_words(newest)}",
        reason=("data.sources" if is_first else "data.sources was changed") + was,
        detail={"start": newest.start, "weights": dict(newest.weights)},
    )
