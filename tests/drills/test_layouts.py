"""The guard and the ring where tensors lie on meshes of several dimensions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.drills.compare import logged_by
from tests.rows import full
from tests.run import read_lines
from tests.script_run import finished

RANKS = {"plain": 0, "tp": 2, "sp": 2, "columns": 2, "fsdp_tp": 4, "hsdp_tp": 8}
RANKS |= {"pp": 2, "pp_alike": 2, "pp_fsdp": 4}
BAD = [[6, 7], [20, 22]]
OTHERS = [
    ("plain", 0),
    *(full("tp", ranks) for ranks in (2, 4)),
    *(full("sp", 2), full("columns", 4), full("hsdp_tp", 8), full("fsdp_tp", 2)),
]
Ends = dict[str, dict[str, Any]]


def run(out: Path, layout: str, *todo: str, ranks: int | None = None, **how: Any) -> Ends:
    """What the script leaves, by the name of what was to do."""
    count = RANKS[layout] if ranks is None else ranks
    finished("laid_out_script.py", out, str(out), layout, *todo, ranks=count, **how)
    ends: Ends = json.loads((out / f"{layout}.json").read_text())
    return ends


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Ends]]:
    """Poisoned and killed, told to skip, and a ring alone; once for each layout."""

    @cache
    def ran(layout: str) -> tuple[Path, Ends]:
        out = tmp_path_factory.mktemp(layout)
        return out, run(out, layout, "poison", "told", "ring", restarts=1, KILL_AT="24")

    return ran


@pytest.mark.parametrize(
    ("layout", "together"),
    [
        ("fsdp_tp", [0, 1]),
        full("pp", [1]),  # always with all else: test_all_at_once_on_a_mesh
        full("pp_alike", [1]),
        full("pp_fsdp", [2]),
        full("tp", [0, 1]),
        full("sp", [0, 1]),
        full("columns", [0]),
        full("hsdp_tp", [0, 1]),
    ],
)
def test_poisoned_killed_and_resumed_it_is_the_run_told_to_skip(
    ran: Callable[[str], tuple[Path, Ends]], layout: str, together: list[int]
) -> None:
    """The ranks that compute the bad sample together are named together.

    In a pipeline those are named which have its loss.
    """
    out, ends = ran(layout)
    assert ends["poison"]["digest"] == ends["told"]["digest"]
    assert ends["poison"]["skipped"] == BAD and ends["poison"]["resumed"] > 0
    lines = read_lines(out / "poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 2
    assert [line["ranks"] for line in lines if line["kind"] == "discard"] == [together] * 3


@pytest.mark.parametrize(
    "layout",
    [full(name) for name in RANKS if name not in ("plain", "hsdp_tp")],
)
def test_nan_on_any_rank_is_seen_by_all(tmp_path: Path, layout: str) -> None:
    names = [f"nan{rank}" for rank in range(RANKS[layout])]
    ends = run(tmp_path, layout, *names, "told")
    assert {end["digest"] for end in ends.values()} == {ends["told"]["digest"]}
    assert all(end["skipped"] == [[12, 13]] for end in ends.values())


@pytest.mark.parametrize(
    "layout",
    ["pp", *(full(name) for name in ("columns", "fsdp_tp"))],
)
def test_all_at_once_on_a_mesh(tmp_path: Path, layout: str) -> None:
    """Accumulation, numbers read late, evaluations, a rollback, a stop, a kill, two resumes.

    Also what the loop logs, which is that of the steps that were applied.
    """
    ends = run(tmp_path, layout, "all", "all_told", restarts=2)
    assert ends["all"]["digest"] == ends["all_told"]["digest"]
    assert ends["all"]["skipped"] == [[6, 8], [22, 30]] and ends["all"]["resumed"] > 0
    kinds = [line["kind"] for line in read_lines(tmp_path / "all" / "journal.jsonl")]
    assert kinds.count("start") == 3
    told, own = (logged_by(tmp_path / name) for name in ("all_told", "all"))
    assert len(told) > 20 and own == told
    assert {"discard", "rollback", "preempted", "crash"} <= set(kinds), kinds


@pytest.mark.parametrize(("layout", "ranks"), OTHERS)
def test_on_other_meshes_the_state_is_the_same(
    ran: Callable[[str], tuple[Path, Ends]], tmp_path: Path, layout: str, ranks: int
) -> None:
    """From two by two ranks."""
    out, ends = ran("fsdp_tp")
    for name in ("poison", "ring"):
        shutil.copytree(out / name, tmp_path / name)
    found = run(tmp_path, layout, "look", "ring", ranks=ranks)
    assert found["look"]["digest"] == ends["poison"]["digest"]
    assert found["ring"] == {"digest": ends["ring"]["digest"], "step": 4}


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        full("pp", "plain"),
        full("pp_fsdp", "pp"),
        full("pp_fsdp", "fsdp_tp"),
        full("fsdp_tp", "pp_fsdp"),
    ],
)
def test_a_pipelines_state_is_the_same_on_other_stages(
    ran: Callable[[str], tuple[Path, Ends]], tmp_path: Path, source: str, layout: str
) -> None:
    out, ends = ran(source)
    shutil.copytree(out / "poison", tmp_path / "poison")
    assert run(tmp_path, layout, "look")["look"]["digest"] == ends["poison"]["digest"]


@pytest.mark.full
def test_stages_with_the_same_names_load_as_many_only(
    ran: Callable[[str], tuple[Path, Ends]], tmp_path: Path
) -> None:
    """A ring knows tensors by their stages."""
    out, ends = ran("pp")
    shutil.copytree(out / "ring", tmp_path / "ring")
    assert run(tmp_path, "pp", "ring", ranks=4)["ring"] == {**ends["ring"], "step": 4}
    with pytest.raises(AssertionError, match=r"of a pipeline of 2 stage\(s\), this ring has 1"):
        run(tmp_path, "tp", "ring")
