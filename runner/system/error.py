"""The exceptions that end a run on purpose, and the exit codes they end it with.

    RunnerError
    ├── ConfigError          2   a setting or an input file that the user can mend
    │   ├── DataError        2   the corpus cannot be trained on as it is
    │   └── MissingPackage   2   a setting needs a package that is not installed here
    ├── Halted               3   the guard gave up; starting again would not help
    ├── CheckpointError      4   no checkpoint can be loaded
    │   └── CorruptCheckpoint     one checkpoint failed its digest or is torn
    │       ├── UnreadableCheckpoint  the disk refused to read it: it may be sound
    │       └── RetiredCheckpoint  its run removed it while it was being read
    ├── ReadError            1   the storage refuses what may be sound; start me again
    ├── Preempted           75   asked to stop; saved; start me again
    ├── SaveError            1   the end state could not be saved; start me again
    ├── RankError            1   one rank failed and every rank was told so
    │   └── LeaveError           1   a rank computes wrongly: the next start must exclude its node
    ├── StartError           1   the ranks did not find each other
    └── Superseded           2   a newer incarnation owns the run directory

Any other exception is a crash: exit code 1, start the job again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from typing import Any, Final

# The exit codes of every command. Scripts and schedulers rely on them; they never change.


EXIT_DONE = 0
EXIT_CRASH = 1  # as is any other number that is not listed here: start the job again
EXIT_CONFIG = 2  # a setting or an input file that the user can mend
EXIT_HALTED = 3  # the guard gave up; starting again would not help
EXIT_NO_CHECKPOINT = 4
EXIT_PREEMPTED = 75  # saved, start me again: EX_TEMPFAIL; Slurm's RequeueExit can name it


class RunnerError(Exception):
    """Base of every error that this project raises on purpose."""

    exit_code = EXIT_CRASH


class ConfigError(RunnerError):
    """A setting the user can mend. The message names key, value seen, what is allowed."""

    exit_code = EXIT_CONFIG


class DataError(ConfigError):
    """The corpus cannot be trained on. The message names the file and what to do."""


class MissingPackage(ConfigError, ImportError):
    """A setting needs an optional package. Another node may have it, so each node says it."""


class Halted(RunnerError):
    """The guard's budget is spent; restarting would repeat the trouble."""

    exit_code = EXIT_HALTED


class CheckpointError(RunnerError):
    """No checkpoint can be loaded, or one does not fit the model."""

    exit_code = EXIT_NO_CHECKPOINT


class CorruptCheckpoint(CheckpointError):
    """One checkpoint is damaged: the message names the file. An older one may do."""


class UnreadableCheckpoint(CorruptCheckpoint):
    """The system refused to read a file of it. It may be sound: another attempt may show it."""


class RetiredCheckpoint(CorruptCheckpoint):
    """The run that it belongs to removed it while it was being read. A later one may do."""


class ReadError(RunnerError):
    """No checkpoint, or no sample, can be read just now; some may be sound: a restart may help."""


class Preempted(RunnerError):
    """A stop was requested. ``in_time`` tells whether the state of that moment is saved."""

    exit_code = EXIT_PREEMPTED

    def __init__(self, words: str, *, in_time: bool = True) -> None:
        super().__init__(words)
        self.in_time = in_time


class SaveError(RunnerError):
    """The end state could not be written; an older checkpoint stands."""


class RankError(RunnerError):
    """At least one rank failed locally; raised alike on all ranks."""


class LeaveError(RankError):
    """A rank computes wrongly, or its copy of the state is wrong. The journal names it."""


class StartError(RunnerError):
    """The rendezvous failed; the message names who is absent or not reachable.

    ``is_local``: the other ranks do not know of it, so that this one must report it.
    """

    def __init__(self, words: str, *, is_local: bool = False) -> None:
        super().__init__(words)
        self.is_local = is_local


class Superseded(RunnerError):
    """Another incarnation owns the run; this process must write nothing more.

    Its exit code prevents a restart, which would take the run away again.
    """

    exit_code = EXIT_CONFIG


# Optional packages: whether an extra is installed, and the command that installs it.
#
# ``pyproject.toml`` defines the extras; which setting needs which extra is in
# :mod:`runner.config.validate`.


DISTRIBUTION: Final = "holdfast-train"
PACKAGES: Final = {
    "zero": "deepspeed",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "text": "tokenizers",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "torchtitan": "torchtitan",
    "plot": "matplotlib",
    "remote": "s3fs",
    "hf": "datasets",
    "quantised": "bitsandbytes",
    "nvml": "pynvml",
    "watch": "apprise",
    "top": "textual",
}


def install_command(extra: str) -> str:
    """The command that installs what an extra brings.

    It names the packages themselves, so it works although the distribution is on no index.
    """
    try:
        needed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        needed = []
    of_extra = re.compile(rf"extra == ['\"]{extra}['\"]")
    names = [text.partition(";")[0].strip() for text in needed if of_extra.search(text)]
    words = " ".join(f"'{name}'" for name in names)
    return f"pip install {words}" if names else f"pip install '.[{extra}]' in a checkout"


def lacking(what: str, extra: str, package: str = "") -> str:
    """The message for a setting or file whose extra is not installed."""
    return (
        f"{what}: needs the package {package or PACKAGES[extra]}, which is not installed: "
        f"{install_command(extra)}"
    )


def imported(package: str, what: str, extra: str) -> Any:
    """
    Args:
        what: the setting or file that needs the package.

    Raises:
        MissingPackage: the extra with it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackage(lacking(what, extra, package.partition(".")[0])) from error


def is_installed(extra: str) -> bool:
    """Whether the extra's package can be found, without importing it."""
    return has_package(PACKAGES[extra])


def has_package(name: str) -> bool:
    """Whether a package can be found, without importing it."""
    return importlib.util.find_spec(name) is not None
