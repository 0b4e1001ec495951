"""Keys of earlier versions: what a command that has one is told, and how an old run is read."""

from __future__ import annotations

from typing import Any, Final

RENAMED: Final = {
    "model.precision": "compute.precision",
    "model.compile": "compute.compile",
    "model.frozen": "compute.frozen",
    "model.activation_checkpointing": "compute.recompute",
}
# What nobody had a reason to turn is a constant now. Of those that change what a run computes: the
# value that a run from before must have had.
FIXED_VALUES: Final[dict[str, Any]] = {
    "model.loss_fp32": True,
    "compute.loss_fp32": True,
    "guard.pair_sigmas": 3.0,
    "guard.pair_floor": 0.25,
    "guard.norm_sigmas": 13.0,
    "guard.drift_slack": 0.12,
    "guard.drift_rise": 0.2,
    "guard.persist_window": 10,
    "guard.repeat_window": 200,
    "guard.level_spread": 0.1,
    "guard.budget_window": 1000,
    "guard.max_discards": 100,
    "guard.skip": True,
    "guard.widen": 2.0,
    "guard.cooldown": 0.5,
}
_IN_WORDS: Final = {
    "data.prefetch": "2",
    "data.pin_memory": "true on CUDA",
    "guard.pair_floor": "0.625 guard.loss_floor",
    "guard.norm_sigmas": "13; guard.norm_floor may be set",
    "guard.drift_slack": "0.3 guard.loss_floor",
    "guard.drift_rise": "0.5 guard.loss_floor",
    "guard.persist_window": "10, or 2 guard.persist if that is more",
    "guard.cooldown": "0.5; guard.cooldown_steps=0 leaves the rate as it is",
    "checkpoint.mtbf_hours": "24, or 6,300 divided by the number of nodes if that is less",
    "checkpoint.remote_keep": "as checkpoint.keep says",
    "debug.nccl_subsystems": "INIT,COLL,ENV; NCCL_DEBUG_SUBSYS in the environment comes before it",
    "watchdog.factor": "20",
    "watchdog.settle_seconds": "3",
    "watchdog.straggler_factor": "2, and 1.2 for the fixed computation on a GPU",
    "watchdog.straggler_checks": "3",
}
_FIXED: Final = {key: str(value).lower() for key, value in FIXED_VALUES.items()} | _IN_WORDS


def former_key(key: str) -> str | None:
    """What became of a key; None if it never was one."""
    if key in RENAMED:
        return f"is now called {RENAMED[key]}"
    return f"is no setting any more; it is always {_FIXED[key]}" if key in _FIXED else None


def as_now(stored: dict[str, Any]) -> dict[str, Any]:
    """Settings that an earlier version stored, by their present names."""
    former = {RENAMED[name]: value for name, value in stored.items() if name in RENAMED}
    return {name: value for name, value in stored.items() if name not in RENAMED} | former
