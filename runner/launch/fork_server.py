"""A process that has imported what ranks import, and forks them: ``python -m ... FD MODULE...``.

Its parent asks it over a socket pair (:class:`Forks`). What it forks is a process like any other: a
child of the one that asked, in a session of its own, with its own environment, command line and
files, running ``python -m MODULE`` from the first line; only what an interpreter does before that
is done once. A forked torchrun has a fork server of its own, made while it has no threads, for its
ranks:

    supervisor -> fork server (imports, then serves)
       |              ...forks
       +--> torchrun -> its fork server
               +--> ranks

Python's own ``multiprocessing.forkserver`` cannot take its place: its children are its own, so that
its end would be theirs, and they show its command line and environment, by which
:mod:`runner.launch.process_tree` finds the processes of an attempt.

No rank is kept ready with its settings, data set and model class: these take 0.07 of the 1.1 s of a
restart (``nano``), with a Hugging Face model and its data 0.11 of 1.2 s, and the corpus may change.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import importlib
import inspect
import io
import json
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from runner.launch.process_tree import Preparation
from runner.system.environment import changeable, variables
from runner.system.garbage import import_all
from runner.system.parsing import json_text
from runner.system.process import (
    adopt_orphans,
    die_with_parent,
    own_module,
    stat_fields,
    take_input,
)

TORCHRUNS = ("torch.distributed.run", "runner.launch.agent")
# torch._dynamo comes with the first wrapper of FSDP2 or of an optimizer.
IMPORTS = (*TORCHRUNS, "torch._dynamo", "numpy.ma", "runner.__main__", "runner.session.session")
_TORCHRUN_ALONE = "--torchrun-alone"
_RUN = ("runner.__main__", *TORCHRUNS)
# Hydra's parser learns its grammar while it reads.
_OVERRIDES = ("model=tiny", "data.skip=[[1,2]]", "faults=[nan_grad@step=2,rank=1]", "eval.every=0")
_READY = b"ready"
_ANSWER_BYTES = 4096
# /proc shows the memory where the kernel put arguments and environment: room for those of forks.
_ARGUMENTS_BYTES, _ENVIRONMENT_BYTES = 1 << 16, (1 << 17) - 64
_PADDING = "HOLDFAST_PADDING"
# pyarrow, which DeepSpeed and datasets import, brings an allocator that starts a thread.
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# The server lives on where a scheduler signals every process; what it forks handles them itself.
_NOT_FOR_THE_SERVER = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_making = threading.Lock()  # whose orphans come here is a property of this process


class ForkError(Exception):
    """The fork server cannot fork this; it says why."""


class ForkRequest(TypedDict):
    """What a forked process becomes."""

    args: list[str]
    env: dict[str, str]
    cwd: str
    cpus: list[int]


class Forks:
    """A fork server, from the side of the process that asks.

    Args:
        own: the socket to it.
        wait_seconds: longest wait for an answer; a server that is asked has nothing else to do.
    """

    def __init__(self, own: socket.socket, *, wait_seconds: float = 30.0) -> None:
        self._socket = own
        self._wait_seconds = wait_seconds
        own.settimeout(wait_seconds)

    @classmethod
    def start(
        cls, modules: Sequence[str] | None, env: Mapping[str, str], *, program: str = __name__
    ) -> tuple[Forks, subprocess.Popen[Any]]:
        """Start a server; does not wait for it.

        Args:
            modules: what it imports besides :data:`IMPORTS`; None: torchrun, and nothing else. Then
                a torchrun that it forks starts its ranks anew.
        """
        here, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        words = [_TORCHRUN_ALONE] if modules is None else modules
        with remote:
            process = subprocess.Popen(
                [sys.executable, "-m", program, *words, "x" * _ARGUMENTS_BYTES],
                env={**_NO_THREADS, **env, _PADDING: "x" * _ENVIRONMENT_BYTES},
                stdin=remote.fileno(),
                start_new_session=True,
            )
        return cls(here), process

    def is_ready(self, seconds: float) -> bool:
        """Wait until it has imported everything; False when that takes longer.

        Raises:
            ForkError: it has ended, or cannot serve.
        """
        self._socket.settimeout(seconds)
        try:
            answer = self._socket.recv(_ANSWER_BYTES)
        except TimeoutError:
            return False
        if answer != _READY:
            raise ForkError(answer.decode() or "it ended while it imported")
        self._socket.settimeout(self._wait_seconds)
        return True

    def fork(self, job: ForkRequest, files: Sequence[int]) -> int:
        """Fork a child of this process that does ``job``; returns its process id.

        Args:
            files: its standard input, output and error.

        Raises:
            ForkError: it could not be forked.
        """
        with _making:
            adopt_orphans(True)
            try:
                _send(self._socket, job, files)
                answer = json.loads(
                    self._socket.recv(_ANSWER_BYTES) or b'{"error": "it has ended"}'
                )
            except TimeoutError:
                self.close()  # a late answer would be taken for that to the next question
                raise ForkError("it does not answer") from None
            except OSError as error:
                raise ForkError(f"it cannot be reached ({error.strerror})") from None
            finally:
                adopt_orphans(False)
        if "pid" not in answer:
            raise ForkError(str(answer["error"]))
        return int(answer["pid"])

    def close(self) -> None:
        """Let it end."""
        self._socket.close()


class ForkedPopen(subprocess.Popen[Any]):
    """``subprocess.Popen`` of a Python program that a fork server forks.

    Raises:
        ForkError: it could not; nothing was started.
    """

    def __init__(self, forks: Forks, args: Sequence[str], **options: Any) -> None:
        self._forks = forks
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        self.hand_over(self, self._forks, args, rest)

    @staticmethod
    def hand_over(popen: Any, forks: Forks, args: Any, rest: Sequence[Any]) -> None:
        """Replace fork and exec in ``popen``."""
        # With the arguments of Python 3.11 to 3.14: executable, preexec_fn, close_fds, pass_fds,
        # cwd, env, startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite,
        # errread, errwrite, ...
        cwd, env, *theirs = (rest[place] for place in (4, 5, 9, 12, 14))
        job = ForkRequest(
            args=[os.fspath(word) for word in args],
            env=dict(variables() if env is None else env),
            cwd=os.fspath(cwd or os.getcwd()),
            # Where torchrun binds a rank to a NUMA node, this thread is bound meanwhile.
            cpus=sorted(os.sched_getaffinity(0)),
        )
        popen.pid = forks.fork(job, [own if own != -1 else n for n, own in enumerate(theirs)])
        popen._child_created = True
        popen._close_pipe_fds(*rest[9:15])


def popen(
    forks: Forks | None, args: Sequence[str], *, say: Callable[[str], None], **options: Any
) -> subprocess.Popen[Any]:
    """Start a program, forked if that is possible; ``say`` gets a line where it is not."""
    if forks is not None and suits(args):
        try:
            return ForkedPopen(forks, args, **options)
        except ForkError as error:
            say(f"the fork server: {error}; this process is started anew")
    return subprocess.Popen(args, **options)


def suits(args: Sequence[str], *, is_torchrun: bool = False) -> bool:
    """Whether a forked process would do the same as this command.

    Args:
        is_torchrun: it must be a torchrun.
    """
    words = [word for word in prepared(args)[1] if word != "-u"]
    return (
        words[:2] == [sys.executable, "-m"]
        and words[2:3] != []
        and (words[2] in TORCHRUNS or (words[2].split(".")[0] == "runner" and not is_torchrun))
    )


def prepared(args: Sequence[str]) -> tuple[Preparation | None, list[str]]:
    """Split a prefixed command into its preparation, if it has one, and the command itself."""
    own = own_module(Preparation.__module__)
    if list(args[: len(own)]) != own:
        return None, list(args)
    return Preparation(**json.loads(args[len(own)])), list(args[len(own) + 1 :])


def _send(to: socket.socket, job: ForkRequest, files: Sequence[int]) -> None:
    data = json_text(job).encode()
    header = len(data).to_bytes(8, "little")
    to.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    to.sendall(data)


def _receive(source: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """A job and its three files; None if the other side has closed."""
    header, files, _, _ = socket.recv_fds(source, 8, 3)
    if not header:
        return None
    length, data = int.from_bytes(header, "little"), b""
    while len(data) < length:
        part = source.recv(length - len(data))
        if not part:
            return None
        data += part
    job: ForkRequest = json.loads(data)
    return job, files


# -- in the server, and in what it forks ------------------------------------------------------


class Server:
    """The process that forks.

    Args:
        source: the socket to the process that asks.
        files: time and size of the file of every module that is imported.
        forks_ranks: what it forks may fork its ranks.
    """

    def __init__(
        self,
        source: socket.socket,
        files: Mapping[str, tuple[int, int]],
        *,
        forks_ranks: bool = True,
    ) -> None:
        self._source = source
        self._files = files
        self._forks_ranks = forks_ranks
        self._hangup = signal.getsignal(signal.SIGHUP)

    def serve(self) -> None:
        """Answer until the other side closes; returns only in a process that was forked."""
        for ignored in _NOT_FOR_THE_SERVER:
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ends it
        while (received := _receive(self._source)) is not None:
            job, files = received
            if self._is_forked(job):
                return self.become(job, files)
            for number in files:
                os.close(number)
        os._exit(0)

    def _is_forked(self, job: ForkRequest) -> bool:
        """Fork a process for ``job``, and answer; True in that process."""
        try:
            self._refuse_changes()
            _fields(prepared(job["args"])[1], job["env"])
            return self._fork()
        except (OSError, ForkError) as error:  # no memory, or too many processes
            self._source.send(json_text({"error": str(error)}).encode())
            return False

    def _fork(self) -> bool:
        """Fork a process whose parent is the one that asked; True in it."""
        between = os.fork()
        if between:
            _, status = os.waitpid(between, 0)
            if status:
                raise ForkError("a process that was forked ended before it began")
            return False
        # It ends at once, so that the parent's parent, or who else adopts, becomes the parent.
        try:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(1)
        while os.getppid() == parent:
            time.sleep(0.0005)
        try:
            self._source.send(json_text({"pid": os.getpid()}).encode())
            self._source.close()
        except OSError:  # nobody waits any more
            os._exit(1)
        return True

    def _refuse_changes(self) -> None:
        """
        Raises:
            ForkError: a file of an imported module is another than it was.
        """
        now = _files_of_modules()
        for name, stamp in self._files.items():
            if now.get(name, stamp) != stamp:
                raise ForkError(f"{name} has changed since it was imported")

    def become(self, job: ForkRequest, files: Sequence[int]) -> None:
        """Be the program that ``job`` names, from its first line."""
        preparation, command = prepared(job["args"])
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(job["cwd"])
        os.sched_setaffinity(0, job["cpus"])
        changeable().clear()
        changeable().update(job["env"])
        _show(command, job["env"])
        _renew(command, job["env"], self._hangup)
        if preparation is not None:
            preparation.apply()
        try:
            self.run([word for word in command[1:] if word != "-u"])
        except Exception:
            tell_error()
            raise SystemExit(1) from None

    def run(self, words: Sequence[str]) -> None:
        """Run ``-m MODULE ARGUMENT...``."""
        module = words[1]
        sys.argv = list(words[1:])
        if module in TORCHRUNS:
            inspect.stack = stack_without_lines
            if self._forks_ranks:
                self.fork_for_torchrun()
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    def fork_for_torchrun(self) -> None:
        """Give this process, which has no threads yet, a fork server of its own for its ranks."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        forks = self.nested()
        say = partial(print, file=sys.stderr, flush=True)
        subprocess_handler.Popen = partial(popen, forks, say=say)  # type: ignore[misc, assignment]

    def nested(self) -> Forks:
        """Fork a server that is this process's child."""
        here, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        parent = os.getpid()
        if os.fork() == 0:
            here.close()
            die_with_parent(parent)
            _show([sys.executable, "-m", __name__], variables())
            os.setsid()
            type(self)(remote, self._files).serve()
            # Forked from there: it must not go on here, in what torchrun does next.
            raise SystemExit(0)
        remote.close()
        return Forks(here)


