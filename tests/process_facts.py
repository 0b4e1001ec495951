"""Writes what a process can learn about itself: a forked one must see what a new one does.

``python -m tests.process_facts FILE ARGUMENT...`` writes JSON into FILE, and reads a line.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_STATUS = (
    *("Umask", "Groups", "Threads", "SigBlk", "SigIgn", "SigCgt", "CapEff", "NoNewPrivs"),
    *("Seccomp", "Cpus_allowed_list", "Mems_allowed_list", "TracerPid"),
)
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def same() -> dict[str, Any]:
    """What two processes of one command have in common."""
    status = dict(line.split(":\t", 1) for line in _proc("status").splitlines() if ":\t" in line)
    stat = _proc("stat").rpartition(")")[2].split()
    stream = [
        [one.encoding, one.errors, one.line_buffering, one.write_through]
        for one in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    ]
    return {
        "status": {name: status.get(name, "").strip() for name in _STATUS},
        "nice": stat[16],
        "terminal": stat[4],
        "leads its session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "files": sorted(int(entry) for entry in os.listdir("/proc/self/fd"))[:-1],
        "blocking": [os.get_blocking(number) for number in (0, 1, 2)],
        "command line": _proc("cmdline").rstrip("\0").split("\0"),
        "environment shown": sorted(filter(None, _proc("environ").split("\0"))),
        "environment": dict(os.environ),
        "executable": os.readlink("/proc/self/exe"),
        "name": _proc("comm"),
        "folder": os.getcwd(),
        "cgroup": _proc("cgroup"),
        "oom": _proc("oom_score_adj"),
        "namespaces": {
            n: os.readlink(f"/proc/self/ns/{n}") for n in sorted(os.listdir("/proc/self/ns"))
        },
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "signals": {
            name: str(signal.getsignal(getattr(signal, name)))
            for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGPIPE", "SIGCHLD")
        },
        "arguments": sys.argv,
        "original arguments": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "main": [sys.modules["__main__"].__file__, sys.modules["__main__"].__spec__.name],
        "streams": stream,
        "faulthandler": faulthandler.is_enabled(),
        "collects": gc.isenabled(),
        "threads": threading.active_count(),
        "hash": hash("a word"),
        "input": sys.stdin.readline(),
    }


def own() -> dict[str, Any]:
    """What every process must have for itself."""
    import numpy as np

    return {
        "pid": os.getpid(),
        "random": random.random(),
        "numpy": float(np.random.random()),
        "key": hashlib.sha256(bytes(multiprocessing.current_process().authkey)).hexdigest(),
    }


def _proc(name: str) -> str:
    return Path(f"/proc/self/{name}").read_bytes().decode(errors="replace")


if __name__ == "__main__":
    facts = {"same": same(), "own": own(), "parent": os.getppid()}
    Path(sys.argv[1]).write_text(json.dumps(facts))
    print("said", file=sys.stdout)
    sys.exit(7)
