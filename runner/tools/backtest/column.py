"""Finds the column of the step, the loss, the rate and so on: by common names, or as configured."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runner.system.error import ConfigError

_SHOWN = 80  # characters of a name: a file that is not a curve may have one line of a megabyte
STEP, LOSS, GRAD_NORM = "--step", "--loss", "--grad-norm"
# Optional columns, read on request if they exist.
LR, EPOCH, EVAL_LOSS = "--lr", "--epoch", "--eval-loss"
UPDATE_RATIO, LAYER_RATIO = "--update-ratio", "--layer-ratio"
ENTROPY, CORPUS_ENTROPY = "--entropy", "--corpus-entropy"
FURTHER = (LR, EPOCH, EVAL_LOSS, UPDATE_RATIO, LAYER_RATIO, ENTROPY, CORPUS_ENTROPY)

# Best first, as `plain` writes them. "train" and "loss" may come in either order.
_STEPS = """step global_step iteration iter update updates num_updates batch trainer_global_step
train_global_step train_step iterations steps"""
_LOSSES = """loss train_loss training_loss loss_train lm_loss train_lm_loss lm_loss_training
train_ce_loss train_crossentropyloss train_cross_entropy loss_train_total train_loss_step
train_batch_loss train_total_loss loss_metrics_global_avg_loss ce_loss cross_entropy"""
_NORMS = """grad_norm train_grad_norm gradient_norm train_gradient_norm global_grad_norm gradnorm
grad_norm_training total_grad_norm optim_total_grad_norm train_global_grad_norm
l2_norm_grad_global train_gnorm gnorm norm train_norm"""
_OTHERS = {
    LR: """lr learning_rate train_lr train_learning_rate lr_0 lr_group0 lr_group_0 learning_rate_0
optim_lr optimizer_lr train_lr_0 optim_learning_rate_group0 lr_adamw lr_adam lr_sgd""",
    EPOCH: "epoch train_epoch trainer_epoch epochs train_global_epoch",
    EVAL_LOSS: """eval_loss val_loss validation_loss valid_loss held_out_loss heldout_loss dev_loss
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
    LR: re.compile(r"(^|_)(lr|learning_rate)(_|$)"),
    EPOCH: re.compile(r"(^|_)epoch$"),
    EVAL_LOSS: re.compile(
        r"^(?=.*(val|eval|test|held|dev))(?!.*(aux|balanc|z_loss|min|max)).*loss"
    ),
}
_COMMON = {
    STEP: _STEPS.split(),
    LOSS: _LOSSES.split(),
    GRAD_NORM: _NORMS.split(),
    **{option: names.split() for option, names in _OTHERS.items()},
}


def plain(name: str) -> str:
    """Normalise a name: lower case, underscores for other characters, no W&B run name."""
    metric = name.rsplit(" - ", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "_", metric.lower()).strip("_")


def find(option: str, names: Sequence[str], requested: str | None, source: str) -> str | None:
    """Find the name among ``names`` for this option; None if no common one is there.

    Raises:
        ConfigError: the configured one is missing, or several fit equally well.
    """
    names = [name for name in names if not name.endswith(("__MIN", "__MAX"))]
    if requested is not None:
        fitting = [name for name in names if name == requested]
        fitting = fitting or [name for name in names if plain(name) == plain(requested)]
        if not fitting:
            raise ConfigError(f"{option} {requested}: not in {source}, which has {_listed(names)}")
        return _only(fitting, option, source)
    for common in _COMMON[option]:
        fitting = [name for name in names if plain(name) == common]
        if fitting:
            return fitting[0] if option in FURTHER else _only(fitting, option, source)
    if option not in _LOOKS:
        return None
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
    """The error for a required column that is missing."""
    hint = f"name it: {option} NAME"
    if names and all(re.fullmatch(r"[-+0-9.eE ]+", name) for name in names):
        hint = "the first line must name the columns"
    return ConfigError(f"{source}: no {option[2:]} among {_listed(names)}; {hint}")
