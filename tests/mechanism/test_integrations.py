"""The guard under other frameworks: poisoned, killed and resumed is told to skip, bit for bit."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from runner import Guard
from runner.startup.shared_memory import MEMORY_DIR
from runner.system.error import ConfigError, Preempted
from tests import frameworks
from tests.frameworks import BAD, FRAMEWORKS, RULES, SCATTERED, Killed, ScriptArguments, tiny_llama
from tests.mechanism.test_guard_loop import journal, same
from tests.rows import full, full_but
from tests.run import read_lines

NEEDS = {
    "hf": "transformers",
    "sft": "trl",
    "qlora": "bitsandbytes",
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
    "torchtitan": "torchtitan",
}


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(MEMORY_DIR, str(folder))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    if find_spec("accelerate"):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()  # it holds the precision for the process


def poisoned_and_killed(
    tmp_path: Path, name: str, *, shuffle: bool, kills: tuple[int, ...], fp16: bool = False
) -> list[tuple[int, int]]:
    """Trained on bad samples and killed, against told to skip; what was skipped."""
    train, bad = FRAMEWORKS[name], SCATTERED if shuffle else BAD
    arguments = ScriptArguments(out=tmp_path / "a", bad=bad, shuffle=shuffle, fp16=fp16)
    for kill_at in kills:
        with pytest.raises(Killed):
            train(replace(arguments, kill_at=kill_at))
    killed = train(arguments)
    other = train(replace(arguments, out=tmp_path / "b", bad=(), skip=killed.skipped))
    assert killed.skipped == other.skipped and killed.skipped
    assert journal(tmp_path / "a", "discard")
    assert not journal(tmp_path / "b", "discard") and not journal(tmp_path / "b", "rollback")
    same(killed.state, other.state)
    if fp16:
        ends = [json.loads((tmp_path / run / "summary.json").read_text()) for run in "ab"]
        updates = {end["steps"] for end in ends}
        # No overflow is an incident, and none is an update.
        assert len(updates) == 1 and updates.pop() + sum(b - a for a, b in killed.skipped) // 2 < 64
        assert 1 <= killed.state["scaler"]["scale"] < 2.0**24
    return killed.skipped


@pytest.mark.parametrize(
    ("name", "fp16"),
    [
        *(("hf", False), ("qlora", False), ("lightning", False), ("fabric", False)),
        # Always on two ranks: tests/drills/test_frameworks.py.
        *(full("sft", False), full("accelerate", False), full("lightning", True)),
        *(("accelerate", True), full("hf", True)),
    ],
)
def test_poisoned_killed_and_resumed_is_told_to_skip(tmp_path: Path, name: str, fp16: bool) -> None:
    """In FP16 the scale is state: rolled back, resumed, and not changed by a refused step."""
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    is_hf = name in ("hf", "sft")  # which shuffles by itself
    # Steps of the whole run where the framework reads its data anew, else of this start.
    kills = (21, 47) if name in ("hf", "sft", "lightning") else (11, 23)
    poisoned_and_killed(tmp_path, name, shuffle=is_hf, kills=kills, fp16=fp16)
    assert is_hf or fp16 or len(journal(tmp_path / "a", "rollback")) == 2  # one an epoch


def test_a_step_discarded_behind_a_rollback_leaves_no_trace(tmp_path: Path) -> None:
    """The data goes on after the rollback, and the generators with it."""
    pytest.importorskip("lightning")
    arguments = ScriptArguments(out=tmp_path / "a", bad=(*BAD, 120))
    ended = FRAMEWORKS["lightning"](arguments)
    told = replace(arguments, out=tmp_path / "b", bad=(), skip=ended.skipped)
    same(ended.state, FRAMEWORKS["lightning"](told).state)
    last = journal(tmp_path / "a", "rollback")[0]["seq"]
    assert journal(tmp_path / "a", "discard")[-1]["seq"] > last


@pytest.mark.parametrize("name", ["hf", "lightning"])
def test_a_stop_in_an_evaluation_saves_at_once(tmp_path: Path, name: str) -> None:
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    arguments = ScriptArguments(out=tmp_path / "a", bad=())
    with pytest.raises(Preempted, match=r"SIGTERM.*saved at step 27$"):
        FRAMEWORKS[name](replace(arguments, stop_at=27))
    resumed, other = (
        FRAMEWORKS[name](replace(arguments, out=tmp_path / run)) for run in ("a", "b")
    )
    assert [line["step"] for line in journal(tmp_path / "a", "start")] == [0, 27]
    same(resumed.state, other.state)
    after = {step: loss for step, loss in other.evaluated.items() if step >= 27}
    assert len(after) > 1 and resumed.evaluated.items() >= after.items()


@pytest.mark.parametrize("name", ["hf", "lightning"])
def test_the_frameworks_own_early_stop_goes_on_over_a_restart(tmp_path: Path, name: str) -> None:
    """What is evaluated while used batches are passed over is no evaluation of the run."""
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    arguments = ScriptArguments(out=tmp_path / "a", bad=(), patience=1)
    other = FRAMEWORKS[name](replace(arguments, out=tmp_path / "b"))
    for kill_at in (22, 40):
        with pytest.raises(Killed):
            FRAMEWORKS[name](replace(arguments, kill_at=kill_at))
    resumed = FRAMEWORKS[name](arguments)
    same(resumed.state, other.state)
    after = {step: loss for step, loss in other.evaluated.items() if step >= 40}
    assert len(after) > 1 and resumed.evaluated.items() >= after.items()
    if name == "hf":
        assert columns(tmp_path / "a") == columns(tmp_path / "b") != {}


@pytest.mark.parametrize("name", ["hf", "lightning"])
def test_an_epochs_last_step_may_have_fewer_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The loss of a step is the mean over its tokens, however many batches it has."""
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    monkeypatch.setattr(frameworks, "NUM", 130)  # 65 batches, two a step
    assert FRAMEWORKS[name](ScriptArguments(out=tmp_path / "a", bad=())).skipped == []
    first = read_lines(tmp_path / "a" / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(math.log(32), abs=0.3)  # of 32 tokens, untrained


def test_a_run_of_0_1_0_which_saved_no_callbacks_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    from runner.integrations import lightning

    arguments = ScriptArguments(out=tmp_path / "a", bad=())

    def former(*words: Any, scheduler: list[Any], **settings: Any) -> Guard:
        scheduler[-1].share = 1 / 2
        return Guard(*words, scheduler=scheduler[:-1], **settings)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(lightning, "Guard", former)
        FRAMEWORKS["lightning"](replace(arguments, kill_at=22))
    with pytest.raises(Killed):
        FRAMEWORKS["lightning"](replace(arguments, kill_at=42))
    resumed = FRAMEWORKS["lightning"](replace(arguments, patience=3))
    same(resumed.state, FRAMEWORKS["lightning"](replace(arguments, out=tmp_path / "b")).state)
    told, others = (read_lines(tmp_path / run / "metrics.jsonl")[-1]["loss"] for run in "ab")
    assert resumed.skipped == [] and told == others / 2  # as it was told before


@pytest.mark.full
@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_a_restart_in_the_second_pass_finds_its_order(tmp_path: Path, name: str) -> None:
    """Their loaders shuffle by the passes that they have begun; a restart begins one less."""
    pytest.importorskip(NEEDS[name])
    skipped = poisoned_and_killed(tmp_path, name, shuffle=True, kills=(42,))
    assert skipped == others(tmp_path, name)


@pytest.mark.parametrize(
    "name", full_but(["lightning"], ("lightning", "hf", "fabric", "accelerate"))
)
def test_killed_where_the_newest_checkpoint_is_that_of_a_pass_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The order of the next pass is drawn from the generators as the pass before left them."""
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    for rule in ("every", "clean_after"):
        monkeypatch.setitem(RULES, rule, 1)
    monkeypatch.setitem(RULES, "background", False)  # the last one is written before the kill
    kill_at = 32 if name in ("hf", "lightning") else 33  # a pass has 32 steps
    skipped = poisoned_and_killed(tmp_path, name, shuffle=True, kills=(kill_at,))
    resumed = journal(tmp_path / "a", "start")[-1]["step"]
    assert resumed == 32 - sum(stop <= 64 for _, stop in skipped)
    assert skipped == others(tmp_path, name)


def columns(out: Path) -> dict[int, float]:
    """The held-out losses in ``metrics.jsonl``, by step; of a repeated step those of the last."""
    lines = read_lines(out / "metrics.jsonl")
    return {line["step"]: line["eval_loss"] for line in lines if line.get("eval_loss") is not None}


def others(tmp_path: Path, name: str) -> list[tuple[int, int]]:
    """What a run skips that nobody kills."""
    return FRAMEWORKS[name](
        ScriptArguments(out=tmp_path / "c", bad=SCATTERED, shuffle=True)
    ).skipped


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


def test_torchtitan_still_asks_in_this_order(tmp_path: Path) -> None:
    pytest.importorskip(
        "torchtitan", reason="torchtitan is not installed (pip install '.[torchtitan]')"
    )
    from torchtitan.trainer import Trainer

    from runner.integrations.torchtitan import GuardedTitan

    loop = inspect.getsource(Trainer.train) + inspect.getsource(Trainer.train_step)
    order = ["self.checkpointer.load(", "self.batch_generator(", "self.should_continue_training()"]
    order += ["self.step += 1", "self.train_step(", "next(data_iterator)"]
    order += ["self.forward_backward_step(", "clip_grad_norm_(", "self.optimizers.step()"]
    order += ["self.lr_schedulers.step()", "Loss is not finite"]
    found = [loop.find(word) for word in order]
    assert found == sorted(found) and -1 not in found
    graphs = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=False))
    trainer: Any = SimpleNamespace(parallel_dims=SimpleNamespace(pp_enabled=False), config=graphs)
    with pytest.raises(ConfigError, match=r"training\.disable_cuda_graphs=True"):
        GuardedTitan(trainer, tmp_path)


def test_loaders_still_count_their_passes() -> None:
    """What a restart sets, so that a later pass is read in its own order."""
    pytest.importorskip("lightning")
    from accelerate.data_loader import DataLoaderShard
    from lightning.fabric.wrappers import _FabricDataLoader

    shard, fabric = DataLoaderShard([1, 2]), _FabricDataLoader(DataLoader([1, 2]), None)  # type: ignore[arg-type]
    for loader, name in ((shard, "iteration"), (fabric, "_num_iter_calls")):
        assert getattr(loader, name) == 0
        assert len(list(loader)) == 2
        assert getattr(loader, name) == 1


def test_what_cannot_be_guarded_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.strategies import FSDPStrategy

    from runner.integrations.lightning import GuardCallback

    module = LightningModule()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="manual"):
        GuardCallback(tmp_path).on_fit_start(Trainer(accelerator="cpu", logger=False), module)
    trainer = Trainer(accelerator="cpu", logger=False)
    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(ConfigError, match="FSDPStrategy: a batch can be skipped only"):
        GuardCallback(tmp_path).on_fit_start(trainer, LightningModule())

    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[StochasticWeightAveraging(1e-2)])
    with pytest.raises(ConfigError, match="StochasticWeightAveraging: its average"):
        GuardCallback(tmp_path).on_fit_start(trainer, LightningModule())


def test_the_trainers_own_resume_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would pass over the batches before its step, and the guard over as many again."""
    transformers = pytest.importorskip("transformers")
    saving = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10}
    arguments = ScriptArguments(out=tmp_path / "a", bad=(), more=saving)
    FRAMEWORKS["hf"](arguments)
    train = partialmethod(transformers.Trainer.train, resume_from_checkpoint=True)
    monkeypatch.setattr(transformers.Trainer, "train", train)
    with pytest.raises(ConfigError, match="resume_from_checkpoint: the Trainer begins at step 20"):
        FRAMEWORKS["hf"](arguments)


