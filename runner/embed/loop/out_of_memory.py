"""After a loop ran out of memory: computes its batches in smaller parts, or leaves the batch out.

Not within the step: the other ranks wait in a collective that this rank does not enter. So the
error ends the processes, the journal has a crash whose cause is memory, and the next start, on all
ranks alike, resumes from the newest checkpoint and decides here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from runner.distributed.agreement import Ranks
from runner.health.root_cause import MEMORY
from runner.policy.decision.history import Incident
from runner.system.error import ConfigError

_KIND = "out_of_memory"  # of journal lines
CHOICES = ("halve", "skip", "raise")


def check_choice(choice: Any, *, is_a_stage: bool) -> str:
    """
    Raises:
        ConfigError: it is none, or a pipeline cannot do it.
    """
    if choice not in CHOICES:
        raise ConfigError(f"on_oom={choice!r}: must be one of {', '.join(CHOICES)}")
    if choice == "halve" and is_a_stage:
        raise ConfigError(
            "on_oom='halve': the stages of pipeline= are made for micro-batches of one size; give "
            "the schedule more of them, or take on_oom='skip'"
        )
    return str(choice)


class MemoryPlan:
    """In how many parts batches are computed, and which step's batches are left out.

    Args:
        choice: ``halve``, ``skip`` or ``raise``.
        incidents: the journal's.
        report: writes a line into the journal. Collective.
        ranks: that agree how far a batch can be split.
    """

    def __init__(
        self,
        choice: str,
        incidents: Sequence[Incident],
        report: Callable[[Incident], None],
        ranks: Ranks,
    ) -> None:
        self._choice = choice
        self._ranks = ranks
        self._crashes = [
            one for one in incidents if one.kind == "crash" and one.detail.get("cause") == MEMORY
        ]
        settled = [one.detail for one in incidents if one.kind == _KIND]
        self._from = [(line["from_step"], line["parts"]) for line in settled if "parts" in line]
        self._is_new = len(self._crashes) > max((line["crashes"] for line in settled), default=0)
        self._is_alike = self._is_new and self._num_ranks(incidents) == ranks.world_size
        self._has_parted = False
        if self._is_new and choice == "halve":
            step = self._crashes[-1].step
            parts = 2 * self.num_parts(step)
            self._from.append((step, parts))
            what = f"compute batches in {parts} parts from step {step} on"
            report(self._incident(what, {"from_step": step, "parts": parts, "positions": []}))

    def _num_ranks(self, incidents: Sequence[Incident]) -> int | None:
        """How many ranks the start had whose memory ran out last."""
        number = None
        for one in incidents:
            if one is self._crashes[-1]:
                break
            number = one.detail.get("world_size") if one.kind == "start" else number
        return number

    def _incident(self, decision: str, detail: Mapping[str, Any]) -> Incident:
        crash = self._crashes[-1]
        return Incident(
            kind=_KIND,
            step=crash.step,
            decision=decision,
            reason=crash.reason,
            ranks=crash.ranks,
            detail={**detail, "crashes": len(self._crashes)},
        )

    def num_parts(self, step: int) -> int:
        """Earlier steps keep their parts, so that they are computed again bit for bit."""
        return max((parts for start, parts in self._from if start <= step), default=1)

    def leaves_out(self, step: int) -> bool:
        """Whether the next batches of this step are those with which memory ran out."""
        return self._is_new and self._choice == "skip" and step == self._crashes[-1].step

    def left_out(self, batches: Sequence[int]) -> Incident:
        """The journal's line that skips them."""
        self._is_new = False
        what = f"skip {len(batches)} batch{'es' if len(batches) > 1 else ''}"
        return self._incident(what, {"positions": list(batches)})

    def split(self, batch: Any, step: int) -> Iterator[tuple[Any, float]]:
        """A batch's parts, and the share of its samples that each has; as many on all ranks.

        Collective where there is more than one part.

        Raises:
            ConfigError: it cannot be split, or not further.
        """
        self._has_parted = True
        parts = self.num_parts(step)
        if parts == 1:
            yield batch, 1.0
            return
        rows = self._ranks.all_or_none("splitting a batch", lambda: _rows(batch))
        # A rank may have a sample less, and each part is a pass in which ranks meet.
        fewest = min(self._ranks.gather(rows))
        # Batches of other steps may be smaller, as on more ranks.
        if parts // 2 >= fewest and self._is_alike and step == self._crashes[-1].step:
            raise ConfigError(
                f"guard.parts: a batch of {fewest} samples was computed in parts of one, and "
                "memory ran out even so; free memory (recomputed activations, shorter samples, "
                "more ranks), or take on_oom='skip'"
            )
        parts = min(parts, fewest)
        for number in range(parts):
            start, stop = rows * number // parts, rows * (number + 1) // parts
            part = _changed(batch, itemgetter(slice(start, stop)))
            yield part, (stop - start) / rows

    def require_parts(self, step: int) -> None:
        """
        Raises:
            ConfigError: the loop computes whole batches, with which memory runs out again.
        """
        if not self._has_parted and self.num_parts(step) > 1:
            raise ConfigError(
                "on_oom='halve': memory ran out in this run, and the loop computes whole batches; "
                "write `for part, share in guard.parts(batch):` around forward and backward "
                "(docs/loop.md), or take on_oom='skip'"
            )


def _rows(batch: Any) -> int:
    sizes: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.add(tensor.shape[0])
        return tensor

    _changed(batch, note)
    if len(sizes) != 1:
        raise ConfigError(
            f"guard.parts: the batch's tensors have {sorted(sizes)} as their first dimension; to "
            "be split, a batch is a tensor, or a list, tuple or mapping of them, with a row for "
            "each sample"
        )
    return sizes.pop()


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with its tensors changed; numbers, strings and scalar tensors stay."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: _changed(one, change) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(one, change) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_changed(one, change) for one in value)
    return value
