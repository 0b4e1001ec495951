"""The state of runs in Prometheus' text format, for ``/metrics`` of the live page.

prometheus.io/docs/instrumenting/exposition_formats
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from runner.tools.report.run_reader import RunReader, RunStatus
from runner.tools.report.side_files import GPU_QUANTITIES
from runner.tools.report.vitals import Glance

CONTENT_TYPE = "text/plain; version=0.0.4"
_STATUSES = ("starting", "running", "silent", "done", "halted", "preempted", "failed")
_GAUGE, _COUNTER = "gauge", "counter"


# Name, type, meaning, and the value for each set of further labels.
Sample = tuple[str, str, str, Mapping[str, float | None]]


def metrics_text(runs: Mapping[str, Iterable[Sample]]) -> str:
    """The samples of each run, by its name; one whose value is not known is left out."""
    families: dict[str, list[str]] = {}
    for run, samples in runs.items():
        for name, kind, words, values in samples:
            for labels, value in values.items():
                if value is None or value != value:
                    continue
                head = [f"# HELP holdfast_{name} {words}", f"# TYPE holdfast_{name} {kind}"]
                both = f'run="{_escaped(run)}"' + (labels and f",{labels}")
                families.setdefault(name, head).append(f"holdfast_{name}{{{both}}} {value:.10g}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def samples_of_glance(one: Glance) -> Iterator[Sample]:
    """What is known of a run without its curves."""
    yield "step", _GAUGE, "applied updates", {"": one.step}
    yield "steps", _GAUGE, "updates at which the run is done", {"": one.total}
    yield "loss", _GAUGE, "training loss of the last attempt", {"": one.loss}
    yield "goodput_ratio", _GAUGE, "share of the time that counts", {"": one.goodput()}
    yield "heartbeat_age_seconds", _GAUGE, "since the last sign", {"": one.silent_seconds()}
    yield "line_age_seconds", _GAUGE, "since the newest line", {"": one.age()}
    yield _status(one.status)


def _status(status: str) -> Sample:
    is_now = {f'status="{one}"': float(one == status) for one in _STATUSES}
    return "status", _GAUGE, "1 for the state that the run is in", is_now


def samples_of(run: RunReader) -> Iterator[Sample]:
    """All that is known of a run."""
    now, fold = RunStatus(run), run.fold
    last = fold.thinned.last
    proven_age = None if now.proven_step is None else now.as_of - now.proven_at
    for name, kind, words, value in (
        ("step", _GAUGE, "applied updates", now.step),
        ("steps", _GAUGE, "updates at which the run is done", now.total),
        ("loss", _GAUGE, "training loss of the last applied step", now.loss),
        ("eval_loss", _GAUGE, "held-out loss", now.eval_loss),
        ("grad_norm", _GAUGE, "gradient norm of the last attempt", last and last.grad_norm),
        ("step_seconds", _GAUGE, "of an attempted step", run.step_seconds()),
        (f"{now.counted}_per_second", _GAUGE, "of the last attempt", now.speed),
        ("goodput_ratio", _GAUGE, "share of the wall time that counts", now.goodput),
        ("heartbeat_age_seconds", _GAUGE, "since the owner's last sign", now.silent_seconds),
        ("checkpoint_proven_step", _GAUGE, "of the newest proven checkpoint", now.proven_step),
        ("checkpoint_age_seconds", _GAUGE, "of the newest proven checkpoint", proven_age),
        ("lost_steps", _GAUGE, "to be computed again after a crash now", now.lost_steps),
        ("discards_total", _COUNTER, "steps whose update was not applied", now.discards),
        ("rollbacks_total", _COUNTER, "returns to a checkpoint", now.rollbacks),
        ("restarts_total", _COUNTER, "starts after the first", now.restarts),
    ):
        yield name, kind, words, {"": value}
    yield _status(now.status)
    spent = {f'kind="{kind}"': seconds for kind, seconds in run.time_spent().items()}
    yield "seconds_total", _GAUGE, "wall time by kind, which a rollback changes", spent
    kinds = Counter(line.kind for line in fold.lines)
    lines = {f'kind="{_escaped(kind)}"': count for kind, count in sorted(kinds.items())}
    yield "journal_lines_total", _COUNTER, "lines of the journal by kind", lines
    for name, (what, unit) in GPU_QUANTITIES.items():
        ranks = fold.ranks.newest.get(name, {})
        values = {f'rank="{rank.split()[1]}"': value for rank, value in ranks.items()}
        yield name, _GAUGE, f"{what} of each rank's GPU, {unit}", values
    causes = Counter(str(line.detail.get("cause")) for line in fold.lines if line.kind == "crash")
    crashes = {f'cause="{_escaped(cause)}"': count for cause, count in sorted(causes.items())}
    yield "crashes_total", _COUNTER, "by cause", crashes


def _escaped(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return plain.replace("\n", "\\n")
