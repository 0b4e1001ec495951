"""What NCCL's flight recorder says of a hang, and whose fault it is, on 4 to 64 ranks.

NCCL is not here: the entries have the shape in which its recorder dumps them (version 2.10 of
the format). The host launches collectives and runs on; ``started`` is there only with
TORCH_NCCL_ENABLE_TIMING=1.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.distributed.env import debug_settings
from runner.health import collective_trace
from runner.health.collective_trace import collectives
from runner.health.flight_recorder import MOST_ENTRIES, plain_entry, waits_in
from runner.health.rank_report import Report, read_reports, write_report
from runner.health.root_cause import RootCause, find_root_cause
from tests.programs import python

STUCK = 100
LAUNCHED = 30  # how far a host runs on before its launch queue is full
GATHER, SCATTER, SUM = "_all_gather_base", "_reduce_scatter_base", "all_reduce"
_backend = ["nccl"]


@pytest.fixture(params=["nccl", "nccl2"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """What "nccl" makes up to torch 2.13, and from 2.14 on."""
    _backend[0] = request.param
    yield request.param
    _backend[0] = "nccl"


def entry(
    seq: int,
    state: str = "scheduled",
    *,
    op: str = GATHER,
    size: int = 1000,
    group: str = "0",
    backend: str = "",
) -> dict[str, Any]:
    """As torch dumps it."""
    is_over = state == "completed"
    backend = backend or _backend[0]
    if backend == "nccl2" and state == "started":
        state = "scheduled"  # its hook owns no event that would say so
    return {
        "record_id": seq,
        "pg_id": int(group),
        "process_group": (group, "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"{backend}:{op}",
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1 if is_over else None,
        "duration_ms": 0.5 if is_over else None,
        "input_sizes": ((size,),),
        "output_sizes": ((size * 4,),),
        "input_dtypes": ["BFloat16"],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "retired": is_over,
        "is_p2p": False,
        "timeout_ms": 600000,
        "frames": [
            {"name": "all_gather_into_tensor", "filename": "/x/site-packages/t.py", "line": 9},
            {"name": "training_loss", "filename": "runner/engine/forward.py", "line": 55},
        ],
    }


def dump(entries: Sequence[dict[str, Any]]) -> bytes:
    """The whole of what a recorder hands over."""
    return pickle.dumps(
        {
            "version": "2.10",
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
            "pg_status": {"0": {"last_enqueued_collective": 130, "last_started_collective": 100}},
            "nccl_version": "2.28.9",
            "nccl_comm_state": {"0xabc": {"rank": "0"}},
            "entries": list(entries),
        }
    )


def report(rank: int, world_size: int, entries: Sequence[dict[str, Any]], **more: Any) -> Report:
    frame = {"file": "runner/train/step.py", "line": 114, "function": "on_host"}
    told: dict[str, Any] = {
        "kind": "called",
        "step": 7,
        "phase": "read",
        "seconds": 120.0,
        "message": "no progress",
        "stacks": [{"thread": "MainThread", "frames": [frame]}],
        "collectives": [plain_entry(one) for one in entries],
    }
    return Report(rank=rank, world_size=world_size, **(told | more))


def past(first: int = 90) -> list[dict[str, Any]]:
    return [entry(seq, "completed") for seq in range(first, STUCK)]


def launched(rank: int) -> list[dict[str, Any]]:
    """What the host has launched behind the one in which the device is: to each its own."""
    return [entry(seq) for seq in range(STUCK + 1, STUCK + LAUNCHED - rank % 7)]


def waiting(rank: int, state: str, **changes: Any) -> list[dict[str, Any]]:
    return [*past(), entry(STUCK, state, **changes), *launched(rank)]


def told(world_size: int, of: Callable[[int], list[dict[str, Any]]]) -> RootCause:
    return find_root_cause(
        [report(rank, world_size, of(rank)) for rank in range(world_size)], world_size
    )


WORLDS = [4, 8, 16, 64]
ODD = 2


def odd(usual: str, other: str) -> Callable[[int], list[dict[str, Any]]]:
    """All ranks are in one collective; the odd one's device is in another state."""
    return lambda rank: waiting(rank, other if rank == ODD else usual)


