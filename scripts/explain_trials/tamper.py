"""What is done to modules, weights and samples of a run, besides the faults that it has itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from runner.session.phases import Run
from scripts.explain_trials.guests import CHANGED, MISNAMED
from scripts.explain_trials.outcome import Trial

_FOR_EVER = 10**9
_PIXELS = {"pixels NaN": float("nan"), "pixels x 1e4": 1e4, "pixels x 3": 3.0}

Change = Callable[[torch.Tensor], torch.Tensor]


class Tampering:
    """Does to one run on one rank what trials ask for.

    Args:
        last: the module before the head; whatever it gives reaches every loss.
        indices: of the data set, by stream position.
    """

    def __init__(
        self, run: Run, *, rank: int, last: str, indices: Callable[[Sequence[int]], list[int]]
    ) -> None:
        self._run = run
        self._rank = rank
        self._last = last
        self._indices = indices

    @contextmanager
    def of(self, trial: Trial) -> Iterator[None]:
        """While one trial lasts."""
        with ExitStack() as stack:
            for name in trial.tampering:
                self._begin(name, trial, stack)
            yield

    def _begin(self, name: str, trial: Trial, stack: ExitStack) -> None:
        module = trial.modules[0] if trial.modules else self._last
        if name in _PIXELS:
            changed = self._indices(trial.positions)
            CHANGED.update(dict.fromkeys(changed, _PIXELS[name]))
            stack.callback(CHANGED.clear)
        elif name == "misnamed":
            MISNAMED.update(self._indices(trial.positions))
            stack.callback(MISNAMED.clear)
        elif name in _STATE:
            prefix, change = _STATE[name]
            self._spoil(prefix, change, is_mine=not trial.ranks or self._rank in trial.ranks)
        elif name in _OPERATIONS:
            # Part of the model: the wider precision computes it as well.
            self._hook(module, _operation(_OPERATIONS[name]), stack, is_in_twin=True)
        elif name in _NARROW:
            self._hook(module, _operation(_NARROW[name]), stack, is_in_twin=False)
        elif self._rank in trial.ranks:
            make, is_lasting = _DEVICE[name]
            self._hook(self._last, make(), stack, is_in_twin=is_lasting)

    def _hook(self, module: str, hook: Any, stack: ExitStack, *, is_in_twin: bool) -> None:
        handle = self._run.engine.network.get_submodule(module).register_forward_hook(hook)
        stack.callback(handle.remove)
        twin = self._run.engine.twin
        wider = twin._wider
        if not is_in_twin or wider is None:
            return

        def make() -> Any:
            second = wider.make()
            second.network.get_submodule(module).register_forward_hook(hook)
            return second

        twin._wider = type(wider)(dtype=wider.dtype, make=make)
        stack.callback(setattr, twin, "_wider", wider)

    @torch.no_grad()
    def _spoil(self, prefix: str, change: Callable[[torch.Tensor], None], *, is_mine: bool) -> None:
        self._run.ring.before_update()
        held = [s for s in self._run.engine.shards() if s.name.startswith(prefix)]
        if prefix == "param/":  # the largest that this rank holds
            held = [max(held, key=lambda shard: shard.local.numel())]
        for shard in held if is_mine else []:
            change(shard.local)
        self._run.engine.finish_load(self._run.engine.update_counts())


def noisy_embeddings(size: float, seed: int) -> None:
    """All embeddings of this process as on a device whose kernels add in another order each time:
    no two computations alike, with a relative difference of ``size``."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.nn.Embedding.forward

    def forward(module: Any, tokens: torch.Tensor) -> torch.Tensor:
        output = exact(module, tokens)
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float64) * size
        return (output.double() * (1 + noise)).to(output.dtype)

    setattr(torch.nn.Embedding, "forward", forward)  # noqa: B010  # for the whole process


# -- state: by prefix of its name, and what is done to a shard of it ---------------------------


def _times(factor: float) -> Callable[[torch.Tensor], None]:
    def change(shard: torch.Tensor) -> None:
        shard.mul_(factor)

    return change