def stack_without_lines(context: int = 1) -> list[inspect.FrameInfo]:
    """``inspect.stack`` without source lines.

    torchrun asks for it at each event of a rendezvous, and uses names of functions and files.
    Looking for the lines among all that is imported here takes 0.4 s of a start.
    """
    frame, found = inspect.currentframe(), []
    while frame is not None and (frame := frame.f_back) is not None:
        code = frame.f_code
        found.append(
            inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
        )
    return found


def tell_error(*ours: str) -> None:
    """Print the present exception as an interpreter does, without first frames of these files."""
    kind, error, trace = sys.exc_info()
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename in (__file__, *ours):
        trace = trace.tb_next
    assert kind is not None and error is not None
    sys.excepthook(kind, error.with_traceback(trace), trace)


def _renew(command: list[str], env: Mapping[str, str], hangup: Any) -> None:
    """What an interpreter sets up when it starts."""
    signal.signal(signal.SIGHUP, hangup)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv = command
    is_buffered = "-u" not in command and not env.get("PYTHONUNBUFFERED")
    sys.stdout = sys.__stdout__ = _stream(1, sys.__stdout__, is_buffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.__stderr__, is_buffered)  # type: ignore[misc]
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    multiprocessing.current_process().authkey = os.urandom(32)
    if "numpy" in sys.modules:  # Python's own generator seeds itself anew after a fork
        sys.modules["numpy"].random.seed()


