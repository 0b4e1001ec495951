"""Whether a device computes in BF16 natively. Asks torch and needs no list of device models."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Caps on the instruction set that oneDNN may use (its "CPU Dispatcher Control"). None of these
# multiplies in BF16, so under them oneDNN emulates BF16 on any CPU.
_CAPS_WITHOUT_BF16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first one set wins


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
