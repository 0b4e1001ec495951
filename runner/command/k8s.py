"""``python -m runner k8s --image IMAGE --nodes 4 key=value ...``: manifests for kubectl apply.

Experimental: the manifests fit the published schemas, but no cluster has run them.
--kind trainjob (Kubeflow Trainer v2) or jobset. The image holds this package (pip install
'holdfast-train[EXTRAS]'); out must lie on a volume that all pods share (--claim).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import yaml

from runner.command.arguments import Parser
from runner.config.validate import check
from runner.launch import command_line
from runner.launch.kubernetes import Pods, job_set, train_job
from runner.system.error import ConfigError

# A pod's host name is NAME-node-0-INDEX and may have 63 letters.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?")


def k8s_command(arguments: Sequence[str]) -> int:
    """Parse and print; returns the exit code."""
    options, overrides = _parser().parse_known_args(arguments)
    pods = _pods(options)
    check(command_line.settings(overrides), world_size=pods.nodes * pods.num_ranks)
    if options.kind == "jobset":
        manifests = [job_set(pods, overrides)]
    else:
        manifests = train_job(pods, overrides)
    sys.stdout.write(yaml.safe_dump_all(manifests, sort_keys=False))
    return 0


def _pods(options: object) -> Pods:
    given = vars(options)
    if not _NAME.fullmatch(given["name"]):
        raise ConfigError(
            f"--name {given['name']}: letters a-z, digits and '-', first a letter, at most 47"
        )
    for name in ("nodes", "nproc", "grace"):
        if given[name] < 1:
            raise ConfigError(f"--{name} {given[name]}: at least 1")
    return Pods(
        name=given["name"],
        image=given["image"],
        nodes=given["nodes"],
        num_ranks=given["nproc"],
        namespace=given["namespace"],
        gpus=given["gpus"],
        claim=given["claim"],
        mount=given["mount"],
        grace_seconds=given["grace"],
        restarts=given["restarts"],
        resources=dict(_pair(text) for text in given["resource"]),
    )


def _parser() -> Parser:
    parser = Parser(prog="python -m runner k8s", description=__doc__, allow_abbrev=False)
    parser.add_argument("--kind", choices=["trainjob", "jobset"], default="trainjob")
    parser.add_argument("--image", required=True, help="container image")
    parser.add_argument("--nodes", type=int, default=1, help="pods; default 1")
    parser.add_argument("--nproc", type=int, default=1, help="ranks a pod; default 1")
    parser.add_argument("--name", default="holdfast", help="of the job; default holdfast")
    parser.add_argument("--namespace")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--claim", help="persistent volume claim for out")
    parser.add_argument("--mount", default="/runs", help="where it is mounted; default /runs")
    parser.add_argument("--grace", type=int, default=120, help="seconds for the last checkpoint")
    parser.add_argument("--restarts", type=int, default=20, help="after crashes; default 20")
    parser.add_argument(
        "--resource", action="append", default=[], metavar="NAME=QUANTITY", help="limit of a pod"
    )
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, quantity = text.partition("=")
    if not equals or not name or not quantity:
        raise ConfigError(f"--resource {text!r}: write NAME=QUANTITY, as memory=64Gi")
    return name, quantity
