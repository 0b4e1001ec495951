"""Commands that restart what they start: ``launch``, ``supervise``, and ``run`` for any script."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runner.command.arguments import Parser, at_least
from runner.command.watch import begin_watch
from runner.config.schema import RunConfig
from runner.config.validate import check, check_extras
from runner.distributed.env import EXIT_DIR, WATCHED, recorded_exit, tell_exit
from runner.fault.spec import parse_faults
from runner.launch import torchrun
from runner.launch.attempt import EXIT_CODES, Job, Stop, StopTarget, run_once
from runner.launch.crash_evidence import BadNodes, refuse_listed
from runner.launch.node_memory import NodeMemory
from runner.launch.script import PROGRESS, ScriptSupervisor, Watched
from runner.launch.slurm import meeting, orders
from runner.launch.stand_by import StandBy, hosting_command
from runner.launch.supervisor import JobSupervisor, new_launch_id
from runner.launch.warm_start import WarmStart, rank_modules
from runner.observe.tracker import CommandAlerts
from runner.policy.restart import Attempt, End, RestartRules
from runner.run_dir.paths import RunDir
from runner.system.environment import variables
from runner.system.error import EXIT_CRASH, EXIT_DONE, EXIT_HALTED, EXIT_PREEMPTED, ConfigError

_log = logging.getLogger(__name__)
_BUSY = 3.0  # times --quiet
_START_SECONDS = 600.0  # for imports, weights, compilation
_TOLD_BY_RANKS = (EXIT_DONE, EXIT_HALTED, EXIT_PREEMPTED)


def supervise_command(arguments: Sequence[str]) -> int:
    """``python -m runner supervise -- COMMAND``: restarts a job after a crash, while that helps.

    For places without a scheduler. The budget of restarts is counted in progress: an attempt that
    advances the newest clean checkpoint renews it. Exit codes 2, 3 and 4 are not restarted, 75
    is; the same failure at the same step three times ends it with 3.
    """
    parser = Parser("supervise", supervise_command.__doc__)
    parser.add_argument("--out", metavar="DIR", help="the run's directory; default: the command's")
    add_restart_options(parser)
    options, command = parser.of_command(arguments)
    if not command:
        raise ConfigError("supervise: no command; write: supervise [options] -- torchrun ...")
    out = torchrun.out_of(command, options.out)
    return run_supervised(options, command, out)


def add_restart_options(parser: Parser) -> None:
    """Options that :func:`rules_of` reads."""
    words = "restarts in a row without a new clean checkpoint; 0: none"
    parser.option("--restarts", 5, words, metavar="N")
    words = "before a restart after an attempt without progress; doubled with each further one"
    parser.option("--pause", 1.0, words, metavar="SECONDS")
    parser.option("--max-pause", 300.0, metavar="SECONDS")


def rules_of(options: Namespace, *, diagnose: bool, restart_preempted: bool = True) -> RestartRules:
    """
    Raises:
        ConfigError: a number is negative.
    """
    at_least(0, restarts=options.restarts, pause=options.pause, max_pause=options.max_pause)
    return RestartRules(
        codes=EXIT_CODES,
        restarts=options.restarts,
        pause_seconds=options.pause,
        max_pause_seconds=options.max_pause,
        diagnose=diagnose,
        restart_preempted=restart_preempted and options.restarts > 0,
    )


def run_supervised(
    options: Namespace,
    command: Sequence[str],
    out: Path,
    agent: torchrun.Agent | None = None,
    warm: WarmStart | None = None,
) -> int:
    """Supervise a command that may or may not start the runner; returns the exit code.

    Args:
        agent: what the command starts, if it is our torchrun.
        warm: starts it; None: one for this command alone.
    """
    environment = torchrun.environment(variables(), agent) if agent else variables()
    met = agent if agent and agent.nodes.most > 1 else None  # each node has a supervisor
    diagnose, begin_seconds, alert, watches = False, None, None, False
    own, memory, stand_by, config = None, None, None, None  # others' commands start as they are
    if torchrun.trains(command):
        overrides = torchrun.overrides_of(command)
        config = torchrun.settings(overrides)
        diagnose, begin_seconds = config.debug.diagnose_on_crash, begin_limit(config)
        own = warm_start(config) if warm is None else None
        memory = node_memory(config)
        stand_by = StandBy(config, memory, agent, environment, say) if memory and agent else None
        alert = config.track.command
        watches = config.track.watch and alert is not None

    is_head = met is None or torchrun.is_head(met)
    if alert and watches and EXIT_DIR not in environment:
        environment = {**environment, WATCHED: "1"}
        if is_head:
            begin_watch(out, alert)

    def make_job(_: int, diagnosing: bool) -> Job:
        chosen = list(command)
        if diagnosing:
            chosen[len(chosen) - len(overrides) :] = torchrun.diagnosing(overrides)
        return Job(
            command=chosen,
            environment=environment,
            shielded=agent is not None,
            begin_seconds=begin_seconds,
            popen=starter.popen if starter else None,
        )

    starter = warm or own
    with own or contextlib.nullcontext():
        if EXIT_DIR in environment:
            return _run_as_part(make_job(1, False), out, stand_by)
        supervisor = JobSupervisor(
            out=out,
            launch_id=new_launch_id({} if met else environment),
            name=met.name if met else None,
            least_nodes=met.nodes.least if met and met.nodes.is_elastic else None,
            rules=rules_of(options, diagnose=diagnose),
            make_job=make_job,
            say=say,
        )
        supervisor.memory, supervisor.stand_by, supervisor.config = memory, stand_by, config
        end = supervisor.run()
    if end.code:
        say(end.reason)
    has_given_up = end.code and not supervisor.stop.is_set
    if alert and has_given_up and is_head and not watches:
        _alert(alert, out, end, supervisor.attempts[-1:])
    supervisor.leave()
    if supervisor.is_left_out and met and met.head and is_head:
        _hold_place(hosting_command(out, met.head), environment, supervisor.stop)
    return end.code


def _hold_place(command: list[str], environment: Mapping[str, str], stop: Stop) -> None:
    """Keep up the place where the nodes meet, which go on without this one."""
    say("the nodes still meet here; this ends with the run")
    run_once(Job(command=command, environment=environment), stop)


def node_memory(config: RunConfig) -> NodeMemory | None:
    """What is remembered of nodes, if the run has a place for it."""
    cluster = config.cluster
    if cluster.nodes is None:
        return None
    run = RunDir(Path(config.out)).alert_name
    return NodeMemory(Path(cluster.nodes), cluster.remember_days, run=run, say=say)


def _alert(command: str, out: Path, end: End, last: Sequence[Attempt]) -> None:
    """Run ``track.command`` for the end of the launch, if no rank was left to do so."""
    if not last or last[0].code in _TOLD_BY_RANKS:
        return
    run_dir = RunDir(out)
    alerts = CommandAlerts(command, out, name=run_dir.alert_name, state=run_dir.alerts)
    decision = f"not started again; exit code {end.code}"
    line = {"kind": "gave_up", "step": last[0].step, "reason": end.reason, "decision": decision}
    alerts.tell(line | {"detail": {}, "time": time.time()})
    alerts.close()


def warm_start(config: RunConfig) -> WarmStart:
    """What starts the ranks of a run."""
    modules = rank_modules(config) if config.launch.warm else None
    return WarmStart(modules, begin_limit(config), say)


def begin_limit(config: RunConfig) -> float:
    """Seconds within which ranks must begin training, or end by themselves."""
    parallel = config.parallel
    return parallel.start_seconds + parallel.timeout_seconds + config.watchdog.slow_seconds


def _run_as_part(job: Job, out: Path, stand_by: StandBy | None) -> int:
    """Run one attempt on one node of a larger job, which decides what follows."""
    part_of = Path(job.environment[EXIT_DIR])
    # Within a job step Slurm itself signals every process.
    forward = StopTarget.step if "SLURM_STEP_ID" in job.environment else StopTarget.ranks
    stop = Stop()
    stop.listen()
    name = job.environment.get("SLURMD_NODENAME") or os.uname().nodename
    if stand_by and (fault := stand_by.check(stop)):
        say(f"{name} does not take part: {fault}")
        tell_exit(job.environment, name, EXIT_CRASH)
        return EXIT_CRASH
    outcome = run_once(replace(job, forward=forward, part_of=part_of), stop)
    if outcome.reason:
        say(outcome.reason)
    if outcome.stuck:
        pids = ", ".join(map(str, outcome.stuck))
        with contextlib.suppress(OSError):
            BadNodes(out).add([name], f"processes that cannot be ended (state D): {pids}")
    tell_exit(job.environment, name, outcome.code)
    stop = Stop()
    stop.listen()
    # Its disk may be full. A node that says nothing has failed; where none does, the job waits.
    while os.path.isdir(part_of) and recorded_exit(job.environment, name) is None:
        if not stop.sleep(1.0):
            break
        tell_exit(job.environment, name, outcome.code)
    return outcome.code


def say(text: str) -> None:
    """Log a line that is distinguishable from the job's own output."""
    _log.info("launcher: %s", text)


