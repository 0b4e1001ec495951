"""Writes run directories without training, of any length, with planted incidents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0
BATCH = 32


@dataclass(kw_only=True)
class Made:
    """A run of ``steps`` applied updates, one a second.

    ``spike_at``: a step whose loss is ten times its neighbours', and which was applied.
    ``bad_at``: steps before which a batch was discarded; ``back_at``: where the run went back ten.
    ``redo_at``: steps that were computed again, with a verdict and evidence on disk.
    ``layers``: of these names, looked at every ``look_every`` steps; ``hot``: a layer and a step
    whose gradient was a hundred times larger for one look. ``sources``: of a mixture.
    ``slow_rank``: one that takes three times as long. ``reading``: evidence of a signature.
    """

    steps: int = 300
    spike_at: int | None = None
    bad_at: Sequence[int] = ()
    back_at: int | None = None
    names: Sequence[str] = ("book.txt bytes 0-64",)
    reason: str = "loss nan, grad norm nan, 1 rank with NaN or Inf"
    world_size: int = 2
    status: str | None = "done"
    warnings: Sequence[str] = ()
    base: float = 2.0
    redo_at: Sequence[int] = ()
    layers: Sequence[str] = ()
    look_every: int = 5
    hot: tuple[str, int] | None = None
    sources: Sequence[str] = ()
    slow_rank: int | None = None
    reading: str | None = None
    excerpt: str = "Once upon a time"
    _lines: list[dict[str, Any]] = field(default_factory=list)

    def write(self, out: Path) -> Path:
        """Write all files of the run; returns ``out``."""
        out.mkdir(parents=True, exist_ok=True)
        self._lines = [incident("start", 0, decision="begin", time=BEGAN, detail=self._start())]
        with (out / "metrics.jsonl").open("w") as file:
            for line in self.metrics():
                file.write(json.dumps(line) + "\n")
        if self.reading is not None:
            read = {"signature": "plateau", "try": self.reading, "confidence": "high"}
            reason = f"plateau: {self.reading}"
            self._lines.append(incident("reading", self.steps // 2, reason=reason, detail=read))
        for seq, line in enumerate(self._lines):
            if line["kind"] == "redo":
                self._write_evidence(out, seq, line)
        for place, warning in enumerate(self.warnings):
            self._lines.append(incident("straggler", place + 1, reason=warning, ranks=[1]))
        text = "".join(
            json.dumps(line | {"seq": seq, "attempt": 1}) + "\n"
            for seq, line in enumerate(self._lines)
        )
        (out / "journal.jsonl").write_text(text)
        (out / "config.yaml").write_text(
            f"out: {out}\nsteps: {self.steps}\nseed: 0\n"
            f"batch: {{global_size: {BATCH}}}\ndata: {{held_out: 0.05}}\n"
        )
        self._write_sides(out)
        checkpoint(out, serial=3, step=max(1, self.steps - 20), mark="CLEAN")
        checkpoint(out, serial=4, step=self.steps, mark=None)
        if self.status is not None:
            (out / "summary.json").write_text(json.dumps(self._summary()))
        return out

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics lines; also collects the journal's lines."""
        clock, cursor, step, has_gone_back = BEGAN + 1, 0, 0, False
        while step < self.steps:
            step += 1
            clock += 1.0
            span = [cursor, cursor + BATCH]
            cursor += BATCH
            if step in self.redo_at:
                self._journal("redo", step, clock, span)
                yield self._line(step, clock, span, action="redo", verdict="NonFinite")
                clock += 1.0
            if step in self.bad_at and not has_gone_back:
                self._journal("discard", step, clock, span)
                yield self._line(step, clock, span, action="discard", verdict="NonFinite")
                clock += 1.0
                span = [cursor, cursor + BATCH]
                cursor += BATCH
            if step == self.back_at and not has_gone_back:
                has_gone_back = True
                yield self._line(step, clock, span, action="rollback", verdict="NonFinite")
                self._journal("rollback", step, clock + 0.1, span, to_step=step - 10)
                step -= 10
                continue
            yield self._line(step, clock, span)

    def _line(
        self, step: int, clock: float, span: list[int], *, action: str = "apply", verdict: str = ""
    ) -> dict[str, Any]:
        loss: float | None = self.base + 3.0 * math.exp(-step / 60) + 0.05 * math.sin(step * 1.7)
        assert loss is not None
        if step == self.spike_at:
            loss *= 10
        flags = {}
        if action != "apply":
            loss, flags = None, {"nonfinite": {"loss": "nan", "grad_norm": "nan"}}
        return {
            "step": step, "cursor": span[1], "samples": span, "loss": loss,
            "grad_norm": None if loss is None else 0.6 + 0.2 * math.sin(step * 0.9) + loss / 10,
            "lr": 1e-3 * min(1.0, step / 50) if action == "apply" else 0.0,
            "tokens": 2048, "tokens_per_second": 2000.0 + 100 * math.sin(step), "seconds": 0.9,
            "data_wait_seconds": 0.01, "verdict": verdict or "Clean", "action": action,
            "eval_loss": self.base + 0.1 if step % 100 == 0 and action == "apply" else None,
            "loss_limit": None if step < 20 else self.base + 1.5 + 3.0 * math.exp(-step / 60),
            "norm_limit": None if step < 20 else 8.0, "time": clock, "stalls": {},
        } | flags | self._columns(step)  # fmt: skip

    def _columns(self, step: int) -> dict[str, float]:
        columns: dict[str, float] = {
            f"samples/{name}": BATCH // len(self.sources) for name in self.sources
        }
        for at, name in enumerate(self.sources):
            columns[f"loss/{name}"] = self.base + 0.3 * at + 2.5 * math.exp(-step / 60)
        if step % 100 == 0:
            for at, name in enumerate(self.sources):
                columns[f"eval_loss/{name}"] = self.base + 0.3 * at + 2.0 * math.exp(-step / 90)
        return columns

    def _journal(
        self, kind: str, step: int, clock: float, span: list[int], *, to_step: int = 0
    ) -> None:
        detail: dict[str, Any] = {
            "verdict": "NonFinite", "loss": "nan", "grad_norm": "nan", "tokens": 2048,
            "nonfinite_ranks": 1, "suspects": [span[0]],
        }  # fmt: skip
        if kind == "redo":
            detail |= {"skipped": [span[0] + 3], "cause": {
                "cause": "data", "remedy": "skip", "why": f"1 sample stands out: {self.reason}",
                "refutation": "still bad without it", "is_tried": True, "ranks": [1],
                "hosts": ["node-1"], "positions": [span[0] + 3], "steps": 4, "bundle": 0,
                "not_tried": ["another precision"],
            }}  # fmt: skip
        if kind == "rollback":
            detail |= {
                "onset_step": step, "to_step": to_step, "cursor": span[0] - 320, "serial": 2,
                "next_serial": 3, "read_again": False, "repeat": 0, "metrics_bytes": 0,
                "cut_factor": 1.0, "cut_steps": 0, "tier": "disk",
            }  # fmt: skip
        decision = "discard" if kind == "discard" else f"back to step {to_step} (disk)"
        decision = "skip 1 sample, compute the step again" if kind == "redo" else decision
        self._lines.append(
            incident(
                kind, step, decision=decision, reason=self.reason, time=clock - 0.1, samples=span,
                ranks=[1], sample_ids=list(self.names), cost_steps=1, cost_seconds=0.9,
                detail=detail,
            )
        )  # fmt: skip

    def _write_evidence(self, out: Path, number: int, line: dict[str, Any]) -> None:
        """Write the evidence of an explained step."""
        line["detail"]["cause"]["bundle"] = number
        folder = out / "explanations" / f"{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        probes = {
            "first": {"loss": "nan", "grad_norm": "nan", "nonfinite_ranks": [1]},
            "E without it": {"loss": 2.2, "grad_norm": 0.5, "nonfinite_ranks": []},
        }
        finding = line["detail"]["cause"]
        incident = {"version": 1, "step": line["step"], "finding": finding, "probes": probes}
        (folder / "incident.json").write_text(json.dumps(incident))
        (folder / "samples.txt").write_text(f"step: data\n\nposition 3: {self.excerpt}\n")

    def _write_sides(self, out: Path) -> None:
        """Write the files beside the metrics."""
        looks = range(self.look_every, self.steps + 1, self.look_every)
        if self.layers:
            write_lines(out / "layers.jsonl", (self._look(step) for step in looks))
        if self.slow_rank is not None:
            write_lines(out / "ranks.jsonl", (self._ranks(step) for step in looks))
            write_lines(out / "ring.jsonl", self._ring())

    def _look(self, step: int) -> dict[str, Any]:
        layers = {}
        for at, name in enumerate(self.layers):
            size = 0.3 * (1 + at / 8) * (1 + math.exp(-step / 40)) * (1 + 0.1 * math.sin(step + at))
            if self.hot == (name, step):
                size *= 100
            layers[name] = {
                "grad": size, "update": 2e-3 / (1 + step / 90), "weight": 12.0 + at,
                "adam_rms": 1.0, "residual_rms": 1.0 + at / 4, "attention_logit": 4.0 + at / 3,
            }  # fmt: skip
        line: dict[str, Any] = {"step": step, "attempt": 1, "layers": layers}
        if step % (4 * self.look_every) == 0:
            line["histograms"] = {
                name: {
                    "weights": [0.001 * 2**at for at in range(9)],
                    "gradients": [numbers["grad"] * 10.0 ** (at - 9) for at in range(9)],
                }
                for name, numbers in layers.items()
            }
        line["model"] = {"grad_ratio": 9.0 + math.sin(step), "update_ratio": 3e-3}
        if step % (10 * self.look_every) == 0:
            fall = [self.base + 2 * math.exp(-step / 90) + 1.5 / (1 + at) for at in range(32)]
            line |= {"loss_by_position": fall, "positions": 256, "position_steps": [1, step]}
        return line

    def _ranks(self, step: int) -> dict[str, Any]:
        own = [0.1 + 0.01 * math.sin(step + rank) for rank in range(self.world_size)]
        own[self.slow_rank or 0] *= 3
        device = [0.002] * self.world_size
        return {
            "time": BEGAN + 1 + step, "attempt": 1, "step": step, "ranks": self.world_size,
            "ranks_a_value": 1, "own_seconds": own, "device_seconds": device,
            "step_seconds": [0.9] * self.world_size,
        }  # fmt: skip

    def _ring(self) -> Iterator[dict[str, Any]]:
        """Saved every twentieth step, proven ten steps later, three kept."""
        for step in range(20, self.steps + 1, 10):
            at = {"time": BEGAN + 1 + step, "attempt": 1, "step": step}
            if step % 20 == 0:
                for tier in ("disk", "memory"):
                    yield at | {"tier": tier, "serial": step, "state": "committed", "of": step}
                if step > 80:
                    yield at | {"tier": "disk", "serial": step - 60, "state": "gone"}
                yield at | {"tier": "memory", "serial": step - 20, "state": "gone"}
            else:
                yield at | {"tier": "disk", "serial": step - 10, "state": "clean", "of": step - 10}

    def _start(self) -> dict[str, Any]:
        return {
            "incarnation": 1, "world_size": self.world_size, "hosts": {"node-1": "0-1"},
            "command": ["/there/runner/__main__.py", f"steps={self.steps}", "data.path=a b"],
            "parallel": "fsdp", "device": "cpu", "torch": "2.13.0", "lost": {},
        }  # fmt: skip

    def _summary(self) -> dict[str, Any]:
        spent = {"productive": 0.9 * self.steps, "restart": 12.0, "other": 5.0}
        return {
            "status": self.status, "reason": "all steps applied", "steps": self.steps,
            "incarnation": 1, "final_loss": 2.0, "time": spent, "cursor": BATCH * self.steps,
        }  # fmt: skip


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """A file of JSON lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def incident(kind: str, step: int, **more: Any) -> dict[str, Any]:
    """A journal line."""
    plain = {
        "kind": kind, "step": step, "decision": "go on", "reason": "command", "ranks": [],
        "samples": None, "sample_ids": [], "cost_steps": 0, "cost_seconds": 0.0, "detail": {},
        "time": BEGAN + step,
    }  # fmt: skip
    return plain | more


def checkpoint(out: Path, *, serial: int, step: int, mark: str | None) -> None:
    """A committed checkpoint, as far as a listing looks."""
    folder = out / "ring" / f"{serial:06d}-step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "rank-00000.bin").write_bytes(bytes(4096))
    for name in ("COMMITTED", *([mark] if mark else [])):
        (folder / name).touch()
