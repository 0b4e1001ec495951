"""The ring in a script without a guard: whatever has a state_dict, killed in the midst of saves."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from runner import Guard, Ring
from runner.system.error import CheckpointError, ConfigError
from tests import warm
from tests.mechanism.test_guard_loop import journal, same

pytestmark = pytest.mark.usefixtures("node_memory")

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "ringed_script.py")


class Box:
    """Any state there can be."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def odd() -> dict[str, Any]:
    return {
        "ints": {0: torch.arange(5), (1, "a"): torch.tensor(True), None: [1, (2.5, "x")]},
        "a.b": torch.tensor([-0.0, 1e-40]),
        "a": {"b": torch.zeros(0, 3)},
        "half": torch.randn(3, 5, dtype=torch.float64).bfloat16(),
        "wide": torch.randn(7, dtype=torch.float64),
        "numpy": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "bytes": b"\0\xff",
        "nan": float("nan"),
        "count": collections.Counter("abca"),
        "view": torch.arange(12.0).view(3, 4).t(),
    }


def test_whatever_has_a_state_comes_back(tmp_path: Path) -> None:
    told = odd()
    with Ring(tmp_path / "a", {"box": Box(told)}) as ring:
        ring.save(3)
        digest = ring.digest()
    box = Box()
    with Ring(tmp_path / "a", {"box": box}) as again:
        assert again.step == 3 and again.digest() == digest
    assert str(box.state.pop("nan")) == str(told.pop("nan"))
    told["view"] = told["view"].contiguous()
    same(box.state, told)


def parts(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    return {"optimizer": optimizer, "model": model, "schedule": schedule}


def train(state: dict[str, Any], ring: Ring | None, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)
        state["model"](torch.randn(8, 6)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["schedule"].step()
        if ring is not None and (step + 1) % 5 == 0:
            ring.save(step + 1)


def states(state: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in state.items()}


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    unbroken = parts()
    train(unbroken, None, 0, 40)
    state = parts()
    with Ring(tmp_path / "a", state) as ring:
        train(state, ring, 0, 23)
        assert ring.step == 20 and (20, "committed", "disk") in ring.saved
    state = parts(seed=9)
    with Ring(tmp_path / "a", state) as ring:
        assert ring.step == 20
        train(state, ring, 20, 40)
        assert ring.prove() == []
        on_disk = [one for one in ring.saved if one[2] == "disk"]
        assert on_disk == [(step, "clean", "disk") for step in (30, 35, 40)]
    same(states(state), states(unbroken))


def test_back_to_what_is_proven(tmp_path: Path) -> None:
    state = parts()
    with Ring(tmp_path / "a", state) as ring:
        with pytest.raises(CheckpointError, match="clean yet"):
            ring.restore()
        with pytest.raises(ConfigError, match="nothing was saved"):
            ring.prove()
        train(state, ring, 0, 20)
        wanted = {step: one for step, one, tier in ring.saved if tier == "disk"}
        assert wanted == {5: "clean", 10: "clean", 15: "clean", 20: "committed"}
        nn.init.constant_(state["model"][0].weight, float("nan"))
        ring.save(21)  # proves 20
        assert ring.prove() and (21, "clean", "disk") not in ring.saved
        assert ring.restore() == 20 == ring.step
    with Ring(tmp_path / "a", parts()) as again:
        assert again.step == 20, "what the restore left behind is not loaded"
    with Ring(tmp_path / "a", state) as ring:
        train(state, ring, 20, 25)
    unbroken = parts()
    train(unbroken, None, 0, 25)
    same(states(state), states(unbroken))
    [line] = journal(tmp_path / "a", "restored")
    assert line["detail"]["to_step"] == 20
    with Ring(tmp_path / "a", parts()) as again:
        assert again.step == 25


def test_a_damaged_one_is_not_loaded(tmp_path: Path) -> None:
    state = parts()
    with Ring(tmp_path / "a", state, memory=False) as ring:
        train(state, ring, 0, 10)
    newest = max((tmp_path / "a" / "ring").glob("*/*.bin"), key=lambda path: path.stat().st_mtime)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with Ring(tmp_path / "a", parts(), memory=False) as again:
        assert again.step == 5


def test_written_while_training_goes_on(tmp_path: Path) -> None:
    state = parts()
    with Ring(tmp_path / "a", state) as ring:
        for step in range(1, 9):
            train(state, None, step - 1, step)
            ring.save(step, wait=False)
            while ring.poll():
                pass
        assert (8, "committed", "disk") in ring.saved
    plain, loaded = parts(), parts()
    train(plain, None, 0, 8)
    with Ring(tmp_path / "a", loaded) as again:
        assert again.step == 8
    same(states(loaded), states(plain))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"state": {}}, "give a mapping"),
    "no state": ({"state": {"step": 5}}, "'step'.*int.*state_dict"),
    "setting": ({"keeep": 2}, "keeep=2: no such setting.*keep"),
    "value": ({"keep": 0}, "keep=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_named(tmp_path: Path, case: str) -> None:
    told, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        Ring(tmp_path / "a", **{"state": {"box": Box({})}, **told})


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"made": [object()]}, r"box\.made\.0.*builtins\.object"),
        ({"x": torch.ones(2).to_sparse()}, r"box\.x: .*sparse_coo"),
        ({"x": torch.ones(2, device="meta")}, r"box\.x: .*meta"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path, state: Any, words: str) -> None:
    with Ring(tmp_path / "a", {"box": Box(state)}) as ring:
        with pytest.raises(ConfigError, match=words):
            ring.save(1)
        with pytest.raises(ConfigError, match="integer of at least 0"):
            ring.save(-1)


