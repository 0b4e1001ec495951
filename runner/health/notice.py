"""Notices that this machine will be taken back: from a cloud, a file, or a URL of the user's.

One rank of each node asks, in a thread; all ranks learn of it by the step's sum. Nothing here may
disturb a step: a service that is slow, broken or lies costs this thread's time and one log line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.system.error import ConfigError

if TYPE_CHECKING:  # launchers ask as well, and import no torch for it
    from runner.health.preemption import StopRequest

_log = logging.getLogger(__name__)

CLOUDS = ("aws", "gcp", "azure")
_VENDORS = {"Amazon EC2": "aws", "Google": "gcp", "Microsoft Corporation": "azure"}
_VENDOR_FILE = Path("/sys/class/dmi/id/sys_vendor")
_LINK_LOCAL = "http://169.254.169.254"

_EVERY_SECONDS = 2.0
_AFTER_ERROR_SECONDS = 10.0
_AGAIN_SECONDS = 0.5  # a notice counts when it is read twice
_TIMEOUT_SECONDS = 2.0
_MOST_BYTES = 1 << 16
_SOON_SECONDS = 150.0  # a notice of more than this stops nothing yet
_ADVICE_SECONDS = 600.0  # between checkpoints for advice in other words
SPARE_SECONDS = 3.0  # of a notice, for the exit

Get = Callable[..., tuple[int, str]]  # as :func:`get`


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What was read.

    Args:
        seconds: until the machine is gone; None: not said.
        is_advice: the machine may be taken back soon: a checkpoint is due, the run goes on.
    """

    reason: str
    seconds: float | None = None
    is_advice: bool = False

    @property
    def is_far(self) -> bool:
        """Whether it stops nothing yet."""
        return self.is_advice or (self.seconds is not None and self.seconds > _SOON_SECONDS)


Read = Callable[[], Notice | None]


class Notices:
    """Polls in a thread, and passes what it reads to this rank's request to stop.

    Args:
        read: returns the notice that stands; None for none. Raises ValueError or OSError where the
            answer cannot be understood.
    """

    def __init__(self, what: str, read: Read, stop: StopRequest) -> None:
        self._what = what
        self._read = read
        self._stop = stop
        self._over = threading.Event()
        self._has_said = False
        self._advised, self._advised_at = "", -math.inf
        self._seen: bool | None = None  # whether the notice read before is advice; None: none was

    def begin(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._run, name="notices", daemon=True).start()

    def end(self) -> None:
        """Ask no more."""
        self._over.set()

    def _run(self) -> None:
        wait = 0.0
        while not self._over.wait(wait):
            try:
                wait = self.look()
            except Exception as error:  # whatever a service answers
                wait = _AFTER_ERROR_SECONDS
                if not self._has_said:
                    self._has_said = True
                    _log.warning(
                        "preempt.notice: %s: %s: %s; asked again every %g s",
                        self._what, type(error).__name__, str(error)[:200], wait,
                    )  # fmt: skip

    def look(self) -> float:
        """Ask once; returns the seconds until the next time."""
        notice = self._read()
        # Its reason may be another each time, such as one that counts down.
        seen, self._seen = self._seen, None if notice is None else notice.is_advice
        if notice is None:
            return _EVERY_SECONDS
        if seen != self._seen:
            return _AGAIN_SECONDS
        left = notice.seconds
        if notice.is_far:
            now = time.monotonic()
            if self._advised != notice.reason and now > self._advised_at + _ADVICE_SECONDS:
                self._advised, self._advised_at = notice.reason, now
                self._stop.advise(notice.reason)
            return _EVERY_SECONDS
        self._stop.ask(notice.reason, within=None if left is None else left - SPARE_SECONDS)
        self._over.set()
        return 0.0


def notices(setting: str, stop: StopRequest) -> Notices | None:
    """The polling that ``preempt.notice`` selects; None for none.

    Raises:
        ConfigError: the setting is none of those allowed.
    """
    read = _reader(setting)
    return None if read is None else Notices(setting, read, stop)


def taken_back(setting: str) -> str:
    """Why this machine will soon be gone, asked now; "" where no notice that is read says so."""
    with contextlib.suppress(Exception):  # whatever a service answers
        if (read := _reader(setting)) and (notice := read()) and not notice.is_far:
            return notice.reason
    return ""


