"""What one rank writes when something is wrong, so that the cause can be told from disk alone.

    out/incidents/000003/rank-00001.json         incarnation 3, rank 1
    out/incidents/000003/rank-00000.seen.json    rank 0 is dead; a neighbour wrote it
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.files import read_bounded, write_json
from runner.redact import redacted
from runner.strict import whole

# Words in errors of gloo, NCCL and TCP that mean: the fault is at the other end.
_CONTACT_WORDS = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "gloo",
    "NCCL",
    "Socket",
    "recvBytes",
    "sendBytes",
)


_MOST_ENTRIES = 400  # of the flight recorder, the newest
_REPORT_BYTES = 1 << 26
_FATAL_BYTES = 1 << 24
_MOST_RANKS = 1 << 20

Frame = dict[str, Any]  # {"file", "line", "function"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One rank's account.

    Attributes:
        kind: ``exception`` (its own), ``lost_contact`` (a collective broke: somebody else's
            fault), ``hang`` (its watchdog fired), ``called`` (another rank's watchdog fired),
            ``fatal`` (a signal that Python could still catch), and seen from outside: ``signal``,
            or ``exit`` (it ended by itself, without a report).
        seconds: in the phase.
        stacks: of every thread, outermost frame first.
        collectives: the newest entries of torch's flight recorder, oldest first.
    """

    rank: int
    world_size: int
    kind: str
    step: int
    phase: str
    seconds: float = 0.0
    message: str = ""
    traceback: str = ""
    host: str = ""
    pid: int = 0
    time: float = 0.0
    stacks: list[dict[str, Any]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Report:
        """
        Raises:
            TypeError, ValueError, KeyError: it is no report.
        """
        return cls(
            rank=whole(value["rank"], "rank", below=_MOST_RANKS),
            world_size=whole(value["world_size"], "world_size", below=_MOST_RANKS),
            kind=str(value["kind"]),
            step=whole(value["step"], "step"),
            phase=str(value["phase"]),
            seconds=float(value["seconds"]),
            message=str(value["message"]),
            traceback=str(value["traceback"]),
            host=str(value["host"]),
            pid=whole(value["pid"], "pid"),
            time=float(value["time"]),
            stacks=[
                {"thread": str(stack["thread"]), "frames": [_frame(f) for f in stack["frames"]]}
                for stack in value["stacks"]
            ],
            collectives=[_told_entry(entry) for entry in value["collectives"]],
        )

    @property
    def where(self) -> str:
        """The innermost line of the training thread that is not inside a library."""
        for stack in self.stacks:
            if stack["thread"] == "MainThread":
                return own_line(stack["frames"])
        return ""


def _frame(frame: Any) -> Frame:
    line = whole(frame["line"] or 0, "line")
    return {"file": str(frame["file"]), "line": line, "function": str(frame["function"])}


def _told_entry(entry: Any) -> dict[str, Any]:
    """One of :func:`collectives`, as a file has it."""
    return {
        "group": str(entry["group"]),
        "seq": whole(entry["seq"], "seq"),
        "op": str(entry["op"]),
        "sizes": [[whole(length, "size") for length in size] for size in entry["sizes"]],
        "dtypes": [str(dtype) for dtype in entry["dtypes"]],
        "finished": bool(entry["finished"]),
        "line": str(entry["line"]),
    }


def own_line(frames: list[Frame]) -> str:
    """``file:line function`` of the innermost frame outside of installed packages."""
    own = [frame for frame in frames if "site-packages" not in frame["file"]]
    own = [frame for frame in own if "/lib/python" not in frame["file"]] or own or frames
    if not own:
        return ""
    return f"{own[-1]['file']}:{own[-1]['line']} {own[-1]['function']}"


def write_report(folder: Path, report: Report, *, for_other: bool = False) -> None:
    """Make a report durable under ``folder``; ``for_other``: about a rank that is dead."""
    folder.mkdir(parents=True, exist_ok=True)
    ending = "seen.json" if for_other else "json"
    write_json(folder / f"rank-{report.rank:05d}.{ending}", redacted(report.to_json()))


def reported(folder: Path) -> dict[int, bool]:
    """Ranks that have a report, and whether it is their own. Reads names only."""
    found: dict[int, bool] = {}
    for path in folder.glob("rank-*.json"):
        rank, _, ending = path.name.removeprefix("rank-").partition(".")
        if rank.isdigit():
            found[int(rank)] = found.get(int(rank), False) or ending == "json"
    return found


def read_reports(folder: Path) -> list[Report]:
    """The readable reports of an incident, one a rank: its own before one about it."""
    found: dict[int, Report] = {}
    for path in sorted(folder.glob("rank-*.json"), key=lambda p: ("seen" in p.name, p.name)):
        try:
            report = Report.from_json(json.loads(read_bounded(path, _REPORT_BYTES)))
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            continue  # torn: the rank died while it wrote
        if path.name.startswith(f"rank-{report.rank:05d}."):
            found.setdefault(report.rank, report)
    return [found[rank] for rank in sorted(found)]


def stacks() -> list[dict[str, Any]]:
    """The Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        {
            "thread": names.get(ident, str(ident)),
            "frames": [
                {"file": f.filename, "line": f.lineno, "function": f.name}
                for f in traceback.extract_stack(frame)
            ],
        }
        for ident, frame in sys._current_frames().items()
    ]


def stack_of(error: BaseException) -> dict[str, Any]:
    """The frames an exception came through, as the training thread's stack."""
    frames = [
        {"file": f.filename, "line": f.lineno, "function": f.name}
        for f in traceback.extract_tb(error.__traceback__)
    ]
    return {"thread": "MainThread", "frames": frames}


class _PlainValues(pickle.Unpickler):
    """torch hands its own dump over as a pickle, in memory; it holds plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder dump")


def collectives() -> list[dict[str, Any]]:
    """The newest entries of the flight recorder of this process; empty when there is none.

    Each has ``group`` (name, and its backend), ``seq`` (collective sequence number in the group),
    ``op``, ``sizes``, ``dtypes``, ``finished``, ``line``.
    """
    if not dist.is_initialized():
        return []
    try:
        private: Any = torch._C._distributed_c10d
        dump = _PlainValues(io.BytesIO(private._dump_fr_trace(True, True, False))).load()
        entries = [_entry(entry) for entry in dump.get("entries", []) if not entry["is_p2p"]]
    except (AttributeError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError):
        return []  # a private interface: a report without it is better than none
    return entries[-_MOST_ENTRIES:]


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    frames = [
        {"file": f["filename"], "line": f["line"], "function": f["name"]}
        for f in reversed(entry.get("frames", []))
    ]
    name = str(entry["profiling_name"])  # nccl:all_reduce
    backend, _, op = name.rpartition(":")
    group = str(entry["process_group"][0])
    return {
        # A group with a backend for each device counts in each of them from one.
        "group": f"{group}/{backend}" if backend else group,
        "seq": int(entry["collective_seq_id"]),
        "op": op,
        "sizes": entry["input_sizes"],
        "dtypes": entry["input_dtypes"],
        "finished": bool(entry["retired"]) or entry["state"] == "completed",
        "line": own_line(frames),
    }


def is_lost_contact(error: BaseException) -> bool:
    """Whether an error only says that a collective broke."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CONTACT_WORDS)


def last_words(path: Path, seen: Report) -> Report | None:
    """What faulthandler wrote for a rank that died of a signal it could catch; None: nothing."""
    try:
        text = read_bounded(path, _FATAL_BYTES).decode(errors="replace")
    except OSError:
        return None
    if not text.strip():
        return None
    first, _, _ = text.partition("\n")
    return Report(
        rank=seen.rank,
        world_size=seen.world_size,
        kind="fatal",
        step=seen.step,
        phase=seen.phase,
        message=first.strip(),
        traceback=text,
        host=seen.host,
        pid=seen.pid,
        time=seen.time,
        stacks=[{"thread": "MainThread", "frames": _frames(text)}],
    )


def _frames(text: str) -> list[Frame]:
    """The training thread's frames in what faulthandler wrote, outermost first.

    It begins with the thread that died, which may be one of C++ without any Python frame.
    """
    blocks = [_block(block) for block in re.split(r"(?:Current t|T)hread 0x", text)[1:]]
    blocks = [block for block in blocks if block]
    training = [b for b in blocks if any("__main__" in str(frame["file"]) for frame in b)]
    return next(iter(training or blocks), [])


def _block(text: str) -> list[Frame]:
    found = re.findall(r'File "([^"]+)", line ([0-9]{1,9}) in (\S+)', text)
    return [{"file": f, "line": int(n), "function": name} for f, n, name in reversed(found)]


def now() -> float:
    return time.time()
