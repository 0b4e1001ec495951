"""One rank of a job of any size, on the pretended device: its engine, and what it computes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Before torch.
from tests.pretended import device  # isort: skip

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

import runner.engine.fsdp as fsdp_module
import runner.engine.optimizer as optimizer_module
import runner.model.segments as documents_module
from runner.config.compose import compose
from runner.config.schema import RunConfig
from runner.data.feed import MicroBatch
from runner.distributed.env import RankEnv
from runner.engine.protocol import Engine
from runner.model.decoder import DecoderShape, default_ffn_dim
from runner.session import parts

GPU = torch.device("cuda", 0)
RANKS_ON_A_NODE = 8
__all__ = ["GPU", "Rig", "device"]


class _Functional:
    """``torch.nn.functional``, with the attention kernels that CUDA would choose."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)

    def scaled_dot_product_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        ops = torch.ops.aten
        _used.add("attention")
        if attn_mask is None:
            flash = ops._scaled_dot_product_flash_attention
            return flash(query, key, value, 0.0, is_causal, False)[0]
        bias = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        bias = bias.expand(-1, query.shape[1], -1, -1)
        efficient = ops._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, True, 0.0, False)[0]


def _real_mesh(make: Any) -> Any:
    def real(*args: Any) -> Any:
        _used.add("device_mesh")
        with unset_fake_temporarily():
            return make(*args)

    return real


def _rate_set_later(make: Any) -> Any:
    """The optimizer's constructor reads its rate once (0.0 <= lr): a number, the tensor after."""

    def later(optim: Any, groups: Any) -> Any:
        _used.add("make_optimizer")
        optimizer = make(optim, [{**group, "lr": 1e-3} for group in groups])
        for group, given in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = given["lr"]
        return optimizer

    return later


def _nothing_held(check: Any) -> Any:
    def held(self: Any) -> None:
        _used.add("_check_params")

    return held


# Where it is looked up, its name there, and what makes the stand-in out of it.
_STAND_INS: tuple[tuple[Any, str, Any], ...] = (
    (parts, "device_mesh", _real_mesh),
    (optimizer_module, "make_optimizer", _rate_set_later),
    (fsdp_module.FsdpEngine, "_check_params", _nothing_held),
    (documents_module, "F", lambda functional: _Functional()),
)
_NAMES = {"attention", *(name for _, name, _ in _STAND_INS if name != "F")}
_used: set[str] = set()


def give_way() -> None:
    """What tensors without memory cannot do; see :func:`require_used`."""
    for owner, name, stand_in in _STAND_INS:
        setattr(owner, name, stand_in(getattr(owner, name)))


def require_used() -> None:
    """Fail where a stand-in was not called: the project looks for the original elsewhere now."""
    unused = sorted(_NAMES - _used)
    assert not unused, (
        f"stand-ins that nothing calls any more, see tests/pretended/rig.py: {unused}"
    )


class Rig:
    """Rank 0 of ``world_size``. The settings are those of the command line."""

    def __init__(self, world_size: int, overrides: Sequence[str]) -> None:
        self.config: RunConfig = compose(["compute.precision=bf16", *overrides])
        self.place = RankEnv(
            rank=0,
            world_size=world_size,
            local_rank=0,
            local_world_size=min(RANKS_ON_A_NODE, world_size),
        )
        model = self.config.model
        self.shape = DecoderShape(
            vocab_size=model.vocab_size or 256,
            dim=model.dim,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads or model.heads,
            ffn_dim=model.ffn_dim or default_ffn_dim(model.dim),
            seq_len=self.config.data.seq_len,
            tied_head=model.tied_head,
            recompute=self.config.compute.recompute.value,
        )

    def engine(self) -> Engine:
        """Under ``FakeTensorMode``."""
        return parts.engine(
            self.config,
            parts.decoder_blueprint(self.config, self.shape),
            self.place,
            GPU,
            has_weights=False,
        )

    def batch(self, device: torch.device = GPU) -> MicroBatch:
        """Of tokens that say nothing."""
        size = (self.config.batch.micro_size, self.config.data.seq_len)
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        targets = torch.zeros_like(tokens)
        return MicroBatch(tokens=tokens, targets=targets, segments=None, positions=(0,))


def start(world_size: int) -> None:
    """The default group, of which nobody else is there."""
    give_way()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
