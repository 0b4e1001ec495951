"""Checks at intervals of updates: the held-out loss, and the health of the ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from runner.train.run import EngineRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What looks at the ranks after an update, as an observer.

    Args:
        is_due: whether it uses the state after exactly so many updates.
        look: called then; collective.
        note: called after each update.
    """

    observer: str
    is_due: Callable[[int], bool]
    look: Callable[[int], None]
    note: Callable[[int], None] = lambda updates: None


class Periodic:
    """Runs the checks that are due after an update.

    Args:
        evaluate: returns the held-out loss in nats per token; None if nothing is held out.
        evaluate_every: in applied updates; 0 means never.
    """

    def __init__(
        self,
        run: EngineRun,
        *,
        evaluate: Callable[[], float | None],
        evaluate_every: int,
        inspections: Sequence[Inspection],
    ) -> None:
        self._evaluate = evaluate
        self._evaluate_every = evaluate_every
        self._inspections = inspections
        self._observers = run.observers
        self._reporter = run.reporter
        self._heart = run.group.heart
        self._evaluated_at: tuple[int, float | None] = (-1, None)

    def is_due(self, updates: int) -> bool:
        """Whether anything here uses the state after exactly ``updates`` updates."""
        return falls_due(self._evaluate_every, updates) or any(
            self._is_inspected(one, updates) for one in self._inspections
        )

    def evaluate(self, updates: int) -> float | None:
        """The held-out loss, if it is due. Collective."""
        if not falls_due(self._evaluate_every, updates):
            return None
        self._heart.enter("evaluate")
        with self._reporter.stall("evaluation"):
            loss = self._evaluate()
        self._evaluated_at = updates, loss
        return loss

    def held_out_loss(self, updates: int) -> float | None:
        """The held-out loss of the current state, computed at most once. Collective."""
        known, loss = self._evaluated_at
        return loss if known == updates else self._evaluate()

    def inspect(self, updates: int) -> None:
        """Run the inspections that are due. Collective."""
        for inspection in self._inspections:
            inspection.note(updates)
            if self._is_inspected(inspection, updates):
                self._observers.together(inspection.observer, partial(inspection.look, updates))
        collect(updates)

    def _is_inspected(self, inspection: Inspection, updates: int) -> bool:
        return not self._observers.is_out(inspection.observer) and inspection.is_due(updates)


def falls_due(every: int, updates: int) -> bool:
    """Whether ``updates`` is a multiple of the interval; 0 means never."""
    return every > 0 and updates % every == 0


EVERY = 50  # applied updates


@contextmanager
def collected_at_boundaries() -> Iterator[None]:
    """Allow collection only by :func:`collect`, and only of objects made inside."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect(updates: int) -> None:
    """Collect at a step's end; does nothing inside another program's loop."""
    if updates % EVERY == 0 and not gc.isenabled():
        gc.collect()
