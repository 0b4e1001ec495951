"""Runs a script undisturbed, and again with kills; compares; says what differs first."""

from __future__ import annotations

import random
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from runner.prove.compare import QUIET, differing, find_start, mean_loss, spread
from runner.prove.inside import marks
from runner.prove.judgement import Judgement, compare_ranks, compare_start
from runner.prove.record import Save, StartRecord, Trajectory, Undecided, checkpoints
from runner.prove.starts import Ending, Place, Scratch, Start, on_other_ranks
from runner.prove.verdict import Repeats, Verdict
from runner.system.environment import variables
from runner.system.error import ConfigError

_WINDOWS = ((0.2, 0.45), (0.5, 0.75))  # of the steps: where the kills are drawn
_LEAST_STEPS = 3
_MARGIN = 4.0  # over the noise that was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to prove.

    Args:
        command: of the script.
        steps: optimizer steps of a run.
        kills: steps after which it is killed; empty: drawn from ``seed``.
        number: the signal.
        resume_with: arguments that are added from the second start on; ``{out}`` in them is the
            output directory.
        out_argument: the argument that names the output directory.
        out: the output directory, if the script chooses it itself.
        other_ranks: with how many processes it is resumed; 0: the same.
        limit_seconds: how long a step, or the start, may take.
        scratch: parent of the folder that takes all files; None: the system's.
    """

    command: tuple[str, ...]
    steps: int = 60
    kills: tuple[int, ...] = ()
    seed: int = 0
    number: int = signal.SIGKILL
    resume_with: str = ""
    out_argument: str = ""
    out: str = ""
    other_ranks: int = 0
    limit_seconds: float = 600.0
    scratch: Path | None = None

    def check(self) -> None:
        """
        Raises:
            ConfigError: something is impossible.
        """
        if not self.command:
            raise ConfigError(
                "prove-resume: no command; write: prove-resume [options] -- python ..."
            )
        if self.steps < _LEAST_STEPS:
            raise ConfigError(f"--steps {self.steps}: at least {_LEAST_STEPS}")
        wrong = [kill for kill in self.kills if not 0 < kill < self.steps]
        if wrong or list(self.kills) != sorted(set(self.kills)):
            raise ConfigError(
                f"--kill {','.join(map(str, self.kills))}: rising steps from 1 to {self.steps - 1}"
            )
        if self.other_ranks:
            on_other_ranks(self.command, self.other_ranks)


def prove_resume(
    command: str | Sequence[str],
    *,
    steps: int = 60,
    kills: Sequence[int] = (),
    resume_with: str = "",
    out_arg: str = "",
    out: str = "",
    other_ranks: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Verdict:
    """Prove or refute that a training script resumes; for a project's own tests.

    >>> verdict = prove_resume("true", out="runs")
    >>> verdict.code, verdict.reason[:43]
    (2, 'The command ended without an optimizer step')

    Args:
        command: as a shell's line, or its words. It runs in a copy of the working directory.
        steps: optimizer steps of a run.
        kills: steps after which it is killed; default: two that are drawn.
        resume_with: arguments that are added when it is started again; ``{out}`` in them is the
            output directory.
        out_arg: the argument of the command that names the output directory.
        out: the output directory, where the script chooses it itself.
        other_ranks: resume with this many processes, and compare samples and loss.
        environment: variables for the command; default: this process's.

    Returns:
        ``is_equal``, ``first`` (what differs first, if anything does), ``reason`` (why it could
        not be judged, else empty), ``text()`` for a person and ``code`` as the command line has it.

    Raises:
        ConfigError: an argument is impossible; nothing was started.
    """
    plan = Plan(
        command=tuple(shlex.split(command) if isinstance(command, str) else command),
        steps=steps,
        kills=tuple(kills),
        resume_with=resume_with,
        out_argument=out_arg,
        out=out,
        other_ranks=other_ranks,
    )
    return prove(plan, environment=environment or variables(), home=Path.cwd())


def prove(
    plan: Plan,
    *,
    environment: Mapping[str, str],
    home: Path,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Prove or refute that the script resumes.

    Args:
        home: its working directory, which stays as it is.

    Raises:
        ConfigError: the plan is impossible; nothing was started.
    """
    plan.check()
    try:
        root = Path(tempfile.mkdtemp(prefix="holdfast-prove-", dir=plan.scratch))
    except OSError as error:
        raise ConfigError(
            f"--scratch {plan.scratch}: cannot be written ({error.strerror}); choose another folder"
        ) from None
    scratch = Scratch(
        root=root, command=plan.command, home=home, out_argument=plan.out_argument, out=plan.out
    )
    began = time.monotonic()
    try:
        scratch.check()
        before = [dict(marks(path)) for path in scratch.untouched()]
        verdict = _Proof(plan=plan, scratch=scratch, environment=environment, say=say).verdict()
        if before != [dict(marks(path)) for path in scratch.untouched()]:
            raise ConfigError(
                f"{scratch.untouched()[0]} has changed meanwhile; was it this script?"
            )
        return replace(verdict, seconds=time.monotonic() - began)
    finally:
        shutil.rmtree(root, ignore_errors=True)


