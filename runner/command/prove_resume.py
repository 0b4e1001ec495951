"""``python -m runner prove-resume [options] -- COMMAND``: does a training script really resume?

Runs the command undisturbed, runs it again and kills it after a checkpoint, starts it again, and
compares each step bit for bit: batches, loss, gradients, options, optimizer, weights, buffers and
random states. Says what differs first. The script is not changed, and writes into a scratch folder.
Exit code 0: equal, 1: differs, 2: could not be judged.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runner.command.arguments import Parser
from runner.prove.drive import Plan, prove
from runner.prove.verdict import Verdict
from runner.system.environment import variables
from runner.system.error import ConfigError
from runner.system.parsing import json_text

_log = logging.getLogger(__name__)


def prove_resume_command(arguments: Sequence[str]) -> int:
    """Prove or refute that a script resumes; returns the exit code."""
    options, command = _options().of_command(_joined(arguments))
    plan = Plan(
        command=tuple(command),
        steps=options.steps,
        kills=_kills(options.kill),
        seed=options.seed,
        number=signal.Signals[f"SIG{options.signal}"],
        resume_with=options.resume_with,
        out_argument=options.out_arg,
        out=options.out,
        other_ranks=options.other_ranks,
        limit_seconds=options.timeout,
        scratch=options.scratch,
    )
    signal.signal(signal.SIGTERM, _leave)
    verdict = prove(
        plan,
        environment=variables(),
        home=Path.cwd(),
        say=lambda text: _log.info("prove-resume: %s", text),
    )
    _write(options.json, verdict)
    sys.stdout.write(verdict.text() + "\n")
    return verdict.code


def _options() -> Parser:
    parser = Parser("prove-resume", __doc__)
    parser.option("--steps", 60, "optimizer steps of a run", metavar="N")
    words = "steps after which it is killed, such as 30,57; default: two, drawn from --seed"
    parser.add_argument("--kill", default="", metavar="STEPS", help=words)
    parser.option("--seed", 0, "of the kills", metavar="N")
    words = "that ends it; default KILL, to all ranks at once"
    parser.add_argument("--signal", default="KILL", choices=("KILL", "TERM"), help=words)
    words = "added to the command when it is started again; {out} is the output directory"
    parser.add_argument("--resume-with", default="", metavar="WORDS", help=words)
    words = "the argument of the command that names its output directory"
    parser.add_argument("--out-arg", default="", metavar="NAME", help=words)
    words = "the output directory, where the script chooses it itself"
    parser.add_argument("--out", default="", metavar="DIR", help=words)
    words = "resume with N processes a node; compares samples and loss"
    parser.add_argument("--other-ranks", type=int, default=0, metavar="N", help=words)
    parser.option("--timeout", 600.0, "for a step, or the start", metavar="SECONDS")
    words = "parent of the scratch folder; default: the system's"
    parser.add_argument("--scratch", type=Path, metavar="DIR", help=words)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict to it as well")
    return parser


def _joined(arguments: Sequence[str]) -> list[str]:
    """With ``=`` before values that look like options, such as ``--resume-with --resume``."""
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] in ("--resume-with", "--out-arg") and word != "--":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _kills(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise ConfigError(f"--kill {text}: steps with commas between, such as 30,57") from None


def _write(path: Path | None, verdict: Verdict) -> None:
    if path is None:
        return
    try:
        path.write_text(json_text(verdict.to_json(), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from None


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)  # the script's processes are ended on the way
