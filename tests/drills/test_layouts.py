"""The guard and the ring where tensors lie on meshes of several dimensions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import any_layout_script
from tests.drills.compare import logged_by
from tests.rows import full
from tests.run import read_lines
from tests.script_run import finished

RANKS = {"plain": 0, "tp": 2, "sp": 2, "columns": 2, "fsdp_tp": 4, "hsdp_tp": 8}
RANKS |= {"pp": 2, "pp_alike": 2, "pp_fsdp": 4, "ep": 2, "ep_plain": 2, "ep_fsdp": 4}
REFUSED = ("ep_plain", "ep_fsdp")
# Of layouts on six ranks: those that compute sample 1 together.
SIX = {"tp": [*range(6)], "sp": [*range(6)], "fsdp_tp": [0, 1], "hsdp_tp": [0, 1], "ep": [0]}
SIX |= {"pp_fsdp": [3]}
BAD = [[6, 7], [20, 22]]
OTHERS = [
    ("plain", 0),
    *(full("tp", ranks) for ranks in (2, 4)),
    *(full("sp", 2), full("columns", 4), full("hsdp_tp", 8), full("fsdp_tp", 2)),
    *(full("fsdp_tp", 6), full("sp", 6)),
]
Ends = dict[str, dict[str, Any]]
Ran = Callable[..., tuple[Path, Ends]]  # of a layout, and of a number of ranks


def run(out: Path, layout: str, *todo: str, ranks: int | None = None, **how: Any) -> Ends:
    """What the script leaves, by the name of what was to do."""
    count = RANKS[layout] if ranks is None else ranks
    finished("laid_out_script.py", out, str(out), layout, *todo, ranks=count, **how)
    ends: Ends = json.loads((out / f"{layout}.json").read_text())
    return ends


def assert_alike(layout: str, draws: list[str]) -> None:
    """The ranks that compute a sample together draw the same."""
    count = {"tp": len(draws), "sp": len(draws), "fsdp_tp": 2, "hsdp_tp": 2}.get(layout, 1)
    for at in range(0, len(draws), count):
        assert len({*draws[at : at + count]}) == 1, draws


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Poisoned and killed, told to skip, and a ring alone; once for each layout."""

    @cache
    def ran(layout: str, ranks: int) -> tuple[Path, Ends]:
        out = tmp_path_factory.mktemp(layout)
        todo = ("poison", "told", "ring")
        return out, run(out, layout, *todo, ranks=ranks, restarts=1, KILL_AT="24")

    return lambda layout, ranks=None: ran(layout, ranks or RANKS[layout])


@pytest.mark.parametrize(
    ("layout", "ranks", "together"),
    [
        ("fsdp_tp", None, [0, 1]),
        full("pp", None, [1]),  # always with all else: test_all_at_once_on_a_mesh
        full("pp_alike", None, [1]),
        full("pp_fsdp", None, [2]),
        full("tp", None, [0, 1]),
        full("sp", None, [0, 1]),
        full("columns", None, [0]),
        full("hsdp_tp", None, [0, 1]),
        full("ep", None, [0]),
        *(full(layout, 6, together) for layout, together in SIX.items()),
    ],
)
def test_poisoned_killed_and_resumed_it_is_the_run_told_to_skip(
    ran: Ran, layout: str, ranks: int | None, together: list[int]
) -> None:
    """The ranks that compute the bad sample together are named together.

    In a pipeline those are named which have its loss. Six ranks cut what they do not divide: some
    have less than others, or nothing.
    """
    out, ends = ran(layout, ranks)
    assert ends["poison"]["digest"] == ends["told"]["digest"]
    assert ends["poison"]["skipped"] == BAD and ends["poison"]["resumed"] > 0
    lines = read_lines(out / "poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 2
    assert [line["ranks"] for line in lines if line["kind"] == "discard"] == [together] * 3


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        *(
            full(name, ranks)
            for name, ranks in RANKS.items()
            if name not in ("plain", "hsdp_tp", *REFUSED)
        ),
        *(full(name, 6) for name in SIX),
    ],
)
def test_nan_on_any_rank_is_seen_by_all(tmp_path: Path, layout: str, ranks: int) -> None:
    """The loss is finite, and the rank is named whose part of a gradient is not."""
    names = [f"nan{rank}" for rank in range(ranks)]
    ends = run(tmp_path, layout, *names, "told", ranks=ranks)
    assert {end["digest"] for end in ends.values()} == {ends["told"]["digest"]}
    assert all(end["skipped"] == [[12, 13]] for end in ends.values())
    for rank, name in enumerate(names):
        lines = read_lines(tmp_path / name / "journal.jsonl")
        assert [line["ranks"] for line in lines if line["kind"] == "discard"] == [[rank]]


