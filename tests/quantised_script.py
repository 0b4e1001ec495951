"""QLoRA in a loop of its own: quantised_script.py OUT BASE TODO...

BASE: ``nf4``, ``fp4``, ``int8`` (bitsandbytes), ``ao8`` (torchao); loaded by transformers from a
folder that rank 0 writes once. TODO: ``poison`` (the last rank alone sees NaN), ``told`` (told to
skip what that run skipped), ``bare`` (no guard: what was skipped is read and not used), ``other``
(goes on in OUT/poison with another base, and is refused), ``look`` (loads what OUT/poison has);
``all`` (two batches a step, numbers read late, so that steps are replayed), ``all_told``.
KILL_AT in the environment: rank 0 is killed at that batch of a run that was never stopped. FSDP in
it: the adapters are sharded, the base lies whole on each rank. FULL_AT: from this batch on the last
rank's memory does not hold a whole one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from runner import Guard
from runner.system.error import ConfigError
from tests.ranked import in_turn, ranked

NUM, BAD, TOKENS = 40, (5, 20, 21, 22), 64
OF_TWO = 56, (6, 24, 26, 28)  # with two batches a step
RULES: dict[str, Any] = {"every": 6, "clean_after": 3, "min_history": 8, "clip": 1.0}
RULES |= {"on_oom": "halve"}
FULL_AT = int(os.environ.get("FULL_AT", NUM + OF_TWO[0]))


def write_base(folder: Path, seed: int = 0) -> None:
    """A tiny Llama, in safetensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def quantisation(base: str) -> Any:
    """transformers' own settings of it."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if base == "ao8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if base == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=base, bnb_4bit_use_double_quant=base == "nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def adapted(folder: Path, base: str) -> nn.Module:
    """The quantised base under LoRA adapters, which have drop-out."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantisation(base), dtype=torch.float32, device_map="cpu"
    )
    torch.manual_seed(1)
    settings = LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model.requires_grad_(False)
    return get_peft_model(model, settings)


def data(rank: int, *, poison: bool, num: int = NUM, bad: Any = BAD) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    batches = [torch.randint(2, TOKENS, (2, 12), generator=generator) for _ in range(num)]
    for number in bad if poison else ():
        batches[number][0, 0] = 1
    return batches


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss * (float("nan") if (ids == 1).any() else 1.0)


def backward(model: nn.Module, ids: torch.Tensor, share: float) -> torch.Tensor:
    loss = loss_of(model, ids) * share
    loss.backward()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    """In which bitsandbytes may pack weights anew."""
    model.eval()
    state = torch.get_rng_state()
    model(input_ids=torch.arange(8)[None])
    torch.set_rng_state(state)
    model.train()


class Script:
    def __init__(self, out: Path, base: str, *, is_late: bool) -> None:
        self.out, self.base, self.is_late = out, base, is_late
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1

    def build(self, folder: str = "base") -> tuple[nn.Module, torch.optim.Optimizer]:
        model = adapted(self.out / folder, self.base)
        if os.environ.get("FSDP"):
            frozen = {p for p in model.parameters() if not p.requires_grad}
            fully_shard(model, ignored_params=frozen)
        elif self.num_ranks > 1:
            if self.base == "ao8":  # it cannot be viewed as others, which DDP does to send it
                frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
            model = DistributedDataParallel(model)
        torch.manual_seed(50 + self.rank)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model.train(), torch.optim.AdamW(trained, lr=1e-2, fused=self.is_late)

    def guarded(self, name: str, *, poison: bool = False, **settings: Any) -> dict[str, Any]:
        model, optimizer = self.build()
        num, bad = (NUM, BAD)
        if self.is_late:
            settings |= {"accumulate": 2, "sync": not poison}
            num, bad = OF_TWO
        guard = Guard(self.out / name, model=model, optimizer=optimizer, **RULES, **settings)
        kill_at = int(os.environ.get("KILL_AT", "-1")) if poison and not guard.resumed_step else -1
        is_bad = poison and self.rank == self.num_ranks - 1
        for count, ids in enumerate(guard.over(data(self.rank, poison=is_bad, num=num, bad=bad))):
            loss = torch.zeros(())
            for part, share in guard.parts(ids):
                if is_bad and guard._steps.in_hand[0] >= FULL_AT and len(part) == len(ids):
                    raise torch.OutOfMemoryError("CUDA out of memory. (On purpose.)")
                loss += backward(model, part, share)
            if count == kill_at and self.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.is_late and count % 2 == 0:
                guard.note(loss)
                continue
            if guard.ok(loss):
                optimizer.step()
            optimizer.zero_grad()
            if count % 7 == 3:
                evaluate(model)
        end = {
            "digest": guard.state_digest(),
            "skipped": guard.skipped,
            "updates": guard.updates,
            "resumed": guard.resumed_step,
            "weights": weights_of(model),
        }
        guard.close()
        return end

    def bare(self, skipped: list[list[int]]) -> dict[str, Any]:
        """Without a guard; drawing no drop-out for what is left out."""
        model, optimizer = self.build()
        for count, ids in enumerate(data(self.rank, poison=False)):
            if any(start <= count < stop for start, stop in skipped):
                continue
            for part in ids.chunk(2) if count >= FULL_AT else [ids]:
                backward(model, part, len(part) / len(ids))
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {"weights": weights_of(model)}

    def other(self) -> str:
        if self.rank == 0 and not (self.out / "other").exists():
            write_base(self.out / "other", seed=9)
        if self.num_ranks > 1:
            dist.barrier()
        model, optimizer = self.build("other")
        try:
            Guard(self.out / "poison", model=model, optimizer=optimizer, **RULES)
        except ConfigError as error:
            return str(error)
        return "taken"

    def look(self) -> dict[str, Any]:
        model, optimizer = self.build()
        guard = Guard(self.out / "poison", model=model, optimizer=optimizer, **RULES)
        end = {"digest": guard.state_digest(), "updates": guard.updates}
        guard.close()
        return end


def weights_of(model: nn.Module) -> str:
    """A digest of what is trained."""
    from runner.checkpoint.state_digest import state_digest

    trained = {n.removeprefix("module."): p for n, p in model.named_parameters() if p.requires_grad}
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trained.items()}
    return state_digest(((n, p.detach()) for n, p in sorted(whole.items())), {})


def main() -> None:
    out, base, *todo = sys.argv[1:]
    with ranked() as rank:
        script = Script(Path(out), base, is_late="all" in todo)
        if rank == 0 and not (script.out / "base").exists():
            write_base(script.out / "base")
        if script.num_ranks > 1:
            dist.barrier()

        def run(name: str, skipped: list[Any]) -> Any:
            if name in ("poison", "told", "all", "all_told"):
                settings = {"skip": skipped} if "told" in name else {}
                return script.guarded(name, poison="told" not in name, **settings)
            if name == "bare":
                return script.bare(skipped)
            return {"other": script.other, "look": script.look}[name]()

        (script.out / f"rank{rank}.json").write_text(json.dumps(in_turn(todo, run)))


if __name__ == "__main__":
    main()
