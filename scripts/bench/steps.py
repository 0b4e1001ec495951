"""Step time in turns with another loop: a bare one, or the runner without a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.process import on_ranks
from scripts.bench.report import Row, compared, grouped

_ARMED = 24  # steps after which all of the guard's rules are active
_GUARD_AIM, _CHECKPOINT_AIM = 1.005, 1.02
# The runner's ddp is FSDP2 on a mesh with a replicated dimension; people write torch's DDP.
_AGAINST = {"fsdp": "bare FSDP2 loop", "ddp": "bare DistributedDataParallel loop"}
# A look in every step: what one in track.layers_every costs is less than two blocks differ by.
_USUAL = 50  # track.layers_every
_LAYERS_AIM = 1 + 0.002 * _USUAL
_LAYERS_BLOCK = 8  # steps: every fourth look takes in the moments, too
# A pair is 100 steps of each side, taken 25 by 25, so that each has one save and its proof. It is
# saved 15 steps before a turn's end, which ends when the background has ended too: it cannot be
# charged to the other side.
_BLOCK, _EVERY, _PHASE = 25, 100, 15
_GROUP = _EVERY // _BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. ``overrides`` are the runner's settings, for both sides."""

    quick: bool
    ranks: int
    has_gpu: bool
    overrides: Sequence[str] = ()
    say: Callable[[str], None] = print

    def pairs(self, number: int) -> int:
        """``number`` for a full run, a fifth of it for a quick one."""
        return max(5, number // 5) if self.quick else number

    @property
    def size(self) -> list[str]:
        """Settings of the model and batch: the runner's own defaults on a CPU (nano, 32 x 256)."""
        if not self.has_gpu:
            return ["batch.global_size=8"] if self.quick else []
        batch = [f"batch.global_size={8 * self.ranks}", "batch.micro_size=8"]
        return ["model=small", "data.seq_len=1024", *batch]

    @property
    def short(self) -> list[str]:
        """Settings that make steps short: costs that do not grow with the batch stand out."""
        if self.has_gpu:
            return ["model=nano", "data.seq_len=256", f"batch.global_size={4 * self.ranks}"]
        return [f"batch.global_size={2 * self.ranks}", "data.seq_len=64"]

    @property
    def large(self) -> list[str]:
        """With a GPU, steps that are the device's and not Python's: compiled on both sides."""
        batch = [f"batch.global_size={4 * self.ranks}", "batch.micro_size=4"]
        return ["model=llama_1b", "compute.compile=true", "data.seq_len=2048", *batch]

    @property
    def block(self) -> int:
        """Steps in a row of one side. With a GPU many, for nothing waits within them."""
        return 10 if self.has_gpu else 2


def step(plan: Plan) -> list[Row]:
    """The runner with its guard against a hand-written loop."""
    rows = []
    for kind, against in _AGAINST.items():
        sizes = [("", []), (", short steps", plan.short)]
        if plan.has_gpu:
            sizes.append((", 1 B compiled", plan.large))
        for size, settings in sizes:
            label = f"step, guard on, {kind}{size}"
            options = {"pairs": plan.pairs(40), "block": 10 if settings else plan.block}
            words = [f"parallel={kind}", *settings]
            rows.append(_row(plan, label, against, f"bare-{kind}", words, options, _GUARD_AIM))
    return rows


def guard(plan: Plan) -> list[Row]:
    """``guard=default`` against ``guard=off``, and the noise of two equal halves."""
    cases = [("step, guard on", [], 40, _GUARD_AIM)]
    if not plan.quick:
        cases.append(("step, guard off (the noise alone)", ["guard=off"], 20, None))
    return [
        _row(
            plan, label, "the runner, guard=off", "guard-off", settings,
            {"pairs": plan.pairs(pairs)}, aim,
        )
        for label, settings, pairs, aim in cases
    ]  # fmt: skip


def layers(plan: Plan) -> list[Row]:
    """A look into the layers in each step against none."""
    tiny = ["model=tiny", "batch.global_size=16", "batch.micro_size=16", "data.seq_len=64"]
    cases = [(", tiny", tiny, 1)]
    if not plan.quick:
        cases += [(", short steps", plan.short, plan.ranks), ("", [], plan.ranks)]
    what = f"step, a look into the layers in each (at one in {_USUAL}: a {_USUAL}th)"
    return [
        _row(
            plan, f"{what}{size}", "the runner, track.layers_every=0", "layers-off",
            ["track.layers_every=1", *settings],
            {"pairs": plan.pairs(40), "block": _LAYERS_BLOCK, "ranks": ranks}, _LAYERS_AIM,
        )
        for size, settings, ranks in cases
    ]  # fmt: skip


def checkpoint(plan: Plan) -> list[Row]:
    """Guard and checkpoints together against a hand-written loop that saves nothing."""
    cases = [(", short steps", plan.short, 1 if plan.quick else 8)]
    if not plan.quick:
        cases.insert(0, ("", [], 2))
    what = f"step, guard and checkpoints (memory by cost, disk every {_EVERY}), fsdp"
    saved = [f"checkpoint.every={_EVERY}", "checkpoint.memory_every=null"]
    options = {"block": _BLOCK, "warmup": 2, "group": _GROUP, "phase": _PHASE}
    return [
        _row(
            plan, f"{what}{size}", "bare FSDP2 loop that saves nothing", "bare-fsdp",
            [*saved, *settings], {**options, "pairs": _GROUP * cycles}, _CHECKPOINT_AIM,
        )
        for size, settings, cycles in cases
    ]  # fmt: skip


def _row(
    plan: Plan,
    label: str,
    against: str,
    other: str,
    settings: Sequence[str],
    options: dict[str, int],
    aim: float | None,
) -> Row:
    """Seconds per step of both, and the ratio over pairs of blocks, or of groups of blocks.

    Args:
        options: of :mod:`scripts.bench.pair`; ``group``: blocks that are one pair.

    Raises:
        MeasureError: a rank failed, or the two sides trained differently.
    """
    block, group = options.get("block", plan.block), options.pop("group", 1)
    options = {"block": block, "warmup": -(-_ARMED // block), **options}
    result = on_ranks(
        options.pop("ranks", plan.ranks),
        "scripts.bench.pair",
        f"--against={other}",
        *(f"--{name}={value}" for name, value in options.items()),
        *plan.size,
        *settings,
        *plan.overrides,
    )
    steps = block * group
    pairs = [(a / steps, b / steps) for a, b in grouped(result["pairs"], group)]
    row = compared(label, against, pairs, aim, **_detail(result, list(settings), steps))
    plan.say(f"  {label}: {row.ratio['median']:.4f}")
    return row


def _detail(result: dict[str, Any], settings: list[str], steps: int) -> dict[str, Any]:
    kept = ("ranks", "parameters", "tokens_per_step", "precision")
    detail = {key: result[key] for key in kept}
    detail |= {"settings": settings, "steps_in_a_pair": steps}
    ours, theirs = result["losses"]["ours"], result["losses"]["theirs"]
    if theirs:
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=False)]
        detail["first_losses"] = [round(ours[0], 4), round(theirs[0], 4)]
        detail["largest_gap_of_first_losses"] = float(f"{max(gaps):.3g}")
        detail["losses_compared"] = len(gaps)
    return detail
