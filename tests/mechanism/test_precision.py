"""``compute.precision=auto``: what a processor is asked, and what becomes of the answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config.compose import compose, from_yaml, to_yaml
from runner.config.schema import Precision, RunConfig
from runner.run_dir.paths import RunDir, settings_differing
from runner.session.inventory import has_native_bf16, settle_precision
from runner.system.error import ConfigError
from tests.observed import OneRank

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EMULATES = {"library": True, "library_does_bf16": True, "avx2": True, "bf16": False, "amx": False}
HAS = EMULATES | {"bf16": True}
ARM = EMULATES | {"avx2": False}


def pretend(monkeypatch: pytest.MonkeyPatch, cpu: dict[str, bool]) -> None:
    """Let torch answer as on another processor."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: cpu["library"])
    told = {
        (torch.ops.mkldnn, "_is_mkldnn_bf16_supported"): cpu["library_does_bf16"],
        (torch.cpu, "_is_avx2_supported"): cpu["avx2"],
        (torch.cpu, "_is_avx512_bf16_supported"): cpu["bf16"],
        (torch.cpu, "_is_amx_tile_supported"): cpu["amx"],
    }
    for (place, name), answer in told.items():
        assert callable(getattr(place, name)), "torch has renamed what is asked"
        monkeypatch.setattr(place, name, lambda answer=answer: answer)


@pytest.mark.parametrize(
    ("cpu", "environ", "native"),
    [
        (HAS, {}, True),
        (EMULATES | {"amx": True}, {}, True),
        (EMULATES, {}, False),
        (HAS | {"library": False}, {}, False),
        (HAS | {"library_does_bf16": False}, {}, False),
        (ARM, {}, True),
        (ARM | {"library_does_bf16": False}, {}, False),
        (HAS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False),
        (HAS, {"ONEDNN_MAX_CPU_ISA": "avx512_core_vnni"}, False),
        (HAS, {"DNNL_MAX_CPU_ISA": "AVX2"}, False),
        (HAS, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "DNNL_MAX_CPU_ISA": "AVX2"}, True),
        (HAS, {"ONEDNN_MAX_CPU_ISA": "AVX10_1_512_AMX"}, True),
        (HAS, {"ONEDNN_MAX_CPU_ISA": ""}, True),
    ],
)
def test_a_processor_is_asked_and_onednn_is_believed_about_its_cap(
    monkeypatch: pytest.MonkeyPatch, cpu: dict[str, bool], environ: dict[str, str], native: bool
) -> None:
    pretend(monkeypatch, cpu)
    assert has_native_bf16(CPU, environ) is native


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_that_emulates_has_none(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert has_native_bf16(CUDA, {"ONEDNN_MAX_CPU_ISA": "AVX2"}) is native


class Agreed(OneRank):
    """Ranks, of which each is told the same list of who has BF16."""

    def __init__(self, natives: list[bool]) -> None:
        super().__init__()
        self._natives = natives
        self.world_size = len(natives)

    def gather(self, value: Any) -> list[Any]:
        return self._natives


def settled(
    natives: list[bool], stored: dict[str, Any], *overrides: str
) -> tuple[RunConfig, list[str]]:
    said: list[str] = []
    config = compose(overrides)
    ranks: Any = Agreed(natives)
    return settle_precision(config, lambda: stored, CPU, ranks, said.append), said


BF16, FP32, AUTO = (compose([f"compute.precision={name}"]) for name in ("bf16", "fp32", "auto"))


@pytest.mark.parametrize(
    ("natives", "stored", "overrides", "settings", "words"),
    [
        ([True, True], {}, [], BF16, []),
        ([False], {}, [], FP32, ["fp32", "the processor has no", "compute.precision=bf16 uses"]),
        ([True, False, True], {}, [], FP32, ["processors of rank 1 have no BF16"]),
        ([False] * 9 + [True], {}, [], FP32, ["ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more have"]),
        # As the run began, on whatever machine it is taken up.
        ([False], {"compute.precision": "bf16"}, [], BF16, ["bf16, as the run began", "slower"]),
        ([True], {"compute.precision": "bf16"}, [], BF16, []),
        ([True], {"compute.precision": "fp32"}, [], FP32, ["fp32, as the run began"]),
        # An import has stored what it was told; no step has been taken.
        ([False], {"compute.precision": "auto"}, [], FP32, ["uses BF16 anyway"]),
        # What is asked for is not discussed.
        ([False], {"compute.precision": "fp32"}, ["compute.precision=bf16"], BF16, []),
        ([True], {}, ["compute.precision=fp32"], FP32, []),
    ],
)
def test_auto_is_settled(
    natives: list[bool],
    stored: dict[str, Any],
    overrides: list[str],
    settings: RunConfig,
    words: list[str],
) -> None:
    config, said = settled(natives, stored, *overrides)
    assert config == settings
    assert len(said) == bool(words), "one line at most"
    assert all(word in said[0] for word in words), said


def test_an_engine_that_has_only_bf16_gets_it_and_takes_up_no_other_run() -> None:
    config, said = settled([False], {}, "parallel=zero2")
    assert config.compute.precision is Precision.bf16
    assert "which this engine needs" in said[0] and "several times slower" in said[0]
    with pytest.raises(ConfigError, match=r"parallel=zero2.*began with compute.precision=fp32"):
        settled([True], {"compute.precision": "fp32"}, "parallel=zero2")


def test_what_was_stored_is_compared_with_what_was_settled(tmp_path: Path) -> None:
    def differing(stored: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
        return settings_differing(from_yaml(to_yaml(stored), source=tmp_path), now)

    assert differing(BF16, FP32) == {"compute.precision": ("bf16", "fp32")}
    assert not differing(BF16, BF16) and not differing(AUTO, BF16) and not differing(AUTO, FP32)


def test_settings_are_read_where_there_are_any(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.stored_settings() == {}
    run_dir.store_config(replace(BF16, out=str(tmp_path)))
    assert run_dir.stored_settings()["compute.precision"] == "bf16"
    run_dir.config.write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        run_dir.stored_settings()
