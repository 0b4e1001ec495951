"""The torchrun command of one node, with the settings that make it notice failures fast."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.config.compose import compose, expanded, unknown_option
from runner.config.schema import RunConfig
from runner.distributed.env import gpus_asked_for, gpus_on_node
from runner.system.error import ConfigError

DEFAULT_PORT = 29400
# Our agent runs torchrun's own main.
_TORCHRUN, _AGENT = "torch.distributed.run", "runner.launch.agent"
# Without a GPU: as many as the smallest machine has cores.
_RANKS_WITHOUT_GPU = 2
# A worker that fails is replaced by the supervisor, which knows when that helps. With a varying
# number of nodes torchrun itself must form the smaller world; each loss costs one of these.
_ELASTIC_RESTARTS = 3
_RENDEZVOUS = {
    "last_call_timeout": 3,  # default 30: how long a smaller world waits for more nodes
    "keep_alive_interval": 1,  # default 5: a dead node is noticed after interval x attempts
    "keep_alive_max_attempt": 3,
    "read_timeout": 15,  # 60
}


# From this many nodes on, numbered nodes do not agree on numbers: each keep-alive is a turn at one
# state that all nodes read, decode and write.
STATIC_FROM_NODES = 64
_TURN_SECONDS, _SECONDS_A_NODE = 2e-3, 1e-5  # seconds of such a turn
_MOST_BUSY = 0.25  # share of the time; above it, nodes lose their turns to others


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How many nodes take part: exactly ``least``, or from ``least`` to ``most``."""

    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    @property
    def text(self) -> str:
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.least)


def parse_nodes(text: str) -> Nodes:
    """``N`` or ``MIN:MAX``.

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    least = int(match[1]) if match else 0
    most = int(match[2] or match[1]) if match else 0
    if not 1 <= least <= most:
        raise ConfigError(f"--nodes {text}: a number of nodes, or MIN:MAX with 1 <= MIN <= MAX")
    return Nodes(least=least, most=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One node's share of a job.

    Args:
        num_ranks: processes on this node.
        head: host and port of the rendezvous; unused with one node.
        name: the rendezvous id, equal on all nodes of a job.
        hosts: whether this node hosts the rendezvous; None: decided by its address.
        local_address: the address at which the others reach this node; None: its host name.
        number: this node's, from 0 at the head; None: the nodes are not numbered.
    """

    nodes: Nodes
    num_ranks: int
    head: tuple[str, int] | None = None
    name: str = ""
    hosts: bool | None = None
    local_address: str | None = None
    torchrun_restarts: int | None = None
    number: int | None = None


def command(agent: Agent, overrides: Sequence[str]) -> list[str]:
    """``torchrun ... -m runner OVERRIDES``.

    Raises:
        ConfigError: several nodes without a head.
    """
    restarts = agent.torchrun_restarts
    if restarts is None:
        restarts = _ELASTIC_RESTARTS if agent.nodes.is_elastic else 0
    return [
        # As -m: the torchrun script may belong to another Python.
        *(sys.executable, "-m", _AGENT),
        f"--nproc-per-node={agent.num_ranks}",
        f"--max-restarts={restarts}",
        # Not SIGTERM and SIGUSR1: torchrun would kill its workers 30 s after, in the midst of
        # a save, and tell them twice where a scheduler signals every process.
        "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",
        *_where(agent),
        *("-m", "runner"),
        *overrides,
    ]


def is_started_by(command: Sequence[str]) -> bool:
    """Whether this is a torchrun command, ours or another."""
    names = {Path(word).name for word in command[: _num_before_runner(command)]}
    return bool(names & {"torchrun", _TORCHRUN, _AGENT})


def trains(command: Sequence[str]) -> bool:
    """Whether a command starts the runner."""
    return _num_before_runner(command) is not None


def _num_before_runner(command: Sequence[str]) -> int | None:
    """How many words stand before ``-m runner``; None if it is not there."""
    pairs = list(itertools.pairwise(command))
    return pairs.index(("-m", "runner")) if ("-m", "runner") in pairs else None


