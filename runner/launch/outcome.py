"""How a job ended, from the exit codes of its ranks: torchrun itself always ends with 1.

Every rank writes its exit code into the folder that ``HOLDFAST_EXIT_DIR`` names, and a
supervisor that is itself a part of a larger job (a node of a Slurm job) writes its own there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from runner.policy.restart import ExitCodes
from runner.system.exit_codes import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_NO_CHECKPOINT,
    EXIT_PREEMPTED,
)

# A restart would not help after these. The first of them that a process ended with is the job's.
FINAL = {
    EXIT_HALTED: "halted by the guard",
    EXIT_CONFIG: "settings or data",
    EXIT_NO_CHECKPOINT: "no loadable checkpoint",
}
EXIT_CODES = ExitCodes(
    done=EXIT_DONE,
    crash=EXIT_CRASH,
    halted=EXIT_HALTED,
    preempted=EXIT_PREEMPTED,
    final=FINAL,
)


def read_exits(folder: Path) -> dict[str, int]:
    """Read the exit code of each process that ended by itself, by its name."""
    exits: dict[str, int] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            if not path.name.startswith("."):
                exits[path.name] = int(path.read_text())
    return exits


def final_code(exits: Mapping[str, int]) -> int | None:
    """The exit code that forbids a restart, if any process ended with one."""
    return next((code for code in FINAL if code in exits.values()), None)


def outcome(exits: Mapping[str, int], returncode: int, *, was_killed: bool = False) -> int:
    """The job's exit code.

    Args:
        exits: as :func:`read_exits` gives them.
        returncode: exit code of the started command; negative for a signal.
        was_killed: the command died of a signal that was not ours, and its ranks ended after it.
    """
    codes = set(exits.values())
    final = final_code(exits)
    if returncode == EXIT_DONE and final is None:
        return EXIT_DONE  # ranks that crashed before torchrun started them again count no more
    if final is not None:
        return final
    if codes == {EXIT_PREEMPTED}:
        return EXIT_PREEMPTED
    if codes and not was_killed:
        return EXIT_CRASH
    return 128 - returncode if returncode < 0 else returncode
