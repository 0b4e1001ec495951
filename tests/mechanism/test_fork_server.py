"""What the fork server forks is a process like any other; and what happens where it cannot."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner.config.compose import compose
from runner.launch import warm_start
from runner.launch.fork_server import ForkedPopen, ForkError, Forks, stack_without_lines, suits
from runner.launch.warm_start import WarmStart, rank_modules
from runner.system.process import parent

_SECONDS = 120.0
ENV = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONFAULTHANDLER": "1", "A_WORD": "of mine"}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Forks, subprocess.Popen[Any]]]:
    # With the largest of what ranks may need.
    hf = compose(["model=hf", "model.path=of_mine", "data=hf", "data.path=of_mine"])
    forks, process = Forks.start(rank_modules(hf), ENV)
    assert forks.is_ready(_SECONDS)
    yield forks, process
    forks.close()
    assert process.wait(_SECONDS) == 0


def ended(process: subprocess.Popen[Any], words: bytes = b"told\n") -> tuple[int, bytes, bytes]:
    out, err = process.communicate(words, timeout=_SECONDS)
    return process.returncode, out, err


@pytest.mark.parametrize("options", [["-u"], []])
def test_a_forked_process_is_what_a_new_one_is(
    server: tuple[Forks, subprocess.Popen[Any]], tmp_path: Path, options: list[str]
) -> None:
    files = [tmp_path / name for name in ("new", "forked", "again")]
    pipes = {"stdin": -1, "stdout": -1, "stderr": -1, "start_new_session": True}
    ends = []
    for number, file in enumerate(files):
        env = {**ENV, "RANK": "5"}
        words = [sys.executable, *options, "-m", "tests.process_facts", str(file), "an argument"]
        process: subprocess.Popen[Any] = (
            ForkedPopen(server[0], words, env=env, **pipes)
            if number
            else subprocess.Popen(words, env=env, **pipes)  # type: ignore[call-overload]
        )
        ends.append(ended(process))
    assert ends == [(7, b"said\n", b"")] * 3
    # Only their own file's name differs.
    texts = [file.read_text().replace(str(file), "FILE") for file in files]
    new, forked, again = map(json.loads, texts)
    assert forked["same"] == new["same"]
    assert again["same"] == new["same"]
    for name, value in forked["own"].items():
        assert value != again["own"][name] != new["own"][name], name
    assert {one["parent"] for one in (new, forked, again)} == {os.getpid()}


def test_its_end_is_not_the_end_of_what_it_forked(tmp_path: Path, light: None) -> None:
    forks, process = Forks.start((), ENV)
    assert forks.is_ready(_SECONDS)
    words = [sys.executable, "-m", "tests.process_facts", str(tmp_path / "facts")]
    child = ForkedPopen(forks, words, stdin=-1, stdout=-1, env=ENV)
    process.kill()
    process.wait()
    assert parent(child.pid) == os.getpid()
    assert ended(child)[:2] == (7, b"said\n")
    with pytest.raises(ForkError, match=r"cannot be reached|has ended"):
        ForkedPopen(forks, words, env=ENV)


class Told:
    """A WarmStart and what it has said."""

    def __init__(self, modules: list[str] | None = None) -> None:
        self.said: list[str] = []
        self.warm = WarmStart([] if modules is None else modules, _SECONDS, self.said.append)

    def begin(self, env: dict[str, str] | None = None) -> str:
        """Run a command of ours; returns what it printed."""
        process = self.warm.popen(
            [sys.executable, "-m", "runner", "--get", "steps", "steps=12"],
            env=env or ENV,
            is_asked_to_stop=lambda: False,
            stdout=subprocess.PIPE,
        )
        is_forked = isinstance(process, ForkedPopen)
        out, _ = process.communicate(timeout=_SECONDS)
        assert (process.returncode, out) == (0, b"12\n")
        return "forked" if is_forked else "new"

    @property
    def server(self) -> subprocess.Popen[Any]:
        assert self.warm._process is not None
        return self.warm._process


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers import the little that these tests need."""
    start = partial(Forks.start, program="tests.light_fork_server")
    monkeypatch.setattr(Forks, "start", start)


@pytest.fixture
def told(light: None) -> Iterator[Told]:
    told = Told()
    with told.warm:
        yield told
        servers = told.warm._process
    assert servers is None or servers.returncode is not None


