"""The runner's fork server without torch, for tests of how one is begun, replaced and ended.

What it forks has to be the same process as one that is started anew; it imports that later.
"""

from __future__ import annotations

import sys

from runner.launch import fork_server

fork_server.IMPORTS = ("runner.__main__",)
fork_server._RUN = ("runner.__main__",)

if __name__ == "__main__":
    fork_server.main(sys.argv[1:])
