"""What the trials work on: the model and a few batches, as plain modules and tensors."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from runner.config.schema import RunConfig
from runner.engine.modes import in_evaluation
from runner.engine.optimizer import OptimizerSettings, ShardOptimizer
from runner.engine.protocol import Batch
from runner.model.blueprint import Blueprint
from runner.model.decoder import Decoder
from runner.model.loss import HeadLosses
from runner.model.objective import (
    INPUT,
    LABELS,
    SEGMENTS,
    DecoderObjective,
    GuestObjective,
    accepted_by,
    has_own_losses,
    logits_of,
)
from runner.startup.checks import Check, is_adapter, not_tried

_SEED = 1
_FEW_TRAINED = 0.05  # of the elements
Inputs = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and data under test.

    Args:
        config: the run's settings.
        blueprint: of the network; trials change copies only.
        batches: a few micro-batches of the run's own data, on ``device``.
        vocab_size: of the data; 0 where samples hold no tokens.
    """

    config: RunConfig
    blueprint: Blueprint
    batches: Sequence[Batch]
    device: torch.device
    vocab_size: int
    optimizer: OptimizerSettings

    @cached_property
    def network(self) -> nn.Module:
        """The network with the run's initial weights; do not change it."""
        torch.manual_seed(self.config.seed)
        network = self.blueprint.made().to(self.device)
        self.blueprint.finish(network, self.device)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                place = tuple(parameter.shape), 0, parameter.numel()
                fresh = self.blueprint.initial(self.config.seed, name, *place)
                parameter.copy_(fresh.view(parameter.shape))
        return network.float()

    def copy(self) -> nn.Module:
        """Copy the network into memory of its own."""
        return copy.deepcopy(self.network)

    @property
    def has_tokens(self) -> bool:
        inputs = self.batches[0].inputs()
        return INPUT in inputs and LABELS in inputs and inputs[INPUT].dim() == 2

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def inputs(self, rows: int, length: int | None = None, number: int = 0) -> Inputs:
        """The first rows of a batch; of tokens the first ``length`` columns."""
        tensors = {}
        for name, tensor in self.batches[number % len(self.batches)].inputs().items():
            cut = tensor[:rows]
            is_text = length is not None and self.has_tokens and tensor.dim() == 2
            tensors[name] = (cut[:, :length] if is_text else cut).clone()
        return tensors


def objective(network: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """The network under the run's loss, without the z-loss."""
    if isinstance(network, Decoder):
        return DecoderObjective(network, fp32=True, z_loss=0.0)
    # Logits are always held whole.
    losses = HeadLosses(fp32=True, z_loss=0.0, most_bytes=0)
    return GuestObjective(network, head_losses=losses, dtype=dtype)


def mean_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """The mean loss of what counts, a scalar; dropout draws the same each time."""
    torch.manual_seed(_SEED)
    _, training, counts, _ = model(inputs)
    loss: Tensor = training.sum() / counts.sum().clamp(min=1)
    return loss


def answers(network: nn.Module, inputs: Inputs, begin: int, end: int) -> Tensor:
    """The model's output at positions ``[begin, end)``: logits [B, n, V], or the loss there [B].

    The loss serves for a model that returns nothing else; then no other label counts.
    """
    if isinstance(network, Decoder):
        logits: Tensor = network(inputs[INPUT], inputs.get(SEGMENTS))
        return logits[:, begin:end]
    if has_own_losses(network):
        labels = torch.full_like(inputs[LABELS], -100)
        labels[:, begin:end] = inputs[LABELS][:, begin:end]
        own: Tensor = objective(network)({**inputs, LABELS: labels})[0]
        return own
    names = accepted_by(network.forward) - {INPUT, LABELS}
    output = network(inputs[INPUT], **{n: t for n, t in inputs.items() if n in names})
    given: Tensor = logits_of(output)
    return given[:, begin:end]


class Trainer:
    """A copy of the network and the run's optimizer, a step at a time.

    Args:
        network: the copy that it trains.
        with_dropout: whether each module is in its own mode, as in training.
        settings: an optimizer other than the run's.
    """

    def __init__(
        self,
        subject: Subject,
        network: nn.Module,
        *,
        with_dropout: bool,
        settings: OptimizerSettings | None = None,
    ) -> None:
        self._model = objective(network)
        if not with_dropout:
            in_evaluation(self._model)
        self._clip = subject.config.optim.clip
        trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
        self._trained = list(trained.values())
        self._never = torch.zeros((), device=subject.device)
        self._once = torch.ones((), device=subject.device)
        self._optimizer = ShardOptimizer(
            trained,
            {name: tuple(parameter.shape) for name, parameter in trained.items()},
            settings or subject.optimizer,
            subject.device,
            lambda _, rows: (rows, 0),
        )

    def step(self, inputs: Inputs, rate: float) -> float:
        """One update; gives the loss before it, NaN where it or a gradient is not finite."""
        for parameter in self._trained:
            parameter.grad = None
        loss = mean_loss(self._model, inputs)
        if not bool(torch.isfinite(loss)):
            return float("nan")
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._clip or float("inf"))
        if not bool(torch.isfinite(norm)):
            return float("nan")
        self._optimizer.step(skip=self._never, grad_scale=self._once, learning_rate=rate)
        return float(loss.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A name, the function to run, and whether it works on samples without tokens."""

    name: str
    try_it: Callable[[Subject], Check | Iterator[Check]]
    needs_tokens: bool = False


def tried(trials: Sequence[Trial], subject: Subject, seconds: float) -> Iterator[Check]:
    """Run each trial; one that raises, or for which no time is left, says so."""
    until = time.monotonic() + seconds
    for trial in trials:
        if trial.needs_tokens and not subject.has_tokens:
            yield not_tried(trial.name, "the samples hold no token ids with labels")
            continue
        if time.monotonic() > until:
            yield not_tried(trial.name, f"the {seconds:.0f} s were over before it")
            continue
        try:
            answer = trial.try_it(subject)
            checks = [answer] if isinstance(answer, Check) else list(answer)
        except Exception as error:  # from the user's forward, used in a new way
            cause = " ".join(str(error).split())[:200]
            checks = [not_tried(trial.name, f"{type(error).__name__}: {cause}")]
        yield from checks


def trains_adapters(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether the share or the names of trained parameters show adapters."""
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    few = _FEW_TRAINED * sum(parameter.numel() for parameter in parameters.values())
    is_few = sum(parameters[name].numel() for name in trained) < few
    return is_few or any(map(is_adapter, trained))
