"""FSDP2 as single, ddp, fsdp and hsdp: one engine, four device meshes.

Replication as a mesh dimension instead of DistributedDataParallel: DDP rebuilds its buckets
after the first step, so a resumed 3-rank run adds gradients in another order and is not the
same run any more (tried).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from runner.engine.protocol import Batch, Disturbance, LocalSums, Shard, Suspects, Work

# (logits, targets) -> summed cross-entropy and summed training loss per sequence, [B] FP32.
SequenceLosses = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# (name, full shape, flat start, count) -> FP32 CPU values.
InitialValues = Callable[[str, tuple[int, ...], int, int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """AdamW (arXiv 1711.05101); decay on parameters of two or more dimensions only."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``replicas`` copies, each sharded over ``shard_size`` ranks; BF16 or FP32 compute."""

    replicas: int
    shard_size: int
    bf16: bool
    reshard_after_forward: bool
    reduce_each_micro_batch: bool
    compile: bool


def device_mesh(device: torch.device, layout: Layout) -> DeviceMesh:
    """1-D for pure sharding, (replicate, shard) otherwise."""
    if layout.replicas == 1:
        return init_device_mesh(device.type, (layout.shard_size,), mesh_dim_names=("shard",))
    shape = (layout.replicas, layout.shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    layout: Layout,
) -> None:
    """Wrap each block, then the root; sums instead of averages, FP32 reduction."""
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if layout.bf16 else None, reduce_dtype=torch.float32
    )
    for block in blocks:
        if layout.compile:
            block.compile()
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=precision,
            reshard_after_forward=layout.reshard_after_forward,
        )
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The divisor is the global token count, known after the reduction only. Both
            # calls are needed: gloo has no PREMUL_SUM, and the factor is per module.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class FsdpEngine:
    """See :class:`runner.engine.protocol.Engine`.

    Args:
        model: built on the meta device and sharded by :func:`shard_model`, already
            materialised on ``device`` with its buffers made.
        embedding: the module whose output is the first activation of each sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        embedding: nn.Module,
        sequence_losses: SequenceLosses,
        settings: AdamWSettings,
        layout: Layout,
        mesh: DeviceMesh,
        device: torch.device,
        probe: bool,
    ) -> None:
        self.device = device
        self._model = model
        self._sequence_losses = sequence_losses
        self._layout = layout
        self._mesh = mesh
        self._probe = probe
        self._disturbance: Disturbance | None = None
        self._losses: list[torch.Tensor] = []
        self._gradient_norms: list[torch.Tensor] = []
        self._parameters = dict(sorted(model.named_parameters()))
        self._learning_rate = torch.zeros((), device=device)
        self._optimizer = _adamw(self._parameters, settings, self._learning_rate)
        embedding.register_forward_hook(self._at_embedding)

    @property
    def replica(self) -> tuple[int, int]:
        if self._layout.replicas == 1:
            return 0, 1
        return self._mesh.get_local_rank("replicate"), self._layout.replicas

    def initialise(self, values: InitialValues) -> None:
        """Fill this rank's shards of the parameters; moments are zero already."""
        for shard in self.shards():
            kind, _, name = shard.name.partition("/")
            if kind == "param":
                fresh = values(name, shard.shape, shard.start, len(shard.local))
                shard.local.copy_(fresh)

    def accumulate(self, works: Sequence[Work]) -> LocalSums:
        self._losses, self._gradient_norms = [], []
        root = self._root()
        for number, work in enumerate(works, start=1):
            if not self._layout.reduce_each_micro_batch:
                root.set_requires_gradient_sync(number == len(works))
            self._forward_backward(work)
        loss = torch.stack([losses.sum(dtype=torch.float64) for losses in self._losses]).sum()
        square = self._gradient_norm().double().square() / self._layout.replicas
        return LocalSums(loss=loss, grad_square=square, nonfinite=self._own_nonfinite(loss))

    def _forward_backward(self, work: Work) -> None:
        torch.manual_seed(work.seed)
        self._disturbance = work.disturbance
        batch = work.batch
        logits = self._model(batch.tokens, batch.segments)
        cross_entropy, training = self._sequence_losses(logits, batch.targets)
        if work.disturbance is not None and work.disturbance.loss_scale is not None:
            scale = torch.tensor(work.disturbance.loss_scale, device=self.device)
            cross_entropy, training = cross_entropy * scale, training * scale
        training.sum().backward()  # type: ignore[no-untyped-call]
        self._losses.append(cross_entropy.detach())
        self._disturbance = None

    def _at_embedding(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        fault = self._disturbance
        if fault is not None and fault.activation_scale is not None:
            scale = torch.tensor(fault.activation_scale, device=output.device, dtype=output.dtype)
            output = output * scale[:, None, None]
        if output.requires_grad and (self._probe or fault is not None):
            nan_grad = fault is not None and fault.nan_grad
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._at_embedding_gradient(grad, nan_grad)
            )
        return output

    def _at_embedding_gradient(self, grad: torch.Tensor, nan_grad: bool) -> torch.Tensor:
        """The end of the backward pass, before any reduction: whose NaN it is shows here only."""
        if nan_grad:
            grad = grad * torch.nan
        norms = torch.linalg.vector_norm(grad, dim=(1, 2), dtype=torch.float32)
        self._gradient_norms.append(norms)
        return grad

    def _gradient_norm(self) -> torch.Tensor:
        grads = [_local(p.grad) for p in self._parameters.values() if p.grad is not None]
        return get_total_norm(grads, foreach=True)

    def _own_nonfinite(self, loss: torch.Tensor) -> torch.Tensor:
        seen = [loss, *(norms.sum(dtype=torch.float64) for norms in self._gradient_norms)]
        return (~torch.isfinite(torch.stack(seen))).any().double()

    def apply(self, *, skip: torch.Tensor, grad_scale: torch.Tensor, learning_rate: float) -> None:
        self._learning_rate.fill_(learning_rate)
        # The hooks of torch.amp.GradScaler: the fused kernel divides by grad_scale and leaves
        # everything untouched where found_inf is set. Foreach and plain paths would not.
        self._optimizer.found_inf = skip  # type: ignore[attr-defined]
        self._optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, int]:
        self._model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        for batch in batches:
            losses, _ = self._sequence_losses(
                self._model(batch.tokens, batch.segments), batch.targets
            )
            total += losses.sum(dtype=torch.float64)
            count += int((batch.targets >= 0).sum())
        self._model.train()
        return total, count

    def suspects(self) -> Suspects:
        return Suspects(
            losses=[value for losses in self._losses for value in losses.tolist()],
            gradient_norms=[value for norms in self._gradient_norms for value in norms.tolist()],
        )

    def shards(self) -> list[Shard]:
        return [self._shard(name, tensor) for name, tensor in self._tensors().items()]

    def full(self, name: str) -> torch.Tensor:
        tensor = self._tensors()[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach().float().cpu()

    def update_counts(self) -> dict[str, int]:
        return {name: int(self._state(name)["step"].item()) for name in self._parameters}

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        for name in self._parameters:
            self._state(name)["step"].fill_(float(update_counts[name]))
        self._optimizer.zero_grad(set_to_none=True)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            found[f"param/{name}"] = parameter.detach()
            found[f"exp_avg/{name}"] = self._state(name)["exp_avg"]
            found[f"exp_avg_sq/{name}"] = self._state(name)["exp_avg_sq"]
        return dict(sorted(found.items()))

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._optimizer.state[self._parameters[name]]
        return state

    def _shard(self, name: str, tensor: torch.Tensor) -> Shard:
        local = _local(tensor)
        rows_before = 0
        if isinstance(tensor, DTensor):
            rows_before = _first_row(tensor.shape[0], self._layout.shard_size, self._shard_rank())
        per_row = math.prod(tensor.shape[1:])
        return Shard(
            name=name,
            shape=tuple(tensor.shape),
            start=rows_before * per_row,
            local=local.view(-1),
        )

    def _shard_rank(self) -> int:
        return self._mesh.get_local_rank("shard")

    def _root(self) -> FSDPModule:
        assert isinstance(self._model, FSDPModule)
        return self._model


def _adamw(
    parameters: Mapping[str, nn.Parameter], settings: AdamWSettings, rate: torch.Tensor
) -> torch.optim.AdamW:
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    others = [p for p in parameters.values() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    for parameter in parameters.values():
        # Made now, not in the first step: a checkpoint of step 0 and a load need it.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_row(rows: int, shard_size: int, shard_rank: int) -> int:
    """FSDP2 gives each rank ceil(rows / ranks) rows of dimension 0 (torch.chunk)."""
    per_rank = -(-rows // shard_size)
    return min(rows, per_rank * shard_rank)
