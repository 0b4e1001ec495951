"""A rank dies, freezes or strays: the group ends soon, says who it was, restarts, ends the same.

Every ending at every point of a step with ``--full``, on one rank or the other in turn, but for
kills, which test_matrix.py has; always a set in which each ending and each rank comes up. And each
of them again where no collective breaks: with gloo the others are told of a death by their own
collective, over NCCL they wait for ever.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner.fault.spec import ENDINGS, POINTS
from tests import cgroup
from tests.drills.compare import assert_every_sample_once, assert_same_end, assert_same_run
from tests.drills.conftest import POISON
from tests.rows import full
from tests.run import NO_BREAK, Result, finish, left_behind, metrics_step, start, train

NO_MEMORY_GROUP = cgroup.unavailable()
pytestmark = pytest.mark.usefixtures("leaves_nothing")

# A tiny model's step takes 0.03 s; a start several seconds.
QUICK = ("watchdog.floor_seconds=3", "watchdog.slow_seconds=20")
ALWAYS = {("abort", "backward", 0), ("stop", "agree", 1), ("hang", "apply", 1)}
ALWAYS_WAITING = {("kill", "backward", 1)}
MATRIX = [
    pytest.param(
        *(e, p, r, breaks),
        marks=() if (e, p, r) in always else pytest.mark.full,
        id=f"{e}-{p}-{r}" + ("" if breaks else "-nothing breaks"),
    )
    for breaks, always in ((True, ALWAYS), (False, ALWAYS_WAITING))
    for number, e in enumerate(ENDINGS)
    for place, p in enumerate(POINTS)
    for r in (0, 1)
    if (e, p, r) in always or (e != "kill" and r == (number + place + breaks) % 2)
]
SIGNAL_WORDS = {
    "kill": ("SIGKILL",),
    "abort": ("Aborted", "SIGABRT"),
    "raise": ("DrillError",),
    "stop": ("does not answer",),
    "hang": ("never entered", "inject.py"),
}


@pytest.mark.parametrize(("ending", "point", "rank", "breaks"), MATRIX)
def test_a_rank_ends_badly(
    tmp_path: Path, request: pytest.FixtureRequest, ending: str, point: str, rank: int, breaks: bool
) -> None:
    clean = request.getfixturevalue("clean")
    out = tmp_path / "run"
    fault = f"{ending}@step={_step(point)},rank={rank},at={point}"
    if not breaks:
        fault += f",{NO_BREAK}"
    overrides, expected = [f"faults=[{fault}]"], clean
    if point == "rollback":
        overrides = [POISON.replace("]", f",{fault}]"), "checkpoint.keep=9"]
        expected = request.getfixturevalue("poisoned")
    began = time.monotonic()
    run = finish(out, *QUICK, *overrides, restarts=1)
    print(f"{fault}: {time.monotonic() - began:.1f} s in all")
    if ending == "raise" and point == "save":
        # A failed write of one rank is told to all: an incident, not a crash.
        assert run.journal("save_failed") and not run.journal("crash"), run.tail
    elif ending == "hang" and point == "save":
        assert len(run.journal("start")) == 2, run.tail
    else:
        (crash,) = run.journal("crash")
        assert crash["ranks"] == [rank], crash
        assert any(word in crash["reason"] for word in SIGNAL_WORDS[ending]), crash
        assert crash["detail"]["incarnation"] == 1 and crash["detail"]["signature"]
        _cause_before_the_rest(run, crash["reason"])
    if point == "rollback":
        assert_same_end(run, expected)
    else:
        assert_same_run(run, expected)
    assert_every_sample_once(run)
    assert not left_behind(out), run.tail


def _step(point: str) -> int:
    """30 is saved at; the poison of ``poisoned`` is met at 22."""
    return {"save": 30, "rollback": 22}.get(point, 27)


def _cause_before_the_rest(run: Result, reason: str) -> None:
    """What a person reads first is the cause, not an error of the other ranks."""
    told = run.text.find("crash")
    secondary = [run.text.find(w) for w in ("Connection closed by peer", "Connection reset")]
    assert told >= 0 and reason.split(":")[0] in run.text, run.tail
    assert all(place < 0 or place > told for place in secondary), run.tail


@pytest.mark.twin
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        # gloo aborts the rank that comes to the next collective too early: its last line then.
        ("skip_collective", ("rank 1 entered all_gather", "rank 1: Fatal Python error: Aborted")),
        full("other_collective", ("rank 1 entered broadcast",)),
    ],
)
def test_a_rank_that_strays_is_named(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    """Among three, so that there is a majority: rank, operation, sequence number, line."""
    run = train(tmp_path / "run", *QUICK, f"faults=[{kind}@step=12,rank=1]", "steps=20", ranks=3)
    assert run.code != 0
    (crash,) = run.journal("crash")
    assert crash["ranks"] == [1], crash
    assert any(word in crash["reason"] for word in words), crash
    assert "step.py" in crash["reason"], crash
    # Of a rank that died of a signal that is known at once; the others may not have told by then.
    is_fatal = "Fatal Python error" in crash["reason"]
    assert is_fatal or "all_reduce #" in crash["reason"], crash
    again = finish(tmp_path / "run", "steps=20", ranks=3)
    assert again.summary["restarts"] == 1


@pytest.mark.twin
@pytest.mark.full
def test_another_shape_is_named_where_torch_looks(tmp_path: Path) -> None:
    """gloo aborts a rank of its choice; ``debug=collectives`` names ranks and shapes."""
    run = train(
        tmp_path / "run", *QUICK, "debug=collectives", "steps=20",
        "faults=[other_shape@step=12,rank=1]",
    )  # fmt: skip
    assert run.code != 0
    (crash,) = run.journal("crash")
    assert "Detected mismatch between collectives" in crash["reason"], crash
    plain = train(tmp_path / "plain", *QUICK, "steps=20", "faults=[other_shape@step=12,rank=1]")
    assert plain.code != 0
    again = finish(tmp_path / "plain", "steps=20", "faults=[other_shape@step=12,rank=1]")
    (crash,) = again.journal("crash")
    assert "rank 1 handed over" in crash["reason"], crash
    assert "all_reduce" in crash["reason"] and "step.py" in crash["reason"], crash


# Once told it touches new memory until the kernel ends it. A limit that leaves nothing would first
# have system calls fail with ENOMEM, and the rank end by itself.
HUNGRY = """
import os, threading, time
from pathlib import Path
from runner.__main__ import run