@pytest.mark.parametrize(
    "layout", ["pp", "sp", *map(full, ("columns", "fsdp_tp", "tp", "ep", "pp_fsdp"))]
)
def test_all_at_once_on_a_mesh(tmp_path: Path, layout: str) -> None:
    """Accumulation, numbers read late, evaluations, a rollback, a stop, a kill, two resumes.

    Also what the loop logs, which is that of the steps that were applied; and, but for pipelines,
    an overflow of FP16 on one rank. Each step drops out other numbers.
    """
    ends = run(tmp_path, layout, "all", "all_told", restarts=2, DROP="0.1")
    assert ends["all"]["digest"] == ends["all_told"]["digest"]
    assert ends["all"]["draws"] == ends["all_told"]["draws"]
    assert_alike(layout, ends["all"]["draws"])
    assert ends["all"]["skipped"] == [[6, 8], [22, 30]] and ends["all"]["resumed"] > 0
    kinds = [line["kind"] for line in read_lines(tmp_path / "all" / "journal.jsonl")]
    assert kinds.count("start") == 3
    told, own = (logged_by(tmp_path / name) for name in ("all_told", "all"))
    assert len(told) > 20 and own == told
    assert {"discard", "rollback", "preempted", "crash"} <= set(kinds), kinds


@pytest.mark.parametrize(
    "layout", ["fsdp_tp", *map(full, ("tp", "sp", "columns", "hsdp_tp", "pp", "pp_fsdp"))]
)
def test_loss_and_norm_are_those_of_one_process(ran: Ran, tmp_path: Path, layout: str) -> None:
    """Ranks that compute a sample together count as one, and what several hold counts once."""
    run(tmp_path, "plain", "poison")
    own, alone = (
        [
            (line["samples"], line["loss"], line["grad_norm"])
            for line in read_lines(folder / "metrics.jsonl")
            if line["action"] == "apply"
        ]
        for folder in (ran(layout)[0] / "told", tmp_path / "poison")
    )
    assert len(own) > 30 and [one[0] for one in own] == [one[0] for one in alone]
    for (_, *numbers), (_, *others) in zip(own, alone, strict=True):
        assert numbers == pytest.approx(others, rel=1e-3)


@pytest.mark.parametrize(
    "layout", ["fsdp_tp", *map(full, ("tp", "sp", "columns", "ep", "hsdp_tp"))]
)
def test_passes_of_a_loader_are_those_of_a_plain_loop(tmp_path: Path, layout: str) -> None:
    """A DistributedSampler's: a NaN in each, out of memory, a stop in an evaluation, a kill."""
    ends = run(tmp_path, layout, "epochs", "bare", restarts=3)
    assert ends["epochs"]["digest"] == ends["bare"]["digest"]
    assert len(ends["epochs"]["skipped"]) == 3 and ends["epochs"]["resumed"] > 10
    kinds = {line["kind"] for line in read_lines(tmp_path / "epochs" / "journal.jsonl")}
    assert {"discard", "out_of_memory", "preempted", "crash"} <= kinds
    rows = [line["rows"] for line in read_lines(tmp_path / "epochs" / "metrics.jsonl")]
    assert rows[0] == 2 * rows[-1]


@pytest.mark.parametrize(("layout", "ranks"), OTHERS)
def test_on_other_meshes_the_state_is_the_same(
    ran: Ran, tmp_path: Path, layout: str, ranks: int
) -> None:
    """From two by two ranks."""
    out, ends = ran("fsdp_tp")
    for name in ("poison", "ring"):
        shutil.copytree(out / name, tmp_path / name)
    found = run(tmp_path, layout, "look", "ring", ranks=ranks)
    assert found["look"]["digest"] == ends["poison"]["digest"]
    assert_alike(layout, found["look"]["draws"])
    assert (found["ring"]["digest"], found["ring"]["step"]) == (ends["ring"]["digest"], 4)