def _reader(setting: str) -> Read | None:
    kind, _, place = setting.partition(":")
    if setting == "auto":
        kind = _vendor()
    if kind == "none" and not place:
        return None
    if kind in ("http", "https") and place:
        return lambda: own(*get(setting, {}))
    if kind == "file" and place:
        return lambda: in_file(Path(place))
    if kind in CLOUDS:
        services: dict[str, type[Aws | Gcp | Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
        return services[kind](get, base=place).read
    raise ConfigError(
        f"preempt.notice={setting}: must be auto, none, {', '.join(CLOUDS)} (or aws:URL, for "
        "another address of its service), file:PATH, or a URL that begins with http"
    )


def _vendor() -> str:
    try:
        return _VENDORS.get(_VENDOR_FILE.read_text().strip(), "none")
    except (OSError, UnicodeDecodeError):
        return "none"


class Aws:
    """EC2: spot interruptions and rebalance recommendations, by IMDSv2.

    docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    def __init__(self, get: Get, *, base: str = "") -> None:
        self._base = base or _LINK_LOCAL
        self._get = get
        self._token = ""

    def read(self) -> Notice | None:
        """The notice that stands."""
        if action := self._json("spot/instance-action"):
            seconds = _until(datetime.fromisoformat(action["time"].replace("Z", "+00:00")))
            return Notice(reason=f"AWS: spot instance, {action['action']}", seconds=seconds)
        if advice := self._json("events/recommendations/rebalance"):
            return Notice(reason=f"AWS: rebalance ({advice['noticeTime']})", is_advice=True)
        return None

    def _json(self, path: str) -> dict[str, Any] | None:
        for _ in range(2):
            if not self._token:
                status, self._token = self._get(
                    f"{self._base}/latest/api/token",
                    {"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
                    method="PUT",
                )
                _require(status, HTTPStatus.OK)
            status, body = self._get(
                f"{self._base}/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token}
            )
            if status != HTTPStatus.UNAUTHORIZED:
                break
            self._token = ""  # it has expired
        if status == HTTPStatus.NOT_FOUND:
            return None
        _require(status, HTTPStatus.OK)
        return _object(body)


class Gcp:
    """Compute Engine: preemption, 30 s ahead; host maintenance that ends a machine with GPUs.

    cloud.google.com/compute/docs/instances/spot and .../host-maintenance-overview
    """

    def __init__(self, get: Get, *, base: str = "") -> None:
        self._base = base or "http://metadata.google.internal"
        self._get = get

    def read(self) -> Notice | None:
        """The notice that stands."""
        if self._value("preempted", r"TRUE|FALSE") == "TRUE":
            return Notice(reason="Google: preempted", seconds=30.0)
        maintenance = self._value("maintenance-event", r"NONE|[A-Z_]+")
        if maintenance.startswith("TERMINATE"):
            return Notice(reason=f"Google: {maintenance}", is_advice=True)
        return None

    def _value(self, name: str, pattern: str) -> str:
        status, body = self._get(
            f"{self._base}/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"}
        )
        _require(status, HTTPStatus.OK)
        if not re.fullmatch(pattern, body.strip()):
            raise ValueError(f"{name} is {body[:60]!r}")
        return body.strip()


class Azure:
    """Scheduled events of this machine; those of others of its set are left out.

    learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    _ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")

    def __init__(self, get: Get, *, base: str = "") -> None:
        self._base = base or _LINK_LOCAL
        self._get = get
        self._name = ""

    def read(self) -> Notice | None:
        """The notice that stands, the earliest of several."""
        if not self._name:
            self._name = self._ask("instance/compute/name", "2021-02-01&format=text").strip()
        found = []
        for event in _object(self._ask("scheduledevents", "2020-07-01"))["Events"]:
            if event["EventType"] in self._ENDING and self._name in event["Resources"]:
                at = event["NotBefore"]
                seconds = _until(parsedate_to_datetime(at)) if at else 0.0
                found.append(Notice(reason=f"Azure: {event['EventType']}", seconds=seconds))
        return min(found, key=lambda one: one.seconds or 0.0, default=None)

    def _ask(self, what: str, version: str) -> str:
        status, body = self._get(
            f"{self._base}/metadata/{what}?api-version={version}", {"Metadata": "true"}
        )
        _require(status, HTTPStatus.OK)
        return body


def own(status: int, body: str) -> Notice | None:
    """The notice of a URL of one's own: 404 and 204 are none, 200 has JSON as a file has."""
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.NO_CONTENT):
        return None
    _require(status, HTTPStatus.OK)
    return _told(_object(body))


def in_file(path: Path) -> Notice | None:
    """The notice in a file: there is one as soon as it exists. JSON may say more, or nothing."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    return _told(_object(text) if text.strip() else {})


def _told(given: Mapping[str, Any]) -> Notice:
    seconds = given.get("seconds")
    if seconds is not None and not (isinstance(seconds, int | float) and math.isfinite(seconds)):
        raise ValueError(f"seconds is {seconds!r}")
    return Notice(
        reason=str(given.get("reason", "a notice"))[:200],
        seconds=None if seconds is None else float(seconds),
        is_advice=given.get("advice") is True,
    )


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"the answer is {text[:60]!r}, no JSON object")
    return value


def _until(moment: datetime) -> float:
    return moment.timestamp() - time.time()


def _require(status: int, wanted: HTTPStatus) -> None:
    if status != wanted:
        raise ValueError(f"the service answers with status {status}")


def get(url: str, headers: Mapping[str, str], *, method: str = "GET") -> tuple[int, str]:
    """Status and body. No proxy and no redirection: a machine's own service needs neither.

    Raises:
        OSError: no answer in time.
        UnicodeDecodeError: it is no text.
    """
    from urllib import error, request  # not at the start of every process

    class Stay(request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    opener = request.build_opener(request.ProxyHandler({}), Stay)
    asked = request.Request(url, headers=dict(headers), method=method)
    limit, body = time.monotonic() + 2 * _TIMEOUT_SECONDS, b""
    try:
        with opener.open(asked, timeout=_TIMEOUT_SECONDS) as answer:
            while part := answer.read1(_MOST_BYTES):
                body += part
                if time.monotonic() > limit or len(body) > _MOST_BYTES:
                    raise TimeoutError("the answer does not end")
            return answer.status, body.decode()
    except error.HTTPError as answer:
        with answer:
            return answer.code, ""
