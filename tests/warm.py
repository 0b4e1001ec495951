"""Processes with torch and the runner already imported, so that a drill's ranks start at once.

Importing them takes most of a small run's processor time, three times over with a launcher and
two ranks. So one process imports them once a session and forks, as the runner's own fork server
does (:mod:`runner.launch.fork_server`), which this extends to the other programs of tests.

    pytest -> zygote (imports, serves)
       |          ...forks
       +--> launcher = torch.distributed.run   (pytest's child, by way of PR_SET_CHILD_SUBREAPER)
               +--> ranks

A supervisor (``runner launch``, ``runner supervise``) is given a fork server likewise, which then
has nothing left to import.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import runpy
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.launch import fork_server
from runner.launch.fork_server import TORCHRUNS, ForkedPopen, ForkError, Forks, Server
from runner.system import output

_MODULES = ("runner", "runner.launch.fork_server", *TORCHRUNS)
_IMPORTS = ("runner.tools.report.page",)
# The optimizer's module brings torch._inductor: five seconds a rank.
_IMPORTS_OF_ZERO = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
_TRAINERS = ("transformers.trainer", "accelerate", "lightning")
# While it imports: DeepSpeed imports mlflow where that is installed, and that pyarrow's jemalloc.
_WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
DRILL = "HOLDFAST_DRILL"  # marks the processes of one drill
LATE_COPIES = "HOLDFAST_LATE_COPIES"  # set: snapshots are copied late, see tests/late_copies.py
_TERMINAL = "HOLDFAST_DRILL_TERMINAL"
# Read when the interpreter or a library begins; with another value the process must begin anew.
_AT_START = ("LD_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "ATEN_", "KMP_")
_HARMLESS = ("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")
_SUPERVISORS = ("launch", "supervise")
_IMPORT_SECONDS = 300.0
ROOT = Path(__file__).parent.parent


def suits(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a forked process would do the same as ``arguments`` with ``env``."""
    arguments = fork_server.prepared(arguments)[1]
    program = [word for word in arguments[1:] if word != "-u"]
    known = program[:1] == ["-m"] and (program[1] in _MODULES or program[1].startswith("tests."))
    script = bool(program) and program[0].endswith(".py")
    early = {name for name in {*env, *os.environ} if name.startswith(_AT_START)} - {*_HARMLESS}
    same = all(env.get(name) == os.environ.get(name) for name in early)
    return (known or script) and same and arguments[0] == sys.executable


class WarmPopen(ForkedPopen):
    """``subprocess.Popen`` of a Python program, forked from the session's zygote."""

    modules: tuple[str, ...] = ()  # imported besides, which the program's words do not tell

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        modules = _IMPORTS_OF_ZERO if any(map(_is_zero, args)) else self.modules
        super().__init__(_zygote(modules), args, **options)


class TerminalPopen(WarmPopen):
    """:class:`WarmPopen` whose output is a terminal, which becomes that of its session."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        options["env"] = {**(options.get("env") or os.environ), _TERMINAL: "1"}
        super().__init__(args, **options)


class ZeroPopen(WarmPopen):
    """:class:`WarmPopen` with DeepSpeed imported."""

    modules = _IMPORTS_OF_ZERO


class TrainersPopen(WarmPopen):
    """:class:`WarmPopen` with the trainers of Hugging Face and Lightning imported."""

    modules = _TRAINERS


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


_made: dict[tuple[str, ...], tuple[Forks, subprocess.Popen[Any]]] = {}
_making = threading.Lock()


def _zygote(modules: tuple[str, ...]) -> Forks:
    """The process that forks, with modules that other runs must do without."""
    with _making:
        if modules not in _made:
            # It outlives the drill that happens to be the first to need it.
            own = {name: value for name, value in os.environ.items() if name != DRILL}
            _made[modules] = Forks.start(
                (*_IMPORTS, *modules), own | _WITHOUT_THREADS, program=__name__
            )
            assert _made[modules][0].is_ready(_IMPORT_SECONDS), "the zygote still imports"
        return _made[modules][0]


def close() -> None:
    """Close the zygotes at the end of the session."""
    while _made:
        forks, process = _made.popitem()[1]
        forks.close()
        process.wait(10)


# -- in the zygote, and in what it forks ----------------------------------------------------


class _NestedPopen(subprocess.Popen[Any]):
    """Popen in a warm supervisor: its fork server is forked as well."""

    forks: Forks

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        if suits(args, rest[5] or os.environ):
            with contextlib.suppress(ForkError):  # a drill has ended it
                return ForkedPopen.hand_over(self, self.forks, args, rest)
        return super()._execute_child(args, *rest)  # type: ignore[misc, no-any-return]


class Zygote(Server):
    """The runner's fork server, for the programs of tests."""

    def run(self, words: Sequence[str]) -> None:
        try:
            self._run(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            fork_server.tell_error(__file__)
            code = 1
        else:
            code = 0
        output.finish()  # an interpreter that ends writes what is queued
        os._exit(code)

    def fork_for_torchrun(self) -> None:
        """Have ranks forked where they run a script as well: theirs is most of a drill's time."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        class RankPopen(_NestedPopen):
            forks = self.nested()

        subprocess_handler.Popen = RankPopen  # type: ignore[misc, assignment]

    def _run(self, words: Sequence[str]) -> None:
        if os.environ.pop(_TERMINAL, None):
            fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        if os.environ.get(LATE_COPIES):
            from tests import late_copies

            late_copies.install()
        if os.environ.get("HOLDFAST_PROVE_DIR") and not {*words[:2]} & {*_MODULES[1:]}:
            _record()
        if words[0] != "-m":
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        elif words[1] == fork_server.__name__:
            fork_server.main(words[2:], Zygote)
        else:
            if words[2:3] and words[2] in _SUPERVISORS:
                _NestedPopen.forks = self.nested()
                subprocess.Popen = _NestedPopen  # type: ignore[misc]
            sys.path.insert(0, os.getcwd())
            super().run(words)


def _record() -> None:
    """What prove-resume's ``sitecustomize`` does as an interpreter begins, and after torch."""
    folder = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    its = runpy.run_path(f"{folder}/sitecustomize.py", run_name="sitecustomize")
    sys.meta_path = [finder for finder in sys.meta_path if type(finder) is not its["_AfterTorch"]]
    its["_begin"]()


if __name__ == "__main__":
    from tests import warm  # under its own name, which what it forks imports

    fork_server.main(sys.argv[1:], warm.Zygote)
