"""Resolves what a run's first start decides: ``compute.precision=auto``.

A resumed run keeps what it began with; a new one takes what every rank supports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from runner.config.schema import Precision, RunConfig
from runner.config.validate import is_zero
from runner.distributed.agreement import Ranks
from runner.system.environment import variables
from runner.system.error import ConfigError

Stored = Callable[[], Mapping[str, Any]]
_KEY = "compute.precision"
_MOST_NAMED = 8
# Caps on the instruction set that oneDNN may use (its "CPU Dispatcher Control"). None of these
# multiplies in BF16, so under them oneDNN emulates BF16 on any CPU.
_CAPS_WITHOUT_BF16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first one set wins


def settle_precision(
    config: RunConfig,
    stored: Stored,
    device: torch.device,
    ranks: Ranks,
    say: Callable[[str], None],
) -> RunConfig:
    """Replace ``auto`` by ``bf16`` or ``fp32``, alike on all ranks. Collective.

    Args:
        stored: reads, on rank 0, the settings that the run began with; empty for a new run.

    Raises:
        ConfigError: the stored settings cannot be read, or the run began in FP32 and the engine
            that is configured computes in BF16 only.
    """
    if config.compute.precision is not Precision.auto:
        return config
    natives = ranks.gather(has_native_bf16(device, variables()))
    lacking = [rank for rank, has in enumerate(natives) if not has]
    began = ranks.of_first("reading compute.precision", lambda: stored().get(_KEY))
    if began not in (Precision.bf16.value, Precision.fp32.value):  # auto, stored by an import
        began = None
    zero = is_zero(config.parallel.kind)
    if zero and began == Precision.fp32.value:
        raise ConfigError(
            f"parallel={config.parallel.kind.value}: computes in BF16 only, and the run in out="
            f"{config.out} began with compute.precision=fp32; give another engine, another out, or "
            "compute.precision=bf16 and resume.allow=[compute.precision]"
        )
    by_device = Precision.fp32 if lacking and not zero else Precision.bf16
    precision = Precision(began) if began else by_device
    message = _message(precision, began, lacking, ranks.world_size)
    if message:
        say(message)
    return replace(config, compute=replace(config.compute, precision=precision))


def _message(precision: Precision, began: str | None, lacking: list[int], world_size: int) -> str:
    """A line about an unexpected choice; empty if all ranks have BF16 and use it."""
    named = ", ".join(map(str, lacking[:_MOST_NAMED]))
    others = " and others" if len(lacking) > _MOST_NAMED else ""
    who = f"the processors of rank {named}{others} have"
    if len(lacking) == world_size:
        who = "the processor has"
    if precision is Precision.fp32:
        if began:
            return f"{_KEY}=auto: fp32, as the run began"
        return (
            f"{_KEY}=auto: fp32, since {who} no BF16 instructions; "
            f"{_KEY}=bf16 uses BF16 anyway (emulated, several times slower)"
        )
    if not lacking:
        return ""
    why = "as the run began" if began else "which this engine needs"
    slow = f"{who} no BF16 instructions: emulated, several times slower"
    return f"{_KEY}=auto: bf16, {why}, but {slow}"


def has_native_bf16(device: torch.device, environ: Mapping[str, str]) -> bool:
    """Whether the device multiplies BF16 matrices natively, and so no slower than FP32.

    Args:
        environ: may cap oneDNN's instruction set by ``ONEDNN_MAX_CPU_ISA``.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without oneDNN torch only converts. With it, on ARM, support means native instructions.
    has_library = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not has_library or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    is_x86: bool = torch.cpu._is_avx2_supported()  # every x86 CPU that oneDNN supports has AVX2
    return not is_x86 or _x86_multiplies_bf16(environ)


def _x86_multiplies_bf16(environ: Mapping[str, str]) -> bool:
    """Whether an x86 CPU is native: oneDNN also reports AVX-512 emulation as supported."""
    cap = next((environ[name] for name in _CAPS if environ.get(name)), "")
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has) and cap.upper() not in _CAPS_WITHOUT_BF16