def _stream(descriptor: int, like: Any, is_buffered: bool) -> Any:
    """Standard output or error as Python opens it, in the encoding of ``like``."""
    return io.TextIOWrapper(
        os.fdopen(descriptor, "wb", -1 if is_buffered else 0, closefd=False),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=is_buffered and (descriptor == 2 or os.isatty(descriptor)),
        write_through=not is_buffered,
    )


def _files_of_modules() -> dict[str, tuple[int, int]]:
    """Time and size of the file of every imported module; what is gone counts as changed."""
    files: dict[str, tuple[int, int]] = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name not in files:
            try:
                stat = os.stat(name)
                files[name] = stat.st_mtime_ns, stat.st_size
            except OSError:
                files[name] = 0, 0
    return files


def _fields(args: Sequence[str], env: Mapping[str, str]) -> list[tuple[bytes, int, int]]:
    """A command line and an environment, each with the place where /proc shows it.

    Raises:
        ForkError: they are too long.
    """
    first, last, env_first, env_last = map(int, stat_fields(os.getpid())[45:49])
    shown = [word for word in args if len(word) < _ARGUMENTS_BYTES]  # without a server's padding
    pairs = [f"{name}={value}" for name, value in env.items() if name != _PADDING]
    words, settings = (b"".join(os.fsencode(w) + b"\0" for w in texts) for texts in (shown, pairs))
    places = [(words, first, last), (settings, env_first, env_last)]
    for text, start, end in places:
        if len(text) > end - start:
            raise ForkError(f"{len(text)} bytes of arguments or environment are too many for it")
    return places


