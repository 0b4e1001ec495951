"""Throughput against the well-known frameworks: same model, weights, batches, recipe and ranks.

They have their own environment, ``.venv-bench``, created once. It uses torch and everything else
from ``.venv`` through a .pth file: one torch for both sides, and gigabytes less.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from dataclasses import replace

from scripts.bench.compared import compared
from scripts.bench.plan import Plan
from scripts.bench.process import ROOT, MeasureError
from scripts.bench.report import Row

HOME = ROOT / ".venv-bench"
REQUIREMENTS = ROOT / "scripts" / "bench" / "frameworks.txt"

# Name, words, and the engine of ours that lays parameters out as it does.
OPPONENTS = (
    ("lightning", "Lightning Trainer, DDP, bf16-mixed", "ddp"),
    ("hf-trainer", "HF Trainer, DDP, bf16", "ddp"),
    ("accelerate-fsdp2", "HF Accelerate, FSDP2, bf16, gradients reduced in FP32", "fsdp"),
    ("accelerate-fsdp2-bf16", "HF Accelerate, FSDP2, as it comes: reduced in BF16", "fsdp"),
    ("fabric", "Lightning Fabric, DDP, bf16-mixed", "ddp"),
    ("accelerate", "HF Accelerate, DDP, bf16", "ddp"),
)
_QUICK = 3


def measure(plan: Plan) -> list[Row]:
    python = environment_python(plan)
    rows = []
    for opponent, label, kind in OPPONENTS[:_QUICK] if plan.quick else OPPONENTS:
        row = compared(
            plan,
            f"step, guard on, {kind}",
            label,
            f"parallel={kind}",
            opponent=opponent,
            pairs=plan.pairs(20),
            python=python,
        )
        rows.append(_with_rates(row))
        gap, number = row.detail["largest_gap_of_first_losses"], row.detail["losses_compared"]
        plan.say(f"    losses of the first {number} steps differ by at most {gap} nats")
    return rows


def _with_rates(row: Row) -> Row:
    """The row with tokens per second added."""
    assert row.ours is not None and row.theirs is not None
    tokens = row.detail["tokens_per_step"]
    rates = {"ours": round(tokens / row.ours), "theirs": round(tokens / row.theirs)}
    return replace(row, detail={**row.detail, "tokens_per_second": rates})


def environment_python(plan: Plan) -> str:
    """The interpreter of ``.venv-bench``, which is set up if it is not up to date."""
    python, marker = HOME / "bin" / "python", HOME / ".installed"
    wanted = REQUIREMENTS.read_text() + sys.prefix
    if marker.exists() and marker.read_text() == wanted:
        return str(python)
    plan.say(f"setting up {HOME.name} (once)")
    venv.create(HOME, with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = HOME / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_paths()["purelib"] + "\n")
    locked = ROOT / "scripts" / "requirements.lock"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*install, "--constraint", str(locked), "--requirement", str(REQUIREMENTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MeasureError(f"{HOME.name} could not be filled: {done.stderr.strip()[-500:]}")
    marker.write_text(wanted)
    return str(python)
