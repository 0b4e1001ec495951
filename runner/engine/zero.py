"""DeepSpeed ZeRO 1, 2 and 3. The only file that imports deepspeed, and only when it is used.

DeepSpeed partitions, reduces and gathers; the update itself is made by optimizers of ours on its
flat FP32 partitions (:mod:`runner.engine.partitions`), and so the gate is the same as everywhere.
DeepSpeed's own clipping, schedule and loss scaling are off.
``tests/mechanism/test_zero_contract.py`` lists every DeepSpeed name that is used, and names the one
that an upgrade moved.

On CUDA DeepSpeed itself waits for the device (its reduction streams; at every step stage 1, which
looks at the norm, and stage 3): ``guard.sync=false`` gives the same run there too, and removes
only our own wait.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runner.engine.buffers import is_buffer
from runner.engine.forward import Disturb, Forward
from runner.engine.optimizer import OptimizerSettings
from runner.engine.partitions import PartitionOptimizer
from runner.engine.protocol import (
    Batch,
    Engine,
    Evaluated,
    InitialValues,
    LocalSums,
    MicroStep,
    Shard,
    Watch,
    unwatched,
)
from runner.engine.whole_state import complete, gather_flat, give_dimension, scalar_names
from runner.system.environment import changeable
from runner.system.error import CheckpointError, ConfigError, RankError

# DeepSpeed settings that are passed on. DeepSpeed ignores unknown ones, so all others are refused:
# typing mistakes, and settings of later versions.
PASSED = (
    "zero_optimization",
    "comms_logger",
    "dump_state",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
)
# Settings that would break a guarantee, and what there is instead. Those without a counterpart here
# are refused as unknown ones are.
REFUSED = {
    "optimizer": "the gate lives in an optimizer of ours; use optim.*",
    "scheduler": "the rate is a function of applied updates; use schedule.*",
    "gradient_clipping": "the norm is agreed with the other signals; use optim.clip",
    "gradient_accumulation_steps": "follows from batch.* and the number of ranks",
    "train_batch_size": "use batch.global_size",
    "train_micro_batch_size_per_gpu": "use batch.micro_size",
    "fp16": "loss scaling skips steps on its own; BF16 needs none",
    "bf16": "set by the engine",
    "data_types": "gradients are accumulated in FP32",
    "communication_data_type": "gradients are reduced in FP32",
    "checkpoint": "checkpoints are the ring's",
    "elasticity": "the world size may change between commands anyway",
}
REFUSED_ZERO = {
    "stage": "use parallel=zero1, zero2 or zero3",
    "offload_param": "the state could not be read back exactly",
    "cpu_offload": "use offload_optimizer: {device: cpu}",
    "cpu_offload_param": "the state could not be read back exactly",
    "cpu_offload_use_pin_memory": "use offload_optimizer: {device: cpu, pin_memory: true}",
    "zenflow": "its update is not the fused one, and is applied steps late",
    "compute_grad_norm": "DeepSpeed's own norm is switched off anyway",
    # Seen in 0.19.8 with stage 2: _hp_mapping keeps the order before parameters are distributed.
    "round_robin_gradients": "DeepSpeed then reports a wrong location for each parameter",
    "zero_quantized_weights": "weights would not be exact",
    "zero_quantized_nontrainable_weights": "weights would not be exact",
    "zero_quantized_gradients": "gradients would not be exact",
    "zero_hpz_partition_size": "a second partition is not supported",
}
REFUSED_OFFLOAD = {
    "nvme_path": "only offload to the CPU is supported",
    "ratio": "two optimizers would share one gate; all or nothing is offloaded",
    "super_offload": "it updates first and undoes a bad step afterwards",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPlan:
    """``stage`` 1, 2 or 3; ``num_micro_batches`` per step; ``extra`` goes to DeepSpeed
    unchanged."""

    stage: int
    num_micro_batches: int
    extra: Mapping[str, Any]

    @property
    def offload(self) -> bool:
        """Whether FP32 weights and moments are in host memory."""
        return bool((self.extra.get("zero_optimization") or {}).get("offload_optimizer"))


def check_plan(plan: ZeroPlan) -> None:
    """Refuse DeepSpeed settings that would break a guarantee.

    Raises:
        ConfigError: names the key and the reason.
    """
    zero = plan.extra.get("zero_optimization") or {}
    if not isinstance(zero, Mapping):
        raise ConfigError(
            f"parallel.deepspeed.zero_optimization={zero}: must be a mapping, such as "
            "{overlap_comm: true}"
        )
    wrong = _named("", plan.extra, REFUSED) + _named("zero_optimization.", zero, REFUSED_ZERO)
    wrong += [
        f"{key}: is not passed on; allowed are {', '.join(PASSED)}"
        for key in plan.extra
        if key not in REFUSED and key not in PASSED
    ]
    if plan.offload:
        offload = zero["offload_optimizer"]
        key_path = "zero_optimization.offload_optimizer"
        if not isinstance(offload, Mapping) or offload.get("device") != "cpu":
            wrong.append(f"{key_path}={offload}: must be a mapping with device: cpu")
        else:
            wrong += _named(f"{key_path}.", offload, REFUSED_OFFLOAD)
    if wrong:
        raise ConfigError("\n".join(f"parallel.deepspeed.{problem}" for problem in wrong))


def _named(prefix: str, given: Mapping[str, Any], refused: Mapping[str, str]) -> list[str]:
    return [f"{prefix}{key}: {refused[key]}" for key in given if key in refused]


def deepspeed_settings(plan: ZeroPlan) -> dict[str, Any]:
    """Return the configuration for DeepSpeed."""
    extra = dict(plan.extra)
    zero = {"stage": plan.stage, **(extra.pop("zero_optimization", None) or {})}
    return {
        "train_micro_batch_size_per_gpu": 1,  # we count samples; DeepSpeed only multiplies by this
        "gradient_accumulation_steps": plan.num_micro_batches,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 62,
        "zero_optimization": zero,
        **extra,
    }


def build_module(make: Callable[[], nn.Module], plan: ZeroPlan, device: torch.device) -> nn.Module:
    """Build the module on ``device``; stage 3 partitions it during construction.

    Raises:
        ConfigError: DeepSpeed refuses a setting; has DeepSpeed's message.
    """
    deepspeed = _deepspeed(device)
    _check_settings(deepspeed, plan)
    if plan.stage < 3:
        with torch.device(device):
            module = make()
        give_dimension(module)  # DeepSpeed sends parameters as bytes
        return module
    try:
        with deepspeed.zero.Init(config_dict_or_path=deepspeed_settings(plan)):
            module = make()
    except ConfigError as error:
        # It has been made without DeepSpeed before.
        raise ConfigError(
            f"{error}; DeepSpeed's stage 3 runs the constructor with tensors in BF16, and takes no "
            "parameter without a dimension ([1] in place of []): change that, or use "
            "parallel=fsdp, which shards as much"
        ) from error
    _check_types(module)
    return module


def _check_types(module: nn.Module) -> None:
    """
    Raises:
        ConfigError: parameters have two dtypes, which DeepSpeed cannot put into one buffer.
    """
    trained = {
        # Stage 3 keeps the dtype on its partition; a cast of the parameter does not change it.
        name: getattr(parameter, "ds_tensor", parameter).dtype
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    first = next(iter(trained))
    for name, dtype in trained.items():
        if dtype is not trained[first]:
            raise ConfigError(
                f"parallel=zero3: {first} is {trained[first]} and {name} {dtype}; trained "
                "parameters must have one dtype (PEFT: autocast_adapter_dtype=False), or use "
                "parallel=fsdp, which shards as much"
            )


def _check_settings(deepspeed: Any, plan: ZeroPlan) -> None:
    """Have DeepSpeed parse the settings now: a restart would not fix one that it refuses."""
    import pydantic  # DeepSpeed's settings are pydantic models

    try:
        deepspeed.DeepSpeedConfig(deepspeed_settings(plan))
    except pydantic.ValidationError as error:
        messages = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()]
        refusal = "; ".join(f"{key}: {message}" if key else message for key, message in messages)
        raise ConfigError(f"parallel.deepspeed: DeepSpeed refuses {refusal}") from None
    except (ValueError, TypeError, AssertionError, deepspeed.DeepSpeedConfigError) as error:
        raise ConfigError(f"parallel.deepspeed: DeepSpeed refuses it: {error}") from None


def _deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed, quiet, for the accelerator of ``device``."""
    variables = changeable()
    variables.setdefault("DS_ACCELERATOR", device.type)
    variables.setdefault("LOCAL_RANK", "0")  # required even for a single process
    if device.type == "cuda":  # srun does not set it; 0 if a task sees one GPU
        variables["LOCAL_RANK"] = str(device.index)
    # It calls deprecated names of torch.distributed at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its shared-memory all-reduce for CPUs takes minutes to compile at the first start, and gloo
    # works as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class ZeroEngine(Engine):
    """See :class:`runner.engine.protocol.Engine`.

    Args:
        module: computes losses from a batch, see :class:`runner.engine.forward.Forward`; its
            ``network`` is from :func:`build_module`, with its buffers filled.
        embedding: the module whose output is the first activation of each sequence.
    """

    applies_wider = False  # DeepSpeed's partitions accept only gradients it has reduced itself

    def __init__(
        self,
        module: nn.Module,
        *,
        embedding: nn.Module,
        settings: OptimizerSettings,
        plan: ZeroPlan,
        device: torch.device,
        probe: bool,
        disturb: Disturb | None = None,
    ) -> None:
        super().__init__(
            module, device=device, home=torch.device("cpu") if plan.offload else device
        )
        self._world_size = dist.get_world_size()
        self.gradient_factor = float(self._world_size)
        scalars = scalar_names(self.network)
        self._shapes = {
            # Stage 3 keeps the whole shape beside what is left of it.
            name: () if name in scalars else tuple(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in self._parameters.items()
        }
        self._frozen = {
            name: self._frozen_shard(name)
            for name, parameter in self._parameters.items()
            if not parameter.requires_grad
        }
        trained = {n: p for n, p in self._parameters.items() if n not in self._frozen}
        dims = {name: len(shape) for name, shape in self._shapes.items()}
        self._optimizer = PartitionOptimizer(trained, dims, settings, self._home)
        deepspeed = _deepspeed(device)
        # It prints its memory use at any log level.
        with contextlib.redirect_stdout(io.StringIO()):
            self._engine, wrapped, _, _ = deepspeed.initialize(
                model=module,
                optimizer=self._optimizer.handed,
                config=deepspeed_settings(plan),
                dist_init_required=False,
            )
        self.works_a_step = plan.num_micro_batches  # DeepSpeed counts them, and reduces at the last
        self._stage = stage_of(wrapped)
        self._stage.switch_norm_off()
        if isinstance(self._stage, _StageTwo):
            for parameter in trained.values():
                mark_ordered(parameter)
        self._optimizer.take(self._stage.flats(), self._stage.groups())
        self.running.note()  # DeepSpeed may have replaced some
        self._forward = Forward(
            self._engine,
            embedding=embedding,
            buffers=self.running,
            device=device,
            probe=probe,
            disturb=disturb,
        )

    @property
    def waits_for_host(self) -> bool:
        return self._optimizer.waits_for_host

    def initialise(self, values: InitialValues) -> None:
        super().initialise(values)
        for shard in self.shards():
            if not shard.name.startswith("param/") and not is_buffer(shard.name):
                shard.local.zero_()
        self.finish_load(dict.fromkeys(self._trained(), 0))

    def _frozen_shard(self, name: str) -> Shard:
        """This rank's FP32 part; DeepSpeed keeps such a parameter in BF16 only."""
        numel = math.prod(self._shapes[name])
        size = -(-numel // self._world_size)  # fewer or none on the last ranks, as in stage 3
        start = min(numel, size * dist.get_rank())
        local = torch.zeros(min(size, numel - start), device=self._home)
        return Shard(name=f"param/{name}", shape=self._shapes[name], start=start, local=local)

    def _trained(self) -> list[str]:
        return [name for name in self._parameters if name not in self._frozen]

    def accumulate(self, works: Sequence[MicroStep]) -> LocalSums:
        self._forward.begin()
        self._is_half_way = True
        for number, work in enumerate(works, start=1):
            loss = self._forward.training_loss(work)
            # DeepSpeed averages over ranks; we need the sum.
            self._engine.backward(loss * self._world_size, scale_wrt_gas=False)
            if number < len(works):
                self._engine.step()  # counts the micro-batch; updates nothing
        self._is_half_way = False
        return self._forward.sums(self._stage.gradients())

    def recover(self) -> None:
        self.twin.close()
        self.running.drop()
        if self._is_half_way:
            raise RankError("DeepSpeed cannot go on after a forward or backward pass that raised")

    def gradients(self) -> dict[str, torch.Tensor]:
        gradients = {name: self._stage.gradient(self._parameters[name]) for name in self._trained()}
        return {name: grad for name, grad in gradients.items() if grad is not None}

    def accumulate_wider(
        self, works: Sequence[MicroStep], *, watch: Watch = unwatched
    ) -> LocalSums:
        whole: dict[str, torch.Tensor] = {}

        def values(name: str, shape: tuple[int, ...], start: int, count: int) -> torch.Tensor:
            """Gather one parameter at a time; the twin asks in the same order on all ranks."""
            if name not in whole:
                whole.clear()
                whole[name] = self.full(f"param/{name}").view(-1)
            return whole[name][start : start + count]

        sums, _ = self.twin.accumulate(works, values=values, running=self.running, watch=watch)
        return sums

    def apply(
        self, *, skip: torch.Tensor, grad_scale: torch.Tensor, learning_rate: float
    ) -> str | None:
        # Waits if the optimizer is offloaded: torch would copy the gate to the CPU without waiting,
        # and read stale memory.
        self._optimizer.prepare(
            skip=skip.to(self._home),
            grad_scale=grad_scale.to(self._home),
            learning_rate=learning_rate,
        )
        self._engine.step()
        is_applied = self._engine.was_step_applied()
        self.running.update(skip if is_applied else torch.ones_like(skip))
        if is_applied or skip.item():
            return None
        return "DeepSpeed itself skipped an update that the gate had let through"

    def evaluate(self, batches: Sequence[Batch]) -> Evaluated:
        with self._optimizer.averaged() as is_other:
            if is_other:
                self._refresh()
            evaluated = self._forward.evaluate(batches)
        if is_other:
            self._refresh()
        return evaluated

    @property
    def _place(self) -> tuple[int, int]:
        return dist.get_rank(), self._world_size

    def _cut(self) -> Iterator[Shard]:
        for name in self._parameters:
            yield from self._shards_of(name)

    def _shards_of(self, name: str) -> Iterator[Shard]:
        """What of a parameter and its state is cut."""
        if name in self._frozen:
            yield self._frozen[name]
            return
        place = self._stage.locate(self._parameters[name])
        state = self._optimizer.tensors(name, place.flat)
        for kind, values in {"param": place.flat.detach(), **state}.items():
            yield Shard(
                name=f"{kind}/{name}",
                shape=self._shapes[name],
                start=place.start,
                local=values.narrow(0, place.offset, place.count),
            )

    def _uncut(self, *, is_loaded: bool = False) -> dict[str, torch.Tensor]:
        return self._optimizer.uncut(is_loaded=is_loaded) | self.running.tensors()

    def full(self, name: str) -> torch.Tensor:
        parameter = name.partition("/")[2]
        uncut = self._uncut()
        if name in uncut:
            return uncut[name].detach().cpu()
        shard = next(shard for shard in self._shards_of(parameter) if shard.name == name)
        # Summed as bytes: everyone else's zeros leave the bits alone, -0.0 included.
        item_bytes = shard.local.itemsize
        whole = torch.zeros(math.prod(shard.shape) * item_bytes, dtype=torch.uint8)
        first, last = shard.start, shard.start + len(shard.local)
        whole[first * item_bytes : last * item_bytes] = shard.local.view(torch.uint8)
        whole = whole.to(self.device)
        dist.all_reduce(whole)
        return whole.view(shard.local.dtype).view(shard.shape).cpu()

    def replicated(self) -> tuple[int, list[torch.Tensor]]:
        """Stages 1 and 2 give every rank all BF16 parameters."""
        if isinstance(self._stage, _StageThree):
            return 0, []
        parameters = [parameter.detach() for parameter in self._parameters.values()]
        return 0, [*parameters, *self.running.tensors().values()]

    def update_counts(self) -> dict[str, int]:
        """Counts of the flat tensors that hold the parameters; all flat tensors step together."""
        counts = self._optimizer.update_counts()
        assert len(counts) == 1, "flat partitions have stepped apart"
        return dict.fromkeys(self._trained(), counts.pop())

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        counts = {update_counts[name] for name in self._trained()}
        if len(counts) != 1:
            raise CheckpointError(
                f"the checkpoint's parameters have different update counts {sorted(counts)}; ZeRO "
                "keeps one for all: resume with parallel=fsdp"
            )
        complete(self._uncut(is_loaded=True), *self._place, device=self.device)
        self._optimizer.set_update_count(counts.pop())
        self.running.restore()
        self._refresh()

    def _refresh(self) -> None:
        self._stage.refresh([(self._parameters[name], held) for name, held in self._frozen.items()])


def mark_ordered(parameter: nn.Parameter) -> None:
    """Mark a parameter whose gradient stage 2 reduces in backward, in the order of its use."""
    parameter.is_reduced_in_order = True  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Location of this rank's part of a parameter.

    Its elements ``[start, start + count)`` are elements ``[offset, offset + count)`` of ``flat``.
    """

    flat: torch.Tensor
    offset: int
    start: int
    count: int


# What this file uses of DeepSpeed's optimizers, most of it private.
OF_OPTIMIZERS = {
    "BF16_Optimizer": (
        "fp32_groups_flat_partition",
        "fp32_groups_gradient_flat_partition",
        "get_grads_for_norm",
        "update_lp_params",
    ),
    "DeepSpeedZeroOptimizer": (
        "averaged_gradients",
        "scaled_global_norm",
        "single_partition_of_fp32_groups",
        "update_lp_params",
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
        "_get_norm_groups",
        "_reassign_or_swap_out_partitioned_parameters",
        "checkpoint_event_epilogue",
        "checkpoint_event_prologue",
        "fp32_partitioned_groups_flat",
        "get_param_id",
        "grad_partitions_flat_buffer",
        "grad_position",
        "sub_group_to_group_id",
    ),
}


def stage_of(wrapped: Any) -> _Stage:
    """
    Args:
        wrapped: the DeepSpeed optimizer around torch's.

    Raises:
        ConfigError: its class is not supported, or this version of DeepSpeed lacks what is used.
    """
    kinds: dict[str, type[_Stage]] = {
        "BF16_Optimizer": _StageOne,
        "DeepSpeedZeroOptimizer": _StageTwo,
        "DeepSpeedZeroOptimizer_Stage3": _StageThree,
    }
    name = type(wrapped).__name__
    if name not in kinds:
        raise ConfigError(
            f"parallel.deepspeed: selects DeepSpeed's {name}, and only {', '.join(kinds)} are "
            "supported: remove the setting that selects it"
        )
    missing = [attribute for attribute in OF_OPTIMIZERS[name] if not hasattr(wrapped, attribute)]
    if missing:
        raise ConfigError(
            f"DeepSpeed {version('deepspeed')}: its {name} has no {', '.join(missing)}, which "
            "parallel=zero* uses: install deepspeed==0.19.8, with which it was tested"
        )
    return kinds[name](wrapped)


class _Stage(ABC):
    """What differs between DeepSpeed's optimizers.

    Written for stages 1 and 2: a parameter's ``_hp_mapping`` locates its FP32 part.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    @abstractmethod
    def switch_norm_off(self) -> None:
        """Disable DeepSpeed's own norm. It would repeat ours, and in stages 1 and 3 a non-finite
        norm makes DeepSpeed silently skip the update; only the gate decides that.
        """

    @abstractmethod
    def flats(self) -> list[torch.Tensor]:
        """This rank's FP32 partitions, 1-D; the keys of the optimizer's state."""

    def groups(self) -> list[int]:
        """The number of each flat tensor's parameter group: one partition a group."""
        return list(range(len(self.flats())))

    @abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """This rank's share of the reduced gradient, after the last micro-batch; 1-D, FP32."""

    def locate(self, parameter: nn.Parameter) -> _Place:
        """This rank's part of a trained parameter; it may hold none of it."""
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return _Place(flat=torch.empty(0), offset=0, start=0, count=0)
        address = mapping.hp_fragment_address
        fragment = mapping.get_hp_fragment()
        return _Place(
            flat=next(flat for flat in self.flats() if _holds(flat, fragment)),
            offset=address.start,
            start=mapping.lp_fragment_address.start,
            count=address.numel,
        )

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of its gradient, 1-D, matching :meth:`locate`; None if it has none."""
        place = self.locate(parameter)
        # Gradients have the layout of the weights, flat by flat.
        for flat, grad in self._pairs():
            if flat is place.flat:
                return grad.narrow(0, place.offset, place.count)
        return None

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's FP32 partitions that have a gradient, with it."""
        return list(zip(self.flats(), self.gradients(), strict=True))

    def refresh(self, frozen: Sequence[tuple[nn.Parameter, Shard]]) -> None:
        """Remake the BF16 parameters from the FP32 partitions and slices. Collective."""
        self._wrapped.update_lp_params()
        for parameter, part in frozen:
            _gather_into(parameter, part)


def _holds(flat: torch.Tensor, part: torch.Tensor) -> bool:
    return flat.data_ptr() <= part.data_ptr() < flat.data_ptr() + flat.numel() * flat.itemsize


@torch.no_grad()
def _gather_into(parameter: nn.Parameter, part: Shard) -> None:
    """Gather every rank's part into the whole parameter on every rank. Collective."""
    size = -(-parameter.numel() // dist.get_world_size())
    padded = torch.zeros(size, dtype=parameter.dtype, device=parameter.device)
    padded[: len(part.local)] = part.local
    whole = padded.new_empty(size * dist.get_world_size())
    gather_flat(whole, padded)
    parameter.copy_(whole[: parameter.numel()].view_as(parameter))


class _StageOne(_Stage):
    """Stage 1: for BF16 with FP32 accumulation DeepSpeed uses its BF16_Optimizer."""

    def switch_norm_off(self) -> None:
        nothing = torch.zeros(1, device=self.flats()[0].device)
        self._wrapped.get_grads_for_norm = lambda: ([nothing], {})

    def flats(self) -> list[torch.Tensor]:
        return list(self._wrapped.fp32_groups_flat_partition)

    def gradients(self) -> list[torch.Tensor]:
        return list(self._wrapped.fp32_groups_gradient_flat_partition)


class _StageTwo(_Stage):
    """Stage 2, and stage 1 with offload."""

    def switch_norm_off(self) -> None:
        nothing = torch.zeros((), device=self.flats()[0].device)
        self._wrapped.scaled_global_norm = lambda: nothing

    def flats(self) -> list[torch.Tensor]:
        return list(self._wrapped.single_partition_of_fp32_groups)

    def gradients(self) -> list[torch.Tensor]:
        # With offload, a group without elements on this rank has no entry. Sorted, because entries
        # are in the order in which they were filled.
        gradients: list[torch.Tensor] = []
        for _, group in sorted(self._wrapped.averaged_gradients.items()):
            if isinstance(group, list):  # no accumulation in another dtype
                gradients += [gradient.view(-1) for gradient in group]
            elif group is not None:
                gradients.append(group.flat_partition)
        return gradients

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        groups = dict(self._wrapped.averaged_gradients.items())
        return [
            (flat, groups[number].flat_partition)
            for number, flat in enumerate(self.flats())
            if groups.get(number) is not None
        ]


class _StageThree(_Stage):
    """Every rank holds ceil(numel / ranks) elements of each parameter."""

    def switch_norm_off(self) -> None:
        nothing = torch.zeros((), device=self.flats()[0].device)
        self._wrapped._get_norm_groups = lambda: [nothing]

    def flats(self) -> list[torch.Tensor]:
        return list(self._wrapped.fp32_partitioned_groups_flat)

    def groups(self) -> list[int]:
        """A group may have several, of limited size each."""
        groups = self._wrapped.sub_group_to_group_id
        return [groups[number] for number in range(len(self.flats()))]

    def gradients(self) -> list[torch.Tensor]:
        return [self._wrapped.grad_partitions_flat_buffer]

    def locate(self, parameter: nn.Parameter) -> _Place:
        partitioned: Any = parameter
        # Not the public safe_get_local_fp32_param: it copies an offloaded partition.
        position = self._wrapped.grad_position[self._wrapped.get_param_id(parameter)]
        group, offset, size = position
        start = min(partitioned.ds_numel, size * dist.get_rank())
        # The last rank's part is padded to the others' length.
        count = min(size, partitioned.ds_numel - start)
        return _Place(flat=self.flats()[group], offset=offset, start=start, count=count)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        partitioned: Any = parameter
        grads = self._wrapped._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        padded: torch.Tensor = grads[partitioned.ds_id]
        return padded.narrow(0, 0, self.locate(parameter).count)

    def refresh(self, frozen: Sequence[tuple[nn.Parameter, Shard]]) -> None:
        # The two events drop small, persistent parameters and gather them anew. Without them,
        # parameters gathered by a forward pass stay stale. Seen after a rollback: the digest is
        # right and the next loss is wrong.
        self._wrapped.checkpoint_event_prologue()
        for number in range(len(self.flats())):
            self._wrapped._reassign_or_swap_out_partitioned_parameters(number)
        for parameter, part in frozen:
            partitioned: Any = parameter
            partitioned.ds_tensor.data[: len(part.local)].copy_(part.local)
        self._wrapped.checkpoint_event_epilogue()
