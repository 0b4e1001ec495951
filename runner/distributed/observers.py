"""Runs observers: probes, audits, readings, reports. An exception in one never ends the run.

It becomes the sentence "not tried: reason", is agreed on by all ranks, and is said once; the
observer is left out from then on.

An observer may exchange numbers between ranks. One that fails on a single rank must meet the others
in their next exchange, so all exchanges of :class:`ObservedRanks` have one form. An engine's
own collectives have other forms, so :meth:`ObservedRanks.ready` comes before them. A rank that
fails alone within them ends this start, and by its :class:`LastWords` the next one leaves the
observer out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from runner.distributed.agreement import Ranks
from runner.policy.decision.history import OBSERVER, Incident
from runner.system.error import LeaveError, Preempted, Superseded

T = TypeVar("T")
_log = logging.getLogger(__name__)

_MOST_WORDS = 500
# Raised on all ranks alike, and meant to end this start.
_DECISIONS = (LeaveError, Preempted, Superseded)


class Alone(Protocol):
    """See :meth:`Observers.alone`."""

    def __call__(self, name: str, work: Callable[[], T], default: T, /) -> T: ...


class LastWords(Protocol):
    """Keeps why an observer failed on this rank for the next start, until the others know."""

    def write(self, observer: str, step: int, error: Exception, why: str, /) -> None: ...
    def remove(self) -> None: ...


def alone_on_this_rank() -> Alone:
    """As :meth:`Observers.alone`, where nobody settles: what fails is logged once, on this rank."""
    out: set[str] = set()

    def alone(name: str, work: Callable[[], T], default: T, /) -> T:
        if name in out:
            return default
        try:
            return work()
        except _DECISIONS:
            raise
        except Exception as error:
            out.add(name)
            _log.warning("%s: not tried: %s; go on without it", name, _words(error))
            return default

    return alone


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an observer has no result, the same on all ranks."""

    why: str


class _FailedError(Exception):
    """An exchange in which a rank took part that had failed; raised on all ranks alike.

    ``depth`` says which of the nested attempts has failed.
    """

    def __init__(self, depth: int, why: str) -> None:
        super().__init__(why)
        self.depth = depth
        self.why = why


class _EarlierError(Exception):
    """An observer has failed before, while it was alone."""


def _words(error: Exception) -> str:
    kind = "" if isinstance(error, _EarlierError) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:_MOST_WORDS]


