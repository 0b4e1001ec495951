"""Finds the root cause of a crash from the ranks' reports. Pure.

A failed device comes first: the others' exceptions follow from it. Then: an
exception of a rank's own comes before a signal, a signal before an exit without a report, that
before a rank that is gone, that before an error that does not say whose fault it is, and that
before what the collectives show. Ranks that only lost contact with others are blamed only if there
is no other rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from runner.health.flight_recorder import first_divergence, waits_in
from runner.health.rank_report import Report
from runner.system.units import name_ranks

_MOST_NAMED = 8
# Exceptions of these kinds; the names are those of runner.policy.restart.
HARDWARE = "hardware"
MEMORY = "memory"  # out of a device's or the host's memory: smaller micro-batches may help
# Of torch's allocators, cuBLAS and cuDNN, NCCL ("Cuda failure 2 'out of memory'"), Python, C++ and
# NumPy.
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|[Oo]ut of memory|_STATUS_ALLOC_FAILED|MemoryError|bad_alloc"
    r"|(?:can't|[Cc]annot) allocate memory"
)
# Broken hardware, by the texts of CUDA, NCCL and NVIDIA's driver. Errors that a program can cause
# as well are not among them ("unspecified launch failure" of a wrong kernel, "an illegal memory
# access"): such a program fails at the same step again.
_HARDWARE = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|double[- ]bit ECC|ECC error"
    r"|fallen off the bus|GPU is lost|[Gg]pu is lost|GPU requires reset"
    r"|\bX[Ii][Dd]\b\D{0,12}(?:48|62|63|64|74|79|92|94|95|119|120|140|143)\b"
    r"|hardware stack error|[Rr]ow remapp(?:er|ing) fail"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is detected"
    r"|system not yet initialized|NVLink (?:fatal )?error|[Ff]abric (?:manager )?error"
    r"|[Mm]achine check|Hardware Error|[Uu]ncorrectable (?:memory|PCIe?) error"
)
_OWN_FAULTS = ("exception", "fatal", "signal", "exit")  # the surest sign first


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """The cause of a crash.

    ``signature`` stays the same when the same thing fails at the same place again, whatever
    the numbers in its message are; ``first`` is the report to show, when there is one.
    """

    kind: str
    ranks: tuple[int, ...]
    step: int
    reason: str
    signature: str
    first: Report | None = None


def is_hardware(text: str) -> bool:
    """Whether an error's text shows that a device or its machine has failed."""
    return _HARDWARE.search(text) is not None


def find_root_cause(reports: Sequence[Report], world_size: int) -> RootCause:
    """The most likely cause, from the reports of one incarnation. ``reports`` may be empty."""
    step = max((report.step for report in reports), default=0)
    broken = [r for r in reports if r.kind == "exception" and is_hardware(r.message)]
    if broken:
        return replace(_own_fault("exception", broken, reports), kind=HARDWARE)
    for kind in _OWN_FAULTS:
        guilty = [report for report in reports if report.kind == kind]
        if guilty:
            cause = _own_fault(kind, guilty, reports)
            lacks = kind == "exception" and cause.first and _NO_MEMORY.search(cause.first.message)
            return replace(cause, kind=MEMORY) if lacks else cause
    silent = tuple(sorted(set(range(world_size)) - {report.rank for report in reports}))
    if not reports:
        return RootCause(
            kind="silence",
            ranks=(),
            step=0,
            reason="every rank ended without a report: killed all at once, cut off, or the power "
            "went",
            signature="silence",
        )
    unclear = [report for report in reports if report.kind == "unclear"]
    if unclear and not silent:
        return _own_fault("unclear", unclear, reports)
    # A recorder that did not answer proves nothing, least of all that a rank was absent.
    collectives = {report.rank: report.collectives for report in reports if not report.untold}
    divergence = first_divergence(collectives)
    if divergence is not None and not silent:
        return RootCause(
            kind=divergence.kind,
            ranks=divergence.ranks,
            step=step,
            reason=f"{_KIND_PHRASES[divergence.kind]}: {divergence.message}"
            f"{_doing(reports, divergence.ranks)}{_untold(reports)}",
            signature=f"{divergence.kind} {_without_numbers(divergence.message)}",
        )
    if silent:
        return _silent(silent, reports, step)
    return _stuck(reports, step)


_KIND_PHRASES = {
    "operation": "ranks entered different collectives",
    "shape": "ranks entered one collective with different shapes",
    "absent": "a collective was not entered by all",
    "device": "a device makes no progress",
    "network": "a collective does not end",
}


