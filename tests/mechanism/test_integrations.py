"""The guard under other frameworks: poisoned, killed and resumed is told to skip, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.startup.shared_memory import MEMORY_DIR
from runner.system.error import ConfigError
from tests.mechanism.test_guard_loop import Killed, journal, same

RULES: dict[str, Any] = {"every": 4, "clean_after": 2, "min_history": 8}
NUM, BAD_TOKEN = 128, 31  # samples; 2 in a batch, 2 batches in a step: 32 steps an epoch
BAD = range(72, 84)  # three steps in a row
SCATTERED = (72, 73)  # where the framework shuffles


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(MEMORY_DIR, str(folder))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def tokens(*, poison: bool, bad: Sequence[int] = BAD) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(0, BAD_TOKEN, (8,), generator=generator) for _ in range(NUM)]
    for number in bad if poison else ():
        made[number][0] = BAD_TOKEN
    return made


class TinyNet(nn.Module):
    """NaN wherever the bad token stands."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.drop(self.embed(ids)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss * (float("nan") if (ids == BAD_TOKEN).any() else 1.0)


# -- Hugging Face -----------------------------------------------------------------------------


def train_hf(
    out: Path, *, poison: bool = True, kill_at: int | None = None, **told: Any
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    pytest.importorskip("transformers")
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from runner.integrations.hf import guard_trainer

    class Poisoned(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *rest, **named)
            return loss * (float("nan") if (inputs["input_ids"] == BAD_TOKEN).any() else 1.0)

    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == kill_at:
                guarded.guard._finalizer()
                raise Killed

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=str(out / "hf"), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_train_epochs=2, learning_rate=1e-2, warmup_steps=3, lr_scheduler_type="cosine",
        max_grad_norm=0.5, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", seed=5,
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(poison=poison, bad=SCATTERED)]
    trainer = Poisoned(model=model, args=arguments, train_dataset=data, callbacks=[Kill()])  # type: ignore[arg-type]
    guarded = guard_trainer(trainer, out, **RULES, **told)
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
    }
    return state, guarded.guard.skipped


# -- Lightning --------------------------------------------------------------------------------


def train_lightning(
    out: Path, *, poison: bool = True, kill_at: int | None = None, **told: Any
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    pytest.importorskip("lightning")
    from lightning.pytorch import Callback, LightningModule, Trainer

    from runner.integrations.lightning import GuardCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = TinyNet()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    class Kill(Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == kill_at:
                guard.guard._finalizer()
                raise Killed

    torch.manual_seed(0)
    module, guard = Module(), GuardCallback(out, **RULES, **told)
    trainer = Trainer(
        max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, accelerator="cpu",
        devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[guard, Kill()],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(tokens(poison=poison), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, loader)
    state = {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    }
    return state, guard.guard.skipped


# -- Accelerate -------------------------------------------------------------------------------


def train_accelerate(
    out: Path, *, poison: bool = True, kill_at: int | None = None, **told: Any
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from runner.integrations.accelerate import guard_prepared

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = TinyNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    loader = torch.utils.data.DataLoader(tokens(poison=poison), batch_size=2)  # type: ignore[arg-type]
    model, prepared, loader, scheduler = accelerator.prepare(net, optimizer, loader, schedule)
    guard = guard_prepared(
        accelerator, out, model=model, optimizer=prepared, scheduler=scheduler, clip=0.5,
        **RULES, **told,
    )  # fmt: skip
    count = 0
    for _ in range(2):
        for batch in guard.over(loader):
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                count += 1
                if count == kill_at:
                    guard._finalizer()
                    raise Killed
                if accelerator.sync_gradients:
                    if guard.ok(loss):
                        prepared.step()
                        scheduler.step()
                    prepared.zero_grad()
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }
    skipped = guard.skipped
    guard.close()
    return state, skipped


Train = Callable[..., tuple[dict[str, Any], list[tuple[int, int]]]]
FRAMEWORKS: Sequence[Any] = [train_hf, train_lightning, train_accelerate]


@pytest.mark.parametrize("train", FRAMEWORKS)
def test_poisoned_killed_and_resumed_is_told_to_skip(tmp_path: Path, train: Train) -> None:
    for kill_at in (21, 47):
        with pytest.raises(Killed):
            train(tmp_path / "a", kill_at=kill_at)
    killed, skipped = train(tmp_path / "a")
    told, others = train(tmp_path / "b", skip=skipped)
    assert skipped == others and skipped
    assert journal(tmp_path / "a", "discard")
    assert train is train_hf or len(journal(tmp_path / "a", "rollback")) == 2  # one an epoch
    assert not journal(tmp_path / "b", "discard") and not journal(tmp_path / "b", "rollback")
    same(killed, told)


def test_the_private_names_are_still_there() -> None:
    pytest.importorskip("transformers")
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer

    assert "_is_overflow" in inspect.getsource(AcceleratedOptimizer.step_was_skipped.fget)
    loop = inspect.getsource(Trainer)
    order = ["self.training_step(", "on_pre_optimizer_step", "self.optimizer.step()"]
    order += ["optimizer_step_was_skipped", "self.lr_scheduler.step()", "on_step_end"]
    found = [loop.find(word) for word in order]
    assert -1 not in found
    assert "self.args.max_grad_norm > 0" in loop


def test_what_cannot_be_guarded_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer

    from runner.integrations.lightning import GuardCallback

    module = LightningModule()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="manual"):
        GuardCallback(tmp_path).on_fit_start(Trainer(accelerator="cpu", logger=False), module)
