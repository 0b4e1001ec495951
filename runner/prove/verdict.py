"""The verdict: for a person, as JSON, and with what would mend the script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.prove.compare import Finding
from runner.prove.judgement import Judgement
from runner.system.error import EXIT_CONFIG, EXIT_CRASH, EXIT_DONE
from runner.system.units import duration

_RING = """\
    from runner import Ring  # checkpoints of all of it, whole or not at all
    ring = Ring("runs/a", {"model": model, "optimizer": optimizer, "schedule": schedule, ...})
    for step in range(ring.step, steps):
        ...
        ring.save(step + 1)"""
_SAMPLER = """\
    from runner import Sampler  # the place in the data is one number
    sampler = Sampler(data, global_size=batch_size * world_size, seed=1)
    loader = DataLoader(data, batch_sampler=sampler)
    sampler.load_state_dict(checkpoint["sampler"])  # saved as sampler.state_dict()"""
_GUARD = """\
    from runner import Guard  # weights, optimizer, schedule, data and random states in one
    guard = Guard("runs/a", model=model, optimizer=optimizer, scheduler=schedule, every=50)
    for batch in guard.over(loader):
        ...
        if guard.ok(loss):
            optimizer.step()"""
# By the kind of the first finding: what to do, and the lines.
_REMEDIES = {
    "not_resumed": ("Load the newest checkpoint at the start; Guard and Ring do", _RING),
    "older_checkpoint": ("Choose the newest by its step, not its name or time; Ring does", _RING),
    "weights": ("Save and load the whole state_dict, in its own type; Ring does", _RING),
    "weights_rounded": ("Save the weights in their own type; Ring does", _RING),
    "optimizer_state": ("Save and load optimizer.state_dict(); Ring does", _RING),
    "optimizer_steps": ("Save and load the whole optimizer.state_dict(); Ring does", _RING),
    "param_groups": ("Build the groups in the same order at each start", _RING),
    "rank": ("Save by rank what differs between ranks; Ring does", _RING),
    "learning_rate": ("Save and load schedule.state_dict(), or count steps from it", _RING),
    "buffers": ("Save model.state_dict(), not the parameters alone; Ring does", _RING),
    "scaler": ("Save and load scaler.state_dict(); put it into a Ring", _RING),
    "ema": ("Save and load the averaged model's state_dict; put it into a Ring", _RING),
    "random": ("Save and load the generators' states of each rank; Guard does", _GUARD),
    "data": ("Save the place in the data, and the epoch of its order; Sampler does", _SAMPLER),
    "data_augmented": ("Seed an augmentation by its sample's index; with Sampler", _SAMPLER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Whether the script repeats its own bits when it is run twice undisturbed.

    Args:
        since: the first step that differs.
        noise: the largest relative difference of norms and losses.
        loss_noise: that of the losses, absolute.
        reads_the_same: whether both runs read the same batches.
        tolerance: what a comparison then allows, relative.
    """

    exactly: bool = True
    since: int = 0
    noise: float = 0.0
    loss_noise: float = 0.0
    reads_the_same: bool = True
    tolerance: float = 0.0

    @property
    def decimals(self) -> int:
        """How many decimals of the loss do repeat."""
        return 15 if not self.loss_noise else max(0, math.floor(-math.log10(2 * self.loss_noise)))

    def sentence(self) -> str:
        """For a person; empty where it repeats."""
        if self.exactly:
            return ""
        data = "" if self.reads_the_same else " It reads other data each time: seed its order."
        return (
            "The script does not repeat its own bits: run twice undisturbed it differs from step "
            f"{self.since} on, and {self.decimals} decimals of the loss repeat.{data} What it "
            "saved is compared exactly, later steps by that noise."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was proved.

    Args:
        reason: why nothing can be said; empty if something can.
        steps: of the undisturbed run.
        kills: after which steps it was killed.
        resumes: one for each kill until the first that is not equal.
    """

    command: tuple[str, ...] = ()
    reason: str = ""
    steps: int = 0
    ranks: int = 1
    kills: tuple[int, ...] = ()
    resumes: tuple[Judgement, ...] = ()
    repeats: Repeats = Repeats()
    seconds: float = 0.0

    @property
    def first(self) -> Finding | None:
        """What differs first; None if nothing does."""
        found = [f for resume in self.resumes if not resume.is_equal for f in resume.findings]
        return found[0] if found else None

    @property
    def is_equal(self) -> bool:
        """Whether every resume was the same run."""
        return not self.reason and bool(self.resumes) and all(r.is_equal for r in self.resumes)

    @property
    def code(self) -> int:
        """The exit code: 0 equal, 1 differs, 2 could not be judged."""
        if self.reason or not self.resumes:
            return EXIT_CONFIG
        return EXIT_DONE if self.is_equal else EXIT_CRASH

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        state = {EXIT_DONE: "equal", EXIT_CRASH: "differs", EXIT_CONFIG: "undecided"}[self.code]
        first = self.first
        return {
            "verdict": state,
            "first": asdict(first) if first else None,
            "text": self.text(),
            **asdict(self),
        }

    def text(self) -> str:
        """For a person: the finding first, whether it matters, what to do."""
        if self.reason:
            return f"Could not be judged. {self.reason}"
        lines = [self.repeats.sentence()]
        last = self.resumes[-1]
        first = self.first
        notes = [note for resume in self.resumes for note in resume.notes][:1]
        if first is None:
            lines += [self._equal(), *(f.sentence for f in last.findings), *notes]
        else:
            others = [f for f in last.findings if f is not first]
            lines += [first.sentence, *(f"Also: {other.sentence}" for other in others)]
            lines += [self._matters(last, first), *_remedy(first)]
        return "\n".join(filter(None, lines))

    def _equal(self) -> str:
        rounded = any(resume.findings for resume in self.resumes)
        bits = "bit for bit" if self.repeats.exactly and not rounded else "within rounding"
        if not self.repeats.exactly:
            bits = "within the script's own noise"
        kills, ranks = _count(len(self.kills), "kill"), _count(self.ranks, "rank")
        return f"Equal {bits}: {self.steps} steps, {kills}, {ranks} ({duration(self.seconds)})."

    def _matters(self, resume: Judgement, first: Finding) -> str:
        where = f"killed after step {self.kills[-1]}, went on with step {resume.start}"
        steps = _count(max(0, resume.last - first.step + 1), "step")
        if resume.loss_difference is None:
            return f"({where}; no loss was seen)"
        own = "the script repeats its own bits"
        if not self.repeats.exactly:
            own = f"between two undisturbed runs {self.repeats.loss_noise:.3g}"
        if resume.loss_difference == 0.0:
            return f"The loss of the next {steps} is the same ({where}; {own})."
        share = f"up to {resume.loss_difference:.3g}"
        return f"The loss of the next {steps} differs by {share} ({where}; {own})."


def _remedy(first: Finding) -> Sequence[str]:
    kind = first.kind if first.kind in _REMEDIES else first.kind.partition("_")[0]
    if kind not in _REMEDIES:
        return []
    words, lines = _REMEDIES[kind]
    return [f"To mend it: {words[0].lower()}{words[1:]}:", lines]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
