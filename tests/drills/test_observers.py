"""P14: an exception in what only looks, on one rank or on all, ends no run and changes no bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.run_dir.paths import RunDir
from tests.drills.compare import assert_same_end
from tests.rows import full
from tests.run import TWO_LAYERS, Result, finish, skip_override, train

# Where each observer raises: the step, and before which of its exchanges between ranks.
AT = {
    "memory line": (0, 0),
    "layers": (10, 0),
    "layer report": (20, 0),
    "sources": (21, 0),
    "spike score": (22, 0),
    "tracker": (23, 0),
    "ring lines": (24, 0),
    "live line": (25, 0),
    "pace": (14, 1),
    "rank times": (7, 0),
    "replicas": (18, 1),
    "audit": (30, 3),
    "preflight": (0, 2),
    "curve": (104, 1),
    "explain": (33, 5),
    "evidence": (40, 0),
    "names": (45, 0),
    "resume check": (52, 0),
}
LOOKING = (
    *("track.layers_every=5", "debug.audit_every=6", "watchdog.straggler_every=7"),
    *("debug.replica_check_every=9", "debug.preflight=true", "track.every=5"),
    "track.tensorboard=true",
    *("guard.remedy=verdict", "eval.every=8"),
)
NOT_LOOKING = (
    *("track.layers_every=0", "debug.audit_every=0", "watchdog.straggler_every=0"),
    *("debug.replica_check_every=0", "track.read=false", "explain=off", "eval.every=0"),
)
# At step 33 the explanation fails, so the ladder discards the step; the others are redone.
TROUBLE = "nan_grad@step=33,rank=0"
PASSING = (TROUBLE, "nan_grad@step=40,rank=1", "nan_grad@step=45,rank=0")
SAME = (TWO_LAYERS, "steps=110")
ON_RANK_0 = {
    "ring lines",
    "rank times",
    "evidence",
    "curve",
    "tracker",
}  # others have none of it, or no part


def rank_of(name: str, where: str) -> str:
    """The rank on which an observer raises, or "all"."""
    if where == "in turn":
        where = ("1", "all")[[*AT].index(name) % 2]
    return "0" if name in ON_RANK_0 and where != "all" else where


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run that nothing looks at."""
    out = tmp_path_factory.mktemp("unseen") / "out"
    return finish(out, *SAME, *NOT_LOOKING, f"faults=[{TROUBLE}]")


def raising(where: str, *, later: bool) -> str:
    """The faults in all observers.

    Args:
        where: on which ranks: "0", "1" or "all"; "in turn" takes "1" and "all", each for every
            other observer.
        later: in an exchange rather than as the observer begins; in turn, where on rank 1.
    """
    faults = []
    for name, (step, call) in AT.items():
        rank = rank_of(name, where)
        is_later = later and (where, rank) != ("in turn", "all")
        at = [f"observer={name}", f"step={step}", *([] if rank == "all" else [f"rank={rank}"])]
        faults.append(f"raise@{','.join([*at, *([f'call={call}'] if is_later else [])])}")
    return "faults=[" + ",".join(f"'{one}'" for one in [*PASSING, *faults]) + "]"


@pytest.mark.parametrize(
    ("where", "later"),
    [
        ("in turn", True),
        full("1", True),
        full("all", False),
        full("1", False),
        full("all", True),
        full("0", True),
    ],
)
def test_no_observer_ends_the_run_or_changes_it(
    tmp_path: Path, where: str, later: bool, unseen: Result
) -> None:
    hit = finish(tmp_path / "hit", *SAME, *LOOKING, raising(where, later=later))
    assert hit.digest == unseen.digest, hit.tail
    assert hit.summary["skipped"] == unseen.summary["skipped"]
    lines = hit.journal("observer")
    names = [line["detail"]["observer"] for line in lines]
    assert len(set(names)) == len(names), "said once"
    assert set(names) == AT.keys(), hit.tail
    for line in lines:
        rank = rank_of(line["detail"]["observer"], where)
        who = "rank 1: " if rank == "1" else "rank 0"
        assert f": not tried: {who}" in line["reason"] and "DrillError" in line["reason"], line