def _one_nan(shard: torch.Tensor) -> None:
    shard.view(-1)[shard.numel() // 2] = torch.nan


_STATE: dict[str, tuple[str, Callable[[torch.Tensor], None]]] = {
    "a matrix x 50": ("param/blocks.1.ffn.down.weight", _times(50.0)),
    "a shard x 100": ("param/", _times(100.0)),
    "a weight NaN": ("param/", _one_nan),
    "second moments x 1e-6": ("exp_avg_sq/", _times(1e-6)),
    "first moments x 1e5": ("exp_avg/", _times(1e5)),
}

# -- operations -------------------------------------------------------------------------------


def _operation(change: Change) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    return hook


def _in_half(output: torch.Tensor) -> torch.Tensor:
    """Scaled up and down again; in FP16 what is beyond 65504 is lost."""
    size = 1e6 / output.detach().abs().amax().clamp(min=1e-6)
    return (output * size).half().to(output.dtype) / size


def _log_of_exp(output: torch.Tensor) -> torch.Tensor:
    """Of numbers up to 300: FP32 has none beyond e**88, FP64 has them up to e**709."""
    size = 300.0 / output.detach().abs().amax().clamp(min=1e-6)
    return torch.log(torch.exp(output * size)) / size


def _infinite(output: torch.Tensor) -> torch.Tensor:
    """The largest number becomes infinite."""
    size = output.detach().abs()
    return torch.where(size >= size.amax(), torch.inf, output)


_OPERATIONS = {"FP16 inside": _in_half, "log of exp": _log_of_exp}
_NARROW = {"overflow": _infinite, "x 1e4": lambda output: output * 1e4}

# -- devices ----------------------------------------------------------------------------------


def _scaled(factor: float, times: int) -> Any:
    left = [times]

    def change(output: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        return output * factor if left[0] >= 0 else output

    return _operation(change)


def _gradient_scaled(factor: float, times: int) -> Any:
    left = [times]

    def change(output: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if left[0] >= 0 and output.requires_grad:
            output = output.view_as(output)
            output.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
        return output

    return _operation(change)


def _first_row_nan() -> Any:
    def change(output: torch.Tensor) -> torch.Tensor:
        gone = torch.zeros(len(output), dtype=torch.bool)
        gone[0] = True
        return torch.where(gone.view(-1, *[1] * (output.dim() - 1)), torch.nan, output)

    return _operation(change)


def _now_and_then() -> Any:
    """The first call, and half of those that follow."""
    dice, calls = random.Random(0), [0]

    def change(output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        is_bad = calls[0] == 1 or dice.random() < 0.5
        return output * 1e6 if is_bad else output

    return _operation(change)


def _some_samples() -> Any:
    """Of about one sample in eight, by its own numbers."""

    def change(output: torch.Tensor) -> torch.Tensor:
        first = output.detach().reshape(len(output), -1)[:, 0].double()
        bad = (first * 1e4).floor().long() % 8 == 0
        return torch.where(bad.view(-1, *[1] * (output.dim() - 1)), torch.nan, output)

    return _operation(change)


def _gradients_at_times() -> Any:
    """The first backward pass, and three in ten of those that follow."""
    dice, calls = random.Random(0), [0]

    def change(output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            calls[0] += 1
            factor = 1e6 if calls[0] == 1 or dice.random() < 0.3 else 1.0
            output = output.view_as(output)
            output.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]
        return output

    return _operation(change)


# What a sick device does, and whether it goes on.
_DEVICE: dict[str, tuple[Callable[[], Any], bool]] = {
    "activations x 1e6 once": (lambda: _scaled(1e6, 1), False),
    "gradients x 1e8 once": (lambda: _gradient_scaled(1e8, 1), False),
    "activations x 1e3": (lambda: _scaled(1e3, _FOR_EVER), True),
    "gradients x 1e6": (lambda: _gradient_scaled(1e6, _FOR_EVER), True),
    "first row NaN": (_first_row_nan, True),
    "now and then": (_now_and_then, True),
    "some samples": (_some_samples, True),
    "gradients at times": (_gradients_at_times, True),
}
