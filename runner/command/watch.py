"""``holdfast watch``: tells somebody when a run is in trouble, and when that is over."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.command.arguments import Parser, at_least
from runner.policy.alert import EVERY_SECONDS, RESOLVE
from runner.system.environment import redacted, variables
from runner.system.error import ConfigError, imported
from runner.system.files import make_folder, write_json
from runner.system.json_lines import read_object
from runner.system.parsing import json_text
from runner.system.process import run_with_input
from runner.tools.watch import QuietHours, Rules, Send, Watch

NOTIFY = "HOLDFAST_NOTIFY"
_COMMAND_SECONDS = 30.0
_STATE_BYTES = 64 << 20
_LOCK_SECONDS = 1.0
_log = logging.getLogger(__name__)


def watch_command(arguments: Sequence[str]) -> int:
    """``holdfast watch OUT...``: tells of trouble in runs from outside, also when all has died.

    One message when a run falls silent, crashes, halts, is preempted or discards steps, and one
    when that is over; one when it is done. OUT is the directory of a run, or a folder in which runs
    are or will be. Only reads. What was told is kept in a file, so that it may be started again, or
    be run by cron with --once.
    """
    options = _parser().parse_args(arguments)
    at_least(0, every=options.every)
    at_least(1, silent=options.silent, poll=options.poll)
    try:
        quiet = QuietHours(options.quiet_hours)
    except ValueError as error:
        raise ConfigError(f"--quiet-hours {options.quiet_hours}: {error}") from None
    rules = Rules(
        every_seconds=options.every, silent_seconds=options.silent, level=options.level, quiet=quiet
    )
    paths = [Path(name) for name in options.out]
    for path in paths:
        if not path.exists():
            sys.stderr.write(f"watch: {path} is not there yet\n")
    urls = [*options.notify, *variables().get(NOTIFY, "").split()]
    sends = [*map(_runs, options.command), *map(_notifies, urls)] or [_prints]
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())

    def has_launcher() -> bool:
        return bool(options.launcher == os.getppid())

    with _state_of(
        paths,
        options.state,
        is_needed=options.launcher is None or options.state is not None,
        waits=lambda: has_launcher() and not end.wait(_LOCK_SECONDS),
    ) as (state, keep):
        watch = Watch(paths, sends, rules, state=state, keep=keep)
        while True:
            watch.is_left = options.launcher is not None and not has_launcher()
            watch.poll()
            has_ended = watch.is_left and watch.is_settled
            if options.once or has_ended or end.wait(options.poll):
                return 0


def begin_watch(out: Path, command: str) -> None:
    """Start a watcher beside this launcher. It outlives it until the run's end is told."""
    words = ["watch", str(out), "--launcher", str(os.getpid()), "--command", command]
    subprocess.Popen(
        [sys.executable, "-m", "runner", *words, "--poll", "5", "--silent", "60"],
        # It must not hold a pipe open that the launcher's own reader waits for.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _parser() -> Parser:
    parser = Parser("watch", watch_command.__doc__)
    parser.add_argument("out", nargs="+", help="a run's directory (out), or a folder of runs")
    words = "a shell command for each message, which is JSON on its standard input"
    parser.repeated("--command", "COMMAND", words)
    words = f"an address of apprise, such as slack://...; also from the variable {NOTIFY}"
    parser.repeated("--notify", "URL", words)
    words = "an episode is over when all was well for so long"
    parser.option("--every", EVERY_SECONDS, words, metavar="SECONDS")
    parser.option("--silent", 120.0, "without a heartbeat", metavar="SECONDS")
    parser.option("--poll", 10.0, "between looks", metavar="SECONDS")
    parser.add_argument("--level", choices=("info", "warning", "error"), default="info")
    words = "such as 22:00-07:00, local time: only errors are told, the others wait"
    parser.option("--quiet-hours", "", words, metavar="FROM-TO")
    words = "what was told; default: of these OUT in ~/.local/state/holdfast"
    parser.add_argument("--state", type=Path, metavar="FILE", help=words)
    parser.flag("--once", "look once, then end")
    parser.add_argument("--launcher", type=int, metavar="PID", help="end after this parent")
    return parser


@contextmanager
def _state_of(
    paths: Sequence[Path], file: Path | None, *, is_needed: bool, waits: Callable[[], bool]
) -> Iterator[tuple[dict[str, Any], Callable[[Mapping[str, Any]], None]]]:
    """The state kept so far, and what writes it; one watcher at a time has it.

    Args:
        is_needed: False: where no file can be made, nothing is kept.
        waits: asked while another watcher has it; whether to try again.
    """
    names = "\n".join(sorted(str(path.absolute()) for path in paths))
    digest = hashlib.sha256(names.encode()).hexdigest()[:12]
    home = Path(variables().get("XDG_STATE_HOME") or "~/.local/state")
    path = file or home / "holdfast" / f"watch-{digest}.json"
    try:
        path = path.expanduser()
        make_folder(path.parent)
        lock = path.with_name(f"{path.name}.lock").open("w")
    except (OSError, RuntimeError) as error:  # no home, or one that is read-only on this node
        if is_needed:
            raise ConfigError(f"--state {path}: {error}; choose another file") from None
        yield {}, lambda state: None
        return
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waits():
                    continue
                raise ConfigError(
                    f"--state {path}: another watcher has it; end that one, or name another file"
                ) from None
            except OSError:  # a file system without locks
                break
        is_failing = False

        def keep(state: Mapping[str, Any]) -> None:
            nonlocal is_failing
            try:
                write_json(path, state)
                is_failing = False
            except OSError as error:
                if not is_failing:
                    _log.warning("watch: %s: %s; it goes on without", path, error)
                is_failing = True

        yield read_object(path, _STATE_BYTES), keep


def _prints(message: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{message['event']} {message['level']}: {message['text']}\n")
    sys.stdout.flush()


def _runs(command: str) -> Send:
    def send(message: Mapping[str, Any]) -> None:
        data = json_text(redacted(dict(message))).encode() + b"\n"
        with _telling("--command"):
            run_with_input(command, data, seconds=_COMMAND_SECONDS)

    return send


def _notifies(url: str) -> Send:
    apprise = imported("apprise", "--notify", "watch")
    service = url.partition("://")[0]
    target = apprise.Apprise()
    if not target.add(url):
        raise ConfigError(f"--notify {service}://...: apprise knows no such address")
    kinds = {"info": apprise.NotifyType.INFO, "warning": apprise.NotifyType.WARNING}

    def send(message: Mapping[str, Any]) -> None:
        kind = kinds.get(message["level"], apprise.NotifyType.FAILURE)
        kind = apprise.NotifyType.SUCCESS if message["event"] == RESOLVE else kind
        title = f"{Path(message['out']).name}: {message['kind']}"
        with _telling(f"--notify {service}"):
            if not target.notify(title=title, body=redacted(message["text"]), notify_type=kind):
                raise OSError("it was not taken")

    return send


@contextmanager
def _telling(sink: str) -> Iterator[None]:
    """Log what did not reach a receiver, which is tried again later."""
    try:
        yield
    except OSError as error:
        _log.warning("watch: %s: %s; it is tried again", sink, error)
        raise
