"""On clusters: ``slurm`` and the job that it submits, ``k8s``, ``nodes``."""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.command.arguments import Parser, at_least, pairs
from runner.command.supervise import add_restart_options, node_memory, rules_of, say
from runner.config.validate import check, check_extras
from runner.launch import slurm, torchrun
from runner.launch.crash_evidence import short_name
from runner.launch.kubernetes import Pods, job_set, train_job
from runner.launch.node_memory import NodeFolder
from runner.launch.slurm_job import SlurmJob, end_the_chain
from runner.policy.nodes import PASSED, REMEMBER_DAYS, NodeEvent, standing
from runner.system.environment import variables
from runner.system.error import ConfigError

# A pod's host name is NAME-node-0-INDEX and may have 63 letters.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?")


def slurm_command(arguments: Sequence[str]) -> int:
    """``python -m runner slurm --nodes 4 key=value ...``: prints the batch script, or submits it.

    A job that is preempted, runs into its time limit or loses a node goes back into the queue and
    resumes. With --spares it continues at once on a standby node. With --chain K, K jobs of one
    name follow one another, for queues that do not requeue.
    """
    options, overrides = _slurm_options().parse_known_args(arguments)
    # Report a mistake now, not when the job starts.
    config = torchrun.settings(overrides)
    if options.python == sys.executable:
        check_extras(config)
    at_least(1, nodes=options.nodes, chain=options.chain, warning=options.warning)
    at_least(0, spares=options.spares)
    batch = slurm.BatchScript(
        name=options.name,
        nodes=options.nodes,
        spares=options.spares,
        time=options.time,
        log=options.log,
        warning_seconds=options.warning,
        chained=options.chain > 1,
        options=pairs("--sbatch", options.sbatch, flags=True),
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


def _slurm_options() -> Parser:
    parser = Parser("slurm", slurm_command.__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="to train on")
    parser.option("--spares", 0, "standby nodes")
    parser.option("--nproc", "auto", "ranks a node; auto: one per GPU")
    parser.option("--name", "holdfast", "of the job")
    parser.add_argument("--time", metavar="LIMIT", help="time limit, as sbatch takes it")
    parser.option("--log", "%x-%j.log")
    words = "before the time limit, for the last checkpoint"
    parser.option("--warning", slurm.DEFAULT_WARNING, words, metavar="SECONDS")
    parser.option("--chain", 1, "K jobs in a row", metavar="K")
    words = "a further #SBATCH line: --sbatch partition=gpu --sbatch gpus-per-node=8"
    parser.repeated("--sbatch", "OPTION=VALUE", words)
    parser.option("--python", sys.executable, "interpreter on the nodes")
    parser.flag("--submit", "submit instead of printing")
    return parser


def slurm_job_command(arguments: Sequence[str]) -> int:
    """``python -m runner slurm-job key=value ...``: what the batch script runs on a node."""
    options, overrides = _job_options().parse_known_args(arguments)
    if "SLURM_JOB_ID" not in variables():
        raise ConfigError("slurm-job: runs inside a Slurm job; `python -m runner slurm` starts one")
    num_nodes = int(variables()["SLURM_JOB_NUM_NODES"])
    if not 0 <= options.spares < num_nodes:
        raise ConfigError(
            f"--spares {options.spares}: at least 0, fewer than the job's {num_nodes} nodes"
        )
    config = torchrun.settings(overrides)
    job = SlurmJob(
        variables(),
        out=Path(config.out),
        spares=options.spares,
        requeues=not options.chained,
        overrides=overrides,
        launch_options=["--nproc", options.nproc],
        rules=rules_of(options, diagnose=config.debug.diagnose_on_crash, restart_preempted=False),
        say=say,
        memory=node_memory(config),
    )
    code = job.run()
    if options.chained:
        end_the_chain(variables(), code)
    return code


def _job_options() -> Parser:
    parser = Parser("slurm-job", slurm_job_command.__doc__)
    parser.option("--spares", 0)
    parser.option("--nproc", "auto")
    parser.flag("--chained", "another job of this name follows")
    add_restart_options(parser)
    return parser


def k8s_command(arguments: Sequence[str]) -> int:
    """``python -m runner k8s --image IMAGE --nodes 4 key=value ...``: manifests for kubectl apply.

    Experimental: the manifests fit the published schemas, but no cluster has run them.
    --kind trainjob (Kubeflow Trainer v2) or jobset. The image holds this package (pip install
    'holdfast-train[EXTRAS]'); out must lie on a volume that all pods share (--claim).
    """
    options, overrides = _k8s_options().parse_known_args(arguments)
    if not _NAME.fullmatch(options.name):
        raise ConfigError(
            f"--name {options.name}: letters a-z, digits and '-', first a letter, at most 47"
        )
    at_least(1, nodes=options.nodes, nproc=options.nproc, grace=options.grace)
    pods = Pods(
        name=options.name,
        image=options.image,
        nodes=options.nodes,
        num_ranks=options.nproc,
        namespace=options.namespace,
        gpus=options.gpus,
        claim=options.claim,
        mount=options.mount,
        grace_seconds=options.grace,
        restarts=options.restarts,
        resources=pairs("--resource", options.resource),
    )
    check(torchrun.settings(overrides), world_size=pods.nodes * pods.num_ranks)
    is_set = options.kind == "jobset"
    manifests = [job_set(pods, overrides)] if is_set else train_job(pods, overrides)
    sys.stdout.write(yaml.safe_dump_all(manifests, sort_keys=False))
    return 0


def _k8s_options() -> Parser:
    parser = Parser("k8s", k8s_command.__doc__)
    parser.add_argument("--kind", choices=["trainjob", "jobset"], default="trainjob")
    parser.add_argument("--image", required=True, help="container image")
    parser.option("--nodes", 1, "pods")
    parser.option("--nproc", 1, "ranks a pod")
    parser.option("--name", "holdfast", "of the job")
    parser.add_argument("--namespace")
    parser.flag("--gpus", "a GPU for each rank")
    parser.add_argument("--claim", help="persistent volume claim for out")
    parser.option("--mount", "/runs", "where it is mounted")
    parser.option("--grace", 120, "seconds for the last checkpoint")
    parser.option("--restarts", 20, "after crashes")
    parser.repeated("--resource", "NAME=QUANTITY", "limit of a pod")
    return parser


def nodes_command(arguments: Sequence[str]) -> int:
    """``holdfast nodes DIR [clear HOST]``: what happened to each host, in any run; or forget it.

    DIR is that of cluster.nodes. The worst come first.
    """
    parser = Parser("nodes", nodes_command.__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="as cluster.nodes")
    parser.add_argument("action", nargs="?", choices=["clear"])
    parser.add_argument("host", nargs="?", help="to forget, as when it was mended")
    options = parser.parse_args(arguments)
    folder = NodeFolder(options.folder)
    if (options.action is None) != (options.host is None):
        raise ConfigError("nodes: write: nodes DIR clear HOST")
    if not options.folder.is_dir():
        raise ConfigError(f"nodes: {options.folder} is no folder; name that of cluster.nodes")
    try:
        if options.host:
            host = short_name(options.host)
            sys.stdout.write(f"{host}: {folder.clear(host)} events forgotten\n")
            return 0
        events = folder.events()
    except OSError as error:
        raise ConfigError(f"nodes: {error}") from None
    if events:
        Console(soft_wrap=True).print(_table(events, time.time()))
    else:
        sys.stdout.write(f"{options.folder}: nothing has happened to any host\n")
    return 0


def _table(events: Sequence[NodeEvent], now: float) -> Table:
    """Standings are those of the default memory."""
    table = Table("host", "standing", "faults", "last", "kind", "run", "reason")
    by_host = defaultdict[str, list[NodeEvent]](list)
    for event in sorted(events, key=lambda event: (event.kind != PASSED, event.time)):
        by_host[event.host].append(event)
    known = {host: standing(of, now=now) for host, of in by_host.items()}
    for host in sorted(by_host, key=lambda host: (-known[host].faults, host)):
        one, last = known[host], by_host[host][-1]
        words = "trusted"
        if one.faults:
            until = f"others first until {_at(last.time + REMEMBER_DAYS * 86400)}"
            words = until if one.is_tested else f"{until}, to be checked"
        cells = (host, words, f"{one.faults:g}", _at(last.time), last.kind, last.run, last.reason)
        table.add_row(*map(Text, cells))
    return table


def _at(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