NAMED = r"(?:(?:alone|together|add_columns)\(\s*|observer=)\"([\w ]+)\""


def test_every_observer_is_in_the_drill() -> None:
    texts = [path.read_text() for path in Path("runner").rglob("*.py")]
    named = {n for text in texts for n in re.findall(NAMED, text)}
    named |= {
        n for text in texts for n in re.findall(r"^\w+ = \"([\w ]+)\"  # the obser", text, re.M)
    }
    assert named == AT.keys()


ALONE = (
    *("model._target_=tests.sick.Net", "model.bad=[1]", "guard.remedy=verdict", "eval.every=0"),
    *("steps=40", "parallel.timeout_seconds=5", "checkpoint.every=5"),
)
SAID = "not tried: rank 1: RuntimeError: no probes on this device; the start before ended in it"


@pytest.mark.twin
def test_a_probe_that_raises_on_one_rank_alone_ends_one_start(tmp_path: Path) -> None:
    """Between two gathers of parameters, where it can meet the others nowhere."""
    told = ("model.how=in explain", "model.since=13", "faults=[poison@samples=1030]")
    hit = train(tmp_path / "hit", *ALONE, *told, restarts=2)
    assert hit.code == 0 and hit.summary["status"] == "done", hit.tail
    assert len(hit.journal("start")) == 2, hit.tail
    (line,) = hit.journal("observer")
    assert line["step"] == 32 and line["reason"] == f"explaining step 32: {SAID}"
    ((first, stop),) = hit.summary["skipped"]
    assert first <= 1030 < stop and len(hit.journal("discard")) == 1, hit.tail
    assert not [*RunDir(hit.out).debug.glob("*.json")]


@pytest.mark.twin
def test_an_audit_that_raises_on_one_rank_alone_is_left_out(tmp_path: Path) -> None:
    told = ("model.how=in audit", "model.since=13", "debug.audit_every=7")
    hit = train(tmp_path / "hit", *ALONE, *told, restarts=2)
    assert hit.code == 0 and hit.summary["status"] == "done", hit.tail
    assert len(hit.journal("start")) == 2, hit.tail
    (line,) = hit.journal("observer")
    assert line["step"] == 14 and line["reason"] == f"audit: {SAID}"


@pytest.mark.full
def test_a_probe_after_a_rollback_that_raises_on_one_rank_alone_ends_one_start(
    tmp_path: Path,
) -> None:
    """Weights that were spoilt have it go back; what is known of them is computed after that."""
    hit = train(tmp_path / "hit", *ALONE, "model.how=in begin", restarts=2)
    assert hit.code == 0 and hit.summary["status"] == "done", hit.tail
    assert len(hit.journal("start")) == 2 and hit.summary["skipped"] == [], hit.tail
    (back,) = hit.journal("rollback")
    assert (back["step"], back["detail"]["cause"]["remedy"]) == (33, "go back")
    (line,) = hit.journal("observer")
    assert line["step"] == 33 and line["reason"] == f"explaining step 33: {SAID}"


@pytest.mark.twin
@pytest.mark.parametrize(
    ("fault", "step", "call"),
    [("poison@samples=1030", 32, 3), full("overflow@step=28-30,module=blocks.1.ffn", 28, 9)],
)
def test_a_kill_inside_an_explanation_changes_nothing(
    tmp_path: Path, fault: str, step: int, call: int
) -> None:
    settings = ("guard.remedy=verdict", "checkpoint.every=5", TWO_LAYERS, "steps=45")
    kill = f"kill@observer=explain,step={step},rank=1,call={call}"
    hit = finish(tmp_path / "hit", *settings, f"faults=['{fault}','{kill}']", restarts=1)
    assert hit.summary["restarts"] == 1 and not hit.journal("observer"), hit.tail
    skipped = hit.summary["skipped"]
    assert skipped == ([[1030, 1031]] if "poison" in fault else [])
    told = skip_override(skipped) if skipped else f"faults=['{fault}']"
    assert_same_end(hit, finish(tmp_path / "told", *settings, told))
    assert not [*RunDir(hit.out).debug.glob("*.json")]
