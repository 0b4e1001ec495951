"""A real Slurm on this machine, with its own configuration, keys and state in one folder.

As root each node is a namespace with its own name and address (:mod:`tests.namespaces`), so that
losing it loses everything on it at once. Otherwise several slurmd share this machine's loopback;
then a node is lost by killing its daemon, its steps and its tasks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from runner.system.process import parent
from tests import namespaces
from tests.programs import ended

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue")
_SYSTEM = ":/usr/sbin:/sbin"
# As fast as Slurm can be: it asks the nodes every third of SlurmdTimeout.
_CONF = """\
ClusterName=holdfast
SlurmctldHost={controller}
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/sock,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=6
MessageTimeout=3
SlurmctldTimeout=30
InactiveLimit=0
KillWait=5
MinJobAge=600
Waittime=0
"""
_PARTITION = "MaxTime=INFINITE State=UP"


def unavailable() -> str | None:
    """Why Slurm cannot run here; None if it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)}); scripts/test.sh does it as root"
    return None


class Machines(Protocol):
    """The places where the daemons run."""

    def conf(self, nodes: Sequence[str]) -> str: ...
    def start(self, node: str, command: Sequence[str]) -> None: ...
    def client(self, command: Sequence[str]) -> list[str]: ...
    def crash(self, node: str) -> None: ...
    def is_up(self, node: str) -> bool: ...
    def left_behind(self) -> dict[int, str]: ...
    def close(self) -> None: ...


