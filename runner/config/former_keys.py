"""Keys of earlier versions: what a command that has one is told."""

from __future__ import annotations

from typing import Final

RENAMED: Final = {
    "model.precision": "compute.precision",
    "model.compile": "compute.compile",
    "model.frozen": "compute.frozen",
    "model.activation_checkpointing": "compute.recompute",
}
# What nobody had a reason to turn is a constant now.
_FIXED: Final = {
    "model.loss_fp32": "true",
    "compute.loss_fp32": "true",
    "guard.pair_sigmas": "3.0",
    "guard.level_spread": "0.1",
    "guard.repeat_window": "200",
    "guard.budget_window": "1000",
    "guard.max_discards": "100",
    "guard.drift_rise": "0.5 guard.loss_floor",
    "guard.skip": "true",
    "guard.widen": "2.0",
    "data.prefetch": "2",
    "data.pin_memory": "true on CUDA",
    "guard.pair_floor": "0.625 guard.loss_floor",
    "guard.norm_sigmas": "13; guard.norm_floor may be set",
    "guard.drift_slack": "0.3 guard.loss_floor",
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


def former_key(key: str) -> str | None:
    """What became of a key; None if it never was one."""
    if key in RENAMED:
        return f"is now called {RENAMED[key]}"
    return f"is no setting any more; it is always {_FIXED[key]}" if key in _FIXED else None
