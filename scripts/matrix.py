"""Runs the default tests on the oldest, the locked and the newest releases that pyproject allows.

Each leg has a virtual environment of its own, never ``.venv``. What a run of the project needs is
varied: its dependencies and those of its extras. What only its tests need stays as it is locked.
The oldest are resolved by uv (``--resolution lowest-direct``), because a few lower bounds exclude
each other. Uses the standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "scripts" / "requirements.lock"
RECORD = ROOT / "docs" / "records" / "matrix.json"
LEGS = ("oldest", "locked", "newest")
_UNPUBLISHED = ("dev", "docs", "quantised", "torchtitan")  # what no default test needs
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
_MOST_FAILURES = 100


def requirements(project: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What a run may need, and what only the tests need, as pyproject has them."""
    extras = project["optional-dependencies"]
    run = [*project["dependencies"]]
    run += [text for name, texts in extras.items() if name not in _UNPUBLISHED for text in texts]
    dev = [text for text in extras["dev"] if name_of(text) != name_of(project["name"])]
    return sorted(set(run)), dev


def name_of(requirement: str) -> str:
    """The distribution's normalised name."""
    match = _NAME.match(requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def locked_versions() -> dict[str, str]:
    """Name to version."""
    lines = LOCK.read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name_of(name): version for name, version in pairs}


def wanted(leg: str, run: Sequence[str], dev: Sequence[str]) -> list[str]:
    """The lines of a leg's requirements; the tests' own packages as they are locked."""
    locked = locked_versions()
    if leg == "locked":
        return [f"{name}=={version}" for name, version in locked.items()]
    return [*run, *(f"{name_of(text)}=={locked[name_of(text)]}" for text in dev)]


class Leg:
    """One environment and what its tests gave."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder / name
        self._python = str(self._folder / "bin" / "python")

    def install(self) -> None:
        """
        Raises:
            subprocess.CalledProcessError: the packages do not go together, or are not there.
        """
        run, dev = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
        venv.create(self._folder, with_pip=True)
        file = self._folder / "requirements.txt"
        file.write_text("\n".join(wanted(self.name, run, dev)) + "\n")
        if self.name == "oldest":
            file = self._resolve_lowest(file)
        self._call("-m", "pip", "install", "--quiet", "--requirement", str(file))
        # The project itself is found by the working directory; its command by its metadata.
        self._call("-m", "pip", "install", "--quiet", "--no-deps", "--editable", str(ROOT))

    def _resolve_lowest(self, file: Path) -> Path:
        self._call("-m", "pip", "install", "--quiet", "uv")
        lowest = file.with_name("lowest.txt")
        links = os.environ.get("PIP_FIND_LINKS")
        self._call(
            *("-m", "uv", "pip", "compile", "--quiet", "--resolution", "lowest-direct"),
            *("--python", self._python, "--output-file", str(lowest), str(file)),
            *(("--find-links", links) if links else ()),
        )
        return lowest

    def test(self, tests: Sequence[str]) -> dict[str, Any]:
        """Run the tests; returns this leg's part of the record."""
        began = time.monotonic()
        what = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        done = self._run(what if tests else ["-m", "tests.side_by_side"])
        (self._folder / "output.txt").write_text(done.stdout)
        return summary(done.stdout) | {
            "exit_code": done.returncode,
            "seconds": round(time.monotonic() - began, 1),
            "tests": list(tests) or ["the default suite"],
            "versions": self._versions(),
        }

    def _versions(self) -> dict[str, str]:
        done = self._call("-m", "pip", "list", "--format=json")
        run, _ = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
        names = {name_of(text) for text in run} | {"triton"}
        listed = {name_of(one["name"]): one["version"] for one in json.loads(done)}
        python = self._call("-c", "import platform; print(platform.python_version())").strip()
        return {"python": python, **{n: listed[n] for n in sorted(names & listed.keys())}}

    def _environment(self) -> dict[str, str]:
        """Programs of this environment first: tests start ``holdfast`` and ``torchrun``."""
        variables = {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | os.environ
        path = f"{Path(self._python).parent}{os.pathsep}{variables.get('PATH', '')}"
        certificates = {"SSL_CERT_FILE": cert} if (cert := variables.get("PIP_CERT")) else {}
        return variables | certificates | {"PATH": path, "PYTHONPATH": str(ROOT)}

    def _call(self, *words: str) -> str:
        return self._run(words, check=True).stdout

    def _run(
        self, words: Sequence[str], *, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """With what it says of errors, unless these are raised."""
        return subprocess.run(
            [self._python, *words],
            cwd=ROOT,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=None if check else subprocess.STDOUT,
            text=True,
            check=check,
        )


def summary(output: str) -> dict[str, Any]:
    """Counts from pytest's last line of them, and the tests that failed."""
    counts: dict[str, int] = {}
    for line in output.splitlines():
        numbers = _COUNT.findall(line)
        if numbers and re.search(r" in [\d.]+s", line):
            for number, word in numbers:
                word = "errors" if word.startswith("error") else word
                counts[word] = counts.get(word, 0) + int(number)
    failures = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)))
    return {"counts": counts, "failed": failures[:_MOST_FAILURES]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a leg's tests failed, or its packages do not go together."""
    parser = argparse.ArgumentParser(prog="bash scripts/matrix.sh", description=__doc__)
    parser.add_argument("--leg", action="append", choices=LEGS, help="default: all three")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "matrix", help="of the environments"
    )
    parser.add_argument(
        "--out", type=Path, default=RECORD, help="the record, in which a leg is one entry"
    )
    parser.add_argument(
        "tests", nargs="*", help="after --: arguments of pytest; default: the whole suite"
    )
    options = parser.parse_args(arguments)
    results = []
    for name in options.leg or LEGS:
        leg = Leg(name, options.folder)
        try:
            leg.install()
            result = leg.test(options.tests)
        except subprocess.CalledProcessError as error:
            result = {"exit_code": error.returncode, "error": f"not installed: {error.cmd[1:4]}"}
        print(f"{name}: exit {result['exit_code']}, {result.get('counts', result.get('error'))}")
        keep(options.out, name, result)
        results.append(result)
    return int(any(result["exit_code"] for result in results))


def keep(path: Path, leg: str, result: Mapping[str, Any]) -> None:
    """Replace this leg's entry of the record."""
    record = json.loads(path.read_text()) if path.exists() else {}
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    record[leg] = {"date": when, "commit": commit, **result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
