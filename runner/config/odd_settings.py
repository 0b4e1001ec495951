"""Warns of valid settings that are mostly mistakes: a line each at the first start. Pure."""

from __future__ import annotations

from runner.config.schema import OptimKind, RunConfig

_LOW_BETA2 = 0.9
_LONG = 10  # memories of the second moment; shorter runs are trials
_HIGH_RATE = 0.02  # of AdamW, whose steps are about as large as its rate


def odd_settings(config: RunConfig) -> list[str]:
    """Sentences that name the key, its value and its usual effect; none if all is usual."""
    optim, sentences = config.optim, []
    is_adamw = optim.kind is OptimKind.adamw and optim._target_ is None
    if is_adamw and optim.beta2 < _LOW_BETA2:
        sentences.append(
            f"optim.beta2={optim.beta2:g}: the second moment forgets within "
            f"{1 / (1 - optim.beta2):.0f} updates; 0.95 to 0.999 are usual"
        )
    memory = 1 / (1 - optim.beta2)
    is_short = config.schedule._target_ is None and config.schedule.warmup < round(memory)
    if is_adamw and is_short and _LONG * memory <= config.steps:
        sentences.append(
            f"schedule.warmup={config.schedule.warmup}: the second moment (optim.beta2="
            f"{optim.beta2:g}) needs about {memory:.0f} updates to settle, and the full rate comes "
            "before; a spike there is no surprise"
        )
    if optim.clip == 0:
        sentences.append(
            "optim.clip=0: one large gradient that the gate lets pass is applied in full"
        )
    if is_adamw and optim.lr > _HIGH_RATE:
        sentences.append(f"optim.lr={optim.lr:g}: AdamW mostly diverges above {_HIGH_RATE:g}")
    if not config.guard.enabled:
        sentences.append("guard.enabled=false: a NaN is applied, and there are no rollbacks")
    return sentences
