"""One training command on one rank: start, agree, take up the run, loop, sum up."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from runner import assemble
from runner.check import check
from runner.checkpoint.protocol import Identity
from runner.checkpoint.ring import Ring
from runner.checkpoint.store import RingStore
from runner.checkpoint.upload import Uploads
from runner.compose import digest, flat
from runner.config import DebugKind, RunConfig
from runner.data.dataset import Dataset
from runner.data.feed import Feed
from runner.dist.agree import Ranks
from runner.dist.debug import debug_settings, set_debug
from runner.dist.group import choose_device, end_group, start_group
from runner.dist.launcher import Launch, Place, launch_from
from runner.dist.meet import Facts
from runner.dist.proc import host_name, own_process
from runner.engine.protocol import Engine
from runner.error import (
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_PREEMPTED,
    CheckpointError,
    ConfigError,
    Preempted,
    RankError,
    RunnerError,
    Superseded,
)
from runner.evaluate import Evaluator
from runner.fault.inject import FaultInjector
from runner.fault.spec import parse_faults
from runner.finish import End, collect_digest, sum_up
from runner.identity import code_digest, ranks_on, versions
from runner.loop import Intervals, Loop
from runner.model.decoder import DecoderShape, num_parameters
from runner.observe.console import Console
from runner.observe.goodput import Past, past
from runner.observe.journal import Journal
from runner.observe.lines import LineFile, iter_lines
from runner.policy.history import Incident
from runner.policy.ring import Tier, on_disk
from runner.policy.straggler import Stragglers
from runner.recover import Recovery
from runner.remote import RemoteRun, Restorer, open_remote, with_highest
from runner.report import Reporter
from runner.resume import Found, Resumed, find, take_out, take_up
from runner.rundir import RunDir, keep_for_owner
from runner.state import TrainState
from runner.step import Stepper
from runner.tier import MemoryParts, memory_every, node_folder, open_memory
from runner.watch.crash import crash_incident, forget_last_words
from runner.watch.inspection import PaceInspector, ReplicaInspector
from runner.watch.stop import StopRequest
from runner.watch.witness import Witness

_STATUS = {EXIT_HALTED: "halted", EXIT_PREEMPTED: "preempted"}


def train(config: RunConfig, place: Place) -> int:
    """Run one training command; returns the exit code.

    Raises:
        RunnerError: the run could not begin. It is raised on every rank alike.
    """
    keep_for_owner()
    check(config, world_size=place.world_size)
    parse_faults(config.faults)  # a typing mistake is told before any process waits for another
    device = choose_device(config.parallel.device, place)
    run_dir = RunDir(Path(config.out))
    launch = launch_from(os.environ)
    stop = assemble.stop_request(config, launch)
    stop.listen()
    witness = assemble.witness(config, place, launch, run_dir, stop)
    settings = debug_settings(
        config.debug.kind.value, subsystems=config.debug.nccl_subsystems, folder=run_dir.debug
    )
    debug = set_debug(os.environ, settings)
    peers = start_group(
        place,
        device,
        timeout_seconds=config.parallel.timeout_seconds,
        start_seconds=config.parallel.start_seconds,
        facts={"rank": place.rank, "process": own_process(), "versions": versions()},
    )
    try:
        code = Session(config, place, launch, device, run_dir, debug, witness, stop, peers).run()
    except RunnerError as error:
        if isinstance(error, Superseded):
            witness.failed(error)
        witness.end()
        raise
    except Exception as error:
        witness.failed(error)
        raise
    finally:
        end_group()
    witness.end()
    return code


class Session:
    """The parts of one command on one rank, built in order. Everything here is collective."""

    def __init__(
        self,
        config: RunConfig,
        place: Place,
        launch: Launch,
        device: torch.device,
        run_dir: RunDir,
        debug: dict[str, str],
        witness: Witness,
        stop: StopRequest,
        peers: Sequence[Facts],
    ) -> None:
        self._config = config
        self._place = place
        self._launch = launch
        self._witness = witness
        self._stop = stop
        self._peers = peers
        self._device = device
        self._dir = run_dir
        self._debug = debug
        self._ranks = Ranks(device)
        self._console = Console(silent=not place.is_first, every=config.track.every)
        self._settings_digest = digest(flat(config))

    def run(self) -> int:
        """From opening the data to the summary; returns the exit code."""
        run = self.open()
        end = _run_to_an_end(run)
        self._witness.heart.enter("finish")
        if run.ring.uploads is not None and end.status in ("done", "halted"):
            run.ring.uploads.finish(
                on_disk(run.ring.records), self._config.checkpoint.remote_wait_seconds
            )
        run.ring.close(wait=end.in_time, forget=self._is_over(end, run))
        run.feed.close()
        run.reporter.close()
        state_hash = None
        if end.in_time:
            state_hash = collect_digest(run.engine, is_first=self._place.is_first)
        if self._place.is_first:
            self._fence.check()
            sum_up(
                end,
                digest=state_hash,
                state=run.state,
                journal=run.journal,
                where_time_went=run.reporter.where_time_went(),
                batch=self._config.batch.global_size,
                world_size=self._place.world_size,
                incarnation=self._fence.number,
                run_dir=self._dir,
                console=self._console,
            )
        return end.exit_code

    def _is_over(self, end: End, run: Run) -> bool:
        """Whether what is on disk is all that anybody will come back to."""
        saved = run.ring.saved_step == run.state.updates
        return end.in_time and (end.status in ("done", "halted") or saved)

    def open(self) -> Run:
        """Build everything and take the run up where ``out`` has it.

        Raises:
            RunnerError: the run cannot begin; alike on every rank.
        """
        config, ranks = self._config, self._ranks
        self._agree_on_settings()
        remote = open_remote(config, self._dir, ranks)
        known = remote.seen.claim if remote else 0
        self._fence = take_out(
            self._dir, config, self._launch, ranks, self._console.say, after=known
        )
        self._witness.begin(self._fence, self._peers)
        if self._place.is_first and self._dir.is_open_to_all:
            self._console.say(
                f"warning: anybody may write in {self._dir.out}, and so decide what a restart "
                "loads; chmod o-w it"
            )
        dataset = ranks.all_or_none("opening the data", lambda: assemble.open_dataset(config))
        self._agree_on_data(dataset)
        stream = ranks.all_or_none(
            "splitting the data", lambda: assemble.sample_stream(config, dataset)
        )
        shape = ranks.all_or_none("sizing the model", lambda: assemble.model_shape(config, dataset))
        restorer = self._restorer(remote, dataset)
        restored = restorer.restore_if_lost() if restorer else None
        found = find(self._dir, config, dataset.fingerprint(), ranks, self._fence)
        found = replace(found, next_serial=with_highest(found.next_serial, remote))
        for name in found.torn:
            self._console.say(f"removed {name}: it was never committed")
        for sentence in found.damaged:
            self._console.say(f"damaged checkpoint, not to be used: {sentence}")
        journal = self._journal(found)
        self._journal_crashes(found, journal)
        engine = assemble.engine(config, shape, self._place, self._device)
        identity = Identity(
            config_digest=self._settings_digest, data_fingerprint=dataset.fingerprint()
        )
        report = self._report_to(journal)
        for incident in restored.incidents if restored else []:
            report(incident)
        faults = FaultInjector(
            parse_faults(config.faults), rank=self._place.rank, markers=self._dir.faults
        )
        tier = self._memory(engine, identity)
        ring = assemble.ring(config, self._store(), engine, ranks, identity, report, faults, tier)
        faults.newest_checkpoint, faults.snapshots = ring.newest, ring.snapshot_files
        state = TrainState(assemble.judge_rules(config), assemble.remedy_rules(config))
        resumed = self._take_up(found, ring, journal, state, None if restored else restorer, report)
        hosts = ranks.gather(host_name())
        past = self._past(found, resumed)
        self._greet(dataset, shape, resumed)
        feed = assemble.feed(config, dataset, stream, self._place, self._device)
        reporter = assemble.reporter(
            config,
            shape,
            self._place,
            self._device,
            self._dir,
            self._console,
            journal,
            ring,
            resumed,
            past,
            self._fence,
        )
        # After the reporter has cut the metrics: what is journalled as lost is lost once.
        lost = ranks.from_first(past.lost)
        journal.add(self._start_incident(resumed, dataset, hosts, lost))
        # Until now an earlier incarnation's snapshots were the ones to come back to.
        ring.begin_memory()
        if remote is not None:
            ring.uploads = self._uploads(remote, ring, journal, report, resumed)
        stepper = self._stepper(dataset, engine, feed, faults, ring)
        held_out = stream.held_out_indices(config.eval.samples if config.eval.every else 0)
        if config.eval.every and not len(held_out):
            self._console.say("no sample is held out (data.held_out): nothing to evaluate on")
        evaluator = Evaluator(engine=engine, feed=feed, ranks=ranks, indices=held_out)
        loop = Loop(
            state=state,
            stepper=stepper,
            stream=stream,
            ring=ring,
            journal=journal,
            recovery=Recovery(
                stepper=stepper, ring=ring, journal=journal, reporter=reporter, faults=faults
            ),
            reporter=reporter,
            schedule=assemble.schedule(config),
            rules=assemble.remedy_rules(config, untrained_loss=math.log(shape.vocab_size)),
            intervals=Intervals(
                steps=config.steps,
                memory=memory_every(config.checkpoint) if tier.memory else 0,
                evaluate=config.eval.every,
                inspect=(config.watchdog.straggler_every, config.debug.replica_check_every),
            ),
            cadence=assemble.cadence(
                config, self._place, resumed.step, journal.history, ranks, reporter.spent, report
            ),
            evaluate=evaluator.loss,
            stop=self._stop,
            stop_reasons=lambda: ranks.gather(self._stop.reason),
            heart=self._witness.heart,
            inspect=self._inspector(stepper, engine, ring, report, resumed),
            known_discards=resumed.known_discards,
            late=assemble.reads_late(config, self._device),
        )
        return Run(
            loop=loop,
            engine=engine,
            ring=ring,
            feed=feed,
            journal=journal,
            state=state,
            reporter=reporter,
        )

    def _agree_on_settings(self) -> None:
        """Every rank composed its own settings; they must be the same."""
        if len(set(self._ranks.gather(self._settings_digest))) == 1:
            return
        settings = self._ranks.gather(flat(self._config))
        differing = [key for key in settings[0] if len({repr(s[key]) for s in settings}) > 1]
        words = "; ".join(f"{key}: {[s[key] for s in settings]} by rank" for key in differing)
        raise ConfigError(f"ranks were started with different settings: {words}")

    def _agree_on_data(self, dataset: Dataset) -> None:
        prints = self._ranks.gather(dataset.fingerprint())
        if len(set(prints)) > 1:
            raise ConfigError(f"ranks see different data; fingerprints by rank: {prints}")

    def _journal(self, found: Found) -> Journal:
        file = None
        if self._place.is_first:
            self._fence.check()
            self._dir.store_config(self._config)
            file = LineFile(self._dir.journal, length=found.journal_bytes, check=self._fence.check)
        told = [(start, stop) for start, stop in self._config.data.skip]
        return Journal(found.journal, told_to_skip=told, file=file)

    def _journal_crashes(self, found: Found, journal: Journal) -> None:
        """Earlier crashes now, a later one when it comes."""
        for line in found.crashes:
            incident = Incident.from_json(line)
            journal.add(incident)
            self._console.incident(incident)
        if self._place.is_first:
            forget_last_words(self._dir, self._fence.number)
            self._witness.journal = lambda cause, number: journal.add(crash_incident(cause, number))

    def _memory(self, engine: Engine, identity: Identity) -> MemoryParts:
        """This rank's part of the tier in memory."""
        ranks, is_first = self._ranks, self._place.is_first
        name = ranks.all_or_none(
            "naming the run", lambda: self._dir.identity() if is_first else None
        )
        return open_memory(
            self._config.checkpoint,
            node_folder(ranks.from_first(name), self._dir.out),
            engine,
            ranks,
            self._place,
            incarnation=self._fence.number,
            identity=identity,
            timeout_seconds=self._config.parallel.timeout_seconds,
            say=self._console.say,
        )

    def _restorer(self, remote: RemoteRun | None, dataset: Dataset) -> Restorer | None:
        if remote is None:
            return None
        return Restorer(
            remote, self._dir, self._store(), self._config, dataset.fingerprint(), self._ranks
        )

    def _take_up(
        self,
        found: Found,
        ring: Ring,
        journal: Journal,
        state: TrainState,
        restorer: Restorer | None,
        report: assemble.Report,
    ) -> Resumed:
        """From the ring; where no byte of it is right, from the remote."""
        try:
            return take_up(found, self._dir, ring, journal, state)
        except CheckpointError as error:
            if restorer is None:
                raise
            if restorer.silence:
                raise RankError(
                    f"{error}; and checkpoint.remote does not answer ({restorer.silence}): start "
                    "again when it does"
                ) from None
            ring.drain()
            restored = restorer.restore()
            if restored is None:
                raise
        for incident in restored.incidents:
            report(incident)
        found = replace(found, records=[restored.record], damaged=[])
        return take_up(found, self._dir, ring, journal, state)

    def _uploads(
        self,
        remote: RemoteRun,
        ring: Ring,
        journal: Journal,
        report: assemble.Report,
        resumed: Resumed,
    ) -> Uploads:
        """The journal has its first line by now."""
        for incident in remote.incidents(resumed.step):
            report(incident)
        return remote.uploads(
            self._config,
            self._store(),
            work=ring.uplink,
            ranks=self._ranks,
            fence=self._fence,
            tainted=journal.history.abandoned_serials(),
            report=report,
        )

    def _store(self) -> RingStore:
        return RingStore(self._dir.ring, owner=self._fence.number, check=self._fence.check)

    def _report_to(self, journal: Journal) -> assemble.Report:
        def report(incident: Incident) -> None:
            journal.add(incident)
            self._console.incident(incident)

        return report

    def _stepper(
        self, dataset: Dataset, engine: Engine, feed: Feed, faults: FaultInjector, ring: Ring
    ) -> Stepper:
        config = self._config
        return Stepper(
            engine=engine,
            feed=feed,
            dataset=dataset,
            ranks=self._ranks,
            faults=faults,
            seed=config.seed,
            clip=config.optim.clip,
            guarded=config.guard.enabled,
            config_digest=self._settings_digest,
            code=code_digest(),
            heart=self._witness.heart,
            before_update=ring.before_update,
        )

    def _inspector(
        self,
        stepper: Stepper,
        engine: Engine,
        ring: Ring,
        report: assemble.Report,
        resumed: Resumed,
    ) -> Callable[[int], None]:
        """What is looked at after an update."""
        watchdog, every = self._config.watchdog, self._config.debug.replica_check_every
        pace = PaceInspector(
            ranks=self._ranks,
            device=self._device,
            stragglers=Stragglers(
                factor=watchdog.straggler_factor, checks=watchdog.straggler_checks
            ),
            take_seconds=stepper.take_seconds,
            report=report,
        )
        replicas = ReplicaInspector(
            ranks=self._ranks,
            engine=engine,
            report=report,
            distrust=ring.distrust_after,
            next_serial=lambda: ring.next_serial,
            good_step=resumed.step,
        )

        def look(updates: int) -> None:
            if watchdog.straggler_every and updates % watchdog.straggler_every == 0:
                pace.look(updates)
            if every and updates % every == 0:
                replicas.look(updates)

        return look

    def _past(self, found: Found, resumed: Resumed) -> Past:
        """Where the time went before this start; the first rank's is the one that counts."""
        if not self._place.is_first:
            return past([], [], [])
        path, length = self._dir.metrics, resumed.metrics_bytes
        return past(iter_lines(path, stop=length), iter_lines(path, start=length), found.journal)

    def _start_incident(
        self, resumed: Resumed, dataset: Dataset, hosts: list[str], lost: dict[str, float]
    ) -> Incident:
        return Incident(
            kind="start",
            step=resumed.step,
            decision=f"go on from step {resumed.step}" if resumed.step else "begin",
            reason="command",
            detail={
                "incarnation": self._fence.number,
                "world_size": self._place.world_size,
                "hosts": {host: ranks_on(host, hosts) for host in dict.fromkeys(hosts)},
                "parallel": self._config.parallel.kind.value,
                "device": self._device.type,
                **versions(),
                "settings": self._settings_digest,
                "data": dataset.fingerprint(),
                "debug": self._debug,
                "lost": lost,
                "tier": resumed.tier.value if resumed.step else None,
            },
        )

    def _greet(self, dataset: Dataset, shape: DecoderShape, resumed: Resumed) -> None:
        config = self._config
        self._console.say(
            f"holdfast: {num_parameters(shape):,} parameters, {len(dataset):,} samples of "
            f"{config.data.seq_len} tokens, {config.parallel.kind.value} on "
            f"{self._place.world_size} x {self._device.type}, {config.model.precision.value}, "
            f"out={self._dir.out}"
        )
        if config.debug.kind is not DebugKind.off:
            effective = " ".join(f"{name}={value}" for name, value in self._debug.items())
            self._console.say(f"debug={config.debug.kind.value}: {effective}")
        if resumed.step >= config.steps:
            self._console.say(f"all {config.steps} steps are applied already")
        elif resumed.step:
            source = " from memory" if resumed.tier is Tier.memory else ""
            self._console.say(f"resuming at step {resumed.step} of {config.steps}{source}")
        for words in resumed.unused:
            self._console.say(f"snapshots in memory of no use: {words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An open run: its loop and what must be closed and summed up after it."""

    loop: Loop
    engine: Engine
    ring: Ring
    feed: Feed
    journal: Journal
    state: TrainState
    reporter: Reporter


def _run_to_an_end(run: Run) -> End:
    try:
        run.loop.run()
    except RunnerError as error:
        status = _STATUS.get(error.exit_code, "failed")
        if status == "halted":
            run.ring.drain()  # what is being written is still worth having
        else:  # a halt has its own line already
            run.journal.add(
                Incident(
                    kind=status,
                    step=run.state.updates,
                    decision="end",
                    reason=str(error),
                    detail={"stalls": run.reporter.take_stalls()},
                )
            )
        in_time = not isinstance(error, Preempted) or error.in_time
        return End(status=status, exit_code=error.exit_code, reason=str(error), in_time=in_time)
    return End(status="done", exit_code=EXIT_DONE, reason="all steps applied")
