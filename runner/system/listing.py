"""The files below a folder, and how to tell that one has changed.

``prove-resume`` loads this file in processes of strangers, so it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

Mark = tuple[int, int, int]  # bytes, time of change in ns, inode


def marks(folder: str | os.PathLike[str]) -> Iterator[tuple[str, Mark]]:
    """(path, mark) of each file below a folder; links are not followed, what vanishes is left out.

    None for what is no folder.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                about = os.stat(path, follow_symlinks=False)
                yield path, (about.st_size, about.st_mtime_ns, about.st_ino)
