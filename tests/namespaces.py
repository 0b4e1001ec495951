"""Machines in one machine: network namespaces on a bridge. Needs root.

    with Network("hf", ["nodeA", "nodeB"]) as network:
        network.start("nodeA", ["torchrun", ...])
        network.cut("nodeB")

A node is a namespace with its own loopback, address and, where ``init`` keeps it alive, its own
processes, host name and /etc/hosts: killing that init kills the node, as losing its power would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType


def unavailable() -> str | None:
    """Why namespaces cannot be used here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("unshare") and shutil.which("nsenter")):
        return "network namespaces need the commands ip, unshare and nsenter"
    name = f"hf{os.getpid()}"
    if _try("ip", "netns", "add", name).returncode:
        return "network namespaces are not allowed here (ip netns add)"
    try:
        bridge = _try("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        return "no bridge can be made in a network namespace here" if bridge.returncode else None
    finally:
        _try("ip", "netns", "del", name)


class Network:
    """Nodes by name, with addresses 10.SUBNET.0.1 and so on, all on one bridge.

    Args:
        prefix: of the namespaces' names; short, unique on this machine.
        folder: for the nodes' /etc/hosts and logs.
        own_memory: each node has a /dev/shm of its own, as a pod has.
    """

    def __init__(
        self,
        prefix: str,
        nodes: Sequence[str],
        folder: Path,
        subnet: int = 79,
        *,
        own_memory: bool = False,
    ) -> None:
        self._memory = "mount -t tmpfs shm /dev/shm && " if own_memory else ""
        self.nodes = list(nodes)
        self._prefix = prefix
        self._folder = folder
        self._subnet = subnet
        self._inits: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Network:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name()
        try:
            self._up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _name(self, *more: str) -> None:
        names = [f"{self.address(node)} {node}" for node in self.nodes]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, *more, ""]))

    def point(self, name: str, node: str) -> None:
        """From now on a name means this node, for all nodes: as a service's does that moves."""
        self._name(f"{self.address(node)} {name}")

    def _up(self) -> None:
        bridge = self._space("bridge")
        _do("ip", "netns", "add", bridge)
        _do("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", bridge, "link", "set", "br0", "up")
        for node in self.nodes:
            space, port = self._space(node), f"p{node}"
            _do("ip", "netns", "add", space)
            _do("ip", "-n", space, "link", "set", "lo", "up")
            _do(*f"ip -n {bridge} link add {port} type veth peer name eth0 netns {space}".split())
            _do("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
            _do("ip", "-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            _do("ip", "-n", space, "link", "set", "eth0", "up")
            self.boot(node)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in list(self._inits):
            self.crash(node)
        for node in [*self.nodes, "bridge"]:
            _try("ip", "netns", "del", self._space(node))

    def address(self, node: str) -> str:
        return f"10.{self._subnet}.0.{self.nodes.index(node) + 1}"

    def boot(self, node: str) -> None:
        """Start the node's init; everything on the node is its descendant and dies with it."""
        setup = (
            f"hostname {node} && mount -t proc proc /proc && {self._memory}"
            f"mount --bind {self._folder / 'hosts'} /etc/hosts && touch {self._ready(node)} && "
            # Reaps what is orphaned; a shell does.
            "trap '' TERM; while :; do sleep 600; done"
        )
        self._ready(node).unlink(missing_ok=True)
        launcher = ["ip", "netns", "exec", self._space(node), "unshare", "--pid", "--fork", "--uts"]
        self._inits[node] = subprocess.Popen(
            [*launcher, "--mount", "--propagation", "private", "--kill-child", "bash", "-c", setup],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        limit = time.monotonic() + 10
        while not self._ready(node).exists():
            assert time.monotonic() < limit, f"{node} did not come up"
            time.sleep(0.01)

    def is_up(self, node: str) -> bool:
        return node in self._inits

    def crash(self, node: str) -> None:
        """SIGKILL to the node's init: the kernel kills everything on the node with it."""
        unshare = self._inits.pop(node)
        with contextlib.suppress(ProcessLookupError):
            os.kill(unshare.pid, signal.SIGKILL)  # --kill-child: its child is the init
        unshare.wait()

    def command(self, node: str, arguments: Sequence[str]) -> list[str]:
        """The command that runs ``arguments`` on the node."""
        inside = ["nsenter", "-t", str(self._init(node)), "-n", "-u", "-m", "-p"]
        return [*inside, f"--wd={os.getcwd()}", *arguments]

    def start(
        self, node: str, arguments: Sequence[str], *, log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on the node; its output is appended to ``log``."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.command(node, arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    def cut(self, node: str) -> None:
        """Take the node's port off the bridge: packets vanish without an error."""
        _do("ip", "-n", self._space("bridge"), "link", "set", f"p{node}", "nomaster")

    def heal(self, node: str) -> None:
        _do("ip", "-n", self._space("bridge"), "link", "set", f"p{node}", "master", "br0")

    def processes(self, node: str) -> dict[int, str]:
        """The node's processes except its init, by process id as seen from outside."""
        processes = {}
        done = _try("ip", "netns", "pids", self._space(node))
        own = {self._inits[node].pid, self._init(node)} if node in self._inits else set()
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if pid not in own and not command.startswith("sleep 600"):
                    processes[pid] = command
        return processes

    def _init(self, node: str) -> int:
        pid = self._inits[node].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0])

    def _space(self, node: str) -> str:
        return f"{self._prefix}{node}"

    def _ready(self, node: str) -> Path:
        return self._folder / f"{node}.up"


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def _do(*command: str) -> None:
    done = _try(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
