"""Whether a sample is the same each time it is read, here and in another process.

Run as a module it is that other process: it opens the data set of some settings and writes the
digests of its first samples.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.config.compose import compose
from runner.data.dataset import Dataset
from runner.data.draws import read_sample
from runner.data.user_dataset import contents
from runner.session.corpus import open_dataset
from runner.startup.checks import Check
from runner.system.environment import variables
from runner.system.parsing import json_text

_SAMPLES = 8
_SECONDS = 600
_SHOWN = 300  # characters of an error


def sample_checks(
    dataset: Dataset, overrides: Sequence[str], config_dir: str | None
) -> Iterator[Check]:
    """Read the first samples twice in this process, and once in another.

    Args:
        overrides, config_dir: the settings from which the other process opens ``dataset``.
    """
    once, again = (read_digests(dataset) for _ in range(2))
    yield _compared(
        "a sample is the same when it is read again",
        once,
        again,
        where="in this process",
        remedy="augmentation must draw from torch's, NumPy's or Python's global generator, which "
        "are seeded for each sample, not from one that the data set keeps",
    )
    name = "a sample is the same in another process"
    elsewhere, failure = _from_another_process(overrides, config_dir)
    if elsewhere is None:
        yield Check(
            name=name,
            holds=False,
            found=f"another process with these settings cannot read them: {failure}",
            remedy="every start and every data worker opens the data set anew: open it from its "
            "settings alone, not from what this process holds",
        )
        return
    yield _compared(
        name,
        once,
        elsewhere,
        where="in another process",
        remedy="a sample may depend on its number and on files, but not on hash() of a string, on "
        "the order of a set, on the time or on the process: draw from torch's, NumPy's or Python's "
        "global generator, sort what has no order",
    )


def read_digests(dataset: Dataset) -> list[str]:
    """SHA-256 (hex) of each of the first samples; for an unreadable one, the error's type."""
    return [_digest(dataset, index) for index in range(min(len(dataset), _SAMPLES))]


def _digest(dataset: Dataset, index: int) -> str:
    try:
        return contents(read_sample(dataset, index)).hex()
    except Exception as error:  # a run skips such a sample
        return type(error).__name__


def _compared(
    name: str, once: Sequence[str], again: Sequence[str], *, where: str, remedy: str
) -> Check:
    pairs = enumerate(zip(once, again, strict=False))
    differing = [index for index, pair in pairs if len(set(pair)) > 1]
    if len(once) != len(again):
        description = (
            f"the data set has other samples {where}: {len(again)} of the first {len(once)}"
        )
    elif differing:
        description = f"sample {differing[0]} differs {where} ({len(differing)} of {len(once)} do)"
    else:
        description = f"the first {len(once)} samples are the same {where}"
    return Check(name=name, holds=list(once) == list(again), found=description, remedy=remedy)


def _from_another_process(
    overrides: Sequence[str], config_dir: str | None
) -> tuple[list[str] | None, str]:
    """The digests as a fresh interpreter reads them, or None and what went wrong."""
    # Strings hash differently there, as they do in every start unless the seed is set.
    seed = "2" if variables().get("PYTHONHASHSEED") == "1" else "1"
    with tempfile.TemporaryDirectory(prefix="holdfast-check-") as folder:
        results = Path(folder) / "digests.json"  # a data set may print on the standard output
        command = [sys.executable, "-m", "runner.command.check_samples"]
        try:
            done = subprocess.run(
                [*command, str(results), config_dir or "", *overrides],
                env={**variables(), "PYTHONHASHSEED": seed},
                check=False,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return None, f"it took longer than {_SECONDS} s"
        if done.returncode == 0:
            return list(json.loads(results.read_text())["digests"]), ""
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    return None, f"{lines[-1][:_SHOWN]} (exit code {done.returncode})"


def main(arguments: Sequence[str]) -> None:
    """The other process: write the digests into a file.

    Args:
        arguments: the file, the folder of presets ("" for none), the settings.
    """
    results, config_dir, *overrides = arguments
    dataset = open_dataset(compose(overrides, config_dir=config_dir or None))
    Path(results).write_text(json_text({"digests": read_digests(dataset)}))


if __name__ == "__main__":
    main(sys.argv[1:])
