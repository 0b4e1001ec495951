"""Training scripts in other frameworks, each with a guard.

Called by tests in one process, or on several: ``torchrun frameworks.py FRAMEWORK OUT TODO...``.
TODO: ``poison`` (KILL_AT in the environment: rank 1 is killed in that step, of a list in one of
each start), ``calm`` (the same, and nobody is killed), ``told`` (told to skip what that run
skipped), ``bare`` (the Hugging Face trainers without a guard). RULES: JSON of more rules. Each rank
leaves ``rankN.json`` in OUT. MORE, PATIENCE: JSON of these :class:`ScriptArguments`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.ranked import in_turn

RULES: dict[str, Any] = {"every": 4, "clean_after": 2, "min_history": 8}
NUM, BAD_TOKEN, MICRO, ACCUMULATE = 128, 31, 2, 2  # samples a rank; in a batch; batches a step
BAD = range(72, 84)  # three steps in a row, on one rank
SCATTERED = (72, 73)  # where the framework shuffles
# The same steps on two ranks that take batches in turn, the second one's alone.
BAD_OF_SECOND = range(146, 170, 4)


class Killed(Exception):
    pass


def _raise() -> None:
    raise Killed


@dataclass(frozen=True, kw_only=True)
class ScriptArguments:
    """The arguments of a script.

    ``bad``: samples that are poisoned; ``kill_at``: the step before which ``kill`` is called;
    ``stop_at``: the step in whose evaluation a stop is asked for; ``patience``: evaluations without
    a better one after which the framework ends by itself; ``more``: settings of its trainer.
    """

    out: Path
    bad: Sequence[int] = BAD
    shuffle: bool = False
    fp16: bool = False
    kill_at: int | None = None
    stop_at: int | None = None
    patience: int | None = None
    more: dict[str, Any] = field(default_factory=dict)
    kill: Callable[[], None] = _raise
    skip: Sequence[Any] | None = None
    bare: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return RULES if self.skip is None else {**RULES, "skip": self.skip}

    def maybe_stop(self, step: int, guard: Any) -> None:
        if step == self.stop_at:
            guard._run.group.stop.ask("SIGTERM")

    def maybe_kill(self, step: int, guard: Any) -> None:
        if step == self.kill_at:
            if self.kill is _raise:
                guard._finalizer()  # as a process that is gone, but for its lease
            self.kill()


@dataclass(kw_only=True)
class Ended:
    """The final state, the skipped batches, and the losses of evaluations by step."""

    state: dict[str, Any]
    evaluated: dict[int, float] = field(default_factory=dict)
    skipped: list[tuple[int, int]] = field(default_factory=list)


def tokens(bad: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    num = NUM * num_ranks()
    samples = [torch.randint(0, BAD_TOKEN, (8,), generator=generator) for _ in range(num)]
    for number in bad:
        samples[number][0] = BAD_TOKEN
    return samples


def loader_of(arguments: ScriptArguments) -> Any:
    return torch.utils.data.DataLoader(
        tokens(arguments.bad),  # type: ignore[arg-type]
        batch_size=MICRO,
        shuffle=arguments.shuffle,
    )


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def half_precision(accelerator: Any) -> torch.amp.GradScaler:
    """FP16 on a CPU, where Accelerate computes in FP32 without a word. It overflows at first."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=6)
    return accelerator.scaler


