"""``python -m runner launch key=value ...``: runs torchrun on this node, supervised.

The same command on each node: with --nodes 4 --head HOST. With --nodes 2:4 the run goes on with
two nodes if others are lost, and uses them again when they return. Silent while all is well.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.command.arguments import Parser
from runner.command.supervise import add_restart_options, run_supervised, warm_start
from runner.config.validate import check, check_extras
from runner.fault.spec import parse_faults
from runner.launch import torchrun
from runner.launch.crash_evidence import refuse_listed
from runner.launch.slurm import meeting
from runner.launch.slurm_step import orders
from runner.launch.warm_start import WarmStart
from runner.system.environment import variables
from runner.system.error import ConfigError

_YES_NO = {"auto": None, "yes": True, "no": False}


def launch_command(arguments: Sequence[str], warm: WarmStart | None = None) -> int:
    """Parse and run; returns the exit code of the job.

    Args:
        warm: starts the ranks; None: one for this command alone.
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
    parser = Parser("launch", __doc__)
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
