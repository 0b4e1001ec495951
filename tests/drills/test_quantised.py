"""Adapters on a quantised base: poisoned, killed, resumed, and refused on another base.

bitsandbytes and torchao are no part of the test environment: pip install '.[quantised]'.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from runner.__main__ import main
from tests import hf_folder
from tests.run import TINY, finish, read_lines, train
from tests.script_run import finished

BAD = [[5, 6], [19, 23]]


def need(base: str) -> None:
    package = "torchao" if base == "ao8" else "bitsandbytes"
    for name in (package, "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (pip install '.[quantised]')")


def run(out: Path, base: str, *todo: str, ranks: int, **how: Any) -> list[dict[str, Any]]:
    finished("quantised_script.py", out, str(out), base, *todo, ranks=ranks, **how)
    return [json.loads((out / f"rank{n}.json").read_text()) for n in range(max(1, ranks))]


@pytest.mark.full
@pytest.mark.parametrize("base", ["nf4", "fp4", "int8", "ao8"])
def test_poisoned_killed_and_resumed_adapters_are_those_of_a_loop_that_left_out(
    tmp_path: Path, base: str
) -> None:
    """Evaluations between steps, on two ranks; then another base is refused, and the base is not
    in the checkpoints."""
    need(base)
    todo = ("poison", "told", "bare", "other", "look")
    ends = run(tmp_path, base, *todo, ranks=2, restarts=1, KILL_AT="24")
    for end in ends:
        assert end["poison"]["skipped"] == BAD and end["poison"]["updates"] == 35
        assert end["poison"]["digest"] == end["told"]["digest"] == end["look"]["digest"]
        assert end["poison"]["weights"] == end["bare"]["weights"]
        assert "another base: its quantised weights have digest " in end["other"]
    assert ends[0]["poison"]["resumed"] > 0
    kinds = [line["kind"] for line in read_lines(tmp_path / "poison" / "journal.jsonl")]
    assert {"discard", "rollback", "crash"} <= set(kinds)
    newest = max((tmp_path / "poison" / "ring").glob("*/manifest.json"))
    names = list(json.loads(newest.read_text())["train_state"]["loop"]["tensors"])
    assert any(".lora_A." in name for name in names)
    assert not any("q_proj.base_layer" in name or "q_proj.weight" in name for name in names)


@pytest.mark.full
@pytest.mark.parametrize("base", ["nf4", "ao8"])
def test_one_process_is_exact_as_well(tmp_path: Path, base: str) -> None:
    need(base)
    [end] = run(tmp_path, base, "poison", "told", "bare", ranks=0)
    assert end["poison"]["skipped"] == BAD
    assert end["poison"]["digest"] == end["told"]["digest"]
    assert end["poison"]["weights"] == end["bare"]["weights"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("base", "ranks", "sharded"),
    [("nf4", 3, ""), ("int8", 2, "1"), ("ao8", 3, ""), ("ao8", 3, "1")],
)
def test_steps_that_are_replayed_are_exact_as_well(
    tmp_path: Path, base: str, ranks: int, sharded: str
) -> None:
    """Two batches a step, read late: what was computed meanwhile is replayed; so is, of three ranks
    under DDP, the first step of a start. Sharded: the adapters, by FSDP2."""
    need(base)
    how = {"KILL_AT": "37", "FSDP": sharded}
    for end in run(tmp_path, base, "all", "all_told", ranks=ranks, restarts=1, **how):
        assert end["all"]["digest"] == end["all_told"]["digest"]
        assert end["all"]["skipped"] == [[6, 8], [22, 30]] and end["all"]["resumed"] > 0
    kinds = [line["kind"] for line in read_lines(tmp_path / "all" / "journal.jsonl")]
    assert {"discard", "rollback", "crash"} <= set(kinds)


@pytest.mark.full
def test_out_of_memory_it_is_the_loop_that_halves(tmp_path: Path) -> None:
    need("nf4")
    for end in run(tmp_path, "nf4", "poison", "bare", ranks=2, restarts=1, FULL_AT="14"):
        assert end["poison"]["skipped"] == BAD and end["poison"]["resumed"] > 0
        assert end["poison"]["weights"] == end["bare"]["weights"]


LORA = "model.lora={r: 8, targets: all-linear, alpha: 32, dropout: 0.1}"


def told(model: Path, *more: str) -> list[str]:
    """Of a run of 24 steps."""
    told = ["model=hf", f"model.path={model}", LORA, "data=synthetic", "data.seq_len=32"]
    told += [f"data.vocab_size={len(hf_folder.LETTERS)}", "steps=24", "schedule.total=24"]
    told += ["guard.min_history=8", "checkpoint.every=6", "checkpoint.clean_after=3"]
    told += ["checkpoint.keep=8"]  # replay begins before the incident
    return [*told, "batch.global_size=8", "batch.micro_size=4", "model.quantize=nf4", *more]


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "layout", "skipped"),
    [
        (2, ("parallel=fsdp",), [[82, 90]]),
        (2, ("parallel=ddp", "guard.remedy=verdict"), [[88, 90]]),
        (4, ("parallel=hsdp", "parallel.shard_size=2", "guard.remedy=verdict"), [[88, 90]]),
    ],
)
def test_the_runner_on_four_bits(
    tmp_path: Path,
    ranks: int,
    layout: tuple[str, ...],
    skipped: list[list[int]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Poisoned, killed and resumed; explained, and so again by ``replay``; resumed on one rank.

    Refused on another base; adapters exported.
    """
    need("nf4")
    base = hf_folder.llama(tmp_path / "model", shard="40KB")
    faults = "poison@samples=88-89, kill@step=17,rank=1"
    if "guard.remedy=verdict" in layout:
        faults += ", nan_grad@step=6,rank=1"
    settings = told(base, *layout, f"faults=[{faults}]")
    hurt = finish(tmp_path / "hurt", *settings, ranks=ranks, restarts=1)
    skip = f"data.skip={json.dumps(skipped)}"
    left_out = finish(tmp_path / "left_out", *told(base, skip, *layout), ranks=ranks)
    assert "quantised weights: a step is the same bit for bit on the same kind" in hurt.text
    assert hurt.summary["skipped"] == skipped and hurt.summary["restarts"] == 1
    assert hurt.summary["state_digest"] == left_out.summary["state_digest"]
    if redone := hurt.journal("redo"):
        cause = [line["detail"]["cause"] for line in redone]
        assert [(one["cause"], one["ranks"]) for one in cause] == [
            ("hardware, transient", [1]),
            ("data", []),
        ]
        assert main(["replay", str(hurt.out), "--", *TINY, *settings]) == 0
        assert "here         data: 2 samples (stream positions 88, 89)" in capfd.readouterr().out
    alone = ("parallel=ddp", "parallel.shard_size=null", "steps=30")
    more = finish(tmp_path / "hurt", *settings[:-1], *alone, ranks=0)
    assert more.summary["steps"] == 30
    other = hf_folder.llama(tmp_path / "other", seed=3, shard="40KB")
    for name in base.glob("*.safetensors"):
        shutil.copy(other / name.name, name)
    refused = train(tmp_path / "hurt", *settings[:-1], *alone, "steps=36", ranks=0)
    assert refused.code == 2, refused.tail
    assert "another base: its quantised weights have digest " in refused.text
    exported = tmp_path / "adapters"
    assert main(["export", str(hurt.out), str(exported), "--format", "hf"]) == 0
    names = load_file(exported / "adapter_model.safetensors")
    assert names and all(".lora_" in name for name in names)
    assert main(["export", str(hurt.out), str(tmp_path / "m"), "--format", "hf", "--merge"]) == 2
    require_merged(base, exported)


def require_merged(base: Path, adapters: Path) -> None:
    """As the refusal says."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters)
    merged = model.merge_and_unload().state_dict()
    assert merged.keys() == before.keys()
    changed = [name for name, weight in before.items() if not weight.equal(merged[name])]
    assert changed and all(name.endswith("_proj.weight") for name in changed)
