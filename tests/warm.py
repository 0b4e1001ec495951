"""Processes with torch and the runner already imported, so that a drill's ranks start at once.

Importing them takes most of a small run's processor time, three times over with a launcher and
two ranks. So one process imports them once a session and forks. What is forked is a process like
any other: a child of whoever started it, with its own environment, command line, files and
session, running ``torch.distributed.run`` or ``python -m runner`` from the first line. Only what
an interpreter does before that is done once.

    pytest -> zygote (imports, serves)
       |          ...forks
       +--> launcher = torch.distributed.run   (pytest's child, by way of PR_SET_CHILD_SUBREAPER)
               +--> ranks                      (forked before the launcher has threads, then wait)

A supervisor (``runner launch``, ``runner supervise``) has launchers that wait for it likewise.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.launch.prepared import Preparation

_TORCHRUNS = ("torch.distributed.run", "runner.launch.agent")
_MODULES = ("runner", *_TORCHRUNS)
# torch._dynamo comes with the first wrapper of FSDP2 or of an optimizer.
_IMPORTS = (
    *("torch._dynamo", "numpy.ma", *_TORCHRUNS),
    *("runner.__main__", "runner.session.session", "runner.tools.report.page"),
)
# The optimizer's module brings torch._inductor: five seconds a rank.
_IMPORTS_OF_ZERO = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # prctl(2)
_ARGUMENTS_BYTES, _ENVIRONMENT_BYTES = 1 << 14, 1 << 16
_PADDING = "HOLDFAST_WARM_PADDING"
# While it imports: DeepSpeed imports mlflow where that is installed, and that pyarrow's jemalloc.
_WITHOUT_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
DRILL = "HOLDFAST_DRILL"  # marks the processes of one drill
LATE_COPIES = "HOLDFAST_LATE_COPIES"  # set: snapshots are copied late, see tests/late_copies.py
# Read when the interpreter or a library begins; with another value the process must begin anew.
_AT_START = ("LD_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "ATEN_", "KMP_")
_HARMLESS = ("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")
_SUPERVISORS, _ATTEMPTS = ("launch", "supervise"), 3


def split(command: Sequence[str]) -> tuple[Preparation | None, list[str]]:
    """Split a prefixed command into its preparation, if it has one, and the command itself."""
    if list(command[1:3]) != ["-m", Preparation.__module__]:
        return None, list(command)
    return Preparation(**json.loads(command[3])), list(command[4:])


def suits(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a forked process would do the same as ``arguments`` with ``env``."""
    arguments = split(arguments)[1]
    program = [word for word in arguments[1:] if word != "-u"]
    known = program[:1] == ["-m"] and (program[1] in _MODULES or program[1].startswith("tests."))
    script = bool(program) and program[0].endswith(".py")
    early = {name for name in {*env, *os.environ} if name.startswith(_AT_START)} - {*_HARMLESS}
    same = all(env.get(name) == os.environ.get(name) for name in early)
    return (known or script) and same and arguments[0] == sys.executable


class WarmPopen(subprocess.Popen[str]):
    """``subprocess.Popen`` of a Python program, forked from the session's zygote."""

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        _hand_over(self, args, rest, _zygote(any(map(_is_zero, args))))


class TerminalPopen(subprocess.Popen[str]):
    """:class:`WarmPopen` whose output is a terminal, which becomes that of its session."""

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        _hand_over(self, args, rest, _zygote(any(map(_is_zero, args))), terminal=True)


class ZeroPopen(subprocess.Popen[str]):
    """:class:`WarmPopen` with DeepSpeed imported, which the program's words do not tell."""

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        _hand_over(self, args, rest, _zygote(True))


ROOT = Path(__file__).parent.parent


