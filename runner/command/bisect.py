"""``python -m runner bisect -- COMMAND``: which commit, or which file of the data, is the bad one?

With --commits GOOD BAD git tries COMMAND on commits between them, in the current repository; with
--files FILE... COMMAND gets halves of them, as a list where it says {files}. Bad is what the guard
halts (exit code 3); guard.max_rollbacks=0 halts at the first rollback. Each try has an output
directory of its own, where COMMAND says {out}; without such a word out=DIR is added. With neither
option it tries once, for ``git bisect run``: exit code 0: good, 1: bad, 125: cannot be judged.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.command.arguments import Parser
from runner.config.compose import override_text
from runner.run_dir.paths import RunDir
from runner.system.error import EXIT_CRASH, EXIT_DONE, EXIT_HALTED, ConfigError

_GOOD, _BAD, _UNKNOWN = 0, 1, 125  # as git bisect run reads them


def bisect_command(arguments: Sequence[str]) -> int:
    """Find the first bad commit or file; returns the exit code."""
    parser = Parser("bisect", __doc__)
    parser.add_argument("--commits", nargs=2, metavar=("GOOD", "BAD"))
    parser.add_argument("--files", nargs="+", metavar="FILE")
    options, command = parser.of_command(arguments)
    if not command or (options.files is None) == ("{files}" in " ".join(command)):
        raise ConfigError("bisect: write -- COMMAND; with {files} in it for --files, else without")
    if options.files is None:
        return _by_git(options.commits, command) if options.commits else _try(command)
    found = first_bad(options.files, lambda files: _is_bad(command, files))
    sys.stdout.write(f"{found} is the first bad file\n" if found else "none of the files is bad\n")
    return EXIT_DONE if found else EXIT_CRASH


def first_bad(files: Sequence[str], is_bad: Callable[[Sequence[str]], bool]) -> str | None:
    """The first file that is bad by itself; None if not even all together are bad."""
    if not is_bad(files):
        return None
    while len(files) > 1:
        first = files[: len(files) // 2]
        files = first if is_bad(first) else files[len(first) :]
    return files[0]


def _is_bad(command: Sequence[str], files: Sequence[str]) -> bool:
    listed = override_text(list(files))
    code = _try([word.replace("{files}", listed) for word in command])
    if code == _UNKNOWN:
        raise ConfigError(f"bisect: COMMAND cannot be judged with {listed}; see its output")
    sys.stdout.write(f"bisect: {listed}: {'bad' if code else 'good'}\n")
    sys.stdout.flush()
    return code == _BAD


def _try(command: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="holdfast-bisect-") as folder:
        words = [word.replace("{out}", f"{folder}/run") for word in command]
        words += [f"out={folder}/run"] if words == list(command) else []
        try:
            code = subprocess.run(words, check=False).returncode
        except OSError as error:
            raise ConfigError(f"bisect: {words[0]} does not start ({error.strerror})") from None
        # torchrun ends with 1, whatever its ranks ended with.
        summary = RunDir(Path(folder, "run")).stored_summary() or {}
    codes = {EXIT_DONE: _GOOD, EXIT_HALTED: _BAD}
    return codes.get(code, _BAD if summary.get("status") == "halted" else _UNKNOWN)


def _by_git(commits: Sequence[str], command: Sequence[str]) -> int:
    good, bad = commits
    if subprocess.run(["git", "bisect", "log"], capture_output=True, check=False).returncode == 0:
        raise ConfigError("bisect: git bisects here already; `git bisect reset` ends that")
    if subprocess.run(["git", "bisect", "start", bad, good, "--"], check=False).returncode:
        raise ConfigError(f"bisect: git cannot begin with --commits {good} {bad}, as it says above")
    try:
        own = [sys.executable, "-m", "runner", "bisect", "--", *command]
        return subprocess.run(["git", "bisect", "run", *own], check=False).returncode
    finally:
        subprocess.run(["git", "bisect", "reset"], check=False)
