"""Starts the command of an attempt by a fork server, which lasts from attempt to attempt."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.config.mappings import is_hf
from runner.config.schema import DataKind, RunConfig
from runner.config.validate import is_zero
from runner.launch.fork_server import ForkedPopen, ForkError, Forks, suits
from runner.system.environment import variables

# Differ from attempt to attempt and from rank to rank, and are read after a rank's imports.
_OWN = ("HOLDFAST_", "TORCHELASTIC_", "MASTER_")
_OWN_NAMES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
_POLL_SECONDS = 0.05
_MOST_NAMED = 4  # of the variables that have changed


def rank_modules(config: RunConfig) -> list[str]:
    """What the ranks of a run import that others do not."""
    model = config.model
    names = {
        "deepspeed": is_zero(config.parallel.kind),
        # Of which the classes of models come, with all that it imports late.
        "transformers.modeling_utils": is_hf(model),
        "datasets": config.data.kind is DataKind.hf,
        "peft": model.lora is not None,
        "bitsandbytes": model.quantize is not None,
        "fsspec": config.checkpoint.remote is not None,
        "rich.live": True,  # of the console, which imports it late
        "rich.table": True,
    }
    return [*(name for name, is_needed in names.items() if is_needed), *config.launch.preload]


class WarmStart:
    """Makes a fork server when it is first needed, and a new one when that has become useless.

    As a context it ends the server when it is left.

    Args:
        modules: what the ranks import besides the runner; None: never fork them, torchrun alone.
        limit_seconds: how long the imports may take; None: as long as they want.
        say: prints one line for a person.
    """

    def __init__(
        self, modules: Sequence[str] | None, limit_seconds: float | None, say: Callable[[str], None]
    ) -> None:
        self._modules = modules
        self._limit_seconds = limit_seconds
        self._say = say
        self._forks: Forks | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._is_unfit = False

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def popen(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        is_asked_to_stop: Callable[[], bool],
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """``subprocess.Popen``, forked where that gives the same process."""
        if not suits(args, is_torchrun=self._modules is None) or self._is_unfit:
            return subprocess.Popen(args, env=env, **options)
        if self._forks is not None:
            try:
                self._refuse_changed(env)
                return ForkedPopen(self._forks, args, env=env, **options)
            except ForkError as error:
                self._say(f"fork server: {error}; a new one imports everything anew")
                self.close()
        try:
            forks = self._begin(env, is_asked_to_stop)
            return ForkedPopen(forks, args, env=env, **options)
        except ForkError as error:
            self.close()
            if self._modules is None:
                self._say(f"fork server: {error}; torchrun imports torch itself")
                self._is_unfit = True
                return subprocess.Popen(args, env=env, **options)
            self._say(f"fork server: {error}; the ranks import everything themselves")
            self._modules = None
        return self.popen(args, env=env, is_asked_to_stop=is_asked_to_stop, **options)

    def close(self) -> None:
        """End the server; what it has forked is not its own."""
        if self._forks is not None:
            self._forks.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forks = self._process = None

    def _begin(self, env: Mapping[str, str], is_asked_to_stop: Callable[[], bool]) -> Forks:
        """Make a server and wait until it serves.

        Raises:
            ForkError: it does not.
        """
        self._environment = _lasting(env)
        # Not with the attempt's mark: it outlives the attempt.
        own = variables().items() - _lasting(variables()).items()
        self._forks, self._process = Forks.start(self._modules, {**self._environment, **dict(own)})
        limit = time.monotonic() + (self._limit_seconds or math.inf)
        while not self._forks.is_ready(_POLL_SECONDS):
            if is_asked_to_stop():
                raise ForkError("asked to stop while it imported")
            if time.monotonic() > limit:
                raise ForkError(f"its imports take longer than {self._limit_seconds:g} s")
        return self._forks

    def _refuse_changed(self, env: Mapping[str, str]) -> None:
        """
        Raises:
            ForkError: the environment is another than that in which the server imported.
        """
        changed = {name for name, _ in self._environment.items() ^ _lasting(env).items()}
        if changed:
            named = ", ".join(sorted(changed)[:_MOST_NAMED])
            raise ForkError(f"the environment has changed ({named})")


def _lasting(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that all attempts and ranks share."""
    return {
        name: value
        for name, value in env.items()
        if not (name.startswith(_OWN) or name in _OWN_NAMES)
    }
