"""One rank without a process group, and its observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.distributed.observers import Observers
from runner.embed.opening import SingleProcessRanks
from runner.policy.decision.history import Incident


class OneRank(SingleProcessRanks):
    """Exchanges with nobody; values travel as JSON all the same, and errors as they are."""

    def all_or_none(self, what: str, work: Callable[[], Any]) -> Any:
        return work()

    all_or_none_patiently = all_or_none


def observers(report: Callable[[Incident], None] = lambda line: None) -> Observers:
    return Observers(OneRank(), report=report)
