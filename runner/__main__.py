"""The command line: ``python -m runner`` (one process), ``torchrun -m runner``.

Without a subcommand it trains; what is not an option is a Hydra override.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from runner.command.arguments import Parser
from runner.error import EXIT_CRASH, RunnerError, StartError
from runner.redact import redacted

# Command, and the function that takes its arguments. Imported when asked for: most want no torch.
COMMANDS = {
    "ring": "runner.command.ring:ring_command",
    "import": "runner.command.import_:import_command",
    "backtest": "runner.command.backtest:backtest_command",
    "launch": "runner.command.launch:launch_command",
    "supervise": "runner.command.supervise:supervise_command",
    "slurm": "runner.command.slurm:slurm_command",
    "slurm-job": "runner.command.slurm_job:slurm_job_command",
    "k8s": "runner.command.k8s:k8s_command",
    "plan": "runner.command.plan:plan_command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see :mod:`runner.error`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and given[0] in COMMANDS:
            return _command(given[0])(given[1:])
        return _train_command(given)
    except RunnerError as error:
        if isinstance(error, StartError) and error.is_local and not _is_first():
            sys.stderr.write(redacted(f"error: {error}\n"))
        _say_once(redacted(f"error: {error}"))
        return error.exit_code


def _command(name: str) -> Callable[[Sequence[str]], int]:
    module, _, function = COMMANDS[name].partition(":")
    found: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return found


def _train_command(given: Sequence[str]) -> int:
    options = _parser().parse_args(given)
    from runner.compose import compose, to_yaml, value_of

    if options.help:
        from runner.command.help import help_text

        _print_once(help_text())
        return 0
    config = compose(options.overrides, config_dir=options.config_dir)
    from runner.dist.launcher import place_from

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
    is_rank = sys.argv[1:2] == [] or sys.argv[1] not in COMMANDS
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN and is_rank:
        # Inherited from a torchrun that was shielded from it. Until the run listens to it, a
        # rank must die of it, or torchrun waits 30 s for each that waits for a dead one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        code = main()
    except Exception:
        # This rank alone is ill. Leaving at once, the others see the connection close, where
        # an orderly shutdown would wait for collectives that will never come.
        sys.stderr.write(redacted(traceback.format_exc()))
        code = EXIT_CRASH
    if not is_rank:
        sys.exit(code)
    from runner.dist.group import leave

    leave(code)


if __name__ == "__main__":
    _run()
