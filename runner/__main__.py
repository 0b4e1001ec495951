"""The command line: ``python -m runner`` (one process), ``torchrun -m runner``.

Without a subcommand it trains; what is not an option is a Hydra override.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from runner.command.arguments import Parser
from runner.error import EXIT_CRASH, RunnerError

COMMANDS = ("ring", "import", "backtest")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see :mod:`runner.error`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] == "import":
            from runner.command.import_ import import_command

            return import_command(given[1:])
        if given and given[0] == "backtest":
            from runner.command.backtest import backtest_command

            return backtest_command(given[1:])
        if given and given[0] in COMMANDS:
            from runner.command.ring import ring_command

            return ring_command(given[1:])
        return _train_command(given)
    except RunnerError as error:
        _say_once(f"error: {error}")
        return error.exit_code


def _train_command(given: Sequence[str]) -> int:
    options = _parser().parse_args(given)
    from runner.compose import compose, to_yaml, value_of

    if options.help:
        from runner.command.help import help_text

        _print_once(help_text())
        return 0
    config = compose(options.overrides, config_dir=options.config_dir)
    from runner.dist.group import place_from

    place = place_from(os.environ)
    if options.cfg or options.get:
        from runner.check import check
        from runner.fault.spec import parse_faults

        check(config, world_size=place.world_size)
        parse_faults(config.faults)
        _print_once(to_yaml(config).rstrip() if options.cfg else value_of(config, options.get))
        return 0
    from runner.train import train

    return train(config, place)


def _parser() -> Parser:
    parser = Parser(prog="python -m runner", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--get", metavar="KEY")
    parser.add_argument("--config-dir")
    parser.add_argument("overrides", nargs="*")
    return parser


def _is_first() -> bool:
    """Every rank fails alike; one of them saying it is enough."""
    return os.environ.get("RANK", "0") == "0"


def _say_once(text: str) -> None:
    if _is_first():
        sys.stderr.write(text + "\n")


def _print_once(text: str) -> None:
    if _is_first():
        sys.stdout.write(text + "\n")


def _run() -> None:
    try:
        code = main()
    except Exception:
        # This rank alone is ill. Leaving at once, the others see the connection close, where
        # an orderly shutdown would wait for collectives that will never come.
        traceback.print_exc()
        code = EXIT_CRASH
    from runner.dist.group import leave

    leave(code)


if __name__ == "__main__":
    _run()