@dataclass(eq=False, kw_only=True)
class _Proof:
    """The starts of one proof."""

    plan: Plan
    scratch: Scratch
    environment: Mapping[str, str]
    say: Callable[[str], None]
    places: dict[str, Place] = field(default_factory=dict)
    judgements: list[Judgement] = field(default_factory=list)
    kills: list[int] = field(default_factory=list)

    def verdict(self) -> Verdict:
        """Run all of it; what cannot be judged is a verdict too."""
        reference, repeats, reason = Trajectory(), Repeats(), ""
        try:
            reference = self._undisturbed("undisturbed")
            saves = self._checkpoints(reference)
            kills = self.plan.kills or choose_kills(saves, reference.last, self.plan.seed)
            kills = kills[:1] if self.plan.other_ranks else kills
            _check_kills(kills, saves, reference.last)
            goal = Ending(stop=lambda _: kills[0], number=self.plan.number)
            chain = self._start("killed", "killed", goal)
            if self.plan.other_ranks:
                self._resume_on_other_ranks(reference, chain, kills[0])
            else:
                repeats = self._repeats(reference, chain)
                self._resume(reference, chain, kills, repeats)
        except Undecided as error:
            reason = str(error)
        return Verdict(
            command=self.plan.command,
            reason=reason,
            steps=reference.last,
            ranks=reference.world_size,
            kills=tuple(self.kills),
            resumes=tuple(self.judgements),
            repeats=repeats,
        )

    def _start(self, run: str, name: str, goal: Ending, *, resumes: bool = False) -> Trajectory:
        """Start the script in the place of a run, which is made first; returns what it did."""
        place = self.places.get(run) or self.scratch.place(run)
        self.places[run] = place
        command = place.command
        if resumes:
            words = shlex.split(self.plan.resume_with)
            command += tuple(word.replace("{out}", str(place.out)) for word in words)
            if self.plan.other_ranks:
                command = on_other_ranks(command, self.plan.other_ranks)
        start = Start(
            place=replace(place, command=command),
            folder=self.scratch.root / "records" / name.replace(" ", "-"),
            environment=self.environment,
            scratch=self.scratch,
            limit_seconds=self.plan.limit_seconds,
            goal=goal,
            say=lambda text: self.say(f"{name}: {text}"),
        )
        try:
            start.run()
        except Undecided as error:
            if not resumes:
                raise
            raise Undecided(f"When it was started again: {error}") from None
        return start.recorded.trajectory()

    def _undisturbed(self, name: str) -> Trajectory:
        found = self._start(name, name, Ending(stop=lambda _: self.plan.steps, ends=True))
        if found.last < _LEAST_STEPS:
            raise Undecided(
                f"The script ended after {found.last} steps; at least {_LEAST_STEPS} are needed"
            )
        return found

    def _checkpoints(self, reference: Trajectory) -> list[Save]:
        last = reference.last
        saves = [save for save in checkpoints(reference) if save.after < last]
        if saves:
            return saves
        if not reference.saves:
            raise Undecided(
                f"No file was written before step {last}: save more often, or give a larger --steps"
            )
        largest = max(save.num_bytes for save in reference.saves)
        raise Undecided(
            f"No checkpoint was written before step {last}: at most {largest:,} bytes between two "
            f"steps, and the weights have {reference.num_bytes:,}. Save more often, or give a "
            "larger --steps"
        )

    def _resume(
        self, reference: Trajectory, chain: Trajectory, kills: Sequence[int], repeats: Repeats
    ) -> None:
        """Resume after each kill; stops at the first resume that is not equal."""
        ends = (*kills[1:], reference.last)
        for number, (kill, after) in enumerate(zip(kills, ends, strict=True), start=1):
            self.kills.append(kill)
            known = _overlaid(reference, chain, kill, repeats)
            before = _before(chain, kill)
            goal = Ending(
                stop=partial(_steps_to, after, known, before),
                number=self.plan.number if after in kills else signal.SIGKILL,
                ends=after not in kills,
            )
            own = self._start("killed", f"resumed {number}", goal, resumes=True)
            judgement = compare_start(
                known, own, before,
                exact_until=None if repeats.exactly else kill, tolerance=repeats.tolerance,
            )  # fmt: skip
            self.judgements.append(judgement)
            if not judgement.is_equal:
                break
            chain = _overlaid(chain, own.moved(judgement.start - 1), after, repeats)

    def _repeats(self, reference: Trajectory, again: Trajectory) -> Repeats:
        """Whether the script repeats its own bits; if not, it is run once more for its noise."""
        first = _first_difference(reference, again)
        if not first:
            return Repeats()
        once_more = self._undisturbed("undisturbed again")
        noises = [_noise(reference, other) for other in (again, once_more)]
        noise = max(noise for noise, _ in noises)
        return Repeats(
            exactly=False,
            since=first,
            noise=noise,
            loss_noise=max(loss for _, loss in noises),
            reads_the_same=all(
                step.batches == once_more.steps[number][rank].batches
                for number in range(1, min(reference.last, once_more.last) + 1)
                for rank, step in reference.steps[number].items()
            ),
            tolerance=_MARGIN * noise,
        )

    def _resume_on_other_ranks(self, reference: Trajectory, chain: Trajectory, kill: int) -> None:
        self.kills.append(kill)
        before = _before(chain, kill)
        goal = Ending(stop=lambda _: reference.last - before[-1].after, ends=True)
        resumed = self._start("killed", "resumed 1", goal, resumes=True)
        self.judgements.append(compare_ranks(reference, resumed, before))