def test_it_is_made_anew_when_something_has_changed(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "of_mine.py"
    module.write_text("NUMBER = 1\n")
    told.warm._modules = ["of_mine"]
    env = {**ENV, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    assert [told.begin(env), told.begin({**env, "HOLDFAST_ATTEMPT": "2"})] == ["forked"] * 2
    assert told.said == []
    first = told.server.pid
    module.write_text("NUMBER = 22\n")
    assert told.begin(env) == "forked" and told.server.pid != first
    assert told.begin({**env, "NCCL_DEBUG": "INFO"}) == "forked"
    os.kill(told.server.pid, signal.SIGHUP)
    told.server.wait(_SECONDS)
    assert told.begin({**env, "NCCL_DEBUG": "INFO"}) == "forked"
    anew = "; a new one imports everything anew"
    expected = ["has changed since it was imported", "environment has changed (NCCL_DEBUG)", ""]
    assert [line.endswith(anew) for line in told.said] == [True] * 3
    assert all(words in line for words, line in zip(expected, told.said, strict=True))


def test_one_that_hangs_is_replaced(told: Told) -> None:
    assert told.begin() == "forked"
    os.kill(told.server.pid, signal.SIGSTOP)
    assert told.warm._forks is not None
    told.warm._forks._socket.settimeout(0.2)
    assert told.begin() == "forked"
    assert "does not answer" in told.said[0]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(999,), daemon=True)"
         ".start()", "threads (1)"),
        ("raise RuntimeError('of mine')", "ended while it imported"),
        ("open('/dev/null'); import os; os._exit(3)", "ended while it imported"),
    ],
)  # fmt: skip
def test_without_one_ranks_import_by_themselves(
    told: Told, tmp_path: Path, code: str, reason: str
) -> None:
    (tmp_path / "of_mine.py").write_text(code + "\n")
    told.warm._modules = ["of_mine"]
    env = {**ENV, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    assert [told.begin(env), told.begin(env)] == ["new", "new"]
    (line,) = told.said  # once
    assert reason in line and "import everything themselves" in line


@pytest.mark.parametrize("library", ["deepspeed", "transformers", "peft", "datasets", "fsspec"])
def test_libraries_of_ranks_start_no_threads_and_say_nothing(
    library: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    env = {name: value for name, value in ENV.items() if name != "DS_ACCELERATOR"}
    forks, process = Forks.start([library], env)
    try:
        assert forks.is_ready(_SECONDS)  # raises what stands against it
    finally:
        forks.close()
        process.wait(_SECONDS)
    assert capfd.readouterr() == ("", "")


def test_an_environment_too_long_to_be_shown(told: Told) -> None:
    env = {**ENV, **{f"LONG_{n}": "x" * 60_000 for n in range(4)}}
    # Its own grows with it, so that only what comes later does not fit.
    assert told.begin(env) == "forked"
    later = {**env, **{f"HOLDFAST_{n}": "x" * 100_000 for n in range(3)}}
    assert told.begin(later) == "new"
    assert "too many for it" in told.said[0]


def test_where_no_process_can_be_forked(told: Told, tmp_path: Path) -> None:
    # As with too many processes: what Python raises for EAGAIN. A limit would not hold for root.
    full = tmp_path / "full"
    (tmp_path / "of_mine.py").write_text(
        "import os\nreal = os.fork\ndef fork():\n"
        f"    if os.path.exists({str(full)!r}):\n"
        "        raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return real()\nos.fork = fork\n"
    )
    told.warm._modules = ["of_mine"]
    env = {**ENV, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    assert told.begin(env) == "forked"
    full.touch()
    assert told.begin(env) == "new"
    assert all("Resource temporarily unavailable" in line for line in told.said), told.said
    assert len(told.said) == 2 and told.said[1].endswith("import everything themselves")


def test_it_ends_with_the_one_that_asks(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom runner.launch.fork_server import Forks\n"
        "forks, process = Forks.start((), os.environ, program='tests.light_fork_server')\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        asker.kill()
    limit = time.monotonic() + _SECONDS
    while parent(pid) is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert parent(pid) is None


@pytest.mark.parametrize("preload", [None, ["of_mine"]])
def test_torchrun_is_forked_where_ranks_cannot_be(
    tmp_path: Path, preload: list[str] | None
) -> None:
    (tmp_path / "of_mine.py").write_text("raise RuntimeError\n")
    env = {**ENV, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    words = [sys.executable, "-m", "runner.launch.agent", "--standalone", "--no-python", "true"]
    said: list[str] = []
    with WarmStart(preload, _SECONDS, said.append) as warm:
        process = warm.popen(words, env=env, is_asked_to_stop=lambda: False)
        assert isinstance(process, ForkedPopen) and process.wait(_SECONDS) == 0
        rank = [sys.executable, "-m", "runner", "--get", "steps"]
        rank_process = warm.popen(rank, env=env, is_asked_to_stop=lambda: False)
        assert not isinstance(rank_process, ForkedPopen) and rank_process.wait(_SECONDS) == 0
    assert len(said) == (0 if preload is None else 1)


@pytest.mark.parametrize(
    ("words", "suited"),
    [
        ([sys.executable, "-m", "torch.distributed.run", "--standalone"], True),
        ([sys.executable, "-u", "-m", "runner", "out=x"], True),
        ([sys.executable, "train.py"], False),
        ([sys.executable, "-c", "pass"], False),
        ([sys.executable, "-X", "dev", "-m", "runner"], False),
        (["numactl", sys.executable, "-m", "runner"], False),
        (["/usr/bin/other", "-m", "runner"], False),
    ],
)
def test_what_can_be_forked(words: list[str], suited: bool) -> None:
    assert suits(words) is suited


def test_a_stack_without_lines_names_the_same_callers() -> None:
    theirs, ours = inspect.stack(), stack_without_lines()
    assert [(one.filename, one.function) for one in ours] == [
        (one.filename, one.function) for one in theirs
    ]
    assert ours[0].function == "test_a_stack_without_lines_names_the_same_callers"


def test_what_is_imported_once() -> None:
    console = ["rich.live", "rich.table"]  # imported late by the rank that prints
    with_zero = rank_modules(compose(["parallel=zero1", "launch.preload=[of_mine]"]))
    assert with_zero == ["deepspeed", *console, "of_mine"]
    assert warm_start.rank_modules(compose([])) == console
    far = warm_start.rank_modules(compose(["checkpoint.remote=file:///nowhere"]))
    assert far == ["fsspec", *console]


def test_a_rank_imports_no_more_than_it_uses() -> None:
    """Each of these takes a twentieth of a rank's imports, or more."""
    program = "import sys, runner.session.begin; print(*{'rich', 'fsspec'} & sys.modules.keys())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout.strip() == ""
