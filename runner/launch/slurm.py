"""The batch script, and answers of Slurm's own commands. Knows nothing of runs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.system.environment import changeable
from runner.system.error import ConfigError, RunnerError
from runner.system.parsing import json_text
from runner.system.process import take_input

# Seconds before the time limit; Slurm looks at limits every 30 s and may be that much late.
DEFAULT_WARNING = 120
_COMMAND_SECONDS = 60
_AT_ONCE = 400  # nodes in one command
_UNUSABLE = ("down", "fail", "error", "unknown", "power")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """What the script asks Slurm for.

    Args:
        nodes, spares: train on ``nodes``; ``spares`` more stand by for one that fails.
        warning_seconds: how long before the time limit Slurm warns, for a last checkpoint.
        chained: one of several jobs of one name, one after another.
        options: further sbatch options, name to value.
        python: the interpreter on the nodes.
    """

    name: str
    nodes: int
    spares: int = 0
    time: str | None = None
    log: str = "%x-%j.log"
    warning_seconds: int = DEFAULT_WARNING
    chained: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    python: str = "python"
    job_options: Sequence[str] = ()


def script(batch: BatchScript, overrides: Sequence[str]) -> str:
    """The text of the batch script."""
    options = {
        "job-name": batch.name,
        "nodes": str(batch.nodes + batch.spares),
        "ntasks-per-node": "1",
        # A dead node, and our own "start me again", put the job back in the queue.
        "requeue": None,
        "open-mode": "append",
        "output": batch.log,
        "signal": f"B:USR1@{batch.warning_seconds}",
        **({"time": batch.time} if batch.time else {}),
        # The job goes on without a node that died, on a spare.
        **({"no-kill": None} if batch.spares else {}),
        **({"dependency": "singleton"} if batch.chained else {}),
        **batch.options,
    }
    lines = [f"#SBATCH --{key}" + (f"={value}" if value else "") for key, value in options.items()]
    command = [batch.python, "-m", "runner", "slurm-job"]
    if batch.spares:
        command += ["--spares", str(batch.spares)]
    if batch.chained:
        command.append("--chained")
    command += [*batch.job_options, *overrides]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "# Overrides follow the script's name: sbatch SCRIPT out=runs/a model=llama_1b ...",
            "# exec: Slurm's warning (B:USR1) goes to this process, so it must be the one to act.",
            f'exec {shlex.join(command)} "$@"',
            "",
        ]
    )


def submit(text: str, *, times: int = 1) -> list[str]:
    """Hand the script to sbatch; returns the job ids.

    Raises:
        ConfigError: sbatch refused it, or is not there.
    """
    return [_run(["sbatch", "--parsable"], text=text).strip() for _ in range(times)]


def hostnames(node_list: str) -> list[str]:
    """``nodeA,node[1-3]`` spelled out."""
    return _run(["scontrol", "show", "hostnames", node_list]).split()


def addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Node to the address under which Slurm reaches it."""
    by_node: dict[str, str] = {}
    for some in _some_at_a_time(nodes):
        text = _run(["scontrol", "--oneliner", "show", "node", ",".join(some)])
        for line in text.splitlines():
            pairs = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "NodeName" in pairs:
                by_node[pairs["NodeName"]] = pairs.get("NodeAddr", pairs["NodeName"])
    return by_node


def unusable(nodes: Sequence[str]) -> set[str]:
    """Those of ``nodes`` that Slurm considers dead."""
    states: dict[str, str] = {}
    for some in _some_at_a_time(nodes):
        chosen = f"--nodes={','.join(some)}"
        text = _run(["sinfo", "--noheader", "--Node", "--format=%N %T", chosen])
        states |= dict(line.split()[:2] for line in text.splitlines() if line.strip())
    return {
        node
        for node, state in states.items()
        # A star: it does not answer.
        if state.endswith("*") or state.lower().startswith(_UNUSABLE)
    }


def _some_at_a_time(nodes: Sequence[str]) -> list[Sequence[str]]:
    """Split the nodes into groups: an argument has at most 128 KiB."""
    return [nodes[at : at + _AT_ONCE] for at in range(0, len(nodes), _AT_ONCE)]


def end_time(job_id: str) -> float | None:
    """When the job reaches its time limit, in seconds since the epoch; None: never."""
    text = _run(["squeue", "--noheader", f"--jobs={job_id}", "--format=%e"]).strip()
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # NONE, N/A
        return None


def requeue(job_id: str) -> bool:
    """Put the job back in the queue; False when Slurm will not."""
    with contextlib.suppress(RunnerError):
        _run(["scontrol", "requeue", job_id])
        return True
    return False