def _own_fault(kind: str, guilty: list[Report], reports: Sequence[Report]) -> RootCause:
    first = min(guilty, key=lambda report: report.time)
    same = [r for r in guilty if _without_numbers(r.message) == _without_numbers(first.message)]
    ranks = tuple(sorted(report.rank for report in same))
    at = f" at {first.where}" if first.where else ""
    others = [report for report in reports if report.kind not in (*_OWN_FAULTS, "unclear")]
    waiting = "" if kind == "exception" else changed_shape(others) or _waiting_in(others)
    # A supervisor that reports a rank does not know the step; those that waited for it do.
    step = first.step or max(report.step for report in reports)
    return RootCause(
        kind=kind,
        ranks=ranks,
        step=step,
        reason=f"{name_ranks(ranks)}: {first.message} in {first.phase} of step {step}{at}{waiting}",
        signature=f"{kind} {_without_numbers(f'{first.message} {first.where}')}".rstrip(),
        first=first,
    )


def _silent(silent: tuple[int, ...], reports: Sequence[Report], step: int) -> RootCause:
    hung = any(report.kind in ("hang", "called") for report in reports)
    is_one = len(silent) == 1
    description = (
        f"{'does' if is_one else 'do'} not answer: stopped (SIGSTOP), frozen, or cut off"
        if hung
        else f"{'is' if is_one else 'are'} gone without a report: SIGKILL, out of memory, or "
        f"{'its' if is_one else 'their'} node is down"
    )
    return RootCause(
        kind="silence",
        ranks=silent,
        step=step,
        reason=f"{name_ranks(silent)} {description}{_waiting_in(reports)}",
        signature=f"silence {'hung' if hung else 'gone'}",
    )


def _stuck(reports: Sequence[Report], step: int) -> RootCause:
    """Where all ranks reported and all collectives match, a rank or the network is stuck."""
    waiting = [report for report in reports if _last_open(report) is not None]
    busy = [report for report in reports if _last_open(report) is None]
    if busy and waiting:
        ranks = tuple(report.rank for report in busy)
        places = "; ".join(f"rank {r.rank} in {r.phase} at {r.where}" for r in busy[:_MOST_NAMED])
        return RootCause(
            kind="hang",
            ranks=ranks,
            step=step,
            reason=f"{places}, for {busy[0].seconds:.0f} s{_waiting_in(waiting)}",
            signature=f"hang {_without_numbers(busy[0].where)}",
        )
    first = reports[0]
    return RootCause(
        kind="network",
        ranks=tuple(report.rank for report in reports),
        step=step,
        reason=f"all ranks are in {first.phase} of step {step} at {first.where} and none makes "
        f"progress: {first.message or 'the network between them may be down'}{_untold(reports)}",
        signature=f"network {_without_numbers(first.where)}",
    )


def _last_open(report: Report) -> Mapping[str, object] | None:
    return waits_in(report.collectives)


def _untold(reports: Sequence[Report]) -> str:
    """Name ranks whose recorder did not answer: their device may be the one that hangs."""
    silent = [report for report in reports if report.untold]
    if not silent:
        return ""
    return f"; {name_ranks([r.rank for r in silent])}: {silent[0].untold}"


def _waiting_in(reports: Sequence[Report]) -> str:
    for report in reports:
        entry = _last_open(report)
        if entry is not None:
            return (
                f"; rank {report.rank} waited for it in {entry['op']} #{entry['seq']} "
                f"at {entry['line'] or report.where}"
            )
    return ""


def changed_shape(reports: Sequence[Report]) -> str:
    """A rank whose last collective had another size than earlier ones at the same line.

    gloo aborts the rank that received the wrong size, and its own record is lost.
    """
    for report in reports:
        entries = report.collectives
        for last in reversed(entries[-3:]):
            key = (last["group"], last["op"], last["line"])
            before = [
                str(entry["sizes"])
                for entry in entries
                if (entry["group"], entry["op"], entry["line"]) == key
                and entry["seq"] < last["seq"]
            ]
            # A line with many sizes, such as a model's forward, proves nothing.
            if len(before) > 1 and len(set(before)) == 1 and before[0] != str(last["sizes"]):
                return (
                    f"; rank {report.rank} handed over {last['sizes']} in {last['op']} "
                    f"#{last['seq']} at {last['line']}, where it was {before[0]} before"
                )
    return ""


def _doing(reports: Sequence[Report], ranks: tuple[int, ...]) -> str:
    """Say what the odd ranks were doing, and whether they were moving."""
    located = [r for r in reports if r.rank in ranks and r.where]
    longest = max((r.seconds for r in reports), default=0.0)
    return "".join(
        f"; rank {r.rank} is in {r.phase} at {r.where}"
        + (", and still moves: it is slow" if 2 * r.seconds < longest and r.seconds else "")
        for r in located[:_MOST_NAMED]
    )


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "N", text)