def finished(
    arguments: Sequence[str],
    *,
    timeout: float,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    zero: bool = False,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of a Python program with its output captured, forked from a zygote."""
    env = {**os.environ, **(env or {})}
    assert suits(arguments, env), "it would not be the same program"
    begin = ZeroPopen if zero else WarmPopen
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with begin(list(arguments), cwd=cwd, env=env, **options) as process:  # type: ignore[call-overload]
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)


def torchrun(
    arguments: Sequence[str], *, ranks: int, timeout: float, zero: bool = False
) -> subprocess.CompletedProcess[str]:
    """:func:`finished` for a program on several ranks: ``-m MODULE`` or a script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={ranks}", *arguments]
    return finished(command, timeout=timeout, zero=zero)


def _is_zero(word: str) -> bool:
    return word.startswith("parallel=zero")


def _hand_over(
    popen: Any, args: Sequence[str], rest: Sequence[Any], to: Any, *, terminal: bool = False
) -> None:
    """Replaces fork and exec in ``Popen``, with the arguments of Python 3.11 to 3.14."""
    # executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
    # p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, ...
    cwd, env, *theirs = (rest[place] for place in (4, 5, 9, 12, 14))
    given = os.environ if env is None else env
    job: dict[str, Any] = {
        **{"args": list(args), "env": dict(given), "cwd": str(cwd or os.getcwd())},
        "terminal": terminal,
    }
    popen.pid = to.begin(job, [own if own != -1 else n for n, own in enumerate(theirs)])
    popen._child_created = True
    popen._close_pipe_fds(*rest[9:15])


class _Stub:
    """A forked process that waits for its job."""

    def __init__(self, earlier: Sequence[_Stub]) -> None:
        here, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.pid = os.fork()
        if self.pid == 0:
            # They must see the launcher's end, and are no part of the run until they are told.
            for stub in earlier:
                stub._socket.close()
            here.close()
            _show(["to be"], os.environ)
            _run_received_job(remote)
        remote.close()
        self._socket = here

    def begin(self, job: Mapping[str, Any], files: Sequence[int]) -> int:
        _send(self._socket, job, files)
        self._socket.close()
        return self.pid


class _StubPopen(subprocess.Popen[str]):
    """Popen in a warm launcher or supervisor: takes what waits, as long as there is any."""

    stubs: list[_Stub]

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        if self.stubs and suits(args, rest[5]):
            _hand_over(self, args, rest, self.stubs.pop(0))
        else:
            super()._execute_child(args, *rest)  # type: ignore[misc]


class Zygote:
    """The process that forks, from the session's side.

    Args:
        for_zero: it has imported DeepSpeed as well, which other runs must do without.
    """

    def __init__(self, for_zero: bool) -> None:
        here, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = here
        # It outlives the drill that happens to be the first to need it.
        own = {name: value for name, value in os.environ.items() if name != DRILL}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.warm", str(remote.fileno())),
                *("zero" if for_zero else "", "x" * _ARGUMENTS_BYTES),
            ],
            env=own | _WITHOUT_THREADS | {_PADDING: "x" * _ENVIRONMENT_BYTES},
            pass_fds=[remote.fileno()],
            cwd=ROOT,
            start_new_session=True,
        )
        remote.close()

    def begin(self, job: Mapping[str, Any], files: Sequence[int]) -> int:
        """Fork a child of this process that does ``job``; returns its number."""
        with _reaping:
            _prctl(_SUBREAPER, 1)  # only now: orphans of the drills go to init, as ever
            try:
                _send(self._socket, job, files)
                answer = self._socket.recv(64)
            finally:
                _prctl(_SUBREAPER, 0)
        assert answer, "the zygote has ended"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self.process.wait(10)


_made: dict[bool, Zygote] = {}
_making = threading.Lock()
_reaping = threading.Lock()  # of all zygotes: whose orphans come here is a property of this process


def _zygote(for_zero: bool) -> Zygote:
    with _making:
        if for_zero not in _made:
            _made[for_zero] = Zygote(for_zero)
        return _made[for_zero]


def close() -> None:
    """Close the zygotes at the end of the session."""
    while _made:
        _made.popitem()[1].close()


# -- in the zygote, and in what it forks ----------------------------------------------------


def _send(to: socket.socket, job: Mapping[str, Any], files: Sequence[int]) -> None:
    data = json.dumps(job).encode()
    header = len(data).to_bytes(8, "little")
    to.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    to.sendall(data)