def _where(agent: Agent) -> list[str]:
    if agent.nodes.most == 1:
        return ["--standalone"]
    if agent.head is None:
        raise ConfigError(
            f"--nodes {agent.nodes.text}: needs --head HOST[:PORT], the node where the others "
            "meet; the same on every node"
        )
    host, port = agent.head
    if agent.number is not None and agent.nodes.least == agent.nodes.most >= STATIC_FROM_NODES:
        where = [
            f"--node-rank={agent.number}",
            "--rdzv-backend=static",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    else:
        # Keep-alives as often as the number of nodes allows.
        most = agent.nodes.most
        busy = math.ceil(most * (_TURN_SECONDS + _SECONDS_A_NODE * most) / _MOST_BUSY)
        interval = max(_RENDEZVOUS["keep_alive_interval"], busy)
        settings = _RENDEZVOUS | {"keep_alive_interval": interval, "is_host": int(is_head(agent))}
        where = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{port}",
            "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items()),
        ]
    if agent.local_address:
        where.append(f"--local-addr={agent.local_address}")
    return [f"--nnodes={agent.nodes.text}", *where, f"--rdzv-id={agent.name}"]


def is_head(agent: Agent) -> bool:
    """Whether the nodes meet on this one."""
    if agent.head is None:
        return False
    return is_here(agent.head[0]) if agent.hosts is None else agent.hosts


def environment(given: Mapping[str, str], agent: Agent) -> dict[str, str]:
    """The command's environment: the given one, with our settings for failures."""
    # Kubeflow's variables are defaults of torchrun's options, some of which we leave open.
    variables = {name: value for name, value in given.items() if not name.startswith("PET_")}
    # torchrun would say 1, and the ranks could not tell that from a person's choice.
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // agent.num_ranks)))
    if agent.nodes.most > 1:
        # With the shared store of torch 2.13 a node that comes back is never let in again.
        variables.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return variables


def parse_head(text: str) -> tuple[str, int]:
    """``HOST`` or ``HOST:PORT``.

    Raises:
        ConfigError: the port is not valid.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, DEFAULT_PORT
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--head {text}: HOST or HOST:PORT, port 1 to 65535")
    return host, int(port)


def is_here(host: str) -> bool:
    """Whether this machine has the host's address, so that a socket can be bound to it.

    torchrun compares names instead, and is wrong where the host name means 127.0.0.1.
    """
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def num_ranks_here(environment: Mapping[str, str]) -> int:
    """One rank per GPU, or two on a machine without GPUs.

    Raises:
        ConfigError: the job has GPUs here that torch does not see: with fewer ranks than the other
            nodes, or on CPUs, this one would keep them waiting.
    """
    import torch

    visible, given = torch.cuda.device_count(), gpus_on_node(environment)
    if given is not None and visible != given:
        raise ConfigError(
            f"{socket.gethostname()}: the job has {given} GPUs on this node (SLURM_GPUS_ON_NODE) "
            f"and torch sees {visible}: one may have failed (see nvidia-smi); --nproc N starts N "
            "ranks anyway"
        )
    requested = gpus_asked_for(environment)
    if not visible and requested:
        raise ConfigError(
            f"{socket.gethostname()}: the job asked for GPUs ({requested}) and torch sees none; "
            "--nproc N with parallel.device=cpu trains without"
        )
    return visible or _RANKS_WITHOUT_GPU


def default_name(out: Path) -> str:
    """A rendezvous id that is the same on every node that sees this run directory."""
    return "holdfast-" + hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:12]


# Reads a command that trains: which overrides it gives, and so which run it is.


_DIAGNOSE = "debug=collectives"


def overrides_of(command: Sequence[str]) -> list[str]:
    """The overrides of a command: what follows ``-m runner``.

    Raises:
        ConfigError: the command does not start the runner.
    """
    place = _num_before_runner(command)
    if place is None:
        raise ConfigError(
            f"{' '.join(command) or 'no command'}: no '-m runner' in it; name the run's directory "
            "with --out DIR"
        )
    return list(command[place + 2 :])


def settings(overrides: Sequence[str]) -> RunConfig:
    """The run's settings.

    Raises:
        ConfigError: they are wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir")
    known, rest = parser.parse_known_args(expanded(overrides))
    if dashed := [word for word in rest if word.startswith("--")]:
        raise ConfigError(unknown_option(dashed[0]))
    return compose(rest, config_dir=known.config_dir)


def out_of(command: Sequence[str], given: str | None) -> Path:
    """The run's directory: the given one, or that of the command.

    Raises:
        ConfigError: neither names one.
    """
    return Path(given) if given else Path(settings(overrides_of(command)).out)


def diagnosing(overrides: Sequence[str]) -> list[str]:
    """Add the override that checks every collective."""
    return [*(word for word in overrides if not word.startswith("debug=")), _DIAGNOSE]