def _show(args: Sequence[str], env: Mapping[str, str]) -> None:
    """Make /proc show this process's own command line and environment, as after exec."""
    for text, start, end in _fields(args, env):
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _why_unfit() -> str:
    """Why this process must not be forked; empty if it may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"an import has started threads ({threads - 1})"
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("/dev/nvidia"):
                return "an import has opened the GPU"
    return ""


def main(arguments: Sequence[str], kind: type[Server] = Server) -> None:
    """Import, then serve the socket that is standard input."""
    die_with_parent()
    own = socket.socket(fileno=take_input())
    del changeable()[_PADDING]
    # The C library's own copies: the place where the kernel put the originals is written over.
    changeable().update(dict(variables()))
    _show([sys.executable, "-m", __name__], variables())
    forks_ranks = arguments[0] != _TORCHRUN_ALONE
    if forks_ranks:
        from runner.config.compose import compose

        compose(_OVERRIDES)
        # What imports warn of is not of this process: DeepSpeed looks for the device, for one.
        logging.disable(logging.WARNING)
        # Nor does a collection in what is forked look at them, and so copy every page it shares.
        import_all(*IMPORTS, *arguments[:-1])
        logging.disable(logging.NOTSET)
    else:
        import_all(*TORCHRUNS)
    for name in _RUN:  # python -m runs them under another name
        sys.modules.pop(name, None)
    if why := _why_unfit():
        own.sendall(why.encode())
        os._exit(1)
    own.sendall(_READY)
    kind(own, _files_of_modules(), forks_ranks=forks_ranks).serve()


if __name__ == "__main__":
    # Under its own name, by which a forked process imports it.
    importlib.import_module(__spec__.name).main(sys.argv[1:])