class TinyNet(nn.Module):
    """The trainer class with a loss that is NaN for the bad token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.drop(self.embed(ids)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss * (float("nan") if (ids == BAD_TOKEN).any() else 1.0)


def optimizer_and_schedule(net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


def state_of(model: nn.Module, optimizer: Any, schedule: Any, scaler: Any = None) -> dict[str, Any]:
    return {
        "scaler": scaler and scaler.state_dict(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }


# -- Hugging Face -----------------------------------------------------------------------------


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def hf_arguments(arguments: ScriptArguments) -> dict[str, Any]:
    return {
        "output_dir": str(arguments.out / "hf"), "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATE, "num_train_epochs": 2, "learning_rate": 1e-2,
        "warmup_steps": 3, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "logging_strategy": "no", "seed": 5, "ddp_backend": "gloo" if num_ranks() > 1 else None,
        "fp16": arguments.fp16, "bf16": False,
    }  # fmt: skip


def poisoned(trainer: type) -> type:
    """A trainer whose loss is NaN where any of its inputs has the bad token."""

    class Poisoned(trainer):  # type: ignore[misc,valid-type]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *rest, **named)
            if not model.training:
                return loss
            ids = [one for name, one in inputs.items() if name.endswith("ids")]
            is_bad = any(torch.is_tensor(one) and bool((one == BAD_TOKEN).any()) for one in ids)
            return loss * (float("nan") if is_bad else 1.0)

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if self.args.fp16:
                half_precision(self.accelerator)

    return Poisoned


def fit_hf(trainer: Any, arguments: ScriptArguments) -> Ended:
    """Train with a guard and with a callback that kills the process, or with neither."""
    from transformers import EarlyStoppingCallback, TrainerCallback

    from runner.integrations.hf import guard_trainer

    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            arguments.maybe_kill(state.global_step, guarded.guard)

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if args.gradient_accumulation_steps == 1:
                arguments.maybe_kill(state.global_step, guarded.guard)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            arguments.maybe_stop(state.global_step, guarded.guard)

    if arguments.patience:
        trainer.args.metric_for_best_model, trainer.args.greater_is_better = "loss", False
        trainer.add_callback(EarlyStoppingCallback(arguments.patience))
    if not arguments.bare:
        trainer.add_callback(Kill())
        guarded = guard_trainer(trainer, arguments.out, **arguments.settings)
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    evaluated = {row["step"]: row["eval_loss"] for row in rows}
    state = state_of(model, optimizer, trainer.lr_scheduler, trainer.accelerator.scaler)
    if trainer.is_fsdp_enabled:
        state = {"digest": guarded.guard.state_digest(), "schedule": state["schedule"]}
    skipped = [] if arguments.bare else guarded.guard.skipped
    return Ended(state=state, skipped=skipped, evaluated=evaluated)


def train_hf(script: ScriptArguments, model: nn.Module | None = None) -> Ended:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": ids, "labels": ids} for ids in tokens(script.bad)]
    settings = {**hf_arguments(script), "eval_strategy": "steps", "eval_steps": 9, **script.more}
    arguments = TrainingArguments(**settings)
    trainer = poisoned(Trainer)(
        model=model or tiny_llama(), args=arguments, train_dataset=data, eval_dataset=data[:8]
    )
    return fit_hf(trainer, script)


def train_qlora(script: ScriptArguments) -> Ended:
    """The Trainer on adapters over a base of 4 bits."""
    from tests.quantised_script import adapted, write_base

    folder = script.out.with_name(f"base{os.environ.get('RANK', '')}")
    write_base(folder)
    return train_hf(script, adapted(folder, "nf4"))


def train_sft(script: ScriptArguments) -> Ended:
    """TRL's trainer, on tokenized rows."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"input_ids": ids.tolist()} for ids in tokens(script.bad)])
    arguments = SFTConfig(
        **hf_arguments(script), max_length=8, dataset_kwargs={"skip_prepare_dataset": True}
    )
    trainer = poisoned(SFTTrainer)(
        model=tiny_llama(), args=arguments, train_dataset=rows, processing_class=_tokenizer()
    )
    return fit_hf(trainer, script)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{number}": number for number in range(32)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")),
        pad_token="t0",
        eos_token="t1",
    )


# -- Lightning --------------------------------------------------------------------------------


