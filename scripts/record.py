"""Keeps what a command prints as a record that a page can refer to.

    python -m scripts.record FILE.json -- python -m runner demo

The file has the command, date, commit, versions, machine, seconds, exit code and the lines of its
standard output. Paths under the temporary directory and outside of this checkout are not hidden:
give none that should not be read by others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.process import ROOT, environment
from scripts.bench.provenance import head


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the command's own exit code; a command that fails is recorded too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args(arguments)
    record = head(options.command)
    # "python" in the record, so that it can be given again elsewhere; this interpreter here.
    command = [sys.executable if word == "python" else word for word in options.command]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    record |= {
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": done.returncode,
        "output": done.stdout.splitlines(),
    }
    options.file.write_text(json.dumps(record, indent=1) + "\n")
    print(done.stdout, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