@pytest.mark.parametrize(
    ("source", "layout", "ranks"),
    [
        full("pp", "plain", 0),
        full("pp_fsdp", "pp", 2),
        full("pp_fsdp", "fsdp_tp", 4),
        full("fsdp_tp", "pp_fsdp", 4),
        full("ep", "ep", 3),
        full("ep", "ep", 6),
    ],
)
def test_a_guards_state_is_the_same_on_other_stages_and_ranks(
    ran: Ran, tmp_path: Path, source: str, layout: str, ranks: int
) -> None:
    """And a ring's, but for a pipeline's."""
    out, ends = ran(source)
    names = {"look": "poison"} if "pp" in (source + layout) else {"look": "poison", "ring": "ring"}
    for name in names.values():
        shutil.copytree(out / name, tmp_path / name)
    found = run(tmp_path, layout, *names, ranks=ranks)
    for todo, name in names.items():
        assert found[todo]["digest"] == ends[name]["digest"]


@pytest.mark.parametrize("layout", ["ep_fsdp", full("ep_plain")])
def test_experts_that_pass_for_copies_are_refused_with_the_remedy(
    tmp_path: Path, layout: str
) -> None:
    """Each rank has its own under the names of the others', which nothing else tells apart."""
    with pytest.raises(AssertionError, match=r"Experts of which each rank has its own are DTensor"):
        run(tmp_path, layout, "told")


@pytest.mark.parametrize("layout", ["ep_fsdp", full("ep_plain")])
def test_a_ring_holds_what_each_rank_has_or_refuses(tmp_path: Path, layout: str) -> None:
    """Experts as plain tensors differ between ranks, and are held for each."""
    if layout == "ep_fsdp":
        with pytest.raises(AssertionError, match=r"would be lost. Experts of which each rank"):
            run(tmp_path, layout, "ring")
        return
    first = run(tmp_path, layout, "ring")["ring"]
    assert run(tmp_path, layout, "ring")["ring"] == first
    assert len(set(first["held"])) == RANKS[layout]


@pytest.mark.full
def test_stages_with_the_same_names_load_as_many_only(ran: Ran, tmp_path: Path) -> None:
    """A ring knows tensors by their stages."""
    out, ends = ran("pp")
    shutil.copytree(out / "ring", tmp_path / "ring")
    found = run(tmp_path, "pp", "ring", ranks=4)["ring"]
    assert (found["digest"], found["step"]) == (ends["ring"]["digest"], 4)
    with pytest.raises(AssertionError, match=r"of a pipeline of 2 stages, this ring has 1"):
        run(tmp_path, "tp", "ring")


@pytest.mark.parametrize(
    ("seed", "ranks"), [(0, (4, 3, 0)), *(full(n, (4, 6, 3)) for n in range(1, 9))]
)
def test_tensors_that_lie_anyhow_are_those_of_one_process(
    tmp_path: Path, seed: int, ranks: tuple[int, ...]
) -> None:
    """Each start has other meshes and cuts, and the last ones other numbers of ranks.

    The norm of one tensor is BF16. A checkpoint has each byte once, and no rank writes less than a
    third of its share.
    """
    rings = set()
    for number, count in enumerate((4, *ranks), start=1):
        words = (str(tmp_path), str(seed * 10 + number), str(8 * number))
        finished("any_layout_script.py", tmp_path, *words, ranks=count)
        end = json.loads((tmp_path / "end.json").read_text())
        digest, norms = any_layout_script.plain(end["skipped"], 8 * number)
        assert (end["digest"], end["skipped"][:1]) == (digest, [[5, 6]])
        assert end["clipped"] < 1e-2  # of the BF16 tensor
        rings.add(end["ring"])
        applied = [
            line for line in read_lines(tmp_path / "run/metrics.jsonl") if line["action"] == "apply"
        ]
        assert [line["grad_norm"] for line in applied] == pytest.approx(norms, rel=3e-3)
        assert len(applied) == 8 * number
        newest = max((tmp_path / "run/ring").glob("*/manifest.json"))
        bytes_of = [one.stat().st_size for one in newest.parent.glob("rank-*.bin")]
        assert sum(bytes_of) == end["bytes"] < 3 * len(bytes_of) * min(bytes_of), bytes_of
    assert end["skipped"] == [[5, 6], [18, 19]] and len(rings) == 1
