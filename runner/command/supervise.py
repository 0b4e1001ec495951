"""``python -m runner supervise -- COMMAND``: restarts a job after a crash, while that helps.

For places without a scheduler. The budget of restarts is counted in progress: an attempt that
advances the newest clean checkpoint renews it. Exit codes 2, 3 and 4 are not restarted, 75
is; the same failure at the same step three times ends it with 3.
"""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.command.arguments import Parser
from runner.config.schema import RunConfig
from runner.distributed.env import EXIT_DIR, tell_exit
from runner.launch import command_line, meeting_point
from runner.launch.attempt import Job, Stop, StopTarget, run_once
from runner.launch.bad_nodes import BadNodes
from runner.launch.outcome import EXIT_CODES
from runner.launch.supervisor import JobSupervisor, new_launch_id
from runner.policy.restart import RestartRules
from runner.system.environment import variables
from runner.system.error import ConfigError

_log = logging.getLogger(__name__)


def supervise_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit code of the job."""
    given = list(arguments)
    separator = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:separator])
    command = given[separator + 1 :]
    if not command:
        raise ConfigError("supervise: no command; write: supervise [options] -- torchrun ...")
    out = command_line.out_of(command, options.out)
    return run_supervised(options, command, out=out, environment=variables())


def _parser() -> Parser:
    parser = Parser(prog="python -m runner supervise", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", metavar="DIR", help="the run's directory; default: the command's")
    add_restart_options(parser, restarts=5)
    return parser


def add_restart_options(parser: ArgumentParser, *, restarts: int) -> None:
    """Options that :func:`rules_of` reads."""
    parser.add_argument(
        "--restarts",
        type=int,
        default=restarts,
        metavar="N",
        help=f"restarts in a row without a new clean checkpoint; 0: none; default {restarts}",
    )
    parser.add_argument(
        "--pause",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="before a restart; doubled with each one without progress; default 1",
    )
    parser.add_argument(
        "--max-pause", type=float, default=300.0, metavar="SECONDS", help="default 300"
    )


def rules_of(options: Namespace, *, diagnose: bool, restart_preempted: bool = True) -> RestartRules:
    """
    Raises:
        ConfigError: a number is negative.
    """
    for name in ("restarts", "pause", "max_pause"):
        if not getattr(options, name) >= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 0")
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
    *,
    out: Path,
    environment: Mapping[str, str],
    shielded: bool = False,
    meeting: Meeting | None = None,
) -> int:
    """Supervise a command that may or may not start the runner; returns the exit code.

    Args:
        meeting: where several nodes have a supervisor each.
    """
    diagnose, begin_seconds = False, None
    if "runner" in command:
        overrides = command_line.overrides_of(command)
        config = command_line.settings(overrides)
        diagnose, begin_seconds = config.debug.diagnose_on_crash, begin_limit(config)

    def make_job(_: int, diagnosing: bool) -> Job:
        chosen = list(command)
        if diagnosing:
            chosen[len(chosen) - len(overrides) :] = command_line.diagnosing(overrides)
        return Job(
            command=chosen,
            environment=environment,
            shielded=shielded,
            begin_seconds=begin_seconds,
        )

    rules = rules_of(options, diagnose=diagnose)
    if EXIT_DIR in environment:
        return _run_as_part(make_job(1, False), out)
    supervisor = JobSupervisor(
        out=out,
        launch_id=meeting.name if meeting else new_launch_id(environment),
        node=os.uname().nodename if meeting else None,
        least_nodes=meeting.least_nodes if meeting else None,
        rules=rules,
        make_job=make_job,
        say=say,
    )
    end = supervisor.run()
    if end.code:
        say(end.reason)
    if supervisor.is_left_out and meeting and meeting.head:
        say("the nodes still meet here; this ends with the run")
        hold = meeting_point.command(out, meeting.head)
        run_once(Job(command=hold, environment=environment), supervisor.stop)
    return end.code


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """
    Args:
        name: the rendezvous id.
        least_nodes: without which there is no run, if their number may vary; None if it is fixed.
        head: host and port of the rendezvous if it is on this node, else None.
    """

    name: str
    least_nodes: int | None
    head: tuple[str, int] | None


def begin_limit(config: RunConfig) -> float:
    """Seconds within which ranks must begin training, or end by themselves."""
    parallel = config.parallel
    return parallel.start_seconds + parallel.timeout_seconds + config.watchdog.slow_seconds


def _run_as_part(job: Job, out: Path) -> int:
    """Run one attempt on one node of a larger job, which decides what follows."""
    part_of = Path(job.environment[EXIT_DIR])
    # Within a job step Slurm itself signals every process.
    forward = StopTarget.step if "SLURM_STEP_ID" in job.environment else StopTarget.ranks
    stop = Stop()
    stop.listen()
    outcome = run_once(replace(job, forward=forward, part_of=part_of), stop)
    if outcome.reason:
        say(outcome.reason)
    name = job.environment.get("SLURMD_NODENAME") or os.uname().nodename
    if outcome.stuck:
        pids = ", ".join(map(str, outcome.stuck))
        BadNodes(out).add([name], f"processes that cannot be ended (state D): {pids}")
    tell_exit(job.environment, name, outcome.code)
    return outcome.code


def say(text: str) -> None:
    """Log a line that is distinguishable from the job's own output."""
    _log.info("supervise: %s", text)
