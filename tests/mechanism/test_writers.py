"""No number that is not finite meets JSON, whichever writer it comes to."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.checkpoint.manifest import parse_manifest
from runner.checkpoint.memory.snapshot import SnapshotHeader, parse_header
from runner.command.backtest import backtest_command
from runner.health.rank_report import Report, write_report
from runner.observe.journal import Journal, read_journal
from runner.observe.tracker import TensorBoardTracker, numbers_of
from runner.policy.decision.history import Incident
from runner.session.summary import Summary
from runner.system.error import CorruptCheckpoint
from runner.system.files import write_json
from runner.system.json_lines import LineFile
from runner.system.parsing import NONFINITE, json_text, number_in
from runner.train.state import TrainState
from tests.policy.steps import guard_settings
from tests.stored import manifest, metrics_line

ANY = st.sampled_from([0.0, -1.5, 3e300, math.nan, math.inf, -math.inf])
TREES = st.recursive(
    ANY | st.integers() | st.text("ab", max_size=3) | st.booleans() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text("xyz", min_size=1, max_size=3), TREES, max_size=4)


def strictly(text: str | bytes) -> Any:
    """As a parser reads it that knows JSON and nothing more."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def without(value: Any) -> Any:
    """null for what is not finite."""
    if isinstance(value, dict):
        return {key: without(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def places(value: Any, path: str = "") -> dict[str, str]:
    """Paths of what is not finite."""
    if isinstance(value, dict):
        pairs = [places(item, f"{path}.{key}" if path else key) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [places(item, f"{path}[{at}]") for at, item in enumerate(value)]
    else:
        is_bad = isinstance(value, float) and not math.isfinite(value)
        return {path: repr(value)} if is_bad else {}
    return {key: word for found in pairs for key, word in found.items()}


@settings(deadline=None)
@given(tree=OBJECTS, indent=st.sampled_from([None, 1]), sort_keys=st.booleans())
def test_the_encoder_writes_null_and_says_where(
    tree: dict[str, Any], indent: int | None, sort_keys: bool
) -> None:
    found = strictly(json_text(tree, indent=indent, sort_keys=sort_keys))
    assert found.pop(NONFINITE, {}) == places(tree)
    assert found == without(tree)


@settings(deadline=None)
@given(value=ANY | st.none())
def test_a_number_is_read_back(value: float | None) -> None:
    line = strictly(json_text({"loss": value, "other": 1.0}))
    assert repr(number_in(line, "loss")) == repr(value)
    assert number_in(line, "other") == 1.0 and number_in(line, "absent") is None


# Each writes what it is given, and returns what then lies on disk.


def metrics(folder: Path, a: float, b: float, tree: dict[str, Any]) -> bytes:
    made = LineFile(folder / "m", length=0)
    of_a = dict.fromkeys(("loss", "lr", "seconds", "eval_loss"), a)
    of_b = dict.fromkeys(("grad_norm", "tokens_per_second", "data_wait_seconds", "time"), b)
    made.append(metrics_line(1, **of_a, **of_b, stalls={"checkpoint": a}).to_json(), durably=False)
    made.close()
    return (folder / "m").read_bytes()


def incident(a: float, tree: dict[str, Any]) -> Incident:
    return Incident(
        kind="x", step=1, decision="", reason="", cost_seconds=1.0, detail={"a": a, "tree": tree}
    )


def journal(folder: Path, a: float, b: float, tree: dict[str, Any]) -> bytes:
    path = folder / "j"
    made = Journal([], told_to_skip=[], file=LineFile(path, length=0), clock=lambda: 1.0)
    made.add(incident(a, tree))
    read_journal(path)  # a restart can
    return path.read_bytes()


def summary(folder: Path, a: float, b: float, tree: dict[str, Any]) -> bytes:
    made = Summary(
        status="done", exit_code=0, reason="", steps=1, cursor=1, final_loss=a, eval_loss=b,
        state_digest=None, discarded_steps=0, rollbacks=0, skipped=(), restarts=0,
        samples_used=1, goodput=a, time={"other": b}, world_size=1, incarnation=1,
    )  # fmt: skip
    write_json(folder / "s", asdict(made))
    return (folder / "s").read_bytes()


def report(folder: Path, a: float, b: float, tree: dict[str, Any]) -> bytes:
    made = Report(rank=0, world_size=1, kind="hang", step=1, phase="", seconds=a, time=b)
    write_report(folder, made, for_other=False)
    (path,) = folder.glob("rank-*.json")
    return path.read_bytes()


def backtest(folder: Path, a: float, b: float, tree: dict[str, Any]) -> bytes:
    """Also what the guard said of a curve of such numbers."""
    rows = [f"{step},{2.0 + step % 7 / 100}" for step in range(60)]
    rows[40], rows[41] = f"40,{a}", f"41,{b}"
    (folder / "curve.csv").write_text("\n".join(["step,loss", *rows]) + "\n")
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert backtest_command([str(folder / "curve.csv"), "--json"]) == 0
    return told.getvalue().encode()


WRITERS = [metrics, journal, summary, report, backtest]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_no_writer_ends_in_a_number(
    writer: Callable[..., bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(a=ANY, b=ANY, tree=OBJECTS)
    def check(a: float, b: float, tree: dict[str, Any]) -> None:
        written = writer(tmp_path_factory.mktemp("w"), a, b, tree)
        assert written.endswith(b"\n")
        # A line an object, or one object over many lines.
        for text in [written] if writer in (summary, report) else written.splitlines():
            assert isinstance(strictly(text), dict)

    check()


HEADER = SnapshotHeader(
    incarnation=1, serial=1, step=1, cursor=1, rank=0, world_size=1, layout="", config_digest="",
    data_fingerprint="", metrics_bytes=0, journal_lines=0, train_state={}, update_counts={},
    num_bytes=0, digest="",
)  # fmt: skip


@settings(deadline=None)
@given(tree=OBJECTS)
def test_a_checkpoint_with_such_a_number_is_written_and_never_used(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    """It cannot be computed with: better an older checkpoint."""
    path = tmp_path_factory.getbasetemp() / "manifest.json"
    write_json(path, manifest(train_state=tree).to_json())
    header = replace(HEADER, train_state=tree).to_bytes()
    for data in (path.read_bytes(), header.partition(b"\n")[2]):
        strictly(data)
    if places(tree):
        with pytest.raises(CorruptCheckpoint, match="not finite"):
            parse_manifest(path.read_bytes(), path)
        with pytest.raises(ValueError, match="not finite"):
            parse_header(header)
    else:
        assert parse_manifest(path.read_bytes(), path).train_state == tree
        assert parse_header(header).train_state == tree


@settings(deadline=None)
@given(loss=ANY | st.none())
def test_a_state_without_a_guard_survives_its_last_loss(loss: float | None) -> None:
    """``guard=off`` takes any loss; the checkpoint after it can be loaded all the same."""
    state = TrainState(guard_settings(enabled=False))
    state.last_loss = loss
    written = strictly(json_text(state.to_json()))
    assert NONFINITE not in written
    again = TrainState(guard_settings(enabled=False))
    again.load_json(written)
    assert repr(again.last_loss) == repr(loss)


@settings(deadline=None)
@given(a=ANY, b=ANY)
def test_a_tracker_takes_finite_numbers_only(
    tmp_path_factory: pytest.TempPathFactory, a: float, b: float
) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    folder = tmp_path_factory.mktemp("t")
    tracker = TensorBoardTracker(folder, number=1)
    tracker.numbers(1, numbers_of(metrics_line(1, loss=a, grad_norm=b, eval_loss=b)))
    tracker.close()
    (path,) = folder.glob("*tfevents*")
    values = [v for event in EventFileLoader(str(path)).Load() for v in event.summary.value]
    told = {value.tag for value in values}
    assert ("train/loss" in told) is math.isfinite(a)
    assert ("eval/loss" in told) is ("train/grad_norm" in told) is math.isfinite(b)


# Digests, messages between processes, facts about files: no numbers that a run computed.
_OTHERS = {
    "checkpoint/state_digest.py": 1, "checkpoint/memory/snapshot.py": 2,
    "checkpoint/memory/node_dir.py": 1, "command/demo.py": 1,
    "command/export.py": 1,
    "config/compose.py": 1, "data/text.py": 1, "data/dataset.py": 3,
    "embed/opening.py": 2, "health/rank_report.py": 1,
    "data/corpus_digest.py": 2, "distributed/agreement.py": 2,
    "distributed/rendezvous.py": 1, "startup/restore.py": 1, "system/parsing.py": 2,
    "run_dir/lease.py": 1,
    "prove/inside/hooks.py": 1,  # NaN as it is; read by nobody but the judge
}  # fmt: skip


def test_nobody_writes_json_by_himself() -> None:
    """A new ``json.dump`` that ends in a file belongs into ``runner.system.parsing.json_text``."""
    root = Path(__file__).parents[2] / "runner"
    found = {
        str(path.relative_to(root)): len(re.findall(r"\bjson\.dumps?\(", path.read_text()))
        for path in root.rglob("*.py")
    }
    assert {name: num for name, num in found.items() if num > _OTHERS.get(name, 0)} == {}
