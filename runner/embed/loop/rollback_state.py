"""The state that a rollback restores with the weights: schedulers, randomness, data position.

It is JSON in each checkpoint's ``train_state``; what differs between ranks is stored for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from runner.distributed.agreement import Ranks
from runner.embed.data.loaders import Source
from runner.embed.loop.measure import Logged
from runner.embed.state.codec import pack, unpack
from runner.embed.state.loop_state import LoopState
from runner.embed.state.randomness import Randomness
from runner.system.error import CheckpointError, RunnerError


class Scheduler(Protocol):
    """A learning-rate scheduler, or another object whose state is plain values."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> None: ...


class DataPosition:
    """The run's position in the data: the pass (``epoch``), and the batch in it.

    Attributes:
        start: the number of the pass's first batch.
        begun: what :meth:`Source.begin` returned on this rank.
        state: what :meth:`Source.state` returned on this rank.
        drawn: how many batches of the pass were taken.
        is_over: whether the pass has no further batch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.start = 0
        self.source: Source | None = None
        self.begun: Any = None
        self.state: Any = None
        self.drawn = 0
        self.is_over = False

    def to_json(self) -> dict[str, Any]:
        """This rank's position as JSON."""
        source = self.source
        return {
            "epoch": self.epoch,
            "start": self.start,
            "drawn": source.drawn if source else self.drawn,
            "over": source.is_over if source else self.is_over,
            "begun": pack(self.begun, "the loader's generators"),
            "state": pack(source.state() if source else self.state, "loader.state_dict()"),
        }

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`; the caller still has to move a source there. Until then a
        save has this position, not that of the source before."""
        self.source = None
        self.epoch, self.start, self.drawn = stored["epoch"], stored["start"], stored["drawn"]
        self.is_over = bool(stored.get("over", False))
        self.begun, self.state = unpack(stored["begun"]), unpack(stored["state"])

    def forget_last_batch(self) -> None:
        """The position is another rank's: do not compare its last batch with this rank's."""
        if isinstance(self.state, dict) and "last" in self.state:
            self.state["last"] = ""


class CannotReadAgain(RunnerError):
    """The run can only be resumed from its checkpoint by another process."""


def require_beginning(source: Source, ranks: Ranks, what: str) -> None:
    """Collective.

    Raises:
        CannotReadAgain: on some rank the loader cannot be read from its beginning.
    """
    if not all(ranks.gather(source.can_begin_again)):
        raise CannotReadAgain(
            f"{what}, and reading the data draws from the random generators of the process, so "
            "that it has to be read again; but the loader is an iterator (a generator), which has "
            "no beginning. Start the same script again: it goes on from the newest checkpoint, "
            "exactly. Or give guard.over what can be iterated over again"
        )


class RollbackState:
    """Saves and restores this state, see :class:`runner.train.state.Carried`.

    Attributes:
        data_goes_on: whether the data continues after a rollback, and what was read is skipped.
        has_moved: whether the last rollback has set the data position back.
        schedulers: the loop's.
        logged: metrics that go with the next step.
    """

    def __init__(
        self,
        state: LoopState,
        schedulers: Sequence[Scheduler],
        position: DataPosition,
        ranks: Ranks,
        logged: Logged,
    ) -> None:
        self.data_goes_on = False
        self.has_moved = False
        self._state = state
        self.schedulers = schedulers
        self._position = position
        self.logged = logged
        self._ranks = ranks
        # The first rank of those that the script has seeded alike: they draw alike, as ranks do
        # that compute a sample together.
        seeds = ranks.gather(torch.initial_seed())
        self._alike = [seeds.index(seed) for seed in seeds]
        self._first = Randomness()
        self._last: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The state as JSON. Collective."""
        own = self._ranks.all_or_none(
            "saving the state of the loop",
            lambda: {
                "random": Randomness().to_json(),
                "data": self._position.to_json(),
                "logged": self.logged.to_json(),
                "schedulers": [
                    pack(scheduler.state_dict(), f"scheduler {number}")
                    for number, scheduler in enumerate(self.schedulers)
                ],
            },
        )
        schedulers = own.pop("schedulers")
        by_rank = {"ranks": self._ranks.gather(own), "alike": self._alike}
        return {**self._state.capture(), "schedulers": schedulers, **by_rank}

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Restore the state, after the tensors were loaded. Collective."""
        self._state.apply(state)
        self._last = state
        self.repeat()
        self.logged.load_json(self._own().get("logged"), self._state.compute_device)
        place = self._own()["data"]
        self.has_moved = not self.data_goes_on or self._must_read_again(place)
        if self.has_moved:
            self._position.load_json(place)
            if len(state["ranks"]) != self._ranks.world_size:
                self._position.forget_last_batch()
        self._state.capture()

    def _must_read_again(self, place: Mapping[str, Any]) -> bool:
        """Whether reading has drawn from the random generators since the checkpoint. Collective.

        The generators go back, but data that continues would not draw again, and later batches
        would differ from those of a run that skips the range. So it is read again and dropped.

        Raises:
            CannotReadAgain: the loader is an iterator, which has no beginning.
        """
        position, source = self._position, self._position.source
        if source is None:
            return False
        drew = source.last_draw is not None and (
            position.start + source.last_draw >= place["start"] + place["drawn"]
        )
        wanted = any(self._ranks.gather(drew))
        if wanted:
            require_beginning(source, self._ranks, "went back to a checkpoint")
        return wanted

    def repeat(self) -> None:
        """Restore schedulers, learning rates and randomness again, but no tensors.

        Needed where a script changes them before it reaches the position of the checkpoint.
        """
        if self._last is None:
            return
        self._state.apply_options(self._last)
        states = list(self._last["schedulers"])
        if len(states) < len(self.schedulers) and hasattr(self.schedulers[-1], "are_callbacks"):
            states.append(None)  # written by 0.1.0, which saved no callbacks
        try:
            for scheduler, state in zip(self.schedulers, states, strict=True):
                scheduler.load_state_dict(unpack(state))
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot load the scheduler's state ({type(error).__name__}: {error})"
            ) from None
        self.restore_randomness()

    def restore_randomness(self) -> None:
        """Restore the random generators from the checkpoint that was loaded last.

        If other ranks drew alike then (other meshes, or another world size), those that do now take
        one state. A rank that was not there then, and draws alike with none that was, begins with
        its own seed: with another's state it would draw that rank's data and masks for ever.
        """
        if self._last is None:
            return
        by_rank, own = self._last["ranks"], self._ranks.rank
        is_as_then = self._last.get("alike", self._alike) == self._alike
        source = own if is_as_then and own < len(by_rank) else self._alike[own]
        if source < len(by_rank):
            Randomness.from_json(by_rank[source]["random"]).restore()
        else:
            self._first.restore()

    def _own(self) -> Mapping[str, Any]:
        """This rank's part; another rank's if the world size changed."""
        assert self._last is not None
        by_rank = self._last["ranks"]
        own: Mapping[str, Any] = by_rank[self._ranks.rank % len(by_rank)]
        return own
