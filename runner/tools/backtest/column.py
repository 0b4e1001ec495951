"""Finds the column of the step, the loss, the rate and so on: by common names, or as configured."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.system.error import ConfigError
from runner.system.units import first_few
from runner.tools.reading.curve import (
    CORPUS_ENTROPY,
    ENTROPY,
    EPOCH,
    HELD_OUT,
    LAYER_RATIO,
    LEARNING_RATE,
    UPDATE_RATIO,
)

_SHOWN = 80  # characters of a name: a file that is not a curve may have one line of a megabyte
STEP, LOSS, GRAD_NORM = ALWAYS = ("step", "loss", "grad_norm")
# By column, best first, as `plain` writes them. "train" and "loss" may come in either order.
_COMMON = {
    STEP: """step global_step iteration iter update updates num_updates batch trainer_global_step
train_global_step train_step iterations steps""",
    LOSS: """loss train_loss training_loss loss_train lm_loss train_lm_loss lm_loss_training
train_ce_loss train_crossentropyloss train_cross_entropy loss_train_total train_loss_step
train_batch_loss train_total_loss loss_metrics_global_avg_loss ce_loss cross_entropy""",
    GRAD_NORM: """grad_norm train_grad_norm gradient_norm train_gradient_norm global_grad_norm
gradnorm grad_norm_training total_grad_norm optim_total_grad_norm train_global_grad_norm
l2_norm_grad_global train_gnorm gnorm norm train_norm""",
    LEARNING_RATE: """lr learning_rate train_lr train_learning_rate lr_0 lr_group0 lr_group_0
learning_rate_0 optim_lr optimizer_lr train_lr_0 optim_learning_rate_group0 lr_adamw lr_adam
lr_sgd""",
    EPOCH: "epoch train_epoch trainer_epoch epochs train_global_epoch",
    HELD_OUT: """eval_loss val_loss validation_loss valid_loss held_out_loss heldout_loss dev_loss
loss_val loss_eval loss_valid loss_validation eval_ce_loss val_ce_loss eval_lm_loss
lm_loss_validation val_loss_epoch eval_cross_entropy eval_crossentropyloss test_loss""",
    UPDATE_RATIO: """update_ratio update_to_weight update_to_weight_ratio update_weight_ratio
update_norm_ratio train_update_ratio""",
    LAYER_RATIO: "layer_ratio layer_norm_ratio first_last_ratio gradient_layer_ratio",
    ENTROPY: "entropy token_entropy batch_entropy batch_token_entropy data_entropy",
    CORPUS_ENTROPY: "corpus_entropy unigram_entropy corpus_token_entropy",
}
# Else the only column that looks like it, apart from held-out losses.
_LOOKS = {
    STEP: re.compile(r"(^|_)(step|iteration|iter|update)s?$"),
    LOSS: re.compile(r"^(?!.*(val|eval|test|held|aux|balanc|z_loss|min|max)).*loss"),
    GRAD_NORM: re.compile(r"^(?!.*(param|weight|clip)).*grad.*norm"),
    LEARNING_RATE: re.compile(r"(^|_)(lr|learning_rate)(_|$)"),
    EPOCH: re.compile(r"(^|_)epoch$"),
    HELD_OUT: re.compile(r"^(?=.*(val|eval|test|held|dev))(?!.*(aux|balanc|z_loss|min|max)).*loss"),
}


def option(column: str) -> str:
    """The option that names a column."""
    return f"--{column.replace('_', '-')}"


def plain(name: str) -> str:
    """Normalise a name: lower case, underscores for other characters, no W&B run name."""
    metric = name.rsplit(" - ", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "_", metric.lower()).strip("_")


def find(column: str, names: Sequence[str], requested: str | None, source: str) -> str | None:
    """Find the name among ``names`` for this column; None if no common one is there.

    Raises:
        ConfigError: the configured one is missing, or several fit equally well.
    """
    names = [name for name in names if not name.endswith(("__MIN", "__MAX"))]
    if requested is not None:
        fitting = [name for name in names if name == requested]
        fitting = fitting or [name for name in names if plain(name) == plain(requested)]
        if not fitting:
            listed = _listed(names)
            raise ConfigError(f"{option(column)} {requested}: not in {source}, which has {listed}")
        return _only(fitting, column, source)
    for common in _COMMON[column].split():
        fitting = [name for name in names if plain(name) == common]
        if fitting:
            return _only(fitting, column, source) if column in ALWAYS else fitting[0]
    if column not in _LOOKS:
        return None
    fitting = [name for name in names if _LOOKS[column].search(plain(name))]
    if len(fitting) > 1 and column == LOSS:
        return _only(fitting, column, source)
    return fitting[0] if len(fitting) == 1 else None


def _only(fitting: Sequence[str], column: str, source: str) -> str:
    if len(fitting) > 1:
        listed, named = _listed(fitting), option(column)
        raise ConfigError(f"{source}: {listed} could all be {named}; choose one with {named} NAME")
    return fitting[0]


def _listed(names: Sequence[str]) -> str:
    return first_few(names, 20, name=lambda name: repr(name[:_SHOWN]))


def no_loss(names: Sequence[str], source: str) -> ConfigError:
    """The error for a file without a column of losses."""
    hint = "name it: --loss NAME"
    if names and all(re.fullmatch(r"[-+0-9.eE ]+", name) for name in names):
        hint = "the first line must name the columns"
    return ConfigError(f"{source}: no loss among {_listed(names)}; {hint}")
