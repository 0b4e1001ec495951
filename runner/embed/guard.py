"""The guard of a run in a loop that is somebody else's.

The same judge, ladder, ring, journal and metrics as ``python -m runner``; forward, backward and
the optimizer's step stay where they are.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checkpoint.digest import state_digest
from runner.embed.carried import DataPlace, LoopCarried, Scheduler
from runner.embed.exits import closed_at_exit, errors_journalled
from runner.embed.loaders import Exhausted, Source, source_of
from runner.embed.measure import Measurer
from runner.embed.opening import join, listen, open_run, ranks_at_hand
from runner.embed.randomness import Randomness
from runner.embed.settings import run_config
from runner.embed.state import LoopState
from runner.embed.story import Story
from runner.embed.zero import ZeroMeasurer, ZeroState, engine_in
from runner.session.summary import RunEnd, RunSize, sum_up
from runner.system.error import ConfigError

_NO_DIGEST_ABOVE = 1 << 28  # elements: a digest at the end of each pass would take minutes


class Guard:
    """Guards somebody else's training loop: what is not to be applied is not, by itself.

    A step whose loss or gradient is NaN or Inf, or that spikes, is discarded. If trouble persists,
    the weights, optimizer, scheduler and random generators go back to a proven checkpoint, and the
    batches that made the trouble are skipped. The same script again resumes.

    After :meth:`over` has ended, weights, optimizer and schedule equal, bit for bit, those of a
    plain loop that never saw the batches in :attr:`skipped`.

    Args:
        out: directory of the run; the same one again resumes it.
        model: plain, DistributedDataParallel or FSDP2 (``fully_shard``); or several; or a
            DeepSpeed engine of ZeRO stage 1 or 2.
        optimizer: any of torch's kind; or several.
        scheduler: stepped by the loop after the optimizer; or several.
        every: steps between checkpoints on disk, or ``"auto"``: by what they cost.
        clip: bound of the global gradient norm; :meth:`ok` clips, the loop must not.
        accumulate: batches of :meth:`over` that make one step, so one call of :meth:`ok`.
        settings: ``guard.*`` and ``checkpoint.*`` by their names (``persist=2``, ``keep=3``);
            ``skip=[[a, b]]``: batches never to be read, half open; ``allow_change=True``: go on
            with other settings than the run was begun with.

    Raises:
        ConfigError: a setting that cannot be, or ``out`` is in use or holds another run.
        CheckpointError: there are checkpoints, and none can be loaded.

    Every rank makes one, after ``init_process_group`` where there are several.

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
        **settings: Any,
    ) -> None:
        skip = settings.pop("skip", [])
        config = run_config(out, every=every, accumulate=accumulate, skip=skip, given=settings)
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip={clip}: must be greater than 0, or None for no clipping")
        engine = engine_in(_several(model), _several(optimizer))
        if engine is not None and clip is not None:
            raise ConfigError(f"clip={clip}: DeepSpeed clips; set its gradient_clipping")
        ranks, device, rank_env = ranks_at_hand("Guard")
        group = join(config, ranks, device, rank_env)
        self._place = DataPlace()
        self._sharded: LoopState
        if engine is not None:
            self._sharded = ZeroState(engine, ranks, device)
            self._measurer: Measurer = ZeroMeasurer(self._sharded, ranks, engine)
        else:
            self._sharded = LoopState(_several(model), _several(optimizer), ranks, device)
            self._measurer = Measurer(self._sharded, ranks, clip=clip)
        self._carried = LoopCarried(self._sharded, _several(scheduler), self._place, ranks)
        try:
            self._opened = open_run(
                config, group, self._sharded, self._carried, command="runner.Guard"
            )
        except BaseException:
            group.monitor.end()
            raise
        self._story = Story(self._opened, self._sharded, self._carried, self._measurer)
        self._sharded.before_change = self._story.layout_changes
        self._finalizer = weakref.finalize(self, closed_at_exit, self._opened)
        atexit.register(self._finalizer)
        listen(group)
        self._passes: list[Source] = []
        self._has_begun = False
        self._is_behind = not self._opened.resumed.is_fresh

    # -- what the loop calls --------------------------------------------------------------

    def over(self, loader: Iterable[Any], *, steps: int | None = None) -> Iterator[Any]:
        """The batches of ``loader`` that are to be trained on, in order, resumed where the run was.

        With ``[i]`` and ``len``, or with ``state_dict`` and ``load_state_dict``, what a rollback
        undid is read again but for what is skipped. Of any other iterable the data goes on, and
        what was read since the checkpoint is skipped. Each call is one pass; those that the run
        has behind it yield nothing.

        Args:
            loader: this rank's; all ranks must have as many batches.
            steps: stop once so many updates are applied in all.

        Raises:
            Halted: the guard's budget is spent; as SystemExit it is exit code 3.
            Preempted: a stop was asked for, and the state is saved; exit code 75.
        """
        number = len(self._passes)
        self._passes.append(source_of(loader))
        if number < self._place.epoch:
            return
        self._begin_pass(number)
        while not self._is_done(steps):
            read = self._next()
            if read is None:
                break
            yield read[0]
            self.settle()
        self._end_pass(number)

    def ok(self, loss: torch.Tensor | float, *, tokens: int = 0) -> bool:
        """Whether the optimizer may step. Collective: one all-reduce.

        To be called after ``backward`` and before the optimizer's step, once a step, on every
        rank. False: the step is discarded, or the run has gone back to a checkpoint already; the
        gradients are gone.

        Args:
            loss: this rank's; the guard judges the mean over ranks.
            tokens: in this rank's batch, for the throughput in the metrics.

        Raises:
            Halted: the guard's budget is spent.
            RankError: a rank stands elsewhere than the others.
        """
        with errors_journalled(self._opened):
            return self._story.judge(loss, tokens)

    def settle(self) -> None:
        """The loop has done what :meth:`ok` allowed: count it, and save if that is due. Collective.

        :meth:`over` calls it; a loop without :meth:`over` calls it after the optimizer's step.
        """
        with errors_journalled(self._opened):
            self._story.settle()

    def take(self, number: int) -> bool:
        """For a loop without :meth:`over`: batch ``number`` is in hand; whether to train on it.

        Numbers count from 0 at each start, over all epochs. The data goes on after a rollback, as
        with an iterable. Not to be trained on is what the run has behind it, or skips. Collective
        at times.
        """
        self._carried.data_goes_on = True
        if not self._has_begun:
            self._has_begun = True
            self._story.begin()
        self._story.repeat_known()
        if number < self._story.next_number():
            return False
        if self._is_behind:
            self._is_behind = False
            self._carried.repeat()
        self._story.opened_batch(number, None)
        return True

    def begin_epoch(self, number: int) -> None:
        """For a loop without :meth:`over`: it is about to order the data of epoch ``number``.

        What shuffles draws from the random generators: at a restart they are as they were.
        """
        place = self._place
        if self._is_behind and number == place.epoch and place.begun is not None:
            Randomness.from_json(place.begun).put_back()
        elif number >= place.epoch:
            place.epoch, place.begun = number, Randomness().to_json()

    def close(self) -> None:
        """Commit and prove the end state, write the summary, let go of the directory. Collective.

        Without it the state of the last checkpoint stands: that of the end of the last pass.
        """
        if not self._finalizer.alive:
            return
        self._story.settle()
        fault = self._story.finish()
        but = f", but the last checkpoint is not clean: {fault}" if fault else ""
        self._sum_up(f"closed{but}", digest=self.state_digest())
        self._finalizer()
        atexit.unregister(self._finalizer)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """:meth:`close`, unless something went wrong: what is half done is not saved."""
        if kind is None:
            self.close()

    # -- what it tells --------------------------------------------------------------------

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """Half-open ranges of batch numbers, counted over all passes, that were never applied."""
        return list(self._opened.written.journal.history.ledger)

    @property
    def updates(self) -> int:
        """Applied so far, over all starts; what a rollback undid is not counted."""
        pending = self._story.pending is not None
        return self._opened.state.updates + int(pending)

    @property
    def resumed_step(self) -> int:
        """The update from which this start went on; 0 at the beginning."""
        return self._opened.resumed.step

    def state_digest(self) -> str:
        """SHA-256 over parameters, buffers that change, and optimizer state, by name. Collective.

        It does not depend on how the state is sharded.
        """
        return state_digest(self._sharded.tensors(), {})

    # -- the story of a pass --------------------------------------------------------------

    def _begin_pass(self, number: int) -> None:
        place, source = self._place, self._passes[number]
        self._carried.data_goes_on = not source.rereads
        if not self._has_begun:
            self._has_begun = True
            if not self._opened.resumed.is_fresh:
                self._reposition()
                self._carried.repeat()
            else:
                self._start(number)
            self._story.begin()
        elif place.epoch < number:
            self._start(number)

    def _start(self, number: int) -> None:
        """A pass that no start has begun."""
        place, source = self._place, self._passes[number]
        place.epoch, place.start = number, self._opened.state.cursor
        place.begun = source.begin()
        place.source = source

    def _reposition(self) -> None:
        """Bring the loader to where the state is."""
        place = self._place
        source = self._passes[place.epoch]
        if place.begun is None and place.state is None and not place.drawn and source.rereads:
            # Of the very beginning: no pass had been begun.
            place.begun = source.begin()
        else:
            source.resume(place.begun, place.state, place.drawn, is_over=place.is_over)
        place.source = source
        self._carried.put_randomness_back()

    def _next(self) -> tuple[Any] | None:
        """The next batch that may be read; None when the pass that is going on is over."""
        story, place = self._story, self._place
        while True:
            if story.went_back and not self._carried.data_goes_on:
                self._reposition()
            story.went_back = False
            story.repeat_known()
            if story.went_back:
                continue
            source = place.source
            assert source is not None
            number = story.next_number()
            before = Randomness() if source.reads_by_number else None
            try:
                batch = source.read(number - place.start)
            except Exhausted as end:
                self._opened.state.cursor = max(self._opened.state.cursor, place.start + end.count)
                if place.epoch == len(self._passes) - 1:
                    return None
                self._start(place.epoch + 1)  # it had gone back to an earlier one
                continue
            story.opened_batch(number, before)
            return (batch,)

    def _is_done(self, steps: int | None) -> bool:
        return steps is not None and self._opened.state.updates >= steps

    def _end_pass(self, number: int) -> None:
        """Save what the pass has come to."""
        with errors_journalled(self._opened):
            self._story.commit()
        size = sum(parameter.numel() for parameter in self._sharded.parameters.values())
        self._sum_up(
            f"pass {number + 1} is over",
            digest=self.state_digest() if size <= _NO_DIGEST_ABOVE else None,
        )

    def _sum_up(self, reason: str, *, digest: str | None) -> None:
        opened = self._opened
        if not opened.group.is_first:
            return
        opened.lease.fence.check()
        sum_up(
            RunEnd(status="done", exit_code=0, reason=reason),
            digest=digest,
            state=opened.state,
            journal=opened.written.journal,
            where_time_went=opened.reporter.where_time_went(),
            size=RunSize(
                batch=opened.config.batch.global_size,
                world_size=opened.group.place.world_size,
                incarnation=opened.lease.fence.number,
            ),
            run_dir=opened.group.run_dir,
            console=opened.group.console,
        )


def _several(given: Any) -> list[Any]:
    """One, several or none as a list; a module that can be indexed is one."""
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]
