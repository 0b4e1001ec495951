"""The Trainer of Hugging Face with callbacks and overrides, as its users write them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import parts
import torch
from parts import BATCH, DEFECT, RANK, SAMPLES, SEED, VARIANT, WORLD
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments

DEFECTS = {
    "moments", "step_counts", "rng", "epoch_seed", "sampler_restarted", "batch_skipped",
    "batch_repeated", "lr_reset", "weights_bf16", "ema_lost", "worker_seeds", "shuffle_buffer",
    "older_checkpoint", "older_whole", "param_groups", "batchnorm", "optimizer_file_lost",
    "save_only_model", "other_rank",
}  # fmt: skip
VARIANTS = {"workers", "stream", "accumulate", "bf16"}


class Classifier(nn.Module):
    _keys_to_ignore_on_save = None  # a model of theirs has it, and the Trainer asks for it

    def __init__(self) -> None:
        super().__init__()
        self.net = parts.Net()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(parts.Samples):
    """Noise that a sample always gets alike: drawn by its number."""

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        noise = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs + 0.3 * noise, "labels": label}


class NoisyRows(parts.Noisy):
    """Noise from the data worker's generator, which nobody can save."""

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return {"inputs": inputs, "labels": label}


def _endless() -> Iterator[dict[str, Any]]:
    rows = Rows()
    for number in range(1000 * SAMPLES):
        row = rows[number % SAMPLES]
        yield {"inputs": row["inputs"].tolist(), "labels": int(row["labels"])}


class CountingSampler(Sampler[int]):
    """Shuffles by how often it was asked for, in this process."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        seeded = torch.Generator().manual_seed(SEED + self.epoch)
        yield from torch.randperm(SAMPLES, generator=seeded).tolist()


class Ema(TrainerCallback):
    """Averages the weights, and keeps the average beside the checkpoint."""

    def __init__(self) -> None:
        self.model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.model = copy.deepcopy(named["model"])
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "ema.pt"
        if path.exists() and DEFECT != "ema_lost":
            self.model.load_state_dict(parts.read(path))

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        parts.average_into(self.model, named["model"])

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if RANK == 0:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            parts.write(self.model.state_dict(), folder / "ema.pt")


class Report(TrainerCallback):
    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        parts.report(state.global_step, self.trainer.last_loss)


class OurTrainer(Trainer):
    last_loss = torch.zeros(())

    def compute_loss(self, *rest: Any, **named: Any) -> Any:
        loss = super().compute_loss(*rest, **named)
        self.last_loss = (loss[0] if isinstance(loss, tuple) else loss).detach()
        return loss

    def create_optimizer(self, *rest: Any) -> Any:
        if self.optimizer is None:
            resumes = _newest(Path(self.args.output_dir)) is not None
            swapped = DEFECT == "param_groups" and resumes
            groups = parts.groups_of(self.model.net, swapped=swapped)
            self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate)
        return self.optimizer

    def _get_train_sampler(self, *rest: Any) -> Any:
        return CountingSampler() if DEFECT == "epoch_seed" else super()._get_train_sampler(*rest)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        state = parts.weights(state_dict or self.model.state_dict())
        super()._save(output_dir, state_dict=state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if DEFECT == "older_checkpoint":
            first = sorted(Path(self.args.output_dir).glob("checkpoint-*"))[-1]
            self.model.load_state_dict(load_file(first / "model.safetensors"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        fresh = copy.deepcopy(self.lr_scheduler.state_dict())
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if DEFECT == "lr_reset":
            self.lr_scheduler.load_state_dict(fresh)
        if DEFECT == "moments":
            getattr(self.optimizer, "optimizer", self.optimizer).state.clear()
        if DEFECT == "step_counts":
            for one in self.optimizer.state.values():
                one["step"].zero_()


def _newest(out: Path) -> Path | None:
    """The newest checkpoint that was written to its end: the average comes last."""
    whole = [path.parent for path in out.glob("checkpoint-*/ema.pt")]
    return max(whole, key=parts.number_of, default=None)


def _spoil(checkpoint: Path) -> None:
    """What somebody deletes to make a checkpoint smaller, or copies to make it load."""
    if DEFECT == "rng":
        (checkpoint / (f"rng_state_{RANK}.pth" if WORLD > 1 else "rng_state.pth")).unlink()
    if DEFECT == "optimizer_file_lost":
        (checkpoint / "optimizer.pt").unlink()
    if DEFECT == "other_rank" and RANK == 1:
        shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")


def data_of(checkpoint: Path | None) -> tuple[Any, bool]:
    """The data set, and whether the Trainer is to leave out what was read before the checkpoint."""
    if VARIANT != "stream":
        data = NoisyRows() if DEFECT == "worker_seeds" else Rows()
        return data, DEFECT != "sampler_restarted"
    rows = datasets.IterableDataset.from_generator(_endless).with_format("torch")
    if DEFECT not in {"batch_skipped", "batch_repeated", "shuffle_buffer"}:
        return rows.shuffle(seed=SEED, buffer_size=16), True
    if checkpoint is None:
        return rows.shuffle(seed=SEED, buffer_size=16), False
    done = parts.number_of(checkpoint)
    if DEFECT == "shuffle_buffer":  # skipped before it is shuffled
        return rows.skip(done * BATCH).shuffle(seed=SEED, buffer_size=16), False
    done += 1 if DEFECT == "batch_skipped" else -1
    return rows.shuffle(seed=SEED, buffer_size=16).skip(done * BATCH), False


def main() -> None:
    settings = parts.settings(defects=DEFECTS, variants=VARIANTS)
    parts.seed_everything(SEED)
    checkpoint = _newest(settings.out)
    if checkpoint is not None and DEFECT == "older_whole":
        checkpoint = sorted(settings.out.glob("checkpoint-*"))[-1]
    if checkpoint is not None:
        _spoil(checkpoint)
    data, skips = data_of(checkpoint)
    arguments = TrainingArguments(
        output_dir=str(settings.out), max_steps=settings.steps, save_steps=settings.save_every,
        per_device_train_batch_size=BATCH, learning_rate=1e-2, warmup_steps=10,
        lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 0.45}, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_strategy="no", seed=SEED,
        remove_unused_columns=False, ignore_data_skip=not skips, bf16=VARIANT == "bf16",
        gradient_accumulation_steps=2 if VARIANT == "accumulate" else 1,
        dataloader_num_workers=int(VARIANT == "workers"),
        save_only_model=DEFECT == "save_only_model",
        ddp_backend="gloo" if WORLD > 1 else None,
    )  # fmt: skip
    ema, report = Ema(), Report()
    trainer = OurTrainer(
        model=Classifier(), args=arguments, train_dataset=data, callbacks=[ema, report]
    )
    report.trainer = trainer
    parts.seed_everything(SEED + RANK)  # the Trainer seeds all ranks alike
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    model = trainer.accelerator.unwrap_model(trainer.model)
    parts.report_digest(
        model.state_dict(), ema.model.state_dict(), trainer.optimizer.state_dict()["state"]
    )


if __name__ == "__main__":
    main()
