"""The guard in a user's own training loop.

It uses the same judge, ladder, ring, journal and metrics as ``python -m runner``; forward, backward
and the optimizer's step stay in the loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checkpoint.state_digest import state_digest
from runner.embed.data.loaders import Exhausted, OtherBatch, Source, source_of
from runner.embed.exits import Holder, journal_errors
from runner.embed.loop.arguments import check_alike, check_arguments, check_clip
from runner.embed.loop.device_gate import DeviceGate, require_gated
from runner.embed.loop.guarded_steps import GuardedSteps
from runner.embed.loop.measure import Logged, Measurer
from runner.embed.loop.out_of_memory import MemoryPlan, check_choice
from runner.embed.loop.rollback_state import (
    DataPosition,
    RollbackState,
    Scheduler,
    require_beginning,
)
from runner.embed.loop.zero_engine import ZeroMeasurer, ZeroState, engine_in
from runner.embed.opening import handle_signals, joined, open_run, run_config
from runner.embed.state.loop_state import LoopState
from runner.embed.state.randomness import Randomness, StepDraws
from runner.embed.state.stages import Pipeline, Stages
from runner.health.preemption import StopRequested
from runner.session.summary import RunEnd, sum_up
from runner.system.error import ConfigError

_log = logging.getLogger(__name__)
_NO_DIGEST_ABOVE = 1 << 28  # elements; above, a digest after each pass would take minutes


@dataclass(frozen=True, slots=True)
class _InHand:
    """A batch that may be replayed; ``after``: the generators as reading it left them."""

    number: int
    batch: Any
    after: Randomness | None


class Guard(Holder):
    """Guards a user's training loop: detects bad steps and refuses their updates.

    A step whose loss or gradient is NaN or Inf, or that spikes, is discarded. If bad steps persist,
    weights, optimizer, scheduler and random generators go back to a proven checkpoint, and the
    batches that caused it are skipped. Running the same script again resumes.

    After :meth:`over` has ended, weights, optimizer and schedule equal, bit for bit, those of a
    plain loop that never saw the batches in :attr:`skipped`.

    Args:
        out: directory of the run; the same one again resumes it.
        model: plain, DistributedDataParallel or FSDP2 (``fully_shard``); or several; or a
            DeepSpeed engine of ZeRO stage 1 or 2.
        optimizer: any ``torch.optim.Optimizer``; or several.
        scheduler: stepped by the loop after the optimizer; or several.
        every: steps between checkpoints on disk, or ``"auto"``: chosen by their cost.
        clip: bound of the global gradient norm; :meth:`ok` clips, the loop must not.
        accumulate: batches of :meth:`over` per step, so per call of :meth:`ok`.
        pipeline: where ``model`` is one stage of a pipeline: the mesh of one dimension
            (``mesh["pp"]``), or the group, of the ranks that a sample passes.
        settings: ``guard.*`` and ``checkpoint.*`` by their names (``persist=2``, ``keep=3``);
            ``skip=[[a, b]]``: batches never to be read, half open; ``allow_change=True``: go on
            with other settings than the run was begun with; ``sync=False``: the device
            gates the update, and the host checks the result one step later, see docs/loop.md;
            ``on_oom="halve"`` or ``"skip"``: what a start does after one that ran out of memory.

    Raises:
        ConfigError: an invalid setting, or ``out`` is in use or holds another run.
        CheckpointError: there are checkpoints, but none can be loaded.

    Every rank creates one, after ``init_process_group`` if there are several ranks.

    >>> import tempfile, torch
    >>> from runner import Guard
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(4, 1)
    >>> opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> batches = [torch.randn(8, 4) for _ in range(12)]
    >>> batches[5][0, 0] = float("nan")
    >>> out = tempfile.TemporaryDirectory()
    >>> guard = Guard(out.name, model=model, optimizer=opt, every=5)
    >>> for batch in guard.over(batches):
    ...     loss = model(batch).square().mean()
    ...     loss.backward()
    ...     if guard.ok(loss):
    ...         opt.step()
    ...     opt.zero_grad()
    >>> guard.skipped
    [(5, 6)]
    >>> guard.updates
    11
    >>> guard.close(); out.cleanup()
    """

    def __init__(
        self,
        out: str | Path,
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        every: int | str = 50,
        clip: float | None = None,
        accumulate: int = 1,
        pipeline: Pipeline | None = None,
        **settings: Any,
    ) -> None:
        skip, is_a_stage = settings.pop("skip", []), pipeline is not None
        on_oom = check_choice(settings.pop("on_oom", "raise"), is_a_stage=is_a_stage)
        config = run_config(out, every=every, accumulate=accumulate, skip=skip, given=settings)
        models, optimizers, schedulers = map(_as_list, (model, optimizer, scheduler))
        check_clip(clip, optimizers)
        engine = engine_in(models, optimizers)
        if engine is None:
            check_arguments(models, optimizers, schedulers, is_a_stage=is_a_stage)
        elif clip is not None:
            raise ConfigError(f"clip={clip}: DeepSpeed clips; set its gradient_clipping")
        elif is_a_stage:
            raise ConfigError("pipeline=: a DeepSpeed engine of ZeRO has no stages; leave it out")
        if config.guard.sync is False:
            if engine is not None:
                raise ConfigError("sync=False: a DeepSpeed engine is told before it steps")
            require_gated(optimizers)
        self._position = DataPosition()
        generators, logged = Randomness(), Logged()
        self._release_former(out)
        with joined(config, "Guard") as group:
            ranks, device = group.ranks, group.device
            self._sharded: LoopState
            if engine is not None:
                self._sharded = ZeroState(engine, ranks, device)
                self._measurer: Measurer = ZeroMeasurer(self._sharded, ranks, logged, engine)
            else:
                stages = Stages(ranks, pipeline)
                self._sharded = LoopState(models, optimizers, ranks, device, stages)
                check_alike(self._sharded.parameters, optimizers, ranks, stages)
                self._measurer = Measurer(self._sharded, ranks, logged, clip=clip)
            self._carried = RollbackState(self._sharded, schedulers, self._position, ranks, logged)
            run = open_run(config, group, self._sharded, self._carried, command="runner.Guard")
        # Code between here and the first batch draws the same numbers at each start.
        generators.restore()
        self._gate = DeviceGate(self._sharded.optimizers) if config.guard.sync is False else None
        self._steps = GuardedSteps(run, self._sharded, self._carried, self._measurer, self._gate)
        self._steps.read_step_again = self._read_step_again
        self._modes = self._sharded.modes.to_json()  # as the last step was computed
        self._memory = MemoryPlan(on_oom, run.history.incidents, run.written.report, ranks)
        self._sharded.before_change = run.drop_memory
        self._hold(run)
        handle_signals(group)
        self._sources: list[Source] = []
        self._in_hand: list[_InHand] = []  # of the step that is being computed
        self._replayed: deque[_InHand] = deque()  # to be handed out once more
        self._draws: StepDraws | None = None  # of a step of several batches, read in sequence
        self._accumulates = config.batch.global_size > 1  # or it is seen to
        self._has_begun = False
        self._is_catching_up = not run.resumed.is_fresh
        self._resumed_at = run.state.cursor

    # -- for the loop ---------------------------------------------------------------------

    def over(self, loader: Iterable[Any], *, steps: int | None = None) -> Iterator[Any]:
        """Yield the batches of ``loader`` to train on, in order, from where the run was.

        If the loader has ``[i]`` and ``len``, or ``state_dict`` and ``load_state_dict``, batches
        that a rollback undid are read again, except skipped ones. Any other iterable continues,
        and what was read since the checkpoint is skipped. Each call is one pass; a pass that the
        run has already finished yields nothing.

        Args:
            loader: this rank's; all ranks must have equally many batches.
            steps: stop after this many applied updates in all.

        Raises:
            Halted: the guard's budget is spent; uncaught, exit code 3.
            Preempted: a stop was requested, and the state is saved; uncaught, exit code 75.
        """
        number = len(self._sources)
        self._sources.append(source_of(loader, is_of_a_stage=self._sharded.stages.count > 1))
        self._steps.undoes_refused = True
        if self._has_begun:
            # The last pass may have been left by ``break``, with an update not counted yet.
            self.settle()
            self._finish_reading()
            self._abort_step()
        if steps is None:
            self._require_equal_lengths(loader)
        if number < self._position.epoch:
            return
        self._begin_pass(number)
        while not self._is_done(steps):
            item = self._next()
            if item is None:
                break
            yield item[0]
            self.settle()
        self._end_pass(number)

    def ok(self, loss: torch.Tensor | float | None, *, tokens: int = 0) -> bool:
        """Whether the optimizer may step. Collective: one all-reduce.

        Call it once per step on every rank, after ``backward`` and before the optimizer's step.
        False means that the step was discarded, or the run has already gone back to a checkpoint;
        the gradients are gone. After a resume of three or more ranks with plain gradients the first
        step is aborted: False, and its batches are replayed. With ``sync=False`` True leaves it to
        the device whether the update is made, and False may also mean that this step was
        speculative and its batches are replayed.

        Args:
            loss: this rank's, a scalar or a tensor whose mean it is; the guard judges the mean
                over ranks, and with :meth:`note` over the batches of the step. None where a
                stage of a pipeline has no loss.
            tokens: in this rank's batch, for the throughput in the metrics; of ranks that compute
                a sample together one gives them.

        Raises:
            Halted: the guard's budget is spent.
            RankError: a rank is at another step than the others.
        """
        with journal_errors(self._run):
            self._modes = self._sharded.modes.to_json()
            self._memory.require_parts(self.updates + 1)
            is_allowed = self._steps.judge(loss, tokens)
        self._replay_aborted()
        self._in_hand.clear()
        return is_allowed

    def note(self, loss: torch.Tensor | float | None) -> None:
        """With ``accumulate``: record the loss of a micro-batch but the last. Waits for nothing.

        :meth:`ok` then judges the mean of these and of the loss that it is given, and NaN in any of
        them discards the step, also where the gradients are finite. Where two steps take longer
        than ``grace_seconds`` the ranks agree here on a request to stop, so all have to call it.

        Args:
            loss: this rank's.

        Raises:
            ConfigError: no batch is in hand.
            Preempted: as :meth:`over`.

        >>> import tempfile, torch
        >>> from runner import Guard
        >>> model = torch.nn.Linear(4, 1)
        >>> opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        >>> out = tempfile.TemporaryDirectory()
        >>> guard = Guard(out.name, model=model, optimizer=opt, accumulate=2)
        >>> for number, batch in enumerate(guard.over([torch.ones(8, 4) for _ in range(6)])):
        ...     loss = model(batch).square().mean() / 2
        ...     loss.backward()
        ...     if number == 2:
        ...         loss = loss * float("nan")  # its gradients are there already
        ...     if number % 2 == 0:
        ...         guard.note(loss)
        ...         continue
        ...     if guard.ok(loss):
        ...         opt.step()
        ...     opt.zero_grad()
        >>> guard.skipped
        [(2, 4)]
        >>> guard.close(); out.cleanup()
        """
        self._steps.note(loss)
        if self._run.group.stop_look.is_in_steps:
            self.check_stop()

    def check_stop(self, *, before: Randomness | None = None) -> None:
        """Save the last update and leave if a rank was asked to stop. Collective: one all-reduce.

        For what takes longer than ``grace_seconds`` without a :meth:`ok`: call it for each batch of
        an evaluation, on all ranks, which must have equally many.

        Args:
            before: the random generators that are saved; None: as they are.

        Raises:
            Preempted: as :meth:`over`.
        """
        if self._is_closed:
            return
        try:
            self._run.group.stop_look.now()
        except StopRequested:
            if before is not None:
                before.restore()
            self._sharded.modes.load_json(self._modes)  # an evaluation's are not the run's
            self.settle()
            self._finish_reading()
            self._abort_step(is_end=True)
            with journal_errors(self._run):
                self._steps.leave()

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Write numbers of the loop's own with the step, as columns of ``metrics.jsonl``.

        They go with the step's own all-reduce, and wait for nothing; only in the step in which a
        name is new the ranks agree on it first. A value is the mean over the calls of the step and
        over the ranks, or with a count, sum by count. What is called after :meth:`ok`, such as an
        evaluation, goes with the next step; after the last one it is not written.

        Args:
            values: by name, as ``named``; for names such as ``"dice/liver"``. ``eval_loss`` is the
                held-out loss, and ``"eval_loss/NAME"`` that of one of several sets.
            named: a number, a tensor of one element, or a pair (sum, count) of these.

        Raises:
            ConfigError: a value is no number, or a name is a column of ours. By :meth:`ok`, on all
                ranks: a rank gives another name than the others.

        >>> import tempfile, torch
        >>> from runner import Guard
        >>> model = torch.nn.Linear(4, 1)
        >>> opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        >>> out = tempfile.TemporaryDirectory()
        >>> guard = Guard(out.name, model=model, optimizer=opt)
        >>> for batch in guard.over([torch.ones(8, 4)] * 3):
        ...     output = model(batch)
        ...     loss = output.square().mean()
        ...     loss.backward()
        ...     guard.log(bias=output.mean(), positive=((output > 0).sum(), len(batch)))
        ...     if guard.ok(loss):
        ...         opt.step()
        ...     opt.zero_grad()
        >>> guard.close()
        >>> from pathlib import Path
        >>> '"bias": ' in Path(out.name, "metrics.jsonl").read_text()
        True
        >>> out.cleanup()
        """
        self._carried.logged.add({**(values or {}), **named}, self._sharded.compute_device)

    def parts(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """The batch, or what fits into memory of it, part by part, with ``on_oom="halve"``.

        Args:
            batch: this rank's: a tensor, or a list, tuple or mapping of tensors whose first
                dimension is the sample's. It has as many parts as the rank with the fewest
                samples can make.

        Yields:
            A part, and its share of the batch's samples, by which its mean loss is multiplied.

        Raises:
            ConfigError: the batch cannot be split, or not further.

        >>> import tempfile, torch
        >>> from runner import Guard
        >>> model = torch.nn.Linear(4, 1)
        >>> opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        >>> out = tempfile.TemporaryDirectory()
        >>> guard = Guard(out.name, model=model, optimizer=opt, on_oom="halve")
        >>> for batch in guard.over([torch.ones(8, 4) for _ in range(6)]):
        ...     total = 0.0
        ...     for part, share in guard.parts(batch):
        ...         loss = model(part).square().mean() * share
        ...         loss.backward()
        ...         total += loss.detach()
        ...     if guard.ok(total):
        ...         opt.step()
        ...     opt.zero_grad()
        >>> guard.updates
        6
        >>> guard.close(); out.cleanup()
        """
        return self._memory.split(batch, self.updates + 1)

    def settle(self) -> None:
        """Count the update that the loop made, and save if that is due. Collective.

        :meth:`over` calls it; a loop without :meth:`over` calls it after the optimizer's step.
        """
        with journal_errors(self._run):
            self._steps.settle()

    def take(self, number: int) -> bool:
        """Whether to train on batch ``number``, for a loop without :meth:`over`.

        Numbers count from 0 at each start, over all epochs. The data continues after a rollback,
        as with an iterable. False for batches that the run has used already, or skips. Sometimes
        collective.
        """
        if self._gate is not None:
            raise ConfigError(
                "sync=False needs guard.over: a batch may have to be replayed; leave it out"
            )
        self._carried.data_goes_on = True
        if not self._has_begun:
            self._has_begun = True
            self._steps.checkpoints.begin(self._run.state)
        self._steps.replay_known_discards()
        self._leave_out()
        first = self._steps.next_number()
        if number < first:
            if self._is_catching_up and number + 1 == self._resumed_at:
                # For what comes before the next batch: an evaluation, its reading, the next pass.
                self._is_catching_up = False
                self._carried.repeat()
            return False
        if self._is_catching_up:
            self._is_catching_up = False
            self._carried.repeat()
        self._steps.has_rolled_back = False  # the data goes on: nothing is left to do
        self._steps.begin_batch(number, None)
        return True

    def begin_epoch(self, number: int) -> None:
        """Call before epoch ``number`` is shuffled, in a loop without :meth:`over`.

        At a restart it restores the random generators from which that epoch's order was drawn.
        """
        place = self._position
        if self._is_catching_up and number == place.epoch and place.begun is not None:
            Randomness.from_json(place.begun).restore()
        elif number >= place.epoch:
            place.epoch, place.begun = number, Randomness().to_json()

    def close(self) -> None:
        """Commit and prove the final state, write the summary, release the directory. Collective.

        Without it the run ends with its last checkpoint, that of the end of the last pass.
        """
        if self._is_closed:
            return
        self._steps.settle()
        self._finish_reading()
        self._abort_step(is_end=True)
        failure = self._steps.checkpoints.finish(self._run.state, lambda: None)
        suffix = f", but the last checkpoint is not clean: {failure}" if failure else ""
        self._sum_up(f"closed{suffix}", digest=self.state_digest())
        self._release()

    # -- state ----------------------------------------------------------------------------

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """Half-open ranges of batch numbers, counted over all passes, that were never applied."""
        return list(self._run.written.journal.history.ledger)

    @property
    def updates(self) -> int:
        """Updates applied so far, over all starts, without those that a rollback undid."""
        return self._run.state.updates + self._steps.num_uncounted

    @property
    def resumed_step(self) -> int:
        """The number of updates at which this start resumed; 0 for a new run."""
        return self._run.resumed.step

    @property
    def is_catching_up(self) -> bool:
        """Whether the loop still reads what was used before this start."""
        return self._is_catching_up

    def state_digest(self) -> str:
        """SHA-256 over parameters, buffers that change, and optimizer state, by name. Collective.

        It does not depend on how the state is sharded.
        """
        return state_digest(self._sharded.tensors(), {})

    # -- passes ---------------------------------------------------------------------------

    def _begin_pass(self, number: int) -> None:
        place, source = self._position, self._sources[number]
        self._carried.data_goes_on = not source.rereads
        if not self._has_begun:
            self._has_begun = True
            if not self._run.resumed.is_fresh:
                self._reposition()
                self._carried.repeat()
            else:
                self._start(number)
            self._steps.checkpoints.begin(self._run.state)
        elif place.epoch < number and not (self._steps.has_rolled_back and self._carried.has_moved):
            self._start(number)  # else what was undone of an earlier pass comes first

    def _start(self, number: int) -> None:
        """Begin a pass that no earlier start has begun."""
        place, source = self._position, self._sources[number]
        # Behind the cursor where a rollback skips what was read, and that pass was left then.
        read = place.start + place.source.drawn if place.source is not None else 0
        place.epoch, place.start = number, max(self._run.state.cursor, read)
        place.begun = source.begin()
        place.source = source

    def _reposition(self) -> None:
        """Move the loader to the position of the state, after a rollback and at a resume."""
        place = self._position
        source = self._sources[place.epoch]
        if place.begun is None and place.state is None and not place.drawn and source.rereads:
            # The checkpoint is from before the first pass.
            place.begun = source.begin()
        else:
            self._resume(source)
        place.source = source
        self._carried.restore_randomness()

    def _require_equal_lengths(self, loader: Any) -> None:
        """A rank whose pass ends early would leave the others waiting in a collective."""
        try:
            length = len(loader)
        except TypeError:
            length = None
        lengths = self._run.group.ranks.gather(length)
        if None not in lengths and len(set(lengths)) > 1:
            raise ConfigError(
                f"guard.over: the ranks' loaders have {lengths} batches; all must have equally "
                "many (DistributedSampler, or drop_last=True)"
            )

    def _resume(self, source: Source) -> None:
        """Move the loader to its position of the checkpoint. Collective."""
        opened, place = self._run, self._position

        def work() -> None:
            source.resume(place.begun, place.state, place.drawn, is_over=place.is_over)

        try:
            opened.group.ranks.all_or_none("reading the loader up to where the run was", work)
        except OtherBatch as error:
            if not opened.config.resume.allow_change:
                raise ConfigError(
                    f"{error}: the run would not be the same. Let it give the same batches at each "
                    "start: seed its generators, or give it state_dict() and load_state_dict(); "
                    "allow_change=True goes on with what it gives now"
                ) from None
            _log.warning("%s; the run goes on, because of allow_change", error)

    def _next(self) -> tuple[Any] | None:
        """The next batch to train on; None when the current pass is over."""
        story, place = self._steps, self._position
        while True:
            if story.has_rolled_back and self._carried.has_moved:
                self._replayed.clear()
                self._reposition()
            story.has_rolled_back = False
            story.replay_known_discards()
            if story.has_rolled_back:
                continue
            if self._leave_out():
                continue
            source = place.source
            assert source is not None
            number = story.next_number()
            if self._replayed:
                replayed = self._replayed.popleft()
                if replayed.number >= number:
                    return self._hand_out_again(replayed)
                continue
            try:
                return self._read(source, number)
            except Exhausted as exhausted:
                if story.is_unread:
                    self._finish_reading()
                    continue
                self._run.state.cursor = max(self._run.state.cursor, place.start + exhausted.count)
                if place.epoch == len(self._sources) - 1:
                    return None
                self._start(place.epoch + 1)  # a rollback had gone back to an earlier pass

    def _leave_out(self) -> bool:
        """Skip the batches with which memory ran out, where they come next. Collective."""
        story = self._steps
        if story.in_hand is not None or not self._memory.leaves_out(self.updates + 1):
            return False
        if story.is_unread:
            self._finish_reading()
        else:
            story.leave_out(self._memory)
        return True

    def _read(self, source: Source, number: int) -> tuple[Any]:
        """
        Raises:
            Exhausted: the source has no such batch.
        """
        story, place = self._steps, self._position
        is_first, has_read = story.in_hand is None, source.drawn > 0
        before = Randomness() if self._gate or source.skips_unread else None
        self._accumulates = self._accumulates or not is_first
        if is_first:
            # Where a loader has a state, a read that draws is the first of a pass, or each one is.
            is_watched = self._accumulates or (self._gate is not None and not source.rereads)
            is_watched = is_watched and not source.skips_unread
            self._draws = StepDraws(source.mark(), source.drawn) if is_watched else None
        elif self._draws is not None:
            self._draws.begin_read()
        batch = source.read(number - place.start)
        after = None
        if self._draws is not None:
            after = self._draws.end_read()
        if before is not None and not source.skips_unread:
            story.reads_draw = story.reads_draw or (has_read and not before.is_unchanged())
        if not (is_first and source.skips_unread):
            before = None
        # What can be read again by its number need not be held.
        if (self._gate or story.discards_first) and not source.reads_by_number:
            self._in_hand.append(_InHand(number, batch, after if story.discards_first else None))
        story.begin_batch(number, self._draws.left if self._draws is not None else before)
        return (batch,)

    def _hand_out_again(self, replayed: _InHand) -> tuple[Any]:
        self._in_hand.append(replayed)
        left = None
        if replayed.after is not None and self._draws is not None:
            replayed.after.restore()
            left = self._draws.left
        else:
            self._draws = None  # what was computed before these reads was undone
        self._steps.begin_batch(replayed.number, left)
        return (replayed.batch,)

    def _replay_aborted(self) -> None:
        """Have the batches of an aborted step handed out once more. Collective."""
        story = self._steps
        if not story.must_replay:
            return
        if not (story.has_rolled_back and self._carried.has_moved):
            # What the speculative step read may depend on what the withheld one computed.
            draws = self._draws if self._in_hand and self._in_hand[0].after is None else None
            if not self._go_back(draws, draws is not None and draws.has_drawn):
                self._replayed.extend(self._in_hand)
        story.must_replay = False
        self._in_hand.clear()

    def _read_step_again(self) -> None:
        """Read the batches of a discarded step again, one after the other. Collective.

        Where reading draws from a generator from which the loop has drawn as well since the step
        began, what its later batches are, and how they leave the generator, depends on what was
        computed. A loop that does not use these batches reads others.

        Raises:
            CannotReadAgain: the loader is an iterator, which has no beginning.
        """
        draws, self._draws = self._draws, None
        if self._accumulates and self._go_back(draws, draws is not None and draws.is_entangled):
            assert draws is not None
            draws.before.restore()

    def _go_back(self, draws: StepDraws | None, is_needed: bool) -> bool:
        """Move the loader to where the step began, if a rank needs it. Collective."""
        ranks, place = self._run.group.ranks, self._position
        if not any(ranks.gather(is_needed)):
            return False
        source = place.source
        assert source is not None and draws is not None
        require_beginning(source, ranks, "discarded a step")
        ranks.all_or_none(
            "reading the loader up to where the step began",
            lambda: source.resume(place.begun, draws.mark, draws.drawn, is_over=False),
        )
        return True

    def _finish_reading(self) -> None:
        with journal_errors(self._run):
            self._steps.finish_reading()
        self._replay_aborted()

    def _abort_step(self, *, is_end: bool = False) -> None:
        """Abort the step of batches in hand: the next start is to read them."""
        num_replayed = len(self._replayed)
        self._replayed.clear()
        aborted, source = self._steps.abort(), self._position.source
        if source is None or (aborted is None and not num_replayed):
            return
        start, stop = aborted or (self._steps.next_number(),) * 2
        if not source.give_back(stop - start + num_replayed):
            self._steps.skip_batches(start, stop + num_replayed)
            if is_end:
                self._read_step_again()
        elif is_end and self._draws is not None:
            self._draws.before.restore()  # as the next start finds them

    def _is_done(self, steps: int | None) -> bool:
        if steps is None or self.updates < steps:
            return False
        self._finish_reading()
        return self._run.state.updates >= steps

    def _end_pass(self, number: int) -> None:
        """Save the state at the end of a pass.

        Raises:
            ConfigError: the loop has never asked the guard.
        """
        story, source = self._steps, self._position.source
        if story.in_hand and not story.num_judged and source is not None:
            raise ConfigError(
                f"guard.over: the loop has read {source.drawn} batches and never called "
                "guard.ok(loss): nothing was guarded, counted or saved; call it between backward "
                "and optimizer.step(), and step only where it is True"
            )
        with journal_errors(self._run):
            self._steps.checkpoints.commit(self._run.state)
        is_small = self._sharded.num_elements <= _NO_DIGEST_ABOVE
        self._sum_up(f"pass {number + 1} is over", digest=self.state_digest() if is_small else None)

    def _sum_up(self, reason: str, *, digest: str | None) -> None:
        end = RunEnd(status="done", exit_code=0, reason=reason)
        sum_up(self._run, end, global_size=self._run.config.batch.global_size, digest=digest)


def _as_list(value: Any) -> list[Any]:
    """One, several or no values as a list; an indexable module counts as one."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
