"""The report that a rank writes when something is wrong, so that the disk alone shows the cause.

out/incidents/000003/rank-00001.json         incarnation 3, rank 1
out/incidents/000003/rank-00001.early.json   the same, written before NCCL is asked
out/incidents/000003/rank-00000.seen.json    rank 0 is dead; another rank of its node wrote it
out/incidents/000003/cause.json              what the reports came to; the ranks end
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.system.files import read_bounded, write_json
from runner.system.parsing import whole
from runner.system.redact import redacted

_REPORT_BYTES = 1 << 26
_FATAL_BYTES = 1 << 24
_MOST_RANKS = 1 << 20
_SEEN, _EARLY = "seen.json", "early.json"
CAUSE = "cause.json"

Frame = dict[str, Any]  # {"file", "line", "function"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One rank's report.

    Attributes:
        kind: ``exception`` (its own), ``lost_contact`` (a collective failed: another rank's
            fault), ``unclear`` (a collective failed, and its error does not say whose fault it
            is), ``hang`` (its watchdog fired), ``called`` (another rank's watchdog fired),
            ``fatal`` (a signal that Python could still catch), and as others see it: ``signal``,
            or ``exit`` (it ended by itself, without a report).
        seconds: time in the phase.
        stacks: of every thread, outermost frame first.
        collectives: entries of torch's flight recorders, oldest first; see
            :func:`runner.health.collective_trace.collectives`.
        untold: a sentence that names a recorder which did not answer; "" if all did.
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
    untold: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Report:
        """
        Raises:
            TypeError, ValueError, KeyError: it is not a report.
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
            collectives=stored_entries(value["collectives"]),
            untold=str(value.get("untold", "")),
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
    """Read one of a report's collectives from a file."""
    is_over = bool(entry["finished"])
    return {
        "group": str(entry["group"]),
        "seq": whole(entry["seq"], "seq"),
        "op": str(entry["op"]),
        "sizes": [[whole(length, "size") for length in size] for size in entry["sizes"]],
        "dtypes": [str(dtype) for dtype in entry["dtypes"]],
        "state": str(entry.get("state", "completed" if is_over else "scheduled")),
        "finished": is_over,
        "line": str(entry["line"]),
    }


def stored_entries(entries: Any) -> list[dict[str, Any]]:
    """Read a report's collectives from a file.

    Raises:
        TypeError, ValueError, KeyError: they are not valid.
    """
    return [_told_entry(entry) for entry in entries]


_HANDS_ON = ("runner/distributed/agreement.py", "runner/fault/wrap.py")


def own_line(frames: list[Frame]) -> str:
    """``file:line function`` of the innermost frame outside of installed packages.

    Wrappers that only forward a collective are skipped: their caller says which one it is.
    """
    # Within an import the innermost frames are importlib's, whose "file" is "<frozen ...>".
    own = [frame for frame in frames if not frame["file"].startswith("<frozen")]
    own = [frame for frame in own if "site-packages" not in frame["file"]]
    own = [frame for frame in own if "/lib/python" not in frame["file"]] or own or frames
    own = [frame for frame in own if not frame["file"].endswith(_HANDS_ON)] or own
    if not own:
        return ""
    return f"{own[-1]['file']}:{own[-1]['line']} {own[-1]['function']}"


def write_report(
    folder: Path, report: Report, *, for_other: bool = False, early: bool = False
) -> None:
    """Make a report durable under ``folder``.

    Args:
        for_other: whether it is about a dead rank.
        early: whether this is the early report, which the whole one may replace later.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ending = _SEEN if for_other else _EARLY if early else "json"
    write_json(folder / f"rank-{report.rank:05d}.{ending}", redacted(report.to_json()))


def has_reports(folder: Path) -> bool:
    """Whether any rank has written a report."""
    return any(True for _ in folder.glob("rank-*.json"))


def reported(folder: Path) -> dict[int, bool]:
    """Ranks with a whole report, and whether it is their own. Reads file names only."""
    is_own: dict[int, bool] = {}
    for path in folder.glob("rank-*.json"):
        rank, _, ending = path.name.removeprefix("rank-").partition(".")
        if rank.isdigit() and ending != _EARLY:
            is_own[int(rank)] = is_own.get(int(rank), False) or ending == "json"
    return is_own


def read_reports(folder: Path) -> list[Report]:
    """The readable reports of an incident, one a rank: its own before one about it."""
    by_rank: dict[int, Report] = {}
    endings = ("json", _EARLY, _SEEN)
    paths = [(path.name.partition(".")[2], path) for path in folder.glob("rank-*.json")]
    for _, path in sorted(
        paths, key=lambda path: (endings.index(path[0]) if path[0] in endings else 0, path[1])
    ):
        try:
            report = Report.from_json(json.loads(read_bounded(path, _REPORT_BYTES)))
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            continue  # torn: the rank died while it wrote
        if path.name.startswith(f"rank-{report.rank:05d}."):
            by_rank.setdefault(report.rank, report)
    return [by_rank[rank] for rank in sorted(by_rank)]


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
    """The frames that an exception passed through, as the training thread's stack."""
    frames = [
        {"file": f.filename, "line": f.lineno, "function": f.name}
        for f in traceback.extract_tb(error.__traceback__)
    ]
    return {"thread": "MainThread", "frames": frames}


def read_fatal_log(path: Path, seen: Report) -> Report | None:
    """Read faulthandler's log of a rank that died of a signal it could catch; None: no log."""
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

    The log begins with the thread that died, which may be a C++ thread without Python frames.
    """
    blocks = [_block(block) for block in re.split(r"(?:Current t|T)hread 0x", text)[1:]]
    blocks = [block for block in blocks if block]
    training = [b for b in blocks if any("__main__" in str(frame["file"]) for frame in b)]
    return next(iter(training or blocks), [])


def _block(text: str) -> list[Frame]:
    frames = re.findall(r'File "([^"]+)", line ([0-9]{1,9}) in (\S+)', text)
    return [{"file": f, "line": int(n), "function": name} for f, n, name in reversed(frames)]


def now() -> float:
    return time.time()
