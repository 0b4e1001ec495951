"""Decides whose fault an exception in a collective is: this rank's, another's, or unclear.

When a rank dies, every other one gets an exception from the collective that it was in; and when
a rank's own device fails, that rank gets one too. NCCL's errors are all of one class and contain
"NCCL error", so the text decides. A mistake is costly either way: if an innocent rank takes the
blame, it is named as the cause; if a guilty rank blames another, the cause is hidden. A text that
shows neither is therefore a kind of its own (``unclear``), and counts as the cause only if no rank
has a surer sign.
"""

from __future__ import annotations

import re

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
    text = _EXPLAINED.sub("", _CPP_STACK.sub("", str(error)))
    if _OWN.search(text) or not _is_of_collectives(error, text):
        return OWN
    return LOST_CONTACT if _PEER.search(text) else UNCLEAR


def by_text(kind: str, text: str) -> str:
    """:func:`whose_fault` of a printed exception, from the name of its class and its text."""
    text = _EXPLAINED.sub("", _CPP_STACK.sub("", text))
    is_runtime = kind.rpartition(".")[2] in ("RuntimeError", *_DIST_ERRORS)
    of_collectives = "Dist" in kind or "NCCL" in text or bool(_FROM_GLOO.search(text))
    if not is_runtime or _OWN.search(text) or not of_collectives:
        return OWN
    return LOST_CONTACT if _PEER.search(text) else UNCLEAR


def _is_of_collectives(error: RuntimeError, text: str) -> bool:
    """Whether torch.distributed, gloo or NCCL raised it. gloo has no class of its own."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "NCCL" in text or bool(_FROM_GLOO.search(text))


def message_of(error: BaseException) -> str:
    """The first line of an exception, and NCCL's reason from a later line."""
    text = _CPP_STACK.sub("", str(error)).strip()
    if not text:
        return type(error).__name__
    last = _LAST_ERROR.search(text)
    first = text.splitlines()[0]
    return first if last is None or last[1] in first else f"{first}: {last[1]}"
