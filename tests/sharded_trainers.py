"""The trainers of tests/frameworks.py on FSDP2: Lightning's, Fabric's, Accelerate's plugin, by
itself and in the Trainer of Hugging Face and in TRL's."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import fully_shard

from tests import frameworks
from tests.frameworks import (
    ACCUMULATE,
    Ended,
    ScriptArguments,
    TinyNet,
    Train,
    guarded_accelerate,
    guarded_lightning,
    lightning_module,
    loader_of,
    num_ranks,
    optimizer_and_schedule,
    tokens,
    train_hf,
    train_sft,
)


def sharded(net: TinyNet, mesh: Any) -> TinyNet:
    fully_shard(net.head, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def train_lightning(arguments: ScriptArguments) -> Ended:
    from lightning.pytorch.strategies import ModelParallelStrategy

    torch.manual_seed(0)
    module = lightning_module(None)

    def configure_model() -> None:
        torch.manual_seed(0)
        module.net = sharded(TinyNet(), module.device_mesh["data_parallel"])

    module.configure_model = configure_model
    strategy = ModelParallelStrategy(data_parallel_size=num_ranks(), tensor_parallel_size=1)
    trainer, guard = guarded_lightning(
        arguments, strategy=strategy, val_check_interval=18, num_sanity_val_steps=0
    )
    held_out = torch.utils.data.DataLoader(tokens(())[:8], batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, loader_of(arguments), held_out)
    schedule = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return Ended(
        state={"digest": guard.guard.state_digest(), "schedule": schedule},
        skipped=guard.guard.skipped,
        evaluated=module.evaluated,
    )


def train_fabric(arguments: ScriptArguments) -> Ended:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from runner import Guard

    strategy = ModelParallelStrategy(
        lambda net, mesh: sharded(net, mesh["data_parallel"]),
        data_parallel_size=num_ranks(),
        tensor_parallel_size=1,
    )
    fabric = Fabric(accelerator="cpu", devices=num_ranks(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(TinyNet())
    optimizer, schedule = optimizer_and_schedule(model)
    prepared = fabric.setup_optimizers(optimizer)
    guard = Guard(
        arguments.out, model=model, optimizer=prepared, scheduler=schedule, clip=0.5,
        accumulate=ACCUMULATE, **arguments.settings,
    )  # fmt: skip
    count = 0
    for _ in range(2):
        for batch in guard.over(fabric.setup_dataloaders(loader_of(arguments))):
            count += 1
            loss = model(batch)
            fabric.backward(loss)
            if count % ACCUMULATE == 0:
                arguments.maybe_kill(count // ACCUMULATE, guard)
                if guard.ok(loss):
                    prepared.step()
                    schedule.step()
                prepared.zero_grad()
            else:
                guard.note(loss)
    return _ended(guard, schedule)


def on_fsdp2(accelerator: Any, **policy: Any) -> None:
    """On CPUs Accelerate leaves its plugin out, so that the state is set as on GPUs."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)


def on_shards(train: Train) -> Train:
    """A trainer of Hugging Face, or of TRL, on FSDP2."""

    def train_sharded(arguments: ScriptArguments) -> Ended:
        from transformers import Trainer

        name = "create_accelerator_and_postprocess"
        begin = getattr(Trainer, name)

        def begin_sharded(trainer: Trainer) -> None:
            begin(trainer)
            kinds = ["LlamaDecoderLayer"]
            policy = {"auto_wrap_policy": "transformer_based_wrap"}
            on_fsdp2(trainer.accelerator, transformer_cls_names_to_wrap=kinds, **policy)
            trainer.is_fsdp_enabled = True

        with patch.object(Trainer, name, begin_sharded):
            return train(arguments)

    return train_sharded


def train_accelerate(arguments: ScriptArguments) -> Ended:
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    on_fsdp2(accelerator, auto_wrap_policy="size_based_wrap", min_num_params=100)
    guard, model, _, schedule = guarded_accelerate(accelerator, TinyNet(), arguments)
    assert any("DTensor" in type(one).__name__ for one in model.parameters())
    return _ended(guard, schedule)


def _ended(guard: Any, schedule: Any) -> Ended:
    guard.close()
    state = {"digest": guard.state_digest(), "schedule": schedule.state_dict()}
    return Ended(state=state, skipped=guard.skipped)


frameworks.FRAMEWORKS |= {
    "lightning_fsdp": train_lightning,
    "fabric_fsdp": train_fabric,
    "accelerate_fsdp": train_accelerate,
    "hf_fsdp": on_shards(train_hf),
    "sft_fsdp": on_shards(train_sft),
}

if __name__ == "__main__":
    frameworks.main()
