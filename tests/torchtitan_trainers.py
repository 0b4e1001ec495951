"""torchtitan's Trainer around a small Llama, on CPUs with gloo: FSDP2, tensor parallelism.

What torchtitan asks of a GPU is replaced in :func:`on_cpus`; all else is its own.
torchtitan is no part of the test environment, whose datasets it refuses: pip install --no-deps
torchtitan==0.3.0 and its needs (tyro, einops, spmd_types, torch_checkpointing, grain, triton).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from tests import frameworks
from tests.frameworks import ACCUMULATE, BAD_TOKEN, MICRO, Ended, ScriptArguments, tokens

STEPS, VALIDATED = 28, 27


def on_cpus() -> Any:
    """The module of the Trainer, where torchtitan's device is the CPU."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu
    utils.get_local_device = lambda: torch.device("cpu")
    torch.cpu.set_device = lambda device: None  # type: ignore[attr-defined]
    from torchtitan import trainer
    from torchtitan.components import metrics

    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and hasattr(module, "device_type"):
            module.device_type, module.device_module = "cpu", torch.cpu  # type: ignore[attr-defined]
    metrics.build_device_memory_monitor = _Memory
    trainer.dist_utils.set_pg_timeouts = lambda **given: None  # gloo has none to set
    trainer.Trainer.Config.to_dict = lambda config: {}  # of a loader that is no configuration
    return trainer


class _Memory:
    """Of a device that has none to watch."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        names = ("max_active_gib", "max_active_pct", "max_reserved_gib", "max_reserved_pct")
        return SimpleNamespace(**dict.fromkeys(names, 0), num_alloc_retries=0, num_ooms=0)

    def reset_peak_stats(self) -> None:
        pass


class Batches(torch.utils.data.IterableDataset[Any]):
    """Those of a rank of two, again and again; what is learned is the token before."""

    def __init__(self, samples: list[torch.Tensor], rank: int) -> None:
        self._own = torch.stack(samples).unflatten(0, (-1, MICRO))[rank::2].flatten(0, 1)
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            ids = self._own[self._at % len(self._own)]
            self._at += 1
            yield {"input": ids}, ids.roll(1)

    def state_dict(self) -> dict[str, Any]:
        """As torchtitan's own data sets have it."""
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


@dataclass
class LoaderConfig:
    samples: list[torch.Tensor]
    infinite: bool = True

    def build(self, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **rest: Any) -> Any:
        from torchtitan.components.dataloader import ParallelAwareDataloader

        data = Batches(self.samples, 1 if dp_world_size == 1 else dp_rank)  # 1 has the bad ones
        return ParallelAwareDataloader(data, dp_rank, dp_world_size, batch_size=local_batch_size)


def build(arguments: ScriptArguments, tensor_parallel: int) -> Any:
    """The Trainer; a step has as many batches as in other frameworks."""
    module = on_cpus()
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

    config = llama3_debugmodel_ce_loss()
    config.dataloader = LoaderConfig(tokens(arguments.bad))
    validator = config.validator
    validator.enable, validator.steps, validator.freq = True, 2, VALIDATED // 3
    validator.dataloader = LoaderConfig(tokens(()))
    config.tokenizer = SimpleNamespace(build=lambda **given: None)
    config.dump_folder = str(arguments.out / "torchtitan")
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex needs a GPU
    training, parallelism = config.training, config.parallelism
    parallelism.tensor_parallel_degree = tensor_parallel
    parallelism.spmd_backend = "partial_dtensor"
    ranks = frameworks.num_ranks() // tensor_parallel
    training.seq_len, training.steps, training.max_norm = 8, STEPS, 0.5
    training.local_batch_size, training.global_batch_size = MICRO, MICRO * ACCUMULATE * ranks
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    trainer = module.Trainer(config)
    for one in trainer.model_parts[0].modules():
        if isinstance(one, FSDPModule):  # gloo cannot multiply before it sums
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)
    return trainer


def train(arguments: ScriptArguments, tensor_parallel: int = 1) -> Ended:
    from runner.integrations.torchtitan import GuardedTitan

    trainer = build(arguments, tensor_parallel)
    guarded = GuardedTitan(trainer, arguments.out, **arguments.settings)
    loss_of, calls = trainer.loss_fn, itertools.count(1)

    def poisoned(output: Any, labels: torch.Tensor, *rest: Any, **named: Any) -> Any:
        number, left = divmod(next(calls), ACCUMULATE)
        if not left:
            arguments.maybe_kill(number, guarded.guard)
        loss, metrics = loss_of(output, labels, *rest, **named)
        return loss * (float("nan") if (labels == BAD_TOKEN).any() else 1.0), metrics

    trainer.loss_fn, validated = poisoned, trainer.validator.loss_fn

    def asking(*given: Any, **named: Any) -> Any:
        """The second start is asked to stop, in its last validation."""
        if trainer.step == VALIDATED and 0 < guarded.guard.resumed_step < VALIDATED:
            guarded.guard._run.group.stop.ask("SIGTERM")
        return validated(*given, **named)

    trainer.validator.loss_fn = asking
    trainer.train()
    guard = guarded.guard
    state = {
        "digest": guard.state_digest(),
        "schedule": trainer.lr_schedulers.state_dict(),
        "steps": [trainer.step, guard.updates],
    }
    trainer.close()
    return Ended(state=state, skipped=guard.skipped)


frameworks.FRAMEWORKS |= {
    "torchtitan": train,
    "torchtitan_tp": lambda arguments: train(arguments, tensor_parallel=2),
}

if __name__ == "__main__":
    frameworks.main()