def cancel_pending(name: str, user: str) -> None:
    """Take the jobs of this name that still wait out of the queue."""
    _run(["scancel", f"--name={name}", f"--user={user}", "--state=PENDING"])


def _run(command: Sequence[str], *, text: str | None = None) -> str:
    try:
        result = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not here: this is no Slurm cluster's machine") from None
    except subprocess.TimeoutExpired:
        raise RunnerError(f"{shlex.join(command)}: no answer in {_COMMAND_SECONDS} s") from None
    if result.returncode:
        raise ConfigError(f"{shlex.join(command)}: {result.stderr.strip() or result.returncode}")
    return result.stdout


# What a Slurm job passes to its nodes: the nodes, their head, and the rendezvous endpoint.


NODES = "HOLDFAST_NODES"
PORT = "HOLDFAST_PORT"
MOST_BYTES = 1 << 14  # of a list of names in a variable or an argument; Linux takes 128 KiB of each
_IN_FILE = "@"  # what follows is a path; no node's name begins so


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The rendezvous as node ``number`` sees it. The first node hosts it."""

    num_nodes: int
    number: int
    head: tuple[str, int]
    hosts: bool
    local_address: str


def announce(addresses: Sequence[tuple[str, str]], port: int, *, file: Path) -> dict[str, str]:
    """The environment for every node's process, from (node, address) pairs, head first.

    Args:
        file: gets the names if they are too many for a variable; every node can read it.
    """
    names = ",".join(f"{node}={address}" for node, address in addresses)
    if len(names) > MOST_BYTES:
        file.write_text(names + "\n")
        names = f"{_IN_FILE}{file}"
    return {NODES: names, PORT: str(port)}


def meeting(environment: Mapping[str, str]) -> Meeting | None:
    """What :func:`announce` put into the environment; None outside of a Slurm step.

    Raises:
        ConfigError: the file with the names cannot be read here.
    """
    if NODES not in environment or "SLURMD_NODENAME" not in environment:
        return None
    names = environment[NODES]
    if names.startswith(_IN_FILE):
        try:
            names = Path(names.removeprefix(_IN_FILE)).read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"{NODES}={names}: the names of this job's nodes cannot be read ({error}); "
                "out must lie where every node sees it"
            ) from None
    pairs = [word.split("=", 1) for word in names.split(",")]
    own = environment["SLURMD_NODENAME"]
    nodes = [node for node, _ in pairs]
    return Meeting(
        num_nodes=len(pairs),
        number=nodes.index(own),
        head=(pairs[0][1], int(environment[PORT])),
        hosts=nodes[0] == own,
        local_address=dict((node, address) for node, address in pairs)[own],
    )


NODE_COMMAND = "slurm-node"  # takes the orders
_OWN = "HOLDFAST_"  # variables of an attempt; the others are the job's
_END_SECONDS = 3.0


class JobStep:
    """Starts the command of each attempt in the step that is there, or in a new one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[Any] | None = None
        self._words: list[str] = []  # of its srun

    def popen(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        is_asked_to_stop: object,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` of an srun; the same one while it lives, on the same nodes.

        Args:
            args: what follows :data:`NODE_COMMAND` is the order's.
            is_asked_to_stop: not needed; nothing is waited for.
        """
        place = list(args).index(NODE_COMMAND) + 1
        words = list(args[:place])
        own = {name: value for name, value in env.items() if name.startswith(_OWN)}
        order = json_text({"arguments": list(args[place:]), "environment": own}) + "\n"
        if words != self._words or not self._gave(order):
            self.close()
            self._words = words
            self._process = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, **options)
            self._gave(order)
        assert self._process is not None
        return self._process

    def _gave(self, order: str) -> bool:
        """Write an order to the step; False where it has ended."""
        process = self._process
        if process is None or process.stdin is None or process.poll() is not None:
            return False
        with contextlib.suppress(OSError):
            process.stdin.write(order.encode())
            process.stdin.flush()
            return True
        return False

    def close(self) -> None:
        """Let its processes end, which they do when there are no more orders."""
        process, self._process, self._words = self._process, None, []
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        for end in (process.terminate, process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
                return
            end()
        process.wait()


def orders() -> Iterator[list[str]]:
    """The arguments of each order, with its variables set; in the process on a node.

    Between orders a request to stop is for the other nodes, whose part has not ended yet.
    """
    with os.fdopen(take_input()) as source:
        for line in source:
            order = json.loads(line)
            changeable().update(order["environment"])
            yield order["arguments"]
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
