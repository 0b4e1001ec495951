"""What Linux offers and Python does not pass on."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # not after a fork: loading takes locks that another thread may hold


def die_with_parent() -> None:
    """The kernel is to send this process SIGKILL when its parent ends.

    More exactly, when the parent's thread that started it ends. It survives an exec, but
    children do not inherit it. Elsewhere than on Linux nothing happens.
    """
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
