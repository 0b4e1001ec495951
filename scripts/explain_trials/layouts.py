"""The runs in which incidents are made."""

from __future__ import annotations

from dataclasses import dataclass

START = 33  # updates before the first incident; clean checkpoints are of 10 and 20
ALIKE = (
    *("data.workers=0", "eval.every=0", "steps=400", "schedule.warmup=5"),
    *("checkpoint.every=10", "checkpoint.clean_after=5", "guard.min_history=10"),
    *("track.every=100000", "track.read=false", "parallel.timeout_seconds=60"),
    *("explain=full", "guard.max_rollbacks=100", "guard.max_discards=100"),
    "faults=[slow@step=1000000,seconds=0]",  # so that the faults' wrappers are there
)
_TOKENS = ("data=synthetic",)
_DECODER = ("embedding", "norm", "blocks.0.attention", "blocks.0.ffn", "blocks.1.attention")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run.

    Args:
        modules: of the model, that may overflow; ``last`` is the one before the head.
        noise: relative, on every embedding's output.
    """

    ranks: int
    settings: tuple[str, ...]
    modules: tuple[str, ...] = (*_DECODER, "blocks.1.ffn")
    last: str = "norm"
    noise: float = 0.0

    @property
    def is_decoder(self) -> bool:
        return not any(word.startswith("model._target_") for word in self.settings)

    @property
    def is_learnt(self) -> bool:
        """Whether losses fall to nearly nothing, so that some times as much closes no gate."""
        return any("data._target_" in word for word in self.settings)

    @property
    def has_images(self) -> bool:
        return any("Images" in word for word in self.settings)

    @property
    def is_bf16(self) -> bool:
        return "compute.precision=bf16" in self.settings


def _own(*settings: str) -> tuple[str, ...]:
    return ("model=tiny", *_TOKENS, "compute.precision=fp32", *settings)


def _guest(name: str, *settings: str) -> tuple[str, ...]:
    return (f"model._target_=tests.guests.{name}", "compute.precision=fp32", *settings)


_TIED = ("embedding", "head")
_SEEING = ("first", "norm", "second")

LAYOUTS: dict[str, Layout] = {
    "fsdp, 2 ranks": Layout(ranks=2, settings=_own()),
    "fsdp, 2 ranks, a guest's model": Layout(
        ranks=2, settings=_guest("Tied", *_TOKENS), modules=_TIED, last="head"
    ),
    "fsdp, 2 ranks, a guest's model and data": Layout(
        ranks=2,
        settings=_guest("Seeing", "data._target_=scripts.explain_trials.guests.Images"),
        modules=_SEEING,
        last="second",
    ),
    "fsdp, 4 ranks": Layout(ranks=4, settings=_own()),
    "zero2, 2 ranks, BF16": Layout(
        ranks=2, settings=_own("parallel=zero2", "compute.precision=bf16")
    ),
    "fsdp, 3 ranks, BF16": Layout(ranks=3, settings=_own("compute.precision=bf16")),
    "fsdp, 3 ranks, a guest's model": Layout(
        ranks=3, settings=_guest("Recurrent", *_TOKENS), modules=("embedding", "gru"), last="gru"
    ),
    # No rule was tuned on these three.
    "fsdp, 2 ranks, convolutions": Layout(
        ranks=2,
        settings=_guest("Convolved", *_TOKENS),
        modules=("embedding", "stages.0", "stages.1"),
        last="stages.1",
    ),
    "fsdp, 2 ranks, preferences": Layout(
        ranks=2,
        settings=_guest("Preferring", "model.vocab_size=16", "data._target_=tests.guests.Pairs"),
        modules=_TIED,
        last="embedding",
    ),
    "fsdp, 3 ranks, a Hugging Face Llama": Layout(
        ranks=3,
        settings=_guest("llama", *_TOKENS),
        modules=("model.embed_tokens", "model.layers.0.mlp", "model.layers.1.self_attn"),
        last="model.norm",
    ),
    "fsdp, 2 ranks, noise 1e-6": Layout(ranks=2, settings=_own(), noise=1e-6),
    "fsdp, 3 ranks, noise 1e-6": Layout(ranks=3, settings=_own(), noise=1e-6),
}