def _receive(source: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a job and its three files; None if the other side has closed."""
    header, files, _, _ = socket.recv_fds(source, 8, 3)
    if not header:
        return None
    length, data = int.from_bytes(header, "little"), b""
    while len(data) < length:
        data += source.recv(length - len(data))
    job: dict[str, Any] = json.loads(data)
    return job, files


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _serve(source: socket.socket) -> None:
    """Returns only in a process that was forked, when its job is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (received := _receive(source)) is not None:
        job, files = received
        between = os.fork()
        if between == 0:  # it ends at once, so that the launcher becomes the session's child
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.0005)
            source.send(str(os.getpid()).encode())
            source.close()
            return _become(job, files, is_launcher=True)
        os.waitpid(between, 0)
        for number in files:
            os.close(number)
    os._exit(0)


def _run_received_job(source: socket.socket) -> None:
    received = _receive(source)
    source.close()
    if received is None:
        os._exit(0)
    try:
        _become(*received, is_launcher=False)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    from runner.system import output

    output.finish()  # an interpreter that ends writes what is queued
    os._exit(code)


def _become(job: Mapping[str, Any], files: Sequence[int], *, is_launcher: bool) -> None:
    """Be the program that ``job`` names, from its first line."""
    prepared, command = split(job["args"])
    arguments, env = command[1:], job["env"]
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if job["terminal"]:
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(env)
    _show(command, env)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has the session ignore it
    while arguments[0] == "-u":
        arguments = arguments[1:]
    if prepared is not None:
        prepared.apply()
    if env.get(LATE_COPIES):
        from tests import late_copies

        late_copies.install()
    if arguments[0] == "-m" and arguments[1] in _TORCHRUNS:
        _launch(arguments[1], arguments[2:])
    elif arguments[0] == "-m":
        if arguments[2:3] and arguments[2] in _SUPERVISORS:
            _have_ready(_ATTEMPTS)
            subprocess.Popen = _StubPopen  # type: ignore[misc]
        sys.argv = arguments[1:]
        sys.path.insert(0, job["cwd"])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _launch(module: str, arguments: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from runner.launch import agent

    options = run.parse_args(arguments)
    with contextlib.suppress(ValueError):
        _have_ready(int(options.nproc_per_node) * (options.max_restarts + 1))
    subprocess_handler.Popen = _StubPopen  # type: ignore[misc]
    sys.argv = [run.__file__, *arguments]
    if module == agent.__name__:
        sys.exit(agent.run(arguments))
    run.main(arguments)


def _have_ready(num_stubs: int) -> None:
    _StubPopen.stubs = []
    for _ in range(num_stubs):
        _StubPopen.stubs.append(_Stub(_StubPopen.stubs))


def _show(args: Sequence[str], env: Mapping[str, str]) -> None:
    """Make /proc show this process's own command line and environment, as after exec."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last, env_first, env_last = map(int, fields[45:49])  # see proc(5)
    data = b"".join(word.encode() + b"\0" for word in args)
    settings = b"".join(f"{name}={value}\0".encode() for name, value in env.items())
    for text, start, end in ((data, first, last), (settings, env_first, env_last)):
        room = end - start
        assert len(text) <= room, f"{len(text)} bytes do not fit into {room}"
        ctypes.memmove(start, text.ljust(room, b"\0"), room)


def main() -> None:
    """Import, then serve."""
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    del os.environ[_PADDING]
    # The C library's own copies: the place where the kernel put the originals is written over.
    os.environ.update(dict(os.environ))
    for name in (*_IMPORTS, *(_IMPORTS_OF_ZERO if sys.argv[2] == "zero" else ())):
        importlib.import_module(name)
    del sys.modules["runner.__main__"]  # python -m runs it under another name
    from runner.config.compose import compose

    # Hydra's parser learns its grammar while it reads.
    compose(["model=tiny", "data.skip=[[1,2]]", "faults=[nan_grad@step=2,rank=1]", "eval.every=0"])
    # A collection in what is forked would look at all of it, and so copy every page that is shared.
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