def odd_in(**changes: Any) -> Callable[[int], list[dict[str, Any]]]:
    return lambda rank: waiting(rank, "started", **(changes if rank == ODD else {}))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("of", "kind", "ranks", "words"),
    [
        # Nobody is named: least of all a rank whose host had launched less than the others.
        (odd("started", "started"), "network", (), ["none makes progress", f"{GATHER} #{STUCK}"]),
        (odd("started", "completed"), "network", (), [f"on rank {ODD} it is done"]),
        (
            odd("started", "scheduled"),
            "device",
            (ODD,),
            [f"the device of rank {ODD} has not reached"],
        ),
        (odd("scheduled", "scheduled"), "network", (), ["distinguished without "]),
        (
            lambda rank: past() if rank == ODD else waiting(rank, "started"),
            "absent",
            (ODD,),
            [f"rank {ODD} never entered", f"#{STUCK}"],
        ),
        (odd_in(size=999), "shape", (ODD,), [f"rank {ODD} entered {GATHER}", "(bfloat16[999])"]),
        (odd_in(op=SUM), "operation", (ODD,), []),
    ],
)
def test_one_is_odd(
    of: Callable[[int], list[dict[str, Any]]],
    kind: str,
    ranks: tuple[int, ...],
    words: list[str],
    world_size: int,
) -> None:
    cause = told(world_size, of)
    if _backend[0] == "nccl2" and (kind, ranks) in (("network", ()), ("device", (ODD,))):
        # It never records that a device has begun, so that no device can be named.
        kind, ranks, words = "network", (), ["TORCH_DIST_USE_NCCL2=0 and TORCH_NCCL_ENABLE_TIMING"]
    assert (cause.kind, cause.ranks) == (kind, ranks), cause
    assert all(word in cause.reason for word in words) and "still moves" not in cause.reason


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("state", "entries", "more", "ranks", "words"),
    [
        ("started", past(), {"seconds": 3.0, "phase": "fetch"}, (ODD,), "moves: it is slow"),
        # It is said, and not taken for a rank that never came.
        ("scheduled", [], {"untold": "it did not answer"}, (), f"rank {ODD}: it did not answer"),
    ],
)
def test_one_is_slow_or_does_not_tell(
    state: str,
    entries: list[dict[str, Any]],
    more: dict[str, Any],
    ranks: tuple[int, ...],
    words: str,
    world_size: int,
) -> None:
    reports = [report(rank, world_size, waiting(rank, state)) for rank in range(world_size)]
    reports[ODD] = report(ODD, world_size, entries, **more)
    cause = find_root_cause(reports, world_size)
    assert cause.ranks == ranks and words in cause.reason, cause


@pytest.mark.parametrize("world_size", WORLDS)
def test_most_are_late(world_size: int) -> None:
    """One rank stands where nobody else has come to: it may be astray as well."""
    cause = told(world_size, lambda rank: waiting(rank, "started") if rank == ODD else past())
    assert cause.ranks == () and "is unknown" in cause.reason, cause
    cause = told(world_size, lambda rank: waiting(rank, "started" if rank == ODD else "scheduled"))
    assert cause.ranks == () and "is unknown" in cause.reason, cause