def test_a_notice_ends_no_script_that_has_the_ring_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves when the script says so, and looks at no request to stop."""
    monkeypatch.setattr("runner.health.notice._vendor", lambda: "gcp")
    with Ring(tmp_path / "a", {"box": Box()}) as ring:
        assert not ring._run.group.monitor.hears_notices


def test_plain_values_alone_and_those_of_numpy(tmp_path: Path) -> None:
    with Ring(tmp_path / "a", {"box": Box({"count": np.float64(2.5), "name": None})}) as ring:
        ring.save(1)
        assert ring.prove() == []
    box = Box({})
    with Ring(tmp_path / "a", {"box": box}) as ring:
        assert ring.step == 1
    assert type(box.state["count"]) is np.float64


def test_other_types_parts_and_shapes_are_refused(tmp_path: Path) -> None:
    with Ring(tmp_path / "a", {"model": nn.Linear(2, 3)}) as ring:
        ring.save(1)
    with pytest.raises(CheckpointError, match=r"float32 in the checkpoint and became .*bfloat16"):
        Ring(tmp_path / "a", {"model": nn.Linear(2, 3).bfloat16()})
    with pytest.raises(CheckpointError, match=r"\['model'\].*\['net'\]"):
        Ring(tmp_path / "a", {"net": nn.Linear(2, 3)})
    with pytest.raises(CheckpointError, match="'model' refuses its state"):
        Ring(tmp_path / "a", {"model": nn.Linear(2, 4)})
    model = nn.Linear(2, 3)
    with pytest.raises(CheckpointError, match=r"not made by runner\.Ring|another model"):
        Ring(guarded(tmp_path / "b"), {"model": model})


def guarded(out: Path) -> Path:
    model = nn.Linear(2, 3)
    guard = Guard(out, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in guard.over([torch.ones(1, 2)]):
        loss = model(batch).sum()
        loss.backward()
        guard.ok(loss)
    guard.close()
    return out


# -- processes that are killed ------------------------------------------------------------


def script(out: Path, *words: str, ranks: int = 0, **env: str) -> int:
    out.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    told = [sys.executable, *(launcher if ranks else []), SCRIPT, str(out), *words]
    done = warm.finished(told, timeout=90, env=env)
    assert done.returncode in (0, -9, 1), done.stderr[-3000:]
    return done.returncode


def starts(out: Path) -> list[dict[str, Any]]:
    return [
        json.loads((out / f"start-{n}").read_text()) for n in range(len([*out.glob("start-*")]))
    ]


def test_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """What was committed is loaded, bit for bit; a save that was not finished never was."""
    for number in (1, 3, 6):
        out = tmp_path / str(number)
        assert script(out, "24", KILL_AT=str(number)) == -9
        assert script(out, "24") == 0
        first, second = starts(out)
        assert first["step"] == 0 and second["same"]
        assert second["step"] in (3, 4, 5)
    assert script(tmp_path / "whole", "24") == 0
    ends = {json.loads(end.read_text())["digest"] for end in tmp_path.glob("*/end")}
    assert len(ends) == 1


def test_a_snapshot_in_memory_outlives_its_process(tmp_path: Path) -> None:
    assert script(tmp_path / "a", "9", ONLY_MEMORY="1", KILL_AFTER="6") == -9
    assert script(tmp_path / "a", "9") == 0
    assert starts(tmp_path / "a")[1] == {"step": 6, "memory": True, "same": True}


def test_a_small_tensor_that_begins_to_differ_between_ranks_is_each_ranks_own(
    tmp_path: Path,
) -> None:
    out = tmp_path / "a"
    out.mkdir()
    program = [str(ROOT / "tests" / "differing_script.py"), str(out)]
    for _ in range(2):
        done = warm.torchrun(program, ranks=2, timeout=90)
        assert done.returncode == 0, done.stderr[-3000:]
    ends = [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ends == [{"step": 2, "value": 0.0}, {"step": 2, "value": 1.0}]


def test_sharded_and_on_another_world_size(tmp_path: Path) -> None:
    """Two ranks; one is killed; then three, then a process alone that shards nothing."""
    out = tmp_path / "a"
    assert script(out, "22", "sharded", ranks=2, KILL_AT="3") == 1
    assert script(out, "22", "sharded", ranks=2) == 0
    assert script(tmp_path / "b", "22", "sharded", ranks=2) == 0
    assert (out / "end").read_text() == (tmp_path / "b" / "end").read_text()
    assert script(out, "23", "sharded", ranks=3) == 0
    assert script(out, "24") == 0
    assert [one["same"] for one in starts(out)] == [None, True, True, True]
    assert [one["step"] for one in starts(out)][2:] == [22, 23]