# Decides whose fault an exception in a collective is: this rank's, another's, or unclear.
#
# When a rank dies, every other one gets an exception from the collective that it was in; and when
# a rank's own device fails, that rank gets one too. NCCL's errors are all of one class and contain
# "NCCL error", so the text decides. A mistake is costly either way: if an innocent rank takes the
# blame, it is named as the cause; if a guilty rank blames another, the cause is hidden. A text that
# shows neither is therefore a kind of its own (``unclear``), and counts as the cause only if no
# rank has a surer sign.


OWN, LOST_CONTACT, UNCLEAR = "exception", "lost_contact", "unclear"  # kinds of a report

# Texts of a rank's own failure, whatever else they say: a GPU that fails in the middle of a
# collective is reported with the collective's name and time-out.
_OWN = re.compile(
    r"CUDA error"
    r"|[Cc]uda failure"  # NCCL: "Cuda failure 2 'out of memory'"
    r"|ncclUnhandledCudaError|unhandled cuda error"
    r"|ncclInvalidUsage|ncclInvalidArgument|invalid usage|invalid argument"
    r"|Failed to CUDA"  # NCCL: "Failed to CUDA calloc 6291456 bytes"
    r"|Duplicate GPU detected"
    r"|enforce fail"  # gloo's checks of its arguments and of this host's interfaces
    r"|unsupported gloo device"
    r"|shared memory segment|shm_open"
    r"|No space left|Too many open files|[Cc]annot allocate memory|out of memory"
    r"|[Aa]ddress already in use|EADDRINUSE|no socket interface found"
    r"|queue is empty"
)
# Texts about the other end, or about a time in which it did not answer. Only in errors of
# torch.distributed, gloo and NCCL: a data set read over a network has some of them as well.
_PEER = re.compile(
    r"ncclRemoteError|remote process exited"
    r"|[Cc]losed by (?:remote )?peer"
    r"|Connection (?:was likely closed|reset|refused|timed out|aborted)|Broken pipe"
    r"|No route to host|(?:Host|Network) is unreachable|Software caused connection abort"
    r"|[Tt]imed out|timeout after|[Ss]ocket [Tt]imeout|operation timeout|Connect timeout"
    r"|Application timeout|NCCL timeout"
    r"|Socket (?:recv|send) failed"  # NCCL's proxy: the thread at the other end has gone
    r"|connectFullMesh failed|missing ranks|failed to pass monitoredBarrier"
    r"|[Cc]losed the connection|Socket (?:unexpectedly )?closed"
)
_DIST_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_FROM_GLOO = re.compile(
    r"/gloo/|^Application timeout caused pair closure|Gloo connectFullMesh|monitoredBarrier"
)
# Added to every ncclSystemError: it names what may fail, not what did.
_EXPLAINED = re.compile(r"ncclSystemError: System call.*")
# torch appends the C++ frames, in which the names of gloo and NCCL functions stand.
_CPP_STACK = re.compile(r"\nException raised from .*|\nframe #\d+: .*", re.DOTALL)
_LAST_ERROR = re.compile(r"Last [Ee]rror:\s*(\S.*)")


def whose_fault(error: BaseException) -> str:
    """``exception`` (this rank's own), ``lost_contact`` (another's) or ``unclear``."""
    import torch  # imported here, because by_text is used without torch

    if not isinstance(error, RuntimeError):
        return OWN
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return OWN
    return _fault_in(str(error), isinstance(error, torch.distributed.DistError))


def by_text(kind: str, text: str) -> str:
    """:func:`whose_fault` of a printed exception, from the name of its class and its text."""
    is_runtime = kind.rpartition(".")[2] in ("RuntimeError", *_DIST_ERRORS)
    return _fault_in(text, "Dist" in kind) if is_runtime else OWN


def _fault_in(text: str, is_of_collectives: bool) -> str:
    """Whose fault a text tells, if torch.distributed, gloo (without a class of its own) or NCCL
    wrote it."""
    text = _EXPLAINED.sub("", _CPP_STACK.sub("", text))
    is_of_collectives = is_of_collectives or "NCCL" in text or bool(_FROM_GLOO.search(text))
    if _OWN.search(text) or not is_of_collectives:
        return OWN
    return LOST_CONTACT if _PEER.search(text) else UNCLEAR


def message_of(error: BaseException) -> str:
    """The first line of an exception, and NCCL's reason from a later line."""
    text = _CPP_STACK.sub("", str(error)).strip()
    if not text:
        return type(error).__name__
    last = _LAST_ERROR.search(text)
    first = text.splitlines()[0]
    return first if last is None or last[1] in first else f"{first}: {last[1]}"
