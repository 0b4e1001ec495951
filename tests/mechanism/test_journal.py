"""What a run writes about itself, and what it finds again after a crash."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from runner.observe.journal import Journal, read_journal
from runner.observe.metrics import Throughput, peak_tflops
from runner.policy.decision.history import Incident
from runner.system.error import ConfigError
from runner.system.json_lines import LineFile, _parsed, iter_lines, last_line, read_lines
from tests.stored import metrics_line

START = Incident(kind="start", step=0, decision="begin", reason="a new run")
DISCARD = Incident(
    kind="discard",
    step=7,
    decision="discard",
    reason="loss 9.1 above 3.2",
    ranks=(0, 2),
    samples=(224, 256),
    sample_ids=("a.py bytes 0-9", "b"),
    cost_steps=1,
    cost_seconds=0.25,
    detail={"loss": "nan", "grad_norm": 1.5, "tokens": 992, "nonfinite_ranks": 1},
)
ROLLBACK = Incident(
    kind="rollback",
    step=9,
    decision="back to step 5",
    reason="3 of 10 bad",
    samples=(200, 300),
    detail={
        "onset_step": 7,
        "to_step": 5,
        "cursor": 160,
        "serial": 1,
        "next_serial": 3,
        "repeat": 2,
        "metrics_bytes": 512,
        "cut_steps": 100,
        "cut_factor": 0.5,
    },
)


def reopen(path: Path, *, clock: float = 0.0) -> Journal:
    lines, length = read_journal(path)
    ticks = count()
    return Journal(
        lines,
        told_to_skip=(),
        file=LineFile(path, length=length),
        clock=lambda: clock + next(ticks),
    )


def facts(journal: Journal) -> tuple[Any, ...]:
    history = journal.history
    return (
        journal.num_lines,
        journal.attempt,
        list(history.ledger),
        history.rollbacks,
        history.cuts,
        history.incidents,
        history.num_discarded,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_what_is_added_is_on_disk_at_once(path: Path) -> None:
    journal = reopen(path, clock=100.0)
    for incident in (START, DISCARD):
        journal.add(incident)
        assert [Incident.from_json(line) for line in read_lines(path)[0]][-1] == incident
    heads = [{k: line[k] for k in ("seq", "time", "attempt")} for line in read_lines(path)[0]]
    assert [head["seq"] for head in heads] == [0, 1]
    assert [head["attempt"] for head in heads] == [1, 1]
    assert heads[0]["time"] < heads[1]["time"]


def test_what_cannot_be_synced_is_kept_for_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has happened, for the file keeps it; once the disk syncs again the file has it once."""
    journal = reopen(path)
    assert journal.file is not None

    def crash(descriptor: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", crash)
        journal.add(DISCARD)
        assert journal.file.kept is not None
        assert journal.num_lines == 1
    journal.file.sync()
    assert journal.file.kept is None
    assert [Incident.from_json(line) for line in read_lines(path)[0]] == [DISCARD]


def test_a_reopened_journal_knows_what_the_old_one_knew(path: Path) -> None:
    journal = reopen(path)
    for incident in (START, DISCARD, ROLLBACK, START):
        journal.add(incident)
    assert facts(reopen(path)) == facts(journal)
    assert list(journal.history.ledger) == [(200, 300)]
    assert journal.history.rollbacks[0].to_step == 5
    assert journal.history.cuts[0].factor == 0.5
    assert journal.history.abandoned_serials() == {2}


def test_the_other_ranks_fold_the_same_and_write_nothing(path: Path) -> None:
    first = reopen(path)
    other = Journal((), told_to_skip=(), file=None)
    for incident in (START, DISCARD, ROLLBACK):
        first.add(incident)
        other.add(incident)
    assert facts(other) == facts(first)


def test_attempts_are_counted_over_restarts(path: Path) -> None:
    for attempt in (1, 2, 3):
        journal = reopen(path)
        assert journal.attempt == attempt - 1
        journal.add(START)
        journal.add(replace(DISCARD, step=attempt))
        assert journal.attempt == attempt
    assert [line["attempt"] for line in read_lines(path)[0]] == [1, 1, 2, 2, 3, 3]
    assert [line["seq"] for line in read_lines(path)[0]] == list(range(6))


def test_the_beginning_is_that_of_the_first_start(path: Path) -> None:
    journal = reopen(path, clock=100.0)
    assert journal.began == 100.0
    journal.add(START)
    assert reopen(path, clock=900.0).began == read_lines(path)[0][0]["time"] < 900.0


def test_a_torn_line_never_happened(path: Path) -> None:
    journal = reopen(path)
    for incident in (START, DISCARD, ROLLBACK):
        journal.add(incident)
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    mended = reopen(path)
    assert mended.history.incidents == [START, DISCARD]
    mended.add(ROLLBACK)
    assert facts(reopen(path)) == facts(journal)
    assert path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize(
    ("again", "num_lines"),
    [
        (DISCARD, 1),
        (replace(DISCARD, detail={}, cost_seconds=9.0), 1),
        (replace(DISCARD, reason="another"), 2),
        (replace(DISCARD, step=8), 2),
        (replace(DISCARD, samples=(256, 288)), 2),
        (replace(DISCARD, kind="halt"), 2),
    ],
)
def test_add_once(path: Path, again: Incident, num_lines: int) -> None:
    reopen(path).add_once(DISCARD)
    journal = reopen(path)
    journal.add_once(again)
    assert journal.num_lines == len(read_lines(path)[0]) == num_lines


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.pop("kind"),
        lambda line: line.update(step="soon"),
        lambda line: line.update(samples=[1]),
        lambda line: line.update(samples=3),
        lambda line: line.update(ranks=None),
        lambda line: line.update(detail=3),
    ],
)
def test_a_line_that_is_not_ours_is_named(path: Path, change: Any) -> None:
    line = DISCARD.to_json()
    change(line)
    path.write_text(json.dumps(START.to_json()) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=r"journal\.jsonl line 2: "):
        read_journal(path)


