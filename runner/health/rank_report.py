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
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from runner.system.environment import redacted
from runner.system.files import read_bounded, write_durably, write_json
from runner.system.garbage import no_collection
from runner.system.parsing import json_text, whole

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


def stored_entries(entries: Any) -> list[dict[str, Any]]:
    """Read a report's collectives from a file.

    Raises:
        TypeError, ValueError, KeyError: they are not valid.
    """
    return [
        {
            **{name: str(entry[name]) for name in ("group", "op", "state", "line")},
            "seq": whole(entry["seq"], "seq"),
            "sizes": [[whole(length, "size") for length in size] for size in entry["sizes"]],
            "dtypes": [str(dtype) for dtype in entry["dtypes"]],
            "finished": bool(entry["finished"]),
        }
        for entry in entries
    ]


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
    write_json(folder / f"rank-{report.rank:05d}.{ending}", redacted(asdict(report)))


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
        {"thread": names.get(ident, str(ident)), "frames": frames}
        for ident, frames in _current_frames().items()
    ]


_looking = threading.Lock()


def _current_frames() -> dict[int, list[Frame]]:
    """The frames of every thread, outermost first, without a garbage collection meanwhile.

    Python 3.11 holds a lock of the whole runtime while it makes frame objects. Code that a
    collection runs may let other threads run; if one of them begins, ends or makes frame objects,
    too, both wait for each other for ever (cpython's issue 106883). The thread that is read may
    also return meanwhile, and then its frames no longer exist.
    """
    with _looking, no_collection():
        return {
            ident: _listed(traceback.walk_stack(frame))[::-1]
            for ident, frame in sys._current_frames().items()
        }


def stack_of(error: BaseException) -> dict[str, Any]:
    """The frames that an exception passed through, as the training thread's stack."""
    frames = _listed(traceback.walk_tb(error.__traceback__))
    return {"thread": "MainThread", "frames": frames}


def _listed(frames: Iterator[tuple[FrameType, int]]) -> list[Frame]:
    return [
        {"file": frame.f_code.co_filename, "line": line, "function": frame.f_code.co_name}
        for frame, line in frames
    ]


def read_fatal_log(path: Path, seen: Report) -> Report | None:
    """Read faulthandler's log of a rank that died of a signal it could catch; None: no log."""
    try:
        text = read_bounded(path, _FATAL_BYTES).decode(errors="replace")
    except OSError:
        return None
    if not text.strip():
        return None
    # The log begins with the thread that died, which may be another than the training thread.
    threads = thread_frames(text)
    own = [t for t in threads if any("__main__" in str(frame["file"]) for frame in t)]
    training = next(iter(own or threads), [])
    return replace(
        seen,
        kind="fatal",
        message=text.partition("\n")[0].strip(),
        traceback=text,
        stacks=[{"thread": "MainThread", "frames": training}],
    )


def thread_frames(text: str) -> list[list[Frame]]:
    """The Python frames of each thread in what faulthandler wrote, outermost first."""
    blocks = re.split(r"(?:Current t|T)hread 0x", text)[1:]
    found = [re.findall(r'File "([^"]+)", line ([0-9]{1,9}) in (\S+)', block) for block in blocks]
    return [
        [{"file": f, "line": int(n), "function": name} for f, n, name in reversed(frames)]
        for frames in found
        if frames
    ]


# Reports of many ranks: a folder for each node, and one file that combines them.
#
#     out/incidents/000003/node-00096/rank-00097.json   as among few ranks
#     out/incidents/000003/node-00096.json              all reports of that node, shortened
#
# A node is named after its first rank. Its leader, the lowest rank that has a report, writes the
# file. So only the ranks of one node list or read a file for each rank; the cause comes from one
# file a node. In it stand the training thread's stack and the collectives from shortly before the
# first unfinished one on, and what several ranks have in common stands once.


FROM_RANKS = 65  # with fewer ranks each report stays in a file of its own
_FILE_BYTES = 1 << 27
_BEFORE = 16  # collectives kept before the first unfinished one, in each group
_MOST_ENTRIES = 64  # of one rank


def node_folder(folder: Path, first_rank: int) -> Path:
    return folder / f"node-{first_rank:05d}"


def node_file(folder: Path, first_rank: int) -> Path:
    return folder / f"node-{first_rank:05d}.json"


def reported_nodes(folder: Path) -> list[int]:
    """First ranks of the nodes whose file exists. Reads file names only."""
    stems = [path.stem.removeprefix("node-") for path in folder.glob("node-*.json")]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def merge_node(folder: Path, first_rank: int) -> None:
    """Write the file of a node out of the reports in its folder."""
    write_node(folder, first_rank, read_reports(node_folder(folder, first_rank)))


def write_node(folder: Path, first_rank: int, reports: Sequence[Report]) -> None:
    """Write the file of a node: these reports, shortened."""
    stacks, lists = dict[str, int](), dict[str, int]()
    listed = []
    for report in reports:
        frames = [stack for stack in report.stacks if stack["thread"] == "MainThread"]
        tree = redacted(asdict(replace(report, stacks=[], collectives=[])))
        about = {
            "stacks": _place(stacks, redacted({"of": frames})["of"]),
            "collectives": _place(lists, _shortened(report)),
        }
        listed.append({"report": tree, **about})
    merged = {
        "reports": listed,
        "stacks": [json.loads(text) for text in stacks],
        "collectives": [json.loads(text) for text in lists],
    }
    data = json_text(merged, is_compact=True).encode() + b"\n"
    write_durably(node_file(folder, first_rank), data)


def read_all_reports(folder: Path) -> list[Report]:
    """The readable reports of an incident, one a rank, however many ranks there were."""
    by_rank = {report.rank: report for report in read_reports(folder)}
    merged = set(reported_nodes(folder))
    for path in sorted(folder.glob("node-*.json")):
        for report in _read_node(path):
            by_rank.setdefault(report.rank, report)
    for path in folder.glob("node-*/"):
        stem = path.name.removeprefix("node-")
        if path.is_dir() and not (stem.isdigit() and int(stem) in merged):
            for report in read_reports(path):  # its leader did not come to it
                by_rank.setdefault(report.rank, report)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _place(texts: dict[str, int], value: Any) -> int:
    """The number of a value in a table of distinct ones."""
    return texts.setdefault(json.dumps(value, sort_keys=True), len(texts))


def _shortened(report: Report) -> list[dict[str, Any]]:
    """The report with collectives from shortly before the first unfinished one of each group on.

    It begins earlier because another rank's first unfinished one may be earlier.
    """
    groups: dict[str, list[int]] = {}
    for at, entry in enumerate(report.collectives):
        groups.setdefault(str(entry["group"]), []).append(at)
    lengths: list[int] = []
    for places in groups.values():
        unfinished = (n for n, at in enumerate(places) if not report.collectives[at]["finished"])
        first = max(0, next(unfinished, len(places)) - _BEFORE)
        lengths += places[first : first + _MOST_ENTRIES]
    return [dict(report.collectives[at]) for at in sorted(lengths)]


def _read_node(path: Path) -> Sequence[Report]:
    try:
        tree = json.loads(read_bounded(path, _FILE_BYTES))
        lists = [stored_entries(entries) for entries in tree["collectives"]]
        return [
            replace(
                Report.from_json({**one["report"], "stacks": tree["stacks"][one["stacks"]]}),
                collectives=lists[one["collectives"]],
            )
            for one in tree["reports"]
        ]
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return []  # torn