def lightning_module(net: nn.Module | None) -> Any:
    """A module around ``net``; it may be made later. ``evaluated``: losses by step."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.evaluated = net, {}

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = self.net(batch)
            self.log("train_loss", loss.nan_to_num(), on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            self.evaluated[self.trainer.global_step] = float(self.net(batch))
            self.log("eval_loss", self.evaluated[self.trainer.global_step])

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_and_schedule(self)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    return Module()


def guarded_lightning(arguments: ScriptArguments, **more: Any) -> tuple[Any, Any]:
    """A trainer with a guard, and with a callback that kills the process; and the guard."""
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import EarlyStopping

    from runner.integrations.lightning import GuardCallback

    class Kill(Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            arguments.maybe_stop(trainer.global_step, guard.guard)

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            arguments.maybe_kill(trainer.global_step, guard.guard)

    guard = GuardCallback(arguments.out, **arguments.settings)
    settings = {
        "max_epochs": 2, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.5,
        "accelerator": "cpu", "devices": num_ranks(), "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        **more, **arguments.more,
    }  # fmt: skip
    stops_by, patience = settings.pop("stops_by", "eval_loss"), arguments.patience
    stopping = [EarlyStopping(stops_by, patience=patience)] if patience else []
    trainer = Trainer(callbacks=[Kill(), guard, *stopping], **settings)
    return trainer, guard


def train_lightning(arguments: ScriptArguments) -> Ended:
    from lightning.pytorch.plugins import MixedPrecision

    torch.manual_seed(0)
    module = lightning_module(TinyNet())
    # With precision="16-mixed" Lightning takes BF16 on a CPU.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=6)
    trainer, guard = guarded_lightning(
        arguments, strategy="ddp" if num_ranks() > 1 else "auto",
        val_check_interval=18, num_sanity_val_steps=0,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if arguments.fp16 else None,
    )  # fmt: skip
    held_out = torch.utils.data.DataLoader(tokens(())[:8], batch_size=4)  # type: ignore[arg-type]
    trainer.fit(module, loader_of(arguments), held_out)
    schedule = trainer.lr_scheduler_configs[0].scheduler
    state = state_of(module, trainer.optimizers[0], schedule, arguments.fp16 and scaler)
    return Ended(state=state, skipped=guard.guard.skipped, evaluated=module.evaluated)


def train_fabric(arguments: ScriptArguments) -> Ended:
    from lightning.fabric import Fabric

    from runner import Guard

    fabric = Fabric(
        accelerator="cpu", devices=num_ranks(), strategy="ddp" if num_ranks() > 1 else "auto"
    )
    fabric.launch()
    torch.manual_seed(0)
    net = TinyNet()
    optimizer, schedule = optimizer_and_schedule(net)
    model, prepared = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(loader_of(arguments))
    guard = Guard(
        arguments.out, model=model, optimizer=prepared, scheduler=schedule, clip=0.5,
        accumulate=ACCUMULATE, **arguments.settings,
    )  # fmt: skip
    count = 0
    for _ in range(2):
        for batch in guard.over(loader):
            count += 1
            is_whole = count % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not is_whole):
                loss = model(batch)
                fabric.backward(loss)
            if is_whole:
                arguments.maybe_kill(count // ACCUMULATE, guard)
                if guard.ok(loss):
                    prepared.step()
                    schedule.step()
                prepared.zero_grad()
    ended = Ended(state=state_of(net, optimizer, schedule), skipped=guard.skipped)
    guard.close()
    return ended


# -- Accelerate -------------------------------------------------------------------------------


def train_accelerate(arguments: ScriptArguments) -> Ended:
    from accelerate import Accelerator

    torch.manual_seed(0)
    precision = "fp16" if arguments.fp16 else "no"
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATE, mixed_precision=precision
    )
    scaler = half_precision(accelerator) if arguments.fp16 else None
    net = TinyNet()
    guard, _, optimizer, schedule = guarded_accelerate(accelerator, net, arguments)
    ended = Ended(state=state_of(net, optimizer, schedule, scaler), skipped=guard.skipped)
    guard.close()
    return ended


def guarded_accelerate(
    accelerator: Any, net: nn.Module, arguments: ScriptArguments
) -> tuple[Any, Any, Any, Any]:
    """Two passes; the guard, the prepared model, the optimizer and the schedule."""
    from runner.integrations.accelerate import guard_prepared

    optimizer, schedule = optimizer_and_schedule(net)
    model, prepared, loader, scheduler = accelerator.prepare(
        net, optimizer, loader_of(arguments), schedule
    )
    guard = guard_prepared(
        accelerator, arguments.out, model=model, optimizer=prepared, scheduler=scheduler, clip=0.5,
        **arguments.settings,
    )  # fmt: skip
    count = 0
    for _ in range(2):
        for batch in guard.over(loader):
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    count += 1
                    arguments.maybe_kill(count, guard)
                    if guard.ok(loss):
                        prepared.step()
                        scheduler.step()
                    prepared.zero_grad()
    return guard, model, optimizer, schedule


Train = Callable[[ScriptArguments], Ended]
FRAMEWORKS: dict[str, Train] = {
    "hf": train_hf,
    "sft": train_sft,
    "qlora": train_qlora,
    "lightning": train_lightning,
    "fabric": train_fabric,
    "accelerate": train_accelerate,
}


def digest(value: Any) -> str:
    """SHA-256 over a nested state, bit for bit."""
    sha256 = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            sha256.update(f"{one.dtype}{tuple(one.shape)}".encode())
            sha256.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        elif isinstance(one, dict):
            for key in sorted(one, key=repr):
                sha256.update(repr(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for inner in one:
                add(inner)
        else:
            sha256.update(repr(one).encode())

    add(value)
    return sha256.hexdigest()


def main() -> None:
    name, folder, *todo = sys.argv[1:]
    rank, start = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    kill_at = dict(enumerate(map(int, os.environ.get("KILL_AT", "-1").split(",")))).get(start)
    RULES.update(json.loads(os.environ.get("RULES", "{}")))
    shuffle = (
        name != "accelerate" and "torchtitan" not in name
    )  # so that samplers count passes; Lightning always does
    bad: Sequence[int] = SCATTERED if shuffle else BAD_OF_SECOND

    def run(name_of_run: str, skipped: list[Any]) -> dict[str, Any]:
        is_bad = name_of_run in ("poison", "calm")
        arguments = ScriptArguments(
            out=Path(folder) / f"{name}-{name_of_run}",
            bad=bad if is_bad else (),
            shuffle=shuffle,
            fp16=bool(os.environ.get("FP16")),
            skip=skipped if name_of_run == "told" else None,
            bare=name_of_run == "bare",
            kill_at=kill_at if name_of_run == "poison" and rank == 1 else None,
            kill=lambda: os.kill(os.getpid(), signal.SIGKILL),
            more=json.loads(os.environ.get("MORE", "{}")),
            patience=int(os.environ.get("PATIENCE", "0")),
        )
        ended = FRAMEWORKS[name](arguments)
        return {"digest": digest(ended.state), "skipped": ended.skipped}

    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(in_turn(todo, run)))
    if torch.distributed.is_initialized():  # the framework's
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