def test_lightnings_own_resume_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    arguments = ScriptArguments(out=tmp_path / "a", bad=(), more={"max_steps": 8})
    own = tmp_path / "own.ckpt"
    for how in ({}, {"ckpt_path": own}):
        trainer, _ = frameworks.guarded_lightning(arguments)
        module = frameworks.lightning_module(frameworks.TinyNet())
        with pytest.raises(ConfigError, match="ckpt_path") if how else nullcontext():
            trainer.fit(module, frameworks.loader_of(arguments), **how)
            trainer.save_checkpoint(own)


def test_lightning_does_not_warn_of_batches_that_are_passed_over(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    for steps in (8, 12):
        arguments = ScriptArguments(out=tmp_path / "a", bad=(), more={"max_steps": steps})
        trainer, _ = frameworks.guarded_lightning(arguments)
        module = frameworks.lightning_module(frameworks.TinyNet())
        with warnings.catch_warnings(record=True) as told:
            trainer.fit(module, frameworks.loader_of(arguments))
    assert not [one for one in told if "training_step" in str(one.message)]


# A Trainer has some hundred settings: those that change what is read, when, or how often it steps.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "hf": [
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 4, "dataloader_drop_last": True},
        {"max_steps": 50},
        {"num_train_epochs": 1.5, "eval_strategy": "epoch"},
        {"dataloader_num_workers": 2, "neftune_noise_alpha": 5.0},
        {"train_sampling_strategy": "group_by_length", "gradient_checkpointing": True},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 0, "optim": "adafactor"},
        {"save_strategy": "steps", "save_steps": 9, "load_best_model_at_end": True},
    ],
    "lightning": [
        {"accumulate_grad_batches": 1, "reload_dataloaders_every_n_epochs": 1},
        {"accumulate_grad_batches": 3},
        {"max_steps": 50, "max_epochs": -1},
        {"limit_train_batches": 61},
        {"val_check_interval": 0.25},
        # Which torch refuses where a step has no gradients.
        {"gradient_clip_algorithm": "value"},
        # A start that passes over a whole pass has no such number.
        {"stops_by": "train_loss_epoch", "val_check_interval": 1.0},
    ],
}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (name, more) if more in SETTINGS["lightning"][-2:] else full(name, more)
        for name, rows in SETTINGS.items()
        for more in rows
    ],
)
@pytest.mark.parametrize("fp16", [False, full(True)])
def test_settings_of_the_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, Any], fp16: bool
) -> None:
    """Killed twice or not, the end is one."""
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    monkeypatch.setattr(frameworks, "NUM", 130)  # an odd number of batches
    for rule, value in {"memory_every": 0, "background": False}.items():
        monkeypatch.setitem(RULES, rule, value)  # a rollback goes where it goes without the kills
    patience = 9 if "stops_by" in more else None  # which it never loses
    arguments = ScriptArguments(
        out=tmp_path / "a", bad=SCATTERED, shuffle=True, fp16=fp16, patience=patience, more=more
    )
    last = 25 if name == "hf" else 40  # of Lightning in the second pass
    for kill_at in (11, last):
        with pytest.raises(Killed):
            FRAMEWORKS[name](replace(arguments, kill_at=kill_at))
    killed = FRAMEWORKS[name](arguments)
    other = FRAMEWORKS[name](replace(arguments, out=tmp_path / "b"))
    assert killed.skipped == other.skipped != []
    same(killed.state, other.state)
    after = {step: loss for step, loss in other.evaluated.items() if step > last}
    assert killed.evaluated.items() >= after.items()