def run_command(arguments: Sequence[str]) -> int:
    """``python -m runner run -- COMMAND``: supervises any script and restarts it while it helps.

    The script is not changed. Its progress is read from its output; when it prints nothing for
    ``--quiet`` seconds its ranks are asked where they are, and it is restarted. The cause of a
    crash is read from tracebacks, torchrun's summary and error file, signals and NCCL's flight
    recorder.
    """
    options, command = _run_options().of_command(arguments)
    if not command:
        raise ConfigError("run: no command; write: run [options] -- torchrun train.py ...")
    try:
        num_groups = re.compile(options.progress).groups
    except re.error as error:
        raise ConfigError(
            f"--progress {options.progress!r}: is not a valid pattern ({error})"
        ) from None
    if num_groups < 1:
        raise ConfigError(f"--progress {options.progress!r}: needs a group, such as step (\\d+)")
    quiet, start, busy = options.quiet, options.quiet_start, options.quiet_busy
    if start is None:
        start = max(_START_SECONDS, quiet) if quiet else 0.0
    if busy is None:
        busy = _BUSY * quiet
    at_least(0, quiet=options.quiet, quiet_start=start)
    at_least(options.quiet, quiet_busy=busy)
    environment = dict(variables())
    supervisor = ScriptSupervisor(
        command,
        environment,
        watched=Watched(
            quiet_seconds=quiet,
            busy_seconds=busy,
            start_seconds=start,
            progress=options.progress,
            folder=options.out,
        ),
        rules=replace(rules_of(options, diagnose=False), measure="step"),
        launch_id=new_launch_id(environment),
        say=lambda text: _log.info("run: %s", text),
    )
    end = supervisor.run()
    if end.code:
        _log.info("run: %s", end.reason)
    return end.code


