"""The planted mistakes are mistakes, and the sound scripts are sound; no word of ours is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests import run, warm
from tests.prove_resume import cases
from tests.prove_resume.cases import KILLS, STEPS, Case

# One that is noticed by nothing but the last digest. What each of the others does, the matrix of
# test_prove_resume.py says: it names first what was planted, and finds the sound ones equal.
SOUND, PLANTED = (
    Case(script="plain", ranks=1, variant="stream"),
    Case(script="plain", ranks=1, defect="ema_lost"),
)


def rows_of(case: Case, out: Path, *, killed_at: int | None = None) -> dict[str, str]:
    """Run a script to its end, or kill all of it in a step; returns its losses and digests.

    Keys are ``rank R step S`` and ``rank R digest``.
    """
    stop = {} if killed_at is None else {"STOP_AT": str(killed_at)}
    environment = os.environ | case.environment | stop | {"OMP_NUM_THREADS": "1"}
    command, errors = case.command(out), out.with_suffix(".stderr")
    rows: dict[str, str] = {}
    with errors.open("w") as file:
        process = warm.WarmPopen(
            command,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            for line in process.stdout:
                key, value = _read(line)
                rows[key] = value
                if key == f"rank 0 step {killed_at}":
                    break
        finally:
            run.kill_naming(str(out))
            process.stdout.close()
            code = process.wait()
    assert killed_at is not None or code == 0, errors.read_text()[-3000:]
    return rows


def _read(line: str) -> tuple[str, str]:
    words = line.split()
    return " ".join(words[: words.index("digest") + 1 if "digest" in words else 4]), words[-1]


def _both(case: Case, folder: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The rows of an undisturbed run, and of one that was killed and started again."""
    undisturbed = rows_of(case, folder / "undisturbed")
    resumed = rows_of(case, folder / "killed", killed_at=KILLS[0])
    return undisturbed, resumed | rows_of(case, folder / "killed")


def _digests(rows: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in rows.items() if "digest" in key}


def test_a_sound_script_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed, resumed = _both(SOUND, tmp_path)
    assert resumed == undisturbed
    assert len(_digests(resumed)) == 1 and len(resumed) == STEPS + 1


def test_a_planted_mistake_changes_the_end(tmp_path: Path) -> None:
    undisturbed, resumed = _both(PLANTED, tmp_path)
    before = {f"rank 0 step {step}" for step in range(1, 6)}
    assert {k: resumed[k] for k in before} == {k: undisturbed[k] for k in before}
    assert _digests(resumed) != _digests(undisturbed)


def test_each_defect_and_variant_of_a_script_is_a_case() -> None:
    known = [*cases.PLANTED, *cases.SOUND_CASES]
    assert len({str(case) for case in known}) == len(known)
    assert len(cases.PLANTED) >= 60
    assert len(cases.SOUND_CASES) >= 12
    assert {word for case in known if (word := case.defect)} == set(cases.NAMED)


def _odd(kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    words = [kind, "--out", str(folder / "out"), "--steps", "10"]
    return warm.finished(
        [sys.executable, str(cases.SCRIPTS / "odd.py"), *words], timeout=60, cwd=folder
    )


def test_odd_scripts_are_odd(tmp_path: Path) -> None:
    fails, hand = _odd("fails", tmp_path / "a"), _odd("no_optimizer", tmp_path / "b")
    assert fails.returncode and "prepare.py" in fails.stderr
    assert hand.returncode == 0 and "step 10 loss" in hand.stdout

    assert _odd("never_saves", tmp_path / "c").returncode == 0
    assert not list((tmp_path / "c").rglob("*.pt"))

    assert _odd("relative", tmp_path / "d").returncode == 0
    assert (tmp_path / "d" / "checkpoints" / "last.pt").exists()

    assert _odd("fails_again", tmp_path / "e").returncode == 0
    assert "size mismatch" in _odd("fails_again", tmp_path / "e").stderr