def _check_kills(kills: Sequence[int], saves: Sequence[Save], last: int) -> None:
    if kills[-1] >= last:
        raise Undecided(
            f"The script ended after {last} steps, and is to be killed after {kills[-1]}"
        )
    if kills[0] <= saves[0].after:
        raise Undecided(
            f"No checkpoint was written before step {kills[0]}, at which the script is to be "
            f"killed: the first one came after step {saves[0].after}"
        )


def choose_kills(saves: Sequence[Save], steps: int, seed: int) -> tuple[int, ...]:
    """Two steps, drawn with a seed, each after a checkpoint and within :data:`_WINDOWS`.

    The script is killed at least one step after a checkpoint was written, before the next one.
    """
    draw = random.Random(seed)
    possible = [step for step in range(saves[0].after + 1, steps)]
    kills: list[int] = []
    for first, last in _WINDOWS:
        window = [step for step in possible if first * steps <= step <= last * steps]
        if window:
            kills.append(draw.choice(window))
    return tuple(kills) or (draw.choice(possible),)


def _before(chain: Trajectory, kill: int) -> list[Save]:
    found = [save for save in checkpoints(chain) if save.after < kill]
    if not found:
        raise Undecided(f"Before it was killed after step {kill}, the script saved nothing")
    return found


def _steps_to(last: int, known: Trajectory, saves: Sequence[Save], recorded: StartRecord) -> int:
    """How many steps a resumed start does to the last one."""
    return last - find_start(known, recorded.trajectory().steps.get(1, {}), saves) + 1


def _overlaid(under: Trajectory, over: Trajectory, until: int, repeats: Repeats) -> Trajectory:
    """The steps of ``under``, up to ``until`` replaced by those of ``over``.

    What a killed script itself did is what its resume must repeat, even if the undisturbed run
    differs. If that read other data, its later steps say nothing.
    """
    steps = dict(under.steps) if repeats.reads_the_same else {}
    steps |= {s: ranks for s, ranks in over.steps.items() if s <= min(until, over.last)}
    saves = [save for save in under.saves if save.after < min(over.steps, default=1)] + over.saves
    return replace(under, steps=steps, saves=saves)


def _noise(one: Trajectory, two: Trajectory) -> tuple[float, float]:
    """The largest differences of two runs: relative, of norms and losses; absolute, of losses."""
    steps = range(1, min(one.last, two.last) + 1)
    pairs = [(one.steps[s], two.steps[s]) for s in steps]
    relative = [spread(a[rank], b[rank]) for a, b in pairs for rank in a.keys() & b.keys()]
    losses = [(mean_loss(a), mean_loss(b)) for a, b in pairs]
    differences = [abs(a - b) for a, b in losses if a is not None and b is not None]
    return max(relative, default=0.0), max(differences, default=0.0)


def _first_difference(reference: Trajectory, again: Trajectory) -> int:
    """The first step that is not the same, 0 without one."""
    for step in range(1, min(reference.last, again.last) + 1):
        ranks = reference.steps[step]
        if ranks.keys() != again.steps[step].keys():
            return step
        if any(
            differing(ranks[r], again.steps[step][r], ignored=("copies", *QUIET)) for r in ranks
        ):
            return step
    return 0
