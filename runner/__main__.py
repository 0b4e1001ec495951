"""The command line: ``holdfast`` or ``python -m runner`` (one process), ``torchrun -m runner``.

Without a subcommand it trains; what is not an option is a Hydra override.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence

from runner.command import COMMANDS
from runner.command.arguments import Parser
from runner.distributed.env import own_local_rank, own_rank, place_from
from runner.health.leave import leave, leave_after_exit_functions
from runner.system import log, output
from runner.system.environment import changeable, variables
from runner.system.error import EXIT_CRASH, ConfigError, MissingPackage, RunnerError, StartError
from runner.system.garbage import import_all
from runner.system.process import is_hidden

_log = logging.getLogger("runner.__main__")  # __name__ is "__main__" under python -m runner

# These supervise a run: a closed or stalled output must not stop them.
_LASTING = ("launch", "supervise", "run", "slurm-job", "slurm-node")
_OF_SCRIPTS = (["run"], ["supervise"], ["prove-resume"])  # these start somebody's own command
_FIRST_SECONDS = 3.0  # for rank 0 to report what all ranks refuse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see :mod:`runner.system.error`)."""
    given = _plain(list(sys.argv[1:] if arguments is None else arguments))
    is_rank = not (given and given[0] in COMMANDS)
    log.begin(as_json=_wants_json(given), rank=own_rank(variables()) if is_rank else None)
    try:
        given = _with_file(given)
        return _train_command(given) if is_rank else _command(given[0])(given[1:])
    except RunnerError as error:
        if _is_first() or _is_known_here_alone(error):
            _log.error("%s", error, extra={"fields": {"exit_code": error.exit_code}})
        elif isinstance(error, ConfigError):
            time.sleep(_FIRST_SECONDS)  # torchrun ends rank 0 as soon as another rank has left
        return error.exit_code


def _plain(given: list[str]) -> list[str]:
    """The arguments without what only says the usual: ``train``, ``help``, ``version``."""
    if given[:1] == ["train"]:
        return given[1:]
    if given[:1] == ["help"] and given[1:2] and given[1] in COMMANDS:
        return [given[1], "--help"]
    if given[:1] in (["help"], ["version"]):
        return [f"--{given[0]}", *given[1:]]
    return given


def _with_file(given: list[str]) -> list[str]:
    """The arguments with the settings of ``--config FILE``; scripts may have such an option too."""
    if given[:1] in _OF_SCRIPTS or not any(word.startswith("--config") for word in given):
        return given
    from runner.config.compose import expanded

    return expanded(given)


def _wants_json(given: Sequence[str]) -> bool:
    """Whether errors should be JSON, known before the settings are composed."""
    formats = [word for word in given if word.startswith("track.log=")]
    return formats[-1:] == ["track.log=json"]


def _command(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return command


def _train_command(given: Sequence[str]) -> int:
    if several := {"-m", "--multirun", "sweep"}.intersection(given):
        raise ConfigError(
            f"{several.pop()}: one command is one run, and a sweep is a loop over commands, each "
            "with an out of its own; `holdfast docs sweeps` has it"
        )
    options, dashed = _parser().parse_known_args(given)
    _refuse_unknown_command(given)
    from runner.config.compose import compose, to_yaml, unknown_option, value_of

    if dashed:
        raise ConfigError(unknown_option(dashed[0]))

    if options.version:
        from runner.system.version import __version__

        _print_once(f"holdfast {__version__}")
        return 0
    if options.help is not None:
        from runner.command.help import help_text

        _print_once(help_text("" if "=" in options.help else options.help))
        return 0
    config = compose(options.overrides, config_dir=options.config_dir)
    place = place_from(variables())
    log.begin(as_json=config.track.log.value == "json", rank=place.rank)
    if options.cfg or options.get:
        from runner.config.validate import check
        from runner.fault.spec import parse_faults

        check(config, world_size=place.world_size)
        parse_faults(config.faults)
        _print_once(to_yaml(config).rstrip() if options.cfg else value_of(config, options.get))
        return 0
    import_all("torch._dynamo", "runner.session.session")  # the first: for any optimizer
    from runner.session.session import train

    output.install()
    return train(config, place)


def _refuse_unknown_command(given: Sequence[str]) -> None:
    """Refuse a first word that is not an option, a setting or a command.

    Raises:
        ConfigError: names the commands that exist.
    """
    first = given[0] if given else "="
    if re.fullmatch(r"[A-Za-z][\w-]*", first):
        # By its first word, too: "prve" is prove-resume, and not supervise.
        names = {name.partition("-")[0]: name for name in reversed(COMMANDS)}
        names |= {name: name for name in ("train", *COMMANDS)}
        close = {names[one]: None for one in difflib.get_close_matches(first, names, n=2)}
        meant = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ConfigError(
            f"{first!r} is neither a command nor a setting{meant} Commands: "
            f"{', '.join(COMMANDS)}; without one it trains, and settings are written key=value"
        )


def _parser() -> Parser:
    parser = Parser("", add_help=False)
    parser.add_argument("-h", "--help", metavar="GROUP", nargs="?", const="")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--get", metavar="KEY")
    parser.add_argument("--config-dir")
    parser.add_argument("overrides", nargs="*")
    return parser


def _is_known_here_alone(error: RunnerError) -> bool:
    """Whether rank 0 may not know of the error, so that this rank must report it."""
    if isinstance(error, MissingPackage):  # a node's
        return own_local_rank(variables()) == 0
    return isinstance(error, StartError) and error.is_local


def _is_first() -> bool:
    """Whether this process is rank 0: every rank fails alike, and one report is enough."""
    return own_rank(variables()) == 0


def _print_once(text: str) -> None:
    if _is_first():
        if sys.stdout.isatty():
            text = log.at_words(text, shutil.get_terminal_size().columns)
        sys.stdout.write(text + "\n")
        output.finish(None)  # wait for a slow reader: there is nothing else to do


def run() -> None:
    """Run a command and end the process: the entry point of ``holdfast``."""
    command = sys.argv[1] if sys.argv[1:] else ""
    is_rank = command not in COMMANDS
    if is_rank or command in _LASTING:
        output.install()
    if is_hidden() and ([command] not in _OF_SCRIPTS or "-m runner " in f"{' '.join(sys.argv)} "):
        changeable()["PYTHONSAFEPATH"] = "1"  # for the processes that the command starts
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and is_rank:
        # Inherited from a torchrun that ignores it. Until the run handles the signal, a
        # rank must die of it, or torchrun waits 30 s for each that waits for a dead one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not is_rank:
        leave_after_exit_functions(_code())
    code = EXIT_CRASH
    try:
        code = _code()
    finally:
        # On any error: a normal interpreter exit would wait for threads and processes.
        leave(code)


def _code() -> int:
    """Run the command and return its exit code, also after an unexpected exception."""
    try:
        return main()
    except SystemExit as error:
        if isinstance(error.code, str):
            _log.error("%s", error.code)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # Only this rank failed. If it leaves at once, the others see the connection close, where
        # an orderly shutdown would wait for collectives that will never come.
        _log.critical("%s: %s", type(error).__name__, error, exc_info=True)
        return EXIT_CRASH


if __name__ == "__main__":
    run()
