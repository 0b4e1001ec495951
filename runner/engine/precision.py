"""Whether a device computes in BF16 by itself, or emulates it. Asks torch, knows no model names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Names for the most that oneDNN may use (its "CPU Dispatcher Control"); none of these multiplies
# in BF16. Under them it emulates, whatever the CPU has.
_CAPS_WITHOUT_BF16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)
_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first that is set counts


def has_native_bf16(device: torch.device, environ: Mapping[str, str]) -> bool:
    """Whether the device multiplies matrices in BF16 by itself: then it is no slower than FP32.

    Args:
        environ: may cap what oneDNN uses of a CPU, by ``ONEDNN_MAX_CPU_ISA``.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Without oneDNN torch only converts. With it, on ARM this means the instructions.
    has_library = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not has_library or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    is_x86: bool = torch.cpu._is_avx2_supported()  # all of those that oneDNN supports have AVX2
    return not is_x86 or _x86_multiplies_bf16(environ)


def _x86_multiplies_bf16(environ: Mapping[str, str]) -> bool:
    """There oneDNN calls supported what it emulates with AVX-512 as well."""
    cap = next((environ[name] for name in _CAPS if environ.get(name)), "")
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has) and cap.upper() not in _CAPS_WITHOUT_BF16
