"""Starts of a script from a process that has torch and the frameworks imported.

``python -m tests.prove_resume.zygote SOCKET`` imports and serves; ``python zygote.py SOCKET
--nproc-per-node=N SCRIPT ARGUMENTS...`` is the command of a start (0: one process, no launcher): it
hands its folder, environment and output over, waits, and takes the forked ranks with it when it is
killed. What an interpreter does at its start (``sitecustomize``) is done in each fork, before the
script begins.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_IMPORTS = (
    *("numpy.ma", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.data"),
    "torch.distributed.checkpoint",
)
_FRAMEWORKS = ("transformers", "transformers.trainer", "accelerate", "lightning")
_BYTES = 1 << 20


def start(address: str, ranks: int, words: list[str]) -> int:
    """Hand a start over and wait for its end; returns its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = {"words": words, "ranks": ranks, "environment": dict(os.environ)}
        request["folder"] = os.getcwd()
        socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
        answer = connection.recv(64)
    return int(answer or b"1")


def serve(address: str, *, frameworks: bool) -> None:
    """Fork a process that looks after each start."""
    for name in (*_IMPORTS, *(_FRAMEWORKS if frameworks else ())):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address + ".tmp")
    listening.listen()
    os.rename(address + ".tmp", address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getppid()
    while os.getppid() == parent:
        if not select.select([listening], [], [], 1.0)[0]:
            continue
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _look_after(connection)
            os._exit(0)
        connection.close()


def _look_after(connection: socket.socket) -> None:
    """Fork the ranks, tell how they ended; kill them when the start is killed."""
    data, files, _, _ = socket.recv_fds(connection, _BYTES, 2)
    request = json.loads(data)
    port = _free_port()
    children = []
    for rank in range(request["ranks"] or 1):
        child = os.fork()
        if child == 0:
            connection.close()
            _become(request, rank, port, files)
        children.append(child)
    codes: list[int] = []
    while children:
        if select.select([connection], [], [], 0.02)[0]:  # closed: it was killed
            for child in children:
                os.kill(child, signal.SIGKILL)
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                children.remove(child)
                codes.append(os.waitstatus_to_exitcode(status))
        if any(codes):
            for child in children:
                os.kill(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        connection.send(str(next((code for code in codes if code), 0)).encode())


def _become(request: dict[str, Any], rank: int, port: int, files: list[int]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment: dict[str, str] = request["environment"]
    if request["ranks"]:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"]}
        places |= {"LOCAL_WORLD_SIZE": request["ranks"], "GROUP_RANK": 0, "MASTER_PORT": port}
        environment |= {name: str(value) for name, value in places.items()}
        environment["MASTER_ADDR"] = "127.0.0.1"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, descriptor in enumerate(files, start=1):
        os.dup2(descriptor, number)
    code = 1
    try:
        _record(environment)
        script = request["words"][0]
        sys.argv = request["words"]
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _record(environment: dict[str, str]) -> None:
    """What ``sitecustomize`` does in a process that begins, and after it has imported torch."""
    if not environment.get("HOLDFAST_PROVE_DIR"):
        return
    file = Path(environment["PYTHONPATH"].split(os.pathsep)[0]) / "sitecustomize.py"
    variables = runpy.run_path(str(file), run_name="prove_resume_sitecustomize")
    sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "_AfterTorch"]
    variables["_begin"]()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if len(sys.argv) == 2 or sys.argv[2] == "frameworks":
        serve(sys.argv[1], frameworks=len(sys.argv) > 2)
    else:
        sys.exit(start(sys.argv[1], int(sys.argv[2].partition("=")[2]), sys.argv[3:]))
