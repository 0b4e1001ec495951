"""A run's state in Prometheus' text format, for ``/metrics`` of the live page.

prometheus.io/docs/instrumenting/exposition_formats
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from runner.tools.report.run_reader import RunReader, RunStatus

CONTENT_TYPE = "text/plain; version=0.0.4"
_STATUSES = ("starting", "running", "silent", "done", "halted", "preempted", "failed")
_GAUGE, _COUNTER = "gauge", "counter"


def metrics_text(run: RunReader) -> str:
    """All samples; one whose value is not known is left out."""
    return "".join(f"{line}\n" for line in _lines(run))


def _lines(run: RunReader) -> Iterator[str]:
    now, fold = RunStatus(run), run.fold
    last = fold.thinned.last
    proven_age = None if now.proven_step is None else now.as_of - now.proven_at
    for name, kind, words, value in (
        ("step", _GAUGE, "applied updates", now.step),
        ("steps", _GAUGE, "updates at which the run is done", now.total),
        ("loss", _GAUGE, "training loss of the last applied step, nats per token", now.loss),
        ("eval_loss", _GAUGE, "held-out loss, nats per token", now.eval_loss),
        ("grad_norm", _GAUGE, "gradient norm of the last attempt", last and last.grad_norm),
        ("step_seconds", _GAUGE, "of an attempted step", fold.attempts.pace()),
        ("tokens_per_second", _GAUGE, "of the last attempt", now.tokens_per_second),
        ("goodput_ratio", _GAUGE, "share of the wall time that counts", now.goodput),
        ("heartbeat_age_seconds", _GAUGE, "since the owner's last sign", now.silent_seconds),
        ("checkpoint_proven_step", _GAUGE, "of the newest proven checkpoint", now.proven_step),
        ("checkpoint_age_seconds", _GAUGE, "of the newest proven checkpoint", proven_age),
        ("lost_steps", _GAUGE, "to be computed again after a crash now", now.lost_steps),
        ("discards_total", _COUNTER, "steps whose update was not applied", now.discards),
        ("rollbacks_total", _COUNTER, "returns to a checkpoint", now.rollbacks),
        ("restarts_total", _COUNTER, "starts after the first", now.restarts),
    ):
        yield from _sample(name, kind, words, {"": value})
    is_now = {f'status="{one}"': float(one == now.status) for one in _STATUSES}
    yield from _sample("status", _GAUGE, "1 for the state that the run is in", is_now)
    spent = {f'kind="{kind}"': seconds for kind, seconds in run.time_spent().items()}
    yield from _sample("seconds_total", _COUNTER, "wall time by kind", spent)
    kinds = Counter(line.kind for line in fold.lines)
    lines = {f'kind="{_escaped(kind)}"': count for kind, count in sorted(kinds.items())}
    yield from _sample("journal_lines_total", _COUNTER, "lines of the journal by kind", lines)
    causes = Counter(str(line.detail.get("cause")) for line in fold.lines if line.kind == "crash")
    crashes = {f'cause="{_escaped(cause)}"': count for cause, count in sorted(causes.items())}
    yield from _sample("crashes_total", _COUNTER, "by cause", crashes)


def _sample(name: str, kind: str, words: str, values: Mapping[str, float | None]) -> Iterator[str]:
    known = {labels: value for labels, value in values.items() if value is not None}
    known = {labels: value for labels, value in known.items() if value == value}
    if not known:
        return
    yield f"# HELP holdfast_{name} {words}"
    yield f"# TYPE holdfast_{name} {kind}"
    for labels, value in known.items():
        yield f"holdfast_{name}{f'{{{labels}}}' if labels else ''} {value:.10g}"


def _escaped(text: str) -> str:
    plain = text[:60].replace("\\", "\\\\").replace('"', '\\"')
    return plain.replace("\n", "\\n")