@pytest.mark.parametrize("world_size", [8, 16, 64])
def test_who_is_late_because_he_waits_for_somebody_else_is_not_named(world_size: int) -> None:
    """HSDP: a node's ranks wait for one of theirs, who waits for a rank of another node."""
    late, guilty = 1, world_size // 2 + 1

    def of(rank: int) -> list[dict[str, Any]]:
        node, across = str(1 + 2 * rank // world_size), "9"
        entries = [entry(seq, "completed", group=node) for seq in range(5, 10)]
        if rank % (world_size // 2) == late:
            entries += [entry(3, "completed", group=across, op=SUM)]
            entries += [] if rank == guilty else [entry(4, "started", group=across, op=SUM)]
        if rank == guilty:
            return entries
        if rank == late:
            return [*entries, entry(10, "scheduled", group=node)]
        return [*entries, entry(10, "started", group=node)]

    cause = told(world_size, of)
    assert guilty in cause.ranks and late not in cause.ranks, cause


def test_few_are_named_of_many() -> None:
    cause = told(64, lambda rank: waiting(rank, "started"))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more entered" in cause.reason


# Asking the recorders


class Recorders:
    """torch's two, in the place of its C++ module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gloo: list[dict[str, Any]] = []
        self.nccl: list[dict[str, Any]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        module = torch._C._distributed_c10d
        stub = SimpleNamespace(_dump_fr_trace=lambda *_: dump(self.gloo))
        self.stub = stub
        monkeypatch.setattr(collective_trace, "torch", SimpleNamespace(
            _C=SimpleNamespace(_distributed_c10d=stub)))  # fmt: skip
        monkeypatch.setattr(collective_trace.dist, "is_initialized", lambda: True)
        assert hasattr(module, "_dump_fr_trace"), "the name in this torch"

    def ask_nccl(self, *flags: Any) -> bytes:
        assert flags[:3] == (True, True, False)
        self.hangs.wait(60)
        return dump(self.nccl)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Recorders:
    return Recorders(monkeypatch)


def by_its_name(recorders: Recorders) -> None:
    recorders.stub._dump_nccl_trace = recorders.ask_nccl


def by_its_backend(recorders: Recorders) -> None:
    """As torch has it from 2.14 on; the default is gloo's still, and the old one stays empty."""

    def ask(*flags: Any) -> bytes:
        """_dump_fr_trace(includeCollectives, includeStackTraces, onlyActive, backend)"""
        if flags[3:] == ("nccl2",):
            return recorders.ask_nccl(*flags)
        return dump([] if flags[3:] else recorders.gloo)

    recorders.stub._dump_fr_trace = ask
    recorders.stub._dump_nccl_trace = lambda *_: dump([])


@pytest.mark.parametrize(
    ("named", "backend"), [(by_its_name, "nccl"), (by_its_backend, "nccl2")], indirect=["backend"]
)
def test_both_recorders_are_asked(
    recorders: Recorders,
    named: Callable[[Recorders], None],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    named(recorders)
    monkeypatch.setattr(collective_trace.dist, "is_nccl_available", lambda: True)
    recorders.gloo = [entry(3, "completed", backend="gloo", op="barrier")]
    recorders.nccl = waiting(0, "started")
    entries, untold = collectives()
    assert not untold
    assert {one["group"] for one in entries} == {"0/gloo", f"0/{backend}"}
    front = waits_in(entries)
    state = "started" if backend == "nccl" else "scheduled"
    assert front is not None and (front["seq"], front["state"]) == (STUCK, state)
    assert front["line"] == "runner/engine/forward.py:55 training_loss"
    told = asdict(report(0, 4, [])) | {"collectives": entries}
    write_report(tmp_path, Report.from_json(told))
    (read,) = read_reports(tmp_path)
    assert read.collectives == entries, "also from the disk"


@pytest.mark.parametrize("absent", [None, 2])
def test_what_torchs_hook_really_records_blames_nobody_innocent(
    recorders: Recorders, absent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts ran on to different numbers: as gloo's entries these would blame rank 2."""
    by_its_backend(recorders)
    monkeypatch.setattr(collective_trace.dist, "is_nccl_available", lambda: True)
    recorded = json.loads((Path(__file__).parents[1] / "data" / "nccl2_hang.json").read_text())
    reports = []
    for rank, whole in enumerate(recorded["ranks"]):
        recorders.nccl = [one for one in whole["entries"] if rank != absent or one["retired"]]
        entries, untold = collectives()
        assert not untold and {one["group"] for one in entries} == {"0/nccl2"}
        reports.append(replace(report(rank, 4, []), collectives=entries))
    assert len({len(one.collectives) for one in reports}) > 1
    cause = find_root_cause(reports, 4)
    if absent is None:
        assert (cause.kind, cause.ranks) == ("network", ()), cause
    else:
        assert (cause.kind, cause.ranks) == ("absent", (absent,)), cause
    assert "all_reduce #5 (float[10]) at /x/record_hook.py" in cause.reason


HOOKED = """
import sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import Backend, Work
from runner.health import collective_trace

class Lost(Backend):
    def getBackendName(self): return "nccl2"
    def allreduce(self, *_): raise RuntimeError("it never comes back")

make = lambda store, rank, size, timeout: Lost(rank, size)
dist.Backend.register_backend("lost", make, devices=["cpu"])
dist.init_process_group("lost", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError:
    pass
dist.is_nccl_available = lambda: True
(entry, *_), untold = collective_trace.collectives(seconds=60)
assert not untold and not entry["finished"], entry
assert (entry["group"], entry["op"], entry["sizes"]) == ("0/nccl2", "all_reduce", [[3]]), entry
"""


_C10D: Any = torch._C._distributed_c10d


@pytest.mark.skipif(
    "backend" not in (_C10D._dump_fr_trace.__doc__ or ""),
    reason="this torch has no recorders by the backend's name; 2.15 has",
)
def test_torchs_hook_is_asked_by_the_backends_name(tmp_path: Path) -> None:
    done = python("-c", HOOKED, str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_nccl_only_gloos_is_asked(recorders: Recorders) -> None:
    recorders.gloo = [entry(3, backend="gloo", op="barrier")]
    entries, untold = collectives()
    assert [one["op"] for one in entries] == ["barrier"] and not untold


def test_a_recorder_that_does_not_answer_is_given_up(recorders: Recorders) -> None:
    """Its dump asks the device, and the driver may never give its lock back."""
    by_its_name(recorders)
    recorders.gloo = [entry(3, backend="gloo", op="barrier")]
    recorders.hangs.clear()
    entries, untold = collectives(seconds=0.1)
    recorders.hangs.set()
    assert [one["op"] for one in entries] == ["barrier"]
    assert untold == "NCCL's flight recorder did not answer within 0.1 s"


def test_what_hangs_is_not_crowded_out_by_what_was_launched_after_it(recorders: Recorders) -> None:
    by_its_name(recorders)
    recorders.nccl = [
        *(entry(seq, "completed") for seq in range(900)),
        *(entry(seq, "scheduled") for seq in range(900, 1900)),
    ]
    entries, _ = collectives()
    assert len(entries) == MOST_ENTRIES
    front = waits_in(entries)
    assert front is not None and front["seq"] == 900 and entries[0]["finished"]


def test_a_dump_of_another_shape_is_no_reason_to_tell_nothing(recorders: Recorders) -> None:
    by_its_name(recorders)
    recorders.gloo = [entry(3, backend="gloo", op="barrier")]
    recorders.nccl = [{"is_p2p": False}]
    assert [one["op"] for one in collectives()[0]] == ["barrier"]


LOCKED = """
import ctypes, sys
from pathlib import Path
from types import SimpleNamespace
from runner.health import collective_trace, cause_reporter as module
from tests.mechanism.test_witness import take_run, watched

class Recorder:
    def _dump_fr_trace(self, *_): return b""
    def _dump_nccl_trace(self, *_): ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock

module.TELL_SECONDS = 1.0
collective_trace.torch = SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=Recorder()))
collective_trace.dist = SimpleNamespace(is_initialized=lambda: True)
one = watched(Path(sys.argv[1]))
take_run(Path(sys.argv[1]), one)
LOST = "[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:2"
one.causes.failed(RuntimeError(LOST))
"""


def test_a_recorder_that_keeps_the_interpreters_lock(tmp_path: Path) -> None:
    """The rank ends, and what it was doing is on disk."""
    words = [sys.executable, "-c", LOCKED, str(tmp_path)]
    ended = subprocess.run(words, timeout=100, env=os.environ, check=False)
    assert ended.returncode == 1
    (told,) = read_reports(tmp_path / "incidents" / "000001")
    assert told.kind == "lost_contact" and told.stacks and not told.collectives


OWN_RECORDER = """
import pickle, sys, torch, torch.distributed as dist
from runner.health.collective_trace import collectives, has_nccl
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dump = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace(True, True, False))
told = collectives()
assert has_nccl() and told[1] == "", told
assert [(entry["op"], entry["finished"]) for entry in told[0]] == [("all_reduce", True)], told
print(dump["version"], sorted(dump))
"""


@pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch has no NCCL; its build for CUDA has, on any CPU"
)
def test_nccls_own_recorder_answers_and_names_are_as_it_knows_them(tmp_path: Path) -> None:
    """Without a driver it has nothing to tell, and tells it in the form that is read here."""
    program = tmp_path / "program.py"
    program.write_text(OWN_RECORDER)
    # The runner sets it; torch 2.10 records nothing without.
    env = {"TORCH_FR_BUFFER_SIZE": "2000"}
    done = python(str(program), str(tmp_path / "store"), env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    # gloo of torch 2.10 prints a line of its own first.
    assert "\n2.10 " in f"\n{done.stdout}" and "'entries'" in done.stdout, done.stdout
    folder = Path(torch.__file__).parent / "lib"
    library = b"".join((folder / f"libtorch_{kind}.so").read_bytes() for kind in ("cpu", "cuda"))
    names = debug_settings("nccl", folder=tmp_path)
    torchs = [name for name in names if name.startswith("TORCH_")]
    assert len(torchs) > 3 and [n for n in torchs if n.encode() not in library] == []