class ObservedRanks(Ranks):
    """The agreement among the ranks, for observers. Slower than :class:`Ranks`.

    Args:
        inject: called before each exchange; drills raise there.
        note: called with what this rank has raised, and with None once all ranks know.
    """

    def __init__(
        self,
        ranks: Ranks,
        inject: Callable[[], None] = lambda: None,
        note: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        self._ranks = ranks
        self._inject = inject
        self._note = note
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self._depth = 0

    def gather(self, value: Any) -> list[Any]:
        self._inject()
        return self._exchange({"value": value})

    def sum(self, numbers: list[float]) -> list[float]:
        by_rank = self.gather([float(number) for number in numbers])
        return [math.fsum(values) for values in zip(*by_rank, strict=True)]

    def from_first(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def all_or_none(self, what: str, work: Callable[[], T]) -> T:
        result = work()  # what it raises, all learn in the exchange
        self.ready()
        return result

    def ready(self) -> None:
        """Make sure that no rank has failed. Collective."""
        self.gather(None)

    def attempt(self, work: Callable[[], T]) -> T | Failure:
        """Call ``work`` on all ranks; a failure on any rank becomes one on all. Collective."""
        self._depth += 1
        try:
            try:
                result = work()
                self._exchange({"value": None})
                return result
            except (_FailedError, *_DECISIONS):
                raise
            except Exception as error:
                _log.debug("an observer failed", exc_info=error)
                why = _words(error)
                self._note(error)
                self._exchange({"depth": self._depth, "why": f"rank {self.rank}: {why}"})
                raise AssertionError("a failed rank makes each exchange fail") from error
        except _FailedError as failed:
            self._note(None)
            if failed.depth < self._depth:
                raise
            return Failure(failed.why)
        finally:
            self._depth -= 1

    def _exchange(self, own: dict[str, Any]) -> list[Any]:
        by_rank = self._ranks.gather(own)
        failed = [answer for answer in by_rank if "depth" in answer]
        if failed:
            depth = min(answer["depth"] for answer in failed)
            raise _FailedError(depth, _joined([str(answer["why"]) for answer in failed]))
        return [answer["value"] for answer in by_rank]


@dataclass(eq=False)
class Observers:
    """All observers of one rank, by name.

    Args:
        report: receives a journal line on all ranks.
        recover: called after a failure, to drop what is left of a computation.
        inject: called with the name of the observer at work, and how many exchanges it has had.
        last_words: see :class:`LastWords`.
    """

    agreement: Ranks
    report: Callable[[Incident], None]
    recover: Callable[[], None] = lambda: None
    inject: Callable[[str, int], None] = lambda name, num: None
    last_words: LastWords | None = None
    step: int = 0
    _at_work: str = ""
    _num_exchanges: int = 0
    _out: set[str] = field(default_factory=set)  # on all ranks
    _failed: dict[str, str] = field(default_factory=dict)  # on this one; the others learn later

    def __post_init__(self) -> None:
        self.ranks = ObservedRanks(self.agreement, self._at_exchange, self._note_failure)

    @property
    def has_failed(self) -> bool:
        """Whether the other ranks are to learn of a failure here: see :meth:`settle`."""
        return bool(self._failed)

    def is_out(self, name: str) -> bool:
        """Whether this observer was left out. Equal on all ranks."""
        return name in self._out

    def together(
        self, name: str, work: Callable[[], T], *, stays: bool = False
    ) -> T | Failure | None:
        """Call a collective observer. Collective.

        Args:
            stays: call it again after a failure.

        Returns:
            Its result, or why there is none; None if it was left out before.
        """
        if name in self._out:
            return None

        def whole() -> T:
            if name in self._failed:
                raise _EarlierError(self._failed.pop(name))
            self.inject(name, 0)
            self.ranks.ready()  # what follows may be an exchange that nobody can meet
            return work()

        before = self._at_work, self._num_exchanges
        self._at_work, self._num_exchanges = name, 0
        result = self.ranks.attempt(whole)
        self._at_work, self._num_exchanges = before
        if isinstance(result, Failure):
            self.recover()
            self._leave_out(name, result.why, stays=stays)
        return result

    def alone(self, name: str, work: Callable[[], T], default: T) -> T:
        """Call an observer that exchanges nothing; ``default`` if it fails or has failed."""
        if name in self._out or name in self._failed:
            return default
        try:
            self.inject(name, 0)
            return work()
        except _DECISIONS:
            raise
        except Exception as error:
            self.note(name, error)
            return default

    def note(self, name: str, error: Exception) -> None:
        """Note a failure on this rank, of which the others learn later."""
        _log.debug("%s failed", name, exc_info=error)
        self._failed.setdefault(name, _words(error))

    def settle(self) -> None:
        """Leave out on all ranks what has failed on any. Collective."""
        own, self._failed = self._failed, {}
        by_rank = self.agreement.gather(own)
        for name in dict.fromkeys(name for whys in by_rank for name in whys):
            ranks = [rank for rank, whys in enumerate(by_rank) if name in whys]
            self._leave_out(
                name, _joined([f"rank {rank}: {by_rank[rank][name]}" for rank in ranks])
            )

    def leave_out(self, name: str) -> None:
        """Leave an observer out from now on. All ranks call it."""
        self._out.add(name)

    def _leave_out(self, name: str, why: str, *, stays: bool = False) -> None:
        if name in self._out:
            return
        if not stays:
            self.leave_out(name)
        self.report(
            Incident(
                kind=OBSERVER,
                step=self.step,
                decision="this time without it" if stays else "go on without it",
                reason=f"{name}: not tried: {why}",
                detail={"observer": name},
            )
        )

    def _note_failure(self, error: Exception | None) -> None:
        if self.last_words is None:
            return
        if error is None:
            self.last_words.remove()
        else:
            why = f"rank {self.ranks.rank}: {_words(error)}"
            self.last_words.write(self._at_work, self.step, error, why)

    def _at_exchange(self) -> None:
        self._num_exchanges += 1
        self.inject(self._at_work, self._num_exchanges)


def _joined(reasons: Sequence[str]) -> str:
    """One sentence; ranks that give the same reason are named together."""
    ranks_by_text: dict[str, list[str]] = {}
    for reason in reasons:
        rank, _, text = reason.partition(": ")
        ranks_by_text.setdefault(text, []).append(rank.removeprefix("rank "))
    parts = [f"rank {', '.join(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    return "; ".join(parts)[: 2 * _MOST_WORDS]
