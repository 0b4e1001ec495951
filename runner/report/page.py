"""The page: one file that asks nobody for anything.

Its Content-Security-Policy allows the two scripts and the style that it holds, by their digests,
and nothing else. Without the script it shows still drawings, tables and all texts.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from runner.report import checkpoint, inside, section, trouble
from runner.report.compare import comparison, comparison_data
from runner.report.curve import data_of, script_json
from runner.report.markup import Html, join, tag, void
from runner.report.run import RunReader
from runner.report.state import standing
from runner.system.error import ConfigError
from runner.system.version import __version__

# uPlot 1.6.32 as it came: https://github.com/leeoniya/uPlot, MIT.
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
_ASSETS = Path(__file__).parent / "assets"
# Rows of all runs together: about 60 bytes each.
_COLUMNS = 1024
_LEAST_COLUMNS = 128
MOST_RUNS = 16
_STILL_STEPS = 500
_AGES_SECONDS = 10
_ORDER = (
    "head", "time", "curves", "warnings", "incidents", "layers", "position", "source", "stream",
    "ranks", "ring", "settings",
)  # fmt: skip


@cache
def asset(name: str) -> str:
    """A file of the page.

    Raises:
        ConfigError: a vendored one is not as it came.
    """
    data = (_ASSETS / name).read_bytes()
    wanted = VENDORED.get(name)
    if wanted is not None and hashlib.sha256(data).hexdigest() != wanted:
        raise ConfigError(f"{_ASSETS / name}: is not the file that was vendored; install anew")
    return data.decode()


def columns_for(num_runs: int) -> int:
    """How finely each of several runs is drawn."""
    return max(_LEAST_COLUMNS, _COLUMNS // max(1, num_runs))


def read_runs(
    outs: Sequence[Path],
    *,
    moved: Callable[[Path, int, int], None] = lambda out, done, total: None,
    clock: Callable[[], float] = time.time,
) -> list[RunReader]:
    """Runs, read to their end.

    Args:
        moved: told now and then how many bytes of a run's metrics are read, and of how many.

    Raises:
        ConfigError: there is no run in one of them.
        OSError: a file cannot be read.
    """
    if len(outs) > MOST_RUNS:
        raise ConfigError(f"{len(outs)} runs: at most {MOST_RUNS} are shown side by side")
    made = []
    for out in outs:
        run = RunReader(out, columns=columns_for(len(outs)), clock=clock)
        for count, _ in enumerate(run.iter_update()):
            if count % 4096 == 0:
                moved(out, *run.read_bytes)
        made.append(run)
    return made


def page(runs: Sequence[RunReader], *, is_live: bool = False) -> str:
    """The whole document."""
    title = ", ".join(name_of(run) for run in runs)
    style = asset("uPlot.min.css") + asset("page.css")
    licence = asset("uPlot.LICENSE").strip()
    library = f"/* uPlot 1.6.32\n{licence}\n*/\n{asset('uPlot.iife.min.js')}"
    script = asset("page.js")
    data = script_json(_data(runs, is_live=is_live))
    told = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(float(runs[0].clock())))
    footer = (
        f"Made {told} by holdfast {__version__} from the files of the run. Curves: uPlot (MIT)."
    )
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void(
            "meta",
            http_equiv="Content-Security-Policy",
            content=policy(style, [library, script], is_live=is_live),
        ),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        void("meta", name="referrer", content="no-referrer"),
        tag("title", f"{title} - holdfast"),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag("header", tag("p", "holdfast", cls="brand"), tag("p", cls="live", hidden=True)),
        tag("main", main(runs)),
        tag("footer", footer),
        tag("script", Html(data), type="application/json", id="data"),
        tag("script", Html(library)),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def main(runs: Sequence[RunReader]) -> Html:
    """All that the data changes."""
    parts = [tag("article", run_sections(run, number)) for number, run in enumerate(runs)]
    if len(runs) > 1:
        parts.insert(0, comparison(runs))
    return join(parts)


def run_sections(run: RunReader, number: int) -> Html:
    """One run, from its state to its settings."""
    return join(
        tag("div", markup(), cls="part", data_part=name)
        for name, _, markup in parts_of(run, number)
    )


def parts_of(run: RunReader, number: int) -> list[tuple[str, str, Callable[[], Html]]]:
    """The sections in order: name, what tells one state of it from another, and what makes it.

    One without data is empty.
    """
    now = standing(run)
    ready: list[tuple[str, Html | None]] = [
        ("head", join([tag("h2", name_of(run)), section.head(run, now)])),
        ("time", section.where_time_went(run, now)),
        ("warnings", trouble.warnings(run)),
        ("incidents", trouble.incidents(run)),
        ("stream", section.stream(run)),
        ("settings", section.settings(run)),
    ]
    made: dict[str, tuple[str, str, Callable[[], Html]]] = {
        name: (name, part or Html(""), _always(part or Html(""))) for name, part in ready
    }
    # Drawings are large: they need not follow every step.
    key = f"{run.generation} {len(run.fold.places) // _STILL_STEPS}"
    looks = f"{run.generation} {run.sides.version}"
    late: list[tuple[str, str, Callable[[], Html | None]]] = [
        ("curves", f"{key} {section.legend_of(run)}", lambda: section.curves(run, number)),
        ("layers", looks, lambda: inside.layers(run)),
        ("position", looks, lambda: inside.position(run)),
        ("source", f"{key} {run.fold.sources.losses.num_looks}", lambda: inside.source(run)),
        ("ranks", looks, lambda: inside.ranks(run)),
        ("ring", f"{looks} {key} {_ring_key(run)}", lambda: checkpoint.ring(run)),
    ]
    made |= {name: (name, state, _or_empty(make)) for name, state, make in late}
    return [made[name] for name in _ORDER]


def _always(part: Html) -> Callable[[], Html]:
    return lambda: part


def _or_empty(make: Callable[[], Html | None]) -> Callable[[], Html]:
    return lambda: make() or Html("")


def _ring_key(run: RunReader) -> str:
    """Changes with the checkpoints, and now and then for their ages."""
    found = ",".join(f"{one.serial}{one.state.value}" for one in run.checkpoints())
    return f"{found} {int(run.clock()) // _AGES_SECONDS} {run.is_alive()}"


def name_of(run: RunReader) -> str:
    """The run, as a person calls it."""
    out = run.run_dir.out
    return out.name or str(out.resolve())


def policy(style: str, scripts: Sequence[str], *, is_live: bool) -> str:
    """The Content-Security-Policy of a page that holds just these."""
    allowed = " ".join(f"'sha256-{_digest(one)}'" for one in scripts)
    parts = [
        "default-src 'none'",
        f"script-src {allowed}",
        f"style-src 'sha256-{_digest(style)}'",
        "img-src data:",  # a browser's own pictures of an element that is printed or dragged
        *(["connect-src 'self'"] if is_live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(parts)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(runs: Sequence[RunReader], *, is_live: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"live": is_live, "runs": [data_of(run) for run in runs]}
    if len(runs) > 1:
        made["compare"] = comparison_data(runs, [name_of(run) for run in runs])
    return made