class Cluster:
    """``with Cluster(["nodeA", "nodeB"]) as cluster: cluster.run("sinfo")``."""

    def __init__(self, nodes: Sequence[str]) -> None:
        # Munge wants a socket that every user can reach, and a short path to it.
        self.root = Path(tempfile.mkdtemp(prefix="holdfast-slurm-"))
        self.nodes = list(nodes)
        self._munge: subprocess.Popen[bytes] | None = None
        self._machines: Machines | None = None

    def __enter__(self) -> Cluster:
        for name in ("munge", "state", *(f"spool.{node}" for node in self.nodes)):
            (self.root / name).mkdir(parents=True)
        self.root.chmod(0o755)
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _up(self) -> None:
        namespaced = namespaces.unavailable() is None
        self._machines = Namespaced(self) if namespaced else Loopback(self)
        self.environment = os.environ | {
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "PATH": _path(),
            "OMP_NUM_THREADS": "1",
        }
        (self.root / "slurm.conf").write_text(self.machines.conf(self.nodes))
        # Without it slurmd looks for a cgroup file system, which a namespace has not.
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start_munge()
        self.machines.start("ctl", ["slurmctld", "-D"])
        for node in self.nodes:
            self.boot(node)
        self.until(self.is_idle, "nodes idle")

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        folder.chmod(0o755)
        descriptor = os.open(folder / "key", os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(descriptor, os.urandom(128))
        os.close(descriptor)
        names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        self._munge = subprocess.Popen(
            ["munged", "--foreground", *options, f"--seed-file={folder / 'seed'}"],
            env=os.environ | {"PATH": _path()},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it has a log file
            start_new_session=True,
        )
        self.until(lambda: (folder / "sock").exists(), "munge's socket")

    def __exit__(self, *_: object) -> None:
        if self._machines is not None:
            self._machines.close()
        if self._munge is not None:
            self._munge.terminate()
            self._munge.wait(10)
        shutil.rmtree(self.root)

    @property
    def machines(self) -> Machines:
        assert self._machines is not None
        return self._machines

    def run(self, *command: str, timeout: float = 60) -> str:
        """Run a client command on the controller; returns its output. It must succeed."""
        done = ended(*self.machines.client(command), env=self.environment, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def boot(self, node: str) -> None:
        self.machines.start(node, ["slurmd", "-D", "-N", node])

    def crash(self, node: str) -> None:
        """Kill the node: daemon, steps and tasks."""
        self.machines.crash(node)

    def is_idle(self) -> bool:
        return self.states() == dict.fromkeys(self.nodes, "idle")

    def states(self) -> dict[str, str]:
        with contextlib.suppress(AssertionError):
            lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
            return dict(line.split()[:2] for line in lines)
        return {}

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        text = self.run("scontrol", "show", "job", "--oneliner", job_id)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def until(
        self, condition: Callable[[], object], description: str, timeout: float = 300
    ) -> None:
        """Wait until ``condition()`` is true; under load a start alone may take a minute."""
        limit = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < limit, (
                f"not within {timeout:g} s: {description}\n{self.logs()}"
            )
            time.sleep(0.1)

    def logs(self) -> str:
        paths = [*sorted(self.root.glob("*.log")), *self.root.glob("munge/log")]
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in paths)


class Namespaced:
    """One namespace per node, and one for the controller."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        nodes = [*cluster.nodes, "ctl"]
        self.network = namespaces.Network(f"hs{os.getpid()}", nodes, cluster.root / "net")
        self.network.__enter__()
        self._daemons: list[subprocess.Popen[bytes]] = []

    def conf(self, nodes: Sequence[str]) -> str:
        head = _CONF.format(controller="ctl", port=6817, user="root", root=self._cluster.root)
        return head + (
            f"NodeName={','.join(nodes)} CPUs=2 RealMemory=1000 State=UNKNOWN\n"
            f"PartitionName=test Nodes={','.join(nodes)} Default=YES {_PARTITION} GraceTime=60\n"
            f"PartitionName=urgent Nodes={','.join(nodes)} {_PARTITION} PriorityTier=2\n"
        )

    def start(self, node: str, command: Sequence[str]) -> None:
        if not self.network.is_up(node):
            self.network.boot(node)
        log = self._cluster.root / f"{node}.out.log"
        self._daemons.append(
            self.network.start(node, command, log=log, env=self._cluster.environment)
        )

    def client(self, command: Sequence[str]) -> list[str]:
        return self.network.command("ctl", command)

    def crash(self, node: str) -> None:
        self.network.crash(node)

    def is_up(self, node: str) -> bool:
        return self.network.is_up(node)

    def left_behind(self) -> dict[int, str]:
        processes: dict[int, str] = {}
        for node in self._cluster.nodes:
            processes |= self.network.processes(node)
        return {pid: command for pid, command in processes.items() if "slurm" not in command}

    def close(self) -> None:
        self.network.__exit__(None, None, None)
        for daemon in self._daemons:
            daemon.wait(10)


class Loopback:
    """All daemons on 127.0.0.1 with different ports; needs no privileges."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def conf(self, nodes: Sequence[str]) -> str:
        # torch binds gloo to what the host name resolves to, which need not be 127.0.0.1.
        self._cluster.environment["GLOO_SOCKET_IFNAME"] = "lo"
        ports = _free_ports(len(nodes) + 1)
        text = _CONF.format(
            controller=f"{socket.gethostname().split('.')[0]}(127.0.0.1)",
            port=ports[0],
            user=_user(),
            root=self._cluster.root,
        )
        for node, port in zip(nodes, ports[1:], strict=True):
            text += (
                f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
                "CPUs=2 RealMemory=1000 State=UNKNOWN\n"
            )
        return text + (
            f"PartitionName=test Nodes={','.join(nodes)} Default=YES {_PARTITION} GraceTime=60\n"
            f"PartitionName=urgent Nodes={','.join(nodes)} {_PARTITION} PriorityTier=2\n"
        )

    def start(self, node: str, command: Sequence[str]) -> None:
        log = (self._cluster.root / f"{node}.out.log").open("ab")
        self._daemons[node] = subprocess.Popen(
            list(command),
            env=self._cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()

    def client(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def crash(self, node: str) -> None:
        tasks = self._tasks(f"SLURMD_NODENAME={node}")
        steps = {parent(pid) for pid in tasks} - tasks.keys()
        daemon = self._daemons.pop(node)
        daemon.kill()
        for pid in [*steps, *tasks]:
            if pid in tasks or b"slurmstepd" in _read(f"/proc/{pid}/cmdline"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def is_up(self, node: str) -> bool:
        return node in self._daemons

    def left_behind(self) -> dict[int, str]:
        return self._tasks("SLURMD_NODENAME=")

    def _tasks(self, mark: str) -> dict[int, str]:
        """Processes of this cluster's jobs whose environment has an entry that starts so."""
        tasks = {}
        own = f"SLURM_CONF={self._cluster.root / 'slurm.conf'}".encode()
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            entries = _read(f"/proc/{pid}/environ").split(b"\0")
            if own in entries and any(entry.startswith(mark.encode()) for entry in entries):
                tasks[pid] = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode()
        return tasks

    def close(self) -> None:
        for node in self._cluster.nodes:
            if node in self._daemons:
                self.crash(node)
        for daemon in self._daemons.values():
            daemon.terminate()
            daemon.wait(15)


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + _SYSTEM


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
