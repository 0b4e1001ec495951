"""``python -m runner slurm-job key=value ...``: what the batch script runs, on the first node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.command.arguments import Parser
from runner.command.supervise import add_restart_options, rules_of, say
from runner.launch import command_line
from runner.launch.slurm_job import SlurmJob, end_the_chain
from runner.system.environment import variables
from runner.system.error import ConfigError


def slurm_job_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit code of the batch job.

    Raises:
        ConfigError: this is not a Slurm job, or it has no nodes besides its spares.
    """
    options, overrides = _parser().parse_known_args(arguments)
    if "SLURM_JOB_ID" not in variables():
        raise ConfigError("slurm-job: runs inside a Slurm job; `python -m runner slurm` starts one")
    num_nodes = int(variables()["SLURM_JOB_NUM_NODES"])
    if not 0 <= options.spares < num_nodes:
        raise ConfigError(
            f"--spares {options.spares}: at least 0, fewer than the job's {num_nodes} nodes"
        )
    config = command_line.settings(overrides)
    job = SlurmJob(
        variables(),
        out=Path(config.out),
        spares=options.spares,
        requeues=not options.chained,
        overrides=overrides,
        launch_options=["--nproc", options.nproc],
        rules=rules_of(options, diagnose=config.debug.diagnose_on_crash, restart_preempted=False),
        say=say,
    )
    code = job.run()
    if options.chained:
        end_the_chain(variables(), code)
    return code


def _parser() -> Parser:
    parser = Parser(prog="python -m runner slurm-job", description=__doc__, allow_abbrev=False)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--nproc", default="auto")
    parser.add_argument("--chained", action="store_true", help="another job of this name follows")
    add_restart_options(parser, restarts=5)
    return parser