@pytest.mark.parametrize("place", [0, 1])
def test_a_damaged_line_that_others_follow_is_no_torn_end(path: Path, place: int) -> None:
    """Taking it for one would forget what was acknowledged behind it: the skipped samples."""
    journal = reopen(path)
    for incident in (START, DISCARD, ROLLBACK):
        journal.add(incident)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[place] = lines[place].replace(b'"kind"', b'"kin\xff', 1)
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=f"line {place + 1}: is damaged, and {2 - place} whole"):
        read_journal(path)


def test_numbers_that_would_take_the_memory_are_refused(path: Path) -> None:
    reopen(path).add(replace(ROLLBACK, detail={**ROLLBACK.detail, "next_serial": 10**11}))
    with pytest.raises(ConfigError, match=r"line 1: .*next_serial - serial"):
        read_journal(path)


def test_an_incident_that_cannot_be_written_has_not_happened(path: Path) -> None:
    journal = reopen(path)
    with pytest.raises(TypeError, match="JSON"):
        journal.add(replace(DISCARD, detail={"loss": object()}))
    assert journal.num_lines == 0
    assert list(journal.history.ledger) == []
    assert path.read_bytes() == b""


# Metrics


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)[0]]


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = LineFile(path, length=0)
    lengths = [metrics.sync()]
    for step in (1, 2, 3):
        metrics.append(metrics_line(step).to_json(), durably=False)
        lengths.append(metrics.sync())
    metrics.close()
    whole = path.read_bytes()
    assert lengths[-1] == len(whole)
    again = LineFile(path, length=lengths[1])
    assert steps_in(path) == [1]
    for step in (2, 3):
        again.append(metrics_line(step).to_json(), durably=False)
    again.close()
    assert path.read_bytes() == whole


def test_a_metrics_line_is_all_its_fields(tmp_path: Path) -> None:
    metrics = LineFile(tmp_path / "m", length=0)
    written = metrics_line(
        1, loss=math.nan, grad_norm=2.0, eval_loss=3.0, columns={"samples/web": 3}
    )
    metrics.append(written.to_json(), durably=False)
    metrics.close()
    (found,) = read_lines(tmp_path / "m")[0]
    flags = {"samples": [1, 2], "loss": None, "nonfinite": {"loss": "nan"}}
    wanted = asdict(written) | flags | {"samples/web": 3}
    del wanted["columns"]
    assert found == wanted
    assert found["grad_norm"] == 2.0


def test_lines_between_two_positions(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"a":1}\n{"a":22}\n{"a":3}\n{"a":')
    assert [found["a"] for found in iter_lines(path)] == [1, 22, 3]
    assert [found["a"] for found in iter_lines(path, start=8)] == [22, 3]
    assert [found["a"] for found in iter_lines(path, stop=17)] == [1, 22]
    assert [found["a"] for found in iter_lines(path, stop=16)] == [1]
    assert list(iter_lines(path, stop=0)) == []
    assert list(iter_lines(tmp_path / "none")) == []


@pytest.mark.parametrize("tail", [1, 7, 8, 9, 16, 17, 64, 1 << 16])
@pytest.mark.parametrize(
    "end", [b"", b'{"a":', b"{}", b"\0" * 40, b"\0" * 40 + b"\n", b'[]\n{"a":9}\n', b"\n"]
)
def test_the_last_line_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: int, end: bytes
) -> None:
    """However little is read at once, and whatever a crash left behind it."""
    monkeypatch.setattr("runner.system.json_lines._TAIL_BYTES", tail)
    path = tmp_path / "m"
    assert last_line(path) is None
    for num in range(5):
        path.write_bytes(b"".join(b'{"a":%d}\n' % at for at in range(num)) + end)
        whole = [*iter_lines(path)]
        if end != b'[]\n{"a":9}\n' or tail > 30:
            assert last_line(path) == (whole[-1] if whole else None)
        else:  # damaged before what was looked at
            assert last_line(path) in ({"a": 9}, whole[-1] if whole else None)


def test_a_long_file_is_not_read_for_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parsed = tmp_path / "m", []
    path.write_bytes(b"".join(b'{"step":%d}\n' % at for at in range(100_000)))
    monkeypatch.setattr(
        "runner.system.json_lines._parsed", lambda raw: parsed.append(1) or _parsed(raw)
    )
    assert last_line(path) == {"step": 99_999} and len(parsed) < 10_000


# Pace


def test_throughput_is_a_mean_over_time_and_forgets_the_slow_beginning() -> None:
    throughput = Throughput(flops_per_token=2.0, peak_flops=1000.0)
    throughput.note(1.0, 100)
    pace = throughput.note(3.0, 100)
    assert (pace.tokens_per_second, pace.seconds_per_step) == (50.0, 2.0)
    assert pace.mfu == pytest.approx(0.1)
    throughput = Throughput(flops_per_token=2.0, peak_flops=None)
    throughput.note(1000.0, 1)
    for _ in range(20):
        pace = throughput.note(0.5, 50)
    assert (pace.tokens_per_second, pace.mfu) == (100.0, None)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200 NVL", 836.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("GeForce", None),
    ],
)
def test_peak_by_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
