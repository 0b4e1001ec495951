"""How a job ended, from its own processes: torchrun ends with 1 whatever its workers said.

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
    """Name to exit code, of those that have ended by themselves."""
    found: dict[str, int] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            if not path.name.startswith("."):
                found[path.name] = int(path.read_text())
    return found


def final_code(exits: Mapping[str, int]) -> int | None:
    """The exit code that forbids a restart, if a process told one."""
    return next((code for code in FINAL if code in exits.values()), None)


def outcome(exits: Mapping[str, int], returncode: int, *, was_killed: bool = False) -> int:
    """The job's exit code.

    Args:
        exits: as :func:`read_exits` gives them.
        returncode: that of the started command, negative for a signal.
        was_killed: the signal was not ours; that its ranks then ended too is what followed.
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
