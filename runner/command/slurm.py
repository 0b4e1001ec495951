"""``python -m runner slurm --nodes 4 key=value ...``: prints the batch script, or submits it.

A job that is preempted, runs into its time limit or loses a node goes back into the queue and
resumes. With --spares it continues at once on a standby node. With --chain K, K jobs of one
name follow one another, for queues that do not requeue.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runner.command.arguments import Parser
from runner.config.extras import check_extras
from runner.launch import command_line, slurm
from runner.system.error import ConfigError


def slurm_command(arguments: Sequence[str]) -> int:
    """Parse, print or submit; returns the exit code."""
    options, overrides = _parser().parse_known_args(arguments)
    # Report a mistake now, not when the job starts.
    config = command_line.settings(overrides)
    if options.python == sys.executable:
        check_extras(config)
    if options.nodes < 1 or options.spares < 0 or options.chain < 1 or options.warning < 1:
        raise ConfigError("--nodes, --chain and --warning are at least 1, --spares at least 0")
    batch = slurm.Batch(
        name=options.name,
        nodes=options.nodes,
        spares=options.spares,
        time=options.time,
        log=options.log,
        warning_seconds=options.warning,
        chained=options.chain > 1,
        options=dict(_pair(text) for text in options.sbatch),
        python=options.python,
        job_options=["--nproc", options.nproc] if options.nproc != "auto" else [],
    )
    text = slurm.script(batch, overrides)
    if not options.submit:
        sys.stdout.write(text)
        return 0
    for job_id in slurm.submit(text, times=options.chain):
        sys.stdout.write(f"submitted {job_id}\n")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m runner slurm", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True, help="to train on")
    parser.add_argument("--spares", type=int, default=0, help="standby nodes; default 0")
    parser.add_argument("--nproc", default="auto", help="ranks a node; auto: one per GPU")
    parser.add_argument("--name", default="holdfast", help="of the job; default holdfast")
    parser.add_argument("--time", metavar="LIMIT", help="time limit, as sbatch takes it")
    parser.add_argument("--log", default="%x-%j.log", help="default %%x-%%j.log")
    parser.add_argument(
        "--warning",
        type=int,
        default=slurm.DEFAULT_WARNING,
        metavar="SECONDS",
        help=f"before the time limit, for the last checkpoint; default {slurm.DEFAULT_WARNING}",
    )
    parser.add_argument("--chain", type=int, default=1, metavar="K", help="K jobs in a row")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="a further #SBATCH line: --sbatch partition=gpu --sbatch gpus-per-node=8",
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter on the nodes")
    parser.add_argument("--submit", action="store_true", help="submit instead of printing")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.lstrip("-").partition("=")
    if not name or any(letter.isspace() for letter in text):
        raise ConfigError(f"--sbatch {text!r}: write OPTION=VALUE, without spaces")
    return name, value
