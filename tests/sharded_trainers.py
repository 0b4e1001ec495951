"""The trainers of tests/frameworks.py on FSDP2: Lightning's, Fabric's, Accelerate's plugin."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from tests import frameworks
from tests.frameworks import (
    ACCUMULATE,
    Ended,
    ScriptArguments,
    TinyNet,
    guarded_accelerate,
    loader_of,
    num_ranks,
    optimizer_and_schedule,
)


def sharded(net: TinyNet, mesh: Any) -> TinyNet:
    fully_shard(net.head, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def train_lightning(arguments: ScriptArguments) -> Ended:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from runner.integrations.lightning import GuardCallback

    class Module(LightningModule):
        def configure_model(self) -> None:
            torch.manual_seed(0)
            self.net = sharded(TinyNet(), self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    class Kill(Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            arguments.maybe_kill(trainer.global_step, guard.guard)

    torch.manual_seed(0)
    guard = GuardCallback(arguments.out, **arguments.settings)
    trainer = Trainer(
        max_epochs=2, accumulate_grad_batches=ACCUMULATE, gradient_clip_val=0.5,
        accelerator="cpu", devices=num_ranks(),
        strategy=ModelParallelStrategy(data_parallel_size=num_ranks(), tensor_parallel_size=1),
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[guard, Kill()],
    )  # fmt: skip
    trainer.fit(Module(), loader_of(arguments))
    schedule = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return Ended(
        state={"digest": guard.guard.state_digest(), "schedule": schedule},
        skipped=guard.guard.skipped,
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


def train_accelerate(arguments: ScriptArguments) -> Ended:
    """On CPUs Accelerate leaves its plugin out, so that the state is set as on GPUs."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
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
}

if __name__ == "__main__":
    frameworks.main()
