"""All features at once, with bad samples, a spoilt device for a moment, and a kill."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from runner.tools.report import page as pages
from tests.drills.test_supervise import begun
from tests.rows import full
from tests.run import TINY, TWO_LAYERS, finish, metrics_step, read_lines, skip_override
from tests.waiting import until

MIXTURE = (
    "data.sources=[{name: code, weight: 1, samples: 600, seed: 1},"
    "{name: web, weight: 3, samples: 3000, seed: 2}]"
)
EVERYTHING = (
    *("debug.audit_every=6", "track.layers_every=5", "debug.replica_check_every=9"),
    *("debug.preflight=true", "explain=full", "guard.remedy=verdict", "guard.sync=false"),
    *("eval.every=8", "optim.ema=0.9", "checkpoint.keep_best=true", "checkpoint.memory_every=4"),
    *("track.tensorboard=true", "track.every=5", "watchdog.straggler_every=7", MIXTURE, TWO_LAYERS),
    *("eval.goal=highest", "eval.stop_after=6"),  # of losses that fall: the first is the best
)
PACKED = """\
data: {_target_: scripts.swarm.guests.Ids, short: true, pack: true, size: 4000, seq_len: 16}
batch: {global_size: 32, micro_size: 4}
epochs: 1
guard: {remedy: verdict, sync: false}
explain: quick
eval: {every: 8, samples: 24}
optim.ema: 0.9
checkpoint.memory_every: 4
"""
# Rank 0's GPU tells, rank 1's has fallen off the bus: it never answers.
GPUS = """\
import os, sys, threading
from types import ModuleType, SimpleNamespace

import runner.health.rank_checks as checks


class Nvml(ModuleType):
    NVMLError, NVMLError_GpuIsLost = RuntimeError, KeyError
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0

    def nvmlDeviceGetMemoryInfo(self, gpu):
        if os.environ["RANK"] == "1":
            threading.Event().wait()
        return SimpleNamespace(used=3 << 30)

    def nvmlDeviceGetPowerUsage(self, gpu):
        raise RuntimeError("not supported")

    def nvmlDeviceGetTemperature(self, gpu, which):
        return 61

    def nvmlDeviceGetClockInfo(self, gpu, which):
        return 1980

    def nvmlInit(self, *_):
        return None

    nvmlShutdown = nvmlDeviceGetHandleByUUID = nvmlInit


sys.modules["pynvml"] = Nvml("pynvml")
checks.device_name, checks.gpu_health = lambda device: "GPU-0", lambda uuid: None

from runner.__main__ import run

run()  # as a rank ends: gloo's threads outlive a finalized interpreter
"""
BAD, TRANSIENT, KILL = "poison@samples=700-701", "flip_grad@step=30,rank=1", "kill@step=38,rank=0"


@pytest.mark.parametrize("engine", ["ddp", full("fsdp")])
def test_a_run_with_everything_on_ends_as_the_run_told_to_skip(tmp_path: Path, engine: str) -> None:
    words = (*EVERYTHING, f"parallel={engine}")
    faults = f"faults=[{BAD},{TRANSIENT},{KILL}]"
    program = tmp_path / "with_gpus.py"
    program.write_text(GPUS)
    hit = finish(tmp_path / "hit", *words, faults, restarts=1, program=program, cold=True)
    assert hit.summary["restarts"] == 1, hit.tail
    assert hit.summary["skipped"] == [[700, 702]], hit.tail
    causes = [line["detail"]["cause"]["cause"] for line in hit.journal("redo")]
    assert "data" in causes, hit.tail
    told = finish(tmp_path / "told", *words, skip_override(hit.summary["skipped"]))
    assert told.digest == hit.digest
    assert told.summary["steps"] == 56 and "stopped early" in told.summary["reason"], told.tail
    assert hit.summary["reason"] == told.summary["reason"] and len(hit.journal("early_stop")) == 1
    rows = [(row["attempt"], row.get("gpu_celsius")) for row in read_lines(hit.out / "ranks.jsonl")]
    assert {(1, (61.0, 0.0)), (2, (61.0, 0.0))} <= {(n, tuple(row)) for n, row in rows if row}
    assert "Temperature of each GPU" in pages.page(pages.read_runs([hit.out]))
    assert not any("gpu_celsius" in row for row in read_lines(told.out / "ranks.jsonl"))


@pytest.mark.twin
@pytest.mark.full
def test_what_is_newest_meets_in_one_launched_run(tmp_path: Path) -> None:
    """Settings in a file, epochs of packed samples, advice, a watcher; and the launcher is killed.

    With evaluations, accumulation, an average, numbers read late and snapshots in memory; a bad
    sample, a rank that is killed, and then the whole launch. The watcher outlives it.
    """
    kept, advice, settings = (tmp_path / name for name in ("told", "advice", "my.yaml"))
    advice.write_text(json.dumps({"advice": True, "reason": "may go"}))
    settings.write_text(PACKED)
    tiny = [one for one in TINY if not one.startswith(("steps=", "data=", "eval.", "guard.remedy"))]
    words = ["launch", "--nproc", "2", "--pause", "0.1", *tiny, "--config", str(settings)]
    more = [
        *("track.watch=true", f"preempt.notice=file:{advice}"),
        f"track.command={json.dumps(f'cat >> {shlex.quote(str(kept))}')}",
        "faults=[poison@samples=300-300,kill@step=24,rank=0,slow@step=34-80,rank=1,seconds=0.1]",
    ]
    out = tmp_path / "hit"
    killed = begun(out, [*words, f"out={out}", *more])
    killed.until(lambda out: metrics_step(out) >= 36)
    killed.kill()
    killed.process.wait(30)
    hit = begun(out, [*words, f"out={out}", *more]).wait()
    assert hit.code == 0, hit.tail
    assert hit.summary["skipped"] == [[300, 301]] and len(hit.journal("start")) == 3, hit.tail
    assert [line["reason"] for line in hit.journal("notice")], "the advice was heard"
    clean = tmp_path / "told-to-skip"
    told = begun(clean, [*words, f"out={clean}", skip_override(hit.summary["skipped"])]).wait()
    assert re.search(r"epochs=1 of [\d,]+ training samples, 32 a step: steps=", told.text), (
        told.tail
    )
    assert told.digest == hit.digest and told.summary["steps"] > 50

    def messages() -> list[dict[str, Any]]:
        return read_lines(kept) if kept.exists() else []

    until(lambda: "done" in [one["kind"] for one in messages()])
    keys = [(one["event"], one["key"], one["level"]) for one in messages()]
    assert len(keys) == len({*keys}), keys
    opened, over = ({key for what, key, _ in keys if what == one} for one in ("trigger", "resolve"))
    assert opened and opened == over, keys
