"""FSDP2 as single, ddp, fsdp and hsdp: one engine, four device meshes.

Replication is a mesh dimension instead of DistributedDataParallel: DDP rebuilds its buckets after
the first step, so a resumed 3-rank run adds gradients in another order and is no longer the same
run (tried).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from runner.config.schema import ComputeConfig, Offload, ParallelConfig, ParallelKind, Precision
from runner.engine.buffers import is_buffer
from runner.engine.forward import Disturb, Forward
from runner.engine.modes import reshard
from runner.engine.optimizer import OptimizerSettings, ShardOptimizer
from runner.engine.protocol import (
    Batch,
    Engine,
    Evaluated,
    LocalSums,
    MicroStep,
    Shard,
    Watch,
    unwatched,
)
from runner.engine.whole_state import complete, gather_flat, give_dimension, scalar_names
from runner.engine.wider_precision import NoNarrowing
from runner.system.error import RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """``replicas`` copies, each sharded over ``shard_size`` ranks.

    ``dtype`` is the compute type: BF16, FP32, or FP64 for arbitration; ``is_wide`` disables the
    model's own casts to narrower types.
    """

    replicas: int
    shard_size: int
    dtype: torch.dtype
    reshard_after_forward: bool
    reduce_each_micro_batch: bool
    compile: bool
    is_wide: bool = False
    offload: bool = False  # weights, gradients and moments are in host memory

    @classmethod
    def of(
        cls, parallel: ParallelConfig, compute: ComputeConfig, world_size: int, local_size: int
    ) -> MeshLayout:
        """For ``parallel.kind``, with ``local_size`` ranks on a node."""
        assert compute.precision is not Precision.auto, "settle_precision comes first"
        shard_size = world_size
        if parallel.kind is ParallelKind.ddp:
            shard_size = 1
        elif parallel.kind is ParallelKind.hsdp:
            shard_size = parallel.shard_size or local_size
        return cls(
            replicas=world_size // shard_size,
            shard_size=shard_size,
            dtype=torch.bfloat16 if compute.precision is Precision.bf16 else torch.float32,
            reshard_after_forward=parallel.reshard_after_forward,
            reduce_each_micro_batch=parallel.reduce_each_micro_batch,
            compile=compute.compile,
            offload=parallel.offload is Offload.cpu,
        )


def device_mesh(device: torch.device, layout: MeshLayout) -> DeviceMesh:
    """1-D for pure sharding, (replicate, shard) otherwise."""
    if layout.replicas == 1:
        return init_device_mesh(device.type, (layout.shard_size,), mesh_dim_names=("shard",))
    shape = (layout.replicas, layout.shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: nn.Module, blocks: Sequence[nn.Module], *, mesh: DeviceMesh, layout: MeshLayout
) -> None:
    """Wrap each block, then the root; sums instead of averages, FP32 reduction."""
    give_dimension(model)
    precision = MixedPrecisionPolicy(
        param_dtype=None if layout.dtype is torch.float32 else layout.dtype,
        reduce_dtype=torch.promote_types(layout.dtype, torch.float32),
    )
    policies: dict[str, Any] = {"mp_policy": precision}
    if layout.offload:
        # Page-locked memory serves device transfers; a CPU has none.
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    # gloo overlaps nothing with a collective, so without gathered parameters one for the whole
    # model is fastest; NCCL reduces each block while the backward pass continues.
    by_block = layout.shard_size > 1 or mesh.device_type == "cuda"
    for block in blocks:
        if layout.compile:
            block.compile()
        if not by_block:
            continue
        fully_shard(
            block, mesh=mesh, reshard_after_forward=layout.reshard_after_forward, **policies
        )
    fully_shard(model, mesh=mesh, **policies)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The divisor is the global token count, known after the reduction only. Both
            # calls are needed: gloo has no PREMUL_SUM, and the factor is per module.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            _reduce_unused(module)


def _reduce_unused(module: FSDPModule) -> None:
    """Reduce parameters without a gradient as zeros.

    Ranks may use other parameters (experts, branches). Without this they reduce different sizes.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
        module.set_reduce_scatter_unused_params(True)
        return
    group: Any = module._get_fsdp_state()._fsdp_param_group
    if group is None:  # all parameters are in the blocks
        return
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for param in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(param, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or whole.grad is not None:
                continue
            if param.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        post_backward(*unused)

    group.post_backward = with_zeros


class FsdpEngine(Engine):
    """See :class:`runner.engine.protocol.Engine`.

    Args:
        model: computes losses from a batch, see :class:`runner.engine.forward.Forward`; its
            ``network`` has the parameters. Built on the meta device, sharded by
            :func:`shard_model`, and materialised on ``device`` with its buffers filled.
        embedding: the module whose output is the first activation of each sequence.

    Attributes:
        mesh: the device mesh of the ranks.
    """

    applies_wider = True

    def __init__(
        self,
        model: nn.Module,
        *,
        embedding: nn.Module,
        settings: OptimizerSettings,
        layout: MeshLayout,
        mesh: DeviceMesh,
        device: torch.device,
        probe: bool,
        disturb: Disturb | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: the optimizer cannot work on shards.
        """
        super().__init__(
            model, device=device, home=torch.device("cpu") if layout.offload else device
        )
        self._layout = layout
        self.mesh = mesh
        self._forward = Forward(
            model,
            embedding=embedding,
            buffers=self.running,
            device=device,
            probe=probe,
            disturb=disturb,
            context=partial(NoNarrowing, layout.dtype) if layout.is_wide else nullcontext,
        )
        self._scalars = scalar_names(self.network)
        self._trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        # The optimizer gets the shards as plain tensors: the update is element by element, and
        # DTensor's dispatch would cost the host several times the rest of a step.
        self._params = {name: _local(p).detach() for name, p in self._trained.items()}
        shapes = {name: tuple(parameter.shape) for name, parameter in self._trained.items()}
        self._optimizer = ShardOptimizer(
            self._params, shapes, settings, self._home, self._whole, is_cut=layout.shard_size > 1
        )
        self._is_checked = False

    @property
    def waits_for_host(self) -> bool:
        return self._optimizer.waits_for_host or self._home.type != self.device.type

    @property
    def replica(self) -> tuple[int, int]:
        if self._layout.replicas == 1:
            return 0, 1
        return self.mesh.get_local_rank("replicate"), self._layout.replicas

    def accumulate(self, works: Sequence[MicroStep]) -> LocalSums:
        self._forward.begin()
        self._is_half_way = True
        root = self._root()
        for number, work in enumerate(works, start=1):
            if not self._layout.reduce_each_micro_batch:
                self._reduce_once(root, is_last=number == len(works))
            self._forward.training_loss(work).backward()  # type: ignore[no-untyped-call]
        self._is_half_way = False
        self._check_params()
        return self._forward.sums(self._own_gradients(), copies=self._layout.replicas)

    def _check_params(self) -> None:
        """Check once, after FSDP2's lazy init, that no shard has moved: updates would miss it."""
        if not self._is_checked:
            for name, parameter in self._trained.items():
                assert _local(parameter).data_ptr() == self._params[name].data_ptr(), name
            self._is_checked = True

    def _reduce_once(self, root: FSDPModule, *, is_last: bool) -> None:
        """Reduce between replicas once a step; within one each time, to free whole gradients."""
        if self._layout.replicas > 1 and self._layout.shard_size > 1:
            root.set_requires_all_reduce(is_last)
        else:
            root.set_requires_gradient_sync(is_last)

    def _own_gradients(self) -> list[torch.Tensor]:
        """Hand this rank's gradient shards to the optimizer's tensors, and return them."""
        grads = []
        for name, parameter in self._trained.items():
            if parameter.grad is not None:
                grad = parameter.grad
                # Not to_local(), which autograd would track.
                own = grad._local_tensor if isinstance(grad, DTensor) else grad
                self._params[name].grad = own
                grads.append(own)
        return grads

    def accumulate_wider(
        self, works: Sequence[MicroStep], *, watch: Watch = unwatched
    ) -> LocalSums:
        # Sharded like this engine, rank by rank.
        own = {shard.name: shard.local for shard in self.shards()}
        sums, gradients = self.twin.accumulate(
            works,
            values=lambda name, shape, start, count: own[f"param/{name}"],
            running=self.running,
            watch=watch,
        )
        for name, grad in gradients.items():
            self._params[name].grad = grad
        return sums

    def recover(self) -> None:
        if self._is_half_way:
            reset = getattr(self._root(), "reset_iter_state", None)  # torch 2.13
            if reset is None:
                raise RankError("torch before 2.13 cannot go on after a forward pass that raised")
            reset()
            self._is_half_way = False
        self.running.drop()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.twin.close()
        for parameter, param in zip(self._trained.values(), self._params.values(), strict=True):
            parameter.grad = param.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: param.grad for n, param in self._params.items() if param.grad is not None}

    def apply(
        self, *, skip: torch.Tensor, grad_scale: torch.Tensor, learning_rate: float
    ) -> str | None:
        # Waits if weights are offloaded: the gate must be on the optimizer's device.
        self._optimizer.step(
            skip=skip.to(self._home),
            grad_scale=grad_scale.to(self._home),
            learning_rate=learning_rate,
        )
        self.running.update(skip)
        self._drop_gradients()
        return None

    def evaluate(self, batches: Sequence[Batch]) -> Evaluated:
        with self._optimizer.averaged():
            reshard(self.objective)  # what is gathered is stale if the shards' values were swapped
            return self._forward.evaluate(batches)

    @property
    def _place(self) -> tuple[int, int]:
        return self.mesh.get_local_rank("shard"), self._layout.shard_size

    def _cut(self) -> list[Shard]:
        return [self._shard(name, local) for name, local in self._tensors().items()]

    def _uncut(self, *, is_loaded: bool = False) -> dict[str, torch.Tensor]:
        return self._optimizer.uncut(is_loaded=is_loaded) | self.running.tensors()

    def full(self, name: str) -> torch.Tensor:
        uncut = self._uncut()
        if name in uncut:
            return uncut[name].detach().cpu()
        parameter = name.partition("/")[2]
        whole = self._whole(parameter, self._tensors()[name])[0].detach().cpu()
        return whole.view(()) if parameter in self._scalars else whole

    def _whole(self, name: str, local: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Gather a tensor sharded like a parameter; also returns this rank's first row."""
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return local, 0
        if local.device.type != self.device.type:  # collectives run on the device
            whole, first = self._whole(name, local.to(self.device))
            return whole.to(local.device), first
        # As bytes, since backends lack some dtypes.
        row_bytes = math.prod(parameter.shape[1:]) * local.itemsize
        most = -(-parameter.shape[0] // self._layout.shard_size) * row_bytes
        padded = torch.zeros(most, dtype=torch.uint8, device=local.device)
        own = local.contiguous().view(-1).view(torch.uint8)
        padded[: len(own)] = own
        gathered = padded.new_empty(most * self._layout.shard_size)
        gather_flat(gathered, padded, group=self.mesh.get_group("shard"))
        gathered = gathered[: parameter.shape[0] * row_bytes]
        whole = gathered.view(local.dtype).view(parameter.shape)
        return whole, self._first_own_row(parameter)

    def replicated(self) -> tuple[int, list[torch.Tensor]]:
        shards = (
            []
            if self._layout.replicas == 1
            else sorted(self.shards(), key=lambda shard: is_buffer(shard.name))
        )
        # Numbers that an optimizer keeps on the host are left out.
        copies = [shard.local for shard in shards if shard.local.device.type == self._home.type]
        return self._place[0], copies

    def update_counts(self) -> dict[str, int]:
        return self._optimizer.update_counts()

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        reshard(self.objective)  # gathered parameters would hide what was loaded
        complete(
            self._uncut(is_loaded=True),
            *self._place,
            device=self.device,
            group=self.mesh.get_group("shard"),
        )
        self.running.restore()
        self._optimizer.set_update_counts(update_counts)
        self._drop_gradients()

    def complete_copies(self) -> None:
        if self._layout.replicas > 1:
            group, device = self.mesh.get_group("replicate"), self.device
            for shard in self.shards():  # one at a time: it needs its size of memory once more
                complete({shard.name: shard.local}, *self.replica, device=device, group=group)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of each state tensor."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[f"param/{name}"] = _local(parameter).detach()
        return dict(sorted((tensors | self._optimizer.tensors()).items()))

    def _shard(self, name: str, local: torch.Tensor) -> Shard:
        own_name = name.partition("/")[2]
        parameter = self._parameters[own_name]
        rows_before = self._first_own_row(parameter) if isinstance(parameter, DTensor) else 0
        per_row = math.prod(parameter.shape[1:])
        return Shard(
            name=name,
            shape=() if own_name in self._scalars else tuple(parameter.shape),
            start=rows_before * per_row,
            local=local.view(-1),
        )

    def _first_own_row(self, parameter: torch.Tensor) -> int:
        """FSDP2 gives each rank ceil(rows / ranks) rows of dimension 0 (torch.chunk)."""
        rows = parameter.shape[0]
        return min(rows, -(-rows // self._layout.shard_size) * self._place[0])

    def _root(self) -> FSDPModule:
        assert isinstance(self.objective, FSDPModule)
        return self.objective


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
