"""Records, inside the processes of a stranger's script, what each optimizer step reads.

Loaded by ``on_path/sitecustomize.py`` under another name than ``runner``, which may be a name of
the stranger's: so its imports are relative. Never changes random state, numerics, autograd or the
order of collectives, and no error in it reaches the script.
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
