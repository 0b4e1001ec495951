"""All that goes back with the weights: optimizers, schedulers, randomness, the place in the data.

As JSON in each checkpoint's ``train_state``, with what differs between ranks told for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from runner.distributed.agreement import Ranks
from runner.embed.codec import pack, unpack
from runner.embed.loaders import Source
from runner.embed.randomness import Randomness
from runner.embed.state import LoopState
from runner.system.error import CheckpointError


class Scheduler(Protocol):
    """A learning-rate scheduler, or whatever else has a state of plain values."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> None: ...


class DataPlace:
    """Where the run stands in the data: which pass (``epoch``), and where in it.

    ``start`` is the number of the pass's first batch; ``begun`` and ``state`` are this rank's, see
    :class:`Source`; ``drawn`` is how many batches of the pass had been taken, ``is_over`` that
    there was no further one.
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
        """Of this rank."""
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
        """Inverse of :meth:`to_json`, but for the source, which is to be brought there."""
        self.epoch, self.start, self.drawn = stored["epoch"], stored["start"], stored["drawn"]
        self.is_over = bool(stored.get("over", False))
        self.begun, self.state = unpack(stored["begun"]), unpack(stored["state"])


class LoopCarried:
    """See :class:`runner.train.state.Carried`.

    ``data_goes_on``: whether a rollback leaves the data where it is.
    """

    def __init__(
        self,
        state: LoopState,
        schedulers: Sequence[Scheduler],
        place: DataPlace,
        ranks: Ranks,
    ) -> None:
        self.data_goes_on = False
        self._state = state
        self._schedulers = schedulers
        self._place = place
        self._ranks = ranks
        self._last: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Collective."""
        own = self._ranks.all_or_none(
            "saving the state of the loop",
            lambda: {
                "random": Randomness().to_json(),
                "data": self._place.to_json(),
                "schedulers": [
                    pack(one.state_dict(), f"scheduler {number}")
                    for number, one in enumerate(self._schedulers)
                ],
            },
        )
        schedulers = own.pop("schedulers")
        return {
            **self._state.capture(),
            "schedulers": schedulers,
            "ranks": self._ranks.gather(own),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Collective, after the tensors were loaded."""
        self._state.apply(state)
        self._last = state
        self.repeat()
        if not self.data_goes_on:
            self._place.load_json(self._own()["data"])
        self._state.capture()

    def repeat(self) -> None:
        """Put back, once more, what is no tensor: schedulers, rates and randomness.

        For a script that does something to them before it comes to where it was.
        """
        if self._last is None:
            return
        self._state.apply_options(self._last)
        try:
            for scheduler, state in zip(self._schedulers, self._last["schedulers"], strict=True):
                scheduler.load_state_dict(unpack(state))
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the scheduler's state cannot be used ({type(error).__name__}: {error})"
            ) from None
        self.put_randomness_back()

    def put_randomness_back(self) -> None:
        """To that of the checkpoint which was loaded last."""
        if self._last is not None:
            Randomness.from_json(self._own()["random"]).put_back()

    def _own(self) -> Mapping[str, Any]:
        """This rank's part; of another world's, some rank's."""
        assert self._last is not None
        by_rank = self._last["ranks"]
        own: Mapping[str, Any] = by_rank[self._ranks.rank % len(by_rank)]
        return own
