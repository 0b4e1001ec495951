"""What a run said last."""

from __future__ import annotations

TRACEBACK = "Traceback (most recent call last)"


def tail(text: str) -> str:
    """What the run itself said last, without torchrun's summary of it."""
    lines = [
        line
        for line in own(text).splitlines()
        if line.strip() and "elastic/multiprocessing" not in line
    ]
    errors = [number for number, line in enumerate(lines) if "rror: " in line]
    return " | ".join(lines[errors[-1] :][:4] if errors else lines[-6:])[-900:]


def own(text: str) -> str:
    """Without what torchrun prints where a rank has failed."""
    if "ChildFailedError" not in text:
        return text
    return text.rpartition("ChildFailedError")[0].rpartition(TRACEBACK)[0]