def test_what_the_hf_trainer_cannot_have_guarded_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from runner.integrations.hf import guard_trainer

    trainer: Any = SimpleNamespace(args=SimpleNamespace(deepspeed="zero3.json"))
    with pytest.raises(ConfigError, match=r"guard_trainer: deepspeed='zero3.json': .*; use "):
        guard_trainer(trainer, tmp_path)


@pytest.mark.parametrize(
    ("name", "package"),
    [("hf", "transformers"), *((name, name) for name in ("lightning", "accelerate", "torchtitan"))],
)
def test_a_missing_framework_is_told_with_what_installs_it(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"runner.integrations.{name}", raising=False)
    for known in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, known, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"needs the package {package}.*pip install"):
        importlib.import_module(f"runner.integrations.{name}")


def test_evaluations_of_the_hf_trainer_are_columns_of_ours(tmp_path: Path) -> None:
    """Of two held-out sets: each its own, and their mean; not how long they took."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from runner.integrations.hf import guard_trainer

    rows = [{"input_ids": [i % 7] * 8, "labels": [i % 7] * 8} for i in range(24)]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "theirs"), max_steps=6, per_device_train_batch_size=2, eval_strategy="steps",
        eval_steps=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    sets = {"old": rows[:4], "new": rows[4:8]}
    trainer = transformers.Trainer(
        model=tiny_llama(), args=arguments, train_dataset=rows, eval_dataset=sets
    )
    guard_trainer(trainer, tmp_path / "run")
    trainer.train()
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    theirs = {
        (row["step"], name): row[f"eval_{name}_loss"]
        for row in trainer.state.log_history
        for name in sets
        if f"eval_{name}_loss" in row
    }
    assert len(theirs) == 6
    for step in (2, 4):  # an evaluation goes with the next step; that of the last step does not
        of_sets = [theirs[step, name] for name in sets]
        assert [told[step][f"eval_loss/{name}"] for name in sets] == pytest.approx(of_sets)
        assert told[step]["eval_loss"] == pytest.approx(sum(of_sets) / 2)
    assert [line["step"] for line in told if line["eval_loss"] is not None] == [3, 5]
    own = {"eval_loss", "eval_loss/old", "eval_loss/new"}
    assert {name for name in told[2] if name.startswith("eval_")} == own
