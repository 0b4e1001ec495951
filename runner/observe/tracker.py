"""Trackers: where numbers go besides ``metrics.jsonl``."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from runner.observe.metrics import MetricsLine
from runner.system.files import make_folder, naming, replace_for_writing
from runner.system.output import Loss, Outlet

_MOST_LINES = 1000  # that may wait for a tracker
_CLOSE_SECONDS = 5.0


class Tracker(Protocol):
    """Takes each step's line; ``close`` makes everything visible."""

    def write(self, line: MetricsLine) -> None: ...
    def close(self) -> None: ...


class BackgroundTracker:
    """Writes to another tracker from a thread; one that fails or hangs is dropped.

    Args:
        name: of the tracker, for messages.
    """

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker = tracker
        self._has_failed = False
        self._outlet: Outlet[MetricsLine | None] = Outlet(name, self._deliver, most=_MOST_LINES)

    @property
    def loss(self) -> Loss | None:
        """See :attr:`runner.system.output.Outlet.loss`."""
        return self._outlet.loss

    def write(self, line: MetricsLine) -> None:
        self._outlet.put(line)

    def close(self) -> None:
        """What is not written within some seconds is lost."""
        self._outlet.put(None)
        self._outlet.drain(_CLOSE_SECONDS)

    def _deliver(self, line: MetricsLine | None) -> None:
        if self._has_failed:
            return  # a record after a torn one could not be read
        try:
            if line is None:
                self._tracker.close()
            else:
                self._tracker.write(line)
        except Exception:
            self._has_failed = True
            raise


class TensorBoardTracker:
    """Writes scalars under ``folder``: an event file per start, a record per step.

    After a restart, points from ``first_step`` on are replaced: TensorBoard drops what older
    files have of them. Older files are put in place anew, so that an earlier incarnation which
    still lives adds nothing to its own.

    Args:
        number: the incarnation, a part of the file's name.
        check: raises when this process may no longer write here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int,
        number: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        # Imported here: it is slow, and few ranks and runs need it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        make_folder(folder)
        for older in folder.glob("*tfevents*"):
            if older.suffix != ".tmp":
                replace_for_writing(older, length=older.stat().st_size, check=check)
        # TensorBoard reads files in the order of their names.
        now = f"{int(time.time()):010d}"
        path = folder / f"events.out.tfevents.{now}.{socket.gethostname()}.{number:06d}"
        replace_for_writing(path, length=0, check=check)
        self._path = path
        self._file = path.open("ab")
        self._records = RecordWriter(self._file)
        self._add(step=first_step, file_version="brain.Event:2")
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, line: MetricsLine) -> None:
        scalars = {
            "train/loss": line.loss,
            "train/grad_norm": line.grad_norm,
            "train/lr": line.lr,
            "train/tokens_per_second": line.tokens_per_second,
            "eval/loss": line.eval_loss,
            "guard/discarded": float(line.action != "apply"),
            **{_tag(name): value for name, value in line.columns.items()},
        }
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in scalars.items()
            if value is not None and math.isfinite(value)
        ]
        self._add(step=line.step, summary=self._summary(value=values))

    def _add(self, **scalars: Any) -> None:
        event = self._event(wall_time=time.time(), **scalars)
        with naming(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


def _tag(column: str) -> str:
    """Where a column of the line stands; those of the layers have a place of their own."""
    return column if column.startswith("layers/") else f"sources/{column}"
