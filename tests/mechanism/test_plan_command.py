"""``python -m runner plan``: where its numbers come from and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.__main__ import main
from runner.policy.decision.history import Incident
from runner.tools.goodput import measured

COMMAND = (
    "plan --nodes 64 --mtbf-node-hours 2000 --params 8e9 --step-seconds 4 --save-seconds 60 "
    "--stall-seconds 0.5 --restart-seconds 200"
)
GIVEN = COMMAND.split()


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_all_given(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *GIVEN)
    assert found["mtbf_seconds"] == pytest.approx(2000 * 3600 / 64)
    assert found["inputs"]["state_gb"] == {"value": 96.0, "from": "12 bytes a parameter"}
    assert found["inputs"]["memory_restart_seconds"]["value"] == 200
    assert found["interval_seconds"]["young"] == pytest.approx((2 * 60 * 112_500) ** 0.5)
    names = [plan["strategy"] for plan in found["plans"]]
    assert names == ["synchronous", "asynchronous", "memory + disk ring"]
    goodputs = [plan["goodput"] for plan in found["plans"]]
    assert 0.9 < goodputs[0] < goodputs[1] < goodputs[2] < 1


def test_the_preset_and_what_overrides_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "plan", "--preset", "llama3")
    assert found["mtbf_seconds"] == pytest.approx(54 * 86_400 / 419)
    # The paper reports more than 90 % effective training time.
    assert all(plan["goodput"] > 0.9 for plan in found["plans"])
    twice = told(capsys, "plan", "--preset", "llama3", "--nodes", "4096", "--tiers", "sync")
    assert twice["mtbf_seconds"] == pytest.approx(54 * 86_400 / 419 / 2)
    assert twice["inputs"]["nodes"] == {"value": 4096, "from": "given"}
    (plan,) = twice["plans"]
    assert plan["goodput"] < found["plans"][0]["goodput"]


def test_over_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def event(node: str, day: float, kind: str = "fault_start") -> dict[str, Any]:
        return {"node_id": node, "event_time": day, "event_type": kind}

    trace = tmp_path / "trace.json"
    days = [day for day in range(1, 101) for _ in range(4)]  # four at once, every day
    events = [event(f"n{number % 7}", day) for number, day in enumerate(days)]
    trace.write_text(json.dumps([*events, event("n1", 100.5, "fault_end")]))
    words = [*GIVEN, "--trace", str(trace), "--nodes", "7"]
    found = told(capsys, *words[:3], *words[5:])  # without --mtbf-node-hours
    assert found["inputs"]["mtbf_node_hours"]["value"] == pytest.approx(100 * 24 * 7 / 400)
    for plan in found["plans"]:
        assert plan["goodput"] < plan["over_trace"] < 1, "independent ones would cost four times"
    assert main([*words, "--trace-nodes", "3"]) == 2
    assert "--trace-nodes 3: 7 nodes failed" in capsys.readouterr().err
    assert main([*words[:3], *words[5:]]) == 0
    assert f"{found['plans'][0]['over_trace']:.2%}" in capsys.readouterr().out


def test_a_mirror_makes_more_failures_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    alone = told(capsys, *GIVEN)
    mirrored = told(capsys, *GIVEN, "--mirror")
    assert alone["inputs"]["memory_share"]["value"] == pytest.approx(98 / 419)
    assert mirrored["inputs"]["memory_share"]["value"] == 1
    assert mirrored["plans"][2]["goodput"] > alone["plans"][2]["goodput"]
    assert mirrored["plans"][2]["memory_bytes"] == 2 * alone["plans"][2]["memory_bytes"]


def test_for_a_person(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(GIVEN) == 0
    shown = capsys.readouterr().out
    for words in (
        "synchronous",
        "memory + disk ring",
        "goodput",
        "given",
        "a failure every 31h15m",
    ):
        assert words in shown


def test_a_job_that_gets_nowhere_is_still_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *GIVEN, "--nodes", "100000000")
    assert [plan["goodput"] for plan in found["plans"]] == [0, 0, 0]
    assert found["plans"][0]["down_seconds"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan --nodes 4", "--mtbf-node-hours, --params or --state-gb, --step-seconds"),
        ("plan --preset llama3 --nodes 0", "--nodes=0: must be at least 1"),
        ("plan --preset llama3 --step-seconds 0", "--step-seconds=0: must be above 0"),
        ("plan --preset llama3 --save-seconds nan", "--save-seconds=nan: must be at least 0"),
        ("plan --preset llama3 --memory-share 1.5", "--memory-share=1.5: must be at most 1"),
        ("plan --preset llama3 --tiers disk", "--tiers disk: choose from sync, async, ring"),
        ("plan --run /nowhere", "--run /nowhere: no journal.jsonl"),
        ("plan --preset llama4", "invalid choice"),
        ("plan --preset llama3 --trace /nowhere", "--trace /nowhere: not a list of events"),
    ],
)
def test_mistakes(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert words in capsys.readouterr().err


def test_what_a_run_measured(tmp_path: Path) -> None:
    def metrics(step: int, seconds: float, **stalls: float) -> dict[str, Any]:
        line = {"step": step, "seconds": seconds, "action": "apply", "time": 100.0 + step}
        return line | {"stalls": stalls}

    def entry(kind: str, at: float, **detail: Any) -> dict[str, Any]:
        made = Incident(kind=kind, step=0, decision="", reason="", detail=detail)
        return {"seq": 0, "time": at, "attempt": 1} | made.to_json()

    lines = [
        metrics(1, 2.0),
        metrics(2, 2.5, checkpoint=0.5),
        metrics(3, 9.0, checkpoint=0.7, restart=30.0),
        metrics(4, 2.5, checkpoint=9.0),
    ]
    journal = [
        entry("start", 0.0, hosts={"a": 8, "b": 8}),
        entry("crash", 3600.0),
        entry("start", 3600.0, hosts={"a": 8, "b": 8, "c": 8}),
        entry("crash", 7200.0),
    ]
    for name, written in (("metrics", lines), ("journal", journal)):
        text = "".join(json.dumps(line) + "\n" for line in written)
        (tmp_path / f"{name}.jsonl").write_text(text)
    found = {name: value.number for name, value in measured(tmp_path, journal).items()}
    assert found == {
        "nodes": 3,
        "mtbf_node_hours": 3.0,  # three nodes for two hours, two crashes
        "step_seconds": 2.5,
        "stall_seconds": 0.7,
        "restart_seconds": 30.0,
        "detect_seconds": 0.0,  # within the restart
    }


SETTINGS = ["model=tiny", "data=synthetic", "data.seq_len=32", "compute.precision=fp32"]
MEMORY = ["plan", "--ranks", "2", *SETTINGS]


def test_memory_is_told_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    told_single = told(capsys, *MEMORY, "--ranks", "1", "parallel=single")
    told_fsdp = told(capsys, *MEMORY, "parallel=fsdp")
    assert told_fsdp["weights"] == pytest.approx(told_single["weights"] / 2, rel=0.02)
    for name in ("gradients", "optimizer"):
        assert 0 < told_fsdp[name] < told_single[name]
    assert told_fsdp["activations"] == told_single["activations"] > 0
    assert told_single["total"] == sum(
        told_single[name]
        for name in ("weights", "gradients", "optimizer", "gathered", "activations")
    )
    roomy = told(capsys, *MEMORY, "--room-gib", "1")
    assert roomy["fitting_micro_size"] > roomy["samples"] == 16
    lion = told(capsys, *MEMORY, "optim=lion", "parallel=zero2", "compute.precision=bf16")
    assert lion["optimizer"] == pytest.approx(lion["weights"], rel=0.01)


def test_the_table_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MEMORY, "parallel=fsdp", "--room-gib", "0.0001"]) == 0
    table = capsys.readouterr().out
    for words in ("Memory of a rank of 2, parallel=fsdp, fp32", "parameters", "moments"):
        assert words in table
    assert "would not hold a micro-batch of one sample: use more ranks" in table


def test_memory_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--ranks", "2", "model=tiny"]
    assert main(plan) == 0
    assert "the vocabulary is that of synthetic tokens, 64" in capsys.readouterr().out
    assert main([*plan, "model.vocab_size=1000"]) == 0
    assert "vocabulary" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "model=tiny"], "which needs to know over how many ranks: --ranks N"),
        ([*MEMORY, "--nodes", "4"], "--nodes: not with --ranks"),
        (["plan", "--ranks", "0", "model=tiny"], "--ranks 0: at least 1"),
        ([*MEMORY, "--room-gib", "-1"], "--room-gib -1.0: must be more than 0"),
        ([*MEMORY, "parallel=zero1", "optim=muon", "compute.precision=bf16"], "flat partitions"),
    ],
)
def test_what_a_plan_of_memory_refuses(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
