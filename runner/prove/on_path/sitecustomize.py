"""Begins the recording once a process has imported torch; Python runs this file at every start.

A ``sitecustomize`` that this one hides is run as well.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_ALIAS = "_holdfast"  # the package's name in processes of strangers, who may have a "runner"


# Calls that change or list files, with the place of the path among their arguments.
_CALLS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
_LOOKS = {"os.listdir", "os.scandir"}


def _keep_away() -> None:
    """Refuse calls that touch the user's own output, or change their working directory."""
    folder = os.environ["HOLDFAST_PROVE_DIR"]
    scratch = os.environ["HOLDFAST_PROVE_ROOT"] + os.sep
    untouched = [entry for entry in os.environ["HOLDFAST_PROVE_KEPT"].split(os.pathsep) if entry]
    unchanged = os.environ["HOLDFAST_PROVE_HOME"]

    def is_below(path: str, kept: str) -> bool:
        return path == kept or path.startswith(kept.rstrip(os.sep) + os.sep)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        elif event in _CALLS or event in _LOOKS:
            changes = event in _CALLS
        else:
            return
        for name in args[: 2 if event == "os.rename" else 1]:
            if not isinstance(name, (str, bytes, os.PathLike)):
                continue
            path = os.path.realpath(os.fsdecode(name))
            if path.startswith(scratch):
                continue
            if any(is_below(path, kept) for kept in untouched) or (
                changes and is_below(path, unchanged)
            ):
                with open(os.path.join(folder, f"kept-{os.getpid()}.txt"), "w") as file:
                    file.write(path)
                raise PermissionError(f"holdfast prove-resume: {path} is the user's own")

    sys.addaudithook(watch)


def _run_the_hidden_one() -> None:
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _begin() -> None:
    folder = os.environ["HOLDFAST_PROVE_DIR"]
    try:
        package = types.ModuleType(_ALIAS)
        package.__path__ = [os.path.dirname(os.path.dirname(_HERE))]
        sys.modules[_ALIAS] = package
        importlib.import_module(_ALIAS + ".prove.inside.hooks").install(folder)
    except Exception:
        with open(os.path.join(folder, f"error-{os.getpid()}.txt"), "a") as file:
            file.write(traceback.format_exc())


class _AfterTorch:
    """Finds torch as the other finders do, and begins when it has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec: Any = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_begin(module: Any) -> None:
                execute(module)
                del spec.loader.exec_module  # its class's own again
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _begin()

            spec.loader.exec_module = execute_and_begin
        return spec


if os.environ.get("HOLDFAST_PROVE_DIR"):
    _keep_away()
    sys.meta_path.insert(0, _AfterTorch())
_run_the_hidden_one()
