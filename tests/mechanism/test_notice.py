"""Notices of clouds, files and URLs, told by a local server that speaks as they do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as parts

import pytest

from runner.health import notice, preemption
from runner.health.notice import Notice, Notices, notices, taken_back
from runner.health.preemption import StopRequest
from runner.policy.decision.signals import StepSignals
from runner.system.error import ConfigError
from runner.train.agreed_step import StepInfo
from runner.train.checkpoints import what_notices_save
from runner.train.step_runner import StepRunner
from tests.clouds import Cloud, served


@pytest.fixture
def cloud() -> Iterator[tuple[Cloud, str]]:
    with served() as made:
        yield made


def asking(setting: str, grace: float = 25.0) -> tuple[Notices, StopRequest]:
    stop = StopRequest(grace_seconds=grace)
    made = notices(setting, stop)
    assert made is not None
    return made, stop


@pytest.mark.parametrize("setting", ["aws:{}", "gcp:{}", "azure:{}", "{}/own"])
def test_a_notice_is_read_twice_and_its_time_is_the_grace(
    cloud: tuple[Cloud, str], setting: str
) -> None:
    service, address = cloud
    made, stop = asking(setting.format(address))
    made.look()
    assert not stop.is_set
    service.event = "spot"
    service.expired = 1  # a token lasts for hours, a run for weeks
    again = made.look()
    assert not stop.is_set and again < 1.0, "soon again"
    made.look()
    assert taken_back(setting.format(address)) == stop.reason
    assert stop.is_set and stop.reason
    most = 27.0 if setting.startswith("gcp") else 117.0
    assert most - 5 < stop.left_seconds <= most


@pytest.mark.parametrize(
    ("setting", "event", "advice"),
    [
        ("aws:{}", "rebalance", "AWS: rebalance (2026-11-25T08:22:00Z)"),
        ("gcp:{}", "maintenance", "Google: TERMINATE_ON_HOST_MAINTENANCE"),
        ("azure:{}", "other", ""),
    ],
)
def test_what_stops_nothing(
    cloud: tuple[Cloud, str], setting: str, event: str, advice: str
) -> None:
    service, address = cloud
    made, stop = asking(setting.format(address))
    service.event = event
    for _ in range(3):
        made.look()
    assert stop.advice == advice and not stop.is_set and not taken_back(setting.format(address))
    assert stop.is_advised() == bool(advice) and not stop.is_advised(), "once"
    made.look()
    assert not stop.is_advised()


def test_what_is_far_away_is_advice_and_later_a_stop(cloud: tuple[Cloud, str]) -> None:
    service, address = cloud
    made, stop = asking(f"azure:{address}")
    service.event, service.seconds = "spot", 900.0
    for _ in range(2):
        made.look()
    assert stop.is_advised() and not stop.is_set
    service.seconds = 100.0
    made.look()
    assert stop.is_set and 90 < stop.left_seconds < 97


@pytest.mark.parametrize("seconds", [0.0, -3600.0])
def test_what_is_over_already_leaves_a_second(cloud: tuple[Cloud, str], seconds: float) -> None:
    service, address = cloud
    made, stop = asking(f"azure:{address}")
    service.event, service.seconds = "spot", seconds
    for _ in range(2):
        made.look()
    assert stop.is_set and 0 < stop.left_seconds <= 1.0


@pytest.mark.parametrize("fault", ["slow", "garbage", "error", "redirect", "endless", "once"])
@pytest.mark.parametrize("setting", ["aws:{}", "gcp:{}", "azure:{}", "{}/own"])
def test_a_service_that_is_slow_broken_or_lies_stops_nothing_and_is_said_once(
    cloud: tuple[Cloud, str],
    setting: str,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(notice, "_TIMEOUT_SECONDS", 0.2)
    service, address = cloud
    made, stop = asking(setting.format(address))
    service.event, service.fault = "spot", fault
    if fault == "once":
        for _ in range(6):
            made.look()
        assert not stop.is_set
        return
    waits = iter([0.0, 0.0, 0.0])

    class Over:
        def wait(self, seconds: float) -> bool:
            return next(waits, None) is None

    monkeypatch.setattr(made, "_over", Over())
    made._run()
    assert not stop.is_set and not stop.advice
    assert len(caplog.records) == 1 and "preempt.notice" in caplog.text


def test_a_signal_after_a_notice_is_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine ends all processes with SIGTERM before it goes."""
    ended: list[int] = []
    monkeypatch.setattr(preemption, "_end", lambda message, code: ended.append(code))
    monkeypatch.setattr(preemption, "_SAME_REQUEST_SECONDS", -1.0)
    stop = StopRequest(grace_seconds=25.0)
    stop.ask("a cloud", within=50.0)
    stop._note(signal.SIGTERM)
    assert not ended and stop.reason == "a cloud" and stop.left_seconds > 40
    stop._note(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_what_a_notice_saves_follows_from_the_measured_save() -> None:
    assert what_notices_save(40.0) == (
        "a checkpoint takes 40.0 s; a notice of 30 s (Google, Azure) is too short for it: the "
        "newest checkpoint remains; a notice of 120 s (AWS) saves the last step if a step takes "
        "less than 77 s"
    )
    assert what_notices_save(20.0, 15.0) == (
        "a checkpoint takes 20.0 s and its copy at checkpoint.remote 15.0 s; a notice of 30 s "
        "(Google, Azure) saves the last step if a step takes less than 7 s, not its copy; a notice "
        "of 120 s (AWS) saves the last step if a step takes less than 97 s, and its copy if less "
        "than 79 s"
    )


def test_advice_that_a_discarded_step_carried_is_given_again() -> None:
    """Late, the next step is launched before this one is found to be bad."""
    stop = StopRequest(grace_seconds=25.0)
    stop.advise("rebalance")
    assert stop.is_advised()
    steps = StepRunner(
        parts(discard_speculative=lambda step: 0.0),  # type: ignore[arg-type]
        parts(stop=stop),  # type: ignore[arg-type]
        known_discards=(),
        late=True,
        is_boundary=bool,
    )
    signals = StepSignals(
        step=3, start=0, stop=8, loss=float("nan"), grad_norm=1.0, tokens=1, nonfinite_ranks=1,
        gated=True,
    )  # fmt: skip
    for is_advised in (False, True):
        steps._ahead = parts(report=parts(is_advised=is_advised))  # type: ignore[assignment]
        steps._without_ahead(StepInfo(signals=signals))
        assert stop.is_advised() == is_advised


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "leave"
    made, stop = asking(f"file:{path}")
    made.look()
    path.touch()
    for _ in range(2):
        assert not stop.is_set
        made.look()
    assert stop.is_set and 24 < stop.left_seconds <= 25, "the grace"
    path.write_text('{"seconds": 60, "reason": "drained", "advice": true}')
    assert notice.in_file(path) == Notice(reason="drained", seconds=60.0, is_advice=True)
    path.write_text('{"seconds": "60"}')
    with pytest.raises(ValueError, match="seconds is '60'"):
        notice.in_file(path)


def test_a_reason_that_counts_down(tmp_path: Path) -> None:
    """It is another one each time that it is read."""
    path = tmp_path / "leave"
    made, stop = asking(f"file:{path}")

    def look(seconds: int, advice: str) -> None:
        told = f'{{"seconds": {seconds}, "reason": "{seconds} s left", "advice": {advice}}}'
        path.write_text(told)
        made.look()

    for seconds in (999, 998, 997):
        look(seconds, "true")
    assert stop.is_advised() and stop.advice == "998 s left", "once"
    look(996, "true")
    look(60, "false")
    assert not stop.is_advised() and not stop.is_set, "read once"
    look(58, "false")
    assert stop.is_set and stop.reason == "58 s left" and 50 < stop.left_seconds <= 55


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop = StopRequest(grace_seconds=1)
    for wrong in ("ec2", "file:", "http:", "none:1", "aws "):
        with pytest.raises(ConfigError, match=r"preempt\.notice=.*must be auto, none"):
            notices(wrong, stop)
    vendor = tmp_path / "sys_vendor"
    monkeypatch.setattr(notice, "_VENDOR_FILE", vendor)
    assert notices("auto", stop) is None and notices("none", stop) is None
    vendor.write_text("Amazon EC2\n")
    assert notices("auto", stop) is not None
