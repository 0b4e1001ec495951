"""The scripts under tests/prove_resume/scripts, with the mistake planted in each and its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, SAVE_EVERY = 40, 5
# After the checkpoints of steps 15 and 30: in the second and the third epoch.
KILLS = (18, 33)

# What is to be named first: a kind of finding; "equal" for none. With two words either is right.
NAMED = {
    "moments": "optimizer_state",
    "moments_shared": "optimizer_state",
    "step_counts": "optimizer_steps",
    "rng": "random",
    "numpy_rng": "random",
    "rng_early": "random",  # as Accelerate documents it: before the loader draws
    "other_rank": "rank random",
    "epoch_seed": "data_epoch",
    "sampler_restarted": "data_restarted",
    "batch_skipped": "data_skipped",
    "batch_repeated": "data_repeated",
    "worker_seeds": "data_augmented",
    "shuffle_buffer": "data_order",
    "lr_reset": "learning_rate",
    "weights_bf16": "weights_rounded",
    "ema_lost": "ema",
    "scaler_lost": "scaler",
    "older_checkpoint": "older_checkpoint",
    "param_groups": "param_groups",
    "batchnorm": "buffers",
    "other_shard": "rank",
    "options_lost": "options",
    "masters_lost": "weights_rounded",
    "base_reseeded": "frozen",
    "queue_lost": "buffers",
    "gradients_lost": "gradients",
    "dropout_rate_lost": "gradients",
    # The Trainer then loads neither the optimizer nor the schedule.
    "optimizer_file_lost": "optimizer_state learning_rate",
    "save_only_model": "optimizer_state learning_rate",
    # Its counters are the older one's as well: the same bits, with more steps done again.
    "older_whole": "equal older_checkpoint",
}

# Scripts that import more than torch before they train.
TRAINERS = {"hf_trainer", "lightning_script", "accelerate_script", "fabric_script"}

EVERY = (
    "moments step_counts rng epoch_seed sampler_restarted batch_skipped batch_repeated lr_reset "
    "weights_bf16 ema_lost older_checkpoint"
)
OF_ONE = f"{EVERY} param_groups batchnorm older_whole workers:worker_seeds"
STREAMED = "stream:shuffle_buffer"

# Script, ranks, and the defects planted in it: VARIANT:DEFECT, or DEFECT.
DEFECTS = (
    ("plain", 1, f"{OF_ONE} {STREAMED} scaler:scaler_lost mixup:numpy_rng sgd:moments bf16:rng"),
    ("plain", 1, "accumulate:batch_skipped compile:moments"),
    ("ddp", 2, f"{EVERY} batchnorm other_rank workers:worker_seeds {STREAMED}"),
    ("ddp", 2, "param_groups scaler:scaler_lost evaluate:rng"),
    ("fsdp2", 2, f"{EVERY} local:other_shard local:param_groups full:moments full:weights_bf16"),
    ("fsdp2", 2, "evaluate:rng evaluate:sampler_restarted"),
    ("hf_trainer", 1, "moments step_counts rng epoch_seed sampler_restarted lr_reset weights_bf16"),
    ("hf_trainer", 1, "ema_lost older_checkpoint older_whole param_groups batchnorm"),
    ("hf_trainer", 1, f"workers:worker_seeds {STREAMED} stream:batch_skipped"),
    ("hf_trainer", 1, "stream:batch_repeated optimizer_file_lost save_only_model"),
    ("hf_trainer", 2, "moments rng sampler_restarted other_rank"),
    ("lightning_script", 1, f"{OF_ONE} {STREAMED}"),
    ("lightning_script", 2, "rng sampler_restarted other_rank"),
    ("accelerate_script", 1, f"{EVERY} param_groups batchnorm workers:worker_seeds {STREAMED}"),
    ("accelerate_script", 1, "rng_early"),
    ("accelerate_script", 2, "moments sampler_restarted other_rank"),
    ("gan", 1, "moments rng weights_bf16 critics:moments"),
    ("wild", 1, "nano:rng nano:moments nano:lr_reset nano:options_lost masters:masters_lost"),
    ("wild", 1, "masters:moments adapter:base_reseeded adapter:moments queue:queue_lost"),
    ("wild", 1, "closure:moments midway:gradients_lost annealed:dropout_rate_lost"),
    ("wild", 1, "towers:batchnorm towers:rng rehearsed:rng"),
    ("sharded", 2, "fsdp1:moments fsdp1:moments_shared fsdp1:rng"),
    ("sharded", 2, "fsdp1_flat:moments fsdp1_flat:sampler_restarted"),
    ("sharded", 2, "zero1:moments zero2:moments zero2:lr_reset zero2:rng zero3:sampler_restarted"),
    ("fabric_script", 1, "moments rng sampler_restarted lr_reset"),
    ("fabric_script", 2, "rng sampler_restarted"),
)

# Script, ranks, and the variants that resume bit for bit; "-" is the script as it is.
SOUND = (
    ("plain", 1, "- workers stream scaler bf16 compile accumulate mixup no_random sgd"),
    ("ddp", 2, "- workers stream scaler bf16 accumulate evaluate"),
    ("fsdp2", 2, "- local full evaluate"),
    ("hf_trainer", 1, "- workers stream bf16 accumulate"),
    ("hf_trainer", 2, "-"),
    # Not accumulate: step 30 then ends an epoch, and Lightning goes on one epoch too far.
    ("lightning_script", 1, "- workers stream bf16"),
    ("lightning_script", 2, "-"),
    ("accelerate_script", 1, "- workers stream bf16 accumulate"),
    ("accelerate_script", 2, "-"),
    ("gan", 1, "- critics"),
    ("wild", 1, "nano masters adapter queue closure midway annealed towers rehearsed"),
    ("sharded", 2, "fsdp1 fsdp1_flat zero1 zero2 zero3"),
    ("fabric_script", 1, "-"),
    ("fabric_script", 2, "-"),
    ("launches_itself", 1, "-"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command, and what is to be said of it.

    Attributes:
        ranks: more than one are started by torchrun.
        defect: what ``DEFECT`` is set to; empty: the script is sound.
        variant: what ``VARIANT`` is set to.
        named: the kinds of finding of which one is to be named first; ``equal`` for a sound script.
    """

    script: str
    ranks: int
    defect: str = ""
    variant: str = ""
    named: frozenset[str] = frozenset({"equal"})

    def __str__(self) -> str:
        words = (self.script, str(self.ranks), self.variant, self.defect or "sound")
        return "-".join(word for word in words if word)

    def command(self, out: Path) -> list[str]:
        """The command as its user would type it."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        words = [sys.executable, *(launcher if self.ranks > 1 else [])]
        steps = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        return [*words, str(SCRIPTS / f"{self.script}.py"), "--out", str(out), *steps]

    @property
    def processes(self) -> int:
        """How many train."""
        return 2 if self.script == "launches_itself" else self.ranks

    @property
    def kills(self) -> tuple[int, ...]:
        """After which steps it is killed; empty: two that are drawn."""
        if self.variant == "scaler":  # it leaves steps out, so that it does fewer
            return ()
        # From a checkpoint of an epoch's last step, which that of step 30 is for these, Lightning
        # goes on one epoch too far, and the script with Accelerate loses what the loader draws.
        ends_epoch = self.ranks == 2 or self.variant == "accumulate"
        is_odd = self.script in ("lightning_script", "accelerate_script")
        return (18, 28) if ends_epoch and is_odd else KILLS

    @property
    def environment(self) -> dict[str, str]:
        return {"DEFECT": self.defect, "VARIANT": self.variant, "ACCELERATE_USE_CPU": "true"}


def _defects() -> Iterator[Case]:
    for script, ranks, words in DEFECTS:
        for word in words.split():
            variant, _, defect = word.rpartition(":")
            named = frozenset(NAMED[defect].split())
            yield Case(script=script, ranks=ranks, defect=defect, variant=variant, named=named)


def _sound() -> Iterator[Case]:
    for script, ranks, words in SOUND:
        for word in words.split():
            yield Case(script=script, ranks=ranks, variant=word.strip("-"))


PLANTED, SOUND_CASES = tuple(_defects()), tuple(_sound())
