"""Which column is the step, the loss, the gradient norm: by common names, or as told."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.system.error import ConfigError

_SHOWN = 80  # characters of a name: what is no curve may have one line of a megabyte
STEP, LOSS, GRAD_NORM = "--step", "--loss", "--grad-norm"

# Best first, written as `plain` writes them. "train" and "loss" may stand either way round.
_STEPS = """step global_step iteration iter update updates num_updates batch trainer_global_step
train_global_step train_step iterations steps"""
_LOSSES = """loss train_loss training_loss loss_train lm_loss train_lm_loss lm_loss_training
train_ce_loss train_crossentropyloss train_cross_entropy loss_train_total train_loss_step
train_batch_loss train_total_loss loss_metrics_global_avg_loss ce_loss cross_entropy"""
_NORMS = """grad_norm train_grad_norm gradient_norm train_gradient_norm global_grad_norm gradnorm
grad_norm_training total_grad_norm optim_total_grad_norm train_global_grad_norm
l2_norm_grad_global train_gnorm gnorm norm train_norm"""
# Else the only column that looks like it, held-out losses aside.
_LOOKS = {
    STEP: re.compile(r"(^|_)(step|iteration|iter|update)s?$"),
    LOSS: re.compile(r"^(?!.*(val|eval|test|held|aux|balanc|z_loss|min|max)).*loss"),
    GRAD_NORM: re.compile(r"^(?!.*(param|weight|clip)).*grad.*norm"),
}
_COMMON = {STEP: _STEPS.split(), LOSS: _LOSSES.split(), GRAD_NORM: _NORMS.split()}


def plain(name: str) -> str:
    """Lower case, one underscore for what is not a letter or digit, W&B's run name left out."""
    metric = name.rsplit(" - ", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "_", metric.lower()).strip("_")


def find(option: str, names: Sequence[str], told: str | None, source: str) -> str | None:
    """The name among ``names`` for this option; None where no common one is there.

    Raises:
        ConfigError: the told one is not there, or several fit equally well.
    """
    names = [name for name in names if not name.endswith(("__MIN", "__MAX"))]
    if told is not None:
        fitting = [name for name in names if name == told]
        fitting = fitting or [name for name in names if plain(name) == plain(told)]
        if not fitting:
            raise ConfigError(f"{option} {told}: not in {source}, which has {_listed(names)}")
        return _only(fitting, option, source)
    for common in _COMMON[option]:
        fitting = [name for name in names if plain(name) == common]
        if fitting:
            return _only(fitting, option, source)
    fitting = [name for name in names if _LOOKS[option].search(plain(name))]
    if len(fitting) > 1 and option == LOSS:
        return _only(fitting, option, source)
    return fitting[0] if len(fitting) == 1 else None


def _only(fitting: Sequence[str], option: str, source: str) -> str:
    if len(fitting) > 1:
        raise ConfigError(
            f"{source}: {_listed(fitting)} could all be {option}; choose one with {option} NAME"
        )
    return fitting[0]


def _listed(names: Sequence[str], most: int = 20) -> str:
    shown = ", ".join(repr(name[:_SHOWN]) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def missing(option: str, names: Sequence[str], source: str) -> ConfigError:
    """The error for a column that must be there."""
    hint = f"name it: {option} NAME"
    if names and all(re.fullmatch(r"[-+0-9.eE ]+", name) for name in names):
        hint = "the first line must name the columns"
    return ConfigError(f"{source}: no {option[2:]} among {_listed(names)}; {hint}")