def _run_options() -> Parser:
    parser = Parser("run", run_command.__doc__)
    words = "for the evidence and the list of attempts"
    parser.option("--out", Path("holdfast-run"), words, metavar="DIR")
    words = "without output or work on its GPUs before it counts as hung; 0: never"
    parser.option("--quiet", 600.0, words, metavar="SECONDS")
    words = "the same before its first step; 0: never; default the larger of 600 and --quiet"
    parser.add_argument("--quiet-start", type=float, metavar="SECONDS", help=words)
    words = "the same while its GPUs are busy, as in a hung collective; default three times --quiet"
    parser.add_argument("--quiet-busy", type=float, metavar="SECONDS", help=words)
    words = "finds the step in a line, as its first group; default: step 12, iter: 12, 12/500 ["
    parser.add_argument("--progress", default=PROGRESS, metavar="PATTERN", help=words)
    add_restart_options(parser)
    return parser


_YES_NO = {"auto": None, "yes": True, "no": False}


# ``warm`` starts the ranks; None: one for this command alone.
def launch_command(arguments: Sequence[str], warm: WarmStart | None = None) -> int:
    """``python -m runner launch key=value ...``: runs torchrun on this node, supervised.

    The same command on each node: with --nodes 4 --head HOST. With --nodes 2:4 the run goes on with
    two nodes if others are lost, and uses them again when they return. Silent while all is well.
    """
    options, overrides = _parser().parse_known_args(arguments)
    scheduler = meeting(variables())
    nodes = torchrun.parse_nodes(options.nodes or str(scheduler.num_nodes if scheduler else 1))
    num_ranks = _num_ranks(options.nproc)
    given_head = torchrun.parse_head(options.head) if options.head else None
    # Report a wrong setting here, in one line, before any process starts.
    config = torchrun.settings(overrides)
    check(config, world_size=nodes.least * num_ranks)
    parse_faults(config.faults)
    check_extras(config)
    out = Path(config.out)
    agent = torchrun.Agent(
        nodes=nodes,
        num_ranks=num_ranks,
        head=given_head or (scheduler.head if scheduler else None),
        name=options.name or torchrun.default_name(out),
        hosts=_YES_NO[options.hosts] if options.head or not scheduler else scheduler.hosts,
        local_address=options.local_address or (scheduler.local_address if scheduler else None),
        torchrun_restarts=options.torchrun_restarts,
        number=scheduler.number if scheduler and not options.head else None,
    )
    command = torchrun.command(agent, overrides)
    if options.print:
        sys.stdout.write(shlex.join(command) + "\n")
        return 0
    if nodes.is_elastic:
        refuse_listed(out, os.uname().nodename)
    return run_supervised(options, command, out, agent, warm)


def slurm_node_command(arguments: Sequence[str]) -> int:
    """``python -m runner slurm-node``: what ``slurm-job`` runs on each node.

    An attempt of ``launch`` for each order; the process that forks ranks lasts over all of them.
    """
    Parser("slurm-node", slurm_node_command.__doc__).parse_args(arguments)
    code, warm = 0, None
    with contextlib.ExitStack() as stack:
        for words in orders():
            if warm is None:
                _, overrides = _parser().parse_known_args(words)
                warm = stack.enter_context(warm_start(torchrun.settings(overrides)))
            code = launch_command(words, warm)
    return code


def _parser() -> Parser:
    parser = Parser("launch", launch_command.__doc__)
    parser.add_argument("--nodes", metavar="N|MIN:MAX")
    parser.option("--nproc", "auto", "ranks on this node; auto: one per GPU")
    parser.add_argument("--head", metavar="HOST[:PORT]", help="where the nodes meet")
    parser.add_argument("--name", help="of the rendezvous; default: made from out")
    parser.add_argument("--hosts", choices=_YES_NO, default="auto", help="is this node the head?")
    parser.add_argument("--local-address", metavar="A", help="under which others reach this node")
    words = "by torchrun itself; default 0, or 3 with MIN:MAX nodes"
    parser.add_argument("--torchrun-restarts", type=int, metavar="N", help=words)
    parser.flag("--print", "print the command and stop")
    add_restart_options(parser)
    return parser


def _num_ranks(text: str) -> int:
    if text == "auto":
        return torchrun.num_ranks_here(variables())
    if not text.isdigit() or not int(text):
        raise ConfigError(f"--nproc {text}: auto, or a number of ranks of at least 1")
    return int(text)