def eat():
    while not Path({mark!r}).exists():
        time.sleep(0.01)
    Path({mark!r}).unlink()  # once
    hoard = [b"x" * (1 << 20) for _ in range(1024)]

if os.environ["RANK"] == "1":
    threading.Thread(target=eat, daemon=True).start()
run()
"""


@pytest.mark.twin
@pytest.mark.skipif(NO_MEMORY_GROUP is not None, reason=NO_MEMORY_GROUP or "")
def test_a_rank_that_the_kernel_kills_for_memory(tmp_path: Path, clean: Result) -> None:
    """A real OOM kill: the cause is told apart from any other SIGKILL."""
    out, mark, program = tmp_path / "run", tmp_path / "hungry", tmp_path / "program.py"
    program.write_text(HUNGRY.format(mark=str(mark)))
    slow = "faults=[slow@step=10-60,seconds=0.1]"
    with cgroup.MemoryGroup() as group:
        started = start(out, *QUICK, slow, restarts=1, program=program)
        started.until(lambda out: metrics_step(out) >= 15)
        group.enter(started.ranks()[1], 1 << 26)
        mark.touch()
        run = started.wait()
    assert run.code == 0, run.tail
    (crash,) = run.journal("crash")
    assert crash["ranks"] == [1] and crash["detail"]["cause"] == "signal", crash
    assert "killed by SIGKILL by the kernel, out of memory" in crash["reason"], crash
    _cause_before_the_rest(run, crash["reason"])
    assert_same_run(run, clean)
    assert_every_sample_once(run)


@pytest.mark.twin
@pytest.mark.parametrize(
    ("engine", "ranks", "named"),
    [
        pytest.param("parallel=ddp", 3, [1], id="one of three"),
        # Each shard has two copies: which of them strayed nobody can say.
        full("parallel=hsdp parallel.shard_size=2", 4, [1, 3], id="of shards"),
    ],
)
def test_a_copy_that_went_wrong_is_found(
    tmp_path: Path, engine: str, ranks: int, named: list[int]
) -> None:
    """One bit of one copy: named, and nothing that came after it is kept."""
    common = (*engine.split(), "steps=26", "schedule.total=60", "batch.global_size=60")
    check = "debug.replica_check_every=5"
    healthy = finish(tmp_path / "healthy", *common, check, ranks=ranks)
    assert not healthy.journal("replica_mismatch")
    flipped = finish(
        tmp_path / "run",
        *common,
        check,
        "faults=[flip_bit@step=24,rank=1]",
        ranks=ranks,
        restarts=1,
    )
    (found,) = flipped.journal("replica_mismatch")
    assert found["ranks"] == named and found["step"] == 25, found
    assert flipped.digest == healthy.digest, flipped.tail


def test_a_slow_rank_is_named_and_left_alone(tmp_path: Path) -> None:
    run = finish(
        tmp_path / "run",
        "watchdog.straggler_every=5",
        "faults=[slow@step=5-20,rank=1,seconds=0.15]",
        "steps=22",
    )
    slow = [line for line in run.journal("straggler") if "reading data" in line["reason"]]
    assert [line["ranks"] for line in slow] == [[1]], run.tail
    assert 10 <= slow[0]["step"] <= 20 and not run.journal("crash")


NCCLS_OWN = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.26.2\\nncclUnhandledCudaError: Call to CUDA function failed.\\nLast error:\\n"
    "Cuda failure 999 'unknown error'"
)


@pytest.mark.twin
@pytest.mark.full
def test_a_rank_whose_device_fails_in_a_collective_is_named(tmp_path: Path) -> None:
    """NCCL gives the guilty rank an error of the class that the others get as well."""
    program = tmp_path / "own_fault.py"
    program.write_text(
        "import torch.distributed as dist\n"
        "from runner.__main__ import main\n"
        "from runner.fault import inject\n"
        f'inject.DrillError = lambda _: dist.DistBackendError("{NCCLS_OWN}")\n'
        "raise SystemExit(main())\n"
    )
    fault = "faults=[raise@step=12,rank=1,at=agree]"
    run = train(tmp_path / "run", *QUICK, fault, "steps=20", program=program)
    assert run.code != 0
    (crash,) = run.journal("crash")
    assert crash["ranks"] == [1] and crash["detail"]["cause"] == "exception", crash
    assert "unhandled cuda error" in crash["reason"], crash
    assert "Cuda failure 999 'unknown error' in agree of step 12" in crash["reason"], crash


@pytest.mark.twin
@pytest.mark.full
def test_an_error_that_should_be_every_ranks_is_told_where_it_is_not(tmp_path: Path) -> None:
    """A rank that cannot begin would wait for the others, who wait for it elsewhere."""
    settings = ("parallel.timeout_seconds=3600", "watchdog.slow_seconds=3600", "steps=5")
    fault = "faults=[wrong_grad@step=3,rank=1,module=blocks.9]"
    run = train(tmp_path / "run", *settings, fault, ranks=3)
    assert run.code == 1, run.tail
    (crash,) = run.journal("crash")
    assert crash["ranks"] == [1], crash
    words = "of this rank alone: ConfigError: faults: module=blocks.9: the model has embedding"
    assert words in crash["reason"], crash
    assert not left_behind(run.out), run.tail
